#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/concepts/update_target.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/engine/conversion_rule.hpp>
#include <weightwire/engine/tensor_digest.hpp>
#include <weightwire/plan/coverage.hpp>
#include <weightwire/plan/groups.hpp>

/// @file
/// One rank's part of a session: its sink's destinations, what has been written to them, and the
/// checks that stand between that and a commit.

namespace weightwire::detail {

/// What the ranks of a session share: the list of parameters and its layer groups.
class session_list {
public:
    session_list() = default;
    /// @param parameters lives as long as this object.
    explicit session_list(const manifest& parameters)
        : parameters_{&parameters}, groups_{plan::layerwise_groups(parameters)} {
        with_bytes_.resize(groups_.group_count);
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            with_bytes_[groups_.group_of[i]] += parameters[i].byte_size() != 0 ? 1U : 0U;
        }
    }

    [[nodiscard]] const manifest& parameters() const noexcept { return *parameters_; }
    [[nodiscard]] std::size_t group_of(std::size_t i) const noexcept { return groups_.group_of[i]; }
    [[nodiscard]] std::size_t group_count() const noexcept { return groups_.group_count; }
    /// Parameters that have bytes, of each group.
    [[nodiscard]] const std::vector<std::size_t>& with_bytes() const noexcept {
        return with_bytes_;
    }

private:
    const manifest* parameters_ = nullptr;
    plan::group_assignment groups_;
    std::vector<std::size_t> with_bytes_;
};

/// From `begin` to `commit` or `rollback` on one sink. Models what `update_target` is made over.
/// One thread at a time. Between `begin` and `complete` nothing is allocated unless it throws.
template <WeightSink Sink>
class rank_session {
public:
    /// For `update_target`: destinations exist only around their writes.
    static constexpr bool bounced = HasBouncedDestinations<Sink>;

    /// @param rule for destinations of another dtype than their parameter's.
    explicit rank_session(Sink& sink, conversion_rule rule = {}) noexcept
        : sink_{&sink}, rule_{rule} {}

    /// Asks the sink for its destinations.
    /// @param list lives until the session ends.
    /// @throws what the sink throws; usage_error the sink broke its contract.
    /// @throws mismatch_error a destination of another dtype, which the backend cannot write.
    void begin(const session_info& info, const session_list& list, deadline until,
               const std::stop_token& stop) {
        list_ = &list;
        open_ = true;  // also when begin throws half way: rollback is legal at any time
        if constexpr (HasStoppableBegin<Sink>) {
            destinations_ = sink_->begin(info, list.parameters(), until, stop);
        } else {
            destinations_ = sink_->begin(info, list.parameters(), until);
        }
        converted_ = 0;
        check_destinations();
        coverage_ = coverage{list.parameters()};
        missing_ = list.with_bytes();
        bytes_ = 0;
        if constexpr (HasBouncedDestinations<Sink>) {
            opened_.assign(destinations_.size(), {});
            digests_.assign(destinations_.size(), digest({}));
        }
    }

    /// @copydoc update_target::open
    /// Nothing for what is frozen or an alias: receivers skip those bytes, and coverage still sees
    /// that they came.
    /// @throws mismatch_error as `begin`, where the sink shows its destinations only here.
    [[nodiscard]] mutable_tensor_view open(std::size_t i, deadline until) {
        if (destinations_[i].kind != destination::kind_type::place) {
            return {};
        }
        if constexpr (HasBouncedDestinations<Sink>) {
            const bool first = opened_[i].data() == nullptr;
            opened_[i] = sink_->open_destination(i, until);
            check_dtype(i, opened_[i].type(), phase::update);
            converted_ += first && converted(i) ? 1U : 0U;
            return opened_[i];
        } else {
            return destinations_[i].where;
        }
    }

