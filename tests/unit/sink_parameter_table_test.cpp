// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/sinks/parameter_table.hpp>

#include "../support/allocations.hpp"
#include "sink_test_support.hpp"

using namespace weightwire;
using namespace std::chrono_literals;
using sink_test::bytes_of;
using sink_test::fill;
using sink_test::soon;
using sink_test::update;

static_assert(WeightSink<parameter_table>);
static_assert(HasSnapshots<parameter_table>);
static_assert(HasCommitMode<parameter_table>);
static_assert(HasStoppableBegin<parameter_table>);
static_assert(HasStoppablePrepare<parameter_table>);
static_assert(HasCommitEstimate<parameter_table>);
static_assert(!std::is_copy_constructible_v<parameter_table>);
static_assert(!std::is_copy_constructible_v<snapshot>);
static_assert(std::is_nothrow_move_constructible_v<snapshot>);

namespace {

manifest small_model() {
    return manifest{{{"embed.weight", dtype::bf16, {5, 3}},
                     {"layers.0.up", dtype::f32, {2, 3}},
                     {"layers.0.down", dtype::f32, {3}},
                     {"layers.1.up", dtype::f32, {2, 3}},
                     {"layers.1.down", dtype::f32, {3}},
                     {"scale", dtype::f64, {}},
                     {"nothing", dtype::f32, {0, 4}}}};
}

parameter_table_options in_mode(commit_mode mode) { return {.mode = mode}; }

session_info session_of(weight_version version, bool partial = false) {
    return {.epoch = 1, .session = version, .version = version, .partial = partial};
}

/// What `acquire()` of a dirty table says.
std::string refusal(parameter_table& table) {
    try {
        static_cast<void>(table.acquire());
    } catch (const dirty_error& refused) {
        return refused.text();
    }
    return "it gave a snapshot";
}

/// Every parameter of the snapshot holds the pattern of `seed`.
bool holds(const snapshot& held, std::uint64_t seed) {
    for (std::size_t i = 0; i < held.size(); ++i) {
        if (bytes_of(held.tensor(i)) !=
            sink_test::pattern(seed, held.name(i), held.tensor(i).byte_size())) {
            return false;
        }
    }
    return true;
}

}  // namespace

TEST_CASE("a new table serves zeroed, aligned weights as version 0") {
    parameter_table table{small_model()};
    CHECK(table.mode() == commit_mode::flip);
    CHECK(table.version() == 0);
    CHECK_FALSE(table.dirty());
    const auto held = table.acquire();
    REQUIRE(held.size() == 7);
    CHECK(held.name(5) == "scale");
    for (std::size_t i = 0; i < held.size(); ++i) {
        CHECK(reinterpret_cast<std::uintptr_t>(held.tensor(i).data()) % 64 == 0);
        CHECK(held.tensor(i).type() == table.parameters()[i].dtype);
        CHECK(held.tensor(i).extents() == table.parameters()[i].shape);
        CHECK(std::ranges::all_of(held.tensor(i).bytes(),
                                  [](std::byte b) { return b == std::byte{0}; }));
    }
    CHECK(held.find("scale")->byte_size() == 8);
    CHECK(held.find("nothing")->byte_size() == 0);
    CHECK_FALSE(held.find("absent").has_value());
}

TEST_CASE("a commit shows every parameter of its version, whatever the mode") {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        parameter_table table{small_model(), in_mode(mode)};
        for (const weight_version version : {1U, 2U, 3U, 7U}) {
            update(table, version);
            CHECK(table.version() == version);
            CHECK_FALSE(table.dirty());
            CHECK(table.acquire().version() == version);
            CHECK(holds(table.acquire(), version));
        }
    }
}

