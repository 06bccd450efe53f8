#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/declared_parameters.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

/// @file
/// Parameters in memory that the user owns, and the proof that no two of them share a byte.

namespace weightwire {

/// A parameter where the user keeps it.
struct user_parameter {
    std::string name;
    mutable_tensor_view where;
};

/// The list of parameters that `memory` holds, in its order.
/// @throws data_error a name twice or empty.
[[nodiscard]] inline manifest manifest_of(std::span<const user_parameter> memory) {
    std::vector<param_meta> parameters;
    parameters.reserve(memory.size());
    for (const auto& each : memory) {
        parameters.push_back({each.name, each.where.type(), each.where.extents()});
    }
    return manifest{std::move(parameters)};
}

namespace detail {

/// A piece of memory and whose it is.
struct owned_run {
    const std::byte* first;
    const std::byte* last;  ///< past the end
    std::size_t owner;
};

[[noreturn]] inline void refuse_memory(std::string_view text, const std::string& name) {
    throw usage_error{text, {.tensor = name, .operation = "table over user memory"}};
}

/// Sorts `runs` and calls `clash(a, b)` on neighbours that share a byte. The furthest end so far is
/// compared, so that a long run is not hidden behind a short one.
template <class Clash>
void for_each_clash(std::vector<owned_run>& runs, Clash&& clash) {
    std::ranges::sort(runs, std::less<>{}, &owned_run::first);
    for (std::size_t i = 1, furthest = 0; i < runs.size(); ++i) {
        if (std::less<>{}(runs[i].first, runs[furthest].last)) {
            clash(runs[furthest], runs[i]);
        }
        if (std::less<>{}(runs[furthest].last, runs[i].last)) {
            furthest = i;
        }
    }
}

/// The span of memory between a tensor's first and last byte.
[[nodiscard]] inline owned_run hull_of(const mutable_tensor_view& tensor, std::size_t owner) {
    std::int64_t low = 0;
    std::int64_t high = 1;
    for (std::size_t d = 0; d < tensor.extents().size(); ++d) {
        const auto reach = tensor.strides()[d] * (tensor.extents()[d] - 1);
        (reach < 0 ? low : high) += reach;
    }
    const auto item = static_cast<std::int64_t>(item_bits(tensor.type()) / 8);
    if (tensor.is_contiguous()) {
        return {tensor.data(), tensor.data() + tensor.byte_size(), owner};
    }
    return {tensor.data() + low * item, tensor.data() + high * item, owner};
}

/// Whoever moves the memory of a device keeps a table with an entry a run: for a matrix that is
/// transposed element by element it would be larger than the matrix.
inline void require_few_runs(const user_parameter& parameter) {
    constexpr std::size_t most = std::size_t{1} << 20U;
    const auto& where = parameter.where;
    const auto run = static_cast<std::size_t>(fold_runs(where.extents(), where.strides()).run);
    const auto item = item_bits(where.type()) / 8;
    if (!where.is_contiguous() && where.byte_size() / (run * item) > most) {
        throw unsupported_error{
            "it lies in more than 2^20 runs of device memory; keep its innermost dimension "
            "contiguous",
            {.tensor = parameter.name, .operation = "table over user memory"}};
    }
}

}  // namespace detail

/// Checks memory that a sink is to write to.
/// @param home where all of it must be.
/// @throws usage_error null memory, a strided tensor of 6-bit items, or a byte that two parameters
/// or one parameter twice would write; names the tensor.
/// @throws unsupported_error memory elsewhere, or a tensor of a device in more than 2^20 runs.
inline void require_distinct_memory(std::span<const user_parameter> memory, device home = {}) {
    std::vector<detail::owned_run> hulls;
    std::vector<std::uint8_t> suspect(memory.size(), 0);
    for (std::size_t i = 0; i < memory.size(); ++i) {
        const auto& [name, where] = memory[i];
        if (where.device() != home) {
            throw unsupported_error{home.kind == memory_kind::host
                                        ? std::string{"a parameter table holds host memory only"}
                                        : "this table holds memory of CUDA device " +
                                              std::to_string(home.index) + " only",
                                    {.tensor = name, .operation = "table over user memory"}};
        }
        if (where.byte_size() == 0) {
            continue;
        }
        if (where.data() == nullptr) {
            detail::refuse_memory("its address is null", name);
        }
        if (!where.is_contiguous() && item_bits(where.type()) % 8 != 0) {
            detail::refuse_memory("items of 6 bits cannot be strided", name);
        }
        if (home.kind != memory_kind::host) {
            detail::require_few_runs(memory[i]);
        }
        // A tensor with strides may write one of its own bytes twice.
        suspect[i] = where.is_contiguous() ? 0 : 1;
        hulls.push_back(detail::hull_of(where, i));
    }
    // Hulls that touch need not share a byte (two columns of one matrix): look at their runs.
    detail::for_each_clash(
        hulls, [&](const auto& a, const auto& b) { suspect[a.owner] = suspect[b.owner] = 1; });
    std::vector<detail::owned_run> runs;
    for (std::size_t i = 0; i < memory.size(); ++i) {
        if (suspect[i] != 0) {
            for_each_run(memory[i].where, [&](const std::byte* first, std::size_t bytes) {
                runs.push_back({first, first + bytes, i});
            });
        }
    }
    detail::for_each_clash(runs, [&](const auto& a, const auto& b) {
        detail::refuse_memory("its memory overlaps that of " + memory[a.owner].name +
                                  "; declare one an alias of the other, or separate them",
                              memory[b.owner].name);
    });
}

/// Takes out of `memory` the second names of tied weights, which may be listed where they are
/// declared.
/// @throws usage_error an alias that lies elsewhere than its owner.
inline void drop_tied_copies(const declared_parameters& parameters,
                             std::vector<user_parameter>& memory) {
    for (std::size_t i = 0; i < memory.size(); ++i) {
        const auto owner = parameters.owner(i);
        const auto& where = memory[i].where;
        const auto& owned = memory[owner].where;
        if (owner != i && (where.data() != owned.data() || where.strides() != owned.strides())) {
            detail::refuse_memory(
                "it is an alias of " + memory[owner].name + ", but lies elsewhere", memory[i].name);
        }
    }
    std::size_t i = 0;
    std::erase_if(memory, [&](const user_parameter&) {
        const auto at = i++;
        return parameters.owner(at) != at;
    });
}

}  // namespace weightwire
