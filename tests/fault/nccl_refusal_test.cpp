// SPDX-License-Identifier: Apache-2.0
//
// `nccl` between ends that do not fit each other, and where it cannot meet: versions, sizes of the
// group, ranks, ports, stores that lie or say nothing. Both sides say what is wrong, in time, and
// the worker goes on serving. And `in_place`, where a failed round leaves a mix.

#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../support/nccl_processes.hpp"
#include "../support/scripted_server.hpp"
#include "../support/vllm_form_trainer.hpp"

namespace {

using namespace weightwire;
using namespace std::chrono_literals;
using tests::nccl_trainer;
using tests::nccl_worker;
using tests::recovers;
using tests::says;
using tests::small_chunks;
using tests::small_weights;
using tests::text_of_failure;
using tests::vllm_form_trainer;
using tests::weights_of;

const std::string init_path = "/init_weight_transfer_engine";
const std::string update_path = "/update_weights";

/// Opens a trainer, which has to fail within `budget`, and returns its text.
std::string text_of_opening(const std::vector<std::string>& urls, std::chrono::milliseconds budget,
                            const tests::host_nccl_info& info = small_chunks()) {
    const auto begin = deadline::clock::now();
    auto text = text_of_failure([&] { nccl_trainer{urls, info, budget}; });
    CHECK(deadline::clock::now() - begin < budget + 1s);
    return text;
}

/// A port that somebody listens at.
struct taken_port {
    weightwire::http::detail::listener held = weightwire::http::detail::listen_at("127.0.0.1", 0);
};

}  // namespace

TEST_CASE("nccl: another version of NCCL is named on both sides before anything waits") {
    nccl_worker worker{{.nccl_version = 22707}};
    const auto text = text_of_opening({worker.url()}, 30s);
    CAPTURE(text);
    CHECK(text.starts_with("mismatch [phase init]"));
    CHECK(says(text, worker.url()));
    const auto refusal = worker.failure_of(init_path);
    CAPTURE(refusal);
    for (const auto& said : {text, refusal}) {
        CHECK((says(said, "22809") || says(said, "2.28.9")));
        CHECK((says(said, "22707") || says(said, "2.27.7")));
    }
}

TEST_CASE("nccl: a world size that is not the servers' is refused before anything waits") {
    nccl_worker worker{{.ranks = 2}};
    small_weights weights{tests::nccl_parameters, tests::nccl_elements};
    const auto text = text_of_failure([&] {
        static_cast<void>(trainer_init(small_chunks(), tests::clients_of({worker.url()}), weights,
                                       {.world_sizes = {3}}));
    });
    CAPTURE(text);
    CHECK(text.starts_with("mismatch"));
    CHECK(says(text, worker.url()));
    CHECK(says(text, "2 ranks, 3"));
    CHECK(recovers({&worker}, 1));
}

TEST_CASE("nccl: a server that counts more ranks than it has ends both waits in time") {
    for (const char* vllm : {"", "0.33.0"}) {
        CAPTURE(std::string{vllm});
        nccl_worker worker{{.vllm = vllm}};
        REQUIRE(recovers({&worker}, 1));
        worker.arm({"call /get_world_size", 0, "claim 2"});
        const auto text = text_of_opening({worker.url()}, 2s);
        CAPTURE(text);
        CHECK(text.starts_with("timeout [phase init]"));
        const auto refusal = worker.failure_of(init_path);
        CAPTURE(refusal);
        CHECK(says(refusal, "[phase init]"));
        CHECK(worker.serves(1, weights_of(1)));
        CHECK(recovers({&worker}, 2));
    }
}

TEST_CASE("nccl: a server that counts fewer ranks than it has is refused by both") {
    for (const char* vllm : {"", "0.33.0"}) {
        CAPTURE(std::string{vllm});
        nccl_worker worker{{.ranks = 2, .vllm = vllm}};
        REQUIRE(recovers({&worker}, 1));
        worker.arm({"call /get_world_size", 0, "claim 1"});
        const auto text = text_of_opening({worker.url()}, 20s);
        CAPTURE(text);
        CHECK(says(text, worker.url()));
        CHECK(says(text, "rank"));
        const auto refusal = worker.failure_of(init_path);
        CAPTURE(refusal);
        CHECK(says(refusal, "rank"));
        CHECK(worker.serves(1, weights_of(1)));
        CHECK(recovers({&worker}, 2));
    }
}

TEST_CASE("nccl: a rank that comes twice is an error on every side") {
    for (const char* vllm : {"", "0.33.0", "0.29.0"}) {
        CAPTURE(std::string{vllm});
        nccl_worker two{{.ranks = 2, .vllm = vllm}};
        nccl_worker one{{.vllm = vllm}};
        REQUIRE(recovers({&two, &one}, 1));
        two.arm({"call /get_world_size", 0, "claim 1"});  // its second is also the other's first
        const auto text = text_of_opening({two.url(), one.url()}, 3s);
        CAPTURE(text);
        CHECK(says(text, "[phase init]"));
        // Which of the two comes first is not said. The late one finds the group full, or is named.
        CHECK((says(text, "rank 2 has come twice") || says(text, two.url()) ||
               says(text, one.url())));
        const auto until = deadline::after(10s);
        std::string refusals;
        while (!says(refusals, init_path) && !until.expired()) {
            refusals += two.failures() + one.failures();
        }
        CAPTURE(refusals);
        CHECK(says(refusals, init_path));
        CHECK(says(refusals, "rank"));
        CHECK(two.serves(1, weights_of(1)));
        CHECK(one.serves(1, weights_of(1)));
        CHECK(recovers({&two, &one}, 2));
    }
}

