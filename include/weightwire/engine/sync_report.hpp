#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/failure.hpp>

/// @file
/// What a round did: one outcome a worker server, seconds and bytes a phase.

namespace weightwire {

/// What became of one peer in a round.
enum class peer_status : std::uint8_t {
    committed,  ///< serves the new version
    failed,     ///< did not commit; serves the version it had, or is dirty, or `may_be_mixed`
    unknown,    ///< was asked to commit and gave no answer: may serve either version, whole
    left_out,   ///< was lost before the round and could not be reached again
};

/// The word that tables use for `value`.
[[nodiscard]] constexpr std::string_view to_string(peer_status value) noexcept {
    switch (value) {
        case peer_status::committed: return "committed";
        case peer_status::failed: return "failed";
        case peer_status::unknown: return "unknown";
        case peer_status::left_out: return "left out";
    }
    return "unknown";
}

/// One peer's outcome.
struct peer_outcome {
    std::string peer{};  ///< URL or name
    int world_size = 1;  ///< worker ranks behind it
    peer_status status = peer_status::left_out;
    weight_version version = 0;  ///< last version known to be whole there
    failure error{};             ///< set unless committed
    failure resume_error{};      ///< set when `/resume` failed: it may stand still until the next
    /// A vLLM server that was lost in an update or after it: it loads while it reads, so it may
    /// serve old and new weights together until a round commits there or it is restarted. See
    /// `trainer_options::leave_mixed_paused`. Our own workers never do.
    bool may_be_mixed = false;
    std::uint64_t bytes = 0;  ///< placed by its ranks, 0 when the peer does not say
    double data_seconds = 0;  ///< its own data phase, 0 when the peer does not say
};

/// Seconds of one phase on the trainer, and the bytes of weights it moved.
struct phase_figure {
    double seconds = 0;
    std::uint64_t bytes = 0;
};

/// What `send_weights()` returns on every trainer rank.
struct sync_report {
    weight_version version = 0;  ///< the version that was sent
    std::uint64_t round = 0;     ///< counts this engine's rounds, from 1
    std::vector<peer_outcome> peers{};
    phase_figure start{};
    phase_figure update{};
    phase_figure finish{};
    double total_seconds = 0;
    /// The longest data phase among the peers: from the first rank's start of work to its last
    /// completed write.
    double data_seconds = 0;

    [[nodiscard]] bool all_committed() const noexcept {
        return std::all_of(peers.begin(), peers.end(), [](const peer_outcome& outcome) {
            return outcome.status == peer_status::committed;
        });
    }
    [[nodiscard]] std::size_t committed() const noexcept {
        return static_cast<std::size_t>(std::count_if(
            peers.begin(), peers.end(),
            [](const peer_outcome& outcome) { return outcome.status == peer_status::committed; }));
    }
    /// The first peer's failure, empty when all committed.
    [[nodiscard]] failure first_failure() const {
        const auto found = std::find_if(
            peers.begin(), peers.end(),
            [](const peer_outcome& outcome) { return outcome.status != peer_status::committed; });
        return found == peers.end() ? failure{} : found->error;
    }
};

}  // namespace weightwire