TEST_CASE("flip and copy_in serve the old version after a rollback") {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in}) {
        CAPTURE(to_string(mode));
        parameter_table table{small_model(), in_mode(mode)};
        update(table, 1);
        fill(table.begin(session_of(2), table.parameters(), soon()), table.parameters(), 2);
        CHECK(holds(table.acquire(), 1));
        table.rollback();
        table.rollback();
        CHECK(table.version() == 1);
        CHECK_FALSE(table.dirty());
        CHECK(holds(table.acquire(), 1));

        fill(table.begin(session_of(3), table.parameters(), soon()), table.parameters(), 3);
        table.prepare(soon());
        table.rollback();
        CHECK(holds(table.acquire(), 1));
    }
}

TEST_CASE("a commit without a prepare changes nothing") {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        parameter_table table{small_model(), in_mode(mode)};
        table.commit(9);
        static_cast<void>(table.begin(session_of(1), table.parameters(), soon()));
        table.commit(9);
        CHECK(table.version() == 0);
        table.rollback();
    }
}

TEST_CASE("copy_in and in_place keep every address; flip alternates between two") {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        parameter_table table{small_model(), in_mode(mode)};
        std::vector<std::vector<const std::byte*>> addresses;
        for (weight_version version = 1; version <= 4; ++version) {
            update(table, version);
            const auto held = table.acquire();
            auto& now = addresses.emplace_back();
            for (std::size_t i = 0; i < held.size(); ++i) {
                now.push_back(held.tensor(i).data());
            }
        }
        CHECK(addresses[0] == addresses[2]);
        CHECK(addresses[1] == addresses[3]);
        CHECK((addresses[0] == addresses[1]) == (mode != commit_mode::flip));
    }
}

TEST_CASE("an in_place table is dirty from begin on, and only a full commit clears it") {
    parameter_table table{small_model(), in_mode(commit_mode::in_place)};
    update(table, 4);
    static_cast<void>(table.begin(session_of(5), table.parameters(), soon()));
    CHECK(table.dirty());
    CHECK(refusal(table) ==
          "an update is being written over version 4; wait for its end with acquire(deadline)");
    CHECK_THROWS_AS(static_cast<void>(table.acquire(deadline::after(5ms))), timeout_error);
    table.rollback();
    CHECK(table.dirty());
    CHECK(table.version() == 4);
    CHECK(refusal(table) ==
          "the weights are a mix of version 4 and a later one; send a full update");
    CHECK_THROWS_AS(static_cast<void>(table.acquire(soon())), dirty_error);

    const manifest layer{{{"layers.1.up", dtype::f32, {2, 3}}, {"layers.1.down", dtype::f32, {3}}}};
    fill(table.begin(session_of(6, true), layer, soon()), layer, 6);
    table.prepare(soon());
    table.commit(6);
    CHECK(table.dirty());
    CHECK(table.version() == 4);

    update(table, 7);
    CHECK_FALSE(table.dirty());
    CHECK(holds(table.acquire(), 7));
}

TEST_CASE("an in_place session that hands out no bytes leaves the table clean") {
    auto options = in_mode(commit_mode::in_place);
    options.frozen = {"a"};
    parameter_table table{manifest{{{"a", dtype::f32, {2}}, {"b", dtype::f32, {0}}}}, options};
    const auto destinations = table.begin(session_of(1), table.parameters(), soon());
    CHECK(destinations[0].kind == destination::kind_type::frozen);
    CHECK(destinations[1].kind == destination::kind_type::place);
    CHECK_FALSE(table.dirty());
    table.rollback();
    CHECK_FALSE(table.dirty());
}

TEST_CASE("a partial commit of a clean in_place table makes it whole at the new version") {
    parameter_table table{small_model(), in_mode(commit_mode::in_place)};
    update(table, 1);
    const manifest layer{{{"layers.0.up", dtype::f32, {2, 3}}, {"layers.0.down", dtype::f32, {3}}}};
    fill(table.begin(session_of(2, true), layer, soon()), layer, 2);
    CHECK(table.dirty());
    table.prepare(soon());
    table.commit(2);
    CHECK_FALSE(table.dirty());
    CHECK(table.version() == 2);
}

