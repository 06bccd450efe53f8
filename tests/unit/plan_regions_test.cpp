// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/regions.hpp>

namespace {

using namespace weightwire;
using plan::region;
using plan::region_dimension;

region make(std::int64_t from, std::int64_t to, std::vector<region_dimension> dimensions) {
    return {.source = 0,
            .destination = 0,
            .source_offset = from,
            .destination_offset = to,
            .dimensions = std::move(dimensions)};
}

region normal(region value) {
    plan::normalize(value);
    return value;
}

/// Destination element -> source element, by counting indices; each destination element once.
std::map<std::int64_t, std::int64_t> elements_of(const region& value) {
    std::map<std::int64_t, std::int64_t> out;
    for (std::uint64_t i = 0; i < value.elements(); ++i) {
        auto left = static_cast<std::int64_t>(i);
        auto from = value.source_offset;
        auto to = value.destination_offset;
        for (auto d = value.dimensions.size(); d-- > 0;) {
            const auto& dimension = value.dimensions[d];
            from += left % dimension.extent * dimension.source_stride;
            to += left % dimension.extent * dimension.destination_stride;
            left /= dimension.extent;
        }
        REQUIRE(out.emplace(to, from).second);
    }
    return out;
}

/// Every `step`-th of some elements in each dimension of a C-order parameter of these extents.
region random_part(std::mt19937& random, const std::vector<std::int64_t>& extents) {
    region out = make(static_cast<std::int64_t>(random() % 20), 0, {});
    std::int64_t stride = 1;
    for (auto d = extents.size(); d-- > 0;) {
        const auto step = static_cast<std::int64_t>(random() % 3) + 1;
        const auto begin = static_cast<std::int64_t>(random()) % extents[d];
        const auto most = (extents[d] - begin + step - 1) / step;
        const auto count = static_cast<std::int64_t>(random()) % most + 1;
        out.destination_offset += begin * stride;
        out.dimensions.push_back(
            {count, static_cast<std::int64_t>(random() % 4) * (random() % 3 == 0 ? 1 : stride),
             stride * step});
        stride *= extents[d];
    }
    std::ranges::reverse(out.dimensions);
    return out;
}

std::vector<std::int64_t> random_extents(std::mt19937& random) {
    std::vector<std::int64_t> out;
    for (auto left = random() % 4 + 1; left > 0; --left) {
        out.push_back(static_cast<std::int64_t>(random() % 6) + 1);
    }
    return out;
}

param_meta parameter(std::string name, shape extents, dtype type = dtype::bf16) {
    return {std::move(name), type, extents};
}

TEST_CASE("regions: whole tensors are one dimension, a single element is none") {
    CHECK(normal(make(0, 0, {{4, 6, 6}, {2, 3, 3}, {3, 1, 1}})) == make(0, 0, {{24, 1, 1}}));
    CHECK(normal(make(5, 7, {{1, 9, 9}, {1, 0, 0}})) == make(5, 7, {}));
    CHECK(normal(make(5, 7, {})).elements() == 1);
    CHECK(normal(make(5, 7, {{3, 1, 1}, {0, 4, 4}})) == make(0, 0, {{0, 0, 0}}));
    CHECK(make(0, 0, {{5, 8, 3}, {3, 1, 1}}).bytes(2) == 30);
}

TEST_CASE("regions: what moves the same elements has one normal form and one hash") {
    std::mt19937 random{11};
    for (int i = 0; i < 2000; ++i) {
        const auto before = random_part(random, random_extents(random));
        const auto one = normal(before);
        REQUIRE(elements_of(one) == elements_of(before));
        REQUIRE(normal(one) == one);
        // Dimensions in another order, some cut in two, some of extent 1 added.
        auto other = before;
        std::vector<region_dimension> cut;
        for (const auto& d : other.dimensions) {
            if (d.extent % 2 == 0 && random() % 2 == 0) {
                cut.push_back({d.extent / 2, 2 * d.source_stride, 2 * d.destination_stride});
                cut.push_back({2, d.source_stride, d.destination_stride});
            } else {
                cut.push_back(d);
            }
        }
        cut.push_back({1, 77, 99});
        std::ranges::shuffle(cut, random);
        other.dimensions = cut;
        REQUIRE(normal(other) == one);
        REQUIRE(hash_of(normal(other)) == hash_of(one));
    }
}

TEST_CASE("regions: different ones have different hashes") {
    std::set<std::uint64_t> hashes;
    const auto first = make(3, 4, {{5, 10, 20}, {6, 1, 1}});
    std::vector<region> all{first};
    for (int field = 0; field < 10; ++field) {
        auto changed = first;
        auto& dimension = changed.dimensions[static_cast<std::size_t>(field) % 2];
        switch (field / 2) {
            case 0: ++dimension.extent; break;
            case 1: ++dimension.source_stride; break;
            case 2: ++dimension.destination_stride; break;
            case 3: (field % 2 == 0 ? changed.source : changed.destination) += 1; break;
            default: (field % 2 == 0 ? changed.source_offset : changed.destination_offset) += 1;
        }
        REQUIRE(changed != first);
        all.push_back(changed);
    }
    for (const auto& value : all) {
        CHECK(hashes.insert(hash_of(value)).second);
    }
    const std::vector<region> pair{all[0], all[1]};
    const std::vector<region> reversed{all[1], all[0]};
    CHECK(plan::hash_of(std::span<const region>{pair}) !=
          plan::hash_of(std::span<const region>{reversed}));
    CHECK(plan::hash_of(std::span<const region>{pair}) !=
          plan::hash_of(std::span<const region>{pair}.first(1)));
}

TEST_CASE("regions: runs give every byte once, in order, and are as long as they can be") {
    std::mt19937 random{12};
    for (int i = 0; i < 2000; ++i) {
        const auto value = normal(random_part(random, random_extents(random)));
        const std::uint64_t item = std::array{1U, 2U, 4U, 8U}[random() % 4];
        std::map<std::int64_t, std::int64_t> seen;
        std::array<std::uint64_t, 2> ends{std::numeric_limits<std::uint64_t>::max(), 0};
        plan::for_each_run(value, item,
                           [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
                               REQUIRE(bytes > 0);
                               REQUIRE(bytes % item == 0);
                               REQUIRE((from % item == 0 && to % item == 0));
                               REQUIRE(to >= ends[1]);
                               REQUIRE((from != ends[0] || to != ends[1]));
                               for (std::uint64_t at = 0; at < bytes; at += item) {
                                   seen[static_cast<std::int64_t>((to + at) / item)] =
                                       static_cast<std::int64_t>((from + at) / item);
                               }
                               ends = {from + bytes, to + bytes};
                           });
        REQUIRE(seen == elements_of(value));
    }
    int none = 0;
    plan::for_each_run(normal(make(0, 0, {{0, 1, 1}})), 2,
                       [&](std::uint64_t, std::uint64_t, std::uint64_t) { ++none; });
    CHECK(none == 0);
}

TEST_CASE("regions: overlap is found exactly") {
    std::mt19937 random{13};
    int overlapping = 0;
    for (int i = 0; i < 6000; ++i) {
        // Of one parameter seen in two shapes, or of two that only begin alike.
        const auto extents = random_extents(random);
        const auto a = normal(random_part(random, extents));
        const auto b =
            normal(random_part(random, random() % 3 == 0 ? random_extents(random) : extents));
        const auto in_a = elements_of(a);
        const auto in_b = elements_of(b);
        const bool shared = std::ranges::any_of(
            in_a, [&](const auto& element) { return in_b.contains(element.first); });
        REQUIRE(plan::destinations_overlap(a, b) == shared);
        REQUIRE(plan::destinations_overlap(b, a) == shared);
        overlapping += shared ? 1 : 0;
    }
    CHECK(overlapping > 1000);
    CHECK(overlapping < 5000);
}

TEST_CASE(
    "regions: overlap of large regions takes few steps, and is never missed for lack of them") {
    const std::int64_t rows = std::int64_t{1} << 30U;
    const auto left = make(0, 0, {{rows, 512, 1024}, {512, 1, 1}});
    const auto right = make(0, 512, {{rows, 512, 1024}, {512, 1, 1}});
    const auto wider = make(0, 511, {{rows, 512, 1024}, {512, 1, 1}});
    const auto band = make(0, 1024 * 7 + 512, {{512, 1, 1}});
    CHECK_FALSE(plan::destinations_overlap(left, right));
    CHECK(plan::destinations_overlap(left, wider));
    CHECK_FALSE(plan::destinations_overlap(left, band));
    CHECK(plan::destinations_overlap(right, band));
    auto elsewhere = right;
    elsewhere.destination = 1;
    CHECK_FALSE(plan::destinations_overlap(wider, elsewhere));
    // Even ones and odd ones.
    const auto fours = make(0, 0, {{rows, 1, 4}});
    CHECK_FALSE(plan::destinations_overlap(fours, make(0, 1, {{rows, 1, 6}})));
    CHECK(plan::destinations_overlap(fours, make(0, 2, {{rows, 1, 6}})));
    // Elements 0 and 1 of every 10, and 3 of every 15: disjoint, but not to be seen in few steps.
    const auto tens = make(0, 0, {{rows, 0, 10}, {2, 1, 1}});
    const auto fifteens = make(0, 3, {{rows, 1, 15}});
    CHECK(plan::destinations_overlap(tens, fifteens));
    const auto some = make(0, 3, {{1000, 1, 15}});
    CHECK_FALSE(plan::destinations_overlap(tens, some));
}

TEST_CASE("regions: among many, an overlap and the first element left out are found") {
    std::mt19937 random{14};
    int overlaps = 0;
    for (int i = 0; i < 1500; ++i) {
        const auto extents = random_extents(random);
        std::int64_t numel = 1;
        for (const auto extent : extents) {
            numel *= extent;
        }
        std::vector<region> all;
        std::vector<std::size_t> places;
        std::map<std::int64_t, int> times;
        for (std::size_t k = random() % 4; k-- > 0;) {
            all.push_back(normal(random_part(random, extents)));
            places.push_back(all.size() - 1);
            for (const auto& [to, from] : elements_of(all.back())) {
                ++times[to];
            }
        }
        const auto found = plan::find_overlap(all, places);
        const bool twice = std::ranges::any_of(times, [](const auto& t) { return t.second > 1; });
        REQUIRE((found != plan::no_pair) == twice);
        if (twice) {
            ++overlaps;
            REQUIRE(found.first < found.second);
            REQUIRE(plan::destinations_overlap(all[found.first], all[found.second]));
        }
        std::int64_t first = 0;
        while (first < numel && times.contains(first)) {
            ++first;
        }
        REQUIRE(plan::first_unwritten(all, places, static_cast<std::uint64_t>(numel)) ==
                static_cast<std::uint64_t>(first));
    }
    CHECK(overlaps > 300);
}

TEST_CASE("regions: what another made is checked against both shapes") {
    const auto source = parameter("from", {8, 16});
    const auto destination = parameter("to", {8, 4});
    const auto good = make(4, 0, {{8, 16, 4}, {4, 1, 1}});
    CHECK_NOTHROW(plan::require_within(good, source, destination));
    auto untouched = make(0, 0, {{8, 0, 4}, {3, 0, 1}});
    untouched.source = region::no_source;
    CHECK_NOTHROW(plan::require_within(untouched, parameter("", {}), destination));

    constexpr auto huge = std::numeric_limits<std::int64_t>::max();
    const auto refuse = [&](region value, const std::string& tensor, const std::string& words) {
        try {
            plan::require_within(value, source, destination);
            FAIL("accepted: " << words);
        } catch (const mismatch_error& refused) {
            CHECK(refused.context().tensor == tensor);
            CHECK(refused.context().phase == phase::plan);
            CHECK(std::string{refused.what()}.find(words) != std::string::npos);
        }
    };
    refuse(make(13, 0, {{8, 16, 4}, {4, 1, 1}}), "from", "ends at 128");
    refuse(make(4, 1, {{8, 16, 4}, {4, 1, 1}}), "to", "ends at 32");
    refuse(make(-1, 0, {{4, 1, 1}}), "from", "begins at element -1");
    refuse(make(0, -1, {{4, 1, 1}}), "to", "begins at element -1");
    refuse(make(huge, 0, {{4, 1, 1}}), "from", "from");
    refuse(make(0, 0, {{huge, huge, 1}}), "from", "stride that none may have");
    refuse(make(0, 0, {{huge, 0, huge}}), "to", "stride that none may have");
    refuse(make(0, 0, {{4, -1, 1}}), "from", "stride that none may have");
    refuse(make(0, 0, {{-4, 1, 1}}), "from", "extent");
    refuse(make(0, 0, {{0, 1, 1}}), "from", "extent");
    refuse(make(0, 0, {{4, 1, 0}}), "to", "writes an element twice");
    refuse(make(0, 0, {{4, 1, 2}, {4, 8, 1}}), "to", "writes an element twice");
    refuse(make(0, 0, {{4, 1, 1}, {2, 8, 8}}), "to", "not in order");
    refuse(make(0, 0, {{2, 4, 4}, {4, 1, 1}}), "to", "normal form");
    refuse(make(0, 0, {{1, 1, 1}}), "to", "normal form");
    auto nowhere = make(0, 0, {{8, huge, 4}, {4, 0, 1}});
    nowhere.source = region::no_source;
    refuse(nowhere, "to", "no source");
    nowhere = make(1, 0, {{8, 0, 4}});
    nowhere.source = region::no_source;
    refuse(nowhere, "to", "no source");
    CHECK_THROWS_AS(
        plan::require_within(make(0, 0, {{2, huge / 2 + 1, 1}}),
                             parameter("from", {huge}, dtype::u8), parameter("to", {2}, dtype::u8)),
        mismatch_error);
    try {
        plan::require_within(good, parameter("from", {8, 16}, dtype::f16), destination);
        FAIL("accepted another dtype");
    } catch (const mismatch_error& refused) {
        CHECK(refused.context().tensor == "from");
    }
}

}  // namespace
