// SPDX-License-Identifier: Apache-2.0
//
// Worker processes that die, stop or fail, at every place of a round; a trainer that keeps its
// deadline, and old versions that stay.

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/trainer.hpp>

#include "../support/small_model.hpp"
#include "../support/worker_process.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using tests::worker_process;

constexpr int parameters = 6;
constexpr int elements = 50'000;

std::vector<std::string> plain(std::vector<std::string> more = {}) {
    std::vector<std::string> out{"--parameters", std::to_string(parameters), "--elements",
                                 std::to_string(elements)};
    out.insert(out.end(), more.begin(), more.end());
    return out;
}

auto clients_of(std::initializer_list<const worker_process*> workers) {
    std::vector<std::string> urls;
    for (const auto* worker : workers) {
        urls.push_back(worker->url());
    }
    return fan_out_sync_client{http_sync_clients(urls)};
}

/// A trainer with weights of its own, over several workers.
struct trainer {
    explicit trainer(std::initializer_list<const worker_process*> workers,
                     ipc::trainer_init_info info = {.verify = true})
        : engine{trainer_init(info, clients_of(workers), weights)} {}

    sync_report round(std::uint64_t version, std::chrono::milliseconds budget = 20s,
                      bool tolerate = true) {
        weights.set(version);
        return engine.send_weights({.version = version,
                                    .deadline = deadline::after(budget),
                                    .tolerate_failed_peers = tolerate});
    }
    void check_serves(const worker_process& worker, std::uint64_t version) {
        weights.set(version);
        CHECK(worker.version() == std::to_string(version));
        const auto held = worker.checksums();
        REQUIRE(held.size() == parameters);
        for (std::size_t i = 0; i < parameters; ++i) {
            CHECK(held.at(weights.metadata()[i].name) == weights.digest_of(i));
        }
    }

    tests::small_weights weights{parameters, elements};
    decltype(trainer_init(std::declval<ipc::trainer_init_info>(), clients_of({}),
                          std::declval<tests::small_weights&>())) engine;
};

}  // namespace

TEST_CASE("a worker that dies costs only itself, and takes part again when it is back") {
    for (const std::string place : {"begin", "prepare"}) {
        CAPTURE(place);
        worker_process good{plain()};
        worker_process bad{plain({"--at", place, "--do", "die", "--in", "2"})};
        trainer t{&good, &bad};
        CHECK(t.round(1).all_committed());
        const auto report = t.round(2);
        CHECK(report.committed() == 1);
        // Whether one that was asked to commit has done so cannot be known.
        CHECK(report.peers[1].status ==
              (place == "begin" ? peer_status::failed : peer_status::unknown));
        CHECK(report.peers[1].error.kind == "peer");
        CHECK(report.peers[1].error.context.peer == bad.url());
        CHECK(bad.ends_within(5s));
        t.check_serves(good, 2);
        const auto without = t.round(3);
        CHECK(without.committed() == 1);
        CHECK(without.peers[1].status == peer_status::left_out);
        bad.restart();
        CHECK(t.round(4).all_committed());
        t.check_serves(good, 4);
        t.check_serves(bad, 4);
    }
}

TEST_CASE("a worker killed in the middle of the data does not stop the other") {
    worker_process good{plain()};
    worker_process bad{plain()};
    struct killer {
        worker_process* victim = nullptr;
    } context;
    const ipc::byte_hook kill_once{
        [](void* self, std::string_view tensor, std::uint64_t, std::span<std::byte>) {
            auto& wanted = *static_cast<killer*>(self);
            if (wanted.victim != nullptr && tensor == "model.layers.1.up.weight") {
                wanted.victim->signal(SIGKILL);
                wanted.victim = nullptr;
            }
        },
        &context};
    trainer t{{&good, &bad}, {.staging_bytes = 65536, .verify = true, .transform = kill_once}};
    CHECK(t.round(1).all_committed());
    context.victim = &bad;
    const auto report = t.round(2);
    CHECK(report.committed() == 1);
    CHECK(report.peers[1].error.context.peer == bad.url());
    t.check_serves(good, 2);
}

