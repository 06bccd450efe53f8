#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/groups.hpp>

/// @file
/// What a sink holds, and the strict comparison of a session's manifest with it.

namespace weightwire {

/// A sink's parameters: which are frozen, which share another's storage, and where a session's
/// manifest meets them. Not thread-safe.
class declared_parameters {
public:
    using alias_list = std::span<const std::pair<std::string, std::string>>;

    /// What becomes of one parameter of a session.
    struct placement {
        destination::kind_type kind = destination::kind_type::place;
        std::size_t parameter = 0;  ///< position in `parameters()`; for `place` the storage's owner
        std::size_t alias_of = 0;   ///< for `alias`: session position of the one that is written
    };

    /// @param parameters what the sink holds. An alias that it does not list is added, shaped like
    /// its owner.
    /// @param frozen names that updates never write.
    /// @param aliases {alias, owner}: tied weights, two names of one storage.
    /// @param convert_dtypes a session's parameter may have another dtype that `can_convert`.
    /// @throws usage_error a frozen name or an owner that is not there, an alias of another shape
    /// or dtype, declared twice, frozen, or part of a ring; names it.
    declared_parameters(manifest parameters, std::span<const std::string> frozen,
                        alias_list aliases, bool convert_dtypes = false)
        : parameters_{with_aliases(std::move(parameters), aliases)},
          convert_dtypes_{convert_dtypes},
          owner_(parameters_.size()),
          frozen_(parameters_.size(), 0) {
        tie(aliases);
        for (const auto& name : frozen) {
            const auto i = known(name, "it is declared frozen");
            if (owner_[i] != i) {
                refuse("it is an alias; declare its owner frozen", name);
            }
            frozen_[i] = 1;
        }
        group_parameters();
    }

    [[nodiscard]] const manifest& parameters() const noexcept { return parameters_; }
    [[nodiscard]] std::size_t size() const noexcept { return owner_.size(); }
    /// Position of the parameter whose storage parameter `i` has: `i` itself, or an alias's owner.
    [[nodiscard]] std::size_t owner(std::size_t i) const noexcept { return owner_[i]; }
    /// Whether updates leave the storage of parameter `i` alone.
    [[nodiscard]] bool frozen(std::size_t i) const noexcept { return frozen_[owner_[i]] != 0; }

    /// Compares a session's manifest with what is declared here.
    /// @param partial the session need not name every parameter, only whole layers.
    /// @returns one placement a session parameter, valid until the next call. A manifest that is
    /// equal to the last one costs a comparison and allocates nothing.
    /// @throws coverage_error a parameter that the sink does not have or the session does not name,
    /// or one of another shape or dtype; names it, with what was expected and found.
    std::span<const placement> resolve(const manifest& session, bool partial) {
        if (!same_as_last(session, partial)) {
            placements_.clear();
            auto placements = place(session);
            require_covered(partial);
            placements_ = std::move(placements);
            partial_ = partial;
        }
        return placements_;
    }

    /// Throws when a tensor does not fit parameter `i`.
    /// @param may_convert another dtype could be taken with `convert_dtypes`: say so.
    /// @throws coverage_error another dtype or shape; names the tensor, expected and found.
    void require_match(std::size_t i, dtype type, const shape& extents, phase where,
                       bool may_convert = false) const {
        const auto& expected = parameters_[i];
        if (type != expected.dtype || extents != expected.shape) {
            const bool convertible = may_convert && type != expected.dtype &&
                                     extents == expected.shape && can_convert(type, expected.dtype);
            throw coverage_error{"expected " + described(expected.dtype, expected.shape) +
                                     ", found " + described(type, extents) +
                                     "; sender and worker must hold the same model" +
                                     (convertible ? ", or the table needs convert_dtypes, with a "
                                                    "backend that converts (cuda_ipc)"
                                                  : ""),
                                 {.phase = where, .tensor = expected.name}};
        }
    }

    /// Throws when a load of version 0 has left out a parameter: one of tied names suffices.
    /// @param loaded for each name, whether it came.
    /// @throws coverage_error names the first.
    void require_all(const std::vector<std::uint8_t>& loaded) const {
        std::vector<std::uint8_t> covered(loaded.size(), 0);
        for (std::size_t i = 0; i < loaded.size(); ++i) {
            covered[owner_[i]] |= loaded[i];
        }
        for (std::size_t i = 0; i < loaded.size(); ++i) {
            if (covered[owner_[i]] == 0) {
                throw coverage_error{"expected all " + std::to_string(loaded.size()) +
                                         " parameters, this one did not come",
                                     {.phase = phase::init, .tensor = parameters_[i].name}};
            }
        }
    }

