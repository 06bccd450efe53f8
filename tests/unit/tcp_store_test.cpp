// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <weightwire/rendezvous/tcp_store_client.hpp>
#include <weightwire/rendezvous/tcp_store_server.hpp>

#include "../support/forked.hpp"
#include "../support/no_descriptors.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using namespace weightwire::rendezvous;

deadline soon() { return deadline::after(10s); }

/// `"06 0100"` as bytes; what is between apostrophes is text.
std::string bytes(std::string_view text) {
    std::string out;
    for (std::size_t i = 0; i < text.size();) {
        if (text[i] == ' ') {
            ++i;
        } else if (text[i] == '\'') {
            const auto end = text.find('\'', i + 1);
            out += text.substr(i + 1, end - i - 1);
            i = end + 1;
        } else {
            out += static_cast<char>(std::stoi(std::string{text.substr(i, 2)}, nullptr, 16));
            i += 2;
        }
    }
    return out;
}

const std::string validate = bytes("00 CEF7853C");

/// A connection on which bytes are said and heard, and nothing is assumed.
class raw_connection {
public:
    explicit raw_connection(std::uint16_t port, const std::string& host = "127.0.0.1") {
        int code = 0;
        const auto address = resolve(host, port, soon(), {}, {}).front();
        socket_ = try_connect(address, soon(), {}, {}, code);
        REQUIRE(socket_);
    }
    void say(std::string_view what) {
        rendezvous::detail::write_all(socket_.native_handle(), what, soon(), {}, "saying", {});
    }
    std::string hear(std::size_t count) {
        std::string out(count, '\0');
        rendezvous::detail::read_exactly(socket_.native_handle(), out.data(), count, soon(), {},
                                         "hearing", {});
        return out;
    }
    /// Whether nothing comes for a while.
    bool is_silent() {
        pollfd entry{socket_.native_handle(), POLLIN, 0};
        return ::poll(&entry, 1, 50) == 0;
    }
    /// Whether the server hangs up, and says nothing more before it.
    bool is_dropped() {
        rendezvous::detail::wait_ready(socket_.native_handle(), POLLIN, soon(), {}, "waiting", {});
        char one = 0;
        return ::recv(socket_.native_handle(), &one, 1, 0) <= 0;
    }
    int native_handle() const { return socket_.native_handle(); }
    void close() { socket_.close(); }

private:
    unique_socket socket_;
};

/// Waits until the server has counted `count` connections dropped for `reason`.
bool counts(const tcp_store_server& server, drop_reason reason, std::uint64_t count = 1) {
    for (const auto until = soon(); !until.expired();) {
        if (server.counts().of(reason) == count) {
            return true;
        }
        std::this_thread::sleep_for(1ms);
    }
    return false;
}

tcp_store_client client_of(const tcp_store_server& server) {
    return tcp_store_client::connect("127.0.0.1", server.port(), soon());
}

TEST_CASE("a torch client's constructor is answered byte for byte") {
    const tcp_store_server server;
    raw_connection one{server.port()};
    one.say(validate);
    one.say(bytes("0D 2A010000"));
    CHECK(one.hear(4) == bytes("2A010000"));
    one.say(bytes("04 0500000000000000 'init/' 0100000000000000"));
    CHECK(one.hear(8) == bytes("0100000000000000"));
    one.say(bytes("04 0500000000000000 'init/' 0100000000000000"));
    CHECK(one.hear(8) == bytes("0200000000000000"));
    // The value is decimal text.
    one.say(bytes("06 0100000000000000 0500000000000000 'init/'"));
    CHECK(one.hear(1) == bytes("00"));
    one.say(bytes("03 0500000000000000 'init/'"));
    CHECK(one.hear(9) == bytes("0100000000000000 '2'"));
}

TEST_CASE("a worker that fetches the unique id is answered when the id is there") {
    const tcp_store_server server;
    raw_connection worker{server.port()};
    raw_connection trainer{server.port()};
    worker.say(validate);
    worker.say(bytes("06 0100000000000000 1300000000000000 '/broadcast_from/0/0'"));
    CHECK(worker.is_silent());
    trainer.say(validate);
    trainer.say(bytes("01 1300000000000000 '/broadcast_from/0/0' 0400000000000000 80040A2E"));
    CHECK(worker.hear(1) == bytes("00"));
    worker.say(bytes("03 1300000000000000 '/broadcast_from/0/0'"));
    CHECK(worker.hear(12) == bytes("0400000000000000 80040A2E"));
    CHECK(trainer.is_silent());  // SET has no answer
}

