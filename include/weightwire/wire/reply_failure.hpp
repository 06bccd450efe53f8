#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/core/failure.hpp>

/// @file
/// A peer's unsuccessful reply as a `failure`: the leaf, the peer's own words, the tensor it named.

namespace weightwire::wire {

namespace detail {

/// `message` of `{"error":{"message":…}}` or the text of `{"error":"…"}`; else the body's first
/// line, which may be a page of HTML's.
[[nodiscard]] inline std::string envelope_text(std::string_view body) {
    constexpr std::size_t longest_worth_parsing = 65536;
    if (body.size() <= longest_worth_parsing) {
        const auto reply = nlohmann::json::parse(body, nullptr, /*allow_exceptions=*/false);
        if (reply.is_object() && reply.contains("error")) {
            const auto& said = reply["error"];
            if (said.is_string()) {
                return said.get<std::string>();
            }
            if (said.is_object() && said.contains("message") && said["message"].is_string()) {
                return said["message"].get<std::string>();
            }
        }
    }
    body.remove_prefix(std::min(body.find_first_not_of(" \t\r\n"), body.size()));
    return std::string{body.substr(0, std::min<std::size_t>(body.find_first_of("\r\n"), 500))};
}

/// The leaf that a message of our own server begins with, or nothing: `integrity [phase finish] …`.
[[nodiscard]] inline std::string_view leading_kind(std::string_view text) {
    const auto word = text.substr(0, text.find_first_of(" :"));
    for (const std::string_view kind :
         {"usage", "data", "coverage", "mismatch", "timeout", "peer", "protocol", "session",
          "integrity", "resource", "unsupported", "cancelled", "dirty"}) {
        if (word == kind) {
            return kind;
        }
    }
    return {};
}

/// The same behind the words with which vLLM, and our server in its dialect, begins what a worker
/// threw.
[[nodiscard]] inline std::string_view worker_kind(std::string_view text) {
    constexpr std::string_view before = "Call to collective_rpc method failed: ";
    return leading_kind(text.starts_with(before) ? text.substr(before.size()) : text);
}

/// Value of `[key …]` in a message of our own server.
[[nodiscard]] inline std::string bracketed(std::string_view text, std::string_view key) {
    const auto open = text.find("[" + std::string{key} + " ");
    const auto close = open == std::string_view::npos ? open : text.find(']', open);
    if (close == std::string_view::npos) {
        return {};
    }
    const auto begin = open + key.size() + 2;
    return std::string{text.substr(begin, close - begin)};
}

/// A message of our own server, which begins with `kind`, without what a failure in `where` says
/// itself: the kind, the phase, the backend and the tensor.
[[nodiscard]] inline std::string sentence_of(std::string_view text, std::string_view kind,
                                             phase where) {
    const auto phase_field = "phase " + std::string{to_string(where)};
    std::string kept;
    auto rest = text.substr(kind.size());
    while (rest.starts_with(" [")) {
        const auto end = std::min(rest.find("] ["), rest.find("]: "));
        if (end == std::string_view::npos) {
            return std::string{text};
        }
        const auto field = rest.substr(2, end - 2);
        if (field != phase_field && !field.starts_with("backend ") &&
            !field.starts_with("tensor ")) {
            kept.append("[").append(field).append("] ");
        }
        rest.remove_prefix(end + 1);
    }
    return rest.starts_with(": ") ? kept.append(rest.substr(2)) : std::string{text};
}

/// What to look at when a server gave no answer.
[[nodiscard]] constexpr std::string_view advice_on(reply_fault fault) noexcept {
    switch (fault) {
        case reply_fault::unreachable: return "; see that it was started and can be reached";
        case reply_fault::closed: return "; it may have died, see its log";
        case reply_fault::timed_out: return "; see what it is busy with, or allow more time";
        case reply_fault::malformed: return "; see that it is the server that was meant";
        default: return "";
    }
}

[[nodiscard]] constexpr std::string_view kind_of_fault(reply_fault fault) noexcept {
    switch (fault) {
        case reply_fault::timed_out: return "timeout";
        case reply_fault::cancelled: return "cancelled";
        case reply_fault::malformed: return "protocol";
        default: return "peer";
    }
}

/// The leaf for an HTTP status whose body does not name one.
[[nodiscard]] constexpr std::string_view kind_of_status(int status) noexcept {
    switch (status) {
        case 401:
        case 403: return "usage";
        case 404:
        case 405:
        case 501: return "unsupported";
        case 409: return "session";
        case 413: return "resource";
        case 503: return "dirty";
        default: return status >= 500 ? "peer" : "protocol";
    }
}

}  // namespace detail

/// The leaf that the body of a refusal names; empty when it names none.
[[nodiscard]] inline std::string kind_in_envelope(std::string_view body) {
    return std::string{detail::worker_kind(detail::envelope_text(body))};
}

/// What `reply` says went wrong in `where`; empty when it is a success.
[[nodiscard]] inline failure reply_failure(const peer_reply& reply, phase where) {
    if (reply.ok()) {
        return {};
    }
    const auto& answer = reply.answer;
    if (answer.fault != reply_fault::none) {
        return {std::string{detail::kind_of_fault(answer.fault)},
                "no answer from the server (" + std::string{to_string(answer.fault)} + ")" +
                    std::string{detail::advice_on(answer.fault)},
                {.phase = where, .peer = reply.peer, .native_text = answer.fault_text}};
    }
    const auto text = detail::envelope_text(answer.body);
    const auto kind = detail::leading_kind(text);
    return {std::string{kind.empty() ? detail::kind_of_status(answer.status) : kind},
            "the server answered " + std::to_string(answer.status) + ": " +
                (kind.empty() ? text : detail::sentence_of(text, kind, where)),
            {.phase = where,
             .peer = reply.peer,
             .tensor = detail::bracketed(text, "tensor"),
             .backend = kind.empty() ? std::string{} : detail::bracketed(text, "backend"),
             .native_code = answer.status}};
}

}  // namespace weightwire::wire
