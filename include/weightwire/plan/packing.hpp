#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
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

/// Appends parameter `position` of `bytes` bytes to `chunk`, which it may begin.
inline void add_to_chunk(packed_chunk& chunk, std::size_t position, std::uint64_t bytes) {
    if (chunk.count == 0) {
        chunk.first = position;
    }
    chunk.offsets.push_back(chunk.bytes);
    chunk.bytes += bytes;
    ++chunk.count;
}

}  // namespace detail

/// The rule of packed `ipc` (protocol page 6.8): a chunk is closed *before* it would exceed
/// `buffer_bytes`, because the producer owns exactly that much. Tensors without bytes travel with
/// their neighbours; where no tensor has bytes there is no chunk at all and nothing is sent.
/// @throws data_error a tensor alone is larger than the buffer; names it and the size it needs.
[[nodiscard]] inline std::vector<packed_chunk> cut_before_exceeding(const manifest& parameters,
                                                                    std::uint64_t buffer_bytes) {
    std::vector<packed_chunk> chunks;
    packed_chunk open;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto bytes = parameters[i].byte_size();
        if (bytes > buffer_bytes) {
            throw data_error{
                "this tensor of " + std::to_string(bytes) +
                    " bytes does not fit the packed buffer of " + std::to_string(buffer_bytes) +
                    " bytes, and no tensor is split; set the buffer size to at least " +
                    std::to_string(bytes),
                {.phase = phase::plan, .tensor = parameters[i].name, .bytes_total = bytes}};
        }
        if (open.bytes > 0 && bytes > buffer_bytes - open.bytes) {
            chunks.push_back(std::exchange(open, {}));
        }
        detail::add_to_chunk(open, i, bytes);
    }
    if (open.bytes > 0) {
        chunks.push_back(std::move(open));
    }
    return chunks;
}

/// The rule of packed `nccl` (protocol page 4.4): a chunk is closed *after* it exceeds
/// `buffer_bytes`, so it may be larger by up to one tensor, and a tensor larger than the buffer
/// travels whole in the chunk that it closes. Tensors that together have no bytes still make one
/// chunk, of no bytes: one broadcast of count 0.
[[nodiscard]] inline std::vector<packed_chunk> cut_after_exceeding(const manifest& parameters,
                                                                   std::uint64_t buffer_bytes) {
    std::vector<packed_chunk> chunks;
    packed_chunk open;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        detail::add_to_chunk(open, i, parameters[i].byte_size());
        if (open.bytes > buffer_bytes) {
            chunks.push_back(std::exchange(open, {}));
        }
    }
    if (open.count > 0) {
        chunks.push_back(std::move(open));
    }
    return chunks;
}

}  // namespace weightwire::plan
