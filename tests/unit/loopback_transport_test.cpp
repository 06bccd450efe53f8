// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/testing/conformance/transport.hpp>
#include <weightwire/testing/loopback_transport.hpp>
#include <weightwire/wire/vllm_requests.hpp>

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using rig = testing::transport_rig<testing::loopback>;

deadline soon() { return deadline::after(20s); }

rig make_rig(testing::loopback_init_info info = {}, std::vector<int> ranks = {1, 2}) {
    return rig{std::move(info), testing::random_manifest(1), std::move(ranks),
               tensor_lifetime::until_next};
}

/// The error that `call` throws. Fails where it throws none.
template <class Call>
failure failure_of(Call call) {
    try {
        call();
    } catch (...) {
        return failure::current(phase::none);
    }
    FAIL("nothing was thrown");
    return {};
}

TEST_CASE("the loopback transport conforms, in one part and in several") {
    for (const std::size_t parts : {std::size_t{1}, std::size_t{4}}) {
        const auto report = testing::check_transport<testing::loopback>({.parts = parts});
        CHECK_MESSAGE(report.passed(), report.text());
    }
}

TEST_CASE("parts cover the manifest in order, and each has a vLLM body") {
    auto halves = make_rig({.parts = 5});
    std::size_t next = 0;
    for (const auto& part : halves.sender().parts()) {
        CHECK(part.first == next);
        next += part.count;
    }
    CHECK(halves.sender().parts().size() == 5);
    CHECK(next == halves.parameters().size());
    // 6-bit types have no torch name, so this manifest cannot be spoken to vLLM.
    CHECK(halves.sender().parts().front().vllm_bodies.empty());
    rig torch{{.parts = 3}, testing::random_manifest(1, true), {1}, tensor_lifetime::stable, true};
    next = 0;
    for (const auto& part : torch.sender().parts()) {
        const auto request = wire::parse_vllm_update(part.vllm_bodies.at(0));
        const auto& named = request.entries.front().parameters;
        REQUIRE(named.size() == part.count);
        for (std::size_t i = 0; i < named.size(); ++i) {
            CHECK(named[i] == torch.parameters()[next++]);
        }
    }
    CHECK_THROWS_AS(make_rig({.piece_bytes = 12}), usage_error);
    CHECK_THROWS_AS(make_rig({.parts = 0}), usage_error);
    rig empty{{}, manifest{}, {1}, tensor_lifetime::stable};
    CHECK(empty.sender().parts().empty());
}

TEST_CASE("without verify there are no digests") {
    auto halves = make_rig({.verify = false});
    halves.open(soon());
    CHECK(halves.round(1, soon()).empty());
    CHECK(halves.sender().digests().empty());
    CHECK(halves.sender().description().find("3 ranks") != std::string::npos);
}

TEST_CASE("a gate holds the sender until it is released") {
    testing::gate gate;
    auto halves = make_rig({.block_before_send = gate.name()});
    halves.open(soon());
    std::string wrong;
    std::atomic<bool> ended{false};
    std::jthread round{[&] {
        wrong = halves.round(1, soon());
        ended = true;
    }};
    gate.wait_until_blocked(soon());
    CHECK_FALSE(ended);
    gate.release();
    round.join();
    CHECK(wrong.empty());
    CHECK(halves.round(2, soon()).empty());  // a released gate stays open
    gate.shut();
    testing::rig_source<tensor_lifetime::until_next> source{halves.parameters(), halves.bytes()};
    round_of walk{source, halves.parameters()};
    auto stream = walk.stream();
    CHECK(failure_of([&] { halves.sender().send(3, 0, stream, deadline::after(50ms), {}); }).text ==
          "the deadline passed while being held at a test's gate; look at the peer or allow more "
          "time");
}

