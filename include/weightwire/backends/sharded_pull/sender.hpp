#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/backends/sharded_pull/control_server.hpp>
#include <weightwire/backends/sharded_pull/init_info.hpp>
#include <weightwire/backends/sharded_pull/owner_desk.hpp>
#include <weightwire/backends/sharded_pull/staging.hpp>
#include <weightwire/backends/sharded_pull/transport_message.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/plan/ownership.hpp>

/// @file
/// A trainer rank's half of `sharded_pull`.

namespace weightwire::sharded_pull {

/// Serves what this rank holds to the worker ranks whose plans name it.
///
/// What lies in exportable memory of a source with stable addresses is read in place: in a round
/// this half only looks whether it is still where it was. Everything else is packed into the arena
/// as the source yields it, chunk by chunk and for each reader what it takes; the source goes on
/// when every reader's share of a tensor has been packed, so it is ahead of the readers by what the
/// arena holds, and no further. What the workers of a node take alike is packed once for all of
/// them, and one of them takes it, where the fabric has another for within a node.
///
/// A thread serves the control connections from init on: a worker comes back whenever it likes.
template <PullFabric Fabric>
class basic_sender {
public:
    using init_info = basic_trainer_init_info<Fabric>;

    explicit basic_sender(const init_info& info) : info_{info} {}
    basic_sender(const basic_sender&) = delete;
    basic_sender& operator=(const basic_sender&) = delete;
    /// Tells waiting workers that the trainer is gone; waits for nobody.
    ~basic_sender() { let_go("the trainer rank has ended"); }

    /// On every rank of a trainer of several: exports memory and opens the control port.
    /// @returns text for rank 0.
    /// @throws usage_error values out of bounds. @throws resource_error no memory or no port.
    [[nodiscard]] std::string export_memory(const sender_context& context);
    /// Rank 0: what every peer must know of all ranks.
    /// @throws coverage_error nobody holds a parameter; names the first.
    /// @throws unsupported_error a peer that is not ours. @throws as `export_memory`.
    [[nodiscard]] std::vector<transport_init> prepare(const sender_context& context);
    /// Rank 0: until every worker rank has said what it reads, and was told from whom.
    /// @throws timeout_error names one that did not. @throws cancelled_error, and what routing
    /// throws.
    void open(deadline until, const std::stop_token& stop) {
        connect_ranks(until, stop);
        desk_->await_routed(until, stop);
    }
    /// Rank 0, after `prepare`, and the other ranks: the ranks behind each peer, and what each rank
    /// was understood to hold.
    [[nodiscard]] std::string shared_plan() const { return plan_; }
    /// @throws mismatch_error rank 0 knows other things of this rank than it has exported.
    void adopt_plan(std::string_view text);

    [[nodiscard]] std::span<const update_part> parts() const noexcept { return {&part_, 1}; }

    /// Looks whether a stable source's tensors are where they were.
    /// @throws data_error one moved, or was not held before.
    void stage(std::uint64_t round, std::size_t part, tensor_stream& stream, deadline until,
               std::stop_token stop);
    /// Packs what is not read in place, and returns when every reader that is still in the round
    /// has taken it. A reader that was silent for half of the time is let go.
    /// @throws what the source throws; unsupported_error weights in memory that the fabric does not
    /// stage; timeout_error names a worker rank that was too slow; cancelled_error.
    void send(std::uint64_t round, std::size_t part, tensor_stream& stream, deadline until,
              std::stop_token stop);

    /// From now on no rank of `peer` is waited for. Thread-safe.
    void drop_peer(std::size_t peer) noexcept {
        if (desk_) {
            desk_->drop(peer);
            tell_ranks(peer);
        }
    }
    void restore_peer(std::size_t peer) noexcept {
        if (desk_) {
            desk_->restore(peer);
        }
    }

    /// What was chosen and why, and the exportable memory that it costs.
    [[nodiscard]] std::string description() const;
    /// Exportable memory that this rank allocated, in bytes.
    [[nodiscard]] std::uint64_t allocated_bytes() const noexcept { return arena_.size(); }

