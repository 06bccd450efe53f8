#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// The four-phase state machine of a worker (protocol page 1.6), as a value: it does nothing, waits
/// for nothing and locks nothing. Its owner asks it before and after each call and does what it
/// answers.
///
/// Checked at run time, since the peer may be Python. It behaves as vLLM 0.23 and newer, with three
/// differences. A failing finish clears the session, so that a trainer may start again. Init is
/// legal in every state and takes the worker over from a trainer that died. Calls of our own
/// trainer carry the epoch and session that they belong to, so a late one changes nothing.

namespace weightwire {

/// Where a worker stands. In the states ending in -ing a call is running, and its thread will
/// report the end of it.
enum class session_state : std::uint8_t {
    uninitialized,  ///< no trainer yet
    initializing,   ///< init runs
    ready,          ///< initialized, no session
    starting,       ///< start runs
    active,         ///< between start and finish, no call runs
    updating,       ///< an update runs
    finishing,      ///< finish runs and may still fail
    committing,     ///< finish has passed the point of no return
};

/// The word that messages use for `value`.
[[nodiscard]] constexpr std::string_view to_string(session_state value) noexcept {
    switch (value) {
        case session_state::uninitialized: return "uninitialized";
        case session_state::initializing: return "initializing";
        case session_state::ready: return "ready";
        case session_state::starting: return "starting";
        case session_state::active: return "active";
        case session_state::updating: return "updating";
        case session_state::finishing: return "finishing";
        case session_state::committing: return "committing";
    }
    return "unknown";
}

/// What the caller must do.
enum class session_action : std::uint8_t {
    proceed,        ///< go on; the state has changed
    rollback,       ///< undo what the session or this call did to the sinks, then go on or report
    wait,           ///< another call runs: wait until it has ended and ask again; nothing changed
    stop_and_wait,  ///< the same, and tell the running call to stop
    refuse,         ///< report the fault; nothing changed
};

/// Why a call is refused.
enum class session_fault : std::uint8_t {
    none,
    not_initialized,      ///< start before init
    update_before_start,  ///< update without a session
    already_active,       ///< start within a session
    finish_before_start,  ///< finish without a session
    stale,                ///< the call belongs to an earlier epoch or session
    taken_over,           ///< an init replaced the trainer while its call ran
    version_not_above,    ///< the version would not grow
    dirty,                ///< a partial session cannot mend a worker that holds a mix
    not_running,  ///< the end of a call that does not run was reported: the caller's mistake
};

/// Whether the caller is a trainer that lost the worker: HTTP 409, where the others are 500.
[[nodiscard]] constexpr bool is_stale(session_fault value) noexcept {
    return value == session_fault::stale || value == session_fault::taken_over;
}

/// The sentence for `value`. Those that vLLM has are in its words, which clients match.
[[nodiscard]] constexpr std::string_view to_string(session_fault value) noexcept {
    switch (value) {
        case session_fault::none: return "";
        case session_fault::not_initialized:
            return "weight transfer not initialized. Call init_transfer_engine() first.";
        case session_fault::update_before_start:
            return "start_weight_update must be called before update_weights.";
        case session_fault::already_active:
            return "start_weight_update called while a weight update is already active. Call "
                   "finish_weight_update first.";
        case session_fault::finish_before_start:
            return "finish_weight_update called without a matching start_weight_update.";
        case session_fault::stale:
            return "the call belongs to an epoch or session that has ended: another trainer has "
                   "taken this worker; call trainer_init again to take it back.";
        case session_fault::taken_over:
            return "another init took this worker over while the call ran; the session was rolled "
                   "back.";
        case session_fault::version_not_above:
            return "the version is not above the worker's; send a higher one, or force it.";
        case session_fault::dirty:
            return "the worker holds a mix of versions, which only a full update mends; start "
                   "without partial.";
        case session_fault::not_running: return "no such call is running.";
    }
    return "";
}

/// A `session_error` that knows its fault.
class session_refused : public session_error {
public:
    session_refused(session_fault fault, std::string_view text, error_context context,
                    std::source_location where = std::source_location::current())
        : session_error{text, std::move(context), where}, fault_{fault} {}
    [[nodiscard]] session_fault fault() const noexcept { return fault_; }
    /// Whether HTTP says 409: see `is_stale`.
    [[nodiscard]] bool stale() const noexcept { return is_stale(fault_); }

private:
    session_fault fault_;
};

/// The answer to an event.
struct session_step {
    session_action action = session_action::proceed;
    session_fault fault = session_fault::none;

