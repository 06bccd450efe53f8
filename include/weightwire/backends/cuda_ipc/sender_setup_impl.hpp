#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include <weightwire/backends/cuda_ipc/sender.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/fabrics/byte_runs.hpp>

/// @file
/// Bodies of `basic_sender`: exporting and planning.

namespace weightwire::cuda_ipc {

template <Machinery M>
std::vector<transport_init> basic_sender<M>::prepare(const sender_context& context) {
    to_vllm_ = std::any_of(context.peers.begin(), context.peers.end(),
                           [](const peer_info& peer) { return !peer.native; });
    may_split_ = std::all_of(context.peers.begin(), context.peers.end(),
                             [](const peer_info& peer) { return peer.session_routes; });
    if (context.exports.empty() || !own_) {
        export_own(context);
    }
    adopt_others(context);
    packed_ = info_.packed || (to_vllm_ && staged_count_ != 0);
    std::vector<transport_init> inits(context.peers.size());
    for (std::size_t i = 0; i < inits.size(); ++i) {
        if (!context.peers[i].native) {
            inits[i].vllm = forms_for(context.peers[i]);  // refuses before sizes are looked at
        }
    }
    choose_plan(std::nullopt);
    const auto native = transport_text();
    for (std::size_t i = 0; i < inits.size(); ++i) {
        if (context.peers[i].native) {
            inits[i].native = native;
        }
    }
    return inits;
}

template <Machinery M>
std::string basic_sender<M>::export_memory(const sender_context& context) {
    export_own(context);
    return encode(*own_);
}

/// Finds out, before anything is exported, which tensors other processes can open; makes the ring
/// for the rest.
template <Machinery M>
void basic_sender<M>::export_own(const sender_context& context) {
    static_cast<void>(detail::free_when_idle(std::move(gear_)));
    gear_ = nullptr;
    if (const auto fault = fault_of(info_); !fault.empty()) {
        throw usage_error{fault, at_init()};
    }
    if (!machine_) {
        machine_.emplace(info_.device);
        machine_->load_kernels();
    }
    gear_ = std::make_unique<gear_type>(*machine_);
    parameters_ = &context.parameters;
    stable_ = context.lifetime == tensor_lifetime::stable &&
              context.stable_tensors.size() == parameters_->size();
    tensors_.clear();
    if (stable_) {
        tensors_.assign(context.stable_tensors.begin(), context.stable_tensors.end());
    }
    digests_.assign(info_.verify ? parameters_->size() : 0, 0);
    const auto self = shm::this_process();
    memory_export own{.gpu = machine_->gpu(), .owner = self};
    own.places.resize(parameters_->size());
    known_allocations seen;
    staged_.assign(parameters_->size(), 0);
    staged_count_ = 0;
    reason_.clear();
    for (std::size_t i = 0; i < parameters_->size(); ++i) {
        if ((*parameters_)[i].byte_size() == 0) {
            continue;
        }
        auto why = why_staged(i, own, seen);
        if (why.empty()) {
            continue;
        }
        staged_[i] = 1;
        if (staged_count_++ == 0) {
            reason_ = (*parameters_)[i].name + ": " + std::move(why);
        }
    }
    own_ = std::move(own);
    make_ring(!context.exports.empty() || context.peers.empty());
}

/// Why tensor `i` cannot be read in place, in words; empty where it can, and its place is in `own`.
template <Machinery M>
std::string basic_sender<M>::why_staged(std::size_t i, memory_export& own,
                                        known_allocations& seen) {
    if (info_.packed) {
        return "packed was asked for";
    }
    if (!stable_) {
        return "the source does not promise stable addresses";
    }
    const auto& tensor = tensors_[i];
    if (tensor.device().kind != M::near_memory) {
        return "it is in host memory";
    }
    if (!is_near(tensor)) {
        return "it is on device " + std::to_string(tensor.device().index) +
               ", this rank exports device " + std::to_string(machine_->device());
    }
    const auto bytes = span_of(tensor);
    if (!bytes) {
        return "its strides cannot be described to another process";
    }
    auto found = machine_->export_of(tensor.data(), static_cast<std::size_t>(*bytes));
    if (auto* const why = std::get_if<std::string>(&found)) {
        return std::move(*why);
    }
    auto& allocation = std::get<exported_allocation>(found);
    place where{.offset = reinterpret_cast<std::uint64_t>(tensor.data()) - allocation.base};
    const std::pair key{allocation.base, allocation.buffer_id};
    if (const auto known = seen.find(key); known != seen.end()) {
        where.allocation = known->second;
    } else {
        if (own.allocations.size() + 1 == most_allocations) {  // one is for the ring
            return "the weights lie in more than " + std::to_string(most_allocations) +
                   " allocations";
        }
        where.allocation = static_cast<std::uint32_t>(own.allocations.size());
        seen.emplace(key, where.allocation);
        own.allocations.push_back(std::move(allocation));
    }
    if (!tensor.is_contiguous()) {
        where.strides.assign(
            tensor.strides().begin(),
            tensor.strides().begin() + static_cast<std::ptrdiff_t>(tensor.extents().size()));
    }
    own.places[i] = std::move(where);
    return {};
}

/// Buffers as large as what passes through them needs, and no more of them.
/// @param all_may_pass a peer may be vLLM's, for which one staged tensor means that all are.
template <Machinery M>
void basic_sender<M>::make_ring(bool all_may_pass) {
    slot_bytes_ = 0;
    slots_ = 0;
    if (staged_count_ == 0) {
        return;
    }
    std::uint64_t total = 0;
    std::uint64_t largest = 0;
    for (std::size_t i = 0; i < parameters_->size(); ++i) {
        if (staged_[i] != 0 || all_may_pass || to_vllm_) {
            total += (*parameters_)[i].byte_size() + plan::ipc_plan::alignment;
            largest = std::max(largest, (*parameters_)[i].byte_size());
        }
    }
    const auto wanted = std::min(info_.packed_buffer_size_bytes, total);
    slot_bytes_ = info_.packed ? wanted : std::max(largest, wanted);
    constexpr std::uint64_t alignment = 256;
    slot_bytes_ = (slot_bytes_ + alignment - 1) / alignment * alignment;
    slots_ = slot_bytes_ >= total ? 1 : static_cast<std::size_t>(info_.packed_num_buffers);
    gear_->ring = machine_->allocate_exportable(static_cast<std::size_t>(slot_bytes_ * slots_));
    auto found = machine_->export_of(gear_->ring.data(), gear_->ring.size());
    if (const auto* const why = std::get_if<std::string>(&found)) {
        throw resource_error{"the ring cannot be exported: " + *why, at_init()};
    }
    own_->allocations.push_back(std::move(std::get<exported_allocation>(found)));
    own_->ring = static_cast<std::uint32_t>(own_->allocations.size() - 1);
}

/// The other ranks' copies. All ranks stage the same tensors, since one plan serves all.
template <Machinery M>
void basic_sender<M>::adopt_others(const sender_context& context) {
    exports_.clear();
    if (context.exports.empty()) {
        exports_.push_back(*own_);
        return;
    }
    for (std::size_t rank = 0; rank < context.exports.size(); ++rank) {
        auto theirs = decode_memory_export(context.exports[rank]);
        auto where = at_init();
        where.rank = static_cast<int>(rank);
        if (theirs.places.size() != parameters_->size()) {
            throw usage_error{"this trainer rank exports " + std::to_string(theirs.places.size()) +
                                  " tensors, rank 0 " + std::to_string(parameters_->size()),
                              where};
        }
        for (std::size_t i = 0; i < theirs.places.size(); ++i) {
            const bool staged =
                theirs.places[i].allocation == place::none && (*parameters_)[i].byte_size() != 0;
            if (staged != (staged_[i] != 0)) {
                where.tensor = (*parameters_)[i].name;
                throw usage_error{
                    std::string{"one trainer rank can export this tensor in place and another "
                                "cannot ("} +
                        (staged ? "this one cannot" : "rank 0 cannot: " + reason_) +
                        "); set packed on all ranks, or allocate it alike",
                    where};
            }
        }
        exports_.push_back(std::move(theirs));
    }
}

/// @param layout what rank 0 has chosen; nothing on rank 0.
template <Machinery M>
void basic_sender<M>::choose_plan(std::optional<plan::broadcast_layout> layout) {
    const plan::ipc_options options{.packed = packed_,
                                    .buffer_bytes = slot_bytes_,
                                    .buffers = std::max<std::size_t>(slots_, 1),
                                    .consumer_needs_alignment = to_vllm_,
                                    .may_reorder = stable_,
                                    .may_split = may_split_,
                                    .zero_dim_as_one = info_.zero_dim_as_one};
    if (layout) {
        plan_.emplace(*parameters_, options, staged_, std::move(*layout));
    } else {
        plan_.emplace(*parameters_, options, staged_);
    }
    make_gathers();
    make_parts();
    if (info_.verify) {
        machine_->prepare_digests(parts_.size());
    }
}

/// The tables stay on the device for all rounds: a launch sends nothing but its number. Each call
/// is a group of them.
template <Machinery M>
void basic_sender<M>::make_gathers() {
    gear_->gathers.reset();
    gear_->conversions.reset();
    gear_->bounce_needed = false;
    std::vector<std::vector<byte_move>> groups;
    std::vector<std::vector<conversion>> unlike;
    bool any_moves = false;
    bool any_unlike = false;
    for (const auto& call : plan_->calls()) {
        groups.emplace_back();
        unlike.emplace_back();
        for (std::size_t k = 0; k < call.order.size(); ++k) {
            const auto i = call.order[k];
            const auto bytes = (*parameters_)[i].byte_size();
            if (call.offsets[k] == plan::ipc_plan::in_place || bytes == 0) {
                continue;
            }
            if (!stable_ || !is_near(tensors_[i])) {
                gear_->bounce_needed = gear_->bounce_needed || stable_;
                continue;
            }
            auto* to = ring_at(call, k);
            const mutable_tensor_view place{to, tensors_[i].type(), tensors_[i].extents(),
                                            tensors_[i].device()};
            if (item_bits(tensors_[i].type()) % 8 != 0) {
                weightwire::detail::require_runs(tensors_[i], 0, [&] {
                    return at_init((*parameters_)[i].name);
                });  // not contiguous, it lies in no whole bytes
            }
            if (!detail::moves_in_runs(place, tensors_[i])) {
                unlike.back().push_back({place, tensors_[i]});
                any_unlike = true;
                continue;
            }
            for_each_run(tensors_[i], [&](const std::byte* from, std::size_t count) {
                groups.back().push_back({.to = to, .from = from, .bytes = count});
                to += count;
            });
            any_moves = true;
        }
    }
    if (any_moves) {
        gear_->gathers.emplace(machine_->make_copies(groups));
    }
    if (any_unlike) {
        gear_->conversions.emplace(machine_->make_conversions(unlike));
    }
    if (gear_->bounce_needed) {
        gear_->bounce.prepare();
    }
}

template <Machinery M>
void basic_sender<M>::make_parts() {
    parts_.clear();
    std::size_t first = 0;
    for (const auto& call : plan_->calls()) {
        update_part part{.first = first, .count = call.order.size()};
        if (to_vllm_ && !exports_.empty()) {
            part.vllm_bodies = vllm_bodies(call);
        }
        parts_.push_back(std::move(part));
        first += call.order.size();
    }
    if (plan_->reordered() && !parts_.empty()) {
        parts_.front().read_until = parameters_->size();  // see `walk_ahead`
    }
    next_part_ = 0;
    round_ = 0;
}

template <Machinery M>
std::string basic_sender<M>::transport_text() const {
    transport_message message{.boot_id = weightwire::detail::boot_id(),
                              .call_begins = plan_->layout().call_begins,
                              .exports = exports_};
    if (own_->ring != place::none) {
        message.ring_offsets.assign(parameters_->size(), transport_message::not_staged);
        for (const auto& call : plan_->calls()) {
            for (std::size_t k = 0; k < call.order.size(); ++k) {
                const auto i = call.order[k];
                if (call.offsets[k] != plan::ipc_plan::in_place &&
                    (*parameters_)[i].byte_size() != 0) {
                    message.ring_offsets[i] = call.buffer * slot_bytes_ + call.offsets[k];
                }
            }
        }
    }
    return encode(message);
}

/// Rank 0's choices that the others cannot make: they know no peers.
template <Machinery M>
std::string basic_sender<M>::shared_plan() const {
    std::string text;
    wire::json_writer out{text};
    out.begin_object().key("packed").boolean(packed_).key("to_vllm").boolean(to_vllm_);
    out.key("may_split").boolean(may_split_);
    out.key("buffers").integer(slots_).key("buffer_bytes").integer(slot_bytes_);
    out.key("order").integer(static_cast<int>(plan_->layout().order));
    out.key("calls").begin_array();
    for (const auto begin : plan_->layout().call_begins) {
        out.integer(begin);
    }
    out.end_array().end_object();
    return text;
}

template <Machinery M>
void basic_sender<M>::adopt_plan(std::string_view text) {
    const wire::json_document document{text, "cuda_ipc plan of trainer rank 0", phase::init};
    const auto root = document.root();
    root.allow_only(
        {"packed", "to_vllm", "may_split", "buffers", "buffer_bytes", "order", "calls"});
    if (root.at("buffers").natural() != slots_ ||
        root.at("buffer_bytes").natural() != slot_bytes_) {
        throw usage_error{"this trainer rank's ring has " + std::to_string(slots_) +
                              " buffers of " + std::to_string(slot_bytes_) +
                              " bytes, which is not what rank 0's has; give all ranks the same "
                              "packed_buffer_size_bytes and packed_num_buffers",
                          at_init()};
    }
    packed_ = root.at("packed").boolean();
    to_vllm_ = root.at("to_vllm").boolean();
    may_split_ = root.at("may_split").boolean();
    choose_plan(
        plan::broadcast_layout{.order = static_cast<plan::sending_order>(root.at("order").integer(
                                   0, static_cast<int>(plan::sending_order::by_item_size))),
                               .call_begins = detail::read_calls(root.at("calls"))});
}

template <Machinery M>
std::string basic_sender<M>::description() const {
    if (!plan_ || gear_ == nullptr) {
        return "cuda_ipc, not prepared";
    }
    std::uint64_t staged = 0;
    std::size_t empty = 0;
    for (std::size_t i = 0; i < parameters_->size(); ++i) {
        const auto bytes = (*parameters_)[i].byte_size();
        staged += packed_ || staged_[i] != 0 ? bytes : 0;
        empty += bytes == 0 ? 1 : 0;
    }
    const auto through = packed_ ? parameters_->size() - empty : staged_count_;
    const auto direct = parameters_->size() - empty - through;
    std::string out =
        "cuda_ipc: " + std::to_string(direct) + " tensors of " +
        std::to_string(parameters_->total_bytes() - staged) + " bytes are read in place from " +
        std::to_string(own_->allocations.size() - (own_->ring != place::none)) + " allocations";
    if (through != 0) {
        out += "; " + std::to_string(through) + " of " + std::to_string(staged) +
               " bytes pass through a ring of " + std::to_string(slots_) + " buffers of " +
               std::to_string(slot_bytes_) + " bytes, the first because " + reason_;
    }
    if (packed_ && !info_.packed) {
        out += "; all pass through it, since a peer is vLLM's";
    }
    return out + "; " + plan_->description() + "; tables of " + std::to_string(table_bytes()) +
           " bytes";
}

}  // namespace weightwire::cuda_ipc
