// SPDX-License-Identifier: Apache-2.0
//
// C++ trainer to C++ worker over NCCL, two processes on one GPU or on two: real names and shapes,
// packed and unpacked, digests of every tensor equal over ten rounds of changing weights. Started
// by hand:
//
//   nccl_round [--layers N] [--rounds N] [--two-devices] [--buffer BYTES]
//
// The last two columns count allocations while a round runs, of both processes: of the halves'
// threads from operator new, and of device and pinned memory. Asked: none from the third round on.
//
// Device memory: three copies of the list (the trainer's, and two that the worker flips between)
// and the rotating buffers of both. The library is WEIGHTWIRE_LIBNCCL's, else the one that is
// found.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/backends/nccl/backend.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/plan/coverage.hpp>
#include <weightwire/sources/span_source.hpp>

#include "../../benchmarks/support/device_weights.hpp"
#include "../../benchmarks/support/options.hpp"
#include "../../benchmarks/support/parameter_lists.hpp"
#include "../../benchmarks/support/process_pair.hpp"
#include "../support/allocations.hpp"
#include "../support/device_allocations.hpp"
#include "nccl_pair.hpp"

namespace {

using namespace weightwire;
using benchmarks::device_weights;

struct settings {
    std::int64_t layers = 8;
    std::uint64_t rounds = 10;
    std::uint64_t buffer_bytes = std::uint64_t{128} << 20U;
    bool two_devices = false;
};

/// Awkward ones after the real list: odd lengths before wide items, a scalar, nothing.
manifest list_of(std::int64_t layers) {
    std::vector<param_meta> list;
    for (auto& parameter : benchmarks::half_billion_list()) {
        const auto dot = parameter.name.find("layers.");
        const bool beyond =
            dot != std::string::npos && std::atoll(parameter.name.c_str() + dot + 7) >= layers;
        if (!beyond) {
            list.push_back(std::move(parameter));
        }
    }
    list.push_back({"awkward.odd", dtype::u8, {10'007}});
    list.push_back({"awkward.scalar", dtype::f32, {}});
    list.push_back({"awkward.none", dtype::bf16, {0, 4}});
    list.push_back({"awkward.flags", dtype::boolean, {33}});
    list.push_back({"awkward.wide", dtype::f64, {77, 5}});
    return manifest{std::move(list)};
}

struct source {
    static constexpr auto lifetime = tensor_lifetime::stable;
    std::vector<param_meta> list;
    std::vector<named_tensor> tensors;
    [[nodiscard]] const auto& metadata() const { return list; }
    [[nodiscard]] const auto& weights() const { return tensors; }
};

struct places {
    const device_weights* held;
    coverage seen;
    mutable_tensor_view open(std::size_t i, deadline) const { return held->views()[i]; }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline) {
        seen.wrote(i, offset, count);
    }
};

/// The texts that an init call would carry.
struct init_text {
    char wire[512]{};
    char transport[8192]{};
};

/// What one half took in one round.
struct taken {
    std::uint64_t host = 0;
    std::uint64_t device = 0;
};

/// Counts for the calling thread's half.
template <class Half>
taken count_while(Half half) {
    const auto device = weightwire_tests::device_allocations.load();
    const weightwire_tests::allocation_watch watch;
    half();
    return {watch.count(), weightwire_tests::device_allocations.load() - device};
}

/// What a worker tells of a round.
struct arrived {
    std::uint64_t digest = 0;  ///< 0: not all of it came
    taken cost;
};

deadline in_time() { return deadline::after(std::chrono::seconds{60}); }

void worker(tests::channel& parent, const settings& wanted) {
    const int device = nccl_pair::choose_device(1, !wanted.two_devices);
    const auto parameters = list_of(wanted.layers);
    const auto text = parent.take<init_text>();
    const device_weights flips[2]{{parameters, device}, {parameters, device}};
    nccl::receiver receiver{{.global_rank = 1, .world_size = 2, .device = device}};
    receiver.open(
        {.wire_parameters = text.wire, .transport = text.transport, .parameters = &parameters},
        in_time(), {});
    for (std::uint64_t round = 1; round <= wanted.rounds; ++round) {
        const auto& landing = flips[round % 2];
        landing.overwrite();
        parent.put(true);
        places to{&landing, coverage{parameters}};
        update_target target{to, parameters, 0, parameters.size()};
        arrived told;
        told.cost = count_while([&] {
            receiver.receive({.round = round, .count = parameters.size(), .native = true}, target,
                             in_time(), {});
        });
        told.digest = to.seen.all_whole() ? landing.digest() : std::uint64_t{0};
        parent.put(told);
    }
    parent.put(receiver.allocated_bytes());
    parent.put(receiver.table_bytes());
}

int trainer(tests::channel& child, const settings& wanted, bool packed) {
    const int device = nccl_pair::choose_device(0, !wanted.two_devices);
    const auto parameters = list_of(wanted.layers);
    const device_weights weights{parameters, device};
    source from;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        from.list.push_back(parameters[i]);
        from.tensors.push_back({.name = parameters[i].name, .tensor = weights.views()[i]});
    }
    const std::vector<tensor_view> stable(weights.views().begin(), weights.views().end());
    const char* const library = std::getenv("WEIGHTWIRE_LIBNCCL");
    const nccl::trainer_init_info info{.packed = packed,
                                       .packed_buffer_size_bytes = wanted.buffer_bytes,
                                       .device = device,
                                       .library = library != nullptr ? library : ""};
    nccl::sender sender{info};
    const std::vector<peer_info> peers{{.name = "worker", .native = true}};
    const auto inits = sender.prepare({.parameters = parameters,
                                       .peers = peers,
                                       .world_size = 2,
                                       .lifetime = tensor_lifetime::stable,
                                       .stable_tensors = stable});
    std::printf("%s\n", sender.description().c_str());
    init_text text;
    info.init_message().copy(text.wire, sizeof text.wire - 1);
    inits[0].native.copy(text.transport, sizeof text.transport - 1);
    child.put(text);
    sender.open(in_time(), {});
    int wrong = 0;
    for (std::uint64_t round = 1; round <= wanted.rounds; ++round) {
        weights.fill(round);
        const auto expected = weights.digest();
        static_cast<void>(child.take<bool>());
        round_of<source> all{from, parameters};
        auto tensors = all.stream();
        const auto begin = std::chrono::steady_clock::now();
        const auto cost = count_while([&] { sender.send(round, 0, tensors, in_time(), {}); });
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        const auto told = child.take<arrived>();
        const auto found = told.digest;
        wrong += found == expected ? 0 : 1;
        const auto from_host = cost.host + told.cost.host;
        const auto from_device = cost.device + told.cost.device;
        wrong += round < 3 || from_host + from_device == 0 ? 0 : 1;
        std::printf("round %2d  %8.3f ms  %6.2f GB/s  digest %016llx %s  %llu %llu\n",
                    static_cast<int>(round), took.count() * 1e3,
                    static_cast<double>(parameters.total_bytes()) / took.count() * 1e-9,
                    static_cast<unsigned long long>(found), found == expected ? "equal" : "DIFFERS",
                    static_cast<unsigned long long>(from_host),
                    static_cast<unsigned long long>(from_device));
    }
    std::printf("sender: buffers %llu, tables %llu bytes",
                static_cast<unsigned long long>(sender.allocated_bytes()),
                static_cast<unsigned long long>(sender.table_bytes()));
    const auto buffers = child.take<std::uint64_t>();
    const auto tables = child.take<std::uint64_t>();
    std::printf("; receiver: buffers %llu, tables %llu bytes\n",
                static_cast<unsigned long long>(buffers), static_cast<unsigned long long>(tables));
    return wrong;
}

}  // namespace

int main(int argc, char** argv) {
    settings wanted;
    if (!benchmarks::read_options("nccl_round", argc, argv,
                                  {{"--two-devices", &wanted.two_devices},
                                   {"--layers", &wanted.layers},
                                   {"--rounds", &wanted.rounds},
                                   {"--buffer", &wanted.buffer_bytes}})) {
        return 2;
    }
    int wrong = 0;
    for (const bool packed : {true, false}) {
        std::printf("%s, %lld layers, %s\n", packed ? "packed" : "unpacked",
                    static_cast<long long>(wanted.layers),
                    wanted.two_devices ? "two devices" : "one device");
        wrong += benchmarks::run_pair(
            "nccl_round", [&](tests::channel& child) { return trainer(child, wanted, packed); },
            [&](tests::channel& parent) { worker(parent, wanted); });
    }
    std::printf(wrong == 0 ? "all rounds are equal\n" : "%d rounds differ or failed\n", wrong);
    return wrong == 0 ? 0 : 1;
}

// Last, as its names are short: the operator new that counts.
#include "../support/allocations.cpp"
