#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernel.hpp>
#include <weightwire/gpu/kernels/exchange_source.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/gpu/upload.hpp>

/// @file
/// Exchanges the bytes of many pairs of runs on a device in one launch.

namespace weightwire::gpu {

/// Two runs of equal length that do not overlap.
struct exchange_item {
    std::byte* a = nullptr;  ///< device address, of any alignment
    std::byte* b = nullptr;
    std::uint64_t bytes = 0;  ///< 0 is allowed
    friend bool operator==(const exchange_item&, const exchange_item&) noexcept = default;
};

/// Tables on one device that say what to exchange. Made once; a launch allocates nothing.
class exchange_plan {
public:
    /// Uploads the tables and compiles the kernel, at the process's first use of it; waits for
    /// both.
    /// @param items no run of any of them overlaps another.
    /// @throws usage_error more than 2^32 items or tiles.
    /// @throws unsupported_error NVRTC is missing.
    /// @throws resource_error no memory for the tables.
    exchange_plan(int device, std::span<const exchange_item> items)
        : exchange_plan{device, items, stream{device}} {}
    /// @param uploads the stream of the tables, as `upload` wants it.
    exchange_plan(int device, std::span<const exchange_item> items, stream_ref uploads)
        : exchange_plan{device, items, tiles_of(items), uploads} {}

    /// Puts the exchange into `on` and returns. A second launch undoes the first.
    /// @throws resource_error the launch was refused: nothing was exchanged.
    void launch(stream_ref on) const {
        if (tile_count_ == 0) {
            return;
        }
        const device_guard guard{tables_.device()};
        const auto* items = reinterpret_cast<const exchange_item*>(tables_.data());
        const auto* tiles = reinterpret_cast<const tile*>(tables_.data() + tiles_offset_);
        kernel_.launch(
            on, {.blocks = std::min(tile_count_, blocks_), .threads = detail::exchange_threads},
            items, tiles, tile_count_);
    }

    /// Device memory of the tables.
    [[nodiscard]] std::size_t table_bytes() const noexcept { return tables_.size(); }

private:
    struct tile {
        std::uint64_t offset = 0;
        std::uint64_t item = 0;
    };

    exchange_plan(int device, std::span<const exchange_item> items, const std::vector<tile>& tiles,
                  stream_ref uploads)
        : tile_count_{static_cast<std::uint32_t>(tiles.size())},
          blocks_{
              static_cast<unsigned int>(device_attribute(cudaDevAttrMultiProcessorCount, device)) *
              8U},
          tiles_offset_{items.size_bytes()},
          tables_{device, tiles_offset_ + tiles.size() * sizeof(tile)},
          kernel_{load_kernel(exchange_source(), device)} {
        const device_guard guard{device};
        upload(tables_, 0, std::as_bytes(items), uploads);
        upload(tables_, tiles_offset_, std::as_bytes(std::span{tiles}), uploads);
    }

    [[nodiscard]] static std::vector<tile> tiles_of(std::span<const exchange_item> items) {
        std::vector<tile> tiles;
        for (std::size_t i = 0; i < items.size(); ++i) {
            for (std::uint64_t at = 0; at < items[i].bytes; at += detail::exchange_tile_bytes) {
                tiles.push_back({.offset = at, .item = i});
            }
        }
        if (tiles.size() > std::numeric_limits<std::uint32_t>::max()) {
            throw usage_error{"an exchange plan has more than 2^32 tiles; split it"};
        }
        return tiles;
    }

    std::uint32_t tile_count_;
    unsigned int blocks_;
    std::size_t tiles_offset_;
    device_buffer tables_;
    kernel kernel_;
};

}  // namespace weightwire::gpu
