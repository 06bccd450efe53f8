// SPDX-License-Identifier: Apache-2.0
//
// What workers of a node take once in `sharded_pull`: the owner's slots and rank 0's routes as they
// hear of it, a receiver that is lied to, and whole rounds in one process.

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/backend.hpp>
#include <weightwire/backends/sharded_pull/control_connect.hpp>
#include <weightwire/plan/groups.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/wire/pull_node_codec.hpp>

#include "../support/across_fabric.hpp"
#include "../support/allocations.hpp"
#include "../support/small_model.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
namespace pull = weightwire::sharded_pull;
using pull::frame_kind;
using tests::across_fabric;

deadline soon() { return deadline::after(10s); }

/// Two chunks each.
const manifest& model() {
    static const manifest made{{{"first", dtype::f32, {2048}}, {"second", dtype::f32, {2048}}},
                               "model"};
    return made;
}
constexpr std::array<std::size_t, 2> groups{1, 1};

plan::pull_needs whole_needs() {
    return {model(), model(), plan::record(model(), model(), [](plan::recorder& r) {
                plan::loaders::replicated(r.source("first"), r.destination("first"));
                plan::loaders::replicated(r.source("second"), r.destination("second"));
            })};
}
const plan::ownership& one_owner() {
    static const plan::ownership made{model(), {plan::position_set::all(2)}};
    return made;
}
/// Rows of workers that all take the whole model on one node, the trainer being on another.
plan::routing routes_of(std::size_t workers) {
    const std::vector<plan::needs_report> reports(workers, whole_needs().report());
    const plan::places where{.trainers = {0}, .workers = std::vector<plan::node_id>(workers, 1)};
    return plan::route(model(), one_owner(), where, reports);
}
plan::worker_plan plan_of(int worker, std::size_t workers) {
    return plan::plan_worker(model(), groups, one_owner(), whole_needs(),
                             routes_of(workers).of(worker), {.chunk_bytes = 4096});
}
/// The section of a worker's part that `ingester` takes for the node.
std::uint32_t section_of(const plan::owner_part& part, int ingester) {
    const auto found = std::ranges::find(part.sections, ingester, &plan::owner_section::ingester);
    REQUIRE(found != part.sections.end());
    return static_cast<std::uint32_t>(found - part.sections.begin());
}

pull::owner_terms terms_of(std::size_t slots) {
    return {.parameters = &model(),
            .group_sizes = {groups.begin(), groups.end()},
            .held = plan::position_set::all(2),
            .in_place = {0, 0},
            .options = {.chunk_bytes = 4096},
            .rank = 0,
            .nonce = 77,
            .slot_bytes = 4096,
            .slots = slots,
            .node_once = true};
}

void say(pull::frame_socket& socket, frame_kind kind, std::string_view body) {
    pull::send_frame(socket, kind, body, soon(), {}, {});
}
pull::chunk_body take(pull::frame_socket& socket, frame_kind kind) {
    return pull::await_frame(socket, kind, soon(), {}, {}).as<pull::chunk_body>();
}
/// The error that a connection ends with.
std::string refusal(pull::frame_socket& socket) {
    try {
        static_cast<void>(
            pull::await_frame(socket, frame_kind::confirmed, deadline::after(5s), {}, {}));
    } catch (const error& caught) {
        return std::string{caught.kind()} + ": " + caught.what();
    }
    return {};
}
/// Whether nothing comes for a while.
bool is_quiet(pull::frame_socket& socket) {
    try {
        static_cast<void>(
            pull::await_frame(socket, frame_kind::confirmed, deadline::after(150ms), {}, {}));
    } catch (const timeout_error&) {
        return true;
    } catch (const error& caught) {
        MESSAGE(caught.what());
    }
    return false;
}

/// An owner's desk and its server; the workers are sockets.
struct owner_end {
    explicit owner_end(std::size_t slots = 4) : desk{terms_of(slots)} {}
    pull::owner_desk desk;
    pull::control_server<pull::owner_desk> server{desk, "127.0.0.1", soon()};

    [[nodiscard]] pull::frame_socket connect(std::uint32_t rank) {
        const pull::rank_export named{.host = "127.0.0.1",
                                      .port = server.port(),
                                      .nonce = 77,
                                      .held = plan::position_set::all(2)};
        return pull::connect_control(named, rank, 4, soon(), {}, {});
    }
    [[nodiscard]] pull::frame_socket agreed(std::uint32_t rank, std::size_t workers = 2) {
        auto socket = connect(rank);
        const auto part = plan_of(static_cast<int>(rank) - 1, workers).part_for(0);
        say(socket, frame_kind::part, wire::encode(part));
        static_cast<void>(pull::await_frame(socket, frame_kind::accepted, soon(), {}, {}));
        return socket;
    }
    /// Index of the taker that worker rank `lead` leads, or would.
    [[nodiscard]] std::size_t taker_of(int lead) const {
        const auto found = std::ranges::find_if(
            desk.takers(), [&](const auto& taker) { return taker.section().ingester == lead - 1; });
        return static_cast<std::size_t>(found - desk.takers().begin());
    }
    void await(auto holds) {
        const auto until = soon();
        while (!holds()) {
            desk.await_change(desk.changes(), until, {});
        }
    }
};

/// Two workers of a node, the first of which leads what is published here.
struct led_pair {
    explicit led_pair(deadline until = soon()) {
        owner.desk.set_peers({1, 1});
        CHECK(owner.desk.begin_round(3, until));
        lane = owner.taker_of(1);
        REQUIRE(lane < owner.desk.takers().size());
        CHECK(owner.desk.takers().size() == 2);
        CHECK(owner.desk.takers()[lane].lead == 1);
        CHECK(owner.desk.takers()[lane].readers.size() == 2);
    }
    pull::owner_desk::held_slot publish(std::uint32_t chunk) {
        const auto slot = owner.desk.take_slot(lane, 4);
        REQUIRE(slot);
        owner.desk.publish(*slot, chunk);
        return *slot;
    }

    owner_end owner;
    pull::frame_socket lead = owner.agreed(1);
    pull::frame_socket other = owner.agreed(2);
    std::size_t lane = 0;
};

}  // namespace

