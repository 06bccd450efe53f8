#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/engine/call_gate.hpp>
#include <weightwire/engine/session.hpp>
#include <weightwire/engine/worker_ranks.hpp>
#include <weightwire/engine/worker_status.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/vllm_requests.hpp>

/// @file
/// The session machine put to work: each event of a `session` together with what it means for the
/// ranks, and the status that other threads read.

namespace weightwire::detail {

/// Runs sessions on the ranks of a worker: the only place where an event of the machine and its
/// effect on sinks meet, so that neither can happen without the other. Whoever calls holds the
/// gate, except where a member says otherwise. Every member that throws has rolled the session back
/// on all ranks before.
template <class Tag, class Sink, class Events>
class worker_session {
    using turn = call_gate::entry;

public:
    worker_session(Tag tag, const std::vector<Sink*>& sinks, worker_options<Events> options)
        : options_{std::move(options)}, ranks_{std::move(tag), sinks, options_.devices} {
        // Sinks may hold weights before the first trainer comes; its versions go on from theirs.
        const weight_version loaded = ranks_.sink(0).version();
        session_ = session{loaded, ranks_.any_dirty(), random_epoch()};
        board_.change([&](worker_status& s) {
            s.version = loaded;
            s.label = loaded == 0 ? s.label : std::to_string(loaded);
            s.dirty = session_.dirty();
        });
    }
    worker_session(const worker_session&) = delete;
    worker_session& operator=(const worker_session&) = delete;
    ~worker_session() {
        ranks_.roll_back();  // first: readers that wait for the session are let go
        ranks_.release();
    }

    [[nodiscard]] const worker_options<Events>& options() const noexcept { return options_; }
    [[nodiscard]] worker_ranks<Tag, Sink>& ranks() noexcept { return ranks_; }
    [[nodiscard]] const worker_ranks<Tag, Sink>& ranks() const noexcept { return ranks_; }
    /// Any thread.
    [[nodiscard]] status_board& board() noexcept { return board_; }
    [[nodiscard]] const status_board& board() const noexcept { return board_; }
    [[nodiscard]] const session& state() const noexcept { return session_; }

    [[nodiscard]] static error_context at(phase where) {
        return {.phase = where, .backend = std::string{backend_traits<Tag>::wire_name}};
    }

    /// The open session may stay until `until` without a further call. Returns its end. Only ever
    /// later than before: a call with a short budget says nothing about the one after it.
    deadline::clock::time_point keep_session(deadline::clock::time_point until) {
        const auto idle = options_.session_time_to_live;
        auto ends = until;
        board_.change([&](worker_status& s) {
            s.session_ends = idle.count() != 0 ? deadline::after(idle).when()
                             : s.session_ends == deadline::clock::time_point::max()
                                 ? until
                                 : std::max(s.session_ends, until);
            ends = s.session_ends;
        });
        return ends;
    }
    /// When the open session ends; `max()` without one. Any thread.
    [[nodiscard]] deadline::clock::time_point session_ends() const {
        return board_.look([](const worker_status& s) {
            return s.session != 0 ? s.session_ends : deadline::clock::time_point::max();
        });
    }
    /// Rolls back a session whose time is over. The engine's watch sees to it, but its thread may
    /// be late: whoever calls or asks at that moment must not find the session open either.
    void end_idle_session() {
        if (deadline::clock::now() >= session_ends() &&
            on_session([](session& s) { return s.abandon(); }).action == session_action::rollback) {
            close_session(&worker_status::rolled_back);
            tell({.kind = event_kind::warning,
                  .phase = phase::serve,
                  .text = "the open session was rolled back: its trainer's time is over"});
        }
    }

    /// One event of the machine, throwing its fault. What the caller has done to the sinks by then
    /// it undoes itself: the machine does nothing.
    template <class Event>
    void step(phase where, Event event) {
        on_session(event).require(at(where));
    }
    /// From any thread: the call that runs, if one does, ends without effect. Marked here and not
    /// when the take-over gets its turn: a call that sleeps through it must not commit on waking.
    void supersede_running_call() {
        on_session([](session& s) { return s.running() ? s.init_begin() : session_step{}; });
    }

    /// Ends the old epoch and begins a new one, in which `open` makes the receivers.
    template <class Open>
    void begin_epoch(Open open) {
        const auto began = on_session([](session& s) { return s.init_begin(); });
        if (began.action == session_action::rollback) {
            close_session(&worker_status::rolled_back);
        }
        // Before new ones are opened here: two trainers' memory may not fit beside each other.
        // Those that do fit have been opened before anything ended, and `open` only adopts them.
        ranks_.release();
        board_.change([&](worker_status& s) { s.epoch = session_.epoch(); });
        tell({.kind = event_kind::phase_begun, .phase = phase::init});
        try {
            open();
            told_tables_ = 0;
            told_converted_ = 0;
            tell_choices(phase::init);
            step(phase::init, [](session& s) { return s.init_done(); });
        } catch (...) {
            ranks_.release();  // those of a backend that opens beside may be
            if (ranks_.lost()) {
                publish_sinks();
            }
            give_up(phase::init, &session::init_failed);
        }
        tell({.kind = event_kind::phase_ended, .phase = phase::init});
    }

