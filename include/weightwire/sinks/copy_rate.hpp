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

/// The rate of copies. The estimate is the median of the last three and a quarter more: one copy
/// during which the machine slept or was stopped says nothing about the next. Not thread-safe;
/// allocates nothing.
class copy_rate {
    using nanoseconds = std::chrono::nanoseconds;

public:
    /// Measures a copy before the first commit. `copy` returns how many bytes it copied.
    template <class Copy>
    void tried(Copy copy) noexcept {
        if (const auto cost = measure(copy); cost != 0) {
            tried_ = cost;
            recent_.fill(cost);
        }
    }
    /// Measures the copy of a commit.
    template <class Copy>
    void took(Copy copy) noexcept {
        if (const auto cost = measure(copy); cost != 0) {
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
    template <class Copy>
    [[nodiscard]] static double measure(Copy& copy) noexcept {
        constexpr std::uint64_t telling = std::uint64_t{64} << 10U;
        const auto began = std::chrono::steady_clock::now();
        const std::uint64_t bytes = copy();
        const nanoseconds took = std::chrono::steady_clock::now() - began;
        return bytes < telling ? 0 : static_cast<double>(took.count()) / static_cast<double>(bytes);
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