TEST_CASE("sharded_pull: a chunk of a node goes to one worker, and is passed on when it landed") {
    led_pair two;
    const auto slot = two.publish(0);
    const auto got = take(two.lead, frame_kind::published);
    CHECK(got.section == section_of(plan_of(0, 2).part_for(0), 0));
    CHECK(is_quiet(two.other));
    auto landed = got;
    landed.landing = 5;
    say(two.lead, frame_kind::landed, pull::bytes_of(landed));
    const auto passed = take(two.other, frame_kind::passed);
    CHECK(passed.landing == 5);
    CHECK(passed.section == section_of(plan_of(1, 2).part_for(0), 0));
    CHECK(passed.generation == got.generation);
    say(two.other, frame_kind::freed, pull::bytes_of(passed));
    CHECK(is_quiet(two.lead));  // it has not copied it yet itself
    CHECK(two.owner.desk.holds(two.lane, slot));
    say(two.lead, frame_kind::freed, pull::bytes_of(landed));
    const auto released = take(two.lead, frame_kind::released);
    CHECK(released.landing == 5);
    CHECK(released.section == got.section);
    CHECK(!two.owner.desk.holds(two.lane, slot));
    for (auto* const each : {&two.lead, &two.other}) {
        say(*each, frame_kind::taken, pull::bytes_of(pull::round_body{3}));
        CHECK(pull::await_frame(*each, frame_kind::confirmed, soon(), {}, {}).kind ==
              frame_kind::confirmed);
    }
    // The same readers: the same takers.
    CHECK(!two.owner.desk.begin_round(4, soon()));
}

TEST_CASE("sharded_pull: when a lead is gone, its node peers read from the owner") {
    led_pair two;
    SUBCASE("before it has landed the chunk") {
        const auto slot = two.publish(0);
        static_cast<void>(take(two.lead, frame_kind::published));
        two.lead.close();
        const auto direct = take(two.other, frame_kind::published);
        CHECK(direct.generation == slot.generation);
        CHECK(direct.section == section_of(plan_of(1, 2).part_for(0), 0));
        say(two.other, frame_kind::freed, pull::bytes_of(direct));
        two.owner.await([&] { return !two.owner.desk.holds(two.lane, slot); });
    }
    SUBCASE("after it, and a chunk that was passed on is freed once") {
        const auto slot = two.publish(0);
        say(two.lead, frame_kind::landed, pull::bytes_of(take(two.lead, frame_kind::published)));
        const auto passed = take(two.other, frame_kind::passed);
        two.owner.desk.drop(0);
        CHECK(take(two.other, frame_kind::published).generation == passed.generation);
        say(two.other, frame_kind::freed, pull::bytes_of(passed));
        two.owner.await([&] { return !two.owner.desk.holds(two.lane, slot); });
        CHECK(is_quiet(two.lead));  // its landing slot is not released any more
    }
    SUBCASE("while the chunk is packed") {
        const auto slot = two.owner.desk.take_slot(two.lane, 4);
        REQUIRE(slot);
        two.owner.desk.drop(0);
        CHECK(two.owner.desk.holds(two.lane, *slot));
        two.owner.desk.publish(*slot, 0);
        CHECK(take(two.other, frame_kind::published).generation == slot->generation);
    }
    SUBCASE("and of who has freed, nothing is asked") {
        two.publish(0);
        const auto got = take(two.lead, frame_kind::published);
        say(two.lead, frame_kind::landed, pull::bytes_of(got));
        say(two.other, frame_kind::freed, pull::bytes_of(take(two.other, frame_kind::passed)));
        two.owner.await([&] { return two.owner.desk.changes() > 0; });
        two.owner.desk.drop(0);
        CHECK(is_quiet(two.other));
    }
    // And so with what follows: packed once, read by the other alone.
    const auto next = two.publish(1);
    const auto direct = take(two.other, frame_kind::published);
    CHECK(direct.generation == next.generation);
    say(two.other, frame_kind::freed, pull::bytes_of(direct));
    two.owner.await([&] { return !two.owner.desk.holds(two.lane, next); });
}

TEST_CASE("sharded_pull: a node peer that is gone is waited for no more, and the lead goes on") {
    led_pair two;
    const auto slot = two.publish(0);
    const auto got = take(two.lead, frame_kind::published);
    SUBCASE("before the chunk has landed") {
        two.other.close();
        two.owner.await([&] { return !two.owner.desk.in_round(2); });
        say(two.lead, frame_kind::landed, pull::bytes_of(got));
        say(two.lead, frame_kind::freed, pull::bytes_of(got));
    }
    SUBCASE("when it is all that is waited for") {
        say(two.lead, frame_kind::landed, pull::bytes_of(got));
        static_cast<void>(take(two.other, frame_kind::passed));
        say(two.lead, frame_kind::freed, pull::bytes_of(got));
        two.other.close();
    }
    CHECK(take(two.lead, frame_kind::released).generation == slot.generation);
    CHECK(!two.owner.desk.holds(two.lane, slot));
}

