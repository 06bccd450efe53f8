#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <fstream>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/backend.hpp>
#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/rendezvous/store_group.hpp>
#include <weightwire/sources/safetensors.hpp>
#include <weightwire/trainer.hpp>

#include "forked.hpp"
#include "moe_model.hpp"
#include "temporary_folder.hpp"
#include "worker_process.hpp"

/// @file
/// `sharded_pull` over any fabric between real processes: four trainer ranks (PP2 x EP2), each with
/// only its own shard of a checkpoint in memory, and four worker servers. The test's own process
/// uses no fabric, so that it may fork for the next case.

namespace tests::pull_processes {

using namespace std::chrono_literals;
using namespace weightwire;

inline constexpr int trainers = 4;
inline constexpr int workers = 4;

/// What travels, by which chunks, to which worker program.
struct setup {
    moe_sizes sizes{};
    std::uint64_t chunk_bytes = 8192;
    std::uint64_t staging_bytes = 65536;
    std::string program = "test_worker";
    std::string backend = "sharded_pull";
    std::string trainer_node{};  ///< empty: this machine's
    std::string worker_node{};
    std::uint64_t landing_bytes = 0;  ///< 0: as many as by default
};

/// The worker server of rank `rank`.
inline std::unique_ptr<worker_process> start_worker(const setup& asked, int rank,
                                                    const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments{"--backend", asked.backend,
                                       "--first",   std::to_string(rank),
                                       "--hidden",  std::to_string(asked.sizes.hidden),
                                       "--node",    asked.worker_node,
                                       "--landing", std::to_string(asked.landing_bytes)};
    if (asked.sizes.whole_attention) {
        arguments.insert(arguments.end(), {"--attention", "whole"});
    }
    arguments.insert(arguments.end(), more.begin(), more.end());
    return std::make_unique<worker_process>(std::move(arguments), asked.program);
}

/// What a trainer rank is asked to do in a round.
struct order {
    std::uint64_t version = 0;  ///< 0: close and end
    std::int64_t budget_ms = 20'000;
    int dies = 0;    ///< in the middle of its source
    int stops = 0;   ///< the same by SIGSTOP
    int fails = 0;   ///< its source throws
    int leaves = 0;  ///< it ends and closes nothing
};

/// Text in a pipe.
class short_text {
public:
    short_text() = default;
    explicit short_text(std::string_view text) {
        std::ranges::copy(text.substr(0, letters_.size()), letters_.begin());
    }
    [[nodiscard]] std::string string() const {
        return {letters_.begin(), std::ranges::find(letters_, '\0')};
    }

private:
    std::array<char, 512> letters_{};
};

/// What it says afterwards.
struct peer_result {
    peer_status status{};
    std::uint64_t version = 0;
    short_text blamed{};  ///< the peer that its failure names
};
struct outcome {
    std::size_t committed = 0;
    int threw = 0;
    short_text why{};
    std::array<peer_result, workers> peers{};
    [[nodiscard]] bool all_committed() const { return committed == peers.size(); }
};

/// A shard that is read from a checkpoint for the first version, and changes with each.
template <tensor_lifetime Lifetime>
class trained_shard {
public:
    static constexpr auto lifetime = Lifetime;
    trained_shard(const moe_sizes& sizes, int rank, const std::string& checkpoint)
        : shard_{sizes, rank}, from_file_{!checkpoint.empty()} {
        if (!checkpoint.empty()) {
            const safetensors_source file{checkpoint};
            for (std::size_t i = 0; i < shard_.memory().size(); ++i) {
                const auto from = file.tensor(shard_.held_names()[i]).bytes();
                std::ranges::copy(from, shard_.memory()[i].begin());
            }
        }
    }
    void train(const order& next) {
        order_ = next;
        if (next.version != 1 || !from_file_) {
            shard_.set(next.version);
        }
    }
    [[nodiscard]] const auto& metadata() const { return shard_.metadata(); }
    [[nodiscard]] const auto& held_names() const { return shard_.held_names(); }
    [[nodiscard]] auto weights() {
        return std::views::iota(std::size_t{0}, shard_.weights().size()) |
               std::views::transform([this](std::size_t i) {
                   if (i == shard_.weights().size() / 2) {
                       meet();
                   }
                   return shard_.weights()[i];
               });
    }

private:
    void meet() {
        if (std::exchange(order_.dies, 0) != 0) {
            ::_exit(87);
        }
        if (std::exchange(order_.stops, 0) != 0) {
            ::raise(SIGSTOP);
        }
        if (std::exchange(order_.fails, 0) != 0) {
            throw data_error{"the gather failed"};
        }
    }

