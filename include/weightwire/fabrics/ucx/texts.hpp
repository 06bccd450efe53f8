#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <weightwire/core/digest.hpp>

/// @file
/// The texts by which a reader finds a trainer rank and its memory over UCX: fields with blanks
/// between them, bytes as hexadecimal digits, and a digest of it all as the last field.
///
///     ucx-address 1.13 <host/pid> <id> <probe's address> <probe's key> <worker's address> <digest>
///     ucx-memory <id> <address> <bytes> <key> <digest>
///
/// UCX itself checks neither addresses nor keys; bytes that were damaged on the way could end the
/// process. The digest finds damage. It does not stop a trainer that lies on purpose: whoever may
/// write init messages is trusted.

namespace weightwire::ucx {

/// Bytes that every trainer rank lets be read to try a connection, and what they hold.
inline constexpr std::uint64_t probe_bytes = std::uint64_t{64} << 10U;

/// Word `index` of the probe of the trainer rank with this id.
[[nodiscard]] constexpr std::uint64_t probe_word(std::uint64_t id, std::uint64_t index) noexcept {
    return weightwire::detail::digest_term(id, (index + 1) * weightwire::detail::digest_key);
}

/// What `owner.address()` says.
struct address_text {
    std::string version{};  ///< `major.minor` of the owner's UCX
    std::string peer{};     ///< `host/pid`, for messages
    std::uint64_t id = 0;   ///< random; the owner's handles have it too
    std::uint64_t probe = 0;
    std::vector<std::byte> probe_key{};
    std::vector<std::byte> worker{};
    friend bool operator==(const address_text&, const address_text&) = default;
};

/// What names exported memory.
struct handle_text {
    std::uint64_t id = 0;  ///< of the owner
    std::uint64_t address = 0;
    std::uint64_t bytes = 0;
    std::vector<std::byte> key{};
    friend bool operator==(const handle_text&, const handle_text&) = default;
};

namespace detail {

/// Longer fields than UCX makes.
inline constexpr std::size_t most_field_digits = std::size_t{64} << 10U;

[[nodiscard]] inline std::string to_hex(std::span<const std::byte> bytes) {
    constexpr std::string_view digits{"0123456789abcdef"};
    std::string text;
    text.reserve(2 * bytes.size());
    for (const auto each : bytes) {
        const auto value = std::to_integer<unsigned>(each);
        text += digits[value >> 4U];
        text += digits[value & 15U];
    }
    return text;
}
template <class Number>
[[nodiscard]] bool parse_number(std::string_view text, int base, Number& to) noexcept {
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), to, base);
    return status == std::errc{} && end == text.data() + text.size();
}
[[nodiscard]] inline bool parse_hex(std::string_view text, std::vector<std::byte>& to) {
    if (text.empty() || text.size() % 2 != 0 || text.size() > most_field_digits) {
        return false;
    }
    to.clear();
    for (; !text.empty(); text.remove_prefix(2)) {
        std::uint8_t value = 0;
        if (!parse_number(text.substr(0, 2), 16, value)) {
            return false;
        }
        to.push_back(static_cast<std::byte>(value));
    }
    return true;
}
[[nodiscard]] inline std::string digest_of(std::string_view text) {
    const auto bytes = std::as_bytes(std::span{text.data(), text.size()});
    return digest_text(digest_finish(digest_piece(bytes, 0), text.size()));
}
[[nodiscard]] inline std::string sealed(std::string text) {
    const auto digest = digest_of(text);
    return text + " " + digest;
}
/// `Count` fields of a sealed text; nothing where it has another number or another digest.
template <std::size_t Count>
[[nodiscard]] std::optional<std::array<std::string_view, Count>> fields(std::string_view text) {
    const auto last = text.rfind(' ');
    if (last == std::string_view::npos ||
        digest_of(text.substr(0, last)) != text.substr(last + 1)) {
        return std::nullopt;
    }
    text = text.substr(0, last);
    std::array<std::string_view, Count> found;
    for (std::size_t i = 0; i < Count; ++i) {
        const auto blank = text.find(' ');
        if ((blank == std::string_view::npos) != (i + 1 == Count)) {
            return std::nullopt;
        }
        found[i] = text.substr(0, blank);
        text.remove_prefix(i + 1 == Count ? text.size() : blank + 1);
    }
    return found;
}

}  // namespace detail

[[nodiscard]] inline std::string to_text(const address_text& value) {
    return detail::sealed("ucx-address " + value.version + " " + value.peer + " " +
                          digest_text(value.id) + " " + std::to_string(value.probe) + " " +
                          detail::to_hex(value.probe_key) + " " + detail::to_hex(value.worker));
}
[[nodiscard]] inline std::string to_text(const handle_text& value) {
    return detail::sealed("ucx-memory " + digest_text(value.id) + " " +
                          std::to_string(value.address) + " " + std::to_string(value.bytes) + " " +
                          detail::to_hex(value.key));
}

/// The inverse; nothing where the text is anything else.
[[nodiscard]] inline std::optional<address_text> parse_address(std::string_view text) {
    const auto found = detail::fields<7>(text);
    address_text value;
    if (!found || (*found)[0] != "ucx-address" ||
        !detail::parse_number((*found)[3], 16, value.id) ||
        !detail::parse_number((*found)[4], 10, value.probe) ||
        !detail::parse_hex((*found)[5], value.probe_key) ||
        !detail::parse_hex((*found)[6], value.worker)) {
        return std::nullopt;
    }
    value.version = (*found)[1];
    value.peer = (*found)[2];
    return value;
}
[[nodiscard]] inline std::optional<handle_text> parse_handle(std::string_view text) {
    const auto found = detail::fields<5>(text);
    handle_text value;
    if (!found || (*found)[0] != "ucx-memory" || !detail::parse_number((*found)[1], 16, value.id) ||
        !detail::parse_number((*found)[2], 10, value.address) ||
        !detail::parse_number((*found)[3], 10, value.bytes) ||
        !detail::parse_hex((*found)[4], value.key)) {
        return std::nullopt;
    }
    return value;
}

}  // namespace weightwire::ucx
