// SPDX-License-Identifier: Apache-2.0
//
// `nccl` with processes that die, stop or fail at each step of init and of a round: a clear error
// within the deadline on every survivor, the old version still served, and a fresh trainer that
// succeeds at a worker that was not restarted.

#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "../support/nccl_processes.hpp"

namespace {

using namespace weightwire;
using namespace std::chrono_literals;
using tests::group_fault;
using tests::nccl_trainer;
using tests::nccl_worker;
using tests::recovers;
using tests::says;
using tests::small_chunks;
using tests::text_of_failure;
using tests::weights_of;

/// In what way trainer and workers speak.
struct manner {
    const char* words;
    bool packed = true;
    int ranks = 1;          ///< behind each server
    const char* vllm = "";  ///< what the servers say to be; ours unless given

    [[nodiscard]] nccl_worker worker() const { return nccl_worker{{.ranks = ranks, .vllm = vllm}}; }
    [[nodiscard]] auto info() const { return small_chunks(packed); }
    [[nodiscard]] std::uint64_t broadcasts() const {
        return packed ? tests::nccl_parameters / 2 : tests::nccl_parameters;
    }
};
constexpr manner native{"native wire, packed"};
const std::vector<manner> others{{"native wire, unpacked", false},
                                 {"native wire, two ranks a server", true, 2},
                                 {"vLLM's wire by id, packed", true, 1, "0.33.0"},
                                 {"vLLM's wire by store, unpacked", false, 2, "0.29.0"}};

constexpr auto unknown = static_cast<std::uint64_t>(-1);

/// A step at which a process dies.
struct death {
    const char* step;
    std::uint64_t count = 0;
    const char* act = "die";
    std::uint64_t ahead = 0;   ///< versions that the survivor goes on by; `unknown`: as it is told
    const char* refused = "";  ///< the call that a surviving worker refuses then
};

const std::vector<death> deaths_in_init{
    {"call /version"},
    {"call /get_world_size"},
    {"call /init_weight_transfer_engine"},
    {"join", 0, "die_late", 0, "/init_weight_transfer_engine"},
    {"joined", 0, "die", 0, "/init_weight_transfer_engine"},
    {"warm_up", 0, "die", 0, "/init_weight_transfer_engine"},
    {"done /init_weight_transfer_engine"},
};

/// What a surviving worker says of the call in which another died.
void check_refusal(const nccl_worker& worker, const death& at) {
    if (*at.refused != 0) {
        const auto refusal = worker.failure_of(at.refused);
        CAPTURE(refusal);
        CHECK(says(refusal, at.refused));
        CHECK((says(refusal, "is gone") || says(refusal, "went away") ||
               says(refusal, "cancelled [phase ")));
    }
}

/// One worker that lives through everything, and the version it serves. A worker that is to die
/// comes beside it.
class survivor {
public:
    explicit survivor(const manner& how) : how_{how}, worker_{how.worker()} {
        REQUIRE(recovers({&worker_}, version_, how_.info()));
    }

