// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <weightwire/core/convert.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/gpu/kernels/convert_tiles.hpp>

#include "../support/random_tensors.hpp"

namespace gpu = weightwire::gpu;

namespace {

using weightwire::dtype;

/// Walks one element of a table as the kernel does; `element` counts dimension 0 fastest.
void walk(const gpu::convert_entry& entry, const gpu::convert_pair& pair, std::uint64_t element) {
    std::uint64_t from = entry.source;
    std::uint64_t to = entry.destination;
    for (std::uint32_t d = 0; d < entry.rank; ++d) {
        const std::uint64_t at = element % entry.extents[d];
        element /= entry.extents[d];
        from += at * entry.source_strides[d];
        to += at * entry.destination_strides[d];
    }
    REQUIRE(element == 0);
    const std::size_t from_item = weightwire::item_bits(pair.from) / 8;
    const std::size_t to_item = weightwire::item_bits(pair.to) / 8;
    if (entry.form != gpu::convert_form::bytewise) {
        REQUIRE(from % from_item == 0);
        REQUIRE(to % to_item == 0);
    }
    weightwire::convert_elements({reinterpret_cast<std::byte*>(to), to_item}, pair.to,
                                 {reinterpret_cast<const std::byte*>(from), from_item}, pair.from);
}

/// The elements of one square, and how many there are.
void walk_square(const gpu::convert_entry& entry, const gpu::convert_pair& pair,
                 std::uint64_t square, std::vector<std::uint8_t>& seen) {
    const std::uint64_t edge = gpu::convert_square_edge(weightwire::item_bits(pair.to) / 8);
    const std::uint64_t across = (entry.extents[0] + edge - 1) / edge;
    const std::uint64_t down = (entry.extents[1] + edge - 1) / edge;
    const std::uint64_t outer = square / across / down;
    for (std::uint64_t i = square % across * edge; i < entry.extents[0]; ++i) {
        for (std::uint64_t k = square / across % down * edge; k < entry.extents[1]; ++k) {
            if (i < (square % across + 1) * edge && k < (square / across % down + 1) * edge) {
                const auto element = (outer * entry.extents[1] + k) * entry.extents[0] + i;
                REQUIRE(element < entry.elements);
                ++seen[element];
                walk(entry, pair, element);
            }
        }
    }
}

/// What the kernels of all groups write, on the host. Every element once.
void interpret(const gpu::convert_tiles& tiles) {
    std::vector<std::vector<std::uint8_t>> seen;
    for (const auto& entry : tiles.entries()) {
        seen.emplace_back(entry.elements, std::uint8_t{0});
    }
    std::uint32_t next = 0;
    for (const auto& group : tiles.groups()) {
        for (const gpu::convert_launch& launch : group) {
            REQUIRE(launch.begin == next);
            REQUIRE(launch.count != 0);
            next += launch.count;
            for (std::uint32_t i = launch.begin; i < next; ++i) {
                const auto& tile = tiles.tiles()[i];
                const auto& entry = tiles.entries()[tile.entry];
                const std::size_t to_item = weightwire::item_bits(launch.pair.to) / 8;
                const std::size_t from_item = weightwire::item_bits(launch.pair.from) / 8;
                REQUIRE(tile.count != 0);
                REQUIRE(entry.form == launch.form);
                if (entry.form == gpu::convert_form::transposed) {
                    REQUIRE(entry.destination_strides[0] == to_item);
                    REQUIRE(entry.source_strides[1] == from_item);
                    for (std::uint64_t k = 0; k < tile.count; ++k) {
                        walk_square(entry, launch.pair, tile.first + k, seen[tile.entry]);
                    }
                    continue;
                }
                REQUIRE(tile.count <= gpu::convert_tile_elements);
                if (entry.form == gpu::convert_form::rows) {
                    REQUIRE(entry.destination_strides[0] == to_item);
                    REQUIRE(entry.source_strides[0] == from_item);
                    REQUIRE(tile.first % entry.extents[0] + tile.count <= entry.extents[0]);
                }
                for (std::uint64_t k = 0; k < tile.count; ++k) {
                    ++seen[tile.entry][tile.first + k];
                    walk(entry, launch.pair, tile.first + k);
                }
            }
        }
    }
    REQUIRE(next == tiles.tiles().size());
    for (const auto& each : seen) {
        REQUIRE(std::ranges::all_of(each, [](std::uint8_t times) { return times == 1; }));
    }
}

/// The one entry of a tensor between two addresses that are multiples of 16.
gpu::convert_tiles tiles_of(dtype to, const std::array<std::int64_t, 8>& to_strides, dtype from,
                            const std::array<std::int64_t, 8>& from_strides,
                            const weightwire::shape& extents) {
    auto* const address = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 20U);
    gpu::convert_tiles tiles;
    const gpu::convert_item item{.to = {address, to, extents, to_strides},
                                 .from = {address, from, extents, from_strides}};
    tiles.add_group(std::span{&item, 1});
    return tiles;
}

}  // namespace

