#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/detail/side_thread.hpp>
#include <weightwire/engine/peer_init.hpp>
#include <weightwire/engine/peer_table.hpp>
#include <weightwire/engine/reply_checks.hpp>
#include <weightwire/engine/tell.hpp>
#include <weightwire/engine/trainer_options.hpp>
#include <weightwire/wire/native.hpp>

/// @file
/// What trainer rank 0 does: speaks to the peers, and sends. The engine adds the source and the
/// other ranks.

namespace weightwire::detail {

/// The sender's side of the four phases towards all peers. One thread at a time.
template <class Tag, class Client, class Events>
class trainer_session {
    using traits = backend_traits<Tag>;
    using sender_type = typename traits::sender;
    using client_type = std::remove_reference_t<Client>;

public:
    trainer_session(const typename traits::init_info& info, client_type& client, Events& events,
                    const trainer_options& options)
        : client_{client},
          events_{events},
          options_{options},
          init_{client, peers_, options, info.init_message()},
          sender_{info} {}
    trainer_session(const trainer_session&) = delete;
    trainer_session& operator=(const trainer_session&) = delete;

    /// Probes the peers, agrees with them on the plan and opens the transport.
    /// @throws error the first peer's failure: at init every peer must take part.
    void open(const manifest& parameters, tensor_lifetime lifetime,
              std::span<const tensor_view> stable, deadline until) {
        const auto& stop = options_.stop;
        init_.find(parameters, until, stop);
        note(init_.native() ? "native wire: every peer offers it for this backend"
                            : "vLLM wire: a peer does not offer the native one");
        auto inits = sender_.prepare({.parameters = parameters,
                                      .peers = peers_.infos(),
                                      .world_size = init_.world_size(),
                                      .lifetime = lifetime,
                                      .stable_tensors = stable});
        if (inits.size() != peers_.size()) {
            throw usage_error{"the sender prepared " + std::to_string(inits.size()) +
                                  " init messages for " + std::to_string(peers_.size()) + " peers",
                              {.phase = phase::init, .backend = std::string{traits::wire_name}}};
        }
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            peers_[i].init = std::move(inits[i]);
        }
        if constexpr (HasDescription<sender_type>) {
            note(sender_.description());
        }
        open_peers([](const peer_state&) { return true; }, until, stop, /*open_sender=*/true);
        if (const auto why = peers_.first_failure()) {
            why.raise();
        }
    }

    /// One above the highest version that the peers have reported.
    [[nodiscard]] weight_version next_version() {
        weight_version highest = 0;
        for (const auto& peer : peers_) {
            highest = std::max(highest, peer.version);
        }
        return highest + 1;
    }

    /// Init again for peers that a round lost: they may have been restarted, or hold a session that
    /// we left open.
    /// @param until also when a peer that has not answered is left behind.
    /// @param stop of the round that begins.
    void rejoin(deadline until, const std::stop_token& stop) {
        stop_ = stop;
        if constexpr (HasDropPeer<sender_type>) {
            const auto lost = [](const peer_state& peer) { return !peer.live && !peer.taken_over; };
            if (!init_.native() || std::none_of(peers_.begin(), peers_.end(), lost)) {
                return;
            }
            std::vector<bool> was_lost;
            for (const auto& peer : peers_) {
                was_lost.push_back(lost(peer));
            }
            open_peers(lost, until.capped(options_.rejoin_budget), stop_, /*open_sender=*/false);
            for (std::size_t i = 0; i < peers_.size(); ++i) {
                if (was_lost[i] && peers_[i].live) {
                    tell(events_, {.kind = event_kind::peer_rejoined,
                                   .phase = phase::init,
                                   .peer = peers_[i].info.name});
                }
            }
        }
    }

