// SPDX-License-Identifier: Apache-2.0

// Every message of the native wire, from any peer: read or refused with a protocol_error, and what
// is read says the same once it is written and read again.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include <weightwire/wire/native.hpp>

namespace {

namespace wire = weightwire::wire;

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "native_fuzz: %s\n", what);
        std::abort();
    }
}

/// Reads `body`, writes it, reads and writes that: the two texts must be equal.
template <class Decode, class Encode>
void round_trip(std::string_view body, Decode decode, Encode encode) {
    std::string first;
    try {
        const auto message = decode(body);
        if (!message) {
            return;
        }
        first = encode(*message);
    } catch (const weightwire::protocol_error&) {
        return;
    }
    // From here on the text is our own: an error is a defect and ends the run.
    const auto again = decode(std::string_view{first});
    require(again.has_value(), "a message of ours is not read");
    require(encode(*again) == first, "a message changes when it is written and read");
}

template <class Message>
std::string plain_encode(const Message& message) {
    const auto bytes = wire::encode(message);
    return {bytes.data(), bytes.size()};
}

/// A decoder that always gives a message, as one that may give none.
template <auto Decode>
auto always(std::string_view body) {
    return std::optional{Decode(body)};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view body{reinterpret_cast<const char*>(data), size};
    std::string version;
    round_trip(
        body, [&](std::string_view text) { return wire::decode_version_reply(text, version); },
        [&](const wire::native_offer& offer) {
            return wire::encode_version_reply(version, offer);
        });
    round_trip(body, wire::decode_init, plain_encode<wire::native_init>);
    round_trip(body, wire::decode_start, plain_encode<wire::native_start>);
    round_trip(body, wire::decode_finish, plain_encode<wire::native_finish>);
    round_trip(body, always<wire::decode_update>, plain_encode<wire::native_update>);
    round_trip(body, always<wire::decode_init_reply>, plain_encode<wire::native_init_reply>);
    round_trip(body, always<wire::decode_start_reply>, plain_encode<wire::native_start_reply>);
    round_trip(body, always<wire::decode_update_reply>, plain_encode<wire::native_update_reply>);
    round_trip(body, always<wire::decode_finish_reply>, plain_encode<wire::native_finish_reply>);
    return 0;
}
