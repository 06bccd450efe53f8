#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/detail/descriptor.hpp>
#include <weightwire/detail/socket.hpp>

/// @file
/// The few POSIX calls that rendezvous and the test transports stand on: sockets that never block,
/// and waits that end at a deadline or a stop.

namespace weightwire::rendezvous {

/// Owns a socket, or something else that `poll` knows.
using unique_socket = weightwire::detail::descriptor;
using weightwire::detail::host_and_port;
using weightwire::detail::local_address;
using weightwire::detail::socket_address;

/// A name in Linux's abstract namespace: seen in this network namespace only, gone with its socket,
/// leaves no file behind.
/// @throws usage_error empty, or longer than 107 bytes.
[[nodiscard]] inline socket_address abstract_address(std::string_view name) {
    sockaddr_un unix_address{};
    if (name.empty() || name.size() >= sizeof unix_address.sun_path) {
        throw usage_error{"an abstract socket's name has 1 to 107 bytes, not " +
                          std::to_string(name.size())};
    }
    unix_address.sun_family = AF_UNIX;
    std::memcpy(unix_address.sun_path + 1, name.data(), name.size());
    socket_address address;
    std::memcpy(&address.storage, &unix_address, sizeof unix_address);
    address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
}

namespace detail {

/// The longest that a wait goes without looking at its stop token.
inline constexpr int stop_poll_ms = 10;

using weightwire::detail::look_up;
using weightwire::detail::would_block;

[[nodiscard]] inline error_context with_code(error_context where, std::string_view operation,
                                             int code) {
    return weightwire::detail::with_errno(std::move(where), operation, code);
}

/// @throws cancelled_error somebody asked for the stop; timeout_error the deadline passed.
inline void check_wait(deadline until, const std::stop_token& stop, std::string_view doing,
                       const error_context& where) {
    if (stop.stop_requested()) {
        throw cancelled_error{"stopped while " + std::string{doing}, where};
    }
    if (until.expired()) {
        throw timeout_error{"the deadline passed while " + std::string{doing} +
                                "; look at the peer or allow more time",
                            where};
    }
}

/// Waits until `socket` has one of `events`; returns those it has.
/// @throws timeout_error, cancelled_error with `doing` in the sentence.
inline short wait_ready(int socket, short events, deadline until, const std::stop_token& stop,
                        std::string_view doing, const error_context& where) {
    for (;;) {
        pollfd entry{socket, events, 0};
        const int cap = stop.stop_possible() ? stop_poll_ms : 1000;
        // Looks once even when the deadline has passed: what is already there may still be taken.
        const int count = ::poll(&entry, 1, until.poll_milliseconds(cap));
        if (count > 0) {
            return entry.revents;
        }
        if (count < 0 && errno != EINTR) {
            throw resource_error{"a wait failed", with_code(where, "poll", errno)};
        }
        check_wait(until, stop, doing, where);
    }
}

/// Writes all of `bytes`.
/// @throws peer_error the other side hung up; timeout_error, cancelled_error.
inline void write_all(int socket, std::string_view bytes, deadline until,
                      const std::stop_token& stop, std::string_view doing,
                      const error_context& where) {
    while (!bytes.empty()) {
        const auto count = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count >= 0) {
            bytes.remove_prefix(static_cast<std::size_t>(count));
        } else if (would_block(errno)) {
            wait_ready(socket, POLLOUT, until, stop, doing, where);
        } else {
            throw peer_error{"the peer hung up while " + std::string{doing},
                             with_code(where, "send", errno)};
        }
    }
}

/// Reads exactly `size` bytes to `to`.
/// @throws peer_error the other side hung up; timeout_error, cancelled_error.
inline void read_exactly(int socket, void* to, std::size_t size, deadline until,
                         const std::stop_token& stop, std::string_view doing,
                         const error_context& where) {
    auto* at = static_cast<char*>(to);
    while (size > 0) {
        const auto count = ::recv(socket, at, size, MSG_DONTWAIT);
        if (count > 0) {
            at += count;
            size -= static_cast<std::size_t>(count);
        } else if (count < 0 && would_block(errno)) {
            wait_ready(socket, POLLIN, until, stop, doing, where);
        } else {
            throw peer_error{"the peer hung up while " + std::string{doing},
                             with_code(where, "recv", count == 0 ? 0 : errno)};
        }
    }
}

/// What the looking-up thread and its caller share; the one that is last frees it.
struct name_query {
    std::mutex mutex;
    std::condition_variable_any done;
    std::optional<int> status;
    std::vector<socket_address> addresses;
};

}  // namespace detail

