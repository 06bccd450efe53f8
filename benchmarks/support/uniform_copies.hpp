#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernels/copy.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/gpu/stream.hpp>

/// @file
/// What a device makes of copies that need no backend, by the runtime's calls and by our kernels.

namespace benchmarks {

[[nodiscard]] inline weightwire::gpu::copy_item copy_of(const std::byte* from, std::byte* to,
                                                        std::uint64_t bytes) {
    return {.source = reinterpret_cast<std::uint64_t>(from),
            .destination = reinterpret_cast<std::uint64_t>(to),
            .bytes = bytes};
}

/// Copies of whole pieces of memory. `calls`, `plain` and `bulk` each do all of them once, and
/// wait.
class uniform_copies {
public:
    /// @param pieces `copy_of` memory that `device` reaches as long as this lives.
    uniform_copies(std::vector<weightwire::gpu::copy_item> pieces, int device)
        : pieces_{std::move(pieces)}, stream_{device} {
        weightwire::gpu::copy_tiles tiles;
        tiles.add_group(pieces_);
        plain_.emplace(device, tiles, weightwire::gpu::copy_form::plain);
        if (weightwire::gpu::compute_capability(device) >= 90) {
            bulk_.emplace(device, tiles, weightwire::gpu::copy_form::bulk);
        }
    }

    /// A copy call a piece.
    void calls() const {
        for (const auto& each : pieces_) {
            weightwire::gpu::copy_bytes(reinterpret_cast<std::byte*>(each.destination),   // NOLINT
                                        reinterpret_cast<const std::byte*>(each.source),  // NOLINT
                                        static_cast<std::size_t>(each.bytes), stream_);
        }
        stream_.synchronize();
    }
    void plain() const { launch(*plain_); }
    [[nodiscard]] bool has_bulk() const noexcept { return bulk_.has_value(); }
    /// @throws std::runtime_error the device has no bulk copies.
    void bulk() const {
        if (!bulk_) {
            throw std::runtime_error{"bulk copies need a device of compute capability 9.0"};
        }
        launch(*bulk_);
    }
    [[nodiscard]] const weightwire::gpu::stream& stream() const noexcept { return stream_; }

private:
    void launch(const weightwire::gpu::copy_plan& plan) const {
        plan.launch(0, nullptr, nullptr, stream_);
        stream_.synchronize();
    }

    std::vector<weightwire::gpu::copy_item> pieces_;
    weightwire::gpu::stream stream_;
    std::optional<weightwire::gpu::copy_plan> plain_;
    std::optional<weightwire::gpu::copy_plan> bulk_;
};

}  // namespace benchmarks
