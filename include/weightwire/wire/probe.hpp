#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/reply_failure.hpp>

/// @file
/// Who is on the other side: the recipe of vLLM wire section 1.9. Routes are asked, version numbers
/// are only reported: a number says little about a build from a branch.

namespace weightwire::wire {

/// Major and minor number at the beginning of a version text.
struct server_version {
    int major = 0;
    int minor = 0;
    friend constexpr auto operator<=>(const server_version&, const server_version&) = default;
};

/// `0.25` of `0.25.0`, `v0.25.1rc2.dev17+g1a2b3c4`, …; nothing where the text begins otherwise.
[[nodiscard]] inline std::optional<server_version> parse_server_version(std::string_view text) {
    server_version version;
    const char* const end = text.data() + text.size();
    const char* const first = text.data() + (text.starts_with('v') ? 1 : 0);
    const auto major = std::from_chars(first, end, version.major);
    if (major.ec != std::errc{} || major.ptr == end || *major.ptr != '.' || version.major < 0) {
        return std::nullopt;
    }
    const auto minor = std::from_chars(major.ptr + 1, end, version.minor);
    if (minor.ec != std::errc{} || version.minor < 0) {
        return std::nullopt;
    }
    return version;
}

/// What one peer is and can.
struct server_profile {
    std::string peer{};          ///< URL or name
    failure problem{};           ///< why it cannot be spoken to; then the rest is partial
    std::string version_text{};  ///< as `GET /version` says
    std::optional<server_version> version{};  ///< the numbers in it, where there are any
    std::optional<native_offer> native{};     ///< ours; check its `wire`
    int world_size = 0;                       ///< worker ranks behind the server
    /// Whether there are `/start_weight_update` and `/finish_weight_update`; vLLM 0.16 to 0.20 has
    /// none, each of its updates is a session.
    bool has_session_routes = false;
    bool has_weight_info = false;  ///< whether there is `/weight_info` (since 2026-07-28)
    std::string weight_version{};  ///< what it says: `default`, or a trainer's text

    [[nodiscard]] bool ok() const noexcept { return !problem; }
};

namespace detail {

inline constexpr std::int64_t largest_server = std::int64_t{1} << 20U;

/// What the replies to `GET /version` say.
inline void read_version(server_profile& profile, const peer_reply& reply) {
    if (reply.answer.status == 404) {
        throw unsupported_error{
            "the server answers 404 to /version: neither a weightwire worker nor vLLM is at this "
            "address; correct the port, or the path before the routes",
            {.phase = phase::probe, .peer = profile.peer, .native_code = 404}};
    }
    profile.native = decode_version_reply(reply.answer.body, profile.version_text);
    profile.version = parse_server_version(profile.version_text);
}

inline void read_world_size(server_profile& profile, const peer_reply& reply) {
    if (reply.answer.status == 404) {
        throw unsupported_error{
            "the server answers 404 to /get_world_size: none of vLLM's weight routes is there; "
            "start it with VLLM_SERVER_DEV_MODE=1 in its environment",
            {.phase = phase::probe, .peer = profile.peer, .native_code = 404}};
    }
    if (!reply.ok()) {
        return;
    }
    const json_document document{reply.answer.body, "get_world_size reply", phase::probe};
    profile.world_size =
        static_cast<int>(document.root().at("world_size").integer(1, largest_server));
}

/// A GET opens no session. 405: the route is there, for POST.
inline void read_session_routes(server_profile& profile, const peer_reply& reply) {
    const int status = reply.answer.status;
    profile.has_session_routes = status == 405;
    if (reply.ok()) {
        throw protocol_error{"the server answers " + std::to_string(status) +
                                 " to a GET of /start_weight_update, expected 405 or 404; is there "
                                 "something else at this address?",
                             {.phase = phase::probe, .peer = profile.peer, .native_code = status}};
    }
}

inline void read_weight_info(server_profile& profile, const peer_reply& reply) {
    if (!reply.ok()) {
        return;
    }
    const json_document document{reply.answer.body, "weight_info reply", phase::probe};
    profile.weight_version = document.root().at("weight_version").string(1024);
    profile.has_weight_info = true;
}

/// Asks one route of every peer that is still in play and `wanted`, all at once, and reads the
/// replies. 404 and the status `answer_too` are answers; any other failure is the peer's problem.
template <class Client, class Wanted, class Read>
void probe_route(Client& client, std::vector<server_profile>& profiles, std::string_view target,
                 int answer_too, Wanted wanted, Read read, deadline until,
                 const std::stop_token& stop) {
    std::vector<unsigned char> asked(profiles.size());
    bool any = false;
    bool problem = false;
    for (std::size_t i = 0; i < profiles.size(); ++i) {
        asked[i] = profiles[i].ok() && wanted(profiles[i]) ? 1 : 0;
        any = any || asked[i] != 0;
        problem = problem || !profiles[i].ok();
    }
    // A peer that took all the time is to blame, not those that there is no time left to ask.
    if (!any || (problem && until.expired())) {
        return;
    }
    const auto replies = client.request("GET", target, {.only = asked}, until, stop);
    if (replies.size() != profiles.size()) {
        throw usage_error{"the client gives " + std::to_string(replies.size()) + " replies for " +
                              std::to_string(profiles.size()) + " peers; it must give one a peer",
                          {.phase = phase::probe}};
    }
    for (std::size_t i = 0; i < profiles.size(); ++i) {
        auto& profile = profiles[i];
        if (asked[i] == 0) {
            continue;
        }
        try {
            const auto& answer = replies[i].answer;
            const bool answered = answer.fault == reply_fault::none &&
                                  (answer.status == 404 || answer.status == answer_too);
            if (!replies[i].ok() && !answered) {
                profile.problem = reply_failure(replies[i], phase::probe);
                continue;
            }
            read(profile, replies[i]);
        } catch (const error& cause) {
            profile.problem = failure::from(cause);
            profile.problem.context.peer = profile.peer;
        }
    }
}

}  // namespace detail

/// Asks every peer of `client` who it is: four routes, each asked of all peers at once; a peer that
/// failed one is not asked the next, one of ours is not asked for routes that it has.
/// @returns one profile a peer, in peer order; a peer's failure is its `problem`.
/// @throws usage_error the client breaks its concept.
/// Blocks until all have answered or failed, or `until`.
template <class Client>
    requires HasRequest<Client> && HasPeers<std::remove_reference_t<Client>>
[[nodiscard]] std::vector<server_profile> probe(Client& client, deadline until,
                                                const std::stop_token& stop = {}) {
    std::vector<server_profile> profiles(client.peer_count());
    for (std::size_t i = 0; i < profiles.size(); ++i) {
        profiles[i].peer = std::string{client.peer_name(i)};
    }
    const auto all = [](const server_profile&) { return true; };
    const auto foreign = [](const server_profile& profile) { return !profile.native; };
    detail::probe_route(
        client, profiles, "/version", 404, all,
        [](server_profile& profile, const peer_reply& reply) {
            detail::read_version(profile, reply);
            profile.has_session_routes = profile.native.has_value();
        },
        until, stop);
    detail::probe_route(client, profiles, "/get_world_size", 404, all, detail::read_world_size,
                        until, stop);
    detail::probe_route(client, profiles, "/start_weight_update", 405, foreign,
                        detail::read_session_routes, until, stop);
    detail::probe_route(client, profiles, "/weight_info", 404, all, detail::read_weight_info, until,
                        stop);
    return profiles;
}

}  // namespace weightwire::wire
