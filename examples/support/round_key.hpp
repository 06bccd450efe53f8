#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace examples {

/// What `push_checkpoint --vary SEED` XORs into every tensor in a round, as if training had changed
/// it: byte `j` of a tensor meets byte `j % 8` of the key. No key byte is zero, and the keys of 255
/// consecutive rounds differ in every byte, so every tensor with at least one byte changes every
/// round.
[[nodiscard]] constexpr std::array<std::byte, 8> round_key(std::uint64_t seed,
                                                           std::uint64_t round) noexcept {
    std::array<std::byte, 8> key{};
    for (std::size_t j = 0; j < key.size(); ++j) {
        key[j] = static_cast<std::byte>((seed % 255 * 31 + round % 255 * 7 + j * 13) % 255 + 1);
    }
    return key;
}

/// XORs `key` into a piece that starts at byte `offset` of its tensor.
inline void apply_round_key(std::span<std::byte> piece, std::uint64_t offset,
                            const std::array<std::byte, 8>& key) noexcept {
    for (std::size_t i = 0; i < piece.size(); ++i) {
        piece[i] ^= key[(offset + i) % key.size()];
    }
}

}  // namespace examples
