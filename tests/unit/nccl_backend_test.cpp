// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/plan/coverage.hpp>

#include "../support/allocations.hpp"
#include "../support/host_nccl.hpp"

namespace {

using namespace weightwire;
using namespace std::chrono_literals;
using tests::host_machinery;
using tests::host_nccl_info;
using tests::host_world;

using sender_type = backend_traits<tests::host_nccl>::sender;
using receiver_type = backend_traits<tests::host_nccl>::receiver;

deadline in_time() { return deadline::after(60s); }
deadline soon() { return deadline::after(200ms); }

/// Odd sizes, scalars, nothing, one dtype that NCCL has not: misaligned in every chunk.
manifest awkward() {
    return manifest{{{"embed", dtype::bf16, {100, 41}},
                     {"odd", dtype::u8, {653}},
                     {"scalar", dtype::f32, {}},
                     {"empty", dtype::f32, {0, 5}},
                     {"flag", dtype::boolean, {1}},
                     {"big", dtype::f64, {131, 70}},
                     {"matrix", dtype::f32, {12, 10}},
                     {"complex", dtype::complex128, {3, 5}},
                     {"head", dtype::bf16, {40, 101}}}};
}

std::byte expected(std::uint64_t round, std::size_t i, std::size_t k) {
    return static_cast<std::byte>((round * 131 + i * 31 + k * 7 + k / 251) & 0xFFU);
}

/// Where the tensors of one side lie.
enum class lay : std::uint8_t {
    device,   ///< contiguous, in what views call the device's memory
    strided,  ///< there, and matrices are columns of a wider one
    host,     ///< in host memory
    mixed,    ///< each in turn
};

weightwire::device where_of(lay how, std::size_t i) {
    const bool host = how == lay::host || (how == lay::mixed && i % 3 == 1);
    return host ? weightwire::device{} : weightwire::device{.kind = memory_kind::cuda, .index = 0};
}

/// Memory for every parameter.
class memory {
public:
    memory(const memory&) = delete;
    memory& operator=(const memory&) = delete;
    memory(const manifest& parameters, lay how) {
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            const auto& parameter = parameters[i];
            const auto& extents = parameter.shape;
            const bool strided =
                (how == lay::strided || (how == lay::mixed && i % 2 == 0)) && extents.size() == 2;
            bytes_.emplace_back(parameter.byte_size() * (strided ? 2 : 1) + 1);
            if (!strided) {
                views_.push_back(
                    {bytes_.back().data(), parameter.dtype, extents, where_of(how, i)});
                continue;
            }
            mutable_tensor_view::strides_type strides{};
            strides[0] = 2 * extents[1];
            strides[1] = 1;
            views_.push_back(
                {bytes_.back().data(), parameter.dtype, extents, strides, where_of(how, i)});
        }
    }
    void fill(std::uint64_t round) {
        for (std::size_t i = 0; i < views_.size(); ++i) {
            std::size_t k = 0;
            for_each_run(views_[i], [&](std::byte* at, std::size_t count) {
                for (std::size_t j = 0; j < count; ++j) {
                    at[j] = expected(round, i, k++);
                }
            });
        }
    }
    [[nodiscard]] std::string differs(std::uint64_t round, const manifest& parameters) const {
        for (std::size_t i = 0; i < views_.size(); ++i) {
            std::size_t k = 0;
            bool same = true;
            for_each_run(views_[i], [&](std::byte* at, std::size_t count) {
                for (std::size_t j = 0; j < count; ++j) {
                    same = same && at[j] == expected(round, i, k++);
                }
            });
            if (!same) {
                return parameters[i].name;
            }
        }
        return {};
    }
    [[nodiscard]] const std::vector<mutable_tensor_view>& views() const { return views_; }
    void poison(std::size_t i) { std::fill(bytes_[i].begin(), bytes_[i].end(), std::byte{0xEE}); }

private:
    std::deque<std::vector<std::byte>> bytes_;
    std::vector<mutable_tensor_view> views_;
};

/// A source over them. Without stable addresses it spoils each tensor once it goes on.
template <tensor_lifetime Lifetime>
struct source_over {
    static constexpr auto lifetime = Lifetime;
    const manifest* parameters;
    memory* held;
    host_machinery::stream* ready = nullptr;

    [[nodiscard]] auto metadata() const { return parameters->parameters(); }
    [[nodiscard]] auto weights() const {
        return std::views::iota(std::size_t{0}, parameters->size()) |
               std::views::transform([this](std::size_t i) {
                   if (Lifetime != tensor_lifetime::stable && ready == nullptr && i > 0) {
                       held->poison(i - 1);
                   }
                   return named_tensor{.name = (*parameters)[i].name,
                                       .tensor = held->views()[i],
                                       .ready_stream = ready};
               });
    }
};

/// A worker's destinations, with coverage; parameter `unwanted` has none.
struct places {
    const memory* held;
    coverage seen;
    std::size_t unwanted = manifest::npos;

