#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/nccl/machinery.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/gpu/lost_devices.hpp>

/// @file
/// The machinery of `nccl` without a GPU: streams are threads, the group is a star of sockets
/// between processes, and memory that a view calls a device's is ordinary memory. Like NCCL it
/// blocks in a join and in a broadcast until every rank takes part, and says nothing of a rank that
/// is stopped.

namespace tests {

/// What a test changes, in the process that it is in. Set before threads start.
struct host_world {
    static inline int nccl_version = 22809;
    /// Called at `join`, `joined`, `warm_up`, `broadcast` and `wait`, with a count of its own kind,
    /// and at `transfer`, on a thread where nothing may be thrown, with the broadcast's bytes.
    static inline std::function<void(std::string_view step, std::uint64_t count)> at_step{};
    /// Further steps: `part` of a broadcast with the rank, `abort` with the rank, and
    /// `make_scatter` with the device. An abort on this device does not return in time.
    static inline std::atomic<int> stuck_device{-1};
    /// Allocations of buffers and of pinned ones so far.
    static inline std::atomic<std::uint64_t> buffers{0};
    static inline std::atomic<std::uint64_t> pinned{0};
    /// Bytes of buffers that were not freed yet.
    static inline std::atomic<std::uint64_t> held_bytes{0};

    static void meet(std::string_view step, std::uint64_t count) {
        if (at_step) {
            at_step(step, count);
        }
    }
};

/// A socket that is closed at the end.
class host_socket {
public:
    host_socket() noexcept = default;
    explicit host_socket(int fd) noexcept : fd_{fd} {}
    host_socket(host_socket&& other) noexcept : fd_{std::exchange(other.fd_, -1)} {}
    host_socket& operator=(host_socket&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~host_socket() {
        if (fd_ >= 0) {
            ::close(fd_);
        }
    }
    [[nodiscard]] int fd() const noexcept { return fd_; }
    /// Small words go out at once, or every broadcast waits for a late acknowledgement.
    void send_at_once() const noexcept {
        const int on = 1;
        ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }

private:
    int fd_ = -1;
};

/// Moves `bytes` through a socket; between slices it asks `goes_on`. False: told to end, or the
/// other side is gone.
template <class GoesOn>
bool host_transfer(int fd, std::byte* at, std::size_t bytes, bool sends, GoesOn goes_on) {
    while (bytes != 0) {
        if (!goes_on()) {
            return false;
        }
        pollfd ready{
            .fd = fd, .events = static_cast<short>(sends ? POLLOUT : POLLIN), .revents = 0};
        if (::poll(&ready, 1, 5) < 1) {
            continue;
        }
        const auto moved = sends ? ::send(fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                                 : ::recv(fd, at, bytes, MSG_DONTWAIT);
        if (moved > 0) {
            at += moved;
            bytes -= static_cast<std::size_t>(moved);
        } else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) {
            return false;
        }
    }
    return true;
}
template <class Value, class GoesOn>
bool host_put(int fd, Value value, GoesOn goes_on) {
    return host_transfer(fd, reinterpret_cast<std::byte*>(&value), sizeof value, true, goes_on);
}
template <class Value, class GoesOn>
bool host_take(int fd, Value& value, GoesOn goes_on) {
    return host_transfer(fd, reinterpret_cast<std::byte*>(&value), sizeof value, false, goes_on);
}

/// The group as the streams' threads see it.
struct host_group {
    std::vector<host_socket> sockets{};  ///< of each rank at the root; elsewhere the root's alone
    int rank = 0;
    int device = 0;
    std::atomic<bool> ended{false};
    std::atomic<bool> failed{false};  ///< a rank is gone

    [[nodiscard]] bool goes_on() const noexcept { return !ended && !failed; }

