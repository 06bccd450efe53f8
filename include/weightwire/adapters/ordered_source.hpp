#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <range/v3/algorithm/stable_sort.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/indices.hpp>
#include <range/v3/view/transform.hpp>

#include <weightwire/adapters/adapted_source.hpp>
#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// A source in another order: what `in_order` of range_v3.hpp makes.

namespace weightwire {

/// What `in_order` makes: the tensors of an inner source in another order. All of them are asked
/// for before the first is yielded, so they must stay: the inner source's lifetime is `stable`.
template <class Inner>
    requires WeightSource<Inner> && (lifetime_of<Inner>() == tensor_lifetime::stable)
class ordered_source {
    using source_type = std::remove_reference_t<Inner>;

public:
    static constexpr tensor_lifetime lifetime = tensor_lifetime::stable;

    /// @param inner moved in, or referenced where `Inner` is a reference.
    /// @param less a strict weak order over `param_meta`; equal ones keep their order.
    template <std::strict_weak_order<const param_meta&, const param_meta&> Less>
    ordered_source(Inner&& inner, Less less)
        : inner_{std::forward<Inner>(inner)}, inner_metadata_{detail::metadata_of(inner_.get())} {
        auto order =
            ranges::views::indices(inner_metadata_.size()) | ranges::to<std::vector<std::size_t>>();
        ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
            return std::invoke(less, std::as_const(inner_metadata_)[a],
                               std::as_const(inner_metadata_)[b]);
        });
        metadata_ = order |
                    ranges::views::transform([this](std::size_t i) { return inner_metadata_[i]; }) |
                    ranges::to<std::vector>();
        outer_of_.resize(order.size());
        for (const auto [outer, inner_place] : ranges::views::enumerate(order)) {
            outer_of_[inner_place] = outer;
        }
        all_.resize(order.size());
    }

    [[nodiscard]] std::span<const param_meta> metadata() const noexcept { return metadata_; }
    /// Walks a whole round of the inner source; valid until the next call.
    /// @throws data_error the inner source disagrees with its metadata.
    [[nodiscard]] std::span<const named_tensor> weights() {
        std::ranges::fill(all_, named_tensor{});
        detail::checked_round<source_type> round{inner_.get(), inner_metadata_};
        while (round.next()) {
            const auto outer = outer_of_[round.position()];
            all_[outer] = round.current();
            all_[outer].name = metadata_[outer].name;
        }
        // Tensors that did not come have no name: only a source that holds but some may leave such.
        if constexpr (HasHeldNames<source_type>) {
            yielded_ = all_ |
                       ranges::views::filter([](const auto& each) { return !each.name.empty(); }) |
                       ranges::to<std::vector>();
            return yielded_;
        } else {
            require_all();
            return all_;
        }
    }
    [[nodiscard]] std::vector<std::string_view> held_names()
        requires HasHeldNames<source_type>
    {
        std::vector<std::string_view> held;
        for (const std::string_view name : inner_.get().held_names()) {
            held.push_back(name);
        }
        return held;
    }
    void read(const named_tensor& tensor, std::uint64_t offset, std::span<std::byte> to)
        requires HasRead<source_type>
    {
        inner_.get().read(tensor, offset, to);
    }

private:
    void require_all() const {
        const auto missing =
            std::ranges::find_if(all_, [](const named_tensor& each) { return each.name.empty(); });
        if (missing != all_.end()) {
            throw data_error{
                "an adapted source ended before this tensor, which its metadata names",
                {.phase = phase::update,
                 .tensor = metadata_[static_cast<std::size_t>(missing - all_.begin())].name}};
        }
    }

    detail::source_holder<Inner> inner_;
    std::vector<param_meta> inner_metadata_;
    std::vector<param_meta> metadata_;
    std::vector<std::size_t> outer_of_;
    std::vector<named_tensor> all_;
    std::vector<named_tensor> yielded_;
};

}  // namespace weightwire
