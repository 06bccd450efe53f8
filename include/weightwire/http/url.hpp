#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <curl/curl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include <weightwire/core/error.hpp>

/// @file
/// The address of a server as a user writes it, checked once, before anything is sent.

namespace weightwire::http {

/// A server's base address.
struct base_url {
    std::string text;       ///< normalized, without a trailing slash: a target is appended to it
    std::string host;       ///< without the brackets of an IPv6 literal
    bool secure = false;    ///< `https`
    bool loopback = false;  ///< names this machine: no proxy is asked for it
};

namespace detail {

struct url_deleter {
    void operator()(CURLU* url) const noexcept { curl_url_cleanup(url); }
};
using url_handle = std::unique_ptr<CURLU, url_deleter>;

/// One part of `url`, empty where it has none.
[[nodiscard]] inline std::string url_part(const url_handle& url, CURLUPart part) {
    char* text = nullptr;
    if (curl_url_get(url.get(), part, &text, 0) != CURLUE_OK || text == nullptr) {
        return {};
    }
    const std::unique_ptr<char, decltype(&curl_free)> owner{text, &curl_free};
    return text;
}

/// Whether `host` is a loopback name or literal. `127.evil.example` is not one, so a literal needs
/// digits and dots only.
[[nodiscard]] inline bool is_loopback(std::string_view host) {
    const bool numeric = host.find_first_not_of("0123456789.") == std::string_view::npos;
    return host == "localhost" || host == "::1" || (numeric && host.starts_with("127."));
}

/// Whether `text` can stand in a request line or header without ending it.
[[nodiscard]] inline bool is_visible_ascii(std::string_view text) {
    return std::ranges::all_of(text, [](char c) { return c > ' ' && c < '\x7f'; });
}

}  // namespace detail

/// Reads `http://host[:port][/prefix]` or `https://…`; a host may be a name, an IPv4 or a bracketed
/// IPv6 literal.
/// @throws usage_error it is none of these, or carries credentials, a query or a fragment: an error
/// message prints the address, so a secret must not be in it.
[[nodiscard]] inline base_url parse_base_url(std::string_view text) {
    const std::string given{text};
    const auto refuse = [&](std::string_view why) -> usage_error {
        return usage_error{"'" + given + "' is no server address: " + std::string{why} +
                           "; write http://host:port or https://host:port"};
    };
    if (!detail::is_visible_ascii(text)) {
        throw refuse("it has spaces, control or non-ASCII characters");
    }
    const detail::url_handle url{curl_url()};
    if (!url) {
        throw resource_error{"libcurl cannot allocate a URL", {.operation = "curl_url"}};
    }
    if (const auto code = curl_url_set(url.get(), CURLUPART_URL, given.c_str(), 0);
        code != CURLUE_OK) {
        throw refuse(code == CURLUE_UNSUPPORTED_SCHEME ? "its scheme is unknown"
                                                       : curl_url_strerror(code));
    }
    const auto scheme = detail::url_part(url, CURLUPART_SCHEME);
    if (scheme != "http" && scheme != "https") {
        throw refuse("its scheme is " + scheme);
    }
    for (const auto part :
         {CURLUPART_USER, CURLUPART_PASSWORD, CURLUPART_QUERY, CURLUPART_FRAGMENT}) {
        if (!detail::url_part(url, part).empty()) {
            // The text may hold a password: it is not repeated.
            throw usage_error{
                "a server address has credentials, a query or a fragment; write "
                "http://host:port and give a token as an option"};
        }
    }
    base_url out{.text = detail::url_part(url, CURLUPART_URL),
                 .host = detail::url_part(url, CURLUPART_HOST),
                 .secure = scheme == "https"};
    while (out.text.ends_with('/')) {
        out.text.pop_back();
    }
    if (out.host.starts_with('[') && out.host.ends_with(']')) {
        out.host = out.host.substr(1, out.host.size() - 2);
    }
    out.loopback = detail::is_loopback(out.host);
    return out;
}

}  // namespace weightwire::http
