#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_balance.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_reads.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/plan/word_hash.hpp>

/// @file
/// The plan of one worker: what it reads from whom, in which chunks, and what it writes.

namespace weightwire::plan {

/// What both sides have to know alike to make, or check, a plan.
struct plan_options {
    /// Most bytes of a chunk, at least `least_chunk_bytes`.
    std::uint64_t chunk_bytes = std::uint64_t{256} << 20U;
};

/// The smallest value of `plan_options::chunk_bytes`.
inline constexpr std::uint64_t least_chunk_bytes = 4096;
/// Each read begins in its chunk at a multiple of so many bytes.
inline constexpr std::uint64_t packed_alignment = 16;
/// The ingester of what a worker takes for itself alone.
inline constexpr int no_ingester = -1;

/// Consecutive reads of a section, all of one gather group, that are packed together: each after
/// the one before, at the next multiple of `packed_alignment`.
struct pull_chunk {
    std::size_t group = 0;    ///< index of the gather group
    std::size_t first = 0;    ///< index of the first read in the section
    std::size_t count = 0;    ///< number of reads, never 0
    std::uint64_t bytes = 0;  ///< from the first to the end of the last, with what is between
    friend constexpr bool operator==(const pull_chunk&, const pull_chunk&) = default;
};

/// What a worker gets in one sequence of chunks.
///
/// - `ingester` is `no_ingester`: the worker takes it from `owner` for itself.
/// - It is the worker itself: the worker takes it from `owner`, and the other workers of its node
///   take the same chunks, packed alike, from the worker.
/// - It is another worker of the node: the worker takes the chunks from there. Where that one
///   fails, it takes them from `owner`.
struct pull_section {
    int owner = 0;
    int ingester = no_ingester;
    std::vector<read_task> tasks{};    ///< by ascending source
    std::vector<pull_chunk> chunks{};  ///< one after the other they have all tasks
    friend bool operator==(const pull_section&, const pull_section&) = default;
};

/// The owner's side of a section: what it reads and packs.
struct owner_section {
    int ingester = no_ingester;
    std::vector<pull_read> reads{};
    std::vector<pull_chunk> chunks{};
    friend bool operator==(const owner_section&, const owner_section&) = default;
};

/// What a worker asks of one owner. The owner checks it with `accept`.
struct owner_part {
    int worker = 0;
    int owner = 0;
    std::uint64_t manifest_hash = 0;
    /// By ascending ingester. One whose ingester is another worker is asked for where that one
    /// fails.
    std::vector<owner_section> sections{};
    friend bool operator==(const owner_part&, const owner_part&) = default;
};

namespace detail {

[[nodiscard]] constexpr std::uint64_t align_packed(std::uint64_t offset) noexcept {
    return (offset + (packed_alignment - 1)) / packed_alignment * packed_alignment;
}

[[nodiscard]] inline const pull_read& read_at(const pull_section& section, std::size_t i) {
    return section.tasks[i].read;
}
[[nodiscard]] inline const pull_read& read_at(const owner_section& section, std::size_t i) {
    return section.reads[i];
}

template <class Section>
[[nodiscard]] std::uint64_t hash_of_chunk(const Section& section, const pull_chunk& chunk) {
    word_hash hash{chunk.group};
    hash.add(chunk.count).add(chunk.bytes);
    for (std::size_t i = chunk.first; i < chunk.first + chunk.count; ++i) {
        hash.add(hash_of(read_at(section, i)));
    }
    return hash.value();
}

/// Index of the gather group of every position.
[[nodiscard]] inline std::vector<std::size_t> groups_by_position(
    const manifest& parameters, std::span<const std::size_t> group_sizes) {
    std::vector<std::size_t> groups;
    groups.reserve(parameters.size());
    for (std::size_t g = 0; g < group_sizes.size(); ++g) {
        if (group_sizes[g] == 0 || group_sizes[g] > parameters.size() - groups.size()) {
            groups.clear();
            break;
        }
        groups.insert(groups.end(), group_sizes[g], g);
    }
    if (groups.size() != parameters.size()) {
        throw usage_error{"the sizes of the gather groups do not add up to the " +
                              std::to_string(parameters.size()) + " parameters",
                          {.phase = phase::plan}};
    }
    return groups;
}

inline void require_chunk_bytes(const plan_options& options) {
    if (options.chunk_bytes < least_chunk_bytes) {
        throw usage_error{"chunks of " + std::to_string(options.chunk_bytes) +
                              " bytes are too small; allow " + std::to_string(least_chunk_bytes) +
                              " or more",
                          {.phase = phase::plan}};
    }
}

}  // namespace detail

/// Calls `visit(index, offset)` for each read of a chunk: its index in the section, and the byte of
/// the chunk where it begins.
template <class Section, class Visit>
void for_each_read(const Section& section, const pull_chunk& chunk, const manifest& parameters,
                   Visit&& visit) {
    std::uint64_t offset = 0;
    for (std::size_t i = chunk.first; i < chunk.first + chunk.count; ++i) {
        const auto& read = detail::read_at(section, i);
        visit(i, offset);
        offset = detail::align_packed(offset + read.bytes(item_bytes_of(parameters[read.source])));
    }
}

/// A hash of what a chunk holds and how it is packed: equal for chunks with the same bytes, of
/// whichever worker or section.
[[nodiscard]] inline std::uint64_t hash_of(const pull_section& section, const pull_chunk& chunk) {
    return detail::hash_of_chunk(section, chunk);
}
/// @copydoc hash_of(const pull_section&, const pull_chunk&)
[[nodiscard]] inline std::uint64_t hash_of(const owner_section& section, const pull_chunk& chunk) {
    return detail::hash_of_chunk(section, chunk);
}

/// A hash of all that a part says. Worker and owner compare it before any byte moves.
[[nodiscard]] inline std::uint64_t hash_of(const owner_part& part) {
    detail::word_hash hash{part.manifest_hash};
    hash.add(static_cast<std::uint64_t>(part.worker)).add(static_cast<std::uint64_t>(part.owner));
    hash.add(part.sections.size());
    for (const auto& section : part.sections) {
        hash.add(static_cast<std::uint64_t>(section.ingester)).add(section.reads.size());
        hash.add(section.chunks.size());
        for (const auto& chunk : section.chunks) {
            hash.add(chunk.first).add(hash_of(section, chunk));
        }
    }
    return hash.value();
}

/// The plan of one worker. Immutable once made.
class worker_plan {
public:
    worker_plan() = default;

