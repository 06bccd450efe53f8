#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <charconv>
#include <chrono>
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
#include <weightwire/detail/side_thread.hpp>
#include <weightwire/engine/peer_data_half.hpp>
#include <weightwire/engine/peer_table.hpp>
#include <weightwire/engine/trainer_options.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/probe.hpp>
#include <weightwire/wire/reply_failure.hpp>

/// @file
/// Who the peers are, in which dialect they are spoken to, and the init call with the sender's
/// opening beside it.

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
        first_foreign_.clear();
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

    /// Sends init to the peers that `asked` picks and runs `open_sender(deadline, stop)` beside it:
    /// the peers of a group do not answer before the sender has joined, nor does it return before.
    ///
    /// A peer that refuses its last form stops the sender and the calls to the others at once. Then
    /// each peer that was asked takes part, or is lost.
    /// @throws error the sender failed by itself, or the client.
    template <class Pick, class Open>
    void open(Pick asked, deadline until, const std::stop_token& stop, side_thread& side,
              Open open_sender) {
        peers_.blame_nobody();
        opening shared{.init = this};
        const std::stop_callback when_stopped{stop, [&] { shared.stop_all(); }};
        const reply_observer observer{.call = &peer_init::on_reply, .context = &shared};
        std::vector<peer_reply> replies;
        failure control;
        auto job = [&]() noexcept {
            try {
                replies = call(asked, observer, until, shared.calls.get_token());
            } catch (...) {
                control = failure::current(phase::init);
                shared.sender.request_stop();
            }
        };
        side.start(job);
        auto data =
            run_data_half([&](deadline when) { open_sender(when, shared.sender.get_token()); },
                          phase::init, side, peers_, traits::capabilities, until, shared.calls);
        side.wait();
        if (control) {
            control.raise();
        }
        take(replies);
        const bool echo = data.refused || data.what.kind == "cancelled";
        if (data.late && data.what.kind == "cancelled") {
            peers_.blame_time({});
        }
        const auto first = peers_.first_failure();
        if (data.what.kind == "timeout" && data.refused && first) {
            // Both say what they missed; the sender, which ranks.
            data.what.text += "; " + first.context.peer + " says: " + first.text;
            data.what.raise();
        }
        if (data && !(echo && first)) {
            data.what.raise();
        }
    }
    /// The same for a sender that is open: a peer that refuses does not disturb the others.
    template <class Pick>
    void ask_again(Pick asked, deadline until, const std::stop_token& stop) {
        take(call(asked, {}, until, stop));
    }

    [[nodiscard]] bool native() const noexcept { return native_; }
    [[nodiscard]] int world_size() const noexcept { return world_size_; }
    [[nodiscard]] std::uint64_t plan_hash() const noexcept { return plan_hash_; }

