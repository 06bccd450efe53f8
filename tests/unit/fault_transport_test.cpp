// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/testing/conformance/transport.hpp>
#include <weightwire/testing/fault_transport.hpp>
#include <weightwire/testing/loopback_transport.hpp>

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using testing::fault_kind;
using testing::fault_point;
using faulty = testing::fault<testing::loopback>;
using rig = testing::transport_rig<faulty>;

static_assert(explain_transport<faulty>());
static_assert(explain_transport<testing::fault<ipc::backend>>());
static_assert(HasDigests<testing::fault_sender<testing::loopback>> &&
              HasDropPeer<testing::fault_sender<testing::loopback>>);

deadline soon() { return deadline::after(20s); }

/// In the random manifest: 0 is a scalar, 1 has no bytes, 2 is large, 3 is strided where it lands,
/// 4 is not wanted.
constexpr auto scalar = "layers.0.w0";
constexpr auto without_bytes = "layers.0.w1";
constexpr auto large = "layers.0.w2";
constexpr auto strided = "layers.0.w3";

rig make_rig(std::vector<fault_point> faults, std::size_t parts = 2, bool vllm = false) {
    return rig{testing::with_faults(testing::loopback_init_info{.parts = parts}, std::move(faults)),
               testing::random_manifest(1, vllm),
               {1, 2},
               tensor_lifetime::stable,
               vllm};
}

/// What one round ends with: nothing, what differs, or the error's message.
template <class Rig>
std::string outcome_of(Rig& halves, std::uint64_t round, deadline until = soon()) {
    try {
        return halves.round(round, until);
    } catch (const error& caught) {
        return caught.what();
    }
}

std::string outcome(std::vector<fault_point> faults, deadline until = soon()) {
    auto halves = make_rig(std::move(faults));
    halves.open(soon());
    return outcome_of(halves, 1, until);
}

bool has(const std::string& text, const std::string& part) {
    const bool found = text.find(part) != std::string::npos;
    if (!found) {
        MESSAGE("'" << part << "' is not in: " << text);
    }
    return found;
}

TEST_CASE("without faults it is the inner transport") {
    const auto report = testing::check_transport<faulty>(
        testing::with_faults(testing::loopback_init_info{.parts = 3}, {}));
    CHECK_MESSAGE(report.passed(), report.text());
    const testing::loopback_init_info inner{.block_rank = 3};
    CHECK(testing::with_faults(inner, {}).init_message() == inner.init_message());
    CHECK(testing::with_faults(inner, {{.kind = fault_kind::throw_in_send}}).init_message() ==
          inner.init_message());
    CHECK(backend_traits<faulty>::wire_name == "loopback");
}

TEST_CASE("a flipped byte arrives flipped, under the digest of the true bytes") {
    for (const auto* const tensor : {scalar, large, strided}) {
        auto halves = make_rig(
            {{.kind = fault_kind::flip_sent_byte, .tensor = tensor, .byte = 1, .round = 2}});
        halves.open(soon());
        CHECK(halves.round(1, soon()).empty());
        // The rig compares bytes first: they differ. Digests are asked for below.
        CHECK(has(outcome_of(halves, 2), std::string{tensor} + " "));
        const auto digests = halves.sender().digests();
        REQUIRE(digests.size() == halves.parameters().size());
        for (std::size_t i = 0; i < digests.size(); ++i) {
            CHECK(digests[i] == digest(halves.bytes()[i]));
        }
        CHECK(halves.round(3, soon()).empty());
    }
    CHECK(has(outcome({{.kind = fault_kind::flip_received_byte, .tensor = large, .byte = 1 << 20}}),
              large));
    CHECK(has(outcome({{.kind = fault_kind::flip_received_byte, .tensor = strided, .rank = 3}}),
              "worker rank 3: layers.0.w3"));
}

