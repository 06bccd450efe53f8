#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/update_target.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/engine/call_gate.hpp>
#include <weightwire/engine/conversion_rule.hpp>
#include <weightwire/engine/rank_crew.hpp>
#include <weightwire/engine/rank_devices.hpp>
#include <weightwire/engine/rank_receivers.hpp>
#include <weightwire/engine/rank_session.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/vllm_requests.hpp>

/// @file
/// The ranks behind one worker server: their receivers, their sinks, and every step that all of
/// them take together.

namespace weightwire {

/// `parameters()`: the sink knows its own list. Needed where the trainer does not say at init what
/// it will send, which is vLLM's, and where what the sink holds is not what the trainer has.
template <class S>
concept HasParameters = requires(const std::remove_reference_t<S>& sink) {
    { sink.parameters() } -> std::convertible_to<const manifest&>;
};

namespace detail {

/// The ranks of one worker. Knows nothing of calls, epochs or versions; the engine does. Every step
/// is taken by all ranks before the next begins: what one cannot do none has gone past. One thread
/// at a time, except where a member says otherwise. A member that throws leaves some ranks further
/// than others: the caller rolls back.
template <class Tag, class Sink>
class worker_ranks {
    using turn = call_gate::entry;
    using receiver = typename backend_traits<Tag>::receiver;

public:
    using receivers = rank_receivers<Tag>;

    /// @param tag for the receivers.
    /// @param sinks one a rank, outliving this object.
    /// @param devices one a rank, or empty: see `rank_devices`.
    /// @throws usage_error no sink, a null one, or devices that do not fit.
    worker_ranks(Tag tag, const std::vector<Sink*>& sinks, std::span<const int> devices)
        : tag_{std::move(tag)}, crew_{sinks.size()} {
        for (auto* sink : sinks) {
            if (sink == nullptr) {
                throw usage_error{"a worker engine was given a null sink"};
            }
            ranks_.emplace_back(*sink);
        }
        if (ranks_.empty()) {
            throw usage_error{"a worker engine needs at least one sink"};
        }
        devices_ = rank_devices(sinks, devices);
        if constexpr (sharded && HasParameters<Sink>) {
            for (auto& rank : ranks_) {
                own_.push_back(&rank.session.sink().parameters());
            }
        }
    }

    [[nodiscard]] std::size_t size() const noexcept { return ranks_.size(); }
    [[nodiscard]] Sink& sink(std::size_t rank) const noexcept {
        return ranks_[rank].session.sink();
    }
    /// Whether a rank's live weights are a mix, or may become one at any time.
    [[nodiscard]] bool any_dirty() const {
        return lost_ || std::any_of(ranks_.begin(), ranks_.end(), [](const rank_state& rank) {
                   return rank.session.sink().dirty();
               });
    }

    // Receivers.

