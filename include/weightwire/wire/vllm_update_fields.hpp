#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/parameter_lists.hpp>

/// @file
/// What vLLM's backends have in common: the lists of an update's body, and the fields beside them,
/// which each backend reads for itself.

namespace weightwire::wire::detail {

/// The members that may be absent: null is vLLM's other spelling of it.
[[nodiscard]] inline std::optional<json_value> find_present(const json_value& object,
                                                            std::string_view name) {
    auto member = object.find(name);
    return member && !member->is_null() ? member : std::nullopt;
}

/// Writes the lists of an update that sends parameters `order` of `parameters`.
/// @param zero_dim_as_one `[]` is spelt `[1]`.
/// @throws data_error a name or dtype that JSON or torch cannot carry; names the tensor.
inline void write_sent_parameters(json_writer& out, const manifest& parameters,
                                  std::span<const std::size_t> order, bool zero_dim_as_one) {
    std::vector<param_meta> sent;
    sent.reserve(order.size());
    for (const auto i : order) {
        sent.push_back(parameters[i]);
        auto& extents = sent.back().shape;
        extents = zero_dim_as_one && extents.empty() ? shape{1} : extents;
        if (traits_of(sent.back().dtype).torch.empty()) {
            throw data_error{"torch has no dtype " + std::string{to_string(sent.back().dtype)} +
                                 ", so vLLM cannot take this tensor",
                             {.phase = phase::plan, .tensor = sent.back().name}};
        }
    }
    write_parameter_lists(out, manifest{std::move(sent)}, "dtype_names");
}

/// Reads the fields of a trainer's update for `backend`, and refuses them in vLLM's words.
class update_fields {
public:
    explicit constexpr update_fields(std::string_view backend) noexcept : backend_{backend} {}

    /// @throws protocol_error always.
    [[noreturn]] void fail(std::string_view text) const {
        throw protocol_error{
            "Invalid update_info for " + std::string{backend_} + ": " + std::string{text},
            {.phase = phase::update}};
    }
    /// @throws protocol_error always: the field `name` is unknown here.
    [[noreturn]] void fail_unexpected(std::string_view name, std::string_view why = {}) const {
        fail("got an unexpected keyword argument " + quoted_for_message(name) + std::string{why});
    }

    /// The value of the field `name` as `Value`; null for null.
    /// @throws protocol_error another type than `words` say.
    template <class Value>
    [[nodiscard]] const Value* find_as(std::string_view name, const wire_value& value,
                                       std::string_view words) const {
        const auto* held = std::get_if<Value>(&value);
        if (held == nullptr && !std::holds_alternative<std::monostate>(value)) {
            fail("'" + std::string{name} + "' has to be " + std::string{words});
        }
        return held;
    }
    /// @throws protocol_error no integer, or a negative one.
    [[nodiscard]] std::optional<std::uint64_t> natural(std::string_view name,
                                                       const wire_value& value) const {
        const auto* number = find_as<std::int64_t>(name, value, "an integer above 0");
        if (number != nullptr && *number < 0) {
            fail("'" + std::string{name} + "' is negative");
        }
        return number != nullptr ? std::optional{static_cast<std::uint64_t>(*number)}
                                 : std::nullopt;
    }

    /// Fields of 0.16 to 0.24 that say what kind of update this is.
    /// @returns whether `name` is one. @throws unsupported_error not a dense one of a checkpoint.
    [[nodiscard]] bool is_of_dense_update(std::string_view name, const wire_value& value) const {
        if (name == "is_checkpoint_format") {
            const auto* format = find_as<bool>(name, value, "true or false");
            if (format != nullptr && !*format) {
                refuse("is_checkpoint_format false: this worker takes checkpoint names and shapes");
            }
            return true;
        }
        if (name == "update_kind") {
            const auto* kind = find_as<std::string>(name, value, "a string");
            if (kind != nullptr && *kind != "dense") {
                refuse("this update is sparse; this worker takes dense ones over " +
                       std::string{backend_});
            }
            return true;
        }
        if (name == "num_updates_list") {
            const auto* counts =
                find_as<std::vector<std::int64_t>>(name, value, "a list of integers");
            if (counts != nullptr && !counts->empty()) {
                refuse("this update counts sparse entries; this worker takes dense ones over " +
                       std::string{backend_});
            }
            return true;
        }
        return false;
    }

private:
    [[noreturn]] static void refuse(std::string_view text) {
        throw unsupported_error{text, {.phase = phase::update}};
    }

    std::string_view backend_;
};

}  // namespace weightwire::wire::detail
