#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>

/// @file
/// How tensors are cut into packed buffers. Two rules exist on the wire and they differ: both sides
/// derive the cuts from the manifest and the buffer size alone, so a rule is part of the protocol
/// and not a matter of taste.
///
/// In both, tensors are concatenated in manifest order, from offset 0, without header, padding or
/// alignment, and no tensor is split. A consumer must therefore not assume that a tensor is aligned
/// for its dtype.

namespace weightwire::plan {

/// One packed buffer: parameters `first … first + count - 1` of the manifest.
struct packed_chunk {
    std::size_t first = 0;                 ///< manifest position of the first tensor
    std::size_t count = 0;                 ///< number of tensors
    std::uint64_t bytes = 0;               ///< bytes of all of them
    std::vector<std::uint64_t> offsets{};  ///< where each begins in the buffer, one a tensor

    /// Where manifest parameter `parameter`, which is in this chunk, begins.
    [[nodiscard]] std::uint64_t offset_of(std::size_t parameter) const noexcept {
        return offsets[parameter - first];
    }
    [[nodiscard]] bool holds(std::size_t parameter) const noexcept {
        return parameter >= first && parameter - first < count;
    }
    friend bool operator==(const packed_chunk&, const packed_chunk&) = default;
};

namespace detail {

/// When a chunk ends: one rule for each wire.
enum class chunk_end : std::uint8_t {
    before_exceeding,  ///< before the tensor that the buffer has no room for
    after_exceeding,   ///< after the tensor with which it holds more than the buffer
};

/// Walks tensors in wire order and says where each begins in its chunk. All that cuts, and all that
/// plans cuts, asks this.
class chunk_cursor {
public:
    /// @param alignment what tensors that have bytes begin at a multiple of; by the rules of the
    /// wire 1.
    constexpr chunk_cursor(chunk_end rule, std::uint64_t buffer_bytes,
                           std::uint64_t alignment = 1) noexcept
        : rule_{rule}, buffer_bytes_{buffer_bytes}, alignment_{alignment} {}
    /// Whether the chunk ends before a tensor of `bytes`, which then begins the next. By the rule
    /// `before_exceeding` no tensor may be larger than the buffer.
    [[nodiscard]] constexpr bool closes_before(std::uint64_t bytes) const noexcept {
        if (rule_ == chunk_end::after_exceeding) {
            return filled_ > buffer_bytes_;
        }
        const auto room = buffer_bytes_ - filled_;
        return filled_ > 0 && bytes > 0 && (bytes > room || padding() > room - bytes);
    }
    /// Where a tensor of `bytes` would begin.
    [[nodiscard]] constexpr std::uint64_t offset_of(std::uint64_t bytes) const noexcept {
        return closes_before(bytes) ? 0 : filled_ + (bytes > 0 ? padding() : 0);
    }
    /// Takes a tensor of `bytes`. @returns where it begins.
    constexpr std::uint64_t add(std::uint64_t bytes) noexcept {
        const auto begin = offset_of(bytes);
        filled_ = begin + bytes;
        return begin;
    }
    /// Bytes of the chunk so far.
    [[nodiscard]] constexpr std::uint64_t filled() const noexcept { return filled_; }
    /// Ends the chunk.
    constexpr void restart() noexcept { filled_ = 0; }

private:
    [[nodiscard]] constexpr std::uint64_t padding() const noexcept {
        return (alignment_ - filled_ % alignment_) % alignment_;
    }

    chunk_end rule_;
    std::uint64_t buffer_bytes_;
    std::uint64_t alignment_;
    std::uint64_t filled_ = 0;
};

/// The chunks of `count` tensors, of which tensor i has `bytes_of(i)`.
template <class BytesOf>
[[nodiscard]] std::vector<packed_chunk> cut_chunks(std::size_t count, BytesOf bytes_of,
                                                   chunk_cursor at) {
    std::vector<packed_chunk> chunks;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t bytes = bytes_of(i);
        if (chunks.empty() || at.closes_before(bytes)) {
            chunks.push_back({.first = i});
        }
        auto& open = chunks.back();
        open.offsets.push_back(at.add(bytes));
        open.bytes = at.filled();
        ++open.count;
    }
    return chunks;
}

/// @throws data_error `parameter` is larger than the buffer, by the rule `before_exceeding`.
inline void require_fits(const param_meta& parameter, std::uint64_t buffer_bytes) {
    if (const auto bytes = parameter.byte_size(); bytes > buffer_bytes) {
        throw data_error{"this tensor of " + std::to_string(bytes) +
                             " bytes does not fit the packed buffer of " +
                             std::to_string(buffer_bytes) +
                             " bytes, and no tensor is split; set the buffer size to at least " +
                             std::to_string(bytes),
                         {.phase = phase::plan, .tensor = parameter.name, .bytes_total = bytes}};
    }
}

}  // namespace detail

/// The rule of packed `ipc` (protocol page 6.8): a chunk is closed *before* it would exceed
/// `buffer_bytes`, because the producer owns exactly that much. Tensors without bytes travel with
/// their neighbours; where no tensor has bytes there is no chunk at all and nothing is sent.
/// @throws data_error a tensor alone is larger than the buffer; names it and the size it needs.
[[nodiscard]] inline std::vector<packed_chunk> cut_before_exceeding(const manifest& parameters,
                                                                    std::uint64_t buffer_bytes) {
    for (const auto& parameter : parameters.parameters()) {
        detail::require_fits(parameter, buffer_bytes);
    }
    if (parameters.total_bytes() == 0) {
        return {};
    }
    return detail::cut_chunks(
        parameters.size(), [&](std::size_t i) { return parameters[i].byte_size(); },
        detail::chunk_cursor{detail::chunk_end::before_exceeding, buffer_bytes});
}

/// The rule of packed `nccl` (protocol page 4.4): a chunk is closed *after* it exceeds
/// `buffer_bytes`, so it may be larger by up to one tensor, and a tensor larger than the buffer
/// travels whole in the chunk that it closes. Tensors that together have no bytes still make one
/// chunk, of no bytes: one broadcast of count 0.
[[nodiscard]] inline std::vector<packed_chunk> cut_after_exceeding(const manifest& parameters,
                                                                   std::uint64_t buffer_bytes) {
    return detail::cut_chunks(
        parameters.size(), [&](std::size_t i) { return parameters[i].byte_size(); },
        detail::chunk_cursor{detail::chunk_end::after_exceeding, buffer_bytes});
}

}  // namespace weightwire::plan
