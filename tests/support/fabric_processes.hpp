#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

#include "forked.hpp"

/// @file
/// Owners and readers of a pull fabric as processes of their own.

namespace tests::fabric_processes {

inline weightwire::deadline in_a_minute() {
    return weightwire::deadline::after(std::chrono::seconds{60});
}

/// How a reader finds what an owner's process holds.
struct exported {
    std::string address{};
    std::string handle{};
};

/// @param bytes a multiple of 8.
inline void make_model(std::byte* to, std::uint64_t bytes, std::uint64_t seed) {
    std::mt19937_64 random{seed};
    for (std::uint64_t i = 0; i < bytes; i += 8) {
        const auto word = random();
        std::memcpy(to + i, &word, 8);
    }
}

/// Which error `body` ends with, and whether it came in time.
template <class Body>
std::string kind_of_error(Body body) {
    using clock = std::chrono::steady_clock;
    const auto begin = clock::now();
    std::string kind = "none";
    try {
        body();
    } catch (const weightwire::error& failed) {
        kind = failed.kind();
    }
    return clock::now() - begin < std::chrono::seconds{20} ? kind : kind + ", late";
}

/// Runs `body` in a process of its own, whose text is what it returns. UCX is never used in the
/// calling process, which forks again.
template <class Body>
forked reader_process(Body body) {
    return forked{
        [body = std::move(body)](channel& parent) mutable { parent.put_text(body(parent)); }};
}

}  // namespace tests::fabric_processes
