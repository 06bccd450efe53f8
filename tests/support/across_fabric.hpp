#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string_view>

#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/shared_memory_fabric.hpp>

/// @file
/// A fabric between machines, as a test has it on one.

namespace tests {

/// Shared memory that says it crosses machines and reads packed chunks; within a node it is shared
/// memory itself.
struct across_fabric : weightwire::shm::fabric {
    static constexpr std::string_view name = "across";
    static constexpr weightwire::fabric_capabilities capabilities{.host_memory = true,
                                                                  .across_machines = true};
    using within_node = weightwire::shm::fabric;
};
static_assert(weightwire::explain_pull_fabric<across_fabric>());
static_assert(weightwire::HasWithinNode<across_fabric>);

}  // namespace tests
