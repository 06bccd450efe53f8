#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/declared_parameters.hpp>
#include <weightwire/sinks/placed_parameters.hpp>
#include <weightwire/sinks/table_memory.hpp>

/// @file
/// Counted snapshots of a parameter table, and the door that readers pass.

namespace weightwire {

template <TableMemory Memory>
class basic_parameter_table;

namespace detail {

/// What a reader can hold: which of a parameter's two storages belongs to it, for every parameter.
struct table_generation {
    weight_version version = 0;
    std::size_t readers = 0;           ///< snapshots that hold this generation
    std::vector<std::uint8_t> slot{};  ///< one a parameter; those of aliases are not read
};

/// The part of a parameter table that readers and the session share.
///
/// Two generations suffice: the live one and the one before it. A mutex, not an atomic shared
/// pointer: it is taken once a snapshot, not once a read, and thread sanitizers understand it.
class table_core {
    /// Ends a wait when its stop is requested. Under the mutex, so that a waiter which has just
    /// looked is not missed.
    struct wake_all {
        table_core* core;
        void operator()() const noexcept {
            const std::scoped_lock locked{core->mutex_};
            core->changed_.notify_all();
        }
    };
    using waker = std::stop_callback<wake_all>;

public:
    table_core(const declared_parameters& parameters, std::size_t count)
        : parameters_{&parameters}, entries(count) {
        for (auto& each : generations_) {
            each.slot.assign(count, 0);
        }
    }
    table_core(const table_core&) = delete;
    table_core& operator=(const table_core&) = delete;

    [[nodiscard]] const declared_parameters& parameters() const noexcept { return *parameters_; }
    [[nodiscard]] const mutable_tensor_view& tensor(std::size_t generation,
                                                    std::size_t i) const noexcept {
        const auto owner = parameters_->owner(i);
        return entries[owner][generations_[generation].slot[owner]];
    }
    /// For the holder of a snapshot of it.
    [[nodiscard]] weight_version version_of(std::size_t generation) const noexcept {
        return generations_[generation].version;
    }

    // Readers.

    /// Waits for an open door and counts one reader in. Returns the generation.
    /// @param even_while_dirty wait for the end of an in_place session too, instead of throwing.
    std::size_t enter(deadline until, const std::stop_token& stop, bool even_while_dirty) {
        const waker wake{stop, wake_all{this}};
        std::unique_lock locked{mutex_};
        const auto decided = [&] {
            const bool hopeless = damaged_ && (!closed_ || !even_while_dirty);
            return (!closed_ && !damaged_) || hopeless || (writing_ && !even_while_dirty) ||
                   stop.stop_requested();
        };
        const bool in_time = changed_.wait_until(locked, until.when(), decided);
        const auto version = generations_[live_].version;
        if (!closed_ && !damaged_) {
            ++generations_[live_].readers;
            return live_;
        }
        if (stop.stop_requested()) {
            throw cancelled_error{"a reader was stopped while it waited for a commit",
                                  {.phase = phase::serve}};
        }
        if (!in_time) {
            throw timeout_error{
                "no commit or rollback came before the reader's deadline; version " +
                    std::to_string(version) + " is being overwritten",
                {.phase = phase::serve}};
        }
        const std::string what = std::to_string(version);
        throw dirty_error{closed_ ? "an update is being written over version " + what +
                                        "; wait for its end with acquire(deadline)"
                                  : "the weights are a mix of version " + what +
                                        " and a later one; send a full update",
                          {.phase = phase::serve}};
    }

    void leave(std::size_t generation) noexcept {
        const std::scoped_lock locked{mutex_};
        if (--generations_[generation].readers == 0) {
            changed_.notify_all();
        }
    }

    [[nodiscard]] weight_version version() const noexcept {
        const std::scoped_lock locked{mutex_};
        return generations_[live_].version;
    }
    [[nodiscard]] bool dirty() const noexcept {
        const std::scoped_lock locked{mutex_};
        return damaged_ || writing_;
    }
    [[nodiscard]] std::size_t readers() const noexcept {
        const std::scoped_lock locked{mutex_};
        return generations_[0].readers + generations_[1].readers;
    }

    // The session's thread.

    [[nodiscard]] std::size_t live() const noexcept { return live_; }
    [[nodiscard]] table_generation& spare() noexcept { return generations_[1 - live_]; }
    [[nodiscard]] const table_generation& current() const noexcept { return generations_[live_]; }

    /// Waits until nobody reads the spare generation, whose storage will be written.
    /// @throws timeout_error names the version that is held. @throws cancelled_error so too.
    void wait_for_spare(deadline until, const std::stop_token& stop, phase where) {
        const waker wake{stop, wake_all{this}};
        std::unique_lock locked{mutex_};
        wait_unread(locked, 1 - live_, until, stop, where);
    }

