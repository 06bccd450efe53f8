#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string_view>

#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/ucx/device_machinery.hpp>
#include <weightwire/fabrics/ucx/device_owner.hpp>
#include <weightwire/fabrics/ucx/device_reader.hpp>
#include <weightwire/fabrics/ucx/memory.hpp>
#include <weightwire/fabrics/ucx/reader.hpp>

/// @file
/// The UCX fabric of device memory over any machinery; needs no CUDA itself.

namespace weightwire::ucx {

/// Models `PullFabric`; with a machinery that names one, `HasWithinNode`.
template <DeviceMachinery M>
struct basic_device_fabric : weightwire::detail::within_node_of<M> {
    static constexpr std::string_view name = "ucx_device";
    static constexpr fabric_capabilities capabilities{.device_memory = true,
                                                      .across_machines = true};
    using owner = basic_device_owner<M>;
    using arena = typename owner::arena_type;
    using connection = ucx::connection;
    using memory = ucx::memory;
    using reader = basic_device_reader<M>;
    using read = typename reader::read;
};

}  // namespace weightwire::ucx
