#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/shape.hpp>

/// @file
/// Where the elements of a view lie among those of the parameter it was made from, without any
/// memory.
///
/// A dimension of a view is a list of factors (extent, stride), outermost first; its index is split
/// into digits by the extents. One factor is a plain strided dimension, none is an extent of 1.
/// Several come from looking at a copy in C order: `[4, 3]` transposed, made contiguous and
/// flattened is one dimension of 12 with the factors (3, 1) and (4, 3).

namespace weightwire::plan::detail {

/// Whether any product of these extents, none of them negative, fits.
[[nodiscard]] constexpr bool extents_fit(std::span<const std::int64_t> extents) noexcept {
    std::optional<std::uint64_t> product = 1;
    for (const auto extent : extents) {
        product = product
                      ? checked_multiply(
                            *product, static_cast<std::uint64_t>(std::max(extent, std::int64_t{1})))
                      : std::nullopt;
    }
    return product && *product <= std::numeric_limits<std::int64_t>::max();
}

/// Elements of a dimension that repeat at a stride, counted in elements of the parameter.
struct stride_factor {
    std::int64_t extent = 1;
    std::int64_t stride = 0;
    friend constexpr bool operator==(const stride_factor&, const stride_factor&) = default;
};

/// Factors, outermost first, in place.
class factor_list {
public:
    static constexpr std::size_t capacity = 16;

    [[nodiscard]] constexpr std::size_t size() const noexcept { return count_; }
    [[nodiscard]] constexpr bool empty() const noexcept { return count_ == 0; }
    [[nodiscard]] constexpr stride_factor& operator[](std::size_t i) noexcept {
        return factors_[i];
    }
    [[nodiscard]] constexpr const stride_factor& operator[](std::size_t i) const noexcept {
        return factors_[i];
    }
    [[nodiscard]] constexpr std::span<const stride_factor> all() const noexcept {
        return {factors_.data(), count_};
    }
    /// @returns whether there was room.
    [[nodiscard]] constexpr bool append(const stride_factor& factor) noexcept {
        if (count_ == capacity) {
            return false;
        }
        factors_[count_++] = factor;
        return true;
    }
    /// Appends an inner factor, or makes it one with the last where both are one progression. An
    /// extent of 1 adds nothing.
    [[nodiscard]] constexpr bool append_merged(const stride_factor& factor) noexcept {
        if (factor.extent == 1) {
            return true;
        }
        if (count_ > 0 && factors_[count_ - 1].stride == factor.extent * factor.stride) {
            factors_[count_ - 1] = {factors_[count_ - 1].extent * factor.extent, factor.stride};
            return true;
        }
        return append(factor);
    }
    constexpr void pop() noexcept { --count_; }
    constexpr void reverse(std::size_t begin) noexcept {
        std::reverse(factors_.begin() + static_cast<std::ptrdiff_t>(begin),
                     factors_.begin() + static_cast<std::ptrdiff_t>(count_));
    }

private:
    std::array<stride_factor, capacity> factors_{};
    std::size_t count_ = 0;
};

/// Factors of every dimension.
struct dimension_factors {
    factor_list factors{};
    /// Factors of dimension d: `[begins[d], begins[d + 1])`.
    std::array<std::uint8_t, max_dimensions + 1> begins{};

    [[nodiscard]] constexpr std::span<const stride_factor> of(std::size_t d) const noexcept {
        return factors.all().subspan(begins[d], std::size_t{begins[d + 1]} - begins[d]);
    }
    /// Ends dimension d, whose factors were appended.
    constexpr void close(std::size_t d) noexcept {
        begins[d + 1] = static_cast<std::uint8_t>(factors.size());
    }
};

/// What became of an attempt to see elements in another way.
enum class layout_result : std::uint8_t {
    made,           ///< it is a view
    not_a_view,     ///< only a copy has this shape
    inexpressible,  ///< factors cannot say it
};

/// A view's extents, where its elements are, and the strides that torch would give it. Trivially
/// copyable. Arguments were checked: dimensions exist, ranges lie inside.
class recorded_layout {
public:
    recorded_layout() = default;
    /// A whole contiguous parameter.
    explicit recorded_layout(const shape& extents) noexcept : rank_{extents.size()} {
        const auto strides = contiguous_strides(extents);
        for (std::size_t d = 0; d < rank_; ++d) {
            extents_[d] = extents[d];
            memory_[d] = strides[d];
            if (extents[d] != 1) {
                (void)map_.factors.append({extents[d], strides[d]});  // at most 8 of 16
            }
            map_.close(d);
        }
    }

