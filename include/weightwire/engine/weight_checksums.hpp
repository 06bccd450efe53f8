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

/// Appends the digests of one rank's snapshot.
/// @throws cancelled_error, timeout_error between two tensors.
template <class Snapshot>
void append_checksums(weight_checksums& out, const Snapshot& held, const std::string& prefix,
                      deadline until, const std::stop_token& stop) {
    for (std::size_t i = 0; i < held.size(); ++i) {
        if (stop.stop_requested()) {
            throw cancelled_error{"nobody waits for the checksums", {.phase = phase::serve}};
        }
        if (until.expired()) {
            throw timeout_error{"the checksums were not ready in time", {.phase = phase::serve}};
        }
        out.emplace_back(prefix + std::string{held.name(i)},
                         digest_text(tensor_digest(held.tensor(i))));
    }
}

/// Digests of all committed tensors, in the order of the sink. Keys are names, or `rank/name` where
/// there are several ranks. All are of one version: a commit meanwhile is met by beginning again.
///
/// One rank's snapshot is held at a time. Whoever waits for a rank's door while it holds another
/// rank's weights deadlocks with a commit, which closes all doors before it waits for readers.
/// @throws cancelled_error, timeout_error between two tensors.
/// @throws dirty_error the sink's, while the weights are a mix.
template <class Engine>
    requires HasSnapshots<typename Engine::sink_type>
[[nodiscard]] weight_checksums checksums_of(const Engine& engine, deadline until,
                                            const std::stop_token& stop) {
    weight_checksums result;
    for (bool one_version = false; !one_version;) {
        result.clear();
        one_version = true;
        weight_version first = 0;
        for (std::size_t rank = 0; one_version && rank < engine.world_size(); ++rank) {
            const auto held = engine.sink(rank).acquire();
            first = rank == 0 ? held.version() : first;
            one_version = held.version() == first;
            if (one_version) {
                const auto prefix =
                    engine.world_size() == 1 ? std::string{} : std::to_string(rank) + "/";
                append_checksums(result, held, prefix, until, stop);
            }
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
