#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <cstdlib>
#include <string>

#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/nccl_api/library.hpp>

#include "../support/forked.hpp"

/// @file
/// Ranks as processes of their own, on one device or on two. A process that has used CUDA cannot be
/// forked, so whoever forks ranks does not touch the device itself.

namespace nccl_pair {

/// Before the first use of NCCL and CUDA in a rank's process. Two ranks share one GPU when NCCL
/// takes them for two hosts; they then speak through loopback sockets.
inline int choose_device(int rank, bool one_device) {
    ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    ::setenv("NCCL_NVLS_ENABLE", "0", 1);
    if (one_device) {
        ::setenv("NCCL_HOSTID", ("weightwire-" + std::to_string(::getpid())).c_str(), 1);
        ::setenv("NCCL_NET", "Socket", 1);
    }
    const int device = one_device ? 0 : rank;
    weightwire::gpu::check(cudaSetDevice(device), "cudaSetDevice");
    weightwire::gpu::check(cudaFree(nullptr), "cudaFree");
    return device;
}

/// The libnccl that WEIGHTWIRE_LIBNCCL names, else the one that is found.
[[nodiscard]] inline weightwire::nccl_api::library open_library() {
    const char* path = std::getenv("WEIGHTWIRE_LIBNCCL");
    return weightwire::nccl_api::library::open(path != nullptr ? path : "");
}

/// What a fresh process sees: its number of devices, and 0 where NCCL is missing.
[[nodiscard]] inline int usable_devices() {
    tests::forked probe{[](tests::channel& parent) {
        int count = weightwire::gpu::device_count();
        try {
            static_cast<void>(open_library());
        } catch (const weightwire::error&) {
            count = 0;
        }
        parent.put(count);
    }};
    return probe.to().take<int>();
}

}  // namespace nccl_pair
