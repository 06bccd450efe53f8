// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/core/convert.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/kernels/convert.hpp>
#include <weightwire/gpu/stream.hpp>

#include "../support/random_tensors.hpp"
#include "gpu_support.hpp"

namespace gpu = weightwire::gpu;

namespace {

using weightwire::dtype;

/// The memory of a pair of tensors, on the device.
struct device_pair {
    explicit device_pair(const tests::tensor_pair& host)
        : source{0, host.source.size()}, destination{0, host.destination.size()} {
        gpu_support::upload(source, host.source);
        gpu_support::upload(destination, host.destination);
        const weightwire::device where{weightwire::memory_kind::cuda, 0};
        item.from = {source.data() + (host.from.data() - host.source.data()), host.from.type(),
                     host.from.extents(), host.from.strides(), where};
        item.to = {destination.data() + (host.to.data() - host.destination.data()), host.to.type(),
                   host.to.extents(), host.to.strides(), where};
    }

    gpu::device_buffer source;
    gpu::device_buffer destination;
    gpu::convert_item item;
};

/// Every value of `from` that is one of `values`, as elements of `to`.
template <class To, class From>
std::vector<To> on_device(dtype to, dtype from, const std::vector<From>& values) {
    const gpu::device_buffer source{0, values.size() * sizeof(From)};
    const gpu::device_buffer destination{0, values.size() * sizeof(To)};
    gpu_support::upload(source, std::as_bytes(std::span{values}));
    const weightwire::shape extents{static_cast<std::int64_t>(values.size())};
    const weightwire::device where{weightwire::memory_kind::cuda, 0};
    const std::vector<std::vector<gpu::convert_item>> groups{
        {{.to = {destination.data(), to, extents, where},
          .from = {source.data(), from, extents, where}}}};
    const gpu::stream stream{0};
    const gpu::convert_plan plan{0, groups, stream};
    plan.launch(0, stream);
    stream.synchronize();
    std::vector<To> found(values.size());
    const auto bytes = gpu_support::download(destination);
    std::copy(bytes.begin(), bytes.end(), std::as_writable_bytes(std::span{found}).begin());
    return found;
}

/// The best of several runs, in seconds.
template <class Launch>
double best_time(gpu::stream_ref on, const Launch& launch) {
    double best = std::numeric_limits<double>::infinity();
    for (int run = 0; run < 12; ++run) {
        gpu::event began{0, gpu::event_timing::on};
        gpu::event ended{0, gpu::event_timing::on};
        began.record(on);
        launch();
        ended.record(on);
        ended.synchronize();
        best = std::min(best, gpu::elapsed(began, ended).count());
    }
    return best;
}

/// Prints how long a conversion of one tensor takes beside one copy that reads and writes as many
/// bytes; times are reported, not asserted.
void report_time(const char* name, const weightwire::mutable_tensor_view& to,
                 const weightwire::tensor_view& from, const gpu::device_buffer& spare) {
    const gpu::stream stream{0};
    const std::vector<std::vector<gpu::convert_item>> groups{{{to, from}}};
    const gpu::convert_plan plan{0, groups, stream};
    const double converted = best_time(stream, [&] { plan.launch(0, stream); });
    const std::size_t moved = (from.byte_size() + to.byte_size()) / 2;
    REQUIRE(spare.size() >= 2 * moved);
    const double copied = best_time(stream, [&] {
        gpu::check(cudaMemcpyAsync(spare.data() + moved, spare.data(), moved,
                                   cudaMemcpyDeviceToDevice, stream.native_handle()),
                   "cudaMemcpyAsync");
    });
    std::printf("%s: %.3f ms for %.0f MB read and written, one copy of them %.3f ms, ratio %.2f\n",
                name, converted * 1e3, 2e-6 * static_cast<double>(moved), copied * 1e3,
                copied / converted);
    CHECK(converted > 0);
}

}  // namespace

