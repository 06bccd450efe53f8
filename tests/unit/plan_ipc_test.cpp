// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ipc_plan.hpp>

#include "../../benchmarks/support/parameter_lists.hpp"

namespace {

using namespace weightwire;
using plan::ipc_options;
using plan::ipc_plan;
using plan::sending_order;
using flags = std::vector<unsigned char>;
using positions = std::vector<std::size_t>;

constexpr std::array types{dtype::u8,  dtype::boolean, dtype::f8_e4m3fn, dtype::bf16,
                           dtype::f32, dtype::f64,     dtype::i64,       dtype::complex128};
constexpr auto largest = std::numeric_limits<std::uint64_t>::max();

manifest random_list(std::mt19937& random, std::size_t most_tensors) {
    std::vector<param_meta> list;
    const auto count = random() % (most_tensors + 1);
    for (std::size_t i = 0; i < count; ++i) {
        list.push_back({"layers." + std::to_string(i / 4) + ".t" + std::to_string(i),
                        types[random() % types.size()],
                        {static_cast<std::int64_t>(random() % 7)}});
    }
    return manifest{std::move(list)};
}

manifest byte_tensors(const std::vector<std::int64_t>& sizes) {
    std::vector<param_meta> list;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        list.push_back({"t" + std::to_string(i), dtype::u8, {sizes[i]}});
    }
    return manifest{std::move(list)};
}

std::uint64_t item_of(const param_meta& parameter) { return item_bits(parameter.dtype) / 8; }

bool goes_through(const ipc_options& options, const flags& staged, std::size_t position) {
    return options.packed || staged[position] != 0;
}

/// Where a call that begins at `begin` has to end, by protocol pages 6.8 and 4.5 in their own
/// words; unpacked with offsets rounded up.
std::size_t end_of_call(const manifest& parameters, const ipc_options& options, const flags& staged,
                        const positions& order, std::size_t begin, bool aligned) {
    std::uint64_t total = 0;
    for (auto i = begin; i < order.size(); ++i) {
        const auto& parameter = parameters[order[i]];
        const auto bytes = parameter.shape.checked_numel().value() * item_of(parameter);
        if (!goes_through(options, staged, order[i]) || (bytes == 0 && !aligned)) {
            continue;
        }
        if (!options.packed && total % ipc_plan::alignment != 0) {
            total += ipc_plan::alignment - total % ipc_plan::alignment;
        }
        if ((i > begin && total + bytes > options.buffer_bytes) ||
            (aligned && total % item_of(parameter) != 0)) {
            return i;
        }
        total += bytes;
    }
    return order.size();
}

/// The fewest calls that there can be in `order`, each end tried; 0 where there are none.
std::size_t fewest(const manifest& parameters, const ipc_options& options, const flags& staged,
                   const positions& order, bool aligned) {
    const auto count = order.size();
    std::vector<std::size_t> calls(count + 1, 0);
    for (std::size_t begin = 0; begin < count; ++begin) {
        if (begin > 0 && calls[begin] == 0) {
            continue;
        }
        const auto end = end_of_call(parameters, options, staged, order, begin, aligned);
        std::uint64_t bytes = 0;
        for (auto i = begin; i < end; ++i) {
            bytes += parameters[order[i]].byte_size();
            if (bytes > 0 || !aligned) {
                auto& known = calls[i + 1];
                known = known == 0 ? calls[begin] + 1 : std::min(known, calls[begin] + 1);
            }
        }
    }
    return calls[count];
}

