#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_balance.hpp>
#include <weightwire/plan/pull_needs.hpp>

/// @file
/// Which holder serves which worker how much.
///
/// A balance needs to know what all workers need, and so does what a node takes once for all of
/// its workers. So each worker reports what it needs, rank 0 of the trainer routes, and each worker
/// gets its own row; the rest of its plan it makes alone. A worker that has to plan without the
/// others takes `assumed_route`, which everybody computes alike.
///
/// A trainer rank has a network interface of its own; bytes within a node do not pass through it.

namespace weightwire::plan {

/// A node: ranks with equal numbers reach each other without the network.
using node_id = std::uint64_t;

/// Where the ranks are, by rank.
struct places {
    std::vector<node_id> trainers{};
    std::vector<node_id> workers{};
};

/// Numbers for names of nodes, such as host and boot ids; equal names have equal numbers.
[[nodiscard]] inline std::vector<node_id> node_numbers(std::span<const std::string> names) {
    std::map<std::string_view, node_id> known;
    std::vector<node_id> numbers;
    numbers.reserve(names.size());
    for (const auto& name : names) {
        numbers.push_back(known.emplace(name, known.size()).first->second);
    }
    return numbers;
}

/// How to route.
struct routing_options {
    /// What every worker of a node needs is taken by one of them, from whom the others have it.
    bool node_once = true;
    bool prefer_same_node = true;  ///< a holder on the worker's node before all others
    /// Smallest piece that one parameter's bytes are cut into among holders.
    std::uint64_t least_split_bytes = std::uint64_t{1} << 20U;
};

/// From whom a worker takes what the holders of a class have. Bytes are proportions.
struct class_shares {
    std::size_t holder_class = 0;
    std::vector<owner_share> shares{};
    friend bool operator==(const class_shares&, const class_shares&) = default;
};

/// A piece of what every worker of a node needs.
struct shared_piece {
    std::size_t position = 0;
    /// Elements `[begin, end)` of what is read of the parameter, in packed order.
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    int ingester = 0;  ///< the worker that takes it for the node
    int owner = 0;     ///< from this trainer rank
    friend constexpr bool operator==(const shared_piece&, const shared_piece&) = default;
};

/// What a worker needs to know of the routing.
struct worker_route {
    int worker = 0;
    std::uint64_t least_split_bytes = 1;  ///< of `routing_options`
    std::vector<class_shares> classes{};  ///< ascending; for what it takes for itself
    std::vector<shared_piece> shared{};   ///< ascending; equal for all workers of a node
    friend bool operator==(const worker_route&, const worker_route&) = default;
};

namespace detail {
class router;
}

/// The routing of all workers.
class routing {
public:
    [[nodiscard]] const worker_route& of(int worker) const {
        return rows_.at(static_cast<std::size_t>(worker));
    }
    [[nodiscard]] std::size_t workers() const noexcept { return rows_.size(); }
    /// Bytes that each trainer rank sends over the network, and within its node.
    [[nodiscard]] std::span<const std::uint64_t> owner_bytes() const& noexcept { return remote_; }
    std::span<const std::uint64_t> owner_bytes() const&& = delete;
    [[nodiscard]] std::span<const std::uint64_t> owner_local_bytes() const& noexcept {
        return local_;
    }
    std::span<const std::uint64_t> owner_local_bytes() const&& = delete;
    /// However the same needs were routed, the busiest trainer rank would send at least so many
    /// bytes over the network.
    [[nodiscard]] std::uint64_t optimum_bytes() const noexcept { return bound_; }

private:
    friend class detail::router;

    std::vector<worker_route> rows_;
    std::vector<std::uint64_t> remote_;
    std::vector<std::uint64_t> local_;
    std::uint64_t bound_ = 0;
};

namespace detail {

/// Makes a routing.
class router {
public:
    router(const manifest& parameters, const ownership& owners, const places& where,
           const routing_options& options)
        : parameters_{parameters}, owners_{owners}, where_{where}, options_{options} {
        if (where.trainers.size() != static_cast<std::size_t>(owners.ranks())) {
            throw usage_error{"there are " + std::to_string(owners.ranks()) +
                                  " trainer ranks and places of " +
                                  std::to_string(where.trainers.size()),
                              {.phase = phase::plan}};
        }
        for (std::size_t w = 0; w < where.workers.size(); ++w) {
            nodes_[where.workers[w]].push_back(w);
        }
        for (std::size_t t = 0; t < where.trainers.size(); ++t) {
            trainers_of_[where.trainers[t]].push_back(static_cast<int>(t));
        }
        made_.rows_.resize(where.workers.size());
        taken_.resize(where.workers.size());
        for (std::size_t w = 0; w < where.workers.size(); ++w) {
            made_.rows_[w].worker = static_cast<int>(w);
            made_.rows_[w].least_split_bytes = options.least_split_bytes;
        }
    }

