#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <exception>
#include <stop_token>
#include <string>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/detail/side_thread.hpp>
#include <weightwire/engine/peer_table.hpp>

/// @file
/// Init and update have two halves that run side by side: a control call on a side thread, the
/// sender's move on the caller's. What the caller's half does when it fails first.

namespace weightwire::detail {

/// How the sender's half ended; empty when it did its work.
struct data_failure {
    failure what{};
    std::exception_ptr thrown{};
    /// Whether a peer had said by then, or a moment later, what is wrong with it: what the sender
    /// met is most likely the echo of that.
    bool refused = false;
    /// Whether its time was up: a stop that it saw then only came with that.
    bool late = false;

    explicit operator bool() const noexcept { return static_cast<bool>(what); }
};

/// Whether a reply to a call tells of the peer itself: it answered, or its connection failed. The
/// end of our own patience tells nothing of it.
[[nodiscard]] inline bool tells_of_peer(const peer_reply& reply) noexcept {
    return reply.answer.fault != reply_fault::timed_out &&
           reply.answer.fault != reply_fault::cancelled;
}

/// Runs `move(deadline, stop)` beside the call that `side` carries. When it fails, a peer that is
/// about to say what is wrong is given a moment, its own letting go counted in; then the calls are
/// stopped.
/// @param until of the call.
template <class Move>
[[nodiscard]] data_failure run_data_half(Move move, phase where, side_thread& side,
                                         const peer_table& peers, const transport_capabilities& can,
                                         deadline until, std::stop_source& calls) {
    constexpr deadline::clock::duration time_for_words = std::chrono::seconds{1};
    const auto mine_until = can.before_let_go(until);
    data_failure out;
    try {
        move(mine_until);
    } catch (...) {
        out.what = failure::current(where);
        out.thrown = std::current_exception();
        out.late = mine_until.expired();
        if (out.what.kind == "peer" || out.what.kind == "timeout") {
            (void)side.wait_until(until.capped(time_for_words + can.let_go).when());
        }
        out.refused = peers.has_been_told();
        calls.request_stop();
    }
    return out;
}

}  // namespace weightwire::detail
