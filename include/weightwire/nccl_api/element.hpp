#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include <weightwire/core/dtype.hpp>

/// @file
/// The element types of NCCL. Needs neither NCCL nor CUDA, so that a stand-in for tests has them
/// too.

namespace weightwire::nccl_api {

/// What a broadcast counts in. The values are NCCL's own and travel as they are: both ends of a
/// broadcast must name types of the same size, and vLLM's receivers name the tensor's own.
enum class element : std::uint8_t {
    int8 = 0,
    uint8 = 1,
    int32 = 2,
    uint32 = 3,
    int64 = 4,
    uint64 = 5,
    float16 = 6,
    float32 = 7,
    float64 = 8,
    bfloat16 = 9,
    float8_e4m3fn = 10,  ///< since NCCL 2.24
    float8_e5m2 = 11,    ///< since NCCL 2.24
};

/// Bytes of one element.
[[nodiscard]] constexpr std::size_t size_of(element type) noexcept {
    switch (type) {
        case element::int8:
        case element::uint8:
        case element::float8_e4m3fn:
        case element::float8_e5m2: return 1;
        case element::float16:
        case element::bfloat16: return 2;
        case element::int32:
        case element::uint32:
        case element::float32: return 4;
        case element::int64:
        case element::uint64:
        case element::float64: return 8;
    }
    return 0;
}

/// The word that messages use.
[[nodiscard]] constexpr std::string_view to_string(element type) noexcept {
    switch (type) {
        case element::int8: return "int8";
        case element::uint8: return "uint8";
        case element::int32: return "int32";
        case element::uint32: return "uint32";
        case element::int64: return "int64";
        case element::uint64: return "uint64";
        case element::float16: return "float16";
        case element::float32: return "float32";
        case element::float64: return "float64";
        case element::bfloat16: return "bfloat16";
        case element::float8_e4m3fn: return "float8_e4m3fn";
        case element::float8_e5m2: return "float8_e5m2";
    }
    return "unknown";
}

/// NCCL's type for `type`, or nothing where it has none: booleans, 16-bit integers, complex numbers
/// and the rarer small floats travel as bytes (`uint8`) between ends that agree on it.
[[nodiscard]] constexpr std::optional<element> element_of(dtype type) noexcept {
    switch (type) {
        case dtype::i8: return element::int8;
        case dtype::u8: return element::uint8;
        case dtype::i32: return element::int32;
        case dtype::u32: return element::uint32;
        case dtype::i64: return element::int64;
        case dtype::u64: return element::uint64;
        case dtype::f16: return element::float16;
        case dtype::f32: return element::float32;
        case dtype::f64: return element::float64;
        case dtype::bf16: return element::bfloat16;
        case dtype::f8_e4m3fn: return element::float8_e4m3fn;
        case dtype::f8_e5m2: return element::float8_e5m2;
        default: return std::nullopt;
    }
}

}  // namespace weightwire::nccl_api
