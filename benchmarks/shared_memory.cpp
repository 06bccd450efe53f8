// SPDX-License-Identifier: Apache-2.0
//
// How fast do weights travel through shared memory, measured against one memcpy of the same bytes
// between the same mappings? Trainer and workers are processes; control goes through pipes. The
// ways take turns within each round, so that what else the machine does hits all of them alike.
// Every worker digests every tensor after every transfer; the weights change before each.

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/fabrics/shared_memory_arena.hpp>
#include <weightwire/plan/coverage.hpp>

#include "support/machine.hpp"
#include "support/parameter_lists.hpp"

namespace {

using namespace std::chrono_literals;
using weightwire::deadline;
using weightwire::manifest;
namespace ipc = weightwire::ipc;
namespace shm = weightwire::shm;

/// One way of moving the weights.
struct way {
    std::string_view name;
    ipc::trainer_init_info info{};
    bool shared_source = false;  ///< the source lies in shared memory and is stable
    bool plain_memcpy = false;   ///< no transfer at all: what the others are compared with
    int workers = 1;
    int compared_with = 0;  ///< index of the memcpy with as many workers
    double floor = 0;       ///< ratio to reach, 0: for information
};

constexpr std::uint64_t packed_bytes = std::uint64_t{288} << 20U;  // the embedding has 260 MiB

std::vector<way> ways() {
    const ipc::trainer_init_info packed{.packed = true, .packed_buffer_size_bytes = packed_bytes};
    return {
        {.name = "memcpy, 1 thread", .shared_source = true, .plain_memcpy = true},
        {.name = "per tensor, source shared, 1 worker", .shared_source = true, .floor = 1.0},
        {.name = "per tensor, through a window, 1 worker"},
        {.name = "packed, 1 worker", .info = packed, .floor = 0.6},
        {.name = "memcpy, 2 processes at once",
         .shared_source = true,
         .plain_memcpy = true,
         .workers = 2,
         .compared_with = 4},
        {.name = "per tensor, source shared, 2 workers",
         .shared_source = true,
         .workers = 2,
         .compared_with = 4,
         .floor = 0.9},
        {.name = "per tensor, through a window, 2 workers", .workers = 2, .compared_with = 4},
        {.name = "packed, 2 workers", .info = packed, .workers = 2, .compared_with = 4},
    };
}

/// What a worker is asked, and what it answers.
struct order {
    std::uint64_t round = 0;
    int way = 0;
};
struct answer {
    std::int64_t began_ns = 0;
    std::int64_t ended_ns = 0;
    std::uint64_t digest = 0;  ///< of all tensors' digests
};

std::int64_t now_ns() { return weightwire::detail::monotonic_ns(); }

template <class T>
void put(int file, const T& value) {
    if (::write(file, &value, sizeof value) != sizeof value) {
        throw std::runtime_error{"a pipe broke"};
    }
}
template <class T>
T take(int file) {
    T value{};
    auto* at = reinterpret_cast<char*>(&value);
    for (std::size_t done = 0; done < sizeof value;) {
        const auto count = ::read(file, at + done, sizeof value - done);
        if (count <= 0) {
            throw std::runtime_error{"a process ended early"};
        }
        done += static_cast<std::size_t>(count);
    }
    return value;
}

/// Tensors one after another in one block, and the digest over all of them.
struct block {
    std::vector<weightwire::mutable_tensor_view> tensors;
    std::byte* data = nullptr;
    std::size_t bytes = 0;

    block(shm::arena& memory, const manifest& parameters) {
        for (const auto& parameter : parameters.parameters()) {
            tensors.push_back(memory.allocate(parameter.dtype, parameter.shape));
        }
        data = tensors.front().data();
        bytes = memory.used();
    }
    [[nodiscard]] std::uint64_t digest() const {
        std::vector<std::uint64_t> each;
        for (const auto& tensor : tensors) {
            each.push_back(weightwire::digest(tensor.bytes()));
        }
        return weightwire::digest(std::as_bytes(std::span{each}));
    }
};

/// The worker's destinations, with strict coverage.
struct session {
    const std::vector<weightwire::mutable_tensor_view>& tensors;
    weightwire::coverage written;

    weightwire::mutable_tensor_view open(std::size_t i, deadline) const { return tensors[i]; }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline) {
        written.wrote(i, offset, count);
    }
};

struct worker_process {
    pid_t pid = 0;
    int orders = -1;
    int answers = -1;
};

struct init_texts {
    std::string wire;
    std::string transport;
};

