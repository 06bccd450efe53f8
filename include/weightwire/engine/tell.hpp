#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <type_traits>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/core/deadline.hpp>

namespace weightwire::detail {

/// Tells the event sink, when there is one.
template <class Events>
void tell(Events& events, const event& what) noexcept {
    if constexpr (!std::is_same_v<std::remove_cvref_t<Events>, no_events>) {
        events.on(what);
    }
}

/// Seconds since `begin`.
[[nodiscard]] inline double seconds_since(deadline::clock::time_point begin) noexcept {
    return std::chrono::duration<double>(deadline::clock::now() - begin).count();
}

}  // namespace weightwire::detail
