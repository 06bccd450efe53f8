#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/rendezvous/socket.hpp>
#include <weightwire/rendezvous/store_request.hpp>

/// @file
/// A client of torch's TCPStore protocol, to our server or to torch's.

namespace weightwire::rendezvous {

/// Torch puts this before every key that its users name; `init/` alone goes without (wire
/// specification, section 2.3).
inline constexpr std::string_view user_key_prefix = "/";
/// The key that counts the clients that have come.
inline constexpr std::string_view init_key = "init/";

/// One connection to a store. Keys are sent as they are: prepend `user_key_prefix` where torch's
/// users read them.
///
/// A call that fails in the middle of a reply leaves the connection unusable, and every later call
/// says so with `peer_error`; a `wait` that ran into its deadline is cancelled and leaves it
/// usable. Not thread-safe; movable.
class tcp_store_client {
public:
    using keys = std::span<const std::string>;

    /// Connects, again and again until the deadline where nobody listens yet, as the server may be
    /// started later; then introduces itself (`validate`, `ping`).
    /// @param host numeric address or name; every address of a name is tried.
    /// @throws timeout_error nobody answered in time, with the last refusal; cancelled_error;
    /// peer_error an unknown host name; protocol_error the server is none of this protocol.
    [[nodiscard]] static tcp_store_client connect(const std::string& host, std::uint16_t port,
                                                  deadline until, std::stop_token stop = {}) {
        tcp_store_client client;
        client.where_ = {.peer = host_and_port(host, port), .backend = "tcp_store"};
        const auto addresses = resolve(host, port, until, stop, client.where_);
        std::string last_refusal = "no attempt was made";
        for (std::chrono::milliseconds pause{5};;
             pause = std::min(pause * 2, std::chrono::milliseconds{500})) {
            for (const auto& address : addresses) {
                if (client.attempt(address, until, stop, last_refusal)) {
                    return client;
                }
            }
            client.pause_before_retry(pause, until, stop, last_refusal);
        }
    }

    /// Adds this client to those that have come; torch's server waits for all of them before its
    /// constructor returns. @returns how many have come.
    std::int64_t announce(deadline until, std::stop_token stop = {}) {
        return add(init_key, 1, until, std::move(stop));
    }

    /// Stores `value` under `key` and wakes who waits for it. Does not wait for an answer: the
    /// protocol has none.
    void set(std::string_view key, std::string_view value, deadline until,
             std::stop_token stop = {}) {
        begin(store_query::set);
        append_store_text(request_, key);
        append_store_text(request_, value);
        ask(until, stop);
    }

    /// Waits for `key`, then gets its value.
    [[nodiscard]] std::string get(std::string_view key, deadline until, std::stop_token stop = {}) {
        const std::string one{key};
        wait({&one, 1}, until, stop);
        begin(store_query::get);
        append_store_text(request_, key);
        ask(until, stop);
        return reply([&] { return read_text(until, stop); });
    }

    /// Stores `desired` where the value is `expected` (or the key is missing and `expected` is
    /// empty). @returns the value now visible.
    std::string compare_set(std::string_view key, std::string_view expected,
                            std::string_view desired, deadline until, std::stop_token stop = {}) {
        begin(store_query::compare_set);
        append_store_text(request_, key);
        append_store_text(request_, expected);
        append_store_text(request_, desired);
        ask(until, stop);
        return reply([&] { return read_text(until, stop); });
    }

    /// Adds `delta` to the number under `key`, 0 where it is missing. @returns the sum.
    std::int64_t add(std::string_view key, std::int64_t delta, deadline until,
                     std::stop_token stop = {}) {
        begin(store_query::add);
        append_store_text(request_, key);
        append_store_number(request_, delta);
        ask(until, stop);
        return reply([&] { return read_number<std::int64_t>(until, stop); });
    }

    /// Whether all of `names` exist.
    [[nodiscard]] bool check(keys names, deadline until, std::stop_token stop = {}) {
        begin_list(store_query::check, names);
        ask(until, stop);
        return reply([&] {
            const auto answer = read_number<char>(until, stop);
            if (answer != store_ready && answer != store_not_ready) {
                throw protocol_error{"the answer to a check is neither 0 nor 1", where_};
            }
            return answer == store_ready;
        });
    }

