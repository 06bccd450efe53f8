#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/detail/descriptor.hpp>
#include <weightwire/http/reply.hpp>
#include <weightwire/http/request_reader.hpp>
#include <weightwire/http/server_options.hpp>
#include <weightwire/http/socket.hpp>
#include <weightwire/wire/http_message.hpp>

/// @file
/// What `http::server` does whatever its handler's type: connections, their threads, their end.

namespace weightwire::http::detail {

/// The server without its handler's type. Kept alive by its threads.
class server_core {
public:
    using handle_function = http_response (*)(void* handler, const http_request& request);

    /// Binds and listens.
    /// @throws resource_error the address cannot be bound; usage_error an option is out of range.
    server_core(server_options options, void* handler, handle_function handle)
        : options_{checked(std::move(options))},
          handler_{handler},
          handle_{handle},
          listener_{listen_at(options_.address, options_.port)},
          wake_{socket_handle::from_native(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC))} {
        if (!wake_) {
            throw resource_error{
                "no descriptor is left for a server; raise the limit of open files (ulimit -n)",
                {.phase = phase::serve, .operation = "eventfd", .native_code = errno}};
        }
        spare_ = spare_descriptor();
        hung_up_.reserve(options_.max_connections + turned_away_at_once);
    }
    server_core(const server_core&) = delete;
    server_core& operator=(const server_core&) = delete;

    [[nodiscard]] const server_options& options() const noexcept { return options_; }
    [[nodiscard]] std::uint16_t port() const noexcept { return listener_.port; }

    /// Begins to accept. `self` owns this object; every thread holds it.
    /// @throws usage_error started before.
    void start(const std::shared_ptr<void>& self) {
        const std::lock_guard lock{mutex_};
        if (started_) {
            throw usage_error{"a server was started twice; make another one"};
        }
        started_ = true;
        self_ = self;
        acceptor_ = std::thread{[this, self] { accept_loop(); }};
    }

    /// Stops accepting, asks the handlers to stop and waits for them.
    /// @returns connections that had not ended at the deadline; they end by themselves when their
    /// handlers return.
    std::size_t stop(deadline until) {
        begin_stop();
        if (acceptor_.joinable()) {
            acceptor_.join();
        }
        listener_.socket.close();
        std::list<std::unique_ptr<connection>> finished;
        std::size_t left = 0;
        {
            std::unique_lock lock{mutex_};
            ended_.wait_until(lock, until.when(), [this] { return active_ == 0; });
            left = active_;
            for (auto& each : connections_) {
                if (!each->finished && each->thread.joinable()) {
                    ::shutdown(each->socket.native_handle(), SHUT_RDWR);
                    each->thread.detach();  // it keeps this object, and so its connection
                }
            }
            finished = take_finished();
        }
        join(finished);
        return left;
    }

private:
    /// One client. The flags are guarded by the core's mutex.
    struct connection {
        connection(socket_handle from, const server_options& options)
            : socket{std::move(from)}, reader{client_socket{socket.native_handle()}, options} {}

        socket_handle socket;
        request_reader reader;
        std::string head{};       // of the reply
        std::stop_source stop{};  // once for the connection: after a stop there is no next request
        std::thread thread{};
        bool handling = false;
        bool finished = false;
    };

    /// Clients over the limit that are told so at the same time; more are closed without a word.
    static constexpr std::size_t turned_away_at_once = 16;
    static constexpr std::chrono::milliseconds watch_period{20};
    static constexpr int idle_periods = 50;  // after so many without a handler the watch sleeps
    static constexpr std::string_view too_many_text =
        "resource: this server has as many connections as it may; close one or raise "
        "max_connections";
    static constexpr std::string_view no_descriptor_text =
        "resource: this server's process may open no more files; raise its limit of open files "
        "(ulimit -n)";

    static server_options checked(server_options options) {
        constexpr auto none = std::chrono::milliseconds::zero();
        if (options.max_header < 512 || options.max_header > (std::size_t{32} << 10U) ||
            options.max_connections == 0 || options.idle_timeout <= none ||
            options.header_timeout <= none || options.body_timeout <= none ||
            options.reply_timeout <= none || options.buffer_timeout <= none) {
            throw usage_error{
                "a server option is out of range: max_header is 512 to 32768, max_connections at "
                "least 1, every timeout positive",
                {.phase = phase::serve}};
        }
        return options;
    }

