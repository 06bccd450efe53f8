#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include <weightwire/core/error.hpp>

/// @file
/// `EventSink`: told what the engines do. Absent, it costs nothing: `no_events` is empty and never
/// called.

namespace weightwire {

/// What an event reports.
enum class event_kind : std::uint8_t {
    chosen,  ///< a choice was made; `text` says what and why, in one line
    /// `phase` began: start, update and finish in a trainer, init and start in a worker.
    phase_begun,
    /// `phase` ended: start, update and finish in a trainer, init and update in a worker; `elapsed`
    /// and `bytes` say how much.
    phase_ended,
    peer_failed,    ///< `peer` failed in `phase`; `text` is the error
    peer_rejoined,  ///< `peer` takes part again
    committed,      ///< `version` is visible on `peer`, or in this worker
    warning,        ///< `text` says what a destructor or a background task met
};

/// One thing that happened. Views live until the sink returns.
struct event {
    event_kind kind = event_kind::warning;
    weightwire::phase phase = weightwire::phase::none;
    std::string_view peer{};
    std::string_view text{};
    std::uint64_t version = 0;
    std::uint64_t bytes = 0;
    std::chrono::nanoseconds elapsed{};
};

/// `on(event) noexcept`, called from the engine's threads; it must not block and must not call the
/// engine.
template <class E>
concept EventSink = requires(std::remove_reference_t<E>& sink, const event& what) {
    { sink.on(what) } noexcept;
};

/// One readable line for every member that `E` lacks.
template <class E>
consteval bool explain_event_sink() {
    static_assert(
        requires(E& sink, const event& what) {
            { sink.on(what) } noexcept;
        }, "EventSink: add on(const weightwire::event&) noexcept");
    return EventSink<E>;
}

/// Says nothing.
struct no_events {
    void on(const event&) const noexcept {}
};

static_assert(EventSink<no_events> && std::is_empty_v<no_events>);

namespace archetypes {

/// The least that models `EventSink`.
struct event_sink {
    void on(const event&) noexcept {}
};

}  // namespace archetypes

static_assert(EventSink<archetypes::event_sink>);

}  // namespace weightwire
