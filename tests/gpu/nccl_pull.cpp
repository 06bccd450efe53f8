// SPDX-License-Identifier: Apache-2.0
//
// `sharded_pull` over NCCL's sends and receives, on GPUs, part by part:
//
//   pair     two processes and a communicator of 1, 2 and 4 channels: how long it takes to join,
//            what device memory it costs, what rate a plain ncclSend and ncclRecv make
//   fabric   an owner and a reader: every byte compared, the rate beside that of a plain pair of
//            the same bytes in the same processes, and what the fabric says of its memory
//   fault    a reader killed, a reader stopped, an owner killed, an owner stopped, each in the
//            middle of a transfer, beside a reader or an owner that goes on
//   backend  four trainer ranks (PP2 x EP2) to four worker ranks (EP4 x TP4), real names and
//            shapes, rounds over HTTP, every element looked at on the device
//   kill     the same, a worker killed in the middle of a round, and back
//
//   nccl_pull [--only PART[,PART]] [--devices 1|2] [--layers N] [--rounds N] [--chunk MiB]
//             [--staging MiB] [--ranks 1|2|4] [--verbose]
//
// Started by hand. --devices 2: trainers on device 0, workers on device 1. With one, each process
// gets an NCCL_HOSTID of its own and they speak through loopback sockets. The library is
// WEIGHTWIRE_LIBNCCL's, else the one that is found. Ends with 77 where there is no GPU.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/cuda_ipc/cuda_machinery.hpp>
#include <weightwire/fabrics/nccl/pull_fabric.hpp>
#include <weightwire/gpu/memory.hpp>

#include "../../benchmarks/support/device_kit.hpp"
#include "../../benchmarks/support/pull_rounds.hpp"
#include "../support/device_allocations.hpp"
#include "../support/forked.hpp"
#include "ipc_pair.hpp"
#include "nccl_pair.hpp"

namespace {

using namespace weightwire;
using namespace std::chrono_literals;
using tests::channel;
using tests::forked;
using clock_type = std::chrono::steady_clock;

bool one_device = true;
bool verbose = false;

double seconds_since(clock_type::time_point begin) {
    return std::chrono::duration<double>(clock_type::now() - begin).count();
}
deadline in_time() { return deadline::after(15s); }

/// The machinery, which says each step with --verbose.
class told_pairs : public nccl::cuda_pairs {
public:
    class pair {
    public:
        pair() noexcept = default;
        pair(nccl::cuda_pairs::pair&& made, nccl::pair_end end)
            : inner_{std::move(made)}, end_{end} {
            say("begun");
        }
        [[nodiscard]] bool ready() {
            const bool is = inner_.ready();
            tell(is, "ready", ready_);
            return is;
        }
        void post(std::span<const nccl::pair_piece> pieces, nccl::pair_end end) {
            say("posts");
            ready_ = reached_ = false;
            inner_.post(pieces, end);
            say("has posted");
        }
        [[nodiscard]] bool reached() {
            const bool is = inner_.reached();
            tell(is, "reached", reached_);
            return is;
        }
        [[nodiscard]] nccl::cuda_pairs::ending end() && noexcept { return std::move(inner_).end(); }

