#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/control_channel.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/wire/pull_node_codec.hpp>
#include <weightwire/wire/pull_plan_codec.hpp>

/// @file
/// Trainer rank 0's part in planning: who takes what from whom, and where node peers find each
/// other's memory.

namespace weightwire::sharded_pull {

/// Takes what the workers say of themselves, routes when all have come, and brings those that take
/// something for their node together with those that read it there. Not thread-safe; what has to be
/// told goes to a `say(worker, frame_kind, text)` that the caller brings; workers count from 0.
///
/// A worker that comes back with the memory that its node peers have opened goes on as before. One
/// that has other memory, since its process is another, gets a row for itself alone, in which it
/// takes nothing for its node, and owners then serve its node peers directly. That lasts until the
/// trainer's next init, as does a row for a worker that cannot open the memory of a node peer that
/// is there. One that has died is left out: owners serve its share to the others.
class route_desk {
public:
    /// From now on workers' needs are taken, until all `workers` have come.
    /// @param machines of the trainer ranks. @param node_once whether nodes take once what their
    /// workers need alike. @param parameters outlives this object.
    void begin(const manifest& parameters, plan::ownership owners,
               std::vector<std::string> machines, std::size_t workers, bool node_once) {
        parameters_ = &parameters;
        owners_.emplace(std::move(owners));
        machines_ = std::move(machines);
        node_once_ = node_once;
        workers_.assign(workers, {});
        routed_ = false;
    }
    /// Whether every worker was told its row.
    [[nodiscard]] bool routed() const noexcept { return routed_; }
    /// Whether also all have shown the memory in which they land something for their node.
    [[nodiscard]] bool settled() const {
        return routed_ &&
               std::ranges::all_of(workers_, [](const worker& w) { return w.landing.has_value(); });
    }
    /// The first worker that did not come, or else has not shown its memory.
    [[nodiscard]] std::size_t first_missing() const {
        return static_cast<std::size_t>(
            std::ranges::find_if(
                workers_,
                [&](const worker& w) { return routed_ ? !w.landing : !w.needs.has_value(); }) -
            workers_.begin());
    }

    /// Told its row when all have come, and at once when it comes back. What routing throws fails
    /// the opening, not only the worker that came last.
    /// @throws protocol_error there is no such worker. @throws what routing throws.
    template <class Say>
    void take_needs(std::size_t from, wire::worker_needs said, Say say) {
        if (!owners_ || from >= workers_.size()) {
            throw protocol_error{"this trainer rank routes for " + std::to_string(workers_.size()) +
                                 " worker ranks, none of which is rank " +
                                 std::to_string(from + 1)};
        }
        auto& known = workers_[from];
        known.gone = false;
        const bool shows = std::exchange(said.shows, false);
        const int without = std::exchange(said.without, -1);
        const bool same = known.needs && *known.needs == said && (shows || !gives(from)) &&
                          (without < 0 || is_gone(static_cast<std::size_t>(without)));
        if (same && without >= 0) {
            // When it is back, its landing memory is another than this: it reads for itself alone.
            workers_[static_cast<std::size_t>(without)].landing =
                none_of(static_cast<std::size_t>(without));
        }
        auto before = std::exchange(known.needs, std::move(said));
        if (!routed_) {
            if (std::ranges::all_of(workers_,
                                    [](const worker& w) { return w.needs.has_value(); })) {
                route_all();
                for (std::size_t w = 0; w < workers_.size(); ++w) {
                    if (!workers_[w].gone) {  // who comes back says its needs again
                        say(w, frame_kind::row, wire::encode(workers_[w].row));
                    }
                }
            }
            return;
        }
        if (!same) {
            try {
                route_alone(from);
            } catch (...) {
                known.needs = std::move(before);  // its row is of these
                throw;
            }
        }
        known.told = false;
        known.returns = gives(from);
        say(from, frame_kind::row, wire::encode(known.row));
        answer(say);
    }
    /// One that shows other memory than before is told that it has none: others have opened what
    /// it showed first.
    /// @throws protocol_error not the form, or the worker takes nothing for its node.
    template <class Say>
    void take_landing(std::size_t from, std::string_view body, Say say) {
        auto all = wire::decode_worker_landings(body, workers_.size());
        if (all.size() != 1 || all[0].worker != static_cast<int>(from) || !routed_ ||
            !gives(from)) {
            throw protocol_error{
                "a worker rank shows landing memory, and takes nothing for its node"};
        }
        auto& known = workers_[from];
        known.returns = false;
        if (known.landing && *known.landing != all[0]) {
            known.landing = none_of(from);
            known.told = true;
            say(from, frame_kind::landings, wire::encode(std::vector{none_of(from)}));
            return;
        }
        known.landing = std::move(all[0]);
        answer(say);
    }
    /// The worker's connection has ended. Who waits for its landing memory is told that there is
    /// none.
    template <class Say>
    void leave(std::size_t from, Say say) {
        if (from >= workers_.size()) {
            return;
        }
        workers_[from].gone = true;
        if (routed_ && !workers_[from].landing) {
            workers_[from].landing = none_of(from);
            answer(say);
        }
    }

private:
    struct worker {
        std::optional<wire::worker_needs> needs{};
        plan::worker_route row{};
        std::optional<wire::worker_landing> landing{};
        bool told = false;       ///< the landings that its row names
        bool returns = false;    ///< and has to show its landing memory again
        bool gone = false;       ///< its connection has ended
        std::set<int> givers{};  ///< node peers from whom its row takes something
    };

