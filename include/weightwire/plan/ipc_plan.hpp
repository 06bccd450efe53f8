#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/broadcast_plan.hpp>
#include <weightwire/plan/packing.hpp>

/// @file
/// In which order and update calls a list of parameters is handed over through memory that the
/// worker opens (vLLM wire sections 4.5 and 6.8). Made once from the metadata.
///
/// A tensor is read where the trainer has it, or passes through one of the buffers that rotate. A
/// buffer holds no more than one call, and the reply to the call is what frees it.

namespace weightwire::plan {

/// What a plan has to respect.
struct ipc_options {
    bool packed = false;             ///< every tensor passes through the buffers
    std::uint64_t buffer_bytes = 0;  ///< of one buffer; counts where anything passes through them
    std::size_t buffers = 2;         ///< that rotate; vLLM's wire has one
    /// A consumer is vLLM's in Python: packed, it views each tensor where it lies in the buffer.
    bool consumer_needs_alignment = false;
    bool may_reorder = false;      ///< all tensors are there at once (stable addresses)
    bool may_split = true;         ///< several update calls a round (not towards 0.17 to 0.20)
    bool zero_dim_as_one = false;  ///< the user's opt-in: `[]` is sent as `[1]`
};

/// One update call's share of a round.
struct ipc_call {
    std::vector<std::size_t> order{};  ///< manifest positions in wire order
    /// Where each begins in the buffer; `ipc_plan::in_place` of one that does not pass through it.
    std::vector<std::uint64_t> offsets{};
    std::uint64_t staged_bytes = 0;  ///< what the buffer holds of this call
    std::size_t buffer = 0;          ///< index of the rotating buffer
};

namespace detail {

/// The largest item size in bytes.
inline constexpr std::size_t widest_item = 16;
static_assert(std::ranges::all_of(dtype_table, [](const dtype_traits& row) {
    return widest_item % item_bytes(row.value) == 0;
}));

/// Position after the last that one packed call can hold that begins at each position: all that
/// fits and is aligned. The position itself where nothing that follows has bytes, since such a call
/// is not sent.
[[nodiscard]] inline std::vector<std::size_t> call_reaches(const manifest& parameters,
                                                           std::uint64_t buffer_bytes) {
    const auto count = parameters.size();
    std::vector<std::size_t> reaches(count);
    // Bytes before the call and before its end, and for each remainder of the former the first
    // tensor that would be misaligned.
    std::uint64_t begin = parameters.total_bytes();
    std::uint64_t end = begin;
    std::array<std::size_t, widest_item> misaligned{};
    misaligned.fill(count);
    auto room = count;
    for (auto i = count; i-- > 0;) {
        const auto item = item_bytes(parameters[i].dtype);
        begin -= parameters[i].byte_size();
        for (std::size_t remainder = 0; remainder < widest_item; ++remainder) {
            if ((begin - remainder) % item != 0) {  // exact also below 0: 2^64 is a multiple
                misaligned[remainder] = i;
            }
        }
        while (end - begin > buffer_bytes) {
            end -= parameters[--room].byte_size();
        }
        const bool is_sent = begin < parameters.total_bytes();
        reaches[i] = is_sent ? std::min(room, misaligned[begin % widest_item]) : i;
    }
    return reaches;
}

/// Where packed calls in the manifest's order have to begin so that no tensor is misaligned: as few
/// as there can be. For a list that has bytes, each tensor of which fits the buffer.
/// @throws data_error tensors without bytes at the end fit no call that has bytes.
[[nodiscard]] inline std::vector<std::size_t> fewest_calls(const manifest& parameters,
                                                           std::uint64_t buffer_bytes) {
    const auto reaches = call_reaches(parameters, buffer_bytes);
    std::vector<std::size_t> begins{0};
    std::size_t next = 1;
    for (auto end = reaches[0]; end < parameters.size(); end = reaches[begins.back()]) {
        // What fits a call also fits one that ends earlier: the next may begin at all of these.
        auto best = next;
        for (; next <= end; ++next) {
            best = reaches[next] >= reaches[best] ? next : best;
        }
        if (reaches[best] <= end) {
            throw data_error{
                "this tensor has no bytes, and where its neighbours end in the packed buffer vLLM "
                "could not read it; leave it out, or send unpacked",
                {.phase = phase::plan, .tensor = parameters[end].name}};
        }
        begins.push_back(best);
    }
    return begins;
}

}  // namespace detail

/// How a list of parameters is handed over. Both sides make the same one: the trainer by choice, a
/// worker of ours from the layout that the trainer chose.
///
/// Packed, tensors lie in a buffer one after the other, as the wire has it. Unpacked, those that
/// pass through a buffer begin at multiples of `alignment`, since consumers use them where they
/// are; every message says where that is. A call ends before the buffer would have to hold more
/// than its size; what is read in place takes no room.
class ipc_plan {
public:
    /// The offset of a tensor that does not pass through a buffer.
    static constexpr std::uint64_t in_place = std::numeric_limits<std::uint64_t>::max();
    /// Of offsets, unpacked, in bytes: what the widest load of a GPU needs.
    static constexpr std::uint64_t alignment = 16;

