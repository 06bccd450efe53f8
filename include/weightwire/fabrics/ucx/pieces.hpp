#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <weightwire/fabrics/pull_fabric.hpp>

/// @file
/// The runs of a read as the few large transfers that bring them, and where each transfer's bytes
/// belong. Pure.

namespace weightwire::ucx {

/// Most bytes of one transfer, and of one place to land.
inline constexpr std::uint64_t piece_bytes = std::uint64_t{1} << 20U;
/// Runs of at least so many bytes are brought straight to where they belong; shorter ones land
/// together with their neighbours and are laid out from there.
inline constexpr std::uint64_t direct_bytes = std::uint64_t{128} << 10U;

/// One transfer of bytes that lie together in the other side's memory.
template <class Memory>
struct piece {
    const Memory* from = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::byte* direct = nullptr;  ///< where it belongs; null where it has to be laid out
    std::size_t run = 0;          ///< else: it begins with this run,
    std::uint64_t line = 0;       ///< this line of it,
    std::uint64_t byte = 0;       ///< and this byte of that
};

/// Cuts runs into pieces, in order.
/// @param direct whether transfers may write to the destinations themselves.
template <class Memory>
[[nodiscard]] std::vector<piece<Memory>> cut_pieces(std::span<const remote_run<Memory>> runs,
                                                    bool direct) {
    std::vector<piece<Memory>> pieces;
    bool open = false;  // the last piece may grow
    const auto land = [&](const remote_run<Memory>& run, piece<Memory> at) {
        while (at.bytes > 0) {
            if (open) {
                auto& last = pieces.back();
                if (last.from == at.from && last.offset + last.bytes == at.offset &&
                    last.bytes < piece_bytes) {
                    const auto more = std::min(at.bytes, piece_bytes - last.bytes);
                    last.bytes += more;
                    at.offset += more;
                    at.bytes -= more;
                    at.line += (at.byte + more) / run.bytes;
                    at.byte = (at.byte + more) % run.bytes;
                    continue;
                }
            }
            pieces.push_back(at);
            pieces.back().bytes = 0;
            open = true;
        }
    };
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const auto& run = runs[i];
        if (run.bytes == 0 || run.count == 0) {
            continue;
        }
        const bool joined = run.count == 1 || run.from_step == run.bytes;
        const bool together = run.count == 1 || (joined && run.to_step == run.bytes);
        const bool by_line = !joined || (!together && direct && run.bytes >= direct_bytes);
        const auto length = by_line ? run.bytes : run.bytes * run.count;
        const bool straight = direct && length >= direct_bytes && (together || by_line);
        for (std::uint64_t line = 0; line < (by_line ? run.count : 1); ++line) {
            const piece<Memory> whole{.from = run.from,
                                      .offset = run.offset + line * run.from_step,
                                      .bytes = length,
                                      .direct = straight ? run.to + line * run.to_step : nullptr,
                                      .run = i,
                                      .line = line};
            if (!straight) {
                land(run, whole);
                continue;
            }
            open = false;
            for (std::uint64_t at = 0; at < length; at += piece_bytes) {
                auto next = whole;
                next.offset += at;
                next.direct += at;
                next.bytes = std::min(piece_bytes, length - at);
                pieces.push_back(next);
            }
        }
    }
    return pieces;
}

/// Calls `copy(to, to_step, from, bytes, count)` for the lines of a piece that has landed: `count`
/// times `bytes` bytes, one after the other at `from`.
template <class Memory, class Copy>
void lay_out(const piece<Memory>& which, std::span<const remote_run<Memory>> runs,
             const std::byte* landed, Copy copy) {
    auto i = which.run;
    auto line = which.line;
    auto byte = which.byte;
    for (auto left = which.bytes; left > 0;) {
        const auto& run = runs[i];
        if (run.bytes == 0 || line == run.count) {
            ++i;
            line = 0;
            continue;
        }
        auto* const to = run.to + line * run.to_step + byte;
        const bool part = byte != 0 || left < run.bytes;
        const auto bytes = part ? std::min(left, run.bytes - byte) : run.bytes;
        const auto count = part ? 1 : std::min(run.count - line, left / run.bytes);
        copy(to, run.to_step, landed, bytes, count);
        landed += bytes * count;
        left -= bytes * count;
        byte = part ? (byte + bytes) % run.bytes : 0;
        line += part ? (byte == 0 ? 1 : 0) : count;
    }
}

}  // namespace weightwire::ucx
