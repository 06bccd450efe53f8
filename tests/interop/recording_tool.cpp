// SPDX-License-Identifier: Apache-2.0
// recording_tool FILE: a chain of view operations a line, `extents;operation;operation;…`, such
// as `4,3;transpose 0 1;chunk 2 0 1`. Lists are joined by commas, an empty one is `-`, and `none`
// leaves an argument out. The last number of chunk, split, splits and unbind picks a piece, counted
// from 0 and around.
//
// Prints a line each: the number of pieces of every operation that makes some, then
//   counts;shape;contiguous;elements;written   written: `same`, or why it cannot be written
//   counts;error NUMBER KIND TEXT              the operation that failed, counted from 0
// `elements` are those of the parameter that a copy from the view reads, in the view's order.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/recorder.hpp>
#include <weightwire/plan/recording_tensor.hpp>
#include <weightwire/plan/regions.hpp>

namespace {

using namespace weightwire;
using plan::recorder;
using plan::recording_tensor;
using numbers = std::vector<std::int64_t>;

numbers list_of(const std::string& text) {
    numbers out;
    std::istringstream words{text == "-" ? "" : text};
    for (std::string word; std::getline(words, word, ',');) {
        out.push_back(std::stoll(word));
    }
    return out;
}

template <class Range>
std::string joined(const Range& range) {
    std::string out;
    for (const auto number : range) {
        out.append(out.empty() ? "" : ",").append(std::to_string(number));
    }
    return out.empty() ? "-" : out;
}

/// One operation and its arguments.
struct operation {
    std::string name;
    std::vector<std::string> arguments;

