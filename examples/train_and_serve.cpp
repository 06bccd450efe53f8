// SPDX-License-Identifier: Apache-2.0
//
// The whole loop in one file: this process trains, its child serves. Each step the trainer changes
// its weights and sends them; the child's reader never sees a mix.

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/weightwire.hpp>

namespace {

using namespace std::chrono_literals;
using weightwire::dtype;

const std::vector<weightwire::param_meta> model{{"embedding.weight", dtype::f32, {1000, 64}},
                                                {"head.weight", dtype::f32, {64, 64}}};

// --- Inference: a table of parameters, an engine, a server. A real one would read the table in its
// forward pass.
void serve(int port_pipe) {
    weightwire::parameter_table table{model};
    weightwire::worker_engine engine{weightwire::ipc::backend{}, table};
    weightwire::worker_service service{engine};
    weightwire::worker_server server{service, {.port = 0}};
    server.start();
    const auto port = server.port();
    if (::write(port_pipe, &port, sizeof port) != sizeof port) {
        return;
    }
    for (std::uint64_t seen = 0; seen < 5;) {  // inference: each pass reads one whole version
        const auto snapshot = table.acquire();
        if (snapshot.version() == seen) {
            ::usleep(1000);
            continue;
        }
        seen = snapshot.version();
        const auto* const first = reinterpret_cast<const float*>(snapshot.tensor(0).data());
        fmt::print("inference runs version {}: the first weight is {}\n", seen, first[0]);
    }
    server.stop(weightwire::deadline::after(5s));
}

// --- Training: weights in shared memory, so that workers read them where they are.
void train(std::uint16_t port) {
    weightwire::shm::arena arena{1U << 20U};
    std::vector<weightwire::named_tensor> weights;
    std::vector<std::span<float>> values;
    for (const auto& parameter : model) {
        const auto tensor = arena.allocate(parameter.dtype, parameter.shape);
        weights.push_back({parameter.name, tensor});
        values.emplace_back(reinterpret_cast<float*>(tensor.data()),
                            tensor.byte_size() / sizeof(float));
    }
    auto engine = weightwire::trainer_init(
        weightwire::ipc::trainer_init_info{.verify = true},
        weightwire::http_sync_client{fmt::format("http://127.0.0.1:{}", port)},
        weightwire::span_source{weights});
    for (int step = 1; step <= 5; ++step) {
        for (auto& tensor : values) {  // train_step()
            std::fill(tensor.begin(), tensor.end(), static_cast<float>(step) / 10);
        }
        const auto report = engine.send_weights();
        fmt::print("trained step {}, sent version {} in {:.1f} ms\n", step, report.version,
                   report.total_seconds * 1e3);
        ::usleep(20'000);
    }
    engine.close(weightwire::deadline::after(5s));
}

}  // namespace

int main() try {
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) {
        return 1;
    }
    const auto child = ::fork();
    if (child == 0) {
        serve(ends[1]);
        return 0;
    }
    std::uint16_t port = 0;
    if (::read(ends[0], &port, sizeof port) == sizeof port) {
        train(port);
    }
    int status = 1;
    return ::waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
} catch (const std::exception& failed) {
    fmt::print(stderr, "train_and_serve: {}\n", failed.what());
    return 1;
}
