#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/trainer_group.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/rendezvous/tcp_store_client.hpp>
#include <weightwire/rendezvous/tcp_store_server.hpp>

/// @file
/// `store_group`: trainer ranks that agree through a TCP store in rank 0.

namespace weightwire::rendezvous {

/// One rank's place in a group.
struct store_group_options {
    int rank = 0;
    int size = 1;
    std::string address = "127.0.0.1";  ///< where rank 0 listens, as this rank reaches it
    std::uint16_t port = 0;             ///< rank 0 may take any (0) and publishes `port()`
};

/// Models `TrainerGroup`. Rank 0 owns the store; the others find it by address and port, which the
/// launcher tells them, as with torch's MASTER_ADDR and MASTER_PORT.
///
/// A rank whose process ends takes its place with it: the others' next collective ends with a
/// `timeout_error` that names it, or with `peer_error` when it was rank 0. After an error the group
/// is not used again. Not thread-safe; movable.
///
/// Leaving: the last collective's values are read from rank 0, so rank 0 calls `close(deadline)`,
/// which waits until the others have left. The destructor does not wait: where it runs first, a
/// slower rank's last collective ends with `peer_error`.
class store_group {
public:
    /// The longest value that one rank may gather; all ranks' together have at most
    /// `store_limits::max_reply_bytes`.
    static constexpr std::size_t max_value_bytes = store_limits{}.max_value_bytes;

    /// Rank 0 returns at once, the others as soon as they have found it.
    /// @throws usage_error rank or size make no sense; resource_error rank 0's address is in use;
    /// timeout_error nobody listens in time; mismatch_error rank 0 counts another size, or the rank
    /// has already joined.
    explicit store_group(const store_group_options& options, deadline until)
        : rank_{options.rank}, size_{options.size} {
        if (size_ < 1 || rank_ < 0 || rank_ >= size_) {
            throw usage_error{"rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                                  " makes no sense; ranks count from 0",
                              {.phase = phase::init, .rank = rank_}};
        }
        auto port = options.port;
        if (rank_ == 0) {
            server_ = std::make_unique<tcp_store_server>(
                tcp_store_options{.address = options.address, .port = options.port}, until);
            port = server_->port();
        }
        port_ = port;
        connect(options.address, until);
        enter(until);
    }

    /// Rank 0 of `size`, listening at `options.address` and `options.port`.
    [[nodiscard]] static store_group host(int size, store_group_options options = {},
                                          deadline until = deadline::after(std::chrono::seconds{
                                              10})) {
        options.rank = 0;
        options.size = size;
        return store_group{options, until};
    }
    /// Any other rank.
    [[nodiscard]] static store_group join(int rank, int size, std::string address,
                                          std::uint16_t port, deadline until) {
        return store_group{
            {.rank = rank, .size = size, .address = std::move(address), .port = port}, until};
    }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    /// The port of the store: what rank 0 tells the others.
    [[nodiscard]] std::uint16_t port() const noexcept { return port_; }

    /// Everyone's bytes, by rank. Collective.
    /// @param bytes at most `max_value_bytes`.
    /// @throws timeout_error naming the first rank that did not come; peer_error rank 0 is gone;
    /// usage_error too many bytes.
    [[nodiscard]] std::vector<std::string> all_gather(std::string_view bytes, deadline until) {
        if (bytes.size() > max_value_bytes) {
            throw usage_error{"a rank gathers " + std::to_string(bytes.size()) +
                                  " bytes, more than " + std::to_string(max_value_bytes) +
                                  "; gather a hash instead",
                              where("all_gather")};
        }
        const auto names = meet("all_gather", bytes, until);
        auto values = guard("all_gather", [&] { return client_->multi_get(names, until); });
        values[static_cast<std::size_t>(rank_)] = bytes;
        return values;
    }

    /// Returns when every rank has called it. Collective.
    /// @throws as `all_gather`.
    void barrier(deadline until) { meet("barrier", {}, until); }

    /// Leaves the group. Rank 0 waits for the others to leave too, then stops the store.
    /// Idempotent.
    /// @throws timeout_error naming a rank that did not leave; the store is stopped all the same.
    void close(deadline until) {
        if (!client_) {
            return;
        }
        const auto client = std::move(client_);
        const auto server = std::move(server_);
        if (rank_ != 0) {
            guard("close", [&] { return client->add(key("left", 0, rank_), 1, until); });
            return;
        }
        for (int other = 1; other < size_; ++other) {
            const std::string name = key("left", 0, other);
            try {
                client->wait({&name, 1}, until);
            } catch (const timeout_error&) {
                throw timeout_error{"rank " + std::to_string(other) +
                                        " has not left the trainer group in time; it ended without "
                                        "close(), or still works",
                                    where("close", other)};
            }
        }
    }

private:
    /// An address to bind may stand for all; then the host itself is one.
    [[nodiscard]] std::string reachable(const std::string& address) const {
        if (rank_ == 0 && address == "0.0.0.0") {
            return "127.0.0.1";
        }
        return rank_ == 0 && address == "::" ? "::1" : address;
    }

    void connect(const std::string& address, deadline until) {
        try {
            client_ = std::make_unique<tcp_store_client>(
                tcp_store_client::connect(reachable(address), port_, until));
        } catch (const timeout_error& caught) {
            auto context = where("join", 0);
            context.native_text = caught.what();
            throw timeout_error{"rank 0 was not reached at " + host_and_port(address, port_) +
                                    " in time; is it running, at this address?",
                                context};
        }
    }

