#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
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
#include <weightwire/engine/peer_data_half.hpp>
#include <weightwire/engine/peer_init.hpp>
#include <weightwire/engine/peer_table.hpp>
#include <weightwire/engine/reply_checks.hpp>
#include <weightwire/engine/session_opening.hpp>
#include <weightwire/engine/stage_part.hpp>
#include <weightwire/engine/tell.hpp>
#include <weightwire/engine/trainer_options.hpp>
#include <weightwire/wire/native.hpp>

/// @file
/// What trainer rank 0 does: speaks to the peers, and sends. The engine adds the source and the
/// other ranks.

namespace weightwire::detail {

/// The sender's side of the four phases towards all peers. One thread at a time.
template <class Tag, class Client, class Events>
class trainer_session : session_opening<Tag, std::remove_reference_t<Client>, Events> {
    using traits = backend_traits<Tag>;
    using sender_type = typename traits::sender;
    using client_type = std::remove_reference_t<Client>;
    using base = session_opening<Tag, client_type, Events>;
    using base::client_;
    using base::drops_peers;
    using base::events_;
    using base::init_;
    using base::options_;
    using base::pause_;
    using base::peers_;
    using base::sender_;
    using base::side_;
    using base::stop_;

public:
    trainer_session(typename traits::init_info info, client_type& client, Events& events,
                    const trainer_options& options)
        : base{std::move(info), client, events, options} {}
    trainer_session(const trainer_session&) = delete;
    trainer_session& operator=(const trainer_session&) = delete;

    /// Probes the peers, agrees with them on the plan and opens the transport.
    /// @throws error the first peer's failure: at init every peer must take part.
    /// @param context without the peers; its views live as long as this.
    void open(const sender_context& context, deadline until) { this->open_first(context, until); }
    using base::make_exporting_sender;
    /// For the other ranks, and how many times it was made.
    [[nodiscard]] std::pair<std::string_view, std::uint64_t> plan() const noexcept {
        return {this->plan_, this->plans_};
    }

    /// A character a peer, `1` for those that take part in the round: for the other ranks.
    [[nodiscard]] std::string live_peers() {
        std::string out;
        for (const auto& peer : peers_) {
            out += peer.live ? '1' : '0';
        }
        return out;
    }

    /// One above the highest version that the peers have reported.
    [[nodiscard]] weight_version next_version() {
        weight_version highest = 0;
        for (const auto& peer : peers_) {
            highest = std::max(highest, peer.version);
        }
        return highest + 1;
    }

    /// Brings back what a round lost: peers that may have been restarted, or hold a session that we
    /// left open. A backend that can do without one peer asks those again; for another one the
    /// group is gone with its first member, so everything is opened anew, with all peers.
    /// @param until also when a peer that has not answered is left behind.
    /// @param stop of the round that begins.
    /// @throws error the group could not be opened anew: the first peer's failure.
    void rejoin(deadline until, const std::stop_token& stop) {
        stop_ = stop;
        std::vector<bool> was_lost;
        for (const auto& peer : peers_) {
            was_lost.push_back(!peer.live && !(drops_peers && peer.taken_over));
        }
        if (std::find(was_lost.begin(), was_lost.end(), true) == was_lost.end()) {
            return;
        }
        if constexpr (drops_peers) {
            const auto lost = [&](const peer_state& peer) {
                return was_lost[peers_.index_of(peer)];
            };
            init_.ask_again(lost, until.capped(options_.rejoin_budget), stop_);
        } else {
            this->reopen(until.capped(options_.init_budget));
        }
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            if (was_lost[i] && peers_[i].live) {
                tell(events_, {.kind = event_kind::peer_rejoined,
                               .phase = phase::init,
                               .peer = peers_[i].info.name});
            }
        }
    }

    /// Lets the live peers' inference stand still, where the options ask for it; a peer that does
    /// not is lost.
    void pause(deadline until) {
        if (pause_.wanted()) {
            take(pause_.pause(until, stop_), phase::start,
                 [](const peer_state&, const std::string&) {});
            require_whole();
        }
    }
    /// Whether rounds pause their peers.
    [[nodiscard]] bool pauses() const noexcept { return pause_.wanted(); }
    /// Lets go on whoever a round has paused, also after a failure and after a stop: a second or
    /// more is given to it. What fails is in the outcomes.
    void resume(deadline until) noexcept { pause_.resume(until); }

