// SPDX-License-Identifier: Apache-2.0
//
// Trainers whose ranks all serve their own memory: each rank has other weights than the next, so
// that a worker which reads the wrong memory, or reads it at the wrong time, is found.

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <new>
#include <ranges>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/testing/gate.hpp>
#include <weightwire/weightwire.hpp>

#include "../support/small_model.hpp"
#include "../support/staged_transport.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using tests::small_weights;

constexpr int ranks = 4;
constexpr int parameters = 10;
constexpr int elements = 50;

/// What rank `rank` sends as `version`.
constexpr std::uint64_t seed_of(weight_version version, int rank) {
    return version * 100 + static_cast<std::uint64_t>(rank);
}

/// A worker of as many ranks as the trainer, each of which reads one trainer rank's memory.
template <class Tag>
struct serving_worker {
    explicit serving_worker(tests::journal* log)
        : engine{tag_with(log), sinks()}, service{engine} {}
    std::atomic<std::uint64_t> refused{0};  ///< round whose update calls fail
    std::array<parameter_table, ranks> tables{
        parameter_table{tests::small_model(parameters, elements)},
        parameter_table{tests::small_model(parameters, elements)},
        parameter_table{tests::small_model(parameters, elements)},
        parameter_table{tests::small_model(parameters, elements)}};
    worker_engine<Tag, parameter_table> engine;
    worker_service<worker_engine<Tag, parameter_table>> service;
    local_sync_client<worker_service<worker_engine<Tag, parameter_table>>> client{service};

    /// Whether worker rank `r` serves `version` as trainer rank `r` has it, on every rank.
    [[nodiscard]] bool serves(weight_version version) {
        small_weights weights{parameters, elements};
        for (int rank = 0; rank < ranks; ++rank) {
            weights.set(seed_of(version, rank));
            const auto held = tables[static_cast<std::size_t>(rank)].acquire();
            for (std::size_t i = 0; i < held.size(); ++i) {
                if (held.version() != version ||
                    digest_text(digest(held.tensor(i).bytes())) != weights.digest_of(i)) {
                    return false;
                }
            }
        }
        return true;
    }

private:
    Tag tag_with(tests::journal* log) {
        Tag tag;
        tag.log = log;
        tag.refused = &refused;
        return tag;
    }
    std::vector<parameter_table*> sinks() {
        std::vector<parameter_table*> out;
        for (auto& table : tables) {
            out.push_back(&table);
        }
        return out;
    }
};
/// Where all ranks wait for each other. Who waits for nothing says so in the end.
class meeting {
public:
    void arrive_and_wait() {
        std::unique_lock lock{mutex_};
        const auto turn = turn_;
        if (++here_ == ranks) {
            here_ = 0;
            ++turn_;
            all_are_here_.notify_all();
        } else if (!all_are_here_.wait_for(lock, 30s, [&] { return turn_ != turn; })) {
            --here_;
            throw std::runtime_error{"a rank did not come to the gather"};
        }
    }

private:
    std::mutex mutex_;
    std::condition_variable all_are_here_;
    int here_ = 0;
    std::uint64_t turn_ = 0;
};

/// Each tensor exists only once all ranks have come for it, as in a gather. `fails_at` throws there
/// on this rank.
struct gathered_source {
    small_weights& inner;
    meeting& all;
    int fails_at = -1;
    bool one_more = false;
    bool gathers = true;

    const auto& metadata() const { return inner.metadata(); }
    auto weights() {
        return std::views::iota(std::size_t{0}, inner.weights().size() + (one_more ? 1 : 0)) |
               std::views::transform([this](std::size_t i) {
                   if (i == inner.weights().size()) {
                       return inner.weights().back();
                   }
                   if (gathers) {
                       all.arrive_and_wait();
                   }
                   if (static_cast<int>(i) == fails_at) {
                       throw data_error{"the gather failed", {.tensor = inner.metadata()[i].name}};
                   }
                   return inner.weights()[i];
               });
    }
};

/// What a rank's round came to.
struct outcome {
    std::string kind;  ///< of the error; empty: none
    std::string what;
    error_context where;
    sync_report report;
};

/// A trainer of `ranks` threads, each with a sender, a script and a source of its own, and a
/// worker.
template <class Info = tests::staged_init_info>
class serving_trainer {
public:
    using tag = typename Info::backend;
    explicit serving_trainer(std::size_t parts, bool ahead = false, bool whole_first = false)
        : parts_{parts}, ahead_{ahead}, whole_first_{whole_first} {
        for (auto& script : scripts) {
            script.log = &log;
        }
    }

