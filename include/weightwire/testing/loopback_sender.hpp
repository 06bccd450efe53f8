#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/rendezvous/socket.hpp>
#include <weightwire/sinks/tensor_copy.hpp>
#include <weightwire/testing/gate.hpp>
#include <weightwire/testing/loopback_init_info.hpp>
#include <weightwire/testing/loopback_link.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/parameter_lists.hpp>

/// @file
/// The trainer's half of the loopback transport.

namespace weightwire::testing {

/// The trainer's half: listens at a fresh abstract socket, whose name travels at init, and writes
/// every piece to every rank that has come.
///
/// A peer that hangs up is left out as long as another one is there: its own control call says why.
/// When all have been dropped, `send` reads on and sends nothing.
class loopback_sender {
public:
    explicit loopback_sender(const loopback_init_info& info) : info_{info} {
        if (info.piece_bytes == 0 || info.piece_bytes % 8 != 0 || info.parts == 0) {
            throw usage_error{"piece_bytes must be a multiple of 8 and parts at least 1",
                              {.backend = "loopback"}};
        }
    }

    [[nodiscard]] std::vector<transport_init> prepare(const sender_context& context) {
        parameters_ = &context.parameters;
        name_ = unique_socket_name("loopback");
        listener_ = rendezvous::listen_at(rendezvous::abstract_address(name_), name_,
                                          {.phase = phase::init, .backend = "loopback"});
        links_.clear();
        dropped_.clear();
        for (std::size_t peer = 0; peer < context.peers.size(); ++peer) {
            const auto& info = context.peers[peer];
            dropped_.emplace_back(false);
            for (int rank = 0; rank < info.world_size; ++rank) {
                links_.push_back({peer, info.name, info.rank_offset + rank, {}});
            }
        }
        cut_parts();
        std::vector<transport_init> inits;
        for (const auto& info : context.peers) {
            inits.push_back({native_init(), {{.init_info = vllm_init(info, context.world_size)}}});
        }
        return inits;
    }

    /// Waits until every rank of every peer has come.
    void open(deadline until, std::stop_token stop) { wait_for_links(phase::init, until, stop); }

    [[nodiscard]] std::span<const update_part> parts() const noexcept { return parts_; }

    void send(std::uint64_t round, std::size_t part, tensor_stream& stream, deadline until,
              std::stop_token stop) {
        try {
            if (!info_.block_before_send.empty()) {
                pass_gate(info_.block_before_send, until, stop, where());
            }
            send_part(round, part, stream, until, stop);
        } catch (...) {
            // The ranks hold an unknown part of a message: they must see the end of it.
            for (auto& one : links_) {
                one.socket.close();
            }
            throw;
        }
    }

    /// Of the last round, where `verify` was asked for.
    [[nodiscard]] std::span<const std::uint64_t> digests() const noexcept { return digests_; }

    void drop_peer(std::size_t peer) noexcept { dropped_[peer].store(true); }
    /// Its ranks have opened new connections at their second init; those take the old ones' place.
    void restore_peer(std::size_t peer) {
        greet();
        dropped_[peer].store(false);
    }

    [[nodiscard]] std::string description() const {
        return "loopback: " + std::to_string(links_.size()) + " ranks, " +
               std::to_string(parts_.size()) + " parts a round, through the abstract socket " +
               name_;
    }

    void close(deadline) {
        links_.clear();
        listener_.close();
    }

private:
    [[nodiscard]] error_context where(const loopback_link* to = nullptr,
                                      phase when = phase::update) const {
        return {.phase = when,
                .peer = to == nullptr ? std::string{}
                                      : to->peer_name + " (worker rank " +
                                            std::to_string(to->global_rank) + ")",
                .backend = "loopback"};
    }
    [[nodiscard]] bool is_dropped(const loopback_link& one) const noexcept {
        return dropped_[one.peer].load();
    }

    /// Runs of nearly equal numbers of parameters.
    void cut_parts() {
        parts_.clear();
        const auto all = parameters_->parameters();
        const auto count = std::min(info_.parts, all.size());
        const bool speaks_vllm = std::ranges::all_of(
            all, [](const auto& parameter) { return !traits_of(parameter.dtype).torch.empty(); });
        for (std::size_t i = 0; i < count; ++i) {
            const auto first = all.size() * i / count;
            const auto size = all.size() * (i + 1) / count - first;
            parts_.push_back({first, size, {}});
            if (speaks_vllm) {
                parts_.back().vllm_bodies.push_back(body_of(first, size, i));
            }
        }
        digests_.assign(info_.verify ? all.size() : 0, 0);
    }

