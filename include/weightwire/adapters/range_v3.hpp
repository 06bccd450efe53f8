#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <range/v3/range/conversion.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/transform.hpp>

#include <weightwire/adapters/ordered_source.hpp>
#include <weightwire/adapters/selected_source.hpp>
#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/manifest.hpp>

/// @file
/// Adaptors over any `WeightSource`, opt-in, in the manner of ranges:
///
///     auto sent = checkpoint | rename(strip_prefix) | only(is_trained) | in_order(by_name);
///
/// A result is a `WeightSource` again. An lvalue source is referenced and must live as long; an
/// rvalue is moved in. Names are made once, when the adaptor is applied, and stay where they are
/// when the result is moved. Every tensor of the inner source is asked for every round and checked
/// against the inner metadata, also one that is left out: to make it may be a collective.
///
/// What else a source may have:
/// - lifetime: the inner source's.
/// - `groups()`: `rename` and `only` keep the inner source's gather groups (its own, else the cut
/// by
///   position of its own names): what was gathered together still is, whatever it is called now. A
///   group of which `only` keeps nothing is gone. `in_order` breaks groups up, so they are cut
///   anew.
/// - `held_names()`: kept, under the new names.
/// - `weights(group)`: not passed on.

namespace weightwire {

/// What `rename`, `only` and `in_order` return: something that is piped a source. Two of them piped
/// make one.
struct source_adaptor {};

template <class A>
concept SourceAdaptor = std::derived_from<std::remove_cvref_t<A>, source_adaptor>;

/// Applies an adaptor.
template <class Source, SourceAdaptor Adaptor>
    requires(WeightSource<Source> && std::invocable<Adaptor, Source>)
[[nodiscard]] auto operator|(Source&& source, Adaptor&& adaptor) {
    return std::forward<Adaptor>(adaptor)(std::forward<Source>(source));
}

namespace detail {

template <class F>
struct rename_adaptor : source_adaptor {
    F function;
    template <class Source>
        requires WeightSource<Source>
    [[nodiscard]] auto operator()(Source&& source) const {
        using result = selected_source<Source>;
        return result{std::forward<Source>(source), [this](std::span<const param_meta> inner) {
                          return inner | ranges::views::enumerate |
                                 ranges::views::transform([this](const auto& each) {
                                     return typename result::choice{
                                         each.first,
                                         std::string{std::invoke(
                                             function, std::string_view{each.second.name})}};
                                 }) |
                                 ranges::to<std::vector>();
                      }};
    }
};

template <class P>
struct only_adaptor : source_adaptor {
    P predicate;
    template <class Source>
        requires WeightSource<Source>
    [[nodiscard]] auto operator()(Source&& source) const {
        using result = selected_source<Source>;
        return result{std::forward<Source>(source), [this](std::span<const param_meta> inner) {
                          return inner | ranges::views::enumerate |
                                 ranges::views::filter(
                                     [this](const auto& each) { return keeps(each.second); }) |
                                 ranges::views::transform([](const auto& each) {
                                     return typename result::choice{each.first, each.second.name};
                                 }) |
                                 ranges::to<std::vector>();
                      }};
    }

private:
    [[nodiscard]] bool keeps(const param_meta& parameter) const {
        if constexpr (std::predicate<const P&, const param_meta&>) {
            return std::invoke(predicate, parameter);
        } else {
            return std::invoke(predicate, std::string_view{parameter.name});
        }
    }
};

template <class Less>
struct order_adaptor : source_adaptor {
    Less less;
    template <class Source>
        requires(WeightSource<Source> && lifetime_of<Source>() == tensor_lifetime::stable)
    [[nodiscard]] auto operator()(Source&& source) const {
        return ordered_source<Source>{std::forward<Source>(source), less};
    }
};

template <class First, class Second>
struct chained_adaptor : source_adaptor {
    First first;
    Second second;
    template <class Source>
        requires WeightSource<Source>
    [[nodiscard]] auto operator()(Source&& source) const {
        return second(first(std::forward<Source>(source)));
    }
};

}  // namespace detail

/// Chains two adaptors: `(a | b)` applied to a source is `source | a | b`.
template <SourceAdaptor First, SourceAdaptor Second>
[[nodiscard]] auto operator|(First&& first, Second&& second) {
    return detail::chained_adaptor<std::remove_cvref_t<First>, std::remove_cvref_t<Second>>{
        {}, std::forward<First>(first), std::forward<Second>(second)};
}

/// Gives every parameter the name `function(name)`. Called once a parameter, when it is applied;
/// the source it is applied to then throws `data_error` where two get the same name.
template <class F>
    requires std::is_invocable_r_v<std::string, const F&, std::string_view>
[[nodiscard]] auto rename(F function) {
    return detail::rename_adaptor<F>{{}, std::move(function)};
}

/// Keeps the parameters for which `predicate` holds, in their order: a predicate over
/// `const param_meta&`, or over the name. Called once a parameter, when it is applied. A generic
/// lambda is given the `param_meta`.
template <class P>
    requires(std::predicate<const P&, const param_meta&> ||
             std::predicate<const P&, std::string_view>)
[[nodiscard]] auto only(P predicate) {
    return detail::only_adaptor<P>{{}, std::move(predicate)};
}

/// Sorts the parameters by `less`, a strict weak order over `param_meta`; equal ones keep their
/// order. Applies to sources whose lifetime is `stable` alone.
template <std::strict_weak_order<const param_meta&, const param_meta&> Less>
[[nodiscard]] auto in_order(Less less) {
    return detail::order_adaptor<Less>{{}, std::move(less)};
}

}  // namespace weightwire