TEST_CASE("sharded_pull: who lands or frees what it was not given is cut off, and no other") {
    led_pair two;
    two.publish(0);
    const auto got = take(two.lead, frame_kind::published);
    auto wrong = got;
    const auto lies_to_lead = [&](frame_kind kind, const pull::chunk_body& body) {
        say(two.lead, kind, pull::bytes_of(body));
        const auto why = refusal(two.lead);
        CHECK(why.find("not given") != std::string::npos);
        // The other reads from the owner.
        const auto direct = take(two.other, frame_kind::published);
        say(two.other, frame_kind::freed, pull::bytes_of(direct));
        say(two.other, frame_kind::taken, pull::bytes_of(pull::round_body{3}));
        CHECK(pull::await_frame(two.other, frame_kind::confirmed, soon(), {}, {}).kind ==
              frame_kind::confirmed);
    };
    SUBCASE("another generation") {
        ++wrong.generation;
        lies_to_lead(frame_kind::landed, wrong);
    }
    SUBCASE("another chunk") {
        ++wrong.chunk;
        lies_to_lead(frame_kind::landed, wrong);
    }
    SUBCASE("another section") {
        ++wrong.section;
        lies_to_lead(frame_kind::landed, wrong);
    }
    SUBCASE("no slot of the arena") {
        wrong.slot = 0xFFFF'FFFFU;
        lies_to_lead(frame_kind::landed, wrong);
    }
    SUBCASE("freed, and never landed") { lies_to_lead(frame_kind::freed, got); }
    SUBCASE("landed twice") {
        say(two.lead, frame_kind::landed, pull::bytes_of(got));
        static_cast<void>(take(two.other, frame_kind::passed));
        lies_to_lead(frame_kind::landed, got);
    }
    SUBCASE("a word too short") {
        say(two.lead, frame_kind::landed, "short");
        CHECK(refusal(two.lead).find("5 bytes") != std::string::npos);
        CHECK(take(two.other, frame_kind::published).generation == got.generation);
    }
    SUBCASE("the node peer lands") {
        auto theirs = got;
        theirs.section = section_of(plan_of(1, 2).part_for(0), 0);
        say(two.other, frame_kind::landed, pull::bytes_of(theirs));
        CHECK(refusal(two.other).find("not given") != std::string::npos);
    }
    SUBCASE("the node peer frees what was not passed on yet") {
        auto theirs = got;
        theirs.section = section_of(plan_of(1, 2).part_for(0), 0);
        say(two.other, frame_kind::freed, pull::bytes_of(theirs));
        CHECK(refusal(two.other).find("not given") != std::string::npos);
        say(two.lead, frame_kind::landed, pull::bytes_of(got));
        say(two.lead, frame_kind::freed, pull::bytes_of(got));
        CHECK(take(two.lead, frame_kind::released).generation == got.generation);
    }
    SUBCASE("of a round that is over: nothing happens") {
        --wrong.round;
        say(two.lead, frame_kind::landed, pull::bytes_of(wrong));
        CHECK(is_quiet(two.lead));
        say(two.lead, frame_kind::landed, pull::bytes_of(got));
        CHECK(take(two.other, frame_kind::passed).generation == got.generation);
    }
}

TEST_CASE("sharded_pull: a silent lead is let go of after half of the time, and nobody with it") {
    const auto until = deadline::after(2s);
    led_pair two{until};
    two.publish(0);
    two.owner.desk.published_all(true);
    const auto got = take(two.lead, frame_kind::published);
    const auto begin = deadline::clock::now();
    SUBCASE("silent") {
        while (two.owner.desk.in_round(1)) {
            two.owner.desk.await_change(two.owner.desk.changes(), until, {});
        }
        const auto after = deadline::clock::now() - begin;
        CHECK(after > 700ms);
        CHECK(after < 1900ms);
        CHECK(two.owner.desk.in_round(2));
        CHECK(take(two.other, frame_kind::published).generation == got.generation);
        CHECK(refusal(two.lead).find("half of the time that there was") != std::string::npos);
    }
    SUBCASE("it waits for others and says so") {
        while (deadline::clock::now() - begin < 1500ms) {
            say(two.lead, frame_kind::waits, pull::bytes_of(pull::round_body{3}));
            two.owner.desk.await_change(two.owner.desk.changes(), until, {});
        }
        CHECK(two.owner.desk.in_round(1));
        CHECK(two.owner.desk.in_round(2));
    }
    SUBCASE("the node peer is silent when the chunk was passed on") {
        say(two.lead, frame_kind::landed, pull::bytes_of(got));
        say(two.lead, frame_kind::freed, pull::bytes_of(got));
        say(two.lead, frame_kind::taken, pull::bytes_of(pull::round_body{3}));
        CHECK(pull::await_frame(two.lead, frame_kind::confirmed, soon(), {}, {}).kind ==
              frame_kind::confirmed);
        while (two.owner.desk.in_round(2)) {
            two.owner.desk.await_change(two.owner.desk.changes(), until, {});
        }
        CHECK(two.owner.desk.in_round(1));
        CHECK(take(two.lead, frame_kind::released).generation == got.generation);
    }
}

TEST_CASE("sharded_pull: a node whose lead is not there is served directly, packed once") {
    owner_end owner{6};
    auto second = owner.agreed(2, 3);
    auto third = owner.agreed(3, 3);
    owner.desk.begin_round(1, soon());
    const auto lane = owner.taker_of(1);
    REQUIRE(lane < owner.desk.takers().size());
    CHECK(owner.desk.takers()[lane].lead == 0);
    CHECK(owner.desk.takers()[lane].readers.size() == 2);
    const auto slot = owner.desk.take_slot(lane, 4);
    REQUIRE(slot);
    owner.desk.publish(*slot, 0);
    for (auto* const each : {&second, &third}) {
        const auto got = take(*each, frame_kind::published);
        CHECK(got.slot == slot->index);
        CHECK(owner.desk.holds(lane, *slot));
        say(*each, frame_kind::freed, pull::bytes_of(got));
    }
    owner.await([&] { return !owner.desk.holds(lane, *slot); });
}

TEST_CASE("sharded_pull: sections that differ are packed each for itself") {
    const auto part = plan_of(0, 2).part_for(0);
    auto changed = plan_of(1, 2).part_for(0);
    const std::vector<unsigned char> staged{0, 0};
    const auto accepted = [&](const plan::owner_part& from) {
        return std::make_shared<const pull::accepted_part>(pull::accept_part(from, staged));
    };
    const auto one = accepted(part);
    const auto takers = [&](const plan::owner_part& other) {
        const auto two = accepted(other);
        const std::vector<pull::round_reader> readers{{1, one}, {2, two}};
        const auto made = pull::takers_of(readers);
        const std::array<const pull::accepted_part*, 2> parts{one.get(), two.get()};
        CHECK(pull::most_takers(parts) == made.size() + 2);
        return made;
    };
    CHECK(takers(changed).size() == 2);
    auto& section = changed.sections[section_of(changed, 0)];
    section.reads[0].offset += 1;
    const auto made = takers(changed);
    CHECK(made.size() == 3);
    CHECK(std::ranges::count(made, 1, &pull::chunk_taker::lead) == 1);
    CHECK(std::ranges::count(made, 2, &pull::chunk_taker::lead) == 1);
    CHECK(std::ranges::count(made, 0, &pull::chunk_taker::lead) == 1);
}

