#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <string>

#include <weightwire/gpu/kernels/copy_tiles.hpp>
#include <weightwire/gpu/nvrtc.hpp>

/// @file
/// Device code that copies many runs of bytes in one pass, in two forms. Both cut a piece in three:
/// a head and a tail of a few bytes, and a body whose destination is 16-byte aligned and made of
/// whole 16-byte words. Where source and destination agree modulo 16 the body is copied as it is;
/// elsewhere each word is put together from two aligned words of the source. No byte outside the
/// items is read or written.

namespace weightwire::gpu {

namespace detail {

/// What both forms share: the tables, the cut into head, body and tail, edges, shifts.
inline constexpr const char* copy_common_text = R"cuda(
typedef unsigned long long u64;
typedef unsigned int u32;
struct item { u64 source, destination, bytes; };
struct tile { u64 offset; u32 first, last; };

// A part of an item, with its cut. The body is read from `low` on, which is aligned.
struct piece { u64 source, destination; u32 bytes, head, body, slot; };

__device__ __forceinline__ u64 low_of(const piece& p) { return (p.source + p.head) & ~15ull; }
__device__ __forceinline__ u32 shift_of(const piece& p) { return (u32)(p.source + p.head) & 15u; }
// Bytes of the aligned words that hold the body.
__device__ __forceinline__ u32 span_of(const piece& p) {
    return p.body == 0 ? 0 : (shift_of(p) + p.body + 15u) & ~15u;
}

// Whole aligned words of the source are read where they lie inside the item; a piece in the middle
// of an item may reach up to 15 bytes beyond itself.
__device__ __forceinline__ piece cut(const item& whole, u64 begin, u64 bytes) {
    piece p;
    p.source = whole.source + begin;
    p.destination = whole.destination + begin;
    p.bytes = (u32)bytes;
    p.slot = 0;
    p.head = p.bytes;
    p.body = 0;
    if (bytes >= 64) {
        const bool before = begin >= 16, after = whole.bytes - begin - bytes >= 16;
        const u64 low = before ? p.source & ~15ull : (p.source + 15) & ~15ull;
        const u64 high = after ? (p.source + bytes + 15) & ~15ull : (p.source + bytes) & ~15ull;
        u32 head = (u32)(0 - p.destination) & 15u;
        if (p.source + head < low) head += 16;
        const u64 readable = high - p.source;
        p.head = head;
        p.body = (u32)((readable < bytes ? readable : bytes) - head) & ~15u;
    }
    return p;
}

// The piece of this lane; bytes is 0 for a lane without one.
__device__ __forceinline__ piece piece_of(const tile& t, item whole, u32 lane,
                                          u64 source_base, u64 destination_base) {
    const u32 count = t.last >> 24;
    if (lane >= count) { piece none = {0, 0, 0, 0, 0, 0}; return none; }
    whole.source += source_base;
    whole.destination += destination_base;
    const u64 begin = lane == 0 ? t.offset : 0;
    return cut(whole, begin, lane + 1 == count ? (u64)(t.last & 0xffffffu) : whole.bytes - begin);
}

// Head and tail, by the lanes of one warp.
__device__ __forceinline__ void copy_edges(const piece& p, u32 lane) {
    const u32 after = p.head + p.body, edges = p.bytes - p.body;
    for (u32 i = lane; i < edges; i += 32) {
        const u32 at = i < p.head ? i : after + (i - p.head);
        ((unsigned char*)p.destination)[at] = ((const unsigned char*)p.source)[at];
    }
}

// Bytes shift to shift + 15 of the 32 bytes a, b; shift is 1 to 15.
__device__ __forceinline__ uint4 shifted(const uint4& a, const uint4& b, u32 shift) {
    const u32 bits = (shift & 3u) * 8u;
    u32 w0, w1, w2, w3, w4;
    if (shift < 4) { w0 = a.x; w1 = a.y; w2 = a.z; w3 = a.w; w4 = b.x; }
    else if (shift < 8) { w0 = a.y; w1 = a.z; w2 = a.w; w3 = b.x; w4 = b.y; }
    else if (shift < 12) { w0 = a.z; w1 = a.w; w2 = b.x; w3 = b.y; w4 = b.z; }
    else { w0 = a.w; w1 = b.x; w2 = b.y; w3 = b.z; w4 = b.w; }
    return make_uint4(__funnelshift_r(w0, w1, bits), __funnelshift_r(w1, w2, bits),
                      __funnelshift_r(w2, w3, bits), __funnelshift_r(w3, w4, bits));
}

// Sum over the lanes before this one.
__device__ __forceinline__ u32 sum_before(u32 value, u32 lane) {
    u32 sum = value;
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    return sum - value;
}
)cuda";

/// Any architecture from sm_80 on: 16-byte loads and stores, a block a tile at a time. A warp
/// copies an equal share of the tile's bytes, whatever the number of pieces.
inline constexpr const char* copy_plain_text = R"cuda(
#define WARPS 8
#define DEEP 4

// Words first to last of the body.
template <bool Shifted>
__device__ __forceinline__ void copy_words(const piece& p, u32 first, u32 last, u32 lane) {
    const u64 from = low_of(p), to = p.destination + p.head;
    const u32 shift = shift_of(p);
    for (u32 base = first; base < last; base += 32 * DEEP) {
        uint4 words[DEEP];
        #pragma unroll
        for (u32 k = 0; k < DEEP; ++k) {
            const u32 i = base + k * 32 + lane;
            if (i < last) {
                const uint4* at = (const uint4*)(from + 16ull * i);
                words[k] = Shifted ? shifted(at[0], at[1], shift) : at[0];
            }
        }
        #pragma unroll
        for (u32 k = 0; k < DEEP; ++k) {
            const u32 i = base + k * 32 + lane;
            if (i < last) *(uint4*)(to + 16ull * i) = words[k];
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) weightwire_copy_plain(
    const item* items, const tile* tiles, u32 tile_count, u64 source_base, u64 destination_base) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 index = blockIdx.x; index < tile_count; index += gridDim.x) {
        const tile t = tiles[index];
        const u32 count = t.last >> 24;
        item whole = {0, 0, 0};
        if (lane < count) whole = items[t.first + lane];
        const piece mine = piece_of(t, whole, lane, source_base, destination_base);
        const u32 words = mine.body / 16, before = sum_before(words, lane);
        const u32 total = __shfl_sync(0xffffffffu, before + words, 31);
        const u32 share = (total + WARPS - 1) / WARPS;
        const u32 begin = share * warp, end = begin + share;
        for (u32 k = 0; k < count; ++k) {
            piece p;
            p.source = __shfl_sync(0xffffffffu, mine.source, k);
            p.destination = __shfl_sync(0xffffffffu, mine.destination, k);
            p.bytes = __shfl_sync(0xffffffffu, mine.bytes, k);
            p.head = __shfl_sync(0xffffffffu, mine.head, k);
            p.body = __shfl_sync(0xffffffffu, mine.body, k);
            const u32 start = __shfl_sync(0xffffffffu, before, k), n = p.body / 16;
            const u32 first = begin > start ? begin - start : 0;
            const u32 last = end > start ? (end - start < n ? end - start : n) : 0;
            if (first < last) {
                if (shift_of(p) == 0) copy_words<false>(p, first, last, lane);
                else copy_words<true>(p, first, last, lane);
            }
            if (k % WARPS == warp && p.bytes != p.body) copy_edges(p, lane);
        }
    }
}
)cuda";