    void see_worker_die_in_init(const death& at) {
        CAPTURE(std::string{how_.words});
        CAPTURE(std::string{at.step});
        auto bad = how_.worker();
        bad.arm({at.step, at.count, at.act});
        const auto begin = deadline::clock::now();
        const auto text = text_of_failure([&] {
            nccl_trainer{{worker_.url(), bad.url()}, how_.info(), 10s};
        });
        CHECK(deadline::clock::now() - begin < 10s);
        check_text(text, bad);
        check_refusal(worker_, at);
        check_serves(0);
    }
    void see_worker_die_in_round(const death& at) {
        CAPTURE(std::string{how_.words});
        CAPTURE(std::string{at.step});
        CAPTURE(at.count);
        auto bad = how_.worker();
        std::uint64_t ahead = 0;
        {
            nccl_trainer trainer{{worker_.url(), bad.url()}, how_.info()};
            REQUIRE(trainer.round(++version_).all_committed());
            bad.arm({at.step, at.count, at.act});
            const auto begin = deadline::clock::now();
            const auto text = text_of_failure([&] { trainer.round(version_ + 1, 10s); });
            CHECK(deadline::clock::now() - begin < 10s);
            check_text(text, bad);
            const auto& report = trainer.engine.last_report();
            REQUIRE(report.peers.size() == 2);
            CHECK(report.peers[1].status != peer_status::committed);
            ahead = report.peers[0].status == peer_status::committed ? 1 : 0;
            CHECK((at.ahead == unknown || ahead == at.ahead));
            check_refusal(worker_, at);
        }
        check_serves(ahead);
    }
    void see_trainer_die_in_init(const death& at) {
        CAPTURE(std::string{how_.words});
        CAPTURE(std::string{at.step});
        {
            auto trainer = tests::nccl_trainer_process({worker_.url()}, {at.step, at.count, at.act},
                                                       0, how_.info());
            CHECK(trainer.to().rest().empty());
        }
        check_refusal(worker_, at);
        check_serves(0);
    }
    void see_trainer_die_in_round(const death& at) {
        CAPTURE(std::string{how_.words});
        CAPTURE(std::string{at.step});
        CAPTURE(at.count);
        ++version_;
        {
            auto trainer = tests::nccl_trainer_process({worker_.url()}, {at.step, at.count, at.act},
                                                       version_ + 1, how_.info());
            REQUIRE(trainer.to().take<char>() == 'o');
            trainer.to().put(version_);
            REQUIRE(trainer.to().take<char>() == 'r');
            REQUIRE(worker_.serves(version_, weights_of(version_)));
            if (std::string_view{at.act} == "die_beside") {
                worker_.arm({at.step, 0, "delay"});  // it dies while the call is under way
            }
            trainer.to().put(version_ + 1);
            CHECK(trainer.to().rest().empty());
        }
        check_refusal(worker_, at);
        check_serves(at.ahead);
    }

private:
    void check_text(const std::string& text, const nccl_worker& bad) const {
        CAPTURE(text);
        CHECK(says(text, "[phase "));
        CHECK(says(text, bad.url()));
        CHECK_FALSE(says(text, worker_.url()));
    }
    /// Whole, `ahead` versions later; and a fresh trainer finds it so.
    void check_serves(std::uint64_t ahead) {
        version_ += ahead;
        CHECK(worker_.serves(version_, weights_of(version_)));
        version_ += 10;
        CHECK(recovers({&worker_}, version_, how_.info()));
        static_cast<void>(worker_.failures());
    }

    manner how_;
    nccl_worker worker_;
    std::uint64_t version_ = 1;
};

std::vector<death> deaths_of_worker(const manner& how) {
    const auto ranks = static_cast<std::uint64_t>(how.ranks);
    return {{"call /start_weight_update"},
            {"done /start_weight_update"},
            {"call /update_weights", 0, "die", 0, "/update_weights"},
            {"broadcast", 0, "die", 0, "/update_weights"},
            {"transfer", 0, "die", 0, "/update_weights"},
            {"broadcast", how.broadcasts() - 2, "die", 0, "/update_weights"},
            {"transfer", (how.broadcasts() - 1) * ranks, "die", unknown},
            {"done /update_weights", 0, "die", unknown},
            {"call /finish_weight_update", 0, "die", 1},
            {"done /finish_weight_update", 0, "die", 1}};
}

std::vector<death> deaths_of_trainer(const manner& how) {
    const auto ranks = static_cast<std::uint64_t>(how.ranks);
    return {{"call /start_weight_update"},
            {"done /start_weight_update"},
            {"call /update_weights"},
            {"broadcast", 0, "die_late", 0, "/update_weights"},
            {"transfer", 0, "die", 0, "/update_weights"},
            {"transfer", (how.broadcasts() - 1) * ranks, "die", 0, "/update_weights"},
            {"wait", 0, "die"},
            {"done /update_weights"},
            {"call /finish_weight_update"},
            {"call /finish_weight_update", 0, "die_beside", 0, "/finish_weight_update"},
            {"done /finish_weight_update", 0, "die", 1}};
}

}  // namespace

TEST_CASE(
    "nccl: a worker that dies in init is an error at the trainer and costs the other nothing") {
    survivor ours{native};
    for (const auto& at : deaths_in_init) {
        ours.see_worker_die_in_init(at);
    }
    for (const auto& how : others) {
        survivor other{how};
        other.see_worker_die_in_init(deaths_in_init[3]);
        other.see_worker_die_in_init(deaths_in_init[5]);
    }
}

TEST_CASE("nccl: a worker that dies in a round is an error, and the other keeps a whole version") {
    survivor ours{native};
    for (const auto& at : deaths_of_worker(native)) {
        ours.see_worker_die_in_round(at);
    }
    for (const auto& how : others) {
        survivor other{how};
        const auto deaths = deaths_of_worker(how);
        for (const std::size_t i : {0U, 2U, 4U, 5U, 8U}) {
            other.see_worker_die_in_round(deaths[i]);
        }
    }
}

