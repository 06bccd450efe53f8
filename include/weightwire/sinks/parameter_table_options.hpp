#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>

/// @file
/// What a `parameter_table` is asked for when it is made.

namespace weightwire {

/// When a table's staging is mapped and touched.
enum class staging_time : std::uint8_t {
    at_construction,  ///< all of it: the peak is known, and no round pays for fresh pages
    on_first_use,     ///< a parameter's in the first session that updates it, inside `begin`
};

/// How a `parameter_table` works.
struct parameter_table_options {
    /// Unset: two copies if the budget allows them (`flip`, or `copy_in` over the user's memory),
    /// else `in_place`.
    std::optional<commit_mode> mode{};
    /// Bytes that the live weights and their staging may take together, wherever they are.
    std::optional<std::uint64_t> memory_budget{};
    /// Parameters that updates leave alone. They need not be in a session's manifest.
    std::vector<std::string> frozen{};
    /// {alias, owner}: two names of one storage. Either may be in a session's manifest, or both.
    std::vector<std::pair<std::string, std::string>> aliases{};
    /// A session's parameter may have another dtype than the table's where `can_convert` says so
    /// (core/convert.hpp): a trainer's f32 master weights, a worker's bf16. The table keeps its
    /// dtype, and the destinations have it: only a backend that converts (`cuda_ipc`) can write
    /// them, every other is refused. What is converted is not compared with the trainer's digests.
    /// `initialize` and updates in vLLM's form take the table's dtypes only.
    bool convert_dtypes = false;
    staging_time staging = staging_time::at_construction;
    /// How long `acquire()` without a deadline waits at most.
    std::chrono::milliseconds acquire_wait = std::chrono::seconds{10};
};

}  // namespace weightwire
