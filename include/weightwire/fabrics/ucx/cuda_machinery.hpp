#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <ucp/api/ucp.h>

#include <weightwire/fabrics/cuda_ipc_fabric.hpp>
#include <weightwire/fabrics/ucx/device_machinery.hpp>
#include <weightwire/fabrics/ucx/worker.hpp>
#include <weightwire/gpu/allocation_info.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/driver.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/kernels/copy.hpp>
#include <weightwire/gpu/lost_devices.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/gpu/pinned_buffer.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/gpu/stream_relay.hpp>

/// @file
/// The machinery of a UCX fabric on a GPU.

namespace weightwire::ucx {

/// One device.
class cuda_machinery {
public:
    static constexpr ucs_memory_type_t near_type = UCS_MEMORY_TYPE_CUDA;
    using within_node = cuda_ipc::fabric;

    using near_buffer = gpu::device_buffer;
    using pinned_buffer = gpu::pinned_buffer;
    using stream = gpu::stream;
    using event = gpu::event;
    using scatter_plan = gpu::copy_plan;

    /// The device, current until the end. Where that does not work, what needs it says so.
    class scope {
    public:
        explicit scope(int device) noexcept {
            changed_ = cudaGetDevice(&former_) == cudaSuccess && former_ != device &&
                       cudaSetDevice(device) == cudaSuccess;
        }
        scope(const scope&) = delete;
        scope& operator=(const scope&) = delete;
        ~scope() {
            if (changed_ && gpu::detail::has_primary_context(former_)) {
                static_cast<void>(cudaSetDevice(former_));
            }
        }

    private:
        int former_ = 0;
        bool changed_ = false;
    };

    /// @throws unsupported_error, resource_error no such device.
    explicit cuda_machinery(int device) : device_{device}, uploads_{device}, relay_{device} {}

    [[nodiscard]] int device() const noexcept { return device_; }
    [[nodiscard]] static bool is_host(const std::byte* address) {
        const auto place = gpu::allocation_of(address).place;
        return place == gpu::allocation_place::unknown || place == gpu::allocation_place::host;
    }
    [[nodiscard]] static bool ucx_knows(const context& in) noexcept { return in.has_cuda(); }
    void use_on_this_thread() const { gpu::check(cudaSetDevice(device_), "cudaSetDevice"); }
    [[nodiscard]] scope enter() const noexcept { return scope{device_}; }

    [[nodiscard]] near_buffer allocate_near(std::uint64_t bytes) const {
        return {device_, static_cast<std::size_t>(bytes)};
    }
    [[nodiscard]] pinned_buffer allocate_pinned(std::uint64_t bytes) const {
        const gpu::device_guard guard{device_};
        return pinned_buffer{static_cast<std::size_t>(bytes)};
    }

    [[nodiscard]] stream make_stream() const { return stream{device_}; }
    [[nodiscard]] event make_event() const { return event{device_}; }
    void record(event& point, const stream& on) const {
        const gpu::device_guard guard{device_};
        point.record(on);
    }
    /// @param users a `cudaStream_t` of any device.
    void record_after(event& point, void* users) {
        relay_.record_after(point, gpu::stream_ref{static_cast<cudaStream_t>(users)});
    }
    [[nodiscard]] bool is_done(const event& point) const { return point.is_done(); }

    void copy_lines(std::byte* to, std::uint64_t to_step, const std::byte* from,
                    std::uint64_t from_step, std::uint64_t bytes, std::uint64_t count,
                    const stream& on) const {
        const gpu::device_guard guard{device_};
        if (count == 1 || (to_step == bytes && from_step == bytes)) {
            gpu::copy_bytes(to, from, static_cast<std::size_t>(bytes * count), on);
            return;
        }
        // CUDA takes no longer steps than its largest pitch.
        constexpr std::uint64_t most_pitch = std::uint64_t{1} << 30U;
        if (to_step > most_pitch || from_step > most_pitch) {
            for (std::uint64_t line = 0; line < count; ++line) {
                gpu::copy_bytes(to + line * to_step, from + line * from_step,
                                static_cast<std::size_t>(bytes), on);
            }
            return;
        }
        gpu::check(cudaMemcpy2DAsync(
                       to, static_cast<std::size_t>(to_step), from,
                       static_cast<std::size_t>(from_step), static_cast<std::size_t>(bytes),
                       static_cast<std::size_t>(count), cudaMemcpyDefault, on.native_handle()),
                   "cudaMemcpy2DAsync");
    }
    /// Compiles the kernel at its first use in the process, and waits for the tables.
    [[nodiscard]] scatter_plan make_scatter(
        std::span<const std::vector<scatter_move>> groups) const {
        gpu::copy_tiles tiles;
        std::vector<gpu::copy_item> items;
        for (const auto& group : groups) {
            items.clear();
            for (const auto& each : group) {
                items.push_back({.source = each.from,
                                 .destination = reinterpret_cast<std::uint64_t>(each.to),
                                 .bytes = each.bytes});
            }
            tiles.add_group(items);
        }
        return {device_, tiles, gpu::copy_form::automatic, uploads_};
    }
    static void launch(const scatter_plan& plan, std::size_t group, const std::byte* from,
                       const stream& on) {
        plan.launch(group, from, nullptr, on);
    }
    [[nodiscard]] static bool is_lost(int device) noexcept {
        return gpu::lost_devices::has(device);
    }
    static void note_lost(int device) noexcept { gpu::lost_devices::note(device); }

private:
    int device_;
    gpu::stream uploads_;      ///< of tables; it never waits for another
    gpu::stream_relay relay_;  ///< to users' streams of other devices
};

static_assert(DeviceMachinery<cuda_machinery>);

}  // namespace weightwire::ucx
