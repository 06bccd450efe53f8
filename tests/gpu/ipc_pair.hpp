#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/backends/cuda_ipc/cuda_machinery.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/process.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernel.hpp>
#include <weightwire/gpu/stream.hpp>

#include "../support/forked.hpp"

/// @file
/// An exporter and an importer as processes of their own, on device 0. A process that has used CUDA
/// cannot be forked, so whoever forks them does not touch the device itself.

namespace ipc_pair {

namespace gpu = weightwire::gpu;
namespace cuda_ipc = weightwire::cuda_ipc;
using tests::channel;

/// An export as it goes through a pipe.
struct sent_export {
    std::array<char, gpu::ipc_handle_bytes> handle{};
    std::uint64_t base = 0;
    std::uint64_t bytes = 0;
    std::uint64_t buffer_id = 0;
    std::int64_t pid = 0;
    std::uint64_t start_time = 0;

    [[nodiscard]] cuda_ipc::exporter from() const { return {pid, start_time}; }
    [[nodiscard]] cuda_ipc::exported_allocation what() const {
        return {.handle = std::string{handle.data(), handle.size()},
                .base = base,
                .bytes = bytes,
                .buffer_id = buffer_id};
    }
};

[[nodiscard]] inline sent_export sent(const cuda_ipc::exported_allocation& made) {
    if (made.handle.size() != gpu::ipc_handle_bytes) {
        throw std::runtime_error{"a handle has " + std::to_string(made.handle.size()) + " bytes"};
    }
    const auto self = weightwire::shm::this_process();
    sent_export out{.handle = {},
                    .base = made.base,
                    .bytes = made.bytes,
                    .buffer_id = made.buffer_id,
                    .pid = self.pid,
                    .start_time = self.start_time};
    std::copy(made.handle.begin(), made.handle.end(), out.handle.begin());
    return out;
}

/// Exports, or throws the words why not.
[[nodiscard]] inline sent_export exported(cuda_ipc::cuda_machinery& machine,
                                          const std::byte* address, std::size_t bytes) {
    const auto made = machine.export_of(address, bytes);
    if (const auto* const why = std::get_if<std::string>(&made); why != nullptr) {
        throw std::runtime_error{*why};
    }
    return sent(std::get<cuda_ipc::exported_allocation>(made));
}

/// A process that runs `body(channel&)`. What it throws goes to the error output, and the process
/// ends: the parent then finds the channel closed.
template <class Body>
[[nodiscard]] auto told(Body body) {
    return [body](channel& parent) {
        try {
            body(parent);
        } catch (const std::exception& failed) {
            std::fprintf(stderr, "a process of the test ended: %s\n", failed.what());
            ::_exit(1);
        }
    };
}

/// Devices, as a fresh process sees them.
[[nodiscard]] inline int usable_devices() {
    tests::forked probe{[](channel& parent) { parent.put(gpu::device_count()); }};
    return probe.to().take<int>();
}

/// Writes words that follow from `seed` and their place: no two seeds agree.
class filler {
public:
    filler() : kernel_{gpu::load_kernel({.name = "ipc_fill", .text = text, .options = {}}, 0)} {}

    void fill(std::byte* to, std::uint64_t bytes, std::uint64_t seed, gpu::stream_ref on) const {
        const gpu::device_guard guard{0};
        kernel_.launch(
            on, {.blocks = 1024, .threads = 256}, reinterpret_cast<unsigned long long*>(to),
            static_cast<unsigned long long>(bytes / 8), static_cast<unsigned long long>(seed));
    }

private:
    static constexpr const char* text = R"cuda(
typedef unsigned long long u64;
extern "C" __global__ void ipc_fill(u64* to, u64 words, u64 seed) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < words;
         i += (u64)gridDim.x * blockDim.x) {
        u64 v = i + seed * 0x9E3779B97F4A7C15ull;
        v ^= v >> 33; v *= 0xff51afd7ed558ccdull; v ^= v >> 33; v *= 0xc4ceb9fe1a85ec53ull;
        to[i] = v ^ (v >> 33);
    }
}
)cuda";
    gpu::kernel kernel_;
};

/// Bytes on device 0.
struct device_bytes {
    const std::byte* data = nullptr;
    std::uint64_t bytes = 0;
};

/// Their digests.
[[nodiscard]] inline std::vector<std::uint64_t> digests_of(cuda_ipc::cuda_machinery& machine,
                                                           std::span<const device_bytes> list) {
    std::vector<weightwire::tensor_view> tensors;
    for (const device_bytes& each : list) {
        tensors.push_back({each.data,
                           weightwire::dtype::u8,
                           {static_cast<std::int64_t>(each.bytes)},
                           {weightwire::memory_kind::cuda, 0}});
    }
    std::vector<std::uint64_t> results(list.size());
    machine.digests(tensors, results, weightwire::deadline::after(std::chrono::seconds{20}),
                    std::stop_token{});
    return results;
}
[[nodiscard]] inline std::uint64_t digest_of(cuda_ipc::cuda_machinery& machine,
                                             const std::byte* data, std::uint64_t bytes) {
    const device_bytes one{data, bytes};
    return digests_of(machine, std::span{&one, 1})[0];
}

/// Polls an event, at most 20 s.
inline void wait_for(const cuda_ipc::cuda_machinery& machine,
                     const cuda_ipc::cuda_machinery::event& point) {
    const auto until = weightwire::deadline::after(std::chrono::seconds{20});
    while (!machine.is_done(point)) {
        if (until.expired()) {
            throw std::runtime_error{"the device did not come to the end of its work in 20 s"};
        }
        std::this_thread::sleep_for(std::chrono::microseconds{50});
    }
}

/// Copies runs in one launch and waits for it.
inline void copy_now(cuda_ipc::cuda_machinery& machine,
                     const std::vector<cuda_ipc::byte_move>& moves) {
    const std::vector<std::vector<cuda_ipc::byte_move>> groups{moves};
    const auto plan = machine.make_copies(groups);
    const auto stream = machine.make_stream();
    auto done = machine.make_event();
    plan.launch(0, stream);
    machine.record(done, stream);
    wait_for(machine, done);
}

/// Whether the device still does what it is told.
[[nodiscard]] inline bool is_device_usable() {
    void* memory = nullptr;
    const bool usable = cudaMalloc(&memory, std::size_t{1} << 20U) == cudaSuccess &&
                        cudaMemset(memory, 1, std::size_t{1} << 20U) == cudaSuccess &&
                        cudaDeviceSynchronize() == cudaSuccess && cudaFree(memory) == cudaSuccess;
    return usable && cudaGetLastError() == cudaSuccess;
}

}  // namespace ipc_pair
