// SPDX-License-Identifier: Apache-2.0
//
// Plans a sharded pull of a real model's parameter list between two layouts, without a GPU or a
// network: bytes per link, peak memory, predicted seconds, and how far above the floor they are.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/plan/layout.hpp>
#include <weightwire/plan/link_model.hpp>
#include <weightwire/plan/simulation.hpp>
#include <weightwire/plan/traffic.hpp>

#include "support/model_lists.hpp"
#include "support/pull_picture.hpp"
#include "support/pull_problem.hpp"

namespace {

namespace plan = weightwire::plan;

struct arguments {
    std::string model = "qwen3-235b";
    std::int64_t layers = 0;
    std::string trainer = "tp4,pp2,ep8";
    std::string worker = "dp16,ep16";
    std::string nodes;
    std::int64_t per_node = 8;
    bool same_nodes = false;
    std::string mode = "node-once";
    bool compare = false;
    bool in_place = false;
    double chunk_mib = 256;
    double look_ahead_mib = 4096;
    double arena_mib = 4096;
    double landing_mib = 4096;
    std::size_t slots = 2;
    plan::link_model links;
    plan::measured_rates measured;
    std::string svg;
    std::string pairs;
};

/// How a mode sends. The first four are what published systems do or did.
struct named_mode {
    std::string_view name;
    std::string_view meaning;
    models::method how;
};
const std::array modes{
    named_mode{"v1",
               "every trainer rank gathers everything, then sends; nothing overlaps",
               {.gather_everything = true, .overlap = false, .node_once = false}},
    named_mode{"v2",
               "ranks send what they hold, stages in turn; nothing overlaps",
               {.overlap = false, .stages_in_turn = true, .node_once = false}},
    named_mode{"v3",
               "ranks send what they hold, stages in turn; gather, pack, wire and scatter overlap",
               {.stages_in_turn = true, .node_once = false}},
    named_mode{"concurrent",
               "all stages send at once; gather, pack, wire and scatter overlap",
               {.node_once = false}},
    named_mode{
        "node-once", "all stages send at once, and what a node's workers share enters it once", {}},
};

double gigabytes(std::uint64_t bytes) { return static_cast<double>(bytes) / 1e9; }

std::uint64_t bytes_of(double mib) { return static_cast<std::uint64_t>(mib * 1024 * 1024); }

double since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

arguments parse(int argc, char** argv) {
    arguments parsed;
    CLI::App app{"Plans a sharded pull and predicts its time, without a GPU or a network."};
    app.option_defaults()->always_capture_default();
    std::vector<std::string> names;
    for (const auto& model : models::all) {
        names.emplace_back(model.name);
    }
    std::vector<std::string> mode_names;
    for (const auto& mode : modes) {
        mode_names.emplace_back(mode.name);
    }
    app.add_option("--model", parsed.model)->check(CLI::IsMember{names});
    app.add_option("--layers", parsed.layers, "Fewer layers than the model has; 0 is all");
    app.add_option("--trainer", parsed.trainer, "Layout of the trainer, such as tp8,pp8,ep32");
    app.add_option("--worker", parsed.worker, "Layout of a worker, such as tp32,ep32");
    app.add_option("--nodes", parsed.nodes,
                   "Nodes of trainer and workers, such as 32+16; else the fewest");
    app.add_option("--per-node", parsed.per_node, "Ranks on a node")->check(CLI::Range(1, 1024));
    app.add_flag("--same-nodes", parsed.same_nodes, "The workers are on the trainer's nodes");
    app.add_option("--mode", parsed.mode)->check(CLI::IsMember{mode_names});
    app.add_flag("--compare", parsed.compare, "Simulate all modes");
    app.add_flag("--in-place", parsed.in_place,
                 "Readers take tensors where they lie, as inside one node");
    const CLI::Range mebibytes{0.0625, 1e6};
    app.add_option("--chunk-mib", parsed.chunk_mib, "Most bytes of a chunk")->check(mebibytes);
    app.add_option("--look-ahead-mib", parsed.look_ahead_mib, "Gathered tensors of a trainer rank")
        ->check(mebibytes);
    app.add_option("--arena-mib", parsed.arena_mib, "Packed chunks of a trainer rank")
        ->check(mebibytes);
    app.add_option("--landing-mib", parsed.landing_mib, "Chunks of a worker before their scatter")
        ->check(mebibytes);
    app.add_option("--slots", parsed.slots, "Chunks under way between two ranks")
        ->check(CLI::Range(1, 1000));
    const auto rate = [&](const char* name, double& into, const char* what) {
        app.add_option_function<double>(
               name, [&into](const double& value) { into = value * 1e9; }, what)
            ->check(CLI::Range(1e-6, 1e9))
            ->type_name("GB/s");
    };
    rate("--network", parsed.links.network, "Line rate of a rank's adapter (50)");
    rate("--nvlink", parsed.links.local_in, "Line rate of a rank's links inside a node (450)");
    rate("--gather", parsed.links.gather, "Gather of a trainer rank (200)");
    rate("--pack", parsed.links.pack, "Pack of a trainer rank (1000)");
    rate("--scatter", parsed.links.scatter, "Scatter of a worker (1000)");
    rate("--measured-network-one", parsed.measured.network_one,
         "Measured: one reader between nodes");
    rate("--measured-network-all", parsed.measured.network_all, "Measured: all readers together");
    rate("--measured-local-one", parsed.measured.local_one, "Measured: one reader inside a node");
    rate("--measured-local-all", parsed.measured.local_all, "Measured: a node's readers together");
    app.add_option("--svg", parsed.svg, "Write a picture of who pulls what from whom");
    app.add_option("--pairs", parsed.pairs, "Write the bytes of every pair of ranks as CSV");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& failed) {
        std::exit(app.exit(failed));
    }
    parsed.links.local_out = parsed.links.local_in;
    parsed.links = plan::links_from(parsed.measured, parsed.links);
    return parsed;
}

