#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/backend.hpp>
#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/plan/layout.hpp>
#include <weightwire/rendezvous/store_group.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/worker.hpp>

#include "../../examples/support/model_lists.hpp"
#include "../../examples/support/model_workers.hpp"
#include "../../examples/support/pull_problem.hpp"
#include "../../tests/support/forked.hpp"
#include "timing.hpp"

/// @file
/// Rounds of sharded pull between processes, one a rank, beside uniform reads of as many bytes, and
/// what the simulator says of them. `Kit` says in which memory and over which fabric:
/// - `fabric`, and `settle(device)` once a process, before anything else;
/// - `weights{manifest, device}`: memory of a list in one piece; `views()`, `fill(round)`,
///   `overwrite()`;
/// - `shown`, trivially copyable, and `show(weights, device)`: how others reach that piece, as long
///   as the process lives;
/// - `uniform{shown, landing, device}`: `run(which)` of `uniform_names` reads `bytes()` bytes from
///   there in one piece and waits; `best` is the one that the fabric uses;
/// - `table(manifest, landing, device)`: a sink over it, in_place, behind a pointer;
/// - `check{device, checkpoint, regions, landing}`: `wrong(round)`, the elements that are not what
///   `fill` makes;
/// - `copies_seconds(landing)`: of one copy of that much inside the process, 0 where copies beside
///   the transfer do not matter; `threads_a_rank`: that are busy at once for a trainer rank and its
///   worker rank, 0 likewise; `allocations()`: so far, where they are counted.

namespace benchmarks {

struct pull_settings {
    models::dimensions model = models::qwen3_30b_a3b;
    int rounds = 10;
    std::uint64_t chunk_bytes = 0;    ///< 0: the default
    std::uint64_t staging_bytes = 0;  ///< 0: the default
    int trainer_device = 0;
    int worker_device = 0;
    bool staged = false;  ///< nothing is read in place
    bool apart = false;   ///< the plan takes trainers and workers for two nodes, and the workers
                          ///< have attention alike
    int ranks = 4;        ///< trainer ranks PP2 x EP2, and as many worker ranks; 2: PP2; 1
    double asked_copy = 0;
    double asked_kernel = 0;
};

namespace pull_rounds {

using namespace weightwire;
using tests::channel;
using tests::forked;

inline constexpr std::size_t most_ranks = 4;
inline constexpr int warm_ups = 3;

inline deadline in_time() { return deadline::after(std::chrono::seconds{50}); }

/// What the program asks its processes for.
struct command {
    enum class kind : std::uint8_t { fill, overwrite, uniform, copy, pull, check, end };
    kind what = kind::end;
    std::size_t which = 0;  ///< of the uniform ways
    std::uint64_t round = 0;
    bool tolerate = false;
    double budget = 50;  ///< seconds, of a pull
};

/// A worker's answer; instants of CLOCK_MONOTONIC, in seconds.
struct worked {
    double begin = 0;
    double end = 0;
    std::uint64_t bytes = 0;
    std::uint64_t from_peers = 0;  ///< of node peers, beside `bytes`
    std::uint64_t planned_from_peers = 0;
    std::uint64_t allocations = 0;
};

/// A trainer rank's answer to `pull`.
struct sent {
    double seconds = 0;
    double start = 0;
    double update = 0;
    double finish = 0;
    std::array<double, most_ranks> data{};
    std::array<int, most_ranks> committed{};
    std::uint64_t allocations = 0;
    bool threw = false;
    std::array<char, 400> text{};
};

inline double now() {
    return std::chrono::duration<double>(monotonic::now().time_since_epoch()).count();
}

/// Stages halve the layers, expert ranks the experts. All else of a stage is on one of its ranks,
/// so that there is one copy of the list.
inline bool holds(int rank, const pull_settings& wanted, std::string_view name) {
    const auto at = plan::place_of(name);
    std::int64_t stage = name == "model.embed_tokens.weight" ? 0 : 1;
    std::int64_t side = 0;
    if (at.layer >= 0) {
        stage = at.layer * 2 / wanted.model.layers;
        side = at.layer % 2;
    }
    if (at.expert >= 0) {
        side = at.expert * 2 / wanted.model.experts;
    }
    return rank == (wanted.ranks == 4 ? stage * 2 + side : wanted.ranks == 2 ? stage : 0);
}

inline plan::parallel_layout layout_of_workers(const pull_settings& wanted) {
    plan::parallel_layout made{.expert = wanted.ranks};
    (wanted.apart ? made.data : made.tensor) = wanted.ranks;
    return made;
}

/// Bytes by the length of the run: index k counts those from 2^k bytes on.
struct histogram {
    std::array<std::uint64_t, 48> runs{};
    std::array<std::uint64_t, 48> bytes{};
    void add(const histogram& other) {
        for (std::size_t k = 0; k < runs.size(); ++k) {
            runs[k] += other.runs[k];
            bytes[k] += other.bytes[k];
        }
    }
};

inline histogram lengths_of(const manifest& checkpoint, std::span<const plan::region> regions) {
    histogram made;
    for (const auto& each : regions) {
        plan::for_each_run(each, item_bits(checkpoint[each.source].dtype) / 8,
                           [&](std::uint64_t, std::uint64_t, std::uint64_t bytes) {
                               const auto k = static_cast<std::size_t>(std::bit_width(bytes)) - 1;
                               ++made.runs[k];
                               made.bytes[k] += bytes;
                           });
    }
    return made;
}

/// What a trainer rank holds.
template <class Kit>
class shard {
public:
    static constexpr auto lifetime = tensor_lifetime::stable;

