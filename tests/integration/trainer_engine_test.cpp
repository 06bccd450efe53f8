// SPDX-License-Identifier: Apache-2.0
//
// The trainer's engine against a real worker engine in the same process: no sockets, the loopback
// transport.

#include <doctest/doctest.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <ranges>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/testing/conformance/transport.hpp>
#include <weightwire/testing/fault_transport.hpp>
#include <weightwire/testing/gate.hpp>
#include <weightwire/testing/loopback_transport.hpp>
#include <weightwire/weightwire.hpp>

#include "../support/small_model.hpp"
#include "../support/staged_transport.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using testing::loopback;
using testing::loopback_init_info;
using tests::small_weights;

/// A source that throws in the middle of a round when it is told to.
struct failing {
    small_weights& inner;
    bool fail = false;
    const auto& metadata() const { return inner.metadata(); }
    auto weights() {
        return inner.weights() | std::views::transform([this](const named_tensor& each) {
                   if (fail) {
                       throw std::out_of_range{"no such shard"};
                   }
                   return each;
               });
    }
};

/// A worker in this process and a client that speaks to it.
template <class Tag = loopback>
struct local_worker {
    explicit local_worker(int parameters = 4, int elements = 100,
                          parameter_table_options options = {}, Tag tag = {})
        : table{tests::small_model(parameters, elements), std::move(options)}, engine{tag, table} {}
    parameter_table table;
    worker_engine<Tag, parameter_table> engine;
    worker_service<decltype(engine)> service{engine};
    local_sync_client<decltype(service)> client{service};

    void check_serves(small_weights& weights, weight_version version) {
        weights.set(version);
        const auto snapshot = table.acquire();
        CHECK(snapshot.version() == version);
        REQUIRE(snapshot.size() == weights.weights().size());
        for (std::size_t i = 0; i < snapshot.size(); ++i) {
            CHECK(digest_text(digest(snapshot.tensor(i).bytes())) == weights.digest_of(i));
        }
    }
};

/// Remembers what it was told.
struct recorder {
    struct entry {
        event_kind kind;
        phase where;
        std::string peer;
        std::string text;
    };
    std::vector<entry> entries;
    std::mutex mutex;
    void on(const event& what) noexcept {
        const std::lock_guard lock{mutex};
        entries.push_back({what.kind, what.phase, std::string{what.peer}, std::string{what.text}});
    }
    std::size_t count(event_kind kind, phase where) {
        const std::lock_guard lock{mutex};
        return static_cast<std::size_t>(
            std::count_if(entries.begin(), entries.end(),
                          [&](const entry& e) { return e.kind == kind && e.where == where; }));
    }
};

/// A source whose tensors or metadata differ from what they should be, on request.
struct twisted_source {
    small_weights& inner;
    std::vector<named_tensor> yielded;
    const auto& metadata() const { return inner.metadata(); }
    const auto& weights() const { return yielded; }
};

/// A receiver whose end of a wait takes its time, as the abort of a broadcast does.
class slow_receiver {
public:
    explicit slow_receiver(const receiver_context& context) : inner_{context} {}
    void open(const transport_open& init, deadline until, std::stop_token stop) {
        inner_.open(init, until, std::move(stop));
    }
    void receive(const update_message& message, update_target& target, deadline until,
                 std::stop_token stop) {
        try {
            inner_.receive(message, target, until, std::move(stop));
        } catch (...) {
            std::this_thread::sleep_for(400ms);
            throw;
        }
    }
    void release() noexcept { inner_.release(); }

private:
    testing::loopback_receiver inner_;
};

struct slow_loopback {};
struct slow_loopback_info : loopback_init_info {
    using backend = slow_loopback;
};
/// The same, and what it takes to prepare.
struct late_loopback {};
struct late_loopback_info : loopback_init_info {
    using backend = late_loopback;
};
class late_sender : public testing::loopback_sender {
public:
    using loopback_sender::loopback_sender;
    [[nodiscard]] std::vector<transport_init> prepare(const sender_context& context) {
        std::this_thread::sleep_for(300ms);
        return loopback_sender::prepare(context);
    }
};

}  // namespace

