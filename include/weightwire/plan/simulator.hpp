#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/plan/link_model.hpp>
#include <weightwire/plan/link_sharing.hpp>
#include <weightwire/plan/simulation.hpp>
#include <weightwire/plan/traffic.hpp>

/// @file
/// A round of `sharded_pull` over modelled links: who waits for what, and how long it takes.
/// Nothing is random; the same traffic gives the same times.

namespace weightwire::plan {

namespace detail {

/// Runs one round. A chunk is gathered with its group and packed by its owner, then ready, started
/// and received at its reader, then scattered there and freed at the owner.
class round_simulation {
public:
    round_simulation(const traffic& what, const simulation_options& how) : what_{what}, how_{how} {
        require();
        prepare();
    }

    [[nodiscard]] simulation run() && {
        begin();
        while (handle_due()) {
            advance();
        }
        for (std::size_t i = 0; i < streams_.size(); ++i) {
            if (streams_[i].freed < chunks_of(i).size()) {
                throw usage_error{"the simulated round stands still: worker " +
                                      std::to_string(what_.streams[i].to - what_.trainers) +
                                      " waits for a worker that waits for it",
                                  {.phase = phase::plan}};
            }
        }
        for (const auto seconds : made_.worker_seconds) {
            made_.seconds = std::max(made_.seconds, seconds);
        }
        return std::move(made_);
    }

private:
    enum class kind : std::uint8_t { gathered, packed, ready, scattered, freed };
    struct event {
        double time;
        std::uint64_t order;  // of creation: equal times keep it
        kind what;
        std::size_t index;  // of the owner where a group is gathered, else of the stream
        std::size_t chunk;
        bool operator>(const event& other) const noexcept {
            return time != other.time ? time > other.time : order > other.order;
        }
    };
    struct stream_state {
        // Chunks so far.
        std::size_t packed = 0;
        std::size_t ready = 0;
        std::size_t started = 0;
        std::size_t received = 0;
        std::size_t freed = 0;
        double left = 0;  // bytes of the chunk that is on its way
        bool local = false;
        std::vector<std::size_t> children;  // streams that pass its chunks on
        std::vector<std::size_t> holds;     // of each landed chunk: who still needs it
    };
    struct owner_state {
        std::vector<std::size_t> streams;
        std::vector<std::size_t> groups;      // that it sends, ascending
        std::vector<std::size_t> not_packed;  // chunks of each
        std::vector<std::size_t> not_freed;
        std::size_t gathered = 0;  // groups
        std::size_t next = 0;      // stream to pack for
        bool gathering = false;
        bool packing = false;
        std::uint64_t gathered_bytes = 0;
        std::uint64_t arena_bytes = 0;
        std::size_t chunks_left = 0;
    };
    struct worker_state {
        std::vector<std::size_t> streams;
        std::size_t next = 0;                          // stream to start
        std::array<std::uint64_t, 2> landing_bytes{};  // own, and passed on
        bool passes_on = false;
        double scatter_free = 0;  // when the scatter is done with all that it has
    };

    [[nodiscard]] const std::vector<traffic_chunk>& chunks_of(std::size_t stream) const {
        return what_.streams[stream].chunks;
    }
    [[nodiscard]] std::size_t from(std::size_t stream) const {
        return static_cast<std::size_t>(what_.streams[stream].from);
    }
    [[nodiscard]] std::size_t worker_index(std::size_t stream) const {
        return static_cast<std::size_t>(what_.streams[stream].to - what_.trainers);
    }
    [[nodiscard]] bool from_owner(std::size_t stream) const {
        return what_.streams[stream].from < what_.trainers;
    }
    [[nodiscard]] double latency(std::size_t stream) const {
        return streams_[stream].local ? how_.links.local_latency : how_.links.network_latency;
    }
    void after(double delay, kind what, std::size_t index, std::size_t chunk = 0) {
        events_.push({now_ + delay, order_++, what, index, chunk});
    }

    void require() const {
        const auto& links = how_.links;
        for (const auto rate : {links.network, links.network_all, links.local_in, links.local_out,
                                links.local_all, links.gather, links.pack, links.scatter}) {
            if (!(rate > 0)) {
                throw usage_error{"a rate of the link model is not above 0",
                                  {.phase = phase::plan}};
            }
        }
        if (how_.slots < 1 || !(how_.resolution > 0)) {
            throw usage_error{"a round needs at least one slot, and a resolution above 0",
                              {.phase = phase::plan}};
        }
        require_consistent(what_);
    }

