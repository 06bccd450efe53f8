#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/chunk_takers.hpp>
#include <weightwire/backends/sharded_pull/control_channel.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// The slots of an owner's arena in a round: which chunk lies in each, and who has yet to read it.

namespace weightwire::sharded_pull {

/// Keeps the slots. Not thread-safe; says nothing itself: what has to be told goes to a
/// `say(rank, frame_kind, chunk_body)` that the caller brings.
///
/// A chunk is packed into one slot for all readers of its taker. Where the taker has a lead in the
/// round, only the lead is told of it, lands it and says so; then the others are told where. When a
/// lead leaves, all that have not freed a chunk are told to read it from the arena, and so they are
/// of later chunks. A slot is free when every reader has freed it or has left.
///
/// The lead's landing memory is used again only after `released`, which is said when every reader
/// has freed the chunk or has left. So what holds for slots holds for it: who may read bytes that
/// were overwritten is no longer in the round, hears no `confirmed`, and commits nothing.
class chunk_slots {
public:
    /// A slot that a chunk is packed into.
    struct held_slot {
        std::size_t index = 0;
        std::uint64_t generation = 0;
    };

    explicit chunk_slots(std::size_t count) : slots_(count) {}

    [[nodiscard]] std::size_t size() const noexcept { return slots_.size(); }

    /// A round begins: all slots are free. Allocates only where the readers, or what they take, are
    /// others than in the round before.
    /// @param readers by ascending rank. @returns whether they are.
    bool begin_round(std::uint64_t round, std::span<const round_reader> readers) {
        round_ = round;
        const bool other = !std::ranges::equal(readers, readers_);
        if (other) {
            readers_.assign(readers.begin(), readers.end());
            takers_ = takers_of(readers_);
            std::size_t most = 0;
            for (const auto& each : takers_) {
                most = std::max(most, each.readers.size());
            }
            for (auto& slot : slots_) {
                slot.holds.reserve(most);
            }
            here_.resize(takers_.size());
        }
        for (auto& slot : slots_) {
            clear(slot);
        }
        for (std::size_t t = 0; t < takers_.size(); ++t) {
            here_[t].assign(takers_[t].readers.size(), 1);
        }
        return other;
    }
    /// Of the round. Stay until the next begins.
    [[nodiscard]] const std::vector<chunk_taker>& takers() const noexcept { return takers_; }
    /// Whether a reader of the taker is still in the round.
    [[nodiscard]] bool has_readers(std::size_t taker) const {
        return std::ranges::any_of(here_[taker], [](unsigned char each) { return each != 0; });
    }

    /// A slot for a taker's next chunk; nothing while it holds `most` already or none is free.
    [[nodiscard]] std::optional<held_slot> take(std::size_t taker, std::size_t most) {
        std::size_t held = 0;
        slot_state* found = nullptr;
        for (auto& slot : slots_) {
            held += slot.taker == taker ? 1U : 0U;
            if (slot.taker == nobody && found == nullptr) {
                found = &slot;
            }
        }
        if (found == nullptr || held >= most || !has_readers(taker)) {
            return std::nullopt;
        }
        found->taker = taker;
        found->generation = ++generation_;
        for (const auto here : here_[taker]) {
            found->holds.push_back(here != 0 ? hold::untold : hold::none);
        }
        return held_slot{static_cast<std::size_t>(found - slots_.data()), generation_};
    }
    /// Whether the slot is still that taker's: it is taken away when all its readers have left the
    /// round, and only `take` gives it to another.
    [[nodiscard]] bool is_held(std::size_t taker, const held_slot& slot) const {
        return slots_[slot.index].taker == taker &&
               slots_[slot.index].generation == slot.generation;
    }
    /// The slot's bytes are there. Does nothing where all readers have left.
    template <class Say>
    void publish(const held_slot& which, std::uint32_t chunk, Say say) {
        auto& slot = slots_[which.index];
        if (slot.taker == nobody || slot.generation != which.generation) {
            return;
        }
        // First: the answer may be here before `say` returns.
        slot.published = true;
        slot.chunk = chunk;
        tell_lead_or_all(slot, say);
    }

    /// @throws protocol_error the rank does not lead the chunk's taker, or was not given it.
    template <class Say>
    void land(int rank, const chunk_body& what, Say say) {
        auto* const slot = given(rank, what);
        if (slot == nullptr || takers_[slot->taker].lead != rank || slot->landed) {
            throw protocol_error{"a worker rank has landed a chunk that it was not given to land"};
        }
        slot->landed = true;
        slot->landing = what.landing;
        tell_untold(*slot, frame_kind::passed, say);
    }
    /// @throws protocol_error the rank was not given the chunk.
    template <class Say>
    void free(int rank, const chunk_body& what, Say say) {
        auto* const slot = given(rank, what);
        if (slot == nullptr || (takers_[slot->taker].lead == rank && !slot->landed)) {
            throw protocol_error{"a worker rank frees a chunk that it was not given"};
        }
        slot->holds[index_of(*slot, rank)] = hold::none;
        settle(*slot, say);
    }
    /// The rank takes no part in the round any more.
    template <class Say>
    void leave(int rank, Say say) {
        for (std::size_t t = 0; t < takers_.size(); ++t) {
            const auto i = index_of(takers_[t], rank);
            if (i < here_[t].size()) {
                here_[t][i] = 0;
            }
        }
        for (auto& slot : slots_) {
            const auto i = slot.taker == nobody ? 0 : index_of(slot, rank);
            if (slot.taker == nobody || i == slot.holds.size()) {
                continue;
            }
            slot.holds[i] = hold::none;
            if (slot.published && takers_[slot.taker].lead == rank) {
                std::ranges::replace(slot.holds, hold::given, hold::untold);
                tell_untold(slot, frame_kind::published, say);
            }
            settle(slot, say);
        }
    }

