// SPDX-License-Identifier: Apache-2.0
//
// The trainer's engine against servers that answer as vLLM does, release by release, over real
// sockets, with a transport that blocks as a broadcast does.

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/engine/local_sync_client.hpp>
#include <weightwire/http/http.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/server.hpp>
#include <weightwire/trainer.hpp>

#include "../support/broadcast_group.hpp"
#include "../support/small_model.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using tests::broadcast_init_info;
using tests::meeting_place;
using tests::slow_broadcast_info;
using tests::small_weights;

/// What a release knows.
struct era {
    const char* version;
    bool session_routes;
    bool packed_at_init;
    bool unique_id;
    bool weight_info;
};
constexpr era oldest{"0.16.0", false, false, false, false};
constexpr era middle{"0.24.0", true, false, false, false};
constexpr era packed_at_init{"0.28.0", true, true, false, true};
constexpr era newest{"0.31.0", true, true, true, true};

/// One vLLM server with one worker rank. Its worker joins the group that init names and takes part
/// in its broadcasts, and stays in one until the group ends.
class vllm_double {
public:
    vllm_double(std::shared_ptr<meeting_place> place, era release)
        : place_{std::move(place)}, era_{release} {}

    http_response handle(const http_request& request) {
        const auto path = std::string{request.path};
        auto target = path;
        if (!request.query.empty()) {
            target.append("?").append(request.query);
        }
        {
            const std::lock_guard lock{mutex_};
            if (request.method == "POST") {
                calls_.push_back(target);
            }
            if (const auto found = refusals_.find(path); found != refusals_.end()) {
                return error(found->second.first, found->second.second);
            }
        }
        if (request.method == "GET") {
            return answer_question(path);
        }
        if (path == "/init_weight_transfer_engine") {
            return init(request);
        }
        if (path == "/update_weights") {
            return update(request);
        }
        return session(path);
    }

