#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/core/error.hpp>

/// @file
/// What every reader of a Python pickle needs: a cursor over the opcodes, the stack with its marks,
/// and the memo, all of them bounded.

namespace weightwire::wire::detail {

/// What a pickle may cost, and how messages call it.
struct pickle_rules {
    std::string_view what;      ///< begins every message: `the pickled IPC handles`
    std::string_view expected;  ///< ends every message
    std::string_view has;       ///< `what` has, or have
    std::string_view is;        ///< `what` is, or are
    phase where = phase::none;
    std::string_view backend{};
    std::size_t max_bytes = 0;  ///< length of the text
    std::size_t max_stack = 0;  ///< values
    std::size_t max_marks = 0;  ///< marks in each other
    std::size_t max_memo = 0;   ///< remembered values
    std::size_t max_line = 0;   ///< bytes of a module's or global's name
};

/// The mechanism under a reader, which gives opcodes their meaning. A `Value` is small and copied.
/// Nothing here takes more than constant time and memory for an opcode, beside the bytes that the
/// opcode itself carries.
template <class Value>
class pickle_machine {
protected:
    /// @throws protocol_error the text is too long, or begins not as protocol 2 to 5 does.
    pickle_machine(std::string_view text, const pickle_rules& rules) : text_{text}, rules_{&rules} {
        if (text_.size() > rules.max_bytes) {
            throw_fault(std::string{rules.has} + " " + std::to_string(text_.size()) +
                        " bytes, at most " + std::to_string(rules.max_bytes) + " are read");
        }
        if (text_.empty() || text_[0] != '\x80') {
            fail("a pickle of protocol 2 to 5 begins with opcode 0x80");
        }
        ++position_;
        const auto protocol = number(1);
        if (protocol < 2 || protocol > 5) {
            fail("protocol " + std::to_string(protocol) + " is none of 2 to 5");
        }
    }

    [[noreturn]] void throw_fault(const std::string& text) const {
        throw protocol_error{
            std::string{rules_->what} + " " + text + "; " + std::string{rules_->expected},
            {.phase = rules_->where, .backend = std::string{rules_->backend}}};
    }
    /// About the opcode being read.
    [[noreturn]] void fail(const std::string& text) const {
        throw_fault(std::string{rules_->is} + " wrong: " + place() + ": " + text);
    }
    [[nodiscard]] std::string place() const {
        constexpr std::string_view digits = "0123456789abcdef";
        std::string opcode = "end of text";
        if (at_ < text_.size()) {
            const auto byte = static_cast<unsigned char>(text_[at_]);
            opcode = std::string{"opcode 0x"} + digits[byte >> 4U] + digits[byte & 0xFU];
        }
        return opcode + " at offset " + std::to_string(at_);
    }

    [[nodiscard]] std::string_view text() const noexcept { return text_; }
    [[nodiscard]] bool at_end() const noexcept { return position_ == text_.size(); }

    /// The next opcode, which messages name from now on.
    [[nodiscard]] unsigned char next_opcode() {
        at_ = position_;
        return static_cast<unsigned char>(take(1)[0]);
    }
    [[nodiscard]] std::string_view take(std::uint64_t count) {
        if (count > text_.size() - position_) {
            fail("it needs " + std::to_string(count) + " bytes, " +
                 std::to_string(text_.size() - position_) + " are left");
        }
        const auto bytes = text_.substr(position_, static_cast<std::size_t>(count));
        position_ += bytes.size();
        return bytes;
    }
    /// A little-endian number of `width` bytes.
    [[nodiscard]] std::uint64_t number(std::size_t width) {
        std::uint64_t result = 0;
        const auto bytes = take(width);
        for (std::size_t i = width; i-- > 0;) {
            result = result << 8U | static_cast<unsigned char>(bytes[i]);
        }
        return result;
    }
    /// What LONG1 carries: a signed number of any width.
    [[nodiscard]] std::int64_t long_number() {
        const auto bytes = take(number(1));
        if (bytes.size() > sizeof(std::int64_t)) {
            fail("an integer of more than 64 bits");
        }
        const bool negative =
            !bytes.empty() && (static_cast<unsigned char>(bytes.back()) & 0x80U) != 0;
        std::uint64_t result = negative ? ~std::uint64_t{0} : 0;
        for (std::size_t i = bytes.size(); i-- > 0;) {
            result = result << 8U | static_cast<unsigned char>(bytes[i]);
        }
        return static_cast<std::int64_t>(result);
    }
    [[nodiscard]] std::string_view line() {
        const auto rest = text_.substr(position_, rules_->max_line);
        const auto end = rest.find('\n');
        if (end == rest.npos) {
            fail("its line does not end");
        }
        position_ += end + 1;
        return rest.substr(0, end);
    }
    void push(const Value& made) {
        if (stack_.size() == rules_->max_stack) {
            fail("more than " + std::to_string(rules_->max_stack) + " values on the stack");
        }
        stack_.push_back(made);
    }
    /// Values above the last mark.
    [[nodiscard]] std::size_t available() const noexcept {
        return stack_.size() - (marks_.empty() ? 0 : marks_.back());
    }
    /// The last `count` values. They stay; the view is valid until the stack changes.
    [[nodiscard]] std::span<const Value> top(std::size_t count) const {
        if (count > available()) {
            fail("it takes " + std::to_string(count) + " values where there are " +
                 std::to_string(available()));
        }
        return std::span{stack_}.last(count);
    }
    void drop(std::size_t count) { stack_.resize(stack_.size() - count); }
    [[nodiscard]] Value pop() {
        const auto result = top(1)[0];
        stack_.pop_back();
        return result;
    }
    /// Neither values nor marks are left.
    [[nodiscard]] bool is_empty() const noexcept { return stack_.empty() && marks_.empty(); }

