#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/backends/ipc/control_block.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// The worker ranks as a sender sees them: who has read how far, who is waited for.

namespace weightwire::ipc {

/// A round under way at the sender. Positions are relative to `base`.
struct sending {
    std::uint64_t base = 0;       ///< position of the round's begin
    std::uint64_t length = 0;     ///< position of its end
    std::uint64_t written = 0;    ///< end of what was written
    std::uint64_t published = 0;  ///< of that, what workers know of
    std::size_t parameter = 0;    ///< being sent
    deadline until;
    std::stop_token stop;
};

/// Tells the ranks how far they may read, and waits until they have. Allocates nothing in a round.
/// `drop` may be called from any thread; the rest belongs to the sender's.
class readers {
public:
    /// The ranks of `peers` in a world of `world_size`, the sender included.
    /// @throws unsupported_error a peer that is not ours. @throws usage_error ranks that do not
    /// fit.
    void adopt(std::span<const peer_info> peers, int world_size);
    /// Speaks through `block` from now on, which has a slot for each rank; an empty one: to nobody.
    void attach(control_block block) noexcept { control_ = block; }

    [[nodiscard]] bool attached() const noexcept { return bool{control_}; }
    [[nodiscard]] std::size_t peers() const noexcept { return peers_.size(); }
    [[nodiscard]] std::size_t ranks() const noexcept { return ranks_; }

    /// The round of `at` begins.
    void begin(const sending& at) const noexcept {
        control_.header().produced.store(at.base, std::memory_order_seq_cst);
    }
    /// Everything up to `at.written` may be read.
    void publish(sending& at) const noexcept;
    /// Every position below `position` is over. Workers that are still there find out; those that
    /// wait are woken when `wake`.
    void end(std::uint64_t position, bool wake) const noexcept;

    /// How far the slowest rank has read that is waited for; the largest number when there is none.
    /// @throws protocol_error a rank claims more than was written.
    [[nodiscard]] std::uint64_t slowest(const sending& at) const;
    /// Waits until every rank has read up to `needed`; once asleep, until `comfortable`, so that a
    /// full ring does not cost a wake-up a piece. A peer that hangs while another is there is
    /// dropped after half of the time that is left.
    /// @throws timeout_error names the slowest. @throws cancelled_error, protocol_error.
    void wait(std::uint64_t needed, std::uint64_t comfortable, const sending& at);

    /// No rank of `peer` is waited for from now on, and its ranks learn it.
    void drop(std::size_t peer) noexcept;
    void restore(std::size_t peer);

private:
    /// Peer `name` has slots `[first, first + count)`.
    struct peer_slots {
        std::string name;
        std::size_t first = 0;
        std::size_t count = 0;
    };

    [[nodiscard]] std::uint64_t read_by(std::size_t slot, const sending& at) const noexcept {
        const auto position = control_.slot(slot).consumed.load(std::memory_order_seq_cst);
        return position < at.base ? 0 : position - at.base;
    }
    [[nodiscard]] bool waited_for(std::size_t slot) const noexcept {
        return !dropped_[slot].load(std::memory_order_acquire);
    }
    /// Calls `visit(peer, slot)` for every rank that is waited for.
    template <class Visit>
    void each_rank(Visit visit) const {
        for (const auto& peer : peers_) {
            for (std::size_t i = peer.first; i < peer.first + peer.count; ++i) {
                if (waited_for(i)) {
                    visit(peer, i);
                }
            }
        }
    }
    bool leave_behind(std::uint64_t position, const sending& at) noexcept;
    [[nodiscard]] error_context slowest_context(const sending& at) const;

