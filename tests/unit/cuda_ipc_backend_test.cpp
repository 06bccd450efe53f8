// SPDX-License-Identifier: Apache-2.0
// Both halves of `cuda_ipc` over shared memory instead of a GPU's: what is read in place, what
// passes through the ring, and what is refused.

#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <weightwire/plan/coverage.hpp>

#include "../support/cuda_ipc_halves.hpp"
#include "../support/forked.hpp"

using namespace weightwire;
using namespace std::chrono_literals;
using namespace tests::cuda_halves;
using tests::host_allocation;
using tests::host_cuda_ipc_info;
using tests::host_ipc_machinery;
using tests::host_ipc_world;

namespace {

/// Runs rounds and compares.
template <class Target = places>
void check_rounds(pair& both, receiver& worker, const weights& to, std::uint64_t first = 1,
                  std::uint64_t count = 3) {
    for (std::uint64_t number = first; number < first + count; ++number) {
        to.fill(99);
        both.round<Target>(number, worker, to.tensors);
        CHECK(to.differs(number).empty());
    }
}

/// A stream of the user's whose work does not end before it is let go.
class held_stream {
public:
    held_stream() : users_{host_ipc_machinery{0}.make_stream()} {
        users_.put([this] {
            while (!go_) {
                std::this_thread::sleep_for(1ms);
            }
        });
    }
    held_stream(const held_stream&) = delete;
    held_stream& operator=(const held_stream&) = delete;
    ~held_stream() { let_go(); }
    void let_go() { go_ = true; }
    [[nodiscard]] void* native_handle() { return users_.native_handle(); }

private:
    std::atomic<bool> go_{false};  // outlives the stream, whose work looks at it
    host_ipc_machinery::stream users_;
};

/// What `pair::open` hands over, changed.
template <class Change>
std::string open_changed(const pair& both, Change change) {
    auto text = nlohmann::json::parse(both.inits.front().native);
    change(text);
    const auto changed = text.dump();
    const auto wire = both.info_.init_message();
    receiver worker{{.global_rank = 1}};
    return failure_of([&] {
        worker.open(
            {.wire_parameters = wire, .transport = changed, .parameters = &both.from.parameters},
            in_time(), {});
    });
}

}  // namespace

TEST_CASE("cuda_ipc: tensors of one allocation are read in place, whatever their number") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    const auto to = weights::in_one_allocation(model);
    pair both{from};
    CHECK(both.half.parts().size() == 1);
    CHECK(both.half.allocated_bytes() == 0);
    CHECK(has(both.half.description(), "7 tensors of " + std::to_string(model.total_bytes()) +
                                           " bytes are read in place from 1 allocations"));
    receiver worker{{.global_rank = 1}};
    both.open(worker);
    check_rounds(both, worker, to);
}

TEST_CASE("cuda_ipc: what is read in place is read in few launches, and tables are made once") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    const auto even = weights::in_one_allocation(model);
    const auto odd = weights::in_one_allocation(model);
    pair both{from};
    receiver worker{{.global_rank = 1}};
    both.open(worker);
    both.round(1, worker, odd.tensors);
    both.round(2, worker, even.tensors);
    const auto plans = host_ipc_world::plans.load();
    const auto launches = host_ipc_world::launches.load();
    const auto tables = worker.table_bytes();
    CHECK(tables > 0);
    for (std::uint64_t number = 3; number <= 8; ++number) {
        both.round(number, worker, number % 2 == 0 ? even.tensors : odd.tensors);
        CHECK((number % 2 == 0 ? even : odd).differs(number).empty());
    }
    CHECK(host_ipc_world::plans == plans);
    CHECK(host_ipc_world::launches == launches + 6);
    CHECK(worker.table_bytes() == tables);
}

