#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <stop_token>
#include <string>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// Progress of a round, in memory that the trainer and its workers share.
///
/// The trainer counts what it wrote, every worker rank what it has read, both as positions of
/// `layout`, which never repeat. Nobody acts on a number of the other side before comparing it with
/// what it knows itself.
///
/// Waiting is a short spin, then sleep on a bell (a futex) in slices, so that a deadline, a stop
/// and a death are noticed and a lost ring costs one slice. A bell is rung only for a sleeper: the
/// store of progress and the look for sleepers are both sequentially consistent, as are the
/// sleeper's note and its last look at the progress, so that one of the two sees the other.

namespace weightwire::ipc {

/// A worker rank's part. Its own cache line, written by that worker.
struct alignas(64) rank_slot {
    std::atomic<std::uint64_t> consumed{0};  ///< position up to which it has read
    std::atomic<std::uint32_t> dropped{0};   ///< set by the trainer: it waits for this rank no more
};

/// The begin of the shared control segment; `ranks` slots follow it.
struct control_header {
    static constexpr std::uint64_t expected_magic = 0x6972'7774'6867'6577U;  // "wegthwri"

    std::uint64_t magic = expected_magic;
    std::uint64_t nonce = 0;  ///< as in the init message: this is the block that is meant
    std::uint64_t ranks = 0;

    alignas(64) std::atomic<std::uint64_t> produced{0};  ///< position up to which it has written
    std::atomic<std::uint64_t> over{0};  ///< every position below it is finished or given up

    alignas(64) std::atomic<std::uint32_t> worker_bell{0};
    std::atomic<std::uint32_t> worker_sleeps{0};  ///< cleared by who rings

    alignas(64) std::atomic<std::uint32_t> trainer_bell{0};
    /// The trainer sleeps until every rank is here; 0: it does not sleep. Workers short of it do
    /// not ring, since each needless ring would cost a worker the processor.
    std::atomic<std::uint64_t> trainer_awaits{0};
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(control_header) % alignof(rank_slot) == 0);

/// The control segment as both sides see it. Owns nothing.
class control_block {
public:
    control_block() noexcept = default;

    [[nodiscard]] static constexpr std::uint64_t bytes_for(std::uint64_t ranks) noexcept {
        return sizeof(control_header) + ranks * sizeof(rank_slot);
    }
    /// Makes a new one in `bytes_for(ranks)` bytes at `memory`.
    [[nodiscard]] static control_block create(std::byte* memory, std::uint64_t ranks,
                                              std::uint64_t nonce) noexcept {
        control_block result;
        result.header_ = ::new (memory) control_header{};
        result.header_->nonce = nonce;
        result.header_->ranks = ranks;
        auto* const slots = reinterpret_cast<rank_slot*>(memory + sizeof(control_header));
        std::uninitialized_default_construct_n(slots, ranks);
        result.slots_ = slots;
        return result;
    }
    /// Finds the one that a peer made at `memory` of `bytes` bytes.
    /// @throws protocol_error it is none, another one, or has no slot for rank `slot`.
    [[nodiscard]] static control_block attach(std::byte* memory, std::uint64_t bytes,
                                              std::uint64_t slot, std::uint64_t nonce) {
        control_block result;
        const bool large = bytes >= sizeof(control_header) &&
                           reinterpret_cast<std::uintptr_t>(memory) % alignof(control_header) == 0;
        if (large) {
            result.header_ = std::launder(reinterpret_cast<control_header*>(memory));
            result.slots_ =
                std::launder(reinterpret_cast<rank_slot*>(memory + sizeof(control_header)));
        }
        const auto slots = large ? (bytes - sizeof(control_header)) / sizeof(rank_slot) : 0;
        if (result.header_ == nullptr || result.header_->magic != control_header::expected_magic ||
            result.header_->nonce != nonce || slot >= slots || slot >= result.header_->ranks) {
            throw protocol_error{
                "the trainer's control block is not the one that its init message names, or has "
                "no place for this rank; nothing was read",
                {.phase = phase::init, .backend = "ipc"}};
        }
        return result;
    }

    [[nodiscard]] explicit operator bool() const noexcept { return header_ != nullptr; }
    [[nodiscard]] control_header& header() const noexcept { return *header_; }
    [[nodiscard]] rank_slot& slot(std::size_t i) const noexcept { return slots_[i]; }

private:
    control_header* header_ = nullptr;
    rank_slot* slots_ = nullptr;
};

namespace detail {

/// Longest sleep before a waiter looks at its deadline, its stop token and its peer again.
inline constexpr std::chrono::milliseconds slice{10};
/// How long a waiter spins first: about what waking a sleeper costs.
inline constexpr std::chrono::microseconds spin{30};

inline void relax() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/// Sleeps while `word` is `seen`, at most `limit`. Works between processes.
inline void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                        std::chrono::nanoseconds limit) noexcept {
    const auto whole = std::chrono::duration_cast<std::chrono::seconds>(limit);
    const timespec longest{.tv_sec = whole.count(), .tv_nsec = (limit - whole).count()};
    ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &longest,
              nullptr, 0);
}

/// Wakes all that sleep on `word`.
inline void ring(std::atomic<std::uint32_t>& word) noexcept {
    word.fetch_add(1, std::memory_order_seq_cst);
    ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
              nullptr, 0);
}

/// Spins for a short time. Returns whether `done()` became true.
template <class Done>
[[nodiscard]] bool spin_until(Done& done) {
    const auto limit = deadline::after(spin);
    do {
        for (int i = 0; i < 16; ++i) {
            if (done()) {
                return true;
            }
            relax();
        }
    } while (!limit.expired());
    return false;
}

using weightwire::detail::check_time;

}  // namespace detail

}  // namespace weightwire::ipc
