#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <exception>
#include <stop_token>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/detail/side_thread.hpp>

/// @file
/// All ranks of one worker at once: the first on the caller's thread, each other on a thread of its
/// own that lives as long as the engine.

namespace weightwire::detail {

/// Runs the same work for every rank side by side. With one rank there is no thread at all, so a
/// call costs no hand-over. Not thread-safe: one `run` at a time. Allocates nothing in `run` unless
/// a rank throws.
class rank_crew {
public:
    explicit rank_crew(std::size_t ranks) : failures_(ranks) {
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            jobs_.push_back(job{this, rank});
        }
        for (std::size_t rank = 1; rank < ranks; ++rank) {
            helpers_.emplace_back();
        }
    }
    rank_crew(const rank_crew&) = delete;
    rank_crew& operator=(const rank_crew&) = delete;

    /// `work(rank)` for every rank; returns when all have returned.
    /// @param on_failure called, possibly from several threads, as soon as a rank throws: stops the
    /// others.
    /// @throws the root cause: the first rank's error that is no `cancelled_error`, with the rank
    /// named where there are several.
    template <class Work, class OnFailure>
    void run(Work work, OnFailure on_failure) {
        auto guarded = [&](std::size_t rank) noexcept {
            try {
                work(rank);
            } catch (...) {
                failures_[rank] = std::current_exception();
                on_failure();
            }
        };
        run_all(guarded);
        rethrow();
    }

    /// The same for work that does not throw.
    template <class Work>
        requires std::is_nothrow_invocable_v<Work&, std::size_t>
    void run(Work work) {
        run_all(work);
    }

private:
    struct job {
        rank_crew* crew;
        std::size_t rank;
        void operator()() const noexcept { crew->call_(crew->work_, rank); }
    };

    /// The work is passed by address and a plain function: a `std::function` a rank would allocate
    /// in every call. The caller takes a share itself, so that one rank costs no thread.
    template <class Work>
    void run_all(Work& work) {
        work_ = &work;
        call_ = [](void* self, std::size_t rank) noexcept { (*static_cast<Work*>(self))(rank); };
        for (std::size_t rank = 1; rank < jobs_.size(); ++rank) {
            helpers_[rank - 1].start(jobs_[rank]);
        }
        jobs_[0]();
        for (auto& helper : helpers_) {
            helper.wait();
        }
    }

    /// A rank that was stopped because another failed has nothing to say, and one that lost a peer
    /// or its time may only have met that failure. Of several that failed by themselves the lowest
    /// is reported, so that the same fault always names the same rank.
    void rethrow() {
        std::array<std::size_t, 3> lowest{};
        lowest.fill(jobs_.size());
        for (std::size_t rank = jobs_.size(); rank-- > 0;) {
            if (failures_[rank] != nullptr) {
                lowest[echo_of(failures_[rank])] = rank;
            }
        }
        const auto found =
            std::ranges::find_if(lowest, [&](std::size_t rank) { return rank < jobs_.size(); });
        if (found == lowest.end()) {
            return;
        }
        const auto cause = *found;
        const auto thrown = std::exchange(failures_[cause], nullptr);
        for (auto& failure : failures_) {
            failure = nullptr;
        }
        name_rank(thrown, cause);
    }

    /// 0: a reason of its own. 1: perhaps another rank's. 2: stopped because of another.
    [[nodiscard]] static std::size_t echo_of(const std::exception_ptr& thrown) {
        try {
            std::rethrow_exception(thrown);
        } catch (const cancelled_error&) {
            return 2;
        } catch (const peer_error&) {
            return 1;
        } catch (const timeout_error&) {
            return 1;
        } catch (...) {
            return 0;
        }
    }

    /// A single rank is the worker, and what names its rank already knows better.
    [[noreturn]] void name_rank(const std::exception_ptr& thrown, std::size_t rank) const {
        try {
            std::rethrow_exception(thrown);
        } catch (const error& caught) {
            if (jobs_.size() == 1 || caught.context().rank >= 0) {
                throw;
            }
            auto context = caught.context();
            context.rank = static_cast<int>(rank);
            throw_as(caught.kind(), caught.text(), std::move(context), caught.where());
        }
    }

    std::vector<job> jobs_;
    std::vector<std::exception_ptr> failures_;
    void* work_ = nullptr;
    void (*call_)(void*, std::size_t) noexcept = nullptr;
    std::deque<side_thread> helpers_;  // last: its threads end before what they read
};

}  // namespace weightwire::detail
