#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include <weightwire/rendezvous/socket.hpp>

/// @file
/// What the two halves of the loopback transport say to each other: fixed structs, as both run on
/// one machine.

namespace weightwire::testing {

inline constexpr std::uint32_t loopback_magic = 0x4C575701U;
/// `loopback_piece_header::index` after a part's last piece.
inline constexpr std::uint64_t loopback_end = ~std::uint64_t{0};

/// From a worker rank, once, when it has connected.
struct loopback_greeting {
    std::uint32_t magic = loopback_magic;
    std::int32_t global_rank = 0;
};

/// Begins a part.
struct loopback_part_header {
    std::uint32_t magic = loopback_magic;
    std::uint32_t part = 0;
    std::uint64_t round = 0;
    std::uint64_t count = 0;  ///< parameters
};

/// Before the bytes of a piece. A tensor without bytes has one piece of size 0.
struct loopback_piece_header {
    std::uint64_t index = 0;   ///< position in the part
    std::uint64_t offset = 0;  ///< bytes from the tensor's begin, in C order
    std::uint64_t size = 0;
};

static_assert(std::has_unique_object_representations_v<loopback_greeting> &&
              std::has_unique_object_representations_v<loopback_part_header> &&
              std::has_unique_object_representations_v<loopback_piece_header>);

/// The sender's end of one worker rank.
struct loopback_link {
    std::size_t peer;       ///< index of the peer it is behind
    std::string peer_name;  ///< URL of that
    int global_rank;
    rendezvous::unique_socket socket;  ///< empty until the rank has come, and after it hung up
    std::size_t sent = 0;              ///< bytes of the message under way

    /// Writes what the socket takes of `head` and then `payload`. Returns false where the rank has
    /// hung up.
    bool advance(std::string_view head, std::string_view payload) noexcept {
        while (sent < head.size() + payload.size()) {
            const auto left =
                sent < head.size() ? head.substr(sent) : payload.substr(sent - head.size());
            const auto count = ::send(socket.native_handle(), left.data(), left.size(),
                                      MSG_NOSIGNAL | MSG_DONTWAIT);
            if (count < 0 && rendezvous::detail::would_block(errno)) {
                return true;
            }
            if (count < 0) {
                socket.close();
                return false;
            }
            sent += static_cast<std::size_t>(count);
        }
        return true;
    }
};

/// Whether the other end belongs to this process's user: names of abstract sockets are no secret.
[[nodiscard]] inline bool loopback_peer_is_ours(const rendezvous::unique_socket& socket) noexcept {
    ucred owner{};
    socklen_t size = sizeof owner;
    return ::getsockopt(socket.native_handle(), SOL_SOCKET, SO_PEERCRED, &owner, &size) == 0 &&
           owner.uid == ::geteuid();
}

}  // namespace weightwire::testing
