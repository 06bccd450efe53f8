#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <functional>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/error.hpp>
#include <weightwire/nccl_api/library.hpp>
#include <weightwire/nccl_api/nccl.hpp>

/// @file
/// From a result of NCCL to one of our errors, with NCCL's own words.

namespace weightwire::nccl_api {

/// The last warning that this copy of NCCL wrote, empty when there was none. It is one text for the
/// whole process and is never cleared: whoever wants the words of one operation compares with what
/// it said before.
[[nodiscard]] inline std::string last_words(const library& from) {
    const char* words = from.calls().last_error(nullptr);
    std::string text{words != nullptr ? words : ""};
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) {
        text.pop_back();
    }
    return text;
}

namespace detail {

/// Tells whether the last words are still the same ones, without a copy of them.
[[nodiscard]] inline std::size_t digest_of_words(const library& from) noexcept {
    const char* words = from.calls().last_error(nullptr);
    return words != nullptr ? std::hash<std::string_view>{}(words) : 0;
}

/// The last words, where they were written since `before`, a digest of them. Else none: they are
/// of some other operation, perhaps of a group that ended long ago.
[[nodiscard]] inline std::string words_since(const library& from, std::size_t before) {
    return digest_of_words(from) != before ? last_words(from) : std::string{};
}

[[nodiscard]] inline bool mentions(std::string_view text, std::string_view part) noexcept {
    return text.find(part) != std::string_view::npos;
}

/// The sentence for ranks whose versions differ: what is used here, and the remedy.
[[nodiscard]] inline std::string explain_versions(const library& used) {
    return "the ranks use different versions of NCCL; this one uses " + used.description() +
           "; make all use one: open the libnccl.so.2 of the peer's own environment by its path";
}

/// Whether NCCL's words tell of ranks with different versions. Seen: one side compares the versions
/// of all ranks ("Mismatched NCCL version detected"), the other that of its connection ("NCCL
/// version mismatch with remote peer"). Releases that do not, stumble over a record whose size
/// differs; once ranks have met, that is a broadcast of another size.
/// @param meeting whether the ranks are still about to meet.
[[nodiscard]] inline bool tells_of_versions(std::string_view words, bool meeting) noexcept {
    return mentions(words, "Mismatched NCCL version") || mentions(words, "NCCL version mismatch") ||
           (meeting && mentions(words, "Message truncated"));
}

/// Whether the words are those of the process that made a unique id, on ranks that cannot all come:
/// a world size that differs, or a rank that came twice. Other warnings of that process are not.
[[nodiscard]] inline bool tells_of_check_in(std::string_view words) noexcept {
    return mentions(words, "Bootstrap Root") &&
           (mentions(words, "mismatch in") || mentions(words, "already checked in"));
}

/// Whether NCCL's words tell of a connection, that is of the other side.
[[nodiscard]] inline bool tells_of_connection(std::string_view words) noexcept {
    return mentions(words, "onnect") || mentions(words, "remote") || mentions(words, "socket");
}

}  // namespace detail

/// Throws the error that a failed `result` means.
///
/// @param used the copy that returned it.
/// @param result neither success nor "in progress".
/// @param operation the call's name.
/// @param words NCCL's words on it, from `words_since`; taken before an abort adds its own. They
/// are classified, so those of another operation would give another error.
/// @param context phase, rank and peer; its native members are replaced. In the phase of init, the
/// ranks are about to meet.
/// @param addition a sentence that is put behind ours, such as what the abort met.
/// @throws mismatch_error the ranks use different versions.
/// @throws peer_error another rank is gone, or hung up.
/// @throws usage_error an argument is wrong, or two ranks claim one GPU.
/// @throws resource_error everything else.
[[noreturn]] inline void throw_failure(
    const library& used, ncclResult_t result, std::string_view operation, std::string_view words,
    error_context context, std::string_view addition = {},
    std::source_location where = std::source_location::current()) {
    context.operation = operation;
    context.native_code = static_cast<int>(result);
    context.native_text = used.calls().error_string(result);
    if (!words.empty()) {
        context.native_text.append(": ").append(words);
    }
    const auto sentence = [&](std::string text) { return text.append(addition); };
    if (detail::tells_of_versions(words, context.phase == phase::init)) {
        throw mismatch_error{sentence(detail::explain_versions(used)), std::move(context), where};
    }
    if (detail::mentions(words, "Duplicate GPU")) {
        throw usage_error{
            sentence("two ranks claim one GPU; give each its own, or for a test on one GPU each "
                     "process its own NCCL_HOSTID"),
            std::move(context), where};
    }
    if (result == ncclRemoteError ||
        (result == ncclSystemError && detail::tells_of_connection(words))) {
        throw peer_error{sentence("the other side is gone: it died, hung up or aborted; restart it "
                                  "if it died, then join again"),
                         std::move(context), where};
    }
    if (result == ncclInvalidArgument || result == ncclInvalidUsage) {
        throw usage_error{sentence("NCCL refuses the call; look at its words"), std::move(context),
                          where};
    }
    throw resource_error{
        sentence("a call to NCCL failed; look at its words, or set NCCL_DEBUG=WARN for more"),
        std::move(context), where};
}

/// Throws where `result` is a failure; returns on success and on "in progress".
/// @param words_before `detail::digest_of_words` from before the call.
inline void check(const library& used, ncclResult_t result, std::string_view operation,
                  std::size_t words_before, error_context context = {},
                  std::source_location where = std::source_location::current()) {
    if (result != ncclSuccess && result != ncclInProgress) {
        throw_failure(used, result, operation, detail::words_since(used, words_before),
                      std::move(context), {}, where);
    }
}

}  // namespace weightwire::nccl_api
