// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <future>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/engine/local_sync_client.hpp>
#include <weightwire/engine/worker_service.hpp>

#include "../support/worker_rig.hpp"

using namespace weightwire;
using namespace tests;

namespace {

/// Sends one request and reads the reply as JSON.
template <class Service>
struct caller {
    Service& service;

    http_response raw(std::string_view method, std::string_view target, std::string_view body = {},
                      std::string_view type = "application/json") const {
        const auto question = target.find('?');
        return service.handle(
            {.method = method,
             .path = target.substr(0, question),
             .query = question == std::string_view::npos ? "" : target.substr(question + 1),
             .content_type = type,
             .body = body});
    }
    http_response post(std::string_view target, std::string_view body = {}) const {
        return raw("POST", target, body);
    }
    http_response get(std::string_view target) const { return raw("GET", target); }
};
template <class Service>
caller(Service&) -> caller<Service>;

nlohmann::json json_of(const http_response& response) {
    return nlohmann::json::parse(response.body);
}
/// The message of vLLM's envelope, whose other members are checked on the way.
std::string message_of(const http_response& response) {
    const auto body = json_of(response);
    CHECK(body["error"]["code"] == response.status);
    CHECK(body["error"]["type"].is_string());
    CHECK(body["error"].contains("param"));
    return body["error"]["message"];
}
bool has(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

std::string quoted_init(const std::string& init_info) {
    return "{\"init_info\":" + init_info + "}";
}

template <class Service>
http_response native_update(const caller<Service>& ask, const hand_driven_trainer& trainer) {
    const auto body = wire::encode(trainer.update_message());
    return ask.raw("POST", "/update_weights", {body.data(), body.size()},
                   wire::native_content_type);
}

}  // namespace

TEST_CASE("Every route answers its method, 405 to the other and 404 to what is not there") {
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata()};
    const caller ask{rig.service};
    for (const std::string_view path :
         {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
          "/finish_weight_update", "/update_weight_version", "/pause", "/resume",
          "/weight_checker"}) {
        CAPTURE(path);
        const auto response = ask.get(path);
        CHECK(response.status == 405);
        CHECK(message_of(response) == "Method Not Allowed");
    }
    for (const std::string_view path :
         {"/weight_info", "/is_paused", "/get_world_size", "/health", "/version", "/metrics"}) {
        CAPTURE(path);
        CHECK(ask.get(path).status == 200);
        CHECK(ask.post(path).status == 405);
    }
    for (const std::string_view path : {"/", "/v1/models", "/update_weights/", "/start"}) {
        CAPTURE(path);
        CHECK(ask.post(path).status == 404);
        CHECK(message_of(ask.get(path)) == "Not Found");
    }
}

TEST_CASE("vLLM's four calls get vLLM's messages") {
    small_weights weights{4, 10};
    worker_rig<> rig{weights.metadata(), 2};
    hand_driven_trainer trainer{weights, 2};
    const caller ask{rig.service};
    CHECK(ask.get("/weight_info").body.find(R"("weight_version":"default")") != std::string::npos);
    CHECK(json_of(ask.post("/init_weight_transfer_engine", quoted_init(trainer.vllm_init()))) ==
          nlohmann::json{{"message", "Weight transfer initialized"}});
    for (int round = 0; round < 2; ++round) {
        // The current Python client sends no body at all; older ones send {}.
        CHECK(json_of(ask.post("/start_weight_update", round == 0 ? "" : "{}")) ==
              nlohmann::json{{"message", "Weight update started"}});
        trainer.beside_sending([&] {
            CHECK(json_of(ask.post("/update_weights", trainer.parts()[0].vllm_bodies.at(0))) ==
                  nlohmann::json{{"message", "Weights updated"}});
        });
        CHECK(json_of(ask.post("/finish_weight_update",
                               round == 0 ? "" : R"({"weight_version":"step 2"})")) ==
              nlohmann::json{{"message", "Weight update finished"}});
    }
    const auto info = json_of(ask.get("/weight_info"));
    CHECK(info["weight_version"] == "step 2");
    CHECK(info["weightwire"]["version"] == 2);
    CHECK(info["weightwire"]["dirty"] == false);
    CHECK(info["weightwire"]["mode"] == "flip");
    CHECK(info["weightwire"]["epoch"] == rig.engine.status().epoch);
    CHECK(rig.serves(2, weights));
}