/// sm_90 and later: a block a multiprocessor; one warp moves bodies through shared memory with bulk
/// asynchronous copies, a piece a lane; the others copy edges and shift the bodies that need it.
inline constexpr const char* copy_bulk_text = R"cuda(
#ifndef STAGES
#define STAGES 6
#endif
#ifndef LAG
#define LAG 3
#endif
#ifndef WORKERS
#define WORKERS 8
#endif
#define STAGE_BYTES (TILE_BYTES + 1024)  // aligned words round each of 32 pieces up

__device__ __forceinline__ u32 shared_address(const void* at) {
    return (u32)__cvta_generic_to_shared(at);
}
__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 :: "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    u32 done = 0;
    while (done == 0) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    }
}
__device__ __forceinline__ void bulk_load(u32 to, u64 from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void bulk_store(u64 to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

struct stage_notes { piece pieces[32]; u32 edges, shifted; };

extern "C" __global__ void __launch_bounds__(32 * (WORKERS + 1), 1) weightwire_copy_bulk(
    const item* items, const tile* tiles, u32 tile_count, u64 source_base, u64 destination_base) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ stage_notes notes[STAGES];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 mine = tile_count > blockIdx.x ? (tile_count - blockIdx.x - 1) / gridDim.x + 1 : 0;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < STAGES; ++s) {
            barrier_init(&full[s], 32);
            barrier_init(&empty[s], WORKERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (warp == 0) {
        // The tables are read ahead: a tile two rounds, its items one round before their use.
        const tile nothing = {0, 0, 0};
        tile now = mine > 0 ? tiles[blockIdx.x] : nothing;
        tile next = mine > 1 ? tiles[blockIdx.x + gridDim.x] : nothing;
        item held = {0, 0, 0};
        if (lane < now.last >> 24) held = items[now.first + lane];
        for (u32 k = 0; k < mine + LAG; ++k) {
            if (k < mine) {
                const u32 s = k % STAGES;
                piece p = piece_of(now, held, lane, source_base, destination_base);
                const u32 span = span_of(p), start = sum_before(span, lane);
                const u32 total = __shfl_sync(0xffffffffu, start + span, 31);
                p.slot = s * STAGE_BYTES + start;
                now = next;
                if (lane < now.last >> 24) held = items[now.first + lane];
                next = k + 2 < mine ? tiles[blockIdx.x + (k + 2) * gridDim.x] : nothing;
                if (k >= STAGES) {
                    // This lane's own stores out of the stage have been read, all workers are done.
                    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(STAGES - 1 - LAG)
                                 : "memory");
                    barrier_wait(&empty[s], (k / STAGES - 1) & 1u);
                }
                notes[s].pieces[lane] = p;
                const u32 edges = __ballot_sync(0xffffffffu, p.bytes != p.body);
                const u32 shifts = __ballot_sync(0xffffffffu, p.body != 0 && shift_of(p) != 0);
                if (lane == 0) {
                    notes[s].edges = edges;
                    notes[s].shifted = shifts;
                }
                // Each lane for its own notes, the first one for the bytes as well.
                if (lane == 0) barrier_arrive_expect(&full[s], total);
                else barrier_arrive(&full[s]);
                __syncwarp();
                if (span != 0) {
                    bulk_load(shared_address(memory) + p.slot, low_of(p), span, &full[s]);
                }
            }
            if (k >= LAG) {
                const u32 s = (k - LAG) % STAGES;
                barrier_wait(&full[s], ((k - LAG) / STAGES) & 1u);
                const piece p = notes[s].pieces[lane];
                if (p.body != 0 && shift_of(p) == 0) {
                    bulk_store(p.destination + p.head, shared_address(memory) + p.slot, p.body);
                }
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
        }
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        return;
    }

    const u32 worker = warp - 1, thread = threadIdx.x - 32;
    for (u32 k = 0; k < mine; ++k) {
        const u32 s = k % STAGES;
        barrier_wait(&full[s], (k / STAGES) & 1u);
        u32 turn = 0;
        for (u32 left = notes[s].edges; left != 0; left &= left - 1, ++turn) {
            if (turn % WORKERS == worker) copy_edges(notes[s].pieces[__ffs(left) - 1], lane);
        }
        for (u32 left = notes[s].shifted; left != 0; left &= left - 1) {
            const piece p = notes[s].pieces[__ffs(left) - 1];
            const u32 shift = shift_of(p), words = p.body / 16;
            const uint4* from = (const uint4*)(memory + p.slot);
            uint4* to = (uint4*)(p.destination + p.head);
            #pragma unroll 4
            for (u32 i = thread; i < words; i += 32 * WORKERS) {
                to[i] = shifted(from[i], from[i + 1], shift);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&empty[s]);
    }
}
)cuda";

}  // namespace detail

/// Stages of the bulk form; its shared memory follows from them.
inline constexpr unsigned int bulk_stages = 6;
/// Dynamic shared memory of a block of the bulk form.
inline constexpr std::size_t bulk_shared_bytes = bulk_stages * (tile_bytes + 1024);
/// Threads of a block: one warp for the copies, eight for edges and shifts.
inline constexpr unsigned int bulk_threads = 288;
/// Threads of a block of the plain form.
inline constexpr unsigned int plain_threads = 256;

/// The form for every architecture from sm_80 on.
[[nodiscard]] inline kernel_source copy_plain_source() {
    return {.name = "weightwire_copy_plain",
            .text = std::string{detail::copy_common_text} + detail::copy_plain_text,
            .options = {}};
}

/// The form for sm_90 and later.
[[nodiscard]] inline kernel_source copy_bulk_source() {
    return {.name = "weightwire_copy_bulk",
            .text = std::string{detail::copy_common_text} + detail::copy_bulk_text,
            .options = {"-DTILE_BYTES=" + std::to_string(tile_bytes),
                        "-DSTAGES=" + std::to_string(bulk_stages)}};
}

}  // namespace weightwire::gpu
