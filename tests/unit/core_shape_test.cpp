// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>

namespace {

using namespace weightwire;

constexpr auto big = std::numeric_limits<std::uint64_t>::max();
constexpr auto big_extent = std::numeric_limits<std::int64_t>::max();

TEST_CASE("checked arithmetic: a result is exact or absent") {
    CHECK(checked_multiply(0, big) == std::uint64_t{0});
    CHECK(checked_multiply(big, 1) == big);
    CHECK_FALSE(checked_multiply(big, 2).has_value());
    CHECK(checked_multiply(1ULL << 32U, (1ULL << 32U) - 1) == (big - ((1ULL << 32U) - 1)));
    CHECK_FALSE(checked_multiply(1ULL << 32U, 1ULL << 32U).has_value());
    CHECK(checked_add(big, 0) == big);
    CHECK(checked_add(big - 1, 1) == big);
    CHECK_FALSE(checked_add(big, 1).has_value());
}

TEST_CASE("checked_cast: a value that does not fit is absent, of either sign") {
    CHECK(checked_cast<std::uint8_t>(255) == std::uint8_t{255});
    CHECK_FALSE(checked_cast<std::uint8_t>(256).has_value());
    CHECK_FALSE(checked_cast<std::uint8_t>(-1).has_value());
    CHECK_FALSE(checked_cast<std::uint64_t>(std::int64_t{-1}).has_value());
    CHECK_FALSE(checked_cast<std::int64_t>(big).has_value());
    CHECK(checked_cast<std::int64_t>(std::uint64_t{big_extent}) == big_extent);
    CHECK(checked_cast<std::int8_t>(std::int64_t{-128}) == std::int8_t{-128});
    CHECK_FALSE(checked_cast<std::int8_t>(std::int64_t{-129}).has_value());
}

TEST_CASE("shape: holds up to eight extents, in order") {
    const shape none;
    CHECK(none.empty());
    CHECK(none.checked_numel() == std::uint64_t{1});
    const shape all{1, 2, 3, 4, 5, 6, 7, 8};
    CHECK(all.size() == max_dimensions);
    CHECK(all[7] == 8);
    CHECK(to_string(all) == "[1, 2, 3, 4, 5, 6, 7, 8]");
    CHECK(to_string(none) == "[]");
    CHECK(std::vector<std::int64_t>(all.begin(), all.end()).size() == 8);
    CHECK(all == shape{1, 2, 3, 4, 5, 6, 7, 8});
    CHECK_FALSE(shape{2} == shape{2, 1});
}

TEST_CASE("shape: a ninth or a negative extent is refused") {
    const std::vector<std::int64_t> nine(9, 1);
    CHECK_THROWS_AS((void)shape{std::span{nine}}, usage_error);
    CHECK_THROWS_AS((void)(shape{2, -1}), usage_error);
}

TEST_CASE("shape: the number of elements is exact or absent, and 0 where any extent is") {
    CHECK(shape{2, 3}.checked_numel() == std::uint64_t{6});
    CHECK_FALSE(shape{big_extent, 3}.checked_numel().has_value());
    CHECK(shape{big_extent, big_extent, 0}.checked_numel() == std::uint64_t{0});
    CHECK(shape{0, big_extent, big_extent}.checked_numel() == std::uint64_t{0});
}

TEST_CASE("byte size: whole bytes below 2^64, or absent") {
    CHECK(checked_byte_size(dtype::bf16, {2, 3}) == std::uint64_t{12});
    CHECK(checked_byte_size(dtype::complex128, {}) == std::uint64_t{16});
    CHECK(checked_byte_size(dtype::f6_e2m3, {4}) == std::uint64_t{3});
    CHECK_FALSE(checked_byte_size(dtype::f6_e2m3, {2}).has_value());
    CHECK_FALSE(checked_byte_size(dtype::f64, {big_extent}).has_value());
    CHECK(checked_byte_size(dtype::f64, {big_extent, 0}) == std::uint64_t{0});
}

TEST_CASE("F4: a header counts values where torch counts pairs, in the last dimension") {
    const auto type = dtype::f4_e2m1_x2;
    CHECK(shape_from_safetensors(type, {3, 8}) == shape{3, 4});
    CHECK(shape_to_safetensors(type, {3, 4}) == shape{3, 8});
    CHECK(checked_byte_size(type, *shape_from_safetensors(type, {3, 8})) == std::uint64_t{12});
    CHECK(shape_from_safetensors(type, {3, 0}) == shape{3, 0});
    CHECK_FALSE(shape_from_safetensors(type, {8, 3}).has_value());
    CHECK_FALSE(shape_from_safetensors(type, {}).has_value());
    CHECK_FALSE(shape_to_safetensors(type, {}).has_value());
    CHECK(shape_to_safetensors(type, {big_extent / 2}) == shape{big_extent - 1});
    CHECK_FALSE(shape_to_safetensors(type, {big_extent / 2 + 1}).has_value());
}

TEST_CASE("F4 conversion: every other dtype keeps its shape, both ways") {
    const shape odd{3, 5};
    for (const auto& row : dtype_table) {
        if (row.value != dtype::f4_e2m1_x2) {
            CHECK(shape_from_safetensors(row.value, odd) == odd);
            CHECK(shape_to_safetensors(row.value, odd) == odd);
            CHECK(shape_from_safetensors(row.value, {}) == shape{});
        }
    }
}

TEST_CASE("tensor view: contiguous strides, sizes and bytes") {
    std::array<std::byte, 48> memory{};
    const mutable_tensor_view view{memory.data(), dtype::bf16, {2, 3, 4}};
    CHECK(view.byte_size() == 48);
    CHECK(view.strides()[0] == 12);
    CHECK(view.strides()[2] == 1);
    CHECK(view.is_contiguous());
    CHECK(view.bytes().data() == memory.data());
    const tensor_view reading = view;
    CHECK(reading.bytes().size() == 48);
    CHECK(tensor_view{}.byte_size() == 0);
}

TEST_CASE("tensor view: strides decide contiguity, but not those of extent 1") {
    std::array<std::byte, 64> memory{};
    const tensor_view transposed{memory.data(), dtype::u8, {4, 4}, {1, 4}};
    CHECK_FALSE(transposed.is_contiguous());
    CHECK(transposed.byte_size() == 16);
    CHECK_THROWS_AS((void)transposed.bytes(), usage_error);
    const tensor_view with_ones{memory.data(), dtype::u8, {1, 4, 1}, {99, 1, 77}};
    CHECK(with_ones.is_contiguous());
    const tensor_view broadcast{memory.data(), dtype::u8, {4, 4}, {0, 1}};
    CHECK_FALSE(broadcast.is_contiguous());
    const tensor_view without_bytes{memory.data(), dtype::u8, {0, 4}, {9, 9}};
    CHECK(without_bytes.is_contiguous());
}

TEST_CASE("tensor view: memory that is not the host's has no bytes to read") {
    std::array<std::byte, 4> memory{};
    const tensor_view on_gpu{memory.data(), dtype::u8, {4}, {memory_kind::cuda, 1}};
    CHECK_THROWS_AS((void)on_gpu.bytes(), usage_error);
    CHECK(on_gpu.device() == device{memory_kind::cuda, 1});
}

TEST_CASE("tensor view: a size that does not exist is refused") {
    CHECK_THROWS_AS((tensor_view{nullptr, dtype::f64, {big_extent, 2}}), usage_error);
    CHECK_THROWS_AS((tensor_view{nullptr, dtype::f6_e2m3, {3}}), usage_error);
    const tensor_view nothing{nullptr, dtype::f64, {big_extent, big_extent, 0}};
    CHECK(nothing.byte_size() == 0);
    const tensor_view longest{nullptr, dtype::u8, {2, big_extent}};
    CHECK(longest.is_contiguous());
}

}  // namespace
