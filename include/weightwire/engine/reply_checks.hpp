#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/checked.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/engine/peer_table.hpp>
#include <weightwire/wire/native.hpp>

/// @file
/// What a trainer checks in its peers' replies, and how long it waits for the last of them.

namespace weightwire::detail {

/// @throws protocol_error the worker commits another version than it was sent.
inline void require_version(weight_version committed, weight_version sent) {
    if (committed != sent) {
        throw protocol_error{"the worker says that it serves version " + std::to_string(committed) +
                                 ", it was sent " + std::to_string(sent),
                             {.phase = phase::finish}};
    }
}

/// @param total bytes that were sent to each of the peer's ranks.
/// @throws protocol_error a reply that cannot be true.
inline void require_sense(const wire::native_update_reply& reply, const peer_state& peer,
                          std::uint64_t total) {
    const auto most = checked_multiply(total, static_cast<std::uint64_t>(peer.info.world_size));
    if (reply.ended_ns < reply.began_ns || (most && reply.bytes > *most)) {
        throw protocol_error{"the worker says that it placed " + std::to_string(reply.bytes) +
                                 " bytes, more than were sent, or before it began",
                             {.phase = phase::update, .bytes_total = total}};
    }
}

/// All that a sender waited for have read everything, so their answers are on the way: until when
/// to wait for the others. At most as long again as the data took, or two seconds.
[[nodiscard]] inline deadline::clock::time_point grace_after(deadline::clock::time_point begin,
                                                             deadline until) noexcept {
    const auto now = deadline::clock::now();
    const auto grace = std::max<deadline::clock::duration>(std::chrono::seconds{2}, now - begin);
    return std::min(until, deadline::after(grace)).when();
}

/// Whether a vLLM server refuses a start because a session is open (wire section 1.5: its errors
/// differ by their text alone).
[[nodiscard]] inline bool says_session_is_open(const peer_reply& reply) {
    return !reply.ok() && reply.answer.fault == reply_fault::none &&
           reply.answer.body.find("update is already active") != std::string::npos;
}

/// For calls that were cancelled by us because they took too long.
inline void blame_the_slow(std::vector<peer_reply>& replies) {
    for (auto& reply : replies) {
        if (reply.answer.fault == reply_fault::cancelled) {
            reply.answer.fault = reply_fault::timed_out;
            reply.answer.fault_text = "the other peers had taken the data and answered";
        }
    }
}

}  // namespace weightwire::detail
