#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/control_connect.hpp>
#include <weightwire/backends/sharded_pull/receiver.hpp>
#include <weightwire/core/check_time.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/plan/loaders.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/recorder.hpp>
#include <weightwire/wire/pull_plan_codec.hpp>

namespace weightwire::sharded_pull {

namespace detail {

/// The loader of a worker that holds what the trainer has.
inline void load_all_alike(plan::recorder& made) {
    for (const auto& parameter : made.destinations().parameters()) {
        plan::loaders::replicated(made.source(parameter.name), made.destination(parameter.name));
    }
}

}  // namespace detail

template <PullFabric Fabric>
void basic_receiver<Fabric>::open(const transport_open& init, deadline until,
                                  const std::stop_token& stop) {
    release();
    fabric_.emplace(context_.device);
    const auto context = at_phase(phase::init);
    weightwire::detail::check_time(until, stop, [&] { return context; });
    if (init.parameters == nullptr || init.destinations == nullptr || init.transport.empty()) {
        throw unsupported_error{
            "sharded_pull takes weights from a weightwire trainer only, into a sink that says what "
            "it holds",
            context};
    }
    if (context_.global_rank < 1) {
        throw usage_error{"a worker's rank in the transfer group is 1 or more", context};
    }
    if (const auto fault = fault_of_node(chosen_.node); !fault.empty()) {
        throw usage_error{fault, context};
    }
    parameters_ = init.parameters;
    destinations_ = init.destinations;
    const auto wire = decode_wire_parameters(init.wire_parameters);
    if (wire.fabric != std::string_view{Fabric::name}) {
        throw unsupported_error{
            "the trainer serves over the fabric '" + wire.fabric + "', this worker reads over '" +
                std::string{std::string_view{Fabric::name}} + "'; choose one on both sides",
            context};
    }
    constexpr std::uint64_t boundary = 4096;
    chunk_bytes_ = wire.chunk_bytes;
    slot_bytes_ = (wire.chunk_bytes + boundary - 1) / boundary * boundary;
    message_ = decode_transport_message(init.transport, *init.parameters);

    const auto recorded = plan::record(*parameters_, *destinations_, [&](plan::recorder& made) {
        if (chosen_.loader) {
            chosen_.loader(made, context_);
        } else {
            detail::load_all_alike(made);
        }
    });
    const plan::pull_needs needs{*parameters_, *destinations_, recorded};
    std::vector<plan::position_set> held;
    for (const auto& rank : message_.ranks) {
        held.push_back(rank.held);
    }
    const plan::ownership owners{*parameters_, std::move(held)};

    auto first = connect(0, until, stop);
    find_plan(first, owners, needs, until, stop);
    for (const int rank : plan_.owners()) {
        owner_link& link = owners_.emplace_back();
        link.rank = rank;
        link.socket = rank == 0 ? std::move(first) : connect(rank, until, stop);
    }
    if (std::ranges::none_of(owners_, [](const owner_link& link) { return link.rank == 0; })) {
        first_ = std::move(first);
    }
    make_units(*parameters_);
    for (auto& link : owners_) {
        open_memories(link, until, stop);
        agree(link, until, stop);
    }
}

template <PullFabric Fabric>
frame_socket basic_receiver<Fabric>::connect(int rank, deadline until,
                                             const std::stop_token& stop) const {
    return connect_control(message_.ranks[static_cast<std::size_t>(rank)],
                           static_cast<std::uint32_t>(context_.global_rank),
                           static_cast<std::uint32_t>(context_.world_size), until, stop,
                           at_phase(phase::init, rank));
}

/// The chunks of the plan, each with whom it comes from and which destinations wait for it. Those
/// of a section that are read in place and follow one another are one, up to a bound.
template <PullFabric Fabric>
void basic_receiver<Fabric>::make_units(const manifest& parameters) {
    for (auto& link : owners_) {
        const auto& exported = message_.ranks[static_cast<std::size_t>(link.rank)];
        link.place_of.assign(parameters.size(), nullptr);
        link.in_place.assign(parameters.size(), 0);
        for (const auto& place : exported.places) {
            link.place_of[place.position] = &place;
            link.in_place[place.position] = 1;
        }
    }
    pending_.assign(destinations_->size(), 0);
    const auto sections = plan_.sections();
    std::vector<std::uint32_t> part_sections(owners_.size(), 0);
    for (std::size_t s = 0; s < sections.size(); ++s) {
        const auto& section = sections[s];
        const auto at = std::ranges::find(owners_, section.owner, &owner_link::rank);
        const auto owner = static_cast<std::size_t>(at - owners_.begin());
        const auto part_section = part_sections[owner]++;
        for (std::size_t k = 0; k < section.chunks.size(); ++k) {
            unit made{.owner = owner,
                      .section = s,
                      .part_section = part_section,
                      .chunk = static_cast<std::uint32_t>(k)};
            const auto in_place = [&](const plan::pull_chunk& chunk) {
                return is_in_place(
                    chunk,
                    [&](std::size_t i) -> const plan::pull_read& { return section.tasks[i].read; },
                    at->in_place);
            };
            made.in_place = in_place(section.chunks[k]);
            made.by = made.in_place || section.ingester == plan::no_ingester ? way::own
                      : lands(section)                                       ? way::landed
                                                                             : way::peer;
            for (auto bytes = section.chunks[k].bytes;
                 made.in_place && k + 1 < section.chunks.size() &&
                 bytes + section.chunks[k + 1].bytes <= in_place_unit_bytes &&
                 in_place(section.chunks[k + 1]);
                 bytes += section.chunks[++k].bytes) {
                ++made.chunks;
            }
            const auto& last = section.chunks[k];
            for (auto i = section.chunks[made.chunk].first; i < last.first + last.count; ++i) {
                for (const auto& write : section.tasks[i].writes) {
                    made.destinations.push_back(write.destination);
                }
            }
            std::ranges::sort(made.destinations);
            const auto same = std::ranges::unique(made.destinations);
            made.destinations.erase(same.begin(), same.end());
            for (const auto destination : made.destinations) {
                ++pending_[destination];
            }
            at->staged += made.in_place ? 0 : 1;
            units_.push_back(std::move(made));
        }
    }
    // Workers begin at different owners, and go round them.
    std::vector<std::vector<std::size_t>> by_owner(owners_.size());
    for (std::size_t i = 0; i < units_.size(); ++i) {
        if (units_[i].in_place) {
            by_owner[units_[i].owner].push_back(i);
        }
    }
    std::size_t longest = 0;
    for (const auto& each : by_owner) {
        longest = std::max(longest, each.size());
    }
    for (std::size_t k = 0; k < longest; ++k) {
        for (std::size_t o = 0; o < by_owner.size(); ++o) {
            const auto& mine =
                by_owner[(o + static_cast<std::size_t>(context_.global_rank)) % by_owner.size()];
            if (k < mine.size()) {
                order_.push_back(mine[k]);
            }
        }
    }
    if (node_) {
        place_landings();
    }
    begun_.resize(units_.size());
    for (const auto& link : owners_) {
        traffic_.push_back({.trainer_rank = link.rank, .planned = plan_.bytes_from(link.rank)});
    }
    active_.reserve(most_active + units_.size());
}

template <PullFabric Fabric>
void basic_receiver<Fabric>::open_memories(owner_link& link, deadline until,
                                           const std::stop_token& stop) {
    const auto& exported = message_.ranks[static_cast<std::size_t>(link.rank)];
    const auto where = at_phase(phase::init, link.rank);
    link.connection.emplace(fabric_->connect(exported.fabric_address, until, stop));
    link.memory_of.assign(exported.memories.size(), nullptr);
    for (const auto& each : units_) {
        if (!each.in_place || &owners_[each.owner] != &link) {
            continue;
        }
        const auto& section = plan_.sections()[each.section];
        const auto& last = section.chunks[each.chunk + each.chunks - 1];
        for (auto i = section.chunks[each.chunk].first; i < last.first + last.count; ++i) {
            const auto position = section.tasks[i].read.source;
            const auto& place = *link.place_of[position];
            auto& opened = link.memory_of[place.memory];
            if (opened == nullptr) {
                const auto& named = exported.memories[place.memory];
                link.memories.push_back(
                    fabric_->open(*link.connection, named.handle, named.bytes, until, stop));
                opened = &link.memories.back();
            }
            const auto bytes = (*parameters_)[position].byte_size();
            if (place.offset > opened->size() || bytes > opened->size() - place.offset) {
                auto at = where;
                at.tensor = (*parameters_)[position].name;
                throw protocol_error{"the trainer rank places it at byte " +
                                         std::to_string(place.offset) + " of an allocation of " +
                                         std::to_string(opened->size()) + " bytes",
                                     std::move(at)};
            }
        }
    }
    if (link.staged != 0) {
        if (!exported.arena) {
            throw protocol_error{
                "the trainer rank neither shows its weights in place nor has an arena to stage "
                "them in",
                where};
        }
        link.arena.emplace(fabric_->open(*link.connection, exported.arena->handle,
                                         exported.arena->bytes, until, stop));
    }
}

/// No byte moves before the owner has understood its part as it was meant.
template <PullFabric Fabric>
void basic_receiver<Fabric>::agree(owner_link& link, deadline until, const std::stop_token& stop) {
    const auto where = at_phase(phase::init, link.rank);
    const auto part = plan_.part_for(link.rank);
    send_frame(link.socket, frame_kind::part, wire::encode(part), until, stop, where);
    const frame answer = await_frame(link.socket, frame_kind::accepted, until, stop, where);
    const auto theirs = answer.as<hash_body>().hash;
    const auto ours = plan::hash_of(part);
    if (theirs != ours) {
        throw mismatch_error{"the trainer rank understands the plan as " + digest_text(theirs) +
                                 ", this worker as " + digest_text(ours) +
                                 "; nothing has moved, run one version on both sides",
                             where};
    }
}

template <PullFabric Fabric>
void basic_receiver<Fabric>::release() noexcept {
    cancel_active();
    if constexpr (HasFabricRest<typename Fabric::reader>) {
        if (fabric_) {
            fabric_->come_to_rest();
        }
    }
    lost_ = lost();
    if (lost_) {
        // Freeing what the device may still use would wait for it: left to the end of the process.
        static_cast<void>(new auto(std::move(tables_)));
        static_cast<void>(new auto(std::move(owners_)));
        static_cast<void>(new auto(std::move(node_)));
        static_cast<void>(new auto(std::exchange(kept_, std::nullopt)));
    }
    tables_.clear();
    active_table_ = nullptr;
    units_.clear();
    order_.clear();
    pending_.clear();
    waiting_.clear();
    begun_.clear();
    traffic_.clear();
    node_traffic_.clear();
    owners_.clear();
    first_ = {};
    if (node_) {
        kept_ = node_->leave(message_.ranks.front().nonce);
    }
    node_.reset();
    fabric_.reset();
    alone_.clear();
    plan_ = {};
    message_ = {};
    parameters_ = nullptr;
    destinations_ = nullptr;
}

template <PullFabric Fabric>
std::string basic_receiver<Fabric>::description() const {
    std::size_t staged = 0;
    for (const auto& link : owners_) {
        staged += link.staged;
    }
    auto text = "sharded_pull over " + std::string{std::string_view{Fabric::name}} + ": " +
                std::to_string(plan_.bytes()) + " bytes a round from " +
                std::to_string(owners_.size()) + " trainer ranks, " +
                std::to_string(units_.size() - staged) + " chunks in place and " +
                std::to_string(staged) + " staged";
    if (node_) {
        const auto of = [&](way by) {
            return std::to_string(std::ranges::count(units_, by, &unit::by));
        };
        text += "; " + of(way::landed) + " of them land in " + std::to_string(node_->size()) +
                " bytes of memory for the node, " + of(way::peer) + " are read from node peers (" +
                std::to_string(node_traffic_.size()) + ")";
    }
    if (!alone_.empty()) {
        text += "; nothing is taken once for the node, because of: " + alone_;
    }
    if constexpr (HasFabricRemark<typename Fabric::reader>) {
        text += fabric_ ? "; " + std::string{fabric_->remark()} : std::string{};
    }
    return text;
}

}  // namespace weightwire::sharded_pull
