// SPDX-License-Identifier: Apache-2.0
//
// A worker process for tests: a parameter table, or several, behind a server on a port that it
// prints. Faults are asked for on the command line:
//
//   test_worker --parameters N --elements E [--ranks R] [--mode flip|copy_in|in_place] [--token T]
//   [--port P] [--backend ipc|cuda_ipc|cuda_ipc_spread|sharded_pull|sharded_pull_across
//   [--first RANK] [--of RANKS] [--hidden H] [--attention whole] [--traffic FILE] [--node NAME]
//   [--landing BYTES]]
//               [--at begin|launch|prepare|copy|commit --do die|kill|stop|throw [--on RANK]
//               [--in SESSION]]
//
// `copy` is the middle of a copy_in commit, where the live weights are a mix: the process stops
// there whatever `--do` says. Spread, each rank has a device of its own. `launch` is of cuda_ipc,
// over host memory: just before the device would copy. With sharded_pull the model is that of
// moe_model.hpp, of which this worker has ranks RANK and following, and FILE gets a line a round
// and trainer rank: bytes read, bytes planned; FILE.node one a round and node peer. `read` is of
// it: when the first layer has come. `across` is over shared memory that acts as if it crossed
// machines, and other shared memory within a node.
//
// With WEIGHTWIRE_TEST_UCX it is test_ucx_worker, whose sharded_pull reads over UCX.

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/backends/sharded_pull/backend.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/worker.hpp>

#include "across_fabric.hpp"
#include "host_cuda_ipc.hpp"
#include "moe_model.hpp"
#include "small_model.hpp"
#include "touch_trap.hpp"

#ifdef WEIGHTWIRE_TEST_UCX
#include <weightwire/fabrics/ucx/fabric.hpp>
#endif

namespace {

using namespace weightwire;

#ifdef WEIGHTWIRE_TEST_UCX
using pull_backend = sharded_pull::basic_backend<ucx::fabric>;
#else
using pull_backend = sharded_pull::shared_memory_backend;
#endif

struct fault {
    std::string at;
    std::string what;
    int rank = 0;
    std::uint64_t session = 1;
};

/// A parameter table that dies, stops or throws where it was told to.
template <class Table>
class faulty_table {
public:
    faulty_table(const std::vector<param_meta>& parameters, commit_mode mode, const fault& wanted,
                 int rank, int on_device)
        : table_{make_table(parameters, mode, on_device)}, fault_{wanted}, rank_{rank} {
        if (wanted.at == "launch") {
            tests::host_ipc_world::at_step = [this](std::string_view step) {
                if (step == "launch") {
                    meet("launch");
                }
            };
        }
    }

    std::span<const destination> begin(const session_info& session, const manifest& parameters,
                                       deadline until) {
        session_ = session.session;
        meet("begin");
        if (met("copy")) {
            // Found before readers are kept out; copy_in never moves it.
            const auto held = table_.acquire();
            const auto middle = held.tensor(held.size() / 2);
            middle_ = {middle.data(), middle.byte_size()};
        }
        return table_.begin(session, parameters, until);
    }
    void group_complete(std::size_t group) {
        if (std::exchange(read_in_, session_) != session_) {
            meet("read");
        }
        table_.group_complete(group);
    }
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
    [[nodiscard]] weightwire::device device() const noexcept
        requires HasDevice<Table>
    {
        return table_.device();
    }
    void tensor_digests(std::span<const tensor_view> tensors, std::span<std::uint64_t> results,
                        deadline until, const std::stop_token& stop)
        requires HasTensorDigests<Table>
    {
        table_.tensor_digests(tensors, results, until, stop);
    }
    void clear_tensor(const mutable_tensor_view& tensor)
        requires HasTensorClear<Table>
    {
        table_.clear_tensor(tensor);
    }

private:
    [[nodiscard]] static Table make_table(const std::vector<param_meta>& parameters,
                                          commit_mode mode, int on_device) {
        if constexpr (std::is_constructible_v<typename Table::memory_type, int>) {
            return Table{
                manifest{parameters}, typename Table::memory_type{on_device}, {.mode = mode}};
        } else {
            return Table{parameters, {.mode = mode}};
        }
    }
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
        if (fault_.what == "kill") {
            ::raise(SIGKILL);
        } else if (fault_.what == "stop") {
            ::raise(SIGSTOP);
        } else if (place != "commit") {
            throw resource_error{"this rank was told to fail",
                                 {.operation = std::string{place}, .rank = rank_}};
        }
    }

    Table table_;
    fault fault_;
    int rank_;
    std::uint64_t session_ = 0;
    std::uint64_t read_in_ = 0;          // session whose first layer has come
    std::span<const std::byte> middle_;  // of the live weights
};
static_assert(HasExchange<faulty_table<parameter_table>> &&
              HasCommitEstimate<faulty_table<parameter_table>>);
static_assert(explain_weight_sink<faulty_table<parameter_table>>());
static_assert(explain_weight_sink<faulty_table<tests::pretended_device_table>>());

