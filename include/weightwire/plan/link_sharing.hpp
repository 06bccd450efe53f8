#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

/// @file
/// How transfers share links.

namespace weightwire::plan {

/// Bytes on their way over three links.
struct flow {
    std::array<std::size_t, 3> links{};
    double weight = 1;  ///< capacity of each link that a byte takes
    double most = 0;    ///< bytes per second that it can use at most
    double rate = 0;    ///< bytes per second that it gets
};

/// Links with capacities in bytes per second. A link is shared equally by the flows that use it,
/// and what some of them cannot use, because another link holds them up, goes to the others.
class link_sharing {
public:
    link_sharing() = default;
    explicit link_sharing(std::vector<double> capacity)
        : capacity_{std::move(capacity)}, used_(capacity_.size(), 0), users_(capacity_.size(), 0) {}

    [[nodiscard]] double capacity(std::size_t link) const noexcept { return capacity_[link]; }

    /// Gives those of `flows` that `active` lists their rates. No link carries more than it can.
    void share(std::vector<flow>& flows, std::span<const std::size_t> active) {
        std::ranges::fill(used_, 0.0);
        open_.assign(active.begin(), active.end());
        gain_.resize(flows.size());
        for (const auto i : open_) {
            flows[i].rate = 0;
        }
        constexpr int most_passes = 8;
        for (int pass = 0; pass < most_passes && !open_.empty(); ++pass) {
            each_link(flows, [&](const flow&, std::size_t link) { users_[link] = 0; });
            each_link(flows,
                      [&](const flow& one, std::size_t link) { users_[link] += one.weight; });
            for (const auto i : open_) {
                auto more = flows[i].most - flows[i].rate;
                for (const auto link : flows[i].links) {
                    more = std::min(more, (capacity_[link] - used_[link]) / users_[link]);
                }
                gain_[i] = std::max(more, 0.0);
            }
            for (const auto i : open_) {
                flows[i].rate += gain_[i];
                for (const auto link : flows[i].links) {
                    used_[link] += gain_[i] * flows[i].weight;
                }
            }
            // Whoever gained next to nothing meets a full link, or needs no more.
            std::erase_if(open_, [&](std::size_t i) { return gain_[i] < 0.01 * flows[i].rate; });
        }
    }

private:
    template <class Visit>
    void each_link(const std::vector<flow>& flows, Visit visit) const {
        for (const auto i : open_) {
            for (const auto link : flows[i].links) {
                visit(flows[i], link);
            }
        }
    }

    std::vector<double> capacity_;
    std::vector<double> used_;
    std::vector<double> users_;      // weights of the flows that want more
    std::vector<double> gain_;       // of each flow in a pass
    std::vector<std::size_t> open_;  // flows that want more
};

}  // namespace weightwire::plan
