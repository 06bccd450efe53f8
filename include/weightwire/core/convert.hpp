#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// Elements of one floating-point type as elements of another, on the host: what a conversion on a
/// device is compared with.
///
/// Values round to the nearest, ties to even; what is too large for the target becomes infinity;
/// NaN stays NaN, with any payload. `f64` becomes `f16` or `bf16` by way of `f32`, two roundings,
/// as in torch. There are no 8-bit types: they need a scale, which a conversion does not know.

namespace weightwire {

namespace detail {

[[nodiscard]] constexpr bool converts_values(dtype type) noexcept {
    return type == dtype::f64 || type == dtype::f32 || type == dtype::f16 || type == dtype::bf16;
}

/// The bits of `value` to `bits` lower ones fewer, to nearest even. A carry into the exponent is
/// right: the next number up, at last infinity.
[[nodiscard]] constexpr std::uint32_t rounded_off(std::uint32_t value,
                                                  std::uint32_t bits) noexcept {
    const std::uint32_t odd = (value >> bits) & 1U;
    return (value + (std::uint32_t{1} << (bits - 1)) - 1U + odd) >> bits;
}

}  // namespace detail

/// Whether elements of `from` can be written as elements of `to`: the same type, if its elements
/// are whole bytes, or two of `f64`, `f32`, `f16` and `bf16`.
[[nodiscard]] constexpr bool can_convert(dtype from, dtype to) noexcept {
    return from == to ? item_bits(from) % 8 == 0
                      : detail::converts_values(from) && detail::converts_values(to);
}

/// The bits of the `bf16` next to `value`.
[[nodiscard]] constexpr std::uint16_t bf16_from_f32(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const bool nan = (bits & 0x7FFF'FFFFU) > 0x7F80'0000U;
    return static_cast<std::uint16_t>(nan ? 0x7FFFU : detail::rounded_off(bits, 16));
}
/// The value of a `bf16`; exact.
[[nodiscard]] constexpr float f32_from_bf16(std::uint16_t bits) noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

/// The bits of the `f16` next to `value`.
[[nodiscard]] constexpr std::uint16_t f16_from_f32(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 16U) & 0x8000U;
    const std::uint32_t magnitude = bits & 0x7FFF'FFFFU;
    std::uint32_t result = 0x7C00U;
    if (magnitude > 0x7F80'0000U) {
        return 0x7FFFU;  // NaN
    }
    if (magnitude < 0x3880'0000U) {  // below 2^-14: subnormal, in units of 2^-24
        const std::uint32_t shift = 126U - (magnitude >> 23U);
        const std::uint32_t mantissa = (magnitude & 0x007F'FFFFU) | 0x0080'0000U;
        // Further down than a unit's half there is nothing but zero; nor is an f32 subnormal more.
        result = shift > 25U ? 0U : detail::rounded_off(mantissa, shift);
    } else if (magnitude < 0x4780'0000U) {  // below 2^16; the carry of 65520 makes infinity
        result = detail::rounded_off(magnitude - 0x3800'0000U, 13);
    }
    return static_cast<std::uint16_t>(sign | result);
}
/// The value of an `f16`; exact.
[[nodiscard]] constexpr float f32_from_f16(std::uint16_t bits) noexcept {
    const std::uint32_t sign = (bits & 0x8000U) << 16U;
    const std::uint32_t exponent = (bits >> 10U) & 0x1FU;
    const std::uint32_t mantissa = bits & 0x3FFU;
    if (exponent == 0) {  // subnormal: whole units of 2^-24
        const float value = static_cast<float>(mantissa) * 0x1p-24F;
        return sign != 0 ? -value : value;
    }
    const std::uint32_t widened = exponent == 0x1FU ? 0xFFU : exponent + 112U;
    return std::bit_cast<float>(sign | (widened << 23U) | (mantissa << 13U));
}

namespace detail {

/// An element of `Type` in memory of any alignment.
template <class Type>
[[nodiscard]] Type element_at(const std::byte* at) noexcept {
    Type value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
template <class Type>
void put_element(std::byte* at, Type value) noexcept {
    std::memcpy(at, &value, sizeof value);
}

/// Converts one element of another type. `f32` holds all of every type but `f64`, and stands
/// between every two.
/// @param to,from types that differ, of which `can_convert` is true.
inline void convert_element(std::byte* at, dtype to, const std::byte* source, dtype from) noexcept {
    float value = 0;
    switch (from) {
        case dtype::f64: value = static_cast<float>(element_at<double>(source)); break;
        case dtype::f16: value = f32_from_f16(element_at<std::uint16_t>(source)); break;
        case dtype::bf16: value = f32_from_bf16(element_at<std::uint16_t>(source)); break;
        default: value = element_at<float>(source);
    }
    switch (to) {
        case dtype::f64: put_element(at, static_cast<double>(value)); break;
        case dtype::f16: put_element(at, f16_from_f32(value)); break;
        case dtype::bf16: put_element(at, bf16_from_f32(value)); break;
        default: put_element(at, value);
    }
}

inline void require_convertible(dtype from, dtype to) {
    if (!can_convert(from, to)) {
        throw unsupported_error{"no conversion from " + std::string{to_string(from)} + " to " +
                                std::string{to_string(to)} +
                                "; float64, float32, float16 and bfloat16 convert, other types "
                                "only travel as they are"};
    }
}

}  // namespace detail

/// Converts the elements of `from` to `to`, which do not overlap, in memory of any alignment.
/// @throws unsupported_error `can_convert` says no.
/// @throws usage_error the two do not hold the same number of whole elements.
inline void convert_elements(std::span<std::byte> to, dtype to_type,
                             std::span<const std::byte> from, dtype from_type) {
    detail::require_convertible(from_type, to_type);
    const std::size_t from_item = item_bits(from_type) / 8;
    const std::size_t to_item = item_bits(to_type) / 8;
    if (from.size() % from_item != 0 || to.size() % to_item != 0 ||
        from.size() / from_item != to.size() / to_item) {
        throw usage_error{"expected as many elements to write as to read, found " +
                          std::to_string(to.size()) + " bytes of " +
                          std::string{to_string(to_type)} + " for " + std::to_string(from.size()) +
                          " bytes of " + std::string{to_string(from_type)}};
    }
    if (from.empty()) {
        return;
    }
    if (to_type == from_type) {
        std::memcpy(to.data(), from.data(), from.size());
        return;
    }
    for (std::size_t i = 0; i < from.size() / from_item; ++i) {
        detail::convert_element(to.data() + i * to_item, to_type, from.data() + i * from_item,
                                from_type);
    }
}

/// Writes every element of `from` to its place in `to`, converted where the types differ. Both are
/// in host memory, of one shape, of any strides and alignment, and do not overlap.
/// @throws unsupported_error `can_convert` says no, or memory elsewhere.
/// @throws usage_error two shapes.
inline void convert_tensor(const mutable_tensor_view& to, const tensor_view& from) {
    detail::require_convertible(from.type(), to.type());
    if (to.extents() != from.extents()) {
        throw usage_error{"expected two tensors of one shape, found " + to_string(from.extents()) +
                          " to write as " + to_string(to.extents())};
    }
    if (to.device().kind != memory_kind::host || from.device().kind != memory_kind::host) {
        throw unsupported_error{"the processor converts host memory only; use gpu::convert_plan"};
    }
    if (to.byte_size() == 0) {
        return;
    }
    if (to.is_contiguous() && from.is_contiguous()) {
        convert_elements({to.data(), to.byte_size()}, to.type(), {from.data(), from.byte_size()},
                         from.type());
        return;
    }
    const auto& extents = from.extents();
    const auto from_item = static_cast<std::int64_t>(item_bits(from.type()) / 8);
    const auto to_item = static_cast<std::int64_t>(item_bits(to.type()) / 8);
    std::array<std::int64_t, max_dimensions> at{};
    std::int64_t read = 0;  // element offsets of `at`
    std::int64_t written = 0;
    bool more = true;
    while (more) {
        const std::byte* source = from.data() + read * from_item;
        std::byte* target = to.data() + written * to_item;
        if (to.type() == from.type()) {
            std::memcpy(target, source, static_cast<std::size_t>(to_item));
        } else {
            detail::convert_element(target, to.type(), source, from.type());
        }
        more = false;
        for (std::size_t d = extents.size(); d-- > 0 && !more;) {
            read += from.strides()[d];
            written += to.strides()[d];
            more = ++at[d] < extents[d];
            if (!more) {
                read -= extents[d] * from.strides()[d];
                written -= extents[d] * to.strides()[d];
                at[d] = 0;
            }
        }
    }
}

}  // namespace weightwire
