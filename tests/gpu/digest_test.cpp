// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/gpu/kernels/digest.hpp>
#include <weightwire/gpu/stream.hpp>

#include "gpu_support.hpp"

namespace gpu = weightwire::gpu;

namespace {

struct run {
    std::size_t offset = 0;
    std::size_t bytes = 0;
};

/// Digests all runs of random bytes in one launch, twice, and compares them with the host's.
void require_digests(const std::vector<run>& runs, std::uint64_t seed) {
    std::size_t end = 1;
    for (const run& each : runs) {
        end = std::max(end, each.offset + each.bytes);
    }
    auto bytes = gpu_support::random_bytes(end, seed);
    const gpu::device_buffer memory{0, end};
    std::vector<gpu::digest_item> items;
    for (const run& each : runs) {
        items.push_back({memory.data() + each.offset, each.bytes});
    }
    const gpu::digest_plan plan{0, items};
    const gpu::stream stream{0};
    for (int round = 0; round < 2; ++round) {
        bytes[end / 2] ^= std::byte{1};
        gpu_support::upload(memory, bytes);
        const auto found = plan.run(stream);
        REQUIRE(found.size() == runs.size());
        for (std::size_t i = 0; i < runs.size(); ++i) {
            CAPTURE(runs[i].offset);
            CAPTURE(runs[i].bytes);
            REQUIRE(found[i] ==
                    weightwire::digest(std::span{bytes}.subspan(runs[i].offset, runs[i].bytes)));
        }
    }
}

}  // namespace

TEST_CASE("the device's digest is the host's, for every short length and alignment") {
    if (!gpu_support::have_device("digest of every short length")) {
        return;
    }
    std::vector<run> runs;
    for (std::size_t shift = 0; shift < 16; ++shift) {
        for (std::size_t bytes = 0; bytes < 100; ++bytes) {
            runs.push_back({4096 + 7 * bytes / 16 * 16 + shift, bytes});
        }
    }
    runs.push_back({0, 0});
    require_digests(runs, 1);
}

TEST_CASE("the device's digest is the host's, for large tensors") {
    if (!gpu_support::have_device("digest of large tensors")) {
        return;
    }
    constexpr std::size_t large = std::size_t{16} << 20U;
    require_digests(
        {{0, large}, {3, large}, {8, large + 5}, {13, 32'768}, {16, 32'769}, {5, 98'303}}, 2);
}

TEST_CASE("the digests of 20,000 tensors are one launch") {
    if (!gpu_support::have_device("digests of 20,000 tensors")) {
        return;
    }
    std::mt19937_64 random{3};
    std::vector<run> runs;
    for (std::size_t i = 0; i < 20'000; ++i) {
        runs.push_back({random() % 4'000'000, random() % 9000});
    }
    require_digests(runs, 3);
}