TEST_CASE("a partial session keeps the other entries, round after round") {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        parameter_table table{small_model(), in_mode(mode)};
        update(table, 1);
        const manifest first{
            {{"layers.0.up", dtype::f32, {2, 3}}, {"layers.0.down", dtype::f32, {3}}}};
        const manifest second{
            {{"layers.1.down", dtype::f32, {3}}, {"layers.1.up", dtype::f32, {2, 3}}}};
        for (const weight_version version : {2U, 3U, 4U, 5U}) {
            const auto& part = version % 2 == 0 ? first : second;
            fill(table.begin(session_of(version, true), part, soon()), part, version);
            table.prepare(soon());
            table.commit(version);
        }
        const auto held = table.acquire();
        CHECK(held.version() == 5);
        const auto seed_of = [&](std::string_view name) {
            const auto bytes = bytes_of(*held.find(name));
            for (std::uint64_t seed = 1; seed <= 5; ++seed) {
                if (bytes == sink_test::pattern(seed, name, bytes.size())) {
                    return seed;
                }
            }
            return std::uint64_t{0};
        };
        CHECK(seed_of("embed.weight") == 1);
        CHECK(seed_of("layers.0.up") == 4);
        CHECK(seed_of("layers.0.down") == 4);
        CHECK(seed_of("layers.1.up") == 5);
        CHECK(seed_of("layers.1.down") == 5);
        CHECK(seed_of("scale") == 1);
    }
}

TEST_CASE("a snapshot keeps its bytes through commits; the next begin waits for it and names it") {
    parameter_table table{small_model()};
    update(table, 1);
    std::optional<snapshot> held{table.acquire()};
    update(table, 2);
    CHECK(holds(*held, 1));
    CHECK(holds(table.acquire(), 2));
    try {
        static_cast<void>(table.begin(session_of(3), table.parameters(), deadline::after(20ms)));
        FAIL("begin returned while version 1 was held");
    } catch (const timeout_error& problem) {
        CHECK(problem.context().phase == phase::start);
        CHECK(problem.context().operation == "wait for readers");
        CHECK(problem.text().find("version 1 is still held (readers: 1)") != std::string::npos);
    }
    CHECK(holds(*held, 1));
    std::jthread reader{[&] {
        std::this_thread::sleep_for(20ms);
        held.reset();
    }};
    update(table, 3);
    CHECK(holds(table.acquire(), 3));
}

TEST_CASE("copy_in waits for readers in prepare and opens the door again when it gives up") {
    parameter_table table{small_model(), in_mode(commit_mode::copy_in)};
    update(table, 1);
    std::optional<snapshot> held{table.acquire()};
    fill(table.begin(session_of(2), table.parameters(), soon()), table.parameters(), 2);
    try {
        table.prepare(deadline::after(20ms));
        FAIL("prepare returned while version 1 was held");
    } catch (const timeout_error& problem) {
        CHECK(problem.context().phase == phase::finish);
        CHECK(problem.text().find("version 1") != std::string::npos);
    }
    CHECK(holds(table.acquire(), 1));
    held.reset();
    table.prepare(soon());
    CHECK_THROWS_AS(static_cast<void>(table.acquire(deadline::after(5ms))), timeout_error);
    CHECK_FALSE(table.dirty());
    table.commit(2);
    CHECK(holds(table.acquire(), 2));
}

TEST_CASE("in_place waits for readers in begin and stays clean when it gives up") {
    parameter_table table{small_model(), in_mode(commit_mode::in_place)};
    update(table, 1);
    std::optional<snapshot> held{table.acquire()};
    CHECK_THROWS_AS(
        static_cast<void>(table.begin(session_of(2), table.parameters(), deadline::after(20ms))),
        timeout_error);
    CHECK_FALSE(table.dirty());
    CHECK(holds(table.acquire(), 1));
    held.reset();
    update(table, 2);
    CHECK(holds(table.acquire(), 2));
}