TEST_CASE("every other query is answered byte for byte") {
    const tcp_store_server server;
    raw_connection one{server.port()};
    one.say(validate);
    const std::string k = "0100000000000000 'k'";
    SUBCASE("COMPARE_SET") {
        const std::string a = " 0100000000000000 'a'";
        const std::string b = " 0100000000000000 'b'";
        const std::string none = " 0000000000000000";
        one.say(bytes("02" + k + a + b));  // missing, something expected
        CHECK(one.hear(9) == bytes(a));
        one.say(bytes("07"));
        CHECK(one.hear(8) == bytes("0000000000000000"));
        one.say(bytes("02" + k + none + a));  // missing, nothing expected
        CHECK(one.hear(9) == bytes(a));
        one.say(bytes("02" + k + a + b));  // equal
        CHECK(one.hear(9) == bytes(b));
        one.say(bytes("02" + k + a + a));  // different
        CHECK(one.hear(9) == bytes(b));
    }
    SUBCASE("CHECK, GETNUMKEYS, DELETE_KEY") {
        one.say(bytes("05 0100000000000000" + k));
        CHECK(one.hear(1) == bytes("01"));
        one.say(bytes("01" + k + "0000000000000000"));
        one.say(bytes("05 0100000000000000" + k));
        CHECK(one.hear(1) == bytes("00"));
        one.say(bytes("07"));
        CHECK(one.hear(8) == bytes("0100000000000000"));
        one.say(bytes("08" + k));
        CHECK(one.hear(8) == bytes("0100000000000000"));
        one.say(bytes("08" + k));
        CHECK(one.hear(8) == bytes("0000000000000000"));
    }
    SUBCASE("APPEND, MULTI_SET, MULTI_GET") {
        one.say(bytes("09" + k + "0200000000000000 'xy'"));
        one.say(bytes("09" + k + "0100000000000000 'z'"));
        one.say(
            bytes("0B 0200000000000000 0100000000000000 'p' 0100000000000000 '1'"
                  "0100000000000000 'q' 0000000000000000"));
        one.say(bytes("0A 0300000000000000" + k + "0100000000000000 'p' 0100000000000000 'q'"));
        CHECK(one.hear(28) ==
              bytes("0300000000000000 'xyz' 0100000000000000 '1' 0000000000000000"));
    }
    SUBCASE("CANCEL_WAIT") {
        one.say(bytes("06 0100000000000000" + k));
        one.say(bytes("0C"));
        CHECK(one.hear(1) == bytes("01"));
        one.say(bytes("01" + k + "0000000000000000"));  // wakes nobody
        CHECK(one.is_silent());
        one.say(bytes("0C"));  // always answered
        CHECK(one.hear(1) == bytes("01"));
    }
    SUBCASE("WAIT for several keys, a negative ADD") {
        one.say(bytes("06 0000000000000000"));
        CHECK(one.hear(1) == bytes("00"));
        one.say(bytes("06 0200000000000000 0100000000000000 'p' 0100000000000000 'q'"));
        raw_connection other{server.port()};
        other.say(validate + bytes("04 0100000000000000 'q' FEFFFFFFFFFFFFFF"));
        CHECK(other.hear(8) == bytes("FEFFFFFFFFFFFFFF"));
        CHECK(one.is_silent());
        other.say(bytes("09 0100000000000000 'p' 0000000000000000"));
        CHECK(one.hear(1) == bytes("00"));
    }
}

TEST_CASE("requests may come in any segments, and several at once") {
    const tcp_store_server server;
    raw_connection one{server.port()};
    const auto all = validate + bytes(
                                    "0D 01000000"
                                    "04 0100000000000000 'n' 0500000000000000"
                                    "0A 0200000000000000 0100000000000000 'n' 0100000000000000 'n'"
                                    "07");
    const auto answer = bytes(
        "01000000 0500000000000000 0100000000000000 '5' 0100000000000000 '5'"
        "0100000000000000");
    one.say(all);
    CHECK(one.hear(answer.size()) == answer);
    raw_connection slow{server.port()};
    for (const char byte : validate + bytes("0D 01000000 05 0100000000000000 01000000000000006E")) {
        slow.say({&byte, 1});
    }
    CHECK(slow.hear(5) == bytes("01000000 00"));
}

