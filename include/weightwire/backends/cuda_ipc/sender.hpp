#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/cuda_ipc/init_info.hpp>
#include <weightwire/backends/cuda_ipc/machinery.hpp>
#include <weightwire/backends/cuda_ipc/plan_cache.hpp>
#include <weightwire/backends/cuda_ipc/transport_message.hpp>
#include <weightwire/backends/cuda_ipc/waiting.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/pinned_bounce.hpp>
#include <weightwire/plan/ipc_plan.hpp>

/// @file
/// The trainer's half of `cuda_ipc`.

namespace weightwire::cuda_ipc {

/// Shows the workers where the weights are. It moves nothing but what no other process can open:
/// that is gathered into a ring, which is exported instead.
///
/// An update call is made when its tensors are valid (`stage`); its reply says that they were read.
/// So a buffer of the ring is filled again only when the call that read it has ended, and nothing
/// on the device ever waits for another process. Peers are not waited for here at all: one that
/// hangs costs the others nothing.
template <Machinery M>
class basic_sender {
public:
    explicit basic_sender(const trainer_init_info& info) : info_{info} {}
    basic_sender(const basic_sender&) = delete;
    basic_sender& operator=(const basic_sender&) = delete;
    /// Frees the ring; waits for no peer. Workers that mapped it keep its memory until they let go.
    ~basic_sender() { static_cast<void>(detail::free_when_idle(std::move(gear_))); }

    /// Exports the weights, or what was said by `export_memory` stays; plans the calls.
    /// @throws usage_error values out of bounds, or trainer ranks that differ in what they export.
    /// @throws data_error packed: a tensor does not fit a buffer; names it and the size it needs.
    /// @throws unsupported_error what a peer cannot take; names the tensor and the peer.
    /// @throws resource_error no memory for the ring.
    [[nodiscard]] std::vector<transport_init> prepare(const sender_context& context);

    /// The workers open everything inside their init call; there is nothing to join.
    void open(deadline, const std::stop_token&) {}

    [[nodiscard]] std::span<const update_part> parts() const noexcept { return parts_; }

    /// Returns when the part's tensors are valid and in place: those of the source by its streams,
    /// the others in the ring.
    /// @throws data_error a stable source's tensor moved. @throws unsupported_error a layout that
    /// is not moved. @throws timeout_error, cancelled_error, usage_error.
    void stage(std::uint64_t round, std::size_t part, tensor_stream& stream, deadline until,
               std::stop_token stop);
    /// Fills the next part's buffer while the workers read this one's.
    void send(std::uint64_t round, std::size_t part, tensor_stream& stream, deadline until,
              std::stop_token stop);

    /// Nobody is waited for here.
    void drop_peer(std::size_t /*peer*/) noexcept {}
    void restore_peer(std::size_t /*peer*/) noexcept {}

    /// Of each parameter in the last round; empty unless `verify`.
    [[nodiscard]] std::span<const std::uint64_t> digests() const noexcept { return digests_; }

    /// On every rank of a trainer of several: exports this rank's copy.
    /// @returns text for rank 0. @throws as `prepare`.
    [[nodiscard]] std::string export_memory(const sender_context& context);
    /// Rank 0, after `prepare`: what the others need to have the same parts.
    [[nodiscard]] std::string shared_plan() const;
    /// The other ranks. @throws protocol_error it is none.
    void adopt_plan(std::string_view text);

    /// What was chosen and why, and the device memory that it costs.
    [[nodiscard]] std::string description() const;
    /// Device memory of the ring, in bytes; known after `prepare`.
    [[nodiscard]] std::uint64_t allocated_bytes() const noexcept {
        return gear_ ? gear_->ring.size() : 0;
    }
    /// Device memory of the tables that say where gathered tensors lie.
    [[nodiscard]] std::uint64_t table_bytes() const noexcept {
        return gear_ == nullptr ? 0
                                : (gear_->gathers ? gear_->gathers->table_bytes() : 0) +
                                      (gear_->conversions ? gear_->conversions->table_bytes() : 0);
    }

    /// Frees the ring.
    void close(deadline) {
        static_cast<void>(detail::free_when_idle(std::move(gear_)));
        own_.reset();
        parts_.clear();
        plan_.reset();
    }

private:
    /// What the device may still use.
    struct gear_type {
        explicit gear_type(M& used)
            : machine{used}, copies{used.make_stream()}, mark{used.make_event()}, bounce{used} {}
        [[nodiscard]] bool is_idle() const { return M::is_idle(copies); }

