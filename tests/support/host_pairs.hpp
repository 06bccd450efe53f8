#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/detail/descriptor.hpp>
#include <weightwire/fabrics/nccl/basic_pull_fabric.hpp>
#include <weightwire/fabrics/nccl/pair_machinery.hpp>
#include <weightwire/fabrics/shared_memory_fabric.hpp>

/// @file
/// The machinery of the NCCL pull fabric without a GPU: a pair is a thread and a socket, in one
/// process or between two, and copies and layouts are done some looks after they were begun. As
/// with NCCL, the first transfer is ready only when both ends have posted it, a pair that misses
/// its other end waits, and need not tell of one that is gone.

namespace tests {

/// What a test changes, in the process that it is in. Set before threads start.
struct host_pair_world {
    static inline int nccl_version = 22809;
    static inline std::size_t most_pairs = 16;
    /// Called on a pair's thread, where nothing may be thrown: `join`, and `transfer` in the middle
    /// of each piece, with the end's rank.
    static inline std::function<void(std::string_view step, int end)> at_step{};
    /// While true, no abort returns.
    static inline std::atomic<bool> stuck{false};
    /// While true, a pair does not tell that its other end is gone.
    static inline std::atomic<bool> silent{false};
    /// While true, posting fails.
    static inline std::atomic<bool> refuses{false};
    /// Sends that began before the receive that they meet was posted.
    static inline std::atomic<int> early_sends{0};
    static inline std::atomic<int> aborts{0};
    static inline std::atomic<int> pairs{0};  ///< that were begun
    /// Receives under way now, and the most that were at once.
    static inline std::atomic<int> under_way{0};
    static inline std::atomic<int> most_under_way{0};
    static inline std::atomic<std::int64_t> free_bytes{std::int64_t{1} << 40U};
    static constexpr std::int64_t pair_bytes = 10'000'000;
    static inline std::atomic<std::uint64_t> buffers{0};  ///< and tables, made so far
    /// Between the two ends of a transfer in one process: a socket's order is not seen by the
    /// thread sanitizer.
    static inline std::mutex order{};

    static void meet(std::string_view step, int end) {
        if (at_step) {
            at_step(step, end);
        }
    }
};

class host_pairs {
    using descriptor = weightwire::detail::descriptor;
    using pair_piece = weightwire::nccl::pair_piece;
    using pair_end = weightwire::nccl::pair_end;
    using unique_id = weightwire::wire::unique_id;
    using landed_run = weightwire::nccl::landed_run;

    struct meeting_place {
        std::uint64_t magic = 0x7372'6961'7074'7368ULL;
        std::uint64_t nonce = 0;
        std::uint16_t port = 0;
    };
    struct posted {
        std::vector<pair_piece> pieces{};
        bool sends = false;
    };

    /// One end of a pair, shared with its thread.
    struct half {
        descriptor socket{};
        descriptor listener{};
        meeting_place place{};
        pair_end end{};
        std::mutex mutex{};
        std::condition_variable changed{};
        std::deque<posted> work{};
        std::atomic<bool> joined{false};
        std::atomic<bool> ended{false};
        std::atomic<bool> failed{false};
        std::atomic<std::uint64_t> given{0};
        std::atomic<std::uint64_t> done{0};
        std::atomic<bool> connected{false};  ///< both ends have posted
        int looks = 0;                       ///< until what was posted is in the stream
        std::thread thread{};

