#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include <weightwire/backends/cuda_ipc/receiver.hpp>
#include <weightwire/fabrics/torch_ref_counter.hpp>
#include <weightwire/wire/vllm_ipc.hpp>

/// @file
/// Bodies of `basic_receiver`: what vLLM's trainers say.

namespace weightwire::cuda_ipc {

template <Machinery M>
void basic_receiver<M>::open_vllm(const transport_open& init) {
    packed_at_init_ = wire::decode_ipc_init(init.wire_parameters);
    // How many calls and launches a round has is not known before it: those of a packed model of a
    // terabyte, in two places.
    constexpr std::size_t enough = 4096;
    gear_->copy_plans.reserve(enough);
    gear_->conversion_plans.reserve(enough);
    chosen_ = "which a vLLM trainer names in every update";
}

/// Opens what the call names, each allocation once. Its handles say nothing of when they were made,
/// and an allocation that takes a freed one's place may have the same: so what was opened is closed
/// when the call has ended.
template <Machinery M>
std::span<const tensor_view> basic_receiver<M>::vllm_sources(const update_message& message,
                                                             receiving& at) {
    const auto update = wire::ipc_update_of(packed_at_init_, message.extras);
    std::vector<param_meta> list;
    list.reserve(at.target.size());
    for (std::size_t i = 0; i < at.target.size(); ++i) {
        list.push_back(at.target.parameter(i));
    }
    const manifest parameters{std::move(list)};
    const auto gpu = machine_->gpu();
    // All of them, before anything else can fail here: an export that is not counted down is kept
    // for ever, as those are of a call that is refused before it comes to the receiver.
    for (const auto& entry : update.handles.entries) {
        const auto mine = std::ranges::find(entry, gpu, &wire::ipc_entry::value_type::first);
        if (mine != entry.end() && !mine->second.ref_counter.empty()) {
            counters_[mine->second.ref_counter].push_back(mine->second.ref_slot);
        }
    }
    wire::require_ipc_update_fits(update, parameters);
    sources_.clear();
    opened_.clear();
    if (update.handles.packed) {
        const auto& buffer = wire::ipc_tensor_for(update.handles.entries.front(), gpu);
        const auto* from = open_foreign(buffer, parameters.total_bytes(), at);
        for (const auto& parameter : parameters.parameters()) {
            sources_.emplace_back(from, parameter.dtype, parameter.shape, here());
            from = from == nullptr ? nullptr : from + parameter.byte_size();
        }
        return sources_;
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        at.index = i;
        const auto& tensor = wire::ipc_tensor_for(update.handles.entries[i], gpu);
        const tensor_view shaped{nullptr, tensor.type, tensor.extents, tensor.strides, here()};
        const auto* from = open_foreign(tensor, span_of(shaped).value_or(0), at);
        sources_.emplace_back(from, tensor.type, tensor.extents, tensor.strides, here());
    }
    at.index = 0;
    return sources_;
}

/// The first of `bytes` bytes of a tensor; null where it has none.
/// @throws protocol_error what is opened is smaller than the tensor needs.
template <Machinery M>
const std::byte* basic_receiver<M>::open_foreign(const wire::ipc_tensor& tensor,
                                                 std::uint64_t bytes, receiving& at) {
    if (bytes == 0 || tensor.handle.empty()) {
        return nullptr;
    }
    detail::check_time(at.until, at.stop, [&] { return context_of(at); });
    auto known = opened_.find(tensor.handle);
    if (known == opened_.end()) {
        gear_->mappings.push_back(
            detail::saying_where([&] { return machine_->open({}, {.handle = tensor.handle}); },
                                 [&] { return context_of(at); }));
        known = opened_.emplace(tensor.handle, gear_->mappings.size() - 1).first;
    }
    const auto& mapping = gear_->mappings[known->second];
    const auto offset = wire::ipc_offset_of(tensor);
    if (offset > mapping.size() || bytes > mapping.size() - offset) {
        throw protocol_error{"the trainer places it at byte " + std::to_string(offset) +
                                 " of an allocation of " + std::to_string(mapping.size()) +
                                 ", past whose end it reaches",
                             context_of(at)};
    }
    await_foreign(tensor, at);
    return mapping.data() + offset;
}

/// The tensor is valid once an event of the trainer was reached. torch's exports of one moment
/// share it or follow one another, so that the wait is for the first.
template <Machinery M>
void basic_receiver<M>::await_foreign(const wire::ipc_tensor& tensor, receiving& at) {
    if (!tensor.event_sync || tensor.event == last_event_) {
        return;
    }
    const auto event = detail::saying_where(
        [&] { return machine_->open_foreign_event(tensor.event); }, [&] { return context_of(at); });
    detail::poll_until([&] { return event.is_done(); }, at.until, at.stop,
                       [&] { return context_of(at); });
    last_event_ = tensor.event;
}

/// The trainer may use its memory again: nothing of this call reads it any more.
template <Machinery M>
void basic_receiver<M>::let_go_of_foreign() noexcept {
    if (parameters_ != nullptr || gear_ == nullptr || lost()) {
        return;
    }
    for (const auto& [name, slots] : counters_) {
        static_cast<void>(release_torch_counters(name, slots));
    }
    counters_.clear();
    opened_.clear();
    last_event_.reset();
    gear_->mappings.clear();
}

}  // namespace weightwire::cuda_ipc