    /// Begins a session on every live peer.
    /// @param until of the round: workers keep the session open so long.
    /// @param answer_until when a peer that has not answered is left behind.
    /// @throws error no peer takes part: the first one's failure.
    void start(std::uint64_t round, weight_version version, bool force, deadline until,
               deadline answer_until) {
        round_ = round;
        version_ = version;
        tell_sender();
        for (auto& peer : peers_) {
            peer.bytes = 0;
            peer.data_seconds = 0;
            peer.body = init_.native()
                            ? wire::encode(wire::native_start{.epoch = peer.epoch,
                                                              .version = version,
                                                              .force = force,
                                                              .budget_ms = budget_ms(until),
                                                              .answer_ms = budget_ms(answer_until)})
                            : std::string{"{}"};
        }
        if (init_.session_routes()) {
            take(client_.start(peers_.to_live(), answer_until, stop_), phase::start,
                 [&](peer_state& peer, const std::string& body) {
                     if (init_.native()) {
                         peer.session = wire::decode_start_reply(body).session;
                     }
                 });
        }
        require_live();
    }

    /// Moves every part: the control call and the data side by side; the first to fail stops the
    /// other.
    /// @throws error the source failed, or no live peer is left.
    void update(tensor_stream& stream, deadline until) {
        const auto parts = std::span<const update_part>{sender_.parts()};
        for (std::size_t part = 0; part < parts.size(); ++part) {
            update_part_of(parts[part], part, stream, until);
        }
        require_bytes(stream.manifest().total_bytes());
        if (stream.next() != nullptr) {
            throw usage_error{"the sender's parts end before the source does",
                              {.phase = phase::update, .backend = std::string{traits::wire_name}}};
        }
    }

    /// Commits on every live peer; a peer that does not is lost.
    void finish(deadline until) {
        std::span<const std::uint64_t> digests;
        if constexpr (HasDigests<sender_type>) {
            digests = sender_.digests();
        }
        // The worker gives up a little before we do, so that a late commit cannot follow our giving
        // up.
        const auto commit_before =
            until.when() - std::min<deadline::clock::duration>(std::chrono::milliseconds{50},
                                                               until.remaining() / 10);
        for (auto& peer : peers_) {
            peer.body = init_.native()
                            ? wire::encode(wire::native_finish{
                                  .epoch = peer.epoch,
                                  .session = peer.session,
                                  .version = version_,
                                  .budget_ms = budget_ms(until),
                                  .boot_id = boot_id_,
                                  .commit_before_ns = monotonic_ns(commit_before),
                                  .digests = {digests.begin(), digests.end()}})
                            : "{\"weight_version\":\"" + std::to_string(version_) + "\"}";
        }
        const auto committed = [&](peer_state& peer, const std::string& body) {
            if (init_.native()) {
                require_version(wire::decode_finish_reply(body).version, version_);
            }
            peer.version = version_;
            tell(events_, {.kind = event_kind::committed,
                           .phase = phase::finish,
                           .peer = peer.info.name,
                           .version = peer.version});
        };
        if (init_.session_routes()) {
            take(client_.finish(peers_.to_live(), until, stop_), phase::finish, committed);
        } else {
            for (auto& peer : peers_) {
                peer.version = peer.live ? version_ : peer.version;
            }
        }
    }

    /// After a failure between start and finish: live peers hold an open session, so the next round
    /// begins with a new init, which rolls it back.
    void abandon(const failure& why) {
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            if (peers_[i].live) {
                peers_.lose(i, why);
            }
        }
    }

    /// One outcome a peer, after `finish`.
    [[nodiscard]] std::vector<peer_outcome> outcomes() {
        std::vector<peer_outcome> out;
        for (auto& peer : peers_) {
            const auto status = status_of(peer);
            out.push_back({.peer = peer.info.name,
                           .world_size = peer.info.world_size,
                           .status = status,
                           .version = peer.version,
                           .error = peer.live ? failure{} : peer.error,
                           .bytes = peer.bytes,
                           .data_seconds = peer.data_seconds});
        }
        return out;
    }

    void close(deadline until) { sender_.close(until); }
    [[nodiscard]] int world_size() const noexcept { return init_.world_size(); }