    [[nodiscard]] int worker() const noexcept { return worker_; }
    /// By ascending owner, then ingester. Every element that the worker needs is in exactly one.
    [[nodiscard]] std::span<const pull_section> sections() const& noexcept { return sections_; }
    std::span<const pull_section> sections() const&& = delete;
    /// Trainer ranks that have a section, also those that are asked only where a worker fails;
    /// ascending.
    [[nodiscard]] std::vector<int> owners() const {
        std::vector<int> all;
        for (const auto& section : sections_) {
            if (all.empty() || all.back() != section.owner) {
                all.push_back(section.owner);
            }
        }
        return all;
    }
    /// Other workers that take something for this one; ascending.
    [[nodiscard]] std::vector<int> node_peers() const {
        std::vector<int> all;
        for (const auto& section : sections_) {
            if (section.ingester != no_ingester && section.ingester != worker_) {
                all.push_back(section.ingester);
            }
        }
        std::ranges::sort(all);
        all.erase(std::unique(all.begin(), all.end()), all.end());
        return all;
    }
    /// What an owner has to agree to.
    [[nodiscard]] owner_part part_for(int owner) const {
        owner_part part{
            .worker = worker_, .owner = owner, .manifest_hash = manifest_hash_, .sections = {}};
        for (const auto& section : sections_) {
            if (section.owner != owner) {
                continue;
            }
            auto& made =
                part.sections.emplace_back(owner_section{section.ingester, {}, section.chunks});
            made.reads.reserve(section.tasks.size());
            for (const auto& task : section.tasks) {
                made.reads.push_back(task.read);
            }
        }
        return part;
    }
    /// Bytes that the worker takes from an owner as long as no other worker fails.
    [[nodiscard]] std::uint64_t bytes_from(int owner) const {
        return bytes_of([&](const pull_section& section) {
            return section.owner == owner &&
                   (section.ingester == no_ingester || section.ingester == worker_);
        });
    }
    /// Bytes that the worker takes from another worker of its node.
    [[nodiscard]] std::uint64_t bytes_from_peer(int ingester) const {
        return bytes_of([&](const pull_section& section) {
            return section.ingester == ingester && ingester != worker_ && ingester != no_ingester;
        });
    }
    /// Bytes of all reads.
    [[nodiscard]] std::uint64_t bytes() const {
        return bytes_of([](const pull_section&) { return true; });
    }

private:
    friend worker_plan plan_worker(const manifest& checkpoint,
                                   std::span<const std::size_t> group_sizes,
                                   const ownership& owners, const pull_needs& needs,
                                   const worker_route& route, const plan_options& options);

