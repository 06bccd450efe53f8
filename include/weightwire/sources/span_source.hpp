#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// Tensors that lie in memory, as a `WeightSource`.

namespace weightwire {

/// The tensors of a range, in its order. Owns copies of the names and of the views, not the
/// weights: their memory must outlive every round, and whoever trains changes it between rounds.
///
/// Models `WeightSource`; addresses are stable. Several threads may read it at the same time.
class span_source {
public:
    static constexpr tensor_lifetime lifetime = tensor_lifetime::stable;

    span_source() = default;
    /// @param tensors a span, a vector or any other range of `named_tensor`; read once.
    template <std::ranges::input_range Tensors>
        requires(std::convertible_to<std::ranges::range_reference_t<Tensors>, named_tensor> &&
                 !std::same_as<std::remove_cvref_t<Tensors>, span_source>)
    explicit span_source(Tensors&& tensors) {
        for (auto&& each : tensors) {
            const named_tensor tensor = each;
            metadata_.push_back(
                {std::string{tensor.name}, tensor.tensor.type(), tensor.tensor.extents()});
            tensors_.push_back(tensor);
        }
        for (std::size_t i = 0; i < tensors_.size(); ++i) {
            tensors_[i].name = metadata_[i].name;
        }
    }
    /// @param tensors by name, in braces.
    span_source(std::initializer_list<named_tensor> tensors)
        : span_source{std::span{tensors.begin(), tensors.size()}} {}
    span_source(span_source&&) noexcept = default;
    span_source& operator=(span_source&&) noexcept = default;
    /// A copy has its own names.
    span_source(const span_source& other) : span_source{std::span{other.tensors_}} {}
    span_source& operator=(const span_source& other) { return *this = span_source{other}; }
    ~span_source() = default;

    [[nodiscard]] std::span<const param_meta> metadata() const noexcept { return metadata_; }
    [[nodiscard]] std::span<const named_tensor> weights() const noexcept { return tensors_; }

private:
    std::vector<param_meta> metadata_;
    std::vector<named_tensor> tensors_;
};

static_assert(WeightSource<span_source>);

}  // namespace weightwire
