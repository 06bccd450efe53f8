#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/wire/ipc_handles.hpp>
#include <weightwire/wire/pickle_machine.hpp>

/// @file
/// The walker behind `ipc_handles_from_pickle`; include `wire/ipc_pickle.hpp`. A
/// pickle is a program; this reader is no interpreter: it knows the opcodes that CPython writes for
/// this one object and torch's few names there, and calls nothing. What a tuple is, is decided
/// where it is closed.

namespace weightwire::wire::detail {

/// Bounds of what is read: as base64, the longest string that the JSON reader takes. 40,000 tensors
/// of eight GPUs have some 70 MB, 320,000 argument tuples and three million memo entries.
inline constexpr std::size_t longest_ipc_pickle = std::size_t{96} << 20U;
inline constexpr std::size_t most_ipc_tensors = std::size_t{1} << 19U;  ///< and dicts
inline constexpr std::size_t most_ipc_megabytes = 256;  ///< of all tensors, recalled ones too
inline constexpr std::size_t most_ipc_gpus = 256;       ///< in one dict
inline constexpr std::size_t longest_ipc_text = 1024;   ///< UUIDs, counters' names
inline constexpr std::size_t ipc_argument_count = 15;
inline constexpr pickle_rules ipc_pickle_rules{
    .what = "the pickled IPC handles",
    .expected = "expected vLLM's ipc_handles as CPython pickles them",
    .has = "have",
    .is = "are",
    .where = phase::update,
    .backend = "ipc",
    .max_bytes = longest_ipc_pickle,
    .max_stack = 4096,  // CPython appends 1000 at a time
    .max_marks = 16,
    .max_memo = std::size_t{8} << 20U,
    .max_line = 256,
};

/// A value of the walker's: what a tuple is, is decided where it is closed.
struct ipc_pickle_value {
    enum class kind : std::uint8_t {
        none,
        boolean,
        integer,          ///< `payload` is an int64
        text,             ///< `extent` bytes at `payload`, see `view`
        bytes,            ///< likewise
        name,             ///< `payload` is an `ipc_pickle_name`
        type,             ///< `payload` is a `dtype`
        integers,         ///< `extent` of `integers_`, from `payload`
        size_arguments,   ///< a tuple of such a tuple
        codec_arguments,  ///< of the text at `payload`
        tensor,           ///< `payload` counts `tensors_`
        pair,             ///< of the function and such a tuple
        dict,             ///< `payload` counts `dicts_`
        list,
    };
    std::uint64_t payload = 0;
    std::uint32_t extent = 0;
    kind is = kind::none;
};
static_assert(sizeof(ipc_pickle_value) == 16);

/// The globals in it, beside dtypes.
enum class ipc_pickle_name : std::uint8_t {
    tensor_class,
    storage_class,
    size_class,
    rebuild,
    encode,
    bytes,
};

/// Walks the opcodes of one pickled handle object.
class ipc_pickle_walker : pickle_machine<ipc_pickle_value> {
public:
    explicit ipc_pickle_walker(std::string_view text) : pickle_machine{text, ipc_pickle_rules} {}

    /// @throws protocol_error, unsupported_error
    [[nodiscard]] ipc_handles read() {
        for (auto opcode = next_opcode(); opcode != stop; opcode = next_opcode()) {
            if (!step_constant(opcode) && !step_memo(opcode)) {
                step_object(opcode);
            }
        }
        const auto root = pop();
        if (!is_empty() || !at_end()) {
            fail(is_empty() ? "there are bytes after the end" : "values are left over at the end");
        }
        if (root.is != kind::list && root.is != kind::dict) {
            fail("the object is neither a list of dicts nor a dict");
        }
        return result(root);
    }

private:
    using value = ipc_pickle_value;
    using kind = value::kind;
    using global = ipc_pickle_name;
    /// A dict's values count `tensors_`.
    using dict = std::vector<std::pair<std::string_view, std::uint64_t>>;
    static constexpr unsigned char stop = 0x2E;

