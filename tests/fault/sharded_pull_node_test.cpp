// SPDX-License-Identifier: Apache-2.0
//
// `sharded_pull` to a node whose workers take once what they need alike: four trainer ranks and
// four worker servers, all of them processes, over shared memory that acts as if it crossed
// machines. A worker that others read from dies, stops and comes back.

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

#include "../support/across_fabric.hpp"
#include "../support/sharded_pull_nodes.hpp"

namespace {

using namespace weightwire;
namespace pulled = tests::pull_processes;
using tests::across_fabric;

pulled::setup two_nodes() {
    return {.sizes = {.whole_attention = true},
            .backend = "sharded_pull_across",
            .trainer_node = "a",
            .worker_node = "b"};
}

}  // namespace

TEST_CASE("sharded_pull: a node takes once what its workers need alike") {
    auto asked = two_nodes();
    const auto once = pulled::sum_from_trainers(pulled::planned_bytes(asked, true));
    const auto each = pulled::sum_from_trainers(pulled::planned_bytes(asked, false));
    CHECK(once == 203'712);
    CHECK(each == 372'480);
    SUBCASE("memory that stays") {
        pulled::ten_rounds_of_a_node<across_fabric, tensor_lifetime::stable>(asked);
    }
    SUBCASE("memory that does not") {
        pulled::ten_rounds_of_a_node<across_fabric, tensor_lifetime::until_next>(asked);
    }
    SUBCASE("one landing slot for many chunks on their way") {
        asked.landing_bytes = 1;
        asked.chunk_bytes = 4096;
        pulled::ten_rounds_of_a_node<across_fabric, tensor_lifetime::until_next>(asked);
    }
}

TEST_CASE("sharded_pull: a worker that lands bytes for its node is killed, and another comes") {
    auto asked = two_nodes();
    SUBCASE("many landing slots") {
        pulled::a_node_loses_one<across_fabric, tensor_lifetime::until_next>(asked, "kill");
    }
    SUBCASE("one landing slot") {
        asked.landing_bytes = 1;
        pulled::a_node_loses_one<across_fabric, tensor_lifetime::stable>(asked, "kill");
    }
}

TEST_CASE("sharded_pull: a worker that lands bytes for its node stops past half of the time") {
    auto asked = two_nodes();
    SUBCASE("many landing slots") {
        pulled::a_node_loses_one<across_fabric, tensor_lifetime::until_next>(asked, "stop");
    }
    SUBCASE("one landing slot") {
        asked.landing_bytes = 1;
        pulled::a_node_loses_one<across_fabric, tensor_lifetime::until_next>(asked, "stop");
    }
}

TEST_CASE(
    "sharded_pull: a node whose dead worker is not back goes on sharing after a failed round") {
    pulled::a_node_comes_back_without_one<across_fabric>(two_nodes());
}
