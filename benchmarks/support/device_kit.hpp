#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <weightwire/core/manifest.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/sinks/device_memory.hpp>

#include "../../tests/gpu/ipc_pair.hpp"
#include "../../tests/support/device_allocations.hpp"
#include "device_weights.hpp"
#include "region_check.hpp"

/// @file
/// What the kits of `pull_rounds` on GPUs have in common, whatever the fabric.

namespace benchmarks {

struct device_kit {
    using weights = device_weights;
    using check = region_check;
    using shown = ipc_pair::sent_export;  ///< a kit may show its weights by other means

    static constexpr int threads_a_rank = 0;
    static constexpr std::uint64_t not_counted = ~std::uint64_t{0};

    static void settle(int device) {
        weightwire::gpu::check(cudaSetDevice(device), "cudaSetDevice");
        weightwire::gpu::check(cudaFree(nullptr), "cudaFree");
    }
    [[nodiscard]] static shown show(const weights& memory, int device) {
        weightwire::cuda_ipc::cuda_machinery machine{device};
        const auto& block = memory.blocks()[0];
        return ipc_pair::exported(machine, block.data(), block.size());
    }
    [[nodiscard]] static auto table(const weightwire::manifest& mine, const weights& landing,
                                    int device) {
        using table_type = weightwire::device_parameter_table;
        std::vector<weightwire::user_parameter> held;
        for (std::size_t i = 0; i < mine.size(); ++i) {
            held.push_back({mine[i].name, landing.views()[i]});
        }
        return std::unique_ptr<table_type>{
            new table_type(table_type::over(std::move(held), weightwire::gpu_memory{device},
                                            {.mode = weightwire::commit_mode::in_place}))};
    }
    [[nodiscard]] static double copies_seconds(const weights& /*landing*/) { return 0; }
    [[nodiscard]] static std::uint64_t allocations() {
        return weightwire_tests::device_allocations.load();
    }
};

}  // namespace benchmarks