    mutable_tensor_view open(std::size_t i, deadline) const {
        return i == unwanted ? mutable_tensor_view{} : held->views()[i];
    }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline) {
        seen.wrote(i, offset, count);
    }
};

/// Trainer and workers in one process, each on its own thread.
class group {
public:
    group(const manifest& list, host_nccl_info info, int workers, bool native = true)
        : parameters{list}, sender{info}, info_{std::move(info)}, workers_{workers} {
        peers.push_back({.name = "http://127.0.0.1:1", .world_size = workers, .native = native});
        for (int i = 0; i < workers; ++i) {
            receivers.emplace_back(
                receiver_context{.local_rank = i, .global_rank = i + 1, .world_size = workers + 1});
        }
    }
    void prepare(tensor_lifetime lifetime, const memory* stable) {
        if (stable != nullptr) {
            stable_.assign(stable->views().begin(), stable->views().end());
        }
        inits = sender.prepare({.parameters = parameters,
                                .peers = peers,
                                .world_size = workers_ + 1,
                                .lifetime = lifetime,
                                .stable_tensors = stable_});
    }
    [[nodiscard]] transport_open init_of(std::size_t form = 0) {
        wire_ = info_.init_message();
        if (peers[0].native) {
            return {
                .wire_parameters = wire_, .transport = inits[0].native, .parameters = &parameters};
        }
        return {.wire_parameters = inits[0].vllm[form].init_info};
    }
    void open(std::size_t form = 0) {
        const auto init = init_of(form);
        std::vector<std::thread> threads;
        for (auto& receiver : receivers) {
            threads.emplace_back([&] { CHECK_NOTHROW(receiver.open(init, in_time(), {})); });
        }
        CHECK_NOTHROW(sender.open(in_time(), {}));
        for (auto& thread : threads) {
            thread.join();
        }
    }
    template <class Source>
    void round(Source& source, std::uint64_t number, std::deque<memory>& to,
               std::size_t unwanted = manifest::npos) {
        std::vector<places> where;
        for (std::size_t i = 0; i < receivers.size(); ++i) {
            where.push_back({&to[i], coverage{parameters}, unwanted});
        }
        round_of<Source> all{source, parameters};
        auto stream = all.stream();
        const auto parts = sender.parts();
        for (std::size_t part = 0; part < parts.size(); ++part) {
            std::vector<std::thread> threads;
            for (std::size_t i = 0; i < receivers.size(); ++i) {
                threads.emplace_back([&, i] {
                    update_target target{where[i], parameters, parts[part].first, parts[part].count,
                                         order_of(part)};
                    CHECK_NOTHROW(receivers[i].receive({.round = number,
                                                        .part = part,
                                                        .first = parts[part].first,
                                                        .count = parts[part].count,
                                                        .native = peers[0].native},
                                                       target, in_time(), {}));
                });
            }
            CHECK_NOTHROW(sender.send(number, part, stream, in_time(), {}));
            for (auto& thread : threads) {
                thread.join();
            }
        }
        CHECK(stream.next() == nullptr);
        for (auto& each : where) {
            CHECK(each.seen.all_whole());
        }
    }

    /// vLLM's updates name their parameters, so that the target has their order.
    std::vector<std::size_t> named;
    manifest parameters;
    std::vector<peer_info> peers;
    sender_type sender;
    std::deque<receiver_type> receivers;
    std::vector<transport_init> inits;

private:
    [[nodiscard]] std::span<const std::size_t> order_of(std::size_t) const { return named; }

    host_nccl_info info_;
    int workers_;
    std::string wire_;
    std::vector<tensor_view> stable_;
};

host_nccl_info packed_info(std::uint64_t bytes, std::uint64_t buffers = 2) {
    host_nccl_info info;
    info.packed_buffer_size_bytes = bytes;
    info.packed_num_buffers = buffers;
    return info;
}
host_nccl_info unpacked_info() {
    host_nccl_info info;
    info.packed = false;
    return info;
}

}  // namespace

TEST_CASE("Every kind of tensor arrives, from every kind of memory to every kind, packed or not") {
    const auto parameters = awkward();
    for (const bool packed : {true, false}) {
        for (const auto from : {lay::device, lay::strided, lay::host, lay::mixed}) {
            for (const auto to : {lay::device, lay::strided, lay::host, lay::mixed}) {
                CAPTURE(packed);
                CAPTURE(static_cast<int>(from));
                CAPTURE(static_cast<int>(to));
                group all{parameters, packed ? packed_info(9000) : unpacked_info(), 2};
                memory weights{parameters, from};
                source_over<tensor_lifetime::stable> source{&parameters, &weights};
                std::deque<memory> landing;
                landing.emplace_back(parameters, to);
                landing.emplace_back(parameters, lay::device);
                all.prepare(tensor_lifetime::stable, &weights);
                all.open();
                for (std::uint64_t round = 1; round <= 3; ++round) {
                    weights.fill(round);
                    all.round(source, round, landing);
                    CHECK(landing[0].differs(round, parameters).empty());
                    CHECK(landing[1].differs(round, parameters).empty());
                }
            }
        }
    }
}

