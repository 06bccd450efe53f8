// SPDX-License-Identifier: Apache-2.0
// ipc_pickle_tool read FILE                          prints the handles of a pickle as JSON
// ipc_pickle_tool write FILE list|pairs|packed|none  writes the pickle of made-up handles, and
// prints
//                                                    them as JSON
// Bytes are hexadecimal. An error of ours is exit status 1 with its text.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/wire/ipc_pickle.hpp>
#include <weightwire/wire/json_writer.hpp>

namespace {

using namespace weightwire;

std::string hex(std::span<const std::byte> bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string out;
    for (const auto byte : bytes) {
        out += digits[std::to_integer<unsigned>(byte) >> 4U];
        out += digits[std::to_integer<unsigned>(byte) & 0xFU];
    }
    return out;
}

template <class Range>
void write_numbers(wire::json_writer& out, const Range& numbers, std::size_t count) {
    out.begin_array();
    for (std::size_t i = 0; i < count; ++i) {
        out.integer(numbers[i]);
    }
    out.end_array();
}

void write_tensor(wire::json_writer& out, const wire::ipc_tensor& tensor) {
    out.begin_object().key("size");
    write_numbers(out, tensor.extents, tensor.extents.size());
    out.key("stride");
    write_numbers(out, tensor.strides, tensor.extents.size());
    out.key("offset").integer(tensor.element_offset);
    out.key("dtype").string(to_string(tensor.type)).key("device").integer(tensor.device);
    out.key("handle").string(hex(std::as_bytes(std::span{tensor.handle})));
    out.key("storage_bytes").integer(tensor.storage_bytes);
    out.key("storage_offset").integer(tensor.storage_offset);
    out.key("ref_counter").string(hex(std::as_bytes(std::span{tensor.ref_counter})));
    out.key("ref_slot").integer(tensor.ref_slot).key("event").string(hex(tensor.event));
    out.key("event_sync").boolean(tensor.event_sync).end_object();
}

void print(const wire::ipc_handles& handles) {
    std::string text;
    wire::json_writer out{text};
    out.begin_object().key("packed").boolean(handles.packed).key("entries").begin_array();
    for (const auto& entry : handles.entries) {
        out.begin_array();
        for (const auto& [gpu, tensor] : entry) {
            out.begin_array().string(gpu);
            write_tensor(out, tensor);
            out.end_array();
        }
        out.end_array();
    }
    out.end_array().end_object();
    std::printf("%s\n", text.c_str());
}

/// A tensor on the GPU `gpu` whose every number depends on `seed`.
wire::ipc_tensor made_up(std::size_t seed, dtype type, const shape& extents) {
    wire::ipc_tensor tensor{.extents = extents,
                            .strides = contiguous_strides(extents),
                            .element_offset = seed * 1000,
                            .type = type,
                            .device = static_cast<int>(seed % 8),
                            .storage_offset = seed * 511,
                            .ref_counter = "/counter_" + std::to_string(seed % 3),
                            .ref_slot = seed * 77,
                            .event_sync = seed % 2 == 1};
    if (extents.checked_numel() == 0) {
        tensor.event_sync = false;
        return tensor;
    }
    tensor.storage_bytes = (std::uint64_t{1} << (20 + seed % 20)) + (std::uint64_t{1} << 30U);
    for (std::size_t i = 0; i < wire::ipc_handle_bytes; ++i) {
        tensor.handle += static_cast<char>(seed / 4 * 31 + i * 7);
        tensor.event[i] = static_cast<std::byte>(seed * 13 + i);
    }
    return tensor;
}

wire::ipc_handles made_up_handles(std::string_view kind) {
    if (kind == "none") {
        return {};
    }
    const std::string gpus[] = {"483a70e0-d92f-0d9a-9ea7-7078be2a51b9",
                                "00000000-0000-0000-0000-00000000000f"};
    wire::ipc_handles handles{.packed = kind == "packed"};
    if (handles.packed) {
        handles.entries.push_back({{gpus[0], made_up(1, dtype::u8, {1 << 28U})},
                                   {gpus[1], made_up(2, dtype::u8, {1 << 28U})}});
        return handles;
    }
    std::size_t seed = 0;
    for (const auto& row : dtype_table) {
        if (row.torch.empty()) {
            continue;
        }
        for (const auto& extents : {shape{300, 70000}, shape{}, shape{0, 5}, shape{1, 2, 3, 4}}) {
            auto& entry = handles.entries.emplace_back();
            for (std::size_t i = 0; i < 1 + seed % 2; ++i) {
                entry.emplace_back(gpus[i], made_up(seed, row.value, extents));
            }
            ++seed;
        }
    }
    return handles;
}

}  // namespace

int main(int count, char** arguments) {
    const std::string_view verb = count > 2 ? arguments[1] : "";
    try {
        if (verb == "read" && count == 3) {
            std::ifstream file{arguments[2], std::ios::binary};
            const std::string text{std::istreambuf_iterator<char>{file}, {}};
            print(wire::ipc_handles_from_pickle(text));
        } else if (verb == "write" && count == 4) {
            const std::string_view kind = arguments[3];
            const auto handles = made_up_handles(kind);
            std::ofstream file{arguments[2], std::ios::binary};
            file << wire::pickle_of(handles, kind == "pairs"
                                                 ? wire::ipc_pickle_form::callable_and_args
                                                 : wire::ipc_pickle_form::args);
            print(handles);
        } else {
            std::fprintf(stderr,
                         "usage: ipc_pickle_tool read FILE | write FILE list|pairs|packed|none\n");
            return 2;
        }
    } catch (const std::exception& problem) {
        std::fprintf(stderr, "%s\n", problem.what());
        return 1;
    }
    return 0;
}
