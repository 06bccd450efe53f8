#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// A transport that blocks as a broadcast communicator does: nobody joins before everybody, nothing
/// is sent before everybody receives, and one member's absence holds all others. Its sender speaks
/// to vLLM in three forms and cannot drop a peer. No bytes move: the tests look at the calls.

namespace tests {

/// Where the members of all groups meet, in this process. Thread-safe.
class meeting_place {
public:
    /// A group that nobody has joined.
    [[nodiscard]] int found(int world_size) {
        const std::lock_guard lock{mutex_};
        groups_.push_back({.world_size = world_size});
        return static_cast<int>(groups_.size()) - 1;
    }
    /// Returns when all have joined. False: stopped, late, or the group has been aborted.
    [[nodiscard]] bool join(int group, int rank, weightwire::deadline until, std::stop_token stop) {
        std::unique_lock lock{mutex_};
        auto& mine = groups_.at(static_cast<std::size_t>(group));
        mine.joined.insert(rank);
        changed_.notify_all();
        return changed_.wait_until(lock, stop, until.when(), [&] {
            return mine.aborted || static_cast<int>(mine.joined.size()) == mine.world_size;
        }) && !mine.aborted;
    }
    /// One broadcast: returns when all are in it.
    [[nodiscard]] bool broadcast(int group, int rank, weightwire::deadline until,
                                 std::stop_token stop) {
        std::unique_lock lock{mutex_};
        auto& mine = groups_.at(static_cast<std::size_t>(group));
        const int number = ++mine.entered[rank];
        changed_.notify_all();
        return changed_.wait_until(lock, stop, until.when(), [&] {
            if (mine.aborted) {
                return true;
            }
            for (int other = 0; other < mine.world_size; ++other) {
                if (mine.entered[other] < number) {
                    return false;
                }
            }
            return true;
        }) && !mine.aborted;
    }
    void abort(int group) {
        const std::lock_guard lock{mutex_};
        groups_.at(static_cast<std::size_t>(group)).aborted = true;
        changed_.notify_all();
    }
    /// Groups so far.
    [[nodiscard]] int count() {
        const std::lock_guard lock{mutex_};
        return static_cast<int>(groups_.size());
    }
    /// Blocks until somebody waits in a broadcast of the newest group.
    [[nodiscard]] bool wait_for_sender(weightwire::deadline until) {
        std::unique_lock lock{mutex_};
        return changed_.wait_until(lock, std::stop_token{}, until.when(), [&] {
            return !groups_.empty() && groups_.back().entered[0] > 0;
        });
    }

private:
    struct members {
        int world_size = 0;
        std::set<int> joined{};
        std::map<int, int> entered{};
        bool aborted = false;
    };
    std::mutex mutex_;
    std::condition_variable_any changed_;
    std::deque<members> groups_;
};

struct broadcast {};

struct broadcast_init_info {
    using backend = broadcast;
    int rank = 0;
    std::shared_ptr<meeting_place> place{};
    /// What every `prepare` was told, for the test to look at.
    std::shared_ptr<std::vector<std::vector<bool>>> session_routes{};
    [[nodiscard]] std::string init_message() const { return "{}"; }
};

class broadcast_sender {
public:
    explicit broadcast_sender(const broadcast_init_info& info) : info_{info} {}
    broadcast_sender(const broadcast_sender&) = delete;
    broadcast_sender& operator=(const broadcast_sender&) = delete;
    ~broadcast_sender() { leave(); }

    [[nodiscard]] std::vector<weightwire::transport_init> prepare(
        const weightwire::sender_context& context) {
        group_ = info_.place->found(context.world_size);
        parts_ = {{.first = 0, .count = context.parameters.size()}};
        parts_[0].vllm_bodies = {R"({"update_info":{"names":[]}})",
                                 R"({"update_info":{"names":[],"packed":true}})"};
        std::vector<weightwire::transport_init> inits;
        std::vector<bool> routes;
        for (const auto& peer : context.peers) {
            routes.push_back(peer.session_routes);
            const auto plain = R"("master_port":)" + std::to_string(group_) + R"(,"rank_offset":)" +
                               std::to_string(peer.rank_offset) + R"(,"world_size":)" +
                               std::to_string(context.world_size);
            inits.push_back(
                {.native = "{}",
                 .vllm = {{"{" + plain + R"(,"nccl_unique_id_b64":"x","packed":true})", 0},
                          {"{" + plain + R"(,"packed":true})", 0},
                          {"{" + plain + "}", 1}}});
        }
        if (info_.session_routes) {
            info_.session_routes->push_back(std::move(routes));
        }
        return inits;
    }
    void open(weightwire::deadline until, std::stop_token stop) {
        check(info_.place->join(group_, 0, until, stop), until, stop);
    }
    [[nodiscard]] std::span<const weightwire::update_part> parts() const { return parts_; }
    void send(std::uint64_t, std::size_t, weightwire::tensor_stream& stream,
              weightwire::deadline until, std::stop_token stop) {
        while (stream.position() < stream.manifest().size()) {
            (void)stream.next();
        }
        check(info_.place->broadcast(group_, 0, until, stop), until, stop);
    }
    void close(weightwire::deadline) { leave(); }

private:
    void leave() noexcept {
        if (group_ >= 0) {
            info_.place->abort(group_);
        }
        group_ = -1;
    }
    void check(bool done, weightwire::deadline until, const std::stop_token& stop) {
        if (done) {
            return;
        }
        leave();
        if (stop.stop_requested()) {
            throw weightwire::cancelled_error{"the broadcast was stopped", {}};
        }
        if (until.expired()) {
            throw weightwire::timeout_error{"the broadcast found a rank missing", {}};
        }
        throw weightwire::peer_error{"the broadcast was aborted", {}};
    }

    broadcast_init_info info_;
    int group_ = -1;
    std::vector<weightwire::update_part> parts_;
};

/// Never used: the peers are vLLM's.
struct broadcast_receiver {
    explicit broadcast_receiver(const weightwire::receiver_context&) {}
    void open(const weightwire::transport_open&, weightwire::deadline, std::stop_token) {}
    void receive(const weightwire::update_message&, weightwire::update_target&,
                 weightwire::deadline, std::stop_token) {}
    void release() noexcept {}
};

/// The same, as a backend that takes its time to let go.
struct slow_broadcast {};
struct slow_broadcast_info : broadcast_init_info {
    using backend = slow_broadcast;
};

}  // namespace tests

template <>
struct weightwire::backend_traits<tests::broadcast> {
    static constexpr std::string_view wire_name = "broadcast";
    static constexpr transport_capabilities capabilities{.host_memory = true, .speaks_vllm = true};
    using init_info = tests::broadcast_init_info;
    using sender = tests::broadcast_sender;
    using receiver = tests::broadcast_receiver;
};
static_assert(weightwire::explain_transport<tests::broadcast>());

template <>
struct weightwire::backend_traits<tests::slow_broadcast>
    : weightwire::backend_traits<tests::broadcast> {
    static constexpr transport_capabilities capabilities{
        .host_memory = true, .speaks_vllm = true, .let_go = std::chrono::seconds{1}};
    using init_info = tests::slow_broadcast_info;
};
static_assert(weightwire::explain_transport<tests::slow_broadcast>());
