#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/rendezvous/socket.hpp>

/// @file
/// What a worker rank and a trainer rank tell each other beside the data: frames on a TCP
/// connection. docs/wire.md lists them.

namespace weightwire::sharded_pull {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

/// The first field of every frame.
enum class frame_kind : std::uint32_t {
    // Worker to trainer rank.
    hello = 1,    ///< `hello_body`: the first frame
    needs = 2,    ///< to rank 0: node, and what the rank reads (wire/pull_node_codec.hpp)
    part = 3,     ///< to an owner: what the rank reads from it (plan/pull_plan.hpp)
    freed = 4,    ///< `chunk_body`: the chunk was copied
    taken = 5,    ///< `round_body`: all of the round's chunks were
    landing = 6,  ///< to rank 0: memory in which the rank lands chunks (wire/pull_node_codec.hpp)
    landed = 7,   ///< `chunk_body`: the chunk lies in the rank's landing memory, for its node
    waits = 8,    ///< `round_body`: a chunk waits for landing memory that others still read
    // Trainer rank to worker.
    row = 16,        ///< from rank 0: from whom the rank reads what (plan/pull_routing.hpp)
    accepted = 17,   ///< `hash_body`: of the part
    refused = 18,    ///< kind, tensor and text, a line each: the connection ends
    published = 19,  ///< `chunk_body`: the chunk may be copied
    confirmed = 20,  ///< `round_body`: none of the round's chunks was overwritten before `taken`
    landings = 21,   ///< from rank 0: landing memory of node peers (wire/pull_node_codec.hpp)
    passed = 22,     ///< `chunk_body`: the chunk may be copied from a node peer's landing memory
    released = 23,   ///< `chunk_body`: nobody reads it in this rank's landing memory any more
    // Trainer rank 0 to the others.
    dropped = 32,  ///< `drop_body`: a peer takes no part in the round any more
};

inline constexpr std::uint64_t hello_magic = 0x3270'6c6c'7570'7777U;  // "wwpullp2"

struct hello_body {
    /// In the place of a worker rank: trainer rank 0 speaks.
    static constexpr std::uint32_t of_trainer = 0xFFFF'FFFFU;

    std::uint64_t magic = hello_magic;
    std::uint64_t nonce = 0;        ///< of the rank that is connected to
    std::uint32_t worker_rank = 0;  ///< in the transfer group, from 1
    std::uint32_t world_size = 0;
};
/// Both sides name a chunk by all of it: a slot of the arena is used again, a generation never.
struct chunk_body {
    std::uint64_t round = 0;
    std::uint64_t generation = 0;
    std::uint32_t section = 0;  ///< of the part
    std::uint32_t chunk = 0;    ///< of the section
    std::uint32_t slot = 0;     ///< of the arena
    std::uint32_t landing = 0;  ///< slot of landing memory: where it is landed, passed, released
};
struct round_body {
    std::uint64_t round = 0;
};
struct drop_body {
    static constexpr std::uint64_t everybody = ~std::uint64_t{0};
    std::uint64_t round = 0;
    std::uint64_t peer = 0;  ///< index, or `everybody`
};
struct hash_body {
    std::uint64_t hash = 0;
};

/// One frame. The body lies in the socket's buffer: good until the next `fill`.
struct frame {
    frame_kind kind{};
    std::string_view body{};

