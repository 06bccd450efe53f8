#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/control_channel.hpp>
#include <weightwire/backends/sharded_pull/control_server.hpp>
#include <weightwire/backends/sharded_pull/staging.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_accept.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/wire/pull_plan_codec.hpp>

/// @file
/// What a trainer rank knows of the worker ranks that read from it: their plans, and in a round
/// which slots of its arena they still read.

namespace weightwire::sharded_pull {

/// What an owner offers; fixed from its export on.
struct owner_terms {
    const manifest* parameters = nullptr;
    std::vector<std::size_t> group_sizes{};
    plan::position_set held{};
    std::vector<unsigned char> in_place{};  ///< one a parameter: is read where it is
    plan::plan_options options{};
    int rank = 0;
    std::uint64_t nonce = 0;
    std::uint64_t slot_bytes = 0;
    std::size_t slots = 0;  ///< of the arena; 0 where nothing is staged
};

/// Handles the control connections of one trainer rank, and keeps the slots of its arena. The
/// server's thread calls the `on_…` members, the thread in `send_weights()` the others.
///
/// A slot is in use from `take_slot` until the reader has freed this very generation of it, or
/// takes no part in the round any more. A reader whose slots were used again while it may have
/// read them never hears `confirmed`, so it never commits what it has.
class owner_desk {
public:
    using connection = std::shared_ptr<control_connection>;
    using clock = deadline::clock;

    /// @throws usage_error group sizes or a chunk size that no plan can have.
    explicit owner_desk(owner_terms terms)
        : terms_{std::move(terms)},
          checker_{*terms_.parameters, terms_.group_sizes, terms_.held, terms_.options,
                   terms_.rank},
          slots_(terms_.slots) {}
    owner_desk(const owner_desk&) = delete;
    owner_desk& operator=(const owner_desk&) = delete;

    [[nodiscard]] const owner_terms& terms() const noexcept { return terms_; }
    [[nodiscard]] std::uint64_t nonce() const noexcept { return terms_.nonce; }

    // Rank 0 routes.

    /// From now on workers' needs are taken, until all `workers` have come.
    void route_for(plan::ownership owners, std::vector<std::string> machines, int workers) {
        const std::lock_guard lock{mutex_};
        owners_.emplace(std::move(owners));
        machines_ = std::move(machines);
        needs_.assign(static_cast<std::size_t>(workers), {});
        rows_.assign(static_cast<std::size_t>(workers), std::nullopt);
        routed_ = false;
        route_failure_ = {};
    }
    /// Until every worker rank was told its row.
    /// @throws timeout_error names the first worker rank that did not come; cancelled_error; what
    /// routing throws.
    void await_routed(deadline until, const std::stop_token& stop) {
        std::unique_lock lock{mutex_};
        const bool came = changed_.wait_until(
            lock, stop, until.when(), [&] { return routed_ || static_cast<bool>(route_failure_); });
        if (route_failure_) {
            route_failure_.raise();
        }
        if (came) {
            return;
        }
        if (stop.stop_requested()) {
            throw cancelled_error{"the opening was stopped", at_init()};
        }
        const auto first = std::ranges::find_if(
            needs_, [](const worker_needs& each) { return !each.report.has_value(); });
        auto where = at_init();
        where.rank = static_cast<int>(first - needs_.begin()) + 1;
        throw timeout_error{
            "this worker rank did not say in time what it reads; see that it reaches the trainer "
            "at its control port (trainer_init_info::host)",
            std::move(where)};
    }

    // Peers.

