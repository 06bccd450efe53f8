// SPDX-License-Identifier: Apache-2.0
//
// What is left of a round when a worker process is killed or stopped in the middle of it? A trainer
// process sends over HTTP to worker processes, real servers over device memory; one of these is
// killed at moments spread over the data phase, in the start and in the finish, or stopped past the
// deadline and resumed. Asked of each case:
//
//   the trainer's call ends within its deadline and blames that worker; its device is usable
//   who survives serves one whole version, the new one if it committed, else the old one, by the
//   digests of every tensor; a worker that cannot have kept the old one (in_place) says so
//   a worker that was stopped does not commit the round that was given up, once it goes on
//   a fresh worker on the same port, or the resumed one, has the full current version after the
//   next send_weights(), without a new trainer_init()
//
// Started by hand:
//
//   killed_worker --backend nccl|cuda_ipc [--devices A,B,...] [--layers N] [--rounds N]
//                 [--mode flip|in_place|copy_in] [--only TEXT]
//
// The trainer is on the first device, the worker that fails on the second, further workers on the
// others; cuda_ipc has one further worker at least, on the trainer's device unless another is
// named. Without --devices the first two are taken, or the only one twice. Ranks of nccl that share
// a device speak through loopback sockets. --rounds says how many good rounds come before each
// fault, at least two. With nccl and two devices, last comes a worker process with a rank on each.
//
// Device memory: a copy of the list for the trainer, two for each worker (in_place: one). The
// library is WEIGHTWIRE_LIBNCCL's, else the one that is found. It ends within 90 seconds.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/backends/cuda_ipc/backend.hpp>
#include <weightwire/backends/nccl/backend.hpp>
#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernels/digest.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/sinks/device_memory.hpp>
#include <weightwire/sources/span_source.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/worker.hpp>

#include "../../benchmarks/support/device_weights.hpp"
#include "../../benchmarks/support/parameter_lists.hpp"
#include "../../benchmarks/support/timing.hpp"
#include "../support/forked.hpp"
#include "ipc_pair.hpp"
#include "nccl_pair.hpp"

