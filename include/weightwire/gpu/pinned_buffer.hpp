#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <span>
#include <utility>

#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/check.hpp>

/// @file
/// Host memory that devices reach by themselves.

namespace weightwire::gpu {

/// Owns page-locked host memory that every device of the process may address.
///
/// Locking pages is slow and takes them from the rest of the machine: make buffers once, in bounded
/// sizes. The holder sees to it that no work still uses the memory when the buffer ends.
class pinned_buffer {
public:
    pinned_buffer() noexcept = default;

    /// @throws resource_error the machine gives no more pinned memory.
    explicit pinned_buffer(std::size_t bytes) : size_{bytes} {
        if (bytes != 0) {
            error_context context;
            context.bytes_total = bytes;
            check(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable), "cudaHostAlloc",
                  std::move(context));
        }
    }
    ~pinned_buffer() { reset(); }
    pinned_buffer(pinned_buffer&& other) noexcept
        : data_{std::exchange(other.data_, nullptr)}, size_{std::exchange(other.size_, 0)} {}
    pinned_buffer& operator=(pinned_buffer&& other) noexcept {
        if (this != &other) {
            reset();
            data_ = std::exchange(other.data_, nullptr);
            size_ = std::exchange(other.size_, 0);
        }
        return *this;
    }

    [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data(), size_}; }

private:
    void reset() noexcept {
        if (data_ != nullptr) {
            static_cast<void>(cudaFreeHost(data_));
            data_ = nullptr;
        }
    }

    void* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace weightwire::gpu