/// Serves orders until the pipe closes.
void work(int rank, const manifest& parameters, const std::vector<way>& all,
          const std::vector<init_texts>& inits, const block& source, int orders, int answers) {
    shm::arena memory{shm::arena::bytes_for(parameters)};
    const block target{memory, parameters};
    std::vector<std::unique_ptr<ipc::receiver>> receivers;
    for (std::size_t i = 0; i < all.size(); ++i) {
        receivers.push_back(
            std::make_unique<ipc::receiver>(weightwire::receiver_context{.global_rank = rank}));
        if (!all[i].plain_memcpy && rank <= all[i].workers) {
            receivers[i]->open({.wire_parameters = inits[i].wire,
                                .transport = inits[i].transport,
                                .parameters = &parameters},
                               deadline::after(60s), {});
        }
    }
    put(answers, answer{});
    for (;;) {
        const auto next = take<order>(orders);
        session places{target.tensors, weightwire::coverage{parameters}};
        weightwire::update_target to{places, parameters, 0, parameters.size()};
        answer reply{.began_ns = now_ns()};
        if (all[static_cast<std::size_t>(next.way)].plain_memcpy) {
            std::memcpy(target.data, source.data, source.bytes);
        } else {
            receivers[static_cast<std::size_t>(next.way)]->receive(
                {.round = next.round, .native = true}, to, deadline::after(60s), {});
            places.written.require_all();
        }
        reply.ended_ns = now_ns();
        reply.digest = target.digest();
        put(answers, reply);
    }
}

template <class Work>
worker_process start(Work work_of) {
    std::array<int, 2> down{};
    std::array<int, 2> up{};
    if (::pipe(down.data()) != 0 || ::pipe(up.data()) != 0) {
        throw std::runtime_error{"no pipes"};
    }
    const auto pid = ::fork();
    if (pid == 0) {
        ::close(down[1]);
        ::close(up[0]);
        try {
            work_of(down[0], up[1]);
        } catch (const std::exception& failed) {
            fmt::print(stderr, "worker: {}\n", failed.what());
        }
        ::_exit(0);
    }
    ::close(down[0]);
    ::close(up[1]);
    return {.pid = pid, .orders = down[1], .answers = up[0]};
}

/// Words that depend on the round and on where they are. Both copies of the source get them.
void fill(block& one, block& other, std::uint64_t round) {
    for (std::size_t i = 0; i < one.bytes / 8; ++i) {
        const auto word = weightwire::detail::digest_term(round, (i + 1) * 0x9E3779B97F4A7C15U);
        std::memcpy(one.data + 8 * i, &word, 8);
        std::memcpy(other.data + 8 * i, &word, 8);
    }
}

struct source {
    static constexpr auto lifetime = weightwire::tensor_lifetime::until_next;
    const manifest& parameters;
    const block& where;
    [[nodiscard]] std::span<const weightwire::param_meta> metadata() const {
        return parameters.parameters();
    }
    [[nodiscard]] auto weights() const {
        return std::views::iota(std::size_t{0}, parameters.size()) |
               std::views::transform([this](std::size_t i) {
                   return weightwire::named_tensor{.name = parameters[i].name,
                                                   .tensor = where.tensors[i]};
               });
    }
};

class bench {
public:
    bench() : parameters_{benchmarks::half_billion_list()} {
        std::vector<weightwire::peer_info> peers{
            {.name = "worker 1", .rank_offset = 1, .native = true},
            {.name = "worker 2", .rank_offset = 2, .native = true}};
        const std::vector<weightwire::tensor_view> stable{shared_.tensors.begin(),
                                                          shared_.tensors.end()};
        for (const auto& each : ways_) {
            senders_.push_back(std::make_unique<ipc::sender>(each.info));
            const auto workers = static_cast<std::size_t>(each.workers);
            if (each.plain_memcpy) {
                inits_.emplace_back();
                continue;
            }
            const auto made = senders_.back()->prepare(
                {.parameters = parameters_,
                 .peers = std::span{peers}.first(workers),
                 .world_size = 1 + each.workers,
                 .lifetime = each.shared_source ? weightwire::tensor_lifetime::stable
                                                : weightwire::tensor_lifetime::until_next,
                 .stable_tensors = each.shared_source
                                       ? std::span<const weightwire::tensor_view>{stable}
                                       : std::span<const weightwire::tensor_view>{}});
            inits_.push_back({each.info.init_message(), made.front().native});
            fmt::print("{}\n  {}\n", each.name, senders_.back()->description());
        }
        for (int rank = 1; rank <= 2; ++rank) {
            workers_.push_back(start([&](int orders, int answers) {
                work(rank, parameters_, ways_, inits_, shared_, orders, answers);
            }));
        }
        for (const auto& worker : workers_) {
            take<answer>(worker.answers);
        }
    }
    bench(const bench&) = delete;
    bench& operator=(const bench&) = delete;
    ~bench() {
        for (const auto& worker : workers_) {
            ::kill(worker.pid, SIGKILL);
            ::waitpid(worker.pid, nullptr, 0);
        }
    }

