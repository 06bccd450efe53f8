// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/engine/worker_engine.hpp>
#include <weightwire/engine/worker_service.hpp>
#include <weightwire/plan/coverage.hpp>

#include "../support/forked.hpp"
#include "../support/host_nccl.hpp"
#include "../support/small_model.hpp"

// What a worker's ranks rely on between each other and towards their sinks.

namespace {

using namespace weightwire;
using namespace std::chrono_literals;
using tests::host_nccl;
using tests::host_nccl_info;
using tests::host_world;
using tests::small_weights;

constexpr std::int64_t budget_ms = 20'000;
deadline in_time() { return deadline::after(20s); }

host_nccl_info small_chunks(bool packed = true) {
    host_nccl_info info;
    info.packed = packed;
    info.packed_buffer_size_bytes = 9000;
    return info;
}

/// A sink whose tensors are in memory that views call a device's.
class device_sink {
public:
    device_sink(std::span<const param_meta> parameters, int on) : device_{on} {
        for (const auto& each : parameters) {
            memory_.emplace_back(each.byte_size());
            places_.push_back({.where = {memory_.back().data(),
                                         each.dtype,
                                         each.shape,
                                         {.kind = memory_kind::cuda, .index = on}}});
        }
    }
    [[nodiscard]] weightwire::device device() const {
        return {.kind = memory_kind::cuda, .index = device_};
    }
    std::span<const destination> begin(const session_info&, const manifest&, deadline) {
        return places_;
    }
    void group_complete(std::size_t) {}
    void prepare(deadline) {}
    void commit(weight_version version) noexcept { version_ = version; }
    void rollback() noexcept {}
    [[nodiscard]] weight_version version() const noexcept { return version_; }
    [[nodiscard]] bool dirty() const noexcept { return false; }
    [[nodiscard]] bool holds(const small_weights& weights) const {
        bool same = true;
        for (std::size_t i = 0; i < memory_.size(); ++i) {
            same = same && digest_text(digest(memory_[i])) == weights.digest_of(i);
        }
        return same;
    }

private:
    int device_;
    std::deque<std::vector<std::byte>> memory_;
    std::vector<destination> places_;
    weight_version version_ = 0;
};
static_assert(explain_weight_sink<device_sink>());

/// The trainer's half, driven call by call.
class trainer_by_hand {
    using traits = backend_traits<host_nccl>;

public:
    explicit trainer_by_hand(int ranks, host_nccl_info info = small_chunks())
        : info_{std::move(info)}, ranks_{ranks}, sender_{info_} {
        peers_.push_back({.name = "worker", .world_size = ranks, .native = true});
    }
    template <class Engine>
    void init(Engine& engine) {
        const auto init =
            sender_.prepare({.parameters = parameters_, .peers = peers_, .world_size = ranks_ + 1});
        std::stop_source stop;
        std::thread side{[&] {
            try {
                sender_.open(in_time(), stop.get_token());
            } catch (const error&) {  // the test looks at the worker
            }
        }};
        const auto wire_parameters = info_.init_message();
        try {
            hash_ = wire::plan_hash(traits::wire_name, ranks_ + 1, parameters_, wire_parameters);
            epoch_ = engine
                         .init({.backend = std::string{traits::wire_name},
                                .rank_offset = 1,
                                .world_size = ranks_ + 1,
                                .plan_hash = hash_,
                                .budget_ms = budget_ms,
                                .parameters = parameters_,
                                .wire_parameters = wire_parameters,
                                .transport = init.front().native},
                               {})
                         .epoch;
        } catch (...) {
            stop.request_stop();
            side.join();
            throw;
        }
        side.join();
    }
    template <class Engine>
    void start(Engine& engine, std::uint64_t version) {
        session_ = engine
                       .start({.epoch = epoch_,
                               .version = version,
                               .budget_ms = budget_ms,
                               .answer_ms = budget_ms},
                              {})
                       .session;
    }
    /// An update call; with `sends` false nothing comes.
    template <class Engine>
    void update(Engine& engine, bool sends = true, std::int64_t budget = budget_ms) {
        ++round_;
        std::thread side{[&] {
            round_of<small_weights> all{weights, parameters_};
            auto stream = all.stream();
            if (sends) {
                CHECK_NOTHROW(sender_.send(round_, 0, stream, in_time(), {}));
            }
        }};
        try {
            engine.update({.epoch = epoch_,
                           .session = session_,
                           .plan_hash = hash_,
                           .round = round_,
                           .budget_ms = budget,
                           .count = parameters_.size()},
                          {});
        } catch (...) {
            side.join();
            throw;
        }
        side.join();
    }
    template <class Engine>
    void round(Engine& engine, std::uint64_t version) {
        weights.set(version);
        start(engine, version);
        update(engine);
        engine.finish({.epoch = epoch_,
                       .session = session_,
                       .version = version,
                       .budget_ms = budget_ms,
                       .boot_id = detail::boot_id(),
                       .commit_before_ns = detail::monotonic_ns(in_time().when())},
                      {});
    }

