#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernels/exchange.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/sinks/basic_parameter_table.hpp>
#include <weightwire/sinks/copy_rate.hpp>
#include <weightwire/sinks/device_digests.hpp>
#include <weightwire/sinks/exchange_pace.hpp>
#include <weightwire/sinks/placed_parameters.hpp>
#include <weightwire/sinks/table_memory.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

/// @file
/// A worker's named parameters on a CUDA device. Needs the CUDA runtime.

namespace weightwire {

/// Memory of one CUDA device. Models `TableMemory`, `ComputesDigests` and `ClearsTensors`.
///
/// All its work goes through streams of its own and is waited for: when a member returns, the bytes
/// are there for every stream that is given work later. Readers hold a snapshot until the work that
/// reads it is done; a captured graph over `copy_in` weights is launched and waited for within one.
class gpu_memory {
public:
    using storage = gpu::device_buffer;

    /// @throws unsupported_error there is no such device.
    explicit gpu_memory(int device)
        : device_{device},
          stream_{device},
          digests_{std::make_unique<detail::device_digests>(device)} {}

    [[nodiscard]] weightwire::device where() const noexcept { return {memory_kind::cuda, device_}; }

    /// @throws resource_error the device has not that much left; says how many bytes were asked
    /// for.
    [[nodiscard]] storage allocate(std::uint64_t bytes, std::string_view purpose) const;

    /// Host memory of this process and device memory both load.
    void require_loadable(const named_tensor& /*from*/) const noexcept {}
    /// Starts after the work of `from.ready_stream`.
    void load(const mutable_tensor_view& to, const named_tensor& from) const;

    /// Uploads the table of runs, unless it is the one that is there.
    /// @throws resource_error no memory for the table.
    void plan(const detail::placed_parameters& placed);
    [[nodiscard]] detail::timed_copy sample(const detail::placed_parameters& placed) const noexcept;

    /// One launch, which nobody can stop half way: the clock is asked before it and, by the table,
    /// when it is done.
    /// @throws resource_error the device failed.
    [[nodiscard]] bool exchange(const detail::placed_parameters& placed,
                                detail::exchange_pace& pace) const {
        if (const auto bytes = placed.bytes(); bytes != 0) {
            if (pace(static_cast<std::size_t>(bytes)) == 0) {
                return false;
            }
            exchange_all();
        }
        return true;
    }
    [[nodiscard]] bool exchange_back(const detail::placed_parameters& placed,
                                     std::uint64_t bytes) const noexcept {
        return bytes == 0 || publish(placed);
    }
    /// An exchange too: it needs no further table, and what staging then holds does not matter.
    [[nodiscard]] bool publish(const detail::placed_parameters& /*placed*/) const noexcept {
        try {
            exchange_all();
            return true;
        } catch (const std::exception&) {
            return false;
        }
    }

    /// The digest of each tensor, computed on the device.
    /// @param results one a tensor. @throws timeout_error, cancelled_error, resource_error.
    void digests(std::span<const tensor_view> tensors, std::span<std::uint64_t> results,
                 deadline until, const std::stop_token& stop) const {
        digests_->compute(tensors, results, until, stop);
    }
    /// @throws resource_error the device failed.
    void clear(const mutable_tensor_view& tensor) const;

private:
    void exchange_all() const {
        moves_->launch(stream_);
        stream_.synchronize();
    }

    int device_;
    gpu::stream stream_;  ///< of the session's thread
    std::vector<gpu::exchange_item> runs_;
    std::optional<gpu::exchange_plan> moves_;  ///< of `runs_`
    std::unique_ptr<detail::device_digests> digests_;
};

/// A table of parameters on a CUDA device, its own or the user's: `basic_parameter_table` says what
/// it does. Snapshots give views of device memory.
using device_parameter_table = basic_parameter_table<gpu_memory>;

inline gpu_memory::storage gpu_memory::allocate(std::uint64_t bytes,
                                                std::string_view purpose) const {
    // An empty tensor has an address too.
    const auto size = static_cast<std::size_t>(bytes == 0 ? 1 : bytes);
    const gpu::device_guard guard{device_};
    try {
        gpu::device_buffer made{device_, size};
        gpu::clear_bytes(made.data(), size, stream_);
        stream_.synchronize();
        return made;
    } catch (const resource_error& failed) {
        auto context = failed.context();
        context.bytes_total = bytes;
        throw resource_error{"no " + std::to_string(bytes) + " bytes of CUDA device " +
                                 std::to_string(device_) + " for " + std::string{purpose} +
                                 "; free some, or choose commit mode in_place, which needs no "
                                 "staging",
                             std::move(context)};
    }
}

inline void gpu_memory::load(const mutable_tensor_view& to, const named_tensor& from) const {
    const gpu::device_guard guard{device_};
    gpu::wait_for_producer(from.ready_stream);
    for_each_run_pair(to, from.tensor,
                      [&](std::byte* into, const std::byte* out_of, std::size_t bytes) {
                          gpu::copy_bytes(into, out_of, bytes, stream_);
                          return true;
                      });
    stream_.synchronize();
}

inline void gpu_memory::plan(const detail::placed_parameters& placed) {
    const auto each_run = [&](auto visit) {
        return placed.all([&](const detail::parameter_slots& slots) {
            return for_each_run_pair(slots[0], slots[1],
                                     [&](std::byte* live, std::byte* staged, std::size_t bytes) {
                                         return visit(gpu::exchange_item{live, staged, bytes});
                                     });
        });
    };
    // Rounds repeat: the list is compared, and only another one is built.
    std::size_t at = 0;
    const bool same = moves_ && each_run([&](const gpu::exchange_item& run) {
                          return at < runs_.size() && runs_[at++] == run;
                      });
    if (same && at == runs_.size()) {
        return;
    }
    moves_.reset();  // both tables at once may not fit
    runs_.clear();
    each_run([&](const gpu::exchange_item& run) {
        runs_.push_back(run);
        return true;
    });
    moves_.emplace(device_, runs_);
}

/// The halves of staged tensors are exchanged, by the kernel of a commit: readers may be looking at
/// the live weights, and copies one by one would tell how long a copy takes to begin.
inline detail::timed_copy gpu_memory::sample(
    const detail::placed_parameters& placed) const noexcept {
    constexpr std::uint64_t enough = std::uint64_t{256} << 20U;
    try {
        std::vector<gpu::exchange_item> halves;
        std::uint64_t bytes = 0;
        placed.all([&](const detail::parameter_slots& slots) {
            const std::uint64_t half = slots[1].byte_size() / 2;
            halves.push_back({slots[1].data(), slots[1].data() + half, half});
            bytes += half;
            return bytes < enough;
        });
        const gpu::exchange_plan trial{device_, halves};
        const auto run = [&] {
            trial.launch(stream_);
            stream_.synchronize();
            return bytes;
        };
        static_cast<void>(run());  // the first launch of a kernel loads it
        return detail::timed(run);
    } catch (const std::exception&) {
        return {};  // no estimate; the session will say what is wrong with the device
    }
}

inline void gpu_memory::clear(const mutable_tensor_view& tensor) const {
    const gpu::device_guard guard{device_};
    for_each_run(tensor, [&](std::byte* first, std::size_t bytes) {
        gpu::clear_bytes(first, bytes, stream_);
    });
    stream_.synchronize();
}

static_assert(TableMemory<gpu_memory>);
static_assert(ComputesDigests<gpu_memory> && ClearsTensors<gpu_memory>);

}  // namespace weightwire
