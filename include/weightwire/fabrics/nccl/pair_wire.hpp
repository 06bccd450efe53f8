#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/detail/descriptor.hpp>
#include <weightwire/detail/socket.hpp>
#include <weightwire/wire/unique_id.hpp>

/// @file
/// What owner and reader of the NCCL pull fabric say beside the data: the texts of the init
/// message, and frames over one TCP connection a reader.
///
///     nccl-owner <NCCL's version> <id> <boot id, or -> <port> <address>[,<address>...]
///     nccl-arena <id> <number> <bytes>

namespace weightwire::nccl {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

/// What `owner.address()` says.
struct owner_text {
    int version = 0;       ///< of NCCL
    std::uint64_t id = 0;  ///< random: a reader must name it, and handles have it too
    std::string boot{};    ///< of the owner's machine; empty where it is not known
    std::uint16_t port = 0;
    std::vector<std::string> hosts{};  ///< numeric addresses of the owner's machine
    friend bool operator==(const owner_text&, const owner_text&) = default;
};

/// What names an arena.
struct arena_text {
    std::uint64_t id = 0;      ///< of the owner
    std::uint64_t number = 0;  ///< of the arena
    std::uint64_t bytes = 0;
    friend bool operator==(const arena_text&, const arena_text&) = default;
};

/// The arena that a pair is tried with; then its bytes, and what they hold.
inline constexpr std::uint64_t trial_arena = 0;
inline constexpr std::uint64_t trial_bytes = std::uint64_t{64} << 10U;
/// Word `index` of that arena of the owner with this id.
[[nodiscard]] constexpr std::uint64_t trial_word(std::uint64_t id, std::uint64_t index) noexcept {
    return weightwire::detail::digest_term(id, (index + 1) * weightwire::detail::digest_key);
}

namespace pair_detail {

/// Longer than any address of an interface, and more of them than are tried.
inline constexpr std::size_t most_host_letters = 64;
inline constexpr std::size_t most_hosts = 16;

template <class Number>
[[nodiscard]] bool take(std::string_view text, int base, Number& to) noexcept {
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), to, base);
    return status == std::errc{} && end == text.data() + text.size();
}
/// `Count` fields with one blank between them, or nothing.
template <std::size_t Count>
[[nodiscard]] std::optional<std::array<std::string_view, Count>> fields(std::string_view text) {
    std::array<std::string_view, Count> found;
    for (std::size_t i = 0; i < Count; ++i) {
        const auto blank = text.find(' ');
        if ((blank == std::string_view::npos) != (i + 1 == Count)) {
            return std::nullopt;
        }
        found[i] = text.substr(0, blank);
        text.remove_prefix(i + 1 == Count ? text.size() : blank + 1);
        if (found[i].empty()) {
            return std::nullopt;
        }
    }
    return found;
}

}  // namespace pair_detail

[[nodiscard]] inline std::string to_text(const owner_text& value) {
    auto text = "nccl-owner " + std::to_string(value.version) + " " + digest_text(value.id) + " " +
                (value.boot.empty() ? "-" : value.boot) + " " + std::to_string(value.port) + " ";
    for (std::size_t i = 0; i < value.hosts.size(); ++i) {
        text += (i == 0 ? "" : ",") + value.hosts[i];
    }
    return text;
}
[[nodiscard]] inline std::string to_text(const arena_text& value) {
    return "nccl-arena " + digest_text(value.id) + " " + std::to_string(value.number) + " " +
           std::to_string(value.bytes);
}

/// The inverse; nothing where the text is anything else.
[[nodiscard]] inline std::optional<owner_text> parse_owner(std::string_view text) {
    const auto found = pair_detail::fields<6>(text);
    owner_text value;
    if (!found || (*found)[0] != "nccl-owner" ||
        !pair_detail::take((*found)[1], 10, value.version) ||
        !pair_detail::take((*found)[2], 16, value.id) ||
        !pair_detail::take((*found)[4], 10, value.port) || value.port == 0 || value.version <= 0) {
        return std::nullopt;
    }
    value.boot = (*found)[3] == "-" ? "" : (*found)[3];
    for (auto rest = (*found)[5];;) {
        const auto end = std::min(rest.find(','), rest.size());
        const auto host = rest.substr(0, end);
        if (host.empty() || host.size() > pair_detail::most_host_letters ||
            value.hosts.size() == pair_detail::most_hosts ||
            host.find_first_not_of("0123456789abcdefABCDEF.:") != std::string_view::npos) {
            return std::nullopt;
        }
        value.hosts.emplace_back(host);
        if (end == rest.size()) {
            return value;
        }
        rest.remove_prefix(end + 1);
    }
}
[[nodiscard]] inline std::optional<arena_text> parse_arena(std::string_view text) {
    const auto found = pair_detail::fields<4>(text);
    arena_text value;
    if (!found || (*found)[0] != "nccl-arena" || !pair_detail::take((*found)[1], 16, value.id) ||
        !pair_detail::take((*found)[2], 10, value.number) ||
        !pair_detail::take((*found)[3], 10, value.bytes)) {
        return std::nullopt;
    }
    return value;
}

/// The first field of every frame.
enum class pair_frame_kind : std::uint32_t {
    hello = 1,     ///< reader: `hello_frame`, the first one
    ask = 2,       ///< reader: `ask_frame`; its receives are in the stream, but of the trial
    welcome = 16,  ///< owner: the unique id of the communicator that both begin now
    refused = 17,  ///< owner: kind and text, a line each; the connection ends
};

