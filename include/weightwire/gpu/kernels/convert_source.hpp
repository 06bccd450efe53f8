#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <string>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/gpu/kernels/convert_tiles.hpp>
#include <weightwire/gpu/nvrtc.hpp>

/// @file
/// Device code that copies tensors of any strides and converts their elements on the way: the
/// values are those of core/convert.hpp. One kernel a pair of element types and form, so that none
/// takes more registers than it needs. No byte outside the elements is read or written.

namespace weightwire::gpu {

namespace detail {

inline constexpr const char* convert_text = R"cuda(
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef float f32;
typedef double f64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

struct entry {
    u64 source, destination;
    u32 form, rank;
    u64 elements;
    u64 extents[RANK], source_strides[RANK], destination_strides[RANK];  // strides in bytes
};
struct tile { u64 first; u32 entry, count; };

#define THREADS 256
#define NARROW (sizeof(FROM) < sizeof(TO) ? sizeof(FROM) : sizeof(TO))
#define WIDE (sizeof(FROM) < sizeof(TO) ? sizeof(TO) : sizeof(FROM))
#define LANE (16 / NARROW)  // elements of a thread at a time: 16 bytes of the narrower type
#define DEEP (WIDE / NARROW >= 4 ? 1 : WIDE / NARROW == 2 ? 2 : 4)

// Every value goes by way of f32, which holds those of f16 and bf16.
__device__ __forceinline__ f32 widened(f64 v) { return (f32)v; }
__device__ __forceinline__ f32 widened(f32 v) { return v; }
__device__ __forceinline__ f32 widened(bf16 v) { return __uint_as_float((u32)v.bits << 16); }
__device__ __forceinline__ f32 widened(f16 v) {
    f32 wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
    return wide;
}
__device__ __forceinline__ void narrowed(f32 v, f64& to) { to = v; }
__device__ __forceinline__ void narrowed(f32 v, f32& to) { to = v; }
// As the lower of two, in a whole register: ptxas of CUDA 13.0 takes the 16-bit result of a single
// conversion, when its bytes are stored one by one, for a number to convert to 8 bits.
__device__ __forceinline__ void narrowed(f32 v, bf16& to) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(v));
    to.bits = (u16)pair;
}
__device__ __forceinline__ void narrowed(f32 v, f16& to) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(v));
    to.bits = (u16)pair;
}
template <class To, class From> struct conversion {
    static __device__ __forceinline__ To of(From v) { To to; narrowed(widened(v), to); return to; }
};
template <class Same> struct conversion<Same, Same> {
    static __device__ __forceinline__ Same of(Same v) { return v; }
};
__device__ __forceinline__ TO converted(FROM v) { return conversion<TO, FROM>::of(v); }

template <bool Bytes> __device__ __forceinline__ FROM load(u64 at) {
    if constexpr (Bytes) {
        FROM value;
        for (u32 k = 0; k < sizeof(FROM); ++k) ((u8*)&value)[k] = ((const u8*)at)[k];
        return value;
    } else {
        return *(const FROM*)at;
    }
}
template <bool Bytes> __device__ __forceinline__ void store(u64 at, TO value) {
    if constexpr (Bytes) {
        for (u32 k = 0; k < sizeof(TO); ++k) ((u8*)at)[k] = ((const u8*)&value)[k];
    } else {
        *(TO*)at = value;
    }
}

// Adds the place of `index`, which counts dimensions `first` and following, to both addresses.
template <class Index>
__device__ __forceinline__ void step_to(const entry& e, u32 first, Index index, u64& from,
                                        u64& to) {
    for (u32 d = first; d < e.rank; ++d) {
        const Index next = d + 1 < e.rank ? index / (Index)e.extents[d] : 0;
        const u64 at = index - next * (Index)e.extents[d];
        from += at * e.source_strides[d];
        to += at * e.destination_strides[d];
        index = next;
    }
}