    /// @param world_sizes worker ranks behind each peer, in rank order from 1.
    void set_peers(std::vector<int> world_sizes) {
        const std::lock_guard lock{mutex_};
        first_rank_.assign(1, 1);
        for (const auto size : world_sizes) {
            first_rank_.push_back(first_rank_.back() + size);
        }
    }
    /// No rank of the peer is waited for from now on. Any thread.
    void drop(std::size_t peer) noexcept { set_dropped(peer, true); }
    void restore(std::size_t peer) noexcept { set_dropped(peer, false); }
    /// As rank 0 says: nobody waits for the peer, or for anybody, in that round any more, which may
    /// not have begun here yet.
    void drop_in_round(const drop_body& what) {
        const std::lock_guard lock{mutex_};
        if (what.round > round_) {
            dropped_ahead_.push_back(what);
        } else if (what.round == round_) {
            leave_peer(what.peer);
        }
    }

    // A round.

    /// Readers that are here and not dropped take part.
    void begin_round(std::uint64_t round, deadline until) {
        const std::lock_guard lock{mutex_};
        round_ = round;
        for (auto& slot : slots_) {
            slot = {};
        }
        const auto now = clock::now();
        until_ = until;
        for (auto& [rank, reader] : readers_) {
            reader.in_round = reader.hash.has_value() && !reader.dropped && reader.link != nullptr;
            reader.taken = false;
            reader.heard = now;
        }
        for (const auto& each : dropped_ahead_) {
            if (each.round == round) {
                leave_peer(each.peer);
            }
        }
        std::erase_if(dropped_ahead_,
                      [round](const drop_body& each) { return each.round <= round; });
    }
    /// `visit(worker rank, part)` for every reader of the round. Parts stay until the next round.
    template <class Visit>
    void each_reader(Visit visit) {
        const std::lock_guard lock{mutex_};
        for (auto& [rank, reader] : readers_) {
            if (reader.in_round) {
                visit(rank, std::shared_ptr<const plan::owner_part>{reader.part});
            }
        }
    }
    [[nodiscard]] bool in_round(int rank) {
        const std::lock_guard lock{mutex_};
        return readers_[rank].in_round;
    }

    /// A slot that a chunk is packed into.
    struct held_slot {
        std::size_t index = 0;
        std::uint64_t generation = 0;
    };
    /// A slot for a reader's next chunk; nothing while it holds `most` already or none is free.
    [[nodiscard]] std::optional<held_slot> take_slot(int rank, std::size_t most) {
        const std::lock_guard lock{mutex_};
        std::size_t held = 0;
        std::optional<std::size_t> found;
        for (std::size_t i = 0; i < slots_.size(); ++i) {
            held += slots_[i].reader == rank ? 1U : 0U;
            if (slots_[i].reader == 0 && !found) {
                found = i;
            }
        }
        if (!found || held >= most || !readers_[rank].in_round) {
            return std::nullopt;
        }
        slots_[*found] = {.reader = rank, .generation = ++generation_};
        return held_slot{*found, generation_};
    }
    /// Whether the slot is still that reader's: it is taken away from one that leaves the round,
    /// and only `take_slot` gives it to another.
    [[nodiscard]] bool holds(int rank, const held_slot& slot) {
        const std::lock_guard lock{mutex_};
        return slots_[slot.index].reader == rank &&
               slots_[slot.index].generation == slot.generation;
    }
    /// The slot's bytes are there. Does nothing for a reader that is no longer in the round.
    void publish(std::size_t slot, std::uint32_t section, std::uint32_t chunk) {
        const std::lock_guard lock{mutex_};
        auto& at = slots_[slot];
        const auto reader = readers_.find(at.reader);
        if (at.reader == 0 || reader == readers_.end() || !reader->second.in_round) {
            return;
        }
        reader->second.heard = clock::now();  // what it was silent for before was not its doing
        // First: the answer may be here before `send` returns.
        at.published = true;
        at.section = section;
        at.chunk = chunk;
        const chunk_body body{.round = round_,
                              .generation = at.generation,
                              .section = section,
                              .chunk = chunk,
                              .slot = static_cast<std::uint32_t>(slot)};
        reader->second.link->send(frame_kind::published, bytes_of(body));
    }

