#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>

/// @file
/// What a receiver writes into: the sink's destinations, with coverage kept beside them.

namespace weightwire {

/// The destinations of one update call, in the order in which that call names its parameters. A
/// receiver asks `open` for an address just before it writes, and reports `wrote` just after; both
/// cost a table look-up.
///
/// A pair of function pointers over the worker engine's session, not a virtual base. One thread at
/// a time.
class update_target {
public:
    /// Parameters of this update.
    [[nodiscard]] std::size_t size() const noexcept { return count_; }
    [[nodiscard]] const param_meta& parameter(std::size_t i) const noexcept {
        return (*parameters_)[session_index(i)];
    }

    /// Whether an address exists only from `open` to `wrote`, so that it cannot be asked for ahead
    /// of its bytes.
    [[nodiscard]] bool bounced() const noexcept { return bounced_; }

    /// Where the elements of parameter `i` go: of its shape, and of its dtype unless the backend's
    /// capabilities say that it converts. A view without data: not wanted (frozen, or an alias of
    /// another parameter), skip it, but report it.
    /// @throws what the sink throws.
    [[nodiscard]] mutable_tensor_view open(std::size_t i, deadline until) {
        return open_(state_, session_index(i), until);
    }

    /// Bytes `[offset, offset + count)` of parameter `i`, in C order and as the trainer has them,
    /// are in place (or were skipped). Where elements were converted, these are the source's bytes.
    /// @throws coverage_error twice, past a gap or past the end; names the tensor.
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline until) {
        wrote_(state_, session_index(i), offset, count, until);
    }

    /// Made by the worker engine and by tests.
    /// @param state what the functions get. `State::bounced`, where it has one, is what `bounced`
    /// says; else addresses stay.
    /// @param parameters the session's manifest.
    /// @param first,count a run of manifest positions; ignored where `map` is not empty.
    /// @param map manifest position of each parameter of this update, where they are no run.
    template <class State>
        requires requires(State& s, std::size_t i, std::uint64_t n, deadline until) {
            { s.open(i, until) } -> std::same_as<mutable_tensor_view>;
            s.wrote(i, n, n, until);
        }
    update_target(State& state, const manifest& parameters, std::size_t first, std::size_t count,
                  std::span<const std::size_t> map = {}) noexcept
        : state_{&state},
          open_{[](void* self, std::size_t i, deadline until) {
              return static_cast<State*>(self)->open(i, until);
          }},
          wrote_{[](void* self, std::size_t i, std::uint64_t offset, std::uint64_t bytes,
                    deadline until) { static_cast<State*>(self)->wrote(i, offset, bytes, until); }},
          parameters_{&parameters},
          map_{map},
          first_{first},
          count_{map.empty() ? count : map.size()} {
        if constexpr (requires { State::bounced; }) {
            bounced_ = State::bounced;
        }
    }

private:
    [[nodiscard]] std::size_t session_index(std::size_t i) const noexcept {
        return map_.empty() ? first_ + i : map_[i];
    }

    void* state_;
    mutable_tensor_view (*open_)(void*, std::size_t, deadline);
    void (*wrote_)(void*, std::size_t, std::uint64_t, std::uint64_t, deadline);
    const manifest* parameters_;
    std::span<const std::size_t> map_;
    std::size_t first_;
    std::size_t count_;
    bool bounced_ = false;
};

}  // namespace weightwire