    /// @copydoc update_target::wrote
    /// Counted even where nothing is placed: a trainer that cuts a frozen tensor short is wrong
    /// too.
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline until) {
        const bool whole = coverage_.wrote(i, offset, count);
        const bool placed = destinations_[i].kind == destination::kind_type::place;
        bytes_ += placed ? count : 0;
        if (!whole || count == 0) {
            return;
        }
        if constexpr (HasBouncedDestinations<Sink>) {
            if (placed) {
                if (!converted(i)) {
                    digests_[i] = digest_opened(i, until);  // the buffer is gone after this
                }
                sink_->placed(i, until);
            }
        }
        const auto group = list_->group_of(i);
        if (--missing_[group] == 0) {
            sink_->group_complete(group);
        }
    }

    /// Everything that can fail before a commit: coverage, digests, the sink's own preparation.
    /// @param digests one a parameter, or empty. Those of parameters that were converted are not
    /// compared: the sender has digested other bytes.
    /// @throws coverage_error, integrity_error naming the tensor; what the sink throws.
    /// @throws timeout_error, cancelled_error between pieces of the digests too: those of a large
    /// model take seconds, which nobody may wait for any more.
    void complete(std::span<const std::uint64_t> digests, deadline until,
                  const std::stop_token& stop) {
        check_coverage();
        if constexpr (HasTensorDigests<Sink> && !HasBouncedDestinations<Sink>) {
            compare_at_once(digests, until, stop);
        } else {
            pacer pace{until, stop};
            for (std::size_t i = 0; i < digests.size(); ++i) {
                if (const auto at = digested(i); at != manifest::npos) {
                    require_digest(i, digest_of(at, pace), digests[i]);
                }
            }
        }
        for (std::size_t group = 0; group < list_->group_count(); ++group) {
            if (list_->with_bytes()[group] == 0) {
                sink_->group_complete(group);  // no write has announced it
            }
        }
        if constexpr (HasStoppablePrepare<Sink>) {
            sink_->prepare(until, stop);
        } else {
            sink_->prepare(until);
        }
    }
    /// The part of the commit that takes time and can still be given up, where the sink has it.
    /// @throws timeout_error, cancelled_error it was, and left no trace.
    void exchange([[maybe_unused]] deadline until, [[maybe_unused]] const std::stop_token& stop) {
        if constexpr (HasExchange<Sink>) {
            sink_->exchange(until, stop);
        }
    }
    /// What `exchange` and `commit` will take, as the sink guesses: never negative, and at most a
    /// day, so that it can be added to any instant of a clock.
    [[nodiscard]] std::chrono::nanoseconds commit_estimate() const {
        if constexpr (HasCommitEstimate<Sink>) {
            using std::chrono::nanoseconds;
            constexpr nanoseconds most = std::chrono::hours{24};
            const Sink& sink = *sink_;
            return std::clamp(nanoseconds{sink.commit_estimate()}, nanoseconds{0}, most);
        } else {
            return {};
        }
    }

    void commit(weight_version version) noexcept {
        sink_->commit(version);
        open_ = false;
    }
    /// Idempotent: the engine rolls back whatever happened, without asking how far it came.
    void rollback() noexcept {
        if (std::exchange(open_, false)) {
            destinations_ = {};
            sink_->rollback();
        }
    }

    /// Bytes placed so far: those of frozen parameters and aliases are not.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
    /// Parameters of the session that are written in another dtype than they are sent in. Where
    /// destinations are bounced: of those that have been opened.
    [[nodiscard]] std::size_t converted() const noexcept { return converted_; }
    [[nodiscard]] Sink& sink() const noexcept { return *sink_; }

