// SPDX-License-Identifier: Apache-2.0

#include "allocations.hpp"

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

thread_local std::uint64_t count = 0;

#if WEIGHTWIRE_COUNTS_ALLOCATIONS
void* take(std::size_t size) {
    ++count;
    if (void* const block = std::malloc(size == 0 ? 1 : size)) {
        return block;
    }
    throw std::bad_alloc{};
}

void* take_aligned(std::size_t size, std::align_val_t alignment) {
    ++count;
    const auto unit = static_cast<std::size_t>(alignment);
    if (void* const block = std::aligned_alloc(unit, (size + unit - 1) / unit * unit)) {
        return block;
    }
    throw std::bad_alloc{};
}
#endif

}  // namespace

namespace weightwire_tests {

std::uint64_t allocations() noexcept { return count; }

}  // namespace weightwire_tests

#if WEIGHTWIRE_COUNTS_ALLOCATIONS
// The array forms of the standard library call these. Its nothrow form does too, but the address
// sanitizer's does not, and would miss our delete.
void* operator new(std::size_t size) { return take(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
    ++count;
    return std::malloc(size == 0 ? 1 : size);
}
void operator delete(void* block, const std::nothrow_t&) noexcept { std::free(block); }
void* operator new(std::size_t size, std::align_val_t alignment) {
    return take_aligned(size, alignment);
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { std::free(block); }
#endif
