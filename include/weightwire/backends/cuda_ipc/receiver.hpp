#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/backends/cuda_ipc/machinery.hpp>
#include <weightwire/backends/cuda_ipc/plan_cache.hpp>
#include <weightwire/backends/cuda_ipc/transport_message.hpp>
#include <weightwire/backends/cuda_ipc/waiting.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/update_target.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/pinned_bounce.hpp>
#include <weightwire/gpu/lost_devices.hpp>
#include <weightwire/wire/ipc_handles.hpp>

/// @file
/// A worker rank's half of `cuda_ipc`.

namespace weightwire::cuda_ipc {

/// Reads the trainer's memory through mappings and writes the sink's destinations directly: many
/// tensors a launch, one pass over the bytes, nothing staged. Tensors of any strides on both sides.
/// Destinations in host memory are filled through a small pinned buffer. One thread at a time.
template <Machinery M>
class basic_receiver {
public:
    explicit basic_receiver(const receiver_context& context) : context_{context} {}
    basic_receiver(const basic_receiver&) = delete;
    basic_receiver& operator=(const basic_receiver&) = delete;
    ~basic_receiver() { release(); }

    /// Opens what the trainer names, after checking all of it. A vLLM trainer names nothing yet.
    /// @throws protocol_error a text, size or handle that lies; says in what.
    /// @throws peer_error the trainer is gone. @throws unsupported_error another machine, or a
    /// device that this one cannot reach.
    /// @throws resource_error earlier work on this device could not be ended.
    /// @throws timeout_error, cancelled_error between two allocations.
    void open(const transport_open& init, deadline until, const std::stop_token& stop);

    /// Copies one update call's tensors; every one of them was valid when the call was made.
    /// @throws mismatch_error the target's parameters, or a destination's size, are not the
    /// trainer's. @throws protocol_error fields or handles that lie. @throws unsupported_error a
    /// destination that cannot be written from here. @throws timeout_error, cancelled_error, and
    /// what the target throws.
    void receive(const update_message& message, update_target& target, deadline until,
                 std::stop_token stop);

    /// Lets go of the trainer's memory.
    void release() noexcept;
    /// Whether memory on this device may be written at any later time: copies could not be ended.
    [[nodiscard]] bool lost() const noexcept { return gpu::lost_devices::has(context_.device); }

    /// What was opened.
    [[nodiscard]] std::string description() const;
    /// Device memory of the tables that say what is copied where. They are made when destinations
    /// are first seen, so in the first two rounds of a sink that alternates between two places.
    [[nodiscard]] std::uint64_t table_bytes() const noexcept {
        return gear_ ? gear_->copy_plans.table_bytes() + gear_->conversion_plans.table_bytes() : 0;
    }

private:
    /// Launches in flight before the host looks whether the first is done.
    static constexpr std::size_t most_waiting = 32;
    /// Bytes of a launch: few launches, and yet the first begins before the last is known.
    static constexpr std::uint64_t least_launch_bytes = std::uint64_t{64} << 20U;
    static constexpr std::uint64_t launches_a_call = 16;

    /// What the device may still use.
    struct gear_type {
        explicit gear_type(M& used)
            : machine{used}, copies{used.make_stream()}, mark{used.make_event()}, bounce{used} {
            for (auto& each : settled) {
                each.emplace(used.make_event());
            }
        }
        [[nodiscard]] bool is_idle() const { return M::is_idle(copies); }

        M& machine;
        typename M::stream copies;
        typename M::event mark;
        pinned_bounce<M> bounce;
        detail::plan_cache<byte_move, typename M::copy_plan> copy_plans;
        detail::plan_cache<conversion, typename M::conversion_plan> conversion_plans;
        std::vector<typename M::mapping> mappings{};
        std::array<std::optional<typename M::event>, most_waiting> settled{};
    };
    /// An update under way.
    struct receiving {
        update_target& target;
        deadline until;
        std::stop_token stop;
        std::size_t first = 0;  ///< native: manifest position of the target's parameter 0
        std::size_t index = 0;  ///< in the target, of the parameter under way
        std::uint64_t placed_bytes = 0;
    };
    /// Parameters that are in place once an event is done: `[begin, end)` of the target, those that
    /// `reported_` does not have.
    struct waiting {
        std::size_t begin = 0;
        std::size_t end = 0;
    };

