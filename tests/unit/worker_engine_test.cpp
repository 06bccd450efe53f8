// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/core/failure.hpp>
#include <weightwire/engine/worker_engine.hpp>
#include <weightwire/sinks/loading_sink.hpp>

#include "../support/worker_rig.hpp"

using namespace weightwire;
using namespace tests;

namespace {

bool mentions(const failure& what, std::string_view text) {
    return what.message().find(text) != std::string::npos;
}

std::shared_ptr<const wire::vllm_update_request> request_of(const std::string& body) {
    return std::make_shared<const wire::vllm_update_request>(wire::parse_vllm_update(body));
}

}  // namespace

TEST_CASE("A native round makes exactly the trainer's bytes visible") {
    scene<> s;
    s.weights.set(7);
    s.start(7);
    wire::native_update_reply reply;
    s.trainer.beside_sending([&] { reply = s.rig.engine.update(s.trainer.update_message(), {}); });
    CHECK(reply.bytes == 6 * 4000);
    CHECK(reply.began_ns > 0);
    CHECK(reply.ended_ns >= reply.began_ns);
    CHECK(s.rig.engine.version() == 0);  // nothing is visible before finish
    CHECK(s.rig.engine.finish(s.trainer.finish_message(7), {}).version == 7);
    CHECK(s.rig.serves(7, s.weights));
    CHECK(s.rig.engine.status().label == "7");
    CHECK(s.rig.engine.status().committed == 1);
    CHECK(s.rig.engine.status().bytes == 6 * 4000);
    s.round(8);
    CHECK(s.rig.serves(8, s.weights));
}

TEST_CASE("Layer groups are announced as they fill") {
    scene<> s;
    s.round(1);
    CHECK(s.rig.sinks[0]->groups == std::vector<std::size_t>{0, 1, 2});
}

TEST_CASE("Four ranks receive side by side and commit together") {
    scene<> s{4};
    s.round(1);
    s.round(2);
    CHECK(s.rig.serves(2, s.weights));
    CHECK(s.rig.engine.status().bytes == 2 * 4 * 6 * 4000);
}

TEST_CASE("When one of four ranks fails to prepare all four stay old") {
    scene<> s{4};
    s.round(1);
    const auto old = s.weights;
    s.rig.sinks[2]->fails_prepare = true;
    const auto why = caught([&] { s.round(2); });
    CHECK(why.kind == "resource");
    CHECK(why.context.rank == 2);
    CHECK(s.rig.serves(1, old));
    CHECK(s.rig.engine.status().failed == 1);
    s.rig.sinks[2]->fails_prepare = false;
    s.round(2);  // the session is over: the same trainer may start again
    CHECK(s.rig.serves(2, s.weights));
}

TEST_CASE("A rank that fails stops the ranks that still wait, and its error is the one reported") {
    testing::gate gate;
    scene<> s{2, {}, {.block_in_receive = gate.name(), .block_rank = 2}};
    s.rig.sinks[0]->fails_group = true;  // while rank 1 is held at the gate
    s.start(1);
    const auto why = caught([&] { s.update(); });
    CHECK(why.kind == "resource");
    CHECK(why.context.rank == 0);
    CHECK(s.rig.engine.status().session == 0);
}

TEST_CASE("A call of an earlier epoch or session is stale and changes nothing") {
    scene<> s;
    s.round(1);
    hand_driven_trainer second{s.weights};
    s.rig.init(second);
    second.session = s.rig.engine.start(second.start_message(2), {}).session;

    s.trainer.session = second.session;
    try {
        s.rig.engine.finish(s.trainer.finish_message(2), {});
        FAIL("a stale finish was accepted");
    } catch (const session_refused& cause) {
        CHECK(cause.stale());
    }
    CHECK_THROWS_AS(s.rig.engine.start(s.trainer.start_message(9), {}), session_refused);
    CHECK_THROWS_AS(s.rig.engine.update(s.trainer.update_message(), {}), session_refused);
    auto nameless = second.update_message();
    nameless.session = 0;
    CHECK_THROWS_AS(s.rig.engine.update(nameless, {}), session_refused);
    auto old_session = second.update_message();
    old_session.session = 1;
    CHECK_THROWS_AS(s.rig.engine.update(old_session, {}), session_refused);

    CHECK(s.rig.engine.status().session == second.session);
    s.weights.set(2);
    second.beside_sending([&] { s.rig.engine.update(second.update_message(), {}); });
    s.rig.engine.finish(second.finish_message(2), {});
    CHECK(s.rig.serves(2, s.weights));
}

