#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/http_client.hpp>
#include <weightwire/core/deadline.hpp>

/// @file
/// `SyncClient`: how the trainer reaches inference. A client speaks to one or several *peers*; a
/// peer is one server, which stands in front of one or several worker ranks.
///
/// Semantics: the four calls send a message to the peers it names, at once, and block until every
/// one of them has answered, failed, or the deadline passed. They return one `peer_reply` per peer
/// of the client, in peer order; a peer's failure is a value. They throw only `usage_error`.
/// Several threads may not call at the same time. The reply observer, when set, is called as soon
/// as a peer's reply is known, possibly from another thread, before the call returns: with it one
/// worker's failure can stop the data move at once.
///
/// Model: `http_sync_client`, `local_sync_client`, `fan_out_sync_client`; four calls over Ray.
/// Non-model: a client that throws when one of eight servers answers 500.

namespace weightwire {

/// One peer's answer to one call.
struct peer_reply {
    std::string peer{};    ///< URL or name
    http_answer answer{};  ///< status and body, or a fault
    /// Whether the peer did what it was asked.
    [[nodiscard]] bool ok() const noexcept { return answer.status >= 200 && answer.status < 300; }
};

/// Told of each reply as it comes. A plain function and its context, so that it costs nothing to
/// pass.
struct reply_observer {
    void (*call)(void* context, std::size_t peer, const peer_reply& reply) noexcept = nullptr;
    void* context = nullptr;
    void operator()(std::size_t peer, const peer_reply& reply) const noexcept {
        if (call != nullptr) {
            call(context, peer, reply);
        }
    }
};

/// Asked when a peer has answered, after the observer: another body to send to it within the same
/// call, or an empty view. What it gives lives until the peer has answered that too.
///
/// `init_weight_transfer_engine` needs it: servers of several releases may stand in one group, one
/// refuses a field that it does not know, and the others do not answer before it has joined.
struct body_retry {
    std::string_view (*call)(void* context, std::size_t peer,
                             const peer_reply& reply) noexcept = nullptr;
    void* context = nullptr;
    [[nodiscard]] std::string_view operator()(std::size_t peer,
                                              const peer_reply& reply) const noexcept {
        return call == nullptr ? std::string_view{} : call(context, peer, reply);
    }
};

/// What one control call carries. Views: they live until the call returns.
struct control_message {
    /// One body for all peers, or one a peer.
    std::span<const std::string_view> bodies{};
    std::string_view content_type = "application/json";
    /// Peers to ask, by index; an entry is non-zero to ask. Empty: all. The others' replies are
    /// `left_out`.
    std::span<const unsigned char> only{};
    reply_observer observer{};
    /// A client of one peer may leave it unasked, and the engine calls again. A client of several
    /// peers asks it as soon as one has answered (possibly from several threads, each about its own
    /// peers); the observer is told of every answer.
    body_retry again{};

    [[nodiscard]] std::string_view body_for(std::size_t peer) const noexcept {
        return bodies.empty() ? std::string_view{} : bodies[bodies.size() == 1 ? 0 : peer];
    }
    [[nodiscard]] bool asks(std::size_t peer) const noexcept {
        return only.empty() || only[peer] != 0;
    }
};

/// Number of peers and their names, constant.
template <class C>
concept HasPeers = requires(const C& client, std::size_t peer) {
    { client.peer_count() } -> std::convertible_to<std::size_t>;
    { client.peer_name(peer) } -> std::convertible_to<std::string_view>;
};

/// `POST /init_weight_transfer_engine`.
template <class C>
concept HasInitCall =
    requires(C& client, const control_message& message, deadline until, std::stop_token stop) {
        { client.init(message, until, stop) } -> std::same_as<std::vector<peer_reply>>;
    };
/// `POST /start_weight_update`.
template <class C>
concept HasStartCall =
    requires(C& client, const control_message& message, deadline until, std::stop_token stop) {
        { client.start(message, until, stop) } -> std::same_as<std::vector<peer_reply>>;
    };
/// `POST /update_weights`.
template <class C>
concept HasUpdateCall =
    requires(C& client, const control_message& message, deadline until, std::stop_token stop) {
        { client.update(message, until, stop) } -> std::same_as<std::vector<peer_reply>>;
    };
/// `POST /finish_weight_update`.
template <class C>
concept HasFinishCall =
    requires(C& client, const control_message& message, deadline until, std::stop_token stop) {
        { client.finish(message, until, stop) } -> std::same_as<std::vector<peer_reply>>;
    };

/// How to reach inference.
template <class C>
concept SyncClient =
    HasPeers<std::remove_reference_t<C>> && HasInitCall<std::remove_reference_t<C>> &&
    HasStartCall<std::remove_reference_t<C>> && HasUpdateCall<std::remove_reference_t<C>> &&
    HasFinishCall<std::remove_reference_t<C>>;

/// Optional: any route, so that world size, version, pause and resume can be asked
/// (`wire/probe.hpp`). A client without it is spoken to in the newest vLLM dialect, and the world
/// size must be given.
template <class C>
concept HasRequest =
    requires(std::remove_reference_t<C>& client, std::string_view method, std::string_view target,
             const control_message& message, deadline until, std::stop_token stop) {
        {
            client.request(method, target, message, until, stop)
        } -> std::same_as<std::vector<peer_reply>>;
    };

/// One readable line for every member that `C` lacks.
template <class C>
consteval bool explain_sync_client() {
    static_assert(HasPeers<C>,
                  "SyncClient: add const members peer_count() and peer_name(std::size_t)");
    static_assert(
        HasInitCall<C>,
        "SyncClient: add init(const control_message&, deadline, std::stop_token) returning "
        "std::vector<peer_reply>, one a peer");
    static_assert(
        HasStartCall<C>,
        "SyncClient: add start(const control_message&, deadline, std::stop_token) returning "
        "std::vector<peer_reply>, one a peer");
    static_assert(HasUpdateCall<C>,
                  "SyncClient: add update(const control_message&, deadline, std::stop_token) "
                  "returning std::vector<peer_reply>, one a peer");
    static_assert(HasFinishCall<C>,
                  "SyncClient: add finish(const control_message&, deadline, std::stop_token) "
                  "returning std::vector<peer_reply>, one a peer");
    return SyncClient<C>;
}

namespace archetypes {

/// The least that models `SyncClient`.
struct sync_client {
    std::size_t peer_count() const { return 1; }
    std::string_view peer_name(std::size_t) const { return "archetype"; }
    std::vector<peer_reply> init(const control_message&, deadline, std::stop_token) { return {}; }
    std::vector<peer_reply> start(const control_message&, deadline, std::stop_token) { return {}; }
    std::vector<peer_reply> update(const control_message&, deadline, std::stop_token) { return {}; }
    std::vector<peer_reply> finish(const control_message&, deadline, std::stop_token) { return {}; }
};

}  // namespace archetypes

static_assert(SyncClient<archetypes::sync_client>);

}  // namespace weightwire
