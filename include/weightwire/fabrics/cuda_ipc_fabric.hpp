#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/node_address.hpp>
#include <weightwire/fabrics/process.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/ipc_memory.hpp>
#include <weightwire/gpu/kernels/copy.hpp>
#include <weightwire/gpu/lost_devices.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/gpu/stream_relay.hpp>

/// @file
/// A pull fabric over device memory of one machine: a reader's kernel reads the owner's memory
/// through a CUDA IPC mapping, on the same GPU or over the links between two, and writes the
/// destinations directly. One pass, nothing staged. Needs the headers of CUDA.

namespace weightwire::cuda_ipc {

/// Models `PullFabric`.
struct fabric {
    static constexpr std::string_view name = "cuda_ipc";
    static constexpr fabric_capabilities capabilities{.device_memory = true, .in_place = true};

    class reader;

private:
    /// An export as text: base, bytes and buffer id in the owner, then the handle's digits.
    [[nodiscard]] static fabric_export told(const gpu::ipc_export& made, std::uint64_t address) {
        return {.handle = shm::detail::joined<3>({made.base, made.bytes, made.buffer_id}) + " " +
                          gpu::hex_text(std::as_bytes(std::span{made.handle})),
                .offset = address - made.base,
                .bytes = made.bytes};
    }
    /// The inverse.
    [[nodiscard]] static std::optional<gpu::ipc_export> understood(std::string_view text) {
        const auto blank = text.rfind(' ');
        const auto numbers =
            shm::detail::split<3>(text.substr(0, blank == std::string_view::npos ? 0 : blank));
        const auto digits = blank == std::string_view::npos ? "" : text.substr(blank + 1);
        if (!numbers || digits.size() != 2 * gpu::ipc_handle_bytes) {
            return std::nullopt;
        }
        gpu::ipc_export named{
            .base = (*numbers)[0], .bytes = (*numbers)[1], .buffer_id = (*numbers)[2]};
        constexpr std::string_view hexadecimal = "0123456789abcdef";
        for (std::size_t i = 0; i < digits.size(); i += 2) {
            const auto high = hexadecimal.find(digits[i]);
            const auto low = hexadecimal.find(digits[i + 1]);
            if (high == std::string_view::npos || low == std::string_view::npos) {
                return std::nullopt;
            }
            named.handle += static_cast<char>(static_cast<unsigned char>(16U * high + low));
        }
        return named;
    }

    /// Arenas of this process, which are not opened like those of others: who has one open here
    /// keeps it alive. Thread-safe.
    class own_arenas {
    public:
        static void add(const std::shared_ptr<const gpu::device_buffer>& made) {
            auto& all = instance();
            const std::lock_guard lock{all.mutex_};
            std::erase_if(all.known_, [](const auto& each) { return each.expired(); });
            all.known_.push_back(made);
        }
        /// Null where there is no such arena, or none any more.
        [[nodiscard]] static std::shared_ptr<const gpu::device_buffer> at(const std::byte* data) {
            auto& all = instance();
            const std::lock_guard lock{all.mutex_};
            for (const auto& each : all.known_) {
                if (auto found = each.lock(); found != nullptr && found->data() == data) {
                    return found;
                }
            }
            return nullptr;
        }

    private:
        [[nodiscard]] static own_arenas& instance() {
            static own_arenas all;
            return all;
        }
        std::mutex mutex_;
        std::vector<std::weak_ptr<const gpu::device_buffer>> known_;
    };

    /// At first without a pause, as most work takes well under a millisecond.
    static void poll(const gpu::event& point, deadline until, const std::stop_token& stop) {
        constexpr std::chrono::microseconds impatient{200};
        constexpr std::chrono::microseconds pause{20};
        const auto spin = deadline::after(impatient);
        while (!point.is_done()) {
            weightwire::detail::check_time(until, stop,
                                           [] { return error_context{.phase = phase::update}; });
            if (spin.expired()) {
                std::this_thread::sleep_for(pause);
            }
        }
    }

public:
    /// One allocation, exported as a whole.
    class arena {
    public:
        arena() noexcept = default;
        arena(int device, std::uint64_t bytes)
            : memory_{std::make_shared<const gpu::device_buffer>(device,
                                                                 static_cast<std::size_t>(bytes))} {
            auto made = gpu::export_of(memory_->data(), memory_->size());
            if (const auto* const why = std::get_if<std::string>(&made)) {
                throw resource_error{"the arena cannot be exported: " + *why,
                                     {.phase = phase::init}};
            }
            exported_ = std::move(std::get<gpu::ipc_export>(made));
            own_arenas::add(memory_);
        }
        [[nodiscard]] std::byte* data() const noexcept {
            return memory_ != nullptr ? memory_->data() : nullptr;
        }
        [[nodiscard]] std::uint64_t size() const noexcept {
            return memory_ != nullptr ? memory_->size() : 0;
        }
        [[nodiscard]] fabric_export exported() const {
            return told(exported_, reinterpret_cast<std::uint64_t>(data()));
        }

