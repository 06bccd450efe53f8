// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/http/request_reader.hpp>

using namespace std::chrono_literals;
using weightwire::deadline;
using weightwire::http::server_options;
using weightwire::http::detail::basic_request_reader;
using weightwire::http::detail::read_result;

namespace {

/// Plays what a client sends: each part in one piece or more, and before a part, where it says so,
/// longer silence than the reader waits for.
struct scripted_client {
    struct part {
        std::string bytes;
        int silences = 0;
    };
    std::vector<part>* parts;

    read_result receive(std::span<char> to, deadline, std::size_t& count) const {
        if (parts->empty()) {
            return read_result::ended;
        }
        auto& next = parts->front();
        if (next.silences > 0) {
            --next.silences;
            return read_result::timed_out;
        }
        count = std::min(to.size(), next.bytes.size());
        std::memcpy(to.data(), next.bytes.data(), count);
        next.bytes.erase(0, count);
        if (next.bytes.empty()) {
            parts->erase(parts->begin());
        }
        return read_result::data;
    }
    static bool send(std::string_view, deadline) { return true; }
};

std::string update_of(std::size_t bytes) {
    return "POST /update_weights HTTP/1.1\r\nContent-Length: " + std::to_string(bytes) +
           "\r\n\r\n" + std::string(bytes, 'x');
}

}  // namespace

TEST_CASE("a connection that idles gives back the memory of a large body, and goes on") {
    constexpr std::size_t large = std::size_t{8} << 20U;
    std::vector<scripted_client::part> parts{
        {update_of(large)}, {update_of(large)}, {update_of(large), 1}, {"", 2}};
    const server_options options;
    basic_request_reader reader{scripted_client{&parts}, options};
    REQUIRE(reader.receive().is_ready());
    const auto first = reader.body_memory();
    CHECK(first >= large);
    REQUIRE(reader.receive().is_ready());
    CHECK(reader.body_memory() == first);  // used again
    REQUIRE(reader.receive().is_ready());
    CHECK(reader.request().body.size() == large);
    CHECK_FALSE(reader.receive().is_ready());
    CHECK(reader.body_memory() < 1024);
}

TEST_CASE("a connection that idles keeps the memory of a small body") {
    std::vector<scripted_client::part> parts{{update_of(10'000)}, {"", 1}};
    const server_options options;
    basic_request_reader reader{scripted_client{&parts}, options};
    REQUIRE(reader.receive().is_ready());
    CHECK_FALSE(reader.receive().is_ready());
    CHECK(reader.body_memory() >= 10'000);
}

TEST_CASE("a body's last chunk may come in any pieces") {
    const std::string head = "POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (const std::string rest : {"0\r\n\r\n", "1\r\na\r\n0\r\n\r\n", "0;x=y\r\nA: b\r\n\r\n"}) {
        for (std::size_t cut = 0; cut <= rest.size(); ++cut) {
            CAPTURE(rest);
            CAPTURE(cut);
            std::vector<scripted_client::part> parts{{head}, {rest.substr(0, cut)}};
            for (const char one : rest.substr(cut)) {
                parts.push_back({std::string{one}});
            }
            std::erase_if(parts, [](const auto& part) { return part.bytes.empty(); });
            const server_options options;
            basic_request_reader reader{scripted_client{&parts}, options};
            REQUIRE(reader.receive().is_ready());
            CHECK(reader.request().body == (rest.starts_with('1') ? "a" : ""));
            CHECK(reader.receive().status == 0);
        }
    }
}

TEST_CASE("the limit of the headers is exact, in whatever pieces they come") {
    const server_options options{.max_header = 512};
    for (const std::size_t size : {std::size_t{512}, std::size_t{513}}) {
        for (const std::size_t step : {std::size_t{1}, std::size_t{100}, std::size_t{1000}}) {
            CAPTURE(size);
            CAPTURE(step);
            std::string head = "GET / HTTP/1.1\r\nX: \r\n\r\n";
            head.insert(head.size() - 4, size - head.size(), 'y');
            std::vector<scripted_client::part> parts;
            for (std::size_t at = 0; at < head.size(); at += step) {
                parts.push_back({head.substr(at, step)});
            }
            basic_request_reader reader{scripted_client{&parts}, options};
            CHECK(reader.receive().status == (size == 512 ? 200 : 431));
        }
    }
}
