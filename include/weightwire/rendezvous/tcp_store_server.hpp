#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/rendezvous/socket.hpp>
#include <weightwire/rendezvous/store_request.hpp>
#include <weightwire/rendezvous/store_table.hpp>

/// @file
/// A key-value server that speaks torch's TCPStore protocol: what trainer ranks meet at, and what
/// vLLM's workers fetch NCCL's unique id from.

namespace weightwire::rendezvous {

/// Where a store listens and what its clients may cost.
struct tcp_store_options {
    /// An address of this machine, or a name of one; `0.0.0.0` or `::` for all. Loopback unless
    /// told otherwise: the protocol has no authentication, whoever reaches the port may write.
    std::string address = "127.0.0.1";
    std::uint16_t port = 0;  ///< 0: one that is free; ask `port()`
    store_limits limits{};
    std::size_t max_connections = 4096;
    std::size_t max_store_bytes = std::size_t{1} << 30U;   ///< keys, values and waits
    std::size_t max_buffer_bytes = std::size_t{1} << 30U;  ///< half-read requests, unread replies
    /// Time for the first request, for every later one from its first byte, and between two bytes
    /// that a client takes of a reply. A client that has asked nothing may stay silent for ever, as
    /// vLLM's workers do.
    std::chrono::milliseconds silence_budget{30'000};
};

/// What a store has seen, for reports and tests.
struct tcp_store_counts {
    std::uint64_t accepted = 0;
    std::uint64_t requests = 0;
    std::size_t open = 0;
    std::size_t keys = 0;
    std::array<std::uint64_t, static_cast<std::size_t>(drop_reason::count_of_reasons)> dropped{};

