// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <string>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/coverage.hpp>

namespace {

using namespace weightwire;

struct covered {
    manifest parameters{
        {{"a", dtype::u8, {10}}, {"empty", dtype::f32, {0, 4}}, {"b", dtype::u8, {6}}}};
    coverage written{parameters};
};

TEST_CASE_FIXTURE(covered,
                  "coverage: pieces in order make a parameter whole, and all of them a session") {
    CHECK_FALSE(written.all_whole());
    CHECK(written.whole(1));
    CHECK(written.untouched(0));
    CHECK_FALSE(written.wrote(0, 0, 4));
    CHECK_FALSE(written.untouched(0));
    CHECK(written.wrote(2, 0, 6));
    CHECK_FALSE(written.wrote(0, 4, 5));
    CHECK_FALSE(written.all_whole());
    CHECK(written.wrote(0, 9, 1));
    CHECK(written.all_whole());
    CHECK_NOTHROW(written.require_all());
}

TEST_CASE_FIXTURE(covered,
                  "coverage: a parameter without bytes is whole, also after an empty piece") {
    CHECK(written.wrote(1, 0, 0));
    CHECK(written.wrote(1, 0, 0));
    CHECK_FALSE(written.all_whole());
    written.wrote(0, 0, 10);
    written.wrote(2, 0, 6);
    CHECK(written.all_whole());
}

TEST_CASE_FIXTURE(
    covered, "coverage: bytes written twice, past a gap or past the end are refused, and named") {
    written.wrote(0, 0, 4);
    const auto refused = [&](std::size_t i, std::uint64_t offset, std::uint64_t count) {
        try {
            written.wrote(i, offset, count);
        } catch (const coverage_error& problem) {
            CHECK(problem.context().phase == phase::update);
            return problem.context().tensor + ": " + problem.text();
        }
        return std::string{"nothing"};
    };
    CHECK(refused(0, 3, 2).starts_with("a: bytes are written twice"));
    CHECK(refused(0, 0, 4).starts_with("a: bytes are written twice"));
    CHECK(refused(0, 5, 1).starts_with("a: bytes are written past a gap"));
    CHECK(refused(0, 4, 7).starts_with("a: bytes are written past"));
    CHECK(refused(0, 4, ~0ULL).starts_with("a: bytes are written past"));
    CHECK(refused(2, ~0ULL, 1).starts_with("b: bytes are written past a gap"));
    CHECK(refused(1, 0, 1).starts_with("empty: bytes are written past"));
    // What was refused has changed nothing.
    CHECK(written.wrote(0, 4, 6));
}

TEST_CASE_FIXTURE(covered, "coverage: what is missing at the end is counted, and the first named") {
    written.wrote(0, 0, 10);
    try {
        written.require_all();
        FAIL("a parameter is missing");
    } catch (const coverage_error& problem) {
        CHECK(problem.context().tensor == "b");
        CHECK(problem.context().phase == phase::finish);
        CHECK(problem.context().bytes_total == 6);
        CHECK(problem.text().starts_with("1 of 3 parameters"));
    }
}

}  // namespace