TEST_CASE("The native calls answer what the codec reads") {
    small_weights weights{4, 10};
    worker_rig<> rig{weights.metadata()};
    hand_driven_trainer trainer{weights};
    const caller ask{rig.service};
    const auto init = wire::decode_init_reply(
        ask.post("/init_weight_transfer_engine", wire::encode(trainer.init_message())).body);
    CHECK(init.plan_hash == trainer.init_message().plan_hash);
    CHECK(init.version == 0);
    CHECK(init.commit_mode == "flip");
    CHECK_FALSE(init.dirty);
    trainer.epoch = init.epoch;
    trainer.session =
        wire::decode_start_reply(
            ask.post("/start_weight_update", wire::encode(trainer.start_message(9))).body)
            .session;
    trainer.beside_sending(
        [&] { CHECK(wire::decode_update_reply(native_update(ask, trainer).body).bytes == 160); });
    CHECK(wire::decode_finish_reply(
              ask.post("/finish_weight_update", wire::encode(trainer.finish_message(9))).body)
              .version == 9);
    CHECK(json_of(ask.get("/weight_info"))["weight_version"] == "9");
}

TEST_CASE("A native trainer that lost the worker gets 409, other state errors 500") {
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata()};
    hand_driven_trainer trainer{weights};
    const caller ask{rig.service};
    // A worker that was restarted knows no epoch: the trainer may simply begin again.
    trainer.epoch = 3;
    const auto unknown = ask.post("/start_weight_update", wire::encode(trainer.start_message(1)));
    CHECK(unknown.status == 500);
    CHECK(message_of(unknown).starts_with("session [phase start]"));
    rig.init(trainer);
    trainer.epoch += 1;
    const auto stale = ask.post("/start_weight_update", wire::encode(trainer.start_message(1)));
    CHECK(stale.status == 409);
    CHECK(json_of(stale)["error"]["type"] == "Conflict");
    CHECK(message_of(stale).starts_with("session"));
    trainer.epoch -= 1;
    const auto no_session = native_update(ask, trainer);
    CHECK(no_session.status == 400);  // round 0 is no round
    trainer.round = 1;
    trainer.session = 77;
    CHECK(native_update(ask, trainer).status == 409);
}

TEST_CASE("Native errors keep their leaf, so that the trainer throws the same") {
    small_weights weights{4, 10};
    worker_rig<> rig{weights.metadata()};
    hand_driven_trainer trainer{weights};
    const caller ask{rig.service};
    auto wrong = trainer.init_message();
    wrong.plan_hash ^= 1;
    const auto mismatch = ask.post("/init_weight_transfer_engine", wire::encode(wrong));
    CHECK(mismatch.status == 400);
    CHECK(message_of(mismatch).starts_with("mismatch [phase init]"));
    rig.init(trainer);
    trainer.session = rig.engine.start(trainer.start_message(1), {}).session;
    trainer.beside_sending([&] { CHECK(native_update(ask, trainer).status == 200); });
    auto finish = trainer.finish_message(1);
    finish.digests[2] ^= 1;
    const auto corrupt = ask.post("/finish_weight_update", wire::encode(finish));
    CHECK(corrupt.status == 500);
    CHECK(message_of(corrupt).starts_with("integrity [phase finish]"));
    CHECK(json_of(corrupt)["error"]["param"] == weights.metadata()[2].name);
    const auto broken = ask.post("/start_weight_update", R"({"weightwire":{"epoch":1}})");
    CHECK(broken.status == 400);
    CHECK(message_of(broken).starts_with("protocol"));
}