TEST_CASE("a session that waits for readers ends its wait when it is stopped") {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        parameter_table table{small_model(), in_mode(mode)};
        update(table, 1);
        std::optional<snapshot> held{table.acquire()};
        if (mode == commit_mode::flip) {
            update(table, 2);
        }
        const auto version = table.version();
        std::stop_source stop;
        std::jthread stops{[&] {
            std::this_thread::sleep_for(5ms);
            stop.request_stop();
        }};
        const auto wait = [&] {
            fill(table.begin(session_of(3), table.parameters(), soon(), stop.get_token()),
                 table.parameters(), 3);
            table.prepare(soon(), stop.get_token());
        };
        CHECK_THROWS_AS(wait(), cancelled_error);
        CHECK_THROWS_AS(wait(), error);  // at once, since it is stopped; or the session is open
        table.rollback();
        CHECK(table.version() == version);
        CHECK_FALSE(table.dirty());
        CHECK(table.acquire().version() == version);  // the door is open
        held.reset();
        update(table, 4);
        CHECK(holds(table.acquire(), 4));
    }
}

TEST_CASE("only copy_in says that a commit takes time, and the more bytes the more") {
    const manifest model{{{"layers.0.w", dtype::f32, {256, 1024}},
                          {"layers.1.w", dtype::f32, {256, 1024}},
                          {"layers.2.w", dtype::f32, {256, 1024}}}};
    const manifest part{{{"layers.1.w", dtype::f32, {256, 1024}}}};
    for (const auto mode : {commit_mode::flip, commit_mode::in_place}) {
        parameter_table table{model, in_mode(mode)};
        static_cast<void>(table.begin(session_of(1), model, soon()));
        CHECK(table.commit_estimate() == 0ns);
    }
    for (const auto staging : {staging_time::at_construction, staging_time::on_first_use}) {
        parameter_table table{model, {.mode = commit_mode::copy_in, .staging = staging}};
        CHECK(table.commit_estimate() == 0ns);
        static_cast<void>(table.begin(session_of(1), model, soon()));
        const auto whole = table.commit_estimate();
        CHECK(whole > 0ns);  // before the first commit
        table.rollback();
        static_cast<void>(table.begin(session_of(1, true), part, soon()));
        CHECK(table.commit_estimate() > 0ns);
        CHECK(table.commit_estimate() < whole);
        table.prepare(soon());
        table.commit(1);
        static_cast<void>(table.begin(session_of(2), model, soon()));
        CHECK(table.commit_estimate() > 0ns);
    }
}

TEST_CASE("one slow copy does not make the estimate of the next, and three are forgotten in time") {
    const auto copies = [](std::chrono::milliseconds time) {
        return [time] {
            std::this_thread::sleep_for(time);
            return std::uint64_t{1} << 20U;
        };
    };
    detail::copy_rate rate;
    CHECK(rate.time_for(1U << 20U) == 0ns);
    rate.tried(detail::timed(copies(0ms)));
    rate.took(copies(100ms));
    CHECK(rate.time_for(1U << 20U) < 100ms);
    rate.took(copies(100ms));
    CHECK(rate.time_for(1U << 20U) >= 100ms);
    CHECK(rate.time_for(UINT64_MAX) > 1h);  // and no overflow
    rate.forget_one();
    rate.forget_one();
    CHECK(rate.time_for(1U << 20U) < 100ms);
    rate.took([] { return std::uint64_t{1}; });  // too few to tell
    CHECK(rate.time_for(1U << 20U) < 100ms);
}

