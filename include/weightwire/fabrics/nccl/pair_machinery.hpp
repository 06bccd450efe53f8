#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
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

}  // namespace weightwire::nccl