namespace {

using namespace weightwire;
using benchmarks::device_weights;
using benchmarks::monotonic;
using benchmarks::seconds_between;
using benchmarks::seconds_since;
using tests::channel;

constexpr int whole_time = 86;         ///< seconds of the program
constexpr int most_of_a_step = 30;     ///< seconds
constexpr int enough_for_a_case = 14;  ///< seconds that must be left to begin one
constexpr int killed_budget = 10;      ///< seconds of a round in which a worker is killed
constexpr int stopped_budget = 5;
constexpr int good_budget = 28;
constexpr int attempts = 3;  ///< to hit the phase that is meant
constexpr std::size_t most_workers = 6;
constexpr std::size_t most_ranks = 2;

struct settings {
    bool nccl = true;
    std::vector<int> devices{};
    std::int64_t layers = -1;
    int rounds = 3;
    commit_mode mode = commit_mode::flip;
    std::string only{};
};

bool has_twice(const std::vector<int>& devices) {
    for (std::size_t i = 0; i < devices.size(); ++i) {
        if (std::count(devices.begin(), devices.end(), devices[i]) > 1) {
            return true;
        }
    }
    return false;
}

// --- The device.

manifest list_of(std::int64_t layers) { return manifest{benchmarks::qwen3_30b_a3b_list(layers)}; }

/// Before the process's first use of CUDA and NCCL.
/// @param apart NCCL takes the process for a host of its own.
void enter(int device, bool apart) {
    if (apart) {
        ::setenv("NCCL_HOSTID", ("weightwire-" + std::to_string(::getpid())).c_str(), 1);
        ::setenv("NCCL_NET", "Socket", 1);
    }
    static_cast<void>(nccl_pair::choose_device(device, false));
}

std::unique_ptr<device_parameter_table> make_table(const manifest& parameters, int device,
                                                   commit_mode mode) {
    return std::make_unique<device_parameter_table>(parameters, gpu_memory{device},
                                                    parameter_table_options{.mode = mode});
}

/// Of the digests of all tensors, in the order of `parameters`.
std::uint64_t digest_of(const snapshot& held, const manifest& parameters, int device) {
    const gpu::device_guard guard{device};
    std::vector<gpu::digest_item> items(parameters.size());
    for (std::size_t i = 0; i < held.size(); ++i) {
        const auto tensor = held.tensor(i);
        items.at(parameters.find(held.name(i))) = {tensor.data(), tensor.byte_size()};
    }
    return benchmarks::digest_of_all(gpu::digest_plan{device, items}, gpu::stream{device});
}

/// By all processes on the current device.
double used_gigabytes() {
    std::size_t free = 0;
    std::size_t total = 0;
    gpu::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<double>(total - free) * 1e-9;
}

bool is_usable(int device) {
    const gpu::device_guard guard{device};
    return ipc_pair::is_device_usable();
}

// --- A worker process.

/// What readers of one rank see.
struct served {
    weight_version version = 0;
    std::uint64_t digest = 0;
    bool dirty = false;
    bool usable = false;  ///< the device
};
struct all_served {
    std::size_t count = 0;
    std::array<served, most_ranks> ranks{};
};

served look_at(device_parameter_table& table, const manifest& parameters, int device) {
    served seen;
    try {
        const auto held = table.acquire(deadline::after(std::chrono::seconds{10}));
        seen.version = held.version();
        seen.digest = digest_of(held, parameters, device);
    } catch (const dirty_error&) {
        seen.dirty = true;
    }
    seen.usable = is_usable(device);
    return seen;
}

/// Serves until it is told to end. Answers each `true` with what its readers see.
template <class Tag>
void worker(const channel& parent, const settings& wanted, const std::vector<int>& devices,
            bool apart, std::uint16_t port) {
    enter(devices.front(), apart);
    const auto parameters = list_of(wanted.layers);
    std::vector<std::unique_ptr<device_parameter_table>> tables;
    std::vector<device_parameter_table*> sinks;
    for (const int device : devices) {
        tables.push_back(make_table(parameters, device, wanted.mode));
        sinks.push_back(tables.back().get());
    }
    worker_engine engine{Tag{}, sinks, worker_options<>{.devices = devices}};
    worker_service service{engine};
    worker_server server{service, {.port = port}};
    server.start();
    parent.put(server.port());
    while (parent.take<bool>()) {
        all_served seen{.count = tables.size()};
        for (std::size_t rank = 0; rank < tables.size(); ++rank) {
            seen.ranks.at(rank) = look_at(*tables[rank], parameters, devices[rank]);
        }
        parent.put(seen);
    }
    server.stop(deadline::after(std::chrono::seconds{5}));
    parent.put(true);
}

// --- The trainer process.

/// A signal to a process, so many seconds after a phase has begun.
struct strike {
    phase at = phase::none;
    double after = 0;
    int signal = 0;  ///< 0: none
    pid_t process = 0;
};

/// Strikes from a thread of its own; learns of phases as the engine's event sink.
class striker {
public:
    void on(const event& what) noexcept {
        if (what.kind == event_kind::phase_begun && what.phase == wanted_.at) {
            begun_.store(monotonic::now().time_since_epoch().count());
        } else if (what.kind == event_kind::chosen && !quiet_) {
            std::printf("  chosen: %.*s\n", static_cast<int>(what.text.size()), what.text.data());
        }
    }
    void be_quiet() noexcept { quiet_ = true; }

    /// For the round that comes.
    void arm(const strike& what) {
        wanted_ = what;
        begun_ = 0;
        struck_.reset();
        if (what.signal != 0) {
            thread_ = std::jthread{[this](const std::stop_token& stop) { wait(stop); }};
        }
    }
    /// Once the round has ended.
    /// @returns when the signal was sent, and how many seconds after the phase had begun.
    std::optional<std::pair<monotonic::time_point, double>> disarm() {
        thread_ = std::jthread{};
        return struck_;
    }

private:
    void wait(const std::stop_token& stop) {
        while (begun_ == 0) {
            if (stop.stop_requested()) {
                return;
            }
            std::this_thread::yield();
        }
        const monotonic::time_point begun{monotonic::duration{begun_.load()}};
        while (seconds_since(begun) < wanted_.after) {
            if (stop.stop_requested()) {
                return;
            }
            std::this_thread::yield();
        }
        ::kill(wanted_.process, wanted_.signal);
        const auto now = monotonic::now();
        struck_ = {now, seconds_between(begun, now)};
    }

