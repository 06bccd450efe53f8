#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <string_view>

#include <weightwire/backends/nccl/cuda_machinery.hpp>
#include <weightwire/backends/nccl/init_info.hpp>
#include <weightwire/backends/nccl/receiver.hpp>
#include <weightwire/backends/nccl/sender.hpp>
#include <weightwire/concepts/transport.hpp>

/// @file
/// The `nccl` backend: broadcasts from the trainer's GPU to those of the workers, ours and vLLM's.
/// Needs the headers of CUDA and NCCL; links neither driver nor NCCL.

namespace weightwire {

namespace nccl {
using sender = basic_sender<cuda_machinery>;
using receiver = basic_receiver<cuda_machinery>;
}  // namespace nccl

/// `nccl` from device to device. Host memory is taken and given too, through a pinned buffer.
template <>
struct backend_traits<nccl::backend> {
    static constexpr std::string_view wire_name = "nccl";
    /// An abort took 0.4 to 0.9 s with few broadcasts queued: benchmarks/results/nccl_abort.txt.
    static constexpr transport_capabilities capabilities{.host_memory = true,
                                                         .device_memory = true,
                                                         .one_sided = false,
                                                         .drops_peers = false,
                                                         .speaks_vllm = true,
                                                         .let_go = std::chrono::seconds{1}};
    using init_info = nccl::trainer_init_info;
    using sender = nccl::sender;
    using receiver = nccl::receiver;
};

static_assert(explain_transport<nccl::backend>());
static_assert(HasDescription<nccl::sender> && HasDescription<nccl::receiver>);

}  // namespace weightwire
