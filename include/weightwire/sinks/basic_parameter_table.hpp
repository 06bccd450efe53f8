#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cassert>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ranges>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/copy_rate.hpp>
#include <weightwire/sinks/declared_parameters.hpp>
#include <weightwire/sinks/exchange_pace.hpp>
#include <weightwire/sinks/host_storage.hpp>
#include <weightwire/sinks/initial_load.hpp>
#include <weightwire/sinks/parameter_table_options.hpp>
#include <weightwire/sinks/placed_parameters.hpp>
#include <weightwire/sinks/snapshot.hpp>
#include <weightwire/sinks/table_budget.hpp>
#include <weightwire/sinks/table_memory.hpp>
#include <weightwire/sinks/user_memory.hpp>

/// @file
/// A worker's named parameters, updated in one of three commit modes, over any memory.

namespace weightwire {

/// A table of named parameters: models `WeightSink`, `HasSnapshots` and `HasCommitMode`.
///
/// | | `flip` | `copy_in` | `in_place` |
/// | --- | --- | --- | --- |
/// | destinations | the parameter's second storage | staging | the live weights |
/// | addresses of live weights | alternate between two | fixed | fixed |
/// | memory, at most | two copies | two copies | one |
/// | readers kept out | never | from `prepare` to the end | from `begin` to the end |
/// | a commit | swaps | exchanges, which can be given up, then publishes | publishes |
/// | waits for readers of | the version before, in `begin` | all, in `prepare` | all, in `begin` |
/// | after a failure | the old version | the old version | `dirty()` until a full commit |
///
/// Waiting for readers ends at the deadline with a `timeout_error` that names the version that is
/// held. The table never allocates around a slow reader: its memory stays within what
/// `description()` says; it ends at the stop too. From the third round on a session with an
/// unchanged manifest allocates nothing and touches no fresh page.
///
/// `in_place` cannot see writes to the destinations that it handed out, so it is dirty from the
/// moment `begin` returns at least one destination that has bytes, not from the first write. A
/// partial commit makes a clean table whole again; it never clears what an earlier failure left.
///
/// `begin`, `prepare`, `commit`, `rollback` and `initialize` come from one thread at a time;
/// everything else is thread-safe. The destructor does not wait: no snapshot may outlive the table.
template <TableMemory Memory>
class basic_parameter_table {
public:
    using memory_type = Memory;

    /// A table that owns its memory, zeroed, aligned to 64 bytes, at version 0.
    /// @throws usage_error a declaration contradicts the list of parameters.
    /// @throws resource_error the budget does not hold the weights in the mode asked for, or the
    /// system has no such memory; says both numbers.
    explicit basic_parameter_table(manifest parameters, parameter_table_options options = {})
        requires std::default_initializable<Memory>
        : basic_parameter_table{std::move(parameters), Memory{}, {}, std::move(options)} {}
    /// @copydoc basic_parameter_table(manifest,parameter_table_options)
    explicit basic_parameter_table(std::vector<param_meta> parameters,
                                   parameter_table_options options = {})
        requires std::default_initializable<Memory>
        : basic_parameter_table{manifest{std::move(parameters)}, std::move(options)} {}
    /// The same in `memory`, where there is more than one of its kind.
    basic_parameter_table(manifest parameters, Memory memory, parameter_table_options options = {})
        requires(!std::default_initializable<Memory>)
        : basic_parameter_table{std::move(parameters), std::move(memory), {}, std::move(options)} {}

    /// A table over memory that the user owns, strided or not, for `copy_in` and `in_place`. It
    /// holds what the memory holds, as version 0; addresses stay what they are.
    /// @throws usage_error two parameters share a byte, or memory is null; names the parameter.
    /// @throws unsupported_error memory elsewhere than the table's, or mode `flip`.
    [[nodiscard]] static basic_parameter_table over(std::vector<user_parameter> parameters,
                                                    parameter_table_options options = {})
        requires std::default_initializable<Memory>
    {
        auto list = manifest_of(parameters);
        return {std::move(list), Memory{}, std::move(parameters), std::move(options)};
    }
    /// @copydoc over(std::vector<user_parameter>,parameter_table_options)
    [[nodiscard]] static basic_parameter_table over(std::vector<user_parameter> parameters,
                                                    Memory memory,
                                                    parameter_table_options options = {})
        requires(!std::default_initializable<Memory>)
    {
        auto list = manifest_of(parameters);
        return {std::move(list), std::move(memory), std::move(parameters), std::move(options)};
    }

