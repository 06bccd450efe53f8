#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

/// @file
/// Counts what the calling thread takes from the global operator new. Link support/allocations.cpp
/// once.

#if defined(__SANITIZE_THREAD__)
#define WEIGHTWIRE_COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define WEIGHTWIRE_COUNTS_ALLOCATIONS 0
#endif
#endif
#ifndef WEIGHTWIRE_COUNTS_ALLOCATIONS
#define WEIGHTWIRE_COUNTS_ALLOCATIONS 1
#endif

namespace weightwire_tests {

/// Not under the thread sanitizer, which brings an operator new of its own. Decorate a test with
/// `doctest::skip(!counts_allocations)`.
inline constexpr bool counts_allocations = WEIGHTWIRE_COUNTS_ALLOCATIONS != 0;

/// Allocations of this thread so far.
std::uint64_t allocations() noexcept;

/// Allocations of this thread since it was made.
class allocation_watch {
public:
    allocation_watch() noexcept : before_{allocations()} {}
    [[nodiscard]] std::uint64_t count() const noexcept { return allocations() - before_; }

private:
    std::uint64_t before_;
};

}  // namespace weightwire_tests
