#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/tensor.hpp>
#include <weightwire/wire/unique_id.hpp>

/// @file
/// What the NCCL pull fabric is made of. Owner and reader are templates over it, so that the code
/// that drives GPUs is the code that tests drive over host memory and sockets, where there is no
/// GPU. Nothing here waits: both ends look again and again at what is under way.

namespace weightwire::nccl {

/// Bytes that a pair sends or receives as one NCCL call.
struct pair_piece {
    std::byte* data = nullptr;  ///< in near memory; only read by a send
    std::uint64_t bytes = 0;
};

/// Bytes of a place to land, and where they belong.
struct landed_run {
    std::byte* to = nullptr;
    std::uint64_t offset = 0;  ///< in the place
    std::uint64_t bytes = 0;
};

/// Which end of a pair this process is.
enum class pair_end : int {
    owner = 0,   ///< sends; rank 0
    reader = 1,  ///< receives; rank 1
};

/// Memory that pairs send from and receive to. `free_bytes` is what the whole device has left,
/// whoever took the rest; nothing where it does not tell.
template <class M>
concept HasPairMemory = requires(M& machine, std::size_t bytes) {
    { M::near_memory } -> std::convertible_to<memory_kind>;
    { machine.allocate(bytes) } -> std::same_as<typename M::buffer>;
    { machine.free_bytes() } -> std::same_as<std::optional<std::uint64_t>>;
    requires std::default_initializable<typename M::buffer> && std::movable<typename M::buffer>;
    requires requires(const typename M::buffer& near) {
        { near.data() } -> std::same_as<std::byte*>;
        { near.size() } -> std::convertible_to<std::size_t>;
    };
};

/// Copies in the order of the stream that they are given to, and points in it. `record_after` marks
/// a point in a stream of the user's (`named_tensor::ready_stream`). A scatter plan has its tables
/// where the device reads them; a launch lays out one place.
template <class M>
concept HasPairCopies =
    requires(M& machine, typename M::stream& stream, typename M::event& event, void* users,
             std::byte* to, const std::byte* from, std::uint64_t number,
             std::span<const landed_run> runs, const typename M::scatter_plan& scatter) {
        { machine.make_stream() } -> std::same_as<typename M::stream>;
        { machine.make_event() } -> std::same_as<typename M::event>;
        machine.record(event, stream);
        machine.record_after(event, users);
        { machine.is_done(event) } -> std::same_as<bool>;
        machine.copy_lines(to, from, number, number, number, stream);
        machine.load_kernels();
        { machine.make_scatter(runs) } -> std::same_as<typename M::scatter_plan>;
        machine.launch(scatter, from, stream);
        { M::table_bytes(scatter) } -> std::convertible_to<std::size_t>;
    };

/// A communicator of two ranks.
///
/// `begin` starts to join and returns. `ready` is whether nothing is in progress on the host's
/// side: it has joined, or what was posted is in the pair's own stream; of the first that is posted
/// only when the other end has posted its part too. `post` gives one NCCL group
/// of sends or receives; it is called when the pair is ready, and `reached` when it is ready again:
/// whether the bytes have moved. All of them throw what became of the pair: peer_error, and what
/// NCCL says. `end` aborts it on a thread of its own, which also keeps what the pair holds until
/// the abort has returned; `over` tells that it has. The end of a pair ends it as well.
template <class M>
concept HasPairs = requires(M& machine, const wire::unique_id& id, pair_end end, int channels,
                            typename M::pair& pair, std::span<const pair_piece> pieces,
                            const typename M::ending& ending) {
    { machine.make_unique_id() } -> std::same_as<wire::unique_id>;
    { machine.begin(id, end, channels) } -> std::same_as<typename M::pair>;
    { pair.ready() } -> std::same_as<bool>;
    pair.post(pieces, end);
    { pair.reached() } -> std::same_as<bool>;
    { std::move(pair).end() } noexcept -> std::same_as<typename M::ending>;
    { ending.over() } noexcept -> std::same_as<bool>;
    requires std::default_initializable<typename M::pair> && std::movable<typename M::pair>;
    requires std::default_initializable<typename M::ending> && std::movable<typename M::ending>;
};

/// `M{device}`: one device and a copy of NCCL. `most_pairs_at_once(channels)` is how many pairs
/// may have kernels on the device so that all of them are resident at once, whatever else runs.
template <class M>
concept HasPairIdentity =
    std::constructible_from<M, int> && requires(const M& machine, int number) {
        { machine.device() } -> std::convertible_to<int>;
        { machine.nccl_version() } -> std::convertible_to<int>;
        { machine.most_pairs_at_once(number) } -> std::convertible_to<std::size_t>;
    };

/// Everything of it. A model is used by one thread at a time. It may name a `within_node`, the
/// fabric's (`HasWithinNode`).
template <class M>
concept PairMachinery = HasPairIdentity<M> && HasPairMemory<M> && HasPairCopies<M> && HasPairs<M>;

/// Choices of a fabric, the same on both sides. A fabric takes them as a type, of which it uses a
/// default value; other choices are a type derived from this one:
///
///     struct few_peers : nccl::pull_options {
///         few_peers() { most_peers = 8; }
///     };
///     using fabric = nccl::basic_pull_fabric<nccl::cuda_pairs, few_peers>;
///
/// (A value as the template's argument would be shorter. nvcc 13.0 does not compile what names
/// such a type.)
struct pull_options {
    /// Most channels of a communicator, each a block of the device's and some megabytes of its
    /// memory: NCCL's `maxCTAs`, with `minCTAs` 1. A power of two, to which NCCL would round it.
    int channels = 4;
    /// Communicators that one process holds. More are refused: each costs device memory for good,
    /// of NCCL 2.28.9 17 MB over sockets and 37 MB over NVLink, where UCX reads any number of
    /// peers through one context.
    std::size_t most_peers = 64;
    /// Device memory that one process may take for this fabric: arenas of an owner or places of a
    /// reader, and communicators. What an arena or one more communicator would take above it is
    /// refused. Each communicator counts as the least that one was measured to take.
    std::uint64_t device_bytes = std::uint64_t{4} << 30U;
    /// What a communicator counts as before one was measured. The measurement is of the whole
    /// device, so others may add to it: more than four times this is not believed.
    std::uint64_t pair_bytes = std::uint64_t{36} << 20U;
    /// Device memory of a reader where chunks land before they are laid out; at least two chunks.
    std::uint64_t landing_bytes = std::uint64_t{128} << 20U;
    /// How long an exchange waits for its last pairs before the next begins beside them.
    std::chrono::milliseconds linger{100};
    /// How long an owner gives a reader to join and to try the pair.
    std::chrono::milliseconds join_time{60'000};
    /// How long an owner waits for a transfer to end, and more by its size.
    std::chrono::milliseconds send_time{30'000};
    /// How long an abort may take before the pair is given up with all it holds.
    std::chrono::milliseconds abort_time{10'000};
};

template <class T>
concept PullOptions = std::derived_from<T, pull_options> && std::default_initializable<T>;

/// What a communicator takes, as far as it can be measured. One thread at a time writes.
class pair_cost {
public:
    explicit pair_cost(const pull_options& options) noexcept
        : believed_{4 * options.pair_bytes}, bytes_{options.pair_bytes} {}
    void note(std::uint64_t took) noexcept {
        if (took != 0 && took <= believed_) {
            bytes_ = std::exchange(measured_, true) ? std::min(bytes_.load(), took) : took;
        }
    }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

private:
    std::uint64_t believed_;
    bool measured_ = false;
    std::atomic<std::uint64_t> bytes_;
};

namespace pair_detail {

/// Why a process may not take this much of the device, in words; empty where it may.
/// @param own arenas or places. @param pairs what is counted for communicators.
[[nodiscard]] inline std::string fault_of_budget(const pull_options& options, std::uint64_t own,
                                                 std::uint64_t pairs, std::string_view who,
                                                 std::string_view own_name) {
    if (own <= options.device_bytes && pairs <= options.device_bytes - own) {
        return {};
    }
    return std::string{who} + " would take " + std::to_string(own) + " bytes of the device for " +
           std::string{own_name} + " and " + std::to_string(pairs) +
           " for communicators of NCCL, and may take " + std::to_string(options.device_bytes) +
           " (pull_options::device_bytes); read over UCX, which needs no communicators";
}

}  // namespace pair_detail

}  // namespace weightwire::nccl
