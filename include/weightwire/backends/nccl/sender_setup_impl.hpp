#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/backends/nccl/sender.hpp>

/// @file
/// Bodies of `basic_sender`: planning and joining.

namespace weightwire::nccl {

template <Machinery M>
std::vector<transport_init> basic_sender<M>::prepare(const sender_context& context) {
    abandon();
    meeting_ = {};
    const error_context where{.phase = phase::init, .backend = "nccl"};
    if (const auto fault = fault_of(info_); !fault.empty()) {
        throw usage_error{fault, where};
    }
    if (context.world_size < 2) {
        throw usage_error{"a broadcast needs at least one worker rank beside the trainer", where};
    }
    detail::require_no_loss(info_.device, where);
    parameters_ = &context.parameters;
    world_size_ = context.world_size;
    to_vllm_ = std::any_of(context.peers.begin(), context.peers.end(),
                           [](const peer_info& peer) { return !peer.native; });
    if (!machine_) {
        machine_.emplace(info_.device, info_.library);
        machine_->load_kernels();
    }
    choose_plan(context);
    adopt_source(context);
    require_sendable();
    gear_ = std::make_unique<gear>(*machine_);
    gear_->allocate(plan_->buffer_bytes());
    make_gather();
    make_ways();
    make_parts();
    id_ = machine_->make_unique_id();
    meeting_ = meeting::of(info_, id_, context.peers);
    const auto native = transport_text();
    std::vector<transport_init> inits;
    for (const auto& peer : context.peers) {
        inits.push_back({.native = peer.native ? native : std::string{}});
        if (!peer.native) {
            inits.back().vllm = meeting_.forms(peer, world_size_, info_.packing());
            inits.back().missing_form = meeting_.missing_form();
        }
    }
    return inits;
}

template <Machinery M>
void basic_sender<M>::choose_plan(const sender_context& context) {
    stable_ = context.lifetime == tensor_lifetime::stable &&
              context.stable_tensors.size() == parameters_->size();
    plan_.emplace(*parameters_, plan::broadcast_options{
                                    .packed = info_.packed,
                                    .buffer_bytes = info_.packed_buffer_size_bytes,
                                    .buffers = static_cast<std::size_t>(info_.packed_num_buffers),
                                    .consumer_needs_alignment = to_vllm_,
                                    .may_reorder = stable_,
                                    .may_split = std::all_of(
                                        context.peers.begin(), context.peers.end(),
                                        [](const peer_info& peer) { return peer.session_routes; }),
                                    .zero_dim_as_one = info_.zero_dim_as_one});
}

/// Which tensors the gather of their chunk brings: those of a stable source in memory of this
/// device.
template <Machinery M>
void basic_sender<M>::adopt_source(const sender_context& context) {
    tensors_.clear();
    largest_ = 0;
    for (const auto& parameter : parameters_->parameters()) {
        largest_ = std::max(largest_, parameter.byte_size());
    }
    gathered_.assign(parameters_->size(), 0);
    own_groups_.assign(parameters_->size(), no_group);
    if (!stable_) {
        return;
    }
    tensors_.assign(context.stable_tensors.begin(), context.stable_tensors.end());
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        gathered_[i] = info_.packed && is_near(tensors_[i]) ? 1 : 0;
    }
}

/// What a round would find out too late, while the workers already wait in a broadcast.
template <Machinery M>
void basic_sender<M>::require_sendable() const {
    const auto where = [this](std::size_t i) {
        return error_context{
            .phase = phase::init, .tensor = (*parameters_)[i].name, .backend = "nccl"};
    };
    for (std::size_t i = 0; !info_.packed && i < parameters_->size(); ++i) {
        const auto type = element_for((*parameters_)[i]);
        const bool small_float =
            type == nccl_api::element::float8_e4m3fn || type == nccl_api::element::float8_e5m2;
        if (small_float && machine_->nccl_version() < 22400) {
            throw unsupported_error{"the type " + std::string{nccl_api::to_string(type)} +
                                        " needs NCCL 2.24 or newer; this is " +
                                        machine_->library_description() +
                                        "; send packed, where tensors travel as bytes",
                                    where(i)};
        }
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        // Of another GPU: copied run by run, where a gather would not reach.
        if (tensors_[i].device().kind == M::near_memory && !is_near(tensors_[i])) {
            detail::require_runs(tensors_[i], detail::most_copied_runs, [&] { return where(i); });
        }
    }
}

