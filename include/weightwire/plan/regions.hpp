#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>

/// @file
/// What a recorded copy comes down to: elements of one parameter go to elements of another, both at
/// regular strides.

namespace weightwire::plan {

/// One dimension of a region. Strides count elements of the parameter in C order.
struct region_dimension {
    std::int64_t extent = 1;
    std::int64_t source_stride = 0;  ///< 0 where elements are read again
    std::int64_t destination_stride = 0;
    friend constexpr bool operator==(const region_dimension&, const region_dimension&) = default;
};

/// A copy of elements. In normal form, which `normalize` makes, two regions are equal if and only
/// if they give the same elements of the destination the same elements of the source.
struct region {
    /// The source of a region that nothing is copied to.
    static constexpr std::size_t no_source = std::numeric_limits<std::size_t>::max();

    std::size_t source = no_source;              ///< position in the manifest of the checkpoint
    std::size_t destination = 0;                 ///< position in the manifest of the worker
    std::int64_t source_offset = 0;              ///< first element
    std::int64_t destination_offset = 0;         ///< first element
    std::vector<region_dimension> dimensions{};  ///< outermost first; none is one element

    /// Number of elements that are written.
    [[nodiscard]] std::uint64_t elements() const noexcept {
        std::uint64_t product = 1;
        for (const auto& dimension : dimensions) {
            product *= static_cast<std::uint64_t>(dimension.extent);
        }
        return product;
    }
    /// Bytes that are written, of elements of `item_bytes`.
    [[nodiscard]] std::uint64_t bytes(std::size_t item_bytes) const noexcept {
        return elements() * item_bytes;
    }
    friend bool operator==(const region&, const region&) = default;
};

/// Brings a region to its normal form: no dimension of extent 1, the one with the largest
/// destination stride first, no two that are one. A region without elements has the one dimension
/// (0, 0, 0) and offsets 0. Regions of views have distinct destination elements, which this needs.
inline void normalize(region& value) {
    auto& all = value.dimensions;
    if (value.elements() == 0) {
        value.source_offset = 0;
        value.destination_offset = 0;
        all.assign(1, {0, 0, 0});
        return;
    }
    std::erase_if(all, [](const region_dimension& d) { return d.extent == 1; });
    std::ranges::stable_sort(all, [](const region_dimension& a, const region_dimension& b) {
        return a.destination_stride > b.destination_stride;
    });
    std::size_t kept = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
        const auto inner = all[i];
        if (kept > 0 && all[kept - 1].source_stride == inner.extent * inner.source_stride &&
            all[kept - 1].destination_stride == inner.extent * inner.destination_stride) {
            all[kept - 1] = {all[kept - 1].extent * inner.extent, inner.source_stride,
                             inner.destination_stride};
        } else {
            all[kept++] = inner;
        }
    }
    all.resize(kept);
}

/// Elements that lie together in source and destination: what one step of a walk covers.
[[nodiscard]] inline std::uint64_t run_elements(const region& value) noexcept {
    if (value.dimensions.empty()) {
        return 1;
    }
    const auto& inner = value.dimensions.back();
    return inner.source_stride == 1 && inner.destination_stride == 1
               ? static_cast<std::uint64_t>(inner.extent)
               : std::min<std::uint64_t>(1, static_cast<std::uint64_t>(inner.extent));
}

