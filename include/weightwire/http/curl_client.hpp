#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <curl/curl.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/concepts/http_client.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/http/curl_exchange.hpp>
#include <weightwire/http/url.hpp>
#include <weightwire/version.hpp>

/// @file
/// `curl_client`: one server, one kept-alive connection, libcurl underneath.

namespace weightwire::http {

/// How a client speaks to its server. Defaults serve a worker on the same network.
struct client_options {
    std::string token{};  ///< sent as `Authorization: Bearer …`; empty: none
    /// Time for name, connection and TLS; the call's deadline still counts.
    std::chrono::milliseconds connect_timeout{5000};
    /// Gives up when no byte has moved for so long. Zero: only the deadline counts, since an update
    /// call is silent until the last byte has landed (wire section 1.7).
    std::chrono::milliseconds read_timeout{0};
    /// A longer reply is refused as malformed.
    std::size_t max_reply_bytes = std::size_t{64} << 20U;
    std::string ca_file{};  ///< certificates to trust for https; empty: the system's
    /// An idle connection older than this is not used again. It is below the five seconds after
    /// which vLLM's server closes one, so that a request never meets a connection that is just
    /// being closed.
    std::chrono::seconds max_idle{4};
};

/// Models `HttpClient` over libcurl.
///
/// - *Deadline and stop.* Both end the call at once: a stop wakes the wait, it is not polled for.
///   The connection is closed then, and the server sees the hang-up.
/// - *Keep-alive.* One connection is kept. Before it is used again libcurl looks whether the server
///   has closed it meanwhile (a restarted server, an idle limit) and opens another: nothing has
///   been sent, so nothing is sent twice.
/// - *No repeats.* A POST whose connection ends before the reply is reported as `closed`, never
///   sent again: the worker may have acted on it. libcurl by itself would repeat it; a hook before
///   each sending prevents that. A GET is repeated once, and only on a connection that was reused.
/// - *No surprises.* No redirects, no `Expect: 100-continue`, no signals, no cookies, no `.netrc`.
///   The environment's proxy is used, but never for a loopback address.
///
/// Thread-safety: one call at a time per object; different objects are independent.
class curl_client {
public:
    /// @param url `http://host:port[/prefix]` or `https://…`; IPv6 literals in brackets.
    /// @throws usage_error the address or an option is none. @throws resource_error libcurl has no
    /// memory. Does not connect.
    explicit curl_client(std::string_view url, client_options options = {})
        : options_{std::move(options)}, base_{parse_base_url(url)} {
        detail::ensure_curl();
        multi_.reset(curl_multi_init());
        easy_.reset(curl_easy_init());
        if (!multi_ || !easy_) {
            throw resource_error{"libcurl cannot allocate a handle", {.peer = base_.text}};
        }
        if (options_.connect_timeout <= std::chrono::milliseconds::zero() ||
            options_.read_timeout < std::chrono::milliseconds::zero() ||
            options_.max_idle <= std::chrono::seconds::zero()) {
            throw usage_error{"a client's timeouts are positive; only read_timeout may be zero",
                              {.peer = base_.text}};
        }
        if (!detail::is_visible_ascii(options_.token)) {
            throw usage_error{"a token has spaces, control or non-ASCII characters",
                              {.peer = base_.text}};
        }
        configure();
    }
    curl_client(curl_client&&) noexcept = default;
    curl_client& operator=(curl_client&&) noexcept = default;

    /// The server's address without a trailing slash.
    [[nodiscard]] const std::string& url() const noexcept { return base_.text; }

    /// Sends `call` and waits for the whole reply, the deadline or the stop.
    /// @throws usage_error the method is neither GET nor POST, or the target or content type could
    /// not stand in a request. A peer's failure is a value.
    [[nodiscard]] http_answer exchange(const http_call& call, deadline until,
                                       std::stop_token stop = {}) {
        const auto began = deadline::clock::now();
        check(call);
        set_headers(call);
        detail::curl_exchange state{.easy = easy_.get(),
                                    .multi = multi_.get(),
                                    .repeatable = call.method == "GET",
                                    .max_reply_bytes = options_.max_reply_bytes,
                                    .read_timeout = options_.read_timeout};
        prepare(call, until, state);
        auto answer = state.run(until, stop);
        answer.elapsed = deadline::clock::now() - began;
        return answer;
    }

private:
    template <class Value>
    void set(CURLoption option, Value value) {
        if (const auto code = curl_easy_setopt(easy_.get(), option, value); code != CURLE_OK) {
            throw unsupported_error{"this libcurl refuses option " +
                                        std::to_string(static_cast<int>(option)) +
                                        "; use 7.85 or newer, built with HTTP",
                                    {.peer = base_.text,
                                     .operation = "curl_easy_setopt",
                                     .native_code = static_cast<int>(code),
                                     .native_text = curl_easy_strerror(code)}};
        }
    }

