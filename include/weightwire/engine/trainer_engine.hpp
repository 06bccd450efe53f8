#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <exception>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/trainer_group.hpp>
#include <weightwire/concepts/trainer_init_info.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/engine/rank_agreement.hpp>
#include <weightwire/engine/remembering_group.hpp>
#include <weightwire/engine/serving_rank.hpp>
#include <weightwire/engine/sync_report.hpp>
#include <weightwire/engine/trainer_options.hpp>
#include <weightwire/engine/trainer_session.hpp>
#include <weightwire/plan/groups.hpp>

/// @file
/// The trainer's engine: composed at compile time from a backend, a source, a client, and how its
/// ranks agree.

namespace weightwire {

/// Sends a source's weights to the client's peers, once a round. Make one with `trainer_init`.
///
/// `Source`, `Client`, `Group` and `Events` are references for what the engine borrows, values for
/// what it owns. All members are collective among the ranks of `Group`: every rank calls them in
/// the same order, and every rank's call ends with the same report or the same error. Only rank 0
/// speaks to the client and sends; the other ranks advance their sources in lockstep, since
/// materializing a tensor is usually a collective. Of a backend whose ranks all serve
/// (`HasRankExports`) each rank has a sender, and a round goes through all of them part by part. Of
/// one that is `sharded` each also sends, what it holds (`HasHeldNames`).
///
/// Not thread-safe, not movable. The destructor releases everything without waiting for a peer;
/// `close` is orderly.
template <class Tag, class Source, class Client, class Group = single_rank,
          class Events = no_events>
    requires Transport<Tag> && WeightSource<Source> && SyncClient<Client> && TrainerGroup<Group> &&
             EventSink<Events>
class trainer_engine {
    using source_type = std::remove_reference_t<Source>;
    using session_type = detail::trainer_session<Tag, Client, std::remove_reference_t<Events>>;
    static constexpr bool ranks_serve = HasRankExports<typename backend_traits<Tag>::sender> &&
                                        !std::is_same_v<std::remove_cvref_t<Group>, single_rank>;
    static constexpr bool sharded = backend_traits<Tag>::capabilities.sharded;

public:
    using init_info = typename backend_traits<Tag>::init_info;

    /// Agrees among the ranks on the parameters, then with every peer on the plan, and opens the
    /// transport. Blocks at most `options.init_budget`.
    /// @throws usage_error `info.rank` is not the group's rank.
    /// @throws mismatch_error ranks or peers disagree; says on what.
    /// @throws error what the first failing peer said; at init every peer must take part.
    trainer_engine(init_info info, Client&& client, Source&& source, trainer_options options = {},
                   Group&& group = Group{}, Events&& events = Events{})
        : client_{std::forward<Client>(client)},
          source_{std::forward<Source>(source)},
          group_{std::forward<Group>(group)},
          events_{std::forward<Events>(events)},
          options_{std::move(options)} {
        const auto until = deadline::after(options_.init_budget);
        together(phase::init, until, [&] {
            if (info.rank != group_.rank()) {
                throw usage_error{"the init info says rank " + std::to_string(info.rank) +
                                      ", the trainer group rank " + std::to_string(group_.rank()),
                                  {.phase = phase::init}};
            }
            parameters_ = manifest{collect_metadata(), options_.set_name};
            if (parameters_.total_bytes() == 0) {
                throw data_error{"the source has no bytes to send", {.phase = phase::init}};
            }
            find_shard();
        });
        require_equal(group_, parameters_.hash(), "list of parameters", until);
        if constexpr (sharded) {
            const auto sizes = digest(std::as_bytes(std::span{group_sizes_}));
            require_equal(group_, sizes, "cut into gather groups", until);
        }
        if constexpr (ranks_serve) {
            if (group_.size() > 1) {
                gather_exports(info, until);
            }
        }
        together(phase::init, until, [&] {
            if (exports_.empty()) {
                collect_stable();
            }
            if (group_.rank() == 0) {
                if (!session_) {
                    session_.emplace(std::move(info), client_, events_, options_);
                }
                auto context = own_context();
                context.exports = exports_;
                session_->open(context, until);
                next_version_ = session_->next_version();
            }
        });
        if constexpr (ranks_serve) {
            if (group_.size() > 1) {
                share_plan(until);
            }
        }
    }
    trainer_engine(const trainer_engine&) = delete;
    trainer_engine& operator=(const trainer_engine&) = delete;
    ~trainer_engine() = default;

