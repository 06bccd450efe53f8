#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_reads.hpp>
#include <weightwire/plan/regions.hpp>

/// @file
/// What an owner checks before it serves a worker's plan.

namespace weightwire::plan {

/// An owner's check of the parts that workers ask of it. Holds what is the same for all workers.
class part_checker {
public:
    /// @param parameters lives as long as this object.
    /// @param group_sizes of its gather groups. @param held by this owner.
    /// @param owner its trainer rank.
    /// @throws usage_error groups that do not add up, or chunks that are too small.
    part_checker(const manifest& parameters, std::span<const std::size_t> group_sizes,
                 position_set held, const plan_options& options, int owner)
        : parameters_{&parameters},
          groups_{detail::groups_by_position(parameters, group_sizes)},
          held_{std::move(held)},
          options_{options},
          owner_{owner},
          manifest_hash_{parameters.hash()} {
        detail::require_chunk_bytes(options);
    }
    part_checker(const manifest&&, std::span<const std::size_t>, position_set, const plan_options&,
                 int) = delete;

    /// Checks that this owner holds all that is asked for, that reads lie inside their parameters
    /// and no element is in two of them, and that chunks are of one gather group, within the
    /// budget, and have every read once. Nothing of `part` is used before it was checked.
    /// @param worker that sent it.
    /// @returns the hash of what was accepted, which goes back to the worker.
    /// @throws mismatch_error it is not so; names worker and parameter.
    [[nodiscard]] std::uint64_t accept(const owner_part& part, int worker) const;

private:
    [[noreturn]] void refuse(const owner_part& part, const std::string& why,
                             std::size_t position = manifest::npos) const {
        throw mismatch_error{
            "the plan of worker " + std::to_string(part.worker) + " " + why +
                "; nothing was sent, init again",
            {.phase = phase::plan,
             .tensor =
                 position < parameters_->size() ? (*parameters_)[position].name : std::string{},
             .rank = owner_}};
    }
    /// Why a read cannot be served; empty where it can.
    [[nodiscard]] std::string problem_of(const pull_read& read) const;
    void require_chunks(const owner_part& part, const owner_section& section) const;
    void require_disjoint(const owner_part& part) const;