    /// Runs `rounds` rounds on all ranks, of versions 1, 2, … `before(round, …)` comes first in
    /// each.
    /// @returns by round and rank; empty where `trainer_init` has failed, which is in `at_init`.
    template <class Before>
    std::vector<std::array<outcome, ranks>> run(int rounds, Before before) {
        std::vector<std::array<outcome, ranks>> out(static_cast<std::size_t>(rounds));
        auto host = store_group::host(ranks);
        const auto port = host.port();
        {
            std::vector<std::jthread> others;
            for (int rank = 1; rank < ranks; ++rank) {
                others.emplace_back([&, rank] {
                    auto group =
                        store_group::join(rank, ranks, "127.0.0.1", port, deadline::after(20s));
                    train(rank, archetypes::sync_client{}, group, out, before);
                });
            }
            train(0, worker.client, host, out, before);
        }
        return out;
    }
    std::vector<std::array<outcome, ranks>> run(int rounds) {
        return run(rounds, [](int, int, gathered_source&, send_options&) {});
    }

    tests::journal log;
    std::array<tests::stage_script, ranks> scripts;
    serving_worker<tag> worker{&log};
    std::array<outcome, ranks> at_init;

private:
    template <class Client, class Before>
    void train(int rank, Client&& client, store_group& group,
               std::vector<std::array<outcome, ranks>>& out, Before& before) {
        const auto here = static_cast<std::size_t>(rank);
        small_weights weights{parameters, elements};
        gathered_source source{weights, all_};
        Info info;
        info.rank = rank;
        info.parts = parts_;
        info.ahead = ahead_;
        info.whole_first = whole_first_;
        info.script = &scripts[here];
        note(at_init[here], [&] {
            auto engine = trainer_init(info, client, source, {.init_budget = 20s}, group);
            for (std::size_t round = 0; round < out.size(); ++round) {
                send_options options{.version = round + 1, .deadline = deadline::after(20s)};
                weights.set(seed_of(round + 1, rank));
                source.fails_at = -1;
                before(static_cast<int>(round) + 1, rank, source, options);
                note(out[round][here],
                     [&] { out[round][here].report = engine.send_weights(options); });
                if (rank == 0) {
                    served.push_back(worker.tables[0].version());
                }
            }
            engine.close(deadline::after(5s));
        });
        note(at_init[here], [&] { group.close(deadline::after(5s)); });
    }
    template <class Call>
    static void note(outcome& to, Call call) {
        try {
            call();
        } catch (const error& caught) {
            if (to.kind.empty()) {
                to.kind = caught.kind();
                to.what = caught.what();
                to.where = caught.context();
            }
        } catch (const std::exception& caught) {
            to.kind = "exception";
            to.what = caught.what();
        }
    }

    std::size_t parts_;
    bool ahead_;
    bool whole_first_;
    meeting all_;

public:
    std::vector<weight_version> served;  ///< after each round
};

void check_committed(const std::array<outcome, ranks>& round, weight_version version) {
    for (int rank = 0; rank < ranks; ++rank) {
        CAPTURE(rank);
        const auto& one = round[static_cast<std::size_t>(rank)];
        CHECK_MESSAGE(one.kind.empty(), one.what);
        CHECK(one.report.version == version);
        CHECK(one.report.all_committed());
    }
}
/// Every rank ended with the same error, which happened on `culprit`.
void check_failed(const std::array<outcome, ranks>& round, std::string_view kind,
                  std::string_view text, int culprit) {
    for (int rank = 0; rank < ranks; ++rank) {
        CAPTURE(rank);
        const auto& one = round[static_cast<std::size_t>(rank)];
        CHECK(one.kind == kind);
        CAPTURE(one.what);
        CHECK(one.what.find(text) != std::string::npos);
        if (rank != culprit) {
            CHECK(one.where.rank == culprit);
        }
    }
}

/// Where the last (or first) of "0: what" to "3: what" stands.
std::size_t last_of(const tests::journal& log, const std::string& what, std::size_t nth) {
    std::size_t last = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        last = std::max(last, log.place(std::to_string(rank) + ": " + what, nth));
    }
    return last;
}
std::size_t first_of(const tests::journal& log, const std::string& what, std::size_t nth) {
    auto first = log.entries().size();
    for (int rank = 0; rank < ranks; ++rank) {
        first = std::min(first, log.place(std::to_string(rank) + ": " + what, nth));
    }
    return first;
}
/// Where the `nth` round's last worker rank has received `part`.
std::size_t last_received(const tests::journal& log, const std::string& part, std::size_t nth) {
    return log.place("worker: received " + part, nth * ranks);
}

}  // namespace

