#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <stop_token>
#include <thread>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// Waiting for a device without a blocking call, and what becomes of memory that it may still use.

namespace weightwire::cuda_ipc::detail {

/// Throws when a transfer must not go on; `context` is called only then.
template <class Context>
void check_time(deadline until, const std::stop_token& stop, Context context) {
    if (stop.stop_requested()) {
        throw cancelled_error{"the transfer was stopped", context()};
    }
    if (until.expired()) {
        throw timeout_error{"the transfer did not end before its deadline", context()};
    }
}

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

/// Devices of this process on which work could not be ended: it may write memory there at any later
/// time. One of the library's documented globals.
class stuck_devices {
public:
    static void add(int device) noexcept {
        try {
            auto& all = instance();
            const std::lock_guard lock{all.mutex_};
            all.devices_.insert(device);
        } catch (const std::exception&) {
            std::terminate();  // serving on would be serving weights that may change
        }
    }
    [[nodiscard]] static bool has(int device) noexcept {
        auto& all = instance();
        const std::lock_guard lock{all.mutex_};
        return all.devices_.contains(device);
    }

private:
    [[nodiscard]] static stuck_devices& instance() {
        static stuck_devices all;
        return all;
    }
    std::mutex mutex_;
    std::set<int> devices_;
};

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