    [[nodiscard]] std::size_t rank() const noexcept { return rank_; }
    [[nodiscard]] std::int64_t extent(std::size_t d) const noexcept { return extents_[d]; }
    [[nodiscard]] std::span<const std::int64_t> extents() const noexcept {
        return {extents_.data(), rank_};
    }
    [[nodiscard]] std::int64_t numel() const noexcept {
        std::int64_t product = 1;
        for (const auto extent : extents()) {
            product *= extent;
        }
        return product;
    }
    /// First element of the view in its parameter.
    [[nodiscard]] std::int64_t offset() const noexcept { return offset_; }
    [[nodiscard]] std::span<const stride_factor> factors(std::size_t d) const noexcept {
        return map_.of(d);
    }
    /// Whether torch would have copied on the way, so that the view is not the parameter's memory.
    [[nodiscard]] bool copied() const noexcept { return copied_; }
    /// Whether several indices name one element of the parameter.
    [[nodiscard]] bool repeats() const noexcept {
        return numel() > 0 && std::ranges::any_of(map_.factors.all(), [](const stride_factor& f) {
                   return f.stride == 0;
               });
    }
    /// torch's `is_contiguous()`.
    [[nodiscard]] bool is_contiguous() const noexcept {
        std::int64_t step = 1;
        bool in_order = true;
        for (auto d = rank_; d-- > 0;) {
            in_order = in_order && (extents_[d] == 1 || memory_[d] == step);
            step *= extents_[d];
        }
        return in_order || step == 0;
    }

    /// Keeps elements `start`, `start + step`, … of dimension `d`, `count` of them.
    /// @returns false, and nothing changes, where factors cannot say it.
    [[nodiscard]] bool keep(std::size_t d, std::int64_t start, std::int64_t step,
                            std::int64_t count) noexcept;
    /// Takes away dimension `d`, of extent 1.
    void remove(std::size_t d) noexcept {
        std::copy(extents_.begin() + d + 1, extents_.begin() + rank_, extents_.begin() + d);
        std::copy(memory_.begin() + d + 1, memory_.begin() + rank_, memory_.begin() + d);
        std::copy(map_.begins.begin() + d + 1, map_.begins.begin() + rank_ + 1,
                  map_.begins.begin() + d);
        --rank_;
    }
    /// Puts a dimension of extent 1 before dimension `d`. There is room for it.
    void insert(std::size_t d) noexcept {
        for (auto i = rank_; i > d; --i) {
            extents_[i] = extents_[i - 1];
            memory_[i] = memory_[i - 1];
        }
        for (auto i = rank_ + 1; i > d; --i) {
            map_.begins[i] = map_.begins[i - 1];
        }
        extents_[d] = 1;
        memory_[d] = 1;
        ++rank_;
    }
    /// Repeats dimension `d`, of extent 1, without memory.
    [[nodiscard]] bool stretch(std::size_t d, std::int64_t extent) noexcept {
        factor_list repeated;
        if (!repeated.append_merged({extent, 0}) || !replace(d, repeated)) {
            return false;
        }
        extents_[d] = extent;
        memory_[d] = 0;
        return true;
    }
    /// Dimension `order[d]` becomes dimension d.
    void reorder(std::span<const std::size_t> order) noexcept;
    /// What torch's `view` does; `extents` have as many elements. Nothing changes unless made.
    [[nodiscard]] layout_result view(std::span<const std::int64_t> extents) noexcept;
    /// The same elements seen as a copy in C order.
    void copy() noexcept {
        std::int64_t step = 1;
        for (auto d = rank_; d-- > 0;) {
            memory_[d] = step;
            step *= std::max<std::int64_t>(extents_[d], 1);
        }
        copied_ = true;
    }

private:
    [[nodiscard]] bool replace(std::size_t d, const factor_list& list) noexcept;
    [[nodiscard]] static bool regroup(const factor_list& merged,
                                      std::span<const std::int64_t> extents, std::size_t most,
                                      dimension_factors& out) noexcept;