TEST_CASE_TEMPLATE(
    "every trainer rank's memory reaches its worker: each part is staged on all ranks, then called "
    "for",
    Info, tests::staged_init_info, tests::dropping_staged_init_info) {
    // Where all ranks serve nothing is read ahead.
    serving_trainer<Info> trainer{3, true};
    std::array<bool, 3> whole{};
    const auto rounds = trainer.run(3, [&](int round, int rank, gathered_source&, send_options&) {
        if (rank == 0 && round > 1) {
            whole[static_cast<std::size_t>(round) - 2] =
                trainer.worker.serves(static_cast<weight_version>(round) - 1);
        }
    });
    CHECK(whole[0]);
    CHECK(whole[1]);
    CHECK(trainer.worker.serves(3));
    for (std::size_t round = 0; round < 3; ++round) {
        CAPTURE(round);
        check_committed(rounds[round], round + 1);
        for (const auto* const part : {"0", "1", "2"}) {
            CAPTURE(part);
            const auto staged = last_of(trainer.log, std::string{"staged "} + part, round + 1);
            const auto received = last_received(trainer.log, part, round + 1);
            REQUIRE(received < trainer.log.entries().size());
            CHECK(staged <
                  trainer.log.place(std::string{"worker: receive "} + part, round * ranks + 1));
            if (*part != '2') {
                const std::string next{static_cast<char>(*part + 1)};
                CHECK(received < first_of(trainer.log, "stage " + next, round + 1));
            }
        }
    }
    for (int rank = 0; rank < ranks; ++rank) {
        CAPTURE(rank);
        const auto name = std::to_string(rank);
        CHECK(trainer.log.count(name + ": export") == 1);
        CHECK(trainer.log.count(name + ": prepare") == (rank == 0 ? 1 : 0));
        CHECK(trainer.log.count(name + ": adopt") == (rank == 0 ? 0 : 1));
        CHECK(trainer.log.count(name + ": send 1") == (rank == 0 ? 3 : 0));
        CHECK(trainer.log.count(name + ": close") == 1);
    }
    CHECK(last_of(trainer.log, "export", 1) < trainer.log.place("0: prepare"));
}

TEST_CASE("a gather that fails on one rank, at any tensor of a part, ends the round on all") {
    for (const int culprit : {0, 2}) {
        for (const int tensor : {0, 2, 4, 5, 9}) {  // parts are 0 to 4 and 5 to 9
            CAPTURE(culprit);
            CAPTURE(tensor);
            serving_trainer<> trainer{2};
            const auto rounds =
                trainer.run(3, [&](int round, int rank, gathered_source& source, send_options&) {
                    source.fails_at = round == 2 && rank == culprit ? tensor : -1;
                });
            check_committed(rounds[0], 1);
            check_failed(rounds[1], "data", "the gather failed", culprit);
            check_committed(rounds[2], 3);
            CHECK(trainer.served == std::vector<weight_version>{1, 1, 3});
            CHECK(trainer.worker.serves(3));
            // The first part's call is made only when that part is staged everywhere.
            CHECK(trainer.log.count("worker: receive 0") ==
                  static_cast<std::size_t>(tensor < 5 ? 2 * ranks : 3 * ranks));
            CHECK(trainer.log.count("worker: receive 1") == 2 * ranks);
        }
    }
}

TEST_CASE("a gather that fails in a first stage that walks the whole source does so on all ranks") {
    for (const int tensor : {0, 4, 5, 9}) {
        CAPTURE(tensor);
        serving_trainer<> trainer{2, false, true};
        const auto rounds =
            trainer.run(3, [&](int round, int rank, gathered_source& source, send_options&) {
                source.fails_at = round == 2 && rank == 2 ? tensor : -1;
            });
        check_committed(rounds[0], 1);
        check_failed(rounds[1], "data", "the gather failed", 2);
        check_committed(rounds[2], 3);
        CHECK(trainer.worker.serves(3));
        CHECK(trainer.log.count("worker: receive 0") == 2 * ranks);
    }
}

