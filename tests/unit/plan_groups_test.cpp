// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/groups.hpp>

namespace {

using namespace weightwire;
using plan::first_reopened;
using plan::group_runs;
using plan::group_sizes;
using plan::layerwise_groups;
using numbers = std::vector<std::size_t>;

manifest named(const std::vector<std::string>& names) {
    std::vector<param_meta> parameters;
    for (const auto& name : names) {
        parameters.push_back({name, dtype::u8, {1}});
    }
    return manifest{std::move(parameters)};
}

numbers groups(const std::vector<std::string>& names) {
    return layerwise_groups(named(names)).group_of;
}

TEST_CASE("groups: a checkpoint's layers are groups, what comes before and after too") {
    const auto list = named({"model.embed_tokens.weight", "model.layers.0.mlp.up.weight",
                             "model.layers.0.mlp.down.weight", "model.layers.1.mlp.up.weight",
                             "model.norm.weight", "lm_head.weight"});
    const auto assignment = layerwise_groups(list);
    CHECK(assignment.group_of == numbers{0, 1, 1, 2, 3, 3});
    CHECK(assignment.group_count == 4);
    CHECK(group_runs(assignment) == numbers{1, 2, 1, 2});
    CHECK(first_reopened(assignment) == manifest::npos);
}

TEST_CASE("groups: only the outermost segment of digits counts") {
    CHECK(groups({"layers.3.experts.0.w", "layers.3.experts.1.w", "layers.4.experts.0.w"}) ==
          numbers{0, 0, 1});
}

TEST_CASE("groups: a segment must be digits from end to end") {
    CHECK(groups({"a.1x.w", "a.x1.w", "a..w", "a.-1.w"}) == numbers{0, 0, 0, 0});
    CHECK(groups({"7", "7.w", "w.7"}) == numbers{0, 0, 1});
}

TEST_CASE("groups: within a prefix, numbers order the groups, whatever the list's order") {
    CHECK(groups({"l.10.w", "l.9.w", "l.2.w"}) == numbers{2, 1, 0});
    CHECK(groups({"l.07.w", "l.7.w", "l.0.w", "l.000.w"}) == numbers{1, 1, 0, 0});
    // Beyond 64 bits.
    CHECK(groups({"l.100000000000000000000000.w", "l.99999999999999999999999.w"}) == numbers{1, 0});
}

TEST_CASE("groups: prefixes are ordered by first appearance") {
    CHECK(groups({"z.0.w", "a.0.w", "z.1.w", "a.1.w"}) == numbers{0, 2, 1, 3});
}

TEST_CASE(
    "groups: names without a number go first or last by where the first numbered one stands") {
    CHECK(groups({"a", "l.0.w", "b", "l.1.w", "c"}) == numbers{0, 1, 3, 2, 3});
    CHECK(groups({"l.0.w", "b"}) == numbers{0, 1});
    CHECK(groups({"a", "b"}) == numbers{0, 0});
    CHECK(layerwise_groups(manifest{}).group_count == 0);
    CHECK(group_runs(layerwise_groups(manifest{})).empty());
}

TEST_CASE("groups: an order that leaves a group and comes back is cut into runs, and found") {
    const auto assignment = layerwise_groups(named({"a", "l.0.w", "norm", "l.1.w", "head"}));
    CHECK(group_runs(assignment) == numbers{1, 1, 1, 1, 1});
    CHECK(first_reopened(assignment) == 4);
}

TEST_CASE("groups: over random names, every parameter has a group, none is empty, runs add up") {
    std::mt19937 random{5};
    for (int repeat = 0; repeat < 500; ++repeat) {
        std::vector<std::string> names;
        const auto count = random() % 30;
        for (std::size_t i = 0; i < count; ++i) {
            std::string name;
            for (auto segments = 1 + random() % 4; segments > 0; --segments) {
                name += random() % 2 == 0 ? std::to_string(random() % 12)
                                          : std::string(1 + random() % 2, 'a');
                name += ".";
            }
            names.push_back(name + "w" + std::to_string(i));
        }
        const auto list = named(names);
        const auto assignment = layerwise_groups(list);
        REQUIRE(assignment.group_of.size() == count);
        numbers population(assignment.group_count);
        for (const auto group : assignment.group_of) {
            REQUIRE(group < assignment.group_count);
            ++population[group];
        }
        REQUIRE(std::ranges::count(population, 0U) == 0);
        const auto runs = group_runs(assignment);
        REQUIRE(std::accumulate(runs.begin(), runs.end(), std::size_t{0}) == count);
        REQUIRE((first_reopened(assignment) == manifest::npos) ==
                (runs.size() == assignment.group_count));
    }
}

struct grouped_source : archetypes::weight_source {
    numbers sizes;
    [[nodiscard]] std::span<const std::size_t> groups() const { return sizes; }
};

TEST_CASE("group sizes: a source's own groups are taken and checked, else the list is cut") {
    const auto list = named({"l.0.a", "l.0.b", "l.1.a"});
    archetypes::weight_source without;
    CHECK(group_sizes(without, list) == numbers{2, 1});
    grouped_source own{{}, {1, 2}};
    CHECK(group_sizes(own, list) == numbers{1, 2});
    for (const auto& wrong : {numbers{}, numbers{1}, numbers{1, 1}, numbers{2, 2}, numbers{3, 0},
                              numbers{0, 3}, numbers{static_cast<std::size_t>(-1), 4}}) {
        own.sizes = wrong;
        CHECK_THROWS_AS((void)group_sizes(own, list), data_error);
    }
}

}  // namespace