/// `32+16`, or of nothing the fewest nodes that hold the fewest ranks.
models::cluster cluster_of(const arguments& options) {
    models::cluster made{.trainer = plan::parse_layout(options.trainer),
                         .worker = plan::parse_layout(options.worker),
                         .ranks_per_node = options.per_node,
                         .same_nodes = options.same_nodes};
    made.trainer_ranks = plan::fewest_ranks(made.trainer);
    made.worker_ranks =
        made.worker.tensor * made.worker.pipeline * std::max<std::int64_t>(made.worker.data, 1);
    if (options.nodes.empty()) {
        return made;
    }
    std::array<std::int64_t, 2> counts{};
    const auto plus = options.nodes.find('+');
    const std::string_view text{options.nodes};
    const std::array parts{text.substr(0, plus),
                           plus == std::string::npos ? std::string_view{} : text.substr(plus + 1)};
    for (std::size_t i = 0; i < 2; ++i) {
        const auto* const end = parts[i].data() + parts[i].size();
        const auto [stop, failed] = std::from_chars(parts[i].data(), end, counts[i]);
        if (failed != std::errc{} || stop != end || counts[i] < 1 || counts[i] > 100'000) {
            throw weightwire::usage_error{"--nodes is such as 32+16, not `" + options.nodes + "`"};
        }
    }
    // A single node need not be full.
    const auto fill = [&](std::int64_t& ranks, std::int64_t nodes) {
        ranks = nodes == 1 && ranks <= options.per_node ? ranks : nodes * options.per_node;
    };
    fill(made.trainer_ranks, counts[0]);
    fill(made.worker_ranks, counts[1]);
    return made;
}

models::method method_of(const named_mode& mode, const arguments& options) {
    auto how = mode.how;
    how.in_place = options.in_place;
    how.chunk_bytes = bytes_of(options.chunk_mib);
    how.budgets.links = options.links;
    how.budgets.look_ahead = bytes_of(options.look_ahead_mib);
    how.budgets.arena = bytes_of(options.arena_mib);
    how.budgets.landing = bytes_of(options.landing_mib);
    how.budgets.slots = options.slots;
    return how;
}

