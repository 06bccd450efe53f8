#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/engine/sync_report.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/reply_failure.hpp>

/// @file
/// What a trainer's sender knows of its peers between and during rounds.

namespace weightwire::detail {

/// One peer. `live` may be cleared from a client's thread; the rest belongs to the thread in
/// `send_weights()`.
struct peer_state {
    peer_info info{};
    transport_init init{};
    std::uint64_t epoch = 0;
    std::uint64_t session = 0;
    weight_version version = 0;
    bool taken_over = false;  ///< another trainer's init replaced ours: never taken back by itself
    std::atomic<bool> live{false};  ///< takes part in the round
    bool asked = false;             ///< by the init call under way
    std::size_t form = 0;           ///< index in `init.vllm` of the form last sent, or accepted
    bool paused = false;            ///< was sent `/pause`, and no answer to `/resume` since
    failure resume_error{};         ///< of the last `/resume`
    /// Was sent an update in vLLM's dialect, which loads while it reads, and has not committed
    /// since.
    bool may_be_mixed = false;
    failure error{};  ///< why it does not
    std::uint64_t bytes = 0;
    double data_seconds = 0;
    std::string body{};  ///< of the call under way
    std::array<char, 64> update_body{};
};

/// What a peer's failure says of who is at fault, the least first.
enum class testimony : std::uint8_t {
    nothing,    ///< our own patience ended
    echo,       ///< the peer lost another member of the group
    own_words,  ///< the peer's own reason, or its connection failed
};

/// All peers, with the arrays that a control call reads: bodies and mask.
class peer_table {
public:
    void resize(std::size_t count) {
        while (peers_.size() < count) {
            peers_.emplace_back();
        }
        bodies_.resize(count);
        mask_.resize(count);
    }
    [[nodiscard]] std::size_t size() const noexcept { return peers_.size(); }
    [[nodiscard]] peer_state& operator[](std::size_t i) noexcept { return peers_[i]; }
    [[nodiscard]] std::size_t index_of(const peer_state& peer) const noexcept {
        std::size_t i = 0;
        while (&peers_[i] != &peer) {
            ++i;
        }
        return i;
    }
    [[nodiscard]] std::span<const peer_info> infos() {
        infos_.clear();
        for (const auto& peer : peers_) {
            infos_.push_back(peer.info);
        }
        return infos_;
    }
    [[nodiscard]] auto begin() noexcept { return peers_.begin(); }
    [[nodiscard]] auto end() noexcept { return peers_.end(); }

    [[nodiscard]] std::size_t live_count() const noexcept {
        std::size_t count = 0;
        for (const auto& peer : peers_) {
            count += peer.live ? 1U : 0U;
        }
        return count;
    }

    /// A message that asks the live peers, each with its own `body`.
    [[nodiscard]] control_message to_live() {
        return message([](peer_state& peer) { return std::string_view{peer.body}; },
                       [](const peer_state& peer) { return peer.live.load(); });
    }
    /// The same with the 64-byte update call.
    [[nodiscard]] control_message update_to_live() {
        return message(
            [](peer_state& peer) {
                return std::string_view{peer.update_body.data(), peer.update_body.size()};
            },
            [](const peer_state& peer) { return peer.live.load(); });
    }
    /// The update call of a vLLM dialect: each live peer is sent the body that fits the form of
    /// init that it accepted. The bodies are referenced, however many peers there are.
    [[nodiscard]] control_message vllm_update_to_live(const update_part& part) {
        return message(
            [&](const peer_state& peer) {
                return std::string_view{part.vllm_bodies[peer.init.vllm[peer.form].update_body]};
            },
            [](const peer_state& peer) { return peer.live.load(); });
    }
    /// A message that asks the peers that `asked` picks, each with its own `body`.
    template <class Pick>
    [[nodiscard]] control_message to(Pick asked) {
        return message([](peer_state& peer) { return std::string_view{peer.body}; }, asked);
    }

