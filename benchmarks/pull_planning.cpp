// SPDX-License-Identifier: Apache-2.0

// Question: what does planning a sharded pull cost, and how well is it balanced?
//
//   pull_planning [kimi-k2|qwen3-235b]
//
// Kimi K2, trainer tp8,pp8,ep32 on 256 ranks, workers tp32,ep32 on 128: a worker plans in at most
// 2 s and 1 GB, and a trainer rank checks the plans of its workers in at most 2 s. Qwen3-235B,
// trainer tp4,pp2,ep8, workers dp16,ep16: a worker plans in at most 0.5 s. The busiest trainer rank
// sends at most 1.02 times the optimum over all legal routings, which a maximum flow says.
//
// The worker is a process of its own that makes the plan of rank 0 from its loader, and nothing
// else; its figures hold the list of parameters too. Every worker of the model is planned and every
// owner agrees, which is checked.

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/groups.hpp>
#include <weightwire/plan/layout.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_accept.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/plan/recorder.hpp>
#include <weightwire/wire/pull_plan_codec.hpp>

#include "../examples/support/model_lists.hpp"
#include "../examples/support/model_workers.hpp"
#include "../tests/support/busiest_flow.hpp"

namespace {

using weightwire::manifest;
namespace plan = weightwire::plan;
namespace wire = weightwire::wire;

struct setting {
    models::dimensions model;
    std::string_view trainer;
    std::int64_t trainer_ranks;
    std::string_view worker;
    std::int64_t worker_ranks;
    double worker_seconds;  ///< bound
};

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "pull_planning: %s\n", what);
        std::exit(1);
    }
}

class stopwatch {
public:
    [[nodiscard]] double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    }

private:
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// Largest resident memory of this process so far.
double peak_gigabytes() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_maxrss) * 1024 / 1e9;
}

void line(const char* what, double value, const char* unit, double bound) {
    std::printf("  %-58s %10.4f %-3s", what, value, unit);
    if (bound > 0) {
        std::printf(" %8.2f %6s", bound, value <= bound ? "yes" : "NO");
    }
    std::printf("\n");
    std::fflush(stdout);
}

/// What every rank knows.
struct common {
    manifest checkpoint;
    std::vector<std::size_t> groups;
    plan::ownership owners;

    explicit common(const setting& s)
        : checkpoint{models::parameters(s.model)},
          groups{plan::group_runs(plan::layerwise_groups(checkpoint))},
          owners{checkpoint,
                 plan::held_by_layout(checkpoint, plan::parse_layout(s.trainer), s.trainer_ranks)} {
    }
};

plan::pull_needs needs_of(const setting& s, const common& all, std::int64_t rank) {
    const models::worker mine{
        s.model, plan::worker_position_of(plan::parse_layout(s.worker), rank, s.worker_ranks)};
    const manifest kept{mine.parameters()};
    return {all.checkpoint, kept, plan::record(all.checkpoint, kept, mine)};
}

void write_all(int to, std::string_view bytes) {
    while (!bytes.empty()) {
        const auto done = ::write(to, bytes.data(), bytes.size());
        require(done > 0, "a pipe cannot be written");
        bytes.remove_prefix(static_cast<std::size_t>(done));
    }
}

std::string read_all(int from) {
    std::string bytes;
    std::vector<char> piece(1U << 16U);
    for (;;) {
        const auto done = ::read(from, piece.data(), piece.size());
        require(done >= 0, "a pipe cannot be read");
        if (done == 0) {
            return bytes;
        }
        bytes.append(piece.data(), static_cast<std::size_t>(done));
    }
}

