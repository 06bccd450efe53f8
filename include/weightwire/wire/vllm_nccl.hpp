#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/parameter_lists.hpp>
#include <weightwire/wire/unique_id.hpp>
#include <weightwire/wire/vllm_update_fields.hpp>

/// @file
/// What vLLM's `nccl` backend is told, in every era: the forms of `init_info` and the update bodies
/// that belong to them (vLLM wire sections 4.1 and 4.2), written for its servers and read from its
/// trainers.

namespace weightwire::wire {

/// How tensors are packed; both sides cut by it. Defaults are vLLM's.
struct nccl_packing {
    bool packed = false;
    std::uint64_t buffer_bytes = std::uint64_t{1} << 30U;
    std::uint64_t buffers = 2;
    friend bool operator==(const nccl_packing&, const nccl_packing&) = default;
};

/// Bounds of `nccl_packing`, the same for a user's values and a peer's.
inline constexpr std::uint64_t most_nccl_buffers = 1024;
inline constexpr std::uint64_t most_nccl_buffer_bytes = std::uint64_t{1} << 42U;
/// Most ranks of a group, and the longest name of a host.
inline constexpr std::int64_t most_nccl_ranks = std::int64_t{1} << 20U;
inline constexpr std::size_t longest_host_name = 253;

/// What is wrong with `packing`, in words; empty when nothing is.
[[nodiscard]] inline std::string_view fault_of(const nccl_packing& packing) noexcept {
    if (!packing.packed) {
        return {};
    }
    if (packing.buffers < 1 || packing.buffers > most_nccl_buffers) {
        return "packed_num_buffers has to be from 1 to 1024";
    }
    return packing.buffer_bytes < 1 ||
                   packing.buffer_bytes > most_nccl_buffer_bytes / packing.buffers
               ? "packed_buffer_size_bytes times packed_num_buffers has to be from 1 to 2^42"
               : std::string_view{};
}

/// Where ranks meet who were not given the id itself.
struct store_address {
    std::string host{};
    std::uint16_t port = 0;
    friend bool operator==(const store_address&, const store_address&) = default;
};

/// `init_info` of vLLM's `nccl`: exactly one of `id` and `store`.
struct vllm_nccl_init {
    std::optional<unique_id> id{};
    std::optional<store_address> store{};
    int rank_offset = 1;
    int world_size = 2;
    /// Nothing from a trainer of the era that packs by the update call.
    std::optional<nccl_packing> packing{};
};

/// The forms that servers take, newest first; an older server refuses a newer form at once.
enum class vllm_nccl_form : std::uint8_t {
    by_id,             ///< the id; packing at init
    by_store,          ///< a store's address; packing at init
    packed_by_update,  ///< a store's address; packing in every update
};

/// Index of the update body that belongs to `form`, in what `nccl_update_bodies` returns.
[[nodiscard]] constexpr std::size_t update_body_of(vllm_nccl_form form) noexcept {
    return form == vllm_nccl_form::packed_by_update ? 1 : 0;
}

namespace detail {

inline void write_packing(json_writer& out, const nccl_packing& packing) {
    out.key("packed_buffer_size_bytes").integer(packing.buffer_bytes);
    out.key("packed_num_buffers").integer(packing.buffers);
}

[[nodiscard]] inline std::optional<nccl_packing> read_packing(const json_value& info) {
    const auto packed = find_present(info, "packed");
    const auto bytes = find_present(info, "packed_buffer_size_bytes");
    const auto buffers = find_present(info, "packed_num_buffers");
    if (!packed && !bytes && !buffers) {
        return std::nullopt;
    }
    nccl_packing result;
    result.packed = packed && packed->boolean();
    result.buffer_bytes = bytes ? bytes->natural() : result.buffer_bytes;
    result.buffers = buffers ? buffers->natural() : result.buffers;
    if (const auto fault = fault_of(result); !fault.empty()) {
        info.fail(fault);
    }
    return result;
}

/// Either the id or the store's address; an empty id counts as none.
inline void read_meeting(const json_value& info, vllm_nccl_init& init) {
    const auto id = find_present(info, "nccl_unique_id_b64");
    const auto host = find_present(info, "master_address");
    const auto port = find_present(info, "master_port");
    if (id && !id->string().empty()) {
        if (host || port) {
            info.fail("pass nccl_unique_id_b64 OR master_address/master_port, not both");
        }
        init.id = unique_id_from_base64(id->string());
        return;
    }
    if (!host || !port) {
        info.fail("pass nccl_unique_id_b64, or both master_address and master_port");
    }
    const auto name = host->string(longest_host_name);
    if (name.empty() || has_control_character(name)) {
        host->fail("a host's name is empty or holds a control character");
    }
    init.store = store_address{.host = std::string{name},
                               .port = static_cast<std::uint16_t>(port->integer(1, 65535))};
}

}  // namespace detail

/// `init_info` as servers of one era take it.
/// @throws usage_error `init` has not what `form` needs.
[[nodiscard]] inline std::string encode_nccl_init(const vllm_nccl_init& init, vllm_nccl_form form) {
    const bool by_id = form == vllm_nccl_form::by_id;
    if (by_id ? !init.id : !init.store) {
        throw usage_error{by_id ? "this form of init_info needs the NCCL id"
                                : "this form of init_info needs a store's address",
                          {.phase = phase::init}};
    }
    std::string text;
    json_writer out{text};
    out.begin_object();
    if (by_id) {
        out.key("nccl_unique_id_b64").string(base64_of(*init.id));
    } else {
        out.key("master_address").string(init.store->host);
        out.key("master_port").integer(init.store->port);
    }
    out.key("rank_offset").integer(init.rank_offset).key("world_size").integer(init.world_size);
    if (form != vllm_nccl_form::packed_by_update) {
        const auto packing = init.packing.value_or(nccl_packing{});
        out.key("packed").boolean(packing.packed);
        detail::write_packing(out, packing);
    }
    out.end_object();
    return text;
}

/// Reads any era's `init_info`, the whole object. An absent member may also be null.
/// @throws protocol_error names the member: unknown, missing, both ways to meet, or out of bounds.
[[nodiscard]] inline vllm_nccl_init decode_nccl_init(std::string_view text) {
    const json_document document{text, "Invalid init_info for nccl", phase::init};
    const auto info = document.root();
    info.require_object();
    info.allow_only({"nccl_unique_id_b64", "master_address", "master_port", "rank_offset",
                     "world_size", "packed", "packed_buffer_size_bytes", "packed_num_buffers"});
    vllm_nccl_init init;
    detail::read_meeting(info, init);
    const auto world = info.at("world_size").integer(2, most_nccl_ranks);
    init.world_size = static_cast<int>(world);
    init.rank_offset = static_cast<int>(info.at("rank_offset").integer(1, world - 1));
    init.packing = detail::read_packing(info);
    return init;
}

/// Body of one update call that sends parameters `order` of `parameters`, and says nothing of
/// packing.
/// @param zero_dim_as_one `[]` is spelt `[1]`.
/// @throws data_error a name or dtype that JSON or torch cannot carry; names the tensor.
[[nodiscard]] inline std::string encode_nccl_update(const manifest& parameters,
                                                    std::span<const std::size_t> order,
                                                    bool zero_dim_as_one = false) {
    std::string text;
    json_writer out{text};
    out.begin_object().key("update_info").begin_object();
    detail::write_sent_parameters(out, parameters, order, zero_dim_as_one);
    out.end_object().end_object();
    return text;
}

/// The update bodies of one call, indexed by `update_body_of`. What servers of the older era are
/// told in the call differs only when packed.
/// @throws data_error as `encode_nccl_update`.
[[nodiscard]] inline std::vector<std::string> nccl_update_bodies(const manifest& parameters,
                                                                 std::span<const std::size_t> order,
                                                                 const nccl_packing& packing,
                                                                 bool zero_dim_as_one = false) {
    auto at_init = encode_nccl_update(parameters, order, zero_dim_as_one && packing.packed);
    auto by_update = at_init;
    if (packing.packed) {
        std::string members;
        json_writer out{members};
        out.key("packed").boolean(true);
        detail::write_packing(out, packing);
        constexpr std::size_t closing = 2;  // the brackets of update_info and of the body
        by_update.insert(by_update.size() - closing, "," + members);
    }
    return {std::move(at_init), std::move(by_update)};
}

/// How one update call of a vLLM trainer is packed: as said at init, or by the call itself.
/// @param extras the call's fields beside names, dtype names and shapes.
/// @throws protocol_error a field that is unknown, of another type or out of bounds, or packing in
/// the call of a trainer that said it at init. @throws unsupported_error no dense update of a
/// checkpoint.
[[nodiscard]] inline nccl_packing packing_of_update(
    const std::optional<nccl_packing>& at_init,
    std::span<const std::pair<std::string, wire_value>> extras) {
    constexpr detail::update_fields fields{"nccl"};
    nccl_packing result = at_init.value_or(nccl_packing{});
    for (const auto& [name, value] : extras) {
        const bool packing =
            name == "packed" || name == "packed_buffer_size_bytes" || name == "packed_num_buffers";
        if (!packing && fields.is_of_dense_update(name, value)) {
            continue;
        }
        if (!packing || (at_init && !std::holds_alternative<std::monostate>(value))) {
            fields.fail_unexpected(name,
                                   packing ? "; init_info has said how tensors are packed" : "");
        }
        if (name == "packed") {
            const auto* packed = fields.find_as<bool>(name, value, "true or false");
            result.packed = packed != nullptr ? *packed : result.packed;
        } else {
            auto& member = name == "packed_num_buffers" ? result.buffers : result.buffer_bytes;
            member = fields.natural(name, value).value_or(member);
        }
    }
    if (const auto fault = fault_of(result); !fault.empty()) {
        fields.fail(fault);
    }
    return result;
}

}  // namespace weightwire::wire
