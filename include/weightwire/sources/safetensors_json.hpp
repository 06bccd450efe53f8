#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include <weightwire/core/error.hpp>

/// @file
/// What the readers of safetensors headers and indices share: JSON from somebody else, read event
/// by event. No document is ever built, so nesting and repetition cost a hostile file its own time,
/// not our memory.

namespace weightwire::detail {

/// Throws what is wrong with `tensor` (empty: with the whole file) in `file`.
[[noreturn]] inline void fail_in_file(std::string_view file, std::string_view tensor,
                                      std::string_view what) {
    throw data_error{std::string{file}.append(": ").append(what), {.tensor = std::string{tensor}}};
}

[[nodiscard]] inline bool is_control(char c) noexcept {
    return static_cast<unsigned char>(c) < 0x20U || c == '\x7f';
}

/// At most `limit` bytes of foreign text for a message, cut at a whole UTF-8 sequence. Control
/// characters, which would end or garble the message, become question marks.
[[nodiscard]] inline std::string clipped(std::string_view text, std::size_t limit = 120) {
    const bool cut = text.size() > limit;
    while (cut && limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0U) == 0x80U) {
        --limit;
    }
    std::string out{text.substr(0, limit)};
    std::ranges::replace_if(out, is_control, '?');
    return cut ? out + "..." : out;
}

/// A SAX handler that refuses every event; a reader hides those that it accepts. `Derived` has
/// `refuse(what)`, which throws and says where.
template <class Derived>
class refusing_handler {
public:
    bool null() { return self().refuse("null"); }
    bool boolean(bool) { return self().refuse("a boolean"); }
    bool number_integer(std::int64_t) { return self().refuse("a negative number"); }
    bool number_unsigned(std::uint64_t) { return self().refuse("a number"); }
    /// Also where a whole number does not fit 64 bits.
    bool number_float(double, const std::string& text) {
        return self().refuse("the number " + clipped(text) +
                             ", which is no whole number below 2^64");
    }
    bool string(std::string&) { return self().refuse("a string"); }
    bool binary(nlohmann::json::binary_t&) { return self().refuse("binary data"); }
    bool start_object(std::size_t) { return self().refuse("an object"); }
    bool end_object() { return self().refuse("the end of an object"); }
    bool start_array(std::size_t) { return self().refuse("an array"); }
    bool end_array() { return self().refuse("the end of an array"); }
    bool parse_error(std::size_t position, const std::string&, const std::exception& problem) {
        return self().malformed(position, clipped(problem.what(), 240));
    }

private:
    [[nodiscard]] Derived& self() noexcept { return static_cast<Derived&>(*this); }
};

/// Feeds `text` to `handler`, which throws on whatever it does not accept.
/// @throws data_error `text` has a NUL byte, which the parser would take for the end of the text.
template <class Handler>
void read_json(std::span<const std::byte> text, std::string_view file, Handler& handler) {
    if (std::ranges::find(text, std::byte{0}) != text.end()) {
        fail_in_file(file, {}, "the JSON text has a NUL byte");
    }
    const auto* begin = reinterpret_cast<const char*>(text.data());
    if (!nlohmann::json::sax_parse(begin, begin + text.size(), &handler)) {
        fail_in_file(file, {}, "the JSON text could not be read");
    }
}

/// Whether `name` can be a parameter's: not empty, at most `limit` bytes, no control characters
/// (they would break the line-based texts that names travel in).
[[nodiscard]] inline bool is_usable_name(std::string_view name, std::size_t limit) noexcept {
    return !name.empty() && name.size() <= limit && std::ranges::none_of(name, is_control);
}

}  // namespace weightwire::detail
