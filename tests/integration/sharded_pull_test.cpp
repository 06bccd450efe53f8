// SPDX-License-Identifier: Apache-2.0
//
// `sharded_pull` over shared memory through both engines: four trainer ranks (PP2 x EP2), each with
// only its own shard, to four worker ranks that shard by heads and experts.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <ranges>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/backend.hpp>
#include <weightwire/rendezvous/store_group.hpp>
#include <weightwire/weightwire.hpp>

#include "../support/moe_model.hpp"
#include "../support/trainer_ranks.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using tests::moe_sizes;
namespace pull = weightwire::sharded_pull;

constexpr int trainers = 4;
constexpr int workers = 4;

/// A worker server with one rank, or several.
struct moe_worker {
    using engine_type = worker_engine<pull::shared_memory_backend, parameter_table>;
    using service_type = worker_service<engine_type>;

    /// Ranks `[first, first + count)` of `workers`.
    moe_worker(const moe_sizes& model, int first, int count, commit_mode mode)
        : sizes{model}, first_rank{first} {
        for (int i = 0; i < count; ++i) {
            tables.push_back(std::make_unique<parameter_table>(
                sizes.worker(workers), parameter_table_options{.mode = mode}));
            sinks.push_back(tables.back().get());
        }
        engine = std::make_unique<engine_type>(
            pull::shared_memory_backend{
                .loader =
                    [this](plan::recorder& made, const receiver_context& at) {
                        sizes.load(made, first_rank + at.local_rank, workers);
                    }},
            sinks);
        service = std::make_unique<service_type>(*engine);
    }
    /// Parameters that are not as `version` has them.
    [[nodiscard]] std::vector<std::string> wrong(std::uint64_t version) {
        const tests::moe_checkpoint full{sizes, version};
        std::vector<std::string> out;
        for (std::size_t r = 0; r < tables.size(); ++r) {
            const auto held = tables[r]->acquire();
            if (held.version() != version) {
                out.push_back("version " + std::to_string(held.version()));
            }
            for (std::size_t i = 0; i < held.size(); ++i) {
                const auto expected = full.expected(
                    sizes, held.name(i), first_rank + static_cast<std::int64_t>(r), workers);
                const auto got = held.tensor(i).bytes();
                if (!std::equal(got.begin(), got.end(), expected.begin(), expected.end())) {
                    out.push_back(std::string{held.name(i)});
                }
            }
        }
        return out;
    }

    moe_sizes sizes;
    int first_rank;
    std::vector<std::unique_ptr<parameter_table>> tables;
    std::vector<parameter_table*> sinks;
    std::unique_ptr<engine_type> engine;
    std::unique_ptr<service_type> service;
};

using moe_client = local_sync_client<moe_worker::service_type>;

std::vector<moe_worker::service_type*> services_of(
    const std::vector<std::unique_ptr<moe_worker>>& all) {
    std::vector<moe_worker::service_type*> out;
    for (const auto& each : all) {
        out.push_back(each->service.get());
    }
    return out;
}

std::vector<std::unique_ptr<moe_worker>> four_workers(const moe_sizes& model, commit_mode mode) {
    std::vector<std::unique_ptr<moe_worker>> all;
    for (int w = 0; w < workers; ++w) {
        all.push_back(std::make_unique<moe_worker>(model, w, 1, mode));
    }
    return all;
}

pull::shared_memory_trainer_init_info info_of(int rank, std::uint64_t chunk_bytes = 4096,
                                              std::uint64_t staging_bytes = 16384) {
    return {.rank = rank, .chunk_bytes = chunk_bytes, .staging_bytes = staging_bytes};
}

/// Ten rounds from shards of a kind; every worker has exactly its bytes after each.
template <tensor_lifetime Lifetime>
void run_rounds(const moe_sizes& model, std::vector<std::unique_ptr<moe_worker>>& all, bool shared,
                int rounds = 10) {
    const auto services = services_of(all);
    const auto failures = tests::on_trainer_ranks(trainers, [&](int rank, store_group& group) {
        moe_client client{services};
        tests::moe_shard<Lifetime> shard{model, rank, shared};
        auto engine = trainer_init(info_of(rank), client, shard, {}, group);
        for (int round = 1; round <= rounds; ++round) {
            const auto version = static_cast<std::uint64_t>(round);
            shard.set(version);
            const auto report = engine.send_weights({.deadline = deadline::after(20s)});
            CHECK(report.all_committed());
            if (rank == 0) {
                for (const auto& worker : all) {
                    CHECK(worker->wrong(version) == std::vector<std::string>{});
                }
            }
            group.barrier(deadline::after(20s));
        }
        engine.close(deadline::after(5s));
    });
    CHECK(failures == std::vector<std::string>(trainers));
}

}  // namespace

