// SPDX-License-Identifier: Apache-2.0
//
// Our trainer, our worker and our store client, for tests with vLLM's own modules on the other
// side. The nccl backend over host memory and sockets: its code, wire and bytes, no NCCL.
//
//   vllm_tool train URL ROUNDS packed|unpacked automatic|store
//       drives a server, which learns the id as it can, or through the store; prints the parameters
//       and each round's digest
//   vllm_tool serve            prints its port, serves until its input ends
//   vllm_tool list             prints the parameters
//   vllm_tool fetch HOST PORT  prints the id that rank 0 of a group published

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/rendezvous/tcp_store_client.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/wire/unique_id.hpp>
#include <weightwire/worker.hpp>

#include "host_nccl.hpp"
#include "serving_tool.hpp"
#include "small_model.hpp"

namespace {

using namespace weightwire;

constexpr std::chrono::seconds minute{60};
deadline soon() { return deadline::after(minute); }

using wire::unique_id;

void print_id(const unique_id& id) {
    std::printf("unique_id ");
    for (const auto byte : id) {
        std::printf("%02x", std::to_integer<unsigned>(byte));
    }
    std::printf("\n");
}

/// Names and dtypes as a checkpoint has them, and one tensor that puts those behind it at odd
/// offsets of a packed buffer.
std::vector<param_meta> listed() {
    return {{"model.embed_tokens.weight", dtype::bf16, {64, 16}},
            {"model.layers.0.mlp.gate.weight_scale", dtype::f8_e4m3fn, {7, 3}},
            {"model.layers.0.self_attn.q_proj.weight", dtype::bf16, {16, 16}},
            {"model.layers.0.mlp.gate.e_score_correction_bias", dtype::f32, {5}},
            {"model.layers.0.mlp.experts.0.up_proj.weight", dtype::f8_e4m3fn, {4, 8}},
            {"model.layers.0.mlp.experts.0.up_proj.bias", dtype::f32, {1}},
            {"model.norm.weight", dtype::f16, {16}},
            {"lm_head.weight", dtype::bf16, {64, 16}}};
}

void train(const std::string& url, int rounds, bool packed, bool only_store) {
    const auto model = listed();
    std::vector<std::vector<std::byte>> memory;
    std::vector<named_tensor> tensors;
    std::size_t bytes = 0;
    for (const auto& parameter : model) {
        memory.emplace_back(parameter.byte_size());
        bytes += memory.back().size();
        tensors.push_back(
            {parameter.name, {memory.back().data(), parameter.dtype, parameter.shape}});
    }
    tests::print_list(listed());
    tests::host_nccl_info info;
    info.packed = packed;
    info.packed_buffer_size_bytes = 1024;
    info.meeting = only_store ? nccl::rendezvous::store : nccl::rendezvous::automatic;
    http_sync_client client{url};
    auto engine = trainer_init(info, client, span_source{tensors}, {.init_budget = minute});
    for (int round = 1; round <= rounds; ++round) {
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < memory.size(); ++i) {
            tests::fill(memory[i], static_cast<std::uint64_t>(round), i);
            sum += digest(memory[i]);
        }
        (void)engine.send_weights({.deadline = soon()});
        std::printf("round %d: %zu tensors, %zu bytes, digest %s\n", round, memory.size(), bytes,
                    digest_text(sum).c_str());
    }
    engine.close(soon());
}

void serve() {
    parameter_table table{listed()};
    worker_engine engine{tests::host_nccl{}, table};
    tests::serve_until_input_ends(engine);
}

void fetch(const std::string& host, const std::string& port) {
    auto client = rendezvous::tcp_store_client::connect(
        host, static_cast<std::uint16_t>(std::stoi(port)), soon());
    (void)client.announce(soon());
    print_id(wire::unique_id_from_pickle(client.get("/broadcast_from/0/0", soon())));
}

}  // namespace

int main(int count, char** arguments) {
    return tests::run_tool("vllm_tool",
                           "vllm_tool train URL ROUNDS packed|unpacked automatic|store | serve | "
                           "list | fetch HOST PORT",
                           count, arguments, [](const std::vector<std::string>& words) {
                               const auto verb = words.empty() ? std::string{} : words.front();
                               if (verb == "train" && words.size() == 5) {
                                   train(words[1], std::stoi(words[2]), words[3] == "packed",
                                         words[4] == "store");
                               } else if (verb == "serve" && words.size() == 1) {
                                   serve();
                               } else if (verb == "list" && words.size() == 1) {
                                   tests::print_list(listed());
                               } else if (verb == "fetch" && words.size() == 3) {
                                   fetch(words[1], words[2]);
                               } else {
                                   return false;
                               }
                               return true;
                           });
}
