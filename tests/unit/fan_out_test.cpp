// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/engine/fan_out_sync_client.hpp>

using namespace std::chrono_literals;
using weightwire::control_message;
using weightwire::deadline;
using weightwire::fan_out_sync_client;
using weightwire::peer_reply;
using weightwire::reply_fault;

namespace {

deadline soon() { return deadline::after(5s); }

/// A client of `peers` peers that answers with what it was sent, or waits for the deadline.
struct echo_client {
    std::string name;
    std::size_t peers = 1;
    bool silent = false;
    bool throws = false;
    std::size_t replies = 0;             // beside one a peer
    std::atomic<int>* inside = nullptr;  // silent clients that wait just now
    std::atomic<int>* most = nullptr;    // of `inside`

    std::size_t peer_count() const { return peers; }
    std::string_view peer_name(std::size_t) const { return name; }
    std::vector<peer_reply> request(std::string_view method, std::string_view target,
                                    const control_message& message, deadline until,
                                    std::stop_token stop) {
        if (throws) {
            throw weightwire::usage_error{"refused by " + name};
        }
        std::vector<peer_reply> out(peers + replies);
        for (std::size_t i = 0; i < peers; ++i) {
            out[i].peer = name;
            if (!message.asks(i)) {
                out[i].answer.fault = reply_fault::left_out;
                continue;
            }
            if (silent) {
                if (inside != nullptr) {
                    const int now = ++*inside;
                    for (int seen = *most; seen < now && !most->compare_exchange_weak(seen, now);) {
                    }
                }
                std::mutex mutex;
                std::unique_lock lock{mutex};
                std::condition_variable_any never;
                never.wait_until(lock, stop, until.when(), [] { return false; });
                out[i].answer.fault =
                    stop.stop_requested() ? reply_fault::cancelled : reply_fault::timed_out;
            } else {
                out[i].answer.status = 200;
                out[i].answer.body.append(method).append(target).append(message.body_for(i));
            }
            message.observer(i, out[i]);
        }
        return out;
    }
    std::vector<peer_reply> init(const control_message&, deadline, std::stop_token) { return {}; }
    std::vector<peer_reply> start(const control_message&, deadline, std::stop_token) { return {}; }
    std::vector<peer_reply> update(const control_message&, deadline, std::stop_token) { return {}; }
    std::vector<peer_reply> finish(const control_message&, deadline, std::stop_token) { return {}; }
};

using fan_out = fan_out_sync_client<echo_client>;
static_assert(weightwire::SyncClient<fan_out> && weightwire::HasRequest<fan_out>);
static_assert(weightwire::SyncClient<fan_out_sync_client<fan_out>>, "fan-outs nest");
static_assert(std::is_nothrow_move_constructible_v<fan_out>);

std::vector<std::string> bodies_of(const std::vector<peer_reply>& replies) {
    std::vector<std::string> out;
    for (const auto& reply : replies) {
        out.push_back(reply.answer.body);
    }
    return out;
}

}  // namespace

TEST_CASE("every peer is asked, each with its own body, and answers in peer order") {
    fan_out made{{{"a"}, {"b", 2}, {"c"}}};
    fan_out client = std::move(made);
    REQUIRE(client.peer_count() == 4);
    CHECK(client.peer_name(0) == "a");
    CHECK(client.peer_name(2) == "b");
    CHECK(client.peer_name(3) == "c");
    const std::string_view each[] = {"1", "2", "3", "4"};
    const std::string_view one[] = {"x"};
    for (int round = 0; round < 3; ++round) {
        CHECK(bodies_of(client.update({.bodies = each}, soon())) ==
              std::vector<std::string>{"POST/update_weights1", "POST/update_weights2",
                                       "POST/update_weights3", "POST/update_weights4"});
        CHECK(bodies_of(client.finish({.bodies = one}, soon())) ==
              std::vector<std::string>(4, "POST/finish_weight_updatex"));
        CHECK(bodies_of(client.start({}, soon())) ==
              std::vector<std::string>(4, "POST/start_weight_update{}"));
    }
}

TEST_CASE("start fills in only the empty bodies") {
    fan_out client{{{"a"}, {"b"}}};
    const std::string_view each[] = {"", "{\"n\":2}"};
    CHECK(bodies_of(client.start({.bodies = each}, soon())) ==
          std::vector<std::string>{"POST/start_weight_update{}",
                                   "POST/start_weight_update{\"n\":2}"});
}

TEST_CASE("a masked peer is left out and the others are asked") {
    fan_out client{{{"a"}, {"b", 2}, {"c"}}};
    const unsigned char mask[] = {1, 0, 1, 0};
    const auto replies = client.update({.only = mask}, soon());
    REQUIRE(replies.size() == 4);
    CHECK(replies[0].ok());
    CHECK(replies[1].answer.fault == reply_fault::left_out);
    CHECK(replies[2].ok());
    CHECK(replies[3].answer.fault == reply_fault::left_out);
    CHECK(replies[3].peer == "c");
}

