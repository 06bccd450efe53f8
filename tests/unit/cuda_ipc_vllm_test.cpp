// SPDX-License-Identifier: Apache-2.0
// `cuda_ipc` in vLLM's words: the bodies that our trainer writes are what our worker takes from
// vLLM's, so that each is the other's test here; vLLM's own files are tested by interop.

#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

#include <weightwire/wire/vllm_ipc.hpp>
#include <weightwire/wire/vllm_requests.hpp>

#include "../support/cuda_ipc_halves.hpp"

using namespace weightwire;
using namespace tests::cuda_halves;
using tests::host_cuda_ipc_info;
using tests::host_ipc_world;

namespace {

peer_info vllm_peer(std::string version) {
    return {.name = "http://vllm", .session_routes = true, .version = std::move(version)};
}

/// A trainer's half towards a vLLM of `version`, and a worker's half that hears its words.
struct vllm_pair {
    vllm_pair(const weights& of, std::string version, host_cuda_ipc_info info = {},
              bool stable = true)
        : from{of}, half{info}, views{of.views()} {
        peers.push_back(vllm_peer(std::move(version)));
        inits = half.prepare(
            {.parameters = of.parameters,
             .peers = peers,
             .world_size = 2,
             .lifetime = stable ? tensor_lifetime::stable : tensor_lifetime::until_next,
             .stable_tensors =
                 stable ? std::span<const tensor_view>{views} : std::span<const tensor_view>{}});
    }
    /// Form 0 is for the newest servers, 1 for the older ones.
    void open(receiver& worker, std::size_t form) const {
        worker.open({.wire_parameters = inits.front().vllm.at(form).init_info}, in_time(), {});
    }
    void round(std::uint64_t number, receiver& worker, std::size_t form,
               std::span<const mutable_tensor_view> to) {
        from.fill(number);
        views_source source{from.parameters, views};
        round_of<views_source> walk{source, from.parameters};
        auto stream = walk.stream();
        for (std::size_t part = 0; part < half.parts().size(); ++part) {
            half.stage(number, part, stream, in_time(), {});
            half.send(number, part, stream, in_time(), {});
            receive(half.parts()[part].vllm_bodies.at(inits.front().vllm.at(form).update_body),
                    worker, to);
        }
    }
    /// As the worker engine does: parsed, and each name's destination found.
    void receive(const std::string& body, receiver& worker, std::span<const mutable_tensor_view> to,
                 deadline until = in_time()) const {
        const auto request = wire::parse_vllm_update(body);
        for (const auto& update : request.entries) {
            std::vector<param_meta> named;
            std::vector<mutable_tensor_view> places_of_call;
            for (const auto& parameter : update.parameters.parameters()) {
                named.push_back(parameter);
                places_of_call.push_back(to[from.parameters.find(parameter.name)]);
            }
            const manifest list{std::move(named)};
            places landing{places_of_call, coverage{list}};
            update_target target{landing, list, 0, list.size()};
            worker.receive({.extras = update.extras}, target, until, {});
            landing.covered.require_all();
        }
    }

