#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/engine/conversion_rule.hpp>
#include <weightwire/engine/session.hpp>
#include <weightwire/engine/worker_ranks.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/native.hpp>

/// @file
/// What a worker checks at init before anything changes.

namespace weightwire {

namespace detail {

/// This worker's ranks are `rank_offset` and following of a group of `world_size`, whose rank 0
/// sends.
/// @throws mismatch_error they do not fit.
inline void require_world(std::int64_t rank_offset, std::int64_t world_size, std::size_t ranks,
                          error_context where) {
    const auto ours = static_cast<std::int64_t>(ranks);
    if (rank_offset < 1 || rank_offset > world_size - ours) {
        throw mismatch_error{"this worker's " + std::to_string(ours) +
                                 " ranks do not fit a group of " + std::to_string(world_size) +
                                 " from rank " + std::to_string(rank_offset) + " on",
                             std::move(where)};
    }
}

/// What both sides must agree on, computed here and not believed: a trainer of another build may
/// hash alike and cut otherwise. The order is from what explains most to what explains least, since
/// a wrong wire version makes every later difference a riddle.
/// @throws mismatch_error names what differs, theirs and ours.
template <class Tag>
void check_native_init(const wire::native_init& message, std::size_t ranks) {
    constexpr std::string_view name = backend_traits<Tag>::wire_name;
    const error_context where{.phase = phase::init, .backend = std::string{name}};
    const auto refuse = [&](std::string_view what, std::string_view theirs, std::string_view ours) {
        throw mismatch_error{std::string{what} + " differs: the trainer has " +
                                 std::string{theirs} + ", this worker " + std::string{ours} +
                                 "; nothing has moved",
                             where};
    };
    if (message.wire != wire::native_version) {
        refuse("the wire version", std::to_string(message.wire),
               std::to_string(wire::native_version));
    }
    if (message.backend != name) {
        refuse("the backend", message.backend, name);
    }
    require_world(message.rank_offset, message.world_size, ranks, where);
    const auto hash =
        wire::plan_hash(name, message.world_size, message.parameters, message.wire_parameters);
    if (hash != message.plan_hash) {
        refuse("the plan hash", digest_text(message.plan_hash), digest_text(hash));
    }
}

/// Whether the sink takes what is sent as `from` into what it holds as `to`, another dtype.
template <class Sink>
[[nodiscard]] bool takes_converted(const Sink& sink, dtype from, dtype to) {
    if constexpr (HasDtypeConversion<Sink>) {
        return sink.converts_dtypes() && can_convert(from, to);
    } else {
        return false;
    }
}

/// What a trainer says at init that it will send is compared with what the ranks say they hold, so
/// that a wrong model is refused while nothing has been touched. What is missing is not seen here:
/// whether a session is partial is said at its start. Of a `sharded` transport the receivers
/// compare, by what their loaders ask for.
/// @throws coverage_error a name that a rank does not have, or another dtype or shape; names the
/// tensor, and what was expected and found.
/// @throws mismatch_error a dtype that the sink would have converted, and the backend does not.
/// @throws unsupported_error `sharded`, and a sink that does not say what it holds.
template <class Tag, class Sink>
void check_native_parameters(const manifest& theirs, const worker_ranks<Tag, Sink>& ranks) {
    if constexpr (backend_traits<Tag>::capabilities.sharded) {
        if constexpr (!HasParameters<Sink>) {
            throw unsupported_error{
                "this worker's sink does not say what it holds, which a loader needs; add a member "
                "parameters()",
                {.phase = phase::init, .backend = std::string{backend_traits<Tag>::wire_name}}};
        }
    } else if constexpr (HasParameters<Sink>) {
        for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
            const manifest& ours = ranks.sink(rank).parameters();
            const int named_rank = ranks.size() == 1 ? -1 : static_cast<int>(rank);
            const auto refuse = [&](const param_meta& theirs_here, const std::string& text) {
                throw coverage_error{text + "; trainer and worker must hold the same model",
                                     {.phase = phase::init,
                                      .tensor = theirs_here.name,
                                      .backend = std::string{backend_traits<Tag>::wire_name},
                                      .rank = named_rank}};
            };
            for (const auto& found : theirs.parameters()) {
                const auto at = ours.find(found.name);
                if (at == manifest::npos) {
                    refuse(found, "expected one of the " + std::to_string(ours.size()) +
                                      " parameters of the worker, found a name that it does not "
                                      "have");
                }
                const auto& held = ours[at];
                const bool converted = held.dtype != found.dtype &&
                                       takes_converted(ranks.sink(rank), found.dtype, held.dtype);
                if (held.shape != found.shape || (held.dtype != found.dtype && !converted)) {
                    const bool convertible =
                        held.shape == found.shape && can_convert(found.dtype, held.dtype);
                    refuse(found, "expected " + std::string{to_string(held.dtype)} +
                                      to_string(held.shape) + ", found " +
                                      std::string{to_string(found.dtype)} + to_string(found.shape) +
                                      (convertible ? " (a table with convert_dtypes takes it, with "
                                                     "a backend that converts: cuda_ipc)"
                                                   : ""));
                }
                if (converted) {
                    conversion_rule::of<Tag>().require(found, held.dtype, phase::init, named_rank);
                }
            }
        }
    }
}

/// The update is of the plan that init agreed on.
inline void require_plan(const wire::native_update& message, std::uint64_t agreed,
                         error_context where) {
    if (message.plan_hash != agreed) {
        throw mismatch_error{"the update call belongs to plan " + digest_text(message.plan_hash) +
                                 ", init agreed on plan " + digest_text(agreed),
                             std::move(where)};
    }
}

/// The finish is of the version that start announced.
inline void require_started(const wire::native_finish& message, std::uint64_t version,
                            error_context where) {
    if (message.version != version) {
        throw mismatch_error{"finish names version " + std::to_string(message.version) +
                                 ", start named " + std::to_string(version),
                             std::move(where)};
    }
}

/// The part that an update call names is a run of the manifest's `size` parameters. Compared
/// without a sum, which a hostile count would overflow.
/// @throws protocol_error it is not.
inline void require_part(const wire::native_update& message, std::size_t size,
                         error_context where) {
    if (message.first > size || message.count > size - message.first) {
        throw protocol_error{"the update call names " + std::to_string(message.count) +
                                 " parameters from " + std::to_string(message.first) + " on, of " +
                                 std::to_string(size),
                             std::move(where)};
    }
}

/// @throws unsupported_error this backend has no form in vLLM's wire.
template <class Tag>
void require_speaks_vllm() {
    if constexpr (!backend_traits<Tag>::capabilities.speaks_vllm) {
        constexpr std::string_view name = backend_traits<Tag>::wire_name;
        throw unsupported_error{
            "this worker's backend takes weights from a weightwire trainer "
            "only; it does not speak vLLM's wire",
            {.phase = phase::init, .backend = std::string{name}}};
    }
}

/// Whose a worker is: that of the last init that worked. Nobody's while an init runs and after one
/// that failed.
struct worker_owner {
    enum class kind_type : std::uint8_t { nobody, native, vllm };
    kind_type kind = kind_type::nobody;
    std::uint64_t trainer = 0;  ///< the native one's name
};

/// Tells two inits apart by when they came: the later one has the worker, whichever is opened
/// first. And keeps the owner, for the checks that come before an init has its turn. Thread-safe.
class owner_board {
public:
    /// An init has come. Returns its number, from 1.
    [[nodiscard]] std::uint64_t arrive() {
        const std::lock_guard lock{mutex_};
        return ++arrived_;
    }
    [[nodiscard]] worker_owner owner() const {
        const std::lock_guard lock{mutex_};
        return owner_;
    }
    /// The init of number `arrival` begins: nobody's until `own`.
    /// @throws session_refused taken_over: one that came later has had its turn already.
    void begin(std::uint64_t arrival, error_context where) {
        const std::lock_guard lock{mutex_};
        if (arrival < begun_) {
            throw session_refused{session_fault::taken_over, to_string(session_fault::taken_over),
                                  std::move(where)};
        }
        begun_ = arrival;
        owner_ = {};
    }
    void own(worker_owner owner) {
        const std::lock_guard lock{mutex_};
        owner_ = owner;
    }

private:
    mutable std::mutex mutex_;
    worker_owner owner_;
    std::uint64_t arrived_ = 0;
    std::uint64_t begun_ = 0;
};

/// A trainer may take any worker, but does so once: what it lost it gets back only while no other
/// trainer has come, or two of them would take it from each other for ever.
/// @throws session_refused stale: another trainer has come.
inline void check_native_owner(const wire::native_init& message, const worker_owner& owner,
                               error_context where) {
    using kind = worker_owner::kind_type;
    const bool ours = owner.kind == kind::native && owner.trainer == message.trainer;
    if (!message.take_over && !ours && owner.kind != kind::nobody) {
        throw session_refused{session_fault::stale,
                              "another trainer has taken this worker since; make a new engine to "
                              "take it back",
                              std::move(where)};
    }
}

/// `rank_offset` and `world_size` where the backend's `init_info` has them (`nccl`), else a group
/// of the sender and this worker's ranks. The rest of `init_info` is not looked at: only the
/// backend knows its fields, and refuses what it does not.
/// @throws mismatch_error they do not fit this worker. @throws protocol_error no integers.
[[nodiscard]] inline std::pair<int, int> vllm_group(const std::string& init_info, std::size_t ranks,
                                                    const error_context& where) {
    constexpr std::int64_t most = 1 << 20;
    const wire::json_document document{init_info, "init_info", phase::init};
    const auto offset = document.root().find("rank_offset");
    const auto size = document.root().find("world_size");
    const auto first = offset && !offset->is_null() ? offset->integer(0, most) : 1;
    const auto alone = first + static_cast<std::int64_t>(ranks);
    const auto count = size && !size->is_null() ? size->integer(0, most) : alone;
    require_world(first, count, ranks, where);
    return {static_cast<int>(first), static_cast<int>(count)};
}

/// vLLM's trainer names parameters only as it sends them, so the sinks must know them, and alike:
/// its one list of names is for every rank.
/// @throws unsupported_error they do not.
template <class Tag, class Sink>
void require_common_parameters(const worker_ranks<Tag, Sink>& ranks) {
    const error_context where{.phase = phase::init,
                              .backend = std::string{backend_traits<Tag>::wire_name}};
    if constexpr (HasParameters<Sink>) {
        const manifest& first = ranks.sink(0).parameters();
        for (std::size_t i = 1; i < ranks.size(); ++i) {
            const manifest& other = ranks.sink(i).parameters();
            if (!std::ranges::equal(other.parameters(), first.parameters())) {
                throw unsupported_error{
                    "the ranks of this worker hold different parameters, which only a native "
                    "trainer can serve",
                    where};
            }
        }
    } else {
        throw unsupported_error{
            "this worker's sink does not say what it holds, which vLLM's form needs; add a member "
            "parameters()",
            where};
    }
}

}  // namespace detail

}  // namespace weightwire