        [[nodiscard]] bool goes_on() const noexcept { return !ended && !failed; }
        bool move(void* at, std::size_t bytes, bool out) {
            auto* from = static_cast<char*>(at);
            while (bytes != 0 && goes_on()) {
                pollfd ready{.fd = socket.native_handle(),
                             .events = static_cast<short>(out ? POLLOUT : POLLIN),
                             .revents = 0};
                if (::poll(&ready, 1, 5) < 1) {
                    continue;
                }
                const auto moved =
                    out ? ::send(socket.native_handle(), from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                        : ::recv(socket.native_handle(), from, bytes, MSG_DONTWAIT);
                if (moved > 0) {
                    from += moved;
                    bytes -= static_cast<std::size_t>(moved);
                } else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) {
                    return false;
                }
            }
            return bytes == 0;
        }
        void meet() {
            host_pair_world::meet("join", static_cast<int>(end));
            sockaddr_in address{};
            address.sin_family = AF_INET;
            address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            address.sin_port = htons(place.port);
            std::uint64_t nonce = place.nonce;
            while (goes_on() && !socket) {
                if (end == pair_end::owner) {
                    pollfd ready{.fd = listener.native_handle(), .events = POLLIN, .revents = 0};
                    if (::poll(&ready, 1, 5) == 1) {
                        socket = descriptor::from_native(
                            ::accept4(listener.native_handle(), nullptr, nullptr, SOCK_CLOEXEC));
                    }
                    continue;
                }
                auto made =
                    descriptor::from_native(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
                if (::connect(made.native_handle(), reinterpret_cast<sockaddr*>(&address),
                              sizeof address) == 0) {
                    socket = std::move(made);
                } else {
                    std::this_thread::sleep_for(std::chrono::milliseconds{5});
                }
            }
            const int on = 1;
            ::setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            std::uint64_t theirs = 0;
            const bool met =
                move(&nonce, sizeof nonce, true) && move(&theirs, sizeof theirs, false);
            if (!met || theirs != place.nonce) {
                failed = true;
            }
            joined = true;
        }
        /// What the receive has said of itself is there at once: it was posted before.
        bool transfer(const posted& next) {
            for (const auto& piece : next.pieces) {
                std::uint64_t wanted = piece.bytes;
                if (next.sends) {
                    const auto seen = ::recv(socket.native_handle(), &wanted, sizeof wanted,
                                             MSG_PEEK | MSG_DONTWAIT);
                    host_pair_world::early_sends +=
                        seen == static_cast<ssize_t>(sizeof wanted) ? 0 : 1;
                    if (!move(&wanted, sizeof wanted, false) || wanted != piece.bytes) {
                        return false;
                    }
                }
                // A send reads all of the arena that it needs at once: the owner may write there as
                // soon as the other end has told by another way that it has it.
                std::vector<std::byte> sent;
                if (next.sends) {
                    const std::lock_guard lock{host_pair_world::order};
                    sent.assign(piece.data, piece.data + piece.bytes);
                }
                auto* const at = next.sends ? sent.data() : piece.data;
                const auto part = static_cast<std::size_t>(piece.bytes / 2);
                if (!move(at, part, next.sends)) {
                    return false;
                }
                host_pair_world::meet("transfer", static_cast<int>(end));
                if (!move(at + part, static_cast<std::size_t>(piece.bytes) - part, next.sends)) {
                    return false;
                }
                const std::lock_guard lock{host_pair_world::order};
            }
            return true;
        }
        void run() {
            meet();
            for (;;) {
                posted next;
                {
                    std::unique_lock lock{mutex};
                    changed.wait(lock, [&] { return ended || !work.empty(); });
                    if (ended) {
                        return;
                    }
                    next = std::move(work.front());
                    work.pop_front();
                }
                const int now = next.sends ? 0 : ++host_pair_world::under_way;
                int most = host_pair_world::most_under_way;
                while (now > most &&
                       !host_pair_world::most_under_way.compare_exchange_weak(most, now)) {
                }
                char greeting = 0;
                const bool meets = connected || move(&greeting, 1, false);
                connected = meets;
                const bool moved = meets && transfer(next);
                host_pair_world::under_way -= next.sends ? 0 : 1;
                if (moved) {
                    ++done;
                } else if (!ended) {
                    failed = true;
                }
            }
        }
    };

    struct job {
        std::byte* to = nullptr;
        const std::byte* from = nullptr;
        std::uint64_t bytes = 0;
        std::uint64_t count = 1;
        std::uint64_t step = 0;
        std::shared_ptr<const std::vector<landed_run>> runs{};
        void run() const {
            if (runs != nullptr) {
                for (const auto& each : *runs) {
                    std::memcpy(each.to, from + each.offset, each.bytes);
                }
                return;
            }
            for (std::uint64_t i = 0; i < count; ++i) {
                std::memcpy(to + i * bytes, from + i * step, bytes);
            }
        }
    };

public:
    static constexpr auto near_memory = weightwire::memory_kind::host;
    using within_node = weightwire::shm::fabric;