TEST_CASE("a WAIT is answered when all its keys exist at once") {
    const tcp_store_server server;
    raw_connection one{server.port()};
    one.say(validate + bytes("06 0200000000000000 0100000000000000 'p' 0100000000000000 'q'"));
    auto other = client_of(server);
    other.set("p", "", soon());
    CHECK(other.delete_key("p", soon()));
    other.set("q", "", soon());
    CHECK(one.is_silent());
    other.set("p", "", soon());
    CHECK(one.hear(1) == bytes("00"));
}

TEST_CASE("garbage and broken limits drop one connection, with the reason counted") {
    const tcp_store_server server{{.limits = {.max_reply_bytes = 100}, .max_store_bytes = 1 << 20}};
    auto bystander = client_of(server);
    bystander.set("text", std::string(60, 'x'), soon());
    struct example {
        std::string words;
        drop_reason reason;
    };
    const std::vector<example> examples{
        {"GET / HTTP/1.1\r\n\r\n", drop_reason::not_validated},
        {bytes("07"), drop_reason::not_validated},
        {bytes("00 CEF7853D"), drop_reason::wrong_magic},
        {validate + bytes("0E"), drop_reason::unknown_query},
        {validate + bytes("FF"), drop_reason::unknown_query},
        {validate + bytes("01 0120000000000000"), drop_reason::key_too_long},
        {validate + bytes("03 FFFFFFFFFFFFFFFF"), drop_reason::key_too_long},
        {validate + bytes("01 0100000000000000 'k' 0100800000000000"), drop_reason::value_too_long},
        {validate + bytes("06 0100020000000000"), drop_reason::too_many_keys},
        {validate + bytes("0B FFFFFFFFFFFFFFFF"), drop_reason::too_many_keys},
        {validate + bytes("03 0100000000000000 'k'"), drop_reason::missing_key},
        {validate + bytes("0A 0100000000000000 0100000000000000 'k'"), drop_reason::missing_key},
        {validate + bytes("04 0400000000000000 'text' 0100000000000000"),
         drop_reason::not_a_number},
        {validate + bytes("04 0100000000000000 'n' FFFFFFFFFFFFFF7F"
                          "04 0100000000000000 'n' FFFFFFFFFFFFFF7F"),
         drop_reason::not_a_number},
        {validate + bytes("06 0100000000000000 0100000000000000 'k'"
                          "06 0100000000000000 0100000000000000 'k'"),
         drop_reason::overlapping_wait},
        {validate + bytes("0A 0200000000000000 0400000000000000 'text' 0400000000000000 'text'"),
         drop_reason::reply_too_long},
        {validate + bytes("01 0100000000000000 'k' 0000200000000000") + std::string(1 << 21, 'v'),
         drop_reason::store_full},
    };
    for (const auto& [words, reason] : examples) {
        CAPTURE(to_string(reason));
        const auto before = server.counts().of(reason);
        raw_connection one{server.port()};
        const auto sent = ::send(one.native_handle(), words.data(), words.size(), MSG_NOSIGNAL);
        (void)sent;  // the server may hang up while we still speak
        if (reason == drop_reason::store_full) {
            // More than a socket holds: the rest follows until the server has seen all of it.
            rendezvous::detail::write_all(
                one.native_handle(), std::string_view{words}.substr(static_cast<std::size_t>(sent)),
                soon(), {}, "saying", {});
        }
        CHECK(counts(server, reason, before + 1));
        bystander.ping(soon());
    }
    raw_connection gone{server.port()};
    gone.say(validate + bytes("01 0100"));
    gone.close();
    CHECK(counts(server, drop_reason::hung_up_in_request));
    bystander.ping(soon());
    CHECK(bystander.get("text", soon()) == std::string(60, 'x'));
}