TEST_CASE("A new trainer takes over while an update is blocked") {
    testing::gate gate;
    scene<> s{1, {}, {.block_in_receive = gate.name()}};
    const auto old = s.weights;
    s.start(1);
    auto blocked = std::async(std::launch::async, [&] {
        return caught([&] { s.rig.engine.update(s.trainer.update_message(), {}); });
    });
    gate.wait_until_blocked(soon());
    CHECK(s.rig.engine.status().session != 0);  // questions are answered meanwhile
    CHECK(s.rig.engine.version() == 0);

    const auto before = s.rig.engine.status().epoch;
    hand_driven_trainer second{s.weights};
    s.rig.init(second);
    const auto why = blocked.get();
    CHECK(why.kind == "session");
    CHECK(mentions(why, "took this worker over"));
    CHECK(s.rig.engine.status().rolled_back == 1);
    CHECK(s.rig.engine.status().epoch == before + 1);
    s.weights.set(1);
    s.rig.round(second, 1);
    CHECK(s.rig.serves(1, s.weights));
}

TEST_CASE("An init rolls back a session that its trainer left open") {
    scene<> s;
    s.round(1);
    const auto old = s.weights;
    s.weights.set(2);
    s.start(2);
    s.update();
    hand_driven_trainer second{s.weights};
    s.rig.init(second);
    CHECK(s.rig.serves(1, old));
    s.rig.round(second, 2);
    CHECK(s.rig.serves(2, s.weights));
}

TEST_CASE("An init that does not agree is refused before it disturbs anybody") {
    scene<> s;
    s.start(1);
    const auto open = s.rig.engine.status().session;
    const auto epoch = s.rig.engine.status().epoch;
    const auto refused = [&](auto change) {
        auto message = s.trainer.init_message();
        change(message);
        return caught([&] { s.rig.engine.init(std::move(message), {}); });
    };
    CHECK(refused([](auto& m) { m.plan_hash ^= 1; }).kind == "mismatch");
    CHECK(mentions(refused([](auto& m) { m.backend = "nccl"; }), "the backend differs"));
    CHECK(refused([](auto& m) { m.wire = 2; }).kind == "mismatch");
    CHECK(refused([](auto& m) { m.world_size = 1; }).kind == "mismatch");
    CHECK(refused([](auto& m) { m.rank_offset = 0; }).kind == "mismatch");
    CHECK(s.rig.engine.status().session == open);
    CHECK(s.rig.engine.status().epoch == epoch);
}

TEST_CASE("The version only grows, unless the trainer forces it") {
    scene<> s;
    s.round(5);
    CHECK(mentions(caught([&] { s.start(5); }), "not above"));
    CHECK(mentions(caught([&] { s.start(4); }), "not above"));
    auto forced = s.trainer.start_message(3);
    forced.force = true;
    s.trainer.session = s.rig.engine.start(forced, {}).session;
    s.weights.set(3);
    s.update();
    s.rig.engine.finish(s.trainer.finish_message(3), {});
    CHECK(s.rig.serves(3, s.weights));
}

