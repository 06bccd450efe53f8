#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <string>

#include <weightwire/core/digest.hpp>
#include <weightwire/gpu/nvrtc.hpp>

/// @file
/// Device code for the digest of core/digest.hpp: the same 64 bits, many tensors a launch.

namespace weightwire::gpu {

namespace detail {

/// A block digests a tile of one tensor at a time and adds its sum to the tensor's; a second kernel
/// finishes the sums. Reads 16 aligned bytes at a time; no byte outside the tensors.
inline constexpr const char* digest_text = R"cuda(
typedef unsigned long long u64;
typedef unsigned int u32;
struct item { u64 source, bytes; };
struct tile { u64 offset; u64 item; };
#define THREADS 256

__device__ __forceinline__ u64 term(u64 word, u64 key) {
    u64 v = word + key;
    v ^= v >> 32;
    v *= 0xD6E8FEB86659FD93ull;
    return v ^ (v >> 29);
}
// Up to 8 bytes, the first one lowest.
__device__ __forceinline__ u64 bytes_at(u64 from, u32 count) {
    u64 word = 0;
    for (u32 i = 0; i < count; ++i) {
        word |= (u64)((const unsigned char*)from)[i] << (8 * i);
    }
    return word;
}
// The words of the 16 bytes at `from`, which all lie in [begin, end).
__device__ __forceinline__ void two_words(u64 from, u64 begin, u64 end, u64& first, u64& second) {
    const u32 shift = (u32)from & 15u;
    const u64 low = from - shift;
    if (shift == 0) {
        const ulonglong2 v = *(const ulonglong2*)from;
        first = v.x;
        second = v.y;
    } else if (low >= begin && low + 32 <= end) {
        const ulonglong2 a = ((const ulonglong2*)low)[0], b = ((const ulonglong2*)low)[1];
        const u32 bits = (shift & 7u) * 8u;
        const u64 w0 = shift < 8 ? a.x : a.y, w1 = shift < 8 ? a.y : b.x;
        const u64 w2 = shift < 8 ? b.x : b.y;
        first = bits == 0 ? w0 : (w0 >> bits) | (w1 << (64 - bits));
        second = bits == 0 ? w1 : (w1 >> bits) | (w2 << (64 - bits));
    } else {
        first = bytes_at(from, 8);
        second = bytes_at(from + 8, 8);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) weightwire_digest(
    const item* items, const tile* tiles, u32 tile_count, u64* sums) {
    for (u32 index = blockIdx.x; index < tile_count; index += gridDim.x) {
        const tile t = tiles[index];
        const item whole = items[t.item];
        const u64 left = whole.bytes - t.offset;
        const u32 bytes = left < TILE_BYTES ? (u32)left : TILE_BYTES;
        const u64 start = whole.source + t.offset, end = whole.source + whole.bytes;
        const u64 word = t.offset / 8 + 1;
        u64 sum = 0;
        #pragma unroll 4
        for (u32 i = threadIdx.x; i < bytes / 16; i += THREADS) {
            u64 first, second;
            two_words(start + 16ull * i, whole.source, end, first, second);
            sum += term(first, (word + 2 * i) * DIGEST_KEY);
            sum += term(second, (word + 2 * i + 1) * DIGEST_KEY);
        }
        if (threadIdx.x < 2) {  // the last bytes of a tensor: up to two words
            const u32 at = (bytes & ~15u) + 8 * threadIdx.x;
            if (at < bytes) {
                sum += term(bytes_at(start + at, bytes - at < 8 ? bytes - at : 8),
                            (word + at / 8) * DIGEST_KEY);
            }
        }
        for (u32 step = 16; step != 0; step /= 2) {
            sum += __shfl_down_sync(0xffffffffu, sum, step);
        }
        if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&sums[t.item], sum);
    }
}

extern "C" __global__ void weightwire_digest_finish(const item* items, u32 count, u64* sums) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        sums[i] = term(sums[i], items[i].bytes * DIGEST_KEY);
    }
}
)cuda";

inline constexpr unsigned int digest_threads = 256;
inline constexpr std::uint64_t digest_tile_bytes = 32768;

[[nodiscard]] inline kernel_source digest_source_of(const char* name) {
    return {.name = name,
            .text = digest_text,
            .options = {"-DTILE_BYTES=" + std::to_string(digest_tile_bytes),
                        "-DDIGEST_KEY=" + std::to_string(weightwire::detail::digest_key) + "ull"}};
}

}  // namespace detail

/// Adds up the terms of every tensor.
[[nodiscard]] inline kernel_source digest_source() {
    return detail::digest_source_of("weightwire_digest");
}

/// Makes digests of the sums.
[[nodiscard]] inline kernel_source digest_finish_source() {
    return detail::digest_source_of("weightwire_digest_finish");
}

}  // namespace weightwire::gpu