private:
    /// Reads the replies of the peers that were asked: each takes part from now on, or is lost.
    void take(const std::vector<peer_reply>& replies) {
        for (std::size_t i = 0; i < replies.size(); ++i) {
            if (replies[i].answer.fault == reply_fault::left_out) {
                continue;
            }
            auto why = wire::reply_failure(replies[i], phase::init);
            if (why && !native_ && knows_not_the_form(replies[i]) &&
                !peers_[i].init.missing_form.empty()) {
                why.text += "; " + peers_[i].init.missing_form;
            }
            if (!why && native_) {
                why = read_reply(peers_[i], replies[i].answer.body);
            }
            if (why) {
                peers_.lose(i, std::move(why));
            } else {
                peers_[i].error = {};
                peers_[i].may_be_mixed = peers_[i].may_be_mixed && !native_;
                peers_[i].live = true;
            }
        }
    }

    /// What has been said when the call was still under way; the sender and the calls stop by it.
    struct opening {
        const peer_init* init = nullptr;
        std::stop_source calls{};
        std::stop_source sender{};
        void stop_all() {
            sender.request_stop();
            calls.request_stop();
        }
    };

    static void on_reply(void* context, std::size_t i, const peer_reply& reply) noexcept {
        auto& shared = *static_cast<opening*>(context);
        const bool left_out = reply.answer.fault == reply_fault::left_out;
        if (!left_out && !reply.ok() &&
            !shared.init->wants_next_form(shared.init->peers_[i], reply)) {
            const auto said = testimony_of(reply);
            shared.init->peers_.blame(i, said);
            shared.sender.request_stop();
            if (said != testimony::echo) {
                shared.calls.request_stop();  // else the others have a moment to say more
            }
        }
    }

    /// Sends init to the peers that `asked` picks, towards vLLM with the newest form. A peer that
    /// refuses a field that it does not know is sent the next form: by the client while it still
    /// waits for the others, or from here.
    /// @returns one reply a peer: its last.
    template <class Pick>
    [[nodiscard]] std::vector<peer_reply> call(Pick asked, reply_observer observer, deadline until,
                                               const std::stop_token& stop) {
        for (auto& peer : peers_) {
            peer.asked = asked(peer);
            peer.form = peer.asked ? 0 : peer.form;
            peer.body = peer.asked ? body(peer, until) : std::string{};
        }
        std::vector<peer_reply> replies;
        const auto is_asked = [](const peer_state& peer) { return peer.asked; };
        while (std::any_of(peers_.begin(), peers_.end(), is_asked)) {
            auto message = peers_.to(is_asked);
            message.observer = observer;
            message.again = {.call = &peer_init::next_body, .context = this};
            auto answers = client_.init(message, until, stop);
            if (answers.size() != peers_.size()) {
                throw usage_error{"the client gives " + std::to_string(answers.size()) +
                                      " replies for " + std::to_string(peers_.size()) +
                                      " peers; it must give one a peer",
                                  {.phase = phase::init}};
            }
            replies.resize(peers_.size(), {.answer = {.fault = reply_fault::left_out}});
            for (std::size_t i = 0; i < peers_.size(); ++i) {
                if (peers_[i].asked) {
                    replies[i] = std::move(answers[i]);
                    peers_[i].asked = !next_body(this, i, replies[i]).empty();
                }
            }
        }
        return replies;
    }

    /// The body of the next form for a peer that refused the one before; empty when there is none.
    static std::string_view next_body(void* context, std::size_t i,
                                      const peer_reply& reply) noexcept {
        auto& self = *static_cast<peer_init*>(context);
        auto& peer = self.peers_[i];
        if (!self.wants_next_form(peer, reply)) {
            return {};
        }
        try {
            ++peer.form;
            peer.body = vllm_body(peer);
            return peer.body;
        } catch (...) {  // no memory: the refusal stands
            return {};
        }
    }

    void read_profiles(const std::vector<wire::server_profile>& profiles) {
        native_ = true;
        for (std::size_t i = 0; i < profiles.size(); ++i) {
            const auto& profile = profiles[i];
            if (profile.problem) {
                profile.problem.raise();
            }
            peers_[i].info.world_size = profile.world_size;
            peers_[i].version = version_number(profile.weight_version);
            peers_[i].info.session_routes = profile.has_session_routes;
            peers_[i].info.version = profile.version_text;
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

    [[nodiscard]] bool wants_next_form(const peer_state& peer,
                                       const peer_reply& reply) const noexcept {
        return !native_ && peer.form + 1 < peer.init.vllm.size() && knows_not_the_form(reply);
    }
    /// A vLLM server that refuses a field which its release does not have.
    [[nodiscard]] static bool knows_not_the_form(const peer_reply& reply) noexcept {
        return !reply.ok() &&
               reply.answer.body.find("unexpected keyword argument") != std::string::npos;
    }

    [[nodiscard]] static std::string vllm_body(const peer_state& peer) {
        return peer.form < peer.init.vllm.size()
                   ? "{\"init_info\":" + peer.init.vllm[peer.form].init_info + "}"
                   : std::string{};
    }

    [[nodiscard]] std::string body(const peer_state& peer, deadline until) const {
        if (!native_) {
            return vllm_body(peer);
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
};

}  // namespace weightwire::detail
