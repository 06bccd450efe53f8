#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>

/// @file
/// Gather groups: which parameters are gathered, sent and installed together.
///
/// Two views of the same rule. `layerwise_groups` *assigns* every name to a group, as protocol page
/// 7.4 does, wherever in the list it stands. `group_runs` *cuts* the list by position, each time
/// the assignment changes: its pieces are what is gathered, since parameters come in metadata order
/// and a group that is left cannot be entered again. Where the order keeps every group together, as
/// a checkpoint's does, a run is a group; where it does not, a group is gathered in several runs
/// and `first_reopened` says where.

namespace weightwire::plan {

/// Every parameter's group.
struct group_assignment {
    std::vector<std::size_t> group_of;  ///< one a parameter, in manifest order
    std::size_t group_count = 0;        ///< groups are numbered from 0 without holes
};

namespace detail {

/// What a name says of its group: the text before its outermost all-digit segment, and that number
/// without leading zeros. Numbers are kept as text, so none overflows.
struct layer_key {
    std::string_view prefix;
    std::string_view index;
    bool indexed = false;
};

[[nodiscard]] constexpr bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

[[nodiscard]] inline layer_key layer_key_of(std::string_view name) noexcept {
    for (std::size_t begin = 0; begin <= name.size();) {
        const auto end = std::min(name.find('.', begin), name.size());
        const auto segment = name.substr(begin, end - begin);
        if (!segment.empty() && std::ranges::all_of(segment, is_digit)) {
            const auto significant = std::min(segment.find_first_not_of('0'), segment.size() - 1);
            return {name.substr(0, begin), segment.substr(significant), true};
        }
        begin = end + 1;
    }
    return {};
}

/// Order of numbers without leading zeros.
struct index_less {
    bool operator()(std::string_view a, std::string_view b) const noexcept {
        return a.size() != b.size() ? a.size() < b.size() : a < b;
    }
};

/// The indexed groups of a list, numbered once all of them are known.
class indexed_groups {
public:
    void add(const layer_key& key) {
        const auto [prefix, fresh] = prefixes_.emplace(key.prefix, numbers_.size());
        if (fresh) {
            numbers_.emplace_back();
        }
        numbers_[prefix->second].emplace(key.index, 0);
    }
    /// Numbers the groups from `next` on and returns the first number that is left.
    std::size_t number_from(std::size_t next) {
        for (auto& of_prefix : numbers_) {
            for (auto& [index, group] : of_prefix) {
                group = next++;
            }
        }
        return next;
    }
    [[nodiscard]] std::size_t group_of(const layer_key& key) const {
        return numbers_[prefixes_.at(key.prefix)].at(key.index);
    }

private:
    std::map<std::string_view, std::size_t> prefixes_;  // in `numbers_`: first appearance
    std::vector<std::map<std::string_view, std::size_t, index_less>> numbers_;
};

}  // namespace detail

/// The groups of protocol page 7.4. A name's group is given by its outermost dotted segment of
/// digits: `model.layers.7.mlp.up` belongs to (`model.layers.`, 7). Names without one that stand
/// before the first indexed name form the first group, those after it the last. Indexed groups are
/// ordered by first appearance of their prefix, then by number. Digits are ASCII.
[[nodiscard]] inline group_assignment layerwise_groups(const manifest& parameters) {
    std::vector<detail::layer_key> keys;
    keys.reserve(parameters.size());
    detail::indexed_groups indexed;
    for (const auto& parameter : parameters.parameters()) {
        keys.push_back(detail::layer_key_of(parameter.name));
        if (keys.back().indexed) {
            indexed.add(keys.back());
        }
    }
    const bool has_first = !keys.empty() && !keys.front().indexed;
    const auto last = indexed.number_from(has_first ? 1 : 0);
    group_assignment result{.group_of = {}, .group_count = last};
    result.group_of.reserve(keys.size());
    bool seen_indexed = false;
    for (const auto& key : keys) {
        seen_indexed = seen_indexed || key.indexed;
        const auto unindexed = seen_indexed ? last : 0;
        result.group_of.push_back(key.indexed ? indexed.group_of(key) : unindexed);
        result.group_count = std::max(result.group_count, result.group_of.back() + 1);
    }
    return result;
}

/// Sizes of the gather groups that `assignment` makes of the list cut by position: a new one begins
/// where the group changes. Their sum is the number of parameters, none is 0.
[[nodiscard]] inline std::vector<std::size_t> group_runs(const group_assignment& assignment) {
    std::vector<std::size_t> runs;
    const auto& groups = assignment.group_of;
    for (std::size_t i = 0; i < groups.size(); ++i) {
        if (i == 0 || groups[i] != groups[i - 1]) {
            runs.push_back(0);
        }
        ++runs.back();
    }
    return runs;
}

/// Position of the first parameter whose group was left before, or `manifest::npos` where the order
/// keeps every group together. `sharded_pull` needs the latter (protocol page 7.3).
[[nodiscard]] inline std::size_t first_reopened(const group_assignment& assignment) {
    std::vector<bool> left(assignment.group_count, false);
    const auto& groups = assignment.group_of;
    for (std::size_t i = 1; i < groups.size(); ++i) {
        if (groups[i] != groups[i - 1]) {
            left[groups[i - 1]] = true;
            if (left[groups[i]]) {
                return i;
            }
        }
    }
    return manifest::npos;
}

/// Sizes of the gather groups of `source`, whose metadata is `parameters`: what its `groups()` says
/// where it has one, else the list cut by position.
/// @throws data_error the sizes that the source gives do not add up to the parameters, or one is 0.
template <WeightSource Source>
[[nodiscard]] std::vector<std::size_t> group_sizes(Source& source, const manifest& parameters) {
    if constexpr (HasGroups<Source>) {
        std::vector<std::size_t> sizes;
        std::size_t left = parameters.size();
        for (const std::size_t size : source.groups()) {
            if (size == 0 || size > left) {
                throw data_error{"group " + std::to_string(sizes.size()) + " of the source has " +
                                     std::to_string(size) + " parameters, where 1 to " +
                                     std::to_string(left) + " are left of its metadata",
                                 {.phase = phase::plan}};
            }
            left -= size;
            sizes.push_back(size);
        }
        if (left != 0) {
            throw data_error{
                "the groups of the source end before this parameter, which its metadata names",
                {.phase = phase::plan, .tensor = parameters[parameters.size() - left].name}};
        }
        return sizes;
    } else {
        return group_runs(layerwise_groups(parameters));
    }
}

}  // namespace weightwire::plan