    private:
        std::shared_ptr<const gpu::device_buffer> memory_;
        gpu::ipc_export exported_;
    };

    /// Exports allocations of `cudaMalloc`; says in words what no process can open.
    class owner {
    public:
        explicit owner(int device)
            : device_{device},
              relay_{device},
              copies_{device},
              mark_{device},
              self_{shm::this_process()} {}
        [[nodiscard]] std::string address() const { return shm::node_address(self_); }
        [[nodiscard]] std::variant<fabric_export, fabric_refusal> export_memory(
            const std::byte* address, std::uint64_t bytes) const {
            const gpu::device_guard guard{device_};
            auto made = gpu::export_of(address, static_cast<std::size_t>(bytes));
            if (auto* const why = std::get_if<std::string>(&made)) {
                return fabric_refusal{std::move(*why)};
            }
            return told(std::get<gpu::ipc_export>(made), reinterpret_cast<std::uint64_t>(address));
        }
        [[nodiscard]] arena allocate(std::uint64_t bytes) const { return arena{device_, bytes}; }

        /// Freed memory lives on in the readers' mappings, and its address may be another's now.
        [[nodiscard]] bool is_current(const fabric_export& exported) const {
            const std::string_view text = exported.handle;
            const auto numbers = shm::detail::split<3>(text.substr(0, text.rfind(' ')));
            if (!numbers) {
                return false;
            }
            const gpu::device_guard guard{device_};
            const auto now =
                gpu::allocation_of(reinterpret_cast<const void*>((*numbers)[0]));  // NOLINT
            return now.base == (*numbers)[0] && now.buffer_id == (*numbers)[2];
        }

        /// @param stream a `cudaStream_t` of any device.
        void await_ready(void* stream, deadline until, const std::stop_token& stop) {
            relay_.record_after(mark_, gpu::stream_ref{static_cast<cudaStream_t>(stream)});
            poll(mark_, until, stop);
        }
        /// From device memory, or from host memory.
        void pack(std::byte* to, const std::byte* from, std::uint64_t bytes, std::uint64_t count,
                  std::uint64_t from_step) {
            const gpu::device_guard guard{device_};
            if (count == 1 || from_step == bytes) {
                gpu::copy_bytes(to, from, static_cast<std::size_t>(bytes * count), copies_);
                return;
            }
            constexpr std::uint64_t most_pitch = std::uint64_t{1} << 30U;
            if (from_step > most_pitch) {
                for (std::uint64_t line = 0; line < count; ++line) {
                    gpu::copy_bytes(to + line * bytes, from + line * from_step,
                                    static_cast<std::size_t>(bytes), copies_);
                }
                return;
            }
            gpu::check(cudaMemcpy2DAsync(to, bytes, from, from_step, bytes, count,
                                         cudaMemcpyDefault, copies_.native_handle()),
                       "cudaMemcpy2DAsync");
        }
        void settle(deadline until, const std::stop_token& stop) {
            {
                const gpu::device_guard guard{device_};
                mark_.record(copies_);
            }
            poll(mark_, until, stop);
        }

    private:
        int device_;
        gpu::stream_relay relay_;  ///< to users' streams of other devices
        gpu::stream copies_;
        gpu::event mark_;
        shm::process_identity self_;
    };

    using connection = shm::node_connection;

    /// One allocation of it, mapped. Stays readable when its owner has died; an arena also when its
    /// owner is of this process and is gone.
    class memory {
    public:
        [[nodiscard]] std::uint64_t size() const noexcept { return mapping_.size(); }
        [[nodiscard]] const std::byte* data() const noexcept { return mapping_.data(); }

    private:
        friend class reader;
        explicit memory(gpu::ipc_mapping&& from)
            : arena_{own_arenas::at(from.data())}, mapping_{std::move(from)} {}
        std::shared_ptr<const gpu::device_buffer> arena_;
        gpu::ipc_mapping mapping_;
    };