    [[nodiscard]] bool open() const noexcept { return receivers_ != nullptr; }
    /// Opens a receiver for every rank, once the old ones are let go of; makes them unless they may
    /// be opened again and have the same places. `with` may be gone afterwards, its manifest not
    /// before `release`.
    /// @throws what a receiver throws; none is open then.
    void open(const transport_open& with, int rank_offset, int world_size, deadline until,
              turn& mine) {
        release();
        if (rested_ != nullptr && rested_->is_for(rank_offset, world_size)) {
            receivers_ = std::move(rested_);
        } else {
            rested_.reset();  // first: both may not fit
            receivers_ = std::make_unique<receivers>(tag_, devices_, rank_offset, world_size);
        }
        try {
            receivers_->open(crew_, with, own_, until, mine.stop_source());
        } catch (...) {
            release();
            throw;
        }
    }
    /// The same beside the receivers that are in use. Any thread, and beside a call: it has threads
    /// of its own, since those of the ranks may be at work for the trainer that is still here.
    [[nodiscard]] std::unique_ptr<receivers> open_beside(const transport_open& with,
                                                         int rank_offset, int world_size,
                                                         deadline until,
                                                         const std::stop_token& stop) const {
        auto made = std::make_unique<receivers>(tag_, devices_, rank_offset, world_size);
        std::stop_source all;
        const std::stop_callback forward{stop, [&all]() noexcept { all.request_stop(); }};
        rank_crew crew{ranks_.size()};
        made->open(crew, with, own_, until, all);
        return made;
    }
    /// Takes over what `open_beside` has opened.
    void adopt(std::unique_ptr<receivers> opened) noexcept { receivers_ = std::move(opened); }
    /// Lets go of everything of the trainer's. Idempotent.
    void release() noexcept {
        if (receivers_ != nullptr) {
            receivers_->release(crew_);
            lost_ = lost_ || receivers_->lost();
            if constexpr (HasReopen<receiver>) {
                rested_ = std::move(receivers_);
            }
            receivers_.reset();
        }
    }
    /// Whether a receiver that was released, or one that could not be opened, was `HasLost`.
    [[nodiscard]] bool lost() const noexcept { return lost_; }
    /// @copydoc rank_receivers::table_bytes
    [[nodiscard]] std::uint64_t table_bytes() const noexcept {
        return receivers_ != nullptr ? receivers_->table_bytes() : 0;
    }
    /// @copydoc rank_receivers::describe
    template <class Visit>
    void describe(Visit visit) const {
        if (receivers_ != nullptr) {
            receivers_->describe(visit);
        }
    }

    // A session.

    /// The parameters of the sessions that follow; of a `sharded` transport those of each sink
    /// instead. `parameters` lives until the next call. Groups are worked out here, once an init,
    /// and not in `begin`, which stands in every round.
    void expect(const manifest& parameters) {
        lists_.clear();
        for (const auto* own : own_) {
            lists_.emplace_back(*own);
        }
        if (own_.empty()) {
            lists_.emplace_back(parameters);
        }
        placed_ = nullptr;  // positions are those of the list before
    }
    /// Of the first rank, whose list is that of all but where the transport is `sharded`.
    [[nodiscard]] const manifest& parameters() const noexcept {
        return lists_.front().parameters();
    }

    /// Asks every sink for its destinations. Those that have readers wait for them here, side by
    /// side, so that the slowest reader is waited for once and not once a rank.
    /// @throws resource_error what a receiver had begun could not be ended: no memory of this
    /// process is safe from it.
    /// @throws mismatch_error a sink holds a parameter in another dtype, and the backend does not
    /// convert.
    void begin(const session_info& info, deadline until, turn& mine) {
        lost_ = lost_ || (receivers_ != nullptr && receivers_->lost());
        if (lost_) {
            throw resource_error{
                "work on a device of this worker could not be ended and may write to its memory at "
                "any later time; restart this process",
                {.phase = phase::start, .backend = std::string{backend_traits<Tag>::wire_name}}};
        }
        on_all(mine,
               [&](std::size_t i) { ranks_[i].session.begin(info, list(i), until, mine.stop()); });
    }

    /// Parameters that a rank of the open session writes in another dtype than they are sent in;
    /// of the ranks, the most.
    [[nodiscard]] std::size_t converted() const noexcept {
        std::size_t most = 0;
        for (const auto& rank : ranks_) {
            most = std::max(most, rank.session.converted());
        }
        return most;
    }

    /// Receives one update call on every rank.
    /// @param named the vLLM request that names the parameters, or null: all of the session.
    /// @returns bytes placed, and when the first rank began and the last one ended.
    wire::native_update_reply receive(const update_message& message,
                                      const std::shared_ptr<const wire::vllm_update_request>& named,
                                      deadline until, turn& mine) {
        if (named != nullptr && named != placed_) {
            place_names(named);
        }
        const auto before = bytes();
        if constexpr (HasReceivePrepare<receiver>) {
            on_all(mine, [&](std::size_t i) {
                with_target(i, message, named.get(), [&](const auto& own, auto& target) {
                    (*receivers_)[i].prepare(own, target, until, mine.stop());
                });
            });
        }
        on_all(mine, [&](std::size_t i) {
            with_target(i, message, named.get(), [&](const auto& own, auto& target) {
                ranks_[i].began_ns = monotonic_ns();
                (*receivers_)[i].receive(own, target, until, mine.stop());
                ranks_[i].ended_ns = monotonic_ns();
            });
        });
        // From the first rank's begin to the last one's end: what the trainer waits for.
        wire::native_update_reply result{.bytes = bytes() - before,
                                         .began_ns = ranks_.front().began_ns,
                                         .ended_ns = ranks_.front().ended_ns};
        for (const auto& rank : ranks_) {
            result.began_ns = std::min(result.began_ns, rank.began_ns);
            result.ended_ns = std::max(result.ended_ns, rank.ended_ns);
        }
        return result;
    }

