#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>

/// @file
/// What a worker engine is told with each call, what it may be told once, and what it tells.

namespace weightwire {

/// How a protocol call may end early. Views live until the call returns.
struct worker_call {
    /// Requested when the client hangs up or the server stops.
    std::stop_token stop{};
    /// Whether the client still waits; asked before an epoch or session begins and just before a
    /// commit. Null: it does. Called on the call's thread, and must not block.
    bool (*client_waits)(const void* context) noexcept = nullptr;
    const void* context = nullptr;

    [[nodiscard]] bool client_is_waiting() const noexcept {
        return client_waits == nullptr || client_waits(context);
    }
};

/// Choices for the life of a worker engine; every member has a default.
template <EventSink Events = no_events>
struct worker_options {
    /// Time for a call that names none: vLLM's Python client gives up after 300 s, and should hear
    /// why before.
    std::chrono::milliseconds vllm_call_budget{290'000};
    /// The most that a trainer's own budget may be.
    std::chrono::milliseconds longest_budget{86'400'000};
    /// A call gives up this much before the trainer does, so that its error is still heard.
    std::chrono::milliseconds answer_margin{100};
    /// How long an open session may lie idle after its last call before it is rolled back. 0: until
    /// the latest deadline that its calls had.
    std::chrono::milliseconds session_time_to_live{0};
    /// CUDA device of each rank's receiver. Empty: that of its sink where the sink has `device()`,
    /// else the local rank where there are several, else 0.
    std::vector<int> devices{};
    [[no_unique_address]] Events events{};
};

/// A worker at one moment.
struct worker_status {
    weight_version version = 0;              ///< last whole version
    std::string label = "default";           ///< vLLM's `weight_version`, as the trainer gave it
    bool dirty = false;                      ///< the live weights are, or may be, a mix
    std::uint64_t epoch = 0;                 ///< counts inits
    std::uint64_t session = 0;               ///< the open session, 0 when there is none
    std::uint64_t committed = 0;             ///< sessions that committed
    std::uint64_t failed = 0;                ///< sessions that an error ended
    std::uint64_t rolled_back = 0;           ///< sessions that a new init or their age ended
    std::uint64_t bytes = 0;                 ///< bytes placed since the engine was made
    std::chrono::nanoseconds last_update{};  ///< duration of the last update call's data move
    /// When an idle session ends.
    deadline::clock::time_point session_ends = deadline::clock::time_point::max();
};

namespace detail {

/// The published status: read by any thread while a call runs.
class status_board {
public:
    [[nodiscard]] worker_status read() const {
        const std::lock_guard lock{mutex_};
        return status_;
    }
    /// What `look(const worker_status&)` gives, without a copy of the whole.
    template <class Look>
    [[nodiscard]] auto look(Look look) const {
        const std::lock_guard lock{mutex_};
        return look(status_);
    }
    template <class Change>
    void change(Change change) {
        const std::lock_guard lock{mutex_};
        change(status_);
    }

private:
    mutable std::mutex mutex_;
    worker_status status_;
};

}  // namespace detail

}  // namespace weightwire
