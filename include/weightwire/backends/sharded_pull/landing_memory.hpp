#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <memory>

#include <weightwire/fabrics/pull_fabric.hpp>

/// @file
/// The memory in which a worker rank lands chunks for its node.

namespace weightwire::sharded_pull {

namespace detail {

/// The fabric within a node; one that is never used where a fabric names none.
template <class Fabric>
struct within_node {
    using type = archetypes::pull_fabric;
};
template <HasWithinNode Fabric>
struct within_node<Fabric> {
    using type = typename Fabric::within_node;
};

}  // namespace detail

/// Of one worker rank, as its node peers have it open.
///
/// It is kept between two inits of one trainer: the node peers, who may not have been let go of,
/// read it as before, and that trainer begins a round only when nobody that may still commit the
/// last one reads any more. Another trainer, which knows nothing of that, gets other memory.
template <PullFabric Node>
struct landing_memory {
    std::uint64_t trainer = 0;  ///< rank 0's nonce, of the trainer that it was shown to
    std::unique_ptr<typename Node::owner> owner{};
    typename Node::arena arena{};
};

}  // namespace weightwire::sharded_pull
