// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/digest.hpp>

namespace {

using namespace weightwire;

std::vector<std::byte> random_bytes(std::size_t count, unsigned seed) {
    std::mt19937_64 random{seed};
    std::vector<std::byte> out(count);
    std::ranges::generate(out, [&] { return static_cast<std::byte>(random() & 0xFFU); });
    return out;
}

TEST_CASE(
    "digest: golden values, computed by an implementation of the formula in another language") {
    const std::string_view name = "weightwire";
    std::vector<std::byte> counting(16);
    std::vector<std::byte> hundred(100);
    for (std::size_t i = 0; i < 100; ++i) {
        hundred[i] = static_cast<std::byte>(i * 7 % 256);
        counting[std::min<std::size_t>(i, 15)] =
            static_cast<std::byte>(std::min<std::size_t>(i, 15));
    }
    const std::vector<std::byte> zeros(8);
    CHECK(digest({}) == 0U);
    CHECK(digest(std::span{zeros}.first(1)) == 0xf60d04999de80db7U);
    CHECK(digest(zeros) == 0x934c5625b3c896cfU);
    CHECK(digest(counting) == 0x4fc97987ca1b9b3dU);
    CHECK(digest(std::as_bytes(std::span{name})) == 0xf837189c7fcb02bfU);
    CHECK(digest(hundred) == 0xcb4cd1b916a9b130U);
}

TEST_CASE("digest: any change of any single byte changes it") {
    auto bytes = random_bytes(77, 1);
    const auto whole = digest(bytes);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        for (unsigned change = 1; change < 256; ++change) {
            bytes[i] ^= static_cast<std::byte>(change);
            REQUIRE(digest(bytes) != whole);
            bytes[i] ^= static_cast<std::byte>(change);
        }
    }
    CHECK(digest(bytes) == whole);
}

TEST_CASE("digest: pieces combine in any order, wherever they are cut") {
    std::mt19937 random{7};
    for (const std::size_t size : {1U, 7U, 8U, 9U, 31U, 32U, 33U, 64U, 1000U, 4096U}) {
        const auto bytes = random_bytes(size, static_cast<unsigned>(size));
        for (int repeat = 0; repeat < 20; ++repeat) {
            std::vector<std::pair<std::size_t, std::size_t>> pieces;
            for (std::size_t at = 0; at < size;) {
                const auto length =
                    std::min(size - at, std::size_t{8} * (1 + random() % (size / 8 + 1)));
                pieces.emplace_back(at, length);
                at += length;
            }
            std::ranges::shuffle(pieces, random);
            std::uint64_t sum = 0;
            for (const auto& [at, length] : pieces) {
                sum += digest_piece(std::span{bytes}.subspan(at, length), at);
            }
            REQUIRE(digest_finish(sum, size) == digest(bytes));
        }
    }
}

TEST_CASE("digest: position counts, so exchanged words and moved data are seen") {
    auto bytes = random_bytes(64, 3);
    const auto whole = digest(bytes);
    std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + 8);
    CHECK(digest(bytes) != whole);
    CHECK(digest_piece(std::span{bytes}.first(8), 0) != digest_piece(std::span{bytes}.first(8), 8));
}

TEST_CASE("digest: size counts, so padding with zeros is seen") {
    auto bytes = random_bytes(13, 4);
    const auto whole = digest(bytes);
    for (int i = 0; i < 20; ++i) {
        bytes.push_back(std::byte{});
        REQUIRE(digest(bytes) != whole);
    }
}

TEST_CASE(
    "digest: 64 KiB of zeros, of ones and of one repeated word differ in every prefix of words") {
    std::vector<std::uint64_t> seen;
    for (const auto value : {std::byte{0}, std::byte{1}, std::byte{0xFF}}) {
        const std::vector<std::byte> bytes(4096, value);
        for (std::size_t size = 8; size <= bytes.size(); size += 8) {
            seen.push_back(digest(std::span{bytes}.first(size)));
        }
    }
    std::ranges::sort(seen);
    CHECK(std::ranges::adjacent_find(seen) == seen.end());
}

TEST_CASE("digest text: sixteen digits that lead back to the value") {
    for (const std::uint64_t value : {0ULL, 1ULL, 0xABCDEFULL, ~0ULL, 0x8000000000000000ULL}) {
        const auto text = digest_text(value);
        CHECK(text.size() == 16);
        CHECK(digest_from_text(text) == value);
    }
    CHECK(digest_text(0xAB) == "00000000000000ab");
    for (const std::string_view text :
         {"", "ab", "00000000000000ag", "000000000000000ab", "-0000000000000ab", "+0000000000000ab",
          "0x000000000000ab", " 0000000000000ab"}) {
        CAPTURE(std::string{text});
        CHECK_FALSE(digest_from_text(text).has_value());
    }
}

}  // namespace
