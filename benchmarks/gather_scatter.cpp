// SPDX-License-Identifier: Apache-2.0
//
// How fast are many tensors gathered into one buffer and scattered out of it, measured against one
// device-to-device copy of the same bytes? The tensors lie in another order than their places in
// the buffer. The ways take turns within each round. Weights are made on the device from (name,
// index, round); they change before the first and the last round, the destinations are poisoned,
// and every byte is checked on the device.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/kernels/digest.hpp>
#include <weightwire/gpu/kernels/gather.hpp>
#include <weightwire/gpu/kernels/scatter.hpp>
#include <weightwire/gpu/stream.hpp>

#include "support/parameter_lists.hpp"

namespace {

namespace gpu = weightwire::gpu;

constexpr int warm_ups = 3;
constexpr int rounds = 10;

/// Makes the bytes of tensors, or counts those that are not what it would make.
constexpr const char* weights_text = R"cuda(
typedef unsigned long long u64;
struct item { u64 address, bytes, key; };
__device__ u64 mix(u64 v) {
    v ^= v >> 33; v *= 0xff51afd7ed558ccdull; v ^= v >> 33; v *= 0xc4ceb9fe1a85ec53ull;
    return v ^ (v >> 33);
}
extern "C" __global__ void weights(const item* items, u64 count, u64 round, u64* wrong) {
    u64 bad = 0;
    for (u64 k = blockIdx.x / 32; k < count; k += gridDim.x / 32) {
        const item t = items[k];
        for (u64 i = (blockIdx.x % 32) * blockDim.x + threadIdx.x; i < t.bytes;
             i += 32 * blockDim.x) {
            unsigned char* at = (unsigned char*)t.address + i;
            const unsigned char byte =
                (unsigned char)(mix(t.key + round * 0x9E3779B97F4A7C15ull + i / 8) >> (8 * (i % 8)));
            if (wrong == 0) *at = byte;
            else bad += *at != byte;
        }
    }
    if (bad != 0) atomicAdd(wrong, bad);
}
)cuda";

struct tensor {
    std::uint64_t key = 0;  ///< from the name
    std::uint64_t bytes = 0;
};

struct benchmark_case {
    std::string name;
    std::vector<tensor> tensors;
    std::uint64_t shift_tensors = 0;  ///< 1: every tensor at its own odd offset
    bool shift_places = false;        ///< its place in the buffer at the same offset modulo 16
    double floor = 0;                 ///< ratio to reach; 0: for information
};

std::uint64_t key_of(std::string_view name) {
    return weightwire::digest(std::as_bytes(std::span{name}));
}

std::vector<tensor> equal_tensors(std::uint64_t bytes, std::uint64_t total) {
    std::vector<tensor> list;
    for (std::uint64_t i = 0; i < total / bytes; ++i) {
        list.push_back({key_of("tensor." + std::to_string(i)), bytes});
    }
    return list;
}

std::vector<tensor> model_tensors(std::int64_t layers) {
    std::vector<tensor> list;
    for (const auto& parameter : benchmarks::qwen3_30b_a3b_list(layers)) {
        list.push_back({key_of(parameter.name), parameter.byte_size()});
    }
    return list;
}

/// Where everything lies.
struct places {
    std::vector<std::uint64_t> in_memory;  ///< like tensors of an allocator, in random order
    std::vector<std::uint64_t> in_buffer;  ///< one behind the other
    std::uint64_t memory_bytes = 0;
    std::uint64_t buffer_bytes = 0;
};

places place(const benchmark_case& one) {
    places out;
    const std::size_t count = one.tensors.size();
    out.in_memory.resize(count);
    std::vector<std::size_t> order(count);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::mt19937_64 random{42};
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
        const std::uint64_t shift = one.shift_tensors * (2 * (random() % 8) + 1);
        out.in_memory[i] = out.memory_bytes + shift;
        out.memory_bytes = (out.in_memory[i] + one.tensors[i].bytes + 255) / 256 * 256;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t at = one.shift_places
                                     ? (out.buffer_bytes + 15) / 16 * 16 + out.in_memory[i] % 16
                                     : out.buffer_bytes;
        out.in_buffer.push_back(at);
        out.buffer_bytes = at + one.tensors[i].bytes;
    }
    return out;
}

/// Tensors at addresses, for the kernel that makes and checks their bytes.
class weights {
public:
    weights(const std::vector<tensor>& tensors, const std::byte* base,
            const std::vector<std::uint64_t>& offsets)
        : kernel_{gpu::load_kernel({.name = "weights", .text = weights_text, .options = {}}, 0)},
          count_{tensors.size()},
          table_{0, 24 * tensors.size() + 8} {
        std::vector<std::array<std::uint64_t, 3>> items;
        for (std::size_t i = 0; i < count_; ++i) {
            items.push_back({reinterpret_cast<std::uint64_t>(base) + offsets[i], tensors[i].bytes,
                             tensors[i].key});
        }
        gpu::check(cudaMemcpy(table_.data(), items.data(), 24 * count_, cudaMemcpyHostToDevice),
                   "cudaMemcpy");
        gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }

