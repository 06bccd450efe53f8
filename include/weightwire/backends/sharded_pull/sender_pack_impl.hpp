#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <stop_token>
#include <utility>

#include <weightwire/backends/sharded_pull/sender.hpp>
#include <weightwire/core/check_time.hpp>
#include <weightwire/fabrics/shared_memory_copy.hpp>
#include <weightwire/fabrics/source_checks.hpp>

/// @file
/// Bodies of `basic_sender`: what is staged.

namespace weightwire::sharded_pull {

/// Lanes of the takers of the round; those of the round before are kept where they are the same.
template <PullFabric Fabric>
void basic_sender<Fabric>::begin_lanes(std::uint64_t round, deadline until) {
    desk_->published_all(false);
    if (desk_->begin_round(round, until)) {
        lanes_.clear();
        for (const auto& taker : desk_->takers()) {
            lanes_.push_back(
                {.taker = lanes_.size(),
                 .chunks = staged_chunks_of(taker.part->part, taker.readers.front().section,
                                            *parameters_, desk_->terms().in_place)});
        }
    }
    for (auto& each : lanes_) {
        each.chunk = 0;
        each.read = 0;
        each.slot.reset();
    }
    most_slots_ =
        std::max<std::size_t>(desk_->terms().slots / std::max<std::size_t>(lanes_.size(), 1), 1);
}

/// A stable source has been walked already.
template <PullFabric Fabric>
void basic_sender<Fabric>::pack_all(tensor_stream& stream, deadline until,
                                    const std::stop_token& stop) {
    if (stable_) {
        pack_side_by_side(until, stop);
        return;
    }
    for (auto position = stream.position(); position != parameters_->size();
         position = stream.position()) {
        weightwire::detail::check_time(until, stop, [&] { return at_update(position); });
        const auto& entry =
            weightwire::detail::next_tensor(stream, [&] { return at_update(position); });
        await_ready(entry.ready_stream, position, until, stop);
        pack(position, entry.tensor, &stream, until, stop);
    }
}

/// A chunk of each taker in turn, in whichever order of the tensors: a taker that has no slot holds
/// up nobody, and all read at once.
template <PullFabric Fabric>
void basic_sender<Fabric>::pack_side_by_side(deadline until, const std::stop_token& stop) {
    for (bool left = true; left;) {
        const auto seen = desk_->changes();
        bool packed = false;
        bool waits = false;
        left = false;
        for (auto& each : lanes_) {
            if (each.chunk == each.chunks.size() || !desk_->has_readers(each.taker)) {
                continue;
            }
            left = true;
            each.slot = desk_->take_slot(each.taker, most_slots_);
            if (!each.slot) {
                waits = true;
                continue;
            }
            auto position = each.chunks[each.chunk].reads.front().read->source;
            weightwire::detail::check_time(until, stop, [&] { return at_update(position); });
            while (each.slot) {
                position = each.chunks[each.chunk].reads[each.read].read->source;
                pack_next(each, position, tensors_[position], nullptr, until, stop);
            }
            packed = true;
        }
        if (left && !packed) {
            desk_->await_change(seen, until, stop);
        } else if (waits) {
            desk_->look_after_readers();
        }
    }
}

/// Every taker's share of one tensor. Those that have no slot are waited for when the others have
/// theirs.
template <PullFabric Fabric>
void basic_sender<Fabric>::pack(std::size_t position, const tensor_view& tensor,
                                tensor_stream* stream, deadline until,
                                const std::stop_token& stop) {
    for (;;) {
        const auto seen = desk_->changes();
        bool waits = false;
        for (auto& each : lanes_) {
            waits = !advance(each, position, tensor, stream, until, stop) || waits;
        }
        settle(until, stop);  // the source may take the tensor back
        if (!waits) {
            return;
        }
        desk_->await_change(seen, until, stop);
    }
}

/// As far as a lane comes with one tensor. Returns false where it waits for a slot.
template <PullFabric Fabric>
bool basic_sender<Fabric>::advance(lane& at, std::size_t position, const tensor_view& tensor,
                                   tensor_stream* stream, deadline until,
                                   const std::stop_token& stop) {
    while (at.chunk < at.chunks.size()) {
        const auto& chunk = at.chunks[at.chunk];
        if (chunk.reads[at.read].read->source != position) {
            return true;
        }
        if (!at.slot) {
            at.slot = desk_->take_slot(at.taker, most_slots_);
            if (!at.slot) {
                return !desk_->has_readers(at.taker);
            }
        } else if (!desk_->holds(at.taker, *at.slot)) {
            return true;  // its readers have left the round
        }
        pack_next(at, position, tensor, stream, until, stop);
    }
    return true;
}

/// The next read of a lane's chunk, to its slot. After the last one the chunk is published.
template <PullFabric Fabric>
void basic_sender<Fabric>::pack_next(lane& at, std::size_t position, const tensor_view& tensor,
                                     tensor_stream* stream, deadline until,
                                     const std::stop_token& stop) {
    const auto& chunk = at.chunks[at.chunk];
    auto* const slot = arena_.data() + at.slot->index * desk_->terms().slot_bytes;
    const auto& what = chunk.reads[at.read];
    pack_read(what, slot + what.packed_offset, position, tensor, stream);
    if (++at.read == chunk.reads.size()) {
        settle(until, stop);
        desk_->publish(*at.slot, chunk.chunk);
        at.slot.reset();
        at.read = 0;
        ++at.chunk;
    }
}

template <PullFabric Fabric>
void basic_sender<Fabric>::pack_read(const staged_read& what, std::byte* to, std::size_t position,
                                     const tensor_view& tensor, tensor_stream* stream) {
    const auto item = plan::item_bytes_of((*parameters_)[position]);
    if constexpr (packs) {
        if (!tensor.is_contiguous()) {
            throw unsupported_error{
                "this fabric stages contiguous tensors only, and this one is not contiguous",
                at_update(position)};
        }
        unsettled_ = true;
        // Lines at regular steps are one copy.
        std::uint64_t first = 0;
        std::uint64_t at = 0;
        std::uint64_t line = 0;
        std::uint64_t count = 0;
        std::uint64_t step = 0;
        const auto flush = [&] {
            if (count != 0) {
                owner_->pack(to + at, tensor.data() + first, line, count, step);
            }
            count = 0;
        };
        for_each_staged_run(*what.read, item,
                            [&](std::uint64_t from, std::uint64_t packed, std::uint64_t bytes) {
                                if (count == 1 && from > first) {
                                    step = from - first;
                                }
                                if (count == 0 || from != first + count * step) {
                                    flush();
                                    first = from;
                                    at = packed;
                                    line = bytes;
                                    step = bytes;
                                }
                                ++count;
                            });
        flush();
    } else {
        if (tensor.device().kind != memory_kind::host) {
            throw unsupported_error{
                "this fabric stages host memory only, and the source yields a tensor on a device",
                at_update(position)};
        }
        for_each_staged_run(*what.read, item,
                            [&](std::uint64_t from, std::uint64_t packed, std::uint64_t bytes) {
                                const std::span piece{to + packed, static_cast<std::size_t>(bytes)};
                                if (stream == nullptr || !stream->read(from, piece)) {
                                    shm::gather(piece, tensor, from, shm::stores::cached);
                                }
                            });
    }
}

/// Until what was packed is in the arena, where the processor does not copy it itself.
template <PullFabric Fabric>
void basic_sender<Fabric>::settle([[maybe_unused]] deadline until,
                                  [[maybe_unused]] const std::stop_token& stop) {
    if constexpr (packs) {
        if (unsettled_) {
            owner_->settle(until, stop);
            unsettled_ = false;
        }
    }
}

/// Copies that still read the source's memory end before it has it back; they take moments.
template <PullFabric Fabric>
void basic_sender<Fabric>::come_to_rest() noexcept {
    if constexpr (packs) {
        try {
            settle(deadline::after(std::chrono::seconds{2}), {});
        } catch (const std::exception&) {
            unsettled_ = false;  // the device has failed: nothing more can be done for the source
        }
    }
}

}  // namespace weightwire::sharded_pull
