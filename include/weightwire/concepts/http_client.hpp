#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <concepts>
#include <cstdint>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>

#include <weightwire/core/deadline.hpp>

/// @file
/// `HttpClient`: one request to one server, with a deadline. `http/curl_client.hpp` is the model
/// that ships.

namespace weightwire {

/// Why there is no HTTP status.
enum class reply_fault : std::uint8_t {
    none,         ///< there is one
    left_out,     ///< the peer was not asked
    unreachable,  ///< no connection: refused, no route, no such host
    closed,       ///< the connection ended before a whole reply
    timed_out,    ///< the deadline, or a part's own limit, passed
    cancelled,    ///< the stop token asked
    malformed,    ///< the reply was no HTTP, or over the limit
};

/// The word that messages use for `value`.
[[nodiscard]] constexpr std::string_view to_string(reply_fault value) noexcept {
    switch (value) {
        case reply_fault::none: return "none";
        case reply_fault::left_out: return "left out";
        case reply_fault::unreachable: return "unreachable";
        case reply_fault::closed: return "connection closed";
        case reply_fault::timed_out: return "timed out";
        case reply_fault::cancelled: return "cancelled";
        case reply_fault::malformed: return "malformed reply";
    }
    return "unknown";
}

/// A request as a client sends it. Views: they live until `exchange` returns.
struct http_call {
    std::string_view method = "GET";                     ///< `GET` or `POST`
    std::string_view target{};                           ///< path with query, begins with `/`
    std::string_view content_type = "application/json";  ///< sent only with a body
    std::string_view body{};                             ///< sent with `POST`, may be empty
};

/// What came back, or why nothing did. A peer's failure is a value, not an exception: many peers
/// are asked at once.
struct http_answer {
    int status = 0;                         ///< HTTP status, 0 when there is a fault
    std::string body{};                     ///< body of the reply
    reply_fault fault = reply_fault::none;  ///< why there is no status
    std::string fault_text{};               ///< the native library's words
    std::chrono::nanoseconds elapsed{};     ///< from the call to the last byte
};

/// `exchange(call, deadline, stop)`: blocks until the whole reply, the deadline or the stop; never
/// throws because of the peer. Connections are kept alive between calls. One call at a time per
/// object.
template <class C>
concept HttpClient = requires(std::remove_reference_t<C>& client, const http_call& call,
                              deadline until, std::stop_token stop) {
    { client.exchange(call, until, stop) } -> std::same_as<http_answer>;
    { client.url() } -> std::convertible_to<std::string_view>;
};

/// One readable line for every member that `C` lacks.
template <class C>
consteval bool explain_http_client() {
    static_assert(
        requires(C& client, const http_call& call, deadline until, std::stop_token stop) {
            { client.exchange(call, until, stop) } -> std::same_as<http_answer>;
        },
        "HttpClient: add exchange(const weightwire::http_call&, weightwire::deadline, "
        "std::stop_token) returning "
        "weightwire::http_answer");
    static_assert(
        requires(C& client) {
            { client.url() } -> std::convertible_to<std::string_view>;
        }, "HttpClient: add url() naming the server");
    return HttpClient<C>;
}

namespace archetypes {

/// The least that models `HttpClient`.
struct http_client {
    http_answer exchange(const http_call&, deadline, std::stop_token) { return {}; }
    std::string_view url() const { return "http://archetype"; }
};

}  // namespace archetypes

static_assert(HttpClient<archetypes::http_client>);

}  // namespace weightwire
