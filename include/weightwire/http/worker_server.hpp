#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include <weightwire/core/deadline.hpp>
#include <weightwire/http/server.hpp>
#include <weightwire/http/server_options.hpp>

/// @file
/// `worker_server`: a worker's service on a port.

namespace weightwire {

/// An HTTP server in front of `worker_service`, or of anything with `handle(const http_request&)`.
///
///     weightwire::worker_server server{service, {.port = 8000}};
///     server.start();
///
/// The service is referenced when it is an lvalue, else moved in. All else is `http::server`'s.
template <http::RequestHandler Service>
class worker_server {
public:
    /// @throws resource_error, usage_error as `http::server`.
    explicit worker_server(Service&& service, http::server_options options = {})
        : server_{std::forward<Service>(service), std::move(options)} {}

    /// Begins to answer. @throws usage_error called twice.
    void start() { server_.start(); }
    /// @throws timeout_error handlers had not returned at the deadline.
    void stop(deadline until) { server_.stop(until); }

    [[nodiscard]] std::uint16_t port() const noexcept { return server_.port(); }
    [[nodiscard]] std::string url() const { return server_.url(); }
    [[nodiscard]] std::remove_reference_t<Service>& service() noexcept { return server_.handler(); }

    /// One line for the log at start: where it listens, who may speak to it and who cannot.
    [[nodiscard]] std::string description() const {
        const auto& options = server_.options();
        const bool loopback = options.address.starts_with("127.") || options.address == "::1" ||
                              options.address == "localhost";
        std::string out = "serving on " + url();
        if (!loopback) {
            out += ", bound to " + options.address;
        }
        if (!options.token.empty()) {
            return out +
                   "; requests need the token, so vLLM's Python client, which sends none, cannot "
                   "drive this server";
        }
        return out + (loopback ? "; any process of this machine may send weights"
                               : "; without a token anyone who reaches this address may send "
                                 "weights");
    }

private:
    http::server<Service> server_;
};

template <class Service>
worker_server(Service&&, http::server_options = {}) -> worker_server<Service>;

}  // namespace weightwire
