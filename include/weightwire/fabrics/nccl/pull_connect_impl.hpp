#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/fabrics/nccl/pull_exchange.hpp>

/// @file
/// Bodies of `pull_exchange`: how a reader comes to a trainer rank.

namespace weightwire::nccl {

/// One address of the trainer rank; an empty socket where nobody answers there in time.
template <PairMachinery M>
pair_socket pull_exchange<M>::dial(const std::string& host, std::uint16_t port, deadline until,
                                   const std::stop_token& stop) {
    constexpr std::chrono::seconds patience{3};  // of one of several addresses
    constexpr std::chrono::milliseconds look{5};
    int status = 0;
    const auto found = weightwire::detail::look_up(host, port, AI_NUMERICHOST, status);
    if (found.empty()) {
        return {};
    }
    auto socket = weightwire::detail::stream_socket(found.front().family());
    if (!socket) {
        const int code = errno;
        throw resource_error{weightwire::detail::is_out_of_descriptors(code)
                                 ? std::string{weightwire::detail::no_descriptor_is_left}
                                 : "no socket can be made",
                             weightwire::detail::with_errno(pull_at_init(host), "socket", code)};
    }
    const int native = socket.native_handle();
    weightwire::detail::set_option(native, IPPROTO_TCP, TCP_NODELAY, 1);
    if (::connect(native, found.front().native(), found.front().size) == 0) {
        return pair_socket{std::move(socket)};
    }
    if (errno != EINPROGRESS) {
        return {};
    }
    for (const auto limit = until.capped(patience); !limit.expired();) {
        weightwire::detail::check_time(until, stop, [&] { return pull_at_init(host); });
        pollfd entry{.fd = native, .events = POLLOUT, .revents = 0};
        if (::poll(&entry, 1, static_cast<int>(look.count())) > 0) {
            int code = 0;
            socklen_t size = sizeof code;
            const bool reached =
                ::getsockopt(native, SOL_SOCKET, SO_ERROR, &code, &size) == 0 && code == 0;
            return reached ? pair_socket{std::move(socket)} : pair_socket{};
        }
    }
    return {};
}

/// Says who is meant, and takes the unique id. Nothing where somebody else answers.
/// @throws what the trainer rank refuses for.
template <PairMachinery M>
std::optional<wire::unique_id> pull_exchange<M>::greet(pair_socket& socket, const owner_text& named,
                                                       const error_context& where, deadline until,
                                                       const std::stop_token& stop) {
    socket.queue_value(pair_frame_kind::hello, hello_frame{.id = named.id,
                                                           .version = machine_.nccl_version(),
                                                           .channels = options_.channels});
    constexpr std::chrono::seconds patience{10};  // with one that listens and says nothing
    const auto limit = until.capped(patience);
    for (bool open = true; open && (limit == until || !limit.expired());) {
        weightwire::detail::check_time(until, stop, [&] { return where; });
        static_cast<void>(socket.flush());
        pollfd entry{.fd = socket.native_handle(), .events = POLLIN, .revents = 0};
        if (::poll(&entry, 1, limit.poll_milliseconds(5)) <= 0) {
            continue;
        }
        open = socket.fill();
        const auto got = socket.next();
        if (!got) {
            continue;
        }
        if (got->kind == pair_frame_kind::refused) {
            auto why = failure_of(got->body, where);
            if (why.kind == protocol_error::word) {
                return std::nullopt;  // it is not whom the address means
            }
            why.raise();
        }
        if (got->kind != pair_frame_kind::welcome) {
            return std::nullopt;
        }
        return got->template as<wire::unique_id>();
    }
    return std::nullopt;
}

/// Tries the addresses one after the other; those of the loopback only on one machine.
template <PairMachinery M>
pair_socket pull_exchange<M>::reach(const owner_text& named, std::string& peer, wire::unique_id& id,
                                    deadline until, const std::stop_token& stop) {
    const bool here = !named.boot.empty() && named.boot == weightwire::detail::boot_id();
    std::string tried;
    for (const auto& host : named.hosts) {
        if (is_loopback(host) && !here) {
            continue;
        }
        peer = weightwire::detail::host_and_port(host, named.port);
        tried += (tried.empty() ? "" : ", ") + peer;
        auto socket = dial(host, named.port, until, stop);
        if (!socket) {
            continue;
        }
        if (const auto made = greet(socket, named, pull_at_init(peer), until, stop)) {
            id = *made;
            return socket;
        }
    }
    throw peer_error{"the trainer rank does not answer at " +
                         (tried.empty() ? "any address of its own machine's network" : tried) +
                         "; is it running, and does NCCL_SOCKET_IFNAME there name a network that "
                         "both sides are in?",
                     pull_at_init(peer)};
}

/// Calls `step` until it is true, and looks after the connection meanwhile. Whatever fails costs
/// the pair.
template <PairMachinery M>
template <class Step>
void pull_exchange<M>::await(link& on, deadline until, const std::stop_token& stop, Step step) {
    try {
        for (int looks = 0; !step(); ++looks) {
            listen(on);
            if (on.failed) {
                on.failed.raise();
            }
            weightwire::detail::check_time(until, stop, [&] { return pull_at_init(on.peer); });
            constexpr int busy = 200;
            if (looks < busy) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(pause);
            }
        }
    } catch (...) {
        blame(on, failure::current(phase::init));
    }
    if (on.failed) {
        on.failed.raise();
    }
}

