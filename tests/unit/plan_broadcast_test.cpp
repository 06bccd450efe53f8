// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/broadcast_plan.hpp>

#include "../../benchmarks/support/parameter_lists.hpp"

namespace {

using namespace weightwire;
using plan::broadcast_options;
using plan::broadcast_plan;
using plan::sending_order;

constexpr std::array types{dtype::u8,  dtype::boolean, dtype::f8_e4m3fn, dtype::bf16,
                           dtype::f32, dtype::f64,     dtype::i64,       dtype::complex128};

manifest random_list(std::mt19937& random) {
    std::vector<param_meta> list;
    const auto count = random() % 24;
    for (std::size_t i = 0; i < count; ++i) {
        const auto layer = std::to_string(i / 4);
        list.push_back({"layers." + layer + ".t" + std::to_string(i),
                        types[random() % types.size()],
                        {static_cast<std::int64_t>(random() % 9)}});
    }
    return manifest{std::move(list)};
}

/// Sections 4.4 and 4.5 of the protocol page in their own words: the chunks of one call as lists of
/// positions, and whether the Python consumer can view every tensor where it lies.
struct by_the_page {
    std::vector<std::vector<std::size_t>> chunks{};
    bool readable = true;
};
by_the_page transcribe(const manifest& parameters, const std::vector<std::size_t>& order,
                       std::uint64_t size) {
    by_the_page result;
    std::vector<std::size_t> chunk;
    std::uint64_t total = 0;
    for (const auto position : order) {
        const auto& parameter = parameters[position];
        const auto item = item_bits(parameter.dtype) / 8;
        result.readable = result.readable && total % item == 0;
        chunk.push_back(position);
        total += parameter.shape.checked_numel().value() * item;
        if (total > size) {
            result.chunks.push_back(chunk);
            chunk.clear();
            total = 0;
        }
    }
    if (!chunk.empty()) {
        result.chunks.push_back(chunk);
    }
    return result;
}

std::vector<std::size_t> in_order(std::size_t count) {
    std::vector<std::size_t> order(count);
    for (std::size_t i = 0; i < count; ++i) {
        order[i] = i;
    }
    return order;
}

/// Every parameter in exactly one call; chunks, offsets and buffers as the page has them.
void check_plan(const broadcast_plan& made, const manifest& parameters,
                const broadcast_options& options) {
    std::vector<std::size_t> seen;
    std::vector<std::uint64_t> buffers(options.buffers, 0);
    for (const auto& call : made.calls()) {
        seen.insert(seen.end(), call.order.begin(), call.order.end());
        const auto expected = transcribe(parameters, call.order, options.buffer_bytes);
        REQUIRE((!options.consumer_needs_alignment || expected.readable));
        REQUIRE(call.chunks.size() == expected.chunks.size());
        for (std::size_t k = 0; k < call.chunks.size(); ++k) {
            const auto& chunk = call.chunks[k];
            std::vector<std::size_t> positions;
            std::uint64_t offset = 0;
            for (std::size_t i = chunk.first; i < chunk.first + chunk.count; ++i) {
                positions.push_back(call.order[i]);
                REQUIRE(chunk.offset_of(i) == offset);
                offset += parameters[call.order[i]].byte_size();
            }
            REQUIRE(positions == expected.chunks[k]);
            REQUIRE(chunk.bytes == offset);
            auto& buffer = buffers[k % options.buffers];
            buffer = std::max(buffer, offset);
        }
    }
    if (!made.reordered()) {
        REQUIRE(seen == in_order(parameters.size()));
    }
    std::ranges::sort(seen);
    REQUIRE(seen == in_order(parameters.size()));
    REQUIRE(std::vector(made.buffer_bytes().begin(), made.buffer_bytes().end()) == buffers);
}

broadcast_options packed(std::uint64_t bytes) {
    return {.packed = true, .buffer_bytes = bytes, .consumer_needs_alignment = true};
}

std::vector<plan::broadcast_call> plan_of(const manifest& parameters,
                                          const broadcast_options& options) {
    const broadcast_plan made{parameters, options};
    return {made.calls().begin(), made.calls().end()};
}

/// A tensor that lies misaligned: three bytes before it.
manifest odd_list() {
    return manifest{{{"layers.0.a", dtype::u8, {3}},
                     {"layers.0.b", dtype::bf16, {4}},
                     {"layers.1.a", dtype::u8, {4}},
                     {"layers.1.b", dtype::f32, {1}}}};
}

TEST_CASE("broadcast plan: over random lists it obeys the page and no tensor is misaligned") {
    std::mt19937 random{3};
    std::size_t reordered = 0;
    std::size_t split = 0;
    std::size_t refused = 0;
    for (int repeat = 0; repeat < 4000; ++repeat) {
        const auto parameters = random_list(random);
        const broadcast_options options{.packed = true,
                                        .buffer_bytes = random() % 60,
                                        .buffers = 1 + random() % 4,
                                        .consumer_needs_alignment = random() % 4 != 0,
                                        .may_reorder = random() % 2 == 0,
                                        .may_split = random() % 2 == 0};
        const bool readable =
            transcribe(parameters, in_order(parameters.size()), options.buffer_bytes).readable ||
            !options.consumer_needs_alignment;
        try {
            const broadcast_plan made{parameters, options};
            check_plan(made, parameters, options);
            REQUIRE((!readable || (!made.reordered() && made.calls().size() == 1)));
            REQUIRE((!made.reordered() || options.may_reorder));
            REQUIRE((made.calls().size() == 1 || options.may_split));
            reordered += made.reordered() ? 1 : 0;
            split += made.calls().size() > 1 ? 1 : 0;
            // A worker of ours makes the same plan from the layout.
            const broadcast_plan again{parameters, options, made.layout()};
            check_plan(again, parameters, options);
            REQUIRE(again.reordered() == made.reordered());
            REQUIRE(again.calls().size() == made.calls().size());
            for (std::size_t i = 0; i < made.calls().size(); ++i) {
                REQUIRE(again.calls()[i].order == made.calls()[i].order);
                REQUIRE(again.calls()[i].chunks == made.calls()[i].chunks);
            }
        } catch (const unsupported_error& cause) {
            REQUIRE((!readable && !options.may_reorder && !options.may_split));
            REQUIRE(parameters.find(cause.context().tensor) != manifest::npos);
            ++refused;
        }
    }
    CHECK(reordered > 100);
    CHECK(split > 100);
    CHECK(refused > 100);
}

TEST_CASE("broadcast plan: an aligned list is sent as it is, in one call") {
    const manifest parameters{{{"a", dtype::bf16, {2}}, {"b", dtype::f32, {1}}}};
    auto options = packed(100);
    options.may_reorder = true;
    const broadcast_plan made{parameters, options};
    CHECK_FALSE(made.reordered());
    CHECK(made.calls().size() == 1);
    CHECK(made.description() ==
          "packed in 1 chunks, one update call in the source's order: every tensor is aligned");
}

TEST_CASE("broadcast plan: a misaligned list is reordered layer by layer where that suffices") {
    auto options = packed(1000);
    options.may_reorder = true;
    const manifest parameters{{{"layers.0.a", dtype::u8, {3}},
                               {"layers.0.b", dtype::bf16, {4}},
                               {"layers.0.c", dtype::u8, {1}},
                               {"layers.1.a", dtype::u8, {4}},
                               {"layers.1.b", dtype::f32, {1}}}};
    const broadcast_plan made{parameters, options};
    CHECK(made.layout().order == sending_order::by_layer);
    CHECK(made.calls()[0].order == std::vector<std::size_t>{1, 0, 2, 4, 3});
    CHECK(made.description().ends_with(
        "by descending item size in each layer: layers.0.b would be misaligned for vLLM"));
}

TEST_CASE("broadcast plan: else as a whole, by descending item size and stable") {
    auto options = packed(1000);
    options.may_reorder = true;
    const broadcast_plan made{odd_list(), options};
    CHECK(made.reordered());
    CHECK(made.layout().order == sending_order::by_item_size);
    CHECK(made.calls()[0].order == std::vector<std::size_t>{3, 1, 0, 2});
}

TEST_CASE("broadcast plan: a source that gives one tensor after the other is split into calls") {
    const broadcast_plan made{odd_list(), packed(1000)};
    REQUIRE(made.calls().size() == 2);
    CHECK(made.calls()[1].order == std::vector<std::size_t>{1, 2, 3});
    CHECK(made.layout().call_begins == std::vector<std::size_t>{0, 1});
    CHECK(made.buffer_bytes()[0] == 16);
    CHECK(made.buffer_bytes()[1] == 0);
}

TEST_CASE("broadcast plan: where neither is possible the tensor is named") {
    auto options = packed(1000);
    options.may_split = false;
    try {
        (void)broadcast_plan{odd_list(), options};
        FAIL("nothing was refused");
    } catch (const unsupported_error& cause) {
        CHECK(cause.context().tensor == "layers.0.b");
        CHECK(cause.context().phase == phase::plan);
    }
}

TEST_CASE("broadcast plan: a tensor without bytes is misaligned like any other") {
    const manifest parameters{{{"a", dtype::u8, {1}}, {"b", dtype::f32, {0}}}};
    CHECK(plan_of(parameters, packed(1000)).size() == 2);
}

TEST_CASE("broadcast plan: scalars go packed only as the user's [1]") {
    const manifest parameters{{{"a", dtype::f32, {2}}, {"scale", dtype::f32, {}}}};
    try {
        (void)broadcast_plan{parameters, packed(1000)};
        FAIL("nothing was refused");
    } catch (const data_error& cause) {
        CHECK(cause.context().tensor == "scale");
        CHECK(cause.text().find("zero_dim_as_one") != std::string::npos);
    }
    auto options = packed(1000);
    options.zero_dim_as_one = true;
    CHECK(plan_of(parameters, options)[0].chunks[0].bytes == 12);
    CHECK(plan_of(parameters, {.consumer_needs_alignment = true}).size() == 1);
    options.zero_dim_as_one = false;
    options.consumer_needs_alignment = false;
    CHECK(plan_of(parameters, options)[0].chunks[0].bytes == 12);
}

TEST_CASE("broadcast plan: unpacked, vLLM takes NCCL's dtypes, workers of ours take all") {
    for (const auto& row : dtype_table) {
        CAPTURE(to_string(row.value));
        const manifest parameters{{{"t", row.value, {4}}}};
        constexpr std::array taken{dtype::i8,   dtype::u8,  dtype::i32, dtype::i64,      dtype::f16,
                                   dtype::bf16, dtype::f32, dtype::f64, dtype::f8_e4m3fn};
        const bool known = std::ranges::find(taken, row.value) != taken.end();
        CHECK(plan_of(parameters, {})[0].chunks.empty());
        if (known) {
            const broadcast_plan made{parameters, {.consumer_needs_alignment = true}};
            CHECK(made.buffer_bytes().empty());
        } else {
            CHECK_THROWS_AS((broadcast_plan{parameters, {.consumer_needs_alignment = true}}),
                            unsupported_error);
        }
    }
    const manifest six_bits{{{"t", dtype::f6_e2m3, {4}}}};
    CHECK_THROWS_AS((broadcast_plan{six_bits, packed(10)}), unsupported_error);
}

TEST_CASE("broadcast plan: a list of none is one call of none") {
    const broadcast_plan made{manifest{}, packed(10)};
    REQUIRE(made.calls().size() == 1);
    CHECK(made.calls()[0].order.empty());
    CHECK(made.calls()[0].chunks.empty());
}

TEST_CASE("broadcast plan: no buffer, and calls that begin nowhere, are refused") {
    const auto parameters = odd_list();
    CHECK_THROWS_AS((broadcast_plan{parameters, {.packed = true, .buffers = 0}}), usage_error);
    using positions = std::vector<std::size_t>;
    for (const auto& begins : {positions{}, {1}, {0, 0}, {0, 2, 1}, {0, 4}, {0, 5}}) {
        CHECK_THROWS_AS((broadcast_plan{parameters, packed(10), {.call_begins = begins}}),
                        protocol_error);
    }
    CHECK_THROWS_AS((broadcast_plan{manifest{}, packed(10), {.call_begins = {0, 1}}}),
                    protocol_error);
}

TEST_CASE("broadcast plan: a mixture of experts of 18,867 tensors") {
    const manifest parameters{benchmarks::qwen3_30b_a3b_list(48)};
    CHECK(parameters.size() == 18'867);
    CHECK(parameters.total_bytes() == 61'064'245'248);
    const auto options = packed(std::uint64_t{1} << 30U);
    const broadcast_plan made{parameters, options};
    check_plan(made, parameters, options);
    CHECK(made.calls().size() == 1);
    for (const auto bytes : made.buffer_bytes()) {
        CHECK(bytes > options.buffer_bytes);
        CHECK(bytes <= options.buffer_bytes + std::uint64_t{151'936} * 2048 * 2);
    }
}

}  // namespace
