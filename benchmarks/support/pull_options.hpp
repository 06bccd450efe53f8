#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <string_view>
#include <vector>

#include "options.hpp"
#include "pull_rounds.hpp"

/// @file
/// What every benchmark of sharded pull is told, and what it does with it.

namespace benchmarks {

struct pull_options {
    pull_settings wanted{};
    bool kill = false;  ///< rounds in which a worker dies, in place of those that are timed
};

/// `[--layers N] [--rounds N] [--chunk MiB] [--ranks 4|2|1] [--staged] [--apart] [--kill]`, and a
/// program's `own`.
/// @returns whether all words mean something; the first that does not has gone to stderr.
[[nodiscard]] inline bool read_pull_options(const char* program, int argc, char** argv,
                                            pull_options& to, std::vector<option> own) {
    auto& wanted = to.wanted;
    const std::vector<option> shared{
        {"--layers", &wanted.model.layers},
        {"--rounds",
         [&](std::string_view value) {
             return read_number(value, wanted.rounds) && wanted.rounds > 0;
         }},
        {"--chunk", mebibytes{&wanted.chunk_bytes}},
        {"--ranks",
         [&](std::string_view value) {
             return read_number(value, wanted.ranks) &&
                    (wanted.ranks == 1 || wanted.ranks == 2 || wanted.ranks == 4);
         }},
        {"--staged", &wanted.staged},
        {"--apart", &wanted.apart},
        {"--kill", &to.kill},
    };
    own.insert(own.end(), shared.begin(), shared.end());
    return read_options(program, argc, argv, own);
}

/// The program, a line at a time. @returns its exit status.
template <class Kit>
[[nodiscard]] int run_pull(const pull_options& options) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    pull_rounds::program<Kit> all{options.wanted};
    const int wrong = options.kill ? all.kill() : all.run();
    all.end();
    return wrong == 0 ? 0 : 1;
}

}  // namespace benchmarks