    void add_needs(std::span<const needs_report> reports);
    void add_equal_needs();
    [[nodiscard]] routing finish() &&;

private:
    using shares_of = std::vector<owner_share>;

    /// A worker's bytes of a class, for itself or for its node.
    struct taking {
        std::uint64_t own = 0;
        std::uint64_t for_node = 0;
    };
    struct shared_need {
        std::size_t position;
        std::uint64_t bytes;
    };

    [[nodiscard]] std::vector<int> local_holders(node_id node, std::size_t of_class) const;
    void require_report(const needs_report& report, int worker) const;
    [[nodiscard]] std::vector<shared_need> shared_by(node_id node,
                                                     std::span<const std::size_t> members,
                                                     std::span<const needs_report> reports) const;
    void share_ingest(std::span<const std::size_t> members, std::span<const shared_need> shared);
    void route_within_nodes();
    void route_over_network();
    void deal_shared();

    const manifest& parameters_;
    const ownership& owners_;
    const places& where_;
    routing_options options_;
    std::map<node_id, std::vector<std::size_t>> nodes_;   // workers of each
    std::map<node_id, std::vector<int>> trainers_of_;     // trainer ranks of each
    std::vector<std::map<std::size_t, taking>> taken_;    // of each worker, by class
    std::map<node_id, std::vector<shared_need>> shared_;  // of each node
    /// Of each worker, by class: whom it asks for its node.
    std::map<std::pair<std::size_t, std::size_t>, shares_of> ingest_;
    routing made_;
};

/// Walks along what holders serve, so that takers one after the other have few holders each.
class share_line {
public:
    explicit share_line(std::span<const owner_share> shares) : shares_{shares} {}