    /// `{"update_info":{"names":…,"dtype_names":…,"shapes":…,"loopback_part":i}}`.
    [[nodiscard]] std::string body_of(std::size_t first, std::size_t count,
                                      std::size_t index) const {
        const auto run = parameters_->parameters().subspan(first, count);
        std::string out;
        wire::json_writer writer{out};
        writer.begin_object().key("update_info").begin_object();
        wire::write_parameter_lists(writer, manifest{{run.begin(), run.end()}}, "dtype_names");
        writer.key("loopback_part").integer(index).end_object().end_object();
        return out;
    }

    [[nodiscard]] std::string native_init() const {
        std::string out;
        wire::json_writer{out}.begin_object().key("socket").string(name_).end_object();
        return out;
    }
    [[nodiscard]] std::string vllm_init(const peer_info& peer, int world_size) const {
        std::string out;
        wire::json_writer{out}
            .begin_object()
            .key("socket")
            .string(name_)
            .key("block_in_receive")
            .string(info_.block_in_receive)
            .key("block_rank")
            .integer(info_.block_rank)
            .key("rank_offset")
            .integer(peer.rank_offset)
            .key("world_size")
            .integer(world_size)
            .end_object();
        return out;
    }

    /// Takes who has connected; the newest connection of a rank replaces an older one.
    void accept_all() {
        for (;;) {
            auto socket = rendezvous::unique_socket::from_native(::accept4(
                listener_.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
            if (!socket) {
                return;
            }
            if (loopback_peer_is_ours(socket)) {
                strangers_.push_back(std::move(socket));
            }
        }
    }

    /// Reads the greetings of who has connected; who greets wrongly is hung up on.
    void greet() {
        accept_all();
        std::erase_if(strangers_, [&](rendezvous::unique_socket& stranger) {
            loopback_greeting hello;
            const auto count =
                ::recv(stranger.native_handle(), &hello, sizeof hello, MSG_DONTWAIT | MSG_PEEK);
            if (count < 0 && rendezvous::detail::would_block(errno)) {
                return false;
            }
            if (count == static_cast<ssize_t>(sizeof hello) && hello.magic == loopback_magic) {
                [[maybe_unused]] const auto taken =
                    ::recv(stranger.native_handle(), &hello, sizeof hello, MSG_DONTWAIT);
                for (auto& one : links_) {
                    if (one.global_rank == hello.global_rank) {
                        one.socket = std::exchange(stranger, {});
                    }
                }
            }
            return true;
        });
    }

    void wait_for_links(phase when, deadline until, const std::stop_token& stop) {
        for (;;) {
            greet();
            const auto missing = std::ranges::find_if(
                links_, [&](const loopback_link& one) { return !one.socket && !is_dropped(one); });
            if (missing == links_.end()) {
                return;
            }
            rendezvous::detail::check_wait(until, stop, "waiting for a worker rank to connect",
                                           where(&*missing, when));
            std::vector<pollfd> entries{{listener_.native_handle(), POLLIN, 0}};
            for (const auto& stranger : strangers_) {
                entries.push_back({stranger.native_handle(), POLLIN, 0});
            }
            ::poll(entries.data(), entries.size(),
                   until.poll_milliseconds(rendezvous::detail::stop_poll_ms));
        }
    }

    void send_part(std::uint64_t round, std::size_t part, tensor_stream& stream, deadline until,
                   const std::stop_token& stop) {
        wait_for_links(phase::update, until, stop);
        const auto& share = parts_[part];
        broadcast(
            loopback_part_header{
                .part = static_cast<std::uint32_t>(part), .round = round, .count = share.count},
            {}, until, stop);
        for (std::size_t i = 0; i < share.count; ++i) {
            const auto* const tensor = stream.next();
            if (tensor == nullptr) {
                throw data_error{"the source ended before the part did",
                                 {.phase = phase::update, .backend = "loopback"}};
            }
            send_tensor(i, share.first + i, *tensor, until, stop);
        }
        broadcast(loopback_piece_header{.index = loopback_end}, {}, until, stop);
    }

    void send_tensor(std::size_t index, std::size_t position, const named_tensor& tensor,
                     deadline until, const std::stop_token& stop) {
        if (tensor.tensor.device().kind != memory_kind::host) {
            auto context = where();
            context.tensor = std::string{tensor.name};
            throw unsupported_error{"the loopback transport reads host memory only", context};
        }
        const auto bytes = contiguous_bytes(tensor.tensor);
        std::uint64_t sum = 0;
        std::size_t offset = 0;
        do {  // once for a tensor without bytes
            const auto piece =
                bytes.subspan(offset, std::min(info_.piece_bytes, bytes.size() - offset));
            broadcast(loopback_piece_header{.index = index, .offset = offset, .size = piece.size()},
                      {reinterpret_cast<const char*>(piece.data()), piece.size()}, until, stop);
            sum += info_.verify ? digest_piece(piece, offset) : 0;
            offset += piece.size();
        } while (offset < bytes.size());
        if (info_.verify) {
            digests_[position] = digest_finish(sum, bytes.size());
        }
    }

    /// The tensor's bytes in C order: its own, or a copy where it is strided.
    [[nodiscard]] std::span<const std::byte> contiguous_bytes(const tensor_view& tensor) {
        if (tensor.is_contiguous()) {
            return tensor.bytes();
        }
        staging_.resize(tensor.byte_size());
        copy_tensor({staging_.data(), tensor.type(), tensor.extents()}, tensor);
        return staging_;
    }

    /// Writes `header` and `payload` to every rank that takes part.
    template <class Header>
    void broadcast(const Header& header, std::string_view payload, deadline until,
                   const std::stop_token& stop) {
        const std::string_view head{reinterpret_cast<const char*>(&header), sizeof header};
        for (auto& one : links_) {
            one.sent = 0;
        }
        for (;;) {
            std::vector<pollfd> entries;
            const loopback_link* waited_for = nullptr;
            std::size_t live = 0;
            for (auto& one : links_) {
                if (is_dropped(one)) {
                    one.socket.close();  // whoever still reads there learns that it is over
                }
                if (!one.socket) {
                    continue;
                }
                const bool open = one.advance(head, payload);
                live += open ? 1 : 0;
                if (open && one.sent < head.size() + payload.size()) {
                    waited_for = &one;
                    entries.push_back({one.socket.native_handle(), POLLOUT, 0});
                }
            }
            if (live == 0) {
                wait_for_verdict(until, stop);
                return;
            }
            if (waited_for == nullptr) {
                return;
            }
            rendezvous::detail::check_wait(until, stop, "sending to a worker rank",
                                           where(waited_for));
            ::poll(entries.data(), entries.size(),
                   until.poll_milliseconds(rendezvous::detail::stop_poll_ms));
        }
    }

    /// Nobody is left to send to. A rank that hangs up mostly says why in its reply to the control
    /// call, which is on its way: whoever reads that drops the peer or stops us.
    void wait_for_verdict(deadline until, const std::stop_token& stop) const {
        const auto patience = until.capped(std::chrono::seconds{1});
        for (;;) {
            const auto silent = std::ranges::find_if(
                links_, [&](const loopback_link& one) { return !is_dropped(one); });
            if (silent == links_.end()) {
                return;  // all dropped: what became of them is known elsewhere
            }
            rendezvous::detail::check_wait(until, stop, "sending to a worker rank",
                                           where(&*silent));
            if (patience.expired()) {
                throw peer_error{"every worker rank has hung up", where(&*silent)};
            }
            ::poll(nullptr, 0, patience.poll_milliseconds(rendezvous::detail::stop_poll_ms));
        }
    }

    loopback_init_info info_;
    const manifest* parameters_ = nullptr;
    std::string name_;
    rendezvous::unique_socket listener_;
    std::vector<rendezvous::unique_socket> strangers_;
    std::vector<loopback_link> links_;
    std::deque<std::atomic<bool>> dropped_;  ///< by peer
    std::vector<update_part> parts_;
    std::vector<std::uint64_t> digests_;
    std::vector<std::byte> staging_;
};

}  // namespace weightwire::testing
