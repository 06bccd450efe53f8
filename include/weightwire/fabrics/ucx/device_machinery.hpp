#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ucp/api/ucp.h>

#include <weightwire/fabrics/ucx/worker.hpp>

/// @file
/// What a UCX fabric of device memory is made of. Owner and reader are templates over it, so that
/// the code that drives GPUs is the code that tests drive over host memory, where there is no GPU.

namespace weightwire::ucx {

/// Bytes of a landed piece, `from` behind its begin, that belong to `to` on the device.
struct scatter_move {
    std::uint64_t from = 0;
    std::byte* to = nullptr;
    std::uint64_t bytes = 0;
};

/// `M{device}`: one rank's device, and its memory. *Near* memory is the device's; *pinned* memory
/// is the host's, which the device reads and writes by itself.
/// - `is_host(address)`: whether the processor reads it.
/// - `ucx_knows(context)`: whether this build of UCX says that it reads and writes near memory.
/// - `use_on_this_thread()`: the device is current on the calling thread from now on.
/// - `enter() noexcept`: the same until the end of the scope that it returns.
template <class M>
concept HasDeviceMemory =
    std::constructible_from<M, int> &&
    requires(const M& machine, const std::byte* address, std::uint64_t bytes, const context& in) {
        { M::near_type } -> std::convertible_to<ucs_memory_type_t>;
        { machine.device() } -> std::same_as<int>;
        { machine.allocate_near(bytes) } -> std::same_as<typename M::near_buffer>;
        { machine.allocate_pinned(bytes) } -> std::same_as<typename M::pinned_buffer>;
        requires requires(const typename M::near_buffer& near,
                          const typename M::pinned_buffer& pinned) {
            { near.data() } -> std::same_as<std::byte*>;
            { near.size() } -> std::convertible_to<std::uint64_t>;
            { pinned.data() } -> std::same_as<std::byte*>;
            { pinned.size() } -> std::convertible_to<std::uint64_t>;
        };
        { M::is_host(address) } -> std::same_as<bool>;
        { M::ucx_knows(in) } -> std::same_as<bool>;
        machine.use_on_this_thread();
        { machine.enter() } noexcept -> std::same_as<typename M::scope>;
    };

/// Queues of work, points in them, and copies in their order. Nothing here waits, but for
/// `make_scatter`, and pageable host memory is read before a copy returns. An event that was never
/// recorded has been reached.
/// - `record_after(event, stream)`: behind the work of a stream of the user's
///   (`named_tensor::ready_stream`).
/// - `copy_lines(to, to_step, from, from_step, bytes, count, stream)`: `count` lines of `bytes`
///   bytes, each a step behind the one before; memory of any kind.
/// - `make_scatter(groups)`: tables on the device; `launch(plan, group, from, stream)` moves one
///   group out of near memory at `from`, a multiple of 16, and allocates nothing.
/// - `is_lost(device)`: work on it could not be ended; `note_lost(device)`: such as this.
template <class M>
concept HasDeviceWork =
    requires(M& machine, typename M::event& point, const typename M::event& fixed,
             const typename M::stream& on, void* users, std::byte* to, const std::byte* from,
             std::uint64_t number, std::span<const std::vector<scatter_move>> groups,
             const typename M::scatter_plan& plan, std::size_t group, int device) {
        { machine.make_stream() } -> std::same_as<typename M::stream>;
        { machine.make_event() } -> std::same_as<typename M::event>;
        machine.record(point, on);
        machine.record_after(point, users);
        { machine.is_done(fixed) } -> std::same_as<bool>;
        machine.copy_lines(to, number, from, number, number, number, on);
        { machine.make_scatter(groups) } -> std::same_as<typename M::scatter_plan>;
        machine.launch(plan, group, from, on);
        { M::is_lost(device) } noexcept -> std::same_as<bool>;
        { M::note_lost(device) } noexcept;
    };

/// Everything of it. A model is used by one thread at a time. It may name a `within_node`, the
/// fabric's (`HasWithinNode`).
template <class M>
concept DeviceMachinery = HasDeviceMemory<M> && HasDeviceWork<M>;

namespace detail {

/// Owns memory that a device works on. What a lost device may still read or write is left to the
/// end of the process: freeing it would wait for the device, or give its bytes to somebody else.
template <class M, class T>
class device_owned {
public:
    device_owned() noexcept = default;
    device_owned(int device, T&& value)
        : value_{std::make_unique<T>(std::move(value))}, device_{device} {}
    device_owned(device_owned&& other) noexcept = default;
    device_owned& operator=(device_owned&& other) noexcept {
        std::swap(value_, other.value_);
        std::swap(device_, other.device_);
        return *this;
    }
    ~device_owned() {
        if (value_ != nullptr && M::is_lost(device_)) {
            static_cast<void>(value_.release());
        }
    }
    [[nodiscard]] explicit operator bool() const noexcept { return value_ != nullptr; }
    [[nodiscard]] const T& operator*() const noexcept { return *value_; }

private:
    std::unique_ptr<T> value_;
    int device_ = 0;
};

}  // namespace detail

/// Near or pinned memory, which UCX reads or writes.
template <class M>
class device_staging_buffer {
public:
    device_staging_buffer() noexcept = default;
    device_staging_buffer(int device, typename M::pinned_buffer&& made)
        : data_{made.data()}, size_{made.size()}, pinned_{device, std::move(made)} {}
    device_staging_buffer(int device, typename M::near_buffer&& made)
        : data_{made.data()}, size_{made.size()}, near_{device, std::move(made)} {}
    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

private:
    std::byte* data_ = nullptr;
    std::uint64_t size_ = 0;
    detail::device_owned<M, typename M::pinned_buffer> pinned_{};
    detail::device_owned<M, typename M::near_buffer> near_{};
};

}  // namespace weightwire::ucx
