#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

/// @file
/// The bytes of safetensors files, well-formed or not.

namespace weightwire::test_support {

/// `value` in eight little-endian bytes.
inline std::string length_field(std::uint64_t value) {
    std::string out;
    for (unsigned i = 0; i < 8; ++i) {
        out += static_cast<char>(static_cast<unsigned char>(value >> (8 * i) & 0xFFU));
    }
    return out;
}

/// A file of that header and that many data bytes, which count from 0.
inline std::string safetensors_bytes(std::string_view header, std::size_t data_bytes) {
    auto out = length_field(header.size()).append(header);
    for (std::size_t i = 0; i < data_bytes; ++i) {
        out += static_cast<char>(static_cast<unsigned char>(i & 0xFFU));
    }
    return out;
}

inline std::span<const std::byte> as_bytes(std::string_view text) {
    return std::as_bytes(std::span{text});
}

}  // namespace weightwire::test_support
