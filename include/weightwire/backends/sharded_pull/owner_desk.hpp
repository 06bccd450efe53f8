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

#include <weightwire/backends/sharded_pull/chunk_slots.hpp>
#include <weightwire/backends/sharded_pull/chunk_takers.hpp>
#include <weightwire/backends/sharded_pull/control_channel.hpp>
#include <weightwire/backends/sharded_pull/control_server.hpp>
#include <weightwire/backends/sharded_pull/route_desk.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_accept.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/wire/pull_node_codec.hpp>
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
    std::size_t slots = 0;   ///< of the arena; 0 where nothing is staged
    bool node_once = false;  ///< nodes take once what their workers need alike
    /// A chunk is packed at once: takers wait in turn where slots are few.
    bool whole_chunks = false;
};

/// Handles the control connections of one trainer rank, and keeps the slots of its arena. The
/// server's thread calls the `on_…` members, the thread in `send_weights()` the others.
///
/// A slot is in use from `take_slot` until each of its readers has freed this very generation of
/// it, or takes no part in the round any more. A reader whose slots were used again while it may
/// have read them never hears `confirmed`, so it never commits what it has. The same holds for the
/// landing memory in which one worker has a chunk for its node: chunk_slots.hpp.
class owner_desk {
public:
    using connection = std::shared_ptr<control_connection>;
    using held_slot = chunk_slots::held_slot;
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
        routes_.begin(*terms_.parameters, std::move(owners), std::move(machines),
                      static_cast<std::size_t>(workers), terms_.node_once);
        route_failure_ = {};
    }
    /// Until every worker rank that is there was told its row and has shown where it lands what it
    /// takes for its node.
    /// @throws timeout_error names the first worker rank that did not come; cancelled_error; what
    /// routing throws.
    void await_routed(deadline until, const std::stop_token& stop) {
        std::unique_lock lock{mutex_};
        const bool came = changed_.wait_until(lock, stop, until.when(), [&] {
            return routes_.settled() || static_cast<bool>(route_failure_);
        });
        if (route_failure_) {
            route_failure_.raise();
        }
        if (came) {
            return;
        }
        if (stop.stop_requested()) {
            throw cancelled_error{"the opening was stopped", at_init()};
        }
        auto where = at_init();
        where.rank = static_cast<int>(routes_.first_missing()) + 1;
        throw timeout_error{routes_.routed()
                                ? "this worker rank did not show in time where it lands what it "
                                  "takes for its node; look at it"
                                : "this worker rank did not say in time what it reads; see that it "
                                  "reaches the trainer at its control port "
                                  "(trainer_init_info::host)",
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
    /// @returns whether `takers` are others than in the round before.
    bool begin_round(std::uint64_t round, deadline until) {
        const std::lock_guard lock{mutex_};
        round_ = round;
        const auto now = clock::now();
        until_ = until;
        in_round_.clear();
        for (auto& [rank, reader] : readers_) {
            reader.in_round = reader.hash.has_value() && !reader.dropped && reader.link != nullptr;
            reader.taken = false;
            reader.heard = now;
            if (reader.in_round) {
                in_round_.push_back({rank, reader.part});
            }
        }
        const bool other = slots_.begin_round(round, in_round_);
        for (const auto& each : dropped_ahead_) {
            if (each.round == round) {
                leave_peer(each.peer);
            }
        }
        std::erase_if(dropped_ahead_,
                      [round](const drop_body& each) { return each.round <= round; });
        return other;
    }
    /// Whom the round's chunks are packed for; stay until the next round. For the thread that
    /// begins rounds.
    [[nodiscard]] const std::vector<chunk_taker>& takers() const noexcept {
        return slots_.takers();
    }
    [[nodiscard]] bool in_round(int rank) {
        const std::lock_guard lock{mutex_};
        return readers_[rank].in_round;
    }
    /// Whether a reader of the taker is still in the round.
    [[nodiscard]] bool has_readers(std::size_t taker) {
        const std::lock_guard lock{mutex_};
        return slots_.has_readers(taker);
    }

    /// A slot for a taker's next chunk; nothing while it holds `most` already or none is free.
    [[nodiscard]] std::optional<held_slot> take_slot(std::size_t taker, std::size_t most) {
        const std::lock_guard lock{mutex_};
        return slots_.take(taker, most);
    }
    /// Whether the slot is still that taker's: it is taken away when all its readers have left the
    /// round, and only `take_slot` gives it to another.
    [[nodiscard]] bool holds(std::size_t taker, const held_slot& slot) {
        const std::lock_guard lock{mutex_};
        return slots_.is_held(taker, slot);
    }
    /// The slot's bytes are there. Does nothing where its readers are no longer in the round.
    void publish(const held_slot& slot, std::uint32_t chunk) {
        const std::lock_guard lock{mutex_};
        slots_.publish(slot, chunk, to_readers{this});
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
    /// Lets go of silent readers, as `await_change` does, and does not wait.
    void look_after_readers() {
        const std::lock_guard lock{mutex_};
        let_go_of_silent();
    }
    /// Whether every reader of what is staged has taken everything or is no longer in the round.
    [[nodiscard]] bool all_taken() {
        const std::lock_guard lock{mutex_};
        return std::ranges::all_of(readers_, [](const auto& each) {
            const auto& reader = each.second;
            return !reader.in_round || reader.taken || !reader.staged();
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
        }
        for (auto& [rank, reader] : readers_) {
            leave(rank, reader);
            leave_routes(rank);
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
            leave_routes(from->worker_rank());
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
            case frame_kind::landing: return take_landing(from, got.body);
            case frame_kind::landed: return take_landed(from, got.as<chunk_body>());
            case frame_kind::waits: return take_waiting(from, got.as<round_body>());
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
            leave_routes(found->first);
        }
    }

private:
    struct reader_state {
        connection link{};
        std::shared_ptr<const accepted_part> part{};
        std::optional<std::uint64_t> hash{};  ///< of the accepted part
        bool dropped = false;                 ///< by the engine
        bool in_round = false;
        bool taken = false;
        clock::time_point heard{};  ///< when it last made progress
        /// Whether it takes chunks from the arena.
        [[nodiscard]] bool staged() const noexcept { return part != nullptr && part->any_staged(); }
    };

    [[nodiscard]] static error_context at_init() {
        return {.phase = phase::init, .backend = "sharded_pull"};
    }
    [[nodiscard]] static error_context at_update() {
        return {.phase = phase::update, .backend = "sharded_pull"};
    }

    void take_needs(const connection& from, std::string_view body);
    void take_part(const connection& from, std::string_view body);
    void require_slots() const;
    void take_landing(const connection& from, std::string_view body);
    void take_landed(const connection& from, const chunk_body& what);
    void take_waiting(const connection& from, const round_body& what);
    void leave_routes(int rank) noexcept;
    void take_free(const connection& from, const chunk_body& what);
    void take_taken(const connection& from, const round_body& what);
    void set_dropped(std::size_t peer, bool dropped) noexcept;

    // With the mutex.

    void leave(int rank, reader_state& reader) noexcept {
        reader.in_round = false;
        slots_.leave(rank, to_readers{this});
        note_change();
    }
    /// Tells a reader of a chunk: what it was silent for before was not its doing.
    void say(int rank, frame_kind kind, const chunk_body& what) noexcept {
        auto& reader = readers_.find(rank)->second;
        reader.heard = kind == frame_kind::released ? reader.heard : clock::now();
        if (reader.link != nullptr) {
            reader.link->send(kind, bytes_of(what));
        }
    }
    struct to_readers {
        owner_desk* desk;
        void operator()(int rank, frame_kind kind, const chunk_body& what) const noexcept {
            desk->say(rank, kind, what);
        }
    };
    /// Tells a worker about its route.
    [[nodiscard]] auto route_sayer() {
        return [this](std::size_t worker, frame_kind kind, const std::string& text) {
            const auto found = readers_.find(static_cast<int>(worker) + 1);
            if (found != readers_.end() && found->second.link != nullptr) {
                found->second.link->send(kind, text);
            }
        };
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
                leave_routes(rank);
            }
        }
    }
    /// Whether it is the reader that has something to do, and not one that leads it.
    [[nodiscard]] bool waits_for(int rank) const {
        return slots_.was_given(rank) ||
               (published_all_ && readers_.at(rank).staged() && !slots_.is_waited_for(rank));
    }
    /// One whose turn it is, if there is any.
    [[nodiscard]] int first_waiting() const noexcept {
        int made = 0;
        for (const auto& [rank, reader] : readers_) {
            const bool late = reader.in_round && !reader.taken && reader.staged();
            if (late && waits_for(rank)) {
                return rank;
            }
            made = late && made == 0 ? rank : made;
        }
        return made;
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
    std::vector<round_reader> in_round_;   ///< those with which the round began
    chunk_slots slots_;
    std::uint64_t round_ = 0;
    bool published_all_ = false;
    deadline until_ = deadline::at({});     ///< of the round
    std::vector<int> first_rank_;           ///< of each peer, and one past the last
    std::vector<drop_body> dropped_ahead_;  ///< of a round that has not begun here

    // Rank 0.
    route_desk routes_;
    failure route_failure_{};
};

}  // namespace weightwire::sharded_pull

#include <weightwire/backends/sharded_pull/owner_desk_impl.hpp>