    /// The next `bytes`.
    [[nodiscard]] std::vector<owner_share> take(std::uint64_t bytes) {
        std::vector<owner_share> taken;
        while (bytes > 0 && at_ < shares_.size()) {
            const auto part = std::min(bytes, shares_[at_].bytes - used_);
            if (part > 0) {
                taken.push_back({shares_[at_].owner, part});
            }
            bytes -= part;
            used_ += part;
            if (used_ == shares_[at_].bytes) {
                ++at_;
                used_ = 0;
            }
        }
        return taken;
    }

private:
    std::span<const owner_share> shares_;
    std::size_t at_ = 0;
    std::uint64_t used_ = 0;
};

inline std::vector<int> router::local_holders(node_id node, std::size_t of_class) const {
    std::vector<int> both;
    const auto here = trainers_of_.find(node);
    if (options_.prefer_same_node && here != trainers_of_.end()) {
        std::ranges::set_intersection(here->second, owners_.classes()[of_class].holders,
                                      std::back_inserter(both));
    }
    return both;
}

inline void router::require_report(const needs_report& report, int worker) const {
    std::size_t next = 0;
    for (const auto& one : report.needs) {
        const bool inside = one.position >= next && one.position < parameters_.size();
        const auto item = inside ? item_bytes_of(parameters_[one.position]) : 0;
        if (item == 0 || one.bytes == 0 || one.bytes % item != 0 ||
            one.bytes > parameters_[one.position].byte_size()) {
            throw mismatch_error{
                "worker " + std::to_string(worker) + " says that it needs " +
                    std::to_string(one.bytes) + " bytes of position " +
                    std::to_string(one.position) +
                    ", which the trainer's list does not have so or not here; "
                    "init again with one list",
                {.phase = phase::plan,
                 .tensor = inside ? parameters_[one.position].name : std::string{}}};
        }
        next = one.position + 1;
    }
}

inline std::vector<router::shared_need> router::shared_by(
    node_id node, std::span<const std::size_t> members,
    std::span<const needs_report> reports) const {
    std::vector<shared_need> shared;
    if (!options_.node_once || members.size() < 2) {
        return shared;
    }
    std::map<std::size_t, bool> local;  // by class
    std::vector<std::size_t> next(members.size(), 0);
    for (const auto& one : reports[members[0]].needs) {
        const bool by_all = std::ranges::all_of(members, [&](const std::size_t& w) {
            auto& at = next[static_cast<std::size_t>(&w - members.data())];
            const auto& needs = reports[w].needs;
            while (at < needs.size() && needs[at].position < one.position) {
                ++at;
            }
            return at < needs.size() && needs[at] == one;
        });
        if (!by_all) {
            continue;
        }
        const auto of_class = owners_.class_of(one.position);
        const auto [found, fresh] = local.emplace(of_class, false);
        if (fresh) {
            found->second = !local_holders(node, of_class).empty();
        }
        if (!found->second) {
            shared.push_back({one.position, one.bytes});
        }
    }
    return shared;
}

/// Shares what a node takes once among its workers, so that all take about as many bytes.
inline void router::share_ingest(std::span<const std::size_t> members,
                                 std::span<const shared_need> shared) {
    std::map<std::size_t, std::uint64_t> by_class;
    std::uint64_t total = 0;
    for (const auto& one : shared) {
        by_class[owners_.class_of(one.position)] += one.bytes;
        total += one.bytes;
    }
    std::vector<demand> demands;  // here the workers are the holders
    std::vector<int> all(members.size());
    for (std::size_t m = 0; m < members.size(); ++m) {
        all[m] = static_cast<int>(m);
        std::uint64_t own = 0;
        for (const auto& [of_class, bytes] : taken_[members[m]]) {
            own += bytes.own;
        }
        demands.push_back({own, {all[m]}});
    }
    demands.push_back({total, all});
    const auto balanced = balancer::balance(std::move(demands), members.size());
    std::vector<std::uint64_t> weights;
    for (const auto& share : balanced.shares.back()) {
        weights.push_back(share.bytes);
    }
    for (const auto& [of_class, bytes] : by_class) {
        const auto parts = in_proportion(bytes, weights);
        for (std::size_t m = 0; m < members.size(); ++m) {
            taken_[members[m]][of_class].for_node += parts[m];
        }
    }
}

inline void router::add_needs(std::span<const needs_report> reports) {
    if (reports.size() != where_.workers.size()) {
        throw usage_error{"there are " + std::to_string(where_.workers.size()) +
                              " workers and reports of " + std::to_string(reports.size()),
                          {.phase = phase::plan}};
    }
    for (std::size_t w = 0; w < reports.size(); ++w) {
        require_report(reports[w], static_cast<int>(w));
    }
    for (const auto& [node, members] : nodes_) {
        auto shared = shared_by(node, members, reports);
        for (const auto w : members) {
            auto skip = shared.begin();
            for (const auto& one : reports[w].needs) {
                if (skip != shared.end() && skip->position == one.position) {
                    ++skip;
                } else {
                    taken_[w][owners_.class_of(one.position)].own += one.bytes;
                }
            }
        }
        if (!shared.empty()) {
            share_ingest(members, shared);
            shared_[node] = std::move(shared);
        }
    }
}

inline void router::add_equal_needs() {
    for (auto& of_worker : taken_) {
        for (std::size_t c = 0; c < owners_.classes().size(); ++c) {
            // A class without bytes has an owner too: an assumption may be wrong.
            of_worker[c].own = std::max<std::uint64_t>(owners_.classes()[c].bytes, 1);
        }
    }
}

inline void router::route_within_nodes() {
    std::vector<demand> demands;
    std::vector<std::pair<const std::vector<std::size_t>*, std::size_t>> whose;
    for (const auto& [node, members] : nodes_) {
        std::map<std::size_t, std::uint64_t> by_class;
        for (const auto w : members) {
            for (const auto& [of_class, bytes] : taken_[w]) {
                by_class[of_class] += bytes.own;
            }
        }
        for (const auto& [of_class, bytes] : by_class) {
            auto holders = local_holders(node, of_class);
            if (!holders.empty()) {
                demands.push_back({bytes, std::move(holders)});
                whose.emplace_back(&members, of_class);
            }
        }
    }
    auto balanced = balancer::balance(std::move(demands), where_.trainers.size());
    for (std::size_t i = 0; i < whose.size(); ++i) {
        const auto [members, of_class] = whose[i];
        share_line line{balanced.shares[i]};
        for (const auto w : *members) {
            const auto found = taken_[w].find(of_class);
            if (found != taken_[w].end() && found->second.own > 0) {
                made_.rows_[w].classes.push_back({of_class, line.take(found->second.own)});
                found->second.own = 0;
            }
        }
    }
    made_.local_ = std::move(balanced.loads);
}

inline void router::route_over_network() {
    std::vector<demand> demands(owners_.classes().size());
    std::vector<std::vector<std::size_t>> takers(demands.size());
    for (std::size_t c = 0; c < demands.size(); ++c) {
        demands[c].holders = owners_.classes()[c].holders;
    }
    for (std::size_t w = 0; w < taken_.size(); ++w) {
        for (const auto& [of_class, bytes] : taken_[w]) {
            demands[of_class].bytes += bytes.own + bytes.for_node;
            takers[of_class].push_back(w);
        }
    }
    auto balanced = balancer::balance(std::move(demands), where_.trainers.size());
    for (std::size_t c = 0; c < takers.size(); ++c) {
        share_line line{balanced.shares[c]};
        for (const auto w : takers[c]) {
            const auto& bytes = taken_[w].at(c);
            if (bytes.own > 0) {
                made_.rows_[w].classes.push_back({c, line.take(bytes.own)});
            }
            if (bytes.for_node > 0) {
                ingest_[{w, c}] = line.take(bytes.for_node);
            }
        }
    }
    made_.remote_ = std::move(balanced.loads);
    made_.bound_ = balanced.bound;
}

/// Cuts what a node takes once into pieces of one worker and one owner each.
inline void router::deal_shared() {
    struct taker {
        int ingester;
        int owner;
    };
    for (const auto& [node, shared] : shared_) {
        const auto& members = nodes_.at(node);
        std::map<std::size_t, std::pair<std::vector<taker>, dealer>> of_class;
        std::vector<shared_piece> pieces;
        for (const auto& [position, bytes] : shared) {
            const auto c = owners_.class_of(position);
            auto found = of_class.find(c);
            if (found == of_class.end()) {
                std::vector<taker> takers;
                std::vector<std::uint64_t> weights;
                for (const auto w : members) {
                    for (const auto& share : ingest_[{w, c}]) {
                        takers.push_back({static_cast<int>(w), share.owner});
                        weights.push_back(share.bytes);
                    }
                }
                found = of_class
                            .emplace(
                                c, std::pair{std::move(takers), dealer{std::move(weights),
                                                                       options_.least_split_bytes}})
                            .first;
            }
            auto& [takers, dealer] = found->second;
            const auto item = item_bytes_of(parameters_[position]);
            const auto granule =
                item * std::bit_floor(std::clamp<std::uint64_t>(bytes / item / 256, 1, 1U << 15U));
            for (const auto& piece : dealer.deal(
                     bytes, [&](std::uint64_t wanted) { return wanted - wanted % granule; })) {
                pieces.push_back({position, piece.begin / item, piece.end / item,
                                  takers[piece.taker].ingester, takers[piece.taker].owner});
            }
        }
        for (const auto w : members) {
            made_.rows_[w].shared = pieces;
        }
    }
}

inline routing router::finish() && {
    route_within_nodes();
    route_over_network();
    deal_shared();
    for (auto& row : made_.rows_) {
        std::ranges::stable_sort(row.classes, {}, &class_shares::holder_class);
    }
    return std::move(made_);
}

}  // namespace detail

/// Routes all workers: balances the bytes that trainer ranks send over the network, each by itself,
/// prefers holders on the worker's node, and takes once for a node what all its workers need and no
/// rank of the trainer there holds. The same arguments give the same routing.
///
/// @param reports of every worker, by rank.
/// @throws usage_error places or reports are not as many as ranks.
/// @throws mismatch_error a report names what the list does not have; names worker and parameter.
[[nodiscard]] inline routing route(const manifest& parameters, const ownership& owners,
                                   const places& where, std::span<const needs_report> reports,
                                   const routing_options& options = {}) {
    detail::router made{parameters, owners, where, options};
    made.add_needs(reports);
    return std::move(made).finish();
}

/// The row of one worker, as if every worker needed equally much of every parameter. Nothing is
/// taken once for a node, since that needs reports.
/// @throws usage_error places are not as many as ranks, or there is no such worker.
[[nodiscard]] inline worker_route assumed_route(const manifest& parameters, const ownership& owners,
                                                const places& where, int worker,
                                                const routing_options& options = {}) {
    if (worker < 0 || static_cast<std::size_t>(worker) >= where.workers.size()) {
        throw usage_error{"there is no worker " + std::to_string(worker) + " among " +
                              std::to_string(where.workers.size()) + " places",
                          {.phase = phase::plan}};
    }
    detail::router made{parameters, owners, where, options};
    made.add_equal_needs();
    return std::move(made).finish().of(worker);
}

}  // namespace weightwire::plan
