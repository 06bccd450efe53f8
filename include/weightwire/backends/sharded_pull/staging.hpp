#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_reads.hpp>

/// @file
/// Which chunks of a plan pass through an owner's arena, in which order: worked out alike by both
/// ends.

namespace weightwire::sharded_pull {

/// Whether a chunk is read in place: all its parameters are.
/// @param in_place one a parameter of the manifest, not 0 where its owner has exported it.
template <class ReadAt>
[[nodiscard]] bool is_in_place(const plan::pull_chunk& chunk, ReadAt read_at,
                               std::span<const unsigned char> in_place) {
    for (std::size_t i = chunk.first; i < chunk.first + chunk.count; ++i) {
        const plan::pull_read& read = read_at(i);
        if (in_place[read.source] == 0) {
            return false;
        }
    }
    return true;
}

/// Calls `visit(source_byte, packed_byte, bytes)` for every run of a read, as
/// `plan::for_each_read_run` does, and allocates nothing: it stands in every round.
template <class Visit>
void for_each_staged_run(const plan::pull_read& read, std::size_t item_bytes, Visit visit) {
    const bool lines = !read.dimensions.empty() && read.dimensions.back().stride == 1;
    const auto outer = std::span{read.dimensions}.first(read.dimensions.size() - (lines ? 1U : 0U));
    const auto item = static_cast<std::int64_t>(item_bytes);
    const auto bytes = (lines ? read.dimensions.back().extent : 1) * item;
    std::array<std::int64_t, plan::most_read_dimensions> index{};
    auto source = read.offset;
    std::int64_t packed = 0;
    for (bool more = true; more; packed += bytes) {
        visit(static_cast<std::uint64_t>(source * item), static_cast<std::uint64_t>(packed),
              static_cast<std::uint64_t>(bytes));
        more = false;
        for (auto d = outer.size(); d-- > 0 && !more;) {
            more = ++index[d] < outer[d].extent;
            source += (more ? 1 : 1 - outer[d].extent) * outer[d].stride;
            index[d] = more ? index[d] : 0;
        }
    }
}

/// A read of a chunk and where it begins in the chunk's slot.
struct staged_read {
    const plan::pull_read* read = nullptr;
    std::uint64_t packed_offset = 0;
};

/// A chunk that is staged.
struct staged_chunk {
    std::uint32_t section = 0;  ///< of the part
    std::uint32_t chunk = 0;    ///< of the section
    std::uint64_t bytes = 0;
    std::vector<staged_read> reads{};
};

/// The staged chunks of one section, in the order in which they are published.
/// @param part outlives the result.
[[nodiscard]] inline std::vector<staged_chunk> staged_chunks_of(
    const plan::owner_part& part, std::size_t section, const manifest& parameters,
    std::span<const unsigned char> in_place) {
    const auto& of = part.sections[section];
    std::vector<staged_chunk> made;
    for (std::size_t k = 0; k < of.chunks.size(); ++k) {
        const auto& chunk = of.chunks[k];
        const auto read_at = [&](std::size_t i) -> const plan::pull_read& { return of.reads[i]; };
        if (is_in_place(chunk, read_at, in_place)) {
            continue;
        }
        auto& next = made.emplace_back();
        next.section = static_cast<std::uint32_t>(section);
        next.chunk = static_cast<std::uint32_t>(k);
        next.bytes = chunk.bytes;
        plan::for_each_read(of, chunk, parameters, [&](std::size_t i, std::uint64_t offset) {
            next.reads.push_back({&of.reads[i], offset});
        });
    }
    return made;
}

}  // namespace weightwire::sharded_pull
