#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <source_location>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/http_message.hpp>
#include <weightwire/wire/json_writer.hpp>

/// @file
/// How a server says that something went wrong: vLLM's two envelopes, and which status means what
/// (vLLM wire section 1.5, docs/wire.md "Errors").

namespace weightwire::wire {

/// A reply that is an error.
struct http_error {
    int status = 500;
    std::string type{};     ///< vLLM's: the status in words
    std::string message{};  ///< for people and for clients that look for vLLM's texts
    std::string param{};    ///< what it is about (a tensor), empty: null
};

/// The status in words: `type` of vLLM's envelope.
[[nodiscard]] constexpr std::string_view reason_phrase(int status) noexcept {
    switch (status) {
        case 400: return "Bad Request";
        case 401: return "Unauthorized";
        case 404: return "Not Found";
        case 405: return "Method Not Allowed";
        case 408: return "Request Timeout";
        case 409: return "Conflict";
        case 413: return "Request Entity Too Large";
        case 501: return "Not Implemented";
        case 503: return "Service Unavailable";
        default: return "Internal Server Error";
    }
}

[[nodiscard]] inline http_error make_http_error(int status, std::string_view message,
                                                std::string_view param = {}) {
    return {status, std::string{reason_phrase(status)}, std::string{message}, std::string{param}};
}

/// `{"error":{"message":…,"type":…,"param":…,"code":…}}`. Bytes that are no UTF-8 are replaced: a
/// message may quote what a peer sent.
[[nodiscard]] inline std::string error_body(const http_error& error) {
    std::string body;
    json_writer out{body};
    out.begin_object().key("error").begin_object();
    out.key("message").string(error.message, bad_utf8::replace);
    out.key("type").string(error.type, bad_utf8::replace).key("param");
    if (error.param.empty()) {
        out.null();
    } else {
        out.string(error.param, bad_utf8::replace);
    }
    out.key("code").integer(error.status).end_object().end_object();
    return body;
}

/// `{"error":"text"}`: what `/pause`, `/resume`, `/is_paused` and `/abort_requests` answer.
[[nodiscard]] inline std::string plain_error_body(std::string_view text) {
    std::string body;
    json_writer out{body};
    out.begin_object().key("error").string(text, bad_utf8::replace).end_object();
    return body;
}

[[nodiscard]] inline http_response error_response(const http_error& error) {
    return {.status = error.status, .body = error_body(error)};
}

/// A request body that is refused: a `protocol_error` that knows vLLM's reply to it.
class request_error : public protocol_error {
public:
    request_error(http_error answer, phase where,
                  std::source_location place = std::source_location::current())
        : protocol_error{answer.message, {.phase = where}, place}, answer_{std::move(answer)} {}
    [[nodiscard]] const http_error& answer() const noexcept { return answer_; }

private:
    http_error answer_;
};

/// The status that a native request gets for an error of kind `kind`. Everything that went wrong
/// while the request was carried out is 500; the message's first word says what.
[[nodiscard]] constexpr int native_status(std::string_view kind) noexcept {
    if (kind == usage_error::word || kind == protocol_error::word || kind == data_error::word ||
        kind == mismatch_error::word) {
        return 400;
    }
    if (kind == session_error::word) {
        return 409;
    }
    if (kind == unsupported_error::word) {
        return 501;
    }
    return kind == dirty_error::word ? 503 : 500;
}

/// The reply to a native request that ended in `cause`: the whole message, so that the trainer can
/// throw the same leaf.
[[nodiscard]] inline http_error native_http_error(const error& cause) {
    return make_http_error(native_status(cause.kind()), cause.what(), cause.context().tensor);
}

/// The reply to a vLLM request that ended in `cause`. A refused body has its own; everything else
/// is what vLLM makes of an exception in a worker: 500, with its text after a fixed beginning.
[[nodiscard]] inline http_error vllm_http_error(const error& cause) {
    if (const auto* refused = dynamic_cast<const request_error*>(&cause)) {
        return refused->answer();
    }
    return make_http_error(500,
                           std::string{"Call to collective_rpc method failed: "} + cause.what(),
                           cause.context().tensor);
}

}  // namespace weightwire::wire