    moe_shard<Lifetime> shard_;
    bool from_file_;
    order order_{};
};

/// One trainer rank's engine, and what it does when it is told to.
template <class Fabric, tensor_lifetime Lifetime>
class trainer_rank {
public:
    using shard_type = trained_shard<Lifetime>;
    using init_info = sharded_pull::basic_trainer_init_info<Fabric>;

    trainer_rank(const setup& asked, int rank, store_group& group,
                 const std::vector<std::string>& urls, const std::string& checkpoint)
        : shard_{asked.sizes, rank, checkpoint},
          engine_{trainer_init(init_info{.rank = rank,
                                         .chunk_bytes = asked.chunk_bytes,
                                         .staging_bytes = asked.staging_bytes,
                                         .node = asked.trainer_node},
                               fan_out_sync_client{http_sync_clients(urls)}, shard_,
                               {.init_budget = 20s}, group)} {}
    outcome round(const order& next) {
        shard_.train(next);
        outcome out;
        try {
            const auto report = engine_.send_weights(
                {.version = next.version,
                 .deadline = deadline::after(std::chrono::milliseconds{next.budget_ms}),
                 .tolerate_failed_peers = true});
            out.committed = report.committed();
            for (std::size_t i = 0; i < out.peers.size() && i < report.peers.size(); ++i) {
                const auto& peer = report.peers[i];
                out.peers[i] = {peer.status, peer.version, short_text{peer.error.context.peer}};
            }
        } catch (const error& failed) {
            out.threw = 1;
            out.why = short_text{failed.what()};
        }
        return out;
    }
    void close() { engine_.close(deadline::after(5s)); }

private:
    shard_type shard_;
    decltype(trainer_init(std::declval<init_info>(), fan_out_sync_client{http_sync_clients({})},
                          std::declval<shard_type&>(), std::declval<trainer_options>(),
                          std::declval<store_group&>())) engine_;
};

/// Four trainer ranks, each a process of its own.
template <class Fabric, tensor_lifetime Lifetime>
class trainer_team {
public:
    trainer_team(const setup& asked, const std::vector<std::unique_ptr<worker_process>>& peers,
                 const std::string& checkpoint = {}) {
        std::signal(SIGPIPE, SIG_IGN);  // of a rank that is gone
        std::vector<std::string> urls;
        for (const auto& peer : peers) {
            urls.push_back(peer->url());
        }
        for (int rank = 0; rank < trainers; ++rank) {
            ranks_.push_back(std::make_unique<forked>([=](channel& parent) {
                auto group = rank == 0 ? store_group::host(trainers)
                                       : store_group::join(rank, trainers, "127.0.0.1",
                                                           parent.take<std::uint16_t>(),
                                                           deadline::after(20s));
                if (rank == 0) {
                    parent.put(group.port());
                }
                serve(parent, trainer_rank<Fabric, Lifetime>{asked, rank, group, urls, checkpoint});
                if (rank == 0) {
                    // The group's store is here: it stays until the others have ended.
                    static_cast<void>(parent.take<char>());
                }
            }));
        }
        const auto port = process(0).to().template take<std::uint16_t>();
        for (int rank = 1; rank < trainers; ++rank) {
            process(rank).to().put(port);
        }
    }
    trainer_team(const trainer_team&) = delete;
    trainer_team& operator=(const trainer_team&) = delete;
    /// Rank 0 ends in an orderly way, whatever has become of the others.
    ~trainer_team() {
        if (!closed_) {
            CHECK_NOTHROW(end_first());
        }
    }