TEST_CASE("Calls out of order are refused in vLLM's words") {
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata()};
    auto& engine = rig.engine;
    CHECK(mentions(caught([&] { engine.start(wire::vllm_start{}, {}); }),
                   "weight transfer not initialized. Call init_transfer_engine() first."));
    CHECK(mentions(caught([&] {
                       engine.update(request_of(R"({"update_info":{"names":[],)"
                                                R"("dtype_names":[],"shapes":[]}})"),
                                     {});
                   }),
                   "start_weight_update must be called before update_weights."));
    CHECK(mentions(caught([&] { engine.finish(wire::vllm_finish{}, {}); }),
                   "finish_weight_update called without a matching start_weight_update."));
    hand_driven_trainer trainer{weights};
    engine.init(wire::vllm_init{trainer.vllm_init()}, {});
    engine.start(wire::vllm_start{}, {});
    CHECK(mentions(caught([&] { engine.start(wire::vllm_start{}, {}); }),
                   "start_weight_update called while a weight update is already active. Call "
                   "finish_weight_update first."));
    // A native call does not belong to vLLM's epoch.
    CHECK(caught([&] { engine.start(trainer.start_message(1), {}); }).kind == "session");
}

TEST_CASE(
    "A parameter that the worker lacks is found at init, one that the trainer lacks at start") {
    small_weights weights{6, 10};
    small_weights fewer{4, 10};
    worker_rig<> small{fewer.metadata()};
    hand_driven_trainer trainer{weights};
    const auto unknown = caught([&] { small.init(trainer); });
    CHECK(unknown.kind == "coverage");
    CHECK(unknown.context.phase == phase::init);
    CHECK(unknown.context.tensor == weights.metadata()[4].name);
    CHECK(small.engine.status().epoch == 0);

    worker_rig<> large{weights.metadata()};
    hand_driven_trainer short_trainer{fewer};
    large.init(short_trainer);
    const auto missing = caught([&] { large.round(short_trainer, 1); });
    CHECK(missing.kind == "coverage");
    CHECK(missing.context.tensor == weights.metadata()[4].name);
    CHECK(large.engine.version() == 0);
}

TEST_CASE("A session without a byte does not commit") {
    scene<> s;
    s.start(1);
    const auto why = caught([&] { s.rig.engine.finish(s.trainer.finish_message(1), {}); });
    CHECK(why.kind == "coverage");
    CHECK(mentions(why, "0 bytes"));
    CHECK(s.rig.engine.version() == 0);
}

TEST_CASE("A digest that differs names the tensor, and the old version stays") {
    scene<> s{2};
    s.round(1);
    const auto old = s.weights;
    s.weights.set(2);
    s.start(2);
    s.update();
    auto message = s.trainer.finish_message(2);
    message.digests[3] ^= 1;
    const auto why = caught([&] { s.rig.engine.finish(message, {}); });
    CHECK(why.kind == "integrity");
    CHECK(why.context.tensor == s.weights.metadata()[3].name);
    CHECK(s.rig.serves(1, old));
}

TEST_CASE("Digests for another number of parameters are refused") {
    scene<> s;
    s.start(1);
    s.update();
    auto message = s.trainer.finish_message(1);
    message.digests.pop_back();
    CHECK(caught([&] { s.rig.engine.finish(message, {}); }).kind == "protocol");
    CHECK(s.rig.engine.version() == 0);
}

