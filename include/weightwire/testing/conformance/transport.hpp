#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/testing/conformance/report.hpp>
#include <weightwire/testing/conformance/transport_rig.hpp>
#include <weightwire/wire/json_reader.hpp>

/// @file
/// The conformance suite of `Transport`: run it on your own backend.
///
/// Both halves run against each other in one process, each receiver on a thread of its own, without
/// engines. A call that never returns hangs the suite: run it under your test runner's limit.

namespace weightwire::testing {

/// What the suite of transports needs to know.
struct transport_suite_options {
    std::uint64_t seed = 1;        ///< of the random manifests
    int manifests = 2;             ///< how many of them
    std::uint64_t rounds = 3;      ///< rounds on each
    std::vector<int> ranks{1, 2};  ///< worker ranks behind each peer; at least two peers
    std::chrono::milliseconds budget{30'000};     ///< for what must succeed
    std::chrono::milliseconds short_budget{200};  ///< for what must give up
};

namespace detail {

/// The checks, one a function; each makes its own rig.
template <Transport Tag>
class transport_suite {
    using traits = backend_traits<Tag>;
    using rig = transport_rig<Tag>;
    using worker = typename rig::worker;

public:
    transport_suite(const typename traits::init_info& info, const transport_suite_options& options)
        : info_{info}, options_{options} {}

    [[nodiscard]] conformance_report run() {
        conformance_report report;
        report.run("the init message is a JSON object, the same every time",
                   [&] { return init_message(); });
        report.run("rounds move every byte, from tensors that live until the next one",
                   [&] { return rounds(tensor_lifetime::until_next, false); });
        report.run("rounds move every byte, from tensors that stay where they are",
                   [&] { return rounds(tensor_lifetime::stable, false); });
        if constexpr (traits::capabilities.speaks_vllm) {
            report.run("rounds move every byte, spoken as to vLLM",
                       [&] { return rounds(tensor_lifetime::until_next, true); });
        }
        if constexpr (HasStage<typename traits::sender>) {
            report.run("a stage that gives up says why", [&] { return given_up_stage(); });
        }
        report.run("the sender keeps its deadline when no worker comes",
                   [&] { return absent_workers(); });
        report.run("the sender obeys its stop when no worker comes",
                   [&] { return stopped_sender(); });
        report.run("a receiver keeps its deadline when nothing is sent",
                   [&] { return silent_trainer(false); });
        report.run("a receiver obeys its stop when nothing is sent",
                   [&] { return silent_trainer(true); });
        report.run("a receiver may be released twice, and opened again", [&] { return reopen(); });
        report.run("a receiver refuses init messages that are garbage", [&] { return garbage(); });
        if constexpr (HasDropPeer<typename traits::sender>) {
            report.run("a dropped peer does not hold up the others, and may come back",
                       [&] { return drop_and_restore(); });
        }
        report.run("close releases everything and may be called twice", [&] { return close(); });
        return report;
    }

private:
    [[nodiscard]] deadline in_time() const { return deadline::after(options_.budget); }
    [[nodiscard]] deadline soon() const { return deadline::after(options_.short_budget); }
    [[nodiscard]] rig make(tensor_lifetime lifetime = tensor_lifetime::until_next,
                           bool vllm = false, std::uint64_t seed = 0) const {
        return rig{info_, random_manifest(options_.seed + seed, vllm), options_.ranks, lifetime,
                   vllm};
    }
    [[nodiscard]] static auto all() noexcept {
        return [](const worker&) { return true; };
    }

    [[nodiscard]] std::string init_message() const {
        const std::string first = info_.init_message();
        const wire::json_document document{first, "init message", phase::init};
        document.root().require_object();
        return first == info_.init_message() ? "" : "two calls give two texts";
    }

    [[nodiscard]] std::string rounds(tensor_lifetime lifetime, bool vllm) const {
        for (int i = 0; i < options_.manifests; ++i) {
            auto halves = make(lifetime, vllm, static_cast<std::uint64_t>(i));
            if (vllm && !can_speak_vllm(halves)) {
                return "the transport says that it speaks to vLLM, but gives no init form or no "
                       "body for an update";
            }
            halves.open(in_time());
            for (std::uint64_t number = 1; number <= options_.rounds; ++number) {
                const auto wrong = halves.round(number, in_time());
                if (!wrong.empty()) {
                    return wrong;
                }
            }
            halves.sender().close(in_time());
        }
        return {};
    }

