#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/lost_devices.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/nccl_api/abort.hpp>
#include <weightwire/nccl_api/element.hpp>
#include <weightwire/nccl_api/error.hpp>
#include <weightwire/nccl_api/library.hpp>
#include <weightwire/nccl_api/nccl.hpp>

/// @file
/// A communicator of NCCL in which nothing waits without a deadline.
///
/// NCCL alone does not tell reliably that a peer is gone. What it reported of one that was killed,
/// stopped, idle or aborting (benchmarks/results/nccl_abort.txt, NCCL 2.28.9, watched for 1.5 to
/// 2 s):
///
/// - while joining, and in the first collective: nothing, whatever had happened to the peer;
/// - in a broadcast through sockets: a killed peer at once, an aborting one after half a second
///   (code 6, remote error), a stopped or idle one not at all;
/// - in a broadcast between two GPUs of one host: nothing, also of a killed peer.
///
/// So the deadline is what ends a wait, and whoever learns of a lost peer in another way (a control
/// call that failed) asks for the stop.

namespace weightwire::nccl_api {

static_assert(static_cast<int>(element::int8) == ncclInt8);
static_assert(static_cast<int>(element::uint8) == ncclUint8);
static_assert(static_cast<int>(element::int64) == ncclInt64);
static_assert(static_cast<int>(element::float16) == ncclFloat16);
static_assert(static_cast<int>(element::float64) == ncclFloat64);
static_assert(static_cast<int>(element::bfloat16) == ncclBfloat16);

/// One rank of a group of at least two, on one device.
///
/// NCCL is used in its non-blocking form: each call returns at once, and what is still in progress
/// is asked for until the deadline or the stop. A failure of any kind, also a deadline that passed
/// or a stop, aborts the communicator before it is thrown: a collective that the others did not
/// join cannot be taken back otherwise, and until the abort its kernel holds the device and the
/// caller's memory. A fresh `join` with a new unique id then works in the same process.
///
/// Movable, not copyable. One thread at a time.
class communicator {
public:
    using unique_id = std::array<std::byte, NCCL_UNIQUE_ID_BYTES>;

    /// A fresh name for a group, to be handed to all its ranks. The process that makes it also
    /// serves the meeting of the ranks, on a thread of NCCL and on the interface that
    /// NCCL_SOCKET_IFNAME chooses: it must outlive the join.
    /// @throws resource_error NCCL finds no network interface.
    [[nodiscard]] static unique_id make_unique_id(const library& used) {
        ncclUniqueId native{};
        const std::size_t before = detail::digest_of_words(used);
        check(used, used.calls().get_unique_id(&native), "ncclGetUniqueId", before,
              {.phase = phase::init, .backend = "nccl"});
        unique_id id{};
        std::memcpy(id.data(), native.internal, id.size());
        return id;
    }

    /// Becomes rank `rank` of `world_size`. Blocks until all ranks have joined.
    ///
    /// @param used the copy of NCCL; the same version on every rank.
    /// @param id from `make_unique_id` of one of them. Never used twice.
    /// @param device the CUDA device of this rank.
    /// @throws usage_error a group of one, a rank outside it, or a GPU that two ranks claim.
    /// @throws timeout_error not all ranks came in time; the message says who may be missing.
    /// @throws mismatch_error the ranks use different versions of NCCL.
    /// @throws peer_error another rank went away while joining.
    /// @throws cancelled_error, resource_error
    [[nodiscard]] static communicator join(const library& used, const unique_id& id, int world_size,
                                           int rank, int device, deadline until,
                                           const std::stop_token& stop);

    communicator(communicator&&) noexcept = default;
    communicator& operator=(communicator&& other) noexcept {
        if (this != &other) {
            abort();
            held_ = std::move(other.held_);
            used_ = other.used_;
            world_size_ = other.world_size_;
            rank_ = other.rank_;
            lost_ = other.lost_;
        }
        return *this;
    }
    ~communicator() { abort(); }

    /// The one-element float32 sum all-reduce that every rank of vLLM performs after the join, and
    /// waits for. It makes NCCL connect the ranks. Every rank calls it, before anything else.
    void warm_up(deadline until, const std::stop_token& stop);

