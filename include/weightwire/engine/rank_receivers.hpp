#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <stop_token>
#include <string>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/engine/rank_crew.hpp>

/// @file
/// The receivers that one trainer's init has made: apart from the ranks that use them, so that the
/// next trainer's can be opened while these still serve.

namespace weightwire::detail {

/// One receiver a rank. Owner: lets go of everything of the trainer's at the end of its life, one
/// rank after another. Where that may take its time, `release` comes first.
template <class Tag>
class rank_receivers {
    using receiver = typename backend_traits<Tag>::receiver;

public:
    /// Makes them; cheap, nothing is opened.
    /// @param tag given to receivers that take one.
    /// @param devices one a rank.
    /// @param rank_offset global rank of the first.
    rank_receivers(const Tag& tag, std::span<const int> devices, int rank_offset, int world_size)
        : rank_offset_{rank_offset}, world_size_{world_size} {
        for (std::size_t i = 0; i < devices.size(); ++i) {
            const auto local = static_cast<int>(i);
            const receiver_context context{.local_rank = local,
                                           .global_rank = rank_offset + local,
                                           .world_size = world_size,
                                           .device = devices[i]};
            if constexpr (std::constructible_from<receiver, const receiver_context&, const Tag&>) {
                receivers_.emplace_back(context, tag);
            } else {
                receivers_.emplace_back(context);
            }
        }
    }
    rank_receivers(const rank_receivers&) = delete;
    rank_receivers& operator=(const rank_receivers&) = delete;
    ~rank_receivers() {
        for (auto& each : receivers_) {
            each.release();
        }
    }

    /// Opens all, side by side on the threads of `crew`. After a throw none is open.
    /// @param with its manifest outlives this object, the rest this call.
    /// @param destinations of a `sharded` transport, what each rank's sink holds: outlives this
    /// object too. Else empty.
    /// @param stop requested when a rank fails.
    /// @throws what a receiver throws.
    void open(rank_crew& crew, const transport_open& with,
              std::span<const manifest* const> destinations, deadline until,
              std::stop_source stop) {
        try {
            crew.run(
                [&](std::size_t i) {
                    auto own = with;
                    own.destinations = i < destinations.size() ? destinations[i] : nullptr;
                    receivers_[i].open(own, until, stop.get_token());
                },
                [&] { stop.request_stop(); });
        } catch (...) {
            release(crew);
            throw;
        }
    }
    /// Lets go of everything of the trainer's, side by side: what one rank's device does may end
    /// only when its sibling's has been ended too. Idempotent.
    void release(rank_crew& crew) noexcept {
        crew.run([this](std::size_t i) noexcept { receivers_[i].release(); });
    }

    /// Whether memory of a rank may be written at any later time, after a release too.
    [[nodiscard]] bool lost() const noexcept {
        if constexpr (HasLost<receiver>) {
            return std::any_of(receivers_.begin(), receivers_.end(),
                               [](const receiver& each) { return each.lost(); });
        } else {
            return false;
        }
    }
    /// Memory that receivers take in their first rounds, of all ranks.
    [[nodiscard]] std::uint64_t table_bytes() const noexcept {
        std::uint64_t sum = 0;
        if constexpr (HasTableBytes<receiver>) {
            for (const auto& each : receivers_) {
                sum += each.table_bytes();
            }
        }
        return sum;
    }
    /// `visit(text)` with what each rank's receiver has chosen, where they tell.
    template <class Visit>
    void describe(Visit visit) const {
        if constexpr (HasDescription<receiver>) {
            for (const auto& each : receivers_) {
                visit(std::string{each.description()});
            }
        }
    }

    /// Whether they were made for these places in the group.
    [[nodiscard]] bool is_for(int rank_offset, int world_size) const noexcept {
        return rank_offset == rank_offset_ && world_size == world_size_;
    }
    [[nodiscard]] receiver& operator[](std::size_t rank) noexcept { return receivers_[rank]; }

private:
    std::deque<receiver> receivers_;  // receivers need not be movable
    int rank_offset_;
    int world_size_;
};

}  // namespace weightwire::detail
