// SPDX-License-Identifier: Apache-2.0
//
// Rounds of `nccl` through the engines and over HTTP, trainer and workers in processes of their
// own: in the native wire and in vLLM's, from either end.

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../support/nccl_processes.hpp"
#include "../support/vllm_form_trainer.hpp"

using tests::nccl_trainer;
using tests::nccl_worker;
using tests::small_chunks;
using weightwire::commit_mode;

TEST_CASE("nccl: every round's weights arrive at every rank of every worker, packed or not") {
    // Servers that are ours, and that say to be a vLLM which takes the id, and one which needs the
    // store.
    for (const char* vllm : {"", "0.33.0", "0.29.0"}) {
        for (const bool packed : {true, false}) {
            CAPTURE(std::string{vllm});
            CAPTURE(packed);
            nccl_worker one{{.ranks = 2, .vllm = vllm}};
            nccl_worker other{{.vllm = vllm}};
            nccl_trainer trainer{{one.url(), other.url()}, small_chunks(packed)};
            for (std::uint64_t version = 1; version <= 3; ++version) {
                CHECK(trainer.round(version).all_committed());
                CHECK(one.serves(version, trainer.weights));
                CHECK(other.serves(version, trainer.weights));
            }
        }
    }
}

TEST_CASE("nccl: servers of ours and of two vLLMs form one group") {
    nccl_worker ours;
    nccl_worker newer{{.vllm = "0.33.0"}};
    nccl_worker older{{.vllm = "0.29.0"}};
    nccl_trainer trainer{{ours.url(), newer.url(), older.url()}};
    for (std::uint64_t version = 1; version <= 2; ++version) {
        CHECK(trainer.round(version).all_committed());
        for (const auto* worker : {&ours, &newer, &older}) {
            CHECK(worker->serves(version, trainer.weights));
        }
    }
}

TEST_CASE("nccl: one trainer follows another at the same worker, in either wire") {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        nccl_worker worker{{.mode = mode}};
        std::uint64_t version = 0;
        for (const bool packed : {true, false, true}) {
            {
                nccl_trainer trainer{{worker.url()}, small_chunks(packed)};
                for (int round = 0; round < 2; ++round) {
                    CHECK(trainer.round(++version).all_committed());
                    CHECK(worker.serves(version, trainer.weights));
                }
            }
            tests::vllm_form_trainer other{worker.url(), 2, packed ? "true" : "false"};
            other.open();
            tests::small_weights weights{tests::nccl_parameters, tests::nccl_elements};
            weights.set(++version);
            other.round(weights, version);
            CHECK(worker.serves(version, weights));
        }
    }
}

TEST_CASE("nccl: a trainer that speaks as vLLM's drives several ranks, however it packs") {
    for (const char* packing : {"false", "true", "by update"}) {
        CAPTURE(std::string{packing});
        nccl_worker worker{{.ranks = 2}};
        tests::vllm_form_trainer trainer{worker.url(), 3, packing};
        trainer.open();
        for (std::uint64_t version = 1; version <= 3; ++version) {
            tests::small_weights weights{tests::nccl_parameters, tests::nccl_elements};
            weights.set(version);
            trainer.round(weights, version);
            CHECK(worker.serves(version, weights));
        }
    }
}