TEST_CASE("Bodies that are wrong get 400, what a worker finds wrong gets 500 in vLLM's words") {
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata()};
    hand_driven_trainer trainer{weights};
    const caller ask{rig.service};
    for (const std::string_view path :
         {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
          "/finish_weight_update", "/update_weight_version", "/weight_checker"}) {
        for (const std::string_view body : {"{", "[1]", "\"text\"", "nonsense"}) {
            CAPTURE(path);
            CAPTURE(body);
            const auto response = ask.post(path, body);
            CHECK(response.status == 400);
            CHECK(has(message_of(response), "Invalid JSON format"));
        }
    }
    CHECK(message_of(ask.post("/init_weight_transfer_engine", "{}")) ==
          "Missing 'init_info' in request body");
    CHECK(message_of(ask.post("/update_weights", "{}")) == "Missing 'update_info' in request body");

    const auto worker_says = [&](std::string_view path, std::string_view body) {
        const auto response = ask.post(path, body);
        CHECK(response.status == 500);
        const auto message = message_of(response);
        CHECK(message.starts_with("Call to collective_rpc method failed: "));
        return message;
    };
    const std::string empty = R"({"update_info":{"names":[],"dtype_names":[],"shapes":[]}})";
    CHECK(has(worker_says("/update_weights", empty),
              "start_weight_update must be called before update_weights."));
    CHECK(has(worker_says("/finish_weight_update", ""),
              "finish_weight_update called without a matching start_weight_update."));
    CHECK(has(worker_says("/start_weight_update", ""), "weight transfer not initialized."));
    ask.post("/init_weight_transfer_engine", quoted_init(trainer.vllm_init()));
    ask.post("/start_weight_update");
    CHECK(has(worker_says("/start_weight_update", ""),
              "start_weight_update called while a weight update is already active. Call "
              "finish_weight_update first."));
    // Not JSON is no update, so the session goes on; a bad list is a failing one, which ends it.
    CHECK(ask.post("/update_weights", "{").status == 400);
    CHECK(rig.engine.status().session != 0);
    CHECK(has(worker_says("/update_weights",
                          R"({"update_info":{"names":["a","b"],"dtype_names":["float32"],)"
                          R"("shapes":[[1],[1]]}})"),
              "`dtype_names` should be of the same size as `names`"));
    CHECK(rig.engine.status().session == 0);
}

TEST_CASE("update_weight_version sets the label alone") {
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata()};
    const caller ask{rig.service};
    CHECK(json_of(ask.post("/update_weight_version", R"({"new_version":"checkpoint \"b\""})")) ==
          nlohmann::json{{"success", true}, {"new_version", "checkpoint \"b\""}});
    const auto info = json_of(ask.get("/weight_info"));
    CHECK(info["weight_version"] == "checkpoint \"b\"");
    CHECK(info["weightwire"]["version"] == 0);
    CHECK(ask.post("/update_weight_version", "{}").status == 400);
}

namespace {

/// Hooks of an inference loop.
struct loop_hooks {
    std::vector<pause_request>* pauses;
    int* resumes;
    std::string* trouble;
    void on_pause(const pause_request& request) {
        if (*trouble == "bad") {
            throw std::invalid_argument{"cannot pause so"};
        }
        if (*trouble == "broken") {
            throw std::runtime_error{"the loop is gone"};
        }
        pauses->push_back(request);
    }
    void on_resume() { ++*resumes; }
};

}  // namespace

