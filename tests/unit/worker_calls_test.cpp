// SPDX-License-Identifier: Apache-2.0
// How a worker's calls end: by a client that is gone, a take-over, the clock, or nobody at all.

#include <doctest/doctest.h>

#include <sched.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/engine/call_gate.hpp>
#include <weightwire/engine/weight_checksums.hpp>
#include <weightwire/engine/worker_engine.hpp>
#include <weightwire/sinks/parameter_table.hpp>
#include <weightwire/testing/gate.hpp>

#include "../support/forked.hpp"
#include "../support/touch_trap.hpp"
#include "../support/worker_rig.hpp"

using namespace weightwire;
using namespace tests;

namespace {

/// A table that says what a commit takes, and until when its session may wait.
class slow_table : public parameter_table {
public:
    using parameter_table::parameter_table;
    parameter_table& table() { return *this; }
    [[nodiscard]] std::chrono::nanoseconds commit_estimate() const { return estimate; }
    std::chrono::nanoseconds estimate{0};
};

worker_call gone() {
    return {.client_waits = [](const void*) noexcept { return false; }};
}
worker_call stopped() {
    std::stop_source stop;
    stop.request_stop();
    return {.stop = stop.get_token()};
}
bool is_set(const void* flag) noexcept {
    return static_cast<const std::atomic<bool>*>(flag)->load();
}

/// Waits for a state that no call reports.
template <class Condition>
bool comes_true(Condition condition) {
    const auto end = soon();
    while (!condition() && !end.expired()) {
        std::this_thread::sleep_for(1ms);
    }
    return condition();
}

}  // namespace

TEST_CASE("Two processes share a clock only where boot and time namespace are the same") {
    const auto here = detail::boot_id();
    REQUIRE_FALSE(here.empty());
    CHECK(here.size() <= 64);
    CHECK(here == detail::boot_id());
    CHECK(here.find_first_not_of("0123456789abcdef-.") == std::string::npos);
    std::array<char, 64> link{};
    const auto length = ::readlink("/proc/self/ns/time", link.data(), link.size());
    if (length > 0) {
        const std::string_view space{link.data(), static_cast<std::size_t>(length)};
        const auto number = here.substr(here.find('.') + 1);
        CHECK(space == "time:[" + number + "]");
    }
    forked elsewhere{[](channel& back) {
        if (::unshare(CLONE_NEWTIME) != 0) {
            return;  // not permitted here
        }
        forked inside{[](channel& up) { up.put_text(detail::boot_id()); }};
        back.put_text(inside.to().rest());
    }};
    const auto other = elsewhere.to().rest();
    CHECK(other != here);
    if (other.empty()) {
        MESSAGE("this process may not make a time namespace, so only the form was checked");
    }
}

TEST_CASE("A call whose client is gone begins nothing: the trainer that is there goes on") {
    scene<slow_table> s{1, {.mode = commit_mode::in_place}};
    s.round(1);
    hand_driven_trainer dead{s.weights};
    const auto epoch = s.rig.engine.status().epoch;
    for (const auto& call : {gone(), stopped()}) {
        CHECK(caught([&] { s.rig.engine.init(dead.init_message(), call); }).kind == "cancelled");
        CHECK(caught([&] { s.rig.engine.init(wire::vllm_init{dead.vllm_init()}, call); }).kind ==
              "cancelled");
        CHECK(caught([&] { s.rig.engine.start(s.trainer.start_message(2), call); }).kind ==
              "cancelled");
        CHECK(caught([&] { s.rig.engine.reset_weights(call); }).kind == "cancelled");
        CHECK(s.rig.engine.status().epoch == epoch);
        CHECK_FALSE(s.rig.engine.dirty());
    }
    CHECK(s.rig.serves(1, s.weights));
    s.round(2);
    CHECK(s.rig.serves(2, s.weights));
    s.start(3);
    CHECK(caught([&] { s.rig.engine.init(dead.init_message(), gone()); }).kind == "cancelled");
    CHECK(s.rig.engine.status().session == s.trainer.session);
    s.weights.set(3);
    s.update();
    s.rig.engine.finish(s.trainer.finish_message(3), {});
    CHECK(s.rig.serves(3, s.weights));
}

