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

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/pull_reads.hpp>
#include <weightwire/plan/recorder.hpp>
#include <weightwire/plan/regions.hpp>
#include <weightwire/plan/word_hash.hpp>

/// @file
/// What a worker needs of the checkpoint, from what its loader recorded: each byte once, whatever
/// number of destinations it has.

namespace weightwire::plan {

/// What a worker needs of one parameter.
struct need {
    std::size_t position = 0;     ///< in the manifest of the checkpoint
    std::uint64_t bytes = 0;      ///< never 0
    std::uint64_t signature = 0;  ///< a hash of the elements
    friend bool operator==(const need&, const need&) = default;
};

/// What a worker tells the trainer before routing.
struct needs_report {
    std::vector<need> needs{};  ///< by ascending position
    friend bool operator==(const needs_report&, const needs_report&) = default;
};

/// Runs that the reads of one parameter may be taken apart into, where copies overlap so that no
/// regular read has their elements.
inline constexpr std::uint64_t most_overlapping_runs = std::uint64_t{1} << 22U;

namespace detail {

/// Elements `[begin, end)` of a parameter.
struct element_range {
    std::int64_t begin;
    std::int64_t end;
};

/// Ranges by ascending begin, those that touch or overlap joined.
inline void join_ranges(std::vector<element_range>& ranges) {
    std::ranges::sort(ranges, {}, &element_range::begin);
    std::size_t kept = 0;
    for (const auto& range : ranges) {
        if (kept > 0 && range.begin <= ranges[kept - 1].end) {
            ranges[kept - 1].end = std::max(ranges[kept - 1].end, range.end);
        } else {
            ranges[kept++] = range;
        }
    }
    ranges.resize(kept);
}

/// Turns copies from one parameter into tasks that read no element twice.
class read_collector {
public:
    explicit read_collector(const param_meta& source) : source_{&source} {}

    /// @param copies of one source, each with elements. Appends tasks by ascending first element.
    void collect(std::span<const region> copies, std::vector<read_task>& out) {
        const auto first_task = out.size();
        if (copies.size() == 1) {
            if (auto read = read_of(copies[0])) {
                out.push_back({*std::move(read), {copies[0]}});
                return;
            }
        }
        if (!regular(copies, out)) {
            out.resize(first_task);
            expanded(copies, out);
        }
    }

private:
    /// Tasks of whole copies; false where copies overlap and no read that one of them makes, or
    /// that dense ones make together, has all elements of the others.
    static bool regular(std::span<const region> copies, std::vector<read_task>& out);
    /// Tasks of the runs of the copies.
    void expanded(std::span<const region> copies, std::vector<read_task>& out) const;

