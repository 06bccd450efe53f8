// SPDX-License-Identifier: Apache-2.0
//
// What does a packed nccl round cost beside its wire? Trainer and worker halves in one process on
// one GPU, and the wire replaced by a copy from the trainer's buffer to the worker's.
//
// The copy comes in two forms. At full speed gather, copy and scatter share one memory, so a round
// takes at least three passes over it and cannot hide any of them: the row is for information. The
// paced copy uses a few multiprocessors only, as many as bring it nearest to the rate of the wire
// between two GPUs, and gather and scatter have what NCCL would leave them: its difference is what
// the pipeline adds to a transfer.
//
// The names, shapes and order are the whole list; the memory is not. Tensors lie one behind another
// in an arena that is used again and again, on both sides alike, so that addresses repeat but never
// within a chunk; the two vocabulary matrices are cut into eight row blocks each. Every byte of the
// last pass over the arena is compared after each round.
//
// Gather and scatter beside the wire get a number of blocks; the table has several, the last one
// being as many as there is work for. `*` marks what the backend uses.
//
//   nccl_pipeline [--layers N] [--buffer MiB] [--wire GB/s] [--rounds N]

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/nccl/cuda_machinery.hpp>
#include <weightwire/backends/nccl/receiver.hpp>
#include <weightwire/backends/nccl/sender.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/gpu/kernels/digest.hpp>
#include <weightwire/plan/coverage.hpp>

#include "../tests/support/allocations.hpp"
#include "../tests/support/device_allocations.hpp"
#include "support/options.hpp"
#include "support/parameter_lists.hpp"
#include "support/timing.hpp"

namespace {

using namespace weightwire;
using benchmarks::median;
using benchmarks::seconds_since;

constexpr const char* wire_text = R"cuda(
extern "C" __global__ void wire(const uint4* from, uint4* to, unsigned long long count) {
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        to[i] = a; to[i + step] = b; to[i + 2 * step] = c; to[i + 3 * step] = d;
    }
    for (; i < count; i += step) to[i] = from[i];
}
)cuda";

/// Weights from a hash of place and round.
constexpr const char* weights_text = R"cuda(
typedef unsigned long long u64;
extern "C" __global__ void weights(u64* at, u64 count, u64 round) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (u64)gridDim.x * blockDim.x) {
        u64 v = i + round * 0x9E3779B97F4A7C15ull;
        v ^= v >> 33; v *= 0xff51afd7ed558ccdull; v ^= v >> 33; v *= 0xc4ceb9fe1a85ec53ull;
        at[i] = v ^ (v >> 33);
    }
}
)cuda";

/// The copy that stands for the wire.
class wire_copy {
public:
    /// @param blocks of the kernel; 0: the runtime's copy, at full speed.
    static inline unsigned int blocks = 0;

    static void launch(std::byte* to, const std::byte* from, std::uint64_t bytes,
                       gpu::stream_ref on) {
        if (blocks == 0) {
            gpu::check(
                cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, on.native_handle()),
                "cudaMemcpyAsync");
            return;
        }
        static const auto kernel =
            gpu::load_kernel({.name = "wire", .text = wire_text, .options = {}}, 0);
        // Whole 16-byte words; chunks of this list have no rest.
        kernel.launch(on, {.blocks = blocks, .threads = 1024}, from, to, bytes / 16);
    }
};

/// Seconds that this thread has spent on waiting for the device or the other half.
thread_local double waited = 0;

