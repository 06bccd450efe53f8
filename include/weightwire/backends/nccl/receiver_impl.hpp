#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/backends/nccl/receiver.hpp>

/// @file
/// Bodies of `basic_receiver`: an update.

namespace weightwire::nccl {

template <Machinery M>
void basic_receiver<M>::receive(const update_message& message, update_target& target,
                                deadline until, std::stop_token stop) {
    if (gear_ == nullptr || !gear_->group || !gear_->group->usable()) {
        throw session_error{
            "the group of this rank is gone or was never joined; the trainer has "
            "to begin again with init",
            at_phase(phase::update)};
    }
    try {
        gear_->tables.sweep();
        const auto part = part_of(message, target);
        receiving at{.target = target,
                     .call = plan_->calls()[part],
                     .first = first_positions_[part],
                     .first_chunk = first_chunks_[part],
                     .type = message.native ? [](const param_meta&) {
                         return nccl_api::element::uint8;
                     } : [](const param_meta& parameter) {
                         return nccl_api::element_of(parameter.dtype)
                             .value_or(nccl_api::element::uint8);
                     },
                     .until = until,
                     .stop = std::move(stop)};
        reported_.assign(at.call.order.size(), 0);
        oldest_ = waiting_count_ = 0;
        packing_.packed ? receive_packed(at) : receive_unpacked(at);
        while (waiting_count_ != 0) {
            settle_oldest(at);
        }
    } catch (...) {
        // The trainer's next broadcast would never be joined: only an abort ends that.
        gear::end(std::move(gear_));
        gear_ = nullptr;
        throw;
    }
}

/// Which of the plan's calls the message is.
template <Machinery M>
std::size_t basic_receiver<M>::part_of(const update_message& message, const update_target& target) {
    if (message.native != (parameters_ != nullptr)) {
        throw protocol_error{"init and update are of two wires", at_phase(phase::update)};
    }
    if (!message.native) {
        adopt_names(message, target);
        return 0;
    }
    const auto& calls = plan_->calls();
    if (message.part >= calls.size() || message.first != first_positions_[message.part] ||
        target.size() != calls[message.part].order.size()) {
        throw mismatch_error{"the update is part " + std::to_string(message.part) + " with " +
                                 std::to_string(target.size()) + " parameters from " +
                                 std::to_string(message.first) +
                                 ", which is no call of the plan of " +
                                 std::to_string(calls.size()),
                             at_phase(phase::update)};
    }
    return message.part;
}

/// A vLLM trainer names its parameters in each call: while they are the same, so is the plan.
template <Machinery M>
void basic_receiver<M>::adopt_names(const update_message& message, const update_target& target) {
    const auto packing = wire::packing_of_update(at_init_, message.extras);
    bool same = plan_ && packing == packing_ && named_.size() == target.size();
    for (std::size_t i = 0; same && i < target.size(); ++i) {
        same = named_[i] == target.parameter(i);
    }
    if (same) {
        return;
    }
    std::vector<param_meta> list;
    list.reserve(target.size());
    for (std::size_t i = 0; i < target.size(); ++i) {
        list.push_back(target.parameter(i));
    }
    plan_.reset();
    named_ = manifest{std::move(list)};
    packing_ = packing;
    plan_for({.packed = packing.packed,
              .buffer_bytes = packing.buffer_bytes,
              .buffers = static_cast<std::size_t>(packing.buffers)},
             std::nullopt);
}

template <Machinery M>
void basic_receiver<M>::receive_packed(receiving& at) {
    const auto chunks = at.call.chunks.size();
    const auto ahead = std::min(chunks, gear_->buffers.size());
    for (std::size_t c = 0; c < ahead; ++c) {
        start_chunk(c, at);
    }
    for (std::size_t c = 0; c < chunks; ++c) {
        detail::check_time(at.until, at.stop, [&] { return context_of(at); });
        place_chunk(c, at);
        if (c + ahead < chunks) {
            start_chunk(c + ahead, at);
        }
        settle_done(at);
    }
}

template <Machinery M>
void basic_receiver<M>::start_chunk(std::size_t chunk, receiving& at) {
    auto& buffer = gear_->buffers[plan_->buffer_of(chunk)];
    machine_->make_wait(gear_->wire, buffer.free);
    const auto bytes = at.call.chunks[chunk].bytes;
    if (bytes != 0) {
        gear_->group->broadcast(buffer.memory.data(), bytes, nccl_api::element::uint8, 0,
                                gear_->wire, at.until, at.stop);
    }
    machine_->record(buffer.filled, gear_->wire);
}

template <Machinery M>
void basic_receiver<M>::place_chunk(std::size_t chunk, receiving& at) {
    auto& buffer = gear_->buffers[plan_->buffer_of(chunk)];
    const auto& cut = at.call.chunks[chunk];
    machine_->make_wait(gear_->copies, buffer.filled);
    places_.assign(cut.count, mutable_tensor_view{});
    bool scatters = false;
    for (std::size_t j = 0; j < cut.count; ++j) {
        const auto k = cut.first + j;
        const auto to = open_destination(k, at);
        const auto* const from = buffer.memory.data() + cut.offsets[j];
        if (to.data() == nullptr || to.byte_size() == 0) {
            continue;
        }
        if (is_near(to)) {
            places_[j] = to;
            scatters = true;
        } else if (to.device().kind == M::near_memory) {
            copy_runs(to, from, at);
        } else {
            to_host(to, from, k, at);
        }
    }
    if (scatters) {
        gear_->tables
            .find(*machine_, at.first_chunk + chunk, places_, cut.offsets,
                  [&](std::size_t j) {
                      auto where = context_of(at);
                      where.tensor = planned()[at.call.order[cut.first + j]].name;
                      return where;
                  })
            .launch(
                0, buffer.memory.data(), gear_->copies,
                chunk + 1 == at.call.chunks.size() ? copy_pace::full : copy_pace::beside_broadcast);
    }
    machine_->record(buffer.free, gear_->copies);
    await(cut.first, cut.first + cut.count, gear_->copies, at);
}

template <Machinery M>
void basic_receiver<M>::receive_unpacked(receiving& at) {
    for (std::size_t k = 0; k < at.call.order.size(); ++k) {
        detail::check_time(at.until, at.stop, [&] { return context_of(at); });
        const auto to = open_destination(k, at);
        const auto& parameter = planned()[at.position];
        const auto bytes = parameter.byte_size();
        if (bytes == 0) {
            report(k, at);
        } else if (to.data() != nullptr && is_near(to) && to.is_contiguous()) {
            const auto type = at.type(parameter);
            gear_->group->broadcast(to.data(), bytes / nccl_api::size_of(type), type, 0,
                                    gear_->wire, at.until, at.stop);
            await(k, k + 1, gear_->wire, at);
        } else {
            receive_staged(to, k, at);
        }
        settle_done(at);
    }
}

/// Through a buffer: not wanted, not contiguous, or elsewhere.
template <Machinery M>
void basic_receiver<M>::receive_staged(const mutable_tensor_view& to, std::size_t k,
                                       receiving& at) {
    const auto& parameter = planned()[at.position];
    auto& buffer = gear_->stage(largest_);  // once: another may need more later
    const auto type = at.type(parameter);
    machine_->make_wait(gear_->wire, buffer.free);
    gear_->group->broadcast(buffer.memory.data(), parameter.byte_size() / nccl_api::size_of(type),
                            type, 0, gear_->wire, at.until, at.stop);
    machine_->record(buffer.filled, gear_->wire);
    machine_->make_wait(gear_->copies, buffer.filled);
    if (to.data() != nullptr && to.device().kind != M::near_memory) {
        to_host(to, buffer.memory.data(), k, at);
    } else if (to.data() != nullptr) {
        copy_runs(to, buffer.memory.data(), at);
    }
    machine_->record(buffer.free, gear_->copies);
    await(k, k + 1, gear_->copies, at);
}

template <Machinery M>
mutable_tensor_view basic_receiver<M>::open_destination(std::size_t k, receiving& at) {
    at.position = at.call.order[k];
    const auto index = at.position - at.first;
    const auto& parameter = planned()[at.position];
    if (at.target.parameter(index) != parameter) {
        throw mismatch_error{"the session names " + at.target.parameter(index).name +
                                 " where the plan names this tensor",
                             context_of(at)};
    }
    const auto to = at.target.open(index, at.until);
    if (to.data() != nullptr && to.byte_size() != parameter.byte_size()) {
        throw mismatch_error{"the destination has " + std::to_string(to.byte_size()) +
                                 " bytes, the tensor " + std::to_string(parameter.byte_size()),
                             context_of(at)};
    }
    return to;
}

/// Host memory is written by the host, as soon as the bytes are there, and reported at once: a
/// sink may reuse its memory for the next tensor.
template <Machinery M>
void basic_receiver<M>::to_host(const mutable_tensor_view& to, const std::byte* from, std::size_t k,
                                receiving& at) {
    gear_->to_host(
        from, to.byte_size(),
        [&](std::uint64_t offset, std::span<const std::byte> piece) {
            shm::scatter(to, offset, piece, shm::stores::streaming);
        },
        at.until, at.stop);
    report(k, at);
}

template <Machinery M>
void basic_receiver<M>::copy_runs(const mutable_tensor_view& to, const std::byte* from,
                                  receiving& at) {
    detail::each_byte_run(
        to, detail::most_copied_runs, context_of(at), [&](std::byte* at_byte, std::uint64_t bytes) {
            machine_->copy(at_byte, from, static_cast<std::size_t>(bytes), gear_->copies);
            from += bytes;
        });
}

template <Machinery M>
void basic_receiver<M>::report(std::size_t k, receiving& at) {
    const auto position = at.call.order[k];
    const auto bytes = planned()[position].byte_size();
    reported_[k] = 1;
    at.target.wrote(position - at.first, 0, bytes, at.until);
    at.placed_bytes += bytes;
}

/// Parameters `[begin, end)` of the call are in place when `on` has come to where it is now.
template <Machinery M>
void basic_receiver<M>::await(std::size_t begin, std::size_t end, typename M::stream& on,
                              receiving& at) {
    if (waiting_count_ == most_waiting) {
        settle_oldest(at);
    }
    const auto slot = (oldest_ + waiting_count_) % most_waiting;
    machine_->record(settled_[slot], on);
    waiting_[slot] = {begin, end};
    ++waiting_count_;
}

template <Machinery M>
void basic_receiver<M>::settle_oldest(receiving& at) {
    gear_->group->wait(settled_[oldest_], at.until, at.stop);
    const auto done = waiting_[oldest_];
    oldest_ = (oldest_ + 1) % most_waiting;
    --waiting_count_;
    for (auto k = done.begin; k < done.end; ++k) {
        if (reported_[k] == 0) {
            report(k, at);
        }
    }
}

/// The sink may install layers while others still travel.
template <Machinery M>
void basic_receiver<M>::settle_done(receiving& at) {
    while (waiting_count_ != 0 && machine_->is_done(settled_[oldest_])) {
        settle_oldest(at);
    }
}

template <Machinery M>
error_context basic_receiver<M>::context_of(const receiving& at) const {
    return {.phase = phase::update,
            .tensor = at.position < planned().size() ? planned()[at.position].name : std::string{},
            .backend = "nccl",
            .rank = context_.global_rank,
            .bytes_done = at.placed_bytes,
            .bytes_total = planned().total_bytes()};
}

}  // namespace weightwire::nccl
