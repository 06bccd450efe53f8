#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/cuda_ipc/machinery.hpp>
#include <weightwire/core/checked.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/wire/base64.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>

/// @file
/// `transport_init::native` of `cuda_ipc`: what a worker opens, and where in it each tensor lies.
/// docs/wire.md has the form.

namespace weightwire::cuda_ipc {

/// Where a tensor lies that is read in place.
struct place {
    /// Value of `allocation` for a tensor that passes through the ring, or has no bytes.
    static constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();

    std::uint32_t allocation = none;  ///< index in `memory_export::allocations`
    std::uint64_t offset = 0;         ///< bytes from its begin
    /// In elements, one a dimension; empty: contiguous.
    std::vector<std::int64_t> strides{};
    friend bool operator==(const place&, const place&) = default;
};

/// One trainer rank's copy of the weights.
struct memory_export {
    std::string gpu{};  ///< UUID of the device that it is on
    exporter owner{};   ///< the process
    std::vector<exported_allocation> allocations{};
    std::uint32_t ring = place::none;  ///< which of them is the ring
    std::vector<place> places{};       ///< one a parameter
    friend bool operator==(const memory_export&, const memory_export&) = default;
};

/// What a worker needs to know of the trainer's memory.
struct transport_message {
    /// In `ring_offsets`: not in the ring.
    static constexpr std::uint64_t not_staged = std::numeric_limits<std::uint64_t>::max();

