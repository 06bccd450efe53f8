#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/shared_memory_arena.hpp>
#include <weightwire/plan/loaders.hpp>
#include <weightwire/plan/recorder.hpp>

#include "small_model.hpp"

namespace tests {

/// A mixture-of-experts model: names and shapes as checkpoints have them, sizes of a toy.
struct moe_sizes {
    std::int64_t layers = 4;
    std::int64_t hidden = 32;
    std::int64_t heads = 8;
    std::int64_t key_value_heads = 2;
    std::int64_t head = 8;
    std::int64_t experts = 8;
    std::int64_t inner = 24;
    std::int64_t vocabulary = 101;
    /// Every worker rank has attention and vocabulary whole, as with data-parallel attention.
    bool whole_attention = false;

    /// Ranks among which attention and vocabulary are shared out, and which of them `rank` is.
    [[nodiscard]] std::int64_t attention_parts(std::int64_t ranks) const {
        return whole_attention ? 1 : ranks;
    }
    [[nodiscard]] std::int64_t attention_part(std::int64_t rank) const {
        return whole_attention ? 0 : rank;
    }
    [[nodiscard]] std::string layer(std::int64_t n) const {
        return "model.layers." + std::to_string(n);
    }
    [[nodiscard]] std::string expert(std::int64_t n, std::int64_t e) const {
        return layer(n) + ".mlp.experts." + std::to_string(e);
    }
    /// The checkpoint.
    [[nodiscard]] std::vector<weightwire::param_meta> checkpoint() const {
        std::vector<weightwire::param_meta> out;
        const auto add = [&](std::string name, weightwire::shape extents) {
            out.push_back({std::move(name), weightwire::dtype::bf16, std::move(extents)});
        };
        add("model.embed_tokens.weight", {vocabulary, hidden});
        for (std::int64_t n = 0; n < layers; ++n) {
            add(layer(n) + ".input_layernorm.weight", {hidden});
            add(layer(n) + ".self_attn.q_proj.weight", {heads * head, hidden});
            add(layer(n) + ".self_attn.k_proj.weight", {key_value_heads * head, hidden});
            add(layer(n) + ".self_attn.v_proj.weight", {key_value_heads * head, hidden});
            add(layer(n) + ".self_attn.o_proj.weight", {hidden, heads * head});
            add(layer(n) + ".mlp.gate.weight", {experts, hidden});
            for (std::int64_t e = 0; e < experts; ++e) {
                add(expert(n, e) + ".gate_proj.weight", {inner, hidden});
                add(expert(n, e) + ".up_proj.weight", {inner, hidden});
                add(expert(n, e) + ".down_proj.weight", {hidden, inner});
            }
        }
        add("model.norm.weight", {hidden});
        add("lm_head.weight", {vocabulary, hidden});
        return out;
    }
    [[nodiscard]] std::int64_t vocabulary_rows(std::int64_t ranks) const {
        return (vocabulary + ranks - 1) / ranks;
    }
    /// What one of `ranks` worker ranks holds: attention and vocabulary by heads and rows, experts
    /// whole.
    [[nodiscard]] std::vector<weightwire::param_meta> worker(std::int64_t ranks) const {
        std::vector<weightwire::param_meta> out;
        const auto add = [&](std::string name, weightwire::shape extents) {
            out.push_back({std::move(name), weightwire::dtype::bf16, std::move(extents)});
        };
        const auto parts = attention_parts(ranks);
        const auto kv = std::max<std::int64_t>(1, key_value_heads / parts);
        add("model.embed_tokens.weight", {vocabulary_rows(parts), hidden});
        for (std::int64_t n = 0; n < layers; ++n) {
            add(layer(n) + ".norm", {hidden});
            add(layer(n) + ".qkv", {(heads / parts + 2 * kv) * head, hidden});
            add(layer(n) + ".o", {hidden, heads * head / parts});
            add(layer(n) + ".router", {experts, hidden});
            add(layer(n) + ".experts.gate_up", {experts / ranks, 2 * inner, hidden});
            add(layer(n) + ".experts.down", {experts / ranks, hidden, inner});
        }
        add("model.norm.weight", {hidden});
        add("lm_head.weight", {vocabulary_rows(parts), hidden});
        return out;
    }
    /// The loader of worker rank `rank` of `ranks`.
    void load(weightwire::plan::recorder& r, std::int64_t rank, std::int64_t ranks) const {
        namespace loaders = weightwire::plan::loaders;
        const loaders::shard part{attention_part(rank), attention_parts(ranks)};
        loaders::vocabulary_parallel(r.source("model.embed_tokens.weight"),
                                     r.destination("model.embed_tokens.weight"), vocabulary, part);
        for (std::int64_t n = 0; n < layers; ++n) {
            const auto from = [&](std::string_view name) {
                return r.source(layer(n) + std::string{name});
            };
            loaders::replicated(from(".input_layernorm.weight"), r.destination(layer(n) + ".norm"));
            loaders::fused_qkv(from(".self_attn.q_proj.weight"), from(".self_attn.k_proj.weight"),
                               from(".self_attn.v_proj.weight"), r.destination(layer(n) + ".qkv"),
                               {.query = heads, .key_value = key_value_heads}, part);
            loaders::row_parallel(from(".self_attn.o_proj.weight"), r.destination(layer(n) + ".o"),
                                  part);
            loaders::replicated(from(".mlp.gate.weight"), r.destination(layer(n) + ".router"));
            loaders::stacked_experts(
                [&](std::int64_t e) {
                    return loaders::expert_sources{r.source(expert(n, e) + ".gate_proj.weight"),
                                                   r.source(expert(n, e) + ".up_proj.weight"),
                                                   r.source(expert(n, e) + ".down_proj.weight")};
                },
                r.destination(layer(n) + ".experts.gate_up"),
                r.destination(layer(n) + ".experts.down"), experts, {rank, ranks});
        }
        loaders::replicated(r.source("model.norm.weight"), r.destination("model.norm.weight"));
        loaders::vocabulary_parallel(r.source("lm_head.weight"), r.destination("lm_head.weight"),
                                     vocabulary, part);
    }
    /// Whether trainer rank `rank` of PP2 x EP2 holds a parameter: stages halve the layers, expert
    /// ranks the experts, and all else of a stage is on both of its ranks.
    [[nodiscard]] bool held_by(int rank, std::string_view name) const {
        const int stage = rank / 2;
        std::int64_t at_stage = name == "model.embed_tokens.weight" ? 0 : 1;
        if (const auto at = name.find("layers."); at != std::string_view::npos) {
            at_stage = std::stoll(std::string{name.substr(at + 7)}) * 2 / layers;
        }
        const auto at = name.find("experts.");
        const bool mine = at == std::string_view::npos ||
                          std::stoll(std::string{name.substr(at + 8)}) * 2 / experts == rank % 2;
        return at_stage == stage && mine;
    }
};

/// The full checkpoint of a version, in ordinary memory.
class moe_checkpoint {
public:
    moe_checkpoint(const moe_sizes& sizes, std::uint64_t version) {
        const auto list = sizes.checkpoint();
        for (std::size_t i = 0; i < list.size(); ++i) {
            auto& bytes = bytes_[list[i].name];
            bytes.resize(list[i].byte_size());
            fill(bytes, version, i);
        }
    }
    /// What worker rank `rank` of `ranks` must hold of a parameter of its own, by plain loops.
    /// Padding rows are left zero.
    [[nodiscard]] std::vector<std::byte> expected(const moe_sizes& m, std::string_view name,
                                                  std::int64_t rank, std::int64_t ranks) const {
        std::vector<std::byte> out;
        const auto parts = m.attention_parts(ranks);
        const auto part = m.attention_part(rank);
        const auto row_bytes = static_cast<std::size_t>(m.hidden) * 2;
        const auto rows = [&](const std::string& source, std::int64_t begin, std::int64_t count) {
            const auto& from = bytes_.at(source);
            const auto at = from.begin() + static_cast<std::ptrdiff_t>(begin) *
                                               static_cast<std::ptrdiff_t>(row_bytes);
            out.insert(
                out.end(), at,
                at + static_cast<std::ptrdiff_t>(count) * static_cast<std::ptrdiff_t>(row_bytes));
        };
        const auto whole = [&](const std::string& source) {
            out.insert(out.end(), bytes_.at(source).begin(), bytes_.at(source).end());
        };
        if (name.find("layers") == std::string_view::npos) {
            if (name == "model.norm.weight") {
                whole("model.norm.weight");
                return out;
            }
            const auto each = m.vocabulary_rows(parts);
            const auto begin = std::min(part * each, m.vocabulary);
            rows(std::string{name}, begin, std::min(each, m.vocabulary - begin));
            out.resize(static_cast<std::size_t>(each) * row_bytes);
            return out;
        }
        const auto n = std::stoll(std::string{name.substr(name.find("layers.") + 7)});
        const auto layer = m.layer(n);
        const auto mine = m.experts / ranks;
        if (name.ends_with(".norm")) {
            whole(layer + ".input_layernorm.weight");
        } else if (name.ends_with(".router")) {
            whole(layer + ".mlp.gate.weight");
        } else if (name.ends_with(".qkv")) {
            const auto query = m.heads / parts;
            const auto kv = std::max<std::int64_t>(1, m.key_value_heads / parts);
            const auto first = part * m.key_value_heads / parts;
            rows(layer + ".self_attn.q_proj.weight", part * query * m.head, query * m.head);
            rows(layer + ".self_attn.k_proj.weight", first * m.head, kv * m.head);
            rows(layer + ".self_attn.v_proj.weight", first * m.head, kv * m.head);
        } else if (name.ends_with(".o")) {
            const auto& from = bytes_.at(layer + ".self_attn.o_proj.weight");
            const auto columns = static_cast<std::size_t>(m.heads * m.head / parts) * 2;
            for (std::int64_t row = 0; row < m.hidden; ++row) {
                const auto at = from.begin() + row * m.heads * m.head * 2 +
                                part * static_cast<std::ptrdiff_t>(columns);
                out.insert(out.end(), at, at + static_cast<std::ptrdiff_t>(columns));
            }
        } else if (name.ends_with(".gate_up")) {
            for (auto e = rank * mine; e < (rank + 1) * mine; ++e) {
                whole(m.expert(n, e) + ".gate_proj.weight");
                whole(m.expert(n, e) + ".up_proj.weight");
            }
        } else {
            for (auto e = rank * mine; e < (rank + 1) * mine; ++e) {
                whole(m.expert(n, e) + ".down_proj.weight");
            }
        }
        return out;
    }

private:
    std::map<std::string, std::vector<std::byte>> bytes_;
};

/// One trainer rank's shard: only what it holds is in its memory.
template <weightwire::tensor_lifetime Lifetime>
class moe_shard {
public:
    static constexpr auto lifetime = Lifetime;

