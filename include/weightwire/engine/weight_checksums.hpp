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
#include <weightwire/core/tensor.hpp>
#include <weightwire/engine/tensor_digest.hpp>
#include <weightwire/wire/json_writer.hpp>

/// @file
/// Digests of the weights that inference sees, and their comparison with a baseline: what
/// `/weight_checker` answers.

namespace weightwire::detail {

/// Key and digest of each tensor.
using weight_checksums = std::vector<std::pair<std::string, std::string>>;

/// Appends the digests of one rank's snapshot.
/// @throws cancelled_error, timeout_error within 4 MiB of digests: one tensor may take seconds, for
/// which the snapshot would keep a session's storage.
template <class Snapshot>
void append_checksums(weight_checksums& out, const Snapshot& held, const std::string& prefix,
                      deadline until, const std::stop_token& stop) {
    constexpr std::size_t interval = std::size_t{4} << 20U;
    std::size_t since = interval;  // the first piece asks
    const auto pause = [&](std::size_t bytes) {
        since += bytes;
        if (since < interval) {
            return;
        }
        since = 0;
        if (stop.stop_requested()) {
            throw cancelled_error{"nobody waits for the checksums", {.phase = phase::serve}};
        }
        if (until.expired()) {
            throw timeout_error{"the checksums were not ready in time", {.phase = phase::serve}};
        }
    };
    for (std::size_t i = 0; i < held.size(); ++i) {
        pause(0);
        out.emplace_back(prefix + std::string{held.name(i)},
                         digest_text(tensor_digest(held.tensor(i), pause)));
    }
}

/// The same by a sink that digests its own tensors, all at once: they may be on a device.
template <HasTensorDigests Sink, class Snapshot>
void append_checksums_of(weight_checksums& out, Sink& sink, const Snapshot& held,
                         const std::string& prefix, deadline until, const std::stop_token& stop) {
    std::vector<tensor_view> tensors;
    for (std::size_t i = 0; i < held.size(); ++i) {
        tensors.push_back(held.tensor(i));
    }
    std::vector<std::uint64_t> sums(tensors.size());
    sink.tensor_digests(tensors, sums, until, stop);
    for (std::size_t i = 0; i < held.size(); ++i) {
        out.emplace_back(prefix + std::string{held.name(i)}, digest_text(sums[i]));
    }
}

/// Digests of all committed tensors, in the order of the sink. Keys are names, or `rank/name` where
/// there are several ranks. All are of one version: a commit meanwhile is met by beginning again.
///
/// One rank's snapshot is held at a time. Whoever waits for a rank's door while it holds another
/// rank's weights deadlocks with a commit, which closes all doors before it waits for readers.
/// @throws cancelled_error, timeout_error between pieces of tensors.
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
            auto& sink = engine.sink(rank);
            const auto held = sink.acquire();
            first = rank == 0 ? held.version() : first;
            one_version = held.version() == first;
            if (one_version) {
                const auto prefix =
                    engine.world_size() == 1 ? std::string{} : std::to_string(rank) + "/";
                if constexpr (HasTensorDigests<typename Engine::sink_type>) {
                    append_checksums_of(result, sink, held, prefix, until, stop);
                } else {
                    append_checksums(result, held, prefix, until, stop);
                }
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

/// What `/weight_checker` answers to `checksum`: the baseline that a later `compare` sends back.
[[nodiscard]] inline std::string checksums_body(const weight_checksums& sums) {
    std::string body;
    wire::json_writer out{body};
    out.begin_object().key("checksums").begin_object();
    for (const auto& [key, sum] : sums) {
        out.key(key).string(sum);
    }
    out.end_object().end_object();
    return body;
}
/// What it answers to `compare`.
[[nodiscard]] inline std::string comparison_body(const std::vector<std::string>& mismatches) {
    std::string body;
    wire::json_writer out{body};
    out.begin_object().key("match").boolean(mismatches.empty());
    out.key("mismatches").begin_array();
    for (const auto& key : mismatches) {
        out.string(key);
    }
    out.end_array().end_object();
    return body;
}

}  // namespace weightwire::detail
