#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernel.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/plan/regions.hpp>

/// @file
/// Looks at every element that a worker's loader wants, on the device: whether it is the one that
/// `device_weights` made at that place of the checkpoint. Knows regions and nothing of plans.

namespace benchmarks {

class region_check {
public:
    /// @param to where the worker's parameters are, in their manifest's order.
    region_check(int device, const weightwire::manifest& checkpoint,
                 std::span<const weightwire::plan::region> regions,
                 std::span<const weightwire::mutable_tensor_view> to)
        : device_{device}, stream_{device}, wrong_{device, sizeof(std::uint64_t)} {
        std::vector<piece> pieces;
        for (const auto& each : regions) {
            if (each.elements() == 0) {
                continue;
            }
            const auto& source = checkpoint[each.source];
            if (each.dimensions.size() > most_dimensions) {
                throw std::runtime_error{"a region has more dimensions than the check knows"};
            }
            piece made{.to = to[each.destination].data(),
                       .name = weightwire::digest(std::as_bytes(std::span{source.name})),
                       .source = static_cast<std::uint64_t>(each.source_offset),
                       .destination = static_cast<std::uint64_t>(each.destination_offset),
                       .elements = each.elements(),
                       .item = weightwire::item_bits(source.dtype) / 8};
            for (const auto& dimension : each.dimensions) {
                made.extents[made.rank] = static_cast<std::uint64_t>(dimension.extent);
                made.from[made.rank] = static_cast<std::uint64_t>(dimension.source_stride);
                made.at[made.rank] = static_cast<std::uint64_t>(dimension.destination_stride);
                ++made.rank;
            }
            pieces.push_back(made);
        }
        count_ = pieces.size();
        pieces_ = weightwire::gpu::device_buffer{device,
                                                 std::max<std::size_t>(count_ * sizeof(piece), 8)};
        weightwire::gpu::check(cudaMemcpy(pieces_.data(), pieces.data(), count_ * sizeof(piece),
                                          cudaMemcpyHostToDevice),
                               "cudaMemcpy");
    }

    /// Elements that are not those of this round.
    [[nodiscard]] std::uint64_t wrong(std::uint64_t round) const {
        const auto kernel = weightwire::gpu::load_kernel(
            {.name = "check_regions", .text = text, .options = {}}, device_);
        const weightwire::gpu::device_guard guard{device_};
        weightwire::gpu::check(
            cudaMemsetAsync(wrong_.data(), 0, wrong_.size(), stream_.native_handle()),
            "cudaMemsetAsync");
        if (count_ != 0) {
            kernel.launch(stream_,
                          {.blocks = static_cast<unsigned int>(count_ * parts), .threads = 256},
                          pieces_.data(), std::uint64_t{parts}, round, wrong_.data());
        }
        stream_.synchronize();
        std::uint64_t found = 0;
        weightwire::gpu::check(
            cudaMemcpy(&found, wrong_.data(), sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
        return found;
    }

private:
    static constexpr std::size_t most_dimensions = 6;
    static constexpr std::size_t parts = 16;  ///< blocks a region
    /// As the kernel reads it.
    struct piece {
        std::byte* to = nullptr;
        std::uint64_t name = 0;
        std::uint64_t source = 0;
        std::uint64_t destination = 0;
        std::uint64_t elements = 0;
        std::uint64_t item = 0;
        std::uint64_t rank = 0;
        std::array<std::uint64_t, most_dimensions> extents{};
        std::array<std::uint64_t, most_dimensions> from{};
        std::array<std::uint64_t, most_dimensions> at{};
    };
    static constexpr const char* text = R"cuda(
typedef unsigned long long u64;
struct piece { const unsigned char* to; u64 name, source, destination, elements, item, rank;
               u64 extents[6], from[6], at[6]; };
__device__ u64 mixed(u64 v) {
    v ^= v >> 33; v *= 0xff51afd7ed558ccdull; v ^= v >> 33; v *= 0xc4ceb9fe1a85ec53ull;
    return v ^ (v >> 33);
}
extern "C" __global__ void check_regions(const piece* pieces, u64 parts, u64 round, u64* wrong) {
    const piece one = pieces[blockIdx.x / parts];
    const u64 key = mixed(one.name + round * 0x9E3779B97F4A7C15ull);
    u64 found = 0;
    for (u64 e = blockIdx.x % parts * blockDim.x + threadIdx.x; e < one.elements;
         e += parts * blockDim.x) {
        u64 from = one.source, at = one.destination, index = e;
        for (u64 d = one.rank; d-- > 0;) {
            const u64 k = index % one.extents[d];
            index /= one.extents[d];
            from += k * one.from[d];
            at += k * one.at[d];
        }
        bool same = true;
        for (u64 b = 0; b < one.item; ++b) {
            const u64 byte = from * one.item + b;
            const unsigned char wanted =
                (unsigned char)(mixed(key + byte / 8) >> (8 * (byte % 8)));
            same = same && one.to[at * one.item + b] == wanted;
        }
        found += same ? 0 : 1;
    }
    if (found != 0) atomicAdd(wrong, found);
}
)cuda";

    int device_;
    weightwire::gpu::stream stream_;
    weightwire::gpu::device_buffer pieces_;
    weightwire::gpu::device_buffer wrong_;
    std::size_t count_ = 0;
};

}  // namespace benchmarks