    /// Moves all weights to every live peer and commits them there. Blocks at most until the
    /// round's deadline.
    ///
    /// A peer that fails does not stop the others; it keeps its old version (or says that it is
    /// dirty) and is asked to take part again in the next round. A backend that cannot do without
    /// one (a broadcast group) loses the round, and the next one opens its group anew with all.
    /// Servers that were paused are resumed whatever became of the round, which may take a second
    /// beyond the deadline.
    /// @returns one outcome a peer, and the figures of each phase.
    /// @throws error the source failed on any rank, or no peer committed, or (unless
    /// `tolerate_failed_peers`) one
    ///   peer did not commit; `last_report()` tells about the others. Once the trainer group itself
    ///   has failed, every later call: ranks that are out of step would mix their rounds.
    sync_report send_weights(const send_options& options = {}) {
        const auto until = options.deadline.value_or(deadline::after(options_.send_budget));
        const auto begin = deadline::clock::now();
        report_ = {.round = ++round_};
        round_began_ = begin;
        round_until_ = until;
        detail::require_same_round(group_, round_, after_peers(until));
        run_phase(phase::start, report_.start, until, [&] {
            if (session_) {
                start(options, until);
            }
        });
        run_phase(phase::update, report_.update, until, [&] {
            report_.update.bytes = parameters_.total_bytes();
            move(options, until);
        });
        run_phase(phase::finish, report_.finish, until, [&] {
            if (session_) {
                session_->finish(before_resume(until));
                session_->resume(until);
                note_outcomes();
            }
        });
        report_.total_seconds = detail::seconds_since(begin);
        report_ = agree(group_, std::move(report_), after_peers(until));
        next_version_ = std::max(next_version_, report_.version + 1);
        const auto failed = report_.first_failure();
        if (failed && (report_.committed() == 0 || !options.tolerate_failed_peers)) {
            failed.raise();
        }
        return report_;
    }

    /// The report of the last round, also of one that threw after its peers' outcomes were known.
    [[nodiscard]] const sync_report& last_report() const noexcept { return report_; }
    [[nodiscard]] const manifest& parameters() const noexcept { return parameters_; }
    /// 1 + the worker ranks of all peers. Known on rank 0; 0 elsewhere.
    [[nodiscard]] int world_size() const noexcept { return session_ ? session_->world_size() : 0; }

    /// The version that `send_weights()` sends when it is given none.
    [[nodiscard]] weight_version next_version() const noexcept { return next_version_; }

    /// Lets go of the transport in order, after the last round. Peers keep what they committed.
    void close(deadline until) {
        together(phase::close, until, [&] {
            if (session_) {
                session_->close(until);
                session_.reset();
            }
            if constexpr (ranks_serve) {
                rank_.close(until);
            }
        });
    }

private:
    [[nodiscard]] std::vector<param_meta> collect_metadata() {
        std::vector<param_meta> out;
        for (auto&& entry : source_.metadata()) {
            out.push_back(param_meta(std::forward<decltype(entry)>(entry)));
        }
        return out;
    }

    /// Of a transport for shards: what this rank holds, and the gather groups.
    /// @throws data_error the source holds a name that its metadata does not have.
    void find_shard() {
        if constexpr (sharded) {
            group_sizes_ = plan::group_sizes(source_, parameters_);
        }
        if constexpr (sharded && HasHeldNames<source_type>) {
            held_.assign(parameters_.size(), 0);
            for (auto&& entry : source_.held_names()) {
                const std::string_view name{entry};
                const auto at = parameters_.find(name);
                if (at == manifest::npos) {
                    throw data_error{
                        "the source says that it holds this, which its metadata does "
                        "not name",
                        {.phase = phase::init, .tensor = std::string{name}}};
                }
                held_[at] = 1;
            }
        }
    }

    /// For a source of stable addresses: where its tensors are. One pass, on every rank.
    void collect_stable() {
        if constexpr (lifetime_of<Source>() == tensor_lifetime::stable) {
            round_of<source_type> round{source_, parameters_, held_};
            auto stream = round.stream();
            stable_.resize(parameters_.size());
            for (auto at = stream.position(); const auto* entry = stream.next();
                 at = stream.position()) {
                stable_[at] = entry->tensor;
            }
        }
    }

