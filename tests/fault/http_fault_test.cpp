// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/http/http.hpp>

#include "../support/forked.hpp"
#include "../support/no_descriptors.hpp"
#include "../support/scripted_server.hpp"

using namespace std::chrono_literals;
using weightwire::deadline;
using weightwire::http_request;
using weightwire::http_response;
using weightwire::reply_fault;
using weightwire::http::curl_client;
using weightwire_tests::ok_reply;
using weightwire_tests::raw_connection;
using weightwire_tests::read_request;
using weightwire_tests::scripted_server;

namespace {

deadline soon() { return deadline::after(5s); }

struct ok_handler {
    http_response handle(const http_request&) const { return {.body = "{}"}; }
};

/// What a client makes of a server that follows `script`.
weightwire::http_answer ask(scripted_server::script script,
                            weightwire::http::client_options options = {},
                            std::chrono::milliseconds budget = 5s) {
    scripted_server server{std::move(script)};
    curl_client client{server.url(), std::move(options)};
    return client.exchange({.method = "POST", .target = "/update_weights", .body = "{}"},
                           deadline::after(budget));
}

void wait_for_end(raw_connection& client) { static_cast<void>(client.read_to_end()); }

std::string status_line(std::string_view reply) {
    return std::string{reply.substr(0, reply.find("\r\n"))};
}

}  // namespace

TEST_CASE("a server that accepts and never answers: timed out at the deadline") {
    const auto until = deadline::after(100ms);
    scripted_server server{wait_for_end};
    curl_client client{server.url()};
    const auto answer = client.exchange({.method = "POST", .target = "/a", .body = "{}"}, until);
    CHECK(until.expired());
    CHECK(answer.fault == reply_fault::timed_out);
    CHECK(answer.fault_text.find("deadline passed while waiting for the reply") !=
          std::string::npos);
}

TEST_CASE("a deadline that has passed sends nothing") {
    scripted_server server{wait_for_end};
    curl_client client{server.url()};
    CHECK(client.exchange({.target = "/a"}, deadline::after(-1s)).fault == reply_fault::timed_out);
    std::stop_source stopped;
    stopped.request_stop();
    CHECK(client.exchange({.target = "/a"}, soon(), stopped.get_token()).fault ==
          reply_fault::cancelled);
    CHECK(server.accepted() == 0);
}

TEST_CASE("a stop ends a call to a silent server long before its deadline") {
    std::stop_source source;
    scripted_server server{[&source](raw_connection& client) {
        static_cast<void>(read_request(client));
        source.request_stop();
        wait_for_end(client);
        CHECK(client.closed());  // the server sees the hang-up
    }};
    curl_client client{server.url()};
    const auto until = deadline::after(30s);
    const auto answer = client.exchange({.method = "POST", .target = "/a", .body = "{}"}, until,
                                        source.get_token());
    CHECK(answer.fault == reply_fault::cancelled);
    CHECK_FALSE(until.expired());
}

TEST_CASE("nobody listens: unreachable") {
    std::uint16_t port = 0;
    {
        const scripted_server server{wait_for_end};
        port = server.port();
    }
    curl_client client{"http://127.0.0.1:" + std::to_string(port)};
    const auto answer = client.exchange({.target = "/a"}, soon());
    CHECK(answer.fault == reply_fault::unreachable);
    CHECK_FALSE(answer.fault_text.empty());
    CHECK(curl_client{"http://no-such-host.invalid"}.exchange({.target = "/"}, soon()).fault ==
          reply_fault::unreachable);
}

TEST_CASE("a connection that ends before or in the reply: closed") {
    CHECK(ask([](raw_connection& client) { static_cast<void>(read_request(client)); }).fault ==
          reply_fault::closed);
    const auto half = ask([](raw_connection& client) {
        static_cast<void>(read_request(client));
        client.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf");
    });
    CHECK(half.fault == reply_fault::closed);
    CHECK(half.status == 0);
    CHECK(half.body.empty());
    CHECK(ask([](raw_connection& client) {
              static_cast<void>(read_request(client));
              client.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf");
              client.reset();
          }).fault == reply_fault::closed);
}