    /// One rank's part of a broadcast; the step `transfer` is in the middle of it.
    bool transfer(int fd, std::byte* data, std::uint64_t bytes, bool sends) const {
        const auto ok = [this] { return goes_on(); };
        const auto half = static_cast<std::size_t>(bytes / 2);
        if (!host_transfer(fd, data, half, sends, ok)) {
            return false;
        }
        host_world::meet("transfer", bytes);
        return host_transfer(fd, data + half, static_cast<std::size_t>(bytes) - half, sends, ok);
    }

    /// One broadcast, on a stream's thread.
    void broadcast(std::byte* data, std::uint64_t bytes) noexcept {
        const auto ok = [this] { return goes_on(); };
        bool done = goes_on();
        if (rank != 0) {
            done = done && host_put(sockets[0].fd(), bytes, ok) &&
                   transfer(sockets[0].fd(), data, bytes, false);
        }
        for (std::size_t i = 1; rank == 0 && done && i < sockets.size(); ++i) {
            std::uint64_t awaited = 0;
            done = host_take(sockets[i].fd(), awaited, ok) && awaited == bytes &&
                   transfer(sockets[i].fd(), data, bytes, true);
        }
        if (!done && !ended) {
            failed = true;
        }
    }
};

class host_machinery {
    struct event_state {
        std::atomic<std::uint64_t> recorded{0};
        std::atomic<std::uint64_t> done{0};
    };
    using chunk_list = std::vector<std::vector<weightwire::nccl::byte_run>>;

    /// One piece of work in a stream. Fixed in size, so that giving it allocates nothing.
    struct work {
        enum class kind_type { copy, gather, scatter, reach, await, broadcast } kind{};
        std::byte* to = nullptr;
        const std::byte* from = nullptr;
        std::uint64_t number = 0;
        std::shared_ptr<event_state> event{};
        std::shared_ptr<const chunk_list> chunks{};
        std::shared_ptr<host_group> group{};
    };

    class queue {
    public:
        queue() : ring_(4096), thread_{[this] { loop(); }} {}
        ~queue() {
            {
                const std::lock_guard lock{mutex_};
                quit_ = true;
            }
            changed_.notify_all();
            thread_.join();
        }
        void give(work next) {
            std::unique_lock lock{mutex_};
            changed_.wait(lock, [this] { return count_ < ring_.size(); });
            ring_[(first_ + count_++) % ring_.size()] = std::move(next);
            changed_.notify_all();
        }
        [[nodiscard]] bool idle() {
            const std::lock_guard lock{mutex_};
            return count_ == 0;
        }

    private:
        void loop() {
            std::unique_lock lock{mutex_};
            for (;;) {
                changed_.wait(lock, [this] { return quit_ || count_ != 0; });
                if (count_ == 0) {
                    return;
                }
                work now = std::move(ring_[first_]);
                lock.unlock();
                run(now);
                now = {};
                lock.lock();
                first_ = (first_ + 1) % ring_.size();
                --count_;
                changed_.notify_all();
            }
        }
        static void run(work& now) {
            using kind = work::kind_type;
            switch (now.kind) {
                case kind::copy:
                    std::memcpy(now.to, now.from, static_cast<std::size_t>(now.number));
                    break;
                case kind::gather:
                    for (const auto& run : (*now.chunks)[now.number]) {
                        std::memcpy(now.to + run.offset, run.address, run.bytes);
                    }
                    break;
                case kind::scatter:
                    for (const auto& run : (*now.chunks)[now.number]) {
                        std::memcpy(run.address, now.from + run.offset, run.bytes);
                    }
                    break;
                case kind::reach: now.event->done = now.number; break;
                case kind::await:
                    while (now.event->done < now.number) {
                        std::this_thread::sleep_for(std::chrono::microseconds{50});
                    }
                    break;
                case kind::broadcast: now.group->broadcast(now.to, now.number); break;
            }
        }