struct hello_frame {
    static constexpr std::uint64_t right_magic = 0x3170'6c63'636e'7777U;  // "wwncclp1"
    std::uint64_t magic = right_magic;
    std::uint64_t id = 0;  ///< of the owner that is meant
    std::int32_t version = 0;
    std::int32_t channels = 0;
};
struct asked_piece {
    std::uint64_t arena = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
};
/// What the reader's receives wait for, in their order.
struct ask_frame {
    /// Of one exchange of a pair.
    static constexpr std::size_t most_pieces = 16;
    std::uint64_t count = 0;
    std::array<asked_piece, most_pieces> pieces{};
};

/// Frames over a socket that never blocks. Nothing larger than the largest frame is taken in.
class pair_socket {
public:
    struct frame {
        pair_frame_kind kind{};
        std::string_view body{};  ///< good until the next `fill`

        /// @throws protocol_error it has another size.
        template <class Body>
        [[nodiscard]] Body as() const {
            static_assert(std::is_trivially_copyable_v<Body>);
            if (body.size() != sizeof(Body)) {
                throw protocol_error{"a frame of an NCCL pair has " + std::to_string(body.size()) +
                                     " bytes, expected " + std::to_string(sizeof(Body))};
            }
            Body value;
            std::memcpy(&value, body.data(), sizeof value);
            return value;
        }
    };
    static constexpr std::size_t head_bytes = 8;
    static constexpr std::size_t most_bytes = 4096;

    pair_socket() noexcept = default;
    explicit pair_socket(weightwire::detail::descriptor socket) : socket_{std::move(socket)} {
        in_.reserve(most_bytes);
        out_.reserve(most_bytes);
    }
    [[nodiscard]] int native_handle() const noexcept { return socket_.native_handle(); }
    [[nodiscard]] explicit operator bool() const noexcept { return static_cast<bool>(socket_); }
    void close() noexcept { socket_.close(); }

    /// Takes what has come. False: the other side has hung up, or says more than it may before it
    /// was answered.
    [[nodiscard]] bool fill() {
        in_.erase(0, begin_);
        begin_ = 0;
        std::array<char, most_bytes> piece;
        const auto room = most_bytes - std::min(most_bytes, in_.size());
        if (room == 0) {
            return false;
        }
        const auto count = ::recv(socket_.native_handle(), piece.data(), room, MSG_DONTWAIT);
        if (count > 0) {
            in_.append(piece.data(), static_cast<std::size_t>(count));
        }
        return count > 0 || (count < 0 && weightwire::detail::would_block(errno));
    }
    /// The next whole frame.
    /// @throws protocol_error it is none of ours, or too large.
    [[nodiscard]] std::optional<frame> next() {
        if (in_.size() - begin_ < head_bytes) {
            return std::nullopt;
        }
        std::array<std::uint32_t, 2> head{};
        std::memcpy(head.data(), in_.data() + begin_, head_bytes);
        if (head[1] > most_bytes - head_bytes) {
            throw protocol_error{"the connection of an NCCL pair carries what is no frame"};
        }
        if (in_.size() - begin_ - head_bytes < head[1]) {
            return std::nullopt;
        }
        const auto* const body = in_.data() + begin_ + head_bytes;
        begin_ += head_bytes + head[1];
        return frame{static_cast<pair_frame_kind>(head[0]), {body, head[1]}};
    }
    void queue(pair_frame_kind kind, std::string_view body) {
        const std::array<std::uint32_t, 2> head{static_cast<std::uint32_t>(kind),
                                                static_cast<std::uint32_t>(body.size())};
        out_.append(reinterpret_cast<const char*>(head.data()), head_bytes);
        out_.append(body);
    }
    template <class Body>
    void queue_value(pair_frame_kind kind, const Body& value) {
        static_assert(std::is_trivially_copyable_v<Body>);
        queue(kind, {reinterpret_cast<const char*>(&value), sizeof value});
    }
    /// Sends what it can; whether all is sent. What fails shows in the next `fill`.
    bool flush() noexcept {
        while (sent_ < out_.size()) {
            const auto count = ::send(socket_.native_handle(), out_.data() + sent_,
                                      out_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (count < 0) {
                return false;
            }
            sent_ += static_cast<std::size_t>(count);
        }
        out_.clear();
        sent_ = 0;
        return true;
    }
    [[nodiscard]] bool wants_to_send() const noexcept { return sent_ < out_.size(); }

private:
    weightwire::detail::descriptor socket_;
    std::string in_;
    std::size_t begin_ = 0;  ///< of the next frame
    std::string out_;
    std::size_t sent_ = 0;
};

/// The body of a `refused` frame.
[[nodiscard]] inline std::string refusal_of(std::string_view kind, std::string_view text) {
    constexpr std::size_t most = 2048;
    return (std::string{kind} + "\n").append(text.substr(0, most));
}
/// The inverse, as an error of the same kind in `where`.
[[nodiscard]] inline failure failure_of(std::string_view refused, error_context where) {
    const auto cut = std::min(refused.find('\n'), refused.size());
    return {.kind = cut == 0 ? std::string{"peer"} : std::string{refused.substr(0, cut)},
            .text = std::string{refused.substr(std::min(cut + 1, refused.size()))},
            .context = std::move(where)};
}

}  // namespace weightwire::nccl
