// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/http/curl_client.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/server.hpp>
#include <weightwire/http/worker_server.hpp>

#include "../support/scripted_server.hpp"

using namespace std::chrono_literals;
using weightwire::deadline;
using weightwire::http_request;
using weightwire::http_response;
using weightwire::http::curl_client;
using weightwire_tests::raw_connection;

namespace {

deadline soon() { return deadline::after(5s); }

/// Says back what it was asked.
struct echo {
    http_response handle(const http_request& request) const {
        std::string text{request.method};
        for (const auto part : {request.path, request.query, request.content_type,
                                request.authorization, request.body}) {
            text.append("|").append(part);
        }
        return {.content_type = "text/plain", .body = text};
    }
};

/// Blocks in `/block` until its stop token is requested.
struct blocking {
    http_response handle(const http_request& request) {
        if (request.path != "/block") {
            return {.body = "{}"};
        }
        std::mutex mutex;
        std::condition_variable_any changed;
        std::unique_lock lock{mutex};
        ++entered;
        const bool stopped = !changed.wait_for(lock, request.stop, 20s, [] { return false; }) &&
                             request.stop.stop_requested();
        client_was_waiting = request.client_is_waiting();
        ++(stopped ? left_by_stop : left_by_time);
        return {.body = "{}"};
    }
    void wait_until_entered(int count) const {
        for (const auto until = soon(); entered < count && !until.expired();) {
            std::this_thread::sleep_for(1ms);
        }
        REQUIRE(entered == count);
    }
    std::atomic<int> entered{0};
    std::atomic<int> left_by_stop{0};
    std::atomic<int> left_by_time{0};
    std::atomic<bool> client_was_waiting{false};
};

std::string head_of(std::string_view text) {
    return std::string{text.substr(0, text.find("\r\n"))};
}

}  // namespace

TEST_CASE("a handler sees the parts of the request") {
    weightwire::http::server server{echo{}};
    server.start();
    curl_client client{server.url(), {.token = "t"}};
    CHECK(client.exchange({.method = "POST", .target = "/a/b?x=1&y=2", .body = "body"}, soon())
              .body == "POST|/a/b|x=1&y=2|application/json|Bearer t|body");
    CHECK(client.exchange({.target = "/a"}, soon()).body == "GET|/a|||Bearer t|");
}

TEST_CASE("port 0 is a port of its own, and url() reaches it") {
    weightwire::http::server first{echo{}};
    weightwire::http::server second{echo{}, {.address = "0.0.0.0"}};
    CHECK(first.port() != 0);
    CHECK(first.port() != second.port());
    CHECK(first.url() == "http://127.0.0.1:" + std::to_string(first.port()));
    second.start();
    CHECK(curl_client{second.url()}.exchange({.target = "/"}, soon()).status == 200);
}

TEST_CASE("a port in use is an error that names address and port") {
    weightwire::http::server first{echo{}};
    try {
        weightwire::http::server second{echo{}, {.port = first.port()}};
        FAIL("two servers have one port");
    } catch (const weightwire::resource_error& error) {
        CHECK(error.context().peer == "127.0.0.1:" + std::to_string(first.port()));
        CHECK(error.context().native_code == EADDRINUSE);
        CHECK(error.text().find("is in use") != std::string::npos);
    }
    CHECK_THROWS_AS((weightwire::http::server{echo{}, {.address = "192.0.2.1"}}),
                    weightwire::resource_error);
    CHECK_THROWS_AS((weightwire::http::server{echo{}, {.address = "no such address"}}),
                    weightwire::resource_error);
}

TEST_CASE("an option out of range is refused") {
    CHECK_THROWS_AS((weightwire::http::server{echo{}, {.max_connections = 0}}),
                    weightwire::usage_error);
    CHECK_THROWS_AS((weightwire::http::server{echo{}, {.max_header = 1U << 20U}}),
                    weightwire::usage_error);
    weightwire::http::server server{echo{}};
    server.start();
    CHECK_THROWS_AS(server.start(), weightwire::usage_error);
}

TEST_CASE("IPv6 loopback works where the machine has it") {
    try {
        weightwire::http::server server{echo{}, {.address = "::1"}};
        server.start();
        CHECK(server.url() == "http://[::1]:" + std::to_string(server.port()));
        CHECK(curl_client{server.url()}.exchange({.target = "/"}, soon()).status == 200);
    } catch (const weightwire::resource_error& error) {
        MESSAGE("no IPv6 on this machine: " << error.what());
    }
}