TEST_CASE("a reader with a deadline waits for the end of a session") {
    for (const auto mode : {commit_mode::copy_in, commit_mode::in_place}) {
        parameter_table table{small_model(), in_mode(mode)};
        fill(table.begin(session_of(1), table.parameters(), soon()), table.parameters(), 1);
        table.prepare(soon());
        std::atomic<bool> right = false;
        std::jthread reader{[&] { right = holds(table.acquire(soon()), 1); }};
        std::this_thread::sleep_for(10ms);
        table.commit(1);
        reader.join();
        CHECK(right);
    }
}

TEST_CASE("a waiting reader can be stopped") {
    parameter_table table{small_model(), in_mode(commit_mode::in_place)};
    static_cast<void>(table.begin(session_of(1), table.parameters(), soon()));
    std::stop_source stop;
    std::atomic<bool> cancelled = false;
    std::jthread reader{[&] {
        try {
            static_cast<void>(table.acquire(soon(), stop.get_token()));
        } catch (const cancelled_error&) {
            cancelled = true;
        }
    }};
    std::this_thread::sleep_for(10ms);
    stop.request_stop();
    reader.join();
    CHECK(cancelled);
    table.rollback();
    CHECK_THROWS_AS(static_cast<void>(table.acquire(soon(), stop.get_token())), cancelled_error);
}

TEST_CASE("a second begin and a prepare without a session are session errors") {
    parameter_table table{small_model()};
    CHECK_THROWS_AS(table.prepare(soon()), session_error);
    static_cast<void>(table.begin(session_of(1), table.parameters(), soon()));
    try {
        static_cast<void>(table.begin(session_of(2), table.parameters(), soon()));
        FAIL("a second begin returned");
    } catch (const session_error& problem) {
        CHECK(problem.context().phase == phase::start);
        CHECK(problem.kind() == "session");
    }
    table.rollback();
    update(table, 3);
    CHECK(table.version() == 3);
}

TEST_CASE("the mode follows the budget, and both numbers can be read") {
    const manifest model{{{"a", dtype::u8, {640}}, {"b", dtype::u8, {64}}}};
    parameter_table roomy{model, {.memory_budget = 1408}};
    CHECK(roomy.mode() == commit_mode::flip);
    CHECK(roomy.live_bytes() == 704);
    CHECK(roomy.staging_bytes() == 704);
    CHECK(roomy.description() ==
          "parameter table: flip by choice, 704 bytes live and 704 bytes of staging of a budget "
          "of 1408");

    parameter_table tight{model, {.memory_budget = 1407}};
    CHECK(tight.mode() == commit_mode::in_place);
    CHECK(tight.staging_bytes() == 0);
    CHECK(tight.description() ==
          "parameter table: in_place by choice, 704 bytes live and 0 bytes of staging of a budget "
          "of 1407");

    parameter_table frozen{model, {.memory_budget = 768, .frozen = {"a"}}};
    CHECK(frozen.mode() == commit_mode::flip);
    CHECK(frozen.staging_bytes() == 64);

    CHECK_THROWS_AS((parameter_table{model, {.mode = commit_mode::flip, .memory_budget = 1407}}),
                    resource_error);
    CHECK_THROWS_WITH_AS((parameter_table{model, {.memory_budget = 703}}),
                         doctest::Contains("takes 704 bytes, the budget is 703"), resource_error);
}

TEST_CASE("staging on first use is mapped by the session that needs it") {
    parameter_table table{small_model(), {.staging = staging_time::on_first_use}};
    const manifest layer{{{"layers.0.up", dtype::f32, {2, 3}}, {"layers.0.down", dtype::f32, {3}}}};
    fill(table.begin(session_of(1, true), layer, soon()), layer, 1);
    table.prepare(soon());
    table.commit(1);
    for (const weight_version version : {2U, 3U, 4U}) {
        update(table, version);
        CHECK(holds(table.acquire(), version));
    }
}

