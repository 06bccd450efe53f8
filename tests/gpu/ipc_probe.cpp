// SPDX-License-Identifier: Apache-2.0
//
// What a CUDA IPC mapping costs: how long an export, an opening and a closing take, and how fast
// one process reads another's tensors through a mapping, in every form of our copy kernels, against
// one plain copy call over the same bytes and against the same inside one process. The ways take
// turns within a round; every byte is checked once a way.
//
// usage: ipc_probe [GIGABYTES] [ROUNDS]    (61.1 and 7; both sides have so much, in one GPU)

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/ipc_memory.hpp>
#include <weightwire/gpu/kernels/copy.hpp>
#include <weightwire/gpu/kernels/digest.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/gpu/stream.hpp>

#include "../../benchmarks/support/parameter_lists.hpp"
#include "ipc_pair.hpp"

namespace {

namespace gpu = weightwire::gpu;
namespace cuda_ipc = weightwire::cuda_ipc;
using cuda_ipc::cuda_machinery;
using ipc_pair::sent_export;
using tests::channel;
using tests::forked;
using steady = std::chrono::steady_clock;

constexpr int warm_ups = 2;
constexpr std::uint64_t alignment = 256;

struct wishes {
    std::uint64_t bytes = 61'100'000'000;
    int rounds = 7;
};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
}

double microseconds_since(steady::time_point began) {
    return std::chrono::duration<double, std::micro>{steady::now() - began}.count();
}

// --- exports and openings

struct batch {
    std::size_t count;
    std::uint64_t bytes;
};
constexpr batch batches[] = {{512, std::uint64_t{2} << 20U},
                             {64, std::uint64_t{64} << 20U},
                             {3000, std::uint64_t{20} << 20U}};

void print_times(const char* what, const batch& of, std::vector<double> times) {
    const double first = times.front();
    const double most = *std::max_element(times.begin(), times.end());
    const double sum = std::accumulate(times.begin(), times.end(), 0.0);
    std::printf(
        "  %-24s %4zu of %4llu MiB   first %8.1f us   median %8.1f us   most %8.1f us   "
        "all %7.2f ms\n",
        what, of.count, static_cast<unsigned long long>(of.bytes >> 20U), first,
        median(std::move(times)), most, sum / 1000);
    std::fflush(stdout);
}

void export_batches(channel& parent) {
    cuda_machinery machine{0};
    for (const batch& each : batches) {
        std::vector<cuda_machinery::buffer> memory;
        for (std::size_t i = 0; i < each.count; ++i) {
            memory.push_back(machine.allocate_exportable(each.bytes));
        }
        std::vector<sent_export> made;
        for (const char* what : {"export", "export again"}) {
            std::vector<double> times;
            made.clear();
            for (const auto& one : memory) {
                const auto began = steady::now();
                auto out = machine.export_of(one.data(), each.bytes);
                times.push_back(microseconds_since(began));
                made.push_back(ipc_pair::sent(std::get<cuda_ipc::exported_allocation>(out)));
            }
            print_times(what, each, std::move(times));
        }
        for (const sent_export& one : made) {
            parent.put(one);
        }
        static_cast<void>(parent.take<char>());  // they are closed
    }
    static_cast<void>(parent.take<char>());
}

void open_batches(channel& parent) {
    cuda_machinery machine{0};
    for (const batch& each : batches) {
        std::vector<sent_export> sent;
        for (std::size_t i = 0; i < each.count; ++i) {
            sent.push_back(parent.take<sent_export>());
        }
        std::vector<cuda_machinery::mapping> opened;
        for (const char* what : {"open", "open what is open"}) {
            std::vector<double> times;
            for (const sent_export& one : sent) {
                const auto began = steady::now();
                opened.push_back(machine.open(one.from(), one.what()));
                times.push_back(microseconds_since(began));
            }
            print_times(what, each, std::move(times));
        }
        opened.resize(each.count);
        std::vector<double> times;
        for (auto& one : opened) {
            const auto began = steady::now();
            one = {};
            times.push_back(microseconds_since(began));
        }
        print_times("close", each, std::move(times));
        parent.put('c');
    }
    static_cast<void>(parent.take<char>());
}

