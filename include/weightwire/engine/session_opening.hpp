#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/detail/side_thread.hpp>
#include <weightwire/engine/peer_init.hpp>
#include <weightwire/engine/peer_table.hpp>
#include <weightwire/engine/reply_checks.hpp>
#include <weightwire/engine/round_pauser.hpp>
#include <weightwire/engine/tell.hpp>
#include <weightwire/engine/trainer_options.hpp>

/// @file
/// How a trainer's rank 0 comes to a sender and peers that are ready for a round: the first time,
/// and again after a group has lost a member.

namespace weightwire::detail {

/// The peers, the sender and what opens them; `trainer_session` runs rounds over it. One thread at
/// a time.
template <class Tag, class Client, class Events>
class session_opening {
    using traits = backend_traits<Tag>;
    using sender_type = typename traits::sender;

protected:
    static constexpr bool drops_peers = HasDropPeer<sender_type>;

    session_opening(typename traits::init_info info, Client& client, Events& events,
                    const trainer_options& options)
        : client_{client},
          events_{events},
          options_{options},
          info_{std::move(info)},
          init_{client, peers_, options, info_.init_message()},
          pause_{client, peers_, events, options} {}

    /// Makes the sender, ahead of the opening, as the other ranks make theirs.
    /// @returns what this rank exports.
    [[nodiscard]] std::string make_exporting_sender(const sender_context& context)
        requires HasRankExports<sender_type>
    {
        sender_.emplace(std::as_const(info_));
        return sender_->export_memory(context);
    }

    /// @param context without the peers; its views live as long as this.
    void open_first(const sender_context& context, deadline until) {
        source_.emplace(context);
        stop_ = options_.stop;
        open_all(until);
    }

    /// The group anew, with a sender of its own: what is left of the old one is let go of first. A
    /// sender that has exported memory beside other ranks stays: theirs fit it.
    void reopen(deadline until) {
        for (auto& peer : peers_) {
            if (peer.taken_over) {
                peer.error.raise();
            }
        }
        note("the group lost a member: it is opened anew with every peer");
        if (source_->exports.empty()) {
            try {
                sender_->close(until.capped(options_.rejoin_budget));
            } catch (const error& caught) {
                tell(events_,
                     {.kind = event_kind::warning, .phase = phase::init, .text = caught.what()});
            }
        }
        try {
            open_all(until);
        } catch (const error& caught) {
            auto why = failure::from(caught);
            why.text += "; the group was to be opened anew because a round had lost a peer";
            if (!init_.native() && why.kind == "timeout") {
                why.text +=
                    "; workers of a vLLM server may still wait in the transfer that broke off, "
                    "which "
                    "only a restart of the server ends";
            }
            why.raise();
        }
    }

    /// The start calls to the live peers that have such a call.
    [[nodiscard]] std::vector<peer_reply> start_sessions(deadline until) {
        const auto opens = [](const peer_state& peer) {
            return peer.live && peer.info.session_routes;
        };
        if (std::none_of(peers_.begin(), peers_.end(), opens)) {
            return {};
        }
        auto replies = client_.start(peers_.to(opens), until, stop_);
        if (init_.native()) {
            return replies;
        }
        // vLLM has no call that gives a session up: one that a failed round left open is finished,
        // and what it had loaded is replaced by the round that begins.
        bool any = false;
        for (std::size_t i = 0; i < replies.size(); ++i) {
            peers_[i].asked = says_session_is_open(replies[i]);
            any = any || peers_[i].asked;
        }
        if (!any) {
            return replies;
        }
        const auto asked = [](const peer_state& peer) { return peer.asked; };
        (void)client_.finish(peers_.to(asked), until, stop_);
        auto second = client_.start(peers_.to(asked), until, stop_);
        for (std::size_t i = 0; i < replies.size(); ++i) {
            if (peers_[i].asked) {
                tell(events_, {.kind = event_kind::warning,
                               .phase = phase::start,
                               .peer = peers_[i].info.name,
                               .text = "a session was open on the server: it was finished first"});
                replies[i] = std::move(second[i]);
            }
        }
        return replies;
    }

    Client& client_;
    Events& events_;
    const trainer_options& options_;
    typename traits::init_info info_;
    peer_table peers_;
    peer_init<Tag, Client> init_;
    round_pauser<Client, Events> pause_;
    std::optional<sender_type> sender_;
    std::stop_token stop_;
    side_thread side_;
    std::string plan_;         ///< for the other ranks, where they serve too
    std::uint64_t plans_ = 0;  ///< times that it was made

private:
    /// Finds the peers, makes a sender and opens it together with all of them.
    void open_all(deadline until) {
        init_.find(source_->parameters, until, stop_);
        note(init_.native() ? "native wire: every peer offers it for this backend"
                            : "vLLM wire: a peer does not offer the native one");
        note(pause_.choose(init_.native()));
        if (source_->exports.empty()) {
            sender_.emplace(std::as_const(info_));
        }
        auto context = *source_;
        context.peers = peers_.infos();
        context.world_size = init_.world_size();
        auto inits = sender_->prepare(context);
        if (inits.size() != peers_.size()) {
            throw usage_error{"the sender prepared " + std::to_string(inits.size()) +
                                  " init messages for " + std::to_string(peers_.size()) + " peers",
                              {.phase = phase::init, .backend = std::string{traits::wire_name}}};
        }
        if constexpr (HasRankExports<sender_type>) {
            if (!source_->exports.empty()) {
                plan_ = sender_->shared_plan();
                ++plans_;
            }
        }
        // `prepare` takes no deadline; what it took is not blamed on the peers.
        if (until.expired()) {
            throw timeout_error{
                "preparing the transfer took all of the time that there was for opening it; allow "
                "more (trainer_options::init_budget)",
                {.phase = phase::init, .backend = std::string{traits::wire_name}}};
        }
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            peers_[i].init = std::move(inits[i]);
        }
        if constexpr (HasDescription<sender_type>) {
            note(sender_->description());
        }
        init_.open([](const peer_state&) { return true; }, until, stop_, side_,
                   [&](deadline when, std::stop_token stop) { sender_->open(when, stop); });
        if (const auto why = peers_.first_failure()) {
            why.raise();
        }
        if (!init_.native()) {
            require_forms();
        }
    }

    /// Every form that a peer may have accepted has its body in every part.
    void require_forms() {
        for (const auto& peer : peers_) {
            for (const update_part& part : sender_->parts()) {
                if (peer.form >= peer.init.vllm.size() ||
                    peer.init.vllm[peer.form].update_body >= part.vllm_bodies.size()) {
                    throw usage_error{
                        "the sender has no update body for the form of init that the peer accepted",
                        {.phase = phase::init,
                         .peer = peer.info.name,
                         .backend = std::string{traits::wire_name}}};
                }
            }
        }
    }

    void note(std::string_view text) noexcept {
        tell(events_, {.kind = event_kind::chosen, .phase = phase::init, .text = text});
    }

    std::optional<sender_context> source_;  ///< without the peers
};

}  // namespace weightwire::detail
