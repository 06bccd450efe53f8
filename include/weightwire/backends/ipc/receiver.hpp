#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/backends/ipc/control_block.hpp>
#include <weightwire/backends/ipc/init_info.hpp>
#include <weightwire/backends/ipc/layout.hpp>
#include <weightwire/backends/ipc/transport_message.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/update_target.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/fabrics/process.hpp>
#include <weightwire/fabrics/shared_memory.hpp>
#include <weightwire/fabrics/shared_memory_copy.hpp>

/// @file
/// A worker rank's half of `ipc` over host memory.

namespace weightwire::ipc {

/// Reads the trainer's memory through mappings and writes each tensor once, to its destination,
/// with streaming stores. One thread at a time.
class receiver {
public:
    explicit receiver(const receiver_context& context) : rank_{context.global_rank} {}

    /// Maps what the trainer names, after checking all of it.
    /// @throws protocol_error a text, size or handle that lies; says in what.
    /// @throws peer_error the trainer is gone. @throws unsupported_error another machine, or
    /// another time namespace of it: process start times, by which a dead trainer is known, differ
    /// there.
    /// @throws timeout_error, cancelled_error between two mappings.
    void open(const transport_open& init, deadline until, const std::stop_token& stop);

    /// Copies the round's tensors as the trainer announces them.
    /// @throws peer_error the trainer died or gave the round up. @throws timeout_error,
    /// cancelled_error.
    /// @throws mismatch_error the target's parameters are not the plan's.
    void receive(const update_message& message, update_target& target, deadline until,
                 std::stop_token stop);

    /// Unmaps everything.
    void release() noexcept {
        control_ = {};
        control_mapping_.reset();
        ring_.reset();
        segments_.clear();
        places_.clear();
        trainer_ = {};
        parameters_ = nullptr;
    }

    /// How this rank reads.
    [[nodiscard]] std::string description() const {
        return "ipc: " + std::to_string(segments_.size()) +
               " segments of the trainer and a ring of " + std::to_string(ring_.size()) +
               " bytes are mapped";
    }

private:
    /// A round under way.
    struct progress {
        std::uint64_t base = 0;      ///< position of the round's begin
        std::uint64_t read = 0;      ///< relative to it
        std::uint64_t reported = 0;  ///< of that, what the trainer knows of
        std::size_t parameter = 0;   ///< being read
        deadline until;
        std::stop_token stop;
    };

    static constexpr std::uint64_t piece_bytes = std::uint64_t{256} << 10U;

    void map_segments(const transport_message& message, const shm::open_options& options,
                      deadline until, const std::stop_token& stop);
    void check_places() const;
    [[nodiscard]] mutable_tensor_view open_destination(update_target& target, progress& at) const;
    void read_in_place(update_target& target, const mutable_tensor_view& to, progress& at);
    void read_staged(update_target& target, const mutable_tensor_view& to, progress& at);
    void place_piece(update_target& target, const mutable_tensor_view& to, std::uint64_t offset,
                     std::span<const std::byte> piece, progress& at);
    [[nodiscard]] std::uint64_t written(const progress& at) const;
    void wait_until_written(std::uint64_t needed, progress& at);
    void require_ours(const progress& at) const;
    void report(progress& at) noexcept;
    [[nodiscard]] error_context context_of(const progress& at) const;
    [[nodiscard]] rank_slot& slot() const noexcept {
        return control_.slot(static_cast<std::size_t>(rank_ - 1));
    }

