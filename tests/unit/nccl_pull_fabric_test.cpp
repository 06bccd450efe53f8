// SPDX-License-Identifier: Apache-2.0
//
// The NCCL pull fabric over its stand-in of sockets and threads: what moves, in which order, and
// what a peer that dies, hangs or lies costs.

#include <doctest/doctest.h>

#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/detail/socket.hpp>
#include <weightwire/fabrics/nccl/interfaces.hpp>
#include <weightwire/fabrics/nccl/pair_wire.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>

#include "../support/allocations.hpp"
#include "../support/forked.hpp"
#include "../support/host_pairs.hpp"

namespace {

namespace nccl = weightwire::nccl;
using namespace std::chrono_literals;
using weightwire::deadline;
using fabric = tests::host_pull_fabric;
using world = tests::host_pair_world;
using run = weightwire::remote_run<fabric::memory>;
using bytes_of = std::vector<std::byte>;

deadline soon() { return deadline::after(20s); }

bytes_of random_bytes(std::size_t count, std::uint64_t seed) {
    std::mt19937_64 random{seed};
    bytes_of made(count);
    for (std::size_t i = 0; i < count; i += 8) {
        const auto word = random();
        std::memcpy(made.data() + i, &word, std::min<std::size_t>(8, count - i));
    }
    return made;
}

/// Sets the world back at the end of a test.
struct quiet_world {
    quiet_world() { reset(); }
    ~quiet_world() { reset(); }
    static void reset() {
        world::stuck = false;
        world::silent = false;
        world::refuses = false;
        world::early_sends = 0;
        world::aborts = 0;
        world::pairs = 0;
        world::most_pairs = 16;
        world::most_under_way = 0;
        world::at_step = {};
    }
};

/// An owner with an arena of known bytes.
struct served {
    explicit served(std::uint64_t seed = 1, std::size_t size = 1'000'000)
        : arena{owner.allocate(size)}, bytes{random_bytes(size, seed)} {
        owner.pack(arena.data(), bytes.data(), size, 1, size);
        owner.settle(soon(), {});
    }
    void wait_for_pairs(std::size_t count) const {
        for (const auto until = soon(); owner.pair_count() != count && !until.expired();) {
            std::this_thread::sleep_for(1ms);
        }
        CHECK(owner.pair_count() == count);
    }
    fabric::owner owner{0};
    fabric::arena arena;
    bytes_of bytes;
};

/// A reader's way to one owner.
struct way {
    way(fabric::reader& reader, const std::string& address, const weightwire::fabric_export& named)
        : connection{reader.connect(address, soon(), {})},
          memory{reader.open(connection, named.handle, named.bytes, soon(), {})} {}
    way(fabric::reader& reader, const served& from)
        : way{reader, from.owner.address(), from.arena.exported()} {}
    fabric::connection connection;
    fabric::memory memory;
};

/// Lines that follow one another in the arena go to places with gaps between them.
std::vector<run> lines(const fabric::memory& from, std::byte* to, std::uint64_t bytes,
                       std::uint64_t count, std::uint64_t offset = 0) {
    return {{.from = &from,
             .offset = offset,
             .to = to,
             .bytes = bytes,
             .count = count,
             .from_step = bytes,
             .to_step = bytes + 7}};
}
bool are_lines(const bytes_of& to, const bytes_of& from, std::uint64_t bytes, std::uint64_t count,
               std::uint64_t offset = 0) {
    for (std::uint64_t i = 0; i < count; ++i) {
        if (std::memcmp(to.data() + i * (bytes + 7), from.data() + offset + i * bytes, bytes) !=
            0) {
            return false;
        }
    }
    return true;
}
std::string message_of(auto call) {
    try {
        call();
    } catch (const weightwire::error& caught) {
        return caught.what();
    }
    return "nothing was thrown";
}
bool has(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

/// A connection to an owner's port that speaks for itself.
struct stranger {
    explicit stranger(const std::string& address) {
        const auto named = nccl::parse_owner(address).value();
        int status = 0;
        const auto found =
            weightwire::detail::look_up("127.0.0.1", named.port, AI_NUMERICHOST, status);
        auto made = weightwire::detail::descriptor::from_native(
            ::socket(found.front().family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
        REQUIRE(::connect(made.native_handle(), found.front().native(), found.front().size) == 0);
        socket = nccl::pair_socket{std::move(made)};
    }
    void say(std::string_view bytes) const {
        static_cast<void>(::send(socket.native_handle(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
    }
    /// What the owner says before it ends the connection.
    std::string rest() {
        std::string text;
        for (const auto until = soon(); !until.expired();) {
            const bool open = socket.fill();
            while (const auto got = socket.next()) {
                text += std::to_string(static_cast<std::uint32_t>(got->kind)) + ":" +
                        std::string{got->body};
            }
            if (!open) {
                return text;
            }
            std::this_thread::sleep_for(1ms);
        }
        return text + " and never ends";
    }
    nccl::pair_socket socket;
};

}  // namespace

TEST_CASE("nccl pull texts come back, and no damaged one does") {
    const nccl::owner_text owner{
        .version = 22809, .id = 77, .boot = "b-1", .port = 4000, .hosts = {"10.0.0.1", "fd00::1"}};
    CHECK((nccl::parse_owner(nccl::to_text(owner)) == owner));
    auto unknown = owner;
    unknown.boot.clear();
    CHECK((nccl::parse_owner(nccl::to_text(unknown)) == unknown));
    const nccl::arena_text arena{.id = 77, .number = 3, .bytes = 4096};
    CHECK((nccl::parse_arena(nccl::to_text(arena)) == arena));
    for (const std::string text :
         {"", " ", "nccl-owner", "nccl-owner 1 2 - 5 ", "nccl-owner 1 2 - 0 1.1.1.1",
          "nccl-owner 1 2 - 70000 1.1.1.1", "nccl-owner 1 2 - 5 a.host", "nccl-owner 1 2 - 5 ,",
          "nccl-owner 1 2 - 5 1.1.1.1,", "nccl-owner -1 2 - 5 1.1.1.1",
          "nccl-owner 1 2 - 5 1.1.1.1 more", "nccl-owner 1  - 5 1.1.1.1", "nccl-arena 1 2 3 4",
          "nccl-arena 1 2", "nccl-arena 1 2 -3", "nccl-arena x y z"}) {
        CAPTURE(text);
        CHECK_FALSE(nccl::parse_owner(text));
        CHECK_FALSE(nccl::parse_arena(text));
    }
    std::string many = "nccl-owner 1 2 - 5 1.1.1.1";
    for (int i = 0; i < 16; ++i) {
        many += ",1.1.1.1";
    }
    CHECK_FALSE(nccl::parse_owner(many));
}

TEST_CASE("nccl pull: interfaces are chosen as NCCL chooses them") {
    CHECK(nccl::is_wanted_interface("eth0", ""));
    CHECK(nccl::is_wanted_interface("eth0", "eth"));
    CHECK(nccl::is_wanted_interface("eth0", "ib,eth"));
    CHECK_FALSE(nccl::is_wanted_interface("eth0", "=eth"));
    CHECK(nccl::is_wanted_interface("eth0", "=ib0,eth0"));
    CHECK_FALSE(nccl::is_wanted_interface("docker0", "^docker,lo"));
    CHECK(nccl::is_wanted_interface("eth0", "^docker,lo"));
    CHECK_FALSE(nccl::interface_addresses("=lo").empty());
    CHECK_THROWS_AS(static_cast<void>(nccl::interface_addresses("=none-such")),
                    weightwire::resource_error);
}

TEST_CASE("nccl pull: parts cover what is wanted, few and on a boundary") {
    using part = std::pair<std::uint64_t, std::uint64_t>;
    std::vector<part> wanted{{1000, 2000}, {10, 100}, {100, 500}};
    CHECK((nccl::pair_detail::cover(wanted) == std::vector<part>{{0, 2000}}));
    wanted = {{5'000'003, 5'000'100}, {17, 100}};
    CHECK(
        (nccl::pair_detail::cover(wanted) == std::vector<part>{{16, 100}, {5'000'000, 5'000'100}}));
    wanted.clear();
    for (std::uint64_t i = 0; i < 50; ++i) {
        wanted.emplace_back(i * i * 1'000'000, i * i * 1'000'000 + 10);
    }
    const auto few = nccl::pair_detail::cover(wanted);
    CHECK(few.size() == nccl::pair_detail::most_parts);
    for (const auto& [begin, end] : wanted) {
        CHECK(std::ranges::any_of(
            few, [&](const part& each) { return each.first <= begin && end <= each.second; }));
    }
}

TEST_CASE("nccl pull brings the bytes of random runs, shifted and again and again") {
    const quiet_world world_of_its_own;
    served from{3, 6'000'000};
    fabric::reader reader{0};
    const way to{reader, from};
    CHECK(to.memory.size() == from.arena.size());
    CHECK(std::holds_alternative<weightwire::fabric_refusal>(
        from.owner.export_memory(from.bytes.data(), 8)));
    std::mt19937_64 random{5};
    for (int round = 0; round < 20; ++round) {
        // As a packed chunk: one after the other, some wanted twice, some not at all.
        bytes_of out(4'000'000);
        bytes_of expected(out.size());
        std::vector<run> runs;
        std::vector<std::array<std::uint64_t, 3>> plain;
        std::uint64_t offset = random() % 100;
        std::uint64_t at = 0;
        while (offset < 2'500'000 && at < 3'500'000) {
            const auto bytes = 1 + random() % 90'000;
            const auto times = round % 2 == 0 ? 1 : random() % 3;
            for (std::uint64_t i = 0; i < times; ++i) {
                runs.push_back(
                    {.from = &to.memory, .offset = offset, .to = out.data() + at, .bytes = bytes});
                plain.push_back({offset, at, bytes});
                at += bytes + random() % 9;
            }
            offset += bytes;
        }
        auto read = reader.prepare(runs);
        for (const std::uint64_t shift : {0U, 16U * 190'000U}) {
            for (const auto& [source, destination, bytes] : plain) {
                std::memcpy(expected.data() + destination, from.bytes.data() + source + shift,
                            bytes);
            }
            reader.start(read, shift);
            if (round % 3 == 0) {
                reader.wait(read, soon(), {});
            }
            for (const auto until = soon(); !reader.done(read) && !until.expired();) {
            }
            CHECK(reader.done(read));
            CHECK(std::memcmp(out.data(), expected.data(), out.size()) == 0);
        }
    }
    auto nothing = reader.prepare({});
    reader.start(nothing, 0);
    CHECK(reader.done(nothing));
    CHECK(world::early_sends == 0);
    CHECK_FALSE(reader.lost());
    CHECK(world::aborts == 0);
}

TEST_CASE("nccl pull: readers and owners cross, and every send meets a posted receive") {
    const quiet_world world_of_its_own;
    constexpr std::size_t owners = 3;
    constexpr std::size_t readers = 3;
    std::vector<std::unique_ptr<served>> all;
    for (std::size_t i = 0; i < owners; ++i) {
        all.push_back(std::make_unique<served>(i + 1, 2'000'000));
    }
    std::vector<std::jthread> threads;
    std::array<std::atomic<int>, readers> right{};
    for (std::size_t r = 0; r < readers; ++r) {
        threads.emplace_back([&, r] {
            fabric::reader reader{0};
            std::vector<std::unique_ptr<way>> ways;
            for (const auto& each : all) {
                ways.push_back(std::make_unique<way>(reader, *each));
            }
            // Each reader in another order, several reads of an owner at once.
            for (int round = 0; round < 10; ++round) {
                std::vector<bytes_of> out;
                std::vector<fabric::read> reads;
                for (std::size_t i = 0; i < 4 * owners; ++i) {
                    const auto o = (i + r) % owners;
                    auto& to = out.emplace_back(bytes_of(200'000));
                    reads.push_back(reader.prepare(
                        lines(ways[o]->memory, to.data(), 1500, 100, 150'000 * (i / owners))));
                }
                for (auto& each : reads) {
                    reader.start(each, 0);
                }
                for (auto& each : reads) {
                    reader.wait(each, soon(), {});
                }
                bool good = true;
                for (std::size_t i = 0; i < out.size(); ++i) {
                    good = good && are_lines(out[i], all[(i + r) % owners]->bytes, 1500, 100,
                                             150'000 * (i / owners));
                }
                right[r] += good ? 1 : 0;
            }
        });
    }
    threads.clear();
    for (const auto& each : right) {
        CHECK(each == 10);
    }
    CHECK(world::early_sends == 0);
    for (const auto& each : all) {
        each->wait_for_pairs(0);
    }
}

TEST_CASE("nccl pull: no more pairs are under way than the device holds at once") {
    const quiet_world world_of_its_own;
    world::most_pairs = 1;
    served one{1};
    served two{2};
    fabric::reader reader{0};
    const way to_one{reader, one};
    const way to_two{reader, two};
    world::most_under_way = 0;
    for (int round = 0; round < 10; ++round) {
        bytes_of out_one(200'000);
        bytes_of out_two(200'000);
        auto first = reader.prepare(lines(to_one.memory, out_one.data(), 1000, 100));
        auto second = reader.prepare(lines(to_two.memory, out_two.data(), 1000, 100));
        reader.start(first, 0);
        reader.start(second, 0);
        reader.wait(second, soon(), {});
        reader.wait(first, soon(), {});
        CHECK(are_lines(out_one, one.bytes, 1000, 100));
        CHECK(are_lines(out_two, two.bytes, 1000, 100));
    }
    CHECK(world::most_under_way == 1);
}

TEST_CASE("nccl pull: a steady round allocates nothing" *
          doctest::skip(!weightwire_tests::counts_allocations)) {
    const quiet_world world_of_its_own;
    served from{1};
    fabric::reader reader{0};
    const way to{reader, from};
    bytes_of out(200'000);
    auto read = reader.prepare(lines(to.memory, out.data(), 1000, 100));
    std::uint64_t buffers = 0;
    for (int round = 0; round < 5; ++round) {
        reader.start(read, 0);
        reader.wait(read, soon(), {});
        if (round == 1) {
            buffers = world::buffers;
        }
    }
    CHECK(world::buffers == buffers);
}

TEST_CASE("nccl pull: the memory of pairs is measured on both sides") {
    const quiet_world world_of_its_own;
    served from{1};
    const auto before = from.owner.memory_bytes();
    CHECK(before >= from.arena.size());
    fabric::reader reader{0};
    {
        const way to{reader, from};
        // Both ends are in this process, and the stand-in has one number for it.
        CHECK(reader.memory_bytes() >= world::pair_bytes);
        for (const auto until = soon(); from.owner.memory_bytes() == before && !until.expired();) {
            std::this_thread::sleep_for(1ms);
        }
        CHECK(from.owner.memory_bytes() >= before + world::pair_bytes);
        CHECK(has(from.owner.remark(), "1 communicators"));
        CHECK(has(reader.remark(), "1 communicators"));
    }
    from.wait_for_pairs(0);
    CHECK(from.owner.memory_bytes() == before);
    CHECK(has(reader.remark(), "0 communicators"));
}

TEST_CASE("nccl pull: an owner waits for a user's stream and packs lines") {
    served from{1};
    std::atomic<bool> ready = false;
    CHECK_THROWS_AS(from.owner.await_ready(&ready, deadline::after(20ms), {}),
                    weightwire::timeout_error);
    std::stop_source stopped;
    stopped.request_stop();
    CHECK_THROWS_AS(from.owner.await_ready(&ready, soon(), stopped.get_token()),
                    weightwire::cancelled_error);
    ready = true;
    from.owner.await_ready(&ready, soon(), {});
    const auto source = random_bytes(10'000, 9);
    from.owner.pack(from.arena.data(), source.data(), 100, 50, 200);
    from.owner.settle(soon(), {});
    for (std::size_t i = 0; i < 50; ++i) {
        CHECK(std::memcmp(from.arena.data() + i * 100, source.data() + i * 200, 100) == 0);
    }
    CHECK_THROWS_AS(static_cast<void>(from.owner.allocate(0)), weightwire::usage_error);
}

TEST_CASE("nccl pull: addresses and handles that lie are refused") {
    const quiet_world world_of_its_own;
    served from{1};
    served other{2};
    fabric::reader reader{0};
    CHECK_THROWS_AS(static_cast<void>(reader.connect("nonsense", soon(), {})),
                    weightwire::protocol_error);
    auto named = nccl::parse_owner(from.owner.address()).value();
    auto wrong = named;
    wrong.id ^= 1U;
    CHECK(has(
        message_of([&] { static_cast<void>(reader.connect(nccl::to_text(wrong), soon(), {})); }),
        "does not answer at"));
    wrong = named;
    wrong.version = 21805;
    CHECK(has(
        message_of([&] { static_cast<void>(reader.connect(nccl::to_text(wrong), soon(), {})); }),
        "mismatch"));
    wrong = named;
    wrong.boot = "another-machine";
    wrong.hosts = {"127.0.0.1"};
    CHECK(has(
        message_of([&] { static_cast<void>(reader.connect(nccl::to_text(wrong), soon(), {})); }),
        "NCCL_SOCKET_IFNAME"));
    auto connection = reader.connect(from.owner.address(), soon(), {});
    CHECK(connection.alive());
    const auto handle = from.arena.exported().handle;
    for (const auto& [text, bytes] :
         std::vector<std::pair<std::string, std::uint64_t>>{{"", 1},
                                                            {handle, from.arena.size() + 1},
                                                            {other.arena.exported().handle, 1},
                                                            {handle + " 1", 1}}) {
        CAPTURE(text);
        CHECK_THROWS_AS(static_cast<void>(reader.open(connection, text, bytes, soon(), {})),
                        weightwire::protocol_error);
    }
    auto lie = nccl::parse_arena(handle).value();
    lie.number = 99;
    CHECK(has(message_of([&] {
                  static_cast<void>(reader.open(connection, nccl::to_text(lie), 1, soon(), {}));
              }),
              "arena 99, which do not exist"));
    CHECK_FALSE(connection.alive());
    CHECK_THROWS_AS(static_cast<void>(reader.open(connection, handle, 1, soon(), {})),
                    weightwire::protocol_error);
    // Another connection is none the worse.
    const way good{reader, from};
    CHECK(good.connection.alive());
    // Runs of two memories, and a read that is started twice.
    const way second{reader, other};
    bytes_of out(100);
    std::vector<run> runs{{.from = &good.memory, .to = out.data(), .bytes = 8},
                          {.from = &second.memory, .to = out.data() + 8, .bytes = 8}};
    CHECK_THROWS_AS(static_cast<void>(reader.prepare(runs)), weightwire::usage_error);
    runs.pop_back();
    auto read = reader.prepare(runs);
    reader.start(read, 0);
    CHECK_THROWS_AS(reader.start(read, 0), weightwire::usage_error);
    reader.wait(read, soon(), {});
    // A shift that leads out of the arena costs the connection, by the owner's word.
    reader.start(read, 16 * 1'000'000);
    CHECK(has(message_of([&] { reader.wait(read, soon(), {}); }), "which do not exist"));
    CHECK_FALSE(good.connection.alive());
}

TEST_CASE("nccl pull: garbage at an owner's port is answered once, and costs the others nothing") {
    const quiet_world world_of_its_own;
    served from{1};
    fabric::reader reader{0};
    const way to{reader, from};
    const auto id = nccl::parse_owner(from.owner.address()).value().id;
    {
        stranger garbage{from.owner.address()};
        garbage.say(std::string(6000, 'x'));
        static_cast<void>(garbage.rest());
    }
    {
        stranger asks{from.owner.address()};
        nccl::pair_socket& socket = asks.socket;
        socket.queue_value(nccl::pair_frame_kind::ask, nccl::ask_frame{.count = 1, .pieces = {}});
        static_cast<void>(socket.flush());
        CHECK(has(asks.rest(), "17:protocol"));
    }
    {
        stranger nonce{from.owner.address()};
        nonce.socket.queue_value(nccl::pair_frame_kind::hello,
                                 nccl::hello_frame{.id = id + 1, .version = 22809, .channels = 4});
        static_cast<void>(nonce.socket.flush());
        CHECK(has(nonce.rest(), "not the trainer rank"));
    }
    for (const auto& [version, channels] : {std::pair{22808, 4}, std::pair{22809, 2}}) {
        stranger differs{from.owner.address()};
        differs.socket.queue_value(
            nccl::pair_frame_kind::hello,
            nccl::hello_frame{.id = id, .version = version, .channels = channels});
        static_cast<void>(differs.socket.flush());
        CHECK(has(differs.rest(), "17:mismatch"));
    }
    {
        stranger silent{from.owner.address()};
        nccl::pair_socket& socket = silent.socket;
        socket.queue_value(nccl::pair_frame_kind::hello,
                           nccl::hello_frame{.id = id, .version = 22809, .channels = 4});
        static_cast<void>(socket.flush());
        from.wait_for_pairs(2);
        const auto begin = deadline::clock::now();
        CHECK(has(silent.rest(), "17:timeout"));  // it never joins
        CHECK(deadline::clock::now() - begin < 10s);
    }
    from.wait_for_pairs(1);
    bytes_of out(200'000);
    auto read = reader.prepare(lines(to.memory, out.data(), 1000, 100));
    reader.start(read, 0);
    reader.wait(read, soon(), {});
    CHECK(are_lines(out, from.bytes, 1000, 100));
}

TEST_CASE("nccl pull: one communicator too many is refused on either side, and UCX is named") {
    const quiet_world world_of_its_own;
    served from{1};
    std::vector<std::unique_ptr<fabric::reader>> readers;
    std::vector<std::unique_ptr<way>> ways;
    for (int i = 0; i < 6; ++i) {
        readers.push_back(std::make_unique<fabric::reader>(0));
        ways.push_back(std::make_unique<way>(*readers.back(), from));
    }
    fabric::reader late{0};
    const auto said =
        message_of([&] { static_cast<void>(late.connect(from.owner.address(), soon(), {})); });
    CHECK(has(said, "unsupported"));
    CHECK(has(said, "UCX"));
    ways.pop_back();
    from.wait_for_pairs(5);
    {
        const way again{late, from};  // there is room now
        CHECK(again.connection.alive());
    }
    ways.clear();
    from.wait_for_pairs(0);
    // One reader with too many owners.
    std::vector<std::unique_ptr<served>> owners;
    for (int i = 0; i < 7; ++i) {
        owners.push_back(std::make_unique<served>(static_cast<std::uint64_t>(i), 4096));
    }
    for (int i = 0; i < 6; ++i) {
        ways.push_back(std::make_unique<way>(late, *owners[static_cast<std::size_t>(i)]));
    }
    CHECK(has(message_of([&] {
                  static_cast<void>(late.connect(owners.back()->owner.address(), soon(), {}));
              }),
              "read over UCX"));
}

/// Two communicators fit beside what a side has of its own; a third does not.
struct tight_memory {
    static constexpr nccl::pull_options value = [] {
        auto made = tests::short_times::value;
        made.landing_bytes = std::uint64_t{1} << 20U;
        made.pair_bytes = 2 * world::pair_bytes;  // both ends are in this process
        made.device_bytes = made.landing_bytes + 2 * made.pair_bytes + made.pair_bytes / 2;
        return made;
    }();
};

TEST_CASE("nccl pull: communicators count in the budget of device memory, on either side") {
    using narrow = weightwire::nccl::basic_pull_fabric<tests::host_pairs, tight_memory>;
    const quiet_world world_of_its_own;
    narrow::owner owner{0};
    const auto arena = owner.allocate(4096);
    SUBCASE("nobody else takes any") {}
    SUBCASE("others take much while the first is made") {
        world::at_step = [taken = std::make_shared<std::atomic<bool>>()](auto, auto) {
            if (!taken->exchange(true)) {
                world::free_bytes -= 100 * world::pair_bytes;
            }
        };
    }
    std::vector<std::unique_ptr<narrow::reader>> readers;
    std::vector<narrow::connection> ways;
    for (int i = 0; i < 2; ++i) {
        readers.push_back(std::make_unique<narrow::reader>(0));
        ways.push_back(readers.back()->connect(owner.address(), soon(), {}));
    }
    narrow::reader late{0};
    auto said = message_of([&] { static_cast<void>(late.connect(owner.address(), soon(), {})); });
    CHECK(has(said, "unsupported"));
    CHECK(has(said, "pull_options::device_bytes"));
    CHECK(has(said, "UCX"));
    CHECK(has(
        message_of([&] { static_cast<void>(owner.allocate(tight_memory::value.device_bytes)); }),
        "pull_options::device_bytes"));
    for (const auto until = soon(); owner.pair_count() > 2 && !until.expired();) {
        std::this_thread::sleep_for(1ms);
    }
    // One reader with too many owners. It measures its own end of each, or both.
    std::vector<std::unique_ptr<narrow::owner>> owners;
    narrow::reader one{0};
    said.clear();
    while (!has(said, "would take") && owners.size() < tight_memory::value.most_peers) {
        owners.push_back(std::make_unique<narrow::owner>(0));
        said =
            message_of([&] { ways.push_back(one.connect(owners.back()->address(), soon(), {})); });
    }
    CHECK(owners.size() > 2);
    CHECK(has(said, "this worker would take"));
    CHECK(has(said, "UCX"));
    ways.clear();
}

TEST_CASE("nccl pull: a read that is cancelled in flight writes nothing any more") {
    const quiet_world world_of_its_own;
    std::atomic<bool> hold = false;
    world::at_step = [&](std::string_view step, int end) {
        while (step == "transfer" && end == 0 && hold) {
            std::this_thread::sleep_for(1ms);
        }
    };
    served from{1};
    served other{2};
    fabric::reader reader{0};
    way to{reader, from};
    const way beside{reader, other};
    bytes_of out(200'000);
    bytes_of out_beside(200'000);
    auto read = reader.prepare(lines(to.memory, out.data(), 1000, 100));
    auto waits = reader.prepare(lines(to.memory, out.data(), 1000, 100));
    hold = true;
    reader.start(read, 0);
    for (int i = 0; i < 2000; ++i) {
        CHECK_FALSE(reader.done(read));
        std::this_thread::sleep_for(10us);
    }
    reader.start(waits, 0);  // behind it, over the same pair
    SUBCASE("by cancel") { reader.cancel(read); }
    SUBCASE("by a deadline") {
        CHECK_THROWS_AS(reader.wait(read, deadline::after(10ms), {}), weightwire::timeout_error);
    }
    SUBCASE("by a stop") {
        std::stop_source stopped;
        stopped.request_stop();
        CHECK_THROWS_AS(reader.wait(read, soon(), stopped.get_token()),
                        weightwire::cancelled_error);
    }
    SUBCASE("by its end") { read = {}; }
    const auto before = out;
    hold = false;
    CHECK(has(message_of([&] { reader.wait(waits, soon(), {}); }), "connect again"));
    std::this_thread::sleep_for(50ms);
    CHECK(out == before);
    CHECK_FALSE(to.connection.alive());
    // What was given up is made anew; the other pair has not noticed.
    auto good = reader.prepare(lines(beside.memory, out_beside.data(), 1000, 100));
    reader.start(good, 0);
    reader.wait(good, soon(), {});
    CHECK(are_lines(out_beside, other.bytes, 1000, 100));
    const way again{reader, from};
    auto anew = reader.prepare(lines(again.memory, out.data(), 1000, 100));
    reader.start(anew, 0);
    reader.wait(anew, soon(), {});
    CHECK(are_lines(out, from.bytes, 1000, 100));
    CHECK_FALSE(reader.lost());
}

TEST_CASE("nccl pull: a reader that hangs costs its own connection, the others a moment") {
    const quiet_world world_of_its_own;
    std::atomic<bool> hold = false;
    std::atomic<std::thread::id> held{};
    world::at_step = [&](std::string_view step, int end) {
        // The first receive that comes while `hold` is set.
        std::thread::id none{};
        if (step == "transfer" && end == 1 && hold &&
            (held.compare_exchange_strong(none, std::this_thread::get_id()) ||
             none == std::this_thread::get_id())) {
            while (hold) {
                std::this_thread::sleep_for(1ms);
            }
        }
    };
    // More than sockets hold, so that the send waits for its receive.
    served from{1, 30'000'000};
    fabric::reader hangs{0};
    fabric::reader goes_on{0};
    const way stuck{hangs, from};
    const way good{goes_on, from};
    bytes_of out_stuck(31'000'000);
    bytes_of out(200'000);
    auto read_stuck = hangs.prepare(lines(stuck.memory, out_stuck.data(), 1'000'000, 30));
    auto read = goes_on.prepare(lines(good.memory, out.data(), 1000, 100));
    hold = true;
    hangs.start(read_stuck, 0);
    while (held.load() == std::thread::id{}) {
        CHECK_FALSE(hangs.done(read_stuck));
    }
    for (int i = 0; i < 3; ++i) {
        const auto begin = deadline::clock::now();
        goes_on.start(read, 0);
        goes_on.wait(read, soon(), {});
        CHECK(deadline::clock::now() - begin < 1500ms);  // `linger`, and not until it is given up
        CHECK(are_lines(out, from.bytes, 1000, 100));
    }
    CHECK(from.owner.pair_count() == 2);
    from.wait_for_pairs(1);  // its time is over
    CHECK(has(message_of([&] { hangs.wait(read_stuck, soon(), {}); }), "did not do its part"));
    hold = false;
}

TEST_CASE("nccl pull: an owner that hangs costs a reader its deadline, and other owners nothing") {
    const quiet_world world_of_its_own;
    std::atomic<bool> hold = false;
    std::atomic<int> holds_left = 0;
    world::at_step = [&](std::string_view step, int end) {
        if (step == "transfer" && end == 0 && hold && holds_left-- > 0) {
            while (hold) {
                std::this_thread::sleep_for(1ms);
            }
        }
    };
    served hangs{1};
    served good{2};
    fabric::reader reader{0};
    const way to_hanging{reader, hangs};
    const way to_good{reader, good};
    bytes_of out_hanging(200'000);
    bytes_of out(200'000);
    auto late = reader.prepare(lines(to_hanging.memory, out_hanging.data(), 1000, 100));
    auto read = reader.prepare(lines(to_good.memory, out.data(), 1000, 100));
    holds_left = 1;
    hold = true;
    reader.start(late, 0);
    while (holds_left > 0) {
        CHECK_FALSE(reader.done(late));
    }
    for (int i = 0; i < 3; ++i) {
        reader.start(read, 0);
        reader.wait(read, soon(), {});
        CHECK(are_lines(out, good.bytes, 1000, 100));
    }
    const auto said = message_of([&] { reader.wait(late, deadline::after(100ms), {}); });
    CHECK(has(said, "timeout"));
    CHECK(has(said, to_hanging.connection.peer()));
    hold = false;
}

TEST_CASE("nccl pull: an abort that does not return is told of, and its memory is left behind") {
    const quiet_world world_of_its_own;
    // In a process of its own: a device that is lost stays so.
    tests::forked child{[](tests::channel& parent) {
        std::atomic<bool> hold = false;
        world::at_step = [&](std::string_view step, int end) {
            while (step == "transfer" && end == 0 && hold) {
                std::this_thread::sleep_for(1ms);
            }
        };
        std::string told;
        {
            served from{1};
            fabric::reader reader{0};
            const way to{reader, from};
            bytes_of out(200'000);
            auto read = reader.prepare(lines(to.memory, out.data(), 1000, 100));
            hold = true;
            reader.start(read, 0);
            for (int i = 0; i < 1000; ++i) {
                static_cast<void>(reader.done(read));
            }
            world::stuck = true;
            const auto begin = deadline::clock::now();
            reader.cancel(read);
            told += deadline::clock::now() - begin < 500ms ? "at once, " : "late, ";
            told += reader.lost() ? "lost at once, " : "not lost yet, ";
            reader.come_to_rest();  // and then what is lost is left behind, not waited for
            const auto rested = deadline::clock::now() - begin;
            told += rested > 900ms && rested < 3s ? "in its time, " : "not in its time, ";
            auto again = reader.prepare(lines(to.memory, out.data(), 10, 10));
            told += reader.lost() ? "lost" : "not lost";
            hold = false;
        }
        parent.put_text(told);
        ::_exit(0);
    }};
    CHECK(child.to().rest() == "at once, not lost yet, in its time, lost");
}

TEST_CASE("nccl pull: connecting has a deadline and a stop, and leaves nothing behind") {
    const quiet_world world_of_its_own;
    std::atomic<bool> hold = true;
    world::at_step = [&](std::string_view step, int end) {
        while (step == "join" && end == 0 && hold) {
            std::this_thread::sleep_for(1ms);
        }
    };
    served from{1};
    fabric::reader reader{0};
    CHECK_THROWS_AS(
        static_cast<void>(reader.connect(from.owner.address(), deadline::after(300ms), {})),
        weightwire::timeout_error);
    std::stop_source stopped;
    std::jthread asks{[&] {
        std::this_thread::sleep_for(100ms);
        stopped.request_stop();
    }};
    CHECK_THROWS_AS(
        static_cast<void>(reader.connect(from.owner.address(), soon(), stopped.get_token())),
        weightwire::cancelled_error);
    from.wait_for_pairs(0);
    hold = false;
    const way good{reader, from};
    CHECK(good.connection.alive());
    CHECK(has(reader.remark(), "1 communicators"));
}

TEST_CASE("nccl pull: what a post is refused for costs the pair, on either side") {
    const quiet_world world_of_its_own;
    served from{1};
    fabric::reader reader{0};
    bytes_of out(200'000);
    const way to{reader, from};
    auto read = reader.prepare(lines(to.memory, out.data(), 1000, 100));
    reader.start(read, 0);
    world::refuses = true;
    CHECK(has(message_of([&] { reader.wait(read, soon(), {}); }), "a post was refused"));
    world::refuses = false;
    const way again{reader, from};
    CHECK(again.connection.alive());
}

namespace {

/// What a forked owner or reader says.
struct short_text {
    std::array<char, 1024> letters{};
    explicit short_text(std::string_view text = {}) {
        std::ranges::copy(text.substr(0, letters.size() - 1), letters.begin());
    }
    [[nodiscard]] std::string string() const { return letters.data(); }
};

/// An owner in a process of its own, which serves until it is told to end.
struct forked_owner {
    tests::forked process{[](tests::channel& parent) {
        world::at_step = [&](std::string_view step, int end) {
            if (step == "transfer" && end == 0 && die_at > 0 && --die_at == 0) {
                ::raise(dies_by);
            }
        };
        dies_by = parent.take<int>();
        die_at = parent.take<int>();
        const served from{7};
        parent.put(short_text{from.owner.address()});
        parent.put(short_text{from.arena.exported().handle});
        static_cast<void>(parent.take<char>());
    }};
    static inline std::atomic<int> die_at{0};
    static inline int dies_by = 0;
};

}  // namespace

TEST_CASE("nccl pull: an owner that is killed or stopped in the middle of a transfer") {
    const quiet_world world_of_its_own;
    forked_owner theirs;
    // The trial, the first bytes of the arena, then: in the second of two reads.
    const bool killed = [&] {
        bool kills = false;
        SUBCASE("killed") { kills = true; }
        SUBCASE("stopped") {}
        return kills;
    }();
    theirs.process.to().put(killed ? SIGKILL : SIGSTOP);
    theirs.process.to().put(4);
    const auto address = theirs.process.to().take<short_text>().string();
    const auto handle = theirs.process.to().take<short_text>().string();
    served good{2};
    fabric::reader reader{0};
    way to{reader, address, {.handle = handle, .offset = 0, .bytes = 1'000'000}};
    const way beside{reader, good};
    const auto expected = random_bytes(1'000'000, 7);
    bytes_of out(200'000);
    bytes_of out_beside(200'000);
    auto read = reader.prepare(lines(to.memory, out.data(), 1000, 100));
    auto read_beside = reader.prepare(lines(beside.memory, out_beside.data(), 1000, 100));
    reader.start(read, 0);
    reader.wait(read, soon(), {});
    CHECK(are_lines(out, expected, 1000, 100));
    const auto before = out;
    const auto begin = deadline::clock::now();
    reader.start(read, 16 * 1000);
    reader.start(read_beside, 0);
    reader.wait(read_beside, soon(), {});
    CHECK(are_lines(out_beside, good.bytes, 1000, 100));
    const auto said = message_of([&] { reader.wait(read, deadline::after(1s), {}); });
    CHECK(has(said, killed ? "peer" : "timeout"));
    CHECK(has(said, to.connection.peer()));
    CHECK(deadline::clock::now() - begin < 5s);
    CHECK(out == before);
    CHECK_FALSE(to.connection.alive());
    CHECK_THROWS_AS(reader.start(read, 0), weightwire::peer_error);
    theirs.process.kill();
    CHECK(has(message_of([&] { static_cast<void>(reader.connect(address, soon(), {})); }),
              "does not answer"));
    CHECK_FALSE(reader.lost());
}

TEST_CASE("nccl pull: readers that are killed or stopped, and the others go on at once") {
    const quiet_world world_of_its_own;
    std::vector<std::unique_ptr<tests::forked>> readers;
    for (const int by : {SIGKILL, SIGSTOP}) {
        readers.push_back(std::make_unique<tests::forked>([by](tests::channel& parent) {
            std::atomic<int> left = 3;
            world::at_step = [&](std::string_view step, int end) {
                if (step == "transfer" && end == 1 && --left == 0) {
                    ::raise(by);
                }
            };
            const auto address = parent.take<short_text>().string();
            const auto handle = parent.take<short_text>().string();
            fabric::reader reader{0};
            const way to{reader, address, {.handle = handle, .offset = 0, .bytes = 30'000'000}};
            bytes_of out(31'000'000);
            auto read = reader.prepare(lines(to.memory, out.data(), 1'000'000, 30));
            parent.put('r');
            static_cast<void>(parent.take<char>());
            reader.start(read, 0);
            reader.wait(read, soon(), {});
            parent.put('d');
        }));
    }
    served from{1, 30'000'000};
    fabric::reader mine{0};
    const way to{mine, from};
    for (auto& each : readers) {
        each->to().put(short_text{from.owner.address()});
        each->to().put(short_text{from.arena.exported().handle});
        CHECK(each->to().take<char>() == 'r');
    }
    for (auto& each : readers) {
        each->to().put('g');
    }
    bytes_of out(200'000);
    auto read = mine.prepare(lines(to.memory, out.data(), 1000, 100));
    for (int i = 0; i < 20; ++i) {
        const auto begin = deadline::clock::now();
        mine.start(read, 0);
        mine.wait(read, soon(), {});
        CHECK(deadline::clock::now() - begin < 1500ms);
        CHECK(are_lines(out, from.bytes, 1000, 100));
        std::this_thread::sleep_for(20ms);
    }
    from.wait_for_pairs(1);  // the killed one at once, the stopped one when its time was over
    for (auto& each : readers) {
        each->kill();
    }
}