TEST_CASE("A source may take its memory back as soon as it is asked for the next tensor") {
    const auto parameters = awkward();
    for (const bool packed : {true, false}) {
        for (const auto from : {lay::device, lay::strided, lay::host, lay::mixed}) {
            CAPTURE(packed);
            CAPTURE(static_cast<int>(from));
            group all{parameters, packed ? packed_info(9000) : unpacked_info(), 1};
            memory weights{parameters, from};
            source_over<tensor_lifetime::until_next> source{&parameters, &weights};
            std::deque<memory> landing;
            landing.emplace_back(parameters, lay::device);
            all.prepare(tensor_lifetime::until_next, nullptr);
            all.open();
            for (std::uint64_t round = 1; round <= 2; ++round) {
                weights.fill(round);
                all.round(source, round, landing);
                CHECK(landing[0].differs(round, parameters).empty());
            }
        }
    }
}

TEST_CASE("Work that a source has queued before a tensor is waited for, and its later work waits") {
    const auto parameters = awkward();
    for (const bool packed : {true, false}) {
        for (const auto from : {lay::device, lay::host}) {
            CAPTURE(packed);
            CAPTURE(static_cast<int>(from));
            host_machinery::stream ready;
            group all{parameters, packed ? packed_info(9000) : unpacked_info(), 1};
            memory weights{parameters, from};
            memory next{parameters, lay::device};
            source_over<tensor_lifetime::until_next> source{&parameters, &weights, &ready};
            std::deque<memory> landing;
            landing.emplace_back(parameters, lay::device);
            all.prepare(tensor_lifetime::until_next, nullptr);
            all.open();
            for (std::uint64_t round = 1; round <= 2; ++round) {
                next.fill(round);
                for (std::size_t i = 0; i < parameters.size(); ++i) {
                    ready.give_copy(weights.views()[i].data(), next.views()[i].data(),
                                    parameters[i].byte_size());
                }
                all.round(source, round, landing);
                CHECK(landing[0].differs(round, parameters).empty());
            }
        }
    }
}

TEST_CASE("A reordered list of stable tensors waits for the work that makes them, in any memory") {
    // The odd bytes would misalign what follows, so that the wire order is another.
    const auto parameters = manifest{{{"a", dtype::u8, {653}},
                                      {"b", dtype::bf16, {100, 41}},
                                      {"c", dtype::f32, {7}},
                                      {"d", dtype::bf16, {40, 101}}}};
    for (const auto from : {lay::device, lay::host, lay::mixed}) {
        CAPTURE(static_cast<int>(from));
        host_machinery::stream ready;
        group all{parameters, packed_info(9000), 1, false};
        memory weights{parameters, from};
        memory next{parameters, lay::device};
        source_over<tensor_lifetime::stable> source{&parameters, &weights, &ready};
        std::deque<memory> landing;
        landing.emplace_back(parameters, lay::device);
        all.prepare(tensor_lifetime::stable, &weights);
        all.open();
        all.named = {2, 1, 3, 0};
        for (std::uint64_t round = 1; round <= 2; ++round) {
            next.fill(round);
            host_machinery::gate work;
            ready.give_gate(work);
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                auto from_run = next.views()[i].data();
                for_each_run(weights.views()[i], [&](std::byte* at, std::size_t bytes) {
                    ready.give_copy(at, from_run, bytes);
                    from_run += bytes;
                });
            }
            std::thread producer{[&] {
                std::this_thread::sleep_for(50ms);
                work.open();
            }};
            all.round(source, round, landing);
            producer.join();
            CHECK(landing[0].differs(round, parameters).empty());
        }
    }
}

TEST_CASE("Memory that a user's work still holds up is freed once that work has ended") {
    const auto parameters = awkward();
    host_machinery::stream ready;
    host_machinery::gate work;
    const auto before = host_world::held_bytes.load();
    {
        group all{parameters, packed_info(9000), 1};
        memory weights{parameters, lay::device};
        source_over<tensor_lifetime::stable> source{&parameters, &weights, &ready};
        all.prepare(tensor_lifetime::stable, &weights);
        all.open();
        const auto held = all.sender.allocated_bytes();
        ready.give_gate(work);
        {
            round_of<decltype(source)> tensors{source, parameters};
            auto stream = tensors.stream();
            CHECK_THROWS_AS(all.sender.send(1, 0, stream, soon(), {}), timeout_error);
        }
        all.receivers.clear();
        CHECK(host_world::held_bytes == before + held);
        // The next transfer does not wait for it.
        group other{parameters, packed_info(9000), 1};
        other.prepare(tensor_lifetime::stable, &weights);
        CHECK(host_world::held_bytes == before + 2 * held);
        work.open();
        while (!ready.idle()) {
            std::this_thread::sleep_for(1ms);
        }
        // What waited for the user's stream ends now; whichever preparation finds it so frees it.
        const auto until = in_time();
        while (host_world::held_bytes != before + held && !until.expired()) {
            other.prepare(tensor_lifetime::stable, &weights);
        }
        CHECK(host_world::held_bytes == before + held);
    }
    CHECK(host_world::held_bytes == before);
}

