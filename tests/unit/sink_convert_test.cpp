// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/parameter_table.hpp>

#include "../support/allocations.hpp"

using namespace weightwire;
using namespace std::chrono_literals;

namespace {

deadline in_time() { return deadline::after(10s); }

const std::vector<param_meta> held{{"a", dtype::bf16, {4, 2}},
                                   {"b", dtype::f32, {3}},
                                   {"c", dtype::i32, {2}},
                                   {"tied", dtype::bf16, {4, 2}}};

std::vector<param_meta> sent(dtype a, dtype b, dtype c) {
    return {{"a", a, {4, 2}}, {"b", b, {3}}, {"c", c, {2}}};
}

parameter_table_options converting() {
    return {.aliases = {{"tied", "a"}}, .convert_dtypes = true};
}

std::string text_of_begin(parameter_table& table, const manifest& session) {
    try {
        static_cast<void>(table.begin({.version = 1}, session, in_time()));
    } catch (const coverage_error& failure) {
        table.rollback();
        return failure.what();
    }
    table.rollback();
    return {};
}

}  // namespace

static_assert(HasDtypeConversion<parameter_table>);
static_assert(!HasDtypeConversion<archetypes::weight_sink>);

TEST_CASE("A table that converts takes other dtypes and gives destinations of its own") {
    for (const commit_mode mode :
         {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        auto options = converting();
        options.mode = mode;
        parameter_table table{manifest{held}, options};
        CHECK(table.converts_dtypes());
        const manifest session{sent(dtype::f32, dtype::f16, dtype::i32)};
        const auto to = table.begin({.version = 1}, session, in_time());
        REQUIRE(to.size() == 3);
        CHECK(to[0].where.type() == dtype::bf16);
        CHECK(to[1].where.type() == dtype::f32);
        CHECK(to[2].where.type() == dtype::i32);
        CHECK(to[0].where.extents() == shape{4, 2});

        const std::vector<float> weights{1.0F, 2.5F, -3.0F, 4.0F, 1.0F / 3.0F, 6.0F, 7.0F, 1e-40F};
        convert_tensor(to[0].where, {std::as_bytes(std::span{weights}).data(), dtype::f32, {4, 2}});
        table.prepare(in_time());
        table.exchange(in_time());
        table.commit(1);
        const auto live = table.acquire();
        CHECK(live.version() == 1);
        const auto a = live.find("tied");
        REQUIRE(a.has_value());
        CHECK(a->type() == dtype::bf16);
        const auto* const halves = reinterpret_cast<const std::uint16_t*>(a->data());
        for (std::size_t i = 0; i < weights.size(); ++i) {
            CHECK(halves[i] == bf16_from_f32(weights[i]));
        }
    }
}

TEST_CASE(
    "What does not convert is refused by name, as is another shape, or anything without the "
    "option") {
    parameter_table table{manifest{held}, converting()};
    CHECK(text_of_begin(table, manifest{sent(dtype::f32, dtype::f32, dtype::f32)})
              .find("expected int32[2], found float32[2]") != std::string::npos);
    CHECK(text_of_begin(table, manifest{sent(dtype::u16, dtype::f32, dtype::i32)})
              .find("expected bfloat16[4, 2], found uint16[4, 2]") != std::string::npos);
    auto turned = sent(dtype::f32, dtype::f32, dtype::i32);
    turned[0].shape = {2, 4};
    CHECK(text_of_begin(table, manifest{turned}).find("found float32[2, 4]") != std::string::npos);
    CHECK(text_of_begin(table, manifest{sent(dtype::f64, dtype::bf16, dtype::i32)}).empty());

    parameter_table strict{manifest{held}, {.aliases = {{"tied", "a"}}}};
    CHECK_FALSE(strict.converts_dtypes());
    const auto remedy = [](std::string_view text) {
        return text.find("the table needs convert_dtypes") != std::string_view::npos;
    };
    const auto wants_option =
        text_of_begin(strict, manifest{sent(dtype::f32, dtype::f32, dtype::i32)});
    CHECK(wants_option.find("expected bfloat16[4, 2], found float32[4, 2]") != std::string::npos);
    CHECK(remedy(wants_option));
    // No option helps: no such conversion, another shape, or it is set already.
    const auto hopeless = [&](parameter_table& of, const std::vector<param_meta>& list) {
        const auto text = text_of_begin(of, manifest{list});
        return !text.empty() && !remedy(text);
    };
    CHECK(hopeless(strict, sent(dtype::u16, dtype::f32, dtype::i32)));
    CHECK(hopeless(strict, turned));
    CHECK(hopeless(table, sent(dtype::u16, dtype::f32, dtype::i32)));
}

TEST_CASE("Rounds of a converted manifest allocate nothing, and another dtype is noticed") {
    parameter_table table{manifest{held}, converting()};
    const manifest session{sent(dtype::f32, dtype::f32, dtype::i32)};
    const auto round = [&](const manifest& parameters, weight_version version) {
        const auto to = table.begin({.version = version}, parameters, in_time());
        const bool right = to[0].where.type() == dtype::bf16;
        table.prepare(in_time());
        table.commit(version);
        return right;
    };
    CHECK(round(session, 1));
    CHECK(round(session, 2));
    const weightwire_tests::allocation_watch watch;
    CHECK(round(session, 3));
    CHECK((watch.count() == 0 || !weightwire_tests::counts_allocations));
    const manifest other{sent(dtype::u16, dtype::f32, dtype::i32)};
    CHECK_FALSE(text_of_begin(table, other).empty());
    CHECK(round(session, 4));
}

TEST_CASE("Version 0 is loaded in the table's dtypes, whatever sessions may bring") {
    parameter_table table{manifest{held}, converting()};
    const std::vector<float> weights(8);
    const std::vector<named_tensor> first{
        {"a", {std::as_bytes(std::span{weights}).data(), dtype::f32, {4, 2}}}};
    CHECK_THROWS_AS(table.initialize(first), coverage_error);
}
