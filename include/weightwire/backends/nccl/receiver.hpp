#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/backends/nccl/byte_runs.hpp>
#include <weightwire/backends/nccl/gear.hpp>
#include <weightwire/backends/nccl/init_info.hpp>
#include <weightwire/backends/nccl/lost_group.hpp>
#include <weightwire/backends/nccl/machinery.hpp>
#include <weightwire/backends/nccl/meeting.hpp>
#include <weightwire/backends/nccl/scatter_tables.hpp>
#include <weightwire/backends/nccl/transport_message.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/update_target.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/shared_memory_copy.hpp>
#include <weightwire/gpu/lost_devices.hpp>
#include <weightwire/nccl_api/element.hpp>
#include <weightwire/plan/broadcast_plan.hpp>
#include <weightwire/rendezvous/tcp_store_client.hpp>
#include <weightwire/wire/vllm_nccl.hpp>

/// @file
/// A worker rank's half of `nccl`.

namespace weightwire::nccl {

/// Takes part in the trainer's broadcasts and brings the bytes to the sink's destinations: on this
/// device by one scatter a chunk, or received in place where that is possible; in host memory
/// through a small pinned buffer. A parameter that the sink does not want is received and dropped.
///
/// Takes every dtype, scalars, and tensors at any offset: bytes are copied, never reinterpreted.
/// Destinations that exist only around their writes have to be in host memory. One thread at a
/// time.
template <Machinery M>
class basic_receiver {
public:
    /// @param chosen which copy of NCCL is used.
    explicit basic_receiver(const receiver_context& context, const backend& chosen = {})
        : context_{context}, library_{chosen.library} {}
    basic_receiver(const basic_receiver&) = delete;
    basic_receiver& operator=(const basic_receiver&) = delete;
    ~basic_receiver() { release(); }

    /// Joins the group that the trainer names. A native trainer's NCCL version and settings are
    /// compared first, so that a difference is an error and no hang.
    /// @throws mismatch_error they differ, or the world size does; nothing has blocked.
    /// @throws protocol_error a text that is none, or a store that holds no id.
    /// @throws timeout_error, peer_error, cancelled_error the store or the join.
    /// @throws resource_error an earlier group of this process on this device was lost.
    void open(const transport_open& init, deadline until, const std::stop_token& stop);

    /// Looks at all destinations of an update call and takes all memory that it needs, before the
    /// first broadcast: what cannot be written, and memory that there is not, hold up no other rank
    /// in the middle. `receive` does it itself where that was not done.
    /// @throws unsupported_error a destination that cannot be written from here, by name.
    /// @throws mismatch_error, protocol_error as `receive`.
    void prepare(const update_message& message, update_target& target, deadline until,
                 const std::stop_token& stop);
    /// Receives one update call.
    /// @throws mismatch_error its parameters are not the plan's. @throws session_error no open
    /// group. @throws protocol_error fields that lie. @throws peer_error the trainer is gone.
    /// @throws timeout_error, cancelled_error, and what `prepare` and the target throw.
    void receive(const update_message& message, update_target& target, deadline until,
                 std::stop_token stop);

    /// Aborts the group and lets go of everything. Waits for no rank.
    void release() noexcept {
        gear::end(std::move(gear_));
        gear_ = nullptr;
        plan_.reset();
        store_.reset();
        parameters_ = nullptr;
        named_ = {};
        at_init_.reset();
        prepared_.reset();
    }
    /// Whether memory on this device may be written at any later time: an abort did not return, of
    /// this group or another one of the process.
    [[nodiscard]] bool lost() const noexcept { return gpu::lost_devices::has(context_.device); }

    /// What was joined and what it costs.
    [[nodiscard]] std::string description() const;
    /// Device memory of the buffers, in bytes.
    [[nodiscard]] std::uint64_t allocated_bytes() const noexcept {
        return gear_ ? gear_->buffer_bytes() : 0;
    }
    /// Device memory of the tables that say where tensors go. They are made when destinations are
    /// first seen, so in the first two rounds of a sink that alternates between two places.
    [[nodiscard]] std::uint64_t table_bytes() const noexcept {
        return gear_ ? gear_->tables.table_bytes() : 0;
    }

private:
    using gear = detail::gear<M, detail::scatter_tables<M>>;

