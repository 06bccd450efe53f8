#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/shape.hpp>

/// @file
/// What will be sent, in order: the list of parameters that both sides must agree on.

namespace weightwire {

/// One parameter: what a source promises and a sink expects.
struct param_meta {
    std::string name;  ///< checkpoint name
    weightwire::dtype dtype = weightwire::dtype::u8;
    weightwire::shape shape{};

    /// Bytes of the contiguous tensor. A manifest has checked that they exist.
    [[nodiscard]] std::uint64_t byte_size() const noexcept {
        return checked_byte_size(dtype, shape).value_or(0);
    }
    friend bool operator==(const param_meta&, const param_meta&) = default;
};

/// An ordered list of parameters with distinct names and sizes that fit, and the name of the set
/// they form. Immutable once made; moving keeps the views into it valid.
class manifest {
public:
    manifest() = default;
    /// @param parameters in the order in which they will be sent.
    /// @param set_name `model`, or an adapter's or draft model's name: versions and hashes are per
    /// set.
    /// @throws data_error a name twice or empty, or a size that overflows; names the tensor.
    explicit manifest(std::vector<param_meta> parameters, std::string set_name = "model")
        : parameters_{std::move(parameters)}, set_name_{std::move(set_name)} {
        index_.reserve(parameters_.size());
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            const auto& parameter = parameters_[i];
            const auto bytes = checked_byte_size(parameter.dtype, parameter.shape);
            if (!bytes) {
                throw data_error{"the size of " + to_string(parameter.shape) + " in " +
                                     std::string{to_string(parameter.dtype)} +
                                     " is no whole number of bytes below 2^64",
                                 {.tensor = parameter.name}};
            }
            const auto total = checked_add(total_bytes_, *bytes);
            if (parameter.name.empty() || !total) {
                throw data_error{
                    total ? "a parameter has no name" : "the sizes add up to more than 2^64 bytes",
                    {.tensor = parameter.name}};
            }
            total_bytes_ = *total;
            if (!index_.emplace(std::string_view{parameter.name}, i).second) {
                throw data_error{"the name occurs twice in the list", {.tensor = parameter.name}};
            }
        }
    }
    manifest(manifest&&) noexcept = default;
    manifest& operator=(manifest&&) noexcept = default;
    /// Copies rebuild the index.
    manifest(const manifest& other) : manifest{other.parameters_, other.set_name_} {}
    manifest& operator=(const manifest& other) { return *this = manifest{other}; }
    ~manifest() = default;

    [[nodiscard]] std::span<const param_meta> parameters() const& noexcept { return parameters_; }
    std::span<const param_meta> parameters() const&& = delete;
    [[nodiscard]] std::size_t size() const noexcept { return parameters_.size(); }
    [[nodiscard]] const param_meta& operator[](std::size_t i) const noexcept {
        return parameters_[i];
    }
    [[nodiscard]] const std::string& set_name() const noexcept { return set_name_; }
    [[nodiscard]] std::uint64_t total_bytes() const noexcept { return total_bytes_; }

    static constexpr std::size_t npos = static_cast<std::size_t>(-1);
    /// Position of `name`, or `npos`. Constant time.
    [[nodiscard]] std::size_t find(std::string_view name) const noexcept {
        const auto found = index_.find(name);
        return found == index_.end() ? npos : found->second;
    }

    /// A 64-bit hash of set name, names, dtypes, shapes and order; docs/wire.md says how it is
    /// made.
    [[nodiscard]] std::uint64_t hash() const {
        std::string text = set_name_ + "\n";
        for (const auto& parameter : parameters_) {
            text.append(parameter.name)
                .append("\n")
                .append(to_string(parameter.dtype))
                .append(to_string(parameter.shape));
            text.append("\n");
        }
        return digest(std::as_bytes(std::span{text}));
    }

private:
    std::vector<param_meta> parameters_;
    std::string set_name_ = "model";
    std::uint64_t total_bytes_ = 0;
    std::unordered_map<std::string_view, std::size_t> index_;
};

}  // namespace weightwire