    /// Rank 0 names the run, the others take its name, so that a rank of an earlier run that meets
    /// a new store at the old port reads nothing of it.
    void enter(deadline until) {
        const std::string name = "weightwire/run";
        if (rank_ == 0) {
            std::random_device source;
            run_ = digest_text((std::uint64_t{source()} << 32U) ^ source());
            client_->set(name, run_ + " " + std::to_string(size_), until);
        } else {
            const auto text = guard("join", [&] { return client_->get(name, until); });
            run_ = text.substr(0, 16);
            const auto expected = run_ + " " + std::to_string(size_);
            if (text != expected) {
                throw mismatch_error{"rank 0's group is '" + text +
                                         "' (run, size), but this rank "
                                         "was told a size of " +
                                         std::to_string(size_),
                                     where("join", 0)};
            }
        }
        const auto joined =
            guard("join", [&] { return client_->add(key("joined", 0, rank_), 1, until); });
        if (joined != 1) {
            throw mismatch_error{"rank " + std::to_string(rank_) +
                                     " has already joined this group; give every process its own",
                                 where("join", rank_)};
        }
    }

    [[nodiscard]] std::string key(std::string_view kind, std::uint64_t number, int rank) const {
        return "weightwire/" + run_ + "/" + std::string{kind} + "/" + std::to_string(number) + "/" +
               std::to_string(rank);
    }

    [[nodiscard]] error_context where(std::string_view operation, int peer = -1) const {
        const bool edge = operation == "join" || operation == "close";
        return {.phase = !edge                  ? phase::none
                         : operation == "close" ? phase::close
                                                : phase::init,
                .peer = peer < 0 ? std::string{} : "trainer rank " + std::to_string(peer),
                .backend = "store_group",
                .operation = std::string{operation},
                .rank = rank_};
    }

    /// Runs `call`; a store that hangs up means that rank 0 is gone.
    template <class Call>
    std::invoke_result_t<Call&> guard(std::string_view operation, Call call) const {
        try {
            return call();
        } catch (const peer_error& caught) {
            auto context = where(operation, 0);
            context.native_code = caught.context().native_code;
            context.native_text = caught.what();
            throw peer_error{
                "rank 0, which holds the trainer group's store, is gone; restart the "
                "trainer",
                context};
        }
    }

    /// Puts this rank's value down and waits for everyone's. Returns the keys, by rank.
    std::vector<std::string> meet(std::string_view operation, std::string_view bytes,
                                  deadline until) {
        if (!client_) {
            throw usage_error{"the trainer group is closed", where(operation)};
        }
        if (until.expired()) {
            throw timeout_error{"the deadline had passed before this rank came", where(operation)};
        }
        ++sequence_;
        std::vector<std::string> names;
        for (int other = 0; other < size_; ++other) {
            names.push_back(key("step", sequence_, other));
        }
        guard(operation, [&] {
            client_->set(names[static_cast<std::size_t>(rank_)], bytes, until);
            wait_for_all(operation, names, until);
            // Whoever is here has read everything of the step before the last wait: ours of that
            // step may go.
            if (sequence_ > 1) {
                client_->delete_key(key("step", sequence_ - 1, rank_), until);
            }
            return true;
        });
        return names;
    }

    /// One wait for all keys, and a little before the deadline a look at who is missing, so that
    /// the error can name it.
    void wait_for_all(std::string_view operation, const std::vector<std::string>& names,
                      deadline until) {
        const auto slack = std::min<deadline::clock::duration>(until.remaining() / 10,
                                                               std::chrono::milliseconds{250});
        try {
            client_->wait(names, deadline::at(until.when() - slack));
            return;
        } catch (const timeout_error&) {
            // Said below, by rank.
        }
        int first = -1;
        std::string missing;
        for (int other = 0; other < size_; ++other) {
            const std::string& name = names[static_cast<std::size_t>(other)];
            if (!ask_about(operation, name, until)) {
                first = first < 0 ? other : first;
                missing += (missing.empty() ? "" : ", ") + std::to_string(other);
            }
        }
        try {
            client_->wait(names, until);
        } catch (const timeout_error&) {
            throw timeout_error{"step " + std::to_string(sequence_) + " of the trainer group: " +
                                    (first < 0 ? "the ranks came too late"
                                               : "rank " + missing + " did not come in time") +
                                    "; the process ended, or waits for something else",
                                where(operation, first)};
        }
    }

    /// Whether the key exists. A store that does not even answer that is rank 0's failure.
    [[nodiscard]] bool ask_about(std::string_view operation, const std::string& name,
                                 deadline until) {
        try {
            return client_->check({&name, 1}, until);
        } catch (const timeout_error&) {
            throw timeout_error{"rank 0's store does not answer in step " +
                                    std::to_string(sequence_) +
                                    " of the trainer group; is rank 0 stopped, or the deadline too "
                                    "short?",
                                where(operation, 0)};
        }
    }

    int rank_;
    int size_;
    std::uint16_t port_ = 0;
    std::string run_;
    std::uint64_t sequence_ = 0;
    std::unique_ptr<tcp_store_server> server_;
    std::unique_ptr<tcp_store_client> client_;
};

static_assert(TrainerGroup<store_group>);

}  // namespace weightwire::rendezvous

namespace weightwire {

using rendezvous::store_group;
using rendezvous::store_group_options;

}  // namespace weightwire