TEST_CASE("cuda_ipc: a worker process opens an allocation once and reads it every round") {
    const auto model = awkward_model();
    tests::forked worker{[&](tests::channel& parent) {
        const auto to = weights::in_one_allocation(model);
        receiver half{{.global_rank = 1}};
        const auto transport = parent.take_string();
        half.open({.wire_parameters = R"({"packed":false})",
                   .transport = transport,
                   .parameters = &model},
                  in_time(), {});
        parent.put(host_ipc_world::opened.load());
        for (;;) {
            const auto number = parent.take<std::uint64_t>();
            if (number == 0) {
                break;
            }
            places landing{to.tensors, coverage{model}};
            update_target target{landing, model, 0, model.size()};
            half.receive({.round = number, .count = model.size(), .native = true}, target,
                         in_time(), {});
            parent.put(to.differs(number).empty());
        }
        half.release();
        parent.put(host_ipc_world::mapped.load());
    }};
    const auto from = weights::in_one_allocation(model);
    pair both{from};
    worker.to().put_string(both.inits.front().native);
    CHECK(worker.to().take<std::uint64_t>() == 1);
    for (std::uint64_t number = 1; number <= 5; ++number) {
        from.fill(number);
        worker.to().put(number);
        CHECK(worker.to().take<bool>());
    }
    worker.to().put(std::uint64_t{0});
    CHECK(worker.to().take<std::uint64_t>() == 0);
}

TEST_CASE("cuda_ipc: what cannot be exported passes through the ring, and the reason is told") {
    const auto model = awkward_model();
    const auto to = weights::in_one_allocation(model);
    std::string said;
    SUBCASE("memory of a pool") {
        const auto from = weights::in_one_allocation(model, "it is memory of a pool");
        pair both{from};
        said = both.half.description();
        CHECK(has(said, "embed: it is memory of a pool"));
        receiver worker{{.global_rank = 1}};
        both.open(worker);
        check_rounds(both, worker, to);
    }
    SUBCASE("host memory") {
        const auto from = weights::in_one_allocation(model, {}, {});
        pair both{from};
        said = both.half.description();
        CHECK(has(said, "embed: it is in host memory"));
        receiver worker{{.global_rank = 1}};
        both.open(worker);
        check_rounds(both, worker, to);
    }
    SUBCASE("a source without stable addresses") {
        const auto from = weights::in_one_allocation(model);
        pair both{from, {}, false};
        said = both.half.description();
        CHECK(has(said, "embed: the source does not promise stable addresses"));
        receiver worker{{.global_rank = 1}};
        both.open(worker);
        check_rounds(both, worker, to);
    }
    SUBCASE("another device") {
        const auto from = weights::in_one_allocation(model, {}, {memory_kind::cuda, 1});
        pair both{from};
        said = both.half.description();
        CHECK(has(said, "embed: it is on device 1, this rank exports device 0"));
        receiver worker{{.global_rank = 1}};
        both.open(worker);
        check_rounds(both, worker, to);
    }
    CHECK(has(said, "7 of " + std::to_string(model.total_bytes()) +
                        " bytes pass through a ring of 1 buffers"));
}

TEST_CASE(
    "cuda_ipc: one tensor that cannot be exported does not send the others through the ring") {
    const auto model = awkward_model();
    auto from = weights::in_one_allocation(model);
    const auto& big = model[5];
    from.memory.push_back(
        std::make_unique<host_allocation>(big.byte_size(), "it is an expandable segment"));
    from.tensors[5] = {from.memory.back()->data(), big.dtype, big.shape, on_gpu};
    const auto to = weights::in_one_allocation(model);
    pair both{from};
    const auto said = both.half.description();
    CHECK(has(said, "6 tensors"));
    CHECK(has(said, "1 of " + std::to_string(big.byte_size()) + " bytes pass through a ring"));
    CHECK(has(said, "big: it is an expandable segment"));
    CHECK(both.half.allocated_bytes() >= big.byte_size());
    CHECK(both.half.allocated_bytes() < big.byte_size() + 512);
    receiver worker{{.global_rank = 1}};
    both.open(worker);
    check_rounds(both, worker, to);
}

TEST_CASE("cuda_ipc: packed, calls follow one another through buffers that rotate") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    const auto to = weights::in_one_allocation(model);
    host_cuda_ipc_info info;
    info.packed = true;
    info.packed_buffer_size_bytes = 90'000;
    for (const auto buffers : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3}}) {
        for (const bool stable : {true, false}) {
            info.packed_num_buffers = buffers;
            pair both{from, info, stable};
            CHECK(both.half.parts().size() > 2);
            CHECK(both.half.allocated_bytes() == buffers * 90'112);
            receiver worker{{.global_rank = 1}};
            both.open(worker);
            check_rounds(both, worker, to);
        }
    }
}