    strike wanted_{};
    std::atomic<monotonic::rep> begun_{0};
    std::optional<std::pair<monotonic::time_point, double>> struck_{};
    bool quiet_ = false;
    std::jthread thread_{};
};

/// What the trainer is asked for.
struct order {
    weight_version version = 0;
    int budget = 0;  ///< seconds
    strike hit{};
    bool end = false;
};

struct outcome {
    peer_status status = peer_status::left_out;
    phase felt = phase::none;
    bool names_peer = false;  ///< its error does
    std::array<char, 320> text{};
};

/// What it tells of the round.
struct answer {
    std::uint64_t digest = 0;  ///< of what was to be sent
    bool threw = false;
    bool struck = false;
    double seconds = 0;
    double struck_after = 0;  ///< from the begin of the phase
    double since_strike = 0;  ///< to the end of the call
    double start = 0;
    double update = 0;
    double data = 0;
    double finish = 0;
    bool usable = false;  ///< the device
    double used = 0;      ///< gigabytes of it
    std::size_t workers = 0;
    std::array<outcome, most_workers> outcomes{};
    std::array<char, 480> text{};  ///< what was thrown
};
static_assert(sizeof(answer) <= 4096, "a pipe takes it at once");

template <std::size_t Size>
void set_text(std::array<char, Size>& to, const std::string& text) {
    text.copy(to.data(), Size - 1);
}

template <class Engine>
answer send_round(Engine& engine, striker& events, const device_weights& weights, int device,
                  const order& next) {
    answer out;
    weights.fill(next.version);
    out.digest = weights.digest();
    events.arm(next.hit);
    const auto begin = monotonic::now();
    try {
        static_cast<void>(
            engine.send_weights({.version = next.version,
                                 .deadline = deadline::after(std::chrono::seconds{next.budget}),
                                 .tolerate_failed_peers = true}));
    } catch (const std::exception& failed) {
        out.threw = true;
        set_text(out.text, failed.what());
    }
    const auto end = monotonic::now();
    out.seconds = seconds_between(begin, end);
    if (const auto struck = events.disarm()) {
        out.struck = true;
        out.struck_after = struck->second;
        out.since_strike = seconds_between(struck->first, end);
    }
    const auto& report = engine.last_report();
    out.start = report.start.seconds;
    out.update = report.update.seconds;
    out.data = report.data_seconds;
    out.finish = report.finish.seconds;
    out.workers = std::min(report.peers.size(), most_workers);
    for (std::size_t i = 0; i < out.workers; ++i) {
        const auto& from = report.peers[i];
        out.outcomes.at(i).status = from.status;
        out.outcomes.at(i).felt = from.error.context.phase;
        out.outcomes.at(i).names_peer = from.error.context.peer == from.peer;
        set_text(out.outcomes.at(i).text, from.error.message());
    }
    out.usable = is_usable(device);
    out.used = used_gigabytes();
    return out;
}

template <class Tag>
void trainer(const channel& parent, const settings& wanted, bool apart,
             const std::vector<std::string>& urls) {
    const int device = wanted.devices.front();
    enter(device, apart);
    const auto parameters = list_of(wanted.layers);
    const device_weights weights{parameters, device};
    std::vector<named_tensor> tensors;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        tensors.push_back({.name = parameters[i].name, .tensor = weights.views()[i]});
    }
    typename backend_traits<Tag>::init_info info;
    info.device = device;
    if (wanted.nccl && apart) {
        info.packed_buffer_size_bytes = std::uint64_t{256} << 20U;
    }
    striker events;
    auto engine =
        trainer_init(info, fan_out_sync_client{http_sync_clients(urls)}, span_source{tensors},
                     trainer_options{.init_budget = std::chrono::seconds{25},
                                     .rejoin_budget = std::chrono::seconds{wanted.nccl ? 2 : 6}},
                     single_rank{}, events);
    events.be_quiet();
    parent.put(true);
    for (;;) {
        const auto next = parent.take<order>();
        if (next.end) {
            engine.close(deadline::after(std::chrono::seconds{5}));
            parent.put(true);
            return;
        }
        parent.put(send_round(engine, events, weights, device, next));
    }
}

