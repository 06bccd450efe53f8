#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/engine/call_gate.hpp>
#include <weightwire/engine/idle_watch.hpp>
#include <weightwire/engine/remembered_update.hpp>
#include <weightwire/engine/session.hpp>
#include <weightwire/engine/worker_checks.hpp>
#include <weightwire/engine/worker_commit_checks.hpp>
#include <weightwire/engine/worker_session.hpp>
#include <weightwire/engine/worker_status.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/vllm_requests.hpp>

/// @file
/// The worker's side of the four phases: one or several ranks that receive, check and commit
/// together.

namespace weightwire {

/// Turns protocol calls into committed weights. One sink and one receiver a rank.
///
/// The calls are `init`, `start`, `update` and `finish`, each in the native form and in vLLM's.
/// They run one at a time in the order in which they come, each until its own deadline; an `init`
/// stops the call that runs, rolls back its session and begins a new epoch. A stale call changes
/// nothing. After any other error the session is over and rolled back on every rank; after a failed
/// update the receivers are released too, and a native trainer begins again with init. Questions
/// are answered while a call runs.
///
/// With one rank the calling thread does all the work; with several, each further rank has a thread
/// that lives as long as the engine. Ranks commit only when all have prepared. A thread that sleeps
/// watches over open sessions from the first start on, and rolls back one whose trainer fell
/// silent; the event sink hears of that from it, but never of two things at once.
///
/// Thread-safe; neither copied nor moved. No call may run when it is destroyed.
template <class Tag, class Sink, class Events = no_events>
    requires Transport<Tag> && WeightSink<Sink> && EventSink<Events>
class worker_engine {
    using traits = backend_traits<Tag>;
    using turn = detail::call_gate::entry;
    using turn_kind = detail::call_gate::kind;
    using time_point = deadline::clock::time_point;
    using receivers = std::unique_ptr<detail::rank_receivers<Tag>>;

public:
    /// The tag that says how bytes travel.
    using backend = Tag;
    using sink_type = Sink;

    /// An engine of one rank. `sink` outlives it.
    worker_engine(Tag tag, Sink& sink, worker_options<Events> options = {})
        : worker_engine{std::move(tag), std::vector<Sink*>{&sink}, std::move(options)} {}
    /// An engine of several ranks: local rank `i` writes to `*sinks[i]`.
    /// @throws usage_error no sink, or a null one.
    worker_engine(Tag tag, const std::vector<Sink*>& sinks, worker_options<Events> options = {})
        : boot_id_{detail::boot_id()}, sessions_{std::move(tag), sinks, std::move(options)} {}
    worker_engine(const worker_engine&) = delete;
    worker_engine& operator=(const worker_engine&) = delete;
    /// Rolls back an open session and lets go of the trainer's memory.
    ~worker_engine() = default;

    // The native form. Each call takes its budget from its message.

