#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstddef>
#include <stop_token>
#include <thread>

#include <cuda_runtime_api.h>

#include <weightwire/core/deadline.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/stream.hpp>

/// @file
/// Small steps over memory and streams, for layers that include no header of CUDA.

namespace weightwire::gpu {

/// Puts a copy into `on`, from and to memory of any kind. Pageable host memory is read or written
/// before this returns.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes, stream_ref on) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, on.native_handle()),
          "cudaMemcpyAsync");
}

/// Puts zeros over device memory into `on`.
inline void clear_bytes(std::byte* to, std::size_t bytes, stream_ref on) {
    check(cudaMemsetAsync(to, 0, bytes, on.native_handle()), "cudaMemsetAsync");
}

/// Waits until a tensor is valid: for the work of the stream that makes it.
/// @param ready a `cudaStream_t`, of any device; null: it is valid.
inline void wait_for_producer(void* ready) {
    if (ready != nullptr) {
        stream_ref{static_cast<cudaStream_t>(ready)}.synchronize();
    }
}

/// Waits for a stream, for a time.
/// @returns whether all its work is done; false at the deadline and at the stop.
/// @throws resource_error some of that work failed.
[[nodiscard]] inline bool wait_until_idle(stream_ref on, deadline until,
                                          const std::stop_token& stop) {
    using std::chrono::microseconds;
    const auto began = deadline::clock::now();
    while (!on.is_idle()) {
        if (until.expired() || stop.stop_requested()) {
            return false;
        }
        // Short work is met at once; long work leaves the processor alone.
        if (deadline::clock::now() - began < microseconds{50}) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(microseconds{50});
        }
    }
    return true;
}

}  // namespace weightwire::gpu
