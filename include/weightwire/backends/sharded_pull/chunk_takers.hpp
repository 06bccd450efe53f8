#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/staging.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/word_hash.hpp>

/// @file
/// For whom an owner packs a chunk: for one reader, or once for readers of one node that take the
/// same.

namespace weightwire::sharded_pull {

/// A worker's plan as an owner has accepted it.
struct accepted_part {
    plan::owner_part part{};
    std::vector<std::uint64_t> hashes{};  ///< one a section, of all that it says
    std::vector<unsigned char> staged{};  ///< one a section: has chunks that pass through the arena
    [[nodiscard]] bool any_staged() const noexcept {
        return std::ranges::any_of(staged, [](unsigned char each) { return each != 0; });
    }
};

/// @param in_place one a parameter, not 0 where it is read in place.
[[nodiscard]] inline accepted_part accept_part(plan::owner_part part,
                                               std::span<const unsigned char> in_place) {
    accepted_part made{.part = std::move(part)};
    for (const auto& section : made.part.sections) {
        plan::detail::word_hash hash{section.reads.size()};
        bool staged = false;
        for (const auto& chunk : section.chunks) {
            hash.add(plan::hash_of(section, chunk));
            staged = staged ||
                     !is_in_place(
                         chunk,
                         [&](std::size_t i) -> const plan::pull_read& { return section.reads[i]; },
                         in_place);
        }
        made.hashes.push_back(hash.value());
        made.staged.push_back(staged ? 1 : 0);
    }
    return made;
}

/// A reader of a round.
struct round_reader {
    int rank = 0;  ///< worker rank, from 1
    std::shared_ptr<const accepted_part> part{};
    friend bool operator==(const round_reader&, const round_reader&) = default;
};

/// Whom chunks are packed for. All readers take the same chunks, packed alike.
struct chunk_taker {
    struct reader {
        int rank = 0;
        std::uint32_t section = 0;  ///< of its part
    };
    /// The reader that takes the chunks from the owner, lands them in memory of its own and lets
    /// the others read them there; 0 where each reads them from the owner.
    int lead = 0;
    std::vector<reader> readers{};                ///< by ascending rank
    std::shared_ptr<const accepted_part> part{};  ///< of the first
    [[nodiscard]] const plan::owner_section& section() const {
        return part->part.sections[readers.front().section];
    }
};

/// The takers of a round: a section that a reader takes for itself is one, and so are the equal
/// sections of those that name one worker as the one that takes it for their node. That one leads
/// them if it is among them; else each reads from the owner, which packs for all of them at once.
/// @param readers by ascending rank.
[[nodiscard]] inline std::vector<chunk_taker> takers_of(std::span<const round_reader> readers) {
    std::vector<chunk_taker> made;
    for (const auto& each : readers) {
        for (std::size_t s = 0; s < each.part->part.sections.size(); ++s) {
            const auto& section = each.part->part.sections[s];
            if (each.part->staged[s] == 0) {
                continue;
            }
            const bool shared = section.ingester != plan::no_ingester;
            const auto found = std::ranges::find_if(made, [&](const chunk_taker& other) {
                const auto s2 = other.readers.front().section;
                return shared && other.part->hashes[s2] == each.part->hashes[s] &&
                       other.section() == section;
            });
            auto& taker = found != made.end() ? *found : made.emplace_back();
            if (taker.readers.empty()) {
                taker.part = each.part;
            }
            if (shared && section.ingester + 1 == each.rank) {
                taker.lead = each.rank;
            }
            taker.readers.push_back({each.rank, static_cast<std::uint32_t>(s)});
        }
    }
    return made;
}

/// The most takers that readers of these parts can have: each may come back and take all for
/// itself, while the others still share what they shared.
[[nodiscard]] inline std::size_t most_takers(std::span<const accepted_part* const> parts) {
    std::set<std::pair<int, std::uint64_t>> shared;
    for (const auto* each : parts) {
        for (std::size_t s = 0; s < each->staged.size(); ++s) {
            const auto ingester = each->part.sections[s].ingester;
            if (ingester != plan::no_ingester && each->staged[s] != 0) {
                shared.emplace(ingester, each->hashes[s]);
            }
        }
    }
    return parts.size() + shared.size();
}

}  // namespace weightwire::sharded_pull
