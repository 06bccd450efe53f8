#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// How tensors of any strides are cut into pieces of work for the conversion kernel: pure
/// arithmetic, on the host, once a plan.

namespace weightwire::gpu {

/// One tensor to copy, and to convert where the types differ. One shape; strides are not negative,
/// and no two elements of `to` are one. Addresses have any alignment.
struct convert_item {
    mutable_tensor_view to;
    tensor_view from;
};

/// The element types of a kernel. What is only copied has two equal unsigned types.
struct convert_pair {
    dtype from = dtype::u8;
    dtype to = dtype::u8;
    // Not defaulted: nvcc 13.0 takes the == that comes with it for one that is nowhere defined.
    friend constexpr bool operator==(const convert_pair& a, const convert_pair& b) noexcept {
        return a.from == b.from && a.to == b.to;
    }
    friend constexpr auto operator<=>(const convert_pair& a, const convert_pair& b) noexcept {
        const auto first = a.from <=> b.from;
        return first != 0 ? first : a.to <=> b.to;
    }
};

/// How the threads of a block walk a tensor.
enum class convert_form : std::uint32_t {
    rows,        ///< runs that are contiguous on both sides, in words of 16 bytes
    transposed,  ///< dimension 0 is contiguous in the destination, dimension 1 in the source
    strided,     ///< element by element, in the order of the destination
    bytewise,    ///< the same at addresses that are no multiples of the element's size
};

/// One tensor as the kernel reads it: dimensions of extent 1 gone, those that lie together on both
/// sides joined, the rest from the destination's innermost on.
struct convert_entry {
    std::uint64_t source = 0;
    std::uint64_t destination = 0;
    convert_form form = convert_form::rows;
    std::uint32_t rank = 0;  ///< at least 1
    std::uint64_t elements = 0;
    std::array<std::uint64_t, max_dimensions + 1> extents{};
    std::array<std::uint64_t, max_dimensions + 1> source_strides{};  ///< in bytes
    std::array<std::uint64_t, max_dimensions + 1> destination_strides{};
};

/// One piece of work of one entry. `rows`: `count` elements from element `first` on, all in one
/// row; `strided`, `bytewise`: the same, in any; `transposed`: `count` squares from square `first`
/// on. Elements and squares are counted with dimension 0 as the fastest.
struct convert_tile {
    std::uint64_t first = 0;
    std::uint32_t entry = 0;
    std::uint32_t count = 0;
};

/// Tiles of one kernel launch.
struct convert_launch {
    convert_pair pair;
    convert_form form = convert_form::rows;
    std::uint32_t begin = 0;  ///< first tile
    std::uint32_t count = 0;
};

/// Elements of a tile at most.
inline constexpr std::uint64_t convert_tile_elements = 16384;
/// Shorter rows that are contiguous on both sides are walked as `strided`.
inline constexpr std::uint64_t convert_row_least = 2048;
/// Narrower matrices are not transposed through shared memory.
inline constexpr std::uint64_t convert_square_least = 8;

/// Edge of the squares that a block transposes in shared memory, in elements of `item` bytes.
[[nodiscard]] constexpr std::uint32_t convert_square_edge(std::size_t item) noexcept {
    return item <= 4 ? 64 : 32;
}

namespace detail {

/// A dimension of both sides, strides in bytes.
struct convert_dimension {
    std::uint64_t extent = 1;
    std::uint64_t from = 0;
    std::uint64_t to = 0;
};

[[nodiscard]] inline std::string described(const convert_item& item) {
    return std::string{to_string(item.from.type())} + to_string(item.from.extents()) + " to " +
           std::string{to_string(item.to.type())} + to_string(item.to.extents());
}

/// The dimensions that matter, in the order of the tensor.
/// @throws usage_error a negative stride, elements of the destination that are one, or an offset
/// that no address has.
[[nodiscard]] inline std::vector<convert_dimension> dimensions_of(const convert_item& item) {
    const auto refuse = [&](const char* text) {
        throw usage_error{"a tensor to convert, " + described(item) + ", has " + text};
    };
    const std::uint64_t from_item = item_bits(item.from.type()) / 8;
    const std::uint64_t to_item = item_bits(item.to.type()) / 8;
    std::vector<convert_dimension> dimensions;
    std::uint64_t from_reach = 0;
    std::uint64_t to_reach = 0;
    const auto reach = [&](std::uint64_t& sum, std::uint64_t stride, std::uint64_t extent) {
        const auto step = checked_multiply(stride, extent - 1);
        const auto next = step ? checked_add(sum, *step) : std::nullopt;
        if (!next || *next > INT64_MAX) {
            refuse("strides that leave the address space");
        }
        sum = *next;
    };
    for (std::size_t d = 0; d < item.from.extents().size(); ++d) {
        const auto extent = static_cast<std::uint64_t>(item.from.extents()[d]);
        if (extent == 1) {
            continue;
        }
        if (item.from.strides()[d] < 0 || item.to.strides()[d] < 0) {
            refuse("a negative stride; only strides from 0 on are converted");
        }
        if (item.to.strides()[d] == 0) {
            refuse("a destination with a stride of 0, whose elements would overwrite each other");
        }
        const auto from =
            checked_multiply(static_cast<std::uint64_t>(item.from.strides()[d]), from_item);
        const auto to = checked_multiply(static_cast<std::uint64_t>(item.to.strides()[d]), to_item);
        if (!from || !to) {
            refuse("strides that leave the address space");
        }
        reach(from_reach, *from, extent);
        reach(to_reach, *to, extent);
        dimensions.push_back({extent, *from, *to});
    }
    return dimensions;
}

/// From the destination's innermost dimension on; neighbours that lie together on both sides are
/// one.
inline void join_dimensions(std::vector<convert_dimension>& dimensions) {
    std::ranges::stable_sort(dimensions, [](const auto& a, const auto& b) {
        return std::pair{a.to, a.from} < std::pair{b.to, b.from};
    });
    std::size_t kept = 0;
    for (std::size_t d = 0; d < dimensions.size(); ++d) {
        const auto next = dimensions[d];
        if (kept != 0) {
            auto& last = dimensions[kept - 1];
            if (next.from == last.from * last.extent && next.to == last.to * last.extent) {
                last.extent *= next.extent;
                continue;
            }
        }
        dimensions[kept++] = next;
    }
    dimensions.resize(kept);
}

/// An unsigned type of `size` bytes, a power of two up to 8.
[[nodiscard]] constexpr dtype unsigned_type(std::uint64_t size) noexcept {
    return size == 1 ? dtype::u8 : size == 2 ? dtype::u16 : size == 4 ? dtype::u32 : dtype::u64;
}

/// One tensor, ready for the kernel.
struct planned_conversion {
    convert_pair pair;
    convert_entry entry;
};

/// Chooses the form; brings dimension 1 of `transposed` to its place.
[[nodiscard]] inline convert_form form_of(std::vector<convert_dimension>& dimensions,
                                          std::uint64_t from_item, std::uint64_t to_item) {
    const auto& inner = dimensions.front();
    if (inner.to != to_item) {
        return convert_form::strided;
    }
    if (inner.from == from_item) {
        return dimensions.size() == 1 || inner.extent >= convert_row_least ? convert_form::rows
                                                                           : convert_form::strided;
    }
    const auto second =
        std::find_if(dimensions.begin() + 1, dimensions.end(), [&](const convert_dimension& each) {
            return each.from == from_item && each.extent >= convert_square_least;
        });
    if (second == dimensions.end() || inner.extent < convert_square_least) {
        return convert_form::strided;
    }
    std::rotate(dimensions.begin() + 1, second, second + 1);
    return convert_form::transposed;
}

/// @throws unsupported_error types that do not convert. @throws usage_error two shapes, or strides
/// that the kernel does not walk.
[[nodiscard]] inline planned_conversion planned(const convert_item& item) {
    weightwire::detail::require_convertible(item.from.type(), item.to.type());
    if (item.from.extents() != item.to.extents()) {
        throw usage_error{"expected two tensors of one shape, found " + described(item)};
    }
    auto dimensions = dimensions_of(item);
    planned_conversion result{.pair = {item.from.type(), item.to.type()}, .entry = {}};
    auto& entry = result.entry;
    entry.source = reinterpret_cast<std::uint64_t>(item.from.data());
    entry.destination = reinterpret_cast<std::uint64_t>(item.to.data());
    std::uint64_t from_item = item_bits(item.from.type()) / 8;
    std::uint64_t to_item = item_bits(item.to.type()) / 8;
    bool aligned = entry.source % from_item == 0 && entry.destination % to_item == 0;
    if (item.from.type() == item.to.type()) {
        // Copied in the largest units that both addresses allow.
        std::uint64_t unit = std::min<std::uint64_t>(from_item, 8);
        while ((entry.source | entry.destination) % unit != 0) {
            unit /= 2;
        }
        if (unit != from_item) {
            dimensions.push_back({from_item / unit, unit, unit});
        }
        from_item = to_item = unit;
        result.pair = {unsigned_type(unit), unsigned_type(unit)};
        aligned = true;
    }
    join_dimensions(dimensions);
    if (dimensions.empty()) {
        dimensions.push_back({1, from_item, to_item});
    }
    entry.form = form_of(dimensions, from_item, to_item);
    if (!aligned) {
        entry.form = convert_form::bytewise;
    }
    entry.rank = static_cast<std::uint32_t>(dimensions.size());
    entry.elements = 1;
    for (std::size_t d = 0; d < dimensions.size(); ++d) {
        entry.extents[d] = dimensions[d].extent;
        entry.source_strides[d] = dimensions[d].from;
        entry.destination_strides[d] = dimensions[d].to;
        entry.elements *= dimensions[d].extent;
    }
    return result;
}

}  // namespace detail

/// The entries and tiles of one or several groups of tensors; a group is what is launched together,
/// as one kernel for each pair of types and form in it.
class convert_tiles {
public:
    /// Adds one group. Tensors without elements are left out; the others are taken in the order of
    /// their destinations, since memory takes writes that follow one another faster than scattered
    /// ones.
    /// @throws unsupported_error types that do not convert.
    /// @throws usage_error two shapes, a negative stride, a stride of 0 in a destination, or more
    /// than 2^31 tensors or tiles.
    void add_group(std::span<const convert_item> group) {
        std::vector<detail::planned_conversion> ordered;
        for (const convert_item& item : group) {
            if (item.to.byte_size() != 0 || item.from.byte_size() != 0) {
                ordered.push_back(detail::planned(item));
            }
        }
        std::ranges::stable_sort(ordered, [](const auto& a, const auto& b) {
            return std::tie(a.pair, a.entry.form, a.entry.destination) <
                   std::tie(b.pair, b.entry.form, b.entry.destination);
        });
        auto& launches = groups_.emplace_back();
        for (const auto& each : ordered) {
            if (launches.empty() || launches.back().pair != each.pair ||
                launches.back().form != each.entry.form) {
                launches.push_back({each.pair, each.entry.form, checked(tiles_.size()), 0});
            }
            cut(each.entry, item_bits(each.pair.to) / 8);
            launches.back().count = checked(tiles_.size()) - launches.back().begin;
            entries_.push_back(each.entry);
        }
    }

