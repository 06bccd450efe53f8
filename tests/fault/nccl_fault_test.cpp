// SPDX-License-Identifier: Apache-2.0
//
// `nccl` with processes that die, stop, fail or differ at each step of init and of a round: a clear
// error within the deadline on every survivor, the old version still served, and a fresh trainer
// that succeeds at a worker that was not restarted.

#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "../support/nccl_processes.hpp"

namespace {

using namespace weightwire;
using namespace std::chrono_literals;
using tests::group_fault;
using tests::nccl_trainer;
using tests::nccl_worker;

/// Runs `work`, which has to fail, and returns the error's text.
template <class Work>
std::string text_of_failure(Work work) {
    try {
        work();
    } catch (const error& failed) {
        return failed.what();
    }
    return "nothing failed";
}

/// A trainer that comes afterwards finds the worker as it was and sends it a round.
void check_recovers(nccl_worker& worker, std::uint64_t version) {
    nccl_trainer fresh{{worker.url()}};
    CHECK(fresh.round(version).all_committed());
    CHECK(worker.serves(version, fresh.weights));
}

const std::vector<std::string> init_steps{"join", "joined", "warm_up"};

}  // namespace

TEST_CASE(
    "nccl: a worker that dies in init is an error at the trainer, and costs the other nothing") {
    for (const auto& step : init_steps) {
        CAPTURE(step);
        nccl_worker good;
        nccl_worker bad{group_fault{step, 0, "die"}};
        const auto begin = deadline::clock::now();
        const auto text = text_of_failure([&] {
            nccl_trainer{{good.url(), bad.url()}, true, 20s};
        });
        CAPTURE(text);
        CHECK(text.find("[phase init]") != std::string::npos);
        CHECK(deadline::clock::now() - begin < 20s);
        check_recovers(good, 1);
    }
}

TEST_CASE("nccl: a worker that dies in a round is an error, and the other keeps the old version") {
    for (const std::string step : {"broadcast", "wait"}) {
        for (const std::uint64_t count : {6U, 8U}) {
            CAPTURE(step);
            CAPTURE(count);
            nccl_worker good;
            nccl_worker bad{group_fault{step, count, "die"}};
            {
                nccl_trainer trainer{{good.url(), bad.url()}};
                std::uint64_t version = 1;
                std::string text;
                while (text.empty() && version < 20) {
                    const auto failed = text_of_failure([&] { trainer.round(version); });
                    text = failed == "nothing failed" ? "" : failed;
                    version += text.empty() ? 1U : 0U;
                }
                CAPTURE(text);
                CHECK_FALSE(text.empty());
                trainer.weights.set(version - 1);
                CHECK((version == 1 || good.serves(version - 1, trainer.weights)));
            }
            check_recovers(good, 30);
        }
    }
}

TEST_CASE("nccl: a trainer that dies in init leaves the worker free for the next") {
    for (const auto& step : init_steps) {
        CAPTURE(step);
        nccl_worker worker;
        {
            auto trainer = tests::nccl_trainer_process({worker.url()}, {step, 0, "die"});
            CHECK(trainer.to().rest().empty());
        }
        check_recovers(worker, 1);
    }
}

TEST_CASE("nccl: a trainer that dies in a round leaves the old version served") {
    for (const std::string step : {"broadcast", "wait"}) {
        CAPTURE(step);
        nccl_worker worker;
        tests::small_weights weights{tests::nccl_parameters, tests::nccl_elements};
        {
            // Five broadcasts and more waits a round: in the second one.
            auto trainer = tests::nccl_trainer_process({worker.url()},
                                                       {step, step == "wait" ? 12U : 7U, "die"});
            REQUIRE(trainer.to().take<char>() == 'o');
            trainer.to().put('1');
            REQUIRE(trainer.to().take<char>() == 'r');
            weights.set(1);
            CHECK(worker.serves(1, weights));
            trainer.to().put('2');
            CHECK(trainer.to().rest().empty());
        }
        CHECK(worker.serves(1, weights));
        check_recovers(worker, 5);
    }
}

TEST_CASE("nccl: a worker that is stopped ends the trainer's wait at the deadline") {
    nccl_worker worker{group_fault{"broadcast", 6, "stop"}};
    {
        nccl_trainer trainer{{worker.url()}};
        CHECK(trainer.round(1).all_committed());
        const auto text = text_of_failure([&] { trainer.round(2, 1s); });
        CAPTURE(text);
        CHECK(text.find("timeout") != std::string::npos);
    }
    worker.process().resume();
    tests::small_weights weights{tests::nccl_parameters, tests::nccl_elements};
    weights.set(1);
    CHECK(worker.serves(1, weights));
    check_recovers(worker, 3);
}

TEST_CASE("nccl: a worker that answers 500 while the trainer broadcasts ends the broadcast") {
    for (const std::string step : {"broadcast", "wait"}) {
        CAPTURE(step);
        nccl_worker good;
        nccl_worker bad{group_fault{step, 7, "throw"}};
        {
            nccl_trainer trainer{{good.url(), bad.url()}};
            std::uint64_t version = 1;
            std::string text;
            while (version < 20 && text.empty()) {
                const auto failed = text_of_failure([&] { trainer.round(version); });
                text = failed == "nothing failed" ? "" : failed;
                version += text.empty() ? 1U : 0U;
            }
            CAPTURE(text);
            // What comes first: the reply, or that the rank has left the group.
            CHECK((text.find("told to fail") != std::string::npos ||
                   text.find("another rank is gone") != std::string::npos));
            trainer.weights.set(version - 1);
            CHECK((version == 1 || good.serves(version - 1, trainer.weights)));
            CHECK((version == 1 || bad.serves(version - 1, trainer.weights)));
            // The engine opens the group anew by itself.
            CHECK(trainer.round(21).all_committed());
            CHECK(good.serves(21, trainer.weights));
        }
        check_recovers(good, 30);
        check_recovers(bad, 30);
    }
}

TEST_CASE("nccl: another version of NCCL is named on both sides before anything waits") {
    nccl_worker worker{{}, 1, 22707};
    const auto begin = deadline::clock::now();
    const auto text = text_of_failure([&] { nccl_trainer{{worker.url()}, true, 60s}; });
    CAPTURE(text);
    CHECK(text.find("mismatch") == 0);
    CHECK(text.find("22809") != std::string::npos);
    CHECK(text.find("22707") != std::string::npos);
    CHECK(deadline::clock::now() - begin < 30s);
}

TEST_CASE("nccl: a world size that is not the servers' is refused before anything waits") {
    nccl_worker worker{{}, 2};
    tests::small_weights weights{tests::nccl_parameters, tests::nccl_elements};
    const auto text = text_of_failure([&] {
        static_cast<void>(trainer_init(tests::small_chunks(), tests::clients_of({worker.url()}),
                                       weights, {.world_sizes = {3}}));
    });
    CAPTURE(text);
    CHECK(text.find("mismatch") == 0);
    check_recovers(worker, 1);
}
