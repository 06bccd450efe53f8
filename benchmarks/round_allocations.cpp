// SPDX-License-Identifier: Apache-2.0
//
// Does a steady round allocate? Counts every call of the C allocator, on every thread of trainer,
// client, server and worker (all in this process, over real loopback HTTP), from the worker's
// receipt of the update call to the last byte in place. Checks each round's bytes.

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/weightwire.hpp>

#include "support/machine.hpp"

// glibc's own allocator, under the names that stay when malloc is replaced.
extern "C" {
void* __libc_malloc(std::size_t);                 // NOLINT
void* __libc_calloc(std::size_t, std::size_t);    // NOLINT
void* __libc_realloc(void*, std::size_t);         // NOLINT
void* __libc_memalign(std::size_t, std::size_t);  // NOLINT
}

namespace {

std::atomic<bool> watching{false};
std::atomic<std::uint64_t> calls{0};

void note() noexcept {
    if (watching.load(std::memory_order_relaxed)) {
        calls.fetch_add(1, std::memory_order_relaxed);
    }
}

}  // namespace

extern "C" {
void* malloc(std::size_t size) {
    note();
    return __libc_malloc(size);
}
void* calloc(std::size_t count, std::size_t size) {
    note();
    return __libc_calloc(count, size);
}
void* realloc(void* block, std::size_t size) {
    note();
    return __libc_realloc(block, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) {
    note();
    return __libc_memalign(alignment, size);
}
void* memalign(std::size_t alignment, std::size_t size) {
    note();
    return __libc_memalign(alignment, size);
}
int posix_memalign(void** block, std::size_t alignment, std::size_t size) {
    note();
    *block = __libc_memalign(alignment, size);
    return *block == nullptr ? ENOMEM : 0;
}
}

namespace {

using namespace std::chrono_literals;
using namespace weightwire;

constexpr int layers = 40;

std::vector<param_meta> model() {
    std::vector<param_meta> out;
    for (int layer = 0; layer < layers; ++layer) {
        const auto prefix = fmt::format("model.layers.{}.", layer);
        out.push_back({prefix + "weight", dtype::bf16, {256, 1024}});
        out.push_back({prefix + "bias", dtype::bf16, {257}});
    }
    return out;
}

/// A parameter table that says when the last layer is whole.
class watched_table {
public:
    explicit watched_table(const std::vector<param_meta>& parameters) : table_{parameters} {}
    auto begin(const session_info& session, const manifest& parameters, deadline until) {
        whole_ = 0;
        return table_.begin(session, parameters, until);
    }
    void group_complete(std::size_t group) {
        table_.group_complete(group);
        if (++whole_ == layers) {
            watching = false;
        }
    }
    void prepare(deadline until) { table_.prepare(until); }
    void commit(weight_version version) noexcept { table_.commit(version); }
    void rollback() noexcept { table_.rollback(); }
    weight_version version() const noexcept { return table_.version(); }
    bool dirty() const noexcept { return table_.dirty(); }
    auto acquire() { return table_.acquire(); }

private:
    parameter_table table_;
    int whole_ = 0;
};
static_assert(explain_weight_sink<watched_table>());

/// Starts the watch when the update call has arrived.
template <class Service>
struct watched_service {
    Service& service;
    http_response handle(const http_request& request) {
        if (request.path == "/update_weights") {
            watching = true;
        }
        return service.handle(request);
    }
};

/// Allocator calls of each round.
template <class Source>
std::vector<std::uint64_t> rounds(const std::string& url, const ipc::trainer_init_info& info,
                                  Source& source, std::vector<mutable_tensor_view>& weights,
                                  watched_table& table) {
    auto engine = trainer_init(info, http_sync_client{url}, source);
    std::vector<std::uint64_t> counts;
    for (int round = 0; round < 13; ++round) {
        for (const auto& tensor : weights) {
            std::memset(tensor.data(), round + 1, tensor.byte_size());
        }
        calls = 0;
        engine.send_weights();
        counts.push_back(calls);
        const auto snapshot = table.acquire();
        for (std::size_t i = 0; i < weights.size(); ++i) {
            if (std::memcmp(snapshot.tensor(i).data(), weights[i].data(), weights[i].byte_size()) !=
                0) {
                throw std::runtime_error{"the worker holds other bytes than were sent"};
            }
        }
    }
    engine.close(deadline::after(5s));
    return counts;
}

}  // namespace

int main() try {
    watched_table table{model()};
    worker_engine engine{ipc::backend{}, table};
    worker_service service{engine};
    watched_service<decltype(service)> watched{service};
    worker_server server{watched, {.port = 0}};
    server.start();

    shm::arena arena{64U << 20U};
    std::vector<named_tensor> shared;
    std::vector<mutable_tensor_view> views;
    const auto parameters = model();
    for (const auto& parameter : parameters) {
        views.push_back(arena.allocate(parameter.dtype, parameter.shape));
        shared.push_back({parameter.name, views.back()});
    }
    span_source source{shared};
    fmt::print("command: benchmarks/round_allocations\nmachine: {}\n\n", benchmarks::machine());
    fmt::print("{:<28} {}\n", "allocator calls a round", "rounds 1 to 13");
    bool steady = true;
    const auto row = [&](const char* name, const ipc::trainer_init_info& info) {
        const auto counts = rounds(server.url(), info, source, views, table);
        fmt::print("{:<28}", name);
        for (std::size_t i = 0; i < counts.size(); ++i) {
            fmt::print(" {}", counts[i]);
            steady = steady && (i < 2 || counts[i] == 0);
        }
        fmt::print("\n");
    };
    const auto unchanged = ipc::byte_hook{
        [](void*, std::string_view, std::uint64_t, std::span<std::byte>) {}, nullptr};
    row("read in place", {});
    row("through a window, verified", {.verify = true, .transform = unchanged});
    row("packed", {.packed = true, .packed_buffer_size_bytes = 4 << 20});
    server.stop(deadline::after(5s));
    fmt::print("\n{} from the third round on\n", steady ? "none" : "SOME");
    return steady ? 0 : 1;
} catch (const std::exception& failed) {
    fmt::print(stderr, "round_allocations: {}\n", failed.what());
    return 1;
}
