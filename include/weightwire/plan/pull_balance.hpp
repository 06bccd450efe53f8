#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

/// @file
/// Shares out bytes: among those that hold them so that nobody has much more than needed, and among
/// takers in given proportions as things come by.

namespace weightwire::plan {

/// Bytes that one holder serves.
struct owner_share {
    int owner = 0;  ///< trainer rank
    std::uint64_t bytes = 0;
    friend constexpr bool operator==(const owner_share&, const owner_share&) = default;
};

namespace detail {

/// Bytes of which each may come from any of these holders.
struct demand {
    std::uint64_t bytes = 0;
    std::vector<int> holders{};  ///< ascending, at least one
};

/// Who serves how much of each demand.
struct balanced {
    std::vector<std::vector<owner_share>> shares{};  ///< one list a demand, as its holders
    std::vector<std::uint64_t> loads{};              ///< bytes of each holder
    std::uint64_t bound = 0;  ///< no sharing gives the busiest holder fewer bytes
};

/// Shares demands among their holders so that the busiest has as few bytes as possible, up to a
/// thousandth, and those that could have fewer have.
///
/// Each demand in turn is poured over what its holders have of the others, lowest first. That
/// lowers the sum of the squares, which has no other minimum than the balanced one. Holders with
/// the highest loads show how far off it is: what nobody else holds they have to serve.
class balancer {
public:
    /// @param holders are numbered from 0.
    [[nodiscard]] static balanced balance(std::vector<demand> demands, std::size_t holders) {
        balancer made{std::move(demands), holders};
        constexpr int most_sweeps = 4000;
        for (int sweep = 0; sweep < most_sweeps; ++sweep) {
            const auto moved = made.sweep();
            made.find_bound();
            const auto busiest = std::ranges::max(made.result_.loads);
            const bool settled = moved <= made.total_ / 4096;
            if (moved == 0 ||
                (settled && busiest <= made.result_.bound + made.result_.bound / 1000)) {
                break;
            }
        }
        return std::move(made.result_);
    }

private:
    balancer(std::vector<demand> demands, std::size_t holders) : demands_{std::move(demands)} {
        result_.loads.assign(std::max<std::size_t>(holders, 1), 0);
        for (std::size_t i = 0; i < demands_.size(); ++i) {
            auto& shares = result_.shares.emplace_back();
            for (const auto holder : demands_[i].holders) {
                shares.push_back({holder, 0});
            }
            total_ += demands_[i].bytes;
            order_.push_back(i);
        }
        // Those without a choice first.
        std::ranges::stable_sort(order_, {},
                                 [&](std::size_t i) { return demands_[i].holders.size(); });
    }
    [[nodiscard]] std::uint64_t& load(int holder) {
        return result_.loads[static_cast<std::size_t>(holder)];
    }
    /// Pours every demand once; returns the bytes that changed their holder.
    std::uint64_t sweep() {
        std::uint64_t moved = 0;
        for (const auto i : order_) {
            auto& shares = result_.shares[i];
            for (const auto& share : shares) {
                load(share.owner) -= share.bytes;
            }
            moved += pour(demands_[i].bytes, shares);
            for (const auto& share : shares) {
                load(share.owner) += share.bytes;
            }
        }
        return moved;
    }
    std::uint64_t pour(std::uint64_t bytes, std::vector<owner_share>& shares) {
        lowest_.assign(shares.size(), 0);
        for (std::size_t k = 0; k < shares.size(); ++k) {
            lowest_[k] = k;
        }
        std::ranges::stable_sort(lowest_, {}, [&](std::size_t k) { return load(shares[k].owner); });
        // The first `count` holders are filled up to one level.
        std::size_t count = 1;
        std::uint64_t left = bytes;
        auto level = load(shares[lowest_[0]].owner);
        for (; count < shares.size(); ++count) {
            const auto next = load(shares[lowest_[count]].owner);
            if ((next - level) > left / count) {
                break;
            }
            left -= (next - level) * count;
            level = next;
        }
        std::uint64_t moved = 0;
        for (std::size_t k = 0; k < shares.size(); ++k) {
            auto& share = shares[lowest_[k]];
            const auto before = share.bytes;
            share.bytes =
                k < count ? level - load(share.owner) + left / count + (k < left % count ? 1 : 0)
                          : 0;
            moved += share.bytes > before ? share.bytes - before : 0;
        }
        return moved;
    }
    void find_bound() {
        const auto& loads = result_.loads;
        std::vector<std::size_t> busiest(loads.size());
        for (std::size_t i = 0; i < busiest.size(); ++i) {
            busiest[i] = i;
        }
        std::ranges::stable_sort(busiest,
                                 [&](std::size_t a, std::size_t b) { return loads[a] > loads[b]; });
        std::vector<std::size_t> place(loads.size());
        for (std::size_t i = 0; i < busiest.size(); ++i) {
            place[busiest[i]] = i;
        }
        std::vector<std::uint64_t> only(loads.size(), 0);  // by the last holder that comes
        for (const auto& one : demands_) {
            std::size_t last = 0;
            for (const auto holder : one.holders) {
                last = std::max(last, place[static_cast<std::size_t>(holder)]);
            }
            only[last] += one.bytes;
        }
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < only.size(); ++i) {
            sum += only[i];
            result_.bound = std::max(result_.bound, sum / (i + 1) + (sum % (i + 1) == 0 ? 0 : 1));
        }
    }

