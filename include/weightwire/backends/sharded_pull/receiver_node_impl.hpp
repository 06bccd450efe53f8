#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/receiver.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/wire/pull_node_codec.hpp>
#include <weightwire/wire/pull_plan_codec.hpp>

/// @file
/// Bodies of `basic_receiver`: what a worker rank does with the others of its node.

namespace weightwire::sharded_pull {

/// Who gives what, rank 0 says when it knows the needs of all. It is told whose memory cannot be
/// opened: who has died is left out, else this rank gets a route without any node peer, as it does
/// where it has no memory for them.
template <PullFabric Fabric>
void basic_receiver<Fabric>::find_plan(frame_socket& first, const plan::ownership& owners,
                                       const plan::pull_needs& needs, deadline until,
                                       const std::stop_token& stop) {
    const auto where = at_phase(phase::init, 0);
    wire::worker_needs said{
        .node = chosen_.node.empty() ? weightwire::detail::boot_id() : chosen_.node,
        .alone = false,
        .report = needs.report()};
    if (kept_ && kept_->trainer != message_.ranks.front().nonce) {
        kept_.reset();
    }
    std::vector<int> left_out;
    for (;;) {
        said.shows = kept_.has_value();
        send_frame(first, frame_kind::needs, wire::encode(said), until, stop, where);
        const auto row = await_frame(first, frame_kind::row, until, stop, where);
        plan_ = plan::plan_worker(*parameters_, message_.group_sizes, owners, needs,
                                  wire::decode_worker_route(row.body, owners),
                                  {.chunk_bytes = chunk_bytes_});
        const bool shares = std::ranges::any_of(plan_.sections(), [](const auto& section) {
            return section.ingester != plan::no_ingester;
        });
        if (plan_.worker() + 1 != context_.global_rank || (shares && said.alone) ||
            (shares && !HasWithinNode<Fabric>)) {
            throw protocol_error{
                "the trainer's routing is of another worker rank, or shares bytes with ranks whose "
                "memory this one does not read",
                where};
        }
        if (!shares) {
            kept_.reset();
            return;
        }
        const auto fault = meet_peers(first, until, stop);
        kept_.reset();
        alone_ = fault.why;
        if (alone_.empty()) {
            return;
        }
        if (fault.worker >= 0 && std::ranges::find(left_out, fault.worker) == left_out.end()) {
            left_out.push_back(fault.worker);
            said.without = fault.worker;
            kept_ = node_->leave(message_.ranks.front().nonce);
        } else {
            said.without = -1;
            said.alone = true;
        }
        node_.reset();
    }
}

/// Shows what this rank lands to its node peers, and opens what they land. Returns why that cannot
/// be, and with whom; empty where it can.
/// @throws what is wrong with rank 0 or with the time, and not with a node peer.
template <PullFabric Fabric>
auto basic_receiver<Fabric>::meet_peers(frame_socket& first, deadline until,
                                        const std::stop_token& stop) -> peer_fault {
    const auto where = at_phase(phase::init, 0);
    std::size_t chunks = 0;
    std::size_t owners = 0;  // a section each
    for (const auto& section : plan_.sections()) {
        chunks += lands(section) ? section.chunks.size() : 0;
        owners += lands(section) ? 1U : 0U;
    }
    const auto fault_of_step = [](auto step) -> std::string {
        try {
            step();
            return {};
        } catch (const timeout_error&) {
            throw;
        } catch (const cancelled_error&) {
            throw;
        } catch (const error& why) {
            return why.what();
        }
    };
    node_.emplace(context_.device);
    if (chunks != 0) {
        auto fault = fault_of_step([&] {
            node_->make(context_.device, slot_bytes_, chosen_.landing_bytes, owners, chunks,
                        plan_.worker(), std::exchange(kept_, std::nullopt), until, stop);
        });
        if (!fault.empty()) {
            return {.why = std::move(fault)};
        }
        const std::vector mine{node_->exported(plan_.worker())};
        send_frame(first, frame_kind::landing, wire::encode(mine), until, stop, where);
    }
    const auto answer = await_frame(first, frame_kind::landings, until, stop, where);
    const auto workers = static_cast<std::size_t>(std::max(context_.world_size - 1, 1));
    for (const auto& each : wire::decode_worker_landings(answer.body, workers)) {
        if (each.worker == plan_.worker()) {
            return {.why = "its node peers have opened other memory of it, or none"};
        }
        if (each.bytes == 0) {
            continue;
        }
        auto fault = fault_of_step([&] { node_->open(each, until, stop); });
        if (!fault.empty()) {
            return {.why = "worker rank " + std::to_string(each.worker + 1) + ": " + fault,
                    .worker = each.worker};
        }
    }
    return {};
}

/// Gives each chunk that is landed its slot, interleaved over the owners in the order in which
/// their chunks come.
template <PullFabric Fabric>
void basic_receiver<Fabric>::place_landings() {
    std::vector<std::vector<unit*>> by_owner(owners_.size());
    std::size_t longest = 0;
    for (auto& each : units_) {
        if (each.by == way::landed) {
            auto& mine = by_owner[each.owner];
            mine.push_back(&each);
            longest = std::max(longest, mine.size());
        }
    }
    std::size_t next = 0;
    for (std::size_t k = 0; k < longest; ++k) {
        for (const auto& mine : by_owner) {
            if (k < mine.size()) {
                mine[k]->landing = next++ % node_->slots().size();
            }
        }
    }
    for (const int peer : plan_.node_peers()) {
        node_traffic_.push_back(
            {.worker_rank = peer + 1, .bytes = 0, .planned = plan_.bytes_from_peer(peer)});
    }
}

/// A chunk that this rank takes for its node. It waits in a list, and not among the active, while
/// its landing slot is in use.
template <PullFabric Fabric>
void basic_receiver<Fabric>::start_landing(std::size_t index, const chunk_body& what,
                                           receiving& at) {
    const auto slot = units_[index].landing;
    auto& place = node_->slots()[slot];
    if (place.used) {
        node_->waiting().push_back({.unit = index, .slot = slot, .published = what});
        return;
    }
    place = {.unit = index, .used = true, .landed = false};
    fabric_->start(at.table.reads[index], what.slot * slot_bytes_);
    active_.push_back({.index = index, .published = what, .in_node = false});
}

/// It lies in landing memory: the node peers are told, and this rank copies it as they do.
template <PullFabric Fabric>
void basic_receiver<Fabric>::finish_landing(const active_unit& done, receiving& at) {
    const auto& what = units_[done.index];
    auto& link = owners_[what.owner];
    const auto& section = plan_.sections()[what.section];
    const auto& chunk = section.chunks[what.chunk];
    for (auto i = chunk.first; i < chunk.first + chunk.count; ++i) {
        const auto& read = section.tasks[i].read;
        traffic_[what.owner].bytes += read.bytes(plan::item_bytes_of((*parameters_)[read.source]));
    }
    auto said = done.published;
    said.landing = static_cast<std::uint32_t>(what.landing);
    node_->slots()[what.landing].landed = true;
    send_frame(link.socket, frame_kind::landed, bytes_of(said), at.until, at.stop,
               at_phase(phase::update, link.rank));
    node_->reader().start(at.table.node_reads[done.index], what.landing * slot_bytes_);
    active_.push_back({.index = done.index, .published = said, .in_node = true});
}

/// A node peer has landed a chunk. Never waits for anything: see landing.hpp.
template <PullFabric Fabric>
void basic_receiver<Fabric>::take_passed(owner_link& link, const chunk_body& what, receiving& at) {
    if (what.round < at.round) {
        return;  // of a round that has failed; the owner has begun anew since
    }
    const auto* const found = unit_of(link, what);
    const auto where = at_phase(phase::update, link.rank);
    if (found == nullptr || what.round != at.round || found->by != way::peer) {
        throw protocol_error{
            "a trainer rank passes on a chunk that no node peer takes for this rank", where};
    }
    const auto index = static_cast<std::size_t>(found - units_.data());
    const auto* const from = node_->of(plan_.sections()[found->section].ingester);
    const auto bytes = plan_.sections()[found->section].chunks[found->chunk].bytes;
    if (from == nullptr || what.landing >= from->size() / slot_bytes_ || bytes > slot_bytes_ ||
        begun_[index] != 0) {
        throw protocol_error{
            "a trainer rank passes on a chunk twice, or outside of the landing memory of worker "
            "rank " +
                std::to_string(plan_.sections()[found->section].ingester + 1) +
                ", which says where it has landed it",
            where};
    }
    begun_[index] = 1;
    node_->reader().start(at.table.node_reads[index], what.landing * slot_bytes_);
    active_.push_back({.index = index, .published = what, .in_node = true});
}

/// A landing slot may be filled anew; the chunk that has waited longest for it gets it.
template <PullFabric Fabric>
void basic_receiver<Fabric>::take_released(owner_link& link, const chunk_body& what,
                                           receiving& at) {
    if (what.round < at.round) {
        return;  // of a round that is over, with all that had landed in it
    }
    const auto* const found = unit_of(link, what);
    if (found == nullptr || what.round != at.round || found->by != way::landed ||
        what.landing != found->landing || !node_->slots()[found->landing].landed ||
        node_->slots()[found->landing].unit != static_cast<std::size_t>(found - units_.data())) {
        throw protocol_error{"a trainer rank releases a chunk that is not landed",
                             at_phase(phase::update, link.rank)};
    }
    node_->slots()[found->landing] = {};
    auto& waiting = node_->waiting();
    const auto next =
        std::ranges::find(waiting, found->landing, &node_landing<node>::waiting_chunk::slot);
    if (next != waiting.end()) {
        const auto one = *next;
        waiting.erase(next);
        start_landing(one.unit, one.published, at);
    }
}

/// Owners whose chunks wait for landing memory that others read: else they would take this rank for
/// a silent one.
template <PullFabric Fabric>
void basic_receiver<Fabric>::tell_waiting(receiving& at) {
    if (!node_ || node_->waiting().empty()) {
        return;
    }
    const auto now = deadline::clock::now();
    if (now - at.told < between_words) {
        return;
    }
    at.told = now;
    for (std::size_t o = 0; o < owners_.size(); ++o) {
        const bool waits = std::ranges::any_of(
            node_->waiting(), [&](const auto& each) { return units_[each.unit].owner == o; });
        if (waits) {
            send_frame(owners_[o].socket, frame_kind::waits, bytes_of(round_body{at.round}),
                       at.until, at.stop, at_phase(phase::update, owners_[o].rank));
        }
    }
}

}  // namespace weightwire::sharded_pull