TEST_CASE("silent clients are dropped when they owe something, and only then") {
    const tcp_store_server server{{.silence_budget = 100ms}};
    raw_connection idle{server.port()};
    idle.say(validate + bytes("0D 07000000"));
    CHECK(idle.hear(4) == bytes("07000000"));
    raw_connection says_nothing{server.port()};
    raw_connection stops_in_request{server.port()};
    stops_in_request.say(validate + bytes("01 0100"));
    CHECK(says_nothing.is_dropped());
    CHECK(stops_in_request.is_dropped());
    CHECK(counts(server, drop_reason::silent, 2));
    raw_connection waits{server.port()};
    waits.say(validate + bytes("06 0100000000000000 0100000000000000 'k'"));
    std::this_thread::sleep_for(300ms);
    idle.say(bytes("01 0100000000000000 'k' 0000000000000000"));  // still welcome
    CHECK(waits.hear(1) == bytes("00"));
}

TEST_CASE("a client that does not read its replies is dropped and holds up nobody") {
    const tcp_store_server server{{.silence_budget = 200ms}};
    auto other = client_of(server);
    other.set("k", std::string(4 << 20, 'v'), soon());
    other.ping(soon());  // answered after the value is in place
    raw_connection greedy{server.port()};
    greedy.say(validate);
    for (int i = 0; i < 100; ++i) {
        greedy.say(bytes("03 0100000000000000 'k'"));
    }
    for (int i = 0; i < 20; ++i) {
        other.ping(soon());
    }
    CHECK(counts(server, drop_reason::slow_reader));
}

TEST_CASE("a slow reader of many large replies gets them all in order") {
    const tcp_store_server server;
    auto other = client_of(server);
    other.set("k", std::string(1 << 20, 'v'), soon());
    other.ping(soon());
    raw_connection one{server.port()};
    one.say(validate);
    for (int i = 0; i < 20; ++i) {
        one.say(bytes("03 0100000000000000 'k'"));
    }
    one.say(bytes("0D 09000000"));
    for (int i = 0; i < 20; ++i) {
        CHECK(one.hear(8) == bytes("0000100000000000"));
        CHECK(one.hear(1 << 20) == std::string(1 << 20, 'v'));
    }
    CHECK(one.hear(4) == bytes("09000000"));
}

TEST_CASE("connections beyond the limit are refused") {
    const tcp_store_server server{{.max_connections = 2}};
    auto first = client_of(server);
    auto second = client_of(server);
    raw_connection third{server.port()};
    CHECK(third.is_dropped());
    CHECK(server.counts().of(drop_reason::too_many_connections) == 1);
    first.ping(soon());
    second.close();
    CHECK(counts(server, drop_reason::hung_up));
    auto instead = client_of(server);
    instead.ping(soon());
}

TEST_CASE("a client does everything that the protocol offers") {
    const tcp_store_server server;
    auto one = client_of(server);
    CHECK(one.announce(soon()) == 1);
    one.set("a", "1", soon());
    CHECK(one.get("a", soon()) == "1");
    CHECK(one.add("a", 41, soon()) == 42);
    CHECK(one.compare_set("a", "42", "43", soon()) == "43");
    CHECK(one.compare_set("a", "42", "44", soon()) == "43");
    one.append("a", "!", soon());
    one.multi_set(std::vector<std::string>{"b", "c"}, std::vector<std::string>{"", "3"}, soon());
    const std::vector<std::string> names{"a", "b", "c"};
    CHECK(one.multi_get(names, soon()) == std::vector<std::string>{"43!", "", "3"});
    CHECK(one.check(names, soon()));
    CHECK(one.number_of_keys(soon()) == 4);
    CHECK(one.delete_key("b", soon()));
    CHECK_FALSE(one.delete_key("b", soon()));
    CHECK_FALSE(one.check(names, soon()));
    const std::string largest(store_limits{}.max_value_bytes, 'v');
    one.set("large", largest, soon());
    CHECK(one.get("large", soon()) == largest);
    CHECK_THROWS_AS(one.multi_set(names, {}, soon()), usage_error);
    CHECK(server.counts().keys == 4);
}

