#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
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
#include <weightwire/backends/nccl/transport_message.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/shared_memory_copy.hpp>
#include <weightwire/nccl_api/element.hpp>
#include <weightwire/plan/broadcast_plan.hpp>
#include <weightwire/wire/vllm_nccl.hpp>

/// @file
/// The trainer's half of `nccl`.

namespace weightwire::nccl {

/// Rank 0 of the group: broadcasts every tensor, packed or one by one.
///
/// Packed, the host only queues: a chunk is gathered on one stream while the chunk before it
/// travels on the other, and the host waits once, at the end of the part. What makes it wait
/// earlier is a source that takes its memory back after each tensor and names no stream to which
/// that could be left.
///
/// After any failure the group is gone and the sender needs `prepare` and `open` again.
template <Machinery M>
class basic_sender {
public:
    explicit basic_sender(const trainer_init_info& info) : info_{info} {}
    basic_sender(const basic_sender&) = delete;
    basic_sender& operator=(const basic_sender&) = delete;
    /// Aborts the group; waits for no rank.
    ~basic_sender() { abandon(); }

    /// Plans the round, allocates the buffers and tables, and makes the id by which ranks meet.
    /// Waits for nobody. May be called again: what was open before is aborted.
    /// @throws usage_error values out of bounds, or a group without workers.
    /// @throws data_error, unsupported_error what a peer cannot take; names the tensor.
    /// @throws resource_error no memory, the store's port is taken, or an earlier group of this
    /// process on this device was lost.
    [[nodiscard]] std::vector<transport_init> prepare(const sender_context& context);

    /// Joins as rank 0 and warms up. Blocks until every rank has joined, so it runs beside the init
    /// call.
    /// @throws what `communicator::join` throws.
    void open(deadline until, const std::stop_token& stop);

    /// The plan's calls.
    [[nodiscard]] std::span<const update_part> parts() const noexcept { return parts_; }

    /// Returns when the part has been sent and the source's memory is no longer needed.
    /// @throws usage_error not open. @throws data_error a stable source's tensor moved.
    /// @throws unsupported_error a layout that is not moved. @throws peer_error a rank is gone.
    /// @throws timeout_error, cancelled_error, and what the source throws.
    void send(std::uint64_t round, std::size_t part, tensor_stream& stream, deadline until,
              std::stop_token stop);

    /// What was chosen, and the device memory that it costs.
    [[nodiscard]] std::string description() const;
    /// Device memory of the buffers, in bytes; known after `prepare`.
    [[nodiscard]] std::uint64_t allocated_bytes() const noexcept {
        return gear_ ? gear_->buffer_bytes() : 0;
    }
    /// Device memory of the tables that say where tensors lie.
    [[nodiscard]] std::uint64_t table_bytes() const noexcept {
        return gear_ && gear_->tables ? gear_->tables->table_bytes() : 0;
    }
    /// Where vLLM's ranks meet; 0 without a store.
    [[nodiscard]] std::uint16_t store_port() const noexcept { return meeting_.port(); }

    /// Aborts the group and lets go of everything.
    void close(deadline) {
        abandon();
        meeting_ = {};
    }

private:
    using gear = detail::gear<M, std::optional<typename M::gather_plan>>;
    static constexpr std::size_t no_group = std::numeric_limits<std::size_t>::max();

    /// A part under way.
    struct sending {
        tensor_stream& stream;
        const plan::broadcast_call& call;
        deadline until;
        std::stop_token stop;
        std::size_t position = 0;        ///< in the manifest, of the tensor under way
        void* pending = nullptr;         ///< stream of gathered tensors not yet waited for
        std::uint64_t queued_bytes = 0;  ///< given to the group
    };

    void choose_plan(const sender_context& context);
    void adopt_source(const sender_context& context);
    void require_sendable() const;
    void make_gather();
    void make_ways();
    void make_parts();
    [[nodiscard]] std::string transport_text() const;
    void walk_ahead(sending& at);
    [[nodiscard]] named_tensor take(sending& at, std::size_t position);
    void check_stable(const named_tensor& entry, const sending& at) const;
    void send_packed(std::size_t first_group, sending& at);
    void send_unpacked(sending& at);
    void send_chunk(const plan::packed_chunk& chunk, std::size_t group,
                    detail::rotating_buffer<M>& buffer, sending& at);
    void send_one(const named_tensor& entry, sending& at);
    void send_staged(const named_tensor& entry, sending& at);
    void place(const named_tensor& entry, std::byte* to, sending& at);
    void give_back(const named_tensor& entry, typename M::stream& reader, sending& at);
    void follow_pending(sending& at);
    void await_producer(void* producer, sending& at);
    /// Before the part's first broadcast nothing is held up by a gather.
    [[nodiscard]] static copy_pace pace_of(const sending& at) noexcept {
        return at.queued_bytes == 0 ? copy_pace::full : copy_pace::beside_broadcast;
    }
    [[nodiscard]] bool is_near(const tensor_view& tensor) const noexcept {
        return tensor.device().kind == M::near_memory &&
               tensor.device().index == machine_->device();
    }
    [[nodiscard]] nccl_api::element element_for(const param_meta& parameter) const noexcept {
        return to_vllm_ ? nccl_api::element_of(parameter.dtype).value_or(nccl_api::element::uint8)
                        : nccl_api::element::uint8;
    }
    [[nodiscard]] error_context context_of(const sending& at) const;
    void abandon() noexcept {
        gear::end(std::move(gear_));
        gear_ = nullptr;
    }

    trainer_init_info info_;
    std::optional<M> machine_;
    const manifest* parameters_ = nullptr;
    int world_size_ = 0;
    bool to_vllm_ = false;
    bool stable_ = false;
    std::optional<plan::broadcast_plan> plan_;
    std::vector<update_part> parts_;
    std::vector<tensor_view> tensors_;     ///< of a stable source
    std::uint64_t largest_ = 0;            ///< bytes of the largest tensor
    std::vector<unsigned char> gathered_;  ///< packed: whether its chunk's gather brings the tensor
    std::vector<std::size_t> own_groups_;  ///< unpacked: of the table, what gathers it; or no_group
    std::vector<std::size_t> first_groups_;  ///< of each call, packed
    wire::unique_id id_{};
    meeting meeting_;
    std::unique_ptr<gear> gear_;
};

}  // namespace weightwire::nccl

#include <weightwire/backends/nccl/sender_impl.hpp>
#include <weightwire/backends/nccl/sender_setup_impl.hpp>
