#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>

/// @file
/// Parameter lists of mixture-of-experts models, made from their published dimensions: names,
/// dtypes and shapes as in their checkpoints, layer by layer.

namespace models {

/// Dimensions of a decoder with grouped-query attention, or where `kv_rank` is not 0 with
/// multi-head latent attention. Every layer after the first `dense_layers` has experts.
struct dimensions {
    std::string_view name;
    std::int64_t layers = 0;
    std::int64_t dense_layers = 0;
    std::int64_t hidden = 0;
    std::int64_t vocabulary = 0;
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;  ///< grouped-query attention
    std::int64_t head = 0;      ///< grouped-query attention: width of a head
    std::int64_t q_rank = 0;    ///< latent attention: width of the compressed queries
    std::int64_t kv_rank = 0;   ///< latent attention: width of the compressed keys and values
    std::int64_t nope = 0;      ///< latent attention: width of a head without position
    std::int64_t rope = 0;      ///< latent attention: width of a head with position
    std::int64_t value = 0;     ///< latent attention: width of a head's value
    std::int64_t experts = 0;   ///< in each layer that has them
    std::int64_t expert_inner = 0;
    std::int64_t shared_inner = 0;  ///< all shared experts together; 0 is none
    std::int64_t dense_inner = 0;   ///< of the layers without experts
    std::int64_t block = 0;         ///< weights in fp8, a scale for each block x block; 0 is bf16

    [[nodiscard]] constexpr bool latent() const noexcept { return kv_rank != 0; }
};

inline constexpr dimensions qwen3_30b_a3b{.name = "qwen3-30b",
                                          .layers = 48,
                                          .hidden = 2048,
                                          .vocabulary = 151'936,
                                          .heads = 32,
                                          .kv_heads = 4,
                                          .head = 128,
                                          .experts = 128,
                                          .expert_inner = 768};
inline constexpr dimensions qwen3_235b_a22b{.name = "qwen3-235b",
                                            .layers = 94,
                                            .hidden = 4096,
                                            .vocabulary = 151'936,
                                            .heads = 64,
                                            .kv_heads = 4,
                                            .head = 128,
                                            .experts = 128,
                                            .expert_inner = 1536};
inline constexpr dimensions kimi_k2{.name = "kimi-k2",
                                    .layers = 61,
                                    .dense_layers = 1,
                                    .hidden = 7168,
                                    .vocabulary = 163'840,
                                    .heads = 64,
                                    .q_rank = 1536,
                                    .kv_rank = 512,
                                    .nope = 128,
                                    .rope = 64,
                                    .value = 128,
                                    .experts = 384,
                                    .expert_inner = 2048,
                                    .shared_inner = 2048,
                                    .dense_inner = 18'432};
inline constexpr dimensions kimi_k2_fp8 = [] {
    auto made = kimi_k2;
    made.name = "kimi-k2-fp8";
    made.block = 128;
    return made;
}();
inline constexpr std::array all{qwen3_30b_a3b, qwen3_235b_a22b, kimi_k2, kimi_k2_fp8};

/// A model with fewer layers or other changes has the same names.
/// @throws weightwire::usage_error there is no such model.
[[nodiscard]] inline dimensions by_name(std::string_view name) {
    std::string known;
    for (const auto& model : all) {
        if (model.name == name) {
            return model;
        }
        known += (known.empty() ? "" : ", ") + std::string{model.name};
    }
    throw weightwire::usage_error{"no model is called `" + std::string{name} + "`; there are " +
                                  known};
}

namespace detail {

class list_maker {
public:
    explicit list_maker(const dimensions& model) : model_{model} {}

    void plain(std::string name, weightwire::shape extents,
               weightwire::dtype type = weightwire::dtype::bf16) {
        list_.push_back({std::move(name), type, extents});
    }
    /// The weight of a linear layer, and where weights are fp8 its scales.
    void linear(const std::string& name, std::int64_t out, std::int64_t in) {
        const bool scaled = model_.block != 0;
        plain(name + ".weight", {out, in},
              scaled ? weightwire::dtype::f8_e4m3fn : weightwire::dtype::bf16);
        if (scaled) {
            const auto blocks = [&](std::int64_t n) {
                return (n + model_.block - 1) / model_.block;
            };
            plain(name + ".weight_scale_inv", {blocks(out), blocks(in)}, weightwire::dtype::f32);
        }
    }
    void feed_forward(const std::string& prefix, std::int64_t inner) {
        linear(prefix + "gate_proj", inner, model_.hidden);
        linear(prefix + "up_proj", inner, model_.hidden);
        linear(prefix + "down_proj", model_.hidden, inner);
    }
    void attention(const std::string& prefix) {
        const auto& m = model_;
        if (m.latent()) {
            linear(prefix + "q_a_proj", m.q_rank, m.hidden);
            plain(prefix + "q_a_layernorm.weight", {m.q_rank});
            linear(prefix + "q_b_proj", m.heads * (m.nope + m.rope), m.q_rank);
            linear(prefix + "kv_a_proj_with_mqa", m.kv_rank + m.rope, m.hidden);
            plain(prefix + "kv_a_layernorm.weight", {m.kv_rank});
            linear(prefix + "kv_b_proj", m.heads * (m.nope + m.value), m.kv_rank);
            linear(prefix + "o_proj", m.hidden, m.heads * m.value);
        } else {
            linear(prefix + "q_proj", m.heads * m.head, m.hidden);
            linear(prefix + "k_proj", m.kv_heads * m.head, m.hidden);
            linear(prefix + "v_proj", m.kv_heads * m.head, m.hidden);
            linear(prefix + "o_proj", m.hidden, m.heads * m.head);
            plain(prefix + "q_norm.weight", {m.head});
            plain(prefix + "k_norm.weight", {m.head});
        }
    }
    void layer(std::int64_t index) {
        const auto& m = model_;
        const auto prefix = "model.layers." + std::to_string(index) + ".";
        plain(prefix + "input_layernorm.weight", {m.hidden});
        attention(prefix + "self_attn.");
        plain(prefix + "post_attention_layernorm.weight", {m.hidden});
        if (index < m.dense_layers) {
            feed_forward(prefix + "mlp.", m.dense_inner);
            return;
        }
        plain(prefix + "mlp.gate.weight", {m.experts, m.hidden});
        if (m.latent()) {
            plain(prefix + "mlp.gate.e_score_correction_bias", {m.experts}, weightwire::dtype::f32);
        }
        for (std::int64_t expert = 0; expert < m.experts; ++expert) {
            feed_forward(prefix + "mlp.experts." + std::to_string(expert) + ".", m.expert_inner);
        }
        if (m.shared_inner != 0) {
            feed_forward(prefix + "mlp.shared_experts.", m.shared_inner);
        }
    }
    [[nodiscard]] std::vector<weightwire::param_meta> take() && { return std::move(list_); }

private:
    const dimensions& model_;
    std::vector<weightwire::param_meta> list_;
};

}  // namespace detail

/// What the checkpoint of a model has, in the order of its layers.
[[nodiscard]] inline std::vector<weightwire::param_meta> parameters(const dimensions& model) {
    detail::list_maker made{model};
    made.plain("model.embed_tokens.weight", {model.vocabulary, model.hidden});
    for (std::int64_t i = 0; i < model.layers; ++i) {
        made.layer(i);
    }
    made.plain("model.norm.weight", {model.hidden});
    made.plain("lm_head.weight", {model.vocabulary, model.hidden});
    return std::move(made).take();
}

}  // namespace models