    /// @param make_ready runs before the sinks begin: opens receivers that a failure has released.
    template <class MakeReady>
    void begin_session(session_key key, session_request request, deadline until, turn& mine,
                       MakeReady make_ready) {
        // The machine decides before a sink is asked: a refused start must leave no trace in one.
        step(phase::start, [&](session& s) { return s.start_begin(key, request); });
        tell({.kind = event_kind::phase_begun, .phase = phase::start, .version = request.version});
        try {
            make_ready();
            ranks_.begin(session_.info(), until, mine);
            step(phase::start, [](session& s) { return s.start_done(); });
        } catch (...) {
            give_up(phase::start, &session::start_failed);
        }
        // Published after `start_done`: until then a question sees no session, so it ends none. The
        // end comes later still, from `keep_session`, once the caller knows the trainer's patience.
        const bool dirty = ranks_.any_dirty();
        board_.change([&](worker_status& s) {
            s.session = session_.info().session;
            s.session_ends = deadline::clock::time_point::max();
            s.dirty = dirty;
        });
    }

    /// @param named the vLLM request that names parameters, or null.
    /// @param describe gives the message for the receivers, or throws.
    template <class Describe>
    wire::native_update_reply receive(session_key key,
                                      const std::shared_ptr<const wire::vllm_update_request>& named,
                                      deadline until, turn& mine, Describe describe) {
        step(phase::update, [&](session& s) { return s.update_begin(key); });
        wire::native_update_reply reply;
        try {
            const update_message message = describe();
            // Told before the first byte: a health check must not see a mix as healthy.
            if constexpr (HasCommitMode<Sink>) {
                if (ranks_.sink(0).mode() == commit_mode::in_place) {
                    board_.change([](worker_status& s) { s.dirty = true; });
                }
            }
            reply = ranks_.receive(message, named, until, mine);
            if (ranks_.table_bytes() != told_tables_) {
                tell_choices(phase::update);
            }
            tell_conversions();
            step(phase::update, [](session& s) { return s.update_done(); });
        } catch (...) {
            // First: a receiver may still refer to the destinations. And a transport whose peer was
            // left in the middle of a part cannot be used for the next.
            ranks_.release();
            give_up(phase::update, &session::update_failed);
        }
        const std::chrono::nanoseconds took{reply.ended_ns - reply.began_ns};
        board_.change([&](worker_status& s) {
            s.bytes += reply.bytes;
            s.last_update = took;
        });
        tell({.kind = event_kind::phase_ended,
              .phase = phase::update,
              .bytes = reply.bytes,
              .elapsed = took});
        return reply;
    }

    /// The end of a finish call that `finish_begin` let in.
    /// @param not_after nobody counts on a commit from then on; at most `until`.
    /// @param last_check what stands between prepared ranks and the commit; is given how long the
    /// commit will take. Asked once more where ranks have exchanged, which takes its time.
    template <class LastCheck>
    void commit(weight_version version, const std::optional<std::string>& label,
                std::span<const std::uint64_t> digests, deadline until, deadline not_after,
                turn& mine, LastCheck last_check) {
        try {
            ranks_.complete(digests, until, mine);
            exchange(not_after, mine, last_check);
            step(phase::finish, [](session& s) { return s.commit_begin(); });
        } catch (...) {
            give_up(phase::finish, &session::finish_failed);
        }
        // From here nothing throws and no take-over gets in: the ranks cannot come apart. Status
        // follows the sinks, so that who reads the new version in it finds the new weights.
        ranks_.commit(version);
        const bool dirty = ranks_.any_dirty();
        on_session([&](session& s) {
            s.committed(version);
            s.observe(version, dirty);
            return 0;
        });
        board_.change([&](worker_status& s) {
            s.version = version;
            s.label = label.value_or(s.label);  // vLLM keeps the old one where none is given
            s.dirty = dirty;
            s.session = 0;
            ++s.committed;
        });
        tell({.kind = event_kind::committed, .phase = phase::finish, .version = version});
    }

