#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>

/// @file
/// What a trainer may choose; every member has a default.

namespace weightwire {

/// Choices for the life of a trainer engine.
struct trainer_options {
    /// Name of the parameter set: versions and hashes are per set.
    std::string set_name = "model";
    /// Time for `trainer_init`: probing, rendezvous, the workers' init.
    std::chrono::milliseconds init_budget{60'000};
    /// Time for one `send_weights()` that names no deadline of its own.
    std::chrono::milliseconds send_budget{300'000};
    /// Most of a round's time that is spent on asking lost peers to take part again.
    std::chrono::milliseconds rejoin_budget{2'000};
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
