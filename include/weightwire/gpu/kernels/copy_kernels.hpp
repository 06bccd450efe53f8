#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernel.hpp>
#include <weightwire/gpu/kernels/copy_source.hpp>

/// @file
/// The kernels of copies, made ready before they are needed.

namespace weightwire::gpu {

/// Compiles all forms of copies that `device` has and loads them onto it: the driver may hold up a
/// kernel's first load until others have ended, and those may wait for a peer.
/// @throws unsupported_error NVRTC is missing, or cannot compile for the device.
inline void load_copy_kernels(int device) {
    static_cast<void>(load_kernel(copy_plain_source(), device));
    if (compute_capability(device) >= 90) {
        const auto bulk = load_kernel(copy_bulk_source(), device);
        const device_guard guard{device};
        bulk.allow_shared_bytes(bulk_shared_bytes);
    }
}

}  // namespace weightwire::gpu