TEST_CASE("nccl: one server given twice is an error in time, and costs it nothing") {
    nccl_worker worker;
    REQUIRE(recovers({&worker}, 1));
    const auto text = text_of_opening({worker.url(), worker.url()}, 4s);
    CAPTURE(text);
    CHECK(says(text, worker.url()));
    CHECK(worker.serves(1, weights_of(1)));
    CHECK(recovers({&worker}, 2));
}

TEST_CASE("nccl: a taken port is named, and hinders only servers that need the store") {
    nccl_worker older{{.vllm = "0.29.0"}};
    nccl_worker newer{{.vllm = "0.33.0"}};
    nccl_worker ours;
    for (const auto* worker : {&older, &newer, &ours}) {
        REQUIRE(recovers({worker}, 1));
    }
    auto info = small_chunks();
    {
        const taken_port taken;
        const auto port = std::to_string(taken.held.port);
        info.master_port = taken.held.port;
        info.meeting = nccl::rendezvous::store;
        const auto asked = text_of_opening({older.url()}, 20s, info);
        CAPTURE(asked);
        CHECK(asked.starts_with("resource"));
        CHECK(says(asked, port));
        info.meeting = nccl::rendezvous::automatic;
        const auto needed = text_of_opening({older.url()}, 20s, info);
        CAPTURE(needed);
        CHECK(says(needed, older.url()));
        CHECK(says(needed, "nccl_unique_id_b64"));
        CHECK(says(needed, port));
        CHECK(older.serves(1, weights_of(1)));
        CHECK(recovers({&newer}, 2, info));
        CHECK(recovers({&ours}, 2, info));
    }
    CHECK(recovers({&older}, 2, info));
    CHECK(recovers({&older}, 3, info));  // the port is free again at once
}

TEST_CASE("nccl: clients of the store that send garbage or nothing hold nobody up") {
    nccl_worker worker{{.vllm = "0.29.0", .rogues = true}};
    for (const bool packed : {true, false}) {
        CHECK(recovers({&worker}, packed ? 1 : 2, small_chunks(packed)));
    }
}

TEST_CASE("nccl: a store that answers with garbage, with nothing or not at all is named in time") {
    using weightwire_tests::raw_connection;
    using weightwire_tests::scripted_server;
    nccl_worker worker{{.vllm_call_budget = 1s}};
    REQUIRE(recovers({&worker}, 1));
    const auto refusal_with = [&](int port) {
        const auto begin = deadline::clock::now();
        const auto answer =
            worker.ask("POST", init_path, vllm_form_trainer::init_body(port, 2, "false"));
        CHECK(deadline::clock::now() - begin < 4s);
        CHECK(answer.status == 500);
        return answer.body;
    };
    const auto check = [&](int port) {
        const auto refusal = refusal_with(port);
        CAPTURE(refusal);
        CHECK(says(refusal, "store"));
        CHECK(says(refusal, std::to_string(port)));
        CHECK(worker.serves(1, weights_of(1)));
    };
    SUBCASE("garbage") {
        scripted_server store{[](raw_connection& client) {
            static_cast<void>(client.read(4));
            static_cast<void>(client.send(std::string(4096, '\xFF')));
        }};
        check(store.port());
    }
    SUBCASE("nothing") {
        scripted_server store{
            [](raw_connection& client) { static_cast<void>(client.read_to_end()); }};
        check(store.port());
    }
    SUBCASE("it hangs up") {
        scripted_server store{[](raw_connection&) {}};
        check(store.port());
    }
    SUBCASE("nobody is there") {
        int port = 0;
        {
            const taken_port was;
            port = was.held.port;
        }
        check(port);
    }
    SUBCASE("an id that is none") {
        rendezvous::tcp_store_server store;
        auto client =
            rendezvous::tcp_store_client::connect("127.0.0.1", store.port(), deadline::after(10s));
        client.set(nccl::unique_id_key, "cos\nsystem\n(S'true'\ntR.", deadline::after(10s));
        const auto refusal = refusal_with(store.port());
        CAPTURE(refusal);
        CHECK(says(refusal, "protocol"));
        CHECK(worker.serves(1, weights_of(1)));
    }
    CHECK(recovers({&worker}, 2));
}

