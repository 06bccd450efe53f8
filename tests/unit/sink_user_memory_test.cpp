// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/sinks/parameter_table.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

#include "sink_test_support.hpp"

using namespace weightwire;
using sink_test::bytes_of;
using sink_test::fill;
using sink_test::soon;
using strides = mutable_tensor_view::strides_type;

namespace {

std::string refusal(std::vector<user_parameter> memory, std::string_view name,
                    parameter_table_options options = {.mode = commit_mode::in_place}) {
    try {
        const auto table = parameter_table::over(std::move(memory), std::move(options));
        static_cast<void>(table);
    } catch (const usage_error& problem) {
        CHECK(problem.context().tensor == name);
        return problem.text();
    }
    return "accepted";
}

}  // namespace

TEST_CASE("copies follow strides on either side") {
    std::array<std::byte, 24> memory{};
    const auto bytes = sink_test::pattern(1, "x", 12);
    const tensor_view contiguous{bytes.data(), dtype::i16, {2, 3}};
    const mutable_tensor_view transposed{memory.data(), dtype::i16, {2, 3}, strides{1, 2}};
    copy_tensor(transposed, contiguous);
    CHECK(bytes_of(transposed) == bytes);
    CHECK(memory[2] == bytes[6]);  // element (1, 0) lies second
    const mutable_tensor_view padded{memory.data() + 12, dtype::i16, {2, 1, 3}, strides{3, 99, 1}};
    copy_tensor(padded, tensor_view{memory.data(), dtype::i16, {2, 1, 3}, strides{1, 99, 2}});
    CHECK(bytes_of(padded) == bytes);
    const mutable_tensor_view reversed{memory.data() + 10, dtype::i16, {6}, strides{-1}};
    copy_tensor(reversed, tensor_view{bytes.data(), dtype::i16, {6}});
    CHECK(bytes_of(reversed) == bytes);
    CHECK(memory[10] == bytes[0]);
}

TEST_CASE("a table over the user's memory writes there, strided or not") {
    for (const auto mode : {commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        std::vector<std::byte> matrix(4 * 6);
        std::vector<std::byte> vector(8);
        // Two column blocks of one matrix of 4 rows and 6 bytes, and a scalar beside a vector.
        auto table =
            parameter_table::over({{"left", {matrix.data(), dtype::u8, {4, 2}, strides{6, 1}}},
                                   {"right", {matrix.data() + 2, dtype::u8, {4, 4}, strides{6, 1}}},
                                   {"vector", {vector.data(), dtype::f32, {1}}},
                                   {"scalar", {vector.data() + 4, dtype::f32, {}}},
                                   {"empty", {nullptr, dtype::f32, {0}}}},
                                  {.mode = mode});
        CHECK(table.acquire().find("right")->data() == matrix.data() + 2);
        for (const weight_version version : {1U, 2U}) {
            sink_test::update(table, version);
            const auto held = table.acquire();
            for (std::size_t i = 0; i < held.size(); ++i) {
                CHECK(bytes_of(held.tensor(i)) ==
                      sink_test::pattern(version, held.name(i), held.tensor(i).byte_size()));
            }
            CHECK(matrix[2] == sink_test::pattern(version, "right", 16)[0]);
            CHECK(matrix[6] == sink_test::pattern(version, "left", 8)[2]);
        }
    }
}

TEST_CASE("copy_in leaves the user's memory alone until the commit") {
    std::vector<std::byte> memory(16);
    auto table = parameter_table::over({{"a", {memory.data(), dtype::u8, {16}}}});
    CHECK(table.mode() == commit_mode::copy_in);
    const auto before = memory;
    fill(table.begin({.version = 1}, table.parameters(), soon()), table.parameters(), 1);
    table.prepare(soon());
    CHECK(memory == before);
    table.commit(1);
    CHECK(memory == sink_test::pattern(1, "a", 16));
}

TEST_CASE("flip cannot keep the user's addresses") {
    std::vector<std::byte> memory(16);
    CHECK_THROWS_AS(static_cast<void>(parameter_table::over(
                        {{"a", {memory.data(), dtype::u8, {16}}}}, {.mode = commit_mode::flip})),
                    unsupported_error);
}

TEST_CASE("memory that two parameters share is refused, unless they are tied") {
    std::vector<std::byte> memory(64);
    auto* const at = memory.data();
    CHECK(refusal({{"a", {at, dtype::u8, {16}}}, {"b", {at + 15, dtype::u8, {4}}}}, "b")
              .find("overlaps that of a") != std::string::npos);
    CHECK(refusal({{"b", {at + 40, dtype::u8, {4}}},
                   {"a", {at, dtype::u8, {64}}},
                   {"c", {at + 50, dtype::u8, {4}}}},
                  "b") != "accepted");
    CHECK(refusal({{"odd", {at, dtype::u8, {8}, strides{2}}},
                   {"even", {at + 1, dtype::u8, {8}, strides{2}}}},
                  "") == "accepted");
    CHECK(refusal({{"odd", {at, dtype::u8, {8}, strides{2}}}, {"clash", {at + 14, dtype::u8, {1}}}},
                  "clash") != "accepted");
    CHECK(refusal({{"broadcast", {at, dtype::u8, {4}, strides{0}}}}, "broadcast") != "accepted");
    CHECK(refusal({{"null", {nullptr, dtype::u8, {4}}}}, "null") != "accepted");
    CHECK(refusal({{"bits", {at, dtype::f6_e2m3, {4, 4}, strides{8, 1}}}}, "bits") != "accepted");

    const parameter_table_options tied{.mode = commit_mode::in_place, .aliases = {{"b", "a"}}};
    CHECK(refusal({{"a", {at, dtype::u8, {4}}}, {"b", {at, dtype::u8, {4}}}}, "", tied) ==
          "accepted");
    CHECK(refusal({{"a", {at, dtype::u8, {4}}}, {"b", {at + 4, dtype::u8, {4}}}}, "b", tied)
              .find("alias of a, but lies elsewhere") != std::string::npos);
}

TEST_CASE("memory of a device is not for this table") {
    std::vector<std::byte> memory(16);
    try {
        static_cast<void>(parameter_table::over(
            {{"a", {memory.data(), dtype::u8, {16}, device{memory_kind::cuda, 1}}}}));
        FAIL("the table was made");
    } catch (const unsupported_error& problem) {
        CHECK(problem.context().tensor == "a");
    }
}