    /// Zeros for every one of `parameters`, as a commit of the version there is, outside of any
    /// session. The machine does not see it: there is no trainer whose calls it could let in.
    /// @param after the list that the next sessions have, so that the trainer may go on; or null.
    /// @param last_check as for `commit`.
    template <class LastCheck>
    void commit_zeros(const manifest& parameters, const manifest* after, deadline until, turn& mine,
                      LastCheck last_check) {
        const auto version = board_.look([](const worker_status& s) { return s.version; });
        const auto end = [&] {
            ranks_.roll_back();  // nothing, after a commit
            if (after != nullptr) {
                ranks_.expect(*after);
            }
            publish_sinks();
        };
        ranks_.expect(parameters);
        try {
            ranks_.begin({.epoch = session_.epoch(), .version = version}, until, mine);
            ranks_.zero(until, mine);
            ranks_.complete({}, until, mine);
            exchange(until, mine, last_check);
            ranks_.commit(version);
        } catch (...) {
            end();
            throw;
        }
        end();
    }

    /// Rolls back every rank and counts why. The session goes from the status last: who sees none
    /// may read the old weights.
    void close_session(std::uint64_t worker_status::*count) {
        ranks_.roll_back();
        publish_sinks();
        board_.change([&](worker_status& s) {
            s.session = 0;
            ++(s.*count);
        });
    }
    /// Reads what the sinks say, in the session's thread, and publishes it: a user's `dirty()` need
    /// not be thread-safe, and questions must not wait for a rank that works.
    void publish_sinks() {
        const bool dirty = ranks_.any_dirty();
        on_session([&](session& s) {
            s.observe(s.version(), dirty);  // no rollback changes the version
            return 0;
        });
        board_.change([&](worker_status& s) { s.dirty = dirty; });
    }

private:
    /// Random, so that a call meant for the process before a restart is stale. Below 2^48, so that
    /// every JSON reader keeps it exact; never 0, which stands for no epoch.
    [[nodiscard]] static std::uint64_t random_epoch() {
        std::random_device source;
        return ((std::uint64_t{source()} << 16U) ^ source()) % (std::uint64_t{1} << 48U) + 1;
    }

    /// From prepared ranks to ranks that have only to publish.
    template <class LastCheck>
    void exchange(deadline not_after, turn& mine, LastCheck& last_check) {
        last_check(ranks_.commit_estimate());
        if constexpr (HasExchange<Sink>) {
            ranks_.exchange(not_after, mine);
            last_check(ranks_.commit_estimate());
        }
    }

    /// Tells what the receivers have chosen and what memory it costs.
    void tell_choices([[maybe_unused]] phase where) {
        if constexpr (!std::is_same_v<Events, no_events>) {
            ranks_.describe([&](const std::string& text) {
                tell({.kind = event_kind::chosen, .phase = where, .text = text});
            });
        }
        told_tables_ = ranks_.table_bytes();
    }
    /// Tells what is converted, once an init: such parameters stand outside of verification.
    void tell_conversions() {
        const auto count = ranks_.converted();
        if (count > told_converted_) {
            told_converted_ = count;
            tell({.kind = event_kind::chosen,
                  .phase = phase::update,
                  .text =
                      std::to_string(count) + " of " + std::to_string(ranks_.parameters().size()) +
                      " parameters are converted to the worker's dtypes; these are not compared "
                      "with the trainer's digests"});
        }
    }
    void tell(const event& what) noexcept {
        if constexpr (!std::is_same_v<Events, no_events>) {
            options_.events.on(what);
        }
    }

    /// The machine's lock: an init marks the running call from its own thread. Held for an event,
    /// never for a call, so that marking is immediate.
    template <class Event>
    auto on_session(Event event) {
        const std::lock_guard lock{session_mutex_};
        return event(session_);
    }

    /// Called in a catch block: ends the session, if there is one, and throws on. vLLM keeps a
    /// session whose finish failed, which nobody can ever end; here every failure ends it.
    [[noreturn]] void give_up(phase where, session_step (session::*failed)() noexcept) {
        bool taken_over = false;
        const auto ended = on_session([&](session& s) {
            taken_over = s.superseded();
            return (s.*failed)();
        });
        // Where the call learnt of it only at its end, the error says so already.
        const bool said = ended.fault == session_fault::not_running;
        if (where == phase::init) {  // there is no session to roll back
            throw_taken_over(taken_over, where);
        }
        close_session(taken_over || said ? &worker_status::rolled_back : &worker_status::failed);
        throw_taken_over(taken_over, where);
    }
    /// The error as it is; where an init stopped the call, its cancellation is only a symptom.
    [[noreturn]] void throw_taken_over(bool taken_over, phase where) const {
        if (taken_over) {
            throw session_refused{session_fault::taken_over, to_string(session_fault::taken_over),
                                  at(where)};
        }
        throw;
    }

    worker_options<Events> options_;
    status_board board_;
    std::mutex session_mutex_;  // of session_; never held while a rank works
    session session_;
    worker_ranks<Tag, Sink> ranks_;
    std::uint64_t told_tables_ = 0;   ///< memory of the receivers that an event has told of
    std::size_t told_converted_ = 0;  ///< parameters whose conversion an event has told of
};

}  // namespace weightwire::detail
