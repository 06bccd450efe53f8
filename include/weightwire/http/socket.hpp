#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/detail/descriptor.hpp>
#include <weightwire/detail/socket.hpp>

/// @file
/// The POSIX calls that the server stands on: sockets that never block, waits that end at a
/// deadline.

namespace weightwire::http::detail {

using socket_handle = weightwire::detail::descriptor;
using weightwire::detail::host_and_port;
using weightwire::detail::would_block;

/// Waits until `native` has one of `events`, an error or a hang-up; false at the deadline.
[[nodiscard]] inline bool wait_for(int native, short events, deadline until) noexcept {
    for (;;) {
        pollfd entry{native, events, 0};
        const int count = ::poll(&entry, 1, until.poll_milliseconds());
        if (count > 0) {
            return true;
        }
        if (until.expired() || (count < 0 && errno != EINTR)) {
            return false;
        }
    }
}

/// Whether the other side has closed its end, or the connection is broken. A client that only shut
/// its sending half counts as gone: none that we know of does so and still reads.
[[nodiscard]] inline bool has_hung_up(int native) noexcept {
    pollfd entry{native, POLLRDHUP, 0};
    return ::poll(&entry, 1, 0) > 0 &&
           (entry.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}

/// What a read gave.
enum class read_result : std::uint8_t { data, ended, timed_out };

/// Reads what is there, at least a byte, into `to`; `count` says how much.
[[nodiscard]] inline read_result read_some(int native, std::span<char> to, deadline until,
                                           std::size_t& count) noexcept {
    for (;;) {
        const auto got = ::recv(native, to.data(), to.size(), MSG_DONTWAIT);
        if (got > 0) {
            count = static_cast<std::size_t>(got);
            return read_result::data;
        }
        if (got == 0 || !would_block(errno)) {
            return read_result::ended;
        }
        if (!wait_for(native, POLLIN, until)) {
            return read_result::timed_out;
        }
    }
}

/// Writes `head` and then `body`, in one system call where the socket takes it; false where the
/// deadline passed or the client is gone.
[[nodiscard]] inline bool write_all(int native, std::string_view head, std::string_view body,
                                    deadline until) noexcept {
    while (!head.empty() || !body.empty()) {
        // The API takes pointers to non-const and does not write through them.
        std::array<iovec, 2> pieces{{{const_cast<char*>(head.data()), head.size()},
                                     {const_cast<char*>(body.data()), body.size()}}};
        msghdr message{};
        message.msg_iov = pieces.data();
        message.msg_iovlen = pieces.size();
        const auto sent = ::sendmsg(native, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            const auto from_head = std::min(head.size(), static_cast<std::size_t>(sent));
            head.remove_prefix(from_head);
            body.remove_prefix(static_cast<std::size_t>(sent) - from_head);
        } else if (!would_block(errno) || !wait_for(native, POLLOUT, until)) {
            return false;
        }
    }
    return true;
}

/// What a reader of requests sees of a client: its socket.
class client_socket {
public:
    explicit client_socket(int native) noexcept : native_{native} {}
    /// As `read_some`.
    [[nodiscard]] read_result receive(std::span<char> to, deadline until,
                                      std::size_t& count) const noexcept {
        return read_some(native_, to, until, count);
    }
    /// As `write_all`.
    [[nodiscard]] bool send(std::string_view bytes, deadline until) const noexcept {
        return write_all(native_, bytes, {}, until);
    }

private:
    int native_;
};

/// Sends small replies at once, and finds clients whose host has vanished.
inline void tune_connection(int native) noexcept {
    using weightwire::detail::set_option;
    set_option(native, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(native, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(native, IPPROTO_TCP, TCP_KEEPIDLE, 15);
    set_option(native, IPPROTO_TCP, TCP_KEEPINTVL, 5);
}

/// A listening socket and the port it has.
struct listener {
    socket_handle socket;
    std::uint16_t port = 0;
};

/// @param address a numeric IPv4 or IPv6 address, or `localhost`; `::` takes IPv4 as well.
/// @param port 0 lets the system choose.
/// @throws resource_error the address cannot be bound, naming address and port.
[[nodiscard]] inline listener listen_at(const std::string& address, std::uint16_t port) {
    const auto name = host_and_port(address, port);
    const auto fail = [&name](std::string_view text, std::string_view call, int code) {
        return resource_error{name + " " + std::string{text},
                              weightwire::detail::with_errno(
                                  error_context{.phase = phase::serve, .peer = name}, call, code)};
    };
    int status = 0;
    const auto found = weightwire::detail::look_up(address, port, AI_PASSIVE, status);
    if (found.empty()) {
        throw resource_error{name + " is no address of this machine; give a numeric one",
                             {.phase = phase::serve,
                              .peer = name,
                              .operation = "getaddrinfo",
                              .native_code = status,
                              .native_text = ::gai_strerror(status)}};
    }
    auto made = weightwire::detail::stream_socket(found.front().family());
    if (!made) {
        const int code = errno;
        throw fail(weightwire::detail::is_out_of_descriptors(code)
                       ? "gets no socket: no descriptor is left; raise the limit of open files"
                       : "gets no socket",
                   "socket", code);
    }
    if (const int code = weightwire::detail::bind_and_listen(made, found.front(), 128)) {
        throw fail(code == EADDRINUSE
                       ? "is in use; stop what listens there, or choose another port or 0"
                       : "cannot be bound; choose an address of this machine",
                   "bind", code);
    }
    const auto bound = weightwire::detail::local_address(made);
    if (bound.size == 0) {
        throw fail("does not tell its port", "getsockname", errno);
    }
    return {std::move(made), bound.port()};
}

}  // namespace weightwire::http::detail
