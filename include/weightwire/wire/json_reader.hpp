#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// Reads JSON that somebody else wrote, under hard limits, and names the place of everything that
/// is wrong with it.
///
/// A text becomes a *tape*: one 16-byte node a value, in the order of the text, and one arena for
/// all strings, so that memory is bounded by the length of the text and a list of 37,000 names
/// costs no allocation a name. nlohmann/json's SAX parser does the lexing; its tree is not used, as
/// it has no limits, keeps the last of two equal names, and forgets how a nested object was spelt,
/// which plan hashes need.

namespace weightwire::wire {

/// What a text may cost. Beyond any of them it is refused while it is read.
struct json_limits {
    std::size_t max_bytes = std::size_t{256} << 20U;         ///< length of the text
    std::size_t max_depth = 16;                              ///< objects and arrays in each other
    std::size_t max_nodes = std::size_t{4} << 20U;           ///< values and member names
    std::size_t max_string_bytes = std::size_t{128} << 20U;  ///< one string, decoded
};

/// What a value is. `integer` is below zero, `natural` is not.
enum class json_kind : std::uint8_t {
    null,
    boolean,
    integer,
    natural,
    real,
    string,
    key,
    array,
    object,
};

/// How messages call a value of kind `value`.
[[nodiscard]] constexpr std::string_view to_string(json_kind value) noexcept {
    switch (value) {
        case json_kind::null: return "null";
        case json_kind::boolean: return "a boolean";
        case json_kind::integer: return "a negative integer";
        case json_kind::natural: return "an integer";
        case json_kind::real: return "a number that is no 64-bit integer";
        case json_kind::string: return "a string";
        case json_kind::key: return "a member name";
        case json_kind::array: return "a list";
        case json_kind::object: return "an object";
    }
    return "unknown";
}

namespace detail {

/// One value, or the name of the member whose value is the next node.
struct json_node {
    json_kind kind = json_kind::null;
    /// Containers: index past the last node inside, 0 while open. Strings and keys: length.
    std::uint32_t extent = 0;
    /// Numbers and booleans: the bits. Strings and keys: offset in the arena. Containers: offsets
    /// in the text of the opening bracket (low half) and past the closing one (high half).
    std::uint64_t payload = 0;
};
static_assert(sizeof(json_node) == 16);

/// `text` for a message: at most 64 bytes, cut between characters, and only what prints.
[[nodiscard]] inline std::string quoted_for_message(std::string_view text) {
    constexpr std::size_t longest = 64;
    std::string out = "'";
    for (std::size_t i = 0; i < std::min(text.size(), longest); ++i) {
        const auto byte = static_cast<unsigned char>(text[i]);
        out += byte >= 0x20U && byte < 0x7FU ? text[i] : '?';
    }
    return out + (text.size() > longest ? "…'" : "'");
}

}  // namespace detail

class json_value;

/// A parsed text. Values refer to it: it stays where it is while they live, and so does the text.
class json_document {
public:
    /// @param text one JSON value and nothing else; outlives this object.
    /// @param what begins every message, such as `init call`.
    /// @param where phase for messages.
    /// @throws protocol_error not JSON, not UTF-8, a member name twice in one object, or over a
    /// limit; names the place.
    json_document(std::string_view text, std::string_view what, phase where,
                  const json_limits& limits = {});
    json_document(const json_document&) = delete;
    json_document& operator=(const json_document&) = delete;

    [[nodiscard]] json_value root() const noexcept;

    /// @throws protocol_error always: `text` about the node at `index`, with its path.
    [[noreturn]] void fail(std::size_t index, std::string_view text) const {
        throw protocol_error{what_ + ": " + path_of(index) + ": " + std::string{text},
                             {.phase = phase_}};
    }

private:
    friend class json_value;
    class handler;

