#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/nccl/machinery.hpp>
#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/pinned_bounce.hpp>

/// @file
/// What both halves of `nccl` hold between `open` and the end: the group, two streams, the buffers
/// that rotate, and a small pinned one for tensors in host memory.

namespace weightwire::nccl::detail {

using weightwire::detail::check_time;

/// One rotating buffer and where its use stands.
template <Machinery M>
struct rotating_buffer {
    typename M::buffer memory{};
    typename M::event filled;  ///< the whole chunk is in it: gathered, or received
    typename M::event free;    ///< the chunk has left it: sent, or scattered
};

/// Owner of all that the device may still use. Ends by `end`, never by its destructor alone.
///
/// Copies run on one stream and broadcasts on the other, so that one chunk is gathered or
/// scattered while another travels. All broadcasts are on one stream: their order is what matches
/// them between the ranks.
///
/// `Tables` are the gather or scatter plans, which the device reads as well.
template <Machinery M, class Tables>
class gear {
public:
    explicit gear(M& used)
        : machine{used},
          copies{used.make_stream()},
          wire{used.make_urgent_stream()},
          mark{used.make_event()},
          bounce{used},
          staging{{}, used.make_event(), used.make_event()} {
        sweep();
    }
    gear(const gear&) = delete;
    gear& operator=(const gear&) = delete;

    /// Makes the rotating buffers exactly as large as `bytes` says; what is as large stays.
    /// No work may be under way.
    void allocate(std::span<const std::uint64_t> bytes) {
        const bool same =
            std::equal(bytes.begin(), bytes.end(), buffers.begin(), buffers.end(),
                       [](std::uint64_t n, const auto& held) { return held.memory.size() == n; });
        if (same) {
            return;
        }
        buffers.clear();  // first: old and new together may not fit
        buffers.reserve(bytes.size());
        for (const auto n : bytes) {
            buffers.push_back({machine.allocate(static_cast<std::size_t>(n)), machine.make_event(),
                               machine.make_event()});
        }
    }
    /// The buffer for what can neither be sent from nor received to where it is, one tensor at a
    /// time. Made at the first need and large enough for every later one.
    rotating_buffer<M>& stage(std::uint64_t bytes) {
        if (staging.memory.size() < bytes) {
            staging.memory = machine.allocate(static_cast<std::size_t>(bytes));
        }
        return staging;
    }
    /// Device memory of the buffers.
    [[nodiscard]] std::uint64_t buffer_bytes() const noexcept {
        std::uint64_t sum = staging.memory.size();
        for (const auto& each : buffers) {
            sum += each.memory.size();
        }
        return sum;
    }

    /// Makes the pinned memory of `to_device` and `to_host`, which they make themselves where that
    /// was not done. Pinning may wait for the device, so a half that will need it calls this before
    /// the first round.
    void prepare_bounce() { bounce.prepare(); }

    /// Brings `bytes` of host memory to `to`, piece by piece, in the order of `copies`. Returns
    /// when the host memory has been read. `fill(offset, span)` copies a piece of it.
    template <class Fill>
    void to_device(std::byte* to, std::uint64_t bytes, Fill fill, deadline until,
                   const std::stop_token& stop) {
        bounce.to_device(to, bytes, copies, std::move(fill),
                         [&](typename M::event& point) { group->wait(point, until, stop); });
    }
    /// Brings `bytes` at `from`, which work given to `copies` may still write, to the host: calls
    /// `drain(offset, span)` with each piece.
    template <class Drain>
    void to_host(const std::byte* from, std::uint64_t bytes, Drain drain, deadline until,
                 const std::stop_token& stop) {
        bounce.to_host(from, bytes, copies, std::move(drain),
                       [&](typename M::event& point) { group->wait(point, until, stop); });
    }

    /// Aborts the group and lets the streams run dry, for a bounded time. Freeing device memory
    /// waits for what the device still does, so where they do not the gear is parked, and freed by
    /// the first `sweep` that finds it at rest: that of streams that wait for work of the user's
    /// (`named_tensor::ready_stream`) once this has ended; that of a group that is lost never,
    /// because a kernel that waits for a peer that is gone never ends.
    static void end(std::unique_ptr<gear> ended) noexcept {
        if (ended == nullptr) {
            return;
        }
        if (ended->group) {
            ended->group->abort();
        }
        const auto until = deadline::after(rest_bound);
        while (!ended->rests()) {
            if (ended->lost() || until.expired()) {
                park(std::move(ended));
                return;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds{1});
        }
    }
    /// Frees what was parked and has come to rest since. Every new gear does it first; no round
    /// does, because freeing waits for the device.
    static void sweep() noexcept {
        std::vector<std::unique_ptr<gear>> rested;  // freed after the lock is
        try {
            auto& kept = parked();
            const std::lock_guard lock{kept.mutex};
            rested.reserve(kept.gears.size());
            for (auto& each : kept.gears) {
                if (each->rests()) {
                    rested.push_back(std::move(each));
                }
            }
            std::erase(kept.gears, nullptr);
        } catch (...) {
            // No memory: what is at rest stays until the next time.
        }
    }

    /// After an abort the device is done with what is left within milliseconds.
    static constexpr std::chrono::seconds rest_bound{2};

    M& machine;
    Tables tables{};
    typename M::stream copies;
    typename M::stream wire;
    typename M::event mark;
    std::vector<rotating_buffer<M>> buffers;
    pinned_bounce<M> bounce;
    rotating_buffer<M> staging;
    std::optional<typename M::communicator> group;

private:
    struct parking {
        std::mutex mutex;
        std::vector<std::unique_ptr<gear>> gears;
    };
    /// One of the library's documented globals: the half whose gear it was may be gone long before
    /// the work that holds it up. Never destroyed, because the device may not rest before the
    /// process ends.
    [[nodiscard]] static parking& parked() {
        static auto* const kept = new parking;
        return *kept;
    }
    static void park(std::unique_ptr<gear> ended) noexcept {
        try {
            auto& kept = parked();
            const std::lock_guard lock{kept.mutex};
            kept.gears.push_back(std::move(ended));
        } catch (...) {
            static_cast<void>(ended.release());  // no memory to remember it
        }
    }
    [[nodiscard]] bool lost() const noexcept { return group && group->lost(); }
    /// Uses nothing of `machine`, which may be gone.
    [[nodiscard]] bool rests() noexcept {
        if (lost()) {
            return false;
        }
        try {
            return M::is_idle(wire) && M::is_idle(copies);
        } catch (const error&) {
            return true;  // the device reports a failure of earlier work: that has ended
        }
    }
};

}  // namespace weightwire::nccl::detail