void print_spread(std::string_view what, std::span<const std::uint64_t> bytes,
                  std::string_view more = {}) {
    const auto [least, most] = std::ranges::minmax(bytes);
    const auto sum = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
    fmt::print("  {:<34} busiest {:>8.2f} GB   mean {:>8.2f}   least {:>8.2f}{}\n", what,
               gigabytes(most), gigabytes(sum) / static_cast<double>(bytes.size()),
               gigabytes(least), more);
}

/// Bytes between every trainer and worker, of ranks where they are few and else of nodes.
void print_matrix(const plan::traffic& what) {
    constexpr std::size_t most_columns = 16;
    const auto trainers = static_cast<std::size_t>(what.trainers);
    const bool ranks = trainers <= most_columns && what.nodes.size() - trainers <= most_columns;
    std::vector<std::uint64_t> rows{what.nodes.begin(), what.nodes.begin() + what.trainers};
    std::vector<std::uint64_t> columns{what.nodes.begin() + what.trainers, what.nodes.end()};
    if (ranks) {
        std::iota(rows.begin(), rows.end(), 0);
        std::iota(columns.begin(), columns.end(), 0);
    } else {
        rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
        columns.erase(std::unique(columns.begin(), columns.end()), columns.end());
    }
    if (columns.size() > most_columns) {
        fmt::print("  (too many nodes for a table here; --pairs writes all)\n");
        return;
    }
    std::vector<std::uint64_t> table(rows.size() * columns.size(), 0);
    for (const auto& stream : what.streams) {
        const auto from = static_cast<std::size_t>(stream.from);
        const auto to = static_cast<std::size_t>(stream.to);
        if (from >= trainers) {
            continue;
        }
        const auto place = [&](const std::vector<std::uint64_t>& of, std::size_t rank,
                               std::size_t first) {
            return static_cast<std::size_t>(
                std::ranges::lower_bound(of, ranks ? rank - first : what.nodes[rank]) - of.begin());
        };
        table[place(rows, from, 0) * columns.size() + place(columns, to, trainers)] +=
            stream.bytes();
    }
    const auto* const word = ranks ? "rank" : "node";
    fmt::print("\nGB from trainer {}s (rows) to worker {}s (columns)\n  {:>7}", word, word, "");
    for (const auto column : columns) {
        fmt::print("{:>7}", column);
    }
    for (std::size_t r = 0; r < rows.size(); ++r) {
        fmt::print("\n  {:>7}", rows[r]);
        for (std::size_t c = 0; c < columns.size(); ++c) {
            fmt::print("{:>7.2f}", gigabytes(table[r * columns.size() + c]));
        }
    }
    fmt::print("\n");
}

void write_pairs(const plan::traffic& what, const std::string& path) {
    std::ofstream file{path};
    file << "from,to,kind,bytes\n";
    for (const auto& stream : what.streams) {
        const bool from_trainer = stream.from < what.trainers;
        const bool local = what.nodes[static_cast<std::size_t>(stream.from)] ==
                           what.nodes[static_cast<std::size_t>(stream.to)];
        file << fmt::format(
            "{} {},worker {},{},{}\n", from_trainer ? "trainer" : "worker",
            from_trainer ? stream.from : stream.from - what.trainers, stream.to - what.trainers,
            local ? from_trainer ? "local" : "passed on" : "network", stream.bytes());
    }
    if (!file.flush()) {
        throw weightwire::resource_error{"the pairs cannot be written to " + path};
    }
}

void print_runs(const models::planned& made) {
    std::uint64_t all = 0;
    for (const auto& [run, bytes] : made.runs) {
        all += bytes;
    }
    fmt::print("  runs of a worker's copies, share of the bytes:");
    for (const auto& [run, bytes] : made.runs) {
        const auto share = 100 * static_cast<double>(bytes) / static_cast<double>(all);
        if (share >= 0.05) {
            fmt::print("  {} {:.1f} %",
                       run >= 1U << 20U   ? fmt::format("{} MiB", run >> 20U)
                       : run >= 1U << 10U ? fmt::format("{} KiB", run >> 10U)
                                          : fmt::format("{} B", run),
                       share);
        }
    }
    fmt::print("\n");
}

