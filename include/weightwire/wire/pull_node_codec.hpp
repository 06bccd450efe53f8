#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/wire/pull_plan_codec.hpp>

/// @file
/// The messages by which workers of one node find each other: where a worker is, and the memory in
/// which it lands what it takes for its node. In the form of wire/pull_plan_codec.hpp.
///
/// A text is its length and its bytes, without control characters.
///
/// - `W` worker: name of the node; 1 where it takes and gives nothing within its node, 2 where it
///   still has the landing memory that it has shown this trainer before, else 0; 1 more than the
///   worker whose landing memory it could not open, else 0; then its needs report, from the
///   `W P 1 N` on.
/// - `L` landings: count, of each worker (ascending), address, handle, bytes. 0 bytes, with empty
///   texts: the worker has none; where it is the one that is told, not that which it had shown.

namespace weightwire::wire {

/// What a worker tells of itself before it is routed.
struct worker_needs {
    std::string node{};  ///< equal for workers that reach each other's memory; empty when unknown
    bool alone = false;  ///< is to be routed as if it had no node peers
    bool shows = false;  ///< still has the landing memory that it has shown; not where `alone`
    int without = -1;    ///< worker whose landing memory it could not open; from 0
    plan::needs_report report{};
    friend bool operator==(const worker_needs&, const worker_needs&) = default;
};

/// Memory of a worker that its node peers read.
struct worker_landing {
    int worker = 0;
    std::string address{};  ///< of the fabric within a node
    std::string handle{};
    std::uint64_t bytes = 0;  ///< 0: it has none
    friend bool operator==(const worker_landing&, const worker_landing&) = default;
};

/// Most bytes of a node's name.
inline constexpr std::size_t longest_node_name = 256;
/// Most bytes of an address or a handle.
inline constexpr std::size_t longest_landing_text = std::size_t{1} << 16U;

[[nodiscard]] inline std::string encode(const worker_needs& value) {
    detail::plan_writer out{'W'};
    out.text(value.node)
        .number(value.alone   ? 1U
                : value.shows ? 2U
                              : 0U)
        .number(static_cast<std::uint64_t>(value.without + 1))
        .rest(encode(value.report));
    return std::move(out).take();
}

/// @param parameters number of parameters of the list.
/// @throws protocol_error it is no such message, or names a position beyond the list.
[[nodiscard]] inline worker_needs decode_worker_needs(std::string_view bytes,
                                                      std::size_t parameters) {
    detail::plan_reader in{bytes, 'W', "what a worker says of itself"};
    worker_needs made{.node = in.text(longest_node_name)};
    const auto choice = in.number(2);
    made.alone = choice == 1;
    made.shows = choice == 2;
    constexpr std::uint64_t most_workers = std::uint64_t{1} << 20U;
    made.without = static_cast<int>(in.number(most_workers)) - 1;
    made.report = decode_needs_report(in.rest(), parameters);
    return made;
}

/// @throws usage_error workers are not ascending.
[[nodiscard]] inline std::string encode(const std::vector<worker_landing>& all) {
    detail::plan_writer out{'L'};
    out.number(all.size());
    std::size_t next = 0;
    for (const auto& one : all) {
        const auto worker = static_cast<std::size_t>(std::max(one.worker, 0));
        out.ascending(worker, next).text(one.address).text(one.handle).number(one.bytes);
        next = worker + 1;
    }
    return std::move(out).take();
}

/// @param workers number of worker ranks.
/// @throws protocol_error it is no such message, or names a worker beyond the last.
[[nodiscard]] inline std::vector<worker_landing> decode_worker_landings(std::string_view bytes,
                                                                        std::size_t workers) {
    detail::plan_reader in{bytes, 'L', "a list of landing memories"};
    const auto count = in.count(4);
    if (count > workers) {
        in.fail("names more workers than there are");
    }
    std::vector<worker_landing> all(count);
    std::size_t next = 0;
    for (auto& one : all) {
        const auto worker = in.ascending(next, workers);
        next = worker + 1;
        one.worker = static_cast<int>(worker);
        one.address = in.text(longest_landing_text);
        one.handle = in.text(longest_landing_text);
        one.bytes = in.number();
        if ((one.bytes == 0) != one.handle.empty() || (one.bytes == 0) != one.address.empty()) {
            in.fail("has memory of no bytes, or bytes of no memory");
        }
    }
    in.finish();
    return all;
}

}  // namespace weightwire::wire
