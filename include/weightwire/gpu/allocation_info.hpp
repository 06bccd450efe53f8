#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <string>

/// @file
/// What is known of an allocation, and whether another process can open it. Needs no CUDA.

namespace weightwire::gpu {

/// Where an allocation is, as the driver tells.
enum class allocation_place : std::uint8_t {
    unknown,  ///< CUDA does not know the address: pageable host memory, or nothing at all
    host,     ///< host memory that CUDA has pinned
    device,   ///< memory of one device
    managed,  ///< memory that moves between host and devices
};

/// The allocation that holds an address.
struct allocation_info {
    allocation_place place = allocation_place::unknown;
    int device = -1;                 ///< ordinal in this process
    std::uint64_t base = 0;          ///< its first address
    std::uint64_t bytes = 0;         ///< its size; of virtual memory the whole reserved range
    std::uint64_t buffer_id = 0;     ///< never used again in this process, unlike addresses
    std::uint64_t handle_types = 0;  ///< bits of `CUmemAllocationHandleType` it can be exported as
    bool is_of_pool = false;         ///< from `cudaMallocAsync`
    bool has_ipc_handle = false;     ///< from `cudaMalloc`: `cudaIpcGetMemHandle` takes it
};

/// Why no process can open `[address, address + bytes)` by one handle of CUDA IPC, in words for a
/// report; empty where one can.
[[nodiscard]] inline std::string why_not_exportable(const allocation_info& found,
                                                    std::uint64_t address, std::uint64_t bytes) {
    switch (found.place) {
        case allocation_place::unknown:
            return "it is not memory of a device; CUDA IPC shares memory from cudaMalloc";
        case allocation_place::host:
            return "it is pinned host memory; CUDA IPC shares memory from cudaMalloc";
        case allocation_place::managed:
            return "it is managed memory (cudaMallocManaged), which has no handle; allocate it "
                   "with cudaMalloc";
        case allocation_place::device: break;
    }
    if (found.is_of_pool) {
        return "it is memory of a pool (cudaMallocAsync), which has no handle of its own; allocate "
               "it with cudaMalloc, in PyTorch without backend:cudaMallocAsync in "
               "PYTORCH_CUDA_ALLOC_CONF";
    }
    if (!found.has_ipc_handle) {
        return "it is virtual memory (cuMemMap), which has no handle of CUDA IPC; allocate it with "
               "cudaMalloc, in PyTorch without expandable_segments:True in "
               "PYTORCH_CUDA_ALLOC_CONF";
    }
    const std::uint64_t offset = address - found.base;
    if (address < found.base || offset > found.bytes || bytes > found.bytes - offset) {
        return "it reaches beyond its allocation: " + std::to_string(bytes) + " bytes at offset " +
               std::to_string(offset) + " of " + std::to_string(found.bytes);
    }
    return {};
}

}  // namespace weightwire::gpu
