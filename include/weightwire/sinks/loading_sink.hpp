#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ranges>
#include <span>
#include <stop_token>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/plan/groups.hpp>
#include <weightwire/sinks/declared_parameters.hpp>
#include <weightwire/sinks/host_storage.hpp>

/// @file
/// Makes a sink of a model that can only load tensors, through one bounded bounce buffer.

namespace weightwire {

/// `model.load(tensors)`: takes whole layers, copies what it wants, and keeps no address. It may be
/// called for the same layer again in a later session, and throws what ends the session.
template <class M>
concept HasLoad =
    requires(M& model, std::span<const named_tensor> tensors) { model.load(tensors); };

/// Optional: the model stages what it loads. `begin(session_info)`, then loads, then
/// `commit(version)` or `rollback()`, which make all of it visible or none.
template <class M>
concept HasLoadTransaction =
    requires(M& model, const session_info& session, weight_version version) {
        model.begin(session);
        { model.commit(version) } noexcept;
        { model.rollback() } noexcept;
    };

/// Optional: `prepare(deadline)`, everything of the model's commit that can fail or block.
template <class M>
concept HasLoadPrepare = requires(M& model, deadline until) { model.prepare(until); };

/// Optional: `prepare(deadline, stop)`, called instead: ends a wait when the stop is requested.
template <class M>
concept HasStoppableLoadPrepare =
    requires(M& model, deadline until, const std::stop_token& stop) { model.prepare(until, stop); };

/// Optional: `exchange(deadline, stop)` of a model that stages, as `HasExchange`: the part of its
/// commit that takes time, done so that it can be undone.
template <class M>
concept HasLoadExchange = HasLoadTransaction<M> && HasExchange<M>;

/// Optional: `parameters()`, the model's list, against which a session's manifest is checked.
template <class M>
concept HasParameterList = requires(const M& model) {
    { model.parameters() } -> std::convertible_to<manifest>;
};

/// One readable line for what `M` lacks.
template <class M>
consteval bool explain_loading_model() {
    static_assert(HasLoad<M>,
                  "loading_sink: the model needs load(std::span<const weightwire::named_tensor>)");
    return HasLoad<M>;
}

/// How a `loading_sink` works.
struct loading_sink_options {
    /// Size of the bounce buffer: at least the largest layer of the model, each tensor rounded up
    /// to 64 bytes.
    std::uint64_t buffer_bytes = std::uint64_t{256} << 20U;
    /// As in `parameter_table_options`; only for a model that has `parameters()`.
    std::vector<std::string> frozen{};
    /// As in `parameter_table_options`; only for a model that has `parameters()`.
    std::vector<std::pair<std::string, std::string>> aliases{};
};

/// Models `WeightSink`, `HasBouncedDestinations` and `HasCommitMode` over a model that has `load`.
///
/// The tensors of a layer (`plan::layerwise_groups`) gather in the buffer; as the last is placed
/// they go to `load` together, and the next layer takes their room. So a manifest must keep each
/// layer together.
///
/// Honest about what that means: unless the model has `begin`, `commit` and `rollback`, it holds a
/// mix from the first `load` of a session on. The sink then reports `in_place`, is dirty from that
/// moment until a commit, and stays so after a rollback until a full commit; the model must not
/// serve meanwhile. With the three members it reports `flip` and is never dirty.
///
/// `version()` and `dirty()` are thread-safe; the rest comes from one thread at a time.
template <HasLoad Model>
class loading_sink {
public:
    /// @param model lives longer than this object.
    /// @throws resource_error no memory for the buffer.
    /// @throws usage_error declarations that contradict the model's list, or without one.
    explicit loading_sink(Model& model, loading_sink_options options = {})
        : model_{&model},
          buffer_{options.buffer_bytes, "the bounce buffer"},
          buffer_bytes_{options.buffer_bytes} {
        if constexpr (HasParameterList<Model>) {
            catalog_.emplace(manifest{model.parameters()}, options.frozen, options.aliases);
        } else if (!options.frozen.empty() || !options.aliases.empty()) {
            throw usage_error{
                "frozen names and aliases need a model with parameters(), which says what they "
                "refer to",
                {.operation = "loading sink"}};
        }
    }

