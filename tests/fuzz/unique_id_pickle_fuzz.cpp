// SPDX-License-Identifier: Apache-2.0

// The pickled NCCL id as a store might give it: a protocol_error, or an id whose own pickle and
// base64 are read as the same id again, and whose bytes stand in the text or in its Latin-1 form.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/unique_id.hpp>

namespace {

using namespace weightwire;

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "unique_id_pickle_fuzz: %s\n", what);
        std::abort();
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text{reinterpret_cast<const char*>(data), size};
    try {
        const auto id = wire::unique_id_from_pickle(text);
        require(wire::unique_id_from_pickle(wire::pickle_of(id)) == id, "our pickle is another id");
        require(wire::unique_id_from_base64(wire::base64_of(id)) == id, "its base64 is another id");
        const std::string_view bytes{reinterpret_cast<const char*>(id.data()), id.size()};
        require(text.find(bytes) != text.npos || text.find("latin1") != text.npos,
                "bytes from nowhere");
    } catch (const protocol_error& cause) {
        require(cause.context().phase == phase::init, "a refusal without its phase");
    }
    return 0;
}
