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
#include <weightwire/gpu/kernels/digest_source.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/gpu/upload.hpp>

/// @file
/// The digests of many tensors on a device, bit for bit those of core/digest.hpp.

namespace weightwire::gpu {

/// The bytes of a contiguous tensor.
struct digest_item {
    const std::byte* source = nullptr;  ///< device address, of any alignment
    std::uint64_t bytes = 0;            ///< 0 is allowed
};

/// Tables on one device that say what to digest, and room for the results. Made once; a launch
/// allocates nothing.
class digest_plan {
public:
    /// Uploads the tables and compiles the kernels, at the process's first use of them; waits for
    /// both.
    /// @throws usage_error more than 2^32 tensors or tiles.
    /// @throws unsupported_error NVRTC is missing.
    /// @throws resource_error no memory for the tables.
    digest_plan(int device, std::span<const digest_item> items)
        : digest_plan{device, items, stream{device}} {}
    /// @param uploads the stream of the tables, as `upload` wants it.
    digest_plan(int device, std::span<const digest_item> items, stream_ref uploads)
        : digest_plan{device, items, tiles_of(items), uploads} {}

    /// Puts the digests into `on` and returns: they are at `results()` when that stream is there.
    void launch(stream_ref on) const {
        if (count_ == 0) {
            return;
        }
        const device_guard guard{tables_.device()};
        const auto* items = reinterpret_cast<const digest_item*>(tables_.data());
        const auto* tiles = reinterpret_cast<const tile*>(tables_.data() + tiles_offset_);
        std::uint64_t* const sums = device_results();
        check(cudaMemsetAsync(sums, 0, count_ * sizeof(std::uint64_t), on.native_handle()),
              "cudaMemsetAsync");
        if (tile_count_ != 0) {
            add_.launch(
                on, {.blocks = std::min(tile_count_, blocks_), .threads = detail::digest_threads},
                items, tiles, tile_count_, sums);
        }
        finish_.launch(on, {.blocks = std::min((count_ + 255) / 256, blocks_), .threads = 256},
                       items, count_, sums);
    }

    /// Device address of the digests, in the order of the items.
    [[nodiscard]] const std::uint64_t* results() const noexcept { return device_results(); }
    [[nodiscard]] std::size_t size() const noexcept { return count_; }
    /// Device memory of tables and results.
    [[nodiscard]] std::size_t table_bytes() const noexcept { return tables_.size(); }

    /// Launches, waits for `on` and brings the digests to the host. It knows no deadline.
    /// @throws resource_error work in the stream failed.
    [[nodiscard]] std::vector<std::uint64_t> run(stream_ref on) const {
        launch(on);
        return fetch(on);
    }
    /// Brings the digests of the last launch to the host, once `on` is there.
    /// @throws resource_error work in the stream failed.
    [[nodiscard]] std::vector<std::uint64_t> fetch(stream_ref on) const {
        std::vector<std::uint64_t> digests(count_);
        if (count_ != 0) {
            check(cudaMemcpyAsync(digests.data(), results(), count_ * sizeof(std::uint64_t),
                                  cudaMemcpyDeviceToHost, on.native_handle()),
                  "cudaMemcpyAsync");
        }
        on.synchronize();
        return digests;
    }

private:
    struct tile {
        std::uint64_t offset = 0;
        std::uint64_t item = 0;
    };

    digest_plan(int device, std::span<const digest_item> items, const std::vector<tile>& tiles,
                stream_ref uploads)
        : count_{checked(items.size())},
          tile_count_{checked(tiles.size())},
          blocks_{
              static_cast<unsigned int>(device_attribute(cudaDevAttrMultiProcessorCount, device)) *
              8U},
          tiles_offset_{items.size_bytes()},
          results_offset_{tiles_offset_ + tiles.size() * sizeof(tile)},
          tables_{device, results_offset_ + items.size() * sizeof(std::uint64_t)},
          add_{load_kernel(digest_source(), device)},
          finish_{load_kernel(digest_finish_source(), device)} {
        const device_guard guard{device};
        upload(tables_, 0, std::as_bytes(items), uploads);
        upload(tables_, tiles_offset_, std::as_bytes(std::span{tiles}), uploads);
    }

    [[nodiscard]] static std::uint32_t checked(std::size_t count) {
        if (count > std::numeric_limits<std::uint32_t>::max()) {
            throw usage_error{"a digest plan has more than 2^32 tensors or tiles; split it"};
        }
        return static_cast<std::uint32_t>(count);
    }

    [[nodiscard]] static std::vector<tile> tiles_of(std::span<const digest_item> items) {
        std::vector<tile> tiles;
        for (std::size_t i = 0; i < items.size(); ++i) {
            for (std::uint64_t at = 0; at < items[i].bytes; at += detail::digest_tile_bytes) {
                tiles.push_back({.offset = at, .item = i});
            }
        }
        return tiles;
    }

    [[nodiscard]] std::uint64_t* device_results() const noexcept {
        return reinterpret_cast<std::uint64_t*>(tables_.data() + results_offset_);
    }

    std::uint32_t count_;
    std::uint32_t tile_count_;
    unsigned int blocks_;
    std::size_t tiles_offset_;
    std::size_t results_offset_;
    device_buffer tables_;
    kernel add_;
    kernel finish_;
};

}  // namespace weightwire::gpu
