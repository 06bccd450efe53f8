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
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/checked.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/copy_rate.hpp>
#include <weightwire/sinks/declared_parameters.hpp>
#include <weightwire/sinks/host_storage.hpp>
#include <weightwire/sinks/snapshot.hpp>
#include <weightwire/sinks/tensor_copy.hpp>
#include <weightwire/sinks/user_memory.hpp>

/// @file
/// A worker's named parameters in host memory, updated in one of three commit modes.

namespace weightwire {

/// When a table's staging is mapped and touched.
enum class staging_time : std::uint8_t {
    at_construction,  ///< all of it: the peak is known, and no round pays for fresh pages
    on_first_use,     ///< a parameter's in the first session that updates it, inside `begin`
};

/// How a `parameter_table` works.
struct parameter_table_options {
    /// Unset: two copies if the budget allows them (`flip`, or `copy_in` over the user's memory),
    /// else `in_place`.
    std::optional<commit_mode> mode{};
    /// Bytes that the live weights and their staging may take together, wherever they are.
    std::optional<std::uint64_t> memory_budget{};
    /// Parameters that updates leave alone. They need not be in a session's manifest.
    std::vector<std::string> frozen{};
    /// {alias, owner}: two names of one storage. Either may be in a session's manifest, or both.
    std::vector<std::pair<std::string, std::string>> aliases{};
    staging_time staging = staging_time::at_construction;
    /// How long `acquire()` without a deadline waits at most.
    std::chrono::milliseconds acquire_wait = std::chrono::seconds{10};
};

/// A table of named parameters: models `WeightSink`, `HasSnapshots` and `HasCommitMode`.
///
/// | | `flip` | `copy_in` | `in_place` |
/// | --- | --- | --- | --- |
/// | destinations | the parameter's second storage | staging | the live weights |
/// | addresses of live weights | alternate between two | fixed | fixed |
/// | memory, at most | two copies | two copies | one |
/// | readers kept out | never | from `prepare` to the end | from `begin` to the end |
/// | what waits for readers | `begin`, for those of the version before the live one | `prepare` |
/// `begin` | | after a failure | the old version | the old version | `dirty()` until a full commit
/// |
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
class parameter_table {
public:
    /// A table that owns its memory, zeroed, aligned to 64 bytes, at version 0.
    /// @throws usage_error a declaration contradicts the list of parameters.
    /// @throws resource_error the budget does not hold the weights in the mode asked for, or the
    /// system has no such memory; says both numbers.
    explicit parameter_table(manifest parameters, parameter_table_options options = {})
        : parameter_table{std::move(parameters), {}, std::move(options)} {}
    /// @copydoc parameter_table(manifest,parameter_table_options)
    explicit parameter_table(std::vector<param_meta> parameters,
                             parameter_table_options options = {})
        : parameter_table{manifest{std::move(parameters)}, std::move(options)} {}

    /// A table over memory that the user owns, strided or not, for `copy_in` and `in_place`. It
    /// holds what the memory holds, as version 0; addresses stay what they are.
    /// @throws usage_error two parameters share a byte, or memory is null; names the parameter.
    /// @throws unsupported_error memory of a device, or mode `flip`.
    [[nodiscard]] static parameter_table over(std::vector<user_parameter> memory,
                                              parameter_table_options options = {}) {
        auto parameters = manifest_of(memory);
        return parameter_table{std::move(parameters), std::move(memory), std::move(options)};
    }

    parameter_table(const parameter_table&) = delete;
    parameter_table& operator=(const parameter_table&) = delete;
    ~parameter_table() { assert(core_.readers() == 0 && "a snapshot outlives its table"); }

    /// What the table holds, aliases included.
    [[nodiscard]] const manifest& parameters() const noexcept { return catalog_.parameters(); }
    [[nodiscard]] commit_mode mode() const noexcept { return mode_; }
    /// The last version that was whole.
    [[nodiscard]] weight_version version() const noexcept { return core_.version(); }
    /// Whether the live weights are a mix: only `in_place`, or a failed `initialize`.
    [[nodiscard]] bool dirty() const noexcept { return core_.dirty(); }
    /// Bytes of the live weights, and of their staging or second storage at most.
    [[nodiscard]] std::uint64_t live_bytes() const noexcept { return live_bytes_; }
    [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return staging_bytes_; }
    /// One line: the mode, why, and what it takes.
    [[nodiscard]] std::string description() const;

