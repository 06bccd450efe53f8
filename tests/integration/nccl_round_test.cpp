// SPDX-License-Identifier: Apache-2.0
//
// Rounds of `nccl` through the engines and over HTTP, trainer and workers in processes of their
// own.

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../support/nccl_processes.hpp"

using tests::nccl_trainer;
using tests::nccl_worker;

TEST_CASE("nccl: every round's weights arrive at every rank of every worker, packed or not") {
    for (const bool packed : {true, false}) {
        CAPTURE(packed);
        nccl_worker one{{}, 2};
        nccl_worker other;
        nccl_trainer trainer{{one.url(), other.url()}, packed};
        for (std::uint64_t version = 1; version <= 4; ++version) {
            CHECK(trainer.round(version).all_committed());
            CHECK(one.serves(version, trainer.weights));
            CHECK(other.serves(version, trainer.weights));
        }
    }
}

TEST_CASE("nccl: one trainer follows another at the same worker") {
    nccl_worker worker;
    std::uint64_t version = 0;
    for (const bool packed : {true, false, true}) {
        nccl_trainer trainer{{worker.url()}, packed};
        for (int round = 0; round < 2; ++round) {
            CHECK(trainer.round(++version).all_committed());
            CHECK(worker.serves(version, trainer.weights));
        }
    }
}
