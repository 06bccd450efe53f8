// SPDX-License-Identifier: Apache-2.0
//
// Serves a checkpoint's weights and takes new ones from a weightwire trainer: the worker's half,
// without a model.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/sources/safetensors.hpp>
#include <weightwire/worker.hpp>

namespace {

struct arguments {
    std::string model;
    std::string address = "127.0.0.1";
    std::string token;
    std::string mode = "flip";
    std::uint16_t port = 0;
    int ranks = 1;
};

arguments parse(int argc, char** argv) {
    arguments options;
    CLI::App app{"Serves a safetensors checkpoint and takes updates of its weights."};
    app.add_option("--model", options.model,
                   "a .safetensors file, an index, or a folder with either")
        ->required();
    app.add_option("--port", options.port, "port to listen on; 0: any, printed")->required();
    app.add_option("--address", options.address, "address to listen on");
    app.add_option("--ranks", options.ranks, "worker ranks behind this server")
        ->check(CLI::PositiveNumber);
    app.add_option("--mode", options.mode, "how updates are committed")
        ->check(CLI::IsMember({"flip", "copy_in", "in_place"}));
    app.add_option("--token", options.token, "bearer token that requests must carry");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& refused) {
        std::exit(app.exit(refused));
    }
    return options;
}

weightwire::commit_mode mode_of(const std::string& word) {
    using weightwire::commit_mode;
    return word == "flip"      ? commit_mode::flip
           : word == "copy_in" ? commit_mode::copy_in
                               : commit_mode::in_place;
}

void run(const arguments& options) {
    using namespace weightwire;
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);

    std::vector<std::unique_ptr<parameter_table>> tables;
    std::vector<parameter_table*> ranks;
    {
        const safetensors_source checkpoint{options.model};
        for (int rank = 0; rank < options.ranks; ++rank) {
            const auto metadata = checkpoint.metadata();
            tables.push_back(std::make_unique<parameter_table>(
                std::vector<param_meta>{metadata.begin(), metadata.end()},
                parameter_table_options{.mode = mode_of(options.mode)}));
            tables.back()->initialize(checkpoint.weights());
            ranks.push_back(tables.back().get());
        }
    }
    worker_engine engine{ipc::backend{}, ranks};
    worker_service service{engine};
    worker_server server{
        service, {.address = options.address, .port = options.port, .token = options.token}};
    server.start();
    fmt::print("{}\n{} of {}, {}\n", tables.front()->description(),
               options.ranks == 1 ? "one rank" : fmt::format("{} ranks", options.ranks),
               options.model, server.description());
    std::fflush(stdout);
    int signal = 0;
    sigwait(&signals, &signal);
    server.stop(deadline::after(std::chrono::seconds{5}));
}

}  // namespace

int main(int argc, char** argv) {
    try {
        run(parse(argc, argv));
    } catch (const std::exception& failed) {
        fmt::print(stderr, "serve_worker: {}\n", failed.what());
        return 1;
    }
    return 0;
}
