#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string_view>

#include <weightwire/backends/cuda_ipc/init_info.hpp>
#include <weightwire/backends/cuda_ipc/receiver.hpp>
#include <weightwire/backends/cuda_ipc/sender.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/sinks/basic_parameter_table.hpp>
#include <weightwire/sinks/host_memory.hpp>

#include "host_ipc_machinery.hpp"

/// @file
/// The `cuda_ipc` backend over host memory: the same wire name, texts and code, other machinery;
/// and a parameter table whose memory says that it is a device's.

namespace tests {

struct host_cuda_ipc {};

/// As `cuda_ipc::trainer_init_info`, for the other tag.
struct host_cuda_ipc_info : weightwire::cuda_ipc::trainer_init_info {
    using backend = host_cuda_ipc;
};

/// Host memory that is called a device's. Its digests are the table's own.
class pretended_device_memory : public weightwire::host_memory {
public:
    explicit pretended_device_memory(int device) : device_{device} {}
    [[nodiscard]] weightwire::device where() const noexcept {
        return {weightwire::memory_kind::cuda, device_};
    }
    void digests(std::span<const weightwire::tensor_view> tensors, std::span<std::uint64_t> results,
                 weightwire::deadline until, const std::stop_token& stop) const {
        host_ipc_machinery{device_}.digests(tensors, results, until, stop);
    }
    void clear(const weightwire::mutable_tensor_view& tensor) const {
        weightwire::for_each_run(
            tensor, [](std::byte* at, std::size_t count) { std::memset(at, 0, count); });
    }

private:
    int device_;
};

using pretended_device_table = weightwire::basic_parameter_table<pretended_device_memory>;

}  // namespace tests

namespace weightwire {

template <>
struct backend_traits<tests::host_cuda_ipc> {
    static constexpr std::string_view wire_name = "ipc";
    static constexpr transport_capabilities capabilities{.host_memory = true,
                                                         .device_memory = true,
                                                         .converts = true,
                                                         .one_sided = true,
                                                         .drops_peers = true,
                                                         .speaks_vllm = true};
    using init_info = tests::host_cuda_ipc_info;
    using sender = cuda_ipc::basic_sender<tests::host_ipc_machinery>;
    using receiver = cuda_ipc::basic_receiver<tests::host_ipc_machinery>;
};
static_assert(explain_transport<tests::host_cuda_ipc>());

}  // namespace weightwire
