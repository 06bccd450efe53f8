#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/base64.hpp>

/// @file
/// NCCL's unique id, the 128 bytes by which ranks find each other, in the two forms in which vLLM
/// passes it on: base64 (vLLM wire section 2.1) and a Python pickle (2.5).
///
/// A pickle is a program. This reader is no interpreter: it knows the opcodes that CPython writes
/// for this one object, keeps names as texts, and calls nothing. Whatever else comes is refused
/// with the opcode and where it stands.

namespace weightwire::wire {

/// As NCCL makes it. Whoever knows it can join the group: it is a secret of the job.
using unique_id = std::array<std::byte, 128>;

namespace detail {

inline constexpr std::string_view unique_id_module =
    "vllm.distributed.device_communicators.pynccl_wrapper";
inline constexpr std::string_view unique_id_class = "ncclUniqueId";

/// Bounds of what is read; CPython's longest form, of protocol 2, has some 400 bytes and 20 steps.
inline constexpr std::size_t longest_pickle = 1024;
inline constexpr std::size_t most_pickle_steps = 128;
inline constexpr std::size_t deepest_pickle_stack = 8;

/// Walks the opcodes of one pickled unique id.
class unique_id_pickle {
public:
    explicit unique_id_pickle(std::string_view text) noexcept : text_{text} {}

    /// @throws protocol_error
    [[nodiscard]] unique_id read() {
        if (text_.size() > longest_pickle) {
            throw_fault("has " + std::to_string(text_.size()) + " bytes, at most " +
                        std::to_string(longest_pickle) + " are read");
        }
        read_protocol();
        for (std::size_t steps = 0; !stopped_; ++steps) {
            if (steps == most_pickle_steps) {
                fail("one opcode more than the " + std::to_string(most_pickle_steps) + " allowed");
            }
            step();
        }
        const auto result = pop(kind::id);
        if (!stack_.empty() || position_ != text_.size()) {
            fail(stack_.empty() ? "there are bytes after the end"
                                : "values are left over at the end");
        }
        unique_id id;
        std::memcpy(id.data(), values_[result].text.data(), id.size());
        return id;
    }

private:
    enum class kind : std::uint8_t { text, name, dict, bytes, pair, id };
    /// A value; a pair's members are positions in `values_`.
    struct value {
        enum kind kind = kind::text;
        std::string text{};  ///< text, bytes or `module name`
        std::size_t first = 0;
        std::size_t second = 0;
    };