    /// From now on `path` is answered with an error.
    void refuse(const std::string& path, int status, std::string text) {
        const std::lock_guard lock{mutex_};
        refusals_[path] = {status, std::move(text)};
    }
    void accept_again() {
        const std::lock_guard lock{mutex_};
        refusals_.clear();
    }
    /// As after a restart.
    void restart(era release) {
        const std::lock_guard lock{mutex_};
        era_ = release;
        active_ = false;
        group_ = -1;
        refusals_.clear();
    }
    /// From now on its updates succeed at once, as of a worker that has everything already.
    void answer_at_once() {
        const std::lock_guard lock{mutex_};
        answers_at_once_ = true;
    }
    /// From now on what it says of a group that broke off comes this much later.
    void answer_slowly(std::chrono::milliseconds time) {
        const std::lock_guard lock{mutex_};
        slowness_ = time;
    }
    /// From now on its worker neither joins a group nor takes part in a broadcast: calls that need
    /// it are not answered.
    void stay_out() {
        const std::lock_guard lock{mutex_};
        stays_out_ = true;
    }
    /// Targets of the POST requests so far; forgets them.
    std::vector<std::string> take_calls() {
        const std::lock_guard lock{mutex_};
        return std::exchange(calls_, {});
    }

private:
    static http_response error(int status, const std::string& text) {
        return {.status = status,
                .body = nlohmann::json{{"error", {{"message", text}, {"code", status}}}}.dump()};
    }
    http_response answer_question(const std::string& path) {
        const std::lock_guard lock{mutex_};
        if (path == "/version") {
            return {.body = nlohmann::json{{"version", era_.version}}.dump()};
        }
        if (path == "/get_world_size") {
            return {.body = R"({"world_size":1})"};
        }
        if (path == "/weight_info" && era_.weight_info) {
            return {.body = R"({"weight_version":"default"})"};
        }
        return {.status = path == "/start_weight_update" && era_.session_routes ? 405 : 404};
    }
    http_response init(const http_request& request) {
        const auto info = nlohmann::json::parse(request.body).at("init_info");
        for (const auto* key : {"nccl_unique_id_b64", "packed"}) {
            const bool known = key == std::string{"packed"} ? era_.packed_at_init : era_.unique_id;
            if (info.contains(key) && !known) {
                return error(500,
                             "Invalid init_info for NCCLWeightTransferEngine: __init__() got an "
                             "unexpected keyword argument '" +
                                 std::string{key} + "'");
            }
        }
        const int group = info.at("master_port").get<int>();
        const int rank = info.at("rank_offset").get<int>();
        if (wait_outside(request) ||
            !place_->join(group, rank, deadline::after(20s), request.stop)) {
            hesitate();
            return error(500, "Call to collective_rpc method failed: the group did not form");
        }
        const std::lock_guard lock{mutex_};
        group_ = group;
        rank_ = rank;
        return {.body = R"({"message":"Weight transfer initialized"})"};
    }
    http_response update(const http_request& request) {
        const auto info = nlohmann::json::parse(request.body).at("update_info");
        int group = 0;
        int rank = 0;
        {
            const std::lock_guard lock{mutex_};
            if (info.contains("packed") == era_.packed_at_init) {
                return error(500, "Invalid update_info: unexpected keyword argument 'packed'");
            }
            if (era_.session_routes && !active_) {
                return error(500, "start_weight_update must be called before update_weights.");
            }
            if (answers_at_once_) {
                return {.body = R"({"message":"Weights updated"})"};
            }
            group = group_;
            rank = rank_;
        }
        if (wait_outside(request) ||
            !place_->broadcast(group, rank, deadline::after(20s), request.stop)) {
            hesitate();
            return error(500, "Call to collective_rpc method failed: the broadcast broke off");
        }
        return {.body = R"({"message":"Weights updated"})"};
    }
    void hesitate() {
        const auto time = [this] {
            const std::lock_guard lock{mutex_};
            return slowness_;
        }();
        std::this_thread::sleep_for(time);
    }
    bool wait_outside(const http_request& request) {
        std::unique_lock lock{mutex_};
        if (stays_out_) {
            std::condition_variable_any never;
            never.wait_for(lock, request.stop, 20s, [] { return false; });
        }
        return stays_out_;
    }
    http_response session(const std::string& path) {
        const std::lock_guard lock{mutex_};
        const bool start = path == "/start_weight_update";
        if (start || path == "/finish_weight_update") {
            if (!era_.session_routes) {
                return {.status = 404};
            }
            if (start && active_) {
                return error(500,
                             "start_weight_update called while a weight update is already active. "
                             "Call finish_weight_update first.");
            }
            active_ = start;
        }
        return {.body = "{}"};
    }

    std::shared_ptr<meeting_place> place_;
    std::mutex mutex_;
    era era_;
    std::vector<std::string> calls_;
    std::map<std::string, std::pair<int, std::string>> refusals_;
    bool active_ = false;
    bool stays_out_ = false;
    bool answers_at_once_ = false;
    std::chrono::milliseconds slowness_{0};
    int group_ = -1;
    int rank_ = 0;
};

/// Several servers, and a client of all.
struct fleet {
    std::shared_ptr<meeting_place> place = std::make_shared<meeting_place>();
    std::shared_ptr<std::vector<std::vector<bool>>> session_routes =
        std::make_shared<std::vector<std::vector<bool>>>();
    std::vector<std::unique_ptr<vllm_double>> servers;
    std::vector<std::unique_ptr<http::server<vllm_double&>>> sockets;
    std::optional<fan_out_sync_client<http_sync_client<>>> client;
    small_weights weights{4, 100};