    /// `flip` where the model stages, else `in_place`.
    [[nodiscard]] commit_mode mode() const noexcept {
        return HasLoadTransaction<Model> ? commit_mode::flip : commit_mode::in_place;
    }
    [[nodiscard]] weight_version version() const noexcept { return version_; }
    [[nodiscard]] bool dirty() const noexcept { return mixed_ || damaged_; }
    /// One line: what the buffer is, and what a failure costs.
    [[nodiscard]] std::string description() const {
        return "loading sink: a bounce buffer of " + std::to_string(buffer_bytes_) + " bytes, " +
               (HasLoadTransaction<Model> ? "the model commits or rolls back"
                                          : "the model loads in place and is dirty until whole");
    }

    /// The model's list, where it has one, aliases included: workers compare a trainer's with it as
    /// early as its init.
    [[nodiscard]] const manifest& parameters() const noexcept
        requires HasParameterList<Model>
    {
        return catalog_->parameters();
    }

    /// @returns destinations without an address: `open_destination` gives it.
    /// @throws coverage_error the manifest does not fit the model's list.
    /// @throws resource_error a layer does not fit the buffer; says the size that is needed.
    /// @throws data_error the manifest does not keep a layer together.
    /// @throws session_error a session is open.
    /// @throws what the model's `begin` throws.
    std::span<const destination> begin(const session_info& session, const manifest& parameters,
                                       deadline until);
    /// Where parameter `i` is written; valid until `placed(i)`.
    /// @throws usage_error a layer before it is not whole, or it is not to be placed.
    [[nodiscard]] mutable_tensor_view open_destination(std::size_t i, deadline until);
    /// All bytes of parameter `i` are written. Loads the layer that becomes whole by it.
    /// @throws usage_error it was not open.
    /// @throws what `load` throws.
    void placed(std::size_t i, deadline until);
    /// Layers are loaded as their last parameter is placed, once.
    void group_complete(std::size_t /*group*/) noexcept {}
    /// Loads layers without bytes and prepares the model.
    /// @throws session_error no session is open.
    /// @throws coverage_error a parameter was not placed; names it.
    void prepare(deadline until, const std::stop_token& stop = {});
    /// The model's own, where it has one.
    /// @throws session_error no session is prepared.
    /// @throws what the model throws, which has put everything back then.
    void exchange(deadline until, const std::stop_token& stop = {})
        requires HasLoadExchange<Model>
    {
        if (!prepared_) {
            throw session_error{"exchange without a prepared session; call prepare first",
                                {.phase = phase::finish}};
        }
        model_->exchange(until, stop);
    }
    /// The model's own guess, where it has one: only it knows what its commit does.
    [[nodiscard]] std::chrono::nanoseconds commit_estimate() const
        requires HasCommitEstimate<Model>
    {
        return std::as_const(*model_).commit_estimate();
    }
    /// Without a `prepare` that returned it does nothing.
    void commit(weight_version version) noexcept;
    void rollback() noexcept;

private:
    enum class progress : std::uint8_t { awaited, open, placed };

    void cut_groups(const manifest& parameters);
    void measure_groups();
    void mark_wanted(const manifest& parameters, bool partial);
    void load_group(std::size_t group);
    [[nodiscard]] bool wanted(std::size_t i) const noexcept {
        return destinations_[i].kind == destination::kind_type::place;
    }

    Model* model_;
    host_storage buffer_;
    std::uint64_t buffer_bytes_;
    std::optional<declared_parameters> catalog_{};

