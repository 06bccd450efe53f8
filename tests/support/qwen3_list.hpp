#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/manifest.hpp>

/// @file
/// The parameter list of a real mixture of experts, made from its published dimensions.

namespace tests {

/// Qwen3-30B-A3B in bf16: 18,867 tensors, 61.1 GB.
[[nodiscard]] inline std::vector<weightwire::param_meta> qwen3_30b_a3b_list() {
    constexpr std::int64_t hidden = 2048;
    constexpr std::int64_t head = 128;
    constexpr std::int64_t vocabulary = 151'936;
    std::vector<weightwire::param_meta> list;
    const auto add = [&](std::string name, weightwire::shape extents) {
        list.push_back({std::move(name) + ".weight", weightwire::dtype::bf16, extents});
    };
    add("model.embed_tokens", {vocabulary, hidden});
    for (int i = 0; i < 48; ++i) {
        const auto layer = "model.layers." + std::to_string(i) + ".";
        add(layer + "input_layernorm", {hidden});
        add(layer + "self_attn.q_proj", {32 * head, hidden});
        add(layer + "self_attn.k_proj", {4 * head, hidden});
        add(layer + "self_attn.v_proj", {4 * head, hidden});
        add(layer + "self_attn.o_proj", {hidden, 32 * head});
        add(layer + "self_attn.q_norm", {head});
        add(layer + "self_attn.k_norm", {head});
        add(layer + "post_attention_layernorm", {hidden});
        add(layer + "mlp.gate", {128, hidden});
        for (int expert = 0; expert < 128; ++expert) {
            const auto prefix = layer + "mlp.experts." + std::to_string(expert) + ".";
            add(prefix + "gate_proj", {768, hidden});
            add(prefix + "up_proj", {768, hidden});
            add(prefix + "down_proj", {hidden, 768});
        }
    }
    add("model.norm", {hidden});
    add("lm_head", {vocabulary, hidden});
    return list;
}

}  // namespace tests
