// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <weightwire/core/convert.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>

namespace {

using weightwire::dtype;

constexpr float infinity = std::numeric_limits<float>::infinity();

/// The value of a number with `fraction` bits behind a first one, and an exponent of `width` bits,
/// from its definition. Not for infinity and NaN.
double defined_value(std::uint32_t bits, int width, int fraction) {
    const int bias = (1 << (width - 1)) - 1;
    const auto exponent = static_cast<int>((bits >> fraction) & ((1U << width) - 1U));
    const double tail = static_cast<double>(bits & ((1U << fraction) - 1U));
    const double whole = exponent == 0 ? tail : tail + std::ldexp(1.0, fraction);
    const double value = std::ldexp(whole, (exponent == 0 ? 1 : exponent) - bias - fraction);
    return (bits >> (width + fraction)) != 0 ? -value : value;
}

/// The nearest of a type's finite numbers, as bits, found by comparing with its neighbours:
/// independent of the rounding under test. Positive, finite values only.
std::uint16_t nearest(double value, int width, int fraction) {
    const std::uint32_t infinite = ((1U << width) - 1U) << fraction;
    std::uint32_t low = 0;
    for (std::uint32_t high = infinite; high - low > 1;) {
        const std::uint32_t middle = (low + high) / 2;
        (defined_value(middle, width, fraction) <= value ? low : high) = middle;
    }
    // Infinity counts as the next number up would.
    const double below = defined_value(low, width, fraction);
    const double step = low + 1 == infinite ? below - defined_value(low - 1, width, fraction)
                                            : defined_value(low + 1, width, fraction) - below;
    const double over = value - below;
    const bool up = over * 2 > step || (over * 2 == step && low % 2 != 0);
    return static_cast<std::uint16_t>(up ? low + 1 : low);
}

struct half {
    dtype type;
    int width;
    int fraction;
    float (*widen)(std::uint16_t);
    std::uint16_t (*narrow)(float);
};

constexpr std::array halves{
    half{dtype::f16, 5, 10, [](std::uint16_t bits) { return weightwire::f32_from_f16(bits); },
         [](float value) { return weightwire::f16_from_f32(value); }},
    half{dtype::bf16, 8, 7, [](std::uint16_t bits) { return weightwire::f32_from_bf16(bits); },
         [](float value) { return weightwire::bf16_from_f32(value); }}};

template <class To, class From>
To converted(dtype to, dtype from, From value) {
    To result{};
    weightwire::convert_elements(std::as_writable_bytes(std::span{&result, 1}), to,
                                 std::as_bytes(std::span{&value, 1}), from);
    return result;
}

}  // namespace

