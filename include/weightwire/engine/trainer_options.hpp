#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>

/// @file
/// What a trainer may choose; every member has a default.

namespace weightwire {

/// What a round does about the requests that servers are answering: `/pause` before the start,
/// `/resume` after the finish, and after a round that failed.
enum class round_pause : std::uint8_t {
    automatic,  ///< `keep` towards vLLM servers, which load while they answer; `none` towards our
                ///< own workers, which change over at once
    none,       ///< nothing: the caller sees to it
    keep,       ///< freeze them; they go on with the new weights
    wait,       ///< let them finish; vLLM has no limit for it, so the pause is given up as failed
                ///< after a quarter of the round's time: allow a round several times the longest
                ///< answer
    abort,      ///< end them
};

/// Choices for the life of a trainer engine.
struct trainer_options {
    /// Name of the parameter set: versions and hashes are per set.
    std::string set_name = "model";
    /// Time for `trainer_init`: probing, rendezvous, the workers' init.
    std::chrono::milliseconds init_budget{60'000};
    /// Time for one `send_weights()` that names no deadline of its own.
    std::chrono::milliseconds send_budget{300'000};
    /// Most of a round's time that is spent on asking lost peers to take part again. A backend that
    /// cannot do without one peer (a broadcast group) opens everything anew instead, within
    /// `init_budget` and a quarter of the round's time.
    std::chrono::milliseconds rejoin_budget{2'000};
    /// Whether servers stand still during a round.
    round_pause pause = round_pause::automatic;
    /// With a pause: whether servers forget what they computed with the old weights (prefix and
    /// key-value caches; frozen requests are recomputed). A finish does not make them.
    bool pause_clears_cache = true;
    /// With a pause: whether a vLLM server that was lost in an update or after it, and so may hold
    /// old and new weights together (`peer_outcome::may_be_mixed`), is left paused until a round
    /// commits there, instead of serving what it holds. Nobody resumes it if none does.
    bool leave_mixed_paused = false;
    /// Ends `trainer_init` early, with `cancelled_error`.
    std::stop_token stop{};
    /// Worker ranks behind each peer. Empty: the servers are asked. Given and asked: they must
    /// agree.
    std::vector<int> world_sizes{};
};

/// Choices for one round.
struct send_options {
    /// The version that the workers will report. Default: the engine's counter, which starts one
    /// above the highest that the workers reported at init and grows by one a round, whatever
    /// became of the round.
    std::optional<weight_version> version{};
    /// When the round gives up. Default: `trainer_options::send_budget` from now.
    std::optional<weightwire::deadline> deadline{};
    /// Ends the round early, with `cancelled_error`; workers keep the version they had.
    std::stop_token stop{};
    /// Allow a version that is not above the worker's.
    bool force = false;
    /// Return a report with failed peers in it as long as one peer committed. Default: throw the
    /// first peer's error; the others have committed all the same, and `last_report()` tells who.
    bool tolerate_failed_peers = false;
};

}  // namespace weightwire
