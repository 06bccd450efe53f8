// SPDX-License-Identifier: Apache-2.0
//
// Ranks are processes of their own, forked from one that never touches the device: so this suite
// has an executable of its own.

#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/nccl_api/communicator.hpp>

#include "nccl_pair.hpp"

using namespace std::chrono_literals;
using namespace weightwire;
using nccl_api::communicator;
using nccl_api::element;
using tests::channel;
using tests::forked;

namespace {

using unique_id = communicator::unique_id;
const std::stop_token never;

/// What a rank tells of one step; the kind is empty where nothing failed.
struct outcome {
    std::array<char, 16> kind{};
    std::array<char, 1000> text{};
    double seconds = 0;
    bool usable = false;
    bool lost = false;

    [[nodiscard]] bool is(std::string_view word) const { return word == kind.data(); }
    [[nodiscard]] bool says(std::string_view part) const {
        return std::string_view{text.data()}.find(part) != std::string_view::npos;
    }
};

template <class Step>
[[nodiscard]] outcome outcome_of(Step&& perform) {
    outcome result;
    const auto begun = std::chrono::steady_clock::now();
    const auto write = [&](std::string_view kind, const char* what) {
        std::strncpy(result.kind.data(), std::string{kind}.c_str(), result.kind.size() - 1);
        std::strncpy(result.text.data(), what, result.text.size() - 1);
    };
    try {
        perform();
    } catch (const error& failed) {
        write(failed.kind(), failed.what());
    } catch (const std::exception& failed) {
        write("foreign", failed.what());
    }
    result.seconds =
        std::chrono::duration<double>{std::chrono::steady_clock::now() - begun}.count();
    return result;
}

/// Devices there are; asked once, in a process of its own.
int devices() {
    static const int count = nccl_pair::usable_devices();
    return count;
}

bool can_run(const char* test) {
    if (devices() > 0) {
        return true;
    }
    std::printf("SKIP %s: this machine has no CUDA device or no libnccl\n", test);
    return false;
}

int setup(int rank) { return nccl_pair::choose_device(rank, devices() < 2); }

/// A rank that has joined a group of two, with memory.
struct joined_rank {
    int device;
    gpu::stream stream;
    gpu::event done;
    gpu::device_buffer memory;
    communicator group;

    joined_rank(int on, int rank, const unique_id& id, std::size_t bytes)
        : device{on},
          stream{on},
          done{on},
          memory{on, bytes},
          group{communicator::join(nccl_pair::open_library(), id, 2, rank, on, deadline::after(20s),
                                   never)} {
        group.warm_up(deadline::after(20s), never);
    }