    void mark() {
        if (marks_.size() == rules_->max_marks) {
            fail("more than " + std::to_string(rules_->max_marks) + " marks");
        }
        marks_.push_back(stack_.size());
    }
    /// How many values stand above the last mark, which is taken away.
    [[nodiscard]] std::size_t unmark() {
        if (marks_.empty()) {
            fail("it takes a mark where there is none");
        }
        const auto count = available();
        marks_.pop_back();
        return count;
    }

    /// What every pickle has. @returns whether `opcode` is such a one.
    [[nodiscard]] bool step_memo(unsigned char opcode) {
        switch (opcode) {
            case 0x95: frame(); return true;              // FRAME
            case 0x94: remember(); return true;           // MEMOIZE
            case 0x71: remember(number(1)); return true;  // BINPUT
            case 0x72: remember(number(4)); return true;  // LONG_BINPUT
            case 0x68: recall(number(1)); return true;    // BINGET
            case 0x6A: recall(number(4)); return true;    // LONG_BINGET
            default: return false;
        }
    }

private:
    void frame() {
        if (number(8) > text_.size() - position_) {
            fail("the frame is longer than the text");
        }
    }
    /// MEMOIZE: under the next number.
    void remember() { remember(memo_.size()); }
    /// CPython counts what it remembers: a number beyond that nobody writes.
    void remember(std::uint64_t index) {
        const auto& value = top(1)[0];
        if (index > memo_.size() || index >= rules_->max_memo) {
            fail("it remembers as " + std::to_string(index) + " where " +
                 std::to_string(memo_.size()) + " are remembered, of at most " +
                 std::to_string(rules_->max_memo));
        }
        if (index == memo_.size()) {
            memo_.push_back(value);
        } else {
            memo_[static_cast<std::size_t>(index)] = value;
        }
    }
    void recall(std::uint64_t index) {
        if (index >= memo_.size()) {
            fail("nothing was remembered as " + std::to_string(index));
        }
        push(memo_[static_cast<std::size_t>(index)]);
    }

    std::string_view text_;
    const pickle_rules* rules_;
    std::size_t position_ = 0;
    std::size_t at_ = 0;  // where the current opcode stands
    std::vector<Value> stack_;
    std::vector<std::size_t> marks_;  // heights of the stack
    std::vector<Value> memo_;
};

/// Appends the bytes for which a text stands in protocol 2, whose pickles have no bytes and call
/// `_codecs.encode(text, 'latin1')` instead. @returns false: `text` is no UTF-8 of characters below
/// 256.
[[nodiscard]] inline bool append_latin1(std::string& out, std::string_view text) {
    for (std::size_t i = 0; i < text.size(); ++i) {
        const auto first = static_cast<unsigned char>(text[i]);
        if (first < 0x80U) {
            out += text[i];
            continue;
        }
        const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1])
                                              : static_cast<unsigned char>(0);
        if ((first != 0xC2U && first != 0xC3U) || (next & 0xC0U) != 0x80U) {
            return false;
        }
        out += static_cast<char>((first & 0x3U) << 6U | (next & 0x3FU));
        ++i;
    }
    return true;
}

}  // namespace weightwire::wire::detail