void print_links(const models::planned& made, const plan::simulation& round) {
    const auto trainers = static_cast<std::size_t>(made.traffic.trainers);
    const auto of = [&](bool workers, std::uint64_t plan::link_load::*which) {
        std::vector<std::uint64_t> bytes;
        for (std::size_t i = workers ? trainers : 0; i < (workers ? round.loads.size() : trainers);
             ++i) {
            bytes.push_back(round.loads[i].*which);
        }
        return bytes;
    };
    const auto any = [](const std::vector<std::uint64_t>& bytes) {
        return std::ranges::any_of(bytes, [](auto b) { return b > 0; });
    };
    fmt::print("\nBytes per link\n");
    if (const auto out = of(false, &plan::link_load::network_out); any(out)) {
        print_spread("trainer adapters, out", out,
                     fmt::format("   (no routing below {:.2f})", gigabytes(made.optimum_bytes)));
        print_spread("worker adapters, in", of(true, &plan::link_load::network_in));
    }
    if (const auto local = of(false, &plan::link_load::local_out); any(local)) {
        print_spread("trainer ranks, out inside a node", local);
    }
    if (const auto local = of(true, &plan::link_load::local_in); any(local)) {
        print_spread("worker ranks, in inside a node", local);
    }
    if (const auto local = of(true, &plan::link_load::local_out); any(local)) {
        print_spread("worker ranks, passed on", local);
    }
}

void print_assumptions(const arguments& options, const models::cluster& where) {
    const auto& links = options.links;
    const auto shares = [](const std::vector<plan::block_share>& curve) {
        std::string text = curve.empty() ? " all blocks 100 %" : "";
        for (const auto& [bytes, share] : curve) {
            text += fmt::format("{} KiB {:.0f} %",
                                (text.empty() ? " " : ", ") + std::to_string(bytes / 1024),
                                share * 100);
        }
        return text;
    };
    fmt::print("\nAssumptions\n");
    fmt::print(
        "  between nodes: {:.0f} GB/s a rank each way; share of it by block:{};\n"
        "    {:.0f} us until a message or a first byte\n",
        links.network / 1e9, shares(links.network_shares), links.network_latency * 1e6);
    fmt::print("  inside a node: {:.0f} GB/s a rank each way; share of it by block:{}\n",
               links.local_in / 1e9, shares(links.local_shares));
    for (const auto& [rate, what] : {std::pair{links.network_all, "between nodes"},
                                     std::pair{links.local_all, "inside a node"}}) {
        if (rate < plan::link_model::unlimited) {
            fmt::print("  {} {:.0f} GB/s, all ranks together\n", what, rate / 1e9);
        }
    }
    if (options.in_place) {
        fmt::print("  in place: nothing is gathered, packed or scattered\n");
    } else {
        fmt::print(
            "  gather {:.0f} GB/s a rank of what {} tensor ranks share, and {:.0f} us a "
            "tensor; experts are whole already\n",
            links.gather / 1e9, where.trainer.tensor, links.gather_tensor * 1e6);
        fmt::print(
            "  pack {:.0f}, scatter {:.0f} GB/s a rank; chunks of {:.0f} MiB, {} under way a "
            "pair\n",
            links.pack / 1e9, links.scatter / 1e9, options.chunk_mib, options.slots);
    }
    fmt::print("  links never fail; ranks are never late; trainer and workers do nothing else\n");
}

