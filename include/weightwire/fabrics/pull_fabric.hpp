#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// `PullFabric`: how a worker rank reads a trainer rank's memory, without that rank's hand in each
/// read. What `sharded_pull` is made over.
///
/// An *owner* (one a trainer rank) registers memory once and names it by text; a *reader* (one a
/// worker rank) opens it once and then reads any bytes of it. Texts travel in the init message, so
/// they are UTF-8 without control characters. A reader takes every number that came in one for a
/// lie until it has compared it with what it opened.
///
/// Semantics:
/// - What an owner has exported stays readable until the owner is destroyed or the process ends,
/// whichever is first; its bytes are whatever the owner writes there. Who may read when, the
/// backend agrees on over its control channel; the fabric orders nothing.
/// - A read that has ended is visible to the thread that saw it end, and so are the bytes that the
/// owner wrote before it told that thread of them.
/// - After a read has thrown, or was given up by `cancel`, nothing writes to its destinations any
/// more. Destructors give up what is in flight.
/// - A reader's members are called from one thread at a time, an owner's too; both may be used side
/// by side in one process.
///
/// Models: `shm::fabric`. Non-model: a fabric whose reads complete before their bytes are visible.

namespace weightwire {

/// What a fabric can do; the backend chooses by it.
struct fabric_capabilities {
    bool host_memory = false;      ///< exports and fills host memory
    bool device_memory = false;    ///< exports and fills device memory
    bool across_machines = false;  ///< else owner and reader have to be on one machine
    /// Many short runs cost little more than a long one, so a reader takes them straight from a
    /// tensor that the owner has exported. Without it the owner packs what a reader takes into an
    /// arena, one run after the other, and nothing is read in place.
    bool in_place = false;
};

/// Where exported bytes are to be found: `offset` bytes behind the begin of an allocation of
/// `bytes` bytes. Memory with equal handles is one allocation and is opened once.
struct fabric_export {
    std::string handle{};      ///< text for `reader.open`
    std::uint64_t offset = 0;  ///< of the bytes that were asked about
    std::uint64_t bytes = 0;   ///< of the whole allocation, which `reader.open` is told
    friend bool operator==(const fabric_export&, const fabric_export&) = default;
};

/// Why memory cannot be exported, in words that fit behind "because".
struct fabric_refusal {
    std::string reason{};
};

/// `count` runs of `bytes` bytes each, from `offset` in opened memory to `to`; the second begins
/// `from_step` and `to_step` bytes after the first, and so on.
template <class Memory>
struct remote_run {
    const Memory* from = nullptr;
    std::uint64_t offset = 0;
    std::byte* to = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t count = 1;
    std::uint64_t from_step = 0;
    std::uint64_t to_step = 0;
};

/// `F::name` in the init message, and `F::capabilities`.
template <class F>
concept HasFabricIdentity = requires {
    { F::name } -> std::convertible_to<std::string_view>;
    { F::capabilities } -> std::convertible_to<fabric_capabilities>;
};

/// `F::owner{device}` of the process's CUDA device, which a fabric of host memory ignores.
/// - `address()`: what a reader needs to reach this process; fixed.
/// - `export_memory(address, bytes)`: registers the allocation that holds these bytes, once.
/// - `allocate(bytes)`: an arena that is exported already: `data()`, `size()`, `exported()`.
/// @throws resource_error the system refuses.
template <class F>
concept HasFabricOwner = requires(typename F::owner& owner, const typename F::owner& fixed,
                                  const std::byte* address, std::uint64_t bytes) {
    requires std::constructible_from<typename F::owner, int>;
    { fixed.address() } -> std::convertible_to<std::string>;
    {
        owner.export_memory(address, bytes)
    } -> std::same_as<std::variant<fabric_export, fabric_refusal>>;
    { owner.allocate(bytes) } -> std::same_as<typename F::arena>;
    requires std::default_initializable<typename F::arena> && std::movable<typename F::arena>;
    requires requires(const typename F::arena& arena) {
        { arena.data() } -> std::same_as<std::byte*>;
        { arena.size() } -> std::convertible_to<std::uint64_t>;
        { arena.exported() } -> std::same_as<fabric_export>;
    };
};

/// `F::reader{device}`.
/// - `connect(address, until, stop)`: a `connection` to one owner.
/// @throws protocol_error a text that lies. @throws unsupported_error an owner that this fabric
/// does not reach, such as one on another machine. @throws peer_error it is gone.
/// @throws timeout_error, cancelled_error.
/// - `open(connection, handle, bytes, until, stop)`: its `memory` of `size()` bytes, at least as
/// many as asked for. Outlived by the connection. Throws the same.
template <class F>
concept HasFabricReader =
    requires(typename F::reader& reader, std::string_view text, std::uint64_t bytes,
             typename F::connection& connection, deadline until, const std::stop_token& stop) {
        requires std::constructible_from<typename F::reader, int>;
        { reader.connect(text, until, stop) } -> std::same_as<typename F::connection>;
        { reader.open(connection, text, bytes, until, stop) } -> std::same_as<typename F::memory>;
        requires std::movable<typename F::connection>;
        requires std::movable<typename F::memory>;
        requires requires(const typename F::memory& memory) {
            { memory.size() } -> std::convertible_to<std::uint64_t>;
        };
    };

/// Reads.
/// - `prepare(runs)`: a `read` with its tables made, to be started again and again. Checked by the
/// caller: every run lies inside its memory, and destinations do not overlap. Memories and
/// destinations outlive it. Where runs follow one another in memory, as in a packed chunk, a fabric
/// may bring them in one transfer and lay them out afterwards.
/// - `start(read, shift)`: begins it with `shift` added to every offset; allocates nothing. The
/// caller has checked that the runs lie inside their memory so shifted too. Several reads may be
/// under way, each once.
/// - `done(read)`: whether all bytes are in place; may do a piece of the work (at most some MiB)
/// and does not wait. `wait(read, until, stop)` until it is so.
/// @throws peer_error the owner is gone, where the fabric can tell.
/// @throws timeout_error, cancelled_error from `wait`.
/// - `cancel(read) noexcept`: after it nothing writes to its destinations.
template <class F>
concept HasFabricReads = requires(
    typename F::reader& reader, std::span<const remote_run<typename F::memory>> runs,
    typename F::read& read, std::uint64_t shift, deadline until, const std::stop_token& stop) {
    { reader.prepare(runs) } -> std::same_as<typename F::read>;
    reader.start(read, shift);
    { reader.done(read) } -> std::same_as<bool>;
    reader.wait(read, until, stop);
    { reader.cancel(read) } noexcept;
    requires std::default_initializable<typename F::read> && std::movable<typename F::read>;
};

/// How a worker rank reads a trainer rank's memory.
template <class F>
concept PullFabric =
    HasFabricIdentity<F> && HasFabricOwner<F> && HasFabricReader<F> && HasFabricReads<F>;

/// Optional: `owner.serve(active) noexcept`, for a fabric that needs the owner's processor to make
/// reads progress: true when a round begins, false when it has ended. Between rounds an owner still
/// answers readers that connect and open, if slowly.
template <class Owner>
concept HasFabricService = requires(Owner& owner, bool active) {
    { owner.serve(active) } noexcept;
};

/// Optional: `owner.await_ready(stream, until, stop)`, for a fabric of memory that a source fills
/// on a stream (`named_tensor::ready_stream`, not null): returns when all that was given to the
/// stream before the call is done. Without it a tensor with a stream is refused.
/// @throws timeout_error, cancelled_error, and what the device says.
template <class Owner>
concept HasFabricReadiness =
    requires(Owner& owner, void* stream, deadline until, const std::stop_token& stop) {
        owner.await_ready(stream, until, stop);
    };

/// Optional: `owner.is_current(exported)`: whether what was exported is still the memory at its
/// address, for a fabric whose readers keep what its owner has freed. Asked for each in every
/// round; allocates nothing.
template <class Owner>
concept HasFabricCurrency = requires(const Owner& owner, const fabric_export& exported) {
    { owner.is_current(exported) } -> std::same_as<bool>;
};

/// Optional: `reader.come_to_rest() noexcept`: returns when nothing that was given up works on the
/// device any more, or `lost()` is true; within a bound of its own. Without that, freeing what a
/// read has on the device may wait for as long as the device does.
template <class Reader>
concept HasFabricRest = requires(Reader& reader) {
    { reader.come_to_rest() } noexcept;
};

/// Optional: `reader.lost() noexcept`: a read could not be ended, and may still write to its
/// destinations at any later time.
template <class Reader>
concept HasFabricLoss = requires(const Reader& reader) {
    { reader.lost() } noexcept -> std::same_as<bool>;
};

/// Optional: `owner.pack(to, from, bytes, count, from_step)`, for a fabric whose arenas the
/// processor does not write: begins to copy `count` lines of `bytes` bytes, one every `from_step`
/// bytes, to `to`, one after the other; both sides are what the fabric's devices reach, else it
/// throws. `owner.settle(until, stop)` returns when all copies that were begun are done. Without
/// them what is staged is host memory, and is copied by the processor.
/// @throws timeout_error, cancelled_error from `settle`, and what the device says.
template <class Owner>
concept HasFabricPacking = requires(
    Owner& owner, std::byte* to, const std::byte* from, std::uint64_t bytes, std::uint64_t count,
    std::uint64_t from_step, deadline until, const std::stop_token& stop) {
    owner.pack(to, from, bytes, count, from_step);
    owner.settle(until, stop);
};

/// Optional: a type `F::within_node`, for a fabric that crosses machines and reads packed chunks: a
/// pull fabric of its own by which ranks of one machine read each other's memory. It fills whatever
/// `F` fills, and `F` fills its arenas. What all ranks of a machine need then enters it once.
/// Semantics beyond `PullFabric`'s:
/// - An owner's process reads its own arena as any other process does.
/// - Memory that a reader has opened stays readable, with its bytes, when its owner was destroyed
/// or its process has died; no read of it fails for that.
///
/// Models: `shm::fabric`, for `ucx::fabric`; `cuda_ipc::fabric`, for `ucx::device_fabric`: CUDA
/// keeps memory for those who have it open. Non-model: a mapping that goes with its owner's
/// process.
template <class F>
concept HasWithinNode =
    requires { typename F::within_node; } && PullFabric<typename F::within_node> &&
    (F::within_node::capabilities.host_memory || !F::capabilities.host_memory) &&
    (F::within_node::capabilities.device_memory || !F::capabilities.device_memory) &&
    F::capabilities.across_machines && !F::capabilities.in_place;

namespace detail {

/// A fabric's `within_node` is what it is made of names, where that names one.
template <class Machinery>
struct within_node_of {};
template <class Machinery>
    requires requires { typename Machinery::within_node; }
struct within_node_of<Machinery> {
    using within_node = typename Machinery::within_node;
};

}  // namespace detail

/// Optional: `owner.remark()` and `reader.remark()`: one line on what the fabric chose by what it
/// found, and why; the backend's `description()` ends with it. Known once the owner is made, and of
/// a reader once it is connected.
template <class Half>
concept HasFabricRemark = requires(const Half& half) {
    { half.remark() } -> std::convertible_to<std::string>;
};

/// One readable line for every member that `F` lacks; call it under your fabric's definition.
template <class F>
consteval bool explain_pull_fabric() {
    static_assert(HasFabricIdentity<F>,
                  "PullFabric: add static constexpr members name (std::string_view) and "
                  "capabilities (fabric_capabilities)");
    static_assert(HasFabricOwner<F>,
                  "PullFabric: add types owner and arena; owner(int device) needs address() const, "
                  "export_memory(const std::byte*, std::uint64_t) returning "
                  "std::variant<fabric_export, fabric_refusal>, and allocate(std::uint64_t) "
                  "returning arena, which has data(), size() and exported()");
    static_assert(HasFabricReader<F>,
                  "PullFabric: add types reader, connection and memory; reader(int device) needs "
                  "connect(std::string_view, deadline, stop_token) and open(connection&, "
                  "std::string_view handle, std::uint64_t bytes, deadline, stop_token)");
    static_assert(HasFabricReads<F>,
                  "PullFabric: add a type read; reader needs prepare(span of remote_run<memory>), "
                  "start(read&, std::uint64_t shift), done(read&), wait(read&, deadline, "
                  "stop_token) and cancel(read&) noexcept");
    return PullFabric<F>;
}

namespace archetypes {

/// The least that models `PullFabric`.
struct pull_fabric {
    static constexpr std::string_view name = "archetype";
    static constexpr fabric_capabilities capabilities{};
    struct arena {
        std::byte* data() const { return nullptr; }
        std::uint64_t size() const { return 0; }
        fabric_export exported() const { return {}; }
    };
    struct owner {
        explicit owner(int) {}
        std::string address() const { return {}; }
        std::variant<fabric_export, fabric_refusal> export_memory(const std::byte*, std::uint64_t) {
            return fabric_refusal{};
        }
        arena allocate(std::uint64_t) { return {}; }
    };
    struct connection {};
    struct memory {
        std::uint64_t size() const { return 0; }
    };
    struct read {};
    struct reader {
        explicit reader(int) {}
        connection connect(std::string_view, deadline, const std::stop_token&) { return {}; }
        memory open(connection&, std::string_view, std::uint64_t, deadline,
                    const std::stop_token&) {
            return {};
        }
        read prepare(std::span<const remote_run<memory>>) { return {}; }
        void start(read&, std::uint64_t) {}
        bool done(read&) { return true; }
        void wait(read&, deadline, const std::stop_token&) {}
        void cancel(read&) noexcept {}
    };
};

}  // namespace archetypes

static_assert(PullFabric<archetypes::pull_fabric>);

}  // namespace weightwire
