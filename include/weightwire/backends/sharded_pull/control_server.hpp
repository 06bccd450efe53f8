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
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/backends/sharded_pull/control_channel.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/detail/descriptor.hpp>
#include <weightwire/rendezvous/socket.hpp>

/// @file
/// A trainer rank's end of the control connections: one thread that listens, reads and writes, from
/// init to the end, so that a worker may come back at any time.

namespace weightwire::sharded_pull {

/// One worker rank's connection. Its socket is read by the server's thread alone.
class control_connection {
public:
    explicit control_connection(rendezvous::unique_socket socket, int wake)
        : socket_{std::move(socket), sizeof(hello_body)}, wake_{wake} {}
    control_connection(const control_connection&) = delete;
    control_connection& operator=(const control_connection&) = delete;

    static constexpr int of_trainer = -1;
    /// Of the worker rank that it has turned out to be, or `of_trainer`; 0 before its hello.
    [[nodiscard]] int worker_rank() const noexcept { return worker_rank_; }

    /// Sends a frame, soon. Any thread; never waits, throws nothing: a connection that has ended
    /// shows on the server's thread.
    void send(frame_kind kind, std::string_view body) noexcept {
        try {
            const std::lock_guard lock{out_mutex_};
            if (!ending_) {
                socket_.queue(kind, body);
                push();
            }
        } catch (...) {
            socket_.shut_down();  // it hung up, or there is no memory for what it has to know
        }
    }
    /// Says why and ends the connection.
    void refuse(const failure& why) noexcept {
        try {
            const std::lock_guard lock{out_mutex_};
            if (!ending_) {
                socket_.queue(frame_kind::refused, refusal_of(why));
                ending_ = true;
                push();
            }
        } catch (...) {
            socket_.shut_down();
        }
    }

private:
    template <class Handler>
    friend class control_server;

    /// With the mutex. What does not fit the socket's buffer the server's thread sends.
    void push() {
        if (!socket_.flush()) {
            const std::uint64_t one = 1;
            static_cast<void>(::write(wake_, &one, sizeof one));
        } else if (ending_) {
            ::shutdown(socket_.native_handle(), SHUT_WR);
        }
    }
    [[nodiscard]] bool wants_to_send() {
        const std::lock_guard lock{out_mutex_};
        return socket_.wants_to_send();
    }
    void flush() {
        const std::lock_guard lock{out_mutex_};
        push();
    }
    [[nodiscard]] bool ending() {
        const std::lock_guard lock{out_mutex_};
        return ending_;
    }

    frame_socket socket_;
    int wake_;
    std::mutex out_mutex_;  ///< of what is sent
    bool ending_ = false;
    std::atomic<int> worker_rank_{0};
    /// When it is closed if it has not said who it is, or has not gone after a refusal.
    deadline patience_ = deadline::after(std::chrono::seconds{10});
    bool gone_ = false;
};

/// Listens and hands frames to `Handler`, which has
/// - `nonce()`: what a hello must carry;
/// - `on_hello(connection, hello)`, then `on_frame(connection, frame)` for the others: on the
///   server's thread; what they throw is said to the worker, and ends the connection;
/// - `on_gone(connection) noexcept`: after the last of them, once or twice.
template <class Handler>
class control_server {
public:
    using connection = std::shared_ptr<control_connection>;
    /// Most bytes of a plan or of what a worker reads.
    static constexpr std::uint64_t most_frame_bytes = std::uint64_t{256} << 20U;

    /// Listens at `host`, on a port of the system's choice. `handler` outlives this object.
    /// @throws peer_error the name is unknown. @throws resource_error it is no address of this
    /// machine, or no descriptor is left.
    control_server(Handler& handler, const std::string& host, deadline until)
        : handler_{handler},
          wake_{rendezvous::unique_socket::from_native(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))} {
        const error_context where{.phase = phase::init, .backend = "sharded_pull"};
        const auto addresses = rendezvous::resolve(host, 0, until, {}, where);
        listener_ = rendezvous::listen_at(addresses.front(), host, where);
        port_ = rendezvous::local_address(listener_).port();
        if (!wake_ || port_ == 0) {
            throw resource_error{"no port can be opened for the workers of a trainer rank", where};
        }
        thread_ = std::jthread{[this](const std::stop_token& stop) { run(stop); }};
    }
    control_server(const control_server&) = delete;
    control_server& operator=(const control_server&) = delete;
    ~control_server() {
        thread_.request_stop();
        wake();
    }

    [[nodiscard]] std::uint16_t port() const noexcept { return port_; }

private:
    static constexpr std::size_t most_strangers = 256;

    void wake() const noexcept {
        const std::uint64_t one = 1;
        static_cast<void>(::write(wake_.native_handle(), &one, sizeof one));
    }

