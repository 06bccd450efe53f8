#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <stop_token>
#include <string>
#include <string_view>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// What a sender does before a part's control call, and what must be so after the last part: the
/// same on every trainer rank.

namespace weightwire::detail {

/// Stages a part, where the sender does (`HasStage`).
/// @param until of the call that follows.
/// @throws what the sender throws; timeout_error, cancelled_error the call must not be made any
/// more.
template <class Traits, class Sender>
void stage_part(Sender& sender, std::uint64_t round, std::size_t part, tensor_stream& stream,
                deadline until, const std::stop_token& stop) {
    if constexpr (HasStage<Sender>) {
        sender.stage(round, part, stream, Traits::capabilities.before_let_go(until), stop);
        const error_context where{.phase = phase::update,
                                  .backend = std::string{Traits::wire_name},
                                  .operation = "stage"};
        if (stop.stop_requested()) {
            throw cancelled_error{"the round was stopped while a part was staged", where};
        }
        // A source takes no deadline; what it took is not blamed on the peers.
        if (until.expired()) {
            throw timeout_error{
                "staging part " + std::to_string(part) +
                    " took all of the time that there was for the update; allow more "
                    "(send_options::deadline)",
                where};
        }
    }
}

/// After the last part the source has no more tensors. Advances it past its last one.
/// @throws usage_error it has.
inline void require_end(tensor_stream& stream, std::string_view backend) {
    if (stream.next() != nullptr) {
        throw usage_error{"the sender's parts end before the source does",
                          {.phase = phase::update, .backend = std::string{backend}}};
    }
}

}  // namespace weightwire::detail