    /// @param shared in an arena, which others can read; else in ordinary memory.
    moe_shard(const moe_sizes& sizes, int rank, bool shared = true)
        : metadata_{sizes.checkpoint()}, arena_{bytes_of(sizes, rank)} {
        for (std::size_t i = 0; i < metadata_.size(); ++i) {
            if (!sizes.held_by(rank, metadata_[i].name)) {
                continue;
            }
            positions_.push_back(i);
            names_.push_back(metadata_[i].name);
            if (shared) {
                const auto at = arena_.allocate(metadata_[i].dtype, metadata_[i].shape);
                memory_.emplace_back(at.data(), at.byte_size());
            } else {
                auto& own = plain_.emplace_back(metadata_[i].byte_size());
                memory_.emplace_back(own);
            }
            tensors_.push_back({metadata_[i].name,
                                {memory_.back().data(), metadata_[i].dtype, metadata_[i].shape}});
        }
    }
    moe_shard(const moe_shard&) = delete;
    moe_shard& operator=(const moe_shard&) = delete;

    void set(std::uint64_t version) {
        for (std::size_t i = 0; i < memory_.size(); ++i) {
            fill(memory_[i], version, positions_[i]);
        }
    }
    [[nodiscard]] const std::vector<weightwire::param_meta>& metadata() const { return metadata_; }
    [[nodiscard]] const std::vector<std::string>& held_names() const { return names_; }
    [[nodiscard]] const std::vector<weightwire::named_tensor>& weights() const { return tensors_; }
    [[nodiscard]] std::span<const std::span<std::byte>> memory() const { return memory_; }

private:
    [[nodiscard]] static std::uint64_t bytes_of(const moe_sizes& sizes, int rank) {
        std::vector<weightwire::param_meta> held;
        for (const auto& parameter : sizes.checkpoint()) {
            if (sizes.held_by(rank, parameter.name)) {
                held.push_back(parameter);
            }
        }
        return weightwire::shm::arena::bytes_for(weightwire::manifest{held, "shard"});
    }

    std::vector<weightwire::param_meta> metadata_;
    weightwire::shm::arena arena_;
    std::vector<std::vector<std::byte>> plain_;
    std::vector<std::size_t> positions_;
    std::vector<std::string> names_;
    std::vector<std::span<std::byte>> memory_;
    std::vector<weightwire::named_tensor> tensors_;
};

}  // namespace tests
