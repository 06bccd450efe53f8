// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/kernels/copy.hpp>
#include <weightwire/gpu/kernels/gather.hpp>
#include <weightwire/gpu/kernels/scatter.hpp>
#include <weightwire/gpu/stream.hpp>

#include "gpu_support.hpp"

namespace gpu = weightwire::gpu;

namespace {

constexpr std::byte poison{0xCD};

/// Runs of bytes between two buffers; addresses count from the start of their buffer.
struct layout {
    std::vector<gpu::copy_item> items;
    std::uint64_t source_bytes = 0;
    std::uint64_t destination_bytes = 0;

    /// Places a run behind the others on both sides, `gap` bytes on, both modulo 16 as given.
    void add(std::uint64_t bytes, std::uint64_t source_shift, std::uint64_t destination_shift,
             std::uint64_t gap) {
        const auto place = [gap](std::uint64_t end, std::uint64_t shift) {
            return (end + gap + 15) / 16 * 16 + shift;
        };
        const std::uint64_t from = place(source_bytes, source_shift);
        const std::uint64_t to = place(destination_bytes, destination_shift);
        items.push_back({.source = from, .destination = to, .bytes = bytes});
        // The buffers end with the last run: reading or writing on is an error of its own.
        source_bytes = from + bytes;
        destination_bytes = to + bytes;
    }
};

/// The destination on the host: poison wherever no run lies.
std::vector<std::byte> expected(const layout& runs, const std::vector<std::byte>& source) {
    std::vector<std::byte> bytes(runs.destination_bytes, poison);
    for (const gpu::copy_item& item : runs.items) {
        std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(item.source), item.bytes,
                    bytes.begin() + static_cast<std::ptrdiff_t>(item.destination));
    }
    return bytes;
}

/// Gathers, scatters and copies the runs, in every form, and compares all bytes.
void require_all_copies(const layout& runs, std::uint64_t seed) {
    const auto bytes = gpu_support::random_bytes(runs.source_bytes, seed);
    const auto wanted = expected(runs, bytes);
    const gpu::device_buffer source{0, runs.source_bytes};
    const gpu::device_buffer destination{0, runs.destination_bytes};
    gpu_support::upload(source, bytes);
    const gpu::stream stream{0};
    std::vector<std::vector<gpu::gather_item>> gathered(1);
    std::vector<std::vector<gpu::scatter_item>> scattered(1);
    for (const gpu::copy_item& item : runs.items) {
        gathered[0].push_back({source.data() + item.source, item.destination, item.bytes});
        scattered[0].push_back({destination.data() + item.destination, item.source, item.bytes});
    }
    const auto require_copied = [&](const std::function<void()>& launch) {
        gpu_support::upload(destination, std::vector<std::byte>(runs.destination_bytes, poison));
        launch();
        stream.synchronize();
        const auto found = gpu_support::download(destination);
        const auto differs = std::mismatch(found.begin(), found.end(), wanted.begin());
        CAPTURE(differs.first - found.begin());
        REQUIRE((differs.first == found.end()));
    };
    for (const gpu::copy_form form : gpu_support::forms()) {
        CAPTURE(static_cast<int>(form));
        const gpu::gather gather{0, gathered, form};
        require_copied([&] { gather.launch(0, destination.data(), stream); });
        const gpu::scatter scatter{0, scattered, form};
        require_copied([&] { scatter.launch(0, source.data(), stream); });
    }
}

}  // namespace