    /// What stays the same for every call.
    void configure() {
        // One connection: an older one that went bad is dropped, not kept beside the new one.
        curl_multi_setopt(multi_.get(), CURLMOPT_MAXCONNECTS, 1L);
        set(CURLOPT_NOSIGNAL, 1L);
        set(CURLOPT_PROTOCOLS_STR, "http,https");
        set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
        set(CURLOPT_FOLLOWLOCATION, 0L);
        set(CURLOPT_PATH_AS_IS, 1L);
        set(CURLOPT_USERAGENT, (std::string{"weightwire/"} + version_string).c_str());
        set(CURLOPT_TCP_NODELAY, 1L);
        // An update call is silent for long: probes find a host that has vanished meanwhile.
        set(CURLOPT_TCP_KEEPALIVE, 1L);
        set(CURLOPT_TCP_KEEPIDLE, 15L);
        set(CURLOPT_TCP_KEEPINTVL, 5L);
        set(CURLOPT_MAXAGE_CONN, static_cast<long>(options_.max_idle.count()));
#if LIBCURL_VERSION_NUM >= 0x075700
        // A name that resolves slowly must not hold us past the deadline while its thread ends.
        set(CURLOPT_QUICK_EXIT, 1L);
#endif
        if (base_.loopback) {
            set(CURLOPT_PROXY, "");
        }
        if (!options_.ca_file.empty()) {
            set(CURLOPT_CAINFO, options_.ca_file.c_str());
        }
        detail::curl_exchange::install(easy_.get());
    }

    static void check(const http_call& call) {
        if (call.method != "GET" && call.method != "POST") {
            throw usage_error{"an HTTP call has method '" + std::string{call.method} +
                              "'; GET and POST are possible"};
        }
        if (!call.target.starts_with('/') || !detail::is_visible_ascii(call.target) ||
            call.target.find('#') != std::string_view::npos) {
            throw usage_error{"an HTTP call's target is '" + std::string{call.target} +
                              "'; it begins with a slash and has visible ASCII characters only"};
        }
        if (!std::ranges::all_of(call.content_type,
                                 [](char c) { return c >= ' ' && c < '\x7f'; })) {
            throw usage_error{"an HTTP call's content type has control characters"};
        }
    }

    /// Builds the header list again only when the content type changed.
    void set_headers(const http_call& call) {
        const bool has_body = call.method == "POST" && !call.body.empty();
        const std::string content_type{has_body ? call.content_type : std::string_view{}};
        if (headers_ && content_type == content_type_) {
            return;
        }
        headers_.reset();
        // A header with nothing after the colon is left out: no waiting for a 100 reply, and no
        // form type on an empty body.
        append_header("Expect:");
        append_header("Content-Type:" + (content_type.empty() ? "" : " " + content_type));
        if (!options_.token.empty()) {
            append_header("Authorization: Bearer " + options_.token);
        }
        content_type_ = content_type;
        set(CURLOPT_HTTPHEADER, headers_.get());
    }

    void append_header(const std::string& line) {
        auto* const grown = curl_slist_append(headers_.get(), line.c_str());
        if (grown == nullptr) {
            throw resource_error{"libcurl cannot allocate a header", {.peer = base_.text}};
        }
        static_cast<void>(headers_.release());  // `grown` is the same list
        headers_.reset(grown);
    }

    void prepare(const http_call& call, deadline until, detail::curl_exchange& state) {
        target_.assign(base_.text).append(call.target);
        set(CURLOPT_URL, target_.c_str());
        if (call.method == "GET") {
            set(CURLOPT_HTTPGET, 1L);
        } else {
            set(CURLOPT_POST, 1L);
            set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(call.body.size()));
            set(CURLOPT_POSTFIELDS, call.body.empty() ? "" : call.body.data());
        }
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until.remaining());
        set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(std::max<std::chrono::milliseconds::rep>(
                                           1, std::min(left, options_.connect_timeout).count())));
        state.bind();
    }

    client_options options_;
    base_url base_;
    std::string target_;
    std::string content_type_;
    detail::slist_handle headers_;  // libcurl reads it during a call
    detail::multi_handle multi_;    // owns the connection; outlives the easy handle
    detail::easy_handle easy_;
};

static_assert(HttpClient<curl_client>);

}  // namespace weightwire::http