    void prepare() {
        const auto ranks = what_.nodes.size();
        made_.loads.resize(ranks);
        owners_.resize(static_cast<std::size_t>(what_.trainers));
        workers_.resize(ranks - owners_.size());
        made_.worker_seconds.resize(workers_.size());
        streams_.resize(what_.streams.size());
        flows_.resize(streams_.size());
        auto nodes = what_.nodes;
        std::ranges::sort(nodes);
        nodes.erase(std::ranges::unique(nodes).begin(), nodes.end());
        // Of each rank network out and in, local out and in; then the network, then the nodes.
        const auto& links = how_.links;
        std::vector<double> capacity;
        for (std::size_t i = 0; i < ranks; ++i) {
            capacity.insert(capacity.end(),
                            {links.network, links.network, links.local_out, links.local_in});
        }
        capacity.push_back(links.network_all);
        capacity.resize(capacity.size() + nodes.size(), links.local_all);
        links_ = link_sharing{std::move(capacity)};
        for (std::size_t i = 0; i < streams_.size(); ++i) {
            const auto to = static_cast<std::size_t>(what_.streams[i].to);
            auto& made = streams_[i];
            made.local = what_.nodes[from(i)] == what_.nodes[to];
            made.holds.assign(chunks_of(i).size(), 0);
            const auto node = static_cast<std::size_t>(
                std::ranges::lower_bound(nodes, what_.nodes[to]) - nodes.begin());
            flows_[i].links = made.local
                                  ? std::array{4 * from(i) + 2, 4 * to + 3, 4 * ranks + 1 + node}
                                  : std::array{4 * from(i), 4 * to + 1, 4 * ranks};
            workers_[worker_index(i)].streams.push_back(i);
            if (from_owner(i)) {
                auto& owner = owners_[from(i)];
                owner.streams.push_back(i);
                owner.chunks_left += chunks_of(i).size();
            } else {
                const auto followed = static_cast<std::size_t>(what_.streams[i].follows);
                streams_[followed].children.push_back(i);
                workers_[worker_index(followed)].passes_on = true;
            }
        }
        for (auto& owner : owners_) {
            prepare_groups(owner);
        }
        quantum_ = busiest_seconds() * how_.resolution;
    }

    void prepare_groups(owner_state& owner) const {
        auto& groups = owner.groups;
        for (const auto stream : owner.streams) {
            for (const auto& chunk : chunks_of(stream)) {
                groups.push_back(chunk.group);
            }
        }
        std::ranges::sort(groups);
        auto count = groups.begin();
        for (auto begin = groups.begin(); begin != groups.end();) {
            const auto end = std::upper_bound(begin, groups.end(), *begin);
            owner.not_packed.push_back(static_cast<std::size_t>(end - begin));
            *count++ = *begin;
            begin = end;
        }
        groups.erase(count, groups.end());
        owner.not_freed = owner.not_packed;
    }
    [[nodiscard]] static std::size_t place_of_group(const owner_state& owner, std::size_t group) {
        return static_cast<std::size_t>(std::ranges::lower_bound(owner.groups, group) -
                                        owner.groups.begin());
    }
    [[nodiscard]] gather_work gather_of(std::size_t o, std::size_t place) const {
        const auto group = owners_[o].groups[place];
        return o < what_.gathers.size() && group < what_.gathers[o].size() ? what_.gathers[o][group]
                                                                           : gather_work{};
    }
    [[nodiscard]] int turn_of(std::size_t o) const {
        return o < what_.turns.size() ? what_.turns[o] : 0;
    }
    /// Bytes of a link's capacity that a byte of the chunk takes.
    [[nodiscard]] double weight_of(std::size_t stream, const traffic_chunk& chunk) const {
        const auto& links = how_.links;
        return 1 / share_at(streams_[stream].local ? links.local_shares : links.network_shares,
                            chunk.block_bytes);
    }
    /// Of the busiest link, if nothing waits for anything.
    [[nodiscard]] double busiest_seconds() const {
        std::vector<double> seconds(4 * what_.nodes.size() + 1 + what_.nodes.size(), 0);
        double most = 1e-9;
        for (std::size_t i = 0; i < streams_.size(); ++i) {
            for (const auto& chunk : chunks_of(i)) {
                for (const auto link : flows_[i].links) {
                    seconds[link] += weight_of(i, chunk) * static_cast<double>(chunk.bytes) /
                                     links_.capacity(link);
                    most = std::max(most, seconds[link]);
                }
            }
        }
        return most;
    }