TEST_CASE("a worker that was lost between rounds is not waited for in the data") {
    worker_process good{plain()};
    worker_process bad{plain()};
    bool fail = false;
    const ipc::byte_hook throw_once{
        [](void* self, std::string_view, std::uint64_t, std::span<std::byte>) {
            if (std::exchange(*static_cast<bool*>(self), false)) {
                throw data_error{"the gather failed"};
            }
        },
        &fail};
    trainer t{{&good, &bad}, {.verify = true, .transform = throw_once}};
    CHECK(t.round(1).all_committed());
    fail = true;
    CHECK_THROWS_AS(t.round(2), data_error);
    bad.kill();
    const auto begin = deadline::clock::now();
    CHECK(t.round(3, 20s).committed() == 1);
    CHECK(deadline::clock::now() - begin < 5s);
    t.check_serves(good, 3);
}

TEST_CASE("a worker that comes back ahead of the trainer's counter raises it") {
    worker_process good{plain()};
    worker_process bad{plain()};
    trainer t{&good, &bad};
    CHECK(t.round(1).all_committed());
    bad.restart();
    {
        trainer other{&bad};
        CHECK(other.round(500).all_committed());
    }
    bad.kill();
    t.weights.set(2);
    CHECK(t.engine.send_weights({.tolerate_failed_peers = true}).committed() == 1);
    bad.restart();
    t.weights.set(3);
    const auto report = t.engine.send_weights({.tolerate_failed_peers = true});
    CHECK(report.all_committed());
    CHECK(report.version == 3);
}

TEST_CASE("a trainer does not take back a worker that another one has taken since") {
    worker_process good{plain()};
    worker_process shared{plain()};
    trainer first{&good, &shared};
    CHECK(first.round(1).all_committed());
    shared.stop();
    CHECK(first.round(2, 4s).committed() == 1);  // lost by a timeout
    shared.signal(SIGCONT);
    trainer second{&shared};
    CHECK(second.round(7).all_committed());
    const auto report = first.round(8);
    CHECK(report.committed() == 1);
    CHECK(report.peers[1].error.kind == "session");
    CHECK(second.round(9).all_committed());
    second.check_serves(shared, 9);
    first.check_serves(good, 8);
}

TEST_CASE("a worker that hangs round after round does not keep the other from committing") {
    worker_process good{plain()};
    worker_process bad{plain()};
    trainer t{&good, &bad};
    CHECK(t.round(1, 4s).all_committed());
    bad.stop();
    for (std::uint64_t version = 2; version <= 4; ++version) {
        CHECK(t.round(version, 4s).committed() == 1);
    }
    bad.signal(SIGCONT);
    t.check_serves(good, 4);
}

TEST_CASE("an init that is refused costs a good trainer nothing") {
    worker_process worker{plain()};
    trainer good{&worker};
    CHECK(good.round(1).all_committed());
    const manifest list{good.weights.metadata()};
    const auto settings = ipc::trainer_init_info{}.init_message();
    const auto lie =
        wire::encode(wire::native_init{.backend = "ipc",
                                       .world_size = 2,
                                       .plan_hash = wire::plan_hash("ipc", 2, list, settings),
                                       .trainer = 1,
                                       .budget_ms = 1000,
                                       .parameters = list,
                                       .wire_parameters = settings,
                                       .transport = "{}"});
    CHECK(worker.ask("POST", "/init_weight_transfer_engine", lie).status == 400);
    CHECK(worker.ask("POST", "/init_weight_transfer_engine", R"({"init_info":{}})").status == 500);
    CHECK(worker.version() == "1");
    CHECK(worker.health() == 200);
    CHECK(good.round(2).all_committed());
    good.check_serves(worker, 2);
}

TEST_CASE("with no worker left the round ends with its error, and names it") {
    worker_process bad{plain({"--at", "begin", "--do", "die", "--in", "2"})};
    trainer t{&bad};
    CHECK(t.round(1).all_committed());
    CHECK_THROWS_AS(t.round(2), peer_error);
    CHECK_THROWS_AS(t.round(3), peer_error);
    bad.restart();
    CHECK(t.round(4).all_committed());
    t.check_serves(bad, 4);
}