    std::string boot_id{};                      ///< of the machine, empty when unknown
    std::vector<std::size_t> call_begins{0};    ///< manifest position that each call begins with
    std::vector<std::uint64_t> ring_offsets{};  ///< one a parameter; empty: nothing is staged
    std::vector<memory_export> exports{};       ///< by trainer rank; at least one
    friend bool operator==(const transport_message&, const transport_message&) = default;
};

/// Bounds of what a peer may send.
inline constexpr std::size_t most_allocations = std::size_t{1} << 16U;
inline constexpr std::size_t most_exports = 1024;
inline constexpr std::size_t longest_handle = 256;

/// Bytes from a tensor's first element to the end of its last; nothing where that overflows, a
/// stride is negative, or elements with gaps between them are no whole bytes.
[[nodiscard]] inline std::optional<std::uint64_t> span_of(const tensor_view& tensor) noexcept {
    if (tensor.is_contiguous()) {
        return tensor.byte_size();
    }
    const auto bits = item_bits(tensor.type());
    std::uint64_t last = 0;
    for (std::size_t i = 0; i < tensor.extents().size(); ++i) {
        const auto stride = tensor.strides()[i];
        const auto steps = checked_multiply(static_cast<std::uint64_t>(tensor.extents()[i] - 1),
                                            static_cast<std::uint64_t>(stride));
        const auto sum = steps ? checked_add(last, *steps) : std::nullopt;
        if (stride < 0 || !sum) {
            return std::nullopt;
        }
        last = *sum;
    }
    const auto elements = checked_add(last, std::uint64_t{1});
    return elements && bits % 8 == 0 ? checked_multiply(*elements, std::uint64_t{bits / 8})
                                     : std::nullopt;
}

namespace detail {

inline void write(wire::json_writer& out, const place& value) {
    if (value.allocation == place::none) {
        out.null();
        return;
    }
    out.begin_array().integer(value.allocation).integer(value.offset);
    if (!value.strides.empty()) {
        out.begin_array();
        for (const auto stride : value.strides) {
            out.integer(stride);
        }
        out.end_array();
    }
    out.end_array();
}

inline void write(wire::json_writer& out, const exported_allocation& value) {
    std::string handle;
    wire::append_base64(handle, std::as_bytes(std::span{value.handle}));
    out.begin_array().string(handle).integer(value.base).integer(value.bytes);
    out.integer(value.buffer_id).end_array();
}

inline void write(wire::json_writer& out, const memory_export& value) {
    out.begin_object().key("gpu").string(value.gpu).key("pid").integer(value.owner.pid);
    out.key("start_time").integer(value.owner.start_time).key("allocations").begin_array();
    for (const auto& each : value.allocations) {
        write(out, each);
    }
    out.end_array().key("ring");
    if (value.ring == place::none) {
        out.null();
    } else {
        out.integer(value.ring);
    }
    out.key("places").begin_array();
    for (const auto& each : value.places) {
        write(out, each);
    }
    out.end_array().end_object();
}

[[nodiscard]] inline std::uint32_t read_index(const wire::json_value& value, std::size_t count) {
    const auto index = value.natural();
    if (index >= count) {
        value.fail("there are " + std::to_string(count) + " allocations, none has index " +
                   std::to_string(index));
    }
    return static_cast<std::uint32_t>(index);
}

/// `[allocation, offset]`, `[allocation, offset, [stride, …]]` or null.
[[nodiscard]] inline place read_place(const wire::json_value& value, std::size_t allocations) {
    place result;
    if (value.is_null()) {
        return result;
    }
    const auto count = value.count();
    if (count != 2 && count != 3) {
        value.fail("expected null, [allocation, offset] or [allocation, offset, strides]");
    }
    auto at = value.items().begin();
    result.allocation = read_index(*at, allocations);
    result.offset = (*++at).natural();
    if (count == 3) {
        for (const auto stride : (*++at).items()) {
            if (result.strides.size() == max_dimensions) {
                stride.fail("more strides than a tensor has dimensions");
            }
            result.strides.push_back(stride.integer(0, std::numeric_limits<std::int64_t>::max()));
        }
    }
    return result;
}

/// Only whether it is an allocation; whether it tells the truth is found out when it is opened.
[[nodiscard]] inline exported_allocation read_allocation(const wire::json_value& value) {
    if (value.count() != 4) {
        value.fail("expected [handle, base, bytes, buffer id]");
    }
    auto at = value.items().begin();
    const auto text = *at;
    const auto handle = wire::decode_base64(text.string());
    if (!handle || handle->empty() || handle->size() > longest_handle) {
        text.fail("expected the base64 text of a handle of 1 to 256 bytes");
    }
    exported_allocation result{
        .handle = {reinterpret_cast<const char*>(handle->data()), handle->size()}};
    result.base = (*++at).natural();
    result.bytes = (*++at).natural();
    result.buffer_id = (*++at).natural();
    return result;
}

[[nodiscard]] inline memory_export read_export(const wire::json_value& value) {
    value.allow_only({"gpu", "pid", "start_time", "allocations", "ring", "places"});
    memory_export result{
        .gpu = std::string{value.at("gpu").string(64)},
        .owner = {.pid = value.at("pid").integer(1, std::numeric_limits<std::int32_t>::max()),
                  .start_time = value.at("start_time").natural()}};
    for (const auto each : value.at("allocations").items()) {
        if (result.allocations.size() == most_allocations) {
            each.fail("more than " + std::to_string(most_allocations) + " allocations");
        }
        result.allocations.push_back(read_allocation(each));
    }
    if (const auto ring = value.at("ring"); !ring.is_null()) {
        result.ring = read_index(ring, result.allocations.size());
    }
    for (const auto each : value.at("places").items()) {
        result.places.push_back(read_place(each, result.allocations.size()));
    }
    return result;
}

/// Calls begin at ascending positions from 0.
[[nodiscard]] inline std::vector<std::size_t> read_calls(const wire::json_value& value) {
    std::vector<std::size_t> begins;
    for (const auto item : value.items()) {
        const auto begin = item.natural();
        if (begins.empty() ? begin != 0 : begin <= begins.back()) {
            item.fail("calls begin at ascending positions from 0");
        }
        begins.push_back(static_cast<std::size_t>(begin));
    }
    if (begins.empty()) {
        value.fail("a round has at least one call");
    }
    return begins;
}

}  // namespace detail

/// The JSON object of one rank's export.
[[nodiscard]] inline std::string encode(const memory_export& value) {
    std::string text;
    wire::json_writer out{text};
    detail::write(out, value);
    return text;
}

/// The inverse, for a text that another trainer rank gathered.
/// @throws protocol_error not that form; names the member.
[[nodiscard]] inline memory_export decode_memory_export(std::string_view text) {
    const wire::json_document document{text, "cuda_ipc export of a trainer rank", phase::init};
    return detail::read_export(document.root());
}

/// The JSON object of `message`.
[[nodiscard]] inline std::string encode(const transport_message& message) {
    std::string text;
    wire::json_writer out{text};
    out.begin_object().key("memory").string("cuda").key("boot_id").string(message.boot_id);
    out.key("calls").begin_array();
    for (const auto begin : message.call_begins) {
        out.integer(begin);
    }
    out.end_array().key("ring_offsets").begin_array();
    for (const auto offset : message.ring_offsets) {
        offset == transport_message::not_staged ? out.null() : out.integer(offset);
    }
    out.end_array().key("exports").begin_array();
    for (const auto& each : message.exports) {
        detail::write(out, each);
    }
    out.end_array().end_object();
    return text;
}

/// The inverse of `encode`, for a text that a peer sent. What the handles lead to is not looked at.
/// @param parameters of the manifest: every list of one a parameter has so many entries.
/// @throws protocol_error not that form; names the member.
/// @throws unsupported_error memory that is no device's.
[[nodiscard]] inline transport_message decode_transport_message(std::string_view text,
                                                                std::size_t parameters) {
    const wire::json_document document{text, "cuda_ipc transport", phase::init};
    const auto root = document.root();
    const auto memory = root.at("memory").string();
    if (memory != "cuda") {
        throw unsupported_error{"this worker reads device memory over ipc, the trainer offers '" +
                                    std::string{memory.substr(0, 32)} + "'",
                                {.phase = phase::init}};
    }
    root.allow_only({"memory", "boot_id", "calls", "ring_offsets", "exports"});
    transport_message result;
    result.boot_id = root.at("boot_id").string(64);
    result.call_begins = detail::read_calls(root.at("calls"));
    const auto offsets = root.at("ring_offsets");
    for (const auto each : offsets.items()) {
        result.ring_offsets.push_back(each.is_null() ? transport_message::not_staged
                                                     : each.natural());
    }
    if (!result.ring_offsets.empty() && result.ring_offsets.size() != parameters) {
        offsets.fail("expected none or " + std::to_string(parameters));
    }
    const auto exports = root.at("exports");
    for (const auto each : exports.items()) {
        if (result.exports.size() == most_exports) {
            each.fail("more than " + std::to_string(most_exports) + " exports");
        }
        result.exports.push_back(detail::read_export(each));
        if (result.exports.back().places.size() != parameters) {
            each.at("places").fail("expected " + std::to_string(parameters));
        }
    }
    if (result.exports.empty()) {
        exports.fail("a trainer exports something");
    }
    return result;
}

}  // namespace weightwire::cuda_ipc