// --- The process that forks them all. It never touches CUDA, and has one thread.

/// Ends the program when a step takes too long; its children then end by themselves.
class watchdog {
public:
    watchdog() { ::signal(SIGALRM, bark); }
    /// Of what is done from now on.
    void step(const std::string& what) {
        const auto length = what.copy(step_.data(), step_.size() - 1);
        step_[length] = '\0';
        ::alarm(static_cast<unsigned int>(std::clamp(left(), 1, most_of_a_step)));
    }
    [[nodiscard]] int left() const { return whole_time - static_cast<int>(seconds_since(begin_)); }

private:
    static void bark(int /*signal*/) {
        say("killed_worker: too long: ");
        say(step_.data());
        say("\n");
        ::_exit(3);
    }
    static void say(const char* text) {
        std::size_t length = 0;
        while (text[length] != '\0') {
            ++length;
        }
        [[maybe_unused]] const auto written = ::write(STDOUT_FILENO, text, length);
    }
    static inline std::array<char, 128> step_{};
    monotonic::time_point begin_ = monotonic::now();
};

/// What was not as asked.
class complaints {
public:
    void begin(std::string name) { case_ = std::move(name); }
    void require(bool holds, const std::string& what) {
        if (!holds) {
            list_.push_back(case_ + ": " + what);
            fmt::print("    NOT AS ASKED: {}\n", what);
        }
    }
    [[nodiscard]] const std::vector<std::string>& list() const noexcept { return list_; }

private:
    std::string case_{};
    std::vector<std::string> list_{};
};

template <class Body>
std::unique_ptr<tests::forked> fork_child(Body body) {
    std::fflush(stdout);  // a child has a copy of what is not yet written
    return std::make_unique<tests::forked>(ipc_pair::told([body](const channel& parent) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(parent);
    }));
}

/// A moment at which a worker is struck.
struct moment {
    std::string_view name;
    phase at;
    double fraction;  ///< of the data, or of the phase
    int signal;
};
constexpr std::array moments{moment{"killed, data 0.5", phase::update, 0.5, SIGKILL},
                             moment{"killed, data 0.1", phase::update, 0.1, SIGKILL},
                             moment{"killed, data 0.9", phase::update, 0.9, SIGKILL},
                             moment{"stopped, data 0.5", phase::update, 0.5, SIGSTOP},
                             moment{"killed, start", phase::start, 0.5, SIGKILL},
                             moment{"killed, finish", phase::finish, 0.5, SIGKILL}};

/// A trainer and its workers, of which the first is the one that is struck.
template <class Tag>
class scene {
    static constexpr bool others_go_on = backend_traits<Tag>::capabilities.drops_peers;

    struct place {
        std::vector<int> devices{};
        std::uint16_t port = 0;
        weight_version version = 0;  ///< that it should serve; 0: a fresh one
        std::unique_ptr<tests::forked> process{};
    };

public:
    /// @param workers the devices of each one's ranks.
    scene(const settings& wanted, const std::vector<std::vector<int>>& workers, watchdog& watch,
          complaints& wrong)
        : wanted_{wanted}, watch_{watch}, wrong_{wrong} {
        std::vector<int> used{wanted.devices.front()};
        for (const auto& devices : workers) {
            used.insert(used.end(), devices.begin(), devices.end());
            places_.push_back({.devices = devices});
        }
        apart_ = wanted.nccl && has_twice(used);
        watch_.step("workers start");
        for (auto& each : places_) {  // side by side
            begin_worker(each);
        }
        for (auto& each : places_) {
            each.port = each.process->to().template take<std::uint16_t>();
            urls_.push_back(fmt::format("http://127.0.0.1:{}", each.port));
        }
        watch_.step("trainer_init()");
        trainer_ = fork_child(
            [this](const channel& parent) { trainer<Tag>(parent, wanted_, apart_, urls_); });
        static_cast<void>(trainer_->to().template take<bool>());
    }

