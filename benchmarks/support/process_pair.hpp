#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include "../../tests/support/forked.hpp"

/// @file
/// A trainer and a worker as processes of their own.

namespace benchmarks {

/// Runs `trainer(channel&)` and `worker(channel&)`, each with a channel to the other. Both are
/// children: a process that has used CUDA cannot be forked again. What they throw is printed.
/// @returns what the trainer does, or 1 where it could not end.
template <class Trainer, class Worker>
[[nodiscard]] int run_pair(const char* program, Trainer trainer, Worker worker) {
    std::fflush(stdout);  // a child has a copy of what is not yet written
    tests::forked both{[&](tests::channel& parent) {
        std::setvbuf(stdout, nullptr, _IOLBF, 0);
        tests::forked child{[&](tests::channel& up) {
            try {
                worker(up);
            } catch (const std::exception& failed) {
                std::fprintf(stderr, "%s, worker: %s\n", program, failed.what());
                ::_exit(1);
            }
        }};
        int result = 1;
        try {
            result = trainer(child.to());
        } catch (const std::exception& failed) {
            std::fprintf(stderr, "%s, trainer: %s\n", program, failed.what());
        }
        std::fflush(stdout);  // a forked process ends without it
        parent.put(result);
    }};
    for (;;) {
        try {
            return both.to().take<int>();
        } catch (const std::runtime_error& failed) {
            if (std::string_view{failed.what()} != "the other process says nothing") {
                return 1;
            }
        }
    }
}

/// A text that may be longer than what a pipe takes at once.
inline void put_long(const tests::channel& to, const std::string& text) {
    using piece = std::array<char, 4096>;
    to.put(text.size());
    for (std::size_t at = 0; at < text.size(); at += sizeof(piece)) {
        piece part{};
        text.copy(part.data(), part.size(), at);
        to.put(part);
    }
}
[[nodiscard]] inline std::string take_long(const tests::channel& from) {
    using piece = std::array<char, 4096>;
    const auto size = from.take<std::size_t>();
    std::string text;
    while (text.size() < size) {
        const auto part = from.take<piece>();
        text.append(part.data(), std::min(part.size(), size - text.size()));
    }
    return text;
}

}  // namespace benchmarks