    basic_parameter_table(const basic_parameter_table&) = delete;
    basic_parameter_table& operator=(const basic_parameter_table&) = delete;
    ~basic_parameter_table() { assert(core_.readers() == 0 && "a snapshot outlives its table"); }

    /// What the table holds, aliases included.
    [[nodiscard]] const manifest& parameters() const noexcept { return catalog_.parameters(); }
    [[nodiscard]] commit_mode mode() const noexcept { return budget_.mode; }
    /// Whether sessions may bring other dtypes (`parameter_table_options::convert_dtypes`).
    [[nodiscard]] bool converts_dtypes() const noexcept { return options_.convert_dtypes; }
    /// Where all its tensors are.
    [[nodiscard]] weightwire::device device() const noexcept { return memory_.where(); }
    /// The last version that was whole.
    [[nodiscard]] weight_version version() const noexcept { return core_.version(); }
    /// Whether the live weights are a mix: only `in_place`, or a failed `initialize`.
    [[nodiscard]] bool dirty() const noexcept { return core_.dirty(); }
    /// Bytes of the live weights, and of their staging or second storage at most.
    [[nodiscard]] std::uint64_t live_bytes() const noexcept { return budget_.live_bytes; }
    [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return budget_.staging_bytes; }
    /// One line: the mode, why, and what it takes.
    [[nodiscard]] std::string description() const { return detail::described(budget_, options_); }

    /// Loads version 0, frozen parameters included.
    /// @param tensors a range of `named_tensor` in any order, read once, in memory that the table's
    /// can load from: each is copied before the next is asked for.
    /// @param until until when to wait for readers.
    /// @throws usage_error the table has had a commit, or a session is open.
    /// @throws coverage_error a tensor is unknown, missing, twice there or of another shape or
    /// dtype; the table is dirty if any was copied before.
    template <std::ranges::input_range Tensors>
        requires std::convertible_to<std::ranges::range_reference_t<Tensors>, named_tensor>
    void initialize(Tensors&& tensors, deadline until = deadline::after(std::chrono::seconds{10}));

    // Readers.

    /// A counted snapshot of the live weights. Allocates nothing.
    /// @param until until when to wait while a session keeps readers out.
    /// @throws timeout_error the session did not end in time.
    /// @throws dirty_error the weights are a mix and no session is open that could mend it.
    /// @throws cancelled_error the stop was asked for.
    [[nodiscard]] snapshot acquire(deadline until, std::stop_token stop = {}) {
        return snapshot{core_, core_.enter(until, stop, true)};
    }
    /// The same, waiting at most `acquire_wait` for a `copy_in` commit, and never for an `in_place`
    /// session: with that mode readers want `acquire(deadline)`.
    /// @throws dirty_error the weights are a mix, or being overwritten; says which.
    [[nodiscard]] snapshot acquire() {
        return snapshot{core_, core_.enter(deadline::after(options_.acquire_wait), {}, false)};
    }

    // The session: WeightSink.

