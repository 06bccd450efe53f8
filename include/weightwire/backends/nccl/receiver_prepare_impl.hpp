#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/backends/nccl/receiver.hpp>

/// @file
/// Bodies of `basic_receiver`: an update's destinations and the memory for it.

namespace weightwire::nccl {

template <Machinery M>
void basic_receiver<M>::prepare(const update_message& message, update_target& target,
                                deadline until, const std::stop_token& stop) {
    require_group();
    try {
        gear_->tables.sweep();
        const auto part = part_of(message, target);
        auto at = begin(part, message, target, until, stop);
        scatters_.assign(at.call.chunks.size(), nullptr);
        if (target.bounced()) {  // destinations are only seen one by one, and are in host memory
            gear_->prepare_bounce();
            if (!packing_.packed) {
                gear_->stage(largest_);
            }
        } else {
            open_all(at);
            plan_scatters(at);
        }
        prepared_ = part;
    } catch (...) {
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
    // A whole chunk is on its way to the device at once, and a sink's one buffer cannot take it.
    if (at.target.bounced() && to.data() != nullptr && to.device().kind != memory_kind::host) {
        throw unsupported_error{
            "the sink opens a destination on a device for this tensor alone; destinations that "
            "exist only around their writes have to be in host memory, others for the whole "
            "session",
            context_of(at)};
    }
    return to;
}

/// The place of entry `k` of the call, which is the one under way from now on.
template <Machinery M>
mutable_tensor_view basic_receiver<M>::destination(std::size_t k, receiving& at) {
    if (at.target.bounced()) {
        return open_destination(k, at);
    }
    at.position = at.call.order[k];
    return places_[k];
}

/// Asks for every place of the call and checks it.
template <Machinery M>
void basic_receiver<M>::open_all(receiving& at) {
    places_.assign(at.call.order.size(), mutable_tensor_view{});
    scattered_.assign(at.call.order.size(), mutable_tensor_view{});
    for (std::size_t k = 0; k < at.call.order.size(); ++k) {
        places_[k] = open_destination(k, at);
        if (planned()[at.position].byte_size() != 0) {
            look_at(k, at);
        }
    }
}

/// Takes the memory that entry `k` needs on its way.
template <Machinery M>
void basic_receiver<M>::look_at(std::size_t k, receiving& at) {
    const auto& to = places_[k];
    const bool wanted = to.data() != nullptr;
    if (wanted && to.device().kind != M::near_memory) {
        gear_->prepare_bounce();
    } else if (wanted && packing_.packed && is_near(to)) {
        scattered_[k] = to;
    } else if (wanted) {
        detail::require_runs(to, detail::most_copied_runs, [&] { return context_of(at); });
    }
    if (!packing_.packed && !(wanted && is_near(to) && to.is_contiguous())) {
        gear_->stage(largest_);
    }
}

template <Machinery M>
void basic_receiver<M>::plan_scatters(receiving& at) {
    const std::span<const mutable_tensor_view> all{scattered_};
    for (std::size_t c = 0; c < at.call.chunks.size(); ++c) {
        const auto& cut = at.call.chunks[c];
        const auto part = all.subspan(cut.first, cut.count);
        if (std::any_of(part.begin(), part.end(),
                        [](const auto& place) { return place.data() != nullptr; })) {
            scatters_[c] = &gear_->tables.find(
                *machine_, at.first_chunk + c, part, cut.offsets, [&](std::size_t j) {
                    auto where = context_of(at);
                    where.tensor = planned()[at.call.order[cut.first + j]].name;
                    return where;
                });
        }
    }
}

}  // namespace weightwire::nccl
