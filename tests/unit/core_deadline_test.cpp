// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <chrono>
#include <climits>

#include <weightwire/core/deadline.hpp>

namespace {

using namespace std::chrono_literals;
using weightwire::deadline;

TEST_CASE("deadline: a budget in the past has expired, one in the future has not") {
    CHECK(deadline::after(-1s).expired());
    CHECK(deadline::after(0s).expired());
    CHECK(deadline::after(-1s).remaining() == deadline::clock::duration::zero());
    const auto later = deadline::after(1h);
    CHECK_FALSE(later.expired());
    CHECK(later.remaining() <= 1h);
    CHECK(later.remaining() > 59min);
}

TEST_CASE("deadline: the longest budget there is does not overflow") {
    const auto last = deadline::after(deadline::clock::duration::max());
    CHECK(last.when() == deadline::clock::time_point::max());
    CHECK_FALSE(last.expired());
    CHECK(last.poll_milliseconds() == INT_MAX);
}

TEST_CASE("deadline: milliseconds for poll are rounded up and capped") {
    CHECK(deadline::after(-1s).poll_milliseconds() == 0);
    CHECK(deadline::after(1h).poll_milliseconds(50) == 50);
    const auto soon = deadline::after(1h + 1us).poll_milliseconds();
    CHECK(soon > 59 * 60 * 1000);
    CHECK(soon <= 60 * 60 * 1000 + 1);
}

TEST_CASE("deadline: a part's own limit never outlasts the whole") {
    const auto whole = deadline::after(1h);
    CHECK(whole.capped(2h) == whole);
    CHECK(whole.capped(1s) < whole);
    CHECK(deadline::at(whole.when()) == whole);
}

}  // namespace
