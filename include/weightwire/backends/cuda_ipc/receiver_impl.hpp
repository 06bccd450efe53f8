#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include <weightwire/backends/cuda_ipc/receiver.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/fabrics/byte_runs.hpp>
#include <weightwire/fabrics/shared_memory_copy.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

/// @file
/// Bodies of `basic_receiver`: an update.

namespace weightwire::cuda_ipc {

template <Machinery M>
void basic_receiver<M>::receive(const update_message& message, update_target& target,
                                deadline until, std::stop_token stop) {
    receiving at{.target = target, .until = until, .stop = std::move(stop)};
    if (gear_ == nullptr) {
        throw session_error{"the trainer's memory is not open here; it has to begin with init",
                            at_phase(phase::update)};
    }
    detail::check_time(at.until, at.stop, [&] { return context_of(at); });
    gear_->copy_plans.sweep();
    gear_->conversion_plans.sweep();
    reported_.assign(target.size(), 0);
    oldest_ = waiting_count_ = 0;
    try {
        const auto sources = sources_of(message, at);
        if (target.bounced()) {
            copy_one_by_one(sources, at);
        } else {
            copy_all(sources, at);
        }
        while (waiting_count_ != 0) {
            settle_oldest(at);
        }
    } catch (...) {
        come_to_rest();
        let_go_of_foreign();
        throw;
    }
    let_go_of_foreign();
}

/// Copies that are under way end before the sink takes its memory back.
template <Machinery M>
void basic_receiver<M>::come_to_rest() noexcept {
    constexpr std::chrono::seconds bound{2};
    try {
        detail::poll_until([&] { return gear_->is_idle(); }, deadline::after(bound), {},
                           [] { return error_context{}; });
    } catch (const std::exception&) {
        gpu::lost_devices::note(context_.device);
    }
}

/// Where the tensors of this call are, in the target's order.
template <Machinery M>
std::span<const tensor_view> basic_receiver<M>::sources_of(const update_message& message,
                                                           receiving& at) {
    if (message.native != (parameters_ != nullptr)) {
        throw protocol_error{"init and update are of two wires", at_phase(phase::update)};
    }
    if (!message.native) {
        return vllm_sources(message, at);
    }
    const auto calls = call_begins_.size();
    const auto next = [&](std::size_t part) {
        return part + 1 < calls ? call_begins_[part + 1] : parameters_->size();
    };
    if (message.part >= calls || message.first != call_begins_[message.part] ||
        at.target.size() != next(message.part) - message.first) {
        throw mismatch_error{"the update is part " + std::to_string(message.part) + " with " +
                                 std::to_string(at.target.size()) + " parameters from " +
                                 std::to_string(message.first) +
                                 ", which is no call of the plan of " + std::to_string(calls),
                             at_phase(phase::update)};
    }
    at.first = message.first;
    return std::span<const tensor_view>{sources_}.subspan(message.first, at.target.size());
}

/// Launch by launch: the device copies one while the host looks at the next one's destinations.
template <Machinery M>
void basic_receiver<M>::copy_all(std::span<const tensor_view> sources, receiving& at) {
    std::uint64_t total = 0;
    for (const auto& source : sources) {
        total += source.byte_size();
    }
    const auto enough = std::max(least_launch_bytes, total / launches_a_call);
    std::uint64_t gathered = 0;
    std::size_t begin = 0;
    moves_.clear();
    conversions_.clear();
    for (std::size_t i = 0; i < sources.size(); ++i) {
        at.index = i;
        const auto to = open_destination(sources[i], at);
        if (to.data() == nullptr || sources[i].byte_size() == 0) {
            report(i, at);
        } else if (to.device().kind == M::near_memory) {
            add(to, sources[i], at);
            gathered += sources[i].byte_size();
        } else {
            to_host(to, sources[i], at);
        }
        if (gathered >= enough) {
            launch(begin, i + 1, at);
            gathered = 0;
            begin = i + 1;
        }
    }
    launch(begin, sources.size(), at);
}

/// A sink whose destinations exist only around their writes gets one tensor after the other.
template <Machinery M>
void basic_receiver<M>::copy_one_by_one(std::span<const tensor_view> sources, receiving& at) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
        at.index = i;
        const auto to = open_destination(sources[i], at);
        const auto& from = sources[i];
        if (to.data() == nullptr || from.byte_size() == 0) {
            report(i, at);
        } else if (to.device().kind == M::near_memory) {
            moves_.clear();
            conversions_.clear();
            add(to, from, at);
            launch_added();
            machine_->record(gear_->mark, gear_->copies);
            wait_for(gear_->mark, at);
            report(i, at);
        } else {
            to_host(to, from, at);
        }
    }
}