    shard(const pull_settings& wanted, int rank)
        : all_{models::parameters(wanted.model)},
          held_{held_of(all_, wanted, rank)},
          memory_{held_, wanted.trainer_device} {
        for (std::size_t i = 0; i < held_.size(); ++i) {
            names_.push_back(held_[i].name);
            tensors_.push_back({held_[i].name, memory_.views()[i]});
        }
    }
    [[nodiscard]] const std::vector<param_meta>& metadata() const { return all_; }
    [[nodiscard]] const std::vector<std::string>& held_names() const { return names_; }
    [[nodiscard]] const std::vector<named_tensor>& weights() const { return tensors_; }
    [[nodiscard]] typename Kit::weights& memory() { return memory_; }

private:
    [[nodiscard]] static manifest held_of(const std::vector<param_meta>& all,
                                          const pull_settings& wanted, int rank) {
        std::vector<param_meta> held;
        for (const auto& each : all) {
            if (holds(rank, wanted, each.name)) {
                held.push_back(each);
            }
        }
        return manifest{std::move(held)};
    }

    std::vector<param_meta> all_;
    manifest held_;
    typename Kit::weights memory_;
    std::vector<std::string> names_;
    std::vector<named_tensor> tensors_;
};

template <class Kit>
void trainer(const channel& parent, const pull_settings& wanted, int rank) {
    Kit::settle(wanted.trainer_device);
    shard<Kit> weights{wanted, rank};
    weights.memory().overwrite();
    auto group = [&] {
        if (rank == 0) {
            auto made = store_group::host(wanted.ranks);
            parent.put(made.port());
            return made;
        }
        const auto port = parent.take<std::uint16_t>();
        return store_group::join(rank, wanted.ranks, "127.0.0.1", port, in_time());
    }();
    std::vector<std::string> urls;
    for (int w = 0; w < wanted.ranks; ++w) {
        urls.push_back(fmt::format("http://127.0.0.1:{}", parent.take<std::uint16_t>()));
    }
    fan_out_sync_client client{http_sync_clients(urls, {})};
    sharded_pull::basic_trainer_init_info<typename Kit::fabric> info{
        .rank = rank, .device = wanted.trainer_device};
    info.in_place = !wanted.staged;
    info.node = wanted.apart ? "the trainers' node" : "";
    info.chunk_bytes = wanted.chunk_bytes != 0 ? wanted.chunk_bytes : info.chunk_bytes;
    info.staging_bytes = std::max(
        wanted.staging_bytes != 0 ? wanted.staging_bytes : info.staging_bytes, info.chunk_bytes);
    const auto begin = monotonic::now();
    auto engine = trainer_init(info, client, weights, trainer_options{}, group);
    parent.put(seconds_since(begin));
    parent.put(Kit::show(weights.memory(), wanted.trainer_device));
    for (;;) {
        const auto next = parent.take<command>();
        if (next.what == command::kind::end) {
            break;
        }
        if (next.what == command::kind::fill) {
            weights.memory().fill(next.round);
            parent.put(true);
            continue;
        }
        sent told;
        const auto before = Kit::allocations();
        const auto started = monotonic::now();
        try {
            const auto report =
                engine.send_weights({.deadline = deadline::after(std::chrono::milliseconds{
                                         static_cast<std::int64_t>(next.budget * 1e3)}),
                                     .tolerate_failed_peers = next.tolerate});
            told.start = report.start.seconds;
            told.update = report.update.seconds;
            told.finish = report.finish.seconds;
            report.first_failure().text.copy(told.text.data(), told.text.size() - 1);
        } catch (const std::exception& failed) {
            told.threw = true;
            std::string_view{failed.what()}.copy(told.text.data(), told.text.size() - 1);
        }
        told.seconds = seconds_since(started);
        const auto& peers = engine.last_report().peers;
        for (std::size_t i = 0; i < peers.size() && i < most_ranks; ++i) {
            told.data[i] = peers[i].data_seconds;
            told.committed[i] = peers[i].status == peer_status::committed ? 1 : 0;
        }
        told.allocations = Kit::allocations() - before;
        parent.put(told);
    }
    engine.close(deadline::after(std::chrono::seconds{5}));
    group.close(in_time());  // rank 0's store goes with it, and the others may still read
}

template <class Kit>
void worker(const channel& parent, const pull_settings& wanted, int rank, std::uint16_t port) {
    const int device = wanted.worker_device;
    Kit::settle(device);
    const manifest checkpoint{models::parameters(wanted.model)};
    const models::worker keeps{
        wanted.model, plan::worker_position_of(layout_of_workers(wanted), rank, wanted.ranks)};
    const manifest mine{keeps.parameters()};
    typename Kit::weights landing{mine, device};
    landing.overwrite();
    const auto table = Kit::table(mine, landing, device);
    worked last;
    worker_engine engine{
        sharded_pull::basic_backend<typename Kit::fabric>{
            .loader = [&](plan::recorder& made, const receiver_context&) { keeps(made); },
            .on_traffic =
                [&](const receiver_context&, std::span<const sharded_pull::owner_traffic> all) {
                    last.end = now();
                    last.bytes = 0;
                    for (const auto& each : all) {
                        last.bytes += each.bytes;
                    }
                },
            .on_node_traffic =
                [&](const receiver_context&, std::span<const sharded_pull::node_traffic> all) {
                    last.from_peers = 0;
                    last.planned_from_peers = 0;
                    for (const auto& each : all) {
                        last.from_peers += each.bytes;
                        last.planned_from_peers += each.planned;
                    }
                }},
        *table};
    worker_service service{engine};
    worker_server server{service, {.port = port}};
    server.start();
    parent.put(server.port());
    const auto wants = plan::record(checkpoint, mine, keeps);
    const typename Kit::check check{device, checkpoint, wants.regions, landing.views()};
    parent.put(mine.total_bytes());
    parent.put(lengths_of(checkpoint, wants.regions));
    std::optional<typename Kit::uniform> uniform;
    if (parent.take<bool>()) {
        uniform.emplace(parent.take<typename Kit::shown>(), landing, device);
    }
    for (;;) {
        const auto next = parent.take<command>();
        switch (next.what) {
            case command::kind::overwrite:
                landing.overwrite();
                parent.put(true);
                break;
            case command::kind::pull: {
                const auto before = Kit::allocations();
                static_cast<void>(parent.take<bool>());  // the trainer's calls have returned
                auto told = last;
                told.allocations = Kit::allocations() - before;
                parent.put(told);
                break;
            }
            case command::kind::uniform: {
                worked told{.begin = now(), .bytes = uniform->bytes()};
                uniform->run(next.which);
                told.end = now();
                parent.put(told);
                break;
            }
            case command::kind::copy: parent.put(Kit::copies_seconds(landing)); break;
            case command::kind::check: parent.put(check.wrong(next.round)); break;
            default: server.stop(deadline::after(std::chrono::seconds{5})); return;
        }
    }
}

/// The processes, and what is asked of them.
template <class Kit>
class program {
public:
    explicit program(const pull_settings& wanted) : wanted_{wanted} {
        std::fflush(stdout);
        const auto all = models::parameters(wanted.model);
        for (int t = 0; t < wanted.ranks; ++t) {
            if (std::ranges::none_of(
                    all, [&](const param_meta& each) { return holds(t, wanted, each.name); })) {
                throw std::runtime_error{fmt::format(
                    "trainer rank {} of {} would hold nothing; take more layers", t, wanted.ranks)};
            }
        }
        for (int w = 0; w < wanted.ranks; ++w) {
            workers_.push_back(start_worker(w, 0));
        }
        for (int t = 0; t < wanted.ranks; ++t) {
            trainers_.push_back(started(fmt::format("trainer rank {}", t),
                                        [=](channel& parent) { trainer<Kit>(parent, wanted, t); }));
        }
        for (auto& each : workers_) {
            ports_.push_back(each->to().template take<std::uint16_t>());
        }
        const auto store = trainers_[0]->to().template take<std::uint16_t>();
        for (std::size_t t = 0; t < trainers_.size(); ++t) {
            if (t != 0) {
                trainers_[t]->to().put(store);
            }
            for (const auto port : ports_) {
                trainers_[t]->to().put(port);
            }
        }
        for (auto& each : workers_) {
            kept_bytes_ += each->to().template take<std::uint64_t>();
            lengths_.add(each->to().template take<histogram>());
        }
        for (auto& each : trainers_) {
            init_seconds_ = std::max(init_seconds_, each->to().template take<double>());
            shown_.push_back(each->to().template take<typename Kit::shown>());
        }
        for (std::size_t w = 0; w < workers_.size(); ++w) {
            workers_[w]->to().put(true);
            workers_[w]->to().put(shown_[w]);
        }
    }

