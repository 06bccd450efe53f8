#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/ucx/links.hpp>
#include <weightwire/fabrics/ucx/memory.hpp>
#include <weightwire/fabrics/ucx/texts.hpp>
#include <weightwire/fabrics/ucx/transfers.hpp>
#include <weightwire/fabrics/ucx/worker.hpp>

/// @file
/// A worker rank that reads trainer ranks' memory over UCX.

namespace weightwire::ucx {

/// A way to one trainer rank, tried once. Its end gives up what is in flight over it.
class connection {
public:
    connection(std::shared_ptr<links> in, link& to) noexcept : in_{std::move(in)}, to_{&to} {}
    connection(connection&& other) noexcept = default;
    connection& operator=(connection&& other) noexcept {
        std::swap(in_, other.in_);
        std::swap(to_, other.to_);
        return *this;
    }
    ~connection() {
        if (in_ != nullptr) {
            in_->close(*to_);
        }
    }

    /// `host/pid` of the trainer rank.
    [[nodiscard]] const std::string& peer() const noexcept { return to_->peer; }
    /// False once UCX has told that the other side is lost, or a read over it was given up.
    [[nodiscard]] bool alive() const noexcept {
        return to_->endpoint != nullptr && to_->failed == UCS_OK;
    }
    [[nodiscard]] link& to() noexcept { return *to_; }

private:
    std::shared_ptr<links> in_;
    link* to_;
};

/// Reads with a bounded number of transfers in flight, each of at most `piece_bytes`. What is
/// given up with transfers in flight costs the connection: connect again.
template <class Staging>
class basic_reader {
public:
    using run = remote_run<memory>;

    /// Runs with their transfers; its end cancels it. Ends before its reader does.
    class read {
    public:
        read() noexcept = default;
        read(read&& other) noexcept = default;
        read& operator=(read&& other) noexcept {
            std::swap(state_, other.state_);
            return *this;
        }
        ~read() {
            if (state_ != nullptr && state_->active) {
                state_->by->cancel(*state_);
            }
        }

    private:
        friend class basic_reader;
        std::unique_ptr<typename transfers<Staging>::state> state_;
    };

    /// @throws resource_error, unsupported_error UCX cannot start.
    explicit basic_reader(int device = 0)
        : transfers_{std::make_unique<transfers<Staging>>(device)} {}

    /// Connects, and reads bytes that the trainer rank holds ready, so that what cannot work fails
    /// now.
    /// @throws protocol_error the text is garbled. @throws mismatch_error another release of UCX.
    /// @throws peer_error nobody is there, or somebody else. @throws timeout_error, cancelled_error
    [[nodiscard]] connection connect(std::string_view address, deadline until,
                                     const std::stop_token& stop) {
        weightwire::detail::check_time(until, stop, [] { return at_init({}); });
        const auto named = parse_address(address);
        if (!named) {
            throw protocol_error{"the UCX address of a trainer rank is garbled", at_init({})};
        }
        if (named->version != library_version()) {
            throw mismatch_error{"the trainer rank has UCX " + named->version + ", this process " +
                                     library_version() + "; use one release on all machines",
                                 at_init(named->peer)};
        }
        const auto& shared = transfers_->shared_links();
        connection made{shared, shared->connect(named->worker, named->peer, named->id)};
        const memory probe{shared, made.to(), shared->unpack(made.to(), named->probe_key),
                           named->probe, probe_bytes};
        // Few and many bytes travel differently.
        for (const auto bytes : {std::uint64_t{8}, probe_bytes}) {
            const auto found =
                transfers_->bring(made.to(), probe.key(), probe.address(), bytes, until, stop);
            for (std::uint64_t i = 0; i < bytes / 8; ++i) {
                std::uint64_t word = 0;
                std::memcpy(&word, found.data() + 8 * i, 8);
                if (word != probe_word(named->id, i)) {
                    throw peer_error{
                        "a trial read over UCX brought other bytes than the trainer rank holds; it "
                        "has been restarted, or its network changes what it carries",
                        at_init(named->peer)};
                }
            }
        }
        return made;
    }

    /// Opens exported memory, and reads its first bytes.
    /// @throws protocol_error the text is garbled, or of another trainer rank, or names fewer
    /// bytes. @throws peer_error, timeout_error, cancelled_error
    [[nodiscard]] memory open(connection& from, std::string_view handle, std::uint64_t bytes,
                              deadline until, const std::stop_token& stop) {
        weightwire::detail::check_time(until, stop, [&] { return at_init(from.peer()); });
        const auto named = parse_handle(handle);
        if (!named || named->bytes > std::numeric_limits<std::uint64_t>::max() - named->address) {
            throw protocol_error{"a handle of memory read over UCX is garbled",
                                 at_init(from.peer())};
        }
        if (named->id != from.to().id || named->bytes < bytes) {
            throw protocol_error{
                "a handle names memory of another process than its trainer rank's, or fewer bytes "
                "than it is said to have",
                at_init(from.peer())};
        }
        const auto& shared = transfers_->shared_links();
        memory made{shared, from.to(), shared->unpack(from.to(), named->key), named->address,
                    named->bytes};
        static_cast<void>(transfers_->bring(from.to(), made.key(), made.address(),
                                            std::min<std::uint64_t>(8, made.size()), until, stop));
        return made;
    }

    [[nodiscard]] read prepare(std::span<const run> runs) {
        read made;
        made.state_ = transfers_->prepare(runs);
        return made;
    }
    /// @throws usage_error it is under way.
    void start(read& which, std::uint64_t shift) {
        if (which.state_ != nullptr) {
            transfers_->start(*which.state_, shift);
        }
    }
    /// Goes on with all reads of this reader. @throws peer_error
    [[nodiscard]] bool done(read& which) {
        return which.state_ == nullptr || transfers_->done(*which.state_);
    }
    /// @throws peer_error, timeout_error, cancelled_error
    void wait(read& which, deadline until, const std::stop_token& stop) {
        if (which.state_ != nullptr) {
            transfers_->wait(*which.state_, until, stop);
        }
    }
    void cancel(read& which) noexcept {
        if (which.state_ != nullptr && which.state_->active) {
            transfers_->cancel(*which.state_);
        }
    }

    /// Whether UCX itself reads and writes CUDA memory.
    [[nodiscard]] bool has_cuda() const noexcept {
        return transfers_->shared_links()->used_context().has_cuda();
    }

protected:
    [[nodiscard]] transfers<Staging>& used_transfers() noexcept { return *transfers_; }
    [[nodiscard]] const transfers<Staging>& used_transfers() const noexcept { return *transfers_; }
    [[nodiscard]] static error_context at_init(std::string peer) {
        return {.phase = phase::init, .peer = std::move(peer)};
    }

private:
    std::unique_ptr<transfers<Staging>> transfers_;
};

}  // namespace weightwire::ucx