namespace {

/// What a route desk says, by worker.
struct heard {
    std::vector<std::pair<frame_kind, std::string>> frames{};
};
struct routed_workers {
    /// @param before called when all but the last have come.
    explicit routed_workers(std::size_t count,
                            const std::function<void(routed_workers&)>& before = {})
        : all(count) {
        desk.begin(model(), plan::ownership{model(), {plan::position_set::all(2)}}, {"a"}, count,
                   true);
        for (std::size_t w = 0; w < count; ++w) {
            if (before && w + 1 == count) {
                before(*this);
            }
            report(w);
        }
        CHECK(desk.routed());
    }
    [[nodiscard]] auto say() {
        return [this](std::size_t w, frame_kind kind, const std::string& text) {
            all[w].frames.emplace_back(kind, text);
        };
    }
    void report(std::size_t w, bool alone = false, bool shows = false, int without = -1) {
        desk.take_needs(w,
                        {.node = "b",
                         .alone = alone,
                         .shows = shows,
                         .without = without,
                         .report = whole_needs().report()},
                        say());
    }
    void land(std::size_t w, std::string handle = "handle") {
        const std::vector<wire::worker_landing> mine{{.worker = static_cast<int>(w),
                                                      .address = "address",
                                                      .handle = std::move(handle),
                                                      .bytes = 4096}};
        desk.take_landing(w, wire::encode(mine), say());
    }
    [[nodiscard]] std::vector<std::string> of(std::size_t w, frame_kind kind) const {
        std::vector<std::string> made;
        for (const auto& [each, text] : all[w].frames) {
            if (each == kind) {
                made.push_back(text);
            }
        }
        return made;
    }
    [[nodiscard]] std::vector<wire::worker_landing> landings(std::size_t w) const {
        const auto texts = of(w, frame_kind::landings);
        REQUIRE(texts.size() == 1);
        return wire::decode_worker_landings(texts[0], all.size());
    }

    pull::route_desk desk;
    std::vector<heard> all;
};

}  // namespace

TEST_CASE("sharded_pull: node peers hear of each other's memory when all have shown theirs") {
    routed_workers two{2};
    for (std::size_t w = 0; w < 2; ++w) {
        const auto rows = two.of(w, frame_kind::row);
        REQUIRE(rows.size() == 1);
        CHECK(wire::decode_worker_route(rows[0], one_owner()) ==
              routes_of(2).of(static_cast<int>(w)));
    }
    two.land(0);
    CHECK(two.of(0, frame_kind::landings).empty());
    CHECK(two.of(1, frame_kind::landings).empty());
    SUBCASE("all come") {
        two.land(1);
        CHECK(two.landings(0) ==
              std::vector<wire::worker_landing>{
                  {.worker = 1, .address = "address", .handle = "handle", .bytes = 4096}});
        CHECK(two.landings(1)[0].worker == 0);
        SUBCASE("one comes back with other memory: alone, and the others keep what they have") {
            two.report(1);
            const auto row = wire::decode_worker_route(two.of(1, frame_kind::row)[1], one_owner());
            CHECK(row.shared.empty());
            CHECK(row.worker == 1);
            CHECK(two.of(0, frame_kind::row).size() == 1);
            CHECK(two.of(1, frame_kind::landings).size() == 1);
            CHECK_THROWS_AS(two.land(1), protocol_error);
        }
    }
    SUBCASE("one comes back with the memory that it has shown: all is as before") {
        two.land(1);
        two.report(1, false, true);
        const auto rows = two.of(1, frame_kind::row);
        REQUIRE(rows.size() == 2);
        CHECK(rows[0] == rows[1]);
        CHECK(two.of(1, frame_kind::landings).size() == 1);  // not before it has shown it again
        two.land(1);
        const auto told = two.of(1, frame_kind::landings);
        REQUIRE(told.size() == 2);
        CHECK(told[0] == told[1]);
        CHECK(two.of(0, frame_kind::row).size() == 1);
        CHECK(two.of(0, frame_kind::landings).size() == 1);
    }
    SUBCASE("one comes back and cannot open the memory of one that has died: without that one") {
        two.land(1);
        two.desk.leave(0, two.say());
        two.report(1, false, true);
        two.land(1);
        two.report(1, false, true, 0);
        two.land(1);
        const auto rows = two.of(1, frame_kind::row);
        REQUIRE(rows.size() == 3);
        CHECK(rows[2] == rows[0]);
        const auto told = two.of(1, frame_kind::landings);
        REQUIRE(told.size() == 3);
        CHECK(wire::decode_worker_landings(told[2], 2)[0].bytes == 0);
        // And should that one have lived: nobody has its memory any more.
        two.report(0, false, true);
        two.land(0);
        const auto none = wire::decode_worker_landings(two.of(0, frame_kind::landings).back(), 2);
        CHECK(none[0].worker == 0);
        CHECK(none[0].bytes == 0);
    }
    SUBCASE("one comes back and cannot open the memory of one that is there: alone") {
        two.land(1);
        two.report(1, false, true, 0);
        CHECK(wire::decode_worker_route(two.of(1, frame_kind::row)[1], one_owner()).shared.empty());
    }
    SUBCASE("one comes back, says that it has it still, and shows other memory") {
        two.land(1);
        two.report(1, false, true);
        two.land(1, "another");
        const auto told = two.of(1, frame_kind::landings);
        REQUIRE(told.size() == 2);
        const auto none = wire::decode_worker_landings(told[1], 2);
        REQUIRE(none.size() == 1);
        CHECK(none[0].worker == 1);
        CHECK(none[0].bytes == 0);
        two.report(1, true);
        CHECK(wire::decode_worker_route(two.of(1, frame_kind::row)[2], one_owner()).shared.empty());
        CHECK(two.of(1, frame_kind::landings).size() == 2);
    }
    SUBCASE("one is gone before it has shown its own") {
        two.desk.leave(1, two.say());
        CHECK(two.landings(0)[0].bytes == 0);
    }
    SUBCASE("one asks to be alone") {
        two.report(1, true);
        CHECK(wire::decode_worker_route(two.of(1, frame_kind::row)[1], one_owner()).shared.empty());
        CHECK(two.landings(0)[0].bytes == 0);
        CHECK(two.of(1, frame_kind::landings).empty());
    }
    SUBCASE("memory of another worker is refused") {
        const std::vector<wire::worker_landing> lie{
            {.worker = 0, .address = "a", .handle = "h", .bytes = 1}};
        CHECK_THROWS_AS(two.desk.take_landing(1, wire::encode(lie), two.say()), protocol_error);
        CHECK_THROWS_AS(two.desk.take_landing(1, "garbage", two.say()), protocol_error);
    }
}

