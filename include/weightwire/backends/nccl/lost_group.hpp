#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string>
#include <utility>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/lost_devices.hpp>

/// @file
/// What follows for both halves of `nccl` from a group that could not be ended.

namespace weightwire::nccl::detail {

/// Refuses to begin on a device where a group was lost: its last broadcast may still read what the
/// trainer changes next, or write over the weights of a later version.
/// @throws resource_error
inline void require_no_loss(int device, error_context where) {
    if (gpu::lost_devices::has(device)) {
        throw resource_error{"an earlier group on device " + std::to_string(device) +
                                 " could not be ended and may use memory there at any later "
                                 "time; restart this process",
                             std::move(where)};
    }
}

}  // namespace weightwire::nccl::detail
