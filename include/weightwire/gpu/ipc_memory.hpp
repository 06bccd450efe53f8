#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>

#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/allocation_info.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/driver.hpp>
#include <weightwire/gpu/ipc_cache.hpp>
#include <weightwire/gpu/stream.hpp>

/// @file
/// Device memory that one process allocates and others read: CUDA IPC.

namespace weightwire::gpu {

static_assert(sizeof(cudaIpcMemHandle_t) == CUDA_IPC_HANDLE_SIZE);
/// Bytes of a handle, of memory and of an event.
inline constexpr std::size_t ipc_handle_bytes = CUDA_IPC_HANDLE_SIZE;

namespace detail {

/// A handle from plain bytes of a peer.
/// @throws protocol_error their number is not that of a handle.
template <class Handle>
[[nodiscard]] Handle handle_from(std::span<const std::byte> bytes) {
    Handle handle{};
    if (bytes.size() != sizeof handle) {
        throw protocol_error{"a handle of CUDA IPC has " + std::to_string(sizeof handle) +
                             " bytes; " + std::to_string(bytes.size()) + " came"};
    }
    std::memcpy(&handle, bytes.data(), sizeof handle);
    return handle;
}

/// Throws where a peer's handle was refused; whose fault it is follows from the runtime's code.
inline void check_opened(cudaError_t status, const char* operation) {
    if (status == cudaSuccess) {
        return;
    }
    error_context context;
    context.operation = operation;
    context.native_code = static_cast<int>(status);
    context.native_text = std::string{cudaGetErrorName(status)} + ": " + cudaGetErrorString(status);
    // Of an error that stays with the context this takes nothing away: the next call fails too.
    static_cast<void>(cudaGetLastError());
    switch (status) {
        case cudaErrorInvalidValue:
        case cudaErrorInvalidResourceHandle:
            throw protocol_error{
                "CUDA does not know the handle: its bytes are no handle, or the exporter freed "
                "what it named",
                std::move(context)};
        case cudaErrorDeviceUninitialized:
            throw protocol_error{
                "CUDA opens no handle in the process that made it, and this library did not make "
                "it here",
                std::move(context)};
        case cudaErrorMapBufferObjectFailed:
        case cudaErrorAlreadyMapped:
            throw peer_error{
                "CUDA cannot map what the exporter named: it was freed, perhaps while it is still "
                "open here, or lies on a device that this process cannot reach; restart the "
                "exporter, or this process",
                std::move(context)};
        case cudaErrorInvalidDevice:
        case cudaErrorNotSupported:
        case cudaErrorPeerAccessUnsupported:
        case cudaErrorTooManyPeers:
            throw unsupported_error{
                "this device cannot reach the memory of the device that the handle names; use "
                "another backend between them",
                std::move(context)};
        default: check(status, operation);
    }
}

/// The calls of CUDA beneath `ipc_imports`.
struct cuda_ipc_calls {
    [[nodiscard]] static opened_memory open(int device, const std::string& handle) {
        const auto native = handle_from<cudaIpcMemHandle_t>(std::as_bytes(std::span{handle}));
        const device_guard guard{device};
        void* opened = nullptr;
        check_opened(cudaIpcOpenMemHandle(&opened, native, cudaIpcMemLazyEnablePeerAccess),
                     "cudaIpcOpenMemHandle");
        try {
            return {static_cast<const std::byte*>(opened), mapped_bytes_from(opened)};
        } catch (...) {
            static_cast<void>(cudaIpcCloseMemHandle(opened));
            throw;
        }
    }
    /// Also after the runtime has ended with the process: it then says so and does nothing.
    static void close(int device, const std::byte* data) noexcept {
        try {
            const device_guard guard{device};
            if (cudaIpcCloseMemHandle(const_cast<std::byte*>(data)) != cudaSuccess) {
                static_cast<void>(cudaGetLastError());
            }
        } catch (const std::exception&) {
            // The device cannot be used any more: its mappings went with it.
        }
    }
};

/// What this process exported: one of the library's documented globals. Never destroyed, so that it
/// is there for whoever ends later.
[[nodiscard]] inline ipc_exports& own_exports() {
    static auto* const exports = new ipc_exports;
    return *exports;
}

/// What this process has open of others for `device`: likewise. A book a device, since a close may
/// wait for its device, and others need not.
[[nodiscard]] inline ipc_imports<cuda_ipc_calls>& open_imports(int device) {
    struct books {
        std::mutex mutex{};
        std::map<int, ipc_imports<cuda_ipc_calls>> of{};
    };
    static auto* const all = new books;
    const std::lock_guard lock{all->mutex};
    return all->of.try_emplace(device).first->second;
}

/// Lets kernels of `device` read memory of `other`, as an import does by itself.
inline void enable_peer_access(int device, int other) {
    if (device == other) {
        return;
    }
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, device, other), "cudaDeviceCanAccessPeer");
    if (can == 0) {
        throw unsupported_error{"device " + std::to_string(device) +
                                " cannot reach the memory of device " + std::to_string(other) +
                                "; use another backend between them"};
    }
    const device_guard guard{device};
    const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
        static_cast<void>(cudaGetLastError());
        return;
    }
    check_opened(status, "cudaDeviceEnablePeerAccess");
}

}  // namespace detail

/// Another process's memory, opened; or this process's own.
using ipc_mapping = ipc_imports<detail::cuda_ipc_calls>::mapping;

