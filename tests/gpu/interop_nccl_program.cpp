// SPDX-License-Identifier: Apache-2.0
//
// Our trainer and our worker over real NCCL, for interop_nccl.py with vLLM's classes on the other
// side. LIST has a parameter a line: name, torch's dtype, extents (weights.py prints one).
//
//   interop_nccl_program train LIST URL ROUNDS packed|unpacked
//       weights in device memory that change every round; prints each round's digest
//   interop_nccl_program serve LIST
//       prints its port, serves until its input ends; weights in host memory

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include <weightwire/backends/nccl/backend.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/worker.hpp>

#include "../../benchmarks/support/parameter_lists.hpp"
#include "../support/serving_tool.hpp"
#include "../support/small_model.hpp"

namespace {

using namespace weightwire;
using benchmarks::read_list;

constexpr std::chrono::seconds patience{90};

/// One parameter in device memory.
struct device_weight {
    gpu::device_buffer memory;
    std::vector<std::byte> host;
};

void train(const std::vector<param_meta>& list, const std::string& url, int rounds, bool packed) {
    std::vector<device_weight> weights;
    std::vector<named_tensor> tensors;
    std::size_t bytes = 0;
    for (const auto& parameter : list) {
        const auto size = static_cast<std::size_t>(parameter.byte_size());
        weights.push_back({gpu::device_buffer{0, size}, std::vector<std::byte>(size)});
        tensors.push_back({parameter.name,
                           {weights.back().memory.data(),
                            parameter.dtype,
                            parameter.shape,
                            {.kind = memory_kind::cuda, .index = 0}}});
        bytes += size;
    }
    nccl::trainer_init_info info;
    info.packed = packed;
    info.packed_buffer_size_bytes = std::uint64_t{64} << 20U;
    http_sync_client client{url};
    auto engine = trainer_init(info, client, span_source{tensors}, {.init_budget = patience});
    for (int round = 1; round <= rounds; ++round) {
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < weights.size(); ++i) {
            auto& [memory, host] = weights[i];
            tests::fill(host, static_cast<std::uint64_t>(round), i);
            sum += digest(host);
            gpu::check(cudaMemcpy(memory.data(), host.data(), host.size(), cudaMemcpyHostToDevice),
                       "cudaMemcpy");
        }
        const auto report = engine.send_weights({.deadline = deadline::after(patience)});
        std::fprintf(stderr, "round %d took %.3f s\n", round, report.total_seconds);
        std::printf("round %d: %zu tensors, %zu bytes, digest %s\n", round, weights.size(), bytes,
                    digest_text(sum).c_str());
        std::fflush(stdout);
    }
    engine.close(deadline::after(std::chrono::seconds{10}));
}

void serve(const std::vector<param_meta>& list) {
    parameter_table table{list};
    worker_engine engine{nccl::backend{}, table};
    tests::serve_until_input_ends(engine);
}

}  // namespace

int main(int count, char** arguments) {
    return tests::run_tool(
        "interop_nccl_program",
        "interop_nccl_program train LIST URL ROUNDS packed|unpacked | serve LIST", count, arguments,
        [](const std::vector<std::string>& words) {
            if (words.size() == 5 && words[0] == "train") {
                train(read_list(words[1]), words[2], std::stoi(words[3]), words[4] == "packed");
            } else if (words.size() == 2 && words[0] == "serve") {
                serve(read_list(words[1]));
            } else {
                return false;
            }
            return true;
        });
}
