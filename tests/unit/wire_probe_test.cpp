// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstddef>
#include <map>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <weightwire/wire/client_calls.hpp>
#include <weightwire/wire/envelope.hpp>
#include <weightwire/wire/probe.hpp>

namespace {

using namespace weightwire;
using namespace weightwire::wire;

struct canned {
    int status = 404;
    std::string body{};
    reply_fault fault = reply_fault::none;
};
using routes = std::map<std::string, canned, std::less<>>;

/// Servers of several eras as their answers; a route that is not listed is a 404.
class recorded_client : public client_calls<recorded_client> {
public:
    explicit recorded_client(std::vector<routes> servers) : servers_{std::move(servers)} {}
    [[nodiscard]] std::size_t peer_count() const { return servers_.size(); }
    [[nodiscard]] std::string_view peer_name(std::size_t i) const { return names[i]; }
    std::vector<peer_reply> request(std::string_view method, std::string_view target,
                                    const control_message& message, deadline, std::stop_token) {
        CHECK(method == "GET");
        asked.emplace_back(target);
        std::vector<peer_reply> replies(servers_.size());
        for (std::size_t i = 0; i < servers_.size(); ++i) {
            replies[i].peer = names[i];
            if (!message.asks(i)) {
                replies[i].answer.fault = reply_fault::left_out;
                continue;
            }
            ++requests[i];
            const auto found = servers_[i].find(target);
            const auto answer = found == servers_[i].end() ? canned{} : found->second;
            replies[i].answer = {
                .status = answer.status, .body = answer.body, .fault = answer.fault};
        }
        return replies;
    }

