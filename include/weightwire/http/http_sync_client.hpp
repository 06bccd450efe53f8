#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/http_client.hpp>
#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/http/curl_client.hpp>
#include <weightwire/wire/client_calls.hpp>

/// @file
/// `http_sync_client`: the protocol's calls to one server over HTTP.

namespace weightwire {

/// Models `SyncClient` and `HasRequest` with one peer, over any `HttpClient`.
///
///     weightwire::http_sync_client client{"http://127.0.0.1:8000"};
///
/// Each call blocks for its reply, at most until the deadline. One call at a time per object.
template <HttpClient Client = http::curl_client>
class http_sync_client : public client_calls<http_sync_client<Client>> {
public:
    /// @throws usage_error the address or an option is none. Does not connect.
    explicit http_sync_client(std::string_view url, http::client_options options = {})
        requires std::same_as<Client, http::curl_client>
        : client_{url, std::move(options)} {}
    /// Over a client of your own.
    explicit http_sync_client(Client client) : client_{std::move(client)} {}

    [[nodiscard]] std::size_t peer_count() const noexcept { return 1; }
    [[nodiscard]] std::string_view peer_name(std::size_t) const { return client_.url(); }

    /// Any route: `GET`, or `POST` with the message's body.
    /// @returns one reply; `left_out` where the mask leaves this peer out.
    /// @throws usage_error the message has more than one body or mask entry, or the request could
    /// not be sent as it is.
    [[nodiscard]] std::vector<peer_reply> request(std::string_view method, std::string_view target,
                                                  const control_message& message, deadline until,
                                                  std::stop_token stop = {}) {
        check_message(message, 1);
        std::vector<peer_reply> replies(1);
        replies[0].peer = std::string{client_.url()};
        if (!message.asks(0)) {
            replies[0].answer.fault = reply_fault::left_out;
            return replies;
        }
        const http_call call{.method = method,
                             .target = target,
                             .content_type = message.content_type,
                             .body = message.body_for(0)};
        replies[0].answer = client_.exchange(call, until, std::move(stop));
        message.observer(0, replies[0]);
        return replies;
    }

private:
    Client client_;
};

http_sync_client(const char*) -> http_sync_client<http::curl_client>;
http_sync_client(const char*, http::client_options) -> http_sync_client<http::curl_client>;
http_sync_client(std::string_view) -> http_sync_client<http::curl_client>;
http_sync_client(std::string_view, http::client_options) -> http_sync_client<http::curl_client>;
http_sync_client(const std::string&) -> http_sync_client<http::curl_client>;
http_sync_client(const std::string&, http::client_options) -> http_sync_client<http::curl_client>;
template <HttpClient Client>
http_sync_client(Client) -> http_sync_client<Client>;

static_assert(SyncClient<http_sync_client<>> && HasRequest<http_sync_client<>>);

/// One client a server, all with the same options: what `fan_out_sync_client` takes.
/// @throws usage_error as the constructor.
[[nodiscard]] inline std::vector<http_sync_client<>> http_sync_clients(
    std::span<const std::string> urls, const http::client_options& options = {}) {
    std::vector<http_sync_client<>> clients;
    clients.reserve(urls.size());
    for (const auto& url : urls) {
        clients.emplace_back(url, options);
    }
    return clients;
}

}  // namespace weightwire
