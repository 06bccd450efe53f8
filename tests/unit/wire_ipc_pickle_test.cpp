// SPDX-License-Identifier: Apache-2.0

// The pickled handles of vLLM's `ipc` backend: against files that CPython wrote, and against
// everything else that a body might hold. tests/interop/ipc_pickle_interop.py has Python itself.

#include <array>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/ipc_pickle.hpp>

namespace {

using namespace weightwire;
using namespace std::string_view_literals;
using wire::ipc_handles;
using wire::ipc_pickle_form;
using wire::ipc_tensor;

constexpr std::string_view gpu_a = "483a70e0-d92f-0d9a-9ea7-7078be2a51b9";
constexpr std::string_view gpu_b = "00000000-0000-0000-0000-00000000000f";

/// A file that `ipc_pickle_interop.py --examples` wrote.
std::string python_example(const std::string& name) {
    const auto path = std::string{WEIGHTWIRE_TESTS_DIRECTORY} + "/fuzz/corpus/ipc_pickle/" + name;
    std::ifstream file{path, std::ios::binary};
    REQUIRE_MESSAGE(file.good(), "example is missing: " << name);
    return {std::istreambuf_iterator<char>{file}, std::istreambuf_iterator<char>{}};
}

/// The same bytes as in that script.
std::string python_bytes(std::size_t seed, std::size_t count) {
    std::string out;
    for (std::size_t i = 0; i < count; ++i) {
        out += static_cast<char>(seed * 31 + i * 7);
    }
    return out;
}

/// The same tensor as in that script.
ipc_tensor python_tensor(std::size_t seed, dtype type, const shape& extents) {
    ipc_tensor tensor{.extents = extents,
                      .strides = contiguous_strides(extents),
                      .element_offset = seed * 3,
                      .type = type,
                      .device = static_cast<int>(seed % 8),
                      .handle = python_bytes(seed, 64),
                      .storage_bytes = std::uint64_t{1} << (22 + seed % 20),
                      .storage_offset = seed * 512,
                      .ref_counter = "/torch_" + std::to_string(4000 + seed) + "_" +
                                     std::to_string(seed * 7919) + "_" + std::to_string(seed),
                      .ref_slot = seed % 10000,
                      .event_sync = seed % 2 == 1};
    const auto event = python_bytes(seed + 1, 64);
    for (std::size_t i = 0; i < event.size(); ++i) {
        tensor.event[i] = static_cast<std::byte>(event[i]);
    }
    return tensor;
}

/// A tensor as an exporter of ours says it: a handle, no counter, no event.
ipc_tensor exported(const shape& extents, dtype type = dtype::bf16) {
    ipc_tensor tensor{.extents = extents,
                      .strides = contiguous_strides(extents),
                      .type = type,
                      .ref_counter = "/none"};
    if (extents.checked_numel() != 0) {
        tensor.handle = python_bytes(9, 64);
        tensor.storage_bytes = std::uint64_t{1} << 33U;
    }
    return tensor;
}

ipc_handles one(const ipc_tensor& tensor) { return {.entries = {{{std::string{gpu_a}, tensor}}}}; }

template <class Error = protocol_error>
std::string refused_pickle(std::string_view pickle) {
    try {
        (void)wire::ipc_handles_from_pickle(pickle);
    } catch (const Error& cause) {
        CHECK(cause.context().phase == phase::update);
        CHECK(cause.context().backend == "ipc");
        return cause.what();
    }
    FAIL("nothing was refused");
    return {};
}

bool holds(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

std::string with(std::string text, std::string_view what, std::string_view by) {
    const auto at = text.find(what);
    REQUIRE(at != text.npos);
    return text.replace(at, what.size(), by);
}

/// Argument tuples put together by hand, item by item.
std::vector<std::string> argument_opcodes() {
    return {"\x8c\x05torch\x8c\x06Tensor\x93",
            "(K\x02K\x03t",
            "(K\x03K\x01t",
            std::string{"K\0"sv},
            "\x8c\x0dtorch.storage\x8c\x0cTypedStorage\x93",
            "\x8c\x05torch\x8c\x08"
            "bfloat16\x93",
            std::string{"K\0"sv},
            "C\x40" + python_bytes(9, 64),
            "K\x0c",
            std::string{"K\0"sv},
            "\x89",
            "C\x05/none",
            std::string{"K\0"sv},
            "C\x40" + std::string(64, '\0'),
            "\x89"};
}

std::string pickle_with(const std::vector<std::string>& items) {
    std::string out{"\x80\x04]}\x8c\x24"};
    out += gpu_a;
    out += '(';
    for (const auto& item : items) {
        out += item;
    }
    return out + "tsa.";
}

std::string pickle_with(std::size_t place, std::string_view opcodes) {
    auto items = argument_opcodes();
    items[place] = opcodes;
    return pickle_with(items);
}

}  // namespace

TEST_CASE("ipc pickle: what CPython wrote is read, protocols 2 to 5") {
    const ipc_handles expected{
        .entries = {{{std::string{gpu_a}, python_tensor(0, dtype::bf16, {4, 3})},
                     {std::string{gpu_b}, python_tensor(1, dtype::bf16, {4, 3})}},
                    {{std::string{gpu_a}, python_tensor(2, dtype::f32, {})}}}};
    for (const auto* protocol : {"2", "3", "4", "5"}) {
        CAPTURE(protocol);
        CHECK(wire::ipc_handles_from_pickle(python_example("python_" + std::string{protocol})) ==
              expected);
    }
}

TEST_CASE("ipc pickle: pairs with the function and a packed buffer are read") {
    CHECK(wire::ipc_handles_from_pickle(python_example("python_pairs")) ==
          one(python_tensor(3, dtype::f8_e4m3fn, {9})));
    const ipc_handles packed{
        .packed = true,
        .entries = {{{std::string{gpu_a}, python_tensor(0, dtype::u8, {1 << 20})}}}};
    CHECK(wire::ipc_handles_from_pickle(python_example("python_packed")) == packed);
}

TEST_CASE("ipc pickle: one tensor is the template, with what recurs remembered") {
    auto tensor = exported({2, 3});
    tensor.storage_bytes = 12;
    auto expected = argument_opcodes();
    for (const std::size_t remembered : {0U, 4U, 5U, 7U, 11U, 13U}) {
        expected[remembered] += '\x94';
    }
    const auto text = with(pickle_with(expected), gpu_a, std::string{gpu_a} + '\x94');
    CHECK(wire::pickle_of(one(tensor), ipc_pickle_form::args) == text);
    CHECK(wire::ipc_handles_from_pickle(text) == one(tensor));
    CHECK(wire::ipc_handles_from_pickle(pickle_with(argument_opcodes())) == one(tensor));
    CHECK(wire::pickle_of({}, ipc_pickle_form::args) == "\x80\x04].");
    CHECK(wire::ipc_handles_from_pickle("\x80\x04].") == ipc_handles{});
}

TEST_CASE("ipc pickle: what we write we read again, in both forms") {
    ipc_handles handles;
    for (std::size_t seed = 0; seed < 700; ++seed) {  // the memo's numbers outgrow a byte
        const auto& row = dtype_table[seed % dtype_table.size()];
        if (row.torch.empty()) {
            continue;
        }
        const std::vector<shape> shapes{{}, {7}, {0, 3}, {70000, 300}, {1, 2, 3, 4, 5, 6, 7, 8}};
        auto tensor = python_tensor(seed, row.value, shapes[seed % shapes.size()]);
        tensor.storage_bytes = std::uint64_t{1} << (33 + seed % 30);
        if (tensor.extents.checked_numel() == 0) {
            tensor.handle.clear();
            tensor.storage_bytes = 0;
        }
        auto& entry = handles.entries.emplace_back();
        entry.emplace_back(gpu_a, tensor);
        if (seed % 3 == 0) {
            entry.emplace_back(gpu_b, python_tensor(seed + 1, dtype::f16, {5}));
        }
    }
    for (const auto form : {ipc_pickle_form::args, ipc_pickle_form::callable_and_args}) {
        CHECK(wire::ipc_handles_from_pickle(wire::pickle_of(handles, form)) == handles);
    }
    auto buffer = exported({1 << 30}, dtype::u8);
    const ipc_handles packed{.packed = true,
                             .entries = {{{std::string{gpu_a}, buffer}, {"gpu", buffer}}}};
    CHECK(wire::ipc_handles_from_pickle(wire::pickle_of(packed, ipc_pickle_form::args)) == packed);
}

TEST_CASE("ipc pickle: tensors of one allocation take some 60 bytes each") {
    ipc_handles handles;
    for (std::size_t i = 0; i < 1000; ++i) {
        auto tensor = exported({768, 2048});
        tensor.storage_offset = i * 3145728;
        handles.entries.push_back({{std::string{gpu_a}, tensor}});
    }
    CHECK(wire::pickle_of(handles, ipc_pickle_form::args).size() < 64'000);
}

TEST_CASE("ipc pickle: what cannot be said is an error of the caller") {
    const auto refused = [](const ipc_handles& handles,
                            ipc_pickle_form form = ipc_pickle_form::args) -> std::string {
        try {
            (void)wire::pickle_of(handles, form);
        } catch (const usage_error& cause) {
            return cause.what();
        }
        return {};
    };
    const auto tensor = exported({4});
    CHECK(holds(refused({.packed = true}), "exactly one entry"));
    CHECK(holds(refused({.packed = true, .entries = one(tensor).entries},
                        ipc_pickle_form::callable_and_args),
                "know nothing of packing"));
    CHECK(holds(refused({.entries = {{{"", tensor}}}}), "UUID"));
    CHECK(holds(refused({.entries = {{{std::string(256, 'x'), tensor}}}}), "UUID"));
    auto wrong = tensor;
    wrong.ref_counter = std::string(256, 'x');
    CHECK(holds(refused(one(wrong)), "255 bytes"));
    wrong = tensor;
    wrong.handle.pop_back();
    CHECK(holds(refused(one(wrong)), "64 bytes"));
    wrong = tensor;
    wrong.ref_slot = std::uint64_t{1} << 63U;
    CHECK(holds(refused(one(wrong)), "above 2^63"));
    CHECK_THROWS_AS(
        (void)wire::pickle_of(one(exported({0}, dtype::f6_e2m3)), ipc_pickle_form::args),
        usage_error);
}

TEST_CASE("ipc tensor: it lies in its storage, or its fault is told") {
    auto tensor = exported({4, 6});
    tensor.storage_bytes = 48;
    CHECK(wire::fault_of(tensor).empty());
    tensor.element_offset = 1;
    CHECK(wire::fault_of(tensor) == "it reaches beyond its storage");
    tensor.storage_bytes = 50;
    CHECK(wire::fault_of(tensor).empty());
    tensor.storage_offset = 1024;
    CHECK(wire::ipc_offset_of(tensor) == 1026);
    tensor.strides = {1, 4};  // a transposed view takes as much
    CHECK(wire::fault_of(tensor).empty());
    tensor.strides = {6, 2};
    CHECK(wire::fault_of(tensor) == "it reaches beyond its storage");
    tensor.strides = {6, -1};
    CHECK(wire::fault_of(tensor) == "a stride is negative");
    constexpr auto greatest = std::numeric_limits<std::int64_t>::max();
    for (const auto& strides : {std::array<std::int64_t, max_dimensions>{greatest, 1},
                                std::array<std::int64_t, max_dimensions>{1, greatest}}) {
        tensor.strides = strides;
        CHECK(wire::fault_of(tensor) == "it reaches beyond its storage");
    }
    tensor = exported({4});
    tensor.element_offset = ~std::uint64_t{0};
    CHECK(wire::fault_of(tensor) == "it reaches beyond its storage");
    tensor = exported({4});
    tensor.storage_offset = ~std::uint64_t{0};
    CHECK(holds(wire::fault_of(tensor), "overflow"));
    tensor = exported({4});
    tensor.handle.clear();
    CHECK(holds(wire::fault_of(tensor), "only there"));
    tensor.storage_bytes = 0;
    CHECK(holds(wire::fault_of(tensor), "beyond"));
    tensor = exported({greatest, 0, 3});  // nothing in it, wherever it is
    CHECK(wire::fault_of(tensor).empty());
}

TEST_CASE("ipc tensor: a GPU without an export is named with those that have one") {
    const auto tensor = exported({4});
    const wire::ipc_entry entry{{std::string{gpu_a}, tensor}, {"x", exported({5})}};
    CHECK(wire::ipc_tensor_for(entry, gpu_a) == tensor);
    CHECK(wire::ipc_tensor_for(entry, "x").extents == shape{5});
    try {
        (void)wire::ipc_tensor_for(entry, gpu_b);
        FAIL("a GPU was made up");
    } catch (const protocol_error& cause) {
        CHECK(holds(cause.text(), "IPC handle not found for GPU UUID " + std::string{gpu_b}));
        CHECK(holds(cause.text(), "[" + std::string{gpu_a} + ", x]"));
    }
}

TEST_CASE("ipc pickle: handles have 64 bytes, or torch's prefix of a plain allocation") {
    const auto handle = python_bytes(9, 64);
    const auto bytes = [](const std::string& value) {
        return "C" + std::string{static_cast<char>(value.size())} + value;
    };
    const auto read = [&](const std::string& said) {
        return wire::ipc_handles_from_pickle(pickle_with(7, bytes(said))).entries[0][0].second;
    };
    CHECK(read(handle).handle == handle);
    CHECK(read("\x01"
               "c" +
               handle)
              .handle == handle);
    CHECK(read("\x63"
               "c" +
               handle)
              .handle == handle);  // a release to come
    auto starts_like_a_prefix = handle;
    starts_like_a_prefix[1] = 'e';
    CHECK(read(starts_like_a_prefix).handle == starts_like_a_prefix);
    for (const auto& said : {std::string{}, handle.substr(1), handle + "x", "\x02x" + handle,
                             "\x02"
                             "c" +
                                 handle.substr(1)}) {
        CHECK(holds(refused_pickle(pickle_with(7, bytes(said))), "item 7"));
    }
    const auto text = refused_pickle<unsupported_error>(python_example("expandable"));
    CHECK(holds(text, "expandable_segments"));
    CHECK(holds(text, "PYTORCH_CUDA_ALLOC_CONF"));
}

TEST_CASE("ipc pickle: torch's empty storage has nothing to open") {
    auto items = argument_opcodes();
    items[1] = std::string{"K\0K\x03\x86"sv};
    items[7] = items[11] = items[13] = items[14] = "N";
    items[8] = std::string{"K\0"sv};
    const auto tensor = wire::ipc_handles_from_pickle(pickle_with(items)).entries[0][0].second;
    CHECK(tensor.handle.empty());
    CHECK(tensor.storage_bytes == 0);
    CHECK(tensor.extents == shape{0, 3});
    CHECK(tensor.ref_counter.empty());
    CHECK_FALSE(tensor.event_sync);
    items[7] = argument_opcodes()[7];  // the size alone says it
    CHECK(wire::ipc_handles_from_pickle(pickle_with(items)).entries[0][0].second.handle.empty());
    items[1] = argument_opcodes()[1];
    CHECK(holds(refused_pickle(pickle_with(items)), "beyond its storage"));
}

TEST_CASE("ipc pickle: every item of a tensor is checked") {
    const auto refused = [](std::size_t place, std::string_view opcodes) {
        return refused_pickle(pickle_with(place, opcodes));
    };
    CHECK(holds(refused(0, "N"), "item 0"));
    CHECK(holds(refused(0, "\x8c\x05torch\x8c\x04Size\x93"), "item 0"));
    CHECK(holds(refused(1, "K\x01"), "item 1"));
    CHECK(holds(refused(1, "(J\xff\xff\xff\xffK\x01t"), "item 1"));
    CHECK(holds(refused(1, "(K\x01K\x01K\x01K\x01K\x01K\x01K\x01K\x01K\x01t"), "9 dimensions"));
    CHECK(holds(refused(2, "K\x01\x85"), "item 2"));
    CHECK(holds(refused(2, "(J\xff\xff\xff\xffK\x01t"), "a stride is negative"));
    CHECK(holds(refused(3, "J\xff\xff\xff\xff"), "item 3"));
    CHECK(holds(refused(4, "N"), "item 4"));
    CHECK(holds(refused(5, "\x8c\x05torch\x8c\x06Tensor\x93"), "item 5"));
    CHECK(holds(refused(5, "\x8c\x05torch\x8c\x06qint32\x93"), "'torch qint32'"));
    CHECK(holds(refused(6, "\x8a\x05\1\1\1\1\1"), "item 6"));
    CHECK(holds(refused(7, "K\x01"), "item 7"));
    CHECK(holds(refused(8, "\x88"), "item 8"));
    CHECK(holds(refused(9, "N"), "item 9"));
    CHECK(holds(refused(10, "N"), "item 10"));
    CHECK(holds(refused(11, "\x8c\x01x"), "item 11"));
    CHECK(holds(refused(12, "N"), "item 12"));
    CHECK(holds(refused(13, "C\x01x"), "item 13"));
    CHECK(holds(refused(14, "K\x01"), "item 14"));
    auto items = argument_opcodes();
    items[13] = "N";
    items[14] = "\x88";
    CHECK(holds(refused_pickle(pickle_with(items)), "item 13"));
    items = argument_opcodes();
    items.pop_back();
    CHECK(holds(refused_pickle(pickle_with(items)), "a tuple of 14"));
}

TEST_CASE("ipc pickle: whatever else a pickle does is refused with its opcode and offset") {
    CHECK(holds(refused_pickle(""), "end of text at offset 0"));
    CHECK(holds(refused_pickle("\x80\x01."), "protocol 1 is none of 2 to 5"));
    CHECK(holds(refused_pickle("\x80\x06."), "protocol 6"));
    CHECK(holds(refused_pickle("]."), "opcode 0x5d at offset 0"));
    CHECK(holds(refused_pickle("\x80\x04."), "opcode 0x2e at offset 2: it takes 1 values"));
    CHECK(holds(refused_pickle("\x80\x04N."), "neither a list of dicts nor a dict"));
    CHECK(holds(refused_pickle("\x80\x04]N."), "left over"));
    CHECK(holds(refused_pickle("\x80\x04(]."), "left over"));
    CHECK(holds(refused_pickle("\x80\x04].."), "after the end"));
    CHECK(holds(refused_pickle("\x80\x04]]"), "a second list"));
    CHECK(holds(refused_pickle("\x80\x04]Na."), "a dict for each tensor"));
    CHECK(holds(refused_pickle("\x80\x04}}a."), "no list"));
    CHECK(holds(refused_pickle("\x80\x04]a."), "a dict for each tensor"));
    CHECK(holds(refused_pickle("\x80\x04}\x8c\x01xNs."), "from GPUs' UUIDs"));
    CHECK(holds(refused_pickle("\x80\x04}(\x8c\x01xu."), "no value"));
    CHECK(holds(refused_pickle("\x80\x04]NNs."), "no dict"));
    CHECK(holds(refused_pickle("\x80\x04t"), "a mark where there is none"));
    CHECK(holds(refused_pickle("\x80\x04N(\x85"), "it takes 1 values where there are 0"));
    CHECK(holds(refused_pickle("\x80\x04h\x01"), "nothing was remembered as 1"));
    CHECK(holds(refused_pickle("\x80\x04]q\x01"), "remembers as 1"));
    CHECK(holds(refused_pickle("\x80\x04r\1\1\1\1"), "it takes 1 values"));
    CHECK(holds(refused_pickle("\x80\x04\x95\xff\0\0\0\0\0\0\0."sv), "frame is longer"));
    CHECK(holds(refused_pickle("\x80\x04"
                               "B\xff\xff\xff\xff"),
                "it needs 4294967295 bytes, 0 are left"));
    CHECK(holds(refused_pickle("\x80\x04\x8a\x09"
                               "123456789"),
                "more than 64 bits"));
    CHECK(holds(refused_pickle("\x80\x04"
                               "cos"),
                "line does not end"));
    const std::string system{"\x80\x04\x8c\x02os\x8c\x06system\x93"};
    CHECK(holds(refused_pickle(system), "opcode 0x93 at offset 14: it names 'os system'"));
    CHECK(holds(refused_pickle("\x80\x02"
                               "cos\nsystem\n"),
                "nothing is called"));
    const std::string tensor_class{"\x80\x04\x8c\x05torch\x8c\x06Tensor\x93"};
    CHECK(holds(refused_pickle(tensor_class + ")R."), "calls something else"));
    CHECK(holds(refused_pickle(tensor_class + ")\x81."), "opcode 0x81"));
    for (const char opcode : {'b', 'i', 'o', 'G', 'P', 'Q', '0', '1', '2', 'I', 'l', '\x82', '\x8b',
                              '\x8d', '\x8e', '\x8f', '\x92', '\x96', '\x97'}) {
        CAPTURE(static_cast<int>(opcode));
        CHECK(holds(refused_pickle("\x80\x04" + std::string(1, opcode) + "........."),
                    "are not made of this opcode"));
    }
}

TEST_CASE("ipc pickle: a size may be called or made, and names may be lines") {
    auto items = argument_opcodes();
    const auto expected = wire::ipc_handles_from_pickle(pickle_with(items));
    items[1] = "ctorch\nSize\nK\x02K\x03\x86\x85R";
    CHECK(wire::ipc_handles_from_pickle(pickle_with(items)) == expected);
    items[1] = "ctorch\nSize\nK\x02K\x03\x86\x85\x81";
    CHECK(wire::ipc_handles_from_pickle(pickle_with(items)) == expected);
    items[0] = "ctorch.nn.parameter\nParameter\n";
    items[5] = "ctorch\nbfloat16\n";
    items[10] = "\x88";
    CHECK(wire::ipc_handles_from_pickle(pickle_with(items)) == expected);
    items[7] = std::string{"B\x40\0\0\0"sv} + python_bytes(9, 64);
    items[8] = std::string{"\x8a\x02\x0c\0"sv};
    CHECK(wire::ipc_handles_from_pickle(pickle_with(items)) == expected);
    CHECK(
        holds(refused_pickle(pickle_with(1, "ctorch\nSize\nK\x02\x85R")), "calls something else"));
}

TEST_CASE("ipc pickle: text that is cut short or changed gives other handles or a refusal") {
    for (const auto* name : {"python_2", "python_4", "python_pairs"}) {
        const auto text = python_example(name);
        for (std::size_t length = 0; length < text.size(); ++length) {
            (void)refused_pickle(std::string_view{text}.substr(0, length));
        }
        std::size_t refused = 0;
        for (std::size_t i = 0; i < text.size(); ++i) {
            auto changed = text;
            changed[i] = static_cast<char>(changed[i] ^ 0x10);
            try {
                (void)wire::ipc_handles_from_pickle(changed);
            } catch (const protocol_error&) {
                ++refused;
            }
        }
        CHECK(refused * 4 > text.size());  // what is left are handles, names, events and offsets
    }
}

TEST_CASE(
    "ipc pickle: a small text that recalls a large dict many times does not fill the memory") {
    wire::ipc_handles handles;
    auto& entry = handles.entries.emplace_back();
    for (int gpu = 0; gpu < 256; ++gpu) {
        wire::ipc_tensor tensor{.extents = {4}, .strides = {1}, .type = dtype::u8};
        tensor.handle.assign(wire::ipc_handle_bytes, 'h');
        tensor.storage_bytes = 4;
        tensor.ref_counter.assign(250, 'c');
        entry.emplace_back(std::to_string(gpu) + std::string(240, 'g'), std::move(tensor));
    }
    auto text = wire::pickle_of(handles, wire::ipc_pickle_form::args);
    REQUIRE(text.ends_with("a."));
    text.resize(text.size() - 2);
    const std::string number{"\x06\x01\0\0", 4};  // after the 262 that the writer remembers
    text += "\x94" + std::string{"a"};
    for (int times = 0; times < 2000; ++times) {
        text += "j" + number + "a";
    }
    CHECK(holds(refused_pickle(text + "."), "or 256 MiB"));
}

TEST_CASE("ipc pickle: depth, counts and length are bounded") {
    CHECK(holds(refused_pickle("\x80\x04" + std::string(5000, 'N')), "4096 values on the stack"));
    CHECK(holds(refused_pickle("\x80\x04" + std::string(100, '(')), "16 marks"));
    CHECK(holds(refused_pickle(std::string((std::size_t{96} << 20U) + 1, 'N')), "at most"));
    std::string text{"\x80\x04]"};
    for (std::size_t i = 0; i <= wire::detail::most_ipc_tensors; ++i) {
        text += "}a";
    }
    CHECK(holds(refused_pickle(text), "524288 dicts"));
    text =
        "\x80\x04]}\x94"
        "a";
    for (std::size_t i = 0; i <= wire::detail::most_ipc_tensors; ++i) {
        text += std::string{"h\0a"sv};
    }
    CHECK(holds(refused_pickle(text), "a list of more than 524288"));
    text = "\x80\x04]" + std::string(std::size_t{9} << 20U, '\x94');
    CHECK(holds(refused_pickle(text), "of at most 8388608"));
    // One GPU more than a dict may have; and a dict of many, listed many times.
    auto arguments = pickle_with(argument_opcodes());
    arguments = arguments.substr(5 + gpu_a.size() + 1);
    arguments = arguments.substr(0, arguments.size() - 3) + "\x94";  // `(…t`, remembered
    const auto dict_of = [&](std::size_t gpus) {
        std::string out{"}"};
        for (std::size_t i = 0; i < gpus; ++i) {
            const auto name = std::to_string(i);
            out += "\x8c" + std::string(1, static_cast<char>(name.size())) + name;
            out += i == 0 ? arguments : std::string{"h\0"sv};
            out += 's';
        }
        return out;
    };
    CHECK(wire::ipc_handles_from_pickle("\x80\x04" + dict_of(256) + ".").entries[0].size() == 256);
    CHECK(holds(refused_pickle("\x80\x04" + dict_of(257) + "."), "more than 256 GPUs"));
    text = "\x80\x04]" + dict_of(256) + "\x94" + "a";
    for (std::size_t i = 0; i < 2048; ++i) {
        text +=
            "h\x01"
            "a";
    }
    CHECK(holds(refused_pickle(text + "."), "more than 524288 tensors"));
    CHECK(holds(refused_pickle("\x80\x04}\x8c\x01x" + arguments + "s\x8c\x01xh" +
                               std::string(1, '\0') + "s."),
                "a GPU twice"));
}
