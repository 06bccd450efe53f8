// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <fmt/format.h>

#include <weightwire/fmt.hpp>

namespace {

using namespace weightwire;

TEST_CASE("fmt: every public type prints what messages print") {
    std::array<std::byte, 64> memory{};
    const mutable_tensor_view tensor{memory.data(), dtype::bf16, {2, 3}};
    const tensor_view strided{memory.data(), dtype::u8, {2, 3}, {1, 2}, {memory_kind::cuda, 1}};
    CHECK(fmt::format("{}", dtype::bf16) == "bfloat16");
    CHECK(fmt::format("{}", shape{2, 3}) == "[2, 3]");
    CHECK(fmt::format("{}", phase::finish) == "finish");
    CHECK(fmt::format("{}", reply_fault::timed_out) == "timed out");
    CHECK(fmt::format("{}", commit_mode::copy_in) == "copy_in");
    CHECK(fmt::format("{} {}", device{}, device{memory_kind::cuda, 3}) == "cpu cuda:3");
    CHECK(fmt::format("{}", param_meta{"a.b", dtype::f32, {4}}) == "a.b float32[4]");
    CHECK(fmt::format("{}", tensor) == "bfloat16[2, 3]");
    CHECK(fmt::format("{}", strided) == "uint8[2, 3] strided on cuda:1");
    CHECK(fmt::format("{}", named_tensor{"a.b", tensor}) == "a.b bfloat16[2, 3]");
    const timeout_error problem{"late", {.phase = phase::init}};
    CHECK(fmt::format("{}", static_cast<const error&>(problem)) == "timeout [phase init]: late");
}

TEST_CASE("fmt: reads and regions say which elements go where") {
    CHECK(fmt::format("{}", plan::pull_read{3, 128, {}}) == "#3 at 128");
    CHECK(fmt::format("{}", plan::pull_read{0, 3, {{4, 6}, {2, 1}}}) == "#0 at 3: 4 x 6, 2 x 1");
    const plan::region one{.source = 3, .destination = 5, .source_offset = 7};
    CHECK(fmt::format("{}", one) == "#3 at 7 -> #5 at 0");
    plan::region rows{.source = 3,
                      .destination = 5,
                      .source_offset = 128,
                      .destination_offset = 16,
                      .dimensions = {{4, 6, 2}, {2, 0, 1}}};
    CHECK(fmt::format("{}", rows) == "#3 at 128 -> #5 at 16: 4 x 6 -> 2, 2 x 0 -> 1");
    CHECK(fmt::format("{}", plan::read_task{{3, 7, {}}, {}}) == "#3 at 7 []");
    CHECK(fmt::format("{}", plan::read_task{{3, 7, {{8, 1}}}, {one, rows}}) ==
          "#3 at 7: 8 x 1 [#3 at 7 -> #5 at 0; #3 at 128 -> #5 at 16: 4 x 6 -> 2, 2 x 0 -> 1]");
    rows.source = plan::region::no_source;
    CHECK(fmt::format("{}", rows) == "nothing -> #5 at 16: 4 x 2, 2 x 1");
    CHECK(fmt::format("{:.7}|", rows) == "nothing|");
}

TEST_CASE("fmt: width, alignment and precision are a string's") {
    CHECK(fmt::format("{:>10}|", dtype::bf16) == "  bfloat16|");
    CHECK(fmt::format("{:*<8}|", shape{2}) == "[2]*****|");
    CHECK(fmt::format("{:.4}|", phase::finish) == "fini|");
}

TEST_CASE("fmt: bytes have three significant digits, in units of 1000") {
    const auto text = [](std::uint64_t count) { return fmt::format("{}", bytes{count}); };
    CHECK(text(0) == "0 B");
    CHECK(text(999) == "999 B");
    CHECK(text(1000) == "1.00 kB");
    CHECK(text(2'803'000) == "2.80 MB");
    CHECK(text(61'100'000'000) == "61.1 GB");
    CHECK(text(999'400'000) == "999 MB");
    CHECK(text(999'600'000) == "1.00 GB");
    CHECK(text(9'996) == "10.0 kB");
    CHECK(text(99'960) == "100 kB");
    CHECK(text(~0ULL) == "18.4 EB");
}

}  // namespace
