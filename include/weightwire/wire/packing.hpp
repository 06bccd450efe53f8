#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <string_view>

#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>

/// @file
/// What trainers tell workers of ours about packing, in the wire parameters of several backends:
/// bounds and JSON.

namespace weightwire::wire {

/// Whether all tensors are packed, and the buffers they pass through. The names are the JSON's.
struct packing_parameters {
    bool packed = false;
    std::uint64_t packed_buffer_size_bytes = 0;
    std::uint64_t packed_num_buffers = 0;

    friend bool operator==(const packing_parameters&, const packing_parameters&) = default;
};

/// Bounds of the buffers, the same for a user's values and a peer's.
inline constexpr std::uint64_t most_packed_buffers = 1024;
inline constexpr std::uint64_t most_packed_bytes = std::uint64_t{1} << 42U;  ///< of all of them

/// What is wrong with the buffers, in words, whether or not all is packed; empty when nothing is.
[[nodiscard]] inline std::string_view fault_of_buffers(const packing_parameters& packing) noexcept {
    const auto count = packing.packed_num_buffers;
    if (count < 1 || count > most_packed_buffers) {
        return "packed_num_buffers has to be from 1 to 1024";
    }
    const auto bytes = packing.packed_buffer_size_bytes;
    return bytes < 1 || bytes > most_packed_bytes / count
               ? "packed_buffer_size_bytes times packed_num_buffers has to be from 1 to 2^42"
               : std::string_view{};
}

/// Writes the three members into the object that is open.
inline void write_packing(json_writer& out, const packing_parameters& packing) {
    out.key("packed").boolean(packing.packed);
    out.key("packed_buffer_size_bytes").integer(packing.packed_buffer_size_bytes);
    out.key("packed_num_buffers").integer(packing.packed_num_buffers);
}

/// Reads an object of these three members and no other.
/// @throws protocol_error another form, or buffers out of bounds; names the member.
[[nodiscard]] inline packing_parameters read_packing(const json_value& object) {
    object.require_object();
    object.allow_only({"packed", "packed_buffer_size_bytes", "packed_num_buffers"});
    const packing_parameters result{
        .packed = object.at("packed").boolean(),
        .packed_buffer_size_bytes = object.at("packed_buffer_size_bytes").natural(),
        .packed_num_buffers = object.at("packed_num_buffers").natural()};
    if (const auto fault = fault_of_buffers(result); !fault.empty()) {
        object.fail(fault);
    }
    return result;
}

}  // namespace weightwire::wire
