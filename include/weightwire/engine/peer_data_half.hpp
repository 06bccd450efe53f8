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
#include <weightwire/wire/reply_failure.hpp>

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

/// What a failed reply says. A worker of a group that lost another rank says so: that is an echo,
/// and who is to blame may still be about to speak.
[[nodiscard]] inline testimony testimony_of(const peer_reply& reply) noexcept {
    const auto& answer = reply.answer;
    if (answer.fault == reply_fault::timed_out || answer.fault == reply_fault::cancelled) {
        return testimony::nothing;
    }
    try {
        const auto kind = wire::kind_in_envelope(answer.body);
        const bool of_others = kind == "peer" || kind == "timeout" || kind == "cancelled";
        return answer.fault == reply_fault::none && of_others ? testimony::echo
                                                              : testimony::own_words;
    } catch (...) {
        return testimony::own_words;  // no memory for a look at the text
    }
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
        const bool heard_echo = out.what.kind == "cancelled" && peers.told() == testimony::echo;
        if (out.what.kind == "peer" || out.what.kind == "timeout" || heard_echo) {
            (void)side.wait_until(until.capped(time_for_words + can.let_go).when());
        }
        out.refused = peers.told() != testimony::nothing;
        calls.request_stop();
    }
    return out;
}

}  // namespace weightwire::detail
