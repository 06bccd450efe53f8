#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include <weightwire/fabrics/descriptor.hpp>

/// @file
/// Which process is meant, and whether it still lives.

namespace weightwire::shm {

/// A process, told apart from a later one that got the same number.
struct process_identity {
    std::int64_t pid = 0;          ///< in the PID namespace that both ends share
    std::uint64_t start_time = 0;  ///< clock ticks after boot: field 22 of `/proc/<pid>/stat`
    friend bool operator==(const process_identity&, const process_identity&) noexcept = default;
};

namespace detail {

/// What `/proc/<pid>/stat` says.
struct process_stat {
    char state = '?';
    std::uint64_t start_time = 0;
};

/// The command name in the second field may itself hold blanks and parentheses, so fields are
/// counted from the last closing one. Allocates nothing: it is called while a round is under way.
[[nodiscard]] inline std::optional<process_stat> parse_process_stat(
    std::string_view text) noexcept {
    const auto name_end = text.rfind(')');
    if (name_end == std::string_view::npos || name_end + 2 >= text.size()) {
        return std::nullopt;
    }
    text.remove_prefix(name_end + 2);
    process_stat result{.state = text.front()};
    constexpr int fields_from_state_to_start_time = 19;
    for (int i = 0; i < fields_from_state_to_start_time; ++i) {
        const auto blank = text.find(' ');
        if (blank == std::string_view::npos) {
            return std::nullopt;
        }
        text.remove_prefix(blank + 1);
    }
    const auto [end, status] =
        std::from_chars(text.data(), text.data() + text.size(), result.start_time);
    return status == std::errc{} ? std::optional{result} : std::nullopt;
}

/// Where nothing is returned and `code` is given, it says why: an `errno`, or 0 for odd text.
[[nodiscard]] inline std::optional<process_stat> read_process_stat(std::int64_t pid,
                                                                   int* code = nullptr) noexcept {
    const auto note = [code](int value) {
        if (code != nullptr) {
            *code = value;
        }
    };
    std::array<char, 48> path{};
    std::snprintf(path.data(), path.size(), "/proc/%lld/stat", static_cast<long long>(pid));
    const auto file = descriptor::from_native(::open(path.data(), O_RDONLY | O_CLOEXEC));
    if (!file) {
        note(errno);
        return std::nullopt;
    }
    std::array<char, 1024> text{};
    const auto count = ::read(file.native_handle(), text.data(), text.size());
    note(count < 0 ? errno : 0);
    return count <= 0 ? std::nullopt
                      : parse_process_stat({text.data(), static_cast<std::size_t>(count)});
}

}  // namespace detail

/// When process `pid` started; nothing where there is none, `/proc` is not mounted, or no
/// descriptor is left to look: `code`, where given, says which.
[[nodiscard]] inline std::optional<std::uint64_t> start_time_of(std::int64_t pid,
                                                                int* code = nullptr) noexcept {
    const auto found = detail::read_process_stat(pid, code);
    return found ? std::optional{found->start_time} : std::nullopt;
}

/// The calling process.
/// @throws resource_error `/proc` cannot be read, or no descriptor is left to do so.
[[nodiscard]] inline process_identity this_process() {
    const auto pid = static_cast<std::int64_t>(::getpid());
    int code = 0;
    const auto started = start_time_of(pid, &code);
    if (!started) {
        require_descriptors(code, "open(/proc/self/stat)");
        throw resource_error{
            "shared memory between processes needs /proc, which cannot be read; mount it"};
    }
    return {.pid = pid, .start_time = *started};
}

/// Watches one process by a descriptor of it, so that neither a reused number nor a zombie passes
/// for the living. Where the kernel has no such descriptors, `/proc` is read each time.
class process_watch {
public:
    process_watch() noexcept = default;

    /// Watches `who`. A process that is already gone is watched as such.
    explicit process_watch(process_identity who) noexcept : who_{who} {
#ifdef SYS_pidfd_open
        if (who.pid > 0 && who.pid <= std::numeric_limits<pid_t>::max()) {
            handle_ = descriptor::from_native(
                static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(who.pid), 0U)));
        }
        const auto found = detail::read_process_stat(who.pid);
        if (!found || !is_alive(*found)) {
            handle_.close();  // another process has this number: fall back, which looks again
        }
#endif
    }

    /// Whether the process still runs. One or two system calls; allocates nothing.
    [[nodiscard]] bool alive() const noexcept {
        if (!handle_) {
            return matches();
        }
        pollfd exited{.fd = handle_.native_handle(), .events = POLLIN, .revents = 0};
        const int ready = ::poll(&exited, 1, 0);
        return ready == 0 || (ready < 0 && matches());
    }
    [[nodiscard]] process_identity who() const noexcept { return who_; }

private:
    [[nodiscard]] bool matches() const noexcept {
        int code = 0;
        const auto found = detail::read_process_stat(who_.pid, &code);
        if (!found && is_out_of_descriptors(code)) {
            return number_is_in_use();
        }
        return found && is_alive(*found);
    }
    [[nodiscard]] bool is_alive(const detail::process_stat& found) const noexcept {
        return found.start_time == who_.start_time && found.state != 'Z' && found.state != 'X';
    }
    /// What can be told without a descriptor. Nobody is called dead because this process may not
    /// open one more file; a reused number shows as soon as it may again.
    [[nodiscard]] bool number_is_in_use() const noexcept {
        return who_.pid > 0 && who_.pid <= std::numeric_limits<pid_t>::max() &&
               (::kill(static_cast<pid_t>(who_.pid), 0) == 0 || errno == EPERM);
    }

    process_identity who_{};
    descriptor handle_{};
};

}  // namespace weightwire::shm
