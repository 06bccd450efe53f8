// SPDX-License-Identifier: Apache-2.0
//
// `sharded_pull` over UCX (tcp on one machine) between real processes: four trainer ranks, each
// with only its own shard of a checkpoint in memory, and four worker servers; a worker killed in a
// round and back in another, one stopped past a deadline, a trainer rank that dies; workers of a
// node that take once what they need alike.

#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <thread>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/ucx/fabric.hpp>

#include "../support/sharded_pull_nodes.hpp"
#include "../support/sharded_pull_processes.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
namespace pulled = tests::pull_processes;

using ucx_team = pulled::trainer_team<ucx::fabric, tensor_lifetime::until_next>;

/// Many chunks at once.
pulled::setup many_small() { return {.program = "test_ucx_worker"}; }
/// Chunks of several transfers each.
pulled::setup few_large() {
    return {.sizes = {.hidden = 2048},
            .chunk_bytes = 4U << 20U,
            .staging_bytes = 16U << 20U,
            .program = "test_ucx_worker"};
}

/// The trainer on one node and the workers on another, as far as they know.
pulled::setup two_nodes(pulled::setup asked) {
    asked.sizes.whole_attention = true;
    asked.staging_bytes = 8 * asked.chunk_bytes;  // each worker reads, and takes for the node
    asked.trainer_node = "a";
    asked.worker_node = "b";
    return asked;
}

}  // namespace

TEST_CASE("sharded_pull over UCX: a node takes once what its workers need alike") {
    SUBCASE("many small chunks, memory that stays") {
        pulled::ten_rounds_of_a_node<ucx::fabric, tensor_lifetime::stable>(two_nodes(many_small()));
    }
    SUBCASE("few large chunks, memory that does not") {
        pulled::ten_rounds_of_a_node<ucx::fabric, tensor_lifetime::until_next>(
            two_nodes(few_large()));
    }
}

TEST_CASE("sharded_pull over UCX: a worker that lands bytes for its node is killed, one comes") {
    SUBCASE("many small chunks") {
        pulled::a_node_loses_one<ucx::fabric, tensor_lifetime::until_next>(two_nodes(many_small()),
                                                                           "kill");
    }
    SUBCASE("few large chunks, one landing slot") {
        auto asked = two_nodes(few_large());
        asked.landing_bytes = 1;
        pulled::a_node_loses_one<ucx::fabric, tensor_lifetime::stable>(asked, "kill");
    }
}

TEST_CASE("sharded_pull over UCX: ten rounds, a worker killed in one and back in another") {
    SUBCASE("many small chunks, memory that stays") {
        pulled::ten_rounds<ucx::fabric, tensor_lifetime::stable>(many_small());
    }
    SUBCASE("few large chunks, memory that does not") {
        pulled::ten_rounds<ucx::fabric, tensor_lifetime::until_next>(few_large());
    }
}

TEST_CASE("sharded_pull over UCX: a worker stopped past the deadline, and no trainer rank waits") {
    const auto asked = many_small();
    auto servers = pulled::start_workers(asked, 1, {"--at", "read", "--do", "stop", "--in", "2"});
    ucx_team team{asked, servers};
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
    pulled::check_serves(asked.sizes, *servers[1], 1, 1);
    pulled::check_serves(asked.sizes, *servers[0], 0, 2);
    CHECK(team.round(3).all_committed());
    team.check_others(4);
    for (int w = 0; w < pulled::workers; ++w) {
        pulled::check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, 3);
    }
    team.close();
}

TEST_CASE("sharded_pull over UCX: a trainer rank that dies leaves the workers as they were") {
    const auto asked = many_small();
    auto servers = pulled::start_workers(asked);
    {
        ucx_team team{asked, servers};
        CHECK(team.round(1).all_committed());
        team.check_others(4);
        const auto begin = deadline::clock::now();
        CHECK_THROWS_AS(static_cast<void>(team.round(2, 5s, 2, {.dies = 1})), error);
        CHECK(deadline::clock::now() - begin < 10s);
    }
    for (int w = 0; w < pulled::workers; ++w) {
        pulled::check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, 1);
    }
    // The next job takes the workers over.
    ucx_team team{asked, servers};
    CHECK(team.round(3).all_committed());
    team.check_others(4);
    for (int w = 0; w < pulled::workers; ++w) {
        pulled::check_serves(asked.sizes, *servers[static_cast<std::size_t>(w)], w, 3);
    }
    team.close();
}