TEST_CASE("sharded_pull: a node peer that is gone before all have come is waited for no more") {
    routed_workers two{2, [](routed_workers& early) { early.desk.leave(0, early.say()); }};
    two.land(1);
    CHECK(two.landings(1)[0].worker == 0);
    CHECK(two.landings(1)[0].bytes == 0);
    CHECK(two.of(0, frame_kind::row).empty());
    two.report(0);  // another process
    REQUIRE(two.of(0, frame_kind::row).size() == 1);
    CHECK(wire::decode_worker_route(two.of(0, frame_kind::row)[0], one_owner()).shared.empty());
}

TEST_CASE("sharded_pull: workers without a node's name share nothing") {
    pull::route_desk desk;
    std::vector<plan::worker_route> rows;
    const auto say = [&](std::size_t, frame_kind, const std::string& text) {
        rows.push_back(wire::decode_worker_route(text, one_owner()));
    };
    desk.begin(model(), plan::ownership{model(), {plan::position_set::all(2)}}, {"a"}, 2, true);
    for (std::size_t w = 0; w < 2; ++w) {
        desk.take_needs(w, {.node = "", .alone = false, .report = whole_needs().report()}, say);
    }
    REQUIRE(rows.size() == 2);
    CHECK(rows[0].shared.empty());
    CHECK(rows[1].shared.empty());
}

TEST_CASE("wire: what workers of a node say of themselves has one spelling, lies are refused") {
    const wire::worker_needs said{.node = "b", .alone = true, .report = whole_needs().report()};
    const auto text = wire::encode(said);
    CHECK(
        text.starts_with(std::string_view{"WP1W\x01"
                                          "b\x01\x00WP1N",
                                          12}));
    CHECK(wire::decode_worker_needs(text, 2) == said);
    const wire::worker_needs shown{.node = "b", .shows = true, .report = said.report};
    const auto again = wire::encode(shown);
    CHECK(
        again.starts_with(std::string_view{"WP1W\x01"
                                           "b\x02\x00WP1N",
                                           12}));
    CHECK(wire::decode_worker_needs(again, 2) == shown);
    const std::vector<wire::worker_landing> all{
        {.worker = 1, .address = "at", .handle = "h", .bytes = 300}, {.worker = 3}};
    const auto list = wire::encode(all);
    CHECK(list == std::string("WP1L\x02\x01\x02"
                              "at\x01h\xAC\x02\x01\x00\x00\x00",
                              17));
    CHECK(wire::decode_worker_landings(list, 4) == all);
    for (std::size_t length = 0; length < text.size(); ++length) {
        CHECK_THROWS_AS(static_cast<void>(wire::decode_worker_needs(text.substr(0, length), 2)),
                        protocol_error);
    }
    for (std::size_t length = 0; length < list.size(); ++length) {
        CHECK_THROWS_AS(static_cast<void>(wire::decode_worker_landings(list.substr(0, length), 4)),
                        protocol_error);
    }
    CHECK_THROWS_AS(static_cast<void>(wire::decode_worker_needs(text + "x", 2)), protocol_error);
    CHECK_THROWS_AS(static_cast<void>(wire::decode_worker_needs(text, 1)), protocol_error);
    CHECK_THROWS_AS(static_cast<void>(wire::decode_worker_landings(list + "x", 4)), protocol_error);
    CHECK_THROWS_AS(static_cast<void>(wire::decode_worker_landings(list, 3)), protocol_error);
    auto odd = said;
    odd.node = "b\n";
    CHECK_THROWS_AS(static_cast<void>(wire::decode_worker_needs(wire::encode(odd), 2)),
                    protocol_error);
    odd.node = std::string(wire::longest_node_name + 1, 'b');
    CHECK_THROWS_AS(static_cast<void>(wire::decode_worker_needs(wire::encode(odd), 2)),
                    protocol_error);
    // Memory of no bytes, and bytes of no memory.
    for (const auto& lie :
         {wire::worker_landing{.worker = 0, .address = "a", .handle = "h", .bytes = 0},
          wire::worker_landing{.worker = 0, .address = "", .handle = "", .bytes = 1}}) {
        CHECK_THROWS_AS(
            static_cast<void>(wire::decode_worker_landings(wire::encode(std::vector{lie}), 1)),
            protocol_error);
    }
}

TEST_CASE("sharded_pull: the name of a node is printable and short") {
    CHECK(pull::fault_of_node("").empty());
    CHECK(pull::fault_of_node("rack 7").empty());
    CHECK(!pull::fault_of_node("a\nb").empty());
    CHECK(!pull::fault_of_node("\xC3\xA9").empty());
    CHECK(!pull::fault_of_node(std::string(257, 'a')).empty());
    CHECK(!pull::fault_of(pull::basic_trainer_init_info<across_fabric>{.node = "\t"}).empty());
}

namespace {

/// Rank 0 as a script for worker 0 of two: what it says after the part has come.
struct scripted_owner {
    std::vector<std::pair<frame_kind, pull::chunk_body>> lines{};
    std::vector<wire::worker_landing> peers{};
    int alone = 0;    ///< how often the worker has asked to be alone
    int without = 0;  ///< and to be without one whose memory it cannot open
    std::uint64_t number = 77;
    std::vector<bool> shows{};         ///< of each init: it still has what it has shown
    std::vector<std::string> shown{};  ///< its landing memory, of each init

