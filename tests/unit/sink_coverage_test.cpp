// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/sinks/declared_parameters.hpp>
#include <weightwire/sinks/parameter_table.hpp>

#include "sink_test_support.hpp"

using namespace weightwire;
using sink_test::bytes_of;
using sink_test::fill;
using sink_test::soon;
using kind = destination::kind_type;

namespace {

const std::vector<param_meta> model{
    {"embed.weight", dtype::bf16, {4, 2}},   {"layers.0.q", dtype::bf16, {2, 2}},
    {"layers.0.k", dtype::bf16, {2, 2}},     {"layers.1.q", dtype::bf16, {2, 2}},
    {"layers.1.k", dtype::bf16, {2, 2}},     {"norm.weight", dtype::f32, {2}},
    {"lm_head.weight", dtype::bf16, {4, 2}}, {"lm_head.scale", dtype::f32, {4}}};

manifest only(std::vector<std::string_view> names) {
    std::vector<param_meta> list;
    for (const auto name : names) {
        for (const auto& each : model) {
            if (each.name == name) {
                list.push_back(each);
            }
        }
    }
    return manifest{std::move(list)};
}

manifest without(std::string_view name) {
    std::vector<param_meta> list;
    for (const auto& each : model) {
        if (each.name != name) {
            list.push_back(each);
        }
    }
    return manifest{std::move(list)};
}

/// The coverage_error that begin throws; fails the test when it does not.
coverage_error refusal(parameter_table& table, const manifest& parameters, bool partial = false) {
    try {
        static_cast<void>(table.begin({.version = 1, .partial = partial}, parameters, soon()));
    } catch (const coverage_error& problem) {
        CHECK(problem.context().phase == phase::start);
        CHECK(problem.kind() == "coverage");
        return problem;
    }
    table.rollback();
    FAIL("begin returned");
    return coverage_error{"unreachable"};
}

void check_names(const coverage_error& problem, std::string_view tensor, std::string_view text) {
    CHECK(problem.context().tensor == tensor);
    CHECK_MESSAGE(problem.text().find(text) != std::string::npos, problem.text());
}

}  // namespace

TEST_CASE("a parameter that the worker does not have is named") {
    parameter_table table{model};
    auto list = model;
    list.push_back({"layers.2.q", dtype::bf16, {2, 2}});
    check_names(refusal(table, manifest{list}), "layers.2.q", "expected one of the 8 parameters");
}

TEST_CASE("a missing parameter is named, with how many are missing") {
    parameter_table table{model};
    check_names(refusal(table, without("layers.1.q")), "layers.1.q",
                "expected bfloat16[2, 2], but the update does not have it (1 of 8");
    check_names(refusal(table, only({"norm.weight"})), "embed.weight", "7 of 8 are missing");
    check_names(refusal(table, manifest{}), "embed.weight", "8 of 8 are missing");
}

TEST_CASE("another shape or dtype is named with what was expected and found") {
    parameter_table table{model};
    auto list = model;
    list[2].shape = {2, 3};
    check_names(refusal(table, manifest{list}), "layers.0.k",
                "expected bfloat16[2, 2], found bfloat16[2, 3]");
    list[2] = {"layers.0.k", dtype::f16, {2, 2}};
    check_names(refusal(table, manifest{list}), "layers.0.k",
                "expected bfloat16[2, 2], found float16[2, 2]");
}

TEST_CASE("a refused manifest leaves no trace in the next session") {
    parameter_table table{model};
    sink_test::update(table, 1);
    static_cast<void>(refusal(table, without("norm.weight")));
    sink_test::update(table, 2);
    CHECK(table.version() == 2);
}

TEST_CASE("the order of a manifest is free, and destinations follow it") {
    parameter_table table{model};
    auto list = model;
    std::swap(list[0], list[5]);
    std::swap(list[1], list[7]);
    const manifest shuffled{list};
    for (const weight_version version : {1U, 2U, 3U}) {
        fill(table.begin({.version = version}, shuffled, soon()), shuffled, version);
        table.prepare(soon());
        table.commit(version);
        const auto held = table.acquire();
        for (std::size_t i = 0; i < held.size(); ++i) {
            CHECK(bytes_of(held.tensor(i)) ==
                  sink_test::pattern(version, held.name(i), held.tensor(i).byte_size()));
        }
    }
}

TEST_CASE("frozen parameters need not come, are not written, and keep their bytes") {
    parameter_table table{model, {.frozen = {"embed.weight", "norm.weight"}}};
    const auto partial_list = without("norm.weight");  // one comes, one does not
    const auto before = bytes_of(*table.acquire().find("embed.weight"));
    const auto destinations = table.begin({.version = 1}, partial_list, soon());
    CHECK(destinations[0].kind == kind::frozen);
    CHECK(destinations[0].where.data() == nullptr);
    CHECK(destinations[1].kind == kind::place);
    fill(destinations, partial_list, 1);
    table.prepare(soon());
    table.commit(1);
    CHECK(bytes_of(*table.acquire().find("embed.weight")) == before);

    auto reshaped = model;
    reshaped[0].shape = {4, 3};
    check_names(refusal(table, manifest{reshaped}), "embed.weight", "bfloat16[4, 3]");
}

