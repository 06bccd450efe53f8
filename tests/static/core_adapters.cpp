// SPDX-License-Identifier: Apache-2.0
// What the source adaptors promise at compile time.

#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/adapters/range_v3.hpp>
#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/sources/callback_source.hpp>
#include <weightwire/sources/safetensors.hpp>
#include <weightwire/sources/span_source.hpp>

namespace {

using namespace weightwire;

struct to_name {
    std::string operator()(std::string_view name) const { return std::string{name}; }
};
struct all_names {
    bool operator()(std::string_view) const { return true; }
};
struct all_metadata {
    bool operator()(const param_meta&) const { return true; }
};
struct by_name {
    bool operator()(const param_meta& a, const param_meta& b) const { return a.name < b.name; }
};

template <class Source, class Adaptor>
using adapted = decltype(std::declval<Source>() | std::declval<Adaptor>());
template <class Source, class Adaptor>
concept Adapts =
    requires(Source&& source, Adaptor adaptor) { std::forward<Source>(source) | adaptor; };

using renaming = decltype(rename(to_name{}));
using choosing = decltype(only(all_names{}));
using choosing_by_metadata = decltype(only(all_metadata{}));
using sorting = decltype(in_order(by_name{}));
using all_of_them = decltype(rename(to_name{}) | only(all_metadata{}) | in_order(by_name{}));

// Whatever is piped, from whatever source, is a source; it can be piped again.
static_assert(WeightSource<adapted<span_source, renaming>>);
static_assert(WeightSource<adapted<span_source&, renaming>>);
static_assert(WeightSource<adapted<const safetensors_source&, choosing>>);
static_assert(WeightSource<adapted<safetensors_source, choosing_by_metadata>>);
static_assert(WeightSource<adapted<adapted<span_source, sorting>, renaming>>);
static_assert(WeightSource<adapted<span_source, all_of_them>>);
static_assert(WeightSource<adapted<archetypes::weight_source, renaming>>);
static_assert(explain_weight_source<adapted<span_source, all_of_them>>());

// Lifetimes go through; only what stays can be sorted.
using one_at_a_time = callback_source<tensor_view (*)(std::size_t)>;
static_assert(lifetime_of<adapted<span_source, renaming>>() == tensor_lifetime::stable);
static_assert(lifetime_of<adapted<one_at_a_time, renaming>>() == tensor_lifetime::until_next);
static_assert(Adapts<span_source, sorting>);
static_assert(!Adapts<one_at_a_time, sorting>);

// An rvalue is moved in, an lvalue referenced.
static_assert(Adapts<safetensors_source, renaming> && Adapts<safetensors_source&, renaming>);
static_assert(!std::is_copy_constructible_v<adapted<safetensors_source, renaming>>);
static_assert(std::is_move_constructible_v<adapted<safetensors_source, renaming>>);

// What is no source cannot be piped, nor a source into what is no adaptor.
static_assert(!Adapts<std::vector<int>, renaming>);
static_assert(!Adapts<span_source, to_name>);

}  // namespace