    const manifest* parameters_;
    std::vector<std::size_t> groups_;
    position_set held_;
    plan_options options_;
    int owner_;
    std::uint64_t manifest_hash_;
};

inline std::string part_checker::problem_of(const pull_read& read) const {
    const auto& parameter = (*parameters_)[read.source];
    if (!held_.contains(read.source)) {
        return "asks for a parameter that this rank does not hold";
    }
    const auto item = item_bytes_of(parameter);
    if (item == 0 || item_bits(parameter.dtype) % 8 != 0) {
        return "asks for elements of no whole bytes";
    }
    if (read.dimensions.size() > most_read_dimensions) {
        return "has a read of too many dimensions";
    }
    // Below 2^62 no sum of what follows overflows.
    const auto numel = parameter.byte_size() / item;
    auto last = checked_cast<std::uint64_t>(read.offset);
    std::uint64_t inside = 0;
    std::uint64_t joined = 0;  // a stride that would make this dimension and the last one
    for (auto d = read.dimensions.size(); d-- > 0;) {
        const auto& [extent, stride] = read.dimensions[d];
        if (extent < 2 || stride < 1 || static_cast<std::uint64_t>(stride) <= inside ||
            static_cast<std::uint64_t>(stride) == joined) {
            return "has a read that is not in normal form";
        }
        const auto span = checked_multiply(static_cast<std::uint64_t>(extent - 1),
                                           static_cast<std::uint64_t>(stride));
        last = last && span ? checked_add(*last, *span) : std::nullopt;
        if (!last || *last >= std::min(numel, std::uint64_t{1} << 62U)) {
            break;
        }
        inside += *span;
        joined = *span + static_cast<std::uint64_t>(stride);
    }
    if (!last || *last >= numel) {
        return "reads beyond the " + std::to_string(numel) + " elements of a parameter";
    }
    return {};
}

inline void part_checker::require_chunks(const owner_part& part,
                                         const owner_section& section) const {
    std::size_t next = 0;
    std::size_t group = 0;
    for (const auto& chunk : section.chunks) {
        if (chunk.first != next || chunk.count == 0 || chunk.count > section.reads.size() - next ||
            chunk.group < group) {
            refuse(part, "has chunks that do not follow one another");
        }
        group = chunk.group;
        next += chunk.count;
        std::uint64_t end = 0;
        for (auto i = chunk.first; i < next; ++i) {
            const auto& read = section.reads[i];
            if (read.source >= parameters_->size()) {
                refuse(part, "asks for position " + std::to_string(read.source) + " of a list of " +
                                 std::to_string(parameters_->size()));
            }
            if (const auto why = problem_of(read); !why.empty()) {
                refuse(part, why, read.source);
            }
            if (groups_[read.source] != group) {
                refuse(part, "has a parameter in a chunk of another gather group", read.source);
            }
            const auto begin = detail::align_packed(end);
            const auto bytes = read.bytes(item_bytes_of((*parameters_)[read.source]));
            if (begin > options_.chunk_bytes || bytes > options_.chunk_bytes - begin) {
                refuse(part,
                       "has a chunk of more than the " + std::to_string(options_.chunk_bytes) +
                           " bytes that one may have",
                       read.source);
            }
            end = begin + bytes;
        }
        if (end != chunk.bytes) {
            refuse(part, "says that a chunk has " + std::to_string(chunk.bytes) +
                             " bytes, and its reads have " + std::to_string(end));
        }
    }
    if (next != section.reads.size()) {
        refuse(part, "has reads in no chunk");
    }
}

inline void part_checker::require_disjoint(const owner_part& part) const {
    std::vector<const pull_read*> all;
    for (const auto& section : part.sections) {
        for (const auto& read : section.reads) {
            all.push_back(&read);
        }
    }
    std::ranges::sort(all, [](const pull_read* a, const pull_read* b) {
        return std::pair{a->source, a->offset} < std::pair{b->source, b->offset};
    });
    // Reads whose hulls overlap are compared element by element, in so many steps at most; a plan
    // of views needs a few for each read.
    auto steps = static_cast<std::int64_t>(all.size()) * 64 + most_overlap_steps;
    std::vector<std::pair<detail::lattice, std::int64_t>> open;
    for (std::size_t i = 0; i < all.size(); ++i) {
        const auto& read = *all[i];
        const bool first = i == 0 || all[i - 1]->source != read.source;
        const bool apart = i + 1 == all.size() || all[i + 1]->source != read.source;
        if (first) {
            open.clear();
            if (apart) {
                continue;  // the only one of its parameter
            }
        }
        std::erase_if(open, [&](const auto& one) { return one.second < read.offset; });
        auto mine = detail::lattice_of(read);
        for (const auto& [other, last] : open) {
            if (detail::share_element(other, mine, steps)) {
                refuse(part, "reads an element twice, or in ways that take too long to compare",
                       read.source);
            }
        }
        open.emplace_back(std::move(mine), read.last());
    }
}

inline std::uint64_t part_checker::accept(const owner_part& part, int worker) const {
    if (part.worker != worker || part.owner != owner_) {
        refuse(part, "is for trainer rank " + std::to_string(part.owner) +
                         " and came from worker " + std::to_string(worker));
    }
    if (part.manifest_hash != manifest_hash_) {
        refuse(part, "was made for another list of parameters");
    }
    for (std::size_t i = 0; i < part.sections.size(); ++i) {
        const auto& section = part.sections[i];
        if (section.ingester < no_ingester ||
            (i > 0 && section.ingester <= part.sections[i - 1].ingester)) {
            refuse(part, "has sections that are not in order");
        }
        require_chunks(part, section);
    }
    require_disjoint(part);
    return hash_of(part);
}

/// One check of one part. For many workers keep a `part_checker`.
/// @throws what `part_checker` does.
[[nodiscard]] inline std::uint64_t accept(const manifest& parameters,
                                          std::span<const std::size_t> group_sizes,
                                          const position_set& held, const owner_part& part,
                                          const plan_options& options, int owner, int worker) {
    return part_checker{parameters, group_sizes, held, options, owner}.accept(part, worker);
}

}  // namespace weightwire::plan
