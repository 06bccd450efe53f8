#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/detail/socket.hpp>
#include <weightwire/fabrics/nccl/ended_pairs.hpp>
#include <weightwire/fabrics/nccl/interfaces.hpp>
#include <weightwire/fabrics/nccl/pair_machinery.hpp>
#include <weightwire/fabrics/nccl/pair_wire.hpp>
#include <weightwire/fabrics/nccl/pull_options.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/gpu/lost_devices.hpp>

/// @file
/// The reads of one reader: which receives are posted when, what is asked for, and what is laid
/// out.
///
/// An *exchange* is what the reads that wait need of pairs that are at rest: for each pair one NCCL
/// group of receives. Then, pair by pair, once its receives are in the pair's stream, the trainer
/// rank is asked for exactly these bytes. A trainer rank sends for all pairs that have asked, one
/// NCCL group a pair.
///
/// Why nobody waits in a circle: a send begins only when the receive that it meets is in its stream
/// already (that of a pair's trial, when it has been posted: `bring`), and every kernel that is in
/// a stream comes to run, since each pair has a stream of its own and no more pairs are under way
/// than the device holds blocks of at once, whatever else it does (`most_pairs_at_once`). So what a
/// kernel waits for runs or is about to, on both sides, and no order among pairs has to be agreed
/// on.
///
/// One exchange is in flight a device: the next begins when it has ended. The one exception bounds
/// what a hung peer costs the others: an exchange whose pairs have partly ended waits `linger` for
/// the rest, which then stay under way beside the next. They count among those that the device
/// holds at once.
///
/// Groups do not span pairs: NCCL fails every communicator of a group with the first, and these
/// need nothing of each other.
///
/// Destinations are written by one kernel out of a place, never by NCCL. So a read that was given
/// up writes nothing once it was cancelled, however long its pair's abort takes; the place is used
/// again when that has returned. The pass over the device's own memory costs little beside a wire.

namespace weightwire::nccl {

template <PairMachinery M>
class pull_exchange;
template <PairMachinery M>
struct pull_read;

/// Places that a pair's kernels may write to, until its abort has returned if it is aborted.
struct held_places {
    static constexpr std::size_t most = 16;
    std::array<std::size_t, most> index{};
    std::size_t count = 0;
};

/// A pair with one trainer rank.
template <PairMachinery M>
struct pull_link {
    enum class stage : std::uint8_t { rest, posting, receiving };

