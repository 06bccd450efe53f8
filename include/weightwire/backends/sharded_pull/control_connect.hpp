#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <stop_token>
#include <utility>

#include <weightwire/backends/sharded_pull/control_channel.hpp>
#include <weightwire/backends/sharded_pull/transport_message.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/rendezvous/socket.hpp>

/// @file
/// How a worker rank, or trainer rank 0, comes to a trainer rank's control port.

namespace weightwire::sharded_pull {

/// A connection that has said who it is of.
/// @param worker_rank in the transfer group, or `hello_body::of_trainer`.
/// @throws peer_error the port cannot be reached. @throws timeout_error, cancelled_error.
[[nodiscard]] inline frame_socket connect_control(const rank_export& rank,
                                                  std::uint32_t worker_rank,
                                                  std::uint32_t world_size, deadline until,
                                                  const std::stop_token& stop,
                                                  error_context where) {
    int code = 0;
    for (const auto& address : rendezvous::resolve(rank.host, rank.port, until, stop, where)) {
        auto socket = rendezvous::try_connect(address, until, stop, where, code);
        if (!socket) {
            continue;
        }
        constexpr std::uint64_t most_frame_bytes = std::uint64_t{256} << 20U;
        frame_socket made{std::move(socket), most_frame_bytes};
        const hello_body hello{
            .nonce = rank.nonce, .worker_rank = worker_rank, .world_size = world_size};
        send_frame(made, frame_kind::hello, bytes_of(hello), until, stop, where);
        return made;
    }
    throw peer_error{"a trainer rank's control port, " +
                         weightwire::detail::host_and_port(rank.host, rank.port) +
                         ", cannot be reached from here; see trainer_init_info::host",
                     weightwire::detail::with_errno(std::move(where), "connect", code)};
}

}  // namespace weightwire::sharded_pull