TEST_CASE("a gate holds one receiver until released, its deadline or its stop") {
    testing::gate gate;
    auto halves = make_rig({.block_in_receive = gate.name(), .block_rank = 2});
    halves.open(soon());
    auto& held = halves.workers()[1];
    SUBCASE("released") {
        std::string wrong;
        std::atomic<bool> ended{false};
        std::jthread round{[&] {
            wrong = halves.round(1, soon());
            ended = true;
        }};
        gate.wait_until_blocked(soon());
        CHECK_FALSE(ended);
        gate.release();
        round.join();
        CHECK(wrong.empty());
    }
    SUBCASE("deadline") {
        const auto why = failure_of([&] { halves.receive(held, 1, 0, deadline::after(50ms), {}); });
        CHECK(why.kind == "timeout");
        CHECK(why.text.find("held at a test's gate") != std::string::npos);
    }
    SUBCASE("stop") {
        std::stop_source stop;
        std::jthread stopper{[&] {
            gate.wait_until_blocked(soon());
            stop.request_stop();
        }};
        CHECK(failure_of([&] { halves.receive(held, 1, 0, soon(), stop.get_token()); }).kind ==
              "cancelled");
    }
}

TEST_CASE("a rank that hangs up in a round does not keep the others from theirs") {
    auto halves = make_rig();
    halves.open(soon());
    halves.workers()[0].receiver.release();
    halves.move(1, soon(), [](const rig::worker& one) { return one.peer == 1; });
    CHECK(halves.workers()[1].landing.difference(halves.bytes()).empty());
    CHECK(halves.workers()[2].landing.difference(halves.bytes()).empty());
    for (auto& one : halves.workers()) {
        one.receiver.release();
    }
    const auto nobody = [](const rig::worker&) { return false; };
    const auto why = failure_of([&] { halves.move(2, deadline::after(200ms), nobody); });
    CHECK(why.kind == "timeout");
    CHECK(why.context.peer.find("peer ") == 0);
}

TEST_CASE("when every peer has been dropped a round is read to its end") {
    auto halves = make_rig({.parts = 2});
    halves.open(soon());
    halves.sender().drop_peer(0);
    halves.sender().drop_peer(1);
    halves.move(1, soon(), [](const rig::worker&) { return false; });
    CHECK(failure_of([&] { halves.receive(halves.workers()[0], 1, 0, soon(), {}); }).kind ==
          "peer");
}

TEST_CASE("a failed send is seen by every receiver, and a new init repairs it") {
    auto halves = make_rig({.parts = 2});
    halves.open(soon());
    std::stop_source stop;
    stop.request_stop();
    testing::rig_source<tensor_lifetime::until_next> source{halves.parameters(), halves.bytes()};
    round_of walk{source, halves.parameters()};
    auto stream = walk.stream();
    CHECK(failure_of([&] { halves.sender().send(1, 0, stream, soon(), stop.get_token()); }).kind ==
          "cancelled");
    for (auto& one : halves.workers()) {
        CHECK(failure_of([&] { halves.receive(one, 1, 0, soon(), {}); }).kind == "peer");
        CHECK(failure_of([&] { halves.receive(one, 1, 0, soon(), {}); }).kind == "session");
    }
    halves.open(soon());
    CHECK(halves.round(2, soon()).empty());
}

TEST_CASE("strangers at the socket harm nobody") {
    auto halves = make_rig();
    const auto& native = halves.inits().front().native;
    const auto name = native.substr(11, native.size() - 13);
    std::vector<rendezvous::unique_socket> strangers;
    for (const std::string& words : {std::string{}, std::string{"GET / HTTP/1.1\r\n"},
                                     std::string(8, '\0'), std::string{"\x01WWL\x63\0\0\0", 8}}) {
        int code = 0;
        strangers.push_back(
            rendezvous::try_connect(rendezvous::abstract_address(name), soon(), {}, {}, code));
        REQUIRE(strangers.back());
        rendezvous::detail::write_all(strangers.back().native_handle(), words, soon(), {}, "", {});
    }
    halves.open(soon());
    CHECK(halves.round(1, soon()).empty());
}

TEST_CASE("a receiver whose trainer is gone says so") {
    std::string transport;
    {
        auto gone = make_rig();
        transport = gone.inits().front().native;
    }
    testing::loopback_receiver receiver{{}};
    const auto why = failure_of(
        [&] { receiver.open({.wire_parameters = "{}", .transport = transport}, soon(), {}); });
    CHECK(why.kind == "peer");
    CHECK(why.context.phase == phase::init);
}

