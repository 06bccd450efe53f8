// SPDX-License-Identifier: Apache-2.0

// Pickled IPC handles as any peer might send them: a protocol_error or unsupported_error, or
// handles without fault whose own pickle is read as the same handles again, and of which there are
// no more than the text has room for.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/ipc_pickle.hpp>

namespace {

using namespace weightwire;

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "ipc_pickle_fuzz: %s\n", what);
        std::abort();
    }
}

/// Whether `pickle_of` can say them: it writes short texts only.
bool is_writable(const wire::ipc_handles& handles) {
    for (const auto& entry : handles.entries) {
        for (const auto& [gpu, tensor] : entry) {
            if (gpu.size() > 255 || tensor.ref_counter.size() > 255 || tensor.device < 0) {
                return false;
            }
        }
    }
    return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text{reinterpret_cast<const char*>(data), size};
    try {
        const auto handles = wire::ipc_handles_from_pickle(text);
        require(!handles.packed || handles.entries.size() == 1, "packed is not one entry");
        require(handles.entries.size() <= size, "more entries than bytes");
        for (const auto& entry : handles.entries) {
            for (const auto& [gpu, tensor] : entry) {
                require(wire::fault_of(tensor).empty(), "a tensor with a fault");
            }
        }
        if (is_writable(handles)) {
            const auto form = handles.packed || size % 2 == 0
                                  ? wire::ipc_pickle_form::args
                                  : wire::ipc_pickle_form::callable_and_args;
            require(wire::ipc_handles_from_pickle(wire::pickle_of(handles, form)) == handles,
                    "our pickle says something else");
        }
    } catch (const protocol_error& cause) {
        require(cause.context().phase == phase::update, "a refusal without its phase");
    } catch (const unsupported_error& cause) {
        require(text.find('e') != text.npos && cause.context().phase == phase::update,
                "unsupported without its type");
    }
    return 0;
}
