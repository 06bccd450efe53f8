#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/plan/groups.hpp>
#include <weightwire/sinks/tensor_copy.hpp>
#include <weightwire/sinks/user_memory.hpp>
#include <weightwire/testing/conformance/report.hpp>

/// @file
/// The promises of `WeightSink` that a compiler cannot check, tried on your own sink.
///
/// ```cpp
/// const auto report = weightwire::testing::check_weight_sink(
///     [&](auto&& use) { my_model model; my_sink sink{model}; use(sink); }, parameters);
/// ```
///
/// Promises about what readers see are tried where the sink has snapshots (`HasSnapshots`).

namespace weightwire::testing {

/// How the suite treats a sink.
struct weight_sink_conformance_options {
    /// What a call that should succeed may take.
    std::chrono::milliseconds patience = std::chrono::seconds{10};
    /// What a call that must give up is given.
    std::chrono::milliseconds short_wait{50};
    /// Whether the sink knows its parameters and refuses others, as one must that has a list.
    bool knows_its_parameters = true;
};

namespace detail {

/// Bytes of parameter `i` in round `round`: never constant, different for every parameter, round
/// and position.
inline std::vector<std::byte> conformance_pattern(std::uint64_t round, std::size_t i,
                                                  std::size_t size) {
    std::vector<std::byte> bytes(size);
    for (std::size_t at = 0; at < size; at += 8) {
        const auto word = weightwire::detail::digest_term(round * 0x9E3779B97F4A7C15U + i,
                                                          (at + 1) * 0xD6E8FEB86659FD93U);
        std::memcpy(bytes.data() + at, &word, std::min<std::size_t>(8, size - at));
    }
    return bytes;
}

/// One sink under test, and the steps that the checks share.
template <class Sink>
class sink_trial {
public:
    sink_trial(Sink& sink, const manifest& parameters,
               const weight_sink_conformance_options& options)
        : sink_{sink}, parameters_{parameters}, options_{options} {}

    [[nodiscard]] deadline soon() const { return deadline::after(options_.patience); }

    std::span<const destination> begin(weight_version version) {
        return begin(version, parameters_, soon());
    }
    std::span<const destination> begin(weight_version version, const manifest& parameters,
                                       deadline until) {
        return sink_.begin(session_info{1, ++sessions_, version, false}, parameters, until);
    }

    /// Writes every destination that is to be placed.
    void write(std::span<const destination> destinations, std::uint64_t round) {
        for (std::size_t i = 0; i < destinations.size(); ++i) {
            if (destinations[i].kind != destination::kind_type::place) {
                continue;
            }
            const auto& parameter = parameters_[i];
            const auto bytes = conformance_pattern(round, i, parameter.byte_size());
            const tensor_view from{bytes.data(), parameter.dtype, parameter.shape};
            if constexpr (HasBouncedDestinations<Sink>) {
                copy_tensor(sink_.open_destination(i, soon()), from);
                sink_.placed(i, soon());
            } else {
                copy_tensor(destinations[i].where, from);
            }
        }
        const auto groups = plan::layerwise_groups(parameters_).group_count;
        for (std::size_t group = 0; group < groups; ++group) {
            sink_.group_complete(group);
            sink_.group_complete(group);  // idempotent
        }
    }

    /// A whole session. Returns which parameters were written.
    void update(weight_version version) {
        const auto destinations = begin(version);
        remember(destinations);
        write(destinations, version);
        sink_.prepare(soon());
        sink_.commit(version);
    }

    void remember(std::span<const destination> destinations) {
        kinds_.assign(destinations.begin(), destinations.end());
    }