    private:
        void say(const char* what) const {
            if (verbose) {
                fmt::print(
                    "    [{:.3f}] process {} {} {}\n",
                    std::chrono::duration<double>(clock_type::now().time_since_epoch()).count(),
                    ::getpid(), end_ == nccl::pair_end::owner ? "owner" : "reader", what);
            }
        }
        void tell(bool is, const char* what, bool& said) const {
            if (is && !std::exchange(said, true)) {
                say(what);
            }
        }
        nccl::cuda_pairs::pair inner_;
        nccl::pair_end end_{};
        bool ready_ = false;
        bool reached_ = false;
    };
    using nccl::cuda_pairs::cuda_pairs;
    [[nodiscard]] pair begin(const wire::unique_id& id, nccl::pair_end end, int channels) const {
        return {nccl::cuda_pairs::begin(id, end, channels), end};
    }
};
/// `nccl::pull_fabric` with that machinery.
using fabric = nccl::basic_pull_fabric<told_pairs>;

std::uint64_t free_bytes() {
    std::size_t free = 0;
    std::size_t total = 0;
    gpu::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
}
std::int64_t megabytes_lost(std::uint64_t before) {
    return (static_cast<std::int64_t>(before) - static_cast<std::int64_t>(free_bytes())) /
           1'000'000;
}

/// A text in a pipe.
struct short_text {
    std::array<char, 1500> letters{};
    explicit short_text(std::string_view text = {}) {
        std::ranges::copy(text.substr(0, letters.size() - 1), letters.begin());
    }
    [[nodiscard]] std::string string() const { return letters.data(); }
};

/// A process that says what it throws, and what it was doing. `rank` chooses its device.
template <class Body>
std::unique_ptr<forked> process(std::string name, int rank, Body body) {
    std::fflush(stdout);
    return std::make_unique<forked>([name, rank, body](channel& parent) {
        std::setvbuf(stdout, nullptr, _IOLBF, 0);
        try {
            body(parent, nccl_pair::choose_device(rank, one_device));
        } catch (const std::exception& failed) {
            fmt::print("  {} FAILS: {}\n", name, failed.what());
            std::fflush(stdout);
            ::_exit(1);
        }
        std::fflush(stdout);
    });
}

int wrong = 0;
void expect(bool good, std::string_view what) {
    fmt::print("  {}: {}\n", what, good ? "yes" : "NO");
    wrong += good ? 0 : 1;
}

std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed) {
    std::mt19937_64 random{seed};
    std::vector<std::byte> made(bytes);
    for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
        const auto word = random();
        std::memcpy(made.data() + i, &word, 8);
    }
    return made;
}

// ---------------------------------------------------------------------------------------- pair

/// A pair that the program drives itself.
class plain_pair {
public:
    plain_pair(int device, nccl::pair_end end, int channels, const wire::unique_id& id)
        : machine_{device}, end_{end}, pair_{machine_.begin(id, end, channels)} {
        until("join", [&] { return pair_.ready(); });
    }
    void move(std::span<const nccl::pair_piece> pieces) {
        pair_.post(pieces, end_);
        until("post", [&] { return pair_.ready(); });
        until("transfer", [&] { return pair_.reached(); });
    }
    void finish() {
        const auto ending = std::move(pair_).end();
        until("abort", [&] { return ending.over(); });
    }

private:
    template <class Step>
    static void until(const char* what, Step step) {
        const auto limit = in_time();
        while (!step()) {
            if (limit.expired()) {
                throw std::runtime_error{std::string{what} + " did not end in its time"};
            }
            std::this_thread::yield();
        }
    }
    nccl::cuda_pairs machine_;
    nccl::pair_end end_;
    nccl::cuda_pairs::pair pair_;
};

constexpr std::size_t piece_count = 4;
constexpr std::size_t piece_bytes = std::size_t{16} << 20U;

std::array<nccl::pair_piece, piece_count> pieces_of(const gpu::device_buffer& all) {
    std::array<nccl::pair_piece, piece_count> made{};
    for (std::size_t i = 0; i < piece_count; ++i) {
        made[i] = {all.data() + i * piece_bytes, piece_bytes};
    }
    return made;
}

