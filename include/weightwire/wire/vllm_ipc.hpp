#pragma once
// SPDX-License-Identifier: Apache-2.0

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
#include <weightwire/core/checked.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/wire/base64.hpp>
#include <weightwire/wire/ipc_handles.hpp>
#include <weightwire/wire/ipc_pickle.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/vllm_update_fields.hpp>

/// @file
/// What vLLM's `ipc` backend is told over HTTP, in every era: the forms of `init_info` and the
/// update bodies that belong to them (vLLM wire sections 6.1 and 6.2), written for its servers and
/// read from its trainers.

namespace weightwire::wire {

/// The forms that servers take, newest first. The init call tells the first from the others: an
/// older server refuses `packed` there. The other two differ in the update only.
enum class vllm_ipc_form : std::uint8_t {
    packed_at_init,    ///< whether handles are packed is said at init
    packed_by_update,  ///< in every update: 0.22 to 0.26
    callable_pairs,    ///< never packed, and handles are pairs with the function: 0.17 to 0.21
};

/// Whether servers of `form` take packed handles.
[[nodiscard]] constexpr bool can_pack(vllm_ipc_form form) noexcept {
    return form != vllm_ipc_form::callable_pairs;
}

/// Index of the update body that belongs to `form`, in what `ipc_update_bodies` returns. Unpacked,
/// the two newer forms are told the same. Packed there is none for a form that cannot pack.
[[nodiscard]] constexpr std::size_t ipc_update_body_of(vllm_ipc_form form, bool packed) noexcept {
    const auto with_its_own =
        packed ? vllm_ipc_form::packed_by_update : vllm_ipc_form::callable_pairs;
    return form == with_its_own ? 1 : 0;
}

/// `init_info` as servers of one era take it.
[[nodiscard]] inline std::string encode_ipc_init(bool packed, vllm_ipc_form form) {
    if (form != vllm_ipc_form::packed_at_init) {
        return "{}";
    }
    return packed ? R"({"packed":true})" : R"({"packed":false})";
}

/// Reads any era's `init_info`, the whole object: whether handles are packed, or nothing where the
/// updates say it.
/// @throws protocol_error an unknown member, or `packed` is no boolean.
[[nodiscard]] inline std::optional<bool> decode_ipc_init(std::string_view text) {
    const json_document document{text, "Invalid init_info for ipc", phase::init};
    const auto info = document.root();
    info.require_object();
    info.allow_only({"packed"});
    const auto packed = detail::find_present(info, "packed");
    return packed ? std::optional{packed->boolean()} : std::nullopt;
}

namespace detail {

/// @throws usage_error `handles` do not fit the parameters of the call.
inline void require_handles_fit(const manifest& parameters, std::span<const std::size_t> order,
                                const ipc_handles& handles) {
    const auto refuse = [](std::string_view text) {
        throw usage_error{text, {.phase = phase::update, .backend = "ipc"}};
    };
    if (!handles.packed) {
        if (handles.entries.size() != order.size()) {
            refuse("unpacked handles are one entry for each parameter");
        }
        return;
    }
    std::optional<std::uint64_t> total = 0;
    for (const auto i : order) {
        total = total ? checked_add(*total, parameters[i].byte_size()) : std::nullopt;
    }
    for (const auto& entry : handles.entries) {
        for (const auto& [gpu, buffer] : entry) {
            if (!total || *total > buffer.storage_bytes) {
                refuse("the parameters of this call are larger than the packed buffer");
            }
        }
    }
}

}  // namespace detail

/// The update bodies of one call that sends parameters `order` of `parameters`, indexed by
/// `ipc_update_body_of`: two, of which the second is for the older servers.
/// @param handles one entry for each of them in that order, or the packed buffer that holds their
/// bytes one after the other.
/// @param zero_dim_as_one packed, `[]` is spelt `[1]`: vLLM cannot take a scalar out of a buffer.
/// @throws usage_error handles that do not fit the parameters, or that no pickle can say.
/// @throws data_error a name or dtype that JSON or torch cannot carry; names the tensor.
[[nodiscard]] inline std::vector<std::string> ipc_update_bodies(const manifest& parameters,
                                                                std::span<const std::size_t> order,
                                                                const ipc_handles& handles,
                                                                bool zero_dim_as_one = false) {
    detail::require_handles_fit(parameters, order, handles);
    std::string lists;
    json_writer out{lists};
    out.begin_object().key("update_info").begin_object();
    detail::write_sent_parameters(out, parameters, order, zero_dim_as_one && handles.packed);
    out.key("ipc_handles_pickled");
    const auto with_pickle = [&](ipc_pickle_form form) {
        const auto pickle = pickle_of(handles, form);
        std::string body;
        body.reserve(lists.size() + pickle.size() / 3 * 4 + 16);
        body = lists;
        body += '"';
        append_base64(body, std::as_bytes(std::span{pickle}));
        body += '"';
        return body;
    };
    auto newer = with_pickle(ipc_pickle_form::args);
    if (!handles.packed) {
        auto older = with_pickle(ipc_pickle_form::callable_and_args);
        return {std::move(newer) + "}}", std::move(older) + "}}"};
    }
    std::string sizes;
    json_writer list{sizes};
    list.begin_array();
    for (const auto i : order) {
        list.integer(parameters[i].byte_size());
    }
    list.end_array();
    newer += ",\"tensor_sizes\":" + sizes;
    auto older = newer + ",\"packed\":true}}";
    return {std::move(newer) + "}}", std::move(older)};
}

/// What one update call of a vLLM trainer says of its tensors' memory.
struct vllm_ipc_update {
    ipc_handles handles{};
    /// Packed: bytes of each tensor; they lie one after the other from the buffer's start.
    std::vector<std::uint64_t> tensor_sizes{};
};

namespace detail {

[[nodiscard]] inline ipc_handles ipc_handles_from_base64(const update_fields& fields,
                                                         std::string_view text) {
    const auto bytes = decode_base64(text);
    if (!bytes) {
        fields.fail("'ipc_handles_pickled' has to be padded base64 in the standard alphabet");
    }
    return ipc_handles_from_pickle({reinterpret_cast<const char*>(bytes->data()), bytes->size()});
}

/// The fields of an update that concern `ipc`; null where absent or null.
struct ipc_extras {
    const std::string* pickled = nullptr;
    const std::vector<std::int64_t>* sizes = nullptr;
    const bool* packed = nullptr;
    bool has_native_handles = false;
};

[[nodiscard]] inline ipc_extras find_ipc_extras(
    const update_fields& fields, const std::optional<bool>& at_init,
    std::span<const std::pair<std::string, wire_value>> extras) {
    ipc_extras found;
    for (const auto& [name, value] : extras) {
        const bool null = std::holds_alternative<std::monostate>(value);
        if (name == "ipc_handles_pickled") {
            found.pickled = fields.find_as<std::string>(name, value, "a string");
        } else if (name == "ipc_handles") {
            found.has_native_handles = !null;
        } else if (name == "tensor_sizes") {
            found.sizes =
                fields.find_as<std::vector<std::int64_t>>(name, value, "a list of integers");
        } else if (name == "packed") {
            if (at_init && !null) {
                fields.fail_unexpected(name, "; init_info has said whether handles are packed");
            }
            found.packed = fields.find_as<bool>(name, value, "true or false");
        } else if (!fields.is_of_dense_update(name, value)) {
            fields.fail_unexpected(name);
        }
    }
    return found;
}

}  // namespace detail

/// Reads one update call of a vLLM trainer.
/// @param at_init what `decode_ipc_init` gave. @param extras the call's fields beside names, dtype
/// names and shapes.
/// @throws protocol_error a field that is unknown or of another type, no handles or both kinds of
/// them, handles that are not what CPython pickles, or packed otherwise than was said.
/// @throws unsupported_error `ipc_handles`, memory that cannot be opened, or no dense update of a
/// checkpoint.
[[nodiscard]] inline vllm_ipc_update ipc_update_of(
    const std::optional<bool>& at_init,
    std::span<const std::pair<std::string, wire_value>> extras) {
    constexpr detail::update_fields fields{"ipc"};
    const auto found = detail::find_ipc_extras(fields, at_init, extras);
    if (found.has_native_handles && found.pickled != nullptr) {
        fields.fail("Cannot specify both `ipc_handles` and `ipc_handles_pickled`");
    }
    if (found.has_native_handles) {
        throw unsupported_error{
            "`ipc_handles` travel through Ray or inside one process only; send them over HTTP as "
            "`ipc_handles_pickled`, the base64 text of their pickle",
            {.phase = phase::update, .backend = "ipc"}};
    }
    if (found.pickled == nullptr) {
        fields.fail("Either `ipc_handles` or `ipc_handles_pickled` must be provided");
    }
    const bool packed = at_init.value_or(found.packed != nullptr && *found.packed);
    vllm_ipc_update update{.handles = detail::ipc_handles_from_base64(fields, *found.pickled)};
    if (update.handles.packed != packed) {
        fields.fail(packed ? "packed, `ipc_handles` has to be one dict, found a list"
                           : "unpacked, `ipc_handles` has to be a list of dicts, found one dict");
    }
    if (!packed) {
        return update;
    }
    if (found.sizes == nullptr) {
        fields.fail("`tensor_sizes` is required when packed=True");
    }
    update.tensor_sizes.reserve(found.sizes->size());
    for (const auto size : *found.sizes) {
        if (size < 0) {
            fields.fail("`tensor_sizes` has a negative one");
        }
        update.tensor_sizes.push_back(static_cast<std::uint64_t>(size));
    }
    return update;
}

/// Checks an update against the parameters that the call names.
/// @throws protocol_error lists of other lengths, in vLLM's words; a tensor of another size, dtype
/// or shape than the call says, on any GPU; or a packed buffer too small. Names the tensor.
inline void require_ipc_update_fits(const vllm_ipc_update& update, const manifest& parameters) {
    constexpr detail::update_fields fields{"ipc"};
    const bool packed = update.handles.packed;
    const auto found = packed ? update.tensor_sizes.size() : update.handles.entries.size();
    if (found != parameters.size()) {
        fields.fail(std::string{packed ? "`tensor_sizes`" : "`ipc_handles`"} +
                    " should be of the same size as `names`: got " + std::to_string(found) +
                    " and " + std::to_string(parameters.size()));
    }
    const auto refuse = [](std::string_view tensor, const std::string& text) {
        throw protocol_error{
            "Invalid update_info for ipc: " + text,
            {.phase = phase::update, .tensor = std::string{tensor}, .backend = "ipc"}};
    };
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto& parameter = parameters[i];
        if (packed) {
            if (update.tensor_sizes[i] != parameter.byte_size()) {
                refuse(parameter.name,
                       "`tensor_sizes` says " + std::to_string(update.tensor_sizes[i]) +
                           " bytes, dtype and shape make " + std::to_string(parameter.byte_size()));
            }
            continue;
        }
        for (const auto& [gpu, tensor] : update.handles.entries[i]) {
            if (tensor.type != parameter.dtype || tensor.extents != parameter.shape) {
                refuse(parameter.name, "the handle is of " + std::string{to_string(tensor.type)} +
                                           to_string(tensor.extents) + ", the lists say " +
                                           std::string{to_string(parameter.dtype)} +
                                           to_string(parameter.shape));
            }
        }
    }
    if (packed) {
        for (const auto& [gpu, buffer] : update.handles.entries.front()) {
            // The consumer takes the buffer as plain bytes from its first.
            const auto room = buffer.extents.checked_numel();
            if (buffer.type != dtype::u8 || buffer.extents.size() != 1 || buffer.strides[0] != 1 ||
                !room || *room < parameters.total_bytes()) {
                refuse("", "the packed buffer has to be a contiguous uint8 tensor of at least " +
                               std::to_string(parameters.total_bytes()) + " bytes, found " +
                               std::string{to_string(buffer.type)} + to_string(buffer.extents));
            }
        }
    }
}

}  // namespace weightwire::wire