template <>
struct weightwire::backend_traits<slow_loopback> : weightwire::backend_traits<loopback> {
    static constexpr transport_capabilities capabilities{
        .host_memory = true, .drops_peers = true, .speaks_vllm = true, .let_go = 1s};
    using init_info = slow_loopback_info;
    using receiver = slow_receiver;
};
template <>
struct weightwire::backend_traits<late_loopback> : weightwire::backend_traits<loopback> {
    using init_info = late_loopback_info;
    using sender = late_sender;
};
static_assert(explain_transport<slow_loopback>() && explain_transport<late_loopback>());

TEST_CASE(
    "a round makes the new version visible, and counts versions from what the worker reports") {
    local_worker<> worker;
    small_weights weights{4, 100};
    {
        auto engine = trainer_init(loopback_init_info{}, worker.client, weights);
        CHECK(engine.world_size() == 2);
        CHECK(engine.next_version() == 1);
        for (weight_version version = 1; version <= 3; ++version) {
            weights.set(version);
            const auto report = engine.send_weights();
            CHECK(report.version == version);
            CHECK(report.all_committed());
            CHECK(report.update.bytes == 1600);
            CHECK(report.peers.at(0).bytes == 1600);
            worker.check_serves(weights, version);
        }
        engine.close(deadline::after(1s));
    }
    auto later = trainer_init(loopback_init_info{}, worker.client, weights);
    CHECK(later.next_version() == 4);
}

TEST_CASE("several parts a round, several ranks behind a server, several servers") {
    parameter_table tables[3]{parameter_table{tests::small_model(7, 33)},
                              parameter_table{tests::small_model(7, 33)},
                              parameter_table{tests::small_model(7, 33)}};
    worker_engine two{loopback{}, std::vector<parameter_table*>{&tables[0], &tables[1]}};
    worker_engine one{loopback{}, tables[2]};
    worker_service service_two{two};
    worker_service service_one{one};
    local_sync_client first{service_two};
    local_sync_client second{service_one};
    small_weights weights{7, 33};
    auto engine_of_first = trainer_init(loopback_init_info{.parts = 3}, first, weights);
    CHECK(engine_of_first.world_size() == 3);
    auto engine_of_second = trainer_init(loopback_init_info{.parts = 7}, second, weights);
    weights.set(1);
    CHECK(engine_of_first.send_weights().all_committed());
    CHECK(engine_of_second.send_weights().all_committed());
    for (auto& table : tables) {
        const auto snapshot = table.acquire();
        CHECK(snapshot.version() == 1);
        for (std::size_t i = 0; i < 7; ++i) {
            CHECK(digest_text(digest(snapshot.tensor(i).bytes())) == weights.digest_of(i));
        }
    }
}

TEST_CASE("a version may not go back, unless it is forced") {
    local_worker<> worker;
    small_weights weights{4, 100};
    auto engine = trainer_init(loopback_init_info{}, worker.client, weights);
    engine.send_weights({.version = 10});
    CHECK_THROWS_AS(engine.send_weights({.version = 9}), session_error);
    CHECK(worker.table.version() == 10);
    CHECK(engine.send_weights({.version = 5, .force = true}).all_committed());
    CHECK(worker.table.version() == 5);
    CHECK(engine.next_version() > 10);
}

TEST_CASE(
    "a source that differs from its metadata is named before anything is committed, and the next "
    "round works") {
    local_worker<> worker;
    small_weights weights{4, 100};
    twisted_source source{weights, weights.weights()};
    auto engine = trainer_init(loopback_init_info{}, worker.client, source);
    weights.set(1);
    CHECK(engine.send_weights().all_committed());
    weights.set(2);
    SUBCASE("two tensors swapped") { std::swap(source.yielded[1], source.yielded[2]); }
    SUBCASE("one too few") { source.yielded.pop_back(); }
    SUBCASE("one too many") { source.yielded.push_back(source.yielded.back()); }
    SUBCASE("another shape") {
        source.yielded[1].tensor = {weights.weights()[1].tensor.data(), dtype::f32, {10, 10}};
    }
    CHECK_THROWS_AS(engine.send_weights(), data_error);
    worker.check_serves(weights, 1);
    source.yielded = weights.weights();
    weights.set(3);
    CHECK(engine.send_weights({.version = 3}).all_committed());
    worker.check_serves(weights, 3);
}

