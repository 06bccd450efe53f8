#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string_view>
#include <type_traits>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// `WeightSink`: where a worker rank's weights land, and when inference sees them.
///
/// A session is `begin`, writes to the destinations, `group_complete` as groups fill, `prepare`,
/// `exchange` where the sink has it, then `commit` or `rollback`. Semantics:
/// - Nothing is visible to inference before `commit`, everything after it (`in_place` sinks
/// excepted: they report
///   `dirty()` from the first write until a full commit).
/// - `begin` returns one destination a manifest parameter, valid until `commit` or `rollback`; no
/// two overlap. It
///   throws `coverage_error` for a missing, unknown or wrong-shaped parameter, naming it, and may
///   wait for readers up to the deadline. A second `begin` without an end is a `session_error`.
/// - `prepare` does everything that can fail or block; after it `commit` only swaps or copies.
/// - A sink whose commit would copy should do it in `exchange` (`HasExchange`), which can be given
/// up: a worker that is stopped in a copy that it cannot undo commits when it is resumed, however
/// long ago its trainer went on without it.
/// - `commit` and `rollback` do not throw. `rollback` is legal at any time and idempotent.
/// - A wait for readers inside `begin` or `prepare` should end when the call that it serves is
/// asked to stop: `HasStoppableBegin`, `HasStoppablePrepare`. Without them a new trainer waits with
/// it.
/// - `group_complete` may be called more than once for a group.
/// - Calls come from one thread at a time; readers run beside them.
///
/// Model: `parameter_table`. Non-model: a sink that writes into live weights and calls that a
/// commit.