    void begin() {
        if (!how_.in_place) {
            begin_turn();
            return;
        }
        for (std::size_t i = 0; i < streams_.size(); ++i) {
            for (std::size_t c = 0; from_owner(i) && c < chunks_of(i).size(); ++c) {
                after(latency(i), kind::ready, i, c);
            }
        }
    }
    /// Lets owners begin: all of them, or where they take turns those of the first turn in which
    /// something is left.
    void begin_turn() {
        turn_ = std::numeric_limits<int>::max();
        turn_chunks_ = 0;
        for (std::size_t o = 0; how_.in_turn && o < owners_.size(); ++o) {
            if (const auto left = owners_[o].chunks_left; left > 0 && turn_of(o) <= turn_) {
                turn_chunks_ = left + (turn_of(o) == turn_ ? turn_chunks_ : 0);
                turn_ = turn_of(o);
            }
        }
        for (std::size_t o = 0; o < owners_.size(); ++o) {
            gather_next(o);
        }
    }

    void gather_next(std::size_t o) {
        auto& owner = owners_[o];
        if (owner.gathering || owner.gathered == owner.groups.size() || turn_of(o) > turn_ ||
            (!how_.overlap && owner.gathered > 0 && owner.not_freed[owner.gathered - 1] > 0)) {
            return;
        }
        const auto work = gather_of(o, owner.gathered);
        if (owner.gathered_bytes > 0 && owner.gathered_bytes + work.bytes > how_.look_ahead) {
            return;
        }
        owner.gathering = true;
        owner.gathered_bytes += work.bytes;
        made_.peak_gathered = std::max(made_.peak_gathered, owner.gathered_bytes);
        after(work.seconds, kind::gathered, o);
    }
    void pack_next(std::size_t o) {
        auto& owner = owners_[o];
        for (std::size_t tried = 0; !owner.packing && tried < owner.streams.size(); ++tried) {
            const auto at = (owner.next + tried) % owner.streams.size();
            const auto i = owner.streams[at];
            auto& stream = streams_[i];
            if (stream.packed == chunks_of(i).size() ||
                stream.packed - stream.freed >= how_.slots) {
                continue;
            }
            const auto& chunk = chunks_of(i)[stream.packed];
            if (place_of_group(owner, chunk.group) >= owner.gathered ||
                (owner.arena_bytes > 0 && owner.arena_bytes + chunk.bytes > how_.arena)) {
                continue;
            }
            owner.packing = true;
            owner.next = at + 1;
            owner.arena_bytes += chunk.bytes;
            made_.peak_arena = std::max(made_.peak_arena, owner.arena_bytes);
            after(static_cast<double>(chunk.bytes) / how_.links.pack, kind::packed, i,
                  stream.packed++);
        }
    }
    void read_next(worker_state& worker) {
        const auto count = worker.streams.size();
        const auto first = worker.next++;
        for (std::size_t tried = 0; tried < count; ++tried) {
            const auto i = worker.streams[(first + tried) % count];
            auto& stream = streams_[i];
            if (stream.started == stream.ready || stream.started > stream.received) {
                continue;
            }
            const auto& chunk = chunks_of(i)[stream.started];
            if (!how_.in_place) {
                auto& landed = worker.landing_bytes[stream.children.empty() ? 0 : 1];
                const auto room = how_.landing / (worker.passes_on ? 2 : 1);
                if (landed > 0 && landed + chunk.bytes > room) {
                    continue;
                }
                landed += chunk.bytes;
                made_.peak_landing =
                    std::max(made_.peak_landing, worker.landing_bytes[0] + worker.landing_bytes[1]);
            }
            stream.holds[stream.started++] = 1 + stream.children.size();
            stream.left = static_cast<double>(chunk.bytes);
            flows_[i].weight = weight_of(i, chunk);
            active_.push_back(i);
        }
    }