    /// @returns whether all committed and serve what was sent.
    bool good_round(const char* name) {
        watch_.step(fmt::format("a good round, {}", name));
        const auto told = send({}, good_budget);
        bool good = !told.threw && told.usable && told.workers == places_.size();
        for (std::size_t i = 0; i < places_.size(); ++i) {
            good = good && told.outcomes.at(i).status == peer_status::committed;
        }
        if (good) {
            for (auto& each : places_) {
                good = serves(each, ask(each), version_) && good;
            }
            usual_ = told;
        }
        last_ = told;
        return good;
    }
    [[nodiscard]] const answer& last() const noexcept { return last_; }
    /// What went wrong in the last round, in the trainer's words.
    [[nodiscard]] std::string words() const {
        if (last_.threw) {
            return last_.text.data();
        }
        for (std::size_t i = 0; i < last_.workers; ++i) {
            if (last_.outcomes.at(i).status != peer_status::committed) {
                return last_.outcomes.at(i).text.data();
            }
        }
        return "every worker committed";
    }

    /// @returns whether the scene is whole again, so that another case can follow.
    bool play(const moment& what) {
        for (int attempt = 1; attempt <= attempts; ++attempt) {
            if (!good_rounds()) {
                return false;
            }
            bool hit = false;
            if (!play_once(what, hit)) {
                return false;
            }
            if (hit) {
                return true;
            }
            fmt::print("  {}: came at another moment; attempt {}\n", what.name, attempt);
            if (watch_.left() < enough_for_a_case) {
                break;
            }
        }
        // The start and the finish may be too short for it.
        fmt::print("  {}: could not be placed\n", what.name);
        wrong_.require(what.at != phase::update, "the moment was not hit");
        return true;
    }

    /// Ends all in order.
    void end() {
        watch_.step("the orderly end");
        trainer_->to().put(order{.end = true});
        static_cast<void>(trainer_->to().template take<bool>());
        for (auto& each : places_) {
            each.process->to().put(false);
            static_cast<void>(each.process->to().template take<bool>());
        }
    }

private:
    void begin_worker(place& one) {
        one.version = 0;
        one.process = fork_child([wanted = wanted_, devices = one.devices, apart = apart_,
                                  port = one.port](const channel& parent) {
            worker<Tag>(parent, wanted, devices, apart, port);
        });
    }
    /// The dead one's port is taken again.
    void restart(place& one) {
        one.process.reset();
        begin_worker(one);
        const auto port = one.process->to().template take<std::uint16_t>();
        if (port != one.port) {
            throw std::runtime_error{"the fresh worker has another port"};
        }
    }

    answer send(const strike& hit, int budget) {
        ++version_;
        trainer_->to().put(order{.version = version_, .budget = budget, .hit = hit});
        auto told = trainer_->to().template take<answer>();
        digests_[version_] = told.digest;
        for (std::size_t i = 0; i < told.workers; ++i) {
            if (told.outcomes.at(i).status == peer_status::committed) {
                places_.at(i).version = version_;
            }
        }
        return told;
    }
    all_served ask(place& one) {
        one.process->to().put(true);
        return one.process->to().template take<all_served>();
    }
    /// Whether all ranks serve `version`, every tensor of it.
    bool serves(const place& one, const all_served& seen, weight_version version) const {
        const auto expected = digests_.find(version);
        bool whole = seen.count == one.devices.size() && expected != digests_.end();
        for (std::size_t rank = 0; rank < seen.count; ++rank) {
            const auto& each = seen.ranks.at(rank);
            whole =
                whole && !each.dirty && each.version == version && each.digest == expected->second;
        }
        return whole;
    }
    static std::span<const served> ranks_of(const all_served& seen) {
        return std::span{seen.ranks}.first(seen.count);
    }
    static bool says_dirty(const all_served& seen) {
        return std::ranges::all_of(ranks_of(seen), &served::dirty);
    }
    static bool is_usable_for(const all_served& seen) {
        return std::ranges::all_of(ranks_of(seen), &served::usable);
    }
    /// A word for what is served after a round that found `before` there.
    std::string word_for(const place& one, const all_served& seen, weight_version before) const {
        return says_dirty(seen)              ? "dirty"
               : serves(one, seen, version_) ? "new, whole"
               : serves(one, seen, before)   ? "old, whole"
                                             : "NEITHER";
    }

    bool good_rounds() {
        for (int round = 0; round < wanted_.rounds; ++round) {
            if (!good_round("before a fault")) {
                wrong_.require(false,
                               fmt::format("a round without a fault was not good: {}", words()));
                return false;
            }
        }
        return true;
    }

