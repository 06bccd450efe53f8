// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/testing/conformance/transport.hpp>

#include "../support/allocations.hpp"
#include "../support/forked.hpp"
#include "../support/ipc_halves.hpp"

namespace {

namespace ipc = weightwire::ipc;
namespace shm = weightwire::shm;
using tests::briefly;
using tests::in_time;
using tests::ipc_trainer_half;
using tests::travel;
using tests::worker_half;

constexpr std::array all_ways{travel::in_place, travel::window, travel::packed};

bool has(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

void conforms(const ipc::trainer_init_info& info) {
    const auto report = weightwire::testing::check_transport<ipc::backend>(info);
    INFO(report.text());
    CHECK(report.passed());
}

/// Serves rounds as worker `rank` until it is killed: for each number it takes, a round; answers
/// with the name of the first tensor that differs, cut to 63 characters.
using verdict = std::array<char, 64>;
void serve(tests::channel& trainer, const weightwire::manifest& parameters, int rank,
           const std::string& wire, const std::string& transport) {
    worker_half worker{parameters, rank};
    worker.open(wire, transport);
    trainer.put('o');
    for (;;) {
        const auto round = trainer.take<std::uint64_t>();
        verdict said{};
        try {
            worker.receive(round);
            const auto wrong = worker.landing.differs(round);
            wrong.copy(said.data(), 63);
        } catch (const weightwire::error& failed) {
            std::string{failed.kind()}.copy(said.data(), 63);
        }
        trainer.put(said);
    }
}

std::string said_by(tests::forked& worker) {
    return std::string{worker.to().take<verdict>().data()};
}

}  // namespace

TEST_CASE("ipc is a transport: per tensor through a window") {
    conforms({});
    conforms({.staging_bytes = 4096});
    conforms({.staging_bytes = 70'001, .verify = true});
}

TEST_CASE("ipc is a transport: packed") {
    conforms({.packed = true, .packed_buffer_size_bytes = 2 << 20U});
    conforms({.packed = true, .packed_buffer_size_bytes = 1'100'003, .packed_num_buffers = 1});
    conforms({.packed = true,
              .packed_buffer_size_bytes = 1'100'003,
              .packed_num_buffers = 3,
              .verify = true});
}

TEST_CASE("a ring that is exactly full, and gaps that hold nothing, hold nobody up") {
    using weightwire::dtype;
    // Tensors that end just before a boundary, tiny ones before large ones, and the reverse.
    const weightwire::manifest parameters{{{"almost", dtype::u8, {4090}},
                                           {"full", dtype::u8, {4096}},
                                           {"tiny", dtype::u8, {1}},
                                           {"large", dtype::u8, {700'000}},
                                           {"tiny again", dtype::u8, {3}},
                                           {"large again", dtype::u8, {699'999}},
                                           {"small", dtype::u8, {100}},
                                           {"last", dtype::u8, {700'000}}}};
    const std::vector<ipc::trainer_init_info> ways{
        {.staging_bytes = 4096},
        {.staging_bytes = 4097},
        {.packed = true, .packed_buffer_size_bytes = 700'000, .packed_num_buffers = 1},
        {.packed = true, .packed_buffer_size_bytes = 700'000, .packed_num_buffers = 2},
        {.packed = true, .packed_buffer_size_bytes = 700'001, .packed_num_buffers = 3}};
    for (const auto& info : ways) {
        CAPTURE(info.init_message());
        ipc_trainer_half trainer{parameters, travel::window, {1, 1}, info};
        worker_half one{parameters, 1};
        worker_half two{parameters, 2};
        one.open(trainer.wire_parameters(), trainer.inits[0].native);
        two.open(trainer.wire_parameters(), trainer.inits[1].native);
        for (std::uint64_t round = 1; round <= 3; ++round) {
            {
                const std::jthread first{[&] { one.receive(round); }};
                const std::jthread second{[&] { two.receive(round); }};
                trainer.send(round);
            }
            CHECK(one.landing.differs(round) == "");
            CHECK(two.landing.differs(round) == "");
        }
    }
}

TEST_CASE("random tensors pass through random rings") {
    std::mt19937_64 random{11};
    for (int i = 0; i < 30; ++i) {
        CAPTURE(i);
        std::vector<weightwire::param_meta> list;
        std::int64_t largest = 1;
        for (std::uint64_t k = 1 + random() % 20; k > 0; --k) {
            const auto bits = random() % 20;  // sizes of every order of magnitude
            const auto bytes = static_cast<std::int64_t>(random() % (std::uint64_t{1} << bits));
            largest = std::max(largest, bytes);
            list.push_back({"t" + std::to_string(k), weightwire::dtype::u8, {bytes}});
        }
        const weightwire::manifest parameters{std::move(list)};
        ipc::trainer_init_info info{.staging_bytes = 4096 + random() % 400'000};
        info.packed = random() % 2 == 0;
        info.packed_buffer_size_bytes = static_cast<std::uint64_t>(largest) + random() % 1000;
        info.packed_num_buffers = 1 + random() % 3;
        CAPTURE(info.init_message());
        ipc_trainer_half trainer{parameters, travel::window, {1}, info};
        worker_half worker{parameters, 1};
        worker.open(trainer.wire_parameters(), trainer.inits[0].native);
        for (std::uint64_t round = 1; round <= 3; ++round) {
            {
                const std::jthread receiving{[&] { worker.receive(round); }};
                trainer.send(round);
            }
            REQUIRE(worker.landing.differs(round) == "");
        }
    }
}

TEST_CASE("several worker processes read the same rounds at once, whatever the way") {
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        CAPTURE(static_cast<int>(how));
        ipc_trainer_half trainer{parameters, how, {1, 2}};
        const auto child = [&](int rank) {
            const auto peer = rank == 1 ? 0U : 1U;
            return [&, rank, peer](tests::channel& parent) {
                serve(parent, parameters, rank, trainer.wire_parameters(),
                      trainer.inits[peer].native);
            };
        };
        tests::forked one{child(1)};
        tests::forked two{child(2)};
        tests::forked three{child(3)};
        for (auto* each : {&one, &two, &three}) {
            REQUIRE(each->to().take<char>() == 'o');
        }
        for (std::uint64_t round = 1; round <= 5; ++round) {
            for (auto* each : {&one, &two, &three}) {
                each->to().put(round);
            }
            trainer.send(round);
            CHECK(said_by(one) == "");
            CHECK(said_by(two) == "");
            CHECK(said_by(three) == "");
        }
        trainer.sender.close(in_time());
    }
}

TEST_CASE("what was chosen is said before the first round, with the memory it costs") {
    const auto parameters = tests::awkward_model();
    const ipc_trainer_half shared{parameters, travel::in_place, {1}};
    CHECK(has(shared.sender.description(), "9 of 10 tensors are read in place"));
    CHECK(shared.sender.allocated_bytes() < 4096);
    const ipc_trainer_half window{parameters, travel::window, {1}};
    CHECK(has(window.sender.description(), "window of 131072 bytes"));
    CHECK(has(window.sender.description(), "because they do not lie in sealed shared memory"));
    CHECK(window.sender.allocated_bytes() >= 131072);
    const ipc_trainer_half packed{parameters, travel::packed, {1}};
    CHECK(has(packed.sender.description(), "packed, 3 chunks a round through 2 buffers of 810001"));
    CHECK(packed.sender.allocated_bytes() >= 2 * 810'001);
}

TEST_CASE("packed buffers are not larger than the weights") {
    const auto parameters = tests::awkward_model();
    const ipc_trainer_half trainer{parameters, travel::packed, {1}, {.packed = true}};
    CHECK(trainer.sender.allocated_bytes() < parameters.total_bytes() + 4096);
}

TEST_CASE("only what lies in shared memory is read in place; the rest of the source is staged") {
    const auto parameters = tests::awkward_model();
    tests::weights_in_memory shared{parameters};
    std::vector<std::byte> heap(parameters[0].byte_size());
    std::vector<weightwire::tensor_view> views{shared.views().begin(), shared.views().end()};
    views[0] = {heap.data(), parameters[0].dtype, parameters[0].shape};
    const std::vector<weightwire::peer_info> peers{{.name = "only", .native = true}};
    ipc::sender sender{{.staging_bytes = 8192}};
    const auto inits = sender.prepare({.parameters = parameters,
                                       .peers = peers,
                                       .world_size = 2,
                                       .lifetime = weightwire::tensor_lifetime::stable,
                                       .stable_tensors = views});
    CHECK(has(sender.description(), "8 of 10 tensors are read in place"));
    tests::forked child{[&](tests::channel& parent) {
        serve(parent, parameters, 1, ipc::trainer_init_info{.staging_bytes = 8192}.init_message(),
              inits[0].native);
    }};
    REQUIRE(child.to().take<char>() == 'o');
    for (std::uint64_t round = 1; round <= 3; ++round) {
        child.to().put(round);
        shared.fill(round);
        std::memcpy(heap.data(), shared.views()[0].data(), heap.size());
        std::memset(shared.tensors()[0].data(), 0, heap.size());
        tests::views_source source{parameters, views};
        weightwire::round_of<tests::views_source> walk{source, parameters};
        auto stream = walk.stream();
        sender.send(round, 0, stream, in_time(), {});
        CHECK(said_by(child) == "");
    }
}

TEST_CASE("a stable source that moves a tensor is an error that names it") {
    const auto parameters = tests::awkward_model();
    ipc_trainer_half trainer{parameters, travel::in_place, {1}};
    std::vector<weightwire::tensor_view> views{trainer.weights.views().begin(),
                                               trainer.weights.views().end()};
    std::vector<std::byte> elsewhere(views[3].byte_size());
    views[3] = {elsewhere.data(), parameters[3].dtype, parameters[3].shape};
    tests::views_source source{parameters, views};
    weightwire::round_of<tests::views_source> walk{source, parameters};
    auto stream = walk.stream();
    try {
        trainer.sender.send(1, 0, stream, in_time(), {});
        FAIL("it was sent");
    } catch (const weightwire::data_error& failed) {
        CHECK(failed.context().tensor == "odd");
    }
}

TEST_CASE("a packed tensor that does not fit names itself and the size it needs") {
    const auto parameters = tests::awkward_model();
    auto info = tests::info_of(travel::packed);
    info.packed_buffer_size_bytes = 801'999;
    try {
        const ipc_trainer_half trainer{parameters, travel::packed, {1}, info};
        FAIL("it was planned");
    } catch (const weightwire::data_error& failed) {
        CHECK(failed.context().tensor == "embed");
        CHECK(has(failed.what(), "802000"));
    }
}

TEST_CASE("sizes out of bounds are refused by the sender and by the receiver") {
    const auto parameters = tests::awkward_model();
    const std::vector<ipc::trainer_init_info> wrong{
        {.staging_bytes = 100},
        {.staging_bytes = UINT64_MAX},
        {.packed = true, .packed_buffer_size_bytes = 0},
        {.packed = true, .packed_buffer_size_bytes = UINT64_MAX},
        {.packed = true, .packed_num_buffers = 0},
        {.packed = true, .packed_num_buffers = 5000}};
    for (const auto& info : wrong) {
        CHECK_THROWS_AS((ipc_trainer_half{parameters, travel::window, {1}, info}),
                        weightwire::usage_error);
        CHECK_THROWS_AS(static_cast<void>(ipc::decode_wire_parameters(info.init_message())),
                        weightwire::protocol_error);
    }
}

TEST_CASE(
    "the wire parameters and the transport message survive their JSON, and nothing else does") {
    for (const auto how : all_ways) {
        const auto info = tests::info_of(how);
        CHECK(ipc::decode_wire_parameters(info.init_message()) == info.wire());
    }
    for (const std::string_view bad :
         {"", "[]", "{}", R"({"packed":1})", R"({"packed":false})",
          R"({"packed":false,"staging_bytes":-5})", R"({"packed":false,"staging_bytes":1e9})",
          R"({"packed":false,"staging_bytes":8192,"extra":1})",
          R"({"packed":true,"staging_bytes":8192})"}) {
        CHECK_THROWS_AS(static_cast<void>(ipc::decode_wire_parameters(bad)),
                        weightwire::protocol_error);
    }
    const shm::handle handle{.pid = 5, .fd = 6, .start_time = 7, .offset = 8, .length = 9};
    const ipc::transport_message message{.boot_id = "id",
                                         .nonce = UINT64_MAX,
                                         .control = handle,
                                         .ring = handle,
                                         .segments = {handle, handle},
                                         .places = {{}, {.segment = 1, .offset = 64}}};
    const auto text = ipc::encode(message);
    const auto again = ipc::decode_transport_message(text);
    CHECK(again.boot_id == "id");
    CHECK(again.nonce == UINT64_MAX);
    CHECK(again.control == handle);
    CHECK(again.ring == handle);
    CHECK(again.segments == message.segments);
    CHECK(again.places == message.places);
    const auto with = [&](std::string_view from, std::string_view to) {
        auto changed = text;
        changed.replace(changed.find(from), from.size(), to);
        return changed;
    };
    for (const auto& bad : {with("[1,64]", "[2,64]"), with("[1,64]", "[1]"), with("[1,64]", "7"),
                            with("\"pid\":5", "\"pid\":-5"), with("\"fd\":6", "\"fd\":99999999999"),
                            with("\"nonce\"", "\"once\""), with("\"offset\":8", "\"offset\":-8")}) {
        CHECK_THROWS_AS(static_cast<void>(ipc::decode_transport_message(bad)),
                        weightwire::protocol_error);
    }
    CHECK_THROWS_AS(static_cast<void>(ipc::decode_transport_message(with("\"host\"", "\"cuda\""))),
                    weightwire::unsupported_error);
}

TEST_CASE("a transport message that contradicts the plan is refused before any byte is read") {
    const auto parameters = tests::awkward_model();
    ipc_trainer_half trainer{parameters, travel::in_place, {1}};
    ipc_trainer_half window{parameters, travel::window, {1}};
    const auto wire = trainer.wire_parameters();
    const auto good = ipc::decode_transport_message(trainer.inits[0].native);
    const auto refused = [&](auto change) {
        auto bad = good;
        change(bad);
        worker_half worker{parameters, 1};
        CHECK_THROWS_AS(worker.open(wire, ipc::encode(bad)), weightwire::protocol_error);
    };
    refused([](auto& m) { m.places.pop_back(); });
    refused([](auto& m) { m.places[0].offset = m.segments[0].length; });
    refused([](auto& m) { m.places[6].offset = UINT64_MAX - 3; });
    refused([](auto& m) { m.places[0] = {}; });  // staged, but there is no ring
    refused([](auto& m) { m.places.clear(); });
    refused([](auto& m) { m.nonce ^= 1U; });
    refused([](auto& m) { m.control = m.segments[0]; });
    refused([](auto& m) { m.control.offset = 8, m.control.length -= 8; });
    refused([](auto& m) { m.control.length = 64; });
    refused([](auto& m) { m.segments[0].length += 1; });
    const auto ring = ipc::decode_transport_message(window.inits[0].native).ring.value();
    refused([&](auto& m) { m.ring = ring; });
    worker_half beyond{parameters, 2};
    CHECK_THROWS_AS(beyond.open(wire, trainer.inits[0].native), weightwire::protocol_error);
    worker_half elsewhere{parameters, 1};
    auto other_machine = good;
    other_machine.boot_id = "another";
    CHECK_THROWS_AS(elsewhere.open(wire, ipc::encode(other_machine)),
                    weightwire::unsupported_error);
}

TEST_CASE("an init ends at its deadline between two mappings, not after all of them") {
    const auto parameters = tests::awkward_model();
    ipc_trainer_half trainer{parameters, travel::in_place, {1}};
    const auto wire = trainer.wire_parameters();
    auto message = ipc::decode_transport_message(trainer.inits[0].native);
    // The same memory very often: a model of many segments.
    message.segments.resize(ipc::most_segments, message.segments.front());
    const auto transport = ipc::encode(message);
    worker_half worker{parameters, 1};
    auto fastest = std::chrono::nanoseconds::max();
    for (int i = 0; i < 3; ++i) {
        worker.receiver.release();  // takes time too, and is not what is measured
        const auto began = weightwire::deadline::clock::now();
        worker.open(wire, transport);
        fastest =
            std::min<std::chrono::nanoseconds>(fastest, weightwire::deadline::clock::now() - began);
    }
    worker.receiver.release();
    CHECK_THROWS_AS(
        worker.receiver.open(
            {.wire_parameters = wire, .transport = transport, .parameters = &parameters},
            weightwire::deadline::after(fastest / 4), {}),
        weightwire::timeout_error);
    worker.receiver.release();
    worker.open(wire, transport);  // nothing of it was left behind
}

TEST_CASE("a peer that is not ours, and weights that are not in host memory, are refused by name") {
    const auto parameters = tests::awkward_model();
    ipc::sender sender{{}};
    const std::vector<weightwire::peer_info> foreign{{.name = "http://vllm", .native = false}};
    try {
        static_cast<void>(
            sender.prepare({.parameters = parameters, .peers = foreign, .world_size = 2}));
        FAIL("it was prepared");
    } catch (const weightwire::unsupported_error& failed) {
        CHECK(failed.context().peer == "http://vllm");
    }
    ipc_trainer_half trainer{parameters, travel::window, {1}};
    std::vector<weightwire::tensor_view> views{trainer.weights.views().begin(),
                                               trainer.weights.views().end()};
    views[0] = {views[0].data(), views[0].type(), views[0].extents(),
                weightwire::device{weightwire::memory_kind::cuda, 0}};
    tests::views_source source{parameters, views};
    weightwire::round_of<tests::views_source> walk{source, parameters};
    auto stream = walk.stream();
    try {
        trainer.sender.send(1, 0, stream, briefly(), {});
        FAIL("it was sent");
    } catch (const weightwire::timeout_error&) {
        FAIL("it waited");
    } catch (const weightwire::unsupported_error& failed) {
        CHECK(failed.context().tensor == "embed");
    }
}

namespace {

void flip_bits(void* context, std::string_view, std::uint64_t offset, std::span<std::byte> bytes) {
    const auto key = *static_cast<const std::uint64_t*>(context);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] ^= static_cast<std::byte>((key + offset + i) & 0xFFU);
    }
}

void corrupt_big(void* context, std::string_view tensor, std::uint64_t offset,
                 std::span<std::byte> bytes) {
    auto& calls = *static_cast<int*>(context);
    ++calls;
    if (tensor == "big" && offset == 0) {
        bytes[17] ^= std::byte{1};
    }
}

}  // namespace

TEST_CASE("a transform changes what is sent, and the digests are of the changed bytes") {
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        std::uint64_t key = 77;
        auto info = tests::info_of(how);
        info.verify = true;
        info.transform = {.function = &flip_bits, .context = &key};
        ipc_trainer_half trainer{parameters, how, {1}, info};
        if (how != travel::packed) {
            CHECK(has(trainer.sender.description(), "because they are altered on the way"));
        }
        worker_half worker{parameters, 1};
        worker.open(trainer.wire_parameters(), trainer.inits[0].native);
        {
            const std::jthread receiving{[&] { worker.receive(1); }};
            trainer.send(1);
        }
        REQUIRE(trainer.sender.digests().size() == parameters.size());
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            std::vector<std::byte> wanted(trainer.weights.views()[i].bytes().begin(),
                                          trainer.weights.views()[i].bytes().end());
            flip_bits(&key, "", 0, wanted);
            const auto found = worker.landing.views()[i].bytes();
            CHECK(std::equal(wanted.begin(), wanted.end(), found.begin(), found.end()));
            CHECK(trainer.sender.digests()[i] == weightwire::digest(wanted));
        }
        CHECK(trainer.weights.differs(1) == "");  // the source itself is untouched
    }
}

TEST_CASE("a tampering hook corrupts after the digest was taken") {
    const auto parameters = tests::awkward_model();
    int calls = 0;
    auto info = tests::info_of(travel::in_place);
    info.verify = true;
    info.tamper = {.function = &corrupt_big, .context = &calls};
    ipc_trainer_half trainer{parameters, travel::in_place, {1}, info};
    worker_half worker{parameters, 1};
    worker.open(trainer.wire_parameters(), trainer.inits[0].native);
    {
        const std::jthread receiving{[&] { worker.receive(1); }};
        trainer.send(1);
    }
    CHECK(calls > 8);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const bool equal =
            trainer.sender.digests()[i] == weightwire::digest(worker.landing.views()[i].bytes());
        CHECK(equal == (parameters[i].name != "big"));
    }
}

TEST_CASE("digests are those of the bytes in every way, and none without verify") {
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        auto info = tests::info_of(how);
        info.verify = true;
        ipc_trainer_half trainer{parameters, how, {1}, info};
        worker_half worker{parameters, 1};
        worker.open(trainer.wire_parameters(), trainer.inits[0].native);
        for (std::uint64_t round = 1; round <= 2; ++round) {
            const std::jthread receiving{[&] { worker.receive(round); }};
            trainer.send(round);
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                CHECK(trainer.sender.digests()[i] ==
                      weightwire::digest(trainer.weights.views()[i].bytes()));
            }
        }
    }
    const ipc_trainer_half silent{parameters, travel::window, {1}};
    CHECK(silent.sender.digests().empty());
}

TEST_CASE("from the third round on neither side allocates") {
    const weightwire_tests::allocation_watch counting;
    void* volatile block = ::operator new(8);
    ::operator delete(block);
    if (counting.count() == 0) {
        MESSAGE("skipped: a sanitizer has its own operator new");
        return;
    }
    const auto parameters = tests::awkward_model();
    for (const auto how : all_ways) {
        CAPTURE(static_cast<int>(how));
        auto info = tests::info_of(how);
        info.verify = true;
        ipc_trainer_half trainer{parameters, how, {1}, info};
        tests::forked child{[&](tests::channel& parent) {
            worker_half worker{parameters, 1};
            worker.open(trainer.wire_parameters(), trainer.inits[0].native);
            for (;;) {
                const auto round = parent.take<std::uint64_t>();
                tests::places to{worker.landing.tensors(), weightwire::coverage{parameters}};
                weightwire::update_target target{to, parameters, 0, parameters.size()};
                const weightwire_tests::allocation_watch watch;
                worker.receiver.receive({.round = round, .native = true}, target, in_time(), {});
                parent.put(watch.count());
            }
        }};
        for (std::uint64_t round = 1; round <= 5; ++round) {
            child.to().put(round);
            trainer.weights.fill(round);
            tests::views_source source{parameters, trainer.weights.views()};
            weightwire::round_of<tests::views_source> walk{source, parameters};
            auto stream = walk.stream();
            const weightwire_tests::allocation_watch watch;
            trainer.sender.send(round, 0, stream, in_time(), {});
            const auto here = watch.count();
            const auto there = child.to().take<std::uint64_t>();
            if (round >= 3) {
                CHECK(here == 0);
                CHECK(there == 0);
            }
        }
    }
}

TEST_CASE("a round that was used already, and a second part, are refused") {
    const auto parameters = tests::awkward_model();
    ipc_trainer_half trainer{parameters, travel::window, {1}};
    worker_half worker{parameters, 1};
    worker.open(trainer.wire_parameters(), trainer.inits[0].native);
    {
        const std::jthread receiving{[&] { worker.receive(3); }};
        trainer.send(3);
    }
    CHECK_THROWS_AS(trainer.send(3), weightwire::usage_error);
    CHECK_THROWS_AS(trainer.send(2), weightwire::usage_error);
    CHECK_THROWS_AS(worker.receive(3), weightwire::peer_error);  // it is over
    CHECK_THROWS_AS(worker.receive(0), weightwire::protocol_error);
    CHECK_THROWS_AS(worker.receive(4, briefly()), weightwire::timeout_error);  // it never began
    trainer.sender.close(in_time());
    CHECK_THROWS_AS(trainer.send(5), weightwire::usage_error);
    CHECK_THROWS_AS(worker.receive(5), weightwire::peer_error);
    worker.receiver.release();
    CHECK_THROWS_AS(worker.receive(6), weightwire::protocol_error);
}