TEST_CASE("cuda_ipc: a buffer is filled ahead only where the call under way reads another one") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    host_cuda_ipc_info info;
    info.packed = true;
    info.packed_buffer_size_bytes = 90'000;
    const auto staged_by_send = [&](std::uint64_t buffers) {
        info.packed_num_buffers = buffers;
        pair both{from, info};
        views_source source{model, both.views};
        round_of<views_source> walk{source, model};
        auto stream = walk.stream();
        both.half.stage(1, 0, stream, in_time(), {});
        const auto before = stream.position();
        both.half.send(1, 0, stream, in_time(), {});
        return stream.position() - before;
    };
    CHECK(staged_by_send(1) == 0);
    CHECK(staged_by_send(2) > 0);
}

TEST_CASE("cuda_ipc: packed, a tensor larger than a buffer is an error that says the size") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    host_cuda_ipc_info info;
    info.packed = true;
    info.packed_buffer_size_bytes = 1000;
    const auto text = failure_of([&] { pair{from, info}; });
    CHECK(has(text, "[tensor embed]"));
    CHECK(has(text, "set the buffer size to at least 82000"));
}

TEST_CASE("cuda_ipc: values out of bounds are refused") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    host_cuda_ipc_info none;
    none.packed_num_buffers = 0;
    CHECK_THROWS_AS((pair{from, none}), usage_error);
    host_cuda_ipc_info huge;
    huge.packed_buffer_size_bytes = std::uint64_t{1} << 42U;
    CHECK_THROWS_AS((pair{from, huge}), usage_error);
    host_cuda_ipc_info nowhere;
    nowhere.device = 9;
    CHECK_THROWS_AS((pair{from, nowhere}), unsupported_error);
}

TEST_CASE("cuda_ipc: strided tensors on either side, tied ones and views of an arena") {
    const manifest model{{{"rows", dtype::f32, {6, 10}},
                          {"columns", dtype::f32, {7, 11}},
                          {"tied", dtype::f32, {6, 10}},
                          {"slice", dtype::bf16, {3, 4, 5}}}};
    host_allocation arena{1 << 16U};
    auto* const base = arena.data();
    tensor_view::strides_type wide{20, 1};
    tensor_view::strides_type transposed{1, 7};
    tensor_view::strides_type cube{40, 5, 1};
    weights from{model};
    from.tensors = {{base + 5, dtype::f32, {6, 10}, wide, on_gpu},
                    {base + 2000, dtype::f32, {7, 11}, transposed, on_gpu},
                    {base + 5, dtype::f32, {6, 10}, wide, on_gpu},
                    {base + 4000, dtype::bf16, {3, 4, 5}, cube, on_gpu}};
    host_allocation other{1 << 16U};
    weights to{model};
    tensor_view::strides_type apart{1, 6};
    to.tensors = {{other.data(), dtype::f32, {6, 10}, apart, on_gpu},
                  {other.data() + 1000, dtype::f32, {7, 11}, on_gpu},
                  {other.data() + 2000, dtype::f32, {6, 10}, on_gpu},
                  {other.data() + 3000, dtype::bf16, {3, 4, 5}, on_gpu}};
    host_cuda_ipc_info info;
    for (const bool packed : {false, true}) {
        info.packed = packed;
        pair both{from, info};
        receiver worker{{.global_rank = 1}};
        both.open(worker);
        for (std::uint64_t number = 1; number <= 3; ++number) {
            both.round(number, worker, to.tensors);
            for (std::size_t i = 0; i < 4; ++i) {  // the tied one holds what its memory holds
                std::vector<std::byte> sent;
                std::vector<std::byte> got;
                each_byte(from.tensors[i], [&](std::byte at, std::size_t) { sent.push_back(at); });
                each_byte(to.tensors[i], [&](std::byte at, std::size_t) { got.push_back(at); });
                CHECK(sent == got);
            }
        }
    }
}