    /// The action of a step without a fault.
    /// @param where names the phase, and the rank if it matters, in the error.
    /// @throws session_refused there is a fault.
    /// @throws dirty_error the fault is `dirty`: its remedy is another one.
    session_action require(error_context where = {}) const {
        if (fault == session_fault::dirty) {
            throw dirty_error{to_string(fault), std::move(where)};
        }
        if (fault != session_fault::none) {
            throw session_refused{fault, to_string(fault), std::move(where)};
        }
        return action;
    }
    friend bool operator==(const session_step&, const session_step&) = default;
};

/// The epoch and session that a call of our own trainer carries. 0: not carried, as in vLLM's
/// calls, which belong to whatever is open.
struct session_key {
    std::uint64_t epoch = 0;
    std::uint64_t session = 0;
};

/// What a start asks for.
struct session_request {
    weight_version version = 0;  ///< what a commit will make visible
    bool partial = false;        ///< not every parameter will come
    bool force = false;          ///< allow a version that is not above the worker's
};

/// A worker's session. Not thread-safe: the owner holds its own lock around each event, and not
/// while a call runs.
///
/// A call is two events, `…_begin` and one that ends it; finish has a third between them,
/// `commit_begin`, the last moment at which a takeover can stop it. A worker that was stopped and
/// resumed after it was taken over therefore never commits.
class session {
public:
    session() = default;
    /// @param version,dirty what the sinks say at the start.
    /// @param first_epoch of the first init. A worker takes a random one, so that a call meant for
    /// the process before a restart is stale after it.
    explicit session(weight_version version, bool dirty = false,
                     std::uint64_t first_epoch = 1) noexcept
        : version_{version}, first_epoch_{first_epoch}, dirty_{dirty} {}

    [[nodiscard]] session_state state() const noexcept { return state_; }
    /// Grows by one an init, from the first epoch; 0 before the first init.
    [[nodiscard]] std::uint64_t epoch() const noexcept { return info_.epoch; }
    /// What sinks are told of the session that is open, or of the last one.
    [[nodiscard]] const session_info& info() const noexcept { return info_; }
    /// The last whole version.
    [[nodiscard]] weight_version version() const noexcept { return version_; }
    [[nodiscard]] bool dirty() const noexcept { return dirty_; }
    /// Whether a call runs, whose end will be reported.
    [[nodiscard]] bool running() const noexcept {
        return state_ != session_state::uninitialized && state_ != session_state::ready &&
               state_ != session_state::active;
    }
    /// Whether the running call has been told to stop and will end without effect.
    [[nodiscard]] bool superseded() const noexcept { return superseded_; }

    /// Takes over what the sinks say, after a rollback or a load from elsewhere.
    void observe(weight_version version, bool dirty) noexcept {
        version_ = version;
        dirty_ = dirty;
    }

    /// Init, also a takeover: legal in every state.
    /// @returns `proceed`; `rollback` (end the open session, then go on); `stop_and_wait` while
    /// another call runs; `wait` while that call commits, which takes no longer than a copy.
    session_step init_begin() noexcept {
        if (running()) {
            return supersede();
        }
        const auto action =
            state_ == session_state::active ? session_action::rollback : session_action::proceed;
        state_ = session_state::initializing;
        info_ = {.epoch = info_.epoch == 0 ? first_epoch_ : info_.epoch + 1,
                 .session = info_.session};
        return {action};
    }
    /// @returns `rollback` with `taken_over`: release what init opened.
    session_step init_done() noexcept {
        return end_of(session_state::initializing, session_state::ready,
                      session_state::uninitialized);
    }
    /// @returns `rollback`: release what init opened.
    session_step init_failed() noexcept {
        return failure_of(session_state::initializing, session_state::uninitialized);
    }