    void run(const std::stop_token& stop) noexcept {
        while (!stop.stop_requested()) {
            try {
                wait();
                take_new();
                for (std::size_t i = 0; i < open_.size(); ++i) {
                    serve(open_[i], polled_[i + 2].revents);
                }
                open_.insert(open_.end(), fresh_.begin(), fresh_.end());
                fresh_.clear();
                std::erase_if(open_, [](const connection& each) { return each->gone_; });
            } catch (...) {
                // No memory for a moment: those that are open stay, and time goes on.
                std::this_thread::sleep_for(std::chrono::milliseconds{10});
            }
        }
        for (const auto& each : open_) {
            each->socket_.shut_down();
        }
    }

    void wait() {
        polled_.clear();
        polled_.push_back({wake_.native_handle(), POLLIN, 0});
        polled_.push_back(
            {listener_.native_handle(), static_cast<short>(room() > 0 ? POLLIN : 0), 0});
        for (const auto& each : open_) {
            const auto out = each->wants_to_send() ? POLLOUT : 0;
            polled_.push_back({each->socket_.native_handle(), static_cast<short>(POLLIN | out), 0});
        }
        constexpr int longest = 1000;
        if (::poll(polled_.data(), polled_.size(), longest) < 0) {
            for (auto& each : polled_) {
                each.revents = 0;
            }
        }
        if (polled_[0].revents != 0) {
            std::uint64_t count = 0;
            static_cast<void>(::read(wake_.native_handle(), &count, sizeof count));
        }
    }

    void take_new() {
        for (auto left = polled_[1].revents != 0 ? room() : 0; left > 0; --left) {
            auto socket = rendezvous::unique_socket::from_native(::accept4(
                listener_.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
            if (!socket) {
                if (weightwire::detail::is_out_of_descriptors(errno)) {
                    // It waits in the listener, which would wake this thread at once again.
                    std::this_thread::sleep_for(std::chrono::milliseconds{10});
                }
                return;
            }
            weightwire::detail::set_option(socket.native_handle(), IPPROTO_TCP, TCP_NODELAY, 1);
            fresh_.push_back(
                std::make_shared<control_connection>(std::move(socket), wake_.native_handle()));
        }
    }
    /// For connections that have not said who they are; the others wait in the listener.
    [[nodiscard]] std::size_t room() const {
        const auto strangers = static_cast<std::size_t>(std::ranges::count_if(
            open_, [](const connection& each) { return each->worker_rank() == 0; }));
        return most_strangers - std::min(most_strangers, strangers + fresh_.size());
    }

    void serve(const connection& from, short events) noexcept {
        bool open = true;
        try {
            if ((events & (POLLIN | POLLERR | POLLHUP)) != 0) {
                open = from->socket_.fill();
                while (!from->ending()) {
                    const auto got = from->socket_.next();
                    if (!got) {
                        break;
                    }
                    take(from, *got);
                }
                if (from->ending()) {
                    from->socket_.discard();
                }
            }
            if (open && (events & POLLOUT) != 0) {
                open = still_open(*from);
            }
        } catch (const error& caught) {
            refuse(from, failure::from(caught));
        } catch (...) {
            refuse(from, {.kind = "resource", .text = "the trainer rank has no memory left"});
        }
        const bool waits = from->worker_rank() == 0 || from->ending();
        if (!open || (waits && from->patience_.expired())) {
            from->gone_ = true;
            from->socket_.shut_down();
            handler_.on_gone(from);
        }
    }

    /// Sends on. False: the other side has hung up, and can be told nothing any more.
    [[nodiscard]] static bool still_open(control_connection& to) {
        try {
            to.flush();
            return true;
        } catch (const peer_error&) {
            return false;
        }
    }

    void take(const connection& from, const frame& got) {
        if (from->worker_rank() != 0) {
            handler_.on_frame(from, got);
            return;
        }
        const auto hello = got.as<hello_body>();
        const bool trainer = hello.worker_rank == hello_body::of_trainer;
        const bool worker = hello.worker_rank != 0 && hello.worker_rank < hello.world_size &&
                            hello.world_size <= (1U << 20U);
        if (got.kind != frame_kind::hello || hello.magic != hello_magic ||
            hello.nonce != handler_.nonce() || !(trainer || worker)) {
            throw protocol_error{
                "this control port belongs to a trainer whose init message "
                "does not lead here; begin again with init"};
        }
        from->worker_rank_ =
            trainer ? control_connection::of_trainer : static_cast<int>(hello.worker_rank);
        from->socket_.allow(most_frame_bytes);
        handler_.on_hello(from, hello);
    }

    void refuse(const connection& from, const failure& why) noexcept {
        if (!from->ending()) {
            from->patience_ = deadline::after(std::chrono::seconds{2});
        }
        from->refuse(why);
        handler_.on_gone(from);  // whatever the other side still does
    }

    Handler& handler_;
    rendezvous::unique_socket wake_;
    rendezvous::unique_socket listener_;
    std::uint16_t port_ = 0;
    std::vector<connection> open_;
    std::vector<connection> fresh_;
    std::vector<pollfd> polled_;
    std::jthread thread_;  // last: it uses all of them
};

}  // namespace weightwire::sharded_pull
