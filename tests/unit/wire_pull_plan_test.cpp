// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/wire/pull_plan_codec.hpp>

namespace {

using namespace weightwire;
using namespace std::string_literals;

constexpr std::size_t count = 1000;

/// Numbers of every length.
std::uint64_t any_number(std::mt19937_64& random) { return random() >> (random() % 64); }
std::int64_t any_element(std::mt19937_64& random) {
    return static_cast<std::int64_t>(any_number(random) >> 1U);
}
int any_rank(std::mt19937_64& random) { return static_cast<int>(random() % 300); }

plan::ownership all_held() {
    std::vector<param_meta> list;
    for (std::size_t i = 0; i < count; ++i) {
        list.push_back({"p" + std::to_string(i), dtype::u8, {8}});
    }
    // Classes of one parameter each would be 1000; these are 20.
    std::vector<plan::position_set> held(300, plan::position_set::all(count));
    for (std::size_t r = 0; r < 20; ++r) {
        held[r] = plan::position_set{{{0, r * 50}}};
    }
    return {manifest{std::move(list)}, std::move(held)};
}

plan::needs_report any_report(std::mt19937_64& random) {
    plan::needs_report report;
    for (std::size_t p = random() % 100; p < count; p += 1 + random() % 100) {
        report.needs.push_back({p, any_number(random), random()});
    }
    return report;
}

plan::worker_route any_route(std::mt19937_64& random, const plan::ownership& owners) {
    plan::worker_route route{.worker = any_rank(random), .least_split_bytes = any_number(random)};
    for (std::size_t c = 0; c < owners.classes().size(); c += 1 + random() % 3) {
        auto& made = route.classes.emplace_back(plan::class_shares{c, {}});
        for (auto k = random() % 4; k > 0; --k) {
            made.shares.push_back({any_rank(random), any_number(random)});
        }
    }
    for (std::size_t p = random() % 20; p < count; p += random() % 200) {
        const auto begin = any_number(random) / 2;
        route.shared.push_back(
            {p, begin, begin + any_number(random) / 2, any_rank(random), any_rank(random)});
    }
    return route;
}

plan::owner_part any_part(std::mt19937_64& random) {
    plan::owner_part part{
        .worker = any_rank(random), .owner = any_rank(random), .manifest_hash = random()};
    for (int ingester = -1; ingester < 3; ++ingester) {
        auto& section = part.sections.emplace_back();
        section.ingester = ingester;
        for (std::size_t p = random() % 50; p < count; p += random() % 200) {
            auto& read = section.reads.emplace_back(plan::pull_read{p, any_element(random), {}});
            for (auto d = random() % 4; d > 0; --d) {
                read.dimensions.push_back({any_element(random), any_element(random)});
            }
        }
        std::size_t first = 0;
        for (std::size_t group = 0; first < section.reads.size(); group += random() % 3) {
            const auto taken = 1 + random() % (section.reads.size() - first);
            section.chunks.push_back({group, first, taken, any_number(random)});
            first += taken;
        }
    }
    return part;
}

/// A cut or lengthened message is none, and a changed byte gives another message or none.
template <class Decode>
void require_strict(const std::string& bytes, std::mt19937_64& random, Decode&& decode) {
    for (std::size_t size = 0; size < bytes.size(); size += 1 + size / 16) {
        CHECK_THROWS_AS((void)decode(bytes.substr(0, size)), protocol_error);
    }
    CHECK_THROWS_AS((void)decode(bytes + "\0"s), protocol_error);
    for (int i = 0; i < 100; ++i) {
        auto changed = bytes;
        changed[random() % changed.size()] ^= static_cast<char>(1U << random() % 8);
        std::string again = changed;
        try {
            again = wire::encode(decode(changed));
        } catch (const protocol_error&) {
        }
        CHECK(again == changed);
    }
}

TEST_CASE("pull plan wire: messages come back as they were") {
    std::mt19937_64 random{41};
    const auto owners = all_held();
    REQUIRE(owners.classes().size() == 20);
    for (int i = 0; i < 60; ++i) {
        const auto report = any_report(random);
        const auto route = any_route(random, owners);
        const auto part = any_part(random);
        const auto as_report = [](const std::string& bytes) {
            return wire::decode_needs_report(bytes, count);
        };
        const auto as_route = [&](const std::string& bytes) {
            return wire::decode_worker_route(bytes, owners);
        };
        const auto as_part = [](const std::string& bytes) {
            return wire::decode_owner_part(bytes, count);
        };
        CHECK(as_report(wire::encode(report)) == report);
        CHECK(as_route(wire::encode(route)) == route);
        CHECK(as_part(wire::encode(part)) == part);
        CHECK(plan::hash_of(as_part(wire::encode(part))) == plan::hash_of(part));
        require_strict(wire::encode(report), random, as_report);
        require_strict(wire::encode(route), random, as_route);
        require_strict(wire::encode(part), random, as_part);
        CHECK_THROWS_AS((void)as_route(wire::encode(report)), protocol_error);
    }
    CHECK(wire::decode_needs_report(wire::encode(plan::needs_report{}), 0).needs.empty());
}

TEST_CASE("pull plan wire: the bytes of a message") {
    const plan::owner_part part{
        .worker = 3,
        .owner = 200,
        .manifest_hash = 0x0102030405060708,
        .sections = {
            {plan::no_ingester, {{5, 300, {{7, 20}, {2, 1}}}, {6, 0, {}}}, {{1, 0, 2, 40}}}}};
    CHECK(wire::encode(part) ==
          "WP1P\x03\xC8\x01\x08\x07\x06\x05\x04\x03\x02\x01"
          "\x01\x00\x02\x05\xAC\x02\x02\x07\x14\x02\x01\x01\x00\x00"
          "\x01\x01\x02\x28"s);
    CHECK(wire::encode(plan::needs_report{{{2, 128, 1}, {4, 1, 2}}}) ==
          "WP1N\x02\x02\x80\x01\x01\0\0\0\0\0\0\0\x01\x01\x02\0\0\0\0\0\0\0"s);
    CHECK(wire::encode(plan::worker_route{1, 9, {{2, {{4, 5}}}}, {{3, 1, 7, 0, 6}}}) ==
          "WP1R\x01\x09\x01\x02\x01\x04\x05\x01\x03\x01\x06\x00\x06"s);
}

TEST_CASE("pull plan wire: what no message may say") {
    const auto part = [](const std::string& body) {
        return wire::decode_owner_part("WP1P" + body, 10);
    };
    const std::string head = "\x01\x02"s + std::string(8, '\0');
    CHECK(part(head + "\0"s).sections.empty());
    for (const auto& wrong : {
             "\x81\0\x02"s + std::string(8, '\0') + "\0"s,                // a number too long
             "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x02"s,                 // above 2^64
             "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x81\0"s,               // longer than any
             "\xFF\xFF\xFF\xFF\x07\x02"s + std::string(8, '\0') + "\0"s,  // a rank above an int
             head + "\x02\0\0\0"s,                                        // two sections in 3 bytes
             head + "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01"s,
             head + "\x01\0\x01\x0A\0\0\x01\0\x01\x01"s,  // position 10 of 10
             head + "\x01\0\x02\x09\0\0\x01\0\0\x01\0\x02\x01"s,
             head + "\x01\0\x01\0\0\x11"s + std::string(34, '\1') + "\0"s,        // 17 dimensions
             head + "\x01\0\x01\0\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01\0\0"s,  // above 2^63
             head + "\x01\0\x01\0\0\0\x01\0\x02\x01"s,  // a chunk of too many reads
         }) {
        CHECK_THROWS_AS((void)part(wrong), protocol_error);
    }
    CHECK(part(head + "\x01\0\x01\x09\0\0\x01\0\x01\x01"s).sections[0].chunks[0].count == 1);
    try {
        (void)wire::decode_owner_part("WP1Q", 10);
        FAIL("another letter is read");
    } catch (const protocol_error& refusal) {
        CHECK(std::string{refusal.what()}.find("a worker's plan") != std::string::npos);
        CHECK(refusal.context().phase == phase::plan);
    }
    const auto owners = all_held();
    CHECK_THROWS_AS((void)wire::decode_worker_route("WP1R\0\x01\x01\x14\0\0"s, owners),
                    protocol_error);
    CHECK_THROWS_AS((void)wire::decode_worker_route("WP1R\0\x01\x01\0\x01\xAC\x02\x01\0"s, owners),
                    protocol_error);
    CHECK(wire::decode_worker_route("WP1R\0\x01\x01\0\x01\xAB\x02\x01\0"s, owners)
              .classes[0]
              .shares[0]
              .owner == 299);
}

TEST_CASE("pull plan wire: what is not in order is not written") {
    CHECK_THROWS_AS((void)wire::encode(plan::needs_report{{{2, 1, 1}, {2, 1, 1}}}), usage_error);
    CHECK_THROWS_AS((void)wire::encode(plan::worker_route{.worker = -1}), usage_error);
    CHECK_THROWS_AS((void)wire::encode(plan::worker_route{.shared = {{0, 2, 1, 0, 0}}}),
                    usage_error);
    plan::owner_part part{.sections = {{0, {{3, 0, {}}, {2, 0, {}}}, {}}}};
    CHECK_THROWS_AS((void)wire::encode(part), usage_error);
    part.sections[0].reads = {{3, -1, {}}};
    CHECK_THROWS_AS((void)wire::encode(part), usage_error);
}

}  // namespace