namespace weightwire {

/// A weight version: assigned by the trainer, growing. 0: as loaded, never updated (`default` on
/// the wire).
using weight_version = std::uint64_t;

/// How a sink makes an update visible.
enum class commit_mode : std::uint8_t {
    flip,      ///< staged beside the live tensors, then table entries are swapped
    copy_in,   ///< staged, then copied once into fixed addresses
    in_place,  ///< written straight into the live tensors; `dirty` until whole
};

/// The word that reports and messages use for `value`.
[[nodiscard]] constexpr std::string_view to_string(commit_mode value) noexcept {
    switch (value) {
        case commit_mode::flip: return "flip";
        case commit_mode::copy_in: return "copy_in";
        case commit_mode::in_place: return "in_place";
    }
    return "unknown";
}

/// What a sink learns of the session it takes part in.
struct session_info {
    std::uint64_t epoch = 0;     ///< counts inits of this worker; a takeover begins a new one
    std::uint64_t session = 0;   ///< counts starts of this worker, never reused
    weight_version version = 0;  ///< what a commit will make visible
    bool partial = false;        ///< declared at start: not every parameter will come
};

/// Where one manifest parameter goes.
struct destination {
    enum class kind_type : std::uint8_t {
        place,   ///< write all its bytes to `where`
        frozen,  ///< the sink keeps what it has; the bytes are not wanted
        alias,   ///< shares the storage of manifest parameter `alias_of`, which is written instead
    };
    kind_type kind = kind_type::place;
    /// Shape as in the manifest, any strides. The manifest's dtype, or one that it converts to
    /// (`can_convert`): a backend that does not convert is then refused, naming both.
    mutable_tensor_view where{};
    std::size_t alias_of = 0;  ///< manifest position of the owner
};

/// `begin(session, manifest, deadline)`: a destination for every manifest parameter.
template <class S>
concept HasBegin =
    requires(S& sink, const session_info& session, const manifest& parameters, deadline until) {
        {
            sink.begin(session, parameters, until)
        } -> std::convertible_to<std::span<const destination>>;
    };
/// `group_complete(group)`: every parameter of a group has all its bytes (install hook).
template <class S>
concept HasGroupComplete = requires(S& sink, std::size_t group) { sink.group_complete(group); };
/// `prepare(deadline)`: everything that can fail.
template <class S>
concept HasPrepare = requires(S& sink, deadline until) { sink.prepare(until); };
/// `commit(version) noexcept`.
template <class S>
concept HasCommit = requires(S& sink, weight_version version) {
    { sink.commit(version) } noexcept;
};
/// `rollback() noexcept`.
template <class S>
concept HasRollback = requires(S& sink) {
    { sink.rollback() } noexcept;
};
/// `version()` last committed whole, and whether the live weights are a mix.
template <class S>
concept HasVersionAndDirty = requires(const S& sink) {
    { sink.version() } -> std::convertible_to<weight_version>;
    { sink.dirty() } -> std::convertible_to<bool>;
};

/// Where weights land.
template <class S>
concept WeightSink =
    HasBegin<std::remove_reference_t<S>> && HasGroupComplete<std::remove_reference_t<S>> &&
    HasPrepare<std::remove_reference_t<S>> && HasCommit<std::remove_reference_t<S>> &&
    HasRollback<std::remove_reference_t<S>> && HasVersionAndDirty<std::remove_reference_t<S>>;

/// Optional: destinations exist only around their writes (a bounded bounce buffer):
/// `open_destination(i)` before the first byte of parameter `i`, `placed(i)` after the last.
/// Parameters are opened in manifest order.
template <class S>
concept HasBouncedDestinations = requires(S& sink, std::size_t parameter, deadline until) {
    { sink.open_destination(parameter, until) } -> std::same_as<mutable_tensor_view>;
    sink.placed(parameter, until);
};

/// Optional: `begin(session, manifest, deadline, stop)`. Called instead of the form without `stop`;
/// throws `cancelled_error` when the stop is requested while it waits. A sink that waits for
/// readers has it, so that a new trainer need not wait for them too.
template <class S>
concept HasStoppableBegin =
    requires(S& sink, const session_info& session, const manifest& parameters, deadline until,
             const std::stop_token& stop) {
        {
            sink.begin(session, parameters, until, stop)
        } -> std::convertible_to<std::span<const destination>>;
    };
/// Optional: `prepare(deadline, stop)`, as `HasStoppableBegin`.
template <class S>
concept HasStoppablePrepare =
    requires(S& sink, deadline until, const std::stop_token& stop) { sink.prepare(until, stop); };

/// Optional: `exchange(deadline, stop)`, called once between a `prepare` that returned and `commit`
/// or `rollback`: brings the prepared bytes to where readers will find them, readers still kept
/// out, so that `commit` has only pointers and numbers left to write. It asks the deadline and the
/// stop between pieces and after the last one; what it throws then (`timeout_error`,
/// `cancelled_error`) it throws with every byte back in its place and the session still prepared.
/// After it has returned `rollback` puts the bytes back. `commit` without it makes the same
/// visible.
///
/// A worker calls it on all ranks, looks at the clock and at its trainer once more, and only then
/// commits on all of them: so none has committed when one of them is late.
template <class S>
concept HasExchange =
    requires(S& sink, deadline until, const std::stop_token& stop) { sink.exchange(until, stop); };

/// Optional: `commit_estimate()`, how long a commit of the prepared session will take from now on,
/// `exchange` included, as an honest guess. A worker does not begin a commit that would end after
/// its trainer gave up. A sink whose commit only swaps has no need of it.
template <class S>
concept HasCommitEstimate = requires(const S& sink) {
    { sink.commit_estimate() } -> std::convertible_to<std::chrono::nanoseconds>;
};

/// Optional: `converts_dtypes()`, whether destinations may have another dtype than the manifest's
/// parameter. Where it is true a worker lets such a trainer in at its init already, though
/// `parameters()` has other dtypes.
template <class S>
concept HasDtypeConversion = requires(const std::remove_reference_t<S>& sink) {
    { sink.converts_dtypes() } -> std::convertible_to<bool>;
};

/// Optional: how commits work, for reports.
template <class S>
concept HasCommitMode = requires(const S& sink) {
    { sink.mode() } -> std::convertible_to<commit_mode>;
};

/// Optional: `acquire()` gives a counted snapshot of committed weights that names its version; what
/// `/weight_checker` and inference read through. A snapshot has `version()`, `size()`, `name(i)`
/// and `tensor(i)`.
template <class S>
concept HasSnapshots = requires(std::remove_reference_t<S>& sink, std::size_t i) {
    { sink.acquire().version() } -> std::convertible_to<weight_version>;
    { sink.acquire().size() } -> std::convertible_to<std::size_t>;
    { sink.acquire().name(i) } -> std::convertible_to<std::string_view>;
    { sink.acquire().tensor(i) } -> std::convertible_to<tensor_view>;
};

/// Optional: `device()`, where the sink's tensors are. A worker engine gives it to the receiver of
/// that rank.
template <class S>
concept HasDevice = requires(const std::remove_reference_t<S>& sink) {
    { sink.device() } -> std::convertible_to<weightwire::device>;
};

/// Optional: `tensor_digests(tensors, results, deadline, stop)` writes the digest (core/digest.hpp)
/// of each of `tensors`, destinations of the open session or a snapshot's, to the same place of
/// `results`; throws `timeout_error` or `cancelled_error` when late. For tensors that the processor
/// cannot read: without it a worker digests host memory only. Thread-safe.
template <class S>
concept HasTensorDigests =
    requires(std::remove_reference_t<S>& sink, std::span<const tensor_view> tensors,
             std::span<std::uint64_t> results, deadline until,
             const std::stop_token& stop) { sink.tensor_digests(tensors, results, until, stop); };

/// Optional: `clear_tensor(tensor)` fills a destination of the open session with zeros, which
/// `/weight_checker` asks for. Without it a worker clears host memory only.
template <class S>
concept HasTensorClear = requires(std::remove_reference_t<S>& sink,
                                  const mutable_tensor_view& tensor) { sink.clear_tensor(tensor); };

/// One readable line for every member that `S` lacks.
template <class S>
consteval bool explain_weight_sink() {
    static_assert(
        HasBegin<S>,
        "WeightSink: add begin(const session_info&, const manifest&, deadline) returning a "
        "span of destination, one a manifest parameter");
    static_assert(HasGroupComplete<S>, "WeightSink: add group_complete(std::size_t group)");
    static_assert(HasPrepare<S>,
                  "WeightSink: add prepare(deadline), which does everything that can fail");
    static_assert(HasCommit<S>, "WeightSink: add commit(weight_version) noexcept");
    static_assert(HasRollback<S>, "WeightSink: add rollback() noexcept");
    static_assert(HasVersionAndDirty<S>, "WeightSink: add const members version() and dirty()");
    return WeightSink<S>;
}

namespace archetypes {

/// The least that models `WeightSink`.
struct weight_sink {
    std::span<const destination> begin(const session_info&, const manifest&, deadline) {
        return {};
    }
    void group_complete(std::size_t) {}
    void prepare(deadline) {}
    void commit(weight_version) noexcept {}
    void rollback() noexcept {}
    weight_version version() const { return 0; }
    bool dirty() const { return false; }
};

}  // namespace archetypes

static_assert(WeightSink<archetypes::weight_sink>);

}  // namespace weightwire