    void make(std::uint64_t round, gpu::stream_ref on) const { launch(round, nullptr, on); }

    /// @throws runtime_error some byte differs.
    void verify(std::uint64_t round, std::string_view what, gpu::stream_ref on) const {
        auto* const wrong = reinterpret_cast<std::uint64_t*>(table_.data() + 24 * count_);
        gpu::check(cudaMemsetAsync(wrong, 0, 8, on.native_handle()), "cudaMemsetAsync");
        launch(round, wrong, on);
        std::uint64_t bytes = 0;
        gpu::check(cudaMemcpyAsync(&bytes, wrong, 8, cudaMemcpyDeviceToHost, on.native_handle()),
                   "cudaMemcpyAsync");
        on.synchronize();
        if (bytes != 0) {
            throw std::runtime_error{fmt::format("{}: {} bytes are wrong", what, bytes)};
        }
    }

private:
    void launch(std::uint64_t round, std::uint64_t* wrong, gpu::stream_ref on) const {
        const auto* items = table_.data();
        const auto blocks = static_cast<unsigned int>(32 * std::min<std::size_t>(count_, 8192));
        kernel_.launch(on, {.blocks = blocks, .threads = 256}, items, std::uint64_t{count_}, round,
                       wrong);
    }

    gpu::kernel kernel_;
    std::size_t count_;
    gpu::device_buffer table_;
};

/// One way of moving the bytes, and the times that it took.
struct way {
    std::string name;
    std::function<void()> launch;
    std::vector<double> seconds{};

