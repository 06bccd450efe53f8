#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <map>

#include <cuda_runtime_api.h>

#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/stream.hpp>

/// @file
/// Points in streams of other devices.

namespace weightwire::gpu {

/// Records events of one device in streams of any device of the process. CUDA records an event only
/// in streams of its own device: for another one, a stream of this device waits for an event there
/// and is recorded. Used by one thread at a time.
class stream_relay {
public:
    explicit stream_relay(int device) : device_{device}, relay_{device} {}

    /// Marks the point after all work given to `asked` so far.
    /// @param point an event of this relay's device.
    void record_after(event& point, stream_ref asked) {
        const device_guard guard{device_};
        const int other = device_of(asked);
        if (other == device_) {
            point.record(asked);
            return;
        }
        const auto there = foreign_.try_emplace(other, other).first;
        {
            const device_guard at_the_stream{other};
            there->second.record(asked);
        }
        there->second.make_wait(relay_);
        point.record(relay_);
    }

private:
    /// A driver that is too old to say counts as this device: recording then says what is wrong.
    [[nodiscard]] int device_of(stream_ref asked) const {
        int device = device_;
        const auto status = cudaStreamGetDevice(asked.native_handle(), &device);
        if (status == cudaErrorCallRequiresNewerDriver) {
            static_cast<void>(cudaGetLastError());
            return device_;
        }
        check(status, "cudaStreamGetDevice");
        return device;
    }

    int device_;
    stream relay_;                  ///< where users' streams of other devices are waited for
    std::map<int, event> foreign_;  ///< of those devices
};

}  // namespace weightwire::gpu