        std::mutex mutex_;
        std::condition_variable changed_;
        std::vector<work> ring_;
        std::size_t first_ = 0;
        std::size_t count_ = 0;
        bool quit_ = false;
        std::thread thread_;
    };

public:
    static constexpr auto near_memory = weightwire::memory_kind::cuda;

    class buffer {
    public:
        buffer() = default;
        explicit buffer(std::size_t bytes) : memory_(bytes) { host_world::held_bytes += bytes; }
        buffer(buffer&& other) noexcept : memory_{std::move(other.memory_)} {
            other.memory_.clear();
        }
        buffer& operator=(buffer&& other) noexcept {
            memory_.swap(other.memory_);
            return *this;
        }
        ~buffer() { host_world::held_bytes -= memory_.size(); }
        [[nodiscard]] std::byte* data() const noexcept {
            return memory_.empty() ? nullptr : const_cast<std::byte*>(memory_.data());
        }
        [[nodiscard]] std::size_t size() const noexcept { return memory_.size(); }

    private:
        std::vector<std::byte> memory_;
    };
    using pinned_buffer = buffer;

    /// What holds up a stream of a user's, until it is opened.
    class gate {
    public:
        void open() { state_->done = 1; }

    private:
        friend class host_machinery;
        std::shared_ptr<event_state> state_ = std::make_shared<event_state>();
    };

    class stream {
    public:
        stream() : queue_{std::make_unique<queue>()} {}
        /// For users' own work: runs in order, after what was given before.
        void give_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
            queue_->give({.kind = work::kind_type::copy, .to = to, .from = from, .number = bytes});
        }
        /// Likewise: nothing runs until the gate is open.
        void give_gate(const gate& held) {
            queue_->give({.kind = work::kind_type::await, .number = 1, .event = held.state_});
        }
        [[nodiscard]] bool idle() { return queue_->idle(); }

    private:
        friend class host_machinery;
        std::unique_ptr<queue> queue_;
    };
    class event {
    private:
        friend class host_machinery;
        std::shared_ptr<event_state> state_ = std::make_shared<event_state>();
    };
    class plan {
    public:
        [[nodiscard]] std::size_t table_bytes() const noexcept {
            std::size_t runs = 0;
            for (const auto& chunk : *chunks_) {
                runs += chunk.size();
            }
            return runs * sizeof(weightwire::nccl::byte_run);
        }

    protected:
        explicit plan(std::span<const std::vector<weightwire::nccl::byte_run>> chunks)
            : chunks_{std::make_shared<chunk_list>(chunks.begin(), chunks.end())} {}
        std::shared_ptr<const chunk_list> chunks_;
    };
    struct gather_plan : plan {
        explicit gather_plan(std::span<const std::vector<weightwire::nccl::byte_run>> chunks)
            : plan{chunks} {}
        void launch(std::size_t chunk, std::byte* buffer, stream& on,
                    weightwire::nccl::copy_pace /*pace*/) const {
            host_machinery::give(on, {.kind = work::kind_type::gather,
                                      .to = buffer,
                                      .number = chunk,
                                      .chunks = chunks_});
        }
    };
    struct scatter_plan : plan {
        explicit scatter_plan(std::span<const std::vector<weightwire::nccl::byte_run>> chunks)
            : plan{chunks} {}
        void launch(std::size_t chunk, const std::byte* buffer, stream& on,
                    weightwire::nccl::copy_pace /*pace*/) const {
            host_machinery::give(on, {.kind = work::kind_type::scatter,
                                      .from = buffer,
                                      .number = chunk,
                                      .chunks = chunks_});
        }
    };

    class communicator {
    public:
        explicit communicator(std::shared_ptr<host_group> group) : group_{std::move(group)} {}
        communicator(communicator&&) noexcept = default;
        communicator& operator=(communicator&&) = delete;
        ~communicator() { abort(); }