    /// Rows. @returns how much was not as it must be.
    int run() {
        print_head();
        constexpr auto ways = Kit::uniform_names.size() + 2;  // and one reader alone, and the pull
        rows_.resize(ways);
        for (int round = 0; round < warm_ups + wanted_.rounds; ++round) {
            fill(static_cast<std::uint64_t>(round) + 1);
            for (std::size_t k = 0; k < ways; ++k) {
                one(row_of(round, k, ways), round);
            }
        }
        return print_rows();
    }

    /// Ends workers in the middle of rounds, each time another one, as far as there are: what one
    /// that is back takes for its node it takes no more. @returns how much was not as asked.
    int kill() {
        int wrong = 0;
        const auto expect = [&](bool good, std::string_view what) {
            fmt::print("{}: {}\n", what, good ? "yes" : "NO");
            wrong += good ? 0 : 1;
        };
        std::uint64_t number = 100;
        constexpr std::array parts{0.1, 0.5, 0.9};
        for (std::size_t k = 0; k < parts.size(); ++k) {
            const double part = parts[k];
            const auto victim = workers_.size() - 1 - k % workers_.size();
            fill(++number);
            const auto whole = pull(true, {});
            expect(!whole.threw && check_all(number) == 0, "a round before it is whole everywhere");
            fill(++number);
            const auto data = *std::ranges::max_element(whole.data);
            const auto lost = pull(true, [&] {
                std::this_thread::sleep_for(
                    std::chrono::duration<double>(whole.start + part * data));
                workers_[victim]->kill();
            });
            fmt::print("killed at {:.1f} of the data phase of {:.1f} ms: {:.3f} s; {}\n", part,
                       data * 1e3, lost.seconds, lost.text.data());
            std::uint64_t differ = 0;
            for (std::size_t w = 0; w < workers_.size(); ++w) {
                differ += w == victim ? 0 : check(w, number);
            }
            expect(lost.committed[victim] == 0, "the killed one is reported");
            if (workers_.size() > 1) {
                expect(std::accumulate(lost.committed.begin(), lost.committed.end(), 0) + 1 ==
                           static_cast<int>(workers_.size()),
                       "the others have committed");
                expect(differ == 0, "the others have every element of the round");
            }
            workers_[victim] = start_worker(static_cast<int>(victim), ports_[victim]);
            auto& anew = workers_[victim]->to();
            static_cast<void>(anew.template take<std::uint16_t>());
            static_cast<void>(anew.template take<std::uint64_t>());
            static_cast<void>(anew.template take<histogram>());
            anew.put(false);
            fill(++number);
            const auto back = pull(true, {});
            fmt::print("the next round: {:.3f} s; {}\n", back.seconds, back.text.data());
            expect(!back.threw && back.committed[victim] == 1 && check_all(number) == 0,
                   "the new process has the full version");
        }
        return wrong;
    }

