#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// The POSIX calls that the server stands on: sockets that never block, waits that end at a
/// deadline.

namespace weightwire::http::detail {

/// Owns a descriptor that `poll` knows. Move-only; `-1` is none.
class socket_handle {
public:
    socket_handle() noexcept = default;
    /// Takes over `native`; a negative one is none.
    [[nodiscard]] static socket_handle from_native(int native) noexcept {
        socket_handle owner;
        owner.native_ = native;
        return owner;
    }
    socket_handle(socket_handle&& other) noexcept : native_{std::exchange(other.native_, -1)} {}
    socket_handle& operator=(socket_handle&& other) noexcept {
        std::swap(native_, other.native_);
        return *this;
    }
    ~socket_handle() { close(); }

    [[nodiscard]] int native_handle() const noexcept { return native_; }
    [[nodiscard]] explicit operator bool() const noexcept { return native_ >= 0; }
    void close() noexcept {
        if (native_ >= 0) {
            ::close(std::exchange(native_, -1));
        }
    }

private:
    int native_ = -1;
};

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

[[nodiscard]] inline bool would_block(int code) noexcept {
    return code == EAGAIN || code == EWOULDBLOCK || code == EINTR;
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

/// Sends small replies at once, and finds clients whose host has vanished.
inline void tune_connection(int native) noexcept {
    const auto set = [native](int level, int option, int value) {
        ::setsockopt(native, level, option, &value, sizeof value);
    };
    set(IPPROTO_TCP, TCP_NODELAY, 1);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, 15);
    set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
}

/// `127.0.0.1:8000` or `[::1]:8000`.
[[nodiscard]] inline std::string host_and_port(std::string_view host, std::uint16_t port) {
    std::string out{host};
    if (out.find(':') != std::string::npos) {
        out = "[" + out + "]";
    }
    return out + ":" + std::to_string(port);
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
    const auto fail = [&name](std::string_view text, std::string_view call, std::string_view why,
                              int code) -> resource_error {
        return resource_error{name + " " + std::string{text},
                              {.phase = phase::serve,
                               .peer = name,
                               .operation = std::string{call},
                               .native_code = code,
                               .native_text = std::string{why}}};
    };
    const auto fail_with_errno = [&](std::string_view text, std::string_view call, int code) {
        return fail(text, call, std::generic_category().message(code), code);
    };
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    addrinfo* list = nullptr;
    const auto status = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
    if (status != 0) {
        throw fail("is no address of this machine; give a numeric one", "getaddrinfo",
                   ::gai_strerror(status), status);
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner{list, &::freeaddrinfo};
    auto made = socket_handle::from_native(
        ::socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!made) {
        throw fail_with_errno("gets no socket", "socket", errno);
    }
    const int native = made.native_handle();
    const int on = 1;
    const int off = 0;
    // Connections of a server that has just ended linger and would hold its port.
    ::setsockopt(native, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (list->ai_family == AF_INET6) {
        ::setsockopt(native, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (::bind(native, list->ai_addr, list->ai_addrlen) != 0 || ::listen(native, 128) != 0) {
        const int code = errno;
        throw fail_with_errno(
            code == EADDRINUSE ? "is in use; stop what listens there, or choose another port or 0"
                               : "cannot be bound; choose an address of this machine",
            "bind", code);
    }
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    if (::getsockname(native, reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
        throw fail_with_errno("does not tell its port", "getsockname", errno);
    }
    const auto big_endian = bound.ss_family == AF_INET6
                                ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                                : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port;
    return {std::move(made), ntohs(big_endian)};
}

}  // namespace weightwire::http::detail
