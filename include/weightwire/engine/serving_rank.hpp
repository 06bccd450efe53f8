#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/trainer_group.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/engine/counted_source.hpp>
#include <weightwire/engine/rank_agreement.hpp>
#include <weightwire/engine/stage_part.hpp>

/// @file
/// Trainer ranks that all serve their own memory (`HasRankExports`): a round goes part by part
/// through all of them.

namespace weightwire::detail {

/// What a round of serving ranks needs to know; the same on every rank but for `stop`.
struct serving_round {
    const manifest& parameters;
    std::span<const unsigned char> held;  ///< as in `sender_context`
    std::uint64_t number;
    deadline update_until;  ///< of the update
    deadline agree_until;   ///< when a rank that has not come is given up
    std::stop_token stop;
};

/// The moves of one round on one rank. Lives on the stack of `send_weights()`.
///
/// After each step all agree how it went. A rank that failed in one still advances its source as
/// far as the step does elsewhere, and all ranks advance theirs to the end when a step has failed
/// anywhere: the others may be in a collective of the source. When the group itself fails nobody
/// can know where the others are, and the sources stay where they are.
template <TrainerGroup Group, WeightSource Source>
class serving_steps {
public:
    serving_steps(Group& group, Source& source, const serving_round& round)
        : group_{group},
          held_{round.held},
          agree_until_{round.agree_until},
          counted_{source},
          walk_{counted_, round.parameters, round.held},
          stream_{walk_.stream()} {}
    serving_steps(const serving_steps&) = delete;
    serving_steps& operator=(const serving_steps&) = delete;

    [[nodiscard]] tensor_stream& stream() noexcept { return stream_; }

    /// Runs `work`, which advances the source to position `end` of the manifest.
    /// @returns whether it went well on every rank. Where not, what this rank threw is kept.
    /// @throws what the group throws, or what `work` has thrown before that.
    template <class Work>
    [[nodiscard]] bool together(Work work, std::size_t end) {
        failure mine;
        try {
            work();
        } catch (...) {
            mine = failure::current(phase::update);
            thrown_ = std::current_exception();
            advance_to(end);
        }
        try {
            return !agree(group_, mine, agree_until_);
        } catch (...) {
            if (thrown_) {
                std::rethrow_exception(thrown_);
            }
            throw;
        }
    }

    /// The end of a round that has failed on some rank.
    /// @throws what has failed here; nothing where it was elsewhere.
    void give_up() {
        drain();
        if (thrown_) {
            std::rethrow_exception(thrown_);
        }
    }
    /// A second failure of a source says nothing new.
    void drain() noexcept {
        try {
            stream_.drain();
        } catch (...) {  // NOLINT(bugprone-empty-catch)
        }
    }

private:
    void advance_to(std::size_t position) noexcept {
        const auto end =
            held_.empty()
                ? position
                : position - static_cast<std::size_t>(std::ranges::count(held_.first(position), 0));
        for (auto before = end; counted_.asked() < end && counted_.asked() != before;) {
            before = counted_.asked();
            try {
                (void)stream_.next();
            } catch (...) {  // NOLINT(bugprone-empty-catch)
            }
        }
    }

    Group& group_;
    std::span<const unsigned char> held_;
    deadline agree_until_;
    counted_source<Source> counted_;
    round_of<counted_source<Source>> walk_;
    tensor_stream stream_;
    std::exception_ptr thrown_;
};

/// One rank's share in serving: on ranks above 0 it owns the sender, which on rank 0 is the
/// session's.
template <class Tag>
class serving_rank {
    using traits = backend_traits<Tag>;
    using sender_type = typename traits::sender;

public:
    /// Makes the sender of a rank above 0.
    /// @returns what this rank exports.
    [[nodiscard]] std::string make_exporting_sender(typename traits::init_info info,
                                                    const sender_context& context) {
        info_.emplace(std::move(info));
        sender_.emplace(std::as_const(*info_));
        return sender_->export_memory(context);
    }

    /// `visit(text)` with what the sender of a rank above 0 has chosen, where it tells.
    template <class Visit>
    void describe(Visit visit) const {
        if constexpr (HasDescription<sender_type>) {
            if (sender_) {
                visit(std::string{sender_->description()});
            }
        }
    }

    /// Rank 0's plan, on every rank; empty where it is still the one that was told last.
    /// Collective.
    /// @param session rank 0's; null elsewhere.
    template <TrainerGroup Group, class Session>
    [[nodiscard]] std::string tell_plan(Group& group, Session* session, deadline until) {
        const auto mine = session != nullptr ? plan_to_tell(session) : std::string{};
        return std::move(group.all_gather(mine, until).front());
    }
    /// What `tell_plan` gave; does nothing on rank 0.
    /// @throws mismatch_error the sender makes other parts of it than rank 0's does.
    void adopt_plan(std::string_view told) {
        if (!sender_) {
            return;
        }
        sender_->adopt_plan(told.substr(std::min(told.size(), digest_length)));
        if (digest_text(hash_of(sender_->parts())) != told.substr(0, digest_length)) {
            throw mismatch_error{
                "after adopt_plan() the sender has other parts than rank 0's; do all trainer ranks "
                "run the same version?",
                {.phase = phase::init, .backend = std::string{traits::wire_name}}};
        }
    }

    /// When all ranks have adopted what was told: it is not told again.
    template <class Session>
    void plan_is_adopted(const Session* session) noexcept {
        adopted_ = session != nullptr ? session->plan().second : 0;
    }