    void end() {
        for (auto* const all : {&trainers_, &workers_}) {
            for (auto& each : *all) {
                each->to().put(command{});
            }
        }
        for (auto* const all : {&trainers_, &workers_}) {
            for (auto& each : *all) {
                static_cast<void>(each->to().rest());  // until it has ended
            }
        }
    }

private:
    using process = std::unique_ptr<forked>;
    struct measured {
        std::vector<double> seconds{};
        std::uint64_t bytes = 0;
        [[nodiscard]] double rate() const { return static_cast<double>(bytes) / median(seconds); }
    };
    static constexpr std::size_t alone = Kit::uniform_names.size();
    static constexpr std::size_t pulled = alone + 1;

    template <class Body>
    [[nodiscard]] static process started(std::string name, Body body) {
        return std::make_unique<forked>([name, body](channel& parent) {
            std::setvbuf(stdout, nullptr, _IOLBF, 0);
            try {
                body(parent);
            } catch (const std::exception& failed) {
                std::fprintf(stderr, "%s: %s\n", name.c_str(), failed.what());
                ::_exit(1);
            }
        });
    }
    [[nodiscard]] process start_worker(int rank, std::uint16_t port) const {
        const auto wanted = wanted_;
        return started(fmt::format("worker rank {}", rank),
                       [=](channel& parent) { worker<Kit>(parent, wanted, rank, port); });
    }
    /// Asks all, then hears all.
    template <class Answer>
    std::vector<Answer> ask(std::vector<process>& whom, const command& what) {
        for (auto& each : whom) {
            each->to().put(what);
        }
        std::vector<Answer> told;
        for (auto& each : whom) {
            told.push_back(each->to().template take<Answer>());
        }
        return told;
    }
    void fill(std::uint64_t round) {
        round_ = round;
        ask<bool>(trainers_, {.what = command::kind::fill, .round = round});
        ask<bool>(workers_, {.what = command::kind::overwrite});
    }
    [[nodiscard]] std::uint64_t check(std::size_t worker, std::uint64_t round) {
        workers_[worker]->to().put(command{.what = command::kind::check, .round = round});
        return workers_[worker]->to().template take<std::uint64_t>();
    }
    [[nodiscard]] std::uint64_t check_all(std::uint64_t round) {
        const auto told =
            ask<std::uint64_t>(workers_, {.what = command::kind::check, .round = round});
        return std::accumulate(told.begin(), told.end(), std::uint64_t{0});
    }
    /// One `send_weights()` on all ranks. @returns rank 0's answer.
    [[nodiscard]] sent pull(bool tolerate, const std::function<void()>& meanwhile) {
        for (auto& each : trainers_) {
            each->to().put(command{.what = command::kind::pull,
                                   .round = round_,
                                   .tolerate = tolerate,
                                   .budget = tolerate ? 8.0 : 50.0});
        }
        if (meanwhile) {
            meanwhile();
        }
        sent first;
        for (std::size_t t = 0; t < trainers_.size(); ++t) {
            const auto told = trainers_[t]->to().template take<sent>();
            if (t == 0) {
                first = told;
            } else {
                first.allocations += told.allocations;
                if (told.threw && !first.threw) {
                    fmt::print("trainer rank {} throws: {}\n", t, told.text.data());
                }
            }
        }
        return first;
    }

