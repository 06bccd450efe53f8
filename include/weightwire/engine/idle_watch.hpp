#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <system_error>
#include <thread>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// Looks after a session that nobody calls for: readers that its end would set free must not wait
/// for the next question that somebody asks.

namespace weightwire::detail {

/// One thread that sleeps until the earliest instant it was told, then calls its owner. It begins
/// with the first `prepare` and ends with this object.
///
/// Rounds only ever move the end of a session later, so the thread is left asleep: it wakes at the
/// first end it was told, looks, and sleeps on. A round costs it a mutex and a comparison.
class idle_watch {
    using time_point = deadline::clock::time_point;

public:
    /// Called on the watch's thread when an instant has come. Returns when to look again;
    /// `time_point::max()` where nothing is to be watched.
    using look_function = time_point (*)(void* owner, const std::stop_token& stop) noexcept;

    /// @param owner outlives this object. A pointer and a function, so that the watch is no
    /// template and its thread does not name its owner's type.
    idle_watch(void* owner, look_function look) noexcept : owner_{owner}, look_{look} {}
    idle_watch(const idle_watch&) = delete;
    idle_watch& operator=(const idle_watch&) = delete;
    ~idle_watch() = default;  // the thread is asked to stop and joined

    /// Makes the thread, where there is none. Not thread-safe.
    /// @throws resource_error the system has no thread: before a session is open, not after.
    void prepare() {
        if (thread_.joinable()) {
            return;
        }
        try {
            thread_ = std::jthread{[this](const std::stop_token& stop) { watch(stop); }};
        } catch (const std::system_error& failed) {
            throw resource_error{"no thread to watch over idle sessions; allow more threads",
                                 {.operation = "thread",
                                  .native_code = failed.code().value(),
                                  .native_text = failed.what()}};
        }
    }
    /// The owner is called at `when`, or earlier. From any thread; never waits for a look.
    void look_at(time_point when) {
        {
            const std::lock_guard lock{mutex_};
            if (when >= next_) {
                return;  // it looks before that anyway
            }
            next_ = when;
        }
        changed_.notify_all();
    }

private:
    /// The mutex is free while the thread sleeps and while the owner looks: `look_at` must not wait
    /// for a call that the owner waits for in turn.
    void watch(const std::stop_token& stop) {
        std::unique_lock lock{mutex_};
        while (!stop.stop_requested()) {
            const auto when = next_;
            const bool earlier =
                changed_.wait_until(lock, stop, when, [&] { return next_ < when; });
            if (earlier || deadline::clock::now() < when) {
                continue;
            }
            // What is told while the owner looks counts too: the owner may just have missed it.
            next_ = time_point::max();
            lock.unlock();
            const auto again = look_(owner_, stop);
            lock.lock();
            if (again > when) {  // else nothing has come of it, and would not at once
                next_ = std::min(next_, again);
            }
        }
    }

    void* owner_;
    look_function look_;
    std::mutex mutex_;
    std::condition_variable_any changed_;  // `any`: its wait ends at the thread's stop
    time_point next_ = time_point::max();  // the earliest that was told
    std::jthread thread_;                  // last: it ends before what it uses
};

}  // namespace weightwire::detail
