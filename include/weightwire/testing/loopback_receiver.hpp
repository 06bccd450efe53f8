#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stop_token>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/rendezvous/socket.hpp>
#include <weightwire/sinks/tensor_copy.hpp>
#include <weightwire/testing/gate.hpp>
#include <weightwire/testing/loopback_link.hpp>
#include <weightwire/wire/json_reader.hpp>

/// @file
/// The worker's half of the loopback transport.

namespace weightwire::testing {

/// The worker's half.
class loopback_receiver {
public:
    explicit loopback_receiver(const receiver_context& context) : context_{context} {}

    /// Connects to the trainer's socket.
    void open(const transport_open& init, deadline until, std::stop_token stop) {
        release();
        const std::string name = read_init(init);
        int code = 0;
        socket_ = rendezvous::try_connect(rendezvous::abstract_address(name), until, stop,
                                          where(phase::init), code);
        if (!socket_ || !loopback_peer_is_ours(socket_)) {
            release();
            throw peer_error{"the trainer's socket '" + name +
                                 "' is not there, or another user's; is the trainer on this "
                                 "machine and running?",
                             rendezvous::detail::with_code(where(phase::init), "connect", code)};
        }
        const loopback_greeting hello{.global_rank = context_.global_rank};
        rendezvous::detail::write_all(socket_.native_handle(),
                                      {reinterpret_cast<const char*>(&hello), sizeof hello}, until,
                                      stop, "greeting the trainer", where(phase::init));
    }

    void receive(const update_message& message, update_target& target, deadline until,
                 std::stop_token stop) {
        if (!socket_) {
            throw session_error{"nothing was opened; init comes first", where()};
        }
        try {
            if (!gate_.empty()) {
                pass_gate(gate_, until, stop, where());
            }
            check_header(message, target, read<loopback_part_header>(until, stop));
            while (receive_piece(target, until, stop)) {
            }
        } catch (...) {
            release();
            throw;
        }
    }

    void release() noexcept {
        socket_.close();
        gate_.clear();
    }

private:
    [[nodiscard]] error_context where(phase when = phase::update) const {
        return {
            .phase = when, .peer = "trainer", .backend = "loopback", .rank = context_.local_rank};
    }

    /// Reads the trainer's options; returns the name of its socket.
    [[nodiscard]] std::string read_init(const transport_open& init) {
        const wire::json_document parameters{init.wire_parameters, "loopback parameters",
                                             phase::init};
        const auto options = parameters.root();
        options.allow_only(
            {"socket", "block_in_receive", "block_rank", "rank_offset", "world_size"});
        const auto gate_name = options.find("block_in_receive");
        const auto rank = options.find("block_rank");
        const auto blocked =
            rank ? rank->integer(-1, std::numeric_limits<int>::max()) : std::int64_t{-1};
        if (gate_name && (blocked < 0 || blocked == context_.global_rank)) {
            gate_ = gate_name->string(longest_name);
        }
        if (init.transport.empty()) {
            return std::string{options.at("socket").string(longest_name)};
        }
        const wire::json_document transport{init.transport, "loopback transport", phase::init};
        transport.root().allow_only({"socket"});
        return std::string{transport.root().at("socket").string(longest_name)};
    }

    void check_header(const update_message& message, const update_target& target,
                      const loopback_part_header& header) const {
        auto part = message.part;
        for (const auto& [key, value] : message.extras) {
            const auto* const number = std::get_if<std::int64_t>(&value);
            if (key == "loopback_part" && number != nullptr) {
                part = static_cast<std::size_t>(*number);
            } else {
                throw protocol_error{
                    "the update has a field that the loopback transport does "
                    "not know: '" +
                        key + "'",
                    where()};
            }
        }
        const bool fits = header.magic == loopback_magic && header.part == part &&
                          header.count == target.size() &&
                          (!message.native || header.round == message.round);
        if (!fits) {
            throw protocol_error{
                "the trainer sends part " + std::to_string(header.part) + " of round " +
                    std::to_string(header.round) + " with " + std::to_string(header.count) +
                    " parameters; the update call announced part " + std::to_string(part) +
                    " of round " + std::to_string(message.round) + " with " +
                    std::to_string(target.size()),
                where()};
        }
    }

