#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/detail/side_thread.hpp>
#include <weightwire/wire/client_calls.hpp>
#include <weightwire/wire/http_message.hpp>

/// @file
/// A `SyncClient` for workers in the trainer's own process: the whole protocol, no socket.

namespace weightwire {

/// Calls `Service::handle` of one or several worker services, each on a thread of its own, so that
/// several workers answer at once and a call ends at its deadline whatever the handler waits for.
///
/// At the deadline or the stop the handler's own stop token is requested; the call returns when the
/// handler has come back, which a handler does soon after that (`http_request::stop`). The services
/// are referenced and outlive the client. One call at a time.
template <class Service>
class local_sync_client : public client_calls<local_sync_client<Service>> {
public:
    /// A client of one service.
    explicit local_sync_client(Service& service)
        : local_sync_client{std::vector<Service*>{&service}} {}
    /// A client of several services: peer `i` is `services[i]`.
    /// @throws usage_error no service, or a null one.
    explicit local_sync_client(const std::vector<Service*>& services) {
        for (auto* service : services) {
            if (service == nullptr) {
                throw usage_error{"a local client was given a null service"};
            }
            peers_.emplace_back(*this, *service, peers_.size());
        }
        if (peers_.empty()) {
            throw usage_error{"a local client needs at least one service"};
        }
    }
    local_sync_client(local_sync_client&&) = delete;  // its threads point to it: give it a name
    local_sync_client(const local_sync_client&) = delete;
    local_sync_client& operator=(const local_sync_client&) = delete;

    [[nodiscard]] std::size_t peer_count() const noexcept { return peers_.size(); }
    /// `local/0`, `local/1`, …
    [[nodiscard]] std::string_view peer_name(std::size_t i) const noexcept {
        return peers_[i].name;
    }

    /// Sends one request to the peers that `message` names and waits for all of them.
    /// @param target path, with or without a query.
    /// @returns one reply a peer; a handler that did not finish in time is the fault `timed_out`,
    /// one that was stopped `cancelled`.
    /// @throws usage_error the message has another number of bodies or mask entries than peers.
    [[nodiscard]] std::vector<peer_reply> request(std::string_view method, std::string_view target,
                                                  const control_message& message, deadline until,
                                                  std::stop_token stop) {
        check_message(message, peers_.size());
        std::vector<peer_reply> replies(peers_.size());
        for (auto& peer : peers_) {
            replies[peer.index].peer = peer.name;
            replies[peer.index].answer.fault = reply_fault::left_out;
        }
        for (auto& peer : peers_) {
            if (message.asks(peer.index)) {
                peer.begin(method, target, message, replies[peer.index], until, stop);
            }
        }
        wait_for_all(until, stop);
        for (auto& peer : peers_) {
            peer.thread.wait();
        }
        return replies;
    }

private:
    /// One service, its thread and the call it runs.
    struct peer_state {
        peer_state(local_sync_client& client, Service& handler, std::size_t position)
            : owner{&client},
              service{&handler},
              name{"local/" + std::to_string(position)},
              index{position} {}

        void begin(std::string_view method, std::string_view target, const control_message& message,
                   peer_reply& into, deadline call_until, const std::stop_token& stop) {
            if (source.stop_requested()) {
                source = std::stop_source{};  // the last call used it up
            }
            const auto question = std::min(target.find('?'), target.size());
            request.method = method;
            request.path = target.substr(0, question);
            request.query = target.substr(std::min(question + 1, target.size()));
            request.content_type = message.content_type;
            request.body = message.body_for(index);
            request.stop = source.get_token();
            request.client_waits = &peer_state::waits_at;
            request.context = this;
            reply = &into;
            observer = message.observer;
            again = message.again;
            until = call_until;
            caller_stop = stop;
            {
                const std::lock_guard lock{owner->mutex_};
                busy = true;
            }
            thread.start(*this);
        }

        static bool waits_at(const void* self) noexcept {
            return static_cast<const peer_state*>(self)->waits();
        }
        [[nodiscard]] bool waits() const noexcept {
            return !source.stop_requested() && !caller_stop.stop_requested() && !until.expired();
        }

        /// Runs on `thread`.
        void operator()() noexcept {
            do {
                ask();
            } while (has_another_body());
            {
                const std::lock_guard lock{owner->mutex_};
                busy = false;
            }
            owner->done_.notify_all();
        }

        bool has_another_body() noexcept {
            request.body = again(index, *reply);
            return !request.body.empty();
        }

        void ask() noexcept {
            const auto begun = deadline::clock::now();
            auto& answer = reply->answer;
            answer = {};
            try {
                auto response = service->handle(request);
                answer.fault = reply_fault::none;
                answer.status = response.status;
                answer.body = std::move(response.body);
            } catch (const std::exception& thrown) {
                answer.fault = reply_fault::closed;  // as a server that drops the connection
                answer.fault_text = thrown.what();
            }
            answer.elapsed = deadline::clock::now() - begun;
            if (!reply->ok() && !waits()) {  // a late success is one: the worker has committed
                const bool cancelled = caller_stop.stop_requested();
                answer = {.fault = cancelled ? reply_fault::cancelled : reply_fault::timed_out,
                          .elapsed = answer.elapsed};
            }
            observer(index, *reply);
        }

        local_sync_client* owner;
        Service* service;
        std::string name;
        std::size_t index;
        http_request request{};
        peer_reply* reply = nullptr;
        reply_observer observer{};
        body_retry again{};
        deadline until = deadline::at({});
        std::stop_token caller_stop{};
        std::stop_source source{};
        bool busy = false;  // guarded by the client's mutex
        weightwire::detail::side_thread thread{};
    };

    [[nodiscard]] bool all_done() const noexcept {
        for (const auto& peer : peers_) {
            if (peer.busy) {
                return false;
            }
        }
        return true;
    }

    void wait_for_all(deadline until, const std::stop_token& stop) {
        std::unique_lock lock{mutex_};
        if (done_.wait_until(lock, stop, until.when(), [&] { return all_done(); })) {
            return;
        }
        lock.unlock();
        for (auto& peer : peers_) {
            peer.source.request_stop();
        }
    }

    mutable std::mutex mutex_;
    std::condition_variable_any done_;
    std::deque<peer_state> peers_;  // last: its threads end before what they use
};

}  // namespace weightwire