    small_weights weights{6, 1000};

private:
    host_nccl_info info_;
    manifest parameters_{weights.metadata()};
    int ranks_;
    std::vector<peer_info> peers_;
    traits::sender sender_;
    std::uint64_t epoch_ = 0;
    std::uint64_t session_ = 0;
    std::uint64_t round_ = 0;
    std::uint64_t hash_ = 0;
};

/// What an event sink was told to have been chosen.
struct told_choices {
    std::vector<std::string>* texts;
    void on(const event& what) const noexcept {
        if (what.kind == event_kind::chosen) {
            texts->emplace_back(what.text);
        }
    }
};

/// Everything that a step is asked of, until the end of a test.
struct steps {
    explicit steps(std::function<void(std::string_view, std::uint64_t)> at) {
        host_world::at_step = std::move(at);
    }
    steps(const steps&) = delete;
    steps& operator=(const steps&) = delete;
    ~steps() { host_world::at_step = {}; }
};

/// Where all of several threads have to come.
class crossing {
public:
    /// Whether all came in time.
    bool meet(int wanted) {
        std::unique_lock lock{mutex_};
        ++arrived_;
        changed_.notify_all();
        return changed_.wait_for(lock, 20s, [&] { return arrived_ >= wanted; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int arrived_ = 0;
};

std::vector<device_sink*> pointers(std::deque<device_sink>& sinks) {
    std::vector<device_sink*> out;
    for (auto& sink : sinks) {
        out.push_back(&sink);
    }
    return out;
}

/// One receiver in a group of its own with a sender.
struct pair {
    explicit pair(const manifest& list, const host_nccl_info& chosen)
        : parameters{list}, info{chosen}, sender{info} {
        peers.push_back({.name = "worker", .world_size = 1, .native = true});
        const auto init =
            sender.prepare({.parameters = parameters, .peers = peers, .world_size = 2});
        const auto wire = info.init_message();
        std::thread side{[&] { CHECK_NOTHROW(sender.open(in_time(), {})); }};
        CHECK_NOTHROW(receiver.open(
            {.wire_parameters = wire, .transport = init.front().native, .parameters = &parameters},
            in_time(), {}));
        side.join();
    }
    template <class State>
    void receive(State& state) {
        update_target target{state, parameters, 0, parameters.size()};
        receiver.receive({.round = 1, .count = parameters.size(), .native = true}, target,
                         in_time(), {});
    }

    manifest parameters;
    host_nccl_info info;
    std::vector<peer_info> peers{};
    backend_traits<host_nccl>::sender sender;
    backend_traits<host_nccl>::receiver receiver{receiver_context{}};
};

}  // namespace

TEST_CASE("No rank takes part in a broadcast before every rank has the memory for it") {
    trainer_by_hand trainer{2};
    std::deque<device_sink> sinks;
    sinks.emplace_back(trainer.weights.metadata(), 0);
    sinks.emplace_back(trainer.weights.metadata(), 1);
    worker_engine engine{host_nccl{}, pointers(sinks)};
    trainer.init(engine);
    std::atomic<bool> began{false};
    std::atomic<int> made{0};
    std::atomic<int> made_late{0};
    {
        const steps watched{[&](std::string_view step, std::uint64_t number) {
            if (step == "part" && number > 0) {
                began = true;
            } else if (step == "make_scatter") {
                if (number == 1) {  // one rank is slow
                    std::this_thread::sleep_for(20ms);
                }
                ++made;
                made_late += began ? 1 : 0;
            }
        }};
        trainer.round(engine, 1);
    }
    CHECK(made > 0);
    CHECK(made_late == 0);
    CHECK(sinks[0].holds(trainer.weights));
    CHECK(sinks[1].holds(trainer.weights));
}

TEST_CASE("The ranks of a process are aborted side by side, whatever ends them") {
    constexpr int ranks = 3;
    const auto ends = [&](auto end) {
        trainer_by_hand trainer{ranks};
        std::deque<device_sink> sinks;
        for (int i = 0; i < ranks; ++i) {
            sinks.emplace_back(trainer.weights.metadata(), i);
        }
        auto engine =
            std::make_unique<worker_engine<host_nccl, device_sink>>(host_nccl{}, pointers(sinks));
        trainer.init(*engine);
        crossing all;
        std::atomic<int> met{0};
        const steps watched{[&](std::string_view step, std::uint64_t rank) {
            // An abort that returns only when those of the siblings have begun.
            if (step == "abort" && rank > 0 && all.meet(ranks)) {
                ++met;
            }
        }};
        end(trainer, engine);
        CHECK(met == ranks);
    };
    SUBCASE("the worker's shutdown") {
        ends([](auto&, auto& engine) { engine->shutdown({}); });
    }
    SUBCASE("the engine's end") {
        ends([](auto&, auto& engine) { engine.reset(); });
    }
    SUBCASE("an update that comes too late") {
        ends([](auto& trainer, auto& engine) {
            trainer.start(*engine, 1);
            CHECK_THROWS_AS(trainer.update(*engine, false, 300), error);
        });
    }
    SUBCASE("the next trainer") {
        ends([](auto&, auto& engine) {
            trainer_by_hand next{ranks};
            CHECK_NOTHROW(next.init(*engine));
        });
    }
}

TEST_CASE("A device on which a group was lost is used no more, and the worker says it is dirty") {
    tests::forked process{[](tests::channel& parent) {
        constexpr int device = 5;
        std::string found;
        const auto expect = [&](bool holds, const char* what) {
            found += holds ? "" : std::string{what} + "; ";
        };
        const auto failed = [](auto call) -> std::string {
            try {
                call();
                return {};
            } catch (const resource_error& thrown) {
                return thrown.what();
            } catch (const error& thrown) {
                return std::string{"another kind: "} + thrown.what();
            }
        };
        // Another worker of the process on the same device, with a trainer of its own.
        trainer_by_hand third{1};
        device_sink beside{third.weights.metadata(), device};
        worker_engine second{host_nccl{}, beside};
        third.init(second);
        third.round(second, 1);
        trainer_by_hand trainer{1};
        device_sink sink{trainer.weights.metadata(), device};
        worker_engine engine{host_nccl{}, sink};
        worker_service service{engine};
        trainer.init(engine);
        trainer.round(engine, 1);
        expect(sink.holds(trainer.weights), "the first round arrives");
        expect(service.handle({.method = "GET", .path = "/health"}).status == 200, "healthy");
        host_world::stuck_device = device;
        trainer.start(engine, 2);
        expect(!failed([&] { trainer.update(engine, false, 300); }).empty(), "the update fails");
        expect(engine.dirty(), "dirty");
        expect(service.handle({.method = "GET", .path = "/health"}).status == 503, "unhealthy");
        trainer_by_hand next{1};
        const auto refused = failed([&] { next.init(engine); });
        expect(refused.find("restart this process") != std::string::npos, refused.c_str());
        const auto zeroed = failed([&] { engine.reset_weights({}); });
        expect(!zeroed.empty(), "no reset");
        const auto also = failed([&] { third.start(second, 2); });
        expect(also.find("restart this process") != std::string::npos, also.c_str());
        expect(second.dirty(), "the second is dirty too");
        auto there = small_chunks();
        there.device = device;
        const auto sent = failed([&] { trainer_by_hand{1, there}.init(second); });
        expect(sent.find("restart this process") != std::string::npos, sent.c_str());
        trainer_by_hand fourth{1};
        device_sink elsewhere{fourth.weights.metadata(), device + 1};
        worker_engine other{host_nccl{}, elsewhere};
        fourth.init(other);
        fourth.round(other, 1);
        expect(elsewhere.holds(fourth.weights), "another device goes on");
        parent.put_text(found.empty() ? "as it should be" : found);
    }};
    CHECK(process.to().rest() == "as it should be");
}

TEST_CASE("A worker tells what each rank has joined, with which library, and what it costs") {
    trainer_by_hand trainer{2};
    std::deque<device_sink> sinks;
    sinks.emplace_back(trainer.weights.metadata(), 0);
    sinks.emplace_back(trainer.weights.metadata(), 1);
    std::vector<std::string> told;
    worker_engine engine{host_nccl{{.library = "/opt/nccl/libnccl.so.2"}}, pointers(sinks),
                         worker_options<told_choices>{.events = {&told}}};
    trainer.init(engine);
    REQUIRE(told.size() == 2);
    CHECK(told[0].find("rank 1 of 3") != std::string::npos);
    CHECK(told[1].find("rank 2 of 3") != std::string::npos);
    CHECK(told[1].find("tables 0 bytes") != std::string::npos);
    CHECK(told[1].find("asked for /opt/nccl/libnccl.so.2") != std::string::npos);
    trainer.round(engine, 1);
    REQUIRE(told.size() == 4);
    CHECK(told[2].find("tables 0 bytes") == std::string::npos);
    trainer.round(engine, 2);  // the same addresses: nothing is new
    CHECK(told.size() == 4);
}

namespace {

/// Destinations of which one exists at a time.
struct bounced_places {
    static constexpr bool bounced = true;
    const manifest* parameters;
    weightwire::device on{};
    coverage seen{*parameters};
    std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);
    std::vector<std::vector<std::byte>> kept = std::vector<std::vector<std::byte>>(64);
    std::size_t open_now = manifest::npos;

    mutable_tensor_view open(std::size_t i, deadline) {
        CHECK(open_now == manifest::npos);
        open_now = i;
        return {memory.data(), (*parameters)[i].dtype, (*parameters)[i].shape, on};
    }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline) {
        CHECK(open_now == i);
        open_now = manifest::npos;
        seen.wrote(i, offset, count);
        kept[i].assign(memory.begin(), memory.begin() + static_cast<std::ptrdiff_t>(count));
    }
};

/// Destinations that stay, of which the first is in columns on another GPU.
struct columns_elsewhere {
    const manifest* parameters;
    std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);