    void begin_stop() {
        std::vector<std::stop_source> sources;
        {
            const std::lock_guard lock{mutex_};
            stopping_ = true;
            for (auto& each : connections_) {
                sources.push_back(each->stop);
                // Wakes a wait for the next request. Not while a handler runs: to it a connection
                // that is shut looks like a client that has left.
                if (!each->finished && !each->handling) {
                    ::shutdown(each->socket.native_handle(), SHUT_RD);
                }
            }
        }
        wake();
        for (auto& source : sources) {
            source.request_stop();  // without the lock: it runs the handlers' callbacks
        }
    }

    /// A descriptor of nothing in particular, or none where there is none left.
    [[nodiscard]] socket_handle spare_descriptor() const noexcept {
        return socket_handle::from_native(::fcntl(wake_.native_handle(), F_DUPFD_CLOEXEC, 0));
    }

    void wake() noexcept {
        const std::uint64_t one = 1;
        static_cast<void>(!::write(wake_.native_handle(), &one, sizeof one));
    }

    // --- the accepting thread, which also looks for clients that have hung up

    void accept_loop() {
        int quiet = 0;
        for (;;) {
            const bool watching = reap();
            std::array<pollfd, 2> entries{{{listener_.socket.native_handle(), POLLIN, 0},
                                           {wake_.native_handle(), POLLIN, 0}}};
            const int period = static_cast<int>(watch_period.count());
            ::poll(entries.data(), entries.size(), watching ? period : -1);
            std::uint64_t count = 0;
            static_cast<void>(!::read(wake_.native_handle(), &count, sizeof count));
            if (is_stopping()) {
                return;
            }
            if (entries[0].revents != 0) {
                accept_one();
            }
            if (watching) {
                quiet = watch() ? 0 : quiet + 1;
                if (quiet > idle_periods) {
                    sleep_watch();
                    quiet = 0;
                }
            }
        }
    }

    [[nodiscard]] bool is_stopping() {
        const std::lock_guard lock{mutex_};
        return stopping_;
    }

    /// Frees connections that have ended; returns whether handlers are watched.
    bool reap() {
        std::list<std::unique_ptr<connection>> finished;
        bool watching = false;
        {
            const std::lock_guard lock{mutex_};
            finished = take_finished();
            watching = watching_;
        }
        join(finished);
        return watching;
    }

    /// Call with the mutex held.
    std::list<std::unique_ptr<connection>> take_finished() {
        std::list<std::unique_ptr<connection>> finished;
        for (auto at = connections_.begin(); at != connections_.end();) {
            const auto here = at++;
            if ((*here)->finished) {
                finished.splice(finished.end(), connections_, here);
            }
        }
        return finished;
    }

    /// Of a finished thread only its last instructions are left.
    static void join(std::list<std::unique_ptr<connection>>& finished) {
        for (auto& each : finished) {
            if (each->thread.joinable()) {
                each->thread.join();
            }
        }
    }

