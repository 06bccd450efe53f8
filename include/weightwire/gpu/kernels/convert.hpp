#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernel.hpp>
#include <weightwire/gpu/kernels/convert_source.hpp>
#include <weightwire/gpu/kernels/convert_tiles.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/gpu/upload.hpp>

/// @file
/// Copies tensors of any strides on a device, and converts their elements where the two types
/// differ: what runs of bytes (gpu/kernels/copy.hpp) cannot say.

namespace weightwire::gpu {

/// Tables on one device that say what to convert, and the kernels that do it. Made once a plan; a
/// launch allocates nothing and sends nothing.
class convert_plan {
public:
    /// Uploads the tables and compiles the kernels that they need, at the process's first use of
    /// each; waits for both.
    ///
    /// @param device where the kernels run. It must be able to address both sides, which may be
    /// another process's memory; addresses are read when a group is launched, not before.
    /// @param groups what the launches convert, in any order. The destinations of a group do not
    /// overlap each other nor its sources.
    /// @param uploads the stream of the tables, as `upload` wants it.
    /// @throws unsupported_error types that do not convert (`can_convert`), a device before 8.0, or
    /// NVRTC is missing.
    /// @throws usage_error what `convert_tiles::add_group` says.
    /// @throws resource_error no memory for the tables.
    convert_plan(int device, std::span<const std::vector<convert_item>> groups, stream_ref uploads)
        : convert_plan{device, tiles_of(groups), uploads} {}
    /// The same of tables that are made already.
    convert_plan(int device, const convert_tiles& groups, stream_ref uploads)
        : groups_{loaded(device, groups)},
          entries_bytes_{groups.entries().size() * sizeof(convert_entry)},
          tables_{device, entries_bytes_ + groups.tiles().size() * sizeof(convert_tile)} {
        const device_guard guard{device};
        upload(tables_, 0, std::as_bytes(std::span{groups.entries()}), uploads);
        upload(tables_, entries_bytes_, std::as_bytes(std::span{groups.tiles()}), uploads);
    }

    /// Puts the conversions of one group into `on` and returns; they keep that stream's order.
    ///
    /// @param group index of the group.
    /// @throws usage_error no such group.
    /// @throws resource_error a launch was refused.
    void launch(std::size_t group, stream_ref on) const {
        if (group >= groups_.size()) {
            throw usage_error{"a conversion plan has " + std::to_string(groups_.size()) +
                              " groups; there is none with index " + std::to_string(group)};
        }
        const device_guard guard{tables_.device()};
        const auto* entries = reinterpret_cast<const convert_entry*>(tables_.data());
        const auto* tiles = reinterpret_cast<const convert_tile*>(tables_.data() + entries_bytes_);
        for (const auto& [code, begin, count] : groups_[group]) {
            code.launch(on, {.blocks = std::min(count, most_blocks), .threads = convert_threads},
                        entries, tiles + begin, count);
        }
    }

    /// How many groups can be launched.
    [[nodiscard]] std::size_t group_count() const noexcept { return groups_.size(); }
    /// Device memory of the tables.
    [[nodiscard]] std::size_t table_bytes() const noexcept { return tables_.size(); }
    [[nodiscard]] int device() const noexcept { return tables_.device(); }

private:
    /// A kernel and the tiles that it works on.
    struct loaded_launch {
        kernel code;
        std::uint32_t begin = 0;
        std::uint32_t count = 0;
    };

    static constexpr std::uint32_t most_blocks = 1U << 30U;  // CUDA's limit is twice this

    [[nodiscard]] static convert_tiles tiles_of(std::span<const std::vector<convert_item>> groups) {
        convert_tiles tiles;
        for (const auto& group : groups) {
            tiles.add_group(group);
        }
        return tiles;
    }

    [[nodiscard]] static std::vector<std::vector<loaded_launch>> loaded(
        int device, const convert_tiles& groups) {
        const int architecture = compute_capability(device);
        if (architecture < 80) {
            throw unsupported_error{"the device has compute capability " +
                                    std::to_string(architecture / 10) + "." +
                                    std::to_string(architecture % 10) + "; conversions need 8.0"};
        }
        // Rounds have many groups and few kinds of launches: each is looked up once.
        std::vector<std::pair<std::tuple<convert_pair, convert_form>, kernel>> known;
        const auto kernel_of = [&](const convert_launch& each) {
            const std::tuple key{each.pair, each.form};
            const auto found = std::ranges::find(known, key, &decltype(known)::value_type::first);
            if (found != known.end()) {
                return found->second;
            }
            return known
                .emplace_back(key, load_kernel(convert_source(each.pair, each.form), device))
                .second;
        };
        std::vector<std::vector<loaded_launch>> all;
        for (const auto& group : groups.groups()) {
            auto& launches = all.emplace_back();
            for (const auto& each : group) {
                launches.push_back({kernel_of(each), each.begin, each.count});
            }
        }
        return all;
    }

    std::vector<std::vector<loaded_launch>> groups_;
    std::size_t entries_bytes_;
    device_buffer tables_;
};

}  // namespace weightwire::gpu
