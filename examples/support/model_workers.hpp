#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/plan/layout.hpp>
#include <weightwire/plan/loaders.hpp>
#include <weightwire/plan/recorder.hpp>

#include "model_lists.hpp"

/// @file
/// What a worker's rank keeps of the models of model_lists.hpp, in the fused form that inference
/// engines use, and the loader that fills it.

namespace models {

/// One rank of a worker.
///
///     const models::worker rank{models::kimi_k2, plan::worker_position_of(layout, r, ranks)};
///     const manifest mine{rank.parameters()};
///     const auto made = plan::record(checkpoint, mine, rank);
class worker {
public:
    worker(dimensions model, weightwire::plan::worker_position position)
        : model_{model}, position_{position} {}

    /// What the rank keeps, layer by layer.
    /// @throws weightwire::usage_error the ranks cannot share a dimension of the model.
    [[nodiscard]] std::vector<weightwire::param_meta> parameters() const {
        std::vector<weightwire::param_meta> list;
        declaration declared{*this, list};
        visit(declared);
        return list;
    }
    /// The loader.
    void operator()(weightwire::plan::recorder& recorder) const {
        copy copied{*this, recorder};
        visit(copied);
    }

private:
    using shard = weightwire::plan::loaders::shard;
    using share = weightwire::plan::loaders::share;

    /// Rows of the outputs, or columns of the inputs, that a rank keeps.
    [[nodiscard]] static share mine(std::int64_t extent, const shard& part, std::string_view what) {
        if (extent % part.count != 0) {
            throw weightwire::usage_error{std::to_string(part.count) + " ranks cannot share the " +
                                          std::to_string(extent) + " of " + std::string{what}};
        }
        return weightwire::plan::loaders::share_of(extent, part);
    }
    /// The blocks that cover elements: neighbours both have a block that they share.
    [[nodiscard]] share blocks(const share& elements) const {
        const auto begin = elements.begin / model_.block;
        const auto end = (elements.begin + elements.length + model_.block - 1) / model_.block;
        return {begin, end - begin};
    }

    /// A piece of a weight: `rows` and `columns` of the source.
    struct piece {
        std::string source;  ///< without `.weight`
        share rows;
        share columns;
    };

    /// Lists names and shapes.
    struct declaration {
        const worker& owner;
        std::vector<weightwire::param_meta>& list;

        void plain(const std::string& name, weightwire::shape extents,
                   weightwire::dtype type = weightwire::dtype::bf16) {
            list.push_back({name, type, extents});
        }
        /// Pieces below each other.
        void fused(const std::string& name, const std::vector<piece>& pieces) {
            std::int64_t rows = 0;
            std::int64_t scale_rows = 0;
            const bool scaled = owner.model_.block != 0;
            for (const auto& part : pieces) {
                rows += part.rows.length;
                scale_rows += scaled ? owner.blocks(part.rows).length : 0;
            }
            plain(name + ".weight", {rows, pieces[0].columns.length},
                  scaled ? weightwire::dtype::f8_e4m3fn : weightwire::dtype::bf16);
            if (scaled) {
                plain(name + ".weight_scale_inv",
                      {scale_rows, owner.blocks(pieces[0].columns).length}, weightwire::dtype::f32);
            }
        }
        void heads(const std::string& prefix, std::int64_t rows, std::int64_t columns) {
            plain(prefix + "qkv_proj.weight", {rows, columns});
        }
        void rows(const std::string& name, std::int64_t count, std::int64_t columns) {
            plain(name, {count, columns});
        }
        void stacked(const std::string& prefix, const share& experts, const share& inner) {
            const auto& m = owner.model_;
            const bool scaled = m.block != 0;
            const auto type = scaled ? weightwire::dtype::f8_e4m3fn : weightwire::dtype::bf16;
            plain(prefix + "w13_weight", {experts.length, 2 * inner.length, m.hidden}, type);
            plain(prefix + "w2_weight", {experts.length, m.hidden, inner.length}, type);
            if (scaled) {
                const auto cut = owner.blocks(inner).length;
                const auto whole = owner.blocks({0, m.hidden}).length;
                plain(prefix + "w13_weight_scale_inv", {experts.length, 2 * cut, whole},
                      weightwire::dtype::f32);
                plain(prefix + "w2_weight_scale_inv", {experts.length, whole, cut},
                      weightwire::dtype::f32);
            }
        }
    };