    template <class Chosen>
    [[nodiscard]] std::uint64_t bytes_of(Chosen&& chosen) const {
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < sections_.size(); ++i) {
            sum += chosen(sections_[i]) ? section_bytes_[i] : 0;
        }
        return sum;
    }

    int worker_ = 0;
    std::uint64_t manifest_hash_ = 0;
    std::vector<pull_section> sections_;
    std::vector<std::uint64_t> section_bytes_;
};

namespace detail {

/// Puts tasks into chunks.
class chunk_cutter {
public:
    chunk_cutter(const manifest& checkpoint, const plan_options& options)
        : checkpoint_{checkpoint}, most_{options.chunk_bytes} {}

    /// Appends a task of the gather group `group` to a section. Tasks come in order.
    void add(pull_section& section, read_task task, std::size_t group) const {
        const auto item = item_bytes_of(checkpoint_[task.read.source]);
        const auto bytes = task.read.bytes(item);
        if (bytes <= most_) {
            append(section, std::move(task), bytes, group);
            return;
        }
        // A cut may leave many parts, which are aligned; there is room for that.
        constexpr std::uint64_t spare = 2 * (most_read_dimensions + 1) * packed_alignment;
        const auto elements = task.read.elements();
        const auto piece = (most_ - spare) / item;
        std::vector<read_task> parts;
        for (std::uint64_t begin = 0; begin < elements;) {
            const auto length = elements - begin <= piece ? elements - begin
                                                          : neat_cut(task.read, piece, piece / 2);
            parts.clear();
            cut_task(task, begin, begin + length, parts);
            for (auto& part : parts) {
                const auto part_bytes = part.read.bytes(item);
                append(section, std::move(part), part_bytes, group);
            }
            begin += length;
        }
    }

private:
    void append(pull_section& section, read_task task, std::uint64_t bytes,
                std::size_t group) const {
        const auto open = [&] { section.chunks.push_back({group, section.tasks.size(), 0, 0}); };
        if (section.chunks.empty() || section.chunks.back().group != group) {
            open();
        } else if (align_packed(section.chunks.back().bytes) + bytes > most_) {
            open();
        }
        auto& chunk = section.chunks.back();
        chunk.bytes = align_packed(chunk.bytes) + bytes;
        ++chunk.count;
        section.tasks.push_back(std::move(task));
    }

    const manifest& checkpoint_;
    std::uint64_t most_;
};

/// Gives each task of a worker to a section.
class task_sorter {
public:
    task_sorter(const manifest& checkpoint, const ownership& owners, const worker_route& route)
        : checkpoint_{checkpoint}, owners_{owners}, route_{route} {
        for (const auto& one : route.classes) {
            std::vector<std::uint64_t> weights;
            for (const auto& share : one.shares) {
                weights.push_back(share.bytes);
            }
            of_class_.emplace(one.holder_class,
                              std::pair{&one, dealer{std::move(weights), route.least_split_bytes}});
        }
    }