TEST_CASE("cuda_ipc: a large transposed matrix is copied element by element, not run by run") {
    const manifest model{{{"turned", dtype::bf16, {300, 500}}, {"plain", dtype::bf16, {64}}}};
    host_allocation memory{1 << 20U};
    host_allocation other{1 << 20U};
    const tensor_view::strides_type turned{1, 300};
    weights from{model};
    from.tensors = {{memory.data(), dtype::bf16, {300, 500}, turned, on_gpu},
                    {memory.data() + 400'000, dtype::bf16, {64}, on_gpu}};
    weights to{model};
    to.tensors = {{other.data(), dtype::bf16, {300, 500}, on_gpu},
                  {other.data() + 400'000, dtype::bf16, {64}, on_gpu}};
    host_cuda_ipc_info info;
    for (const bool packed : {false, true}) {
        info.packed = packed;
        pair both{from, info};
        receiver worker{{.global_rank = 1}};
        both.open(worker);
        check_rounds(both, worker, to);
        CHECK(worker.table_bytes() < 4096);
    }
}

TEST_CASE("cuda_ipc: a destination of another floating-point type is converted on the way") {
    const manifest model{
        {{"master", dtype::f32, {33, 7}}, {"half", dtype::f16, {5}}, {"whole", dtype::i32, {4}}}};
    const auto from = weights::in_one_allocation(model);
    host_allocation other{1 << 12U};
    std::vector<mutable_tensor_view> to{{other.data(), dtype::bf16, {33, 7}, on_gpu},
                                        {other.data() + 1000, dtype::f32, {5}, on_gpu},
                                        {other.data() + 2000, dtype::i32, {4}, on_gpu}};
    pair both{from};
    receiver worker{{.global_rank = 1}};
    both.open(worker);
    for (std::uint64_t number = 1; number <= 3; ++number) {
        both.round(number, worker, to);
        for (std::size_t i = 0; i < 3; ++i) {
            std::vector<std::byte> wanted(to[i].byte_size());
            convert_elements(wanted, to[i].type(),
                             {from.tensors[i].data(), from.tensors[i].byte_size()}, model[i].dtype);
            std::vector<std::byte> got;
            each_byte(to[i], [&](std::byte at, std::size_t) { got.push_back(at); });
            CHECK(got == wanted);
        }
    }
    to[2] = {other.data() + 2000, dtype::f32, {4}, on_gpu};
    const auto text = failure_of([&] { both.round(4, worker, to); });
    CHECK(has(text, "[tensor whole]"));
    CHECK(has(text, "the destination is of float32, the tensor of int32"));
    to[2] = {other.data() + 2000, dtype::i32, {5}, on_gpu};
    CHECK(has(failure_of([&] { both.round(5, worker, to); }), "the destination has 20 bytes"));
}

TEST_CASE("cuda_ipc: destinations in host memory, and ones that exist only around their writes") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    pair both{from};
    receiver worker{{.global_rank = 1}};
    both.open(worker);
    const auto host = weights::in_one_allocation(model, {}, {});
    check_rounds(both, worker, host);
    check_rounds<bounced_places>(both, worker, host, 4);
    const auto near = weights::in_one_allocation(model);
    check_rounds<bounced_places>(both, worker, near, 7);
}

TEST_CASE("cuda_ipc: a destination that is not wanted is left alone, one elsewhere is refused") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    auto to = weights::in_one_allocation(model);
    pair both{from};
    receiver worker{{.global_rank = 1}};
    both.open(worker);
    auto some = to.tensors;
    some[5] = {nullptr, model[5].dtype, model[5].shape};
    to.fill(99);
    both.round(1, worker, some);
    CHECK(to.differs(1) == "big at byte 0");
    some[5] = {to.tensors[5].data(), model[5].dtype, model[5].shape, {memory_kind::cuda, 3}};
    const auto text = failure_of([&] { both.round(2, worker, some); });
    CHECK(has(text, "[tensor big]"));
    CHECK(has(text, "device 3"));
    some[5] = {to.tensors[5].data(), dtype::u8, {5}, on_gpu};
    CHECK(has(failure_of([&] { both.round(3, worker, some); }),
              "the destination has 5 bytes, the tensor 73360"));
}

TEST_CASE("cuda_ipc: a call is not made before the source's stream has come so far") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    for (const bool packed : {false, true}) {
        host_cuda_ipc_info info;
        info.packed = packed;
        pair both{from, info};
        held_stream users;
        views_source source{model, both.views, users.native_handle()};
        {
            round_of<views_source> walk{source, model};
            auto stream = walk.stream();
            CHECK_THROWS_AS(both.half.stage(1, 0, stream, briefly(), {}), timeout_error);
            std::stop_source stop;
            stop.request_stop();
            round_of<views_source> again{source, model};
            auto second = again.stream();
            CHECK_THROWS_AS(both.half.stage(2, 0, second, in_time(), stop.get_token()),
                            cancelled_error);
        }
        users.let_go();
        round_of<views_source> walk{source, model};
        auto stream = walk.stream();
        both.half.stage(3, 0, stream, in_time(), {});
        CHECK(stream.position() > 0);
    }
}

TEST_CASE("cuda_ipc: a stream that hangs costs its deadline, is named, and leaves nothing behind") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    for (const bool packed : {false, true}) {
        host_cuda_ipc_info info;
        info.packed = packed;
        pair both{from, info};
        held_stream users;
        views_source source{model, both.views};
        source.ready_of = [&](std::size_t i) { return i == 3 ? users.native_handle() : nullptr; };
        round_of<views_source> walk{source, model};
        auto stream = walk.stream();
        const auto begin = deadline::clock::now();
        const auto text = failure_of([&] { both.half.stage(1, 0, stream, briefly(), {}); });
        both.half.close(briefly());
        CHECK(deadline::clock::now() - begin < 1s);
        CHECK(has(text, "[tensor odd]"));
        CHECK(has(text, "deadline"));
        users.let_go();
    }
}