TEST_CASE("A worker does not commit what the trainer no longer counts on") {
    scene<> s;
    const auto old = s.weights;
    const auto open_session = [&] {
        s.weights.set(1);
        s.start(1);
        s.update();
    };
    SUBCASE("its instant has passed") {
        open_session();
        auto message = s.trainer.finish_message(1);
        message.commit_before_ns = detail::monotonic_ns() - 1;
        CHECK(caught([&] { s.rig.engine.finish(message, {}); }).kind == "timeout");
    }
    SUBCASE("the budget was spent") {
        open_session();
        auto message = s.trainer.finish_message(1);
        message.budget_ms = 0;
        CHECK(caught([&] { s.rig.engine.finish(message, {}); }).kind == "timeout");
    }
    SUBCASE("the client hung up") {
        open_session();
        const worker_call gone{.client_waits = [](const void*) noexcept { return false; }};
        CHECK(caught([&] { s.rig.engine.finish(s.trainer.finish_message(1), gone); }).kind ==
              "cancelled");
    }
    SUBCASE("the stop was asked for") {
        open_session();
        std::stop_source stop;
        stop.request_stop();
        CHECK(caught([&] {
                  s.rig.engine.finish(s.trainer.finish_message(1), {.stop = stop.get_token()});
              }).kind == "cancelled");
    }
    SUBCASE("finish names another version than start") {
        open_session();
        CHECK(caught([&] { s.rig.engine.finish(s.trainer.finish_message(2), {}); }).kind ==
              "mismatch");
    }
    CHECK(s.rig.engine.version() == 0);
    CHECK(s.rig.engine.status().session == 0);
    CHECK(s.rig.engine.status().committed == 0);
}

TEST_CASE("The instant of another boot says nothing about this clock") {
    scene<> s;
    s.weights.set(1);
    s.start(1);
    s.update();
    auto message = s.trainer.finish_message(1);
    message.boot_id = "another boot";
    message.commit_before_ns = 1;
    s.rig.engine.finish(message, {});
    CHECK(s.rig.serves(1, s.weights));
}

TEST_CASE("An update ends at its deadline, and its trainer begins again with init") {
    testing::gate gate;
    scene<> s{1, {}, {.block_in_receive = gate.name()}};
    s.start(1);
    auto message = s.trainer.update_message();
    message.round = 1;
    message.budget_ms = 50;
    CHECK(caught([&] { s.rig.engine.update(message, {}); }).kind == "timeout");
    CHECK(caught([&] { s.start(1); }).kind == "session");
    hand_driven_trainer again{s.weights};
    s.rig.init(again);
    s.rig.round(again, 1);
    CHECK(s.rig.serves(1, s.weights));
}

TEST_CASE("An update whose client hangs up rolls the session back") {
    testing::gate gate;
    scene<> s{1, {}, {.block_in_receive = gate.name()}};
    s.start(1);
    std::stop_source hang_up;
    auto blocked = std::async(std::launch::async, [&] {
        return caught([&] {
            s.rig.engine.update(s.trainer.update_message(), {.stop = hang_up.get_token()});
        });
    });
    gate.wait_until_blocked(soon());
    hang_up.request_stop();
    CHECK(blocked.get().kind == "cancelled");
    CHECK(s.rig.engine.status().session == 0);
    CHECK(s.rig.engine.status().failed == 1);
}

TEST_CASE("A call that waits for its turn gives up at its own deadline or stop") {
    testing::gate gate;
    scene<> s{1, {}, {.block_in_receive = gate.name()}};
    s.start(1);
    auto blocked = std::async(std::launch::async, [&] {
        return caught([&] { s.rig.engine.update(s.trainer.update_message(), {}); });
    });
    gate.wait_until_blocked(soon());
    auto late = s.trainer.finish_message(1);
    late.budget_ms = 30;
    CHECK(caught([&] { s.rig.engine.finish(late, {}); }).kind == "timeout");
    std::stop_source stop;
    stop.request_stop();
    CHECK(caught([&] {
              s.rig.engine.finish(s.trainer.finish_message(1), {.stop = stop.get_token()});
          }).kind == "cancelled");
    s.trainer.hang_up();
    gate.release();
    hand_driven_trainer second{s.weights};
    s.rig.init(second);
    CHECK(blocked.get());
}

TEST_CASE("A session whose trainer fell silent is rolled back when somebody looks") {
    worker_options<> options;
    options.session_time_to_live = std::chrono::milliseconds{1};
    scene<> s{1, {}, {}, options};
    s.start(1);
    const auto end = soon();
    while (s.rig.engine.status().session != 0 && !end.expired()) {
        std::this_thread::yield();
    }
    CHECK(s.rig.engine.status().session == 0);
    CHECK(s.rig.engine.status().rolled_back == 1);
    CHECK(caught([&] { s.rig.engine.finish(s.trainer.finish_message(1), {}); }).kind == "session");
}