    [[nodiscard]] std::string_view text_of(const detail::json_node& node) const noexcept {
        return std::string_view{arena_}.substr(node.payload, node.extent);
    }
    /// Index past the node and all that is inside it.
    [[nodiscard]] std::size_t after(std::size_t index) const noexcept {
        const auto& node = nodes_[index];
        const bool container = node.kind == json_kind::array || node.kind == json_kind::object;
        if (!container) {
            return index + 1;
        }
        return node.extent == 0 ? nodes_.size() : node.extent;
    }
    /// `$.init_info.shapes[3]`; found only when something is wrong, so values carry no path.
    [[nodiscard]] std::string path_of(std::size_t index) const {
        std::string path = "$";
        std::size_t at = 0;
        while (at < index && at < nodes_.size()) {
            const bool object = nodes_[at].kind == json_kind::object;
            std::size_t child = at + 1;
            for (std::size_t position = 0; child < nodes_.size(); ++position) {
                const std::size_t value = object ? child + 1 : child;
                const std::size_t end = value < nodes_.size() ? after(value) : nodes_.size();
                if (index < end || end == nodes_.size()) {
                    path += object ? "." + printable(text_of(nodes_[child]))
                                   : "[" + std::to_string(position) + "]";
                    child = value;
                    break;
                }
                child = end;
            }
            at = child;
        }
        return path;
    }
    [[nodiscard]] static std::string printable(std::string_view key) {
        auto quoted = detail::quoted_for_message(key);
        return quoted.substr(1, quoted.size() - 2);
    }

    std::string_view text_;
    std::string what_;
    phase phase_;
    std::vector<detail::json_node> nodes_;
    std::string arena_;
};

/// A value of a document: small, copied freely. What it is not, it refuses with its path.
class json_value {
public:
    json_value(const json_document& document, std::size_t index) noexcept
        : document_{&document}, index_{index} {}

    [[nodiscard]] json_kind kind() const noexcept { return node().kind; }
    [[nodiscard]] bool is_null() const noexcept { return kind() == json_kind::null; }

    /// @throws protocol_error always: `text` about this value.
    [[noreturn]] void fail(std::string_view text) const { document_->fail(index_, text); }

    [[nodiscard]] bool boolean() const {
        require(json_kind::boolean, "true or false");
        return node().payload != 0;
    }
    /// @throws protocol_error no integer in [`least`, `greatest`].
    [[nodiscard]] std::int64_t integer(std::int64_t least, std::int64_t greatest) const {
        const auto value = static_cast<std::int64_t>(node().payload);
        const bool fits =
            kind() == json_kind::integer || (kind() == json_kind::natural && value >= 0);
        if (!fits || value < least || value > greatest) {
            fail("expected an integer from " + std::to_string(least) + " to " +
                 std::to_string(greatest) + ", found " + found());
        }
        return value;
    }
    /// @throws protocol_error no integer in [0, 2^64).
    [[nodiscard]] std::uint64_t natural() const {
        require(json_kind::natural, "an integer from 0 to 18446744073709551615");
        return node().payload;
    }
    [[nodiscard]] double real() const {
        require(json_kind::real, "a number");
        return std::bit_cast<double>(node().payload);
    }
    /// The decoded text; lives as long as the document.
    [[nodiscard]] std::string_view string(
        std::size_t longest = std::numeric_limits<std::size_t>::max()) const {
        require(json_kind::string, "a string");
        if (node().extent > longest) {
            fail("expected a string of at most " + std::to_string(longest) + " bytes, found " +
                 std::to_string(node().extent));
        }
        return document_->text_of(node());
    }
    /// A 64-bit hash: 16 lower-case hexadecimal digits.
    [[nodiscard]] std::uint64_t hash() const {
        const auto text = string();
        const auto value = digest_from_text(text);
        if (!value || digest_text(*value) != text) {
            fail("expected 16 lower-case hexadecimal digits, found " +
                 detail::quoted_for_message(text));
        }
        return *value;
    }
    /// An object's or a list's text as it was sent.
    [[nodiscard]] std::string_view raw() const noexcept {
        const auto bounds = node().payload;
        const auto begin = static_cast<std::size_t>(bounds & 0xFFFFFFFFU);
        return document_->text_.substr(begin, static_cast<std::size_t>(bounds >> 32U) - begin);
    }

