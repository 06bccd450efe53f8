#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/fabrics/nccl/pull_exchange.hpp>

/// @file
/// Bodies of `pull_exchange`: what is posted, asked for and laid out.

namespace weightwire::nccl {

namespace pair_detail {

/// Bytes that are not wanted are still read where leaving them out would cost a transfer more.
inline constexpr std::uint64_t least_gap = std::uint64_t{256} << 10U;
/// Parts of one read: several reads of a pair share an exchange.
inline constexpr std::size_t most_parts = 4;
/// Parts begin on such a boundary, on both sides.
inline constexpr std::uint64_t boundary = 16;

/// Few parts `[begin, end)` that cover the given ones. Sorts them.
[[nodiscard]] inline std::vector<std::pair<std::uint64_t, std::uint64_t>> cover(
    std::vector<std::pair<std::uint64_t, std::uint64_t>>& all) {
    std::ranges::sort(all);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> joined;
    for (auto [begin, end] : all) {
        begin = begin / boundary * boundary;
        if (joined.empty() || begin > joined.back().second + least_gap) {
            joined.emplace_back(begin, end);
        } else {
            joined.back().second = std::max(joined.back().second, end);
        }
    }
    while (joined.size() > most_parts) {
        std::size_t least = 1;
        const auto gap = [&](std::size_t i) { return joined[i].first - joined[i - 1].second; };
        for (std::size_t i = 2; i < joined.size(); ++i) {
            least = gap(i) < gap(least) ? i : least;
        }
        joined[least - 1].second = joined[least].second;
        joined.erase(joined.begin() + static_cast<std::ptrdiff_t>(least));
    }
    return joined;
}

}  // namespace pair_detail

/// Makes places of at least `bytes` bytes. Smaller ones are not freed while something is under way,
/// since freeing device memory waits for all that the device does.
template <PairMachinery M>
void pull_exchange<M>::make_places(std::uint64_t bytes) {
    sweep();
    const bool rests = flight_.empty() && laying_.empty() && !ended_.under_way() && !ended_.lost();
    if (bytes > place_bytes_) {
        place_bytes_ = bytes;
        for (auto& each : places_) {
            each.retired = true;
        }
    }
    if (rests) {
        std::erase_if(places_, [](const place& each) { return each.retired && !each.taken; });
    }
    const auto wanted = static_cast<std::size_t>(
        std::clamp<std::uint64_t>(options_.landing_bytes / place_bytes_, 2, held_places::most));
    auto there = static_cast<std::size_t>(
        std::ranges::count_if(places_, [](const place& each) { return !each.retired; }));
    const auto more = wanted > there ? (wanted - there) * place_bytes_ : 0;
    if (const auto fault =
            fault_of_budget(options_, landing_bytes() + more, links_.size() * cost_.bytes(),
                            "this worker", "places to land");
        !fault.empty()) {
        throw resource_error{fault, pull_at_init({})};
    }
    for (; there < wanted; ++there) {
        places_.push_back({machine_.allocate(static_cast<std::size_t>(place_bytes_))});
    }
}

template <PairMachinery M>
std::optional<std::size_t> pull_exchange<M>::free_place(std::uint64_t bytes) const noexcept {
    for (std::size_t i = 0; i < places_.size(); ++i) {
        const auto& each = places_[i];
        if (!each.taken && !each.retired && each.memory.size() >= bytes) {
            return i;
        }
    }
    return std::nullopt;
}

template <PairMachinery M>
std::unique_ptr<pull_read<M>> pull_exchange<M>::prepare(std::span<const run> runs) {
    auto made = std::make_unique<state>();
    made->by = this->shared_from_this();
    std::vector<std::pair<std::uint64_t, std::uint64_t>> wanted;
    for (const auto& each : runs) {
        if (each.bytes == 0 || each.count == 0) {
            continue;
        }
        if (made->from == nullptr) {
            made->from = each.from->of();
            made->arena = each.from->number();
        } else if (made->from != each.from->of() || made->arena != each.from->number()) {
            throw usage_error{
                "a read over NCCL is of one packed chunk, and these runs are of several memories",
                pull_at_init(made->from->peer)};
        }
        for (std::uint64_t line = 0; line < each.count; ++line) {
            const auto begin = each.offset + line * each.from_step;
            wanted.emplace_back(begin, begin + each.bytes);
        }
    }
    if (wanted.empty()) {
        return made;
    }
    for (const auto& [begin, end] : pair_detail::cover(wanted)) {
        made->parts.push_back({.offset = begin, .bytes = end - begin, .landed = made->bytes});
        made->bytes += (end - begin + pair_detail::boundary - 1) / pair_detail::boundary *
                       pair_detail::boundary;
    }
    std::vector<landed_run> laid;
    for (const auto& each : runs) {
        const bool joined =
            each.count > 1 && each.from_step == each.bytes && each.to_step == each.bytes;
        for (std::uint64_t line = 0; line < (joined ? 1 : each.count) && each.bytes != 0; ++line) {
            const auto begin = each.offset + line * each.from_step;
            const auto part =
                std::prev(std::ranges::upper_bound(made->parts, begin, {}, &state::part::offset));
            laid.push_back({.to = each.to + line * each.to_step,
                            .offset = part->landed + (begin - part->offset),
                            .bytes = joined ? each.bytes * each.count : each.bytes});
        }
    }
    make_places(made->bytes);
    made->scatter.emplace(machine_.make_scatter(laid));
    made->laid.emplace(machine_.make_event());
    ++prepared_;
    waiting_.reserve(prepared_);
    laying_.reserve(prepared_);
    return made;
}

/// Only remembers it: all reads that wait when the next exchange begins are in it.
template <PairMachinery M>
void pull_exchange<M>::start(state& which, std::uint64_t shift) {
    if (which.at != state::stage::rest) {
        throw usage_error{"a read that is under way is started again"};
    }
    if (which.parts.empty()) {
        return;
    }
    if (which.from->failed) {
        which.from->failed.raise();
    }
    which.shift = shift;
    which.failed = false;
    which.at = state::stage::waiting;
    waiting_.push_back(&which);
}

/// What is under way over a pair is given up with it.
template <PairMachinery M>
void pull_exchange<M>::fail(link& which, failure why) noexcept {
    if (which.failed) {
        return;
    }
    which.failed = std::move(why);
    try {
        which.failed.context.peer = which.peer;
    } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for its name
    }
    which.socket.close();
    ended_.add(std::move(which.pair), std::exchange(which.places, {}));
    which.at = link::stage::rest;
    for (auto* const each : which.reads) {
        each->at = state::stage::rest;
        each->failed = true;
    }
    which.reads.clear();
    std::erase(flight_, &which);
    std::erase_if(waiting_, [&](state* each) {
        const bool of = each->from.get() == &which;
        if (of) {
            each->at = state::stage::rest;
            each->failed = true;
        }
        return of;
    });
}