    /// Takes a peer out of the round and keeps why. Not for use while a control call is under way.
    void lose(std::size_t i, failure why) {
        auto& peer = peers_[i];
        peer.live = false;
        peer.taken_over =
            peer.taken_over || (why.kind == "session" && why.context.native_code == 409);
        peer.error = std::move(why);
    }

    /// Notes that peer `i` is the one whose failure ended the call under way: what the others say
    /// after it is its echo. The first counts, until one comes that says more. Thread-safe.
    void blame(std::size_t i, testimony said) noexcept {
        const std::lock_guard lock{blame_mutex_};
        if (blamed_ == none || said > blamed_said_) {
            blamed_ = i;
            blamed_said_ = said;
        }
    }
    /// What the peer that is to blame has told.
    [[nodiscard]] testimony told() const noexcept {
        const std::lock_guard lock{blame_mutex_};
        return blamed_said_;
    }
    void blame_nobody() noexcept {
        const std::lock_guard lock{blame_mutex_};
        blamed_ = none;
        blamed_said_ = testimony::nothing;
    }
    /// The call ended because time was up, whatever leaf the peer's words on it have.
    /// @param words added to the peer's.
    void blame_time(std::string_view words) {
        if (const auto i = blamed(); i < peers_.size() && peers_[i].error) {
            peers_[i].error.kind = "timeout";
            peers_[i].error.text += words;
        }
    }

    /// The first failure that peers brought into this round: of the peer that is to blame, else in
    /// their order; what was only given up because of another failure comes last.
    [[nodiscard]] failure first_failure() const {
        if (const auto i = blamed(); i < peers_.size() && peers_[i].error) {
            return peers_[i].error;
        }
        failure first;
        for (const auto& peer : peers_) {
            if (peer.error && (!first || first.kind == "cancelled")) {
                first = peer.error.kind == "cancelled" && first ? first : peer.error;
            }
        }
        return first;
    }
    /// One outcome a peer, after a round.
    [[nodiscard]] std::vector<peer_outcome> outcomes() const {
        std::vector<peer_outcome> out;
        for (const auto& peer : peers_) {
            out.push_back({.peer = peer.info.name,
                           .world_size = peer.info.world_size,
                           .status = status_of(peer),
                           .version = peer.version,
                           .error = peer.live ? failure{} : peer.error,
                           .resume_error = peer.resume_error,
                           .may_be_mixed = peer.may_be_mixed,
                           .bytes = peer.bytes,
                           .data_seconds = peer.data_seconds});
        }
        return out;
    }

private:
    [[nodiscard]] std::size_t blamed() const noexcept {
        const std::lock_guard lock{blame_mutex_};
        return blamed_;
    }
    [[nodiscard]] static peer_status status_of(const peer_state& peer) noexcept {
        if (peer.live) {
            return peer_status::committed;
        }
        const auto where = peer.error.context.phase;
        const bool silent = peer.error.context.native_code == 0;
        return where == phase::init               ? peer_status::left_out
               : where == phase::finish && silent ? peer_status::unknown
                                                  : peer_status::failed;
    }

    template <class Body, class Pick>
    control_message message(Body body, Pick asked) {
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            mask_[i] = asked(peers_[i]) ? 1 : 0;
            bodies_[i] = mask_[i] != 0 ? body(peers_[i]) : std::string_view{};
        }
        return {.bodies = bodies_, .only = mask_};
    }

    std::deque<peer_state> peers_;
    std::vector<peer_info> infos_;
    std::vector<std::string_view> bodies_;
    std::vector<unsigned char> mask_;
    static constexpr std::size_t none = static_cast<std::size_t>(-1);
    mutable std::mutex blame_mutex_;
    std::size_t blamed_ = none;
    testimony blamed_said_ = testimony::nothing;
};

}  // namespace weightwire::detail
