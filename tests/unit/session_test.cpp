// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <type_traits>

#include <weightwire/engine/session.hpp>

using namespace weightwire;
using state = session_state;
using action = session_action;
using fault = session_fault;

namespace {

static_assert(std::is_trivially_copyable_v<session>, "a value: copied, compared, thrown away");

enum class event : std::uint8_t {
    init_begin,
    init_done,
    init_failed,
    start_begin,
    start_done,
    start_failed,
    update_begin,
    update_done,
    update_failed,
    finish_begin,
    commit_begin,
    committed,
    finish_failed,
    abandon,
};
constexpr std::size_t state_count = 8;
constexpr std::size_t event_count = 14;

session_step apply(session& subject, event what, session_key key = {},
                   session_request request = {.version = 1}) {
    switch (what) {
        case event::init_begin: return subject.init_begin();
        case event::init_done: return subject.init_done();
        case event::init_failed: return subject.init_failed();
        case event::start_begin: return subject.start_begin(key, request);
        case event::start_done: return subject.start_done();
        case event::start_failed: return subject.start_failed();
        case event::update_begin: return subject.update_begin(key);
        case event::update_done: return subject.update_done();
        case event::update_failed: return subject.update_failed();
        case event::finish_begin: return subject.finish_begin(key);
        case event::commit_begin: return subject.commit_begin();
        case event::committed: return subject.committed(request.version);
        case event::finish_failed: return subject.finish_failed();
        case event::abandon: return subject.abandon();
    }
    return {};
}

/// A session that was led to `wanted`, with one commit of version 3 behind it where it has an
/// epoch.
session led_to(state wanted) {
    session made;
    const auto lead = [&](std::initializer_list<event> events) {
        for (const auto each : events) {
            REQUIRE(apply(made, each, {}, {.version = 3}).action == action::proceed);
        }
    };
    if (wanted == state::uninitialized) {
        return made;
    }
    lead({event::init_begin, event::init_done, event::start_begin, event::start_done,
          event::finish_begin, event::commit_begin, event::committed});
    switch (wanted) {
        case state::uninitialized:
        case state::ready: break;
        case state::initializing: lead({event::init_begin}); break;
        case state::starting: lead({event::start_begin}); break;
        case state::active: lead({event::start_begin, event::start_done}); break;
        case state::updating:
            lead({event::start_begin, event::start_done, event::update_begin});
            break;
        case state::finishing:
            lead({event::start_begin, event::start_done, event::finish_begin});
            break;
        case state::committing:
            lead({event::start_begin, event::start_done, event::finish_begin, event::commit_begin});
            break;
    }
    REQUIRE(made.state() == wanted);
    return made;
}

struct cell {
    action does;
    fault why;
    state next;
};

using row = std::array<cell, event_count>;

constexpr cell go(state next) { return {action::proceed, fault::none, next}; }
constexpr cell undo(state next) { return {action::rollback, fault::none, next}; }
constexpr cell no(fault why, state stays) { return {action::refuse, why, stays}; }
constexpr cell wait(state stays) { return {action::wait, fault::none, stays}; }
constexpr cell stop(state stays) { return {action::stop_and_wait, fault::none, stays}; }

/// What calls get in one state, and what their ends do there. An end that is not in `ends` is that
/// of a call that does not run.
struct ending {
    event what;
    cell does;
};
constexpr row cells(state at, cell init, cell start, cell update, cell finish, cell abandon,
                    std::initializer_list<ending> ends = {}) {
    row made{};
    made.fill(no(fault::not_running, at));
    const auto set = [&](event what, cell does) { made[static_cast<std::size_t>(what)] = does; };
    set(event::init_begin, init);
    set(event::start_begin, start);
    set(event::update_begin, update);
    set(event::finish_begin, finish);
    set(event::abandon, abandon);
    for (const auto& [what, does] : ends) {
        set(what, does);
    }
    return made;
}
/// A call runs that a takeover stops.
constexpr row running(state at, std::initializer_list<ending> ends) {
    return cells(at, stop(at), wait(at), wait(at), wait(at), stop(at), ends);
}

/// Every state, every event: what the caller is told, and where the session stands then.
constexpr std::array<row, state_count> table{{
    [] {
        constexpr auto at = state::uninitialized;
        return cells(at, go(state::initializing), no(fault::not_initialized, at),
                     no(fault::update_before_start, at), no(fault::finish_before_start, at),
                     go(at));
    }(),
    running(state::initializing, {{event::init_done, go(state::ready)},
                                  {event::init_failed, undo(state::uninitialized)}}),
    [] {
        constexpr auto at = state::ready;
        return cells(at, go(state::initializing), go(state::starting),
                     no(fault::update_before_start, at), no(fault::finish_before_start, at),
                     go(at));
    }(),
    running(state::starting,
            {{event::start_done, go(state::active)}, {event::start_failed, undo(state::ready)}}),
    [] {
        constexpr auto at = state::active;
        return cells(at, undo(state::initializing), no(fault::already_active, at),
                     go(state::updating), go(state::finishing), undo(state::ready));
    }(),
    running(state::updating,
            {{event::update_done, go(state::active)}, {event::update_failed, undo(state::ready)}}),
    running(state::finishing, {{event::commit_begin, go(state::committing)},
                               {event::finish_failed, undo(state::ready)}}),
    [] {
        constexpr auto at = state::committing;
        return cells(at, wait(at), wait(at), wait(at), wait(at), wait(at),
                     {{event::committed, go(state::ready)}});
    }(),
}};

}  // namespace

