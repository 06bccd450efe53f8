#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <utility>

#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_guard.hpp>

/// @file
/// Memory of a device.

namespace weightwire::gpu {

/// Owns bytes of a device, from `cudaMalloc`: aligned to 256 bytes, and exportable to other
/// processes.
///
/// Freeing waits for the device, as `cudaFree` does, so buffers are made once and kept. The holder
/// sees to it that no work still uses the memory when the buffer ends.
class device_buffer {
public:
    device_buffer() noexcept = default;

    /// @param device where the memory is; the current device stays current.
    /// @param bytes 0 makes an empty buffer with a null address.
    /// @throws resource_error the device has not that much left.
    device_buffer(int device, std::size_t bytes) : size_{bytes}, device_{device} {
        if (bytes != 0) {
            const device_guard guard{device};
            error_context context;
            context.bytes_total = bytes;
            check(cudaMalloc(&data_, bytes), "cudaMalloc", std::move(context));
        }
    }
    ~device_buffer() { reset(); }
    device_buffer(device_buffer&& other) noexcept
        : data_{std::exchange(other.data_, nullptr)},
          size_{std::exchange(other.size_, 0)},
          device_{other.device_} {}
    device_buffer& operator=(device_buffer&& other) noexcept {
        if (this != &other) {
            reset();
            data_ = std::exchange(other.data_, nullptr);
            size_ = std::exchange(other.size_, 0);
            device_ = other.device_;
        }
        return *this;
    }

    [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] int device() const noexcept { return device_; }

private:
    void reset() noexcept {
        if (data_ != nullptr) {
            static_cast<void>(cudaFree(data_));
            data_ = nullptr;
        }
    }

    void* data_ = nullptr;
    std::size_t size_ = 0;
    int device_ = 0;
};

}  // namespace weightwire::gpu
