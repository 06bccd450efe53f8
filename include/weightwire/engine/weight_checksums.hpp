#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stop_token>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/engine/tensor_digest.hpp>

/// @file
/// Digests of the weights that inference sees, and their comparison with a baseline: what
/// `/weight_checker` answers.

namespace weightwire::detail {

/// Key and digest of each tensor.
using weight_checksums = std::vector<std::pair<std::string, std::string>>;

/// A snapshot of every rank, all of one version. A commit between two of them is met by trying
/// again.
/// @throws timeout_error commits came faster than snapshots could be taken, until `until`.
template <class Engine>
    requires HasSnapshots<typename Engine::sink_type>
[[nodiscard]] auto acquire_all(const Engine& engine, deadline until) {
    std::vector<decltype(engine.sink(0).acquire())> held;
    held.reserve(engine.world_size());
    do {
        held.clear();
        for (std::size_t rank = 0; rank < engine.world_size(); ++rank) {
            held.push_back(engine.sink(rank).acquire());
        }
        const weight_version first = held.front().version();
        if (std::all_of(held.begin(), held.end(),
                        [&](const auto& one) { return one.version() == first; })) {
            return held;
        }
    } while (!until.expired());
    throw timeout_error{"the ranks did not show one version at the same time",
                        {.phase = phase::serve}};
}

/// Digests of all committed tensors, in the order of the sink. Keys are names, or `rank/name` where
/// there are several ranks. Read from snapshots, so updates may run beside it.
/// @throws cancelled_error, timeout_error between two tensors.
/// @throws dirty_error the sink's, while the weights are a mix.
template <class Engine>
[[nodiscard]] weight_checksums checksums_of(const Engine& engine, deadline until,
                                            const std::stop_token& stop) {
    const auto held = acquire_all(engine, until);
    weight_checksums result;
    result.reserve(held.size() * held.front().size());
    for (std::size_t rank = 0; rank < held.size(); ++rank) {
        const auto prefix = held.size() == 1 ? std::string{} : std::to_string(rank) + "/";
        for (std::size_t i = 0; i < held[rank].size(); ++i) {
            if (stop.stop_requested()) {
                throw cancelled_error{"nobody waits for the checksums", {.phase = phase::serve}};
            }
            if (until.expired()) {
                throw timeout_error{"the checksums were not ready in time",
                                    {.phase = phase::serve}};
            }
            const std::string_view name = held[rank].name(i);
            result.emplace_back(prefix + std::string{name},
                                digest_text(tensor_digest(held[rank].tensor(i))));
        }
    }
    return result;
}

/// Keys whose digests differ, or that only one side has, sorted.
[[nodiscard]] inline std::vector<std::string> mismatches_of(const weight_checksums& now,
                                                            const weight_checksums& baseline) {
    std::unordered_map<std::string_view, std::string_view> expected;
    for (const auto& [key, sum] : baseline) {
        expected.emplace(key, sum);
    }
    std::vector<std::string> result;
    for (const auto& [key, sum] : now) {
        const auto found = expected.find(key);
        if (found == expected.end() || found->second != sum) {
            result.push_back(key);
        }
        if (found != expected.end()) {
            expected.erase(found);
        }
    }
    for (const auto& [key, sum] : expected) {
        result.emplace_back(key);
    }
    std::sort(result.begin(), result.end());
    return result;
}

}  // namespace weightwire::detail