    /// @param tasks of one position. `add(owner, ingester, task)` gets each, cut where needed.
    template <class Add>
    void sort(std::span<const read_task> tasks, Add&& add) {
        const auto position = tasks[0].read.source;
        while (next_shared_ < route_.shared.size() &&
               route_.shared[next_shared_].position < position) {
            refuse(route_.shared[next_shared_].position,
                   "shares bytes that this worker does not "
                   "need");
        }
        if (next_shared_ < route_.shared.size() &&
            route_.shared[next_shared_].position == position) {
            sort_shared(tasks, add);
        } else {
            sort_own(tasks, add);
        }
    }
    /// After the last position.
    void finish() const {
        if (next_shared_ < route_.shared.size()) {
            refuse(route_.shared[next_shared_].position,
                   "shares bytes that this worker does not "
                   "need");
        }
    }

private:
    [[noreturn]] void refuse(std::size_t position, const std::string& why) const {
        throw mismatch_error{
            "the trainer's routing " + why + "; route again with what the workers need now",
            {.phase = phase::plan,
             .tensor = position < checkpoint_.size() ? checkpoint_[position].name : std::string{}}};
    }
    void require_holder(std::size_t position, int owner) const {
        if (!std::ranges::binary_search(owners_.holders(position), owner)) {
            refuse(position, "asks trainer rank " + std::to_string(owner) +
                                 " for a parameter that it does not hold");
        }
    }
    template <class Add>
    void sort_own(std::span<const read_task> tasks, Add&& add) {
        const auto position = tasks[0].read.source;
        const auto found = of_class_.find(owners_.class_of(position));
        if (found == of_class_.end() || found->second.first->shares.empty()) {
            refuse(position, "names nobody who serves this parameter to this worker");
        }
        const auto& shares = found->second.first->shares;
        const auto item = item_bytes_of(checkpoint_[position]);
        for (const auto& task : tasks) {
            for (const auto& piece :
                 found->second.second.deal(task.read.bytes(item), [&](std::uint64_t wanted) {
                     const auto elements = wanted / item;
                     return neat_cut(task.read, elements, elements / 256) * item;
                 })) {
                const auto owner = shares[piece.taker].owner;
                require_holder(position, owner);
                parts_.clear();
                cut_task(task, piece.begin / item, piece.end / item, parts_);
                for (auto& part : parts_) {
                    add(owner, no_ingester, std::move(part));
                }
            }
        }
    }
    template <class Add>
    void sort_shared(std::span<const read_task> tasks, Add&& add) {
        const auto position = tasks[0].read.source;
        std::uint64_t base = 0;  // elements of the reads before
        std::uint64_t reached = 0;
        auto task = tasks.begin();
        for (; next_shared_ < route_.shared.size() &&
               route_.shared[next_shared_].position == position;
             ++next_shared_) {
            const auto& piece = route_.shared[next_shared_];
            require_holder(position, piece.owner);
            if (piece.begin != reached || piece.end <= piece.begin || piece.ingester < 0) {
                refuse(position, "shares pieces that do not follow one another");
            }
            while (reached < piece.end) {
                if (task == tasks.end()) {
                    refuse(position, "shares more of this parameter than this worker needs");
                }
                const auto elements = task->read.elements();
                const auto upto = std::min(piece.end, base + elements);
                parts_.clear();
                cut_task(*task, reached - base, upto - base, parts_);
                for (auto& part : parts_) {
                    add(piece.owner, piece.ingester, std::move(part));
                }
                reached = upto;
                if (reached == base + elements) {
                    base = reached;
                    ++task;
                }
            }
        }
        if (task != tasks.end()) {
            refuse(position, "shares less of this parameter than this worker needs");
        }
    }

    const manifest& checkpoint_;
    const ownership& owners_;
    const worker_route& route_;
    std::map<std::size_t, std::pair<const class_shares*, dealer>> of_class_;
    std::size_t next_shared_ = 0;
    std::vector<read_task> parts_;
};

}  // namespace detail

/// Makes the plan of a worker.
/// @param group_sizes of the gather groups of `checkpoint`.
/// @param needs of the worker. @param route its row of the routing.
/// @throws usage_error groups that do not add up, or chunks that are too small.
/// @throws mismatch_error the route does not fit what the worker needs, or asks a rank for what it
/// does not hold; names the parameter.
[[nodiscard]] inline worker_plan plan_worker(const manifest& checkpoint,
                                             std::span<const std::size_t> group_sizes,
                                             const ownership& owners, const pull_needs& needs,
                                             const worker_route& route,
                                             const plan_options& options = {}) {
    detail::require_chunk_bytes(options);
    const auto groups = detail::groups_by_position(checkpoint, group_sizes);
    const detail::chunk_cutter cutter{checkpoint, options};
    detail::task_sorter sorter{checkpoint, owners, route};
    std::map<std::pair<int, int>, pull_section> sections;
    const auto tasks = needs.tasks();
    for (std::size_t begin = 0, end = 0; begin < tasks.size(); begin = end) {
        const auto position = tasks[begin].read.source;
        while (end < tasks.size() && tasks[end].read.source == position) {
            ++end;
        }
        if (position >= groups.size()) {
            throw usage_error{"the needs are of another list of parameters",
                              {.phase = phase::plan}};
        }
        sorter.sort(tasks.subspan(begin, end - begin),
                    [&](int owner, int ingester, read_task task) {
                        auto& section = sections[{owner, ingester}];
                        section.owner = owner;
                        section.ingester = ingester;
                        cutter.add(section, std::move(task), groups[position]);
                    });
    }
    sorter.finish();
    worker_plan made;
    made.worker_ = route.worker;
    made.manifest_hash_ = checkpoint.hash();
    for (auto& [key, section] : sections) {
        std::uint64_t bytes = 0;
        for (const auto& task : section.tasks) {
            bytes += task.read.bytes(item_bytes_of(checkpoint[task.read.source]));
        }
        made.section_bytes_.push_back(bytes);
        made.sections_.push_back(std::move(section));
    }
    return made;
}

}  // namespace weightwire::plan
