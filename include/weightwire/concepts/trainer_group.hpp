#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <weightwire/core/deadline.hpp>

/// @file
/// `TrainerGroup`: how the ranks of one trainer agree with each other.
///
/// Semantics: `rank()` is in `[0, size())` and both are constant. `all_gather` and `barrier` are
/// collective: every rank calls them in the same order; they block, at most until the deadline,
/// then throw `timeout_error` naming a rank that did not come. After a failure the group may be
/// unusable; the engine stops using it. Not thread-safe.
///
/// Model: `single_rank`; `store_group`; three functions over MPI. Non-model: a group whose
/// collectives cannot time out.

namespace weightwire {

/// `rank()` and `size()`.
template <class G>
concept HasRankAndSize = requires(const G& group) {
    { group.rank() } -> std::convertible_to<int>;
    { group.size() } -> std::convertible_to<int>;
};

/// `all_gather(bytes, deadline)`: everyone's bytes, by rank.
template <class G>
concept HasAllGather = requires(G& group, std::string_view bytes, deadline until) {
    { group.all_gather(bytes, until) } -> std::same_as<std::vector<std::string>>;
};

/// `barrier(deadline)`.
template <class G>
concept HasBarrier = requires(G& group, deadline until) { group.barrier(until); };

/// How trainer ranks agree.
template <class G>
concept TrainerGroup =
    HasRankAndSize<std::remove_reference_t<G>> && HasAllGather<std::remove_reference_t<G>> &&
    HasBarrier<std::remove_reference_t<G>>;

/// One readable line for every member that `G` lacks.
template <class G>
consteval bool explain_trainer_group() {
    static_assert(HasRankAndSize<G>,
                  "TrainerGroup: add const members rank() and size() returning int");
    static_assert(HasAllGather<G>,
                  "TrainerGroup: add all_gather(std::string_view, weightwire::deadline) returning "
                  "std::vector<std::string>, one entry a rank");
    static_assert(HasBarrier<G>, "TrainerGroup: add barrier(weightwire::deadline)");
    return TrainerGroup<G>;
}

/// The group of a trainer with one rank.
struct single_rank {
    [[nodiscard]] int rank() const noexcept { return 0; }
    [[nodiscard]] int size() const noexcept { return 1; }
    [[nodiscard]] std::vector<std::string> all_gather(std::string_view bytes, deadline) const {
        return {std::string{bytes}};
    }
    void barrier(deadline) const noexcept {}
};

static_assert(TrainerGroup<single_rank>);

namespace archetypes {

/// The least that models `TrainerGroup`.
struct trainer_group {
    int rank() const { return 0; }
    int size() const { return 1; }
    std::vector<std::string> all_gather(std::string_view, deadline) { return {}; }
    void barrier(deadline) {}
};

}  // namespace archetypes

static_assert(TrainerGroup<archetypes::trainer_group>);

}  // namespace weightwire
