// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/sources/callback_source.hpp>
#include <weightwire/sources/span_source.hpp>

namespace {

using namespace weightwire;

struct three_tensors {
    std::array<std::byte, 64> memory{};
    manifest parameters{
        {{"a", dtype::f32, {2}}, {"b", dtype::bf16, {3, 2}}, {"c", dtype::u8, {0}}}};
    std::vector<named_tensor> tensors{{"a", {memory.data(), dtype::f32, {2}}},
                                      {"b", {memory.data() + 8, dtype::bf16, {3, 2}}},
                                      {"c", {memory.data(), dtype::u8, {0}}}};

    /// Reads `count` tensors and then one more; the message of what is thrown, or "nothing".
    std::string read(span_source source, std::size_t count) const {
        round_of round{source, parameters};
        auto stream = round.stream();
        for (std::size_t i = 0; i < count; ++i) {
            REQUIRE(stream.next() != nullptr);
        }
        try {
            (void)stream.next();
        } catch (const data_error& problem) {
            CHECK(problem.context().phase == phase::update);
            return problem.what();
        }
        return "nothing";
    }
};

TEST_CASE_FIXTURE(three_tensors,
                  "tensor stream: gives every tensor once, in manifest order, then null") {
    span_source source{tensors};
    round_of round{source, parameters};
    auto stream = round.stream();
    CHECK(stream.lifetime() == tensor_lifetime::stable);
    CHECK(&stream.manifest() == &parameters);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        CHECK(stream.position() == i);
        const auto* tensor = stream.next();
        REQUIRE(tensor != nullptr);
        CHECK(tensor->name == parameters[i].name);
    }
    CHECK(stream.next() == nullptr);
    CHECK(stream.next() == nullptr);
    CHECK(stream.position() == 3);
}

TEST_CASE_FIXTURE(three_tensors,
                  "tensor stream: a tensor without an address is refused, and named") {
    auto nowhere = tensors;
    nowhere[1].tensor = {static_cast<const std::byte*>(nullptr), dtype::bf16, {3, 2}};
    const auto said = read(span_source{nowhere}, 1);
    CHECK(said.find("[tensor b]") != std::string::npos);
    CHECK(said.find("no address for a tensor of 12 bytes") != std::string::npos);
    auto empty = tensors;
    empty[2].tensor = {static_cast<const std::byte*>(nullptr), dtype::u8, {0}};
    CHECK(read(span_source{empty}, 2) == "nothing");
}

TEST_CASE_FIXTURE(
    three_tensors,
    "tensor stream: a name, dtype, shape or order that differs is refused, and named") {
    auto renamed = tensors;
    renamed[1].name = "x";
    CHECK(read(span_source{renamed}, 1).find("[tensor b]") != std::string::npos);
    CHECK(read(span_source{renamed}, 1).find("yields x bfloat16[3, 2] at position 1") !=
          std::string::npos);
    auto retyped = tensors;
    retyped[1].tensor = {memory.data(), dtype::f16, {3, 2}};
    CHECK(read(span_source{retyped}, 1).find("float16[3, 2]") != std::string::npos);
    auto reshaped = tensors;
    reshaped[1].tensor = {memory.data(), dtype::bf16, {2, 3}};
    CHECK(read(span_source{reshaped}, 1).find("bfloat16[2, 3]") != std::string::npos);
    CHECK(
        read(span_source{std::vector{tensors[1], tensors[0], tensors[2]}}, 0).find("[tensor a]") !=
        std::string::npos);
}

TEST_CASE_FIXTURE(
    three_tensors,
    "tensor stream: a source that ends early or late is refused, and the tensor named") {
    const auto early = read(span_source{std::vector{tensors[0]}}, 1);
    CHECK(early.find("[tensor b]") != std::string::npos);
    CHECK(early.find("ended before this tensor") != std::string::npos);
    auto more = tensors;
    more.push_back({"d", tensors[0].tensor});
    const auto late = read(span_source{more}, 3);
    CHECK(late.find("[tensor d]") != std::string::npos);
    CHECK(read(span_source{}, 0).find("[tensor a]") != std::string::npos);
}

TEST_CASE_FIXTURE(three_tensors,
                  "tensor stream: draining reaches every tensor that was not read, each once") {
    std::vector<std::size_t> made;
    callback_source source{{parameters.parameters().begin(), parameters.parameters().end()},
                           [&](std::size_t i) {
                               made.push_back(i);
                               return tensors[i].tensor;
                           }};
    for (std::size_t read = 0; read <= 4; ++read) {
        made.clear();
        round_of round{source, parameters};
        auto stream = round.stream();
        CHECK(stream.lifetime() == tensor_lifetime::until_next);
        for (std::size_t i = 0; i < read; ++i) {
            (void)stream.next();
        }
        stream.drain();
        stream.drain();
        CHECK(made == std::vector<std::size_t>{0, 1, 2});
    }
}

TEST_CASE_FIXTURE(
    three_tensors,
    "tensor stream: what the source throws comes through, from reading and from draining") {
    callback_source source{{parameters.parameters().begin(), parameters.parameters().end()},
                           [&](std::size_t i) {
                               if (i == 1) {
                                   throw std::runtime_error{"gather failed"};
                               }
                               return tensors[i].tensor;
                           }};
    round_of reading{source, parameters};
    auto stream = reading.stream();
    CHECK(stream.next() != nullptr);
    CHECK_THROWS_WITH_AS((void)stream.next(), "gather failed", std::runtime_error);
    round_of draining{source, parameters};
    CHECK_THROWS_WITH_AS(draining.stream().drain(), "gather failed", std::runtime_error);
}

}  // namespace