    /// @param key carries the epoch alone.
    /// @returns `proceed`, `wait`, or a fault.
    session_step start_begin(session_key key, session_request request) noexcept {
        if (is_of_another(key)) {
            return refused(session_fault::stale);
        }
        if (running()) {
            return {session_action::wait};
        }
        if (state_ != session_state::ready) {
            return refused(state_ == session_state::active ? session_fault::already_active
                                                           : session_fault::not_initialized);
        }
        // vLLM's versions are opaque strings that come with finish: only our own trainer's grow.
        if (key.epoch != 0 && !request.force && request.version <= version_) {
            return refused(session_fault::version_not_above);
        }
        if (request.partial && dirty_) {
            return refused(session_fault::dirty);
        }
        state_ = session_state::starting;
        info_.session += 1;
        info_.version = request.version;
        info_.partial = request.partial;
        return {};
    }
    session_step start_done() noexcept {
        return end_of(session_state::starting, session_state::active, session_state::ready);
    }
    session_step start_failed() noexcept {
        return failure_of(session_state::starting, session_state::ready);
    }

    /// @returns `proceed`, `wait`, or a fault.
    session_step update_begin(session_key key) noexcept {
        return call_begin(key, session_state::updating, session_fault::update_before_start);
    }
    session_step update_done() noexcept {
        return end_of(session_state::updating, session_state::active, session_state::ready);
    }
    /// A failing update clears the session. @returns `rollback`.
    session_step update_failed() noexcept {
        return failure_of(session_state::updating, session_state::ready);
    }

    /// @returns `proceed`, `wait`, or a fault.
    session_step finish_begin(session_key key) noexcept {
        return call_begin(key, session_state::finishing, session_fault::finish_before_start);
    }
    /// Asked when all ranks have prepared. `proceed`: commit, and report `committed`.
    session_step commit_begin() noexcept {
        return end_of(session_state::finishing, session_state::committing, session_state::ready);
    }
    /// @param version what is visible now.
    session_step committed(weight_version version) noexcept {
        const auto step =
            end_of(session_state::committing, session_state::ready, session_state::ready);
        if (step.action == session_action::proceed) {
            observe(version, false);
        }
        return step;
    }
    /// A failing finish clears the session too. @returns `rollback`.
    session_step finish_failed() noexcept {
        return failure_of(session_state::finishing, session_state::ready);
    }

    /// The worker itself ends the open session: it shuts down, or its trainer's time is over.
    /// @returns as `init_begin`; `proceed` where nothing was open.
    session_step abandon() noexcept {
        if (running()) {
            return supersede();
        }
        if (state_ != session_state::active) {
            return {};
        }
        state_ = session_state::ready;
        return {session_action::rollback};
    }

private:
    static session_step refused(session_fault fault) noexcept {
        return {session_action::refuse, fault};
    }

    [[nodiscard]] bool is_of_another(session_key key) const noexcept {
        return (key.epoch != 0 && key.epoch != info_.epoch) ||
               (key.session != 0 && key.session != info_.session);
    }

    session_step supersede() noexcept {
        if (state_ == session_state::committing) {
            return {session_action::wait};
        }
        superseded_ = true;
        return {session_action::stop_and_wait};
    }

    session_step call_begin(session_key key, session_state during, session_fault fault) noexcept {
        if (is_of_another(key)) {
            return refused(session_fault::stale);
        }
        if (running()) {
            return {session_action::wait};
        }
        if (state_ != session_state::active) {
            return refused(fault);
        }
        state_ = during;
        return {};
    }

    /// A call, or a step of it, ended well: goes to `next`, or to `fallen` when it was superseded.
    session_step end_of(session_state during, session_state next, session_state fallen) noexcept {
        if (state_ != during) {
            return refused(session_fault::not_running);
        }
        if (std::exchange(superseded_, false)) {
            state_ = fallen;
            return {session_action::rollback, session_fault::taken_over};
        }
        state_ = next;
        return {};
    }

    session_step failure_of(session_state during, session_state fallen) noexcept {
        if (state_ != during) {
            return refused(session_fault::not_running);
        }
        superseded_ = false;
        state_ = fallen;
        return {session_action::rollback};
    }

    session_state state_ = session_state::uninitialized;
    session_info info_{};
    weight_version version_ = 0;
    std::uint64_t first_epoch_ = 1;
    bool dirty_ = false;
    bool superseded_ = false;
};

}  // namespace weightwire