TEST_CASE("a client says the protocol's bytes") {
    auto listener = listen_at(resolve("127.0.0.1", 0, soon(), {}, {}).front(), "test", {});
    const auto port = local_address(listener).port();
    std::string heard;
    std::jthread server{[&] {
        rendezvous::detail::wait_ready(listener.native_handle(), POLLIN, soon(), {}, "", {});
        const auto peer =
            unique_socket::from_native(::accept(listener.native_handle(), nullptr, nullptr));
        const auto hear = [&](std::size_t count) {
            const auto at = heard.size();
            heard.resize(at + count);
            rendezvous::detail::read_exactly(peer.native_handle(), heard.data() + at, count, soon(),
                                             {}, "", {});
        };
        const auto say = [&](const std::string& what) {
            rendezvous::detail::write_all(peer.native_handle(), what, soon(), {}, "", {});
        };
        hear(10);
        say(heard.substr(6));
        hear(22);
        say(bytes("0300000000000000"));
        hear(36);
        say(bytes("00"));
        hear(28);
        say(bytes("0200000000000000 'id'"));
    }};
    auto one = tcp_store_client::connect("127.0.0.1", port, soon());
    CHECK(one.announce(soon()) == 3);
    CHECK(one.get("/broadcast_from/0/0", soon()) == "id");
    server.join();
    std::string pid;
    append_store_number(pid, static_cast<std::uint32_t>(::getpid()));
    CHECK(heard == validate + "\x0D" + pid +
                       bytes("04 0500000000000000 'init/' 0100000000000000"
                             "06 0100000000000000 1300000000000000 '/broadcast_from/0/0'"
                             "03 1300000000000000 '/broadcast_from/0/0'"));
}

TEST_CASE("a wait ends at its deadline or stop and leaves the connection usable") {
    const tcp_store_server server;
    auto one = client_of(server);
    auto other = client_of(server);
    const std::vector<std::string> names{"k", "l"};
    try {
        one.wait(names, deadline::after(50ms));
        FAIL("nobody has set the keys");
    } catch (const timeout_error& caught) {
        CHECK(std::string{caught.what()}.find("waiting for the key 'k' and 1 more") !=
              std::string::npos);
        CHECK(caught.context().peer == "127.0.0.1:" + std::to_string(server.port()));
    }
    CHECK(one.add("n", 1, soon()) == 1);
    std::stop_source stop;
    std::jthread stopper{[&] {
        std::this_thread::sleep_for(30ms);
        stop.request_stop();
    }};
    CHECK_THROWS_AS(one.wait(names, soon(), stop.get_token()), cancelled_error);
    CHECK(one.add("n", 1, soon()) == 2);
    // The key comes between the deadline and the next call: 0, then 1, on the wire.
    CHECK_THROWS_AS(one.wait({&names[0], 1}, deadline::after(-1s)), timeout_error);
    other.set("k", "v", soon());
    other.ping(soon());
    CHECK(one.get("k", soon()) == "v");
}

TEST_CASE("connecting waits for a server that starts later") {
    std::uint16_t port = 0;
    {
        const tcp_store_server early;
        port = early.port();
    }
    std::unique_ptr<tcp_store_server> late;
    std::jthread starter{[&] {
        std::this_thread::sleep_for(150ms);
        late = std::make_unique<tcp_store_server>(tcp_store_options{.port = port});
    }};
    auto one = tcp_store_client::connect("127.0.0.1", port, soon());
    one.ping(soon());
    starter.join();
}

TEST_CASE("connecting gives up at its deadline or stop and says what it met") {
    SUBCASE("nobody listens") {
        std::uint16_t port = 0;
        {
            const tcp_store_server gone;
            port = gone.port();
        }
        try {
            (void)tcp_store_client::connect("127.0.0.1", port, deadline::after(100ms));
            FAIL("nobody listens");
        } catch (const timeout_error& caught) {
            CHECK(caught.context().peer == "127.0.0.1:" + std::to_string(port));
            CHECK(caught.context().native_text == "Connection refused");
        }
        std::stop_source stop;
        std::jthread stopper{[&] {
            std::this_thread::sleep_for(30ms);
            stop.request_stop();
        }};
        CHECK_THROWS_AS(
            (void)tcp_store_client::connect("127.0.0.1", port, soon(), stop.get_token()),
            cancelled_error);
    }
    SUBCASE("the server accepts and says nothing") {
        auto listener = listen_at(resolve("127.0.0.1", 0, soon(), {}, {}).front(), "test", {});
        CHECK_THROWS_AS((void)tcp_store_client::connect("127.0.0.1", local_address(listener).port(),
                                                        deadline::after(100ms)),
                        timeout_error);
    }
    SUBCASE("the host is unknown") {
        CHECK_THROWS_AS((void)tcp_store_client::connect("no-such-host.invalid", 1, soon()),
                        peer_error);
    }
}