    /// Begins a new epoch. What can be checked without touching the trainer that is here comes
    /// first, its transport included where the backend `opens_beside`: one that is refused costs
    /// the other nothing, not even the call that runs.
    /// @throws mismatch_error another wire version, backend, plan hash or world size.
    /// @throws coverage_error a parameter that a rank does not have, where sinks have
    /// `parameters()`.
    /// @throws timeout_error the running call did not leave in time.
    /// @throws cancelled_error the client no longer waits: nothing has changed.
    /// @throws session_refused the trainer lost this worker, and another one has come since.
    /// @throws what the receivers throw. Those of a backend that does not `opens_beside` are opened
    /// when the old ones are gone, so the epoch has begun then, and the worker is free.
    wire::native_init_reply init(wire::native_init message, const worker_call& call) {
        const auto arrival = owner_.arrive();
        detail::check_native_init<Tag>(message, world_size());
        detail::check_native_parameters(message.parameters, ranks());
        detail::check_native_owner(message, owner_.owner(), at(phase::init));
        const auto until = traits::capabilities.before_let_go(native_deadline(message.budget_ms));
        auto next = std::make_unique<wire::native_init>(std::move(message));
        const transport_open with{.wire_parameters = next->wire_parameters,
                                  .transport = next->transport,
                                  .parameters = &next->parameters};
        const std::pair group{next->rank_offset, next->world_size};
        auto opened = open_beside(with, group, until, call);
        turn mine{gate_, turn_kind::take_over, until, superseding(call), phase::init};
        require_caller(call, phase::init);
        detail::check_native_owner(*next, owner_.owner(), at(phase::init));
        begin_epoch(arrival, [&] {
            vllm_ = nullptr;
            native_ = std::move(next);
            ranks().expect(native_->parameters);
            take(std::move(opened), with, group, until, mine);
        });
        owner_.own({detail::worker_owner::kind_type::native, native_->trainer});
        const auto now = board().read();
        return {.epoch = now.epoch,
                .plan_hash = native_->plan_hash,
                .version = now.version,
                .commit_mode = std::string{commit_mode_name()},
                .dirty = now.dirty};
    }
    /// Begins a session: every sink gives its destinations, or none does.
    /// @throws session_refused a stale epoch, an open session, or a version that is not above this
    /// worker's and not forced.
    /// @throws dirty_error a partial session on a worker that is dirty.
    /// @throws cancelled_error the client no longer waits: nothing has changed.
    wire::native_start_reply start(const wire::native_start& message, const worker_call& call) {
        const auto until = native_deadline(message.answer_ms);
        turn mine{gate_, turn_kind::ordinary, until, call.stop, phase::start};
        sessions_.end_idle_session();
        require_native({.epoch = message.epoch}, phase::start);
        require_caller(call, phase::start);
        watch_.prepare();
        const session_request request{message.version, message.partial, message.force};
        sessions_.begin_session({.epoch = message.epoch}, request, until, mine, [] {});
        keep_session(native_deadline(message.budget_ms).later(options().answer_margin));
        return {.session = board().look([](const worker_status& s) { return s.session; })};
    }
    /// Receives one part on every rank at once. With one rank nothing is allocated between the
    /// call and the last byte.
    /// @throws session_refused a stale epoch or session, or none is open: nothing has changed.
    /// @throws mismatch_error the part is of another plan. @throws protocol_error it is no part of
    /// the list. @throws what the receivers throw. After these three the session is over.
    wire::native_update_reply update(const wire::native_update& message, const worker_call& call) {
        const auto until = traits::capabilities.before_let_go(native_deadline(message.budget_ms));
        turn mine{gate_, turn_kind::ordinary, until, call.stop, phase::update};
        sessions_.end_idle_session();
        require_native({message.epoch, message.session}, phase::update);
        const auto reply =
            sessions_.receive({message.epoch, message.session}, {}, until, mine, [&] {
                detail::require_plan(message, native_->plan_hash, at(phase::update));
                detail::require_part(message, native_->parameters.size(), at(phase::update));
                return update_message{.round = message.round,
                                      .part = message.part,
                                      .first = message.first,
                                      .count = message.count,
                                      .native = true};
            });
        keep_session(until.later(options().answer_margin));
        return reply;
    }
    /// Checks coverage and digests and prepares every rank, then commits if the trainer will still
    /// count on it at the end: a commit that its sinks expect to outlast the deadline is not begun,
    /// nor one whose client has left or that a take-over came before.
    /// @throws coverage_error bytes are missing. @throws integrity_error a digest differs; both
    /// name the tensor. @throws timeout_error, cancelled_error nobody would count on the commit.
    /// The old version stays on every rank.
    wire::native_finish_reply finish(const wire::native_finish& message, const worker_call& call) {
        const auto until = native_deadline(message.budget_ms);
        turn mine{gate_, turn_kind::ordinary, until, call.stop, phase::finish};
        sessions_.end_idle_session();
        require_native({message.epoch, message.session}, phase::finish);
        sessions_.step(phase::finish, [&](session& s) {
            return s.finish_begin({message.epoch, message.session});
        });
        const auto version = sessions_.state().info().version;
        sessions_.commit(version, std::to_string(version), message.digests, until,
                         detail::commit_limit(message, boot_id_, until), mine, [&](auto takes) {
                             detail::require_started(message, version, at(phase::finish));
                             require_wanted(call, until, mine, takes);
                             detail::require_before(message, boot_id_, takes, at(phase::finish));
                         });
        return {.version = version};
    }

    // vLLM's form. The parameters of a session are the sink's own (`HasParameters`).

