#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// Copies between tensors of equal shape and any strides in host memory, run by run.

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

/// Calls `visit(offsets)` once a run, in C order; `offsets` has one element offset for each of
/// `strides`. The extents are not zero.
template <class Visit, class... Strides>
constexpr void walk_runs(const shape& extents, const run_shape& folded, Visit&& visit,
                         const Strides&... strides) {
    constexpr std::size_t count = sizeof...(Strides);
    const std::array<const basic_tensor_view<std::byte>::strides_type*, count> steps{&strides...};
    std::array<std::int64_t, count> at{};
    std::array<std::int64_t, max_dimensions> index{};
    for (;;) {
        visit(at);
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
            return;
        }
    }
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

/// Copies every element of `from` to `to`: the same dtype and extents, any strides, both in host
/// memory, not overlapping. Does not allocate.
inline void copy_tensor(const mutable_tensor_view& to, const tensor_view& from) noexcept {
    if (from.byte_size() == 0) {
        return;
    }
    if (to.is_contiguous() && from.is_contiguous()) {
        std::memcpy(to.data(), from.data(), from.byte_size());
        return;
    }
    const auto item = static_cast<std::int64_t>(item_bits(from.type()) / 8);
    const auto folded = detail::fold_runs(from.extents(), to.strides(), from.strides());
    const auto bytes = static_cast<std::size_t>(folded.run * item);
    detail::walk_runs(
        from.extents(), folded,
        [&](const std::array<std::int64_t, 2>& at) {
            std::memcpy(to.data() + at[0] * item, from.data() + at[1] * item, bytes);
        },
        to.strides(), from.strides());
}

}  // namespace weightwire