TEST_CASE(
    "without tolerance a failed peer is an error, and the report tells that the other committed") {
    worker_process good{plain()};
    worker_process bad{plain({"--at", "prepare", "--do", "throw"})};
    trainer t{&good, &bad};
    try {
        t.round(1, 20s, false);
        FAIL("the round of a failed peer returned");
    } catch (const resource_error& caught) {
        CHECK(caught.context().peer == bad.url());
        CHECK(std::string{caught.what()}.find("this rank was told to fail") != std::string::npos);
    }
    CHECK(t.engine.last_report().committed() == 1);
    t.check_serves(good, 1);
    CHECK(bad.version() == "default");
    CHECK(t.round(2).all_committed());
}

TEST_CASE("a worker stopped past the deadline and resumed never commits") {
    for (const std::string place : {"begin", "prepare"}) {
        CAPTURE(place);
        worker_process good{plain()};
        worker_process bad{plain({"--at", place, "--do", "stop", "--in", "2"})};
        trainer t{&good, &bad};
        CHECK(t.round(1).all_committed());
        const auto begin = deadline::clock::now();
        const auto report = t.round(2, 4s);
        CHECK(report.committed() == 1);
        CHECK(report.peers[1].error.kind == "timeout");
        CHECK(report.peers[1].error.context.peer == bad.url());
        CHECK(deadline::clock::now() - begin < 10s);
        bad.signal(SIGCONT);
        std::this_thread::sleep_for(500ms);
        t.check_serves(bad, 1);
        CHECK(bad.health() == 200);
        CHECK(t.round(3).all_committed());
        t.check_serves(good, 3);
        t.check_serves(bad, 3);
    }
}

TEST_CASE("a worker stopped past the deadline in the middle of its final copy never commits") {
    for (const bool ranks : {false, true}) {
        CAPTURE(ranks);
        worker_process good{plain({"--mode", "copy_in"})};
        worker_process bad{plain({"--mode", "copy_in", "--at", "copy", "--do", "stop", "--in", "2",
                                  "--ranks", ranks ? "4" : "1", "--on", ranks ? "2" : "0"})};
        trainer t{&good, &bad};
        CHECK(t.round(1).all_committed());
        const auto before = bad.checksums();
        const auto report = t.round(2, 4s);
        CHECK(bad.is_stopped());
        CHECK(report.committed() == 1);
        CHECK(report.peers[1].status == peer_status::unknown);
        CHECK(report.peers[1].error.kind == "timeout");
        CHECK(report.peers[1].error.context.peer == bad.url());
        bad.signal(SIGCONT);
        CHECK(bad.version() == "1");
        CHECK(bad.checksums() == before);
        CHECK(bad.health() == 200);
        t.check_serves(good, 2);
        CHECK(t.round(3).all_committed());
        t.check_serves(good, 3);
        CHECK(bad.version() == "3");
        CHECK(bad.checksums() != before);
    }
}

TEST_CASE("a worker stopped in its final copy and resumed in time commits") {
    worker_process worker{
        plain({"--mode", "copy_in", "--at", "copy", "--do", "stop", "--in", "2"})};
    trainer t{&worker};
    CHECK(t.round(1).all_committed());
    std::thread waker{[&] {
        for (int seconds = 0; seconds < 20 && !worker.is_stopped(); ++seconds) {
        }
        worker.signal(SIGCONT);
    }};
    CHECK(t.round(2).all_committed());
    waker.join();
    t.check_serves(worker, 2);
}

TEST_CASE("a worker stopped in the middle of the data costs its deadline, and the other commits") {
    worker_process good{plain()};
    worker_process bad{plain()};
    worker_process* victim = nullptr;
    const ipc::byte_hook stop_once{
        [](void* self, std::string_view tensor, std::uint64_t, std::span<std::byte>) {
            auto& wanted = *static_cast<worker_process**>(self);
            if (wanted != nullptr && tensor == "model.layers.1.up.weight") {
                wanted->stop();
                wanted = nullptr;
            }
        },
        &victim};
    trainer t{{&good, &bad}, {.staging_bytes = 65536, .verify = true, .transform = stop_once}};
    CHECK(t.round(1).all_committed());
    victim = &bad;
    const auto begin = deadline::clock::now();
    const auto report = t.round(2, 5s);
    CHECK(deadline::clock::now() - begin < 8s);
    CHECK(report.committed() == 1);
    CHECK(report.peers[1].error.kind == "timeout");
    CHECK(report.peers[1].error.context.peer == bad.url());
    bad.signal(SIGCONT);
    std::this_thread::sleep_for(500ms);
    t.check_serves(good, 2);
    t.check_serves(bad, 1);
    CHECK(t.round(3).all_committed());
    t.check_serves(good, 3);
    t.check_serves(bad, 3);
}

