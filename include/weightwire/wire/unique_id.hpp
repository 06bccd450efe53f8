#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/base64.hpp>
#include <weightwire/wire/pickle_machine.hpp>

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

/// CPython's longest form, of protocol 2, has some 400 bytes and 20 steps.
inline constexpr pickle_rules unique_id_pickle_rules{
    .what = "the pickled NCCL id",
    .expected =
        "expected the ncclUniqueId of vLLM as CPython pickles it, is there another "
        "program's key in this store?",
    .has = "has",
    .is = "is",
    .where = phase::init,
    .max_bytes = 1024,
    .max_stack = 8,
    .max_memo = 128,
    .max_line = 256,
};
inline constexpr std::size_t most_unique_id_steps = 128;

/// The globals in it.
enum class unique_id_name : std::uint8_t { unpickle, encode, id_class, other };

struct unique_id_value {
    enum class kind : std::uint8_t { text, name, dict, bytes, pair, id };
    kind is = kind::text;
    unique_id_name name = unique_id_name::other;
    std::size_t pair = 0;     ///< counts `pairs_`
    std::string_view text{};  ///< text, bytes or the id's
};

/// Walks the opcodes of one pickled unique id.
class unique_id_walker : pickle_machine<unique_id_value> {
public:
    explicit unique_id_walker(std::string_view text)
        : pickle_machine{text, unique_id_pickle_rules} {}

    /// @throws protocol_error
    [[nodiscard]] unique_id read() {
        std::size_t steps = 0;
        for (auto opcode = next_opcode(); opcode != stop; opcode = next_opcode()) {
            step(opcode);
            if (++steps == most_unique_id_steps) {
                fail("one opcode more than the " + std::to_string(most_unique_id_steps) +
                     " allowed");
            }
        }
        const auto result = pop(kind::id);
        if (!is_empty() || !at_end()) {
            fail(is_empty() ? "there are bytes after the end" : "values are left over at the end");
        }
        unique_id id;
        std::memcpy(id.data(), result.text.data(), id.size());
        return id;
    }

private:
    using value = unique_id_value;
    using kind = value::kind;
    using global = unique_id_name;
    static constexpr unsigned char stop = 0x2E;

    using pickle_machine::pop;
    [[nodiscard]] value pop(kind expected) {
        const auto result = pop();
        if (result.is != expected) {
            fail("it is used on a value of another kind than an id is made of");
        }
        return result;
    }
    void step(unsigned char opcode);
    void name(std::string_view module, std::string_view member);
    void stack_name();
    void pair();
    void reduce();
    /// What `_codecs.encode(text, 'latin1')` gives: protocol 2 has no bytes and spells them so.
    void latin1(const value& text, const value& codec);
    /// What `_ctypes._unpickle(ncclUniqueId, ({}, bytes))` gives.
    void structure(const value& type, const value& state);

    std::vector<std::pair<value, value>> pairs_;
    std::deque<std::string> decoded_;  ///< where views of it lead to
};

inline void unique_id_walker::step(unsigned char opcode) {
    switch (opcode) {
        case 0x8C: return push({.text = take(number(1))});                     // SHORT_BINUNICODE
        case 0x58: return push({.text = take(number(4))});                     // BINUNICODE
        case 0x43: return push({.is = kind::bytes, .text = take(number(1))});  // SHORT_BINBYTES
        case 0x42: return push({.is = kind::bytes, .text = take(number(4))});  // BINBYTES
        case 0x63: {                                                           // GLOBAL
            const auto module = line();
            return name(module, line());
        }
        case 0x93: return stack_name();              // STACK_GLOBAL
        case 0x7D: return push({.is = kind::dict});  // EMPTY_DICT
        case 0x86: return pair();                    // TUPLE2
        case 0x52: return reduce();                  // REDUCE
        default:
            if (!step_memo(opcode)) {
                fail("an NCCL id is not made of this opcode");
            }
    }
}

inline void unique_id_walker::name(std::string_view module, std::string_view member) {
    auto known = global::other;
    if (module == "_ctypes" && member == "_unpickle") {
        known = global::unpickle;
    } else if (module == "_codecs" && member == "encode") {
        known = global::encode;
    } else if (module == unique_id_module && member == unique_id_class) {
        known = global::id_class;
    }
    push({.is = kind::name, .name = known});
}

inline void unique_id_walker::stack_name() {
    const auto member = pop(kind::text);
    const auto module = pop(kind::text);
    name(module.text, member.text);
}

inline void unique_id_walker::pair() {
    const auto second = pop();
    const auto first = pop();
    pairs_.emplace_back(first, second);
    push({.is = kind::pair, .pair = pairs_.size() - 1});
}

inline void unique_id_walker::reduce() {
    const auto [first, second] = pairs_[pop(kind::pair).pair];
    switch (pop(kind::name).name) {
        case global::unpickle: return structure(first, second);
        case global::encode: return latin1(first, second);
        default: fail("it calls something else than _ctypes._unpickle; nothing is called");
    }
}

inline void unique_id_walker::latin1(const value& text, const value& codec) {
    if (text.is != kind::text || codec.is != kind::text || codec.text != "latin1") {
        fail("_codecs.encode is not given a text and 'latin1'");
    }
    auto& bytes = decoded_.emplace_back();
    if (!append_latin1(bytes, text.text)) {
        fail("a text that stands for bytes has a character above 255");
    }
    push({.is = kind::bytes, .text = bytes});
}

inline void unique_id_walker::structure(const value& type, const value& state) {
    if (type.is != kind::name || type.name != global::id_class) {
        fail("the object is not of the class ncclUniqueId of vLLM's pynccl_wrapper");
    }
    if (state.is != kind::pair || pairs_[state.pair].first.is != kind::dict ||
        pairs_[state.pair].second.is != kind::bytes) {
        fail("the object's state is not an empty dict and bytes");
    }
    const auto bytes = pairs_[state.pair].second.text;
    if (bytes.size() != unique_id{}.size()) {
        fail("the id has " + std::to_string(bytes.size()) + " bytes, expected 128");
    }
    push({.is = kind::id, .text = bytes});
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
    return detail::unique_id_walker{text}.read();
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
