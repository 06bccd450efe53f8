#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/rendezvous/store_group.hpp>

namespace tests {

/// Runs `body(rank, group)` for every rank of a trainer, on a thread each; what ranks throw is
/// kept, by rank.
inline std::vector<std::string> on_trainer_ranks(
    int ranks, const std::function<void(int, weightwire::store_group&)>& body) {
    std::vector<std::string> failures(static_cast<std::size_t>(ranks));
    auto host = weightwire::store_group::host(ranks);
    std::vector<std::jthread> others;
    for (int rank = 1; rank < ranks; ++rank) {
        others.emplace_back([&, rank, port = host.port()] {
            try {
                auto group = weightwire::store_group::join(
                    rank, ranks, "127.0.0.1", port,
                    weightwire::deadline::after(std::chrono::seconds{20}));
                body(rank, group);
            } catch (const std::exception& caught) {
                failures[static_cast<std::size_t>(rank)] = caught.what();
            }
        });
    }
    try {
        body(0, host);
    } catch (const std::exception& caught) {
        failures[0] = caught.what();
    }
    others.clear();
    return failures;
}

}  // namespace tests