    /// What a sender learns of this rank alone.
    [[nodiscard]] sender_context own_context() const {
        return {.parameters = parameters_,
                .peers = {},
                .lifetime = lifetime_of<Source>(),
                .stable_tensors = stable_,
                .held = held_,
                .group_sizes = group_sizes_};
    }

    /// Makes every rank's sender; rank 0 is to know what each exports before it speaks to a peer.
    void gather_exports(const init_info& info, deadline until) {
        std::string mine;
        together(phase::init, until, [&] {
            collect_stable();
            if (group_.rank() == 0) {
                session_.emplace(info, client_, events_, options_);
                mine = session_->make_exporting_sender(own_context());
            } else {
                mine = rank_.make_exporting_sender(info, own_context());
            }
        });
        exports_ = group_.all_gather(mine, after_peers(until));
    }
    void share_plan(deadline until) {
        const auto told = rank_.tell_plan(group_, session(), after_peers(until));
        together(phase::init, until, [&] { rank_.adopt_plan(told); });
        rank_.plan_is_adopted(session());
        rank_.describe([&](std::string_view text) {
            detail::tell(events_, {.kind = event_kind::chosen, .phase = phase::init, .text = text});
        });
    }
    /// Rank 0's; null elsewhere.
    [[nodiscard]] session_type* session() noexcept { return session_ ? &*session_ : nullptr; }

    /// Lost peers first: one that comes back may be ahead of our counter.
    void start(const send_options& options, deadline until) {
        session_->rejoin(before_update(until), options.stop);
        report_.version =
            options.version.value_or(std::max(next_version_, session_->next_version()));
        next_version_ = std::max(next_version_, report_.version) + 1;
        session_->pause(before_update(until));
        // Afresh: the live peers get their whole share, whatever the lost ones have cost.
        session_->start(round_, report_.version, options.force, until, before_update(until));
    }

    /// The data move: the sender reads the source; the other ranks advance theirs. A failed rank
    /// still advances its source to the end, because the others may be in a collective with it.
    void move(const send_options& options, deadline until) {
        if constexpr (ranks_serve) {
            if (group_.size() > 1) {
                rank_.move(group_, session(), source_,
                           {.parameters = parameters_,
                            .held = held_,
                            .number = round_,
                            .update_until = before_finish(until),
                            .agree_until = after_peers(until),
                            .stop = options.stop});
                return;
            }
        }
        round_of<source_type> round{source_, parameters_, held_};
        auto stream = round.stream();
        try {
            if (session_) {
                session_->update(stream, before_finish(until));
            } else {
                while (stream.next() != nullptr) {
                }
            }
        } catch (...) {
            const auto first = std::current_exception();
            if (group_.size() > 1) {
                drain(stream);
            }
            std::rethrow_exception(first);
        }
    }

    /// A second failure of a source that already failed says nothing new.
    static void drain(tensor_stream& stream) noexcept {
        try {
            stream.drain();
        } catch (...) {  // NOLINT(bugprone-empty-catch)
        }
    }

    template <class Step>
    void run_phase(phase where, phase_figure& figure, deadline until, Step step) {
        const auto begin = deadline::clock::now();
        detail::tell(events_,
                     {.kind = event_kind::phase_begun, .phase = where, .version = report_.version});
        together(where, until, step);
        figure.seconds = detail::seconds_since(begin);
        detail::tell(
            events_,
            {.kind = event_kind::phase_ended,
             .phase = where,
             .version = report_.version,
             .bytes = figure.bytes,
             .elapsed = std::chrono::nanoseconds{static_cast<std::int64_t>(figure.seconds * 1e9)}});
    }

    /// Runs `step` on every rank; all end alike. What failed here is thrown as it was, what failed
    /// elsewhere as the same leaf. After a failure the workers' open sessions are given up.
    template <class Step>
    void together(phase where, deadline until, Step step) {
        failure mine;
        std::exception_ptr thrown;
        try {
            step();
        } catch (...) {
            mine = failure::current(where);
            thrown = std::current_exception();
        }
        rank_failure first;
        try {
            first = agree(group_, mine, after_peers(until));
        } catch (...) {
            // The group is broken; what happened here is worth more than that.
            give_up(mine ? mine : failure::current(where));
            if (thrown) {
                std::rethrow_exception(thrown);
            }
            throw;
        }
        if (!first) {
            return;
        }
        give_up(first.what);
        if (thrown && first.rank == group_.rank()) {
            std::rethrow_exception(thrown);
        }
        if (first.what.context.rank < 0) {
            first.what.context.rank = first.rank;
        }
        first.what.raise();
    }

