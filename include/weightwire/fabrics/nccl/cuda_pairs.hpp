#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/cuda_ipc_fabric.hpp>
#include <weightwire/fabrics/nccl/pair_machinery.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/kernels/copy_kernels.hpp>
#include <weightwire/gpu/kernels/scatter.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/gpu/stream_relay.hpp>
#include <weightwire/nccl_api/communicator.hpp>
#include <weightwire/nccl_api/error.hpp>
#include <weightwire/nccl_api/library.hpp>
#include <weightwire/nccl_api/nccl.hpp>

/// @file
/// The machinery of the NCCL pull fabric on a GPU: CUDA, and NCCL's sends and receives.

namespace weightwire::nccl {

/// What pairs call beside `nccl_api::library::calls`.
struct pair_calls {
    decltype(&ncclSend) send;
    decltype(&ncclRecv) receive;
    decltype(&ncclGroupStart) group_start;
    decltype(&ncclGroupEnd) group_end;

    /// @throws unsupported_error the library lacks one of them.
    [[nodiscard]] static pair_calls of(const nccl_api::library& used) {
        // Opened already: this only finds it, and the reference is kept with the library's own.
        void* const handle = ::dlopen(used.path().c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (handle == nullptr) {
            const char* const words = ::dlerror();
            throw unsupported_error{
                "libnccl, which is open, is not found again by its path; name the file itself in "
                "WEIGHTWIRE_LIBNCCL",
                {.phase = phase::init,
                 .backend = "nccl",
                 .operation = "dlopen",
                 .native_text = words != nullptr ? words : used.path()}};
        }
        pair_calls found{};
        nccl_api::detail::find_symbol(handle, "ncclSend", found.send);
        nccl_api::detail::find_symbol(handle, "ncclRecv", found.receive);
        nccl_api::detail::find_symbol(handle, "ncclGroupStart", found.group_start);
        nccl_api::detail::find_symbol(handle, "ncclGroupEnd", found.group_end);
        return found;
    }
};

/// One device and one copy of NCCL. Models `PairMachinery`.
class cuda_pairs {
public:
    static constexpr auto near_memory = memory_kind::cuda;
    using within_node = cuda_ipc::fabric;

    using buffer = gpu::device_buffer;
    using stream = gpu::stream;
    using event = gpu::event;
    using scatter_plan = gpu::scatter;

    /// An abort on a thread of its own.
    class ending {
    public:
        ending() noexcept = default;
        explicit ending(std::shared_ptr<const std::atomic<bool>> over) noexcept
            : over_{std::move(over)} {}
        [[nodiscard]] bool over() const noexcept {
            return over_ == nullptr || over_->load(std::memory_order_acquire);
        }

    private:
        std::shared_ptr<const std::atomic<bool>> over_;
    };

    /// A communicator of two, with a stream of its own: kernels of pairs must not stand behind one
    /// another. NCCL is used in its non-blocking form.
    class pair {
    public:
        pair() noexcept = default;
        pair(pair&&) noexcept = default;
        pair& operator=(pair&& other) noexcept {
            std::swap(held_, other.held_);
            return *this;
        }
        ~pair() { static_cast<void>(std::move(*this).end()); }

        [[nodiscard]] bool ready();
        void post(std::span<const pair_piece> pieces, pair_end end);
        [[nodiscard]] bool reached();
        ending end() && noexcept;

    private:
        friend class cuda_pairs;
        /// All that NCCL or its kernels may touch.
        struct resources {
            resources(nccl_api::library with, const pair_calls& point_to_point, int on,
                      int priority)
                : used{with},
                  calls{point_to_point},
                  device{on},
                  work{on, priority},
                  mark{on},
                  words_before{nccl_api::detail::digest_of_words(with)} {}
            nccl_api::library used;
            pair_calls calls;
            int device;
            gpu::stream work;
            gpu::event mark;
            std::size_t words_before;
            ncclComm_t native = nullptr;
            bool posted = false;  ///< and the mark is not yet behind it
            std::string_view operation = "ncclCommInitRankConfig";
            weightwire::phase during = weightwire::phase::init;
            pair_end own = pair_end::owner;
        };
        [[nodiscard]] ncclResult_t state() const;
        [[noreturn]] void fail(ncclResult_t result) const;

        std::unique_ptr<resources> held_;
    };

