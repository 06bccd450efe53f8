#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <weightwire/core/error.hpp>

/// @file
/// What the simulator assumes of links, and how a run's own measurements replace it.

namespace weightwire::plan {

/// The share of a link's rate that reads of a size reach.
struct block_share {
    std::uint64_t bytes = 0;
    double share = 1;
};

/// The share at `bytes`: between two entries by the logarithm of the size, outside them that of the
/// nearest. `curve` ascends in bytes; an empty one is 1 everywhere.
[[nodiscard]] inline double share_at(const std::vector<block_share>& curve, std::uint64_t bytes) {
    if (curve.empty() || bytes >= curve.back().bytes) {
        return curve.empty() ? 1 : curve.back().share;
    }
    for (std::size_t i = 0; i < curve.size(); ++i) {
        if (bytes <= curve[i].bytes) {
            if (i == 0) {
                break;
            }
            const auto& low = curve[i - 1];
            const auto place =
                std::log2(static_cast<double>(bytes) / static_cast<double>(low.bytes)) /
                std::log2(static_cast<double>(curve[i].bytes) / static_cast<double>(low.bytes));
            return low.share + place * (curve[i].share - low.share);
        }
    }
    return curve.front().share;
}

/// Rates in bytes per second, times in seconds. *Network* is between nodes, *local* inside one. The
/// defaults are those of nodes with a 400 Gb/s adapter a GPU and NVLink of the fourth generation.
struct link_model {
    static constexpr double unlimited = std::numeric_limits<double>::infinity();

    double network = 50e9;           ///< line rate of a rank's adapter, in and out each
    double network_all = unlimited;  ///< all ranks together
    double network_latency = 50e-6;  ///< a message, or a read's first byte
    /// Published for GPU memory over one adapter: about a quarter of the line at 64 KiB, 96 % at
    /// best.
    std::vector<block_share> network_shares{
        {4096, 0.02}, {65'536, 0.25}, {262'144, 0.81}, {1'048'576, 0.88}, {8'388'608, 0.96}};

    double local_in = 450e9;       ///< what one rank reads from the ranks of its node
    double local_out = 450e9;      ///< what is read from one rank by the ranks of its node
    double local_all = unlimited;  ///< a node's ranks together
    double local_latency = 10e-6;
    std::vector<block_share> local_shares{{16'384, 0.75}, {262'144, 0.82}, {67'108'864, 0.82}};

    double gather = 200e9;         ///< a trainer's rank gathers what its tensor group has
    double gather_tensor = 20e-6;  ///< and takes this for each tensor besides
    double pack = 1000e9;          ///< a trainer's rank copies into what is sent
    double scatter = 1000e9;       ///< a worker's rank copies into its parameters
};

/// Rates seen in a run, for a prediction of another. What is 0 was not measured, and `base` stands.
struct measured_rates {
    double network_one = 0;  ///< one reader alone, between nodes
    double network_all = 0;  ///< all readers at once, together
    double local_one = 0;    ///< one reader alone, inside a node
    double local_all = 0;    ///< all readers of a node at once, together
    double gather = 0;       ///< one trainer rank
    double pack = 0;         ///< one trainer rank
    double scatter = 0;      ///< one worker
    double latency = 0;      ///< of a control message and of a read
    /// Ranks share so few cores that packing, sending and scattering take turns. Then `pack` and
    /// `scatter` are what all ranks do at once, together, as `network_all` and `local_all` are.
    bool shared_cores = false;
};

/// `base` with what was measured. A measured rate is what a transfer gets, so that the shares by
/// block size of that link no longer apply: measure with blocks of the run's size.
/// @throws usage_error a rate is negative.
[[nodiscard]] inline link_model links_from(const measured_rates& seen, link_model base = {}) {
    for (const auto rate : {seen.network_one, seen.network_all, seen.local_one, seen.local_all,
                            seen.gather, seen.pack, seen.scatter, seen.latency}) {
        if (!(rate >= 0)) {
            throw usage_error{
                "a measured rate is negative, or no number; leave out what was not "
                "measured",
                {.phase = phase::plan}};
        }
    }
    const auto take = [](double& into, double value) { into = value > 0 ? value : into; };
    if (seen.network_one > 0) {
        base.network = seen.network_one;
        base.network_shares.clear();
    }
    if (seen.local_one > 0) {
        base.local_in = seen.local_one;
        base.local_out = link_model::unlimited;
        base.local_shares.clear();
    }
    take(base.network_all, seen.network_all);
    take(base.local_all, seen.local_all);
    take(base.gather, seen.gather);
    take(base.pack, seen.pack);
    take(base.scatter, seen.scatter);
    if (seen.shared_cores) {
        for (auto* const all : {&base.network_all, &base.local_all}) {
            *all = 1 / (1 / *all + 1 / base.pack + 1 / base.scatter);
        }
        base.pack = link_model::unlimited;
        base.scatter = link_model::unlimited;
    }
    take(base.network_latency, seen.latency);
    take(base.local_latency, seen.latency);
    return base;
}

}  // namespace weightwire::plan
