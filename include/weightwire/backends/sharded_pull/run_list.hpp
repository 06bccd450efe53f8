#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <weightwire/fabrics/pull_fabric.hpp>

/// @file
/// What a fabric is asked to read, as few runs as it can be said in.

namespace weightwire::sharded_pull {

namespace detail {

/// Appends runs, those at regular steps as one.
template <class Memory>
class run_list {
public:
    void add(const Memory* from, std::uint64_t offset, std::byte* to, std::uint64_t bytes) {
        if (!runs_.empty() && follows(runs_.back(), from, offset, to, bytes)) {
            auto& last = runs_.back();
            if (last.count == 1) {
                last.from_step = offset - last.offset;
                last.to_step = static_cast<std::uint64_t>(to - last.to);
            }
            ++last.count;
            return;
        }
        runs_.push_back({.from = from, .offset = offset, .to = to, .bytes = bytes});
    }
    [[nodiscard]] std::span<const remote_run<Memory>> runs() const noexcept { return runs_; }

private:
    [[nodiscard]] static bool follows(const remote_run<Memory>& last, const Memory* from,
                                      std::uint64_t offset, const std::byte* to,
                                      std::uint64_t bytes) noexcept {
        if (last.from != from || last.bytes != bytes || offset <= last.offset || to <= last.to) {
            return false;
        }
        const auto to_step = static_cast<std::uint64_t>(to - last.to);
        return last.count == 1 || (offset - last.offset == last.count * last.from_step &&
                                   to_step == last.count * last.to_step);
    }

    std::vector<remote_run<Memory>> runs_;
};

}  // namespace detail

}  // namespace weightwire::sharded_pull