    /// @returns a destination for every parameter of `session_manifest`, in its order, valid until
    /// `commit` or `rollback`. Those of `in_place` over user memory may be strided, all others are
    /// contiguous.
    /// @throws coverage_error the manifest does not fit the table; names the tensor.
    /// @throws session_error a session is open.
    /// @throws timeout_error readers hold the storage that is needed. @throws cancelled_error the
    /// stop was requested meanwhile.
    /// @throws resource_error no memory for staging (`staging_time::on_first_use`).
    /// After a throw no session is open and nothing has changed.
    std::span<const destination> begin(const session_info& session,
                                       const manifest& session_manifest, deadline until,
                                       const std::stop_token& stop = {});
    /// Nothing to install: tensors are used where they are.
    void group_complete(std::size_t /*group*/) noexcept {}
    /// @throws session_error no session is open.
    /// @throws timeout_error `copy_in`: readers hold the live weights; the door is open again, and
    /// the session may prepare once more. @throws cancelled_error the same at the stop.
    void prepare(deadline until, const std::stop_token& stop = {});
    /// `copy_in`: exchanges staging and live weights, so that neither is lost and `commit` only has
    /// a version to publish; nothing in the other modes. The clock and the stop are asked every 256
    /// KiB and after the last byte.
    /// @throws session_error no session is prepared.
    /// @throws timeout_error, cancelled_error every byte is back where it was; the door stays
    /// closed until the session's end.
    void exchange(deadline until, const std::stop_token& stop = {});
    /// How long the commit of the open session will take from now on: its bytes at the rate of the
    /// last ones in `copy_in`, nothing after `exchange` and in the other modes, which only swap.
    [[nodiscard]] std::chrono::nanoseconds commit_estimate() const noexcept {
        return copy_rate_.time_for(exchanged_ ? 0 : copied_bytes_);
    }
    /// Makes the session's parameters visible. Without a `prepare` that returned it does nothing;
    /// without an `exchange` that returned a `copy_in` table copies now.
    void commit(weight_version version) noexcept;
    /// Ends the session; the live weights are what they were (`in_place`: dirty). Legal always.
    /// After `exchange` it takes as long as that did.
    void rollback() noexcept;

    // For whoever cannot read the memory: HasTensorDigests, HasTensorClear.

    /// Digests of tensors of this table, destinations or a snapshot's. Thread-safe.
    /// @throws timeout_error, cancelled_error they were not ready in time.
    void tensor_digests(std::span<const tensor_view> tensors, std::span<std::uint64_t> results,
                        deadline until, const std::stop_token& stop)
        requires ComputesDigests<Memory>
    {
        memory_.digests(tensors, results, until, stop);
    }
    /// Fills a destination of the open session with zeros.
    void clear_tensor(const mutable_tensor_view& tensor)
        requires ClearsTensors<Memory>
    {
        memory_.clear(tensor);
    }

private:
    basic_parameter_table(manifest parameters, Memory memory, std::vector<user_parameter> user,
                          parameter_table_options options);

    using placement = declared_parameters::placement;

    void map(const std::vector<std::size_t>& which, std::size_t slot, std::string_view purpose);
    void stage_parameters(std::span<const placement> placements);
    void place_destinations(std::span<const placement> placements);
    [[nodiscard]] std::size_t write_slot(std::size_t parameter) const noexcept;
    [[nodiscard]] detail::placed_parameters placed(
        std::span<const placement> placements) const noexcept {
        return {placements, core_.entries};
    }
    void exchange_back(std::uint64_t bytes) noexcept;
    void end_session() noexcept { open_ = prepared_ = exchanged_ = false; }

    declared_parameters catalog_;
    parameter_table_options options_;
    detail::table_budget budget_;
    Memory memory_;
    std::vector<typename Memory::storage> storages_;
    detail::table_core core_;