    /// Waits until all of `names` exist.
    /// @throws timeout_error, cancelled_error; the connection stays usable.
    void wait(keys names, deadline until, std::stop_token stop = {}) {
        begin_list(store_query::wait, names);
        ask(until, stop);
        try {
            detail::wait_ready(socket_.native_handle(), POLLIN, until, stop, waiting_for(names),
                               where_);
        } catch (const error&) {
            cancel_wait();
            throw;
        }
        reply([&] {
            if (read_number<char>(until, stop) != store_stop_waiting) {
                throw protocol_error{"the answer to a wait is not 0", where_};
            }
            return true;
        });
    }

    /// How many keys the store holds.
    [[nodiscard]] std::int64_t number_of_keys(deadline until, std::stop_token stop = {}) {
        begin(store_query::number_of_keys);
        ask(until, stop);
        return reply([&] { return read_number<std::int64_t>(until, stop); });
    }

    /// Deletes `key`. @returns whether it was there.
    bool delete_key(std::string_view key, deadline until, std::stop_token stop = {}) {
        begin(store_query::delete_key);
        append_store_text(request_, key);
        ask(until, stop);
        return reply([&] { return read_number<std::int64_t>(until, stop) > 0; });
    }

    /// Appends to the value under `key`.
    void append(std::string_view key, std::string_view value, deadline until,
                std::stop_token stop = {}) {
        begin(store_query::append);
        append_store_text(request_, key);
        append_store_text(request_, value);
        ask(until, stop);
    }

    /// The values of `names`, all of which exist: wait for them first.
    [[nodiscard]] std::vector<std::string> multi_get(keys names, deadline until,
                                                     std::stop_token stop = {}) {
        begin_list(store_query::multi_get, names);
        ask(until, stop);
        return reply([&] {
            std::vector<std::string> values;
            values.reserve(names.size());
            for (std::size_t i = 0; i < names.size(); ++i) {
                values.push_back(read_text(until, stop));
            }
            return values;
        });
    }

    /// Stores `values[i]` under `names[i]`.
    /// @throws usage_error the lists differ in length.
    void multi_set(keys names, keys values, deadline until, std::stop_token stop = {}) {
        if (names.size() != values.size()) {
            throw usage_error{"multi_set has " + std::to_string(names.size()) + " keys and " +
                                  std::to_string(values.size()) + " values; give one a key",
                              where_};
        }
        begin(store_query::multi_set);
        append_store_number(request_, std::uint64_t{names.size()});
        for (std::size_t i = 0; i < names.size(); ++i) {
            append_store_text(request_, names[i]);
            append_store_text(request_, values[i]);
        }
        ask(until, stop);
    }

    /// Asks whether the server is there.
    /// @throws protocol_error it answers something else.
    void ping(deadline until, std::stop_token stop = {}) {
        const auto nonce = static_cast<std::uint32_t>(::getpid());
        begin(store_query::ping);
        append_store_number(request_, nonce);
        ask(until, stop);
        reply([&] {
            if (read_number<std::uint32_t>(until, stop) != nonce) {
                throw protocol_error{
                    "the server answers a ping with another number; is it a "
                    "store that speaks torch's TCPStore protocol?",
                    where_};
            }
            return true;
        });
    }

    /// The server, as messages name it.
    [[nodiscard]] const std::string& peer() const noexcept { return where_.peer; }
    /// Longest value that is taken from a server; a longer one is a `protocol_error`.
    void accept_values_up_to(std::size_t bytes) noexcept { max_value_bytes_ = bytes; }
    /// Hangs up.
    void close() noexcept { socket_.close(); }

private:
    tcp_store_client() = default;

    /// One try at one address. @returns whether it is the store; says why not in `refusal`.
    bool attempt(const socket_address& address, deadline until, const std::stop_token& stop,
                 std::string& refusal) {
        int code = 0;
        try {
            socket_ = try_connect(address, until, stop, where_, code);
            if (!socket_) {
                refusal = std::generic_category().message(code);
                return false;
            }
            broken_ = cancelled_wait_ = false;
            begin(store_query::validate);
            append_store_number(request_, store_magic);
            ask(until, stop);
            ping(until, stop);
            return true;
        } catch (const peer_error& caught) {
            // A server that is going down accepts and hangs up: as good as nobody there.
            refusal = caught.text();
        } catch (const timeout_error& caught) {
            refusal = caught.text();
        }
        socket_.close();
        return false;
    }