    class iterator;
    /// A list's values, in order: a range of `json_value`.
    struct item_range {
        const json_document* document;
        std::size_t first;
        std::size_t last;
        [[nodiscard]] iterator begin() const noexcept;
        [[nodiscard]] iterator end() const noexcept;
    };
    [[nodiscard]] item_range items() const {
        require(json_kind::array, "a list");
        return {document_, index_ + 1, node().extent};
    }
    /// Number of a list's values; walks them.
    [[nodiscard]] std::size_t count() const;

    /// Calls `visit(std::string_view key, json_value value)` for each member of an object.
    template <class Visit>
    void each_member(Visit&& visit) const {
        require_object();
        for (std::size_t i = index_ + 1; i < node().extent; i = document_->after(i + 1)) {
            visit(document_->text_of(document_->nodes_[i]), json_value{*document_, i + 1});
        }
    }
    /// @throws protocol_error not an object.
    void require_object() const { require(json_kind::object, "an object"); }
    /// The member `name` of an object, if it has one.
    [[nodiscard]] std::optional<json_value> find(std::string_view name) const {
        std::optional<json_value> result;
        each_member([&](std::string_view key, json_value value) {
            if (key == name) {
                result = value;
            }
        });
        return result;
    }
    /// The member `name` of an object. @throws protocol_error it has none.
    [[nodiscard]] json_value at(std::string_view name) const {
        const auto member = find(name);
        if (!member) {
            fail("the member '" + std::string{name} + "' is missing");
        }
        return *member;
    }
    /// Refuses members that are not listed, naming the first: what an older reader would ignore a
    /// newer writer may rely on.
    void allow_only(std::initializer_list<std::string_view> names) const {
        each_member([&](std::string_view key, json_value) {
            if (std::find(names.begin(), names.end(), key) == names.end()) {
                fail("unknown member " + detail::quoted_for_message(key));
            }
        });
    }

private:
    [[nodiscard]] const detail::json_node& node() const noexcept {
        return document_->nodes_[index_];
    }
    void require(json_kind expected, std::string_view words) const {
        if (kind() != expected) {
            fail("expected " + std::string{words} + ", found " + found());
        }
    }
    [[nodiscard]] std::string found() const {
        switch (kind()) {
            case json_kind::integer:
                return std::to_string(static_cast<std::int64_t>(node().payload));
            case json_kind::natural: return std::to_string(node().payload);
            default: return std::string{to_string(kind())};
        }
    }

    const json_document* document_;
    std::size_t index_;
};

/// Walks the values of a list.
class json_value::iterator {
public:
    using value_type = json_value;
    using difference_type = std::ptrdiff_t;

    iterator(const json_document& document, std::size_t index) noexcept
        : document_{&document}, index_{index} {}
    [[nodiscard]] json_value operator*() const noexcept { return {*document_, index_}; }
    iterator& operator++() noexcept {
        index_ = document_->after(index_);
        return *this;
    }
    void operator++(int) noexcept { ++*this; }
    friend bool operator==(const iterator& a, const iterator& b) noexcept {
        return a.index_ == b.index_;
    }

private:
    const json_document* document_;
    std::size_t index_;
};

inline json_value::iterator json_value::item_range::begin() const noexcept {
    return {*document, first};
}
inline json_value::iterator json_value::item_range::end() const noexcept {
    return {*document, last};
}
inline std::size_t json_value::count() const {
    std::size_t total = 0;
    for ([[maybe_unused]] const auto item : items()) {
        ++total;
    }
    return total;
}
inline json_value json_document::root() const noexcept { return {*this, 0}; }

}  // namespace weightwire::wire

// The parser behind it.
#include <weightwire/wire/json_reader_impl.hpp>  // IWYU pragma: export