    [[nodiscard]] double median() const {
        auto sorted = seconds;
        std::sort(sorted.begin(), sorted.end());
        return (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
    }
};

void time_round(std::vector<way>& ways, const gpu::stream& stream, bool counts) {
    gpu::event began{0, gpu::event_timing::on};
    gpu::event ended{0, gpu::event_timing::on};
    for (way& each : ways) {
        began.record(stream);
        each.launch();
        ended.record(stream);
        stream.synchronize();
        if (counts) {
            each.seconds.push_back(gpu::elapsed(began, ended).count());
        }
    }
}

/// The chosen form of the library, and for information the others.
struct mover {
    std::string name;
    gpu::gather gather;
    gpu::scatter scatter;
};

std::vector<mover> make_movers(const benchmark_case& one, const places& where, std::byte* memory) {
    std::vector<std::vector<gpu::gather_item>> out(1);
    std::vector<std::vector<gpu::scatter_item>> in(1);
    for (std::size_t i = 0; i < one.tensors.size(); ++i) {
        std::byte* const at = memory + where.in_memory[i];
        out[0].push_back({at, where.in_buffer[i], one.tensors[i].bytes});
        in[0].push_back({at, where.in_buffer[i], one.tensors[i].bytes});
    }
    std::vector<mover> movers;
    const auto add = [&](std::string name, gpu::copy_form form) {
        movers.push_back({std::move(name), gpu::gather{0, out, form}, gpu::scatter{0, in, form}});
    };
    add("", gpu::copy_form::automatic);
    if (movers.front().gather.plan().form() == gpu::copy_form::bulk) {
        add(", plain form", gpu::copy_form::plain);
    } else if (gpu::compute_capability(0) >= 90) {
        add(", bulk form", gpu::copy_form::bulk);
    }
    return movers;
}

/// Gathers and scatters weights of one round once and looks at every byte.
void verify_round(std::uint64_t round, const std::vector<mover>& movers, const weights& in_memory,
                  const weights& in_buffer, const gpu::device_buffer& memory,
                  const gpu::device_buffer& buffer, const gpu::stream& stream) {
    const auto poison = [&](const gpu::device_buffer& target) {
        gpu::check(cudaMemsetAsync(target.data(), 0xCD, target.size(), stream.native_handle()),
                   "cudaMemsetAsync");
    };
    for (const mover& each : movers) {
        in_memory.make(round, stream);
        poison(buffer);
        each.gather.launch(0, buffer.data(), stream);
        in_buffer.verify(round, "gather" + each.name, stream);
        poison(memory);
        each.scatter.launch(0, buffer.data(), stream);
        in_memory.verify(round, "scatter" + each.name, stream);
        round += 100;
    }
}

/// @returns whether the ratios reach the floor.
bool measure(const benchmark_case& one) {
    const places where = place(one);
    std::uint64_t bytes = 0;
    for (const tensor& each : one.tensors) {
        bytes += each.bytes;
    }
    const gpu::device_buffer memory{0, std::max(where.memory_bytes, where.buffer_bytes)};
    const gpu::device_buffer buffer{0, where.buffer_bytes};
    const gpu::stream stream{0};
    const weights in_memory{one.tensors, memory.data(), where.in_memory};
    const weights in_buffer{one.tensors, buffer.data(), where.in_buffer};
    const std::vector<mover> movers = make_movers(one, where, memory.data());
    verify_round(1, movers, in_memory, in_buffer, memory, buffer, stream);

    std::vector<way> ways;
    ways.push_back({"one copy", [&] {
                        gpu::check(
                            cudaMemcpyAsync(buffer.data(), memory.data(), bytes,
                                            cudaMemcpyDeviceToDevice, stream.native_handle()),
                            "cudaMemcpyAsync");
                    }});
    for (const mover& each : movers) {
        ways.push_back(
            {"gather" + each.name, [&] { each.gather.launch(0, buffer.data(), stream); }});
        ways.push_back(
            {"scatter" + each.name, [&] { each.scatter.launch(0, buffer.data(), stream); }});
    }
    for (int round = 0; round < warm_ups + rounds; ++round) {
        time_round(ways, stream, round >= warm_ups);
    }
    verify_round(2, movers, in_memory, in_buffer, memory, buffer, stream);

    std::vector<gpu::digest_item> digested;
    for (std::size_t i = 0; i < one.tensors.size(); ++i) {
        digested.push_back({memory.data() + where.in_memory[i], one.tensors[i].bytes});
    }
    const gpu::digest_plan digests{0, digested};
    ways.push_back({"digest", [&] { digests.launch(stream); }});
    std::vector<way> last{ways.back()};
    for (int round = 0; round < warm_ups + rounds; ++round) {
        time_round(last, stream, round >= warm_ups);
    }
    ways.back() = last.front();

    fmt::print("{}: {} tensors, {:.2f} GB, tables of {:.2f} MB\n", one.name, one.tensors.size(),
               static_cast<double>(bytes) * 1e-9,
               static_cast<double>(movers.front().gather.plan().table_bytes()) * 1e-6);
    bool reached = true;
    const double copy = ways.front().median();
    for (const way& each : ways) {
        const double ratio = copy / each.median();
        const bool judged = one.floor > 0 && (each.name == "gather" || each.name == "scatter");
        const bool good = !judged || ratio >= one.floor;
        reached = reached && good;
        fmt::print("  {:<20} {:8.3f} ms {:8.0f} GB/s   ratio {:.3f}{}\n", each.name,
                   each.median() * 1e3, static_cast<double>(bytes) / each.median() * 1e-9, ratio,
                   judged
                       ? fmt::format("   floor {:.2f} {}", one.floor, good ? "reached" : "MISSED")
                       : std::string{});
    }
    std::fflush(stdout);
    return reached;
}

/// All 48 layers where memory, buffer and tables fit, fewer elsewhere.
std::int64_t layers_that_fit() {
    std::size_t free = 0;
    std::size_t total = 0;
    gpu::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free > std::size_t{125'000'000'000} ? 48 : 5;
}

std::vector<benchmark_case> cases() {
    constexpr std::uint64_t total = std::uint64_t{4} << 30U;
    constexpr std::uint64_t kib = 1024;
    const auto list = model_tensors(layers_that_fit());
    return {
        {.name = "3 MiB", .tensors = equal_tensors(3072 * kib, total), .floor = 0.92},
        {.name = "256 KiB", .tensors = equal_tensors(256 * kib, total), .floor = 0.92},
        {.name = "16 KiB", .tensors = equal_tensors(16 * kib, total), .floor = 0.88},
        {.name = "4 KiB", .tensors = equal_tensors(4 * kib, total), .floor = 0.80},
        {.name = "Qwen3-30B-A3B, aligned", .tensors = list, .floor = 0.92},
        {.name = "Qwen3-30B-A3B, tensors at odd offsets",
         .tensors = list,
         .shift_tensors = 1,
         .floor = 0.60},
        {.name = "Qwen3-30B-A3B, tensors and places at the same odd offsets",
         .tensors = list,
         .shift_tensors = 1,
         .shift_places = true,
         .floor = 0.60},
        {.name = "4 KiB, tensors at odd offsets",
         .tensors = equal_tensors(4 * kib, total),
         .shift_tensors = 1},
    };
}

}  // namespace

int main() {
    if (gpu::device_count() == 0) {
        fmt::print("skipped: this machine has no CUDA device\n");
        return 77;
    }
    cudaDeviceProp device{};
    gpu::check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    int driver = 0;
    gpu::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    fmt::print(
        "{}, {} multiprocessors, driver of CUDA {}.{}; medians of {} after {} warm-ups; GB = 1e9 "
        "payload bytes, each read once and written once\n",
        device.name, device.multiProcessorCount, driver / 1000, driver % 1000 / 10, rounds,
        warm_ups);
    bool reached = true;
    for (const benchmark_case& one : cases()) {
        reached = measure(one) && reached;
    }
    fmt::print("{}\n", reached ? "all floors reached, all bytes right" : "a floor was MISSED");
    return reached ? 0 : 1;
}