    std::vector<destination> destinations_;
    std::span<const placement> placements_;
    detail::copy_rate copy_rate_;     // of `copy_in`
    std::uint64_t copied_bytes_ = 0;  // that the commit of this session will copy
    bool open_ = false;
    bool prepared_ = false;
    bool exchanged_ = false;  // the live weights have the new bytes, and staging the old ones
    bool partial_ = false;
};

template <TableMemory Memory>
basic_parameter_table<Memory>::basic_parameter_table(manifest parameters, Memory memory,
                                                     std::vector<user_parameter> user,
                                                     parameter_table_options options)
    : catalog_{std::move(parameters), options.frozen, options.aliases, options.convert_dtypes},
      options_{std::move(options)},
      memory_{std::move(memory)},
      core_{catalog_, catalog_.size()} {
    for (std::size_t i = 0; i < user.size(); ++i) {
        core_.entries[i][0] = user[i].where;
    }
    drop_tied_copies(catalog_, user);
    require_distinct_memory(user, memory_.where());
    budget_ = detail::budget_for(catalog_, options_, user.empty());
    std::vector<std::size_t> owners;
    std::vector<placement> written;
    for (std::size_t i = 0; i < catalog_.size(); ++i) {
        if (catalog_.owner(i) == i) {
            owners.push_back(i);
            if (!catalog_.frozen(i)) {
                written.push_back({destination::kind_type::place, i, 0});
            }
        }
    }
    if (user.empty()) {
        map(owners, 0, "the live weights");
    }
    if (mode() != commit_mode::in_place && options_.staging == staging_time::at_construction) {
        stage_parameters(written);
    }
}

/// Gives each of `which` a storage in one new block.
template <TableMemory Memory>
void basic_parameter_table<Memory>::map(const std::vector<std::size_t>& which, std::size_t slot,
                                        std::string_view purpose) {
    storage_layout layout;
    std::vector<std::uint64_t> offsets;
    for (const auto i : which) {
        offsets.push_back(layout.add(parameters()[i].byte_size()));
    }
    auto* const base = storages_.emplace_back(memory_.allocate(layout.size(), purpose)).data();
    for (std::size_t k = 0; k < which.size(); ++k) {
        const auto& parameter = parameters()[which[k]];
        core_.entries[which[k]][slot] = {base + offsets[k], parameter.dtype, parameter.shape,
                                         device()};
    }
}

/// Maps a second storage for those of `placements` that are written and have none.
template <TableMemory Memory>
void basic_parameter_table<Memory>::stage_parameters(std::span<const placement> placements) {
    std::vector<std::size_t> lacking;
    for (const auto& each : placements) {
        if (each.kind == destination::kind_type::place &&
            core_.entries[each.parameter][1].data() == nullptr) {
            lacking.push_back(each.parameter);
        }
    }
    if (lacking.empty()) {
        return;
    }
    map(lacking, 1, "staging");
    if (mode() == commit_mode::copy_in) {
        memory_.plan(placed(placements));
        copy_rate_.tried(
            memory_.sample(placed(placements)));  // so the first commit has an estimate
    }
}

/// The storage that a session writes: the one that no reader of the live version looks at.
template <TableMemory Memory>
std::size_t basic_parameter_table<Memory>::write_slot(std::size_t parameter) const noexcept {
    switch (mode()) {
        case commit_mode::flip: return 1U - core_.current().slot[parameter];
        case commit_mode::copy_in: return 1;
        case commit_mode::in_place: return 0;
    }
    return 0;
}

template <TableMemory Memory>
void basic_parameter_table<Memory>::place_destinations(std::span<const placement> placements) {
    destinations_.resize(placements.size());
    for (std::size_t i = 0; i < placements.size(); ++i) {
        const auto& from = placements[i];
        auto& to = destinations_[i];
        to.kind = from.kind;
        to.alias_of = from.alias_of;
        to.where = from.kind == destination::kind_type::place
                       ? core_.entries[from.parameter][write_slot(from.parameter)]
                       : mutable_tensor_view{};
    }
}

template <TableMemory Memory>
std::span<const destination> basic_parameter_table<Memory>::begin(const session_info& session,
                                                                  const manifest& session_manifest,
                                                                  deadline until,
                                                                  const std::stop_token& stop) {
    if (open_) {
        throw session_error{"a session is open on this sink; commit or roll it back first",
                            {.phase = phase::start}};
    }
    placements_ = catalog_.resolve(session_manifest, session.partial);
    if (mode() != commit_mode::in_place) {
        stage_parameters(placements_);
    }
    if (mode() == commit_mode::copy_in) {
        memory_.plan(placed(placements_));
        copied_bytes_ = placed(placements_).bytes();
    }
    place_destinations(placements_);
    if (mode() == commit_mode::flip) {
        core_.wait_for_spare(until, stop, phase::start);
    } else if (mode() == commit_mode::in_place) {
        core_.close_door(until, stop, phase::start);
        const bool handed_out = std::ranges::any_of(destinations_, [](const destination& each) {
            return each.kind == destination::kind_type::place && each.where.byte_size() != 0;
        });
        if (handed_out) {
            core_.begin_writing();
        }
    }
    open_ = true;
    prepared_ = false;
    partial_ = session.partial;
    return destinations_;
}

template <TableMemory Memory>
void basic_parameter_table<Memory>::prepare(deadline until, const std::stop_token& stop) {
    if (!open_) {
        throw session_error{"prepare without a session; call begin first",
                            {.phase = phase::finish}};
    }
    if (prepared_) {
        return;
    }
    if (mode() == commit_mode::flip) {
        auto& next = core_.spare().slot;
        next = core_.current().slot;
        for (const auto& each : placements_) {
            if (each.kind == destination::kind_type::place) {
                next[each.parameter] = static_cast<std::uint8_t>(1U - next[each.parameter]);
            }
        }
    } else if (mode() == commit_mode::copy_in) {
        core_.close_door(until, stop, phase::finish);
    }
    prepared_ = true;
}

template <TableMemory Memory>
void basic_parameter_table<Memory>::exchange(deadline until, const std::stop_token& stop) {
    if (!prepared_) {
        throw session_error{"exchange without a prepared session; call prepare first",
                            {.phase = phase::finish}};
    }
    if (mode() != commit_mode::copy_in || exchanged_) {
        return;
    }
    detail::exchange_pace pace{until, stop};
    try {
        copy_rate_.took([&] {
            // Late after the last byte is late too: nobody has been let in yet.
            exchanged_ = memory_.exchange(placed(placements_), pace) && pace.in_time();
            return exchanged_ ? copied_bytes_ : 0;
        });
    } catch (...) {
        core_.begin_writing();  // the memory failed: what it holds now nobody knows
        throw;
    }
    if (!exchanged_) {
        exchange_back(pace.allowed());
        pace.refuse();
    }
}

/// Readers are still kept out; where the memory fails they stay out, until a full commit.
template <TableMemory Memory>
void basic_parameter_table<Memory>::exchange_back(std::uint64_t bytes) noexcept {
    if (!memory_.exchange_back(placed(placements_), bytes)) {
        core_.begin_writing();
    }
}

template <TableMemory Memory>
void basic_parameter_table<Memory>::commit(weight_version version) noexcept {
    if (!prepared_) {
        return;
    }
    bool published = true;
    if (mode() == commit_mode::copy_in && !exchanged_) {
        copy_rate_.took([&] {
            published = memory_.publish(placed(placements_));
            return published ? copied_bytes_ : 0;
        });
    }
    if (!published) {
        core_.begin_writing();
        core_.give_up();
    } else if (mode() == commit_mode::flip) {
        core_.flip(version);
    } else {
        core_.renew(version, !partial_);
    }
    end_session();
}

template <TableMemory Memory>
void basic_parameter_table<Memory>::rollback() noexcept {
    if (open_) {
        if (prepared_) {
            copy_rate_.forget_one();
        }
        if (exchanged_) {
            exchange_back(UINT64_MAX);
        }
        core_.give_up();
        end_session();
    }
}

template <TableMemory Memory>
template <std::ranges::input_range Tensors>
    requires std::convertible_to<std::ranges::range_reference_t<Tensors>, named_tensor>
void basic_parameter_table<Memory>::initialize(Tensors&& tensors, deadline until) {
    if (open_ || version() != 0) {
        throw usage_error{open_ ? "initialize while a session is open"
                                : "initialize loads version 0, and the table has had a commit",
                          {.phase = phase::init, .operation = "initialize"}};
    }
    core_.close_door(until, {}, phase::init);
    detail::initial_load loading{catalog_};
    try {
        for (auto&& each : tensors) {
            const named_tensor& from = each;
            const auto to = loading.accept(from);
            memory_.require_loadable(from);
            if (to) {
                core_.begin_writing();
                memory_.load(core_.entries[*to][0], from);
            }
        }
        loading.require_all();
    } catch (...) {
        core_.give_up();
        throw;
    }
    core_.renew(0, true);
}

}  // namespace weightwire