    /// Copies.
    struct copy {
        const worker& owner;
        weightwire::plan::recorder& recorder;

        void plain(const std::string& name, const weightwire::shape&,
                   weightwire::dtype = weightwire::dtype::bf16) {
            weightwire::plan::loaders::replicated(recorder.source(name),
                                                  recorder.destination(name));
        }
        void fused(const std::string& name, const std::vector<piece>& pieces) {
            pieces_below_each_other(name + ".weight", pieces, ".weight");
            if (owner.model_.block != 0) {
                auto scales = pieces;
                for (auto& part : scales) {
                    part.rows = owner.blocks(part.rows);
                    part.columns = owner.blocks(part.columns);
                }
                pieces_below_each_other(name + ".weight_scale_inv", scales, ".weight_scale_inv");
            }
        }
        void pieces_below_each_other(const std::string& name, const std::vector<piece>& pieces,
                                     std::string_view suffix) {
            const auto destination = recorder.destination(name);
            std::int64_t row = 0;
            for (const auto& part : pieces) {
                recorder.source(part.source + std::string{suffix})
                    .narrow(0, part.rows.begin, part.rows.length)
                    .narrow(1, part.columns.begin, part.columns.length)
                    .copy_to(destination.narrow(0, row, part.rows.length));
                row += part.rows.length;
            }
        }
        void heads(const std::string& prefix, std::int64_t, std::int64_t) {
            weightwire::plan::loaders::fused_qkv(recorder.source(prefix + "q_proj.weight"),
                                                 recorder.source(prefix + "k_proj.weight"),
                                                 recorder.source(prefix + "v_proj.weight"),
                                                 recorder.destination(prefix + "qkv_proj.weight"),
                                                 {owner.model_.heads, owner.model_.kv_heads},
                                                 owner.position_.tensor);
        }
        void rows(const std::string& name, std::int64_t, std::int64_t) {
            weightwire::plan::loaders::vocabulary_parallel(
                recorder.source(name), recorder.destination(name), owner.model_.vocabulary,
                owner.position_.tensor);
        }
        void stacked(const std::string& prefix, const share& experts, const share& inner) {
            const auto open = [&](std::int64_t expert, std::string_view suffix) {
                const auto source = [&](std::string_view projection) {
                    return recorder.source(prefix + std::to_string(expert) + "." +
                                           std::string{projection} + std::string{suffix});
                };
                return weightwire::plan::loaders::expert_sources{
                    source("gate_proj"), source("up_proj"), source("down_proj")};
            };
            weightwire::plan::loaders::stacked_experts(
                [&](std::int64_t expert) { return open(expert, ".weight"); },
                recorder.destination(prefix + "w13_weight"),
                recorder.destination(prefix + "w2_weight"), owner.model_.experts,
                owner.position_.expert, owner.position_.expert_tensor);
            if (owner.model_.block == 0) {
                return;
            }
            const auto cut = owner.blocks(inner);
            const auto gate_up = recorder.destination(prefix + "w13_weight_scale_inv");
            const auto down = recorder.destination(prefix + "w2_weight_scale_inv");
            for (std::int64_t local = 0; local < experts.length; ++local) {
                const auto from = open(experts.begin + local, ".weight_scale_inv");
                const auto to = gate_up[local];
                from.gate.narrow(0, cut.begin, cut.length).copy_to(to.narrow(0, 0, cut.length));
                from.up.narrow(0, cut.begin, cut.length)
                    .copy_to(to.narrow(0, cut.length, cut.length));
                from.down.narrow(1, cut.begin, cut.length).copy_to(down[local]);
            }
        }
    };