    /// Everything that can fail before a commit, on every rank.
    /// @param digests one a parameter, or empty.
    void complete(std::span<const std::uint64_t> digests, deadline until, turn& mine) {
        if (!digests.empty() && digests.size() != parameters().size()) {
            throw protocol_error{"the finish call has " + std::to_string(digests.size()) +
                                     " digests for " + std::to_string(parameters().size()) +
                                     " parameters",
                                 {.phase = phase::finish}};
        }
        on_all(mine,
               [&](std::size_t i) { ranks_[i].session.complete(digests, until, mine.stop()); });
    }
    /// What of the commit takes time, on every rank, while all of it can still be given up.
    /// @throws timeout_error, cancelled_error a rank was late: `roll_back` undoes the others.
    void exchange(deadline until, turn& mine) {
        on_all(mine, [&](std::size_t i) { ranks_[i].session.exchange(until, mine.stop()); });
    }
    /// How long a commit will take from now on: ranks work side by side, so as long as the slowest.
    [[nodiscard]] std::chrono::nanoseconds commit_estimate() const {
        std::chrono::nanoseconds longest{0};
        for (const auto& rank : ranks_) {
            longest = std::max(longest, rank.session.commit_estimate());
        }
        return longest;
    }
    /// After a `complete`, and an `exchange` where sinks have it, that returned: every rank shows
    /// the new version.
    void commit(weight_version version) noexcept {
        if constexpr (HasExchange<Sink>) {
            // Nothing but a few words to write is left: waking threads would take longer, and a
            // process that is stopped meanwhile should be stopped between two ranks as seldom as
            // can be.
            for (auto& rank : ranks_) {
                rank.session.commit(version);
            }
        } else {
            crew_.run([&](std::size_t i) noexcept { ranks_[i].session.commit(version); });
        }
    }
    /// Side by side, since ranks that have exchanged exchange back. Idempotent.
    void roll_back() noexcept {
        crew_.run([&](std::size_t i) noexcept { ranks_[i].session.rollback(); });
    }

    /// Fills every destination of the open session with zeros, by the same way as received bytes
    /// go: coverage and bounced destinations see no difference.
    /// @throws unsupported_error a destination is not in host memory, and the sink does not clear.
    void zero(deadline until, turn& mine) {
        on_all(mine, [&](std::size_t rank) {
            auto& target = ranks_[rank].session;
            const manifest& parameters = list(rank).parameters();
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                if (const auto where = target.open(i, until); where.data() != nullptr) {
                    if constexpr (HasTensorClear<Sink>) {
                        target.sink().clear_tensor(where);
                    } else {
                        fill_with_zeros(where, parameters[i].name);
                    }
                }
                target.wrote(i, 0, parameters[i].byte_size(), until);
            }
        });
    }

private:
    static constexpr bool sharded = backend_traits<Tag>::capabilities.sharded;

    /// Rank `i`'s parameters.
    [[nodiscard]] const session_list& list(std::size_t i) const noexcept {
        return lists_[lists_.size() == 1 ? 0 : i];
    }

    struct rank_state {
        explicit rank_state(Sink& sink) noexcept : session{sink, conversion_rule::of<Tag>()} {}
        rank_session<Sink> session;
        std::vector<std::size_t> positions{};  ///< of a vLLM update's names in the session
        std::int64_t began_ns = 0;             ///< of this update's data move
        std::int64_t ended_ns = 0;
    };