TEST_CASE(
    "cuda_ipc: memory that was freed and allocated anew at its address is not sent as before") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    const auto to = weights::in_one_allocation(model);
    pair both{from};
    receiver worker{{.global_rank = 1}};
    both.open(worker);
    check_rounds(both, worker, to, 1, 1);
    auto& all = host_allocation::registry();
    all.known.at(from.memory.front()->data()).id = ++all.next_id;
    const auto text = failure_of([&] { both.round(2, worker, to.tensors); });
    CHECK(has(text, "[tensor embed]"));
    CHECK(has(text, "freed and allocated anew"));
}

TEST_CASE("cuda_ipc: elements of no whole bytes with gaps between them are refused by name") {
    const manifest model{{{"plain", dtype::u8, {8}}, {"six", dtype::f6_e2m3, {4, 8}}}};
    const tensor_view::strides_type turned{1, 4};
    host_allocation memory{4096};
    weights strided{model};
    strided.tensors = {{memory.data(), dtype::u8, {8}, on_gpu},
                       {memory.data() + 100, dtype::f6_e2m3, {4, 8}, turned, on_gpu}};
    CHECK(has(failure_of([&] { pair{strided, {}}; }), "[tensor six]"));
    const auto from = weights::in_one_allocation(model);
    pair both{from};
    receiver worker{{.global_rank = 1}};
    both.open(worker);
    CHECK(has(failure_of([&] { both.round(1, worker, strided.tensors); }), "[tensor six]"));
    const auto to = weights::in_one_allocation(model);
    check_rounds(both, worker, to, 2);
}

TEST_CASE("cuda_ipc: trainer ranks whose rings are cut differently are told so") {
    const auto model = awkward_model();
    const auto zero = weights::in_one_allocation(model);
    const auto one = weights::in_one_allocation(model, {}, {memory_kind::cuda, 1});
    host_cuda_ipc_info info;
    info.packed = true;
    info.packed_buffer_size_bytes = 90'112;
    info.packed_num_buffers = 2;
    auto other = info;
    other.packed_buffer_size_bytes = 180'224;
    other.packed_num_buffers = 1;
    two_ranks ranks{zero, one, info, other};
    ranks.prepare();
    const auto plan = ranks.first.shared_plan();
    CHECK(has(failure_of([&] { ranks.second.adopt_plan(plan); }), "not what rank 0's has"));
}