    /// Begins a new epoch, as the native form does. What differs: nothing says who the trainer is,
    /// so none is refused for being another.
    /// @throws unsupported_error the sink does not say what it holds, or ranks hold different
    /// lists.
    void init(const wire::vllm_init& message, const worker_call& call) {
        detail::require_speaks_vllm<Tag>();
        const auto arrival = owner_.arrive();
        detail::require_common_parameters(ranks());
        const auto group = vllm_group(message);
        const auto until = vllm_deadline();
        auto next = std::make_unique<wire::vllm_init>(message);
        const transport_open with{.wire_parameters = next->init_info};
        auto opened = open_beside(with, group, until, call);
        turn mine{gate_, turn_kind::take_over, until, superseding(call), phase::init};
        require_caller(call, phase::init);
        begin_epoch(arrival, [&] {
            native_ = nullptr;
            vllm_ = std::move(next);
            remembered_.forget();
            if constexpr (HasParameters<Sink>) {
                ranks().expect(sink(0).parameters());
            }
            take(std::move(opened), with, group, until, mine);
        });
        owner_.own({detail::worker_owner::kind_type::vllm, 0});
    }
    /// Begins a session for the version after this worker's: vLLM names none before the end.
    /// @throws unsupported_error runtime names instead of checkpoint names, which only vLLM has.
    /// @throws session_refused no init, or an open session.
    void start(const wire::vllm_start& message, const worker_call& call) {
        if (!message.is_checkpoint_format) {
            throw unsupported_error{
                "this worker takes checkpoint names and shapes only; send without "
                "is_checkpoint_format, or with true",
                at(phase::start)};
        }
        const auto until = vllm_deadline();
        turn mine{gate_, turn_kind::ordinary, until, call.stop, phase::start};
        sessions_.end_idle_session();
        require_vllm(phase::start);
        require_caller(call, phase::start);
        watch_.prepare();
        sessions_.begin_session({}, {.version = version() + 1}, until, mine, [&] {
            if (!ranks().open()) {
                reopen(until, mine);
            }
        });
        keep_session(vllm_deadline());
    }
    /// Receives the named parameters on every rank, in any order and number of calls.
    /// @param request kept while a later call sends the same, whose names are then known.
    /// @throws coverage_error a name that the session does not have, or another dtype or shape.
    void update(const std::shared_ptr<const wire::vllm_update_request>& request,
                const worker_call& call) {
        vllm_update(request, call, [] { return update_message{}; });
    }
    /// An update whose content was refused before it came here: ends the session, as a failing
    /// update does, and throws what `why` holds, or the session's own fault.
    void refused_update(const std::exception_ptr& why, const worker_call& call) {
        vllm_update(nullptr, call, [&]() -> update_message { std::rethrow_exception(why); });
    }
    /// The label is the trainer's text, unchanged if there is none. The numeric version becomes the
    /// label's number where it has one that grows, else it grows by one.
    void finish(const wire::vllm_finish& message, const worker_call& call) {
        const auto until = vllm_deadline();
        turn mine{gate_, turn_kind::ordinary, until, call.stop, phase::finish};
        sessions_.end_idle_session();
        require_vllm(phase::finish);
        sessions_.step(phase::finish, [](session& s) { return s.finish_begin({}); });
        sessions_.commit(detail::version_of(message.weight_version, version() + 1),
                         message.weight_version, {}, until, until, mine,
                         [&](auto takes) { require_wanted(call, until, mine, takes); });
    }
    /// Rolls an open session back and lets go of the transport; the weights stay.
    void shutdown(const worker_call& call) {
        const auto arrival = owner_.arrive();
        turn mine{gate_, turn_kind::take_over, vllm_deadline(), superseding(call), phase::init};
        require_caller(call, phase::init);
        begin_epoch(arrival, [&] {
            ranks().release();
            vllm_ = nullptr;
            native_ = nullptr;
            remembered_.forget();
        });
        taken_ = false;
    }
    /// `/update_weight_version`: a label, no weights. Any thread, at any time: nothing waits for a
    /// label, and the numeric version does not change.
    void set_label(std::string label) {
        board().change([&](worker_status& s) { s.label = std::move(label); });
    }

    // Questions, from any thread.

