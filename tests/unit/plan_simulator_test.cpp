// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/floors.hpp>
#include <weightwire/plan/layout.hpp>
#include <weightwire/plan/link_model.hpp>
#include <weightwire/plan/link_sharing.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/plan/pull_traffic.hpp>
#include <weightwire/plan/simulator.hpp>
#include <weightwire/plan/traffic.hpp>

#include "../../examples/support/model_lists.hpp"
#include "../../examples/support/pull_problem.hpp"

namespace {

using namespace weightwire;
using doctest::Approx;
using plan::link_model;
using plan::parse_layout;
using plan::simulation_options;
using plan::traffic;
using plan::traffic_stream;

constexpr std::uint64_t MB = 1'000'000;

/// Round numbers: 10 GB/s between nodes, 100 inside, no latency, and engines that take no time.
link_model simple_links() {
    link_model made;
    made.network = 10e9;
    made.network_latency = 0;
    made.network_shares.clear();
    made.local_in = 100e9;
    made.local_out = 100e9;
    made.local_latency = 0;
    made.local_shares.clear();
    made.pack = link_model::unlimited;
    made.scatter = link_model::unlimited;
    return made;
}

simulation_options simple() { return {.links = simple_links()}; }

/// `count` chunks, each of a group of its own.
traffic_stream stream_of(int from, int to, std::size_t count, std::uint64_t bytes,
                         std::size_t first_group = 0) {
    traffic_stream made{.from = from, .to = to};
    for (std::size_t i = 0; i < count; ++i) {
        made.chunks.push_back({first_group + i, bytes, bytes});
    }
    return made;
}

TEST_CASE("reads of a size get a share of a link") {
    const std::vector<plan::block_share> curve{{1024, 0.1}, {4096, 0.5}, {65'536, 0.9}};
    CHECK(plan::share_at(curve, 1) == Approx(0.1));
    CHECK(plan::share_at(curve, 1024) == Approx(0.1));
    CHECK(plan::share_at(curve, 2048) == Approx(0.3));
    CHECK(plan::share_at(curve, 4096) == Approx(0.5));
    CHECK(plan::share_at(curve, 16'384) == Approx(0.7));
    CHECK(plan::share_at(curve, 1U << 30U) == Approx(0.9));
    CHECK(plan::share_at({}, 7) == Approx(1));
    auto rising = link_model{}.network_shares;
    for (std::uint64_t bytes = 4096; bytes < (1U << 25U); bytes *= 2) {
        CHECK(plan::share_at(rising, bytes) <= plan::share_at(rising, 2 * bytes));
    }
}

TEST_CASE("links are shared equally, and what one cannot use goes to the others") {
    // Link 0 is shared by all; flow 0 is held up at link 1, flow 1 can use little.
    plan::link_sharing links{{12, 2, 100, 100}};
    std::vector<plan::flow> flows{{.links = {0, 1, 2}, .most = 1000},
                                  {.links = {0, 2, 3}, .most = 1},
                                  {.links = {0, 2, 3}, .most = 1000}};
    const std::vector<std::size_t> all{0, 1, 2};
    links.share(flows, all);
    CHECK(flows[0].rate == Approx(2));
    CHECK(flows[1].rate == Approx(1));
    CHECK(flows[2].rate == Approx(9).epsilon(0.02));
    // A flow of small blocks takes twice the capacity for its bytes.
    flows[0].weight = 2;
    const std::vector<std::size_t> first{0};
    links.share(flows, first);
    CHECK(flows[0].rate == Approx(1));
}

TEST_CASE("no link ever carries more than it can") {
    std::mt19937 random{7};
    const auto number = [&](double least, double most) {
        return std::uniform_real_distribution<double>{least, most}(random);
    };
    for (int round = 0; round < 200; ++round) {
        std::vector<double> capacity;
        for (int i = 0; i < 9; ++i) {
            capacity.push_back(number(1, 100));
        }
        plan::link_sharing links{capacity};
        std::vector<plan::flow> flows;
        std::vector<std::size_t> all;
        for (std::size_t i = 0; i < 12; ++i) {
            const auto link = [&](std::size_t least) {
                return least + std::uniform_int_distribution<std::size_t>{0, 2}(random);
            };
            flows.push_back({.links = {link(0), link(3), link(6)},
                             .weight = number(1, 4),
                             .most = number(0.1, 200)});
            all.push_back(i);
        }
        links.share(flows, all);
        std::vector<double> used(9, 0);
        for (const auto& flow : flows) {
            CHECK(flow.rate > 0);
            CHECK(flow.rate <= flow.most * 1.000001);
            for (const auto link : flow.links) {
                used[link] += flow.rate * flow.weight;
            }
        }
        for (std::size_t i = 0; i < used.size(); ++i) {
            CHECK(used[i] <= capacity[i] * 1.000001);
        }
    }
}

TEST_CASE("a round takes what its busiest link takes") {
    traffic one{.trainers = 1, .nodes = {0, 1}};
    one.streams = {stream_of(0, 1, 100, 100 * MB)};  // 10 GB at 10 GB/s
    const auto alone = simulate(one, simple());
    CHECK(alone.seconds == Approx(1).epsilon(0.003));
    CHECK(alone.loads[0].network_out == 10'000 * MB);
    CHECK(alone.loads[1].network_in == 10'000 * MB);
    CHECK(alone.worker_seconds == std::vector{alone.seconds});

    SUBCASE("two readers share an owner") {
        one.nodes = {0, 1, 2};
        one.streams.push_back(stream_of(0, 2, 100, 100 * MB));
        CHECK(simulate(one, simple()).seconds == Approx(2).epsilon(0.003));
    }
    SUBCASE("inside a node the network is not used") {
        one.nodes = {0, 0};
        const auto local = simulate(one, simple());
        CHECK(local.seconds == Approx(0.1).epsilon(0.003));
        CHECK(local.loads[1].network_in == 0);
        CHECK(local.loads[1].local_in == 10'000 * MB);
    }
    SUBCASE("small blocks get less") {
        auto how = simple();
        how.links.network_shares = {{MB, 0.25}, {100 * MB, 0.5}};
        CHECK(simulate(one, how).seconds == Approx(2).epsilon(0.003));
        for (auto& chunk : one.streams[0].chunks) {
            chunk.block_bytes = MB;
        }
        CHECK(simulate(one, how).seconds == Approx(4).epsilon(0.003));
    }
    SUBCASE("all ranks together are held up by what the network carries") {
        auto how = simple();
        how.links.network_all = 4e9;
        CHECK(simulate(one, how).seconds == Approx(2.5).epsilon(0.003));
    }
    SUBCASE("a worker scatters one chunk after the other") {
        auto how = simple();
        how.links.scatter = 5e9;
        CHECK(simulate(one, how).seconds == Approx(2.01).epsilon(0.003));
    }
    SUBCASE("latency is hidden behind the chunk before") {
        auto how = simple();
        how.links.network_latency = 0.002;
        CHECK(simulate(one, how).seconds == Approx(1.002).epsilon(0.003));
    }
    SUBCASE("and shows where nothing overlaps, once for each chunk each way") {
        auto how = simple();
        how.links.network_latency = 0.002;
        how.overlap = false;
        CHECK(simulate(one, how).seconds == Approx(1.4 - 0.002).epsilon(0.003));
    }
}

TEST_CASE("gather, pack, wire and scatter overlap, or do not") {
    traffic one{.trainers = 1, .nodes = {0, 1}};
    one.streams = {stream_of(0, 1, 50, 100 * MB)};                          // 0.5 s on the wire
    one.gathers = {std::vector<plan::gather_work>(50, {0.006, 300 * MB})};  // 0.3 s
    auto how = simple();
    how.links.pack = 20e9;     // 0.25 s
    how.links.scatter = 50e9;  // 0.1 s
    const auto overlapped = simulate(one, how);
    CHECK(overlapped.seconds == Approx(0.5 + 0.006 + 0.005 + 0.002).epsilon(0.005));
    how.overlap = false;
    // The scatter of a chunk runs while the next is gathered.
    CHECK(simulate(one, how).seconds == Approx(0.5 + 0.3 + 0.25 + 0.002).epsilon(0.005));
    how.in_place = true;
    CHECK(simulate(one, how).seconds == Approx(0.5).epsilon(0.005));
}

TEST_CASE("budgets hold, and are what a round needs at its peak") {
    traffic what{.trainers = 2, .nodes = {0, 1, 2, 3}};
    for (int from = 0; from < 2; ++from) {
        for (int to = 2; to < 4; ++to) {
            what.streams.push_back(stream_of(from, to, 40, 100 * MB));
        }
    }
    what.gathers.assign(2, std::vector<plan::gather_work>(40, {0.0001, 150 * MB}));
    auto how = simple();
    how.links.pack = 200e9;
    how.links.scatter = 60e9;
    how.slots = 3;
    const auto wide = simulate(what, how);
    CHECK(wide.peak_arena == 2 * 3 * 100 * MB);  // readers, slots
    how.arena = 300 * MB;
    how.landing = 250 * MB;
    how.look_ahead = 450 * MB;
    const auto narrow = simulate(what, how);
    CHECK(narrow.peak_arena == 300 * MB);
    CHECK(narrow.peak_landing == 200 * MB);
    CHECK(narrow.peak_gathered == 450 * MB);
    CHECK(wide.peak_arena > narrow.peak_arena);
    CHECK(wide.peak_gathered > narrow.peak_gathered);
    CHECK(narrow.seconds >= wide.seconds);
    // Budgets below one chunk admit one at a time.
    how.arena = how.landing = how.look_ahead = 1;
    const auto least = simulate(what, how);
    CHECK(least.peak_arena == 100 * MB);
    CHECK(least.peak_landing == 100 * MB);
    CHECK(least.peak_gathered == 150 * MB);
    CHECK(least.seconds > narrow.seconds);
}

TEST_CASE("stages that take turns leave the others' links idle") {
    // Two stages of two owners each; the two workers could take from all four at once.
    traffic what{.trainers = 4, .nodes = {0, 1, 2, 3, 4, 5, 6, 7}, .turns = {0, 0, 1, 1}};
    for (int from = 0; from < 4; ++from) {
        for (int to = 4; to < 8; ++to) {
            what.streams.push_back(
                stream_of(from, to, 10, 100 * MB, static_cast<std::size_t>(from / 2 * 10)));
        }
    }
    auto how = simple();
    CHECK(simulate(what, how).seconds == Approx(0.4).epsilon(0.01));
    how.in_turn = true;
    CHECK(simulate(what, how).seconds == Approx(0.8).epsilon(0.01));
    // A turn in which nobody has anything is skipped.
    what.turns = {5, 5, 9, 9};
    CHECK(simulate(what, how).seconds == Approx(0.8).epsilon(0.01));
}

TEST_CASE("what a worker passes on follows as it comes") {
    // Each of two workers of a node takes half from outside and passes it to the other.
    traffic what{.trainers = 1, .nodes = {0, 1, 1}};
    what.streams = {stream_of(0, 1, 50, 100 * MB), stream_of(0, 2, 50, 100 * MB),
                    stream_of(1, 2, 50, 100 * MB), stream_of(2, 1, 50, 100 * MB)};
    what.streams[2].follows = 0;
    what.streams[3].follows = 1;
    auto how = simple();
    const auto round = simulate(what, how);
    // The owner's 10 GB, then the last chunk inside the node.
    CHECK(round.seconds == Approx(1.001).epsilon(0.003));
    CHECK(round.loads[1].network_in == 5'000 * MB);
    CHECK(round.loads[1].local_in == 5'000 * MB);
    CHECK(round.loads[1].local_out == 5'000 * MB);
    how.links.local_latency = 0.05;
    CHECK(simulate(what, how).seconds == Approx(1.051).epsilon(0.003));
    how.links.local_latency = 0;
    // Two that pass on to each other go on even where each has room for one chunk.
    how.landing = 1;
    CHECK(simulate(what, how).seconds < 1.2);
    how.landing = 400 * MB;
    how.links.local_in = 1e9;  // what comes from the peer is slow, and what goes there waits
    CHECK(simulate(what, how).peak_landing == 400 * MB);

    SUBCASE("in a circle nothing comes") {
        what.streams.resize(3);
        what.streams[0] = stream_of(2, 1, 50, 100 * MB);
        what.streams[0].follows = 2;
        CHECK_THROWS_WITH_AS((void)simulate(what, how), doctest::Contains("stands still"),
                             usage_error);
    }
    SUBCASE("only what is received can be passed on") {
        what.streams[2].follows = 1;
        CHECK_THROWS_AS((void)simulate(what, how), usage_error);
        what.streams[2].follows = traffic_stream::follows_none;
        CHECK_THROWS_AS((void)simulate(what, how), usage_error);
    }
}

TEST_CASE("traffic and options that make no sense are refused") {
    traffic what{.trainers = 1, .nodes = {0, 1}};
    what.streams = {stream_of(0, 1, 2, MB)};
    auto how = simple();
    CHECK(simulate(what, how).seconds > 0);
    CHECK(simulate({.trainers = 1, .nodes = {0, 1}}, how).seconds == 0);
    const auto refused = [&](auto change) {
        auto changed = what;
        change(changed);
        CHECK_THROWS_AS((void)simulate(changed, how), usage_error);
    };
    refused([](traffic& t) { t.streams[0].to = 0; });
    refused([](traffic& t) { t.streams[0].to = 2; });
    refused([](traffic& t) { t.streams[0].from = -1; });
    refused([](traffic& t) { t.streams[0].chunks[0].bytes = 0; });
    refused([](traffic& t) { t.streams[0].chunks[0].group = 5; });
    refused([](traffic& t) { t.trainers = 3; });
    how.slots = 0;
    CHECK_THROWS_AS((void)simulate(what, how), usage_error);
    how = simple();
    how.links.scatter = 0;
    CHECK_THROWS_AS((void)simulate(what, how), usage_error);
}

TEST_CASE("measured rates replace what is assumed") {
    // Four owners and four workers of one host, each worker taking from each: 16 GB.
    traffic what{.trainers = 4, .nodes = std::vector<std::uint64_t>(8, 0)};
    for (int from = 0; from < 4; ++from) {
        for (int to = 4; to < 8; ++to) {
            what.streams.push_back(stream_of(from, to, 10, 100 * MB));
            for (auto& chunk : what.streams.back().chunks) {
                chunk.block_bytes = 4096;
            }
        }
    }
    simulation_options how{.links = plan::links_from({.local_one = 10e9, .local_all = 16e9}),
                           .in_place = true};
    CHECK(simulate(what, how).seconds == Approx(1).epsilon(0.002));
    how.links = plan::links_from({.local_one = 2e9, .local_all = 16e9});
    CHECK(simulate(what, how).seconds == Approx(2).epsilon(0.002));
    // Two cores copy into the arena, over the socket and out of the landing in turn.
    how.in_place = false;
    how.links = plan::links_from(
        {.local_one = 8e9, .local_all = 4e9, .pack = 8e9, .scatter = 8e9, .shared_cores = true});
    CHECK(how.links.local_all == Approx(2e9));
    CHECK(simulate(what, how).seconds == Approx(8).epsilon(0.01));
    CHECK(plan::links_from({}).network == link_model{}.network);
    CHECK_THROWS_AS((void)plan::links_from({.local_one = -1}), usage_error);
}

TEST_CASE("a floor follows from who holds what and where it is needed") {
    const manifest list{{{"a", dtype::u8, {1'000'000'000}}, {"b", dtype::u8, {600'000'000}}}};
    const auto whole = plan::position_set::all(2);
    // Rank 0 holds both, rank 1 only b; both workers of one node need all.
    const plan::ownership owners{list, {whole, plan::position_set{{{1, 2}}}}};
    plan::places where{.trainers = {0, 1}, .workers = {2, 2}};
    const plan::needs_report need{{{0, 1000 * MB, 1}, {1, 600 * MB, 2}}};
    const std::vector reports{need, need};
    const auto links = simple_links();
    const auto alone = floor_of(list, owners, where, reports, links, {.node_once = false});
    CHECK(alone.receive == Approx(0.16));
    CHECK(alone.send == Approx(0.2));  // a goes out twice from the one that has it
    CHECK(alone.network_bytes == 3200 * MB);
    CHECK(alone.seconds() == Approx(0.2));
    const auto once = floor_of(list, owners, where, reports, links);
    CHECK(once.receive == Approx(0.08));
    CHECK(once.send == Approx(0.1));
    CHECK(once.network_bytes == 1600 * MB);
    CHECK(once.local == Approx(0.008));

    SUBCASE("what is on the node needs no network") {
        where.workers = {0, 0};
        const auto local = floor_of(list, owners, where, reports, links, {.node_once = false});
        CHECK(local.network_bytes == 0);
        CHECK(local.local == Approx(0.016));
    }
    SUBCASE("different slices of a parameter are not the same bytes") {
        const std::vector<plan::needs_report> halves{{{{0, 500 * MB, 1}}}, {{{0, 500 * MB, 2}}}};
        CHECK(floor_of(list, owners, where, halves, links).network_bytes == 1000 * MB);
    }
    SUBCASE("slices that overlap are at most the parameter") {
        const std::vector<plan::needs_report> most{{{{0, 900 * MB, 1}}}, {{{0, 800 * MB, 2}}}};
        CHECK(floor_of(list, owners, where, most, links).network_bytes == 1000 * MB);
        const auto each = floor_of(list, owners, where, most, links, {.node_once = false});
        CHECK(each.network_bytes == 1700 * MB);
    }
    SUBCASE("turns add up") {
        const std::vector turns{0, 1};
        // b belongs to its first holder's turn, which is that of a.
        CHECK(floor_in_turn(list, owners, where, reports, links, turns) == Approx(0.2));
        const plan::ownership apart{list,
                                    {plan::position_set{{{0, 1}}}, plan::position_set{{{1, 2}}}}};
        CHECK(floor_in_turn(list, apart, where, reports, links, turns) == Approx(0.2 + 0.12));
    }
    SUBCASE("places of all are needed") {
        where.workers.pop_back();
        CHECK_THROWS_AS((void)floor_of(list, owners, where, reports, links), usage_error);
    }
}

models::dimensions few_layers(models::dimensions model, std::int64_t layers) {
    model.layers = layers;
    return model;
}

TEST_CASE("plans become traffic: what is pulled, what is passed on, in which blocks") {
    const models::pull_problem problem{few_layers(models::qwen3_30b_a3b, 2),
                                       {.trainer = parse_layout("tp2,pp2,ep2"),
                                        .worker = parse_layout("dp2,ep2"),
                                        .trainer_ranks = 4,
                                        .worker_ranks = 2,
                                        .ranks_per_node = 2}};
    const auto& places = problem.places();
    const std::vector reports{problem.needs_of(0).report(), problem.needs_of(1).report()};
    const auto routed = plan::route(problem.checkpoint(), problem.owners(), places, reports);
    std::vector<plan::worker_plan> plans;
    for (int worker = 0; worker < 2; ++worker) {
        plans.push_back(plan::plan_worker(problem.checkpoint(), problem.group_sizes(),
                                          problem.owners(), problem.needs_of(worker),
                                          routed.of(worker), {.chunk_bytes = 64U << 20U}));
    }
    const auto collect = [&](bool in_place) {
        plan::traffic_collector collected{places, in_place};
        for (const auto& each : plans) {
            collected.add(each);
        }
        return std::move(collected).take();
    };
    const auto packed = collect(false);
    CHECK(packed.trainers == 4);
    CHECK(packed.nodes == std::vector<std::uint64_t>{0, 0, 1, 1, 2, 2});
    CHECK_NOTHROW(plan::require_consistent(packed));
    std::array<std::uint64_t, 2> into{};
    std::uint64_t passed_on = 0;
    for (const auto& stream : packed.streams) {
        into[static_cast<std::size_t>(stream.to - 4)] += stream.bytes();
        for (const auto& chunk : stream.chunks) {
            CHECK(chunk.block_bytes == chunk.bytes);
        }
        if (stream.from >= 4) {
            passed_on += stream.bytes();
            const auto& followed = packed.streams[static_cast<std::size_t>(stream.follows)];
            CHECK(followed.to == stream.from);
            CHECK(followed.bytes() == stream.bytes());
        }
    }
    for (std::size_t worker = 0; worker < 2; ++worker) {
        const auto needed = static_cast<double>(problem.needed()[worker]);
        CHECK(static_cast<double>(into[worker]) == Approx(needed).epsilon(1e-4));
        CHECK(into[worker] >= problem.needed()[worker]);
    }
    // Both need all but the experts, and each takes half of it for both.
    std::uint64_t shared = 0;
    for (const auto& parameter : problem.checkpoint().parameters()) {
        shared += plan::place_of(parameter.name).expert < 0 ? parameter.byte_size() : 0;
    }
    CHECK(static_cast<double>(passed_on) == Approx(static_cast<double>(shared)).epsilon(1e-3));

    // In place a read is as long as what lies together on both sides: here whole projections.
    std::uint64_t longest = 0;
    for (const auto& stream : collect(true).streams) {
        for (const auto& chunk : stream.chunks) {
            CHECK(chunk.block_bytes <= chunk.bytes);
            longest = std::max(longest, chunk.block_bytes);
        }
    }
    CHECK(longest >= 768 * 2048 * 2);

    plan::traffic_collector one{places, false};
    one.add(plans[0]);
    CHECK_THROWS_WITH_AS((void)std::move(one).take(),
                         doctest::Contains("add the plans of all workers"), usage_error);
}

TEST_CASE("a trainer gathers what its tensor group shares, or everything") {
    const models::pull_problem problem{few_layers(models::qwen3_30b_a3b, 2),
                                       {.trainer = parse_layout("tp4,pp2,ep4"),
                                        .worker = parse_layout("tp1"),
                                        .trainer_ranks = 8,
                                        .worker_ranks = 1,
                                        .ranks_per_node = 4}};
    const auto& list = problem.checkpoint();
    link_model links;
    links.gather = 100e9;
    links.gather_tensor = 1e-3;
    const auto gathers = [&](plan::gather_rule rule) {
        return plan::gathers_of(list, problem.group_sizes(), problem.owners(), problem.places(),
                                rule, links);
    };
    std::uint64_t attention = 0;  // and norms and router, of a layer
    std::uint64_t layer = 0;
    for (const auto& parameter : list.parameters()) {
        const auto place = plan::place_of(parameter.name);
        layer += place.layer == 0 ? parameter.byte_size() : 0;
        attention += place.layer == 0 && place.expert < 0 ? parameter.byte_size() : 0;
    }
    const auto own = gathers({.tensor_ranks = 4});
    REQUIRE(own.size() == 8);
    REQUIRE(own[0].size() == 4);  // embeddings, two layers, the head
    CHECK(own[0][1].bytes == attention);
    CHECK(own[0][1].seconds == Approx(9e-3 + 0.75 * static_cast<double>(attention) / 100e9));
    CHECK(own[0][2].bytes == 0);  // the other stage's
    CHECK(own[7][2].bytes == attention);
    CHECK(gathers({.tensor_ranks = 1})[0][1].seconds == 0);
    const auto all = gathers({.tensor_ranks = 4, .everything = true});
    CHECK(all[0][2].bytes == layer);
    // Half comes from the other node, through the adapters of this one's four ranks.
    CHECK(all[0][2].seconds == Approx((9 + 3 * 128) * 1e-3 + static_cast<double>(layer) / 100e9 +
                                      static_cast<double>(layer) / 2 / (4 * links.network)));
}

// Whatever the layouts, the plan moves what is needed and is not faster than the floor.
TEST_CASE("no simulated round is below the floor of its problem") {
    std::mt19937 random{5};
    const auto one_of = [&](const std::vector<std::int64_t>& from) {
        return from[std::uniform_int_distribution<std::size_t>{0, from.size() - 1}(random)];
    };
    for (int round = 0; round < 12; ++round) {
        models::cluster where{.trainer = {.tensor = one_of({1, 2, 4}),
                                          .pipeline = one_of({1, 2, 3}),
                                          .expert = one_of({1, 2, 4})},
                              .worker = {.tensor = one_of({1, 2, 4}), .data = one_of({1, 2, 4})},
                              .ranks_per_node = one_of({1, 2, 4}),
                              .same_nodes = one_of({0, 1}) == 1};
        where.worker.expert = where.worker.tensor * where.worker.data;
        where.trainer_ranks = plan::fewest_ranks(where.trainer);
        where.worker_ranks = where.worker.expert * one_of({1, 2});
        CAPTURE(round);
        const models::pull_problem problem{few_layers(models::qwen3_30b_a3b, 4), where};
        for (const bool node_once : {false, true}) {
            CAPTURE(node_once);
            models::method how{.node_once = node_once, .chunk_bytes = 32U << 20U};
            const auto planned = problem.plan(how);
            const auto made = problem.simulate(planned, how);
            const auto floor = problem.floor(how.budgets.links, node_once);
            CHECK(made.seconds >= floor.seconds());
            std::uint64_t network = 0;
            std::uint64_t most = 0;
            for (std::size_t i = 0; i < made.loads.size(); ++i) {
                network += made.loads[i].network_in;
                most = std::max(most, made.loads[i].network_out);
                if (i >= planned.owner_bytes.size()) {
                    const auto worker = i - planned.owner_bytes.size();
                    CHECK(made.loads[i].network_in + made.loads[i].local_in >=
                          problem.needed()[worker]);
                }
            }
            CHECK(network >= floor.network_bytes);
            CHECK(most >= floor.busiest_send_bytes);
            // A finer clock tells the same.
            how.budgets.resolution /= 10;
            CHECK(problem.simulate(planned, how).seconds == Approx(made.seconds).epsilon(0.01));
        }
    }
}

double seconds_of(const models::pull_problem& problem, const models::method& how) {
    return models::pull_problem::simulate(problem.plan(how), how).seconds;
}

// Fewer layers than the models have, which makes no round shorter beside its floor. plan_explorer
// plans all of them.
TEST_CASE("Qwen3-235B: published ways come out in their order, and ours near the floor") {
    const models::cluster where{.trainer = parse_layout("tp4,pp2,ep8"),
                                .worker = parse_layout("dp16,ep16"),
                                .trainer_ranks = 16,
                                .worker_ranks = 16};
    const link_model links;
    const models::pull_problem whole{models::qwen3_235b_a22b, where};
    CHECK(whole.floor(links, false).seconds() == Approx(0.88).epsilon(0.02));  // as published
    CHECK(whole.floor(links, true).seconds() == Approx(0.61).epsilon(0.02));

    const models::pull_problem problem{few_layers(models::qwen3_235b_a22b, 8), where};
    const auto v1 =
        seconds_of(problem, {.gather_everything = true, .overlap = false, .node_once = false});
    const auto v2 =
        seconds_of(problem, {.overlap = false, .stages_in_turn = true, .node_once = false});
    const auto v3 = seconds_of(problem, {.stages_in_turn = true, .node_once = false});
    const auto concurrent = seconds_of(problem, {.node_once = false});
    const auto node_once = seconds_of(problem, {});
    CHECK(v1 > v2);
    CHECK(v2 > v3);
    CHECK(v3 > concurrent);
    CHECK(concurrent > node_once);
    CHECK(v3 >= problem.floor_in_turn(links));
    CHECK(concurrent <= 1.15 * problem.floor(links, false).seconds());
    CHECK(node_once <= 1.15 * problem.floor(links, true).seconds());
}

TEST_CASE("Kimi K2: stages in turn cost the published 5 s, and ours is near the floor") {
    const models::cluster where{.trainer = parse_layout("tp8,pp8,ep32"),
                                .worker = parse_layout("tp32,ep32"),
                                .trainer_ranks = 256,
                                .worker_ranks = 128};
    const link_model links;
    const models::pull_problem whole{models::kimi_k2, where};
    const auto alone = whole.floor(links, false);
    // Published for 7.9 TB: 1.25 s, and 5 s with the stages in turn. The list needs a little more.
    const auto more = static_cast<double>(alone.network_bytes) / 7.9e12;
    CHECK(more == Approx(1.07).epsilon(0.02));
    CHECK(alone.seconds() / more == Approx(1.25).epsilon(0.03));
    CHECK(whole.floor_in_turn(links) / more == Approx(5).epsilon(0.03));

    const models::pull_problem problem{few_layers(models::kimi_k2, 8), where};
    const auto v3 = seconds_of(problem, {.stages_in_turn = true, .node_once = false});
    CHECK(v3 >= problem.floor_in_turn(links));
    CHECK(v3 == Approx(problem.floor_in_turn(links)).epsilon(0.1));
    CHECK(seconds_of(problem, {}) <= 1.15 * problem.floor(links, true).seconds());
}

}  // namespace
