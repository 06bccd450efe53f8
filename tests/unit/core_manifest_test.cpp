// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>

namespace {

using namespace weightwire;

constexpr auto big = std::numeric_limits<std::int64_t>::max();

/// The tensor that constructing a manifest of `parameters` complains of.
std::string blamed(std::vector<param_meta> parameters) {
    try {
        const manifest made{std::move(parameters)};
    } catch (const data_error& problem) {
        return problem.context().tensor;
    }
    return "nothing";
}

TEST_CASE("manifest: keeps order, finds by name, adds up sizes") {
    const manifest made{
        {{"b", dtype::f32, {2, 3}}, {"a", dtype::bf16, {5}}, {"z", dtype::u8, {0}}}};
    CHECK(made.size() == 3);
    CHECK(made[0].name == "b");
    CHECK(made.find("a") == 1);
    CHECK(made.find("c") == manifest::npos);
    CHECK(made.total_bytes() == 34);
    CHECK(made.set_name() == "model");
    CHECK(made[0].byte_size() == 24);
    CHECK(manifest{}.size() == 0);
    CHECK(manifest{}.find("") == manifest::npos);
}

TEST_CASE("manifest: a name that is missing or occurs twice is refused, and named") {
    CHECK(blamed({{"a", dtype::u8, {}}, {"b", dtype::u8, {}}, {"a", dtype::u8, {}}}) == "a");
    CHECK_THROWS_AS((manifest{{{"", dtype::u8, {}}}}), data_error);
}

TEST_CASE("manifest: a size that does not exist is refused, and named") {
    CHECK(blamed({{"a", dtype::u8, {1}}, {"huge", dtype::f64, {big}}}) == "huge");
    CHECK(blamed({{"six", dtype::f6_e2m3, {1}}}) == "six");
    CHECK(blamed({{"a", dtype::u8, {big}}, {"b", dtype::u8, {big}}, {"c", dtype::u8, {2}}}) == "c");
}

TEST_CASE("manifest: views into it survive a move, and a copy has its own index") {
    manifest made{{{"a", dtype::u8, {1}}, {"b", dtype::u8, {2}}}};
    const auto* first = &made[0];
    const manifest moved = std::move(made);
    CHECK(&moved[0] == first);
    CHECK(moved.find("b") == 1);
    manifest copy = moved;
    CHECK(&copy[0] != first);
    CHECK(copy.find("b") == 1);
    copy = manifest{{{"c", dtype::u8, {1}}}};
    CHECK(copy.find("c") == 0);
    CHECK(copy.find("b") == manifest::npos);
    CHECK(moved.find("b") == 1);
}

TEST_CASE("manifest hash: equal lists hash equally; name, dtype, shape, order and set each count") {
    const std::vector<param_meta> list{{"a", dtype::f32, {2, 3}}, {"b", dtype::f32, {2, 3}}};
    const auto hash = manifest{list}.hash();
    CHECK(manifest{list}.hash() == hash);
    CHECK(manifest{list, "adapter"}.hash() != hash);
    CHECK(manifest{{list[1], list[0]}}.hash() != hash);
    CHECK(manifest{{list[0]}}.hash() != hash);
    CHECK(manifest{{{"a", dtype::i32, {2, 3}}, list[1]}}.hash() != hash);
    CHECK(manifest{{{"a", dtype::f32, {3, 2}}, list[1]}}.hash() != hash);
    CHECK(manifest{{{"c", dtype::f32, {2, 3}}, list[1]}}.hash() != hash);
}

}  // namespace
