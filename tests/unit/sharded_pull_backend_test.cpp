// SPDX-License-Identifier: Apache-2.0
//
// The two ends of `sharded_pull` one by one: what an owner takes from a control connection and what
// a receiver takes from an owner, lies included.

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/backend.hpp>
#include <weightwire/backends/sharded_pull/control_connect.hpp>
#include <weightwire/plan/groups.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/wire/pull_plan_codec.hpp>

#include "../support/allocations.hpp"
#include "../support/moe_model.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
namespace pull = weightwire::sharded_pull;
using pull::frame_kind;

deadline soon() { return deadline::after(10s); }

const manifest& model() {
    static const manifest made{{{"first", dtype::f32, {1024}}, {"second", dtype::f32, {512}}},
                               "model"};
    return made;
}

pull::owner_terms terms_of(std::vector<unsigned char> in_place = {0, 0}) {
    return {.parameters = &model(),
            .group_sizes = {1, 1},
            .held = plan::position_set::all(2),
            .in_place = std::move(in_place),
            .options = {.chunk_bytes = 4096},
            .rank = 0,
            .nonce = 77,
            .slot_bytes = 4096,
            .slots = 2};
}

/// What a worker reads that holds both parameters.
plan::pull_needs whole_needs() {
    return {model(), model(), plan::record(model(), model(), [](plan::recorder& r) {
                plan::loaders::replicated(r.source("first"), r.destination("first"));
                plan::loaders::replicated(r.source("second"), r.destination("second"));
            })};
}
plan::owner_part whole_part() {
    const plan::ownership owners{model(), {plan::position_set::all(2)}};
    const auto needs = whole_needs();
    const std::vector<plan::needs_report> reports{needs.report()};
    const plan::places here{.trainers = {0}, .workers = {0}};
    const std::vector<std::size_t> groups{1, 1};
    const auto routes = plan::route(model(), owners, here, reports);
    return plan::plan_worker(model(), groups, owners, needs, routes.of(0), {.chunk_bytes = 4096})
        .part_for(0);
}

/// An owner's desk with its server.
struct owner_end {
    explicit owner_end(pull::owner_terms terms = terms_of()) : desk{std::move(terms)} {}
    pull::owner_desk desk;
    pull::control_server<pull::owner_desk> server{desk, "127.0.0.1", soon()};

    [[nodiscard]] pull::rank_export exported() const {
        return {.host = "127.0.0.1",
                .port = server.port(),
                .nonce = 77,
                .held = plan::position_set::all(2)};
    }
    [[nodiscard]] pull::frame_socket connect(std::uint32_t worker = 1, std::uint64_t nonce = 77) {
        auto named = exported();
        named.nonce = nonce;
        return pull::connect_control(named, worker, 4, soon(), {}, {});
    }
    /// A connection whose part was accepted.
    [[nodiscard]] pull::frame_socket agreed(std::uint32_t worker = 1) {
        auto socket = connect(worker);
        auto part = whole_part();
        part.worker = static_cast<int>(worker) - 1;
        pull::send_frame(socket, frame_kind::part, wire::encode(part), soon(), {}, {});
        const auto got = pull::await_frame(socket, frame_kind::accepted, soon(), {}, {});
        CHECK(got.as<pull::hash_body>().hash == plan::hash_of(part));
        return socket;
    }
};

/// The error that a connection ends with.
std::string refusal(pull::frame_socket& socket) {
    try {
        static_cast<void>(
            pull::await_frame(socket, frame_kind::confirmed, deadline::after(3s), {}, {}));
    } catch (const error& caught) {
        return std::string{caught.kind()} + ": " + caught.what();
    }
    return {};
}

pull::chunk_body take_published(pull::frame_socket& socket) {
    return pull::await_frame(socket, frame_kind::published, soon(), {}, {}).as<pull::chunk_body>();
}
void say(pull::frame_socket& socket, frame_kind kind, std::string_view body) {
    pull::send_frame(socket, kind, body, soon(), {}, {});
}

}  // namespace

