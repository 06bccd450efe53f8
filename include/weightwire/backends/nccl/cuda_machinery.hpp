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
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/device_machinery.hpp>
#include <weightwire/gpu/kernels/gather.hpp>
#include <weightwire/gpu/kernels/scatter.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/nccl_api/communicator.hpp>
#include <weightwire/nccl_api/library.hpp>

/// @file
/// The machinery of `nccl` on a GPU: CUDA and NCCL.

namespace weightwire::nccl {

/// One device and one copy of NCCL.
class cuda_machinery : public gpu::device_machinery {
public:
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
        : cuda_machinery{device, nccl_api::library::open(chosen(library))} {}

    /// One block for so many multiprocessors is what a copy beside a broadcast gets: it keeps ahead
    /// of the wire, and the broadcast keeps its pace.
    static constexpr unsigned int copy_share = 4;
    /// Another number of blocks, for who measures.
    void set_blocks_beside_broadcast(unsigned int blocks) noexcept { beside_ = blocks; }

    [[nodiscard]] int nccl_version() const noexcept { return library_.version(); }
    [[nodiscard]] const std::string& library_path() const noexcept { return library_.path(); }
    [[nodiscard]] std::string library_description() const { return library_.description(); }

    [[nodiscard]] buffer allocate(std::size_t bytes) { return {device(), bytes}; }
    [[nodiscard]] stream make_urgent_stream() {
        const gpu::device_guard guard{device()};
        int least = 0;
        int most = 0;
        gpu::check(cudaDeviceGetStreamPriorityRange(&least, &most),
                   "cudaDeviceGetStreamPriorityRange");
        return stream{device(), most};
    }
    void make_wait(const stream& later, const event& point) {
        const gpu::device_guard guard{device()};
        point.make_wait(later);
    }

    [[nodiscard]] gather_plan make_gather(std::span<const std::vector<byte_run>> chunks) {
        return {device(), chunks, beside_, uploads()};
    }
    [[nodiscard]] scatter_plan make_scatter(std::span<const std::vector<byte_run>> chunks) {
        return {device(), chunks, beside_, uploads()};
    }

    [[nodiscard]] wire::unique_id make_unique_id() {
        return communicator::make_unique_id(library_);
    }
    [[nodiscard]] communicator join(const wire::unique_id& id, int world_size, int rank,
                                    deadline until, const std::stop_token& stop) {
        return communicator::join(library_, id, world_size, rank, device(), until, stop);
    }

private:
    cuda_machinery(int device, nccl_api::library library)
        : device_machinery{device},
          library_{std::move(library)},
          beside_{static_cast<unsigned int>(
                      gpu::device_attribute(cudaDevAttrMultiProcessorCount, device)) /
                  copy_share} {}
    [[nodiscard]] static std::string chosen(const std::string& library) {
        const char* const named = std::getenv("WEIGHTWIRE_LIBNCCL");
        return library.empty() && named != nullptr ? named : library;
    }

    nccl_api::library library_;
    unsigned int beside_;
};

static_assert(Machinery<cuda_machinery>);

}  // namespace weightwire::nccl