    [[nodiscard]] std::uint64_t of(drop_reason reason) const noexcept {
        return dropped[static_cast<std::size_t>(reason)];
    }
};

/// The server: one thread, from construction to destruction. Requests of one connection are
/// answered in order; no client can hold up another.
class tcp_store_server {
public:
    /// Listens when it returns.
    /// @throws resource_error the address is in use or not ours; names it. peer_error the name
    /// cannot be resolved.
    explicit tcp_store_server(tcp_store_options options = {},
                              deadline until = deadline::after(std::chrono::seconds{10}))
        : options_{std::move(options)}, table_{options_.limits, options_.max_store_bytes} {
        const auto addresses = resolve(options_.address, options_.port, until, {}, where());
        listener_ =
            listen_at(addresses.front(), host_and_port(options_.address, options_.port), where());
        port_ = local_address(listener_).port();
        wake_ = unique_socket::from_native(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        if (!wake_) {
            throw resource_error{"the store cannot be started",
                                 detail::with_code(where(), "eventfd", errno)};
        }
        scratch_.resize(std::size_t{256} << 10U);
        thread_ = std::thread{[this] { loop(); }};
    }
    tcp_store_server(const tcp_store_server&) = delete;
    tcp_store_server& operator=(const tcp_store_server&) = delete;
    /// Hangs up on every client, without waiting for any.
    ~tcp_store_server() {
        quit_.store(true);
        const std::uint64_t one = 1;
        // Cannot fail: the counter is far from its end.
        [[maybe_unused]] const auto written = ::write(wake_.native_handle(), &one, sizeof one);
        thread_.join();
    }

    /// The port it listens at.
    [[nodiscard]] std::uint16_t port() const noexcept { return port_; }
    /// The address it was told to listen at.
    [[nodiscard]] const std::string& address() const noexcept { return options_.address; }

    /// What it has seen. Any thread may ask.
    [[nodiscard]] tcp_store_counts counts() const noexcept {
        tcp_store_counts out{.accepted = accepted_.load(),
                             .requests = requests_.load(),
                             .open = open_.load(),
                             .keys = keys_.load()};
        for (std::size_t i = 0; i < out.dropped.size(); ++i) {
            out.dropped[i] = dropped_[i].load();
        }
        return out;
    }

private:
    using clock = deadline::clock;
    using connection_id = store_table::connection_id;

    struct connection {
        explicit connection(const store_limits& limits) : parser{limits} {}
        unique_socket socket{};
        store_request_parser parser;
        std::string input{};   ///< begins with a request's first byte
        std::string output{};  ///< replies, `sent` bytes of which are gone
        std::size_t sent = 0;
        clock::time_point asked{};  ///< when the request under way began, or the connection did
        clock::time_point read{};   ///< when the client last took bytes of a reply
        bool validated = false;
        bool dropped = false;

        [[nodiscard]] std::size_t unsent() const noexcept { return output.size() - sent; }
        [[nodiscard]] bool asking() const noexcept { return !validated || !input.empty(); }
    };

    /// Replies of a connection beyond which its further requests wait until it has read some.
    static constexpr std::size_t high_water = std::size_t{1} << 20U;

    [[nodiscard]] error_context where() const {
        return {.peer = host_and_port(options_.address, options_.port), .backend = "tcp_store"};
    }

    void loop() noexcept {
        while (!quit_.load()) {
            try {
                turn();
            } catch (const std::exception&) {
                // Out of memory in the loop itself: the clients' buffers are freed by their
                // budgets, so look again a little later.
                std::this_thread::sleep_for(std::chrono::milliseconds{10});
            }
        }
    }

    /// Waits for something to do and does it.
    void turn() {
        entries_.clear();
        owners_.clear();
        const auto now = clock::now();
        entries_.push_back({wake_.native_handle(), POLLIN, 0});
        const bool accepting = now >= accept_again_;
        entries_.push_back({accepting ? listener_.native_handle() : -1, POLLIN, 0});
        auto next = accepting ? clock::time_point::max() : accept_again_;
        for (auto& [id, peer] : connections_) {
            const bool full = peer.unsent() > high_water;
            entries_.push_back(
                {peer.socket.native_handle(),
                 static_cast<short>((full ? 0 : POLLIN) | (peer.unsent() > 0 ? POLLOUT : 0)), 0});
            owners_.push_back(id);
            next = std::min(next, give_up_time(peer));
        }
        const int wait =
            next == clock::time_point::max() ? -1 : deadline::at(next).poll_milliseconds();
        if (::poll(entries_.data(), entries_.size(), wait) > 0) {
            for (std::size_t i = 0; i < owners_.size(); ++i) {
                serve(owners_[i], entries_[i + 2].revents);
            }
            if ((entries_[1].revents & POLLIN) != 0) {
                accept_all();
            }
        }
        tidy();
    }

    /// When a connection is dropped unless it does something.
    [[nodiscard]] clock::time_point give_up_time(const connection& peer) const noexcept {
        const auto budget = options_.silence_budget;
        if (peer.unsent() > 0) {
            return peer.read + budget;
        }
        return peer.asking() ? peer.asked + budget : clock::time_point::max();
    }

    void accept_all() {
        for (;;) {
            auto socket = unique_socket::from_native(::accept4(
                listener_.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
            if (!socket) {
                if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                    // The listener stays readable: without a pause this would spin.
                    accept_again_ = clock::now() + std::chrono::milliseconds{100};
                }
                return;
            }
            accepted_.fetch_add(1);
            if (connections_.size() >= options_.max_connections) {
                count(drop_reason::too_many_connections);
                continue;
            }
            const int on = 1;
            ::setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            auto& peer = connections_.try_emplace(next_id_++, options_.limits).first->second;
            peer.socket = std::move(socket);
            peer.asked = clock::now();
            open_.store(connections_.size());
        }
    }

    /// Reads from and writes to one connection. Whatever goes wrong drops this one alone.
    void serve(connection_id id, short events) noexcept {
        auto& peer = connections_.find(id)->second;
        try {
            if ((events & POLLOUT) != 0 && !peer.dropped) {
                flush(peer);
                process(id, peer);  // requests that waited for the client to read
            }
            if ((events & (POLLIN | POLLHUP | POLLERR)) != 0 && !peer.dropped) {
                receive(id, peer);
            }
        } catch (const std::exception&) {
            drop(peer, drop_reason::memory_full);
        }
    }

    void receive(connection_id id, connection& peer) {
        const auto count =
            ::recv(peer.socket.native_handle(), scratch_.data(), scratch_.size(), MSG_DONTWAIT);
        if (count > 0) {
            if (peer.validated && peer.input.empty()) {
                peer.asked = clock::now();
            }
            peer.input.append(scratch_.data(), static_cast<std::size_t>(count));
            process(id, peer);
        } else if (count == 0 || !detail::would_block(errno)) {
            drop(peer, peer.input.empty() ? drop_reason::hung_up : drop_reason::hung_up_in_request);
        }
    }

    /// Carries out the complete requests of `peer`, as long as it reads the replies.
    void process(connection_id id, connection& peer) {
        std::string_view bytes = peer.input;
        while (!peer.dropped && peer.unsent() <= high_water && !bytes.empty()) {
            const auto state = peer.parser.advance(bytes);
            if (state == store_request_parser::state::incomplete) {
                break;
            }
            if (state == store_request_parser::state::malformed) {
                // A stranger's first byte is rarely a query; say what is really wrong.
                drop(peer, peer.validated ? peer.parser.reason() : drop_reason::not_validated);
                return;
            }
            carry_out(id, peer, bytes);
            bytes.remove_prefix(peer.parser.size());
            peer.parser.reset();
            peer.asked = clock::now();
        }
        peer.input.erase(0, peer.input.size() - bytes.size());
        if (peer.input.empty() && peer.input.capacity() > high_water) {
            peer.input.shrink_to_fit();
        }
    }

    /// Before a reply is added: from now on the client is expected to read.
    static void begin_reply(connection& peer) noexcept {
        if (peer.unsent() == 0) {
            peer.read = clock::now();
        }
    }

    void carry_out(connection_id id, connection& peer, std::string_view bytes) {
        requests_.fetch_add(1);
        const bool validates = peer.parser.query() == store_query::validate;
        if (validates && peer.parser.number() != store_magic) {
            return drop(peer, drop_reason::wrong_magic);
        }
        if (!validates && !peer.validated) {
            return drop(peer, drop_reason::not_validated);
        }
        peer.validated = true;
        woken_.clear();
        begin_reply(peer);
        const auto why = table_.apply(id, peer.parser, bytes, peer.output, woken_);
        keys_.store(table_.size());
        for (const auto waiter : woken_) {
            auto& waiting = connections_.find(waiter)->second;
            begin_reply(waiting);
            waiting.output.push_back(store_stop_waiting);
            flush(waiting);
        }
        if (why) {
            return drop(peer, *why);
        }
        flush(peer);
    }

    /// Writes as much of the replies as the socket takes.
    void flush(connection& peer) {
        while (peer.unsent() > 0 && !peer.dropped) {
            const auto count = ::send(peer.socket.native_handle(), peer.output.data() + peer.sent,
                                      peer.unsent(), MSG_NOSIGNAL | MSG_DONTWAIT);
            if (count > 0) {
                peer.sent += static_cast<std::size_t>(count);
                // A request that waited for this reader has not been slow.
                peer.asked = peer.read = clock::now();
            } else if (detail::would_block(errno)) {
                return;
            } else {
                drop(peer, drop_reason::hung_up);
            }
        }
        peer.output.clear();
        peer.sent = 0;
        if (peer.output.capacity() > high_water) {
            peer.output.shrink_to_fit();
        }
    }

    void count(drop_reason reason) noexcept {
        dropped_[static_cast<std::size_t>(reason)].fetch_add(1);
    }
    void drop(connection& peer, drop_reason reason) noexcept {
        if (!peer.dropped) {
            peer.dropped = true;
            any_dropped_ = true;
            count(reason);
        }
    }

    /// Drops who was too slow and who holds too much, then forgets the dropped.
    void tidy() {
        const auto now = clock::now();
        std::size_t held = 0;
        connection* largest = nullptr;
        for (auto& [id, peer] : connections_) {
            if (now >= give_up_time(peer)) {
                drop(peer, peer.unsent() > 0 ? drop_reason::slow_reader : drop_reason::silent);
            }
            const auto cost = peer.input.capacity() + peer.output.capacity();
            held += cost;
            if (largest == nullptr ||
                cost > largest->input.capacity() + largest->output.capacity()) {
                largest = &peer;
            }
        }
        if (held > options_.max_buffer_bytes) {
            drop(*largest, drop_reason::memory_full);
        }
        if (std::exchange(any_dropped_, false)) {
            for (const auto& [id, peer] : connections_) {
                if (peer.dropped) {
                    table_.forget(id);
                }
            }
            std::erase_if(connections_, [](const auto& entry) { return entry.second.dropped; });
            open_.store(connections_.size());
        }
    }

    tcp_store_options options_;
    store_table table_;
    unique_socket listener_;
    unique_socket wake_;
    std::uint16_t port_ = 0;

    // The thread's own.
    std::map<connection_id, connection> connections_;
    std::vector<pollfd> entries_;
    std::vector<connection_id> owners_;
    std::vector<connection_id> woken_;
    std::string scratch_;
    connection_id next_id_ = 1;
    clock::time_point accept_again_{};
    bool any_dropped_ = false;

    std::atomic<bool> quit_{false};
    std::atomic<std::uint64_t> accepted_{0};
    std::atomic<std::uint64_t> requests_{0};
    std::atomic<std::size_t> open_{0};
    std::atomic<std::size_t> keys_{0};
    std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(drop_reason::count_of_reasons)>
        dropped_{};
    std::thread thread_;
};

}  // namespace weightwire::rendezvous
