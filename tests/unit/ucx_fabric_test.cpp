// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/ucx/fabric.hpp>
#include <weightwire/fabrics/ucx/pieces.hpp>
#include <weightwire/fabrics/ucx/texts.hpp>

#include "../support/allocations.hpp"

namespace {

namespace ucx = weightwire::ucx;
using namespace std::chrono_literals;
using bytes_of = std::vector<std::byte>;
using ucx_run = weightwire::remote_run<ucx::memory>;

weightwire::deadline soon() { return weightwire::deadline::after(30s); }

bytes_of random_bytes(std::size_t count, std::uint64_t seed) {
    std::mt19937_64 random{seed};
    bytes_of made(count);
    for (std::size_t i = 0; i < count; i += 8) {
        const auto word = random();
        std::memcpy(made.data() + i, &word, std::min<std::size_t>(8, count - i));
    }
    return made;
}

bool equal_bytes(const bytes_of& a, const bytes_of& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

/// What a run list leaves in `to`, of which `base` is the first byte, by plain copies.
template <class Memory>
void copy_plainly(std::span<const weightwire::remote_run<Memory>> runs, const std::byte* from,
                  std::byte* to, const std::byte* base) {
    for (const auto& run : runs) {
        for (std::uint64_t line = 0; line < run.count; ++line) {
            std::memcpy(to + (run.to - base) + line * run.to_step,
                        from + run.offset + line * run.from_step, run.bytes);
        }
    }
}

/// Runs that follow one another in the remote memory, as in a packed chunk, or lie apart; their
/// destinations have odd gaps and never overlap.
template <class Memory>
std::vector<weightwire::remote_run<Memory>> random_runs(std::mt19937_64& random, const Memory* from,
                                                        std::uint64_t remote, std::byte* to,
                                                        std::uint64_t local, bool packed) {
    std::vector<weightwire::remote_run<Memory>> runs;
    const auto below = [&](std::uint64_t limit) { return random() % limit; };
    std::uint64_t offset = below(64);
    std::uint64_t at = below(64);
    for (;;) {
        weightwire::remote_run<Memory> run{.from = from, .offset = offset, .to = to + at};
        run.bytes = below(4) == 0 ? below(400'000) : below(3'000);
        run.count = below(3) == 0 ? 1 + below(40) : 1;
        run.from_step = run.bytes + (packed || below(2) == 0 ? 0 : below(100));
        run.to_step = run.bytes + (below(2) == 0 ? 0 : below(100));
        const auto there = run.count == 1 ? run.bytes : run.from_step * run.count;
        const auto here = run.count == 1 ? run.bytes : run.to_step * run.count;
        if (there > remote - offset || here > local - at) {
            return runs;
        }
        runs.push_back(run);
        offset += there + (packed ? 0 : below(50));
        at += here + below(50);
        if (offset >= remote || at >= local) {
            return runs;
        }
    }
}

/// Opened memory for the pure part.
struct plain_memory {
    const std::byte* data = nullptr;
};

/// Copies that end later, as a device's: they are done when their mark is found to be reached, so a
/// place that is used again too early shows.
class lagging_staging {
public:
    struct job {
        std::byte* to;
        std::uint64_t step;
        const std::byte* from;
        std::uint64_t bytes;
        std::uint64_t count;
    };
    struct mark {
        mutable std::vector<job> jobs{};
        mutable int looks = 0;
    };
    using buffer = ucx::host_buffer;
    static constexpr bool direct = false;
    static constexpr bool device_memory = true;
    static constexpr bool copies_at_once = false;

    explicit lagging_staging(int) {}
    [[nodiscard]] static bool is_host(const std::byte*) { return false; }
    [[nodiscard]] buffer allocate(std::uint64_t bytes) const { return buffer{bytes}; }
    [[nodiscard]] mark make_mark() const { return {}; }
    void copy(std::byte* to, std::uint64_t step, const std::byte* from, std::uint64_t bytes,
              std::uint64_t count) {
        next_.push_back({to, step, from, bytes, count});
    }
    void record(mark& at) {
        at.jobs = std::exchange(next_, {});
        at.looks = 3;
    }
    [[nodiscard]] bool reached(const mark& at) const {
        if (--at.looks > 0) {
            return false;
        }
        finish(at);
        return true;
    }
    void finish(const mark& at) const {
        for (const auto& each : std::exchange(at.jobs, {})) {
            for (std::uint64_t i = 0; i < each.count; ++i) {
                std::memcpy(each.to + i * each.step, each.from + i * each.bytes, each.bytes);
            }
        }
    }

private:
    std::vector<job> next_;
};
using lagging_fabric = ucx::basic_fabric<lagging_staging>;
static_assert(weightwire::PullFabric<lagging_fabric>);
static_assert(lagging_fabric::capabilities.device_memory && !lagging_staging::copies_at_once);

}  // namespace

TEST_CASE("ucx pieces bring every byte of random runs to its place, few and large") {
    std::mt19937_64 random{7};
    for (int round = 0; round < 40; ++round) {
        const bool packed = round % 2 == 0;
        const bool direct = round % 3 != 0;
        const auto from = random_bytes(3'000'000, random());
        const plain_memory remote{from.data()};
        bytes_of to(3'500'000);
        bytes_of expected(to.size());
        const auto runs = random_runs(random, &remote, from.size(), to.data(), to.size(), packed);
        const std::span<const weightwire::remote_run<plain_memory>> all{runs};
        copy_plainly(all, from.data(), expected.data(), to.data());
        const auto pieces = ucx::cut_pieces(all, direct);
        std::uint64_t moved = 0;
        std::uint64_t wanted = 0;
        for (const auto& run : runs) {
            wanted += run.bytes * run.count;
        }
        for (const auto& piece : pieces) {
            REQUIRE(piece.bytes > 0);
            REQUIRE(piece.bytes <= ucx::piece_bytes);
            moved += piece.bytes;
            const auto* const landed = from.data() + piece.offset;
            if (piece.direct != nullptr) {
                CHECK(direct);
                std::memcpy(piece.direct, landed, piece.bytes);
                continue;
            }
            ucx::lay_out(piece, all, landed,
                         [](std::byte* at, std::uint64_t step, const std::byte* source,
                            std::uint64_t bytes, std::uint64_t count) {
                             for (std::uint64_t i = 0; i < count; ++i) {
                                 std::memcpy(at + i * step, source + i * bytes, bytes);
                             }
                         });
        }
        CHECK(moved == wanted);
        CHECK(equal_bytes(to, expected));
        if (packed && !direct) {
            CHECK(pieces.size() == (wanted + ucx::piece_bytes - 1) / ucx::piece_bytes);
        }
    }
}

TEST_CASE("ucx texts come back, and no damaged one does") {
    const ucx::address_text address{.version = "1.13",
                                    .peer = "host/12",
                                    .id = 0x0123456789abcdefU,
                                    .probe = 4096,
                                    .probe_key = random_bytes(11, 1),
                                    .worker = random_bytes(300, 2)};
    const ucx::handle_text handle{
        .id = 5, .address = ~std::uint64_t{0}, .bytes = 7, .key = random_bytes(12, 3)};
    const auto text = ucx::to_text(address);
    const auto named = ucx::to_text(handle);
    CHECK((ucx::parse_address(text) == address));
    CHECK((ucx::parse_handle(named) == handle));
    CHECK_FALSE(ucx::parse_address(named));
    CHECK_FALSE(ucx::parse_handle(text));
    CHECK_FALSE(ucx::parse_address(""));
    CHECK_FALSE(ucx::parse_handle(" "));
    for (std::size_t i = 0; i < named.size(); ++i) {
        CAPTURE(i);
        auto wrong = named;
        wrong[i] = wrong[i] == '1' ? '2' : '1';
        CHECK_FALSE(ucx::parse_handle(wrong));
        CHECK_FALSE(ucx::parse_handle(named.substr(0, i)));
    }
    for (std::size_t i = 0; i < text.size(); ++i) {
        auto wrong = text;
        wrong[i] = wrong[i] == '1' ? '2' : '1';
        CHECK_FALSE(ucx::parse_address(wrong));
    }
}

TEST_CASE("ucx brings the bytes of random runs, shifted and again and again") {
    ucx::fabric::owner owner{0};
    ucx::fabric::reader reader{0};
    auto connection = reader.connect(owner.address(), soon(), {});
    constexpr std::uint64_t size = 9'000'000;
    constexpr std::uint64_t shift = 3'000'001;
    auto arena = owner.allocate(size + shift);
    REQUIRE(arena.size() == size + shift);
    auto memory = reader.open(connection, arena.exported().handle, arena.size(), soon(), {});
    CHECK(memory.size() == arena.size());
    std::mt19937_64 random{11};
    for (int round = 0; round < 8; ++round) {
        bytes_of to(9'500'000);
        bytes_of expected(to.size());
        const auto runs = random_runs(random, &memory, size, to.data(), to.size(), round % 4 != 3);
        auto read = reader.prepare(runs);
        for (const std::uint64_t by : {std::uint64_t{0}, shift}) {
            owner.serve(true);
            const auto bytes = random_bytes(arena.size(), random());
            std::memcpy(arena.data(), bytes.data(), bytes.size());
            copy_plainly(std::span<const ucx_run>{runs}, bytes.data() + by, expected.data(),
                         to.data());
            reader.start(read, by);
            if (round % 2 == 0) {
                reader.wait(read, soon(), {});
            } else {
                const auto until = soon();
                while (!reader.done(read) && !until.expired()) {
                }
            }
            CHECK(reader.done(read));
            CHECK(equal_bytes(to, expected));
            owner.serve(false);
        }
    }
}

TEST_CASE("ucx keeps several reads of several owners under way at once") {
    struct one {
        explicit one(ucx::fabric::reader& reader)
            : connection{reader.connect(owner.address(), soon(), {})},
              arena{owner.allocate(24'000'000)},
              memory{reader.open(connection, arena.exported().handle, arena.size(), soon(), {})} {}
        ucx::fabric::owner owner{0};
        ucx::fabric::connection connection;
        ucx::fabric::arena arena;
        ucx::fabric::memory memory;
        bytes_of to = bytes_of(24'000'000);
        ucx::fabric::read read;
    };
    ucx::fabric::reader reader{0};
    std::vector<std::unique_ptr<one>> all;
    for (std::uint64_t i = 0; i < 6; ++i) {
        auto& each = *all.emplace_back(std::make_unique<one>(reader));
        const auto bytes = random_bytes(each.arena.size(), i);
        std::memcpy(each.arena.data(), bytes.data(), bytes.size());
        // Rows that all have to be laid out: more of them than there are places to land.
        const std::vector<ucx_run> runs{ucx_run{.from = &each.memory,
                                                .to = each.to.data(),
                                                .bytes = 1000,
                                                .count = 24'000,
                                                .from_step = 1000,
                                                .to_step = 1000}};
        std::vector<ucx_run> halves{runs[0], runs[0]};
        halves[0].count = 12'000;
        halves[0].to_step = 2000;
        halves[1] = halves[0];
        halves[1].offset = 12'000'000;
        halves[1].to = each.to.data() + 1000;
        each.read = reader.prepare(halves);
    }
    for (auto& each : all) {
        reader.start(each->read, 0);
    }
    for (auto& each : all) {
        reader.wait(each->read, soon(), {});
        bool equal = true;
        for (std::size_t row = 0; row < 24'000; ++row) {
            equal = equal && std::memcmp(each->to.data() + row * 1000,
                                         each->arena.data() +
                                             (row % 2 == 0 ? row / 2 : 12'000 + row / 2) * 1000,
                                         1000) == 0;
        }
        CHECK(equal);
    }
}

TEST_CASE("ucx uses no place again before what landed there has been copied") {
    lagging_fabric::owner owner{0};
    lagging_fabric::reader reader{0};
    auto connection = reader.connect(owner.address(), soon(), {});
    auto arena = owner.allocate(60'000'000);
    const auto bytes = random_bytes(arena.size(), 9);
    std::memcpy(arena.data(), bytes.data(), bytes.size());
    auto memory = reader.open(connection, arena.exported().handle, arena.size(), soon(), {});
    CHECK(std::holds_alternative<weightwire::fabric_refusal>(
        owner.export_memory(bytes.data(), bytes.size())));
    std::mt19937_64 random{13};
    bytes_of to(66'000'000);
    bytes_of expected(to.size());
    const auto runs = random_runs(random, &memory, arena.size(), to.data(), to.size(), true);
    copy_plainly(std::span<const ucx_run>{runs}, bytes.data(), expected.data(), to.data());
    auto read = reader.prepare(runs);
    for (int round = 0; round < 2; ++round) {
        std::memset(to.data(), 0, to.size());
        reader.start(read, 0);
        reader.wait(read, soon(), {});
        CHECK(equal_bytes(to, expected));
    }
    // Given up half way: what had landed is still copied, and then nothing more.
    reader.start(read, 0);
    while (connection.alive() && !reader.done(read)) {
        reader.cancel(read);
    }
    const auto then = to;
    CHECK(reader.done(read));
    CHECK(equal_bytes(to, then));
}

TEST_CASE("a ucx read that is prepared allocates nothing" *
          doctest::skip(!weightwire_tests::counts_allocations)) {
    ucx::fabric::owner owner{0};
    ucx::fabric::reader reader{0};
    auto connection = reader.connect(owner.address(), soon(), {});
    auto arena = owner.allocate(8'000'000);
    auto memory = reader.open(connection, arena.exported().handle, arena.size(), soon(), {});
    std::mt19937_64 random{17};
    bytes_of to(9'000'000);
    const auto runs = random_runs(random, &memory, arena.size(), to.data(), to.size(), true);
    auto read = reader.prepare(runs);
    for (int round = 0; round < 3; ++round) {
        const auto until = soon();
        const weightwire_tests::allocation_watch watched;
        owner.serve(true);
        reader.start(read, 0);
        reader.wait(read, until, {});
        owner.serve(false);
        CHECK(watched.count() == 0);
    }
}

TEST_CASE("ucx exports the user's memory once, and names the bytes inside it") {
    ucx::fabric::owner owner{0};
    ucx::fabric::reader reader{0};
    const auto bytes = random_bytes(300'001, 5);
    const auto whole = owner.export_memory(bytes.data(), bytes.size());
    REQUIRE(std::holds_alternative<weightwire::fabric_export>(whole));
    const auto& exported = std::get<weightwire::fabric_export>(whole);
    CHECK(exported.bytes == bytes.size());
    CHECK(exported.offset == 0);
    const auto part = owner.export_memory(bytes.data() + 7, 1000);
    REQUIRE(std::holds_alternative<weightwire::fabric_export>(part));
    CHECK(std::get<weightwire::fabric_export>(part).handle == exported.handle);
    CHECK(std::get<weightwire::fabric_export>(part).offset == 7);
    CHECK(std::holds_alternative<weightwire::fabric_refusal>(owner.export_memory(nullptr, 0)));
    CHECK_THROWS_AS(static_cast<void>(owner.allocate(0)), weightwire::usage_error);

    auto connection = reader.connect(owner.address(), soon(), {});
    auto memory = reader.open(connection, exported.handle, exported.bytes, soon(), {});
    bytes_of to(bytes.size() - 7);
    const std::vector<ucx_run> runs{
        ucx_run{.from = &memory, .offset = 7, .to = to.data(), .bytes = to.size()}};
    auto read = reader.prepare(runs);
    reader.start(read, 0);
    reader.wait(read, soon(), {});
    CHECK(std::memcmp(to.data(), bytes.data() + 7, to.size()) == 0);
}

TEST_CASE("ucx refuses texts that are garbled, of somebody else, or of another release") {
    ucx::fabric::owner owner{0};
    ucx::fabric::owner other{0};
    ucx::fabric::reader reader{0};
    const auto address = owner.address();
    for (const auto& wrong :
         {std::string{}, std::string{"ucx-address"}, address.substr(1),
          address.substr(0, address.size() - 1), address + "0", std::string(100'000, 'f')}) {
        CHECK_THROWS_AS(static_cast<void>(reader.connect(wrong, soon(), {})),
                        weightwire::protocol_error);
    }
    auto parsed = ucx::parse_address(address);
    REQUIRE(parsed);
    parsed->version = "1.2";
    CHECK_THROWS_WITH_AS(static_cast<void>(reader.connect(ucx::to_text(*parsed), soon(), {})),
                         doctest::Contains("has UCX 1.2, this process"),
                         weightwire::mismatch_error);
    auto connection = reader.connect(address, soon(), {});
    CHECK(connection.alive());
    auto arena = owner.allocate(1000);
    const auto handle = arena.exported().handle;
    const auto refused = [&](const std::string& text, std::uint64_t bytes) {
        CHECK_THROWS_AS(static_cast<void>(reader.open(connection, text, bytes, soon(), {})),
                        weightwire::protocol_error);
    };
    refused("", 1);
    refused(handle.substr(0, handle.size() / 2), 1000);
    refused(address, 1000);
    refused(handle, 1001);
    refused(other.allocate(1000).exported().handle, 1000);
    auto memory = reader.open(connection, handle, 1000, soon(), {});
    CHECK(memory.size() == 1000);
}

TEST_CASE("ucx notices that the process behind an address holds another probe") {
    ucx::fabric::owner owner{0};
    ucx::fabric::reader reader{0};
    auto parsed = ucx::parse_address(owner.address());
    REQUIRE(parsed);
    parsed->id ^= 1U;  // as after a restart that got the same port
    CHECK_THROWS_WITH_AS(static_cast<void>(reader.connect(ucx::to_text(*parsed), soon(), {})),
                         doctest::Contains("trial read"), weightwire::peer_error);
    auto connection = reader.connect(owner.address(), soon(), {});
    CHECK(connection.alive());
}

TEST_CASE("ucx gives up at the deadline and at a stop, and writes nothing afterwards") {
    ucx::fabric::reader reader{0};
    CHECK_THROWS_AS(static_cast<void>(reader.connect("", weightwire::deadline::after(-1s), {})),
                    weightwire::timeout_error);
    ucx::fabric::owner owner{0};
    std::stop_source stopped;
    stopped.request_stop();
    CHECK_THROWS_AS(static_cast<void>(reader.connect(owner.address(), soon(), stopped.get_token())),
                    weightwire::cancelled_error);
    auto arena = owner.allocate(64'000'000);
    std::memset(arena.data(), 1, arena.size());
    auto connection = reader.connect(owner.address(), soon(), {});
    auto memory = reader.open(connection, arena.exported().handle, arena.size(), soon(), {});
    bytes_of to(arena.size());
    const std::vector<ucx_run> runs{ucx_run{.from = &memory, .to = to.data(), .bytes = to.size()}};
    auto read = reader.prepare(runs);
    reader.start(read, 0);
    CHECK_THROWS_AS(reader.wait(read, weightwire::deadline::after(0s), {}),
                    weightwire::timeout_error);
    const auto then = to;
    CHECK(reader.done(read));
    CHECK_FALSE(connection.alive());
    // What was given up costs the connection.
    reader.start(read, 0);
    CHECK_THROWS_WITH_AS(reader.wait(read, soon(), {}), doctest::Contains("connect again"),
                         weightwire::peer_error);
    auto again = reader.connect(owner.address(), soon(), {});
    CHECK(equal_bytes(to, then));
    auto same = reader.open(again, arena.exported().handle, arena.size(), soon(), {});
    const std::vector<ucx_run> fresh{ucx_run{.from = &same, .to = to.data(), .bytes = to.size()}};
    auto second = reader.prepare(fresh);
    reader.start(second, 0);
    CHECK_THROWS_AS(reader.start(second, 0), weightwire::usage_error);
    reader.wait(second, soon(), {});
    CHECK(equal_bytes(to, bytes_of(to.size(), std::byte{1})));
}

TEST_CASE("a ucx owner that ends loses its readers, and ends at once") {
    ucx::fabric::reader reader{0};
    auto owner = std::make_unique<ucx::fabric::owner>(0);
    auto arena = owner->allocate(32'000'000);
    auto connection = reader.connect(owner->address(), soon(), {});
    auto memory = reader.open(connection, arena.exported().handle, arena.size(), soon(), {});
    bytes_of to(arena.size());
    const std::vector<ucx_run> runs{ucx_run{.from = &memory, .to = to.data(), .bytes = to.size()}};
    auto read = reader.prepare(runs);
    reader.start(read, 0);
    owner.reset();
    CHECK_THROWS_AS(reader.wait(read, soon(), {}), weightwire::peer_error);
    CHECK_FALSE(connection.alive());
    CHECK_THROWS_AS(
        static_cast<void>(reader.open(connection, arena.exported().handle, 1, soon(), {})),
        weightwire::peer_error);
}
