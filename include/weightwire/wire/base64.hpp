#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// @file
/// Base64 of RFC 4648 section 4: standard alphabet, padded. Strict, so that one byte sequence has
/// one spelling.

namespace weightwire::wire {

namespace detail {

inline constexpr std::string_view base64_alphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
inline constexpr std::uint8_t base64_invalid = 0xFF;

inline constexpr std::array<std::uint8_t, 256> base64_values = [] {
    std::array<std::uint8_t, 256> table{};
    table.fill(base64_invalid);
    for (std::size_t i = 0; i < base64_alphabet.size(); ++i) {
        table[static_cast<unsigned char>(base64_alphabet[i])] = static_cast<std::uint8_t>(i);
    }
    return table;
}();

}  // namespace detail

/// Appends the base64 text of `bytes`: four characters for three bytes, padded with `=`.
inline void append_base64(std::string& out, std::span<const std::byte> bytes) {
    const auto digit = [](std::uint32_t value) { return detail::base64_alphabet[value & 0x3FU]; };
    out.reserve(out.size() + (bytes.size() + 2) / 3 * 4);
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
        const std::size_t count = bytes.size() - i < 3 ? bytes.size() - i : 3;
        std::uint32_t group = 0;
        for (std::size_t k = 0; k < 3; ++k) {
            group = group << 8U | (k < count ? std::to_integer<std::uint32_t>(bytes[i + k]) : 0U);
        }
        out += digit(group >> 18U);
        out += digit(group >> 12U);
        out += count > 1 ? digit(group >> 6U) : '=';
        out += count > 2 ? digit(group) : '=';
    }
}

/// The bytes that `text` spells; nothing where it has another length than a multiple of four, a
/// character outside the alphabet, padding elsewhere than at the end, or unused bits that are not
/// zero.
[[nodiscard]] inline std::optional<std::vector<std::byte>> decode_base64(std::string_view text) {
    if (text.size() % 4 != 0) {
        return std::nullopt;
    }
    std::size_t padding = 0;
    while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') {
        ++padding;
    }
    std::vector<std::byte> out;
    out.reserve(text.size() / 4 * 3);
    const std::size_t digits = text.size() - padding;
    for (std::size_t i = 0; i < digits; i += 4) {
        const std::size_t count = digits - i < 4 ? digits - i : 4;
        std::uint32_t group = 0;
        for (std::size_t k = 0; k < 4; ++k) {
            const auto value = k < count
                                   ? detail::base64_values[static_cast<unsigned char>(text[i + k])]
                                   : std::uint8_t{0};
            if (value == detail::base64_invalid) {
                return std::nullopt;
            }
            group = group << 6U | value;
        }
        const std::uint32_t unused = count == 4 ? 0U : (count == 3 ? 0xFFU : 0xFFFFU);
        if ((group & unused) != 0) {
            return std::nullopt;
        }
        for (std::size_t k = 0; k + 1 < count; ++k) {
            out.push_back(static_cast<std::byte>(group >> (16U - 8U * k) & 0xFFU));
        }
    }
    return out;
}

}  // namespace weightwire::wire
