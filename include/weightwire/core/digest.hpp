#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <weightwire/core/tensor.hpp>

/// @file
/// The digest of a tensor: 64 bits, keyed by position, the same on host and device, combinable over
/// pieces.
///
/// Word `i` is bytes `8i` to `8i+7` of the tensor in C order, little endian, the last one padded
/// with zeros. With all arithmetic modulo 2^64 and `C = 0x9E3779B97F4A7C15`:
///
///     v(i)   = (word(i) + (i + 1) * C);   v ^= v >> 32;   v *= 0xD6E8FEB86659FD93;   v ^= v >> 29
///     digest = finish(sum of v(i), byte count)
///
/// A sum, so pieces may be digested in any order and by any number of threads; `v` is one-to-one in
/// the word, so any single changed word changes the digest. It finds corruption and mistakes; it is
/// no defence against an adversary.

namespace weightwire {

namespace detail {

inline constexpr std::uint64_t digest_key = 0x9E3779B97F4A7C15U;

[[nodiscard]] constexpr std::uint64_t digest_term(std::uint64_t word, std::uint64_t key) noexcept {
    std::uint64_t v = word + key;
    v ^= v >> 32U;
    v *= 0xD6E8FEB86659FD93U;
    return v ^ (v >> 29U);
}

[[nodiscard]] inline std::uint64_t load_word(const std::byte* from, std::size_t count) noexcept {
    std::uint64_t word = 0;
    std::memcpy(&word, from, count);
    if constexpr (std::endian::native == std::endian::big) {
        word = __builtin_bswap64(word);
    }
    return word;
}

}  // namespace detail

/// Sum of the terms of a piece that starts at byte `offset` of its tensor. `offset` is a multiple
/// of 8, and so is the length of every piece but the last.
[[nodiscard]] inline std::uint64_t digest_piece(std::span<const std::byte> piece,
                                                std::uint64_t offset) noexcept {
    using detail::digest_key;
    std::uint64_t key = (offset / 8 + 1) * digest_key;
    std::array<std::uint64_t, 4> sums{};
    const std::byte* at = piece.data();
    std::size_t left = piece.size();
    for (; left >= 32; left -= 32, at += 32, key += 4 * digest_key) {
        for (std::size_t lane = 0; lane < 4; ++lane) {
            sums[lane] +=
                detail::digest_term(detail::load_word(at + 8 * lane, 8), key + lane * digest_key);
        }
    }
    for (; left >= 8; left -= 8, at += 8, key += digest_key) {
        sums[0] += detail::digest_term(detail::load_word(at, 8), key);
    }
    if (left > 0) {
        sums[0] += detail::digest_term(detail::load_word(at, left), key);
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/// The digest from the sum over all pieces and the tensor's size in bytes.
[[nodiscard]] constexpr std::uint64_t digest_finish(std::uint64_t sum,
                                                    std::uint64_t byte_size) noexcept {
    return detail::digest_term(sum, byte_size * detail::digest_key);
}

/// The digest of contiguous bytes.
[[nodiscard]] inline std::uint64_t digest(std::span<const std::byte> bytes) noexcept {
    return digest_finish(digest_piece(bytes, 0), bytes.size());
}

/// 16 lower-case hexadecimal digits: the spelling on the wire and in `/weight_checker`.
[[nodiscard]] inline std::string digest_text(std::uint64_t value) {
    std::string out(16, '0');
    std::array<char, 16> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value, 16).ptr;
    const auto count = static_cast<std::size_t>(end - digits.data());
    out.replace(16 - count, count, digits.data(), count);
    return out;
}

/// The inverse of `digest_text`; nothing where `text` is not 16 hexadecimal digits.
[[nodiscard]] inline std::optional<std::uint64_t> digest_from_text(std::string_view text) noexcept {
    std::uint64_t value = 0;
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
    if (text.size() != 16 || status != std::errc{} || end != text.data() + text.size()) {
        return std::nullopt;
    }
    return value;
}

}  // namespace weightwire