TEST_CASE("what a source throws comes out of send_weights as it was") {
    local_worker<> worker;
    small_weights weights{4, 100};
    failing source{weights};
    auto engine = trainer_init(loopback_init_info{}, worker.client, source);
    source.fail = true;
    CHECK_THROWS_AS(engine.send_weights(), std::out_of_range);
    CHECK(worker.table.version() == 0);
    source.fail = false;
    CHECK(engine.send_weights().all_committed());
}

TEST_CASE("a data move that hangs ends at the deadline, and the old version stays") {
    for (const bool in_sender : {true, false}) {
        CAPTURE(in_sender);
        local_worker<> worker;
        small_weights weights{4, 100};
        testing::gate gate;
        auto engine =
            trainer_init(loopback_init_info{.block_before_send = in_sender ? gate.name() : "",
                                            .block_in_receive = in_sender ? "" : gate.name()},
                         worker.client, weights);
        const auto begin = deadline::clock::now();
        CHECK_THROWS_AS(engine.send_weights({.deadline = deadline::after(500ms)}), timeout_error);
        CHECK(deadline::clock::now() - begin < 5s);
        CHECK(worker.table.version() == 0);
        gate.release();
        CHECK(engine.send_weights().all_committed());
        weights.set(0);
    }
}

TEST_CASE("a worker whose transport takes time to let go still says why, before the deadline") {
    parameter_table table{tests::small_model(4, 100)};
    worker_engine engine_of_worker{slow_loopback{}, table};
    worker_service service{engine_of_worker};
    local_sync_client client{service};
    small_weights weights{4, 100};
    testing::gate gate;
    slow_loopback_info info;
    info.block_in_receive = gate.name();
    auto engine = trainer_init(info, client, weights);
    try {
        (void)engine.send_weights({.deadline = deadline::after(6s)});
        FAIL("a worker was held");
    } catch (const timeout_error& caught) {
        CHECK(std::string{caught.what()}.find("being held at a test's gate") != std::string::npos);
    }
    CHECK(table.version() == 0);
    gate.release();
    CHECK(engine.send_weights().all_committed());
}

TEST_CASE("what preparing takes is not blamed on a peer") {
    parameter_table table{tests::small_model(4, 100)};
    worker_engine engine_of_worker{late_loopback{}, table};
    worker_service service{engine_of_worker};
    local_sync_client client{service};
    small_weights weights{4, 100};
    try {
        (void)trainer_init(late_loopback_info{}, client, weights, {.init_budget = 200ms});
        FAIL("there was no time left");
    } catch (const timeout_error& caught) {
        CHECK(std::string{caught.what()}.find("preparing the transfer") != std::string::npos);
        CHECK(caught.context().peer.empty());
    }
}

TEST_CASE("every rank's report says what rank 0's does of each peer") {
    /// Two ranks of which this is the second.
    struct second_rank {
        std::string of_first;
        int rank() const { return 1; }
        int size() const { return 2; }
        std::vector<std::string> all_gather(std::string_view bytes, deadline) {
            return {of_first, std::string{bytes}};
        }
        void barrier(deadline) {}
    };
    sync_report first{.version = 7, .round = 3};
    first.peers.push_back({.peer = "http://a",
                           .status = peer_status::failed,
                           .error = {.kind = "peer", .text = "gone"},
                           .resume_error = {.kind = "timeout", .text = "silent"},
                           .may_be_mixed = true});
    first.peers.push_back({.peer = "http://b", .status = peer_status::committed, .version = 7});
    second_rank group{detail::dump(detail::to_json(first))};
    const auto report = agree(group, sync_report{}, deadline::after(1s));
    REQUIRE(report.peers.size() == 2);
    CHECK(report.peers[0].may_be_mixed);
    CHECK(report.peers[0].error.text == "gone");
    CHECK(report.peers[0].resume_error.text == "silent");
    CHECK_FALSE(report.peers[1].may_be_mixed);
    CHECK(report.peers[1].version == 7);
}

TEST_CASE("a stop ends the round at once, and the old version stays") {
    local_worker<> worker;
    small_weights weights{4, 100};
    testing::gate gate;
    auto engine =
        trainer_init(loopback_init_info{.block_in_receive = gate.name()}, worker.client, weights);
    std::stop_source stop;
    std::thread stopper{[&] {
        std::this_thread::sleep_for(100ms);
        stop.request_stop();
    }};
    const auto begin = deadline::clock::now();
    CHECK_THROWS_AS(
        engine.send_weights({.deadline = deadline::after(30s), .stop = stop.get_token()}),
        cancelled_error);
    CHECK(deadline::clock::now() - begin < 10s);
    stopper.join();
    CHECK(worker.table.version() == 0);
    gate.release();
    CHECK(engine.send_weights().all_committed());
}

