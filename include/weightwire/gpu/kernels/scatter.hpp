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
/// One buffer into many tensors.

namespace weightwire::gpu {

/// A place in the packed buffer and the tensor that it fills.
struct scatter_item {
    std::byte* destination = nullptr;  ///< device address, of any alignment
    std::uint64_t offset = 0;          ///< bytes from the start of the buffer
    std::uint64_t bytes = 0;
};

/// Scatters chunks of tensors out of buffers that the launch names, so that one plan serves buffers
/// that rotate. The tables are uploaded once, at construction, and stay on the device.
class scatter {
public:
    /// @param device where the kernels run.
    /// @param chunks what each launch scatters; the tensors of a chunk do not overlap.
    /// @throws as `copy_plan`.
    scatter(int device, std::span<const std::vector<scatter_item>> chunks,
            copy_form form = copy_form::automatic)
        : plan_{device, tiles_of(chunks), form} {}
    /// @param uploads as in `copy_plan`.
    scatter(int device, std::span<const std::vector<scatter_item>> chunks, copy_form form,
            stream_ref uploads)
        : plan_{device, tiles_of(chunks), form, uploads} {}

    /// Puts the scatter of one chunk into `on` and returns.
    /// @param buffer device memory as large as the chunk's last place ends, aligned to 16 bytes.
    /// @param most_blocks as in `copy_plan::launch`.
    void launch(std::size_t chunk, const std::byte* buffer, stream_ref on,
                unsigned int most_blocks = 0) const {
        plan_.launch(chunk, buffer, nullptr, on, most_blocks);
    }

    /// Sizes, memory and form.
    [[nodiscard]] const copy_plan& plan() const noexcept { return plan_; }

private:
    [[nodiscard]] static copy_tiles tiles_of(std::span<const std::vector<scatter_item>> chunks) {
        copy_tiles tiles;
        std::vector<copy_item> group;
        for (const auto& chunk : chunks) {
            group.clear();
            for (const scatter_item& item : chunk) {
                group.push_back({.source = item.offset,
                                 .destination = reinterpret_cast<std::uint64_t>(item.destination),
                                 .bytes = item.bytes});
            }
            tiles.add_group(group);
        }
        return tiles;
    }

    copy_plan plan_;
};

}  // namespace weightwire::gpu
