#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// One protocol call at a time on a worker, and an init that may push the running one out.

namespace weightwire::detail {

/// Serialises the protocol calls of one worker engine. An ordinary call waits for its turn; a
/// take-over asks the running call to stop and goes before every ordinary call that waits. Waiting
/// ends at the caller's deadline or stop. Thread-safe; entering an idle gate allocates nothing.
class call_gate {
    struct forward_stop {
        std::stop_source* source;
        void operator()() const noexcept { source->request_stop(); }
    };

public:
    /// How a call enters.
    enum class kind { ordinary, take_over };

    /// The right to run one call, held from construction to destruction.
    class entry {
    public:
        /// Waits for the right.
        /// @throws timeout_error at `until`.
        /// @throws cancelled_error when `stop` asks.
        entry(call_gate& gate, kind how, deadline until, const std::stop_token& stop, phase where)
            : stop_{gate.acquire(how, until, stop, where)}, gate_{&gate} {
            forward_.emplace(stop, forward_stop{&stop_});
        }
        /// Takes the right where nobody holds or awaits it; else converts to false.
        explicit entry(call_gate& gate)
            : stop_{std::nostopstate}, gate_{gate.try_acquire(stop_) ? &gate : nullptr} {}
        entry(const entry&) = delete;
        entry& operator=(const entry&) = delete;
        ~entry() {
            forward_.reset();
            if (gate_ != nullptr) {
                gate_->release();
            }
        }

        [[nodiscard]] explicit operator bool() const noexcept { return gate_ != nullptr; }
        /// Requested when the caller's token asks, when a take-over comes, or by `request_stop`.
        [[nodiscard]] std::stop_token stop() const noexcept { return stop_.get_token(); }
        /// One rank failed: the others of this call need not go on.
        void request_stop() noexcept { stop_.request_stop(); }
        /// What `request_stop` asks through, for who outlives no call either.
        [[nodiscard]] std::stop_source stop_source() const noexcept { return stop_; }

    private:
        std::stop_source stop_;  // before gate_: the trying constructor fills it as it decides
        call_gate* gate_;
        std::optional<std::stop_callback<forward_stop>> forward_;
    };

    call_gate() = default;
    call_gate(const call_gate&) = delete;
    call_gate& operator=(const call_gate&) = delete;

    /// Whether a call runs now.
    [[nodiscard]] bool busy() const {
        const std::lock_guard lock{mutex_};
        return busy_;
    }
    /// Whether an init waits for the running call to leave.
    [[nodiscard]] bool take_over_waits() const {
        const std::lock_guard lock{mutex_};
        return take_overs_ > 0;
    }

private:
    /// Waits with the mutex free. A take-over is counted from its arrival, so that no ordinary call
    /// gets in between the one it pushes out and itself.
    std::stop_source acquire(kind how, deadline until, const std::stop_token& stop, phase where) {
        const bool takes_over = how == kind::take_over;
        std::stop_source next{std::nostopstate};
        if (takes_over) {
            next = std::stop_source{};
        }
        std::unique_lock lock{mutex_};
        if (takes_over) {
            ++take_overs_;
            if (busy_) {
                // Outside the lock, since stop callbacks are the user's code too and may ask this
                // worker. The source goes with the call that runs, so that the request cannot hit
                // one that enters meanwhile.
                std::swap(running_, next);
                lock.unlock();
                next.request_stop();
                lock.lock();
            }
        }
        const auto may_enter = [&] { return !busy_ && (takes_over || take_overs_ == 0); };
        const bool entered = changed_.wait_until(lock, stop, until.when(), may_enter);
        take_overs_ -= takes_over ? 1 : 0;
        if (!entered) {
            lock.unlock();
            changed_.notify_all();
            refuse(stop, where);
        }
        return enter_locked();
    }

    /// For work that may be left to whoever comes next.
    bool try_acquire(std::stop_source& source) {
        const std::lock_guard lock{mutex_};
        if (busy_ || take_overs_ > 0) {
            return false;
        }
        source = enter_locked();
        return true;
    }

    /// The stop of a call is the gate's, not the caller's: a take-over must be able to ask for it.
    std::stop_source enter_locked() {
        busy_ = true;
        if (running_.stop_requested()) {
            running_ = std::stop_source{};  // the last call's; kept otherwise, to allocate nothing
        }
        return running_;
    }

    void release() {
        {
            const std::lock_guard lock{mutex_};
            busy_ = false;
        }
        changed_.notify_all();
    }

    [[noreturn]] static void refuse(const std::stop_token& stop, phase where) {
        if (stop.stop_requested()) {
            throw cancelled_error{"the caller stopped waiting for the call before it",
                                  {.phase = where}};
        }
        throw timeout_error{
            "the call before it has not returned in time; allow more time, or look at what it "
            "waits for",
            {.phase = where}};
    }

    mutable std::mutex mutex_;
    std::condition_variable_any changed_;
    std::stop_source running_;
    std::size_t take_overs_ = 0;
    bool busy_ = false;
};

}  // namespace weightwire::detail
