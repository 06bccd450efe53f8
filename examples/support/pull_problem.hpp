#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/floors.hpp>
#include <weightwire/plan/groups.hpp>
#include <weightwire/plan/layout.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/plan/pull_traffic.hpp>
#include <weightwire/plan/recorder.hpp>
#include <weightwire/plan/simulator.hpp>

#include "model_lists.hpp"
#include "model_workers.hpp"

/// @file
/// A whole `sharded_pull` on paper: a model, a trainer and its workers. It runs the plan code that
/// the processes of a real one run, all in this one.

namespace models {

/// Who is where.
struct cluster {
    weightwire::plan::parallel_layout trainer{};
    weightwire::plan::parallel_layout worker{};
    std::int64_t trainer_ranks = 1;
    std::int64_t worker_ranks = 1;
    std::int64_t ranks_per_node = 8;
    bool same_nodes = false;  ///< the workers' nodes are the trainer's
};

/// How the weights go.
struct method {
    bool gather_everything = false;  ///< every trainer rank gathers the whole model
    bool overlap = true;             ///< gather, pack, send and scatter at the same time
    bool stages_in_turn = false;     ///< pipeline stages send one after the other
    bool node_once = true;           ///< what a node's workers share enters it once
    bool in_place = false;           ///< readers take tensors where they lie
    std::uint64_t chunk_bytes = std::uint64_t{256} << 20U;
    weightwire::plan::simulation_options budgets{};  ///< links, bytes and slots
};

/// What was planned.
struct planned {
    weightwire::plan::traffic traffic{};
    std::vector<std::uint64_t> owner_bytes{};  ///< over the network, of each trainer rank
    std::uint64_t optimum_bytes = 0;           ///< of the busiest one, at least
    std::size_t sections = 0;
    std::size_t reads = 0;
    std::size_t chunks = 0;
    std::map<std::uint64_t, std::uint64_t> runs{};  ///< bytes by run length, powers of two
};

/// A model and a cluster. Not thread-safe.
class pull_problem {
public:
    pull_problem(const dimensions& model, cluster where)
        : model_{model},
          cluster_{std::move(where)},
          checkpoint_{parameters(model)},
          group_sizes_{
              weightwire::plan::group_runs(weightwire::plan::layerwise_groups(checkpoint_))},
          owners_{checkpoint_, weightwire::plan::held_by_layout(checkpoint_, cluster_.trainer,
                                                                cluster_.trainer_ranks)} {
        const auto per_node = cluster_.ranks_per_node;
        const auto trainer_nodes = (cluster_.trainer_ranks + per_node - 1) / per_node;
        places_.trainers = weightwire::plan::nodes_of(cluster_.trainer_ranks, per_node);
        places_.workers = weightwire::plan::nodes_of(
            cluster_.worker_ranks, per_node,
            cluster_.same_nodes ? 0 : static_cast<std::uint64_t>(trainer_nodes));
        for (std::int64_t rank = 0; rank < cluster_.trainer_ranks; ++rank) {
            turns_.push_back(static_cast<int>(weightwire::plan::trainer_position_of(
                                                  cluster_.trainer, rank, cluster_.trainer_ranks)
                                                  .stage.rank));
        }
        for (std::int64_t rank = 0; rank < cluster_.worker_ranks; ++rank) {
            const auto& needs = needs_of(rank);
            reports_.push_back(needs.report());
            needed_.push_back(needs.bytes());
        }
    }

    [[nodiscard]] const weightwire::manifest& checkpoint() const noexcept { return checkpoint_; }
    [[nodiscard]] const weightwire::plan::ownership& owners() const noexcept { return owners_; }
    [[nodiscard]] const weightwire::plan::places& places() const noexcept { return places_; }
    [[nodiscard]] const std::vector<int>& turns() const noexcept { return turns_; }
    [[nodiscard]] const std::vector<std::size_t>& group_sizes() const noexcept {
        return group_sizes_;
    }
    /// Bytes that each worker keeps.
    [[nodiscard]] const std::vector<std::uint64_t>& needed() const noexcept { return needed_; }

