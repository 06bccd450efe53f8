#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/link_model.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_balance.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_routing.hpp>

/// @file
/// Floors: the seconds below which no plan whatever can bring the workers what they need. They
/// follow from the problem (who holds what, who needs what, on which node) and from line rates, not
/// from a plan.

namespace weightwire::plan {

/// Seconds that each kind of link needs at least, at its full rate.
struct problem_floor {
    double receive = 0;  ///< adapters of the workers
    double send = 0;     ///< adapters of the trainer ranks, shared as well as holders allow
    double local = 0;    ///< links inside a node
    std::uint64_t network_bytes = 0;       ///< all that must cross between nodes
    std::uint64_t busiest_send_bytes = 0;  ///< of one trainer rank, at least

    [[nodiscard]] double seconds() const noexcept { return std::max({receive, send, local}); }
};

struct floor_options {
    /// What several workers of a node need enters it once. Without it every worker gets all that it
    /// needs through its own adapter.
    bool node_once = true;
    /// Only what these turns hold (`turn_of` of the first holder); empty is everything.
    std::span<const int> turn_of_trainer{};
    int turn = 0;
};

namespace detail {

/// Adds up what a problem needs, node by node.
class floor_sum {
public:
    floor_sum(const manifest& checkpoint, const ownership& owners, const places& where,
              const link_model& links, const floor_options& options)
        : checkpoint_{checkpoint},
          owners_{owners},
          links_{links},
          options_{options},
          demand_(owners.classes().size(), 0) {
        for (const auto& each : owners.classes()) {
            auto& nodes = nodes_of_class_.emplace_back();
            for (const auto holder : each.holders) {
                nodes.push_back(where.trainers.at(static_cast<std::size_t>(holder)));
            }
            std::ranges::sort(nodes);
        }
    }

    /// @param workers of one node.
    void add(node_id node, std::span<const needs_report> reports,
             std::span<const std::size_t> workers) {
        struct wanted {
            need what;
            std::size_t worker;
        };
        std::vector<wanted> all;
        for (std::size_t k = 0; k < workers.size(); ++k) {
            for (const auto& each : reports[workers[k]].needs) {
                if (counts(each.position)) {
                    all.push_back({each, k});
                }
            }
        }
        std::ranges::sort(all, [](const wanted& a, const wanted& b) {
            return a.what.position != b.what.position ? a.what.position < b.what.position
                                                      : a.what.signature < b.what.signature;
        });
        std::vector<std::uint64_t> network(workers.size(), 0);  // of each worker alone
        std::vector<std::uint64_t> local(workers.size(), 0);
        std::uint64_t once = 0;      // over the network, for all of the node
        std::uint64_t together = 0;  // that all of its workers need
        for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
            const auto position = all[begin].what.position;
            const auto of_class = owners_.class_of(position);
            const bool here = std::ranges::binary_search(nodes_of_class_[of_class], node);
            std::uint64_t distinct = 0;
            std::uint64_t each = 0;
            for (; end < all.size() && all[end].what.position == position; ++end) {
                const auto bytes = all[end].what.bytes;
                each += bytes;
                const bool again =
                    end > begin && all[end - 1].what.signature == all[end].what.signature;
                distinct += again ? 0 : bytes;
                (here ? local : network)[all[end].worker] += bytes;
            }
            distinct = std::min(distinct, checkpoint_[position].byte_size());
            together += each;
            if (!here) {
                once += distinct;
                demand_[of_class] += options_.node_once ? distinct : each;
                made_.network_bytes += options_.node_once ? distinct : each;
            }
        }
        const auto seconds = [](std::uint64_t bytes, double rate) {
            return static_cast<double>(bytes) / rate;
        };
        const auto count = static_cast<double>(workers.size());
        auto& made = made_;
        if (options_.node_once) {
            // What does not enter through a worker's own adapter comes to it inside the node.
            made.receive = std::max(made.receive, seconds(once, links_.network * count));
            made.local = std::max(made.local, seconds(together - once, links_.local_in * count));
            made.local = std::max(made.local, seconds(together - once, links_.local_all));
        } else {
            std::uint64_t sum = 0;
            for (std::size_t k = 0; k < workers.size(); ++k) {
                made.receive = std::max(made.receive, seconds(network[k], links_.network));
                made.local = std::max(made.local, seconds(local[k], links_.local_in));
                sum += local[k];
            }
            made.local = std::max(made.local, seconds(sum, links_.local_all));
        }
    }

