// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/sinks/parameter_table.hpp>

using namespace weightwire;
using namespace std::chrono_literals;

namespace {

constexpr int readers = 4;
constexpr weight_version commits = 200;

manifest model() {
    std::vector<param_meta> list{{"embed", dtype::bf16, {64, 32}}};
    for (int layer = 0; layer < 6; ++layer) {
        const auto prefix = "layers." + std::to_string(layer) + ".";
        list.push_back({prefix + "up", dtype::f32, {32, 16}});
        list.push_back({prefix + "down", dtype::f32, {16, 32}});
        list.push_back({prefix + "norm", dtype::f32, {}});
    }
    return manifest{std::move(list)};
}

void write_pattern(std::byte* to, std::size_t size, weight_version version, std::size_t i) {
    const auto key = (version + 1) * 0x9E3779B97F4A7C15U + i;
    for (std::size_t at = 0; at < size; at += 4) {
        const auto word = static_cast<std::uint32_t>(detail::digest_term(at, key));
        std::memcpy(to + at, &word, 4);
    }
}

std::uint64_t expected_digest(weight_version version, std::size_t i, std::size_t size) {
    std::vector<std::byte> bytes(size);
    write_pattern(bytes.data(), size, version, i);
    return digest(bytes);
}

/// Digests whole snapshots until it is stopped. Every tensor of one must carry the pattern of its
/// version, read twice with a pause between, and versions never go back.
struct reader {
    std::uint64_t snapshots = 0;
    std::uint64_t mixes = 0;
    std::uint64_t reversals = 0;
    std::string failure{};

    void run(parameter_table& table, const std::vector<std::vector<std::uint64_t>>& expected,
             const std::stop_token& stop) {
        weight_version last = 0;
        try {
            while (!stop.stop_requested()) {
                const auto held = table.acquire(deadline::after(60s), stop);
                check(held, expected);
                std::this_thread::yield();
                check(held, expected);
                reversals += held.version() < last ? 1U : 0U;
                last = held.version();
                ++snapshots;
            }
        } catch (const cancelled_error&) {
        } catch (const error& problem) {
            failure = problem.what();
        }
    }

    void check(const snapshot& held, const std::vector<std::vector<std::uint64_t>>& expected) {
        for (std::size_t i = 0; i < held.size(); ++i) {
            mixes += digest(held.tensor(i).bytes()) == expected[held.version()][i] ? 0U : 1U;
        }
    }
};

void write_all(std::span<const destination> destinations, weight_version version) {
    for (std::size_t i = 0; i < destinations.size(); ++i) {
        const auto& where = destinations[i].where;
        write_pattern(where.data(), where.byte_size(), version, i);
    }
}

}  // namespace

TEST_CASE("readers beside 200 commits never see a mix, in any mode") {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        parameter_table table{model(), {.mode = mode}};
        const auto& parameters = table.parameters();
        std::vector<std::vector<std::uint64_t>> expected(commits + 1);
        for (weight_version version = 0; version <= commits; ++version) {
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                expected[version].push_back(expected_digest(version, i, parameters[i].byte_size()));
            }
        }
        const auto open = [&](weight_version version) {
            return table.begin({.epoch = 1, .session = version, .version = version}, parameters,
                               deadline::after(60s));
        };
        std::vector<std::vector<std::byte>> first;
        std::vector<named_tensor> loaded;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            auto& bytes = first.emplace_back(parameters[i].byte_size());
            write_pattern(bytes.data(), bytes.size(), 0, i);
            loaded.push_back(
                {parameters[i].name, {bytes.data(), parameters[i].dtype, parameters[i].shape}});
        }
        table.initialize(loaded);

        std::vector<reader> work(readers);
        {
            std::vector<std::jthread> threads;
            for (auto& each : work) {
                threads.emplace_back([&each, &table, &expected](const std::stop_token& stop) {
                    each.run(table, expected, stop);
                });
            }
            for (weight_version version = 1; version <= commits; ++version) {
                // Every fifth session is rolled back first; in_place cannot be.
                if (version % 5 == 0 && mode != commit_mode::in_place) {
                    write_all(open(version), version + 1000);
                    table.prepare(deadline::after(60s));
                    table.exchange(deadline::after(60s));
                    table.rollback();
                }
                write_all(open(version), version);
                table.prepare(deadline::after(60s));
                if (version % 2 == 0) {
                    table.exchange(deadline::after(60s));
                }
                table.commit(version);
                std::this_thread::sleep_for(200us);
            }
        }
        std::uint64_t snapshots = 0;
        for (const auto& each : work) {
            CHECK(each.failure == "");
            CHECK(each.mixes == 0);
            CHECK(each.reversals == 0);
            snapshots += each.snapshots;
        }
        CHECK(snapshots > 0);
        CHECK(table.version() == commits);
        CHECK(table.acquire().version() == commits);
    }
}

TEST_CASE(
    "the same holds for partial sessions: a snapshot mixes layers of committed versions only") {
    parameter_table table{model()};
    const auto& parameters = table.parameters();
    const manifest layer{{{"layers.3.up", dtype::f32, {32, 16}},
                          {"layers.3.down", dtype::f32, {16, 32}},
                          {"layers.3.norm", dtype::f32, {}}}};
    write_all(table.begin({.version = 1}, parameters, deadline::after(60s)), 1);
    table.prepare(deadline::after(60s));
    table.commit(1);
    std::vector<std::uint64_t> rest;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        rest.push_back(expected_digest(1, i, parameters[i].byte_size()));
    }
    std::atomic<std::uint64_t> wrong = 0;
    std::atomic<std::uint64_t> seen = 0;
    {
        std::jthread reading{[&](const std::stop_token& stop) {
            while (!stop.stop_requested()) {
                const auto held = table.acquire();
                for (std::size_t i = 0; i < held.size(); ++i) {
                    const auto at = layer.find(held.name(i));
                    const auto expected =
                        at == manifest::npos || held.version() == 1
                            ? rest[i]
                            : expected_digest(held.version(), at, held.tensor(i).byte_size());
                    wrong += digest(held.tensor(i).bytes()) == expected ? 0U : 1U;
                }
                ++seen;
            }
        }};
        for (weight_version version = 2; version <= commits; ++version) {
            write_all(
                table.begin({.version = version, .partial = true}, layer, deadline::after(60s)),
                version);
            table.prepare(deadline::after(60s));
            table.commit(version);
            std::this_thread::sleep_for(100us);
        }
    }
    CHECK(wrong == 0);
    CHECK(seen > 0);
}
