#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

/// @file
/// How fast a sink's commits have copied, for an estimate of the next one.

namespace weightwire::detail {

/// A copy or exchange that was measured.
struct timed_copy {
    std::uint64_t bytes = 0;  ///< 0 where it tells nothing
    std::chrono::nanoseconds took{0};
};

/// Runs `copy`, which returns how many bytes it copied.
template <class Copy>
[[nodiscard]] timed_copy timed(Copy&& copy) {
    const auto began = std::chrono::steady_clock::now();
    const std::uint64_t bytes = copy();
    return {bytes, std::chrono::steady_clock::now() - began};
}

/// The rate of copies. The estimate is the median of the last three and a quarter more: one copy
/// during which the machine slept or was stopped says nothing about the next. Not thread-safe;
/// allocates nothing.
class copy_rate {
    using nanoseconds = std::chrono::nanoseconds;

public:
    /// Takes a trial before the first commit, which took as long as a commit of its bytes will.
    void tried(const timed_copy& trial) noexcept {
        if (const auto cost = cost_of(trial); cost != 0) {
            tried_ = cost;
            recent_.fill(cost);
        }
    }
    /// Measures the copy or exchange of a commit; 0 bytes where it was given up, which tells
    /// nothing, as does one that throws.
    template <class Copy>
    void took(Copy copy) {
        if (const auto cost = cost_of(timed(copy)); cost != 0) {
            push(cost);
        }
    }
    /// A session was prepared and not committed, perhaps since the estimate was too long. Were
    /// nothing forgotten, three slow commits could keep all later ones from ever correcting it.
    void forget_one() noexcept { push(tried_); }

    /// Zero where no copy has told a rate: what is too small to tell one takes microseconds.
    [[nodiscard]] nanoseconds time_for(std::uint64_t bytes) const noexcept {
        constexpr double most = 1e18;
        auto sorted = recent_;
        std::sort(sorted.begin(), sorted.end());
        const double time = static_cast<double>(bytes) * sorted[sorted.size() / 2] * 1.25;
        return nanoseconds{static_cast<nanoseconds::rep>(std::min(time, most))};
    }

private:
    /// Nanoseconds a byte. 0 where there were too few bytes to tell: the reading of the clock would
    /// be most of it.
    [[nodiscard]] static double cost_of(const timed_copy& copy) noexcept {
        constexpr std::uint64_t telling = std::uint64_t{64} << 10U;
        return copy.bytes < telling
                   ? 0
                   : static_cast<double>(copy.took.count()) / static_cast<double>(copy.bytes);
    }
    void push(double cost) noexcept {
        recent_[next_] = cost;
        next_ = (next_ + 1) % recent_.size();
    }

    std::array<double, 3> recent_{};  ///< nanoseconds a byte
    double tried_ = 0;
    std::size_t next_ = 0;
};

}  // namespace weightwire::detail