TEST_CASE("tied weights share storage, show both names, and are written once") {
    const parameter_table_options options{.aliases = {{"lm_head.weight", "embed.weight"}}};
    parameter_table table{model, options};
    CHECK(table.acquire().find("lm_head.weight")->data() ==
          table.acquire().find("embed.weight")->data());

    SUBCASE("both names come: the owner's bytes count") {
        const auto destinations = table.begin({.version = 1}, manifest{model}, soon());
        CHECK(destinations[0].kind == kind::place);
        CHECK(destinations[6].kind == kind::alias);
        CHECK(destinations[6].alias_of == 0);
        CHECK(destinations[6].where.data() == nullptr);
        table.rollback();
        sink_test::update(table, 1);
        const auto held = table.acquire();
        CHECK(bytes_of(*held.find("lm_head.weight")) == sink_test::pattern(1, "embed.weight", 16));
        CHECK(held.find("lm_head.weight")->data() == held.find("embed.weight")->data());
        CHECK(held.size() == 8);
    }
    SUBCASE("only the alias comes: it is written") {
        const auto list = without("embed.weight");
        const auto destinations = table.begin({.version = 1}, list, soon());
        CHECK(destinations[5].kind == kind::place);
        fill(destinations, list, 1);
        table.prepare(soon());
        table.commit(1);
        CHECK(bytes_of(*table.acquire().find("embed.weight")) ==
              sink_test::pattern(1, "lm_head.weight", 16));
    }
    SUBCASE("only the owner comes") {
        const auto list = without("lm_head.weight");
        CHECK(table.begin({.version = 1}, list, soon())[0].kind == kind::place);
        table.rollback();
    }
    SUBCASE("neither comes") {
        auto list = without("lm_head.weight");
        std::vector<param_meta> rest{list.parameters().begin() + 1, list.parameters().end()};
        check_names(refusal(table, manifest{rest}), "embed.weight", "1 of 8");
    }
    SUBCASE("an alias of another shape is refused") {
        auto list = model;
        list[6].shape = {2, 4};
        check_names(refusal(table, manifest{list}), "lm_head.weight", "bfloat16[2, 4]");
    }
}

TEST_CASE("an alias that the list does not name is added, and chains lead to one owner") {
    parameter_table table{
        without("lm_head.weight"),
        {.aliases = {{"second", "lm_head.weight"}, {"lm_head.weight", "embed.weight"}}}};
    CHECK(table.parameters().size() == 9);
    const auto held = table.acquire();
    CHECK(held.find("second")->data() == held.find("embed.weight")->data());
    CHECK(held.find("lm_head.weight")->extents() == shape{4, 2});
}

TEST_CASE("a partial session covers each layer that it touches completely") {
    parameter_table table{model};
    const auto begins = [&](const manifest& list) {
        static_cast<void>(table.begin({.version = 1, .partial = true}, list, soon()));
        table.rollback();
        return true;
    };
    CHECK(begins(only({"layers.0.q", "layers.0.k"})));
    CHECK(begins(only({"norm.weight"})));
    CHECK(begins(only({"lm_head.weight", "lm_head.scale"})));
    CHECK(begins(manifest{}));
    check_names(refusal(table, only({"layers.0.q", "layers.1.q", "layers.1.k"}), true),
                "layers.0.k", "names layers.0.q of the same layer");
    check_names(refusal(table, only({"lm_head.weight"}), true), "lm_head.scale",
                "names lm_head.weight of the same layer");
    CHECK(begins(only({"layers.0.q", "layers.0.k"})));
    check_names(refusal(table, only({"layers.0.q", "layers.0.k"}), false), "embed.weight",
                "6 of 8");
}

TEST_CASE("a frozen parameter does not count as part of the layer that it is in") {
    parameter_table table{model, {.frozen = {"layers.0.k"}}};
    static_cast<void>(table.begin({.version = 1, .partial = true}, only({"layers.0.q"}), soon()));
    table.rollback();
}

TEST_CASE("contradictory declarations are usage errors that name the parameter") {
    const auto refused = [](parameter_table_options options, std::string_view name) {
        try {
            parameter_table table{model, std::move(options)};
            FAIL("the table was made");
        } catch (const usage_error& problem) {
            CHECK(problem.context().tensor == name);
        }
    };
    refused({.frozen = {"absent"}}, "absent");
    refused({.aliases = {{"norm.weight", "absent"}}}, "absent");
    refused({.aliases = {{"norm.weight", "embed.weight"}}}, "norm.weight");
    refused({.aliases = {{"a", "b"}, {"b", "a"}}}, "a");
    refused({.aliases = {{"a", "a"}}}, "a");
    refused({.aliases = {{"a", "norm.weight"}, {"a", "embed.weight"}}}, "a");
    refused({.frozen = {"a"}, .aliases = {{"a", "norm.weight"}}}, "a");
}
