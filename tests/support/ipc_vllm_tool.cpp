// SPDX-License-Identifier: Apache-2.0
//
// Our trainer and our worker of the cuda_ipc backend, for tests with vLLM's own modules on the
// other side. Shared host memory in place of a GPU's: the backend's code, wire and bytes, no CUDA.
//
//   ipc_vllm_tool train URL ROUNDS packed|unpacked|pool RANKS
//       drives a server from so many ranks, each on a GPU of its own with weights of its own;
//       prints the parameters, what was chosen, and each round's digests. pool: part of the memory
//       cannot be exported
//   ipc_vllm_tool serve GPUS [flat]
//       prints its port, serves that many ranks until its input ends; flat: without the scalar
//   ipc_vllm_tool list         prints the parameters

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/rendezvous/store_group.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/worker.hpp>

#include "host_cuda_ipc.hpp"
#include "serving_tool.hpp"
#include "small_model.hpp"

namespace {

using namespace weightwire;

constexpr std::chrono::seconds minute{60};
deadline soon() { return deadline::after(minute); }

/// Names and dtypes as a checkpoint has them; a scalar, nothing, and bytes that put those behind
/// them at odd offsets of a packed buffer.
std::vector<param_meta> listed() {
    return {{"model.embed_tokens.weight", dtype::bf16, {64, 16}},
            {"model.layers.0.mlp.gate.weight_scale", dtype::f8_e4m3fn, {7, 3}},
            {"model.layers.0.self_attn.q_proj.weight", dtype::bf16, {16, 24}},
            {"model.layers.0.self_attn.q_proj.bias", dtype::bf16, {16}},
            {"model.layers.0.self_attn.qkv_proj.bias", dtype::bf16, {48}},
            {"model.layers.0.self_attn.logit_scale", dtype::f32, {}},
            {"model.layers.0.mlp.gate.e_score_correction_bias", dtype::f32, {5}},
            {"model.layers.0.mlp.experts.0.up_proj.weight", dtype::f8_e4m3fn, {4, 8}},
            {"model.layers.0.mlp.experts.0.up_proj.bias", dtype::f32, {0, 8}},
            {"model.norm.weight", dtype::f16, {16}},
            {"lm_head.weight", dtype::bf16, {64, 16}}};
}

/// One rank's weights on its pretended GPU: all in one allocation, one of them transposed and one
/// the begin of the next, but for the last, which has an allocation of its own.
struct rank_weights {
    rank_weights(int rank, const std::string& refusal)
        : arena{std::size_t{1} << 14U, refusal}, own{std::size_t{1} << 12U} {
        const device where{memory_kind::cuda, rank};
        std::size_t used = 512;
        for (const auto& parameter : list) {
            auto* const at = &parameter == &list.back() ? own.data() : arena.data() + used;
            if (parameter.name.ends_with("q_proj.weight")) {
                const std::array<std::int64_t, max_dimensions> steps{1, parameter.shape[0]};
                tensors.push_back(
                    {parameter.name, {at, parameter.dtype, parameter.shape, steps, where}});
            } else {
                tensors.push_back({parameter.name, {at, parameter.dtype, parameter.shape, where}});
            }
            if (!parameter.name.ends_with(".q_proj.bias")) {
                used += (parameter.byte_size() + 15) / 16 * 16;
            }
            bytes += parameter.byte_size();
        }
    }
    /// @returns the sum of the digests of all tensors.
    std::uint64_t fill(std::uint64_t seed) {
        tests::fill({arena.data(), arena.size()}, seed, 1);
        tests::fill({own.data(), own.size()}, seed, 2);
        std::vector<tensor_view> views;
        for (const auto& each : tensors) {
            views.push_back(each.tensor);
        }
        std::vector<std::uint64_t> digests(views.size());
        tests::host_ipc_machinery{0}.digests(views, digests, soon(), {});
        std::uint64_t sum = 0;
        for (const auto each : digests) {
            sum += each;
        }
        return sum;
    }

