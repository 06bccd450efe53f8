#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/plan/groups.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

/// @file
/// The steps that the checks of a `WeightSink` share.

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
        exchange(soon(), {});
        sink_.commit(version);
    }

    /// Where the sink has it.
    void exchange([[maybe_unused]] deadline until, [[maybe_unused]] const std::stop_token& stop) {
        if constexpr (HasExchange<Sink>) {
            sink_.exchange(until, stop);
        }
    }
    /// Begins a session, writes it whole and prepares it.
    void begin_and_prepare(weight_version version) {
        const auto destinations = begin(version);
        remember(destinations);
        write(destinations, version);
        sink_.prepare(soon());
    }

    /// The same where no reader is in its way; else the sink is left as it was.
    void update_if_possible(weight_version version) {
        try {
            const auto until = deadline::after(options_.short_wait);
            write(begin(version, parameters_, until), version);
            sink_.prepare(until);
            exchange(soon(), {});
            sink_.commit(version);
        } catch (const timeout_error&) {
            sink_.rollback();
        }
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

}  // namespace detail

}  // namespace weightwire::testing