    [[nodiscard]] double delay_of(const moment& what) const {
        switch (what.at) {
            case phase::start: return usual_.start * what.fraction;
            case phase::finish: return usual_.finish * what.fraction;
            default:  // what comes before the data in its phase takes what it usually does
                return std::max(0.0, usual_.update - usual_.data) + usual_.data * what.fraction;
        }
    }

    /// Whether the signal came in the phase that was meant, as far as the trainer can tell.
    [[nodiscard]] static bool was_hit(const moment& what, const answer& told) {
        const auto felt = told.outcomes.front().felt;
        switch (what.at) {
            case phase::start: return felt == phase::start || told.struck_after <= told.start;
            case phase::finish: return told.since_strike > 0;
            default: return felt == what.at;
        }
    }

    /// @param hit set to whether the moment was as meant.
    /// @returns whether the scene is whole again.
    bool play_once(const moment& what, bool& hit) {
        const bool stops = what.signal == SIGSTOP;
        const int budget = stops ? stopped_budget : killed_budget;
        auto& victim = places_.front();
        std::vector<weight_version> before;
        for (const auto& each : places_) {
            before.push_back(each.version);
        }
        watch_.step(fmt::format("{}: the trainer's round", what.name));
        const auto told = send({.at = what.at,
                                .after = delay_of(what),
                                .signal = what.signal,
                                .process = victim.process->process()},
                               budget);
        last_ = told;
        if (!told.struck) {
            return true;
        }
        const auto& its = told.outcomes.front();
        hit = was_hit(what, told);
        fmt::print("{:<18} {:>9.2f} {:>9.3f} {:>9.3f}  {:<9} {:<10} {:<8}\n", what.name,
                   told.struck_after * 1e3, told.since_strike, told.seconds,
                   told.threw ? "threw" : "reported", to_string(its.status), to_string(its.felt));
        fmt::print("    {}\n", words());
        wrong_.require(told.seconds < budget + 2,
                       fmt::format("the call took {:.1f} s of {}", told.seconds, budget));
        wrong_.require(what.at == phase::finish || its.status != peer_status::committed,
                       "the trainer took the round as committed");
        wrong_.require(its.status == peer_status::committed || its.names_peer,
                       "the error does not name the worker");
        wrong_.require(told.usable, "the trainer's device is not usable");
        check_others(told, before);
        if (stops) {
            resume(victim, before.front());
        } else {
            watch_.step(fmt::format("{}: a fresh worker", what.name));
            const auto begin = monotonic::now();
            restart(victim);
            fmt::print("    a fresh worker on port {} after {:.2f} s\n", victim.port,
                       seconds_since(begin));
        }
        return recover(what, its.status == peer_status::committed);
    }

    void check_others(const answer& told, const std::vector<weight_version>& before) {
        for (std::size_t i = 1; i < places_.size(); ++i) {
            const auto status = told.outcomes.at(i).status;
            const auto seen = ask(places_[i]);
            const auto word = word_for(places_[i], seen, before[i]);
            fmt::print("    worker {} on device {}: {}, serves {}\n", i + 1,
                       places_[i].devices.front(), to_string(status), word);
            wrong_.require(!others_go_on || status == peer_status::committed,
                           fmt::format("worker {} did not commit: {}", i + 1,
                                       told.outcomes.at(i).text.data()));
            const bool kept =
                word == "old, whole" || (word == "dirty" && wanted_.mode == commit_mode::in_place);
            const bool as_told = status == peer_status::committed ? word == "new, whole"
                                 : status == peer_status::unknown ? kept || word == "new, whole"
                                                                  : kept;
            wrong_.require(as_told, fmt::format("worker {} serves {}", i + 1, word));
            wrong_.require(is_usable_for(seen),
                           fmt::format("the device of worker {} is not usable", i + 1));
        }
    }

    /// The stopped one goes on: at once, and after it has had the time to go wrong.
    void resume(place& victim, weight_version before) {
        watch_.step("the resumed worker");
        victim.process->resume();
        for (const auto pause : {std::chrono::milliseconds{0}, std::chrono::milliseconds{1500}}) {
            std::this_thread::sleep_for(pause);
            const auto seen = ask(victim);
            const auto word = word_for(victim, seen, before);
            fmt::print("    resumed, {} ms later: serves {}\n", pause.count(), word);
            wrong_.require(
                word == "old, whole" || (word == "dirty" && wanted_.mode == commit_mode::in_place),
                fmt::format("the resumed worker serves {}", word));
            wrong_.require(is_usable_for(seen), "the device of the resumed worker is not usable");
        }
    }

