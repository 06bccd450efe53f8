#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/plan/groups.hpp>
#include <weightwire/testing/conformance/report.hpp>

/// @file
/// What a `WeightSource` promises and the compiler cannot check. Run it on your own source:
///
///     const auto report = weightwire::testing::check_weight_source(my_source);
///     REQUIRE_MESSAGE(report.passed(), report.text());

namespace weightwire::testing {

/// How a source is checked.
struct weight_source_options {
    std::size_t rounds = 2;     ///< rounds to walk, at least 2: freshness shows in the second
    bool may_be_empty = false;  ///< a source without parameters is a mistake unless this says not
    bool reads_memory = true;   ///< read every contiguous byte in host memory, more than once
};

namespace detail {

/// One tensor as a round yielded it.
struct seen_tensor {
    std::size_t position = 0;  ///< in the metadata
    named_tensor tensor{};
    std::uint64_t digest = 0;  ///< of its bytes when it was yielded, where they can be read
};

/// The names that a source yields, by metadata position: all, or the held ones.
template <class Source>
[[nodiscard]] std::vector<std::size_t> expected_positions(Source& source, const manifest& all) {
    std::vector<std::size_t> positions;
    if constexpr (HasHeldNames<Source>) {
        std::set<std::size_t> held;
        for (const std::string_view name : source.held_names()) {
            held.insert(all.find(name));
        }
        held.erase(manifest::npos);
        positions.assign(held.begin(), held.end());
    } else {
        for (std::size_t i = 0; i < all.size(); ++i) {
            positions.push_back(i);
        }
    }
    return positions;
}

[[nodiscard]] inline bool is_readable(const tensor_view& tensor) noexcept {
    return tensor.device().kind == memory_kind::host && tensor.is_contiguous();
}

/// What is wrong with `tensor` where the metadata names `expected`, or an empty string.
[[nodiscard]] inline std::string difference(const param_meta& expected,
                                            const named_tensor& tensor) {
    if (tensor.name != expected.name || tensor.tensor.type() != expected.dtype ||
        tensor.tensor.extents() != expected.shape) {
        return std::string{tensor.name} + " " + std::string{to_string(tensor.tensor.type())} +
               to_string(tensor.tensor.extents()) + " was yielded where the metadata names " +
               expected.name + " " + std::string{to_string(expected.dtype)} +
               to_string(expected.shape);
    }
    if (tensor.tensor.data() == nullptr && tensor.tensor.byte_size() != 0) {
        return expected.name + " has bytes and no address";
    }
    return {};
}

/// The checks of one source. A class, so that each check is a short function.
template <WeightSource Source>
class weight_source_checks {
public:
    weight_source_checks(Source& source, const weight_source_options& options)
        : source_{source}, options_{options} {}

    [[nodiscard]] conformance_report run() {
        if (!report_.run("metadata: names are distinct and sizes fit", [&] { return read(); })) {
            return std::move(report_);
        }
        report_.run("metadata: names a parameter", [&] {
            return options_.may_be_empty || all_.size() != 0
                       ? ""
                       : "there is none; set may_be_empty where that is meant";
        });
        report_.run("metadata: is the same when it is asked again", [&] { return read_again(); });
        report_.run("groups: sizes are positive and add up", [&] {
            group_sizes_ = plan::group_sizes(source_, all_);
            return std::string{};
        });
        if constexpr (HasHeldNames<Source>) {
            report_.run("held_names: are distinct and named by the metadata",
                        [&] { return check_held(); });
        }
        walk_rounds();
        if constexpr (HasGroupWeights<Source>) {
            report_.run("weights(group): each group alone agrees with the metadata",
                        [&] { return check_group_weights(); });
        }
        return std::move(report_);
    }

private:
    using round_type = std::vector<seen_tensor>;

    std::string read() {
        std::vector<param_meta> parameters;
        for (auto&& each : source_.metadata()) {
            parameters.push_back(each);
        }
        all_ = manifest{std::move(parameters)};
        return {};
    }

    std::string read_again() {
        std::size_t i = 0;
        for (auto&& each : source_.metadata()) {
            const param_meta again = each;
            if (i == all_.size() || again != all_[i]) {
                return "position " + std::to_string(i) + " differs the second time: " + again.name;
            }
            ++i;
        }
        return i == all_.size() ? "" : "the second time it ends after " + std::to_string(i);
    }

    std::string check_held()
        requires HasHeldNames<Source>
    {
        std::set<std::string> seen;
        for (const std::string_view name : source_.held_names()) {
            if (all_.find(name) == manifest::npos) {
                return std::string{name} + " is held, and the metadata does not name it";
            }
            if (!seen.emplace(name).second) {
                return std::string{name} + " is held twice";
            }
        }
        return {};
    }