TEST_CASE("cuda_ipc: a stable source that moves a tensor is an error that names it") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    const auto elsewhere = weights::in_one_allocation(model);
    pair both{from};
    both.views[3] = elsewhere.tensors[3];
    views_source source{model, both.views};
    round_of<views_source> walk{source, model};
    auto stream = walk.stream();
    const auto text = failure_of([&] { both.half.stage(1, 0, stream, in_time(), {}); });
    CHECK(has(text, "[tensor odd]"));
    CHECK(has(text, "stable"));
}

TEST_CASE("cuda_ipc: digests are of the bytes sent, in place and through the ring") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    const auto to = weights::in_one_allocation(model);
    for (const bool packed : {false, true}) {
        host_cuda_ipc_info info;
        info.verify = true;
        info.packed = packed;
        info.packed_buffer_size_bytes = 90'000;
        pair both{from, info};
        receiver worker{{.global_rank = 1}};
        both.open(worker);
        both.round(1, worker, to.tensors);
        const auto digests = both.half.digests();
        REQUIRE(digests.size() == model.size());
        for (std::size_t i = 0; i < model.size(); ++i) {
            std::vector<std::byte> bytes;
            each_byte(from.tensors[i], [&](std::byte at, std::size_t) { bytes.push_back(at); });
            CHECK(digests[i] == digest(bytes));
        }
    }
}

TEST_CASE("cuda_ipc: a worker reads the trainer rank on its own GPU") {
    const auto model = awkward_model();
    const auto zero = weights::in_one_allocation(model);
    const auto one = weights::in_one_allocation(model, {}, {memory_kind::cuda, 1});
    two_ranks ranks{zero, one};
    ranks.prepare();
    ranks.second.adopt_plan(ranks.first.shared_plan());
    CHECK(ranks.second.parts().size() == ranks.first.parts().size());
    zero.fill(1);
    one.fill(2);
    const auto lands = [&](int device_index) {
        const auto to = weights::in_one_allocation(model, {}, {memory_kind::cuda, device_index});
        receiver worker{{.global_rank = 1, .device = device_index}};
        worker.open({.wire_parameters = R"({"packed":false})",
                     .transport = ranks.inits.front().native,
                     .parameters = &model},
                    in_time(), {});
        places landing{to.tensors, coverage{model}};
        update_target target{landing, model, 0, model.size()};
        worker.receive({.round = 1, .count = model.size(), .native = true}, target, in_time(), {});
        CHECK(has(worker.description(), device_index == 2 ? "another GPU" : "this rank's GPU"));
        return to.differs(1).empty() ? 1 : to.differs(2).empty() ? 2 : 0;
    };
    CHECK(lands(0) == 1);
    CHECK(lands(1) == 2);
    CHECK(lands(2) == 1);  // on a GPU without a trainer rank: over the machine's links
}

TEST_CASE("cuda_ipc: trainer ranks that stage different tensors are told so") {
    const auto model = awkward_model();
    const auto zero = weights::in_one_allocation(model);
    const auto one =
        weights::in_one_allocation(model, "it is memory of a pool", {memory_kind::cuda, 1});
    two_ranks ranks{zero, one};
    const auto text = failure_of([&] { ranks.prepare(); });
    CHECK(has(text, "[rank 1]"));
    CHECK(has(text, "[tensor embed]"));
    CHECK(has(text, "packed"));
}