    using pickle_machine::push;
    void push(kind is, std::uint64_t payload = 0, std::size_t extent = 0) {
        push({.payload = payload, .extent = static_cast<std::uint32_t>(extent), .is = is});
    }
    void push_integer(std::int64_t number) {
        push(kind::integer, static_cast<std::uint64_t>(number));
    }
    /// A text or bytes: part of what is read, or of what was decoded from it.
    [[nodiscard]] std::string_view view(const value& of) const noexcept {
        const auto at = static_cast<std::size_t>(of.payload);
        return at < text().size()
                   ? text().substr(at, of.extent)
                   : std::string_view{decoded_}.substr(at - text().size(), of.extent);
    }
    void push_view(kind is, std::string_view part) {
        push(is, static_cast<std::uint64_t>(part.data() - text().data()), part.size());
    }

    [[nodiscard]] bool step_constant(unsigned char opcode);
    void step_object(unsigned char opcode);
    void name(std::string_view module, std::string_view member);
    void stack_name();
    void tuple(std::size_t count);
    void reduce();
    /// What `_codecs.encode(text, 'latin1')` gives: protocol 2 has no bytes and spells them so.
    void latin1(const value& arguments);
    void append(std::size_t count);
    void set_items(std::size_t count);
    void add_tensor(std::span<const value> items);
    void read_storage(std::span<const value> items, ipc_tensor& tensor) const;
    /// Item `i` has to be what `words` say. @throws protocol_error `holds` is false.
    void require_item(bool holds, std::size_t i, std::string_view words) const {
        if (!holds) {
            fail("item " + std::to_string(i) + " of a tensor's 15 arguments has to be " +
                 std::string{words});
        }
    }
    [[nodiscard]] std::uint64_t natural(std::span<const value> items, std::size_t i) const {
        const auto& item = items[i];
        require_item(item.is == kind::integer && static_cast<std::int64_t>(item.payload) >= 0, i,
                     "an integer from 0");
        return item.payload;
    }
    /// Bytes; None counts as none.
    [[nodiscard]] std::string_view optional_bytes(std::span<const value> items, std::size_t i,
                                                  std::string_view words) const {
        require_item(items[i].is == kind::bytes || items[i].is == kind::none, i, words);
        return items[i].is == kind::bytes ? view(items[i]) : std::string_view{};
    }
    /// The 64 bytes in what torch says of a storage.
    [[nodiscard]] std::string_view bare_handle(std::string_view said) const;
    [[nodiscard]] ipc_handles result(const value& root) const;