union words_in { uint4 words[LANE * sizeof(FROM) / 16]; FROM items[LANE]; };
union words_out { uint4 words[LANE * sizeof(TO) / 16]; TO items[LANE]; };

// Contiguous elements: whole words where both sides are aligned after the same head.
__device__ __forceinline__ void convert_run(u64 from, u64 to, u32 count) {
    const u64 narrow = sizeof(FROM) < sizeof(TO) ? from : to;
    u32 head = ((u32)(0 - narrow) & 15u) / NARROW;
    if (head > count) head = count;
    const u64 from_words = from + head * sizeof(FROM), to_words = to + head * sizeof(TO);
    const u32 words = ((from_words | to_words) & 15u) == 0 ? (count - head) / LANE : 0;
    for (u32 base = 0; base < words; base += THREADS * DEEP) {
        words_in in[DEEP];
        #pragma unroll
        for (u32 k = 0; k < DEEP; ++k) {
            const u32 i = base + k * THREADS + threadIdx.x;
            if (i < words) {
                const uint4* at = (const uint4*)(from_words + (u64)i * sizeof(words_in));
                #pragma unroll
                for (u32 w = 0; w < sizeof(words_in) / 16; ++w) in[k].words[w] = at[w];
            }
        }
        #pragma unroll
        for (u32 k = 0; k < DEEP; ++k) {
            const u32 i = base + k * THREADS + threadIdx.x;
            if (i < words) {
                words_out out;
                #pragma unroll
                for (u32 n = 0; n < LANE; ++n) out.items[n] = converted(in[k].items[n]);
                uint4* at = (uint4*)(to_words + (u64)i * sizeof(words_out));
                #pragma unroll
                for (u32 w = 0; w < sizeof(words_out) / 16; ++w) at[w] = out.words[w];
            }
        }
    }
    // What is before and after the words; everything where there are none.
    const u32 body = words * LANE, rest = count - body;
    for (u32 base = 0; base < rest; base += THREADS * 4) {
        FROM in[4];
        #pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            const u32 i = base + k * THREADS + threadIdx.x, at = i < head ? i : i + body;
            if (i < rest) in[k] = load<false>(from + (u64)at * sizeof(FROM));
        }
        #pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            const u32 i = base + k * THREADS + threadIdx.x, at = i < head ? i : i + body;
            if (i < rest) store<false>(to + (u64)at * sizeof(TO), converted(in[k]));
        }
    }
}

template <class Index, bool Bytes>
__device__ __forceinline__ void convert_strided(const entry& e, const tile& t) {
    for (u32 base = 0; base < t.count; base += THREADS * 4) {
        FROM in[4];
        u64 to[4];
        #pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            const u32 i = base + k * THREADS + threadIdx.x;
            if (i < t.count) {
                u64 from = e.source;
                to[k] = e.destination;
                step_to(e, 0, (Index)(t.first + i), from, to[k]);
                in[k] = load<Bytes>(from);
            }
        }
        #pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            const u32 i = base + k * THREADS + threadIdx.x;
            if (i < t.count) store<Bytes>(to[k], converted(in[k]));
        }
    }
}

#define EDGE (sizeof(TO) <= 4 ? 64 : 32)
// A column then has no bank twice.
#define EDGE_PADDED (EDGE + (sizeof(TO) < 4 ? 4 / sizeof(TO) : 1))
#define LINES (THREADS / EDGE)  // that the block reads or writes at a time

