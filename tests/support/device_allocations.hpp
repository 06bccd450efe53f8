#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

/// @file
/// Counts what the process takes from the CUDA runtime, device and pinned memory alike: the
/// runtime's functions of these names are found behind ours. Include it in one translation unit of
/// a program that is linked to the runtime's shared library.

namespace weightwire_tests {

/// Of all threads, so far.
inline std::atomic<std::uint64_t> device_allocations{0};

template <class Function>
Function next_symbol(const char* name) {
    return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace weightwire_tests

extern "C" {

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
    ++weightwire_tests::device_allocations;
    static const auto next =
        weightwire_tests::next_symbol<cudaError_t (*)(void**, std::size_t)>("cudaMalloc");
    return next(memory, bytes);
}
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t on) {
    ++weightwire_tests::device_allocations;
    static const auto next =
        weightwire_tests::next_symbol<cudaError_t (*)(void**, std::size_t, cudaStream_t)>(
            "cudaMallocAsync");
    return next(memory, bytes, on);
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned int flags) {
    ++weightwire_tests::device_allocations;
    static const auto next =
        weightwire_tests::next_symbol<cudaError_t (*)(void**, std::size_t, unsigned int)>(
            "cudaHostAlloc");
    return next(memory, bytes, flags);
}
cudaError_t cudaMallocHost(void** memory, std::size_t bytes) {
    ++weightwire_tests::device_allocations;
    static const auto next =
        weightwire_tests::next_symbol<cudaError_t (*)(void**, std::size_t)>("cudaMallocHost");
    return next(memory, bytes);
}

}  // extern "C"