void time_exports() {
    forked exporter{ipc_pair::told(export_batches)};
    forked importer{ipc_pair::told(open_batches)};
    for (const batch& each : batches) {
        for (std::size_t i = 0; i < each.count; ++i) {
            importer.to().put(exporter.to().take<sent_export>());
        }
        exporter.to().put(importer.to().take<char>());
    }
}

// --- copies

/// Tensors that lie in another order in the source than in the destination.
struct mix {
    std::string name;
    std::vector<std::uint64_t> bytes;
    std::vector<std::uint64_t> sources;
    std::vector<std::uint64_t> destinations;
    std::uint64_t payload = 0;
};

mix placed(std::string name, std::vector<std::uint64_t> sizes) {
    mix out{.name = std::move(name), .bytes = std::move(sizes), .sources = {}, .destinations = {}};
    std::vector<std::size_t> order(out.bytes.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::mt19937_64 random{42};
    std::shuffle(order.begin(), order.end(), random);
    const auto padded = [](std::uint64_t bytes) {
        return (bytes + alignment - 1) / alignment * alignment;
    };
    out.sources.resize(order.size());
    std::uint64_t at = 0;
    for (const std::size_t i : order) {
        out.sources[i] = at;
        at += padded(out.bytes[i]);
    }
    at = 0;
    for (const std::uint64_t bytes : out.bytes) {
        out.destinations.push_back(at);
        at += padded(bytes);
        out.payload += bytes;
    }
    return out;
}

std::vector<std::uint64_t> model_sizes(std::int64_t layers) {
    std::vector<std::uint64_t> sizes;
    for (const auto& parameter : benchmarks::qwen3_30b_a3b_list(layers)) {
        sizes.push_back(parameter.byte_size());
    }
    return sizes;
}

std::vector<mix> mixes_of(std::uint64_t bytes) {
    std::vector<mix> list;
    for (const std::uint64_t kibibytes : {3072U, 256U}) {
        const std::uint64_t each = kibibytes << 10U;
        list.push_back(placed(std::to_string(kibibytes) + " KiB",
                              std::vector<std::uint64_t>(bytes / each, each)));
    }
    const auto total = [](const std::vector<std::uint64_t>& sizes) {
        return std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
    };
    std::int64_t layers = 48;
    while (layers > 0 && total(model_sizes(layers)) > bytes) {
        --layers;
    }
    if (layers > 0) {
        list.push_back(
            placed("Qwen3-30B-A3B, " + std::to_string(layers) + " layers", model_sizes(layers)));
    }
    return list;
}

struct way {
    std::string name;
    std::function<void()> launch;
    std::vector<double> seconds{};
};

/// Counts the tensors that did not arrive.
std::size_t wrong_tensors(const mix& one, const std::byte* source, const std::byte* destination,
                          gpu::stream_ref on) {
    std::vector<gpu::digest_item> there;
    std::vector<gpu::digest_item> here;
    for (std::size_t i = 0; i < one.bytes.size(); ++i) {
        there.push_back({source + one.sources[i], one.bytes[i]});
        here.push_back({destination + one.destinations[i], one.bytes[i]});
    }
    const auto wanted = gpu::digest_plan{0, there}.run(on);
    const auto found = gpu::digest_plan{0, here}.run(on);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        wrong += wanted[i] != found[i] ? 1 : 0;
    }
    return wrong;
}