TEST_CASE("sharded_pull: shards in exported memory are read in place, in every commit mode") {
    const moe_sizes model;
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(std::string{to_string(mode)});
        auto all = four_workers(model, mode);
        run_rounds<tensor_lifetime::stable>(model, all, true);
    }
}

TEST_CASE("sharded_pull: every trainer rank says what it stages, and why") {
    struct kept_events {
        std::vector<std::string> chosen{};
        void on(const event& what) noexcept {
            if (what.kind == event_kind::chosen) {
                chosen.emplace_back(what.text);
            }
        }
    };
    const moe_sizes model;
    auto all = four_workers(model, commit_mode::flip);
    const auto services = services_of(all);
    std::array<kept_events, trainers> said;
    const auto failures = tests::on_trainer_ranks(trainers, [&](int rank, store_group& group) {
        moe_client client{services};
        tests::moe_shard<tensor_lifetime::stable> shard{model, rank, rank != 1};
        auto engine = trainer_init(info_of(rank), client, shard, {}, group,
                                   said[static_cast<std::size_t>(rank)]);
        engine.close(deadline::after(5s));
    });
    CHECK(failures == std::vector<std::string>(trainers));
    for (int rank = 0; rank < trainers; ++rank) {
        CAPTURE(rank);
        const auto& chosen = said[static_cast<std::size_t>(rank)].chosen;
        const auto tells = [&](std::string_view what) {
            return std::ranges::any_of(chosen, [&](const std::string& each) {
                return each.find(what) != std::string::npos;
            });
        };
        CHECK(tells("are read in place"));
        CHECK(tells("the others are staged") == (rank == 1));
    }
}

TEST_CASE("sharded_pull: what cannot be read in place is staged through a small arena") {
    const moe_sizes model;
    SUBCASE("stable, in ordinary memory") {
        auto all = four_workers(model, commit_mode::flip);
        run_rounds<tensor_lifetime::stable>(model, all, false);
    }
    SUBCASE("valid until the next") {
        auto all = four_workers(model, commit_mode::flip);
        run_rounds<tensor_lifetime::until_next>(model, all, true);
    }
    SUBCASE("several ranks behind one server") {
        std::vector<std::unique_ptr<moe_worker>> two;
        two.push_back(std::make_unique<moe_worker>(model, 0, 3, commit_mode::flip));
        two.push_back(std::make_unique<moe_worker>(model, 3, 1, commit_mode::copy_in));
        run_rounds<tensor_lifetime::until_next>(model, two, true);
    }
}

namespace {

/// Where the two expert ranks of a pipeline stage wait for each other.
class meeting {
public:
    void arrive_and_wait() {
        std::unique_lock lock{mutex_};
        const auto turn = turn_;
        if (++here_ == 2) {
            here_ = 0;
            ++turn_;
            changed_.notify_all();
        } else if (!changed_.wait_for(lock, 20s, [&] { return turn_ != turn; })) {
            --here_;
            throw std::runtime_error{"a rank did not come to the gather"};
        }
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int here_ = 0;
    std::uint64_t turn_ = 0;
};

/// A shard whose tensors that two ranks hold exist only once both have come for them.
struct gathered_shard {
    using shard_type = tests::moe_shard<tensor_lifetime::until_next>;
    shard_type& inner;
    meeting& stage;
    int fails_at = -1;

