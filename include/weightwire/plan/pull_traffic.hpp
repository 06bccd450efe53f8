#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/layout.hpp>
#include <weightwire/plan/link_model.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/plan/regions.hpp>
#include <weightwire/plan/traffic.hpp>

/// @file
/// From the plans of a round, the ones that workers and owners agree on, to what the simulator
/// runs.

namespace weightwire::plan {

/// Collects the plans of all workers. Plans may be given one by one and thrown away.
class traffic_collector {
public:
    /// @param in_place readers take tensors where they lie, so that a read is as long as a run of
    /// the worker's copies; else a chunk is packed and read as one.
    traffic_collector(const places& where, bool in_place) : in_place_{in_place} {
        made_.trainers = static_cast<int>(where.trainers.size());
        made_.nodes.assign(where.trainers.begin(), where.trainers.end());
        made_.nodes.insert(made_.nodes.end(), where.workers.begin(), where.workers.end());
    }

    void add(const worker_plan& plan) {
        for (const auto& section : plan.sections()) {
            const bool passed_on =
                section.ingester != no_ingester && section.ingester != plan.worker();
            traffic_stream made{
                .from = passed_on ? made_.trainers + section.ingester : section.owner,
                .to = made_.trainers + plan.worker()};
            for (const auto& chunk : section.chunks) {
                const auto block =
                    in_place_ ? chunk.bytes / std::max<std::uint64_t>(runs_of(section, chunk), 1)
                              : chunk.bytes;
                made.chunks.push_back({chunk.group, chunk.bytes, block});
            }
            if (passed_on) {
                followers_.emplace_back(made_.streams.size(),
                                        std::pair{section.owner, section.ingester});
            } else if (section.ingester != no_ingester) {
                ingested_.emplace(std::pair{section.owner, section.ingester}, made_.streams.size());
            }
            made_.streams.push_back(std::move(made));
        }
    }

    /// @throws usage_error a plan takes chunks from a worker whose plan was not added.
    [[nodiscard]] traffic take() && {
        for (const auto& [stream, key] : followers_) {
            const auto found = ingested_.find(key);
            if (found == ingested_.end()) {
                throw usage_error{"worker " + std::to_string(key.second) +
                                      " passes on what its plan does not read from rank " +
                                      std::to_string(key.first) + "; add the plans of all workers",
                                  {.phase = phase::plan}};
            }
            made_.streams[stream].follows = static_cast<std::ptrdiff_t>(found->second);
        }
        return std::move(made_);
    }

private:
    [[nodiscard]] static std::uint64_t runs_of(const pull_section& section,
                                               const pull_chunk& chunk) {
        std::uint64_t runs = 0;
        for (std::size_t i = chunk.first; i < chunk.first + chunk.count; ++i) {
            for (const auto& write : section.tasks[i].writes) {
                runs += write.elements() / std::max<std::uint64_t>(run_elements(write), 1);
            }
        }
        return runs;
    }

    traffic made_;
    bool in_place_;
    std::vector<std::pair<std::size_t, std::pair<int, int>>> followers_;
    std::map<std::pair<int, int>, std::size_t> ingested_;
};

/// How a trainer gathers.
struct gather_rule {
    /// Ranks that share each tensor that is not an expert's (`layers.N…experts.E`, by name), which
    /// a rank has whole.
    std::int64_t tensor_ranks = 1;
    /// Every rank gathers everything: other stages' and other ranks' experts over the network.
    bool everything = false;
};

/// What each trainer rank does before it can send each group.
[[nodiscard]] inline std::vector<std::vector<gather_work>> gathers_of(
    const manifest& checkpoint, std::span<const std::size_t> group_sizes, const ownership& held,
    const places& where, const gather_rule& rule, const link_model& links) {
    std::vector<std::size_t> group_of;
    group_of.reserve(checkpoint.size());
    for (std::size_t group = 0; group < group_sizes.size(); ++group) {
        group_of.insert(group_of.end(), group_sizes[group], group);
    }
    std::vector<bool> expert;
    expert.reserve(checkpoint.size());
    for (const auto& parameter : checkpoint.parameters()) {
        expert.push_back(place_of(parameter.name).expert >= 0);
    }
    const auto part = static_cast<double>(rule.tensor_ranks - 1) /
                      static_cast<double>(std::max<std::int64_t>(rule.tensor_ranks, 1));
    std::vector<std::vector<gather_work>> made(static_cast<std::size_t>(held.ranks()));
    for (int rank = 0; rank < held.ranks(); ++rank) {
        auto& works = made[static_cast<std::size_t>(rank)];
        works.resize(group_sizes.size());
        if (rule.tensor_ranks <= 1 && !rule.everything) {
            continue;
        }
        const auto node = where.trainers[static_cast<std::size_t>(rank)];
        const auto mates = static_cast<double>(std::ranges::count(where.trainers, node));
        const auto others = 1 - mates / static_cast<double>(where.trainers.size());
        for (std::size_t i = 0; i < group_of.size(); ++i) {
            if (!rule.everything && (expert[i] || !held.held(rank).contains(i))) {
                continue;
            }
            const auto bytes = static_cast<double>(checkpoint[i].byte_size());
            auto& work = works[group_of[i]];
            work.bytes += checkpoint[i].byte_size();
            work.seconds += links.gather_tensor;
            work.seconds += rule.everything
                                ? bytes / links.gather + bytes * others / (mates * links.network)
                                : bytes * part / links.gather;
        }
    }
    return made;
}

}  // namespace weightwire::plan