    [[nodiscard]] bool is_gone(std::size_t w) const {
        return w < workers_.size() && workers_[w].gone;
    }
    [[nodiscard]] static wire::worker_landing none_of(std::size_t w) {
        return {.worker = static_cast<int>(w), .address = {}, .handle = {}, .bytes = 0};
    }
    /// Whether its row says that it takes something for its node.
    [[nodiscard]] bool gives(std::size_t w) const {
        return std::ranges::any_of(workers_[w].row.shared, [w](const plan::shared_piece& piece) {
            return piece.ingester == static_cast<int>(w);
        });
    }
    /// The node peers from whom its row takes something; ascending.
    [[nodiscard]] std::set<int> givers_of(std::size_t w) const {
        std::set<int> made;
        for (const auto& piece : workers_[w].row.shared) {
            if (piece.ingester != static_cast<int>(w)) {
                made.insert(piece.ingester);
            }
        }
        return made;
    }
    /// A worker without a node's name, or that wants to be alone, shares its name with nobody.
    [[nodiscard]] std::string node_of(std::size_t w) const {
        const auto& needs = *workers_[w].needs;
        return needs.alone || needs.node.empty() ? "\n" + std::to_string(w) : needs.node;
    }

    void route_all() {
        auto names = machines_;
        std::vector<plan::needs_report> reports;
        for (std::size_t w = 0; w < workers_.size(); ++w) {
            names.push_back(node_of(w));
            reports.push_back(workers_[w].needs->report);
        }
        const auto numbers = plan::node_numbers(names);
        const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(machines_.size());
        const plan::places places{.trainers = {numbers.begin(), middle},
                                  .workers = {middle, numbers.end()}};
        const auto made =
            plan::route(*parameters_, *owners_, places, reports, {.node_once = node_once_});
        for (std::size_t w = 0; w < workers_.size(); ++w) {
            workers_[w].row = made.of(static_cast<int>(w));
            workers_[w].landing =
                gives(w) && !workers_[w].gone ? std::nullopt : std::optional{none_of(w)};
            workers_[w].givers = givers_of(w);
            workers_[w].told = false;
            workers_[w].returns = false;
        }
        routed_ = true;
    }
    /// The others keep their rows.
    void route_alone(std::size_t w) {
        auto names = machines_;
        names.push_back(workers_[w].needs->node);
        const auto numbers = plan::node_numbers(names);
        const plan::places places{.trainers = {numbers.begin(), numbers.end() - 1},
                                  .workers = {numbers.back()}};
        const std::span one{&workers_[w].needs->report, 1};
        workers_[w].row =
            plan::route(*parameters_, *owners_, places, one, {.node_once = false}).of(0);
        workers_[w].row.worker = static_cast<int>(w);
        workers_[w].givers.clear();
        workers_[w].landing = none_of(w);
    }
    /// Tells those who read within their node where, as soon as all that they read from have said.
    template <class Say>
    void answer(Say& say) {
        for (std::size_t w = 0; w < workers_.size(); ++w) {
            // Not before it has shown its own: until then it may still ask to be alone.
            if (workers_[w].told || workers_[w].row.shared.empty() || !workers_[w].landing ||
                workers_[w].returns) {
                continue;
            }
            const auto& givers = workers_[w].givers;
            std::vector<wire::worker_landing> all;
            for (const int giver : givers) {
                if (const auto& known = workers_[static_cast<std::size_t>(giver)].landing) {
                    all.push_back(*known);
                }
            }
            if (all.size() == givers.size()) {
                workers_[w].told = true;
                say(w, frame_kind::landings, wire::encode(all));
            }
        }
    }

    const manifest* parameters_ = nullptr;
    std::optional<plan::ownership> owners_;
    std::vector<std::string> machines_;  ///< of the trainer ranks
    bool node_once_ = false;
    std::vector<worker> workers_;
    bool routed_ = false;
};

}  // namespace weightwire::sharded_pull