/// Waits for `met`, and adds the time to `waited`.
template <class Condition>
void await(Condition met) {
    const auto begin = std::chrono::steady_clock::now();
    while (!met()) {
        std::this_thread::yield();
    }
    waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Where the halves meet: each broadcast is one copy, given to the trainer's stream when both have
/// come. Each half's stream then waits for what it would wait for in NCCL.
class meeting_place {
public:
    static meeting_place& the_one() {
        static meeting_place one;
        return one;
    }
    void send(const std::byte* from, std::uint64_t bytes, const gpu::stream& on) {
        await([this] { return offered_ > sent_; });
        free_.make_wait(on);
        wire_copy::launch(to_, from, bytes, on);
        arrived_.record(on);
        ++sent_;
    }
    void receive(std::byte* to, const gpu::stream& on) {
        free_.record(on);
        to_ = to;
        const auto number = ++offered_;
        await([&] { return sent_ == number; });
        arrived_.make_wait(on);
    }

private:
    gpu::event free_{0};
    gpu::event arrived_{0};
    std::byte* to_ = nullptr;
    std::atomic<std::uint64_t> offered_{0};
    std::atomic<std::uint64_t> sent_{0};
};

/// The GPU's machinery, with that wire.
struct one_gpu_machinery : nccl::cuda_machinery {
    /// Of gather and scatter beside the wire; 0: the backend's own number.
    static inline unsigned int blocks = 0;

    one_gpu_machinery(int device, const std::string& library)
        : nccl::cuda_machinery{device, library} {
        if (blocks != 0) {
            set_blocks_beside_broadcast(blocks);
        }
    }

    class communicator {
    public:
        explicit communicator(int rank) noexcept : rank_{rank} {}
        void warm_up(deadline, const std::stop_token&) {}
        void broadcast(std::byte* data, std::uint64_t count, nccl_api::element type, int,
                       const gpu::stream& on, deadline, const std::stop_token&) {
            const auto bytes = count * nccl_api::size_of(type);
            rank_ == 0 ? meeting_place::the_one().send(data, bytes, on)
                       : meeting_place::the_one().receive(data, on);
        }
        void wait(const gpu::event& point, deadline until, const std::stop_token&) {
            await([&] {
                if (until.expired()) {
                    throw timeout_error{"the device did not come to the end"};
                }
                return point.is_done();
            });
        }
        void abort() noexcept {}
        [[nodiscard]] bool usable() const noexcept { return true; }
        [[nodiscard]] bool lost() const noexcept { return false; }

    private:
        int rank_;
    };
    [[nodiscard]] wire::unique_id make_unique_id() { return {}; }
    [[nodiscard]] communicator join(const wire::unique_id&, int, int rank, deadline,
                                    const std::stop_token&) {
        return communicator{rank};
    }
};
static_assert(nccl::Machinery<one_gpu_machinery>);

struct settings {
    std::int64_t layers = 48;
    std::uint64_t buffer_bytes = std::uint64_t{256} << 20U;
    double wire_rate = 368;  ///< GB/s; ncclBroadcast of 4 GiB between two H200s
    int rounds = 10;
};

manifest list_of(std::int64_t layers) {
    constexpr std::int64_t blocks = 8;
    std::vector<param_meta> list;
    for (auto& parameter : benchmarks::qwen3_30b_a3b_list(layers)) {
        if (parameter.byte_size() < (std::uint64_t{256} << 20U)) {
            list.push_back(std::move(parameter));
            continue;
        }
        for (std::int64_t block = 0; block < blocks; ++block) {
            list.push_back({parameter.name + "." + std::to_string(block),
                            parameter.dtype,
                            {parameter.shape[0] / blocks, parameter.shape[1]}});
        }
    }
    return manifest{std::move(list)};
}

/// The arenas: one offset a tensor, for both sides.
struct arenas {
    explicit arenas(const manifest& parameters, std::uint64_t chunk_bytes) {
        std::uint64_t largest = 0;
        for (const auto& parameter : parameters.parameters()) {
            largest = std::max(largest, parameter.byte_size());
        }
        // A chunk, a tensor that did not fit before the end, and the rounding of each tensor.
        size = chunk_bytes + 2 * largest + 256 * 4096;
        std::uint64_t at = 0;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            const auto bytes = parameters[i].byte_size();
            if (at + bytes > size) {
                at = 0;
                last_pass = i;
            }
            offsets.push_back(at);
            at += (bytes + 255) / 256 * 256;
        }
        from = gpu::device_buffer{0, size};
        to = gpu::device_buffer{0, size};
    }
    [[nodiscard]] mutable_tensor_view view(const gpu::device_buffer& in, const manifest& parameters,
                                           std::size_t i) const {
        return {in.data() + offsets[i], parameters[i].dtype, parameters[i].shape,
                weightwire::device{.kind = memory_kind::cuda, .index = 0}};
    }
    void make_weights(std::uint64_t round) const {
        static const auto kernel =
            gpu::load_kernel({.name = "weights", .text = weights_text, .options = {}}, 0);
        const gpu::stream stream{0};
        kernel.launch(stream, {.blocks = 2048, .threads = 256}, from.data(),
                      std::uint64_t{size / 8}, round);
        stream.synchronize();
    }
    std::uint64_t size = 0;
    std::size_t last_pass = 0;  ///< from this tensor on nothing is written over
    std::vector<std::uint64_t> offsets;
    gpu::device_buffer from;
    gpu::device_buffer to;
};

struct source {
    static constexpr auto lifetime = tensor_lifetime::stable;
    std::vector<param_meta> list;
    std::vector<named_tensor> tensors;
    [[nodiscard]] const auto& metadata() const { return list; }
    [[nodiscard]] const auto& weights() const { return tensors; }
};

struct places {
    const arenas& held;
    const manifest& parameters;
    coverage seen;
    mutable_tensor_view open(std::size_t i, deadline) const {
        return held.view(held.to, parameters, i);
    }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline) {
        seen.wrote(i, offset, count);
    }
};