TEST_CASE("a reply that is no HTTP: malformed") {
    for (const auto& garbage :
         std::vector<std::string>{"garbage\r\n\r\n", "SSH-2.0-OpenSSH_9.2\r\n",
                                  "HTTP/9.9 abc\r\n\r\n", std::string(8, '\0') + "\n"}) {
        CAPTURE(garbage);
        const auto answer = ask([&garbage](raw_connection& client) {
            static_cast<void>(read_request(client));
            client.send(garbage);
        });
        CHECK(answer.status == 0);
        CHECK(answer.fault == reply_fault::malformed);
    }
}

TEST_CASE("a reply over the limit: malformed, whether it announces its length or not") {
    const auto announced = ask(
        [](raw_connection& client) {
            static_cast<void>(read_request(client));
            client.send("HTTP/1.1 200 OK\r\nContent-Length: 5000000000\r\n\r\n");
            wait_for_end(client);
        },
        {.max_reply_bytes = 1000});
    CHECK(announced.fault == reply_fault::malformed);
    CHECK(announced.fault_text.find("limit of 1000 bytes") != std::string::npos);
    const auto endless = ask(
        [](raw_connection& client) {
            static_cast<void>(read_request(client));
            client.send("HTTP/1.1 200 OK\r\n\r\n");
            while (client.send(std::string(4096, 'x'))) {
            }
        },
        {.max_reply_bytes = 1000});
    CHECK(endless.fault == reply_fault::malformed);
    const auto exact = ask(
        [](raw_connection& client) {
            static_cast<void>(read_request(client));
            client.send(ok_reply(std::string(1000, 'x')));
        },
        {.max_reply_bytes = 1000});
    CHECK(exact.body.size() == 1000);
}

TEST_CASE("endless reply headers end the call") {
    const auto answer = ask([](raw_connection& client) {
        static_cast<void>(read_request(client));
        client.send("HTTP/1.1 200 OK\r\n");
        while (client.send("X-Header: " + std::string(1000, 'x') + "\r\n")) {
        }
    });
    CHECK(answer.fault == reply_fault::malformed);
}

TEST_CASE("a reply that trickles is held by the deadline, one that stalls by the read timeout") {
    const auto trickle = [](raw_connection& client) {
        static_cast<void>(read_request(client));
        client.send("HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n");
        while (client.send("x")) {
            std::this_thread::sleep_for(5ms);
        }
    };
    const auto slow = ask(trickle, {.read_timeout = 2s}, 100ms);
    CHECK(slow.fault == reply_fault::timed_out);
    CHECK(slow.fault_text.find("deadline") != std::string::npos);
    const auto stalled = ask(
        [](raw_connection& client) {
            static_cast<void>(read_request(client));
            client.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf");
            wait_for_end(client);
        },
        {.read_timeout = 50ms}, 5s);
    CHECK(stalled.fault == reply_fault::timed_out);
    CHECK(stalled.fault_text.find("limit on silence") != std::string::npos);
}

