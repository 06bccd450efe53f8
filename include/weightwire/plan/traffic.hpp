#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>

/// @file
/// What moves in a round, and between whom: what the simulator runs.

namespace weightwire::plan {

/// Bytes that one rank makes readable at once, for one reader.
struct traffic_chunk {
    std::size_t group = 0;  ///< gather group; ascending in a stream
    std::uint64_t bytes = 0;
    std::uint64_t block_bytes = 0;  ///< that a read takes at once, on average
};

/// Chunks that one rank reads from another, one after the other. Ranks of a traffic are numbered
/// through: the trainer's first, then the workers'.
struct traffic_stream {
    static constexpr std::ptrdiff_t follows_none = -1;

    int from = 0;
    int to = 0;
    /// Where `from` is a worker, the stream whose chunks it passes on, one by one; each goes once
    /// it is there.
    std::ptrdiff_t follows = follows_none;
    std::vector<traffic_chunk> chunks{};

    [[nodiscard]] std::uint64_t bytes() const noexcept {
        std::uint64_t sum = 0;
        for (const auto& chunk : chunks) {
            sum += chunk.bytes;
        }
        return sum;
    }
};

/// What a trainer rank does before it can send a group.
struct gather_work {
    double seconds = 0;
    std::uint64_t bytes = 0;  ///< that it needs for the gathered tensors
};

struct traffic {
    int trainers = 0;
    std::vector<std::uint64_t> nodes{};  ///< of each rank; equal numbers are one node
    std::vector<traffic_stream> streams{};
    std::vector<std::vector<gather_work>>
        gathers{};             ///< of each trainer rank and group; may be empty
    std::vector<int> turns{};  ///< of each trainer rank, where they take turns; may be empty

    [[nodiscard]] int workers() const noexcept { return static_cast<int>(nodes.size()) - trainers; }
};

/// @throws usage_error a stream names ranks that do not exist, passes on what its sender does not
/// receive, or has a chunk without bytes or groups that descend.
inline void require_consistent(const traffic& what) {
    const auto ranks = static_cast<int>(what.nodes.size());
    const auto refuse = [](std::size_t i, const std::string& why) {
        throw usage_error{"stream " + std::to_string(i) + " of the traffic " + why,
                          {.phase = phase::plan}};
    };
    if (what.trainers < 0 || what.trainers > ranks) {
        throw usage_error{"the traffic has more trainer ranks than nodes", {.phase = phase::plan}};
    }
    for (std::size_t i = 0; i < what.streams.size(); ++i) {
        const auto& each = what.streams[i];
        if (each.from < 0 || each.from >= ranks || each.to < what.trainers || each.to >= ranks ||
            each.from == each.to) {
            refuse(i, "goes from rank " + std::to_string(each.from) + " to " +
                          std::to_string(each.to) + ", where only workers receive, from others");
        }
        if ((each.from < what.trainers) != (each.follows == traffic_stream::follows_none)) {
            refuse(i, "must pass on another stream where its sender is a worker, and only there");
        }
        if (each.follows != traffic_stream::follows_none) {
            const bool known = each.follows >= 0 &&
                               each.follows < static_cast<std::ptrdiff_t>(what.streams.size());
            const auto* const source =
                known ? &what.streams[static_cast<std::size_t>(each.follows)] : nullptr;
            if (source == nullptr || source->to != each.from ||
                source->chunks.size() != each.chunks.size()) {
                refuse(i, "passes on a stream that its sender does not receive in as many chunks");
            }
        }
        for (std::size_t c = 0; c < each.chunks.size(); ++c) {
            if (each.chunks[c].bytes == 0 ||
                (c > 0 && each.chunks[c].group < each.chunks[c - 1].group)) {
                refuse(i, "has chunks without bytes, or groups that descend");
            }
        }
    }
}

}  // namespace weightwire::plan