TEST_CASE("Pause reads its query, tells the loop and is undone by resume") {
    small_weights weights{2, 10};
    parameter_table table{weights.metadata()};
    worker_engine engine{testing::loopback{}, table};
    std::vector<pause_request> pauses;
    int resumes = 0;
    std::string trouble;
    worker_service service{engine, loop_hooks{&pauses, &resumes, &trouble}};
    const caller ask{service};

    CHECK(ask.get("/is_paused").body == R"({"is_paused":false})");
    // A body is ignored: the arguments are in the query.
    CHECK(ask.post("/pause", R"({"mode":"keep"})").body == R"({"status":"paused"})");
    CHECK(pauses.back().mode == pause_mode::abort);
    CHECK(pauses.back().clear_cache);
    CHECK(service.paused());
    CHECK(ask.get("/is_paused").body == R"({"is_paused":true})");
    CHECK(ask.post("/resume").body == R"({"status":"resumed"})");
    CHECK(resumes == 1);
    CHECK_FALSE(service.paused());

    CHECK(ask.post("/pause?mode=keep&clear_cache=false").status == 200);
    CHECK(pauses.back().mode == pause_mode::keep);
    CHECK_FALSE(pauses.back().clear_cache);
    CHECK(ask.post("/pause?wait_for_inflight_requests=true").status == 200);
    CHECK(pauses.back().mode == pause_mode::wait);
    ask.post("/resume");

    const auto bad_mode = ask.post("/pause?mode=sideways");
    CHECK(bad_mode.status == 400);
    CHECK(has(message_of(bad_mode), "mode"));
    CHECK(ask.post("/pause?clear_cache=perhaps").status == 400);
    trouble = "bad";
    const auto refused = ask.post("/pause");
    CHECK(refused.status == 400);
    CHECK(json_of(refused) ==
          nlohmann::json{{"error", "Failed to pause generation: cannot pause so"}});
    trouble = "broken";
    CHECK(ask.post("/pause").status == 500);
    CHECK_FALSE(service.paused());
}

TEST_CASE("The version reply offers the native wire, the world size counts ranks") {
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata(), 3};
    const caller ask{rig.service};
    std::string version;
    const auto offer = wire::decode_version_reply(ask.get("/version").body, version);
    REQUIRE(offer);
    CHECK(version == version_string);
    CHECK(offer->backends == std::vector<std::string>{"loopback"});
    CHECK(offer->memory_kinds == std::vector<std::string>{"host"});
    CHECK(offer->commit_mode == "flip");
    CHECK(offer->max_update_bytes == 256U << 20U);
    CHECK(ask.get("/get_world_size").body == R"({"world_size":3})");
    CHECK(ask.get("/get_world_size?include_dp=false").body == R"({"world_size":3})");
    CHECK(ask.get("/get_world_size?include_dp=2").status == 400);
}

TEST_CASE("A dirty worker is unhealthy and says which version was whole") {
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata(), 1, {.mode = commit_mode::in_place}};
    hand_driven_trainer trainer{weights};
    const caller ask{rig.service};
    CHECK(ask.get("/health").status == 200);
    CHECK(ask.get("/health").body.empty());
    rig.init(trainer);
    rig.round(trainer, 4);
    CHECK(ask.get("/health").status == 200);
    trainer.session = rig.engine.start(trainer.start_message(5), {}).session;
    const auto sick = ask.get("/health");
    CHECK(sick.status == 503);
    CHECK(has(message_of(sick), "last whole version is 4"));
    const auto info = json_of(ask.get("/weight_info"));
    CHECK(info["weight_version"] == "4");
    CHECK(info["weightwire"]["dirty"] == true);
    CHECK(ask.post("/weight_checker", R"({"action":"checksum"})").status == 503);
    trainer.beside_sending([&] { native_update(ask, trainer); });
    rig.engine.finish(trainer.finish_message(5), {});
    CHECK(ask.get("/health").status == 200);
}

