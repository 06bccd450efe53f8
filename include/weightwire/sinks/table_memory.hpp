#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string_view>
#include <utility>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/copy_rate.hpp>
#include <weightwire/sinks/exchange_pace.hpp>
#include <weightwire/sinks/placed_parameters.hpp>

/// @file
/// `TableMemory`: where the bytes of a `basic_parameter_table` live and how they move. The table
/// owns the session: modes, readers, versions; a memory knows nothing of them.
///
/// Semantics, of all members but the digests from one thread at a time:
/// - `where()` is the device of all tensors of the table, allocated or the user's.
/// - `allocate(bytes, purpose)` gives zeroed memory, aligned to 64 bytes, that has an address even
///   for 0 bytes; throws `resource_error`.
/// - `require_loadable(from)` throws `unsupported_error` where `load` cannot read a tensor.
/// - `load(to, from)` copies a whole tensor, honours `from.ready_stream`
///   if it knows streams, and returns when `from` is no longer needed.
/// - `plan(placed)` makes ready what the exchange of these parameters needs; called whenever a
///   session that stages begins. The last one counts. May throw; nothing has changed then.
/// - `sample(placed) noexcept` measures how fast an exchange will be, touching slot 1 alone, whose
///   content does not matter then; 0 bytes if it cannot tell. Called after `plan`.
/// - `exchange(placed, pace)` swaps slots 0 and 1 while `pace` allows it, and returns whether it
///   has swapped all. What it swapped is exactly what `pace` allowed, unless it throws: then the
///   bytes are lost.
/// - `exchange_back(placed, bytes) noexcept` undoes an exchange that was allowed `bytes`.
/// - `publish(placed) noexcept` brings the bytes of slot 1 to slot 0; what slot 1 then holds does
///   not matter.
/// The last two return false where the bytes are lost, which makes the table dirty.

namespace weightwire {

/// What a table's bytes are kept in. Model: `host_memory`. Non-model: a storage class alone, which
/// does not know how to undo.
template <class M>
concept TableMemory =
    std::movable<M> && requires { typename M::storage; } &&
    requires(M& memory, typename M::storage& storage, std::uint64_t bytes, std::string_view purpose,
             const mutable_tensor_view& to, const named_tensor& from,
             const detail::placed_parameters& placed, detail::exchange_pace& pace) {
        { std::as_const(memory).where() } noexcept -> std::same_as<device>;
        { memory.allocate(bytes, purpose) } -> std::same_as<typename M::storage>;
        { storage.data() } -> std::same_as<std::byte*>;
        memory.require_loadable(from);
        memory.load(to, from);
        memory.plan(placed);
        { memory.sample(placed) } noexcept -> std::same_as<detail::timed_copy>;
        { memory.exchange(placed, pace) } -> std::same_as<bool>;
        { memory.exchange_back(placed, bytes) } noexcept -> std::same_as<bool>;
        { memory.publish(placed) } noexcept -> std::same_as<bool>;
    };

/// Optional, for a memory that the processor cannot read: `digests(tensors, results, deadline,
/// stop)`, as `HasTensorDigests`. Thread-safe.
template <class M>
concept ComputesDigests = requires(
    M& memory, std::span<const tensor_view> tensors, std::span<std::uint64_t> results,
    deadline until, const std::stop_token& stop) { memory.digests(tensors, results, until, stop); };
/// Optional, so too: `clear(tensor)` fills it with zeros and returns when that is done.
template <class M>
concept ClearsTensors =
    requires(M& memory, const mutable_tensor_view& tensor) { memory.clear(tensor); };

}  // namespace weightwire