/// The whole benchmark for one list.
class pipeline {
public:
    explicit pipeline(const settings& wanted)
        : wanted_{wanted},
          parameters_{list_of(wanted.layers)},
          plan_{parameters_, {.packed = true, .buffer_bytes = wanted.buffer_bytes, .buffers = 2}},
          arenas_{parameters_, *std::ranges::max_element(plan_.buffer_bytes())},
          sender_{info()},
          receiver_{{.global_rank = 1, .world_size = 2}} {
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            source_.list.push_back(parameters_[i]);
            stable_.push_back(arenas_.view(arenas_.from, parameters_, i));
            source_.tensors.push_back({.name = parameters_[i].name, .tensor = stable_.back()});
        }
        const std::vector<peer_info> peers{{.name = "worker", .native = true}};
        const auto inits = sender_.prepare({.parameters = parameters_,
                                            .peers = peers,
                                            .world_size = 2,
                                            .lifetime = tensor_lifetime::stable,
                                            .stable_tensors = stable_});
        promised_ = sender_.allocated_bytes() + sender_.table_bytes();
        const auto text = info().init_message();
        receiver_.open(
            {.wire_parameters = text, .transport = inits[0].native, .parameters = &parameters_},
            until(), {});
        sender_.open(until(), {});
    }

    /// Copies alone: every chunk from one side's buffer to the other's.
    double copies() {
        const gpu::device_buffer from{0, *std::ranges::max_element(plan_.buffer_bytes())};
        gpu::event began{0, gpu::event_timing::on};
        gpu::event ended{0, gpu::event_timing::on};
        const gpu::stream stream{0};
        began.record(stream);
        for (const auto& chunk : plan_.calls()[0].chunks) {
            wire_copy::launch(arenas_.to.data(), from.data(), chunk.bytes, stream);
        }
        ended.record(stream);
        stream.synchronize();
        return gpu::elapsed(began, ended).count();
    }

    struct result {
        double copy = 0;
        double round = 0;
        double host = 0;  ///< what the busier half's thread did besides waiting
        std::uint64_t host_allocations = 0;
        std::uint64_t device_allocations = 0;
    };
    result measure() {
        std::vector<double> copied;
        std::vector<double> rounds;
        std::vector<double> hosts;
        result out;
        for (int i = -3; i < wanted_.rounds; ++i) {
            const auto copy = copies();
            const bool counts = i >= 0;
            const auto before = weightwire_tests::device_allocations.load();
            const auto once = one_round();
            if (counts) {
                copied.push_back(copy);
                rounds.push_back(once.seconds);
                hosts.push_back(once.host);
                out.host_allocations += once.allocations;
                out.device_allocations += weightwire_tests::device_allocations.load() - before;
            }
            verify();
        }
        out.copy = median(copied);
        out.round = median(rounds);
        out.host = median(hosts);
        return out;
    }

    /// Blocks of the paced copy that come nearest to the wire's rate.
    unsigned int paced_blocks() {
        unsigned int best = 1;
        double distance = 1e300;
        for (unsigned int blocks = 2; blocks <= 64; blocks += 1) {
            wire_copy::blocks = blocks;
            const auto rate = static_cast<double>(parameters_.total_bytes()) / copies() * 1e-9;
            if (std::abs(rate - wanted_.wire_rate) < distance) {
                distance = std::abs(rate - wanted_.wire_rate);
                best = blocks;
            }
            if (rate > 1.3 * wanted_.wire_rate) {
                break;
            }
        }
        return best;
    }

    [[nodiscard]] const manifest& parameters() const noexcept { return parameters_; }
    [[nodiscard]] std::string description() const { return sender_.description(); }
    [[nodiscard]] std::string memory() const {
        return fmt::format(
            "sender: {} bytes promised before the first round, {} used; receiver: buffers {} and "
            "tables {} bytes; arenas 2 x {} bytes",
            promised_, sender_.allocated_bytes() + sender_.table_bytes(),
            receiver_.allocated_bytes(), receiver_.table_bytes(), arenas_.size);
    }