/// Says `words` to a receiver as a trainer; returns what `receive` throws.
failure receive_from_liar(const std::string& words, const update_message& message = {}) {
    const auto name = testing::unique_socket_name("liar");
    const auto listener = rendezvous::listen_at(rendezvous::abstract_address(name), name, {});
    const manifest parameters{{{"a", dtype::u8, {16}}, {"b", dtype::u8, {8}}}};
    testing::rig_landing landing{parameters};
    testing::loopback_receiver receiver{{}};
    receiver.open({.wire_parameters = "{}", .transport = "{\"socket\":\"" + name + "\"}"}, soon(),
                  {});
    {
        const auto peer = rendezvous::unique_socket::from_native(
            ::accept(listener.native_handle(), nullptr, nullptr));
        rendezvous::detail::write_all(peer.native_handle(), words, soon(), {}, "", {});
    }
    update_target target{landing, parameters, 0, 2};
    return failure_of([&] { receiver.receive(message, target, soon(), {}); });
}

template <class... Structs>
std::string bytes_of(const Structs&... all) {
    std::string out;
    (out.append(reinterpret_cast<const char*>(&all), sizeof all), ...);
    return out;
}

TEST_CASE("a trainer that lies is refused before a byte lands where it should not") {
    using header = testing::loopback_part_header;
    using piece = testing::loopback_piece_header;
    const header good{.count = 2};
    const std::string sixteen(16, 'x');
    CHECK(receive_from_liar(bytes_of(header{.magic = 1, .count = 2})).kind == "protocol");
    CHECK(receive_from_liar(bytes_of(header{.count = 3})).kind == "protocol");
    CHECK(receive_from_liar(bytes_of(header{.part = 1, .count = 2})).kind == "protocol");
    CHECK(receive_from_liar(bytes_of(header{.round = 2, .count = 2}), {.round = 1, .native = true})
              .kind == "protocol");
    CHECK(receive_from_liar(bytes_of(good, piece{.index = 2, .size = 1})).kind == "protocol");
    CHECK(receive_from_liar(bytes_of(good, piece{.size = 17})).kind == "protocol");
    CHECK(receive_from_liar(bytes_of(good, piece{.offset = 8, .size = 8})).kind == "protocol");
    CHECK(receive_from_liar(bytes_of(good, piece{.offset = ~std::uint64_t{0}, .size = 2})).kind ==
          "protocol");
    // Goes on in a tensor that is not the one under way.
    CHECK(receive_from_liar(bytes_of(good, piece{.index = 1, .size = 8}) + std::string(8, 'x') +
                            bytes_of(piece{.index = 0, .offset = 8, .size = 8}))
              .kind == "protocol");
    // Twice the same tensor: coverage is the target's.
    CHECK(receive_from_liar(bytes_of(good, piece{.size = 16}) + sixteen +
                            bytes_of(piece{.size = 16}) + sixteen)
              .kind == "coverage");
    CHECK(receive_from_liar(bytes_of(good)).kind == "peer");
    const std::vector<std::pair<std::string, wire_value>> extras{{"packed", true}};
    CHECK(receive_from_liar(bytes_of(good), {.extras = extras}).text.find("'packed'") !=
          std::string::npos);
}

TEST_CASE("trainer and worker may be two processes") {
    auto halves = make_rig({.parts = 2}, {1});
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        auto& one = halves.workers().front();
        int status = 1;
        try {
            halves.open_worker(one, soon());
            for (std::uint64_t round = 1; round <= 3; ++round) {
                const auto expected = testing::random_bytes(halves.parameters(), round * 7919 + 1);
                one.landing.clear();
                halves.receive(one, round, 0, soon(), {});
                halves.receive(one, round, 1, soon(), {});
                status = one.landing.difference(expected).empty() ? 0 : 2;
            }
        } catch (const std::exception& caught) {
            ::dprintf(2, "child: %s\n", caught.what());
            status = 3;
        }
        ::_exit(status);
    }
    const auto nobody = [](const rig::worker&) { return false; };
    halves.open(soon(), nobody);
    for (std::uint64_t round = 1; round <= 3; ++round) {
        halves.move(round, soon(), nobody);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    // It is gone: one clear error, in time.
    const auto why = failure_of([&] { halves.move(4, deadline::after(200ms), nobody); });
    CHECK((why.kind == "peer" || why.kind == "timeout"));
}

}  // namespace
