#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <source_location>
#include <string>
#include <string_view>
#include <utility>

#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>

/// @file
/// From a status of the CUDA runtime to one of our errors.

namespace weightwire::gpu {

/// Throws where `status` is a failure; returns at once where it is none.
///
/// The runtime keeps the last error of a thread and hands it to whoever asks next; a failure that
/// is reported here is taken out of that place, so that it is never reported twice. An error of a
/// kernel that ran earlier cannot be taken back: every later call on the device fails with it.
///
/// @param status what the call returned.
/// @param operation the call's name, such as `cudaMalloc`.
/// @param context more of what is known: tensor, backend, phase. Its native members are replaced.
/// @throws unsupported_error the machine has no usable device or driver, or the device cannot do
/// it.
/// @throws resource_error everything else: memory, a lost device, a kernel that failed.
inline void check(cudaError_t status, std::string_view operation, error_context context = {},
                  std::source_location where = std::source_location::current()) {
    if (status == cudaSuccess) {
        return;
    }
    static_cast<void>(cudaGetLastError());
    context.operation = operation;
    context.native_code = static_cast<int>(status);
    context.native_text = std::string{cudaGetErrorName(status)} + ": " + cudaGetErrorString(status);
    switch (status) {
        case cudaErrorNoDevice:
        case cudaErrorInsufficientDriver:
        case cudaErrorStubLibrary:
            throw unsupported_error{
                "there is no usable CUDA device; look at the driver and at CUDA_VISIBLE_DEVICES",
                std::move(context), where};
        case cudaErrorNotSupported:
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorUnsupportedPtxVersion:
            throw unsupported_error{"the device or its driver cannot do this", std::move(context),
                                    where};
        case cudaErrorMemoryAllocation:
            throw resource_error{
                "out of device or pinned memory; free some or move in smaller parts",
                std::move(context), where};
        default: throw resource_error{"a call to CUDA failed", std::move(context), where};
    }
}

}  // namespace weightwire::gpu
