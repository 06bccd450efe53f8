#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/descriptor.hpp>
#include <weightwire/fabrics/ucx/worker.hpp>

/// @file
/// The thread of a trainer rank that answers readers. Over tcp each read needs the processor of
/// the side that is read; without this thread a read would wait for the trainer's next call.

namespace weightwire::ucx {

/// Makes a context and a worker, drives them and ends them, all on one thread of its own, which
/// sleeps while nothing comes.
class owner_thread {
public:
    /// @param begin runs first on the thread: makes a device current there.
    /// @throws resource_error, unsupported_error UCX cannot start. @throws what `begin` throws.
    explicit owner_thread(const std::function<void()>& begin = {})
        : wake_{shm::descriptor::from_native(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))} {
        if (!wake_) {
            const int code = errno;
            shm::require_descriptors(code, "eventfd");
            throw resource_error{"the system gives no event", shm::with_errno({}, "eventfd", code)};
        }
        thread_ = std::thread{[this] { loop(); }};
        try {
            run([&] {
                if (begin) {
                    begin();
                }
                context_ = context::create(true);
                worker_ = worker::create(context_, UCS_THREAD_MODE_SINGLE);
            });
        } catch (...) {
            end();
            throw;
        }
    }
    owner_thread(const owner_thread&) = delete;
    owner_thread& operator=(const owner_thread&) = delete;
    /// Waits for no peer: what readers have under way fails there.
    ~owner_thread() { end(); }

    /// Runs `job` on the thread and returns when it has run.
    /// @throws what it throws.
    template <class Job>
    void run(Job job) {
        std::exception_ptr failed;
        std::unique_lock lock{mutex_};
        job_ = [&] {
            try {
                job();
            } catch (...) {
                failed = std::current_exception();
            }
        };
        wake();
        changed_.wait(lock, [this] { return !job_; });
        lock.unlock();
        if (failed) {
            std::rethrow_exception(failed);
        }
    }
    /// While `active` the thread looks for more for a moment before it sleeps.
    void serve(bool active) noexcept {
        active_.store(active, std::memory_order_relaxed);
        wake();
    }

    /// To be used inside a job. What is kept ends on the thread, once nobody reads any more.
    [[nodiscard]] const context& used_context() const noexcept { return context_; }
    [[nodiscard]] const worker& used_worker() const noexcept { return worker_; }
    void keep(std::shared_ptr<const void> what) { kept_.push_back(std::move(what)); }

private:
    using clock = std::chrono::steady_clock;
    static constexpr std::chrono::microseconds spin_time{50};
    static constexpr int longest_sleep_ms = 1000;

    void wake() noexcept {
        woken_.store(true, std::memory_order_release);
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto count = ::write(wake_.native_handle(), &one, sizeof one);
    }
    void end() noexcept {
        quit_.store(true, std::memory_order_relaxed);
        wake();
        thread_.join();
    }
    void take_job() {
        const std::lock_guard lock{mutex_};
        if (job_) {
            job_();
            job_ = nullptr;
            changed_.notify_all();
        }
    }
    void loop() {
        auto last = clock::now();
        while (!quit_.load(std::memory_order_relaxed)) {
            if (woken_.exchange(false, std::memory_order_acquire)) {
                take_job();
                continue;
            }
            if (!worker_) {
                idle();
                continue;
            }
            if (worker_.progress()) {
                last = clock::now();
            } else if (!active_.load(std::memory_order_relaxed) ||
                       clock::now() - last > spin_time) {
                worker_.sleep(longest_sleep_ms, wake_.native_handle());
                drain();
            }
        }
        worker_.close();
        kept_.clear();
        context_ = context{};
    }
    /// Before there is a worker.
    void idle() const noexcept {
        pollfd event{.fd = wake_.native_handle(), .events = POLLIN, .revents = 0};
        static_cast<void>(::poll(&event, 1, longest_sleep_ms));
        drain();
    }
    void drain() const noexcept {
        std::uint64_t count = 0;
        [[maybe_unused]] const auto got = ::read(wake_.native_handle(), &count, sizeof count);
    }

    shm::descriptor wake_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> job_;
    std::atomic<bool> woken_ = false;
    std::atomic<bool> active_ = false;
    std::atomic<bool> quit_ = false;
    context context_;
    worker worker_;
    std::vector<std::shared_ptr<const void>> kept_;
    std::thread thread_;
};

}  // namespace weightwire::ucx