    void fill(int value) {
        gpu::check(cudaMemset(memory.data(), value, memory.size()), "cudaMemset");
        gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    void broadcast(std::size_t offset, std::uint64_t count, element type, deadline until) {
        group.broadcast(memory.data() + offset, count, type, 0, stream, until, never);
    }
    void wait(deadline until) {
        done.record(stream);
        group.wait(done, until, never);
    }
    [[nodiscard]] std::vector<unsigned char> bytes() const {
        std::vector<unsigned char> all(memory.size());
        gpu::check(cudaMemcpy(all.data(), memory.data(), all.size(), cudaMemcpyDeviceToHost),
                   "cudaMemcpy");
        return all;
    }
};

struct typed {
    element type;
    std::uint64_t count;
};
constexpr std::array<typed, 13> kinds{{{element::int8, 1},
                                       {element::uint8, 1000003},
                                       {element::int32, 777},
                                       {element::uint32, 3},
                                       {element::int64, 4097},
                                       {element::uint64, 1},
                                       {element::float16, 100001},
                                       {element::float32, 65536},
                                       {element::float64, 12345},
                                       {element::bfloat16, 2000001},
                                       {element::float8_e4m3fn, 31},
                                       {element::float8_e5m2, 1 << 20},
                                       {element::uint8, 0}}};
/// Far more than a communicator keeps in flight.
constexpr std::size_t small_broadcasts = 10 * nccl_api::most_in_flight;
constexpr std::size_t small_bytes = 64;
constexpr std::size_t all_bytes = std::size_t{16} << 20U;

[[nodiscard]] unsigned char pattern(std::size_t at, unsigned int seed) {
    return static_cast<unsigned char>((at * 2654435761U + seed) >> 7U);
}

/// Broadcasts each type once, then many small pieces, without a wait between. Returns where the
/// next byte would be.
std::size_t broadcast_all(joined_rank& rank) {
    std::size_t at = 0;
    for (const typed& each : kinds) {
        rank.broadcast(at, each.count, each.type, deadline::after(10s));
        // The next multiple of 8: every type may begin there.
        at = (at + each.count * nccl_api::size_of(each.type) + 15) / 8 * 8;
    }
    for (std::size_t i = 0; i < small_broadcasts; ++i, at += small_bytes) {
        rank.broadcast(at, small_bytes, element::uint8, deadline::after(10s));
    }
    rank.wait(deadline::after(10s));
    return at;
}

/// A rank that sends `rounds` patterns, then holds still.
void send_patterns(channel& parent, unsigned int rounds) {
    const int device = setup(0);
    const auto id = communicator::make_unique_id(nccl_pair::open_library());
    parent.put(id);
    joined_rank rank{device, 0, id, all_bytes};
    for (unsigned int round = 0; round < rounds; ++round) {
        std::vector<unsigned char> bytes(all_bytes);
        for (std::size_t i = 0; i < bytes.size(); ++i) {
            bytes[i] = pattern(i, round);
        }
        gpu::check(
            cudaMemcpy(rank.memory.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
            "cudaMemcpy");
        broadcast_all(rank);
    }
    parent.put(true);
    static_cast<void>(parent.take<bool>());
}

/// A rank that gets them and tells how many bytes were wrong.
void take_patterns(channel& parent, unsigned int rounds) {
    const int device = setup(1);
    joined_rank rank{device, 1, parent.take<unique_id>(), all_bytes};
    std::size_t wrong = 0;
    for (unsigned int round = 0; round < rounds; ++round) {
        rank.fill(0xee);
        const std::size_t end = broadcast_all(rank);
        const auto bytes = rank.bytes();
        std::size_t at = 0;
        for (const typed& each : kinds) {
            const std::size_t size = each.count * nccl_api::size_of(each.type);
            for (std::size_t i = at; i < at + size; ++i) {
                wrong += bytes[i] != pattern(i, round) ? 1U : 0U;
            }
            at = (at + size + 15) / 8 * 8;
        }
        wrong += at + small_broadcasts * small_bytes != end ? 1U : 0U;
        for (std::size_t i = at; i < end; ++i) {
            wrong += bytes[i] != pattern(i, round) ? 1U : 0U;
        }
        for (std::size_t i = end; i < bytes.size(); ++i) {  // nothing beyond what was sent
            wrong += bytes[i] != 0xee ? 1U : 0U;
        }
    }
    parent.put(wrong);
}

/// The peer of a test that ends it: joins as rank 1, then broadcasts as often as it can.
void receive_until_killed(channel& parent, int broadcasts) {
    const int device = setup(1);
    joined_rank rank{device, 1, parent.take<unique_id>(), std::size_t{64} << 20U};
    parent.put(true);
    for (int i = 0; i < broadcasts; ++i) {
        rank.broadcast(0, rank.memory.size(), element::uint8, deadline::after(60s));
    }
    std::this_thread::sleep_for(1h);
}

/// The survivor: sends until it fails, tells how, then joins again with the helper's process.
void send_until_failure(channel& parent) {
    const int device = setup(0);
    const auto used = nccl_pair::open_library();
    const auto id = communicator::make_unique_id(used);
    parent.put(id);
    {
        joined_rank rank{device, 0, id, std::size_t{64} << 20U};
        parent.put(true);
        const deadline until = deadline::after(4s);
        auto seen = outcome_of([&] {
            for (int i = 0; i < 100'000; ++i) {
                rank.broadcast(0, rank.memory.size(), element::uint8, until);
                rank.wait(until);
            }
        });
        seen.usable = rank.group.usable();
        seen.lost = rank.group.lost();
        parent.put(seen);
        parent.put(outcome_of([&] { rank.broadcast(0, 1, element::uint8, until); }));
    }
    static_cast<void>(parent.take<bool>());
    parent.put(outcome_of([&] {
        const auto next = communicator::make_unique_id(used);
        parent.put(next);
        joined_rank rank{device, 0, next, all_bytes};
        broadcast_all(rank);
    }));
    static_cast<void>(parent.take<bool>());
}

/// A fresh peer for it.
void receive_once(channel& parent) {
    const int device = setup(1);
    joined_rank rank{device, 1, parent.take<unique_id>(), all_bytes};
    broadcast_all(rank);
    parent.put(true);
    static_cast<void>(parent.take<bool>());
}

/// Plays a survivor against a peer that `end` ends while both broadcast.
outcome survive(int peer_broadcasts, const std::function<void(forked&)>& end) {
    forked peer{[&](channel& parent) { receive_until_killed(parent, peer_broadcasts); }};
    forked survivor{[](channel& parent) { send_until_failure(parent); }};
    peer.to().put(survivor.to().take<unique_id>());
    static_cast<void>(peer.to().take<bool>());
    static_cast<void>(survivor.to().take<bool>());
    std::this_thread::sleep_for(100ms);
    end(peer);
    const auto seen = survivor.to().take<outcome>();
    const auto afterwards = survivor.to().take<outcome>();
    CHECK(afterwards.is("session"));
    peer.kill();
    forked fresh{[](channel& parent) { receive_once(parent); }};
    survivor.to().put(true);
    fresh.to().put(survivor.to().take<unique_id>());
    CHECK(fresh.to().take<bool>());
    const auto again = survivor.to().take<outcome>();
    CHECK_MESSAGE(again.is(""), std::string{again.text.data()});
    return seen;
}

/// A rank that joins and tells how that went; rank 0 makes the unique id.
struct joining {
    int rank = 0;
    int world_size = 2;
    std::chrono::seconds limit{4};
    bool makes_id = false;
    std::string library{};
};

void join_and_tell(channel& parent, const joining& what) {
    const int device = nccl_pair::choose_device(what.rank, true);
    if (!what.library.empty()) {
        ::setenv("WEIGHTWIRE_LIBNCCL", what.library.c_str(), 1);
    }
    const auto used = nccl_pair::open_library();
    unique_id id{};
    if (what.makes_id) {
        id = communicator::make_unique_id(used);
        parent.put(id);
    } else {
        parent.put(true);
        id = parent.take<unique_id>();
    }
    parent.put(outcome_of([&] {
        auto group = communicator::join(used, id, what.world_size, what.rank, device,
                                        deadline::after(what.limit), never);
        group.warm_up(deadline::after(what.limit), never);
    }));
    static_cast<void>(parent.take<bool>());
}

/// All of them at once; the first makes the id.
std::vector<outcome> join_together(const std::vector<joining>& ranks) {
    std::vector<std::unique_ptr<forked>> processes;
    for (const joining& each : ranks) {
        processes.push_back(
            std::make_unique<forked>([each](channel& parent) { join_and_tell(parent, each); }));
    }
    const auto id = processes[0]->to().take<unique_id>();
    for (std::size_t i = 1; i < processes.size(); ++i) {
        static_cast<void>(processes[i]->to().take<bool>());
        processes[i]->to().put(id);
    }
    std::vector<outcome> told;
    for (const auto& each : processes) {
        told.push_back(each->to().take<outcome>());
        MESSAGE(std::string{told.back().text.data()} << " after " << told.back().seconds << " s");
    }
    return told;
}

std::string beside(const std::string& name) {
    std::array<char, 4096> path{};
    const auto length = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
    const std::string own{path.data(), static_cast<std::size_t>(length > 0 ? length : 0)};
    return own.substr(0, own.rfind('/') + 1) + name;
}

}  // namespace

TEST_CASE("two ranks broadcast every type: the bytes are the sender's, and no others change") {
    if (!can_run("two ranks broadcast every type")) {
        return;
    }
    forked sender{[](channel& parent) { send_patterns(parent, 3); }};
    forked receiver{[](channel& parent) { take_patterns(parent, 3); }};
    receiver.to().put(sender.to().take<unique_id>());
    CHECK(receiver.to().take<std::size_t>() == 0);
    CHECK(sender.to().take<bool>());
}

TEST_CASE("a peer killed in a broadcast is named in time, and the same process joins again") {
    if (!can_run("a peer killed in a broadcast")) {
        return;
    }
    const auto seen = survive(100'000, [](forked& peer) { peer.kill(); });
    MESSAGE(std::string{seen.text.data()} << " after " << seen.seconds << " s");
    CHECK((seen.is("peer") || seen.is("timeout")));
    CHECK(seen.says("[peer rank 1]"));
    CHECK_FALSE(seen.usable);
    CHECK_FALSE(seen.lost);
}

TEST_CASE("a peer stopped in a broadcast ends at the deadline, and the same process joins again") {
    if (!can_run("a peer stopped in a broadcast")) {
        return;
    }
    const auto seen = survive(100'000, [](forked& peer) { peer.stop(); });
    MESSAGE(std::string{seen.text.data()} << " after " << seen.seconds << " s");
    CHECK(seen.is("timeout"));
    CHECK(seen.says("[peer rank 1]"));
    CHECK_FALSE(seen.usable);
    CHECK_FALSE(seen.lost);
}

TEST_CASE("a peer that never takes part ends at the deadline, and the same process joins again") {
    if (!can_run("a peer that never takes part")) {
        return;
    }
    const auto seen = survive(0, [](forked&) {});
    CHECK(seen.is("timeout"));
    CHECK(seen.says("[peer rank 1]"));
    CHECK_FALSE(seen.lost);
}

TEST_CASE("a world size with a rank too many ends at the deadline and says who may be missing") {
    if (!can_run("a world size with a rank too many")) {
        return;
    }
    const auto told = join_together(
        {{.rank = 0, .world_size = 3, .makes_id = true}, {.rank = 1, .world_size = 3}});
    CHECK(told[0].is("timeout"));
    CHECK(told[0].says("not all 3 ranks joined"));
    CHECK(told[0].says("one of ranks 1 to 2"));
    CHECK_FALSE(told[1].is(""));
}

TEST_CASE("world sizes that differ are an error on both") {
    if (!can_run("world sizes that differ")) {
        return;
    }
    const auto told = join_together(
        {{.rank = 0, .world_size = 2, .makes_id = true}, {.rank = 1, .world_size = 3}});
    CHECK_FALSE(told[0].is(""));
    CHECK(told[0].says("Bootstrap Root : mismatch"));
    CHECK_FALSE(told[1].is(""));
}

TEST_CASE("a rank that comes twice is an error that the process with the unique id explains") {
    if (!can_run("a rank that comes twice")) {
        return;
    }
    const auto told = join_together({{.rank = 0, .world_size = 3, .makes_id = true},
                                     {.rank = 1, .world_size = 3},
                                     {.rank = 1, .world_size = 3}});
    CHECK_FALSE(told[0].is(""));
    CHECK(told[0].says("already checked in"));
    CHECK_FALSE(told[1].is(""));
    CHECK_FALSE(told[2].is(""));
}

TEST_CASE("ranks with different versions of NCCL are told so, with the remedy") {
    const char* other = std::getenv("WEIGHTWIRE_OTHER_LIBNCCL");
    if (other == nullptr) {
        std::printf("SKIP different versions: WEIGHTWIRE_OTHER_LIBNCCL names no second libnccl\n");
        return;
    }
    if (!can_run("different versions")) {
        return;
    }
    const auto told = join_together({{.rank = 0, .makes_id = true}, {.rank = 1, .library = other}});
    for (const outcome& each : told) {
        CHECK(each.is("mismatch"));
        CHECK(each.says("by its path"));
    }
}

TEST_CASE("a stop ends a join that waits for others") {
    if (!can_run("a stop ends a join")) {
        return;
    }
    forked rank{[](channel& parent) {
        const int device = setup(0);
        const auto used = nccl_pair::open_library();
        std::stop_source stop;
        const std::jthread asks{[&] {
            std::this_thread::sleep_for(500ms);
            stop.request_stop();
        }};
        parent.put(outcome_of([&] {
            static_cast<void>(communicator::join(used, communicator::make_unique_id(used), 2, 0,
                                                 device, deadline::after(50s), stop.get_token()));
        }));
    }};
    CHECK(rank.to().take<outcome>().is("cancelled"));
}

TEST_CASE("a communicator whose abort does not return is lost and says so; the process goes on") {
    if (!can_run("an abort that does not return")) {
        return;
    }
    forked rank{[](channel& parent) {
        const int device = setup(0);
        const auto used = nccl_api::library::open(beside("libfake_nccl_a.so"));
        parent.put(outcome_of([&] {
            static_cast<void>(communicator::join(used, communicator::make_unique_id(used), 2, 0,
                                                 device, deadline::after(200ms), never));
        }));
        const gpu::device_buffer fresh{device, 1024};
        parent.put(fresh.data() != nullptr);
    }};
    const auto told = rank.to().take<outcome>();
    CHECK(told.is("timeout"));
    CHECK(told.says("is lost"));
    CHECK(rank.to().take<bool>());
}
