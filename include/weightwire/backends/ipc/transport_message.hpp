#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/shared_memory.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>

/// @file
/// `transport_init::native` of `ipc`: the handles that a worker opens, and where in them the
/// tensors are that it reads in place. docs/wire.md has the form.

namespace weightwire::ipc {

/// Where a tensor lies that is read in place.
struct place {
    /// Value of `segment` for a tensor that passes through the ring.
    static constexpr std::uint32_t staged = std::numeric_limits<std::uint32_t>::max();

    std::uint32_t segment = staged;  ///< index in `transport_message::segments`
    std::uint64_t offset = 0;        ///< bytes from that handle's begin
    friend bool operator==(const place&, const place&) = default;
};

/// What a worker needs to know of the trainer's memory.
struct transport_message {
    std::string boot_id{};                ///< of the machine, empty when unknown
    std::uint64_t nonce = 0;              ///< also in the control block: the right one was opened
    shm::handle control{};                ///< the control block
    std::optional<shm::handle> ring{};    ///< absent when every tensor is read in place
    std::vector<shm::handle> segments{};  ///< memory files of the source
    /// One a parameter, or none at all when everything passes through the ring.
    std::vector<place> places{};
};

/// Most segments that a source may spread over; each is a mapping in every worker.
inline constexpr std::size_t most_segments = 4096;

namespace detail {

inline void write(wire::json_writer& out, const shm::handle& value) {
    out.begin_object().key("pid").integer(value.pid).key("fd").integer(value.fd);
    out.key("start_time").integer(value.start_time);
    out.key("offset").integer(value.offset).key("length").integer(value.length).end_object();
}

/// Only whether it is a handle; whether it tells the truth `shm::mapping::open` finds out.
[[nodiscard]] inline shm::handle read_handle(const wire::json_value& value) {
    value.allow_only({"pid", "fd", "start_time", "offset", "length"});
    return {.pid = value.at("pid").integer(1, std::numeric_limits<std::int32_t>::max()),
            .fd = value.at("fd").integer(0, std::numeric_limits<std::int32_t>::max()),
            .start_time = value.at("start_time").natural(),
            .offset = value.at("offset").natural(),
            .length = value.at("length").natural()};
}

/// `[segment, offset]`, or null for a tensor that passes through the ring.
[[nodiscard]] inline place read_place(const wire::json_value& value, std::size_t segments) {
    if (value.is_null()) {
        return {};
    }
    if (value.count() != 2) {
        value.fail("expected null or [segment, offset]");
    }
    auto at = value.items().begin();
    place result;
    const auto segment = (*at).natural();
    if (segment >= segments) {
        value.fail("there are " + std::to_string(segments) + " segments, none has index " +
                   std::to_string(segment));
    }
    result.segment = static_cast<std::uint32_t>(segment);
    result.offset = (*++at).natural();
    return result;
}

}  // namespace detail

/// The JSON object of `message`.
[[nodiscard]] inline std::string encode(const transport_message& message) {
    std::string text;
    wire::json_writer out{text};
    out.begin_object().key("memory").string("host").key("boot_id").string(message.boot_id);
    out.key("nonce").integer(message.nonce).key("control");
    detail::write(out, message.control);
    out.key("ring");
    if (message.ring) {
        detail::write(out, *message.ring);
    } else {
        out.null();
    }
    out.key("segments").begin_array();
    for (const auto& segment : message.segments) {
        detail::write(out, segment);
    }
    out.end_array().key("places").begin_array();
    for (const auto& each : message.places) {
        if (each.segment == place::staged) {
            out.null();
        } else {
            out.begin_array().integer(each.segment).integer(each.offset).end_array();
        }
    }
    out.end_array().end_object();
    return text;
}

/// The inverse of `encode`, for a text that a peer sent. What the handles lead to is not looked at.
/// @throws protocol_error not that form; names the member.
/// @throws unsupported_error memory that is not the host's.
[[nodiscard]] inline transport_message decode_transport_message(std::string_view text) {
    const wire::json_document document{text, "ipc transport", phase::init};
    const auto root = document.root();
    const auto memory = root.at("memory").string();
    if (memory != "host") {
        throw unsupported_error{"this worker reads host memory over ipc, the trainer offers '" +
                                    std::string{memory.substr(0, 32)} + "'",
                                {.phase = phase::init}};
    }
    root.allow_only({"memory", "boot_id", "nonce", "control", "ring", "segments", "places"});
    transport_message result;
    result.boot_id = root.at("boot_id").string(64);
    result.nonce = root.at("nonce").natural();
    result.control = detail::read_handle(root.at("control"));
    if (const auto ring = root.at("ring"); !ring.is_null()) {
        result.ring = detail::read_handle(ring);
    }
    for (const auto segment : root.at("segments").items()) {
        if (result.segments.size() == most_segments) {
            segment.fail("more than " + std::to_string(most_segments) + " segments");
        }
        result.segments.push_back(detail::read_handle(segment));
    }
    for (const auto each : root.at("places").items()) {
        result.places.push_back(detail::read_place(each, result.segments.size()));
    }
    return result;
}

}  // namespace weightwire::ipc
