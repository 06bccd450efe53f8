// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <cstddef>
#include <map>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <vector>

#include <weightwire/sinks/loading_sink.hpp>

#include "../support/allocations.hpp"
#include "sink_test_support.hpp"

using namespace weightwire;
using sink_test::bytes_of;
using sink_test::soon;

namespace {

using tensors = std::map<std::string, std::vector<std::byte>, std::less<>>;

/// All that a user's model must have.
struct plain_model {
    tensors live;
    std::vector<std::vector<std::string>> calls;
    std::string fails_at;

    void load(std::span<const named_tensor> group) {
        auto& names = calls.emplace_back();
        for (const auto& [name, tensor, stream] : group) {
            names.emplace_back(name);
            if (name == fails_at) {
                throw std::runtime_error{"the model refuses " + fails_at};
            }
            live[std::string{name}] = bytes_of(tensor);
        }
    }
};

/// One that stages, and knows its parameters.
struct staging_model {
    manifest list;
    tensors live{};
    tensors staged{};
    weight_version version = 0;
    bool prepared = false;

    const manifest& parameters() const { return list; }
    void load(std::span<const named_tensor> group) {
        for (const auto& each : group) {
            staged[std::string{each.name}] = bytes_of(each.tensor);
        }
    }
    void begin(const session_info&) { staged = live; }
    void prepare(deadline) { prepared = true; }
    void commit(weight_version next) noexcept {
        live.swap(staged);
        version = next;
    }
    void rollback() noexcept { staged.clear(); }
};

manifest layered() {
    return manifest{{{"embed", dtype::u8, {100}},
                     {"layers.0.up", dtype::f32, {2, 3}},
                     {"layers.0.down", dtype::f32, {3}},
                     {"layers.0.empty", dtype::f32, {0}},
                     {"layers.1.up", dtype::f32, {2, 3}},
                     {"layers.1.down", dtype::f32, {3}},
                     {"layers.2.empty", dtype::f32, {0}},
                     {"head", dtype::f64, {}}}};
}

template <class Sink>
void place(Sink& sink, const manifest& parameters, std::size_t i, std::uint64_t seed) {
    const auto bytes = sink_test::pattern(seed, parameters[i].name, parameters[i].byte_size());
    copy_tensor(sink.open_destination(i, soon()),
                {bytes.data(), parameters[i].dtype, parameters[i].shape});
    sink.placed(i, soon());
}

template <class Sink>
void place_all(Sink& sink, const manifest& parameters, std::uint64_t seed) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].byte_size() != 0) {
            place(sink, parameters, i, seed);
        }
    }
}

}  // namespace

static_assert(WeightSink<loading_sink<plain_model>>);
static_assert(HasBouncedDestinations<loading_sink<plain_model>>);
static_assert(HasCommitMode<loading_sink<plain_model>>);
static_assert(!HasSnapshots<loading_sink<plain_model>>);
static_assert(explain_loading_model<plain_model>());

TEST_CASE("a model gets complete layers, each in one load") {
    plain_model model;
    loading_sink sink{model, {.buffer_bytes = 256}};
    const auto parameters = layered();
    CHECK(sink.mode() == commit_mode::in_place);
    for (const weight_version version : {1U, 2U, 3U}) {
        model.calls.clear();
        const auto destinations = sink.begin({.version = version}, parameters, soon());
        REQUIRE(destinations.size() == 8);
        CHECK(destinations[1].where.data() == nullptr);
        CHECK(destinations[1].where.extents() == shape{2, 3});
        CHECK_FALSE(sink.dirty());
        place_all(sink, parameters, version);
        sink.group_complete(0);
        CHECK(sink.dirty());
        sink.prepare(soon());
        sink.commit(version);
        CHECK_FALSE(sink.dirty());
        CHECK(sink.version() == version);
        const std::vector<std::vector<std::string>> expected{
            {"embed"},
            {"layers.0.up", "layers.0.down", "layers.0.empty"},
            {"layers.1.up", "layers.1.down"},
            {"head"},
            {"layers.2.empty"}};
        CHECK(model.calls == expected);
        for (const auto& parameter : parameters.parameters()) {
            CHECK(model.live.at(parameter.name) ==
                  sink_test::pattern(version, parameter.name, parameter.byte_size()));
        }
    }
}

