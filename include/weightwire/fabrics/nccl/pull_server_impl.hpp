#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include <weightwire/fabrics/nccl/pull_server.hpp>

/// @file
/// Bodies of `pull_server`.

namespace weightwire::nccl {

template <PairMachinery M>
void pull_server<M>::listen() {
    const error_context where{.phase = phase::init, .backend = "nccl"};
    int code = 0;
    for (const auto* const everywhere : {"::", "0.0.0.0"}) {
        int status = 0;
        const auto found = weightwire::detail::look_up(everywhere, 0, AI_NUMERICHOST, status);
        if (found.empty()) {
            continue;
        }
        listener_ = weightwire::detail::stream_socket(found.front().family());
        code =
            listener_ ? weightwire::detail::bind_and_listen(listener_, found.front(), 256) : errno;
        if (listener_ && code == 0) {
            port_ = weightwire::detail::local_address(listener_).port();
            break;
        }
    }
    if (!wake_ || port_ == 0) {
        throw resource_error{weightwire::detail::is_out_of_descriptors(code)
                                 ? std::string{weightwire::detail::no_descriptor_is_left}
                                 : "no port can be opened for the readers of a trainer rank",
                             weightwire::detail::with_errno(where, "listen", code)};
    }
}

template <PairMachinery M>
void pull_server<M>::run(const std::stop_token& stop) noexcept {
    while (!stop.stop_requested()) {
        try {
            wait();
            for (std::size_t i = 0; i < readers_.size(); ++i) {
                if (!readers_[i]->gone) {
                    serve(*readers_[i], i + 2 < polled_.size() && polled_[i + 2].revents != 0);
                }
            }
            if (polled_[1].revents != 0) {
                take_new();
            }
            begin_exchange();
            measure();
            std::erase_if(readers_, [](const auto& each) { return each->gone; });
            ended_.sweep([](none) {});
        } catch (...) {
            // No memory for a moment: the readers that are there stay, and time goes on.
            std::this_thread::sleep_for(std::chrono::milliseconds{10});
        }
    }
    for (const auto& each : readers_) {
        drop(*each);
    }
    ended_.finish([](none) {});
    lost_ = ended_.lost();
}

/// Until something comes. What is in progress at NCCL or on the device tells nobody: it is looked
/// at again after a moment.
template <PairMachinery M>
void pull_server<M>::wait() {
    polled_.resize(readers_.size() + 2);
    std::size_t strangers = 0;
    bool moving = false;
    bool joining = ended_.under_way();
    for (std::size_t i = 0; i < readers_.size(); ++i) {
        const auto& each = *readers_[i];
        strangers += each.is_paired() ? 0 : 1;
        moving = moving || each.in_flight() || each.at == stage::asked;
        joining = joining || each.at == stage::joining;
        const auto out = each.socket.wants_to_send() ? POLLOUT : 0;
        polled_[i + 2] = {.fd = each.socket.native_handle(),
                          .events = static_cast<short>(POLLIN | out),
                          .revents = 0};
    }
    polled_[0] = {.fd = wake_.native_handle(), .events = POLLIN, .revents = 0};
    polled_[1] = {.fd = listener_.native_handle(),
                  .events = static_cast<short>(strangers < most_strangers ? POLLIN : 0),
                  .revents = 0};
    constexpr long soon_ns = 20'000;
    constexpr long later_ns = 1'000'000;
    constexpr long seldom_ns = 500'000'000;
    const timespec longest{.tv_sec = 0,
                           .tv_nsec = moving    ? soon_ns
                                      : joining ? later_ns
                                                : seldom_ns};
    if (::ppoll(polled_.data(), polled_.size(), &longest, nullptr) < 0) {
        for (auto& each : polled_) {
            each.revents = 0;
        }
    }
}

template <PairMachinery M>
void pull_server<M>::take_new() {
    auto socket = weightwire::detail::descriptor::from_native(
        ::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
        if (weightwire::detail::is_out_of_descriptors(errno)) {
            // It waits in the listener, which would wake this thread at once again.
            std::this_thread::sleep_for(std::chrono::milliseconds{10});
        }
        return;
    }
    weightwire::detail::set_option(socket.native_handle(), IPPROTO_TCP, TCP_NODELAY, 1);
    // A machine that is gone says nothing, and its pair would be kept for ever.
    weightwire::detail::set_option(socket.native_handle(), SOL_SOCKET, SO_KEEPALIVE, 1);
    weightwire::detail::set_option(socket.native_handle(), IPPROTO_TCP, TCP_KEEPIDLE, 30);
    weightwire::detail::set_option(socket.native_handle(), IPPROTO_TCP, TCP_KEEPINTVL, 10);
    weightwire::detail::set_option(socket.native_handle(), IPPROTO_TCP, TCP_KEEPCNT, 6);
    auto made = std::make_unique<reader>();
    made->socket = pair_socket{std::move(socket)};
    made->pieces.reserve(ask_frame::most_pieces);
    readers_.push_back(std::move(made));
}

template <PairMachinery M>
void pull_server<M>::serve(reader& from, bool readable) noexcept {
    try {
        if (from.socket.wants_to_send()) {
            static_cast<void>(from.socket.flush());
        }
        // Also while it is being served: its end ends the transfer.
        if (readable && !from.socket.fill()) {
            drop(from);
            return;
        }
        advance(from);
        while (from.at == stage::greeting || from.at == stage::rest) {
            const auto got = from.socket.next();
            if (!got) {
                break;
            }
            take(from, *got);
        }
        const bool waits = from.at != stage::rest && from.at != stage::asked;
        if (waits && from.patience.expired()) {
            throw timeout_error{
                from.at == stage::greeting
                    ? "the reader did not say in time who it is"
                    : "the worker did not do its part of a transfer over NCCL in time; look at it"};
        }
    } catch (const error& caught) {
        refuse(from, failure::from(caught));
    } catch (...) {
        refuse(from, {.kind = "resource", .text = "the trainer rank has no memory left"});
    }
}

template <PairMachinery M>
void pull_server<M>::take(reader& from, const pair_socket::frame& got) {
    if (from.at == stage::greeting && got.kind == pair_frame_kind::hello) {
        greet(from, got.template as<hello_frame>());
        return;
    }
    if (from.at != stage::rest || got.kind != pair_frame_kind::ask) {
        throw protocol_error{
            "this port belongs to a trainer rank that is read over NCCL, and "
            "takes other frames"};
    }
    from.ask = got.template as<ask_frame>();
    if (from.ask.count == 0 || from.ask.count > ask_frame::most_pieces) {
        throw protocol_error{"a worker asks for no bytes, or for too many pieces at once"};
    }
    from.pieces.clear();
    for (std::size_t i = 0; i < from.ask.count; ++i) {
        const auto& piece = from.ask.pieces[i];
        auto* const found = arenas_->find(piece);
        if (found == nullptr) {
            throw protocol_error{"a worker asks for " + std::to_string(piece.bytes) +
                                 " bytes from byte " + std::to_string(piece.offset) + " of arena " +
                                 std::to_string(piece.arena) + ", which do not exist"};
        }
        from.pieces.push_back({found, piece.bytes});
    }
    from.at = stage::asked;
}

template <PairMachinery M>
void pull_server<M>::greet(reader& from, const hello_frame& hello) {
    if (hello.magic != hello_frame::right_magic || hello.id != id_) {
        throw protocol_error{"this is not the trainer rank that the address means"};
    }
    if (hello.version != machine_.nccl_version() || hello.channels != options_.channels) {
        throw mismatch_error{"the worker has NCCL " + std::to_string(hello.version) + " with " +
                             std::to_string(hello.channels) + " channels, this trainer rank " +
                             std::to_string(machine_.nccl_version()) + " with " +
                             std::to_string(options_.channels) +
                             "; use one libnccl.so.2 and one build on both"};
    }
    const auto paired = static_cast<std::size_t>(
        std::ranges::count_if(readers_, [](const auto& each) { return each->is_paired(); }));
    if (paired >= options_.most_peers) {
        throw unsupported_error{
            "this trainer rank already serves " + std::to_string(options_.most_peers) +
            " workers over NCCL, each by a communicator with device memory of its own, as many as "
            "one process may; read over UCX, which needs none"};
    }
    if (const auto fault = fault_of_budget(options_, arenas_->bytes(), counted_bytes(1),
                                           "this trainer rank", "its arenas");
        !fault.empty()) {
        throw unsupported_error{fault};
    }
    if (!free_before_ &&
        std::ranges::all_of(readers_, [](const auto& each) { return each->is_made(); })) {
        free_before_ = machine_.free_bytes();
    }
    ended_.expect_one_more();
    const auto id = machine_.make_unique_id();
    from.pair = machine_.begin(id, pair_end::owner, options_.channels);
    from.at = stage::joining;
    from.patience = deadline::after(options_.join_time);
    ++count_;
    from.socket.queue_value(pair_frame_kind::welcome, id);
    static_cast<void>(from.socket.flush());
}

/// A pair that is joined or sends.
template <PairMachinery M>
void pull_server<M>::advance(reader& of) {
    switch (of.at) {
        case stage::greeting:
        case stage::rest:
        case stage::asked: return;
        case stage::joining:
            if (of.pair.ready()) {
                of.at = stage::rest;
            }
            return;
        case stage::posting:
            if (of.pair.ready()) {
                of.at = stage::sending;
            }
            return;
        case stage::sending:
            if (of.pair.reached()) {
                of.at = stage::rest;
                of.tried = true;
            }
            return;
    }
}

/// All readers that have asked, as many as the device holds at once. One exchange is in flight;
/// what hangs of it is left under way after a while.
template <PairMachinery M>
void pull_server<M>::begin_exchange() {
    const auto most = machine_.most_pairs_at_once(options_.channels);
    auto under_way = static_cast<std::size_t>(
        std::ranges::count_if(readers_, [](const auto& each) { return each->in_flight(); }));
    const auto now = std::chrono::steady_clock::now();
    if (under_way != 0 && now - began_ <= options_.linger) {
        return;
    }
    for (const auto& each : readers_) {
        if (each->at == stage::asked && !each->gone && under_way < most) {
            ++under_way;
            began_ = now;
            post(*each);
        }
    }
    // Who still waits stands in front the next time.
    const auto waits = [](const auto& each) { return each->at == stage::asked; };
    if (std::ranges::any_of(readers_, waits)) {
        std::ranges::stable_partition(readers_, waits);
    }
}

template <PairMachinery M>
void pull_server<M>::post(reader& of) {
    std::uint64_t bytes = 0;
    for (const auto& piece : of.pieces) {
        bytes += piece.bytes;
    }
    constexpr std::uint64_t slowest = std::uint64_t{16} << 20U;  // bytes a second
    const auto by_size = std::chrono::seconds{static_cast<std::int64_t>(bytes / slowest)};
    try {
        of.pair.post(of.pieces, pair_end::owner);
        of.at = stage::posting;
        of.patience = deadline::after(options_.send_time + by_size);
    } catch (const error& caught) {
        refuse(of, failure::from(caught));
    }
}

/// The device tells only how much it has left in all. So pairs that are made at the same time are
/// measured together, when the last of them is.
template <PairMachinery M>
void pull_server<M>::measure() noexcept {
    if (!free_before_ || !std::ranges::all_of(readers_, [](const auto& each) {
            return each->gone || each->is_made();
        })) {
        return;
    }
    const auto before = *std::exchange(free_before_, std::nullopt);
    const auto fresh = [](const auto& each) {
        return each->tried && each->measured == 0 && !each->gone;
    };
    const auto count = static_cast<std::uint64_t>(std::ranges::count_if(readers_, fresh));
    std::optional<std::uint64_t> after;
    try {
        after = machine_.free_bytes();
    } catch (const error&) {
        return;
    }
    if (count == 0 || !after || *after >= before) {
        return;
    }
    const auto took = (before - *after) / count;
    for (const auto& each : readers_) {
        if (fresh(each)) {
            each->measured = took;
            measured_ += took;
        }
    }
    cost_.note(took);
}

/// Says why, and ends it.
template <PairMachinery M>
void pull_server<M>::refuse(reader& whom, const failure& why) noexcept {
    try {
        whom.socket.queue(pair_frame_kind::refused, refusal_of(why.kind, why.text));
        static_cast<void>(whom.socket.flush());
        ::shutdown(whom.socket.native_handle(), SHUT_WR);
    } catch (...) {  // NOLINT(bugprone-empty-catch): the end of the connection tells as much
    }
    drop(whom);
}

/// Waits for nobody: the pair is aborted beside this thread.
template <PairMachinery M>
void pull_server<M>::drop(reader& whom) noexcept {
    if (whom.gone) {
        return;
    }
    whom.gone = true;
    if (whom.is_paired()) {
        ended_.add(std::move(whom.pair), {});
        measured_ -= whom.measured;
        --count_;
    }
    whom.socket.close();
}

}  // namespace weightwire::nccl
