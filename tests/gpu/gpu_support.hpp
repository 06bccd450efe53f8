#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernels/copy.hpp>

namespace gpu_support {

namespace gpu = weightwire::gpu;

/// Whether there is a device; where there is none, `test` is a skip by name.
[[nodiscard]] inline bool have_device(const char* test) {
    if (gpu::device_count() > 0) {
        return true;
    }
    std::printf("SKIP %s: this machine has no CUDA device\n", test);
    return false;
}

/// The forms that device 0 has.
[[nodiscard]] inline std::vector<gpu::copy_form> forms() {
    std::vector<gpu::copy_form> list{gpu::copy_form::plain};
    if (gpu::compute_capability(0) >= 90) {
        list.push_back(gpu::copy_form::bulk);
    }
    return list;
}

[[nodiscard]] inline std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
    std::mt19937_64 random{seed};
    std::vector<std::byte> bytes(count);
    for (std::byte& byte : bytes) {
        byte = static_cast<std::byte>(random() & 0xffU);
    }
    return bytes;
}

inline void upload(const gpu::device_buffer& to, std::span<const std::byte> bytes) {
    gpu::check(cudaMemcpy(to.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
               "cudaMemcpy");
    gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

[[nodiscard]] inline std::vector<std::byte> download(const gpu::device_buffer& from) {
    std::vector<std::byte> bytes(from.size());
    gpu::check(cudaMemcpy(bytes.data(), from.data(), bytes.size(), cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    return bytes;
}

}  // namespace gpu_support