    /// @param unseen the trainer does not know of the loss yet: it costs one more round.
    bool recover(const moment& what, bool unseen) {
        for (int round = 1; round <= 3; ++round) {
            if (good_round(what.name.data())) {
                fmt::print(
                    "    next send_weights(){}: all committed in {:.2f} s, digests equal; {:.1f} "
                    "GB of the trainer's device in use\n",
                    round == 1 ? "" : fmt::format(", number {}", round), last_.seconds, last_.used);
                return true;
            }
            fmt::print("    next send_weights(): {:.2f} s: {}\n", last_.seconds, words());
            wrong_.require(unseen && round == 1,
                           fmt::format("the next round was not good: {}", words()));
        }
        return false;
    }

    settings wanted_;
    watchdog& watch_;
    complaints& wrong_;
    bool apart_ = false;
    std::vector<place> places_{};
    std::vector<std::string> urls_{};
    std::unique_ptr<tests::forked> trainer_{};
    weight_version version_ = 0;
    std::map<weight_version, std::uint64_t> digests_{};
    answer usual_{};
    answer last_{};
};

template <class Tag>
void play_all(const settings& wanted, watchdog& watch, complaints& wrong) {
    std::vector<std::vector<int>> workers;
    for (std::size_t i = 1; i < wanted.devices.size(); ++i) {
        workers.push_back({wanted.devices[i]});
    }
    if (!wanted.nccl && workers.size() == 1) {
        workers.push_back({wanted.devices.front()});
    }
    wrong.begin("begin");
    scene<Tag> all{wanted, workers, watch, wrong};
    for (int round = 0; round < wanted.rounds; ++round) {
        const bool good = all.good_round("at first");
        const auto& told = all.last();
        fmt::print(
            "good round {}: {:.1f} ms (start {:.2f}, update {:.2f} with data {:.2f}, finish "
            "{:.2f}), digests {}\n",
            round + 1, told.seconds * 1e3, told.start * 1e3, told.update * 1e3, told.data * 1e3,
            told.finish * 1e3, good ? "equal" : "DIFFER");
        wrong.require(good, fmt::format("round {} was not good: {}", round + 1, all.words()));
        if (!good) {
            return;
        }
    }
    fmt::print("{:<18} {:>9} {:>9} {:>9}  {:<9} {:<10} {:<8}\n", "case", "struck ms", "ended s",
               "call s", "trainer", "worker", "phase");
    for (const auto& each : moments) {
        if (each.name.find(wanted.only) == std::string_view::npos) {
            continue;
        }
        wrong.begin(std::string{each.name});
        if (watch.left() < enough_for_a_case) {
            wrong.require(false, "no time was left for it");
        } else if (!all.play(each)) {
            wrong.require(false, "nothing more can be tried");
            return;
        }
    }
    wrong.begin("end");
    all.end();
}

/// A rank on each of two devices in one worker process; the trainer on a third, or on the first as
/// another host.
void play_two_ranks(settings wanted, watchdog& watch, complaints& wrong) {
    const auto devices = std::exchange(wanted.devices, {});
    const bool third = devices.size() > 2;
    wanted.devices = {devices.front()};
    wanted.layers = third ? wanted.layers : std::min<std::int64_t>(wanted.layers, 1);
    const std::vector<int> ranks{third ? devices[1] : devices[0], third ? devices[2] : devices[1]};
    wrong.begin("two ranks");
    if (watch.left() < enough_for_a_case) {
        wrong.require(false, "no time was left for it");
        return;
    }
    scene<nccl::backend> all{wanted, {ranks}, watch, wrong};
    for (int round = 1; round <= 2; ++round) {
        const bool good = all.good_round("two ranks");
        fmt::print(
            "one worker process with ranks on devices {} and {}, {} layers: round {}: {:.1f} ms, "
            "digests of both ranks {}\n",
            ranks[0], ranks[1], wanted.layers, round, all.last().seconds * 1e3,
            good ? "equal" : "DIFFER");
        wrong.require(good, all.words());
    }
    all.end();
}

