#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <weightwire/core/error.hpp>

/// @file
/// How the bytes of many tensors are cut into equal pieces of work: pure arithmetic, on the host,
/// once a plan.

namespace weightwire::gpu {

/// One run of bytes to copy. Each address may be absolute, or an offset to a base that the launch
/// gives. 24 bytes, and laid out as the kernels read it.
struct copy_item {
    std::uint64_t source = 0;
    std::uint64_t destination = 0;
    std::uint64_t bytes = 0;
};

/// One piece of work: up to `tile_pieces` consecutive items, the first from `offset` on, the last
/// up to the length in the low 24 bits of `last`; the high 8 bits are the number of items.
struct copy_tile {
    std::uint64_t offset = 0;
    std::uint32_t first = 0;
    std::uint32_t last = 0;
};

/// Bytes of a tile at most. One of the kernels keeps several tiles in shared memory at once.
inline constexpr std::uint64_t tile_bytes = 32768;
/// Items of a tile at most: one a lane of a warp.
inline constexpr std::uint32_t tile_pieces = 32;
/// Where an item is cut, the address in the destination is a multiple of this.
inline constexpr std::uint64_t tile_alignment = 128;

/// The tiles of one or several groups of items; a group is what one launch copies.
class copy_tiles {
public:
    /// Adds one group. Items of no bytes are left out; the others are taken in the order of their
    /// destinations, since memory takes writes that follow one another faster than scattered ones.
    /// @throws usage_error more than 2^32 items or tiles.
    void add_group(std::span<const copy_item> group) {
        std::vector<copy_item> ordered{group.begin(), group.end()};
        std::ranges::stable_sort(ordered, {}, &copy_item::destination);
        for (const copy_item& item : ordered) {
            if (item.bytes != 0) {
                require_fits(items_.size());
                items_.push_back(item);
                cut(item);
                bytes_ += item.bytes;
                shifted_bytes_ += (item.source - item.destination) % 16 != 0 ? item.bytes : 0;
            }
        }
        close_tile();
        require_fits(tiles_.size());
        ends_.push_back(static_cast<std::uint32_t>(tiles_.size()));
    }

    [[nodiscard]] const std::vector<copy_item>& items() const noexcept { return items_; }
    [[nodiscard]] const std::vector<copy_tile>& tiles() const noexcept { return tiles_; }
    /// Tiles of group i: from `ends()[i - 1]`, or 0, to `ends()[i]`.
    [[nodiscard]] const std::vector<std::uint32_t>& ends() const noexcept { return ends_; }
    /// Bytes of all groups.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
    /// Bytes of the items whose source and destination differ modulo 16.
    [[nodiscard]] std::uint64_t shifted_bytes() const noexcept { return shifted_bytes_; }

private:
    static void require_fits(std::size_t count) {
        if (count >= std::numeric_limits<std::uint32_t>::max()) {
            throw usage_error{"a copy plan has more than 2^32 items or tiles; split it"};
        }
    }

    void cut(const copy_item& item) {
        const auto index = static_cast<std::uint32_t>(items_.size() - 1);
        for (std::uint64_t at = 0; at < item.bytes;) {
            std::uint64_t take = std::min(item.bytes - at, tile_bytes - filled_);
            if (at + take < item.bytes) {
                const std::uint64_t beyond = (item.destination + at + take) % tile_alignment;
                take = beyond < take ? take - beyond : 0;
            }
            if (take < tile_alignment && take < item.bytes - at) {
                close_tile();  // too little room for a piece that is worth its edges
                continue;
            }
            append(index, at, static_cast<std::uint32_t>(take));
            at += take;
            if (pieces_ == tile_pieces || filled_ == tile_bytes) {
                close_tile();
            }
        }
    }

    void append(std::uint32_t index, std::uint64_t offset, std::uint32_t bytes) {
        if (pieces_ == 0) {
            open_ = {.offset = offset, .first = index, .last = 0};
        }
        ++pieces_;
        open_.last = (pieces_ << 24U) | bytes;
        filled_ += bytes;
    }

    void close_tile() {
        if (pieces_ != 0) {
            tiles_.push_back(open_);
        }
        pieces_ = 0;
        filled_ = 0;
    }

    std::vector<copy_item> items_;
    std::vector<copy_tile> tiles_;
    std::vector<std::uint32_t> ends_;
    copy_tile open_{};
    std::uint32_t pieces_ = 0;
    std::uint64_t filled_ = 0;
    std::uint64_t bytes_ = 0;
    std::uint64_t shifted_bytes_ = 0;
};

}  // namespace weightwire::gpu
