#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include <weightwire/backends/cuda_ipc/receiver.hpp>
#include <weightwire/detail/boot_id.hpp>

/// @file
/// Bodies of `basic_receiver`: opening.

namespace weightwire::cuda_ipc {

template <Machinery M>
void basic_receiver<M>::open(const transport_open& init, deadline until,
                             const std::stop_token& stop) {
    release();
    detail::check_time(until, stop, [&] { return at_phase(phase::init); });
    if (lost()) {
        throw resource_error{"earlier copies on device " + std::to_string(context_.device) +
                                 " could not be ended and may write memory there at any later "
                                 "time; restart this process",
                             at_phase(phase::init)};
    }
    if (!machine_) {
        machine_.emplace(context_.device);
    }
    machine_->load_kernels();
    gear_ = std::make_unique<gear_type>(*machine_);
    try {
        if (init.parameters != nullptr) {
            open_native(init, until, stop);
        } else {
            open_vllm(init);
        }
    } catch (...) {
        release();
        throw;
    }
}

template <Machinery M>
void basic_receiver<M>::open_native(const transport_open& init, deadline until,
                                    const std::stop_token& stop) {
    parameters_ = init.parameters;
    auto message = decode_transport_message(init.transport, parameters_->size());
    if (weightwire::detail::is_other_boot(message.boot_id)) {
        throw unsupported_error{
            "the trainer runs on another machine or in another time namespace, whose device memory "
            "cannot be mapped; choose a backend that crosses machines",
            at_phase(phase::init)};
    }
    if (message.call_begins.back() >= parameters_->size()) {
        throw protocol_error{"a call begins past the last parameter", at_phase(phase::init)};
    }
    call_begins_ = std::move(message.call_begins);
    const auto& chosen = choose_export(message);
    gear_->mappings.reserve(chosen.allocations.size());
    for (const auto& allocation : chosen.allocations) {
        detail::check_time(until, stop, [&] { return at_phase(phase::init); });
        gear_->mappings.push_back(
            detail::saying_where([&] { return machine_->open(chosen.owner, allocation); },
                                 [&] { return at_phase(phase::init); }));
    }
    map_places(message, chosen);
    // Two places a launch for a sink that alternates, and each call may end with a short one.
    const auto plans = 2 * (launches_a_call + 1) * call_begins_.size();
    gear_->copy_plans.reserve(plans);
    gear_->conversion_plans.reserve(plans);
    reported_.reserve(parameters_->size());
    moves_.reserve(parameters_->size());
}

/// The trainer rank on this rank's own GPU; without one rank 0, whose memory the machine's links
/// may reach.
template <Machinery M>
const memory_export& basic_receiver<M>::choose_export(const transport_message& message) {
    const auto near = std::ranges::find(message.exports, machine_->gpu(), &memory_export::gpu);
    const bool found = near != message.exports.end();
    const auto& chosen = found ? *near : message.exports.front();
    chosen_ = "memory of trainer rank " + std::to_string(&chosen - message.exports.data()) +
              " on " + (found ? std::string{"this rank's GPU "} : std::string{"another GPU, "}) +
              (chosen.gpu.empty() ? std::string{"unnamed"} : chosen.gpu);
    return chosen;
}

/// Every tensor lies inside what was opened.
template <Machinery M>
void basic_receiver<M>::map_places(const transport_message& message, const memory_export& chosen) {
    sources_.assign(parameters_->size(), tensor_view{});
    for (std::size_t i = 0; i < sources_.size(); ++i) {
        const auto& parameter = (*parameters_)[i];
        const auto& where = chosen.places[i];
        const auto staged =
            message.ring_offsets.empty() ? transport_message::not_staged : message.ring_offsets[i];
        if (parameter.byte_size() == 0) {
            sources_[i] = {nullptr, parameter.dtype, parameter.shape};
        } else if (staged != transport_message::not_staged && chosen.ring != place::none) {
            sources_[i] = view_of(i, gear_->mappings[chosen.ring], staged, {});
        } else if (where.allocation != place::none) {
            sources_[i] =
                view_of(i, gear_->mappings[where.allocation], where.offset, where.strides);
        } else {
            throw protocol_error{"the trainer says nowhere where this tensor lies",
                                 at_phase(phase::init, parameter.name)};
        }
    }
}

template <Machinery M>
tensor_view basic_receiver<M>::view_of(std::size_t i, const typename M::mapping& in,
                                       std::uint64_t offset,
                                       std::span<const std::int64_t> strides) const {
    const auto& parameter = (*parameters_)[i];
    const auto refuse = [&](const std::string& text) {
        auto where = at_phase(phase::init, parameter.name);
        where.bytes_total = parameter.byte_size();
        throw protocol_error{text, std::move(where)};
    };
    if (!strides.empty() && strides.size() != parameter.shape.size()) {
        refuse("the trainer gives " + std::to_string(strides.size()) + " strides for " +
               std::to_string(parameter.shape.size()) + " dimensions");
    }
    if (offset > in.size()) {
        refuse("the trainer places it at byte " + std::to_string(offset) + " of an allocation of " +
               std::to_string(in.size()));
    }
    const auto* const data = in.data() + offset;
    tensor_view view{data, parameter.dtype, parameter.shape, here()};
    if (!strides.empty()) {
        tensor_view::strides_type steps{};
        std::ranges::copy(strides, steps.begin());
        view = {data, parameter.dtype, parameter.shape, steps, here()};
    }
    const auto bytes = span_of(view);
    if (!bytes || *bytes > in.size() - offset) {
        refuse("the trainer places it at byte " + std::to_string(offset) + " of an allocation of " +
               std::to_string(in.size()) + ", past whose end it reaches");
    }
    return view;
}

template <Machinery M>
void basic_receiver<M>::release() noexcept {
    if (!detail::free_when_idle(std::move(gear_))) {
        gpu::lost_devices::note(context_.device);
    }
    gear_ = nullptr;
    sources_.clear();
    call_begins_.clear();
    parameters_ = nullptr;
    chosen_.clear();
    packed_at_init_.reset();
    opened_.clear();
    counters_.clear();
    last_event_.reset();
}

template <Machinery M>
std::string basic_receiver<M>::description() const {
    if (gear_ == nullptr) {
        return "cuda_ipc, not open";
    }
    return "cuda_ipc: " + std::to_string(gear_->mappings.size()) + " allocations are open" +
           (chosen_.empty() ? std::string{} : ", " + chosen_) + "; tables of " +
           std::to_string(table_bytes()) + " bytes";
}

}  // namespace weightwire::cuda_ipc
