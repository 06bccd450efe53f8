#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <weightwire/core/deadline.hpp>
#include <weightwire/http/socket.hpp>

/// @file
/// Raw TCP for the HTTP tests: a server that follows a script instead of the protocol, and a client
/// that sends whatever bytes a test wants. Every read gives up after five seconds.

namespace weightwire_tests {

using weightwire::deadline;

/// One end of a TCP connection.
class raw_connection {
public:
    explicit raw_connection(int native)
        : socket_{weightwire::http::detail::socket_handle::from_native(native)} {}

    /// Connects to a port of this machine.
    [[nodiscard]] static raw_connection to(std::uint16_t port) {
        raw_connection out{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (::connect(out.native(), reinterpret_cast<const sockaddr*>(&address), sizeof address) !=
            0) {
            throw std::runtime_error{"a test cannot connect to its server"};
        }
        return out;
    }

    [[nodiscard]] int native() const noexcept { return socket_.native_handle(); }

    /// False where the other side has gone or does not read.
    bool send(std::string_view bytes) const {
        return weightwire::http::detail::write_all(native(), bytes, {}, patience());
    }

    /// Everything up to and with `mark`; what has come by then where it never comes.
    [[nodiscard]] std::string read_until(std::string_view mark) {
        const auto until = patience();
        for (;;) {
            if (const auto at = kept_.find(mark); at != std::string::npos) {
                auto out = kept_.substr(0, at + mark.size());
                kept_.erase(0, at + mark.size());
                return out;
            }
            if (!read_more(until)) {
                return std::exchange(kept_, {});
            }
        }
    }

    /// `count` bytes, fewer where the connection ends before.
    [[nodiscard]] std::string read(std::size_t count) {
        const auto until = patience();
        while (kept_.size() < count && read_more(until)) {
        }
        auto out = kept_.substr(0, count);
        kept_.erase(0, out.size());
        return out;
    }

    /// Everything until the other side closes. `closed()` says whether it did.
    [[nodiscard]] std::string read_to_end() {
        const auto until = patience();
        while (read_more(until)) {
        }
        return std::exchange(kept_, {});
    }
    [[nodiscard]] bool closed() const noexcept { return closed_; }

    void close() noexcept { socket_.close(); }
    /// Closes so that the other side sees a reset.
    void reset() noexcept {
        const ::linger at_once{1, 0};
        ::setsockopt(native(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        close();
    }

private:
    [[nodiscard]] static deadline patience() { return deadline::after(std::chrono::seconds{5}); }

    bool read_more(deadline until) {
        char bytes[4096];
        std::size_t count = 0;
        const auto result = weightwire::http::detail::read_some(native(), bytes, until, count);
        closed_ = closed_ || result == weightwire::http::detail::read_result::ended;
        kept_.append(bytes, count);
        return result == weightwire::http::detail::read_result::data;
    }

    weightwire::http::detail::socket_handle socket_;
    std::string kept_;
    bool closed_ = false;
};

/// A TCP server on a port of its own that runs `script` on each connection, one after another, and
/// closes the connection when the script returns.
class scripted_server {
public:
    using script = std::function<void(raw_connection&)>;

    explicit scripted_server(script run, std::uint16_t port = 0)
        : listener_{weightwire::http::detail::listen_at("127.0.0.1", port)},
          thread_{[this, run = std::move(run)](std::stop_token stop) { serve(stop, run); }} {}

    [[nodiscard]] std::uint16_t port() const noexcept { return listener_.port; }
    [[nodiscard]] std::string url() const { return "http://127.0.0.1:" + std::to_string(port()); }
    /// Connections so far.
    [[nodiscard]] int accepted() const noexcept { return accepted_; }

private:
    void serve(const std::stop_token& stop, const script& run) {
        while (!stop.stop_requested()) {
            const int listener = listener_.socket.native_handle();
            if (!weightwire::http::detail::wait_for(
                    listener, POLLIN, deadline::after(std::chrono::milliseconds{10}))) {
                continue;
            }
            const int native = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
            if (native >= 0) {
                ++accepted_;
                raw_connection client{native};
                run(client);
            }
        }
    }

    weightwire::http::detail::listener listener_;
    std::atomic<int> accepted_{0};
    std::jthread thread_;
};

/// Reads a request's head and as much body as it announces.
[[nodiscard]] inline std::string read_request(raw_connection& client) {
    auto out = client.read_until("\r\n\r\n");
    const std::string_view name = "Content-Length: ";
    if (const auto at = out.find(name); at != std::string::npos) {
        out += client.read(std::stoul(out.substr(at + name.size())));
    }
    return out;
}

/// A whole reply.
[[nodiscard]] inline std::string ok_reply(std::string_view body) {
    return "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: " +
           std::to_string(body.size()) + "\r\n\r\n" + std::string{body};
}

}  // namespace weightwire_tests