        M& machine;
        typename M::stream copies;
        typename M::event mark;
        pinned_bounce<M> bounce;
        typename M::buffer ring{};
        std::optional<typename M::copy_plan> gathers{};
        std::optional<typename M::conversion_plan> conversions{};  ///< of tensors in short runs
        bool bounce_needed = false;  ///< a stable source has tensors in host memory
    };
    /// A part under way.
    struct staging {
        tensor_stream& stream;
        const plan::ipc_call& call;
        deadline until;
        std::stop_token stop;
        std::size_t position = 0;       ///< in the manifest, of the tensor under way
        void* pending = nullptr;        ///< stream of tensors that are not yet waited for
        std::size_t pending_since = 0;  ///< position of the first of them
        std::uint64_t staged_bytes = 0;
    };

    void export_own(const sender_context& context);
    /// Index of each allocation by base and buffer id.
    using known_allocations = std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint32_t>;
    [[nodiscard]] std::string why_staged(std::size_t i, memory_export& own,
                                         known_allocations& seen);
    void make_ring(bool all_may_pass);
    void choose_plan(std::optional<plan::broadcast_layout> layout);
    void adopt_others(const sender_context& context);
    void make_gathers();
    void make_parts();
    [[nodiscard]] std::string transport_text() const;
    [[nodiscard]] std::vector<vllm_form> forms_for(const peer_info& peer) const;
    [[nodiscard]] std::vector<std::string> vllm_bodies(const plan::ipc_call& call) const;

    void stage_part(std::size_t part, tensor_stream& stream, deadline until,
                    const std::stop_token& stop);
    [[nodiscard]] bool may_fill_ahead(std::size_t part) const noexcept;
    void walk_ahead(staging& at);
    [[nodiscard]] named_tensor take(staging& at, std::size_t position);
    void check_stable(const named_tensor& entry, const staging& at) const;
    void place_in_ring(const named_tensor& entry, std::byte* to, staging& at);
    void note_pending(void* producer, staging& at);
    void await_pending(staging& at);
    void require_current();
    void wait_for(typename M::event& point, const staging& at);
    void digest_part(const plan::ipc_call& call, const staging& at);

    [[nodiscard]] bool is_near(const tensor_view& tensor) const noexcept {
        return tensor.device().kind == M::near_memory &&
               tensor.device().index == machine_->device();
    }
    [[nodiscard]] std::byte* ring_at(const plan::ipc_call& call, std::size_t k) const noexcept {
        return gear_->ring.data() + call.buffer * slot_bytes_ + call.offsets[k];
    }
    [[nodiscard]] error_context context_of(const staging& at) const;
    [[nodiscard]] error_context at_init(std::string tensor = {}) const {
        return {.phase = phase::init, .tensor = std::move(tensor), .backend = "ipc"};
    }

    trainer_init_info info_;
    std::optional<M> machine_;
    const manifest* parameters_ = nullptr;
    bool stable_ = false;
    bool to_vllm_ = false;
    bool may_split_ = true;
    std::vector<tensor_view> tensors_;    ///< of a stable source
    std::optional<memory_export> own_;    ///< this rank's
    std::vector<memory_export> exports_;  ///< of all ranks, on rank 0
    std::vector<unsigned char> staged_;   ///< one a parameter, not 0: passes through the ring
    std::size_t staged_count_ = 0;
    std::string reason_;  ///< why the first of them does, and its name
    std::uint64_t slot_bytes_ = 0;
    std::size_t slots_ = 0;
    bool packed_ = false;  ///< as planned: asked for, or towards vLLM because some are staged
    std::optional<plan::ipc_plan> plan_;
    std::vector<update_part> parts_;
    std::unique_ptr<gear_type> gear_;
    std::vector<std::uint64_t> digests_;
    std::vector<tensor_view> digested_;  ///< of a part; kept, so that a round allocates nothing
    std::vector<std::uint64_t> digests_of_part_;
    std::uint64_t round_ = 0;
    std::size_t next_part_ = 0;  ///< the first that was not staged in this round
};

}  // namespace weightwire::cuda_ipc

#include <weightwire/backends/cuda_ipc/sender_impl.hpp>
#include <weightwire/backends/cuda_ipc/sender_setup_impl.hpp>
#include <weightwire/backends/cuda_ipc/sender_vllm_impl.hpp>
