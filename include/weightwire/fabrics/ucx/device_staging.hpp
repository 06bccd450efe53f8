#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ucp/api/ucp.h>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/ucx/device_machinery.hpp>
#include <weightwire/fabrics/ucx/pieces.hpp>

/// @file
/// The staging of tensors on a device. What comes lands in pinned host memory; the device copies it
/// to where it belongs while the next piece is on its way. Where UCX writes the device's memory
/// itself, long runs skip this.

namespace weightwire::ucx {

template <DeviceMachinery M>
class device_staging {
public:
    using machinery = M;
    using buffer = device_staging_buffer<M>;
    /// A point that copies have to reach before what they read may be written again.
    using mark = typename M::event;

    static constexpr bool device_memory = true;
    static constexpr bool copies_at_once = false;
    static constexpr ucs_memory_type_t near_type = M::near_type;
    /// A copy ends by itself within milliseconds; a device that takes longer is lost.
    static constexpr std::chrono::seconds patience{2};

    /// How the pieces of a read are laid out: one call of the runtime each run of lines where these
    /// are few and long, else one kernel.
    class layout {
    public:
        layout() noexcept = default;

    private:
        friend class device_staging;
        static constexpr std::size_t by_calls = ~std::size_t{0};
        std::vector<std::size_t> group_of_{};  ///< of each piece, or `by_calls`
        detail::device_owned<M, typename M::scatter_plan> plan_{};
    };

    /// Transfers may write to destinations: UCX was seen to do so.
    bool direct = false;

    /// @throws unsupported_error, resource_error no such device.
    explicit device_staging(int device) : machine_{device}, stream_{machine_.make_stream()} {}

    [[nodiscard]] static bool is_host(const std::byte* address) { return M::is_host(address); }
    void begin_thread() const { machine_.use_on_this_thread(); }
    [[nodiscard]] auto scope() const noexcept { return machine_.enter(); }

    /// Where transfers land, and what they read where UCX does not read near memory.
    [[nodiscard]] buffer allocate(std::uint64_t bytes) const {
        return {machine_.device(), machine_.allocate_pinned(bytes)};
    }
    [[nodiscard]] buffer allocate_near(std::uint64_t bytes) const {
        return {machine_.device(), machine_.allocate_near(bytes)};
    }
    [[nodiscard]] mark make_mark() { return machine_.make_event(); }

    /// Looks how each piece is laid out, and makes the tables for those with many runs: 24 bytes a
    /// line, and once `places` pieces of device memory.
    /// @param landing where a piece lands.
    /// @throws resource_error, unsupported_error what the device says.
    template <class Memory>
    [[nodiscard]] layout make_layout(std::span<const piece<Memory>> pieces,
                                     std::span<const remote_run<Memory>> runs, std::size_t places,
                                     const std::byte* landing) {
        layout made;
        std::vector<std::vector<scatter_move>> groups;
        for (const auto& each : pieces) {
            made.group_of_.push_back(layout::by_calls);
            if (each.direct != nullptr) {
                continue;
            }
            std::vector<scatter_move> moves;
            std::size_t calls = 0;
            std::uint64_t shortest = each.bytes;
            lay_out<Memory>(
                each, runs, landing,
                [&](std::byte* to, std::uint64_t step, const std::byte* from, std::uint64_t bytes,
                    std::uint64_t count) {
                    const auto begin = static_cast<std::uint64_t>(from - landing);
                    // A call for each line: they may be of several tensors, and a call of the
                    // runtime stays in one allocation.
                    calls += static_cast<std::size_t>(count);
                    shortest = std::min(shortest, bytes);
                    for (std::uint64_t i = 0; i < count; ++i) {
                        moves.push_back(
                            {.from = begin + i * bytes, .to = to + i * step, .bytes = bytes});
                    }
                });
            if (calls > most_calls || shortest < call_bytes) {
                made.group_of_.back() = groups.size();
                groups.push_back(std::move(moves));
            }
        }
        if (!groups.empty()) {
            if (slots_.data() == nullptr) {
                slots_ = allocate_near(places * piece_bytes);
            }
            made.plan_ = {machine_.device(), machine_.make_scatter(groups)};
        }
        return made;
    }

    /// Begins to lay out a piece that has landed.
    template <class Memory>
    void lay(const layout& how, std::size_t index, const piece<Memory>& which,
             std::span<const remote_run<Memory>> runs, std::size_t place, const std::byte* landed) {
        const auto group = how.group_of_[index];
        if (group == layout::by_calls) {
            lay_out<Memory>(which, runs, landed,
                            [this](std::byte* to, std::uint64_t step, const std::byte* from,
                                   std::uint64_t bytes, std::uint64_t count) {
                                for (std::uint64_t i = 0; i < count; ++i) {
                                    machine_.copy_lines(to + i * step, bytes, from + i * bytes,
                                                        bytes, bytes, 1, stream_);
                                }
                            });
            return;
        }
        auto* const slot = slots_.data() + place * piece_bytes;
        machine_.copy_lines(slot, which.bytes, landed, which.bytes, which.bytes, 1, stream_);
        machine_.launch(*how.plan_, group, slot, stream_);
    }

    /// Begins to copy lines of `bytes` bytes, one every `from_step` bytes, to `to`, one after the
    /// other.
    void pack(std::byte* to, const std::byte* from, std::uint64_t bytes, std::uint64_t count,
              std::uint64_t from_step) {
        machine_.copy_lines(to, bytes, from, from_step, bytes, count, stream_);
    }

    /// Ends a group of copies.
    void record(mark& at) { machine_.record(at, stream_); }
    void record_after(mark& at, void* users) { machine_.record_after(at, users); }
    [[nodiscard]] bool reached(const mark& at) const { return machine_.is_done(at); }
    /// @throws timeout_error, cancelled_error, and what the device says.
    void await(const mark& at, deadline until, const std::stop_token& stop, phase when) const {
        // At first without a pause, as most work takes well under a millisecond.
        constexpr std::chrono::microseconds impatient{200};
        constexpr std::chrono::microseconds pause{20};
        const auto spin = deadline::after(impatient);
        while (!reached(at)) {
            weightwire::detail::check_time(until, stop,
                                           [&] { return error_context{.phase = when}; });
            if (spin.expired()) {
                std::this_thread::sleep_for(pause);
            }
        }
    }
    /// Waits for it, where a read is given up. What does not end costs the device.
    void finish(const mark& at) const noexcept {
        try {
            if (!lost()) {
                await(at, deadline::after(patience), {}, phase::update);
            }
        } catch (const std::exception&) {
            M::note_lost(machine_.device());
        }
    }
    [[nodiscard]] bool lost() const noexcept { return M::is_lost(machine_.device()); }
    /// Copies on the device's stream that were not waited for write nothing after this.
    void come_to_rest() noexcept {
        try {
            auto last = make_mark();
            record(last);
            finish(last);
        } catch (const std::exception&) {
            M::note_lost(machine_.device());
        }
    }

private:
    /// Measured on no device yet: a call takes some microseconds, a piece of a MiB some twenty.
    static constexpr std::size_t most_calls = 4;
    static constexpr std::uint64_t call_bytes = 16384;

    M machine_;
    typename M::stream stream_;
    buffer slots_{};  ///< one for each place, where kernels scatter from
};

}  // namespace weightwire::ucx