TEST_CASE("nccl: a trainer that dies in init leaves the worker free for the next") {
    survivor ours{native};
    for (const auto& at : deaths_in_init) {
        ours.see_trainer_die_in_init(at);
    }
    for (const auto& how : others) {
        survivor other{how};
        other.see_trainer_die_in_init(deaths_in_init[3]);
        other.see_trainer_die_in_init(deaths_in_init[5]);
    }
}

TEST_CASE("nccl: a trainer that dies between init and its first round leaves the worker free") {
    nccl_worker worker;
    REQUIRE(recovers({&worker}, 1));
    {
        auto trainer = tests::nccl_trainer_process({worker.url()}, {}, 0);
        REQUIRE(trainer.to().take<char>() == 'o');
        trainer.kill();
    }
    CHECK(worker.serves(1, weights_of(1)));
    CHECK(recovers({&worker}, 2));
}

TEST_CASE("nccl: a trainer that dies in a round leaves a whole version served") {
    survivor ours{native};
    for (const auto& at : deaths_of_trainer(native)) {
        ours.see_trainer_die_in_round(at);
    }
    for (const auto& how : others) {
        survivor other{how};
        const auto deaths = deaths_of_trainer(how);
        for (const std::size_t i : {1U, 3U, 4U, 5U, 8U}) {
            other.see_trainer_die_in_round(deaths[i]);
        }
    }
}

TEST_CASE("nccl: a worker that is stopped ends the trainer's wait at the deadline") {
    for (const auto& how : {native, others[0], others[2]}) {
        CAPTURE(std::string{how.words});
        auto worker = how.worker();
        {
            nccl_trainer trainer{{worker.url()}, how.info()};
            REQUIRE(trainer.round(1).all_committed());
            worker.arm({"broadcast", 2, "stop"});
            const auto begin = deadline::clock::now();
            const auto text = text_of_failure([&] { trainer.round(2, 2s); });
            CHECK(deadline::clock::now() - begin < 8s);
            CAPTURE(text);
            CHECK(text.starts_with("timeout"));
            CHECK(says(text, "[phase update]"));
        }
        worker.process().resume();
        CHECK(worker.serves(1, weights_of(1)));
        CHECK(recovers({&worker}, 3, how.info()));
    }
}

TEST_CASE("nccl: a worker that answers 500 while the trainer broadcasts ends the broadcast") {
    const std::vector<std::pair<const char*, std::uint64_t>> steps{
        {"call /update_weights", 0}, {"broadcast", 0}, {"broadcast", 2}, {"wait", 1}};
    for (const auto& how : {native, others[0], others[1], others[2], others[3]}) {
        for (const auto& [step, count] : steps) {
            CAPTURE(std::string{how.words});
            CAPTURE(std::string{step});
            CAPTURE(count);
            auto good = how.worker();
            auto bad = how.worker();
            {
                nccl_trainer trainer{{good.url(), bad.url()}, how.info()};
                REQUIRE(trainer.round(1).all_committed());
                bad.arm({step, count, "throw"});
                const auto begin = deadline::clock::now();
                const auto text = text_of_failure([&] { trainer.round(2, 15s); });
                CHECK(deadline::clock::now() - begin < 15s);
                CAPTURE(text);
                CHECK(says(text, "this rank was told to fail"));
                CHECK(says(text, bad.url()));
                const auto refusal = bad.failure_of("/update_weights");
                CAPTURE(refusal);
                CHECK(says(refusal, "this rank was told to fail"));
                const auto& peers = trainer.engine.last_report().peers;
                REQUIRE(peers.size() == 2);
                CHECK(peers[1].status == peer_status::failed);
                // The other may have had everything, and has committed then.
                const std::uint64_t served = peers[0].status == peer_status::committed ? 2 : 1;
                CHECK((served == 1 || std::string_view{step} == "wait"));
                CHECK(good.serves(served, weights_of(served)));
                CHECK(bad.serves(1, weights_of(1)));
                // The engine opens the group anew by itself.
                CHECK(trainer.round(21).all_committed());
                CHECK(good.serves(21, trainer.weights));
                CHECK(bad.serves(21, trainer.weights));
            }
            CHECK(recovers({&good, &bad}, 30, how.info()));
        }
    }
}
