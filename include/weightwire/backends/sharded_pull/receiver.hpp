#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/control_channel.hpp>
#include <weightwire/backends/sharded_pull/init_info.hpp>
#include <weightwire/backends/sharded_pull/landing.hpp>
#include <weightwire/backends/sharded_pull/run_list.hpp>
#include <weightwire/backends/sharded_pull/staging.hpp>
#include <weightwire/backends/sharded_pull/transport_message.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/update_target.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_plan.hpp>

/// @file
/// A worker rank's half of `sharded_pull`.

namespace weightwire::sharded_pull {

/// Runs the loader once, agrees with the trainer ranks on who gives what, and in each round reads
/// exactly that: straight from the trainer's tensors where they lie in memory that is exported, out
/// of packed chunks where not. Every byte that it needs crosses the fabric once, whatever number of
/// destinations it has. One thread at a time.
///
/// Over a fabric with another one for within a node, what all worker ranks of a node need alike is
/// shared out among them: each *lands* its share in memory of its own, from where all of them copy.
/// What one that has failed was to land, the others read from the trainer ranks themselves.
template <PullFabric Fabric>
class basic_receiver {
public:
    using tag = basic_backend<Fabric>;

    basic_receiver(const receiver_context& context, const tag& chosen)
        : context_{context}, chosen_{chosen} {}
    explicit basic_receiver(const receiver_context& context) : basic_receiver{context, {}} {}
    basic_receiver(const basic_receiver&) = delete;
    basic_receiver& operator=(const basic_receiver&) = delete;
    ~basic_receiver() { release(); }

    /// Plans, and agrees on the plan with every trainer rank that it names.
    /// @throws what the loader throws: what it asks for and the trainer lacks, what it leaves out.
    /// @throws mismatch_error a trainer rank refuses its part, or understands it otherwise; says
    /// on what. @throws protocol_error texts or numbers that lie. @throws peer_error a trainer rank
    /// is gone. @throws unsupported_error another fabric, or memory that it does not reach.
    /// @throws timeout_error, cancelled_error.
    void open(const transport_open& init, deadline until, const std::stop_token& stop);

    /// Reads what the plan says, and reports each parameter when all its bytes are in place.
    /// @throws peer_error a trainer rank died. @throws what a trainer rank says of its own failure.
    /// @throws unsupported_error a destination that cannot be written in place: bounced, or not
    /// contiguous. @throws timeout_error names the trainer rank that is waited for;
    /// cancelled_error.
    void receive(const update_message& message, update_target& target, deadline until,
                 std::stop_token stop);

    /// Lets go of everything of the trainer's. What it landed in it keeps, until another trainer's
    /// init. May wait for aborts as long as the fabric bounds them (`HasFabricRest`; over NCCL
    /// `pull_options::abort_time`).
    void release() noexcept;
    /// May be opened again after it.
    static constexpr bool reopens = true;
    /// Whether a read could not be ended, and may write at any later time.
    [[nodiscard]] bool lost() const noexcept {
        if constexpr (HasFabricLoss<typename node::reader>) {
            if (node_ && node_->reader().lost()) {
                return true;
            }
        }
        if constexpr (HasFabricLoss<typename Fabric::reader>) {
            return lost_ || (fabric_ && fabric_->lost());
        } else {
            return lost_;
        }
    }

    /// What was agreed on.
    [[nodiscard]] std::string description() const;
    /// Bytes that a round reads from a trainer rank, as planned.
    [[nodiscard]] std::uint64_t bytes_from(int trainer_rank) const {
        return plan_.bytes_from(trainer_rank);
    }

private:
    using memory = typename Fabric::memory;
    using node = typename detail::within_node<Fabric>::type;

    /// A trainer rank that the plan names.
    struct owner_link {
        int rank = 0;
        frame_socket socket{};
        std::optional<typename Fabric::connection> connection{};
        std::deque<memory> memories{};  ///< of the places, by index; only those that are read
        std::vector<const memory*> memory_of{};
        std::vector<const exported_place*> place_of{};  ///< by position; null: staged
        std::vector<unsigned char> in_place{};
        std::optional<memory> arena{};
        std::size_t staged = 0;  ///< chunks of a round
        std::size_t left = 0;    ///< of them, of the round under way
        bool confirmed = false;  ///< of the round under way
    };
    /// By which way a unit comes.
    enum class way : unsigned char {
        own,     ///< this rank reads it from the owner
        landed,  ///< and lands it for its node peers
        peer     ///< a node peer lands it; from the owner where that one fails
    };
    /// A chunk of the plan, or several of a section that are read in place.
    struct unit {
        std::size_t owner = 0;    ///< index in `owners_`
        std::size_t section = 0;  ///< of the plan
        std::uint32_t part_section = 0;
        std::uint32_t chunk = 0;  ///< the first
        std::uint32_t chunks = 1;
        bool in_place = false;
        way by = way::own;
        std::size_t landing = 0;                  ///< landing slot, where it is `landed`
        std::vector<std::size_t> destinations{};  ///< positions that it writes to, each once
    };
    /// Reads for one set of destinations: a sink that flips has two.
    struct read_table {
        std::vector<std::byte*> addresses{};
        std::vector<typename Fabric::read> reads{};     ///< one a unit; to its landing slot
                                                        ///< where it is `landed`
        std::vector<typename node::read> node_reads{};  ///< one a unit; out of landing memory
        std::vector<std::uint64_t> bytes{};             ///< of each
    };
    /// A unit on its way.
    struct active_unit {
        std::size_t index = 0;
        chunk_body published{};
        bool in_node = false;  ///< out of landing memory
    };
    /// An update under way.
    struct receiving {
        update_target& target;
        read_table& table;
        std::uint64_t round = 0;
        deadline until;
        std::stop_token stop;
        std::size_t left = 0;                ///< units
        std::size_t next = 0;                ///< in `order_`, of the units that are read in place
        deadline::clock::time_point told{};  ///< when it last said that it waits
    };

