#pragma once
// SPDX-License-Identifier: Apache-2.0

#if __cplusplus < 202002L
#error "weightwire needs C++20: -std=c++20, or cpp_std=c++20 in Meson"
#endif

#include <cstdint>
#include <exception>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

/// @file
/// One exception hierarchy. A leaf names the *remedy*, so a caller catches by what it can do next;
/// the context names what failed, and where: operation, backend, phase, rank, peer, tensor, bytes,
/// native code.

namespace weightwire {

/// Where in a session something happened. The four phases of the protocol, and what surrounds them.
enum class phase : std::uint8_t { none, probe, init, start, update, finish, close, plan, serve };

/// The word that messages use for `value`.
[[nodiscard]] constexpr std::string_view to_string(phase value) noexcept {
    switch (value) {
        case phase::none: return "none";
        case phase::probe: return "probe";
        case phase::init: return "init";
        case phase::start: return "start";
        case phase::update: return "update";
        case phase::finish: return "finish";
        case phase::close: return "close";
        case phase::plan: return "plan";
        case phase::serve: return "serve";
    }
    return "unknown";
}

/// What an error knows beside its sentence. Every member is optional; an unset one is left out of
/// the message.
struct error_context {
    weightwire::phase phase = weightwire::phase::none;  ///< phase of the session
    std::string peer{};                                 ///< URL or name of the other side
    std::string tensor{};                               ///< parameter name as in the manifest
    std::string backend{};                              ///< wire name of the backend
    std::string operation{};                            ///< the call that failed, such as `mmap`
    int rank = -1;                  ///< rank on the reporting side, -1 when it does not matter
    std::uint64_t bytes_done = 0;   ///< bytes moved before the failure
    std::uint64_t bytes_total = 0;  ///< bytes that should have moved, 0 when unknown
    int native_code = 0;            ///< errno, HTTP status or library code; 0 when none
    std::string native_text{};      ///< the native library's own words
};

namespace detail {

inline std::string compose_message(std::string_view kind, std::string_view text,
                                   const error_context& context) {
    std::string out{kind};
    const auto field = [&out](std::string_view key, std::string_view value) {
        if (!value.empty()) {
            out.append(out.back() == ']' ? " [" : " [")
                .append(key)
                .append(" ")
                .append(value)
                .append("]");
        }
    };
    if (context.phase != phase::none) {
        field("phase", to_string(context.phase));
    }
    field("backend", context.backend);
    if (context.rank >= 0) {
        field("rank", std::to_string(context.rank));
    }
    field("peer", context.peer);
    field("tensor", context.tensor);
    if (context.bytes_total != 0) {
        field("bytes",
              std::to_string(context.bytes_done) + " of " + std::to_string(context.bytes_total));
    }
    out.append(": ");
    if (!context.operation.empty()) {
        out.append(context.operation).append(": ");
    }
    out.append(text);
    if (context.native_code != 0 || !context.native_text.empty()) {
        out.append(" (");
        if (context.native_code != 0) {
            out.append("code ").append(std::to_string(context.native_code));
        }
        if (!context.native_text.empty()) {
            out.append(context.native_code != 0 ? ", " : "").append(context.native_text);
        }
        out.append(")");
    }
    return out;
}

}  // namespace detail

/// The root. Never thrown itself: catch a leaf to react, this one to report.
///
/// A message reads `<kind> [phase …] [peer …] [tensor …]: <what failed, what was expected and
/// found, what to do>`.
class error : public std::runtime_error {
public:
    /// @param kind the leaf's word, first in the message.
    /// @param text one sentence: what failed, expected and found, and what to do.
    /// @param context where it failed.
    /// @param where the throwing place.
    error(std::string_view kind, std::string_view text, error_context context,
          std::source_location where = std::source_location::current())
        : std::runtime_error{detail::compose_message(kind, text, context)},
          kind_{kind},
          text_{text},
          context_{std::move(context)},
          where_{where} {}