    /// The worker now. Rolls back a session that has outlived its time, unless a call runs.
    [[nodiscard]] worker_status status() {
        auto now = board().read();
        // The watch does this too; who asks first must not see an ended session as open.
        if (now.session != 0 && deadline::clock::now() >= now.session_ends) {
            if (const turn mine{gate_}; mine) {
                sessions_.end_idle_session();
                now = board().read();
            }
        }
        return now;
    }
    /// The last whole version, as the last commit published it.
    [[nodiscard]] weight_version version() const {
        return board().look([](const worker_status& s) { return s.version; });
    }
    /// Whether the live weights of a rank are, or may be, a mix.
    [[nodiscard]] bool dirty() const {
        return board().look([](const worker_status& s) { return s.dirty; });
    }
    /// Ranks behind this worker; what a trainer is told and counts by.
    [[nodiscard]] std::size_t world_size() const noexcept { return ranks().size(); }
    /// How an update becomes visible; empty where the sink does not say.
    [[nodiscard]] std::string_view commit_mode_name() const noexcept {
        if constexpr (HasCommitMode<Sink>) {
            return to_string(sink(0).mode());
        } else {
            return {};
        }
    }
    /// Where local rank `rank` writes; for its readers.
    [[nodiscard]] Sink& sink(std::size_t rank) const noexcept { return ranks().sink(rank); }

    /// Writes zeros to every parameter that updates write, as one commit of the version there is:
    /// what vLLM's weight checker calls reset.
    /// @throws session_refused a session is open.
    void reset_weights(const worker_call& call) {
        detail::require_common_parameters(ranks());
        const auto until = vllm_deadline();
        turn mine{gate_, turn_kind::ordinary, until, call.stop, phase::serve};
        sessions_.end_idle_session();
        require_caller(call, phase::serve);
        if (sessions_.state().state() == session_state::active) {
            throw session_refused{session_fault::already_active,
                                  to_string(session_fault::already_active), at(phase::serve)};
        }
        if constexpr (HasParameters<Sink>) {
            const manifest* after = native_ != nullptr ? &native_->parameters : nullptr;
            sessions_.commit_zeros(sink(0).parameters(), after, until, mine,
                                   [&](auto takes) { require_wanted(call, until, mine, takes); });
            set_label("reset");  // zeros are no version; the next commit names its own
        }
    }

private:
    [[nodiscard]] static error_context at(phase where) {
        return {.phase = where, .backend = std::string{traits::wire_name}};
    }

    // Time.

    /// A little before the trainer gives up, so that it still hears why.
    [[nodiscard]] deadline native_deadline(std::int64_t budget_ms) const noexcept {
        const auto longest = options().longest_budget.count();
        const std::chrono::milliseconds budget{std::clamp<std::int64_t>(budget_ms, 0, longest)};
        return deadline::after(budget - std::min(options().answer_margin, budget / 10));
    }
    /// vLLM's calls name no time.
    [[nodiscard]] deadline vllm_deadline() const noexcept {
        return deadline::after(options().vllm_call_budget);
    }

    /// At the end of a call that left a session open: from now on the watch counts.
    void keep_session(deadline until) { watch_.look_at(sessions_.keep_session(until.when())); }
    /// On the watch's thread. Waits for its turn as a call does: one that runs may keep the
    /// session, or leave it as it is, and is not disturbed.
    time_point end_overdue_session(const std::stop_token& stop) noexcept {
        try {
            const turn mine{gate_, turn_kind::ordinary, deadline::at(time_point::max()), stop,
                            phase::serve};
            sessions_.end_idle_session();
        } catch (...) {
            return time_point::max();  // the engine goes; or a sink's dirty() threw, after the end
        }
        return sessions_.session_ends();
    }

    // Checks before anything changes.

    /// A call may have lain in a queue while this process was stopped, its trainer long gone: such
    /// a call must not push out a trainer that is there, nor open a session that nobody ends.
    /// @throws cancelled_error the client no longer waits.
    void require_caller(const worker_call& call, phase where) const {
        if (call.stop.stop_requested() || !call.client_is_waiting()) {
            throw cancelled_error{"the client no longer waits for this call; nothing has changed",
                                  at(where)};
        }
    }
    /// An init that is let in marks the running call before it waits for it.
    const std::stop_token& superseding(const worker_call& call) {
        require_caller(call, phase::init);
        sessions_.supersede_running_call();
        return call.stop;
    }

    /// A native call names its epoch and session always; the session machine takes 0 for vLLM's.
    void require_native(session_key key, phase where) const {
        const auto epoch = sessions_.state().epoch();
        const bool names_session = where == phase::start || key.session != 0;
        if (taken_ && (key.epoch != epoch || !names_session)) {
            throw session_refused{session_fault::stale, to_string(session_fault::stale), at(where)};
        }
        require_initialized(
            taken_ && native_ != nullptr && (where != phase::start || ranks().open()), where);
    }
    /// Without an open session the session machine says what is wrong, in vLLM's words.
    void require_vllm(phase where) const {
        const bool open = sessions_.state().state() == session_state::active;
        require_initialized(vllm_ != nullptr || (where != phase::start && !open), where);
    }
    /// @throws session_refused `not_initialized` unless `holds`.
    void require_initialized(bool holds, phase where) const {
        if (!holds) {
            throw session_refused{session_fault::not_initialized,
                                  to_string(session_fault::not_initialized), at(where)};
        }
    }

