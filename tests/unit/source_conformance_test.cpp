// SPDX-License-Identifier: Apache-2.0
// The shipped suite for sources finds every kind of broken source: each here breaks one promise.

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <iterator>
#include <ranges>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/testing/conformance/report.hpp>
#include <weightwire/testing/conformance/weight_source.hpp>

namespace {

using namespace weightwire;
using testing::check_weight_source;

/// A sound source that grants nothing beyond the concept; the broken ones derive from it.
struct sound_source {
    std::array<std::byte, 64> memory{};
    std::vector<param_meta> parameters{
        {"l.0.a", dtype::f32, {2}}, {"l.0.b", dtype::u8, {3, 2}}, {"l.1.a", dtype::u8, {0}}};

    [[nodiscard]] std::vector<param_meta> metadata() const { return parameters; }
    [[nodiscard]] std::vector<named_tensor> weights() {
        std::vector<named_tensor> out;
        for (const auto& each : parameters) {
            out.push_back({each.name, {memory.data(), each.dtype, each.shape}});
        }
        return out;
    }
};

/// The suite fails on `source`, at that check and at no other.
template <class Source>
void check_finds(Source&& source, std::string_view name) {
    const auto report = check_weight_source(source);
    const auto* finding = report.find(name);
    REQUIRE_MESSAGE(finding != nullptr, report.text());
    CHECK_MESSAGE(!finding->passed, report.text());
    CHECK_MESSAGE(report.failures() == 1, report.text());
    CHECK_FALSE(finding->detail.empty());
}

constexpr std::string_view first_round = "weights: round 1 agrees with the metadata";
constexpr std::string_view second_round = "weights: round 2 agrees with the metadata";

TEST_CASE("conformance of sources: a sound one passes, with the rounds that were asked for") {
    sound_source source;
    const auto report = check_weight_source(source, {.rounds = 5});
    CHECK_MESSAGE(report.passed(), report.text());
    CHECK(report.find("weights: round 5 agrees with the metadata") != nullptr);
    CHECK(report.find("weights: round 6 agrees with the metadata") == nullptr);
    // Fewer than two rounds would not show whether the second is fresh.
    CHECK(check_weight_source(source, {.rounds = 0}).find(second_round) != nullptr);
}

TEST_CASE("conformance of sources: metadata that no manifest can be made of") {
    sound_source source;
    source.parameters[1].name = "l.0.a";
    check_finds(source, "metadata: names are distinct and sizes fit");
    source.parameters.clear();
    check_finds(source, "metadata: names a parameter");
    CHECK(check_weight_source(source, {.may_be_empty = true}).passed());
}

struct forgetful_source : sound_source {
    int asked = 0;
    std::vector<param_meta> metadata() {
        auto out = parameters;
        if (asked++ > 0) {
            out[1].shape = shape{2, 3};
        }
        return out;
    }
};
struct shrinking_source : forgetful_source {
    std::vector<param_meta> metadata() {
        auto out = parameters;
        out.resize(asked++ > 0 ? 2 : 3);
        return out;
    }
};

TEST_CASE("conformance of sources: metadata that changes") {
    check_finds(forgetful_source{}, "metadata: is the same when it is asked again");
    check_finds(shrinking_source{}, "metadata: is the same when it is asked again");
}

/// Applies a change to what `weights()` gives, from a round on.
struct changed_source : sound_source {
    void (*change)(std::vector<named_tensor>&) = nullptr;
    int from_round = 0;
    int round = 0;
    std::vector<named_tensor> weights() {
        auto out = sound_source::weights();
        if (round++ >= from_round) {
            change(out);
        }
        return out;
    }
};

TEST_CASE(
    "conformance of sources: weights that differ from the metadata, from the first round or "
    "later") {
    using tensors = std::vector<named_tensor>;
    for (const int round : {0, 1}) {
        const auto name = round == 0 ? first_round : second_round;
        check_finds(changed_source{{}, [](tensors& all) { all[1].name = "x"; }, round}, name);
        check_finds(changed_source{{}, [](tensors& all) { std::swap(all[0], all[1]); }, round},
                    name);
        check_finds(changed_source{{}, [](tensors& all) { all.pop_back(); }, round}, name);
        check_finds(changed_source{{}, [](tensors& all) { all.clear(); }, round}, name);
        check_finds(changed_source{{}, [](tensors& all) { all.push_back(all[0]); }, round}, name);
        check_finds(changed_source{{},
                                   [](tensors& all) {
                                       all[0].tensor = {all[0].tensor.data(), dtype::i32, {2}};
                                   },
                                   round},
                    name);
        check_finds(changed_source{{},
                                   [](tensors& all) {
                                       all[1].tensor = {all[1].tensor.data(), dtype::u8, {6}};
                                   },
                                   round},
                    name);
        check_finds(changed_source{{},
                                   [](tensors& all) {
                                       all[1].tensor = {nullptr, dtype::u8, {3, 2}};
                                   },
                                   round},
                    name);
        check_finds(changed_source{{}, [](tensors&) { throw std::runtime_error{"no"}; }, round},
                    name);
        check_finds(changed_source{{}, [](tensors&) { throw 1; }, round}, name);
    }
}

/// Its names live in one buffer that the next tensor overwrites.
struct fleeting_names : sound_source {
    std::string name;
    struct iterator {
        using iterator_concept = std::input_iterator_tag;
        using value_type = named_tensor;
        using difference_type = std::ptrdiff_t;
        fleeting_names* of = nullptr;
        std::size_t at = 0;
        named_tensor operator*() const {
            of->name = of->parameters[at].name;
            return {of->name,
                    {of->memory.data(), of->parameters[at].dtype, of->parameters[at].shape}};
        }
        iterator& operator++() {
            ++at;
            return *this;
        }
        void operator++(int) { ++at; }
        bool operator==(std::default_sentinel_t) const { return at == of->parameters.size(); }
    };
    auto weights() { return std::ranges::subrange{iterator{this, 0}, std::default_sentinel}; }
};

TEST_CASE("conformance of sources: names that do not live on") {
    fleeting_names source;
    const auto report = check_weight_source(source);
    CHECK_FALSE(report.find("weights: round 1: names live on")->passed);
    CHECK(report.find(first_round)->passed);
}

struct moving_source : sound_source {
    static constexpr auto lifetime = tensor_lifetime::stable;
    std::size_t round = 0;
    std::vector<named_tensor> weights() {
        auto out = sound_source::weights();
        out[1].tensor = {memory.data() + 8 * ++round, dtype::u8, {3, 2}};
        return out;
    }
};

/// Yields through one buffer, and grants `Lifetime`.
template <tensor_lifetime Lifetime>
struct reusing_source : sound_source {
    static constexpr auto lifetime = Lifetime;
    struct iterator {
        using iterator_concept = std::input_iterator_tag;
        using value_type = named_tensor;
        using difference_type = std::ptrdiff_t;
        reusing_source* of = nullptr;
        std::size_t at = 0;
        named_tensor operator*() const {
            of->memory.fill(static_cast<std::byte>(at + 1));
            const auto& parameter = of->parameters[at];
            return {parameter.name, {of->memory.data(), parameter.dtype, parameter.shape}};
        }
        iterator& operator++() {
            ++at;
            return *this;
        }
        void operator++(int) { ++at; }
        bool operator==(std::default_sentinel_t) const { return at == of->parameters.size(); }
    };
    auto weights() { return std::ranges::subrange{iterator{this, 0}, std::default_sentinel}; }
};

TEST_CASE(
    "conformance of sources: memory that moves or changes while the source grants that it does "
    "not") {
    check_finds(moving_source{}, "weights: addresses are the same every round");
    reusing_source<tensor_lifetime::until_next> allowed;
    CHECK(check_weight_source(allowed).passed());
    reusing_source<tensor_lifetime::stable> stable;
    const auto report = check_weight_source(stable);
    CHECK_FALSE(report.find("weights: round 1: tensors stay unchanged to its end")->passed);
    check_finds(reusing_source<tensor_lifetime::until_group_end>{}, first_round);
    // With every tensor in a group of its own the same source keeps what it grants.
    reusing_source<tensor_lifetime::until_group_end> alone;
    alone.parameters[1].name = "l.2.b";
    alone.parameters[2].name = "l.3.a";
    const auto sound = check_weight_source(alone);
    CHECK_MESSAGE(sound.passed(), sound.text());
}

struct grouped_source : sound_source {
    std::vector<std::size_t> sizes{2, 1};
    [[nodiscard]] std::vector<std::size_t> groups() const { return sizes; }
    bool wrong_group = false;
    using sound_source::weights;
    std::vector<named_tensor> weights(std::size_t group) {
        const auto all = sound_source::weights();
        const auto second = (group == 0) == wrong_group;
        return second ? std::vector{all[2]} : std::vector{all[0], all[1]};
    }
};

TEST_CASE("conformance of sources: groups that do not add up, or give another group's tensors") {
    grouped_source source;
    const auto report = check_weight_source(source);
    CHECK_MESSAGE(report.passed(), report.text());
    source.wrong_group = true;
    check_finds(source, "weights(group): each group alone agrees with the metadata");
    source.wrong_group = false;
    for (const auto& wrong : {std::vector<std::size_t>{2}, {2, 2}, {2, 0, 1}}) {
        source.sizes = wrong;
        const auto found = check_weight_source(source);
        CHECK_FALSE(found.find("groups: sizes are positive and add up")->passed);
    }
}

struct held_source : sound_source {
    std::vector<std::string> held{"l.0.b", "l.1.a"};
    std::size_t first = 1;
    [[nodiscard]] std::vector<std::string_view> held_names() const {
        return {held.begin(), held.end()};
    }
    std::vector<named_tensor> weights() {
        auto all = sound_source::weights();
        all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(first));
        return all;
    }
};