    /// What a worker's loader copies, as reads. Workers of other replicas that stand alike need the
    /// same, which is recorded once.
    [[nodiscard]] const weightwire::plan::pull_needs& needs_of(std::int64_t rank) const {
        const auto here =
            weightwire::plan::worker_position_of(cluster_.worker, rank, cluster_.worker_ranks);
        const std::array key{here.stage.rank, here.tensor.rank, here.expert.rank,
                             here.expert_tensor.rank};
        auto found = needs_.find(key);
        if (found == needs_.end()) {
            const worker mine{model_, here};
            const weightwire::manifest kept{mine.parameters()};
            found = needs_
                        .emplace(key, weightwire::plan::pull_needs{checkpoint_, kept,
                                                                   weightwire::plan::record(
                                                                       checkpoint_, kept, mine)})
                        .first;
        }
        return found->second;
    }

    /// Plans a round of all ranks.
    [[nodiscard]] planned plan(const method& how) const {
        const auto whole = weightwire::plan::position_set::all(checkpoint_.size());
        const auto owners =
            how.gather_everything
                ? weightwire::plan::ownership{checkpoint_,
                                              std::vector(places_.trainers.size(), whole)}
                : owners_;
        const auto routed = weightwire::plan::route(checkpoint_, owners, places_, reports_,
                                                    {.node_once = how.node_once});
        planned made;
        made.owner_bytes.assign(routed.owner_bytes().begin(), routed.owner_bytes().end());
        made.optimum_bytes = routed.optimum_bytes();
        weightwire::plan::traffic_collector collected{places_, how.in_place};
        for (std::int64_t rank = 0; rank < cluster_.worker_ranks; ++rank) {
            const auto plan = weightwire::plan::plan_worker(
                checkpoint_, group_sizes_, owners, needs_of(rank),
                routed.of(static_cast<int>(rank)), {.chunk_bytes = how.chunk_bytes});
            collected.add(plan);
            count(plan, made);
        }
        made.traffic = std::move(collected).take();
        made.traffic.gathers = weightwire::plan::gathers_of(
            checkpoint_, group_sizes_, owners, places_,
            {.tensor_ranks = cluster_.trainer.tensor, .everything = how.gather_everything},
            how.budgets.links);
        made.traffic.turns = turns_;
        return made;
    }

    [[nodiscard]] static weightwire::plan::simulation simulate(const planned& made,
                                                               const method& how) {
        auto options = how.budgets;
        options.overlap = how.overlap;
        options.in_turn = how.stages_in_turn;
        options.in_place = how.in_place;
        return weightwire::plan::simulate(made.traffic, options);
    }

    [[nodiscard]] weightwire::plan::problem_floor floor(const weightwire::plan::link_model& links,
                                                        bool node_once) const {
        return weightwire::plan::floor_of(checkpoint_, owners_, places_, reports_, links,
                                          {.node_once = node_once});
    }
    /// The floor where stages send one after the other, each worker reading all that it needs.
    [[nodiscard]] double floor_in_turn(const weightwire::plan::link_model& links) const {
        return weightwire::plan::floor_in_turn(checkpoint_, owners_, places_, reports_, links,
                                               turns_);
    }

private:
    void count(const weightwire::plan::worker_plan& plan, planned& made) const {
        for (const auto& section : plan.sections()) {
            ++made.sections;
            made.reads += section.tasks.size();
            made.chunks += section.chunks.size();
            for (const auto& task : section.tasks) {
                const auto item = weightwire::plan::item_bytes_of(checkpoint_[task.read.source]);
                for (const auto& write : task.writes) {
                    const auto run = weightwire::plan::run_elements(write) * item;
                    made.runs[std::bit_floor(run)] += write.bytes(item);
                }
            }
        }
    }

    dimensions model_;
    cluster cluster_;
    weightwire::manifest checkpoint_;
    std::vector<std::size_t> group_sizes_;
    weightwire::plan::ownership owners_;
    weightwire::plan::places places_;
    std::vector<int> turns_;
    std::vector<weightwire::plan::needs_report> reports_;
    std::vector<std::uint64_t> needed_;
    mutable std::map<std::array<std::int64_t, 4>, weightwire::plan::pull_needs> needs_;
};

}  // namespace models
