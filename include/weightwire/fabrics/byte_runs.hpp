#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

/// @file
/// A strided tensor as runs of bytes that lie together.

namespace weightwire::detail {

/// Runs of one tensor that a table may hold: 24 bytes each, and more than this is a layout that
/// the owner copies better.
inline constexpr std::uint64_t most_table_runs = std::uint64_t{1} << 20U;
/// Runs of one tensor that are copied by one call each.
inline constexpr std::uint64_t most_copied_runs = 4096;

/// What `where` says, or what it returns: a callable costs nothing until something fails, where a
/// context would copy a tensor's name.
template <class Where>
[[nodiscard]] error_context context_from(Where&& where) {
    if constexpr (std::is_invocable_v<Where&>) {
        return where();
    } else {
        return where;
    }
}

/// @param run elements of a run.
template <class Where>
void require_run_count(std::uint64_t bytes, dtype type, std::int64_t run, std::uint64_t most,
                       Where&& where) {
    const bool whole = item_bits(type) % 8 == 0;
    const auto run_bytes = static_cast<std::uint64_t>(run) * (item_bits(type) / 8);
    if (whole && bytes / run_bytes <= most) {
        return;
    }
    throw unsupported_error{
        "this tensor on the device lies in " +
            (whole ? std::to_string(bytes / run_bytes) + " runs, more than the " +
                         std::to_string(most) + " that are moved"
                   : std::string{"runs of no whole bytes"}) +
            "; give it a contiguous layout",
        context_from(where)};
}

/// Whether a tensor can be moved run by run.
/// @throws unsupported_error more than `most` runs, or elements of no whole bytes with gaps between
/// them; names the tensor, which `where` or `where()` says, and says what to do.
template <class Byte, class Where>
void require_runs(const basic_tensor_view<Byte>& tensor, std::uint64_t most, Where&& where) {
    if (tensor.byte_size() == 0 || tensor.is_contiguous()) {
        return;
    }
    const auto folded = fold_runs(tensor.extents(), tensor.strides());
    require_run_count(tensor.byte_size(), tensor.type(), folded.run, most, where);
}

/// The same for the pieces that lie together in both of two tensors of equal dtype and extents.
/// @throws unsupported_error as `require_runs`.
template <class A, class B, class Where>
void require_run_pairs(const basic_tensor_view<A>& a, const basic_tensor_view<B>& b,
                       std::uint64_t most, Where&& where) {
    if (a.byte_size() == 0 || (a.is_contiguous() && b.is_contiguous())) {
        return;
    }
    const auto folded = fold_runs(a.extents(), a.strides(), b.strides());
    require_run_count(a.byte_size(), a.type(), folded.run, most, where);
}

/// Calls `visit(address, bytes)` for each run, in C order.
/// @throws unsupported_error as `require_runs`.
template <class Byte, class Where, class Visit>
void each_byte_run(const basic_tensor_view<Byte>& tensor, std::uint64_t most, Where&& where,
                   Visit visit) {
    if (tensor.byte_size() == 0) {
        return;
    }
    require_runs(tensor, most, where);
    for_each_run(
        tensor, [&](Byte* at, std::size_t bytes) { visit(at, static_cast<std::uint64_t>(bytes)); });
}

}  // namespace weightwire::detail
