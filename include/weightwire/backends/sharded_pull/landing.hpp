#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/control_channel.hpp>
#include <weightwire/backends/sharded_pull/landing_memory.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/wire/pull_node_codec.hpp>

/// @file
/// What a worker rank has to do with the others of its node: memory in which it lands chunks for
/// them, and theirs.
///
/// A landing slot that is in use is being filled from an owner's slot, or is being read by ranks
/// that were told of it. Neither waits for another landing slot: who is told of a chunk reads it at
/// once. So every slot is released in the end, and those who wait for one get it; nothing that is
/// added here may make a read out of landing memory wait for anything.

namespace weightwire::sharded_pull {

/// One rank's landing memory and what it has opened of others. One thread at a time.
template <PullFabric Node>
class node_landing {
public:
    using memory = typename Node::memory;
    using kept_memory = landing_memory<Node>;

    /// What lies in a landing slot.
    struct occupant {
        std::size_t unit = 0;
        bool used = false;
        bool landed = false;  ///< its node peers were told of it
    };
    /// A chunk that waits for its landing slot.
    struct waiting_chunk {
        std::size_t unit = 0;
        std::size_t slot = 0;
        chunk_body published{};
    };

    explicit node_landing(int device) : reader_{device} {}

    /// Makes the landing memory for `chunks` chunks a round, or takes what was kept of that size,
    /// and opens it as a node peer does.
    /// @param most_bytes of memory; but `least` slots are made, and no more than there are chunks.
    /// @param least one an owner: so a node peer that hangs is let go by all owners at once, and
    /// not by one after the other.
    /// @throws resource_error there is no memory.
    void make(int device, std::uint64_t slot_bytes, std::uint64_t most_bytes, std::size_t least,
              std::size_t chunks, int worker, std::optional<kept_memory> kept, deadline until,
              const std::stop_token& stop) {
        const auto slots = std::clamp<std::uint64_t>(most_bytes / slot_bytes, least, chunks);
        if (kept && kept->arena.size() == slots * slot_bytes) {
            own_ = std::move(*kept);
        } else {
            kept.reset();  // first: both may not fit
            own_.owner = std::make_unique<typename Node::owner>(device);
            own_.arena = own_.owner->allocate(slots * slot_bytes);
        }
        slots_.assign(static_cast<std::size_t>(slots), {});
        waiting_.reserve(chunks);
        open(exported(worker), until, stop);
    }
    /// What the others have to know of it.
    [[nodiscard]] wire::worker_landing exported(int worker) const {
        const auto named = own_.arena.exported();
        return {.worker = worker,
                .address = own_.owner->address(),
                .handle = named.handle,
                .bytes = named.bytes};
    }
    /// @throws what the fabric throws where it does not reach the memory.
    void open(const wire::worker_landing& named, deadline until, const std::stop_token& stop) {
        auto& made = peers_.emplace_back();
        made.worker = named.worker;
        made.connection.emplace(reader_.connect(named.address, until, stop));
        made.opened.emplace(reader_.open(*made.connection, named.handle, named.bytes, until, stop));
    }
    /// What was opened of a worker; null where it has none.
    [[nodiscard]] const memory* of(int worker) const {
        const auto found = std::ranges::find(peers_, worker, &peer::worker);
        return found == peers_.end() ? nullptr : &*found->opened;
    }

    [[nodiscard]] typename Node::reader& reader() noexcept { return reader_; }
    [[nodiscard]] const typename Node::reader& reader() const noexcept { return reader_; }
    [[nodiscard]] std::byte* data() const noexcept { return own_.arena.data(); }
    /// Bytes of the landing memory.
    [[nodiscard]] std::uint64_t size() const noexcept { return own_.arena.size(); }
    /// The landing memory, for the next init; nothing where there is none. Ends the use of this.
    [[nodiscard]] std::optional<kept_memory> leave(std::uint64_t trainer) noexcept {
        if (own_.owner == nullptr) {
            return std::nullopt;
        }
        own_.trainer = trainer;
        return std::move(own_);
    }
    [[nodiscard]] std::span<occupant> slots() noexcept { return slots_; }
    [[nodiscard]] std::vector<waiting_chunk>& waiting() noexcept { return waiting_; }

    /// A round begins: what landed in the one before is read by nobody that may commit it.
    void begin_round() noexcept {
        std::ranges::fill(slots_, occupant{});
        waiting_.clear();
    }

private:
    struct peer {
        int worker = 0;
        std::optional<typename Node::connection> connection{};
        std::optional<memory> opened{};
    };

    typename Node::reader reader_;
    kept_memory own_;
    std::deque<peer> peers_;  ///< this rank too, where it lands something
    std::vector<occupant> slots_;
    std::vector<waiting_chunk> waiting_;
};

}  // namespace weightwire::sharded_pull
