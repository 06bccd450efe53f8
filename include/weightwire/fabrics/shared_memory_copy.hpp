#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// Copies between host mappings.
///
/// Weights that a worker receives are not read again soon, so ordinary stores waste a third of the
/// memory traffic: each reads the line that it is about to overwrite. Streaming stores do not, and
/// leave the caches to others. They pay off for large destinations that nobody reads next; into a
/// small ring that another process reads at once, plain `memcpy` is the right copy.

namespace weightwire::shm {

namespace detail {

#if defined(__x86_64__)

// Each kernel copies a multiple of 256 bytes to a 64-byte boundary, and leaves the fence to its
// caller. The instruction sets are asked for function by function, so no translation unit needs a
// flag, and none is executed unless the processor has it.

[[gnu::target("avx512f")]] inline void stream_avx512(std::byte* to, const std::byte* from,
                                                     std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; i += 256) {
        const auto a = _mm512_loadu_si512(from + i);
        const auto b = _mm512_loadu_si512(from + i + 64);
        const auto c = _mm512_loadu_si512(from + i + 128);
        const auto d = _mm512_loadu_si512(from + i + 192);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 64), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 128), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 192), d);
    }
}

[[gnu::target("avx2")]] inline void stream_avx2(std::byte* to, const std::byte* from,
                                                std::size_t count) noexcept {
    const auto* source = reinterpret_cast<const __m256i*>(from);
    auto* target = reinterpret_cast<__m256i*>(to);
    for (std::size_t i = 0; i < count / 32; i += 4) {
        const auto a = _mm256_loadu_si256(source + i);
        const auto b = _mm256_loadu_si256(source + i + 1);
        const auto c = _mm256_loadu_si256(source + i + 2);
        const auto d = _mm256_loadu_si256(source + i + 3);
        _mm256_stream_si256(target + i, a);
        _mm256_stream_si256(target + i + 1, b);
        _mm256_stream_si256(target + i + 2, c);
        _mm256_stream_si256(target + i + 3, d);
    }
}

/// Every x86-64 processor has SSE2.
inline void stream_sse2(std::byte* to, const std::byte* from, std::size_t count) noexcept {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    for (std::size_t i = 0; i < count / 16; i += 4) {
        const auto a = _mm_loadu_si128(source + i);
        const auto b = _mm_loadu_si128(source + i + 1);
        const auto c = _mm_loadu_si128(source + i + 2);
        const auto d = _mm_loadu_si128(source + i + 3);
        _mm_stream_si128(target + i, a);
        _mm_stream_si128(target + i + 1, b);
        _mm_stream_si128(target + i + 2, c);
        _mm_stream_si128(target + i + 3, d);
    }
}

using stream_kernel = void (*)(std::byte*, const std::byte*, std::size_t) noexcept;

/// The widest kernel that this processor runs.
[[nodiscard]] inline stream_kernel best_stream_kernel() noexcept {
    if (__builtin_cpu_supports("avx512f")) {
        return &stream_avx512;
    }
    return __builtin_cpu_supports("avx2") ? &stream_avx2 : &stream_sse2;
}

inline void stream_fence() noexcept { _mm_sfence(); }

/// Streams what is aligned, copies the rest plainly.
inline void stream_unfenced(std::byte* to, const std::byte* from, std::size_t count,
                            stream_kernel kernel) noexcept {
    constexpr std::size_t line = 64;
    constexpr std::size_t block = 256;
    constexpr std::size_t worth_streaming = 1024;
    if (count < worth_streaming) {
        std::memcpy(to, from, count);
        return;
    }
    const auto head = (line - reinterpret_cast<std::uintptr_t>(to) % line) % line;
    std::memcpy(to, from, head);
    const auto body = (count - head) / block * block;
    kernel(to + head, from + head, body);
    std::memcpy(to + head + body, from + head + body, count - head - body);
}

inline void stream_unfenced(std::byte* to, const std::byte* from, std::size_t count) noexcept {
    stream_unfenced(to, from, count, best_stream_kernel());
}

#else

inline void stream_fence() noexcept {}
inline void stream_unfenced(std::byte* to, const std::byte* from, std::size_t count) noexcept {
    std::memcpy(to, from, count);
}

#endif

}  // namespace detail

/// Copies `count` bytes with stores that bypass the caches where the processor has them, any
/// alignment. They are visible before any store that follows the call. The ranges do not overlap.
inline void streaming_copy(std::byte* to, const std::byte* from, std::size_t count) noexcept {
    if (count != 0) {
        detail::stream_unfenced(to, from, count);
        detail::stream_fence();
    }
}

/// How a copy's stores treat the caches.
enum class stores : std::uint8_t {
    cached,     ///< the bytes are read next
    streaming,  ///< they are not
};