TEST_CASE("a layer that does not fit the buffer is refused with the size that it needs") {
    plain_model model;
    loading_sink sink{model, {.buffer_bytes = 127}};
    try {
        static_cast<void>(sink.begin({.version = 1}, layered(), soon()));
        FAIL("begin returned");
    } catch (const resource_error& problem) {
        CHECK(problem.context().tensor == "embed");
        CHECK(problem.context().bytes_total == 128);
        CHECK(problem.text() ==
              "a layer needs a bounce buffer of 128 bytes, this one has 127; raise buffer_bytes");
    }
    CHECK_THROWS_AS(sink.prepare(soon()), session_error);
}

TEST_CASE("without a transaction the model is dirty from the first load until a full commit") {
    plain_model model;
    loading_sink sink{model, {.buffer_bytes = 4096}};
    const auto parameters = layered();
    static_cast<void>(sink.begin({.version = 1}, parameters, soon()));
    static_cast<void>(sink.open_destination(0, soon()));
    sink.rollback();
    CHECK_FALSE(sink.dirty());  // nothing was loaded

    static_cast<void>(sink.begin({.version = 2}, parameters, soon()));
    place(sink, parameters, 0, 2);
    sink.rollback();
    CHECK(sink.dirty());
    CHECK(sink.version() == 0);

    const manifest head{{{"head", dtype::f64, {}}}};
    static_cast<void>(sink.begin({.version = 3, .partial = true}, head, soon()));
    place(sink, head, 0, 3);
    sink.prepare(soon());
    sink.commit(3);
    CHECK(sink.dirty());
    CHECK(sink.version() == 0);

    static_cast<void>(sink.begin({.version = 4}, parameters, soon()));
    place_all(sink, parameters, 4);
    sink.prepare(soon());
    sink.commit(4);
    CHECK_FALSE(sink.dirty());
    CHECK(sink.version() == 4);
}

TEST_CASE("a load that throws ends the session and leaves the sink dirty") {
    plain_model model;
    model.fails_at = "layers.1.down";
    loading_sink sink{model, {.buffer_bytes = 4096}};
    const auto parameters = layered();
    static_cast<void>(sink.begin({.version = 1}, parameters, soon()));
    CHECK_THROWS_WITH_AS(place_all(sink, parameters, 1), "the model refuses layers.1.down",
                         std::runtime_error);
    sink.rollback();
    CHECK(sink.dirty());
    sink.commit(1);
    CHECK(sink.version() == 0);
}

TEST_CASE("a model that stages is never dirty and keeps the old version") {
    staging_model model{.list = layered()};
    loading_sink sink{model, {.buffer_bytes = 4096}};
    const auto parameters = layered();
    CHECK(sink.mode() == commit_mode::flip);
    static_cast<void>(sink.begin({.version = 1}, parameters, soon()));
    place_all(sink, parameters, 1);
    sink.prepare(soon());
    CHECK(model.prepared);
    sink.commit(1);
    CHECK(model.version == 1);
    static_cast<void>(sink.begin({.version = 2}, parameters, soon()));
    place_all(sink, parameters, 2);
    CHECK_FALSE(sink.dirty());
    sink.rollback();
    CHECK_FALSE(sink.dirty());
    CHECK(model.live.at("head") == sink_test::pattern(1, "head", 8));
}

namespace {

/// A model whose own preparation waits, and ends at the stop.
struct waiting_model {
    bool stopped = false;
    void load(std::span<const named_tensor>) {}
    void prepare(deadline, const std::stop_token& stop) {
        stopped = stop.stop_requested();
        if (stopped) {
            throw cancelled_error{"the model need not be ready any more"};
        }
    }
};

}  // namespace

