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