    explicit fleet(const std::vector<era>& releases) {
        std::vector<http_sync_client<>> clients;
        for (const auto& release : releases) {
            servers.push_back(std::make_unique<vllm_double>(place, release));
            sockets.push_back(std::make_unique<http::server<vllm_double&>>(*servers.back()));
            sockets.back()->start();
            clients.emplace_back(sockets.back()->url());
        }
        if (!clients.empty()) {
            client.emplace(std::move(clients));
        }
    }
    ~fleet() {
        for (int group = 0; group < place->count(); ++group) {
            place->abort(group);
        }
    }
    template <class Info = broadcast_init_info>
    auto trainer(trainer_options options = {}) {
        Info info{};
        info.place = place;
        info.session_routes = session_routes;
        return trainer_init(info, *client, weights, std::move(options));
    }
    std::vector<std::string> round_calls(std::size_t server) {
        return servers[server]->take_calls();
    }
};

using names = std::vector<std::string>;
const std::string init = "/init_weight_transfer_engine";
const std::string pause_call = "/pause?mode=keep&clear_cache=true";

bool contains(const error& caught, std::string_view part) {
    return std::string_view{caught.what()}.find(part) != std::string_view::npos;
}

/// A client that sends a pause and then fails itself, when it is told to.
class breaking_client : public client_calls<breaking_client> {
public:
    breaking_client(const std::string& url, std::shared_ptr<std::string> breaks_at)
        : inner_{url}, breaks_at_{std::move(breaks_at)} {}
    [[nodiscard]] std::size_t peer_count() const noexcept { return inner_.peer_count(); }
    [[nodiscard]] std::string_view peer_name(std::size_t peer) const {
        return inner_.peer_name(peer);
    }
    [[nodiscard]] std::vector<peer_reply> request(std::string_view method, std::string_view target,
                                                  const control_message& message, deadline until,
                                                  std::stop_token stop = {}) {
        auto replies = inner_.request(method, target, message, until, std::move(stop));
        if (!breaks_at_->empty() && target.starts_with(*breaks_at_)) {
            throw std::runtime_error{"the client lost its head"};
        }
        return replies;
    }

private:
    http_sync_client<> inner_;
    std::shared_ptr<std::string> breaks_at_;
};

}  // namespace

TEST_CASE("servers of every era are initialized in the newest form that they know and updated") {
    struct expectation {
        era release;
        int forms;
    };
    for (const auto& [release, forms] :
         {expectation{oldest, 3}, {middle, 3}, {packed_at_init, 2}, {newest, 1}}) {
        CAPTURE(release.version);
        fleet servers{{release}};
        auto engine = servers.trainer();
        CHECK(servers.round_calls(0) == names(static_cast<std::size_t>(forms), init));
        CHECK(servers.session_routes->at(0).at(0) == release.session_routes);
        CHECK(engine.send_weights().all_committed());
        const auto expected = release.session_routes
                                  ? names{pause_call, "/start_weight_update", "/update_weights",
                                          "/finish_weight_update", "/resume"}
                                  : names{pause_call, "/update_weights", "/resume"};
        CHECK(servers.round_calls(0) == expected);
    }
}

TEST_CASE("one group of servers of four eras, each with its own form and body") {
    fleet servers{{newest, oldest, packed_at_init, middle}};
    auto engine = servers.trainer();
    for (int round = 0; round < 3; ++round) {
        CHECK(engine.send_weights().committed() == 4);
    }
    CHECK(servers.place->count() == 1);
    CHECK(servers.session_routes->at(0) == std::vector<bool>{true, false, true, true});
}

TEST_CASE("a server that refuses every form stops the opening at once, in its own words") {
    fleet servers{{newest, newest}};
    servers.servers[1]->refuse(init, 500, "Weight transfer not configured. Start with a backend.");
    const auto begin = deadline::clock::now();
    try {
        (void)servers.trainer({.init_budget = 30s});
        FAIL("a refusal was overlooked");
    } catch (const peer_error& caught) {
        CHECK(contains(caught, "Weight transfer not configured"));
        CHECK(caught.context().peer == servers.sockets[1]->url());
    }
    CHECK(deadline::clock::now() - begin < 15s);
}