    control_block control_;
    std::vector<peer_slots> peers_;
    std::size_t ranks_ = 0;
    /// Our own word on who was dropped; what the control block says is for the worker.
    std::unique_ptr<std::atomic<bool>[]> dropped_;
};

inline void readers::adopt(std::span<const peer_info> peers, int world_size) {
    ranks_ = static_cast<std::size_t>(std::max(world_size - 1, 0));
    peers_.clear();
    for (const auto& peer : peers) {
        const error_context context{.phase = phase::init, .peer = peer.name, .backend = "ipc"};
        if (!peer.native) {
            throw unsupported_error{
                "host memory travels over ipc only to weightwire's own workers; this peer is none",
                context};
        }
        const auto first = static_cast<std::size_t>(std::max(peer.rank_offset - 1, 0));
        const auto count = static_cast<std::size_t>(std::max(peer.world_size, 0));
        if (peer.rank_offset < 1 || first > ranks_ || count > ranks_ - first) {
            throw usage_error{
                "the peer's ranks are not in a world of " + std::to_string(world_size), context};
        }
        peers_.push_back({.name = peer.name, .first = first, .count = count});
    }
    dropped_ = std::make_unique<std::atomic<bool>[]>(ranks_);
}

inline void readers::publish(sending& at) const noexcept {
    auto& header = control_.header();
    at.published = at.written;
    header.produced.store(at.base + at.written, std::memory_order_seq_cst);
    if (header.worker_sleeps.load(std::memory_order_seq_cst) != 0) {
        header.worker_sleeps.store(0, std::memory_order_seq_cst);
        detail::ring(header.worker_bell);
    }
}

inline void readers::end(std::uint64_t position, bool wake) const noexcept {
    if (control_) {
        control_.header().trainer_awaits.store(0, std::memory_order_seq_cst);
        control_.header().over.store(position, std::memory_order_seq_cst);
        if (wake) {
            detail::ring(control_.header().worker_bell);
        }
    }
}

inline std::uint64_t readers::slowest(const sending& at) const {
    auto least = std::numeric_limits<std::uint64_t>::max();
    each_rank([&](const peer_slots& peer, std::size_t slot) {
        const auto read = read_by(slot, at);
        if (read > at.published) {
            throw protocol_error{"a worker claims to have read " + std::to_string(read) + " of " +
                                     std::to_string(at.published) + " positions that were written",
                                 {.phase = phase::update,
                                  .peer = peer.name,
                                  .backend = "ipc",
                                  .rank = static_cast<int>(slot) + 1}};
        }
        least = std::min(least, read);
    });
    return least;
}

inline void readers::wait(std::uint64_t needed, std::uint64_t comfortable, const sending& at) {
    auto& header = control_.header();
    auto enough = [&] { return slowest(at) >= needed; };
    if (detail::spin_until(enough)) {
        return;
    }
    const auto patience = deadline::after(at.until.remaining() / 2);
    while (slowest(at) < comfortable) {
        detail::check_time(at.until, at.stop, [&] { return slowest_context(at); });
        if (patience.expired() && leave_behind(comfortable, at)) {
            continue;
        }
        header.trainer_awaits.store(at.base + comfortable, std::memory_order_seq_cst);
        const auto bell = header.trainer_bell.load(std::memory_order_seq_cst);
        if (slowest(at) < comfortable) {
            detail::sleep_while(header.trainer_bell, bell, detail::slice);
        }
    }
    header.trainer_awaits.store(0, std::memory_order_seq_cst);
}

/// Drops the peers that are short of `position` while another is there with all its ranks: one that
/// hangs costs half of the time that was left, and the others get the rest. Returns whether there
/// was one to drop.
inline bool readers::leave_behind(std::uint64_t position, const sending& at) noexcept {
    const auto is_there = [&](const peer_slots& peer) {
        bool there = true;
        for (std::size_t i = peer.first; i < peer.first + peer.count; ++i) {
            there = there && read_by(i, at) >= position;
        }
        return there;
    };
    const auto counts = [&](const peer_slots& peer) {
        return peer.count != 0 && waited_for(peer.first);
    };
    if (std::none_of(peers_.begin(), peers_.end(),
                     [&](const peer_slots& peer) { return counts(peer) && is_there(peer); })) {
        return false;
    }
    bool left = false;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
        if (counts(peers_[i]) && !is_there(peers_[i])) {
            drop(i);
            left = true;
        }
    }
    return left;
}

inline void readers::drop(std::size_t peer) noexcept {
    if (!control_ || peer >= peers_.size()) {
        return;
    }
    for (std::size_t i = peers_[peer].first; i < peers_[peer].first + peers_[peer].count; ++i) {
        // The worker learns it before its part of the ring is used again: exchanges are full
        // barriers, for streaming stores too.
        control_.slot(i).dropped.exchange(1, std::memory_order_seq_cst);
        dropped_[i].exchange(true, std::memory_order_seq_cst);
    }
    detail::ring(control_.header().trainer_bell);
    detail::ring(control_.header().worker_bell);
}

inline void readers::restore(std::size_t peer) {
    if (!control_ || peer >= peers_.size()) {
        throw usage_error{"there is no peer of index " + std::to_string(peer),
                          {.phase = phase::init, .backend = "ipc"}};
    }
    for (std::size_t i = peers_[peer].first; i < peers_[peer].first + peers_[peer].count; ++i) {
        control_.slot(i).dropped.store(0, std::memory_order_seq_cst);
        dropped_[i].store(false, std::memory_order_seq_cst);
    }
}

/// Names the slowest rank.
inline error_context readers::slowest_context(const sending& at) const {
    error_context context{.phase = phase::update, .backend = "ipc", .bytes_total = at.length};
    auto least = std::numeric_limits<std::uint64_t>::max();
    each_rank([&](const peer_slots& peer, std::size_t slot) {
        const auto read = read_by(slot, at);
        if (read < least) {
            least = read;
            context.peer = peer.name;
            context.rank = static_cast<int>(slot) + 1;
            context.bytes_done = read;
        }
    });
    return context;
}

}  // namespace weightwire::ipc