    using run = remote_run<memory>;

    /// Tables on the device, and the point behind the last launch.
    class read {
    public:
        read() = default;
        /// Device memory of its tables.
        [[nodiscard]] std::size_t table_bytes() const noexcept {
            return plan_ ? plan_->table_bytes() : 0;
        }

    private:
        friend class reader;
        std::optional<gpu::copy_plan> plan_;
        std::optional<gpu::event> point_;
        bool under_way_ = false;
    };

    /// Launches on a stream of its own, one launch a read, and asks its event.
    class reader {
    public:
        explicit reader(int device)
            : device_{device}, uploads_{device}, copies_{device}, self_{shm::this_process()} {}

        [[nodiscard]] connection connect(std::string_view address, deadline until,
                                         const std::stop_token& stop) const {
            weightwire::detail::check_time(until, stop, [] { return at_init(); });
            return connection::to(address, "device memory");
        }

        [[nodiscard]] memory open(connection& from, std::string_view handle_text,
                                  std::uint64_t bytes, deadline until,
                                  const std::stop_token& stop) const {
            weightwire::detail::check_time(until, stop, [] { return at_init(); });
            const auto named = understood(handle_text);
            if (!named || named->bytes < bytes) {
                throw protocol_error{
                    "a handle of device memory is garbled, or has fewer bytes than it is said to",
                    at_init()};
            }
            const auto who = from.who();
            return memory{gpu::open_ipc(device_, {who.pid, who.start_time},
                                        {self_.pid, self_.start_time}, *named)};
        }

        /// A table has 24 bytes a run, for each of a strided run's lines.
        [[nodiscard]] read prepare(std::span<const run> runs) const {
            std::vector<gpu::copy_item> items;
            for (const auto& each : runs) {
                const auto from = reinterpret_cast<std::uint64_t>(each.from->data()) + each.offset;
                const auto to = reinterpret_cast<std::uint64_t>(each.to);
                const bool joined =
                    each.count > 1 && each.from_step == each.bytes && each.to_step == each.bytes;
                const auto lines = joined ? 1 : each.count;
                for (std::uint64_t line = 0; line < lines; ++line) {
                    items.push_back({.source = from + line * each.from_step,
                                     .destination = to + line * each.to_step,
                                     .bytes = joined ? each.bytes * each.count : each.bytes});
                }
            }
            gpu::copy_tiles tiles;
            tiles.add_group(items);
            read made;
            made.plan_.emplace(device_, tiles, gpu::copy_form::automatic, uploads_);
            made.point_.emplace(device_);
            return made;
        }
        /// @param shift a multiple of 16.
        void start(read& which, std::uint64_t shift) const {
            which.plan_->launch(0, reinterpret_cast<const std::byte*>(shift),  // NOLINT
                                nullptr, copies_);
            const gpu::device_guard guard{device_};
            which.point_->record(copies_);
            which.under_way_ = true;
        }
        [[nodiscard]] bool done(read& which) const {
            which.under_way_ = which.under_way_ && !which.point_->is_done();
            return !which.under_way_;
        }
        void wait(read& which, deadline until, const std::stop_token& stop) const {
            if (which.under_way_) {
                poll(*which.point_, until, stop);
                which.under_way_ = false;
            }
        }
        /// A launch ends by itself within milliseconds; where it does not, the device is noted as
        /// lost.
        void cancel(read& which) const noexcept {
            try {
                if (!lost()) {
                    wait(which, deadline::after(std::chrono::seconds{2}), {});
                }
            } catch (const std::exception&) {
                gpu::lost_devices::note(device_);
            }
            which.under_way_ = false;
        }
        [[nodiscard]] bool lost() const noexcept { return gpu::lost_devices::has(device_); }

    private:
        [[nodiscard]] static error_context at_init() { return {.phase = phase::init}; }

        int device_;
        gpu::stream uploads_;  ///< of tables; it never waits for another
        gpu::stream copies_;
        shm::process_identity self_;
    };
};

static_assert(explain_pull_fabric<fabric>());
static_assert(HasFabricReadiness<fabric::owner> && HasFabricPacking<fabric::owner>);
static_assert(HasFabricCurrency<fabric::owner> && HasFabricLoss<fabric::reader>);

}  // namespace weightwire::cuda_ipc