    /// Counts what readers do: frees, takings, departures.
    [[nodiscard]] std::uint64_t changes() {
        const std::lock_guard lock{mutex_};
        return changes_;
    }
    /// Waits until a reader has freed a slot, has taken everything or has gone since `changes()`
    /// was `before`; at most a moment.
    /// Readers that have been silent for half of the time that there was are let go.
    /// @throws timeout_error, cancelled_error.
    void await_change(std::uint64_t before, deadline until, const std::stop_token& stop) {
        std::unique_lock lock{mutex_};
        const auto moment = deadline::after(std::chrono::milliseconds{50});
        changed_.wait_until(lock, stop, std::min(until, moment).when(),
                            [&] { return changes_ != before; });
        let_go_of_silent();
        if (stop.stop_requested()) {
            throw cancelled_error{"the round was stopped", at_update()};
        }
        if (until.expired()) {
            throw timeout_error{"worker rank " + std::to_string(first_waiting()) +
                                    " did not take its chunks in time",
                                at_update()};
        }
    }
    /// Whether every one of `ranks` has taken everything or is no longer in the round.
    [[nodiscard]] bool all_taken(std::span<const int> ranks) {
        const std::lock_guard lock{mutex_};
        return std::ranges::all_of(ranks, [&](int rank) {
            const auto& reader = readers_[rank];
            return !reader.in_round || reader.taken;
        });
    }

    /// Tells every reader that the round, or the trainer, has ended here: their update calls fail
    /// at once, with `why`.
    void abandon(const failure& why) noexcept {
        const std::lock_guard lock{mutex_};
        for (auto& [rank, reader] : readers_) {
            if (reader.link != nullptr) {
                reader.link->refuse(why);
                reader.link = nullptr;
            }
            leave(rank, reader);
        }
    }

    // The server's thread.

    void on_hello(const connection& from, const hello_body&) {
        if (from->worker_rank() == control_connection::of_trainer) {
            return;
        }
        const std::lock_guard lock{mutex_};
        auto& reader = readers_[from->worker_rank()];
        if (reader.link != nullptr) {
            reader.link->refuse(
                {.kind = "session", .text = "another connection of this worker rank has come"});
            leave(from->worker_rank(), reader);
        }
        reader.link = from;
        reader.hash.reset();
    }
    void on_frame(const connection& from, const frame& got) {
        if (from->worker_rank() == control_connection::of_trainer) {
            return drop_in_round(got.as<drop_body>());
        }
        switch (got.kind) {
            case frame_kind::needs: return take_needs(from, got.body);
            case frame_kind::part: return take_part(from, got.body);
            case frame_kind::freed: return take_free(from, got.as<chunk_body>());
            case frame_kind::taken: return take_taken(from, got.as<round_body>());
            default: break;
        }
        throw protocol_error{"a worker rank sent a control frame of kind " +
                             std::to_string(static_cast<std::uint32_t>(got.kind))};
    }
    void on_gone(const connection& from) noexcept {
        const std::lock_guard lock{mutex_};
        if (from->worker_rank() == control_connection::of_trainer) {
            leave_peer(drop_body::everybody);  // rank 0 has ended, and nobody counts on the round
            return;
        }
        const auto found = readers_.find(from->worker_rank());
        if (found != readers_.end() && found->second.link == from) {
            found->second.link = nullptr;
            leave(found->first, found->second);
        }
    }

private:
    struct reader_state {
        connection link{};
        std::shared_ptr<const plan::owner_part> part{};
        std::optional<std::uint64_t> hash{};  ///< of the accepted part
        bool dropped = false;                 ///< by the engine
        bool in_round = false;
        bool taken = false;
        bool staged = false;        ///< takes chunks from the arena
        clock::time_point heard{};  ///< when it last made progress
    };
    struct slot_state {
        int reader = 0;  ///< 0: free
        std::uint64_t generation = 0;
        std::uint32_t section = 0;
        std::uint32_t chunk = 0;
        bool published = false;
    };
    struct worker_needs {
        std::string machine{};
        std::optional<plan::needs_report> report{};
    };

