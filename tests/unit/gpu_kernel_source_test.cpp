// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/gpu/kernels/convert_source.hpp>
#include <weightwire/gpu/kernels/convert_tiles.hpp>
#include <weightwire/gpu/kernels/copy_source.hpp>
#include <weightwire/gpu/kernels/copy_tiles.hpp>
#include <weightwire/gpu/kernels/digest_source.hpp>
#include <weightwire/gpu/kernels/exchange_source.hpp>
#include <weightwire/gpu/nvrtc.hpp>

namespace gpu = weightwire::gpu;

namespace {

/// NVRTC where this machine has it; a named skip where it has none.
std::optional<gpu::nvrtc> compiler(const char* test) {
    try {
        return gpu::nvrtc::open();
    } catch (const weightwire::unsupported_error&) {
        std::printf("SKIP %s: this machine has no libnvrtc.so\n", test);
        return std::nullopt;
    }
}

bool is_machine_code(const std::vector<std::byte>& code) {
    return code.size() > 4 && code[0] == std::byte{0x7f} && code[1] == std::byte{'E'};
}

/// The tiles, walked as the kernels walk them: every byte of every item once, in order.
void require_each_byte_once(const gpu::copy_tiles& tiles) {
    std::uint64_t next_offset = 0;
    std::size_t next_item = 0;
    for (const gpu::copy_tile& tile : tiles.tiles()) {
        const std::uint32_t count = tile.last >> 24U;
        REQUIRE(count >= 1);
        REQUIRE(count <= gpu::tile_pieces);
        std::uint64_t filled = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            const std::uint64_t begin = i == 0 ? tile.offset : 0;
            REQUIRE(tile.first + i == next_item);
            REQUIRE(begin == next_offset);
            const gpu::copy_item& item = tiles.items()[next_item];
            const std::uint64_t bytes =
                i + 1 == count ? (tile.last & 0xffffffU) : item.bytes - begin;
            REQUIRE(bytes > 0);
            REQUIRE(begin + bytes <= item.bytes);
            filled += bytes;
            next_offset = begin + bytes;
            if (next_offset == item.bytes) {
                next_offset = 0;
                ++next_item;
            } else {
                REQUIRE(i + 1 == count);
                REQUIRE((item.destination + next_offset) % gpu::tile_alignment == 0);
            }
        }
        REQUIRE(filled <= gpu::tile_bytes);
    }
    REQUIRE(next_item == tiles.items().size());
    REQUIRE(next_offset == 0);
}

}  // namespace

TEST_CASE("every kernel compiles to machine code for its architectures, without a GPU") {
    const auto nvrtc = compiler("kernels compile");
    if (!nvrtc) {
        return;
    }
    for (const int architecture : {80, 86, 89, 90, 100}) {
        CAPTURE(architecture);
        CHECK(is_machine_code(nvrtc->compile(gpu::copy_plain_source(), architecture)));
        CHECK(is_machine_code(nvrtc->compile(gpu::digest_source(), architecture)));
        CHECK(is_machine_code(nvrtc->compile(gpu::digest_finish_source(), architecture)));
        CHECK(is_machine_code(nvrtc->compile(gpu::exchange_source(), architecture)));
        if (architecture >= 90) {
            CHECK(is_machine_code(nvrtc->compile(gpu::copy_bulk_source(), architecture)));
        }
    }
}

TEST_CASE("the conversion kernel compiles for every pair of types and form, without a GPU") {
    const auto nvrtc = compiler("conversions compile");
    if (!nvrtc) {
        return;
    }
    using weightwire::dtype;
    std::vector<gpu::convert_pair> pairs;
    for (const dtype type : {dtype::u8, dtype::u16, dtype::u32, dtype::u64}) {
        pairs.push_back({type, type});
    }
    for (const dtype from : {dtype::f64, dtype::f32, dtype::f16, dtype::bf16}) {
        for (const dtype to : {dtype::f64, dtype::f32, dtype::f16, dtype::bf16}) {
            if (from != to) {
                pairs.push_back({from, to});
            }
        }
    }
    for (const gpu::convert_pair& pair : pairs) {
        CAPTURE(weightwire::to_string(pair.from));
        CAPTURE(weightwire::to_string(pair.to));
        CHECK(is_machine_code(nvrtc->compile(convert_source(pair, gpu::convert_form::rows), 90)));
    }
    const gpu::convert_pair wide{dtype::f64, dtype::f16};
    for (const auto form : {gpu::convert_form::rows, gpu::convert_form::transposed,
                            gpu::convert_form::strided, gpu::convert_form::bytewise}) {
        CAPTURE(static_cast<int>(form));
        for (const int architecture : {80, 90, 100}) {
            CHECK(is_machine_code(
                nvrtc->compile(convert_source({dtype::f32, dtype::bf16}, form), architecture)));
        }
        CHECK(is_machine_code(nvrtc->compile(convert_source(wide, form), 80)));
        CHECK(is_machine_code(nvrtc->compile(convert_source(pairs.front(), form), 90)));
    }
}

