// SPDX-License-Identifier: Apache-2.0
//
// `sharded_pull` over the stand-in of the NCCL pull fabric, through both engines: four trainer
// ranks (PP2 x EP2) to four worker ranks that shard by heads and experts, all over pairs.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/backend.hpp>
#include <weightwire/rendezvous/store_group.hpp>
#include <weightwire/weightwire.hpp>

#include "../support/host_pairs.hpp"
#include "../support/moe_model.hpp"
#include "../support/trainer_ranks.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using tests::moe_sizes;
using world = tests::host_pair_world;
using backend = sharded_pull::basic_backend<tests::host_pull_fabric>;
using init_info = sharded_pull::basic_trainer_init_info<tests::host_pull_fabric>;

constexpr int ranks = 4;

/// A worker server with one rank.
struct moe_worker {
    using engine_type = worker_engine<backend, parameter_table>;
    using service_type = worker_service<engine_type>;

    moe_worker(const moe_sizes& model, int which, commit_mode mode)
        : sizes{model}, rank{which}, table{sizes.worker(ranks), {.mode = mode}} {}
    [[nodiscard]] static std::uint64_t sum_of(const auto& all) {
        std::uint64_t sum = 0;
        for (const auto& each : all) {
            CHECK(each.bytes == each.planned);
            sum += each.bytes;
        }
        return sum;
    }
    /// Parameters that are not as `version` has them.
    [[nodiscard]] std::vector<std::string> wrong(std::uint64_t version) {
        const tests::moe_checkpoint full{sizes, version};
        std::vector<std::string> out;
        const auto held = table.acquire();
        if (held.version() != version) {
            out.push_back("version " + std::to_string(held.version()));
        }
        for (std::size_t i = 0; i < held.size(); ++i) {
            const auto expected = full.expected(sizes, held.name(i), rank, ranks);
            const auto got = held.tensor(i).bytes();
            if (!std::equal(got.begin(), got.end(), expected.begin(), expected.end())) {
                out.push_back(std::string{held.name(i)});
            }
        }
        return out;
    }

    moe_sizes sizes;
    int rank;
    parameter_table table;
    std::vector<parameter_table*> sinks{&table};
    std::uint64_t from_trainers = 0;
    std::uint64_t from_peers = 0;
    engine_type engine{
        backend{.loader = [this](plan::recorder& made,
                                 const receiver_context&) { sizes.load(made, rank, ranks); },
                .on_traffic = [this](const auto&, auto all) { from_trainers = sum_of(all); },
                .node = "the workers'",
                .on_node_traffic = [this](const auto&, auto all) { from_peers = sum_of(all); }},
        sinks};
    service_type service{engine};
};

struct fleet {
    fleet(const moe_sizes& model, commit_mode mode) {
        for (int w = 0; w < ranks; ++w) {
            workers.push_back(std::make_unique<moe_worker>(model, w, mode));
            services.push_back(&workers.back()->service);
        }
    }
    void check(std::uint64_t version) {
        for (const auto& each : workers) {
            CHECK(each->wrong(version) == std::vector<std::string>{});
        }
    }
    /// What the last round of all workers read.
    [[nodiscard]] std::uint64_t sum(std::uint64_t moe_worker::*which) const {
        std::uint64_t made = 0;
        for (const auto& each : workers) {
            made += (*each).*which;
        }
        return made;
    }
    std::vector<std::unique_ptr<moe_worker>> workers;
    std::vector<moe_worker::service_type*> services;
};

/// Rounds over pairs; `before` is called on rank 0 before each and says whether it is to commit.
/// What workers need alike, where `once` it is known that they are on a node of their own, comes
/// from the trainers once.
template <tensor_lifetime Lifetime>
void run_rounds(commit_mode mode, std::uint64_t rounds,
                const std::function<bool(std::uint64_t)>& before = {}, bool once = false) {
    const moe_sizes model{.whole_attention = once};
    fleet all{model, mode};
    const auto failures = tests::on_trainer_ranks(ranks, [&](int rank, store_group& group) {
        local_sync_client<moe_worker::service_type> client{all.services};
        tests::moe_shard<Lifetime> shard{model, rank, false};
        auto engine = trainer_init(init_info{.rank = rank,
                                             .chunk_bytes = 4096,
                                             .staging_bytes = once ? 65536U : 16384U,
                                             .node = once ? "the trainers'" : "the workers'"},
                                   client, shard, {}, group);
        std::uint64_t last = 0;
        for (std::uint64_t version = 1; version <= rounds; ++version) {
            shard.set(version);
            const bool good = rank != 0 || !before || before(version);
            group.barrier(deadline::after(20s));
            bool committed = false;
            std::string why;
            try {
                committed = engine
                                .send_weights({.deadline = deadline::after(10s),
                                               .tolerate_failed_peers = true})
                                .all_committed();
            } catch (const error& failed) {
                why = failed.what();
            }
            if (rank == 0) {
                CAPTURE(why);
                CHECK(committed == good);
                last = good ? version : last;
                all.check(last);
                if (good && once) {
                    CHECK(all.sum(&moe_worker::from_trainers) == 203'712);
                    CHECK(all.sum(&moe_worker::from_peers) == 168'768);
                }
            }
            group.barrier(deadline::after(20s));
        }
        engine.close(deadline::after(5s));
    });
    for (const auto& each : failures) {
        CHECK(each == std::string{});
    }
    CHECK(world::early_sends == 0);
}

}  // namespace

TEST_CASE("sharded_pull over NCCL pairs: every worker has exactly its bytes, round by round") {
    world::early_sends = 0;
    SUBCASE("weights that stay, flip") {
        run_rounds<tensor_lifetime::stable>(commit_mode::flip, 6);
    }
    SUBCASE("weights that stay, copy_in") {
        run_rounds<tensor_lifetime::stable>(commit_mode::copy_in, 4);
    }
    SUBCASE("weights that stay, in_place") {
        run_rounds<tensor_lifetime::stable>(commit_mode::in_place, 4);
    }
    SUBCASE("weights that do not stay") {
        run_rounds<tensor_lifetime::until_next>(commit_mode::flip, 6);
    }
    SUBCASE("what the workers' node needs comes once") {
        run_rounds<tensor_lifetime::stable>(commit_mode::flip, 4, {}, true);
    }
}

TEST_CASE(
    "sharded_pull over NCCL pairs: a round that fails leaves the old, the next has new pairs") {
    world::early_sends = 0;
    world::pairs = 0;
    int pairs_before = 0;
    const auto refused = [&](std::uint64_t version) {
        world::refuses = version == 3;
        if (version == 3) {
            pairs_before = world::pairs;
        }
        return version != 3;
    };
    SUBCASE("each for itself") {
        run_rounds<tensor_lifetime::until_next>(commit_mode::flip, 6, refused);
    }
    SUBCASE("once for the node, also after that round") {
        run_rounds<tensor_lifetime::until_next>(commit_mode::flip, 6, refused, true);
    }
    world::refuses = false;
    CHECK(world::pairs.load() > pairs_before);
}
