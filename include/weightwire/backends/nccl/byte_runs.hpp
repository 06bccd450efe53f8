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

namespace weightwire::nccl::detail {

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

/// Whether a tensor can be moved run by run.
/// @throws unsupported_error more than `most` runs, or elements of no whole bytes with gaps between
/// them; names the tensor, which `where` or `where()` says, and says what to do.
template <class Byte, class Where>
void require_runs(const basic_tensor_view<Byte>& tensor, std::uint64_t most, Where&& where) {
    if (tensor.byte_size() == 0 || tensor.is_contiguous()) {
        return;
    }
    const auto folded = weightwire::detail::fold_runs(tensor.extents(), tensor.strides());
    const bool whole = item_bits(tensor.type()) % 8 == 0;
    const auto run = static_cast<std::uint64_t>(folded.run) * (item_bits(tensor.type()) / 8);
    if (whole && tensor.byte_size() / run <= most) {
        return;
    }
    throw unsupported_error{
        "this tensor on the device lies in " +
            (whole ? std::to_string(tensor.byte_size() / run) + " runs, more than the " +
                         std::to_string(most) + " that are moved"
                   : std::string{"runs of no whole bytes"}) +
            "; give it a contiguous layout",
        context_from(where)};
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

}  // namespace weightwire::nccl::detail
