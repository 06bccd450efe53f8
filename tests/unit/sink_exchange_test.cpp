// SPDX-License-Identifier: Apache-2.0
// Commits that copy: what they have done can be undone until readers are let in.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/sinks/exchange_pace.hpp>
#include <weightwire/sinks/loading_sink.hpp>
#include <weightwire/sinks/parameter_table.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

#include "../support/touch_trap.hpp"
#include "sink_test_support.hpp"

using namespace weightwire;
using namespace std::chrono_literals;
using sink_test::bytes_of;
using sink_test::holds;
using sink_test::pattern;
using sink_test::prepare;
using sink_test::soon;
using sink_test::update;
using tests::touch_trap;

static_assert(HasExchange<parameter_table>);

namespace {

using strides = mutable_tensor_view::strides_type;

/// Larger than several intervals of the clock, and a part that is strided.
constexpr std::int64_t rows = 512;
constexpr std::int64_t columns = 1024;
constexpr std::size_t interval = std::size_t{256} << 10U;

manifest model() {
    return manifest{{{"layers.0.w", dtype::f32, {rows, columns}},
                     {"layers.1.w", dtype::f32, {rows, columns}},
                     {"nothing", dtype::f32, {0}}}};
}

/// The user's memory: one matrix after the other, or their rows interleaved.
struct user_model {
    explicit user_model(bool strided) : memory(2 * rows * columns * 4) {
        const auto row = strided ? 2 * columns : columns;
        const auto second = (strided ? columns : rows * columns) * 4;
        for (int i = 0; i < 2; ++i) {
            parameters.push_back(
                {"layers." + std::to_string(i) + ".w",
                 {memory.data() + i * second, dtype::f32, {rows, columns}, strides{row, 1}}});
        }
        parameters.push_back({"nothing", {memory.data(), dtype::f32, {0}}});
    }
    std::vector<std::byte> memory;
    std::vector<user_parameter> parameters;
};

// What a trap does; it can be given nothing.
std::stop_source* to_stop = nullptr;
deadline* to_outlast = nullptr;

void request_stop() { to_stop->request_stop(); }
void sleep_past_deadline() {
    while (!to_outlast->expired()) {
        std::this_thread::sleep_for(1ms);
    }
}

}  // namespace

TEST_CASE("an exchange that ended after any byte is undone by one that ends there") {
    const auto first = pattern(1, "x", 24);
    const auto second = pattern(2, "x", 24);
    for (const bool strided : {false, true}) {
        for (std::uint64_t n = 0; n <= 24; ++n) {
            auto a = first;
            auto b = second;
            const mutable_tensor_view left{
                a.data(), dtype::i16, {3, 4}, strided ? strides{1, 3} : strides{4, 1}};
            const mutable_tensor_view right{b.data(), dtype::i16, {3, 4}};
            auto some = detail::first_bytes{n};
            CHECK(exchange_tensors(left, right, some) == (n == 24));
            if (n == 24) {
                CHECK(bytes_of(left) == second);
                CHECK((a != second) == strided);
            } else if (n != 0) {
                CHECK(a != first);
            }
            some = detail::first_bytes{n};
            exchange_tensors(left, right, some);
            CHECK(a == first);
            CHECK(b == second);
        }
    }
}

