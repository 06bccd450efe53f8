// SPDX-License-Identifier: Apache-2.0

// Question: what does a vLLM-form update request of 37,000 names cost before a byte moves?
// Parsed and checked: at most 30 ms. One whose bytes equal the last one's: under 1 ms.
//
//   json_update_info [ROUNDS]
//
// The list is that of Qwen3-235B-A22B, generated from its published dimensions.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/manifest.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/vllm_requests.hpp>

namespace {

using weightwire::dtype;
using weightwire::manifest;
using weightwire::param_meta;
using weightwire::shape;
namespace wire = weightwire::wire;

/// 94 layers, hidden 4096, 64 heads, 4 key-value heads of 128, 128 experts of 1536.
manifest qwen3_235b() {
    std::vector<param_meta> list;
    const auto add = [&list](std::string name, const shape& extents) {
        list.push_back({.name = std::move(name), .dtype = dtype::bf16, .shape = extents});
    };
    add("model.embed_tokens.weight", {151936, 4096});
    for (int layer = 0; layer < 94; ++layer) {
        const auto prefix = "model.layers." + std::to_string(layer) + ".";
        add(prefix + "self_attn.q_proj.weight", {8192, 4096});
        add(prefix + "self_attn.k_proj.weight", {512, 4096});
        add(prefix + "self_attn.v_proj.weight", {512, 4096});
        add(prefix + "self_attn.o_proj.weight", {4096, 8192});
        add(prefix + "self_attn.q_norm.weight", {128});
        add(prefix + "self_attn.k_norm.weight", {128});
        add(prefix + "mlp.gate.weight", {128, 4096});
        for (int expert = 0; expert < 128; ++expert) {
            const auto inner = prefix + "mlp.experts." + std::to_string(expert) + ".";
            add(inner + "gate_proj.weight", {1536, 4096});
            add(inner + "up_proj.weight", {1536, 4096});
            add(inner + "down_proj.weight", {4096, 1536});
        }
        add(prefix + "input_layernorm.weight", {4096});
        add(prefix + "post_attention_layernorm.weight", {4096});
    }
    add("model.norm.weight", {4096});
    add("lm_head.weight", {151936, 4096});
    return manifest{std::move(list)};
}

std::string update_body(const manifest& parameters) {
    std::string body;
    wire::json_writer out{body};
    out.begin_object().key("update_info").begin_object();
    wire::write_parameter_lists(out, parameters, "dtype_names");
    out.end_object().end_object();
    return body;
}

/// Runs `work` `rounds` times after three warm-ups; prints median, 99th percentile and the bound.
template <class Work>
void measure(std::string_view what, int rounds, double bound_ms, Work work) {
    std::vector<double> milliseconds;
    for (int round = -3; round < rounds; ++round) {
        const auto begin = std::chrono::steady_clock::now();
        work();
        const std::chrono::duration<double, std::milli> took =
            std::chrono::steady_clock::now() - begin;
        if (round >= 0) {
            milliseconds.push_back(took.count());
        }
    }
    std::sort(milliseconds.begin(), milliseconds.end());
    const auto median = milliseconds[milliseconds.size() / 2];
    const auto p99 = milliseconds[(milliseconds.size() * 99 + 99) / 100 - 1];
    std::printf("%-44s %10.3f %10.3f", std::string{what}.c_str(), median, p99);
    if (bound_ms > 0) {
        std::printf(" %10.1f %8s", bound_ms, median <= bound_ms ? "yes" : "NO");
    }
    std::printf("\n");
}

std::string processor() {
    std::ifstream file{"/proc/cpuinfo"};
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("model name")) {
            return line.substr(line.find(':') + 2);
        }
    }
    return "unknown processor";
}

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "json_update_info: %s\n", what);
        std::exit(1);
    }
}

}  // namespace

int main(int count, char** arguments) {
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 200;
    require(rounds > 0, "the number of rounds must be positive");
    const auto parameters = qwen3_235b();
    const auto body = update_body(parameters);
    const auto equal_body = std::string{body};  // another address, as the next request's body has
    std::printf("command: json_update_info %d\nmachine: %s\n", rounds, processor().c_str());
    std::printf("list: Qwen3-235B-A22B, %zu names, body of %zu bytes\n\n", parameters.size(),
                body.size());
    std::printf("%-44s %10s %10s %10s %8s\n", "milliseconds", "median", "p99", "bound", "within");

    std::size_t seen = 0;
    measure("vLLM update request, parsed and checked", rounds, 30.0,
            [&] { seen = wire::parse_vllm_update(body).entry(0).parameters.size(); });
    require(seen == parameters.size(), "the parsed list has another length");
    require(wire::parse_vllm_update(body).entry(0).parameters.hash() == parameters.hash(),
            "the parsed list differs");

    wire::vllm_update_cache cache;
    const auto first = cache.parse(body);
    measure("the same bytes again", rounds, 1.0,
            [&] { require(cache.parse(equal_body) == first, "the cache has missed"); });

    const wire::native_init init{.backend = "ipc", .parameters = parameters};
    std::string text;
    measure("native init call, encoded", rounds, 0, [&] { text = wire::encode(init); });
    measure("native init call, decoded", rounds, 0,
            [&] { seen = wire::decode_init(text)->parameters.size(); });
    require(wire::decode_init(text)->parameters.hash() == parameters.hash(),
            "the decoded list differs");
    std::uint64_t hash = 0;
    measure("plan hash of the list", rounds, 0,
            [&] { hash ^= wire::plan_hash("ipc", 9, parameters, "{}"); });
    measure("native update call, encoded and decoded", rounds, 0, [&] {
        const auto bytes = wire::encode(wire::native_update{.round = 1});
        hash ^= wire::decode_update({bytes.data(), bytes.size()}).round;
    });
    return 0;
}
