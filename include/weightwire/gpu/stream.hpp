#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <utility>

#include <cuda_runtime_api.h>

#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_guard.hpp>

/// @file
/// Streams: the reference that every asynchronous function takes, and the owner.

namespace weightwire::gpu {

/// A stream that somebody else owns. Made from a `cudaStream_t` and from `stream`; not from an
/// integer and not from `nullptr`, which are mistakes more often than the legacy default stream:
/// who means that one says `cudaStreamLegacy`.
class stream_ref {
public:
    stream_ref(cudaStream_t native) noexcept  // NOLINT(google-explicit-constructor)
        : native_{native} {}
    stream_ref(int) = delete;
    stream_ref(std::nullptr_t) = delete;

    [[nodiscard]] cudaStream_t native_handle() const noexcept { return native_; }

    /// Whether all work given so far is done. Does not wait.
    /// @throws resource_error some of that work failed.
    [[nodiscard]] bool is_idle() const {
        const cudaError_t status = cudaStreamQuery(native_);
        if (status == cudaErrorNotReady) {
            static_cast<void>(cudaGetLastError());
            return false;
        }
        check(status, "cudaStreamQuery");
        return true;
    }

    /// Waits until all work given so far is done. For set-up and tear-down: it knows no deadline.
    /// @throws resource_error some of that work failed.
    void synchronize() const { check(cudaStreamSynchronize(native_), "cudaStreamSynchronize"); }

private:
    cudaStream_t native_;
};

/// Owns a stream that does not synchronize with the legacy default stream.
class stream {
public:
    /// @param device where the stream works; the current device stays current.
    /// @param priority lower is more urgent; 0 is the default of CUDA.
    explicit stream(int device, int priority = 0) {
        const device_guard guard{device};
        check(cudaStreamCreateWithPriority(&native_, cudaStreamNonBlocking, priority),
              "cudaStreamCreateWithPriority");
    }
    ~stream() { reset(); }
    stream(stream&& other) noexcept : native_{std::exchange(other.native_, nullptr)} {}
    stream& operator=(stream&& other) noexcept {
        if (this != &other) {
            reset();
            native_ = std::exchange(other.native_, nullptr);
        }
        return *this;
    }

    /// Takes over a stream that was made elsewhere.
    [[nodiscard]] static stream from_native(cudaStream_t native) noexcept { return stream{native}; }
    [[nodiscard]] cudaStream_t native_handle() const noexcept { return native_; }
    /// Gives the stream up; the caller destroys it.
    [[nodiscard]] cudaStream_t release() noexcept { return std::exchange(native_, nullptr); }

    operator stream_ref() const noexcept {  // NOLINT(google-explicit-constructor)
        return stream_ref{native_};
    }
    [[nodiscard]] bool is_idle() const { return stream_ref{native_}.is_idle(); }
    void synchronize() const { stream_ref{native_}.synchronize(); }

private:
    explicit stream(cudaStream_t native) noexcept : native_{native} {}

    /// Does not wait: the work that was given still runs to its end.
    void reset() noexcept {
        if (native_ != nullptr) {
            static_cast<void>(cudaStreamDestroy(native_));
            native_ = nullptr;
        }
    }

    cudaStream_t native_ = nullptr;
};

}  // namespace weightwire::gpu
