// SPDX-License-Identifier: Apache-2.0
//
// How fast does a worker read a trainer's memory over UCX on one machine, between two processes,
// measured against one memcpy of the same bytes? A way is a pair of processes with an environment
// of its own; the ways take turns within each round. Every byte is compared after every read.
//
// usage: ucx_pull [megabytes [rounds]]

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/fabrics/ucx/fabric.hpp>

#include "../tests/support/forked.hpp"
#include "support/machine.hpp"
#include "support/timing.hpp"

namespace {

namespace ucx = weightwire::ucx;
using namespace std::chrono_literals;
using weightwire::deadline;

struct way {
    const char* name;
    std::vector<std::pair<const char*, const char*>> environment{};
    std::uint64_t row_bytes = 0;  ///< rows that are laid out with gaps; 0: one run, straight
    bool plain_memcpy = false;
};

std::vector<way> ways() {
    const std::pair tcp{"UCX_TLS", "tcp,self"};
    return {
        {.name = "memcpy, 1 thread", .plain_memcpy = true},
        {.name = "tcp loopback, one run", .environment = {tcp}},
        {.name = "tcp loopback, rows of 4 KiB", .environment = {tcp}, .row_bytes = 4096},
        {.name = "tcp loopback, rows of 96 bytes", .environment = {tcp}, .row_bytes = 96},
        {.name = "tcp loopback, UCX's own segments, one run",
         .environment = {tcp, {"UCX_TCP_TX_SEG_SIZE", "8k"}, {"UCX_TCP_RX_SEG_SIZE", "64k"}}},
        // Told to report lost peers, or it would not be used at all; it reports none, see the docs.
        {.name = "UCX's shared memory (posix), one run",
         .environment = {{"UCX_TLS", "posix,self"}, {"UCX_MM_ERROR_HANDLING", "y"}}},
    };
}

std::vector<std::byte> weights(std::uint64_t bytes) {
    std::mt19937_64 random{1};
    std::vector<std::byte> made(bytes);
    for (std::size_t i = 0; i + 8 <= made.size(); i += 8) {
        const auto word = random();
        std::memcpy(made.data() + i, &word, 8);
    }
    return made;
}

/// What a reader answers for each character that it is sent.
struct answer {
    double seconds = 0;
    bool same = false;
};

void set_environment(const way& how) {
    for (const auto& [name, value] : how.environment) {
        ::setenv(name, value, 1);
    }
}

void own(tests::channel& parent, const way& how, std::uint64_t bytes) {
    set_environment(how);
    ucx::fabric::owner owner{0};
    const auto arena = owner.allocate(bytes);
    const auto model = weights(bytes);
    std::memcpy(arena.data(), model.data(), bytes);
    parent.put_string(owner.address());
    parent.put_string(arena.exported().handle);
    for (;;) {
        owner.serve(parent.take<bool>());
    }
}

void copy(tests::channel& parent, std::uint64_t bytes) {
    const auto from = weights(bytes);
    std::vector<std::byte> to(bytes);
    for (;;) {
        static_cast<void>(parent.take<char>());
        std::ranges::fill(to, std::byte{});
        const auto begin = benchmarks::monotonic::now();
        std::memcpy(to.data(), from.data(), bytes);
        const auto seconds = benchmarks::seconds_since(begin);
        parent.put(answer{seconds, to == from});
    }
}

void read(tests::channel& parent, const way& how, std::uint64_t bytes) {
    set_environment(how);
    const auto address = parent.take_string();
    const auto handle = parent.take_string();
    ucx::fabric::reader reader{0};
    auto connection = reader.connect(address, deadline::after(30s), {});
    const auto memory = reader.open(connection, handle, bytes, deadline::after(30s), {});
    const auto expected = weights(bytes);
    const auto row = how.row_bytes == 0 ? bytes : how.row_bytes;
    const auto count = bytes / row;
    const auto step = count == 1 ? row : row + 32;
    std::vector<std::byte> to(count * step);
    const std::vector<weightwire::remote_run<ucx::memory>> runs{{.from = &memory,
                                                                 .to = to.data(),
                                                                 .bytes = row,
                                                                 .count = count,
                                                                 .from_step = row,
                                                                 .to_step = step}};
    auto plan = reader.prepare(runs);
    parent.put('r');
    for (;;) {
        static_cast<void>(parent.take<char>());
        std::ranges::fill(to, std::byte{});
        const auto begin = benchmarks::monotonic::now();
        reader.start(plan, 0);
        reader.wait(plan, deadline::after(120s), {});
        const auto seconds = benchmarks::seconds_since(begin);
        bool same = true;
        for (std::uint64_t i = 0; i < count; ++i) {
            same = same && std::memcmp(to.data() + i * step, expected.data() + i * row, row) == 0;
        }
        parent.put(answer{seconds, same});
    }
}

struct pair_of_processes {
    std::unique_ptr<tests::forked> owner;
    std::unique_ptr<tests::forked> reader;
    std::vector<double> seconds;
};

}  // namespace