/// Calls `visit(source_byte, destination_byte, bytes)`, all `std::uint64_t`, for every run of a
/// region in normal form, in the destination's order. No run could be one with the run before it.
template <class Visit>
void for_each_run(const region& value, std::size_t item_bytes, Visit&& visit) {
    const auto run = run_elements(value);
    if (value.elements() == 0) {
        return;
    }
    auto outer = std::span{value.dimensions};
    outer = outer.first(run > 1 ? outer.size() - 1 : outer.size());
    std::vector<std::int64_t> index(outer.size(), 0);
    auto source = value.source_offset;
    auto destination = value.destination_offset;
    const auto item = static_cast<std::uint64_t>(item_bytes);
    std::array<std::uint64_t, 3> open{};  // source, destination and bytes of the run so far
    for (bool more = true; more;) {
        const auto from = static_cast<std::uint64_t>(source) * item;
        const auto to = static_cast<std::uint64_t>(destination) * item;
        if (open[2] > 0 && from == open[0] + open[2] && to == open[1] + open[2]) {
            open[2] += run * item;
        } else {
            if (open[2] > 0) {
                visit(open[0], open[1], open[2]);
            }
            open = {from, to, run * item};
        }
        more = false;
        for (auto d = outer.size(); d-- > 0 && !more;) {
            more = ++index[d] < outer[d].extent;
            const auto steps = more ? 1 : 1 - outer[d].extent;
            source += steps * outer[d].source_stride;
            destination += steps * outer[d].destination_stride;
            index[d] = more ? index[d] : 0;
        }
    }
    visit(open[0], open[1], open[2]);
}

/// A 64-bit hash of all that a region says; the same on every machine.
[[nodiscard]] inline std::uint64_t hash_of(const region& value) noexcept {
    std::uint64_t hash = 0;
    const auto add = [&hash](std::uint64_t word) {
        hash = weightwire::detail::digest_term(word, (hash + 1) * weightwire::detail::digest_key);
    };
    add(value.source);
    add(value.destination);
    add(static_cast<std::uint64_t>(value.source_offset));
    add(static_cast<std::uint64_t>(value.destination_offset));
    add(value.dimensions.size());
    for (const auto& dimension : value.dimensions) {
        add(static_cast<std::uint64_t>(dimension.extent));
        add(static_cast<std::uint64_t>(dimension.source_stride));
        add(static_cast<std::uint64_t>(dimension.destination_stride));
    }
    return hash;
}

/// The same of a list, in its order.
[[nodiscard]] inline std::uint64_t hash_of(std::span<const region> values) noexcept {
    std::uint64_t hash = values.size();
    for (const auto& value : values) {
        hash = weightwire::detail::digest_term(hash_of(value),
                                               (hash + 1) * weightwire::detail::digest_key);
    }
    return hash;
}

namespace detail {

/// A regular set of elements. The stride of each dimension is larger than all that the dimensions
/// inside it span, so that every element is there once and the first has the smallest index.
struct lattice {
    struct dimension {
        std::int64_t extent;
        std::int64_t stride;
    };
    std::int64_t first = 0;
    std::vector<dimension> dimensions{};  // outermost first