    /// Loads version 0, frozen parameters included.
    /// @param tensors a range of `named_tensor` in any order, read once, in host memory.
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
    /// session.
    /// @throws dirty_error the weights are a mix, or being overwritten.
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
    /// How long the commit of the open session will take: its bytes at the rate of the last copies
    /// in `copy_in`, nothing in the other modes, which only swap.
    [[nodiscard]] std::chrono::nanoseconds commit_estimate() const noexcept {
        return copy_rate_.time_for(copied_bytes_);
    }
    /// Makes the session's parameters visible. Without a `prepare` that returned it does nothing.
    void commit(weight_version version) noexcept;
    /// Ends the session; the live weights are what they were (`in_place`: dirty). Legal always.
    void rollback() noexcept;

private:
    parameter_table(manifest parameters, std::vector<user_parameter> memory,
                    parameter_table_options options);

    using placement = declared_parameters::placement;

    void measure();
    void choose_mode(bool owns_memory);
    void map_live();
    void stage_parameters(std::span<const placement> placements);
    void place_destinations(std::span<const placement> placements);
    [[nodiscard]] std::size_t write_slot(std::size_t parameter) const noexcept;
    void end_session() noexcept { open_ = prepared_ = false; }
    void load(const named_tensor& from, std::vector<std::uint8_t>& loaded);
    void require_loaded(const std::vector<std::uint8_t>& loaded) const;

    declared_parameters catalog_;
    parameter_table_options options_;
    commit_mode mode_ = commit_mode::flip;
    std::uint64_t live_bytes_ = 0;
    std::uint64_t staging_bytes_ = 0;
    std::vector<host_storage> storages_;
    detail::table_core core_;