TEST_CASE("sharded_pull: a control port ends what is no worker of this trainer, and serves on") {
    owner_end owner;
    auto stranger = owner.connect(1, 78);
    CHECK(refusal(stranger).find("protocol: ") == 0);
    for (const std::uint32_t worker : {0U, 4U, 5U}) {
        auto odd = owner.connect(worker);
        CHECK(refusal(odd).find("protocol: ") == 0);
    }
    const auto addresses = rendezvous::resolve("127.0.0.1", owner.server.port(), soon(), {}, {});
    int code = 0;
    auto garbage = rendezvous::try_connect(addresses.front(), soon(), {}, {}, code);
    REQUIRE(garbage);
    const std::string bytes(200'000, 'x');
    try {
        rendezvous::detail::write_all(garbage.native_handle(), bytes, soon(), {}, "lying", {});
    } catch (const peer_error&) {  // it may be ended before all is written
    }
    char byte = 0;
    CHECK_THROWS_AS(
        [&] {
            for (;;) {
                rendezvous::detail::read_exactly(garbage.native_handle(), &byte, 1, soon(), {},
                                                 "listening", {});
            }
        }(),
        peer_error);
    auto good = owner.agreed();
    say(good, static_cast<frame_kind>(99), "?");
    CHECK(refusal(good).find("kind 99") != std::string::npos);
    auto again = owner.agreed();
    say(again, frame_kind::freed, "short");
    CHECK(refusal(again).find("5 bytes") != std::string::npos);
}

TEST_CASE("sharded_pull: an owner refuses a part that it does not hold, or garbage for one") {
    auto terms = terms_of();
    terms.held = plan::position_set{{{0, 1}}};
    owner_end owner{std::move(terms)};
    auto socket = owner.connect();
    say(socket, frame_kind::part, wire::encode(whole_part()));
    const auto why = refusal(socket);
    CHECK(why.find("mismatch: ") == 0);
    CHECK(why.find("second") != std::string::npos);
    auto other = owner.connect();
    say(other, frame_kind::part, "no plan at all");
    CHECK(refusal(other).find("protocol: ") == 0);
}

TEST_CASE("sharded_pull: a slot is used again only when this very chunk of it was freed") {
    owner_end owner;
    auto socket = owner.agreed();
    owner.desk.begin_round(5, soon());
    CHECK(owner.desk.in_round(1));
    const auto first = owner.desk.take_slot(0, 2);
    const auto second = owner.desk.take_slot(0, 2);
    REQUIRE((first && second));
    CHECK(!owner.desk.take_slot(0, 2));
    owner.desk.publish(*first, 0);
    const auto got = take_published(socket);
    CHECK(got.round == 5);
    CHECK(got.slot == first->index);

    auto old = got;
    old.round = 4;  // a free of a round that is over: nothing happens
    say(socket, frame_kind::freed, pull::bytes_of(old));
    say(socket, frame_kind::freed, pull::bytes_of(got));
    while (owner.desk.holds(0, *first)) {
        owner.desk.await_change(owner.desk.changes(), soon(), {});
    }
    const auto third = owner.desk.take_slot(0, 2);
    REQUIRE(third);
    CHECK(third->index == first->index);
    CHECK(third->generation != first->generation);
    owner.desk.publish(*third, 1);
    CHECK(take_published(socket).generation == third->generation);

    SUBCASE("freed before it was published") {
        auto ahead = got;
        ahead.slot = static_cast<std::uint32_t>(second->index);
        ahead.generation = second->generation;
        say(socket, frame_kind::freed, pull::bytes_of(ahead));
        CHECK(refusal(socket).find("was not given") != std::string::npos);
    }
    SUBCASE("freed twice, which would be another chunk's") {
        say(socket, frame_kind::freed, pull::bytes_of(got));
        CHECK(refusal(socket).find("was not given") != std::string::npos);
    }
    SUBCASE("taken, with a chunk in hand") {
        say(socket, frame_kind::taken, pull::bytes_of(pull::round_body{5}));
        CHECK(refusal(socket).find("still holds a chunk") != std::string::npos);
    }
    while (owner.desk.in_round(1)) {
        owner.desk.await_change(owner.desk.changes(), soon(), {});
    }
    CHECK(!owner.desk.holds(0, *second));
    CHECK(!owner.desk.take_slot(0, 2));
}

TEST_CASE("sharded_pull: only a reader that the owner still counts on is told that it is whole") {
    owner_end owner;
    auto one = owner.agreed(1);
    auto two = owner.agreed(2);
    owner.desk.set_peers({1, 1});
    owner.desk.begin_round(1, soon());
    owner.desk.drop(1);  // the second peer, which is worker rank 2
    say(one, frame_kind::taken, pull::bytes_of(pull::round_body{1}));
    say(two, frame_kind::taken, pull::bytes_of(pull::round_body{1}));
    CHECK(pull::await_frame(one, frame_kind::confirmed, soon(), {}, {})
              .as<pull::round_body>()
              .round == 1);
    while (!owner.desk.all_taken()) {
        owner.desk.await_change(owner.desk.changes(), soon(), {});
    }
    CHECK_THROWS_AS(static_cast<void>(pull::await_frame(two, frame_kind::confirmed,
                                                        deadline::after(200ms), {}, {})),
                    timeout_error);
    owner.desk.restore(1);
    owner.desk.begin_round(2, soon());
    CHECK(owner.desk.in_round(2));
    // What rank 0 says of a round that has not begun here counts when it does.
    owner.desk.drop_in_round({.round = 3, .peer = 0});
    CHECK(owner.desk.in_round(1));
    owner.desk.begin_round(3, soon());
    CHECK(!owner.desk.in_round(1));
    CHECK(owner.desk.in_round(2));
    owner.desk.drop_in_round({.round = 3, .peer = pull::drop_body::everybody});
    CHECK(!owner.desk.in_round(2));
}

TEST_CASE("sharded_pull: a reader that says nothing is let go of after half of the time") {
    owner_end owner;
    auto silent = owner.agreed();
    const auto until = deadline::after(1s);
    owner.desk.begin_round(1, until);
    const auto slot = owner.desk.take_slot(0, 2);
    REQUIRE(slot);
    owner.desk.publish(*slot, 0);
    const auto begin = deadline::clock::now();
    while (owner.desk.in_round(1)) {
        owner.desk.await_change(owner.desk.changes(), until, {});
    }
    CHECK(deadline::clock::now() - begin > 400ms);
    static_cast<void>(take_published(silent));
    CHECK(refusal(silent).find("half of the time that there was") != std::string::npos);
}

namespace {

/// An owner that answers a part, or publishes, as it likes.
struct lying_owner {
    explicit lying_owner(pull::owner_terms terms) : desk{std::move(terms)} {}
    pull::owner_desk desk;
    std::uint64_t added = 0;  ///< to the hash of a part
    bool publishes = false;   ///< as soon as a part came
    pull::chunk_body published{};

    [[nodiscard]] std::uint64_t nonce() const { return desk.nonce(); }
    void on_hello(const pull::owner_desk::connection& from, const pull::hello_body& hello) {
        desk.on_hello(from, hello);
    }
    void on_frame(const pull::owner_desk::connection& from, const pull::frame& got) {
        if (got.kind == frame_kind::part) {
            const auto part = wire::decode_owner_part(got.body, model().size());
            const pull::hash_body hash{plan::hash_of(part) + added};
            from->send(frame_kind::accepted, pull::bytes_of(hash));
            if (publishes) {
                from->send(frame_kind::published, pull::bytes_of(published));
            }
        } else {
            desk.on_frame(from, got);
        }
    }
    void on_gone(const pull::owner_desk::connection& from) noexcept { desk.on_gone(from); }
};

/// A receiver of the whole model, and an owner that lies to it.
struct deceived {
    explicit deceived(pull::chunk_body published = {}, std::uint64_t added = 0)
        : liar{terms_of()}, arena{memory.allocate(8192)} {
        liar.added = added;
        liar.published = published;
        liar.publishes = published.round != 0;
        liar.desk.route_for(plan::ownership{model(), {plan::position_set::all(2)}}, {""}, 1);
        pull::transport_message message{.group_sizes = {1, 1}};
        auto& rank = message.ranks.emplace_back();
        rank.fabric_address = memory.address();
        rank.host = "127.0.0.1";
        rank.port = server.port();
        rank.nonce = liar.nonce();
        rank.held = plan::position_set::all(2);
        rank.arena = pull::exported_memory{arena.exported().handle, arena.exported().bytes};
        transport = pull::encode(message);
    }
    void open() {
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
                             deadline::after(2s), {});
        } catch (const error& caught) {
            return caught.what();
        }
        return {};
    }

    lying_owner liar;
    pull::control_server<lying_owner> server{liar, "127.0.0.1", soon()};
    shm::fabric::owner memory;
    shm::fabric::arena arena;
    std::string parameters = pull::encode({.fabric = "shared_memory", .chunk_bytes = 4096});
    std::string transport;
    std::vector<std::vector<std::byte>> destination{std::vector<std::byte>(4096),
                                                    std::vector<std::byte>(2048)};
    pull::basic_receiver<shm::fabric> receiver{receiver_context{}};
};

}  // namespace

