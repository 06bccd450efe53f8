#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string_view>

#include <weightwire/backends/ipc/init_info.hpp>
#include <weightwire/backends/ipc/receiver.hpp>
#include <weightwire/backends/ipc/sender.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/fabrics/shared_memory_arena.hpp>

/// @file
/// The `ipc` backend: trainer and workers on one machine, through memory that they share.

namespace weightwire {

/// `ipc` over host memory, spoken to weightwire's own workers only.
template <>
struct backend_traits<ipc::backend> {
    static constexpr std::string_view wire_name = "ipc";
    static constexpr transport_capabilities capabilities{.host_memory = true,
                                                         .one_sided = false,
                                                         .drops_peers = true,
                                                         .speaks_vllm = false,
                                                         .opens_beside = true};
    using init_info = ipc::trainer_init_info;
    using sender = ipc::sender;
    using receiver = ipc::receiver;
};

static_assert(explain_transport<ipc::backend>());
static_assert(HasDropPeer<ipc::sender> && HasDigests<ipc::sender> && HasDescription<ipc::sender>);

}  // namespace weightwire