TEST_CASE(
    "tensors of random types, shapes, strides and alignments arrive, and nothing else is touched") {
    if (!gpu_support::have_device("tensors of random types, shapes and strides")) {
        return;
    }
    tests::random_tensors random{23};
    const gpu::stream stream{0};
    for (int round = 0; round < 40; ++round) {
        CAPTURE(round);
        std::vector<tests::tensor_pair> hosts;
        std::vector<device_pair> devices;
        std::vector<std::vector<gpu::convert_item>> groups(2);
        for (std::size_t i = 0; i < 24; ++i) {
            hosts.push_back(random.next(i % 8 == 0 ? 2'000'000 : 60'000));
            devices.emplace_back(hosts.back());
            groups[i % 2].push_back(devices.back().item);
        }
        const gpu::convert_plan plan{0, groups, stream};
        CHECK(plan.group_count() == 2);
        CHECK(plan.table_bytes() > 0);
        plan.launch(0, stream);
        plan.launch(1, stream);
        stream.synchronize();
        for (std::size_t i = 0; i < hosts.size(); ++i) {
            CAPTURE(weightwire::to_string(hosts[i].from.type()));
            CAPTURE(weightwire::to_string(hosts[i].to.type()));
            CAPTURE(weightwire::to_string(hosts[i].to.extents()));
            const auto found = gpu_support::download(devices[i].destination);
            const auto expected = hosts[i].expected();
            const auto differs = std::ranges::mismatch(found, expected).in1;
            const auto offset =
                differs - found.begin() - (hosts[i].to.data() - hosts[i].destination.data());
            CAPTURE(hosts[i].from.data() - hosts[i].source.data());
            CAPTURE(hosts[i].to.data() - hosts[i].destination.data());
            CAPTURE(offset);
            REQUIRE(differs == found.end());
        }
    }
}

TEST_CASE("a device rounds as the host does: every half, all edges of f32, infinity and NaN") {
    if (!gpu_support::have_device("a device rounds as the host does")) {
        return;
    }
    // Every upper half of an f32, with lower halves around a tie of bf16; f16 ties lie among them.
    std::vector<float> values;
    for (std::uint32_t upper = 0; upper < 0x10000U; ++upper) {
        for (const std::uint32_t lower : {0x0000U, 0x0001U, 0x0FFFU, 0x1000U, 0x1001U, 0x3000U,
                                          0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
            values.push_back(std::bit_cast<float>(upper << 16U | lower));
        }
    }
    const auto f16 = on_device<std::uint16_t>(dtype::f16, dtype::f32, values);
    const auto bf16 = on_device<std::uint16_t>(dtype::bf16, dtype::f32, values);
    const auto f64 = on_device<double>(dtype::f64, dtype::f32, values);
    const auto back = on_device<float>(dtype::f32, dtype::f64, f64);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(values[i])) {
            wrong += std::isnan(weightwire::f32_from_f16(f16[i])) &&
                             std::isnan(weightwire::f32_from_bf16(bf16[i])) && std::isnan(f64[i]) &&
                             std::isnan(back[i])
                         ? 0U
                         : 1U;
        } else {
            wrong += f16[i] == weightwire::f16_from_f32(values[i]) &&
                             bf16[i] == weightwire::bf16_from_f32(values[i]) &&
                             f64[i] == static_cast<double>(values[i]) &&
                             std::bit_cast<std::uint32_t>(back[i]) ==
                                 std::bit_cast<std::uint32_t>(values[i])
                         ? 0U
                         : 1U;
        }
    }
    CHECK(wrong == 0);

    std::vector<std::uint16_t> halves(0x10000);
    for (std::size_t i = 0; i < halves.size(); ++i) {
        halves[i] = static_cast<std::uint16_t>(i);
    }
    const auto from_f16 = on_device<float>(dtype::f32, dtype::f16, halves);
    const auto from_bf16 = on_device<float>(dtype::f32, dtype::bf16, halves);
    const auto same = [](float a, float b) {
        return (std::isnan(a) && std::isnan(b)) ||
               std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
    };
    wrong = 0;
    for (std::size_t i = 0; i < halves.size(); ++i) {
        wrong += same(from_f16[i], weightwire::f32_from_f16(halves[i])) &&
                         same(from_bf16[i], weightwire::f32_from_bf16(halves[i]))
                     ? 0U
                     : 1U;
    }
    CHECK(wrong == 0);
}

TEST_CASE("a plan refuses what it cannot do before anything runs") {
    if (!gpu_support::have_device("a conversion plan refuses")) {
        return;
    }
    const gpu::device_buffer memory{0, 4096};
    const gpu::stream stream{0};
    std::vector<std::vector<gpu::convert_item>> groups(2);
    groups[0].push_back({.to = {memory.data(), dtype::bf16, {16}},
                         .from = {memory.data() + 1024, dtype::f32, {16}}});
    const gpu::convert_plan plan{0, groups, stream};
    CHECK_NOTHROW(plan.launch(1, stream));  // an empty group is no work
    CHECK_THROWS_AS(plan.launch(2, stream), weightwire::usage_error);
    groups[1].push_back({.to = {memory.data(), dtype::i32, {16}},
                         .from = {memory.data() + 1024, dtype::f32, {16}}});
    CHECK_THROWS_AS((gpu::convert_plan{0, groups, stream}), weightwire::unsupported_error);
    stream.synchronize();
}

TEST_CASE("how fast: a cast of f32 to bf16, a transposed matrix, and both, beside one copy") {
    if (!gpu_support::have_device("how fast a conversion is")) {
        return;
    }
    constexpr std::int64_t edge = 16384;
    constexpr auto elements = static_cast<std::size_t>(edge * edge);
    const gpu::device_buffer source{0, elements * 4};
    const gpu::device_buffer destination{0, elements * 4};
    const gpu::device_buffer spare{0, elements * 8};
    gpu::check(cudaMemset(source.data(), 0, source.size()), "cudaMemset");
    gpu::check(cudaMemset(spare.data(), 0, spare.size()), "cudaMemset");
    const weightwire::device where{weightwire::memory_kind::cuda, 0};
    const weightwire::shape square{edge, edge};
    const weightwire::tensor_view::strides_type turned{1, edge};
    using weightwire::mutable_tensor_view;
    using weightwire::tensor_view;
    const mutable_tensor_view to_bf16{destination.data(), dtype::bf16, square, where};
    const mutable_tensor_view to_f32{destination.data(), dtype::f32, square, where};
    report_time("f32 to bf16", to_bf16, tensor_view{source.data(), dtype::f32, square, where},
                spare);
    report_time("f32, half the width of longer rows, to bf16",
                mutable_tensor_view{destination.data(), dtype::bf16, {edge, edge / 2}, where},
                tensor_view{source.data(), dtype::f32, {edge, edge / 2}, {edge, 1}, where}, spare);
    report_time("bf16 transposed", to_bf16,
                tensor_view{source.data(), dtype::bf16, square, turned, where}, spare);
    report_time("f32 transposed", to_f32,
                tensor_view{source.data(), dtype::f32, square, turned, where}, spare);
    report_time("f32 transposed to bf16", to_bf16,
                tensor_view{source.data(), dtype::f32, square, turned, where}, spare);
    report_time("f32 to bf16, from an address that is no multiple of 16",
                mutable_tensor_view{destination.data(), dtype::bf16, {edge * edge - 1}, where},
                tensor_view{source.data() + 4, dtype::f32, {edge * edge - 1}, where}, spare);
    report_time("bf16, every second element", to_bf16,
                tensor_view{source.data(), dtype::bf16, square, {2 * edge, 2}, where}, spare);
}