    /// One transfer; seconds from the first worker's begin to the last one's end.
    double transfer(std::size_t index) {
        const auto& how = ways_[index];
        fill(shared_, private_, ++round_);
        const auto workers = std::span{workers_}.first(static_cast<std::size_t>(how.workers));
        for (const auto& worker : workers) {
            put(worker.orders, order{.round = round_, .way = static_cast<int>(index)});
        }
        if (!how.plain_memcpy) {
            source from{parameters_, how.shared_source ? shared_ : private_};
            weightwire::round_of<source> round{from, parameters_};
            auto stream = round.stream();
            senders_[index]->send(round_, 0, stream, deadline::after(60s), {});
        }
        auto began = std::numeric_limits<std::int64_t>::max();
        std::int64_t ended = 0;
        const auto wanted = shared_.digest();
        for (const auto& worker : workers) {
            const auto reply = take<answer>(worker.answers);
            began = std::min(began, reply.began_ns);
            ended = std::max(ended, reply.ended_ns);
            if (reply.digest != wanted) {
                throw std::runtime_error{"a worker has other bytes than were sent: " +
                                         std::string{how.name}};
            }
        }
        return static_cast<double>(ended - began) * 1e-9;
    }

    [[nodiscard]] const std::vector<way>& all() const { return ways_; }
    [[nodiscard]] const manifest& parameters() const { return parameters_; }

private:
    manifest parameters_;
    std::vector<way> ways_ = ways();
    shm::arena shared_memory_{shm::arena::bytes_for(parameters_)};
    shm::arena private_memory_{shm::arena::bytes_for(parameters_)};  // not shown to the workers
    block shared_{shared_memory_, parameters_};
    block private_{private_memory_, parameters_};
    std::vector<std::unique_ptr<ipc::sender>> senders_;
    std::vector<init_texts> inits_;
    std::vector<worker_process> workers_;
    std::uint64_t round_ = 0;
};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const auto half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace

int main(int argc, char** argv) try {
    const std::size_t counted = argc > 1 ? std::stoul(argv[1]) : 10;
    constexpr std::size_t warm_ups = 3;
    fmt::print("command: benchmarks/shared_memory {}\nmachine: {}\n\n", counted,
               benchmarks::machine());
    bench run;
    std::vector<std::vector<double>> seconds(run.all().size());
    for (std::size_t i = 0; i < warm_ups + counted; ++i) {
        for (std::size_t k = 0; k < seconds.size(); ++k) {
            const auto took = run.transfer(k);
            if (i >= warm_ups) {
                seconds[k].push_back(took);
            }
        }
    }
    const auto bytes = static_cast<double>(run.parameters().total_bytes());
    fmt::print("\n{} tensors, {:.3f} GB, median of {} after {}, every byte checked\n\n",
               run.parameters().size(), bytes * 1e-9, counted, warm_ups);
    fmt::print("{:<42} {:>8} {:>8} {:>8} {:>8}\n", "", "ms", "GB/s", "ratio", "floor");
    bool reached = true;
    for (std::size_t k = 0; k < seconds.size(); ++k) {
        const auto& how = run.all()[k];
        const auto took = median(seconds[k]);
        const auto ratio = median(seconds[static_cast<std::size_t>(how.compared_with)]) / took;
        fmt::print("{:<42} {:>8.1f} {:>8.1f} {:>8.2f} {:>8}\n", how.name, took * 1e3,
                   bytes * how.workers / took * 1e-9, ratio,
                   how.floor == 0 ? "" : fmt::format("{:.1f}", how.floor));
        reached = reached && ratio >= how.floor;
    }
    fmt::print("\n{}\n", reached ? "every floor is reached" : "A FLOOR IS NOT REACHED");
    return 0;
} catch (const std::exception& failed) {
    fmt::print(stderr, "shared_memory: {}\n", failed.what());
    return 1;
}