    /// Closes the door and waits until nobody reads the live generation. A door that could not be
    /// cleared is open again.
    /// @throws timeout_error names the version that is held. @throws cancelled_error so too.
    void close_door(deadline until, const std::stop_token& stop, phase where) {
        const waker wake{stop, wake_all{this}};
        std::unique_lock locked{mutex_};
        closed_ = true;
        try {
            wait_unread(locked, live_, until, stop, where);
        } catch (...) {
            closed_ = false;
            changed_.notify_all();
            throw;
        }
    }

    /// The live weights are being overwritten: readers that do not wait are told at once.
    void begin_writing() noexcept {
        const std::scoped_lock locked{mutex_};
        writing_ = true;
        changed_.notify_all();
    }

    /// The spare generation becomes the live one.
    void flip(weight_version version) noexcept {
        const std::scoped_lock locked{mutex_};
        live_ = 1 - live_;
        generations_[live_].version = version;
        changed_.notify_all();
    }

    /// The live generation has new bytes. Opens the door.
    /// @param whole every parameter was written: a mix left by an earlier session is gone.
    void renew(weight_version version, bool whole) noexcept {
        const std::scoped_lock locked{mutex_};
        damaged_ = damaged_ && !whole;
        if (!damaged_) {
            generations_[live_].version = version;
        }
        writing_ = closed_ = false;
        changed_.notify_all();
    }

    /// Opens the door on what is there.
    void give_up() noexcept {
        const std::scoped_lock locked{mutex_};
        damaged_ = damaged_ || writing_;
        writing_ = closed_ = false;
        changed_.notify_all();
    }

private:
    /// @param locked holds the mutex; a `waker` of `stop` was made before it, since one takes the
    /// mutex in turn and is waited for when it goes.
    void wait_unread(std::unique_lock<std::mutex>& locked, std::size_t generation, deadline until,
                     const std::stop_token& stop, phase where) {
        const auto& waited_for = generations_[generation];
        changed_.wait_until(locked, until.when(),
                            [&] { return waited_for.readers == 0 || stop.stop_requested(); });
        if (waited_for.readers == 0) {
            return;
        }
        const auto held = "version " + std::to_string(waited_for.version) +
                          " is still held (readers: " + std::to_string(waited_for.readers) +
                          "), and its storage is needed; ";
        const error_context context{.phase = where, .operation = "wait for readers"};
        if (stop.stop_requested()) {
            throw cancelled_error{held + "nobody waits for this session any more", context};
        }
        throw timeout_error{held + "release their snapshots or allow more time", context};
    }

    const declared_parameters* parameters_;

public:
    /// Storages of each parameter. Their bytes are written by the session's thread, only where no
    /// generation that is read points.
    std::vector<parameter_slots> entries;

private:
    std::array<table_generation, 2> generations_{};
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::size_t live_ = 0;
    bool closed_ = false;   ///< a session keeps readers out
    bool writing_ = false;  ///< a session writes into the live weights
    bool damaged_ = false;  ///< a session ended after it wrote into them, before they were whole
};

}  // namespace detail

/// Committed weights of one version, held for reading: no byte of them changes while this object
/// lives. Move-only. A reader on a device keeps it until its work there is done. Must not outlive
/// its table, and should not outlive a round: a held snapshot keeps its storage from the session
/// after the next commit (`flip`) or from the next commit
/// (`copy_in`, `in_place`).
class snapshot {
public:
    snapshot(snapshot&& other) noexcept
        : core_{std::exchange(other.core_, nullptr)}, generation_{other.generation_} {}
    snapshot& operator=(snapshot&& other) noexcept {
        std::swap(core_, other.core_);
        std::swap(generation_, other.generation_);
        return *this;
    }
    ~snapshot() {
        if (core_ != nullptr) {
            core_->leave(generation_);
        }
    }

    /// The version that all these weights have.
    [[nodiscard]] weight_version version() const noexcept { return core_->version_of(generation_); }
    /// Number of names; tied weights count once a name.
    [[nodiscard]] std::size_t size() const noexcept { return core_->parameters().size(); }
    /// Name of parameter `i`; lives as long as the table.
    [[nodiscard]] std::string_view name(std::size_t i) const noexcept {
        return core_->parameters().parameters()[i].name;
    }
    /// The weights of parameter `i`, in the order of the table's `parameters()`.
    [[nodiscard]] tensor_view tensor(std::size_t i) const { return core_->tensor(generation_, i); }
    /// The weights of the parameter `name`, or nothing. Constant time.
    [[nodiscard]] std::optional<tensor_view> find(std::string_view name) const {
        const auto i = core_->parameters().parameters().find(name);
        return i == manifest::npos ? std::nullopt : std::optional<tensor_view>{tensor(i)};
    }

private:
    template <TableMemory Memory>
    friend class basic_parameter_table;
    snapshot(detail::table_core& core, std::size_t generation) noexcept
        : core_{&core}, generation_{generation} {}

    detail::table_core* core_;
    std::size_t generation_;
};

}  // namespace weightwire
