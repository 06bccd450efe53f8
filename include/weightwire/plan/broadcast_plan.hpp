#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/groups.hpp>
#include <weightwire/plan/packing.hpp>

/// @file
/// In which order, calls and chunks a broadcast sends a list of parameters (vLLM wire sections 4.3
/// to 4.5). Made once from the metadata.
///
/// vLLM's Python consumer views each tensor where it lies in the packed buffer, so a tensor whose
/// offset is no multiple of its item size fails there, after its bytes have moved. The plan keeps
/// that from happening by the order of the tensors or by beginning a new call, which begins a new
/// chunk. Our own workers copy bytes and need none of it.

namespace weightwire::plan {

/// What a plan has to respect.
struct broadcast_options {
    bool packed = false;
    std::uint64_t buffer_bytes = 0;  ///< a chunk is closed once it holds more; packed only
    std::size_t buffers = 2;         ///< that rotate; packed only
    /// A consumer is vLLM's in Python: offsets have to be aligned when packed, and dtypes have to
    /// be NCCL's when not.
    bool consumer_needs_alignment = false;
    bool may_reorder = false;      ///< all tensors are there at once (stable addresses)
    bool may_split = true;         ///< several update calls a round (not towards 0.16 to 0.20)
    bool zero_dim_as_one = false;  ///< the user's opt-in: `[]` is sent as `[1]`
};

/// One update call's share of a round.
struct broadcast_call {
    std::vector<std::size_t> order{};    ///< manifest positions in wire order
    std::vector<packed_chunk> chunks{};  ///< `first` is an index into `order`; empty if unpacked
};

/// How the wire order is made from the manifest's.
enum class sending_order : std::uint8_t {
    manifest,      ///< as it is
    by_layer,      ///< within each run of one layer by descending item size, stable
    by_item_size,  ///< as a whole by descending item size, stable
};

/// What a receiver has to know besides the manifest and the buffer size to make the same plan.
struct broadcast_layout {
    sending_order order = sending_order::manifest;
    /// Where in the wire order each call begins: ascending from 0. Never empty.
    std::vector<std::size_t> call_begins{0};
    friend bool operator==(const broadcast_layout&, const broadcast_layout&) = default;
};

namespace detail {

/// What a tensor's offset has to be a multiple of: its item size. The 6-bit types, which torch has
/// not, count as bytes.
[[nodiscard]] constexpr std::uint64_t item_bytes(dtype type) noexcept {
    return std::max<std::uint64_t>(item_bits(type) / 8, 1);
}

/// Whether vLLM's unpacked transfer, which names each tensor's own type to NCCL, has a name for it.
/// `nccl_api::element_of` has more: those that NCCL knows.
[[nodiscard]] constexpr bool vllm_unpacked_takes(dtype type) noexcept {
    switch (type) {
        case dtype::i8:
        case dtype::u8:
        case dtype::i32:
        case dtype::i64:
        case dtype::f16:
        case dtype::bf16:
        case dtype::f32:
        case dtype::f64:
        case dtype::f8_e4m3fn: return true;
        default: return false;
    }
}

/// Manifest positions in wire order.
[[nodiscard]] inline std::vector<std::size_t> order_of(const manifest& parameters,
                                                       sending_order order) {
    std::vector<std::size_t> result(parameters.size());
    std::iota(result.begin(), result.end(), std::size_t{0});
    const auto wider = [&](std::size_t a, std::size_t b) {
        return item_bytes(parameters[a].dtype) > item_bytes(parameters[b].dtype);
    };
    if (order == sending_order::by_item_size) {
        std::stable_sort(result.begin(), result.end(), wider);
    } else if (order == sending_order::by_layer) {
        auto begin = result.begin();
        for (const auto count : group_runs(layerwise_groups(parameters))) {
            const auto end = begin + static_cast<std::ptrdiff_t>(count);
            std::stable_sort(begin, end, wider);
            begin = end;
        }
    }
    return result;
}

/// Index in `order` of the first tensor that a chunk of `at` holds misaligned, or `manifest::npos`.
[[nodiscard]] inline std::size_t first_misaligned(const manifest& parameters,
                                                  std::span<const std::size_t> order,
                                                  chunk_cursor at) {
    for (std::size_t i = 0; i < order.size(); ++i) {
        const auto& parameter = parameters[order[i]];
        if (at.add(parameter.byte_size()) % item_bytes(parameter.dtype) != 0) {
            return i;
        }
    }
    return manifest::npos;
}

/// The order in which no tensor is misaligned. Layer by layer if that suffices: vLLM keeps what it
/// got of a layer until it is complete.
[[nodiscard]] inline sending_order aligned_order(const manifest& parameters,
                                                 const chunk_cursor& at) {
    const auto by_layer = order_of(parameters, sending_order::by_layer);
    return first_misaligned(parameters, by_layer, at) == manifest::npos
               ? sending_order::by_layer
               : sending_order::by_item_size;
}

/// Where calls begin that go on until a tensor would be misaligned.
[[nodiscard]] inline std::vector<std::size_t> aligned_calls(const manifest& parameters,
                                                            chunk_cursor at) {
    std::vector<std::size_t> begins{0};
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto bytes = parameters[i].byte_size();
        if (at.offset_of(bytes) % item_bytes(parameters[i].dtype) != 0) {
            begins.push_back(i);
            at.restart();
        }
        at.add(bytes);
    }
    return begins;
}

/// The refusal of a misaligned tensor that neither another order nor another call may avoid.
[[nodiscard]] inline unsupported_error misaligned_error(const param_meta& parameter) {
    return unsupported_error{
        "this tensor of " + std::string{to_string(parameter.dtype)} +
            " would begin in the packed buffer where vLLM cannot read it; this server takes one "
            "update call a round and the source gives its tensors one after the other: send "
            "unpacked, or from a source with stable addresses, which can be reordered",
        {.phase = phase::plan, .tensor = parameter.name}};
}

/// @throws protocol_error the calls of `layout` begin nowhere in a list of `count`. @param what is
/// sent, for the message.
inline void require_calls(const broadcast_layout& layout, std::size_t count,
                          std::string_view what) {
    const auto& begins = layout.call_begins;
    bool sound = !begins.empty() && begins.front() == 0 && (begins.back() < count || count == 0);
    for (std::size_t i = 1; i < begins.size(); ++i) {
        sound = sound && begins[i] > begins[i - 1] && begins[i] < count;
    }
    if (!sound) {
        throw protocol_error{"the calls of " + std::string{what} +
                                 " have to begin at ascending positions from 0 below " +
                                 std::to_string(count),
                             {.phase = phase::plan}};
    }
}

/// Calls and order of a plan, in words.
[[nodiscard]] inline std::string describe(std::size_t calls, sending_order order) {
    std::string out = calls == 1 ? "one update call" : std::to_string(calls) + " update calls";
    switch (order) {
        case sending_order::manifest: out += " in the source's order"; break;
        case sending_order::by_layer: out += " by descending item size in each layer"; break;
        case sending_order::by_item_size: out += " by descending item size"; break;
    }
    return out;
}

/// @throws unsupported_error torch has not the dtype; names the tensor.
inline void require_torch_dtype(const param_meta& parameter) {
    if (traits_of(parameter.dtype).torch.empty()) {
        throw unsupported_error{"torch has no dtype " + std::string{to_string(parameter.dtype)} +
                                    ", so vLLM cannot take this tensor; send another dtype",
                                {.phase = phase::plan, .tensor = parameter.name}};
    }
}

/// @throws data_error a scalar, which vLLM cannot take packed; names the tensor.
inline void require_dimensions(const param_meta& parameter) {
    if (parameter.shape.empty()) {
        throw data_error{
            "vLLM's packed transfer cannot take a tensor of no dimensions; send unpacked, give "
            "it the shape [1], or set zero_dim_as_one to send it so",
            {.phase = phase::plan, .tensor = parameter.name}};
    }
}

/// Refuses what vLLM's consumer takes in no order.
/// @throws unsupported_error a dtype; @throws data_error a scalar; both name the tensor.
inline void require_python_can_take(const manifest& parameters, const broadcast_options& options) {
    for (const auto& parameter : parameters.parameters()) {
        require_torch_dtype(parameter);
        if (!options.packed && !vllm_unpacked_takes(parameter.dtype)) {
            throw unsupported_error{
                "vLLM names no type of NCCL for " + std::string{to_string(parameter.dtype)} +
                    ", so its unpacked transfer cannot take this tensor; send packed, where "
                    "tensors travel as bytes",
                {.phase = phase::plan, .tensor = parameter.name}};
        }
        if (options.packed && !options.zero_dim_as_one) {
            require_dimensions(parameter);
        }
    }
}

}  // namespace detail