TEST_CASE("An in_place worker is dirty from the start of a session until a full update") {
    scene<> s{1, {.mode = commit_mode::in_place}};
    s.round(1);
    CHECK_FALSE(s.rig.engine.dirty());
    s.start(2);
    CHECK(s.rig.engine.dirty());
    s.trainer.session = 0;
    hand_driven_trainer second{s.weights};
    s.rig.init(second);  // rolls back: some bytes may have changed
    CHECK(s.rig.engine.dirty());
    CHECK(s.rig.engine.version() == 1);
    auto partial = second.start_message(2);
    partial.partial = true;
    CHECK(caught([&] { s.rig.engine.start(partial, {}); }).kind == "dirty");
    s.weights.set(2);
    s.rig.round(second, 2);
    CHECK_FALSE(s.rig.engine.dirty());
    CHECK(s.rig.serves(2, s.weights));
}

TEST_CASE("A vLLM session takes names in any order and in several updates") {
    small_weights weights{6, 100};
    auto held = weights.metadata();
    std::reverse(held.begin(), held.end());
    worker_rig<> rig{held, 2};
    hand_driven_trainer trainer{weights, 2, {.parts = 3}};
    auto& engine = rig.engine;
    engine.init(wire::vllm_init{trainer.vllm_init()}, {});
    std::vector<std::shared_ptr<const wire::vllm_update_request>> requests;
    for (const auto& part : trainer.parts()) {
        requests.push_back(request_of(part.vllm_bodies.at(0)));
    }
    const auto round = [&](std::uint64_t seed, std::optional<std::string> label) {
        weights.set(seed);
        engine.start(wire::vllm_start{}, {});
        trainer.beside_sending([&] {
            for (const auto& request : requests) {
                engine.update(request, {});
            }
        });
        engine.finish(wire::vllm_finish{std::move(label)}, {});
    };
    round(1, "step-1");
    CHECK(rig.serves(1, weights));
    CHECK(engine.status().label == "step-1");
    round(2, std::nullopt);
    CHECK(rig.serves(2, weights));
    CHECK(engine.status().label == "step-1");  // never derived
    round(3, "40");
    CHECK(rig.serves(40, weights));
    round(4, "7");  // an opaque text for vLLM: kept, but the number grows
    CHECK(rig.serves(41, weights));
    CHECK(engine.status().label == "7");
}

TEST_CASE("A vLLM update that names what the worker does not hold ends the session") {
    small_weights weights{2, 10};
    worker_rig<> rig{weights.metadata()};
    hand_driven_trainer trainer{weights};
    auto& engine = rig.engine;
    engine.init(wire::vllm_init{trainer.vllm_init()}, {});
    const auto update = [&](std::string_view name, std::string_view type, int extent) {
        engine.start(wire::vllm_start{}, {});
        return caught([&] {
            engine.update(request_of(R"({"update_info":{"names":[")" + std::string{name} +
                                     R"("],"dtype_names":[")" + std::string{type} +
                                     R"("],"shapes":[[)" + std::to_string(extent) + "]]}}"),
                          {});
        });
    };
    const auto unknown = update("no.such.weight", "float32", 10);
    CHECK(unknown.kind == "coverage");
    CHECK(unknown.context.tensor == "no.such.weight");
    CHECK(engine.status().session == 0);
    // The loopback transport cannot be opened again without its trainer.
    trainer.hang_up();
    hand_driven_trainer again{weights};
    engine.init(wire::vllm_init{again.vllm_init()}, {});
    const auto& name = weights.metadata()[1].name;
    CHECK(mentions(update(name, "bfloat16", 10), "the worker holds float32[10]"));
}

