#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/backends/nccl/sender.hpp>
#include <weightwire/fabrics/source_checks.hpp>

/// @file
/// Bodies of `basic_sender`: a round.

namespace weightwire::nccl {

template <Machinery M>
void basic_sender<M>::send(std::uint64_t /*round*/, std::size_t part, tensor_stream& stream,
                           deadline until, std::stop_token stop) {
    if (gear_ == nullptr || !gear_->group || !gear_->group->usable() || part >= parts_.size()) {
        throw usage_error{
            "send needs an open sender and one of its parts; after a failure, "
            "prepare and open again",
            {.phase = phase::update, .backend = "nccl"}};
    }
    sending at{.stream = stream,
               .call = plan_->calls()[part],
               .until = until,
               .stop = std::move(stop),
               .position = parts_[part].first};
    try {
        if (plan_->reordered()) {
            walk_ahead(at);
        }
        info_.packed ? send_packed(first_groups_[part], at) : send_unpacked(at);
        machine_->record(gear_->mark, gear_->wire);
        gear_->group->wait(gear_->mark, until, at.stop);
    } catch (...) {
        abandon();
        throw;
    }
}

/// A reordered plan sends a stable source's tensors from where they are; the source is still
/// walked, so that it is checked and its streams are waited for: on the device by the copies, on
/// the host for tensors that the host reads.
template <Machinery M>
void basic_sender<M>::walk_ahead(sending& at) {
    void* read_after = nullptr;  // stream of tensors for the host that was not yet waited for
    for (std::size_t i = 0; i < parameters_->size(); ++i) {
        at.position = i;
        const auto& entry =
            weightwire::detail::next_tensor(at.stream, [&] { return context_of(at); });
        check_stable(entry, at);
        const bool for_host = entry.tensor.device().kind != M::near_memory;
        if (for_host && entry.ready_stream != read_after) {
            await_producer(read_after, at);
            read_after = entry.ready_stream;
        } else if (!for_host && entry.ready_stream != at.pending) {
            follow_pending(at);
            at.pending = entry.ready_stream;
        }
    }
    await_producer(read_after, at);
    follow_pending(at);
}

/// The host waits until what was given to `producer` so far is done.
template <Machinery M>
void basic_sender<M>::await_producer(void* producer, sending& at) {
    if (producer != nullptr) {
        machine_->record_after(gear_->mark, producer);
        gear_->group->wait(gear_->mark, at.until, at.stop);
    }
}

template <Machinery M>
named_tensor basic_sender<M>::take(sending& at, std::size_t position) {
    at.position = position;
    if (plan_->reordered()) {
        return {.name = (*parameters_)[position].name, .tensor = tensors_[position]};
    }
    const auto& entry = weightwire::detail::next_tensor(at.stream, [&] { return context_of(at); });
    if (stable_) {
        check_stable(entry, at);
    }
    return entry;
}

template <Machinery M>
void basic_sender<M>::check_stable(const named_tensor& entry, const sending& at) const {
    weightwire::detail::require_unmoved(entry.tensor, tensors_[at.position],
                                        [&] { return context_of(at); });
}

template <Machinery M>
void basic_sender<M>::send_packed(std::size_t first_group, sending& at) {
    const auto& chunks = at.call.chunks;
    for (std::size_t c = 0; c < chunks.size(); ++c) {
        detail::check_time(at.until, at.stop, [&] { return context_of(at); });
        send_chunk(chunks[c], first_group + c, gear_->buffers[plan_->buffer_of(c)], at);
    }
}

template <Machinery M>
void basic_sender<M>::send_chunk(const plan::packed_chunk& chunk, std::size_t group,
                                 detail::rotating_buffer<M>& buffer, sending& at) {
    machine_->make_wait(gear_->copies, buffer.free);
    bool gathers = false;
    for (std::size_t k = 0; k < chunk.count; ++k) {
        const auto position = at.call.order[chunk.first + k];
        const auto entry = take(at, position);
        if (gathered_[position] == 0) {
            place(entry, buffer.memory.data() + chunk.offsets[k], at);
            continue;
        }
        gathers = true;
        if (entry.ready_stream != at.pending) {
            follow_pending(at);
            at.pending = entry.ready_stream;
        }
    }
    if (gathers) {
        follow_pending(at);
        gear_->tables->launch(group, buffer.memory.data(), gear_->copies, pace_of(at));
    }
    machine_->record(buffer.filled, gear_->copies);
    machine_->make_wait(gear_->wire, buffer.filled);
    if (chunk.bytes != 0) {
        gear_->group->broadcast(buffer.memory.data(), chunk.bytes, nccl_api::element::uint8, 0,
                                gear_->wire, at.until, at.stop);
    }
    machine_->record(buffer.free, gear_->wire);
    at.queued_bytes += chunk.bytes;
}

template <Machinery M>
void basic_sender<M>::send_unpacked(sending& at) {
    for (const auto position : at.call.order) {
        const auto entry = take(at, position);
        if (entry.tensor.byte_size() == 0) {
            continue;  // NCCL discards it on every rank
        }
        detail::check_time(at.until, at.stop, [&] { return context_of(at); });
        if (is_near(entry.tensor) && entry.tensor.is_contiguous()) {
            send_one(entry, at);
        } else {
            send_staged(entry, at);
        }
        at.queued_bytes += entry.tensor.byte_size();
    }
}

template <Machinery M>
void basic_sender<M>::send_one(const named_tensor& entry, sending& at) {
    if (entry.ready_stream != nullptr) {
        machine_->record_after(gear_->mark, entry.ready_stream);
        machine_->make_wait(gear_->wire, gear_->mark);
    }
    const auto type = element_for((*parameters_)[at.position]);
    // The root's memory is only read.
    gear_->group->broadcast(const_cast<std::byte*>(entry.tensor.data()),
                            entry.tensor.byte_size() / nccl_api::size_of(type), type, 0,
                            gear_->wire, at.until, at.stop);
    give_back(entry, gear_->wire, at);
}

template <Machinery M>
void basic_sender<M>::send_staged(const named_tensor& entry, sending& at) {
    // A source that is not stable may need it for its largest tensor later; for a stable one it is
    // there already.
    auto& buffer = gear_->stage(stable_ ? entry.tensor.byte_size() : largest_);
    machine_->make_wait(gear_->copies, buffer.free);
    if (const auto group = own_groups_[at.position]; group != no_group) {
        at.pending = entry.ready_stream;
        follow_pending(at);
        gear_->tables->launch(group, buffer.memory.data(), gear_->copies, pace_of(at));
    } else {
        place(entry, buffer.memory.data(), at);
    }
    machine_->record(buffer.filled, gear_->copies);
    machine_->make_wait(gear_->wire, buffer.filled);
    const auto type = element_for((*parameters_)[at.position]);
    gear_->group->broadcast(buffer.memory.data(),
                            entry.tensor.byte_size() / nccl_api::size_of(type), type, 0,
                            gear_->wire, at.until, at.stop);
    machine_->record(buffer.free, gear_->wire);
}

/// Brings a tensor that no gather brings to its place in a buffer.
template <Machinery M>
void basic_sender<M>::place(const named_tensor& entry, std::byte* to, sending& at) {
    const auto& tensor = entry.tensor;
    if (tensor.byte_size() == 0) {
        return;
    }
    if (tensor.device().kind == M::near_memory) {
        if (entry.ready_stream != nullptr) {
            machine_->record_after(gear_->mark, entry.ready_stream);
            machine_->make_wait(gear_->copies, gear_->mark);
        }
        detail::each_byte_run(
            tensor, detail::most_copied_runs, [&] { return context_of(at); },
            [&](const std::byte* from, std::uint64_t bytes) {
                machine_->copy(to, from, static_cast<std::size_t>(bytes), gear_->copies);
                to += bytes;
            });
        give_back(entry, gear_->copies, at);
        return;
    }
    await_producer(entry.ready_stream, at);
    // `read` is of the tensor that the stream gave last, so not of one sent out of order.
    const bool may_read = !plan_->reordered();
    gear_->to_device(
        to, tensor.byte_size(),
        [&](std::uint64_t offset, std::span<std::byte> piece) {
            if (!may_read || !at.stream.read(offset, piece)) {
                shm::gather(piece, tensor, offset, shm::stores::cached);
            }
        },
        at.until, at.stop);
}

/// The source may take the memory back once `reader` has come to where it is now: its own stream
/// waits for that, or else the host does. A stable source leaves it to us until the part's end.
template <Machinery M>
void basic_sender<M>::give_back(const named_tensor& entry, typename M::stream& reader,
                                sending& at) {
    if (stable_) {
        return;
    }
    machine_->record(gear_->mark, reader);
    if (entry.ready_stream != nullptr) {
        machine_->make_source_wait(entry.ready_stream, gear_->mark);
    } else {
        gear_->group->wait(gear_->mark, at.until, at.stop);
    }
}

/// Gathers wait for the stream on which the tensors named so far become valid.
template <Machinery M>
void basic_sender<M>::follow_pending(sending& at) {
    if (at.pending != nullptr) {
        machine_->record_after(gear_->mark, at.pending);
        machine_->make_wait(gear_->copies, gear_->mark);
    }
    at.pending = nullptr;
}

template <Machinery M>
error_context basic_sender<M>::context_of(const sending& at) const {
    return {.phase = phase::update,
            .tensor = at.position < parameters_->size() ? (*parameters_)[at.position].name
                                                        : std::string{},
            .backend = "nccl",
            .rank = 0,
            .bytes_done = at.queued_bytes,
            .bytes_total = parameters_->total_bytes()};
}

}  // namespace weightwire::nccl
