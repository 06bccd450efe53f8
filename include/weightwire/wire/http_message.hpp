#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <stop_token>
#include <string>
#include <string_view>

/// @file
/// A request as a server's handler sees it and the response it gives: no socket, so routes are
/// tested without one.

namespace weightwire {

/// A parsed request. Views live until the handler returns.
struct http_request {
    std::string_view method{};         ///< `GET`, `POST`, …
    std::string_view path{};           ///< path without query, as sent
    std::string_view query{};          ///< text after `?`, empty when there is none
    std::string_view authorization{};  ///< value of the `Authorization` header
    std::string_view content_type{};   ///< value of the `Content-Type` header
    std::string_view body{};
    /// Requested when the server stops or the client hangs up: a blocked handler must return soon.
    std::stop_token stop{};
    /// Whether the client still waits; asked just before a commit. Null: assume so.
    bool (*client_waits)(const void* context) noexcept = nullptr;
    const void* context = nullptr;

    [[nodiscard]] bool client_is_waiting() const noexcept {
        return client_waits == nullptr || client_waits(context);
    }
};

/// What a handler answers.
struct http_response {
    int status = 200;
    std::string_view content_type = "application/json";  ///< a literal
    std::string body{};
};

}  // namespace weightwire