void run(const arguments& options) {
    const auto begin = std::chrono::steady_clock::now();
    auto model = models::by_name(options.model);
    model.layers = options.layers > 0 ? std::min(options.layers, model.layers) : model.layers;
    const auto where = cluster_of(options);
    const models::pull_problem problem{model, where};
    const auto planning = since(begin);

    fmt::print("{}: {} tensors, {:.1f} GB\n", model.name, problem.checkpoint().size(),
               gigabytes(problem.checkpoint().total_bytes()));
    fmt::print("trainer {}: {} ranks; worker {}: {} ranks; {} ranks a node{}\n",
               to_string(where.trainer), where.trainer_ranks, to_string(where.worker),
               where.worker_ranks, where.ranks_per_node,
               where.same_nodes ? ", the same nodes" : "");
    std::vector<std::uint64_t> held;
    for (int rank = 0; rank < problem.owners().ranks(); ++rank) {
        auto& sum = held.emplace_back(0);
        for (const auto& [first, end] : problem.owners().held(rank).ranges()) {
            for (auto i = first; i < end; ++i) {
                sum += problem.checkpoint()[i].byte_size();
            }
        }
    }
    print_spread("a trainer rank holds", held);
    print_spread("a worker rank keeps", problem.needed());

    const auto& chosen = *std::ranges::find(modes, options.mode, &named_mode::name);
    const auto how = method_of(chosen, options);
    const auto plan_begin = std::chrono::steady_clock::now();
    const auto made = problem.plan(how);
    const auto planned_in = planning + since(plan_begin);
    const auto round_begin = std::chrono::steady_clock::now();
    const auto round = models::pull_problem::simulate(made, how);
    fmt::print("\nPlan ({}: {}), made in {:.1f} s, simulated in {:.1f} s\n", chosen.name,
               chosen.meaning, planned_in, since(round_begin));
    fmt::print("  {} sections, {} reads, {} chunks\n", made.sections, made.reads, made.chunks);
    print_runs(made);
    print_links(made, round);
    print_matrix(made.traffic);

    fmt::print(
        "\nPeak memory beside the weights\n  trainer rank: gathered {:.2f} GB, packed {:.2f} "
        "GB;  worker rank: landing {:.2f} GB\n",
        gigabytes(round.peak_gathered), gigabytes(round.peak_arena), gigabytes(round.peak_landing));

    const auto alone = problem.floor(options.links, false);
    const auto once = problem.floor(options.links, true);
    const auto turns = problem.floor_in_turn(options.links);
    fmt::print("\nFloors of the problem, at line rates       receive     send    local\n");
    fmt::print("  each worker for itself   {:>8.4f} s      {:>8.4f} {:>8.4f} {:>8.4f}\n",
               alone.seconds(), alone.receive, alone.send, alone.local);
    fmt::print("  once a node              {:>8.4f} s      {:>8.4f} {:>8.4f} {:>8.4f}\n",
               once.seconds(), once.receive, once.send, once.local);
    fmt::print("  stages in turn           {:>8.4f} s\n", turns);

    fmt::print("\nPredicted{:>36} {:>16} {:>16}\n", "seconds", "x floor, itself", "x floor, once");
    const auto print_round = [&](std::string_view name, double seconds) {
        fmt::print("  {:<20}{:>23.4f} {:>16.2f} {:>16.2f}\n", name, seconds,
                   seconds / alone.seconds(), seconds / once.seconds());
    };
    for (const auto& mode : modes) {
        if (mode.name == chosen.name) {
            print_round(mode.name, round.seconds);
        } else if (options.compare) {
            const auto other = method_of(mode, options);
            print_round(mode.name,
                        models::pull_problem::simulate(problem.plan(other), other).seconds);
        }
    }
    print_assumptions(options, where);
    if (!options.pairs.empty()) {
        write_pairs(made.traffic, options.pairs);
        fmt::print("\npairs: {}\n", options.pairs);
    }
    if (!options.svg.empty()) {
        models::pull_picture{
            made.traffic,
            fmt::format("{}: trainer {} to worker {}, {}: {:.2f} s predicted, floor {:.2f} s",
                        model.name, to_string(where.trainer), to_string(where.worker), chosen.name,
                        round.seconds, (how.node_once ? once : alone).seconds())}
            .write(options.svg);
        fmt::print("\npicture: {}\n", options.svg);
    }
}

}  // namespace

int main(int argc, char** argv) {
    try {
        run(parse(argc, argv));
    } catch (const std::exception& failed) {
        fmt::print(stderr, "plan_explorer: {}\n", failed.what());
        return 1;
    }
    return 0;
}