TEST_CASE("a server that hangs up leaves one clear error") {
    auto server = std::make_unique<tcp_store_server>();
    auto one = client_of(*server);
    std::jthread killer{[&] {
        std::this_thread::sleep_for(30ms);
        server.reset();  // with a waiting client
    }};
    const std::string name = "k";
    CHECK_THROWS_AS(one.wait({&name, 1}, soon()), peer_error);
    CHECK_THROWS_WITH_AS(one.ping(soon()),
                         doctest::Contains("unusable since a call on it failed; connect again"),
                         peer_error);
}

TEST_CASE("without descriptors a client says so, and a server serves again when some are free") {
    tests::forked process{[](tests::channel& parent) {
        const tcp_store_server server;
        parent.put(server.port());
        std::optional<test_support::no_descriptors> none;
        for (;;) {
            parent.take<char>() == 'n' ? static_cast<void>(none.emplace()) : none.reset();
            parent.put('d');
        }
    }};
    const auto port = process.to().take<std::uint16_t>();
    const auto without_descriptors = [&] {
        const test_support::no_descriptors none;
        (void)tcp_store_client::connect("127.0.0.1", port, soon());
    };
    CHECK_THROWS_WITH_AS(without_descriptors(), doctest::Contains("raise the limit of open files"),
                         resource_error);
    process.to().put('n');
    REQUIRE(process.to().take<char>() == 'd');
    CHECK_THROWS_AS((void)tcp_store_client::connect("127.0.0.1", port, deadline::after(200ms)),
                    timeout_error);
    process.to().put('f');
    REQUIRE(process.to().take<char>() == 'd');
    CHECK_NOTHROW((void)tcp_store_client::connect("127.0.0.1", port, soon()));
}

TEST_CASE("a port in use is an error that names it") {
    const tcp_store_server server;
    try {
        const tcp_store_server second{{.port = server.port()}};
        FAIL("the port is in use");
    } catch (const resource_error& caught) {
        CHECK(std::string{caught.what()}.find("127.0.0.1:" + std::to_string(server.port()) +
                                              " is in use") != std::string::npos);
        CHECK(caught.context().native_code == EADDRINUSE);
    }
    CHECK_THROWS_AS(tcp_store_server({.address = "192.0.2.1"}), resource_error);
    CHECK_THROWS_AS(tcp_store_server({.address = "no-such-host.invalid"}), peer_error);
}

TEST_CASE("the store is reached over IPv6, and over both from the wildcard") {
    std::unique_ptr<tcp_store_server> server;
    try {
        server = std::make_unique<tcp_store_server>(tcp_store_options{.address = "::1"});
    } catch (const resource_error&) {
        MESSAGE("skipped: this machine has no IPv6 loopback");
        return;
    }
    auto one = tcp_store_client::connect("::1", server->port(), soon());
    CHECK(one.peer() == "[::1]:" + std::to_string(server->port()));
    const tcp_store_server both{{.address = "::"}};
    auto four = tcp_store_client::connect("127.0.0.1", both.port(), soon());
    auto six = tcp_store_client::connect("::1", both.port(), soon());
    four.set("k", "v", soon());
    CHECK(six.get("k", soon()) == "v");
}

TEST_CASE("many clients at once count together") {
    const tcp_store_server server;
    {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 16; ++i) {
            threads.emplace_back([&] {
                auto one = client_of(server);
                for (int n = 0; n < 200; ++n) {
                    (void)one.add("n", 1, soon());
                }
                one.set("done", "", soon());
            });
        }
    }
    auto one = client_of(server);
    CHECK(one.get("n", soon()) == "3200");
}

TEST_CASE("a reply that is too long is refused before memory is taken for it") {
    const tcp_store_server server;
    auto one = client_of(server);
    one.set("k", std::string(100, 'v'), soon());
    one.accept_values_up_to(99);
    CHECK_THROWS_AS((void)one.get("k", soon()), protocol_error);
    CHECK_THROWS_AS(one.ping(soon()), peer_error);
}

}  // namespace
