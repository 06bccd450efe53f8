#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stop_token>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// How far an exchange of live and staged bytes may go: until somebody stops waiting for it, or
/// exactly as far as one that is to be undone.

namespace weightwire::detail {

/// Lets an exchange go on while its commit is still wanted. Refers to the stop token.
///
/// The clock is asked once an interval and not once a block, since rows of a strided tensor may
/// have a few bytes each. A process that is stopped inside an interval finishes that one when it is
/// resumed and is told at the next, or by `in_time` after the last.
class exchange_pace {
public:
    exchange_pace(deadline until, const std::stop_token& stop) noexcept
        : until_{until}, stop_{&stop} {}

    /// As `exchange_tensors` asks. What it allows is then exchanged, whatever happens.
    [[nodiscard]] std::size_t operator()(std::size_t wanted) noexcept {
        if (since_ >= interval) {
            if (!in_time()) {
                return 0;
            }
            since_ = 0;
        }
        since_ += wanted;
        allowed_ += wanted;
        return wanted;
    }
    /// Whether the commit is wanted now.
    [[nodiscard]] bool in_time() const noexcept {
        return !stop_->stop_requested() && !until_.expired();
    }
    /// Bytes allowed in all, which is how much there is to undo.
    [[nodiscard]] std::uint64_t allowed() const noexcept { return allowed_; }

    /// Says why the exchange was given up.
    /// @throws cancelled_error, timeout_error
    [[noreturn]] void refuse() const {
        if (stop_->stop_requested()) {
            throw cancelled_error{
                "nobody waits for the commit any more; it is undone, nothing is committed",
                {.phase = phase::finish}};
        }
        throw timeout_error{
            "the commit did not end before the instant from which on nobody counts on it; it is "
            "undone, nothing is committed",
            {.phase = phase::finish}};
    }

private:
    static constexpr std::size_t interval = std::size_t{256} << 10U;

    deadline until_;
    const std::stop_token* stop_;
    std::uint64_t allowed_ = 0;
    std::size_t since_ = interval;  // the first block asks
};

/// Lets the first `left` bytes of an exchange through, which undoes one that ended there.
struct first_bytes {
    std::uint64_t left;

    [[nodiscard]] std::size_t operator()(std::size_t wanted) noexcept {
        const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(wanted, left));
        left -= count;
        return count;
    }
};

}  // namespace weightwire::detail