/// Rank 0 of the workers: all that it does at init, and its figures.
void worker(const setting& s, int route_from) {
    const common all{s};
    std::vector<std::string> held_texts;
    for (int t = 0; t < all.owners.ranks(); ++t) {
        held_texts.push_back(plan::to_text(all.owners.held(t)));
    }
    const stopwatch first;
    std::vector<plan::position_set> held;
    for (const auto& text : held_texts) {
        held.push_back(plan::position_set_from_text(text, all.checkpoint.size()));
    }
    const plan::ownership owners{all.checkpoint, std::move(held)};
    require(owners.digest() == all.owners.digest(), "the ranges of a rank have changed as text");
    const auto needs = needs_of(s, all, 0);
    const auto report = wire::encode(needs.report());
    const auto recorded = first.seconds();
    const auto row = read_all(route_from);
    const stopwatch second;
    const auto made =
        plan::plan_worker(all.checkpoint, all.groups, owners, needs,
                          wire::decode_worker_route(row, owners), plan::plan_options{});
    std::size_t bytes = 0;
    std::uint64_t hash = 0;
    for (const auto owner : made.owners()) {
        const auto part = made.part_for(owner);
        bytes += wire::encode(part).size();
        hash ^= plan::hash_of(part);
    }
    const auto planned = second.seconds();
    require(made.bytes() == needs.bytes(), "the plan has not the bytes that the worker needs");
    require(hash != 0, "no owner has a part");
    line("a worker, loader to plan", recorded + planned, "s", s.worker_seconds);
    line("  of that who holds what, its loader and what it needs", recorded, "s", 0);
    line("  of that its plan, parts and hashes", planned, "s", 0);
    line("a worker's peak memory", peak_gigabytes(), "GB", 1.0);
    line("a worker's report", static_cast<double>(report.size()) / 1e3, "kB", 0);
    line("a worker's route", static_cast<double>(row.size()) / 1e3, "kB", 0);
    line("a worker's parts, of all owners", static_cast<double>(bytes) / 1e3, "kB", 0);
    line("owners of a worker", static_cast<double>(made.owners().size()), "", 0);
}

/// Starts `worker`; it waits for its route.
std::pair<pid_t, int> start_worker(const setting& s) {
    int ends[2] = {-1, -1};
    require(::pipe(ends) == 0, "no pipe");
    std::fflush(stdout);
    const auto child = ::fork();
    require(child >= 0, "no process");
    if (child == 0) {
        ::close(ends[1]);
        worker(s, ends[0]);
        std::fflush(stdout);
        ::_exit(0);
    }
    ::close(ends[0]);
    return {child, ends[1]};
}

/// Checks every part as its owner does; prints the slowest owner.
void check_owners(const common& all,
                  const std::vector<std::vector<std::pair<int, std::string>>>& parts,
                  const std::vector<std::vector<std::uint64_t>>& hashes) {
    double slowest = 0;
    std::size_t most = 0;
    for (std::size_t t = 0; t < parts.size(); ++t) {
        const auto owner = static_cast<int>(t);
        const stopwatch watch;
        const plan::part_checker checker{all.checkpoint, all.groups, all.owners.held(owner),
                                         plan::plan_options{}, owner};
        for (std::size_t i = 0; i < parts[t].size(); ++i) {
            const auto& [worker, bytes] = parts[t][i];
            const auto part = wire::decode_owner_part(bytes, all.checkpoint.size());
            require(checker.accept(part, worker) == hashes[t][i], "an owner has another hash");
        }
        slowest = std::max(slowest, watch.seconds());
        most = std::max(most, parts[t].size());
    }
    line("the slowest trainer rank checks all its workers", slowest, "s", 2.0);
    line("most workers of a trainer rank", static_cast<double>(most), "", 0);
}