/// @param short_list only the plain copy and each kernel as it is fastest alone.
void measure(const char* where, const mix& one, const std::byte* source, std::byte* destination,
             const wishes& wanted, bool short_list) {
    gpu::copy_tiles tiles;
    std::vector<gpu::copy_item> items;
    for (std::size_t i = 0; i < one.bytes.size(); ++i) {
        items.push_back(
            {.source = reinterpret_cast<std::uint64_t>(source + one.sources[i]),
             .destination = reinterpret_cast<std::uint64_t>(destination + one.destinations[i]),
             .bytes = one.bytes[i]});
    }
    tiles.add_group(items);
    const gpu::stream stream{0};
    const auto processors =
        static_cast<unsigned int>(gpu::device_attribute(cudaDevAttrMultiProcessorCount, 0));
    const gpu::copy_plan plain{0, tiles, gpu::copy_form::plain};
    std::optional<gpu::copy_plan> bulk;
    std::vector<way> ways;
    // As many bytes as the tensors have, as one run: their order does not matter to its speed.
    ways.push_back({"one cudaMemcpyAsync",
                    [&] { gpu::copy_bytes(destination, source, one.payload, stream); }});
    const auto add = [&](const std::string& name, const gpu::copy_plan& plan, unsigned int most) {
        ways.push_back(
            {name, [&plan, &stream, most] { plan.launch(0, nullptr, nullptr, stream, most); }});
    };
    add("plain", plain, 0);
    if (!short_list) {
        add("plain, 8 blocks a processor", plain, 8 * processors);
    }
    if (gpu::compute_capability(0) >= 90) {
        bulk.emplace(0, tiles, gpu::copy_form::bulk);
        add("bulk, " + std::to_string(processors) + " blocks", *bulk, 0);
        for (const unsigned int part : {3U, 2U, 1U}) {
            const unsigned int most = processors * part / 4;
            if (!short_list && most > 0) {
                add("bulk, " + std::to_string(most) + " blocks", *bulk, most);
            }
        }
    }
    std::vector<std::size_t> wrong;
    for (const way& each : ways) {
        gpu::clear_bytes(destination, one.destinations.back() + one.bytes.back(), stream);
        each.launch();
        // The plain copy has another order: it is checked as one run.
        wrong.push_back(
            &each == &ways.front()
                ? static_cast<std::size_t>(
                      gpu::digest_plan{0, std::vector<gpu::digest_item>{{source, one.payload}}}.run(
                          stream) !=
                      gpu::digest_plan{0, std::vector<gpu::digest_item>{{destination, one.payload}}}
                          .run(stream))
                : wrong_tensors(one, source, destination, stream));
    }
    gpu::event began{0, gpu::event_timing::on};
    gpu::event ended{0, gpu::event_timing::on};
    for (int round = 0; round < warm_ups + wanted.rounds; ++round) {
        for (way& each : ways) {
            began.record(stream);
            each.launch();
            ended.record(stream);
            stream.synchronize();
            if (round >= warm_ups) {
                each.seconds.push_back(gpu::elapsed(began, ended).count());
            }
        }
    }
    std::printf("%s, %s: %zu tensors, %.2f GB, tables of %.2f MB\n", where, one.name.c_str(),
                one.bytes.size(), static_cast<double>(one.payload) / 1e9,
                static_cast<double>(plain.table_bytes()) / 1e6);
    const double reference = median(ways.front().seconds);
    for (std::size_t i = 0; i < ways.size(); ++i) {
        const double seconds = median(ways[i].seconds);
        std::printf(
            "  %-28s %9.3f ms   %5.0f GB/s   ratio %.3f%s\n", ways[i].name.c_str(), 1000 * seconds,
            static_cast<double>(one.payload) / seconds / 1e9, reference / seconds,
            wrong[i] == 0 ? "" : ("   WRONG: " + std::to_string(wrong[i]) + " tensors").c_str());
    }
    std::fflush(stdout);
}

std::uint64_t memory_of(const std::vector<mix>& list) {
    std::uint64_t most = 0;
    for (const mix& one : list) {
        most = std::max(most, one.destinations.back() + one.bytes.back());
    }
    return (most + alignment - 1) / alignment * alignment;
}

