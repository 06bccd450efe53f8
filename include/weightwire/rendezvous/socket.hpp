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
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// The few POSIX calls that rendezvous and the test transports stand on: sockets that never block,
/// and waits that end at a deadline or a stop.

namespace weightwire::rendezvous {

/// Owns a file descriptor of a socket (or of something else that `poll` knows).
class unique_socket {
public:
    unique_socket() noexcept = default;
    /// Takes over `native`; a negative one is none.
    [[nodiscard]] static unique_socket from_native(int native) noexcept {
        unique_socket owner;
        owner.native_ = native;
        return owner;
    }
    unique_socket(unique_socket&& other) noexcept : native_{std::exchange(other.native_, -1)} {}
    unique_socket& operator=(unique_socket&& other) noexcept {
        std::swap(native_, other.native_);
        return *this;
    }
    ~unique_socket() { close(); }

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

/// An address to bind or to connect to: IPv4, IPv6, or an abstract Unix name.
struct socket_address {
    sockaddr_storage storage{};
    socklen_t size = 0;

    [[nodiscard]] const sockaddr* native() const noexcept {
        return reinterpret_cast<const sockaddr*>(&storage);
    }
    [[nodiscard]] int family() const noexcept { return storage.ss_family; }
    /// Port of an IP address, else 0.
    [[nodiscard]] std::uint16_t port() const noexcept {
        if (family() == AF_INET) {
            return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
        }
        if (family() == AF_INET6) {
            return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
        }
        return 0;
    }
};

/// `127.0.0.1:29500` or `[::1]:29500`: what messages call a server.
[[nodiscard]] inline std::string host_and_port(std::string_view host, std::uint16_t port) {
    const bool bracket = host.find(':') != std::string_view::npos;
    return (bracket ? "[" + std::string{host} + "]" : std::string{host}) + ":" +
           std::to_string(port);
}

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

[[nodiscard]] inline error_context with_code(error_context where, std::string_view operation,
                                             int code) {
    where.operation = operation;
    where.native_code = code;
    where.native_text = code == 0 ? "" : std::generic_category().message(code);
    return where;
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

[[nodiscard]] inline bool would_block(int code) noexcept {
    return code == EAGAIN || code == EWOULDBLOCK || code == EINTR;
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

/// `getaddrinfo` with nothing but its result; empty where it failed, with the code in `status`.
[[nodiscard]] inline std::vector<socket_address> look_up(const std::string& host,
                                                         std::uint16_t port, int flags,
                                                         int& status) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    addrinfo* list = nullptr;
    status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
    std::vector<socket_address> out;
    if (status == 0) {
        const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner{list, &::freeaddrinfo};
        for (const auto* entry = list; entry != nullptr; entry = entry->ai_next) {
            socket_address address;
            address.size = entry->ai_addrlen;
            std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
            out.push_back(address);
        }
    }
    return out;
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
    auto made =
        unique_socket::from_native(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!made) {
        throw resource_error{"no socket can be made", detail::with_code(where, "socket", errno)};
    }
    if (family != AF_UNIX) {
        const int on = 1;
        ::setsockopt(made.native_handle(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
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
    const int on = 1;
    const int off = 0;
    if (address.family() != AF_UNIX) {
        // A server that has just died leaves connections behind that would hold its port.
        ::setsockopt(listener.native_handle(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    }
    if (address.family() == AF_INET6) {
        ::setsockopt(listener.native_handle(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (::bind(listener.native_handle(), address.native(), address.size) != 0 ||
        ::listen(listener.native_handle(), 1024) != 0) {
        const int code = errno;
        throw resource_error{code == EADDRINUSE
                                 ? name + " is in use by another process; free it or choose port 0"
                                 : name + " cannot be bound; choose an address of this machine",
                             detail::with_code(where, "bind", code)};
    }
    return listener;
}

/// The address that `socket` is bound to.
[[nodiscard]] inline socket_address local_address(const unique_socket& socket) noexcept {
    socket_address address;
    address.size = sizeof address.storage;
    if (::getsockname(socket.native_handle(), reinterpret_cast<sockaddr*>(&address.storage),
                      &address.size) != 0) {
        return {};
    }
    return address;
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
