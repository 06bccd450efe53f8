#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sinks/user_memory.hpp>
#include <weightwire/testing/conformance/report.hpp>
#include <weightwire/testing/conformance/weight_sink_optional.hpp>
#include <weightwire/testing/conformance/weight_sink_trial.hpp>

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

namespace detail {

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
    detail::check_optional_members(with_sink, run);
    return report;
}

}  // namespace weightwire::testing
