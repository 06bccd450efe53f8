#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/detail/descriptor.hpp>
#include <weightwire/detail/socket.hpp>
#include <weightwire/fabrics/nccl/ended_pairs.hpp>
#include <weightwire/fabrics/nccl/pair_machinery.hpp>
#include <weightwire/fabrics/nccl/pair_wire.hpp>
#include <weightwire/fabrics/nccl/pull_options.hpp>

/// @file
/// The thread of a trainer rank that answers readers: it joins pairs and sends what is asked for.
/// `pull_exchange` says why nobody waits in a circle.

namespace weightwire::nccl {

/// The arenas of a trainer rank, by number. Thread-safe.
template <PairMachinery M>
class arena_list {
public:
    [[nodiscard]] std::uint64_t add(std::shared_ptr<const typename M::buffer> made) {
        const std::lock_guard lock{mutex_};
        bytes_ += made->size();
        all_.push_back(std::move(made));
        return all_.size() - 1;
    }
    /// The bytes of a piece; nothing where there are no such.
    [[nodiscard]] std::byte* find(const asked_piece& piece) const {
        const std::lock_guard lock{mutex_};
        if (piece.arena >= all_.size()) {
            return nullptr;
        }
        const auto& arena = *all_[piece.arena];
        const std::uint64_t size = arena.size();
        return piece.bytes == 0 || piece.offset > size || piece.bytes > size - piece.offset
                   ? nullptr
                   : arena.data() + piece.offset;
    }
    [[nodiscard]] std::uint64_t bytes() const {
        const std::lock_guard lock{mutex_};
        return bytes_;
    }
    /// What the caller has written to arenas is there for whoever finds bytes from now on, also
    /// where the processor writes them.
    void publish() const { const std::lock_guard lock{mutex_}; }

private:
    mutable std::mutex mutex_;
    std::vector<std::shared_ptr<const typename M::buffer>> all_;
    std::uint64_t bytes_ = 0;
};

/// One thread from init to the end, so that a reader may come back at any time. Nothing on it
/// waits: neither a reader that joins, nor one that hangs, nor an abort holds up another reader.
template <PairMachinery M>
class pull_server {
public:
    /// Listens at every address of this machine, on a port of the system's choice.
    /// @throws unsupported_error, resource_error no device, no libnccl, no port.
    pull_server(int device, const pull_options& options, std::uint64_t id,
                std::shared_ptr<arena_list<M>> arenas)
        : options_{options},
          id_{id},
          arenas_{std::move(arenas)},
          machine_{device},
          ended_{device, options.abort_time},
          wake_{weightwire::detail::descriptor::from_native(
              ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))} {
        listen();
        thread_ = std::jthread{[this](const std::stop_token& stop) { run(stop); }};
    }
    pull_server(const pull_server&) = delete;
    pull_server& operator=(const pull_server&) = delete;
    ~pull_server() { static_cast<void>(end()); }

    /// Ends all pairs, and waits for their aborts, at most `pull_options::abort_time`.
    /// False: one did not end, and all of this has to be left behind.
    [[nodiscard]] bool end() noexcept {
        if (thread_.joinable()) {
            thread_.request_stop();
            const std::uint64_t one = 1;
            static_cast<void>(::write(wake_.native_handle(), &one, sizeof one));
            thread_.join();
        }
        return !lost_;
    }
    [[nodiscard]] std::uint16_t port() const noexcept { return port_; }
    [[nodiscard]] int nccl_version() const noexcept { return machine_.nccl_version(); }
    /// Device memory that the pairs took, those that have ended left out.
    [[nodiscard]] std::uint64_t measured_bytes() const noexcept { return measured_; }
    [[nodiscard]] std::size_t pair_count() const noexcept { return count_; }
    /// What the device's budget counts for the pairs, and for `more` of them.
    [[nodiscard]] std::uint64_t counted_bytes(std::size_t more) const noexcept {
        return (count_ + more) * cost_.bytes();
    }

private:
    /// A reader, by its connection.
    struct reader {
        enum class stage : std::uint8_t { greeting, joining, rest, asked, posting, sending };
        pair_socket socket{};
        stage at = stage::greeting;
        typename M::pair pair{};
        bool tried = false;  ///< it has been served once, so NCCL has made what it makes
        ask_frame ask{};
        std::vector<pair_piece> pieces{};
        std::uint64_t measured = 0;
        deadline patience = deadline::after(std::chrono::seconds{10});
        bool gone = false;

        [[nodiscard]] bool in_flight() const noexcept {
            return at == stage::posting || at == stage::sending;
        }
        [[nodiscard]] bool is_paired() const noexcept { return at != stage::greeting; }
        [[nodiscard]] bool is_made() const noexcept { return tried || !is_paired(); }
    };
    using stage = typename reader::stage;
    /// Nothing: arenas last until all aborts have returned, or for ever.
    struct none {};
    static constexpr std::size_t most_strangers = 64;

    void listen();
    void run(const std::stop_token& stop) noexcept;
    void wait();
    void take_new();
    void serve(reader& from, bool readable) noexcept;
    void take(reader& from, const pair_socket::frame& got);
    void greet(reader& from, const hello_frame& hello);
    void advance(reader& of);
    void begin_exchange();
    void post(reader& of);
    void measure() noexcept;
    void refuse(reader& whom, const failure& why) noexcept;
    void drop(reader& whom) noexcept;

    pull_options options_;
    std::uint64_t id_;
    std::shared_ptr<arena_list<M>> arenas_;
    M machine_;
    ended_pairs<M, none> ended_;
    weightwire::detail::descriptor wake_;
    weightwire::detail::descriptor listener_;
    std::uint16_t port_ = 0;
    std::vector<std::unique_ptr<reader>> readers_;
    std::vector<pollfd> polled_;
    std::optional<std::uint64_t> free_before_;       ///< of the device, before the pairs being made
    std::chrono::steady_clock::time_point began_{};  ///< of the exchange
    std::atomic<std::uint64_t> measured_ = 0;
    pair_cost cost_{options_};
    std::atomic<std::size_t> count_ = 0;
    std::atomic<bool> lost_ = false;
    std::jthread thread_;  // last: it uses all of them
};

}  // namespace weightwire::nccl

#include <weightwire/fabrics/nccl/pull_server_impl.hpp>