    std::vector<param_meta> list = listed();
    tests::host_allocation arena;
    tests::host_allocation own;
    std::vector<named_tensor> tensors;
    std::size_t bytes = 0;
};

struct training {
    std::string url;
    int rounds = 0;
    std::string form;
    int ranks = 1;
};

/// Lines of several ranks do not mix.
void say(const std::string& line) {
    static std::mutex mutex;
    const std::lock_guard lock{mutex};
    std::puts(line.c_str());
}

template <class Group>
void train_rank(const training& plan, int rank, Group&& group) {
    rank_weights weights{rank, plan.form == "pool" ? "it is memory of a pool" : ""};
    tests::host_cuda_ipc_info info;
    info.packed = plan.form == "packed";
    info.packed_buffer_size_bytes = 2048;
    info.zero_dim_as_one = plan.form != "unpacked";
    info.device = info.rank = rank;
    http_sync_client client{plan.url};
    auto engine =
        trainer_init(info, client, span_source{weights.tensors}, {.init_budget = minute}, group);
    for (int round = 1; round <= plan.rounds; ++round) {
        const auto sum = weights.fill(static_cast<std::uint64_t>(round * 100 + rank));
        (void)engine.send_weights({.deadline = soon()});
        say("rank " + std::to_string(rank) + " round " + std::to_string(round) + ": " +
            std::to_string(weights.tensors.size()) + " tensors, " + std::to_string(weights.bytes) +
            " bytes, digest " + digest_text(sum));
    }
    engine.close(soon());
}

void train(const training& plan) {
    tests::print_list(listed());
    if (plan.ranks == 1) {
        train_rank(plan, 0, single_rank{});
        return;
    }
    auto host = store_group::host(plan.ranks);
    std::vector<std::jthread> others;
    for (int rank = 1; rank < plan.ranks; ++rank) {
        others.emplace_back([&plan, rank, port = host.port()] {
            try {
                auto group = store_group::join(rank, plan.ranks, "127.0.0.1", port, soon());
                train_rank(plan, rank, group);
                group.close(soon());
            } catch (const std::exception& failed) {
                say("rank " + std::to_string(rank) + " failed: " + failed.what());
            }
        });
    }
    train_rank(plan, 0, host);
    host.close(soon());
}

/// Of a GPU that has to be named.
class memory_of_gpu : public tests::pretended_device_memory {
public:
    explicit memory_of_gpu(int gpu) : pretended_device_memory{gpu} {}
};
using gpu_table = basic_parameter_table<memory_of_gpu>;

void serve(int gpus, bool flat) {
    auto list = listed();
    if (flat) {
        std::erase_if(list, [](const param_meta& each) { return each.shape.size() == 0; });
    }
    std::vector<std::unique_ptr<gpu_table>> tables;
    std::vector<gpu_table*> sinks;
    for (int gpu = 0; gpu < gpus; ++gpu) {
        tables.push_back(std::make_unique<gpu_table>(manifest{list}, memory_of_gpu{gpu}));
        sinks.push_back(tables.back().get());
    }
    worker_engine engine{tests::host_cuda_ipc{}, sinks};
    tests::serve_until_input_ends(engine);
}

}  // namespace

int main(int count, char** arguments) {
    return tests::run_tool(
        "ipc_vllm_tool",
        "ipc_vllm_tool train URL ROUNDS packed|unpacked|pool RANKS | serve GPUS [flat] | list",
        count, arguments, [](const std::vector<std::string>& words) {
            const auto verb = words.empty() ? std::string{} : words.front();
            if (verb == "train" && words.size() == 5) {
                train({words[1], std::stoi(words[2]), words[3], std::stoi(words[4])});
            } else if (verb == "serve" && words.size() == 2) {
                serve(std::stoi(words[1]), false);
            } else if (verb == "serve" && words.size() == 3 && words[2] == "flat") {
                serve(std::stoi(words[1]), true);
            } else if (verb == "list" && words.size() == 1) {
                tests::print_list(listed());
            } else {
                return false;
            }
            return true;
        });
}