TEST_CASE("After an abort that did not return the device takes no part again in this process") {
    constexpr int device = 3;  // the mark stays: of no other test
    const auto parameters = manifest{{{"a", dtype::bf16, {10, 10}}}};
    auto info = packed_info(9000);
    info.device = device;
    const auto before = host_world::held_bytes.load();
    std::uint64_t held = 0;
    {
        group all{parameters, info, 1};
        memory weights{parameters, lay::device};
        source_over<tensor_lifetime::until_next> source{&parameters, &weights};
        all.prepare(tensor_lifetime::until_next, nullptr);
        all.open();
        held = all.sender.allocated_bytes();
        host_world::stuck_device = device;
        round_of<decltype(source)> tensors{source, parameters};
        auto stream = tensors.stream();
        CHECK_THROWS_AS(all.sender.send(1, 0, stream, soon(), {}), timeout_error);
        host_world::stuck_device = -1;
        CHECK_THROWS_WITH_AS(all.prepare(tensor_lifetime::until_next, nullptr),
                             doctest::Contains("restart this process"), resource_error);
        // Another device does, and what the lost group may use is not freed.
        group other{parameters, packed_info(9000), 1};
        other.prepare(tensor_lifetime::until_next, nullptr);
        other.open();
    }
    CHECK(host_world::held_bytes == before + held);
}

TEST_CASE("What cannot be sent is found before anybody waits for it") {
    const auto parameters =
        manifest{{{"whole", dtype::bf16, {5000, 3}}, {"scales", dtype::f8_e4m3fn, {5000, 3}}}};
    SUBCASE("a type that this NCCL has not, unpacked towards vLLM") {
        const auto restore = host_world::nccl_version;
        host_world::nccl_version = 22309;
        group all{parameters, unpacked_info(), 1, false};
        CHECK_THROWS_WITH_AS(all.prepare(tensor_lifetime::until_next, nullptr),
                             doctest::Contains("[tensor scales]"), unsupported_error);
        group packed{parameters, packed_info(9000), 1, false};
        CHECK_NOTHROW(packed.prepare(tensor_lifetime::until_next, nullptr));
        group native{parameters, unpacked_info(), 1};
        CHECK_NOTHROW(native.prepare(tensor_lifetime::until_next, nullptr));
        host_world::nccl_version = restore;
        group newer{parameters, unpacked_info(), 1, false};
        CHECK_NOTHROW(newer.prepare(tensor_lifetime::until_next, nullptr));
    }
    SUBCASE("a tensor of another GPU in thousands of pieces") {
        std::vector<std::byte> bytes(5000 * 6);
        for (const bool packed : {true, false}) {
            for (const int gpu : {0, 1}) {
                const weightwire::device where{.kind = memory_kind::cuda, .index = gpu};
                tensor_view::strides_type strides{};
                strides[0] = 6;
                strides[1] = 1;
                const std::vector<tensor_view> stable{
                    {bytes.data(), dtype::bf16, {5000, 3}, where},
                    {bytes.data(), dtype::f8_e4m3fn, {5000, 3}, strides, where}};
                sender_type sender{packed ? packed_info(9000) : unpacked_info()};
                const std::vector<peer_info> peers{{.name = "http://127.0.0.1:1"}};
                const sender_context context{.parameters = parameters,
                                             .peers = peers,
                                             .world_size = 2,
                                             .lifetime = tensor_lifetime::stable,
                                             .stable_tensors = stable};
                if (gpu == 0) {  // ours: one gather, however many pieces
                    CHECK_NOTHROW(static_cast<void>(sender.prepare(context)));
                } else {
                    CHECK_THROWS_WITH_AS(static_cast<void>(sender.prepare(context)),
                                         doctest::Contains("[tensor scales]"), unsupported_error);
                }
            }
        }
    }
}

TEST_CASE("What a sink does not want is received and dropped") {
    const auto parameters = awkward();
    for (const bool packed : {true, false}) {
        group all{parameters, packed ? packed_info(9000) : unpacked_info(), 1};
        memory weights{parameters, lay::device};
        source_over<tensor_lifetime::stable> source{&parameters, &weights};
        std::deque<memory> landing;
        landing.emplace_back(parameters, lay::device);
        all.prepare(tensor_lifetime::stable, &weights);
        all.open();
        weights.fill(1);
        all.round(source, 1, landing, 5);
        CHECK(landing[0].differs(1, parameters) == "big");
    }
}