    int rank_;
    const manifest* parameters_ = nullptr;
    layout layout_;
    shm::process_watch trainer_;
    shm::mapping control_mapping_;
    shm::mapping ring_;
    std::vector<shm::mapping> segments_;
    std::vector<place> places_;
    control_block control_;
};

inline void receiver::open(const transport_open& init, deadline until,
                           const std::stop_token& stop) {
    release();
    const error_context context{.phase = phase::init, .backend = "ipc", .rank = rank_};
    detail::check_time(until, stop, [&] { return context; });
    if (init.parameters == nullptr || init.transport.empty()) {
        throw unsupported_error{
            "host memory travels over ipc only from a weightwire trainer, "
            "which names its parameters at init",
            context};
    }
    if (rank_ < 1) {
        throw usage_error{"a worker's rank in the transfer group is 1 or more", context};
    }
    auto message = decode_transport_message(init.transport);  // first: memory of another kind
    const auto wire = decode_wire_parameters(init.wire_parameters);
    if (weightwire::detail::is_other_boot(message.boot_id)) {
        throw unsupported_error{
            "the trainer runs on another machine or in another time namespace, whose memory cannot "
            "be mapped; choose a backend that crosses machines",
            context};
    }
    parameters_ = init.parameters;
    places_ = std::move(message.places);
    if (!places_.empty() && (wire.packed || places_.size() != parameters_->size())) {
        throw protocol_error{"the transport names places of " + std::to_string(places_.size()) +
                                 " tensors, expected " +
                                 std::to_string(wire.packed ? 0 : parameters_->size()),
                             context};
    }
    std::vector<unsigned char> in_place(places_.size());
    std::transform(places_.begin(), places_.end(), in_place.begin(),
                   [](const place& p) { return p.segment == place::staged ? 0U : 1U; });
    layout_ = layout{*parameters_, wire, in_place};
    if ((message.ring ? message.ring->length : 0) != layout_.ring_bytes()) {
        throw protocol_error{"the trainer's ring has " +
                                 std::to_string(message.ring ? message.ring->length : 0) +
                                 " bytes, the plan " + std::to_string(layout_.ring_bytes()),
                             context};
    }
    // A trainer in this process may let go while a thread of ours still reads, as one in another
    // process may: a mapping of our own keeps the memory.
    map_segments(message, {.context = context, .resolve_locally = false}, until, stop);
    check_places();
}

/// A mapping takes the time of its page tables, which for a large model is seconds in all, so the
/// clock is asked before each.
inline void receiver::map_segments(const transport_message& message,
                                   const shm::open_options& options, deadline until,
                                   const std::stop_token& stop) {
    const auto map = [&](const shm::handle& from, const shm::open_options& how) {
        detail::check_time(until, stop, [&] { return options.context; });
        return shm::mapping::open(from, how);
    };
    auto with = options;
    with.what = "the ipc control block";
    with.use = shm::sharing::writable;
    control_mapping_ = map(message.control, with);
    control_ = control_block::attach(control_mapping_.writable_data(), control_mapping_.size(),
                                     static_cast<std::uint64_t>(rank_ - 1), message.nonce);
    trainer_ = shm::process_watch{message.control.owner()};
    with.use = shm::sharing::readable;
    if (message.ring) {
        with.what = "the ipc ring";
        ring_ = map(*message.ring, with);
    }
    with.what = "a segment of weights";
    segments_.reserve(message.segments.size());
    for (const auto& segment : message.segments) {
        segments_.push_back(map(segment, with));
    }
}

/// Every tensor that is read in place lies inside its segment.
inline void receiver::check_places() const {
    for (std::size_t i = 0; i < places_.size(); ++i) {
        const auto& where = places_[i];
        if (where.segment == place::staged) {
            continue;
        }
        const auto& parameter = (*parameters_)[i];
        const auto size = segments_[where.segment].size();
        if (where.offset > size || parameter.byte_size() > size - where.offset) {
            throw protocol_error{"the trainer places it at byte " + std::to_string(where.offset) +
                                     " of a segment of " + std::to_string(size) + " bytes",
                                 {.phase = phase::init,
                                  .tensor = parameter.name,
                                  .backend = "ipc",
                                  .rank = rank_,
                                  .bytes_total = parameter.byte_size()}};
        }
    }
}

inline void receiver::receive(const update_message& message, update_target& target, deadline until,
                              std::stop_token stop) {
    const error_context context{.phase = phase::update, .backend = "ipc", .rank = rank_};
    const auto base = layout_.base(message.round);
    if (!control_ || !message.native || message.round == 0 || message.part != 0 || !base) {
        throw protocol_error{
            "an update of ipc is native, has one part and a round from 1, and "
            "follows an init",
            context};
    }
    if (target.size() != layout_.size()) {
        throw mismatch_error{"the update has " + std::to_string(target.size()) +
                                 " parameters, the plan " + std::to_string(layout_.size()),
                             context};
    }
    progress at{.base = *base, .until = until, .stop = std::move(stop)};
    for (std::size_t i = 0; i < layout_.size(); ++i) {
        at.parameter = i;
        const auto to = open_destination(target, at);
        if ((*parameters_)[i].byte_size() == 0) {
            target.wrote(i, 0, 0, until);
        } else if (layout_.in_place(i)) {
            read_in_place(target, to, at);
        } else {
            read_staged(target, to, at);
        }
    }
    at.read = layout_.length();
    report(at);
}

inline mutable_tensor_view receiver::open_destination(update_target& target, progress& at) const {
    const auto& parameter = (*parameters_)[at.parameter];
    if (target.parameter(at.parameter) != parameter) {
        throw mismatch_error{"the session names " + target.parameter(at.parameter).name +
                                 " where the plan names this tensor",
                             context_of(at)};
    }
    const auto to = target.open(at.parameter, at.until);
    if (to.data() != nullptr && to.byte_size() != parameter.byte_size()) {
        throw mismatch_error{"the destination has " + std::to_string(to.byte_size()) +
                                 " bytes, the tensor " + std::to_string(parameter.byte_size()),
                             context_of(at)};
    }
    if (to.data() != nullptr && to.device().kind != memory_kind::host) {
        throw unsupported_error{
            "ipc over host memory writes to host memory; this destination is "
            "on a device",
            context_of(at)};
    }
    return to;
}

inline void receiver::read_in_place(update_target& target, const mutable_tensor_view& to,
                                    progress& at) {
    const auto end = layout_.end(at.parameter);
    wait_until_written(end, at);
    const auto& where = places_[at.parameter];
    const auto* const from = segments_[where.segment].data() + where.offset;
    const auto bytes = (*parameters_)[at.parameter].byte_size();
    for (std::uint64_t offset = 0; offset < bytes;) {
        const auto count = std::min(piece_bytes, bytes - offset);
        place_piece(target, to, offset, {from + offset, static_cast<std::size_t>(count)}, at);
        offset += count;
    }
    at.read = end;
    report(at);
}

/// Reads what the trainer has written as soon as that is a piece, or the tensor's rest.
inline void receiver::read_staged(update_target& target, const mutable_tensor_view& to,
                                  progress& at) {
    const auto begin = layout_.begin(at.parameter);
    const auto bytes = (*parameters_)[at.parameter].byte_size();
    for (std::uint64_t offset = 0; offset < bytes;) {
        const auto position = begin + offset;
        const auto in_ring = position % layout_.ring_bytes();
        const auto count = std::min({piece_bytes, bytes - offset, layout_.ring_bytes() - in_ring});
        if (written(at) < position + count) {
            report(at);  // the trainer may be waiting for room
            wait_until_written(position + count, at);
        }
        place_piece(target, to, offset, {ring_.data() + in_ring, static_cast<std::size_t>(count)},
                    at);
        offset += count;
        at.read = position + count;
        if (at.read - at.reported >= piece_bytes) {
            report(at);
        }
    }
}

/// Copies, then makes sure that what was copied was this round's, and only then says so.
inline void receiver::place_piece(update_target& target, const mutable_tensor_view& to,
                                  std::uint64_t offset, std::span<const std::byte> piece,
                                  progress& at) {
    detail::check_time(at.until, at.stop, [&] { return context_of(at); });
    if (to.data() != nullptr) {
        shm::scatter(to, offset, piece, shm::stores::streaming);
    }
    require_ours(at);
    target.wrote(at.parameter, offset, piece.size(), at.until);
}

/// How far the trainer has written, relative to the round. 0 before it began.
/// @throws protocol_error a number that no trainer could have written.
inline std::uint64_t receiver::written(const progress& at) const {
    const auto position = control_.header().produced.load(std::memory_order_seq_cst);
    if (position < at.base) {
        return 0;
    }
    if (position - at.base > layout_.length()) {
        require_ours(at);
        throw protocol_error{"the trainer claims to have written more than a round has",
                             context_of(at)};
    }
    return position - at.base;
}

inline void receiver::wait_until_written(std::uint64_t needed, progress& at) {
    auto& header = control_.header();
    auto enough = [&] { return written(at) >= needed; };
    if (detail::spin_until(enough)) {
        return;
    }
    for (;;) {
        header.worker_sleeps.store(1, std::memory_order_seq_cst);
        const auto bell = header.worker_bell.load(std::memory_order_seq_cst);
        if (enough()) {
            return;
        }
        require_ours(at);
        detail::check_time(at.until, at.stop, [&] { return context_of(at); });
        if (!trainer_.alive()) {
            throw peer_error{"the trainer (process " + std::to_string(trainer_.who().pid) +
                                 ") died in the round; nothing is committed",
                             context_of(at)};
        }
        detail::sleep_while(header.worker_bell, bell, detail::slice);
    }
}

/// The full barrier on our own line keeps the reads of a piece before it: had the trainer used that
/// memory again, its earlier note that we were dropped, or that the round is over, would show.
inline void receiver::require_ours(const progress& at) const {
    const bool dropped = slot().dropped.fetch_or(0, std::memory_order_seq_cst) != 0;
    const bool over = control_.header().over.load(std::memory_order_seq_cst) > at.base;
    if (dropped || over) {
        throw peer_error{over ? "the trainer has ended this round or given it up"
                              : "the trainer goes on without this worker",
                         context_of(at)};
    }
}

inline void receiver::report(progress& at) noexcept {
    auto& header = control_.header();
    if (at.reported == at.read) {
        return;
    }
    at.reported = at.read;
    slot().consumed.store(at.base + at.read, std::memory_order_seq_cst);
    const auto awaited = header.trainer_awaits.load(std::memory_order_seq_cst);
    if (awaited != 0 && at.base + at.read >= awaited) {
        detail::ring(header.trainer_bell);
    }
}

inline error_context receiver::context_of(const progress& at) const {
    return {.phase = phase::update,
            .tensor = (*parameters_)[at.parameter].name,
            .backend = "ipc",
            .rank = rank_,
            .bytes_done = at.read,
            .bytes_total = layout_.length()};
}

}  // namespace weightwire::ipc