    void pause_before_retry(std::chrono::milliseconds pause, deadline until,
                            const std::stop_token& stop, const std::string& refusal) const {
        if (stop.stop_requested()) {
            throw cancelled_error{"stopped while connecting to the store", where_};
        }
        const auto wake = until.capped(pause);
        do {
            if (until.expired()) {
                auto context = where_;
                context.operation = "connect";
                context.native_text = refusal;
                throw timeout_error{
                    "nobody answered as a store in time; is rank 0 running, at this address?",
                    context};
            }
            std::this_thread::sleep_for(std::min<deadline::clock::duration>(
                wake.remaining(), std::chrono::milliseconds{10}));
        } while (!wake.expired() && !stop.stop_requested());
    }

    void begin(store_query query) {
        request_.clear();
        request_.push_back(static_cast<char>(query));
    }
    void begin_list(store_query query, keys names) {
        begin(query);
        append_store_number(request_, std::uint64_t{names.size()});
        for (const auto& name : names) {
            append_store_text(request_, name);
        }
    }

    /// Sends the request, after what a cancelled wait still owes us.
    void ask(deadline until, const std::stop_token& stop) {
        if (broken_) {
            throw peer_error{
                "the connection to the store is unusable since a call on it failed; "
                "connect again",
                where_};
        }
        reply([&] {
            if (std::exchange(cancelled_wait_, false)) {
                read_cancellation(until, stop);
            }
            detail::write_all(socket_.native_handle(), request_, until, stop, "asking the store",
                              where_);
            return true;
        });
    }

    /// 1, after a 0 where the wait ended just before it was cancelled.
    void read_cancellation(deadline until, const std::stop_token& stop) {
        auto answer = read_number<char>(until, stop);
        if (answer == store_stop_waiting) {
            answer = read_number<char>(until, stop);
        }
        if (answer != store_wait_cancelled) {
            throw protocol_error{"the answer to a cancelled wait is not 1", where_};
        }
    }

    /// Runs `read`; what it throws leaves an unknown part of a message on the connection.
    template <class Read>
    std::invoke_result_t<Read&> reply(Read read) {
        try {
            return read();
        } catch (...) {
            broken_ = true;
            throw;
        }
    }

    /// Tells the server without waiting; the answer is read before the next request.
    void cancel_wait() noexcept {
        const char query = static_cast<char>(store_query::cancel_wait);
        if (::send(socket_.native_handle(), &query, 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1) {
            cancelled_wait_ = true;
        } else {
            broken_ = true;
        }
    }

    [[nodiscard]] static std::string waiting_for(keys names) {
        if (names.empty()) {
            return "waiting for the store";
        }
        return "waiting for the key '" + names.front() + "'" +
               (names.size() > 1 ? " and " + std::to_string(names.size() - 1) + " more" : "");
    }

    template <class Number>
    [[nodiscard]] Number read_number(deadline until, const std::stop_token& stop) {
        Number value{};
        detail::read_exactly(socket_.native_handle(), &value, sizeof value, until, stop,
                             "reading the store's answer", where_);
        return value;
    }

    [[nodiscard]] std::string read_text(deadline until, const std::stop_token& stop) {
        const auto size = read_number<std::uint64_t>(until, stop);
        if (size > max_value_bytes_) {
            throw protocol_error{"the store answers with " + std::to_string(size) +
                                     " bytes, more than the " + std::to_string(max_value_bytes_) +
                                     " that a value may have",
                                 where_};
        }
        std::string value(static_cast<std::size_t>(size), '\0');
        detail::read_exactly(socket_.native_handle(), value.data(), value.size(), until, stop,
                             "reading the store's answer", where_);
        return value;
    }

    unique_socket socket_;
    error_context where_;
    std::string request_;
    std::size_t max_value_bytes_ = store_limits{}.max_value_bytes;
    bool cancelled_wait_ = false;
    bool broken_ = true;
};

}  // namespace weightwire::rendezvous
