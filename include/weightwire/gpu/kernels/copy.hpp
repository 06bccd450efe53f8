#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernel.hpp>
#include <weightwire/gpu/kernels/copy_source.hpp>
#include <weightwire/gpu/kernels/copy_tiles.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/gpu/upload.hpp>

/// @file
/// Copies the runs of a plan in one launch a group, however many they are. Gather and scatter are
/// this with one side given as offsets.

namespace weightwire::gpu {

/// Which device code copies. Both move the same bytes.
enum class copy_form : std::uint8_t {
    automatic,  ///< the bulk form where the device has it and most bytes need a shift, else plain
    plain,      ///< 16-byte loads and stores, sm_80 and later
    bulk,       ///< bulk asynchronous copies, sm_90 and later; a block a multiprocessor
};

/// Tables on one device that say what to copy, and the kernel that does it. Made once a plan; a
/// launch allocates nothing and sends nothing.
class copy_plan {
public:
    /// Uploads the tables and compiles the kernel, at the process's first use of it; waits for
    /// both.
    ///
    /// @param device where the kernels run. It must be able to address both sides.
    /// @param groups what the launches copy, in any order. The destinations of a group do not
    /// overlap each other nor its sources.
    /// @param uploads the stream of the tables, as `upload` wants it; without it one is made for
    /// them.
    /// @throws unsupported_error the form does not exist on the device, or NVRTC is missing.
    /// @throws resource_error no memory for the tables.
    copy_plan(int device, const copy_tiles& groups, copy_form form, stream_ref uploads)
        : ends_{groups.ends()},
          bytes_{groups.bytes()},
          form_{choose(form, device, groups)},
          kernel_{load_kernel(form_ == copy_form::bulk ? copy_bulk_source() : copy_plain_source(),
                              device)},
          blocks_{
              static_cast<unsigned int>(device_attribute(cudaDevAttrMultiProcessorCount, device))},
          items_bytes_{groups.items().size() * sizeof(copy_item)},
          tables_{device, items_bytes_ + groups.tiles().size() * sizeof(copy_tile)} {
        const device_guard guard{device};
        if (form_ == copy_form::bulk) {
            kernel_.allow_shared_bytes(bulk_shared_bytes);
        }
        upload(tables_, 0, std::as_bytes(std::span{groups.items()}), uploads);
        upload(tables_, items_bytes_, std::as_bytes(std::span{groups.tiles()}), uploads);
    }
    copy_plan(int device, const copy_tiles& groups, copy_form form = copy_form::automatic)
        : copy_plan{device, groups, form, stream{device}} {}

    /// Puts the copies of one group into `on` and returns; they keep that stream's order.
    ///
    /// @param group index of the group, in the order they were added.
    /// @param source_base, destination_base added to the addresses of the plan; multiples of 16.
    /// Null for a side whose addresses are absolute.
    /// @param most_blocks of the launch; 0: as many as are fastest alone. A copy that runs beside
    /// another kernel leaves it multiprocessors and memory that way.
    /// @throws usage_error no such group, or a base that is not aligned.
    /// @throws resource_error the launch was refused.
    void launch(std::size_t group, const std::byte* source_base, std::byte* destination_base,
                stream_ref on, unsigned int most_blocks = 0) const {
        const auto from = reinterpret_cast<std::uint64_t>(source_base);
        const auto to = reinterpret_cast<std::uint64_t>(destination_base);
        if (group >= ends_.size()) {
            throw usage_error{"a copy plan has " + std::to_string(ends_.size()) +
                              " groups; there is none with index " + std::to_string(group)};
        }
        if (from % 16 != 0 || to % 16 != 0) {
            throw usage_error{"a buffer to gather into or scatter from must be 16-byte aligned"};
        }
        const std::uint32_t begin = group == 0 ? 0 : ends_[group - 1];
        const std::uint32_t count = ends_[group] - begin;
        if (count == 0) {
            return;
        }
        const device_guard guard{tables_.device()};
        const auto* items = reinterpret_cast<const copy_item*>(tables_.data());
        const auto* tiles =
            reinterpret_cast<const copy_tile*>(tables_.data() + items_bytes_) + begin;
        const std::uint32_t most = most_blocks != 0 ? std::min(count, most_blocks) : count;
        const launch_shape shape =
            form_ == copy_form::bulk
                ? launch_shape{std::min(most, blocks_), bulk_threads, bulk_shared_bytes}
                : launch_shape{most, plain_threads, 0};
        kernel_.launch(on, shape, items, tiles, count, from, to);
    }

    /// How many groups can be launched.
    [[nodiscard]] std::size_t group_count() const noexcept { return ends_.size(); }
    /// Bytes that all groups together copy.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
    /// Device memory of the tables.
    [[nodiscard]] std::size_t table_bytes() const noexcept { return tables_.size(); }
    /// The form that was chosen; never `automatic`.
    [[nodiscard]] copy_form form() const noexcept { return form_; }
    [[nodiscard]] int device() const noexcept { return tables_.device(); }

private:
    [[nodiscard]] static copy_form choose(copy_form wanted, int device, const copy_tiles& groups) {
        const int architecture = compute_capability(device);
        if (architecture < (wanted == copy_form::bulk ? 90 : 80)) {
            throw unsupported_error{
                "the device has compute capability " + std::to_string(architecture / 10) + "." +
                std::to_string(architecture % 10) + "; copies need 8.0, their bulk form 9.0"};
        }
        if (wanted != copy_form::automatic) {
            return wanted;
        }
        // Measured on an H200: aligned bytes 0.97 of one copy plain and 0.91 bulk, shifted bytes
        // 0.80 plain and 0.90 bulk.
        const bool mostly_shifted = groups.shifted_bytes() > groups.bytes() / 2;
        return architecture >= 90 && mostly_shifted ? copy_form::bulk : copy_form::plain;
    }

    std::vector<std::uint32_t> ends_;
    std::uint64_t bytes_;
    copy_form form_;
    kernel kernel_;
    unsigned int blocks_;
    std::size_t items_bytes_;
    device_buffer tables_;
};

}  // namespace weightwire::gpu
