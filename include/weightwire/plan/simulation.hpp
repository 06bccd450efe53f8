#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <vector>

#include <weightwire/plan/link_model.hpp>

/// @file
/// What a simulated round is told, and what it tells.

namespace weightwire::plan {

/// How a round runs.
struct simulation_options {
    link_model links{};
    /// A group is gathered, packed and sent while the one before it is still on its way. Without it
    /// an owner begins a group when its readers have all of the one before.
    bool overlap = true;
    /// Owners of a turn (`traffic::turns`) begin when those of the turn before are done.
    bool in_turn = false;
    /// Tensors lie where they are read, and land where they stay: nothing is gathered, packed or
    /// scattered, and no budget applies.
    bool in_place = false;
    std::uint64_t look_ahead = std::uint64_t{4} << 30U;  ///< an owner's gathered tensors
    std::uint64_t arena = std::uint64_t{4} << 30U;       ///< an owner's packed chunks
    /// A worker's chunks before their scatter. Where it passes some on to its node, those have half
    /// of it for themselves, so that two that pass on to each other cannot both be full.
    std::uint64_t landing = std::uint64_t{4} << 30U;
    std::size_t slots = 2;  ///< chunks packed and not yet read, of one owner for one worker
    /// Events closer than this part of the busiest link's time are taken together.
    double resolution = 1.0 / 4000;
};

/// What a rank's links carried, in bytes.
struct link_load {
    std::uint64_t network_in = 0;
    std::uint64_t network_out = 0;
    std::uint64_t local_in = 0;
    std::uint64_t local_out = 0;
};

struct simulation {
    double seconds = 0;                    ///< until the last worker has its last byte in place
    std::vector<double> worker_seconds{};  ///< the same of each
    std::vector<link_load> loads{};        ///< trainer ranks, then workers
    std::uint64_t peak_gathered = 0;       ///< of the trainer rank that needs most
    std::uint64_t peak_arena = 0;          ///< of the trainer rank that needs most
    std::uint64_t peak_landing = 0;        ///< of the worker that needs most
    std::size_t steps = 0;                 ///< of the simulation
};

}  // namespace weightwire::plan
