#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/owner_desk.hpp>

namespace weightwire::sharded_pull {

/// From a worker rank to rank 0. Told its row when all have come, and at once when it comes back.
inline void owner_desk::take_needs(const connection& from, std::string_view body) {
    const auto cut = std::min(body.find('\n'), body.size());
    const auto machine = body.substr(0, std::min<std::size_t>(cut, 256));
    auto report = wire::decode_needs_report(body.substr(std::min(cut + 1, body.size())),
                                            terms_.parameters->size());
    const std::lock_guard lock{mutex_};
    const auto at = static_cast<std::size_t>(from->worker_rank() - 1);
    if (!owners_ || at >= needs_.size()) {
        throw protocol_error{"this trainer rank routes for " + std::to_string(needs_.size()) +
                             " worker ranks, none of which is rank " + std::to_string(at + 1)};
    }
    auto& known = needs_[at];
    const bool same = known.report && *known.report == report && known.machine == machine;
    known = {std::string{machine}, std::move(report)};
    if (routed_ && !same) {
        // The others keep their rows, which only routing for each alone leaves as they are.
        plan::places places;
        std::vector<std::string> names = machines_;
        names.push_back(known.machine);
        const auto numbers = plan::node_numbers(names);
        places.trainers.assign(numbers.begin(), numbers.end() - 1);
        places.workers.push_back(numbers.back());
        const std::span one{&*known.report, 1};
        auto made = plan::route(*terms_.parameters, *owners_, places, one, {.node_once = false});
        rows_[at] = made.of(0);
        rows_[at]->worker = static_cast<int>(at);
    }
    if (!routed_ && std::ranges::all_of(
                        needs_, [](const worker_needs& each) { return each.report.has_value(); })) {
        route_all();
    } else if (routed_) {
        from->send(frame_kind::row, wire::encode(*rows_[at]));
    }
}

/// With the mutex. What fails here fails the opening, not only the worker that came last.
inline void owner_desk::route_all() {
    try {
        auto names = machines_;
        std::vector<plan::needs_report> reports;
        for (const auto& each : needs_) {
            names.push_back(each.machine);
            reports.push_back(*each.report);
        }
        const auto numbers = plan::node_numbers(names);
        const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(machines_.size());
        const plan::places places{.trainers = {numbers.begin(), middle},
                                  .workers = {middle, numbers.end()}};
        const auto made =
            plan::route(*terms_.parameters, *owners_, places, reports, {.node_once = false});
        for (std::size_t i = 0; i < rows_.size(); ++i) {
            rows_[i] = made.of(static_cast<int>(i));
            if (const auto found = readers_.find(static_cast<int>(i) + 1);
                found != readers_.end() && found->second.link != nullptr) {
                found->second.link->send(frame_kind::row, wire::encode(*rows_[i]));
            }
        }
        routed_ = true;
        note_change();
    } catch (...) {
        route_failure_ = failure::current(phase::init);
        note_change();
        throw;
    }
}

inline void owner_desk::take_part(const connection& from, std::string_view body) {
    auto part = std::make_shared<const plan::owner_part>(
        wire::decode_owner_part(body, terms_.parameters->size()));
    const auto hash = checker_.accept(*part, from->worker_rank() - 1);
    for (const auto& section : part->sections) {
        for (const auto& chunk : section.chunks) {
            if (terms_.slots != 0 && chunk.bytes > terms_.slot_bytes) {
                throw mismatch_error{"a chunk has " + std::to_string(chunk.bytes) +
                                     " bytes, more than a slot's " +
                                     std::to_string(terms_.slot_bytes)};
            }
        }
    }
    {
        const std::lock_guard lock{mutex_};
        auto& reader = readers_[from->worker_rank()];
        if (reader.link != from) {
            return;  // another has come meanwhile
        }
        reader.staged = is_staged(*part);
        reader.part = std::move(part);
        require_slots();
        reader.hash = hash;
    }
    from->send(frame_kind::accepted, bytes_of(hash_body{hash}));
}

inline bool owner_desk::is_staged(const plan::owner_part& part) const {
    return std::ranges::any_of(part.sections, [&](const plan::owner_section& section) {
        return std::ranges::any_of(section.chunks, [&](const plan::pull_chunk& chunk) {
            return !is_in_place(
                chunk, [&](std::size_t i) -> const plan::pull_read& { return section.reads[i]; },
                terms_.in_place);
        });
    });
}

/// Every reader may have a chunk half packed when the source comes to the next tensor.
inline void owner_desk::require_slots() const {
    const auto staged = std::ranges::count_if(readers_, [](const auto& each) {
        return each.second.staged && each.second.link != nullptr;
    });
    if (static_cast<std::size_t>(staged) > slots_.size()) {
        throw resource_error{
            std::to_string(staged) + " worker ranks read what trainer rank " +
                std::to_string(terms_.rank) + " stages, and its arena has " +
                std::to_string(slots_.size()) +
                " slots; set staging_bytes to at least chunk_bytes for each of them",
            at_init()};
    }
}

inline void owner_desk::take_free(const connection& from, const chunk_body& what) {
    const std::lock_guard lock{mutex_};
    auto& reader = readers_[from->worker_rank()];
    if (reader.link != from || what.round != round_ || !reader.in_round) {
        return;  // of a round that is over
    }
    if (what.slot >= slots_.size() || slots_[what.slot].reader != from->worker_rank() ||
        !slots_[what.slot].published || slots_[what.slot].generation != what.generation ||
        slots_[what.slot].section != what.section || slots_[what.slot].chunk != what.chunk) {
        throw protocol_error{"a worker rank frees a chunk that it was not given"};
    }
    slots_[what.slot] = {};
    reader.heard = clock::now();
    note_change();
}

inline void owner_desk::take_taken(const connection& from, const round_body& what) {
    const std::lock_guard lock{mutex_};
    auto& reader = readers_[from->worker_rank()];
    if (reader.link != from || what.round != round_ || !reader.in_round) {
        return;  // of a round that is over: it is not confirmed
    }
    if (std::ranges::any_of(
            slots_, [&](const slot_state& slot) { return slot.reader == from->worker_rank(); })) {
        throw protocol_error{"a worker rank has taken everything, and still holds a chunk"};
    }
    reader.taken = true;
    from->send(frame_kind::confirmed, bytes_of(what));
    note_change();
}

inline void owner_desk::set_dropped(std::size_t peer, bool dropped) noexcept {
    const std::lock_guard lock{mutex_};
    if (peer + 1 >= first_rank_.size()) {
        return;
    }
    for (int rank = first_rank_[peer]; rank < first_rank_[peer + 1]; ++rank) {
        const auto found = readers_.find(rank);
        if (found == readers_.end()) {
            continue;
        }
        found->second.dropped = dropped;
        if (dropped && found->second.in_round) {
            leave(rank, found->second);
        }
    }
}

}  // namespace weightwire::sharded_pull