    std::array<std::int64_t, max_dimensions> extents_{};
    std::array<std::int64_t, max_dimensions> memory_{};  // torch's strides
    dimension_factors map_{};
    std::int64_t offset_ = 0;
    std::size_t rank_ = 0;
    bool copied_ = false;
};

static_assert(std::is_trivially_copyable_v<recorded_layout>);

inline bool recorded_layout::replace(std::size_t d, const factor_list& list) noexcept {
    if (map_.of(d).size() == list.size()) {
        for (std::size_t i = 0; i < list.size(); ++i) {
            map_.factors[map_.begins[d] + i] = list[i];
        }
        return true;
    }
    dimension_factors made;
    for (std::size_t i = 0; i < rank_; ++i) {
        for (const auto& factor : i == d ? list.all() : map_.of(i)) {
            if (!made.factors.append(factor)) {
                return false;
            }
        }
        made.close(i);
    }
    map_ = made;
    return true;
}

inline bool recorded_layout::keep(std::size_t d, std::int64_t start, std::int64_t step,
                                  std::int64_t count) noexcept {
    factor_list kept;
    auto offset = offset_;
    auto left = count;         // of the factors that follow
    auto pace = step;          // likewise
    auto below = extents_[d];  // elements under one step of the factor
    const bool none = count == 0 || numel() == 0;
    for (const auto& factor : none ? std::span<const stride_factor>{} : map_.of(d)) {
        below /= factor.extent;
        const auto digit = start / below;
        const auto last = start + pace * (left - 1);
        stride_factor part{1, factor.stride};
        if (last / below != digit) {
            if (pace % below == 0) {  // moves this digit alone
                part = {left, factor.stride * (pace / below)};
                left = 1;
            } else {  // whole blocks of the digits that follow
                const auto in_block = below % pace == 0 ? below / pace : 0;
                if (in_block == 0 || start % below >= pace || left % in_block != 0) {
                    return false;
                }
                part.extent = left / in_block;
                left = in_block;
            }
        }
        offset += digit * factor.stride;
        start %= below;
        if (!kept.append_merged(part)) {
            return false;
        }
    }
    if (none) {
        (void)kept.append_merged({count, 0});
    }
    if (!replace(d, kept)) {
        return false;
    }
    offset_ = offset;
    extents_[d] = count;
    memory_[d] *= count > 1 ? step : 1;
    return true;
}

inline void recorded_layout::reorder(std::span<const std::size_t> order) noexcept {
    const auto before = *this;
    map_ = {};
    for (std::size_t d = 0; d < rank_; ++d) {
        extents_[d] = before.extents_[order[d]];
        memory_[d] = before.memory_[order[d]];
        for (const auto& factor : before.map_.of(order[d])) {
            (void)map_.factors.append(factor);  // as many as before
        }
        map_.close(d);
    }
}

/// Gives the factors of `merged` to dimensions of these extents, at most `most` to each.
inline bool recorded_layout::regroup(const factor_list& merged,
                                     std::span<const std::int64_t> extents, std::size_t most,
                                     dimension_factors& out) noexcept {
    auto left = merged;
    factor_list reversed;  // innermost first
    std::array<std::size_t, max_dimensions> counts{};
    for (auto d = extents.size(); d-- > 0;) {
        for (auto need = extents[d]; need > 1;) {
            if (left.empty() || counts[d] == most) {
                return false;
            }
            auto& inner = left[left.size() - 1];
            const auto taken = std::min(need, inner.extent);
            if (need % taken != 0 || inner.extent % taken != 0 ||
                !reversed.append({taken, inner.stride})) {
                return false;
            }
            ++counts[d];
            need /= taken;
            inner = {inner.extent / taken, inner.stride * taken};
            if (inner.extent == 1) {
                left.pop();
            }
        }
    }
    reversed.reverse(0);
    out.factors = reversed;
    for (std::size_t d = 0; d < extents.size(); ++d) {
        out.begins[d + 1] = static_cast<std::uint8_t>(out.begins[d] + counts[d]);
    }
    return true;
}

inline layout_result recorded_layout::view(std::span<const std::int64_t> extents) noexcept {
    dimension_factors memory;
    dimension_factors map;
    if (numel() == 0) {
        for (std::size_t d = 0; d < extents.size(); ++d) {
            if (extents[d] != 1) {
                (void)map.factors.append({extents[d], 0});
            }
            map.close(d);
        }
        memory = map;
    } else {
        // Neighbours that are one progression in memory may be split anew; nothing else may. At
        // most 8 dimensions have at most 8 strides.
        factor_list strides;
        for (std::size_t d = 0; d < rank_; ++d) {
            (void)strides.append_merged({extents_[d], memory_[d]});
        }
        if (!regroup(strides, extents, 1, memory)) {
            return layout_result::not_a_view;
        }
        factor_list elements;
        for (const auto& factor : map_.factors.all()) {
            (void)elements.append_merged(factor);
        }
        if (!regroup(elements, extents, factor_list::capacity, map)) {
            return layout_result::inexpressible;
        }
    }
    rank_ = extents.size();
    std::ranges::copy(extents, extents_.begin());
    for (std::size_t d = 0; d < rank_; ++d) {
        memory_[d] = memory.of(d).empty() ? 1 : memory.of(d)[0].stride;
    }
    map_ = map;
    return layout_result::made;
}

}  // namespace weightwire::plan::detail
