#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/backends/nccl/receiver.hpp>

/// @file
/// Bodies of `basic_receiver`: an update.

namespace weightwire::nccl {

template <Machinery M>
void basic_receiver<M>::require_group() const {
    if (gear_ == nullptr || !gear_->group || !gear_->group->usable()) {
        throw session_error{
            "the group of this rank is gone or was never joined; the trainer has "
            "to begin again with init",
            at_phase(phase::update)};
    }
}

template <Machinery M>
typename basic_receiver<M>::receiving basic_receiver<M>::begin(std::size_t part,
                                                               const update_message& message,
                                                               update_target& target,
                                                               deadline until,
                                                               const std::stop_token& stop) {
    return {.target = target,
            .call = plan_->calls()[part],
            .first = first_positions_[part],
            .first_chunk = first_chunks_[part],
            .type = message.native ? [](const param_meta&) {
                return nccl_api::element::uint8;
            } : [](const param_meta& parameter) {
                return nccl_api::element_of(parameter.dtype).value_or(nccl_api::element::uint8);
            },
            .until = until,
            .stop = stop};
}

template <Machinery M>
void basic_receiver<M>::receive(const update_message& message, update_target& target,
                                deadline until, std::stop_token stop) {
    require_group();
    if (!prepared_) {
        prepare(message, target, until, stop);
    }
    try {
        const auto part = *prepared_;
        prepared_.reset();
        auto at = begin(part, message, target, until, stop);
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
    for (std::size_t j = 0; j < cut.count; ++j) {
        const auto k = cut.first + j;
        const auto to = destination(k, at);
        const auto* const from = buffer.memory.data() + cut.offsets[j];
        if (to.data() == nullptr || to.byte_size() == 0 || is_near(to)) {
            continue;  // what is near is scattered
        }
        if (to.device().kind == M::near_memory) {
            copy_runs(to, from, at);
        } else {
            to_host(to, from, k, at);
        }
    }
    if (scatters_[chunk] != nullptr) {
        const bool last = chunk + 1 == at.call.chunks.size();
        scatters_[chunk]->launch(0, buffer.memory.data(), gear_->copies,
                                 last ? copy_pace::full : copy_pace::beside_broadcast);
    }
    machine_->record(buffer.free, gear_->copies);
    await(cut.first, cut.first + cut.count, gear_->copies, at);
}

template <Machinery M>
void basic_receiver<M>::receive_unpacked(receiving& at) {
    for (std::size_t k = 0; k < at.call.order.size(); ++k) {
        detail::check_time(at.until, at.stop, [&] { return context_of(at); });
        const auto to = destination(k, at);
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
        to, detail::most_copied_runs, [&] { return context_of(at); },
        [&](std::byte* at_byte, std::uint64_t bytes) {
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
