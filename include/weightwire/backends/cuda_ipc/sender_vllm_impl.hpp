#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include <weightwire/backends/cuda_ipc/sender.hpp>
#include <weightwire/wire/probe.hpp>
#include <weightwire/wire/vllm_ipc.hpp>

/// @file
/// Bodies of `basic_sender`: what vLLM's servers are told.

namespace weightwire::cuda_ipc {

namespace detail {

/// `entry` says `tensor` for `gpu`; a later rank's word on the same GPU counts.
inline void say_for(wire::ipc_entry& entry, const std::string& gpu, wire::ipc_tensor tensor) {
    const auto same = std::ranges::find(entry, gpu, &wire::ipc_entry::value_type::first);
    if (same != entry.end()) {
        same->second = std::move(tensor);
    } else {
        entry.emplace_back(gpu, std::move(tensor));
    }
}

/// What torch is to take for the file of its counters: there is none of that name, as it has to be
/// for memory that torch did not export.
inline constexpr std::string_view no_ref_counter = "/none";

/// A tensor that is read in place; one without bytes opens nothing. torch keeps one storage for
/// each handle and offset in it, whatever size it is next said to have: so all tensors of an
/// allocation share one storage, the whole of it, where their alignment allows it.
[[nodiscard]] inline wire::ipc_tensor tensor_at(const param_meta& parameter, const place& where,
                                                const memory_export& from) {
    wire::ipc_tensor tensor{.extents = parameter.shape, .type = parameter.dtype};
    const auto contiguous = tensor_view{nullptr, parameter.dtype, parameter.shape}.strides();
    std::ranges::copy(contiguous, tensor.strides.begin());
    if (parameter.byte_size() == 0) {
        return tensor;
    }
    std::ranges::copy(where.strides, tensor.strides.begin());
    const auto& allocation = from.allocations[where.allocation];
    const auto item = item_bits(parameter.dtype) / 8;
    tensor.handle = allocation.handle;
    tensor.ref_counter = no_ref_counter;
    if (item != 0 && where.offset % item == 0) {
        tensor.storage_bytes = allocation.bytes;
        tensor.element_offset = where.offset / item;
    } else {
        tensor.storage_bytes =
            span_of({nullptr, parameter.dtype, parameter.shape, tensor.strides}).value_or(0);
        tensor.storage_offset = where.offset;
    }
    return tensor;
}

}  // namespace detail

/// The newest form first. The two older ones look alike at init, so that between them the number of
/// the version decides.
template <Machinery M>
std::vector<vllm_form> basic_sender<M>::forms_for(const peer_info& peer) const {
    using wire::vllm_ipc_form;
    constexpr wire::server_version first_with_args{0, 22};
    const auto version = wire::parse_server_version(peer.version);
    const auto older = version && *version < first_with_args ? vllm_ipc_form::callable_pairs
                                                             : vllm_ipc_form::packed_by_update;
    if (packed_ && !wire::can_pack(older)) {
        auto where = at_init();
        where.peer = peer.name;
        throw unsupported_error{
            "vLLM " + peer.version + " takes no packed handles: " +
                (info_.packed ? std::string{"send unpacked, from a source with stable addresses"}
                              : "these weights cannot all be exported in place (" + reason_ + ")"),
            std::move(where)};
    }
    std::vector<vllm_form> forms;
    for (const auto form : {vllm_ipc_form::packed_at_init, older}) {
        forms.push_back({.init_info = wire::encode_ipc_init(packed_, form),
                         .update_body = wire::ipc_update_body_of(form, packed_)});
    }
    return forms;
}

template <Machinery M>
std::vector<std::string> basic_sender<M>::vllm_bodies(const plan::ipc_call& call) const {
    wire::ipc_handles handles{.packed = packed_};
    if (packed_) {
        auto& entry = handles.entries.emplace_back();
        for (const auto& from : exports_) {
            detail::say_for(entry, from.gpu,
                            {.extents = {static_cast<std::int64_t>(slot_bytes_)},
                             .strides = {1},
                             .type = dtype::u8,
                             .handle = from.allocations[from.ring].handle,
                             .storage_bytes = slot_bytes_,
                             .storage_offset = call.buffer * slot_bytes_,
                             .ref_counter = std::string{detail::no_ref_counter}});
        }
    } else {
        for (const auto i : call.order) {
            auto& entry = handles.entries.emplace_back();
            for (const auto& from : exports_) {
                detail::say_for(entry, from.gpu,
                                detail::tensor_at((*parameters_)[i], from.places[i], from));
            }
        }
    }
    return wire::ipc_update_bodies(*parameters_, call.order, handles, info_.zero_dim_as_one);
}

}  // namespace weightwire::cuda_ipc