/// The tables stay on the device for all rounds: a launch sends nothing but its number. Packed,
/// each chunk is a group of them; unpacked, each tensor that is not contiguous.
template <Machinery M>
void basic_sender<M>::make_gather() {
    std::vector<std::vector<byte_run>> chunks;
    first_groups_.clear();
    bool any = false;
    const auto add = [&](std::size_t position, std::uint64_t offset) {
        const error_context where{
            .phase = phase::init, .tensor = (*parameters_)[position].name, .backend = "nccl"};
        detail::each_byte_run(
            tensors_[position], detail::most_table_runs, where,
            [&](const std::byte* at, std::uint64_t bytes) {
                chunks.back().push_back({const_cast<std::byte*>(at), offset, bytes});
                offset += bytes;
            });
        any = true;
    };
    for (const auto& call : plan_->calls()) {
        first_groups_.push_back(chunks.size());
        for (const auto& chunk : call.chunks) {
            chunks.emplace_back();
            for (std::size_t k = 0; k < chunk.count; ++k) {
                if (const auto i = call.order[chunk.first + k]; gathered_[i] != 0) {
                    add(i, chunk.offsets[k]);
                }
            }
        }
        for (std::size_t k = 0; !info_.packed && k < call.order.size(); ++k) {
            const auto i = call.order[k];
            if (stable_ && is_near(tensors_[i]) && !tensors_[i].is_contiguous()) {
                own_groups_[i] = chunks.size();
                chunks.emplace_back();
                add(i, 0);
            }
        }
    }
    if (any) {
        gear_->tables.emplace(machine_->make_gather(chunks));
    }
}

/// What cannot be sent from its place passes through buffers, which belong to the memory that is
/// promised before the first transfer. Of other sources it is not known where they lie.
template <Machinery M>
void basic_sender<M>::make_ways() {
    std::uint64_t staged = 0;
    bool from_host = false;
    for (const auto& tensor : tensors_) {
        from_host =
            from_host || (tensor.device().kind != M::near_memory && tensor.byte_size() != 0);
        if (!info_.packed && (!is_near(tensor) || !tensor.is_contiguous())) {
            staged = std::max<std::uint64_t>(staged, tensor.byte_size());
        }
    }
    if (staged != 0) {
        static_cast<void>(gear_->stage(staged));
    }
    if (from_host) {
        gear_->prepare_bounce();
    }
}

template <Machinery M>
void basic_sender<M>::make_parts() {
    parts_.clear();
    std::size_t first = 0;
    for (const auto& call : plan_->calls()) {
        update_part part{.first = first, .count = call.order.size()};
        if (to_vllm_) {
            part.vllm_bodies = wire::nccl_update_bodies(*parameters_, call.order, info_.packing(),
                                                        info_.zero_dim_as_one);
        }
        parts_.push_back(std::move(part));
        first += call.order.size();
    }
}

template <Machinery M>
std::string basic_sender<M>::transport_text() const {
    return encode(transport_message{.id = id_,
                                    .nccl_version = machine_->nccl_version(),
                                    .library = machine_->library_path(),
                                    .settings = settings_of_environment(),
                                    .layout = plan_->layout()});
}

template <Machinery M>
void basic_sender<M>::open(deadline until, const std::stop_token& stop) {
    if (gear_ == nullptr || gear_->group) {
        throw usage_error{"open needs a prepare before it, each time",
                          {.phase = phase::init, .backend = "nccl"}};
    }
    try {
        gear_->group.emplace(machine_->join(id_, world_size_, 0, until, stop));
        gear_->group->warm_up(until, stop);
    } catch (...) {
        abandon();
        throw;
    }
}

template <Machinery M>
std::string basic_sender<M>::description() const {
    if (!plan_ || gear_ == nullptr) {
        return "nccl, not prepared";
    }
    std::string out = "nccl: " + plan_->description() + "; device memory: buffers " +
                      std::to_string(allocated_bytes()) + " bytes, tables " +
                      std::to_string(table_bytes()) + " bytes";
    if (!info_.packed && !stable_) {
        out +=
            ", and one buffer of the largest tensor if the source yields tensors that cannot be "
            "sent from where they are";
    }
    out += "; " + machine_->library_description();
    const auto met = meeting_.description();
    return met.empty() ? out : out + "; " + met;
}

}  // namespace weightwire::nccl