/// The addresses of `host`, in the resolver's order. A numeric one costs no wait; a name is looked
/// up on a thread of its own, since the resolver knows no deadline, and that thread is abandoned
/// when ours passes.
/// @throws peer_error the name is unknown; timeout_error, cancelled_error.
[[nodiscard]] inline std::vector<socket_address> resolve(const std::string& host,
                                                         std::uint16_t port, deadline until,
                                                         std::stop_token stop,
                                                         const error_context& where) {
    int status = 0;
    auto numeric = detail::look_up(host, port, AI_NUMERICHOST, status);
    if (status == 0) {
        return numeric;
    }
    const auto query = std::make_shared<detail::name_query>();
    std::thread{[query, host, port] {
        int code = 0;
        auto found = detail::look_up(host, port, 0, code);
        const std::lock_guard lock{query->mutex};
        query->addresses = std::move(found);
        query->status = code;
        query->done.notify_all();
    }}.detach();
    std::unique_lock lock{query->mutex};
    if (!query->done.wait_until(lock, stop, until.when(),
                                [&] { return query->status.has_value(); })) {
        detail::check_wait(until, stop, "looking up '" + host + "'", where);
        throw timeout_error{"'" + host + "' was not looked up in time", where};
    }
    if (*query->status != 0) {
        auto context = where;
        context.operation = "getaddrinfo";
        context.native_text = ::gai_strerror(*query->status);
        throw peer_error{"the host name '" + host + "' cannot be resolved", context};
    }
    return std::move(query->addresses);
}

/// A stream socket that never blocks and is closed on exec; TCP sends small messages at once.
/// @throws resource_error no descriptor is left.
[[nodiscard]] inline unique_socket stream_socket(int family, const error_context& where) {
    auto made = weightwire::detail::stream_socket(family);
    if (!made) {
        const int code = errno;
        throw resource_error{weightwire::detail::is_out_of_descriptors(code)
                                 ? std::string{weightwire::detail::no_descriptor_is_left}
                                 : "no socket can be made",
                             detail::with_code(where, "socket", code)};
    }
    if (family != AF_UNIX) {
        weightwire::detail::set_option(made.native_handle(), IPPROTO_TCP, TCP_NODELAY, 1);
    }
    return made;
}

/// A listening socket at `address`.
/// @param name what messages call it, such as `127.0.0.1:29500`.
/// @throws resource_error it is in use, not ours, or no local address; names it.
[[nodiscard]] inline unique_socket listen_at(const socket_address& address, const std::string& name,
                                             error_context where) {
    where.peer = name;
    auto listener = stream_socket(address.family(), where);
    if (const int code = weightwire::detail::bind_and_listen(listener, address, 1024)) {
        throw resource_error{code == EADDRINUSE
                                 ? name + " is in use by another process; free it or choose port 0"
                                 : name + " cannot be bound; choose an address of this machine",
                             detail::with_code(where, "bind", code)};
    }
    return listener;
}

/// Connects to `address`, once.
/// @param code errno of a refusal.
/// @returns an empty owner where it was refused.
/// @throws timeout_error, cancelled_error, resource_error.
[[nodiscard]] inline unique_socket try_connect(const socket_address& address, deadline until,
                                               const std::stop_token& stop,
                                               const error_context& where, int& code) {
    auto socket = stream_socket(address.family(), where);
    code = 0;
    if (::connect(socket.native_handle(), address.native(), address.size) == 0) {
        return socket;
    }
    code = errno;
    if (code == EINPROGRESS) {
        detail::wait_ready(socket.native_handle(), POLLOUT, until, stop, "connecting", where);
        socklen_t size = sizeof code;
        if (::getsockopt(socket.native_handle(), SOL_SOCKET, SO_ERROR, &code, &size) != 0) {
            code = errno;
        }
    }
    return code == 0 ? std::move(socket) : unique_socket{};
}

}  // namespace weightwire::rendezvous