TEST_CASE("the observer hears of the others while one peer is silent, each peer once") {
    fan_out client{{{"silent", 1, true}, {"a"}, {"b", 2}}};
    struct heard_type {
        std::atomic<int> count[4]{};
        std::stop_source all_others;
        std::atomic<int> others{0};
        std::atomic<bool> names_right{true};
    } heard;
    const weightwire::reply_observer observer{
        [](void* context, std::size_t peer, const peer_reply& reply) noexcept {
            auto& self = *static_cast<heard_type*>(context);
            ++self.count[peer];
            const std::string_view expected[] = {"silent", "a", "b", "b"};
            if (reply.peer != expected[peer]) {
                self.names_right = false;
            }
            // The three others answer while the silent one is still waited for: only then does
            // the stop, not the deadline, end the call.
            if (peer != 0 && ++self.others == 3) {
                self.all_others.request_stop();
            }
        },
        &heard};
    const auto replies =
        client.update({.observer = observer}, deadline::after(20s), heard.all_others.get_token());
    CHECK(replies[0].answer.fault == reply_fault::cancelled);
    CHECK(replies[1].ok());
    CHECK(replies[2].ok());
    CHECK(replies[3].ok());
    for (const auto& count : heard.count) {
        CHECK(count == 1);
    }
    CHECK(heard.names_right);
}

TEST_CASE("a peer that wants another body is sent it while the others are still waited for") {
    fan_out client{{{"silent", 1, true}, {"a", 2}}};
    struct state_type {
        std::atomic<int> asked{0};
        std::stop_source second_body_came;
    } state;
    // Peer 2 is given a second body after its first answer, and no third; the silent peer's call
    // ends by the stop that the answer to it brings, not by the deadline.
    const weightwire::body_retry again{
        [](void* context, std::size_t peer, const peer_reply& reply) noexcept -> std::string_view {
            auto& self = *static_cast<state_type*>(context);
            if (peer == 2 && reply.answer.body.ends_with("first")) {
                ++self.asked;
                return "second";
            }
            return {};
        },
        &state};
    const weightwire::reply_observer observer{
        [](void* context, std::size_t peer, const peer_reply& reply) noexcept {
            if (peer == 2 && reply.answer.body.ends_with("second")) {
                static_cast<state_type*>(context)->second_body_came.request_stop();
            }
        },
        &state};
    const std::string_view one[] = {"first"};
    const auto replies = client.update({.bodies = one, .observer = observer, .again = again},
                                       deadline::after(20s), state.second_body_came.get_token());
    CHECK(state.asked == 1);
    CHECK(bodies_of(replies) ==
          std::vector<std::string>{"", "POST/update_weightsfirst", "POST/update_weightssecond"});
    CHECK(replies[0].answer.fault == reply_fault::cancelled);
}

TEST_CASE("silent peers are waited for at the same time") {
    std::atomic<int> inside{0};
    std::atomic<int> most{0};
    fan_out client{{{"a", 1, true, false, 0, &inside, &most},
                    {"b", 1, true, false, 0, &inside, &most},
                    {"c", 1, true, false, 0, &inside, &most},
                    {"d"}}};
    const auto until = deadline::after(300ms);
    const auto replies = client.update({}, until);
    CHECK(until.expired());
    CHECK(most == 3);
    CHECK(replies[0].answer.fault == reply_fault::timed_out);
    CHECK(replies[2].answer.fault == reply_fault::timed_out);
    CHECK(replies[3].ok());
}

TEST_CASE("a client that refuses the call is reported after the others have been asked") {
    fan_out client{{{"a"}, {"b", 1, false, true}}};
    CHECK_THROWS_WITH_AS(static_cast<void>(client.update({}, soon())), "usage: refused by b",
                         weightwire::usage_error);
    fan_out talkative{{{"a"}, {"b", 1, false, false, 1}}};
    CHECK_THROWS_AS(static_cast<void>(talkative.update({}, soon())), weightwire::usage_error);
}

TEST_CASE("a message for another number of peers, or no client at all, is refused") {
    CHECK_THROWS_AS(fan_out{std::vector<echo_client>{}}, weightwire::usage_error);
    fan_out client{{{"a"}, {"b"}, {"c"}}};
    const std::string_view two[] = {"1", "2"};
    const unsigned char mask[] = {1, 1};
    CHECK_THROWS_AS(static_cast<void>(client.update({.bodies = two}, soon())),
                    weightwire::usage_error);
    CHECK_THROWS_AS(static_cast<void>(client.update({.only = mask}, soon())),
                    weightwire::usage_error);
}