TEST_CASE("A vLLM start whose client is gone opens no session") {
    scene<slow_table> s;
    hand_driven_trainer vllm{s.weights};
    s.rig.engine.init(wire::vllm_init{vllm.vllm_init()}, {});
    CHECK(caught([&] { s.rig.engine.start(wire::vllm_start{}, gone()); }).kind == "cancelled");
    CHECK(s.rig.engine.status().session == 0);
    s.rig.engine.start(wire::vllm_start{}, {});
    CHECK(s.rig.engine.status().session != 0);
}

TEST_CASE("An init whose client leaves while it waits for the running call begins no epoch") {
    // A sink whose begin no stop ends: so the init must wait, and its client leaves meanwhile.
    scene<obstinate_table> s{1, {.mode = commit_mode::in_place}};
    s.round(1);
    auto& table = s.rig.sinks[0]->table();
    std::optional<snapshot> held{table.acquire()};
    auto waiting = std::async(std::launch::async, [&] { return caught([&] { s.start(2); }); });
    REQUIRE(comes_true([&] {  // it has closed the door and waits for the reader
        return caught([&] { static_cast<void>(table.acquire(deadline::after(0s))); }).kind ==
               "timeout";
    }));
    const auto epoch = s.rig.engine.status().epoch;
    std::atomic<bool> waits{true};
    hand_driven_trainer second{s.weights};
    auto init = std::async(std::launch::async, [&] {
        return caught([&] {
            s.rig.engine.init(second.init_message(), {.client_waits = is_set, .context = &waits});
        });
    });
    std::this_thread::sleep_for(50ms);  // most likely it waits now; the outcome is the same
    waits = false;
    held.reset();
    CHECK(init.get().kind == "cancelled");
    static_cast<void>(waiting.get());
    CHECK(s.rig.engine.status().epoch == epoch);
}

