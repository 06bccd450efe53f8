// SPDX-License-Identifier: Apache-2.0
//
// How long does a round take that moves next to nothing? Start, update of one 64-byte tensor and
// finish, over keep-alive loopback HTTP, to one worker process. Checks every round's bytes.

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/weightwire.hpp>

#include "support/machine.hpp"

namespace {

using namespace std::chrono_literals;
using weightwire::deadline;

const std::vector<weightwire::param_meta> model{{"weight", weightwire::dtype::u8, {64}}};

[[noreturn]] void serve(int port_pipe) {
    weightwire::parameter_table table{model};
    weightwire::worker_engine engine{weightwire::ipc::backend{}, table};
    weightwire::worker_service service{engine};
    weightwire::worker_server server{service, {.port = 0}};
    server.start();
    const auto port = server.port();
    if (::write(port_pipe, &port, sizeof port) != sizeof port) {
        ::_exit(1);
    }
    for (;;) {
        ::pause();
    }
}

double percentile(std::vector<double> samples, double share) {
    const auto rank = static_cast<std::size_t>(share * static_cast<double>(samples.size() - 1));
    std::nth_element(samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(rank),
                     samples.end());
    return samples[rank];
}

void print_row(std::string_view what, const std::vector<double>& seconds) {
    fmt::print("{:<44} {:>8.3f} {:>8.3f} {:>8.3f}\n", what, percentile(seconds, 0.5) * 1e3,
               percentile(seconds, 0.99) * 1e3, percentile(seconds, 1.0) * 1e3);
}

/// Whole rounds through the engine, and the digest that the worker holds after each hundredth.
std::vector<double> rounds(const std::string& url, std::size_t count) {
    weightwire::shm::arena arena{4096};
    const auto tensor = arena.allocate(weightwire::dtype::u8, {64});
    auto engine = weightwire::trainer_init(
        weightwire::ipc::trainer_init_info{}, weightwire::http_sync_client{url},
        weightwire::span_source{{.name = "weight", .tensor = tensor}});
    weightwire::http_sync_client checker{url};
    std::vector<double> seconds;
    for (std::size_t i = 0; i < count; ++i) {
        std::memset(tensor.data(), static_cast<int>(i % 251 + 1), 64);
        const auto begin = deadline::clock::now();
        engine.send_weights();
        seconds.push_back(std::chrono::duration<double>(deadline::clock::now() - begin).count());
        if (i % 100 != 0) {
            continue;
        }
        const std::string_view body = R"({"action":"checksum"})";
        const auto reply =
            checker.request("POST", "/weight_checker", {.bodies = {&body, 1}}, deadline::after(5s));
        const auto wanted = weightwire::digest_text(weightwire::digest(tensor.bytes()));
        if (reply[0].answer.body.find(wanted) == std::string::npos) {
            throw std::runtime_error{"the worker holds other bytes than were sent in round " +
                                     std::to_string(i)};
        }
    }
    engine.close(deadline::after(5s));
    return seconds;
}

/// The floor: as many keep-alive requests a round, answered by the same server, without any
/// session.
std::vector<double> bare(const std::string& url, std::size_t count) {
    weightwire::http_sync_client client{url};
    std::vector<double> seconds;
    for (std::size_t i = 0; i < count; ++i) {
        const auto begin = deadline::clock::now();
        for (int call = 0; call < 3; ++call) {
            if (!client.request("GET", "/health", {}, deadline::after(5s))[0].ok()) {
                throw std::runtime_error{"the server does not answer"};
            }
        }
        seconds.push_back(std::chrono::duration<double>(deadline::clock::now() - begin).count());
    }
    return seconds;
}

}  // namespace

int main(int argc, char** argv) try {
    const std::size_t count = argc > 1 ? std::stoul(argv[1]) : 3000;
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) {
        return 1;
    }
    const auto child = ::fork();
    if (child == 0) {
        serve(ends[1]);
    }
    std::uint16_t port = 0;
    if (::read(ends[0], &port, sizeof port) != sizeof port) {
        return 1;
    }
    const auto url = fmt::format("http://127.0.0.1:{}", port);
    rounds(url, 200);
    const auto whole = rounds(url, count);
    const auto floor = bare(url, count);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    fmt::print("command: benchmarks/http_round {}\nmachine: {}\n\n", count, benchmarks::machine());
    fmt::print("{:<44} {:>8} {:>8} {:>8}\n", "one worker, milliseconds a round", "p50", "p99",
               "max");
    print_row("start, update of 64 bytes, finish", whole);
    print_row("floor: three GET /health", floor);
    fmt::print(
        "ratio of the medians {:.2f}; every hundredth round's bytes were checked at the worker\n",
        percentile(whole, 0.5) / percentile(floor, 0.5));
    return 0;
} catch (const std::exception& failed) {
    fmt::print(stderr, "http_round: {}\n", failed.what());
    return 1;
}
