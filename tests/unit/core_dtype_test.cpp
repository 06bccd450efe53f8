// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/dtype.hpp>

namespace {

using namespace weightwire;

TEST_CASE("dtype: the table has one row a dtype, in the order of the enumeration") {
    for (std::size_t i = 0; i < dtype_table.size(); ++i) {
        CHECK(static_cast<std::size_t>(dtype_table[i].value) == i);
    }
    CHECK(static_cast<std::size_t>(dtype::complex128) + 1 == dtype_table.size());
}

TEST_CASE("dtype: every spelling leads back to its dtype, and none is used twice") {
    std::set<std::string_view> torch;
    std::set<std::string_view> safetensors;
    std::set<std::string_view> any;
    for (const auto& row : dtype_table) {
        CAPTURE(std::string{to_string(row.value)});
        CHECK((!row.torch.empty() || !row.safetensors.empty()));
        if (!row.torch.empty()) {
            CHECK(dtype_from_torch(row.torch) == row.value);
            CHECK(torch.insert(row.torch).second);
        }
        if (!row.safetensors.empty()) {
            CHECK(dtype_from_safetensors(row.safetensors) == row.value);
            CHECK(safetensors.insert(row.safetensors).second);
        }
        CHECK(dtype_from_string(to_string(row.value)) == row.value);
        CHECK(any.insert(to_string(row.value)).second);
    }
}

TEST_CASE("dtype: sizes are those of torch and of the safetensors format") {
    const std::pair<dtype, std::size_t> sizes[] = {
        {dtype::boolean, 8},    {dtype::u8, 8},           {dtype::i8, 8},
        {dtype::u16, 16},       {dtype::i16, 16},         {dtype::u32, 32},
        {dtype::i32, 32},       {dtype::u64, 64},         {dtype::i64, 64},
        {dtype::f16, 16},       {dtype::bf16, 16},        {dtype::f32, 32},
        {dtype::f64, 64},       {dtype::f8_e4m3fn, 8},    {dtype::f8_e4m3fnuz, 8},
        {dtype::f8_e5m2, 8},    {dtype::f8_e5m2fnuz, 8},  {dtype::f8_e8m0fnu, 8},
        {dtype::f6_e2m3, 6},    {dtype::f6_e3m2, 6},      {dtype::f4_e2m1_x2, 8},
        {dtype::complex64, 64}, {dtype::complex128, 128},
    };
    CHECK(std::size(sizes) == dtype_table.size());
    for (const auto& [type, bits] : sizes) {
        CAPTURE(std::string{to_string(type)});
        CHECK(item_bits(type) == bits);
    }
}

TEST_CASE("dtype: names that are nobody's, empty ones included, are refused") {
    for (const std::string_view name : {"", "float", "torch.float32", "BFLOAT16", "F128", "bf16"}) {
        CAPTURE(std::string{name});
        CHECK_FALSE(dtype_from_torch(name).has_value());
        CHECK_FALSE(dtype_from_safetensors(name).has_value());
        CHECK_FALSE(dtype_from_string(name).has_value());
    }
    // A spelling of one side is none of the other.
    CHECK_FALSE(dtype_from_torch("BF16").has_value());
    CHECK_FALSE(dtype_from_safetensors("bfloat16").has_value());
}

TEST_CASE("dtype: the spellings that differ from what one would guess") {
    CHECK(dtype_from_safetensors("F8_E4M3") == dtype::f8_e4m3fn);
    CHECK(dtype_from_torch("float8_e4m3fn") == dtype::f8_e4m3fn);
    CHECK(dtype_from_safetensors("F8_E8M0") == dtype::f8_e8m0fnu);
    CHECK(dtype_from_torch("float4_e2m1fn_x2") == dtype::f4_e2m1_x2);
    CHECK(dtype_from_safetensors("F4") == dtype::f4_e2m1_x2);
    CHECK(dtype_from_safetensors("C64") == dtype::complex64);
    CHECK(traits_of(dtype::complex128).safetensors.empty());
    CHECK(traits_of(dtype::f6_e2m3).torch.empty());
    CHECK(to_string(dtype::f6_e2m3) == "F6_E2M3");
}

}  // namespace