    /// A round; `special` is rank `which`'s order. Throws what rank 0 threw.
    outcome round(std::uint64_t version, std::chrono::milliseconds budget = 20s, int which = -1,
                  order special = {}) {
        const order usual{.version = version, .budget_ms = budget.count()};
        special.version = version;
        special.budget_ms = budget.count();
        for (int rank = 0; rank < trainers; ++rank) {
            process(rank).to().put(rank == which ? special : usual);
        }
        auto first = of(0);
        if (first.threw != 0) {
            throw data_error{first.why.string()};
        }
        return first;
    }
    /// What rank `rank` says of the last round; rank 0 has said it by `round`.
    [[nodiscard]] outcome of(int rank) { return process(rank).to().template take<outcome>(); }
    /// All others committed as many peers.
    void check_others(std::size_t committed) {
        for (int rank = 1; rank < trainers; ++rank) {
            const auto said = of(rank);
            CHECK(said.why.string().empty());
            CHECK(said.committed == committed);
        }
    }
    void close() {
        closed_ = true;
        for (auto& each : ranks_) {
            each->to().put(order{});
        }
        for (int rank = trainers - 1; rank >= 0; --rank) {
            if (rank == 0) {
                process(0).to().put('e');
            }
            CHECK(process(rank).to().rest() == std::string{});
        }
    }
    [[nodiscard]] forked& process(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }

private:
    static void serve(channel& parent, trainer_rank<Fabric, Lifetime> mine) {
        auto next = parent.take<order>();
        for (; next.version != 0; next = parent.take<order>()) {
            parent.put(mine.round(next));
        }
        if (next.leaves == 0) {
            mine.close();
        }
    }
    void end_first() {
        process(0).to().put(order{.leaves = 1});
        process(0).to().put('e');
        CHECK(process(0).to().rest() == std::string{});
    }