namespace detail {

/// Copies without a fence.
inline void copy_run(std::byte* to, const std::byte* from, std::size_t count, stores how) noexcept {
    if (how == stores::streaming) {
        stream_unfenced(to, from, count);
    } else {
        std::memcpy(to, from, count);
    }
}

/// `count` runs of `Bytes` bytes, each side with its own step. Constant sizes become single moves.
template <std::size_t Bytes>
void copy_items(std::byte* to, std::int64_t to_step, const std::byte* from, std::int64_t from_step,
                std::uint64_t count) noexcept {
    for (std::uint64_t i = 0; i < count; ++i, to += to_step, from += from_step) {
        std::memcpy(to, from, Bytes);
    }
}

/// `count` runs of `bytes` bytes, each side with its own step.
inline void copy_line(std::byte* to, std::int64_t to_step, const std::byte* from,
                      std::int64_t from_step, std::size_t bytes, std::uint64_t count,
                      stores how) noexcept {
    switch (bytes) {
        case 1: return copy_items<1>(to, to_step, from, from_step, count);
        case 2: return copy_items<2>(to, to_step, from, from_step, count);
        case 4: return copy_items<4>(to, to_step, from, from_step, count);
        case 8: return copy_items<8>(to, to_step, from, from_step, count);
        case 16: return copy_items<16>(to, to_step, from, from_step, count);
        default: break;
    }
    for (std::uint64_t i = 0; i < count; ++i, to += to_step, from += from_step) {
        copy_run(to, from, bytes, how);
    }
}

/// A strided tensor as contiguous runs of bytes in C order. Lives on the stack.
class strided_runs {
public:
    /// @throws unsupported_error elements that are no whole bytes, with gaps between them.
    template <class Byte>
    explicit strided_runs(const basic_tensor_view<Byte>& tensor) {
        const auto bits = item_bits(tensor.type());
        if (bits % 8 != 0) {
            throw unsupported_error{"a tensor of " + std::string{to_string(tensor.type())} +
                                    ", whose elements are no whole bytes, has to be contiguous"};
        }
        run_ = bits / 8;
        const auto item = static_cast<std::int64_t>(run_);
        std::size_t dimension = tensor.extents().size();
        for (; dimension > 0; --dimension) {
            const auto extent = tensor.extents()[dimension - 1];
            if (extent != 1 &&
                tensor.strides()[dimension - 1] * item != static_cast<std::int64_t>(run_)) {
                break;
            }
            run_ *= static_cast<std::uint64_t>(extent);
        }
        for (std::size_t i = 0; i < dimension; ++i) {
            if (tensor.extents()[i] != 1) {
                extents_[rank_] = static_cast<std::uint64_t>(tensor.extents()[i]);
                steps_[rank_++] = tensor.strides()[i] * item;
            }
        }
    }

    /// Calls `visit(from_start, step, bytes, count)` for lines of `count` runs of `bytes` bytes
    /// that together are bytes `[offset, offset + total)` of the tensor in C order: `from_start` is
    /// the first run's distance from the tensor's address, `step` from run to run.
    template <class Visit>
    void for_each_line(std::uint64_t offset, std::uint64_t total, Visit visit) const {
        while (total > 0) {
            const auto index = offset / run_;
            const auto within = offset % run_;
            std::uint64_t bytes = std::min(run_ - within, total);
            std::uint64_t count = 1;
            std::int64_t step = 0;
            if (bytes == run_ && rank_ > 0) {
                const auto inner = extents_[rank_ - 1];
                count = std::min(inner - index % inner, total / run_);
                step = steps_[rank_ - 1];
            }
            visit(distance(index) + static_cast<std::int64_t>(within), step,
                  static_cast<std::size_t>(bytes), count);
            offset += bytes * count;
            total -= bytes * count;
        }
    }

private:
    [[nodiscard]] std::int64_t distance(std::uint64_t index) const noexcept {
        std::int64_t result = 0;
        for (std::size_t i = rank_; i-- > 0;) {
            result += static_cast<std::int64_t>(index % extents_[i]) * steps_[i];
            index /= extents_[i];
        }
        return result;
    }

    std::uint64_t run_ = 1;  ///< bytes that lie together
    std::size_t rank_ = 0;
    std::array<std::uint64_t, max_dimensions> extents_{};
    std::array<std::int64_t, max_dimensions> steps_{};  ///< in bytes
};

}  // namespace detail

/// Writes `piece` to bytes `[offset, offset + piece.size())`, in C order, of a host tensor of any
/// strides.
/// @throws unsupported_error a tensor of 6-bit elements with gaps.
inline void scatter(const mutable_tensor_view& to, std::uint64_t offset,
                    std::span<const std::byte> piece, stores how) {
    if (piece.empty()) {
        return;
    }
    if (to.is_contiguous()) {
        detail::copy_run(to.data() + offset, piece.data(), piece.size(), how);
    } else {
        const auto* from = piece.data();
        detail::strided_runs{to}.for_each_line(
            offset, piece.size(),
            [&](std::int64_t start, std::int64_t step, std::size_t bytes, std::uint64_t count) {
                detail::copy_line(to.data() + start, step, from, static_cast<std::int64_t>(bytes),
                                  bytes, count, how);
                from += bytes * count;
            });
    }
    if (how == stores::streaming) {
        detail::stream_fence();
    }
}

/// Reads bytes `[offset, offset + piece.size())`, in C order, of a host tensor of any strides.
/// @throws unsupported_error a tensor of 6-bit elements with gaps.
inline void gather(std::span<std::byte> piece, const tensor_view& from, std::uint64_t offset,
                   stores how) {
    if (piece.empty()) {
        return;
    }
    if (from.is_contiguous()) {
        detail::copy_run(piece.data(), from.data() + offset, piece.size(), how);
    } else {
        auto* to = piece.data();
        detail::strided_runs{from}.for_each_line(
            offset, piece.size(),
            [&](std::int64_t start, std::int64_t step, std::size_t bytes, std::uint64_t count) {
                detail::copy_line(to, static_cast<std::int64_t>(bytes), from.data() + start, step,
                                  bytes, count, how);
                to += bytes * count;
            });
    }
    if (how == stores::streaming) {
        detail::stream_fence();
    }
}

}  // namespace weightwire::shm