int main(int count, char** arguments) {
    const auto megabytes = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 192;
    const auto rounds = count > 2 ? std::atoi(arguments[2]) : 5;
    const std::uint64_t bytes = megabytes * 1'000'000 / 12'288 * 12'288;
    if (bytes == 0 || rounds < 1) {
        std::fprintf(stderr, "usage: ucx_pull [megabytes [rounds]]\n");
        return 2;
    }
    const auto all = ways();
    std::vector<pair_of_processes> pairs(all.size());
    bool same = true;
    try {
        for (std::size_t i = 0; i < all.size(); ++i) {
            const auto& how = all[i];
            if (how.plain_memcpy) {
                pairs[i].reader = std::make_unique<tests::forked>(
                    [&](tests::channel& parent) { copy(parent, bytes); });
                continue;
            }
            pairs[i].owner = std::make_unique<tests::forked>(
                [&](tests::channel& parent) { own(parent, how, bytes); });
            pairs[i].reader = std::make_unique<tests::forked>(
                [&](tests::channel& parent) { read(parent, how, bytes); });
            pairs[i].reader->to().put_string(pairs[i].owner->to().take_string());
            pairs[i].reader->to().put_string(pairs[i].owner->to().take_string());
            if (pairs[i].reader->to().take<char>() != 'r') {
                throw std::runtime_error{std::string{how.name} + ": " +
                                         pairs[i].reader->to().rest()};
            }
        }
        for (int round = -1; round < rounds; ++round) {  // the first warms up
            for (std::size_t turn = 0; turn < all.size(); ++turn) {
                auto& each = pairs[benchmarks::row_of(round + 1, turn, all.size())];
                if (each.owner) {
                    each.owner->to().put(true);
                }
                each.reader->to().put('g');
                const auto found = each.reader->to().take<answer>();
                if (each.owner) {
                    each.owner->to().put(false);
                }
                same = same && found.same;
                if (round >= 0) {
                    each.seconds.push_back(found.seconds);
                }
            }
        }
    } catch (const std::exception& failed) {
        std::fprintf(stderr, "ucx_pull: %s\n", failed.what());
        return 1;
    }
    std::printf("%s\nUCX %s, %llu bytes, medians of %d rounds\n\n", benchmarks::machine().c_str(),
                ucx::library_version().c_str(), static_cast<unsigned long long>(bytes), rounds);
    std::printf("%-45s %9s %9s %8s %7s\n", "way", "ms", "slowest", "GB/s", "ratio");
    const auto floor = benchmarks::median(pairs.front().seconds);
    for (std::size_t i = 0; i < all.size(); ++i) {
        const auto middle = benchmarks::median(pairs[i].seconds);
        std::printf("%-45s %9.2f %9.2f %8.3f %7.3f\n", all[i].name, 1e3 * middle,
                    1e3 * std::ranges::max(pairs[i].seconds),
                    static_cast<double>(bytes) / middle / 1e9, floor / middle);
    }
    std::printf("\n%s\n",
                same ? "every read brought the same bytes" : "A READ BROUGHT OTHER BYTES");
    return same ? 0 : 1;
}