TEST_CASE("The weight checker digests what is committed") {
    small_weights weights{3, 10};
    worker_rig<> rig{weights.metadata(), 2};
    hand_driven_trainer trainer{weights, 2};
    const caller ask{rig.service};
    rig.init(trainer);
    weights.set(1);
    rig.round(trainer, 1);
    const auto sums = json_of(ask.post("/weight_checker", R"({"action":"checksum"})"))["checksums"];
    CHECK(sums.size() == 6);
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK(sums["0/" + weights.metadata()[i].name] == weights.digest_of(i));
        CHECK(sums["1/" + weights.metadata()[i].name] == weights.digest_of(i));
    }
    auto baseline = sums;
    const auto compare = [&] {
        return json_of(
            ask.post("/weight_checker",
                     nlohmann::json{{"action", "compare"}, {"baseline", baseline}}.dump()));
    };
    CHECK(compare() == nlohmann::json{{"match", true}, {"mismatches", nlohmann::json::array()}});
    const auto key = "1/" + weights.metadata()[1].name;
    baseline[key] = "0000000000000000";
    baseline["0/none.such"] = "0000000000000000";
    CHECK(compare()["mismatches"] == nlohmann::json::array({"0/none.such", key}));
    CHECK(json_of(ask.post("/weight_checker", R"({"action":"reset"})")) ==
          nlohmann::json{{"status", "reset"}});
    CHECK(compare()["mismatches"].size() == 7);
    CHECK(json_of(ask.get("/weight_info"))["weight_version"] == "reset");
    CHECK(ask.post("/weight_checker", R"({"action":"guess"})").status == 400);
    CHECK(ask.post("/weight_checker", R"({"action":"compare"})").status == 400);
}

TEST_CASE("The checksums of one rank are keyed by name alone") {
    small_weights weights{1, 10};
    worker_rig<> rig{weights.metadata()};
    const caller ask{rig.service};
    const auto sums = json_of(ask.post("/weight_checker", R"({"action":"checksum"})"))["checksums"];
    CHECK(sums.contains(weights.metadata()[0].name));
}

namespace {

/// A sink that keeps nothing and shows nothing.
struct blind_sink : archetypes::weight_sink {};

}  // namespace

TEST_CASE("A sink that cannot do what a route needs is told so, not faked") {
    blind_sink sink;
    worker_engine engine{testing::loopback{}, sink};
    worker_service service{engine};
    const caller ask{service};
    CHECK(ask.post("/weight_checker", R"({"action":"checksum"})").status == 501);
    CHECK(ask.post("/weight_checker", R"({"action":"reset"})").status == 501);
    const auto init = ask.post("/init_weight_transfer_engine", R"({"init_info":{}})");
    CHECK(init.status == 500);
    CHECK(has(message_of(init), "add a member parameters()"));
    CHECK(json_of(ask.get("/weight_info"))["weightwire"]["mode"] == "");
}

TEST_CASE("A call meant for the process before a restart is stale after it") {
    small_weights weights{2, 10};
    worker_rig<> before{weights.metadata()};
    hand_driven_trainer first{weights};
    before.init(first);
    worker_rig<> after{weights.metadata()};
    hand_driven_trainer second{weights};
    after.init(second);
    const caller ask{after.service};
    CHECK(ask.post("/start_weight_update", wire::encode(first.start_message(1))).status == 409);
    CHECK(ask.post("/start_weight_update", wire::encode(second.start_message(1))).status == 200);
}

TEST_CASE("Metrics count what happened") {
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata()};
    hand_driven_trainer trainer{weights};
    const caller ask{rig.service};
    rig.init(trainer);
    rig.round(trainer, 6);
    ask.get("/health");
    ask.get("/nowhere");
    ask.post("/pause");
    const auto epoch = "weightwire_epoch " + std::to_string(rig.engine.status().epoch) + "\n";
    const auto response = ask.get("/metrics");
    CHECK(response.content_type.starts_with("text/plain; version=0.0.4"));
    for (const std::string_view line : std::initializer_list<std::string_view>{
             "weightwire_weight_version 6\n", "weightwire_dirty 0\n", epoch,
             "weightwire_paused 1\n", "weightwire_sessions_total{outcome=\"committed\"} 1\n",
             "weightwire_sessions_total{outcome=\"failed\"} 0\n",
             "weightwire_received_bytes_total 80\n",
             "weightwire_http_requests_total{route=\"/health\",status=\"200\"} 1\n",
             "weightwire_http_requests_total{route=\"other\",status=\"404\"} 1\n",
             "# TYPE weightwire_last_update_seconds gauge\n"}) {
        CAPTURE(line);
        CHECK(has(response.body, line));
    }
}

