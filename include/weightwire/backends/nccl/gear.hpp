#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
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
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// What both halves of `nccl` hold between `open` and the end: the group, two streams, the buffers
/// that rotate, and a small pinned one for tensors in host memory.

namespace weightwire::nccl::detail {

/// Throws when a transfer must not go on; `context` is called only then.
template <class Context>
void check_time(deadline until, const std::stop_token& stop, Context context) {
    if (stop.stop_requested()) {
        throw cancelled_error{"the transfer was stopped", context()};
    }
    if (until.expired()) {
        throw timeout_error{"the transfer did not end before its deadline", context()};
    }
}

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
          pieces{bounce_piece{{}, used.make_event()}, bounce_piece{{}, used.make_event()}},
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
    void prepare_bounce() {
        for (auto& piece : pieces) {
            if (piece.memory.data() == nullptr) {
                piece.memory = machine.allocate_pinned(static_cast<std::size_t>(piece_bytes));
            }
        }
    }

    /// Brings `bytes` of host memory to `to`, piece by piece, in the order of `copies`. Returns
    /// when the host memory has been read. `fill(offset, span)` copies a piece of it.
    /// A plain asynchronous copy of pageable memory would wait for the stream, without a deadline.
    template <class Fill>
    void to_device(std::byte* to, std::uint64_t bytes, Fill fill, deadline until,
                   const std::stop_token& stop) {
        prepare_bounce();
        for (std::uint64_t at = 0; at < bytes;) {
            auto& piece = pieces[next_piece];
            next_piece = 1 - next_piece;
            const auto count =
                static_cast<std::size_t>(std::min<std::uint64_t>(bytes - at, piece_bytes));
            group->wait(piece.done, until, stop);
            fill(at, std::span<std::byte>{piece.memory.data(), count});
            machine.copy(to + at, piece.memory.data(), count, copies);
            machine.record(piece.done, copies);
            at += count;
        }
    }
    /// Brings `bytes` at `from`, which work given to `copies` may still write, to the host: calls
    /// `drain(offset, span)` with each piece. One piece is copied while another is drained.
    template <class Drain>
    void to_host(const std::byte* from, std::uint64_t bytes, Drain drain, deadline until,
                 const std::stop_token& stop) {
        prepare_bounce();
        const auto size_at = [&](std::uint64_t at) {
            return static_cast<std::size_t>(std::min<std::uint64_t>(bytes - at, piece_bytes));
        };
        const auto fetch = [&](std::uint64_t at) {
            auto& piece = pieces[(at / piece_bytes) % 2];
            machine.copy(piece.memory.data(), from + at, size_at(at), copies);
            machine.record(piece.done, copies);
        };
        if (bytes != 0) {
            fetch(0);
        }
        for (std::uint64_t at = 0; at < bytes; at += piece_bytes) {
            if (at + piece_bytes < bytes) {
                fetch(at + piece_bytes);
            }
            auto& piece = pieces[(at / piece_bytes) % 2];
            group->wait(piece.done, until, stop);
            drain(at, std::span<const std::byte>{piece.memory.data(), size_at(at)});
        }
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

    static constexpr std::uint64_t piece_bytes = std::uint64_t{4} << 20U;
    /// After an abort the device is done with what is left within milliseconds.
    static constexpr std::chrono::seconds rest_bound{2};

    struct bounce_piece {
        typename M::pinned_buffer memory{};
        typename M::event done;
    };

    M& machine;
    Tables tables{};
    typename M::stream copies;
    typename M::stream wire;
    typename M::event mark;
    std::vector<rotating_buffer<M>> buffers;
    std::array<bounce_piece, 2> pieces;
    rotating_buffer<M> staging;
    std::size_t next_piece = 0;
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