TEST_CASE("a flipped byte also passes through a transport that reads in place") {
    for (const bool packed : {false, true}) {
        const ipc::trainer_init_info inner{
            .packed = packed, .packed_buffer_size_bytes = 4 << 20, .verify = true};
        testing::transport_rig<testing::fault<ipc::backend>> halves{
            testing::with_faults(
                inner, {{.kind = fault_kind::flip_sent_byte, .tensor = large, .byte = 77}}),
            testing::random_manifest(2),
            {2},
            tensor_lifetime::stable};
        halves.open(soon());
        CHECK(has(outcome_of(halves, 1), large));
        const auto digests = halves.sender().digests();
        REQUIRE(digests.size() == halves.parameters().size());
        CHECK(digests[2] == digest(halves.bytes()[2]));
    }
}

TEST_CASE("faults that throw do so in their part and round alone") {
    auto halves = make_rig({{.kind = fault_kind::throw_in_send, .part = 1, .round = 2}});
    halves.open(soon());
    CHECK(halves.round(1, soon()).empty());
    CHECK(has(outcome_of(halves, 2), "resource [phase update] [backend loopback]: throw_in_send"));
    CHECK(has(outcome({{.kind = fault_kind::throw_in_receive, .part = 1, .rank = 2}}),
              "throw_in_receive"));
    auto never = make_rig({{.kind = fault_kind::throw_in_open, .rank = 3}});
    CHECK_THROWS_WITH_AS(never.open(soon()), doctest::Contains("throw_in_open"), resource_error);
}

TEST_CASE("faults that stall last until the deadline or the stop") {
    for (const auto kind : {fault_kind::stall_in_send, fault_kind::stall_in_receive}) {
        CHECK(has(outcome({{.kind = kind}}, deadline::after(100ms)), "timeout"));
        // Another rank fails meanwhile, which stops the one that stalls: its error is the cause.
        CHECK(has(
            outcome({{.kind = kind, .rank = 2}, {.kind = fault_kind::throw_in_receive, .rank = 1}}),
            "throw_in_receive"));
    }
}

TEST_CASE("pieces that are dropped or doubled break coverage, and the tensor is named") {
    for (const auto* const tensor : {scalar, large, strided}) {
        const auto dropped = outcome({{.kind = fault_kind::drop_piece, .tensor = tensor}});
        CHECK(has(dropped, "coverage"));
        CHECK(has(dropped, std::string{"[tensor "} + tensor));
        const auto doubled = outcome({{.kind = fault_kind::duplicate_piece, .tensor = tensor}});
        CHECK(has(doubled, "bytes are written twice"));
        CHECK(has(doubled, std::string{"[tensor "} + tensor));
    }
    // The last piece of several.
    CHECK(has(outcome({{.kind = fault_kind::drop_piece, .tensor = large, .byte = 1 << 20}}),
              "not whole"));
    // A tensor without bytes is whole whatever arrives.
    CHECK(outcome({{.kind = fault_kind::drop_piece, .tensor = without_bytes}}).empty());
}

TEST_CASE("faults of workers also travel to those that are spoken to as vLLM's") {
    auto halves =
        make_rig({{.kind = fault_kind::flip_received_byte, .tensor = large, .rank = 2}}, 2, true);
    halves.open(soon());
    CHECK(has(outcome_of(halves, 1), "worker rank 2: layers.0.w2"));
}

TEST_CASE("a fault kills its process, in its part") {
    for (const auto kind : {fault_kind::kill_in_send, fault_kind::kill_in_receive}) {
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            (void)outcome({{.kind = kind, .part = 1}});
            ::_exit(0);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == testing::killed_by_fault);
    }
}

