// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/http/curl_client.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/url.hpp>

#include "../support/no_descriptors.hpp"
#include "../support/scripted_server.hpp"

using namespace std::chrono_literals;
using weightwire::deadline;
using weightwire::reply_fault;
using weightwire::http::curl_client;
using weightwire_tests::ok_reply;
using weightwire_tests::raw_connection;
using weightwire_tests::read_request;
using weightwire_tests::scripted_server;

namespace {

deadline soon() { return deadline::after(5s); }

}  // namespace

TEST_CASE("a server address is normalized once and refused where it is none") {
    using weightwire::http::parse_base_url;
    CHECK(parse_base_url("http://example.org:8000/").text == "http://example.org:8000");
    CHECK(parse_base_url("http://example.org/prefix//").text == "http://example.org/prefix");
    CHECK(parse_base_url("https://example.org").secure);
    CHECK(parse_base_url("http://[::1]:8000").host == "::1");
    CHECK(parse_base_url("http://[::1]:8000").text == "http://[::1]:8000");
    for (const auto* local :
         {"http://localhost:1", "http://127.0.0.1:1", "http://127.9.9.9:1", "http://[::1]:1"}) {
        CHECK(parse_base_url(local).loopback);
    }
    CHECK_FALSE(parse_base_url("http://127.example.org").loopback);
    CHECK_FALSE(parse_base_url("http://10.0.0.1").loopback);
    for (const auto* wrong : {"", "localhost:8000", "ftp://example.org", "http://", "http://a b",
                              "http://user:secret@example.org", "http://example.org/?a=b",
                              "http://example.org:99999", "http://example.org/#x"}) {
        CAPTURE(wrong);
        CHECK_THROWS_AS(static_cast<void>(parse_base_url(wrong)), weightwire::usage_error);
    }
    try {
        static_cast<void>(parse_base_url("http://user:secret@example.org"));
    } catch (const weightwire::usage_error& refused) {
        CHECK(std::string{refused.what()}.find("secret") == std::string::npos);
    }
}

TEST_CASE("a connection for which no descriptor is left says to raise the limit") {
    scripted_server server{[](raw_connection&) {}};
    curl_client client{server.url()};
    const auto answer = [&] {
        const test_support::no_descriptors none;
        return client.exchange({.target = "/"}, soon());
    }();
    CHECK(answer.fault == reply_fault::unreachable);
    CHECK(answer.fault_text.find("raise the limit of open files") != std::string::npos);
    static_cast<void>(raw_connection::to(server.port()));  // the script's one client
}

TEST_CASE("a POST carries its body, content type and token, and no Expect") {
    std::string seen;
    std::string reply;
    {
        scripted_server server{[&seen](raw_connection& client) {
            seen = read_request(client);
            client.send(ok_reply("{\"a\":1}"));
        }};
        curl_client client{server.url() + "/base/", {.token = "key-1"}};
        const auto answer = client.exchange(
            {.method = "POST", .target = "/update_weights?x=1", .body = "{}"}, soon());
        CHECK(answer.status == 200);
        CHECK(answer.fault == reply_fault::none);
        CHECK(answer.elapsed > 0ns);
        reply = answer.body;
    }
    CHECK(reply == "{\"a\":1}");
    CHECK(seen.starts_with("POST /base/update_weights?x=1 HTTP/1.1\r\n"));
    CHECK(seen.ends_with("\r\n\r\n{}"));
    CHECK(seen.find("Content-Type: application/json\r\n") != std::string::npos);
    CHECK(seen.find("Authorization: Bearer key-1\r\n") != std::string::npos);
    CHECK(seen.find("User-Agent: weightwire/") != std::string::npos);
    CHECK(seen.find("Expect") == std::string::npos);
}

TEST_CASE("a large body is sent without waiting to be asked for it") {
    std::string seen;
    {
        scripted_server server{[&seen](raw_connection& client) {
            seen = read_request(client);
            client.send(ok_reply(""));
        }};
        curl_client client{server.url()};
        const std::string body(3U << 20U, 'x');
        CHECK(client.exchange({.method = "POST", .target = "/", .body = body}, soon()).status ==
              200);
    }
    CHECK(seen.find("Expect") == std::string::npos);
    CHECK(seen.size() > (3U << 20U));
}

TEST_CASE("a POST without a body has length 0 and no content type") {
    std::string seen;
    {
        scripted_server server{[&seen](raw_connection& client) {
            seen = read_request(client);
            client.send(ok_reply(""));
        }};
        curl_client client{server.url()};
        CHECK(client.exchange({.method = "POST", .target = "/resume"}, soon()).status == 200);
    }
    CHECK(seen.find("Content-Length: 0\r\n") != std::string::npos);
    CHECK(seen.find("Content-Type") == std::string::npos);
}

