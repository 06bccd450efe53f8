// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/adapters/range_v3.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/sources/callback_source.hpp>
#include <weightwire/sources/span_source.hpp>
#include <weightwire/testing/conformance/weight_source.hpp>

namespace {

using namespace weightwire;

std::string strip(std::string_view name) {
    return std::string{name.starts_with("model.") ? name.substr(6) : name};
}
bool by_name(const param_meta& a, const param_meta& b) { return a.name < b.name; }
bool is_weight(std::string_view name) { return name.ends_with("weight"); }

/// Four tensors with bytes of their own, in memory and made one at a time.
struct adapted {
    std::array<std::byte, 64> memory{};
    std::vector<std::size_t> made{};
    std::vector<named_tensor> tensors{
        {"model.embed.weight", {memory.data(), dtype::u8, {4}}},
        {"model.layers.0.weight", {memory.data() + 4, dtype::f32, {2}}},
        {"model.layers.0.bias", {memory.data() + 12, dtype::f32, {1}}},
        {"model.layers.1.weight", {memory.data() + 16, dtype::bf16, {2, 2}}}};
    span_source memory_source{tensors};

    adapted() {
        for (std::size_t i = 0; i < memory.size(); ++i) {
            memory[i] = static_cast<std::byte>(i);
        }
    }
    auto made_source() {
        const auto list = memory_source.metadata();
        return callback_source{std::vector<param_meta>(list.begin(), list.end()),
                               [this](std::size_t i) {
                                   made.push_back(i);
                                   return tensors[i].tensor;
                               }};
    }
};

/// The names and addresses that a source yields, in one line.
template <class Source>
std::string names(Source& source) {
    std::string out;
    for (const named_tensor& tensor : source.weights()) {
        out.append(out.empty() ? "" : " ").append(tensor.name);
    }
    return out;
}

template <class Source>
std::vector<param_meta> metadata_of_all(Source& source) {
    const auto list = source.metadata();
    return {list.begin(), list.end()};
}

template <class Source>
void check_conforms(Source& source) {
    const auto report = testing::check_weight_source(source);
    CHECK_MESSAGE(report.passed(), report.text());
}

TEST_CASE_FIXTURE(adapted, "rename: gives other names to the same tensors") {
    auto renamed = memory_source | rename(strip);
    CHECK(names(renamed) == "embed.weight layers.0.weight layers.0.bias layers.1.weight");
    std::size_t i = 0;
    for (const named_tensor& tensor : renamed.weights()) {
        CHECK(tensor.tensor.data() == tensors[i].tensor.data());
        CHECK(renamed.metadata()[i].dtype == tensors[i].tensor.type());
        CHECK(renamed.metadata()[i].shape == tensors[i].tensor.extents());
        ++i;
    }
    CHECK(i == 4);
    check_conforms(renamed);
}

/// A source of addresses that nobody may touch: it reads.
struct read_only {
    static constexpr tensor_lifetime lifetime = tensor_lifetime::stable;
    span_source& inner;
    std::string read_names{};