    /// Throws what a name that the sink does not have gives.
    [[noreturn]] void throw_unknown(std::string_view name, phase where) const {
        throw coverage_error{"expected one of the " + std::to_string(size()) +
                                 " parameters of the worker, found a name that it does not have",
                             {.phase = where, .tensor = std::string{name}}};
    }

private:
    static std::string described(dtype type, const shape& extents) {
        return std::string{to_string(type)} + to_string(extents);
    }

    [[noreturn]] static void refuse(std::string_view text, std::string_view name) {
        throw usage_error{text, {.tensor = std::string{name}, .operation = "declare parameters"}};
    }

    [[nodiscard]] std::size_t known(std::string_view name, std::string_view role) const {
        const auto i = parameters_.find(name);
        if (i == manifest::npos) {
            refuse(std::string{role} + ", but no parameter has this name", name);
        }
        return i;
    }

    /// The meta of what `name` finally stands for. Declarations may be in any order, so chains are
    /// followed by name; one longer than the list is a ring.
    static const param_meta* final_owner(const manifest& parameters,
                                         const std::map<std::string_view, std::string_view>& ties,
                                         std::string_view name) {
        std::string_view at = name;
        for (std::size_t steps = 0; steps <= ties.size(); ++steps) {
            const auto next = ties.find(at);
            if (next == ties.end()) {
                const auto i = parameters.find(at);
                return i == manifest::npos ? nullptr : &parameters[i];
            }
            at = next->second;
        }
        refuse("its aliases form a ring", name);
    }

    static std::map<std::string_view, std::string_view> ties_of(alias_list aliases) {
        std::map<std::string_view, std::string_view> ties;
        for (const auto& [alias, owner] : aliases) {
            if (!ties.emplace(alias, owner).second) {
                refuse("it is declared an alias twice", alias);
            }
        }
        return ties;
    }

    static manifest with_aliases(manifest parameters, alias_list aliases) {
        const auto ties = ties_of(aliases);
        std::vector<param_meta> all{parameters.parameters().begin(), parameters.parameters().end()};
        for (const auto& [alias, direct_owner] : aliases) {
            const auto* owner = final_owner(parameters, ties, alias);
            if (owner == nullptr) {
                refuse("it owns the storage of an alias, but no parameter has this name",
                       direct_owner);
            }
            const auto i = parameters.find(alias);
            if (i == manifest::npos) {
                all.push_back({alias, owner->dtype, owner->shape});
            } else if (parameters[i].dtype != owner->dtype || parameters[i].shape != owner->shape) {
                refuse("it is an alias of " + owner->name + ", but has another shape or dtype",
                       alias);
            }
        }
        if (all.size() == parameters.size()) {
            return parameters;
        }
        return manifest{std::move(all), parameters.set_name()};
    }

    void tie(alias_list aliases) {
        for (std::size_t i = 0; i < size(); ++i) {
            owner_[i] = i;
        }
        const auto ties = ties_of(aliases);
        for (const auto& [alias, owner] : aliases) {
            owner_[parameters_.find(alias)] =
                parameters_.find(final_owner(parameters_, ties, alias)->name);
        }
    }

    /// Layers as everywhere (`plan::layerwise_groups`). Names outside of any layer belong together
    /// only where they are one module's (`lm_head.weight`, `lm_head.weight_scale`): else an update
    /// of the head alone would have to bring the final norm too.
    void group_parameters() {
        auto assignment = plan::layerwise_groups(parameters_);
        group_of_ = std::move(assignment.group_of);
        group_count_ = assignment.group_count;
        std::map<std::string_view, std::size_t> modules;
        for (std::size_t i = 0; i < size(); ++i) {
            const std::string_view name = parameters_[i].name;
            if (!in_a_layer(name)) {
                const auto dot = name.rfind('.');
                const auto module = dot == std::string_view::npos ? name : name.substr(0, dot);
                const auto [at, fresh] = modules.emplace(module, group_count_);
                group_count_ += fresh ? 1 : 0;
                group_of_[i] = at->second;
            }
        }
    }

