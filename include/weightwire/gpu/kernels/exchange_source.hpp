#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <string>

#include <weightwire/gpu/nvrtc.hpp>

/// @file
/// Device code that exchanges pairs of runs of bytes in one pass, without a third copy of them.

namespace weightwire::gpu {

namespace detail {

/// A block exchanges a tile of one pair at a time, in the widest words to which both sides are
/// aligned alike. Neighbours of the runs are neither read nor written.
inline constexpr const char* exchange_text = R"cuda(
typedef unsigned long long u64;
typedef unsigned int u32;
struct item { u64 a, b, bytes; };
struct tile { u64 offset; u64 item; };
#define THREADS 256
#define DEEP 4

// Loads of a step come before its stores: the compiler cannot know that the sides do not overlap.
template <class Word>
__device__ __forceinline__ void swap_words(u64 a, u64 b, u32 count) {
    Word* const left = (Word*)a;
    Word* const right = (Word*)b;
    for (u32 base = 0; base < count; base += THREADS * DEEP) {
        Word x[DEEP], y[DEEP];
        #pragma unroll
        for (u32 k = 0; k < DEEP; ++k) {
            const u32 i = base + k * THREADS + threadIdx.x;
            if (i < count) {
                x[k] = left[i];
                y[k] = right[i];
            }
        }
        #pragma unroll
        for (u32 k = 0; k < DEEP; ++k) {
            const u32 i = base + k * THREADS + threadIdx.x;
            if (i < count) {
                left[i] = y[k];
                right[i] = x[k];
            }
        }
    }
}

// Up to the first word, the words, and what is left. Both sides lie alike to a multiple of a word.
template <class Word>
__device__ __forceinline__ void swap_bytes(u64 a, u64 b, u32 bytes) {
    const u32 before = (u32)(0 - a) & (u32)(sizeof(Word) - 1);
    const u32 head = before < bytes ? before : bytes;
    const u32 words = (bytes - head) / (u32)sizeof(Word);
    const u32 done = head + words * (u32)sizeof(Word);
    swap_words<unsigned char>(a, b, head);
    swap_words<Word>(a + head, b + head, words);
    swap_words<unsigned char>(a + done, b + done, bytes - done);
}

extern "C" __global__ void __launch_bounds__(THREADS) weightwire_exchange(
    const item* items, const tile* tiles, u32 tile_count) {
    for (u32 index = blockIdx.x; index < tile_count; index += gridDim.x) {
        const tile t = tiles[index];
        const item whole = items[t.item];
        const u64 left = whole.bytes - t.offset;
        const u32 bytes = left < TILE_BYTES ? (u32)left : TILE_BYTES;
        const u64 a = whole.a + t.offset, b = whole.b + t.offset;
        const u32 apart = (u32)(a - b);
        if (apart % 16 == 0) swap_bytes<uint4>(a, b, bytes);
        else if (apart % 8 == 0) swap_bytes<u64>(a, b, bytes);
        else if (apart % 4 == 0) swap_bytes<u32>(a, b, bytes);
        else if (apart % 2 == 0) swap_bytes<unsigned short>(a, b, bytes);
        else swap_words<unsigned char>(a, b, bytes);
    }
}
)cuda";

inline constexpr unsigned int exchange_threads = 256;
inline constexpr std::uint64_t exchange_tile_bytes = 32768;

}  // namespace detail

/// Exchanges every pair.
[[nodiscard]] inline kernel_source exchange_source() {
    return {.name = "weightwire_exchange",
            .text = detail::exchange_text,
            .options = {"-DTILE_BYTES=" + std::to_string(detail::exchange_tile_bytes)}};
}

}  // namespace weightwire::gpu