template <Machinery M>
mutable_tensor_view basic_receiver<M>::open_destination(const tensor_view& from, receiving& at) {
    if (parameters_ != nullptr) {
        const auto& planned = (*parameters_)[at.first + at.index];
        if (at.target.parameter(at.index) != planned) {
            throw mismatch_error{"the trainer named " + planned.name + " at this position at init",
                                 context_of(at)};
        }
    }
    const auto to = at.target.open(at.index, at.until);
    if (to.data() == nullptr) {
        return to;
    }
    const bool same_type = to.type() == from.type();
    if (same_type ? to.byte_size() != from.byte_size() : to.extents() != from.extents()) {
        throw mismatch_error{"the destination has " + std::to_string(to.byte_size()) +
                                 " bytes, the tensor " + std::to_string(from.byte_size()),
                             context_of(at)};
    }
    if (!same_type &&
        (!can_convert(from.type(), to.type()) || to.device().kind != M::near_memory)) {
        throw mismatch_error{"the destination is of " + std::string{to_string(to.type())} +
                                 ", the tensor of " + std::string{to_string(from.type())} +
                                 "; converted are floating-point types of 16 bits and more, to "
                                 "destinations on the device",
                             context_of(at)};
    }
    if (to.device().kind == M::near_memory && to.device().index != machine_->device()) {
        throw unsupported_error{"the destination is on device " +
                                    std::to_string(to.device().index) + ", this rank copies on " +
                                    std::to_string(machine_->device()) +
                                    "; name the rank's device in worker_options::devices",
                                context_of(at)};
    }
    return to;
}

/// Long runs of bytes are moved, anything else is converted element by element.
template <Machinery M>
void basic_receiver<M>::add(const mutable_tensor_view& to, const tensor_view& from,
                            const receiving& at) {
    if (item_bits(from.type()) % 8 != 0 && !(to.is_contiguous() && from.is_contiguous())) {
        throw unsupported_error{
            "this tensor has elements of no whole bytes, with gaps between them at the trainer or "
            "here; give it a contiguous layout",
            context_of(at)};
    }
    if (to.type() != from.type() || !detail::moves_in_runs(to, from)) {
        conversions_.push_back({to, from});
        return;
    }
    for_each_run_pair(to, from, [&](std::byte* into, const std::byte* out_of, std::size_t bytes) {
        moves_.push_back({.to = into, .from = out_of, .bytes = bytes});
        return true;
    });
}

template <Machinery M>
void basic_receiver<M>::launch_added() {
    if (!moves_.empty()) {
        gear_->copy_plans.find(moves_, [&](auto groups) { return machine_->make_copies(groups); })
            .launch(0, gear_->copies);
        moves_.clear();
    }
    if (!conversions_.empty()) {
        gear_->conversion_plans
            .find(conversions_, [&](auto groups) { return machine_->make_conversions(groups); })
            .launch(0, gear_->copies);
        conversions_.clear();
    }
}

/// Parameters `[begin, end)` are in place when what is launched here has ended.
template <Machinery M>
void basic_receiver<M>::launch(std::size_t begin, std::size_t end, receiving& at) {
    if (begin == end) {
        return;
    }
    if (waiting_count_ == most_waiting) {
        settle_oldest(at);
    }
    detail::check_time(at.until, at.stop, [&] { return context_of(at); });
    launch_added();
    const auto slot = (oldest_ + waiting_count_) % most_waiting;
    machine_->record(*gear_->settled[slot], gear_->copies);
    waiting_[slot] = {begin, end};
    ++waiting_count_;
    settle_done(at);
}

/// Host memory is written by the host, as soon as the bytes are there, and reported at once: a sink
/// may reuse its memory for the next tensor.
template <Machinery M>
void basic_receiver<M>::to_host(const mutable_tensor_view& to, const tensor_view& from,
                                receiving& at) {
    std::uint64_t offset = 0;
    weightwire::detail::each_byte_run(
        from, weightwire::detail::most_copied_runs, [&] { return context_of(at); },
        [&](const std::byte* run, std::uint64_t bytes) {
            gear_->bounce.to_host(
                run, bytes, gear_->copies,
                [&](std::uint64_t at_byte, std::span<const std::byte> piece) {
                    shm::scatter(to, offset + at_byte, piece, shm::stores::streaming);
                },
                [&](typename M::event& point) { wait_for(point, at); });
            offset += bytes;
        });
    report(at.index, at);
}

template <Machinery M>
void basic_receiver<M>::report(std::size_t i, receiving& at) {
    const auto bytes = at.target.parameter(i).byte_size();
    reported_[i] = 1;
    at.target.wrote(i, 0, bytes, at.until);
    at.placed_bytes += bytes;
}

template <Machinery M>
void basic_receiver<M>::settle_oldest(receiving& at) {
    wait_for(*gear_->settled[oldest_], at);
    const auto done = waiting_[oldest_];
    oldest_ = (oldest_ + 1) % most_waiting;
    --waiting_count_;
    for (auto i = done.begin; i < done.end; ++i) {
        if (reported_[i] == 0) {
            report(i, at);
        }
    }
}

/// The sink may install layers while others are still copied.
template <Machinery M>
void basic_receiver<M>::settle_done(receiving& at) {
    while (waiting_count_ != 0 && machine_->is_done(*gear_->settled[oldest_])) {
        settle_oldest(at);
    }
}

template <Machinery M>
void basic_receiver<M>::wait_for(typename M::event& point, const receiving& at) {
    detail::poll_until([&] { return machine_->is_done(point); }, at.until, at.stop,
                       [&] { return context_of(at); });
}

template <Machinery M>
error_context basic_receiver<M>::context_of(const receiving& at) const {
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < at.target.size(); ++i) {
        total += at.target.parameter(i).byte_size();
    }
    auto context =
        at_phase(phase::update,
                 at.index < at.target.size() ? at.target.parameter(at.index).name : std::string{});
    context.bytes_done = at.placed_bytes;
    context.bytes_total = total;
    return context;
}

}  // namespace weightwire::cuda_ipc
