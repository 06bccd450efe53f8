#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// The digest of a tensor wherever its elements lie: what a worker compares before it commits and
/// what `/weight_checker` reports.

namespace weightwire::detail {

/// Calls `visit(Byte* run)` in C order for each run of a strided tensor that is not empty. A run
/// spans the last `run_dimensions` dimensions, whose elements touch.
template <class Byte, class Visit>
void each_run(const basic_tensor_view<Byte>& tensor, std::size_t run_dimensions,
              std::size_t item_bytes, Visit&& visit) {
    std::array<std::int64_t, max_dimensions> at{};
    const auto outer = tensor.extents().size() - run_dimensions;
    for (;;) {
        std::int64_t element = 0;
        for (std::size_t i = 0; i < outer; ++i) {
            element += at[i] * tensor.strides()[i];
        }
        visit(tensor.data() + element * static_cast<std::int64_t>(item_bytes));
        std::size_t i = outer;
        while (i > 0 && ++at[i - 1] == tensor.extents()[i - 1]) {
            at[--i] = 0;
        }
        if (i == 0) {
            return;
        }
    }
}

/// For a digest that nothing ends early.
struct no_pause {
    void operator()(std::size_t /*bytes*/) const noexcept {}
};

/// Gathers a strided tensor through a small buffer: pieces of a digest begin at multiples of 8.
/// @param pause as for `tensor_digest`.
template <class Pause>
[[nodiscard]] std::uint64_t strided_digest(const tensor_view& tensor, Pause& pause) {
    constexpr std::size_t chunk = std::size_t{64} << 10U;
    const auto item = item_bits(tensor.type()) / 8;
    const auto rank = tensor.extents().size();
    const bool rows = rank > 0 && tensor.strides()[rank - 1] == 1;
    const auto run = rows ? static_cast<std::size_t>(tensor.extents()[rank - 1]) * item : item;
    std::vector<std::byte> buffer(chunk);
    std::uint64_t sum = 0;
    std::uint64_t offset = 0;
    std::size_t held = 0;
    each_run(tensor, rows ? 1 : 0, item, [&](const std::byte* from) {
        for (std::size_t done = 0; done < run;) {
            const auto count = std::min(run - done, chunk - held);
            std::memcpy(buffer.data() + held, from + done, count);
            done += count;
            held += count;
            if (held == chunk) {
                sum += digest_piece(buffer, offset);
                offset += chunk;
                held = 0;
                pause(chunk);
            }
        }
    });
    sum += digest_piece(std::span{buffer}.first(held), offset);
    pause(held);
    return digest_finish(sum, tensor.byte_size());
}

/// The digest in pieces, with a pause after each.
template <class Pause>
[[nodiscard]] std::uint64_t contiguous_digest(std::span<const std::byte> bytes, Pause& pause) {
    constexpr std::size_t piece = std::size_t{1} << 20U;
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
        const auto some = bytes.subspan(at, std::min(piece, bytes.size() - at));
        sum += digest_piece(some, at);
        pause(some.size());
    }
    return digest_finish(sum, bytes.size());
}

/// Digest of the tensor's elements in C order.
/// @param pause called as `pause(bytes)` after each piece of at most 1 MiB; ends the digest by
/// throwing.
/// @throws unsupported_error the tensor is not in host memory, or has strides and a 6-bit type.
template <class Pause = no_pause>
[[nodiscard]] std::uint64_t tensor_digest(const tensor_view& tensor, Pause pause = {}) {
    if (tensor.byte_size() == 0) {
        return digest({});
    }
    if (tensor.device().kind != memory_kind::host) {
        throw unsupported_error{
            "a worker digests host memory only, unless its sink has tensor_digests(); send without "
            "digests, or keep the weights in host memory"};
    }
    if (tensor.is_contiguous()) {
        return contiguous_digest(tensor.bytes(), pause);
    }
    if (item_bits(tensor.type()) % 8 != 0) {
        throw unsupported_error{"a bit-packed tensor with strides has no byte order to digest"};
    }
    return strided_digest(tensor, pause);
}

}  // namespace weightwire::detail
