#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// `WeightSource`: what to send.
///
/// Semantics the compiler cannot check:
/// - `metadata()` and `weights()` agree element for element: name, dtype, shape, order. The engine
/// checks every pair
///   before the wire and names the first that differs.
/// - `weights()` gives a *fresh* range each time it is called, once a round. Advancing it may be
/// slow and may be a
///   collective among the trainer's ranks; it is advanced from the thread that calls
///   `send_weights()`, in order, and on every rank to its end, also when the round has already
///   failed.
/// - A yielded tensor stays valid and unchanged for as long as `lifetime_of` says.
/// - Exceptions end the round on every rank with that error.
///
/// Complexity: `metadata()` is called once, at init. Model: a range of tensors (`span_source`).
/// Non-model: a bare `std::map<std::string, tensor>`, which has no order that both sides could
/// agree on.

namespace weightwire {

/// How long a yielded tensor's memory stays valid and unchanged. A backend that needs more than its
/// source grants copies into its own memory and says so.
enum class tensor_lifetime : std::uint8_t {
    until_next,       ///< until the range is advanced
    until_group_end,  ///< until the first tensor of the next group is asked for
    /// Until `send_weights()` returns, every round in the same allocation at the same address.
    stable,
};

/// `source.metadata()` is a range of `param_meta`, in sending order.
template <class S>
concept HasMetadata = requires(S& source) {
    { source.metadata() } -> std::ranges::input_range;
    requires std::convertible_to<std::ranges::range_reference_t<decltype(source.metadata())>,
                                 param_meta>;
};

/// `source.weights()` is a range of `named_tensor`, in metadata order, fresh each round.
template <class S>
concept HasWeights = requires(S& source) {
    { source.weights() } -> std::ranges::input_range;
    requires std::convertible_to<std::ranges::range_reference_t<decltype(source.weights())>,
                                 named_tensor>;
};

/// What to send.
template <class S>
concept WeightSource =
    HasMetadata<std::remove_reference_t<S>> && HasWeights<std::remove_reference_t<S>>;

/// Optional: the names that this trainer rank holds; a rank without it holds all. Read by
/// `sharded_pull`.
template <class S>
concept HasHeldNames = requires(S& source) {
    { source.held_names() } -> std::ranges::input_range;
    requires std::convertible_to<std::ranges::range_reference_t<decltype(source.held_names())>,
                                 std::string_view>;
};

/// Optional: sizes of the gather groups, in metadata order; without it groups are cut by position
/// (`plan::group_sizes`).
template <class S>
concept HasGroups = requires(S& source) {
    { source.groups() } -> std::ranges::input_range;
    requires std::convertible_to<std::ranges::range_reference_t<decltype(source.groups())>,
                                 std::size_t>;
};

/// Optional: the tensors of one group alone.
template <class S>
concept HasGroupWeights = requires(S& source, std::size_t group) {
    { source.weights(group) } -> std::ranges::input_range;
    requires std::convertible_to<std::ranges::range_reference_t<decltype(source.weights(group))>,
                                 named_tensor>;
};

/// Optional: `source.read(tensor, offset, to)` copies bytes `[offset, offset + to.size())`, in C
/// order, of a tensor that it has yielded and that is still valid to `to`, by another way than
/// through its address. The tensor may have got another name meanwhile, from an adaptor. A backend
/// that copies host memory asks for it first. It is for memory that may be gone when it is touched,
/// such as a mapped file that somebody cuts short: a read can be an error, a touch is a signal. Not
/// called for a tensor that the workers read in place.
template <class S>
concept HasRead = requires(S& source, const named_tensor& tensor, std::uint64_t offset,
                           std::span<std::byte> to) { source.read(tensor, offset, to); };

/// Optional: how long yielded tensors stay valid, known at compile time.
template <class S>
concept HasLifetime = requires {
    { S::lifetime } -> std::convertible_to<tensor_lifetime>;
};

/// Customisation point for source types that you do not own: specialise with `static constexpr
/// tensor_lifetime lifetime`. The primary is empty.
template <class S>
struct source_traits {};

/// The lifetime that `S` grants: `source_traits<S>`, then a member, then the safe default
/// `until_next`.
template <class S>
[[nodiscard]] consteval tensor_lifetime lifetime_of() {
    using source = std::remove_cvref_t<S>;
    if constexpr (HasLifetime<source_traits<source>>) {
        return source_traits<source>::lifetime;
    } else if constexpr (HasLifetime<source>) {
        return source::lifetime;
    } else {
        return tensor_lifetime::until_next;
    }
}

/// One readable line for every member that `S` lacks; call it under your type's definition.
template <class S>
consteval bool explain_weight_source() {
    static_assert(HasMetadata<S>,
                  "WeightSource: add metadata() returning a range of weightwire::param_meta in "
                  "sending order");
    static_assert(HasWeights<S>,
                  "WeightSource: add weights() returning a fresh input range of "
                  "weightwire::named_tensor each round");
    return WeightSource<S>;
}

namespace archetypes {

/// The least that models `WeightSource`.
struct weight_source {
    std::vector<param_meta> metadata() const { return {}; }
    std::vector<named_tensor> weights() { return {}; }
};

}  // namespace archetypes

static_assert(WeightSource<archetypes::weight_source>);

}  // namespace weightwire