    [[nodiscard]] static bool can_speak_vllm(rig& halves) {
        for (const auto& init : halves.inits()) {
            if (init.vllm.empty()) {
                return false;
            }
            for (const auto& form : init.vllm) {
                for (const auto& part : halves.sender().parts()) {
                    if (form.update_body >= part.vllm_bodies.size() ||
                        part.vllm_bodies[form.update_body].empty()) {
                        return false;
                    }
                }
            }
        }
        return true;
    }

    /// What `call` did, where it may succeed or must throw `Expected`; anything else is wrong.
    template <class Expected, class Call>
    [[nodiscard]] static std::string gives_up(std::string_view what, Call call, bool& returned) {
        returned = false;
        try {
            call();
            returned = true;
            return {};
        } catch (const Expected&) {
            return {};
        } catch (const error& caught) {
            return std::string{what} + " should throw a " + std::string{Expected::word} +
                   " error, but threw: " + caught.what();
        }
    }

    /// One round of the sender's calls alone. A one-sided sender may have nothing to wait for.
    template <class Expected>
    [[nodiscard]] std::string send_alone(rig& halves, deadline until,
                                         const std::stop_token& stop) const {
        bool opened = false;
        auto wrong = gives_up<Expected>(
            "open", [&] { halves.sender().open(until, stop); }, opened);
        if (!wrong.empty() || !opened) {
            return wrong;
        }
        rig_source<tensor_lifetime::until_next> source{halves.parameters(), halves.bytes()};
        round_of walk{source, halves.parameters()};
        auto stream = walk.stream();
        bool sent = false;
        wrong = gives_up<Expected>(
            "send",
            [&] {
                for (std::size_t part = 0; part < halves.sender().parts().size(); ++part) {
                    halves.stage(1, part, stream, until, stop);
                    halves.sender().send(1, part, stream, until, stop);
                }
            },
            sent);
        // What is staged and then read without the sender's help waits for nobody.
        constexpr bool alone = traits::capabilities.one_sided && HasStage<typename traits::sender>;
        return sent && !alone ? "every byte was sent although no worker was there to take it"
                              : wrong;
    }

    /// A stage that finds nothing to wait for may end in time all the same.
    [[nodiscard]] std::string given_up_stage() const {
        auto halves = make();
        halves.open(in_time());
        std::stop_source stopped;
        stopped.request_stop();
        for (const bool by_stop : {true, false}) {
            rig_source<tensor_lifetime::until_next> source{halves.parameters(), halves.bytes()};
            round_of walk{source, halves.parameters()};
            auto stream = walk.stream();
            bool returned = false;
            const auto call = [&] {
                halves.stage(by_stop ? 1 : 2, 0, stream, by_stop ? in_time() : deadline::at({}),
                             by_stop ? stopped.get_token() : std::stop_token{});
            };
            const auto wrong = by_stop ? gives_up<cancelled_error>("stage", call, returned)
                                       : gives_up<timeout_error>("stage", call, returned);
            if (!wrong.empty()) {
                return wrong;
            }
        }
        if constexpr (HasDropPeer<typename traits::sender>) {
            // Its sender stays; the workers come again by a new init.
            for (auto& one : halves.workers()) {
                one.receiver.release();
            }
            halves.open(in_time(), all(), false);
            return halves.round(3, in_time());
        } else {
            return {};
        }
    }

    [[nodiscard]] std::string absent_workers() const {
        auto halves = make();
        return send_alone<timeout_error>(halves, soon(), {});
    }

    [[nodiscard]] std::string stopped_sender() const {
        auto halves = make();
        std::stop_source stop;
        const std::jthread later{[&] {
            std::this_thread::sleep_for(options_.short_budget / 2);
            stop.request_stop();
        }};
        return send_alone<cancelled_error>(halves, in_time(), stop.get_token());
    }