void measure(const setting& s) {
    std::printf("%s: trainer %s on %lld ranks, workers %s on %lld, 8 ranks a node\n",
                std::string{s.model.name}.c_str(), std::string{s.trainer}.c_str(),
                static_cast<long long>(s.trainer_ranks), std::string{s.worker}.c_str(),
                static_cast<long long>(s.worker_ranks));
    std::printf("  %-58s %10s %-3s %8s %s\n", "", "", "", "bound", "within");
    const auto [child, route_to] = start_worker(s);
    const common all{s};
    const plan::places where{
        plan::nodes_of(s.trainer_ranks, 8),
        plan::nodes_of(s.worker_ranks, 8, static_cast<std::uint64_t>(s.trainer_ranks))};
    const stopwatch recording;
    std::vector<plan::needs_report> reports;
    for (std::int64_t rank = 0; rank < s.worker_ranks; ++rank) {
        reports.push_back(needs_of(s, all, rank).report());
    }
    const auto recorded = recording.seconds();
    const stopwatch routing;
    const auto routes = plan::route(all.checkpoint, all.owners, where, reports);
    const auto routed = routing.seconds();
    write_all(route_to, wire::encode(routes.of(0)));
    ::close(route_to);
    int status = 0;
    require(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
            "the worker has failed");

    line("rank 0 of the trainer routes all workers", routed, "s", 0);
    const stopwatch planning;
    std::vector<std::vector<std::pair<int, std::string>>> parts(
        static_cast<std::size_t>(s.trainer_ranks));
    std::vector<std::vector<std::uint64_t>> hashes(parts.size());
    std::vector<std::uint64_t> sent(parts.size(), 0);
    std::uint64_t needed = 0;
    std::uint64_t read = 0;
    for (std::int64_t rank = 0; rank < s.worker_ranks; ++rank) {
        const auto w = static_cast<int>(rank);
        const auto needs = needs_of(s, all, rank);
        const auto made = plan::plan_worker(all.checkpoint, all.groups, all.owners, needs,
                                            routes.of(w), plan::plan_options{});
        require(made.bytes() == needs.bytes(), "a plan has not the bytes that its worker needs");
        needed += needs.bytes();
        for (const auto owner : made.owners()) {
            const auto t = static_cast<std::size_t>(owner);
            const auto part = made.part_for(owner);
            parts[t].emplace_back(w, wire::encode(part));
            hashes[t].push_back(plan::hash_of(part));
            sent[t] += made.bytes_from(owner);
            read += made.bytes_from(owner);
        }
    }
    line("all workers recorded and planned, one after the other", recorded + planning.seconds(),
         "s", 0);
    check_owners(all, parts, hashes);
    const auto optimum = support::fewest_bytes_of_busiest(all.owners, where, reports, true);
    const auto busiest = *std::ranges::max_element(sent);
    const auto mean = static_cast<double>(read) / static_cast<double>(sent.size());
    require(routes.optimum_bytes() <= optimum, "the router's bound is above the optimum");
    line("bytes that the workers need", static_cast<double>(needed) / 1e9, "GB", 0);
    line("bytes that enter the workers' nodes", static_cast<double>(read) / 1e9, "GB", 0);
    line("optimum of the busiest trainer rank, by maximum flow", static_cast<double>(optimum) / 1e9,
         "GB", 0);
    line("busiest trainer rank", static_cast<double>(busiest) / 1e9, "GB", 0);
    line("mean of the trainer ranks", mean / 1e9, "GB", 0);
    line("busiest over optimum", static_cast<double>(busiest) / static_cast<double>(optimum), "",
         1.02);
    line("this program's peak memory", peak_gigabytes(), "GB", 0);
    std::printf("\n");
}

std::string processor() {
    std::ifstream file{"/proc/cpuinfo"};
    for (std::string text; std::getline(file, text);) {
        if (text.starts_with("model name")) {
            return text.substr(text.find(':') + 2);
        }
    }
    return "unknown processor";
}

}  // namespace

int main(int count, char** arguments) {
    const std::string_view only = count > 1 ? arguments[1] : "";
    std::printf("command: pull_planning%s%s\nmachine: %s\n\n", only.empty() ? "" : " ",
                std::string{only}.c_str(), processor().c_str());
    bool known = false;
    for (const auto& one :
         {setting{models::qwen3_235b_a22b, "tp4,pp2,ep8", 16, "dp16,ep16", 16, 0.5},
          setting{models::kimi_k2, "tp8,pp8,ep32", 256, "tp32,ep32", 128, 2.0}}) {
        if (only.empty() || only == one.model.name) {
            known = true;
            measure(one);
        }
    }
    require(known, "name a model: kimi-k2 or qwen3-235b");
    return 0;
}
