#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/backends/nccl/receiver.hpp>

/// @file
/// Bodies of `basic_receiver`: joining and planning.

namespace weightwire::nccl {

template <Machinery M>
void basic_receiver<M>::open(const transport_open& init, deadline until,
                             const std::stop_token& stop) {
    release();
    detail::check_time(until, stop, [&] { return at_phase(phase::init); });
    if (context_.global_rank < 1 || context_.global_rank >= context_.world_size) {
        throw usage_error{"a worker's rank in the group is from 1 to below its size of " +
                              std::to_string(context_.world_size),
                          at_phase(phase::init)};
    }
    detail::require_no_loss(context_.device, at_phase(phase::init));
    if (!machine_) {
        machine_.emplace(context_.device, library_);
    }
    try {
        if (init.parameters != nullptr) {
            open_native(init);
        } else {
            open_vllm(init, until, stop);
        }
        // Before the join: compiling and loading take time in which the trainer would wait for us.
        machine_->load_kernels();
        if (gear_ == nullptr) {
            gear_ = std::make_unique<gear>(*machine_);
        }
        while (settled_.size() < most_waiting) {
            settled_.push_back(machine_->make_event());
        }
        gear_->group.emplace(
            machine_->join(id_, context_.world_size, context_.global_rank, until, stop));
        gear_->group->warm_up(until, stop);
    } catch (...) {
        release();
        throw;
    }
}

template <Machinery M>
void basic_receiver<M>::open_native(const transport_open& init) {
    const auto wire = decode_wire_parameters(init.wire_parameters);
    auto message = decode_transport_message(init.transport);
    require_agreement(message, machine_->nccl_version(), machine_->library_path(),
                      settings_of_environment());
    id_ = message.id;
    parameters_ = init.parameters;
    packing_ = {.packed = wire.packed};
    plan_for({.packed = wire.packed,
              .buffer_bytes = wire.packed_buffer_size_bytes,
              .buffers = static_cast<std::size_t>(wire.packed_num_buffers)},
             std::move(message.layout));
}

template <Machinery M>
void basic_receiver<M>::open_vllm(const transport_open& init, deadline until,
                                  const std::stop_token& stop) {
    const auto info = wire::decode_nccl_init(init.wire_parameters);
    if (info.world_size != context_.world_size) {
        throw mismatch_error{"the trainer says a group of " + std::to_string(info.world_size) +
                                 " ranks, this worker was placed in one of " +
                                 std::to_string(context_.world_size),
                             at_phase(phase::init)};
    }
    at_init_ = info.packing;
    if (info.id) {
        id_ = *info.id;
    } else {
        fetch_id(info, until, stop);
    }
}

/// The trainer posts init and starts its store at once, so it may not listen yet: `connect` tries
/// until the deadline.
template <Machinery M>
void basic_receiver<M>::fetch_id(const wire::vllm_nccl_init& init, deadline until,
                                 const std::stop_token& stop) {
    auto client = weightwire::rendezvous::tcp_store_client::connect(init.store->host,
                                                                    init.store->port, until, stop);
    // torch's server on the trainer waits for every rank to have come before it publishes.
    client.announce(until, stop);
    id_ = wire::unique_id_from_pickle(client.get(unique_id_key, until, stop));
    store_.emplace(std::move(client));  // vLLM's own workers stay connected too
}

/// Makes the plan, and the buffers and tables for it. No work may be under way.
template <Machinery M>
void basic_receiver<M>::plan_for(const plan::broadcast_options& options,
                                 std::optional<plan::broadcast_layout> layout) {
    plan_.reset();
    if (layout) {
        plan_.emplace(planned(), options, std::move(*layout));
    } else {
        plan_.emplace(planned(), options);
    }
    first_chunks_.clear();
    first_positions_.clear();
    std::size_t chunks = 0;
    std::size_t positions = 0;
    std::size_t longest_call = 0;
    std::size_t most_chunks = 0;
    for (const auto& call : plan_->calls()) {
        first_chunks_.push_back(chunks);
        first_positions_.push_back(positions);
        chunks += call.chunks.size();
        positions += call.order.size();
        longest_call = std::max(longest_call, call.order.size());
        most_chunks = std::max(most_chunks, call.chunks.size());
    }
    largest_ = 0;
    for (const auto& parameter : planned().parameters()) {
        largest_ = std::max(largest_, parameter.byte_size());
    }
    places_.reserve(longest_call);
    scattered_.reserve(longest_call);
    scatters_.reserve(most_chunks);
    reported_.reserve(longest_call);
    if (gear_ == nullptr) {
        gear_ = std::make_unique<gear>(*machine_);
    }
    gear_->tables.reset(chunks);
    gear_->allocate(plan_->buffer_bytes());
}

template <Machinery M>
std::string basic_receiver<M>::description() const {
    if (gear_ == nullptr || !machine_) {
        return "nccl, not joined";
    }
    return "nccl: rank " + std::to_string(context_.global_rank) + " of " +
           std::to_string(context_.world_size) +
           (plan_ ? "; " + plan_->description()
                  : std::string{"; the trainer names the tensors in "
                                "each update"}) +
           "; device memory: buffers " + std::to_string(allocated_bytes()) + " bytes, tables " +
           std::to_string(table_bytes()) + " bytes; " + machine_->library_description();
}

}  // namespace weightwire::nccl
