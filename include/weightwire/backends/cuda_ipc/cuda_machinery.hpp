#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/backends/cuda_ipc/machinery.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/process.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/device_machinery.hpp>
#include <weightwire/gpu/ipc_memory.hpp>
#include <weightwire/gpu/kernels/convert.hpp>
#include <weightwire/gpu/kernels/copy.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/sinks/device_digests.hpp>

/// @file
/// The machinery of CUDA IPC on a GPU.

namespace weightwire::cuda_ipc {

/// One device.
class cuda_machinery : public gpu::device_machinery {
public:
    using mapping = gpu::ipc_mapping;
    using foreign_event = gpu::foreign_event;

    /// Groups of moves, each one launch.
    class copy_plan {
    public:
        copy_plan(int device, std::span<const std::vector<byte_move>> groups, gpu::copy_form form,
                  gpu::stream_ref uploads)
            : plan_{device, tiles_of(groups), form, uploads} {}

        /// Puts the moves of a group into `on` and returns.
        /// @throws usage_error no such group. @throws resource_error the launch was refused.
        void launch(std::size_t group, const stream& on) const {
            plan_.launch(group, nullptr, nullptr, on);
        }
        [[nodiscard]] std::size_t table_bytes() const noexcept { return plan_.table_bytes(); }
        /// The form that was chosen.
        [[nodiscard]] gpu::copy_form form() const noexcept { return plan_.form(); }

    private:
        [[nodiscard]] static gpu::copy_tiles tiles_of(
            std::span<const std::vector<byte_move>> groups) {
            gpu::copy_tiles tiles;
            std::vector<gpu::copy_item> items;
            for (const auto& group : groups) {
                items.clear();
                items.reserve(group.size());
                for (const byte_move& move : group) {
                    items.push_back({.source = reinterpret_cast<std::uint64_t>(move.from),
                                     .destination = reinterpret_cast<std::uint64_t>(move.to),
                                     .bytes = move.bytes});
                }
                tiles.add_group(items);
            }
            return tiles;
        }

        gpu::copy_plan plan_;
    };

    /// Groups of conversions, each one launch a pair of dtypes.
    class conversion_plan {
    public:
        conversion_plan(int device, std::span<const std::vector<conversion>> groups,
                        gpu::stream_ref uploads)
            : plan_{device, tiles_of(groups), uploads} {}

        /// Puts the conversions of a group into `on` and returns.
        /// @throws usage_error no such group. @throws resource_error the launch was refused.
        void launch(std::size_t group, const stream& on) const { plan_.launch(group, on); }
        [[nodiscard]] std::size_t table_bytes() const noexcept { return plan_.table_bytes(); }

    private:
        [[nodiscard]] static gpu::convert_tiles tiles_of(
            std::span<const std::vector<conversion>> groups) {
            gpu::convert_tiles tiles;
            std::vector<gpu::convert_item> items;
            for (const auto& group : groups) {
                items.clear();
                for (const auto& each : group) {
                    items.push_back({each.to, each.from});
                }
                tiles.add_group(items);
            }
            return tiles;
        }

        gpu::convert_plan plan_;
    };

    /// @throws unsupported_error, resource_error no such device.
    explicit cuda_machinery(int device)
        : device_machinery{device}, gpu_{gpu::device_uuid(device)}, self_{shm::this_process()} {}

    /// Another form for the plans that are made from now on, for who measures. `automatic` is right
    /// through a mapping too: plain copies are 5 to 7 % faster there, see
    /// benchmarks/results/cuda_ipc.txt.
    void set_copy_form(gpu::copy_form form) noexcept { form_ = form; }

    [[nodiscard]] const std::string& gpu() const noexcept { return gpu_; }

    [[nodiscard]] std::variant<exported_allocation, std::string> export_of(const std::byte* address,
                                                                           std::size_t bytes) {
        const gpu::device_guard guard{device()};
        auto made = gpu::export_of(address, bytes);
        if (auto* const why = std::get_if<std::string>(&made); why != nullptr) {
            return std::move(*why);
        }
        auto& one = std::get<gpu::ipc_export>(made);
        return exported_allocation{.handle = std::move(one.handle),
                                   .base = one.base,
                                   .bytes = one.bytes,
                                   .buffer_id = one.buffer_id};
    }
    [[nodiscard]] bool is_current(const exported_allocation& known) {
        const gpu::device_guard guard{device()};
        const auto now = gpu::allocation_of(reinterpret_cast<const void*>(known.base));  // NOLINT
        return now.base == known.base && now.buffer_id == known.buffer_id;
    }
    [[nodiscard]] buffer allocate_exportable(std::size_t bytes) { return {device(), bytes}; }

    [[nodiscard]] mapping open(const exporter& from, const exported_allocation& allocation) {
        try {
            return gpu::open_ipc(device(), {from.pid, from.start_time},
                                 {self_.pid, self_.start_time},
                                 {.handle = allocation.handle,
                                  .base = allocation.base,
                                  .bytes = allocation.bytes,
                                  .buffer_id = allocation.buffer_id});
        } catch (const protocol_error& refused) {
            // The runtime has one code for bytes that never were a handle, and for those of a
            // process that has ended.
            if (!refused.context().operation.empty() && is_gone(from)) {
                throw peer_error{"the process that exported the memory, " +
                                     std::to_string(from.pid) +
                                     ", has ended, or cannot be seen from here; restart it",
                                 refused.context()};
            }
            throw;
        }
    }
    [[nodiscard]] foreign_event open_foreign_event(std::span<const std::byte> handle) {
        return {device(), handle};
    }

    [[nodiscard]] copy_plan make_copies(std::span<const std::vector<byte_move>> groups) {
        return {device(), groups, form_, uploads()};
    }
    /// Compiles the kernels of the pairs of dtypes that are new to this process.
    [[nodiscard]] conversion_plan make_conversions(
        std::span<const std::vector<conversion>> groups) {
        return {device(), groups, uploads()};
    }
    /// Before the first round: kernels are not loaded beside others.
    void prepare_digests(std::size_t lists) {
        if (!digests_) {
            digests_ = std::make_unique<weightwire::detail::device_digests>(device());
        }
        digests_->reserve(lists);
    }
    /// @throws usage_error a tensor that is not on this device.
    /// @throws timeout_error, cancelled_error the digests were not ready in time.
    void digests(std::span<const tensor_view> tensors, std::span<std::uint64_t> results,
                 deadline until, const std::stop_token& stop) {
        prepare_digests(1);
        digests_->compute(tensors, results, until, stop);
    }

private:
    /// Whether the exporter is known to have ended; not where the message does not name it.
    [[nodiscard]] static bool is_gone(const exporter& from) {
        if (from.pid <= 0) {
            return false;
        }
        int code = 0;
        const auto started = shm::start_time_of(from.pid, &code);
        if (!started) {
            return code == ENOENT || code == ESRCH;
        }
        const auto time = from.start_time != 0 ? from.start_time : *started;
        return !shm::process_watch{{from.pid, time}}.alive();
    }

    std::string gpu_;
    gpu::copy_form form_ = gpu::copy_form::automatic;
    exporter self_;                                                ///< this process
    std::unique_ptr<weightwire::detail::device_digests> digests_;  ///< once they are asked for
};

static_assert(Machinery<cuda_machinery>);

}  // namespace weightwire::cuda_ipc