    /// The leaf's word, stable across releases: `usage`, `timeout`, … It travels between trainer
    /// ranks.
    [[nodiscard]] std::string_view kind() const noexcept { return kind_; }
    /// The sentence without its context.
    [[nodiscard]] const std::string& text() const noexcept { return text_; }
    [[nodiscard]] const error_context& context() const noexcept { return context_; }
    [[nodiscard]] const std::source_location& where() const noexcept { return where_; }

private:
    std::string_view kind_;
    std::string text_;
    error_context context_;
    std::source_location where_;
};

namespace detail {

/// A leaf is a tag with a word; the remedy is in the leaf's comment.
template <class Tag>
class error_leaf : public error {
public:
    static constexpr std::string_view word = Tag::word;
    explicit error_leaf(std::string_view text, error_context context = {},
                        std::source_location where = std::source_location::current())
        : error{word, text, std::move(context), where} {}
};

struct usage_tag {
    static constexpr std::string_view word = "usage";
};
struct data_tag {
    static constexpr std::string_view word = "data";
};
struct coverage_tag {
    static constexpr std::string_view word = "coverage";
};
struct mismatch_tag {
    static constexpr std::string_view word = "mismatch";
};
struct timeout_tag {
    static constexpr std::string_view word = "timeout";
};
struct peer_tag {
    static constexpr std::string_view word = "peer";
};
struct protocol_tag {
    static constexpr std::string_view word = "protocol";
};
struct session_tag {
    static constexpr std::string_view word = "session";
};
struct integrity_tag {
    static constexpr std::string_view word = "integrity";
};
struct resource_tag {
    static constexpr std::string_view word = "resource";
};
struct unsupported_tag {
    static constexpr std::string_view word = "unsupported";
};
struct cancelled_tag {
    static constexpr std::string_view word = "cancelled";
};
struct dirty_tag {
    static constexpr std::string_view word = "dirty";
};

}  // namespace detail

/// Correct the call: a precondition of a public function does not hold.
using usage_error = detail::error_leaf<detail::usage_tag>;
/// Correct the data: a checkpoint, file or source contradicts itself or its format.
using data_error = detail::error_leaf<detail::data_tag>;
/// Correct the list of parameters: one is missing, unknown, written twice or of another shape or
/// dtype.
using coverage_error = detail::error_leaf<detail::coverage_tag>;
/// Make both sides agree: plan hash, backend, wire or settings differ. Nothing has moved.
using mismatch_error = detail::error_leaf<detail::mismatch_tag>;
/// Look at the named peer or allow more time: a deadline passed.
using timeout_error = detail::error_leaf<detail::timeout_tag>;
/// Restart the named peer: it died, hung up or could not be reached.
using peer_error = detail::error_leaf<detail::peer_tag>;
/// Upgrade or check the peer: it sent what the protocol does not allow.
using protocol_error = detail::error_leaf<detail::protocol_tag>;
/// Begin the session again: the call does not fit the session's state, or the session was taken
/// over.
using session_error = detail::error_leaf<detail::session_tag>;
/// Send again: bytes that arrived are not the bytes that were sent.
using integrity_error = detail::error_leaf<detail::integrity_tag>;
/// Free or grant something: memory, descriptors, a port, a permission.
using resource_error = detail::error_leaf<detail::resource_tag>;
/// Choose another option: this build, backend or peer cannot do it.
using unsupported_error = detail::error_leaf<detail::unsupported_tag>;
/// Nothing: somebody asked for the stop.
using cancelled_error = detail::error_leaf<detail::cancelled_tag>;
/// Send a full update: the worker holds a mix and serves nothing until then.
using dirty_error = detail::error_leaf<detail::dirty_tag>;

/// Throws the leaf whose word is `kind`: how an error crosses from one trainer rank to another.
/// An unknown word becomes `protocol_error`.
[[noreturn]] inline void throw_as(std::string_view kind, std::string_view text,
                                  error_context context,
                                  std::source_location where = std::source_location::current()) {
    const auto attempt = [&]<class Leaf>(std::type_identity<Leaf>) {
        if (kind == Leaf::word) {
            throw Leaf{text, context, where};
        }
    };
    const auto each = [&]<class... Leaves>() { (attempt(std::type_identity<Leaves>{}), ...); };
    each.template operator()<usage_error, data_error, coverage_error, mismatch_error, timeout_error,
                             peer_error, protocol_error, session_error, integrity_error,
                             resource_error, unsupported_error, cancelled_error, dirty_error>();
    throw protocol_error{text, std::move(context), where};
}

}  // namespace weightwire