TEST_CASE("cuda_ipc: a message that lies is refused with what it lies in") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    pair both{from};
    const auto place_of = [](nlohmann::json& text, std::size_t i) -> nlohmann::json& {
        return text["exports"][0]["places"][i];
    };
    CHECK(open_changed(both, [](auto&) {}) == "nothing failed");
    auto said = open_changed(both, [&](auto& text) { place_of(text, 0)[1] = 1U << 20U; });
    CHECK(has(said, "[tensor embed]"));
    CHECK(has(said, "byte 1048576 of an allocation of"));
    said = open_changed(both, [&](auto& text) {
        place_of(text, 0)[1] = std::numeric_limits<std::uint64_t>::max();
    });
    CHECK(has(said, "[tensor embed]"));
    said = open_changed(both, [&](auto& text) {
        place_of(text, 0).push_back({std::numeric_limits<std::int64_t>::max(), 1});
    });
    CHECK(has(said, "past whose end it reaches"));
    said = open_changed(both, [&](auto& text) { place_of(text, 0).push_back({-1, 1}); });
    CHECK(has(said, "$.exports[0].places[0]"));
    said = open_changed(both, [&](auto& text) { place_of(text, 0).push_back({1}); });
    CHECK(has(said, "1 strides for 2 dimensions"));
    said = open_changed(both, [&](auto& text) { place_of(text, 0)[0] = 5; });
    CHECK(has(said, "there are 1 allocations, none has index 5"));
    said = open_changed(both, [&](auto& text) { place_of(text, 0) = nullptr; });
    CHECK(has(said, "says nowhere where this tensor lies"));
    said = open_changed(both, [&](auto& text) { text["exports"][0]["places"].erase(0); });
    CHECK(has(said, "expected 8"));
    said =
        open_changed(both, [&](auto& text) { text["exports"][0]["allocations"][0][0] = "QUJD"; });
    CHECK(has(said, "a handle has 64 bytes"));
    said = open_changed(both, [&](auto& text) { text["exports"][0]["allocations"][0][3] = 77; });
    CHECK(has(said, "exported no such memory"));
    said = open_changed(both, [&](auto& text) { text["exports"] = nlohmann::json::array(); });
    CHECK(has(said, "a trainer exports something"));
    said = open_changed(both, [&](auto& text) { text["calls"] = {0, 9}; });
    CHECK(has(said, "a call begins past the last parameter"));
    said = open_changed(both, [&](auto& text) { text["calls"] = {0, 3, 3}; });
    CHECK(has(said, "ascending"));
    said = open_changed(both, [&](auto& text) { text["boot_id"] = "another"; });
    CHECK(has(said, "another machine"));
    said = open_changed(both, [&](auto& text) { text["memory"] = "host"; });
    CHECK(has(said, "reads device memory"));
    said = open_changed(both, [&](auto& text) { text["more"] = 1; });
    CHECK(has(said, "more"));
    said = open_changed(both, [&](auto& text) { text["ring_offsets"] = {0}; });
    CHECK(has(said, "expected none or 8"));
}

TEST_CASE("cuda_ipc: a ring that the message places tensors past is refused") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    host_cuda_ipc_info info;
    info.packed = true;
    pair both{from, info};
    const auto said =
        open_changed(both, [](auto& text) { text["ring_offsets"][0] = std::uint64_t{1} << 40U; });
    CHECK(has(said, "[tensor embed]"));
    CHECK(has(said, "byte 1099511627776 of an allocation of"));
}

TEST_CASE("cuda_ipc: a trainer that is gone at init is told from one that lies") {
    const auto model = awkward_model();
    tests::forked trainer{[&](tests::channel& parent) {
        const auto from = weights::in_one_allocation(model);
        pair both{from};
        parent.put_string(both.inits.front().native);
        static_cast<void>(parent.take<char>());
    }};
    const auto transport = trainer.to().take_string();
    const auto open = [&] {
        receiver worker{{.global_rank = 1}};
        worker.open({.wire_parameters = R"({"packed":false})",
                     .transport = transport,
                     .parameters = &model},
                    in_time(), {});
    };
    open();
    trainer.kill();
    CHECK_THROWS_AS(open(), peer_error);
}