TEST_CASE("one connection serves many calls, whatever their method") {
    scripted_server server{[](raw_connection& client) {
        for (int i = 0; i < 6; ++i) {
            if (read_request(client).empty()) {
                return;
            }
            client.send(ok_reply("{}"));
        }
    }};
    curl_client first{server.url()};
    for (int i = 0; i < 3; ++i) {
        CHECK(first.exchange({.method = "POST", .target = "/a", .body = "{}"}, soon()).status ==
              200);
    }
    curl_client client = std::move(first);  // the connection moves along
    for (int i = 0; i < 3; ++i) {
        CHECK(client.exchange({.target = "/b"}, soon()).status == 200);
    }
    CHECK(server.accepted() == 1);
}

TEST_CASE("a connection that the server closed while it was idle is replaced before it is used") {
    int requests = 0;
    {
        scripted_server server{[&requests](raw_connection& client) {
            if (!read_request(client).empty()) {
                ++requests;
                client.send(ok_reply("{}"));
            }
        }};
        curl_client client{server.url()};
        for (int i = 0; i < 5; ++i) {
            CHECK(
                client.exchange({.method = "POST", .target = "/a", .body = "{}"}, soon()).status ==
                200);
            std::this_thread::sleep_for(20ms);  // the script returns and closes
        }
        CHECK(server.accepted() == 5);
    }
    CHECK(requests == 5);
}

TEST_CASE("a POST is sent once even when its reused connection ends without a reply") {
    int requests = 0;
    {
        scripted_server server{[&requests](raw_connection& client) {
            static_cast<void>(read_request(client));
            ++requests;
            client.send(ok_reply("{}"));
            if (!read_request(client).empty()) {
                ++requests;  // and no answer
            }
        }};
        curl_client client{server.url()};
        CHECK(client.exchange({.method = "POST", .target = "/a", .body = "{}"}, soon()).status ==
              200);
        const auto answer =
            client.exchange({.method = "POST", .target = "/a", .body = "{}"}, soon());
        CHECK(answer.status == 0);
        CHECK(answer.fault == reply_fault::closed);
        CHECK(answer.fault_text.find("not sent again") != std::string::npos);
        CHECK(server.accepted() == 1);
    }
    CHECK(requests == 2);
}

TEST_CASE("a GET is repeated once when its reused connection ends without a reply") {
    int requests = 0;
    {
        scripted_server server{[&requests](raw_connection& client) {
            static_cast<void>(read_request(client));
            if (++requests == 3) {
                client.send(ok_reply("repeated"));
                return;
            }
            client.send(ok_reply("{}"));
            if (!read_request(client).empty()) {
                ++requests;
            }
        }};
        curl_client client{server.url()};
        CHECK(client.exchange({.target = "/a"}, soon()).status == 200);
        CHECK(client.exchange({.target = "/a"}, soon()).body == "repeated");
        CHECK(server.accepted() == 2);
    }
    CHECK(requests == 3);
}

TEST_CASE("a repeat that finds no server any more is an unreachable one, not a bad reply") {
    CHECK(weightwire::http::detail::fault_of(CURLE_COULDNT_CONNECT, true) ==
          reply_fault::unreachable);
    CHECK(weightwire::http::detail::fault_of(CURLE_COULDNT_RESOLVE_HOST, true) ==
          reply_fault::unreachable);
    CHECK(weightwire::http::detail::fault_of(CURLE_RECV_ERROR, true) == reply_fault::closed);
    CHECK(weightwire::http::detail::fault_of(CURLE_WEIRD_SERVER_REPLY, true) ==
          reply_fault::malformed);
    CHECK(weightwire::http::detail::fault_of(CURLE_WEIRD_SERVER_REPLY, false) ==
          reply_fault::unreachable);
}

TEST_CASE("a refused connection says to start the worker first") {
    std::string url;
    {
        scripted_server gone{[](raw_connection&) {}};
        url = gone.url();
    }
    curl_client client{url};
    const auto answer = client.exchange({.method = "GET", .target = "/version"}, soon());
    CHECK(answer.fault == reply_fault::unreachable);
    CHECK_MESSAGE(answer.fault_text.find("nothing listens there: start the worker first") !=
                      std::string::npos,
                  answer.fault_text);
}

TEST_CASE("redirects are not followed and statuses are handed on") {
    scripted_server server{[](raw_connection& client) {
        static_cast<void>(read_request(client));
        client.send("HTTP/1.1 307 Temporary Redirect\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n");
    }};
    curl_client client{server.url()};
    CHECK(client.exchange({.method = "POST", .target = "/a", .body = "{}"}, soon()).status == 307);
    CHECK(server.accepted() == 1);
}