    [[nodiscard]] std::uint64_t nonce() const { return number; }
    void on_hello(const pull::owner_desk::connection&, const pull::hello_body&) {}
    void on_gone(const pull::owner_desk::connection&) noexcept {}
    void on_frame(const pull::owner_desk::connection& from, const pull::frame& got) {
        if (got.kind == frame_kind::needs) {
            const auto said = wire::decode_worker_needs(got.body, 2);
            alone += said.alone ? 1 : 0;
            without += said.without >= 0 ? 1 : 0;
            shows.push_back(said.shows);
            auto row = said.alone ? alone_row() : routes_of(2).of(0);
            from->send(frame_kind::row, wire::encode(row));
        } else if (got.kind == frame_kind::landing) {
            shown.emplace_back(got.body);
            from->send(frame_kind::landings, wire::encode(peers));
        } else if (got.kind == frame_kind::part) {
            const auto part = wire::decode_owner_part(got.body, 2);
            from->send(frame_kind::accepted, pull::bytes_of(pull::hash_body{plan::hash_of(part)}));
            for (const auto& [kind, body] : lines) {
                from->send(kind, pull::bytes_of(body));
            }
        }
    }
    [[nodiscard]] static plan::worker_route alone_row() {
        const std::vector<plan::needs_report> reports{whole_needs().report()};
        const plan::places where{.trainers = {0}, .workers = {1}};
        return plan::route(model(), one_owner(), where, reports).of(0);
    }
};

/// Worker 0 of two, and a rank 0 that lies to it.
struct deceived {
    using backend = pull::basic_backend<across_fabric>;

    explicit deceived(std::vector<std::pair<frame_kind, pull::chunk_body>> lines = {}) {
        liar.lines = std::move(lines);
        liar.peers = {{.worker = 1,
                       .address = memory.address(),
                       .handle = landing.exported().handle,
                       .bytes = landing.exported().bytes}};
    }
    void open() {
        pull::transport_message message{.group_sizes = {1, 1}};
        auto& rank = message.ranks.emplace_back();
        rank.fabric_address = memory.address();
        rank.host = "127.0.0.1";
        rank.port = server.port();
        rank.nonce = liar.nonce();
        rank.held = plan::position_set::all(2);
        rank.arena = pull::exported_memory{arena.exported().handle, arena.exported().bytes};
        const auto transport = pull::encode(message);
        const auto parameters = pull::encode({.fabric = "across", .chunk_bytes = 4096});
        receiver.open({.wire_parameters = parameters,
                       .transport = transport,
                       .parameters = &model(),
                       .destinations = &model()},
                      soon(), {});
    }
    [[nodiscard]] mutable_tensor_view open(std::size_t i, deadline) {
        return {destination[i].data(), model()[i].dtype, model()[i].shape};
    }
    void wrote(std::size_t, std::uint64_t, std::uint64_t, deadline) {}
    std::string receive() {
        update_target target{*this, model(), 0, 2};
        try {
            receiver.receive({.round = 3, .first = 0, .count = 2, .native = true}, target,
                             deadline::after(1s), {});
        } catch (const error& caught) {
            return caught.what();
        }
        return {};
    }

    scripted_owner liar;
    pull::control_server<scripted_owner> server{liar, "127.0.0.1", soon()};
    shm::fabric::owner memory;
    shm::fabric::arena arena = memory.allocate(8192);
    shm::fabric::arena landing = memory.allocate(8192);
    std::vector<std::vector<std::byte>> destination{std::vector<std::byte>(8192),
                                                    std::vector<std::byte>(8192)};
    pull::basic_receiver<across_fabric> receiver{
        receiver_context{.global_rank = 1, .world_size = 3}, backend{.node = "b"}};
};

}  // namespace

TEST_CASE("sharded_pull: a receiver reads landing memory only where the plan and its bounds say") {
    const auto part = plan_of(0, 2).part_for(0);
    const auto own = section_of(part, 0);
    const auto theirs = section_of(part, 1);
    const auto after = [](std::vector<std::pair<frame_kind, pull::chunk_body>> lines) {
        deceived ends{std::move(lines)};
        ends.open();
        CHECK(ends.receiver.description().find("read from node peers (1)") != std::string::npos);
        return ends.receive();
    };
    const pull::chunk_body good{.round = 3, .generation = 1, .section = theirs, .landing = 1};
    // An honest word is taken, and the rest is waited for.
    CHECK(after({{frame_kind::passed, good}}).find("did not end before its deadline") !=
          std::string::npos);
    auto body = good;
    body.round = 2;
    CHECK(after({{frame_kind::passed, body}}).find("did not end before its deadline") !=
          std::string::npos);
    body = good;
    body.landing = 2;
    CHECK(after({{frame_kind::passed, body}})
              .find("outside of the landing memory of worker rank 2") != std::string::npos);
    body.landing = 0xFFFF'FFFFU;
    CHECK(after({{frame_kind::passed, body}})
              .find("outside of the landing memory of worker rank 2") != std::string::npos);
    CHECK(after({{frame_kind::passed, good}, {frame_kind::passed, good}}).find("twice") !=
          std::string::npos);
    // Read from the owner although it was begun already: the node peer has failed.
    CHECK(after({{frame_kind::passed, good}, {frame_kind::published, good}})
              .find("did not end before its deadline") != std::string::npos);
    body = good;
    body.section = own;
    CHECK(after({{frame_kind::passed, body}}).find("no node peer takes") != std::string::npos);
    body = good;
    body.chunk = 9;
    CHECK(after({{frame_kind::passed, body}}).find("no node peer takes") != std::string::npos);
    body = good;
    body.section = own;
    body.landing = 0;
    CHECK(after({{frame_kind::released, body}}).find("not landed") != std::string::npos);
    CHECK(after({{frame_kind::published, body}, {frame_kind::published, body}}).find("twice") !=
          std::string::npos);
}

namespace {

/// The memory file of this process that a handle of shared memory names: its second number.
ino_t inode_of(const wire::worker_landing& shown) {
    const auto begin = shown.handle.find(' ') + 1;
    const auto number = shown.handle.substr(begin, shown.handle.find(' ', begin) - begin);
    struct stat about {};
    REQUIRE(::stat(("/proc/self/fd/" + number).c_str(), &about) == 0);
    return about.st_ino;
}

}  // namespace