TEST_CASE_TEMPLATE(
    "a stage that fails on any rank ends the round on all, and what was exported stays", Info,
    tests::staged_init_info, tests::dropping_staged_init_info) {
    constexpr bool drops = HasDropPeer<typename backend_traits<typename Info::backend>::sender>;
    for (const int culprit : {0, 3}) {
        for (const int part : {0, 1}) {
            CAPTURE(culprit);
            CAPTURE(part);
            serving_trainer<Info> trainer{2};
            const auto rounds =
                trainer.run(3, [&](int round, int rank, gathered_source&, send_options&) {
                    if (rank == culprit) {
                        trainer.scripts[static_cast<std::size_t>(rank)].fails_in =
                            round == 2 ? part : -1;
                    }
                });
            check_committed(rounds[0], 1);
            check_failed(rounds[1], "resource", "this rank stages nothing", culprit);
            check_committed(rounds[2], 3);
            CHECK(trainer.served == std::vector<weight_version>{1, 1, 3});
            CHECK(trainer.worker.serves(3));
            // A group is opened anew with the same exports; a peer alone is asked again.
            CHECK(trainer.log.count("0: prepare") == (drops ? 1 : 2));
            for (int rank = 0; rank < ranks; ++rank) {
                const auto name = std::to_string(rank);
                CHECK(trainer.log.count(name + ": export") == 1);
                CHECK(trainer.log.count(name + ": adopt") == (rank == 0 ? 0 : drops ? 1 : 2));
                CHECK(trainer.log.count(name + ": close") == 1);
            }
        }
    }
}

TEST_CASE("a stop or a deadline in one rank's stage ends the round on all") {
    for (const int culprit : {0, 3}) {
        for (const bool by_stop : {true, false}) {
            CAPTURE(culprit);
            CAPTURE(by_stop);
            serving_trainer<> trainer{2};
            testing::gate gate;
            std::stop_source stop;
            std::jthread stopper{[&] {
                gate.wait_until_blocked(deadline::after(20s));
                if (by_stop) {
                    stop.request_stop();
                }
            }};
            const auto rounds = trainer.run(
                2, [&](int round, int rank, gathered_source& source, send_options& options) {
                    // In a gather the others' time would be up as well.
                    source.gathers = by_stop;
                    auto& script = trainer.scripts[static_cast<std::size_t>(rank)];
                    script.gate = round == 1 && rank == culprit ? gate.name() : "";
                    if (round == 1) {
                        options.deadline = deadline::after(by_stop ? 20s : 2s);
                        options.stop = rank == culprit ? stop.get_token() : std::stop_token{};
                    }
                });
            check_failed(rounds[0], by_stop ? "cancelled" : "timeout",
                         "being held at a test's gate", culprit);
            CHECK(trainer.served.front() == 0);
            check_committed(rounds[1], 2);
            CHECK(trainer.worker.serves(2));
        }
    }
}

TEST_CASE("a source with a tensor too many on one rank is found on all") {
    serving_trainer<> trainer{2};
    const auto rounds =
        trainer.run(2, [&](int round, int rank, gathered_source& source, send_options&) {
            source.one_more = round == 1 && rank == 1;
        });
    check_failed(rounds[0], "data", "more tensors than its metadata names", 1);
    check_committed(rounds[1], 2);
    CHECK(trainer.worker.serves(2));
}

TEST_CASE_TEMPLATE(
    "a worker that fails ends the round on all trainer ranks, and the next one works", Info,
    tests::staged_init_info, tests::dropping_staged_init_info) {
    serving_trainer<Info> trainer{2};
    trainer.worker.refused = 2;
    const auto rounds = trainer.run(3);
    check_committed(rounds[0], 1);
    for (const auto& one : rounds[1]) {
        CHECK(one.kind == "resource");
        CHECK(one.what.find("this worker takes nothing") != std::string::npos);
    }
    check_committed(rounds[2], 3);
    CHECK(trainer.served == std::vector<weight_version>{1, 1, 3});
    CHECK(trainer.worker.serves(3));
}

TEST_CASE("a sender that reads ahead where all ranks serve is told so, on all ranks") {
    serving_trainer<> trainer{2, true};
    trainer.scripts[0].always_ahead = true;
    const auto rounds = trainer.run(2, [&](int, int, gathered_source& source, send_options&) {
        source.gathers = false;  // else this rank waits for the others, and they for it
    });
    check_failed(rounds[0], "usage", "send left the source at tensor 10, its part ends at 5", 0);
    CHECK(trainer.log.count("worker: receive 1") == 0);
}