    std::vector<std::unique_ptr<forked>> ranks_;
    bool closed_ = false;
};

/// Worker rank `rank` serves exactly what it should of `version`.
inline void check_serves(const moe_sizes& sizes, const worker_process& worker, int rank,
                         std::uint64_t version) {
    CHECK(worker.version() == std::to_string(version));
    const moe_checkpoint full{sizes, version};
    const auto held = worker.checksums();
    REQUIRE(held.size() == sizes.worker(workers).size());
    std::vector<std::string> wrong;
    for (const auto& [name, found] : held.items()) {
        const auto bare = name.substr(std::min(name.find("model"), name.find("lm_head")));
        if (found != digest_text(digest(full.expected(sizes, bare, rank, workers)))) {
            wrong.push_back(name);
        }
    }
    CHECK(wrong == std::vector<std::string>{});
}

/// Writes the checkpoint of version 1.
inline std::string write_checkpoint(const moe_sizes& sizes,
                                    const test_support::temporary_folder& folder) {
    const auto list = sizes.checkpoint();
    std::vector<std::vector<std::byte>> memory;
    std::vector<named_tensor> tensors;
    for (std::size_t i = 0; i < list.size(); ++i) {
        auto& bytes = memory.emplace_back(list[i].byte_size());
        fill(bytes, 1, i);
        tensors.push_back({list[i].name, {bytes.data(), list[i].dtype, list[i].shape}});
    }
    const auto path = folder / "model.safetensors";
    write_safetensors(path, tensors);
    return path;
}

/// Bytes that a worker rank is to read.
struct planned_reads {
    std::array<std::uint64_t, trainers> from{};  ///< each trainer rank
    std::array<std::uint64_t, workers> peers{};  ///< each worker rank of its node
};
/// Bytes that each worker rank is to read, planned here once more.
/// @param node_once what the workers of a node need alike is taken by one of them.
inline std::vector<planned_reads> planned_bytes(const setup& asked, bool node_once = false) {
    const auto& sizes = asked.sizes;
    const manifest checkpoint{sizes.checkpoint(), "model"};
    const manifest mine{sizes.worker(workers), "model"};
    std::vector<plan::position_set> held;
    for (int rank = 0; rank < trainers; ++rank) {
        std::vector<std::string> names;
        for (const auto& parameter : checkpoint.parameters()) {
            if (sizes.held_by(rank, parameter.name)) {
                names.push_back(parameter.name);
            }
        }
        held.push_back(plan::held_positions(checkpoint, names));
    }
    const plan::ownership owners{checkpoint, held};
    std::vector<plan::pull_needs> needs;
    std::vector<plan::needs_report> reports;
    for (int w = 0; w < workers; ++w) {
        needs.emplace_back(checkpoint, mine, plan::record(checkpoint, mine, [&](auto& made) {
                               sizes.load(made, w, workers);
                           }));
        reports.push_back(needs.back().report());
    }
    const plan::node_id there = asked.trainer_node == asked.worker_node ? 0 : 1;
    const plan::places here{.trainers = std::vector<plan::node_id>(trainers, 0),
                            .workers = std::vector<plan::node_id>(workers, there)};
    const auto routes = plan::route(checkpoint, owners, here, reports, {.node_once = node_once});
    const auto groups = plan::group_runs(plan::layerwise_groups(checkpoint));
    std::vector<planned_reads> out;
    for (int w = 0; w < workers; ++w) {
        const auto made =
            plan::plan_worker(checkpoint, groups, owners, needs[static_cast<std::size_t>(w)],
                              routes.of(w), {.chunk_bytes = asked.chunk_bytes});
        auto& row = out.emplace_back();
        std::uint64_t sum = 0;
        for (int t = 0; t < trainers; ++t) {
            row.from[static_cast<std::size_t>(t)] = made.bytes_from(t);
            sum += made.bytes_from(t);
        }
        for (int p = 0; p < workers; ++p) {
            row.peers[static_cast<std::size_t>(p)] = made.bytes_from_peer(p);
            sum += made.bytes_from_peer(p);
        }
        REQUIRE(sum == needs[static_cast<std::size_t>(w)].bytes());
    }
    return out;
}

/// Lines of a worker's traffic file: trainer rank, bytes read, bytes planned.
struct traffic_line {
    int trainer = 0;
    std::uint64_t bytes = 0;
    std::uint64_t planned = 0;
};
inline std::vector<traffic_line> traffic_of(const std::string& path) {
    std::vector<traffic_line> out;
    std::ifstream file{path};
    for (traffic_line line; file >> line.trainer >> line.bytes >> line.planned;) {
        out.push_back(line);
    }
    return out;
}

/// Ten rounds; worker 2 is killed in the fourth and back for the sixth.
template <class Fabric, tensor_lifetime Lifetime>
void ten_rounds(const setup& asked) {
    const test_support::temporary_folder folder;
    const auto checkpoint = write_checkpoint(asked.sizes, folder);
    std::vector<std::unique_ptr<worker_process>> servers;
    for (int w = 0; w < workers; ++w) {
        std::vector<std::string> more{"--traffic", folder / ("traffic" + std::to_string(w))};
        if (w == 2) {
            more.insert(more.end(), {"--at", "read", "--do", "die", "--in", "4"});
        }
        servers.push_back(start_worker(asked, w, more));
    }
    trainer_team<Fabric, Lifetime> team{asked, servers, checkpoint};
    for (std::uint64_t version = 1; version <= 10; ++version) {
        CAPTURE(version);
        if (version == 6) {
            // Another process at the same place, which is not told to die.
            const auto url = servers[2]->url();
            servers[2] = start_worker(
                asked, 2,
                {"--traffic", folder / "traffic2", "--port", url.substr(url.rfind(':') + 1)});
        }
        const bool lost = version == 4 || version == 5;
        const auto begin = deadline::clock::now();
        const auto report = team.round(version);
        if (version != 1) {  // which waits for the init too
            CHECK(deadline::clock::now() - begin < 10s);
        }
        CHECK(report.committed == (lost ? 3 : 4));
        team.check_others(report.committed);
        CHECK(report.peers[2].status == (version == 4   ? peer_status::failed
                                         : version == 5 ? peer_status::left_out
                                                        : peer_status::committed));
        CHECK(report.peers[2].version == (lost ? 3 : version));
        for (int w = 0; w < workers; ++w) {
            if (!lost || w != 2) {
                check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, version);
            }
        }
        if (version == 4) {
            CHECK(servers[2]->ends_within(5s));
        }
    }
    team.close();
    const auto planned = planned_bytes(asked);
    for (int w = 0; w < workers; ++w) {
        const auto lines = traffic_of(folder / ("traffic" + std::to_string(w)));
        std::size_t rounds = 0;
        std::array<std::size_t, trainers> owners{};
        for (const auto& line : lines) {
            const auto t = static_cast<std::size_t>(line.trainer);
            CHECK(line.bytes == planned[static_cast<std::size_t>(w)].from[t]);
            CHECK(line.planned == line.bytes);
            rounds = std::max(rounds, ++owners[t]);
        }
        CHECK(rounds == (w == 2 ? 8 : 10));
        for (std::size_t t = 0; t < trainers; ++t) {
            CHECK(owners[t] == (planned[static_cast<std::size_t>(w)].from[t] == 0 ? 0 : rounds));
        }
    }
}

