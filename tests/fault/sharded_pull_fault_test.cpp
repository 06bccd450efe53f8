// SPDX-License-Identifier: Apache-2.0
//
// `sharded_pull` between real processes: four trainer ranks, each with only its own shard of a
// checkpoint in memory, and four worker servers; who dies, stops or fails, and what the others do.

#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <string>
#include <thread>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/shared_memory_fabric.hpp>

#include "../support/sharded_pull_processes.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
namespace pulled = tests::pull_processes;

template <tensor_lifetime Lifetime>
using shm_team = pulled::trainer_team<shm::fabric, Lifetime>;

}  // namespace

TEST_CASE(
    "sharded_pull: ten rounds between processes, a worker killed in one and back in another") {
    const pulled::setup asked;
    SUBCASE("read in place") { pulled::ten_rounds<shm::fabric, tensor_lifetime::stable>(asked); }
    SUBCASE("staged") { pulled::ten_rounds<shm::fabric, tensor_lifetime::until_next>(asked); }
}

TEST_CASE("sharded_pull: a worker stopped in a round past its deadline never commits it") {
    const pulled::setup asked;
    SUBCASE("read in place") {
        pulled::one_worker_stops<shm::fabric, tensor_lifetime::stable>(asked);
    }
    SUBCASE("staged") { pulled::one_worker_stops<shm::fabric, tensor_lifetime::until_next>(asked); }
}

TEST_CASE("sharded_pull: a trainer rank whose source fails ends the round for all, and no other") {
    const pulled::setup asked;
    for (const int which : {0, 3}) {
        CAPTURE(which);
        auto servers = pulled::start_workers(asked);
        shm_team<tensor_lifetime::until_next> team{asked, servers};
        CHECK(team.round(1).all_committed());
        team.check_others(4);
        const auto begin = deadline::clock::now();
        try {
            static_cast<void>(team.round(2, 20s, which, {.fails = 1}));
            FAIL("it was committed");
        } catch (const error& failed) {
            CHECK(std::string{failed.what()}.find("the gather failed") != std::string::npos);
        }
        CHECK(deadline::clock::now() - begin < 5s);
        for (int rank = 1; rank < pulled::trainers; ++rank) {
            CHECK(team.of(rank).threw == 1);
        }
        for (int w = 0; w < pulled::workers; ++w) {
            pulled::check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, 1);
        }
        CHECK(team.round(3).all_committed());
        team.check_others(4);
        for (int w = 0; w < pulled::workers; ++w) {
            pulled::check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, 3);
        }
        team.close();
    }
}

TEST_CASE("sharded_pull: a trainer rank that dies or stops leaves the workers as they were") {
    const auto run = [](const pulled::order& act) {
        pulled::a_trainer_rank_fails<shm::fabric, tensor_lifetime::stable>({}, act);
    };
    SUBCASE("dies") { run({.dies = 1}); }
    SUBCASE("stops") { run({.stops = 1}); }
}