private:
    /// A 200 with nothing moved is an error.
    void require_bytes(std::uint64_t total) {
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            if (init_.native() && peers_[i].live && peers_[i].bytes == 0) {
                peers_.lose(i, {.kind = "protocol",
                                .text = "the worker accepted the update and placed no byte of it",
                                .context = {.phase = phase::update,
                                            .peer = peers_[i].info.name,
                                            .bytes_total = total}});
            }
        }
        require_live();
    }

    [[nodiscard]] static peer_status status_of(const peer_state& peer) noexcept {
        if (peer.live) {
            return peer_status::committed;
        }
        const auto where = peer.error.context.phase;
        const bool silent = peer.error.context.native_code == 0;
        return where == phase::init               ? peer_status::left_out
               : where == phase::finish && silent ? peer_status::unknown
                                                  : peer_status::failed;
    }

    /// Sends init to the peers that `asked` picks, beside the opening of the sender.
    template <class Pick>
    void open_peers(Pick asked, deadline until, const std::stop_token& stop, bool open_sender) {
        std::stop_source stop_calls;
        std::stop_source stop_open;
        const std::stop_callback when_stopped{stop, [&] {
                                                  stop_calls.request_stop();
                                                  stop_open.request_stop();
                                              }};
        std::vector<peer_reply> replies;
        failure control;
        auto job = [&]() noexcept {
            try {
                replies = init_.call(asked, until, stop_calls.get_token());
                const auto refused = [&](const peer_reply& reply) {
                    return reply.answer.fault != reply_fault::left_out && !reply.ok();
                };
                if (std::any_of(replies.begin(), replies.end(), refused)) {
                    stop_open.request_stop();
                }
            } catch (...) {
                control = failure::current(phase::init);
                stop_open.request_stop();
            }
        };
        side_.start(job);
        failure data;
        if (open_sender) {
            try {
                sender_.open(until, stop_open.get_token());
            } catch (...) {
                data = failure::current(phase::init);
                if (data.kind != "cancelled") {
                    stop_calls.request_stop();
                }
            }
        }
        side_.wait();
        if (control) {
            control.raise();
        }
        init_.take(replies);
        if (data && (data.kind != "cancelled" || !peers_.first_failure())) {
            data.raise();
        }
    }

    /// The sender waits for the live peers and no others. It may have left one behind that answered
    /// in time all the same; peers that were lost between rounds it does not know of.
    void tell_sender() {
        if constexpr (HasDropPeer<sender_type>) {
            for (std::size_t i = 0; i < peers_.size(); ++i) {
                if (peers_[i].live) {
                    sender_.restore_peer(i);
                } else {
                    sender_.drop_peer(i);
                }
            }
        }
    }

    /// Control call and data of one part, side by side.
    void update_part_of(const update_part& part, std::size_t index, tensor_stream& stream,
                        deadline until) {
        const auto message = update_message_of(part, index, until);
        stop_data_ = std::stop_source{};
        answered_ = 0;
        std::stop_source stop_calls;
        const std::stop_callback when_stopped{stop_, [&] {
                                                  stop_calls.request_stop();
                                                  stop_data_.request_stop();
                                              }};
        std::vector<peer_reply> replies;
        failure control;
        auto job = [&]() noexcept {
            try {
                replies = client_.update(message, until, stop_calls.get_token());
            } catch (...) {
                control = failure::current(phase::update);
                stop_data_.request_stop();
            }
        };
        side_.start(job);
        failure data;
        std::exception_ptr thrown;
        const auto begin = deadline::clock::now();
        try {
            sender_.send(round_, index, stream, until, stop_data_.get_token());
        } catch (...) {
            data = failure::current(phase::update);
            thrown = std::current_exception();
            stop_calls.request_stop();
        }
        const bool hurried =
            !data && !side_.wait_until(grace_after(begin, until)) && hurry(stop_calls);
        side_.wait();
        if (control) {
            control.raise();
        }
        if (hurried) {
            blame_the_slow(replies);
        }
        const bool stopped_by_us = stop_calls.stop_requested();
        take(replies, phase::update, [&](peer_state& peer, const std::string& body) {
            if (init_.native()) {
                const auto reply = wire::decode_update_reply(body);
                require_sense(reply, peer, stream.manifest().total_bytes());
                peer.bytes += reply.bytes;
                peer.data_seconds += static_cast<double>(reply.ended_ns - reply.began_ns) * 1e-9;
            }
        });
        if (data && !(data.kind == "cancelled" && stop_data_.stop_requested())) {
            std::rethrow_exception(thrown);
        }
        if (data || !stopped_by_us) {
            require_live();
        }
    }

    /// Stops waiting for peers that the sender has left behind, once another has answered.
    [[nodiscard]] bool hurry(std::stop_source& stop_calls) noexcept {
        const bool possible = HasDropPeer<sender_type> && init_.native() && answered_ != 0;
        if (possible) {
            stop_calls.request_stop();
        }
        return possible;
    }

    [[nodiscard]] control_message update_message_of(const update_part& part, std::size_t index,
                                                    deadline until) {
        control_message message;
        if (init_.native()) {
            for (auto& peer : peers_) {
                peer.update_body =
                    wire::encode(wire::native_update{.epoch = peer.epoch,
                                                     .session = peer.session,
                                                     .plan_hash = init_.plan_hash(),
                                                     .round = round_,
                                                     .part = static_cast<std::uint32_t>(index),
                                                     .budget_ms = budget_ms(until),
                                                     .first = part.first,
                                                     .count = part.count});
            }
            message = peers_.update_to_live();
            message.content_type = wire::native_content_type;
        } else {
            vllm_body_ = part.vllm_body;
            message = peers_.to_live();
            message.bodies = {&vllm_body_, 1};
        }
        message.observer = {.call = &trainer_session::on_reply, .context = this};
        return message;
    }

    /// A peer's reply to the update call, as soon as it is known; may come from another thread.
    static void on_reply(void* context, std::size_t i, const peer_reply& reply) noexcept {
        auto& self = *static_cast<trainer_session*>(context);
        if (reply.ok()) {
            ++self.answered_;
        }
        if (reply.ok() || reply.answer.fault == reply_fault::left_out) {
            return;
        }
        self.peers_[i].live = false;
        if constexpr (HasDropPeer<sender_type>) {
            self.sender_.drop_peer(i);
            if (self.peers_.live_count() == 0) {
                self.stop_data_.request_stop();
            }
        } else {
            self.stop_data_.request_stop();
        }
    }

    /// Reads the replies of the peers that were asked; one that failed, or whose body is no reply
    /// of ours, is lost.
    template <class Read>
    void take(const std::vector<peer_reply>& replies, phase where, Read read) {
        for (std::size_t i = 0; i < replies.size(); ++i) {
            if (replies[i].answer.fault == reply_fault::left_out) {
                continue;
            }
            auto why = wire::reply_failure(replies[i], where);
            if (!why) {
                try {
                    read(peers_[i], replies[i].answer.body);
                    continue;
                } catch (const error& caught) {
                    why = failure::from(caught);
                    why.context.peer = peers_[i].info.name;
                }
            }
            tell(events_, {.kind = event_kind::peer_failed,
                           .phase = where,
                           .peer = peers_[i].info.name,
                           .text = why.text});
            peers_.lose(i, std::move(why));
            if constexpr (HasDropPeer<sender_type>) {
                sender_.drop_peer(i);
            }
        }
    }

    void require_live() const {
        if (peers_.live_count() != 0) {
            return;
        }
        if (const auto why = peers_.first_failure()) {
            why.raise();
        }
        throw usage_error{"the client has no peers", {.phase = phase::start}};
    }

    void note(std::string_view text) noexcept {
        tell(events_, {.kind = event_kind::chosen, .phase = phase::init, .text = text});
    }

    client_type& client_;
    Events& events_;
    const trainer_options& options_;
    peer_table peers_;
    peer_init<Tag, client_type> init_;
    sender_type sender_;
    std::string_view vllm_body_;
    std::string boot_id_ = boot_id();
    std::stop_source stop_data_;
    std::stop_token stop_;
    std::atomic<std::size_t> answered_{0};  ///< peers that have answered the update call
    std::uint64_t round_ = 0;
    weight_version version_ = 0;
    side_thread side_;
};

}  // namespace weightwire::detail