    mutable_tensor_view open(std::size_t i, deadline) {
        const auto& parameter = (*parameters)[i];
        mutable_tensor_view::strides_type strides{};
        strides[0] = 2;
        strides[1] = 1;
        const weightwire::device gpu{.kind = memory_kind::cuda, .index = i == 0 ? 1 : 0};
        return {memory.data(), parameter.dtype, parameter.shape, strides, gpu};
    }
    void wrote(std::size_t, std::uint64_t, std::uint64_t, deadline) {}
};

}  // namespace

TEST_CASE("Destinations around their writes are opened one by one, and only in host memory") {
    const small_weights weights{6, 1000};
    const manifest parameters{weights.metadata()};
    for (const bool packed : {true, false}) {
        CAPTURE(packed);
        {
            pair both{parameters, small_chunks(packed)};
            bounced_places places{&parameters};
            round_of<const small_weights> all{weights, parameters};
            auto stream = all.stream();
            std::thread worker{[&] { CHECK_NOTHROW(both.receive(places)); }};
            CHECK_NOTHROW(both.sender.send(1, 0, stream, in_time(), {}));
            worker.join();
            CHECK(places.seen.all_whole());
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                CHECK(digest_text(digest(places.kept[i])) == weights.digest_of(i));
            }
        }
        pair both{parameters, small_chunks(packed)};
        bounced_places places{&parameters, {.kind = memory_kind::cuda, .index = 0}};
        round_of<const small_weights> all{weights, parameters};
        auto stream = all.stream();
        std::thread trainer{[&] {
            try {
                both.sender.send(1, 0, stream, in_time(), {});
            } catch (const error&) {  // unless everything was under way when the worker left
            }
        }};
        CHECK_THROWS_WITH_AS(both.receive(places), doctest::Contains("host memory"),
                             unsupported_error);
        trainer.join();
    }
}

TEST_CASE("A destination that cannot be written is found before this rank takes part") {
    const manifest parameters{{{"columns", dtype::u8, {5000, 1}}, {"row", dtype::u8, {5, 1}}}};
    for (const bool packed : {true, false}) {
        CAPTURE(packed);
        pair both{parameters, small_chunks(packed)};
        columns_elsewhere places{&parameters};
        std::atomic<int> parts{0};
        const steps watched{
            [&](std::string_view step, std::uint64_t) { parts += step == "part" ? 1 : 0; }};
        CHECK_THROWS_WITH_AS(both.receive(places), doctest::Contains("[tensor columns]"),
                             unsupported_error);
        CHECK(parts == 0);
        CHECK_THROWS_AS(both.receive(places), session_error);
    }
}
