#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <sys/socket.h>

#include <boost/beast/http/status.hpp>
#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include <weightwire/core/deadline.hpp>
#include <weightwire/http/socket.hpp>
#include <weightwire/wire/envelope.hpp>
#include <weightwire/wire/http_message.hpp>
#include <weightwire/wire/json_writer.hpp>

/// @file
/// A server's replies as bytes, its own errors, and the end of a connection.

namespace weightwire::http::detail {

/// The phrase of a status, as vLLM's envelope names it.
[[nodiscard]] inline std::string_view phrase_of(int status) {
    const auto phrase = boost::beast::http::obsolete_reason(
        boost::beast::http::int_to_status(static_cast<unsigned>(status)));
    return {phrase.data(), phrase.size()};
}

/// An error in vLLM's envelope (wire section 1.5). `text` begins with the word of the leaf that it
/// becomes at the client.
[[nodiscard]] inline http_response error_response(int status, std::string_view text) {
    return wire::error_response(
        {.status = status, .type = std::string{phrase_of(status)}, .message = std::string{text}});
}

/// A response's head, into memory that is used again.
inline void compose_head(std::string& out, const http_response& response, bool keeps) {
    out.assign("HTTP/1.1 ");
    wire::append_json_integer(out, response.status);
    out.append(" ").append(phrase_of(response.status)).append("\r\nContent-Length: ");
    wire::append_json_integer(out, response.body.size());
    if (!response.body.empty()) {
        out.append("\r\nContent-Type: ").append(response.content_type);
    }
    out.append(keeps ? "\r\nConnection: keep-alive\r\n\r\n" : "\r\nConnection: close\r\n\r\n");
}

/// Ends a connection whose client may still be sending: a plain close would reset it, and the
/// client could lose the answer. Reads on for a while, not for all of a huge body.
inline void linger(int native, std::span<char> scratch) noexcept {
    ::shutdown(native, SHUT_WR);
    const auto until = deadline::after(std::chrono::milliseconds{500});
    for (std::size_t total = 0; total < (std::size_t{4} << 20U);) {
        std::size_t count = 0;
        if (read_some(native, scratch, until, count) != read_result::data) {
            return;
        }
        total += count;
    }
}

}  // namespace weightwire::http::detail
