#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/fabrics/process.hpp>

/// @file
/// The texts by which processes of one machine find each other: numbers with blanks between them,
/// and a process as the boot that it runs in, its number and its start time.

namespace weightwire::shm {

namespace detail {

/// Numbers with blanks between them.
template <std::size_t Count>
[[nodiscard]] std::string joined(const std::array<std::uint64_t, Count>& numbers) {
    std::string out;
    for (const auto number : numbers) {
        out += (out.empty() ? "" : " ") + std::to_string(number);
    }
    return out;
}
/// The inverse; nothing where the text is anything else.
template <std::size_t Count>
[[nodiscard]] std::optional<std::array<std::uint64_t, Count>> split(
    std::string_view text) noexcept {
    std::array<std::uint64_t, Count> out{};
    for (std::size_t i = 0; i < Count; ++i) {
        const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), out[i]);
        text.remove_prefix(static_cast<std::size_t>(end - text.data()));
        const bool last = i + 1 == Count;
        if (status != std::errc{} || text.empty() != last || (!last && text.front() != ' ')) {
            return std::nullopt;
        }
        text.remove_prefix(last ? 0 : 1);
    }
    return out;
}

}  // namespace detail

/// By which other processes of this machine find `who`: `<boot id> <pid> <start time>`. The first
/// field is empty where the kernel does not tell.
[[nodiscard]] inline std::string node_address(process_identity who) {
    return weightwire::detail::boot_id() + " " +
           detail::joined<2>({static_cast<std::uint64_t>(who.pid), who.start_time});
}

/// A process of this machine, watched. Thread-safe to ask.
class node_connection {
public:
    /// To the process that an address names. Does not block.
    /// @param address a `node_address`.
    /// @param memory what one wants of that process, for messages: `shared memory`.
    /// @throws protocol_error the text is garbled. @throws unsupported_error the process runs in
    ///         another boot than this one. @throws peer_error it is gone.
    [[nodiscard]] static node_connection to(std::string_view address, std::string_view memory) {
        const error_context at_init{.phase = phase::init};
        const auto blank = address.find(' ');
        const auto numbers =
            detail::split<2>(blank == std::string_view::npos ? "" : address.substr(blank + 1));
        const auto pid =
            numbers ? checked_cast<std::int32_t>((*numbers)[0]) : std::optional<std::int32_t>{};
        if (!pid || *pid <= 0) {
            throw protocol_error{
                "the address of a trainer rank's " + std::string{memory} + " is garbled", at_init};
        }
        if (weightwire::detail::is_other_boot(address.substr(0, blank))) {
            throw unsupported_error{
                "the trainer runs on another machine or in another time namespace, whose " +
                    std::string{memory} +
                    " cannot be mapped; choose a fabric that crosses machines",
                at_init};
        }
        node_connection made{{.pid = *pid, .start_time = (*numbers)[1]}};
        if (!made.alive()) {
            throw peer_error{"the trainer rank of process " + std::to_string(*pid) +
                                 " is gone, or in another PID namespace",
                             at_init};
        }
        return made;
    }

    [[nodiscard]] process_identity who() const noexcept { return watch_.who(); }
    [[nodiscard]] bool alive() const noexcept { return watch_.alive(); }

private:
    explicit node_connection(process_identity who) : watch_{who} {}
    process_watch watch_;
};

}  // namespace weightwire::shm