    /// `work(rank)` for all at once; the first to throw stops the others, which would only wait for
    /// a session that is lost.
    template <class Work>
    void on_all(turn& mine, Work work) {
        crew_.run(work, [&] { mine.request_stop(); });
    }

    /// `work(message, target)` with one rank's share of an update.
    template <class Work>
    void with_target(std::size_t i, const update_message& message,
                     const wire::vllm_update_request* named, Work work) {
        auto own = message;  // vLLM's request has one entry a rank, the rest is the same
        std::span<const std::size_t> positions;
        if (named != nullptr) {
            own.extras = named->entry(i).extras;
            positions = ranks_[i].positions;
        }
        const manifest& names = list(i).parameters();
        // The trainer's positions mean nothing here.
        update_target target{ranks_[i].session, names, sharded ? 0 : own.first,
                             sharded ? names.size() : own.count, positions};
        work(own, target);
    }

    [[nodiscard]] std::uint64_t bytes() const noexcept {
        // Of all update calls of the session; `receive` reports the difference.
        std::uint64_t sum = 0;
        for (const auto& rank : ranks_) {
            sum += rank.session.bytes();
        }
        return sum;
    }

    /// Finds a request's names in the session; once for all rounds that send the same. The request
    /// is kept alive, since an equal address could else be another request.
    void place_names(const std::shared_ptr<const wire::vllm_update_request>& request) {
        placed_ = nullptr;
        for (std::size_t i = 0; i < ranks_.size(); ++i) {
            const auto& named = request->entry(i).parameters;
            auto& positions = ranks_[i].positions;
            positions.clear();
            positions.reserve(named.size());
            for (const auto& parameter : named.parameters()) {
                positions.push_back(position_of(parameter));
            }
        }
        placed_ = request;
    }

    /// vLLM's request repeats dtype and shape, so they are compared: a receiver writes by them.
    [[nodiscard]] std::size_t position_of(const param_meta& named) const {
        const auto at = parameters().find(named.name);
        if (at == manifest::npos) {
            throw coverage_error{"the worker has no parameter of this name",
                                 {.phase = phase::update, .tensor = named.name}};
        }
        const auto& held = parameters()[at];
        if (held.dtype != named.dtype || held.shape != named.shape) {
            throw coverage_error{"the update brings " + std::string{to_string(named.dtype)} +
                                     to_string(named.shape) + ", the worker holds " +
                                     std::string{to_string(held.dtype)} + to_string(held.shape),
                                 {.phase = phase::update, .tensor = named.name}};
        }
        return at;
    }

    static void fill_with_zeros(const mutable_tensor_view& where, const std::string& name) {
        const auto item = item_bits(where.type()) / 8;
        // Bits of strided tensors have neighbours that are not theirs to clear.
        if (where.device().kind != memory_kind::host ||
            (item_bits(where.type()) % 8 != 0 && !where.is_contiguous())) {
            throw unsupported_error{
                "a worker resets whole bytes of host memory only, unless its "
                "sink has clear_tensor()",
                {.phase = phase::serve, .tensor = name}};
        }
        if (where.is_contiguous()) {
            std::memset(where.data(), 0, where.byte_size());
        } else {
            each_run(where, 0, item, [&](std::byte* at) { std::memset(at, 0, item); });
        }
    }

    Tag tag_;
    bool lost_ = false;  ///< see `rank_receivers::lost`; for the rest of the process
    std::deque<rank_state> ranks_;
    std::vector<int> devices_;              ///< of each rank's receiver
    std::unique_ptr<receivers> receivers_;  ///< of the trainer that is here; none between two
    std::unique_ptr<receivers> rested_;     ///< between two, of those that may be opened again
    std::vector<const manifest*> own_;      ///< of a `sharded` transport, what each sink holds
    std::deque<session_list> lists_;        ///< one a rank, or one for all
    std::shared_ptr<const wire::vllm_update_request> placed_;  ///< `positions` belong to it
    rank_crew crew_;  // last: its threads end before what they read
};

}  // namespace detail

}  // namespace weightwire