namespace {

/// Takes its time with every frame, as a desk does whose lock is held.
struct slow_desk {
    std::mutex mutex{};
    std::shared_ptr<pull::control_connection> link{};
    std::atomic<int> gone = 0;

    [[nodiscard]] static std::uint64_t nonce() { return 77; }
    void on_hello(const std::shared_ptr<pull::control_connection>& from, const pull::hello_body&) {
        const std::lock_guard lock{mutex};
        link = from;
    }
    static void on_frame(const std::shared_ptr<pull::control_connection>&, const pull::frame&) {
        std::this_thread::sleep_for(100ms);
    }
    void on_gone(const std::shared_ptr<pull::control_connection>&) noexcept { ++gone; }
    [[nodiscard]] std::shared_ptr<pull::control_connection> take() {
        const std::lock_guard lock{mutex};
        return std::exchange(link, nullptr);
    }
};

std::size_t open_descriptors() {
    const std::filesystem::directory_iterator all{"/proc/self/fd"};
    return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

}  // namespace

TEST_CASE("sharded_pull: a worker that hangs up while a trainer rank speaks to it is let go of") {
    slow_desk desk;
    pull::control_server<slow_desk> server{desk, "127.0.0.1", soon()};
    const pull::rank_export named{.host = "127.0.0.1",
                                  .port = server.port(),
                                  .nonce = slow_desk::nonce(),
                                  .held = plan::position_set::all(1)};
    const auto before = open_descriptors();
    for (int i = 0; i < 5; ++i) {
        auto socket = pull::connect_control(named, 1, 2, soon(), {}, {});
        std::shared_ptr<pull::control_connection> link;
        while (link == nullptr) {
            link = desk.take();
        }
        const ::linger at_once{1, 0};
        ::setsockopt(socket.native_handle(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        pull::send_frame(socket, frame_kind::waits, pull::bytes_of(pull::round_body{1}), soon(), {},
                         {});
        std::this_thread::sleep_for(20ms);  // it is in on_frame
        socket.close();
        std::this_thread::sleep_for(20ms);
        link->send(frame_kind::published, std::string(40, 'x'));
        link->refuse({.kind = "data", .text = "the gather failed"});
    }
    for (const auto until = soon(); open_descriptors() > before && !until.expired();) {
        std::this_thread::sleep_for(10ms);
    }
    CHECK(open_descriptors() == before);
    CHECK(desk.gone >= 5);
    CHECK(desk.gone <= 10);
}

TEST_CASE("sharded_pull: a part that the owner understands otherwise stops the init") {
    deceived ends{{}, 1};
    try {
        ends.open();
        FAIL("it was opened");
    } catch (const mismatch_error& caught) {
        CHECK(std::string{caught.what()}.find("understands the plan as") != std::string::npos);
    }
}

TEST_CASE("sharded_pull: a receiver takes no chunk that the plan or the arena does not have") {
    const auto lie = [](pull::chunk_body what) {
        deceived ends{what};
        ends.open();
        return ends.receive();
    };
    const pull::chunk_body honest{.round = 3, .generation = 1, .section = 0, .chunk = 0, .slot = 1};
    auto body = honest;
    body.slot = 2;
    CHECK(lie(body).find("outside of its arena") != std::string::npos);
    body = honest;
    body.slot = 0xFFFF'FFFFU;
    CHECK(lie(body).find("outside of its arena") != std::string::npos);
    body = honest;
    body.chunk = 7;
    CHECK(lie(body).find("the plan does not have") != std::string::npos);
    body = honest;
    body.section = 1;
    CHECK(lie(body).find("the plan does not have") != std::string::npos);
    body = honest;
    body.round = 4;
    CHECK(lie(body).find("the plan does not have") != std::string::npos);
    body = honest;
    body.round = 2;  // of an earlier round: ignored, and nothing else comes
    const auto late = lie(body);
    CHECK(late.find("did not end before its deadline") != std::string::npos);
    CHECK(late.find("trainer rank 0") != std::string::npos);
}

TEST_CASE("sharded_pull: a worker says at init what its loader lacks, and which fabric it speaks") {
    deceived ends;
    ends.parameters = pull::encode({.fabric = "another", .chunk_bytes = 4096});
    try {
        ends.open();
        FAIL("it was opened");
    } catch (const unsupported_error& caught) {
        CHECK(std::string{caught.what()}.find("'another'") != std::string::npos);
    }
    const manifest more{{{"first", dtype::f32, {1024}}, {"third", dtype::f32, {512}}}, "model"};
    ends.parameters = pull::encode({.fabric = "shared_memory", .chunk_bytes = 4096});
    try {
        ends.receiver.open({.wire_parameters = ends.parameters,
                            .transport = ends.transport,
                            .parameters = &model(),
                            .destinations = &more},
                           soon(), {});
        FAIL("it was opened");
    } catch (const coverage_error& caught) {
        CHECK(caught.context().tensor == "third");
    }
    ends.transport = "{\"group_sizes\":[2],\"ranks\":[]}";
    CHECK_THROWS_AS(ends.open(), protocol_error);
    ends.transport = "{\"group_sizes\":[1],\"ranks\":[]}";
    CHECK_THROWS_AS(ends.open(), protocol_error);
}

TEST_CASE("sharded_pull: a transport message survives its text, and a garbled one is refused") {
    pull::transport_message message{.group_sizes = {1, 1}};
    message.ranks.push_back({.machine = "m",
                             .fabric_address = "address",
                             .host = "h",
                             .port = 5,
                             .nonce = ~std::uint64_t{0},
                             .held = plan::position_set::all(2),
                             .memories = {{"handle", 100}},
                             .places = {{0, 0, 3}, {1, 0, 50}},
                             .arena = pull::exported_memory{"arena", 8192}});
    message.ranks.push_back({.host = "g", .port = 65535, .held = plan::position_set{{{1, 2}}}});
    const auto text = pull::encode(message);
    const auto back = pull::decode_transport_message(text, model());
    CHECK(back.group_sizes == message.group_sizes);
    CHECK(back.ranks == message.ranks);
    const auto broken = [&](std::string_view from, std::string_view to) {
        auto changed = text;
        const auto at = changed.find(from);
        REQUIRE(at != std::string::npos);
        changed.replace(at, from.size(), to);
        return changed;
    };
    for (const auto& changed :
         {broken("[0,0,3]", "[0,1,3]"), broken("[0,0,3]", "[2,0,3]"), broken("[0,0,3]", "[1,0,3]"),
          broken("[0,0,3]", "[0,0]"), broken("\"0-1\"", "\"0-2\""),
          broken("\"port\":5", "\"port\":0"), broken("\"nonce\"", "\"once\""),
          broken("[1,1]", "[1,2]"), broken("[1,1]", "[0,2]")}) {
        CAPTURE(changed);
        CHECK_THROWS_AS(static_cast<void>(pull::decode_transport_message(changed, model())),
                        protocol_error);
    }
}

namespace {

/// Shared memory as a fabric that reads packed chunks alone.
struct packed_fabric : shm::fabric {
    static constexpr std::string_view name = "packed";
    static constexpr fabric_capabilities capabilities{.host_memory = true};
};
static_assert(explain_pull_fabric<packed_fabric>());

/// Both halves without an engine: a trainer of one rank, a worker of one.
template <tensor_lifetime Lifetime, PullFabric Fabric>
struct two_halves {
    using backend = pull::basic_backend<Fabric>;

    two_halves() : source{sizes}, parameters{source.metadata(), "model"}, destinations{parameters} {
        for (const auto& parameter : parameters.parameters()) {
            memory.emplace_back(parameter.byte_size());
            if (Lifetime == tensor_lifetime::stable) {
                stable.push_back(source.weights()[stable.size()].tensor);
            }
        }
        const std::vector<peer_info> peers{{.name = "worker", .native = true}};
        const auto inits = sender.prepare({.parameters = parameters,
                                           .peers = peers,
                                           .world_size = 2,
                                           .lifetime = Lifetime,
                                           .stable_tensors = stable,
                                           .group_sizes = groups()});
        std::jthread opening{[&] { sender.open(soon(), {}); }};
        receiver.open({.wire_parameters = info.init_message(),
                       .transport = inits.front().native,
                       .parameters = &parameters,
                       .destinations = &destinations},
                      soon(), {});
    }
    /// Whole tensors of all ranks, in order.
    struct whole_source {
        explicit whole_source(const tests::moe_sizes& model)
            : metadata_{model.checkpoint()},
              arena_{shm::arena::bytes_for(manifest{model.checkpoint(), "m"})} {
            for (const auto& parameter : metadata_) {
                const auto at = arena_.allocate(parameter.dtype, parameter.shape);
                memory_.emplace_back(at.data(), at.byte_size());
                tensors_.push_back({parameter.name, at});
            }
        }
        static constexpr auto lifetime = Lifetime;
        const std::vector<param_meta>& metadata() const { return metadata_; }
        const std::vector<named_tensor>& weights() const { return tensors_; }
        void set(std::uint64_t version) {
            for (std::size_t i = 0; i < memory_.size(); ++i) {
                tests::fill(memory_[i], version, i);
            }
        }
        std::vector<param_meta> metadata_;
        shm::arena arena_;
        std::vector<std::span<std::byte>> memory_;
        std::vector<named_tensor> tensors_;
    };

    std::span<const std::size_t> groups() {
        sizes_of_groups = plan::group_runs(plan::layerwise_groups(parameters));
        return sizes_of_groups;
    }
    [[nodiscard]] mutable_tensor_view open(std::size_t i, deadline) {
        return {memory[i].data(), parameters[i].dtype, parameters[i].shape};
    }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline) {
        reported += offset == 0 && count == parameters[i].byte_size() ? 1U : 0U;
    }
    /// A round; returns the allocations of the worker's half and of the trainer's.
    std::pair<std::uint64_t, std::uint64_t> round(std::uint64_t number) {
        source.set(number);
        reported = 0;
        std::uint64_t sent = 0;
        std::jthread sending{[&] {
            round_of walk{source, parameters};
            auto stream = walk.stream();
            const weightwire_tests::allocation_watch watch;
            sender.stage(number, 0, stream, soon(), {});
            sender.send(number, 0, stream, soon(), {});
            sent = watch.count();
        }};
        if (Lifetime == tensor_lifetime::stable && Fabric::capabilities.in_place) {
            sending.join();  // as the engine does: what is read in place is staged before the call
        }
        update_target target{*this, parameters, 0, parameters.size()};
        const weightwire_tests::allocation_watch watch;
        receiver.receive({.round = number, .count = parameters.size(), .native = true}, target,
                         soon(), {});
        const auto received = watch.count();
        if (sending.joinable()) {
            sending.join();
        }
        CHECK(reported == parameters.size());
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            CHECK(std::ranges::equal(memory[i], source.memory_[i]));
        }
        return {received, sent};
    }

    tests::moe_sizes sizes;
    whole_source source;
    manifest parameters;
    manifest destinations;
    std::vector<std::size_t> sizes_of_groups;
    std::vector<std::vector<std::byte>> memory;
    std::vector<tensor_view> stable;
    pull::basic_trainer_init_info<Fabric> info{.chunk_bytes = 4096, .staging_bytes = 32768};
    typename backend_traits<backend>::sender sender{info};
    typename backend_traits<backend>::receiver receiver{receiver_context{}};
    std::size_t reported = 0;
};

template <tensor_lifetime Lifetime, PullFabric Fabric>
void steady_rounds(bool in_place) {
    two_halves<Lifetime, Fabric> both;
    std::uint64_t received = 0;
    std::uint64_t sent = 0;
    for (std::uint64_t number = 1; number <= 8; ++number) {
        const auto [r, s] = both.round(number);
        received += number > 3 ? r : 0;
        sent += number > 3 ? s : 0;
    }
    if (weightwire_tests::counts_allocations) {
        CHECK(received == 0);
        CHECK(sent == 0);
    }
    CHECK((both.receiver.description().find(" 0 staged") != std::string::npos) == in_place);
    CHECK((both.sender.description().find("staged in 32768 bytes") == std::string::npos) ==
          in_place);
}

}  // namespace

TEST_CASE("sharded_pull: steady rounds allocate nothing, and every parameter is reported once") {
    SUBCASE("in place") { steady_rounds<tensor_lifetime::stable, shm::fabric>(true); }
    SUBCASE("staged") { steady_rounds<tensor_lifetime::until_next, shm::fabric>(false); }
    SUBCASE("packed") { steady_rounds<tensor_lifetime::stable, packed_fabric>(false); }
}

TEST_CASE("sharded_pull: the runs that are staged are those of the plan's packed order") {
    using dimensions = std::vector<plan::read_dimension>;
    for (const auto& each :
         {dimensions{}, dimensions{{7, 1}}, dimensions{{7, 3}}, dimensions{{4, 20}, {5, 1}},
          dimensions{{3, 100}, {4, 20}, {5, 3}}, dimensions{{2, 300}, {3, 100}, {4, 20}, {6, 1}}}) {
        const plan::pull_read read{.source = 0, .offset = 11, .dimensions = each};
        for (const std::size_t item : {1U, 4U}) {
            std::vector<std::array<std::uint64_t, 3>> ours;
            std::vector<std::array<std::uint64_t, 3>> theirs;
            pull::for_each_staged_run(read, item, [&](auto from, auto packed, auto bytes) {
                ours.push_back({from, packed, bytes});
            });
            plan::for_each_read_run(read, item, [&](auto from, auto packed, auto bytes) {
                theirs.push_back({from, packed, bytes});
            });
            CHECK(ours == theirs);
        }
    }
}