    [[noreturn]] static void throw_fault(const std::string& text) {
        throw protocol_error{
            "the pickled NCCL id " + text +
                "; expected the ncclUniqueId of vLLM as CPython pickles it, is there another "
                "program's key in this store?",
            {.phase = phase::init}};
    }
    /// About the opcode being read.
    [[noreturn]] void fail(const std::string& text) const {
        constexpr std::string_view digits = "0123456789abcdef";
        std::string opcode = "end of text";
        if (at_ < text_.size()) {
            const auto byte = static_cast<unsigned char>(text_[at_]);
            opcode = std::string{"opcode 0x"} + digits[byte >> 4U] + digits[byte & 0xFU];
        }
        throw_fault("is wrong: " + opcode + " at offset " + std::to_string(at_) + ": " + text);
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
    [[nodiscard]] std::string_view line() {
        const auto end = text_.find('\n', position_);
        if (end == text_.npos) {
            fail("its line does not end");
        }
        const auto result = text_.substr(position_, end - position_);
        position_ = end + 1;
        return result;
    }

    void push(value made) {
        values_.push_back(std::move(made));
        push_known(values_.size() - 1);
    }
    void push_known(std::size_t index) {
        if (stack_.size() == deepest_pickle_stack) {
            fail("more than " + std::to_string(deepest_pickle_stack) + " values on the stack");
        }
        stack_.push_back(index);
    }
    [[nodiscard]] std::size_t pop() {
        if (stack_.empty()) {
            fail("it takes a value where there is none");
        }
        const auto result = stack_.back();
        stack_.pop_back();
        return result;
    }
    [[nodiscard]] std::size_t pop(kind expected) {
        const auto result = pop();
        if (values_[result].kind != expected) {
            fail("it is used on a value of another kind than an id is made of");
        }
        return result;
    }
    void put(std::uint64_t index) {
        if (stack_.empty()) {
            fail("it takes a value where there is none");
        }
        memo_[index] = stack_.back();
    }
    void recall(std::uint64_t index) {
        const auto found = memo_.find(index);
        if (found == memo_.end()) {
            fail("nothing was remembered as " + std::to_string(index));
        }
        push_known(found->second);
    }

    void read_protocol() {
        if (text_.empty() || text_[0] != '\x80') {
            fail("a pickle of protocol 2 to 5 begins with opcode 0x80");
        }
        ++position_;
        const auto protocol = number(1);
        if (protocol < 2 || protocol > 5) {
            fail("protocol " + std::to_string(protocol) + " is none of 2 to 5");
        }
    }
    void step();
    void name(std::string_view module, std::string_view member) {
        push({.kind = kind::name, .text = std::string{module} + ' ' + std::string{member}});
    }
    void stack_name() {
        const auto member = pop(kind::text);
        const auto module = pop(kind::text);
        name(std::string{values_[module].text}, std::string{values_[member].text});
    }
    void pair() {
        const auto second = pop();
        const auto first = pop();
        push({.kind = kind::pair, .first = first, .second = second});
    }
    void reduce();
    /// What `_codecs.encode(text, 'latin1')` gives: protocol 2 has no bytes and spells them so.
    void latin1(const value& arguments);
    /// What `_ctypes._unpickle(ncclUniqueId, ({}, bytes))` gives.
    void structure(const value& arguments);

    std::string_view text_;
    std::size_t position_ = 0;
    std::size_t at_ = 0;  // where the current opcode stands
    bool stopped_ = false;
    std::vector<value> values_;
    std::vector<std::size_t> stack_;
    std::map<std::uint64_t, std::size_t> memo_;
};

inline void unique_id_pickle::step() {
    at_ = position_;
    const auto opcode = static_cast<unsigned char>(take(1)[0]);
    const auto text = [&](std::size_t width) {
        push({.kind = kind::text, .text = std::string{take(number(width))}});
    };
    const auto bytes = [&](std::size_t width) {
        push({.kind = kind::bytes, .text = std::string{take(number(width))}});
    };
    switch (opcode) {
        case 0x95:  // FRAME
            if (number(8) > text_.size() - position_) {
                fail("the frame is longer than the text");
            }
            return;
        case 0x8C: return text(1);   // SHORT_BINUNICODE
        case 0x58: return text(4);   // BINUNICODE
        case 0x43: return bytes(1);  // SHORT_BINBYTES
        case 0x42: return bytes(4);  // BINBYTES
        case 0x63: {                 // GLOBAL
            const auto module = line();
            return name(module, line());
        }
        case 0x93: return stack_name();                // STACK_GLOBAL
        case 0x7D: return push({.kind = kind::dict});  // EMPTY_DICT
        case 0x86: return pair();                      // TUPLE2
        case 0x52: return reduce();                    // REDUCE
        case 0x94: return put(memo_.size());           // MEMOIZE
        case 0x71: return put(number(1));              // BINPUT
        case 0x72: return put(number(4));              // LONG_BINPUT
        case 0x68: return recall(number(1));           // BINGET
        case 0x6A: return recall(number(4));           // LONG_BINGET
        case 0x2E: stopped_ = true; return;            // STOP
        default: fail("an NCCL id is not made of this opcode");
    }
}

inline void unique_id_pickle::reduce() {
    const auto arguments = values_[pop(kind::pair)];
    const auto& callable = values_[pop(kind::name)].text;
    if (callable == "_ctypes _unpickle") {
        structure(arguments);
    } else if (callable == "_codecs encode") {
        latin1(arguments);
    } else {
        fail("it calls something else than _ctypes._unpickle; nothing is called");
    }
}

inline void unique_id_pickle::latin1(const value& arguments) {
    const auto& text = values_[arguments.first];
    const auto& codec = values_[arguments.second];
    if (text.kind != kind::text || codec.kind != kind::text || codec.text != "latin1") {
        fail("_codecs.encode is not given a text and 'latin1'");
    }
    std::string bytes;
    for (std::size_t i = 0; i < text.text.size(); ++i) {
        const auto first = static_cast<unsigned char>(text.text[i]);
        if (first < 0x80U) {
            bytes += text.text[i];
            continue;
        }
        const auto next = i + 1 < text.text.size() ? static_cast<unsigned char>(text.text[i + 1])
                                                   : static_cast<unsigned char>(0);
        if ((first != 0xC2U && first != 0xC3U) || (next & 0xC0U) != 0x80U) {
            fail("a text that stands for bytes has a character above 255");
        }
        bytes += static_cast<char>((first & 0x3U) << 6U | (next & 0x3FU));
        ++i;
    }
    push({.kind = kind::bytes, .text = std::move(bytes)});
}

inline void unique_id_pickle::structure(const value& arguments) {
    const auto& type = values_[arguments.first];
    const auto& state = values_[arguments.second];
    const auto expected = std::string{unique_id_module} + ' ' + std::string{unique_id_class};
    if (type.kind != kind::name || type.text != expected) {
        fail("the object is not of the class ncclUniqueId of vLLM's pynccl_wrapper");
    }
    if (state.kind != kind::pair || values_[state.first].kind != kind::dict ||
        values_[state.second].kind != kind::bytes) {
        fail("the object's state is not an empty dict and bytes");
    }
    const auto& bytes = values_[state.second].text;
    if (bytes.size() != unique_id{}.size()) {
        fail("the id has " + std::to_string(bytes.size()) + " bytes, expected 128");
    }
    push({.kind = kind::id, .text = std::string{bytes}});
}

}  // namespace detail

/// The smallest pickle that Python loads as vLLM's `ncclUniqueId`: 227 bytes, of protocol 4.
[[nodiscard]] inline std::string pickle_of(const unique_id& id) {
    using namespace std::string_view_literals;
    std::string out{"\x80\x04"};
    const auto text = [&out](std::string_view value) {
        out += '\x8C';
        out += static_cast<char>(value.size());
        out += value;
    };
    text("_ctypes");
    text("_unpickle");
    out += '\x93';
    text(detail::unique_id_module);
    text(detail::unique_id_class);
    out += "\x93}C\x80"sv;
    out.append(reinterpret_cast<const char*>(id.data()), id.size());
    out += "\x86\x86R."sv;
    return out;
}

/// The id in a pickle that a peer sent: what CPython writes for it in protocols 2 to 5, and what
/// `pickle_of` writes. Nothing in it is executed.
/// @throws protocol_error anything else; names the opcode and its offset.
[[nodiscard]] inline unique_id unique_id_from_pickle(std::string_view text) {
    return detail::unique_id_pickle{text}.read();
}

/// Standard alphabet, padded: 172 characters.
[[nodiscard]] inline std::string base64_of(const unique_id& id) {
    std::string out;
    append_base64(out, id);
    return out;
}

/// The inverse of `base64_of`, as strict as vLLM: the alphabet for URLs is refused.
/// @throws protocol_error
[[nodiscard]] inline unique_id unique_id_from_base64(std::string_view text) {
    constexpr std::size_t digits = (unique_id{}.size() + 2) / 3 * 4;
    if (text.size() != digits) {
        throw protocol_error{"an NCCL id has to be the base64 text of 128 bytes, which has " +
                                 std::to_string(digits) + " characters, found " +
                                 std::to_string(text.size()),
                             {.phase = phase::init}};
    }
    const auto bytes = decode_base64(text);
    if (!bytes || bytes->size() != unique_id{}.size()) {
        throw protocol_error{
            "an NCCL id has to be the padded base64 text of 128 bytes in the standard alphabet "
            "(with + and /)",
            {.phase = phase::init}};
    }
    unique_id id;
    std::copy(bytes->begin(), bytes->end(), id.begin());
    return id;
}

}  // namespace weightwire::wire
