// SPDX-License-Identifier: Apache-2.0
// What core, plan and sources promise at compile time.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/checked.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sources/callback_source.hpp>
#include <weightwire/sources/safetensors.hpp>
#include <weightwire/sources/span_source.hpp>

namespace {

using namespace weightwire;

// Lookups, shapes and sizes are constants where their inputs are.
static_assert(dtype_from_torch("bfloat16") == dtype::bf16);
static_assert(dtype_from_safetensors("F8_E5M2") == dtype::f8_e5m2);
static_assert(!dtype_from_string("nonsense"));
static_assert(to_string(dtype::f6_e3m2) == "F6_E3M2");
static_assert(shape{2, 3}.checked_numel() == std::uint64_t{6});
static_assert(checked_byte_size(dtype::bf16, {2, 3}) == std::uint64_t{12});
static_assert(!checked_byte_size(dtype::f6_e2m3, {2, 3}));
static_assert(contiguous_strides({2, 3, 4})[0] == 12);
static_assert(!checked_multiply(1ULL << 63U, 2));
static_assert(!checked_cast<std::uint32_t>(std::int64_t{-1}));

// Views are copied in the hot path.
static_assert(std::is_trivially_copyable_v<shape>);
static_assert(std::is_trivially_copyable_v<tensor_view>);
static_assert(std::is_trivially_copyable_v<named_tensor>);

// Reading is not writing.
static_assert(std::is_convertible_v<mutable_tensor_view, tensor_view>);
static_assert(!std::is_constructible_v<mutable_tensor_view, tensor_view>);
static_assert(
    std::is_same_v<decltype(std::declval<tensor_view>().bytes()), std::span<const std::byte>>);

// There is no deadline by accident: neither from nothing, nor from a number or a duration.
static_assert(!std::is_default_constructible_v<deadline>);
static_assert(!std::is_constructible_v<deadline, int>);
static_assert(!std::is_constructible_v<deadline, std::chrono::seconds>);

// A view into a temporary manifest does not compile; moving one cannot fail.
template <class M>
concept HasParameters = requires(M&& list) { std::forward<M>(list).parameters(); };
static_assert(HasParameters<const manifest&>);
static_assert(!HasParameters<manifest>);
static_assert(std::is_nothrow_move_constructible_v<manifest>);

// Errors are copied when they are thrown, and reach the standard root.
static_assert(std::is_base_of_v<std::runtime_error, error>);
static_assert(std::is_nothrow_copy_constructible_v<std::runtime_error>);
static_assert(std::is_copy_constructible_v<usage_error>);
static_assert(!std::is_convertible_v<const char*, usage_error>);

// What ships as a source is one, by value and by reference, and grants what it says.
static_assert(WeightSource<span_source> && WeightSource<span_source&>);
static_assert(WeightSource<safetensors_source> && WeightSource<safetensors_source&>);
static_assert(WeightSource<const safetensors_source&>);
static_assert(lifetime_of<span_source>() == tensor_lifetime::stable);
static_assert(lifetime_of<const safetensors_source&>() == tensor_lifetime::stable);
static_assert(explain_weight_source<span_source>());
static_assert(explain_weight_source<safetensors_source>());
static_assert(std::is_nothrow_move_constructible_v<safetensors_source>);
static_assert(!std::is_copy_constructible_v<safetensors_source>);
static_assert(!std::is_copy_constructible_v<mapped_file>);
static_assert(!std::is_copy_constructible_v<safetensors_writer>);

using makes_views = tensor_view (*)(std::size_t);
using makes_tensors = named_tensor (*)(std::size_t);
static_assert(TensorCallback<makes_views> && TensorCallback<makes_tensors>);
static_assert(!TensorCallback<int (*)(std::size_t)> && !TensorCallback<tensor_view (*)()>);
static_assert(WeightSource<callback_source<makes_views>>);
static_assert(WeightSource<callback_source<makes_tensors>>);
static_assert(lifetime_of<callback_source<makes_views>>() == tensor_lifetime::until_next);
static_assert(std::ranges::input_range<callback_source<makes_views>::round>);

// The member speaks where there is one; without it a source grants the least.
struct member_source : archetypes::weight_source {
    static constexpr auto lifetime = tensor_lifetime::stable;
};
struct foreign_source : member_source {};
static_assert(lifetime_of<member_source&>() == tensor_lifetime::stable);
static_assert(lifetime_of<archetypes::weight_source>() == tensor_lifetime::until_next);

}  // namespace

// A trait speaks for a type that one does not own, before its member.
template <>
struct weightwire::source_traits<foreign_source> {
    static constexpr auto lifetime = tensor_lifetime::until_group_end;
};
static_assert(weightwire::lifetime_of<foreign_source&>() ==
              weightwire::tensor_lifetime::until_group_end);