commit_mode mode_of(std::string_view word) {
    return word == "copy_in"    ? commit_mode::copy_in
           : word == "in_place" ? commit_mode::in_place
                                : commit_mode::flip;
}

/// What the command line asks for.
struct options {
    fault wanted{};
    std::string backend = "ipc";
    std::string mode = "flip";
    std::string token{};
    int ranks = 1;
    int parameters = 1;
    int elements = 1;
    int port = 0;
    int first = 0;
    int of = 4;
    int hidden = 32;
    bool whole_attention = false;
    std::string traffic{};
    std::string node{};
    std::uint64_t landing = 0;
};

/// Serves until the test closes the pipe, or dies.
template <class Table, class Backend>
void serve(const options& asked, Backend backend, const std::vector<param_meta>& list) {
    std::vector<std::unique_ptr<faulty_table<Table>>> tables;
    std::vector<faulty_table<Table>*> sinks;
    for (int rank = 0; rank < asked.ranks; ++rank) {
        tables.push_back(
            std::make_unique<faulty_table<Table>>(list, mode_of(asked.mode), asked.wanted, rank,
                                                  asked.backend == "cuda_ipc_spread" ? rank : 0));
        sinks.push_back(tables.back().get());
    }
    worker_engine engine{backend, sinks};
    worker_service service{engine};
    worker_server server{service,
                         {.port = static_cast<std::uint16_t>(asked.port), .token = asked.token}};
    server.start();
    std::printf("%d\n", static_cast<int>(server.port()));
    std::fflush(stdout);
    for (char byte = 0; ::read(STDIN_FILENO, &byte, 1) > 0;) {
    }
    server.stop(deadline::after(std::chrono::seconds{5}));
}

/// Serves the model of moe_model.hpp.
template <class Backend>
void serve_pull(const options& asked) {
    const tests::moe_sizes model{.hidden = asked.hidden, .whole_attention = asked.whole_attention};
    Backend backend;
    backend.loader = [&](plan::recorder& made, const receiver_context& at) {
        model.load(made, asked.first + at.local_rank, asked.of);
    };
    backend.node = asked.node;
    if (asked.landing != 0) {
        backend.landing_bytes = asked.landing;
    }
    if (!asked.traffic.empty()) {
        backend.on_traffic = [&](const receiver_context&,
                                 std::span<const sharded_pull::owner_traffic> all) {
            std::ofstream file{asked.traffic, std::ios::app};
            for (const auto& each : all) {
                file << each.trainer_rank << ' ' << each.bytes << ' ' << each.planned << '\n';
            }
        };
        backend.on_node_traffic = [&](const receiver_context&,
                                      std::span<const sharded_pull::node_traffic> all) {
            std::ofstream file{asked.traffic + ".node", std::ios::app};
            for (const auto& each : all) {
                file << each.worker_rank << ' ' << each.bytes << ' ' << each.planned << '\n';
            }
        };
    }
    serve<parameter_table>(asked, backend, model.worker(asked.of));
}

}  // namespace

int main(int argc, char** argv) try {
    options asked;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string_view key = argv[i];
        const std::string value = argv[i + 1];
        if (key == "--parameters") {
            asked.parameters = std::stoi(value);
        } else if (key == "--elements") {
            asked.elements = std::stoi(value);
        } else if (key == "--ranks") {
            asked.ranks = std::stoi(value);
        } else if (key == "--mode") {
            asked.mode = value;
        } else if (key == "--token") {
            asked.token = value;
        } else if (key == "--port") {
            asked.port = std::stoi(value);
        } else if (key == "--backend") {
            asked.backend = value;
        } else if (key == "--first") {
            asked.first = std::stoi(value);
        } else if (key == "--of") {
            asked.of = std::stoi(value);
        } else if (key == "--hidden") {
            asked.hidden = std::stoi(value);
        } else if (key == "--attention") {
            asked.whole_attention = value == "whole";
        } else if (key == "--traffic") {
            asked.traffic = value;
        } else if (key == "--node") {
            asked.node = value;
        } else if (key == "--landing") {
            asked.landing = std::stoull(value);
        } else if (key == "--at") {
            asked.wanted.at = value;
        } else if (key == "--do") {
            asked.wanted.what = value;
        } else if (key == "--on") {
            asked.wanted.rank = std::stoi(value);
        } else if (key == "--in") {
            asked.wanted.session = std::stoul(value);
        } else {
            std::fprintf(stderr, "test_worker: what is %s?\n", argv[i]);
            return 2;
        }
    }
    const auto list = tests::small_model(asked.parameters, asked.elements);
    if (asked.backend.starts_with("cuda_ipc")) {
        serve<tests::pretended_device_table>(asked, tests::host_cuda_ipc{}, list);
    } else if (asked.backend == "sharded_pull") {
        serve_pull<pull_backend>(asked);
    } else if (asked.backend == "sharded_pull_across") {
        serve_pull<sharded_pull::basic_backend<tests::across_fabric>>(asked);
    } else {
        serve<parameter_table>(asked, ipc::backend{}, list);
    }
    return 0;
} catch (const std::exception& failed) {
    std::fprintf(stderr, "test_worker: %s\n", failed.what());
    return 1;
}
