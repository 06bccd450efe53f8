#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/core/deadline.hpp>

#include "sharded_pull_processes.hpp"
#include "temporary_folder.hpp"
#include "worker_process.hpp"

/// @file
/// `sharded_pull` between processes that act as two nodes: four trainer ranks on one, four worker
/// ranks on the other, which have attention and vocabulary alike and take them once.

namespace tests::pull_processes {

/// Bytes of the round `round`, from 0, that worker rank `w` read.
struct node_round {
    std::array<std::uint64_t, trainers> from{};
    std::array<std::uint64_t, workers> peers{};
};

/// What a worker's traffic files say, by round.
inline std::vector<node_round> node_rounds_of(const std::string& path) {
    std::vector<node_round> out;
    const auto read = [&](const std::string& name, int first, auto member) {
        std::array<std::size_t, std::max(trainers, workers)> rounds{};
        for (const auto& line : traffic_of(name)) {
            REQUIRE((line.trainer >= first && line.trainer < first + 4));
            const auto who = static_cast<std::size_t>(line.trainer - first);
            const auto round = rounds[who]++;
            out.resize(std::max(out.size(), round + 1));
            (out[round].*member)[who] = line.bytes;
        }
    };
    read(path, 0, &node_round::from);
    read(path + ".node", 1, &node_round::peers);
    return out;
}

/// Bytes that all workers read from all trainer ranks, as planned.
inline std::uint64_t sum_from_trainers(const std::vector<planned_reads>& all) {
    std::uint64_t sum = 0;
    for (const auto& each : all) {
        for (const auto bytes : each.from) {
            sum += bytes;
        }
    }
    return sum;
}

/// Four worker servers with traffic files in `folder`; `special` is started with `more`.
inline std::vector<std::unique_ptr<worker_process>> start_node(
    const setup& asked, const test_support::temporary_folder& folder, int special = -1,
    const std::vector<std::string>& more = {}) {
    std::vector<std::unique_ptr<worker_process>> all;
    for (int w = 0; w < workers; ++w) {
        std::vector<std::string> each{"--traffic", folder / ("traffic" + std::to_string(w))};
        if (w == special) {
            each.insert(each.end(), more.begin(), more.end());
        }
        all.push_back(start_worker(asked, w, each));
    }
    return all;
}

/// Ten rounds in which every worker reads exactly what the plan says, from each trainer rank and
/// from each node peer.
template <class Fabric, tensor_lifetime Lifetime>
void ten_rounds_of_a_node(const setup& asked) {
    const test_support::temporary_folder folder;
    const auto servers = start_node(asked, folder);
    trainer_team<Fabric, Lifetime> team{asked, servers};
    for (std::uint64_t version = 1; version <= 10; ++version) {
        CAPTURE(version);
        CHECK(team.round(version).all_committed());
        team.check_others(4);
        for (int w = 0; w < workers; ++w) {
            check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, version);
        }
    }
    team.close();
    const auto planned = planned_bytes(asked, true);
    for (int w = 0; w < workers; ++w) {
        CAPTURE(w);
        const auto& mine = planned[static_cast<std::size_t>(w)];
        const auto rounds = node_rounds_of(folder / ("traffic" + std::to_string(w)));
        CHECK(rounds.size() == 10);
        for (const auto& each : rounds) {
            CHECK(each.from == mine.from);
            CHECK(each.peers == mine.peers);
        }
    }
}