    void walk_rounds() {
        const auto positions = expected_positions(source_, all_);
        std::vector<round_type> rounds;
        for (std::size_t i = 0; i < std::max<std::size_t>(options_.rounds, 2); ++i) {
            const auto name = "weights: round " + std::to_string(i + 1);
            rounds.emplace_back();
            const bool agrees = report_.run(name + " agrees with the metadata", [&] {
                return walk(source_.weights(), positions, rounds.back());
            });
            if (!agrees) {
                return;
            }
            report_.run(name + ": names live on", [&] { return check_names(rounds.back()); });
            if constexpr (lifetime_of<Source>() == tensor_lifetime::stable) {
                report_.run(name + ": tensors stay unchanged to its end",
                            [&] { return check_unchanged(rounds.back(), 0); });
            }
        }
        if constexpr (lifetime_of<Source>() == tensor_lifetime::stable) {
            report_.run("weights: addresses are the same every round",
                        [&] { return check_addresses(rounds); });
        }
    }

    /// Walks a range of the tensors at `positions`; what is wrong first, or an empty string.
    template <class Range>
    std::string walk(Range&& range, const std::vector<std::size_t>& positions, round_type& seen) {
        std::string wrong;
        for (auto&& each : range) {  // always to the end, as an engine does
            const named_tensor tensor = each;
            if (!wrong.empty()) {
                continue;
            }
            if (seen.size() == positions.size()) {
                wrong = std::string{tensor.name} + " is yielded after the last parameter";
                continue;
            }
            const auto position = positions[seen.size()];
            wrong = difference(all_[position], tensor);
            if (wrong.empty()) {
                if constexpr (lifetime_of<Source>() == tensor_lifetime::until_group_end) {
                    wrong = check_unchanged(seen, group_begin(position, seen));
                }
                seen.push_back({position, tensor, digest_of(tensor)});
            }
        }
        if (wrong.empty() && seen.size() != positions.size()) {
            wrong = "the range ended before " + all_[positions[seen.size()]].name + ", after " +
                    std::to_string(seen.size()) + " of " + std::to_string(positions.size());
        }
        return wrong;
    }

    /// The first of `seen` in the same gather group as `position`; all before are gone by right.
    [[nodiscard]] std::size_t group_begin(std::size_t position, const round_type& seen) const {
        std::size_t begin = 0;
        for (const auto size : group_sizes_) {
            if (position < begin + size) {
                break;
            }
            begin += size;
        }
        std::size_t first = 0;
        while (first < seen.size() && seen[first].position < begin) {
            ++first;
        }
        return first;
    }

    [[nodiscard]] std::uint64_t digest_of(const named_tensor& tensor) const {
        return options_.reads_memory && is_readable(tensor.tensor)
                   ? weightwire::digest(tensor.tensor.bytes())
                   : 0;
    }

    [[nodiscard]] std::string check_unchanged(const round_type& round, std::size_t first) const {
        for (std::size_t i = first; i < round.size(); ++i) {
            if (digest_of(round[i].tensor) != round[i].digest) {
                return all_[round[i].position].name +
                       " changed while the source grants that it does not";
            }
        }
        return {};
    }

    [[nodiscard]] std::string check_names(const round_type& round) const {
        for (const auto& each : round) {
            if (each.tensor.name != all_[each.position].name) {
                return "the view of the name of " + all_[each.position].name +
                       " reads otherwise once the range has gone on";
            }
        }
        return {};
    }

    [[nodiscard]] std::string check_addresses(const std::vector<round_type>& rounds) const {
        for (std::size_t round = 1; round < rounds.size(); ++round) {
            for (std::size_t i = 0; i < rounds[round].size(); ++i) {
                const auto& now = rounds[round][i].tensor.tensor;
                const auto& before = rounds[0][i].tensor.tensor;
                if (now.data() != before.data() || now.strides() != before.strides() ||
                    now.device() != before.device()) {
                    return all_[rounds[round][i].position].name + " moved in round " +
                           std::to_string(round + 1);
                }
            }
        }
        return {};
    }

    std::string check_group_weights()
        requires HasGroupWeights<Source>
    {
        const auto held = expected_positions(source_, all_);
        std::size_t begin = 0;
        for (std::size_t group = 0; group < group_sizes_.size(); ++group) {
            std::vector<std::size_t> positions;
            for (const auto position : held) {
                if (position >= begin && position - begin < group_sizes_[group]) {
                    positions.push_back(position);
                }
            }
            round_type seen;
            auto wrong = walk(source_.weights(group), positions, seen);
            if (!wrong.empty()) {
                return "group " + std::to_string(group) + ": " + wrong;
            }
            begin += group_sizes_[group];
        }
        return {};
    }

    Source& source_;
    weight_source_options options_;
    conformance_report report_{};
    manifest all_{};
    std::vector<std::size_t> group_sizes_{};
};

}  // namespace detail

/// Walks `source` for a few rounds and reports every promise of the `WeightSource` concept, kept or
/// broken. Calls what an engine would call, in that order, from this thread; where materializing is
/// a collective, call it on every rank. Never throws because of the source.
template <WeightSource Source>
[[nodiscard]] conformance_report check_weight_source(Source& source,
                                                     const weight_source_options& options = {}) {
    return detail::weight_source_checks<Source>{source, options}.run();
}

}  // namespace weightwire::testing
