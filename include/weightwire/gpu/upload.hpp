#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <span>

#include <cuda_runtime_api.h>

#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/stream.hpp>

/// @file
/// Tables from the host to a device.

namespace weightwire::gpu {

/// Brings `table` to `to` at `offset` and returns when it is there: the host memory is free, and
/// every stream sees the table.
///
/// @param on a stream of the buffer's device in which nothing waits for a peer, since this waits
/// for it without a deadline; best one that is idle. It is never the legacy stream, which would put
/// the copy behind the work of all blocking streams of the process.
/// @throws resource_error the copy, or earlier work in the stream, failed.
inline void upload(const device_buffer& to, std::size_t offset, std::span<const std::byte> table,
                   stream_ref on) {
    if (table.empty()) {
        return;
    }
    check(cudaMemcpyAsync(to.data() + offset, table.data(), table.size(), cudaMemcpyHostToDevice,
                          on.native_handle()),
          "cudaMemcpyAsync");
    on.synchronize();
}

}  // namespace weightwire::gpu