TEST_CASE("Questions are answered while an update blocks") {
    testing::gate gate;
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata()};
    hand_driven_trainer trainer{weights, 1, {.block_in_receive = gate.name()}};
    const caller ask{rig.service};
    rig.init(trainer);
    trainer.session = rig.engine.start(trainer.start_message(1), {}).session;
    trainer.beside_sending([&] {
        auto update = std::async(std::launch::async, [&] { return native_update(ask, trainer); });
        gate.wait_until_blocked(soon());
        for (const std::string_view path :
             {"/health", "/weight_info", "/metrics", "/version", "/get_world_size", "/is_paused"}) {
            CHECK(ask.get(path).status == 200);
        }
        CHECK(ask.post("/weight_checker", R"({"action":"checksum"})").status == 200);
        gate.release();
        CHECK(update.get().status == 200);
    });
}

TEST_CASE("The local client drives several services at once and gives a reply each") {
    small_weights weights{2, 10};
    worker_rig<> first{weights.metadata()};
    worker_rig<> second{weights.metadata(), 2};
    using service = std::remove_reference_t<decltype(first.service)>;
    local_sync_client client{std::vector<service*>{&first.service, &second.service}};
    static_assert(SyncClient<decltype(client)> && HasRequest<decltype(client)>);
    CHECK(client.peer_name(1) == "local/1");

    const auto sizes = client.world_size(true, soon());
    REQUIRE(sizes.size() == 2);
    CHECK(sizes[0].answer.body == R"({"world_size":1})");
    CHECK(sizes[1].answer.body == R"({"world_size":2})");

    const std::array<unsigned char, 2> only{0, 1};
    const std::array<std::string_view, 2> bodies{R"({"new_version":"a"})",
                                                 R"({"new_version":"b"})"};
    std::atomic<int> observed{0};
    const reply_observer count{[](void* seen, std::size_t peer, const peer_reply& reply) noexcept {
                                   *static_cast<std::atomic<int>*>(seen) +=
                                       reply.ok() ? 1 + static_cast<int>(peer) : 100;
                               },
                               &observed};
    const auto set =
        client.update_weight_version({.bodies = bodies, .only = only, .observer = count}, soon());
    CHECK(set[0].answer.fault == reply_fault::left_out);
    CHECK(set[1].ok());
    CHECK(observed == 2);
    CHECK(second.engine.status().label == "b");
    CHECK(first.engine.status().label == "default");
    CHECK_THROWS_AS(static_cast<void>(client.request(
                        "GET", "/health", {.only = std::span{only}.first(1)}, soon(), {})),
                    usage_error);
}

TEST_CASE("A local call ends at its deadline or stop, and the handler is told") {
    testing::gate gate;
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata()};
    local_sync_client client{rig.service};
    hand_driven_trainer trainer{weights, 1, {.block_in_receive = gate.name()}};
    rig.init(trainer);
    trainer.session = rig.engine.start(trainer.start_message(1), {}).session;
    trainer.round = 1;
    const auto body = wire::encode(trainer.update_message());
    const std::array<std::string_view, 1> bodies{std::string_view{body.data(), body.size()}};
    const control_message message{.bodies = bodies, .content_type = wire::native_content_type};
    SUBCASE("deadline") {
        const auto late = client.update(message, deadline::after(30ms));
        CHECK(late[0].answer.fault == reply_fault::timed_out);
    }
    SUBCASE("stop") {
        std::stop_source stop;
        auto call = std::async(std::launch::async,
                               [&] { return client.update(message, soon(), stop.get_token()); });
        gate.wait_until_blocked(soon());
        stop.request_stop();
        CHECK(call.get()[0].answer.fault == reply_fault::cancelled);
    }
    CHECK(rig.engine.status().session == 0);
    CHECK(client.health(soon())[0].ok());  // the client goes on
}
