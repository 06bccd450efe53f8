#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/trainer_group.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>

/// @file
/// A trainer group that is not used again after it has failed.

namespace weightwire::detail {

/// After a failed collective the ranks may be at different steps: one has given up what another
/// still comes to, and from then on each would take the other's words of one step for those of
/// another, up to a round of one rank's new weights with another's old ones. So the first failure
/// is every later call's.
template <class Group>
class remembering_group {
public:
    explicit remembering_group(Group&& group) : group_{std::forward<Group>(group)} {}

    [[nodiscard]] int rank() const { return group_.rank(); }
    [[nodiscard]] int size() const { return group_.size(); }
    /// @throws what the group throws; once it has, that again.
    [[nodiscard]] std::vector<std::string> all_gather(std::string_view bytes, deadline until) {
        return remembered([&] { return group_.all_gather(bytes, until); });
    }
    /// @copydoc all_gather
    void barrier(deadline until) {
        remembered([&] { group_.barrier(until); });
    }

    /// Whether it has failed.
    [[nodiscard]] bool failed() const noexcept { return static_cast<bool>(failure_); }
    /// Every later call fails with this.
    void fail(failure why) {
        why.text +=
            "; the trainer ranks may be out of step since then, so that their group is not used "
            "again: make it and the engine anew, on every rank";
        failure_ = std::move(why);
    }
    /// @throws what the group threw first; nothing where it has not failed.
    void require_usable() const {
        if (failure_) {
            failure_.raise();
        }
    }

private:
    template <class Call>
    decltype(auto) remembered(Call call) {
        require_usable();
        try {
            return call();
        } catch (...) {
            fail(failure::current(phase::none));
            throw;
        }
    }

    Group group_;
    failure failure_{};
};

/// All ranks are in round `round`.
/// @throws mismatch_error naming a rank that is in another; the group is not used again. What the
/// group throws.
template <class Group>
void require_same_round(remembering_group<Group>& group, std::uint64_t round, deadline until) {
    if (group.size() == 1) {
        return;
    }
    const auto mine = "round " + std::to_string(round);
    const auto all = group.all_gather(mine, until);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
        if (all[rank] != all.front()) {
            const mismatch_error differ{
                "trainer rank 0 says '" + all.front().substr(0, 32) + "', rank " +
                    std::to_string(rank) + " '" + all[rank].substr(0, 32) +
                    "': every rank has to call send_weights() the same number of times",
                {.phase = phase::start, .rank = static_cast<int>(rank)}};
            group.fail(failure::from(differ));
            throw differ;
        }
    }
}

}  // namespace weightwire::detail
