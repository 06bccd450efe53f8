#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include <weightwire/core/error.hpp>
#include <weightwire/plan/recording_tensor.hpp>

/// @file
/// Ready loaders: what a worker's rank takes of each kind of parameter. Each records copies from
/// tensors of the checkpoint to one of the worker; a loader of one's own mixes them with views.
///
/// Shapes are those of the weight of a linear layer, `[out, in]`. What cuts dimension 0 alone takes
/// biases `[out]` and block scales `[out / b, in / b]` as well.

namespace weightwire::plan::loaders {

/// Which part of how many.
struct shard {
    std::int64_t rank = 0;
    std::int64_t count = 1;
};

/// What happens to an extent that `count` ranks cannot share equally.
enum class uneven : std::uint8_t {
    refuse,           ///< it is an error
    last_is_smaller,  ///< as `chunk`: all take the quotient rounded up, while there are any
    first_is_larger,  ///< the first take one more than the others, as many as remain
};

/// Elements `[begin, begin + length)` of a dimension.
struct share {
    std::int64_t begin = 0;
    std::int64_t length = 0;
    friend constexpr bool operator==(const share&, const share&) = default;
};

namespace detail {

[[noreturn]] inline void refuse(std::string_view loader, const recording_tensor& tensor,
                                const std::string& why) {
    throw usage_error{
        why + "; it is " + to_string(tensor.shape()) +
            (tensor.chain().empty() ? "" : " made by " + tensor.chain()),
        {.phase = phase::plan, .tensor = tensor.name(), .operation = std::string{loader}}};
}

inline void require_shard(std::string_view loader, const recording_tensor& tensor,
                          const shard& part) {
    if (part.count < 1 || part.rank < 0 || part.rank >= part.count) {
        refuse(loader, tensor,
               "rank " + std::to_string(part.rank) + " of " + std::to_string(part.count) +
                   " does not exist");
    }
}

inline void require_dimensions(std::string_view loader, const recording_tensor& tensor,
                               std::int64_t count) {
    if (tensor.dim() < count) {
        refuse(loader, tensor, "it needs at least " + std::to_string(count) + " dimensions");
    }
}

}  // namespace detail

/// The elements of a dimension of `extent` that a rank takes, which may be none. `uneven::refuse`
/// is the same as `last_is_smaller` here: the caller refuses, who knows what the extent is of.
[[nodiscard]] constexpr share share_of(std::int64_t extent, const shard& part,
                                       uneven rule = uneven::last_is_smaller) noexcept {
    if (rule == uneven::first_is_larger) {
        const auto each = extent / part.count;
        const auto larger = extent % part.count;
        return {part.rank * each + std::min(part.rank, larger),
                each + (part.rank < larger ? 1 : 0)};
    }
    const auto each = extent / part.count + (extent % part.count == 0 ? 0 : 1);
    const auto begin = std::min(part.rank * each, extent);
    return {begin, std::min(each, extent - begin)};
}

/// The part of dimension `dimension` of `tensor` that a rank takes.
/// @throws usage_error `tensor` has no such dimension, the rank does not exist, or the split is
/// uneven and `rule` refuses; names the tensor.
[[nodiscard]] inline recording_tensor part_of(const recording_tensor& tensor,
                                              std::int64_t dimension, const shard& part,
                                              uneven rule = uneven::refuse,
                                              std::string_view loader = "part_of") {
    detail::require_shard(loader, tensor, part);
    const auto extent = tensor.size(dimension);
    if (rule == uneven::refuse && extent % part.count != 0) {
        detail::refuse(loader, tensor,
                       "dimension " + std::to_string(dimension) + " has " + std::to_string(extent) +
                           " elements, which " + std::to_string(part.count) +
                           " ranks cannot share equally; choose another number of ranks, or allow "
                           "an uneven split");
    }
    const auto taken = share_of(extent, part, rule);
    return tensor.narrow(dimension, taken.begin, taken.length);
}

/// Every rank has all of it: norms, routers, biases of row-parallel layers. Equal shapes.
inline void replicated(const recording_tensor& source, const recording_tensor& destination) {
    source.copy_to(destination);
}

/// Ranks share the outputs. Source `[out, …]`, destination `[out / count, …]`.
/// @throws usage_error the split is uneven and `rule` refuses, or the destination has another
/// shape.
inline void column_parallel(const recording_tensor& source, const recording_tensor& destination,
                            const shard& part, uneven rule = uneven::refuse) {
    part_of(source, 0, part, rule, "column_parallel").copy_to(destination);
}

/// Ranks share the inputs. Source `[out, in]`, destination `[out, in / count]`.
/// @throws usage_error as `column_parallel`.
inline void row_parallel(const recording_tensor& source, const recording_tensor& destination,
                         const shard& part, uneven rule = uneven::refuse) {
    part_of(source, 1, part, rule, "row_parallel").copy_to(destination);
}

/// Numbers of heads of an attention layer; fewer heads of keys and values is grouped-query
/// attention.
struct attention_heads {
    std::int64_t query = 1;
    std::int64_t key_value = 1;
};

/// Query, key and value in one parameter, by whole heads. Where there are fewer heads of keys and
/// values than ranks, neighbouring ranks have the same one.
///
/// Sources `[query heads * h, …]` and twice `[key-value heads * h, …]`, destination
/// `[(query heads / count + 2 * max(1, key-value heads / count)) * h, …]`: queries, then keys, then
/// values. Rows are cut alone, so biases and block scales pass as well where each head has whole
/// blocks.
/// @throws usage_error heads that ranks cannot share, rows that are no whole heads, or a
/// destination of another shape; names the parameter.
inline void fused_qkv(const recording_tensor& query, const recording_tensor& key,
                      const recording_tensor& value, const recording_tensor& destination,
                      const attention_heads& heads, const shard& part) {
    constexpr std::string_view loader = "fused_qkv";
    detail::require_shard(loader, destination, part);
    std::int64_t row = 0;
    const auto take = [&](const recording_tensor& source, std::int64_t count, bool may_repeat) {
        const bool repeats = may_repeat && count > 0 && count < part.count;
        if (count < 1 || (repeats ? part.count % count : count % part.count) != 0) {
            detail::refuse(loader, source,
                           std::to_string(count) + " heads cannot be shared by " +
                               std::to_string(part.count) + " ranks");
        }
        if (source.size(0) % count != 0) {
            detail::refuse(loader, source,
                           "its rows are no " + std::to_string(count) + " heads of equal size");
        }
        const auto sharing = repeats ? part.count / count : 1;
        const auto piece =
            part_of(source, 0, {part.rank / sharing, part.count / sharing}, uneven::refuse, loader);
        const auto rows = piece.size(0);
        if (row + rows > destination.size(0)) {
            detail::refuse(loader, destination, "it has too few rows for what a rank takes");
        }
        piece.copy_to(destination.narrow(0, row, rows));
        row += rows;
    };
    take(query, heads.query, false);
    take(key, heads.key_value, true);
    take(value, heads.key_value, true);
    if (row != destination.size(0)) {
        detail::refuse(loader, destination,
                       "it has more than the " + std::to_string(row) + " rows that a rank takes");
    }
}

/// Gate and up in one parameter. Sources `[inner, …]` each, destination `[2 * inner / count, …]`:
/// the rank's gate, then its up.
/// @throws usage_error as `column_parallel`.
inline void fused_gate_up(const recording_tensor& gate, const recording_tensor& up,
                          const recording_tensor& destination, const shard& part,
                          uneven rule = uneven::refuse) {
    constexpr std::string_view loader = "fused_gate_up";
    const auto gate_part = part_of(gate, 0, part, rule, loader);
    const auto up_part = part_of(up, 0, part, rule, loader);
    if (destination.size(0) != gate_part.size(0) + up_part.size(0)) {
        detail::refuse(loader, destination,
                       "it should have " + std::to_string(gate_part.size(0) + up_part.size(0)) +
                           " rows, the rank's gate and up");
    }
    gate_part.copy_to(destination.narrow(0, 0, gate_part.size(0)));
    up_part.copy_to(destination.narrow(0, gate_part.size(0), up_part.size(0)));
}

/// One expert of a checkpoint that has each by itself.
struct expert_sources {
    recording_tensor gate;  ///< `[inner, hidden]`
    recording_tensor up;    ///< `[inner, hidden]`
    recording_tensor down;  ///< `[hidden, inner]`
};

/// The experts of one layer, stacked, of a checkpoint that has each by itself.
///
/// Destinations `[experts / expert_part.count, 2 * inner / tensor_part.count, hidden]` and
/// `[experts / expert_part.count, hidden, inner / tensor_part.count]`. Experts may be uneven (the
/// last ranks have fewer, as many as the destinations hold) where `rule` says so.
/// @param open `open(expert)` returns the `expert_sources`; called for the rank's experts alone.
/// @throws usage_error what ranks cannot share, or destinations of other shapes.
template <std::invocable<std::int64_t> Open>
    requires std::same_as<std::invoke_result_t<Open&, std::int64_t>, expert_sources>
void stacked_experts(Open&& open, const recording_tensor& gate_up, const recording_tensor& down,
                     std::int64_t experts, const shard& expert_part, const shard& tensor_part = {},
                     uneven rule = uneven::refuse) {
    constexpr std::string_view loader = "stacked_experts";
    detail::require_shard(loader, gate_up, expert_part);
    if (rule == uneven::refuse && experts % expert_part.count != 0) {
        detail::refuse(loader, gate_up,
                       std::to_string(experts) + " experts cannot be shared equally by " +
                           std::to_string(expert_part.count) + " ranks");
    }
    const auto mine = share_of(experts, expert_part, rule);
    for (const auto* stacked : {&gate_up, &down}) {
        detail::require_dimensions(loader, *stacked, 1);
        if (stacked->size(0) != mine.length) {
            detail::refuse(loader, *stacked,
                           "it should have room for " + std::to_string(mine.length) + " experts");
        }
    }
    for (std::int64_t local = 0; local < mine.length; ++local) {
        const expert_sources sources = open(mine.begin + local);
        fused_gate_up(sources.gate, sources.up, gate_up[local], tensor_part);
        row_parallel(sources.down, down[local], tensor_part);
    }
}

/// How a checkpoint has gate and up in one dimension.
enum class gate_up_order : std::uint8_t {
    gate_then_up,  ///< all of gate, then all of up
    interleaved,   ///< gate, up, gate, up, …
};

/// The experts of one layer, of a checkpoint that has all in two transposed tensors:
/// `[experts, hidden, 2 * inner]` and `[experts, inner, hidden]`. Destinations as those of
/// `stacked_experts`, not transposed and with all of the rank's gate before its up.
/// @throws usage_error as `stacked_experts`.
inline void transposed_experts(const recording_tensor& source_gate_up,
                               const recording_tensor& source_down, const recording_tensor& gate_up,
                               const recording_tensor& down, const shard& expert_part,
                               const shard& tensor_part = {},
                               gate_up_order order = gate_up_order::gate_then_up,
                               uneven rule = uneven::refuse) {
    constexpr std::string_view loader = "transposed_experts";
    for (const auto* tensor : {&source_gate_up, &source_down, &gate_up, &down}) {
        detail::require_dimensions(loader, *tensor, 3);
    }
    if (source_gate_up.size(2) % 2 != 0) {
        detail::refuse(loader, source_gate_up, "gate and up do not have equally many columns");
    }
    const auto both = part_of(source_gate_up, 0, expert_part, rule, loader).transpose(1, 2);
    const auto inner = both.size(1) / 2;
    const bool in_turn = order == gate_up_order::interleaved;
    const auto gate = in_turn ? both.slice(1, 0, {}, 2) : both.narrow(1, 0, inner);
    const auto up = in_turn ? both.slice(1, 1, {}, 2) : both.narrow(1, inner, inner);
    const auto rows = part_of(gate, 1, tensor_part, uneven::refuse, loader).size(1);
    if (gate_up.size(1) != 2 * rows) {
        detail::refuse(loader, gate_up,
                       "it should have " + std::to_string(2 * rows) +
                           " rows an expert, the rank's gate and up");
    }
    part_of(gate, 1, tensor_part, uneven::refuse, loader).copy_to(gate_up.narrow(1, 0, rows));
    part_of(up, 1, tensor_part, uneven::refuse, loader).copy_to(gate_up.narrow(1, rows, rows));
    part_of(part_of(source_down, 0, expert_part, rule, loader), 1, tensor_part, uneven::refuse,
            loader)
        .transpose(1, 2)
        .copy_to(down);
}

/// Rows of an embedding or of a head, shared by ranks that each have equally many. Source
/// `[at least vocabulary, …]`, destination `[rows, …]`: rank r has rows `[r * rows, (r + 1) *
/// rows)` of the vocabulary. Rows beyond it are padding: they are not read, also where the source
/// has them, and stay untouched in the destination.
/// @throws usage_error the ranks have no room for the vocabulary, or the source is smaller than it.
inline void vocabulary_parallel(const recording_tensor& source, const recording_tensor& destination,
                                std::int64_t vocabulary, const shard& part) {
    constexpr std::string_view loader = "vocabulary_parallel";
    detail::require_shard(loader, destination, part);
    const auto rows = destination.size(0);
    if (vocabulary < 0 || vocabulary > source.size(0)) {
        detail::refuse(loader, source,
                       "it has fewer rows than the vocabulary of " + std::to_string(vocabulary));
    }
    if (vocabulary > 0 && (vocabulary - 1) / part.count >= rows) {
        detail::refuse(loader, destination,
                       std::to_string(part.count) + " ranks with so many rows have no room for " +
                           std::to_string(vocabulary));
    }
    const auto begin = std::min(part.rank * rows, vocabulary);
    const auto length = std::min(rows, vocabulary - begin);
    source.narrow(0, begin, length).copy_to(destination.narrow(0, 0, length));
    destination.narrow(0, length, rows - length).leave_untouched();
}

}  // namespace weightwire::plan::loaders