    /// A round's update: each part is staged on every rank, then called for by rank 0.
    /// @param session rank 0's; null elsewhere.
    /// @throws what failed here, or what the group throws. Returns also when another rank has
    /// failed: the agreement that follows says so.
    template <TrainerGroup Group, class Session, WeightSource Source>
    void move(Group& group, Session* session, Source& source, const serving_round& round) {
        serving_steps steps{group, source, round};
        if (!move_parts(group, session, steps, round)) {
            steps.give_up();
            return;
        }
        try {
            if (session != nullptr) {
                session->end_update(steps.stream());
            } else {
                require_end(steps.stream(), traits::wire_name);
            }
        } catch (...) {
            steps.drain();
            throw;
        }
    }

    void close(deadline until) {
        if (sender_) {
            sender_->close(until);
            sender_.reset();
        }
    }

private:
    static constexpr std::size_t digest_length = 16;
    static constexpr bool sharded = traits::capabilities.sharded;

    template <class Session>
    [[nodiscard]] std::string plan_to_tell(Session* session) const {
        return session->plan().second == adopted_
                   ? std::string{}
                   : digest_text(hash_of(session->parts())) + std::string{session->plan().first};
    }

    /// Returns false where the round has failed on some rank.
    template <TrainerGroup Group, class Session, class Steps>
    [[nodiscard]] bool move_parts(Group& group, Session* session, Steps& steps,
                                  const serving_round& round) {
        auto told = tell_round(group, session, round.agree_until);
        if (!told.plan.empty()) {
            if (!steps.together([&] { adopt_plan(told.plan); }, 0)) {
                return false;
            }
            plan_is_adopted(session);
        }
        keep_peers(told.live);
        auto& stream = steps.stream();
        const std::span<const update_part> parts =
            session != nullptr ? session->parts() : std::span<const update_part>{sender_->parts()};
        std::size_t end = 0;
        for (std::size_t part = 0; part < parts.size(); ++part) {
            end = std::max({end, parts[part].first + parts[part].count, parts[part].read_until});
            const auto stage = [&] {
                if (session != nullptr) {
                    session->stage(part, stream, round.update_until);
                } else {
                    stage_part<traits>(*sender_, round.number, part, stream, round.update_until,
                                       round.stop);
                }
                if (!sharded) {
                    require_position(stream, end, "stage");
                }
            };
            const auto call = [&] {
                if (session != nullptr) {
                    session->call(part, stream, round.update_until);
                } else if (sharded) {
                    sender_->send(round.number, part, stream,
                                  traits::capabilities.before_let_go(round.update_until),
                                  round.stop);
                } else {
                    return;
                }
                require_position(stream, end, "send");
            };
            if (!steps.together(stage, end) || !steps.together(call, end)) {
                return false;
            }
        }
        return true;
    }

    /// What rank 0 tells the others before a round.
    struct round_news {
        std::string plan{};  ///< as `tell_plan`
        std::string live{};  ///< of shards: as `trainer_session::live_peers`
    };
    template <TrainerGroup Group, class Session>
    [[nodiscard]] round_news tell_round(Group& group, Session* session, deadline until) {
        if constexpr (!sharded) {
            return {tell_plan(group, session, until), {}};
        } else {
            std::string mine;
            if (session != nullptr) {
                mine = session->live_peers() + "\n" + plan_to_tell(session);
            }
            const auto all = group.all_gather(mine, until);
            const auto cut = std::min(all.front().find('\n'), all.front().size());
            return {all.front().substr(std::min(cut + 1, all.front().size())),
                    all.front().substr(0, cut)};
        }
    }
    /// Drops the peers that are not in the round, and restores the others, on ranks above 0.
    void keep_peers([[maybe_unused]] std::string_view live) {
        if constexpr (sharded && HasDropPeer<sender_type>) {
            for (std::size_t i = 0; sender_ && i < live.size(); ++i) {
                if (live[i] == '1') {
                    sender_->restore_peer(i);
                } else {
                    sender_->drop_peer(i);
                }
            }
        }
    }

    /// The sources advance in step: nothing is left to `send`, nothing read ahead.
    static void require_position(const tensor_stream& stream, std::size_t end,
                                 std::string_view what) {
        if (stream.position() != end) {
            throw usage_error{std::string{what} + " left the source at tensor " +
                                  std::to_string(stream.position()) + ", its part ends at " +
                                  std::to_string(end) +
                                  "; where every trainer rank serves, stage reads all of a part "
                                  "(or up to update_part::read_until) and send nothing",
                              {.phase = phase::update, .backend = std::string{traits::wire_name}}};
        }
    }

    [[nodiscard]] static std::uint64_t hash_of(std::span<const update_part> parts) {
        std::vector<std::uint64_t> numbers;
        for (const auto& part : parts) {
            numbers.push_back(part.first);
            numbers.push_back(part.count);
            numbers.push_back(part.read_until);
        }
        return digest(std::as_bytes(std::span{numbers}));
    }

    std::optional<typename traits::init_info> info_;
    std::optional<sender_type> sender_;
    std::uint64_t adopted_ = 0;  ///< number of rank 0's plan that all have, on rank 0
};

/// In the place of a `serving_rank`, where rank 0 alone sends.
struct no_serving_rank {};

}  // namespace weightwire::detail