/// One step of all that is under way. What fails costs its pair, and shows in the reads over it.
template <PairMachinery M>
bool pull_exchange<M>::drive() {
    bool moved = false;
    for (std::size_t i = 0; i < flight_.size();) {
        auto& each = *flight_[i];
        try {
            moved = advance(each) || moved;
            listen(each);
        } catch (...) {
            blame(each, failure::current(phase::update));
        }
        // It may have left the list, and another stand in its place.
        i += i < flight_.size() && flight_[i] == &each ? 1 : 0;
    }
    for (std::size_t i = 0; i < laying_.size();) {
        auto& each = *laying_[i];
        bool laid = true;
        try {
            laid = machine_.is_done(*each.laid);
        } catch (const error&) {
            each.failed = true;  // the device reports a failed kernel: it has ended
            gpu::lost_devices::note(machine_.device());
        }
        if (!laid) {
            ++i;
            continue;
        }
        places_[each.place].taken = false;
        each.at = state::stage::rest;
        std::swap(laying_[i], laying_.back());
        laying_.pop_back();
        moved = true;
    }
    sweep();
    if (!waiting_.empty() &&
        (flight_.empty() || std::chrono::steady_clock::now() - began_ > options_.linger)) {
        begin_exchange();
    }
    return moved;
}

/// A pair of the exchange. Returns whether it has come further.
template <PairMachinery M>
bool pull_exchange<M>::advance(link& which) {
    if (which.socket.wants_to_send()) {
        static_cast<void>(which.socket.flush());
    }
    if (which.at == link::stage::posting) {
        if (!which.pair.ready()) {
            return false;
        }
        which.at = link::stage::receiving;
        which.socket.queue_value(pair_frame_kind::ask, which.ask);
        static_cast<void>(which.socket.flush());
        return true;
    }
    if (!which.pair.reached()) {
        return false;
    }
    lay_out(which);
    return true;
}

/// All that a pair was to receive is in its places.
template <PairMachinery M>
void pull_exchange<M>::lay_out(link& which) {
    while (!which.reads.empty()) {
        auto& each = *which.reads.back();
        machine_.launch(*each.scatter, places_[each.place].memory.data(), copies_);
        which.reads.pop_back();
        --which.places.count;  // places stand in the order of the reads
        each.at = state::stage::laying;
        laying_.push_back(&each);
        machine_.record(*each.laid, copies_);
    }
    which.at = link::stage::rest;
    std::erase(flight_, &which);
}