TEST_CASE("A vLLM session that leaves a parameter out names it at finish") {
    small_weights weights{4, 10};
    worker_rig<> rig{weights.metadata()};
    hand_driven_trainer trainer{weights, 1, {.parts = 2}};
    auto& engine = rig.engine;
    engine.init(wire::vllm_init{trainer.vllm_init()}, {});
    engine.start(wire::vllm_start{}, {});
    trainer.beside_sending(
        [&] { engine.update(request_of(trainer.parts()[0].vllm_bodies.at(0)), {}); });
    const auto why = caught([&] { engine.finish(wire::vllm_finish{}, {}); });
    CHECK(why.kind == "coverage");
    CHECK(why.context.tensor == weights.metadata()[2].name);
    CHECK(mentions(why, "2 of 4 parameters are not whole"));
    CHECK(engine.version() == 0);
}

TEST_CASE("Frozen parameters and aliases need not come in a vLLM session") {
    small_weights sent{4, 10};
    auto held = sent.metadata();
    held.push_back({"rotary.table", dtype::f32, {3}});
    held.push_back({"lm_head.weight", held[0].dtype, held[0].shape});
    worker_rig<> rig{
        held, 1, {.frozen = {"rotary.table"}, .aliases = {{"lm_head.weight", held[0].name}}}};
    hand_driven_trainer trainer{sent};
    auto& engine = rig.engine;
    engine.init(wire::vllm_init{trainer.vllm_init()}, {});
    engine.start(wire::vllm_start{}, {});
    trainer.beside_sending(
        [&] { engine.update(request_of(trainer.parts()[0].vllm_bodies.at(0)), {}); });
    engine.finish(wire::vllm_finish{}, {});
    CHECK(rig.serves(1, sent));
}

TEST_CASE("Reset zeroes the weights in one commit and is refused within a session") {
    scene<> s{2};
    s.round(3);
    s.rig.engine.reset_weights({});
    for (auto& sink : s.rig.sinks) {
        const auto held = sink->acquire();
        CHECK(held.version() == 3);
        for (std::size_t i = 0; i < held.size(); ++i) {
            const auto bytes = held.tensor(i).bytes();
            CHECK(std::all_of(bytes.begin(), bytes.end(), [](auto b) { return b == std::byte{}; }));
        }
    }
    s.round(4);  // the trainer's plan still holds
    CHECK(s.rig.serves(4, s.weights));
    s.start(5);
    CHECK(caught([&] { s.rig.engine.reset_weights({}); }).kind == "session");
}

namespace {

/// A model that can only load, and keeps what it was given.
struct loading_model {
    std::map<std::string, std::vector<std::byte>, std::less<>> held;
    std::size_t loads = 0;
    void load(std::span<const named_tensor> tensors) {
        ++loads;
        for (const auto& [name, tensor, stream] : tensors) {
            const auto bytes = tensor.bytes();
            held[std::string{name}].assign(bytes.begin(), bytes.end());
        }
    }
};

/// Weights with one parameter that has no bytes.
struct weights_with_a_hole {
    explicit weights_with_a_hole(small_weights& inner) {
        for (std::size_t i = 0; i < inner.metadata().size(); ++i) {
            names_.push_back(inner.metadata()[i]);
            tensors_.push_back(inner.weights()[i]);
            if (i == 0) {
                names_.push_back({"model.layers.0.nothing", dtype::f32, {0, 4}});
                tensors_.push_back({"model.layers.0.nothing", {nullptr, dtype::f32, {0, 4}}});
            }
        }
    }
    [[nodiscard]] const auto& metadata() const { return names_; }
    [[nodiscard]] const auto& weights() const { return tensors_; }

private:
    std::vector<param_meta> names_;
    std::vector<named_tensor> tensors_;
};

}  // namespace