    std::vector<demand> demands_;
    std::vector<std::size_t> order_;
    std::vector<std::size_t> lowest_;
    balanced result_;
    std::uint64_t total_ = 0;
};

/// `total` in proportion to `weights`; whole bytes that add up to it. Equal parts where all weights
/// are 0.
[[nodiscard]] inline std::vector<std::uint64_t> in_proportion(
    std::uint64_t total, std::span<const std::uint64_t> weights) {
    long double sum = 0;
    for (const auto weight : weights) {
        sum += static_cast<long double>(weight);
    }
    std::vector<std::uint64_t> parts;
    long double reached = 0;
    std::uint64_t given = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        reached += sum > 0 ? static_cast<long double>(weights[i]) / sum
                           : 1 / static_cast<long double>(weights.size());
        const auto upto =
            i + 1 == weights.size()
                ? total
                : std::min(total,
                           static_cast<std::uint64_t>(static_cast<long double>(total) * reached));
        parts.push_back(upto - std::min(given, upto));
        given = std::max(given, upto);
    }
    return parts;
}

/// Deals what comes by to takers in given proportions, so that at every moment each has about its
/// part of what has come: a holder that serves a third of a worker's bytes serves a third of every
/// layer's.
class dealer {
public:
    /// What a taker gets of one thing: its bytes `[begin, end)`.
    struct piece {
        std::size_t taker;
        std::uint64_t begin;
        std::uint64_t end;
    };

    /// @param least smallest piece that a thing is cut into.
    dealer(std::vector<std::uint64_t> weights, std::uint64_t least)
        : weights_{std::move(weights)},
          given_(weights_.size(), 0),
          least_{std::max<std::uint64_t>(least, 1)} {
        for (const auto weight : weights_) {
            sum_ += static_cast<double>(weight);
        }
    }

    /// Deals a thing of `bytes`, in order and without gaps.
    /// @param cut `cut(wanted)` is a byte at or below `wanted` where the thing may be cut.
    template <std::invocable<std::uint64_t> Cut>
    [[nodiscard]] std::vector<piece> deal(std::uint64_t bytes, Cut&& cut) {
        dealt_ += static_cast<double>(bytes);
        std::vector<double> due(weights_.size());
        double wanted = 0;
        std::size_t most = 0;
        for (std::size_t k = 0; k < due.size(); ++k) {
            due[k] = dealt_ * (sum_ > 0 ? static_cast<double>(weights_[k]) / sum_ : 0.0) -
                     static_cast<double>(given_[k]);
            most = due[k] > due[most] ? k : most;
            wanted += due[k] >= static_cast<double>(least_) ? due[k] : 0.0;
        }
        std::vector<piece> pieces;
        double reached = 0;
        std::uint64_t begin = 0;
        for (std::size_t k = 0; bytes / 2 >= least_ && k < due.size(); ++k) {
            if (due[k] < static_cast<double>(least_)) {
                continue;
            }
            reached += due[k];
            const auto upto = static_cast<double>(bytes) * (reached / wanted);
            const auto end = reached >= wanted ? bytes
                                               : std::min<std::uint64_t>(
                                                     bytes, cut(static_cast<std::uint64_t>(upto)));
            if (end > begin) {
                pieces.push_back({k, begin, end});
                begin = end;
            }
        }
        if (pieces.empty()) {
            pieces.push_back({most, 0, bytes});
        }
        pieces.back().end = bytes;
        for (const auto& one : pieces) {
            given_[one.taker] += one.end - one.begin;
        }
        return pieces;
    }

private:
    std::vector<std::uint64_t> weights_;
    std::vector<std::uint64_t> given_;
    std::uint64_t least_;
    double sum_ = 0;
    double dealt_ = 0;
};

}  // namespace detail

}  // namespace weightwire::plan
