#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>

#include <weightwire/core/tensor.hpp>

/// @file
/// What the machineries of backends have in common. Needs no header of CUDA: tests have models over
/// host memory.

namespace weightwire::gpu {

/// Memory that the device works on, and memory that the host and the device both reach. How the
/// former is allocated is the machinery's own.
template <class M>
concept HasMachineBuffers = requires(M& machine, std::size_t bytes) {
    { M::near_memory } -> std::convertible_to<memory_kind>;
    { machine.allocate_pinned(bytes) } -> std::same_as<typename M::pinned_buffer>;
    requires std::default_initializable<typename M::buffer> && std::movable<typename M::buffer>;
    requires std::default_initializable<typename M::pinned_buffer> &&
                 std::movable<typename M::pinned_buffer>;
    requires requires(const typename M::buffer& near, const typename M::pinned_buffer& pinned) {
        { near.data() } -> std::same_as<std::byte*>;
        { near.size() } -> std::convertible_to<std::size_t>;
        { pinned.data() } -> std::same_as<std::byte*>;
    };
};

/// Queues of work, points in them, and copies in their order. Nothing here waits.
///
/// An event that was never recorded has been reached. `record_after` and `make_source_wait` are for
/// a stream of the user's (`named_tensor::ready_stream`): the one marks a point in it, the other
/// lets work given to it from now on start after the event's last `record`. `is_idle` needs no
/// machine: it is asked when that is gone.
template <class M>
concept HasMachineQueues =
    requires(M& machine, typename M::stream& stream, typename M::event& event, void* users,
             std::byte* to, const std::byte* from, std::size_t bytes) {
        { machine.make_stream() } -> std::same_as<typename M::stream>;
        { machine.make_event() } -> std::same_as<typename M::event>;
        machine.record(event, stream);
        machine.record_after(event, users);
        machine.make_source_wait(users, event);
        { machine.is_done(event) } -> std::same_as<bool>;
        { M::is_idle(stream) } -> std::same_as<bool>;
        machine.load_kernels();
        machine.copy(to, from, bytes, stream);
    };

}  // namespace weightwire::gpu
