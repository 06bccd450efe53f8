// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/ucx/fabric.hpp>
#include <weightwire/fabrics/ucx/pieces.hpp>

#include "../support/host_device_machinery.hpp"

namespace {

namespace ucx = weightwire::ucx;
using namespace std::chrono_literals;
using clock_type = std::chrono::steady_clock;
using fabric = tests::host_device_fabric;
using run = weightwire::remote_run<ucx::memory>;
using tests::host_allocation;
using tests::host_device_world;
using tests::host_ipc_world;
using weightwire::deadline;

deadline soon() { return deadline::after(30s); }

/// What a test changes is as before when it ends.
struct changed_world {
    ~changed_world() {
        host_device_world::ucx_knows = false;
        host_device_world::ucx_lies = false;
        host_ipc_world::stuck = false;
        host_ipc_world::at_step = {};
    }
};

void fill(std::byte* at, std::uint64_t bytes, std::uint64_t seed) {
    std::mt19937_64 random{seed};
    for (std::uint64_t i = 0; i < bytes; i += 8) {
        const auto word = random();
        std::memcpy(at + i, &word, std::min<std::uint64_t>(8, bytes - i));
    }
}

std::vector<std::byte> bytes_at(const std::byte* at, std::uint64_t bytes) {
    return {at, at + bytes};
}

/// Destinations of a packed chunk: long runs and short ones, lines at a step, odd gaps.
std::vector<run> packed_runs(std::mt19937_64& random, const ucx::memory& from, std::uint64_t bytes,
                             std::byte* to, std::uint64_t room) {
    const auto below = [&](std::uint64_t limit) { return random() % limit; };
    std::vector<run> runs;
    std::uint64_t offset = 0;
    std::uint64_t at = below(64);
    for (;;) {
        run next{.from = &from, .offset = offset, .to = to + at};
        next.bytes = 1 + (below(4) == 0 ? below(900'000) : below(3000));
        next.count = below(3) == 0 ? 1 + below(60) : 1;
        next.bytes = next.count > 1 ? std::min<std::uint64_t>(next.bytes, 40'000) : next.bytes;
        next.from_step = next.bytes;
        next.to_step = next.bytes + (below(2) == 0 ? 0 : below(100));
        const auto there = next.bytes * next.count;
        const auto here = next.to_step * next.count;
        if (there > bytes - offset || here > room - at) {
            return runs;
        }
        runs.push_back(next);
        offset += there;
        at += here + below(50);
        if (offset >= bytes || at >= room) {
            return runs;
        }
    }
}

void copy_plainly(const std::vector<run>& runs, const std::byte* from, std::byte* to,
                  const std::byte* base) {
    for (const auto& each : runs) {
        for (std::uint64_t line = 0; line < each.count; ++line) {
            std::memcpy(to + (each.to - base) + line * each.to_step,
                        from + each.offset + line * each.from_step, each.bytes);
        }
    }
}

/// A trainer rank and a worker rank with an arena open between them.
template <class Owner = fabric, class Reader = fabric>
struct pair_of {
    explicit pair_of(std::uint64_t bytes)
        : arena{owner.allocate(bytes)},
          connection{reader.connect(owner.address(), soon(), {})},
          memory{reader.open(connection, arena.exported().handle, arena.size(), soon(), {})} {
        owner.serve(true);
    }
    typename Owner::owner owner{0};
    typename Reader::reader reader{0};
    typename Owner::arena arena;
    typename Reader::connection connection;
    typename Reader::memory memory;
};

/// Reads random runs of `two` some times and looks at every byte of the destinations.
template <class Pair, class Fill>
void read_random_runs(Pair& two, std::uint64_t bytes, int times, Fill fill_arena) {
    std::mt19937_64 random{5};
    const host_allocation to{bytes + 3'000'000};
    for (int i = 0; i < times; ++i) {
        const auto runs = packed_runs(random, two.memory, bytes, to.data(), to.size());
        auto read = two.reader.prepare(runs);
        for (int again = 0; again < 2; ++again) {
            CAPTURE(i);
            const auto packed = fill_arena(random());
            std::memset(to.data(), 0, to.size());
            std::vector<std::byte> expected(to.size());
            copy_plainly(runs, packed.data(), expected.data(), to.data());
            two.reader.start(read, 0);
            if (again == 0) {
                two.reader.wait(read, soon(), {});
            } else {
                const auto until = soon();
                while (!two.reader.done(read) && !until.expired()) {
                }
            }
            CHECK(two.reader.done(read));
            CHECK(std::memcmp(to.data(), expected.data(), to.size()) == 0);
        }
    }
}

}  // namespace

TEST_CASE("ucx device memory: what is packed on one device comes to its places on another") {
    const changed_world restored;
    SUBCASE("through pinned memory on both sides") {}
    SUBCASE("to and from the device by UCX itself") { host_device_world::ucx_knows = true; }
    constexpr std::uint64_t bytes = 7'000'000;
    pair_of<> two{bytes};
    const bool near = host_device_world::ucx_knows;
    CHECK(two.owner.in_device() == near);
    CHECK(two.reader.direct() == near);
    CHECK(fabric::owner::arena_type{}.data() == nullptr);
    // Work takes differently long, so that what is used again too early shows.
    host_ipc_world::at_step = [&](std::string_view step) {
        if (step == "work") {
            static thread_local std::mt19937_64 random{3};
            std::this_thread::sleep_for(std::chrono::microseconds{random() % 400});
        }
    };
    const host_allocation source{2 * bytes};
    const auto scatters = host_device_world::scatters.load();
    read_random_runs(two, bytes, 6, [&](std::uint64_t seed) {
        fill(source.data(), source.size(), seed);
        // Lines at a step for the first half, one run for the second.
        two.owner.pack(two.arena.data(), source.data(), 500, bytes / 1000, 1000);
        two.owner.pack(two.arena.data() + bytes / 2, source.data() + 100, bytes - bytes / 2, 1,
                       bytes);
        two.owner.settle(soon(), {});
        std::vector<std::byte> packed(bytes);
        for (std::uint64_t i = 0; i < bytes / 1000; ++i) {
            std::memcpy(packed.data() + i * 500, source.data() + i * 1000, 500);
        }
        std::memcpy(packed.data() + bytes / 2, source.data() + 100, bytes - bytes / 2);
        return packed;
    });
    CHECK(host_device_world::scatters.load() > scatters);
    CHECK_FALSE(two.reader.lost());
}

TEST_CASE("ucx device memory: host memory on the other side is read and filled alike") {
    const changed_world restored;
    constexpr std::uint64_t bytes = 3'000'000;
    const auto written = [&](const std::byte* arena) {
        return [&, arena](std::uint64_t seed) {
            fill(const_cast<std::byte*>(arena), bytes, seed);
            return bytes_at(arena, bytes);
        };
    };
    SUBCASE("a trainer in host memory") {
        pair_of<ucx::fabric, fabric> two{bytes};
        read_random_runs(two, bytes, 2, written(two.arena.data()));
    }
    SUBCASE("a worker in host memory") {
        pair_of<fabric, ucx::fabric> two{bytes};
        read_random_runs(two, bytes, 2, written(two.arena.data()));
    }
}

TEST_CASE("ucx device memory: both sides say what was chosen, and why") {
    const changed_world restored;
    SUBCASE("UCX knows no device") {
        pair_of<> two{1000};
        CHECK(two.owner.remark() == "UCX has no CUDA here: chunks pass through pinned host memory");
        CHECK(two.reader.remark() ==
              "UCX has no CUDA here: chunks pass through pinned host memory");
        CHECK(fabric::owner{0}.remark() == two.owner.remark());
    }
    SUBCASE("UCX knows it") {
        host_device_world::ucx_knows = true;
        pair_of<> two{1000};
        CHECK(two.owner.remark().find("packed in device memory") != std::string::npos);
        CHECK(two.reader.remark().find("straight to device memory") != std::string::npos);
    }
    SUBCASE("UCX says that it knows it, and brings something else") {
        host_device_world::ucx_knows = true;
        host_device_world::ucx_lies = true;
        pair_of<> two{600'000};
        CHECK_FALSE(two.owner.in_device());
        CHECK_FALSE(two.reader.direct());
        for (const auto& said : {two.owner.remark(), two.reader.remark()}) {
            CAPTURE(said);
            CHECK(said.find("a trial transfer") != std::string::npos);
            CHECK(said.find("brought other bytes") != std::string::npos);
            CHECK(said.find("chunks pass through pinned host memory") != std::string::npos);
        }
        host_device_world::ucx_lies = false;
        read_random_runs(two, 600'000, 2, [&](std::uint64_t seed) {
            fill(two.arena.data(), 600'000, seed);
            return bytes_at(two.arena.data(), 600'000);
        });
    }
}

TEST_CASE("ucx device memory: transfers go on beside the device's copies, and nothing waits") {
    const changed_world restored;
    constexpr std::uint64_t bytes = 12 * ucx::piece_bytes;
    pair_of<> two{bytes};
    fill(two.arena.data(), bytes, 1);
    const host_allocation to{bytes};
    const std::vector<run> runs{{.from = &two.memory, .to = to.data(), .bytes = bytes}};
    auto read = two.reader.prepare(runs);
    const auto calls = host_device_world::calls.load();
    host_ipc_world::stuck = true;
    two.reader.start(read, 0);
    const auto until = deadline::after(10s);
    while (host_device_world::calls.load() < calls + 4 && !until.expired()) {
        const auto began = clock_type::now();
        CHECK_FALSE(two.reader.done(read));
        CHECK(clock_type::now() - began < 500ms);
    }
    // Four pieces have come while not one copy ended; no more, as their memory is bounded.
    for (int i = 0; i < 100; ++i) {
        CHECK_FALSE(two.reader.done(read));
        std::this_thread::sleep_for(1ms);
    }
    CHECK(host_device_world::calls.load() == calls + 4);
    CHECK(to.data()[0] == std::byte{0});
    CHECK_THROWS_AS(
        [&] {
            const std::jthread frees{[] {
                std::this_thread::sleep_for(400ms);
                host_ipc_world::stuck = false;
            }};
            two.reader.wait(read, deadline::after(100ms), {});
        }(),
        weightwire::timeout_error);
    // Copies that had begun ended before the wait did; the connection was not in the middle of a
    // transfer and is good for more.
    CHECK_FALSE(two.reader.lost());
    const auto then = bytes_at(to.data(), to.size());
    std::this_thread::sleep_for(50ms);
    CHECK(std::memcmp(then.data(), to.data(), to.size()) == 0);
    REQUIRE(two.connection.alive());
    two.reader.start(read, 0);
    two.reader.wait(read, soon(), {});
    CHECK(std::memcmp(two.arena.data(), to.data(), to.size()) == 0);
}

TEST_CASE("ucx device memory: a read that was given up writes nothing any more") {
    const changed_world restored;
    constexpr std::uint64_t bytes = 24 * ucx::piece_bytes;
    const host_allocation to{bytes};
    for (int i = 0; i < 6; ++i) {
        CAPTURE(i);
        pair_of<> two{bytes};
        std::memset(two.arena.data(), i + 1, bytes);
        const auto half = bytes / 2;
        const std::vector<run> runs{
            {.from = &two.memory, .to = to.data(), .bytes = half},
            {.from = &two.memory,
             .offset = half,
             .to = to.data() + half,
             .bytes = 1024,
             .count = half / 2048,
             .from_step = 1024,
             .to_step = 2048},
        };
        auto read = two.reader.prepare(runs);
        two.reader.start(read, 0);
        for (int look = 0; look < 40 * i; ++look) {
            static_cast<void>(two.reader.done(read));
        }
        if (i % 2 == 0) {
            two.reader.cancel(read);
        } else {
            read = {};
        }
        const auto then = bytes_at(to.data(), to.size());
        std::this_thread::sleep_for(20ms);
        CHECK(std::memcmp(then.data(), to.data(), to.size()) == 0);
        CHECK(two.reader.done(read));
    }
}

TEST_CASE(
    "ucx device memory: a copy that the device refuses ends the read, and no more is written") {
    const changed_world restored;
    constexpr std::uint64_t bytes = 8 * ucx::piece_bytes;
    pair_of<> two{bytes};
    fill(two.arena.data(), bytes, 4);
    const host_allocation to{2 * bytes};
    const std::vector<run> runs{{.from = &two.memory,
                                 .to = to.data(),
                                 .bytes = 1000,
                                 .count = bytes / 1000,
                                 .from_step = 1000,
                                 .to_step = 2000}};
    auto read = two.reader.prepare(runs);
    int left = 3;
    // Its first half is under way, its second is refused.
    host_ipc_world::at_step = [&](std::string_view step) {
        if (step == "work") {
            std::this_thread::sleep_for(20ms);
        } else if (step == "launch" && --left == 0) {
            throw weightwire::resource_error{"the launch was refused"};
        }
    };
    two.reader.start(read, 0);
    CHECK_THROWS_AS(two.reader.wait(read, soon(), {}), weightwire::resource_error);
    const auto then = bytes_at(to.data(), to.size());
    std::this_thread::sleep_for(100ms);
    CHECK(std::memcmp(then.data(), to.data(), to.size()) == 0);
    CHECK_FALSE(two.reader.lost());
}

TEST_CASE("ucx device memory: an owner waits for the source's stream, and no longer than it may") {
    const changed_world restored;
    fabric::owner owner{0};
    tests::host_device_machinery machine{0};
    auto users = machine.make_stream();
    std::atomic<bool> made{false};
    users.put([&] {
        std::this_thread::sleep_for(60ms);
        made = true;
    });
    owner.await_ready(users.native_handle(), soon(), {});
    CHECK(made);
    const auto arena = owner.allocate(100'000);
    const host_allocation source{100'000};
    host_ipc_world::stuck = true;
    users.put([] {});
    CHECK_THROWS_AS(owner.await_ready(users.native_handle(), deadline::after(50ms), {}),
                    weightwire::timeout_error);
    owner.pack(arena.data(), source.data(), 100'000, 1, 100'000);
    CHECK_THROWS_AS(owner.settle(deadline::after(50ms), {}), weightwire::timeout_error);
    std::stop_source stop;
    stop.request_stop();
    CHECK_THROWS_AS(owner.settle(soon(), stop.get_token()), weightwire::cancelled_error);
    host_ipc_world::stuck = false;
    owner.settle(soon(), {});
    CHECK(std::memcmp(arena.data(), source.data(), 100'000) == 0);
}

TEST_CASE("ucx device memory: an owner exports no memory of a device, and no empty arena") {
    fabric::owner owner{0};
    const host_allocation near{1000};
    const auto refused = owner.export_memory(near.data() + 10, 100);
    REQUIRE(std::holds_alternative<weightwire::fabric_refusal>(refused));
    CHECK(std::get<weightwire::fabric_refusal>(refused).reason.find("lies on a device") !=
          std::string::npos);
    const std::vector<std::byte> host(1000);
    CHECK(std::holds_alternative<weightwire::fabric_export>(
        owner.export_memory(host.data(), host.size())));
    CHECK_THROWS_AS(static_cast<void>(owner.allocate(0)), weightwire::usage_error);
    CHECK_THROWS_AS(fabric::owner{9}, weightwire::unsupported_error);
}
