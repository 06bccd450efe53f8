#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/word_hash.hpp>

/// @file
/// Which ranks of a trainer hold which parameters.

namespace weightwire::plan {

/// Positions `[begin, end)` of a manifest.
struct position_range {
    std::size_t begin = 0;
    std::size_t end = 0;
    friend constexpr bool operator==(const position_range&, const position_range&) = default;
};

/// Positions of a manifest, as ascending ranges with gaps between them.
class position_set {
public:
    position_set() = default;
    /// @param ranges in any order; they may touch or overlap, and empty ones are left out.
    explicit position_set(std::vector<position_range> ranges) {
        std::erase_if(ranges, [](const position_range& r) { return r.begin >= r.end; });
        std::ranges::sort(ranges, {}, &position_range::begin);
        for (const auto& range : ranges) {
            if (!ranges_.empty() && range.begin <= ranges_.back().end) {
                ranges_.back().end = std::max(ranges_.back().end, range.end);
            } else {
                ranges_.push_back(range);
            }
        }
    }
    /// Every position of a list of `count`.
    [[nodiscard]] static position_set all(std::size_t count) {
        return position_set{{position_range{0, count}}};
    }

    [[nodiscard]] std::span<const position_range> ranges() const& noexcept { return ranges_; }
    std::span<const position_range> ranges() const&& = delete;
    [[nodiscard]] bool empty() const noexcept { return ranges_.empty(); }
    [[nodiscard]] std::size_t count() const noexcept {
        std::size_t sum = 0;
        for (const auto& range : ranges_) {
            sum += range.end - range.begin;
        }
        return sum;
    }
    /// One past the last position; 0 where there is none.
    [[nodiscard]] std::size_t end() const noexcept {
        return ranges_.empty() ? 0 : ranges_.back().end;
    }
    [[nodiscard]] bool contains(std::size_t position) const noexcept {
        const auto after = std::ranges::upper_bound(ranges_, position, {}, &position_range::begin);
        return after != ranges_.begin() && position < std::prev(after)->end;
    }
    friend bool operator==(const position_set&, const position_set&) = default;

private:
    std::vector<position_range> ranges_;
};

/// Positions of the parameters of these names, in any order: what `held_names()` of a source says.
/// @throws data_error the list has no parameter of a name; names it.
template <std::ranges::input_range Names>
    requires std::convertible_to<std::ranges::range_reference_t<Names>, std::string_view>
[[nodiscard]] position_set held_positions(const manifest& parameters, Names&& names) {
    std::vector<position_range> ranges;
    for (auto&& name : names) {
        const std::string_view text{name};
        const auto position = parameters.find(text);
        if (position == manifest::npos) {
            throw data_error{"this rank says that it holds a parameter that is not in its metadata",
                             {.phase = phase::plan, .tensor = std::string{text}}};
        }
        if (!ranges.empty() && ranges.back().end == position) {
            ++ranges.back().end;
        } else {
            ranges.push_back({position, position + 1});
        }
    }
    return position_set{std::move(ranges)};
}

/// Ranges as ranks exchange them: `0-35,72,100-119`, both ends inclusive; nothing for none.
[[nodiscard]] inline std::string to_text(const position_set& positions) {
    std::string out;
    for (const auto& [begin, end] : positions.ranges()) {
        out += (out.empty() ? "" : ",") + std::to_string(begin);
        if (end - begin > 1) {
            out += "-" + std::to_string(end - 1);
        }
    }
    return out;
}

/// The inverse of `to_text`. @param parameters of the manifest: each position is below it.
/// @throws protocol_error another spelling than that of `to_text`, or a position outside.
[[nodiscard]] inline position_set position_set_from_text(std::string_view text,
                                                         std::size_t parameters) {
    const auto refuse = [&] {
        throw protocol_error{
            "the positions that a trainer rank holds are no ascending ranges "
            "below " +
                std::to_string(parameters) + ": `" + std::string{text.substr(0, 80)} + "`",
            {.phase = phase::plan}};
    };
    std::vector<position_range> ranges;
    const auto* at = text.data();
    const auto* const end = text.data() + text.size();
    const auto number = [&](std::size_t least) {
        std::size_t value = 0;
        const auto [next, status] = std::from_chars(at, end, value);
        if (status != std::errc{} || value < least || value >= parameters ||
            (*at == '0' && next - at > 1)) {
            refuse();
        }
        at = next;
        return value;
    };
    while (at != end) {
        if (!ranges.empty()) {
            if (*at != ',') {
                refuse();
            }
            ++at;
        }
        const auto first = number(ranges.empty() ? 0 : ranges.back().end + 1);
        auto last = first;
        if (at != end && *at == '-') {
            ++at;
            last = number(first + 1);
        }
        ranges.push_back({first, last + 1});
    }
    return position_set{std::move(ranges)};
}

/// Parameters that the same ranks hold. Routing treats them alike.
struct holder_class {
    std::vector<int> holders{};  ///< trainer ranks, ascending; never empty
    std::uint64_t bytes = 0;
    std::size_t parameters = 0;
};

/// Which ranks of a trainer hold which parameters of a manifest; every parameter has a holder.
class ownership {
public:
    /// @param held_by_rank what each trainer rank holds, by rank.
    /// @throws usage_error no ranks. @throws mismatch_error positions beyond the manifest.
    /// @throws coverage_error a parameter that nobody holds; names the first.
    ownership(const manifest& parameters, std::vector<position_set> held_by_rank)
        : held_{std::move(held_by_rank)} {
        if (held_.empty()) {
            throw usage_error{"ownership needs at least one trainer rank", {.phase = phase::plan}};
        }
        for (std::size_t rank = 0; rank < held_.size(); ++rank) {
            if (held_[rank].end() > parameters.size()) {
                throw mismatch_error{"this trainer rank says that it holds position " +
                                         std::to_string(held_[rank].end() - 1) + " of a list of " +
                                         std::to_string(parameters.size()) +
                                         " parameters; all ranks need one list",
                                     {.phase = phase::plan, .rank = static_cast<int>(rank)}};
            }
        }
        classify(parameters);
    }

