#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/detail/descriptor.hpp>

namespace weightwire::detail {

/// The number of this process's time namespace, after a dot: the clocks of two namespaces differ by
/// an offset. Empty where the kernel knows no such namespaces; nothing where it does not tell.
[[nodiscard]] inline std::optional<std::string> time_namespace() {
    std::array<char, 64> link{};
    const auto length = ::readlink("/proc/self/ns/time", link.data(), link.size());
    if (length < 0) {
        return errno == ENOENT ? std::optional<std::string>{std::in_place} : std::nullopt;
    }
    const std::string_view text{link.data(), static_cast<std::size_t>(length)};  // time:[12345]
    const auto begin = text.find_first_of("0123456789");
    const auto end = text.find_first_not_of("0123456789", begin);
    if (begin == std::string_view::npos || end == std::string_view::npos) {
        return std::nullopt;
    }
    return "." + std::string{text.substr(begin, end - begin)};
}

/// Identifies this boot of this machine as this process sees it: two processes with equal ids share
/// CLOCK_MONOTONIC. At most 64 characters; empty where the kernel does not tell.
[[nodiscard]] inline std::string boot_id() {
    const auto file =
        descriptor::from_native(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
    if (!file) {
        return {};
    }
    std::array<char, 36> text{};
    const auto count = ::read(file.native_handle(), text.data(), text.size());
    const auto space = time_namespace();
    return count == 36 && space ? std::string{text.data(), text.size()} + *space : std::string{};
}

/// Whether a process that says `theirs` of itself runs in another boot than this one: on another
/// machine, or in another time namespace. Where one of the two does not know, it is not said to.
[[nodiscard]] inline bool is_other_boot(std::string_view theirs) {
    const auto ours = boot_id();
    return !theirs.empty() && !ours.empty() && theirs != ours;
}

/// CLOCK_MONOTONIC, which is what libstdc++'s and libc++'s steady clock reads on Linux, in
/// nanoseconds.
[[nodiscard]] inline std::int64_t monotonic_ns(
    std::chrono::steady_clock::time_point when = std::chrono::steady_clock::now()) noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count();
}

}  // namespace weightwire::detail