TEST_CASE("from the third round on a session allocates nothing, and a snapshot never does" *
          doctest::skip(!weightwire_tests::counts_allocations)) {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        const weightwire_tests::allocation_watch whole;
        parameter_table table{small_model(), in_mode(mode)};
        update(table, 1);
        update(table, 2);
        CHECK(whole.count() > 0);
        const auto& parameters = table.parameters();
        const weightwire_tests::allocation_watch watch;
        static_cast<void>(table.begin(session_of(3), parameters, soon()));
        table.group_complete(0);
        table.prepare(soon());
        table.commit(3);
        {
            const auto held = table.acquire();
            static_cast<void>(held.tensor(1));
            static_cast<void>(held.find("scale"));
        }
        static_cast<void>(table.begin(session_of(4), parameters, soon()));
        table.rollback();
        CHECK(watch.count() == 0);
    }
}

TEST_CASE("initialize loads version 0 strictly") {
    const manifest model{{{"a", dtype::u8, {3}}, {"b", dtype::u8, {2}}, {"tied", dtype::u8, {3}}}};
    parameter_table_options options{.frozen = {"b"}, .aliases = {{"tied", "a"}}};
    const auto a = sink_test::pattern(1, "a", 3);
    const auto b = sink_test::pattern(1, "b", 2);
    const auto other = sink_test::pattern(2, "a", 3);
    const auto tensor = [](std::string_view name, const std::vector<std::byte>& bytes) {
        return named_tensor{name,
                            {bytes.data(), dtype::u8, {static_cast<std::int64_t>(bytes.size())}}};
    };
    const auto load = [&](parameter_table& table, std::vector<named_tensor> tensors) {
        table.initialize(tensors);
    };

    parameter_table table{model, options};
    load(table, {tensor("tied", other), tensor("b", b), tensor("a", a)});
    CHECK(table.version() == 0);
    CHECK(bytes_of(*table.acquire().find("tied")) == a);
    CHECK(bytes_of(*table.acquire().find("b")) == b);
    load(table, {tensor("a", a), tensor("tied", other), tensor("b", b)});
    CHECK(bytes_of(*table.acquire().find("a")) == a);

    parameter_table fresh{model, options};
    const auto refused = [&](std::vector<named_tensor> tensors, std::string_view name) {
        try {
            load(fresh, std::move(tensors));
            FAIL("initialize returned");
        } catch (const coverage_error& problem) {
            CHECK(problem.context().tensor == name);
            CHECK(problem.context().phase == phase::init);
        }
    };
    refused({tensor("x", a)}, "x");
    refused({tensor("a", b)}, "a");
    CHECK_FALSE(fresh.dirty());
    refused({tensor("a", a)}, "b");
    CHECK(fresh.dirty());
    refused({tensor("a", a), tensor("a", a)}, "a");
    CHECK_THROWS_AS(static_cast<void>(fresh.acquire()), dirty_error);
    load(fresh, {tensor("tied", a), tensor("b", b)});
    CHECK_FALSE(fresh.dirty());
    CHECK(bytes_of(*fresh.acquire().find("a")) == a);

    const named_tensor elsewhere{"a", {a.data(), dtype::u8, {3}, device{memory_kind::cuda, 0}}};
    CHECK_THROWS_AS(load(fresh, {elsewhere}), unsupported_error);

    static_cast<void>(table.begin(session_of(1), model, soon()));
    CHECK_THROWS_AS(load(table, {}), usage_error);
    table.prepare(soon());
    table.commit(1);
    CHECK_THROWS_AS(load(table, {}), usage_error);
}

TEST_CASE("memory that the system does not have is a resource error with the size") {
    try {
        parameter_table table{manifest{{{"huge", dtype::u8, {std::int64_t{1} << 50}}}}};
        FAIL("the table was made");
    } catch (const resource_error& problem) {
        CHECK(problem.context().operation == "mmap");
        CHECK(problem.context().bytes_total == std::uint64_t{1} << 50U);
        CHECK(problem.context().native_code != 0);
    }
}
