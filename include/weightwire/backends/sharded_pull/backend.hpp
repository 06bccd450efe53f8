#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string_view>

#include <weightwire/backends/sharded_pull/init_info.hpp>
#include <weightwire/backends/sharded_pull/receiver.hpp>
#include <weightwire/backends/sharded_pull/sender.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/shared_memory_arena.hpp>
#include <weightwire/fabrics/shared_memory_fabric.hpp>

/// @file
/// The `sharded_pull` backend: every worker rank reads the bytes that it keeps, from whichever
/// trainer rank holds them. Over host memory that they share; other fabrics plug in.

namespace weightwire {

/// `sharded_pull` over any fabric, spoken to weightwire's own workers only. That both sides have
/// one fabric is agreed on at init.
template <PullFabric Fabric>
struct backend_traits<sharded_pull::basic_backend<Fabric>> {
    static constexpr std::string_view wire_name = "sharded_pull";
    /// One-sided in that the end of rank 0's `send` says nothing of when the workers are done.
    static constexpr transport_capabilities capabilities{
        .host_memory = Fabric::capabilities.host_memory,
        .device_memory = Fabric::capabilities.device_memory,
        .one_sided = true,
        .drops_peers = true,
        .speaks_vllm = false,
        .sharded = true};
    using init_info = sharded_pull::basic_trainer_init_info<Fabric>;
    using sender = sharded_pull::basic_sender<Fabric>;
    using receiver = sharded_pull::basic_receiver<Fabric>;
};

namespace sharded_pull {

/// Over host memory of one machine.
using shared_memory_backend = basic_backend<shm::fabric>;
using shared_memory_trainer_init_info = basic_trainer_init_info<shm::fabric>;

}  // namespace sharded_pull

static_assert(explain_transport<sharded_pull::shared_memory_backend>());
static_assert(HasRankExports<sharded_pull::basic_sender<shm::fabric>> &&
              HasDropPeer<sharded_pull::basic_sender<shm::fabric>>);

}  // namespace weightwire
