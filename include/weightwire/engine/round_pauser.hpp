#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/engine/peer_table.hpp>
#include <weightwire/engine/tell.hpp>
#include <weightwire/engine/trainer_options.hpp>
#include <weightwire/wire/client_calls.hpp>
#include <weightwire/wire/reply_failure.hpp>

/// @file
/// `/pause` and `/resume` around a round. vLLM enforces neither, but one that loads while it
/// answers mixes old and new weights within an answer (vLLM wire section 1.6).

namespace weightwire::detail {

/// Pauses and resumes the peers of one trainer. One thread at a time.
template <class Client, class Events>
class round_pauser {
public:
    round_pauser(Client& client, peer_table& peers, Events& events, const trainer_options& options)
        : client_{client}, peers_{peers}, events_{events}, options_{options} {}

    /// Settles what is done towards peers of this dialect.
    /// @returns what was chosen and why, in one line.
    /// @throws usage_error a pause was asked for, and the client can send no `/pause`.
    [[nodiscard]] std::string choose(bool native) {
        const bool automatic = options_.pause == round_pause::automatic;
        target_.clear();
        if (options_.pause == round_pause::none) {
            return "no pause: trainer_options::pause is none";
        }
        if (automatic && native) {
            return "no pause: our own workers change over at once";
        }
        if constexpr (!HasRequest<Client>) {
            if (!automatic) {
                throw usage_error{
                    "trainer_options::pause asks for a pause, and this client has no request() to "
                    "send it with; add one, or set it to none and pause the servers yourself",
                    {.phase = phase::init}};
            }
            return "no pause: this client has no request() to send it with; answers may mix old "
                   "and "
                   "new weights unless the servers are paused otherwise";
        } else {
            target_ = pause_target(mode(), options_.pause_clears_cache);
            return "pause: POST " + target_ + " before each round and POST /resume after it, " +
                   (automatic ? "because vLLM servers load while they answer"
                              : "as trainer_options::pause asks");
        }
    }
    /// Whether rounds pause their peers.
    [[nodiscard]] bool wanted() const noexcept { return !target_.empty(); }

    /// Asks the live peers.
    /// @returns one reply a peer; each one's failure is for the caller to see.
    [[nodiscard]] std::vector<peer_reply> pause(deadline until, const std::stop_token& stop) {
        if constexpr (HasRequest<Client>) {
            // Who is asked counts as paused until its reply says otherwise: the call may throw for
            // one peer when others have paused already.
            std::vector<bool> stood;
            for (auto& peer : peers_) {
                peer.body.clear();
                stood.push_back(peer.paused);
            }
            const auto message = peers_.to_live();
            for (auto& peer : peers_) {
                peer.paused = peer.paused || peer.live;
            }
            auto replies = client_.request("POST", target_, message, until, stop);
            for (std::size_t i = 0; i < replies.size(); ++i) {
                peers_[i].paused = stood[i] || may_stand(replies[i]);
                if (replies[i].answer.status == 404) {
                    replies[i].answer.body = no_such_route;
                }
            }
            return replies;
        } else {
            return {};
        }
    }

    /// Asks every peer that stands still, live or not. Never throws: what a peer does not do is in
    /// its `resume_error` and told as a warning, and it is asked again after the next round.
    void resume(deadline until) noexcept {
        if constexpr (HasRequest<Client>) {
            leave_mixed();
            const auto stands = [this](const peer_state& peer) {
                return peer.paused && !is_left(peer);
            };
            if (std::none_of(peers_.begin(), peers_.end(), stands)) {
                return;
            }
            try {
                // A round that used up its time leaves no server standing for that.
                const auto least = deadline::after(std::chrono::seconds{1});
                const auto when = deadline::at(std::max(until.when(), least.when()))
                                      .capped(std::chrono::seconds{10});
                for (auto& peer : peers_) {
                    peer.body.clear();
                }
                read(client_.request("POST", "/resume", peers_.to(stands), when, {}));
            } catch (...) {
                note_thrown(stands);
            }
        }
    }

private:
    static constexpr const char* no_such_route =
        "there is no /pause: the server is older than vLLM 0.16, or runs without "
        "VLLM_SERVER_DEV_MODE=1, or is no vLLM; set trainer_options::pause to none if its requests "
        "may meet old and new weights in one answer";

    [[nodiscard]] pause_mode mode() const noexcept {
        switch (options_.pause) {
            case round_pause::wait: return pause_mode::wait;
            case round_pause::abort: return pause_mode::abort;
            default: return pause_mode::keep;
        }
    }

    /// A server that was asked and did not answer may stand still all the same.
    [[nodiscard]] static bool may_stand(const peer_reply& reply) noexcept {
        const auto fault = reply.answer.fault;
        return reply.ok() || (fault != reply_fault::none && fault != reply_fault::left_out &&
                              fault != reply_fault::unreachable);
    }

    [[nodiscard]] bool is_left(const peer_state& peer) const noexcept {
        return options_.leave_mixed_paused && peer.may_be_mixed;
    }
    void leave_mixed() noexcept {
        for (const auto& peer : peers_) {
            if (peer.paused && is_left(peer)) {
                warn(peer.info.name,
                     "left paused until a round commits there: it may hold old and new weights "
                     "together");
            }
        }
    }

    /// The client threw, whatever it has done by then: the peers count as paused.
    /// Call inside a catch block.
    template <class Stands>
    void note_thrown(Stands stands) noexcept {
        try {
            const auto why = failure::current(phase::finish);
            warn({}, why.text);
            for (auto& peer : peers_) {
                if (stands(peer)) {
                    peer.resume_error = why;
                }
            }
        } catch (...) {  // NOLINT(bugprone-empty-catch): no memory even for that
        }
    }

    void read(const std::vector<peer_reply>& replies) {
        for (std::size_t i = 0; i < replies.size(); ++i) {
            if (replies[i].answer.fault == reply_fault::left_out) {
                continue;
            }
            auto& peer = peers_[i];
            peer.paused = !replies[i].ok();
            peer.resume_error = wire::reply_failure(replies[i], phase::finish);
            if (peer.paused) {
                peer.resume_error.text =
                    "/resume failed, so the server may stand still: " + peer.resume_error.text;
                warn(peer.info.name, peer.resume_error.text);
            }
        }
    }

    void warn(std::string_view peer, std::string_view text) noexcept {
        tell(events_,
             {.kind = event_kind::warning, .phase = phase::finish, .peer = peer, .text = text});
    }

    Client& client_;
    peer_table& peers_;
    Events& events_;
    const trainer_options& options_;
    std::string target_;  ///< of the pause; empty: there is none
};

}  // namespace weightwire::detail