    /// Chooses order and calls.
    /// @param staged one a parameter, not 0: passes through a buffer. Where packed all do, and this
    /// counts for nothing.
    /// @throws usage_error no buffer where one is needed, or not one flag a parameter.
    /// @throws data_error a tensor larger than the buffer, or what vLLM cannot take packed: a
    /// scalar, or a tensor without bytes that has no neighbour to travel with.
    /// @throws unsupported_error a dtype that torch has not, a misaligned tensor that neither
    /// another order nor another call may avoid, or too much for the one call there may be. All
    /// name the tensor.
    ipc_plan(const manifest& parameters, const ipc_options& options,
             std::span<const unsigned char> staged) {
        require_usable(parameters, options, staged);
        require_possible(parameters, options, staged);
        choose(parameters, options, staged);
        build(parameters, options, staged);
    }
    /// The plan of somebody who chose `layout`; of `options` only `packed` and the buffers count.
    /// @throws usage_error as above. @throws protocol_error calls that begin nowhere in the list,
    /// or one that does not fit the buffer.
    ipc_plan(const manifest& parameters, const ipc_options& options,
             std::span<const unsigned char> staged, broadcast_layout layout)
        : layout_{std::move(layout)}, reason_{"as the sender says"} {
        require_usable(parameters, options, staged);
        detail::require_calls(layout_, parameters.size(), "a round");
        build(parameters, options, staged);
    }

    /// The update calls of a round, at least one; every parameter is in exactly one of them, one
    /// without bytes in a neighbour's. Of several, each has staged bytes, as the sender chooses
    /// them. A list of none makes one call of none.
    [[nodiscard]] std::span<const ipc_call> calls() const& noexcept { return calls_; }
    std::span<const ipc_call> calls() const&& = delete;
    /// Whether tensors travel in another order than the manifest's.
    [[nodiscard]] bool reordered() const noexcept {
        return layout_.order != sending_order::manifest;
    }
    /// What a worker needs to make the same plan.
    [[nodiscard]] const broadcast_layout& layout() const noexcept { return layout_; }
    /// The most that each buffer holds, in bytes, for those that are used: the first ones.
    [[nodiscard]] std::span<const std::uint64_t> buffer_bytes() const& noexcept {
        return buffer_bytes_;
    }
    std::span<const std::uint64_t> buffer_bytes() const&& = delete;
    /// What was chosen and why, one line.
    [[nodiscard]] std::string description() const;

private:
    [[nodiscard]] static bool passes(const ipc_options& options,
                                     std::span<const unsigned char> staged,
                                     std::size_t position) noexcept {
        return options.packed || staged[position] != 0;
    }
    [[nodiscard]] static detail::chunk_cursor cursor(bool packed,
                                                     std::uint64_t buffer_bytes) noexcept {
        return {detail::chunk_end::before_exceeding, buffer_bytes, packed ? 1 : alignment};
    }
    static void require_usable(const manifest& parameters, const ipc_options& options,
                               std::span<const unsigned char> staged);
    static void require_possible(const manifest& parameters, const ipc_options& options,
                                 std::span<const unsigned char> staged);
    void choose(const manifest& parameters, const ipc_options& options,
                std::span<const unsigned char> staged);
    void align(const manifest& parameters, const ipc_options& options);
    void cut(const manifest& parameters, const ipc_options& options,
             std::span<const unsigned char> staged);
    void build(const manifest& parameters, const ipc_options& options,
               std::span<const unsigned char> staged);
    [[nodiscard]] static ipc_call place(const manifest& parameters, const ipc_options& options,
                                        std::span<const unsigned char> staged,
                                        std::span<const std::size_t> order, std::size_t index);

    broadcast_layout layout_{};
    std::vector<ipc_call> calls_;
    std::vector<std::uint64_t> buffer_bytes_;
    std::size_t staged_ = 0;  // tensors
    bool packed_ = false;
    std::string reason_;
};

inline void ipc_plan::require_usable(const manifest& parameters, const ipc_options& options,
                                     std::span<const unsigned char> staged) {
    if (!options.packed && staged.size() != parameters.size()) {
        throw usage_error{"of " + std::to_string(parameters.size()) +
                              " parameters the plan is told for " + std::to_string(staged.size()) +
                              " whether they pass through a buffer; one flag a parameter is needed",
                          {.phase = phase::plan}};
    }
    const bool any = options.packed || std::ranges::any_of(staged, [](auto flag) { return flag; });
    if (any && options.buffers == 0) {
        throw usage_error{"tensors that pass through buffers need at least one",
                          {.phase = phase::plan}};
    }
}

inline void ipc_plan::require_possible(const manifest& parameters, const ipc_options& options,
                                       std::span<const unsigned char> staged) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (options.consumer_needs_alignment) {
            detail::require_torch_dtype(parameters[i]);
            if (options.packed && !options.zero_dim_as_one) {
                detail::require_dimensions(parameters[i]);
            }
        }
        if (passes(options, staged, i)) {
            detail::require_fits(parameters[i], options.buffer_bytes);
        }
    }
    if (options.packed && options.consumer_needs_alignment && parameters.size() > 0 &&
        parameters.total_bytes() == 0) {
        throw data_error{
            "no tensor of this list has bytes, and a packed transfer to vLLM sends none such; send "
            "unpacked",
            {.phase = phase::plan, .tensor = parameters[0].name}};
    }
}