TEST_CASE("a model that waits to be ready is told to stop") {
    waiting_model model;
    loading_sink sink{model, {.buffer_bytes = 1U << 10U}};
    const manifest nothing{{{"layers.0.none", dtype::f32, {0}}}};
    std::stop_source stop;
    static_cast<void>(sink.begin({.version = 1}, nothing, soon()));
    sink.prepare(soon(), stop.get_token());
    stop.request_stop();
    CHECK_THROWS_AS(sink.prepare(soon(), stop.get_token()), cancelled_error);
    CHECK(model.stopped);
    sink.rollback();
    CHECK(sink.version() == 0);
}

TEST_CASE("a model that knows its parameters is covered strictly") {
    staging_model model{.list = layered()};
    loading_sink sink{model,
                      {.buffer_bytes = 4096, .frozen = {"embed"}, .aliases = {{"tied", "head"}}}};
    const manifest wrong{{{"layers.0.up", dtype::f32, {2, 3}}}};
    try {
        static_cast<void>(sink.begin({.version = 1}, wrong, soon()));
        FAIL("begin returned");
    } catch (const coverage_error& problem) {
        CHECK(problem.context().tensor == "layers.0.down");
    }
    const auto destinations = sink.begin({.version = 1}, layered(), soon());
    CHECK(destinations[0].kind == destination::kind_type::frozen);
    CHECK_THROWS_AS(static_cast<void>(sink.open_destination(0, soon())), usage_error);
    sink.rollback();
    plain_model plain;
    CHECK_THROWS_AS((loading_sink{plain, {.frozen = {"embed"}}}), usage_error);
}

TEST_CASE("the buffer holds one layer: another order is refused, and so is a missing tensor") {
    plain_model model;
    loading_sink sink{model, {.buffer_bytes = 4096}};
    const auto parameters = layered();
    static_cast<void>(sink.begin({.version = 1}, parameters, soon()));
    CHECK_THROWS_AS(static_cast<void>(sink.begin({.version = 2}, parameters, soon())),
                    session_error);
    place(sink, parameters, 0, 1);
    static_cast<void>(sink.open_destination(1, soon()));
    try {
        static_cast<void>(sink.open_destination(4, soon()));
        FAIL("a second layer was opened");
    } catch (const usage_error& problem) {
        CHECK(problem.context().tensor == "layers.1.up");
    }
    sink.rollback();

    static_cast<void>(sink.begin({.version = 1}, parameters, soon()));
    place(sink, parameters, 0, 1);
    CHECK_THROWS_AS(sink.placed(0, soon()), usage_error);
    CHECK_THROWS_AS(static_cast<void>(sink.open_destination(0, soon())), usage_error);
    CHECK_THROWS_AS(static_cast<void>(sink.open_destination(8, soon())), usage_error);
    try {
        sink.prepare(soon());
        FAIL("prepare returned");
    } catch (const coverage_error& problem) {
        CHECK(problem.context().tensor == "layers.0.up");
        CHECK(problem.context().bytes_total == 24);
    }
    sink.rollback();

    const manifest scattered{{{"layers.0.a", dtype::u8, {1}},
                              {"layers.1.a", dtype::u8, {1}},
                              {"layers.0.b", dtype::u8, {1}}}};
    try {
        static_cast<void>(sink.begin({.version = 1}, scattered, soon()));
        FAIL("begin returned");
    } catch (const data_error& problem) {
        CHECK(problem.context().tensor == "layers.0.b");
    }
}

TEST_CASE("a loading sink allocates nothing of its own from the third round on" *
          doctest::skip(!weightwire_tests::counts_allocations)) {
    struct quiet_model {
        std::size_t seen = 0;
        void load(std::span<const named_tensor> group) { seen += group.size(); }
    };
    quiet_model model;
    loading_sink sink{model, {.buffer_bytes = 4096}};
    const auto parameters = layered();
    std::uint64_t spent = 1;
    for (const weight_version version : {1U, 2U, 3U}) {
        const weightwire_tests::allocation_watch watch;
        static_cast<void>(sink.begin({.version = version}, parameters, soon()));
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            static_cast<void>(sink.open_destination(i, soon()));
            sink.placed(i, soon());
        }
        sink.prepare(soon());
        sink.commit(version);
        spent = watch.count();
    }
    CHECK(spent == 0);
    CHECK(model.seen == 3 * parameters.size());
}
