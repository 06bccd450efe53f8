#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <string>
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

/// Calls `visit(address, bytes)` for each run, in C order.
/// @throws unsupported_error more than `most` runs, or elements of no whole bytes with gaps between
/// them; names the tensor and says what to do.
template <class Byte, class Visit>
void each_byte_run(const basic_tensor_view<Byte>& tensor, std::uint64_t most,
                   const error_context& where, Visit visit) {
    if (tensor.byte_size() == 0) {
        return;
    }
    if (tensor.is_contiguous()) {
        visit(tensor.data(), static_cast<std::uint64_t>(tensor.byte_size()));
        return;
    }
    const auto folded = weightwire::detail::fold_runs(tensor.extents(), tensor.strides());
    const auto item = item_bits(tensor.type()) / 8;
    const auto run = static_cast<std::uint64_t>(folded.run) * item;
    if (item_bits(tensor.type()) % 8 != 0 || tensor.byte_size() / run > most) {
        throw unsupported_error{
            "this tensor on the device lies in " +
                (item_bits(tensor.type()) % 8 != 0
                     ? std::string{"runs of no whole bytes"}
                     : std::to_string(tensor.byte_size() / run) + " runs, more than the " +
                           std::to_string(most) + " that are moved") +
                "; give it a contiguous layout",
            where};
    }
    for_each_run(
        tensor, [&](Byte* at, std::size_t bytes) { visit(at, static_cast<std::uint64_t>(bytes)); });
}

}  // namespace weightwire::nccl::detail
