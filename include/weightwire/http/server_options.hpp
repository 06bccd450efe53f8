#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

/// @file
/// Where a server listens, whom it lets in, and the limits that keep a client from holding it.

namespace weightwire::http {

/// Options of `http::server` and `worker_server`.
struct server_options {
    std::string address = "127.0.0.1";  ///< numeric; this machine only unless you say otherwise
    std::uint16_t port = 0;             ///< 0: the system chooses, `port()` tells
    /// Required as `Authorization: Bearer …` by every route but `GET /health`; empty: none.
    std::string token{};
    /// Body limit of the routes that carry a list of parameters (`carries_parameters`).
    std::size_t max_update_body = std::size_t{256} << 20U;
    std::size_t max_body = std::size_t{1} << 20U;     ///< body limit of the others
    std::size_t max_header = std::size_t{16} << 10U;  ///< request line and headers, at most 32 KiB
    std::size_t max_connections = 64;                 ///< one thread each
    std::chrono::milliseconds idle_timeout{120'000};  ///< between two requests
    /// After so long between two requests a connection gives back the memory of a large body.
    std::chrono::milliseconds buffer_timeout{5'000};
    /// From a request's first byte to its body; for a connection's first request, from accepting
    /// it.
    std::chrono::milliseconds header_timeout{10'000};
    std::chrono::milliseconds body_timeout{120'000};  ///< for a whole body
    std::chrono::milliseconds reply_timeout{30'000};  ///< for a client to take a reply
};

/// Routes whose body grows with the number of parameters: handles at init, names or pickles at
/// update, digests at finish and in the checker.
[[nodiscard]] constexpr bool carries_parameters(std::string_view path) noexcept {
    return path == "/update_weights" || path == "/init_weight_transfer_engine" ||
           path == "/finish_weight_update" || path == "/weight_checker";
}

namespace detail {

/// Compares in a time that depends on the length of `given` alone: how many characters are right
/// does not show.
[[nodiscard]] constexpr bool same_secret(std::string_view given, std::string_view secret) noexcept {
    unsigned difference = given.size() == secret.size() ? 0 : 1;
    for (std::size_t i = 0; i < given.size(); ++i) {
        const char expected = secret.empty() ? '\0' : secret[i % secret.size()];
        difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(expected);
    }
    return difference == 0;
}

/// Case-insensitive comparison of ASCII: header values such as `bearer` and `100-Continue`.
[[nodiscard]] constexpr bool same_word(std::string_view a, std::string_view b) noexcept {
    constexpr auto lower = [](char c) {
        return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    };
    return std::ranges::equal(a, b, {}, lower, lower);
}

/// Whether a request's `Authorization` value carries `token`.
[[nodiscard]] constexpr bool is_authorized(std::string_view value,
                                           std::string_view token) noexcept {
    constexpr std::string_view scheme = "Bearer ";
    return value.size() > scheme.size() && same_word(value.substr(0, scheme.size()), scheme) &&
           same_secret(value.substr(scheme.size()), token);
}

}  // namespace detail

}  // namespace weightwire::http