    explicit operation(const std::string& text) {
        std::istringstream words{text};
        words >> name;
        for (std::string word; words >> word;) {
            arguments.push_back(word);
        }
    }
    [[nodiscard]] std::int64_t number(std::size_t i) const { return std::stoll(arguments.at(i)); }
    [[nodiscard]] std::optional<std::int64_t> perhaps(std::size_t i) const {
        return arguments.at(i) == "none" ? std::nullopt : std::optional{number(i)};
    }
    [[nodiscard]] numbers list(std::size_t i) const { return list_of(arguments.at(i)); }
};

/// No piece to go on with.
struct no_pieces {};

recording_tensor picked(const std::vector<recording_tensor>& pieces, std::int64_t which,
                        numbers& counts) {
    counts.push_back(static_cast<std::int64_t>(pieces.size()));
    if (pieces.empty()) {
        throw no_pieces{};
    }
    return pieces[static_cast<std::size_t>(which) % pieces.size()];
}

using step_function =
    std::function<recording_tensor(const recording_tensor&, const operation&, numbers&)>;

/// Every operation that returns one tensor, then those that return pieces.
const std::map<std::string, step_function>& operations() {
    using tensor = const recording_tensor&;
    using call = const operation&;
    static const std::map<std::string, step_function> table{
        {"narrow", [](tensor t, call op,
                      numbers&) { return t.narrow(op.number(0), op.number(1), op.number(2)); }},
        {"select",
         [](tensor t, call op, numbers&) { return t.select(op.number(0), op.number(1)); }},
        {"slice",
         [](tensor t, call op, numbers&) {
             return t.slice(op.number(0), op.perhaps(1), op.perhaps(2), op.number(3));
         }},
        {"index", [](tensor t, call op, numbers&) { return t[op.number(0)]; }},
        {"transpose",
         [](tensor t, call op, numbers&) { return t.transpose(op.number(0), op.number(1)); }},
        {"permute", [](tensor t, call op, numbers&) { return t.permute(op.list(0)); }},
        {"t", [](tensor t, call, numbers&) { return t.t(); }},
        {"view", [](tensor t, call op, numbers&) { return t.view(op.list(0)); }},
        {"reshape", [](tensor t, call op, numbers&) { return t.reshape(op.list(0)); }},
        {"flatten",
         [](tensor t, call op, numbers&) { return t.flatten(op.number(0), op.number(1)); }},
        {"unsqueeze", [](tensor t, call op, numbers&) { return t.unsqueeze(op.number(0)); }},
        {"squeeze",
         [](tensor t, call op, numbers&) {
             return op.arguments.empty() ? t.squeeze() : t.squeeze(op.number(0));
         }},
        {"expand", [](tensor t, call op, numbers&) { return t.expand(op.list(0)); }},
        {"contiguous", [](tensor t, call, numbers&) { return t.contiguous(); }},
        {"chunk",
         [](tensor t, call op, numbers& counts) {
             return picked(t.chunk(op.number(0), op.number(1)), op.number(2), counts);
         }},
        {"split",
         [](tensor t, call op, numbers& counts) {
             return picked(t.split(op.number(0), op.number(1)), op.number(2), counts);
         }},
        {"splits",
         [](tensor t, call op, numbers& counts) {
             return picked(t.split(op.list(0), op.number(1)), op.number(2), counts);
         }},
        {"unbind",
         [](tensor t, call op, numbers& counts) {
             return picked(t.unbind(op.number(0)), op.number(1), counts);
         }},
    };
    return table;
}

recording_tensor applied(recording_tensor t, const std::vector<operation>& chain, numbers& counts,
                         std::size_t& step) {
    for (step = 0; step < chain.size(); ++step) {
        t = operations().at(chain[step].name)(t, chain[step], counts);
    }
    return t;
}

enum class side { source, destination };

/// Elements of one side in the order of the other, which is contiguous.
numbers elements_of(const plan::region& value, side wanted, std::int64_t count) {
    numbers out(static_cast<std::size_t>(count), -1);
    plan::for_each_run(value, 1, [&](std::uint64_t from, std::uint64_t to, std::uint64_t length) {
        for (std::uint64_t i = 0; i < length; ++i) {
            const auto [place, element] =
                wanted == side::source ? std::pair{to + i, from + i} : std::pair{from + i, to + i};
            out.at(place) = static_cast<std::int64_t>(element);
        }
    });
    return out;
}

/// Elements that the one region of a recording has on a side; none where there is no region.
numbers elements_of(std::span<const plan::region> values, side wanted, std::int64_t count) {
    return values.empty() ? numbers{} : elements_of(values.front(), wanted, count);
}

/// What a copy from the view reads, and whether a copy to it writes the same.
std::string copied(const manifest& parameters, const std::vector<operation>& chain,
                   const shape& seen, std::size_t& step) {
    const manifest flat{{{"f", dtype::u8, seen}}};
    const auto count = static_cast<std::int64_t>(seen.checked_numel().value());
    numbers unused;
    recorder reading{parameters, flat};
    applied(reading.source("p"), chain, unused, step).copy_to(reading.destination("f"));
    const auto elements = elements_of(reading.finish().regions, side::source, count);
    try {
        recorder writing{flat, parameters};
        writing.source("f").copy_to(applied(writing.destination("p"), chain, unused, step));
        const auto places = elements_of(writing.recorded(), side::destination, count);
        return joined(elements) + ";" + (places == elements ? "same" : "other: " + joined(places));
    } catch (const usage_error& refused) {
        return joined(elements) + ";" + refused.what();
    }
}

std::string result_of(const std::string& line) {
    std::istringstream parts{line};
    std::string part;
    std::getline(parts, part, ';');
    const manifest parameters{{{"p", dtype::u8, shape{list_of(part)}}}};
    std::vector<operation> chain;
    while (std::getline(parts, part, ';')) {
        chain.emplace_back(part);
    }
    numbers counts;
    std::size_t step = 0;
    std::string out;
    try {
        recorder probe{parameters, parameters};
        const auto seen = applied(probe.source("p"), chain, counts, step);
        out = joined(seen.shape()) + ";" + (seen.is_contiguous() ? "1" : "0") + ";" +
              copied(parameters, chain, seen.shape(), step);
    } catch (const no_pieces&) {
        out = "none";
    } catch (const error& refused) {
        out = "error " + std::to_string(step) + " " + std::string{refused.kind()} + " " +
              refused.what();
    }
    return joined(counts) + ";" + out;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) {
        std::fprintf(stderr, "usage: recording_tool FILE\n");
        return 2;
    }
    std::ifstream chains{arguments[1]};
    for (std::string line; std::getline(chains, line);) {
        std::printf("%s\n", result_of(line).c_str());
    }
    return 0;
}