TEST_CASE("a snapshot that is held too long is named to the trainer") {
    local_worker<> worker;
    small_weights weights{4, 100};
    auto engine = trainer_init(loopback_init_info{}, worker.client, weights);
    engine.send_weights();
    const auto held = worker.table.acquire();
    engine.send_weights();
    try {
        engine.send_weights({.deadline = deadline::after(2s)});
        FAIL("the storage of a version that is read was reused");
    } catch (const timeout_error& caught) {
        CHECK(std::string{caught.what()}.find("version 1 is still held") != std::string::npos);
    }
    CHECK(held.version() == 1);
}

TEST_CASE("an update that the worker refuses stops the data move at once") {
    local_worker<> worker{4, 100};
    small_weights weights{4, 100};
    testing::gate gate;
    auto engine =
        trainer_init(loopback_init_info{.block_before_send = gate.name()}, worker.client, weights);
    // Another trainer takes the worker over while this one is about to send.
    std::thread other{[&] {
        std::this_thread::sleep_for(200ms);
        local_sync_client client{worker.service};
        small_weights theirs{4, 100};
        auto second = trainer_init(loopback_init_info{}, client, theirs);
        theirs.set(50);
        CHECK(second.send_weights({.version = 50}).all_committed());
    }};
    const auto begin = deadline::clock::now();
    CHECK_THROWS_AS(engine.send_weights({.deadline = deadline::after(30s)}), error);
    CHECK(deadline::clock::now() - begin < 20s);
    other.join();
    CHECK(worker.table.version() == 50);
}

TEST_CASE("trainer and worker must list the same parameters") {
    local_worker<> worker{4, 100};
    SUBCASE("another shape") {
        small_weights weights{4, 101};
        try {
            (void)trainer_init(loopback_init_info{}, worker.client, weights);
            FAIL("a parameter had another shape");
        } catch (const coverage_error& caught) {
            CHECK(caught.context().tensor == weights.metadata()[0].name);
            CHECK(caught.context().phase == phase::init);
        }
    }
    SUBCASE("one missing") {
        small_weights weights{3, 100};
        auto engine = trainer_init(loopback_init_info{}, worker.client, weights);
        try {
            engine.send_weights();
            FAIL("a parameter was missing");
        } catch (const coverage_error& caught) {
            CHECK(caught.context().tensor == "model.layers.1.down.weight");
        }
    }
    SUBCASE("one too many") {
        small_weights weights{5, 100};
        CHECK_THROWS_AS((void)trainer_init(loopback_init_info{}, worker.client, weights),
                        coverage_error);
    }
    CHECK(worker.table.version() == 0);
}

TEST_CASE(
    "events tell the choices, the phases and the commits; without a sink there is nothing to "
    "call") {
    local_worker<> worker;
    small_weights weights{4, 100};
    recorder events;
    auto engine =
        trainer_init(loopback_init_info{}, worker.client, weights, {}, single_rank{}, events);
    engine.send_weights();
    CHECK(events.count(event_kind::chosen, phase::init) >= 1);
    for (const auto where : {phase::start, phase::update, phase::finish}) {
        CHECK(events.count(event_kind::phase_begun, where) == 1);
        CHECK(events.count(event_kind::phase_ended, where) == 1);
    }
    CHECK(events.count(event_kind::committed, phase::finish) == 1);
    auto silent = trainer_init(loopback_init_info{}, worker.client, weights);
    CHECK(sizeof(silent) < sizeof(engine));
}

TEST_CASE("what cannot work is refused at init") {
    local_worker<> worker;
    small_weights weights{4, 100};
    CHECK_THROWS_AS((void)trainer_init(loopback_init_info{.rank = 1}, worker.client, weights),
                    usage_error);
    CHECK_THROWS_AS(
        (void)trainer_init(loopback_init_info{}, worker.client, weights, {.world_sizes = {2}}),
        mismatch_error);
    const small_weights nothing{0, 0};
    CHECK_THROWS_AS((void)trainer_init(loopback_init_info{}, worker.client, nothing), data_error);
}

