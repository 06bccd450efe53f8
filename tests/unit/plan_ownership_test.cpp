// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ownership.hpp>

namespace {

using namespace weightwire;
using plan::held_positions;
using plan::ownership;
using plan::position_range;
using plan::position_set;

manifest numbered(std::size_t count) {
    std::vector<param_meta> list;
    for (std::size_t i = 0; i < count; ++i) {
        list.push_back({"p" + std::to_string(i), dtype::u8, {static_cast<std::int64_t>(i) + 1}});
    }
    return manifest{std::move(list)};
}

TEST_CASE("ownership: a set of positions is the same however its ranges are given") {
    std::mt19937 random{5};
    for (int i = 0; i < 300; ++i) {
        std::set<std::size_t> expected;
        std::vector<position_range> ranges;
        for (int k = 0; k < 6; ++k) {
            const std::size_t begin = random() % 40;
            const auto end = begin + random() % 8;
            ranges.push_back({begin, end});
            for (auto p = begin; p < end; ++p) {
                expected.insert(p);
            }
        }
        const position_set made{ranges};
        CHECK(made.count() == expected.size());
        CHECK(made.empty() == expected.empty());
        CHECK(made.end() == (expected.empty() ? 0 : *expected.rbegin() + 1));
        for (std::size_t p = 0; p < 60; ++p) {
            CHECK(made.contains(p) == expected.contains(p));
        }
        for (std::size_t k = 1; k < made.ranges().size(); ++k) {
            CHECK(made.ranges()[k - 1].end < made.ranges()[k].begin);
        }
        CHECK(plan::position_set_from_text(plan::to_text(made), 60) == made);
    }
    CHECK(position_set::all(3).count() == 3);
    CHECK(position_set::all(0).empty());
}

TEST_CASE("ownership: positions as text have one spelling") {
    CHECK(plan::to_text(position_set{{{0, 36}, {72, 73}, {100, 120}}}) == "0-35,72,100-119");
    CHECK(plan::to_text(position_set{}).empty());
    CHECK(plan::position_set_from_text("", 0).empty());
    CHECK(plan::position_set_from_text("0-1", 2) == position_set::all(2));
    for (const std::string_view wrong : {"0-2",
                                         "2",
                                         "1-0",
                                         "1-1",
                                         "0,1",
                                         "1,0",
                                         "0,0",
                                         ",",
                                         "0,",
                                         "-1",
                                         "0-",
                                         "01",
                                         "+1",
                                         " 1",
                                         "1 ",
                                         "0--1",
                                         "1,",
                                         "0x1",
                                         "99999999999999999999999",
                                         "a"}) {
        INFO("text: ", wrong);
        CHECK_THROWS_AS((void)plan::position_set_from_text(wrong, 2), protocol_error);
    }
}

TEST_CASE("ownership: names become positions") {
    const auto list = numbered(6);
    const std::vector<std::string> names{"p5", "p0", "p1", "p1"};
    CHECK(plan::to_text(held_positions(list, names)) == "0-1,5");
    CHECK(held_positions(list, std::vector<std::string_view>{}).empty());
    try {
        (void)held_positions(list, std::vector<std::string>{"p1", "q"});
        FAIL("an unknown name is taken");
    } catch (const data_error& refusal) {
        CHECK(refusal.context().tensor == "q");
    }
}

TEST_CASE("ownership: the holders of every parameter, and those that have the same") {
    std::mt19937 random{6};
    for (int i = 0; i < 200; ++i) {
        const std::size_t count = 1 + random() % 40;
        const int ranks = 1 + static_cast<int>(random() % 7);
        const auto list = numbered(count);
        std::vector<std::vector<position_range>> ranges(static_cast<std::size_t>(ranks));
        std::vector<std::vector<int>> expected(count);
        for (std::size_t p = 0; p < count; ++p) {
            const auto always = static_cast<int>(random() % static_cast<unsigned>(ranks));
            for (int r = 0; r < ranks; ++r) {
                if (r == always || random() % 4 == 0) {
                    ranges[static_cast<std::size_t>(r)].push_back({p, p + 1});
                    expected[p].push_back(r);
                }
            }
        }
        std::vector<position_set> held;
        for (auto& one : ranges) {
            held.emplace_back(std::move(one));
        }
        const ownership made{list, held};
        CHECK(made.ranks() == ranks);
        CHECK(made.parameters() == count);
        std::vector<std::uint64_t> bytes(made.classes().size());
        std::vector<std::size_t> parameters(made.classes().size());
        std::size_t seen = 0;
        for (std::size_t p = 0; p < count; ++p) {
            const auto holders = made.holders(p);
            CHECK(std::vector<int>(holders.begin(), holders.end()) == expected[p]);
            const auto c = made.class_of(p);
            CHECK(c <= seen);
            seen = std::max(seen, c + 1);
            bytes[c] += list[p].byte_size();
            ++parameters[c];
        }
        std::set<std::vector<int>> distinct;
        for (std::size_t c = 0; c < made.classes().size(); ++c) {
            CHECK(made.classes()[c].bytes == bytes[c]);
            CHECK(made.classes()[c].parameters == parameters[c]);
            CHECK(distinct.insert(made.classes()[c].holders).second);
        }
        for (int r = 0; r < ranks; ++r) {
            CHECK(made.held(r) == held[static_cast<std::size_t>(r)]);
        }
    }
}

TEST_CASE("ownership: the digest says whether ranks agree") {
    const auto list = numbered(8);
    const std::vector<position_set> held{position_set{{{0, 5}}}, position_set{{{4, 8}}}};
    const ownership made{list, held};
    CHECK(made.digest() == ownership{list, held}.digest());
    std::set<std::uint64_t> others{made.digest()};
    const auto is_new = [&](const manifest& parameters, std::vector<position_set> sets) {
        return others.insert(ownership{parameters, std::move(sets)}.digest()).second;
    };
    CHECK(is_new(list, {held[1], held[0]}));
    CHECK(is_new(list, {held[0], held[1], {}}));
    CHECK(is_new(list, {held[0], position_set{{{3, 8}}}}));
    CHECK(is_new(list, {held[0], position_set{{{4, 5}, {5, 8}, {0, 1}}}}));
    CHECK(is_new(numbered(7), {held[0], position_set{{{4, 7}}}}));
}

TEST_CASE("ownership: a parameter without a holder is named, the first of them") {
    const auto list = numbered(9);
    const auto orphan = [&](std::vector<position_set> held) -> std::string {
        try {
            const ownership made{list, std::move(held)};
        } catch (const coverage_error& refusal) {
            return refusal.context().tensor;
        }
        return {};
    };
    CHECK(orphan({position_set{{{0, 9}}}}).empty());
    CHECK(orphan({position_set{{{0, 4}}}, position_set{{{5, 8}}}}) == "p4");
    CHECK(orphan({position_set{{{0, 4}}}, position_set{{{4, 8}}}}) == "p8");
    CHECK(orphan({position_set{}}) == "p0");
    try {
        const ownership made{list, {position_set{{{0, 9}}}, position_set{{{3, 10}}}}};
        FAIL("a position beyond the list is taken");
    } catch (const mismatch_error& refusal) {
        CHECK(refusal.context().rank == 1);
    }
    CHECK_THROWS_AS((ownership{list, {}}), usage_error);
    const ownership nothing{numbered(0), {position_set{}}};
    CHECK(nothing.classes().empty());
}

}  // namespace
