#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/gpu/machinery_parts.hpp>
#include <weightwire/nccl_api/element.hpp>
#include <weightwire/wire/unique_id.hpp>

/// @file
/// What a broadcast is made of. Sender and receiver are templates over it, so that the code that
/// drives GPUs is the code that tests drive over host memory and sockets, where there is no GPU.

namespace weightwire::nccl {

/// Bytes of a tensor that lie together, and their place in a packed buffer.
struct byte_run {
    std::byte* address = nullptr;  ///< in near memory; only read by a gather
    std::uint64_t offset = 0;      ///< in the packed buffer
    std::uint64_t bytes = 0;
};

/// What a gather or scatter may take of the device.
enum class copy_pace : std::uint8_t {
    full,              ///< everything: nothing else is under way
    beside_broadcast,  ///< so much that a broadcast under way is not held up
};

/// Memory that broadcasts read and write.
template <class M>
concept HasMachineMemory = gpu::HasMachineBuffers<M> && requires(M& machine, std::size_t bytes) {
    { machine.allocate(bytes) } -> std::same_as<typename M::buffer>;
};

/// Queues of work of which one may wait for another: `make_wait` lets work given to a stream from
/// now on start after the event's last `record`. An urgent stream's work is placed on the device
/// before that of others, which may have filled it.
template <class M>
concept HasMachineStreams =
    gpu::HasMachineQueues<M> &&
    requires(M& machine, typename M::stream& stream, typename M::event& event) {
        { machine.make_urgent_stream() } -> std::same_as<typename M::stream>;
        machine.make_wait(stream, event);
    };

/// Copies of many runs, in the order of the stream they are given to. A gather or scatter plan has
/// its tables where the device reads them; one launch does one chunk.
template <class M>
concept HasMachineCopies =
    requires(M& machine, typename M::stream& stream, std::byte* to, const std::byte* from,
             std::size_t chunk, std::span<const std::vector<byte_run>> chunks,
             const typename M::gather_plan& gather, const typename M::scatter_plan& scatter) {
        { machine.make_gather(chunks) } -> std::same_as<typename M::gather_plan>;
        { machine.make_scatter(chunks) } -> std::same_as<typename M::scatter_plan>;
        gather.launch(chunk, to, stream, copy_pace::full);
        scatter.launch(chunk, from, stream, copy_pace::full);
        { gather.table_bytes() } -> std::convertible_to<std::size_t>;
        { scatter.table_bytes() } -> std::convertible_to<std::size_t>;
    };

/// The group of ranks: nccl_api/communicator.hpp says what each call promises. A failure of any
/// kind aborts the communicator before it is thrown.
template <class M>
concept HasMachineCommunicator = requires(
    M& machine, typename M::communicator& group, const wire::unique_id& id, int number,
    std::byte* data, std::uint64_t count, nccl_api::element type, typename M::stream& stream,
    const typename M::event& event, deadline until, const std::stop_token& stop) {
    { machine.make_unique_id() } -> std::same_as<wire::unique_id>;
    { machine.join(id, number, number, until, stop) } -> std::same_as<typename M::communicator>;
    group.warm_up(until, stop);
    group.broadcast(data, count, type, number, stream, until, stop);
    group.wait(event, until, stop);
    { group.abort() } noexcept;
    { group.usable() } -> std::same_as<bool>;
    { group.lost() } -> std::same_as<bool>;
};

/// `M{device, library}`: one rank's device and its copy of NCCL.
template <class M>
concept HasMachineIdentity =
    std::constructible_from<M, int, const std::string&> && requires(const M& machine) {
        { machine.device() } -> std::convertible_to<int>;
        { machine.nccl_version() } -> std::convertible_to<int>;
        { machine.library_path() } -> std::convertible_to<std::string>;
        { machine.library_description() } -> std::convertible_to<std::string>;
    };

/// Everything of it. A model is used by one thread at a time.
template <class M>
concept Machinery = HasMachineIdentity<M> && HasMachineMemory<M> && HasMachineStreams<M> &&
                    HasMachineCopies<M> && HasMachineCommunicator<M>;

}  // namespace weightwire::nccl
