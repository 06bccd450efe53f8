// SPDX-License-Identifier: Apache-2.0
//
// A trainer of four processes whose source performs a real barrier for every parameter, as a gather
// would.

#include <doctest/doctest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>
#include <ranges>
#include <string>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/trainer.hpp>

#include "../support/small_model.hpp"
#include "../support/worker_process.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;

constexpr int ranks = 4;
constexpr int parameters = 10;

/// Memory that the four processes share.
struct shared_state {
    std::atomic<int> store_port;
    pthread_barrier_t barrier;
    std::uint64_t reports[ranks];
    char errors[ranks][256];
};

shared_state* share() {
    auto* const memory = ::mmap(nullptr, sizeof(shared_state), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    auto* const state = ::new (memory) shared_state{};
    pthread_barrierattr_t attributes;
    ::pthread_barrierattr_init(&attributes);
    ::pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    ::pthread_barrier_init(&state->barrier, &attributes, ranks);
    return state;
}

/// Each parameter exists only once all ranks have come for it. `fail_on` throws there, in round
/// `fail_in`.
struct gathered_source {
    tests::small_weights& weights_of_rank;
    shared_state* state;
    int fail_on = -1;
    int fail_in = 0;
    int round = 0;

    const auto& metadata() const { return weights_of_rank.metadata(); }
    auto weights() {
        ++round;
        return std::views::iota(std::size_t{0}, weights_of_rank.weights().size()) |
               std::views::transform([this](std::size_t i) {
                   ::pthread_barrier_wait(&state->barrier);
                   if (static_cast<int>(i) == fail_on && round == fail_in) {
                       throw data_error{"the gather failed",
                                        {.tensor = weights_of_rank.metadata()[i].name}};
                   }
                   return weights_of_rank.weights()[i];
               });
    }
};
static_assert(explain_weight_source<gathered_source>());

/// Where rank 0 listens, once it does.
std::uint16_t port_of(const shared_state* state) {
    while (state->store_port == 0) {
        ::usleep(1000);
    }
    return static_cast<std::uint16_t>(state->store_port);
}

/// What one trainer process does; its exit status is 0 when it saw what it should.
void train(int rank, const std::string& url, shared_state* state, int failing_rank) {
    tests::small_weights weights{parameters, 1000};
    gathered_source source{weights, state, failing_rank == rank ? 3 : -1, 2};
    const auto until = deadline::after(20s);
    auto group = rank == 0 ? store_group::host(ranks)
                           : store_group::join(rank, ranks, "127.0.0.1", port_of(state), until);
    if (rank == 0) {
        state->store_port = group.port();
    }
    auto engine = trainer_init(ipc::trainer_init_info{.verify = true, .rank = rank},
                               http_sync_client{url}, source, {}, group);
    for (std::uint64_t version = 1; version <= 3; ++version) {
        weights.set(version);
        try {
            const auto report =
                engine.send_weights({.version = version, .deadline = deadline::after(20s)});
            state->reports[rank] =
                state->reports[rank] * 100 + report.version * 10 + report.committed();
        } catch (const error& caught) {
            std::snprintf(state->errors[rank], sizeof state->errors[rank], "%s", caught.what());
        }
    }
    engine.close(deadline::after(5s));
    group.close(deadline::after(5s));
}

void run_ranks(const std::string& url, shared_state* state, int failing_rank) {
    pid_t processes[ranks];
    for (int rank = 0; rank < ranks; ++rank) {
        processes[rank] = ::fork();
        if (processes[rank] == 0) {
            ::alarm(60);
            try {
                train(rank, url, state, failing_rank);
            } catch (const std::exception& failed) {
                std::fprintf(stderr, "rank %d: %s\n", rank, failed.what());
                ::_exit(1);
            }
            ::_exit(0);
        }
    }
    for (const auto process : processes) {
        int status = 1;
        CHECK(::waitpid(process, &status, 0) == process);
        CHECK(status == 0);
    }
}

}  // namespace

TEST_CASE("four trainer ranks end every round with the same report") {
    tests::worker_process worker{
        {"--parameters", std::to_string(parameters), "--elements", "1000"}};
    auto* const state = share();
    run_ranks(worker.url(), state, -1);
    for (int rank = 0; rank < ranks; ++rank) {
        CAPTURE(rank);
        CHECK(state->reports[rank] == 112131);
        CHECK(std::string{state->errors[rank]}.empty());
    }
    CHECK(worker.version() == "3");
}

TEST_CASE(
    "a source that fails on any rank ends the round on all of them with that error, and the next "
    "round works") {
    for (const int failing : {0, 2}) {
        CAPTURE(failing);
        tests::worker_process worker{
            {"--parameters", std::to_string(parameters), "--elements", "1000"}};
        auto* const state = share();
        run_ranks(worker.url(), state, failing);
        for (int rank = 0; rank < ranks; ++rank) {
            CAPTURE(rank);
            CHECK(state->reports[rank] == 1131);
            const std::string said = state->errors[rank];
            CHECK(said.find("the gather failed") != std::string::npos);
            CHECK(said.find("[tensor model.layers.1.down.weight]") != std::string::npos);
        }
        CHECK(worker.version() == "3");
    }
}