    /// Opens the libnccl that the environment variable WEIGHTWIRE_LIBNCCL names, or else what
    /// `nccl_api::library::open` finds by itself.
    /// @throws unsupported_error no such device, or no libnccl.
    explicit cuda_pairs(int device)
        : device_{device},
          library_{nccl_api::library::open(chosen())},
          calls_{pair_calls::of(library_)},
          uploads_{device},  // names the device where it cannot be used
          relay_{device},
          multiprocessors_{gpu::device_attribute(cudaDevAttrMultiProcessorCount, device)} {
        const gpu::device_guard guard{device_};
        int least = 0;
        gpu::check(cudaDeviceGetStreamPriorityRange(&least, &urgent_),
                   "cudaDeviceGetStreamPriorityRange");
    }

    [[nodiscard]] int device() const noexcept { return device_; }
    [[nodiscard]] int nccl_version() const noexcept { return library_.version(); }
    [[nodiscard]] const nccl_api::library& used_library() const noexcept { return library_; }
    /// Half of the multiprocessors, at one block each: what else runs on the device ends by itself,
    /// and takes turns with the other half.
    [[nodiscard]] std::size_t most_pairs_at_once(int channels) const noexcept {
        return static_cast<std::size_t>(std::max(1, multiprocessors_ / 2 / std::max(1, channels)));
    }