private:
    /// Asks the clock and the stop once a MiB, over small tensors and large ones alike: a model of
    /// many small tensors shall not pay for the clock at each.
    class pacer {
    public:
        pacer(deadline until, const std::stop_token& stop) : until_{until}, stop_{&stop} {}
        void operator()(std::size_t bytes) {
            since_ += bytes;
            if (since_ < interval) {
                return;
            }
            since_ = 0;
            if (stop_->stop_requested()) {
                throw cancelled_error{"nobody waits for the digests; nothing is committed",
                                      {.phase = phase::finish}};
            }
            if (until_.expired()) {
                throw timeout_error{
                    "the digests were not compared in time; nothing is committed, allow more time "
                    "or send without digests",
                    {.phase = phase::finish}};
            }
        }

    private:
        static constexpr std::size_t interval = std::size_t{1} << 20U;
        deadline until_;
        const std::stop_token* stop_;
        std::size_t since_ = interval;  // the first piece asks
    };

    /// A sink is the user's code: what it promises is checked once a session, not trusted, because
    /// a receiver writes to these addresses without looking again.
    void check_destinations() {
        const auto& parameters = list_->parameters();
        if (destinations_.size() != parameters.size()) {
            throw usage_error{"the sink gave " + std::to_string(destinations_.size()) +
                                  " destinations for " + std::to_string(parameters.size()) +
                                  " parameters",
                              {.phase = phase::start}};
        }
        for (std::size_t i = 0; i < destinations_.size(); ++i) {
            const auto& where = destinations_[i];
            const bool alias = where.kind == destination::kind_type::alias;
            bool fits = !alias || where.alias_of < destinations_.size();
            if (where.kind == destination::kind_type::place && !HasBouncedDestinations<Sink>) {
                fits = where.where.extents() == parameters[i].shape &&
                       (where.where.data() != nullptr || parameters[i].byte_size() == 0);
            }
            if (!fits) {
                throw usage_error{
                    "the sink's destination has no address, another shape, or an alias that is "
                    "not in the list",
                    {.phase = phase::start, .tensor = parameters[i].name}};
            }
            if (where.kind == destination::kind_type::place && !HasBouncedDestinations<Sink>) {
                check_dtype(i, where.where.type(), phase::start);
                converted_ += converted(i) ? 1U : 0U;
            }
        }
    }

    /// @throws mismatch_error the elements of parameter `i` cannot be written as `held`.
    void check_dtype(std::size_t i, dtype held, phase where) const {
        const auto& sent = list_->parameters()[i];
        if (held != sent.dtype) {
            rule_.require(sent, held, where);
        }
    }
    /// Whether parameter `i`, which is placed, is written in another dtype than it is sent in.
    [[nodiscard]] bool converted(std::size_t i) const noexcept {
        const auto sent = list_->parameters()[i].dtype;
        if constexpr (HasBouncedDestinations<Sink>) {
            return opened_[i].data() != nullptr && opened_[i].type() != sent;
        } else {
            return destinations_[i].where.type() != sent;
        }
    }

    /// Whether a commit needs all bytes of parameter `i`. What the sink has declared frozen or an
    /// alias need not come; where it begins to come, it must come whole.
    [[nodiscard]] bool lacks(std::size_t i) const noexcept {
        const bool wanted = destinations_[i].kind == destination::kind_type::place;
        return !coverage_.whole(i) && (wanted || !coverage_.untouched(i));
    }

    /// A session without a byte would be a 200 for nothing: the most common mistake of a trainer
    /// whose source is empty on this rank.
    void check_coverage() const {
        if (bytes_ == 0) {
            throw coverage_error{"the session moved 0 bytes; nothing is committed",
                                 {.phase = phase::finish}};
        }
        const auto count = destinations_.size();
        std::size_t lacking = 0;
        std::size_t first = count;
        for (std::size_t i = count; i-- > 0 && !coverage_.all_whole();) {
            lacking += lacks(i) ? 1U : 0U;
            first = lacks(i) ? i : first;
        }
        if (lacking != 0) {
            throw coverage_error{std::to_string(lacking) + " of " + std::to_string(count) +
                                     " parameters are not whole, this one first; nothing is "
                                     "committed",
                                 {.phase = phase::finish,
                                  .tensor = list_->parameters()[first].name,
                                  .bytes_total = list_->parameters()[first].byte_size()}};
        }
    }

    /// Position of the destination whose bytes must have the digest that was sent for parameter
    /// `i`; `npos` where there are none to compare.
    [[nodiscard]] std::size_t digested(std::size_t i) const noexcept {
        const auto& kind = destinations_[i].kind;
        // An alias shares its owner's storage, so it must have been sent with the same bytes.
        const auto at = kind == destination::kind_type::alias ? destinations_[i].alias_of : i;
        const bool compared = kind != destination::kind_type::frozen &&
                              list_->parameters()[i].byte_size() != 0 &&
                              destinations_[at].kind == destination::kind_type::place &&
                              coverage_.whole(i) && coverage_.whole(at) && !converted(at) &&
                              list_->parameters()[i].dtype == list_->parameters()[at].dtype;
        return compared ? at : manifest::npos;
    }
    void require_digest(std::size_t i, std::uint64_t found, std::uint64_t expected) const {
        if (found != expected) {
            throw integrity_error{"the bytes in place have digest " + digest_text(found) +
                                      ", the trainer sent digest " + digest_text(expected) +
                                      "; nothing is committed, send again",
                                  {.phase = phase::finish, .tensor = list_->parameters()[i].name}};
        }
    }

    /// All digests in one call of the sink: a device computes them together.
    void compare_at_once(std::span<const std::uint64_t> expected, deadline until,
                         const std::stop_token& stop) {
        compared_.clear();
        for (std::size_t i = 0; i < expected.size(); ++i) {
            if (const auto at = digested(i); at != manifest::npos) {
                compared_.push_back(destinations_[at].where);
            }
        }
        if (compared_.empty()) {
            return;
        }
        digests_.resize(compared_.size());
        sink_->tensor_digests(compared_, digests_, until, stop);
        std::size_t next = 0;
        for (std::size_t i = 0; i < expected.size(); ++i) {
            if (digested(i) != manifest::npos) {
                require_digest(i, digests_[next++], expected[i]);
            }
        }
    }

    /// Of a buffer that holds all bytes of parameter `i`.
    [[nodiscard]] std::uint64_t digest_opened(std::size_t i,
                                              [[maybe_unused]] deadline until) const {
        if constexpr (HasTensorDigests<Sink>) {
            const tensor_view whole{opened_[i]};
            std::uint64_t result = 0;
            sink_->tensor_digests(std::span{&whole, 1}, std::span{&result, 1}, until, {});
            return result;
        } else {
            return tensor_digest(opened_[i]);
        }
    }
    [[nodiscard]] std::uint64_t digest_of(std::size_t i, [[maybe_unused]] pacer& pace) const {
        if constexpr (HasBouncedDestinations<Sink>) {
            return digests_[i];
        } else {
            return tensor_digest(destinations_[i].where, std::ref(pace));
        }
    }

    Sink* sink_;
    conversion_rule rule_;
    const session_list* list_ = nullptr;
    std::span<const destination> destinations_;
    coverage coverage_;
    std::vector<std::size_t> missing_;  ///< parameters with bytes that are not whole, by group
    std::uint64_t bytes_ = 0;
    std::size_t converted_ = 0;
    bool open_ = false;
    // Only where destinations exist around their writes.
    std::vector<mutable_tensor_view> opened_;
    std::vector<std::uint64_t> digests_;
    std::vector<tensor_view> compared_;  ///< only where the sink digests
};

}  // namespace weightwire::detail