    auto metadata() const { return inner.metadata(); }
    auto weights() { return inner.weights(); }
    void read(const named_tensor& tensor, std::uint64_t offset, std::span<std::byte> to) {
        read_names.append(read_names.empty() ? "" : " ").append(tensor.name);
        std::ranges::fill(to, static_cast<std::byte>(offset));
    }
};

TEST_CASE_FIXTURE(adapted, "adaptors: a source that reads its tensors itself still does") {
    read_only source{memory_source};
    auto renamed = source | only(is_weight) | in_order(by_name) | rename(strip);
    const manifest expected{metadata_of_all(renamed)};
    round_of round{renamed, expected};
    auto stream = round.stream();
    while (stream.next() != nullptr) {
        std::byte byte{};
        CHECK(stream.read(7, {&byte, 1}));
        CHECK(byte == std::byte{7});
    }
    CHECK(source.read_names == "embed.weight layers.0.weight layers.1.weight");
    auto in_memory = memory_source | rename(strip);
    const manifest same{metadata_of_all(in_memory)};
    round_of other{in_memory, same};
    auto plain = other.stream();
    static_cast<void>(plain.next());
    CHECK_FALSE(plain.read(0, {}));
}

TEST_CASE_FIXTURE(adapted,
                  "only: keeps what the predicate says, by name or by metadata, in its order") {
    auto weights = memory_source | only(is_weight);
    CHECK(names(weights) == "model.embed.weight model.layers.0.weight model.layers.1.weight");
    check_conforms(weights);
    auto floats =
        memory_source | only([](const param_meta& each) { return each.dtype == dtype::f32; });
    CHECK(names(floats) == "model.layers.0.weight model.layers.0.bias");
    check_conforms(floats);
    auto nothing = memory_source | only([](std::string_view) { return false; });
    CHECK(nothing.metadata().empty());
    CHECK(names(nothing).empty());
    CHECK(nothing.groups().empty());
}

TEST_CASE_FIXTURE(adapted, "in_order: sorts, and what compares equal keeps its order") {
    auto sorted = memory_source | in_order(by_name);
    CHECK(names(sorted) ==
          "model.embed.weight model.layers.0.bias model.layers.0.weight model.layers.1.weight");
    check_conforms(sorted);
    auto kept =
        memory_source | in_order([](const param_meta&, const param_meta&) { return false; });
    CHECK(names(kept) == names(memory_source));
    auto reversed = memory_source | in_order([](const param_meta& a, const param_meta& b) {
                        return b.name < a.name;
                    });
    CHECK(names(reversed).starts_with("model.layers.1.weight model.layers.0.weight"));
}

TEST_CASE_FIXTURE(adapted, "adaptors compose, one after the other or chained first") {
    auto one = memory_source | rename(strip) | only(is_weight) | in_order(by_name);
    const auto chain = rename(strip) | only(is_weight) | in_order(by_name);
    auto other = memory_source | chain;
    CHECK(names(one) == "embed.weight layers.0.weight layers.1.weight");
    CHECK(names(other) == names(one));
    check_conforms(one);
    check_conforms(other);
    const manifest parameters{{one.metadata().begin(), one.metadata().end()}};
    round_of round{one, parameters};
    auto stream = round.stream();
    for (std::size_t i = 0; i < 3; ++i) {
        REQUIRE(stream.next() != nullptr);
    }
    CHECK(stream.next() == nullptr);
    CHECK(stream.lifetime() == tensor_lifetime::stable);
}

TEST_CASE_FIXTURE(adapted, "adaptors reference an lvalue and own an rvalue") {
    auto referencing = memory_source | rename(strip);
    memory_source = span_source{std::vector{tensors[0]}};
    CHECK(names(referencing) == "embed.weight");
    auto owning = span_source{tensors} | rename(strip);
    auto moved = std::move(owning);
    CHECK(names(moved) == "embed.weight layers.0.weight layers.0.bias layers.1.weight");
    const auto* name = moved.metadata()[0].name.data();
    auto again = std::move(moved);
    CHECK(again.metadata()[0].name.data() == name);
    CHECK((*again.weights().begin()).name.data() == name);
}

TEST_CASE_FIXTURE(
    adapted, "only: asks for every tensor of the inner source, also those left out, each once") {
    auto source =
        made_source() | only([](std::string_view name) { return name.ends_with("bias"); });
    static_assert(lifetime_of<decltype(source)>() == tensor_lifetime::until_next);
    CHECK(names(source) == "model.layers.0.bias");
    CHECK(made == std::vector<std::size_t>{0, 1, 2, 3});
    check_conforms(source);
}

TEST_CASE_FIXTURE(adapted, "rename: two parameters under one name are refused, and both named") {
    try {
        (void)(memory_source | rename([](std::string_view) { return std::string{"same"}; }));
        FAIL("two have one name");
    } catch (const data_error& problem) {
        CHECK(problem.context().tensor == "same");
        CHECK(problem.text() ==
              "rename gives this name to both model.embed.weight and model.layers.0.weight");
    }
}

/// Declares one list and yields another.
struct divergent_source {
    std::vector<param_meta> declared;
    std::vector<named_tensor> yielded;
    static constexpr auto lifetime = tensor_lifetime::stable;
    [[nodiscard]] std::span<const param_meta> metadata() const { return declared; }
    [[nodiscard]] std::span<const named_tensor> weights() const { return yielded; }
};

TEST_CASE_FIXTURE(adapted,
                  "adaptors: an inner source that differs from its metadata is refused, also where "
                  "a new name would hide it") {
    const auto list = memory_source.metadata();
    divergent_source source{{list.begin(), list.end()}, tensors};
    std::swap(source.yielded[1], source.yielded[2]);
    auto renamed = source | rename(strip);
    CHECK_THROWS_AS((void)names(renamed), data_error);
    auto left_out = source | only([](std::string_view name) { return name.ends_with("1.weight"); });
    CHECK_THROWS_AS((void)names(left_out), data_error);
    auto sorted = source | in_order(by_name);
    CHECK_THROWS_AS((void)names(sorted), data_error);
    source.yielded = tensors;
    source.yielded.push_back(tensors[0]);
    CHECK_THROWS_AS((void)names(renamed), data_error);
    CHECK_THROWS_AS((void)names(sorted), data_error);
    source.yielded.resize(3);
    CHECK(names(renamed) == "embed.weight layers.0.weight layers.0.bias");  // the reader counts
    try {
        (void)sorted.weights();
        FAIL("a tensor is missing");
    } catch (const data_error& problem) {
        CHECK(problem.context().tensor == "model.layers.1.weight");
    }
    source.yielded = tensors;
    CHECK(names(sorted).ends_with("model.layers.1.weight"));
}

TEST_CASE_FIXTURE(adapted,
                  "adaptors: gather groups stay the inner source's, without what is left out") {
    // Without digits the new names would make one group.
    auto renamed = memory_source | rename([](std::string_view name) {
                       std::string out{name};
                       std::ranges::replace(out, '0', 'a');
                       std::ranges::replace(out, '1', 'b');
                       return out;
                   });
    CHECK(std::vector(renamed.groups().begin(), renamed.groups().end()) ==
          std::vector<std::size_t>{1, 2, 1});
    auto kept =
        memory_source | only([](std::string_view name) { return name.find("0") != name.npos; });
    CHECK(std::vector(kept.groups().begin(), kept.groups().end()) == std::vector<std::size_t>{2});
    static_assert(!HasGroups<decltype(memory_source | in_order(by_name))>);
}

/// Holds but some of the parameters, and has groups of its own.
struct holding_source : divergent_source {
    std::vector<std::string> held;
    std::vector<std::size_t> sizes;
    [[nodiscard]] std::vector<std::string_view> held_names() const {
        return {held.begin(), held.end()};
    }
    [[nodiscard]] std::span<const std::size_t> groups() const { return sizes; }
};

TEST_CASE_FIXTURE(adapted, "adaptors: a source that holds but some of the parameters stays one") {
    const auto list = memory_source.metadata();
    holding_source source{{{list.begin(), list.end()}, {tensors[0], tensors[2]}},
                          {"model.embed.weight", "model.layers.0.bias"},
                          {3, 1}};
    check_conforms(source);
    auto renamed =
        source | rename(strip) | only([](std::string_view name) { return name != "embed.weight"; });
    static_assert(HasHeldNames<decltype(renamed)>);
    CHECK(renamed.held_names() == std::vector<std::string_view>{"layers.0.bias"});
    CHECK(names(renamed) == "layers.0.bias");
    CHECK(std::vector(renamed.groups().begin(), renamed.groups().end()) ==
          std::vector<std::size_t>{2, 1});
    check_conforms(renamed);
    auto sorted =
        source | in_order([](const param_meta& a, const param_meta& b) { return b.name < a.name; });
    CHECK(names(sorted) == "model.layers.0.bias model.embed.weight");
    check_conforms(sorted);
    static_assert(!HasHeldNames<decltype(memory_source | rename(strip))>);
}

}  // namespace