    /// Puts one broadcast into `on` and returns when it is there: the data has moved when an event
    /// recorded in `on` afterwards is done, see `wait`.
    ///
    /// All ranks perform the same broadcasts in the same order, each on one stream. The memory must
    /// stay until then, or until the abort. At most `most_in_flight` of them are in the stream:
    /// with more, this blocks until earlier ones are done, so nothing they wait for may come later
    /// from the calling thread.
    ///
    /// @param data device memory: read on the root, written elsewhere.
    /// @param count elements; none is no broadcast at all, on every rank.
    /// @param root the rank that sends.
    /// @throws unsupported_error this NCCL has no such type.
    /// @throws peer_error, timeout_error, cancelled_error as `wait`.
    void broadcast(std::byte* data, std::uint64_t count, element type, int root, gpu::stream_ref on,
                   deadline until, const std::stop_token& stop);

    /// Blocks until `point` was reached, and tells whether what came before it succeeded: after a
    /// failed collective an event can be done too.
    /// @throws peer_error another rank is gone.
    /// @throws timeout_error it was not reached in time: another rank is stopped, or never took
    /// part.
    void wait(const gpu::event& point, deadline until, const std::stop_token& stop);

    /// Ends the group here, whatever the other ranks do; it waits for none of them. Blocks up to
    /// `abort_bound`. Nothing to do where it has ended.
    void abort() noexcept;

    /// Whether broadcasts are possible: it was joined, and neither failed nor was aborted.
    [[nodiscard]] bool usable() const noexcept { return held_ != nullptr && held_->native; }
    /// Whether an abort did not return in time. The communicator was then left behind with all it
    /// holds, and memory that was given to it must be left behind too: a kernel may still use it,
    /// and freeing device memory waits for kernels. `lost_devices` remembers the device.
    [[nodiscard]] bool lost() const noexcept { return lost_; }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int world_size() const noexcept { return world_size_; }
    [[nodiscard]] const library& used_library() const noexcept { return used_; }

private:
    /// All that NCCL or its kernels may touch: leaked as a whole when an abort does not return.
    struct resources {
        explicit resources(int on)
            : device{on}, stream{on}, done{on}, marks{gpu::event{on}, gpu::event{on}}, one{on, 4} {}
        int device;
        gpu::stream stream;
        gpu::event done;
        std::array<gpu::event, 2> marks;  ///< each stands behind half of what may be in flight
        unsigned int posted = 0;
        gpu::device_buffer one;
        ncclComm_t native = nullptr;
    };
    /// What one operation needs to wait and to fail.
    struct operation {
        std::string_view name;
        weightwire::phase phase;
        deadline until;
        const std::stop_token& stop;
        std::size_t words_before;  ///< the digest of NCCL's last words before it began
        bool joining = false;      ///< it waits for ranks to come, not for their part
    };

    communicator(library used, int world_size, int rank)
        : used_{used}, world_size_{world_size}, rank_{rank} {}

    [[nodiscard]] operation begin(std::string_view name, phase in, deadline until,
                                  const std::stop_token& stop) const;
    void require_usable(std::string_view name, phase in) const;
    void require_sendable(const std::byte* data, std::uint64_t count, element type, int root,
                          const operation& current) const;
    template <class Work>
    void or_abort(Work work);
    void await_progress(operation& current);
    void await_point(const gpu::event& point, operation& current);
    void bound_queue(gpu::stream_ref on, operation& current);
    void watch_meeting(operation& current) const;
    void check_limits(const operation& current);
    [[nodiscard]] ncclResult_t state(const operation& current);
    [[nodiscard]] error_context context_of(const operation& current) const;
    [[nodiscard]] std::string others() const;
    [[nodiscard]] std::string_view abort_and_tell() noexcept;
    [[noreturn]] void fail(const operation& current, ncclResult_t result);

