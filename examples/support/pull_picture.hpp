#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/plan/traffic.hpp>

/// @file
/// Who pulls what from whom, as an SVG picture: trainer ranks on the left, workers on the right,
/// and between them a band for each pair, as wide as its bytes are many.

namespace models {

/// Draws traffic. With more than `most_ranks` on a side, nodes are drawn instead of ranks.
class pull_picture {
public:
    static constexpr std::size_t most_ranks = 40;

    pull_picture(const weightwire::plan::traffic& what, std::string title)
        : what_{what}, title_{std::move(title)} {
        const auto trainers = static_cast<std::size_t>(what.trainers);
        by_node_ = trainers > most_ranks || what.nodes.size() - trainers > most_ranks;
        for (std::size_t rank = 0; rank < what.nodes.size(); ++rank) {
            const bool worker = rank >= trainers;
            auto& side = sides_[worker ? 1 : 0];
            if (!by_node_ || side.empty() || side.back().node != what.nodes[rank]) {
                const auto stage = !worker && rank < what.turns.size() ? what.turns[rank] : 0;
                side.push_back({what.nodes[rank], worker ? rank - trainers : rank, 0, stage});
            }
            ++side.back().ranks;
            box_of_.push_back(side.size() - 1);
        }
        for (const auto& stream : what.streams) {
            const auto from = static_cast<std::size_t>(stream.from);
            const auto to = box_of_[static_cast<std::size_t>(stream.to)];
            auto& bands = from < trainers ? pulled_ : passed_on_;
            bands[{box_of_[from], to}] += stream.bytes();
            sides_[1][to].bytes += from < trainers ? stream.bytes() : 0;
            sides_[1][to].passed += from < trainers ? 0 : stream.bytes();
            if (from < trainers) {
                sides_[0][box_of_[from]].bytes += stream.bytes();
            }
        }
    }

    /// @throws weightwire::resource_error the file cannot be written.
    void write(const std::string& path) const {
        std::ofstream file{path};
        file << text();
        if (!file.flush()) {
            throw weightwire::resource_error{"the picture cannot be written to " + path};
        }
    }

    [[nodiscard]] std::string text() const {
        const auto rows = std::max(sides_[0].size(), sides_[1].size());
        const auto height = top + static_cast<double>(rows) * row + 40;
        std::string svg = fmt::format(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1:.0f}\" width=\"{0}\" "
            "height=\"{1:.0f}\" font-family=\"sans-serif\" font-size=\"11\">\n"
            "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
            "<text x=\"{2}\" y=\"24\" font-size=\"15\" text-anchor=\"middle\">{3}</text>\n",
            width, height, width / 2, title_);
        svg += fmt::format(
            "<text x=\"{}\" y=\"44\" text-anchor=\"middle\" fill=\"#555555\">bands: bytes that a "
            "worker {} pulls, colour by pipeline stage{}</text>\n",
            width / 2, by_node_ ? "node" : "rank",
            passed_on_.empty() ? "" : "; dashed: passed on inside a node");
        bands(svg);
        passed_on(svg);
        boxes(svg);
        return svg + "</svg>\n";
    }

private:
    static constexpr double width = 1200;
    static constexpr double top = 60;
    static constexpr double row = 34;
    static constexpr double box_height = 26;
    static constexpr double box_width = 280;
    static constexpr double left = 20;
    static constexpr double right = width - 110 - box_width;
    static constexpr std::array<std::string_view, 8> colours{
        "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5"};

    struct box {
        std::uint64_t node = 0;
        std::size_t first = 0;  // rank
        std::size_t ranks = 0;
        int stage = 0;
        std::uint64_t bytes = 0;
        std::uint64_t passed = 0;
    };
    using band_map = std::map<std::pair<std::size_t, std::size_t>, std::uint64_t>;

    [[nodiscard]] static std::string_view colour(int stage) {
        return colours[static_cast<std::size_t>(stage) % colours.size()];
    }
    [[nodiscard]] static double gigabytes(std::uint64_t bytes) {
        return static_cast<double>(bytes) / 1e9;
    }
    [[nodiscard]] double y_of(std::size_t side, std::size_t index) const {
        const auto rows = std::max(sides_[0].size(), sides_[1].size());
        const auto spread = static_cast<double>(rows) / static_cast<double>(sides_[side].size());
        return top + (static_cast<double>(index) + 0.5) * spread * row - box_height / 2;
    }

