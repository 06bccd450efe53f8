#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// The routes as calls, over one member `request`. A client that can send any route gets the four
/// calls of a session and the questions around it.

namespace weightwire {

/// What `/pause` does with requests that are being served.
enum class pause_mode : std::uint8_t {
    abort,  ///< end them; vLLM's default
    wait,   ///< let them finish; vLLM has no timeout for it
    keep,   ///< freeze them until `/resume`
};

/// The word in the query.
[[nodiscard]] constexpr std::string_view to_string(pause_mode value) noexcept {
    switch (value) {
        case pause_mode::abort: return "abort";
        case pause_mode::wait: return "wait";
        case pause_mode::keep: return "keep";
    }
    return "unknown";
}

/// Path and query of `/pause`. The arguments travel in the query: a body would be ignored and
/// requests aborted (wire section 1.3).
[[nodiscard]] inline std::string pause_target(pause_mode mode, bool clear_cache) {
    std::string target = "/pause?mode=";
    target.append(to_string(mode)).append(clear_cache ? "&clear_cache=true" : "&clear_cache=false");
    return target;
}

/// Which peers to ask, as `control_message::only`; empty: all.
using peer_mask = std::span<const unsigned char>;

/// Gives `Derived` the calls of the protocol. `Derived` has
/// `request(method, target, const control_message&, deadline, std::stop_token)` (`HasRequest`) and
/// derives publicly: `class my_client : public client_calls<my_client>`.
///
/// Every call blocks until each asked peer has answered or failed, or the deadline passed; it gives
/// one raw reply a peer, in peer order (`wire/probe.hpp` reads them). Thread-safety and exceptions
/// are those of `request`.
template <class Derived>
class client_calls {
public:
    /// `POST /init_weight_transfer_engine`: with `nccl` it answers only after the group has formed.
    [[nodiscard]] std::vector<peer_reply> init(const control_message& message, deadline until,
                                               std::stop_token stop = {}) {
        return post("/init_weight_transfer_engine", message, until, stop);
    }

    /// `POST /start_weight_update`. An empty body goes out as `{}`: vLLM 0.21 to 0.24 parse it
    /// (wire section 1.4).
    [[nodiscard]] std::vector<peer_reply> start(const control_message& message, deadline until,
                                                std::stop_token stop = {}) {
        constexpr std::string_view empty_object = "{}";
        constexpr auto is_empty = [](std::string_view body) { return body.empty(); };
        auto filled = message;
        std::vector<std::string_view> bodies{message.bodies.begin(), message.bodies.end()};
        if (bodies.empty()) {
            bodies.push_back(empty_object);
        }
        std::ranges::replace_if(bodies, is_empty, empty_object);
        filled.bodies = bodies;
        return post("/start_weight_update", filled, until, stop);
    }

    /// `POST /update_weights`: answers when the data is consumed, so it may be silent for long.
    [[nodiscard]] std::vector<peer_reply> update(const control_message& message, deadline until,
                                                 std::stop_token stop = {}) {
        return post("/update_weights", message, until, stop);
    }

    /// `POST /finish_weight_update`.
    [[nodiscard]] std::vector<peer_reply> finish(const control_message& message, deadline until,
                                                 std::stop_token stop = {}) {
        return post("/finish_weight_update", message, until, stop);
    }

    /// `POST /update_weight_version` with `{"new_version": …}` as the body.
    [[nodiscard]] std::vector<peer_reply> update_weight_version(const control_message& message,
                                                                deadline until,
                                                                std::stop_token stop = {}) {
        return post("/update_weight_version", message, until, stop);
    }

    /// `POST /weight_checker` with `{"action": …}` as the body.
    [[nodiscard]] std::vector<peer_reply> weight_checker(const control_message& message,
                                                         deadline until,
                                                         std::stop_token stop = {}) {
        return post("/weight_checker", message, until, stop);
    }

    /// `POST /pause`, answered when the engine stands still.
    /// @param clear_cache whether the engine forgets what it cached under the old weights.
    /// @param only peers to ask, as in `control_message`.
    [[nodiscard]] std::vector<peer_reply> pause(pause_mode mode, bool clear_cache, deadline until,
                                                std::stop_token stop = {}, peer_mask only = {}) {
        return post(pause_target(mode, clear_cache), {.only = only}, until, stop);
    }

    /// `POST /resume`. Not while a `/pause` is on its way: vLLM refuses it then (wire section 1.8).
    [[nodiscard]] std::vector<peer_reply> resume(deadline until, std::stop_token stop = {},
                                                 peer_mask only = {}) {
        return post("/resume", {.only = only}, until, stop);
    }

    /// `GET /is_paused`.
    [[nodiscard]] std::vector<peer_reply> is_paused(deadline until, std::stop_token stop = {},
                                                    peer_mask only = {}) {
        return ask("/is_paused", until, stop, only);
    }

    /// `GET /weight_info`; 404 from servers older than 2026-07-28.
    [[nodiscard]] std::vector<peer_reply> weight_info(deadline until, std::stop_token stop = {},
                                                      peer_mask only = {}) {
        return ask("/weight_info", until, stop, only);
    }

    /// `GET /health`: needs no token.
    [[nodiscard]] std::vector<peer_reply> health(deadline until, std::stop_token stop = {},
                                                 peer_mask only = {}) {
        return ask("/health", until, stop, only);
    }

    /// `GET /version`: works without vLLM's dev mode.
    [[nodiscard]] std::vector<peer_reply> version(deadline until, std::stop_token stop = {},
                                                  peer_mask only = {}) {
        return ask("/version", until, stop, only);
    }

    /// `GET /get_world_size`.
    /// @param include_dp whether data-parallel replicas behind one server count.
    [[nodiscard]] std::vector<peer_reply> world_size(bool include_dp, deadline until,
                                                     std::stop_token stop = {},
                                                     peer_mask only = {}) {
        return ask(
            include_dp ? "/get_world_size?include_dp=true" : "/get_world_size?include_dp=false",
            until, stop, only);
    }

private:
    friend Derived;
    client_calls() = default;

    std::vector<peer_reply> post(std::string_view target, const control_message& message,
                                 deadline until, const std::stop_token& stop) {
        return static_cast<Derived&>(*this).request("POST", target, message, until, stop);
    }
    std::vector<peer_reply> ask(std::string_view target, deadline until,
                                const std::stop_token& stop, peer_mask only) {
        return static_cast<Derived&>(*this).request("GET", target, {.only = only}, until, stop);
    }
};

/// What every client checks before it sends: a body for all peers or one a peer, a mask for all.
/// @throws usage_error the message has another number of them.
inline void check_message(const control_message& message, std::size_t peers) {
    if (message.bodies.size() > 1 && message.bodies.size() != peers) {
        throw usage_error{"a message has " + std::to_string(message.bodies.size()) +
                          " bodies for " + std::to_string(peers) +
                          " peers; give none, one for all, or one a peer"};
    }
    if (!message.only.empty() && message.only.size() != peers) {
        throw usage_error{"a message's mask has " + std::to_string(message.only.size()) +
                          " entries for " + std::to_string(peers) + " peers; give one a peer"};
    }
}

}  // namespace weightwire
