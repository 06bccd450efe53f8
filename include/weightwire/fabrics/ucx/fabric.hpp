#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string_view>

#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/shared_memory_fabric.hpp>
#include <weightwire/fabrics/ucx/host_staging.hpp>
#include <weightwire/fabrics/ucx/owner.hpp>
#include <weightwire/fabrics/ucx/reader.hpp>
#include <weightwire/fabrics/ucx/transfers.hpp>

/// @file
/// A pull fabric over UCX: one-sided reads between machines, over InfiniBand, RoCE or tcp, whatever
/// UCX finds. Link weightwire-ucx.
///
/// On one machine shared memory is faster: of UCX's transports only those that report a lost peer
/// are used, and its own shared memory is not among them.

namespace weightwire::ucx {

/// Models `PullFabric` over a kind of memory.
template <class Staging>
struct basic_fabric {
    static constexpr std::string_view name = "ucx";
    static constexpr fabric_capabilities capabilities{
        .host_memory = true, .device_memory = Staging::device_memory, .across_machines = true};
    using owner = basic_owner<Staging>;
    using arena = typename owner::arena_type;
    using connection = ucx::connection;
    using memory = ucx::memory;
    using reader = basic_reader<Staging>;
    using read = typename reader::read;
    /// What ranks of one machine need alike enters it once, and fans out over its shared memory.
    using within_node = shm::fabric;
};

/// Tensors in host memory.
using fabric = basic_fabric<host_staging>;

static_assert(explain_pull_fabric<fabric>());
static_assert(HasFabricService<fabric::owner> && HasWithinNode<fabric>);

}  // namespace weightwire::ucx