inline void ipc_plan::choose(const manifest& parameters, const ipc_options& options,
                             std::span<const unsigned char> staged) {
    if (options.packed && options.consumer_needs_alignment) {
        align(parameters, options);
    } else {
        reason_ =
            options.packed ? "workers need no alignment" : "what needs no buffer is read in place";
    }
    if (layout_.call_begins.size() == 1) {
        cut(parameters, options, staged);
    }
}

/// Packed towards vLLM: no tensor may be misaligned.
inline void ipc_plan::align(const manifest& parameters, const ipc_options& options) {
    const auto at = cursor(true, options.buffer_bytes);
    const auto in_order = detail::order_of(parameters, sending_order::manifest);
    const auto first = detail::first_misaligned(parameters, in_order, at);
    if (first == manifest::npos) {
        reason_ = "every tensor is aligned";
        return;
    }
    reason_ = parameters[first].name + " would be misaligned for vLLM";
    if (options.may_reorder) {
        layout_.order = detail::aligned_order(parameters, at);
    } else if (options.may_split) {
        layout_.call_begins = detail::fewest_calls(parameters, options.buffer_bytes);
    } else {
        throw detail::misaligned_error(parameters[first]);
    }
}

/// Begins a call wherever the buffer has no room for the next tensor.
inline void ipc_plan::cut(const manifest& parameters, const ipc_options& options,
                          std::span<const unsigned char> staged) {
    auto at = cursor(options.packed, options.buffer_bytes);
    auto whole = cursor(options.packed, in_place);
    const auto order = detail::order_of(parameters, layout_.order);
    for (std::size_t i = 0; i < order.size(); ++i) {
        if (!passes(options, staged, order[i])) {
            continue;
        }
        const auto bytes = parameters[order[i]].byte_size();
        if (at.closes_before(bytes)) {
            layout_.call_begins.push_back(i);
        }
        at.add(bytes);
        whole.add(bytes);
    }
    if (layout_.call_begins.size() > 1 && !options.may_split) {
        const auto& parameter = parameters[order[layout_.call_begins[1]]];
        throw unsupported_error{
            "this tensor has no room in the buffer of " + std::to_string(options.buffer_bytes) +
                " bytes beside those before it, and this server takes one update call a round; set "
                "the buffer size to at least " +
                std::to_string(whole.filled()),
            {.phase = phase::plan, .tensor = parameter.name, .bytes_total = whole.filled()}};
    }
}

/// Call `index`, of the parameters in `order`.
inline ipc_call ipc_plan::place(const manifest& parameters, const ipc_options& options,
                                std::span<const unsigned char> staged,
                                std::span<const std::size_t> order, std::size_t index) {
    ipc_call call{.order = {order.begin(), order.end()}};
    call.offsets.reserve(order.size());
    auto at = cursor(options.packed, options.buffer_bytes);
    for (const auto position : order) {
        if (!passes(options, staged, position)) {
            call.offsets.push_back(in_place);
            continue;
        }
        const auto bytes = parameters[position].byte_size();
        if (bytes > options.buffer_bytes || at.closes_before(bytes)) {
            throw protocol_error{
                "update call " + std::to_string(index) +
                    " has no room for this tensor in its buffer of " +
                    std::to_string(options.buffer_bytes) +
                    " bytes; both sides need the same buffer size and the same calls",
                {.phase = phase::plan, .tensor = parameters[position].name, .bytes_total = bytes}};
        }
        call.offsets.push_back(at.add(bytes));
    }
    call.staged_bytes = at.filled();
    return call;
}

inline void ipc_plan::build(const manifest& parameters, const ipc_options& options,
                            std::span<const unsigned char> staged) {
    packed_ = options.packed;
    const auto order = detail::order_of(parameters, layout_.order);
    const auto& begins = layout_.call_begins;
    calls_.reserve(begins.size());
    for (std::size_t i = 0; i < begins.size(); ++i) {
        const auto end = i + 1 < begins.size() ? begins[i + 1] : order.size();
        const auto share = std::span{order}.subspan(begins[i], end - begins[i]);
        auto& call = calls_.emplace_back(place(parameters, options, staged, share, i));
        staged_ += static_cast<std::size_t>(
            std::ranges::count_if(call.offsets, [](auto offset) { return offset != in_place; }));
        if (call.staged_bytes > 0) {
            call.buffer = i % options.buffers;
            buffer_bytes_.resize(std::max(buffer_bytes_.size(), call.buffer + 1));
            auto& most = buffer_bytes_[call.buffer];
            most = std::max(most, call.staged_bytes);
        }
    }
}

inline std::string ipc_plan::description() const {
    const std::string how =
        packed_ ? "packed" : "unpacked, " + std::to_string(staged_) + " tensors through buffers";
    return how + ", " + detail::describe(calls_.size(), layout_.order) + ": " + reason_;
}

}  // namespace weightwire::plan
