#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/regions.hpp>
#include <weightwire/plan/word_hash.hpp>

/// @file
/// What a worker reads of the checkpoint: sets of elements, each read once whatever is made of it.

namespace weightwire::plan {

/// One dimension of a read. The stride counts elements of the parameter in C order.
struct read_dimension {
    std::int64_t extent = 1;
    std::int64_t stride = 1;
    friend constexpr bool operator==(const read_dimension&, const read_dimension&) = default;
};

/// The most dimensions of a read: as many as a recorded view may have.
inline constexpr std::size_t most_read_dimensions = 16;

/// A set of elements of one parameter of the checkpoint. In normal form two reads are equal if and
/// only if their elements are: no extent below 2, each stride larger than the distance from the
/// first to the last element of the dimensions inside it, and no two dimensions that are one.
///
/// Its elements one after the other, by ascending address, are its *packed order*.
struct pull_read {
    std::size_t source = 0;                    ///< position in the manifest of the checkpoint
    std::int64_t offset = 0;                   ///< first element
    std::vector<read_dimension> dimensions{};  ///< outermost first; none is one element

    [[nodiscard]] std::uint64_t elements() const noexcept {
        std::uint64_t product = 1;
        for (const auto& dimension : dimensions) {
            product *= static_cast<std::uint64_t>(dimension.extent);
        }
        return product;
    }
    [[nodiscard]] std::uint64_t bytes(std::size_t item_bytes) const noexcept {
        return elements() * item_bytes;
    }
    /// The last element.
    [[nodiscard]] std::int64_t last() const noexcept {
        auto sum = offset;
        for (const auto& [extent, stride] : dimensions) {
            sum += (extent - 1) * stride;
        }
        return sum;
    }
    /// Whether the elements lie together.
    [[nodiscard]] bool dense() const noexcept {
        return dimensions.empty() || (dimensions.size() == 1 && dimensions[0].stride == 1);
    }
    friend bool operator==(const pull_read&, const pull_read&) = default;
};

/// A read and what the worker makes of it.
struct read_task {
    pull_read read{};
    /// Copies of elements of the read, in normal form. Their sources are elements of the whole
    /// parameter, as recorded; `in_packed_order` turns them into elements of the packed read.
    std::vector<region> writes{};
    friend bool operator==(const read_task&, const read_task&) = default;
};

/// Bytes of an element of a parameter that may be read. Those without whole bytes cannot be
/// recorded.
[[nodiscard]] inline std::size_t item_bytes_of(const param_meta& parameter) noexcept {
    return item_bits(parameter.dtype) / 8;
}

/// Calls `visit(source_byte, packed_byte, bytes)`, all `std::uint64_t`, for every run of a read, in
/// packed order. No run touches the one before it.
template <class Visit>
void for_each_read_run(const pull_read& read, std::size_t item_bytes, Visit&& visit) {
    region all{.source = read.source, .source_offset = read.offset};
    auto packed = static_cast<std::int64_t>(read.elements());
    for (const auto& [extent, stride] : read.dimensions) {
        packed /= extent;
        all.dimensions.push_back({extent, stride, packed});
    }
    for_each_run(all, item_bytes, std::forward<Visit>(visit));
}

/// A hash of the elements that a read in normal form has.
[[nodiscard]] inline std::uint64_t hash_of(const pull_read& read) noexcept {
    detail::word_hash hash{read.source};
    hash.add(static_cast<std::uint64_t>(read.offset)).add(read.dimensions.size());
    for (const auto& [extent, stride] : read.dimensions) {
        hash.add(static_cast<std::uint64_t>(extent)).add(static_cast<std::uint64_t>(stride));
    }
    return hash.value();
}

namespace detail {

[[nodiscard]] inline lattice lattice_of(const pull_read& read) {
    lattice made{read.offset, {}};
    made.dimensions.reserve(read.dimensions.size());
    for (const auto& [extent, stride] : read.dimensions) {
        made.dimensions.push_back({extent, stride});
    }
    return made;
}

/// Dimensions by falling source stride. Those that read elements again come last.
[[nodiscard]] inline std::vector<region_dimension> by_source(const region& value) {
    auto dimensions = value.dimensions;
    std::ranges::stable_sort(
        dimensions, [](const auto& a, const auto& b) { return a.source_stride > b.source_stride; });
    return dimensions;
}

/// The elements that a region reads, or nothing where they are no lattice.
[[nodiscard]] inline std::optional<pull_read> read_of(const region& value) {
    pull_read made{value.source, value.source_offset, {}};
    std::int64_t inside = 0;
    auto dimensions = by_source(value);
    for (auto d = dimensions.size(); d-- > 0;) {
        const auto& [extent, stride, unused] = dimensions[d];
        if (stride == 0 || extent == 1) {
            continue;
        }
        if (stride <= inside) {
            return std::nullopt;
        }
        inside += (extent - 1) * stride;
        auto& reversed = made.dimensions;
        if (!reversed.empty() && reversed.back().extent * reversed.back().stride == stride) {
            reversed.back().extent *= extent;
        } else {
            reversed.push_back({extent, stride});
        }
    }
    std::ranges::reverse(made.dimensions);
    return made;
}

[[nodiscard]] inline pull_read dense_read(std::size_t source, std::int64_t begin,
                                          std::int64_t end) {
    pull_read made{source, begin, {}};
    if (end - begin > 1) {
        made.dimensions.push_back({end - begin, 1});
    }
    return made;
}

/// `value` with its source counted in packed elements of `read`; nothing where an element of it is
/// not one of the read, or only more than one region could say it.
[[nodiscard]] inline std::optional<region> packed_region(const pull_read& read,
                                                         const region& value) {
    const auto& all = read.dimensions;
    const auto count = all.size();
    std::vector<std::int64_t> packed(count + 1, 1);  // stride of each dimension, packed
    std::vector<std::int64_t> reach(count, 0);       // largest index of each that `value` has
    for (auto k = count; k-- > 0;) {
        packed[k] = packed[k + 1] * all[k].extent;
    }
    auto made = value;
    auto left = value.source_offset - read.offset;
    made.source_offset = 0;
    for (std::size_t k = 0; k < count && left >= 0; ++k) {
        reach[k] = left / all[k].stride;
        left -= reach[k] * all[k].stride;
        made.source_offset += reach[k] * packed[k + 1];
    }
    if (left != 0) {
        return std::nullopt;
    }
    for (auto& dimension : made.dimensions) {
        if (dimension.source_stride == 0) {
            continue;
        }
        std::size_t k = 0;
        while (k < count && all[k].stride > dimension.source_stride) {
            ++k;
        }
        if (k == count || dimension.source_stride % all[k].stride != 0) {
            return std::nullopt;
        }
        const auto steps = dimension.source_stride / all[k].stride;
        reach[k] += steps * (dimension.extent - 1);
        dimension.source_stride = steps * packed[k + 1];
    }
    for (std::size_t k = 0; k < count; ++k) {
        if (reach[k] >= all[k].extent) {
            return std::nullopt;
        }
    }
    normalize(made);
    return made;
}

/// Cuts what is regular in two or three: calls `emit(first, dimensions)` for the parts of the
/// elements whose address lies in `[low, high)`. `stride` of a dimension is its stride by address,
/// and dimensions come by falling stride, each larger than what those inside it span.
template <class Dimension, class Stride, class Emit>
void cut_window(std::int64_t first, std::span<const Dimension> dimensions, std::int64_t low,
                std::int64_t high, Stride&& stride, std::vector<std::int64_t>& index, Emit&& emit) {
    const auto depth = index.size();
    std::int64_t inside = 0;
    for (std::size_t d = depth; d < dimensions.size(); ++d) {
        inside += (dimensions[d].extent - 1) * stride(dimensions[d]);
    }
    if (first >= high || first + inside < low) {
        return;
    }
    if (first >= low && first + inside < high) {
        emit(first, std::int64_t{0}, depth < dimensions.size() ? dimensions[depth].extent : 1);
        return;
    }
    // Some of it lies outside, so there is a dimension with a stride.
    const auto step = stride(dimensions[depth]);
    const auto extent = dimensions[depth].extent;
    inside -= (extent - 1) * step;
    const auto begin = std::clamp(-floor_divide(first - low, step), std::int64_t{0}, extent);
    const auto end =
        std::clamp(floor_divide(high - 1 - inside - first, step) + 1, std::int64_t{0}, extent);
    const auto within = [&](std::int64_t i) {
        index.push_back(i);
        cut_window(first + i * step, dimensions, low, high, stride, index, emit);
        index.pop_back();
    };
    if (begin > end) {  // the window lies inside one step
        within(end);
        return;
    }
    if (begin > 0) {
        within(begin - 1);
    }
    if (begin < end) {
        emit(first + begin * step, begin, end - begin);
    }
    if (end < extent) {
        within(end);
    }
}

/// The parts of a read whose elements have addresses in `[low, high)`, in packed order.
inline void cut_read(const pull_read& read, std::int64_t low, std::int64_t high,
                     std::vector<pull_read>& out) {
    std::vector<std::int64_t> index;
    const auto stride = [](const read_dimension& d) { return d.stride; };
    cut_window(read.offset, std::span{read.dimensions}, low, high, stride, index,
               [&](std::int64_t first, std::int64_t, std::int64_t extent) {
                   auto& made = out.emplace_back(pull_read{read.source, first, {}});
                   const auto rest = std::span{read.dimensions}.subspan(index.size());
                   made.dimensions.assign(rest.begin(), rest.end());
                   if (!rest.empty()) {
                       made.dimensions.front().extent = extent;
                   }
                   if (extent == 1 && !rest.empty()) {
                       made.dimensions.erase(made.dimensions.begin());
                   }
               });
}

/// The parts of a region whose sources have addresses in `[low, high)`, in normal form. The region
/// reads a lattice.
inline void cut_region(const region& value, std::int64_t low, std::int64_t high,
                       std::vector<region>& out) {
    std::vector<std::int64_t> index;
    const auto dimensions = by_source(value);
    const auto stride = [](const region_dimension& d) { return d.source_stride; };
    cut_window(value.source_offset, std::span{dimensions}, low, high, stride, index,
               [&](std::int64_t first, std::int64_t begin, std::int64_t extent) {
                   region made{value.source,
                               value.destination,
                               first,
                               value.destination_offset,
                               {dimensions.begin() + static_cast<std::ptrdiff_t>(index.size()),
                                dimensions.end()}};
                   for (std::size_t d = 0; d < index.size(); ++d) {
                       made.destination_offset += index[d] * dimensions[d].destination_stride;
                   }
                   if (!made.dimensions.empty()) {
                       made.destination_offset += begin * made.dimensions[0].destination_stride;
                       made.dimensions[0].extent = extent;
                   }
                   normalize(made);
                   out.push_back(std::move(made));
               });
}

/// Address of element `packed` of a read, in packed order; one past the last for all of them.
[[nodiscard]] inline std::int64_t address_of(const pull_read& read, std::uint64_t packed) {
    auto count = read.elements();
    if (packed >= count) {
        return read.last() + 1;
    }
    auto address = read.offset;
    for (const auto& [extent, stride] : read.dimensions) {
        count /= static_cast<std::uint64_t>(extent);
        address += static_cast<std::int64_t>(packed / count) * stride;
        packed %= count;
    }
    return address;
}

}  // namespace detail

/// A write of a read with its source counted in elements of the packed read: what is copied out of
/// a chunk.
/// @throws usage_error `write` reads other elements than those of `read`.
[[nodiscard]] inline region in_packed_order(const pull_read& read, const region& write) {
    auto made = write.source == read.source ? detail::packed_region(read, write) : std::nullopt;
    if (!made) {
        throw usage_error{"a write takes elements that its read does not have",
                          {.phase = phase::plan}};
    }
    return *std::move(made);
}

/// Elements `[begin, end)` of a task's packed read, as tasks. There are two more than the read has
/// dimensions at most, twice; mostly there is one.
inline void cut_task(const read_task& task, std::uint64_t begin, std::uint64_t end,
                     std::vector<read_task>& out) {
    if (begin == 0 && end >= task.read.elements()) {
        out.push_back(task);
        return;
    }
    std::vector<pull_read> parts;
    if (begin < end) {
        detail::cut_read(task.read, detail::address_of(task.read, begin),
                         detail::address_of(task.read, end), parts);
    }
    for (auto& part : parts) {
        auto& made = out.emplace_back(read_task{std::move(part), {}});
        for (const auto& write : task.writes) {
            detail::cut_region(write, made.read.offset, made.read.last() + 1, made.writes);
        }
    }
}

/// An element of a read's packed order at or a little below `wanted`, where a cut leaves few parts:
/// a multiple of the outermost dimension's step or, where the elements lie together, of a power of
/// two. Never 0 unless `wanted` is.
/// @param lost how far below `wanted` it may be.
[[nodiscard]] inline std::uint64_t neat_cut(const pull_read& read, std::uint64_t wanted,
                                            std::uint64_t lost) noexcept {
    auto step = read.elements();
    if (wanted >= step) {
        return step;
    }
    for (const auto& dimension : read.dimensions) {
        step /= static_cast<std::uint64_t>(dimension.extent);
        if (step > 1 && wanted >= step && wanted % step <= lost) {
            return wanted - wanted % step;
        }
    }
    const auto granule = std::bit_floor(std::min({lost + 1, wanted, std::uint64_t{1} << 15U}) | 1U);
    return wanted - wanted % granule;
}

}  // namespace weightwire::plan