/// How a list of parameters is broadcast. Both sides make the same one: the trainer by choice, a
/// worker of ours from the layout that the trainer chose, or of the list of a vLLM update call.
class broadcast_plan {
public:
    /// Chooses order and calls.
    /// @throws usage_error no buffer. @throws data_error a scalar that vLLM cannot take packed.
    /// @throws unsupported_error a dtype that it cannot take, or a misaligned tensor that neither
    /// another order nor another call may avoid. Both name the tensor.
    broadcast_plan(const manifest& parameters, const broadcast_options& options) {
        require_buffers(options);
        if (options.consumer_needs_alignment) {
            detail::require_python_can_take(parameters, options);
        }
        choose(parameters, options);
        build(parameters, options);
    }
    /// The plan of somebody who chose `layout`; of `options` only the packing counts.
    /// @throws usage_error no buffer. @throws protocol_error calls that begin nowhere in the list.
    broadcast_plan(const manifest& parameters, const broadcast_options& options,
                   broadcast_layout layout)
        : layout_{std::move(layout)}, reason_{"as the sender says"} {
        require_buffers(options);
        detail::require_calls(layout_, parameters.size(), "a broadcast");
        build(parameters, options);
    }

    /// The update calls of a round, at least one; every parameter is in exactly one of them. A
    /// list of none makes one call of none.
    [[nodiscard]] std::span<const broadcast_call> calls() const& noexcept { return calls_; }
    std::span<const broadcast_call> calls() const&& = delete;
    /// Whether tensors travel in another order than the manifest's.
    [[nodiscard]] bool reordered() const noexcept {
        return layout_.order != sending_order::manifest;
    }
    /// What a worker needs to make the same plan.
    [[nodiscard]] const broadcast_layout& layout() const noexcept { return layout_; }
    /// Per rotating buffer: the largest chunk that passes through it, 0 where none does. Empty when
    /// unpacked.
    [[nodiscard]] std::span<const std::uint64_t> buffer_bytes() const& noexcept {
        return buffer_bytes_;
    }
    std::span<const std::uint64_t> buffer_bytes() const&& = delete;
    /// Which buffer chunk `chunk` of any call passes through: each call begins with the first.
    [[nodiscard]] std::size_t buffer_of(std::size_t chunk) const noexcept {
        return buffer_bytes_.empty() ? 0 : chunk % buffer_bytes_.size();
    }
    /// What was chosen and why, one line.
    [[nodiscard]] std::string description() const;

private:
    static void require_buffers(const broadcast_options& options) {
        if (options.packed && options.buffers == 0) {
            throw usage_error{"a packed broadcast needs at least one buffer",
                              {.phase = phase::plan}};
        }
    }
    [[nodiscard]] static detail::chunk_cursor cursor(const broadcast_options& options) noexcept {
        return {detail::chunk_end::after_exceeding, options.buffer_bytes};
    }
    void choose(const manifest& parameters, const broadcast_options& options);
    void build(const manifest& parameters, const broadcast_options& options);