namespace {

/// What a trainer of one rank and its worker note, and how the sender goes wrong.
template <class Info>
struct staged_pair {
    using tag = typename Info::backend;
    explicit staged_pair(std::size_t parts, bool ahead = false) {
        info.parts = parts;
        info.ahead = ahead;
        info.script = &script;
    }
    tests::journal log;
    tests::stage_script script{.log = &log};
    local_worker<tag> worker{4, 100, {}, tag{&log}};
    Info info;
};

/// Yields each tensor after `pause`.
struct slow_source {
    small_weights& inner;
    std::chrono::milliseconds pause;
    const auto& metadata() const { return inner.metadata(); }
    auto weights() const {
        return inner.weights() | std::views::transform([this](const named_tensor& each) {
                   std::this_thread::sleep_for(pause);
                   return each;
               });
    }
};

}  // namespace

TEST_CASE("what the engine's tests of staging run on is a transport") {
    for (const bool ahead : {false, true}) {
        const auto report = testing::check_transport<tests::staged>({.parts = 3, .ahead = ahead});
        CHECK_MESSAGE(report.passed(), report.text());
    }
    tests::dropping_staged_init_info info;
    info.parts = 2;
    for (const bool whole_first : {false, true}) {
        info.whole_first = whole_first;
        const auto report = testing::check_transport<tests::dropping_staged>(info);
        CHECK_MESSAGE(report.passed(), report.text());
    }
}

TEST_CASE("a part is staged before its call is made, and sent beside it") {
    for (const bool ahead : {false, true}) {
        CAPTURE(ahead);
        staged_pair<tests::staged_init_info> pair{2, ahead};
        small_weights weights{4, 100};
        auto engine = trainer_init(pair.info, pair.worker.client, weights);
        for (weight_version version = 1; version <= 2; ++version) {
            pair.log.clear();
            weights.set(version);
            CHECK(engine.send_weights().all_committed());
            pair.worker.check_serves(weights, version);
            CHECK(pair.log.place("0: staged 0") < pair.log.place("worker: receive 0"));
            CHECK(pair.log.place("0: staged 0") < pair.log.place("0: send 0"));
            CHECK(pair.log.place("worker: received 0") < pair.log.place("0: stage 1"));
            CHECK(pair.log.place("0: send 0") < pair.log.place("0: stage 1"));
            CHECK(pair.log.place("0: staged 1") < pair.log.place("worker: receive 1"));
            // Ahead: read beside the call before it, and not again.
            CHECK(pair.log.count("0: read 1") == 1);
            CHECK((pair.log.place("0: read 1") < pair.log.place("0: stage 1")) == ahead);
            CHECK(pair.log.count("0: export") == 0);
        }
        engine.close(deadline::after(1s));
        CHECK(pair.log.count("0: close") == 1);
    }
}

TEST_CASE_TEMPLATE("a stage that fails ends the round before the call, and the next round works",
                   Info, tests::staged_init_info, tests::dropping_staged_init_info) {
    staged_pair<Info> pair{2, true};
    small_weights weights{4, 100};
    auto engine = trainer_init(pair.info, pair.worker.client, weights);
    weights.set(1);
    CHECK(engine.send_weights().all_committed());
    for (const int part : {0, 1}) {
        CAPTURE(part);
        const auto served = pair.worker.table.version();
        pair.log.clear();
        pair.script.fails_in = part;
        weights.set(50);
        CHECK_THROWS_AS(engine.send_weights({.version = served + 1}), resource_error);
        pair.script.fails_in = -1;
        // The second part fails where it is read: beside the first one's call.
        CHECK(pair.log.count("worker: receive 0") <= static_cast<std::size_t>(part));
        CHECK(pair.log.count("worker: receive 1") == 0);
        CHECK(pair.worker.table.version() == served);
        CHECK(engine.last_report().peers.at(0).error.text.find("this rank stages nothing") == 0);
        weights.set(served + 1);
        CHECK(engine.send_weights({.version = served + 1}).all_committed());
        pair.worker.check_serves(weights, served + 1);
    }
}

