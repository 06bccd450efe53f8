#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/shape.hpp>

/// @file
/// What vLLM's `ipc` backend is told of memory: for every tensor and GPU the arguments of torch's
/// `rebuild_cuda_tensor` (vLLM wire sections 6.2 and 6.3), as values.

namespace weightwire::wire {

/// Bytes of a `cudaIpcMemHandle_t` and of a `cudaIpcEventHandle_t`.
inline constexpr std::size_t ipc_handle_bytes = 64;

/// A tensor in another process's memory. An importer opens `handle`, whose allocation the storage
/// lies in, and finds the first element `ipc_offset_of` bytes from the allocation's start.
struct ipc_tensor {
    shape extents{};
    /// In elements; none is negative, entries past the last dimension are 0.
    std::array<std::int64_t, max_dimensions> strides{};
    std::uint64_t element_offset = 0;  ///< of the first element from the storage's start, elements
    dtype type = dtype::u8;
    int device = 0;                    ///< index in the exporting process; means nothing elsewhere
    std::string handle{};              ///< `ipc_handle_bytes`, or empty: there is nothing to open
    std::uint64_t storage_bytes = 0;   ///< 0 where there is nothing to open
    std::uint64_t storage_offset = 0;  ///< of the storage from the allocation's start, bytes
    /// Shared memory object with the exporter's counters, a name that the peer chose, and the
    /// counter of this export in it. Empty: nobody counts.
    std::string ref_counter{};
    std::uint64_t ref_slot = 0;
    /// Event to wait for before reading, where `event_sync` says so.
    std::array<std::byte, ipc_handle_bytes> event{};
    bool event_sync = false;
    friend bool operator==(const ipc_tensor&, const ipc_tensor&) = default;
};

/// One tensor, or one packed buffer, on each GPU that has it: UUID as torch spells it (lower-case
/// hexadecimal 8-4-4-4-12, without a prefix) and where it is there.
using ipc_entry = std::vector<std::pair<std::string, ipc_tensor>>;

/// All of an update call.
struct ipc_handles {
    bool packed = false;               ///< one buffer holds all tensors
    std::vector<ipc_entry> entries{};  ///< one a tensor; packed: exactly one
    friend bool operator==(const ipc_handles&, const ipc_handles&) = default;
};

/// What is wrong with `tensor`, in words; empty when nothing is. A tensor without fault lies
/// inside its storage, and no sum of its offsets overflows.
[[nodiscard]] inline std::string_view fault_of(const ipc_tensor& tensor) noexcept {
    if (!tensor.handle.empty() && tensor.handle.size() != ipc_handle_bytes) {
        return "a handle of CUDA has 64 bytes";
    }
    if (tensor.handle.empty() != (tensor.storage_bytes == 0)) {
        return "a storage has a handle where it has bytes, and only there";
    }
    if (!checked_add(tensor.storage_offset, tensor.storage_bytes)) {
        return "the storage's offset and size overflow";
    }
    std::optional<std::uint64_t> last = tensor.element_offset;
    bool empty = false;
    for (std::size_t i = 0; i < tensor.extents.size(); ++i) {
        if (tensor.strides[i] < 0) {
            return "a stride is negative";
        }
        empty = empty || tensor.extents[i] == 0;
        const auto steps = static_cast<std::uint64_t>(tensor.extents[i]) - 1;
        const auto reach =
            empty ? 0 : checked_multiply(steps, static_cast<std::uint64_t>(tensor.strides[i]));
        last = last && reach ? checked_add(*last, *reach) : std::nullopt;
    }
    if (item_bits(tensor.type) % 8 != 0) {
        return "its dtype has no whole bytes";
    }
    if (empty) {
        return {};
    }
    const auto count = last ? checked_add(*last, 1) : std::nullopt;
    const auto bytes = count ? checked_multiply(*count, item_bits(tensor.type) / 8) : std::nullopt;
    return !bytes || *bytes > tensor.storage_bytes ? "it reaches beyond its storage"
                                                   : std::string_view{};
}

/// Bytes from the allocation's start to the first element.
[[nodiscard]] inline std::uint64_t ipc_offset_of(const ipc_tensor& tensor) noexcept {
    return tensor.storage_offset + tensor.element_offset * (item_bits(tensor.type) / 8);
}

/// What `entry` says for `gpu`.
/// @throws protocol_error, in vLLM's words: the trainer exported nothing on that GPU.
[[nodiscard]] inline const ipc_tensor& ipc_tensor_for(const ipc_entry& entry,
                                                      std::string_view gpu) {
    for (const auto& [uuid, tensor] : entry) {
        if (uuid == gpu) {
            return tensor;
        }
    }
    constexpr std::size_t most_named = 16;
    std::string found;
    for (std::size_t i = 0; i < entry.size() && i < most_named; ++i) {
        found += (i == 0 ? "" : ", ") + entry[i].first;
    }
    throw protocol_error{"IPC handle not found for GPU UUID " + std::string{gpu} +
                             ". Available UUIDs: [" + found +
                             (entry.size() > most_named ? ", …" : "") +
                             "]; a trainer rank has to run on each GPU that a worker uses",
                         {.phase = phase::update, .backend = "ipc"}};
}

}  // namespace weightwire::wire