    std::string peer{};    ///< `host:port`
    std::uint64_t id = 0;  ///< of the owner
    pair_socket socket{};
    typename M::pair pair{};
    stage at = stage::rest;
    failure failed{};  ///< set once it is lost
    ask_frame ask{};
    std::vector<pair_piece> pieces{};
    std::vector<pull_read<M>*> reads{};  ///< that the exchange brings
    held_places places{};                ///< in which they land
    std::uint64_t measured = 0;          ///< device memory that it took
};

/// An arena of a trainer rank.
template <PairMachinery M>
class pull_memory {
public:
    pull_memory(std::shared_ptr<pull_link<M>> of, std::uint64_t number, std::uint64_t size) noexcept
        : of_{std::move(of)}, number_{number}, size_{size} {}
    [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
    [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
    [[nodiscard]] const std::shared_ptr<pull_link<M>>& of() const noexcept { return of_; }

private:
    std::shared_ptr<pull_link<M>> of_;
    std::uint64_t number_;
    std::uint64_t size_;
};

/// One read.
template <PairMachinery M>
struct pull_read {
    enum class stage : std::uint8_t { rest, waiting, receiving, laying };
    /// Bytes that lie together in the arena, and where they land.
    struct part {
        std::uint64_t offset = 0;
        std::uint64_t bytes = 0;
        std::uint64_t landed = 0;  ///< in the place
    };

    std::shared_ptr<pull_exchange<M>> by{};
    std::shared_ptr<pull_link<M>> from{};
    std::uint64_t arena = 0;
    std::vector<part> parts{};
    std::uint64_t bytes = 0;  ///< of the place
    std::optional<typename M::scatter_plan> scatter{};
    std::optional<typename M::event> laid{};
    std::uint64_t shift = 0;
    std::size_t place = 0;
    stage at = stage::rest;
    bool failed = false;
};

[[nodiscard]] inline error_context pull_at_init(std::string peer) {
    return {.phase = phase::init, .peer = std::move(peer), .backend = "nccl"};
}

/// Stays where it is. One thread at a time.
template <PairMachinery M>
class pull_exchange : public std::enable_shared_from_this<pull_exchange<M>> {
public:
    using link = pull_link<M>;
    using memory = pull_memory<M>;
    using state = pull_read<M>;
    using run = remote_run<memory>;

    pull_exchange(int device, const pull_options& options)
        : machine_{device},
          options_{options},
          copies_{machine_.make_stream()},
          mark_{machine_.make_event()},
          ended_{device, options.abort_time} {}
    pull_exchange(const pull_exchange&) = delete;
    pull_exchange& operator=(const pull_exchange&) = delete;

    [[nodiscard]] std::shared_ptr<link> connect(const owner_text& named, deadline until,
                                                const std::stop_token& stop);
    /// Brings a few bytes of an arena now; they are there until the next call.
    const std::byte* bring(link& from, const asked_piece& what, deadline until,
                           const std::stop_token& stop);
    void close(link& which) noexcept;
    [[nodiscard]] std::unique_ptr<state> prepare(std::span<const run> runs);
    void start(state& which, std::uint64_t shift);
    [[nodiscard]] bool done(state& which);
    void wait(state& which, deadline until, const std::stop_token& stop);
    void cancel(state& which) noexcept;
    /// The last that is heard of a read.
    void forget(state& which) noexcept {
        cancel(which);
        prepared_ -= which.parts.empty() ? 0 : 1;
    }
    /// Until every abort has returned, or has had its time.
    void come_to_rest() noexcept {
        ended_.finish([this](const held_places& held) { give_back(held); });
    }
    /// Gives up everything. False: an abort did not end, and all of this has to be left behind.
    [[nodiscard]] bool end() noexcept;

    [[nodiscard]] bool lost() const noexcept {
        return ended_.lost() || gpu::lost_devices::has(machine_.device());
    }
    [[nodiscard]] std::uint64_t measured_bytes() const noexcept {
        std::uint64_t sum = 0;
        for (const auto& each : links_) {
            sum += each->measured;
        }
        return sum;
    }
    [[nodiscard]] std::uint64_t landing_bytes() const noexcept {
        std::uint64_t sum = 0;
        for (const auto& each : places_) {
            sum += each.memory.size();
        }
        return sum;
    }
    [[nodiscard]] std::size_t link_count() const noexcept { return links_.size(); }

private:
    static constexpr std::chrono::microseconds pause{20};

    struct place {
        typename M::buffer memory{};
        bool taken = false;
        bool retired = false;  ///< too small: freed when nothing is under way
    };
    [[nodiscard]] pair_socket reach(const owner_text& named, std::string& peer, wire::unique_id& id,
                                    deadline until, const std::stop_token& stop);
    [[nodiscard]] std::optional<wire::unique_id> greet(pair_socket& socket, const owner_text& named,
                                                       const error_context& where, deadline until,
                                                       const std::stop_token& stop);
    [[nodiscard]] pair_socket dial(const std::string& host, std::uint16_t port, deadline until,
                                   const std::stop_token& stop);
    void check_trial(const link& from, const std::byte* landed, deadline until,
                     const std::stop_token& stop);
    template <class Step>
    void await(link& on, deadline until, const std::stop_token& stop, Step step);
    void listen(link& on);
    void blame(link& which, failure why);
    void fail(link& which, failure why) noexcept;
    bool drive();
    void give_up(state& which) noexcept;
    bool advance(link& which);
    void lay_out(link& which);
    void begin_exchange();
    void make_places(std::uint64_t bytes);
    [[nodiscard]] std::optional<std::size_t> free_place(std::uint64_t bytes) const noexcept;
    void give_back(const held_places& held) noexcept {
        for (std::size_t i = 0; i < held.count; ++i) {
            places_[held.index[i]].taken = false;
        }
    }
    void sweep() noexcept {
        ended_.sweep([this](const held_places& held) { give_back(held); });
    }

    M machine_;
    pull_options options_;
    typename M::stream copies_;
    typename M::event mark_;
    std::vector<place> places_;
    std::uint64_t place_bytes_ = 0;
    std::vector<std::shared_ptr<link>> links_;
    ended_pairs<M, held_places> ended_;
    std::vector<link*> flight_;    ///< pairs of the exchange, and those left over from before
    std::vector<state*> waiting_;  ///< in the order of their starts
    std::vector<state*> laying_;
    std::size_t prepared_ = 0;
    std::chrono::steady_clock::time_point began_{};  ///< of the exchange
    pair_cost cost_{options_};
    bool loaded_ = false;
};

}  // namespace weightwire::nccl

#include <weightwire/fabrics/nccl/pull_connect_impl.hpp>
#include <weightwire/fabrics/nccl/pull_exchange_impl.hpp>