/// Every parameter in one call; what is staged fits, overlaps nothing and is where it may be.
void check_ipc_plan(const ipc_plan& made, const manifest& parameters, const ipc_options& options,
                    const flags& staged) {
    positions seen;
    std::vector<std::uint64_t> buffers;
    for (std::size_t k = 0; k < made.calls().size(); ++k) {
        const auto& call = made.calls()[k];
        seen.insert(seen.end(), call.order.begin(), call.order.end());
        REQUIRE(call.offsets.size() == call.order.size());
        std::uint64_t end = 0;
        for (std::size_t i = 0; i < call.order.size(); ++i) {
            const auto& parameter = parameters[call.order[i]];
            if (!goes_through(options, staged, call.order[i])) {
                REQUIRE(call.offsets[i] == ipc_plan::in_place);
                continue;
            }
            const auto offset = call.offsets[i];
            REQUIRE(offset >= end);
            if (options.packed) {
                REQUIRE(offset == end);
                REQUIRE((!options.consumer_needs_alignment || offset % item_of(parameter) == 0));
            } else if (parameter.byte_size() > 0) {
                REQUIRE(offset % ipc_plan::alignment == 0);
            }
            end = offset + parameter.byte_size();
        }
        REQUIRE(call.staged_bytes == end);
        REQUIRE(end <= options.buffer_bytes);
        REQUIRE((end > 0 || made.calls().size() == 1));
        if (end > 0) {
            REQUIRE(call.buffer == k % options.buffers);
            buffers.resize(std::max(buffers.size(), call.buffer + 1));
            buffers[call.buffer] = std::max(buffers[call.buffer], end);
        }
    }
    if (!made.reordered()) {
        REQUIRE(std::ranges::is_sorted(seen));
    }
    std::ranges::sort(seen);
    positions all(parameters.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    REQUIRE(seen == all);
    REQUIRE(std::vector(made.buffer_bytes().begin(), made.buffer_bytes().end()) == buffers);
}

void check_same(const ipc_plan& one, const ipc_plan& other) {
    REQUIRE(one.layout() == other.layout());
    REQUIRE(one.calls().size() == other.calls().size());
    for (std::size_t i = 0; i < one.calls().size(); ++i) {
        REQUIRE(one.calls()[i].order == other.calls()[i].order);
        REQUIRE(one.calls()[i].offsets == other.calls()[i].offsets);
        REQUIRE(one.calls()[i].staged_bytes == other.calls()[i].staged_bytes);
        REQUIRE(one.calls()[i].buffer == other.calls()[i].buffer);
    }
}

ipc_options towards_vllm(std::uint64_t bytes) {
    return {.packed = true, .buffer_bytes = bytes, .buffers = 1, .consumer_needs_alignment = true};
}

std::vector<plan::ipc_call> calls_of(const manifest& parameters, const ipc_options& options,
                                     const flags& staged) {
    const ipc_plan made{parameters, options, staged};
    return {made.calls().begin(), made.calls().end()};
}

std::vector<std::vector<std::int64_t>> sizes_of_calls(const std::vector<std::int64_t>& sizes,
                                                      const ipc_options& options) {
    const auto parameters = byte_tensors(sizes);
    std::vector<std::vector<std::int64_t>> result;
    for (const auto& call : calls_of(parameters, options, flags(sizes.size(), 1))) {
        auto& of_call = result.emplace_back();
        for (const auto position : call.order) {
            of_call.push_back(sizes[position]);
        }
    }
    return result;
}

TEST_CASE("ipc plan: the worked examples of the protocol page, appendix C, buffer of 100 bytes") {
    using cuts = std::vector<std::vector<std::int64_t>>;
    for (const auto& options :
         {towards_vllm(100), ipc_options{.packed = true, .buffer_bytes = 100}}) {
        CHECK(sizes_of_calls({60, 40}, options) == cuts{{60, 40}});
        CHECK(sizes_of_calls({60, 40, 1}, options) == cuts{{60, 40}, {1}});
        CHECK(sizes_of_calls({60, 50, 30}, options) == cuts{{60}, {50, 30}});
        CHECK(sizes_of_calls({100, 0, 5}, options) == cuts{{100, 0}, {5}});
        CHECK(sizes_of_calls({0, 100, 5, 0}, options) == cuts{{0, 100}, {5, 0}});
        CHECK_THROWS_AS((void)sizes_of_calls({150, 10}, options), data_error);
        CHECK(sizes_of_calls({}, options) == cuts{{}});
    }
    CHECK_THROWS_AS((void)sizes_of_calls({0, 0}, towards_vllm(100)), data_error);
    CHECK(sizes_of_calls({0, 0}, {.packed = true, .buffer_bytes = 100}) == cuts{{0, 0}});
}

TEST_CASE("ipc plan: over random lists every plan is sound, and a worker makes the same one") {
    std::mt19937 random{17};
    std::size_t reordered = 0;
    std::size_t closed_early = 0;
    std::size_t refused = 0;
    std::size_t no_neighbour = 0;
    for (int repeat = 0; repeat < 20'000; ++repeat) {
        const auto parameters = random_list(random, 16);
        const ipc_options options{.packed = random() % 2 == 0,
                                  .buffer_bytes = 96 + random() % 200,
                                  .buffers = 1 + random() % 3,
                                  .consumer_needs_alignment = random() % 4 != 0,
                                  .may_reorder = random() % 3 == 0,
                                  .may_split = random() % 4 != 0};
        flags staged(parameters.size());
        std::ranges::generate(staged, [&] { return static_cast<unsigned char>(random() % 2); });
        const bool aligned = options.packed && options.consumer_needs_alignment;
        positions order(parameters.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        const auto least = fewest(parameters, options, staged, order, aligned);
        const auto unaligned = fewest(parameters, options, staged, order, false);
        try {
            const ipc_plan made{parameters, options, staged};
            check_ipc_plan(made, parameters, options, staged);
            REQUIRE((made.calls().size() == 1 || options.may_split));
            REQUIRE((!made.reordered() || (options.may_reorder && aligned)));
            if (!made.reordered()) {
                REQUIRE(made.calls().size() == std::max<std::size_t>(least, 1));
            }
            reordered += made.reordered() ? 1 : 0;
            closed_early += !made.reordered() && least > unaligned ? 1 : 0;
            auto of_worker = options;
            of_worker.consumer_needs_alignment = false;
            of_worker.may_reorder = false;
            of_worker.may_split = true;
            check_same(made, ipc_plan{parameters, of_worker, staged, made.layout()});
        } catch (const unsupported_error& cause) {
            REQUIRE_FALSE(options.may_split);
            REQUIRE((options.may_reorder ? unaligned : least) != 1);
            REQUIRE(parameters.find(cause.context().tensor) != manifest::npos);
            ++refused;
        } catch (const data_error& cause) {
            REQUIRE((aligned && least == 0));
            REQUIRE((!options.may_reorder || parameters.total_bytes() == 0));
            const auto named = parameters.find(cause.context().tensor);
            REQUIRE(named != manifest::npos);
            REQUIRE(parameters[named].byte_size() == 0);
            ++no_neighbour;
        }
    }
    CHECK(reordered > 100);
    CHECK(closed_early > 100);
    CHECK(refused > 100);
    CHECK(no_neighbour > 100);
}

TEST_CASE("ipc plan: nothing staged is one call that needs no buffer") {
    const auto parameters = byte_tensors({150, 0, 7});
    const ipc_plan made{parameters, {.buffers = 0}, flags(3, 0)};
    REQUIRE(made.calls().size() == 1);
    CHECK(made.calls()[0].order == positions{0, 1, 2});
    CHECK(std::ranges::count(made.calls()[0].offsets, ipc_plan::in_place) == 3);
    CHECK(made.calls()[0].staged_bytes == 0);
    CHECK(made.buffer_bytes().empty());
    CHECK(made.description() ==
          "unpacked, 0 tensors through buffers, one update call in the source's order: what needs "
          "no buffer is read in place");
}

TEST_CASE("ipc plan: what is read in place takes no room and stays with its neighbours") {
    const auto parameters = byte_tensors({60, 500, 40, 500, 30, 500});
    const ipc_plan made{parameters, {.buffer_bytes = 100}, flags{1, 0, 1, 0, 1, 0}};
    REQUIRE(made.calls().size() == 2);
    constexpr auto there = ipc_plan::in_place;
    using offsets = std::vector<std::uint64_t>;
    // 40 bytes from offset 64 on are too many for 100.
    CHECK(made.calls()[0].order == positions{0, 1});
    CHECK(made.calls()[0].offsets == offsets{0, there});
    CHECK(made.calls()[1].order == positions{2, 3, 4, 5});
    CHECK(made.calls()[1].offsets == offsets{0, there, 48, there});
    CHECK(made.calls()[1].staged_bytes == 78);
    CHECK(made.calls()[1].buffer == 1);
    CHECK(made.layout().call_begins == positions{0, 2});
    CHECK(made.description().starts_with("unpacked, 3 tensors through buffers, 2 update calls in"));
}

TEST_CASE("ipc plan: unpacked, a staged tensor without bytes needs neither room nor padding") {
    const auto parameters = byte_tensors({97, 0, 0});
    const ipc_plan made{parameters, {.buffer_bytes = 97}, flags(3, 1)};
    REQUIRE(made.calls().size() == 1);
    CHECK(made.calls()[0].offsets == std::vector<std::uint64_t>{0, 97, 97});
    CHECK(made.calls()[0].staged_bytes == 97);
}

TEST_CASE("ipc plan: buffers rotate, and only those that are used have a size") {
    const auto parameters = byte_tensors({80, 70, 60, 50});
    const ipc_plan made{parameters, {.packed = true, .buffer_bytes = 100, .buffers = 3}, {}};
    REQUIRE(made.calls().size() == 4);
    CHECK(made.calls()[3].buffer == 0);
    CHECK(std::ranges::equal(made.buffer_bytes(), std::vector<std::uint64_t>{80, 70, 60}));
    const ipc_plan few{parameters, {.packed = true, .buffer_bytes = 260, .buffers = 3}, {}};
    CHECK(few.calls().size() == 1);
    CHECK(std::ranges::equal(few.buffer_bytes(), std::vector<std::uint64_t>{260}));
}

TEST_CASE("ipc plan: a tensor larger than the buffer is named, with the size it needs") {
    const auto parameters = byte_tensors({1, 101, 5});
    const auto refused = [&](const ipc_options& options, const flags& staged) {
        try {
            (void)ipc_plan{parameters, options, staged};
        } catch (const data_error& problem) {
            CHECK(problem.context().tensor == "t1");
            CHECK(problem.context().phase == phase::plan);
            CHECK(problem.context().bytes_total == 101);
            CHECK(problem.text().ends_with("set the buffer size to at least 101"));
            return true;
        }
        return false;
    };
    CHECK(refused({.packed = true, .buffer_bytes = 100}, {}));
    CHECK(refused({.buffer_bytes = 100}, {0, 1, 0}));
    CHECK_FALSE(refused({.buffer_bytes = 100}, {1, 0, 1}));
}

/// A tensor that lies misaligned: three bytes before it.
manifest odd_tensors() {
    return manifest{{{"layers.0.a", dtype::u8, {3}},
                     {"layers.0.b", dtype::bf16, {4}},
                     {"layers.1.a", dtype::u8, {4}},
                     {"layers.1.b", dtype::f32, {1}}}};
}

TEST_CASE("ipc plan: a misaligned list is reordered where it may be, by layer if that suffices") {
    auto options = towards_vllm(1000);
    options.may_reorder = true;
    const manifest layered{{{"layers.0.a", dtype::u8, {3}},
                            {"layers.0.b", dtype::bf16, {4}},
                            {"layers.0.c", dtype::u8, {1}},
                            {"layers.1.a", dtype::u8, {4}},
                            {"layers.1.b", dtype::f32, {1}}}};
    const ipc_plan by_layer{layered, options, {}};
    CHECK(by_layer.layout().order == sending_order::by_layer);
    CHECK(by_layer.calls()[0].order == positions{1, 0, 2, 4, 3});
    CHECK(by_layer.description() ==
          "packed, one update call by descending item size in each layer: layers.0.b would be "
          "misaligned for vLLM");
    const ipc_plan as_a_whole{odd_tensors(), options, {}};
    CHECK(as_a_whole.layout().order == sending_order::by_item_size);
    CHECK(as_a_whole.calls()[0].order == positions{3, 1, 0, 2});
    options.buffer_bytes = 15;
    const ipc_plan in_two{odd_tensors(), options, {}};
    REQUIRE(in_two.calls().size() == 2);
    CHECK(in_two.calls()[0].order == positions{3, 1, 0});
    CHECK(in_two.calls()[1].order == positions{2});
}

TEST_CASE("ipc plan: else a call is closed early, where that makes the fewest calls") {
    const ipc_plan made{odd_tensors(), towards_vllm(1000), {}};
    CHECK(made.layout().call_begins == positions{0, 1});
    // Going on as long as no tensor is misaligned would make three calls.
    const manifest parameters{{{"a", dtype::u8, {1}},
                               {"b", dtype::u8, {2}},
                               {"c", dtype::bf16, {1}},
                               {"d", dtype::f32, {1}}}};
    const ipc_plan two{parameters, towards_vllm(1000), {}};
    CHECK(two.layout().call_begins == positions{0, 1});
    // Of equally few, calls that are as full as they can be: `c` could also begin the second.
    const manifest tie{{{"a", dtype::u8, {2}},
                        {"b", dtype::u8, {1}},
                        {"c", dtype::u8, {2}},
                        {"d", dtype::bf16, {1}}}};
    const ipc_plan full{tie, towards_vllm(1000), {}};
    CHECK(full.layout().call_begins == positions{0, 3});
}

TEST_CASE("ipc plan: a tensor without bytes travels in a call that has some") {
    // After three bytes vLLM cannot read the last one; after the two of `b` it can.
    const manifest parameters{
        {{"a", dtype::u8, {1}}, {"b", dtype::u8, {2}}, {"c", dtype::bf16, {0}}}};
    const ipc_plan made{parameters, towards_vllm(100), {}};
    CHECK(made.layout().call_begins == positions{0, 1});
    const manifest alone{{{"a", dtype::u8, {1}}, {"b", dtype::bf16, {0}}}};
    try {
        (void)ipc_plan{alone, towards_vllm(100), {}};
        FAIL("nothing was refused");
    } catch (const data_error& cause) {
        CHECK(cause.context().tensor == "b");
        CHECK(cause.text().find("send unpacked") != std::string::npos);
    }
    auto options = towards_vllm(100);
    options.may_reorder = true;
    CHECK(calls_of(alone, options, {}).size() == 1);
    options.consumer_needs_alignment = false;
    options.may_reorder = false;
    CHECK(calls_of(alone, options, {}).size() == 1);
}

TEST_CASE("ipc plan: where one call is all there may be, the tensor that needs another is named") {
    auto options = towards_vllm(1000);
    options.may_split = false;
    const auto refused = [](const manifest& parameters, const ipc_options& with,
                            const flags& staged) {
        try {
            (void)ipc_plan{parameters, with, staged};
        } catch (const unsupported_error& cause) {
            CHECK(cause.context().phase == phase::plan);
            return cause.context().tensor + ": " + cause.text();
        }
        return std::string{"nothing was refused"};
    };
    CHECK(refused(odd_tensors(), options, {}).starts_with("layers.0.b: "));
    const auto full = refused(byte_tensors({60, 1, 40, 7}),
                              {.buffer_bytes = 100, .may_split = false}, {1, 0, 1, 1});
    CHECK(full.starts_with("t2: "));
    CHECK(full.ends_with("set the buffer size to at least 119"));
    CHECK(refused(byte_tensors({60, 1, 40, 7}), {.buffer_bytes = 119, .may_split = false},
                  {1, 0, 1, 1}) == "nothing was refused");
}

TEST_CASE("ipc plan: towards vLLM, scalars go unpacked or as the user's [1]") {
    const manifest parameters{{{"a", dtype::f32, {2}}, {"scale", dtype::f32, {}}}};
    auto options = towards_vllm(100);
    try {
        (void)ipc_plan{parameters, options, {}};
        FAIL("nothing was refused");
    } catch (const data_error& cause) {
        CHECK(cause.context().tensor == "scale");
        CHECK(cause.text().find("zero_dim_as_one") != std::string::npos);
    }
    options.zero_dim_as_one = true;
    CHECK(calls_of(parameters, options, {})[0].staged_bytes == 12);
    options.zero_dim_as_one = false;
    options.packed = false;
    CHECK(calls_of(parameters, options, flags(2, 1))[0].staged_bytes == 20);
}

TEST_CASE("ipc plan: vLLM takes the dtypes that torch has, packed or not; workers of ours all") {
    for (const auto& row : dtype_table) {
        CAPTURE(to_string(row.value));
        const manifest parameters{{{"t", row.value, {4}}}};
        auto options = towards_vllm(64);
        for (const bool packed : {true, false}) {
            options.packed = packed;
            options.consumer_needs_alignment = true;
            if (row.torch.empty()) {
                CHECK_THROWS_AS((ipc_plan{parameters, options, flags(1, 1)}), unsupported_error);
            } else {
                CHECK(calls_of(parameters, options, flags(1, 1)).size() == 1);
            }
            options.consumer_needs_alignment = false;
            CHECK(calls_of(parameters, options, flags(1, 1)).size() == 1);
        }
    }
}

TEST_CASE("ipc plan: no buffer, no flag, and a layout of no sense are refused") {
    const auto parameters = byte_tensors({60, 40, 30});
    const flags all(3, 1);
    CHECK_THROWS_AS((ipc_plan{parameters, {.packed = true, .buffers = 0}, all}), usage_error);
    CHECK_THROWS_AS((ipc_plan{parameters, {.buffers = 0}, all}), usage_error);
    CHECK_THROWS_AS((ipc_plan{parameters, {.buffer_bytes = 100}, flags(2, 1)}), usage_error);
    const ipc_options options{.packed = true, .buffer_bytes = 100};
    for (const auto& begins : {positions{}, {1}, {0, 0}, {0, 2, 1}, {0, 3}}) {
        CHECK_THROWS_AS((ipc_plan{parameters, options, all, {.call_begins = begins}}),
                        protocol_error);
    }
    try {
        (void)ipc_plan{parameters, options, all, {.call_begins = {0}}};
        FAIL("130 bytes are in a buffer of 100");
    } catch (const protocol_error& cause) {
        CHECK(cause.context().tensor == "t2");
    }
    CHECK_THROWS_AS((ipc_plan{byte_tensors({101}), options, all, {}}), protocol_error);
    CHECK_NOTHROW((ipc_plan{parameters, options, all, {.call_begins = {0, 1, 2}}}));
}

TEST_CASE("ipc plan: sizes near the largest number there is do not wrap around") {
    constexpr auto huge = std::numeric_limits<std::int64_t>::max();
    const auto parameters = byte_tensors({huge, huge, 1});
    const ipc_plan made{parameters, {.buffer_bytes = largest}, flags(3, 1)};
    REQUIRE(made.calls().size() == 2);
    CHECK(made.calls()[1].order == positions{2});
    CHECK(calls_of(parameters, towards_vllm(largest), {}).size() == 1);
    CHECK_THROWS_AS((ipc_plan{parameters, {.buffer_bytes = largest}, flags(3, 1), {}}),
                    protocol_error);
}

TEST_CASE("ipc plan: a mixture of experts of 18,867 tensors") {
    const manifest parameters{benchmarks::qwen3_30b_a3b_list(48)};
    auto options = towards_vllm(std::uint64_t{1} << 30U);
    const ipc_plan made{parameters, options, {}};
    check_ipc_plan(made, parameters, options, {});
    CHECK(made.calls().size() == 57);
    CHECK(made.description().ends_with("every tensor is aligned"));
    options.packed = false;
    CHECK(calls_of(parameters, options, flags(parameters.size(), 0)).size() == 1);
}

}  // namespace
