// SPDX-License-Identifier: Apache-2.0
//
// `cuda_ipc` through the engines and over HTTP, over shared memory instead of a GPU's: rounds in
// every commit mode, workers and trainers that die, stop or fail, and old versions that stay.

#include <doctest/doctest.h>

#include <sys/resource.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/rendezvous/store_group.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/wire/client_calls.hpp>

#include "../support/forked.hpp"
#include "../support/host_cuda_ipc.hpp"
#include "../support/small_model.hpp"
#include "../support/worker_process.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using tests::host_cuda_ipc_info;
using tests::worker_process;

constexpr int parameters = 6;
constexpr int elements = 30'000;

std::vector<std::string> on_device(std::vector<std::string> more = {}) {
    std::vector<std::string> out{"--parameters", std::to_string(parameters),
                                 "--elements",   std::to_string(elements),
                                 "--backend",    "cuda_ipc"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
}

/// The weights of a trainer in pretended device memory, all in one allocation.
class device_weights {
public:
    static constexpr auto lifetime = tensor_lifetime::stable;

    explicit device_weights(std::string refusal = {}, int on_device = 0)
        : metadata_{tests::small_model(parameters, elements)},
          memory_{std::size_t{parameters} * elements * 4, std::move(refusal)} {
        for (std::size_t i = 0; i < metadata_.size(); ++i) {
            tensors_.push_back({metadata_[i].name,
                                {memory_.data() + i * elements * 4,
                                 metadata_[i].dtype,
                                 metadata_[i].shape,
                                 {memory_kind::cuda, on_device}}});
        }
    }
    void set(std::uint64_t version) {
        for (std::size_t i = 0; i < metadata_.size(); ++i) {
            tests::fill(bytes(i), version, i);
        }
    }
    [[nodiscard]] const std::vector<param_meta>& metadata() const { return metadata_; }
    [[nodiscard]] const std::vector<named_tensor>& weights() const { return tensors_; }
    [[nodiscard]] std::string digest_of(std::size_t i) const {
        return digest_text(digest(bytes(i)));
    }
    [[nodiscard]] std::span<std::byte> bytes(std::size_t i) const {
        return {memory_.data() + i * elements * 4, std::size_t{elements} * 4};
    }

private:
    std::vector<param_meta> metadata_;
    tests::host_allocation memory_;
    std::vector<named_tensor> tensors_;
};

auto clients_of(const std::vector<std::string>& urls) {
    return fan_out_sync_client{http_sync_clients(urls)};
}

struct trainer {
    explicit trainer(std::vector<std::string> urls, host_cuda_ipc_info info = {},
                     std::string refusal = {})
        : weights{std::move(refusal)}, engine{trainer_init(info, clients_of(urls), weights)} {}
    explicit trainer(std::initializer_list<const worker_process*> workers,
                     host_cuda_ipc_info info = {}, std::string refusal = {})
        : trainer{urls_of(workers), info, std::move(refusal)} {}

    static std::vector<std::string> urls_of(std::initializer_list<const worker_process*> workers) {
        std::vector<std::string> urls;
        for (const auto* worker : workers) {
            urls.push_back(worker->url());
        }
        return urls;
    }
    sync_report round(std::uint64_t version, std::chrono::milliseconds budget = 20s) {
        weights.set(version);
        return engine.send_weights({.version = version,
                                    .deadline = deadline::after(budget),
                                    .tolerate_failed_peers = true});
    }
    void check_serves(const worker_process& worker, std::uint64_t version) {
        weights.set(version);
        CHECK(worker.version() == std::to_string(version));
        const auto held = worker.checksums();
        REQUIRE(held.size() % parameters == 0);
        for (const auto& [name, digest] : held.items()) {
            bool found = false;
            for (std::size_t i = 0; i < parameters; ++i) {
                found = found || (name.ends_with(weights.metadata()[i].name) &&
                                  digest == weights.digest_of(i));
            }
            CHECK_MESSAGE(found, name);
        }
    }

    device_weights weights;
    decltype(trainer_init(std::declval<host_cuda_ipc_info>(), clients_of({}),
                          std::declval<device_weights&>())) engine;
};

/// A client that calls back just before each update call is made.
class meddling_client : public client_calls<meddling_client> {
public:
    meddling_client(const std::string& url, std::function<void()> before)
        : inner_{url}, before_{std::move(before)} {}
    [[nodiscard]] std::size_t peer_count() const noexcept { return 1; }
    [[nodiscard]] std::string_view peer_name(std::size_t peer) const {
        return inner_.peer_name(peer);
    }
    [[nodiscard]] std::vector<peer_reply> request(std::string_view method, std::string_view target,
                                                  const control_message& message, deadline until,
                                                  std::stop_token stop = {}) {
        if (target.starts_with("/update_weights")) {
            before_();
        }
        return inner_.request(method, target, message, until, std::move(stop));
    }

private:
    http_sync_client<> inner_;
    std::function<void()> before_;
};

host_cuda_ipc_info packed_info() {
    host_cuda_ipc_info info;
    info.packed = true;
    info.packed_buffer_size_bytes = 250'000;
    return info;
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool under_sanitizer = true;
#elif defined(__has_feature)
constexpr bool under_sanitizer =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool under_sanitizer = false;
#endif

/// Kilobytes of memory that a process holds of its own.
std::size_t private_kilobytes(const std::string& process) {
    std::ifstream file{"/proc/" + process + "/smaps_rollup"};
    std::size_t sum = 0;
    for (std::string word; file >> word;) {
        if (word == "Private_Dirty:" || word == "Private_Clean:") {
            std::size_t kilobytes = 0;
            file >> kilobytes;
            sum += kilobytes;
        }
    }
    return sum;
}

}  // namespace

TEST_CASE("cuda_ipc: rounds arrive at every worker, in every commit mode, packed or not") {
    for (const char* mode : {"flip", "copy_in", "in_place"}) {
        for (const bool packed : {false, true}) {
            CAPTURE(std::string{mode});
            CAPTURE(packed);
            worker_process one{on_device({"--mode", mode})};
            worker_process two{on_device({"--mode", mode, "--ranks", "2"})};
            trainer t{{&one, &two}, packed ? packed_info() : host_cuda_ipc_info{}};
            for (std::uint64_t version = 1; version <= 5; ++version) {
                CHECK(t.round(version).all_committed());
                t.check_serves(one, version);
                t.check_serves(two, version);
            }
        }
    }
}

TEST_CASE("cuda_ipc: memory that cannot be exported arrives all the same") {
    worker_process worker{on_device()};
    trainer t{{&worker}, {}, "it is memory of a pool"};
    for (std::uint64_t version = 1; version <= 3; ++version) {
        CHECK(t.round(version).all_committed());
        t.check_serves(worker, version);
    }
}

TEST_CASE("cuda_ipc: a worker killed or failing in the copy costs only itself") {
    for (const char* act : {"die", "throw"}) {
        CAPTURE(std::string{act});
        worker_process good{on_device()};
        worker_process bad{on_device({"--at", "launch", "--do", act, "--in", "2"})};
        trainer t{&good, &bad};
        CHECK(t.round(1).all_committed());
        const auto report = t.round(2);
        CHECK(report.committed() == 1);
        CHECK(report.peers[1].error.context.peer == bad.url());
        t.check_serves(good, 2);
        if (std::string{act} == "die") {
            CHECK(bad.ends_within(5s));
            bad.restart();
        } else {
            t.check_serves(bad, 1);
        }
        CHECK(t.round(3).all_committed());
        t.check_serves(good, 3);
        t.check_serves(bad, 3);
    }
}

TEST_CASE("cuda_ipc: a worker stopped in the copy past the deadline never commits") {
    for (const bool packed : {false, true}) {
        CAPTURE(packed);
        worker_process good{on_device()};
        worker_process bad{on_device({"--at", "launch", "--do", "stop", "--in", "2"})};
        trainer t{{&good, &bad}, packed ? packed_info() : host_cuda_ipc_info{}};
        CHECK(t.round(1).all_committed());
        const auto begin = deadline::clock::now();
        const auto report = t.round(2, 5s);
        CHECK(deadline::clock::now() - begin < 8s);
        CHECK(report.committed() == 1);
        CHECK(report.peers[1].error.context.peer == bad.url());
        CHECK(bad.is_stopped());
        bad.signal(SIGCONT);
        std::this_thread::sleep_for(300ms);
        t.check_serves(bad, 1);
        t.check_serves(good, 2);
        CHECK(t.round(3).all_committed());
        t.check_serves(bad, 3);
    }
}

TEST_CASE("cuda_ipc: an in_place worker that fails in the copy is dirty until a full update") {
    worker_process worker{
        on_device({"--mode", "in_place", "--at", "launch", "--do", "throw", "--in", "2"})};
    trainer t{&worker};
    CHECK(t.round(1).all_committed());
    CHECK(worker.health() == 200);
    CHECK_THROWS_AS(t.round(2), error);
    CHECK(worker.health() == 503);
    CHECK(t.round(3).all_committed());
    CHECK(worker.health() == 200);
    t.check_serves(worker, 3);
}

TEST_CASE(
    "cuda_ipc: a trainer killed between its calls leaves the old version, and another takes over") {
    for (const char* mode : {"flip", "copy_in"}) {
        worker_process worker{on_device({"--mode", mode})};
        const auto url = worker.url();
        tests::forked dying{[url](tests::channel& parent) {
            trainer t{std::vector<std::string>{url}};
            t.round(1);
            tests::host_ipc_world::at_step = [](std::string_view step) {
                if (step == "launch") {
                    ::raise(SIGKILL);
                }
            };
            parent.put('1');
            // The gather of a packed round is launched once the session is open.
            trainer packed{std::vector<std::string>{url}, packed_info()};
            packed.round(2);
            parent.put('2');
        }};
        CHECK(dying.to().take<char>() == '1');
        CHECK_THROWS_AS(static_cast<void>(dying.to().take<char>()), std::runtime_error);
        trainer t{&worker};
        t.check_serves(worker, 1);
        CHECK(t.round(3).all_committed());
        t.check_serves(worker, 3);
    }
}

TEST_CASE("cuda_ipc: weights that change after they were digested are not committed") {
    worker_process worker{on_device()};
    host_cuda_ipc_info info;
    info.verify = true;
    device_weights weights;
    bool meddle = false;
    meddling_client client{worker.url(), [&] {
                               if (meddle) {
                                   weights.bytes(5)[777] ^= std::byte{1};
                               }
                           }};
    auto engine = trainer_init(info, client, weights);
    weights.set(1);
    CHECK(engine.send_weights({.version = 1}).all_committed());
    meddle = true;
    try {
        engine.send_weights({.version = 2});
        FAIL("it was committed");
    } catch (const error& failed) {
        CHECK(std::string{failed.what()}.find("model.layers.2.down.weight") != std::string::npos);
    }
    CHECK(worker.version() == "1");
    meddle = false;
    CHECK(engine.send_weights({.version = 3}).all_committed());
    CHECK(worker.version() == "3");
}

TEST_CASE("cuda_ipc: every trainer rank serves the worker rank on its own GPU, packed or not") {
    for (const bool packed : {false, true}) {
        CAPTURE(packed);
        const auto info_of = [packed](int rank) {
            auto info = packed ? packed_info() : host_cuda_ipc_info{};
            info.rank = rank;
            info.device = rank;
            return info;
        };
        constexpr std::uint64_t apart = 1000;  // what rank 1 holds is of version + 1000
        tests::forked second{[&](tests::channel& parent) {
            auto group = store_group::join(1, 2, "127.0.0.1", parent.take<std::uint16_t>(),
                                           deadline::after(20s));
            const auto url = parent.take_string();
            device_weights weights{{}, 1};
            auto engine = trainer_init(info_of(1), http_sync_client{url}, weights, {}, group);
            for (std::uint64_t version = 1; version <= 3; ++version) {
                weights.set(version + apart);
                parent.put(engine.send_weights().committed());
            }
            engine.close(deadline::after(5s));
        }};
        worker_process worker{{"--parameters", std::to_string(parameters), "--elements",
                               std::to_string(elements), "--ranks", "2", "--backend",
                               "cuda_ipc_spread"}};
        auto group = store_group::host(2);
        second.to().put(group.port());
        second.to().put_string(worker.url());
        device_weights weights;
        device_weights others;
        auto engine = trainer_init(info_of(0), http_sync_client{worker.url()}, weights, {}, group);
        for (std::uint64_t version = 1; version <= 3; ++version) {
            weights.set(version);
            CHECK(engine.send_weights().all_committed());
            CHECK(second.to().take<std::size_t>() == 1);
            others.set(version + apart);
            std::size_t of_first = 0;
            std::size_t of_second = 0;
            const auto held = worker.checksums();
            for (const auto& [name, digest] : held.items()) {
                for (std::size_t i = 0; i < parameters; ++i) {
                    const bool meant = name.ends_with(weights.metadata()[i].name);
                    of_first += meant && digest == weights.digest_of(i) ? 1U : 0U;
                    of_second += meant && digest == others.digest_of(i) ? 1U : 0U;
                }
            }
            CHECK(of_first == parameters);
            CHECK(of_second == parameters);
        }
        engine.close(deadline::after(5s));
        CHECK(second.to().rest().empty());
    }
}

TEST_CASE(
    "cuda_ipc: a trainer rank that lags past the deadline ends the group, and nothing is mixed") {
    constexpr std::uint64_t apart = 1000;
    const auto info_of = [](int rank) {
        host_cuda_ipc_info info;
        info.rank = rank;
        info.device = rank;
        return info;
    };
    tests::forked second{[&](tests::channel& parent) {
        auto group = store_group::join(1, 2, "127.0.0.1", parent.take<std::uint16_t>(),
                                       deadline::after(20s));
        const auto url = parent.take_string();
        device_weights weights{{}, 1};
        auto engine = trainer_init(info_of(1), http_sync_client{url}, weights, {}, group);
        std::size_t committed_late = 0;
        for (std::uint64_t version = 1; version <= 4; ++version) {
            if (version == 2) {
                std::this_thread::sleep_for(3500ms);
            }
            weights.set(version + apart);
            try {
                engine.send_weights({.deadline = deadline::after(1s)});
                committed_late += version == 1 ? 0U : 1U;
            } catch (const error&) {  // NOLINT(bugprone-empty-catch): counted by the other rank
            }
        }
        parent.put(committed_late);
    }};
    worker_process worker{{"--parameters", std::to_string(parameters), "--elements",
                           std::to_string(elements), "--ranks", "2", "--backend",
                           "cuda_ipc_spread"}};
    auto group = store_group::host(2);
    second.to().put(group.port());
    second.to().put_string(worker.url());
    device_weights weights;
    auto engine = trainer_init(info_of(0), http_sync_client{worker.url()}, weights, {}, group);
    std::size_t failed = 0;
    for (std::uint64_t version = 1; version <= 5; ++version) {
        weights.set(version);
        try {
            engine.send_weights({.deadline = deadline::after(1s)});
        } catch (const error& caught) {
            ++failed;
            CHECK((failed == 1 || std::string{caught.what()}.find("make it and the engine anew") !=
                                      std::string::npos));
        }
    }
    CHECK(failed == 4);
    CHECK(second.to().take<std::size_t>() == 0);
    CHECK(worker.version() == "1");
}

TEST_CASE("cuda_ipc: many rounds leave neither side with more memory") {
    if (under_sanitizer) {
        MESSAGE("skipped: a sanitizer keeps what was freed");
        return;
    }
    worker_process worker{on_device()};
    trainer t{&worker};
    const auto run = [&](int rounds) {
        for (int i = 0; i < rounds; ++i) {
            static std::uint64_t version = 0;
            CHECK(t.round(++version).all_committed());
        }
        return std::pair{private_kilobytes("self"),
                         private_kilobytes(std::to_string(worker.process()))};
    };
    static_cast<void>(run(50));
    const auto before = run(50);
    const auto after = run(300);
    CHECK(after.first <= before.first + 1024);
    CHECK(after.second <= before.second + 1024);
}

TEST_CASE("cuda_ipc: either side may go first") {
    auto worker = std::make_unique<worker_process>(on_device());
    {
        trainer t{std::vector<std::string>{worker->url()}};
        CHECK(t.round(1).all_committed());
        t.engine.close(deadline::after(5s));
    }
    {
        trainer t{std::vector<std::string>{worker->url()}};
        t.check_serves(*worker, 1);  // its memory was the worker's own
        CHECK(t.round(2).all_committed());
        worker.reset();
        t.engine.close(deadline::after(5s));
    }
    CHECK(tests::host_ipc_world::mapped == 0);
}

TEST_CASE("cuda_ipc: a worker of host memory and one of a device are told apart at init") {
    worker_process host{{"--parameters", std::to_string(parameters), "--elements",
                         std::to_string(elements), "--backend", "ipc"}};
    try {
        trainer t{&host};
        FAIL("it was opened");
    } catch (const error& failed) {
        CHECK(std::string{failed.what()}.find("reads host memory over ipc") != std::string::npos);
    }
}
