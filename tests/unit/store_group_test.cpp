// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/rendezvous/store_group.hpp>
#include <weightwire/testing/conformance/trainer_group.hpp>

namespace {

using namespace std::chrono_literals;
using namespace weightwire;

deadline soon() { return deadline::after(20s); }

/// A port that was free a moment ago, for ranks that must know it before rank 0 listens.
std::uint16_t free_port() { return store_group::host(1).port(); }

/// Runs `work` in a child process, which ends with what it returns; `kill` ends it at once.
class child_process {
public:
    template <class Work>
    explicit child_process(Work work) : process_{::fork()} {
        REQUIRE(process_ >= 0);
        if (process_ == 0) {
            int status = 99;
            try {
                status = work();
            } catch (const std::exception& caught) {
                ::dprintf(2, "child: %s\n", caught.what());
            }
            ::_exit(status);
        }
    }
    child_process(const child_process&) = delete;
    child_process& operator=(const child_process&) = delete;
    ~child_process() {
        if (process_ > 0) {
            kill();
        }
    }
    void kill() {
        ::kill(process_, SIGKILL);
        (void)status();
    }
    /// SIGSTOP, and waits until it has stopped.
    void stop() {
        ::kill(process_, SIGSTOP);
        int status = 0;
        ::waitpid(process_, &status, WUNTRACED);
    }
    /// Waits for its end.
    int status() {
        int status = 0;
        ::waitpid(std::exchange(process_, -1), &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }

private:
    pid_t process_;
};

/// Rank 0 of two, which after one barrier does nothing more.
child_process pausing_rank_0(std::uint16_t port) {
    return child_process{[port] {
        auto group = store_group::host(2, {.port = port});
        group.barrier(soon());
        ::pause();
        return 0;
    }};
}

TEST_CASE("a store group conforms with one, two and eight ranks") {
    for (const int size : {1, 2, 8}) {
        // The suite makes three groups, one after the other; each rank counts them for itself.
        std::vector<std::uint16_t> ports{free_port(), free_port(), free_port()};
        std::vector<std::size_t> made(static_cast<std::size_t>(size), 0);
        const auto make = [&](int rank) {
            const auto port = ports[made[static_cast<std::size_t>(rank)]++];
            return store_group{{.rank = rank, .size = size, .port = port}, soon()};
        };
        const auto report = testing::check_trainer_group(
            make, {.size = size, .short_budget = std::chrono::seconds{2}});
        CHECK_MESSAGE(report.passed(), report.text());
    }
}

/// Gathers one byte a rank, meets at a barrier, leaves. 0 when all was right.
int gather_and_leave(store_group group) {
    for (int step = 0; step < 20; ++step) {
        const std::string mine(static_cast<std::size_t>(step),
                               static_cast<char>('a' + group.rank()));
        const auto all = group.all_gather(mine, soon());
        for (int rank = 0; rank < group.size(); ++rank) {
            if (all[static_cast<std::size_t>(rank)] !=
                std::string(static_cast<std::size_t>(step), static_cast<char>('a' + rank))) {
                return 1;
            }
        }
        group.barrier(soon());
    }
    group.close(soon());
    group.close(soon());  // idempotent
    return 0;
}

TEST_CASE("four processes agree, rank 0 is the last to leave") {
    const auto port = free_port();
    std::vector<std::unique_ptr<child_process>> others;
    for (int rank = 1; rank < 4; ++rank) {
        others.push_back(std::make_unique<child_process>([rank, port] {
            return gather_and_leave(store_group::join(rank, 4, "127.0.0.1", port, soon()));
        }));
    }
    CHECK(gather_and_leave(store_group::host(4, {.port = port})) == 0);
    for (auto& other : others) {
        CHECK(other->status() == 0);
    }
}

TEST_CASE("old steps leave nothing behind") {
    auto zero = store_group::host(2);
    auto one = store_group::join(1, 2, "127.0.0.1", zero.port(), soon());
    auto store = rendezvous::tcp_store_client::connect("127.0.0.1", zero.port(), soon());
    std::int64_t after_ten = 0;
    for (int step = 0; step < 200; ++step) {
        std::jthread other{[&] { one.barrier(soon()); }};
        zero.barrier(soon());
        other.join();
        if (step == 10) {
            after_ten = store.number_of_keys(soon());
        }
    }
    CHECK(store.number_of_keys(soon()) == after_ten);
}

TEST_CASE("a late rank is waited for") {
    auto zero = store_group::host(2);
    child_process late{[port = zero.port()] {
        std::this_thread::sleep_for(300ms);
        auto group = store_group::join(1, 2, "127.0.0.1", port, soon());
        const auto all = group.all_gather("one", soon());
        group.close(soon());
        return all == std::vector<std::string>{"zero", "one"} ? 0 : 1;
    }};
    CHECK(zero.all_gather("zero", soon()) == std::vector<std::string>{"zero", "one"});
    zero.close(soon());
    CHECK(late.status() == 0);
}

TEST_CASE("a dead rank is named by the others") {
    auto zero = store_group::host(3);
    child_process dies{[port = zero.port()] {
        auto group = store_group::join(2, 3, "127.0.0.1", port, soon());
        group.barrier(soon());
        ::pause();
        return 0;
    }};
    auto one = store_group::join(1, 3, "127.0.0.1", zero.port(), soon());
    std::jthread beside{[&] { one.barrier(soon()); }};
    zero.barrier(soon());
    beside.join();
    dies.kill();
    auto seen = std::async(std::launch::async, [&] {
        try {
            (void)one.all_gather("x", deadline::after(700ms));
        } catch (const timeout_error& caught) {
            return std::string{caught.what()};
        }
        return std::string{"nothing was thrown"};
    });
    try {
        (void)zero.all_gather("x", deadline::after(700ms));
        FAIL("rank 2 is dead");
    } catch (const timeout_error& caught) {
        CHECK(caught.context().peer == "trainer rank 2");
        CHECK(caught.context().operation == "all_gather");
        CHECK(caught.context().rank == 0);
        CHECK(std::string{caught.what()}.find("rank 2 did not come in time") != std::string::npos);
    }
    CHECK(seen.get().find("rank 2 did not come in time") != std::string::npos);
    // Rank 0 does not wait for ever for who cannot leave.
    one.close(soon());
    CHECK_THROWS_WITH_AS(zero.close(deadline::after(100ms)), doctest::Contains("trainer rank 2"),
                         timeout_error);
}

TEST_CASE("a dead rank 0 is a peer error at once") {
    const auto port = free_port();
    auto zero = pausing_rank_0(port);
    auto one = store_group::join(1, 2, "127.0.0.1", port, soon());
    one.barrier(soon());
    std::jthread killer{[&] {
        std::this_thread::sleep_for(50ms);
        zero.kill();
    }};
    try {
        one.barrier(soon());
        FAIL("rank 0 is dead");
    } catch (const peer_error& caught) {
        CHECK(caught.context().peer == "trainer rank 0");
        CHECK(caught.context().operation == "barrier");
    }
}

TEST_CASE("a stopped rank 0 is named when the deadline has passed") {
    const auto port = free_port();
    auto zero = pausing_rank_0(port);
    auto one = store_group::join(1, 2, "127.0.0.1", port, soon());
    one.barrier(soon());
    zero.stop();
    CHECK_THROWS_WITH_AS(one.barrier(deadline::after(500ms)), doctest::Contains("trainer rank 0"),
                         timeout_error);
}

TEST_CASE("a group that cannot be made says why") {
    auto zero = store_group::host(2);
    const auto port = zero.port();
    SUBCASE("rank or size make no sense") {
        CHECK_THROWS_AS((void)store_group::host(0), usage_error);
        CHECK_THROWS_AS((void)store_group::join(2, 2, "127.0.0.1", port, soon()), usage_error);
        CHECK_THROWS_AS((void)store_group::join(-1, 2, "127.0.0.1", port, soon()), usage_error);
    }
    SUBCASE("the sizes differ") {
        CHECK_THROWS_WITH_AS((void)store_group::join(1, 3, "127.0.0.1", port, soon()),
                             doctest::Contains("was told a size of 3"), mismatch_error);
    }
    SUBCASE("a rank joins twice") {
        const auto one = store_group::join(1, 2, "127.0.0.1", port, soon());
        CHECK_THROWS_WITH_AS((void)store_group::join(1, 2, "127.0.0.1", port, soon()),
                             doctest::Contains("rank 1 has already joined"), mismatch_error);
    }
    SUBCASE("the port is in use") {
        CHECK_THROWS_WITH_AS((void)store_group::host(2, {.port = port}),
                             doctest::Contains(std::to_string(port).c_str()), resource_error);
    }
    SUBCASE("rank 0 never comes") {
        const auto unused = free_port();
        try {
            (void)store_group::join(1, 2, "127.0.0.1", unused, deadline::after(100ms));
            FAIL("nobody listens there");
        } catch (const timeout_error& caught) {
            CHECK(caught.context().phase == phase::init);
            CHECK(caught.context().peer == "trainer rank 0");
            CHECK(std::string{caught.what()}.find(std::to_string(unused)) != std::string::npos);
        }
    }
}

TEST_CASE("a collective that cannot begin says why") {
    auto zero = store_group::host(1);
    CHECK_THROWS_AS(
        (void)zero.all_gather(std::string(store_group::max_value_bytes + 1, 'x'), soon()),
        usage_error);
    CHECK_THROWS_AS(zero.barrier(deadline::after(-1s)), timeout_error);
    const std::string largest(store_group::max_value_bytes, 'x');
    CHECK(zero.all_gather(largest, soon()).front() == largest);
    auto moved = std::move(zero);
    moved.barrier(soon());
    moved.close(soon());
    CHECK_THROWS_AS(moved.barrier(soon()), usage_error);
}

TEST_CASE("the group suite finds what is wrong with a group") {
    struct lonely {
        int mine;
        int rank() const { return mine; }
        int size() const { return 2; }
        std::vector<std::string> all_gather(std::string_view bytes, deadline) const {
            return {std::string{bytes}, std::string{bytes}};
        }
        void barrier(deadline) const {}
    };
    const auto report = testing::check_trainer_group([](int rank) { return lonely{rank}; },
                                                     {.size = 2, .steps = 200, .budget = 2s});
    CHECK_FALSE(report.find("all_gather gives everyone's bytes by rank, step after step")->passed);
    CHECK_FALSE(
        report.find("a rank that does not come is named when the deadline has passed")->passed);
}

}  // namespace
