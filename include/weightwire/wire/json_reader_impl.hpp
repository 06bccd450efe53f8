#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include <weightwire/wire/json_reader.hpp>

/// @file
/// The parser behind `json_document`; include `wire/json_reader.hpp`.

namespace weightwire::wire {

namespace detail {

/// Iterates over a text and tells where it is, so that nested objects can be cut out verbatim.
struct json_cursor {
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = const char&;

    const char* at = nullptr;
    const char** seen = nullptr;

    reference operator*() const noexcept { return *at; }
    json_cursor& operator++() noexcept {
        ++at;
        *seen = at;
        return *this;
    }
    json_cursor operator++(int) noexcept {
        auto before = *this;
        ++*this;
        return before;
    }
    friend bool operator==(const json_cursor& a, const json_cursor& b) noexcept {
        return a.at == b.at;
    }
};

}  // namespace detail

/// Receives the parser's events and builds the tape.
class json_document::handler {
public:
    handler(json_document& document, const json_limits& limits) noexcept
        : document_{&document}, limits_{&limits}, at_{document.text_.data()} {}

    /// Runs the parser. @throws protocol_error as the document's constructor.
    void run() {
        const auto text = document_->text_;
        const detail::json_cursor first{text.data(), &at_};
        const detail::json_cursor last{text.data() + text.size(), &at_};
        if (!nlohmann::json::sax_parse(first, last, this)) {
            refuse("it is refused");  // every event that returns false has thrown
        }
        // The parser takes a zero byte for the end of the text.
        const auto rest = text.substr(static_cast<std::size_t>(root_end_ - text.data()));
        if (rest.find_first_not_of(" \t\r\n") != std::string_view::npos) {
            refuse("something follows the value");
        }
    }

    bool null() { return add({json_kind::null, 0, 0}); }
    bool boolean(bool value) { return add({json_kind::boolean, 0, value ? 1U : 0U}); }
    bool number_integer(std::int64_t value) {
        return add({value < 0 ? json_kind::integer : json_kind::natural, 0,
                    static_cast<std::uint64_t>(value)});
    }
    bool number_unsigned(std::uint64_t value) { return add({json_kind::natural, 0, value}); }
    bool number_float(double value, const std::string&) {
        return add({json_kind::real, 0, std::bit_cast<std::uint64_t>(value)});
    }
    bool string(const std::string& value) { return add_text(json_kind::string, value); }
    bool key(const std::string& value) { return add_text(json_kind::key, value); }
    bool binary(const std::vector<std::uint8_t>&) { refuse("binary values are not JSON"); }
    bool start_object(std::size_t) { return open(json_kind::object); }
    bool start_array(std::size_t) { return open(json_kind::array); }
    bool end_array() { return close(); }
    bool end_object() {
        require_distinct_keys();
        return close();
    }
    bool parse_error(std::size_t, const std::string&, const std::exception& cause) {
        // Only the middle of the parser's sentence: the rest repeats the text, however long it is.
        std::string_view reason = cause.what();
        const auto begin = reason.find(" - ");
        reason = begin == reason.npos ? "a number is out of range" : reason.substr(begin + 3);
        reason = reason.substr(0, reason.find(';'));
        const auto offset = static_cast<std::size_t>(at_ - document_->text_.data());
        refuse("it is not JSON at byte " + std::to_string(offset) + ": " +
               std::string{reason.substr(0, 100)});
    }

private:
    [[noreturn]] void refuse(std::string_view text) {
        const auto count = document_->nodes_.size();
        document_->fail(count == 0 ? 0 : count - 1, text);
    }
    bool add(const detail::json_node& node) {
        if (document_->nodes_.size() >= limits_->max_nodes) {
            refuse("more than " + std::to_string(limits_->max_nodes) + " values");
        }
        document_->nodes_.push_back(node);
        root_end_ = at_;
        return true;
    }
    bool add_text(json_kind kind, const std::string& value) {
        if (value.size() > limits_->max_string_bytes) {
            refuse("a string is longer than " + std::to_string(limits_->max_string_bytes) +
                   " bytes");
        }
        const auto offset = document_->arena_.size();
        document_->arena_ += value;
        return add({kind, static_cast<std::uint32_t>(value.size()), offset});
    }
    bool open(json_kind kind) {
        if (open_.size() >= limits_->max_depth) {
            refuse("nested deeper than " + std::to_string(limits_->max_depth));
        }
        open_.push_back(document_->nodes_.size());
        return add({kind, 0, offset() - 1});
    }
    bool close() {
        auto& node = document_->nodes_[open_.back()];
        open_.pop_back();
        node.extent = static_cast<std::uint32_t>(document_->nodes_.size());
        node.payload |= static_cast<std::uint64_t>(offset()) << 32U;
        root_end_ = at_;
        return true;
    }
    [[nodiscard]] std::size_t offset() const noexcept {
        return static_cast<std::size_t>(at_ - document_->text_.data());
    }
    void require_distinct_keys() {
        keys_.clear();
        const auto& nodes = document_->nodes_;
        for (std::size_t i = open_.back() + 1; i < nodes.size(); i = document_->after(i + 1)) {
            keys_.push_back(document_->text_of(nodes[i]));
        }
        std::sort(keys_.begin(), keys_.end());
        const auto twice = std::adjacent_find(keys_.begin(), keys_.end());
        if (twice != keys_.end()) {
            document_->fail(open_.back(),
                            "the member " + detail::quoted_for_message(*twice) + " occurs twice");
        }
    }

    json_document* document_;
    const json_limits* limits_;
    const char* at_;                  ///< past the last character that the parser has read
    const char* root_end_ = nullptr;  ///< past the last value
    std::vector<std::size_t> open_;   ///< nodes of the open containers
    std::vector<std::string_view> keys_;
};

inline json_document::json_document(std::string_view text, std::string_view what, phase where,
                                    const json_limits& limits)
    : text_{text}, what_{what}, phase_{where} {
    // Node offsets have 32 bits; a body limit above that would be no limit.
    const auto longest =
        std::min<std::size_t>(limits.max_bytes, std::numeric_limits<std::uint32_t>::max());
    if (text.size() > longest) {
        fail(0, std::to_string(text.size()) + " bytes are more than the limit of " +
                    std::to_string(longest));
    }
    arena_.reserve(text.size());
    nodes_.reserve(std::min(text.size() / 8 + 1, limits.max_nodes));
    handler{*this, limits}.run();
}

}  // namespace weightwire::wire
