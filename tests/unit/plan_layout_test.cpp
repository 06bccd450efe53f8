// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/layout.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/recorder.hpp>

#include "../../benchmarks/support/parameter_lists.hpp"
#include "../../examples/support/model_lists.hpp"
#include "../../examples/support/model_workers.hpp"

namespace {

using namespace weightwire;
using plan::held_by_layout;
using plan::parallel_layout;
using plan::parse_layout;
using plan::trainer_position_of;
using plan::worker_position_of;

std::int64_t pick(std::mt19937& random, std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>{least, most}(random);
}

std::int64_t one_of(std::mt19937& random, const std::vector<std::int64_t>& choices) {
    return choices[static_cast<std::size_t>(
        pick(random, 0, static_cast<std::int64_t>(choices.size()) - 1))];
}

/// A model small enough to look at each byte, with uneven layers, of a random kind.
models::dimensions small_model(std::mt19937& random) {
    models::dimensions made{.name = "small",
                            .layers = pick(random, 1, 5),
                            .hidden = 16,
                            .vocabulary = pick(random, 9, 20),
                            .heads = 8,
                            .kv_heads = one_of(random, {1, 2, 4}),
                            .head = 2,
                            .experts = 8,
                            .expert_inner = 16};
    if (pick(random, 0, 1) == 0) {
        made.dense_layers = pick(random, 0, 1);
        made.q_rank = 6;
        made.kv_rank = 4;
        made.nope = 2;
        made.rope = 1;
        made.value = 2;
        made.shared_inner = 8;
        made.dense_inner = 24;
        made.block = one_of(random, {0, 4});
    }
    return made;
}

TEST_CASE("layouts are read as people write them") {
    CHECK(parse_layout("tp4,pp2,ep8") == parallel_layout{.tensor = 4, .pipeline = 2, .expert = 8});
    CHECK(parse_layout("dp16,ep16") == parallel_layout{.expert = 16, .data = 16});
    CHECK(parse_layout("ep32,tp32") == parallel_layout{.tensor = 32, .expert = 32});
    CHECK(to_string(parse_layout("ep8,pp2,tp4")) == "tp4,pp2,ep8");
    CHECK(to_string(parse_layout("tp1")) == "tp1");
    CHECK(parse_layout(to_string(parse_layout("dp3,tp2,pp5"))) == parse_layout("tp2,pp5,dp3"));
    for (const auto* text : {"", "tp", "tp0", "tp-1", "xp4", "tp4,", ",tp4", "tp4,tp4", "tp4 pp2",
                             "tp4x", "tp99999999999999999999", "t", "4"}) {
        CAPTURE(text);
        CHECK_THROWS_AS((void)parse_layout(text), usage_error);
    }
}

TEST_CASE("ranks stand where trainers and inference engines put them") {
    const auto trainer = parse_layout("tp4,pp2,ep8");
    CHECK(plan::fewest_ranks(trainer) == 16);
    const auto t13 = trainer_position_of(trainer, 13, 16);
    CHECK(t13.stage.rank == 1);
    CHECK(t13.tensor.rank == 1);
    CHECK(t13.expert.rank == 5);
    // Twice the ranks: each stage is there twice, and its experts too.
    CHECK(trainer_position_of(trainer, 17, 32).stage.rank == 1);
    CHECK(trainer_position_of(trainer, 15, 32).expert.rank == 7);

    const auto data = worker_position_of(parse_layout("dp16,ep16"), 5, 16);
    CHECK(data.tensor.count == 1);
    CHECK(data.expert.rank == 5);
    CHECK(data.expert_tensor.count == 1);
    const auto third = worker_position_of(parse_layout("tp32,ep32"), 70, 128);
    CHECK(third.replica == 2);
    CHECK(third.tensor.rank == 6);
    CHECK(third.expert.rank == 6);
    // Without expert parallelism all ranks of a stage share every expert.
    const auto shared = worker_position_of(parse_layout("tp4,dp2"), 6, 8);
    CHECK(shared.tensor.rank == 2);
    CHECK(shared.expert.count == 1);
    CHECK(shared.expert_tensor.rank == 6);
    CHECK(shared.expert_tensor.count == 8);

    CHECK_THROWS_AS((void)trainer_position_of(trainer, 0, 12), usage_error);
    CHECK_THROWS_AS((void)trainer_position_of(trainer, 16, 16), usage_error);
    CHECK_THROWS_AS((void)trainer_position_of(parse_layout("tp2,dp2"), 0, 8), usage_error);
    CHECK_THROWS_AS((void)worker_position_of(parse_layout("tp4,ep3"), 0, 4), usage_error);
    CHECK_THROWS_AS((void)worker_position_of(parse_layout("tp4"), 0, 6), usage_error);
    CHECK_THROWS_AS((void)worker_position_of(parse_layout("tp4"), -1, 4), usage_error);
}

TEST_CASE("names say where they belong") {
    const auto check = [](const char* name, std::int64_t layer, std::int64_t expert) {
        CAPTURE(name);
        CHECK(plan::place_of(name).layer == layer);
        CHECK(plan::place_of(name).expert == expert);
    };
    check("model.layers.7.mlp.experts.31.up_proj.weight", 7, 31);
    check("model.layers.60.input_layernorm.weight", 60, -1);
    check("model.layers.3.mlp.shared_experts.up_proj.weight", 3, -1);
    check("lm_head.weight", -1, -1);
    check("blocks.3.weight", -1, -1);
    check("layers", -1, -1);
    check("", -1, -1);
}

TEST_CASE("the lists of real models have the published numbers of tensors and bytes") {
    const auto check = [](const models::dimensions& model, std::size_t tensors, double gigabytes) {
        CAPTURE(model.name);
        const manifest list{models::parameters(model)};
        CHECK(list.size() == tensors);
        CHECK(static_cast<double>(list.total_bytes()) / 1e9 ==
              doctest::Approx(gigabytes).epsilon(0.001));
    };
    check(models::qwen3_30b_a3b, 18'867, 61.1);
    check(models::qwen3_235b_a22b, 36'945, 470.2);
    check(models::kimi_k2, 69'975, 2053);
    check(models::kimi_k2_fp8, 139'583, 1029);
    CHECK(models::parameters(models::qwen3_30b_a3b) == benchmarks::qwen3_30b_a3b_list(48));
    CHECK(models::by_name("kimi-k2").experts == 384);
    CHECK_THROWS_AS((void)models::by_name("kimi"), usage_error);
}

TEST_CASE("a trainer's ranks hold their stage, and of the experts their share") {
    const manifest kimi{models::parameters(models::kimi_k2)};
    const auto held = held_by_layout(kimi, parse_layout("tp8,pp8,ep32"), 256);
    REQUIRE(held.size() == 256);
    const plan::ownership owners{kimi, held};
    const auto holders = [&](const char* name) {
        const auto span = owners.holders(kimi.find(name));
        return std::vector<int>(span.begin(), span.end());
    };
    std::vector<int> first_stage(32);
    for (int i = 0; i < 32; ++i) {
        first_stage[static_cast<std::size_t>(i)] = i;
    }
    CHECK(holders("model.embed_tokens.weight") == first_stage);
    CHECK(holders("model.layers.7.self_attn.o_proj.weight") == first_stage);
    CHECK(holders("model.layers.8.self_attn.o_proj.weight").front() == 32);
    CHECK(holders("lm_head.weight").front() == 224);
    CHECK(holders("lm_head.weight").size() == 32);
    CHECK(holders("model.layers.60.mlp.experts.383.down_proj.weight") == std::vector{255});
    CHECK(holders("model.layers.1.mlp.experts.12.up_proj.weight") == std::vector{1});
}

// Any layouts on both sides: whoever needs something finds a holder, and the workers of a replica
// read every byte of the checkpoint.
TEST_CASE("workers of random layouts need every byte of a random model, and it is held") {
    std::mt19937 random{20'261};
    int tried = 0;
    for (int round = 0; round < 60; ++round) {
        const auto model = small_model(random);
        const manifest checkpoint{models::parameters(model)};
        const parallel_layout trainer{.tensor = one_of(random, {1, 2, 3}),
                                      .pipeline = pick(random, 1, 3),
                                      .expert = one_of(random, {1, 2, 3, 8})};
        const auto trainers = plan::fewest_ranks(trainer) * pick(random, 1, 2);
        parallel_layout worker{.tensor = one_of(random, {1, 2, 4, 8}),
                               .pipeline = pick(random, 1, 3),
                               .data = one_of(random, {1, 2})};
        const auto stage = worker.tensor * worker.data;
        worker.expert = one_of(random, {1, stage, stage > 1 ? stage / 2 : 1});
        worker.expert = std::min<std::int64_t>(worker.expert, 8);
        if (stage / worker.expert > 16 || stage % worker.expert != 0) {
            continue;
        }
        ++tried;
        CAPTURE(round);
        CAPTURE(to_string(trainer));
        CAPTURE(to_string(worker));
        const plan::ownership owners{checkpoint, held_by_layout(checkpoint, trainer, trainers)};
        CHECK(owners.ranks() == trainers);
        std::vector<std::vector<char>> read;
        for (const auto& parameter : checkpoint.parameters()) {
            read.emplace_back(parameter.byte_size(), char{0});
        }
        const auto ranks = stage * worker.pipeline;
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
            const models::worker mine{model, worker_position_of(worker, rank, ranks)};
            const manifest kept{mine.parameters()};
            const plan::pull_needs needs{checkpoint, kept, plan::record(checkpoint, kept, mine)};
            for (const auto& task : needs.tasks()) {
                auto& bytes = read[task.read.source];
                plan::for_each_read_run(
                    task.read, plan::item_bytes_of(checkpoint[task.read.source]),
                    [&](std::uint64_t from, std::uint64_t, std::uint64_t n) {
                        std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(from), n, char{1});
                    });
            }
        }
        for (std::size_t i = 0; i < read.size(); ++i) {
            CAPTURE(checkpoint[i].name);
            CHECK(std::ranges::count(read[i], char{0}) == 0);
        }
    }
    CHECK(tried >= 40);
}

TEST_CASE("a worker says which dimension its ranks cannot share") {
    const models::worker odd{models::qwen3_30b_a3b,
                             worker_position_of(parse_layout("tp3,ep3"), 0, 3)};
    CHECK_THROWS_WITH_AS((void)odd.parameters(),
                         doctest::Contains("3 ranks cannot share the 32 of heads"), usage_error);
}

}  // namespace
