#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/engine/session.hpp>
#include <weightwire/engine/worker_ranks.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/native.hpp>

/// @file
/// What a worker checks at init before anything changes.

namespace weightwire {

/// `parameters()`: the sink knows its own list. Needed where the trainer does not say at init what
/// it will send: vLLM's.
template <class S>
concept HasParameters = requires(const std::remove_reference_t<S>& sink) {
    { sink.parameters() } -> std::convertible_to<const manifest&>;
};

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

/// What both sides must agree on, computed here and not believed.
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

/// The part that an update call names is a run of the manifest's `size` parameters.
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

/// A trainer may take any worker, but does so once: what it lost it gets back only while no other
/// trainer has come, or two of them would take it from each other for ever.
/// @param last the last native init, null when there was none or a vLLM trainer came after it.
/// @throws session_refused stale: another trainer has come.
inline void check_native_owner(const wire::native_init& message, const wire::native_init* last,
                               bool vllm_trainer, error_context where) {
    const bool ours = last != nullptr && last->trainer == message.trainer;
    const bool free = last == nullptr && !vllm_trainer;
    if (!message.take_over && !ours && !free) {
        throw session_refused{session_fault::stale,
                              "another trainer has taken this worker since; make a new engine to "
                              "take it back",
                              std::move(where)};
    }
}

/// `rank_offset` and `world_size` where the backend's `init_info` has them (`nccl`), else a group
/// of the sender and this worker's ranks.
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

/// vLLM's trainer names parameters only as it sends them, so the sinks must know them, and alike.
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