TEST_CASE("every pair of alignments and many lengths arrive, and nothing between them is touched") {
    if (!gpu_support::have_device("every pair of alignments")) {
        return;
    }
    for (const std::uint64_t size : {1U, 15U, 16U, 63U, 64U, 65U, 95U, 4096U, 40'001U}) {
        CAPTURE(size);
        layout runs;
        for (std::uint64_t from = 0; from < 16; ++from) {
            for (std::uint64_t to = 0; to < 16; ++to) {
                runs.add(size + (from * 16 + to) % 7, from, to, 5);
            }
        }
        require_all_copies(runs, size);
    }
}

TEST_CASE("tensors of random sizes at random addresses arrive") {
    if (!gpu_support::have_device("tensors of random sizes")) {
        return;
    }
    std::mt19937_64 random{11};
    for (int round = 0; round < 12; ++round) {
        CAPTURE(round);
        layout runs;
        for (std::size_t i = 0; i < 400; ++i) {
            const std::uint64_t limit = std::uint64_t{1} << (random() % 19U);
            runs.add(random() % (limit + 1), random() % 16, random() % 16, random() % 300);
        }
        require_all_copies(runs, static_cast<std::uint64_t>(round));
    }
}

TEST_CASE("one large tensor arrives, aligned and not") {
    if (!gpu_support::have_device("one large tensor")) {
        return;
    }
    for (const std::uint64_t shift : {0U, 1U, 6U, 11U, 12U}) {
        CAPTURE(shift);
        layout runs;
        runs.add((std::uint64_t{48} << 20U) + 77, shift, 0, 0);
        require_all_copies(runs, shift);
    }
}

TEST_CASE("a table of 20,000 tensors is one launch") {
    if (!gpu_support::have_device("a table of 20,000 tensors")) {
        return;
    }
    std::mt19937_64 random{5};
    layout runs;
    for (std::size_t i = 0; i < 20'000; ++i) {
        runs.add(random() % 6000, random() % 16, random() % 16, random() % 64);
    }
    require_all_copies(runs, 3);
}

TEST_CASE("one plan serves buffers that rotate, chunk by chunk") {
    if (!gpu_support::have_device("one plan serves buffers that rotate")) {
        return;
    }
    constexpr std::size_t chunks = 7;
    constexpr std::size_t chunk_bytes = 300'000;
    const auto bytes = gpu_support::random_bytes(chunks * chunk_bytes, 9);
    const gpu::device_buffer source{0, bytes.size()};
    const gpu::device_buffer arrived{0, bytes.size()};
    gpu_support::upload(source, bytes);
    std::vector<std::vector<gpu::gather_item>> out(chunks);
    std::vector<std::vector<gpu::scatter_item>> in(chunks);
    for (std::size_t i = 0; i < chunks; ++i) {
        for (std::size_t at = 0; at < chunk_bytes; at += 1000) {
            const std::size_t place = chunk_bytes - 1000 - at;  // the other way round
            out[i].push_back({source.data() + i * chunk_bytes + at, place, 1000});
            in[i].push_back({arrived.data() + i * chunk_bytes + at, place, 1000});
        }
    }
    const gpu::device_buffer buffers[2] = {{0, chunk_bytes}, {0, chunk_bytes}};
    const gpu::stream stream{0};
    for (const gpu::copy_form form : gpu_support::forms()) {
        const gpu::gather gather{0, out, form};
        const gpu::scatter scatter{0, in, form};
        CHECK(gather.plan().group_count() == chunks);
        CHECK(gather.plan().bytes() == bytes.size());
        CHECK(gather.plan().form() == form);
        gpu_support::upload(arrived, std::vector<std::byte>(bytes.size(), poison));
        for (std::size_t i = 0; i < chunks; ++i) {
            gather.launch(i, buffers[i % 2].data(), stream);
            scatter.launch(i, buffers[i % 2].data(), stream);
        }
        stream.synchronize();
        CHECK((gpu_support::download(arrived) == bytes));
    }
}

TEST_CASE("a launch that cannot be right is refused before it starts") {
    if (!gpu_support::have_device("a launch that cannot be right")) {
        return;
    }
    const gpu::device_buffer buffer{0, 4096};
    std::vector<std::vector<gpu::gather_item>> chunks(2);
    chunks[0].push_back({buffer.data(), 0, 1024});
    const gpu::gather gather{0, chunks};
    const gpu::stream stream{0};
    CHECK_THROWS_AS(gather.launch(2, buffer.data() + 2048, stream), weightwire::usage_error);
    CHECK_THROWS_AS(gather.launch(0, buffer.data() + 2049, stream), weightwire::usage_error);
    CHECK_NOTHROW(gather.launch(1, buffer.data() + 2048, stream));  // an empty chunk is no work
    stream.synchronize();
}

TEST_CASE("the form is chosen by what the device has and what the bytes need") {
    if (!gpu_support::have_device("the form is chosen")) {
        return;
    }
    const gpu::device_buffer buffer{0, 4096};
    std::vector<std::vector<gpu::gather_item>> chunks(1);
    chunks[0].push_back({buffer.data(), 0, 1024});
    CHECK(gpu::gather{0, chunks}.plan().form() == gpu::copy_form::plain);
    chunks[0].push_back({buffer.data() + 1, 1024, 2048});
    CHECK(gpu::gather{0, chunks}.plan().form() == gpu_support::forms().back());
    if (gpu::compute_capability(0) < 90) {
        CHECK_THROWS_AS((gpu::gather{0, chunks, gpu::copy_form::bulk}),
                        weightwire::unsupported_error);
    }
}
