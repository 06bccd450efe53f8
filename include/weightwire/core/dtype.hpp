#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

/// @file
/// Every element type that safetensors and torch name, its size and its two spellings.

namespace weightwire {

/// An element type. `f4_e2m1_x2` is torch's: one byte holding a pair of 4-bit values, so a shape
/// counts pairs in its last dimension where a safetensors header counts single values (see
/// `shape_from_safetensors`). The 6-bit types are bit-packed, four to three bytes, and have no
/// torch spelling.
enum class dtype : std::uint8_t {
    boolean,
    u8,
    i8,
    u16,
    i16,
    u32,
    i32,
    u64,
    i64,
    f16,
    bf16,
    f32,
    f64,
    f8_e4m3fn,
    f8_e4m3fnuz,
    f8_e5m2,
    f8_e5m2fnuz,
    f8_e8m0fnu,
    f6_e2m3,
    f6_e3m2,
    f4_e2m1_x2,
    complex64,
    complex128,
};

/// What the library knows of one dtype.
struct dtype_traits {
    weightwire::dtype value;       ///< the dtype
    std::uint8_t item_bits;        ///< size of one element, in bits
    std::string_view torch;        ///< name in the `torch` module, empty when it has none
    std::string_view safetensors;  ///< name in a safetensors header, empty when it has none
};

/// One row a dtype, in the order of the enumeration. Sources: the safetensors `Dtype` enumeration
/// (0.7) and torch 2.11.
inline constexpr std::array<dtype_traits, 23> dtype_table{{
    {dtype::boolean, 8, "bool", "BOOL"},
    {dtype::u8, 8, "uint8", "U8"},
    {dtype::i8, 8, "int8", "I8"},
    {dtype::u16, 16, "uint16", "U16"},
    {dtype::i16, 16, "int16", "I16"},
    {dtype::u32, 32, "uint32", "U32"},
    {dtype::i32, 32, "int32", "I32"},
    {dtype::u64, 64, "uint64", "U64"},
    {dtype::i64, 64, "int64", "I64"},
    {dtype::f16, 16, "float16", "F16"},
    {dtype::bf16, 16, "bfloat16", "BF16"},
    {dtype::f32, 32, "float32", "F32"},
    {dtype::f64, 64, "float64", "F64"},
    {dtype::f8_e4m3fn, 8, "float8_e4m3fn", "F8_E4M3"},
    {dtype::f8_e4m3fnuz, 8, "float8_e4m3fnuz", "F8_E4M3FNUZ"},
    {dtype::f8_e5m2, 8, "float8_e5m2", "F8_E5M2"},
    {dtype::f8_e5m2fnuz, 8, "float8_e5m2fnuz", "F8_E5M2FNUZ"},
    {dtype::f8_e8m0fnu, 8, "float8_e8m0fnu", "F8_E8M0"},
    {dtype::f6_e2m3, 6, "", "F6_E2M3"},
    {dtype::f6_e3m2, 6, "", "F6_E3M2"},
    {dtype::f4_e2m1_x2, 8, "float4_e2m1fn_x2", "F4"},
    {dtype::complex64, 64, "complex64", "C64"},
    {dtype::complex128, 128, "complex128", ""},
}};

/// The row of `value`.
[[nodiscard]] constexpr const dtype_traits& traits_of(dtype value) noexcept {
    return dtype_table[static_cast<std::size_t>(value)];
}

/// Size of one element, in bits: 6 for the 6-bit types, 8 for a pair of 4-bit values.
[[nodiscard]] constexpr std::size_t item_bits(dtype value) noexcept {
    return traits_of(value).item_bits;
}

/// The torch spelling where there is one, else the safetensors spelling: what messages and the wire
/// use.
[[nodiscard]] constexpr std::string_view to_string(dtype value) noexcept {
    const auto& row = traits_of(value);
    return row.torch.empty() ? row.safetensors : row.torch;
}

/// The dtype that torch calls `name` (without `torch.`), or nothing.
[[nodiscard]] constexpr std::optional<dtype> dtype_from_torch(std::string_view name) noexcept {
    for (const auto& row : dtype_table) {
        if (!row.torch.empty() && row.torch == name) {
            return row.value;
        }
    }
    return std::nullopt;
}

/// The dtype that a safetensors header calls `name`, or nothing.
[[nodiscard]] constexpr std::optional<dtype> dtype_from_safetensors(
    std::string_view name) noexcept {
    for (const auto& row : dtype_table) {
        if (!row.safetensors.empty() && row.safetensors == name) {
            return row.value;
        }
    }
    return std::nullopt;
}

/// The inverse of `to_string`.
[[nodiscard]] constexpr std::optional<dtype> dtype_from_string(std::string_view name) noexcept {
    for (const auto& row : dtype_table) {
        if (to_string(row.value) == name) {
            return row.value;
        }
    }
    return std::nullopt;
}

}  // namespace weightwire