    [[nodiscard]] problem_floor finish() && {
        std::vector<demand> demands;
        for (std::size_t c = 0; c < demand_.size(); ++c) {
            if (demand_[c] > 0) {
                demands.push_back({demand_[c], owners_.classes()[c].holders});
            }
        }
        made_.busiest_send_bytes =
            demands.empty()
                ? 0
                : balancer::balance(std::move(demands), static_cast<std::size_t>(owners_.ranks()))
                      .bound;
        made_.send = static_cast<double>(made_.busiest_send_bytes) / links_.network;
        const auto all = static_cast<double>(made_.network_bytes) / links_.network_all;
        made_.receive = std::max(made_.receive, all);
        return made_;
    }

private:
    [[nodiscard]] bool counts(std::size_t position) const {
        const auto& turns = options_.turn_of_trainer;
        return turns.empty() ||
               turns[static_cast<std::size_t>(owners_.holders(position)[0])] == options_.turn;
    }

    const manifest& checkpoint_;
    const ownership& owners_;
    const link_model& links_;
    const floor_options& options_;
    std::vector<std::vector<node_id>> nodes_of_class_;
    std::vector<std::uint64_t> demand_;  // of each class, over the network
    problem_floor made_;
};

}  // namespace detail

/// The floor of a round. Sets of elements that differ count as disjoint, up to the whole parameter:
/// where slices overlap in part, a node that takes them once might do with a little less.
/// @param reports of all workers, by rank.
/// @throws usage_error ranks of the three do not fit each other.
[[nodiscard]] inline problem_floor floor_of(const manifest& checkpoint, const ownership& owners,
                                            const places& where,
                                            std::span<const needs_report> reports,
                                            const link_model& links,
                                            const floor_options& options = {}) {
    if (where.workers.size() != reports.size() ||
        where.trainers.size() != static_cast<std::size_t>(owners.ranks())) {
        throw usage_error{
            "a floor needs the place of every trainer rank and of every worker that "
            "reported",
            {.phase = phase::plan}};
    }
    std::map<node_id, std::vector<std::size_t>> by_node;
    for (std::size_t w = 0; w < where.workers.size(); ++w) {
        by_node[where.workers[w]].push_back(w);
    }
    detail::floor_sum sum{checkpoint, owners, where, links, options};
    for (const auto& [node, workers] : by_node) {
        sum.add(node, reports, workers);
    }
    return std::move(sum).finish();
}

/// The floor where trainer ranks take turns, such as pipeline stages that are sent one after the
/// other: the sum of the turns' floors. Each parameter belongs to its first holder's turn.
/// @param turns of each trainer rank.
[[nodiscard]] inline double floor_in_turn(const manifest& checkpoint, const ownership& owners,
                                          const places& where,
                                          std::span<const needs_report> reports,
                                          const link_model& links, std::span<const int> turns,
                                          bool node_once = false) {
    std::vector<int> distinct{turns.begin(), turns.end()};
    std::ranges::sort(distinct);
    distinct.erase(std::ranges::unique(distinct).begin(), distinct.end());
    double seconds = 0;
    for (const auto turn : distinct) {
        seconds += floor_of(checkpoint, owners, where, reports, links,
                            {.node_once = node_once, .turn_of_trainer = turns, .turn = turn})
                       .seconds();
    }
    return seconds;
}

}  // namespace weightwire::plan