    /// @param describe gives the message for the receivers, or throws what ends the session.
    template <class Describe>
    void vllm_update(const std::shared_ptr<const wire::vllm_update_request>& request,
                     const worker_call& call, Describe describe) {
        const auto until = vllm_deadline();
        turn mine{gate_, turn_kind::ordinary, until, call.stop, phase::update};
        sessions_.end_idle_session();
        require_vllm(phase::update);
        sessions_.receive({}, remembered_.meaning_of(request), until, mine, describe);
        keep_session(vllm_deadline());
    }
    /// A receiver reads vLLM's `init_info` itself, but for its place in the group: only the backend
    /// knows its fields.
    [[nodiscard]] std::pair<int, int> vllm_group(const wire::vllm_init& message) const {
        return detail::vllm_group(message.init_info, world_size(), at(phase::init));
    }
    /// An init's receivers before it has its turn, where the backend can: else null. On the thread
    /// of the init, beside whatever call runs.
    [[nodiscard]] receivers open_beside([[maybe_unused]] const transport_open& with,
                                        [[maybe_unused]] std::pair<int, int> group,
                                        [[maybe_unused]] deadline until, const worker_call& call) {
        require_caller(call, phase::init);
        if constexpr (traits::capabilities.opens_beside) {
            return ranks().open_beside(with, group.first, group.second, until, call.stop);
        } else {
            return nullptr;
        }
    }
    /// The receivers of an init that has its turn; the old ones are gone.
    void take(receivers opened, const transport_open& with, std::pair<int, int> group,
              deadline until, turn& mine) {
        if (opened != nullptr) {
            ranks().adopt(std::move(opened));
        } else {
            ranks().open(with, group.first, group.second, until, mine);
        }
    }
    /// The worker is nobody's until the init has worked: a trainer that fails leaves it free.
    template <class Open>
    void begin_epoch(std::uint64_t arrival, Open open) {
        owner_.begin(arrival, at(phase::init));
        taken_ = false;
        sessions_.begin_epoch(open);
        taken_ = true;
    }
    /// vLLM's trainer calls init once, so after a failed update a one-sided transport is opened
    /// anew from what init said. One that needs the peer cannot be.
    void reopen(deadline until, turn& mine) {
        if (!traits::capabilities.one_sided) {
            require_initialized(false, phase::start);
        }
        take(nullptr, {.wire_parameters = vllm_->init_info}, vllm_group(*vllm_), until, mine);
    }

    /// Between prepared ranks and the commit.
    void require_wanted(const worker_call& call, deadline until, const turn& mine,
                        std::chrono::nanoseconds takes) const {
        detail::require_wanted(call, until, mine.stop(), takes, at(phase::finish));
    }

    [[nodiscard]] const worker_options<Events>& options() const noexcept {
        return sessions_.options();
    }
    [[nodiscard]] auto& ranks() noexcept { return sessions_.ranks(); }
    [[nodiscard]] const auto& ranks() const noexcept { return sessions_.ranks(); }
    [[nodiscard]] auto& board() noexcept { return sessions_.board(); }
    [[nodiscard]] const auto& board() const noexcept { return sessions_.board(); }

    std::string boot_id_;
    detail::call_gate gate_;
    // Of the call that holds the gate. Before the sessions, whose receivers refer to them.
    std::unique_ptr<wire::native_init> native_;  ///< the last init, if it was a native one
    std::unique_ptr<wire::vllm_init> vllm_;      ///< the last init, if it was vLLM's
    detail::remembered_update remembered_;       ///< of vLLM's trainer
    bool taken_ = false;                         ///< the last init has worked
    detail::owner_board owner_;                  ///< any thread
    detail::worker_session<Tag, Sink, Events> sessions_;
    detail::idle_watch watch_{
        this, [](void* self, const std::stop_token& stop) noexcept {
            return static_cast<worker_engine*>(self)->end_overdue_session(stop);
        }};  // last: its thread uses all of them
};

}  // namespace weightwire