    /// Begins a session on every live peer.
    /// @param until of the round: workers keep the session open so long.
    /// @param answer_until when a peer that has not answered is left behind.
    /// @throws error no peer takes part: the first one's failure.
    void start(std::uint64_t round, weight_version version, bool force, deadline until,
               deadline answer_until) {
        peers_.blame_nobody();
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
        take(this->start_sessions(answer_until), phase::start,
             [&](peer_state& peer, const std::string& body) {
                 if (init_.native()) {
                     peer.session = wire::decode_start_reply(body).session;
                 }
             });
        require_whole();
    }

    /// Moves every part: what the sender stages, then the control call and the data side by side;
    /// the first to fail stops the other. Of a backend that cannot do without a peer, peers that
    /// had everything when another failed go on to commit.
    /// @throws error the source failed, or no live peer is left.
    void update(tensor_stream& stream, deadline until) {
        for (std::size_t part = 0; part < parts().size(); ++part) {
            stage(part, stream, until);
            call(part, stream, until);
        }
        end_update(stream);
    }
    /// The steps of `update`, for ranks that take them together.
    [[nodiscard]] std::span<const update_part> parts() const { return sender_->parts(); }
    void stage(std::size_t part, tensor_stream& stream, deadline until) {
        require_whole();
        stage_part<traits>(*sender_, round_, part, stream, until, stop_);
    }
    void end_update(tensor_stream& stream) {
        require_bytes(stream.manifest().total_bytes());
        require_end(stream, traits::wire_name);
    }
    /// Moves one part and reads what the peers say of it. Where one peer's failure does not stop
    /// the others, one that hangs in it leaves half of the time to the parts that follow.
    void call(std::size_t part, tensor_stream& stream, deadline update_until) {
        const bool last = part + 1 == parts().size();
        const auto until =
            drops_peers && !last ? update_until.capped(update_until.remaining() / 2) : update_until;
        const auto halves = run_halves(update_message_of(part, until), part, stream, until);
        const auto& data = halves.data;
        // Of shards a sink may place the same bytes several times.
        take_update(halves.replies, traits::capabilities.sharded
                                        ? std::numeric_limits<std::uint64_t>::max()
                                        : stream.manifest().total_bytes());
        if (data && !is_echo(data)) {
            std::rethrow_exception(data.thrown);
        }
        if (data.what.kind == "timeout") {
            // Both gave up, for themselves or by each other: the sender may know who was missing.
            peers_.blame_time("; the sender says: " + data.what.text);
        }
        if (data.late && data.what.kind == "cancelled") {
            peers_.blame_time({});
        }
        if (data || !halves.stopped_by_us) {
            require_live();
        }
    }

