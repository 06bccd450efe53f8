#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

/// @file
/// Host memory to a device and back through two pieces of pinned memory, one of which is filled
/// while the other travels. A plain asynchronous copy of pageable memory would wait for its stream,
/// without a deadline.

namespace weightwire {

/// Two pinned pieces on one machine. `M` has `allocate_pinned`, `make_event`, `record` and `copy`,
/// as the machineries of the backends have.
template <class M>
class pinned_bounce {
public:
    static constexpr std::uint64_t piece_bytes = std::uint64_t{4} << 20U;

    explicit pinned_bounce(M& machine)
        : machine_{machine}, pieces_{piece{{}, machine.make_event()}, {{}, machine.make_event()}} {}

    /// Takes the pinned memory, which the copies take themselves where that was not done. Pinning
    /// may wait for the device, so whoever will need it calls this before the first round.
    void prepare() {
        for (auto& each : pieces_) {
            if (each.memory.data() == nullptr) {
                each.memory = machine_.allocate_pinned(static_cast<std::size_t>(piece_bytes));
            }
        }
    }

    /// Brings `bytes` of host memory to `to`, in the order of stream `on`. Returns when the host
    /// memory has been read.
    /// @param fill `fill(offset, span)` copies a piece of it.
    /// @param wait `wait(event)` returns once the event is done, and throws to give up.
    template <class Fill, class Wait>
    void to_device(std::byte* to, std::uint64_t bytes, typename M::stream& on, Fill fill,
                   Wait wait) {
        prepare();
        for (std::uint64_t at = 0; at < bytes;) {
            auto& next = pieces_[next_];
            next_ = 1 - next_;
            const auto count = size_at(bytes, at);
            wait(next.done);
            fill(at, std::span<std::byte>{next.memory.data(), count});
            machine_.copy(to + at, next.memory.data(), count, on);
            machine_.record(next.done, on);
            at += count;
        }
    }

    /// Brings `bytes` at `from`, which work given to `on` may still write, to the host: calls
    /// `drain(offset, span)` with each piece. One piece is copied while another is drained.
    template <class Drain, class Wait>
    void to_host(const std::byte* from, std::uint64_t bytes, typename M::stream& on, Drain drain,
                 Wait wait) {
        prepare();
        const auto fetch = [&](std::uint64_t at) {
            auto& next = pieces_[(at / piece_bytes) % 2];
            machine_.copy(next.memory.data(), from + at, size_at(bytes, at), on);
            machine_.record(next.done, on);
        };
        if (bytes != 0) {
            fetch(0);
        }
        for (std::uint64_t at = 0; at < bytes; at += piece_bytes) {
            if (at + piece_bytes < bytes) {
                fetch(at + piece_bytes);
            }
            auto& next = pieces_[(at / piece_bytes) % 2];
            wait(next.done);
            drain(at, std::span<const std::byte>{next.memory.data(), size_at(bytes, at)});
        }
    }

private:
    struct piece {
        typename M::pinned_buffer memory{};
        typename M::event done;
    };

    [[nodiscard]] static std::size_t size_at(std::uint64_t bytes, std::uint64_t at) noexcept {
        return static_cast<std::size_t>(std::min(bytes - at, piece_bytes));
    }

    M& machine_;
    std::array<piece, 2> pieces_;
    std::size_t next_ = 0;
};

}  // namespace weightwire
