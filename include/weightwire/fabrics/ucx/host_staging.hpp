#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/descriptor.hpp>
#include <weightwire/fabrics/shared_memory_copy.hpp>

/// @file
/// What a UCX fabric needs of the memory that its tensors lie in: here host memory, which transfers
/// write to directly.

namespace weightwire::ucx {

/// Memory of this process alone, zero at first and allocated now: no page faults in a round.
class host_buffer {
public:
    host_buffer() noexcept = default;
    /// @throws usage_error no bytes. @throws resource_error the kernel refuses.
    explicit host_buffer(std::uint64_t bytes) {
        if (bytes == 0) {
            throw usage_error{"a buffer of no bytes"};
        }
        const auto size = checked_cast<std::size_t>(bytes);
        void* const made = size ? ::mmap(nullptr, *size, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0)
                                : MAP_FAILED;
        if (made == MAP_FAILED) {
            throw resource_error{"there is no memory for " + std::to_string(bytes) + " bytes",
                                 shm::with_errno({}, "mmap", size ? errno : ENOMEM)};
        }
        data_ = static_cast<std::byte*>(made);
        size_ = *size;
    }
    host_buffer(host_buffer&& other) noexcept
        : data_{std::exchange(other.data_, nullptr)}, size_{std::exchange(other.size_, 0)} {}
    host_buffer& operator=(host_buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~host_buffer() {
        if (data_ != nullptr) {
            ::munmap(data_, size_);
        }
    }
    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

private:
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

/// Tensors in host memory.
class host_staging {
public:
    using buffer = host_buffer;
    /// A point that copies have to reach before what they read may be written again.
    struct mark {};

    /// Transfers may write to destinations.
    static constexpr bool direct = true;
    static constexpr bool device_memory = false;
    /// Copies are done when they have been called for.
    static constexpr bool copies_at_once = true;

    explicit host_staging(int /*device*/) noexcept {}
    /// Whether these bytes may be exported.
    [[nodiscard]] static bool is_host(const std::byte* /*address*/) noexcept { return true; }

    [[nodiscard]] buffer allocate(std::uint64_t bytes) const { return buffer{bytes}; }
    [[nodiscard]] mark make_mark() const noexcept { return {}; }
    /// `count` runs of `bytes` bytes, one after the other at `from`, to places `to_step` apart.
    void copy(std::byte* to, std::uint64_t to_step, const std::byte* from, std::uint64_t bytes,
              std::uint64_t count) const noexcept {
        shm::detail::copy_line(to, static_cast<std::int64_t>(to_step), from,
                               static_cast<std::int64_t>(bytes), static_cast<std::size_t>(bytes),
                               count, shm::stores::streaming);
    }
    /// Ends a group of copies.
    void record(mark& /*at*/) const noexcept { shm::detail::stream_fence(); }
    [[nodiscard]] bool reached(const mark& /*at*/) const noexcept { return true; }
    /// Waits for it, where a read is given up.
    void finish(const mark& /*at*/) const noexcept {}
};

}  // namespace weightwire::ucx