    /// Commits on every live peer; a peer that does not is lost.
    void finish(deadline until) {
        std::span<const std::uint64_t> digests;
        if constexpr (HasDigests<sender_type>) {
            digests = sender_->digests();
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
            peer.may_be_mixed = false;
            tell(events_, {.kind = event_kind::committed,
                           .phase = phase::finish,
                           .peer = peer.info.name,
                           .version = peer.version});
        };
        const auto closes = [](const peer_state& peer) {
            return peer.live && peer.info.session_routes;
        };
        for (auto& peer : peers_) {
            if (peer.live && !peer.info.session_routes) {
                committed(peer, {});  // its update was its commit
            }
        }
        if (std::any_of(peers_.begin(), peers_.end(), closes)) {
            take(client_.finish(peers_.to(closes), until, stop_), phase::finish, committed);
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
    [[nodiscard]] std::vector<peer_outcome> outcomes() const { return peers_.outcomes(); }

    void close(deadline until) {
        pause_.resume(until);
        sender_->close(until);
    }
    [[nodiscard]] int world_size() const noexcept { return init_.world_size(); }

private:
    /// Somebody is there; and everybody, where one peer's absence would hang the others.
    void require_whole() const {
        if (!drops_peers && peers_.live_count() != peers_.size()) {
            peers_.first_failure().raise();
        }
        require_live();
    }

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

    /// The sender waits for the live peers and no others. It may have left one behind that answered
    /// in time all the same; peers that were lost between rounds it does not know of.
    void tell_sender() {
        if constexpr (HasDropPeer<sender_type>) {
            for (std::size_t i = 0; i < peers_.size(); ++i) {
                if (peers_[i].live) {
                    sender_->restore_peer(i);
                } else {
                    sender_->drop_peer(i);
                }
            }
        }
    }

    /// What the two halves of an update came to.
    struct update_halves {
        std::vector<peer_reply> replies{};
        data_failure data{};
        bool stopped_by_us = false;  ///< the calls were
    };

    /// Control call and data of one part, side by side.
    /// @throws error the client failed.
    [[nodiscard]] update_halves run_halves(const control_message& message, std::size_t index,
                                           tensor_stream& stream, deadline until) {
        stop_data_ = std::stop_source{};
        answered_ = 0;
        peers_.blame_nobody();
        std::stop_source stop_calls;
        const std::stop_callback when_stopped{stop_, [&] {
                                                  stop_calls.request_stop();
                                                  stop_data_.request_stop();
                                              }};
        update_halves out;
        failure control;
        auto job = [&]() noexcept {
            try {
                out.replies = client_.update(message, until, stop_calls.get_token());
            } catch (...) {
                control = failure::current(phase::update);
                stop_data_.request_stop();
            }
        };
        side_.start(job);
        const auto begin = deadline::clock::now();
        const auto send = [&](deadline when) {
            sender_->send(round_, index, stream, when, stop_data_.get_token());
        };
        out.data = run_data_half(send, phase::update, side_, peers_, traits::capabilities, until,
                                 stop_calls);
        const bool hurried =
            !out.data && !side_.wait_until(grace_after(begin, until)) && hurry(stop_calls);
        side_.wait();
        if (control) {
            control.raise();
        }
        if (hurried) {
            blame_the_slow(out.replies);
        }
        out.stopped_by_us = stop_calls.stop_requested();
        return out;
    }

    void take_update(const std::vector<peer_reply>& replies, std::uint64_t total) {
        take(replies, phase::update, [&](peer_state& peer, const std::string& body) {
            if (init_.native()) {
                const auto reply = wire::decode_update_reply(body);
                require_sense(reply, peer, total);
                peer.bytes += reply.bytes;
                peer.data_seconds += static_cast<double>(reply.ended_ns - reply.began_ns) * 1e-9;
            }
        });
    }

    /// Whether the sender only ended because a peer had failed: what that peer says is worth more.
    /// Where one peer's end breaks the transfer for all, it is that whoever has everything by then;
    /// a sender that can do without a peer ends so only with its last one.
    [[nodiscard]] bool is_echo(const data_failure& data) const {
        const auto& kind = data.what.kind;
        return kind == "cancelled" ? stop_data_.stop_requested()
                                   : data.refused && (kind == "peer" || kind == "timeout") &&
                                         (!drops_peers || peers_.live_count() == 0);
    }

    /// Stops waiting for peers that the sender has left behind, once another has answered. Not
    /// where the data does not pass through the sender: its end says nothing of theirs.
    [[nodiscard]] bool hurry(std::stop_source& stop_calls) noexcept {
        const bool possible =
            drops_peers && !traits::capabilities.one_sided && init_.native() && answered_ != 0;
        if (possible) {
            stop_calls.request_stop();
        }
        return possible;
    }

    [[nodiscard]] control_message update_message_of(std::size_t index, deadline until) {
        const update_part& part = parts()[index];
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
            for (auto& peer : peers_) {
                peer.may_be_mixed = peer.may_be_mixed || peer.live;
            }
            message = peers_.vllm_update_to_live(part);
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
        self.peers_.blame(i, testimony_of(reply));
        if constexpr (HasDropPeer<sender_type>) {
            self.sender_->drop_peer(i);
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
            if (why.kind == "cancelled" && !stop_.stop_requested()) {
                why.text = "given up from here, because something else failed first";
            }
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
                sender_->drop_peer(i);
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

    std::string boot_id_ = boot_id();
    std::stop_source stop_data_;
    std::atomic<std::size_t> answered_{0};  ///< peers that have answered the update call
    std::uint64_t round_ = 0;
    weight_version version_ = 0;
};

}  // namespace weightwire::detail
