#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <charconv>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/engine/call_gate.hpp>
#include <weightwire/engine/rank_crew.hpp>
#include <weightwire/engine/rank_session.hpp>
#include <weightwire/engine/session.hpp>
#include <weightwire/engine/worker_status.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/vllm_requests.hpp>

/// @file
/// The worker's side of the four phases: one or several ranks that receive, check and commit
/// together.

namespace weightwire {

/// `parameters()`: the sink knows its own list. Needed where the trainer does not say at init what
/// it will send: vLLM's.
template <class S>
concept HasParameters = requires(const std::remove_reference_t<S>& sink) {
    { sink.parameters() } -> std::convertible_to<const manifest&>;
};

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
/// that lives as long as the engine. Ranks commit only when all have prepared.
///
/// Thread-safe; neither copied nor moved. No call may run when it is destroyed.
template <class Tag, class Sink, class Events = no_events>
    requires Transport<Tag> && WeightSink<Sink> && EventSink<Events>
class worker_engine {
    using traits = backend_traits<Tag>;
    using receiver_type = typename traits::receiver;
    using turn = detail::call_gate::entry;
    using turn_kind = detail::call_gate::kind;

public:
    using backend = Tag;
    using sink_type = Sink;

    /// An engine of one rank. `sink` outlives it.
    worker_engine(Tag tag, Sink& sink, worker_options<Events> options = {})
        : worker_engine{tag, std::vector<Sink*>{&sink}, std::move(options)} {}
    /// An engine of several ranks: local rank `i` writes to `*sinks[i]`.
    /// @throws usage_error no sink, or a null one.
    worker_engine(Tag tag, const std::vector<Sink*>& sinks, worker_options<Events> options = {});
    worker_engine(const worker_engine&) = delete;
    worker_engine& operator=(const worker_engine&) = delete;
    /// Rolls back an open session and lets go of the trainer's memory.
    ~worker_engine() {
        roll_back_sinks();
        release_receivers();
    }

    // The native form. Each call takes its budget from its message.

    /// Begins a new epoch. What the message says is checked first: a trainer that does not agree
    /// with this worker cannot disturb one that does.
    /// @throws mismatch_error another wire version, backend, plan hash or world size.
    /// @throws timeout_error the running call did not leave in time.
    /// @throws what the receivers throw; the epoch has begun all the same.
    wire::native_init_reply init(wire::native_init message, const worker_call& call);
    /// Begins a session: every sink gives its destinations, or none does.
    /// @throws session_refused a stale epoch, an open session, or a version that is not above this
    /// worker's and not forced.
    /// @throws dirty_error a partial session on a worker that is dirty.
    wire::native_start_reply start(const wire::native_start& message, const worker_call& call);
    /// Receives one part on every rank at once. With one rank nothing is allocated between the
    /// call and the last byte.
    wire::native_update_reply update(const wire::native_update& message, const worker_call& call);
    /// Checks coverage and digests and prepares every rank, then commits if the trainer still
    /// counts on it: the deadline has not passed, the client waits, nobody took over.
    wire::native_finish_reply finish(const wire::native_finish& message, const worker_call& call);

    // vLLM's form. The parameters of a session are the sink's own (`HasParameters`).

    /// @throws unsupported_error the sink does not say what it holds, or ranks hold different
    /// lists.
    void init(const wire::vllm_init& message, const worker_call& call);
    void start(const wire::vllm_start& message, const worker_call& call);
    /// @throws coverage_error a name that the session does not have, or another dtype or shape.
    void update(const std::shared_ptr<const wire::vllm_update_request>& request,
                const worker_call& call);
    /// The label is the trainer's text, unchanged if there is none. The numeric version becomes the
    /// label's number where it has one that grows, else it grows by one.
    void finish(const wire::vllm_finish& message, const worker_call& call);
    /// `/update_weight_version`: a label, no weights.
    void set_label(std::string label) {
        board_.change([&](worker_status& s) { s.label = std::move(label); });
    }

    // Questions, from any thread.