    void close(deadline) { let_go("the trainer has ended the transfer"); }

private:
    /// Whether the fabric's devices pack, and not the processor.
    static constexpr bool packs = HasFabricPacking<typename Fabric::owner>;

    /// What is packed for one taker of the desk: where it stands in this round.
    struct lane {
        std::size_t taker = 0;
        std::vector<staged_chunk> chunks{};
        std::size_t chunk = 0;                        ///< under way
        std::size_t read = 0;                         ///< of it, next
        std::optional<owner_desk::held_slot> slot{};  ///< of it, once it has one
    };

    void export_places(const sender_context& context, rank_export& made);
    [[nodiscard]] error_context at_init(std::string tensor = {}) const {
        return {.phase = phase::init,
                .tensor = std::move(tensor),
                .backend = "sharded_pull",
                .rank = info_.rank};
    }
    [[nodiscard]] error_context at_update(std::size_t position) const {
        return {.phase = phase::update,
                .tensor =
                    position < parameters_->size() ? (*parameters_)[position].name : std::string{},
                .backend = "sharded_pull"};
    }
    void connect_ranks(deadline until, const std::stop_token& stop);
    void tell_ranks(std::uint64_t dropped) noexcept;
    void begin_lanes(std::uint64_t round, deadline until);
    void await_ready(void* stream, std::size_t position, deadline until,
                     const std::stop_token& stop);
    void pack_all(tensor_stream& stream, deadline until, const std::stop_token& stop);
    void pack_side_by_side(deadline until, const std::stop_token& stop);
    void pack(std::size_t position, const tensor_view& tensor, tensor_stream* stream,
              deadline until, const std::stop_token& stop);
    [[nodiscard]] bool advance(lane& at, std::size_t position, const tensor_view& tensor,
                               tensor_stream* stream, deadline until, const std::stop_token& stop);
    void pack_next(lane& at, std::size_t position, const tensor_view& tensor, tensor_stream* stream,
                   deadline until, const std::stop_token& stop);
    void pack_read(const staged_read& what, std::byte* to, std::size_t position,
                   const tensor_view& tensor, tensor_stream* stream);
    void settle(deadline until, const std::stop_token& stop);
    void come_to_rest() noexcept;
    void let_go(std::string_view why) noexcept {
        {
            const std::lock_guard lock{ranks_mutex_};
            ranks_.clear();
        }
        if (desk_) {
            desk_->abandon({.kind = "peer", .text = std::string{why}});
        }
        server_.reset();
    }

    init_info info_;
    const manifest* parameters_ = nullptr;
    bool stable_ = false;
    std::vector<tensor_view> tensors_;  ///< of a stable source
    update_part part_{};
    std::optional<typename Fabric::owner> owner_;
    typename Fabric::arena arena_;
    std::string export_;
    std::string plan_;
    std::vector<std::pair<std::size_t, fabric_export>> exported_;  ///< and a tensor in each
    std::size_t in_place_count_ = 0;
    std::uint64_t in_place_bytes_ = 0;
    std::size_t held_count_ = 0;
    std::string reason_;  ///< why the first that is not read in place is not, and its name
    std::unique_ptr<owner_desk> desk_;
    std::unique_ptr<control_server<owner_desk>> server_;
    // Rank 0, of the others. Used from threads of the client too.
    std::mutex ranks_mutex_;
    std::vector<rank_export> others_;
    std::vector<frame_socket> ranks_;
    std::uint64_t round_ = 0;
    bool unsettled_ = false;      ///< copies were begun (`HasFabricPacking`)
    std::vector<lane> lanes_;     ///< by taker; stay while the takers do
    std::size_t most_slots_ = 1;  ///< that one taker may hold
    std::vector<void*> streams_;  ///< that the source has given work to, of this round
};

}  // namespace weightwire::sharded_pull

#include <weightwire/backends/sharded_pull/sender_impl.hpp>
#include <weightwire/backends/sharded_pull/sender_pack_impl.hpp>
