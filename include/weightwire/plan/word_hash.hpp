#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

#include <weightwire/core/digest.hpp>

namespace weightwire::plan::detail {

/// A 64-bit hash of a sequence of words; the same on every machine. It finds mistakes and is no
/// defence against an adversary.
class word_hash {
public:
    /// @param seed words that follow other seeds give other hashes.
    constexpr explicit word_hash(std::uint64_t seed) noexcept : value_{seed} {}

    constexpr word_hash& add(std::uint64_t word) noexcept {
        value_ =
            weightwire::detail::digest_term(word, (value_ + 1) * weightwire::detail::digest_key);
        return *this;
    }
    [[nodiscard]] constexpr std::uint64_t value() const noexcept { return value_; }

private:
    std::uint64_t value_;
};

}  // namespace weightwire::plan::detail