TEST_CASE("every event in every state does what the table says") {
    for (std::size_t s = 0; s < state_count; ++s) {
        for (std::size_t e = 0; e < event_count; ++e) {
            CAPTURE(to_string(static_cast<state>(s)));
            CAPTURE(e);
            auto subject = led_to(static_cast<state>(s));
            const auto before = subject;
            const auto step = apply(subject, static_cast<event>(e), {}, {.version = 4});
            const auto& expected = table[s][e];
            CHECK(step.action == expected.does);
            CHECK(step.fault == expected.why);
            CHECK(subject.state() == expected.next);

            const bool inits =
                subject.state() == state::initializing && before.state() != state::initializing;
            CHECK(subject.epoch() == before.epoch() + (inits ? 1U : 0U));
            const bool starts =
                subject.state() == state::starting && before.state() != state::starting;
            CHECK(subject.info().session == before.info().session + (starts ? 1U : 0U));
            const bool commits = before.state() == state::committing && !subject.running();
            CHECK(subject.version() == (commits ? 4U : before.version()));
            CHECK(subject.superseded() == (step.action == action::stop_and_wait));
        }
    }
}

TEST_CASE("a call that was taken over ends without effect, well or badly") {
    struct taken {
        state during;
        event how;
        state next;
    };
    for (const auto& each : {taken{state::initializing, event::init_done, state::uninitialized},
                             taken{state::starting, event::start_done, state::ready},
                             taken{state::updating, event::update_done, state::ready},
                             taken{state::finishing, event::commit_begin, state::ready}}) {
        CAPTURE(to_string(each.during));
        auto subject = led_to(each.during);
        const auto epoch = subject.epoch();
        CHECK(subject.init_begin().action == action::stop_and_wait);
        CHECK(subject.superseded());
        CHECK(subject.epoch() == epoch);
        CHECK(subject.init_begin().action == action::stop_and_wait);
        const auto step = apply(subject, each.how);
        CHECK(step == session_step{action::rollback, fault::taken_over});
        CHECK(subject.state() == each.next);
        CHECK_FALSE(subject.superseded());
        CHECK(subject.version() == 3);
        CHECK(subject.init_begin().action == action::proceed);
        CHECK(subject.epoch() == epoch + 1);
    }
    for (const auto& each : {taken{state::initializing, event::init_failed, state::uninitialized},
                             taken{state::starting, event::start_failed, state::ready},
                             taken{state::updating, event::update_failed, state::ready},
                             taken{state::finishing, event::finish_failed, state::ready}}) {
        auto subject = led_to(each.during);
        CHECK(subject.abandon().action == action::stop_and_wait);
        CHECK(apply(subject, each.how) == session_step{action::rollback, fault::none});
        CHECK(subject.state() == each.next);
        CHECK_FALSE(subject.superseded());
    }
}

TEST_CASE("a worker that was stopped and resumed after a takeover never commits") {
    auto subject = led_to(state::finishing);
    CHECK(subject.init_begin().action == action::stop_and_wait);  // the new trainer
    CHECK(subject.commit_begin().fault == fault::taken_over);     // the old finish wakes up
    CHECK(subject.committed(4).fault == fault::not_running);
    CHECK(subject.version() == 3);
}

TEST_CASE("once it commits, a takeover waits for the commit and does not undo it") {
    auto subject = led_to(state::committing);
    CHECK(subject.init_begin().action == action::wait);
    CHECK(subject.committed(4).action == action::proceed);
    CHECK(subject.version() == 4);
    CHECK(subject.init_begin().action == action::proceed);
}

TEST_CASE("calls of another epoch or session are stale in every state and change nothing") {
    for (std::size_t s = 1; s < state_count; ++s) {
        auto subject = led_to(static_cast<state>(s));
        const auto epoch = subject.epoch();
        const auto session = subject.info().session;
        const std::array<session_key, 4> others{
            {{epoch + 1, session}, {epoch, session + 1}, {1000, 0}, {0, 1000}}};
        for (const auto key : others) {
            for (const auto what : {event::start_begin, event::update_begin, event::finish_begin}) {
                const auto step = apply(subject, what, key, {.version = 9});
                CHECK(step == session_step{action::refuse, fault::stale});
                CHECK(subject.state() == static_cast<state>(s));
            }
        }
        CHECK(subject.epoch() == epoch);
        CHECK(subject.info().session == session);
    }
    CHECK(is_stale(fault::stale));
    CHECK(is_stale(fault::taken_over));
    CHECK_FALSE(is_stale(fault::update_before_start));
}