/// Exports the allocation that holds `[address, address + bytes)`, for the life of the allocation,
/// or says in words why no process could open it. An allocation that was exported before is looked
/// up. The driver is asked first: an export is tried only where it can be done.
/// @throws unsupported_error there is no driver, or it is too old.
/// @throws resource_error the device has failed.
[[nodiscard]] inline std::variant<ipc_export, std::string> export_of(const std::byte* address,
                                                                     std::size_t bytes) {
    const allocation_info found = allocation_of(address);
    std::string why = why_not_exportable(found, reinterpret_cast<std::uint64_t>(address), bytes);
    if (!why.empty()) {
        return why;
    }
    auto& exports = detail::own_exports();
    if (auto known = exports.find(found.base, found.buffer_id)) {
        return std::move(*known);
    }
    const device_guard guard{found.device};
    cudaIpcMemHandle_t handle{};
    const cudaError_t status = cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(found.base));
    if (status != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return "cudaIpcGetMemHandle refuses it (code " + std::to_string(status) + ", " +
               cudaGetErrorName(status) + ": " + cudaGetErrorString(status) + ")";
    }
    ipc_export made{.handle = std::string(sizeof handle, '\0'),
                    .base = found.base,
                    .bytes = found.bytes,
                    .buffer_id = found.buffer_id};
    std::memcpy(made.handle.data(), &handle, sizeof handle);
    exports.add(made);
    return made;
}

namespace detail {

/// The memory of an export of this process; nothing where `what` is none. Only what `export_of`
/// made is found: a peer cannot have another address read by naming it.
[[nodiscard]] inline std::optional<ipc_mapping> own_memory(int device, const ipc_export& what) {
    const auto made = own_exports().find(what.handle);
    if (!made) {
        return std::nullopt;
    }
    if ((what.base != 0 && what.base != made->base) || what.bytes > made->bytes ||
        (what.buffer_id != 0 && what.buffer_id != made->buffer_id)) {
        throw protocol_error{
            "a handle of this process came back with another address, size or buffer id than it "
            "was exported with"};
    }
    const auto* const base = reinterpret_cast<const std::byte*>(made->base);
    const allocation_info now = allocation_of(base);
    if (now.base != made->base || now.buffer_id != made->buffer_id) {
        throw peer_error{"this process has freed the memory since it exported it; export it anew"};
    }
    enable_peer_access(device, now.device);
    return std::optional<ipc_mapping>{std::in_place, base,
                                      what.bytes != 0 ? what.bytes : made->bytes};
}

}  // namespace detail

/// Opens an allocation of another process for `device`, or shares what is open of it there already.
/// An export of this process itself is its own memory, which the mapping does not keep alive.
///
/// The last mapping of an allocation closes it, which may wait for the device as `cudaFree` does:
/// see to it that nothing that was launched still reads the memory. It lives on for the exporter,
/// and for this process as long as it is open, also when the exporter has ended.
///
/// @param from the exporter, as the message names it.
/// @param self this process.
/// @param what 0 stands for a base, size or buffer id that the message does not name. The size of
/// what was opened is asked from the driver.
/// @throws protocol_error the handle is none, or names less than the message says.
/// @throws peer_error the exporter freed the memory.
/// @throws unsupported_error memory of a device that this one cannot reach.
[[nodiscard]] inline ipc_mapping open_ipc(int device, const ipc_exporter& from,
                                          const ipc_exporter& self, const ipc_export& what) {
    const auto fits = [](auto named, auto own) { return named == 0 || named == own; };
    if (fits(from.pid, self.pid) && fits(from.start_time, self.start_time)) {
        if (auto own = detail::own_memory(device, what)) {
            return std::move(*own);
        }
    }
    return detail::open_imports(device).open(device, from, what);
}

/// An event of another process, to be asked. No work on a device waits for it: it may be reached
/// late or never, and nothing would end that wait.
class foreign_event {
public:
    /// @throws protocol_error the handle is none.
    foreign_event(int device, std::span<const std::byte> handle) : device_{device} {
        const auto native = detail::handle_from<cudaIpcEventHandle_t>(handle);
        const device_guard guard{device};
        detail::check_opened(cudaIpcOpenEventHandle(&opened_, native), "cudaIpcOpenEventHandle");
    }
    foreign_event(foreign_event&& other) noexcept
        : device_{other.device_}, opened_{std::exchange(other.opened_, nullptr)} {}
    foreign_event& operator=(foreign_event&&) = delete;
    ~foreign_event() {
        if (opened_ != nullptr) {
            static_cast<void>(cudaEventDestroy(opened_));
        }
    }

    /// Whether the point that the other process last recorded in it was reached.
    /// @throws resource_error the device has failed.
    [[nodiscard]] bool is_done() const {
        const device_guard guard{device_};
        const cudaError_t status = cudaEventQuery(opened_);
        if (status == cudaErrorNotReady) {
            static_cast<void>(cudaGetLastError());
            return false;
        }
        check(status, "cudaEventQuery");
        return true;
    }

private:
    int device_;
    cudaEvent_t opened_ = nullptr;
};

/// The UUID of a device as torch spells it: lower-case hexadecimal 8-4-4-4-12, without a prefix.
/// @throws resource_error, unsupported_error there is no such device.
[[nodiscard]] inline std::string device_uuid(int device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return uuid_text(std::as_bytes(std::span<const char, 16>{properties.uuid.bytes}));
}

}  // namespace weightwire::gpu