    void one(std::size_t index, int round) {
        ask<bool>(workers_, {.what = command::kind::overwrite});
        std::vector<worked> told;
        sent by;
        if (index == pulled) {
            for (auto& each : workers_) {
                each->to().put(command{.what = command::kind::pull});
            }
            by = pull(false, {});
            if (by.threw) {
                throw std::runtime_error{by.text.data()};
            }
            for (std::size_t w = 0; w < workers_.size(); ++w) {
                workers_[w]->to().put(true);
                told.push_back(workers_[w]->to().template take<worked>());
                told.back().begin = told.back().end - by.data[w];
            }
            look(by, told, round);
        } else if (index == alone) {
            workers_[0]->to().put(command{.what = command::kind::uniform, .which = Kit::best});
            told.push_back(workers_[0]->to().template take<worked>());
        } else {
            told = ask<worked>(workers_, {.what = command::kind::uniform, .which = index});
        }
        if (round < warm_ups) {
            return;
        }
        double begin = told[0].begin;
        double last = 0;
        std::uint64_t bytes = 0;
        for (const auto& each : told) {
            begin = std::min(begin, each.begin);
            last = std::max(last, each.end);
            bytes += each.bytes;
        }
        rows_[index].seconds.push_back(last - begin);
        rows_[index].bytes = bytes;
        if (index == pulled) {
            whole_.push_back(by.seconds);
            start_.push_back(by.start);
            update_.push_back(by.update);
            finish_.push_back(by.finish);
        }
    }
    void look(const sent& by, std::span<const worked> told, int round) {
        const auto wrong = check_all(round_);
        wrong_ += wrong;
        if (wrong != 0) {
            fmt::print("round {}: {} elements are WRONG\n", round + 1, wrong);
        }
        first_seconds_ = round == 0 ? by.seconds : first_seconds_;
        if (round >= 2) {
            steady_allocations_ += by.allocations;
            for (const auto& each : told) {
                steady_allocations_ += each.allocations;
            }
        }
        from_trainers_ = 0;
        from_peers_ = 0;
        for (const auto& each : told) {
            from_trainers_ += each.bytes;
            from_peers_ += each.from_peers;
            if (each.from_peers != each.planned_from_peers ||
                (each.from_peers == 0 && wanted_.apart && wanted_.ranks > 1)) {
                fmt::print(
                    "round {}: a worker reads {} bytes from node peers, planned are {}: "
                    "WRONG\n",
                    round + 1, each.from_peers, each.planned_from_peers);
                ++wrong_;
            }
        }
    }

