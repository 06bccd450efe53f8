#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ucp/api/ucp.h>

/// @file
/// What a staging may have beside what `host_staging` has. A *staging* is what the transfers of a
/// fabric are templates over: the memory that its tensors lie in.

namespace weightwire::ucx {

/// Has tables for what lands, made once a read: `make_layout<Memory>(pieces, runs, places,
/// landing)` and `lay<Memory>(layout, index, piece, runs, place, landed)`, in place of `copy`.
/// `come_to_rest() noexcept`: nothing that was begun writes any more.
template <class Staging>
concept HasLayouts = requires { typename Staging::layout; };

namespace detail {

struct nothing {};
template <class Staging>
struct layout_type {
    using type = nothing;
};
template <HasLayouts Staging>
struct layout_type<Staging> {
    using type = typename Staging::layout;
};
template <class Staging>
[[nodiscard]] consteval ucs_memory_type_t type_of_destinations() noexcept {
    if constexpr (requires { Staging::near_type; }) {
        return Staging::near_type;
    } else {
        return UCS_MEMORY_TYPE_HOST;
    }
}

}  // namespace detail

template <class Staging>
using layout_of = typename detail::layout_type<Staging>::type;

/// What UCX calls the memory of destinations.
template <class Staging>
inline constexpr ucs_memory_type_t destination_type = detail::type_of_destinations<Staging>();

/// What has to be current for the calling thread while UCX works: a device, where UCX reads and
/// writes its memory itself.
template <class Staging>
[[nodiscard]] auto scope_of(const Staging& staging) {
    if constexpr (requires { staging.scope(); }) {
        return staging.scope();
    } else {
        return detail::nothing{};
    }
}

}  // namespace weightwire::ucx
