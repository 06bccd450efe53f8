#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cuda_runtime_api.h>

#include <weightwire/gpu/check.hpp>

/// @file
/// The calling thread's current device, changed for a scope.

namespace weightwire::gpu {

/// Devices of this process; 0 where there is no driver or no device, which is no error here.
[[nodiscard]] inline int device_count() noexcept {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return 0;
    }
    return count;
}

/// The calling thread's current device.
/// @throws unsupported_error there is none.
[[nodiscard]] inline int current_device() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    return device;
}

/// One number that the runtime knows of a device.
[[nodiscard]] inline int device_attribute(cudaDeviceAttr attribute, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    return value;
}

/// Major and minor compute capability in one number: 90 for 9.0.
[[nodiscard]] inline int compute_capability(int device) {
    return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
           device_attribute(cudaDevAttrComputeCapabilityMinor, device);
}

namespace detail {

/// Whether this process uses `device` already, asked without beginning to. Yes where the driver
/// cannot be asked.
[[nodiscard]] inline bool has_primary_context(int device) noexcept {
    using query_type = int (*)(int device, unsigned int* flags, int* active);
    void* query = nullptr;
    auto found = cudaDriverEntryPointSymbolNotFound;
    const auto asked = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &query, 7000,
                                                        cudaEnableDefault, &found);
    if (asked != cudaSuccess || found != cudaDriverEntryPointSuccess || query == nullptr) {
        static_cast<void>(cudaGetLastError());
        return true;
    }
    unsigned int flags = 0;
    int active = 1;
    return reinterpret_cast<query_type>(query)(device, &flags, &active) != 0 || active != 0;
}

}  // namespace detail

/// Makes `device` current for the calling thread until the end of the scope, then the former one
/// again. Cheap where it already is current. Not for use across threads.
///
/// A former device that this process does not use does not become current again, since that would
/// make a context on it, of hundreds of megabytes. It can only be the one that a thread has by
/// default: `cudaSetDevice` makes the context of the device that it chooses.
class device_guard {
public:
    /// @throws resource_error, unsupported_error the device does not exist or cannot be used.
    explicit device_guard(int device) : former_{current_device()}, changed_{device != former_} {
        if (changed_) {
            check(cudaSetDevice(device), "cudaSetDevice");
        }
    }
    ~device_guard() {
        if (changed_ && detail::has_primary_context(former_)) {
            static_cast<void>(cudaSetDevice(former_));
        }
    }
    device_guard(const device_guard&) = delete;
    device_guard& operator=(const device_guard&) = delete;

private:
    int former_;
    bool changed_;
};

}  // namespace weightwire::gpu