    class buffer {
    public:
        buffer() noexcept = default;
        explicit buffer(std::size_t bytes)
            : bytes_{new(std::align_val_t{4096}) std::byte[bytes]}, size_{bytes} {
            ++host_pair_world::buffers;
        }
        [[nodiscard]] std::byte* data() const noexcept { return bytes_.get(); }
        [[nodiscard]] std::size_t size() const noexcept { return size_; }

    private:
        struct aligned {
            void operator()(std::byte* data) const noexcept {
                ::operator delete[](data, std::align_val_t{4096});
            }
        };
        std::unique_ptr<std::byte[], aligned> bytes_;
        std::size_t size_ = 0;
    };
    struct stream {
        std::vector<job> jobs{};
    };
    struct event {
        mutable std::vector<job> jobs{};
        mutable int looks = 0;
        const std::atomic<bool>* users = nullptr;
    };
    struct scatter_plan {
        std::shared_ptr<const std::vector<landed_run>> runs{};
    };

    class ending {
    public:
        ending() noexcept = default;
        explicit ending(std::shared_ptr<const std::atomic<bool>> over) : over_{std::move(over)} {}
        [[nodiscard]] bool over() const noexcept { return over_ == nullptr || *over_; }

    private:
        std::shared_ptr<const std::atomic<bool>> over_;
    };
    class pair {
    public:
        pair() noexcept = default;
        pair(pair&&) noexcept = default;
        pair& operator=(pair&& other) noexcept {
            std::swap(half_, other.half_);
            return *this;
        }
        ~pair() { static_cast<void>(std::move(*this).end()); }

        [[nodiscard]] bool ready() {
            check();
            return half_->joined && (half_->given == 0 || half_->connected) && --half_->looks < 0;
        }
        void post(std::span<const pair_piece> pieces, pair_end end) {
            check();
            if (host_pair_world::refuses) {
                throw weightwire::resource_error{"a post was refused"};
            }
            const bool sends = end == pair_end::owner;
            std::vector<char> words(half_->given == 0 ? 1 : 0, 'c');
            for (const auto& piece : pieces) {
                const auto* const size = reinterpret_cast<const char*>(&piece.bytes);
                words.insert(words.end(), size, sends ? size : size + sizeof piece.bytes);
            }
            static_cast<void>(
                ::send(half_->socket.native_handle(), words.data(), words.size(), MSG_NOSIGNAL));
            half_->looks = 2;
            ++half_->given;
            const std::lock_guard lock{half_->mutex};
            half_->work.push_back({{pieces.begin(), pieces.end()}, sends});
            half_->changed.notify_all();
        }
        [[nodiscard]] bool reached() {
            check();
            return half_->done == half_->given;
        }
        [[nodiscard]] ending end() && noexcept {
            const auto ended = std::exchange(half_, nullptr);
            if (ended == nullptr) {
                return {};
            }
            auto over = std::make_shared<std::atomic<bool>>(false);
            std::thread{[ended, over] {
                ++host_pair_world::aborts;
                while (host_pair_world::stuck) {
                    std::this_thread::sleep_for(std::chrono::milliseconds{1});
                }
                {
                    const std::lock_guard lock{ended->mutex};
                    ended->ended = true;
                    ended->changed.notify_all();
                }
                ended->thread.join();
                ended->socket.close();
                host_pair_world::free_bytes += host_pair_world::pair_bytes;
                *over = true;
            }}.detach();
            return ending{over};
        }

    private:
        friend class host_pairs;
        void check() const {
            if (half_->failed && !host_pair_world::silent) {
                throw weightwire::peer_error{"the other side of a pair is gone",
                                             {.backend = "nccl"}};
            }
        }
        std::shared_ptr<half> half_;
    };

    explicit host_pairs(int device) : device_{device} {
        if (device < 0 || device > 7) {
            throw weightwire::unsupported_error{"there is no device " + std::to_string(device)};
        }
    }
    [[nodiscard]] int device() const noexcept { return device_; }
    [[nodiscard]] int nccl_version() const noexcept { return host_pair_world::nccl_version; }
    [[nodiscard]] std::size_t most_pairs_at_once(int /*channels*/) const noexcept {
        return host_pair_world::most_pairs;
    }