TEST_CASE("a plan that could never fire is refused") {
    const auto opened = [](fault_point point) { make_rig({std::move(point)}).open(soon()); };
    CHECK_THROWS_WITH_AS(opened({.kind = fault_kind::flip_sent_byte, .tensor = "no such"}),
                         doctest::Contains("[tensor no such]"), usage_error);
    CHECK_THROWS_AS(opened({.kind = fault_kind::drop_piece, .tensor = "no such"}), usage_error);
    CHECK_THROWS_AS(opened({.kind = fault_kind::flip_sent_byte, .tensor = scalar, .byte = 2}),
                    usage_error);
    CHECK_THROWS_AS(opened({.kind = fault_kind::flip_received_byte, .tensor = without_bytes}),
                    usage_error);
    CHECK_THROWS_WITH_AS(opened({.kind = fault_kind::kill_in_send, .part = 2}),
                         doctest::Contains("in part 2 of a round of 2"), usage_error);
}

TEST_CASE("a plan survives the wire, wherever in the object it is") {
    const std::vector<fault_point> plan{
        {.kind = fault_kind::drop_piece, .tensor = "a\"b,}", .byte = 7, .round = 3, .rank = 2},
        {.kind = fault_kind::throw_in_receive, .part = 4}};
    auto all = plan;
    all.push_back({.kind = fault_kind::kill_in_send});  // the trainer's own does not travel
    const auto encoded = testing::encode_worker_faults(all);
    for (const std::string inner : {R"({})", R"({"a":1})", R"({ "a" : {"b":[1,2]} , "c":"}" })"}) {
        auto object = testing::add_member(inner, testing::faults_member, encoded);
        CHECK(testing::take_faults(object) == plan);
        CHECK(wire::json_document{object, "", phase::none}.root().kind() ==
              wire::json_kind::object);
        CHECK(testing::take_faults(object).empty());
    }
    std::string first = "{ \"weightwire_faults\" : " + encoded + " , \"a\":1}";
    CHECK(testing::take_faults(first) == plan);
    CHECK(first == "{  \"a\":1}");
    for (
        const std::string bad :
        {R"({"weightwire_faults":[{"kind":"no such","tensor":"","byte":0,"part":0,"round":0,"rank":-1}]})",
         R"({"weightwire_faults":[{"kind":"kill_in_send","tensor":"","byte":0,"part":0,"round":0,"rank":-1}]})",
         R"({"weightwire_faults":[{"kind":"drop_piece"}]})", R"({"weightwire_faults":{}})", R"([])",
         R"({"weightwire_faults":[])"}) {
        auto object = bad;
        CHECK_THROWS_AS((void)testing::take_faults(object), protocol_error);
    }
}

TEST_CASE("the transport suite finds what is wrong with a transport") {
    const testing::transport_suite_options options{.manifests = 1, .rounds = 2, .budget = 2000ms};
    const auto run = [&](fault_point point) {
        return testing::check_transport<faulty>(
            testing::with_faults(testing::loopback_init_info{}, {std::move(point)}), options);
    };
    constexpr auto moves = "rounds move every byte, from tensors that live until the next one";
    constexpr auto comes_back = "a dropped peer does not hold up the others, and may come back";
    const auto flipped = run({.kind = fault_kind::flip_received_byte, .tensor = large});
    CHECK_FALSE(flipped.find(moves)->passed);
    CHECK_FALSE(flipped.find("rounds move every byte, spoken as to vLLM")->passed);
    CHECK(flipped.find("the sender keeps its deadline when no worker comes")->passed);
    CHECK_FALSE(run({.kind = fault_kind::drop_piece, .tensor = scalar}).find(moves)->passed);
    CHECK_FALSE(run({.kind = fault_kind::duplicate_piece, .tensor = large}).find(moves)->passed);
    CHECK_FALSE(run({.kind = fault_kind::throw_in_receive, .round = 2}).find(moves)->passed);
    CHECK_FALSE(run({.kind = fault_kind::throw_in_send, .round = 2}).find(comes_back)->passed);
    const auto never = run({.kind = fault_kind::throw_in_receive});
    CHECK_FALSE(never.find("a receiver keeps its deadline when nothing is sent")->passed);
    CHECK_FALSE(never.find("a receiver obeys its stop when nothing is sent")->passed);
}

}  // namespace
