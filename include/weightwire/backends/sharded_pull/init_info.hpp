#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/plan/recorder.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/pull_node_codec.hpp>

/// @file
/// What both ends say to choose `sharded_pull`: each worker rank takes only the bytes that it
/// keeps, from whichever trainer rank holds them.

namespace weightwire::sharded_pull {

/// A worker's loader: copies from `recorder.source(name)` to `recorder.destination(name)`. It is
/// run once an init, with names, dtypes and shapes alone; see plan/recorder.hpp and
/// plan/loaders.hpp. The context says for which rank.
using loader_function = std::function<void(plan::recorder&, const receiver_context&)>;

/// What a round of a worker rank read from one trainer rank.
struct owner_traffic {
    int trainer_rank = 0;
    std::uint64_t bytes = 0;    ///< read, counted as the reads ended
    std::uint64_t planned = 0;  ///< as the plan says: less where a node peer fails, for whom it
                                ///< reads from the trainer rank itself
};
/// What a round of a worker rank read in the memory of one worker rank of its node.
struct node_traffic {
    int worker_rank = 0;        ///< in the transfer group, from 1
    std::uint64_t bytes = 0;    ///< read, counted as the reads ended
    std::uint64_t planned = 0;  ///< as the plan says: more where that one fails
};
/// Called at the end of a worker rank's round, on its thread.
using traffic_function =
    std::function<void(const receiver_context&, std::span<const owner_traffic>)>;
/// Called after it, where the rank has node peers to read from.
using node_traffic_function =
    std::function<void(const receiver_context&, std::span<const node_traffic>)>;

/// The tag, over a fabric. On a worker it carries the loader:
///
///     worker_engine engine{sharded_pull::shared_memory_backend{
///         .loader = [](plan::recorder& r, const receiver_context& at) { … }}, sinks};
template <PullFabric Fabric>
struct basic_backend {
    using fabric = Fabric;

    /// Empty: every parameter of the worker is the trainer's of the same name, shape and dtype.
    loader_function loader{};
    /// Empty: not called.
    traffic_function on_traffic{};
    /// Name of the node: ranks with equal names reach each other's memory. Empty: the machine's
    /// boot id. A name of its own keeps a worker from taking and giving within its node.
    std::string node{};
    /// Where the trainer has it take bytes for its node (a fabric with `within_node`): memory of
    /// this rank in which they land and node peers read them. As many chunks as fit are on their
    /// way at once; at least one is. Kept while the rank may come back to the same trainer: until
    /// another trainer's init, or the engine's end.
    std::uint64_t landing_bytes = std::uint64_t{128} << 20U;
    /// Empty: not called.
    node_traffic_function on_node_traffic{};
};

/// What is wrong with the name of a node, in words; empty when nothing is.
[[nodiscard]] constexpr std::string_view fault_of_node(std::string_view name) noexcept {
    for (const char letter : name) {
        if (letter < ' ' || letter > '~') {
            return "node has to be a name of printable ASCII characters";
        }
    }
    return name.size() > wire::longest_node_name ? "node has to be a name of at most 256 characters"
                                                 : std::string_view{};
}

/// Bounds of a chunk, the same for a user's value and a peer's.
inline constexpr std::uint64_t least_chunk_bytes = 4096;
inline constexpr std::uint64_t most_chunk_bytes = std::uint64_t{1} << 40U;

/// The part of the init info that travels.
struct wire_parameters {
    std::string fabric{};
    std::uint64_t chunk_bytes = 0;
    friend bool operator==(const wire_parameters&, const wire_parameters&) = default;
};

/// Chooses `sharded_pull` on a trainer rank. Sizes are in bytes.
template <PullFabric Fabric>
struct basic_trainer_init_info {
    using backend = basic_backend<Fabric>;

    /// Of this trainer process in its group. Every rank serves what it holds.
    int rank = 0;
    /// Name or address of this process's host by which the workers reach it. A TCP port is opened
    /// there for each rank.
    std::string host = "127.0.0.1";
    /// CUDA device of this process, where the fabric has to do with one.
    int device = 0;
    /// Most bytes that are handed to one worker rank at once.
    std::uint64_t chunk_bytes = std::uint64_t{16} << 20U;
    /// Exportable memory of this rank for what cannot be read in place: as many chunks as fit are
    /// on their way at once, so this bounds how far a source is read ahead.
    std::uint64_t staging_bytes = std::uint64_t{256} << 20U;
    /// False: nothing is read in place, everything is staged.
    bool in_place = true;
    /// Name of the node: workers with the same name are served by ranks of it before others. Empty:
    /// the machine's boot id.
    std::string node{};

    /// The parameters that travel.
    [[nodiscard]] wire_parameters wire() const {
        return {.fabric = std::string{std::string_view{Fabric::name}}, .chunk_bytes = chunk_bytes};
    }
    /// Their JSON object, the same for every peer.
    [[nodiscard]] std::string init_message() const;
};

/// What is wrong with `chunk_bytes`, in words; empty when nothing is.
[[nodiscard]] inline std::string_view fault_of_chunk(std::uint64_t bytes) noexcept {
    return bytes < least_chunk_bytes || bytes > most_chunk_bytes
               ? "chunk_bytes has to be from 4096 to 2^40"
               : std::string_view{};
}

/// What is wrong with a user's values, in words; empty when nothing is.
template <PullFabric Fabric>
[[nodiscard]] std::string_view fault_of(const basic_trainer_init_info<Fabric>& info) noexcept {
    if (info.rank < 0) {
        return "rank has to be 0 or above";
    }
    if (info.device < 0) {
        return "device has to be 0 or above";
    }
    if (info.staging_bytes < info.chunk_bytes) {
        return "staging_bytes has to be at least chunk_bytes";
    }
    if (const auto fault = fault_of_node(info.node); !fault.empty()) {
        return fault;
    }
    return fault_of_chunk(info.chunk_bytes);
}

/// The JSON object of `parameters`. docs/wire.md has its form.
[[nodiscard]] inline std::string encode(const wire_parameters& parameters) {
    std::string text;
    wire::json_writer out{text};
    out.begin_object().key("fabric").string(parameters.fabric);
    out.key("chunk_bytes").integer(parameters.chunk_bytes).end_object();
    return text;
}

/// The inverse of `encode`, for a text that a peer sent.
/// @throws protocol_error not that form, or values out of bounds; names the member.
[[nodiscard]] inline wire_parameters decode_wire_parameters(std::string_view text) {
    const wire::json_document document{text, "sharded_pull wire parameters", phase::init};
    const auto root = document.root();
    root.allow_only({"fabric", "chunk_bytes"});
    const wire_parameters result{.fabric = std::string{root.at("fabric").string(64)},
                                 .chunk_bytes = root.at("chunk_bytes").natural()};
    if (const auto fault = fault_of_chunk(result.chunk_bytes); !fault.empty()) {
        root.fail(fault);
    }
    return result;
}

template <PullFabric Fabric>
std::string basic_trainer_init_info<Fabric>::init_message() const {
    return encode(wire());
}

}  // namespace weightwire::sharded_pull