private:
    [[nodiscard]] nccl::trainer_init_info info() const {
        return {.packed = true,
                .packed_buffer_size_bytes = wanted_.buffer_bytes,
                .packed_num_buffers = 2};
    }
    static deadline until() { return deadline::after(std::chrono::seconds{60}); }

    struct round_cost {
        double seconds = 0;  ///< from the first call to the last byte placed
        double host = 0;     ///< of the busier thread
        std::uint64_t allocations = 0;
    };
    round_cost one_round() {
        arenas_.make_weights(++round_);
        gpu::check(cudaMemset(arenas_.to.data(), 0xEE, arenas_.size), "cudaMemset");
        gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        places to{arenas_, parameters_, coverage{parameters_}};
        round_of<source> all{source_, parameters_};
        auto stream = all.stream();
        std::atomic<bool> go{false};
        std::uint64_t received = 0;
        double took = 0;
        double worker_host = 0;
        std::chrono::steady_clock::time_point begin;
        std::thread worker{[&] {
            update_target target{to, parameters_, 0, parameters_.size()};
            while (!go) {
                std::this_thread::yield();
            }
            const weightwire_tests::allocation_watch watch;
            receiver_.receive({.round = round_, .count = parameters_.size(), .native = true},
                              target, until(), {});
            received = watch.count();
            took = seconds_since(begin);
            worker_host = took - waited;
        }};
        begin = std::chrono::steady_clock::now();
        go = true;
        waited = 0;
        const weightwire_tests::allocation_watch watch;
        sender_.send(round_, 0, stream, until(), {});
        const auto sent = watch.count();
        const auto sender_host = seconds_since(begin) - waited;
        worker.join();
        if (!to.seen.all_whole()) {
            throw std::runtime_error{"the round ended with tensors missing"};
        }
        return {took, std::max(sender_host, worker_host), sent + received};
    }

    /// Of what was written last, every byte.
    void verify() {
        const auto digests = [&](const gpu::device_buffer& in) {
            std::vector<gpu::digest_item> items;
            for (auto i = arenas_.last_pass; i < parameters_.size(); ++i) {
                items.push_back({in.data() + arenas_.offsets[i], parameters_[i].byte_size()});
            }
            const gpu::digest_plan plan{0, items};
            const gpu::stream stream{0};
            return plan.run(stream);
        };
        if (digests(arenas_.from) != digests(arenas_.to)) {
            throw std::runtime_error{"what arrived is not what was sent"};
        }
    }

    settings wanted_;
    manifest parameters_;
    plan::broadcast_plan plan_;
    arenas arenas_;
    source source_;
    std::vector<tensor_view> stable_;
    std::uint64_t promised_ = 0;
    std::uint64_t round_ = 0;
    nccl::basic_sender<one_gpu_machinery> sender_;
    nccl::basic_receiver<one_gpu_machinery> receiver_;
};

void print(std::string_view name, const pipeline::result& one, std::uint64_t bytes, double floor) {
    const auto added = (one.round - one.copy) * 1e3;
    fmt::print("{:<24}{:>11.3f}{:>9.0f}{:>11.3f}{:>11.3f}{:>8}{:>10.3f}{:>7}{:>8}\n", name,
               one.copy * 1e3, static_cast<double>(bytes) / one.copy * 1e-9, one.round * 1e3, added,
               floor == 0 ? "-" : fmt::format("{:.0f}", floor), one.host * 1e3,
               one.host_allocations, one.device_allocations);
}

}  // namespace

int main(int argc, char** argv) try {
    settings wanted;
    if (!benchmarks::read_options("nccl_pipeline", argc, argv,
                                  {{"--layers", &wanted.layers},
                                   {"--buffer", benchmarks::mebibytes{&wanted.buffer_bytes}},
                                   {"--wire", &wanted.wire_rate},
                                   {"--rounds", &wanted.rounds}})) {
        return 2;
    }
    std::optional<pipeline> one;
    one.emplace(wanted);
    fmt::print("{}\n", one->description());
    const auto bytes = one->parameters().total_bytes();
    fmt::print("Qwen3-30B-A3B list of {} layers: {} tensors, {:.1f} GB; medians of {} rounds\n",
               wanted.layers, one->parameters().size(), static_cast<double>(bytes) * 1e-9,
               wanted.rounds);
    fmt::print("{:<24}{:>11}{:>9}{:>11}{:>11}{:>8}{:>10}{:>7}{:>8}\n", "wire", "copy ms", "GB/s",
               "round ms", "added ms", "at most", "host ms", "host", "device");
    print("copy at full speed*", one->measure(), bytes, 0);
    wire_copy::blocks = one->paced_blocks();
    // Of the time that the whole list takes on the wire.
    const auto most = 9 * static_cast<double>(wanted.layers) / 48;
    print(fmt::format("paced, {} blocks*", wire_copy::blocks), one->measure(), bytes, most);
    const auto memory = one->memory();
    constexpr unsigned int all = 1U << 30U;
    for (const unsigned int blocks : {8U, 16U, 24U, 48U, 66U, 132U, all}) {
        one.reset();
        one_gpu_machinery::blocks = blocks;
        one.emplace(wanted);
        print(fmt::format("paced, beside {}", blocks == all ? "all" : std::to_string(blocks)),
              one->measure(), bytes, most);
    }
    fmt::print(
        "host ms: what the busier half's thread does besides waiting; host, device: allocations in "
        "all counted rounds\n{}\n",
        memory);
    return 0;
} catch (const std::exception& failed) {
    fmt::print(stderr, "nccl_pipeline: {}\n", failed.what());
    return 1;
}

// Last, as its names are short: the operator new that counts.
#include "../tests/support/allocations.cpp"
