#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/allocation_info.hpp>
#include <weightwire/gpu/check.hpp>

/// @file
/// What only the driver can tell of memory. Its functions are found through the runtime: nobody
/// links libcuda.

namespace weightwire::gpu {

namespace detail {

/// A function of the driver as of one version of CUDA, such as 12000.
/// @tparam Function its type, as `decltype(cuPointerGetAttributes)`.
/// @throws unsupported_error there is no driver, or it is too old to have the function.
template <class Function>
[[nodiscard]] Function* driver_function(const char* name, unsigned int version) {
    void* found = nullptr;
    auto state = cudaDriverEntryPointSymbolNotFound;
    check(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &state),
          "cudaGetDriverEntryPointByVersion");
    if (state != cudaDriverEntryPointSuccess || found == nullptr) {
        throw unsupported_error{"the driver of CUDA has no " + std::string{name} + "; update it"};
    }
    return reinterpret_cast<Function*>(found);
}

/// Throws where a call of the driver failed: its codes are the runtime's.
inline void check_driver(CUresult status, const char* operation) {
    check(static_cast<cudaError_t>(status), operation);
}

}  // namespace detail

/// The allocation that holds `address`: of any device of this process, and of any kind. Does not
/// wait. An address that CUDA does not know is no error.
/// @throws unsupported_error there is no driver, or it is too old.
/// @throws resource_error the device has failed.
[[nodiscard]] inline allocation_info allocation_of(const void* address) {
    static auto* const query =
        detail::driver_function<decltype(cuPointerGetAttributes)>("cuPointerGetAttributes", 12000);
    std::array<CUpointer_attribute, 9> asked{
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        CU_POINTER_ATTRIBUTE_BUFFER_ID,        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,   CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        CU_POINTER_ATTRIBUTE_IS_MANAGED,
    };
    // Answers have 1, 4 or 8 bytes; the others stay zero.
    std::array<std::uint64_t, asked.size()> answers{};
    std::array<void*, asked.size()> places{};
    for (std::size_t i = 0; i < places.size(); ++i) {
        places[i] = &answers[i];
    }
    const CUresult status = query(static_cast<unsigned int>(asked.size()), asked.data(),
                                  places.data(), reinterpret_cast<CUdeviceptr>(address));
    if (status == CUDA_ERROR_NOT_INITIALIZED || status == CUDA_ERROR_INVALID_CONTEXT) {
        return {};  // this process has no memory of CUDA, or none in which the address could lie
    }
    detail::check_driver(status, "cuPointerGetAttributes");
    const auto [type, device, base, bytes, buffer_id, handle_types, pool, has_handle, is_managed] =
        answers;
    if (type == 0) {
        return {};
    }
    auto place = type == CU_MEMORYTYPE_HOST ? allocation_place::host : allocation_place::device;
    if (is_managed != 0) {
        place = allocation_place::managed;
    }
    return {.place = place,
            .device = static_cast<int>(static_cast<std::uint32_t>(device)),
            .base = base,
            .bytes = bytes,
            .buffer_id = buffer_id,
            .handle_types = handle_types,
            .is_of_pool = pool != 0,
            .has_ipc_handle = has_handle != 0};
}

/// How many bytes of what is mapped at `address` follow it, also where another process allocated
/// it. The device that it was mapped for is current.
/// @throws unsupported_error there is no driver, or it is too old.
/// @throws resource_error nothing is mapped there, or the device has failed.
[[nodiscard]] inline std::uint64_t mapped_bytes_from(const void* address) {
    static auto* const query =
        detail::driver_function<decltype(cuMemGetAddressRange)>("cuMemGetAddressRange", 12000);
    CUdeviceptr base = 0;
    std::size_t bytes = 0;
    const auto at = reinterpret_cast<CUdeviceptr>(address);
    detail::check_driver(query(&base, &bytes, at), "cuMemGetAddressRange");
    return at >= base && at - base <= bytes ? bytes - (at - base) : 0;
}

}  // namespace weightwire::gpu