    /// Whether a slot has something that the rank was told of and has not freed.
    [[nodiscard]] bool was_given(int rank) const {
        return any_hold(rank, [](hold each) { return each == hold::given; });
    }
    /// Whether a slot has something that the rank has not freed, told or not.
    [[nodiscard]] bool is_waited_for(int rank) const {
        return any_hold(rank, [](hold each) { return each != hold::none; });
    }

private:
    static constexpr std::size_t nobody = std::numeric_limits<std::size_t>::max();

    /// What a reader has to do with a slot.
    enum class hold : unsigned char {
        none,    ///< nothing, or nothing any more
        untold,  ///< it will read it
        given    ///< it was told to
    };
    struct slot_state {
        std::size_t taker = nobody;
        std::uint64_t generation = 0;
        std::uint32_t chunk = 0;
        bool published = false;
        bool landed = false;
        std::uint32_t landing = 0;  ///< slot of the lead's landing memory
        std::vector<hold> holds{};  ///< one a reader of the taker
    };

    static void clear(slot_state& slot) noexcept {
        slot.taker = nobody;
        slot.published = false;
        slot.landed = false;
        slot.holds.clear();
    }
    /// Of a reader of a taker; their number where the rank is none of them.
    [[nodiscard]] static std::size_t index_of(const chunk_taker& taker, int rank) {
        const auto found = std::ranges::find(taker.readers, rank, &chunk_taker::reader::rank);
        return static_cast<std::size_t>(found - taker.readers.begin());
    }
    [[nodiscard]] std::size_t index_of(const slot_state& slot, int rank) const {
        return index_of(takers_[slot.taker], rank);
    }
    template <class Wanted>
    [[nodiscard]] bool any_hold(int rank, Wanted wanted) const {
        return std::ranges::any_of(slots_, [&](const slot_state& slot) {
            const auto i = slot.taker == nobody ? 0 : index_of(slot, rank);
            return i < slot.holds.size() && wanted(slot.holds[i]);
        });
    }
    [[nodiscard]] chunk_body body_for(const slot_state& slot, std::size_t reader) const {
        return {.round = round_,
                .generation = slot.generation,
                .section = takers_[slot.taker].readers[reader].section,
                .chunk = slot.chunk,
                .slot = static_cast<std::uint32_t>(&slot - slots_.data()),
                .landing = slot.landed ? slot.landing : 0};
    }
    /// The slot that `what` names; null where the rank was not given exactly this.
    [[nodiscard]] slot_state* given(int rank, const chunk_body& what) {
        if (what.slot >= slots_.size() || slots_[what.slot].taker == nobody) {
            return nullptr;
        }
        auto& slot = slots_[what.slot];
        const auto i = index_of(slot, rank);
        const bool same = i < slot.holds.size() && slot.holds[i] == hold::given &&
                          slot.generation == what.generation && slot.chunk == what.chunk &&
                          takers_[slot.taker].readers[i].section == what.section;
        return same ? &slot : nullptr;
    }
    [[nodiscard]] bool is_led(const slot_state& slot) const {
        const auto lead = index_of(slot, takers_[slot.taker].lead);
        return lead < here_[slot.taker].size() && here_[slot.taker][lead] != 0;
    }
    template <class Say>
    void tell(slot_state& slot, std::size_t reader, frame_kind kind, Say& say) {
        slot.holds[reader] = hold::given;
        say(takers_[slot.taker].readers[reader].rank, kind, body_for(slot, reader));
    }
    template <class Say>
    void tell_untold(slot_state& slot, frame_kind kind, Say& say) {
        for (std::size_t i = 0; i < slot.holds.size(); ++i) {
            if (slot.holds[i] == hold::untold) {
                tell(slot, i, kind, say);
            }
        }
    }
    template <class Say>
    void tell_lead_or_all(slot_state& slot, Say& say) {
        if (is_led(slot)) {
            tell(slot, index_of(slot, takers_[slot.taker].lead), frame_kind::published, say);
        } else {
            tell_untold(slot, frame_kind::published, say);
        }
    }
    /// Frees the slot, and what the lead has of it, when nobody needs it any more.
    template <class Say>
    void settle(slot_state& slot, Say& say) {
        if (std::ranges::any_of(slot.holds, [](hold each) { return each != hold::none; })) {
            return;
        }
        if (slot.landed && is_led(slot)) {
            const auto lead = takers_[slot.taker].lead;
            say(lead, frame_kind::released, body_for(slot, index_of(slot, lead)));
        }
        clear(slot);
    }

    std::uint64_t round_ = 0;
    std::uint64_t generation_ = 0;
    std::vector<round_reader> readers_;             ///< of the round
    std::vector<chunk_taker> takers_;               ///< of the round
    std::vector<std::vector<unsigned char>> here_;  ///< of each taker's readers: still in the round
    std::vector<slot_state> slots_;
};

}  // namespace weightwire::sharded_pull
