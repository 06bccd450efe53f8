// SPDX-License-Identifier: Apache-2.0
//
// A worker process for tests: a parameter table, or several, behind a server on a port that it
// prints. Faults are asked for on the command line:
//
//   test_worker --parameters N --elements E [--ranks R] [--mode flip|copy_in|in_place] [--token T]
//   [--port P]
//               [--at begin|prepare|copy|commit --do die|stop|throw [--on RANK] [--in SESSION]]
//
// `copy` is the middle of a copy_in commit, where the live weights are a mix: the process stops
// there whatever `--do` says.

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/worker.hpp>

#include "small_model.hpp"
#include "touch_trap.hpp"

namespace {

using namespace weightwire;

struct fault {
    std::string at;
    std::string what;
    int rank = 0;
    std::uint64_t session = 1;
};

/// A parameter table that dies, stops or throws where it was told to.
class faulty_table {
public:
    faulty_table(const std::vector<param_meta>& parameters, commit_mode mode, const fault& wanted,
                 int rank)
        : table_{parameters, {.mode = mode}}, fault_{wanted}, rank_{rank} {}

    std::span<const destination> begin(const session_info& session, const manifest& parameters,
                                       deadline until) {
        session_ = session.session;
        meet("begin");
        if (met("copy")) {
            // Found before readers are kept out; copy_in never moves it.
            const auto held = table_.acquire();
            middle_ = held.tensor(held.size() / 2).bytes();
        }
        return table_.begin(session, parameters, until);
    }
    void group_complete(std::size_t group) { table_.group_complete(group); }
    void prepare(deadline until) {
        table_.prepare(until);
        meet("prepare");
        if (met("copy")) {
            tests::stop_at_first_touch(middle_);
        }
    }
    void exchange(deadline until, const std::stop_token& stop) { table_.exchange(until, stop); }
    std::chrono::nanoseconds commit_estimate() const noexcept { return table_.commit_estimate(); }
    void commit(weight_version version) noexcept {
        table_.commit(version);
        meet("commit");
    }
    void rollback() noexcept { table_.rollback(); }
    weight_version version() const noexcept { return table_.version(); }
    bool dirty() const noexcept { return table_.dirty(); }
    commit_mode mode() const noexcept { return table_.mode(); }
    const manifest& parameters() const noexcept { return table_.parameters(); }
    auto acquire() { return table_.acquire(); }

private:
    [[nodiscard]] bool met(std::string_view place) const {
        return fault_.at == place && fault_.rank == rank_ && fault_.session == session_;
    }
    void meet(std::string_view place) {
        if (!met(place)) {
            return;
        }
        if (fault_.what == "die") {
            ::_exit(86);
        }
        if (fault_.what == "stop") {
            ::raise(SIGSTOP);
        } else if (place != "commit") {
            throw resource_error{"this rank was told to fail",
                                 {.operation = std::string{place}, .rank = rank_}};
        }
    }

    parameter_table table_;
    fault fault_;
    int rank_;
    std::uint64_t session_ = 0;
    std::span<const std::byte> middle_;  // of the live weights
};
static_assert(HasExchange<faulty_table> && HasCommitEstimate<faulty_table>);
static_assert(explain_weight_sink<faulty_table>());

commit_mode mode_of(std::string_view word) {
    return word == "copy_in"    ? commit_mode::copy_in
           : word == "in_place" ? commit_mode::in_place
                                : commit_mode::flip;
}

}  // namespace

int main(int argc, char** argv) try {
    fault wanted;
    std::string mode = "flip";
    std::string token;
    int ranks = 1;
    int parameters = 1;
    int elements = 1;
    int port = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string_view key = argv[i];
        const std::string value = argv[i + 1];
        if (key == "--parameters") {
            parameters = std::stoi(value);
        } else if (key == "--elements") {
            elements = std::stoi(value);
        } else if (key == "--ranks") {
            ranks = std::stoi(value);
        } else if (key == "--mode") {
            mode = value;
        } else if (key == "--token") {
            token = value;
        } else if (key == "--port") {
            port = std::stoi(value);
        } else if (key == "--at") {
            wanted.at = value;
        } else if (key == "--do") {
            wanted.what = value;
        } else if (key == "--on") {
            wanted.rank = std::stoi(value);
        } else if (key == "--in") {
            wanted.session = std::stoul(value);
        } else {
            std::fprintf(stderr, "test_worker: what is %s?\n", argv[i]);
            return 2;
        }
    }
    const auto list = tests::small_model(parameters, elements);
    std::vector<std::unique_ptr<faulty_table>> tables;
    std::vector<faulty_table*> sinks;
    for (int rank = 0; rank < ranks; ++rank) {
        tables.push_back(std::make_unique<faulty_table>(list, mode_of(mode), wanted, rank));
        sinks.push_back(tables.back().get());
    }
    worker_engine engine{ipc::backend{}, sinks};
    worker_service service{engine};
    worker_server server{service, {.port = static_cast<std::uint16_t>(port), .token = token}};
    server.start();
    std::printf("%d\n", static_cast<int>(server.port()));
    std::fflush(stdout);
    for (char byte = 0;
         ::read(STDIN_FILENO, &byte, 1) > 0;) {  // until the test closes the pipe, or dies
    }
    server.stop(deadline::after(std::chrono::seconds{5}));
    return 0;
} catch (const std::exception& failed) {
    std::fprintf(stderr, "test_worker: %s\n", failed.what());
    return 1;
}
