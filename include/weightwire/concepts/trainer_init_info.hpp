#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <string>
#include <type_traits>

/// @file
/// `TrainerInitInfo`: which backend, with which wire parameters. `trainer_init` deduces the backend
/// from its type.
///
/// Semantics: a plain value, designated initialisers with defaults, copied freely. What the two
/// sides must agree on is in it and travels at init, so that they cannot differ. Everything that
/// can be computed (the world size) is not in it. Model: `ipc::trainer_init_info`. Non-model: a map
/// from strings to strings.

namespace weightwire {

/// Names its backend: `using backend = my::backend;`, the tag that `backend_traits` is specialised
/// for.
template <class I>
concept HasBackendTag = requires { typename std::remove_cvref_t<I>::backend; };

/// `rank`: of this trainer process in its group.
template <class I>
concept HasRankMember = requires(const std::remove_cvref_t<I>& info) {
    { info.rank } -> std::convertible_to<int>;
};

/// `init_message()`: the wire parameters as a JSON object, the same for every peer.
template <class I>
concept HasInitMessage = requires(const std::remove_cvref_t<I>& info) {
    { info.init_message() } -> std::convertible_to<std::string>;
};

/// Which backend, with which wire parameters.
template <class I>
concept TrainerInitInfo = HasBackendTag<I> && HasRankMember<I> && HasInitMessage<I> &&
                          std::copy_constructible<std::remove_cvref_t<I>>;

/// One readable line for every member that `I` lacks.
template <class I>
consteval bool explain_trainer_init_info() {
    static_assert(HasBackendTag<I>,
                  "TrainerInitInfo: add a member type backend naming the backend's tag");
    static_assert(HasRankMember<I>, "TrainerInitInfo: add a data member int rank");
    static_assert(
        HasInitMessage<I>,
        "TrainerInitInfo: add init_message() const returning the wire parameters as JSON");
    static_assert(std::copy_constructible<std::remove_cvref_t<I>>,
                  "TrainerInitInfo: make it copyable");
    return TrainerInitInfo<I>;
}

namespace archetypes {

/// The tag of the archetype backend.
struct backend {};

/// The least that models `TrainerInitInfo`.
struct trainer_init_info {
    using backend = archetypes::backend;
    int rank = 0;
    std::string init_message() const { return "{}"; }
};

}  // namespace archetypes

static_assert(TrainerInitInfo<archetypes::trainer_init_info>);

}  // namespace weightwire