TEST_CASE("The memory that is promised before the first round is the memory that is used") {
    const auto parameters = awkward();
    for (const std::uint64_t buffers : {1U, 2U, 3U}) {
        group all{parameters, packed_info(9000, buffers), 1};
        memory weights{parameters, lay::device};
        source_over<tensor_lifetime::stable> source{&parameters, &weights};
        std::deque<memory> flips[2];
        flips[0].emplace_back(parameters, lay::device);
        flips[1].emplace_back(parameters, lay::device);
        all.prepare(tensor_lifetime::stable, &weights);
        const auto promised = all.sender.allocated_bytes();
        const auto tables = all.sender.table_bytes();
        const plan::broadcast_plan plan{parameters,
                                        {.packed = true, .buffer_bytes = 9000, .buffers = buffers}};
        std::uint64_t sum = 0;
        for (const auto bytes : plan.buffer_bytes()) {
            sum += bytes;
        }
        CHECK(promised == sum);
        CHECK(tables != 0);
        const auto told = all.sender.description();
        CHECK(told.find("buffers " + std::to_string(promised) + " bytes") != std::string::npos);
        CHECK(told.find("tables " + std::to_string(tables) + " bytes") != std::string::npos);
        all.open();
        CHECK(all.receivers[0].allocated_bytes() == sum);
        std::uint64_t made = 0;
        for (std::uint64_t round = 1; round <= 5; ++round) {
            weights.fill(round);
            if (round == 3) {
                made = host_world::buffers + host_world::pinned;
            }
            all.round(source, round, flips[round % 2]);
            CHECK(flips[round % 2][0].differs(round, parameters).empty());
        }
        // A sink that flips between two sets of addresses has seen both.
        CHECK(host_world::buffers + host_world::pinned == made);
        CHECK(all.sender.allocated_bytes() == promised);
        CHECK(all.sender.table_bytes() == tables);
        CHECK(all.receivers[0].allocated_bytes() == sum);
    }
}

namespace {

/// Real names are longer than what a string holds without allocating.
manifest with_long_names(const manifest& parameters) {
    std::vector<param_meta> list(parameters.parameters().begin(), parameters.parameters().end());
    for (auto& each : list) {
        each.name = "model.layers.0.self_attn." + each.name;
    }
    return manifest{std::move(list)};
}

/// Allocations of the two halves in one round.
struct allocations {
    std::uint64_t sending = 0;
    std::uint64_t receiving = 0;
};

template <class Source>
allocations count_round(group& all, Source& source, std::uint64_t round, const memory& landing) {
    allocations counted;
    places to{&landing, coverage{all.parameters}};
    round_of<Source> tensors{source, all.parameters};
    auto stream = tensors.stream();
    std::thread worker{[&] {
        update_target target{to, all.parameters, 0, all.parameters.size()};
        const auto until = in_time();
        const weightwire_tests::allocation_watch watch;
        all.receivers[0].receive({.round = round, .count = all.parameters.size(), .native = true},
                                 target, until, {});
        counted.receiving = watch.count();
    }};
    const auto until = in_time();
    const weightwire_tests::allocation_watch watch;
    all.sender.send(round, 0, stream, until, {});
    counted.sending = watch.count();
    worker.join();
    return counted;
}

template <tensor_lifetime Lifetime>
void expect_no_allocation(bool packed, lay where) {
    const auto parameters = with_long_names(awkward());
    group all{parameters, packed ? packed_info(9000) : unpacked_info(), 1};
    memory weights{parameters, where};
    memory landing{parameters, where};
    source_over<Lifetime> source{&parameters, &weights};
    all.prepare(Lifetime, Lifetime == tensor_lifetime::stable ? &weights : nullptr);
    all.open();
    for (std::uint64_t round = 1; round <= 4; ++round) {
        weights.fill(round);
        const auto counted = count_round(all, source, round, landing);
        if (round > 2) {
            CHECK(counted.sending == 0);
            CHECK(counted.receiving == 0);
        }
        CHECK(landing.differs(round, parameters).empty());
    }
}

}  // namespace

TEST_CASE("From the third round on neither half allocates" *
          doctest::skip(!weightwire_tests::counts_allocations)) {
    for (const bool packed : {true, false}) {
        for (const auto where : {lay::device, lay::strided, lay::host, lay::mixed}) {
            CAPTURE(packed);
            CAPTURE(static_cast<int>(where));
            expect_no_allocation<tensor_lifetime::stable>(packed, where);
            expect_no_allocation<tensor_lifetime::until_next>(packed, where);
        }
    }
}

