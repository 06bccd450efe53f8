#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/fabrics/nccl/pair_machinery.hpp>
#include <weightwire/gpu/lost_devices.hpp>

/// @file
/// Pairs that were given up: each is aborted on a thread of its own, beside whoever gave it up.

namespace weightwire::nccl {

/// Pairs whose abort is under way, each with what its kernels may still use. Not thread-safe.
///
/// Freeing device memory waits for kernels. So where an abort has not returned in its time, what
/// it holds stays in here, and whoever owns this leaves it behind as a whole (`lost`).
template <PairMachinery M, class Held>
class ended_pairs {
public:
    ended_pairs(int device, std::chrono::milliseconds bound) noexcept
        : device_{device}, bound_{bound} {}

    /// Makes room for one more pair to be ended, so that `add` does not allocate.
    void expect_one_more() { pairs_.reserve(std::max(pairs_.size(), ++expected_)); }
    /// Begins the abort of a pair; `held` is kept until it is over. Waits for nothing.
    void add(typename M::pair&& ended, Held held) noexcept {
        pairs_.push_back({std::move(ended).end(), deadline::after(bound_), std::move(held)});
    }
    /// Looks whether aborts have returned: `over(held)` for each that has.
    template <class Over>
    void sweep(Over over) noexcept {
        for (std::size_t i = 0; i < pairs_.size();) {
            auto& each = pairs_[i];
            if (each.ending.over()) {
                over(each.held);
                std::swap(each, pairs_.back());
                pairs_.pop_back();
                --expected_;
                continue;
            }
            if (!each.given_up && each.until.expired()) {
                each.given_up = true;
                lost_ = true;
                gpu::lost_devices::note(device_);
            }
            ++i;
        }
    }
    /// Until each is over or given up.
    template <class Over>
    void finish(Over over) noexcept {
        for (sweep(over); under_way(); sweep(over)) {
            std::this_thread::sleep_for(std::chrono::milliseconds{1});
        }
    }
    /// Whether one is neither over nor given up.
    [[nodiscard]] bool under_way() const noexcept {
        return std::ranges::any_of(pairs_, [](const entry& each) { return !each.given_up; });
    }
    /// Whether an abort did not return in its time.
    [[nodiscard]] bool lost() const noexcept { return lost_; }

private:
    struct entry {
        typename M::ending ending{};
        deadline until;
        Held held{};
        bool given_up = false;
    };

    int device_;
    std::chrono::milliseconds bound_;
    std::vector<entry> pairs_;
    std::size_t expected_ = 0;  ///< pairs that are ended or may be
    bool lost_ = false;
};

}  // namespace weightwire::nccl