    [[nodiscard]] static error_context at_init() {
        return {.phase = phase::init, .backend = "sharded_pull"};
    }
    [[nodiscard]] static error_context at_update() {
        return {.phase = phase::update, .backend = "sharded_pull"};
    }

    void take_needs(const connection& from, std::string_view body);
    void take_part(const connection& from, std::string_view body);
    [[nodiscard]] bool is_staged(const plan::owner_part& part) const;
    void require_slots() const;
    void take_free(const connection& from, const chunk_body& what);
    void take_taken(const connection& from, const round_body& what);
    void route_all();
    void set_dropped(std::size_t peer, bool dropped) noexcept;

    // With the mutex.

    void leave(int rank, reader_state& reader) noexcept {
        reader.in_round = false;
        for (auto& slot : slots_) {
            if (slot.reader == rank) {
                slot = {};
            }
        }
        note_change();
    }
    void leave_peer(std::uint64_t peer) noexcept {
        const bool all = peer == drop_body::everybody;
        if (!all && peer + 1 >= first_rank_.size()) {
            return;
        }
        for (auto& [rank, reader] : readers_) {
            const auto at = static_cast<std::size_t>(all ? 0 : peer);
            const bool meant = all || (rank >= first_rank_[at] && rank < first_rank_[at + 1]);
            if (meant && reader.in_round) {
                leave(rank, reader);
            }
        }
    }
    void let_go_of_silent() noexcept {
        const auto now = clock::now();
        for (auto& [rank, reader] : readers_) {
            const auto patience = (until_.when() - reader.heard) / 2;
            if (reader.in_round && !reader.taken && now - reader.heard > patience &&
                waits_for(rank)) {
                reader.link->refuse({.kind = "timeout",
                                     .text = "nothing was heard of this worker rank for half of "
                                             "the time that there was"});
                reader.link = nullptr;
                leave(rank, reader);
            }
        }
    }
    /// Whether it is the reader that has something to do.
    [[nodiscard]] bool waits_for(int rank) const {
        return (published_all_ && readers_.at(rank).staged) ||
               std::ranges::any_of(slots_, [&](const slot_state& slot) {
                   return slot.reader == rank && slot.published;
               });
    }
    [[nodiscard]] int first_waiting() const noexcept {
        for (const auto& [rank, reader] : readers_) {
            if (reader.in_round && !reader.taken && reader.staged) {
                return rank;
            }
        }
        return 0;
    }
    void note_change() noexcept {
        ++changes_;
        changed_.notify_all();
    }

public:
    /// Everything was published: from now on it is the readers' turn.
    void published_all(bool value) {
        const std::lock_guard lock{mutex_};
        published_all_ = value;
        const auto now = clock::now();
        for (auto& [rank, reader] : readers_) {
            reader.heard = now;
        }
    }

private:
    owner_terms terms_;
    plan::part_checker checker_;  ///< the server's thread
    std::mutex mutex_;
    std::condition_variable_any changed_;
    std::uint64_t changes_ = 0;
    std::map<int, reader_state> readers_;  ///< by worker rank, from 1
    std::vector<slot_state> slots_;
    std::uint64_t generation_ = 0;
    std::uint64_t round_ = 0;
    bool published_all_ = false;
    deadline until_ = deadline::at({});     ///< of the round
    std::vector<int> first_rank_;           ///< of each peer, and one past the last
    std::vector<drop_body> dropped_ahead_;  ///< of a round that has not begun here

    // Rank 0.
    std::optional<plan::ownership> owners_;
    std::vector<std::string> machines_;  ///< of the trainer ranks
    std::vector<worker_needs> needs_;
    std::vector<std::optional<plan::worker_route>> rows_;
    bool routed_ = false;
    failure route_failure_{};
};

}  // namespace weightwire::sharded_pull

#include <weightwire/backends/sharded_pull/owner_desk_impl.hpp>