    const param_meta* source_;
};

inline bool read_collector::regular(std::span<const region> copies, std::vector<read_task>& out) {
    std::vector<pull_read> reads;
    std::vector<element_range> dense;
    for (const auto& copy : copies) {
        auto read = read_of(copy);
        if (!read) {
            return false;
        }
        if (read->dense()) {
            dense.push_back({read->offset, read->last() + 1});
        } else if (std::ranges::find(reads, *read) == reads.end()) {
            reads.push_back(*std::move(read));
        }
    }
    join_ranges(dense);
    for (const auto& [begin, end] : dense) {
        reads.push_back(dense_read(copies[0].source, begin, end));
    }
    std::ranges::stable_sort(reads, {}, &pull_read::offset);
    // A copy belongs to the first read that has its elements, the largest before others.
    std::vector<std::size_t> order(reads.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
        return reads[a].elements() > reads[b].elements();
    });
    std::vector<std::vector<region>> writes(reads.size());
    for (const auto& copy : copies) {
        const auto found = std::ranges::find_if(order, [&](std::size_t i) {
            return reads[i].offset <= copy.source_offset && copy.source_offset <= reads[i].last() &&
                   packed_region(reads[i], copy).has_value();
        });
        if (found == order.end()) {
            return false;
        }
        writes[*found].push_back(copy);
    }
    std::vector<std::pair<lattice, std::int64_t>> open;  // reads so far, and their last elements
    for (std::size_t i = 0; i < reads.size(); ++i) {
        if (writes[i].empty()) {
            continue;  // another read has its elements
        }
        auto mine = lattice_of(reads[i]);
        std::erase_if(open, [&](const auto& one) { return one.second < mine.first; });
        for (const auto& [other, last] : open) {
            auto steps = most_overlap_steps;
            if (share_element(other, mine, steps)) {
                return false;
            }
        }
        open.emplace_back(std::move(mine), reads[i].last());
        out.push_back({std::move(reads[i]), std::move(writes[i])});
    }
    return true;
}

inline void read_collector::expanded(std::span<const region> copies,
                                     std::vector<read_task>& out) const {
    std::uint64_t runs = 0;
    for (const auto& copy : copies) {
        runs += copy.elements() / run_elements(copy);
    }
    if (runs > most_overlapping_runs) {
        throw unsupported_error{
            "the loader copies elements of this parameter several times in ways that overlap, as " +
                std::to_string(runs) + " runs, more than the " +
                std::to_string(most_overlapping_runs) +
                " that are taken apart; copy equal parts, or parts that do not overlap",
            {.phase = phase::plan, .tensor = source_->name}};
    }
    std::vector<region> parts;
    std::vector<element_range> ranges;
    for (const auto& copy : copies) {
        for_each_run(copy, 1, [&](std::uint64_t from, std::uint64_t to, std::uint64_t count) {
            const auto begin = static_cast<std::int64_t>(from);
            const auto length = static_cast<std::int64_t>(count);
            parts.push_back(
                {copy.source, copy.destination, begin, static_cast<std::int64_t>(to), {}});
            if (length > 1) {
                parts.back().dimensions.push_back({length, 1, 1});
            }
            ranges.push_back({begin, begin + length});
        });
    }
    join_ranges(ranges);
    std::ranges::stable_sort(parts, {}, &region::source_offset);
    auto next = parts.begin();
    for (const auto& [begin, end] : ranges) {
        auto& task = out.emplace_back(read_task{dense_read(copies[0].source, begin, end), {}});
        for (; next != parts.end() && next->source_offset < end; ++next) {
            task.writes.push_back(std::move(*next));
        }
    }
}

}  // namespace detail

/// What a worker reads: made once from what its loader recorded.
class pull_needs {
public:
    pull_needs() = default;
    /// @param checkpoint what the trainer has. @param worker what the worker holds.
    /// @param made by `record` from both.
    /// @throws mismatch_error a region does not fit the two lists; names the parameter.
    /// @throws unsupported_error copies of one parameter overlap in too many places.
    pull_needs(const manifest& checkpoint, const manifest& worker, const recording& made) {
        std::vector<region> copies;
        copies.reserve(made.regions.size());
        for (const auto& copy : made.regions) {
            if (copy.source >= checkpoint.size() || copy.destination >= worker.size()) {
                throw mismatch_error{"a recorded copy names a parameter that the lists do not have",
                                     {.phase = phase::plan}};
            }
            require_within(copy, checkpoint[copy.source], worker[copy.destination]);
            if (copy.elements() > 0) {
                copies.push_back(copy);
            }
        }
        std::ranges::stable_sort(copies, {}, &region::source);
        for (std::size_t begin = 0, end = 0; begin < copies.size(); begin = end) {
            const auto source = copies[begin].source;
            while (end < copies.size() && copies[end].source == source) {
                ++end;
            }
            detail::read_collector{checkpoint[source]}.collect(
                std::span{copies}.subspan(begin, end - begin), tasks_);
        }
        summarize(checkpoint);
    }

    /// By ascending source, and by first element within one. No element is in two reads.
    [[nodiscard]] std::span<const read_task> tasks() const& noexcept { return tasks_; }
    std::span<const read_task> tasks() const&& = delete;
    /// What routing needs to know.
    [[nodiscard]] const needs_report& report() const noexcept { return report_; }
    /// Bytes that the worker reads.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

private:
    void summarize(const manifest& checkpoint) {
        for (std::size_t begin = 0, end = 0; begin < tasks_.size(); begin = end) {
            need made{.position = tasks_[begin].read.source};
            detail::word_hash hash{made.position};
            for (; end < tasks_.size() && tasks_[end].read.source == made.position; ++end) {
                hash.add(hash_of(tasks_[end].read));
                made.bytes += tasks_[end].read.bytes(item_bytes_of(checkpoint[made.position]));
            }
            made.signature = hash.value();
            bytes_ += made.bytes;
            report_.needs.push_back(made);
        }
    }

    std::vector<read_task> tasks_;
    needs_report report_;
    std::uint64_t bytes_ = 0;
};

}  // namespace weightwire::plan
