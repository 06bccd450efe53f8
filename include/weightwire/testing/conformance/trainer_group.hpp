#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <weightwire/concepts/trainer_group.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/testing/conformance/report.hpp>

/// @file
/// The conformance suite of `TrainerGroup`: run it on your own model.

namespace weightwire::testing {

/// What the suite of groups needs to know.
struct trainer_group_suite_options {
    int size = 4;                                 ///< ranks, each on a thread of its own
    int steps = 50;                               ///< collectives in a row
    std::chrono::milliseconds budget{20'000};     ///< for what must succeed
    std::chrono::milliseconds short_budget{500};  ///< for what must give up
};

namespace detail {

/// Runs `work(group, rank)` on a thread a rank. The groups live until everybody is done: that one
/// leaves early is another failure. Returns what was wrong on the first rank that says so or
/// throws.
template <class Make, class Work>
[[nodiscard]] std::string on_all_ranks(Make& make, const trainer_group_suite_options& options,
                                       Work work) {
    std::vector<std::string> wrong(static_cast<std::size_t>(options.size));
    std::atomic<int> done{0};
    const auto one_rank = [&](int rank, std::string& mine) {
        const auto finished = [&] {
            const auto until = deadline::after(options.budget);
            for (done.fetch_add(1); done.load() < options.size && !until.expired();) {
                std::this_thread::sleep_for(std::chrono::milliseconds{1});
            }
        };
        try {
            auto&& group = make(rank);
            try {
                mine = work(group, rank);
            } catch (...) {
                mine = "it threw: " + failure::current(phase::none).message();
            }
            finished();
        } catch (...) {
            mine = "no group was made: " + failure::current(phase::none).message();
            done.fetch_add(1);
        }
    };
    {
        std::vector<std::jthread> threads;
        for (int rank = 0; rank < options.size; ++rank) {
            threads.emplace_back(
                [&, rank] { one_rank(rank, wrong[static_cast<std::size_t>(rank)]); });
        }
    }
    for (std::size_t rank = 0; rank < wrong.size(); ++rank) {
        if (!wrong[rank].empty()) {
            return "rank " + std::to_string(rank) + ": " + wrong[rank];
        }
    }
    return {};
}

/// What rank `rank` gathers in step `step`: of any length, empty and binary included.
[[nodiscard]] inline std::string gathered_bytes(int rank, int step) {
    const auto length = static_cast<std::size_t>((rank * 37 + step * 101) % 1000);
    std::string out(length, static_cast<char>(rank + step));
    if (length > 2) {
        out[1] = '\0';
    }
    return out;
}

template <TrainerGroup Group>
[[nodiscard]] std::string gather_steps(Group& group, int rank,
                                       const trainer_group_suite_options& options) {
    const auto until = deadline::after(options.budget);
    for (int step = 0; step < options.steps; ++step) {
        const auto all = group.all_gather(gathered_bytes(rank, step), until);
        if (all.size() != static_cast<std::size_t>(options.size)) {
            return "all_gather gave " + std::to_string(all.size()) + " entries";
        }
        for (int other = 0; other < options.size; ++other) {
            if (all[static_cast<std::size_t>(other)] != gathered_bytes(other, step)) {
                return "in step " + std::to_string(step) + " the entry of rank " +
                       std::to_string(other) + " is not what it gathered";
            }
        }
    }
    return {};
}

template <TrainerGroup Group>
[[nodiscard]] std::string barrier_steps(Group& group, std::atomic<int>& arrived,
                                        const trainer_group_suite_options& options) {
    const auto until = deadline::after(options.budget);
    for (int step = 1; step <= options.steps; ++step) {
        arrived.fetch_add(1);
        group.barrier(until);
        if (arrived.load() < step * options.size) {
            return "barrier " + std::to_string(step) + " was left before every rank had come";
        }
        group.barrier(until);  // nobody begins the next step while others still look
    }
    return {};
}

/// The last rank stays away; the others must give up and say who it was.
template <TrainerGroup Group>
[[nodiscard]] std::string wait_for_absent(Group& group, int rank,
                                          const trainer_group_suite_options& options) {
    if (rank == options.size - 1) {
        return {};
    }
    try {
        [[maybe_unused]] const auto all =
            group.all_gather("x", deadline::after(options.short_budget));
        return "all_gather returned although a rank did not come";
    } catch (const timeout_error& caught) {
        const std::string message = caught.what();
        return message.find("rank " + std::to_string(options.size - 1)) != std::string::npos
                   ? std::string{}
                   : "the error does not name the rank that did not come: " + message;
    }
}

}  // namespace detail

/// Looks at everything that `TrainerGroup` promises.
/// @param make `make(rank)` gives that rank's group; it is called on a thread a rank, at once, for
/// each of the three groups that the suite uses up.
template <class Make>
    requires TrainerGroup<std::invoke_result_t<Make&, int>>
[[nodiscard]] conformance_report check_trainer_group(
    Make make, const trainer_group_suite_options& options = {}) {
    conformance_report report;
    report.run("all_gather gives everyone's bytes by rank, step after step", [&] {
        return detail::on_all_ranks(make, options, [&](auto& group, int rank) -> std::string {
            if (group.rank() != rank || group.size() != options.size) {
                return "rank() and size() are " + std::to_string(group.rank()) + " and " +
                       std::to_string(group.size());
            }
            return detail::gather_steps(group, rank, options);
        });
    });
    std::atomic<int> arrived{0};
    report.run("no rank leaves a barrier before every rank has come", [&] {
        return detail::on_all_ranks(make, options, [&](auto& group, int) {
            return detail::barrier_steps(group, arrived, options);
        });
    });
    if (options.size > 1) {
        report.run("a rank that does not come is named when the deadline has passed", [&] {
            return detail::on_all_ranks(make, options, [&](auto& group, int rank) {
                return detail::wait_for_absent(group, rank, options);
            });
        });
    }
    return report;
}

}  // namespace weightwire::testing
