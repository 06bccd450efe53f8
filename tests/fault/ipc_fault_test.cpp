// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "../support/forked.hpp"
#include "../support/ipc_halves.hpp"

namespace {

namespace ipc = weightwire::ipc;
namespace shm = weightwire::shm;
using namespace std::chrono_literals;
using tests::briefly;
using tests::in_time;
using tests::ipc_trainer_half;
using tests::travel;
using tests::worker_half;

constexpr std::array all_ways{travel::in_place, travel::window, travel::packed};
/// The tensor at which somebody stops: two follow that need the ring again.
constexpr std::size_t stops_at = 3;

bool has(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

/// A worker process that says `s` when it comes to tensor `stops_at` of the first round and then
/// waits for a character; leaves the text of its error, or `done`.
tests::forked blocking_worker(const weightwire::manifest& parameters,
                              const ipc_trainer_half& trainer, int rank, std::size_t peer) {
    return tests::forked{[&, rank, peer](tests::channel& parent) {
        worker_half worker{parameters, rank};
        worker.open(trainer.wire_parameters(), trainer.inits[peer].native);
        parent.put('o');
        const auto round = parent.take<std::uint64_t>();
        worker.receive(round, in_time(), [&](std::size_t i) {
            if (i == stops_at) {
                parent.put('s');
                static_cast<void>(parent.take<char>());
            }
        });
        const auto wrong = worker.landing.differs(round);
        parent.put_text(wrong.empty() ? "done" : "differs: " + wrong);
    }};
}

/// A worker process that receives the rounds that it is told, and says for each whether it has
/// them.
tests::forked willing_worker(const weightwire::manifest& parameters,
                             const ipc_trainer_half& trainer, int rank, std::size_t peer) {
    return tests::forked{[&, rank, peer](tests::channel& parent) {
        worker_half worker{parameters, rank};
        worker.open(trainer.wire_parameters(), trainer.inits[peer].native);
        parent.put('o');
        for (;;) {
            const auto round = parent.take<std::uint64_t>();
            worker.receive(round);
            parent.put(worker.landing.differs(round).empty());
        }
    }};
}

}  // namespace

TEST_CASE("a reader that is killed in a round does not hold up the others once it is dropped") {
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        CAPTURE(static_cast<int>(how));
        ipc_trainer_half trainer{parameters, how, {1, 1}};
        auto dies = blocking_worker(parameters, trainer, 1, 0);
        auto lives = willing_worker(parameters, trainer, 2, 1);
        REQUIRE(dies.to().take<char>() == 'o');
        REQUIRE(lives.to().take<char>() == 'o');
        dies.to().put(std::uint64_t{1});
        lives.to().put(std::uint64_t{1});
        {
            // The engine drops a peer when its control call breaks, which a killed worker's does.
            const std::jthread engine{[&] {
                CHECK(dies.to().take<char>() == 's');
                dies.kill();
                trainer.sender.drop_peer(0);
            }};
            trainer.send(1);
        }
        CHECK(lives.to().take<bool>());
        // Its successor opens the same memory and takes part in the next round.
        auto successor = willing_worker(parameters, trainer, 1, 0);
        REQUIRE(successor.to().take<char>() == 'o');
        trainer.sender.restore_peer(0);
        successor.to().put(std::uint64_t{2});
        lives.to().put(std::uint64_t{2});
        trainer.send(2);
        CHECK(successor.to().take<bool>());
        CHECK(lives.to().take<bool>());
    }
}

