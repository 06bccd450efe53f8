#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/http/server_core.hpp>
#include <weightwire/http/server_options.hpp>
#include <weightwire/wire/http_message.hpp>

/// @file
/// `http::server`: an HTTP/1.1 server in front of a handler. Boost.Beast parses what clients send.

namespace weightwire::http {

/// `handle(request)` answers one request; called from several threads at once.
template <class H>
concept RequestHandler =
    requires(std::remove_reference_t<H>& handler, const http_request& request) {
        { handler.handle(request) } -> std::same_as<http_response>;
    };

/// Serves `Handler`, one thread a connection: a handler that blocks, as an update does until its
/// data has come, delays only its own connection.
///
///     http::server server{handler, {.port = 8000}};   // an lvalue is referenced, an rvalue moved
///     in server.start();
///
/// - A handler's stop token is requested when the server stops, and within about 20 ms when the
///   client hangs up; `client_is_waiting()` looks at the socket at that moment.
/// - What the handler throws becomes 500 with its words in vLLM's envelope.
/// - A request that is too long, too slow, not allowed or no HTTP is answered in the same envelope
///   (413, 431, 408, 401, 501, 400) without reading the rest, and its connection is closed.
/// - From the third request of one size on a connection, nothing is allocated between its first
///   byte and the handler.
///
/// Thread-safety: `start` and `stop` from one thread at a time.
template <RequestHandler Handler>
class server {
public:
    /// Binds the address and listens; `port()` is valid from here on, answers begin with `start`.
    /// @throws resource_error the address is in use or not ours; names address and port.
    /// @throws usage_error an option is out of range.
    explicit server(Handler&& handler, server_options options = {})
        : state_{std::make_shared<state>(std::forward<Handler>(handler), std::move(options))} {}
    server(const server&) = delete;
    server& operator=(const server&) = delete;
    /// Stops, and waits at most a second for handlers. One that does not heed its stop token runs
    /// on: a referenced handler must outlive it.
    ~server() { state_->core.stop(deadline::after(std::chrono::seconds{1})); }

    /// Begins to answer. @throws usage_error called twice.
    void start() { state_->core.start(state_); }

    /// The port that is bound.
    [[nodiscard]] std::uint16_t port() const noexcept { return state_->core.port(); }

    /// An address under which this machine reaches the server.
    [[nodiscard]] std::string url() const {
        const auto& address = state_->core.options().address;
        const std::string host = address == "0.0.0.0" ? "127.0.0.1"
                                 : address == "::"    ? "::1"
                                                      : address;
        return "http://" + detail::host_and_port(host, port());
    }

    [[nodiscard]] const server_options& options() const noexcept { return state_->core.options(); }

    /// Stops accepting, requests the stop of every handler that runs, and waits for them. May be
    /// called again.
    /// @throws timeout_error handlers had not returned at the deadline.
    void stop(deadline until) {
        if (const auto left = state_->core.stop(until); left > 0) {
            throw timeout_error{std::to_string(left) +
                                    " handlers had not returned when the server stopped; they must "
                                    "heed the request's stop token",
                                {.phase = phase::serve, .peer = url()}};
        }
    }

    [[nodiscard]] std::remove_reference_t<Handler>& handler() noexcept { return state_->handler; }

private:
    struct state {
        state(Handler&& from, server_options options)
            : handler{std::forward<Handler>(from)},
              core{std::move(options), this, [](void* self, const http_request& request) {
                       return static_cast<state*>(self)->handler.handle(request);
                   }} {}
        Handler handler;
        detail::server_core core;
    };

    std::shared_ptr<state> state_;
};

template <class Handler>
server(Handler&&, server_options = {}) -> server<Handler>;

}  // namespace weightwire::http
