// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/sources/callback_source.hpp>
#include <weightwire/sources/span_source.hpp>
#include <weightwire/testing/conformance/weight_source.hpp>

namespace {

using namespace weightwire;

TEST_CASE("span source: yields the tensors of any range, at their own addresses, every round") {
    std::array<std::byte, 16> memory{};
    const std::list<named_tensor> tensors{{"x", {memory.data(), dtype::f32, {2}}},
                                          {"y", {memory.data() + 8, dtype::u8, {8}}}};
    span_source source{tensors};
    static_assert(lifetime_of<span_source>() == tensor_lifetime::stable);
    REQUIRE(source.metadata().size() == 2);
    CHECK(source.metadata()[0] == param_meta{"x", dtype::f32, {2}});
    CHECK(source.weights()[1].tensor.data() == memory.data() + 8);
    memory[8] = std::byte{7};
    CHECK(source.weights()[1].tensor.bytes()[0] == std::byte{7});
    const auto report = testing::check_weight_source(source);
    CHECK_MESSAGE(report.passed(), report.text());
}

TEST_CASE("span source: owns its names, through moves and copies") {
    std::byte memory{};
    auto name = std::make_unique<std::string>("short");
    auto longer = std::make_unique<std::string>(100, 'n');
    std::optional<span_source> source{
        std::in_place, std::vector<named_tensor>{{*name, {&memory, dtype::u8, {}}},
                                                 {*longer, {&memory, dtype::u8, {}}}}};
    name.reset();
    longer.reset();
    span_source moved = std::move(*source);
    span_source copied = moved;
    source.reset();
    CHECK(moved.weights()[0].name == "short");
    CHECK(copied.weights()[0].name == "short");
    CHECK(copied.weights()[0].name.data() == copied.metadata()[0].name.data());
    moved = span_source{};
    CHECK(moved.weights().empty());
    moved = copied;
    copied = span_source{};
    CHECK(moved.weights()[1].name == std::string(100, 'n'));
}

TEST_CASE("callback source: makes each tensor once a round, when it is reached, in one buffer") {
    std::array<std::byte, 8> buffer{};
    std::vector<std::size_t> made;
    callback_source source{{{"a", dtype::u8, {8}}, {"b", dtype::u8, {4}}}, [&](std::size_t i) {
                               made.push_back(i);
                               buffer.fill(static_cast<std::byte>(i + 1));
                               return tensor_view{buffer.data(), dtype::u8, {i == 0 ? 8 : 4}};
                           }};
    static_assert(WeightSource<decltype(source)>);
    static_assert(lifetime_of<decltype(source)>() == tensor_lifetime::until_next);
    auto round = source.weights();
    CHECK(made.empty());
    auto at = round.begin();
    CHECK(made == std::vector<std::size_t>{0});
    CHECK((*at).tensor.bytes()[0] == std::byte{1});
    CHECK((*at).name == "a");
    CHECK((*at).name.data() == source.metadata()[0].name.data());
    ++at;
    CHECK((*at).tensor.bytes()[0] == std::byte{2});
    ++at;
    CHECK(at == std::default_sentinel);
    CHECK(made == std::vector<std::size_t>{0, 1});
    const auto report = testing::check_weight_source(source);
    CHECK_MESSAGE(report.passed(), report.text());
}

TEST_CASE("callback source: a callback may give a stream to wait for") {
    std::byte memory{};
    int stream = 0;
    callback_source source{
        {{"a", dtype::u8, {}}}, [&](std::size_t) {
            return named_tensor{"another name", {&memory, dtype::u8, {}}, &stream};
        }};
    for (const named_tensor& tensor : source.weights()) {
        CHECK(tensor.ready_stream == &stream);
        CHECK(tensor.name == "a");
    }
}

TEST_CASE("callback source: without parameters, nothing is made") {
    callback_source source{{}, [](std::size_t) -> tensor_view { throw 1; }};
    for (const named_tensor& tensor : source.weights()) {
        FAIL(std::string{tensor.name});
    }
    CHECK_FALSE(testing::check_weight_source(source).passed());
    CHECK(testing::check_weight_source(source, {.may_be_empty = true}).passed());
}

}  // namespace
