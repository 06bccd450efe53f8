#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <weightwire/fabrics/descriptor.hpp>

/// @file
/// The counters by which torch knows that another process has done with memory that it exported
/// (vLLM wire section 6.6). A trainer whose counters never fall keeps that memory for ever.

namespace weightwire {

namespace detail {

/// The file: a header that torch's allocator aligns to 64 bytes, then so many counters.
inline constexpr std::size_t torch_counters_begin = 64;
inline constexpr std::uint64_t torch_counters = 10'000;

/// Names that torch gives: `/torch_` and what a file of its own may be called. No other file is
/// opened, whatever a peer says.
[[nodiscard]] inline bool is_torch_counter_name(std::string_view name) noexcept {
    constexpr std::string_view begin{"/torch_"};
    return name.starts_with(begin) && name.size() > begin.size() && name.size() < 128 &&
           std::all_of(name.begin() + 1, name.end(), [](char c) {
               return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
           });
}

}  // namespace detail

/// Says to a torch process that exports were read: each counter of `slots` in the shared memory
/// object `name` falls by one, not below 0. So it may be said again of a packed buffer, which is
/// one export that many calls read. Best effort, as torch's own consumer's: the exporter may be
/// gone.
/// @returns how many fell.
[[nodiscard]] inline std::size_t release_torch_counters(
    const std::string& name, std::span<const std::uint64_t> slots) noexcept {
    constexpr auto begin = detail::torch_counters_begin;
    constexpr auto bytes = begin + detail::torch_counters * sizeof(std::int64_t);
    if (!detail::is_torch_counter_name(name)) {
        return 0;
    }
    const auto file =
        shm::descriptor::from_native(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0));
    struct stat info {};
    if (!file || ::fstat(file.native_handle(), &info) != 0 || !S_ISREG(info.st_mode) ||
        info.st_size < static_cast<off_t>(bytes)) {
        return 0;
    }
    void* const mapped =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.native_handle(), 0);
    if (mapped == MAP_FAILED) {
        return 0;
    }
    auto* const counters = reinterpret_cast<std::int64_t*>(static_cast<std::byte*>(mapped) + begin);
    std::size_t fallen = 0;
    for (const auto slot : slots) {
        if (slot >= detail::torch_counters) {
            continue;
        }
        const std::atomic_ref counter{counters[slot]};
        auto readers = counter.load(std::memory_order_acquire);
        while (readers > 0 &&
               !counter.compare_exchange_weak(readers, readers - 1, std::memory_order_acq_rel)) {
        }
        fallen += readers > 0 ? 1 : 0;
    }
    ::munmap(mapped, bytes);
    return fallen;
}

}  // namespace weightwire
