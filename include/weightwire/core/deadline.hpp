#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <climits>
#include <stop_token>

/// @file
/// An absolute point on the steady clock that every blocking call takes. There is no way to say
/// "for ever".

namespace weightwire {

/// When a blocking call gives up. Copyable, comparable, cheap; made once at the edge and passed
/// down, so that the parts of one operation share one budget.
class deadline {
public:
    using clock = std::chrono::steady_clock;

    /// `budget` from now. A negative budget has already expired.
    [[nodiscard]] static deadline after(clock::duration budget) noexcept {
        const auto now = clock::now();
        return deadline{budget > clock::time_point::max() - now ? clock::time_point::max()
                                                                : now + budget};
    }
    [[nodiscard]] static constexpr deadline at(clock::time_point when) noexcept {
        return deadline{when};
    }

    [[nodiscard]] constexpr clock::time_point when() const noexcept { return when_; }
    [[nodiscard]] bool expired() const noexcept { return clock::now() >= when_; }
    /// Time left, never negative.
    [[nodiscard]] clock::duration remaining() const noexcept {
        return std::max(clock::duration::zero(), when_ - clock::now());
    }
    /// Time left in whole milliseconds, rounded up, for `poll(2)`; at most `cap`, so that a stop
    /// token is seen in time.
    [[nodiscard]] int poll_milliseconds(int cap = INT_MAX) const noexcept {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(remaining()).count();
        return static_cast<int>(std::min<long long>(left, cap));
    }
    /// `more` after this one; the last instant of the clock where that is beyond it.
    [[nodiscard]] deadline later(clock::duration more) const noexcept {
        return deadline{more > clock::time_point::max() - when_ ? clock::time_point::max()
                                                                : when_ + more};
    }
    /// The earlier of this one and `budget` from now: a part's own limit inside the whole.
    [[nodiscard]] deadline capped(clock::duration budget) const noexcept {
        return std::min(*this, after(budget));
    }

    friend constexpr auto operator<=>(const deadline&, const deadline&) noexcept = default;

private:
    explicit constexpr deadline(clock::time_point when) noexcept : when_{when} {}
    clock::time_point when_;
};

}  // namespace weightwire