    [[nodiscard]] const std::vector<convert_entry>& entries() const noexcept { return entries_; }
    [[nodiscard]] const std::vector<convert_tile>& tiles() const noexcept { return tiles_; }
    /// The launches of each group.
    [[nodiscard]] const std::vector<std::vector<convert_launch>>& groups() const noexcept {
        return groups_;
    }

private:
    // Half of what an index holds: a kernel adds the size of its grid to one.
    static constexpr std::size_t most_tiles = std::size_t{1} << 31U;

    [[nodiscard]] static std::uint32_t checked(std::size_t count) {
        if (count > most_tiles) {
            throw usage_error{"a conversion has more than 2^31 tensors or tiles; split it"};
        }
        return static_cast<std::uint32_t>(count);
    }

    /// Pieces of at most `most` of `count`, from `first` on.
    void pieces(std::uint64_t first, std::uint64_t count, std::uint64_t most) {
        const auto entry = checked(entries_.size());
        static_cast<void>(checked(tiles_.size() + count / most));
        for (std::uint64_t at = 0; at < count; at += most) {
            tiles_.push_back(
                {first + at, entry, static_cast<std::uint32_t>(std::min(most, count - at))});
        }
    }

    void cut(const convert_entry& entry, std::size_t to_item) {
        if (entry.form == convert_form::rows) {
            const auto run = entry.extents[0];
            for (std::uint64_t row = 0; row < entry.elements; row += run) {
                pieces(row, run, convert_tile_elements);
            }
        } else if (entry.form == convert_form::transposed) {
            const std::uint64_t edge = convert_square_edge(to_item);
            const auto squares = [edge](std::uint64_t extent) {
                return (extent + edge - 1) / edge;
            };
            const auto others = entry.elements / entry.extents[0] / entry.extents[1];
            pieces(0, squares(entry.extents[0]) * squares(entry.extents[1]) * others,
                   convert_tile_elements / (edge * edge));
        } else {
            pieces(0, entry.elements, convert_tile_elements);
        }
    }

    std::vector<convert_entry> entries_;
    std::vector<convert_tile> tiles_;
    std::vector<std::vector<convert_launch>> groups_;
};

}  // namespace weightwire::gpu