    /// Distance from the first element to the last.
    [[nodiscard]] std::int64_t span() const noexcept {
        std::int64_t sum = 0;
        for (const auto& [extent, stride] : dimensions) {
            sum += (extent - 1) * stride;
        }
        return sum;
    }
    [[nodiscard]] std::int64_t last() const noexcept { return first + span(); }
    /// One step of the outermost dimension, moved by `distance`.
    [[nodiscard]] lattice inner(std::int64_t distance) const {
        return {first + distance, {dimensions.begin() + 1, dimensions.end()}};
    }
};

[[nodiscard]] inline lattice destination_lattice(const region& value) {
    lattice made{value.destination_offset, {}};
    made.dimensions.reserve(value.dimensions.size());
    for (const auto& dimension : value.dimensions) {
        made.dimensions.push_back({dimension.extent, dimension.destination_stride});
    }
    return made;
}

[[nodiscard]] constexpr std::int64_t floor_divide(std::int64_t a, std::int64_t b) noexcept {
    return a / b - (a % b < 0 ? 1 : 0);
}

/// Whether two sets share an element. After `steps` steps without an answer it is yes.
[[nodiscard]] inline bool share_element(const lattice& a, const lattice& b, std::int64_t& steps) {
    if (--steps < 0) {
        return true;
    }
    if (a.first > b.last() || b.first > a.last()) {
        return false;
    }
    if (a.dimensions.empty() && b.dimensions.empty()) {
        return a.first == b.first;
    }
    if (a.dimensions.empty() ||
        (!b.dimensions.empty() && b.dimensions[0].stride > a.dimensions[0].stride)) {
        return share_element(b, a, steps);
    }
    std::int64_t common = 0;
    for (const auto* side : {&a, &b}) {
        for (const auto& dimension : side->dimensions) {
            common = std::gcd(common, dimension.stride);
        }
    }
    if ((a.first - b.first) % common != 0) {
        return false;
    }
    // Of `a` the slices, each inside `stride` elements.
    const auto [extent, stride] = a.dimensions[0];
    const auto fine = b.dimensions.empty() ? lattice::dimension{1, stride} : b.dimensions[0];
    if (fine.stride != stride && stride % fine.stride == 0 && fine.extent > stride / fine.stride) {
        // As many slices of `b` with the same stride, and what is left.
        const auto per_slice = stride / fine.stride;
        const auto whole = fine.extent / per_slice;
        auto slices = b;
        slices.dimensions[0] = {per_slice, fine.stride};
        slices.dimensions.insert(slices.dimensions.begin(), {whole, stride});
        auto rest = b;
        rest.first += whole * stride;
        rest.dimensions[0].extent = fine.extent % per_slice;
        return share_element(a, slices, steps) ||
               (rest.dimensions[0].extent > 0 && share_element(a, rest, steps));
    }
    // Equal strides: slices i of `a` and k of `b` matter only by i - k. Else `b` is whole.
    const bool equal = !b.dimensions.empty() && fine.stride == stride;
    const auto other = equal ? b.inner(0) : b;
    const auto least = equal ? 1 - fine.extent : std::int64_t{0};
    const auto within = a.inner(0).span();
    const auto begin = std::max(least, -floor_divide(a.first + within - other.first, stride));
    const auto end = std::min(extent - 1, floor_divide(other.last() - a.first, stride));
    for (auto i = begin; i <= end; ++i) {
        if (share_element(a.inner(i * stride), other, steps)) {
            return true;
        }
    }
    return false;
}

/// What is wrong with offset and strides of one side of a region; empty where nothing is.
[[nodiscard]] inline std::string side_problem(const region& value, std::int64_t offset,
                                              std::int64_t region_dimension::*stride,
                                              const param_meta& parameter) {
    // Below 2^62 no sum or product of a normal form overflows.
    const auto numel = parameter.shape.checked_numel().value_or(0);
    const auto most = std::min(numel, std::uint64_t{1} << 62U);
    auto last = checked_cast<std::uint64_t>(offset);
    for (const auto& dimension : value.dimensions) {
        const auto step = checked_cast<std::uint64_t>(dimension.*stride);
        const auto reach =
            step && dimension.extent > 0
                ? checked_multiply(*step, static_cast<std::uint64_t>(dimension.extent - 1))
                : std::nullopt;
        last = last && reach ? checked_add(*last, *reach) : std::nullopt;
    }
    if (last && *last < most) {
        return {};
    }
    return "it begins at element " + std::to_string(offset) + " and " +
           (last ? "ends at " + std::to_string(*last)
                 : std::string{"has an extent or a stride that none may have"}) +
           ", where `" + parameter.name + "` has " + std::to_string(numel) + " elements";
}

}  // namespace detail

/// Most steps that `destinations_overlap` takes. Regions of slices by rank, head, expert or stage
/// take about ten; only steps of `slice` that are no multiples of each other may take many.
inline constexpr std::int64_t most_overlap_steps = std::int64_t{1} << 20U;

/// Whether two regions in normal form write an element of one parameter twice. Exact up to
/// `most_overlap_steps`; beyond them the answer is yes, so that a no can be relied on.
[[nodiscard]] inline bool destinations_overlap(const region& a, const region& b) {
    if (a.destination != b.destination || a.elements() == 0 || b.elements() == 0) {
        return false;
    }
    auto steps = most_overlap_steps;
    return detail::share_element(detail::destination_lattice(a), detail::destination_lattice(b),
                                 steps);
}

