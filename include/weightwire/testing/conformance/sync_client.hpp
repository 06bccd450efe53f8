#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/testing/conformance/report.hpp>
#include <weightwire/testing/recording_service.hpp>

/// @file
/// The conformance suite of `SyncClient`: run it on your own model.

namespace weightwire::testing {

/// What the suite of clients needs to know.
struct sync_client_suite_options {
    std::size_t peers = 3;                     ///< services to make a client for, at least 1
    std::chrono::milliseconds budget{10'000};  ///< deadline of calls that should be answered
    std::chrono::milliseconds silence{200};    ///< deadline of calls that will not be
    std::chrono::milliseconds slack{5'000};    ///< how late a call may come back
};

namespace detail {

/// Writes down which peers the observer heard of; asks for a stop when it has heard of enough.
struct observer_log {
    explicit observer_log(std::size_t peers, std::size_t enough) : heard(peers), stop_at{enough} {}
    std::deque<std::atomic<int>> heard;
    std::atomic<std::size_t> total{0};
    std::size_t stop_at;
    std::stop_source stop{};

    [[nodiscard]] reply_observer observer() noexcept {
        return {[](void* context, std::size_t peer, const peer_reply&) noexcept {
                    auto& self = *static_cast<observer_log*>(context);
                    if (peer < self.heard.size()) {
                        ++self.heard[peer];
                    }
                    if (++self.total == self.stop_at) {
                        self.stop.request_stop();
                    }
                },
                this};
    }
};

/// The suite over one client and the services behind it. Each check returns what was wrong.
template <SyncClient Client>
class sync_client_checks {
    using replies = std::vector<peer_reply>;

public:
    sync_client_checks(Client& client, std::deque<recording_service>& services,
                       const sync_client_suite_options& options)
        : client_{client}, services_{services}, options_{options} {}

    [[nodiscard]] std::string peers() {
        if (client_.peer_count() != services_.size()) {
            return "peer_count() is " + std::to_string(client_.peer_count()) + " for " +
                   std::to_string(services_.size()) + " services";
        }
        for (std::size_t i = 0; i < services_.size(); ++i) {
            for (std::size_t j = 0; j < i; ++j) {
                if (client_.peer_name(i) == client_.peer_name(j)) {
                    return "two peers are named " + std::string{client_.peer_name(i)};
                }
            }
        }
        return {};
    }

    /// Each call arrives at each peer as a POST to its route, with its own body.
    [[nodiscard]] std::string routes() {
        const std::vector<std::string> bodies = distinct_bodies();
        const std::vector<std::string_view> views{bodies.begin(), bodies.end()};
        const control_message message{.bodies = views};
        std::string wrong;
        const auto check = [&](std::string_view route, const replies& got) {
            wrong = wrong.empty() ? arrived(route, "application/json", bodies, got) : wrong;
        };
        check("/init_weight_transfer_engine", client_.init(message, soon(), {}));
        check("/start_weight_update", client_.start(message, soon(), {}));
        check("/update_weights", client_.update(message, soon(), {}));
        check("/finish_weight_update", client_.finish(message, soon(), {}));
        return wrong;
    }

    /// One body goes to all; a binary one arrives unchanged, with its type.
    [[nodiscard]] std::string one_body() {
        const std::string binary{"\0\xff\r\n\x80 binary", 12};
        const std::string_view view = binary;
        const control_message message{.bodies = {&view, 1},
                                      .content_type = "application/octet-stream"};
        return arrived("/update_weights", "application/octet-stream",
                       std::vector(services_.size(), binary), client_.update(message, soon(), {}));
    }

    [[nodiscard]] std::string mask() {
        std::vector<unsigned char> only(services_.size(), 1);
        only.back() = 0;
        const auto got = client_.update({.only = only}, soon(), {});
        if (got.size() != services_.size()) {
            return count_of(got);
        }
        if (got.back().answer.fault != reply_fault::left_out) {
            return "a peer that the mask leaves out has the fault " + fault_of(got.back());
        }
        for (std::size_t i = 0; i < services_.size(); ++i) {
            const auto calls = services_[i].take_calls().size();
            if (calls != only[i]) {
                return "peer " + std::to_string(i) + " was asked " + std::to_string(calls) +
                       " times, the mask says " + std::to_string(only[i]);
            }
        }
        return {};
    }

    /// A peer's failure is its reply's, with status and body; the others are not touched.
    [[nodiscard]] std::string failure() {
        services_.back().answer_with(500, "{\"error\":\"no\"}");
        const auto got = client_.update({}, soon(), {});
        services_.back().answer_with(200, "{}");
        forget();
        if (got.size() != services_.size()) {
            return count_of(got);
        }
        if (got.back().answer.status != 500 || got.back().answer.body != "{\"error\":\"no\"}") {
            return "a 500 arrived as " + described(got.back());
        }
        return all_ok(got, services_.size() - 1);
    }

    [[nodiscard]] std::string observed() {
        observer_log log{services_.size(), 0};
        static_cast<void>(client_.update({.observer = log.observer()}, soon(), {}));
        forget();
        return heard_once(log);
    }

    /// A silent peer costs the deadline; the others' replies are whole.
    [[nodiscard]] std::string deadline_kept() {
        services_.front().set_silent(true);
        const auto until = deadline::after(options_.silence);
        const auto got = client_.update({}, until, {});
        const bool early = !until.expired();
        const bool late = deadline::clock::now() > until.when() + options_.slack;
        speak_again();
        if (got.size() != services_.size()) {
            return count_of(got);
        }
        if (early || late) {
            return early ? "the call gave up before its deadline"
                         : "the call came back long after its deadline";
        }
        if (got.front().answer.fault != reply_fault::timed_out) {
            return "a silent peer arrived as " + described(got.front());
        }
        return all_ok({got.begin() + 1, got.end()}, services_.size() - 1);
    }

    /// The observer hears of the others while one peer is silent: it asks for the stop.
    [[nodiscard]] std::string stopped() {
        services_.front().set_silent(true);
        observer_log log{services_.size(), services_.size() - 1};
        if (services_.size() == 1) {
            log.stop.request_stop();
        }
        const auto until = deadline::after(options_.budget);
        const auto got = client_.update({.observer = log.observer()}, until, log.stop.get_token());
        const bool waited = until.expired();
        speak_again();
        if (got.size() != services_.size()) {
            return count_of(got);
        }
        if (waited) {
            return "a stop was not heeded before the deadline, or the observer heard too late";
        }
        if (got.front().answer.fault != reply_fault::cancelled) {
            return "a stopped peer arrived as " + described(got.front());
        }
        return all_ok({got.begin() + 1, got.end()}, services_.size() - 1);
    }

    /// After peers were silent, the next call is answered by all.
    [[nodiscard]] std::string recovers() {
        const auto got = client_.update({}, soon(), {});
        forget();
        return got.size() == services_.size() ? all_ok(got, got.size()) : count_of(got);
    }

    [[nodiscard]] std::string refuses_misfits() {
        const std::vector<std::string_view> bodies(services_.size() + 1, "{}");
        const std::vector<unsigned char> only(services_.size() + 1, 1);
        return refused({.bodies = bodies}, "bodies") + refused({.only = only}, "mask entries");
    }

    /// Any route, with its method and query. An update that was given up in an earlier check may
    /// still arrive meanwhile and does not count.
    [[nodiscard]] std::string requests() {
        static_cast<void>(client_.request("GET", "/a/b?c=1&d=2", {}, soon(), {}));
        for (auto& service : services_) {
            auto calls = service.take_calls();
            std::erase_if(calls, [](const auto& call) { return call.target == "/update_weights"; });
            if (calls.size() != 1 || calls[0].method != "GET" ||
                calls[0].target != "/a/b?c=1&d=2") {
                return "request(GET, /a/b?c=1&d=2) arrived as " +
                       (calls.empty() ? "nothing" : calls[0].method + " " + calls[0].target);
            }
        }
        return {};
    }

private:
    [[nodiscard]] deadline soon() const { return deadline::after(options_.budget); }

    [[nodiscard]] std::vector<std::string> distinct_bodies() const {
        std::vector<std::string> out;
        for (std::size_t i = 0; i < services_.size(); ++i) {
            out.push_back("{\"peer\":" + std::to_string(i) + "}");
        }
        return out;
    }

    void forget() {
        for (auto& service : services_) {
            static_cast<void>(service.take_calls());
        }
    }
    void speak_again() {
        services_.front().set_silent(false);
        forget();
    }

    [[nodiscard]] static std::string fault_of(const peer_reply& reply) {
        return std::string{to_string(reply.answer.fault)};
    }
    [[nodiscard]] static std::string described(const peer_reply& reply) {
        return "status " + std::to_string(reply.answer.status) + ", fault " + fault_of(reply) +
               ", body '" + reply.answer.body + "'";
    }
    [[nodiscard]] std::string count_of(const replies& got) const {
        return std::to_string(got.size()) + " replies for " + std::to_string(services_.size()) +
               " peers";
    }

    [[nodiscard]] static std::string all_ok(const replies& got, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) {
            if (!got[i].ok() || got[i].answer.body != "{}") {
                return "a peer that answered 200 arrived as " + described(got[i]);
            }
        }
        return {};
    }

    /// Whether every service got exactly this request and every reply is its answer, in order.
    [[nodiscard]] std::string arrived(std::string_view route, std::string_view type,
                                      const std::vector<std::string>& bodies, const replies& got) {
        if (got.size() != services_.size()) {
            return std::string{route} + ": " + count_of(got);
        }
        for (std::size_t i = 0; i < services_.size(); ++i) {
            const auto calls = services_[i].take_calls();
            const recorded_call expected{"POST", std::string{route}, std::string{type}, bodies[i]};
            if (calls.size() != 1 || !(calls[0] == expected)) {
                return std::string{route} + " did not arrive at peer " + std::to_string(i) +
                       " as one POST with its type and body";
            }
            if (got[i].peer != client_.peer_name(i)) {
                return "reply " + std::to_string(i) + " names the peer " + got[i].peer;
            }
        }
        return all_ok(got, got.size());
    }

    [[nodiscard]] static std::string heard_once(const observer_log& log) {
        for (std::size_t i = 0; i < log.heard.size(); ++i) {
            if (log.heard[i] != 1) {
                return "the observer heard of peer " + std::to_string(i) + " " +
                       std::to_string(log.heard[i]) + " times";
            }
        }
        return {};
    }

    [[nodiscard]] std::string refused(const control_message& message, std::string_view what) {
        try {
            static_cast<void>(client_.update(message, soon(), {}));
        } catch (const usage_error&) {
            return {};
        }
        forget();
        return "a message with too many " + std::string{what} + " was not refused as usage_error. ";
    }

    Client& client_;
    std::deque<recording_service>& services_;
    const sync_client_suite_options& options_;
};

}  // namespace detail

/// Looks at everything that `SyncClient` promises, and at `request` where the client has it.
/// @param make `make(std::span<recording_service* const>)` gives an object whose member `client` is
/// a client with one peer a service, in that order; for a client over sockets the object also holds
/// the servers in front of the services (`http::server`). The services outlive it.
template <class Make>
[[nodiscard]] conformance_report check_sync_client(Make&& make,
                                                   const sync_client_suite_options& options = {}) {
    std::deque<recording_service> services(options.peers);
    std::vector<recording_service*> pointers;
    for (auto& service : services) {
        pointers.push_back(&service);
    }
    auto made = make(std::span<recording_service* const>{pointers});
    using client_type = std::remove_reference_t<decltype(made.client)>;
    detail::sync_client_checks<client_type> checks{made.client, services, options};

    conformance_report report;
    if (!report.run("one peer a service", [&] { return checks.peers(); })) {
        return report;
    }
    report.run("the four calls arrive at their routes", [&] { return checks.routes(); });
    report.run("one body goes to all peers unchanged", [&] { return checks.one_body(); });
    report.run("the mask is honoured", [&] { return checks.mask(); });
    report.run("a peer's failure is a value", [&] { return checks.failure(); });
    report.run("the observer hears of each peer once", [&] { return checks.observed(); });
    report.run("a silent peer costs the deadline", [&] { return checks.deadline_kept(); });
    report.run("a stop ends the call", [&] { return checks.stopped(); });
    report.run("the client works after a silent peer", [&] { return checks.recovers(); });
    report.run("a misfitting message is refused", [&] { return checks.refuses_misfits(); });
    if constexpr (HasRequest<client_type>) {
        report.run("request reaches any route", [&] { return checks.requests(); });
    }
    return report;
}

}  // namespace weightwire::testing