    /// An update under way.
    struct receiving {
        update_target& target;
        const plan::broadcast_call& call;
        std::size_t first;        ///< manifest position of the target's parameter 0
        std::size_t first_chunk;  ///< of the call, in the plan
        nccl_api::element (*type)(const param_meta&);
        deadline until;
        std::stop_token stop;
        std::size_t position = 0;  ///< in the manifest, of the parameter under way
        std::uint64_t placed_bytes = 0;
    };
    /// Parameters that are in place once an event is done: `[begin, end)` of the call's order,
    /// those that `reported_` does not have.
    struct waiting {
        std::size_t begin = 0;
        std::size_t end = 0;
    };
    /// Launches in flight before the host looks whether the first is done.
    static constexpr std::size_t most_waiting = 32;

    void open_native(const transport_open& init);
    void open_vllm(const transport_open& init, deadline until, const std::stop_token& stop);
    void fetch_id(const wire::vllm_nccl_init& init, deadline until, const std::stop_token& stop);
    void plan_for(const plan::broadcast_options& options,
                  std::optional<plan::broadcast_layout> layout);
    [[nodiscard]] std::size_t part_of(const update_message& message, const update_target& target);
    void adopt_names(const update_message& message, const update_target& target);
    void require_group() const;
    [[nodiscard]] receiving begin(std::size_t part, const update_message& message,
                                  update_target& target, deadline until,
                                  const std::stop_token& stop);
    void open_all(receiving& at);
    void look_at(std::size_t k, receiving& at);
    void plan_scatters(receiving& at);
    void receive_packed(receiving& at);
    void start_chunk(std::size_t chunk, receiving& at);
    void place_chunk(std::size_t chunk, receiving& at);
    void receive_unpacked(receiving& at);
    void receive_staged(const mutable_tensor_view& to, std::size_t k, receiving& at);
    [[nodiscard]] mutable_tensor_view open_destination(std::size_t k, receiving& at);
    [[nodiscard]] mutable_tensor_view destination(std::size_t k, receiving& at);
    void to_host(const mutable_tensor_view& to, const std::byte* from, std::size_t k,
                 receiving& at);
    void copy_runs(const mutable_tensor_view& to, const std::byte* from, receiving& at);
    void report(std::size_t k, receiving& at);
    void await(std::size_t begin, std::size_t end, typename M::stream& on, receiving& at);
    void settle_oldest(receiving& at);
    void settle_done(receiving& at);
    [[nodiscard]] bool is_near(const mutable_tensor_view& tensor) const noexcept {
        return tensor.device().kind == M::near_memory &&
               tensor.device().index == machine_->device();
    }
    [[nodiscard]] const manifest& planned() const noexcept {
        return parameters_ != nullptr ? *parameters_ : named_;
    }
    [[nodiscard]] error_context context_of(const receiving& at) const;
    [[nodiscard]] error_context at_phase(phase where) const {
        return {.phase = where, .backend = "nccl", .rank = context_.global_rank};
    }

    receiver_context context_;
    std::string library_;
    std::optional<M> machine_;
    const manifest* parameters_ = nullptr;       ///< of a native trainer
    manifest named_;                             ///< of a vLLM trainer's last call
    std::optional<wire::nccl_packing> at_init_;  ///< a vLLM trainer's
    wire::nccl_packing packing_{};
    std::optional<plan::broadcast_plan> plan_;
    std::vector<std::size_t> first_chunks_;  ///< of each call
    std::vector<std::size_t> first_positions_;
    std::uint64_t largest_ = 0;  ///< bytes of the largest parameter
    wire::unique_id id_{};
    std::optional<weightwire::rendezvous::tcp_store_client> store_;
    std::unique_ptr<gear> gear_;
    // Of the call under way; kept, so that a round allocates nothing.
    std::optional<std::size_t> prepared_;         ///< part that `prepare` has seen to
    std::vector<mutable_tensor_view> places_;     ///< in the call's order; not where bounced
    std::vector<mutable_tensor_view> scattered_;  ///< of these, the ones that a scatter writes
    std::vector<const typename M::scatter_plan*> scatters_;  ///< of each chunk, or null
    std::vector<unsigned char> reported_;
    std::array<waiting, most_waiting> waiting_{};
    std::vector<typename M::event> settled_;  ///< one a place in `waiting_`
    std::size_t oldest_ = 0;
    std::size_t waiting_count_ = 0;
};

}  // namespace weightwire::nccl

#include <weightwire/backends/nccl/receiver_impl.hpp>
#include <weightwire/backends/nccl/receiver_prepare_impl.hpp>
#include <weightwire/backends/nccl/receiver_setup_impl.hpp>
