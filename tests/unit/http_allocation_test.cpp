// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/http/curl_client.hpp>
#include <weightwire/http/server.hpp>

#include "../support/allocations.hpp"
#include "../support/scripted_server.hpp"

using namespace std::chrono_literals;
using weightwire::deadline;
using weightwire::http_request;
using weightwire::http_response;
using weightwire_tests::allocations;
using weightwire_tests::raw_connection;

namespace {

/// Notes what its thread allocated since the handler was left before: replying, receiving and
/// dispatching.
struct counting {
    http_response handle(const http_request& request) {
        const auto now = allocations();
        const std::lock_guard lock{mutex};
        between.push_back(now - last);
        sizes.push_back(request.body.size());
        waits = waits && request.client_is_waiting() && !request.stop.stop_requested();
        last = allocations();
        return {};
    }
    std::mutex mutex;
    std::vector<std::uint64_t> between;
    std::vector<std::size_t> sizes;
    std::uint64_t last = 0;
    bool waits = true;
};

void check_from_third(const counting& handler, std::size_t requests) {
    REQUIRE(handler.between.size() == requests);
    CHECK(handler.waits);
    for (std::size_t i = 2; i < requests; ++i) {
        CAPTURE(i);
        CHECK(handler.between[i] == 0);
    }
}

}  // namespace

TEST_CASE("the count sees an allocation" * doctest::skip(!weightwire_tests::counts_allocations)) {
    const auto before = allocations();
    const std::vector<int> some(100);
    CHECK(allocations() > before);
}

TEST_CASE("from the third request of a size on, receiving and dispatching allocate nothing") {
    for (const std::size_t size :
         {std::size_t{64}, std::size_t{3} << 20U, std::size_t{20} << 20U}) {
        CAPTURE(size);
        counting handler;
        weightwire::http::server server{handler, {.token = "a-token-longer-than-a-short-string"}};
        server.start();
        weightwire::http::curl_client client{server.url(),
                                             {.token = "a-token-longer-than-a-short-string"}};
        const std::string body(size, 'x');
        for (int i = 0; i < 6; ++i) {
            CHECK(client
                      .exchange({.method = "POST",
                                 .target = "/update_weights",
                                 .content_type = "application/vnd.weightwire.update",
                                 .body = body},
                                deadline::after(10s))
                      .status == 200);
        }
        server.stop(deadline::after(5s));
        check_from_third(handler, 6);
        CHECK(handler.sizes == std::vector<std::size_t>(6, size));
    }
}

TEST_CASE("the same for a body in chunks with many header fields") {
    counting handler;
    weightwire::http::server server{handler};
    server.start();
    auto client = raw_connection::to(server.port());
    std::string request = "POST /update_weights?x=1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n";
    for (int i = 0; i < 40; ++i) {
        request += "X-Header-" + std::to_string(i) + ": some value that is not short\r\n";
    }
    request += "\r\n4;ext=1\r\nabcd\r\n3\r\nefg\r\n0\r\nTrailer: x\r\n\r\n";
    for (int i = 0; i < 6; ++i) {
        client.send(request);
        CHECK(client.read_until("\r\n\r\n").starts_with("HTTP/1.1 200"));
    }
    server.stop(deadline::after(5s));
    check_from_third(handler, 6);
}