    const weights& from;
    sender half;
    std::vector<tensor_view> views;
    std::vector<peer_info> peers;
    std::vector<transport_init> inits;
};

/// What an update body says of memory.
wire::ipc_handles handles_of(const std::string& body) {
    const auto text = nlohmann::json::parse(body);
    const auto raw =
        wire::decode_base64(text.at("update_info").at("ipc_handles_pickled").get<std::string>())
            .value();
    return wire::ipc_handles_from_pickle({reinterpret_cast<const char*>(raw.data()), raw.size()});
}

std::vector<std::uint64_t> slots_of(std::uint64_t slot) { return {slot}; }

/// Without the dtypes and shapes that vLLM cannot take packed.
manifest plain_model() {
    return manifest{{{"embed", dtype::bf16, {1000, 41}},
                     {"empty", dtype::f32, {0, 5}},
                     {"odd", dtype::u8, {6'537}},
                     {"big", dtype::f64, {131, 70}},
                     {"head", dtype::bf16, {40, 1001}}}};
}

void check_rounds(vllm_pair& both, const weights& to) {
    for (std::size_t form = 0; form < both.inits.front().vllm.size(); ++form) {
        receiver worker{{.global_rank = 1}};
        both.open(worker, form);
        for (std::uint64_t number = 1; number <= 3; ++number) {
            to.fill(99);
            both.round(form * 10 + number, worker, form, to.tensors);
            CHECK(to.differs(form * 10 + number).empty());
        }
    }
}

}  // namespace

TEST_CASE("cuda_ipc, vLLM's words: unpacked, to servers of every era") {
    const auto model = awkward_model();
    const manifest without_pairs{[&] {
        auto list = std::vector<param_meta>{model.parameters().begin(), model.parameters().end()};
        std::erase_if(list, [](const param_meta& each) { return each.name == "pairs"; });
        return list;
    }()};
    const auto from = weights::in_one_allocation(without_pairs);
    const auto to = weights::in_one_allocation(without_pairs);
    for (const auto* version : {"0.18.0", "0.21.0", "0.22.0", "0.25.1", "0.33.0", ""}) {
        vllm_pair both{from, version};
        CHECK(both.half.parts().size() == 1);
        CHECK(both.inits.front().vllm.front().init_info == R"({"packed":false})");
        CHECK(both.inits.front().vllm.back().init_info == "{}");
        check_rounds(both, to);
    }
}

TEST_CASE("cuda_ipc, vLLM's words: packed, one call a buffer, aligned for its consumer") {
    const auto model = plain_model();
    const auto from = weights::in_one_allocation(model);
    const auto to = weights::in_one_allocation(model);
    host_cuda_ipc_info info;
    info.packed = true;
    info.packed_buffer_size_bytes = 90'000;
    for (const bool stable : {true, false}) {
        vllm_pair both{from, "0.25.1", info, stable};
        CHECK(both.half.parts().size() > 2);
        CHECK(both.inits.front().vllm.front().init_info == R"({"packed":true})");
        check_rounds(both, to);
    }
    CHECK(has(failure_of([&] { vllm_pair{from, "0.21.0", info}; }), "takes no packed handles"));
}

TEST_CASE("cuda_ipc, vLLM's words: what cannot be exported makes all of it packed, and says so") {
    const auto model = plain_model();
    const auto from = weights::in_one_allocation(model, "it is memory of a pool");
    const auto to = weights::in_one_allocation(model);
    vllm_pair both{from, "0.25.1"};
    CHECK(has(both.half.description(), "all pass through it, since a peer is vLLM's"));
    CHECK(both.inits.front().vllm.front().init_info == R"({"packed":true})");
    check_rounds(both, to);
    const auto text = failure_of([&] { vllm_pair{from, "0.20.2"}; });
    CHECK(has(text, "[peer http://vllm]"));
    CHECK(has(text, "embed: it is memory of a pool"));
}

TEST_CASE("cuda_ipc, vLLM's words: a scalar packed is an error, or opted in as [1]") {
    const manifest model{{{"scalar", dtype::f32, {}}, {"vector", dtype::f32, {5}}}};
    const auto from = weights::in_one_allocation(model);
    host_cuda_ipc_info info;
    info.packed = true;
    CHECK(has(failure_of([&] { vllm_pair{from, "0.25.1", info}; }), "[tensor scalar]"));
    info.zero_dim_as_one = true;
    vllm_pair both{from, "0.25.1", info};
    CHECK(has(both.half.parts().front().vllm_bodies.front(), R"("shapes":[[1],[5]])"));
}

TEST_CASE("cuda_ipc, vLLM's words: each worker takes its own GPU's entry") {
    const auto model = plain_model();
    const auto zero = weights::in_one_allocation(model);
    const auto one = weights::in_one_allocation(model, {}, {memory_kind::cuda, 1});
    two_ranks ranks{zero, one, {}, {}, {vllm_peer("0.30.0")}};
    ranks.prepare();
    zero.fill(1);
    one.fill(2);
    vllm_pair words{zero, "0.30.0"};  // only for its parsing
    for (const int index : {0, 1}) {
        const auto to = weights::in_one_allocation(model, {}, {memory_kind::cuda, index});
        receiver worker{{.global_rank = 1 + index, .device = index}};
        worker.open({.wire_parameters = ranks.inits.front().vllm.front().init_info}, in_time(), {});
        words.receive(ranks.first.parts().front().vllm_bodies.front(), worker, to.tensors);
        CHECK(to.differs(static_cast<std::uint64_t>(index) + 1).empty());
    }
    receiver elsewhere{{.global_rank = 1, .device = 2}};
    elsewhere.open({.wire_parameters = "{}"}, in_time(), {});
    const auto to = weights::in_one_allocation(model);
    CHECK(has(failure_of([&] {
                  words.receive(ranks.first.parts().front().vllm_bodies.front(), elsewhere,
                                to.tensors);
              }),
              "IPC handle not found for GPU UUID a0000000-0000-0000-0000-000000000002"));
}

TEST_CASE("cuda_ipc, vLLM's words: what a call has opened is closed when it ends") {
    const auto model = plain_model();
    const auto from = weights::in_one_allocation(model);
    vllm_pair both{from, "0.30.0"};
    receiver worker{{.global_rank = 1}};
    both.open(worker, 0);
    const auto to = weights::in_one_allocation(model);
    both.round(1, worker, 0, to.tensors);
    CHECK(has(worker.description(), "0 allocations are open"));
    both.round(2, worker, 0, to.tensors);
    CHECK(to.differs(2).empty());
}

TEST_CASE("cuda_ipc, vLLM's words: torch's counter of an export falls when it was read") {
    const auto model = plain_model();
    const auto from = weights::in_one_allocation(model);
    const auto name = "/torch_" + std::to_string(::getpid()) + "_7_0";
    const int file = ::shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    REQUIRE(file >= 0);
    constexpr std::size_t bytes = 64 + 10'000 * sizeof(std::int64_t);
    REQUIRE(::ftruncate(file, bytes) == 0);
    auto* const memory = static_cast<std::byte*>(
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    auto* const counters = reinterpret_cast<std::int64_t*>(memory + 64);
    vllm_pair both{from, "0.30.0"};
    // Its handles as torch would have made them: each export has a slot.
    auto handles = handles_of(both.half.parts().front().vllm_bodies.front());
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < model.size(); ++i) {
        auto& exported = handles.entries[i].front().second;
        exported.ref_counter = name;
        exported.ref_slot = i + 3;
        counters[i + 3] = 1;
        order.push_back(i);
    }
    const auto body = wire::ipc_update_bodies(model, order, handles).front();
    receiver worker{{.global_rank = 1}};
    both.open(worker, 0);
    const auto to = weights::in_one_allocation(model);
    from.fill(5);
    both.receive(body, worker, to.tensors);
    CHECK(to.differs(5).empty());
    for (std::size_t i = 0; i < model.size(); ++i) {
        CHECK(counters[i + 3] == 0);
    }
    CHECK(counters[0] == 0);
    CHECK(release_torch_counters(name, slots_of(3)) ==
          0);  // a packed buffer is named by many calls
    CHECK(counters[3] == 0);
    // Also of a call that fails: nobody reads them any more.
    for (std::size_t i = 0; i < model.size(); ++i) {
        counters[i + 3] = 1;
    }
    handles.entries[0].front().second.handle.assign(64, '\1');
    CHECK(has(failure_of([&] {
                  both.receive(wire::ipc_update_bodies(model, order, handles).front(), worker,
                               to.tensors);
              }),
              "[tensor embed]"));
    for (std::size_t i = 0; i < model.size(); ++i) {
        CHECK(counters[i + 3] == 0);
    }
    ::munmap(memory, bytes);
    ::close(file);
    ::shm_unlink(name.c_str());
}

TEST_CASE("cuda_ipc, vLLM's words: an event that is not reached costs the deadline and no device") {
    const auto model = plain_model();
    const auto from = weights::in_one_allocation(model);
    vllm_pair both{from, "0.30.0"};
    auto handles = handles_of(both.half.parts().front().vllm_bodies.front());
    auto& exported = handles.entries[3].front().second;
    exported.event_sync = true;
    const std::vector<std::size_t> order{0, 1, 2, 3, 4};
    receiver worker{{.global_rank = 1}};
    both.open(worker, 0);
    const auto to = weights::in_one_allocation(model);
    from.fill(6);
    both.receive(wire::ipc_update_bodies(model, order, handles).front(), worker, to.tensors);
    CHECK(to.differs(6).empty());
    exported.event.front() = std::byte{1};
    const auto said = failure_of([&] {
        both.receive(wire::ipc_update_bodies(model, order, handles).front(), worker, to.tensors,
                     briefly());
    });
    CHECK(has(said, "[tensor big]"));
    CHECK(has(said, "deadline"));
    CHECK_FALSE(worker.lost());
    both.round(7, worker, 0, to.tensors);
    CHECK(to.differs(7).empty());
}

TEST_CASE("cuda_ipc, vLLM's words: no other file than torch's counters is opened") {
    CHECK(release_torch_counters("/another", slots_of(0)) == 0);
    CHECK(release_torch_counters("/torch_../etc/passwd", slots_of(0)) == 0);
    CHECK(release_torch_counters("/torch_1_2_3", slots_of(0)) == 0);  // there is none
    CHECK(release_torch_counters("/torch_1_2_3", slots_of(10'000)) == 0);
    CHECK(release_torch_counters("", slots_of(0)) == 0);
    const auto name = "/torch_" + std::to_string(::getpid()) + "_8_0";
    const int file = ::shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    REQUIRE(file >= 0);
    REQUIRE(::ftruncate(file, 100) == 0);  // too short to be it
    CHECK(release_torch_counters(name, slots_of(1)) == 0);
    ::close(file);
    ::shm_unlink(name.c_str());
}

TEST_CASE("cuda_ipc, vLLM's words: handles that reach past their allocation are refused by name") {
    const auto model = plain_model();
    const auto from = weights::in_one_allocation(model);
    vllm_pair both{from, "0.30.0"};
    receiver worker{{.global_rank = 1}};
    both.open(worker, 0);
    const auto to = weights::in_one_allocation(model);
    auto handles = handles_of(both.half.parts().front().vllm_bodies.front());
    handles.entries[2].front().second.storage_offset = std::uint64_t{1} << 30U;
    const std::vector<std::size_t> order{0, 1, 2, 3, 4};
    const auto said = failure_of([&] {
        both.receive(wire::ipc_update_bodies(model, order, handles).front(), worker, to.tensors);
    });
    CHECK(has(said, "[tensor odd]"));
    CHECK(has(said, "past whose end it reaches"));
    both.round(4, worker, 0, to.tensors);  // and the next round goes well
    CHECK(to.differs(4).empty());
}
