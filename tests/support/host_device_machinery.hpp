#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <ucp/api/ucp.h>

#include <weightwire/fabrics/ucx/basic_device_fabric.hpp>
#include <weightwire/fabrics/ucx/device_machinery.hpp>
#include <weightwire/fabrics/ucx/host_staging.hpp>
#include <weightwire/fabrics/ucx/worker.hpp>
#include <weightwire/gpu/lost_devices.hpp>

#include "host_ipc_machinery.hpp"

/// @file
/// The machinery of a UCX fabric of device memory without a GPU: a device's memory is host memory
/// that `host_allocation` knows of, and streams are the threads of `host_ipc_machinery`, whose
/// world a test changes as it does there (`stuck`, `at_step`).

namespace tests {

/// What a test changes beside `host_ipc_world`.
struct host_device_world {
    static inline std::atomic<bool> ucx_knows{false};  ///< UCX says that it knows device memory,
    static inline std::atomic<bool> ucx_lies{false};   ///< but what it brings is damaged
    static inline std::atomic<std::uint64_t> scatters{0};  ///< launches of scatter plans
    static inline std::atomic<std::uint64_t> calls{0};     ///< copies that were called for
};

class host_device_machinery {
public:
    static constexpr ucs_memory_type_t near_type = UCS_MEMORY_TYPE_HOST;

    using near_buffer = host_allocation;
    using pinned_buffer = weightwire::ucx::host_buffer;
    using stream = host_ipc_machinery::stream;
    using event = host_ipc_machinery::event;
    struct scope {};

    struct scatter_plan {
        std::shared_ptr<const std::vector<std::vector<weightwire::ucx::scatter_move>>> groups;
    };

    explicit host_device_machinery(int device) : base_{device} {}

    [[nodiscard]] int device() const noexcept { return base_.device(); }
    [[nodiscard]] static bool is_host(const std::byte* address) {
        auto& all = host_allocation::registry();
        const std::lock_guard lock{all.mutex};
        const auto after = all.known.upper_bound(address);
        return after == all.known.begin() ||
               address >= std::prev(after)->first + std::prev(after)->second.bytes;
    }
    [[nodiscard]] static bool ucx_knows(const weightwire::ucx::context& /*in*/) noexcept {
        return host_device_world::ucx_knows;
    }
    void use_on_this_thread() const noexcept {}
    [[nodiscard]] scope enter() const noexcept { return {}; }

    [[nodiscard]] near_buffer allocate_near(std::uint64_t bytes) const {
        return host_allocation{static_cast<std::size_t>(bytes)};
    }
    [[nodiscard]] pinned_buffer allocate_pinned(std::uint64_t bytes) const {
        return pinned_buffer{bytes};
    }

    [[nodiscard]] stream make_stream() { return base_.make_stream(); }
    [[nodiscard]] event make_event() { return base_.make_event(); }
    void record(event& point, const stream& on) { base_.record(point, on); }
    void record_after(event& point, void* users) { base_.record_after(point, users); }
    [[nodiscard]] bool is_done(const event& point) const { return base_.is_done(point); }

    void copy_lines(std::byte* to, std::uint64_t to_step, const std::byte* from,
                    std::uint64_t from_step, std::uint64_t bytes, std::uint64_t count,
                    const stream& on) {
        ++host_device_world::calls;
        host_ipc_world::meet("copy");
        // A trial is the only copy of so few bytes that matters here.
        const bool damaged = host_device_world::ucx_lies;
        on.put([=] {
            host_ipc_world::meet("work");
            for (std::uint64_t line = 0; line < count; ++line) {
                std::memcpy(to + line * to_step, from + line * from_step, bytes);
            }
            if (damaged) {
                to[bytes / 2] ^= std::byte{1};
            }
        });
    }
    [[nodiscard]] scatter_plan make_scatter(
        std::span<const std::vector<weightwire::ucx::scatter_move>> groups) {
        return {std::make_shared<const std::vector<std::vector<weightwire::ucx::scatter_move>>>(
            groups.begin(), groups.end())};
    }
    void launch(const scatter_plan& plan, std::size_t group, const std::byte* from,
                const stream& on) {
        ++host_device_world::scatters;
        host_ipc_world::meet("launch");
        on.put([groups = plan.groups, group, from] {
            host_ipc_world::meet("work");
            for (const auto& each : (*groups)[group]) {
                std::memcpy(each.to, from + each.from, each.bytes);
            }
        });
    }
    [[nodiscard]] static bool is_lost(int device) noexcept {
        return weightwire::gpu::lost_devices::has(device);
    }
    static void note_lost(int device) noexcept { weightwire::gpu::lost_devices::note(device); }

private:
    host_ipc_machinery base_;
};

static_assert(weightwire::ucx::DeviceMachinery<host_device_machinery>);

/// As `ucx::device_fabric`.
using host_device_fabric = weightwire::ucx::basic_device_fabric<host_device_machinery>;

static_assert(weightwire::explain_pull_fabric<host_device_fabric>());
static_assert(weightwire::HasFabricService<host_device_fabric::owner>);
static_assert(weightwire::HasFabricReadiness<host_device_fabric::owner>);
static_assert(weightwire::HasFabricPacking<host_device_fabric::owner>);
static_assert(weightwire::HasFabricLoss<host_device_fabric::reader>);

}  // namespace tests
