#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <string_view>

#include <weightwire/backends/cuda_ipc/cuda_machinery.hpp>
#include <weightwire/backends/cuda_ipc/init_info.hpp>
#include <weightwire/backends/cuda_ipc/receiver.hpp>
#include <weightwire/backends/cuda_ipc/sender.hpp>
#include <weightwire/concepts/transport.hpp>

/// @file
/// The `cuda_ipc` backend: workers read the trainer's device memory through CUDA IPC, ours and
/// vLLM's. Needs the headers of CUDA; does not link the driver.

namespace weightwire {

namespace cuda_ipc {
using sender = basic_sender<cuda_machinery>;
using receiver = basic_receiver<cuda_machinery>;
}  // namespace cuda_ipc

/// `cuda_ipc` from device to device of one machine. Host memory is taken and given too, through a
/// ring and a pinned buffer. On the wire it is `ipc`, as vLLM calls it.
template <>
struct backend_traits<cuda_ipc::backend> {
    static constexpr std::string_view wire_name = "ipc";
    /// Copies that were launched end by themselves, within milliseconds. A new trainer's memory may
    /// lie where the old one's is still open here, so that is closed first: not `opens_beside`.
    static constexpr transport_capabilities capabilities{.host_memory = true,
                                                         .device_memory = true,
                                                         .converts = true,
                                                         .one_sided = true,
                                                         .drops_peers = true,
                                                         .speaks_vllm = true,
                                                         .let_go = std::chrono::milliseconds{100}};
    using init_info = cuda_ipc::trainer_init_info;
    using sender = cuda_ipc::sender;
    using receiver = cuda_ipc::receiver;
};

static_assert(explain_transport<cuda_ipc::backend>());
static_assert(HasStage<cuda_ipc::sender> && HasRankExports<cuda_ipc::sender>);
static_assert(HasDropPeer<cuda_ipc::sender> && HasDigests<cuda_ipc::sender>);
static_assert(HasDescription<cuda_ipc::sender> && HasDescription<cuda_ipc::receiver>);
static_assert(HasLost<cuda_ipc::receiver> && HasTableBytes<cuda_ipc::receiver>);

}  // namespace weightwire
