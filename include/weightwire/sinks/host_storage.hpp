#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// Host memory that is mapped and touched once, when it is made: the first touch of a fresh page
/// costs some fifty times a copy into it, so no round may meet one.

namespace weightwire {

/// A zeroed block of host memory. Owner, move-only. Every page is present when the constructor
/// returns.
class host_storage {
public:
    /// Tensors are laid out at multiples of this: a cache line, and the widest vector there is.
    static constexpr std::size_t alignment = 64;

    host_storage() noexcept = default;
    /// @param bytes rounded up to at least one alignment unit, so an empty tensor has an address
    /// too.
    /// @param purpose word for the error message, such as `staging`.
    /// @throws resource_error the system has no such block; says how many bytes were asked for.
    explicit host_storage(std::uint64_t bytes, std::string_view purpose)
        : size_{size_of(bytes, purpose)} {
        void* const mapped =
            ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) {
            refuse(bytes, purpose, errno);
        }
        data_ = static_cast<std::byte*>(mapped);
        touch();
    }
    host_storage(host_storage&& other) noexcept
        : data_{std::exchange(other.data_, nullptr)}, size_{std::exchange(other.size_, 0)} {}
    host_storage& operator=(host_storage&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~host_storage() {
        if (data_ != nullptr) {
            ::munmap(data_, size_);
        }
    }

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

private:
    static std::size_t size_of(std::uint64_t bytes, std::string_view purpose) {
        const auto wanted = bytes < alignment ? std::uint64_t{alignment} : bytes;
        if (wanted > std::numeric_limits<std::size_t>::max() / 2) {
            refuse(bytes, purpose, ENOMEM);
        }
        return static_cast<std::size_t>(wanted);
    }

    [[noreturn]] static void refuse(std::uint64_t bytes, std::string_view purpose, int code) {
        throw resource_error{"no " + std::to_string(bytes) + " bytes of host memory for " +
                                 std::string{purpose} +
                                 "; free some, or choose commit mode in_place, which needs no "
                                 "staging",
                             {.operation = "mmap",
                              .bytes_total = bytes,
                              .native_code = code,
                              .native_text = std::strerror(code)}};
    }

    /// Large pages are advice, and so is the batched touch: a kernel without either leaves the
    /// loop, which touches every page there is.
    void touch() noexcept {
        ::madvise(data_, size_, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
        if (::madvise(data_, size_, MADV_POPULATE_WRITE) == 0) {
            return;
        }
#endif
        const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
        for (std::size_t at = 0; at < size_; at += page) {
            static_cast<volatile std::byte*>(data_)[at] = std::byte{0};
        }
    }

    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

/// Deals out aligned offsets of a block whose size is not known yet.
class storage_layout {
public:
    /// Offset for `bytes` more bytes.
    /// @throws resource_error the block would be larger than an address space.
    [[nodiscard]] std::uint64_t add(std::uint64_t bytes) {
        const auto at = end_;
        const auto next = checked_add(end_, bytes);
        const auto rounded =
            next ? checked_add(*next, host_storage::alignment - 1) : std::optional<std::uint64_t>{};
        if (!rounded) {
            throw resource_error{"the parameters add up to more bytes than can be addressed"};
        }
        end_ = *rounded & ~std::uint64_t{host_storage::alignment - 1};
        return at;
    }
    /// Bytes of the whole block.
    [[nodiscard]] std::uint64_t size() const noexcept { return end_; }

private:
    std::uint64_t end_ = 0;
};

}  // namespace weightwire