TEST_CASE(
    "conformance of sources: a holder yields what it holds and no more, and holds what there is") {
    held_source source;
    const auto report = check_weight_source(source);
    CHECK_MESSAGE(report.passed(), report.text());
    source.first = 0;
    check_finds(source, first_round);
    source.first = 2;
    check_finds(source, first_round);
    source.first = 1;
    source.held.emplace_back("unknown");
    check_finds(source, "held_names: are distinct and named by the metadata");
    source.held.back() = "l.0.b";
    check_finds(source, "held_names: are distinct and named by the metadata");
}

TEST_CASE("conformance report: passes when it looked at something and nothing failed") {
    testing::conformance_report report;
    CHECK_FALSE(report.passed());
    CHECK(report.run("kept", [] { return std::string{}; }));
    CHECK(report.passed());
    CHECK_FALSE(report.run("broken", [] { return std::string{"why"}; }));
    CHECK_FALSE(report.run("throws", []() -> std::string { throw std::runtime_error{"that"}; }));
    CHECK(report.failures() == 2);
    CHECK_FALSE(report.passed());
    CHECK(report.find("broken")->detail == "why");
    CHECK(report.find("nobody") == nullptr);
    CHECK(report.text() == "ok     kept\nFAILED broken: why\nFAILED throws: it threw: that\n");
    testing::conformance_report outer;
    outer.append(report, "inner: ");
    CHECK(outer.find("inner: kept")->passed);
    CHECK(outer.failures() == 2);
}

}  // namespace
