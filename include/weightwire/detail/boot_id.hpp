#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace weightwire::detail {

/// Identifies this boot of this machine: two processes with equal ids share CLOCK_MONOTONIC. Empty
/// where the kernel does not tell.
[[nodiscard]] inline std::string boot_id() {
    const int file = ::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return {};
    }
    std::array<char, 36> text{};
    const auto count = ::read(file, text.data(), text.size());
    ::close(file);
    return count == 36 ? std::string{text.data(), text.size()} : std::string{};
}

/// CLOCK_MONOTONIC, which is what libstdc++'s and libc++'s steady clock reads on Linux, in
/// nanoseconds.
[[nodiscard]] inline std::int64_t monotonic_ns(
    std::chrono::steady_clock::time_point when = std::chrono::steady_clock::now()) noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count();
}

}  // namespace weightwire::detail