TEST_CASE("what goes wrong when serving ranks are opened is an error on all ranks") {
    serving_trainer<> trainer{2};
    std::string kind;
    SUBCASE("one exports nothing") {
        trainer.scripts[3].exports_nothing = true;
        kind = "resource";
    }
    SUBCASE("one makes other parts of the plan") {
        trainer.scripts[2].misreads_plan = true;
        kind = "mismatch";
    }
    (void)trainer.run(0);
    for (const auto& one : trainer.at_init) {
        CHECK_MESSAGE(one.kind == kind, one.what);
    }
}

namespace {

/// Memory that the trainer's processes share.
struct shared_state {
    std::atomic<int> store_port;
    std::atomic<bool> whole;  ///< worker ranks served the first version, each its trainer rank's
    std::atomic<int> version_after;
    std::atomic<std::int64_t> waited_ms[ranks];
    char errors[ranks][400];
};

/// What one trainer process does: a round that works, and one in which rank `dying` does so between
/// its stage of the second part and the call.
void train(int rank, shared_state* state, int dying) {
    small_weights weights{parameters, elements};
    auto group = rank == 0 ? store_group::host(ranks) : [&] {
        while (state->store_port == 0) {
            ::usleep(1000);
        }
        return store_group::join(rank, ranks, "127.0.0.1",
                                 static_cast<std::uint16_t>(state->store_port),
                                 deadline::after(20s));
    }();
    state->store_port = group.port();
    serving_worker<tests::staged> worker{nullptr};  // rank 0's is used
    tests::stage_script script;
    auto engine = trainer_init(tests::staged_init_info{.rank = rank, .parts = 2, .script = &script},
                               worker.client, weights, {}, group);
    weights.set(seed_of(1, rank));
    (void)engine.send_weights({.version = 1, .deadline = deadline::after(20s)});
    if (rank == 0) {
        state->whole = worker.serves(1);
    }
    weights.set(seed_of(2, rank));
    script.dies_in = rank == dying ? 1 : -1;
    const auto begin = deadline::clock::now();
    try {
        (void)engine.send_weights({.version = 2, .deadline = deadline::after(3s)});
    } catch (const error& caught) {
        std::snprintf(state->errors[rank], sizeof state->errors[rank], "%s", caught.what());
    }
    state->waited_ms[rank] =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline::clock::now() - begin)
            .count();
    if (rank == 0) {
        state->version_after = static_cast<int>(worker.tables[0].version());
        ::usleep(500'000);  // the others still ask the store
    }
}

}  // namespace

TEST_CASE("a trainer rank that dies between its stage and the call is an error on the others") {
    for (const int dying : {ranks - 1, 0}) {
        CAPTURE(dying);
        auto* const memory = ::mmap(nullptr, sizeof(shared_state), PROT_READ | PROT_WRITE,
                                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        REQUIRE(memory != MAP_FAILED);
        auto* const state = ::new (memory) shared_state{};
        pid_t processes[ranks];
        for (int rank = 0; rank < ranks; ++rank) {
            processes[rank] = ::fork();
            if (processes[rank] == 0) {
                ::alarm(60);
                try {
                    train(rank, state, dying);
                } catch (const std::exception& failed) {
                    std::fprintf(stderr, "rank %d: %s\n", rank, failed.what());
                    ::_exit(1);
                }
                ::_exit(0);
            }
        }
        for (int rank = 0; rank < ranks; ++rank) {
            CAPTURE(rank);
            int status = -1;
            CHECK(::waitpid(processes[rank], &status, 0) == processes[rank]);
            REQUIRE(WIFEXITED(status));
            CHECK(WEXITSTATUS(status) == (rank == dying ? 86 : 0));
            if (rank != dying) {
                const std::string said = state->errors[rank];
                CAPTURE(said);
                CHECK(said.find(dying == 0
                                    ? "rank 0, which holds the trainer group's store, is gone"
                                    : "rank 3 did not come in time") != std::string::npos);
                // The round's deadline, and two seconds in which ranks still tell each other.
                CHECK(state->waited_ms[rank] < 15'000);
            }
        }
        CHECK(state->whole);
        CHECK(state->version_after == (dying == 0 ? 0 : 1));
        ::munmap(memory, sizeof(shared_state));
    }
}