    void bands(std::string& svg) const {
        std::uint64_t most = 1;
        for (const auto& side : sides_) {
            for (const auto& one : side) {
                most = std::max(most, one.bytes);
            }
        }
        std::array<std::vector<double>, 2> used{std::vector(sides_[0].size(), 0.0),
                                                std::vector(sides_[1].size(), 0.0)};
        for (const auto& [pair, bytes] : pulled_) {
            const auto [from, to] = pair;
            const auto wide = box_height * static_cast<double>(bytes) / static_cast<double>(most);
            const auto begin = y_of(0, from) + used[0][from] + wide / 2;
            const auto end = y_of(1, to) + used[1][to] + wide / 2;
            used[0][from] += wide;
            used[1][to] += wide;
            const auto x = left + box_width;
            const auto middle = (x + right) / 2;
            fmt::format_to(std::back_inserter(svg),
                           "<path d=\"M{:.1f} {:.1f} C{:.1f} {:.1f} {:.1f} {:.1f} {:.1f} {:.1f}\" "
                           "fill=\"none\" stroke=\"{}\" stroke-opacity=\"0.45\" "
                           "stroke-width=\"{:.2f}\"><title>{} to {}: {:.2f} GB</title></path>\n",
                           x, begin, middle, begin, middle, end, right, end,
                           colour(sides_[0][from].stage), std::max(wide, 0.15), label(0, from),
                           label(1, to), gigabytes(bytes));
        }
    }
    void passed_on(std::string& svg) const {
        for (const auto& [pair, bytes] : passed_on_) {
            const auto [from, to] = pair;
            if (from == to) {
                continue;  // inside a box that is a node
            }
            const auto begin = y_of(1, from) + box_height / 2;
            const auto end = y_of(1, to) + box_height / 2;
            const auto x = right + box_width;
            const auto out = x + 15 + 0.3 * (begin < end ? end - begin : begin - end);
            fmt::format_to(std::back_inserter(svg),
                           "<path d=\"M{:.1f} {:.1f} C{:.1f} {:.1f} {:.1f} {:.1f} {:.1f} {:.1f}\" "
                           "fill=\"none\" stroke=\"#888888\" stroke-dasharray=\"3 3\" "
                           "stroke-width=\"0.7\"><title>{} to {}: {:.2f} GB</title></path>\n",
                           x, begin, out, begin, out, end, x, end, label(1, from), label(1, to),
                           gigabytes(bytes));
        }
    }
    [[nodiscard]] std::string label(std::size_t side, std::size_t index) const {
        const auto& one = sides_[side][index];
        const auto* const word = side == 0 ? "trainer" : "worker";
        return one.ranks == 1
                   ? fmt::format("{} {}", word, one.first)
                   : fmt::format("{}s {}-{}", word, one.first, one.first + one.ranks - 1);
    }
    void boxes(std::string& svg) const {
        for (std::size_t side = 0; side < 2; ++side) {
            for (std::size_t i = 0; i < sides_[side].size(); ++i) {
                const auto& one = sides_[side][i];
                const auto y = y_of(side, i);
                const auto x = side == 0 ? left : right;
                auto said = fmt::format("{} (node {}): {:.1f} GB {}", label(side, i), one.node,
                                        gigabytes(one.bytes), side == 0 ? "out" : "in");
                if (one.passed > 0) {
                    said += fmt::format(", {:.1f} from peers", gigabytes(one.passed));
                }
                fmt::format_to(
                    std::back_inserter(svg),
                    "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"{}\" rx=\"3\" "
                    "fill=\"#f4f4f4\" stroke=\"{}\"/>\n"
                    "<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
                    x, y, box_width, box_height,
                    side == 0 ? colour(one.stage) : std::string_view{"#444444"}, x + 6, y + 17,
                    said);
            }
        }
    }

    const weightwire::plan::traffic& what_;
    std::string title_;
    bool by_node_ = false;
    std::array<std::vector<box>, 2> sides_;
    std::vector<std::size_t> box_of_;  // of each rank, on its side
    band_map pulled_;
    band_map passed_on_;
};

}  // namespace models