TEST_CASE("every f16 and bf16 has its value in f32 and f64, and comes back") {
    for (const half& each : halves) {
        CAPTURE(weightwire::to_string(each.type));
        const std::uint32_t infinite = ((1U << each.width) - 1U) << each.fraction;
        std::size_t wrong = 0;
        for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
            const auto half_bits = static_cast<std::uint16_t>(bits);
            const std::uint32_t magnitude = bits & 0x7FFFU;
            const float value = each.widen(half_bits);
            const double wide = converted<double>(dtype::f64, each.type, half_bits);
            const std::uint16_t back = each.narrow(value);
            const auto back_from_wide = converted<std::uint16_t>(each.type, dtype::f64, wide);
            bool right = false;
            if (magnitude > infinite) {
                right = std::isnan(value) && std::isnan(wide) && (back & 0x7FFFU) > infinite &&
                        (back_from_wide & 0x7FFFU) > infinite;
            } else if (magnitude == infinite) {
                right = value == (bits >> 15U != 0 ? -infinity : infinity) &&
                        wide == static_cast<double>(value) && back == half_bits &&
                        back_from_wide == half_bits;
            } else {
                right =
                    static_cast<double>(value) == defined_value(bits, each.width, each.fraction) &&
                    std::signbit(value) == (bits >> 15U != 0) &&
                    wide == static_cast<double>(value) && back == half_bits &&
                    back_from_wide == half_bits;
            }
            wrong += right ? 0U : 1U;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("f32 rounds to the nearest half, ties to even, around every half there is") {
    for (const half& each : halves) {
        CAPTURE(weightwire::to_string(each.type));
        const std::uint32_t infinite = ((1U << each.width) - 1U) << each.fraction;
        std::size_t wrong = 0;
        for (std::uint32_t bits = 0; bits < infinite; ++bits) {
            // At the middle to the next one, beside it, and a quarter of the way.
            const float low = each.widen(static_cast<std::uint16_t>(bits));
            const double step = bits + 1 == infinite
                                    ? defined_value(bits, each.width, each.fraction) -
                                          defined_value(bits - 1, each.width, each.fraction)
                                    : defined_value(bits + 1, each.width, each.fraction) -
                                          defined_value(bits, each.width, each.fraction);
            const auto middle = static_cast<float>(static_cast<double>(low) + step / 2);
            const auto quarter = static_cast<float>(static_cast<double>(low) + step / 4);
            for (const float value : {middle, std::nextafterf(middle, 0.0F),
                                      std::nextafterf(middle, infinity), quarter}) {
                const auto expected =
                    nearest(static_cast<double>(value), each.width, each.fraction);
                wrong += each.narrow(value) == expected ? 0U : 1U;
                wrong += each.narrow(-value) == (expected | 0x8000U) ? 0U : 1U;
            }
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("random f32 patterns round to the nearest half") {
    std::mt19937 random{3};
    for (const half& each : halves) {
        const std::uint32_t infinite = ((1U << each.width) - 1U) << each.fraction;
        std::size_t wrong = 0;
        for (int i = 0; i < 200'000; ++i) {
            const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
            const std::uint32_t found = each.narrow(value);
            if (std::isnan(value)) {
                wrong += (found & 0x7FFFU) > infinite ? 0U : 1U;
            } else {
                const std::uint32_t sign = std::signbit(value) ? 0x8000U : 0U;
                const double magnitude = std::fabs(static_cast<double>(value));
                const std::uint32_t expected =
                    std::isinf(value) ? infinite : nearest(magnitude, each.width, each.fraction);
                wrong += found == (sign | expected) ? 0U : 1U;
            }
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("the edges: overflow, the smallest numbers, NaN, and f64 by way of f32") {
    using weightwire::bf16_from_f32;
    using weightwire::f16_from_f32;
    CHECK(f16_from_f32(65504.0F) == 0x7BFF);  // the largest
    CHECK(f16_from_f32(65519.996F) == 0x7BFF);
    CHECK(f16_from_f32(65520.0F) == 0x7C00);
    CHECK(f16_from_f32(-1e30F) == 0xFC00);
    CHECK(f16_from_f32(0x1p-24F) == 0x0001);
    CHECK(f16_from_f32(0x1p-25F) == 0x0000);  // a tie: to even
    CHECK(f16_from_f32(0x1.000002p-25F) == 0x0001);
    CHECK(f16_from_f32(0x1.8p-24F) == 0x0002);
    CHECK(f16_from_f32(-0.0F) == 0x8000);
    CHECK(f16_from_f32(0x1.ffep-15F) == 0x0400);  // rounds up to the smallest normal
    CHECK(bf16_from_f32(std::numeric_limits<float>::max()) == 0x7F80);
    CHECK(bf16_from_f32(0x1.fep127F) == 0x7F7F);  // the largest
    CHECK(bf16_from_f32(std::numeric_limits<float>::denorm_min()) == 0x0000);
    CHECK(bf16_from_f32(std::bit_cast<float>(0x7F80'0001U)) > 0x7F80);  // its NaN bit is cut off

    CHECK(converted<float>(dtype::f32, dtype::f64, 1e300) == infinity);
    CHECK(converted<float>(dtype::f32, dtype::f64, 1.0 + 0x1p-24) == 1.0F);
    CHECK(converted<double>(dtype::f64, dtype::f32, 0.1F) == static_cast<double>(0.1F));
    CHECK(std::isnan(converted<float>(dtype::f32, dtype::f64, std::nan(""))));
    // Just above a tie of f16: the first rounding makes it one, the second takes the even number.
    CHECK(converted<std::uint16_t>(dtype::f16, dtype::f64, 1.0 + 0x1p-11 + 0x1p-40) == 0x3C00);
    CHECK(converted<std::uint16_t>(dtype::bf16, dtype::f16, std::uint16_t{0x3C01}) == 0x3F80);
    CHECK(converted<std::uint16_t>(dtype::f16, dtype::bf16, std::uint16_t{0x4780}) == 0x7C00);
}

TEST_CASE("what converts is said, and everything else is refused by name") {
    using weightwire::can_convert;
    const std::array floats{dtype::f64, dtype::f32, dtype::f16, dtype::bf16};
    for (const dtype from : floats) {
        for (const dtype to : floats) {
            CHECK(can_convert(from, to));
        }
        CHECK_FALSE(can_convert(from, dtype::i32));
        CHECK_FALSE(can_convert(dtype::u16, from));
        CHECK_FALSE(can_convert(from, dtype::f8_e4m3fn));
    }
    CHECK(can_convert(dtype::f8_e4m3fn, dtype::f8_e4m3fn));
    CHECK(can_convert(dtype::complex128, dtype::complex128));
    CHECK_FALSE(can_convert(dtype::f6_e2m3, dtype::f6_e2m3));
    std::array<std::byte, 8> bytes{};
    try {
        weightwire::convert_elements(bytes, dtype::i32, bytes, dtype::f32);
        FAIL("it converted");
    } catch (const weightwire::unsupported_error& failure) {
        CHECK(failure.text().find("from float32 to int32") != std::string::npos);
    }
    CHECK_THROWS_AS(weightwire::convert_elements(bytes, dtype::f16, bytes, dtype::f32),
                    weightwire::usage_error);
    CHECK_THROWS_AS(weightwire::convert_elements(std::span{bytes}.first(3), dtype::f16,
                                                 std::span{bytes}.first(4), dtype::f32),
                    weightwire::usage_error);
    CHECK_NOTHROW(weightwire::convert_elements({}, dtype::f16, {}, dtype::f32));
}

TEST_CASE("a tensor of any strides and alignment is written where it belongs, and nowhere else") {
    // A transposed, padded f32 matrix at an odd address, into every second element of a bf16 row.
    constexpr std::int64_t rows = 3;
    constexpr std::int64_t columns = 5;
    std::vector<std::byte> memory(1 + 8 * columns * sizeof(float));
    const auto value_of = [](std::int64_t i, std::int64_t k) {
        return static_cast<float>(10 * i + k);
    };
    for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t k = 0; k < columns; ++k) {
            const float value = value_of(i, k);
            std::memcpy(memory.data() + 1 + (k * 8 + i) * 4, &value, sizeof value);
        }
    }
    const weightwire::shape extents{rows, columns};
    const weightwire::tensor_view from{memory.data() + 1, dtype::f32, extents, {1, 8}};
    std::vector<std::uint16_t> written(2 * rows * columns, 0xCDCD);
    const weightwire::mutable_tensor_view to{
        reinterpret_cast<std::byte*>(written.data()), dtype::bf16, extents, {2 * columns, 2}};
    weightwire::convert_tensor(to, from);
    for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t k = 0; k < columns; ++k) {
            const auto at = static_cast<std::size_t>(2 * (i * columns + k));
            CHECK(written[at] == weightwire::bf16_from_f32(value_of(i, k)));
            CHECK(written[at + 1] == 0xCDCD);
        }
    }
}

TEST_CASE("tensors that cannot be converted here are refused before a byte is written") {
    std::array<std::byte, 64> bytes{};
    std::array<std::byte, 64> target{};
    target.fill(std::byte{0xCD});
    using weightwire::mutable_tensor_view;
    using weightwire::tensor_view;
    const tensor_view four{bytes.data(), dtype::f32, {4}};
    CHECK_THROWS_AS(
        weightwire::convert_tensor(mutable_tensor_view{target.data(), dtype::f32, {5}}, four),
        weightwire::usage_error);
    CHECK_THROWS_AS(
        weightwire::convert_tensor(mutable_tensor_view{target.data(), dtype::u8, {4}}, four),
        weightwire::unsupported_error);
    const weightwire::device gpu{weightwire::memory_kind::cuda, 0};
    CHECK_THROWS_AS(
        weightwire::convert_tensor(mutable_tensor_view{target.data(), dtype::f32, {4}, gpu}, four),
        weightwire::unsupported_error);
    weightwire::convert_tensor(mutable_tensor_view{target.data(), dtype::f32, {0, 4}},
                               tensor_view{nullptr, dtype::f16, {0, 4}});
    CHECK(target.front() == std::byte{0xCD});
    weightwire::convert_tensor(mutable_tensor_view{target.data(), dtype::i64, {}},
                               tensor_view{bytes.data(), dtype::i64, {}});
    CHECK(target[7] == std::byte{0});
    CHECK(target[8] == std::byte{0xCD});
}
