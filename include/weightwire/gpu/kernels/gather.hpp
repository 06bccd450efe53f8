#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <weightwire/gpu/kernels/copy.hpp>
#include <weightwire/gpu/kernels/copy_tiles.hpp>
#include <weightwire/gpu/stream.hpp>

/// @file
/// Many tensors into one buffer.

namespace weightwire::gpu {

/// A tensor and its place in the packed buffer.
struct gather_item {
    const std::byte* source = nullptr;  ///< device address, of any alignment
    std::uint64_t offset = 0;           ///< bytes from the start of the buffer
    std::uint64_t bytes = 0;
};

/// Gathers chunks of tensors into buffers that the launch names, so that one plan serves buffers
/// that rotate. The tables are uploaded once, at construction, and stay on the device.
class gather {
public:
    /// @param device where the kernels run.
    /// @param chunks what each launch gathers; the places of a chunk do not overlap.
    /// @throws as `copy_plan`.
    gather(int device, std::span<const std::vector<gather_item>> chunks,
           copy_form form = copy_form::automatic)
        : plan_{device, tiles_of(chunks), form} {}
    /// @param uploads as in `copy_plan`.
    gather(int device, std::span<const std::vector<gather_item>> chunks, copy_form form,
           stream_ref uploads)
        : plan_{device, tiles_of(chunks), form, uploads} {}

    /// Puts the gather of one chunk into `on` and returns.
    /// @param buffer device memory as large as the chunk's last place ends, aligned to 16 bytes.
    /// @param most_blocks as in `copy_plan::launch`.
    void launch(std::size_t chunk, std::byte* buffer, stream_ref on,
                unsigned int most_blocks = 0) const {
        plan_.launch(chunk, nullptr, buffer, on, most_blocks);
    }

    /// Sizes, memory and form.
    [[nodiscard]] const copy_plan& plan() const noexcept { return plan_; }

private:
    [[nodiscard]] static copy_tiles tiles_of(std::span<const std::vector<gather_item>> chunks) {
        copy_tiles tiles;
        std::vector<copy_item> group;
        for (const auto& chunk : chunks) {
            group.clear();
            for (const gather_item& item : chunk) {
                group.push_back({.source = reinterpret_cast<std::uint64_t>(item.source),
                                 .destination = item.offset,
                                 .bytes = item.bytes});
            }
            tiles.add_group(group);
        }
        return tiles;
    }

    copy_plan plan_;
};

}  // namespace weightwire::gpu
