#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>

#include <cuda_runtime_api.h>

#include <weightwire/core/tensor.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/kernels/copy_kernels.hpp>
#include <weightwire/gpu/machinery_parts.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/gpu/pinned_buffer.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/gpu/stream_relay.hpp>

/// @file
/// What the machineries of backends on a GPU have in common.

namespace weightwire::gpu {

/// One device: its memory, streams and copies. To derive from. Used by one thread at a time.
class device_machinery {
public:
    static constexpr auto near_memory = memory_kind::cuda;

    using buffer = device_buffer;
    using pinned_buffer = gpu::pinned_buffer;
    using stream = gpu::stream;
    using event = gpu::event;

    [[nodiscard]] int device() const noexcept { return device_; }

    [[nodiscard]] pinned_buffer allocate_pinned(std::size_t bytes) { return pinned_buffer{bytes}; }
    [[nodiscard]] stream make_stream() { return stream{device_}; }
    [[nodiscard]] event make_event() { return event{device_}; }

    void record(event& point, const stream& on) {
        const device_guard guard{device_};
        point.record(on);
    }
    /// @param users a `cudaStream_t` of any device.
    void record_after(event& point, void* users) {
        relay_.record_after(point, stream_ref{static_cast<cudaStream_t>(users)});
    }
    /// @param users a `cudaStream_t` of any device.
    void make_source_wait(void* users, const event& point) {
        const device_guard guard{device_};
        point.make_wait(stream_ref{static_cast<cudaStream_t>(users)});
    }
    [[nodiscard]] bool is_done(const event& point) const { return point.is_done(); }
    [[nodiscard]] static bool is_idle(const stream& asked) { return asked.is_idle(); }

    /// Compiles what copies and loads it onto this device, also the form that only shifted bytes
    /// need: the driver may hold up a kernel's first load until others have ended.
    void load_kernels() { load_copy_kernels(device_); }
    /// Asynchronous where host memory is pinned.
    void copy(std::byte* to, const std::byte* from, std::size_t bytes, const stream& on) {
        const device_guard guard{device_};
        copy_bytes(to, from, bytes, on);
    }

protected:
    /// @throws unsupported_error, resource_error no such device.
    explicit device_machinery(int device)
        : device_{device},
          uploads_{device},  // names the device where it cannot be used
          relay_{device} {}

    /// Of tables; it never waits for another.
    [[nodiscard]] const stream& uploads() const noexcept { return uploads_; }

private:
    int device_;
    stream uploads_;
    stream_relay relay_;  ///< to users' streams of other devices
};

}  // namespace weightwire::gpu