    static constexpr std::string_view names[] = {"http://a", "http://b", "http://c"};
    std::vector<std::string> asked{};
    std::size_t requests[3] = {};

private:
    std::vector<routes> servers_;
};

static_assert(HasRequest<recorded_client> && SyncClient<recorded_client>);

std::vector<server_profile> probe_all(recorded_client& client) {
    return probe(client, deadline::after(std::chrono::seconds{5}));
}

server_profile probe_one(const routes& server) {
    recorded_client client{{server}};
    return probe_all(client).front();
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

const routes newest{{"/version", {200, R"({"version":"0.31.0"})"}},
                    {"/get_world_size", {200, R"({"world_size":4})"}},
                    {"/start_weight_update", {405, ""}},
                    {"/weight_info", {200, R"({"weight_version":"17"})"}}};
const routes oldest{{"/version", {200, R"({"version":"0.16.0"})"}},
                    {"/get_world_size", {200, R"({"world_size":2})"}}};
const routes ours{
    {"/version",
     {200, encode_version_reply("0.1.0", {.backends = {"ipc"}, .commit_mode = "flip"})}},
    {"/get_world_size", {200, R"({"world_size":1})"}},
    {"/weight_info", {200, R"({"weight_version":"default","dirty":false})"}}};

routes with(routes server, std::string route, canned answer) {
    server[std::move(route)] = std::move(answer);
    return server;
}

}  // namespace

TEST_CASE("probe: servers of three kinds are told apart, all asked at once") {
    recorded_client client{{newest, oldest, ours}};
    const auto profiles = probe_all(client);
    CHECK(client.asked == std::vector<std::string>{"/version", "/get_world_size",
                                                   "/start_weight_update", "/weight_info"});
    REQUIRE(profiles.size() == 3);
    CHECK(profiles[0].ok());
    CHECK(profiles[0].version == server_version{0, 31});
    CHECK(profiles[0].world_size == 4);
    CHECK(profiles[0].has_session_routes);
    CHECK(profiles[0].has_weight_info);
    CHECK(profiles[0].weight_version == "17");
    CHECK_FALSE(profiles[0].native.has_value());

    CHECK(profiles[1].ok());
    CHECK(profiles[1].world_size == 2);
    CHECK_FALSE(profiles[1].has_session_routes);
    CHECK_FALSE(profiles[1].has_weight_info);
    CHECK(profiles[1].weight_version.empty());

    CHECK(profiles[2].ok());
    REQUIRE(profiles[2].native.has_value());
    CHECK(profiles[2].native->backends == std::vector<std::string>{"ipc"});
    CHECK(profiles[2].has_session_routes);
    CHECK(profiles[2].weight_version == "default");
    CHECK(client.requests[2] == 3);  // ours is not asked for what it has
}

TEST_CASE("probe: a vLLM server without its development mode is explained") {
    const auto profile = probe_one({{"/version", {200, R"({"version":"0.25.0"})"}}});
    CHECK(profile.problem.kind == "unsupported");
    CHECK(profile.problem.context.peer == "http://a");
    CHECK(contains(profile.problem.message(), "VLLM_SERVER_DEV_MODE=1"));
}

TEST_CASE("probe: one peer's failure is its own, and it is not asked again") {
    recorded_client client{{newest, {{"/version", {0, "", reply_fault::unreachable}}}, ours}};
    const auto profiles = probe_all(client);
    CHECK(profiles[0].ok());
    CHECK(profiles[1].problem.kind == "peer");
    CHECK(contains(profiles[1].problem.message(), "http://b"));
    CHECK(profiles[2].ok());
    CHECK(client.requests[1] == 1);
    CHECK_THROWS_AS(profiles[1].problem.raise(), peer_error);
}

TEST_CASE("probe: a peer that falls silent at any question has a problem") {
    for (const auto* route :
         {"/version", "/get_world_size", "/start_weight_update", "/weight_info"}) {
        CAPTURE(route);
        const auto profile = probe_one(with(newest, route, {0, "", reply_fault::timed_out}));
        CHECK(profile.problem.kind == "timeout");
        CHECK(profile.problem.context.phase == phase::probe);
    }
}

TEST_CASE("probe: what a server answers wrongly is its problem, with the place") {
    CHECK(probe_one(with(newest, "/version", {0, "", reply_fault::timed_out})).problem.kind ==
          "timeout");
    const auto elsewhere = probe_one(with(newest, "/version", {404, "no"})).problem;
    CHECK(elsewhere.kind == "unsupported");
    CHECK(contains(elsewhere.message(), "404 to /version: neither a weightwire worker nor vLLM"));
    CHECK(probe_one(with(newest, "/version", {401, ""})).problem.kind == "usage");
    CHECK(contains(probe_one(with(newest, "/version", {200, "<html>"})).problem.message(),
                   "not JSON"));
    CHECK(
        contains(probe_one(with(newest, "/version", {200, "{}"})).problem.message(), "'version'"));
    CHECK(contains(
        probe_one(with(newest, "/get_world_size", {200, R"({"world_size":0})"})).problem.message(),
        "$.world_size"));
    CHECK(
        contains(probe_one(with(newest, "/get_world_size", {500, "x"})).problem.message(), "500"));
    CHECK(contains(probe_one(with(newest, "/start_weight_update", {200, ""})).problem.message(),
                   "expected 405 or 404"));
    CHECK(probe_one(with(newest, "/start_weight_update", {500, ""})).problem.kind == "peer");
    CHECK(contains(
        probe_one(with(newest, "/weight_info", {200, R"({"weight_version":7})"})).problem.message(),
        "$.weight_version"));
}

TEST_CASE("reply_failure: what our own server says is said once, with what only it knows") {
    const error_context there{.phase = phase::update,
                              .tensor = "a.b",
                              .backend = "ipc",
                              .rank = 1,
                              .bytes_done = 3,
                              .bytes_total = 9};
    const auto told = native_http_error(timeout_error{"the ring stood still", there});
    const auto problem = reply_failure(
        {.peer = "http://[::1]:8000", .answer = {.status = told.status, .body = error_body(told)}},
        phase::update);
    CHECK(problem.message() ==
          "timeout [phase update] [backend ipc] [peer http://[::1]:8000] [tensor a.b]: the server "
          "answered 500: [rank 1] [bytes 3 of 9] the ring stood still (code 500)");

    const auto said = [](int status, std::string body) {
        return reply_failure({.peer = "x", .answer = {.status = status, .body = std::move(body)}},
                             phase::finish)
            .message();
    };
    // Of another phase, cut short, or no message of ours: as it came.
    CHECK(said(500, R"({"error":"data [phase init] [tensor t]: short"})") ==
          "data [phase finish] [peer x] [tensor t]: the server answered 500: [phase init] short "
          "(code 500)");
    CHECK(said(500, R"({"error":"data [phase in"})") ==
          "data [phase finish] [peer x]: the server answered 500: data [phase in (code 500)");
    CHECK(said(400, R"({"error":"no [tensor t]: here"})") ==
          "protocol [phase finish] [peer x] [tensor t]: the server answered 400: no [tensor t]: "
          "here (code 400)");
    // A page of somebody else's.
    CHECK(said(502, "\r\n<html>\r\n<body>Bad gateway</body>") ==
          "peer [phase finish] [peer x]: the server answered 502: <html> (code 502)");
    CHECK(said(502, "") == "peer [phase finish] [peer x]: the server answered 502:  (code 502)");
}

TEST_CASE("reply_failure: no answer says what to look at, and time only where time ran out") {
    const auto said = [](reply_fault fault) {
        return reply_failure({.peer = "x", .answer = {.fault = fault}}, phase::probe).text;
    };
    CHECK(contains(said(reply_fault::unreachable), "was started and can be reached"));
    CHECK(contains(said(reply_fault::closed), "it may have died"));
    CHECK(contains(said(reply_fault::malformed), "the server that was meant"));
    for (const auto fault : {reply_fault::unreachable, reply_fault::closed, reply_fault::cancelled,
                             reply_fault::malformed}) {
        CHECK_FALSE(contains(said(fault), "allow more time"));
    }
    CHECK(contains(said(reply_fault::timed_out), "allow more time"));
}

TEST_CASE("probe: a worker of another native wire is known as such") {
    const auto profile = probe_one(
        with(ours, "/version", {200, R"({"version":"9","weightwire":{"wire":9,"x":1}})"}));
    CHECK(profile.ok());
    REQUIRE(profile.native.has_value());
    CHECK(profile.native->wire == 9);
}

TEST_CASE("probe: version texts of releases and of builds from branches") {
    CHECK(parse_server_version("0.25.0") == server_version{0, 25});
    CHECK(parse_server_version("v0.25.1rc2.dev17+g1a2b3c4") == server_version{0, 25});
    CHECK(parse_server_version("1.2") == server_version{1, 2});
    CHECK(parse_server_version("0.26.dev3") == server_version{0, 26});
    for (const auto* text :
         {"", "v", "dev", "7", "7.", ".7", "-1.2", "1.-2", "1,2", "99999999999.1"}) {
        CAPTURE(text);
        CHECK_FALSE(parse_server_version(text).has_value());
    }
}