    /// Number of trainer ranks.
    [[nodiscard]] int ranks() const noexcept { return static_cast<int>(held_.size()); }
    [[nodiscard]] std::size_t parameters() const noexcept { return class_of_.size(); }
    [[nodiscard]] const position_set& held(int rank) const {
        return held_.at(static_cast<std::size_t>(rank));
    }
    /// In the order of their first parameters.
    [[nodiscard]] std::span<const holder_class> classes() const& noexcept { return classes_; }
    std::span<const holder_class> classes() const&& = delete;
    /// Index of the class of a parameter.
    [[nodiscard]] std::size_t class_of(std::size_t position) const {
        return class_of_.at(position);
    }
    /// Ranks that hold a parameter, ascending.
    [[nodiscard]] std::span<const int> holders(std::size_t position) const& {
        return classes_[class_of(position)].holders;
    }
    std::span<const int> holders(std::size_t position) const&& = delete;
    /// A 64-bit hash of all that it says; trainer ranks compare it before they serve.
    [[nodiscard]] std::uint64_t digest() const noexcept {
        detail::word_hash hash{class_of_.size()};
        hash.add(held_.size());
        for (const auto& positions : held_) {
            hash.add(positions.ranges().size());
            for (const auto& [begin, end] : positions.ranges()) {
                hash.add(begin).add(end);
            }
        }
        return hash.value();
    }

private:
    void classify(const manifest& parameters);

    std::vector<position_set> held_;
    std::vector<holder_class> classes_;
    std::vector<std::size_t> class_of_;
};

inline void ownership::classify(const manifest& parameters) {
    // Between two neighbouring ends of ranges the holders are the same.
    struct change {
        std::size_t position;
        int rank;
        bool begins;
    };
    std::vector<change> changes;
    for (std::size_t rank = 0; rank < held_.size(); ++rank) {
        for (const auto& [begin, end] : held_[rank].ranges()) {
            changes.push_back({begin, static_cast<int>(rank), true});
            changes.push_back({end, static_cast<int>(rank), false});
        }
    }
    std::ranges::sort(changes, {}, &change::position);
    std::map<std::vector<int>, std::size_t> known;
    std::vector<int> holders;
    auto next = changes.begin();
    class_of_.reserve(parameters.size());
    while (class_of_.size() < parameters.size()) {
        for (; next != changes.end() && next->position == class_of_.size(); ++next) {
            const auto at = std::ranges::lower_bound(holders, next->rank);
            if (next->begins) {
                holders.insert(at, next->rank);
            } else {
                holders.erase(at);
            }
        }
        if (holders.empty()) {
            throw coverage_error{
                "no trainer rank holds this parameter; one has to name it in its "
                "held_names()",
                {.phase = phase::plan, .tensor = parameters[class_of_.size()].name}};
        }
        const auto [found, fresh] = known.emplace(holders, classes_.size());
        if (fresh) {
            classes_.push_back({.holders = holders});
        }
        auto& made = classes_[found->second];
        const auto end = next == changes.end() ? parameters.size() : next->position;
        for (; class_of_.size() < end; class_of_.push_back(found->second)) {
            made.bytes += parameters[class_of_.size()].byte_size();
            ++made.parameters;
        }
    }
}

}  // namespace weightwire::plan