/// Four workers; `special` is started with `more`.
inline std::vector<std::unique_ptr<worker_process>> start_workers(
    const setup& asked, int special = -1, const std::vector<std::string>& more = {}) {
    std::vector<std::unique_ptr<worker_process>> all;
    for (int w = 0; w < workers; ++w) {
        all.push_back(start_worker(asked, w, w == special ? more : std::vector<std::string>{}));
    }
    return all;
}

/// Worker 1 stops in the second round and is resumed after its deadline: it costs the trainer that,
/// commits nothing of the round, and takes part in the next.
template <class Fabric, tensor_lifetime Lifetime>
void one_worker_stops(const setup& asked) {
    auto servers = start_workers(asked, 1, {"--at", "read", "--do", "stop", "--in", "2"});
    trainer_team<Fabric, Lifetime> team{asked, servers};
    CHECK(team.round(1).all_committed());
    team.check_others(4);
    const auto begin = deadline::clock::now();
    const auto report = team.round(2, 5s);
    CHECK(deadline::clock::now() - begin < 8s);
    CHECK(report.committed == 3);
    CHECK(report.peers[1].blamed.string() == servers[1]->url());
    team.check_others(3);
    CHECK(servers[1]->is_stopped());
    servers[1]->signal(SIGCONT);
    std::this_thread::sleep_for(300ms);
    check_serves(asked.sizes, *servers[1], 1, 1);
    check_serves(asked.sizes, *servers[0], 0, 2);
    CHECK(team.round(3).all_committed());
    team.check_others(4);
    for (int w = 0; w < workers; ++w) {
        check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, 3);
    }
    team.close();
}

/// Trainer rank 2 does as it is told in the second round: the workers stay as they were, and the
/// next job takes them over.
template <class Fabric, tensor_lifetime Next>
void a_trainer_rank_fails(const setup& asked, const order& act) {
    auto servers = start_workers(asked);
    {
        trainer_team<Fabric, tensor_lifetime::until_next> team{asked, servers};
        CHECK(team.round(1).all_committed());
        team.check_others(4);
        const auto begin = deadline::clock::now();
        CHECK_THROWS_AS(static_cast<void>(team.round(2, 5s, 2, act)), error);
        CHECK(deadline::clock::now() - begin < 10s);
    }
    for (int w = 0; w < workers; ++w) {
        check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, 1);
    }
    trainer_team<Fabric, Next> team{asked, servers};
    CHECK(team.round(3).all_committed());
    team.check_others(4);
    for (int w = 0; w < workers; ++w) {
        check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, 3);
    }
    team.close();
}

}  // namespace tests::pull_processes