/// Worker 2 dies or stops in the fourth of eight rounds and another process takes its place for the
/// sixth. The others commit every round, and read nothing from it any more.
template <class Fabric, tensor_lifetime Lifetime>
void a_node_loses_one(const setup& asked, const std::string& how) {
    const test_support::temporary_folder folder;
    const bool stops = how == "stop";
    auto servers = start_node(asked, folder, 2, {"--at", "read", "--do", how, "--in", "4"});
    trainer_team<Fabric, Lifetime> team{asked, servers};
    for (std::uint64_t version = 1; version <= 8; ++version) {
        CAPTURE(version);
        if (version == 6) {
            const auto url = servers[2]->url();
            servers[2] = nullptr;
            servers[2] = start_worker(
                asked, 2,
                {"--traffic", folder / "traffic2.again", "--port", url.substr(url.rfind(':') + 1)});
        }
        const bool lost = version == 4 || version == 5;
        const auto begin = deadline::clock::now();
        const auto report = team.round(version, stops && version == 4 ? 8s : 20s);
        CHECK(deadline::clock::now() - begin < 16s);
        CHECK(report.committed == (lost ? 3 : 4));
        team.check_others(report.committed);
        CHECK(report.peers[2].version == (lost ? 3 : version));
        for (int w = 0; w < workers; ++w) {
            if (!lost || w != 2) {
                check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, version);
            }
        }
        if (version == 4 && stops) {
            CHECK(servers[2]->is_stopped());
            servers[2]->signal(SIGCONT);
            std::this_thread::sleep_for(300ms);
            check_serves(asked.sizes, *servers[2], 2, 3);
            servers[2]->signal(SIGKILL);
        }
        if (version == 4) {
            CHECK(servers[2]->ends_within(5s));
        }
    }
    team.close();
    const auto planned = planned_bytes(asked, true);
    const auto alone = planned_bytes(asked, false);
    for (int w = 0; w < workers; ++w) {
        CAPTURE(w);
        if (w == 2) {
            continue;
        }
        const auto& mine = planned[static_cast<std::size_t>(w)];
        const auto rounds = node_rounds_of(folder / ("traffic" + std::to_string(w)));
        CHECK(rounds.size() == 8);
        const auto whole = [](const node_round& each) {
            std::uint64_t sum = 0;
            for (const auto bytes : each.from) {
                sum += bytes;
            }
            for (const auto bytes : each.peers) {
                sum += bytes;
            }
            return sum;
        };
        for (std::size_t r = 0; r < rounds.size(); ++r) {
            CAPTURE(r);
            // All bytes came, once.
            std::uint64_t needed = 0;
            for (const auto bytes : alone[static_cast<std::size_t>(w)].from) {
                needed += bytes;
            }
            CHECK(whole(rounds[r]) == needed);
            if (r < 3) {
                CHECK(rounds[r].from == mine.from);
                CHECK(rounds[r].peers == mine.peers);
            } else {
                CHECK(rounds[r].peers[2] <= (r == 3 ? mine.peers[2] : 0));
            }
        }
        CHECK(mine.peers[2] > 0);
    }
    // The one that is back reads by itself.
    const auto again = node_rounds_of(folder / "traffic2.again");
    CHECK(again.size() == 3);
    for (const auto& each : again) {
        CHECK(each.peers == std::array<std::uint64_t, workers>{});
    }
}

/// Worker 2 is killed in the third round, and a source throws in the fourth, which fails for all:
/// then the others come back while it is dead, and still take once what it did not take for them.
template <class Fabric>
void a_node_comes_back_without_one(const setup& asked) {
    const test_support::temporary_folder folder;
    auto servers = start_node(asked, folder, 2, {"--at", "read", "--do", "kill", "--in", "3"});
    trainer_team<Fabric, tensor_lifetime::until_next> team{asked, servers};
    for (std::uint64_t version = 1; version <= 6; ++version) {
        CAPTURE(version);
        if (version == 4) {
            CHECK_THROWS_AS(static_cast<void>(team.round(4, 20s, 0, {.fails = 1})), error);
            for (int rank = 1; rank < trainers; ++rank) {
                CHECK(team.of(rank).threw == 1);
            }
            continue;
        }
        const std::size_t there = version < 3 ? 4 : 3;
        CHECK(team.round(version).committed == there);
        team.check_others(there);
        for (const int w : {0, 1, 3}) {
            check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, version);
        }
    }
    team.close();
    const auto planned = planned_bytes(asked, true);
    for (const int w : {0, 1, 3}) {
        CAPTURE(w);
        const auto& mine = planned[static_cast<std::size_t>(w)];
        const auto rounds = node_rounds_of(folder / ("traffic" + std::to_string(w)));
        REQUIRE(rounds.size() == 5);
        for (const std::size_t r : {3U, 4U}) {
            auto peers = mine.peers;
            peers[2] = 0;
            CHECK(rounds[r].peers == peers);
        }
    }
}

}  // namespace tests::pull_processes