    /// The worker now. Rolls back a session that has outlived its time, unless a call runs.
    [[nodiscard]] worker_status status();
    [[nodiscard]] weight_version version() const {
        return board_.look([](const worker_status& s) { return s.version; });
    }
    [[nodiscard]] bool dirty() const {
        return board_.look([](const worker_status& s) { return s.dirty; });
    }
    [[nodiscard]] std::size_t world_size() const noexcept { return ranks_.size(); }
    /// How an update becomes visible; empty where the sink does not say.
    [[nodiscard]] std::string_view commit_mode_name() const noexcept {
        if constexpr (HasCommitMode<Sink>) {
            return to_string(sink(0).mode());
        } else {
            return {};
        }
    }
    [[nodiscard]] Sink& sink(std::size_t rank) const noexcept {
        return ranks_[rank].session.sink();
    }

    /// Writes zeros to every parameter that updates write, as one commit of the version there is:
    /// what vLLM's weight checker calls reset.
    /// @throws session_refused a session is open.
    void reset_weights(const worker_call& call);

private:
    struct rank_state {
        explicit rank_state(Sink& sink) noexcept : session{sink} {}
        detail::rank_session<Sink> session;
        std::optional<receiver_type> receiver{};
        std::vector<std::size_t> positions{};  ///< of a vLLM update's names in the session
        std::int64_t began_ns = 0;             ///< this update's data move
        std::int64_t ended_ns = 0;
    };
    using native_or_vllm = std::variant<wire::native_init, wire::vllm_init>;

    [[nodiscard]] deadline native_deadline(std::int64_t budget_ms) const noexcept;
    [[nodiscard]] deadline vllm_deadline() const noexcept {
        return deadline::after(options_.vllm_call_budget);
    }
    [[nodiscard]] error_context at(phase where) const {
        return {.phase = where, .backend = std::string{traits::wire_name}};
    }
    void check(const wire::native_init& message) const;
    void require_world(std::int64_t rank_offset, std::int64_t world_size) const;
    void require_parameters() const;

    /// One event of the session, under its lock.
    template <class Event>
    auto on_session(Event event) const {
        const std::lock_guard lock{session_mutex_};
        return event(session_);
    }
    /// The same, throwing its fault.
    template <class Event>
    session_action step(phase where, Event event) {
        return on_session(event).require(at(where));
    }
    void require_initialized(session_key key, phase where) const;

    void supersede_running_call();
    template <class Open>
    void begin_epoch(const turn& mine, Open open);
    void open_receivers(turn& mine, const transport_open& with, int rank_offset, int world_size,
                        deadline until);
    void open_for_vllm(turn& mine, deadline until);
    void release_receivers() noexcept;

    void begin_session(turn& mine, session_key key, session_request request, deadline until);
    wire::native_update_reply receive(turn& mine, session_key key, const update_message& message,
                                      const wire::vllm_update_request* request, deadline until);
    void receive_on(rank_state& rank, const update_message& message, const wire::vllm_update* named,
                    deadline until, std::stop_token stop);
    void place_names(const std::shared_ptr<const wire::vllm_update_request>& request);
    void commit(turn& mine, session_key key, const wire::native_finish* native,
                const std::optional<std::string>& label, const worker_call& call, deadline until);
    void require_wanted(const turn& mine, const wire::native_finish* native,
                        const worker_call& call, deadline until) const;
    [[nodiscard]] weight_version version_of(const std::optional<std::string>& label) const;

    [[noreturn]] void fail(phase where, session_step (session::*failed)() noexcept);
    void end_idle_session();
    void roll_back_sinks() noexcept;
    void extend_session(deadline::clock::time_point until);
    void publish_sinks();
    [[nodiscard]] bool any_dirty() const;
    void tell(const event& what) noexcept {
        if constexpr (!std::is_same_v<Events, no_events>) {
            options_.events.on(what);
        }
    }

    worker_options<Events> options_;
    detail::call_gate gate_;
    detail::status_board board_;
    std::deque<rank_state> ranks_;  // receivers need not be movable
    std::string boot_id_;

    mutable std::mutex session_mutex_;
    mutable session session_;

    // Of the call that holds the gate.
    std::unique_ptr<native_or_vllm> opened_;  ///< the init that the receivers refer to
    bool receivers_open_ = false;
    detail::session_list list_;
    std::shared_ptr<const wire::vllm_update_request> placed_;  ///< `positions` belong to it
    detail::rank_crew crew_;  // last: its threads end before what they read
};

}  // namespace weightwire

#include <weightwire/engine/worker_engine_impl.hpp>  // IWYU pragma: export