    library used_;
    std::unique_ptr<resources> held_;
    int world_size_;
    int rank_;
    bool lost_ = false;
};

namespace detail {

/// Between two looks at something that is in progress: first only gives way, because most calls
/// take microseconds, then sleeps, shorter than the 3 ms in which a GPU fills a gigabyte.
class pause {
public:
    void operator()() noexcept {
        if (looks_ < 200) {
            ++looks_;
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
        }
    }

private:
    int looks_ = 0;
};

}  // namespace detail

inline communicator communicator::join(const library& used, const unique_id& id, int world_size,
                                       int rank, int device, deadline until,
                                       const std::stop_token& stop) {
    if (world_size < 2 || rank < 0 || rank >= world_size) {
        throw usage_error{
            "rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
                " cannot be joined: a group has at least two ranks, counted from 0; the trainer is "
                "one, each worker rank another",
            {.phase = phase::init, .backend = "nccl", .operation = "join", .rank = rank}};
    }
    communicator joined{used, world_size, rank};
    const gpu::device_guard guard{device};
    joined.held_ = std::make_unique<resources>(device);
    ncclUniqueId native{};
    std::memcpy(native.internal, id.data(), id.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    auto current = joined.begin("ncclCommInitRankConfig", phase::init, until, stop);
    current.joining = true;
    const ncclResult_t result =
        used.calls().init_rank_config(&joined.held_->native, world_size, native, rank, &config);
    if (result != ncclSuccess && result != ncclInProgress) {
        joined.fail(current, result);
    }
    joined.await_progress(current);
    return joined;
}

inline void communicator::warm_up(deadline until, const std::stop_token& stop) {
    require_usable("ncclAllReduce", phase::init);
    auto current = begin("ncclAllReduce", phase::init, until, stop);
    or_abort([&] {
        const gpu::device_guard guard{held_->device};
        const cudaStream_t on = held_->stream.native_handle();
        gpu::check(cudaMemsetAsync(held_->one.data(), 0, sizeof(float), on), "cudaMemsetAsync",
                   context_of(current));
        const ncclResult_t result = used_.calls().all_reduce(
            held_->one.data(), held_->one.data(), 1, ncclFloat32, ncclSum, held_->native, on);
        if (result != ncclSuccess && result != ncclInProgress) {
            fail(current, result);
        }
        await_progress(current);
        held_->done.record(held_->stream);
        await_point(held_->done, current);
    });
}

inline void communicator::broadcast(std::byte* data, std::uint64_t count, element type, int root,
                                    gpu::stream_ref on, deadline until,
                                    const std::stop_token& stop) {
    require_usable("ncclBroadcast", phase::update);
    auto current = begin("ncclBroadcast", phase::update, until, stop);
    or_abort([&] {
        require_sendable(data, count, type, root, current);
        if (count == 0) {
            return;
        }
        bound_queue(on, current);
        const ncclResult_t result =
            used_.calls().broadcast(data, data, count, static_cast<ncclDataType_t>(type), root,
                                    held_->native, on.native_handle());
        if (result != ncclSuccess && result != ncclInProgress) {
            fail(current, result);
        }
        await_progress(current);
    });
}

inline void communicator::require_sendable(const std::byte* data, std::uint64_t count, element type,
                                           int root, const operation& current) const {
    if (root < 0 || root >= world_size_ || (data == nullptr && count != 0)) {
        throw usage_error{"a broadcast needs a root in the group and memory", context_of(current)};
    }
    const bool small_float = type == element::float8_e4m3fn || type == element::float8_e5m2;
    if (small_float && used_.version() < NCCL_VERSION(2, 24, 0)) {
        throw unsupported_error{std::string{to_string(type)} +
                                    " needs NCCL 2.24 or newer; this is " + used_.description() +
                                    "; send bytes, or use a newer one on all ranks",
                                context_of(current)};
    }
}

inline void communicator::wait(const gpu::event& point, deadline until,
                               const std::stop_token& stop) {
    require_usable("wait", phase::update);
    auto current = begin("wait", phase::update, until, stop);
    or_abort([&] { await_point(point, current); });
}

/// A device that fails, or a call that is refused here, is a failure like any other: the group
/// ends, since the other ranks may wait for what will not come.
template <class Work>
void communicator::or_abort(Work work) {
    try {
        work();
    } catch (...) {
        abort();
        throw;
    }
}

inline void communicator::await_point(const gpu::event& point, operation& current) {
    detail::pause pause;
    for (;;) {
        // In this order: an error that came before the point is seen once the point is done.
        const bool done = point.is_done();
        if (const ncclResult_t result = state(current);
            result != ncclSuccess && result != ncclInProgress) {
            fail(current, result);
        }
        if (done) {
            return;
        }
        check_limits(current);
        pause();
    }
}

/// After each half of what may be in flight a mark; it is set again only once it was reached.
inline void communicator::bound_queue(gpu::stream_ref on, operation& current) {
    constexpr unsigned int half = most_in_flight / 2;
    if (held_->posted > 0 && held_->posted % half == 0) {
        gpu::event& mark = held_->marks[held_->posted / half % 2];
        await_point(mark, current);
        mark.record(on);
    }
    ++held_->posted;
}

inline void communicator::abort() noexcept {
    if (!usable()) {
        return;
    }
    const ncclComm_t native = std::exchange(held_->native, nullptr);
    if (!detail::abort_within(used_, native, held_->device, abort_bound)) {
        lost_ = true;
        gpu::lost_devices::note(held_->device);
        static_cast<void>(held_.release());  // on purpose: see resources
    }
}

inline communicator::operation communicator::begin(std::string_view name, phase in, deadline until,
                                                   const std::stop_token& stop) const {
    return {name, in, until, stop, detail::digest_of_words(used_)};
}

inline void communicator::require_usable(std::string_view name, phase in) const {
    if (!usable()) {
        throw session_error{
            "the communicator has ended; join a new one with a new unique id",
            {.phase = in, .backend = "nccl", .operation = std::string{name}, .rank = rank_}};
    }
}

inline void communicator::await_progress(operation& current) {
    detail::pause pause;
    for (unsigned int looks = 1;; ++looks) {
        const ncclResult_t result = state(current);
        if (result == ncclSuccess) {
            return;
        }
        if (result != ncclInProgress) {
            fail(current, result);
        }
        if (current.joining && looks % 1024 == 0) {
            watch_meeting(current);
        }
        check_limits(current);
        pause();
    }
}

/// The process that made the unique id is told of a rank that came twice and of world sizes that
/// differ, but its own join is not: it would wait until the deadline. It gets some seconds more,
/// because the words can be those of another group of this process; a sound join took at most 2.1.
inline void communicator::watch_meeting(operation& current) const {
    if (detail::tells_of_check_in(detail::words_since(used_, current.words_before))) {
        current.until = current.until.capped(std::chrono::seconds{3});
    }
}

inline void communicator::check_limits(const operation& current) {
    const bool stopped = current.stop.stop_requested();
    if (!stopped && !current.until.expired()) {
        return;
    }
    error_context context = context_of(current);
    if (detail::digest_of_words(used_) != current.words_before) {
        context.native_text = last_words(used_);
    }
    const std::string_view addition = abort_and_tell();
    if (stopped) {
        throw cancelled_error{std::string{"stopped while NCCL was at work"}.append(addition),
                              std::move(context)};
    }
    std::string text = current.joining
                           ? "not all " + std::to_string(world_size_) +
                                 " ranks joined in time: " + others() +
                                 " is missing, stopped or dead, uses another unique id, or the "
                                 "world size is wrong; look at it, then join again"
                           : "the other ranks did not do their part in time: " + others() +
                                 " is stopped, stuck or gone; look at it, then join again";
    throw timeout_error{text.append(addition), std::move(context)};
}

inline ncclResult_t communicator::state(const operation& current) {
    ncclResult_t result = ncclSuccess;
    const ncclResult_t asked = used_.calls().get_async_error(held_->native, &result);
    if (asked != ncclSuccess) {
        fail(current, asked);
    }
    return result;
}

inline error_context communicator::context_of(const operation& current) const {
    return {.phase = current.phase,
            .peer = others(),
            .backend = "nccl",
            .operation = std::string{current.name},
            .rank = rank_};
}

/// NCCL does not tell which rank failed; with two it is clear.
inline std::string communicator::others() const {
    if (world_size_ == 2) {
        return "rank " + std::to_string(1 - rank_);
    }
    if (rank_ == 0 || rank_ == world_size_ - 1) {
        const int first = rank_ == 0 ? 1 : 0;
        return "one of ranks " + std::to_string(first) + " to " +
               std::to_string(first + world_size_ - 2);
    }
    return "one of ranks 0 to " + std::to_string(world_size_ - 1) + " but " + std::to_string(rank_);
}

inline std::string_view communicator::abort_and_tell() noexcept {
    abort();
    return lost_ ? "; ncclCommAbort did not return either: the communicator is lost, and it and "
                   "the memory it was given are left behind"
                 : "";
}

inline void communicator::fail(const operation& current, ncclResult_t result) {
    const std::string words = detail::words_since(used_, current.words_before);
    error_context context = context_of(current);
    const std::string_view addition = abort_and_tell();
    throw_failure(used_, result, current.name, words, std::move(context), addition);
}

}  // namespace weightwire::nccl_api
