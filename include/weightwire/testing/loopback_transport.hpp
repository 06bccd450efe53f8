#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string_view>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/testing/loopback_init_info.hpp>
#include <weightwire/testing/loopback_receiver.hpp>
#include <weightwire/testing/loopback_sender.hpp>

/// @file
/// The loopback transport: bytes go through Unix sockets of this machine, in one process or
/// between several. It needs nothing, does everything a transport may do, and can block on
/// request: what the engines are tested with, and what you test your source and sink with.

namespace weightwire {

/// Models `Transport`, with every optional ability.
template <>
struct backend_traits<testing::loopback> {
    static constexpr std::string_view wire_name = "loopback";
    static constexpr transport_capabilities capabilities{
        .host_memory = true, .drops_peers = true, .speaks_vllm = true};
    using init_info = testing::loopback_init_info;
    using sender = testing::loopback_sender;
    using receiver = testing::loopback_receiver;
};

static_assert(Transport<testing::loopback>);
static_assert(HasDropPeer<testing::loopback_sender> && HasDigests<testing::loopback_sender> &&
              HasDescription<testing::loopback_sender>);

}  // namespace weightwire