    /// The body as one of the structures above.
    /// @throws protocol_error it has another size.
    template <class Body>
    [[nodiscard]] Body as() const {
        static_assert(std::is_trivially_copyable_v<Body>);
        if (body.size() != sizeof(Body)) {
            throw protocol_error{"a control frame of kind " +
                                 std::to_string(static_cast<std::uint32_t>(kind)) + " has " +
                                 std::to_string(body.size()) + " bytes, expected " +
                                 std::to_string(sizeof(Body))};
        }
        Body value;
        std::memcpy(&value, body.data(), sizeof value);
        return value;
    }
};

/// `value`'s bytes, for `frame_socket::queue`.
template <class Body>
[[nodiscard]] std::string_view bytes_of(const Body& value) noexcept {
    static_assert(std::is_trivially_copyable_v<Body>);
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// The text of a `refused` frame, as an error of the same kind.
[[nodiscard]] inline failure failure_in(std::string_view refused, error_context where) {
    const auto line = [&] {
        const auto cut = std::min(refused.find('\n'), refused.size());
        std::string made{refused.substr(0, cut)};
        refused.remove_prefix(std::min(cut + 1, refused.size()));
        return made;
    };
    failure made{.kind = line()};
    made.context = std::move(where);
    made.context.tensor = line();
    made.text = std::string{refused};
    return made;
}
/// The inverse.
[[nodiscard]] inline std::string refusal_of(const failure& why) {
    return why.kind + "\n" + why.context.tensor + "\n" + why.text;
}

/// Frames over a socket that never blocks. One thread reads; `queue` and `flush` may be another's,
/// not at the same time as each other. Once its buffers have grown, nothing is allocated.
class frame_socket {
public:
    /// Bytes of kind and length before a body.
    static constexpr std::size_t header_bytes = 16;

    frame_socket() noexcept = default;
    /// @param most bytes of a body that the other side may send.
    frame_socket(rendezvous::unique_socket socket, std::uint64_t most)
        : socket_{std::move(socket)}, most_{most} {}

    [[nodiscard]] int native_handle() const noexcept { return socket_.native_handle(); }
    [[nodiscard]] explicit operator bool() const noexcept { return static_cast<bool>(socket_); }
    void allow(std::uint64_t most) noexcept { most_ = most; }
    void close() noexcept { socket_.close(); }
    /// Forgets what has come and was not looked at.
    void discard() noexcept {
        in_.clear();
        begin_ = 0;
    }
    /// The other side sees the end at once; the descriptor stays, for who polls it.
    void shut_down() const noexcept { ::shutdown(socket_.native_handle(), SHUT_RDWR); }

    /// Takes what has arrived, or the next frame's worth. Returns false where the other side has
    /// hung up.
    [[nodiscard]] bool fill() {
        in_.erase(0, begin_);
        begin_ = 0;
        for (;;) {
            const auto before = in_.size();
            constexpr std::size_t piece = 65536;
            in_.resize(before + piece);
            const auto count =
                ::recv(socket_.native_handle(), in_.data() + before, piece, MSG_DONTWAIT);
            in_.resize(before + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
            const bool enough = in_.size() > header_bytes + most_;
            if (count == static_cast<ssize_t>(piece) && !enough) {
                continue;
            }
            return count > 0 || (count < 0 && weightwire::detail::would_block(errno));
        }
    }
    /// The next whole frame.
    /// @throws protocol_error a body larger than allowed.
    [[nodiscard]] std::optional<frame> next() {
        const auto ready = in_.size() - begin_;
        if (ready < header_bytes) {
            return std::nullopt;
        }
        std::uint64_t kind = 0;
        std::uint64_t size = 0;
        std::memcpy(&kind, in_.data() + begin_, sizeof kind);
        std::memcpy(&size, in_.data() + begin_ + sizeof kind, sizeof size);
        if (kind > 0xFFFF'FFFFU || size > most_) {
            throw protocol_error{"a control connection carries what is no frame, or one of " +
                                 std::to_string(size) + " bytes, where " + std::to_string(most_) +
                                 " are allowed"};
        }
        if (ready - header_bytes < size) {
            return std::nullopt;
        }
        const auto* const body = in_.data() + begin_ + header_bytes;
        begin_ += header_bytes + static_cast<std::size_t>(size);
        return frame{static_cast<frame_kind>(kind), {body, static_cast<std::size_t>(size)}};
    }

    void queue(frame_kind kind, std::string_view body) {
        const std::uint64_t head[2] = {static_cast<std::uint64_t>(kind), body.size()};
        out_.append(reinterpret_cast<const char*>(head), sizeof head);
        out_.append(body);
    }
    /// Sends what it can; returns whether all is sent.
    /// @throws peer_error the other side hung up.
    bool flush() {
        while (sent_ < out_.size()) {
            const auto count = ::send(socket_.native_handle(), out_.data() + sent_,
                                      out_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (count < 0) {
                if (weightwire::detail::would_block(errno)) {
                    return false;
                }
                throw peer_error{"the control connection ended",
                                 weightwire::detail::with_errno(error_context{}, "send", errno)};
            }
            sent_ += static_cast<std::size_t>(count);
        }
        out_.clear();
        sent_ = 0;
        return true;
    }
    [[nodiscard]] bool wants_to_send() const noexcept { return sent_ < out_.size(); }

private:
    rendezvous::unique_socket socket_;
    std::uint64_t most_ = 0;
    std::string in_;
    std::size_t begin_ = 0;  ///< of the next frame in `in_`
    std::string out_;
    std::size_t sent_ = 0;  ///< of `out_`
};

/// Sends a frame, waiting for room.
/// @throws peer_error, timeout_error, cancelled_error.
inline void send_frame(frame_socket& to, frame_kind kind, std::string_view body, deadline until,
                       const std::stop_token& stop, const error_context& where) {
    to.queue(kind, body);
    try {
        while (!to.flush()) {
            rendezvous::detail::wait_ready(to.native_handle(), POLLOUT, until, stop,
                                           "speaking to a trainer rank", where);
        }
    } catch (const peer_error&) {
        // What it said before it hung up is worth more.
        static_cast<void>(to.fill());
        if (const auto said = to.next(); said && said->kind == frame_kind::refused) {
            failure_in(said->body, where).raise();
        }
        throw peer_error{"a trainer rank hung up", where};
    }
}

/// The next frame, which is of `expected`.
/// @throws what a `refused` frame says; peer_error, timeout_error, cancelled_error, protocol_error.
[[nodiscard]] inline frame await_frame(frame_socket& from, frame_kind expected, deadline until,
                                       const std::stop_token& stop, const error_context& where) {
    for (bool open = true;;) {
        if (const auto got = from.next()) {
            if (got->kind == frame_kind::refused) {
                failure_in(got->body, where).raise();
            }
            if (got->kind != expected) {
                throw protocol_error{"a trainer rank sent a control frame of kind " +
                                         std::to_string(static_cast<std::uint32_t>(got->kind)) +
                                         " where one of kind " +
                                         std::to_string(static_cast<std::uint32_t>(expected)) +
                                         " was due",
                                     where};
            }
            return *got;
        }
        if (!open) {
            throw peer_error{"a trainer rank hung up", where};
        }
        rendezvous::detail::wait_ready(from.native_handle(), POLLIN, until, stop,
                                       "waiting for a trainer rank", where);
        open = from.fill();
    }
}

}  // namespace weightwire::sharded_pull
