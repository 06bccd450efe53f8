#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/declared_parameters.hpp>

/// @file
/// The parameters that a session writes, each with its two storages.

namespace weightwire::detail {

/// Storages of one parameter. Slot 0 is where it was made; slot 1 its second storage or staging.
using parameter_slots = std::array<mutable_tensor_view, 2>;

/// A view of those parameters of a session that are placed: what a table's memory copies or
/// exchanges. Two words and two sizes; always in the order of the session.
class placed_parameters {
public:
    /// @param entries the table's, by parameter.
    placed_parameters(std::span<const declared_parameters::placement> session,
                      std::span<const parameter_slots> entries) noexcept
        : session_{session}, entries_{entries} {}

    /// Calls `visit(slots)` for each. Ends where `visit` returns false.
    /// @returns whether all were visited.
    template <class Visit>
    bool all(Visit&& visit) const {
        return std::all_of(session_.begin(), session_.end(), [&](const auto& each) {
            return each.kind != destination::kind_type::place || visit(entries_[each.parameter]);
        });
    }

    /// Bytes of one side.
    [[nodiscard]] std::uint64_t bytes() const noexcept {
        std::uint64_t sum = 0;
        all([&](const parameter_slots& slots) {
            sum += slots[0].byte_size();
            return true;
        });
        return sum;
    }

private:
    std::span<const declared_parameters::placement> session_;
    std::span<const parameter_slots> entries_;
};

}  // namespace weightwire::detail