    /// Takes one piece to where it belongs. Returns false at the end of the part.
    bool receive_piece(update_target& target, deadline until, const std::stop_token& stop) {
        const auto piece = read<loopback_piece_header>(until, stop);
        if (piece.index == loopback_end) {
            return false;
        }
        check_piece(piece, target);
        const auto i = static_cast<std::size_t>(piece.index);
        const auto begin = static_cast<std::size_t>(piece.offset);
        const auto count = static_cast<std::size_t>(piece.size);
        if (begin == 0) {
            to_ = open_host(target, i, until);
        }
        current_ = i;
        next_ = begin + count;
        if (to_.data() == nullptr || !to_.is_contiguous()) {
            receive_staged(target, i, begin, count, until, stop);
            return true;
        }
        read_to(to_.data() + begin, count, until, stop);
        target.wrote(i, begin, count, until);
        return true;
    }

    /// Pieces of one tensor come in order, without gaps, and end where it does.
    void check_piece(const loopback_piece_header& piece, const update_target& target) const {
        const bool known = piece.index < target.size();
        const auto size =
            known ? target.parameter(static_cast<std::size_t>(piece.index)).byte_size() : 0;
        const bool goes_on = piece.index == current_ && piece.offset == next_;
        if (!known || (piece.offset != 0 && !goes_on) || piece.offset > size ||
            piece.size > size - piece.offset) {
            throw protocol_error{"the trainer sends a piece of " + std::to_string(piece.size) +
                                     " bytes at " + std::to_string(piece.offset) +
                                     " of parameter " + std::to_string(piece.index) +
                                     ", which does not belong there",
                                 where()};
        }
    }

    [[nodiscard]] mutable_tensor_view open_host(update_target& target, std::size_t i,
                                                deadline until) const {
        const auto to = target.open(i, until);
        if (to.data() != nullptr && to.device().kind != memory_kind::host) {
            auto context = where();
            context.tensor = target.parameter(i).name;
            throw unsupported_error{"the loopback transport writes host memory only", context};
        }
        return to;
    }

    /// A tensor that is strided, or not wanted: gathered first, and reported when it is whole.
    void receive_staged(update_target& target, std::size_t i, std::size_t begin, std::size_t count,
                        deadline until, const std::stop_token& stop) {
        const auto size = static_cast<std::size_t>(target.parameter(i).byte_size());
        staging_.resize(std::max(staging_.size(), size));
        read_to(staging_.data() + begin, count, until, stop);
        if (begin + count < size) {
            return;
        }
        if (to_.data() != nullptr) {
            copy_tensor(to_, tensor_view{staging_.data(), to_.type(), to_.extents()});
        }
        target.wrote(i, 0, size, until);
    }

    void read_to(std::byte* to, std::size_t size, deadline until, const std::stop_token& stop) {
        rendezvous::detail::read_exactly(socket_.native_handle(), to, size, until, stop,
                                         "receiving from the trainer", where());
    }
    template <class Header>
    [[nodiscard]] Header read(deadline until, const std::stop_token& stop) {
        Header header;
        read_to(reinterpret_cast<std::byte*>(&header), sizeof header, until, stop);
        return header;
    }

    static constexpr std::size_t longest_name = 107;

    receiver_context context_;
    rendezvous::unique_socket socket_;
    std::string gate_;
    mutable_tensor_view to_{};  ///< the tensor whose pieces are coming
    std::size_t current_ = 0;   ///< its position in the part
    std::uint64_t next_ = 0;    ///< where its next piece begins
    std::vector<std::byte> staging_;
};

}  // namespace weightwire::testing
