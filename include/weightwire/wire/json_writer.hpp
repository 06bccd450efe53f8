#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <weightwire/core/error.hpp>

/// @file
/// Writes JSON text straight into a string: a list of 37,000 names costs one pass over its bytes
/// and no tree.

namespace weightwire::wire {

namespace detail {

/// Bytes of the UTF-8 sequence that begins at `at`, or 0 where there is no valid one: overlong
/// forms, surrogates and values past U+10FFFF are invalid.
[[nodiscard]] constexpr std::size_t utf8_sequence(std::string_view text, std::size_t at) noexcept {
    const auto byte = [&](std::size_t i) {
        return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0U;
    };
    const auto tail = [&](std::size_t i) { return (byte(i) & 0xC0U) == 0x80U; };
    const unsigned first = byte(0);
    if (first < 0x80U) {
        return 1;
    }
    if (first >= 0xC2U && first <= 0xDFU) {
        return tail(1) ? 2 : 0;
    }
    if (first >= 0xE0U && first <= 0xEFU) {
        const bool overlong = first == 0xE0U && byte(1) < 0xA0U;
        const bool surrogate = first == 0xEDU && byte(1) > 0x9FU;
        return tail(1) && tail(2) && !overlong && !surrogate ? 3 : 0;
    }
    if (first >= 0xF0U && first <= 0xF4U) {
        const bool overlong = first == 0xF0U && byte(1) < 0x90U;
        const bool too_large = first == 0xF4U && byte(1) > 0x8FU;
        return tail(1) && tail(2) && tail(3) && !overlong && !too_large ? 4 : 0;
    }
    return 0;
}

/// Appends what stands for one byte that may not appear as itself in a JSON string.
inline void append_escape(std::string& out, unsigned char byte) {
    switch (byte) {
        case '"': out += "\\\""; return;
        case '\\': out += "\\\\"; return;
        case '\b': out += "\\b"; return;
        case '\f': out += "\\f"; return;
        case '\n': out += "\\n"; return;
        case '\r': out += "\\r"; return;
        case '\t': out += "\\t"; return;
        default: break;
    }
    constexpr std::string_view digits = "0123456789abcdef";
    out += "\\u00";
    out += digits[byte >> 4U];
    out += digits[byte & 0xFU];
}

}  // namespace detail

/// What to do with bytes that are no UTF-8.
enum class bad_utf8 : std::uint8_t {
    refuse,   ///< throw: the text is a name that the other side must see unchanged
    replace,  ///< write U+FFFD: the text is a message for people
};

/// Appends `text` as a JSON string, quotes included. Bytes above 0x7F are written as they are.
/// @throws data_error `text` is not UTF-8 and `policy` is `refuse`.
inline void append_json_string(std::string& out, std::string_view text,
                               bad_utf8 policy = bad_utf8::refuse) {
    out += '"';
    std::size_t clean = 0;  // first byte not yet copied; runs that need no escape go in one append
    for (std::size_t i = 0; i < text.size();) {
        const auto byte = static_cast<unsigned char>(text[i]);
        const bool plain = byte >= 0x20U && byte != '"' && byte != '\\';
        const std::size_t length = byte < 0x80U ? 1 : detail::utf8_sequence(text, i);
        if (plain && length != 0) {
            i += length;
            continue;
        }
        out.append(text, clean, i - clean);
        if (!plain) {
            detail::append_escape(out, byte);
        } else if (policy == bad_utf8::replace) {
            out += "\xEF\xBF\xBD";
        } else {
            throw data_error{"a text for the wire is not UTF-8 at byte " + std::to_string(i) +
                             "; JSON cannot carry it, rename it"};
        }
        clean = ++i;
    }
    out.append(text, clean, text.size() - clean);
    out += '"';
}

/// Appends the decimal digits of `value`.
template <std::integral Integer>
void append_json_integer(std::string& out, Integer value) {
    std::array<char, 24> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    out.append(digits.data(), static_cast<std::size_t>(end - digits.data()));
}

/// Writes one JSON text, compact, keeping only whether a comma is due. The caller closes what it
/// opens, in order.
class json_writer {
public:
    /// @param out grows at its end; lives longer than the writer.
    explicit json_writer(std::string& out) noexcept : out_{&out} {}

    json_writer& begin_object() { return open('{'); }
    json_writer& end_object() { return close('}'); }
    json_writer& begin_array() { return open('['); }
    json_writer& end_array() { return close(']'); }

    /// The name of the member whose value comes next.
    json_writer& key(std::string_view name) {
        separate();
        append_json_string(*out_, name);
        *out_ += ':';
        comma_ = false;
        return *this;
    }
    /// @throws data_error not UTF-8, where the policy is to refuse.
    json_writer& string(std::string_view value, bad_utf8 policy = bad_utf8::refuse) {
        separate();
        append_json_string(*out_, value, policy);
        return *this;
    }
    template <std::integral Integer>
        requires(!std::same_as<Integer, bool>)
    json_writer& integer(Integer value) {
        separate();
        append_json_integer(*out_, value);
        return *this;
    }
    json_writer& boolean(bool value) { return raw(value ? "true" : "false"); }
    json_writer& null() { return raw("null"); }
    /// `text` as it is: already one JSON value.
    json_writer& raw(std::string_view text) {
        separate();
        *out_ += text;
        return *this;
    }

private:
    void separate() {
        if (comma_) {
            *out_ += ',';
        }
        comma_ = true;
    }
    json_writer& open(char bracket) {
        separate();
        *out_ += bracket;
        comma_ = false;
        return *this;
    }
    json_writer& close(char bracket) {
        *out_ += bracket;
        comma_ = true;
        return *this;
    }

    std::string* out_;
    bool comma_ = false;
};

}  // namespace weightwire::wire