template <PairMachinery M>
std::shared_ptr<pull_link<M>> pull_exchange<M>::connect(const owner_text& named, deadline until,
                                                        const std::stop_token& stop) {
    if (named.version != machine_.nccl_version()) {
        throw mismatch_error{"the trainer rank has NCCL " + std::to_string(named.version) +
                                 ", this worker " + std::to_string(machine_.nccl_version()) +
                                 "; open one libnccl.so.2 on both (WEIGHTWIRE_LIBNCCL)",
                             pull_at_init({})};
    }
    if (links_.size() >= options_.most_peers) {
        throw unsupported_error{
            "this worker already holds " + std::to_string(options_.most_peers) +
                " communicators of NCCL, one a trainer rank, as many as one process may; read over "
                "UCX, which needs none",
            pull_at_init({})};
    }
    sweep();
    if (const auto fault =
            fault_of_budget(options_, std::max(landing_bytes(), options_.landing_bytes),
                            (links_.size() + 1) * cost_.bytes(), "this worker", "places to land");
        !fault.empty()) {
        throw unsupported_error{fault, pull_at_init({})};
    }
    if (!std::exchange(loaded_, true)) {
        machine_.load_kernels();
    }
    make_places(trial_bytes);
    flight_.reserve(links_.size() + 1);
    links_.reserve(links_.size() + 1);
    auto made = std::make_shared<link>();
    made->id = named.id;
    made->pieces.reserve(ask_frame::most_pieces);
    made->reads.reserve(ask_frame::most_pieces);
    wire::unique_id id{};
    made->socket = reach(named, made->peer, id, until, stop);
    const auto before = machine_.free_bytes();
    ended_.expect_one_more();
    made->pair = machine_.begin(id, pair_end::reader, options_.channels);
    await(*made, until, stop, [&] { return made->pair.ready(); });
    check_trial(*made, bring(*made, {trial_arena, 0, trial_bytes}, until, stop), until, stop);
    const auto after = machine_.free_bytes();
    made->measured = before && after && *before > *after ? *before - *after : 0;
    cost_.note(made->measured);
    links_.push_back(made);
    return made;
}