TEST_CASE("a copy_in commit that is late anywhere in its exchange leaves the old version") {
    for (const bool strided : {false, true}) {
        CAPTURE(strided);
        user_model user{strided};
        auto table = parameter_table::over(user.parameters, {.mode = commit_mode::copy_in});
        update(table, 1);
        weight_version version = 1;
        for (std::size_t at = 0; at < user.memory.size(); at += interval) {
            CAPTURE(at);
            const auto some = std::span<const std::byte>{user.memory}.subspan(at, interval);
            prepare(table, version + 1);
            std::stop_source stop;
            to_stop = &stop;
            touch_trap::set(some, &request_stop);
            CHECK_THROWS_AS(table.exchange(soon(), stop.get_token()), cancelled_error);
            CHECK(table.version() == version);
            CHECK_THROWS_AS(static_cast<void>(table.acquire(deadline::after(1ms))), timeout_error);

            auto until = deadline::after(300ms);
            to_outlast = &until;
            touch_trap::set(some, &sleep_past_deadline);
            CHECK_THROWS_AS(table.exchange(until), timeout_error);
            if (at % (2 * interval) == 0) {
                table.rollback();
                CHECK(holds(table, version));
            } else {  // it has left no trace: the session can still commit
                table.exchange(soon());
                table.commit(++version);
                CHECK(holds(table, version));
            }
        }
        update(table, version + 1);
        CHECK(holds(table, version + 1));
    }
}

TEST_CASE("an exchange that was late after its last byte is undone") {
    parameter_table table{model(), {.mode = commit_mode::copy_in}};
    update(table, 1);
    const auto last = [&] {
        const auto held = table.acquire();
        return held.tensor(1).bytes().last(3 * 4096);
    }();
    prepare(table, 2);
    auto until = deadline::after(300ms);
    to_outlast = &until;
    touch_trap::set(last, &sleep_past_deadline);
    CHECK_THROWS_AS(table.exchange(until), timeout_error);
    table.rollback();
    CHECK(holds(table, 1));
}

TEST_CASE("after an exchange a commit only publishes, and a rollback restores") {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in}) {
        CAPTURE(to_string(mode));
        parameter_table table{model(), {.mode = mode}};
        CHECK_THROWS_AS(table.exchange(soon()), session_error);
        prepare(table, 1);
        table.exchange(soon());
        table.exchange(soon());  // once is enough
        CHECK(table.version() == 0);
        CHECK(table.commit_estimate() == 0ns);
        table.commit(1);
        CHECK(holds(table, 1));
        prepare(table, 2);
        table.exchange(soon());
        table.rollback();
        CHECK(holds(table, 1));
        CHECK_THROWS_AS(table.exchange(soon()), session_error);
        prepare(table, 3);
        table.commit(3);  // whoever has no time limit need not exchange
        CHECK(holds(table, 3));
    }
}

namespace {

/// A model that stages, and whose commit takes time.
struct exchanging_model {
    int exchanged = 0;
    void load(std::span<const named_tensor>) {}
    void begin(const session_info&) {}
    void commit(weight_version) noexcept {}
    void rollback() noexcept {}
    void exchange(deadline until, const std::stop_token&) {
        if (until.expired()) {
            throw timeout_error{"too late"};
        }
        ++exchanged;
    }
    [[nodiscard]] std::chrono::nanoseconds commit_estimate() const { return 5ms; }
};
struct loading_model {
    void load(std::span<const named_tensor>) {}
};
static_assert(HasExchange<loading_sink<exchanging_model>>);
static_assert(HasCommitEstimate<loading_sink<exchanging_model>>);
static_assert(!HasExchange<loading_sink<loading_model>>);
static_assert(!HasCommitEstimate<loading_sink<loading_model>>);

}  // namespace

TEST_CASE("a loading sink exchanges where its model does") {
    exchanging_model target;
    loading_sink sink{target, {.buffer_bytes = 1U << 10U}};
    const manifest nothing{{{"layers.0.none", dtype::f32, {0}}}};
    CHECK_THROWS_AS(sink.exchange(soon()), session_error);
    static_cast<void>(sink.begin({.version = 1}, nothing, soon()));
    sink.prepare(soon());
    CHECK(sink.commit_estimate() == 5ms);
    CHECK_THROWS_AS(sink.exchange(deadline::after(-1s)), timeout_error);
    sink.exchange(soon());
    CHECK(target.exchanged == 1);
    sink.commit(1);
    CHECK(sink.version() == 1);
}
