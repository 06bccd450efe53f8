#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/loaders.hpp>
#include <weightwire/plan/ownership.hpp>

/// @file
/// Layouts of ranks as people write them, `tp4,pp2,ep8`: where each rank stands, and what a
/// trainer's rank holds by the usual names of checkpoints.

namespace weightwire::plan {

/// How many ranks share what. A trainer's rank holds whole tensors (it gathers them from the ranks
/// of its tensor group); a worker's rank keeps slices.
struct parallel_layout {
    std::int64_t tensor = 1;    ///< `tp`
    std::int64_t pipeline = 1;  ///< `pp`
    std::int64_t expert = 1;    ///< `ep`
    std::int64_t data = 0;      ///< `dp`; 0 is not said
    friend bool operator==(const parallel_layout&, const parallel_layout&) = default;
};

/// Reads `tp4,pp2,ep8`: numbers after `tp`, `pp`, `ep` and `dp`, in any order, each at most once.
/// @throws usage_error what is not like that; names the part.
[[nodiscard]] inline parallel_layout parse_layout(std::string_view text) {
    parallel_layout made;
    std::array<bool, 4> seen{};
    const std::array<std::pair<std::string_view, std::int64_t*>, 4> words{
        {{"tp", &made.tensor}, {"pp", &made.pipeline}, {"ep", &made.expert}, {"dp", &made.data}}};
    for (std::size_t begin = 0; begin <= text.size();) {
        const auto end = std::min(text.find(',', begin), text.size());
        const auto part = text.substr(begin, end - begin);
        begin = end + 1;
        const auto word =
            std::ranges::find(words, part.substr(0, 2), [](auto& w) { return w.first; });
        std::int64_t number = 0;
        const auto digits = part.substr(std::min<std::size_t>(2, part.size()));
        const auto [stop, failed] =
            std::from_chars(digits.data(), digits.data() + digits.size(), number);
        if (word == words.end() || failed != std::errc{} || stop != digits.data() + digits.size() ||
            number < 1 || number > 1'000'000 ||
            std::exchange(seen[static_cast<std::size_t>(word - words.begin())], true)) {
            throw usage_error{"`" + std::string{part} +
                              "` is no part of a layout, or comes twice in `" + std::string{text} +
                              "`; write such as tp4,pp2,ep8"};
        }
        *word->second = number;
    }
    return made;
}

/// `tp4,pp2,ep8`; what is 1 or not said is left out.
[[nodiscard]] inline std::string to_string(const parallel_layout& value) {
    std::string text;
    const auto add = [&](std::string_view word, std::int64_t number) {
        if (number > 1) {
            text += (text.empty() ? "" : ",") + std::string{word} + std::to_string(number);
        }
    };
    add("tp", value.tensor);
    add("pp", value.pipeline);
    add("dp", value.data);
    add("ep", value.expert);
    return text.empty() ? "tp1" : text;
}

/// Ranks of one pipeline stage if nobody says how many there are: the fewest that fit.
[[nodiscard]] inline std::int64_t fewest_ranks(const parallel_layout& value) {
    const auto dense = value.tensor * std::max<std::int64_t>(value.data, 1);
    return value.pipeline * (value.data > 0 ? dense : std::lcm(dense, value.expert));
}

/// Where a trainer's rank stands. Stages are outermost; inside a stage neighbours are a tensor
/// group, and the experts are shared by all of a stage's ranks, neighbours having neighbouring
/// experts.
struct trainer_position {
    loaders::shard stage{};
    loaders::shard tensor{};
    loaders::shard expert{};
};

/// Where a worker's rank stands. Ranks of one replica are neighbours; of these stages are
/// outermost, then data parallel ranks, then the tensor group. The experts are shared by all of a
/// stage's ranks, and where these are more than `expert`, neighbours share each expert's inner
/// dimension.
struct worker_position {
    std::int64_t replica = 0;
    loaders::shard stage{};
    loaders::shard tensor{};
    loaders::shard expert{};
    loaders::shard expert_tensor{};
};

namespace detail {

[[noreturn]] inline void refuse_layout(const parallel_layout& value, std::int64_t ranks,
                                       const std::string& why) {
    throw usage_error{"the layout " + to_string(value) + " does not fit " + std::to_string(ranks) +
                      " ranks: " + why};
}

}  // namespace detail

/// @throws usage_error the layout does not fit `ranks`, or there is no such rank.
[[nodiscard]] inline trainer_position trainer_position_of(const parallel_layout& value,
                                                          std::int64_t rank, std::int64_t ranks) {
    const auto stage = ranks / value.pipeline;
    if (ranks < 1 || ranks % value.pipeline != 0 || stage % value.tensor != 0 ||
        stage % value.expert != 0 || (value.data > 0 && stage != value.tensor * value.data)) {
        detail::refuse_layout(
            value, ranks,
            "a trainer's stage has ranks / pp of them, which tp and ep divide, and "
            "which are tp * dp where dp is said");
    }
    if (rank < 0 || rank >= ranks) {
        detail::refuse_layout(value, ranks, "there is no rank " + std::to_string(rank));
    }
    const auto inside = rank % stage;
    return {.stage = {rank / stage, value.pipeline},
            .tensor = {inside % value.tensor, value.tensor},
            .expert = {inside % value.expert, value.expert}};
}

/// @throws usage_error the layout does not fit `ranks`, or there is no such rank.
[[nodiscard]] inline worker_position worker_position_of(const parallel_layout& value,
                                                        std::int64_t rank, std::int64_t ranks) {
    const auto stage = value.tensor * std::max<std::int64_t>(value.data, 1);
    const auto replica = stage * value.pipeline;
    if (ranks < 1 || ranks % replica != 0 || stage % value.expert != 0) {
        detail::refuse_layout(
            value, ranks, "a worker's replica has tp * dp * pp of them, and ep divides tp * dp");
    }
    if (rank < 0 || rank >= ranks) {
        detail::refuse_layout(value, ranks, "there is no rank " + std::to_string(rank));
    }
    const auto inside = rank % stage;
    const auto sharing = stage / value.expert;
    return {.replica = rank / replica,
            .stage = {rank % replica / stage, value.pipeline},
            .tensor = {inside % value.tensor, value.tensor},
            .expert = {inside / sharing, value.expert},
            .expert_tensor = {inside % sharing, sharing}};
}

/// What a name says of its place in a model: `model.layers.3.mlp.experts.17.up_proj.weight` is
/// expert 17 of layer 3. -1 is none.
struct named_place {
    std::int64_t layer = -1;
    std::int64_t expert = -1;
};

[[nodiscard]] inline named_place place_of(std::string_view name) noexcept {
    named_place made;
    std::string_view before;
    for (std::size_t begin = 0; begin <= name.size();) {
        const auto end = std::min(name.find('.', begin), name.size());
        const auto segment = name.substr(begin, end - begin);
        std::int64_t number = 0;
        const auto [stop, failed] =
            std::from_chars(segment.data(), segment.data() + segment.size(), number);
        if (failed == std::errc{} && stop == segment.data() + segment.size() && number >= 0) {
            auto& found = before == "experts" ? made.expert : made.layer;
            found = found < 0 && (before == "layers" || before == "experts") ? number : found;
        }
        before = segment;
        begin = end + 1;
    }
    return made;
}

/// What each trainer rank holds whole. Layers are shared by the stages, the first taking one more
/// where they must; what comes before the layers is the first stage's, what comes after them the
/// last one's. All ranks of a stage hold all of it but the experts, of which each holds its share.
/// @throws usage_error the layout does not fit `ranks`.
[[nodiscard]] inline std::vector<position_set> held_by_layout(const manifest& checkpoint,
                                                              const parallel_layout& value,
                                                              std::int64_t ranks) {
    std::vector<named_place> named;
    named.reserve(checkpoint.size());
    std::int64_t layers = 0;
    std::int64_t experts = 0;
    for (const auto& parameter : checkpoint.parameters()) {
        named.push_back(place_of(parameter.name));
        layers = std::max(layers, named.back().layer + 1);
        experts = std::max(experts, named.back().expert + 1);
    }
    constexpr auto rule = loaders::uneven::first_is_larger;
    std::vector<std::int64_t> stage_of_layer(static_cast<std::size_t>(layers), 0);
    for (std::int64_t stage = 0; stage < value.pipeline; ++stage) {
        const auto own = loaders::share_of(layers, {stage, value.pipeline}, rule);
        std::fill_n(stage_of_layer.begin() + own.begin, own.length, stage);
    }
    bool seen_layers = false;
    std::vector<std::int64_t> stages;
    stages.reserve(named.size());
    for (const auto& place : named) {
        seen_layers = seen_layers || place.layer >= 0;
        const auto outside = seen_layers ? value.pipeline - 1 : 0;
        stages.push_back(place.layer < 0 ? outside
                                         : stage_of_layer[static_cast<std::size_t>(place.layer)]);
    }
    std::vector<position_set> held;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const auto here = trainer_position_of(value, rank, ranks);
        const auto own = loaders::share_of(experts, here.expert, rule);
        std::vector<position_range> ranges;
        for (std::size_t i = 0; i < named.size(); ++i) {
            const auto expert = named[i].expert;
            if (stages[i] == here.stage.rank &&
                (expert < 0 || (expert >= own.begin && expert < own.begin + own.length))) {
                ranges.push_back({i, i + 1});
            }
        }
        held.emplace_back(std::move(ranges));
    }
    return held;
}

/// The node of every rank where `per_node` neighbours share one, from `first` on.
[[nodiscard]] inline std::vector<std::uint64_t> nodes_of(std::int64_t ranks, std::int64_t per_node,
                                                         std::uint64_t first = 0) {
    std::vector<std::uint64_t> nodes;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
        nodes.push_back(first + static_cast<std::uint64_t>(rank / per_node));
    }
    return nodes;
}

}  // namespace weightwire::plan
