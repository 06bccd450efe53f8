#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// Copies and exchanges between tensors of equal shape and any strides in host memory, run by run.

namespace weightwire {

namespace detail {

/// The outer dimensions of a walk, and how many elements each of its steps covers in one piece.
struct run_shape {
    std::size_t outer = 0;  ///< dimensions [0, outer) are walked
    std::int64_t run = 1;   ///< elements a step
};

/// Folds the innermost dimensions that are contiguous under all of `strides`.
template <class... Strides>
[[nodiscard]] constexpr run_shape fold_runs(const shape& extents,
                                            const Strides&... strides) noexcept {
    run_shape folded{extents.size(), 1};
    while (folded.outer > 0) {
        const auto dimension = folded.outer - 1;
        if (extents[dimension] != 1 && !((strides[dimension] == folded.run) && ...)) {
            break;
        }
        folded.run *= extents[dimension];
        --folded.outer;
    }
    return folded;
}

/// Whether a walk goes on after `visit(at)`: one that answers nothing never ends it.
template <class Visit, class At>
constexpr bool visits_on(Visit& visit, const At& at) {
    if constexpr (std::is_void_v<decltype(visit(at))>) {
        visit(at);
        return true;
    } else {
        return visit(at);
    }
}

/// Calls `visit(offsets)` once a run, in C order; `offsets` has one element offset for each of
/// `strides`. Ends where `visit` returns false. The extents are not zero.
/// @returns whether all runs were visited.
template <class Visit, class... Strides>
constexpr bool walk_runs(const shape& extents, const run_shape& folded, Visit&& visit,
                         const Strides&... strides) {
    constexpr std::size_t count = sizeof...(Strides);
    const std::array<const basic_tensor_view<std::byte>::strides_type*, count> steps{&strides...};
    std::array<std::int64_t, count> at{};
    std::array<std::int64_t, max_dimensions> index{};
    for (;;) {
        if (!visits_on(visit, at)) {
            return false;
        }
        std::size_t dimension = folded.outer;
        for (; dimension > 0; --dimension) {
            const auto d = dimension - 1;
            const bool more = ++index[d] < extents[d];
            for (std::size_t s = 0; s < count; ++s) {
                const auto step = (*steps[s])[d];
                at[s] += more ? step : -step * (extents[d] - 1);
            }
            if (more) {
                break;
            }
            index[d] = 0;
        }
        if (dimension == 0) {
            return true;
        }
    }
}

/// Exchanges two pieces of memory through a buffer that stays in the first-level cache: three
/// copies of a block, of which the memory sees two. Anything larger would cost a third copy of the
/// model.
template <class GoOn>
bool exchange_runs(std::byte* a, std::byte* b, std::size_t bytes, GoOn& go_on) noexcept {
    constexpr std::size_t block = std::size_t{16} << 10U;
    std::array<std::byte, block> held;
    while (bytes != 0) {
        const std::size_t count = go_on(std::min(bytes, block));
        if (count == 0) {
            return false;
        }
        std::memcpy(held.data(), a, count);
        std::memcpy(a, b, count);
        std::memcpy(b, held.data(), count);
        a += count;
        b += count;
        bytes -= count;
    }
    return true;
}

}  // namespace detail

/// Calls `visit(first_byte, bytes)` for every piece of `tensor` that lies in one run of memory, in
/// C order. Elements of a strided tensor are whole bytes.
template <class Byte, class Visit>
void for_each_run(const basic_tensor_view<Byte>& tensor, Visit&& visit) {
    if (tensor.is_contiguous()) {
        if (tensor.byte_size() != 0) {
            visit(tensor.data(), tensor.byte_size());
        }
        return;
    }
    const auto item = static_cast<std::int64_t>(item_bits(tensor.type()) / 8);
    const auto folded = detail::fold_runs(tensor.extents(), tensor.strides());
    detail::walk_runs(
        tensor.extents(), folded,
        [&](const std::array<std::int64_t, 1>& at) {
            visit(tensor.data() + at[0] * item, static_cast<std::size_t>(folded.run * item));
        },
        tensor.strides());
}

/// Calls `visit(first_byte_of_a, first_byte_of_b, bytes)` in C order for every piece that lies in
/// one run of memory in both of two tensors of equal dtype and extents. Ends where `visit` returns
/// false.
/// @returns whether all pieces were visited.
template <class A, class B, class Visit>
bool for_each_run_pair(const basic_tensor_view<A>& a, const basic_tensor_view<B>& b,
                       Visit&& visit) {
    if (a.byte_size() == 0) {
        return true;
    }
    if (a.is_contiguous() && b.is_contiguous()) {
        return visit(a.data(), b.data(), a.byte_size());
    }
    const auto item = static_cast<std::int64_t>(item_bits(a.type()) / 8);
    const auto folded = detail::fold_runs(a.extents(), a.strides(), b.strides());
    const auto bytes = static_cast<std::size_t>(folded.run * item);
    return detail::walk_runs(
        a.extents(), folded,
        [&](const std::array<std::int64_t, 2>& at) {
            return visit(a.data() + at[0] * item, b.data() + at[1] * item, bytes);
        },
        a.strides(), b.strides());
}

/// Copies every element of `from` to `to`: the same dtype and extents, any strides, both in host
/// memory, not overlapping. Does not allocate.
inline void copy_tensor(const mutable_tensor_view& to, const tensor_view& from) noexcept {
    for_each_run_pair(to, from, [](std::byte* into, const std::byte* out_of, std::size_t bytes) {
        std::memcpy(into, out_of, bytes);
        return true;
    });
}

/// Exchanges every element of `a` with that of `b`: the same dtype and extents, any strides, both
/// in host memory, not overlapping. Does not allocate.
///
/// Exchanging is its own inverse, and the order in which bytes are taken is always the same: an
/// exchange that ended after `n` bytes is undone by one that ends after `n` bytes.
/// @param go_on `go_on(wanted)` before each block of at most 16 KiB: how many of the `wanted` bytes
/// to exchange now; 0 ends the exchange.
/// @returns whether all bytes were exchanged.
template <class GoOn>
bool exchange_tensors(const mutable_tensor_view& a, const mutable_tensor_view& b,
                      GoOn& go_on) noexcept {
    return for_each_run_pair(a, b, [&](std::byte* left, std::byte* right, std::size_t bytes) {
        return detail::exchange_runs(left, right, bytes, go_on);
    });
}

}  // namespace weightwire
