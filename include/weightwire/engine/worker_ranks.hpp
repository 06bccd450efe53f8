#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
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
#include <weightwire/engine/rank_crew.hpp>
#include <weightwire/engine/rank_session.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/vllm_requests.hpp>

/// @file
/// The ranks behind one worker server: their receivers, their sinks, and every step that all of
/// them take together.

namespace weightwire::detail {

/// The ranks of one worker. Knows nothing of calls, epochs or versions; the engine does. One thread
/// at a time. A member that throws leaves some ranks further than others: the caller rolls back.
template <class Tag, class Sink>
class worker_ranks {
    using traits = backend_traits<Tag>;
    using turn = call_gate::entry;

public:
    /// @param sinks one a rank, outliving this object.
    /// @throws usage_error none, or a null one.
    explicit worker_ranks(const std::vector<Sink*>& sinks) : crew_{sinks.size()} {
        for (auto* sink : sinks) {
            if (sink == nullptr) {
                throw usage_error{"a worker engine was given a null sink"};
            }
            ranks_.emplace_back(*sink);
        }
        if (ranks_.empty()) {
            throw usage_error{"a worker engine needs at least one sink"};
        }
    }

    [[nodiscard]] std::size_t size() const noexcept { return ranks_.size(); }
    [[nodiscard]] Sink& sink(std::size_t rank) const noexcept {
        return ranks_[rank].session.sink();
    }
    /// Whether a rank's live weights are a mix.
    [[nodiscard]] bool any_dirty() const {
        return std::any_of(ranks_.begin(), ranks_.end(),
                           [](const rank_state& rank) { return rank.session.sink().dirty(); });
    }

    // Receivers.

    [[nodiscard]] bool open() const noexcept { return open_; }
    /// Makes and opens a receiver for every rank. `with` may be gone afterwards, its manifest not
    /// before `release`.
    /// @throws what a receiver throws; all are released then.
    void open(const transport_open& with, int rank_offset, int world_size, deadline until,
              turn& mine) {
        release();
        // All are made before any is opened: opening runs side by side, on the ranks' threads.
        for (std::size_t i = 0; i < ranks_.size(); ++i) {
            const auto local = static_cast<int>(i);
            ranks_[i].receiver.emplace(receiver_context{
                .local_rank = local, .global_rank = rank_offset + local, .world_size = world_size});
        }
        try {
            on_all(mine,
                   [&](std::size_t i) { ranks_[i].receiver->open(with, until, mine.stop()); });
        } catch (...) {
            release();
            throw;
        }
        open_ = true;
    }
    /// Lets go of everything of the trainer's. Idempotent.
    void release() noexcept {
        for (auto& rank : ranks_) {
            if (rank.receiver) {
                rank.receiver->release();
                rank.receiver.reset();
            }
        }
        open_ = false;
    }

    // A session.

    /// The parameters of the sessions that follow. `parameters` lives until the next call.
    void expect(const manifest& parameters) {
        list_ = session_list{parameters};
        placed_ = nullptr;  // positions are those of the list before
    }
    [[nodiscard]] const manifest& parameters() const noexcept { return list_.parameters(); }

    /// Asks every sink for its destinations.
    void begin(const session_info& info, deadline until, turn& mine) {
        on_all(mine,
               [&](std::size_t i) { ranks_[i].session.begin(info, list_, until, mine.stop()); });
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
        on_all(mine, [&](std::size_t i) {
            auto own = message;  // vLLM's request has one entry a rank, the rest is the same
            if (named != nullptr) {
                own.extras = named->entry(i).extras;
            }
            receive_on(ranks_[i], own, named != nullptr, until, mine.stop());
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
    /// How long `commit` will take: ranks commit side by side, so as long as the slowest.
    [[nodiscard]] std::chrono::nanoseconds commit_estimate() const {
        std::chrono::nanoseconds longest{0};
        for (const auto& rank : ranks_) {
            longest = std::max(longest, rank.session.commit_estimate());
        }
        return longest;
    }
    /// After a `complete` that returned: every rank shows the new version. Side by side, since a
    /// `copy_in` commit copies.
    void commit(weight_version version) noexcept {
        crew_.run([&](std::size_t i) noexcept { ranks_[i].session.commit(version); });
    }
    /// Idempotent.
    void roll_back() noexcept {
        for (auto& rank : ranks_) {
            rank.session.rollback();
        }
    }

    /// Fills every destination of the open session with zeros.
    /// @throws unsupported_error a destination is not in host memory.
    void zero(deadline until, turn& mine) {
        on_all(mine, [&](std::size_t rank) {
            auto& target = ranks_[rank].session;
            for (std::size_t i = 0; i < parameters().size(); ++i) {
                if (const auto where = target.open(i, until); where.data() != nullptr) {
                    fill_with_zeros(where, parameters()[i].name);
                }
                target.wrote(i, 0, parameters()[i].byte_size(), until);
            }
        });
    }

private:
    struct rank_state {
        explicit rank_state(Sink& sink) noexcept : session{sink} {}
        rank_session<Sink> session;
        std::optional<typename traits::receiver> receiver{};
        std::vector<std::size_t> positions{};  ///< of a vLLM update's names in the session
        std::int64_t began_ns = 0;             ///< of this update's data move
        std::int64_t ended_ns = 0;
    };

    /// `work(rank)` for all at once; the first to throw stops the others.
    template <class Work>
    void on_all(turn& mine, Work work) {
        crew_.run(work, [&] { mine.request_stop(); });
    }

    /// One rank's share. The times are its own, so that a rank's late thread counts as waiting.
    void receive_on(rank_state& rank, const update_message& message, bool named, deadline until,
                    std::stop_token stop) {
        const auto positions =
            named ? std::span<const std::size_t>{rank.positions} : std::span<const std::size_t>{};
        update_target target{rank.session, parameters(), message.first, message.count, positions};
        rank.began_ns = monotonic_ns();
        rank.receiver->receive(message, target, until, std::move(stop));
        rank.ended_ns = monotonic_ns();
    }

    [[nodiscard]] std::uint64_t bytes() const noexcept {
        // Of all update calls of the session; `receive` reports the difference.
        std::uint64_t sum = 0;
        for (const auto& rank : ranks_) {
            sum += rank.session.bytes();
        }
        return sum;
    }

    /// Finds a request's names in the session; once for all rounds that send the same.
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
            throw unsupported_error{"this build resets whole bytes of host memory only",
                                    {.phase = phase::serve, .tensor = name}};
        }
        if (where.is_contiguous()) {
            std::memset(where.data(), 0, where.byte_size());
        } else {
            each_run(where, 0, item, [&](std::byte* at) { std::memset(at, 0, item); });
        }
    }

    std::deque<rank_state> ranks_;  // receivers need not be movable
    session_list list_;
    std::shared_ptr<const wire::vllm_update_request> placed_;  ///< `positions` belong to it
    bool open_ = false;
    rank_crew crew_;  // last: its threads end before what they read
};

}  // namespace weightwire::detail
