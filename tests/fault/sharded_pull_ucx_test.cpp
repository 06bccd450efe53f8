// SPDX-License-Identifier: Apache-2.0
//
// `sharded_pull` over UCX (tcp on one machine) between real processes: four trainer ranks, each
// with only its own shard of a checkpoint in memory, and four worker servers; a worker killed in a
// round and back in another, one stopped past a deadline, a trainer rank that dies; workers of a
// node that take once what they need alike.

#include <doctest/doctest.h>

#include <cstddef>

#include <weightwire/fabrics/ucx/fabric.hpp>

#include "../support/sharded_pull_nodes.hpp"
#include "../support/sharded_pull_processes.hpp"

namespace {

using namespace weightwire;
namespace pulled = tests::pull_processes;

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
    pulled::one_worker_stops<ucx::fabric, tensor_lifetime::until_next>(many_small());
}

TEST_CASE("sharded_pull over UCX: a trainer rank that dies leaves the workers as they were") {
    pulled::a_trainer_rank_fails<ucx::fabric, tensor_lifetime::until_next>(many_small(),
                                                                           {.dies = 1});
}
