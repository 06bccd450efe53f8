#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/owner_desk.hpp>

namespace weightwire::sharded_pull {

/// From a worker rank to rank 0. What routing throws fails the opening too.
inline void owner_desk::take_needs(const connection& from, std::string_view body) {
    auto said = wire::decode_worker_needs(body, terms_.parameters->size());
    const std::lock_guard lock{mutex_};
    if (readers_[from->worker_rank()].link != from) {
        return;  // another has come meanwhile
    }
    const bool opened = routes_.routed();
    try {
        routes_.take_needs(static_cast<std::size_t>(from->worker_rank() - 1), std::move(said),
                           route_sayer());
    } catch (const protocol_error&) {
        throw;
    } catch (...) {
        if (!opened) {
            route_failure_ = failure::current(phase::init);
            note_change();
        }
        throw;
    }
    note_change();
}

/// From a worker rank to rank 0.
inline void owner_desk::take_landing(const connection& from, std::string_view body) {
    const std::lock_guard lock{mutex_};
    if (readers_[from->worker_rank()].link == from) {
        routes_.take_landing(static_cast<std::size_t>(from->worker_rank() - 1), body,
                             route_sayer());
        note_change();
    }
}

/// With the mutex.
inline void owner_desk::leave_routes(int rank) noexcept {
    try {
        routes_.leave(static_cast<std::size_t>(rank - 1), route_sayer());
        note_change();
    } catch (...) {
        // No memory for what others have to be told: their inits end in time, and all know why.
        if (!route_failure_) {
            route_failure_ = failure::current(phase::init);
        }
    }
}

inline void owner_desk::take_part(const connection& from, std::string_view body) {
    auto part = wire::decode_owner_part(body, terms_.parameters->size());
    const auto hash = checker_.accept(part, from->worker_rank() - 1);
    for (const auto& section : part.sections) {
        for (const auto& chunk : section.chunks) {
            if (terms_.slots != 0 && chunk.bytes > terms_.slot_bytes) {
                throw mismatch_error{"a chunk has " + std::to_string(chunk.bytes) +
                                     " bytes, more than a slot's " +
                                     std::to_string(terms_.slot_bytes)};
            }
        }
    }
    auto accepted =
        std::make_shared<const accepted_part>(accept_part(std::move(part), terms_.in_place));
    {
        const std::lock_guard lock{mutex_};
        auto& reader = readers_[from->worker_rank()];
        if (reader.link != from) {
            return;  // another has come meanwhile
        }
        reader.part = std::move(accepted);
        require_slots();
        reader.hash = hash;
    }
    from->send(frame_kind::accepted, bytes_of(hash_body{hash}));
}

/// Every taker may have a chunk half packed when a source that streams comes to the next tensor.
inline void owner_desk::require_slots() const {
    if (terms_.whole_chunks) {
        return;
    }
    std::vector<const accepted_part*> parts;
    for (const auto& [rank, reader] : readers_) {
        if (reader.staged() && reader.link != nullptr) {
            parts.push_back(reader.part.get());
        }
    }
    const auto takers = most_takers(parts);
    if (takers > slots_.size()) {
        throw resource_error{
            std::to_string(parts.size()) + " worker ranks read what trainer rank " +
                std::to_string(terms_.rank) + " stages, and " +
                std::to_string(takers - parts.size()) +
                " take some of it for their nodes; its arena has " + std::to_string(slots_.size()) +
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
    slots_.free(from->worker_rank(), what, to_readers{this});
    reader.heard = clock::now();
    note_change();
}

inline void owner_desk::take_landed(const connection& from, const chunk_body& what) {
    const std::lock_guard lock{mutex_};
    auto& reader = readers_[from->worker_rank()];
    if (reader.link != from || what.round != round_ || !reader.in_round) {
        return;  // of a round that is over
    }
    slots_.land(from->worker_rank(), what, to_readers{this});
    reader.heard = clock::now();
}

/// It is not this reader's turn, but that of others who read what it has landed before, maybe from
/// another owner; that one lets go of them where they are silent.
inline void owner_desk::take_waiting(const connection& from, const round_body& what) {
    const std::lock_guard lock{mutex_};
    auto& reader = readers_[from->worker_rank()];
    if (reader.link == from && what.round == round_ && reader.in_round) {
        reader.heard = clock::now();
    }
}

inline void owner_desk::take_taken(const connection& from, const round_body& what) {
    const std::lock_guard lock{mutex_};
    auto& reader = readers_[from->worker_rank()];
    if (reader.link != from || what.round != round_ || !reader.in_round) {
        return;  // of a round that is over: it is not confirmed
    }
    if (slots_.is_waited_for(from->worker_rank())) {
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