/// Checks a region that somebody else made, before it is used.
/// @param source ignored where the region has no source.
/// @throws mismatch_error it is not in normal form, leaves its source or its destination, or writes
/// an element twice; names the parameter.
inline void require_within(const region& value, const param_meta& source,
                           const param_meta& destination) {
    const auto refuse = [](const param_meta& parameter, const std::string& why) {
        throw mismatch_error{"a region does not fit the parameter: " + why +
                                 "; plan again with the same names, dtypes and shapes",
                             {.phase = phase::plan, .tensor = parameter.name}};
    };
    if (value.source != region::no_source) {
        if (const auto why = detail::side_problem(value, value.source_offset,
                                                  &region_dimension::source_stride, source);
            !why.empty()) {
            refuse(source, why);
        }
        if (source.dtype != destination.dtype) {
            refuse(source, "it holds " + std::string{to_string(source.dtype)} + ", and `" +
                               destination.name + "` " + std::string{to_string(destination.dtype)});
        }
    } else if (value.source_offset != 0 || std::ranges::any_of(value.dimensions, [](const auto& d) {
                   return d.source_stride != 0;
               })) {
        refuse(destination, "it has no source, yet an offset or a stride there");
    }
    if (const auto why = detail::side_problem(value, value.destination_offset,
                                              &region_dimension::destination_stride, destination);
        !why.empty()) {
        refuse(destination, why);
    }
    std::int64_t inside = 0;  // below the number of elements, which fits
    for (auto d = value.dimensions.size(); d-- > 0;) {
        const auto& dimension = value.dimensions[d];
        if (dimension.destination_stride <= inside) {
            refuse(destination, "it writes an element twice, or its dimensions are not in order");
        }
        inside += (dimension.extent - 1) * dimension.destination_stride;
    }
    auto normal = value;
    normalize(normal);
    if (normal != value) {
        refuse(destination, "it is not in normal form");
    }
}

/// Two regions that write an element twice, by their places in a list.
using region_pair = std::pair<std::size_t, std::size_t>;
/// No pair.
inline constexpr region_pair no_pair{region::no_source, region::no_source};

/// Looks for regions in normal form that overlap, among those at `places` of `all`, which have one
/// destination. Takes n log n steps where they lie one after the other.
/// @returns the first pair that was found, or `no_pair`.
[[nodiscard]] inline region_pair find_overlap(std::span<const region> all,
                                              std::vector<std::size_t> places) {
    const auto end_of = [](const region& value) {
        return value.destination_offset + detail::destination_lattice(value).span();
    };
    std::erase_if(places, [&](std::size_t place) { return all[place].elements() == 0; });
    std::ranges::sort(places, {}, [&](std::size_t place) {
        return std::pair{all[place].destination_offset, place};
    });
    std::vector<std::pair<std::size_t, std::int64_t>> open;  // place and last element
    for (const auto place : places) {
        std::erase_if(open,
                      [&](const auto& one) { return one.second < all[place].destination_offset; });
        for (const auto& [other, last] : open) {
            if (destinations_overlap(all[other], all[place])) {
                return {std::min(other, place), std::max(other, place)};
            }
        }
        open.emplace_back(place, end_of(all[place]));
    }
    return no_pair;
}

/// First element that none of the regions at `places` of `all` writes, of a destination of `numel`
/// elements; `numel` where each is written. Takes a step a run: for messages.
[[nodiscard]] inline std::uint64_t first_unwritten(std::span<const region> all,
                                                   std::span<const std::size_t> places,
                                                   std::uint64_t numel) {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> runs;
    for (const auto place : places) {
        for_each_run(all[place], 1, [&](std::uint64_t, std::uint64_t to, std::uint64_t count) {
            if (!runs.empty() && runs.back().second == to) {
                runs.back().second += count;
            } else {
                runs.emplace_back(to, to + count);
            }
        });
    }
    std::ranges::sort(runs);
    std::uint64_t reached = 0;
    for (const auto& [begin, end] : runs) {
        if (begin > reached) {
            return reached;
        }
        reached = std::max(reached, end);
    }
    return std::min(reached, numel);
}

}  // namespace weightwire::plan
