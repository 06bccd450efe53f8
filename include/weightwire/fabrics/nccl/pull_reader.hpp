#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/nccl/pair_machinery.hpp>
#include <weightwire/fabrics/nccl/pair_wire.hpp>
#include <weightwire/fabrics/nccl/pull_exchange.hpp>
#include <weightwire/fabrics/nccl/pull_options.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>

/// @file
/// A worker rank that reads trainer ranks' packed chunks over NCCL.

namespace weightwire::nccl {

/// A pair with one trainer rank, tried once. Its end aborts the pair beside the caller.
template <PairMachinery M>
class pull_connection {
public:
    pull_connection(std::shared_ptr<pull_exchange<M>> in, std::shared_ptr<pull_link<M>> to) noexcept
        : in_{std::move(in)}, to_{std::move(to)} {}
    pull_connection(pull_connection&&) noexcept = default;
    pull_connection& operator=(pull_connection&& other) noexcept {
        std::swap(in_, other.in_);
        std::swap(to_, other.to_);
        return *this;
    }
    ~pull_connection() {
        if (in_ != nullptr) {
            in_->close(*to_);
        }
    }

    /// `host:port` of the trainer rank.
    [[nodiscard]] const std::string& peer() const noexcept { return to_->peer; }
    /// False once the other side is known to be lost, or a read over it was given up.
    [[nodiscard]] bool alive() const noexcept { return !to_->failed; }
    [[nodiscard]] const std::shared_ptr<pull_link<M>>& to() const noexcept { return to_; }

private:
    std::shared_ptr<pull_exchange<M>> in_;
    std::shared_ptr<pull_link<M>> to_;
};

/// Device memory that the communicators and places of a reader or an owner take, in words.
[[nodiscard]] inline std::string pair_remark(std::size_t pairs, std::uint64_t measured,
                                             std::uint64_t own, std::string_view own_name) {
    return std::to_string(pairs) + " communicators that took " + std::to_string(measured) +
           " bytes of the device's memory as it was measured, whoever else took some at the time, "
           "and " +
           std::to_string(own) + " bytes of " + std::string{own_name};
}

/// Reads packed chunks: each lands in a place on the device as one or a few NCCL receives, and one
/// kernel lays it out. `pull_exchange` says in which order. What is given up while its transfer is
/// under way costs the connection: connect again.
template <PairMachinery M, PullOptions Options>
class pull_reader {
public:
    using connection = pull_connection<M>;
    using memory = pull_memory<M>;
    using run = remote_run<memory>;

    /// A read with its tables; its end cancels it. Ends before its reader does.
    class read {
    public:
        read() noexcept = default;
        read(read&&) noexcept = default;
        read& operator=(read&& other) noexcept {
            std::swap(state_, other.state_);
            return *this;
        }
        ~read() {
            if (state_ != nullptr) {
                state_->by->forget(*state_);
            }
        }
        /// Device memory of its tables.
        [[nodiscard]] std::size_t table_bytes() const noexcept {
            return state_ != nullptr && state_->scatter ? M::table_bytes(*state_->scatter) : 0;
        }

    private:
        friend class pull_reader;
        std::unique_ptr<pull_read<M>> state_;
    };

    /// @throws unsupported_error there is no such device, or no libnccl. @throws resource_error
    explicit pull_reader(int device = 0)
        : exchange_{std::make_shared<pull_exchange<M>>(device, Options::value)} {}
    pull_reader(const pull_reader&) = delete;
    pull_reader& operator=(const pull_reader&) = delete;
    /// Waits for the aborts of its pairs, at most `pull_options::abort_time`; what does not
    /// end is left behind.
    ~pull_reader() {
        if (!exchange_->end()) {
            static_cast<void>(new (std::nothrow) auto(std::move(exchange_)));
        }
    }