    /// The next client. Where the process may open no more files, the descriptor that is kept for
    /// this is given up for it, so that a client hears why it is not served.
    [[nodiscard]] socket_handle accept_next(bool& last_descriptor) {
        const auto accept = [this] {
            return socket_handle::from_native(::accept4(listener_.socket.native_handle(), nullptr,
                                                        nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        };
        if (!spare_) {
            spare_ = spare_descriptor();
        }
        auto socket = accept();
        const int code = errno;
        if (socket || !weightwire::detail::is_out_of_descriptors(code)) {
            if (!socket && (code == ENOBUFS || code == ENOMEM)) {
                std::this_thread::sleep_for(watch_period);
            }
            return socket;
        }
        if (std::exchange(spare_, {})) {
            last_descriptor = true;
            return accept();
        }
        // The client stays in the queue; without a pause this thread would spin.
        std::this_thread::sleep_for(watch_period);
        return {};
    }

    void accept_one() {
        bool last_descriptor = false;
        auto socket = accept_next(last_descriptor);
        if (!socket) {
            return;
        }
        tune_connection(socket.native_handle());
        const std::lock_guard lock{mutex_};
        const auto refusal = last_descriptor                       ? no_descriptor_text
                             : active_ >= options_.max_connections ? too_many_text
                                                                   : std::string_view{};
        if (stopping_ || active_ >= options_.max_connections + turned_away_at_once) {
            return;
        }
        try {
            auto made = std::make_unique<connection>(std::move(socket), options_);
            auto& added = *connections_.emplace_back(std::move(made));
            auto self = self_.lock();
            added.thread = std::thread{[this, self, &added, refusal] { run(added, refusal); }};
            ++active_;
        } catch (const std::exception&) {  // no memory or no thread: this client is let go
            if (!connections_.empty() && !connections_.back()->thread.joinable()) {
                connections_.pop_back();
            }
        }
    }

    /// Stops the handlers whose clients have left; returns whether any handler runs.
    bool watch() {
        bool any = false;
        {
            const std::lock_guard lock{mutex_};
            for (auto& each : connections_) {
                any = any || each->handling;
                if (each->handling && !each->stop.stop_requested() &&
                    has_hung_up(each->socket.native_handle())) {
                    hung_up_.push_back(each->stop);
                }
            }
        }
        for (auto& source : hung_up_) {
            source.request_stop();
        }
        hung_up_.clear();
        return any;
    }

    /// Stops looking until the next request.
    void sleep_watch() {
        const std::lock_guard lock{mutex_};
        watching_ = std::ranges::any_of(connections_, [](auto& each) { return each->handling; });
    }

    // --- a connection's thread

    void run(connection& client, std::string_view refusal) noexcept {
        try {
            if (!refusal.empty()) {
                turn_away(client, refusal);
            } else {
                serve(client);
            }
        } catch (const std::exception&) {
            // No memory for a request: the client sees its connection end.
        }
        {
            const std::lock_guard lock{mutex_};
            client.socket.close();
            client.finished = true;
            --active_;
            ended_.notify_all();
        }
        wake();
    }

    void serve(connection& client) {
        for (;;) {
            const auto got = client.reader.receive();
            if (!got.is_ready()) {
                if (got.status != 0) {
                    refuse(client, got.status, got.text);
                }
                return;
            }
            auto request = client.reader.request();
            request.stop = client.stop.get_token();
            request.client_waits = [](const void* context) noexcept {
                return !has_hung_up(
                    static_cast<const connection*>(context)->socket.native_handle());
            };
            request.context = &client;
            if (!begin_handling(client)) {
                return;
            }
            const auto response = answer(request);
            const bool stopping = end_handling(client);
            const bool keeps = client.reader.keeps_alive() && !stopping;
            compose_head(client.head, response, keeps);
            const auto body = request.method == "HEAD" ? std::string_view{} : response.body;
            if (!write_all(client.socket.native_handle(), client.head, body,
                           deadline::after(options_.reply_timeout)) ||
                !keeps) {
                return;
            }
        }
    }

    [[nodiscard]] http_response answer(const http_request& request) const {
        try {
            return handle_(handler_, request);
        } catch (const std::exception& thrown) {
            return error_response(500, thrown.what());
        } catch (...) {
            return error_response(500, "the handler threw what is no std::exception");
        }
    }

    void refuse(connection& client, int status, std::string_view text) const {
        const auto response = error_response(status, text);
        compose_head(client.head, response, /*keeps=*/false);
        const int native = client.socket.native_handle();
        if (write_all(native, client.head, response.body,
                      deadline::after(options_.reply_timeout))) {
            std::array<char, 16384> scratch;
            linger(native, scratch);
        }
    }

    void turn_away(connection& client, std::string_view refusal) const {
        constexpr std::chrono::seconds patience{1};
        if (wait_for(client.socket.native_handle(), POLLIN, deadline::after(patience))) {
            refuse(client, 503, refusal);
        }
    }

    /// False where the server stops.
    bool begin_handling(connection& client) {
        const std::lock_guard lock{mutex_};
        if (stopping_) {
            return false;
        }
        client.handling = true;
        if (!std::exchange(watching_, true)) {
            wake();
        }
        return true;
    }

    /// Whether the server stops.
    bool end_handling(connection& client) {
        const std::lock_guard lock{mutex_};
        client.handling = false;
        return stopping_;
    }

    const server_options options_;
    void* handler_;
    handle_function handle_;
    listener listener_;
    socket_handle wake_;
    socket_handle spare_;  // of the accepting thread: the last descriptor, to say that it is
    std::thread acceptor_;
    std::vector<std::stop_source> hung_up_;  // of the accepting thread

    std::mutex mutex_;  // guards the rest
    std::condition_variable ended_;
    std::weak_ptr<void> self_;
    std::list<std::unique_ptr<connection>> connections_;
    std::size_t active_ = 0;
    bool started_ = false;
    bool stopping_ = false;
    bool watching_ = false;  // the accepting thread looks for hang-ups
};

}  // namespace weightwire::http::detail
