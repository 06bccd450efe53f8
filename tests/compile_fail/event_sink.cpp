// SPDX-License-Identifier: Apache-2.0
// What the author of an event sink reads that may throw, or has no `on`.

#include <weightwire/concepts/event_sink.hpp>

struct sink {
#ifdef EXPECT_FAIL_1  // expect: EventSink: add on(const weightwire::event&) noexcept
    void on(const weightwire::event&) {}  // may throw
#else
#ifndef EXPECT_FAIL_2  // expect: EventSink: add on(const weightwire::event&) noexcept
    void on(const weightwire::event&) noexcept {}
#endif
#endif
};

static_assert(weightwire::explain_event_sink<sink>());