// --- What is asked for.

std::vector<int> read_devices(const std::string& text) {
    std::vector<int> devices;
    for (std::size_t at = 0; at < text.size();) {
        const auto end = std::min(text.find(',', at), text.size());
        devices.push_back(std::stoi(text.substr(at, end - at)));
        at = end + 1;
    }
    return devices;
}

bool read(settings& wanted, std::string_view key, const std::string& value) {
    if (key == "--backend" && (value == "nccl" || value == "cuda_ipc")) {
        wanted.nccl = value == "nccl";
    } else if (key == "--devices") {
        wanted.devices = read_devices(value);
    } else if (key == "--layers") {
        wanted.layers = std::max(0LL, std::stoll(value));
    } else if (key == "--rounds") {
        wanted.rounds = std::max(2, std::stoi(value));
    } else if (key == "--only") {
        wanted.only = value;
    } else if (key == "--mode" && value == "flip") {
        wanted.mode = commit_mode::flip;
    } else if (key == "--mode" && value == "in_place") {
        wanted.mode = commit_mode::in_place;
    } else if (key == "--mode" && value == "copy_in") {
        wanted.mode = commit_mode::copy_in;
    } else {
        return false;
    }
    return true;
}

/// Devices and layers that fit the machine, where none were named.
/// @throws usage_error the named ones are not there.
void complete(settings& wanted, int there) {
    if (wanted.devices.empty()) {
        wanted.devices = {0, there > 1 ? 1 : 0};
    }
    if (wanted.devices.size() < 2 || wanted.devices.size() > most_workers + 1 ||
        std::ranges::any_of(wanted.devices,
                            [&](int device) { return device < 0 || device >= there; })) {
        throw usage_error{
            fmt::format("--devices names two to {} of the {} devices", most_workers + 1, there)};
    }
    if (wanted.layers < 0) {
        const bool shared = has_twice(wanted.devices);
        wanted.layers = !shared ? 24 : wanted.nccl ? 1 : 12;
    }
}

}  // namespace

int main(int argc, char** argv) try {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // the children's too
    ::signal(SIGPIPE, SIG_IGN);
    watchdog watch;
    settings wanted;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 >= argc || !read(wanted, argv[i], argv[i + 1])) {
            fmt::print(stderr, "killed_worker: what is {}?\n", argv[i]);
            return 2;
        }
    }
    watch.step("the look at the devices");
    const int there = wanted.nccl ? nccl_pair::usable_devices() : ipc_pair::usable_devices();
    if (there < 1) {
        fmt::print("SKIP: no CUDA device{}\n", wanted.nccl ? ", or no libnccl" : "");
        return 77;
    }
    complete(wanted, there);
    const auto parameters = list_of(wanted.layers);
    fmt::print(
        "{}, {}: trainer on device {}, the struck worker on device {}, of {}; {} layers, {} "
        "tensors, {:.1f} GB\n",
        wanted.nccl ? "nccl" : "cuda_ipc", to_string(wanted.mode), wanted.devices[0],
        wanted.devices[1], there, wanted.layers, parameters.size(),
        static_cast<double>(parameters.total_bytes()) * 1e-9);
    complaints wrong;
    try {
        if (wanted.nccl) {
            play_all<nccl::backend>(wanted, watch, wrong);
            if (wanted.devices[0] != wanted.devices[1] &&
                std::string_view{"two ranks"}.find(wanted.only) != std::string_view::npos) {
                play_two_ranks(wanted, watch, wrong);
            }
        } else {
            play_all<cuda_ipc::backend>(wanted, watch, wrong);
        }
    } catch (const std::exception& failed) {
        wrong.require(false, failed.what());
    }
    if (wrong.list().empty()) {
        fmt::print("{} s\nall as asked\n", whole_time - watch.left());
        return 0;
    }
    fmt::print("not as asked:\n");
    for (const auto& each : wrong.list()) {
        fmt::print("  {}\n", each);
    }
    return 1;
} catch (const std::exception& failed) {
    fmt::print(stderr, "killed_worker: {}\n", failed.what());
    return 1;
}
