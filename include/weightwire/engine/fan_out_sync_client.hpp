#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <exception>
#include <iterator>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/detail/side_thread.hpp>
#include <weightwire/wire/client_calls.hpp>

/// @file
/// `fan_out_sync_client`: many replicas at once, through one client each.

namespace weightwire {

/// Models `SyncClient` and `HasRequest` over several clients. Its peers are the clients' peers, in
/// order.
///
/// All peers are asked at the same time: the first client from the calling thread, each other one
/// from a thread of its own that lives as long as this object, so that a call creates no thread and
/// allocates its replies only. A dead peer costs its own deadline and nobody else's time: the
/// observer hears of the others as they answer, from those threads and possibly from two at once.
/// A peer that refuses a body is sent the next one (`control_message::again`) while others are
/// still waited for.
///
/// One call at a time per object. Moving is allowed between calls.
template <class Client>
    requires SyncClient<Client> && HasRequest<Client> && std::is_object_v<Client>
class fan_out_sync_client : public client_calls<fan_out_sync_client<Client>> {
public:
    /// @throws usage_error no client.
    explicit fan_out_sync_client(std::vector<Client> clients) {
        if (clients.empty()) {
            throw usage_error{"a fan-out has no client; give it one a replica"};
        }
        slots_.reserve(clients.size());
        for (auto& client : clients) {
            slots_.push_back(std::make_unique<slot>(std::move(client), peer_count_));
            peer_count_ += slots_.back()->peers;
        }
        for (std::size_t i = 1; i < slots_.size(); ++i) {
            slots_[i]->thread = std::make_unique<detail::side_thread>();
        }
    }

    [[nodiscard]] std::size_t peer_count() const noexcept { return peer_count_; }
    /// @param peer below `peer_count()`.
    [[nodiscard]] std::string_view peer_name(std::size_t peer) const {
        const auto& owner = slot_of(peer);
        return std::as_const(owner.client).peer_name(peer - owner.first);
    }

    /// Any route, to every peer that the mask names.
    /// @returns one reply a peer, in peer order.
    /// @throws usage_error the message fits another number of peers, or a client refused it; the
    /// other peers have been asked then. Whatever else a client throws.
    [[nodiscard]] std::vector<peer_reply> request(std::string_view method, std::string_view target,
                                                  const control_message& message, deadline until,
                                                  std::stop_token stop = {}) {
        check_message(message, peer_count_);
        for (auto& each : slots_) {
            each->set_job(method, target, message, until, stop);
        }
        for (std::size_t i = 1; i < slots_.size(); ++i) {
            slots_[i]->thread->start(*slots_[i]);
        }
        (*slots_.front())();
        for (std::size_t i = 1; i < slots_.size(); ++i) {
            slots_[i]->thread->wait();
        }
        return collect();
    }

private:
    /// One client, its thread and its share of the call under way.
    struct slot {
        Client client;
        std::size_t first;  ///< index of its first peer among all
        std::size_t peers;
        std::string_view method{};
        std::string_view target{};
        control_message message{};
        reply_observer outer{};    ///< the caller's observer, which counts all peers
        body_retry outer_again{};  ///< so does this
        deadline until = deadline::at({});
        std::stop_token stop{};
        std::vector<peer_reply> replies{};
        std::exception_ptr thrown{};
        std::unique_ptr<detail::side_thread> thread{};  // last: joined before the rest goes

        slot(Client&& from, std::size_t offset)
            : client{std::move(from)}, first{offset}, peers{std::as_const(client).peer_count()} {}

        void set_job(std::string_view how, std::string_view where, const control_message& whole,
                     deadline when, const std::stop_token& token) {
            method = how;
            target = where;
            message = whole;
            if (whole.bodies.size() > 1) {
                message.bodies = whole.bodies.subspan(first, peers);
            }
            if (!whole.only.empty()) {
                message.only = whole.only.subspan(first, peers);
            }
            outer = whole.observer;
            message.observer = {[](void* self, std::size_t peer, const peer_reply& reply) noexcept {
                                    const auto& mine = *static_cast<slot*>(self);
                                    mine.outer(mine.first + peer, reply);
                                },
                                this};
            outer_again = whole.again;
            if (whole.again.call != nullptr) {
                message.again = {
                    [](void* self, std::size_t peer, const peer_reply& reply) noexcept {
                        const auto& mine = *static_cast<slot*>(self);
                        return mine.outer_again(mine.first + peer, reply);
                    },
                    this};
            }
            until = when;
            stop = token;
            thrown = nullptr;
        }

        void operator()() noexcept {
            try {
                replies = ask(message);
                while (outer_again.call != nullptr && send_again()) {
                }
            } catch (...) {
                thrown = std::current_exception();
            }
        }

        std::vector<peer_reply> ask(const control_message& what) {
            auto answers = client.request(method, target, what, until, stop);
            if (answers.size() != peers) {
                throw usage_error{"a client gave " + std::to_string(answers.size()) +
                                  " replies for its " + std::to_string(peers) +
                                  " peers; a SyncClient gives one a peer"};
            }
            return answers;
        }

        /// Sends to the peers that have refused a body and are to be given another one. Returns
        /// whether there were any.
        bool send_again() {
            std::vector<std::string_view> bodies(peers);
            std::vector<unsigned char> mask(peers);
            bool any = false;
            for (std::size_t i = 0; i < peers; ++i) {
                if (replies[i].answer.fault != reply_fault::left_out) {
                    bodies[i] = message.again(i, replies[i]);
                    mask[i] = bodies[i].empty() ? 0 : 1;
                    any = any || mask[i] != 0;
                }
            }
            if (!any) {
                return false;
            }
            auto next = message;
            next.bodies = bodies;
            next.only = mask;
            auto answers = ask(next);
            for (std::size_t i = 0; i < peers; ++i) {
                if (mask[i] != 0) {
                    replies[i] = std::move(answers[i]);
                }
            }
            return true;
        }
    };

    [[nodiscard]] const slot& slot_of(std::size_t peer) const {
        std::size_t i = 0;
        while (i + 1 < slots_.size() && peer >= slots_[i]->first + slots_[i]->peers) {
            ++i;
        }
        return *slots_[i];
    }

    std::vector<peer_reply> collect() {
        std::vector<peer_reply> all;
        all.reserve(peer_count_);
        std::exception_ptr thrown;
        for (auto& each : slots_) {
            each->stop = {};
            thrown = thrown ? thrown : std::exchange(each->thrown, nullptr);
            std::ranges::move(each->replies, std::back_inserter(all));
            each->replies.clear();
        }
        if (thrown) {
            std::rethrow_exception(thrown);
        }
        return all;
    }

    std::vector<std::unique_ptr<slot>> slots_;
    std::size_t peer_count_ = 0;
};

}  // namespace weightwire