TEST_CASE("a server that answers before it has read the body is heard") {
    scripted_server server{[](raw_connection& client) {
        static_cast<void>(client.read_until("\r\n\r\n"));
        client.send(
            "HTTP/1.1 413 Payload Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
        wait_for_end(client);
    }};
    curl_client client{server.url()};
    const std::string big(64U << 20U, 'x');
    CHECK(client.exchange({.method = "POST", .target = "/a", .body = big}, soon()).status == 413);
}

TEST_CASE("a restarted server is met by the first POST after it") {
    weightwire::http::server<ok_handler>* live = nullptr;
    auto first = std::make_unique<weightwire::http::server<ok_handler>>(ok_handler{});
    live = first.get();
    live->start();
    const auto port = live->port();
    curl_client client{live->url()};
    CHECK(client.exchange({.method = "POST", .target = "/a", .body = "{}"}, soon()).status == 200);
    first.reset();
    weightwire::http::server second{ok_handler{}, {.port = port}};
    second.start();
    CHECK(client.exchange({.method = "POST", .target = "/a", .body = "{}"}, soon()).status == 200);
}

TEST_CASE("one dead server of three costs its deadline; the others have answered before") {
    weightwire::http::server first{ok_handler{}};
    weightwire::http::server second{ok_handler{}};
    first.start();
    second.start();
    scripted_server silent{wait_for_end};
    const std::vector<std::string> urls{first.url(), silent.url(), second.url()};
    weightwire::fan_out_sync_client client{weightwire::http_sync_clients(urls)};
    const auto replies = client.update({}, deadline::after(200ms));
    CHECK(replies.at(0).ok());
    CHECK(replies.at(1).answer.fault == reply_fault::timed_out);
    CHECK(replies.at(1).peer == silent.url());
    CHECK(replies.at(2).ok());
    CHECK(replies.at(0).answer.elapsed < replies.at(1).answer.elapsed);
}

TEST_CASE("a request that never ends is answered 408 and closed, and holds nobody else") {
    weightwire::http::server server{
        ok_handler{}, {.idle_timeout = 100ms, .header_timeout = 100ms, .body_timeout = 100ms}};
    server.start();
    auto header = raw_connection::to(server.port());
    auto trickling = raw_connection::to(server.port());
    auto body = raw_connection::to(server.port());
    auto chunk = raw_connection::to(server.port());
    auto idle = raw_connection::to(server.port());
    header.send("POST /a HT");
    trickling.send("POST /a HTTP/1.1\r\n");
    body.send("POST /a HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf");
    chunk.send("POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5");
    CHECK(curl_client{server.url()}.exchange({.target = "/health"}, soon()).status == 200);
    std::jthread trickle{[&trickling] {
        while (trickling.send("X: y\r\n") &&
               !weightwire::http::detail::has_hung_up(trickling.native())) {
            std::this_thread::sleep_for(5ms);
        }
    }};
    CHECK(status_line(header.read_to_end()) == "HTTP/1.1 408 Request Timeout");
    CHECK(status_line(body.read_to_end()) == "HTTP/1.1 408 Request Timeout");
    CHECK(status_line(chunk.read_to_end()) == "HTTP/1.1 408 Request Timeout");
    CHECK(idle.read_to_end().empty());
    CHECK(idle.closed());
    trickle.join();
    CHECK(status_line(trickling.read_to_end()) == "HTTP/1.1 408 Request Timeout");
}

TEST_CASE("what is no HTTP is answered 400 or 431 and closed") {
    weightwire::http::server server{ok_handler{}, {.max_header = 1024}};
    server.start();
    const auto reply_to = [&server](std::string_view bytes) {
        auto client = raw_connection::to(server.port());
        client.send(bytes);
        auto reply = client.read_to_end();
        CHECK(client.closed());
        return status_line(reply);
    };
    CHECK(reply_to("garbage\r\n\r\n") == "HTTP/1.1 400 Bad Request");
    CHECK(reply_to(std::string_view{"\0\1\2\3\r\n\r\n", 8}) == "HTTP/1.1 400 Bad Request");
    CHECK(reply_to("GET relative HTTP/1.1\r\n\r\n") == "HTTP/1.1 400 Bad Request");
    CHECK(reply_to("GET / HTTP/3.0\r\n\r\n") == "HTTP/1.1 400 Bad Request");
    CHECK(reply_to("GET / HTTP/1.1\r\nno colon\r\n\r\n") == "HTTP/1.1 400 Bad Request");
    CHECK(reply_to("POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n") == "HTTP/1.1 400 Bad Request");
    CHECK(reply_to("POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n") ==
          "HTTP/1.1 400 Bad Request");
    CHECK(reply_to("POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab") ==
          "HTTP/1.1 400 Bad Request");
    CHECK(reply_to("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n") ==
          "HTTP/1.1 400 Bad Request");
    CHECK(reply_to("GET /" + std::string(2000, 'x') + " HTTP/1.1\r\n\r\n") ==
          "HTTP/1.1 431 Request Header Fields Too Large");

    CHECK(curl_client{server.url()}.exchange({.target = "/"}, soon()).status == 200);
}

TEST_CASE("a server whose descriptors are used up says so, and serves again when some are free") {
    tests::forked process{[](tests::channel& parent) {
        weightwire::http::server server{ok_handler{}};
        server.start();
        parent.put(server.port());
        std::optional<test_support::no_descriptors> none;
        for (;;) {
            parent.take<char>() == 'n' ? static_cast<void>(none.emplace()) : none.reset();
            parent.put('d');
        }
    }};
    const auto url = "http://127.0.0.1:" + std::to_string(process.to().take<std::uint16_t>());
    const auto tell = [&process](char what) {
        process.to().put(what);
        REQUIRE(process.to().take<char>() == 'd');
    };
    curl_client early{url};
    CHECK(early.exchange({.target = "/"}, soon()).status == 200);
    tell('n');
    CHECK(early.exchange({.target = "/"}, soon()).status == 200);  // it has its connection
    for (int i = 0; i < 3; ++i) {
        CAPTURE(i);
        const auto answer = curl_client{url}.exchange({.target = "/"}, soon());
        CHECK(answer.status == 503);
        CHECK(answer.body.find("resource: this server's process may open no more files") !=
              std::string::npos);
    }
    tell('f');
    CHECK(curl_client{url}.exchange({.target = "/"}, soon()).status == 200);
}

TEST_CASE("a server for which no descriptor is left says to raise the limit") {
    try {
        const test_support::no_descriptors none;
        const weightwire::http::server server{ok_handler{}};
        FAIL("there is no descriptor");
    } catch (const weightwire::resource_error& refused) {
        CHECK(refused.text().find("raise the limit of open files") != std::string::npos);
        CHECK(refused.context().native_code == EMFILE);
    }
}

TEST_CASE("a request with thousands of header fields is served, and the next one too") {
    weightwire::http::server server{ok_handler{}};
    server.start();
    std::string request = "GET / HTTP/1.1\r\n";
    for (int i = 0; i < 3000; ++i) {
        request += "a:b\r\n";
    }
    auto client = raw_connection::to(server.port());
    for (int i = 0; i < 3; ++i) {
        client.send(request + "\r\n");
        CHECK(client.read_until("{}").starts_with("HTTP/1.1 200 OK"));
    }
}

TEST_CASE("an announced length that never comes takes no memory for it") {
    weightwire::http::server server{ok_handler{}};
    server.start();
    std::vector<raw_connection> clients;
    for (int i = 0; i < 16; ++i) {
        clients.push_back(raw_connection::to(server.port()));
        clients.back().send("POST /update_weights HTTP/1.1\r\nContent-Length: 268435456\r\n\r\n{");
    }
    CHECK(curl_client{server.url()}.exchange({.target = "/health"}, soon()).status == 200);
    server.stop(soon());
}

TEST_CASE("a client that does not take its reply is let go") {
    struct talker {
        http_response handle(const http_request&) const {
            return {.body = std::string(64U << 20U, 'x')};
        }
    };
    weightwire::http::server server{talker{}, {.reply_timeout = 100ms}};
    server.start();
    auto client = raw_connection::to(server.port());
    client.send("GET / HTTP/1.1\r\n\r\n");
    std::this_thread::sleep_for(300ms);
    server.stop(soon());  // nothing is left to wait for
    CHECK(client.read(16).starts_with("HTTP/1.1 200 OK"));
}