    bool has_list_ = false;
    std::vector<std::int64_t> integers_;
    std::string decoded_;
    std::vector<ipc_tensor> tensors_;
    std::vector<dict> dicts_;
    std::vector<std::uint64_t> list_;  // counts dicts_
};

/// What stands for itself. @returns whether `opcode` is such a one.
inline bool ipc_pickle_walker::step_constant(unsigned char opcode) {
    switch (opcode) {
        case 0x4E: push(kind::none); return true;                                    // NONE
        case 0x88: push(kind::boolean, 1); return true;                              // NEWTRUE
        case 0x89: push(kind::boolean, 0); return true;                              // NEWFALSE
        case 0x4B: push_integer(static_cast<std::int64_t>(number(1))); return true;  // BININT1
        case 0x4D: push_integer(static_cast<std::int64_t>(number(2))); return true;  // BININT2
        case 0x4A: push_integer(static_cast<std::int32_t>(number(4))); return true;  // BININT
        case 0x8A: push_integer(long_number()); return true;                         // LONG1
        case 0x8C: push_view(kind::text, take(number(1))); return true;   // SHORT_BINUNICODE
        case 0x58: push_view(kind::text, take(number(4))); return true;   // BINUNICODE
        case 0x43: push_view(kind::bytes, take(number(1))); return true;  // SHORT_BINBYTES
        case 0x42: push_view(kind::bytes, take(number(4))); return true;  // BINBYTES
        default: return false;
    }
}

inline void ipc_pickle_walker::step_object(unsigned char opcode) {
    switch (opcode) {
        case 0x63: {  // GLOBAL
            const auto module = line();
            return name(module, line());
        }
        case 0x93: return stack_name();     // STACK_GLOBAL
        case 0x28: return mark();           // MARK
        case 0x29: return tuple(0);         // EMPTY_TUPLE
        case 0x85: return tuple(1);         // TUPLE1
        case 0x86: return tuple(2);         // TUPLE2
        case 0x87: return tuple(3);         // TUPLE3
        case 0x74: return tuple(unmark());  // TUPLE
        case 0x52:                          // REDUCE
        case 0x81: return reduce();         // NEWOBJ
        case 0x5D:                          // EMPTY_LIST
            if (std::exchange(has_list_, true)) {
                fail("a second list; handles are one list of dicts");
            }
            return push(kind::list);
        case 0x61: return append(1);         // APPEND
        case 0x65: return append(unmark());  // APPENDS
        case 0x7D:                           // EMPTY_DICT
            if (dicts_.size() == most_ipc_tensors) {
                fail("more than " + std::to_string(most_ipc_tensors) + " dicts");
            }
            dicts_.emplace_back();
            return push(kind::dict, dicts_.size() - 1);
        case 0x73: return set_items(2);         // SETITEM
        case 0x75: return set_items(unmark());  // SETITEMS
        default: fail("IPC handles are not made of this opcode");
    }
}

inline void ipc_pickle_walker::name(std::string_view module, std::string_view member) {
    struct known {
        std::string_view module;
        std::string_view member;
        global is;
    };
    static constexpr std::array<known, 9> names{{
        {"torch", "Tensor", global::tensor_class},
        {"torch.nn.parameter", "Parameter", global::tensor_class},
        {"torch.storage", "TypedStorage", global::storage_class},
        {"torch.storage", "UntypedStorage", global::storage_class},
        {"torch", "Size", global::size_class},
        {"torch.multiprocessing.reductions", "rebuild_cuda_tensor", global::rebuild},
        {"_codecs", "encode", global::encode},
        {"builtins", "bytes", global::bytes},
        {"__builtin__", "bytes", global::bytes},
    }};
    for (const auto& known : names) {
        if (known.module == module && known.member == member) {
            return push(kind::name, static_cast<std::uint64_t>(known.is));
        }
    }
    if (const auto type = dtype_from_torch(member); type && module == "torch") {
        return push(kind::type, static_cast<std::uint64_t>(*type));
    }
    const auto printable = [](std::string_view text) {
        std::string out;
        for (const char c : text.substr(0, 64)) {
            out += c >= ' ' && c <= '~' ? c : '?';
        }
        return out;
    };
    fail("it names '" + printable(module) + " " + printable(member) +
         "', which is no dtype or other part of a handle that is known here; nothing is called");
}

inline void ipc_pickle_walker::stack_name() {
    const auto member = pop();
    const auto module = pop();
    if (member.is != kind::text || module.is != kind::text) {
        fail("a global's module and name are not texts");
    }
    name(view(module), view(member));
}

inline void ipc_pickle_walker::tuple(std::size_t count) {
    const auto items = top(count);
    const auto all_integers = std::all_of(
        items.begin(), items.end(), [](const value& item) { return item.is == kind::integer; });
    value made;
    if (all_integers && count <= max_dimensions) {
        made = {.payload = integers_.size(),
                .extent = static_cast<std::uint32_t>(count),
                .is = kind::integers};
        for (const auto& item : items) {
            integers_.push_back(static_cast<std::int64_t>(item.payload));
        }
    } else if (all_integers) {
        fail("a tensor of " + std::to_string(count) + " dimensions; at most " +
             std::to_string(max_dimensions) + " are supported");
    } else if (count == ipc_argument_count) {
        add_tensor(items);
        made = {.payload = tensors_.size() - 1, .is = kind::tensor};
    } else if (count == 1 && items[0].is == kind::integers) {
        made = items[0];
        made.is = kind::size_arguments;
    } else if (count == 2 && items[0].is == kind::name &&
               static_cast<global>(items[0].payload) == global::rebuild &&
               items[1].is == kind::tensor) {
        made = items[1];
        made.is = kind::pair;
    } else if (count == 2 && items[0].is == kind::text && items[1].is == kind::text &&
               view(items[1]) == "latin1") {
        made = items[0];
        made.is = kind::codec_arguments;
    } else {
        fail("a tuple of " + std::to_string(count) +
             " values that is no size, no stride and not the 15 arguments of rebuild_cuda_tensor");
    }
    drop(count);
    push(made);
}

inline void ipc_pickle_walker::reduce() {
    auto arguments = pop();
    const auto callable = pop();
    const auto calls = [&](global expected, kind given) {
        return callable.is == kind::name && static_cast<global>(callable.payload) == expected &&
               arguments.is == given;
    };
    if (calls(global::size_class, kind::size_arguments)) {
        arguments.is = kind::integers;
        push(arguments);
    } else if (calls(global::encode, kind::codec_arguments)) {
        latin1(arguments);
    } else if (calls(global::bytes, kind::integers) && arguments.extent == 0) {
        push_view(kind::bytes, text().substr(0, 0));
    } else {
        fail("it calls something else than torch.Size, or with other values; nothing is called");
    }
}

inline void ipc_pickle_walker::latin1(const value& arguments) {
    const auto from = view(arguments);
    if (from.size() > longest_ipc_text) {
        fail("a text of " + std::to_string(from.size()) + " bytes that stands for bytes; at most " +
             std::to_string(longest_ipc_text) + " are read");
    }
    const auto begin = decoded_.size();
    if (!append_latin1(decoded_, from)) {
        fail("a text that stands for bytes has a character above 255");
    }
    push(kind::bytes, text().size() + begin, decoded_.size() - begin);
}

inline void ipc_pickle_walker::append(std::size_t count) {
    const auto items = top(count);
    if (count > most_ipc_tensors - list_.size()) {
        fail("a list of more than " + std::to_string(most_ipc_tensors) + " dicts");
    }
    for (const auto& item : items) {
        if (item.is != kind::dict) {
            fail("the list has to hold a dict for each tensor");
        }
        list_.push_back(item.payload);
    }
    drop(count);
    if (top(1)[0].is != kind::list) {
        fail("it adds to something that is no list");
    }
}

inline void ipc_pickle_walker::set_items(std::size_t count) {
    const auto target = top(count + 1)[0];
    if (target.is != kind::dict) {
        fail("it adds to something that is no dict");
    }
    auto& into = dicts_[static_cast<std::size_t>(target.payload)];
    if (count % 2 != 0 || into.size() + count / 2 > most_ipc_gpus) {
        fail(count % 2 != 0 ? "a dict's key has no value"
                            : "a dict of more than " + std::to_string(most_ipc_gpus) + " GPUs");
    }
    const auto items = top(count);
    for (std::size_t i = 0; i < count; i += 2) {
        const auto& key = items[i];
        const auto& held = items[i + 1];
        if (key.is != kind::text || key.extent == 0 || key.extent > longest_ipc_text ||
            (held.is != kind::tensor && held.is != kind::pair)) {
            fail("a dict has to lead from GPUs' UUIDs to the arguments of rebuild_cuda_tensor");
        }
        const auto gpu = view(key);
        if (std::any_of(into.begin(), into.end(),
                        [&](const auto& known) { return known.first == gpu; })) {
            fail("a dict has a GPU twice");
        }
        into.emplace_back(gpu, held.payload);
    }
    drop(count);
}

inline void ipc_pickle_walker::add_tensor(std::span<const value> items) {
    if (tensors_.size() == most_ipc_tensors) {
        fail("more than " + std::to_string(most_ipc_tensors) + " tensors");
    }
    const auto names = [&](std::size_t i, global expected) {
        return items[i].is == kind::name && static_cast<global>(items[i].payload) == expected;
    };
    require_item(names(0, global::tensor_class), 0, "torch.Tensor");
    require_item(items[1].is == kind::integers, 1, "a size");
    require_item(items[2].is == kind::integers && items[2].extent == items[1].extent, 2,
                 "as many strides as the size has numbers");
    require_item(names(4, global::storage_class), 4, "torch.storage.TypedStorage");
    require_item(items[5].is == kind::type, 5, "a dtype of torch");
    require_item(items[6].is == kind::integer &&
                     std::in_range<int>(static_cast<std::int64_t>(items[6].payload)),
                 6, "a device's number");
    require_item(items[10].is == kind::boolean, 10, "a bool");
    ipc_tensor tensor;
    const auto numbers = [&](const value& of) {
        return std::span<const std::int64_t>{integers_}.subspan(
            static_cast<std::size_t>(of.payload), of.extent);
    };
    const auto extents = numbers(items[1]);
    require_item(std::all_of(extents.begin(), extents.end(), [](auto e) { return e >= 0; }), 1,
                 "a size without a negative number");
    tensor.extents = shape{extents};
    const auto strides = numbers(items[2]);
    std::copy(strides.begin(), strides.end(), tensor.strides.begin());
    tensor.element_offset = natural(items, 3);
    tensor.type = static_cast<dtype>(items[5].payload);
    tensor.device = static_cast<int>(static_cast<std::int64_t>(items[6].payload));
    read_storage(items, tensor);
    if (const auto fault = fault_of(tensor); !fault.empty()) {
        fail("a tensor's 15 arguments contradict each other: " + std::string{fault});
    }
    tensors_.push_back(std::move(tensor));
}

/// Items 7 to 14.
inline void ipc_pickle_walker::read_storage(std::span<const value> items,
                                            ipc_tensor& tensor) const {
    const auto handle = optional_bytes(items, 7, "a handle's bytes or None");
    const auto bytes = natural(items, 8);
    tensor.storage_offset = natural(items, 9);
    if (items[7].is == kind::bytes && bytes != 0) {
        tensor.handle = bare_handle(handle);
        tensor.storage_bytes = bytes;
    }
    tensor.ref_counter = optional_bytes(items, 11, "a counter's name as bytes, or None");
    require_item(tensor.ref_counter.size() <= longest_ipc_text, 11, "a name of at most 1024 bytes");
    tensor.ref_slot = natural(items, 12);
    require_item(items[14].is == kind::boolean || items[14].is == kind::none, 14, "a bool or None");
    tensor.event_sync = items[14].is == kind::boolean && items[14].payload != 0;
    const auto event = optional_bytes(items, 13, "an event's bytes or None");
    require_item(event.size() == tensor.event.size() || (event.empty() && !tensor.event_sync), 13,
                 "the 64 bytes of an event");
    if (!event.empty()) {
        std::memcpy(tensor.event.data(), event.data(), event.size());
    }
}

inline std::string_view ipc_pickle_walker::bare_handle(std::string_view said) const {
    if (said.size() == ipc_handle_bytes) {
        return said;
    }
    // Torch's own form: a version, a type, then what the type needs. The version counts changes to
    // any type, and that of plain allocations has been these 64 bytes in all: type and length tell
    // more than a number, and a trainer with a newer torch is not locked out by a change elsewhere.
    constexpr std::size_t prefix = 2;
    const char type = said.size() >= prefix ? said[1] : '\0';
    if (type == 'e') {
        throw unsupported_error{
            "the trainer's weights are in expandable segments of torch's allocator, which another "
            "process cannot open (" +
                place() +
                "); take expandable_segments out of the trainer's PYTORCH_CUDA_ALLOC_CONF (or "
                "PYTORCH_ALLOC_CONF), or copy the weights into memory allocated without it",
            {.phase = phase::update, .backend = "ipc"}};
    }
    require_item(type == 'c' && said.size() == prefix + ipc_handle_bytes, 7,
                 "64 bytes, or 66 of which the second is 'c'");
    return said.substr(prefix);
}

inline ipc_handles ipc_pickle_walker::result(const value& root) const {
    const std::array<std::uint64_t, 1> only{root.payload};
    ipc_handles handles{.packed = root.is == kind::dict};
    const auto dicts = handles.packed ? std::span<const std::uint64_t>{only} : std::span{list_};
    std::size_t total = 0;
    std::size_t bytes = 0;
    handles.entries.reserve(dicts.size());
    for (const auto each : dicts) {
        const auto& from = dicts_[static_cast<std::size_t>(each)];
        total += from.size();  // a dict may be in the list many times
        if (total > most_ipc_tensors || bytes >> 20U >= most_ipc_megabytes) {
            throw_fault("have more than " + std::to_string(most_ipc_tensors) + " tensors, or " +
                        std::to_string(most_ipc_megabytes) + " MiB");
        }
        auto& entry = handles.entries.emplace_back();
        entry.reserve(from.size());
        for (const auto& [gpu, index] : from) {
            const auto& tensor = tensors_[static_cast<std::size_t>(index)];
            bytes += sizeof tensor + gpu.size() + tensor.handle.size() + tensor.ref_counter.size();
            entry.emplace_back(gpu, tensor);
        }
    }
    return handles;
}

}  // namespace weightwire::wire::detail