TEST_CASE("the environment's proxy is not asked for a loopback address") {
    scripted_server server{[](raw_connection& client) {
        CHECK(read_request(client).starts_with("GET /a HTTP/1.1"));
        client.send(ok_reply("{}"));
    }};
    ::setenv("http_proxy", "http://127.0.0.1:9", 1);
    curl_client client{server.url()};
    const auto answer = client.exchange({.target = "/a"}, soon());
    ::unsetenv("http_proxy");
    CHECK(answer.status == 200);
}

TEST_CASE("what cannot be sent is a usage error, not a reply") {
    curl_client client{"http://127.0.0.1:9"};
    using call = weightwire::http_call;
    for (const auto& wrong :
         {call{.method = "PUT", .target = "/"}, call{.target = "no-slash"}, call{.target = ""},
          call{.target = "/a b"}, call{.target = "/a\r\nX: y"},
          call{.method = "POST", .target = "/", .content_type = "a\r\nb", .body = "x"}}) {
        CHECK_THROWS_AS(static_cast<void>(client.exchange(wrong, soon())), weightwire::usage_error);
    }
    CHECK_THROWS_AS((curl_client{"http://127.0.0.1:9", {.token = "a\r\nb"}}),
                    weightwire::usage_error);
    CHECK_THROWS_AS((curl_client{"http://127.0.0.1:9", {.connect_timeout = 0ms}}),
                    weightwire::usage_error);
}

TEST_CASE("http_sync_client spells the routes and always gives start a body") {
    std::vector<std::string> heads;
    {
        scripted_server server{[&heads](raw_connection& client) {
            for (;;) {
                auto request = read_request(client);
                if (request.empty()) {
                    return;
                }
                const auto line = request.substr(0, request.find(" HTTP"));
                heads.push_back(line + " " + request.substr(request.find("\r\n\r\n") + 4));
                client.send(ok_reply("{}"));
            }
        }};
        weightwire::http_sync_client client{server.url()};
        CHECK(client.peer_count() == 1);
        CHECK(client.peer_name(0) == server.url());
        const std::string_view body = "{\"b\":1}";
        const weightwire::control_message message{.bodies = {&body, 1}};
        CHECK(client.init(message, soon()).at(0).ok());
        CHECK(client.start({}, soon()).at(0).ok());
        CHECK(client.start(message, soon()).at(0).ok());
        CHECK(client.update(message, soon()).at(0).ok());
        CHECK(client.finish(message, soon()).at(0).ok());
        CHECK(client.pause(weightwire::pause_mode::keep, true, soon()).at(0).ok());
        CHECK(client.resume(soon()).at(0).ok());
        CHECK(client.is_paused(soon()).at(0).ok());
        CHECK(client.weight_info(soon()).at(0).ok());
        CHECK(client.update_weight_version(message, soon()).at(0).ok());
        CHECK(client.weight_checker(message, soon()).at(0).ok());
        CHECK(client.health(soon()).at(0).ok());
        CHECK(client.version(soon()).at(0).ok());
        CHECK(client.world_size(false, soon()).at(0).ok());
    }
    const std::vector<std::string> expected{
        "POST /init_weight_transfer_engine {\"b\":1}",
        "POST /start_weight_update {}",
        "POST /start_weight_update {\"b\":1}",
        "POST /update_weights {\"b\":1}",
        "POST /finish_weight_update {\"b\":1}",
        "POST /pause?mode=keep&clear_cache=true ",
        "POST /resume ",
        "GET /is_paused ",
        "GET /weight_info ",
        "POST /update_weight_version {\"b\":1}",
        "POST /weight_checker {\"b\":1}",
        "GET /health ",
        "GET /version ",
        "GET /get_world_size?include_dp=false ",
    };
    CHECK(heads == expected);
}

TEST_CASE("http_sync_client leaves out a masked peer and refuses a message for others") {
    weightwire::http_sync_client client{"http://127.0.0.1:9"};
    const unsigned char none[] = {0};
    CHECK(client.update({.only = none}, soon()).at(0).answer.fault == reply_fault::left_out);
    const std::string_view two[] = {"a", "b"};
    CHECK_THROWS_AS(static_cast<void>(client.update({.bodies = two}, soon())),
                    weightwire::usage_error);
    const unsigned char mask[] = {1, 1};
    CHECK_THROWS_AS(static_cast<void>(client.update({.only = mask}, soon())),
                    weightwire::usage_error);
}