    void open_native(const transport_open& init, deadline until, const std::stop_token& stop);
    [[nodiscard]] const memory_export& choose_export(const transport_message& message);
    void open_vllm(const transport_open& init);
    [[nodiscard]] std::span<const tensor_view> vllm_sources(const update_message& message,
                                                            receiving& at);
    [[nodiscard]] const std::byte* open_foreign(const wire::ipc_tensor& tensor, std::uint64_t bytes,
                                                receiving& at);
    void await_foreign(const wire::ipc_tensor& tensor, receiving& at);
    void let_go_of_foreign() noexcept;
    void map_places(const transport_message& message, const memory_export& chosen);
    [[nodiscard]] tensor_view view_of(std::size_t i, const typename M::mapping& in,
                                      std::uint64_t offset,
                                      std::span<const std::int64_t> strides) const;
    [[nodiscard]] std::span<const tensor_view> sources_of(const update_message& message,
                                                          receiving& at);
    void copy_all(std::span<const tensor_view> sources, receiving& at);
    void copy_one_by_one(std::span<const tensor_view> sources, receiving& at);
    [[nodiscard]] mutable_tensor_view open_destination(const tensor_view& from, receiving& at);
    void add(const mutable_tensor_view& to, const tensor_view& from, const receiving& at);
    void launch_added();
    void launch(std::size_t begin, std::size_t end, receiving& at);
    void to_host(const mutable_tensor_view& to, const tensor_view& from, receiving& at);
    void report(std::size_t i, receiving& at);
    void settle_oldest(receiving& at);
    void settle_done(receiving& at);
    void come_to_rest() noexcept;
    void wait_for(typename M::event& point, const receiving& at);
    [[nodiscard]] device here() const noexcept { return {M::near_memory, machine_->device()}; }
    [[nodiscard]] error_context context_of(const receiving& at) const;
    [[nodiscard]] error_context at_phase(phase where, std::string tensor = {}) const {
        return {.phase = where,
                .tensor = std::move(tensor),
                .backend = "ipc",
                .rank = context_.global_rank};
    }

    receiver_context context_;
    std::optional<M> machine_;
    const manifest* parameters_ = nullptr;  ///< of a native trainer
    std::vector<std::size_t> call_begins_;
    std::vector<tensor_view> sources_;  ///< native: of all parameters; vLLM: of the call
    std::string chosen_;                ///< which export, and why
    std::unique_ptr<gear_type> gear_;
    // Of a vLLM trainer.
    std::optional<bool> packed_at_init_;
    std::map<std::string, std::size_t, std::less<>> opened_;  ///< handle to index of its mapping
    /// torch's counters of the exports of the call: the slots in each file.
    std::map<std::string, std::vector<std::uint64_t>> counters_;
    std::optional<std::array<std::byte, wire::ipc_handle_bytes>> last_event_;  ///< waited for
    // Of the call under way; kept, so that a round allocates nothing.
    std::vector<byte_move> moves_;
    std::vector<conversion> conversions_;
    std::vector<unsigned char> reported_;
    std::array<waiting, most_waiting> waiting_{};
    std::size_t oldest_ = 0;
    std::size_t waiting_count_ = 0;
};

}  // namespace weightwire::cuda_ipc

#include <weightwire/backends/cuda_ipc/receiver_impl.hpp>
#include <weightwire/backends/cuda_ipc/receiver_setup_impl.hpp>
#include <weightwire/backends/cuda_ipc/receiver_vllm_impl.hpp>
