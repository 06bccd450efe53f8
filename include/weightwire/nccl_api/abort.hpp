#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include <weightwire/nccl_api/library.hpp>
#include <weightwire/nccl_api/nccl.hpp>

/// @file
/// `ncclCommAbort` with a bound.
///
/// What was seen, with NCCL 2.28.9, two ranks, and a peer that was killed, stopped, idle or
/// aborting (benchmarks/results/nccl_abort.txt, made by tests/gpu/nccl_abort.cpp): the abort always
/// returned, and stream and device were usable after it. It took at most 0.7 s during a join and on
/// an idle communicator, at most 1 s with 32 broadcasts queued, and 3 to 7.5 s with 256 on a GPU
/// that other processes used too. So a communicator keeps fewer in flight, and the bound is beyond
/// the longest time seen. The bound is there because an abort waits for kernels and for threads of
/// NCCL, and nobody promises that those end.

namespace weightwire::nccl_api {

/// How long an abort may take before the communicator is given up.
inline constexpr std::chrono::seconds abort_bound{10};

/// Broadcasts that a communicator keeps in its stream at once. Chosen between 32 and 256, at which
/// aborts were timed; 128 itself was not.
inline constexpr unsigned int most_in_flight = 128;

namespace detail {

/// Aborts `native`, of `device`, on a thread of its own and waits for it, at most `bound`. Returns
/// whether it is gone; where not, the thread stays in the call, and nothing that the communicator
/// uses may be freed.
[[nodiscard]] inline bool abort_within(const library& used, ncclComm_t native, int device,
                                       std::chrono::steady_clock::duration bound) noexcept {
    struct shared {
        std::mutex mutex;
        std::condition_variable changed;
        bool returned = false;
    };
    try {
        const auto state = std::make_shared<shared>();
        std::thread{[state, used, native, device] {
            // NCCL makes the thread's former device current again: on device 0 that would cost a
            // context.
            static_cast<void>(cudaSetDevice(device));
            static_cast<void>(used.calls().abort(native));
            const std::lock_guard lock{state->mutex};
            state->returned = true;
            state->changed.notify_all();
        }}.detach();
        std::unique_lock lock{state->mutex};
        return state->changed.wait_for(lock, bound, [&] { return state->returned; });
    } catch (...) {
        return false;  // no memory or no thread: it was not aborted
    }
}

}  // namespace detail

}  // namespace weightwire::nccl_api