TEST_CASE("A model that only loads gets whole layers through its bounce buffer") {
    small_weights inner{4, 100};
    weights_with_a_hole weights{inner};
    loading_model model;
    loading_sink sink{model, {.buffer_bytes = 1U << 12U}};
    worker_engine engine{testing::loopback{}, sink};
    trainer_half<testing::loopback, weights_with_a_hole> trainer{weights};
    trainer.epoch = engine.init(trainer.init_message(), {}).epoch;
    for (std::uint64_t version = 1; version <= 2; ++version) {
        inner.set(version);
        trainer.session = engine.start(trainer.start_message(version), {}).session;
        trainer.beside_sending([&] { engine.update(trainer.update_message(), {}); });
        CHECK(engine.dirty());  // it has no transaction, so it holds a mix
        engine.finish(trainer.finish_message(version), {});
        CHECK_FALSE(engine.dirty());
        CHECK(model.loads == 2 * version);
        for (std::size_t i = 0; i < 4; ++i) {
            CHECK(digest_text(digest(model.held[inner.metadata()[i].name])) == inner.digest_of(i));
        }
    }
    inner.set(3);
    trainer.session = engine.start(trainer.start_message(3), {}).session;
    trainer.beside_sending([&] { engine.update(trainer.update_message(), {}); });
    auto corrupt = trainer.finish_message(3);
    corrupt.digests[4] ^= 1;
    const auto why = caught([&] { engine.finish(corrupt, {}); });
    CHECK(why.kind == "integrity");
    CHECK(why.context.tensor == weights.metadata()[4].name);
    CHECK(engine.dirty());
    CHECK(engine.version() == 2);
}

TEST_CASE("Rounds, questions and take-overs may come from many threads at once") {
    small_weights weights{4, 200};
    worker_rig<> rig{weights.metadata(), 2};
    std::atomic<bool> done{false};
    std::vector<std::thread> askers;
    for (int i = 0; i < 2; ++i) {
        askers.emplace_back([&] {
            while (!done) {
                const auto now = rig.engine.status();
                const auto held = rig.sinks[0]->acquire();
                if (now.version > 1000 || held.size() != 4 || rig.engine.version() > 1000) {
                    std::terminate();
                }
            }
        });
    }
    std::atomic<int> committed{0};
    std::vector<std::thread> trainers;
    for (int i = 0; i < 2; ++i) {
        trainers.emplace_back([&, i] {
            small_weights own{4, 200};
            for (int round = 0; round < 15; ++round) {
                const auto version = rig.engine.version() + 1 + static_cast<std::uint64_t>(i);
                own.set(version);
                hand_driven_trainer trainer{own, 2};
                committed += caught([&] {
                    rig.init(trainer);
                    rig.round(trainer, version);
                })
                                 ? 0
                                 : 1;
            }
        });
    }
    for (auto& each : trainers) {
        each.join();
    }
    hand_driven_trainer last{weights, 2};
    weights.set(900);
    rig.init(last);
    rig.round(last, 900);
    done = true;
    for (auto& each : askers) {
        each.join();
    }
    CHECK(rig.serves(900, weights));
    CHECK(rig.engine.status().committed == static_cast<std::uint64_t>(committed) + 1);
}

TEST_CASE("An engine needs a sink for each rank") {
    CHECK_THROWS_AS((worker_engine<testing::loopback, parameter_table>{
                        testing::loopback{}, std::vector<parameter_table*>{}}),
                    usage_error);
    CHECK_THROWS_AS((worker_engine<testing::loopback, parameter_table>{
                        testing::loopback{}, std::vector<parameter_table*>{nullptr}}),
                    usage_error);
}

namespace {

/// Keeps what the engine says.
struct recording_events {
    std::vector<event_kind>* kinds;
    void on(const event& what) noexcept { kinds->push_back(what.kind); }
};

}  // namespace