TEST_CASE(
    "the tables of random tensors write what the host's conversion writes, each element once") {
    tests::random_tensors random{17};
    std::array<std::size_t, 4> forms{};
    for (int round = 0; round < 60; ++round) {
        CAPTURE(round);
        gpu::convert_tiles tiles;
        std::vector<tests::tensor_pair> all;
        for (std::size_t group = 0; group < 1 + random.below(3); ++group) {
            std::vector<gpu::convert_item> items;
            for (std::size_t i = 0; i < random.below(8); ++i) {
                all.push_back(random.next(40'000));
                items.push_back({all.back().to, all.back().from});
            }
            tiles.add_group(items);
        }
        interpret(tiles);
        for (const auto& entry : tiles.entries()) {
            ++forms[static_cast<std::size_t>(entry.form)];
        }
        for (const auto& each : all) {
            CAPTURE(weightwire::to_string(each.to.extents()));
            REQUIRE((each.destination == each.expected()));
        }
    }
    for (const std::size_t count : forms) {
        CHECK(count > 0);
    }
}

TEST_CASE("the common layouts take the fast forms") {
    using gpu::convert_form;
    const auto form = [](const gpu::convert_tiles& tiles) { return tiles.entries().at(0).form; };
    // Contiguous with a cast: one row, whatever the shape.
    const auto cast = tiles_of(dtype::bf16, {4096, 1}, dtype::f32, {4096, 1}, {100, 4096});
    CHECK(form(cast) == convert_form::rows);
    CHECK(cast.entries()[0].rank == 1);
    CHECK(cast.tiles().size() == 25);
    // Both sides transposed alike: contiguous as well.
    CHECK(tiles_of(dtype::bf16, {1, 100}, dtype::f32, {1, 100}, {100, 4096}).entries()[0].rank ==
          1);
    // Long rows of a wider matrix, and short ones.
    CHECK(form(tiles_of(dtype::bf16, {4096, 1}, dtype::f32, {12288, 1}, {100, 4096})) ==
          convert_form::rows);
    CHECK(form(tiles_of(dtype::bf16, {64, 1}, dtype::f32, {128, 1}, {1000, 64})) ==
          convert_form::strided);
    // A transposed matrix, a stack of them, and one whose columns are two dimensions.
    const auto turned = tiles_of(dtype::bf16, {300, 1}, dtype::bf16, {1, 200}, {200, 300});
    CHECK(form(turned) == convert_form::transposed);
    CHECK(turned.tiles().size() == 5);  // 4 by 5 squares of 64, four to a tile
    CHECK(form(tiles_of(dtype::f32, {60000, 300, 1}, dtype::bf16, {60000, 1, 200},
                        {7, 200, 300})) == convert_form::transposed);
    const auto joined =
        tiles_of(dtype::bf16, {300, 20, 1}, dtype::f32, {1, 4000, 200}, {200, 15, 20});
    CHECK(form(joined) == convert_form::transposed);
    CHECK(joined.entries()[0].rank == 2);
    // Squares of 64 bits are smaller; a matrix of few columns is not worth them.
    CHECK(tiles_of(dtype::f64, {320, 1}, dtype::f64, {1, 320}, {320, 320}).tiles().size() == 7);
    CHECK(form(tiles_of(dtype::bf16, {3, 1}, dtype::bf16, {1, 200}, {200, 3})) ==
          convert_form::strided);
}

TEST_CASE("equal types are copied in units that their addresses allow") {
    std::array<std::byte, 256> memory{};
    const auto pair_at = [&](std::size_t shift, dtype type) {
        std::byte* const base =
            memory.data() + (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16) % 16;
        gpu::convert_tiles tiles;
        const gpu::convert_item item{.to = {base + shift, type, {3, 2}},
                                     .from = {base + 128, type, {3, 2}}};
        tiles.add_group(std::span{&item, 1});
        CHECK(tiles.entries()[0].form == gpu::convert_form::rows);
        return tiles.groups()[0][0].pair;
    };
    CHECK(pair_at(0, dtype::f32) == gpu::convert_pair{dtype::u32, dtype::u32});
    CHECK(pair_at(2, dtype::f32) == gpu::convert_pair{dtype::u16, dtype::u16});
    CHECK(pair_at(1, dtype::bf16) == gpu::convert_pair{dtype::u8, dtype::u8});
    CHECK(pair_at(8, dtype::complex128) == gpu::convert_pair{dtype::u64, dtype::u64});
    CHECK(pair_at(0, dtype::f8_e5m2) == gpu::convert_pair{dtype::u8, dtype::u8});
}

TEST_CASE("a group is one launch a pair of types and form, and tensors without elements are none") {
    std::vector<std::byte> memory(4096);
    gpu::convert_tiles tiles;
    std::vector<gpu::convert_item> items;
    for (std::size_t i = 0; i < 6; ++i) {
        items.push_back(
            {.to = {memory.data() + 2048 + 64 * (6 - i), dtype::bf16, {4}},
             .from = {memory.data() + 64 * i, i % 2 == 0 ? dtype::f32 : dtype::bf16, {4}}});
    }
    items.push_back({.to = {nullptr, dtype::f16, {0}}, .from = {nullptr, dtype::f64, {0}}});
    tiles.add_group(items);
    tiles.add_group({});
    REQUIRE(tiles.groups().size() == 2);
    CHECK(tiles.groups()[0].size() == 2);
    CHECK(tiles.groups()[1].empty());
    CHECK(tiles.entries().size() == 6);
    // In the order of the addresses that are written.
    CHECK(tiles.entries()[0].destination < tiles.entries()[1].destination);
}

TEST_CASE("tensors that the kernel cannot walk are refused, saying which and why") {
    const auto text_of = [](const auto& call) -> std::string {
        try {
            call();
        } catch (const weightwire::error& failure) {
            return failure.text();
        }
        return {};
    };
    const auto says = [&](const char* words, const auto& call) {
        CAPTURE(words);
        CHECK(text_of(call).find(words) != std::string::npos);
    };
    says("a negative stride",
         [] { static_cast<void>(tiles_of(dtype::f32, {1}, dtype::f32, {-1}, {4})); });
    says("a stride of 0", [] {
        static_cast<void>(tiles_of(dtype::f32, {0, 1}, dtype::f32, {4, 1}, {4, 4}));
    });
    says("float32[4, 4]", [] {
        static_cast<void>(tiles_of(dtype::f32, {0, 1}, dtype::f32, {4, 1}, {4, 4}));
    });
    says("address space",
         [] { static_cast<void>(tiles_of(dtype::f32, {1}, dtype::f32, {INT64_MAX / 4}, {4})); });
    says("from float32 to int32",
         [] { static_cast<void>(tiles_of(dtype::i32, {1}, dtype::f32, {1}, {4})); });
    std::array<std::byte, 64> memory{};
    says("one shape", [&] {
        gpu::convert_tiles tiles;
        const gpu::convert_item item{.to = {memory.data(), dtype::f32, {2, 2}},
                                     .from = {memory.data(), dtype::f32, {4}}};
        tiles.add_group(std::span{&item, 1});
    });
    // A dimension of extent 1 may have any stride.
    CHECK_NOTHROW(static_cast<void>(tiles_of(dtype::f32, {-7, 1}, dtype::f32, {0, 1}, {1, 4})));
}