    template <class Visitor>
    void visit(Visitor& each) const {
        const auto& m = model_;
        const auto layers = weightwire::plan::loaders::share_of(
            m.layers, position_.stage, weightwire::plan::loaders::uneven::first_is_larger);
        const auto vocabulary =
            (m.vocabulary + position_.tensor.count - 1) / position_.tensor.count;
        if (position_.stage.rank == 0) {
            each.rows("model.embed_tokens.weight", vocabulary, m.hidden);
        }
        for (auto i = layers.begin; i < layers.begin + layers.length; ++i) {
            const auto prefix = "model.layers." + std::to_string(i) + ".";
            each.plain(prefix + "input_layernorm.weight", {m.hidden});
            attention(each, prefix + "self_attn.");
            each.plain(prefix + "post_attention_layernorm.weight", {m.hidden});
            if (i < m.dense_layers) {
                feed_forward(each, prefix + "mlp.", m.dense_inner);
                continue;
            }
            each.plain(prefix + "mlp.gate.weight", {m.experts, m.hidden});
            if (m.latent()) {
                each.plain(prefix + "mlp.gate.e_score_correction_bias", {m.experts},
                           weightwire::dtype::f32);
            }
            each.stacked(prefix + "mlp.experts.", mine(m.experts, position_.expert, "experts"),
                         mine(m.expert_inner, position_.expert_tensor, "an expert's inner width"));
            if (m.shared_inner != 0) {
                feed_forward(each, prefix + "mlp.shared_experts.", m.shared_inner);
            }
        }
        if (position_.stage.rank + 1 == position_.stage.count) {
            each.plain("model.norm.weight", {m.hidden});
            each.rows("lm_head.weight", vocabulary, m.hidden);
        }
    }

    template <class Visitor>
    void attention(Visitor& each, const std::string& prefix) const {
        const auto& m = model_;
        const auto part = position_.tensor;
        const auto own = mine(m.heads, part, "heads");
        const auto width = [&](std::int64_t of_head) {
            return share{own.begin * of_head, own.length * of_head};
        };
        if (!m.latent()) {
            const auto key_values = std::max<std::int64_t>(m.kv_heads / part.count, 1);
            each.heads(prefix, (own.length + 2 * key_values) * m.head, m.hidden);
            each.fused(prefix + "o_proj", {{prefix + "o_proj", {0, m.hidden}, width(m.head)}});
            each.plain(prefix + "q_norm.weight", {m.head});
            each.plain(prefix + "k_norm.weight", {m.head});
            return;
        }
        const share hidden{0, m.hidden};
        each.fused(prefix + "fused_qkv_a_proj",
                   {{prefix + "q_a_proj", {0, m.q_rank}, hidden},
                    {prefix + "kv_a_proj_with_mqa", {0, m.kv_rank + m.rope}, hidden}});
        each.plain(prefix + "q_a_layernorm.weight", {m.q_rank});
        each.fused(prefix + "q_b_proj",
                   {{prefix + "q_b_proj", width(m.nope + m.rope), {0, m.q_rank}}});
        each.plain(prefix + "kv_a_layernorm.weight", {m.kv_rank});
        each.fused(prefix + "kv_b_proj",
                   {{prefix + "kv_b_proj", width(m.nope + m.value), {0, m.kv_rank}}});
        each.fused(prefix + "o_proj", {{prefix + "o_proj", hidden, width(m.value)}});
    }

    template <class Visitor>
    void feed_forward(Visitor& each, const std::string& prefix, std::int64_t inner) const {
        const auto own = mine(inner, position_.tensor, "a feed-forward layer");
        const share hidden{0, model_.hidden};
        each.fused(prefix + "gate_up_proj",
                   {{prefix + "gate_proj", own, hidden}, {prefix + "up_proj", own, hidden}});
        each.fused(prefix + "down_proj", {{prefix + "down_proj", hidden, own}});
    }

    dimensions model_;
    weightwire::plan::worker_position position_;
};

}  // namespace models