    /// Units under way at once: enough to keep a wire busy, few enough to report early.
    static constexpr std::size_t most_active = 8;
    /// What is read in place passes through no buffer: the chunks' size does not bind it, and a
    /// device wants few large launches.
    static constexpr std::uint64_t in_place_unit_bytes = std::uint64_t{1} << 30U;

    /// Between two words that a chunk waits for landing memory.
    static constexpr std::chrono::milliseconds between_words{100};

    void find_plan(frame_socket& first, const plan::ownership& owners,
                   const plan::pull_needs& needs, deadline until, const std::stop_token& stop);
    /// Why a rank shares nothing with its node peers.
    struct peer_fault {
        std::string why{};
        int worker = -1;  ///< whose memory it cannot open, from 0; else nobody's
    };
    [[nodiscard]] peer_fault meet_peers(frame_socket& first, deadline until,
                                        const std::stop_token& stop);
    void place_landings();
    [[nodiscard]] bool lands(const plan::pull_section& section) const {
        return section.ingester != plan::no_ingester && section.ingester == plan_.worker();
    }
    [[nodiscard]] frame_socket connect(int rank, deadline until, const std::stop_token& stop) const;
    void make_units(const manifest& parameters);
    void open_memories(owner_link& link, deadline until, const std::stop_token& stop);
    void agree(owner_link& link, deadline until, const std::stop_token& stop);
    [[nodiscard]] read_table& table_for(update_target& target, deadline until);
    void add_read(const unit& what, read_table& table);
    template <class Memory, class Place>
    [[nodiscard]] detail::run_list<Memory> runs_of(const unit& what, const read_table& table,
                                                   bool sorted, Place place) const;
    void start_units(receiving& at);
    void finish_units(receiving& at);
    void finish(const active_unit& done, receiving& at);
    void listen(receiving& at, std::chrono::milliseconds wait);
    void take_frames(owner_link& link, receiving& at);
    void take_arrived(owner_link& link, receiving& at);
    [[nodiscard]] unit* unit_of(const owner_link& link, const chunk_body& what);
    void take_published(owner_link& link, const chunk_body& what, receiving& at);
    void take_passed(owner_link& link, const chunk_body& what, receiving& at);
    void take_released(owner_link& link, const chunk_body& what, receiving& at);
    void start_landing(std::size_t index, const chunk_body& what, receiving& at);
    void finish_landing(const active_unit& done, receiving& at);
    void tell_waiting(receiving& at);
    [[nodiscard]] error_context awaited(const receiving& at) const;
    void cancel_active() noexcept;
    void await_confirmations(receiving& at);
    [[nodiscard]] error_context at_phase(phase where, int trainer_rank = -1) const {
        return {.phase = where,
                .peer = trainer_rank < 0 ? std::string{}
                                         : "trainer rank " + std::to_string(trainer_rank),
                .backend = "sharded_pull",
                .rank = context_.global_rank};
    }

    receiver_context context_;
    tag chosen_;
    std::optional<typename Fabric::reader> fabric_;  ///< while open
    const manifest* parameters_ = nullptr;
    const manifest* destinations_ = nullptr;
    std::uint64_t chunk_bytes_ = 0;  ///< most that a chunk may have
    std::uint64_t slot_bytes_ = 0;
    transport_message message_;
    plan::worker_plan plan_;
    std::optional<node_landing<node>> node_;    ///< where the plan shares something with node peers
    std::optional<landing_memory<node>> kept_;  ///< what it landed in before; not while open
    bool lost_ = false;                         ///< before the last release
    std::string alone_;                         ///< why it shares nothing, where it might
    frame_socket first_{};  ///< to rank 0 where that owns nothing of the plan: it is to know that
                            ///< this rank is there
    std::deque<owner_link> owners_;
    std::vector<unit> units_;
    std::vector<std::size_t> order_;     ///< of the units that are read in place
    std::vector<std::size_t> pending_;   ///< units that each destination waits for, in all
    std::list<read_table> tables_;       ///< the one that was used last in front
    std::vector<std::byte*> addresses_;  ///< of the destinations that the sink gives now
    // Of the round under way.
    std::vector<std::size_t> waiting_;        ///< units that each destination waits for
    std::vector<owner_traffic> traffic_;      ///< one an owner
    std::vector<node_traffic> node_traffic_;  ///< one a node peer
    std::vector<unsigned char> begun_;        ///< one a unit
    std::vector<active_unit> active_;
    std::vector<pollfd> polled_;
    read_table* active_table_ = nullptr;
};

}  // namespace weightwire::sharded_pull

#include <weightwire/backends/sharded_pull/receiver_impl.hpp>
#include <weightwire/backends/sharded_pull/receiver_node_impl.hpp>
#include <weightwire/backends/sharded_pull/receiver_setup_impl.hpp>
