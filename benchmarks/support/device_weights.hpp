#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernel.hpp>
#include <weightwire/gpu/kernels/digest.hpp>
#include <weightwire/gpu/stream.hpp>

/// @file
/// A list's weights in device memory, made there and digested there.

namespace benchmarks {

/// One digest for many tensors: of their digests, in order.
[[nodiscard]] inline std::uint64_t digest_of_all(const weightwire::gpu::digest_plan& plan,
                                                 const weightwire::gpu::stream& on) {
    const auto all = plan.run(on);
    return weightwire::digest(std::as_bytes(std::span{all}));
}

/// Memory for a list, each tensor at a multiple of 256 bytes.
class device_weights {
public:
    /// @param most_bytes of one allocation, where a tensor is not larger; 0: all in one.
    device_weights(const weightwire::manifest& parameters, int device, std::uint64_t most_bytes = 0)
        : device_{device}, stream_{device} {
        struct spot {
            std::size_t block;
            std::uint64_t offset;
        };
        std::vector<std::uint64_t> sizes;
        std::vector<spot> spots;
        for (const auto& parameter : parameters.parameters()) {
            const auto bytes = (parameter.byte_size() + 255) / 256 * 256;
            if (sizes.empty() || (most_bytes != 0 && sizes.back() + bytes > most_bytes)) {
                sizes.push_back(0);
            }
            spots.push_back({sizes.size() - 1, sizes.back()});
            sizes.back() += bytes;
        }
        for (const auto size : sizes) {
            blocks_.emplace_back(device, static_cast<std::size_t>(size == 0 ? 256 : size));
        }
        std::vector<filled> items;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            const auto& parameter = parameters[i];
            auto* const data = blocks_[spots[i].block].data() + spots[i].offset;
            views_.push_back({data,
                              parameter.dtype,
                              parameter.shape,
                              {.kind = weightwire::memory_kind::cuda, .index = device}});
            items.push_back({data, parameter.byte_size(),
                             weightwire::digest(std::as_bytes(std::span{parameter.name}))});
        }
        items_ = weightwire::gpu::device_buffer{device, items.size() * sizeof(filled)};
        weightwire::gpu::check(
            cudaMemcpy(items_.data(), items.data(), items_.size(), cudaMemcpyHostToDevice),
            "cudaMemcpy");
    }

    [[nodiscard]] const std::vector<weightwire::mutable_tensor_view>& views() const noexcept {
        return views_;
    }
    /// The allocations. Two objects of the same list and `most_bytes` have them alike.
    [[nodiscard]] std::span<const weightwire::gpu::device_buffer> blocks() const noexcept {
        return blocks_;
    }
    [[nodiscard]] std::uint64_t allocated_bytes() const noexcept {
        std::uint64_t sum = 0;
        for (const auto& block : blocks_) {
            sum += block.size();
        }
        return sum;
    }

    /// Words from a hash of name, place and round.
    void fill(std::uint64_t round) const {
        const auto kernel =
            weightwire::gpu::load_kernel({.name = "weights", .text = text, .options = {}}, device_);
        const weightwire::gpu::device_guard guard{device_};
        kernel.launch(stream_,
                      {.blocks = static_cast<unsigned int>(views_.size()) * parts_of_a_tensor,
                       .threads = 512},
                      items_.data(), std::uint64_t{parts_of_a_tensor}, round);
        stream_.synchronize();
    }
    /// The same byte everywhere, by the runtime's own calls: nothing is compiled for it.
    void overwrite(unsigned char byte = 0xEE) const {
        const weightwire::gpu::device_guard guard{device_};
        for (const auto& block : blocks_) {
            weightwire::gpu::check(
                cudaMemsetAsync(block.data(), byte, block.size(), stream_.native_handle()),
                "cudaMemsetAsync");
        }
        stream_.synchronize();
    }
    /// Of the digests of all tensors.
    [[nodiscard]] std::uint64_t digest() const {
        if (!digests_) {
            std::vector<weightwire::gpu::digest_item> items;
            for (const auto& view : views_) {
                items.push_back({view.data(), view.byte_size()});
            }
            digests_.emplace(device_, items);
        }
        return digest_of_all(*digests_, stream_);
    }

private:
    /// As the kernel reads it.
    struct filled {
        std::byte* at;
        std::uint64_t bytes;
        std::uint64_t name;
    };
    static constexpr unsigned int parts_of_a_tensor = 8;
    static constexpr const char* text = R"cuda(
typedef unsigned long long u64;
struct item { u64* at; u64 bytes; u64 name; };
__device__ u64 mixed(u64 v) {
    v ^= v >> 33; v *= 0xff51afd7ed558ccdull; v ^= v >> 33; v *= 0xc4ceb9fe1a85ec53ull;
    return v ^ (v >> 33);
}
extern "C" __global__ void weights(const item* items, u64 parts, u64 round) {
    const item one = items[blockIdx.x / parts];
    const u64 part = blockIdx.x % parts;
    const u64 key = mixed(one.name + round * 0x9E3779B97F4A7C15ull);
    const u64 words = one.bytes / 8;
    for (u64 i = part * blockDim.x + threadIdx.x; i < words; i += parts * blockDim.x)
        one.at[i] = mixed(key + i);
    const u64 rest = one.bytes % 8;
    if (part == 0 && threadIdx.x < rest)
        ((unsigned char*)(one.at + words))[threadIdx.x] =
            (unsigned char)(mixed(key + words) >> (8 * threadIdx.x));
}
)cuda";

    int device_;
    weightwire::gpu::stream stream_;
    std::vector<weightwire::gpu::device_buffer> blocks_;
    std::vector<weightwire::mutable_tensor_view> views_;
    weightwire::gpu::device_buffer items_;
    mutable std::optional<weightwire::gpu::digest_plan> digests_;  ///< made at its first use
};

}  // namespace benchmarks