    std::vector<destination> destinations_;
    std::span<const placement> placements_;
    detail::copy_rate copy_rate_;     // of `copy_in`
    std::uint64_t copied_bytes_ = 0;  // that the commit of this session will copy
    bool open_ = false;
    bool prepared_ = false;
    bool partial_ = false;
};

inline parameter_table::parameter_table(manifest parameters, std::vector<user_parameter> memory,
                                        parameter_table_options options)
    : catalog_{std::move(parameters), options.frozen, options.aliases},
      options_{std::move(options)},
      core_{catalog_, catalog_.size()} {
    for (std::size_t i = 0; i < memory.size(); ++i) {
        core_.entries[i][0] = memory[i].where;
    }
    drop_tied_copies(catalog_, memory);
    require_distinct_memory(memory);
    measure();
    choose_mode(memory.empty());
    if (memory.empty()) {
        map_live();
    }
    if (mode_ != commit_mode::in_place && options_.staging == staging_time::at_construction) {
        std::vector<placement> all;
        for (std::size_t i = 0; i < catalog_.size(); ++i) {
            if (catalog_.owner(i) == i && !catalog_.frozen(i)) {
                all.push_back({destination::kind_type::place, i, 0});
            }
        }
        stage_parameters(all);
    }
}

inline void parameter_table::measure() {
    storage_layout live;
    storage_layout staging;
    for (std::size_t i = 0; i < catalog_.size(); ++i) {
        const auto bytes = parameters()[i].byte_size();
        if (catalog_.owner(i) == i) {
            static_cast<void>(live.add(bytes));
            static_cast<void>(catalog_.frozen(i) ? 0 : staging.add(bytes));
        }
    }
    live_bytes_ = live.size();
    staging_bytes_ = staging.size();
}

inline void parameter_table::choose_mode(bool owns_memory) {
    const auto two_copies = owns_memory ? commit_mode::flip : commit_mode::copy_in;
    const auto both = checked_add(live_bytes_, staging_bytes_);
    const bool both_fit = both && *both <= options_.memory_budget.value_or(*both);
    mode_ = options_.mode.value_or(both_fit ? two_copies : commit_mode::in_place);
    if (mode_ == commit_mode::flip && !owns_memory) {
        throw unsupported_error{
            "flip alternates between two storages, and the user's addresses are fixed; choose "
            "copy_in or in_place",
            {.operation = "table over user memory"}};
    }
    if (mode_ == commit_mode::in_place) {
        staging_bytes_ = 0;
    }
    if (live_bytes_ + staging_bytes_ > options_.memory_budget.value_or(UINT64_MAX)) {
        throw resource_error{
            "mode " + std::string{to_string(mode_)} + " takes " +
                std::to_string(live_bytes_ + staging_bytes_) + " bytes, the budget is " +
                std::to_string(*options_.memory_budget) + "; raise it or choose another mode",
            {.operation = "parameter table"}};
    }
}

inline void parameter_table::map_live() {
    storage_layout layout;
    std::vector<std::uint64_t> offsets(catalog_.size());
    for (std::size_t i = 0; i < catalog_.size(); ++i) {
        offsets[i] = catalog_.owner(i) == i ? layout.add(parameters()[i].byte_size()) : 0;
    }
    auto* const base = storages_.emplace_back(layout.size(), "the live weights").data();
    for (std::size_t i = 0; i < catalog_.size(); ++i) {
        if (catalog_.owner(i) == i) {
            const auto& parameter = parameters()[i];
            core_.entries[i][0] = {base + offsets[i], parameter.dtype, parameter.shape};
        }
    }
}

/// Maps and touches a second storage for those of `placements` that are written and have none.
inline void parameter_table::stage_parameters(std::span<const placement> placements) {
    const auto lacks = [this](const placement& each) {
        return each.kind == destination::kind_type::place &&
               core_.entries[each.parameter][1].data() == nullptr;
    };
    if (std::ranges::none_of(placements, lacks)) {
        return;
    }
    storage_layout layout;
    std::vector<std::uint64_t> offsets(placements.size());
    for (std::size_t i = 0; i < placements.size(); ++i) {
        const auto& parameter = parameters()[placements[i].parameter];
        offsets[i] = lacks(placements[i]) ? layout.add(parameter.byte_size()) : 0;
    }
    auto* const base = storages_.emplace_back(layout.size(), "staging").data();
    for (std::size_t i = 0; i < placements.size(); ++i) {
        if (lacks(placements[i])) {
            const auto& parameter = parameters()[placements[i].parameter];
            core_.entries[placements[i].parameter][1] = {base + offsets[i], parameter.dtype,
                                                         parameter.shape};
        }
    }
    if (mode_ == commit_mode::copy_in) {
        // The other way, into staging whose content does not matter yet: so the first commit has an
        // estimate too, over the same memory and strides.
        constexpr std::uint64_t enough = std::uint64_t{32} << 20U;
        copy_rate_.tried([&] { return core_.copy_placed(placements, 0, 1, enough); });
    }
}

inline std::string parameter_table::description() const {
    const auto budget = options_.memory_budget
                            ? "of a budget of " + std::to_string(*options_.memory_budget)
                            : std::string{"without a budget"};
    return "parameter table: " + std::string{to_string(mode_)} +
           (options_.mode ? " as asked for, " : " by choice, ") + std::to_string(live_bytes_) +
           " bytes live and " + std::to_string(staging_bytes_) + " bytes of staging " + budget;
}

/// The storage that a session writes: the one that no reader of the live version looks at.
inline std::size_t parameter_table::write_slot(std::size_t parameter) const noexcept {
    switch (mode_) {
        case commit_mode::flip: return 1U - core_.current().slot[parameter];
        case commit_mode::copy_in: return 1;
        case commit_mode::in_place: return 0;
    }
    return 0;
}

inline void parameter_table::place_destinations(std::span<const placement> placements) {
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

inline std::span<const destination> parameter_table::begin(const session_info& session,
                                                           const manifest& session_manifest,
                                                           deadline until,
                                                           const std::stop_token& stop) {
    if (open_) {
        throw session_error{"a session is open on this sink; commit or roll it back first",
                            {.phase = phase::start}};
    }
    placements_ = catalog_.resolve(session_manifest, session.partial);
    if (mode_ != commit_mode::in_place) {
        stage_parameters(placements_);
    }
    copied_bytes_ = mode_ == commit_mode::copy_in ? core_.bytes_of(placements_) : 0;
    place_destinations(placements_);
    if (mode_ == commit_mode::flip) {
        core_.wait_for_spare(until, stop, phase::start);
    } else if (mode_ == commit_mode::in_place) {
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

inline void parameter_table::prepare(deadline until, const std::stop_token& stop) {
    if (!open_) {
        throw session_error{"prepare without a session; call begin first",
                            {.phase = phase::finish}};
    }
    if (prepared_) {
        return;
    }
    if (mode_ == commit_mode::flip) {
        auto& next = core_.spare().slot;
        next = core_.current().slot;
        for (const auto& each : placements_) {
            if (each.kind == destination::kind_type::place) {
                next[each.parameter] = static_cast<std::uint8_t>(1U - next[each.parameter]);
            }
        }
    } else if (mode_ == commit_mode::copy_in) {
        core_.close_door(until, stop, phase::finish);
    }
    prepared_ = true;
}

inline void parameter_table::commit(weight_version version) noexcept {
    if (!prepared_) {
        return;
    }
    if (mode_ == commit_mode::flip) {
        core_.flip(version);
    } else {
        if (mode_ == commit_mode::copy_in) {
            copy_rate_.took([this] { return core_.copy_placed(placements_, 1, 0); });
        }
        core_.renew(version, !partial_);
    }
    end_session();
}

inline void parameter_table::rollback() noexcept {
    if (open_) {
        if (prepared_) {
            copy_rate_.forget_one();
        }
        core_.give_up();
        end_session();
    }
}

template <std::ranges::input_range Tensors>
    requires std::convertible_to<std::ranges::range_reference_t<Tensors>, named_tensor>
void parameter_table::initialize(Tensors&& tensors, deadline until) {
    if (open_ || version() != 0) {
        throw usage_error{open_ ? "initialize while a session is open"
                                : "initialize loads version 0, and the table has had a commit",
                          {.phase = phase::init, .operation = "initialize"}};
    }
    core_.close_door(until, {}, phase::init);
    std::vector<std::uint8_t> loaded(catalog_.size(), 0);
    try {
        for (auto&& each : tensors) {
            load(each, loaded);
        }
        require_loaded(loaded);
    } catch (...) {
        core_.give_up();
        throw;
    }
    core_.renew(0, true);
}

/// Copies one tensor in. `loaded` has, for each name, whether it came.
inline void parameter_table::load(const named_tensor& from, std::vector<std::uint8_t>& loaded) {
    const auto i = parameters().find(from.name);
    if (i == manifest::npos) {
        catalog_.throw_unknown(from.name, phase::init);
    }
    catalog_.require_match(i, from.tensor.type(), from.tensor.extents(), phase::init);
    if (from.tensor.device().kind != memory_kind::host) {
        throw unsupported_error{"a parameter table loads from host memory only",
                                {.phase = phase::init, .tensor = std::string{from.name}}};
    }
    if (loaded[i] != 0) {
        throw coverage_error{"expected each tensor once, found it twice",
                             {.phase = phase::init, .tensor = std::string{from.name}}};
    }
    loaded[i] = 1;
    // Of tied weights the owner's bytes count, whichever name comes first.
    const auto owner = catalog_.owner(i);
    if (owner == i || loaded[owner] == 0) {
        core_.begin_writing();
        copy_tensor(core_.entries[owner][0], from.tensor);
    }
}

inline void parameter_table::require_loaded(const std::vector<std::uint8_t>& loaded) const {
    std::vector<std::uint8_t> covered(loaded.size(), 0);
    for (std::size_t i = 0; i < loaded.size(); ++i) {
        covered[catalog_.owner(i)] |= loaded[i];
    }
    for (std::size_t i = 0; i < loaded.size(); ++i) {
        if (covered[catalog_.owner(i)] == 0) {
            throw coverage_error{"expected all " + std::to_string(loaded.size()) +
                                     " parameters, this one did not come",
                                 {.phase = phase::init, .tensor = parameters()[i].name}};
        }
    }
}

}  // namespace weightwire