// Squares of EDGE elements each way: read along dimension 1, written along dimension 0.
__device__ __forceinline__ void convert_squares(const entry& e, const tile& t) {
    __shared__ TO square[EDGE][EDGE_PADDED];
    const u32 x = threadIdx.x % EDGE, y = threadIdx.x / EDGE;
    const u64 across = (e.extents[0] + EDGE - 1) / EDGE, down = (e.extents[1] + EDGE - 1) / EDGE;
    for (u32 s = 0; s < t.count; ++s) {
        u64 index = t.first + s;
        const u64 first0 = index % across * EDGE;
        index /= across;
        const u64 first1 = index % down * EDGE;
        u64 from = e.source + first0 * e.source_strides[0] + first1 * sizeof(FROM);
        u64 to = e.destination + first0 * sizeof(TO) + first1 * e.destination_strides[1];
        step_to(e, 2, index / down, from, to);
        const u64 left0 = e.extents[0] - first0, left1 = e.extents[1] - first1;
        FROM in[EDGE / LINES];
        #pragma unroll
        for (u32 k = 0; k < EDGE / LINES; ++k) {
            const u32 line = k * LINES + y;
            if (line < left0 && x < left1) {
                in[k] = load<false>(from + line * e.source_strides[0] + x * sizeof(FROM));
            }
        }
        #pragma unroll
        for (u32 k = 0; k < EDGE / LINES; ++k) {
            const u32 line = k * LINES + y;
            if (line < left0 && x < left1) square[line][x] = converted(in[k]);
        }
        __syncthreads();
        #pragma unroll
        for (u32 k = 0; k < EDGE / LINES; ++k) {
            const u32 line = k * LINES + y;
            if (line < left1 && x < left0) {
                store<false>(to + line * e.destination_strides[1] + x * sizeof(TO),
                             square[x][line]);
            }
        }
        __syncthreads();
    }
}

__device__ __forceinline__ void convert_tile(const entry& e, const tile& t) {
#if FORM == ROWS
    u64 from = e.source, to = e.destination;
    const u64 row = t.first / e.extents[0], column = t.first - row * e.extents[0];
    step_to(e, 1, row, from, to);
    convert_run(from + column * sizeof(FROM), to + column * sizeof(TO), t.count);
#elif FORM == TRANSPOSED
    convert_squares(e, t);
#elif FORM == STRIDED
    if (e.elements >> 32 == 0) convert_strided<u32, false>(e, t);
    else convert_strided<u64, false>(e, t);
#else
    convert_strided<u64, true>(e, t);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) weightwire_convert(
    const entry* entries, const tile* tiles, u32 tile_count) {
    __shared__ entry held;
    for (u32 index = blockIdx.x; index < tile_count; index += gridDim.x) {
        const tile t = tiles[index];
        for (u32 i = threadIdx.x; i < sizeof(entry) / 8; i += THREADS) {
            ((u64*)&held)[i] = ((const u64*)&entries[t.entry])[i];
        }
        __syncthreads();
        convert_tile(held, t);
        __syncthreads();  // before the next entry takes the place of this one
    }
}
)cuda";

}  // namespace detail

/// Threads of a block.
inline constexpr unsigned int convert_threads = 256;

/// The kernel for one pair of element types and one form, from sm_80 on.
[[nodiscard]] inline kernel_source convert_source(const convert_pair& pair, convert_form form) {
    const auto name = [](dtype type) -> std::string {
        switch (type) {
            case dtype::f64: return "f64";
            case dtype::f32: return "f32";
            case dtype::f16: return "f16";
            case dtype::bf16: return "bf16";
            case dtype::u64: return "u64";
            case dtype::u32: return "u32";
            case dtype::u16: return "u16";
            default: return "u8";
        }
    };
    const auto number = [](convert_form value) {
        return std::to_string(static_cast<std::uint32_t>(value));
    };
    return {.name = "weightwire_convert",
            .text = detail::convert_text,
            .options = {"-DFROM=" + name(pair.from), "-DTO=" + name(pair.to),
                        "-DRANK=" + std::to_string(max_dimensions + 1), "-DFORM=" + number(form),
                        "-DROWS=" + number(convert_form::rows),
                        "-DTRANSPOSED=" + number(convert_form::transposed),
                        "-DSTRIDED=" + number(convert_form::strided)}};
}

}  // namespace weightwire::gpu
