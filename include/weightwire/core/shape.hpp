#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// Extents and strides, held in place: a shape never allocates, so tensor views can be copied in
/// the hot path.

namespace weightwire {

/// The most dimensions a tensor may have. Checkpoints in use have at most five.
inline constexpr std::size_t max_dimensions = 8;

/// Extents of a tensor, outermost first. `{}` is a scalar of one element. Extents are never
/// negative.
class shape {
public:
    constexpr shape() noexcept = default;
    /// @throws usage_error more than `max_dimensions` extents, or a negative one.
    constexpr shape(std::initializer_list<std::int64_t> extents)
        : shape{std::span{extents.begin(), extents.size()}} {}
    /// @copydoc shape(std::initializer_list<std::int64_t>)
    explicit constexpr shape(std::span<const std::int64_t> extents) {
        if (extents.size() > max_dimensions) {
            throw usage_error{"a tensor has more than 8 dimensions; fold some of them"};
        }
        for (const auto extent : extents) {
            if (extent < 0) {
                throw usage_error{"a tensor has a negative extent"};
            }
            extents_[rank_++] = extent;
        }
    }

    /// Number of dimensions.
    [[nodiscard]] constexpr std::size_t size() const noexcept { return rank_; }
    [[nodiscard]] constexpr bool empty() const noexcept { return rank_ == 0; }
    [[nodiscard]] constexpr std::int64_t operator[](std::size_t dimension) const noexcept {
        return extents_[dimension];
    }
    [[nodiscard]] constexpr auto begin() const noexcept { return extents_.begin(); }
    [[nodiscard]] constexpr auto end() const noexcept {
        return extents_.begin() + static_cast<std::ptrdiff_t>(rank_);
    }

    /// Number of elements, or nothing where the product does not fit 64 bits.
    [[nodiscard]] constexpr std::optional<std::uint64_t> checked_numel() const noexcept {
        std::uint64_t product = 1;
        bool overflowed = false;
        for (const auto extent : *this) {
            if (extent == 0) {
                return 0;
            }
            const auto next = checked_multiply(product, static_cast<std::uint64_t>(extent));
            overflowed = overflowed || !next;
            product = next.value_or(1);
        }
        return overflowed ? std::nullopt : std::optional{product};
    }

    friend constexpr bool operator==(const shape& a, const shape& b) noexcept {
        return std::equal(a.begin(), a.end(), b.begin(), b.end());
    }

private:
    std::array<std::int64_t, max_dimensions> extents_{};
    std::size_t rank_ = 0;
};

/// `[2, 3]`.
[[nodiscard]] inline std::string to_string(const shape& value) {
    std::string out = "[";
    for (std::size_t i = 0; i < value.size(); ++i) {
        out += (i == 0 ? "" : ", ") + std::to_string(value[i]);
    }
    return out + "]";
}

/// Strides of a contiguous (C-order) tensor of this shape, in elements.
[[nodiscard]] constexpr std::array<std::int64_t, max_dimensions> contiguous_strides(
    const shape& extents) noexcept {
    std::array<std::int64_t, max_dimensions> strides{};
    // Unsigned: beside an extent of 0 the others may multiply to anything, and no stride is used.
    std::uint64_t step = 1;
    for (std::size_t i = extents.size(); i-- > 0;) {
        strides[i] = static_cast<std::int64_t>(step);
        step *= static_cast<std::uint64_t>(std::max<std::int64_t>(extents[i], 1));
    }
    return strides;
}

/// Bytes of a contiguous tensor, or nothing where they do not fit 64 bits or are not whole bytes
/// (6-bit types).
[[nodiscard]] constexpr std::optional<std::uint64_t> checked_byte_size(
    dtype type, const shape& extents) noexcept {
    const auto numel = extents.checked_numel();
    if (!numel) {
        return std::nullopt;
    }
    if (item_bits(type) % 8 == 0) {
        return checked_multiply(*numel, item_bits(type) / 8);
    }
    const auto bits = checked_multiply(*numel, item_bits(type));
    if (!bits || *bits % 8 != 0) {
        return std::nullopt;
    }
    return *bits / 8;
}

/// The shape torch gives a tensor whose safetensors header says `header`: for F4 the last dimension
/// halves, else it is the same. Nothing where an F4 shape is a scalar or its last extent is odd.
[[nodiscard]] inline std::optional<shape> shape_from_safetensors(dtype type, const shape& header) {
    if (type != dtype::f4_e2m1_x2) {
        return header;
    }
    if (header.empty() || header[header.size() - 1] % 2 != 0) {
        return std::nullopt;
    }
    std::array<std::int64_t, max_dimensions> extents{};
    std::copy(header.begin(), header.end(), extents.begin());
    extents[header.size() - 1] /= 2;
    return shape{std::span<const std::int64_t>{extents.data(), header.size()}};
}

/// The inverse of `shape_from_safetensors`. Nothing where an F4 shape is a scalar or doubling it
/// overflows.
[[nodiscard]] inline std::optional<shape> shape_to_safetensors(dtype type, const shape& value) {
    if (type != dtype::f4_e2m1_x2) {
        return value;
    }
    if (value.empty() || value[value.size() - 1] > INT64_MAX / 2) {
        return std::nullopt;
    }
    std::array<std::int64_t, max_dimensions> extents{};
    std::copy(value.begin(), value.end(), extents.begin());
    extents[value.size() - 1] *= 2;
    return shape{std::span<const std::int64_t>{extents.data(), value.size()}};
}

}  // namespace weightwire
