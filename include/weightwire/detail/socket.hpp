#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/detail/descriptor.hpp>

/// What the HTTP server and the rendezvous have in common below their waits and errors: addresses,
/// and sockets that never block. Nothing here throws an error of the library's; the caller knows
/// what was tried and says it.
namespace weightwire::detail {

/// An address to bind or to connect to.
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

/// `127.0.0.1:8000` or `[::1]:8000`: what messages and URLs call a server.
[[nodiscard]] inline std::string host_and_port(std::string_view host, std::uint16_t port) {
    const bool bracket = host.find(':') != std::string_view::npos;
    return (bracket ? "[" + std::string{host} + "]" : std::string{host}) + ":" +
           std::to_string(port);
}

/// Whether a call on a socket that never blocks is to be tried again after a wait.
[[nodiscard]] inline bool would_block(int code) noexcept {
    return code == EAGAIN || code == EWOULDBLOCK || code == EINTR;
}

/// `getaddrinfo` for stream sockets with nothing but its result; empty where it failed, with the
/// code in `status`.
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

/// Sets an option of type `int`; that an option is not there costs no more than its benefit.
inline void set_option(int socket, int level, int option, int value) noexcept {
    ::setsockopt(socket, level, option, &value, sizeof value);
}

/// A stream socket that never blocks and is closed on exec; none, and `errno`, where it fails.
[[nodiscard]] inline descriptor stream_socket(int family) noexcept {
    return descriptor::from_native(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

/// Binds `socket` to `address`, with IPv4 where that is IPv6's wildcard, and listens.
/// @returns `errno`, or 0.
[[nodiscard]] inline int bind_and_listen(const descriptor& socket, const socket_address& address,
                                         int backlog) noexcept {
    const int native = socket.native_handle();
    if (address.family() != AF_UNIX) {
        // A server that has just ended leaves connections behind that would hold its port.
        set_option(native, SOL_SOCKET, SO_REUSEADDR, 1);
    }
    if (address.family() == AF_INET6) {
        set_option(native, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    }
    return ::bind(native, address.native(), address.size) != 0 || ::listen(native, backlog) != 0
               ? errno
               : 0;
}

/// The address that `socket` is bound to; an empty one, and `errno`, where the system does not
/// tell.
[[nodiscard]] inline socket_address local_address(const descriptor& socket) noexcept {
    socket_address address;
    address.size = sizeof address.storage;
    if (::getsockname(socket.native_handle(), reinterpret_cast<sockaddr*>(&address.storage),
                      &address.size) != 0) {
        return {};
    }
    return address;
}

}  // namespace weightwire::detail
