#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <exception>
#include <memory>
#include <stop_token>
#include <thread>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>

/// @file
/// Waiting for a device without a blocking call, and what becomes of memory that it may still use.

namespace weightwire::cuda_ipc::detail {

using weightwire::detail::check_time;

/// Polls until `is_done()`: at first without a pause, as most work takes well under a millisecond.
/// @throws timeout_error, cancelled_error, and what `is_done` throws.
template <class IsDone, class Context>
void poll_until(IsDone is_done, deadline until, const std::stop_token& stop, Context context) {
    constexpr std::chrono::microseconds impatient{200};
    constexpr std::chrono::microseconds pause{20};
    const auto spin = deadline::after(impatient);
    while (!is_done()) {
        check_time(until, stop, context);
        if (spin.expired()) {
            std::this_thread::sleep_for(pause);
        }
    }
}

/// Runs `work`; what it throws says where: `context()` fills what its own context leaves open.
/// @throws what `work` throws, of the same kind.
template <class Work, class Context>
decltype(auto) saying_where(Work work, Context context) {
    try {
        return work();
    } catch (const error& caught) {
        auto why = failure::from(caught);
        const error_context where = context();
        why.context.phase = where.phase;
        why.context.backend = where.backend;
        why.context.rank = where.rank;
        if (why.context.tensor.empty()) {
            why.context.tensor = where.tensor;
        }
        why.raise();
    }
}

/// Frees `held` once the device is done with it: freeing device memory waits for what the device
/// does, without a deadline. After a failure that is a matter of milliseconds; where it takes
/// longer the memory is left to the end of the process.
/// @returns whether it came to rest.
template <class Held>
bool free_when_idle(std::unique_ptr<Held> held) noexcept {
    constexpr std::chrono::seconds bound{2};
    if (held == nullptr) {
        return true;
    }
    const auto until = deadline::after(bound);
    try {
        while (!held->is_idle()) {
            if (until.expired()) {
                static_cast<void>(held.release());
                return false;
            }
            std::this_thread::sleep_for(std::chrono::microseconds{100});
        }
    } catch (const std::exception&) {
        static_cast<void>(held.release());  // the device failed: what it still does is not known
        return false;
    }
    return true;
}

}  // namespace weightwire::cuda_ipc::detail
