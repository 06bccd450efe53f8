#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string_view>

#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/nccl/pair_machinery.hpp>
#include <weightwire/fabrics/nccl/pull_options.hpp>
#include <weightwire/fabrics/nccl/pull_owner.hpp>
#include <weightwire/fabrics/nccl/pull_reader.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>

/// @file
/// A pull fabric over pairs of ranks that send and receive. `pull_fabric.hpp` has the one of NCCL.

namespace weightwire::nccl {

/// Models `PullFabric` over a machinery; with one that names a `within_node`, `HasWithinNode`.
/// Options are of the type: both sides are built with one.
template <PairMachinery M, PullOptions Options = default_pull_options>
struct basic_pull_fabric : weightwire::detail::within_node_of<M> {
    static_assert(fault_of(Options::value).empty(), "pull_options: fault_of() says what is wrong");
    static constexpr std::string_view name = "nccl";
    static constexpr fabric_capabilities capabilities{
        .host_memory = M::near_memory == memory_kind::host,
        .device_memory = M::near_memory != memory_kind::host,
        .across_machines = true};
    using owner = pull_owner<M, Options>;
    using arena = typename owner::arena;
    using reader = pull_reader<M, Options>;
    using connection = typename reader::connection;
    using memory = typename reader::memory;
    using read = typename reader::read;
};

}  // namespace weightwire::nccl