/// The first transfer of a pair is asked for when its receive is given to NCCL, and not yet in the
/// stream: NCCL connects the two ends then, and neither is ready before the other has posted its
/// part. All later ones find the connections made.
template <PairMachinery M>
const std::byte* pull_exchange<M>::bring(link& from, const asked_piece& what, deadline until,
                                         const std::stop_token& stop) {
    if (from.failed) {
        from.failed.raise();
    }
    if (from.at != link::stage::rest) {
        throw usage_error{"memory is opened while reads are under way", pull_at_init(from.peer)};
    }
    std::optional<std::size_t> free;
    await(from, until, stop, [&] {
        sweep();
        free = free_place(what.bytes);
        return free.has_value();
    });
    auto& to = places_[*free];
    to.taken = true;
    from.places = {.index = {*free}, .count = 1};
    const pair_piece piece{to.memory.data(), what.bytes};
    from.ask.count = 1;
    from.ask.pieces[0] = what;
    const auto ask = [&] { from.socket.queue_value(pair_frame_kind::ask, from.ask); };
    await(from, until, stop, [&, posted = false]() mutable {
        if (!std::exchange(posted, true)) {
            from.pair.post({&piece, 1}, pair_end::reader);
            if (what.arena == trial_arena) {
                ask();
                static_cast<void>(from.socket.flush());
            }
        }
        return from.pair.ready();
    });
    if (what.arena != trial_arena) {
        ask();
    }
    await(from, until, stop, [&] { return from.socket.flush() && from.pair.reached(); });
    give_back(std::exchange(from.places, {}));
    return piece.data;
}

/// The bytes that have just been brought are those of the trainer rank's arena 0.
template <PairMachinery M>
void pull_exchange<M>::check_trial(const link& from, const std::byte* landed, deadline until,
                                   const std::stop_token& stop) {
    std::vector<std::uint64_t> words(trial_bytes / 8);
    auto* const to = reinterpret_cast<std::byte*>(words.data());
    machine_.copy_lines(to, landed, trial_bytes, 1, trial_bytes, copies_);
    machine_.record(mark_, copies_);
    while (!machine_.is_done(mark_)) {
        weightwire::detail::check_time(until, stop, [&] { return pull_at_init(from.peer); });
        std::this_thread::sleep_for(pause);
    }
    for (std::size_t i = 0; i < words.size(); ++i) {
        if (words[i] != trial_word(from.id, i)) {
            throw peer_error{
                "a trial transfer over NCCL brought other bytes than the trainer rank holds; its "
                "network changes what it carries",
                pull_at_init(from.peer)};
        }
    }
}

/// What the trainer rank says, or that it is gone.
template <PairMachinery M>
void pull_exchange<M>::listen(link& on) {
    if (on.failed || !on.socket) {
        return;
    }
    const bool open = on.socket.fill();
    try {
        const auto got = on.socket.next();
        if (!got && open) {
            return;
        }
        error_context where{.phase = on.at == link::stage::rest ? phase::init : phase::update,
                            .peer = on.peer,
                            .backend = "nccl"};
        if (!got) {
            fail(on, {.kind = "peer",
                      .text = "the trainer rank is gone, or has given this worker up",
                      .context = std::move(where)});
            return;
        }
        auto why = failure_of(got->body, where);
        if (got->kind != pair_frame_kind::refused) {
            why = {.kind = "protocol", .text = "a trainer rank sends an unknown frame"};
            why.context = std::move(where);
        }
        fail(on, std::move(why));
    } catch (const error& odd) {
        fail(on, failure::from(odd));
    }
}

/// What the trainer rank said before it hung up is worth more than what NCCL makes of it.
template <PairMachinery M>
void pull_exchange<M>::blame(link& which, failure why) {
    listen(which);
    fail(which, std::move(why));
}

template <PairMachinery M>
void pull_exchange<M>::close(link& which) noexcept {
    fail(which, {.kind = "peer", .text = "it is closed"});
    std::erase_if(links_, [&](const auto& each) { return each.get() == &which; });
}

}  // namespace weightwire::nccl