TEST_CASE("A take-over ends a start that waits for a reader, long before that start's deadline") {
    for (const auto mode : {commit_mode::flip, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        scene<slow_table> s{1, {.mode = mode}};
        s.round(1);
        s.round(2);
        std::optional<snapshot> held{s.rig.sinks[0]->acquire()};
        if (mode == commit_mode::flip) {
            s.round(3);
        }
        auto message = s.trainer.start_message(4);
        message.budget_ms = 60'000;
        auto waiting = std::async(std::launch::async,
                                  [&] { return caught([&] { s.rig.engine.start(message, {}); }); });
        std::this_thread::sleep_for(20ms);  // most likely it waits now; the outcome is the same
        hand_driven_trainer second{s.weights};
        s.rig.init(second);  // within its own budget of 20 s
        CHECK(waiting.get().kind == "session");
        CHECK_FALSE(s.rig.engine.dirty());
        held.reset();
        s.weights.set(5);
        s.rig.round(second, 5);
        CHECK(s.rig.serves(5, s.weights));
    }
}

TEST_CASE("A client that hangs up ends a finish that waits for a reader") {
    scene<slow_table> s{1, {.mode = commit_mode::copy_in}};
    s.round(1);
    const auto held = s.rig.sinks[0]->acquire();
    s.start(2);
    s.update();
    auto message = s.trainer.finish_message(2);
    message.budget_ms = 60'000;
    message.commit_before_ns = detail::monotonic_ns(deadline::after(1h).when());
    std::stop_source hang_up;
    auto waiting = std::async(std::launch::async, [&] {
        return caught([&] { s.rig.engine.finish(message, {.stop = hang_up.get_token()}); });
    });
    std::this_thread::sleep_for(20ms);  // most likely it waits now; the outcome is the same
    hang_up.request_stop();
    REQUIRE(waiting.wait_until(soon().when()) == std::future_status::ready);
    CHECK(waiting.get().kind == "cancelled");
    CHECK(s.rig.engine.version() == 1);
}

TEST_CASE("A commit that would end after the trainer gave up is not begun") {
    scene<slow_table> s;
    s.round(1);
    const auto old = s.weights;
    auto& estimate = s.rig.sinks[0]->estimate;
    SUBCASE("it would outlast the instant of the trainer") {
        estimate = 10min;
        s.weights.set(2);
        s.start(2);
        s.update();
        auto message = s.trainer.finish_message(2);
        message.budget_ms = 3'600'000;
        const auto why = caught([&] { s.rig.engine.finish(message, {}); });
        CHECK(why.kind == "timeout");
        CHECK(why.message().find("600000 ms") != std::string::npos);
    }
    SUBCASE("it would outlast the call") {
        estimate = 10min;
        s.weights.set(2);
        s.start(2);
        s.update();
        auto message = s.trainer.finish_message(2);
        message.commit_before_ns = detail::monotonic_ns(deadline::after(1h).when());
        CHECK(caught([&] { s.rig.engine.finish(message, {}); }).kind == "timeout");
    }
    SUBCASE("an absurd estimate, or a negative one, overflows nothing") {
        estimate = std::chrono::nanoseconds::max();
        CHECK(caught([&] { s.round(2); }).kind == "timeout");
        estimate = std::chrono::nanoseconds::min();
        s.round(2);
        CHECK(s.rig.serves(2, s.weights));
        return;
    }
    CHECK(s.rig.engine.version() == 1);
    CHECK(s.rig.engine.status().session == 0);
    CHECK(s.rig.serves(1, old));
    estimate = 1ms;
    s.round(2);
    CHECK(s.rig.serves(2, s.weights));
}

TEST_CASE("Readers that wait for an abandoned session learn of its end without anybody asking") {
    worker_options<> options;
    options.session_time_to_live = 500ms;
    scene<slow_table> s{1, {.mode = commit_mode::in_place}, {}, options};
    SUBCASE("after its start") { s.start(1); }
    SUBCASE("after its update") {
        s.start(1);
        s.update();
    }
    const auto why = caught([&] { static_cast<void>(s.rig.sinks[0]->acquire(soon())); });
    CHECK(why.kind == "dirty");
    CHECK(comes_true([&] { return s.rig.engine.status().rolled_back == 1; }));
    // The next session is watched too.
    s.start(2);
    CHECK(caught([&] { static_cast<void>(s.rig.sinks[0]->acquire(soon())); }).kind == "dirty");
    CHECK(comes_true([&] { return s.rig.engine.status().rolled_back == 2; }));
    s.round(3);
    CHECK(s.rig.serves(3, s.weights));
}

TEST_CASE("A session that its trainer keeps busy is not ended, however short its idle time") {
    testing::gate gate;
    worker_options<> options;
    options.session_time_to_live = 50ms;
    scene<slow_table> s{1, {}, {.block_in_receive = gate.name()}, options};
    s.start(1);
    auto update = std::async(std::launch::async, [&] { return caught([&] { s.update(); }); });
    gate.wait_until_blocked(soon());
    std::this_thread::sleep_for(200ms);  // longer than an idle session may last
    gate.release();
    CHECK_FALSE(update.get());
    CHECK(s.rig.engine.status().rolled_back == 0);
}

TEST_CASE("A stop callback of the running call may ask the worker while a take-over comes") {
    detail::call_gate gate;
    detail::call_gate::entry running{
        gate, detail::call_gate::kind::ordinary, soon(), {}, phase::update};
    std::atomic<bool> answered{false};
    const std::stop_callback asks{running.stop(), [&] {
                                      // From a thread of its own, so that a failing test ends.
                                      std::thread{[&gate, &answered] {
                                          static_cast<void>(gate.busy());
                                          answered = true;
                                      }}.detach();
                                      const auto end = deadline::after(5s);
                                      while (!answered && !end.expired()) {
                                          std::this_thread::sleep_for(1ms);
                                      }
                                      CHECK(answered);
                                  }};
    CHECK_THROWS_AS(
        (detail::call_gate::entry{
            gate, detail::call_gate::kind::take_over, deadline::after(10ms), {}, phase::init}),
        timeout_error);
    CHECK(running.stop().stop_requested());
    CHECK(comes_true([&] { return answered.load(); }));
}

TEST_CASE("Only the call that runs when a take-over comes is told to stop") {
    detail::call_gate gate;
    using entry = detail::call_gate::entry;
    using kind = detail::call_gate::kind;
    std::optional<entry> running;
    running.emplace(gate, kind::ordinary, soon(), std::stop_token{}, phase::update);
    const auto gives_up = [&] {
        CHECK_THROWS_AS((entry{gate, kind::take_over, deadline::after(1ms), {}, phase::init}),
                        timeout_error);
    };
    gives_up();
    gives_up();
    CHECK(running->stop().stop_requested());
    running.reset();
    running.emplace(gate, kind::ordinary, soon(), std::stop_token{}, phase::update);
    CHECK_FALSE(running->stop().stop_requested());
    gives_up();
    CHECK(running->stop().stop_requested());
}

namespace {

/// A table whose exchange may outlast everybody's patience.
class late_table : public parameter_table {
public:
    using parameter_table::parameter_table;
    parameter_table& table() { return *this; }
    void exchange(deadline until, const std::stop_token& stop) {
        parameter_table::exchange(until, stop);
        while (late && !until.expired()) {
            std::this_thread::sleep_for(1ms);
        }
        exchanges += 1;
    }
    bool late = false;
    int exchanges = 0;
};

}  // namespace

TEST_CASE("When one rank ends its copy too late no rank commits, and the next round does") {
    small_weights weights{6, 1000};
    worker_rig<late_table> rig{weights.metadata(), 4, {.mode = commit_mode::copy_in}};
    hand_driven_trainer trainer{weights, 4};
    rig.init(trainer);
    weights.set(1);
    rig.round(trainer, 1);
    for (const bool by_instant : {true, false}) {
        const auto old = weights;
        const auto version = rig.engine.version() + 1;
        rig.sinks[2]->late = true;
        weights.set(version);
        trainer.session = rig.engine.start(trainer.start_message(version), {}).session;
        trainer.beside_sending([&] { rig.engine.update(trainer.update_message(), {}); });
        auto message = trainer.finish_message(version);
        if (by_instant) {
            message.commit_before_ns = detail::monotonic_ns(deadline::after(2s).when());
        } else {
            message.budget_ms = 2000;
        }
        const auto why = caught([&] { rig.engine.finish(message, {}); });
        CHECK(why.kind == "timeout");
        CHECK(why.message().find("nothing is committed") != std::string::npos);
        CHECK(rig.engine.version() == version - 1);
        CHECK(rig.serves(version - 1, old));
        rig.sinks[2]->late = false;
        weights.set(version);
        rig.round(trainer, version);
        CHECK(rig.serves(version, weights));
    }
    for (const auto& sink : rig.sinks) {
        CHECK(sink->exchanges == 5);
    }
}

TEST_CASE("A take-over that comes during the final copy undoes it on every rank") {
    small_weights weights{6, 1000};
    worker_rig<late_table> rig{weights.metadata(), 2, {.mode = commit_mode::copy_in}};
    hand_driven_trainer trainer{weights, 2};
    rig.init(trainer);
    weights.set(1);
    rig.round(trainer, 1);
    const auto old = weights;
    weights.set(2);
    trainer.session = rig.engine.start(trainer.start_message(2), {}).session;
    trainer.beside_sending([&] { rig.engine.update(trainer.update_message(), {}); });
    rig.sinks[1]->late = true;
    auto message = trainer.finish_message(2);
    message.commit_before_ns = detail::monotonic_ns(deadline::after(2s).when());
    auto finishing = std::async(std::launch::async,
                                [&] { return caught([&] { rig.engine.finish(message, {}); }); });
    hand_driven_trainer second{weights, 2};
    rig.init(second);
    CHECK(finishing.get().kind == "session");
    CHECK(rig.serves(1, old));
    rig.sinks[1]->late = false;
    weights.set(2);
    rig.round(second, 2);
    CHECK(rig.serves(2, weights));
}

TEST_CASE("An init whose transport is refused takes nothing from the trainer that is there") {
    for (const int ranks : {1, 3}) {
        CAPTURE(ranks);
        small_weights weights{6, 1000};
        worker_rig<obstinate_table, ipc::backend> rig{weights.metadata(), ranks};
        trainer_half<ipc::backend> good{weights, ranks};
        rig.init(good);
        weights.set(1);
        rig.round(good, 1);
        const auto epoch = rig.engine.status().epoch;
        trainer_half<ipc::backend> other{weights, ranks};
        const auto refuse = [&] {
            auto message = other.init_message();
            message.transport = "{}";
            CHECK(caught([&] { rig.engine.init(message, {}); }).kind == "protocol");
            message = other.init_message();
            const auto size = message.transport.find("\"length\":");
            REQUIRE(size != std::string::npos);
            message.transport.insert(size + 9, "9");
            CHECK_FALSE(caught([&] { rig.engine.init(message, {}); }).kind.empty());
            message = other.init_message();
            message.take_over = false;  // no trainer may push out another without saying so
            message.trainer = 77;
            CHECK(caught([&] { rig.engine.init(message, {}); }).kind == "session");
        };
        weights.set(2);
        refuse();
        good.session = rig.engine.start(good.start_message(2), {}).session;
        refuse();
        good.beside_sending([&] {
            auto running = std::async(std::launch::async,
                                      [&] { rig.engine.update(good.update_message(), {}); });
            refuse();
            running.get();
        });
        refuse();
        rig.engine.finish(good.finish_message(2), {});
        CHECK(rig.engine.status().epoch == epoch);
        CHECK(rig.serves(2, weights));
        rig.init(other);
        weights.set(3);
        rig.round(other, 3);
        CHECK(rig.serves(3, weights));
        CHECK(caught([&] { rig.engine.start(good.start_message(4), {}); }).kind == "session");
    }
}

TEST_CASE("An init that was overtaken while its transport was opened does not take the worker") {
    detail::owner_board board;
    const auto slow = board.arrive();
    const auto quick = board.arrive();
    board.begin(quick, {});
    CHECK_THROWS_AS(board.begin(slow, {}), session_refused);
    CHECK(board.owner().kind == detail::worker_owner::kind_type::nobody);
    board.own({detail::worker_owner::kind_type::native, 5});
    CHECK(board.owner().trainer == 5);
    board.begin(board.arrive(), {});
    CHECK(board.owner().kind == detail::worker_owner::kind_type::nobody);
}

TEST_CASE("Checksums that nobody waits for end within a tensor") {
    small_weights weights{1, 8'000'000};
    worker_rig<slow_table> rig{weights.metadata()};
    const auto held = rig.sinks[0]->acquire();
    detail::weight_checksums sums;
    CHECK_THROWS_AS(detail::append_checksums(sums, held, "", deadline::after(-1s), {}),
                    timeout_error);
    static std::stop_source stop;
    touch_trap::set(held.tensor(0).bytes(), [] { stop.request_stop(); });
    CHECK_THROWS_AS(detail::append_checksums(sums, held, "", soon(), stop.get_token()),
                    cancelled_error);
    CHECK(sums.empty());
    detail::append_checksums(sums, held, "", soon(), {});
    CHECK(sums.size() == 1);
}
