#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <deque>
#include <span>
#include <stop_token>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/engine/rank_crew.hpp>

/// @file
/// The receivers that one trainer's init has made: apart from the ranks that use them, so that the
/// next trainer's can be opened while these still serve.

namespace weightwire::detail {

/// One receiver a rank. Owner: lets go of everything of the trainer's at the end of its life.
template <class Tag>
class rank_receivers {
    using receiver = typename backend_traits<Tag>::receiver;

public:
    /// Makes them; cheap, nothing is opened.
    /// @param devices one a rank.
    /// @param rank_offset global rank of the first.
    rank_receivers(std::span<const int> devices, int rank_offset, int world_size) {
        for (std::size_t i = 0; i < devices.size(); ++i) {
            const auto local = static_cast<int>(i);
            receivers_.emplace_back(receiver_context{.local_rank = local,
                                                     .global_rank = rank_offset + local,
                                                     .world_size = world_size,
                                                     .device = devices[i]});
        }
    }
    rank_receivers(const rank_receivers&) = delete;
    rank_receivers& operator=(const rank_receivers&) = delete;
    ~rank_receivers() {
        for (auto& each : receivers_) {
            each.release();
        }
    }

    /// Opens all, side by side on the threads of `crew`. After a throw some are open: let go of
    /// all.
    /// @param with its manifest outlives this object, the rest this call.
    /// @param stop requested when a rank fails.
    /// @throws what a receiver throws.
    void open(rank_crew& crew, const transport_open& with, deadline until, std::stop_source stop) {
        crew.run([&](std::size_t i) { receivers_[i].open(with, until, stop.get_token()); },
                 [&] { stop.request_stop(); });
    }

    [[nodiscard]] receiver& operator[](std::size_t rank) noexcept { return receivers_[rank]; }

private:
    std::deque<receiver> receivers_;  // receivers need not be movable
};

}  // namespace weightwire::detail
