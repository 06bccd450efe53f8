#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

/// @file
/// Arithmetic on sizes that came from somebody else: no result where the exact one does not fit.

namespace weightwire {

[[nodiscard]] constexpr std::optional<std::uint64_t> checked_multiply(std::uint64_t a,
                                                                      std::uint64_t b) noexcept {
    if (a != 0 && b > std::numeric_limits<std::uint64_t>::max() / a) {
        return std::nullopt;
    }
    return a * b;
}

[[nodiscard]] constexpr std::optional<std::uint64_t> checked_add(std::uint64_t a,
                                                                 std::uint64_t b) noexcept {
    if (b > std::numeric_limits<std::uint64_t>::max() - a) {
        return std::nullopt;
    }
    return a + b;
}

/// `value` as `To`, or nothing where it does not fit.
template <std::integral To, std::integral From>
[[nodiscard]] constexpr std::optional<To> checked_cast(From value) noexcept {
    return std::in_range<To>(value) ? std::optional{static_cast<To>(value)} : std::nullopt;
}

}  // namespace weightwire