TEST_CASE("an early error of the update stops the sender, and the server's text is shown") {
    fleet servers{{newest, newest}};
    auto engine = servers.trainer();
    servers.servers[1]->refuse("/update_weights", 500,
                               "Call to collective_rpc method failed: no such layer");
    const auto begin = deadline::clock::now();
    try {
        (void)engine.send_weights({.deadline = deadline::after(40s)});
        FAIL("a refusal was overlooked");
    } catch (const peer_error& caught) {
        CHECK(contains(caught, "no such layer"));
        CHECK(caught.context().peer == servers.sockets[1]->url());
    }
    CHECK(deadline::clock::now() - begin < 15s);
    REQUIRE(engine.last_report().peers.size() == 2);
    CHECK(engine.last_report().peers[0].status == peer_status::failed);
    // Both were resumed, and the next round opens the group anew.
    for (std::size_t i = 0; i < 2; ++i) {
        CHECK(servers.round_calls(i).back() == "/resume");
    }
    servers.servers[1]->accept_again();
    CHECK(engine.send_weights().committed() == 2);
    CHECK(servers.place->count() == 2);
    const auto calls = servers.round_calls(0);
    CHECK(calls == names{init, pause_call, "/start_weight_update", "/finish_weight_update",
                         "/start_weight_update", "/update_weights", "/finish_weight_update",
                         "/resume"});
}

TEST_CASE(
    "a broken transfer is heard of first, yet the server's words are shown, and who has all "
    "commits") {
    fleet servers{{newest, newest}};
    auto engine = servers.trainer();
    servers.servers[0]->answer_at_once();
    servers.servers[1]->answer_slowly(100ms);
    std::jthread breaker{[&] {
        (void)servers.place->wait_for_sender(deadline::after(10s));
        servers.place->abort(0);
    }};
    try {
        (void)engine.send_weights({.deadline = deadline::after(40s)});
        FAIL("a broadcast was broken off");
    } catch (const peer_error& caught) {
        CHECK(contains(caught, "Call to collective_rpc method failed: the broadcast broke off"));
        CHECK(caught.context().peer == servers.sockets[1]->url());
    }
    const auto& peers = engine.last_report().peers;
    REQUIRE(peers.size() == 2);
    CHECK(peers[0].status == peer_status::committed);
    CHECK_FALSE(peers[0].may_be_mixed);
    CHECK(peers[1].status == peer_status::failed);
    CHECK(peers[1].may_be_mixed);
}

TEST_CASE("a transfer that takes time to let go gives up early enough for both sides' words") {
    fleet servers{{newest, newest}};
    servers.servers[0]->answer_slowly(100ms);
    SUBCASE("in a round") {
        auto engine = servers.trainer<slow_broadcast_info>();
        servers.servers[1]->stay_out();
        try {
            (void)engine.send_weights({.deadline = deadline::after(6s)});
            FAIL("a rank was missing");
        } catch (const timeout_error& caught) {
            CHECK(contains(caught, "the broadcast broke off"));
            CHECK(contains(caught, "found a rank missing"));
            CHECK(caught.context().peer == servers.sockets[0]->url());
        }
    }
    SUBCASE("while the group forms") {
        servers.servers[1]->stay_out();
        try {
            (void)servers.trainer<slow_broadcast_info>({.init_budget = 5s});
            FAIL("a rank was missing");
        } catch (const timeout_error& caught) {
            CHECK(contains(caught, "found a rank missing"));
            CHECK(contains(caught, "the group did not form"));
        }
    }
}

TEST_CASE("a server that comes back as another release is taken in again without a new trainer") {
    fleet servers{{newest, newest}};
    auto engine = servers.trainer();
    CHECK(engine.send_weights().all_committed());
    servers.servers[0]->refuse("/update_weights", 500, "the engine core died");
    CHECK_THROWS_AS(engine.send_weights(), peer_error);
    SUBCASE("it is still missing: the error names it, soon") {
        servers.servers[0]->refuse(init, 500, "the engine core is dead");
        try {
            (void)engine.send_weights({.deadline = deadline::after(40s)});
            FAIL("a peer was missing");
        } catch (const peer_error& caught) {
            CHECK(contains(caught, "the engine core is dead"));
            CHECK(contains(caught, "opened anew"));
            CHECK(caught.context().peer == servers.sockets[0]->url());
        }
    }
    servers.servers[0]->restart(oldest);
    CHECK(engine.send_weights().committed() == 2);
    CHECK(servers.session_routes->back() == std::vector<bool>{false, true});
    CHECK(engine.send_weights().committed() == 2);
}