void export_model(channel& parent, std::uint64_t bytes) {
    cuda_machinery machine{0};
    const auto memory = machine.allocate_exportable(bytes);
    const auto stream = machine.make_stream();
    ipc_pair::filler{}.fill(memory.data(), bytes, 1, stream);
    stream.synchronize();
    parent.put(ipc_pair::exported(machine, memory.data(), bytes));
    static_cast<void>(parent.take<char>());
}

void read_model(channel& parent, const std::vector<mix>& list, const wishes& wanted) {
    const auto sent = parent.take<sent_export>();
    cuda_machinery machine{0};
    const auto began = steady::now();
    const auto mapped = machine.open(sent.from(), sent.what());
    std::printf("  %-24s    1 of %.2f GB   %.1f us\n", "open",
                static_cast<double>(sent.bytes) / 1e9, microseconds_since(began));
    const auto here = machine.allocate_exportable(sent.bytes);
    for (const mix& one : list) {
        measure("from another process", one, mapped.data(), here.data(), wanted, false);
    }
    parent.put('d');
    static_cast<void>(parent.take<char>());
}

void copy_inside(channel& parent, const std::vector<mix>& list, const wishes& wanted) {
    cuda_machinery machine{0};
    const std::uint64_t bytes = memory_of(list);
    const auto memory = machine.allocate_exportable(bytes);
    const auto here = machine.allocate_exportable(bytes);
    const auto stream = machine.make_stream();
    ipc_pair::filler{}.fill(memory.data(), bytes, 2, stream);
    stream.synchronize();
    for (const mix& one : list) {
        measure("inside one process", one, memory.data(), here.data(), wanted, true);
    }
    parent.put('d');
}

void describe(channel& parent) {
    cudaDeviceProp properties{};
    gpu::check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    int driver = 0;
    int runtime = 0;
    gpu::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    gpu::check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    std::printf("%s %s, %d multiprocessors, driver of CUDA %d.%d, runtime %d.%d\n", properties.name,
                gpu::device_uuid(0).c_str(), properties.multiProcessorCount, driver / 1000,
                driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    std::fflush(stdout);
    parent.put('d');
}

void run(const wishes& wanted) {
    {
        forked first{ipc_pair::told(describe)};
        static_cast<void>(first.to().take<char>());
    }
    time_exports();
    const auto list = mixes_of(wanted.bytes);
    {
        const std::uint64_t bytes = memory_of(list);
        forked exporter{ipc_pair::told([bytes](channel& parent) { export_model(parent, bytes); })};
        forked importer{ipc_pair::told(
            [&list, &wanted](channel& parent) { read_model(parent, list, wanted); })};
        importer.to().put(exporter.to().take<sent_export>());
        static_cast<void>(importer.to().take<char>());
    }
    forked alone{
        ipc_pair::told([&list, &wanted](channel& parent) { copy_inside(parent, list, wanted); })};
    static_cast<void>(alone.to().take<char>());
}

}  // namespace

int main(int count, char** arguments) {
    wishes wanted;
    if (count > 1) {
        wanted.bytes = static_cast<std::uint64_t>(std::max(0.0, std::atof(arguments[1])) * 1e9);
    }
    if (count > 2) {
        wanted.rounds = std::atoi(arguments[2]);
    }
    if (wanted.bytes < (std::uint64_t{4} << 20U) || wanted.rounds < 1) {
        std::fprintf(stderr, "usage: ipc_probe [GIGABYTES] [ROUNDS]\n");
        return 2;
    }
    if (ipc_pair::usable_devices() == 0) {
        std::printf("SKIP ipc_probe: this machine has no CUDA device\n");
        return 77;
    }
    try {
        run(wanted);
    } catch (const std::exception& failed) {
        std::fprintf(stderr, "ipc_probe: %s\n", failed.what());
        return 1;
    }
    return 0;
}