TEST_CASE(
    "a reader that is stopped, dropped and resumed never takes what overtook it for its round") {
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        for (const bool same_round : {true, false}) {
            CAPTURE(static_cast<int>(how));
            CAPTURE(same_round);
            ipc_trainer_half trainer{parameters, how, {1, 1}};
            auto stops = blocking_worker(parameters, trainer, 1, 0);
            auto lives = willing_worker(parameters, trainer, 2, 1);
            REQUIRE(stops.to().take<char>() == 'o');
            REQUIRE(lives.to().take<char>() == 'o');
            stops.to().put(std::uint64_t{1});
            lives.to().put(std::uint64_t{1});
            {
                const std::jthread engine{[&] {
                    CHECK(stops.to().take<char>() == 's');
                    stops.stop();
                    trainer.sender.drop_peer(0);
                }};
                trainer.send(1);
            }
            CHECK(lives.to().take<bool>());
            if (!same_round) {
                lives.to().put(std::uint64_t{2});
                trainer.send(2);
                CHECK(lives.to().take<bool>());
                trainer.sender.restore_peer(0);  // what it still does is of round 1
            }
            stops.to().put('g');
            stops.resume();
            const auto text = stops.to().rest();
            CAPTURE(text);
            CHECK(has(text, "peer [phase update] [backend ipc]"));
        }
    }
}

TEST_CASE("a trainer that is killed in a round is seen as dead, long before the deadline") {
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        CAPTURE(static_cast<int>(how));
        struct text_type {
            std::array<char, 8192> wire{};
            std::array<char, 8192> transport{};
        };
        tests::forked trainer{[&](tests::channel& parent) {
            ipc_trainer_half half{parameters, how, {1}};
            text_type text;
            half.wire_parameters().copy(text.wire.data(), 8191);
            half.inits[0].native.copy(text.transport.data(), 8191);
            parent.put(text);
            half.send(1, in_time(), {}, [&](std::size_t i) {
                if (i == 6) {
                    parent.put('s');
                    static_cast<void>(parent.take<char>());
                }
            });
        }};
        const auto text = trainer.to().take<text_type>();
        worker_half worker{parameters, 1};
        worker.open(text.wire.data(), text.transport.data());
        const std::jthread killer{[&] {
            CHECK(trainer.to().take<char>() == 's');
            trainer.kill();
        }};
        try {
            worker.receive(1, weightwire::deadline::after(10min));
            FAIL("the round ended");
        } catch (const weightwire::peer_error& failed) {
            CHECK(has(failed.what(), "died in the round"));
            CHECK_FALSE(failed.context().tensor.empty());
        }
    }
}

TEST_CASE("a round that the trainer gives up ends at its workers at once") {
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        CAPTURE(static_cast<int>(how));
        ipc_trainer_half trainer{parameters, how, {1}};
        tests::forked child{[&](tests::channel& parent) {
            worker_half worker{parameters, 1};
            worker.open(trainer.wire_parameters(), trainer.inits[0].native);
            parent.put('o');
            try {
                worker.receive(1, weightwire::deadline::after(10min));
                parent.put('n');
            } catch (const weightwire::peer_error&) {
                parent.put('p');
            }
            worker.receive(2);
            parent.put(worker.landing.differs(2).empty());
        }};
        REQUIRE(child.to().take<char>() == 'o');
        CHECK_THROWS_AS(trainer.send(1, in_time(), {},
                                     [](std::size_t i) {
                                         if (i == 6) {
                                             throw std::runtime_error{"the source failed"};
                                         }
                                     }),
                        std::runtime_error);
        CHECK(child.to().take<char>() == 'p');
        trainer.send(2);  // the next round is whole again
        CHECK(child.to().take<bool>());
    }
}

TEST_CASE("a trainer whose readers are slow keeps its deadline and its stop, naming the slowest") {
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        CAPTURE(static_cast<int>(how));
        ipc_trainer_half trainer{parameters, how, {3}};
        std::vector<worker_half> quick;
        quick.reserve(2);
        quick.emplace_back(parameters, 1).open(trainer.wire_parameters(), trainer.inits[0].native);
        quick.emplace_back(parameters, 2).open(trainer.wire_parameters(), trainer.inits[0].native);
        std::vector<std::jthread> threads;
        for (auto& each : quick) {
            threads.emplace_back([&] {
                try {
                    each.receive(1);
                } catch (const weightwire::peer_error&) {  // the trainer gave it up
                }
            });
        }
        try {
            trainer.send(1, weightwire::deadline::after(1s));
            FAIL("it was sent to a rank that never came");
        } catch (const weightwire::timeout_error& failed) {
            CHECK(failed.context().peer == "peer 0");
            CHECK(failed.context().rank == 3);
            CHECK(failed.context().phase == weightwire::phase::update);
        }
        threads.clear();
        std::stop_source stop;
        const std::jthread later{[&] {
            std::this_thread::sleep_for(50ms);
            stop.request_stop();
        }};
        CHECK_THROWS_AS(trainer.send(2, in_time(), stop.get_token()), weightwire::cancelled_error);
    }
}