TEST_CASE("what a source throws while a part is staged comes out as it was, and no call is made") {
    staged_pair<tests::staged_init_info> pair{2};
    small_weights weights{4, 100};
    failing source{weights};
    auto engine = trainer_init(pair.info, pair.worker.client, source);
    source.fail = true;
    CHECK_THROWS_AS(engine.send_weights(), std::out_of_range);
    CHECK(pair.log.count("worker: receive 0") == 0);
    source.fail = false;
    CHECK(engine.send_weights().all_committed());
}

TEST_CASE_TEMPLATE("a stage that hangs ends at the deadline or the stop, and blames no worker",
                   Info, tests::staged_init_info, tests::dropping_staged_init_info) {
    staged_pair<Info> pair{2};
    small_weights weights{4, 100};
    auto engine = trainer_init(pair.info, pair.worker.client, weights);
    testing::gate gate;
    pair.script.gate = gate.name();
    std::stop_source stop;
    bool stopped = false;
    std::jthread stopper;
    SUBCASE("deadline") {}
    SUBCASE("stop") {
        stopped = true;
        stopper = std::jthread{[&] {
            gate.wait_until_blocked(deadline::after(20s));
            stop.request_stop();
        }};
    }
    const auto begin = deadline::clock::now();
    try {
        (void)engine.send_weights(
            {.deadline = deadline::after(stopped ? 30s : 1s), .stop = stop.get_token()});
        FAIL("the sender was held");
    } catch (const error& caught) {
        CHECK(caught.kind() == (stopped ? "cancelled" : "timeout"));
        CHECK(caught.context().phase == phase::update);
        CHECK(caught.context().peer.empty());
    }
    CHECK(deadline::clock::now() - begin < 15s);
    CHECK(pair.log.count("worker: receive 0") == 0);
    CHECK(pair.worker.table.version() == 0);
    gate.release();
    CHECK(engine.send_weights().all_committed());
}

TEST_CASE(
    "what a source takes while a part is staged counts to the update, and is not blamed on a "
    "worker") {
    staged_pair<tests::staged_init_info> pair{1};
    small_weights weights{4, 100};
    slow_source source{weights, 20ms};
    auto engine = trainer_init(pair.info, pair.worker.client, source);
    CHECK(engine.send_weights().update.seconds >= 0.08);
    // The sender asks for the time before a tensor, and the last one takes what is left.
    source.pause = 300ms;
    pair.log.clear();
    try {
        (void)engine.send_weights({.deadline = deadline::after(1300ms)});
        FAIL("there was no time left");
    } catch (const timeout_error& caught) {
        CHECK(caught.context().operation == "stage");
        CHECK(caught.context().peer.empty());
    }
    CHECK(pair.log.count("worker: receive 0") == 0);
    CHECK(pair.worker.table.version() == 1);
}

TEST_CASE("a source that yields more than its metadata names is found after the last staged part") {
    staged_pair<tests::staged_init_info> pair{2};
    small_weights weights{4, 100};
    twisted_source source{weights, weights.weights()};
    auto engine = trainer_init(pair.info, pair.worker.client, source);
    source.yielded.push_back(source.yielded.back());
    CHECK_THROWS_AS(engine.send_weights(), data_error);
    CHECK(pair.worker.table.version() == 0);
    CHECK(pair.log.count("worker: received 1") == 1);
}

TEST_CASE("faults can be planned for a sender that stages") {
    using faulty = testing::fault<tests::staged>;
    static_assert(HasRankExports<backend_traits<faulty>::sender>);
    static_assert(!HasStage<backend_traits<testing::fault<loopback>>::sender>);
    local_worker<faulty> worker{4, 100, {.mode = commit_mode::flip}};
    small_weights weights{4, 100};
    auto engine =
        trainer_init(testing::with_faults(tests::staged_init_info{.parts = 2, .ahead = true},
                                          {{.kind = testing::fault_kind::flip_sent_byte,
                                            .tensor = weights.metadata()[3].name,
                                            .byte = 17,
                                            .round = 2}}),
                     worker.client, weights);
    for (weight_version version = 1; version <= 3; ++version) {
        weights.set(version);
        CHECK(engine.send_weights().all_committed());
        const auto served = worker.table.acquire();
        for (std::size_t i = 0; i < 4; ++i) {
            CAPTURE(i);
            const bool same = digest_text(digest(served.tensor(i).bytes())) == weights.digest_of(i);
            CHECK(same == (version != 2 || i != 3));
        }
    }
}
