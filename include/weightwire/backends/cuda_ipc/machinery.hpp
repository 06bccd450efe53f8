#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <variant>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/process.hpp>
#include <weightwire/gpu/machinery_parts.hpp>

/// @file
/// What reading another process's device memory is made of. Sender and receiver are templates over
/// it, so that the code that drives GPUs is the code that tests drive over shared host memory,
/// where there is no GPU.

namespace weightwire::cuda_ipc {

/// One allocation that other processes can open, whatever number of tensors it holds.
struct exported_allocation {
    std::string handle{};         ///< plain bytes; CUDA's have 64
    std::uint64_t base = 0;       ///< its address in the exporting process
    std::uint64_t bytes = 0;      ///< its size
    std::uint64_t buffer_id = 0;  ///< tells it from an earlier one at the same address
    friend bool operator==(const exported_allocation&, const exported_allocation&) = default;
};

/// The process that exported; its start time is 0 where it is not known, as in vLLM's wire. A
/// process knows its own exports again and resolves them to pointers.
using exporter = shm::process_identity;

/// Bytes to bring from one address to another; both reachable from the machine's device.
struct byte_move {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::uint64_t bytes = 0;
    friend bool operator==(const byte_move&, const byte_move&) = default;
};

/// Elements to bring from one tensor to another of the same extents: of another dtype, or laid out
/// in runs so short that a list of them would be longer than the tensor.
struct conversion {
    mutable_tensor_view to{};
    tensor_view from{};
    friend bool operator==(const conversion& a, const conversion& b) {
        return a.to.data() == b.to.data() && a.from.data() == b.from.data() &&
               a.to.type() == b.to.type() && a.from.type() == b.from.type() &&
               a.to.extents() == b.to.extents() && a.to.strides() == b.to.strides() &&
               a.from.strides() == b.from.strides();
    }
};

/// `M{device}`: one rank's device. `gpu()` is its UUID as torch spells it: lower-case hexadecimal
/// 8-4-4-4-12, without a prefix.
template <class M>
concept HasMachineIdentity = std::constructible_from<M, int> && requires(const M& machine) {
    { machine.device() } -> std::convertible_to<int>;
    { machine.gpu() } -> std::convertible_to<std::string>;
};

/// Memory to export. `export_of` finds the allocation that holds `[address, address + bytes)`, or
/// says in words why no process can open it. It is asked before anything is exported. `is_current`
/// says whether an export is still of the memory that is at its address now.
template <class M>
concept HasMachineExports =
    gpu::HasMachineBuffers<M> && requires(M& machine, const std::byte* address, std::size_t bytes,
                                          const exported_allocation& known) {
        {
            machine.export_of(address, bytes)
        } -> std::same_as<std::variant<exported_allocation, std::string>>;
        { machine.is_current(known) } -> std::same_as<bool>;
        { machine.allocate_exportable(bytes) } -> std::same_as<typename M::buffer>;
    };

/// Another process's memory. Each allocation is opened once in a process and device; mappings of
/// the same share it, and the last one closes it. A mapping of this process's own export is its
/// pointer. The size of what was opened is asked from the machine, not from the message, where it
/// can tell.
/// @throws protocol_error bytes that are no handle. @throws peer_error the exporter is gone, or
/// freed the memory. @throws unsupported_error memory of a device that this one cannot reach.
template <class M>
concept HasMachineImports = requires(
    M& machine, const exporter& from, const exported_allocation& allocation,
    const typename M::foreign_event& foreign, std::span<const std::byte> event) {
    { machine.open(from, allocation) } -> std::same_as<typename M::mapping>;
    requires std::default_initializable<typename M::mapping> && std::movable<typename M::mapping>;
    requires requires(const typename M::mapping& mapping) {
        { mapping.data() } -> std::same_as<const std::byte*>;
        { mapping.size() } -> std::convertible_to<std::uint64_t>;
    };
    // Another process's event (64 bytes), to be asked whether it was reached.
    { machine.open_foreign_event(event) } -> std::same_as<typename M::foreign_event>;
    { foreign.is_done() } -> std::same_as<bool>;
};

/// Copies of many runs, in the order of the stream they are given to. A plan has its tables where
/// the device reads them; `launch(group, stream)` does one group and allocates nothing. `copy` is
/// for single runs, also from and to pinned host memory.
template <class M>
concept HasMachineCopies =
    gpu::HasMachineQueues<M> &&
    requires(M& machine, const typename M::stream& stream, std::size_t number,
             std::span<const std::vector<byte_move>> groups,
             std::span<const std::vector<conversion>> unlike, const typename M::copy_plan& plan,
             const typename M::conversion_plan& converts, std::span<const tensor_view> tensors,
             std::span<std::uint64_t> digests, deadline until, const std::stop_token& stop) {
        { machine.make_copies(groups) } -> std::same_as<typename M::copy_plan>;
        plan.launch(number, stream);
        { plan.table_bytes() } -> std::convertible_to<std::size_t>;
        // Pairs of dtypes are those of `can_convert`; strides are not negative.
        { machine.make_conversions(unlike) } -> std::same_as<typename M::conversion_plan>;
        converts.launch(number, stream);
        { converts.table_bytes() } -> std::convertible_to<std::size_t>;
        // Ready for digests of so many lists of tensors again and again.
        machine.prepare_digests(number);
        // The digest of each tensor's bytes; waits for them.
        machine.digests(tensors, digests, until, stop);
    };

/// Everything of it. A model is used by one thread at a time.
template <class M>
concept Machinery =
    HasMachineIdentity<M> && HasMachineExports<M> && HasMachineImports<M> && HasMachineCopies<M>;

}  // namespace weightwire::cuda_ipc
