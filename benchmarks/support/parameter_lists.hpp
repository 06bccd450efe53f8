#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>

/// @file
/// Parameter lists of real models, made from their published dimensions, or read from a file.

namespace benchmarks {

/// Qwen2.5-0.5B in bf16: 290 tensors, 988 MB. Embeddings are tied.
[[nodiscard]] inline std::vector<weightwire::param_meta> half_billion_list() {
    constexpr std::int64_t layers = 24;
    constexpr std::int64_t hidden = 896;
    constexpr std::int64_t feed_forward = 4864;
    constexpr std::int64_t key_value = 128;  // 2 heads of 64
    constexpr std::int64_t vocabulary = 151'936;
    std::vector<weightwire::param_meta> list;
    const auto add = [&](std::string name, weightwire::shape extents) {
        list.push_back({std::move(name), weightwire::dtype::bf16, extents});
    };
    add("model.embed_tokens.weight", {vocabulary, hidden});
    for (std::int64_t i = 0; i < layers; ++i) {
        const auto layer = "model.layers." + std::to_string(i) + ".";
        add(layer + "input_layernorm.weight", {hidden});
        add(layer + "mlp.down_proj.weight", {hidden, feed_forward});
        add(layer + "mlp.gate_proj.weight", {feed_forward, hidden});
        add(layer + "mlp.up_proj.weight", {feed_forward, hidden});
        add(layer + "post_attention_layernorm.weight", {hidden});
        add(layer + "self_attn.k_proj.bias", {key_value});
        add(layer + "self_attn.k_proj.weight", {key_value, hidden});
        add(layer + "self_attn.o_proj.weight", {hidden, hidden});
        add(layer + "self_attn.q_proj.bias", {hidden});
        add(layer + "self_attn.q_proj.weight", {hidden, hidden});
        add(layer + "self_attn.v_proj.bias", {key_value});
        add(layer + "self_attn.v_proj.weight", {key_value, hidden});
    }
    add("model.norm.weight", {hidden});
    return list;
}

/// Qwen3-30B-A3B in bf16: 18,867 tensors, 61.1 GB with all 48 layers. Embeddings are not tied.
[[nodiscard]] inline std::vector<weightwire::param_meta> qwen3_30b_a3b_list(std::int64_t layers) {
    constexpr std::int64_t hidden = 2048;
    constexpr std::int64_t head = 128;
    constexpr std::int64_t queries = 32 * head;
    constexpr std::int64_t key_values = 4 * head;
    constexpr std::int64_t experts = 128;
    constexpr std::int64_t feed_forward = 768;
    constexpr std::int64_t vocabulary = 151'936;
    std::vector<weightwire::param_meta> list;
    const auto add = [&](std::string name, weightwire::shape extents) {
        list.push_back({std::move(name), weightwire::dtype::bf16, extents});
    };
    add("model.embed_tokens.weight", {vocabulary, hidden});
    for (std::int64_t i = 0; i < layers; ++i) {
        const auto layer = "model.layers." + std::to_string(i) + ".";
        add(layer + "input_layernorm.weight", {hidden});
        add(layer + "self_attn.q_proj.weight", {queries, hidden});
        add(layer + "self_attn.k_proj.weight", {key_values, hidden});
        add(layer + "self_attn.v_proj.weight", {key_values, hidden});
        add(layer + "self_attn.o_proj.weight", {hidden, queries});
        add(layer + "self_attn.q_norm.weight", {head});
        add(layer + "self_attn.k_norm.weight", {head});
        add(layer + "post_attention_layernorm.weight", {hidden});
        add(layer + "mlp.gate.weight", {experts, hidden});
        for (std::int64_t expert = 0; expert < experts; ++expert) {
            const auto prefix = layer + "mlp.experts." + std::to_string(expert) + ".";
            add(prefix + "gate_proj.weight", {feed_forward, hidden});
            add(prefix + "up_proj.weight", {feed_forward, hidden});
            add(prefix + "down_proj.weight", {hidden, feed_forward});
        }
    }
    add("model.norm.weight", {hidden});
    add("lm_head.weight", {vocabulary, hidden});
    return list;
}

/// A parameter a line: name, torch's dtype, extents.
/// @throws weightwire::usage_error there is none, or a dtype is unknown.
[[nodiscard]] inline std::vector<weightwire::param_meta> read_list(const std::string& path) {
    std::ifstream file{path};
    std::vector<weightwire::param_meta> list;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words{line};
        std::string name;
        std::string type;
        words >> name >> type;
        std::vector<std::int64_t> extents;
        for (std::int64_t extent = 0; words >> extent;) {
            extents.push_back(extent);
        }
        const auto known = weightwire::dtype_from_torch(type);
        if (!known) {
            throw weightwire::usage_error{"the list has an unknown dtype: " + line};
        }
        list.push_back({name, *known, weightwire::shape{extents}});
    }
    if (list.empty()) {
        throw weightwire::usage_error{"no parameters in " + path};
    }
    return list;
}

}  // namespace benchmarks
