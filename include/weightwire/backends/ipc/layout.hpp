#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <weightwire/backends/ipc/init_info.hpp>
#include <weightwire/core/checked.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/packing.hpp>

/// @file
/// Where every tensor of a round lies on one line of positions, which sender and receiver derive
/// alike.
///
/// A round's bytes have positions on a line that never starts again: round `r` owns `[r * stride,
/// (r + 1) * stride)`, and the byte at position `p` lies at `p % ring` of the ring. Progress is
/// then two numbers, how far the trainer has written and how far a worker has read, and neither can
/// be taken for one of another round. A tensor that is read in place takes a token of 64 positions
/// and no memory.

namespace weightwire::ipc {

/// The positions of one round, relative to its begin.
class layout {
public:
    /// Staged tensors begin on these boundaries, so that copies stay aligned; packed ones follow
    /// each other without a gap.
    static constexpr std::uint64_t alignment = 64;
    /// Longest round, so that thousands of them fit 64 bits.
    static constexpr std::uint64_t most_positions = std::uint64_t{1} << 48U;

    layout() = default;
    /// @param parameters the tensors.
    /// @param wire valid parameters.
    /// @param in_place one byte a parameter, not 0 where the worker reads the source's own memory;
    /// empty: none.
    /// @throws data_error packed: a tensor is larger than a buffer; names it and the size it needs.
    /// @throws usage_error the round is longer than 2^48 positions.
    layout(const manifest& parameters, const wire_parameters& wire,
           std::span<const unsigned char> in_place = {})
        : spans_(parameters.size()) {
        if (parameters.total_bytes() > most_positions) {
            throw too_long(parameters);
        }
        if (wire.packed) {
            pack(parameters, wire);
        } else {
            stage(parameters, wire.staging_bytes, in_place);
        }
        const auto unit = ring_bytes_ != 0 ? ring_bytes_ : alignment;
        const auto units = length_ / unit + 1;  // at least one position between two rounds
        const auto stride = checked_multiply(units, unit);
        if (length_ > most_positions || !stride) {
            throw too_long(parameters);
        }
        stride_ = *stride;
    }

    [[nodiscard]] std::size_t size() const noexcept { return spans_.size(); }
    /// Where parameter `i` begins.
    [[nodiscard]] std::uint64_t begin(std::size_t i) const noexcept { return spans_[i].begin; }
    /// Where progress stands when parameter `i` is done.
    [[nodiscard]] std::uint64_t end(std::size_t i) const noexcept { return spans_[i].end; }
    /// Whether the bytes of parameter `i` are read in place.
    [[nodiscard]] bool in_place(std::size_t i) const noexcept { return spans_[i].in_place; }
    /// Where progress stands when all are done.
    [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
    /// Size of the ring; 0 when nothing passes through it.
    [[nodiscard]] std::uint64_t ring_bytes() const noexcept { return ring_bytes_; }
    /// Bytes that pass through the ring in a round.
    [[nodiscard]] std::uint64_t staged_bytes() const noexcept { return staged_bytes_; }
    /// Packed buffers filled in a round.
    [[nodiscard]] std::size_t chunks() const noexcept { return chunks_; }

    /// The first position of round `round`, or nothing where its last does not fit 64 bits.
    [[nodiscard]] std::optional<std::uint64_t> base(std::uint64_t round) const noexcept {
        const auto begin = checked_multiply(round, stride_);
        return begin && checked_add(*begin, stride_) ? begin : std::nullopt;
    }
    [[nodiscard]] std::uint64_t stride() const noexcept { return stride_; }

private:
    struct span_type {
        std::uint64_t begin = 0;
        std::uint64_t end = 0;
        bool in_place = false;
    };

    void pack(const manifest& parameters, const wire_parameters& wire) {
        const auto buffer = wire.packed_buffer_size_bytes;
        const auto chunks = plan::cut_before_exceeding(parameters, buffer);
        for (std::size_t k = 0; k < chunks.size(); ++k) {
            const auto& chunk = chunks[k];
            for (std::size_t i = chunk.first; i < chunk.first + chunk.count; ++i) {
                spans_[i].begin = k * buffer + chunk.offset_of(i);
                spans_[i].end = spans_[i].begin + parameters[i].byte_size();
            }
            length_ = k * buffer + chunk.bytes;
            staged_bytes_ += chunk.bytes;
        }
        chunks_ = chunks.size();
        ring_bytes_ = ring_for(buffer * wire.packed_num_buffers);
    }

    void stage(const manifest& parameters, std::uint64_t staging_bytes,
               std::span<const unsigned char> in_place) {
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            const auto bytes = parameters[i].byte_size();
            if (bytes == 0) {
                continue;
            }
            auto& span = spans_[i];
            span.in_place = !in_place.empty() && in_place[i] != 0;
            span.begin = rounded(length_);
            const auto end = checked_add(span.begin, span.in_place ? alignment : bytes);
            if (!end || *end > most_positions) {
                throw too_long(parameters);
            }
            span.end = length_ = *end;
            staged_bytes_ += span.in_place ? 0 : bytes;
        }
        ring_bytes_ = staged_bytes_ == 0 ? 0 : ring_for(rounded(staging_bytes));
    }

    /// No more than the round fills.
    [[nodiscard]] std::uint64_t ring_for(std::uint64_t wanted) const noexcept {
        return std::min(wanted, rounded(length_));
    }
    [[nodiscard]] static std::uint64_t rounded(std::uint64_t bytes) noexcept {
        return (bytes + alignment - 1) / alignment * alignment;
    }
    [[nodiscard]] static usage_error too_long(const manifest& parameters) {
        return usage_error{"a round has more than 2^48 bytes; send the weights in several sets",
                           {.phase = phase::plan, .bytes_total = parameters.total_bytes()}};
    }

    std::vector<span_type> spans_;
    std::uint64_t length_ = 0;
    std::uint64_t stride_ = alignment;
    std::uint64_t ring_bytes_ = 0;
    std::uint64_t staged_bytes_ = 0;
    std::size_t chunks_ = 0;
};

}  // namespace weightwire::ipc