TEST_CASE("sharded_pull: a worker shows one trainer the same landing memory, another one other") {
    deceived ends;
    ends.open();
    ends.open();
    ends.receiver.release();
    ends.open();
    CHECK(ends.liar.shows == std::vector<bool>{false, true, true});
    REQUIRE(ends.liar.shown.size() == 3);
    CHECK(ends.liar.shown[1] == ends.liar.shown[0]);
    CHECK(ends.liar.shown[2] == ends.liar.shown[0]);
    // A node peer has it open, and may still read what was landed for that trainer.
    const auto first = wire::decode_worker_landings(ends.liar.shown[0], 2).at(0);
    shm::fabric::reader peer;
    auto way = peer.connect(first.address, soon(), {});
    const auto opened = peer.open(way, first.handle, first.bytes, soon(), {});
    const auto file = inode_of(first);
    ends.liar.number = 78;
    ends.open();
    REQUIRE(ends.liar.shown.size() == 4);
    CHECK(!ends.liar.shows[3]);
    CHECK(inode_of(wire::decode_worker_landings(ends.liar.shown[3], 2).at(0)) != file);
}

namespace {

/// A fabric whose reads may go on after they were given up.
struct resting_fabric : across_fabric {
    static inline int rested = 0;
    struct reader : across_fabric::reader {
        using across_fabric::reader::reader;
        void come_to_rest() noexcept { ++rested; }
    };
};

}  // namespace

namespace {

/// Trainer rank 0, which holds nothing that the worker needs.
struct only_routes {
    plan::worker_route row{};
    std::atomic<int> gone = 0;

    [[nodiscard]] static std::uint64_t nonce() { return 78; }
    void on_hello(const pull::owner_desk::connection&, const pull::hello_body&) {}
    void on_gone(const pull::owner_desk::connection&) noexcept { ++gone; }
    void on_frame(const pull::owner_desk::connection& from, const pull::frame& got) const {
        if (got.kind == frame_kind::needs) {
            from->send(frame_kind::row, wire::encode(row));
        }
    }
};

}  // namespace

TEST_CASE(
    "sharded_pull: rank 0 knows that a worker is there, also one that reads nothing from it") {
    const plan::ownership owners{model(), {{}, plan::position_set::all(2)}};
    const std::vector<plan::needs_report> reports{whole_needs().report()};
    only_routes first{
        .row = plan::route(model(), owners, {.trainers = {0, 0}, .workers = {1}}, reports).of(0)};
    scripted_owner second;
    pull::control_server<only_routes> one{first, "127.0.0.1", soon()};
    pull::control_server<scripted_owner> two{second, "127.0.0.1", soon()};
    shm::fabric::owner memory;
    const auto arena = memory.allocate(8192);
    pull::transport_message message{.group_sizes = {1, 1}};
    for (int rank = 0; rank < 2; ++rank) {
        auto& made = message.ranks.emplace_back();
        made.fabric_address = memory.address();
        made.host = "127.0.0.1";
        made.port = rank == 0 ? one.port() : two.port();
        made.nonce = rank == 0 ? only_routes::nonce() : second.nonce();
    }
    message.ranks[1].held = plan::position_set::all(2);
    message.ranks[1].arena = pull::exported_memory{arena.exported().handle, arena.exported().bytes};
    const auto transport = pull::encode(message);
    const auto parameters = pull::encode({.fabric = "across", .chunk_bytes = 4096});
    pull::basic_receiver<across_fabric> receiver{
        receiver_context{.global_rank = 1, .world_size = 2}};
    receiver.open({.wire_parameters = parameters,
                   .transport = transport,
                   .parameters = &model(),
                   .destinations = &model()},
                  soon(), {});
    CHECK(receiver.bytes_from(0) == 0);
    CHECK(receiver.bytes_from(1) == 16384);
    std::this_thread::sleep_for(100ms);
    CHECK(first.gone == 0);
    receiver.release();
    for (const auto until = soon(); first.gone == 0 && !until.expired();) {
        std::this_thread::sleep_for(1ms);
    }
    CHECK(first.gone > 0);
}

TEST_CASE("sharded_pull: before anything is freed, what was given up comes to rest") {
    pull::basic_receiver<resting_fabric> receiver{receiver_context{}};
    receiver.release();
    CHECK(resting_fabric::rested == 0);  // nothing was open
    CHECK_THROWS_AS(receiver.open({}, soon(), {}), unsupported_error);
    receiver.release();
    CHECK(resting_fabric::rested == 1);
    receiver.release();
    CHECK(resting_fabric::rested == 1);
}

TEST_CASE("sharded_pull: a worker that cannot open a node peer's memory asks for a row alone") {
    deceived ends;
    ends.liar.peers[0].handle = "1 2 3 4 5";
    ends.open();
    CHECK(ends.liar.without == 1);
    CHECK(ends.liar.alone == 1);  // it was told of the same memory again
    const auto said = ends.receiver.description();
    CHECK(said.find("nothing is taken once for the node, because of: worker rank 2") !=
          std::string::npos);
    CHECK(ends.receiver.bytes_from(0) == 16384);
}

namespace {

/// Two workers of a node and a trainer of one rank on another, without engines.
struct node_halves {
    using backend = pull::basic_backend<across_fabric>;
    static constexpr int workers = 2;

    struct worker_half {
        explicit worker_half(node_halves& all, int rank)
            : owner{all},
              receiver{receiver_context{.global_rank = rank, .world_size = workers + 1},
                       backend{.on_traffic =
                                   [this](const auto&, auto traffic) {
                                       from_trainer = traffic[0].bytes;
                                       planned = traffic[0].planned;
                                   },
                               .node = "b",
                               .landing_bytes = all.landing_bytes,
                               .on_node_traffic =
                                   [this](const auto&, auto traffic) {
                                       from_peer = traffic[0].bytes;
                                       planned_from_peer = traffic[0].planned;
                                   }}} {
            for (const auto& parameter : all.parameters.parameters()) {
                memory.emplace_back(parameter.byte_size());
            }
        }
        [[nodiscard]] mutable_tensor_view open(std::size_t i, deadline) {
            return {memory[i].data(), owner.parameters[i].dtype, owner.parameters[i].shape};
        }
        void wrote(std::size_t, std::uint64_t, std::uint64_t, deadline) { ++reported; }

        node_halves& owner;
        std::vector<std::vector<std::byte>> memory;
        pull::basic_receiver<across_fabric> receiver;
        std::size_t reported = 0;
        std::uint64_t from_trainer = 0;
        std::uint64_t planned = 0;
        std::uint64_t from_peer = 0;
        std::uint64_t planned_from_peer = 0;
        std::uint64_t allocated = 0;
    };

