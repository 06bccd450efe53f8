#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <queue>
#include <span>
#include <utility>
#include <vector>

#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_routing.hpp>

/// @file
/// How few bytes the busiest trainer rank could send over the network, found by maximum flow and
/// without any of the code that routes.

namespace support {

/// Maximum flow from node 0 to node 1, by Dinic's algorithm.
class flow_network {
public:
    explicit flow_network(std::size_t nodes) : out_(nodes) {}

    void add(std::size_t from, std::size_t to, std::uint64_t capacity) {
        out_[from].push_back(edges_.size());
        edges_.push_back({to, capacity});
        out_[to].push_back(edges_.size());
        edges_.push_back({from, 0});
    }
    [[nodiscard]] std::uint64_t maximum() {
        std::uint64_t sum = 0;
        while (level()) {
            next_.assign(out_.size(), 0);
            while (const auto pushed = push(0, ~std::uint64_t{0})) {
                sum += pushed;
            }
        }
        return sum;
    }

private:
    struct edge {
        std::size_t to;
        std::uint64_t left;
    };
    bool level() {
        level_.assign(out_.size(), 0);
        level_[0] = 1;
        std::queue<std::size_t> waiting;
        waiting.push(0);
        for (; !waiting.empty(); waiting.pop()) {
            for (const auto e : out_[waiting.front()]) {
                if (edges_[e].left > 0 && level_[edges_[e].to] == 0) {
                    level_[edges_[e].to] = level_[waiting.front()] + 1;
                    waiting.push(edges_[e].to);
                }
            }
        }
        return level_[1] != 0;
    }
    std::uint64_t push(std::size_t node, std::uint64_t most) {
        if (node == 1) {
            return most;
        }
        for (auto& i = next_[node]; i < out_[node].size(); ++i) {
            const auto e = out_[node][i];
            const auto to = edges_[e].to;
            if (edges_[e].left > 0 && level_[to] == level_[node] + 1) {
                if (const auto pushed = push(to, std::min(most, edges_[e].left))) {
                    edges_[e].left -= pushed;
                    edges_[e ^ 1U].left += pushed;
                    return pushed;
                }
            }
        }
        return 0;
    }

    std::vector<edge> edges_;
    std::vector<std::vector<std::size_t>> out_;
    std::vector<std::size_t> level_;
    std::vector<std::size_t> next_;
};

/// The fewest bytes that the busiest trainer rank sends over the network in any legal routing:
/// every byte from a rank that holds it, from one on the worker's node where there is one (it costs
/// no network), and with `node_once` what all workers of a node need once for the node.
[[nodiscard]] inline std::uint64_t fewest_bytes_of_busiest(
    const weightwire::plan::ownership& owners, const weightwire::plan::places& where,
    std::span<const weightwire::plan::needs_report> reports, bool node_once) {
    std::map<weightwire::plan::node_id, std::vector<std::size_t>> nodes;
    for (std::size_t w = 0; w < reports.size(); ++w) {
        nodes[where.workers[w]].push_back(w);
    }
    std::map<std::vector<int>, std::uint64_t> demands;
    std::uint64_t total = 0;
    for (const auto& [node, members] : nodes) {
        // Of each position and signature: bytes, and how many of the node need it.
        std::map<std::pair<std::size_t, std::uint64_t>, std::pair<std::uint64_t, std::size_t>> all;
        for (const auto w : members) {
            for (const auto& one : reports[w].needs) {
                auto& seen = all[{one.position, one.signature}];
                seen.first = one.bytes;
                ++seen.second;
            }
        }
        for (const auto& [key, seen] : all) {
            const auto holders = owners.holders(key.first);
            const bool local = std::ranges::any_of(holders, [&](int rank) {
                return where.trainers[static_cast<std::size_t>(rank)] == node;
            });
            if (!local) {
                const bool once = node_once && seen.second == members.size();
                const auto bytes = once ? seen.first : seen.first * seen.second;
                demands[{holders.begin(), holders.end()}] += bytes;
                total += bytes;
            }
        }
    }
    const auto ranks = static_cast<std::size_t>(owners.ranks());
    const auto fits = [&](std::uint64_t most) {
        flow_network network{2 + ranks + demands.size()};
        for (std::size_t r = 0; r < ranks; ++r) {
            network.add(2 + r, 1, most);
        }
        std::size_t node = 2 + ranks;
        for (const auto& [holders, bytes] : demands) {
            network.add(0, node, bytes);
            for (const auto rank : holders) {
                network.add(node, 2 + static_cast<std::size_t>(rank), bytes);
            }
            ++node;
        }
        return network.maximum() == total;
    };
    std::uint64_t low = total / std::max<std::size_t>(ranks, 1);
    std::uint64_t high = total;
    while (low < high) {
        const auto middle = low + (high - low) / 2;
        if (fits(middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

}  // namespace support