    /// Whether a dotted segment of the name is a number.
    static bool in_a_layer(std::string_view name) noexcept {
        for (std::size_t begin = 0; begin <= name.size();) {
            const auto end = std::min(name.find('.', begin), name.size());
            const auto segment = name.substr(begin, end - begin);
            if (!segment.empty() &&
                segment.find_first_not_of("0123456789") == std::string_view::npos) {
                return true;
            }
            begin = end + 1;
        }
        return false;
    }

    [[nodiscard]] bool same_as_last(const manifest& session, bool partial) const noexcept {
        if (session.size() != placements_.size() || partial != partial_ || placements_.empty()) {
            return false;
        }
        for (std::size_t i = 0; i < placements_.size(); ++i) {
            const auto& held = parameters_[positions_[i]];
            if (session[i].dtype != dtypes_[i] || session[i].shape != held.shape ||
                session[i].name != held.name) {
                return false;
            }
        }
        return true;
    }

    std::vector<placement> place(const manifest& session) {
        positions_.resize(session.size());
        dtypes_.resize(session.size());
        writer_.assign(size(), manifest::npos);
        for (std::size_t i = 0; i < session.size(); ++i) {
            const auto& found = session[i];
            const auto at = parameters_.find(found.name);
            if (at == manifest::npos) {
                throw_unknown(found.name, phase::start);
            }
            const auto& held = parameters_[at];
            if (!convert_dtypes_ || !can_convert(found.dtype, held.dtype) ||
                found.shape != held.shape) {
                require_match(at, found.dtype, found.shape, phase::start, !convert_dtypes_);
            }
            positions_[i] = at;
            dtypes_[i] = found.dtype;
            // The owner's own name writes where it is sent, else the first of its aliases.
            auto& writer = writer_[owner_[at]];
            if (owner_[at] == at || writer == manifest::npos) {
                writer = i;
            }
        }
        std::vector<placement> placements(session.size());
        for (std::size_t i = 0; i < session.size(); ++i) {
            const auto owner = owner_[positions_[i]];
            using kind = destination::kind_type;
            placements[i] = {frozen_[owner] != 0   ? kind::frozen
                             : writer_[owner] == i ? kind::place
                                                   : kind::alias,
                             owner, writer_[owner]};
        }
        return placements;
    }

    [[nodiscard]] bool missing(std::size_t i) const noexcept {
        return owner_[i] == i && frozen_[i] == 0 && writer_[i] == manifest::npos;
    }

    void require_covered(bool partial) const {
        std::vector<std::size_t> touched_by(group_count_, manifest::npos);
        for (std::size_t i = 0; partial && i < size(); ++i) {
            if (writer_[i] != manifest::npos && frozen_[i] == 0) {
                touched_by[group_of_[i]] = i;
            }
        }
        std::size_t count = 0;
        std::size_t first = manifest::npos;
        for (std::size_t i = 0; i < size(); ++i) {
            if (missing(i) && (!partial || touched_by[group_of_[i]] != manifest::npos)) {
                first = std::min(first, i);
                ++count;
            }
        }
        if (count == 0) {
            return;
        }
        const auto& expected = parameters_[first];
        const auto rule =
            partial ? "a partial session covers each layer that it touches completely, and this "
                      "one names " +
                          parameters_[touched_by[group_of_[first]]].name + " of the same layer"
                    : std::string{"let the trainer send it, or declare it frozen or an alias here"};
        throw coverage_error{"expected " + described(expected.dtype, expected.shape) +
                                 ", but the update does not have it (" + std::to_string(count) +
                                 " of " + std::to_string(size()) +
                                 " are missing, this is the first): " + rule,
                             {.phase = phase::start, .tensor = expected.name}};
    }

    manifest parameters_;
    bool convert_dtypes_;
    std::vector<std::size_t> owner_;
    std::vector<std::uint8_t> frozen_;
    std::vector<std::size_t> group_of_;
    std::size_t group_count_ = 0;
    // The last session: kept, since rounds repeat.
    std::vector<placement> placements_;
    std::vector<std::size_t> positions_;  // of each session parameter in parameters_
    std::vector<dtype> dtypes_;           // of each session parameter
    std::vector<std::size_t> writer_;     // session position that writes each owner
    bool partial_ = false;
};

}  // namespace weightwire