    const auto& metadata() const { return inner.metadata(); }
    const auto& held_names() const { return inner.held_names(); }
    auto weights() {
        return std::views::iota(std::size_t{0}, inner.weights().size()) |
               std::views::transform([this](std::size_t i) {
                   if (inner.weights()[i].name.find("experts") == std::string_view::npos) {
                       stage.arrive_and_wait();
                   }
                   if (static_cast<int>(i) == fails_at) {
                       fails_at = -1;
                       throw data_error{"the gather failed"};
                   }
                   return inner.weights()[i];
               });
    }
};

}  // namespace

TEST_CASE("sharded_pull: gathers that ranks take together neither hang nor fall out of step") {
    const moe_sizes model;
    auto all = four_workers(model, commit_mode::flip);
    const auto services = services_of(all);
    std::array<meeting, 2> stages;
    const auto failures = tests::on_trainer_ranks(trainers, [&](int rank, store_group& group) {
        moe_client client{services};
        gathered_shard::shard_type shard{model, rank};
        gathered_shard source{shard, stages[static_cast<std::size_t>(rank / 2)]};
        auto engine = trainer_init(info_of(rank), client, source, {}, group);
        for (std::uint64_t version = 1; version <= 6; ++version) {
            shard.set(version);
            if (version == 3 && rank == 2) {
                source.fails_at = 5;
                CHECK_THROWS_AS(
                    static_cast<void>(engine.send_weights({.deadline = deadline::after(20s)})),
                    data_error);
            } else if (version == 3) {
                CHECK_THROWS_AS(
                    static_cast<void>(engine.send_weights({.deadline = deadline::after(20s)})),
                    error);
            } else {
                CHECK(engine.send_weights({.deadline = deadline::after(20s)}).all_committed());
            }
            if (rank == 0) {
                for (const auto& worker : all) {
                    CHECK(worker->wrong(version == 3 ? 2 : version) == std::vector<std::string>{});
                }
            }
            group.barrier(deadline::after(20s));
        }
    });
    CHECK(failures == std::vector<std::string>(trainers));
}

namespace {

/// A shard that says it holds all of its rank's names but one.
struct forgetful_shard {
    tests::moe_shard<tensor_lifetime::stable>& inner;
    std::vector<std::string> names;
    std::vector<named_tensor> tensors;
    forgetful_shard(tests::moe_shard<tensor_lifetime::stable>& shard, std::string_view forgotten)
        : inner{shard} {
        for (std::size_t i = 0; i < shard.held_names().size(); ++i) {
            if (shard.held_names()[i] != forgotten) {
                names.push_back(shard.held_names()[i]);
                tensors.push_back(shard.weights()[i]);
            }
        }
    }
    static constexpr auto lifetime = tensor_lifetime::stable;
    const auto& metadata() const { return inner.metadata(); }
    const auto& held_names() const { return names; }
    const auto& weights() const { return tensors; }
};

}  // namespace

TEST_CASE(
    "sharded_pull: an arena with fewer slots than readers is refused at init, with the remedy") {
    const moe_sizes model;
    auto all = four_workers(model, commit_mode::flip);
    const auto services = services_of(all);
    const auto failures = tests::on_trainer_ranks(trainers, [&](int rank, store_group& group) {
        moe_client client{services};
        tests::moe_shard<tensor_lifetime::until_next> shard{model, rank};
        static_cast<void>(trainer_init(info_of(rank, 4096, 4096), client, shard, {}, group));
    });
    for (const auto& each : failures) {
        CHECK(each.find("set staging_bytes to at least chunk_bytes for each of them") !=
              std::string::npos);
    }
}

TEST_CASE("sharded_pull: a parameter that no rank holds is an error at init that names it") {
    const moe_sizes model;
    auto all = four_workers(model, commit_mode::flip);
    const auto services = services_of(all);
    const auto failures = tests::on_trainer_ranks(trainers, [&](int rank, store_group& group) {
        moe_client client{services};
        tests::moe_shard<tensor_lifetime::stable> shard{model, rank};
        forgetful_shard source{shard, "model.layers.2.mlp.gate.weight"};
        static_cast<void>(trainer_init(info_of(rank), client, source, {}, group));
    });
    for (const auto& each : failures) {
        CHECK(each.find("model.layers.2.mlp.gate.weight") != std::string::npos);
    }
}

TEST_CASE("sharded_pull: what a worker's loader lacks stops the init, with its name") {
    const moe_sizes model;
    auto all = four_workers(model, commit_mode::flip);
    all[1]->sizes.layers = 5;
    const auto services = services_of(all);
    const auto begin = deadline::clock::now();
    const auto failures = tests::on_trainer_ranks(trainers, [&](int rank, store_group& group) {
        moe_client client{services};
        tests::moe_shard<tensor_lifetime::stable> shard{model, rank};
        static_cast<void>(trainer_init(info_of(rank), client, shard, {}, group));
    });
    CHECK(deadline::clock::now() - begin < 10s);
    for (const auto& each : failures) {
        CHECK(each.find("model.layers.4") != std::string::npos);
    }
}

TEST_CASE("sharded_pull: one trainer rank serves workers that hold what it has") {
    tests::small_weights weights{10, 3000};
    std::vector<std::unique_ptr<parameter_table>> tables;
    std::vector<std::unique_ptr<moe_worker::engine_type>> engines;
    std::vector<std::unique_ptr<moe_worker::service_type>> services;
    std::vector<moe_worker::service_type*> peers;
    for (int w = 0; w < 2; ++w) {
        tables.push_back(std::make_unique<parameter_table>(tests::small_model(10, 3000)));
        engines.push_back(std::make_unique<moe_worker::engine_type>(pull::shared_memory_backend{},
                                                                    *tables.back()));
        services.push_back(std::make_unique<moe_worker::service_type>(*engines.back()));
        peers.push_back(services.back().get());
    }
    moe_client client{peers};
    auto engine = trainer_init(info_of(0), client, weights);
    for (std::uint64_t version = 1; version <= 3; ++version) {
        weights.set(version);
        CHECK(engine.send_weights().all_committed());
        for (const auto& table : tables) {
            const auto held = table->acquire();
            CHECK(held.version() == version);
            for (std::size_t i = 0; i < held.size(); ++i) {
                CHECK(digest_text(digest(held.tensor(i).bytes())) == weights.digest_of(i));
            }
        }
    }
    engine.close(deadline::after(5s));
}