TEST_CASE("a vLLM server whose workers do not come out of a collective: bounded and explained") {
    fleet servers{{newest, newest}};
    auto engine = servers.trainer();
    servers.servers[1]->refuse("/update_weights", 500, "out of memory");
    CHECK_THROWS_AS(engine.send_weights(), peer_error);
    // Its init answers only after the group has formed, and its worker never joins one again.
    auto& stuck = *servers.servers[1];
    stuck.restart(newest);
    stuck.stay_out();
    try {
        (void)engine.send_weights({.deadline = deadline::after(4s)});
        FAIL("a worker was stuck");
    } catch (const timeout_error& caught) {
        CHECK(contains(caught, "restart of the server"));
    }
}

TEST_CASE("a pause that fails loses the round, says what a 404 means, and resumes the others") {
    fleet servers{{newest, newest}};
    auto engine = servers.trainer();
    servers.servers[1]->refuse("/pause", 404, "Not Found");
    for (std::size_t i = 0; i < 2; ++i) {
        (void)servers.round_calls(i);
    }
    try {
        (void)engine.send_weights();
        FAIL("a pause failed");
    } catch (const unsupported_error& caught) {
        CHECK(contains(caught, "trainer_options::pause"));
        CHECK(caught.context().peer == servers.sockets[1]->url());
    }
    CHECK(servers.round_calls(0) == names{pause_call, "/resume"});
    CHECK(servers.round_calls(1) == names{pause_call});
}

TEST_CASE("a failed resume is in the report, and the server is asked again after the next round") {
    fleet servers{{newest}};
    auto engine = servers.trainer();
    servers.servers[0]->refuse("/resume", 500, "resume_scheduler failed");
    auto report = engine.send_weights();
    CHECK(report.all_committed());
    CHECK(report.peers[0].resume_error.text.find("resume_scheduler failed") != std::string::npos);
    servers.servers[0]->accept_again();
    report = engine.send_weights();
    CHECK_FALSE(report.peers[0].resume_error);
}

TEST_CASE("a client that fails in a pause or a resume leaves no server standing") {
    fleet servers{{newest, newest}};
    const auto breaks_at = std::make_shared<std::string>();
    std::vector<breaking_client> clients;
    for (const auto& socket : servers.sockets) {
        clients.emplace_back(socket->url(), std::make_shared<std::string>());
    }
    clients[1] = breaking_client{servers.sockets[1]->url(), breaks_at};
    fan_out_sync_client client{std::move(clients)};
    auto engine =
        trainer_init(broadcast_init_info{.place = servers.place}, client, servers.weights);
    for (std::size_t i = 0; i < 2; ++i) {
        (void)servers.round_calls(i);
    }
    *breaks_at = "/pause";
    CHECK_THROWS_WITH_AS((void)engine.send_weights(), "the client lost its head",
                         std::runtime_error);
    for (std::size_t i = 0; i < 2; ++i) {
        CHECK(servers.round_calls(i) == names{pause_call, "/resume"});
    }
    *breaks_at = "/resume";
    const auto report = engine.send_weights();
    CHECK(report.all_committed());
    for (const auto& peer : report.peers) {
        CHECK(peer.resume_error.text == "the client lost its head");
    }
    breaks_at->clear();
    for (const auto& peer : engine.send_weights().peers) {
        CHECK_FALSE(peer.resume_error);
    }
}

