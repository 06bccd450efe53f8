#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace tests {

/// A page that does something when it is touched: how a test gets into the middle of a copy without
/// a hook in what it tests. One at a time in a process.
class touch_trap {
public:
    /// Called once, in the thread that touches the page and in a signal handler.
    using action = void (*)();

    /// Protects the page in the middle of `memory`, which is larger than two pages.
    static void set(std::span<const std::byte> memory, action what) {
        const auto size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
        const auto middle = reinterpret_cast<std::uintptr_t>(memory.data()) + memory.size() / 2;
        struct sigaction handler {};
        handler.sa_sigaction = &touched;
        handler.sa_flags = SA_SIGINFO | SA_NODEFER;
        page_ = reinterpret_cast<void*>(middle / size * size);
        what_ = what;
        if (memory.size() <= 2 * size || ::sigaction(SIGSEGV, &handler, nullptr) != 0 ||
            ::mprotect(page_, size, PROT_NONE) != 0) {
            throw std::runtime_error{"no page to set a trap on"};
        }
    }

private:
    static void touched(int, siginfo_t* info, void*) {
        const auto size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
        auto* const page = static_cast<std::byte*>(page_.load());
        auto* const at = static_cast<std::byte*>(info->si_addr);
        if (page == nullptr || at < page || at >= page + size) {
            ::signal(SIGSEGV, SIG_DFL);  // a fault of its own: let it be seen
            return;
        }
        page_ = nullptr;
        ::mprotect(page, size, PROT_READ | PROT_WRITE);
        what_.load()();
    }

    static inline std::atomic<void*> page_{nullptr};
    static inline std::atomic<action> what_{nullptr};
};

/// The process stops when the middle of `memory` is touched.
inline void stop_at_first_touch(std::span<const std::byte> memory) {
    touch_trap::set(memory, [] { ::raise(SIGSTOP); });
}

}  // namespace tests
