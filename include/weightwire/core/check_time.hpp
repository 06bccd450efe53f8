#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <stop_token>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// The question that every loop of a transfer asks.

namespace weightwire::detail {

/// Throws when a transfer must not go on. Costs two loads and a clock; `context` is called only
/// then.
/// @throws timeout_error, cancelled_error
template <class Context>
void check_time(deadline until, const std::stop_token& stop, Context context) {
    if (stop.stop_requested()) {
        throw cancelled_error{"the transfer was stopped", context()};
    }
    if (until.expired()) {
        throw timeout_error{"the transfer did not end before its deadline", context()};
    }
}

}  // namespace weightwire::detail
