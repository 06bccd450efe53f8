#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string_view>

#include <weightwire/backends/nccl/init_info.hpp>
#include <weightwire/backends/nccl/receiver.hpp>
#include <weightwire/backends/nccl/sender.hpp>
#include <weightwire/concepts/transport.hpp>

#include "host_machinery.hpp"

/// @file
/// The `nccl` backend over host memory: the same wire name, texts and code, other machinery.

namespace tests {

struct host_nccl : weightwire::nccl::backend {};

/// As `nccl::trainer_init_info`, for the other tag.
struct host_nccl_info : weightwire::nccl::trainer_init_info {
    using backend = host_nccl;
};

}  // namespace tests

namespace weightwire {

template <>
struct backend_traits<tests::host_nccl> {
    static constexpr std::string_view wire_name = "nccl";
    static constexpr transport_capabilities capabilities{
        .host_memory = true, .device_memory = true, .speaks_vllm = true};
    using init_info = tests::host_nccl_info;
    using sender = nccl::basic_sender<tests::host_machinery>;
    using receiver = nccl::basic_receiver<tests::host_machinery>;
};
static_assert(explain_transport<tests::host_nccl>());

}  // namespace weightwire
