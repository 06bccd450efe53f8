#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/packing.hpp>

/// @file
/// What a trainer says to choose `ipc`: weights through memory that both processes map.

namespace weightwire::ipc {

/// The tag.
struct backend {};

/// Called on every piece of a tensor just after it was written to shared memory, from the thread in
/// `send_weights()`. Null: not called.
struct byte_hook {
    /// @param context what the user gave.
    /// @param tensor name in the manifest.
    /// @param offset of the piece in the tensor, in bytes of C order.
    /// @param bytes the piece, in shared memory; may be changed.
    void (*function)(void* context, std::string_view tensor, std::uint64_t offset,
                     std::span<std::byte> bytes) = nullptr;
    void* context = nullptr;

    explicit operator bool() const noexcept { return function != nullptr; }
    void operator()(std::string_view tensor, std::uint64_t offset,
                    std::span<std::byte> bytes) const {
        function(context, tensor, offset, bytes);
    }
};

/// The part of the init info that travels, since both sides cut tensors by it.
struct wire_parameters {
    bool packed = false;
    std::uint64_t packed_buffer_size_bytes = 0;  ///< 0 unless packed
    std::uint64_t packed_num_buffers = 0;        ///< 0 unless packed
    std::uint64_t staging_bytes = 0;             ///< 0 where packed

    /// Those that other backends have too.
    [[nodiscard]] wire::packing_parameters packing() const noexcept {
        return {.packed = packed,
                .packed_buffer_size_bytes = packed_buffer_size_bytes,
                .packed_num_buffers = packed_num_buffers};
    }
    friend bool operator==(const wire_parameters&, const wire_parameters&) = default;
};

/// Bounds of `staging_bytes`, the same for a user's value and a peer's.
inline constexpr std::uint64_t least_staging_bytes = 4096;
inline constexpr std::uint64_t most_staging_bytes = std::uint64_t{1} << 42U;

/// Chooses `ipc`. Sizes are in bytes.
struct trainer_init_info {
    using backend = ipc::backend;

    /// False: tensor by tensor. Those that lie in shared memory already (a stable source in
    /// `shm::arena`s) are read where they are; the others pass through a window of `staging_bytes`,
    /// in pieces.
    /// True: all pass through rotating buffers that each hold whole tensors.
    bool packed = false;
    /// One packed buffer; a tensor larger than it is an error.
    std::uint64_t packed_buffer_size_bytes = std::uint64_t{1} << 30U;
    /// Packed buffers in rotation; two let the trainer fill one while the workers empty the other.
    std::uint64_t packed_num_buffers = 2;
    /// The window of unpacked transfers. Larger ones gain nothing once it holds several pieces, and
    /// lose when it outgrows the processor's last cache.
    std::uint64_t staging_bytes = std::uint64_t{4} << 20U;
    /// Digest every tensor while it is sent; the worker compares before it commits.
    bool verify = false;
    /// Of this trainer process in its group; rank 0 sends.
    int rank = 0;
    /// Changes what is sent. The digest is of the changed bytes. With one set nothing is read in
    /// place, since the source's own memory is not ours to change.
    byte_hook transform{};
    /// Called after the digest was taken: what it changes is corruption, for tests and
    /// demonstrations of `verify`. Nothing is read in place either.
    byte_hook tamper{};

    /// The parameters that travel.
    [[nodiscard]] wire_parameters wire() const noexcept {
        return packed ? wire_parameters{.packed = true,
                                        .packed_buffer_size_bytes = packed_buffer_size_bytes,
                                        .packed_num_buffers = packed_num_buffers}
                      : wire_parameters{.staging_bytes = staging_bytes};
    }
    /// Their JSON object, the same for every peer.
    [[nodiscard]] std::string init_message() const;
};

/// What is wrong with `parameters`, in words; empty when nothing is.
[[nodiscard]] inline std::string_view fault_of(const wire_parameters& parameters) noexcept {
    if (parameters.packed) {
        return wire::fault_of_buffers(parameters.packing());
    }
    const auto bytes = parameters.staging_bytes;
    return bytes < least_staging_bytes || bytes > most_staging_bytes
               ? "staging_bytes has to be from 4096 to 2^42"
               : std::string_view{};
}

/// The JSON object of `parameters`. docs/wire.md has its form.
[[nodiscard]] inline std::string encode(const wire_parameters& parameters) {
    std::string text;
    wire::json_writer out{text};
    out.begin_object();
    if (parameters.packed) {
        wire::write_packing(out, parameters.packing());
    } else {
        out.key("packed").boolean(false).key("staging_bytes").integer(parameters.staging_bytes);
    }
    out.end_object();
    return text;
}

/// The inverse of `encode`, for a text that a peer sent.
/// @throws protocol_error not that form, or values out of bounds; names the member.
[[nodiscard]] inline wire_parameters decode_wire_parameters(std::string_view text) {
    const wire::json_document document{text, "ipc wire parameters", phase::init};
    const auto root = document.root();
    root.require_object();
    if (root.at("packed").boolean()) {
        const auto packing = wire::read_packing(root);
        return {.packed = true,
                .packed_buffer_size_bytes = packing.packed_buffer_size_bytes,
                .packed_num_buffers = packing.packed_num_buffers};
    }
    root.allow_only({"packed", "staging_bytes"});
    const wire_parameters result{.staging_bytes = root.at("staging_bytes").natural()};
    if (const auto fault = fault_of(result); !fault.empty()) {
        root.fail(fault);
    }
    return result;
}

inline std::string trainer_init_info::init_message() const { return encode(wire()); }

}  // namespace weightwire::ipc