void pair_end_of(channel& other, int device, nccl::pair_end end) {
    const bool owner = end == nccl::pair_end::owner;
    const gpu::device_buffer memory{device, piece_count * piece_bytes};
    const auto all = pieces_of(memory);
    nccl::cuda_pairs machine{device};
    machine.load_kernels();
    if (owner) {
        fmt::print("  {}\n", machine.used_library().description());
        const auto bytes = pattern(memory.size(), 1);
        gpu::check(cudaMemcpy(memory.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
                   "cudaMemcpy");
    }
    for (const int channels : {1, 2, 4, 8}) {
        const auto before = free_bytes();
        const auto id = owner ? machine.make_unique_id() : other.take<wire::unique_id>();
        if (owner) {
            other.put(id);
        }
        auto begin = clock_type::now();
        plain_pair pair{device, end, channels, id};
        const auto joined = seconds_since(begin);
        const auto after_join = megabytes_lost(before);
        begin = clock_type::now();
        const nccl::pair_piece small{memory.data(), 65536};
        pair.move({&small, 1});
        const auto first = seconds_since(begin);
        const auto after_first = megabytes_lost(before);
        std::vector<double> taken;
        for (int i = 0; i < 6; ++i) {
            begin = clock_type::now();
            pair.move(all);
            if (i != 0) {
                taken.push_back(seconds_since(begin));
            }
        }
        if (!owner) {
            std::vector<std::byte> got(memory.size());
            gpu::check(cudaMemcpy(got.data(), memory.data(), got.size(), cudaMemcpyDeviceToHost),
                       "cudaMemcpy");
            const bool equal = got == pattern(memory.size(), 1);
            gpu::check(cudaMemset(memory.data(), 0, memory.size()), "cudaMemset");
            gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            other.put(equal);
        } else {
            const bool equal = other.take<bool>();
            fmt::print(
                "  {} channels: join {:.0f} ms, {} MB of the device less; first transfer "
                "{:.0f} ms, {} MB less; {} x {} MiB {:.2f} GB/s; bytes {}\n",
                channels, joined * 1e3, after_join, first * 1e3, after_first, piece_count,
                piece_bytes >> 20U,
                static_cast<double>(memory.size()) / benchmarks::median(taken) * 1e-9,
                equal ? "equal" : "DIFFER");
            wrong += equal ? 0 : 1;
        }
        begin = clock_type::now();
        pair.finish();
        if (owner) {
            fmt::print("    abort {:.0f} ms, after it {} MB less than before the join\n",
                       seconds_since(begin) * 1e3, megabytes_lost(before));
        }
        // Not before both have ended is the next one measured.
        other.put(true);
        static_cast<void>(other.take<bool>());
    }
}

int pair_part() {
    fmt::print("pair: memory is that of the whole device{}\n",
               one_device ? ", which both ranks use: halve it" : "");
    auto both = process("owner", 0, [](channel& parent, int device) {
        // Its own child would have to be forked before the device was used: so the parent relays.
        pair_end_of(parent, device, nccl::pair_end::owner);
        parent.put(wrong);
    });
    auto reader = process("reader", 1, [](channel& parent, int device) {
        pair_end_of(parent, device, nccl::pair_end::reader);
    });
    for (int i = 0; i < 4; ++i) {
        reader->to().put(both->to().take<wire::unique_id>());
        both->to().put(reader->to().take<bool>());  // equal
        const auto from_reader = reader->to().take<bool>();
        const auto from_owner = both->to().take<bool>();
        both->to().put(from_reader);
        reader->to().put(from_owner);
    }
    return both->to().take<int>();
}

// -------------------------------------------------------------------------------------- fabric

constexpr std::size_t chunk_bytes = std::size_t{16} << 20U;
std::size_t chunk_count = 8;  // more between two devices, so that a transfer has a middle
constexpr std::size_t line_bytes = 4096;

/// An owner whose arena holds known bytes.
struct served {
    explicit served(int device, std::uint64_t seed = 1)
        : owner{device}, arena{owner.allocate(chunk_count * chunk_bytes)} {
        const auto bytes = pattern(arena.size(), seed);
        owner.pack(arena.data(), bytes.data(), bytes.size(), 1, bytes.size());
        owner.settle(in_time(), {});
    }
    void tell(const channel& to) const {
        to.put(short_text{owner.address()});
        to.put(short_text{arena.exported().handle});
    }
    fabric::owner owner;
    fabric::arena arena;
};

/// What an owner's process was told to say.
struct told {
    explicit told(const channel& from)
        : address{from.take<short_text>()}, handle{from.take<short_text>()} {}
    void tell(const channel& to) const {
        to.put(address);
        to.put(handle);
    }
    short_text address;
    short_text handle;
};

/// A reader's way to an owner, with a read a chunk that lays lines out two by two changed.
struct way {
    way(fabric::reader& reader, const told& to, int device)
        : connection{reader.connect(to.address.string(), in_time(), {})},
          memory{reader.open(connection, to.handle.string(), chunk_count * chunk_bytes, in_time(),
                             {})},
          landed{device, chunk_count * chunk_bytes} {
        for (std::size_t i = 0; i < chunk_count; ++i) {
            std::vector<remote_run<fabric::memory>> runs;
            for (std::size_t half = 0; half < 2; ++half) {
                runs.push_back({.from = &memory,
                                .offset = i * chunk_bytes + half * line_bytes,
                                .to = landed.data() + i * chunk_bytes + (1 - half) * line_bytes,
                                .bytes = line_bytes,
                                .count = chunk_bytes / line_bytes / 2,
                                .from_step = 2 * line_bytes,
                                .to_step = 2 * line_bytes});
            }
            reads.push_back(reader.prepare(runs));
        }
    }
    void read_all(fabric::reader& reader, deadline until) {
        for (auto& each : reads) {
            reader.start(each, 0);
        }
        for (auto& each : reads) {
            reader.wait(each, until, {});
        }
    }
    void clear() const {
        gpu::check(cudaMemset(landed.data(), 0xEE, landed.size()), "cudaMemset");
        gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    [[nodiscard]] bool is_right(std::uint64_t seed) const {
        std::vector<std::byte> got(landed.size());
        gpu::check(cudaMemcpy(got.data(), landed.data(), got.size(), cudaMemcpyDeviceToHost),
                   "cudaMemcpy");
        const auto all = pattern(landed.size(), seed);
        for (std::size_t line = 0; line < all.size() / line_bytes; ++line) {
            const auto at = line ^ 1U;
            if (std::memcmp(got.data() + at * line_bytes, all.data() + line * line_bytes,
                            line_bytes) != 0) {
                return false;
            }
        }
        return true;
    }
    fabric::connection connection;
    fabric::memory memory;
    gpu::device_buffer landed;
    std::vector<fabric::read> reads;
};

int fabric_part(int rounds) {
    fmt::print("fabric: {} chunks of {} MiB, one owner, one reader\n", chunk_count,
               chunk_bytes >> 20U);
    auto owner = process("owner", 0, [](channel& parent, int device) {
        const served from{device};
        from.tell(parent);
        nccl::cuda_pairs machine{device};
        const auto id = machine.make_unique_id();
        parent.put(id);
        plain_pair plain{device, nccl::pair_end::owner, 4, id};
        const gpu::device_buffer memory{device, chunk_count * chunk_bytes};
        std::vector<nccl::pair_piece> all;
        for (std::size_t i = 0; i < chunk_count; ++i) {
            all.push_back({memory.data() + i * chunk_bytes, chunk_bytes});
        }
        while (parent.take<bool>()) {
            plain.move(all);
        }
        fmt::print("  owner: {}\n", from.owner.remark());
        plain.finish();
        parent.put(true);
    });
    auto reader = process("reader", 1, [=](channel& parent, int device) {
        const told to{parent};
        const auto before = free_bytes();
        fabric::reader mine{device};
        auto begin = clock_type::now();
        way over{mine, to, device};
        fmt::print("  connected and opened in {:.0f} ms; {} MB of the device less; reader: {}\n",
                   seconds_since(begin) * 1e3, megabytes_lost(before), mine.remark());
        plain_pair plain{device, nccl::pair_end::reader, 4, parent.take<wire::unique_id>()};
        const gpu::device_buffer memory{device, chunk_count * chunk_bytes};
        std::vector<nccl::pair_piece> all;
        for (std::size_t i = 0; i < chunk_count; ++i) {
            all.push_back({memory.data() + i * chunk_bytes, chunk_bytes});
        }
        std::vector<double> by_plain;
        std::vector<double> by_fabric;
        bool right = true;
        std::uint64_t allocations = 0;
        for (int i = 0; i < rounds + 1; ++i) {
            parent.put(true);  // the owner begins too
            begin = clock_type::now();
            plain.move(all);
            by_plain.push_back(seconds_since(begin));
            over.clear();
            const auto so_far = weightwire_tests::device_allocations.load();
            begin = clock_type::now();
            over.read_all(mine, in_time());
            by_fabric.push_back(seconds_since(begin));
            allocations += weightwire_tests::device_allocations.load() - so_far;
            right = right && over.is_right(1);
        }
        parent.put(false);
        by_plain.erase(by_plain.begin());
        by_fabric.erase(by_fabric.begin());
        const auto bytes = static_cast<double>(chunk_count * chunk_bytes);
        const auto rate = bytes / benchmarks::median(by_fabric);
        const auto plain_rate = bytes / benchmarks::median(by_plain);
        fmt::print(
            "  plain pair {:.2f} GB/s, fabric {:.2f} GB/s: {:.3f} of it; device "
            "allocations while it read: {}; every byte right in every round: {}\n",
            plain_rate * 1e-9, rate * 1e-9, rate / plain_rate, allocations, right ? "yes" : "NO");
        parent.put(right && allocations == 0);
        plain.finish();
    });
    told{owner->to()}.tell(reader->to());
    reader->to().put(owner->to().take<wire::unique_id>());
    while (reader->to().take<bool>()) {
        owner->to().put(true);
    }
    const bool right = reader->to().take<bool>();
    owner->to().put(false);
    static_cast<void>(owner->to().take<bool>());
    return right ? 0 : 1;
}

// --------------------------------------------------------------------------------------- fault

/// Reads again and again until told to end; says of each round how long it took, or why it failed.
struct round_result {
    double seconds = 0;
    bool right = false;
    bool lost = false;
    short_text why{};
};
std::unique_ptr<forked> reading_process(std::string name) {
    return process(name, 1, [](channel& parent, int device) {
        std::vector<told> owners;
        const int count = parent.take<int>();
        for (int i = 0; i < count; ++i) {
            owners.emplace_back(parent);
        }
        fabric::reader mine{device};
        std::vector<std::unique_ptr<way>> ways;
        for (const auto& each : owners) {
            ways.push_back(std::make_unique<way>(mine, each, device));
        }
        parent.put(true);
        // An order names the owner to read from, and the milliseconds that it may take.
        for (auto next = parent.take<std::array<int, 2>>(); next[0] >= 0;
             next = parent.take<std::array<int, 2>>()) {
            auto& from = *ways[static_cast<std::size_t>(next[0])];
            round_result said;
            from.clear();
            const auto begin = clock_type::now();
            try {
                from.read_all(mine, deadline::after(std::chrono::milliseconds{next[1]}));
                said.seconds = seconds_since(begin);
                said.right = from.is_right(static_cast<std::uint64_t>(next[0]) + 1);
            } catch (const error& failed) {
                for (auto& each : from.reads) {
                    mine.cancel(each);
                }
                said.seconds = seconds_since(begin);
                said.why = short_text{failed.what()};
            }
            said.lost = mine.lost();
            parent.put(said);
        }
    });
}
std::unique_ptr<forked> owning_process(std::string name, std::uint64_t seed) {
    return process(name, 0, [=](channel& parent, int device) {
        const served from{device, seed};
        from.tell(parent);
        while (parent.take<bool>()) {
            parent.put(static_cast<int>(from.owner.pair_count()));
        }
    });
}
void meet(forked& reader, const std::vector<const told*>& owners) {
    reader.to().put(static_cast<int>(owners.size()));
    for (const auto* each : owners) {
        each->tell(reader.to());
    }
    static_cast<void>(reader.to().take<bool>());
}
round_result ask(forked& reader, int owner, int milliseconds = 30'000) {
    reader.to().put(std::array{owner, milliseconds});
    return reader.to().take<round_result>();
}
void await_pairs(forked& owner, int count, std::chrono::seconds limit) {
    const auto begin = clock_type::now();
    int found = -1;
    for (const auto until = deadline::after(limit); found != count && !until.expired();) {
        owner.to().put(true);
        found = owner.to().take<int>();
        std::this_thread::sleep_for(20ms);
    }
    fmt::print("  the owner has {} pairs after {:.2f} s\n", found, seconds_since(begin));
    expect(found == count, fmt::format("and should have {}", count));
}

int fault_part() {
    const int before = wrong;
    for (const int by : {SIGKILL, SIGSTOP}) {
        fmt::print("fault: a reader is {} in the middle of a transfer\n",
                   by == SIGKILL ? "killed" : "stopped");
        auto owner = owning_process("owner", 1);
        auto victim = reading_process("the victim");
        auto other = reading_process("the other reader");
        const told from{owner->to()};
        meet(*victim, {&from});
        meet(*other, {&from});
        const auto healthy = ask(*other, 0);
        fmt::print("  alone {:.3f} s\n", healthy.seconds);
        expect(healthy.right, "a round before it is right");
        victim->to().put(std::array{0, 30'000});
        std::this_thread::sleep_for(std::chrono::duration<double>(healthy.seconds / 2));
        victim->signal(by);
        for (int i = 0; i < 3; ++i) {
            const auto round = ask(*other, 0);
            fmt::print("  the other reader: {:.3f} s {}\n", round.seconds, round.why.string());
            expect(round.right && !round.lost, "it goes on, and is right");
        }
        // The stopped one's transfer may have ended before it was stopped, or while it was: then
        // nothing is wrong with its pair.
        if (by == SIGKILL) {
            await_pairs(*owner, 1, 5s);
        } else {
            victim->signal(SIGCONT);
            const auto late = victim->to().take<round_result>();
            fmt::print("  the stopped one, resumed: {:.3f} s, right {}, {}\n", late.seconds,
                       late.right, late.why.string());
            expect(late.right || !late.why.string().empty(), "it has all, or says why not");
        }
        auto back = reading_process("a new reader");
        meet(*back, {&from});
        const auto again = ask(*back, 0);
        expect(again.right, "a new reader joins and is right");
        victim->kill();
        other->to().put(std::array{-1, 0});
        back->to().put(std::array{-1, 0});
        owner->to().put(false);
        std::this_thread::sleep_for(1s);
    }
    for (const int by : {SIGKILL, SIGSTOP}) {
        fmt::print("fault: an owner is {} in the middle of a transfer\n",
                   by == SIGKILL ? "killed" : "stopped");
        auto victim = owning_process("the victim", 1);
        auto other = owning_process("the other owner", 2);
        auto reader = reading_process("reader");
        const told first{victim->to()};
        const told second{other->to()};
        meet(*reader, {&first, &second});
        const auto healthy = ask(*reader, 0);
        fmt::print("  alone {:.3f} s\n", healthy.seconds);
        expect(healthy.right, "a round before it is right");
        const auto budget = static_cast<int>(healthy.seconds * 1e3 * 3) + 2000;
        reader->to().put(std::array{0, budget});
        std::this_thread::sleep_for(std::chrono::duration<double>(healthy.seconds / 2));
        victim->signal(by);
        const auto round = reader->to().take<round_result>();
        fmt::print("  the read from it: {:.3f} s of at most {:.3f}: {}\n", round.seconds,
                   budget * 1e-3, round.why.string());
        expect(!round.why.string().empty() && round.seconds < budget * 1e-3 + 2.5,
               "it fails in its time");
        const auto beside = ask(*reader, 1);
        fmt::print("  the read from the other owner: {:.3f} s {}\n", beside.seconds,
                   beside.why.string());
        expect(beside.right, "it is right");
        std::this_thread::sleep_for(11s);  // an abort has had its time
        const auto after = ask(*reader, 1);
        expect(after.right && !after.lost, "and no abort was lost");
        victim->kill();
        reader->to().put(std::array{-1, 0});
        other->to().put(false);
        std::this_thread::sleep_for(1s);
    }
    return wrong - before;
}

// ------------------------------------------------------------------------------------- backend

struct nccl_kit : benchmarks::device_kit {
    using fabric = nccl::basic_pull_fabric<told_pairs>;

    static constexpr std::array<std::string_view, 1> uniform_names{"copy calls"};
    static constexpr std::size_t best = 0;

    /// Two ranks share one GPU when NCCL takes them for two hosts.
    static void settle(int device) {
        if (one_device) {
            ::setenv("NCCL_HOSTID", ("weightwire-" + std::to_string(::getpid())).c_str(), 1);
            ::setenv("NCCL_NET", "Socket", 1);
        }
        ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
        ::setenv("NCCL_NVLS_ENABLE", "0", 1);
        device_kit::settle(device);
    }

    /// From one trainer rank's allocation, by the runtime's own copy.
    class uniform {
    public:
        uniform(const shown& from, const weights& to, int device)
            : machine_{device},
              from_{machine_.open(from.from(), from.what())},
              to_{to.blocks()[0].data()},
              bytes_{std::min<std::uint64_t>(from_.size(), to.blocks()[0].size()) / 16 * 16},
              stream_{device} {}
        [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
        void run(std::size_t /*which*/) const {
            gpu::copy_bytes(to_, from_.data(), bytes_, stream_);
            stream_.synchronize();
        }

    private:
        cuda_ipc::cuda_machinery machine_;
        cuda_ipc::cuda_machinery::mapping from_;
        std::byte* to_;
        std::uint64_t bytes_;
        gpu::stream stream_;
    };
};

int backend_part(const benchmarks::pull_settings& wanted, bool rounds, bool kill) {
    fmt::print("{}{}\n", rounds ? "rounds" : "kill",
               wanted.apart ? ", workers on a node of their own that take alike once" : "");
    std::fflush(stdout);
    benchmarks::pull_rounds::program<nccl_kit> all{wanted};
    int found = rounds ? all.run() : 0;
    found += kill ? all.kill() : 0;
    all.end();
    return found;
}

}  // namespace

int main(int argc, char** argv) try {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    benchmarks::pull_settings wanted{.rounds = 5};
    wanted.model.layers = 2;
    std::string only = "pair,fabric,fault,backend,kill,apart";
    if (argc > 1 && std::string_view{argv[argc - 1]} == "--verbose") {
        verbose = true;
        --argc;
    }
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string_view key = argv[i];
        const std::string value = argv[i + 1];
        if (key == "--only") {
            only = value;
        } else if (key == "--devices") {
            one_device = value == "1";
        } else if (key == "--layers") {
            wanted.model.layers = std::stoll(value);
        } else if (key == "--rounds") {
            wanted.rounds = std::max(1, std::stoi(value));
        } else if (key == "--chunk") {
            wanted.chunk_bytes = std::stoull(value) << 20U;
        } else if (key == "--ranks" && (value == "1" || value == "2" || value == "4")) {
            wanted.ranks = std::stoi(value);
        } else if (key == "--staging") {
            wanted.staging_bytes = std::stoull(value) << 20U;
        } else {
            fmt::print(stderr, "nccl_pull: what is {}?\n", key);
            return 2;
        }
    }
    const int devices = nccl_pair::usable_devices();
    if (devices == 0) {
        fmt::print("nccl_pull: no GPU, or no libnccl; name it in WEIGHTWIRE_LIBNCCL\n");
        return 77;
    }
    if (!one_device && devices < 2) {
        fmt::print("nccl_pull: there are no two devices\n");
        return 77;
    }
    wanted.worker_device = one_device ? 0 : 1;
    chunk_count = one_device ? 8 : 64;
    int found = 0;
    const auto part = [&](std::string_view name, const std::function<int()>& run) {
        if (only.find(name) == std::string::npos) {
            return;
        }
        const auto begin = clock_type::now();
        int result = 1;
        try {
            result = run();
        } catch (const std::exception& failed) {
            fmt::print("{}: FAILS: {}\n", name, failed.what());
        }
        fmt::print("{}: {} in {:.1f} s\n\n", name,
                   result == 0 ? "as it should be" : "NOT as it should be", seconds_since(begin));
        std::fflush(stdout);
        found += result == 0 ? 0 : 1;
    };
    part("pair", [] { return pair_part(); });
    part("fabric", [&] { return fabric_part(wanted.rounds); });
    part("fault", [] { return fault_part(); });
    part("backend", [&] { return backend_part(wanted, true, false); });
    part("kill", [&] { return backend_part(wanted, false, true); });
    wanted.apart = true;
    part("apart", [&] { return backend_part(wanted, true, true); });
    fmt::print("{}\n", found == 0 ? "all parts are as they should be" : "some parts are NOT");
    return found == 0 ? 0 : 1;
} catch (const std::exception& failed) {
    fmt::print(stderr, "nccl_pull: {}\n", failed.what());
    return 1;
}
