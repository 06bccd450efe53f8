#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <string>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/checked.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/sinks/declared_parameters.hpp>
#include <weightwire/sinks/host_storage.hpp>
#include <weightwire/sinks/parameter_table_options.hpp>

/// @file
/// How much memory a parameter table takes, and the commit mode that its budget allows.

namespace weightwire::detail {

/// Mode and sizes of one table, decided when it is made.
struct table_budget {
    commit_mode mode = commit_mode::flip;
    std::uint64_t live_bytes = 0;
    std::uint64_t staging_bytes = 0;  ///< at most
};

/// Bytes of the live weights and of a second storage for all that updates write.
[[nodiscard]] inline table_budget measured(const declared_parameters& catalog) {
    storage_layout live;
    storage_layout staging;
    for (std::size_t i = 0; i < catalog.size(); ++i) {
        const auto bytes = catalog.parameters()[i].byte_size();
        if (catalog.owner(i) == i) {
            static_cast<void>(live.add(bytes));
            static_cast<void>(catalog.frozen(i) ? 0 : staging.add(bytes));
        }
    }
    return {.live_bytes = live.size(), .staging_bytes = staging.size()};
}

/// The mode that `options` ask for, or the best one that their budget holds.
/// @param owns_memory the table makes its memory, so that addresses may alternate.
/// @throws resource_error the budget does not hold the mode asked for; says both numbers.
/// @throws unsupported_error `flip` over the user's memory.
[[nodiscard]] inline table_budget budget_for(const declared_parameters& catalog,
                                             const parameter_table_options& options,
                                             bool owns_memory) {
    auto needs = measured(catalog);
    const auto two_copies = owns_memory ? commit_mode::flip : commit_mode::copy_in;
    const auto both = checked_add(needs.live_bytes, needs.staging_bytes);
    const bool both_fit = both && *both <= options.memory_budget.value_or(*both);
    needs.mode = options.mode.value_or(both_fit ? two_copies : commit_mode::in_place);
    if (needs.mode == commit_mode::flip && !owns_memory) {
        throw unsupported_error{
            "flip alternates between two storages, and the user's addresses are fixed; choose "
            "copy_in or in_place",
            {.operation = "table over user memory"}};
    }
    if (needs.mode == commit_mode::in_place) {
        needs.staging_bytes = 0;
    }
    if (needs.live_bytes + needs.staging_bytes > options.memory_budget.value_or(UINT64_MAX)) {
        throw resource_error{"mode " + std::string{to_string(needs.mode)} + " takes " +
                                 std::to_string(needs.live_bytes + needs.staging_bytes) +
                                 " bytes, the budget is " + std::to_string(*options.memory_budget) +
                                 "; raise it or choose another mode",
                             {.operation = "parameter table"}};
    }
    return needs;
}

/// One line: the mode, why, and what it takes.
[[nodiscard]] inline std::string described(const table_budget& chosen,
                                           const parameter_table_options& options) {
    const auto budget = options.memory_budget
                            ? "of a budget of " + std::to_string(*options.memory_budget)
                            : std::string{"without a budget"};
    return "parameter table: " + std::string{to_string(chosen.mode)} +
           (options.mode ? " as asked for, " : " by choice, ") + std::to_string(chosen.live_bytes) +
           " bytes live and " + std::to_string(chosen.staging_bytes) + " bytes of staging " +
           budget;
}

}  // namespace weightwire::detail
