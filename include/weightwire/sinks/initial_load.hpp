#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/declared_parameters.hpp>

/// @file
/// The book that a load of version 0 keeps: which names have come.

namespace weightwire::detail {

/// Compares each tensor of a load with what is declared. Refers to the declaration.
class initial_load {
public:
    explicit initial_load(const declared_parameters& catalog)
        : catalog_{&catalog}, loaded_(catalog.size(), 0) {}

    /// Notes one tensor.
    /// @returns the parameter whose storage takes its bytes; nothing where they are not wanted: of
    /// tied weights the owner's count, whichever name comes first.
    /// @throws coverage_error it is unknown, of another shape or dtype, or there already.
    [[nodiscard]] std::optional<std::size_t> accept(const named_tensor& from) {
        const auto i = catalog_->parameters().find(from.name);
        if (i == manifest::npos) {
            catalog_->throw_unknown(from.name, phase::init);
        }
        catalog_->require_match(i, from.tensor.type(), from.tensor.extents(), phase::init);
        if (loaded_[i] != 0) {
            throw coverage_error{"expected each tensor once, found it twice",
                                 {.phase = phase::init, .tensor = std::string{from.name}}};
        }
        loaded_[i] = 1;
        const auto owner = catalog_->owner(i);
        const bool wanted = owner == i || loaded_[owner] == 0;
        return wanted ? std::optional{owner} : std::nullopt;
    }
    /// @throws coverage_error one did not come; names it.
    void require_all() const { catalog_->require_all(loaded_); }

private:
    const declared_parameters* catalog_;
    std::vector<std::uint8_t> loaded_;  ///< for each name
};

}  // namespace weightwire::detail