    // The plan of the last manifest, kept while it repeats.
    manifest parameters_{};
    std::vector<std::size_t> group_of_;     // by position: runs of one layer, in order
    std::vector<std::size_t> first_of_;     // of each group, and the end of the last
    std::vector<std::uint64_t> offset_of_;  // in the buffer
    std::vector<destination> destinations_;

    std::vector<progress> progress_;
    std::vector<std::size_t> missing_;  // parameters with bytes to be placed, of each group
    std::vector<std::uint8_t> loaded_;
    std::vector<named_tensor> handed_over_;
    std::size_t current_ = 0;  // the group in the buffer
    bool open_ = false;
    bool prepared_ = false;
    bool partial_ = false;
    std::atomic<bool> mixed_ = false;    // this session has loaded into live weights
    std::atomic<bool> damaged_ = false;  // an earlier one did and failed
    std::atomic<weight_version> version_ = 0;
};

template <HasLoad Model>
std::span<const destination> loading_sink<Model>::begin(const session_info& session,
                                                        const manifest& parameters,
                                                        deadline /*until*/) {
    if (open_) {
        throw session_error{"a session is open on this sink; commit or roll it back first",
                            {.phase = phase::start}};
    }
    mark_wanted(parameters, session.partial);
    if (!std::ranges::equal(parameters.parameters(), parameters_.parameters())) {
        cut_groups(parameters);
    }
    measure_groups();
    if constexpr (HasLoadTransaction<Model>) {
        model_->begin(session);
    }
    open_ = true;
    prepared_ = false;
    partial_ = session.partial;
    current_ = 0;
    return destinations_;
}

/// What comes, what is frozen, what is an alias.
template <HasLoad Model>
void loading_sink<Model>::mark_wanted(const manifest& parameters, bool partial) {
    std::span<const declared_parameters::placement> placements;
    if (catalog_) {
        placements = catalog_->resolve(parameters, partial);
    }
    destinations_.resize(parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        auto& to = destinations_[i];
        to = {};
        if (catalog_) {
            to.kind = placements[i].kind;
            to.alias_of = placements[i].alias_of;
        }
        if (wanted(i)) {
            to.where = {nullptr, parameters[i].dtype, parameters[i].shape};
        }
    }
}

template <HasLoad Model>
void loading_sink<Model>::cut_groups(const manifest& parameters) {
    parameters_ = {};
    const auto assignment = plan::layerwise_groups(parameters);
    if (const auto at = plan::first_reopened(assignment); at != manifest::npos) {
        throw data_error{
            "its layer was left and is entered again, and a bounce buffer holds one layer; order "
            "the parameters by layer",
            {.phase = phase::start, .tensor = parameters[at].name}};
    }
    group_of_.clear();
    first_of_.assign(1, 0);
    for (const auto size : plan::group_runs(assignment)) {
        group_of_.insert(group_of_.end(), size, first_of_.size() - 1);
        first_of_.push_back(first_of_.back() + size);
    }
    parameters_ = parameters;
}

/// Lays each group's wanted parameters out in the buffer.
template <HasLoad Model>
void loading_sink<Model>::measure_groups() {
    const auto groups = first_of_.empty() ? 0 : first_of_.size() - 1;
    offset_of_.assign(parameters_.size(), 0);
    progress_.assign(parameters_.size(), progress::awaited);
    missing_.assign(groups, 0);
    loaded_.assign(groups, 0);
    for (std::size_t group = 0; group < groups; ++group) {
        storage_layout layout;
        for (std::size_t i = first_of_[group]; i < first_of_[group + 1]; ++i) {
            if (wanted(i)) {
                offset_of_[i] = layout.add(parameters_[i].byte_size());
                missing_[group] += parameters_[i].byte_size() != 0 ? 1U : 0U;
            }
        }
        if (layout.size() > buffer_bytes_) {
            throw resource_error{"a layer needs a bounce buffer of " +
                                     std::to_string(layout.size()) + " bytes, this one has " +
                                     std::to_string(buffer_bytes_) + "; raise buffer_bytes",
                                 {.phase = phase::start,
                                  .tensor = parameters_[first_of_[group]].name,
                                  .bytes_total = layout.size()}};
        }
    }
}

template <HasLoad Model>
mutable_tensor_view loading_sink<Model>::open_destination(std::size_t i, deadline /*until*/) {
    if (!open_ || i >= destinations_.size() || !wanted(i)) {
        throw usage_error{"a destination was opened that is not to be placed",
                          {.phase = phase::update}};
    }
    const auto group = group_of_[i];
    const auto& parameter = parameters_[i];
    const bool current_whole = missing_[current_] == 0;
    if (progress_[i] == progress::placed || group < current_ ||
        (group > current_ && !current_whole)) {
        throw usage_error{
            "destinations are opened layer after layer, in manifest order, and each "
            "only until it is placed; this one came out of order",
            {.phase = phase::update, .tensor = parameter.name}};
    }
    current_ = group;
    progress_[i] = progress::open;
    return {buffer_.data() + offset_of_[i], parameter.dtype, parameter.shape};
}

template <HasLoad Model>
void loading_sink<Model>::placed(std::size_t i, deadline /*until*/) {
    if (!open_ || i >= progress_.size() || progress_[i] != progress::open) {
        throw usage_error{"a destination was placed that is not open", {.phase = phase::update}};
    }
    progress_[i] = progress::placed;
    if (parameters_[i].byte_size() != 0 && --missing_[group_of_[i]] == 0) {
        load_group(group_of_[i]);
    }
}

template <HasLoad Model>
void loading_sink<Model>::load_group(std::size_t group) {
    handed_over_.clear();
    for (std::size_t i = first_of_[group]; i < first_of_[group + 1]; ++i) {
        if (wanted(i)) {
            const auto& parameter = parameters_[i];
            handed_over_.push_back(
                {parameter.name,
                 {buffer_.data() + offset_of_[i], parameter.dtype, parameter.shape}});
        }
    }
    if (handed_over_.empty()) {
        return;
    }
    mixed_ = !HasLoadTransaction<Model>;  // also if it throws: it may have copied some
    model_->load(std::span<const named_tensor>{handed_over_});
    loaded_[group] = 1;
}

template <HasLoad Model>
void loading_sink<Model>::prepare([[maybe_unused]] deadline until,
                                  [[maybe_unused]] const std::stop_token& stop) {
    if (!open_) {
        throw session_error{"prepare without a session; call begin first",
                            {.phase = phase::finish}};
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        if (wanted(i) && parameters_[i].byte_size() != 0 && progress_[i] != progress::placed) {
            throw coverage_error{"it was not placed; nothing is committed",
                                 {.phase = phase::finish,
                                  .tensor = parameters_[i].name,
                                  .bytes_total = parameters_[i].byte_size()}};
        }
    }
    for (std::size_t group = 0; group < loaded_.size(); ++group) {
        if (loaded_[group] == 0) {
            load_group(group);
        }
    }
    if constexpr (HasStoppableLoadPrepare<Model>) {
        model_->prepare(until, stop);
    } else if constexpr (HasLoadPrepare<Model>) {
        model_->prepare(until);
    }
    prepared_ = true;
}

template <HasLoad Model>
void loading_sink<Model>::commit(weight_version version) noexcept {
    if (!prepared_) {
        return;
    }
    if constexpr (HasLoadTransaction<Model>) {
        model_->commit(version);
    }
    damaged_ = damaged_ && partial_;
    if (!damaged_) {
        version_ = version;
    }
    mixed_ = false;
    open_ = prepared_ = false;
}

template <HasLoad Model>
void loading_sink<Model>::rollback() noexcept {
    if (!open_) {
        return;
    }
    if constexpr (HasLoadTransaction<Model>) {
        model_->rollback();
    }
    damaged_ = damaged_ || mixed_;
    mixed_ = false;
    open_ = prepared_ = false;
}

}  // namespace weightwire