    broadcast_layout layout_{};
    std::vector<broadcast_call> calls_;
    std::vector<std::uint64_t> buffer_bytes_;
    bool packed_ = false;
    std::string reason_;
};

inline void broadcast_plan::choose(const manifest& parameters, const broadcast_options& options) {
    if (!options.packed || !options.consumer_needs_alignment) {
        reason_ = options.packed ? "workers need no alignment" : "a broadcast a tensor";
        return;
    }
    const auto in_order = detail::order_of(parameters, sending_order::manifest);
    const auto first = detail::first_misaligned(parameters, in_order, cursor(options));
    if (first == manifest::npos) {
        reason_ = "every tensor is aligned";
        return;
    }
    reason_ = parameters[first].name + " would be misaligned for vLLM";
    if (options.may_reorder) {
        layout_.order = detail::aligned_order(parameters, cursor(options));
    } else if (options.may_split) {
        layout_.call_begins = detail::aligned_calls(parameters, cursor(options));
    } else {
        throw detail::misaligned_error(parameters[first]);
    }
}

inline void broadcast_plan::build(const manifest& parameters, const broadcast_options& options) {
    packed_ = options.packed;
    buffer_bytes_.assign(options.packed ? options.buffers : 0, 0);
    const auto order = detail::order_of(parameters, layout_.order);
    const auto& begins = layout_.call_begins;
    calls_.reserve(begins.size());
    for (std::size_t i = 0; i < begins.size(); ++i) {
        const auto end = i + 1 < begins.size() ? begins[i + 1] : order.size();
        const auto share = std::span{order}.subspan(begins[i], end - begins[i]);
        auto& call = calls_.emplace_back(broadcast_call{.order = {share.begin(), share.end()}});
        if (options.packed) {
            call.chunks = detail::cut_chunks(
                share.size(), [&](std::size_t k) { return parameters[share[k]].byte_size(); },
                cursor(options));
        }
        const auto& chunks = call.chunks;
        for (std::size_t k = 0; k < chunks.size(); ++k) {
            auto& buffer = buffer_bytes_[buffer_of(k)];
            buffer = std::max(buffer, chunks[k].bytes);
        }
    }
}

inline std::string broadcast_plan::description() const {
    std::size_t chunks = 0;
    for (const auto& call : calls_) {
        chunks += call.chunks.size();
    }
    std::string out = packed_ ? "packed in " + std::to_string(chunks) + " chunks" : "unpacked";
    return out + ", " + detail::describe(calls_.size(), layout_.order) + ": " + reason_;
}

}  // namespace weightwire::plan
