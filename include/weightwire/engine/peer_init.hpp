#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/engine/peer_table.hpp>
#include <weightwire/engine/trainer_options.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/probe.hpp>
#include <weightwire/wire/reply_failure.hpp>

/// @file
/// Who the peers are, in which dialect they are spoken to, and the init call. No data moves here.

namespace weightwire::detail {

[[nodiscard]] inline std::int64_t budget_ms(deadline until) noexcept {
    return std::chrono::ceil<std::chrono::milliseconds>(until.remaining()).count();
}

/// The number that a version text is, 0 when it is none (`default`).
[[nodiscard]] inline weight_version version_number(std::string_view text) noexcept {
    weight_version value = 0;
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
    return status == std::errc{} && end == text.data() + text.size() ? value : 0;
}

/// Probes and initializes the peers of one trainer. One thread at a time; `call` may run beside the
/// sender's `open`.
template <class Tag, class Client>
class peer_init {
    using traits = backend_traits<Tag>;
    /// As the native wire allows.
    static constexpr std::int64_t largest_world = std::int64_t{1} << 20U;

public:
    peer_init(Client& client, peer_table& peers, const trainer_options& options,
              std::string wire_parameters)
        : client_{client},
          peers_{peers},
          options_{options},
          wire_parameters_{std::move(wire_parameters)} {}

    /// Asks every peer who it is; settles the dialect and the ranks.
    /// @throws error a peer cannot be reached or cannot be spoken to.
    void find(const manifest& parameters, deadline until, const std::stop_token& stop) {
        parameters_ = &parameters;
        peers_.resize(client_.peer_count());
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            peers_[i].info.name = client_.peer_name(i);
        }
        if constexpr (HasRequest<Client>) {
            read_profiles(wire::probe(client_, until, stop));
        } else if (options_.world_sizes.size() != peers_.size()) {
            throw usage_error{
                "this client cannot ask the servers for their world sizes: give one a peer in "
                "trainer_options::world_sizes",
                {.phase = phase::init}};
        }
        if (!native_ && !traits::capabilities.speaks_vllm) {
            throw unsupported_error{
                "this backend speaks only to our own workers, and this peer does not offer the "
                "native wire for it; choose a backend that speaks to vLLM",
                {.phase = phase::init,
                 .peer = first_foreign_,
                 .backend = std::string{traits::wire_name}}};
        }
        assign_ranks();
        plan_hash_ = wire::plan_hash(traits::wire_name, world_size_, parameters, wire_parameters_);
    }

    /// Sends init to the peers that `asked` picks. Towards vLLM each peer's forms are tried newest
    /// first, the next one on a peer that refuses a field it does not know.
    /// @returns one reply a peer: its last.
    template <class Pick>
    [[nodiscard]] std::vector<peer_reply> call(Pick asked, deadline until, std::stop_token stop) {
        std::vector<peer_reply> replies;
        for (std::size_t form = 0;; ++form) {
            for (auto& peer : peers_) {
                peer.asked =
                    form == 0 ? asked(peer) : peer.asked && wants_next_form(peer, form, replies);
                peer.body = body(peer, form, until);
            }
            const auto none = std::none_of(peers_.begin(), peers_.end(),
                                           [](const peer_state& peer) { return peer.asked; });
            if (none) {
                return replies;
            }
            auto answers = client_.init(
                peers_.to([](const peer_state& peer) { return peer.asked; }), until, stop);
            if (form == 0) {
                replies = std::move(answers);
                continue;
            }
            for (std::size_t i = 0; i < answers.size(); ++i) {
                if (peers_[i].asked) {
                    replies[i] = std::move(answers[i]);
                }
            }
        }
    }

    /// Reads the replies of the peers that were asked: each takes part from now on, or is lost.
    void take(const std::vector<peer_reply>& replies) {
        for (std::size_t i = 0; i < replies.size(); ++i) {
            if (replies[i].answer.fault == reply_fault::left_out) {
                continue;
            }
            auto why = wire::reply_failure(replies[i], phase::init);
            if (!why && native_) {
                why = read_reply(peers_[i], replies[i].answer.body);
            }
            if (why) {
                peers_.lose(i, std::move(why));
            } else {
                peers_[i].error = {};
                peers_[i].live = true;
            }
        }
    }

