#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <string>
#include <string_view>

#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/packing.hpp>

/// @file
/// What a trainer says to choose `cuda_ipc`: workers on its own machine read its device memory.

namespace weightwire::cuda_ipc {

/// The tag.
struct backend {};

/// Chooses `cuda_ipc`. Sizes are in bytes.
struct trainer_init_info {
    using backend = cuda_ipc::backend;

    /// False: tensors of a source with stable addresses are read from where they are; what cannot
    /// be exported, or is not stable, is copied through a ring, which the description says.
    /// True: all pass through the ring, whole tensors to a buffer.
    bool packed = false;
    /// One buffer of the ring. Packed, a tensor larger than it is an error. Otherwise it is a lower
    /// bound: a buffer is made as large as its largest tensor, and no larger than what passes.
    std::uint64_t packed_buffer_size_bytes = std::uint64_t{1} << 30U;
    /// Buffers of the ring; two let one be filled while the workers read the other.
    std::uint64_t packed_num_buffers = 2;
    /// Digest every tensor on the device before it is announced; the worker compares before it
    /// commits. One more pass over the bytes on each side.
    bool verify = false;
    /// CUDA device of this process.
    int device = 0;
    /// Of this trainer process in its group. Every rank exports its own copy, and a worker reads
    /// the one on its own GPU; rank 0 speaks.
    int rank = 0;
    /// Towards vLLM, packed: send a tensor of no dimensions as one of shape [1], which vLLM can
    /// take. Without it such a tensor is an error.
    bool zero_dim_as_one = false;

    /// The JSON object that travels to every peer. docs/wire.md has its form.
    [[nodiscard]] std::string init_message() const {
        std::string text;
        wire::json_writer out{text};
        out.begin_object().key("packed").boolean(packed).end_object();
        return text;
    }
};

/// What is wrong with a user's values, in words; empty when nothing is.
[[nodiscard]] inline std::string_view fault_of(const trainer_init_info& info) noexcept {
    if (info.rank < 0) {
        return "rank has to be 0 or above";
    }
    if (info.device < 0) {
        return "device has to be 0 or above";
    }
    return wire::fault_of_buffers({.packed = info.packed,
                                   .packed_buffer_size_bytes = info.packed_buffer_size_bytes,
                                   .packed_num_buffers = info.packed_num_buffers});
}

}  // namespace weightwire::cuda_ipc