    /// Empty where a snapshot holds round `version` in every parameter that is written, else what
    /// is wrong.
    template <class Snapshot>
    std::string mismatch(const Snapshot& held, weight_version version) const {
        if (held.version() != version) {
            return "the snapshot has version " + std::to_string(held.version()) + ", expected " +
                   std::to_string(version);
        }
        for (std::size_t i = 0; i < held.size(); ++i) {
            const auto at = parameters_.find(held.name(i));
            if (at == manifest::npos || kinds_[at].kind == destination::kind_type::frozen) {
                continue;
            }
            const auto owner =
                kinds_[at].kind == destination::kind_type::alias ? kinds_[at].alias_of : at;
            const tensor_view tensor = held.tensor(i);
            std::vector<std::byte> found(tensor.byte_size());
            copy_tensor({found.data(), tensor.type(), tensor.extents()}, tensor);
            if (found != conformance_pattern(version, owner, found.size())) {
                return parameters_[at].name + " does not hold the bytes of version " +
                       std::to_string(version);
            }
        }
        return {};
    }

    /// The same for what readers see now.
    std::string visible(weight_version version) {
        if (sink_.version() != version) {
            return "version() is " + std::to_string(sink_.version()) + ", expected " +
                   std::to_string(version);
        }
        if constexpr (HasSnapshots<Sink>) {
            return mismatch(sink_.acquire(), version);
        }
        return {};
    }

    /// Empty where version `version` is untouched by a session that is open or was rolled back, or
    /// where the sink honestly says that it is not.
    std::string old_or_dirty(weight_version version) {
        if (!sink_.dirty()) {
            return visible(version);
        }
        if constexpr (HasCommitMode<Sink>) {
            if (sink_.mode() != commit_mode::in_place) {
                return "only in_place sinks may become dirty";
            }
        }
        if (sink_.version() != version) {
            return "a dirty sink names version " + std::to_string(sink_.version()) +
                   ", expected the last whole one, " + std::to_string(version);
        }
        if constexpr (HasSnapshots<Sink>) {
            try {
                static_cast<void>(sink_.acquire());
                return "acquire() of a dirty sink returned";
            } catch (const dirty_error&) {
            }
        }
        return {};
    }

    /// Empty where `begin` with `parameters` throws a coverage_error that names `tensor` and leaves
    /// no session behind.
    std::string refuses(const manifest& parameters, const std::string& tensor) {
        std::string wrong = "begin returned, expected a coverage_error";
        try {
            static_cast<void>(begin(1, parameters, soon()));
        } catch (const coverage_error& problem) {
            wrong = problem.context().tensor == tensor
                        ? ""
                        : "the error names " + problem.context().tensor + ", expected " + tensor;
        }
        sink_.rollback();
        if (wrong.empty() && sink_.dirty()) {
            return "the sink is dirty after a session that it refused";
        }
        if (wrong.empty()) {
            update(1);  // no session was left open
            return visible(1);
        }
        return wrong;
    }

