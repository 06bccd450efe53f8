#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <utility>

#include <cuda_runtime_api.h>

#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/stream.hpp>

/// @file
/// Events: points in a stream that another stream or the host can look at.

namespace weightwire::gpu {

/// Whether an event keeps the time; one that does costs a little more.
enum class event_timing : bool { off, on };

/// Owns an event.
class event {
public:
    /// @param device the device of the streams that will record it; the current one stays current.
    explicit event(int device, event_timing timing = event_timing::off) {
        const device_guard guard{device};
        const unsigned int flags =
            timing == event_timing::on ? cudaEventDefault : cudaEventDisableTiming;
        check(cudaEventCreateWithFlags(&native_, flags), "cudaEventCreateWithFlags");
    }
    ~event() { reset(); }
    event(event&& other) noexcept : native_{std::exchange(other.native_, nullptr)} {}
    event& operator=(event&& other) noexcept {
        if (this != &other) {
            reset();
            native_ = std::exchange(other.native_, nullptr);
        }
        return *this;
    }

    [[nodiscard]] cudaEvent_t native_handle() const noexcept { return native_; }

    /// Marks the point after all work given to `on` so far.
    void record(stream_ref on) {
        check(cudaEventRecord(native_, on.native_handle()), "cudaEventRecord");
    }

    /// Work given to `later` from now on starts after the recorded point. The host does not wait.
    void make_wait(stream_ref later) const {
        check(cudaStreamWaitEvent(later.native_handle(), native_, 0), "cudaStreamWaitEvent");
    }

    /// Whether the recorded point was reached; true for an event never recorded. Does not wait.
    /// @throws resource_error work before the point failed.
    [[nodiscard]] bool is_done() const {
        const cudaError_t status = cudaEventQuery(native_);
        if (status == cudaErrorNotReady) {
            static_cast<void>(cudaGetLastError());
            return false;
        }
        check(status, "cudaEventQuery");
        return true;
    }

    /// Waits for the recorded point, without a deadline: poll `is_done` where one is needed.
    void synchronize() const { check(cudaEventSynchronize(native_), "cudaEventSynchronize"); }

private:
    void reset() noexcept {
        if (native_ != nullptr) {
            static_cast<void>(cudaEventDestroy(native_));
            native_ = nullptr;
        }
    }

    cudaEvent_t native_ = nullptr;
};

/// Device time between two points that were reached, both of events with `event_timing::on`.
[[nodiscard]] inline std::chrono::duration<double> elapsed(const event& from, const event& to) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, from.native_handle(), to.native_handle()),
          "cudaEventElapsedTime");
    return std::chrono::duration<double, std::milli>{static_cast<double>(milliseconds)};
}

}  // namespace weightwire::gpu
