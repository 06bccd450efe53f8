#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/engine/worker_service.hpp>
#include <weightwire/http/worker_server.hpp>

/// @file
/// What programs have in common that a script drives over pipes: it starts them with words, reads
/// lines, and closes their input to end them.

namespace tests {

/// `parameter <name> <dtype as torch spells it> <extent>…`, a line each.
inline void print_list(std::span<const weightwire::param_meta> list) {
    for (const auto& parameter : list) {
        std::printf("parameter %s %s", parameter.name.c_str(),
                    std::string{weightwire::traits_of(parameter.dtype).torch}.c_str());
        for (const auto extent : parameter.shape) {
            std::printf(" %lld", static_cast<long long>(extent));
        }
        std::printf("\n");
    }
}

/// Serves a worker engine. Prints the port, and ends when the standard input does.
template <class Engine>
void serve_until_input_ends(Engine& engine, weightwire::http::server_options options = {}) {
    weightwire::worker_service service{engine};
    weightwire::worker_server server{service, std::move(options)};
    server.start();
    std::printf("%d\n", static_cast<int>(server.port()));
    std::fflush(stdout);
    for (char byte = 0; ::read(STDIN_FILENO, &byte, 1) > 0;) {
    }
    server.stop(weightwire::deadline::after(std::chrono::seconds{5}));
}

/// Calls `body(words)` with the command line: whether it means something.
/// @returns the exit status: 2 with the usage where it does not, 1 with the text of what it throws.
template <class Body>
[[nodiscard]] int run_tool(const char* program, const char* usage, int count, char** arguments,
                           Body body) {
    try {
        if (body(std::vector<std::string>{arguments + 1, arguments + count})) {
            return 0;
        }
    } catch (const std::exception& failed) {
        std::fprintf(stderr, "%s: %s\n", program, failed.what());
        return 1;
    }
    std::fprintf(stderr, "usage: %s\n", usage);
    return 2;
}

}  // namespace tests