TEST_CASE("a peer that never comes is left behind when another is done") {
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        CAPTURE(static_cast<int>(how));
        ipc_trainer_half trainer{parameters, how, {1, 1}};
        auto comes = willing_worker(parameters, trainer, 1, 0);
        REQUIRE(comes.to().take<char>() == 'o');
        comes.to().put(std::uint64_t{1});
        trainer.send(1, weightwire::deadline::after(2s));
        CHECK(comes.to().take<bool>());
        worker_half late{parameters, 2};
        late.open(trainer.wire_parameters(), trainer.inits[1].native);
        CHECK_THROWS_AS(late.receive(1), weightwire::peer_error);
    }
}

TEST_CASE("a worker that waits keeps its deadline and its stop") {
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        ipc_trainer_half trainer{parameters, how, {1}};
        worker_half worker{parameters, 1};
        worker.open(trainer.wire_parameters(), trainer.inits[0].native);
        CHECK_THROWS_AS(worker.receive(1, briefly()), weightwire::timeout_error);
        std::stop_source stop;
        const std::jthread later{[&] {
            std::this_thread::sleep_for(50ms);
            stop.request_stop();
        }};
        CHECK_THROWS_AS(worker.receive(1, in_time(), {}, stop.get_token()),
                        weightwire::cancelled_error);
    }
}

TEST_CASE("counters that lie are refused on both sides") {
    const auto parameters = tests::awkward_model();
    ipc_trainer_half trainer{parameters, travel::window, {1}};
    const auto message = ipc::decode_transport_message(trainer.inits[0].native);
    const auto mapped =
        shm::mapping::open(message.control, {.use = shm::sharing::writable, .what = "control"});
    auto control =
        ipc::control_block::attach(mapped.writable_data(), mapped.size(), 0, message.nonce);
    const auto base =
        ipc::layout{parameters, tests::info_of(travel::window).wire()}.base(1).value();

    control.slot(0).consumed = base + 1'000'000'000;
    try {
        trainer.send(1);
        FAIL("it believed the worker");
    } catch (const weightwire::protocol_error& failed) {
        CHECK(failed.context().peer == "peer 0");
        CHECK(has(failed.what(), "claims to have read"));
    }
    control.slot(0).consumed = 0;
    control.header().over = 0;
    control.header().produced = base + 1'000'000'000;
    worker_half worker{parameters, 1};
    worker.open(trainer.wire_parameters(), trainer.inits[0].native);
    CHECK_THROWS_AS(worker.receive(1), weightwire::protocol_error);
}

TEST_CASE("a worker that cannot trace the trainer is told so") {
    const auto parameters = tests::awkward_model();
    tests::forked trainer{[&](tests::channel& parent) {
        ipc_trainer_half half{parameters, travel::window, {1}};
        ::prctl(PR_SET_DUMPABLE, 0);
        std::array<char, 8192> transport{};
        half.inits[0].native.copy(transport.data(), 8191);
        parent.put(transport);
        static_cast<void>(parent.take<char>());
    }};
    const auto transport = trainer.to().take<std::array<char, 8192>>();
    tests::forked worker{[&](tests::channel& parent) {
        if (::geteuid() == 0 && (::setgid(12345) != 0 || ::setuid(12345) != 0)) {
            parent.put_text("cannot change the user");
            return;
        }
        worker_half half{parameters, 1};
        half.open(tests::info_of(travel::window).init_message(), transport.data());
        parent.put_text("opened");
    }};
    const auto text = worker.to().rest();
    CAPTURE(text);
    CHECK(has(text, "resource [phase init] [backend ipc]"));
    CHECK(has(text, "the kernel refuses the ipc control block"));
}