    /// Handles what is due, and says whether anything is left.
    [[nodiscard]] bool handle_due() {
        while (!events_.empty() && events_.top().time <= now_) {
            const auto due = events_.top();
            events_.pop();
            handle(due);
        }
        return !events_.empty() || !active_.empty();
    }
    void handle(const event& due) {
        const auto i = due.index;
        switch (due.what) {
            case kind::gathered:
                owners_[i].gathering = false;
                ++owners_[i].gathered;
                gather_next(i);
                pack_next(i);
                break;
            case kind::packed: {
                auto& owner = owners_[from(i)];
                const auto place = place_of_group(owner, chunks_of(i)[due.chunk].group);
                owner.packing = false;
                if (--owner.not_packed[place] == 0) {
                    owner.gathered_bytes -= gather_of(from(i), place).bytes;
                    gather_next(from(i));
                }
                after(latency(i), kind::ready, i);
                pack_next(from(i));
                break;
            }
            case kind::ready:
                ++streams_[i].ready;
                read_next(workers_[worker_index(i)]);
                break;
            case kind::scattered:
                placed(i);
                let_go(i, due.chunk);
                break;
            case kind::freed: freed(i, due.chunk); break;
        }
    }
    void placed(std::size_t i) {
        auto& seconds = made_.worker_seconds[worker_index(i)];
        seconds = std::max(seconds, now_);
    }
    /// One fewer needs a landed chunk.
    void let_go(std::size_t i, std::size_t chunk) {
        if (--streams_[i].holds[chunk] == 0 && !how_.in_place) {
            auto& worker = workers_[worker_index(i)];
            worker.landing_bytes[streams_[i].children.empty() ? 0 : 1] -= chunks_of(i)[chunk].bytes;
            read_next(worker);
        }
    }
    void freed(std::size_t i, std::size_t chunk) {
        ++streams_[i].freed;
        if (how_.in_place || !from_owner(i)) {
            return;
        }
        auto& owner = owners_[from(i)];
        owner.arena_bytes -= chunks_of(i)[chunk].bytes;
        --owner.not_freed[place_of_group(owner, chunks_of(i)[chunk].group)];
        --owner.chunks_left;
        gather_next(from(i));
        pack_next(from(i));
        if (how_.in_turn && --turn_chunks_ == 0) {
            begin_turn();
        }
    }
    void received(std::size_t i) {
        auto& stream = streams_[i];
        const auto c = stream.received++;
        const auto bytes = chunks_of(i)[c].bytes;
        auto& out = made_.loads[from(i)];
        auto& in = made_.loads[static_cast<std::size_t>(what_.streams[i].to)];
        (stream.local ? out.local_out : out.network_out) += bytes;
        (stream.local ? in.local_in : in.network_in) += bytes;
        after(latency(i), kind::freed, i, c);
        for (const auto child : stream.children) {
            after(how_.links.local_latency, kind::ready, child);
        }
        if (!from_owner(i)) {
            let_go(static_cast<std::size_t>(what_.streams[i].follows), c);
        }
        auto& worker = workers_[worker_index(i)];
        if (how_.in_place) {
            placed(i);
        } else {
            worker.scatter_free = std::max(worker.scatter_free, now_) +
                                  static_cast<double>(bytes) / how_.links.scatter;
            after(worker.scatter_free - now_, kind::scattered, i, c);
        }
        read_next(worker);
    }

    /// Moves bytes until something happens.
    void advance() {
        ++made_.steps;
        for (const auto i : active_) {
            flows_[i].most = streams_[i].left / quantum_;
        }
        links_.share(flows_, active_);
        double step =
            events_.empty() ? std::numeric_limits<double>::infinity() : events_.top().time - now_;
        for (const auto i : active_) {
            step = std::min(step, streams_[i].left / flows_[i].rate);
        }
        step = active_.empty() ? step : std::max(step, quantum_);
        now_ += step;
        done_.clear();
        std::erase_if(active_, [&](std::size_t i) {
            streams_[i].left -= flows_[i].rate * step;
            const bool done = streams_[i].left < 0.5;  // of a byte
            if (done) {
                done_.push_back(i);
            }
            return done;
        });
        for (const auto i : done_) {
            received(i);
        }
    }

    const traffic& what_;
    const simulation_options& how_;
    simulation made_;
    std::vector<stream_state> streams_;
    std::vector<flow> flows_;  // of the streams
    std::vector<owner_state> owners_;
    std::vector<worker_state> workers_;
    link_sharing links_;
    std::vector<std::size_t> active_;  // streams with a chunk on its way
    std::vector<std::size_t> done_;
    std::priority_queue<event, std::vector<event>, std::greater<>> events_;
    std::uint64_t order_ = 0;
    double now_ = 0;
    double quantum_ = 0;
    int turn_ = 0;
    std::size_t turn_chunks_ = 0;  // that owners of the turn have left
};

}  // namespace detail

/// Runs a round.
/// @throws usage_error the traffic contradicts itself, a rate is not above 0, or workers pass on to
/// each other what they wait for.
[[nodiscard]] inline simulation simulate(const traffic& what, const simulation_options& how = {}) {
    return detail::round_simulation{what, how}.run();
}

}  // namespace weightwire::plan
