#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/backends/cuda_ipc/sender.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/fabrics/byte_runs.hpp>
#include <weightwire/fabrics/shared_memory_copy.hpp>
#include <weightwire/fabrics/source_checks.hpp>

/// @file
/// Bodies of `basic_sender`: a round.

namespace weightwire::cuda_ipc {

template <Machinery M>
void basic_sender<M>::stage(std::uint64_t round, std::size_t part, tensor_stream& stream,
                            deadline until, std::stop_token stop) {
    if (round != round_) {
        round_ = round;
        next_part_ = 0;
    }
    if (gear_ == nullptr || part >= parts_.size() || part > next_part_) {
        throw usage_error{
            "stage needs a prepared sender and its parts one after the other; the next is " +
                std::to_string(next_part_),
            {.phase = phase::update, .backend = "ipc"}};
    }
    if (part == next_part_) {
        stage_part(part, stream, until, stop);
    }
}

template <Machinery M>
void basic_sender<M>::send(std::uint64_t /*round*/, std::size_t part, tensor_stream& stream,
                           deadline until, std::stop_token stop) {
    if (gear_ == nullptr || next_part_ != part + 1) {
        throw usage_error{"send needs its part staged before",
                          {.phase = phase::update, .backend = "ipc"}};
    }
    if (may_fill_ahead(part)) {
        stage_part(part + 1, stream, until, stop);
    }
}

/// The part after `part` lies in another buffer, and no other rank has to agree to it.
template <Machinery M>
bool basic_sender<M>::may_fill_ahead(std::size_t part) const noexcept {
    const auto calls = plan_->calls();
    return exports_.size() == 1 && part + 1 < calls.size() &&
           (calls[part + 1].buffer != calls[part].buffer || calls[part + 1].staged_bytes == 0);
}

template <Machinery M>
void basic_sender<M>::stage_part(std::size_t part, tensor_stream& stream, deadline until,
                                 const std::stop_token& stop) {
    const auto& call = plan_->calls()[part];
    staging at{.stream = stream,
               .call = call,
               .until = until,
               .stop = stop,
               .position = parts_[part].first};
    try {
        detail::check_time(until, stop, [&] { return context_of(at); });
        if (part == 0) {
            require_current();
        }
        if (plan_->reordered() && part == 0) {
            walk_ahead(at);
        }
        bool gathers = false;
        for (std::size_t k = 0; k < call.order.size(); ++k) {
            const auto entry = take(at, call.order[k]);
            if (entry.tensor.byte_size() == 0) {
                continue;
            }
            const bool staged = call.offsets[k] != plan::ipc_plan::in_place;
            if (!staged || (stable_ && is_near(entry.tensor))) {
                gathers = gathers || staged;
                note_pending(entry.ready_stream, at);
            } else {
                place_in_ring(entry, ring_at(call, k), at);
            }
        }
        await_pending(at);
        if (gathers && gear_->gathers) {
            gear_->gathers->launch(part, gear_->copies);
        }
        if (gathers && gear_->conversions) {
            gear_->conversions->launch(part, gear_->copies);
        }
        machine_->record(gear_->mark, gear_->copies);
        wait_for(gear_->mark, at);
        if (info_.verify) {
            digest_part(call, at);
        }
        next_part_ = part + 1;
    } catch (...) {
        // The source may take its memory back once this has thrown: what still reads it is waited
        // for, which is a matter of milliseconds.
        try {
            detail::poll_until([&] { return gear_->is_idle(); },
                               deadline::after(std::chrono::seconds{2}), {},
                               [] { return error_context{}; });
        } catch (...) {  // NOLINT(bugprone-empty-catch): the first failure says more
        }
        throw;
    }
}

/// A reordered plan takes a stable source's tensors from where they are; the source is still
/// walked, so that it is checked and its streams are waited for.
template <Machinery M>
void basic_sender<M>::walk_ahead(staging& at) {
    for (std::size_t i = 0; i < parameters_->size(); ++i) {
        at.position = i;
        const auto& entry =
            weightwire::detail::next_tensor(at.stream, [&] { return context_of(at); });
        check_stable(entry, at);
        note_pending(entry.ready_stream, at);
    }
    await_pending(at);
}

template <Machinery M>
named_tensor basic_sender<M>::take(staging& at, std::size_t position) {
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
void basic_sender<M>::check_stable(const named_tensor& entry, const staging& at) const {
    weightwire::detail::require_unmoved(entry.tensor, tensors_[at.position],
                                        [&] { return context_of(at); });
}

/// Brings a tensor that no table brings to its place in the ring. The source may take the memory
/// back once the copy is done: its own stream waits for that, or else the host does.
template <Machinery M>
void basic_sender<M>::place_in_ring(const named_tensor& entry, std::byte* to, staging& at) {
    const auto& tensor = entry.tensor;
    at.staged_bytes += tensor.byte_size();
    if (tensor.device().kind == M::near_memory) {
        note_pending(entry.ready_stream, at);
        await_pending(at);
        weightwire::detail::each_byte_run(
            tensor, weightwire::detail::most_copied_runs, [&] { return context_of(at); },
            [&](const std::byte* from, std::uint64_t bytes) {
                machine_->copy(to, from, static_cast<std::size_t>(bytes), gear_->copies);
                to += bytes;
            });
        if (!stable_) {
            machine_->record(gear_->mark, gear_->copies);
            if (entry.ready_stream != nullptr) {
                machine_->make_source_wait(entry.ready_stream, gear_->mark);
            } else {
                wait_for(gear_->mark, at);
            }
        }
        return;
    }
    note_pending(entry.ready_stream, at);
    await_pending(at);
    // `read` is of the tensor that the stream gave last, so not of one sent out of order.
    const bool may_read = !plan_->reordered();
    gear_->bounce.to_device(
        to, tensor.byte_size(), gear_->copies,
        [&](std::uint64_t offset, std::span<std::byte> piece) {
            if (!may_read || !at.stream.read(offset, piece)) {
                shm::gather(piece, tensor, offset, shm::stores::cached);
            }
        },
        [&](typename M::event& point) { wait_for(point, at); });
}

/// The tensor at the position becomes valid on `producer`.
template <Machinery M>
void basic_sender<M>::note_pending(void* producer, staging& at) {
    if (producer != at.pending) {
        await_pending(at);
        at.pending = producer;
        at.pending_since = at.position;
    }
}

/// The host waits for what was given to the pending stream so far. A wait on the device would leave
/// our stream, and the ring with it, to a stream of the user's that hangs.
template <Machinery M>
void basic_sender<M>::await_pending(staging& at) {
    if (auto* const producer = std::exchange(at.pending, nullptr); producer != nullptr) {
        const auto position = std::exchange(at.position, at.pending_since);
        machine_->record_after(gear_->mark, producer);
        wait_for(gear_->mark, at);
        at.position = position;
    }
}

/// What was exported is what is there: another allocation at the same address would be read by
/// nobody, and the weights of before would be sent.
template <Machinery M>
void basic_sender<M>::require_current() {
    for (std::uint32_t k = 0; k < own_->allocations.size(); ++k) {
        if (k == own_->ring || machine_->is_current(own_->allocations[k])) {
            continue;
        }
        std::size_t i = 0;
        while (i < own_->places.size() && own_->places[i].allocation != k) {
            ++i;
        }
        throw data_error{
            "the memory of this tensor was freed and allocated anew since it was exported, though "
            "the source promised that it stays; make the engine anew (trainer_init) when weights "
            "move",
            {.phase = phase::update,
             .tensor = i < own_->places.size() ? (*parameters_)[i].name : std::string{},
             .backend = "ipc",
             .rank = info_.rank}};
    }
}

template <Machinery M>
void basic_sender<M>::wait_for(typename M::event& point, const staging& at) {
    detail::poll_until([&] { return machine_->is_done(point); }, at.until, at.stop,
                       [&] { return context_of(at); });
}

template <Machinery M>
void basic_sender<M>::digest_part(const plan::ipc_call& call, const staging& at) {
    digested_.clear();
    for (std::size_t k = 0; k < call.order.size(); ++k) {
        const auto i = call.order[k];
        const auto& parameter = (*parameters_)[i];
        if (parameter.byte_size() == 0) {
            digests_[i] = digest({});
        } else if (call.offsets[k] == plan::ipc_plan::in_place) {
            digested_.push_back(tensors_[i]);
        } else {
            digested_.emplace_back(ring_at(call, k), parameter.dtype, parameter.shape,
                                   device{M::near_memory, machine_->device()});
        }
    }
    digests_of_part_.resize(digested_.size());
    machine_->digests(digested_, digests_of_part_, at.until, at.stop);
    auto next = digests_of_part_.begin();
    for (const auto i : call.order) {
        if ((*parameters_)[i].byte_size() != 0) {
            digests_[i] = *next++;
        }
    }
}

template <Machinery M>
error_context basic_sender<M>::context_of(const staging& at) const {
    return {.phase = phase::update,
            .tensor = at.position < parameters_->size() ? (*parameters_)[at.position].name
                                                        : std::string{},
            .backend = "ipc",
            .rank = info_.rank,
            .bytes_done = at.staged_bytes,
            .bytes_total = at.call.staged_bytes};
}

}  // namespace weightwire::cuda_ipc
