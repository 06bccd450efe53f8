// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include <weightwire/fabrics/shared_memory_arena.hpp>
#include <weightwire/fabrics/shared_memory_fabric.hpp>

#include "../support/forked.hpp"
#include "../support/small_model.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using fabric = shm::fabric;

deadline soon() { return deadline::after(10s); }

/// An owner with an arena of counted bytes, and a reader that has opened it.
struct pair_of_ends {
    explicit pair_of_ends(std::uint64_t bytes) : arena{owner.allocate(bytes)} {
        tests::fill({arena.data(), static_cast<std::size_t>(bytes)}, 1, 1);
        connection.push_back(reader.connect(owner.address(), soon(), {}));
        const auto exported = arena.exported();
        memory.push_back(
            reader.open(connection.front(), exported.handle, exported.bytes, soon(), {}));
    }
    fabric::owner owner;
    fabric::arena arena;
    fabric::reader reader;
    std::vector<fabric::connection> connection;
    std::vector<fabric::memory> memory;
};

std::string said(const std::function<void()>& does) {
    try {
        does();
    } catch (const error& caught) {
        return caught.what();
    }
    return {};
}

}  // namespace

TEST_CASE("shm::fabric: a read brings its runs, of any length, with a shift") {
    pair_of_ends ends{std::uint64_t{5} << 20U};
    std::vector<std::byte> to(std::size_t{6} << 20U);
    const std::array<fabric::run, 3> runs{
        fabric::run{.from = &ends.memory[0], .offset = 7, .to = to.data() + 1, .bytes = 3'000'000},
        {.from = &ends.memory[0],
         .offset = 100,
         .to = to.data() + 4'000'000,
         .bytes = 6,
         .count = 5000,
         .from_step = 60,
         .to_step = 10},
        {.from = &ends.memory[0],
         .offset = 3,
         .to = to.data() + 5'000'000,
         .bytes = 2000,
         .count = 100,
         .from_step = 4000,
         .to_step = 2000}};
    auto read = ends.reader.prepare(runs);
    for (const std::uint64_t shift : {0U, 4096U}) {
        std::ranges::fill(to, std::byte{0});
        ends.reader.start(read, shift);
        ends.reader.wait(read, soon(), {});
        std::vector<std::byte> expected(to.size());
        for (const auto& run : runs) {
            for (std::uint64_t i = 0; i < run.count; ++i) {
                std::memcpy(expected.data() + (run.to - to.data()) + i * run.to_step,
                            ends.arena.data() + shift + run.offset + i * run.from_step, run.bytes);
            }
        }
        CHECK(to == expected);
    }
    ends.reader.start(read, 0);
    CHECK(!ends.reader.done(read));  // more than a piece
    ends.reader.cancel(read);
    std::ranges::fill(to, std::byte{0});
    CHECK(ends.reader.done(read));
    CHECK(to == std::vector<std::byte>(to.size()));
    ends.reader.start(read, 0);
    CHECK_THROWS_AS(ends.reader.wait(read, deadline::after(0s), {}), timeout_error);
}

TEST_CASE("shm::fabric: what an owner's tensors lie in is found, once a file") {
    fabric::owner owner;
    shm::arena weights{1 << 20};
    const auto a = weights.allocate(dtype::f32, {100});
    const auto b = weights.allocate(dtype::f32, {100});
    const auto first = owner.export_memory(a.data(), 400);
    const auto second = owner.export_memory(b.data(), 400);
    REQUIRE(std::holds_alternative<fabric_export>(first));
    REQUIRE(std::holds_alternative<fabric_export>(second));
    CHECK(std::get<fabric_export>(first).handle == std::get<fabric_export>(second).handle);
    CHECK(std::get<fabric_export>(second).offset - std::get<fabric_export>(first).offset ==
          static_cast<std::uint64_t>(b.data() - a.data()));
    CHECK(std::get<fabric_export>(first).bytes == std::uint64_t{1} << 20U);
    std::vector<std::byte> plain(400);
    const auto refused = owner.export_memory(plain.data(), 400);
    REQUIRE(std::holds_alternative<fabric_refusal>(refused));
    CHECK(std::get<fabric_refusal>(refused).reason.find("sealed shared memory") !=
          std::string::npos);
}

TEST_CASE("shm::fabric: texts that lie are refused, and a dead owner is told") {
    pair_of_ends ends{4096};
    fabric::reader reader;
    for (const char* address : {"", "x", "boot 1", "boot 1 2 3", "boot -1 2", "boot 0 2",
                                "boot 99999999999999999999 1", "boot 1x 2"}) {
        CAPTURE(std::string{address});
        CHECK_THROWS_AS(static_cast<void>(reader.connect(address, soon(), {})), protocol_error);
    }
    CHECK_THROWS_AS(static_cast<void>(reader.connect("another-boot 1 2", soon(), {})),
                    unsupported_error);
    const auto exported = ends.arena.exported();
    CHECK(said([&] {
              static_cast<void>(reader.open(ends.connection[0], exported.handle, 4097, soon(), {}));
          }).find("fewer bytes") != std::string::npos);
    for (const char* handle : {"", "1 2 3", "1 2 3 4 5 6", "a b c d e"}) {
        CAPTURE(std::string{handle});
        CHECK_THROWS_AS(static_cast<void>(reader.open(ends.connection[0], handle, 1, soon(), {})),
                        protocol_error);
    }
    tests::forked other{[](tests::channel& parent) {
        fabric::owner owner;
        const auto arena = owner.allocate(4096);
        parent.put_string(owner.address());
        parent.put_string(arena.exported().handle);
        static_cast<void>(parent.take<char>());
    }};
    const auto address = other.to().take_string();
    const auto handle = other.to().take_string();
    auto connection = reader.connect(address, soon(), {});
    CHECK(said([&] {
              static_cast<void>(reader.open(ends.connection[0], handle, 1, soon(), {}));
          }).find("another process") != std::string::npos);
    const auto memory = reader.open(connection, handle, 4096, soon(), {});
    other.kill();
    CHECK(memory.data()[17] == std::byte{0});  // a mapping outlives its owner
    CHECK(!connection.alive());
    CHECK_THROWS_AS(static_cast<void>(reader.connect(address, soon(), {})), peer_error);
}