    [[nodiscard]] buffer allocate(std::size_t bytes) const { return buffer{bytes}; }
    [[nodiscard]] std::optional<std::uint64_t> free_bytes() const {
        return static_cast<std::uint64_t>(host_pair_world::free_bytes.load());
    }
    [[nodiscard]] stream make_stream() const { return {}; }
    [[nodiscard]] event make_event() const { return {}; }
    void record(event& point, stream& on) const {
        for (auto& each : on.jobs) {
            point.jobs.push_back(std::move(each));
        }
        on.jobs.clear();
        point.looks = 3;
        point.users = nullptr;
    }
    void record_after(event& point, void* users) const {
        point.users = static_cast<const std::atomic<bool>*>(users);
    }
    [[nodiscard]] bool is_done(const event& point) const {
        if ((point.users != nullptr && !*point.users) || --point.looks > 0) {
            return false;
        }
        for (const auto& each : std::exchange(point.jobs, {})) {
            each.run();
        }
        return true;
    }
    void copy_lines(std::byte* to, const std::byte* from, std::uint64_t bytes, std::uint64_t count,
                    std::uint64_t step, stream& on) const {
        on.jobs.push_back({to, from, bytes, count, step, {}});
    }
    void load_kernels() const {}
    [[nodiscard]] scatter_plan make_scatter(std::span<const landed_run> runs) const {
        ++host_pair_world::buffers;
        return {std::make_shared<const std::vector<landed_run>>(runs.begin(), runs.end())};
    }
    [[nodiscard]] static std::size_t table_bytes(const scatter_plan& scatter) noexcept {
        return scatter.runs->size() * sizeof(landed_run);
    }
    void launch(const scatter_plan& scatter, const std::byte* place, stream& on) const {
        on.jobs.push_back({.from = place, .runs = scatter.runs});
    }

    [[nodiscard]] unique_id make_unique_id() {
        descriptor listener =
            descriptor::from_native(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof address;
        if (::bind(listener.native_handle(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
            ::listen(listener.native_handle(), 4) != 0 ||
            ::getsockname(listener.native_handle(), reinterpret_cast<sockaddr*>(&address), &size) !=
                0) {
            throw weightwire::resource_error{"no socket"};
        }
        std::random_device source;
        const meeting_place made{.nonce = (std::uint64_t{source()} << 32U) | source(),
                                 .port = ntohs(address.sin_port)};
        unique_id id{};
        std::memcpy(id.data(), &made, sizeof made);
        listeners_[made.nonce] = std::move(listener);
        return id;
    }
    [[nodiscard]] pair begin(const unique_id& id, pair_end end, int /*channels*/) {
        pair made;
        made.half_ = std::make_shared<half>();
        std::memcpy(&made.half_->place, id.data(), sizeof(meeting_place));
        if (made.half_->place.magic != meeting_place{}.magic) {
            throw weightwire::usage_error{"this is no unique id"};
        }
        ++host_pair_world::pairs;
        made.half_->end = end;
        if (end == pair_end::owner) {
            made.half_->listener = std::move(listeners_.extract(made.half_->place.nonce).mapped());
        }
        host_pair_world::free_bytes -= host_pair_world::pair_bytes;
        made.half_->thread = std::thread{[own = made.half_.get()] { own->run(); }};
        return made;
    }

private:
    int device_;
    std::map<std::uint64_t, descriptor> listeners_;
};

static_assert(weightwire::nccl::PairMachinery<host_pairs>);

/// Few peers, and short times, so that tests see their ends.
struct short_times {
    static constexpr weightwire::nccl::pull_options value{.most_peers = 6,
                                                          .landing_bytes = std::uint64_t{4} << 20U,
                                                          .linger = std::chrono::milliseconds{50},
                                                          .join_time = std::chrono::seconds{3},
                                                          .send_time = std::chrono::seconds{2},
                                                          .abort_time = std::chrono::seconds{1}};
};

/// The fabric over it.
using host_pull_fabric = weightwire::nccl::basic_pull_fabric<host_pairs, short_times>;
static_assert(weightwire::explain_pull_fabric<host_pull_fabric>());
static_assert(weightwire::HasFabricPacking<host_pull_fabric::owner>);
static_assert(weightwire::HasFabricReadiness<host_pull_fabric::owner>);
static_assert(weightwire::HasFabricLoss<host_pull_fabric::reader>);
static_assert(weightwire::HasWithinNode<host_pull_fabric>);

}  // namespace tests
