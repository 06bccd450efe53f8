// SPDX-License-Identifier: Apache-2.0

// What strangers say to the store's port: a request is read alike whatever segments it comes in,
// and the table that carries it out neither breaks its limits nor forgets who waits.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/rendezvous/store_request.hpp>
#include <weightwire/rendezvous/store_table.hpp>

namespace {

using namespace weightwire::rendezvous;
using state = store_request_parser::state;

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "store_fuzz: %s\n", what);
        std::abort();
    }
}

constexpr store_limits limits{.max_key_bytes = 64,
                              .max_value_bytes = 256,
                              .max_keys = 32,
                              .max_request_bytes = 2048,
                              .max_reply_bytes = 1024};
constexpr std::size_t most_bytes = 4096;

/// Hands `bytes` to a parser in segments of `step`; returns what the whole is.
state in_segments(store_request_parser& parser, std::string_view bytes, std::size_t step) {
    for (std::size_t size = step;; size += step) {
        const auto seen = parser.advance(bytes.substr(0, std::min(size, bytes.size())));
        if (seen != state::incomplete || size >= bytes.size()) {
            return seen;
        }
    }
}

void require_equal(const store_request_parser& a, const store_request_parser& b,
                   std::string_view bytes) {
    require(a.query() == b.query() && a.size() == b.size() && a.number() == b.number() &&
                a.count() == b.count(),
            "segments change what a request says");
    require(a.size() <= bytes.size(), "a request ends after its bytes");
    for (std::size_t i = 0; i < a.count(); ++i) {
        require(a.text(bytes, i) == b.text(bytes, i), "segments change a text");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    // Two connections take turns, so that waits of one are ended by the other. The first byte of
    // the input says in what segments the second reading is done.
    std::string_view bytes{reinterpret_cast<const char*>(data), size};
    if (bytes.empty()) {
        return 0;
    }
    const auto step = static_cast<std::size_t>(static_cast<unsigned char>(bytes.front())) % 7 + 1;
    bytes.remove_prefix(1);
    store_table table{limits, most_bytes};
    for (std::uint64_t turn = 0; !bytes.empty(); ++turn) {
        store_request_parser whole{limits};
        store_request_parser parts{limits};
        const auto seen = whole.advance(bytes);
        require(in_segments(parts, bytes, step) == seen, "segments change what a request is");
        if (seen != state::complete) {
            require(seen == state::incomplete || whole.reason() == parts.reason(),
                    "segments change why a request is refused");
            return 0;
        }
        require_equal(whole, parts, bytes);
        std::string reply;
        std::vector<std::uint64_t> woken;
        const auto why = table.apply(turn % 2, whole, bytes, reply, woken);
        require(table.bytes() <= most_bytes, "the store holds more than it may");
        require(reply.size() <= limits.max_reply_bytes + 9 * limits.max_keys + 8,
                "a reply is longer than it may be");
        if (why) {
            table.forget(turn % 2);
        }
        bytes.remove_prefix(whole.size());
    }
    return 0;
}