        void warm_up(weightwire::deadline until, const std::stop_token& stop) {
            host_world::meet("warm_up", 0);
            const auto ok = [&] {
                return group_->goes_on() && !stop.stop_requested() && !until.expired();
            };
            bool done = true;
            char word = 'w';
            if (group_->rank != 0) {
                done = host_put(group_->sockets[0].fd(), word, ok) &&
                       host_take(group_->sockets[0].fd(), word, ok);
            } else {
                for (std::size_t i = 1; done && i < group_->sockets.size(); ++i) {
                    done = host_take(group_->sockets[i].fd(), word, ok);
                }
                for (std::size_t i = 1; done && i < group_->sockets.size(); ++i) {
                    done = host_put(group_->sockets[i].fd(), word, ok);
                }
            }
            if (!done) {
                group_->failed = true;
                fail("ncclAllReduce", weightwire::phase::init, until, stop);
            }
        }
        void broadcast(std::byte* data, std::uint64_t count, weightwire::nccl_api::element type,
                       int /*root*/, stream& on, weightwire::deadline until,
                       const std::stop_token& stop) {
            host_world::meet("broadcast", broadcasts_++);
            host_world::meet("part", static_cast<std::uint64_t>(group_->rank));
            check("ncclBroadcast", until, stop);
            if (count != 0) {
                host_machinery::give(on, {.kind = work::kind_type::broadcast,
                                          .to = data,
                                          .number = count * weightwire::nccl_api::size_of(type),
                                          .group = group_});
            }
        }
        void wait(const event& point, weightwire::deadline until, const std::stop_token& stop) {
            host_world::meet("wait", waits_++);
            for (;;) {
                const bool done = host_machinery::done(point);
                check("a broadcast", until, stop, done);
                if (done) {
                    return;
                }
                std::this_thread::sleep_for(std::chrono::microseconds{50});
            }
        }
        void abort() noexcept {
            if (group_ != nullptr) {
                if (!group_->ended) {
                    host_world::meet("abort", static_cast<std::uint64_t>(group_->rank));
                    lost_ = group_->device == host_world::stuck_device;
                }
                if (lost_) {
                    weightwire::gpu::lost_devices::note(group_->device);
                }
                group_->ended = true;
                for (auto& each : group_->sockets) {
                    ::shutdown(each.fd(), SHUT_RDWR);
                }
            }
        }
        [[nodiscard]] bool usable() const noexcept {
            return group_ != nullptr && group_->goes_on();
        }
        [[nodiscard]] bool lost() const noexcept { return lost_; }

    private:
        void check(const char* operation, weightwire::deadline until, const std::stop_token& stop,
                   bool done = false) {
            if (!group_->goes_on() || (!done && (until.expired() || stop.stop_requested()))) {
                fail(operation, weightwire::phase::update, until, stop);
            }
        }
        [[noreturn]] void fail(const char* operation, weightwire::phase where,
                               weightwire::deadline until, const std::stop_token& stop) {
            const weightwire::error_context context{.phase = where,
                                                    .peer = "a rank",
                                                    .backend = "nccl",
                                                    .operation = operation,
                                                    .rank = group_->rank};
            abort();
            if (stop.stop_requested()) {
                throw weightwire::cancelled_error{"the stop was requested", context};
            }
            if (until.expired()) {
                throw weightwire::timeout_error{"the other ranks did not do their part in time",
                                                context};
            }
            throw weightwire::peer_error{"another rank is gone", context};
        }

        std::shared_ptr<host_group> group_;
        std::uint64_t broadcasts_ = 0;
        std::uint64_t waits_ = 0;
        bool lost_ = false;
    };

    host_machinery(int device, const std::string& library) : device_{device}, library_{library} {}

    [[nodiscard]] int device() const noexcept { return device_; }
    [[nodiscard]] int nccl_version() const noexcept { return host_world::nccl_version; }
    [[nodiscard]] std::string library_path() const { return "sockets"; }
    [[nodiscard]] std::string library_description() const {
        return "a star of sockets" + (library_.empty() ? library_ : ", asked for " + library_);
    }
    void load_kernels() {}