    void print_head() const {
        fmt::print(
            "{0}, {1} layers, {2} experts; {3} trainer ranks{4}, {3} worker ranks EP{3} x {10}{3} "
            "that keep {5:.2f} GB in all; over {6}{9}; medians of {7} rounds after {8}\n",
            wanted_.model.name, wanted_.model.layers, wanted_.model.experts, wanted_.ranks,
            wanted_.ranks == 4   ? " PP2 x EP2"
            : wanted_.ranks == 2 ? " PP2"
                                 : "",
            static_cast<double>(kept_bytes_) * 1e-9, std::string_view{Kit::fabric::name},
            wanted_.rounds, warm_ups, wanted_.staged ? ", staged" : "",
            wanted_.apart ? "DP" : "TP");
        fmt::print("runs by length, all workers:\n{:>16} {:>10} {:>14}\n", "from bytes", "runs",
                   "MB");
        for (std::size_t k = 0; k < lengths_.runs.size(); ++k) {
            if (lengths_.runs[k] != 0) {
                fmt::print("{:>16} {:>10} {:>14.1f}\n", std::uint64_t{1} << k, lengths_.runs[k],
                           static_cast<double>(lengths_.bytes[k]) * 1e-6);
            }
        }
    }
    void print_row(std::string_view name, const std::vector<double>& taken,
                   std::uint64_t bytes) const {
        const auto rate = static_cast<double>(bytes) / median(taken);
        fmt::print("{:<18} {:>9.3f} {:>9.3f} {:>9.3f} {:>8.1f} {:>10.3f}\n", name,
                   median(taken) * 1e3, *std::ranges::min_element(taken) * 1e3,
                   *std::ranges::max_element(taken) * 1e3, rate * 1e-9, rate / rows_[0].rate());
    }
    int print_rows() {
        fmt::print("{:<18} {:>9} {:>9} {:>9} {:>8} {:>10}\n", "way", "ms", "fastest", "slowest",
                   "GB/s", "of first");
        for (std::size_t k = 0; k < rows_.size(); ++k) {
            print_row(k == pulled  ? std::string_view{"sharded pull"}
                      : k == alone ? std::string_view{"one reader alone"}
                                   : Kit::uniform_names[k],
                      rows_[k].seconds, rows_[k].bytes);
        }
        print_row("send_weights()", whole_, rows_[pulled].bytes);
        fmt::print("send_weights(): start {:.3f} ms, update {:.3f} ms, finish {:.3f} ms\n",
                   median(start_) * 1e3, median(update_) * 1e3, median(finish_) * 1e3);
        const auto verdict = [&](std::string_view of, double rate, double asked) {
            const auto found = rows_[pulled].rate() / rate;
            fmt::print("data phase: {:.3f} of {} at once", found, of);
            if (asked > 0) {
                fmt::print("; asked {:.2f}: {}", asked, found >= asked ? "reached" : "MISSED");
            }
            fmt::print("\n");
        };
        verdict(Kit::uniform_names[0], rows_[0].rate(), wanted_.asked_copy);
        double best = 0;
        for (std::size_t k = 0; k < alone; ++k) {
            best = std::max(best, rows_[k].rate());
        }
        verdict("the best of them", best, wanted_.asked_kernel);
        if (wanted_.apart) {
            fmt::print("read from the trainers {:.3f} GB, from node peers {:.3f} GB\n",
                       static_cast<double>(from_trainers_) * 1e-9,
                       static_cast<double>(from_peers_) * 1e-9);
        } else {
            predict();
        }
        fmt::print("init {:.1f} ms, first send_weights() {:.1f} ms\n", init_seconds_ * 1e3,
                   first_seconds_ * 1e3);
        if (Kit::allocations() != Kit::not_counted) {
            fmt::print("device and pinned allocations from the third round on: {}\n",
                       steady_allocations_);
        }
        fmt::print("{}\n", wrong_ == 0 ? "every element of every worker was right in every round"
                                       : "elements were WRONG");
        return wrong_ == 0 ? 0 : 1;
    }