    /// Makes a communicator of this process and the trainer rank, and brings bytes over it that the
    /// trainer rank holds ready: NCCL makes its connections and its memory now, and what cannot
    /// work fails now.
    /// @throws protocol_error the text is garbled. @throws mismatch_error another release of NCCL.
    /// @throws unsupported_error a communicator more than there may be, here or there.
    /// @throws peer_error nobody is there, or somebody else. @throws timeout_error,
    /// cancelled_error, and what NCCL says.
    [[nodiscard]] connection connect(std::string_view address, deadline until,
                                     const std::stop_token& stop) {
        weightwire::detail::check_time(until, stop, [] { return pull_at_init({}); });
        const auto named = parse_owner(address);
        if (!named) {
            throw protocol_error{"the NCCL address of a trainer rank is garbled", pull_at_init({})};
        }
        return connection{exchange_, exchange_->connect(*named, until, stop)};
    }
    /// Opens an arena, and reads its first bytes.
    /// @throws protocol_error the text is garbled, or of another trainer rank, or names fewer
    /// bytes. @throws peer_error, timeout_error, cancelled_error
    [[nodiscard]] memory open(connection& from, std::string_view handle, std::uint64_t bytes,
                              deadline until, const std::stop_token& stop) {
        const auto where = pull_at_init(from.peer());
        weightwire::detail::check_time(until, stop, [&] { return where; });
        const auto named = parse_arena(handle);
        if (!named || named->id != from.to()->id || named->bytes < bytes || named->bytes == 0) {
            throw protocol_error{
                "a handle of memory read over NCCL is garbled, of another trainer rank, or has "
                "fewer bytes than it is said to",
                where};
        }
        constexpr std::uint64_t few = 16;
        exchange_->bring(*from.to(), {named->number, 0, std::min(few, named->bytes)}, until, stop);
        return memory{from.to(), named->number, named->bytes};
    }

    /// Makes tables for runs of one memory. They are meant to follow one another, as in a packed
    /// chunk: gaps are read too, the largest ones left out.
    /// @throws usage_error runs of several memories. @throws resource_error
    [[nodiscard]] read prepare(std::span<const run> runs) {
        read made;
        made.state_ = exchange_->prepare(runs);
        return made;
    }
    /// @param shift a multiple of 16.
    /// @throws usage_error it is under way. @throws peer_error the connection is lost.
    void start(read& which, std::uint64_t shift) {
        if (which.state_ != nullptr) {
            exchange_->start(*which.state_, shift);
        }
    }
    /// Goes on with all reads of this reader. @throws peer_error, and what NCCL says.
    [[nodiscard]] bool done(read& which) {
        return which.state_ == nullptr || exchange_->done(*which.state_);
    }
    /// @throws peer_error, timeout_error, cancelled_error, and what NCCL says.
    void wait(read& which, deadline until, const std::stop_token& stop) {
        if (which.state_ != nullptr) {
            exchange_->wait(*which.state_, until, stop);
        }
    }
    /// Never waits for a pair: what comes late lands in a place that nobody lays out any more. A
    /// layout that has begun ends by itself within milliseconds, and is waited for.
    void cancel(read& which) noexcept {
        if (which.state_ != nullptr) {
            exchange_->cancel(*which.state_);
        }
    }
    /// Waits for the aborts of pairs that were given up, at most `pull_options::abort_time`.
    void come_to_rest() noexcept { exchange_->come_to_rest(); }
    /// Whether an abort, or a layout, did not end in its time.
    [[nodiscard]] bool lost() const noexcept { return exchange_->lost(); }

    /// Device memory of the communicators, as far as it can be measured, and of places to land.
    [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
        return exchange_->measured_bytes() + exchange_->landing_bytes();
    }
    /// The same in words.
    [[nodiscard]] std::string remark() const {
        return pair_remark(exchange_->link_count(), exchange_->measured_bytes(),
                           exchange_->landing_bytes(), "places to land");
    }

private:
    std::shared_ptr<pull_exchange<M>> exchange_;
};

}  // namespace weightwire::nccl