    [[nodiscard]] buffer allocate(std::size_t bytes) {
        ++host_world::buffers;
        return buffer{bytes};
    }
    [[nodiscard]] pinned_buffer allocate_pinned(std::size_t bytes) {
        ++host_world::pinned;
        return buffer{bytes};
    }
    [[nodiscard]] stream make_stream() { return {}; }
    [[nodiscard]] stream make_urgent_stream() { return {}; }
    [[nodiscard]] event make_event() { return {}; }
    void record(event& point, stream& on) {
        const auto ticket = ++point.state_->recorded;
        give(on, {.kind = work::kind_type::reach, .number = ticket, .event = point.state_});
    }
    void record_after(event& point, void* users) { record(point, *static_cast<stream*>(users)); }
    void make_wait(stream& later, const event& point) {
        if (const auto ticket = point.state_->recorded.load(); ticket != 0) {
            give(later, {.kind = work::kind_type::await, .number = ticket, .event = point.state_});
        }
    }
    void make_source_wait(void* users, const event& point) {
        make_wait(*static_cast<stream*>(users), point);
    }
    [[nodiscard]] bool is_done(const event& point) const { return done(point); }
    [[nodiscard]] static bool is_idle(stream& asked) { return asked.idle(); }
    void copy(std::byte* to, const std::byte* from, std::size_t bytes, stream& on) {
        on.give_copy(to, from, bytes);
    }
    [[nodiscard]] gather_plan make_gather(
        std::span<const std::vector<weightwire::nccl::byte_run>> chunks) {
        ++host_world::buffers;
        return gather_plan{chunks};
    }
    [[nodiscard]] scatter_plan make_scatter(
        std::span<const std::vector<weightwire::nccl::byte_run>> chunks) {
        host_world::meet("make_scatter", static_cast<std::uint64_t>(device_));
        ++host_world::buffers;
        return scatter_plan{chunks};
    }