    [[nodiscard]] buffer allocate(std::size_t bytes) const { return {device_, bytes}; }
    /// Of the whole device, whoever has the rest.
    [[nodiscard]] std::optional<std::uint64_t> free_bytes() const {
        const gpu::device_guard guard{device_};
        std::size_t free = 0;
        std::size_t total = 0;
        gpu::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
        return free;
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

    /// `count` lines of `bytes` bytes, one every `from_step`, to `to` one after the other. From and
    /// to memory of any kind.
    void copy_lines(std::byte* to, const std::byte* from, std::uint64_t bytes, std::uint64_t count,
                    std::uint64_t from_step, const stream& on) const {
        const gpu::device_guard guard{device_};
        constexpr std::uint64_t most_pitch = std::uint64_t{1} << 30U;
        if (count == 1 || from_step == bytes) {
            gpu::copy_bytes(to, from, static_cast<std::size_t>(bytes * count), on);
        } else if (from_step > most_pitch) {
            for (std::uint64_t line = 0; line < count; ++line) {
                gpu::copy_bytes(to + line * bytes, from + line * from_step,
                                static_cast<std::size_t>(bytes), on);
            }
        } else {
            gpu::check(cudaMemcpy2DAsync(to, bytes, from, from_step, bytes, count,
                                         cudaMemcpyDefault, on.native_handle()),
                       "cudaMemcpy2DAsync");
        }
    }
    /// Before the first pair: the driver may hold up a kernel's first load until others have ended.
    void load_kernels() const { gpu::load_copy_kernels(device_); }
    [[nodiscard]] scatter_plan make_scatter(std::span<const landed_run> runs) const {
        std::vector<std::vector<gpu::scatter_item>> groups(1);
        groups[0].reserve(runs.size());
        for (const auto& run : runs) {
            groups[0].push_back({run.to, run.offset, run.bytes});
        }
        return {device_, groups, gpu::copy_form::automatic, uploads_};
    }
    [[nodiscard]] static std::size_t table_bytes(const scatter_plan& scatter) noexcept {
        return scatter.plan().table_bytes();
    }
    /// With a quarter of the device's blocks: it keeps ahead of a wire, and receives that are under
    /// way keep their pace.
    void launch(const scatter_plan& scatter, const std::byte* place, const stream& on) const {
        constexpr int share = 4;
        scatter.launch(0, place, on,
                       static_cast<unsigned int>(std::max(1, multiprocessors_ / share)));
    }

    [[nodiscard]] wire::unique_id make_unique_id() const {
        return nccl_api::communicator::make_unique_id(library_);
    }
    [[nodiscard]] pair begin(const wire::unique_id& id, pair_end end, int channels) const {
        pair made;
        made.held_ = std::make_unique<pair::resources>(library_, calls_, device_, urgent_);
        made.held_->own = end;
        ncclUniqueId native{};
        static_assert(sizeof native.internal == sizeof id);
        std::memcpy(native.internal, id.data(), id.size());
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        config.minCTAs = 1;
        config.maxCTAs = channels;
        const gpu::device_guard guard{device_};
        const auto result = library_.calls().init_rank_config(&made.held_->native, 2, native,
                                                              static_cast<int>(end), &config);
        if (result != ncclSuccess && result != ncclInProgress) {
            made.fail(result);
        }
        return made;
    }

private:
    [[nodiscard]] static std::string chosen() {
        const char* const named = std::getenv("WEIGHTWIRE_LIBNCCL");
        return named != nullptr ? named : "";
    }

    int device_;
    nccl_api::library library_;
    pair_calls calls_;
    gpu::stream uploads_;      ///< of tables; it never waits for another
    gpu::stream_relay relay_;  ///< to users' streams of other devices
    int multiprocessors_;
    int urgent_ = 0;
};

inline ncclResult_t cuda_pairs::pair::state() const {
    ncclResult_t result = ncclSuccess;
    const auto asked = held_->used.calls().get_async_error(held_->native, &result);
    return asked != ncclSuccess ? asked : result;
}

inline void cuda_pairs::pair::fail(ncclResult_t result) const {
    nccl_api::throw_failure(
        held_->used, result, held_->operation,
        nccl_api::detail::words_since(held_->used, held_->words_before),
        {.phase = held_->during,
         .peer = held_->own == pair_end::owner ? "the worker" : "the trainer rank",
         .backend = "nccl"});
}

inline bool cuda_pairs::pair::ready() {
    const auto result = state();
    if (result == ncclInProgress) {
        return false;
    }
    if (result != ncclSuccess) {
        fail(result);
    }
    if (std::exchange(held_->posted, false)) {
        const gpu::device_guard guard{held_->device};
        held_->mark.record(held_->work);
    }
    return true;
}

inline void cuda_pairs::pair::post(std::span<const pair_piece> pieces, pair_end end) {
    const bool sends = end == pair_end::owner;
    held_->operation = sends ? "ncclSend" : "ncclRecv";
    held_->during = phase::update;
    held_->words_before = nccl_api::detail::digest_of_words(held_->used);
    if (const auto before = state(); before != ncclSuccess) {
        fail(before);
    }
    const gpu::device_guard guard{held_->device};
    const auto& calls = held_->calls;
    const int other = 1 - static_cast<int>(end);
    auto result = calls.group_start();
    if (result != ncclSuccess) {
        fail(result);
    }
    for (const auto& piece : pieces) {
        if (result == ncclSuccess || result == ncclInProgress) {
            const auto count = static_cast<std::size_t>(piece.bytes);
            result = sends ? calls.send(piece.data, count, ncclUint8, other, held_->native,
                                        held_->work.native_handle())
                           : calls.receive(piece.data, count, ncclUint8, other, held_->native,
                                           held_->work.native_handle());
        }
    }
    const auto ended = calls.group_end();
    if (result != ncclSuccess && result != ncclInProgress) {
        fail(result);
    }
    if (ended != ncclSuccess && ended != ncclInProgress) {
        fail(ended);
    }
    held_->posted = true;
}

/// In this order: an error that came before the mark is seen once the mark is reached.
inline bool cuda_pairs::pair::reached() {
    const bool done = held_->mark.is_done();
    if (const auto result = state(); result != ncclSuccess && result != ncclInProgress) {
        fail(result);
    }
    return done;
}

/// An abort waits for kernels and for threads of NCCL, and nobody promises that those end. Where no
/// thread can be started the communicator is left as it is, and is never over.
inline cuda_pairs::ending cuda_pairs::pair::end() && noexcept {
    auto* const ended = held_.release();
    if (ended == nullptr) {
        return {};
    }
    try {
        auto over = std::make_shared<std::atomic<bool>>(false);
        std::thread{[ended, over] {
            // NCCL makes the thread's former device current again: on device 0 that would cost a
            // context.
            static_cast<void>(cudaSetDevice(ended->device));
            if (ended->native != nullptr) {
                static_cast<void>(ended->used.calls().abort(ended->native));
            }
            delete ended;
            over->store(true, std::memory_order_release);
        }}.detach();
        return ending{std::move(over)};
    } catch (...) {
        try {
            return ending{std::make_shared<const std::atomic<bool>>(false)};
        } catch (...) {
            std::terminate();  // no memory for one flag
        }
    }
}

static_assert(PairMachinery<cuda_pairs>);

}  // namespace weightwire::nccl