TEST_CASE("one of four ranks that fails to prepare leaves all four on the old version") {
    for (const std::string mode : {"flip", "copy_in"}) {
        CAPTURE(mode);
        worker_process worker{plain({"--ranks", "4", "--mode", mode, "--at", "prepare", "--do",
                                     "throw", "--on", "2", "--in", "2"})};
        trainer t{&worker};
        CHECK(t.engine.world_size() == 5);
        CHECK(t.round(1).all_committed());
        const auto before = worker.checksums();
        CHECK(before.size() == 4 * parameters);
        CHECK_THROWS_AS(t.round(2), resource_error);
        CHECK(worker.version() == "1");
        CHECK(worker.checksums() == before);
        CHECK(worker.health() == 200);
        CHECK(t.round(3).all_committed());
        CHECK(worker.version() == "3");
    }
}

TEST_CASE("checksums that are read all the time do not hold up the commits of several ranks") {
    worker_process worker{plain({"--ranks", "4", "--mode", "copy_in"})};
    trainer t{&worker};
    std::atomic<bool> stop{false};
    std::thread reader{[&] {
        while (!stop) {
            CHECK(worker.checksums().size() == 4 * parameters);
        }
    }};
    for (std::uint64_t version = 1; version <= 20; ++version) {
        CHECK(t.round(version, 5s).all_committed());
    }
    stop = true;
    reader.join();
}

TEST_CASE("an in_place worker that failed says that it is dirty until a full update") {
    worker_process worker{
        plain({"--mode", "in_place", "--at", "prepare", "--do", "throw", "--in", "2"})};
    trainer t{&worker};
    CHECK(t.round(1).all_committed());
    CHECK_THROWS_AS(t.round(2), resource_error);
    CHECK(worker.health() == 503);
    CHECK(worker.version() == "1");
    CHECK(t.round(3).all_committed());
    CHECK(worker.health() == 200);
    t.check_serves(worker, 3);
}

TEST_CASE(
    "a corrupted byte in flight is an error that names the tensor, and no worker commits it") {
    worker_process one{plain()};
    worker_process two{plain()};
    bool armed = false;
    const ipc::byte_hook flip{
        [](void* self, std::string_view tensor, std::uint64_t, std::span<std::byte> bytes) {
            if (*static_cast<bool*>(self) && tensor == "model.layers.2.down.weight") {
                bytes.back() ^= std::byte{0x10};
                *static_cast<bool*>(self) = false;
            }
        },
        &armed};
    for (const bool packed : {false, true}) {
        CAPTURE(packed);
        trainer t{{&one, &two},
                  {.packed = packed,
                   .packed_buffer_size_bytes = 1 << 20,
                   .verify = true,
                   .tamper = flip}};
        const auto version = packed ? 11U : 1U;
        CHECK(t.round(version).all_committed());
        armed = true;
        try {
            t.round(version + 1);
            FAIL("corrupted weights were committed");
        } catch (const integrity_error& caught) {
            CHECK(caught.context().tensor == "model.layers.2.down.weight");
        }
        t.check_serves(one, version);
        t.check_serves(two, version);
    }
}

TEST_CASE("a new trainer takes over, and the old one is told so") {
    worker_process worker{plain()};
    trainer first{&worker};
    CHECK(first.round(1).all_committed());
    trainer second{&worker};
    CHECK(second.round(2).all_committed());
    CHECK_THROWS_AS(first.round(3), session_error);
    CHECK_THROWS_AS(first.round(4), session_error);
    second.check_serves(worker, 2);
    CHECK(second.round(5).all_committed());
}
