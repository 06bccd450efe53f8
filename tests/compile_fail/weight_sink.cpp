// SPDX-License-Identifier: Apache-2.0
// What the author of an incomplete weight sink reads.

#include <cstddef>
#include <span>

#include <weightwire/concepts/weight_sink.hpp>

using namespace weightwire;

struct sink {
#ifndef EXPECT_FAIL_1  // expect: WeightSink: add begin(const session_info&, const manifest&, deadline) returning a span of destination
    std::span<const destination> begin(const session_info&, const manifest&, deadline) {
        return {};
    }
#endif
#ifndef EXPECT_FAIL_2  // expect: WeightSink: add group_complete(std::size_t group)
    void group_complete(std::size_t) {}
#endif
#ifndef EXPECT_FAIL_3  // expect: WeightSink: add prepare(deadline), which does everything that can fail
    void prepare(deadline) {}
#endif
#ifdef EXPECT_FAIL_4  // expect: WeightSink: add commit(weight_version) noexcept
    void commit(weight_version) {}  // may throw
#else
    void commit(weight_version) noexcept {}
#endif
#ifdef EXPECT_FAIL_5  // expect: WeightSink: add rollback() noexcept
    void rollback() {}  // may throw
#else
    void rollback() noexcept {}
#endif
#ifndef EXPECT_FAIL_6  // expect: WeightSink: add const members version() and dirty()
    weight_version version() const { return 0; }
#endif
    bool dirty() const { return false; }
};

static_assert(explain_weight_sink<sink>());