    void give_up(const failure& why) {
        if (session_) {
            session_->abandon(why);
            session_->resume(round_until_);
            note_outcomes();
        }
    }

    void note_outcomes() {
        report_.total_seconds = detail::seconds_since(round_began_);
        report_.peers = session_->outcomes();
        for (const auto& outcome : report_.peers) {
            report_.data_seconds = std::max(report_.data_seconds, outcome.data_seconds);
        }
    }

    /// Peers are waited for until the deadline, ranks a little longer: a rank whose peer timed out
    /// still tells it.
    [[nodiscard]] static deadline after_peers(deadline until) noexcept {
        return until.later(std::chrono::seconds{2});
    }

    /// A peer that hangs in the start costs a quarter of the time, and leaves the others the rest.
    [[nodiscard]] static deadline before_update(deadline until) noexcept {
        return until.capped(until.remaining() / 4);
    }

    /// A peer that hangs in the update costs the update's share of the time and leaves the others
    /// enough to commit.
    [[nodiscard]] static deadline before_finish(deadline until) noexcept {
        const auto reserve =
            std::min<deadline::clock::duration>(std::chrono::seconds{10}, until.remaining() / 5);
        return deadline::at(until.when() - reserve);
    }

    /// A peer that hangs in the finish leaves the others a share to go on with what they serve.
    [[nodiscard]] deadline before_resume(deadline until) const noexcept {
        const auto reserve =
            std::min<deadline::clock::duration>(std::chrono::seconds{5}, until.remaining() / 5);
        return session_->pauses() ? deadline::at(until.when() - reserve) : until;
    }

    Client client_;
    Source source_;
    detail::remembering_group<Group> group_;
    [[no_unique_address]] Events events_;
    trainer_options options_;
    manifest parameters_;
    std::vector<unsigned char> held_;       ///< see `sender_context`
    std::vector<std::size_t> group_sizes_;  ///< of a transport for shards
    std::vector<tensor_view> stable_;
    std::vector<std::string> exports_;  ///< by rank, where several serve
    std::optional<session_type> session_;
    [[no_unique_address]] std::conditional_t<ranks_serve, detail::serving_rank<Tag>,
                                             detail::no_serving_rank>
        rank_;
    sync_report report_{};
    std::uint64_t round_ = 0;
    deadline::clock::time_point round_began_ = deadline::clock::now();
    deadline round_until_ = deadline::at({});
    weight_version next_version_ = 1;
};

/// Makes a trainer engine; the backend is deduced from the init info's type. Lvalues are referenced
/// and must outlive the engine, rvalues are moved into it.
/// @throws see the engine's constructor.
template <TrainerInitInfo Info, SyncClient Client, WeightSource Source,
          TrainerGroup Group = single_rank, EventSink Events = no_events>
    requires Transport<typename std::remove_cvref_t<Info>::backend>
[[nodiscard]] auto trainer_init(Info&& info, Client&& client, Source&& source,
                                trainer_options options = {}, Group&& group = Group{},
                                Events&& events = Events{}) {
    return trainer_engine<typename std::remove_cvref_t<Info>::backend, Source, Client, Group,
                          Events>{std::forward<Info>(info),     std::forward<Client>(client),
                                  std::forward<Source>(source), std::move(options),
                                  std::forward<Group>(group),   std::forward<Events>(events)};
}

/// Tensors that are no source yet: says what makes one of them.
template <TrainerInitInfo Info, SyncClient Client, std::ranges::range Tensors, class... Rest>
    requires(!WeightSource<Tensors> &&
             std::convertible_to<std::ranges::range_reference_t<Tensors>, named_tensor>)
void trainer_init(Info&&, Client&&, Tensors&&, Rest&&...) {
    static_assert(WeightSource<Tensors>,
                  "trainer_init: a range of named_tensor is no WeightSource; wrap it: "
                  "weightwire::span_source{tensors}");
}

}  // namespace weightwire