    [[nodiscard]] std::string silent_trainer(bool by_stop) const {
        auto halves = make();
        halves.open(in_time());
        auto& one = halves.workers().front();
        std::stop_source stop;
        const std::jthread later{[&] {
            std::this_thread::sleep_for(options_.short_budget / 2);
            if (by_stop) {
                stop.request_stop();
            }
        }};
        bool returned = false;
        const auto call = [&] {
            halves.receive(one, 1, 0, by_stop ? in_time() : soon(), stop.get_token());
        };
        const auto wrong = by_stop ? gives_up<cancelled_error>("receive", call, returned)
                                   : gives_up<timeout_error>("receive", call, returned);
        if (returned && !traits::capabilities.one_sided) {
            return "receive returned although nothing was sent";
        }
        return wrong;
    }

    [[nodiscard]] std::string reopen() const {
        auto halves = make();
        halves.open(in_time());
        auto wrong = halves.round(1, in_time());
        if (!wrong.empty()) {
            return wrong;
        }
        for (auto& one : halves.workers()) {
            one.receiver.release();
            one.receiver.release();
        }
        // A new trainer takes over: another sender, the same receivers.
        auto next = make();
        std::swap(halves.workers(), next.workers());
        next.open(in_time());
        wrong = next.round(1, in_time());
        for (auto& one : next.workers()) {
            one.receiver.release();
        }
        std::swap(halves.workers(), next.workers());
        return wrong;
    }

    [[nodiscard]] std::string garbage() const {
        auto halves = make();
        auto& one = halves.workers().front();
        const auto& good = halves.inits()[one.peer].native;
        const std::vector<std::pair<std::string, std::string>> messages{
            {"", good},
            {"[]", good},
            {"{", good},
            {halves.wire_parameters(), "[]"},
            {halves.wire_parameters(), "{}"},
            {halves.wire_parameters(), good.substr(0, good.size() / 2)},
            {halves.wire_parameters(), R"({"no such member":1})"}};
        for (const auto& [parameters, transport] : messages) {
            try {
                one.receiver.open({.wire_parameters = parameters,
                                   .transport = transport,
                                   .parameters = &halves.parameters()},
                                  soon(), {});
                return "open took the parameters '" + parameters + "' with the transport '" +
                       transport + "'";
            } catch (const error&) {
                one.receiver.release();
            }
        }
        halves.open(in_time());
        return halves.round(1, in_time());
    }

    /// The last peer's ranks never receive; it is dropped while the others are served, comes back
    /// through a new init, and gets the next round.
    [[nodiscard]] std::string drop_and_restore() const {
        auto halves = make();
        const auto last = options_.ranks.size() - 1;
        const auto stays = [last](const worker& one) { return one.peer != last; };
        const auto leaves = [last](const worker& one) { return one.peer == last; };
        halves.open(in_time());
        {
            const std::jthread later{[&] {
                std::this_thread::sleep_for(options_.short_budget / 4);
                halves.sender().drop_peer(last);
            }};
            halves.move(1, in_time(), stays);
        }
        for (auto& one : halves.workers()) {
            if (stays(one)) {
                const auto wrong = one.landing.difference(halves.bytes());
                if (!wrong.empty()) {
                    return "after another peer was dropped: " + wrong;
                }
            } else {
                one.receiver.release();
            }
        }
        halves.open(in_time(), leaves, false);
        halves.sender().restore_peer(last);
        return halves.round(2, in_time());
    }

    [[nodiscard]] std::string close() const {
        auto halves = make();
        halves.open(in_time());
        auto wrong = halves.round(1, in_time());
        halves.sender().close(in_time());
        halves.sender().close(in_time());
        return wrong;
    }

    const typename traits::init_info& info_;
    const transport_suite_options& options_;
};

}  // namespace detail

/// Looks at everything that `Transport` promises. Host memory only.
/// @param info the choices to try; call it once for each set that matters.
template <Transport Tag>
[[nodiscard]] conformance_report check_transport(
    const typename backend_traits<Tag>::init_info& info,
    const transport_suite_options& options = {}) {
    return detail::transport_suite<Tag>{info, options}.run();
}

}  // namespace weightwire::testing