/// The reads that wait, in their order, as far as there are places, and pairs at rest.
template <PairMachinery M>
void pull_exchange<M>::begin_exchange() {
    const auto most = machine_.most_pairs_at_once(options_.channels);
    const auto left_over = flight_.size();
    for (std::size_t i = 0; i < waiting_.size();) {
        auto& each = *waiting_[i];
        auto& from = *each.from;
        const bool fresh = from.at == link::stage::rest;
        const auto in_flight = std::ranges::find(flight_, &from) - flight_.begin();
        const bool joins = fresh || static_cast<std::size_t>(in_flight) >= left_over;
        const auto found = free_place(each.bytes);
        if (!joins || !found || (fresh && flight_.size() >= most) ||
            (fresh ? 0 : from.ask.count) + each.parts.size() > ask_frame::most_pieces) {
            ++i;
            continue;
        }
        if (fresh) {
            from.ask.count = 0;
            from.pieces.clear();
            from.at = link::stage::posting;
            flight_.push_back(&from);
        }
        places_[*found].taken = true;
        from.places.index[from.places.count++] = *found;
        each.place = *found;
        each.at = state::stage::receiving;
        from.reads.push_back(&each);
        for (const auto& part : each.parts) {
            from.pieces.push_back({places_[*found].memory.data() + part.landed, part.bytes});
            from.ask.pieces[from.ask.count++] = {
                .arena = each.arena, .offset = each.shift + part.offset, .bytes = part.bytes};
        }
        waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (flight_.size() > left_over) {
        began_ = std::chrono::steady_clock::now();
    }
    for (auto i = left_over; i < flight_.size();) {
        auto& each = *flight_[i];
        try {
            each.pair.post(each.pieces, pair_end::reader);
            ++i;
        } catch (...) {
            fail(each, failure::current(phase::update));  // which takes it off the list
        }
    }
}

template <PairMachinery M>
bool pull_exchange<M>::done(state& which) {
    if (which.at != state::stage::rest) {
        drive();
    }
    if (which.failed) {
        cancel(which);
        which.failed = false;
        if (which.from->failed) {
            which.from->failed.raise();
        }
        throw resource_error{"the device failed while a chunk was laid out",
                             {.phase = phase::update, .peer = which.from->peer, .backend = "nccl"}};
    }
    return which.at == state::stage::rest;
}

template <PairMachinery M>
void pull_exchange<M>::wait(state& which, deadline until, const std::stop_token& stop) {
    try {
        for (int looks = 0; !done(which); ++looks) {
            weightwire::detail::check_time(until, stop, [&] {
                return error_context{
                    .phase = phase::update, .peer = which.from->peer, .backend = "nccl"};
            });
            constexpr int busy = 200;
            if (looks < busy) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(pause);
            }
        }
    } catch (...) {
        cancel(which);
        throw;
    }
}

template <PairMachinery M>
void pull_exchange<M>::cancel(state& which) noexcept {
    switch (which.at) {
        case state::stage::rest: return;
        case state::stage::waiting:
            std::erase(waiting_, &which);
            which.at = state::stage::rest;
            return;
        case state::stage::receiving: give_up(which); return;
        case state::stage::laying: break;
    }
    constexpr std::chrono::seconds longest{2};
    const auto until = deadline::after(longest);
    bool laid = false;
    try {
        while (!laid && !until.expired()) {
            laid = machine_.is_done(*which.laid);
        }
        places_[which.place].taken = !laid;
    } catch (const error&) {
        laid = false;  // the device has failed
    }
    if (!laid) {
        gpu::lost_devices::note(machine_.device());
    }
    std::erase(laying_, &which);
    which.at = state::stage::rest;
    which.failed = false;
}

/// A read whose bytes are on their way: its pair is given up, and the read is at rest at once.
template <PairMachinery M>
void pull_exchange<M>::give_up(state& which) noexcept {
    failure why{.kind = "peer"};
    try {
        why.text =
            "the connection was given up with a read that was under way over it; connect again";
        why.context = {.phase = phase::update, .peer = which.from->peer, .backend = "nccl"};
    } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for words
    }
    fail(*which.from, std::move(why));
    which.failed = false;
}

template <PairMachinery M>
bool pull_exchange<M>::end() noexcept {
    for (auto& each : std::exchange(links_, {})) {
        fail(*each, {.kind = "peer", .text = "it has ended"});
    }
    come_to_rest();
    return !lost();
}

}  // namespace weightwire::nccl
