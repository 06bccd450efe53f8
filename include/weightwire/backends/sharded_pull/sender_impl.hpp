#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/backends/sharded_pull/control_connect.hpp>
#include <weightwire/backends/sharded_pull/sender.hpp>
#include <weightwire/core/check_time.hpp>
#include <weightwire/fabrics/shared_memory_copy.hpp>
#include <weightwire/fabrics/source_checks.hpp>

namespace weightwire::sharded_pull {

namespace detail {

[[nodiscard]] inline plan::position_set positions_of(std::span<const unsigned char> held,
                                                     std::size_t parameters) {
    if (held.empty()) {
        return plan::position_set::all(parameters);
    }
    std::vector<plan::position_range> ranges;
    for (std::size_t i = 0; i < held.size(); ++i) {
        if (held[i] != 0) {
            ranges.push_back({i, i + 1});
        }
    }
    return plan::position_set{std::move(ranges)};
}

/// The ranks behind each peer, then what each rank exported: `1,2\n<digest>,<digest>`.
[[nodiscard]] inline std::string shared_text(std::span<const peer_info> peers,
                                             std::span<const std::string> exports) {
    std::string text;
    for (const auto& peer : peers) {
        text += (text.empty() ? "" : ",") + std::to_string(peer.world_size);
    }
    text += "\n";
    for (const auto& each : exports) {
        text += digest_text(digest(std::as_bytes(std::span{each})));
    }
    return text;
}

}  // namespace detail

template <PullFabric Fabric>
std::string basic_sender<Fabric>::export_memory(const sender_context& context) {
    if (const auto fault = fault_of(info_); !fault.empty()) {
        throw usage_error{fault, at_init()};
    }
    let_go("the trainer rank opens its transfer anew");
    parameters_ = &context.parameters;
    part_ = {.first = 0, .count = parameters_->size()};
    stable_ = context.lifetime == tensor_lifetime::stable &&
              context.stable_tensors.size() == parameters_->size();
    tensors_.assign(context.stable_tensors.begin(), context.stable_tensors.end());
    lanes_.clear();
    owner_.emplace(info_.device);
    rank_export made{
        .machine = info_.node.empty() ? weightwire::detail::boot_id() : info_.node,
        .fabric_address = owner_->address(),
        .host = info_.host,
        .nonce = (std::uint64_t{std::random_device{}()} << 32U) | std::random_device{}()};
    made.held = detail::positions_of(context.held, parameters_->size());
    held_count_ = made.held.count();
    export_places(context, made);
    owner_terms terms{.parameters = parameters_,
                      .group_sizes = {context.group_sizes.begin(), context.group_sizes.end()},
                      .held = made.held,
                      .in_place = std::vector<unsigned char>(parameters_->size(), 0),
                      .options = {.chunk_bytes = info_.chunk_bytes},
                      .rank = info_.rank,
                      .nonce = made.nonce,
                      .slot_bytes = info_.chunk_bytes,
                      .node_once = HasWithinNode<Fabric>,
                      .whole_chunks = stable_};
    for (const auto& place : made.places) {
        terms.in_place[place.position] = 1;
    }
    arena_ = {};
    if (in_place_count_ != held_count_) {
        // Slots begin on a boundary that suits every element and every copy.
        constexpr std::uint64_t boundary = 4096;
        terms.slot_bytes = (info_.chunk_bytes + boundary - 1) / boundary * boundary;
        terms.slots = static_cast<std::size_t>(
            std::max<std::uint64_t>(info_.staging_bytes / terms.slot_bytes, 1));
        // Known where the trainer has one rank; one of several is told by its desk. Each worker
        // may take something for itself and something for its node.
        const auto workers = static_cast<std::size_t>(std::max(context.world_size - 1, 1));
        terms.slots = std::max(terms.slots, terms.node_once ? 2 * workers : workers);
        arena_ = owner_->allocate(terms.slots * terms.slot_bytes);
        const auto exported = arena_.exported();
        made.arena = exported_memory{exported.handle, exported.bytes};
    }
    desk_ = std::make_unique<owner_desk>(std::move(terms));
    constexpr std::chrono::seconds to_look_up_a_name{10};
    server_ = std::make_unique<control_server<owner_desk>>(*desk_, info_.host,
                                                           deadline::after(to_look_up_a_name));
    made.port = server_->port();
    export_ = encode(made);
    return export_;
}

template <PullFabric Fabric>
void basic_sender<Fabric>::export_places(const sender_context& context, rank_export& made) {
    in_place_count_ = 0;
    in_place_bytes_ = 0;
    reason_.clear();
    const auto note = [&](std::size_t i, std::string why) {
        if (reason_.empty()) {
            reason_ = (*parameters_)[i].name + ": " + std::move(why);
        }
    };
    exported_.clear();
    std::map<std::string, std::size_t> known;  // memories by handle
    for (std::size_t i = 0; i < parameters_->size(); ++i) {
        if (!context.held.empty() && context.held[i] == 0) {
            continue;
        }
        if (!stable_) {
            note(i, "the source does not promise stable addresses");
            return;
        }
        if (!info_.in_place || !Fabric::capabilities.in_place) {
            note(i, info_.in_place ? "this fabric reads packed chunks" : "in_place is off");
            return;
        }
        const auto& tensor = tensors_[i];
        if (tensor.byte_size() == 0) {
            ++in_place_count_;
            continue;
        }
        if (!tensor.is_contiguous()) {
            note(i, "it is not contiguous");
            continue;
        }
        auto found = owner_->export_memory(tensor.data(), tensor.byte_size());
        if (const auto* refused = std::get_if<fabric_refusal>(&found)) {
            note(i, refused->reason);
            continue;
        }
        auto& exported = std::get<fabric_export>(found);
        const auto [at, fresh] = known.emplace(exported.handle, made.memories.size());
        if (fresh) {
            if (made.memories.size() == most_memories) {
                note(i, "the weights lie in too many allocations");
                known.erase(at);
                continue;
            }
            exported_.emplace_back(i, exported);
            made.memories.push_back({std::move(exported.handle), exported.bytes});
        }
        made.places.push_back({.position = i, .memory = at->second, .offset = exported.offset});
        ++in_place_count_;
        in_place_bytes_ += tensor.byte_size();
    }
}

template <PullFabric Fabric>
std::vector<transport_init> basic_sender<Fabric>::prepare(const sender_context& context) {
    for (const auto& peer : context.peers) {
        if (!peer.native) {
            throw unsupported_error{
                "sharded_pull speaks to weightwire's own workers only",
                {.phase = phase::init, .peer = peer.name, .backend = "sharded_pull"}};
        }
    }
    if (context.exports.empty()) {
        static_cast<void>(export_memory(context));
    }
    const std::span<const std::string> exports =
        context.exports.empty() ? std::span<const std::string>{&export_, 1} : context.exports;
    transport_message message{
        .group_sizes = {context.group_sizes.begin(), context.group_sizes.end()}};
    std::vector<plan::position_set> held;
    std::vector<std::string> machines;
    for (const auto& text : exports) {
        message.ranks.push_back(decode_rank_export(text, parameters_->size()));
        held.push_back(message.ranks.back().held);
        machines.push_back(message.ranks.back().machine);
    }
    others_.assign(message.ranks.begin() + 1, message.ranks.end());
    desk_->route_for(plan::ownership{*parameters_, std::move(held)}, std::move(machines),
                     context.world_size - 1);
    plan_ = detail::shared_text(context.peers, exports);
    std::vector<int> sizes;
    for (const auto& peer : context.peers) {
        sizes.push_back(peer.world_size);
    }
    desk_->set_peers(std::move(sizes));
    return std::vector<transport_init>(context.peers.size(),
                                       transport_init{.native = encode(message)});
}

template <PullFabric Fabric>
void basic_sender<Fabric>::adopt_plan(std::string_view text) {
    const auto cut = std::min(text.find('\n'), text.size());
    const auto digests = text.substr(std::min(cut + 1, text.size()));
    constexpr std::size_t digest_length = 16;
    const auto own = static_cast<std::size_t>(info_.rank) * digest_length;
    if (own >= digests.size() || digests.substr(own, digest_length) !=
                                     digest_text(digest(std::as_bytes(std::span{export_})))) {
        throw mismatch_error{
            "rank 0 has told the workers other things of this trainer rank than it exported; do "
            "all "
            "trainer ranks run the same version?",
            at_init()};
    }
    std::vector<int> sizes;
    for (auto rest = text.substr(0, cut); !rest.empty();) {
        const auto end = std::min(rest.find(','), rest.size());
        int size = 0;
        const auto number = rest.substr(0, end);
        const auto read = std::from_chars(number.data(), number.data() + number.size(), size);
        if (read.ec != std::errc{} || size < 1) {
            throw protocol_error{"rank 0's list of peers is garbled", at_init()};
        }
        sizes.push_back(size);
        rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    desk_->set_peers(std::move(sizes));
}

template <PullFabric Fabric>
void basic_sender<Fabric>::stage(std::uint64_t round, std::size_t, tensor_stream& stream,
                                 deadline until, std::stop_token stop) {
    {
        const std::lock_guard lock{ranks_mutex_};
        round_ = round;
    }
    streams_.clear();
    if (!stable_) {
        return;  // packed as they come, in `send`
    }
    for (auto position = stream.position(); position != parameters_->size();
         position = stream.position()) {
        weightwire::detail::check_time(until, stop, [&] { return at_update(position); });
        const auto& entry =
            weightwire::detail::next_tensor(stream, [&] { return at_update(position); });
        weightwire::detail::require_unmoved(entry.tensor, tensors_[position],
                                            [&] { return at_update(position); });
        if (entry.ready_stream != nullptr &&
            std::ranges::find(streams_, entry.ready_stream) == streams_.end()) {
            streams_.push_back(entry.ready_stream);
        }
    }
    if constexpr (HasFabricCurrency<typename Fabric::owner>) {
        for (const auto& [position, exported] : exported_) {
            if (!owner_->is_current(exported)) {
                throw data_error{
                    "the memory that it lies in was freed since it was exported, and the workers "
                    "still have the former; keep the weights where they are, or call trainer_init "
                    "anew",
                    at_update(position)};
            }
        }
    }
    // Each once, when the source has given it all its work.
    for (auto* const each : streams_) {
        await_ready(each, parameters_->size(), until, stop);
    }
}

template <PullFabric Fabric>
void basic_sender<Fabric>::await_ready(void* stream, std::size_t position,
                                       [[maybe_unused]] deadline until,
                                       [[maybe_unused]] const std::stop_token& stop) {
    if (stream == nullptr) {
        return;
    }
    if constexpr (HasFabricReadiness<typename Fabric::owner>) {
        owner_->await_ready(stream, until, stop);
    } else {
        throw unsupported_error{
            "this fabric does not wait for a stream, and the source yields a tensor that is valid "
            "only after one's work",
            at_update(position)};
    }
}

template <PullFabric Fabric>
void basic_sender<Fabric>::send(std::uint64_t round, std::size_t part, tensor_stream& stream,
                                deadline until, std::stop_token stop) {
    if (!desk_ || part != 0) {
        throw usage_error{"send needs a prepared sender and part 0", at_update(0)};
    }
    const auto serve = [&](bool active) {
        if constexpr (HasFabricService<typename Fabric::owner>) {
            owner_->serve(active);
        }
    };
    serve(true);
    try {
        begin_lanes(round, until);
        pack_all(stream, until, stop);
        desk_->published_all(true);
        for (auto seen = desk_->changes(); !desk_->all_taken(); seen = desk_->changes()) {
            desk_->await_change(seen, until, stop);
        }
    } catch (...) {
        // Workers that wait for what does not come are told why; other ranks, that nobody need be
        // waited for: a worker that was not called yet never comes.
        desk_->abandon(failure::current(phase::update));
        tell_ranks(drop_body::everybody);
        come_to_rest();
        serve(false);
        throw;
    }
    serve(false);
}

template <PullFabric Fabric>
void basic_sender<Fabric>::connect_ranks(deadline until, const std::stop_token& stop) {
    std::vector<frame_socket> made;
    for (std::size_t i = 0; i < others_.size(); ++i) {
        auto where = at_init();
        where.peer = "trainer rank " + std::to_string(i + 1);
        made.push_back(connect_control(others_[i], hello_body::of_trainer, 0, until, stop, where));
    }
    const std::lock_guard lock{ranks_mutex_};
    ranks_ = std::move(made);
}

/// Never waits: what cannot be told now, a rank learns when its own patience ends.
template <PullFabric Fabric>
void basic_sender<Fabric>::tell_ranks(std::uint64_t dropped) noexcept {
    const std::lock_guard lock{ranks_mutex_};
    for (auto& rank : ranks_) {
        try {
            rank.queue(frame_kind::dropped, bytes_of(drop_body{.round = round_, .peer = dropped}));
            static_cast<void>(rank.flush());
        } catch (...) {  // NOLINT(bugprone-empty-catch): the group will tell that the rank is gone
        }
    }
}

template <PullFabric Fabric>
std::string basic_sender<Fabric>::description() const {
    if (parameters_ == nullptr) {
        return "sharded_pull, not prepared";
    }
    auto text = "sharded_pull over " + std::string{std::string_view{Fabric::name}} + ": of " +
                std::to_string(held_count_) + " tensors that this rank holds " +
                std::to_string(in_place_count_) + " are read in place (" +
                std::to_string(in_place_bytes_) + " bytes)";
    if (in_place_count_ != held_count_) {
        text += "; the others are staged in " + std::to_string(arena_.size()) +
                " bytes of exportable memory, because of " + reason_;
    }
    if constexpr (HasFabricRemark<typename Fabric::owner>) {
        if (owner_) {
            text += "; " + std::string{owner_->remark()};
        }
    }
    return text;
}

}  // namespace weightwire::sharded_pull