    /// What the simulator makes of the rates of this run.
    void predict() {
        models::cluster where{.trainer_ranks = wanted_.ranks,
                              .worker_ranks = wanted_.ranks,
                              .ranks_per_node = 2 * wanted_.ranks,
                              .same_nodes = true};
        where.trainer.pipeline = wanted_.ranks >= 2 ? 2 : 1;
        where.trainer.expert = wanted_.ranks == 4 ? 2 : 1;
        where.worker.tensor = where.worker.expert = wanted_.ranks;
        const bool in_place = Kit::fabric::capabilities.in_place && !wanted_.staged;
        const auto copies = ask<double>(workers_, {.what = command::kind::copy});
        const auto slowest = *std::ranges::max_element(copies);
        const auto busy = static_cast<unsigned>(wanted_.ranks * Kit::threads_a_rank);
        plan::measured_rates seen{.local_one = rows_[alone].rate(),
                                  .local_all = rows_[Kit::best].rate(),
                                  .latency = 100e-6,
                                  .shared_cores = std::thread::hardware_concurrency() < busy};
        if (!in_place && slowest > 0) {
            // All copied at once. A trainer rank packs its part; what is read lands in place.
            const auto together = static_cast<double>(kept_bytes_) / slowest;
            seen.pack = seen.shared_cores ? together : together / wanted_.ranks;
        }
        sharded_pull::basic_trainer_init_info<typename Kit::fabric> info;
        constexpr std::uint64_t in_place_bytes = std::uint64_t{1} << 30U;  // of one read, at most
        models::method how{.node_once = false, .in_place = in_place, .chunk_bytes = in_place_bytes};
        if (!in_place) {
            how.chunk_bytes = wanted_.chunk_bytes != 0 ? wanted_.chunk_bytes : info.chunk_bytes;
        }
        how.budgets.links = plan::links_from(seen);
        how.budgets.arena = wanted_.staging_bytes != 0 ? wanted_.staging_bytes : info.staging_bytes;
        const models::pull_problem problem{wanted_.model, where};
        const auto predicted = problem.simulate(problem.plan(how), how).seconds;
        const auto found = median(rows_[pulled].seconds);
        fmt::print("simulated from the rates above: {:.3f} ms, {:+.1f} % of what was measured\n",
                   predicted * 1e3, (predicted / found - 1) * 100);
    }

    pull_settings wanted_;
    std::vector<process> workers_;
    std::vector<process> trainers_;
    std::vector<std::uint16_t> ports_;
    std::uint64_t kept_bytes_ = 0;
    std::vector<typename Kit::shown> shown_;
    histogram lengths_;
    double init_seconds_ = 0;
    double first_seconds_ = 0;
    std::uint64_t round_ = 0;
    std::uint64_t wrong_ = 0;
    std::uint64_t steady_allocations_ = 0;
    std::uint64_t from_trainers_ = 0;  ///< in the last round
    std::uint64_t from_peers_ = 0;
    std::vector<measured> rows_;  ///< uniform ways, one reader alone, the pull
    std::vector<double> whole_;
    std::vector<double> start_;
    std::vector<double> update_;
    std::vector<double> finish_;
};

}  // namespace pull_rounds
}  // namespace benchmarks
