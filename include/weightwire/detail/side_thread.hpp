#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

namespace weightwire::detail {

/// One thread that runs one job at a time beside the caller's: the control call beside the data
/// move. Starting a job and waiting for it allocate nothing. The job must not throw.
class side_thread {
public:
    side_thread() : worker_{[this] { loop(); }} {}
    side_thread(const side_thread&) = delete;
    side_thread& operator=(const side_thread&) = delete;
    /// Waits for a running job: the owner has stopped it by its token before.
    ~side_thread() {
        {
            const std::lock_guard lock{mutex_};
            quit_ = true;
        }
        changed_.notify_all();
        worker_.join();
    }

    /// Runs `job` until it returns. `job` lives until `wait` has returned.
    template <class Job>
        requires std::is_nothrow_invocable_v<Job&>
    void start(Job& job) {
        {
            const std::lock_guard lock{mutex_};
            run_ = [](void* self) noexcept { (*static_cast<Job*>(self))(); };
            context_ = &job;
            busy_ = true;
        }
        changed_.notify_all();
    }

    /// Blocks until the job has returned, or `until`. Returns whether it has.
    [[nodiscard]] bool wait_until(std::chrono::steady_clock::time_point until) {
        std::unique_lock lock{mutex_};
        return changed_.wait_until(lock, until, [this] { return !busy_; });
    }

    /// Blocks until the job has returned; at once when there is none.
    void wait() {
        std::unique_lock lock{mutex_};
        changed_.wait(lock, [this] { return !busy_; });
    }

private:
    void loop() {
        std::unique_lock lock{mutex_};
        for (;;) {
            changed_.wait(lock, [this] { return quit_ || (busy_ && run_ != nullptr); });
            if (run_ == nullptr) {
                return;
            }
            const auto run = std::exchange(run_, nullptr);
            auto* const context = context_;
            lock.unlock();
            run(context);
            lock.lock();
            busy_ = false;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    void (*run_)(void*) noexcept = nullptr;
    void* context_ = nullptr;
    bool busy_ = false;
    bool quit_ = false;
    std::thread worker_;
};

}  // namespace weightwire::detail