TEST_CASE("requests on one connection share its thread until the client asks to close") {
    weightwire::http::server server{echo{}};
    server.start();
    auto client = raw_connection::to(server.port());
    client.send("GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\n");
    CHECK(client.read_until("GET|/1||||").starts_with("HTTP/1.1 200 OK\r\n"));
    CHECK(client.read_until("GET|/2||||").find("keep-alive") != std::string::npos);
    client.send("GET /3 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    CHECK(client.read_to_end().find("Connection: close\r\n\r\nGET|/3||||") != std::string::npos);
    CHECK(client.closed());
    auto old = raw_connection::to(server.port());
    old.send("GET /4 HTTP/1.0\r\n\r\n");
    CHECK(old.read_to_end().ends_with("GET|/4||||"));
    CHECK(old.closed());
}

TEST_CASE("a HEAD reply has the length and no body") {
    weightwire::http::server server{echo{}};
    server.start();
    auto client = raw_connection::to(server.port());
    client.send("HEAD /1 HTTP/1.1\r\nConnection: close\r\n\r\n");
    const auto reply = client.read_to_end();
    CHECK(reply.find("Content-Length: 11\r\n") != std::string::npos);
    CHECK(reply.ends_with("\r\n\r\n"));
}

TEST_CASE("a body in chunks arrives whole") {
    weightwire::http::server server{echo{}};
    server.start();
    auto client = raw_connection::to(server.port());
    client.send("POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
    std::this_thread::sleep_for(10ms);
    client.send("4");
    std::this_thread::sleep_for(10ms);
    client.send("\r\ndefg\r\n0\r\n\r\n");
    CHECK(client.read_until("abcdefg").find("POST|/c|||") != std::string::npos);
}

TEST_CASE("a transfer encoding other than chunked is refused, and what follows is no request") {
    weightwire::http::server server{echo{}};
    server.start();
    for (const auto* encoding : {"gzip", "gzip, chunked", "identity", "chunked, gzip", "",
                                 "gzip\r\nTransfer-Encoding: x"}) {
        CAPTURE(encoding);
        auto client = raw_connection::to(server.port());
        client.send(std::string{"POST /c HTTP/1.1\r\nTransfer-Encoding: "} + encoding +
                    "\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n");
        const auto reply = client.read_to_end();
        const auto head = head_of(reply);
        CHECK((head == "HTTP/1.1 501 Not Implemented" || head == "HTTP/1.1 400 Bad Request"));
        CHECK(reply.find("{\"error\":{\"message\":\"") != std::string::npos);
        CHECK(reply.find("smuggled") == std::string::npos);
        CHECK(client.closed());
    }
    auto client = raw_connection::to(server.port());
    client.send("POST /c HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n");
    CHECK(client.read_until("|ab").starts_with("HTTP/1.1 200"));
}

TEST_CASE("a connection without a request ends after header_timeout, one between two later") {
    weightwire::http::server server{echo{}, {.idle_timeout = 20s, .header_timeout = 50ms}};
    server.start();
    auto used = raw_connection::to(server.port());
    used.send("GET /1 HTTP/1.1\r\n\r\n");
    CHECK(used.read_until("GET|/1||||").starts_with("HTTP/1.1 200"));
    auto silent = raw_connection::to(server.port());
    const auto begin = std::chrono::steady_clock::now();
    CHECK(silent.read_to_end().empty());
    CHECK(silent.closed());
    CHECK(std::chrono::steady_clock::now() - begin < 4s);
    std::this_thread::sleep_for(100ms);
    used.send("GET /2 HTTP/1.1\r\n\r\n");
    CHECK(used.read_until("GET|/2||||").find("HTTP/1.1 200") != std::string::npos);
}

TEST_CASE("a client that expects 100-continue is asked for its body once") {
    weightwire::http::server server{echo{}};
    server.start();
    auto client = raw_connection::to(server.port());
    client.send("POST /e HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-Continue\r\n\r\n");
    CHECK(client.read_until("\r\n\r\n") == "HTTP/1.1 100 Continue\r\n\r\n");
    client.send("body");
    CHECK(client.read_until("body").starts_with("HTTP/1.1 200"));
    client.send("POST /e HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\nhere");
    CHECK(client.read_until("here").starts_with("HTTP/1.1 200"));
    client.send("POST /e HTTP/1.1\r\nContent-Length: 4\r\nExpect: magic\r\n\r\n");
    CHECK(head_of(client.read_to_end()) == "HTTP/1.1 417 Expectation Failed");
}

TEST_CASE("a token is required by every route but the health check") {
    weightwire::http::server server{echo{}, {.token = "right"}};
    server.start();
    const auto status = [&](std::string token, std::string_view method, std::string_view target) {
        curl_client client{server.url(), {.token = std::move(token)}};
        return client.exchange({.method = method, .target = target}, soon());
    };
    CHECK(status("right", "POST", "/pause").status == 200);
    CHECK(status("", "GET", "/health").status == 200);
    for (const auto* wrong : {"", "wrong", "righ", "rightt", "RIGHT"}) {
        CAPTURE(wrong);
        const auto answer = status(wrong, "POST", "/pause");
        CHECK(answer.status == 401);
        CHECK(answer.body ==
              "{\"error\":{\"message\":\"usage: this server requires its token: "
              "client_options::token in C++, --token of the programs, else a header "
              "Authorization: Bearer ...\",\"type\":\"Unauthorized\",\"param\":null,"
              "\"code\":401}}");
    }
    CHECK(status("", "POST", "/health").status == 401);
    auto client = raw_connection::to(server.port());
    client.send("GET /a HTTP/1.1\r\nAuthorization: bearer right\r\n\r\n");
    CHECK(head_of(client.read_until("\r\n\r\n")) == "HTTP/1.1 200 OK");
}

TEST_CASE("secrets are compared whole") {
    using weightwire::http::detail::same_secret;
    CHECK(same_secret("abc", "abc"));
    CHECK_FALSE(same_secret("abcabc", "abc"));
    CHECK_FALSE(same_secret("", "abc"));
    CHECK_FALSE(same_secret("abd", "abc"));
}

TEST_CASE("a body over the limit is refused by its length, one under it is taken") {
    weightwire::http::server server{echo{}, {.max_update_body = 20U << 20U, .max_body = 1000}};
    server.start();
    curl_client client{server.url()};
    const std::string big(20U << 20U, 'b');
    CHECK(client.exchange({.method = "POST", .target = "/update_weights", .body = big}, soon())
              .body.size() > big.size());
    const auto refused =
        client.exchange({.method = "POST", .target = "/pause", .body = big}, soon());
    CHECK(refused.status == 413);
    CHECK(refused.body.find("\"type\":\"Payload Too Large\"") != std::string::npos);
    const std::string small(1001, 's');
    CHECK(client.exchange({.method = "POST", .target = "/pause", .body = small}, soon()).status ==
          413);
    CHECK(client
              .exchange(
                  {.method = "POST", .target = "/pause", .body = std::string_view{small}.substr(1)},
                  soon())
              .status == 200);
}

TEST_CASE("a body over the limit is refused before a client that asks first sends it") {
    weightwire::http::server server{echo{}};
    server.start();
    auto client = raw_connection::to(server.port());
    client.send("POST /pause HTTP/1.1\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n");
    CHECK(head_of(client.read_to_end()) == "HTTP/1.1 413 Payload Too Large");
}

TEST_CASE("a body in chunks meets the limit too") {
    weightwire::http::server server{echo{}, {.max_body = 8}};
    server.start();
    auto client = raw_connection::to(server.port());
    client.send(
        "POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n5\r\nabcde\r\n");
    CHECK(head_of(client.read_to_end()) == "HTTP/1.1 413 Payload Too Large");
}

TEST_CASE("what a handler throws is a 500 with its words in the envelope") {
    struct thrower {
        http_response handle(const http_request& request) const {
            if (request.path == "/other") {
                throw 1;
            }
            throw weightwire::data_error{"a \"quoted\" word", {.tensor = "w"}};
        }
    };
    weightwire::http::server server{thrower{}};
    server.start();
    curl_client client{server.url()};
    const auto answer = client.exchange({.target = "/"}, soon());
    CHECK(answer.status == 500);
    CHECK(answer.body ==
          "{\"error\":{\"message\":\"data [tensor w]: a \\\"quoted\\\" word\",\"type\":\"Internal "
          "Server Error\",\"param\":null,\"code\":500}}");
    CHECK(client.exchange({.target = "/other"}, soon()).status == 500);
}

TEST_CASE("a blocked handler delays no other connection") {
    blocking handler;
    weightwire::http::server server{handler};
    server.start();
    std::jthread blocked{[&] {
        const auto answer = curl_client{server.url()}.exchange(
            {.method = "POST", .target = "/block"}, deadline::after(20s));
        CHECK(answer.fault != weightwire::reply_fault::timed_out);
    }};
    handler.wait_until_entered(1);
    curl_client other{server.url()};
    CHECK(other.exchange({.target = "/health"}, soon()).status == 200);
    CHECK(other
              .exchange({.method = "POST", .target = "/init_weight_transfer_engine", .body = "{}"},
                        soon())
              .status == 200);
    CHECK(handler.left_by_stop == 0);
    server.stop(soon());
    CHECK(handler.left_by_stop == 1);
}

TEST_CASE("stopping the server stops its handlers; their clients still wait and get the reply") {
    blocking handler;
    weightwire::http::server server{handler};
    server.start();
    std::jthread blocked{[&] {
        CHECK(curl_client{server.url()}
                  .exchange({.method = "POST", .target = "/block"}, soon())
                  .status == 200);
    }};
    handler.wait_until_entered(1);
    auto idle = raw_connection::to(server.port());
    server.stop(soon());
    CHECK(handler.client_was_waiting);
    CHECK(idle.read_to_end().empty());
    CHECK(idle.closed());
    CHECK(curl_client{server.url()}.exchange({.target = "/"}, soon()).fault ==
          weightwire::reply_fault::unreachable);
    server.stop(soon());
}

TEST_CASE("a handler that does not heed the stop is named, and costs the deadline only") {
    struct stubborn {
        std::atomic<bool> entered{false};
        std::atomic<bool> release{false};
        std::atomic<bool> left{false};
        http_response handle(const http_request&) {
            entered = true;
            release.wait(false);
            left = true;
            return {};
        }
    } handler;
    {
        weightwire::http::server server{handler};
        server.start();
        auto client = raw_connection::to(server.port());
        client.send("GET / HTTP/1.1\r\n\r\n");
        for (const auto until = soon(); !handler.entered && !until.expired();) {
            std::this_thread::sleep_for(1ms);
        }
        REQUIRE(handler.entered);
        CHECK_THROWS_AS(server.stop(deadline::after(20ms)), weightwire::timeout_error);
    }
    CHECK_FALSE(handler.left);  // the destructor waited for it no longer than a second
    handler.release = true;
    handler.release.notify_all();
    for (const auto until = soon(); !handler.left && !until.expired();) {
        std::this_thread::sleep_for(1ms);
    }
    CHECK(handler.left);
    std::this_thread::sleep_for(50ms);  // its thread ends
}

TEST_CASE("a client that hangs up stops its handler, which sees that nobody waits") {
    blocking handler;
    weightwire::http::server server{handler};
    server.start();
    for (const bool reset : {false, true}) {
        CAPTURE(reset);
        const int before = handler.left_by_stop;
        auto client = raw_connection::to(server.port());
        client.send("POST /block HTTP/1.1\r\nContent-Length: 0\r\n\r\n");
        handler.wait_until_entered(before + 1);
        handler.client_was_waiting = true;
        reset ? client.reset() : client.close();
        for (const auto until = soon(); handler.left_by_stop == before && !until.expired();) {
            std::this_thread::sleep_for(1ms);
        }
        CHECK(handler.left_by_stop == before + 1);
        CHECK_FALSE(handler.client_was_waiting);
    }
    CHECK(handler.left_by_time == 0);
}

TEST_CASE("a client's deadline and its stop end the handler on the server") {
    blocking handler;
    weightwire::http::server server{handler};
    server.start();
    curl_client client{server.url()};
    CHECK(client.exchange({.method = "POST", .target = "/block"}, deadline::after(50ms)).fault ==
          weightwire::reply_fault::timed_out);
    std::stop_source source;
    std::jthread stopper{[&] {
        handler.wait_until_entered(2);
        source.request_stop();
    }};
    CHECK(
        client.exchange({.method = "POST", .target = "/block"}, soon(), source.get_token()).fault ==
        weightwire::reply_fault::cancelled);
    for (const auto until = soon(); handler.left_by_stop < 2 && !until.expired();) {
        std::this_thread::sleep_for(1ms);
    }
    CHECK(handler.left_by_stop == 2);
    CHECK(client.exchange({.target = "/"}, soon()).status == 200);
}

TEST_CASE("more clients than allowed are told so, and served once there is room") {
    weightwire::http::server server{echo{}, {.max_connections = 2}};
    server.start();
    auto first = raw_connection::to(server.port());
    auto second = raw_connection::to(server.port());
    for (auto* each : {&first, &second}) {
        each->send("GET /1 HTTP/1.1\r\n\r\n");
        CHECK(each->read_until("GET|/1||||").starts_with("HTTP/1.1 200"));
    }
    curl_client third{server.url()};
    const auto answer = third.exchange({.target = "/"}, soon());
    CHECK(answer.status == 503);
    CHECK(answer.body.find("resource: ") != std::string::npos);
    first.close();
    int status = 0;
    for (const auto until = soon(); status != 200 && !until.expired();) {
        status = third.exchange({.target = "/"}, soon()).status;
    }
    CHECK(status == 200);
}

TEST_CASE("worker_server says at start who can speak to it") {
    echo service;
    weightwire::worker_server open{service};
    open.start();
    CHECK(open.description() ==
          "serving on " + open.url() + "; any process of this machine may send weights");
    CHECK(&open.service() == &service);
    weightwire::worker_server closed{echo{}, {.address = "0.0.0.0", .token = "t"}};
    CHECK(closed.description().find("vLLM's Python client, which sends none, cannot drive") !=
          std::string::npos);
    CHECK(closed.description().find("bound to 0.0.0.0") != std::string::npos);
    weightwire::http_sync_client client{open.url()};
    CHECK(client.health(soon()).at(0).ok());
    open.stop(soon());
}
