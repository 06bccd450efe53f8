#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/receiver.hpp>
#include <weightwire/core/check_time.hpp>

namespace weightwire::sharded_pull {

template <PullFabric Fabric>
void basic_receiver<Fabric>::receive(const update_message& message, update_target& target,
                                     deadline until, std::stop_token stop) {
    const auto context = at_phase(phase::update);
    if (parameters_ == nullptr || !message.native || message.round == 0 || message.part != 0) {
        throw protocol_error{
            "an update of sharded_pull is native, has one part and a round from 1, and follows an "
            "init",
            context};
    }
    if (target.size() != destinations_->size()) {
        throw mismatch_error{"the session has " + std::to_string(target.size()) +
                                 " parameters, the plan " + std::to_string(destinations_->size()),
                             context};
    }
    cancel_active();
    receiving at{.target = target,
                 .table = table_for(target, until),
                 .round = message.round,
                 .until = until,
                 .stop = std::move(stop),
                 .left = units_.size()};
    active_table_ = &at.table;
    waiting_ = pending_;
    for (auto& each : traffic_) {
        each.bytes = 0;
    }
    for (auto& each : node_traffic_) {
        each.bytes = 0;
    }
    if (node_) {
        node_->begin_round();
    }
    for (auto& link : owners_) {
        link.left = link.staged;
        link.confirmed = link.staged == 0;
    }
    std::ranges::fill(begun_, 0);
    for (std::size_t i = 0; i < waiting_.size(); ++i) {
        if (waiting_[i] == 0) {  // all of it is left untouched, or it has no bytes
            target.wrote(i, 0, (*destinations_)[i].byte_size(), until);
        }
    }
    for (auto& link : owners_) {
        take_arrived(link, at);
    }
    while (at.left != 0) {
        weightwire::detail::check_time(at.until, at.stop, [&] { return awaited(at); });
        start_units(at);
        // Between two pieces of work only a look; without work a short sleep.
        listen(at, std::chrono::milliseconds{active_.empty() ? 10 : 0});
        finish_units(at);
        tell_waiting(at);
    }
    await_confirmations(at);
    if (chosen_.on_traffic) {
        chosen_.on_traffic(context_, traffic_);
    }
    if (chosen_.on_node_traffic && !node_traffic_.empty()) {
        chosen_.on_node_traffic(context_, node_traffic_);
    }
}

/// Where a round is that has not come to its end: a trainer rank from which something is missing.
template <PullFabric Fabric>
error_context basic_receiver<Fabric>::awaited(const receiving& at) const {
    const auto of_unit = [&](std::size_t index) { return owners_[units_[index].owner].rank; };
    if (!active_.empty()) {
        return at_phase(phase::update, of_unit(active_.front().index));
    }
    if (at.next < order_.size()) {
        return at_phase(phase::update, of_unit(order_[at.next]));
    }
    const auto late =
        std::ranges::find_if(owners_, [](const owner_link& l) { return l.left != 0; });
    return at_phase(phase::update, late != owners_.end() ? late->rank : -1);
}

/// The reads for the destinations that the sink gives now.
template <PullFabric Fabric>
typename basic_receiver<Fabric>::read_table& basic_receiver<Fabric>::table_for(
    update_target& target, deadline until) {
    if (target.bounced()) {
        throw unsupported_error{
            "sharded_pull writes to a parameter in several places at once, and this sink has its "
            "destinations one by one; use a parameter table",
            at_phase(phase::update)};
    }
    constexpr std::size_t most_tables = 2;
    addresses_.clear();
    for (std::size_t i = 0; i < destinations_->size(); ++i) {
        const auto to = target.open(i, until);
        const bool host = to.device().kind == memory_kind::host;
        if (to.data() != nullptr &&
            (!to.is_contiguous() || to.byte_size() != (*destinations_)[i].byte_size() ||
             (host ? !Fabric::capabilities.host_memory : !Fabric::capabilities.device_memory))) {
            auto where = at_phase(phase::update);
            where.tensor = (*destinations_)[i].name;
            throw unsupported_error{
                "its destination is not contiguous, of another size, or in memory that this fabric "
                "does not fill",
                std::move(where)};
        }
        addresses_.push_back(to.data());
    }
    const auto found = std::ranges::find(tables_, addresses_, &read_table::addresses);
    if (found != tables_.end()) {
        tables_.splice(tables_.begin(), tables_, found);
        return tables_.front();
    }
    read_table made{.addresses = addresses_, .reads = {}, .node_reads = {}, .bytes = {}};
    made.reads.reserve(units_.size());
    made.node_reads.reserve(units_.size());
    made.bytes.reserve(units_.size());
    for (const auto& each : units_) {
        add_read(each, made);
    }
    if (tables_.size() == most_tables) {
        tables_.pop_back();
    }
    tables_.push_front(std::move(made));
    return tables_.front();
}

/// @param sorted by place in the chunk, which a fabric of few large transfers wants.
/// @param place `place(position, packed)`: the memory where a read begins, and the byte.
template <PullFabric Fabric>
template <class Memory, class Place>
detail::run_list<Memory> basic_receiver<Fabric>::runs_of(const unit& what, const read_table& table,
                                                         bool sorted, Place place) const {
    const auto& section = plan_.sections()[what.section];
    detail::run_list<Memory> list;
    std::vector<remote_run<Memory>> unsorted;
    const auto add_task = [&](std::size_t i, std::uint64_t packed) {
        const auto& task = section.tasks[i];
        const auto item = plan::item_bytes_of((*parameters_)[task.read.source]);
        const auto [from, base] = place(task.read.source, packed);
        for (const auto& write : task.writes) {
            auto* const to = table.addresses[write.destination];
            if (to == nullptr) {
                continue;  // the sink does not want it
            }
            const auto add = [&, from = from, base = base](std::uint64_t source,
                                                           std::uint64_t destination,
                                                           std::uint64_t bytes) {
                if (sorted) {
                    unsorted.push_back({.from = from,
                                        .offset = base + source,
                                        .to = to + destination,
                                        .bytes = bytes});
                } else {
                    list.add(from, base + source, to + destination, bytes);
                }
            };
            if (what.in_place) {
                plan::for_each_run(write, item, add);
            } else {
                plan::for_each_run(plan::in_packed_order(task.read, write), item, add);
            }
        }
    };
    for (auto k = what.chunk; k < what.chunk + what.chunks; ++k) {
        plan::for_each_read(section, section.chunks[k], *parameters_, add_task);
    }
    std::ranges::stable_sort(unsorted, {}, &remote_run<Memory>::offset);
    for (const auto& each : unsorted) {
        list.add(each.from, each.offset, each.to, each.bytes);
    }
    return list;
}

template <PullFabric Fabric>
void basic_receiver<Fabric>::add_read(const unit& what, read_table& table) {
    const auto& link = owners_[what.owner];
    std::uint64_t bytes = 0;
    const auto count = [&bytes](const auto& list) {
        bytes = 0;
        for (const auto& each : list.runs()) {
            bytes += each.bytes * each.count;
        }
    };
    typename node::read in_node{};
    const auto* const landed =
        what.by != way::own ? node_->of(plan_.sections()[what.section].ingester) : nullptr;
    if (landed != nullptr) {
        const auto list = runs_of<typename node::memory>(what, table, !node::capabilities.in_place,
                                                         [&](std::size_t, std::uint64_t packed) {
                                                             return std::pair{landed, packed};
                                                         });
        count(list);
        in_node = node_->reader().prepare(list.runs());
    }
    table.node_reads.push_back(std::move(in_node));
    if (what.by == way::landed) {
        const auto whole = plan_.sections()[what.section].chunks[what.chunk].bytes;
        const remote_run<memory> run{.from = &*link.arena,
                                     .offset = 0,
                                     .to = node_->data() + what.landing * slot_bytes_,
                                     .bytes = whole};
        table.reads.push_back(fabric_->prepare(std::span{&run, 1}));
    } else {
        const auto list = runs_of<memory>(
            what, table, !Fabric::capabilities.in_place,
            [&](std::size_t position, std::uint64_t packed) {
                const auto* const place = link.place_of[position];
                return what.in_place ? std::pair{link.memory_of[place->memory], place->offset}
                                     : std::pair{&*link.arena, packed};
            });
        count(list);
        table.reads.push_back(fabric_->prepare(list.runs()));
    }
    table.bytes.push_back(bytes);
}

/// What is read in place needs nobody's word: it was valid when the call was made.
template <PullFabric Fabric>
void basic_receiver<Fabric>::start_units(receiving& at) {
    while (at.next < order_.size() && active_.size() < most_active) {
        const auto index = order_[at.next++];
        fabric_->start(at.table.reads[index], 0);
        active_.push_back({.index = index, .published = {}, .in_node = false});
    }
}

template <PullFabric Fabric>
void basic_receiver<Fabric>::finish_units(receiving& at) {
    for (std::size_t i = 0; i < active_.size();) {
        const auto done = active_[i];
        if (done.in_node ? node_->reader().done(at.table.node_reads[done.index])
                         : fabric_->done(at.table.reads[done.index])) {
            active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
            if (units_[done.index].by == way::landed && !done.in_node) {
                finish_landing(done, at);
            } else {
                finish(done, at);
            }
        } else {
            ++i;
        }
    }
}

template <PullFabric Fabric>
void basic_receiver<Fabric>::finish(const active_unit& done, receiving& at) {
    const auto& what = units_[done.index];
    auto& link = owners_[what.owner];
    if (!done.in_node) {
        traffic_[what.owner].bytes += at.table.bytes[done.index];
    } else if (what.by == way::peer) {
        const auto from = plan_.sections()[what.section].ingester + 1;
        std::ranges::find(node_traffic_, from, &node_traffic::worker_rank)->bytes +=
            at.table.bytes[done.index];
    }
    if (!what.in_place) {
        const auto where = at_phase(phase::update, link.rank);
        send_frame(link.socket, frame_kind::freed, bytes_of(done.published), at.until, at.stop,
                   where);
        if (--link.left == 0) {
            // At once, whatever the other owners are at: this one need not wait for them.
            send_frame(link.socket, frame_kind::taken, bytes_of(round_body{at.round}), at.until,
                       at.stop, where);
        }
    }
    for (const auto destination : what.destinations) {
        if (--waiting_[destination] == 0) {
            at.target.wrote(destination, 0, (*destinations_)[destination].byte_size(), at.until);
        }
    }
    --at.left;
}

/// Takes what the owners say.
template <PullFabric Fabric>
void basic_receiver<Fabric>::listen(receiving& at, std::chrono::milliseconds wait) {
    polled_.clear();
    for (const auto& link : owners_) {
        polled_.push_back({link.socket.native_handle(), POLLIN, 0});
    }
    if (::poll(polled_.data(), polled_.size(), static_cast<int>(wait.count())) <= 0) {
        return;
    }
    for (std::size_t i = 0; i < owners_.size(); ++i) {
        if (polled_[i].revents != 0) {
            take_frames(owners_[i], at);
        }
    }
}

template <PullFabric Fabric>
void basic_receiver<Fabric>::take_frames(owner_link& link, receiving& at) {
    const bool open = link.socket.fill();
    take_arrived(link, at);
    if (!open) {
        throw peer_error{"a trainer rank hung up in the round", at_phase(phase::update, link.rank)};
    }
}

template <PullFabric Fabric>
void basic_receiver<Fabric>::take_arrived(owner_link& link, receiving& at) {
    const auto where = at_phase(phase::update, link.rank);
    while (const std::optional<frame> got = link.socket.next()) {
        switch (got->kind) {
            case frame_kind::refused: failure_in(got->body, where).raise();
            case frame_kind::published: take_published(link, got->as<chunk_body>(), at); break;
            case frame_kind::passed: take_passed(link, got->as<chunk_body>(), at); break;
            case frame_kind::released: take_released(link, got->as<chunk_body>(), at); break;
            case frame_kind::confirmed:
                link.confirmed = link.confirmed || got->as<round_body>().round == at.round;
                break;
            default:
                throw protocol_error{"a trainer rank sent a control frame of kind " +
                                         std::to_string(static_cast<std::uint32_t>(got->kind)) +
                                         " in a round",
                                     where};
        }
    }
}

/// The chunk that an owner names; null where the plan has none such of it.
template <PullFabric Fabric>
typename basic_receiver<Fabric>::unit* basic_receiver<Fabric>::unit_of(const owner_link& link,
                                                                       const chunk_body& what) {
    const auto owner = static_cast<std::size_t>(
        std::ranges::find_if(owners_, [&](const owner_link& each) { return &each == &link; }) -
        owners_.begin());
    const auto found = std::ranges::find_if(units_, [&](const unit& each) {
        return each.owner == owner && !each.in_place && each.part_section == what.section &&
               each.chunk == what.chunk;
    });
    return found == units_.end() ? nullptr : &*found;
}

template <PullFabric Fabric>
void basic_receiver<Fabric>::take_published(owner_link& link, const chunk_body& what,
                                            receiving& at) {
    if (what.round < at.round) {
        return;  // of a round that has failed; the owner has begun anew since
    }
    const auto* const found = unit_of(link, what);
    const auto where = at_phase(phase::update, link.rank);
    if (found == nullptr || what.round != at.round) {
        throw protocol_error{"a trainer rank publishes a chunk that the plan does not have", where};
    }
    const auto index = static_cast<std::size_t>(found - units_.data());
    const bool again = begun_[index] != 0 && found->by == way::peer;
    const auto bytes = plan_.sections()[found->section].chunks[found->chunk].bytes;
    const auto slots = link.arena->size() / slot_bytes_;
    if (what.slot >= slots || bytes > slot_bytes_ || (begun_[index] != 0 && !again)) {
        throw protocol_error{"a trainer rank publishes a chunk twice, or outside of its arena",
                             where};
    }
    if (again) {
        return;  // it is read out of the landing memory of a node peer, who has failed since
    }
    begun_[index] = 1;
    if (found->by == way::landed) {
        start_landing(index, what, at);
        return;
    }
    fabric_->start(at.table.reads[index], what.slot * slot_bytes_);
    active_.push_back({.index = index, .published = what, .in_node = false});
}

/// None of the chunks was overwritten before it was copied: else the bytes in place are a mix, of
/// which the trainer knows, as it no longer counts on this rank.
template <PullFabric Fabric>
void basic_receiver<Fabric>::await_confirmations(receiving& at) {
    const auto missing = [&] {
        return std::ranges::find_if(owners_, [](const owner_link& l) { return !l.confirmed; });
    };
    for (auto at_owner = missing(); at_owner != owners_.end(); at_owner = missing()) {
        weightwire::detail::check_time(at.until, at.stop,
                                       [&] { return at_phase(phase::update, at_owner->rank); });
        listen(at, std::chrono::milliseconds{10});
    }
}

template <PullFabric Fabric>
void basic_receiver<Fabric>::cancel_active() noexcept {
    for (const auto& each : active_) {
        if (active_table_ != nullptr && each.in_node) {
            node_->reader().cancel(active_table_->node_reads[each.index]);
        } else if (active_table_ != nullptr) {
            fabric_->cancel(active_table_->reads[each.index]);
        }
    }
    active_.clear();
}

}  // namespace weightwire::sharded_pull
