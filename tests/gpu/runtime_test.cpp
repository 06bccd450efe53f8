// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>

#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/kernel.hpp>
#include <weightwire/gpu/pinned_buffer.hpp>
#include <weightwire/gpu/stream.hpp>

#include "gpu_support.hpp"

namespace gpu = weightwire::gpu;

static_assert(std::is_convertible_v<cudaStream_t, gpu::stream_ref>);
static_assert(std::is_convertible_v<const gpu::stream&, gpu::stream_ref>);
static_assert(!std::is_constructible_v<gpu::stream_ref, int>);
static_assert(!std::is_constructible_v<gpu::stream_ref, std::nullptr_t>);
static_assert(!std::is_copy_constructible_v<gpu::stream>);
static_assert(std::is_nothrow_move_constructible_v<gpu::device_buffer>);
static_assert(std::is_nothrow_move_assignable_v<gpu::pinned_buffer>);

TEST_CASE("a failed call of CUDA throws with the runtime's code and words, and is reported once") {
    try {
        gpu::check(cudaErrorInvalidValue, "cudaExample");
        FAIL("it passed");
    } catch (const weightwire::resource_error& failure) {
        CHECK(failure.context().operation == "cudaExample");
        CHECK(failure.context().native_code == static_cast<int>(cudaErrorInvalidValue));
        CHECK(failure.context().native_text.find("cudaErrorInvalidValue") != std::string::npos);
    }
    CHECK_THROWS_AS(gpu::check(cudaErrorNoDevice, "cudaExample"), weightwire::unsupported_error);
    CHECK_NOTHROW(gpu::check(cudaSuccess, "cudaExample"));
}

TEST_CASE("too large an allocation is an error that leaves the device usable") {
    if (!gpu_support::have_device("too large an allocation")) {
        return;
    }
    CHECK_THROWS_AS((gpu::device_buffer{0, std::size_t{1} << 50U}), weightwire::resource_error);
    CHECK(cudaGetLastError() == cudaSuccess);
    const gpu::device_buffer buffer{0, 1024};
    CHECK(buffer.data() != nullptr);
}

TEST_CASE("a device that does not exist is an error, and the current one stays") {
    if (!gpu_support::have_device("a device that does not exist")) {
        return;
    }
    const int before = gpu::current_device();
    CHECK_THROWS_AS(gpu::device_guard{gpu::device_count()}, weightwire::resource_error);
    CHECK_THROWS_AS(gpu::stream{gpu::device_count()}, weightwire::resource_error);
    CHECK(gpu::current_device() == before);
}

TEST_CASE("streams, events and buffers order a copy to the device and back") {
    if (!gpu_support::have_device("streams, events and buffers")) {
        return;
    }
    constexpr std::size_t bytes = std::size_t{1} << 20U;
    gpu::pinned_buffer there{bytes};
    gpu::pinned_buffer back{bytes};
    const auto pattern = gpu_support::random_bytes(bytes, 1);
    std::copy(pattern.begin(), pattern.end(), there.data());
    const gpu::device_buffer on_device{0, bytes};
    const gpu::stream first{0};
    const gpu::stream second{0};
    gpu::event began{0, gpu::event_timing::on};
    gpu::event arrived{0, gpu::event_timing::on};
    began.record(first);
    gpu::check(cudaMemcpyAsync(on_device.data(), there.data(), bytes, cudaMemcpyHostToDevice,
                               first.native_handle()),
               "cudaMemcpyAsync");
    arrived.record(first);
    arrived.make_wait(second);
    gpu::check(cudaMemcpyAsync(back.data(), on_device.data(), bytes, cudaMemcpyDeviceToHost,
                               second.native_handle()),
               "cudaMemcpyAsync");
    second.synchronize();
    CHECK(second.is_idle());
    CHECK(arrived.is_done());
    CHECK(gpu::elapsed(began, arrived).count() > 0);
    CHECK(std::equal(pattern.begin(), pattern.end(), back.data()));
}

TEST_CASE("owners move: one owner at a time, and an empty one ends harmlessly") {
    if (!gpu_support::have_device("owners move")) {
        return;
    }
    gpu::device_buffer buffer{0, 64};
    std::byte* const address = buffer.data();
    gpu::device_buffer taken{std::move(buffer)};
    CHECK(taken.data() == address);
    taken = gpu::device_buffer{};
    CHECK(taken.data() == nullptr);
    gpu::stream stream{0};
    const cudaStream_t native = stream.release();
    CHECK(stream.native_handle() == nullptr);
    CHECK(gpu::stream::from_native(native).native_handle() == native);
}

TEST_CASE("a kernel is compiled once a process and gets its arguments by type") {
    if (!gpu_support::have_device("a kernel is compiled once")) {
        return;
    }
    const gpu::kernel_source source{
        .name = "sum",
        .text =
            "extern \"C\" __global__ void sum(unsigned* to, unsigned a, unsigned long long b) "
            "{ *to = a + (unsigned)b; }",
        .options = {}};
    const gpu::kernel kernel = gpu::load_kernel(source, 0);
    CHECK(gpu::load_kernel(source, 0).native_handle() == kernel.native_handle());
    const gpu::device_buffer result{0, sizeof(unsigned int)};
    const gpu::stream stream{0};
    kernel.launch(stream, {}, reinterpret_cast<unsigned int*>(result.data()), 40U, 2ULL);
    stream.synchronize();
    CHECK(gpu_support::download(result)[0] == std::byte{42});
    CHECK_THROWS_AS(kernel.launch(stream, {.threads = 4096},
                                  reinterpret_cast<unsigned int*>(result.data()), 1U, 1ULL),
                    weightwire::resource_error);
    CHECK(cudaGetLastError() == cudaSuccess);
}