TEST_CASE("nccl: a worker driven as vLLM's survives a trainer that dies at any step") {
    struct step {
        std::string_view dies;
        std::string refused;
    };
    const std::vector<step> all{
        {"store", {}},   {"posted", init_path},  {"joined", init_path}, {"warm", {}},
        {"started", {}}, {"asked", update_path}, {"some", update_path}, {"updated", {}}};
    for (const std::string packed : {"false", "true", "by update"}) {
        nccl_worker worker{{.ranks = 2}};
        REQUIRE(recovers({&worker}, 1));
        std::uint64_t version = 1;
        const auto steps = packed == "false" ? all : std::vector<step>{all[2], all[6]};
        for (const auto& at : steps) {
            CAPTURE(packed);
            CAPTURE(std::string{at.dies});
            {
                tests::forked trainer{[&](tests::channel&) {
                    vllm_form_trainer dying{worker.url(), 3, packed};
                    dying.die_at(at.dies);
                    dying.open();
                    dying.round(weights_of(version + 1), version + 1);
                }};
                CHECK(trainer.to().rest().empty());
            }
            if (!at.refused.empty()) {
                const auto refusal = worker.failure_of(at.refused);
                CAPTURE(refusal);
                CHECK(says(refusal, at.refused));
            }
            CHECK(worker.serves(version, weights_of(version)));
            version += 2;
            vllm_form_trainer fresh{worker.url(), 3, packed};
            fresh.open();
            fresh.round(weights_of(version), version);
            CHECK(worker.serves(version, weights_of(version)));
            static_cast<void>(worker.failures());
        }
    }
}

TEST_CASE("nccl: a worker driven as vLLM's says why it failed, and takes the next group") {
    for (const std::string packed : {"false", "true", "by update"}) {
        CAPTURE(packed);
        nccl_worker worker;
        {
            vllm_form_trainer trainer{worker.url(), 2, packed};
            trainer.open();
            trainer.round(weights_of(1), 1);
            REQUIRE(worker.serves(1, weights_of(1)));
            worker.arm({"broadcast", 2, "throw"});
            const auto text = text_of_failure([&] { trainer.round(weights_of(2), 2); });
            CAPTURE(text);
            CHECK(says(text, "this rank was told to fail"));
        }
        CHECK(worker.serves(1, weights_of(1)));
        vllm_form_trainer fresh{worker.url(), 2, packed};
        fresh.open();
        fresh.round(weights_of(3), 3);
        CHECK(worker.serves(3, weights_of(3)));
    }
}

TEST_CASE("nccl: in_place, a round that fails leaves the worker dirty until a full update") {
    struct manner {
        const char* words;
        bool packed = true;
        int ranks = 1;
        const char* vllm = "";
    };
    for (const manner& how :
         {manner{"packed"}, manner{"unpacked", false}, manner{"two ranks", true, 2},
          manner{"vLLM's wire", true, 1, "0.33.0"}, manner{"by store", false, 1, "0.29.0"}}) {
        CAPTURE(std::string{how.words});
        nccl_worker worker{{.ranks = how.ranks, .mode = commit_mode::in_place, .vllm = how.vllm}};
        const auto info = small_chunks(how.packed);
        const auto check_dirty = [&](const std::string& last_whole) {
            const auto health = worker.ask("GET", "/health");
            CAPTURE(health.body);
            CHECK(health.status == 503);
            CHECK(says(health.body, "dirty"));
            CHECK(says(health.body, "version is " + last_whole));
            CHECK(worker.ask("POST", "/weight_checker", R"({"action":"checksum"})").status == 503);
        };
        {
            nccl_trainer trainer{{worker.url()}, info};
            REQUIRE(trainer.round(1).all_committed());
            CHECK(worker.ask("GET", "/health").status == 200);
            worker.arm({"broadcast", 2, "throw"});
            const auto text = text_of_failure([&] { trainer.round(2, 15s); });
            CAPTURE(text);
            CHECK(says(text, worker.url()));
            CHECK(says(text, "this rank was told to fail"));
            check_dirty("1");
            CHECK(trainer.round(3).all_committed());
            CHECK(worker.ask("GET", "/health").status == 200);
            CHECK(worker.serves(3, trainer.weights));
        }
        {
            auto dying =
                tests::nccl_trainer_process({worker.url()}, {"transfer", 1, "die"}, 4, info);
            REQUIRE(dying.to().take<char>() == 'o');
            dying.to().put(std::uint64_t{4});
            CHECK(dying.to().rest().empty());
        }
        static_cast<void>(worker.failure_of(update_path));
        check_dirty("3");
        CHECK(recovers({&worker}, 5, info));
        CHECK(worker.ask("GET", "/health").status == 200);
    }
}

TEST_CASE("nccl: in_place, what fails before bytes can have come leaves the worker clean") {
    for (const char* step :
         {"call /init_weight_transfer_engine", "join", "warm_up", "call /start_weight_update"}) {
        CAPTURE(std::string{step});
        nccl_worker worker{{.mode = commit_mode::in_place}};
        REQUIRE(recovers({&worker}, 1));
        worker.arm({step, 0, "throw"});
        const auto text = text_of_failure([&] {
            nccl_trainer trainer{{worker.url()}};
            trainer.round(2);
        });
        CAPTURE(text);
        CHECK(says(text, "this rank was told to fail"));
        CHECK(worker.ask("GET", "/health").status == 200);
        CHECK(worker.serves(1, weights_of(1)));
        CHECK(recovers({&worker}, 3));
    }
}
