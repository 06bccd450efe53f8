#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <weightwire/fabrics/pull_fabric.hpp>

/// @file
/// The memory in which a worker rank lands chunks for its node, and where it lies between two inits
/// of one trainer.

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
template <PullFabric Node>
struct landing_memory {
    std::uint64_t trainer = 0;  ///< rank 0's nonce, of the trainer that it was shown to
    int rank = 0;               ///< in the transfer group
    std::unique_ptr<typename Node::owner> owner{};
    typename Node::arena arena{};
};

/// Where ranks leave their landing memory when a trainer that may come back lets go of them. Their
/// node peers, who were not let go of, have it open; a trainer's next round begins when nobody that
/// may commit the last one reads it any more. Not so another trainer's, which gets other memory.
/// Thread-safe.
template <PullFabric Node>
class landing_shelf {
public:
    using memory = landing_memory<Node>;

    void put(memory&& left) noexcept {
        const std::lock_guard lock{mutex_};
        try {
            kept_.push_back(std::move(left));
        } catch (...) {  // NOLINT(bugprone-empty-catch): it is made anew then
        }
    }
    /// What the rank left for this trainer; what it left for another is freed.
    [[nodiscard]] std::optional<memory> take(std::uint64_t trainer, int rank) {
        const std::lock_guard lock{mutex_};
        const auto found = std::ranges::find(kept_, rank, &memory::rank);
        if (found == kept_.end()) {
            return std::nullopt;
        }
        auto made = std::move(*found);
        kept_.erase(found);
        return made.trainer == trainer ? std::optional{std::move(made)} : std::nullopt;
    }

private:
    std::mutex mutex_;
    std::vector<memory> kept_;
};

}  // namespace weightwire::sharded_pull