TEST_CASE("a kernel that does not compile is an error with the compiler's words") {
    const auto nvrtc = compiler("kernel that does not compile");
    if (!nvrtc) {
        return;
    }
    const gpu::kernel_source wrong{.name = "wrong",
                                   .text = "extern \"C\" __global__ void wrong() { nonsense; }",
                                   .options = {}};
    try {
        static_cast<void>(nvrtc->compile(wrong, 90));
        FAIL("it compiled");
    } catch (const weightwire::unsupported_error& failure) {
        CHECK(failure.context().operation == "nvrtcCompileProgram for sm_90");
        CHECK(failure.context().native_code == 6);
        CHECK(failure.context().native_text.find("nonsense") != std::string::npos);
        CHECK(failure.text().find("wrong") != std::string::npos);
    }
    // The bulk form needs instructions that older devices do not have.
    CHECK_THROWS_AS(static_cast<void>(nvrtc->compile(gpu::copy_bulk_source(), 80)),
                    weightwire::unsupported_error);
    CHECK_THROWS_AS(static_cast<void>(nvrtc->compile(gpu::copy_plain_source(), 12345)),
                    weightwire::unsupported_error);
}

TEST_CASE("a missing NVRTC is an error that names it, and what was tried") {
    try {
        static_cast<void>(gpu::nvrtc::open("libnvrtc.so.absent"));
        FAIL("it opened");
    } catch (const weightwire::unsupported_error& failure) {
        CHECK(std::string{failure.what()}.find("NVRTC") != std::string::npos);
        CHECK(failure.context().native_text.find("libnvrtc.so.absent") != std::string::npos);
    }
    // A library that is there but is no NVRTC.
    CHECK_THROWS_AS(static_cast<void>(gpu::nvrtc::open("libm.so.6")),
                    weightwire::unsupported_error);
}

TEST_CASE("tiles hold every byte once, at most 32 KiB and 32 tensors each, cut at 128 bytes") {
    std::mt19937_64 random{7};
    for (int round = 0; round < 200; ++round) {
        gpu::copy_tiles tiles;
        std::uint64_t bytes = 0;
        const std::size_t groups = 1 + random() % 3;
        for (std::size_t group = 0; group < groups; ++group) {
            std::vector<gpu::copy_item> items(random() % 200);
            for (gpu::copy_item& item : items) {
                const std::uint64_t limit = std::uint64_t{1} << (random() % 20U);
                item = {.source = random() % 1'000'000,
                        .destination = random() % 1'000'000,
                        .bytes = random() % (limit + 1)};
                bytes += item.bytes;
            }
            tiles.add_group(items);
        }
        require_each_byte_once(tiles);
        CHECK(tiles.bytes() == bytes);
        REQUIRE(tiles.ends().size() == groups);
        CHECK(tiles.ends().back() == tiles.tiles().size());
        CHECK(std::is_sorted(tiles.ends().begin(), tiles.ends().end()));
    }
}

TEST_CASE("small tensors share tiles, so blocks get like amounts of work") {
    gpu::copy_tiles tiles;
    std::vector<gpu::copy_item> items;
    for (std::uint64_t i = 0; i < 1000; ++i) {
        items.push_back({.source = i * 4096, .destination = i * 4096, .bytes = 4096});
    }
    tiles.add_group(items);
    CHECK(tiles.tiles().size() == 125);
}

TEST_CASE("a plan knows how many bytes must be shifted, and writes in the order of addresses") {
    gpu::copy_tiles tiles;
    const std::vector<gpu::copy_item> items{{.source = 1, .destination = 64, .bytes = 10},
                                            {.source = 33, .destination = 17, .bytes = 20},
                                            {.source = 100, .destination = 0, .bytes = 0}};
    tiles.add_group(items);
    CHECK(tiles.shifted_bytes() == 10);
    REQUIRE(tiles.items().size() == 2);
    CHECK(tiles.items()[0].destination == 17);
}