TEST_CASE("A stable source that moved a tensor is refused, by name") {
    const auto parameters = awkward();
    group all{parameters, packed_info(9000), 1};
    memory weights{parameters, lay::device};
    memory others{parameters, lay::device};
    source_over<tensor_lifetime::stable> source{&parameters, &others};
    all.prepare(tensor_lifetime::stable, &weights);
    all.open();
    round_of<decltype(source)> tensors{source, parameters};
    auto stream = tensors.stream();
    CHECK_THROWS_WITH_AS(all.sender.send(1, 0, stream, in_time(), {}),
                         doctest::Contains("[tensor embed]"), data_error);
    // The group is gone: nothing waits for the rest of the round.
    CHECK_THROWS_AS(all.sender.send(2, 0, stream, in_time(), {}), usage_error);
    places to{&others, coverage{parameters}};
    update_target target{to, parameters, 0, parameters.size()};
    CHECK_THROWS_AS(
        all.receivers[0].receive({.round = 1, .count = parameters.size(), .native = true}, target,
                                 in_time(), {}),
        peer_error);
}

TEST_CASE("A tensor in too many pieces on the device is an error that names it") {
    const manifest parameters{{{"columns", dtype::u8, {5000, 2}}}};
    std::vector<std::byte> bytes(5000 * 4);
    mutable_tensor_view::strides_type strides{};
    strides[0] = 4;
    strides[1] = 2;
    const mutable_tensor_view view{
        bytes.data(), dtype::u8, {5000, 2}, strides, {.kind = memory_kind::cuda, .index = 0}};
    const error_context where{.tensor = "columns"};
    std::size_t runs = 0;
    nccl::detail::each_byte_run(view, 10'000, where, [&](std::byte*, std::uint64_t) { ++runs; });
    CHECK(runs == 10'000);
    CHECK_THROWS_WITH_AS(
        nccl::detail::each_byte_run(view, 9'999, where, [](std::byte*, std::uint64_t) {}),
        doctest::Contains("columns"), unsupported_error);
}

TEST_CASE("vLLM's forms, both ways to meet, packed at init and in the update") {
    const auto parameters = manifest{{{"a", dtype::u8, {653}},
                                      {"b", dtype::bf16, {100, 41}},
                                      {"c", dtype::f32, {7}},
                                      {"d", dtype::bf16, {40, 101}}}};
    for (const bool packed : {true, false}) {
        for (std::size_t form = 0; form < 3; ++form) {
            CAPTURE(packed);
            CAPTURE(form);
            group all{parameters, packed ? packed_info(9000) : unpacked_info(), 1, false};
            memory weights{parameters, lay::device};
            source_over<tensor_lifetime::stable> source{&parameters, &weights};
            std::deque<memory> landing;
            landing.emplace_back(parameters, lay::device);
            all.prepare(tensor_lifetime::stable, &weights);
            REQUIRE(all.inits[0].vllm.size() == 3);
            all.open(form);
            REQUIRE(all.sender.parts().size() == 1);
            CHECK(all.sender.parts()[0].vllm_bodies.size() == 2);
            // The odd bytes would misalign what follows: item sizes descend on the wire.
            all.named = packed ? std::vector<std::size_t>{2, 1, 3, 0}
                               : std::vector<std::size_t>{0, 1, 2, 3};
            std::vector<std::pair<std::string, wire_value>> extras;
            if (form == 2) {
                extras = {{"packed", packed},
                          {"packed_buffer_size_bytes", std::int64_t{9000}},
                          {"packed_num_buffers", std::int64_t{2}}};
            }
            for (std::uint64_t round = 1; round <= 3; ++round) {
                weights.fill(round);
                places to{&landing[0], coverage{parameters}};
                update_target target{to, parameters, 0, 0, all.named};
                round_of<decltype(source)> tensors{source, parameters};
                auto stream = tensors.stream();
                std::thread worker{[&] {
                    CHECK_NOTHROW(
                        all.receivers[0].receive({.extras = extras}, target, in_time(), {}));
                }};
                CHECK_NOTHROW(all.sender.send(round, 0, stream, in_time(), {}));
                worker.join();
                CHECK(landing[0].differs(round, parameters).empty());
                CHECK(to.seen.all_whole());
            }
        }
    }
}

TEST_CASE("A worker with another NCCL or other settings refuses before it waits") {
    const auto parameters = awkward();
    group all{parameters, packed_info(9000), 1};
    all.prepare(tensor_lifetime::until_next, nullptr);
    const auto init = all.init_of();
    host_world::nccl_version = 22707;
    CHECK_THROWS_WITH_AS(all.receivers[0].open(init, in_time(), {}), doctest::Contains("2.28.9"),
                         mismatch_error);
    host_world::nccl_version = 22809;
    ::setenv("NCCL_P2P_LEVEL", "NVL", 1);
    CHECK_THROWS_WITH_AS(all.receivers[0].open(init, in_time(), {}),
                         doctest::Contains("NCCL_P2P_LEVEL"), mismatch_error);
    ::unsetenv("NCCL_P2P_LEVEL");
}

TEST_CASE("Neither half waits beyond its deadline or its stop") {
    const auto parameters = awkward();
    SUBCASE("the trainer, when nobody joins") {
        group all{parameters, packed_info(9000), 1};
        all.prepare(tensor_lifetime::until_next, nullptr);
        CHECK_THROWS_AS(all.sender.open(soon(), {}), timeout_error);
        all.prepare(tensor_lifetime::until_next, nullptr);
        std::stop_source stop;
        std::thread stopper{[&] {
            std::this_thread::sleep_for(50ms);
            stop.request_stop();
        }};
        CHECK_THROWS_AS(all.sender.open(in_time(), stop.get_token()), cancelled_error);
        stopper.join();
        // And then it works.
        all.prepare(tensor_lifetime::until_next, nullptr);
        all.open();
    }
    SUBCASE("a worker, when the trainer sends nothing") {
        group all{parameters, packed_info(9000), 1};
        all.prepare(tensor_lifetime::until_next, nullptr);
        all.open();
        memory landing{parameters, lay::device};
        places to{&landing, coverage{parameters}};
        update_target target{to, parameters, 0, parameters.size()};
        CHECK_THROWS_AS(
            all.receivers[0].receive({.round = 1, .count = parameters.size(), .native = true},
                                     target, soon(), {}),
            timeout_error);
        CHECK_THROWS_AS(
            all.receivers[0].receive({.round = 2, .count = parameters.size(), .native = true},
                                     target, soon(), {}),
            session_error);
    }
    SUBCASE("a trainer, when a worker takes no part") {
        group all{parameters, packed_info(9000), 1};
        memory weights{parameters, lay::device};
        source_over<tensor_lifetime::stable> source{&parameters, &weights};
        all.prepare(tensor_lifetime::stable, &weights);
        all.open();
        round_of<decltype(source)> tensors{source, parameters};
        auto stream = tensors.stream();
        CHECK_THROWS_AS(all.sender.send(1, 0, stream, soon(), {}), timeout_error);
    }
    SUBCASE("a worker, when the store never listens") {
        receiver_type receiver{{.global_rank = 1, .world_size = 2}};
        CHECK_THROWS_AS(
            receiver.open({.wire_parameters = R"({"master_address":"127.0.0.1","master_port":1,)"
                                              R"("rank_offset":1,"world_size":2})"},
                          soon(), {}),
            timeout_error);
    }
}

TEST_CASE("An update that is no call of the plan is refused") {
    const auto parameters = awkward();
    group all{parameters, packed_info(9000), 1};
    all.prepare(tensor_lifetime::until_next, nullptr);
    memory landing{parameters, lay::device};
    places to{&landing, coverage{parameters}};
    for (const auto& message : {update_message{.round = 1, .part = 1, .count = 9, .native = true},
                                update_message{.round = 1, .first = 1, .count = 8, .native = true},
                                update_message{.round = 1, .count = 8, .native = true},
                                update_message{.count = 9, .native = false}}) {
        all.prepare(tensor_lifetime::until_next, nullptr);
        all.open();
        update_target target{to, parameters, message.first, message.count};
        CHECK_THROWS_AS(all.receivers[0].receive(message, target, in_time(), {}), error);
    }
}

TEST_CASE("A taken port is an error when the store was asked for, and does without it when not") {
    const auto parameters = manifest{{{"a", dtype::bf16, {10, 10}}}};
    weightwire::rendezvous::tcp_store_server holder;
    auto info = packed_info(9000);
    info.master_port = holder.port();
    info.meeting = nccl::rendezvous::store;
    group all{parameters, info, 1, false};
    CHECK_THROWS_AS(all.prepare(tensor_lifetime::until_next, nullptr), resource_error);
    info.meeting = nccl::rendezvous::automatic;
    group other{parameters, info, 1, false};
    other.prepare(tensor_lifetime::until_next, nullptr);
    CHECK(other.inits[0].vllm.size() == 1);
    CHECK(other.inits[0].missing_form.find("which was left out: ") != std::string::npos);
    CHECK(other.sender.description().find("no store") != std::string::npos);
    info.master_port = 0;
    group whole{parameters, info, 1, false};
    whole.prepare(tensor_lifetime::until_next, nullptr);
    CHECK(whole.inits[0].missing_form.empty());
}

TEST_CASE("A store that remote servers could not reach is left out, and why is said to them") {
    const auto parameters = manifest{{{"a", dtype::bf16, {10, 10}}}};
    group all{parameters, packed_info(9000), 1, false};
    all.peers[0].name = "http://worker.example:8000";
    all.prepare(tensor_lifetime::until_next, nullptr);
    CHECK(all.inits[0].vllm.size() == 1);
    CHECK(all.inits[0].missing_form.find("master_address") != std::string::npos);
    CHECK(all.sender.store_port() == 0);
}

TEST_CASE("A rank that comes twice, or with another world size, is an error on every side") {
    const auto parameters = awkward();
    struct wrong_rank {
        receiver_context first;
        receiver_context second;
    };
    for (const auto& wrong : {wrong_rank{{.global_rank = 1, .world_size = 3},
                                         {.local_rank = 1, .global_rank = 1, .world_size = 3}},
                              wrong_rank{{.global_rank = 1, .world_size = 3},
                                         {.local_rank = 1, .global_rank = 2, .world_size = 4}}}) {
        group all{parameters, packed_info(9000), 2};
        all.prepare(tensor_lifetime::until_next, nullptr);
        const auto init = all.init_of();
        std::deque<receiver_type> receivers;
        receivers.emplace_back(wrong.first);
        receivers.emplace_back(wrong.second);
        std::atomic<int> failed{0};
        std::vector<std::thread> threads;
        for (auto& receiver : receivers) {
            threads.emplace_back([&] {
                try {
                    receiver.open(init, deadline::after(1s), {});
                } catch (const error&) {
                    ++failed;
                }
            });
        }
        CHECK_THROWS_AS(all.sender.open(deadline::after(1s), {}), error);
        for (auto& thread : threads) {
            thread.join();
        }
        CHECK(failed == 2);
        // A fresh id, and the same receivers in their right places.
        all.prepare(tensor_lifetime::until_next, nullptr);
        all.open();
    }
}

TEST_CASE(
    "A store that sends garbage or nothing, or holds no id, is an error within the deadline") {
    const auto init_at = [](std::uint16_t port) {
        return R"({"master_address":"127.0.0.1","rank_offset":1,"world_size":2,"master_port":)" +
               std::to_string(port) + "}";
    };
    receiver_type receiver{{.global_rank = 1, .world_size = 2}};
    SUBCASE("no id") {
        weightwire::rendezvous::tcp_store_server store;
        const auto init = init_at(store.port());
        CHECK_THROWS_AS(receiver.open({.wire_parameters = init}, soon(), {}), timeout_error);
    }
    SUBCASE("something that is no id") {
        weightwire::rendezvous::tcp_store_server store;
        auto client =
            weightwire::rendezvous::tcp_store_client::connect("127.0.0.1", store.port(), in_time());
        client.set("/broadcast_from/0/0", "\x80\x04K\x2A.", in_time());
        const auto init = init_at(store.port());
        CHECK_THROWS_AS(receiver.open({.wire_parameters = init}, in_time(), {}), protocol_error);
    }
    SUBCASE("a server that says nothing, or what is no store's answer") {
        for (const bool talks : {false, true}) {
            const tests::host_socket listener{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
            sockaddr_in address{};
            address.sin_family = AF_INET;
            address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            socklen_t size = sizeof address;
            auto* const raw = reinterpret_cast<sockaddr*>(&address);
            REQUIRE(::bind(listener.fd(), raw, size) == 0);
            REQUIRE(::listen(listener.fd(), 4) == 0);
            REQUIRE(::getsockname(listener.fd(), raw, &size) == 0);
            std::atomic<bool> over{false};
            std::thread server{[&] {
                std::vector<tests::host_socket> held;
                while (!over) {
                    pollfd ready{.fd = listener.fd(), .events = POLLIN, .revents = 0};
                    if (::poll(&ready, 1, 10) == 1) {
                        held.emplace_back(::accept(listener.fd(), nullptr, nullptr));
                        if (talks) {
                            const std::string_view words = "HTTP/1.1 400 Bad Request\r\n\r\n";
                            static_cast<void>(
                                ::send(held.back().fd(), words.data(), words.size(), MSG_NOSIGNAL));
                        }
                    }
                }
            }};
            const auto init = init_at(ntohs(address.sin_port));
            CHECK_THROWS_AS(receiver.open({.wire_parameters = init}, soon(), {}), error);
            over = true;
            server.join();
        }
    }
}

TEST_CASE("Clients of the store that send garbage or nothing do not disturb the meeting") {
    const auto parameters = manifest{{{"a", dtype::bf16, {10, 10}}}};
    auto info = packed_info(9000);
    info.meeting = nccl::rendezvous::store;
    group all{parameters, info, 1, false};
    memory weights{parameters, lay::device};
    all.prepare(tensor_lifetime::until_next, nullptr);
    REQUIRE(all.inits[0].vllm.size() == 2);
    std::vector<tests::host_socket> strangers;
    for (const std::string_view words : {"", "GET / HTTP/1.1\r\n\r\n"}) {
        strangers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        address.sin_port = htons(all.sender.store_port());
        REQUIRE(::connect(strangers.back().fd(), reinterpret_cast<sockaddr*>(&address),
                          sizeof address) == 0);
        static_cast<void>(::send(strangers.back().fd(), words.data(), words.size(), MSG_NOSIGNAL));
    }
    all.open();
}