    /// Listens, and names the port in the id. As with NCCL, the process that makes an id serves the
    /// meeting.
    [[nodiscard]] weightwire::wire::unique_id make_unique_id() {
        listener_ = host_socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof address;
        if (::bind(listener_.fd(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
            ::listen(listener_.fd(), 64) != 0 ||
            ::getsockname(listener_.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
            throw weightwire::resource_error{"no socket"};
        }
        std::random_device source;
        meeting_place named{.magic = meeting_magic,
                            .nonce = (std::uint64_t{source()} << 32U) | source(),
                            .port = ntohs(address.sin_port)};
        weightwire::wire::unique_id id{};
        std::memcpy(id.data(), &named, sizeof named);
        return id;
    }
    [[nodiscard]] communicator join(const weightwire::wire::unique_id& id, int world_size, int rank,
                                    weightwire::deadline until, const std::stop_token& stop);

private:
    static constexpr std::uint64_t meeting_magic = 0x7473'6f68'6c63'636eULL;
    struct meeting_place {
        std::uint64_t magic = 0;
        std::uint64_t nonce = 0;
        std::uint16_t port = 0;
    };
    struct greeting {
        std::uint64_t nonce = 0;
        std::int32_t rank = 0;
        std::int32_t world_size = 0;
        std::int32_t version = 0;
    };

    static void give(stream& on, work next) { on.queue_->give(std::move(next)); }
    [[nodiscard]] static bool done(const event& point) {
        return point.state_->done >= point.state_->recorded;
    }
    [[noreturn]] static void refuse(const std::string& text, int rank) {
        throw weightwire::usage_error{text,
                                      {.phase = weightwire::phase::init,
                                       .backend = "nccl",
                                       .operation = "ncclCommInitRank",
                                       .rank = rank}};
    }
    template <class GoesOn>
    void gather_ranks(host_group& group, const meeting_place& place, int world_size,
                      GoesOn goes_on);
    template <class GoesOn>
    void go_to_root(host_group& group, const meeting_place& place, int world_size, GoesOn goes_on);

    int device_;
    std::string library_;
    host_socket listener_;
};

template <class GoesOn>
void host_machinery::gather_ranks(host_group& group, const meeting_place& place, int world_size,
                                  GoesOn goes_on) {
    group.sockets.resize(static_cast<std::size_t>(world_size));
    for (int joined = 1; joined < world_size && goes_on();) {
        pollfd ready{.fd = listener_.fd(), .events = POLLIN, .revents = 0};
        if (::poll(&ready, 1, 5) < 1) {
            continue;
        }
        host_socket from{::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC)};
        from.send_at_once();
        greeting hello;
        if (!host_take(from.fd(), hello, goes_on) || hello.nonce != place.nonce) {
            continue;
        }
        if (hello.world_size != world_size || hello.rank < 1 || hello.rank >= world_size) {
            refuse("a rank says rank " + std::to_string(hello.rank) + " of " +
                       std::to_string(hello.world_size) + ", this group has " +
                       std::to_string(world_size),
                   0);
        }
        auto& place_of = group.sockets[static_cast<std::size_t>(hello.rank)];
        if (place_of.fd() >= 0) {
            refuse("rank " + std::to_string(hello.rank) + " has come twice", 0);
        }
        if (hello.version != nccl_version()) {
            throw weightwire::mismatch_error{"Mismatched NCCL version detected",
                                             {.phase = weightwire::phase::init, .backend = "nccl"}};
        }
        place_of = std::move(from);
        ++joined;
    }
    for (std::size_t i = 1; i < group.sockets.size() && goes_on(); ++i) {
        group.failed = group.failed || !host_put(group.sockets[i].fd(), 'g', goes_on);
    }
}

template <class GoesOn>
void host_machinery::go_to_root(host_group& group, const meeting_place& place, int world_size,
                                GoesOn goes_on) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(place.port);
    host_socket to;
    while (goes_on()) {
        to = host_socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
        to.send_at_once();
        if (::connect(to.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
            break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds{5});
    }
    char word = 0;
    const greeting hello{place.nonce, group.rank, world_size, nccl_version()};
    group.failed =
        !host_put(to.fd(), hello, goes_on) || !host_take(to.fd(), word, goes_on) || word != 'g';
    group.sockets.push_back(std::move(to));
}

inline host_machinery::communicator host_machinery::join(const weightwire::wire::unique_id& id,
                                                         int world_size, int rank,
                                                         weightwire::deadline until,
                                                         const std::stop_token& stop) {
    host_world::meet("join", 0);
    meeting_place place;
    std::memcpy(&place, id.data(), sizeof place);
    if (place.magic != meeting_magic || world_size < 2 || rank < 0 || rank >= world_size) {
        refuse("this is no id of a group, or no rank in it", rank);
    }
    auto group = std::make_shared<host_group>();
    group->rank = rank;
    group->device = device_;
    const auto goes_on = [&] { return !until.expired() && !stop.stop_requested(); };
    if (rank == 0) {
        gather_ranks(*group, place, world_size, goes_on);
        listener_ = {};
    } else {
        go_to_root(*group, place, world_size, goes_on);
    }
    const weightwire::error_context context{.phase = weightwire::phase::init,
                                            .backend = "nccl",
                                            .operation = "ncclCommInitRank",
                                            .rank = rank};
    if (stop.stop_requested()) {
        throw weightwire::cancelled_error{"the stop was requested", context};
    }
    if (until.expired()) {
        throw weightwire::timeout_error{"not all ranks came in time", context};
    }
    if (group->failed) {
        throw weightwire::peer_error{"another rank went away while joining", context};
    }
    host_world::meet("joined", 0);
    return communicator{std::move(group)};
}

static_assert(weightwire::nccl::Machinery<host_machinery>);

}  // namespace tests
