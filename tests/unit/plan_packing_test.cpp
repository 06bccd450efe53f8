// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/packing.hpp>

namespace {

using namespace weightwire;
using plan::cut_after_exceeding;
using plan::cut_before_exceeding;
using plan::packed_chunk;
using sizes = std::vector<std::int64_t>;

manifest of_sizes(const sizes& bytes) {
    std::vector<param_meta> parameters;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        parameters.push_back({"t" + std::to_string(i), dtype::u8, {bytes[i]}});
    }
    return manifest{std::move(parameters)};
}

/// The sizes of the tensors in each chunk.
std::vector<sizes> as_sizes(const std::vector<packed_chunk>& chunks, const manifest& parameters) {
    std::vector<sizes> out;
    for (const auto& chunk : chunks) {
        out.emplace_back();
        for (std::size_t i = 0; i < chunk.count; ++i) {
            out.back().push_back(parameters[chunk.first + i].shape[0]);
        }
    }
    return out;
}

std::vector<sizes> nccl(const sizes& bytes) {
    const auto parameters = of_sizes(bytes);
    return as_sizes(cut_after_exceeding(parameters, 100), parameters);
}
std::vector<sizes> ipc(const sizes& bytes) {
    const auto parameters = of_sizes(bytes);
    return as_sizes(cut_before_exceeding(parameters, 100), parameters);
}

TEST_CASE("packing: the worked examples of the protocol page, appendix C, buffer of 100 bytes") {
    using cuts = std::vector<sizes>;
    CHECK(nccl({60, 40}) == cuts{{60, 40}});
    CHECK(ipc({60, 40}) == cuts{{60, 40}});
    CHECK(nccl({60, 40, 1}) == cuts{{60, 40, 1}});
    CHECK(ipc({60, 40, 1}) == cuts{{60, 40}, {1}});
    CHECK(nccl({60, 50, 30}) == cuts{{60, 50}, {30}});
    CHECK(ipc({60, 50, 30}) == cuts{{60}, {50, 30}});
    CHECK(nccl({150, 10}) == cuts{{150}, {10}});
    CHECK_THROWS_AS((void)ipc({150, 10}), data_error);
    CHECK(nccl({100, 0, 5}) == cuts{{100, 0, 5}});
    CHECK(ipc({100, 0, 5}) == cuts{{100, 0}, {5}});
    CHECK(nccl({0, 0}) == cuts{{0, 0}});
    CHECK(ipc({0, 0}).empty());
    CHECK(nccl({}).empty());
    CHECK(ipc({}).empty());
}

TEST_CASE("packing: the worked example of the protocol page, section 4.4") {
    const auto parameters = of_sizes({60, 40, 1, 200, 5});
    const auto chunks = cut_after_exceeding(parameters, 100);
    REQUIRE(chunks.size() == 3);
    CHECK(chunks[0].bytes == 101);
    CHECK(chunks[0].offsets == std::vector<std::uint64_t>{0, 60, 100});
    CHECK(chunks[1].bytes == 200);
    CHECK(chunks[2].bytes == 5);
    CHECK(chunks[2].first == 4);
}

TEST_CASE("packing: a tensor that does not fit is named, with the size it needs") {
    try {
        (void)cut_before_exceeding(of_sizes({1, 101, 5}), 100);
        FAIL("it does not fit");
    } catch (const data_error& problem) {
        CHECK(problem.context().tensor == "t1");
        CHECK(problem.context().phase == phase::plan);
        CHECK(problem.context().bytes_total == 101);
        CHECK(problem.text().ends_with("set the buffer size to at least 101"));
    }
}

TEST_CASE("packing: a buffer of any size is sound, also the largest number there is") {
    constexpr auto huge = std::numeric_limits<std::int64_t>::max();
    constexpr auto largest = std::numeric_limits<std::uint64_t>::max();
    const auto parameters = of_sizes({huge, huge});
    CHECK(cut_before_exceeding(parameters, largest).size() == 1);
    CHECK(cut_before_exceeding(parameters, largest - 2).size() == 2);
    CHECK(cut_after_exceeding(parameters, largest).size() == 1);
    CHECK(cut_before_exceeding(of_sizes({0, 0}), 0).empty());
    CHECK_THROWS_AS((void)cut_before_exceeding(of_sizes({1}), 0), data_error);
    CHECK(cut_after_exceeding(of_sizes({1, 0, 1}), 0).size() == 2);
}

/// What holds for both rules: tensors in order, each once, one after the other.
void check_chunks(const std::vector<packed_chunk>& chunks, const manifest& parameters,
                  std::size_t expected_count) {
    std::size_t next = 0;
    for (const auto& chunk : chunks) {
        REQUIRE(chunk.first == next);
        REQUIRE(chunk.count > 0);
        REQUIRE(chunk.offsets.size() == chunk.count);
        std::uint64_t offset = 0;
        for (; next < chunk.first + chunk.count; ++next) {
            REQUIRE(chunk.holds(next));
            REQUIRE(chunk.offset_of(next) == offset);
            offset += parameters[next].byte_size();
        }
        REQUIRE(chunk.bytes == offset);
        REQUIRE_FALSE(chunk.holds(next));
    }
    REQUIRE(next == expected_count);
}

TEST_CASE("packing: over random lists, chunks obey their rule and could not be cut otherwise") {
    std::mt19937 random{11};
    for (int repeat = 0; repeat < 2000; ++repeat) {
        const std::int64_t buffer = 1 + static_cast<std::int64_t>(random() % 60);
        sizes bytes(random() % 20);
        std::int64_t total = 0;
        for (auto& size : bytes) {
            size = random() % 4 == 0 ? 0 : static_cast<std::int64_t>(random() % 61) % (buffer + 1);
            total += size;
        }
        const auto parameters = of_sizes(bytes);
        const auto limit = static_cast<std::uint64_t>(buffer);

        const auto before = cut_before_exceeding(parameters, limit);
        check_chunks(before, parameters, total == 0 ? 0 : parameters.size());
        for (std::size_t i = 0; i < before.size(); ++i) {
            REQUIRE(before[i].bytes > 0);
            REQUIRE(before[i].bytes <= limit);
            if (i + 1 < before.size()) {
                REQUIRE(before[i].bytes + parameters[before[i + 1].first].byte_size() > limit);
            }
        }

        const auto after = cut_after_exceeding(parameters, limit);
        check_chunks(after, parameters, parameters.size());
        for (std::size_t i = 0; i < after.size(); ++i) {
            const auto last = after[i].first + after[i].count - 1;
            REQUIRE(after[i].bytes - parameters[last].byte_size() <= limit);
            if (i + 1 < after.size()) {
                REQUIRE(after[i].bytes > limit);
            }
        }
    }
}

}  // namespace
