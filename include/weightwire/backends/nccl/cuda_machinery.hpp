#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdlib>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/backends/nccl/machinery.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/kernels/copy_kernels.hpp>
#include <weightwire/gpu/kernels/gather.hpp>
#include <weightwire/gpu/kernels/scatter.hpp>
#include <weightwire/gpu/pinned_buffer.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/gpu/stream_relay.hpp>
#include <weightwire/nccl_api/communicator.hpp>
#include <weightwire/nccl_api/library.hpp>

/// @file
/// The machinery of `nccl` on a GPU: CUDA and NCCL.

namespace weightwire::nccl {

/// One device and one copy of NCCL.
class cuda_machinery {
public:
    static constexpr auto near_memory = memory_kind::cuda;

    using buffer = gpu::device_buffer;
    using pinned_buffer = gpu::pinned_buffer;
    using stream = gpu::stream;
    using event = gpu::event;
    using communicator = nccl_api::communicator;

    /// `gpu::gather` or `gpu::scatter` over runs.
    template <class Kernel, class Item>
    class copy_runs {
    public:
        /// @param beside most blocks of a launch beside a broadcast.
        copy_runs(int device, std::span<const std::vector<byte_run>> chunks, unsigned int beside,
                  gpu::stream_ref uploads)
            : kernel_{device, converted(chunks), gpu::copy_form::automatic, uploads},
              beside_{beside} {}
        /// @param buffer `std::byte*` of a gather, `const std::byte*` of a scatter.
        template <class Byte>
        void launch(std::size_t chunk, Byte* buffer, gpu::stream_ref on, copy_pace pace) const {
            kernel_.launch(chunk, buffer, on, pace == copy_pace::full ? 0 : beside_);
        }
        [[nodiscard]] std::size_t table_bytes() const noexcept {
            return kernel_.plan().table_bytes();
        }

    private:
        [[nodiscard]] static std::vector<std::vector<Item>> converted(
            std::span<const std::vector<byte_run>> chunks) {
            std::vector<std::vector<Item>> out(chunks.size());
            for (std::size_t i = 0; i < chunks.size(); ++i) {
                out[i].reserve(chunks[i].size());
                for (const auto& run : chunks[i]) {
                    out[i].push_back({run.address, run.offset, run.bytes});
                }
            }
            return out;
        }
        Kernel kernel_;
        unsigned int beside_;
    };
    using gather_plan = copy_runs<gpu::gather, gpu::gather_item>;
    using scatter_plan = copy_runs<gpu::scatter, gpu::scatter_item>;

    /// @param library path of libnccl. Empty: the file that the environment variable
    /// WEIGHTWIRE_LIBNCCL names, or else what `nccl_api::library::open` finds by itself.
    /// @throws unsupported_error no such device, or no libnccl.
    cuda_machinery(int device, const std::string& library)
        : device_{device},
          library_{nccl_api::library::open(chosen(library))},
          uploads_{device},  // names the device where it cannot be used
          relay_{device} {
        beside_ = static_cast<unsigned int>(
                      gpu::device_attribute(cudaDevAttrMultiProcessorCount, device)) /
                  copy_share;
    }

    /// One block for so many multiprocessors is what a copy beside a broadcast gets: it keeps ahead
    /// of the wire, and the broadcast keeps its pace.
    static constexpr unsigned int copy_share = 4;
    /// Another number of blocks, for who measures.
    void set_blocks_beside_broadcast(unsigned int blocks) noexcept { beside_ = blocks; }

    [[nodiscard]] int device() const noexcept { return device_; }
    [[nodiscard]] int nccl_version() const noexcept { return library_.version(); }
    [[nodiscard]] const std::string& library_path() const noexcept { return library_.path(); }
    [[nodiscard]] std::string library_description() const { return library_.description(); }

    /// Compiles what copies and loads it onto this device, also the form that only shifted bytes
    /// need: the driver may hold up a kernel's first load until others have ended, and a broadcast
    /// ends only when every rank takes part.
    void load_kernels() { gpu::load_copy_kernels(device_); }

    [[nodiscard]] buffer allocate(std::size_t bytes) { return {device_, bytes}; }
    [[nodiscard]] pinned_buffer allocate_pinned(std::size_t bytes) { return pinned_buffer{bytes}; }
    [[nodiscard]] stream make_stream() { return stream{device_}; }
    [[nodiscard]] stream make_urgent_stream() {
        const gpu::device_guard guard{device_};
        int least = 0;
        int most = 0;
        gpu::check(cudaDeviceGetStreamPriorityRange(&least, &most),
                   "cudaDeviceGetStreamPriorityRange");
        return stream{device_, most};
    }
    [[nodiscard]] event make_event() { return event{device_}; }

    void record(event& point, const stream& on) {
        const gpu::device_guard guard{device_};
        point.record(on);
    }
    /// @param users a `cudaStream_t` of any device.
    void record_after(event& point, void* users) {
        relay_.record_after(point, gpu::stream_ref{static_cast<cudaStream_t>(users)});
    }
    void make_wait(const stream& later, const event& point) {
        const gpu::device_guard guard{device_};
        point.make_wait(later);
    }
    void make_source_wait(void* users, const event& point) {
        const gpu::device_guard guard{device_};
        point.make_wait(gpu::stream_ref{static_cast<cudaStream_t>(users)});
    }
    [[nodiscard]] bool is_done(const event& point) const { return point.is_done(); }
    [[nodiscard]] static bool is_idle(const stream& asked) { return asked.is_idle(); }

    /// Asynchronous where host memory is pinned.
    void copy(std::byte* to, const std::byte* from, std::size_t bytes, const stream& on) {
        const gpu::device_guard guard{device_};
        gpu::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, on.native_handle()),
                   "cudaMemcpyAsync");
    }
    [[nodiscard]] gather_plan make_gather(std::span<const std::vector<byte_run>> chunks) {
        return {device_, chunks, beside_, uploads_};
    }
    [[nodiscard]] scatter_plan make_scatter(std::span<const std::vector<byte_run>> chunks) {
        return {device_, chunks, beside_, uploads_};
    }

    [[nodiscard]] wire::unique_id make_unique_id() {
        return communicator::make_unique_id(library_);
    }
    [[nodiscard]] communicator join(const wire::unique_id& id, int world_size, int rank,
                                    deadline until, const std::stop_token& stop) {
        return communicator::join(library_, id, world_size, rank, device_, until, stop);
    }

private:
    [[nodiscard]] static std::string chosen(const std::string& library) {
        const char* const named = std::getenv("WEIGHTWIRE_LIBNCCL");
        return library.empty() && named != nullptr ? named : library;
    }

    int device_;
    nccl_api::library library_;
    unsigned int beside_ = 1;
    gpu::stream uploads_;      ///< of tables; it never waits for another
    gpu::stream_relay relay_;  ///< to users' streams of other devices
};

static_assert(Machinery<cuda_machinery>);

}  // namespace weightwire::nccl
