#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <chrono>
#include <stop_token>
#include <string>
#include <utility>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/testing/conformance/weight_sink_trial.hpp>

/// @file
/// The promises of the members that a `WeightSink` need not have: tried where it has them.

namespace weightwire::testing::detail {

/// A token whose stop has been asked for.
inline std::stop_token stopped() {
    std::stop_source source;
    source.request_stop();
    return source.get_token();
}

/// Empty where `call` throws a `cancelled_error` in good time although readers hold `held` and its
/// deadline is far. A call that does not wait for them may return.
template <class Call>
std::string ends_at_the_stop(Call&& call, const char* name) {
    try {
        call();
    } catch (const cancelled_error&) {
    } catch (const timeout_error&) {
        return std::string{name} +
               " waited for its deadline, expected a cancelled_error at the stop";
    }
    return {};
}

/// With and without a reader in the way a stop ends `begin` or lets it pass; the sink is as before.
template <class Sink>
std::string begin_ends_at_the_stop(sink_trial<Sink>& trial) {
    if constexpr (HasStoppableBegin<Sink>) {
        trial.update(1);
        trial.update(2);
        std::string wrong;
        const auto begin = [&] {
            static_cast<void>(trial.sink().begin(session_info{1, 1000, 3, false},
                                                 trial.parameters(), trial.soon(), stopped()));
        };
        if constexpr (HasSnapshots<Sink>) {
            const auto held = trial.sink().acquire();
            trial.update_if_possible(3);
            wrong = ends_at_the_stop(begin, "begin");
        } else {
            wrong = ends_at_the_stop(begin, "begin");
        }
        trial.sink().rollback();
        if (!wrong.empty()) {
            return wrong;
        }
        trial.update(4);
        return trial.visible(4);
    }
    return {};
}

template <class Sink>
std::string prepare_ends_at_the_stop(sink_trial<Sink>& trial) {
    if constexpr (HasStoppablePrepare<Sink>) {
        trial.update(1);
        const auto destinations = trial.begin(2);
        trial.remember(destinations);
        trial.write(destinations, 2);
        std::string wrong;
        const auto prepare = [&] { trial.sink().prepare(trial.soon(), stopped()); };
        if constexpr (HasSnapshots<Sink>) {
            if (!trial.sink().dirty()) {  // in_place keeps readers out by now
                const auto held = trial.sink().acquire();
                wrong = ends_at_the_stop(prepare, "prepare");
            }
        } else {
            wrong = ends_at_the_stop(prepare, "prepare");
        }
        if (!wrong.empty()) {
            return wrong;
        }
        trial.sink().prepare(trial.soon());  // it may be tried again
        trial.sink().commit(2);
        return trial.visible(2);
    }
    return {};
}

/// Late, stopped, or rolled back after it: nothing of an exchange is left.
template <class Sink>
std::string exchange_can_be_undone(sink_trial<Sink>& trial) {
    if constexpr (HasExchange<Sink>) {
        trial.update(1);
        for (const weight_version next : {2U, 3U, 4U}) {
            trial.begin_and_prepare(next);
            try {
                if (next == 2) {
                    trial.exchange(deadline::after(std::chrono::seconds{-1}), {});
                } else {
                    trial.exchange(trial.soon(), next == 3 ? stopped() : std::stop_token{});
                }
            } catch (const timeout_error&) {
            } catch (const cancelled_error&) {
            }
            if (trial.sink().version() != 1) {
                return "version() changed before commit";
            }
            trial.sink().rollback();
            if (auto wrong = trial.old_or_dirty(1); !wrong.empty()) {
                return wrong;
            }
        }
        trial.begin_and_prepare(5);
        try {
            trial.exchange(deadline::after(std::chrono::seconds{-1}), {});
        } catch (const timeout_error&) {
        }
        trial.exchange(trial.soon(), {});  // the session was still prepared
        trial.sink().commit(5);
        if (auto wrong = trial.visible(5); !wrong.empty()) {
            return wrong;
        }
        trial.begin_and_prepare(6);
        trial.sink().commit(6);
        auto wrong = trial.visible(6);
        return wrong.empty() ? wrong : "a commit without an exchange: " + wrong;
    }
    return {};
}

/// A worker adds the guess to the clock, and takes a negative one for none.
template <class Sink>
std::string estimate_is_honest(sink_trial<Sink>& trial) {
    if constexpr (HasCommitEstimate<Sink>) {
        using std::chrono::nanoseconds;
        const auto guess = [&] {
            return nanoseconds{std::as_const(trial.sink()).commit_estimate()};
        };
        for (const weight_version next : {1U, 2U, 3U}) {
            trial.begin_and_prepare(next);
            const auto before = guess();
            trial.exchange(trial.soon(), {});
            const auto after = guess();
            trial.sink().commit(next);
            if (before < nanoseconds{0} || after < nanoseconds{0}) {
                return "the estimate of a prepared session is negative";
            }
            if (before > nanoseconds{trial.options().patience}) {
                return "the estimate is more than the " +
                       std::to_string(trial.options().patience.count()) +
                       " ms that a commit may take here";
            }
            if (HasExchange<Sink> && after > before) {
                return "the estimate grew by an exchange, which leaves less to do";
            }
        }
        return trial.visible(3);
    }
    return {};
}

/// The checks of what a sink need not have; one that it has not is not in the report.
template <class WithSink, class Run>
void check_optional_members(WithSink& with_sink, const Run& run) {
    std::array<bool, 4> has{};
    with_sink([&]<class Sink>(Sink&) {
        has = {HasStoppableBegin<Sink>, HasStoppablePrepare<Sink>, HasExchange<Sink>,
               HasCommitEstimate<Sink>};
    });
    if (has[0]) {
        run("begin ends at the stop", [](auto& trial) { return begin_ends_at_the_stop(trial); });
    }
    if (has[1]) {
        run("prepare ends at the stop",
            [](auto& trial) { return prepare_ends_at_the_stop(trial); });
    }
    if (has[2]) {
        run("an exchange can be undone", [](auto& trial) { return exchange_can_be_undone(trial); });
    }
    if (has[3]) {
        run("the commit estimate is honest", [](auto& trial) { return estimate_is_honest(trial); });
    }
}

}  // namespace weightwire::testing::detail
