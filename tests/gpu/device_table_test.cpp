// SPDX-License-Identifier: Apache-2.0
// Parameters on a device: the same promises as in host memory, kept by kernels.

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/gpu/kernels/exchange.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/sinks/device_memory.hpp>
#include <weightwire/sinks/parameter_table.hpp>

#include "gpu_support.hpp"

using namespace weightwire;
using namespace std::chrono_literals;
using gpu_support::have_device;

static_assert(WeightSink<device_parameter_table> && HasSnapshots<device_parameter_table>);
static_assert(HasExchange<device_parameter_table> && HasCommitEstimate<device_parameter_table>);
static_assert(HasTensorDigests<device_parameter_table> && HasTensorClear<device_parameter_table>);
static_assert(HasDevice<device_parameter_table>);

namespace {

constexpr commit_mode all_modes[]{commit_mode::flip, commit_mode::copy_in, commit_mode::in_place};
constexpr weightwire::device first_device{memory_kind::cuda, 0};
using strides = mutable_tensor_view::strides_type;

deadline soon() { return deadline::after(20s); }

/// Sizes that are no multiple of anything, one larger than a kernel's piece, one empty.
manifest model() {
    return manifest{{{"layers.0.w", dtype::bf16, {331, 517}},
                     {"layers.0.b", dtype::u8, {13}},
                     {"layers.1.w", dtype::f32, {64, 1024}},
                     {"layers.1.b", dtype::f32, {0}},
                     {"layers.2.w", dtype::u8, {100'003}}}};
}

std::vector<std::byte> pattern(std::uint64_t version, std::size_t i, std::size_t bytes) {
    return gpu_support::random_bytes(bytes, version * 1000 + i);
}

void write(const mutable_tensor_view& to, std::span<const std::byte> bytes) {
    const gpu::stream stream{0};
    std::size_t at = 0;
    for_each_run(to, [&](std::byte* first, std::size_t count) {
        gpu::copy_bytes(first, bytes.data() + at, count, stream);
        at += count;
    });
    stream.synchronize();
}

std::vector<std::byte> read(const tensor_view& from) {
    const gpu::stream stream{0};
    std::vector<std::byte> bytes(from.byte_size());
    std::size_t at = 0;
    for_each_run(from, [&](const std::byte* first, std::size_t count) {
        gpu::copy_bytes(bytes.data() + at, first, count, stream);
        at += count;
    });
    stream.synchronize();
    return bytes;
}

void prepare(device_parameter_table& table, weight_version version) {
    const auto& parameters = table.parameters();
    const auto to =
        table.begin({.epoch = 1, .session = version, .version = version}, parameters, soon());
    for (std::size_t i = 0; i < to.size(); ++i) {
        write(to[i].where, pattern(version, i, parameters[i].byte_size()));
    }
    table.prepare(soon());
}

void update(device_parameter_table& table, weight_version version, bool exchange) {
    prepare(table, version);
    if (exchange) {
        table.exchange(soon());
    }
    table.commit(version);
}

std::vector<std::uint64_t> digests_of(device_parameter_table& table, const snapshot& held) {
    std::vector<tensor_view> tensors;
    for (std::size_t i = 0; i < held.size(); ++i) {
        tensors.push_back(held.tensor(i));
    }
    std::vector<std::uint64_t> found(tensors.size());
    table.tensor_digests(tensors, found, soon(), {});
    return found;
}

/// The bytes and the digests, of one snapshot.
bool holds(device_parameter_table& table, std::uint64_t version) {
    const auto held = table.acquire();
    const auto digests = digests_of(table, held);
    for (std::size_t i = 0; i < held.size(); ++i) {
        const auto expected = pattern(version, i, held.tensor(i).byte_size());
        if (held.version() != version || held.tensor(i).device() != first_device ||
            read(held.tensor(i)) != expected || digests[i] != digest(expected)) {
            return false;
        }
    }
    return true;
}

/// Device memory of a user: the rows of the matrices are parts of longer ones, at odd addresses.
struct user_model {
    std::deque<gpu::device_buffer> memory;
    std::vector<user_parameter> parameters;

    user_model() {
        const auto list = model();
        for (const auto& each : list.parameters()) {
            const bool matrix = each.shape.size() == 2;
            const auto row = matrix ? each.shape[1] + 3 : 1;
            const auto& made =
                memory.emplace_back(0, each.byte_size() + 64 + (matrix ? 6 * 4 * 400 : 0));
            parameters.push_back({each.name,
                                  {made.data() + 4, each.dtype, each.shape,
                                   matrix ? strides{row, 1} : strides{1}, first_device}});
        }
    }
};

}  // namespace

TEST_CASE("a device table commits and rolls back in every mode, with the host's digests") {
    if (!have_device("device table in every mode")) {
        return;
    }
    for (const auto mode : all_modes) {
        CAPTURE(to_string(mode));
        device_parameter_table table{model(), gpu_memory{0}, {.mode = mode}};
        CHECK(table.device() == first_device);
        for (weight_version version = 1; version <= 4; ++version) {
            update(table, version, version % 2 == 0);
            CHECK(holds(table, version));
        }
        prepare(table, 5);
        if (mode != commit_mode::in_place) {
            table.exchange(soon());
        }
        table.rollback();
        CHECK(table.version() == 4);
        if (mode == commit_mode::in_place) {
            CHECK(table.dirty());
            update(table, 6, false);
            CHECK(holds(table, 6));
        } else {
            CHECK(holds(table, 4));
        }
    }
}

TEST_CASE("a device table keeps the user's addresses, strided ones too") {
    if (!have_device("device table over user memory")) {
        return;
    }
    for (const auto mode : {commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        user_model user;
        auto table = device_parameter_table::over(user.parameters, gpu_memory{0}, {.mode = mode});
        for (weight_version version = 1; version <= 3; ++version) {
            update(table, version, version != 1);
            CHECK(holds(table, version));
            const auto held = table.acquire();
            CHECK(held.tensor(0).data() == user.parameters[0].where.data());
        }
    }
    user_model user;
    CHECK_THROWS_AS(static_cast<void>(parameter_table::over(user.parameters)), unsupported_error);
    CHECK_THROWS_AS(static_cast<void>(device_parameter_table::over(user.parameters, gpu_memory{0},
                                                                   {.mode = commit_mode::flip})),
                    unsupported_error);
}

TEST_CASE("an exchange on a device that was late is swapped back") {
    if (!have_device("late exchange on a device")) {
        return;
    }
    device_parameter_table table{model(), gpu_memory{0}, {.mode = commit_mode::copy_in}};
    update(table, 1, true);
    prepare(table, 2);
    CHECK(table.commit_estimate() > 0ns);
    CHECK_THROWS_AS(table.exchange(deadline::after(-1s)), timeout_error);
    // The stop comes while the table's stream is busy: before, during or after the launch.
    for (int i = 0; i < 20; ++i) {
        std::stop_source stop;
        std::jthread late{[&] {
            std::this_thread::sleep_for(std::chrono::microseconds{5 * i});
            stop.request_stop();
        }};
        try {
            table.exchange(soon(), stop.get_token());
            late.join();
            table.rollback();
            prepare(table, 2);
        } catch (const cancelled_error&) {
        }
    }
    table.rollback();
    CHECK(holds(table, 1));
    update(table, 3, true);
    CHECK(holds(table, 3));
}

TEST_CASE("a device table loads version 0 from host and from device memory") {
    if (!have_device("device table loads")) {
        return;
    }
    const auto list = model();
    for (const bool from_device : {false, true}) {
        std::deque<std::vector<std::byte>> host;
        std::deque<gpu::device_buffer> there;
        std::vector<named_tensor> tensors;
        for (std::size_t i = 0; i < list.size(); ++i) {
            const auto& meta = list[i];
            const auto& bytes = host.emplace_back(pattern(0, i, meta.byte_size()));
            const auto* at = bytes.data();
            if (from_device) {
                const auto& made = there.emplace_back(0, std::max<std::size_t>(bytes.size(), 1));
                gpu_support::upload(made, bytes);
                at = made.data();
            }
            tensors.push_back(
                {meta.name,
                 {at, meta.dtype, meta.shape, from_device ? first_device : weightwire::device{}}});
        }
        device_parameter_table table{list, gpu_memory{0}, {.mode = commit_mode::flip}};
        table.initialize(tensors);
        CHECK(holds(table, 0));
        CHECK_FALSE(table.dirty());
    }
}

TEST_CASE("a destination on a device is cleared") {
    if (!have_device("clearing on a device")) {
        return;
    }
    device_parameter_table table{model(), gpu_memory{0}, {.mode = commit_mode::flip}};
    update(table, 1, false);
    const auto to =
        table.begin({.epoch = 1, .session = 2, .version = 2}, table.parameters(), soon());
    for (const auto& each : to) {
        table.clear_tensor(each.where);
    }
    table.prepare(soon());
    table.commit(2);
    const auto held = table.acquire();
    CHECK(read(held.tensor(2)) == std::vector<std::byte>(held.tensor(2).byte_size()));
}

TEST_CASE("digests that nobody waits for are not waited for, and the next ones are right") {
    if (!have_device("late digests on a device")) {
        return;
    }
    device_parameter_table table{model(), gpu_memory{0}, {.mode = commit_mode::flip}};
    update(table, 1, false);
    const auto held = table.acquire();
    const std::vector<tensor_view> tensors{held.tensor(0)};
    std::vector<std::uint64_t> found(1);
    std::stop_source stop;
    stop.request_stop();
    for (int i = 0; i < 8; ++i) {
        try {  // so little work may be done before anybody looks
            table.tensor_digests(tensors, found, deadline::after(-1s), {});
            table.tensor_digests(tensors, found, soon(), stop.get_token());
        } catch (const timeout_error&) {
        } catch (const cancelled_error&) {
        }
    }
    table.tensor_digests(tensors, found, soon(), {});
    CHECK(found[0] == digest(pattern(1, 0, held.tensor(0).byte_size())));
}

TEST_CASE("a reader on the device never sees two versions in 100 flips") {
    if (!have_device("100 flips beside a reader")) {
        return;
    }
    device_parameter_table table{model(), gpu_memory{0}, {.mode = commit_mode::flip}};
    constexpr weight_version versions = 100;
    std::vector<std::vector<std::uint64_t>> expected(versions + 1);
    std::vector<std::vector<std::vector<std::byte>>> bytes(versions + 1);
    for (weight_version v = 1; v <= versions; ++v) {
        for (std::size_t i = 0; i < table.parameters().size(); ++i) {
            bytes[v].push_back(pattern(v, i, table.parameters()[i].byte_size()));
            expected[v].push_back(digest(bytes[v].back()));
        }
    }
    update(table, 1, false);
    std::atomic<int> looked{0};
    std::atomic<int> mixed{0};
    {
        const std::jthread reader{[&](const std::stop_token& stop) {
            while (!stop.stop_requested()) {
                const auto held = table.acquire();
                mixed += digests_of(table, held) == expected[held.version()] ? 0 : 1;
                ++looked;
            }
        }};
        for (weight_version v = 2; v <= versions; ++v) {
            const auto to =
                table.begin({.epoch = 1, .session = v, .version = v}, table.parameters(), soon());
            for (std::size_t i = 0; i < to.size(); ++i) {
                write(to[i].where, bytes[v][i]);
            }
            table.prepare(soon());
            table.commit(v);
        }
    }
    CHECK(looked > 0);
    CHECK(mixed == 0);
    CHECK(holds(table, versions));
}

TEST_CASE("an exchange kernel swaps runs of every length and alignment, and nothing beside them") {
    if (!have_device("exchange of every alignment")) {
        return;
    }
    constexpr std::size_t gap = 160;
    struct pair {
        std::size_t a;
        std::size_t b;
        std::size_t bytes;
    };
    std::vector<pair> pairs;
    std::size_t end = 0;
    const auto add = [&](std::size_t bytes, std::size_t a, std::size_t b) {
        const auto room = (bytes + gap) / 32 * 32;
        pairs.push_back({end + a, end + room + b, bytes});
        end += 2 * room;
    };
    for (std::size_t a = 0; a < 16; ++a) {
        for (std::size_t b = 0; b < 16; ++b) {
            add((7 * a + 5 * b) % 100, a, b);
        }
        add(100'000 + a, a, 3);
        add(65'536, a, a);
    }
    auto bytes = gpu_support::random_bytes(end, 5);
    const gpu::device_buffer memory{0, end};
    gpu_support::upload(memory, bytes);
    std::vector<gpu::exchange_item> items;
    for (const auto& each : pairs) {
        items.push_back({memory.data() + each.a, memory.data() + each.b, each.bytes});
    }
    const gpu::exchange_plan plan{0, items};
    const gpu::stream stream{0};
    plan.launch(stream);
    stream.synchronize();
    const auto before = bytes;
    for (const auto& each : pairs) {
        std::swap_ranges(bytes.data() + each.a, bytes.data() + each.a + each.bytes,
                         bytes.data() + each.b);
    }
    CHECK(gpu_support::download(memory) == bytes);
    plan.launch(stream);
    stream.synchronize();
    CHECK(gpu_support::download(memory) == before);
}