    Sink& sink() noexcept { return sink_; }
    [[nodiscard]] const manifest& parameters() const noexcept { return parameters_; }
    [[nodiscard]] const weight_sink_conformance_options& options() const noexcept {
        return options_;
    }

private:
    Sink& sink_;
    const manifest& parameters_;
    const weight_sink_conformance_options& options_;
    std::vector<destination> kinds_;
    std::uint64_t sessions_ = 0;
};

/// The destinations of a session fit the manifest and do not overlap.
template <class Sink>
std::string destinations_fit(sink_trial<Sink>& trial) {
    const auto& parameters = trial.parameters();
    const auto destinations = trial.begin(1);
    if (destinations.size() != parameters.size()) {
        return std::to_string(destinations.size()) + " destinations for " +
               std::to_string(parameters.size()) + " parameters";
    }
    std::vector<user_parameter> memory;
    for (std::size_t i = 0; i < destinations.size(); ++i) {
        const auto& [kind, where, alias_of] = destinations[i];
        if (kind == destination::kind_type::alias &&
            (alias_of >= destinations.size() ||
             destinations[alias_of].kind != destination::kind_type::place)) {
            return parameters[i].name + " is an alias of a parameter that is not placed";
        }
        if (kind != destination::kind_type::place) {
            continue;
        }
        if (where.type() != parameters[i].dtype || where.extents() != parameters[i].shape) {
            return "the destination of " + parameters[i].name + " has another dtype or shape";
        }
        memory.push_back({parameters[i].name, where});
    }
    if constexpr (!HasBouncedDestinations<Sink>) {
        require_distinct_memory(memory);
    }
    return {};
}

template <class Sink>
std::string second_begin_is_refused(sink_trial<Sink>& trial) {
    const auto destinations = trial.begin(1);
    trial.remember(destinations);
    try {
        static_cast<void>(trial.begin(2));
        return "a second begin returned, expected a session_error";
    } catch (const session_error&) {
    }
    trial.write(destinations, 1);
    trial.sink().prepare(trial.soon());
    trial.sink().commit(1);
    return trial.visible(1);
}

template <class Sink>
std::string rollback_restores(sink_trial<Sink>& trial) {
    trial.sink().rollback();  // legal at any time
    trial.update(1);
    trial.write(trial.begin(2), 2);
    trial.sink().rollback();
    trial.sink().rollback();
    if (auto wrong = trial.old_or_dirty(1); !wrong.empty()) {
        return wrong;
    }
    trial.write(trial.begin(3), 3);
    trial.sink().prepare(trial.soon());
    trial.sink().rollback();
    if (auto wrong = trial.old_or_dirty(1); !wrong.empty()) {
        return "after a prepare: " + wrong;
    }
    trial.update(4);
    return trial.sink().dirty() ? "a full commit did not clear dirty" : trial.visible(4);
}

template <class Sink>
std::string nothing_is_visible_before_commit(sink_trial<Sink>& trial) {
    trial.update(1);
    const auto destinations = trial.begin(2);
    if (auto wrong = trial.old_or_dirty(1); !wrong.empty()) {
        return "after begin: " + wrong;
    }
    trial.write(destinations, 2);
    if (auto wrong = trial.old_or_dirty(1); !wrong.empty()) {
        return "after the writes: " + wrong;
    }
    trial.sink().prepare(trial.soon());
    if (trial.sink().version() != 1) {
        return "after prepare: version() is " + std::to_string(trial.sink().version());
    }
    trial.sink().commit(2);
    return {};
}

template <class Sink>
std::string everything_is_visible_after_commit(sink_trial<Sink>& trial) {
    for (const weight_version version : {1U, 2U, 3U, 5U, 8U}) {
        trial.update(version);
        if (trial.sink().dirty()) {
            return "the sink is dirty after a full commit";
        }
        if (auto wrong = trial.visible(version); !wrong.empty()) {
            return wrong;
        }
    }
    return {};
}

/// A reader that holds on makes a session wait and give up; its weights never change.
template <class Sink>
std::string held_snapshots_never_change(sink_trial<Sink>& trial) {
    trial.update(1);
    weight_version version = 1;
    if constexpr (HasSnapshots<Sink>) {
        const auto held = trial.sink().acquire();
        for (const weight_version next : {2U, 3U}) {
            try {
                const auto until = deadline::after(trial.options().short_wait);
                trial.write(trial.begin(next, trial.parameters(), until), next);
                trial.sink().prepare(deadline::after(trial.options().short_wait));
                trial.sink().commit(next);
                version = next;
            } catch (const timeout_error&) {
                trial.sink().rollback();
            }
            if (auto wrong = trial.mismatch(held, 1); !wrong.empty()) {
                return wrong;
            }
        }
    }
    return trial.visible(version);
}

/// `parameters` with one entry changed.
template <class Change>
manifest changed(const manifest& parameters, Change&& change) {
    std::vector<param_meta> list{parameters.parameters().begin(), parameters.parameters().end()};
    change(list);
    return manifest{std::move(list), parameters.set_name()};
}

template <class Sink>
std::string coverage_is_strict(sink_trial<Sink>& trial) {
    const auto& parameters = trial.parameters();
    const auto& first = parameters[0];
    const auto unknown = changed(parameters, [](auto& list) {
        list.push_back({"weightwire.conformance.unknown", dtype::f32, shape{1}});
    });
    if (auto wrong = trial.refuses(unknown, "weightwire.conformance.unknown"); !wrong.empty()) {
        return "an unknown parameter: " + wrong;
    }
    const auto reshaped = changed(parameters, [](auto& list) {
        list[0].shape = list[0].shape == shape{7} ? shape{5} : shape{7};
        list[0].dtype = dtype::f32;
    });
    if (auto wrong = trial.refuses(reshaped, first.name); !wrong.empty()) {
        return "another shape: " + wrong;
    }
    const auto retyped = changed(parameters, [](auto& list) {
        list[0].dtype = list[0].dtype == dtype::u8 ? dtype::i8 : dtype::u8;
    });
    if (auto wrong = trial.refuses(retyped, first.name); !wrong.empty()) {
        return "another dtype: " + wrong;
    }
    return {};
}

/// Leaves out each parameter in turn that a whole session must bring.
template <class Sink>
std::string missing_parameters_are_named(sink_trial<Sink>& trial) {
    const auto& parameters = trial.parameters();
    trial.update(1);
    const auto destinations = trial.begin(2);
    std::vector<std::uint8_t> needed(destinations.size(), 0);
    for (std::size_t i = 0; i < destinations.size(); ++i) {
        needed[i] = destinations[i].kind == destination::kind_type::place ? 1 : 0;
    }
    for (const auto& each : destinations) {
        if (each.kind == destination::kind_type::alias) {
            needed[each.alias_of] = 0;  // its alias could bring it
        }
    }
    trial.write(destinations, 2);
    trial.sink().prepare(trial.soon());
    trial.sink().commit(2);
    std::size_t tried = 0;
    for (std::size_t i = 0; i < needed.size() && tried < 3; ++i) {
        if (needed[i] != 0 && parameters.size() > 1) {
            const auto without = changed(parameters, [i](auto& list) {
                list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
            });
            if (auto wrong = trial.refuses(without, parameters[i].name); !wrong.empty()) {
                return wrong;
            }
            ++tried;
        }
    }
    return {};
}

}  // namespace detail

/// Tries a sink.
/// @param with_sink called once a check with a callable: makes a fresh sink that holds exactly
/// `parameters`, at version 0, calls `use(sink)`, and lets go of it.
/// @param parameters at least one; several layers, a scalar and an empty tensor find most.
template <class WithSink>
conformance_report check_weight_sink(WithSink&& with_sink, const manifest& parameters,
                                     const weight_sink_conformance_options& options = {}) {
    conformance_report report;
    const auto run = [&](const char* name, auto check) {
        report.run(name, [&] {
            std::string wrong = "the maker did not call use";
            with_sink([&]<class Sink>(Sink& sink) {
                static_assert(explain_weight_sink<Sink>());
                detail::sink_trial<Sink> trial{sink, parameters, options};
                wrong = check(trial);
                sink.rollback();
            });
            return wrong;
        });
    };
    if (!report.record("the suite has a parameter", parameters.size() != 0)) {
        return report;
    }
    run("destinations fit and do not overlap",
        [](auto& trial) { return detail::destinations_fit(trial); });
    run("a second begin is refused",
        [](auto& trial) { return detail::second_begin_is_refused(trial); });
    run("nothing is visible before commit",
        [](auto& trial) { return detail::nothing_is_visible_before_commit(trial); });
    run("everything is visible after commit",
        [](auto& trial) { return detail::everything_is_visible_after_commit(trial); });
    run("rollback restores, or the sink is dirty",
        [](auto& trial) { return detail::rollback_restores(trial); });
    if (options.knows_its_parameters) {
        run("coverage is strict", [](auto& trial) { return detail::coverage_is_strict(trial); });
        run("missing parameters are named",
            [](auto& trial) { return detail::missing_parameters_are_named(trial); });
    }
    bool has_snapshots = false;
    with_sink([&]<class Sink>(Sink&) { has_snapshots = HasSnapshots<Sink>; });
    if (has_snapshots) {
        run("held snapshots never change",
            [](auto& trial) { return detail::held_snapshots_never_change(trial); });
    }
    return report;
}

}  // namespace weightwire::testing
