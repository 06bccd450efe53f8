// SPDX-License-Identifier: Apache-2.0
//
// Whatever goes wrong in a round, every worker serves the old version or the new one, the error
// says what and where, and the next round repairs everything.

#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <vector>

#include <weightwire/engine/local_sync_client.hpp>
#include <weightwire/testing/fault_transport.hpp>
#include <weightwire/testing/loopback_transport.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/worker.hpp>

#include "../support/small_model.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using testing::fault_kind;
using testing::fault_point;
using faulty = testing::fault<testing::loopback>;

constexpr auto victim = "model.layers.1.up.weight";

/// Two workers, of one rank and of two, and a trainer with a plan.
struct loop {
    tests::small_weights weights{10, 1000};
    manifest parameters{weights.metadata()};
    parameter_table first{parameters};
    parameter_table second{parameters};
    parameter_table third{parameters};
    std::vector<parameter_table*> pair{&second, &third};
    worker_engine<faulty, parameter_table> one_rank{faulty{}, first};
    worker_engine<faulty, parameter_table> two_ranks{faulty{}, pair};
    using service = worker_service<worker_engine<faulty, parameter_table>>;
    service front{one_rank};
    service other_front{two_ranks};
    local_sync_client<service> client{std::vector<service*>{&front, &other_front}};

    std::vector<weight_version> versions() const {
        return {first.version(), second.version(), third.version()};
    }
    /// Whether every table holds, whole, the bytes of the version that it reports.
    bool whole() {
        for (auto* const table : {&first, &second, &third}) {
            const auto snapshot = table->acquire();
            weights.set(snapshot.version());
            for (std::size_t i = 0; i < snapshot.size(); ++i) {
                if (digest_text(digest(snapshot.tensor(i).bytes())) != weights.digest_of(i)) {
                    return false;
                }
            }
        }
        return true;
    }
};

struct example {
    const char* title;
    fault_point fault;
    const char* message;                   ///< part of the error of round 2
    std::vector<weight_version> versions;  ///< after round 2
};

TEST_CASE("each injected fault leaves old or new, says what and where, and is repaired") {
    using kind = fault_kind;
    const char* const flip = "the bytes in place have digest";
    const std::vector<example> examples{
        {"a byte flips in flight",
         {.kind = kind::flip_sent_byte, .tensor = victim, .byte = 5, .round = 2},
         flip,
         {1, 1, 1}},
        {"a byte flips in one of two ranks",
         {.kind = kind::flip_received_byte, .tensor = victim, .byte = 5, .round = 2, .rank = 3},
         flip,
         {2, 1, 1}},
        {"the sender throws",
         {.kind = kind::throw_in_send, .part = 1, .round = 2},
         "throw_in_send: an injected fault",
         {1, 1, 1}},
        {"the sender stalls",
         {.kind = kind::stall_in_send, .part = 1, .round = 2},
         "timeout [phase update]",
         {1, 1, 1}},
        {"one of two ranks throws",
         {.kind = kind::throw_in_receive, .part = 1, .round = 2, .rank = 2},
         "throw_in_receive: an injected fault",
         {2, 1, 1}},
        {"a rank stalls",
         {.kind = kind::stall_in_receive, .part = 1, .round = 2, .rank = 1},
         "[peer local/0]: ",
         {1, 2, 2}},
        {"a piece is lost",
         {.kind = kind::drop_piece, .tensor = victim, .round = 2},
         "1 of 10 parameters are not whole",
         {1, 1, 1}},
        {"a piece comes twice",
         {.kind = kind::duplicate_piece, .tensor = victim, .round = 2, .rank = 1},
         "bytes are written twice",
         {1, 2, 2}},
    };
    for (const auto& [title, fault, message, versions] : examples) {
        CAPTURE(title);
        loop all;
        auto trainer =
            trainer_init(testing::with_faults(testing::loopback_init_info{.parts = 3}, {fault}),
                         all.client, all.weights, {});
        std::string error;
        for (std::uint64_t round = 1; round <= 3; ++round) {
            all.weights.set(round);
            const auto until = deadline::after(round == 2 ? 1s : 30s);
            try {
                const auto report =
                    trainer.send_weights({.deadline = until, .tolerate_failed_peers = true});
                for (const auto& peer : report.peers) {
                    error += peer.error.message();
                }
            } catch (const weightwire::error& caught) {
                error += caught.what();
            }
            CHECK(error.empty() == (round == 1));
            const std::vector<weight_version> same(3, round);
            CHECK(all.versions() == (round == 2 ? versions : same));
            CHECK(all.whole());
        }
        CHECK_MESSAGE(error.find(message) != std::string::npos, error);
        if (fault.kind == kind::stall_in_receive) {
            CHECK_MESSAGE(error.starts_with("timeout [phase update]"), error);
        }
        const auto named = std::string{"[tensor "} + victim + "]";
        CHECK_MESSAGE((message != flip || error.find(named) != std::string::npos), error);
        trainer.close(deadline::after(5s));
    }
}

TEST_CASE("a worker that fails at init is named, and nothing begins") {
    loop all;
    const auto info = testing::with_faults(testing::loopback_init_info{},
                                           {{.kind = fault_kind::throw_in_open, .rank = 3}});
    CHECK_THROWS_WITH_AS((void)trainer_init(info, all.client, all.weights, {}),
                         doctest::Contains("throw_in_open"), resource_error);
    CHECK(all.versions() == std::vector<weight_version>{0, 0, 0});
    // Another trainer takes over.
    auto trainer = trainer_init(testing::with_faults(testing::loopback_init_info{}, {}), all.client,
                                all.weights, {});
    all.weights.set(1);
    (void)trainer.send_weights();
    CHECK(all.versions() == std::vector<weight_version>{1, 1, 1});
    CHECK(all.whole());
}

}  // namespace