    explicit node_halves(std::uint64_t landing = 1U << 20U) : landing_bytes{landing} {
        for (int w = 0; w < workers; ++w) {
            halves.push_back(std::make_unique<worker_half>(*this, w + 1));
        }
        const std::vector<peer_info> peers(workers, peer_info{.name = "worker", .native = true});
        sizes_of_groups = plan::group_runs(plan::layerwise_groups(parameters));
        for (const auto& each : weights.weights()) {
            tensors.push_back(each.tensor);
        }
        inits = sender.prepare({.parameters = parameters,
                                .peers = peers,
                                .world_size = workers + 1,
                                .lifetime = tensor_lifetime::stable,
                                .stable_tensors = tensors,
                                .group_sizes = sizes_of_groups});
        const std::jthread opening{[&] { sender.open(soon(), {}); }};
        open_receivers();
    }
    void open_receivers(std::size_t first = 0, std::size_t last = workers) {
        const auto message = info.init_message();
        std::vector<std::jthread> opening;  // last: its threads use all of it
        for (const auto& each : std::span{halves}.subspan(first, last - first)) {
            opening.emplace_back([&] {
                each->receiver.open({.wire_parameters = message,
                                     .transport = inits.front().native,
                                     .parameters = &parameters,
                                     .destinations = &parameters},
                                    soon(), {});
            });
        }
    }
    /// A round; returns the allocations of all threads.
    std::uint64_t round(std::uint64_t number) {
        weights.set(number);
        std::uint64_t sent = 0;
        {
            std::vector<std::jthread> all;
            all.emplace_back([&] {
                round_of walk{weights, parameters};
                auto stream = walk.stream();
                const weightwire_tests::allocation_watch watch;
                sender.stage(number, 0, stream, soon(), {});
                sender.send(number, 0, stream, soon(), {});
                sent = watch.count();
            });
            for (auto& each : halves) {
                all.emplace_back([&half = *each, &number, this] {
                    update_target target{half, parameters, 0, parameters.size()};
                    const weightwire_tests::allocation_watch watch;
                    half.receiver.receive(
                        {.round = number, .count = parameters.size(), .native = true}, target,
                        soon(), {});
                    half.allocated = watch.count();
                });
            }
        }
        std::uint64_t sum = sent;
        for (auto& each : halves) {
            sum += each->allocated;
            CHECK(std::exchange(each->reported, 0) == parameters.size());
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                CHECK(std::ranges::equal(each->memory[i], tensors[i].bytes()));
            }
        }
        return sum;
    }

    tests::small_weights weights{10, 3000};
    manifest parameters{weights.metadata(), "model"};
    std::vector<tensor_view> tensors;
    std::vector<std::size_t> sizes_of_groups;
    std::uint64_t landing_bytes;
    pull::basic_trainer_init_info<across_fabric> info{
        .chunk_bytes = 4096, .staging_bytes = 32768, .node = "a"};
    backend_traits<backend>::sender sender{info};
    std::vector<transport_init> inits;
    std::vector<std::unique_ptr<worker_half>> halves;
};

}  // namespace

TEST_CASE("sharded_pull: a node takes its bytes once, and steady rounds allocate nothing") {
    node_halves node{[] {
        std::uint64_t landing = 1U << 20U;
        SUBCASE("a landing slot for each chunk") {}
        SUBCASE("one landing slot") { landing = 1; }
        return landing;
    }()};
    const auto& one = *node.halves[0];
    const auto& two = *node.halves[1];
    const auto bytes = one.receiver.bytes_from(0) + two.receiver.bytes_from(0);
    std::uint64_t all = 0;
    for (const auto& parameter : node.parameters.parameters()) {
        all += parameter.byte_size();
    }
    CHECK(bytes == all);
    std::uint64_t allocated = 0;
    for (std::uint64_t number = 1; number <= 8; ++number) {
        const auto made = node.round(number);
        allocated += number > 3 ? made : 0;
        CHECK(one.from_trainer == one.planned);
        CHECK(two.from_trainer == two.planned);
        CHECK(one.from_trainer + two.from_trainer == all);
        CHECK(one.from_peer == two.from_trainer);
        CHECK(two.from_peer == one.from_trainer);
        CHECK(one.planned_from_peer == one.from_peer);
    }
    if (weightwire_tests::counts_allocations) {
        CHECK(allocated == 0);
    }
    const auto said = one.receiver.description();
    CHECK(said.find(" bytes of memory for the node") != std::string::npos);
    CHECK((said.find("land in 4096 bytes") != std::string::npos) == (node.landing_bytes == 1));
}

TEST_CASE("sharded_pull: workers that come back to their trainer share as before") {
    node_halves node;
    const auto& one = *node.halves[0];
    const auto& two = *node.halves[1];
    const auto said = two.receiver.description();
    const auto check = [&](std::uint64_t number) {
        static_cast<void>(node.round(number));
        CHECK(one.from_trainer == one.planned);
        CHECK(two.from_trainer == two.planned);
        CHECK(one.from_peer == two.from_trainer);
        CHECK(two.from_peer == one.from_trainer);
        CHECK(two.receiver.description() == said);
    };
    check(1);
    SUBCASE("all of them, as after a round that failed for all") {
        for (auto& each : node.halves) {
            each->receiver.release();
        }
        node.open_receivers();
    }
    SUBCASE("all of them, one after the other") {
        node.open_receivers(0, 1);
        node.open_receivers(1, 2);
    }
    SUBCASE("one of them") { node.open_receivers(1, 2); }
    check(2);
    check(3);
}

TEST_CASE("sharded_pull: a worker that comes back in another process takes nothing for its node") {
    node_halves node;
    static_cast<void>(node.round(1));
    node.halves[1] = std::make_unique<node_halves::worker_half>(node, 2);
    node.open_receivers(1, 2);
    static_cast<void>(node.round(2));
    std::uint64_t all = 0;
    for (const auto& parameter : node.parameters.parameters()) {
        all += parameter.byte_size();
    }
    for (const auto& each : node.halves) {
        CHECK(each->from_trainer == all);
        CHECK(each->from_peer == 0);
    }
}