TEST_CASE("An event sink hears of phases and commits") {
    small_weights weights{2, 10};
    parameter_table table{weights.metadata()};
    std::vector<event_kind> kinds;
    worker_engine engine{testing::loopback{}, table,
                         worker_options<recording_events>{.events = {&kinds}}};
    hand_driven_trainer trainer{weights};
    trainer.epoch = engine.init(trainer.init_message(), {}).epoch;
    trainer.session = engine.start(trainer.start_message(1), {}).session;
    trainer.beside_sending([&] { engine.update(trainer.update_message(), {}); });
    engine.finish(trainer.finish_message(1), {});
    CHECK(std::count(kinds.begin(), kinds.end(), event_kind::committed) == 1);
    CHECK(std::count(kinds.begin(), kinds.end(), event_kind::phase_ended) >= 2);
}

TEST_CASE("Strided destinations are digested in C order") {
    const std::vector<float> memory = [] {
        std::vector<float> out(24);
        for (std::size_t i = 0; i < out.size(); ++i) {
            out[i] = static_cast<float>(i);
        }
        return out;
    }();
    const auto* base = reinterpret_cast<const std::byte*>(memory.data());
    // Every other column of a 4 x 6 matrix, and its transpose.
    const tensor_view columns{base, dtype::f32, {4, 3}, {6, 2}};
    const tensor_view rows{base, dtype::f32, {2, 6}, {12, 1}};
    std::vector<float> gathered;
    for (std::size_t r = 0; r < 4; ++r) {
        for (std::size_t c = 0; c < 3; ++c) {
            gathered.push_back(memory[r * 6 + c * 2]);
        }
    }
    CHECK(detail::tensor_digest(columns) == digest(std::as_bytes(std::span{gathered})));
    gathered.assign(memory.begin(), memory.begin() + 6);
    gathered.insert(gathered.end(), memory.begin() + 12, memory.begin() + 18);
    CHECK(detail::tensor_digest(rows) == digest(std::as_bytes(std::span{gathered})));
}

TEST_CASE("A digest can be ended between its pieces") {
    std::vector<std::byte> memory((std::size_t{3} << 20U) + 40);
    for (std::size_t i = 0; i < memory.size(); ++i) {
        memory[i] = static_cast<std::byte>(i * 7 + i / 1000);
    }
    const auto size = static_cast<std::int64_t>(memory.size());
    const tensor_view dense{memory.data(), dtype::u8, {size}};
    const tensor_view strided{memory.data(), dtype::u8, {size / 2}, {2}};
    for (const auto& tensor : {dense, strided}) {
        std::size_t pieces = 0;
        std::size_t bytes = 0;
        const auto whole = detail::tensor_digest(tensor, [&](std::size_t count) {
            ++pieces;
            bytes += count;
        });
        CHECK(whole == detail::tensor_digest(tensor));
        CHECK(pieces >= 4);
        CHECK(bytes == tensor.byte_size());
        CHECK_THROWS_AS(static_cast<void>(detail::tensor_digest(
                            tensor, [](std::size_t) { throw cancelled_error{"enough"}; })),
                        cancelled_error);
    }
    CHECK(detail::tensor_digest(dense) == digest(memory));
}

TEST_CASE("Digests that nobody waits for any more are not compared to their end") {
    const manifest parameters{{{"a", dtype::u8, {std::int64_t{4} << 20U}}}};
    parameter_table table{parameters};
    const detail::session_list list{parameters};
    detail::rank_session<parameter_table> rank{table};
    rank.begin({.version = 1}, list, soon(), {});
    rank.wrote(0, 0, parameters[0].byte_size(), soon());
    const std::vector<std::uint64_t> wrong{1};
    std::stop_source stop;
    CHECK_THROWS_AS(rank.complete(wrong, soon(), stop.get_token()), integrity_error);
    CHECK_THROWS_AS(rank.complete(wrong, deadline::after(-1s), stop.get_token()), timeout_error);
    stop.request_stop();
    CHECK_THROWS_AS(rank.complete(wrong, soon(), stop.get_token()), cancelled_error);
    rank.rollback();
    CHECK(table.version() == 0);
}
