#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/packing.hpp>
#include <weightwire/wire/vllm_nccl.hpp>

/// @file
/// What a trainer says to choose `nccl`: broadcasts from its GPU to those of the workers.

namespace weightwire::nccl {

/// The tag, and what a worker chooses by it.
struct backend {
    /// Path of libnccl for this worker's ranks. Empty: the default. It has to be of the trainer's
    /// version.
    std::string library{};
};

/// How ranks behind vLLM servers learn NCCL's unique id. Workers of ours are told it directly.
enum class rendezvous : std::uint8_t {
    automatic,  ///< each server by the newest way it takes
    unique_id,  ///< in the init call; vLLM from about 0.30
    store,      ///< from a store of this process, as every vLLM can
};

/// The part of the init info that travels, since both sides cut tensors by it. Unpacked the sizes
/// are 0.
using wire_parameters = wire::packing_parameters;

/// Chooses `nccl`. Sizes are in bytes.
struct trainer_init_info {
    using backend = nccl::backend;

    /// The address at which workers reach this trainer's store, in the modes that need one. By
    /// default this machine alone: a store knows no passwords, and who reads the id in it may join
    /// the group, so that opening it to a network is the user's decision.
    std::string master_address = "127.0.0.1";
    /// Of that store. 0: any free port, which the init call then names.
    int master_port = 0;
    /// Of this trainer process in its group; rank 0 sends.
    int rank = 0;
    /// True: many tensors a broadcast, through rotating buffers. False: one broadcast a tensor.
    bool packed = true;
    /// A packed broadcast is closed once it holds more than this; a buffer may therefore be larger
    /// by a tensor.
    std::uint64_t packed_buffer_size_bytes = std::uint64_t{1} << 30U;
    /// Packed buffers in rotation; two let one be filled while the other is sent.
    std::uint64_t packed_num_buffers = 2;
    /// CUDA device of this process.
    int device = 0;
    /// Path of libnccl. Empty: the default. It has to be of the workers' version.
    std::string library{};
    /// How vLLM's workers learn the id.
    rendezvous meeting = rendezvous::automatic;
    /// Towards vLLM, packed: send a tensor of no dimensions as one of shape [1], which vLLM can
    /// take. Without it such a tensor is an error.
    bool zero_dim_as_one = false;

    /// The parameters that travel.
    [[nodiscard]] wire_parameters wire() const noexcept {
        return packed ? wire_parameters{.packed = true,
                                        .packed_buffer_size_bytes = packed_buffer_size_bytes,
                                        .packed_num_buffers = packed_num_buffers}
                      : wire_parameters{};
    }
    /// The same as vLLM is told it.
    [[nodiscard]] wire::nccl_packing packing() const noexcept {
        return {.packed = packed,
                .buffer_bytes = packed_buffer_size_bytes,
                .buffers = packed_num_buffers};
    }
    /// Their JSON object, the same for every peer.
    [[nodiscard]] std::string init_message() const;
};

/// What is wrong with a user's values, in words; empty when nothing is.
[[nodiscard]] inline std::string_view fault_of(const trainer_init_info& info) noexcept {
    if (info.rank < 0) {
        return "rank has to be 0 or above";
    }
    if (info.device < 0) {
        return "device has to be 0 or above";
    }
    if (info.master_port < 0 || info.master_port > 65535) {
        return "master_port has to be from 0 (any free port) to 65535";
    }
    const auto& host = info.master_address;
    if (info.meeting != rendezvous::unique_id &&
        (host.empty() || host.size() > wire::longest_host_name ||
         wire::detail::has_control_character(host))) {
        return "master_address has to be the address or name, of at most 253 bytes, at which "
               "workers reach this machine";
    }
    return info.packed ? wire::fault_of_buffers(info.wire()) : std::string_view{};
}

/// Whether `host` names the machine itself: an address or name that others cannot use.
[[nodiscard]] inline bool names_own_machine(std::string_view host) noexcept {
    return host == "localhost" || host == "::1" || host == "[::1]" ||
           (host.starts_with("127.") && std::ranges::count(host, '.') == 3);
}

/// Whether workers behind the server at `url` cannot reach a store at `master_address`, as the
/// server is on another machine and the address is only known on this one. Where `url` is no URL
/// nothing is known and nothing is wrong.
[[nodiscard]] inline bool store_out_of_reach(std::string_view master_address,
                                             std::string_view url) noexcept {
    const auto scheme = url.find("://");
    if (scheme == url.npos || !names_own_machine(master_address)) {
        return false;
    }
    auto host = url.substr(scheme + 3);
    host = host.substr(0, host.find_first_of("/?#"));
    host = host.substr(host.find('@') + 1);  // npos + 1 is 0
    const auto end = host.starts_with('[') ? host.find(']') + 1 : host.find(':');
    return !names_own_machine(host.substr(0, end == 0 ? host.npos : end));
}

/// The JSON object of `parameters`. docs/wire.md has its form.
[[nodiscard]] inline std::string encode(const wire_parameters& parameters) {
    std::string text;
    wire::json_writer out{text};
    out.begin_object();
    if (parameters.packed) {
        wire::write_packing(out, parameters);
    } else {
        out.key("packed").boolean(false);
    }
    out.end_object();
    return text;
}

/// The inverse of `encode`, for a text that a peer sent.
/// @throws protocol_error not that form, or values out of bounds; names the member.
[[nodiscard]] inline wire_parameters decode_wire_parameters(std::string_view text) {
    const wire::json_document document{text, "nccl wire parameters", phase::init};
    const auto root = document.root();
    root.require_object();
    if (root.at("packed").boolean()) {
        return wire::read_packing(root);
    }
    root.allow_only({"packed"});
    return {};
}

inline std::string trainer_init_info::init_message() const { return encode(wire()); }

}  // namespace weightwire::nccl
