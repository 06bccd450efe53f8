// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/engine/local_sync_client.hpp>
#include <weightwire/http/http.hpp>
#include <weightwire/testing/conformance/sync_client.hpp>

using namespace std::chrono_literals;
using weightwire::control_message;
using weightwire::deadline;
using weightwire::peer_reply;
using weightwire::testing::check_sync_client;
using weightwire::testing::recording_service;

namespace {

using server = weightwire::http::server<recording_service&>;
using services = std::span<recording_service* const>;

std::vector<std::unique_ptr<server>> serve(services each) {
    std::vector<std::unique_ptr<server>> out;
    for (auto* service : each) {
        out.push_back(std::make_unique<server>(*service));
        out.back()->start();
    }
    return out;
}

std::vector<std::string> urls_of(const std::vector<std::unique_ptr<server>>& servers) {
    std::vector<std::string> out;
    for (const auto& each : servers) {
        out.push_back(each->url());
    }
    return out;
}

/// A fan-out over HTTP, with one of its promises broken by `Defect`.
template <class Defect>
struct defective {
    weightwire::fan_out_sync_client<weightwire::http_sync_client<>> inner;
    std::size_t peer_count() const { return inner.peer_count(); }
    std::string_view peer_name(std::size_t i) const { return inner.peer_name(i); }
    using replies = std::vector<peer_reply>;
    replies init(const control_message& m, deadline d, std::stop_token s) {
        return inner.init(m, d, s);
    }
    replies start(const control_message& m, deadline d, std::stop_token s) {
        return inner.start(m, d, s);
    }
    replies update(const control_message& m, deadline d, std::stop_token s) {
        return Defect{}(inner, m, d, s);
    }
    replies finish(const control_message& m, deadline d, std::stop_token s) {
        return inner.finish(m, d, s);
    }
};

template <class Defect>
weightwire::testing::conformance_report check_defective() {
    struct made {
        std::vector<std::unique_ptr<server>> servers;
        defective<Defect> client;
    };
    return check_sync_client(
        [](services each) {
            auto servers = serve(each);
            const auto urls = urls_of(servers);
            return made{std::move(servers),
                        {weightwire::fan_out_sync_client{weightwire::http_sync_clients(urls)}}};
        },
        {.budget = 1s, .silence = 50ms});
}

struct throws_on_failure {
    auto operator()(auto& inner, const control_message& m, deadline d, std::stop_token s) {
        auto replies = inner.update(m, d, s);
        for (const auto& reply : replies) {
            if (reply.answer.status >= 500) {
                throw weightwire::peer_error{"a server answered 500"};
            }
        }
        return replies;
    }
};
struct ignores_mask {
    auto operator()(auto& inner, control_message m, deadline d, std::stop_token s) {
        m.only = {};
        return inner.update(m, d, s);
    }
};
struct forgets_observer {
    auto operator()(auto& inner, control_message m, deadline d, std::stop_token s) {
        m.observer = {};
        return inner.update(m, d, s);
    }
};
struct ignores_stop {
    auto operator()(auto& inner, const control_message& m, deadline d, std::stop_token) {
        return inner.update(m, d, {});
    }
};
struct drops_a_reply {
    auto operator()(auto& inner, const control_message& m, deadline d, std::stop_token s) {
        auto replies = inner.update(m, d, s);
        replies.pop_back();
        return replies;
    }
};

}  // namespace

TEST_CASE("http_sync_client keeps what SyncClient promises") {
    struct made {
        std::vector<std::unique_ptr<server>> servers;
        weightwire::http_sync_client<> client;
    };
    const auto report = check_sync_client(
        [](services each) {
            auto servers = serve(each);
            const auto url = servers.front()->url();
            return made{std::move(servers), weightwire::http_sync_client{url}};
        },
        {.peers = 1});
    INFO(report.text());
    CHECK(report.passed());
}

TEST_CASE("fan_out_sync_client over HTTP keeps what SyncClient promises") {
    struct made {
        std::vector<std::unique_ptr<server>> servers;
        weightwire::fan_out_sync_client<weightwire::http_sync_client<>> client;
    };
    const auto report = check_sync_client([](services each) {
        auto servers = serve(each);
        const auto urls = urls_of(servers);
        return made{std::move(servers),
                    weightwire::fan_out_sync_client{weightwire::http_sync_clients(urls)}};
    });
    INFO(report.text());
    CHECK(report.passed());
    CHECK(report.checks.size() == 11);
}

TEST_CASE("local_sync_client keeps what SyncClient promises") {
    struct made {
        explicit made(const std::vector<recording_service*>& each) : client{each} {}
        weightwire::local_sync_client<recording_service> client;
    };
    const auto report = check_sync_client(
        [](services each) { return made{std::vector(each.begin(), each.end())}; });
    INFO(report.text());
    CHECK(report.passed());
}

TEST_CASE("the suite finds a client that breaks a promise, and names the promise") {
    const auto fails = [](const weightwire::testing::conformance_report& report,
                          std::string_view name) {
        INFO(report.text());
        REQUIRE(report.find(name) != nullptr);
        CHECK_FALSE(report.find(name)->passed);
    };
    fails(check_defective<throws_on_failure>(), "a peer's failure is a value");
    fails(check_defective<ignores_mask>(), "the mask is honoured");
    fails(check_defective<forgets_observer>(), "the observer hears of each peer once");
    fails(check_defective<ignores_stop>(), "a stop ends the call");
    fails(check_defective<drops_a_reply>(), "a silent peer costs the deadline");
}