TEST_CASE("cuda_ipc: a receiver gives up at the deadline and the stop, and says when it is lost") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    const auto to = weights::in_one_allocation(model);
    pair both{from};
    receiver worker{{.global_rank = 1, .device = 4}};  // not another test's: a loss stays
    auto far = to.tensors;
    for (std::size_t i = 0; i < far.size(); ++i) {
        far[i] = {far[i].data(), model[i].dtype, model[i].shape, {memory_kind::cuda, 4}};
    }
    both.open(worker);
    places landing{far, coverage{model}};
    update_target target{landing, model, 0, model.size()};
    const update_message message{.round = 1, .count = model.size(), .native = true};
    std::stop_source stop;
    stop.request_stop();
    CHECK_THROWS_AS(worker.receive(message, target, in_time(), stop.get_token()), cancelled_error);
    CHECK_THROWS_AS(worker.receive(message, target, deadline::after(0ms), {}), timeout_error);
    CHECK_FALSE(worker.lost());
    host_ipc_world::stuck = true;
    CHECK_THROWS_AS(worker.receive(message, target, briefly(), {}), timeout_error);
    CHECK(worker.lost());
    host_ipc_world::stuck = false;
    worker.release();
    const auto text = failure_of([&] { both.open(worker); });
    CHECK(has(text, "could not be ended"));
}

TEST_CASE("cuda_ipc: updates that are no call of the plan are refused") {
    const auto model = awkward_model();
    const auto from = weights::in_one_allocation(model);
    const auto to = weights::in_one_allocation(model);
    pair both{from};
    receiver worker{{.global_rank = 1}};
    places landing{to.tensors, coverage{model}};
    update_target target{landing, model, 0, model.size()};
    const auto receive = [&](const update_message& message) {
        worker.receive(message, target, in_time(), {});
    };
    CHECK_THROWS_AS(receive({.round = 1, .count = model.size(), .native = true}), session_error);
    both.open(worker);
    CHECK_THROWS_AS(receive({.round = 1, .part = 1, .count = model.size(), .native = true}),
                    mismatch_error);
    CHECK_THROWS_AS(receive({.round = 1, .first = 1, .count = model.size(), .native = true}),
                    mismatch_error);
    CHECK_THROWS_AS(receive({.round = 0, .count = model.size(), .native = false}), protocol_error);
    update_target half{landing, model, 0, 3};
    CHECK_THROWS_AS(worker.receive({.round = 1, .count = 3, .native = true}, half, in_time(), {}),
                    mismatch_error);
}

TEST_CASE("cuda_ipc: the transport message survives its text") {
    std::mt19937_64 random{7};
    const auto pick = [&](std::uint64_t most) { return random() % (most + 1); };
    for (int times = 0; times < 200; ++times) {
        cuda_ipc::transport_message message;
        const auto parameters = pick(6);
        message.boot_id = std::string(pick(36), 'b');
        for (std::size_t i = 1; i < parameters; ++i) {
            if (pick(2) == 0) {
                message.call_begins.push_back(i);
            }
        }
        const auto ranks = 1 + pick(2);
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            cuda_ipc::memory_export made{
                .gpu = std::string(pick(40), 'a'),
                .owner = {.pid = 1 + static_cast<std::int64_t>(pick(9)), .start_time = random()}};
            const auto count = pick(3);
            for (std::size_t i = 0; i < count; ++i) {
                std::string handle(1 + pick(255), '\0');
                for (auto& byte : handle) {
                    byte = static_cast<char>(random());
                }
                made.allocations.push_back({handle, random(), random(), random()});
            }
            made.ring = count != 0 && pick(1) == 0 ? static_cast<std::uint32_t>(pick(count - 1))
                                                   : cuda_ipc::place::none;
            for (std::size_t i = 0; i < parameters; ++i) {
                cuda_ipc::place where;
                if (count != 0 && pick(3) != 0) {
                    where.allocation = static_cast<std::uint32_t>(pick(count - 1));
                    where.offset = random();
                    where.strides.resize(pick(4));
                    for (auto& stride : where.strides) {
                        stride = static_cast<std::int64_t>(random() >> 1U);
                    }
                }
                made.places.push_back(std::move(where));
            }
            message.exports.push_back(std::move(made));
        }
        if (pick(1) == 0 && parameters != 0) {
            for (std::size_t i = 0; i < parameters; ++i) {
                message.ring_offsets.push_back(
                    pick(1) == 0 ? cuda_ipc::transport_message::not_staged : random() >> 1U);
            }
        }
        CHECK(cuda_ipc::decode_transport_message(cuda_ipc::encode(message), parameters) == message);
    }
}
