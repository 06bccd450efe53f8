#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/engine/worker_status.hpp>
#include <weightwire/wire/native.hpp>

/// @file
/// The last look of a worker before it commits: will anybody count on it when it is done?

namespace weightwire::detail {

/// How long a commit will take, in words; nothing where it only swaps.
[[nodiscard]] inline std::string lasting(std::chrono::nanoseconds takes) {
    const auto count = std::chrono::ceil<std::chrono::milliseconds>(takes).count();
    return count == 0 ? std::string{} : " of some " + std::to_string(count) + " ms";
}

/// A trainer that gave up may go on with the old version, so nothing is committed behind its back.
/// @param takes how long the commit will take from now on.
/// @throws timeout_error, cancelled_error nobody will.
inline void require_wanted(const worker_call& call, deadline until, const std::stop_token& stop,
                           std::chrono::nanoseconds takes, error_context where) {
    if (deadline::clock::now() + takes >= until.when()) {
        throw timeout_error{"the commit" + lasting(takes) +
                                " would end after the call's deadline; nothing is committed",
                            std::move(where)};
    }
    if (stop.stop_requested() || !call.client_is_waiting()) {
        throw cancelled_error{"the trainer no longer waits; nothing is committed",
                              std::move(where)};
    }
}

/// Whether the instants of `message` are those of this process's clock.
[[nodiscard]] inline bool same_clock(const wire::native_finish& message,
                                     std::string_view boot_id) noexcept {
    return !boot_id.empty() && message.boot_id == boot_id;
}

/// Until when somebody counts on a commit: what takes time in one is given up then.
/// @param until of the call, as this process counts it.
[[nodiscard]] inline deadline commit_limit(const wire::native_finish& message,
                                           std::string_view boot_id, deadline until) noexcept {
    const deadline::clock::time_point instant{std::chrono::nanoseconds{message.commit_before_ns}};
    return same_clock(message, boot_id) ? std::min(until, deadline::at(instant)) : until;
}

/// A worker that was stopped before it read the call, and resumed, sees a fresh deadline of its
/// own; the trainer's clock is the same where the boot is.
/// @throws timeout_error the commit would end too late for the trainer.
inline void require_before(const wire::native_finish& message, std::string_view boot_id,
                           std::chrono::nanoseconds takes, error_context where) {
    if (same_clock(message, boot_id) &&
        monotonic_ns() + takes.count() >= message.commit_before_ns) {
        throw timeout_error{"the commit" + lasting(takes) +
                                " would end after the instant from which on the trainer counts on "
                                "none; nothing is committed",
                            std::move(where)};
    }
}

/// A label's number, where it grows and leaves room to grow; else `next`. Snapshots name their
/// version, so it must never repeat, whatever the opaque text says.
[[nodiscard]] inline weight_version version_of(const std::optional<std::string>& label,
                                               weight_version next) {
    constexpr weight_version most = std::numeric_limits<weight_version>::max() / 2;
    weight_version number = 0;
    if (label) {
        const auto* end = label->data() + label->size();
        const auto read = std::from_chars(label->data(), end, number);
        const bool usable = read.ec == std::errc{} && read.ptr == end && number <= most;
        number = usable ? number : 0;
    }
    return std::max(next, number);
}

}  // namespace weightwire::detail