    [[nodiscard]] bool native() const noexcept { return native_; }
    /// Whether every peer has the start and finish routes (vLLM 0.21 and newer, and ours).
    [[nodiscard]] bool session_routes() const noexcept { return session_routes_; }
    [[nodiscard]] int world_size() const noexcept { return world_size_; }
    [[nodiscard]] std::uint64_t plan_hash() const noexcept { return plan_hash_; }

private:
    void read_profiles(const std::vector<wire::server_profile>& profiles) {
        native_ = true;
        for (std::size_t i = 0; i < profiles.size(); ++i) {
            const auto& profile = profiles[i];
            if (profile.problem) {
                profile.problem.raise();
            }
            peers_[i].info.world_size = profile.world_size;
            peers_[i].version = version_number(profile.weight_version);
            session_routes_ = session_routes_ && profile.has_session_routes;
            if (!offers_backend(profile)) {
                first_foreign_ = native_ ? peers_[i].info.name : first_foreign_;
                native_ = false;
            }
        }
    }

    [[nodiscard]] static bool offers_backend(const wire::server_profile& profile) {
        return profile.native && profile.native->wire == wire::native_version &&
               std::find(profile.native->backends.begin(), profile.native->backends.end(),
                         traits::wire_name) != profile.native->backends.end();
    }

    void assign_ranks() {
        if (!options_.world_sizes.empty()) {
            check_given();
        }
        std::int64_t next_rank = 1;
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            auto& info = peers_[i].info;
            info.rank_offset = static_cast<int>(next_rank);
            info.native = native_;
            next_rank += info.world_size;
            if (next_rank > largest_world) {
                throw usage_error{"the peers have more than 2^20 worker ranks",
                                  {.phase = phase::init, .peer = info.name}};
            }
        }
        world_size_ = static_cast<int>(next_rank);
    }

    void check_given() {
        const auto& given = options_.world_sizes;
        if (given.size() != peers_.size()) {
            throw usage_error{"trainer_options::world_sizes has " + std::to_string(given.size()) +
                                  " entries for " + std::to_string(peers_.size()) + " peers",
                              {.phase = phase::init}};
        }
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            auto& info = peers_[i].info;
            if (given[i] < 1 || (HasRequest<Client> && given[i] != info.world_size)) {
                throw mismatch_error{"the server has " + std::to_string(info.world_size) +
                                         " ranks, " + std::to_string(given[i]) +
                                         " were given in trainer_options::world_sizes",
                                     {.phase = phase::init, .peer = info.name}};
            }
            info.world_size = given[i];
        }
    }

    [[nodiscard]] bool wants_next_form(const peer_state& peer, std::size_t form,
                                       const std::vector<peer_reply>& replies) const {
        const auto& reply = replies[peers_.index_of(peer)];
        return !native_ && !reply.ok() && form < peer.init.vllm.size() &&
               reply.answer.body.find("unexpected keyword argument") != std::string::npos;
    }

    [[nodiscard]] std::string body(const peer_state& peer, std::size_t form, deadline until) const {
        if (!peer.asked) {
            return {};
        }
        if (!native_) {
            return form < peer.init.vllm.size() ? "{\"init_info\":" + peer.init.vllm[form] + "}"
                                                : std::string{};
        }
        return wire::encode(wire::native_init{.backend = std::string{traits::wire_name},
                                              .rank_offset = peer.info.rank_offset,
                                              .world_size = world_size_,
                                              .plan_hash = plan_hash_,
                                              .trainer = trainer_,
                                              .take_over = peer.epoch == 0,
                                              .budget_ms = budget_ms(until),
                                              .parameters = *parameters_,
                                              .wire_parameters = wire_parameters_,
                                              .transport = peer.init.native});
    }

    [[nodiscard]] failure read_reply(peer_state& peer, const std::string& text) const {
        try {
            const auto reply = wire::decode_init_reply(text);
            peer.epoch = reply.epoch;
            peer.version = reply.version;
            if (reply.plan_hash == plan_hash_) {
                return {};
            }
            return {.kind = "mismatch",
                    .text = "the worker computes plan hash " + digest_text(reply.plan_hash) +
                            ", this trainer " + digest_text(plan_hash_) + "; nothing has moved",
                    .context = {.phase = phase::init, .peer = peer.info.name}};
        } catch (const error& caught) {
            auto why = failure::from(caught);
            why.context.peer = peer.info.name;
            return why;
        }
    }

    /// Tells this engine's inits from another trainer's.
    [[nodiscard]] static std::uint64_t random_name() {
        std::random_device source;
        return (std::uint64_t{source()} << 32U) | source();
    }

    Client& client_;
    peer_table& peers_;
    const trainer_options& options_;
    std::string wire_parameters_;
    const manifest* parameters_ = nullptr;
    std::string first_foreign_;
    std::uint64_t plan_hash_ = 0;
    std::uint64_t trainer_ = random_name();
    int world_size_ = 1;
    bool native_ = false;
    bool session_routes_ = true;
};

}  // namespace weightwire::detail