TEST_CASE("our own trainer's versions grow unless it forces them; vLLM's are free") {
    auto subject = led_to(state::ready);
    const session_key native{.epoch = subject.epoch()};
    CHECK(subject.start_begin(native, {.version = 3}).fault == fault::version_not_above);
    CHECK(subject.start_begin(native, {.version = 0}).fault == fault::version_not_above);
    CHECK(subject.start_begin(native, {.version = 2, .force = true}).action == action::proceed);
    CHECK(subject.info().version == 2);
    CHECK(subject.start_failed().action == action::rollback);
    CHECK(subject.start_begin(native, {.version = 4}).action == action::proceed);
    CHECK(subject.start_failed().action == action::rollback);
    CHECK(subject.start_begin({}, {.version = 0}).action == action::proceed);
}

TEST_CASE("only a full session may start on a dirty worker") {
    auto subject = led_to(state::ready);
    subject.observe(3, true);
    CHECK(subject.start_begin({}, {.version = 4, .partial = true}).fault == fault::dirty);
    CHECK(subject.state() == state::ready);
    CHECK(subject.start_begin({}, {.version = 4}).action == action::proceed);
    CHECK_FALSE(subject.info().partial);
    for (const auto each : {event::start_done, event::finish_begin, event::commit_begin}) {
        apply(subject, each);
    }
    CHECK(subject.dirty());
    CHECK(subject.committed(4).action == action::proceed);
    CHECK_FALSE(subject.dirty());
    CHECK(subject.start_begin({}, {.version = 5, .partial = true}).action == action::proceed);
    CHECK(subject.info().partial);
}

TEST_CASE("a session begins where the sinks stand") {
    const session subject{7, true};
    CHECK(subject.version() == 7);
    CHECK(subject.dirty());
    CHECK(subject.epoch() == 0);
}

TEST_CASE("faults are thrown with vLLM's words and tell whether the call was stale") {
    const auto thrown = [](session_fault why) {
        try {
            session_step{action::refuse, why}.require({.phase = phase::update, .rank = 2});
        } catch (const session_refused& problem) {
            CHECK(problem.kind() == "session");
            CHECK(problem.context().phase == phase::update);
            CHECK(problem.context().rank == 2);
            CHECK(problem.fault() == why);
            CHECK(problem.stale() == is_stale(why));
            return problem.text();
        }
        return std::string{"nothing was thrown"};
    };
    CHECK(thrown(fault::update_before_start) ==
          "start_weight_update must be called before update_weights.");
    CHECK(thrown(fault::already_active) ==
          "start_weight_update called while a weight update is already active. Call "
          "finish_weight_update first.");
    CHECK(thrown(fault::finish_before_start) ==
          "finish_weight_update called without a matching start_weight_update.");
    CHECK(thrown(fault::not_initialized).find("Call init_transfer_engine() first.") !=
          std::string::npos);
    for (const auto why :
         {fault::stale, fault::taken_over, fault::version_not_above, fault::not_running}) {
        CHECK(thrown(why) == std::string{to_string(why)});
    }
    const session_step dirty{action::refuse, fault::dirty};
    CHECK_THROWS_AS(dirty.require(), dirty_error);
    const session_step mine{action::rollback};
    CHECK(mine.require() == action::rollback);
    CHECK_THROWS_AS((session_step{action::rollback, fault::taken_over}.require()), session_error);
}

TEST_CASE("random walks keep the invariants") {
    std::mt19937_64 random{20261129};
    std::uint64_t broken = 0;
    std::uint64_t commits = 0;
    const auto must = [&](bool holds) { broken += holds ? 0U : 1U; };
    for (int walk = 0; walk < 200; ++walk) {
        session subject;
        for (int step = 0; step < 500; ++step) {
            const auto before = subject;
            const auto what = static_cast<event>(random() % event_count);
            const session_key key{.epoch = random() % 3 == 0 ? before.epoch() : random() % 2,
                                  .session = random() % 3 == 0 ? before.info().session : 0};
            const session_request request{
                .version = random() % 20, .partial = random() % 5 == 0, .force = random() % 5 == 0};
            const auto answer = apply(subject, what, key, request);
            // What refuses or waits leaves everything as it was.
            if (answer.action == action::refuse || answer.action == action::wait) {
                must(subject.state() == before.state());
                must(subject.epoch() == before.epoch());
                must(subject.info().session == before.info().session);
                must(subject.superseded() == before.superseded());
            }
            must(subject.epoch() >= before.epoch());
            must(subject.info().session >= before.info().session);
            // Only a call that runs can be superseded, and a superseded one never goes on.
            must((!subject.superseded() || subject.running()));
            if (before.superseded() && !subject.superseded()) {
                must(answer.action == action::rollback);
                must(!subject.running());
            }
            if (subject.state() == state::committing) {
                must(!subject.superseded());
            }
            // The version changes by a commit alone.
            if (subject.version() != before.version()) {
                ++commits;
                must(before.state() == state::committing);
                must(subject.state() == state::ready);
            }
            must((subject.state() == state::uninitialized || subject.epoch() > 0));
            if (random() % 50 == 0) {
                subject.observe(subject.version(), random() % 2 == 0);
            }
        }
    }
    CHECK(broken == 0);
    CHECK(commits > 0);
}