TEST_CASE("a server that may hold a mix is named, and stays paused where that is asked for") {
    for (const bool left : {false, true}) {
        CAPTURE(left);
        fleet servers{{newest, newest}};
        auto engine = servers.trainer({.leave_mixed_paused = left});
        servers.servers[1]->refuse("/start_weight_update", 500, "busy");
        CHECK_THROWS_AS(engine.send_weights(), peer_error);
        // Nothing had been loaded.
        CHECK_FALSE(engine.last_report().peers[0].may_be_mixed);
        CHECK(servers.round_calls(0).back() == "/resume");
        servers.servers[1]->accept_again();
        servers.servers[1]->refuse("/update_weights", 500, "out of memory");
        CHECK_THROWS_AS(engine.send_weights(), peer_error);
        for (std::size_t i = 0; i < 2; ++i) {
            CHECK(engine.last_report().peers[i].may_be_mixed);
            CHECK((servers.round_calls(i).back() == "/resume") == !left);
        }
        servers.servers[1]->restart(newest);
        const auto report = engine.send_weights();
        for (std::size_t i = 0; i < 2; ++i) {
            CHECK_FALSE(report.peers[i].may_be_mixed);
            CHECK(servers.round_calls(i).back() == "/resume");
        }
    }
}

TEST_CASE("the pause is the user's choice") {
    const auto calls_with = [](trainer_options options) {
        fleet servers{{newest}};
        auto engine = servers.trainer(std::move(options));
        CHECK(engine.send_weights().all_committed());
        return servers.round_calls(0);
    };
    CHECK(calls_with({.pause = round_pause::none}) ==
          names{init, "/start_weight_update", "/update_weights", "/finish_weight_update"});
    CHECK(calls_with({.pause = round_pause::wait}).at(1) == "/pause?mode=wait&clear_cache=true");
    CHECK(calls_with({.pause = round_pause::abort, .pause_clears_cache = false}).at(1) ==
          "/pause?mode=abort&clear_cache=false");
}

TEST_CASE("a stop ends a round at once, and the paused server is resumed all the same") {
    fleet servers{{newest}};
    auto engine = servers.trainer();
    servers.servers[0]->stay_out();
    std::stop_source stop;
    std::jthread stopper{[&] {
        (void)servers.place->wait_for_sender(deadline::after(10s));
        stop.request_stop();
    }};
    CHECK_THROWS_AS(
        (void)engine.send_weights({.deadline = deadline::after(30s), .stop = stop.get_token()}),
        cancelled_error);
    CHECK(servers.round_calls(0).back() == "/resume");
}

TEST_CASE("the choice of the pause is told as an event") {
    struct listener {
        std::mutex mutex;
        std::vector<std::string> choices;
        void on(const event& what) noexcept {
            const std::lock_guard lock{mutex};
            if (what.kind == event_kind::chosen) {
                choices.emplace_back(what.text);
            }
        }
    } events;
    fleet servers{{newest}};
    auto engine = trainer_init(broadcast_init_info{.place = servers.place}, *servers.client,
                               servers.weights, {}, single_rank{}, events);
    const auto tells = [&](std::string_view part) {
        return std::any_of(
            events.choices.begin(), events.choices.end(),
            [&](const std::string& text) { return text.find(part) != std::string::npos; });
    };
    CHECK(tells("POST /pause?mode=keep&clear_cache=true before each round"));
}

TEST_CASE("a client that leaves a refusal to the engine is called again with the next form") {
    fleet servers{{oldest}};
    http_sync_client alone{servers.sockets[0]->url()};
    auto engine = trainer_init(broadcast_init_info{.place = servers.place}, alone, servers.weights);
    CHECK(servers.round_calls(0) == names(3, init));
    CHECK(engine.send_weights().all_committed());
}

TEST_CASE("servers in this process stand in one group too, each with its own form") {
    fleet servers{{}};
    vllm_double first{servers.place, newest};
    vllm_double second{servers.place, oldest};
    local_sync_client client{std::vector{&first, &second}};
    auto engine =
        trainer_init(broadcast_init_info{.place = servers.place}, client, servers.weights);
    CHECK(second.take_calls() == names(3, init));
    CHECK(engine.send_weights().committed() == 2);
}
