// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <chrono>
#include <map>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include <weightwire/sinks/loading_sink.hpp>
#include <weightwire/sinks/parameter_table.hpp>
#include <weightwire/testing/conformance/weight_sink.hpp>

using namespace weightwire;
using weightwire::testing::check_weight_sink;
using weightwire::testing::conformance_report;

namespace {

manifest model() {
    return manifest{{{"embed.weight", dtype::bf16, {5, 3}},
                     {"layers.0.up", dtype::f32, {2, 3}},
                     {"layers.0.down", dtype::f32, {3}},
                     {"layers.1.up", dtype::f32, {2, 3}},
                     {"layers.1.down", dtype::f32, {3}},
                     {"scale", dtype::f64, {}},
                     {"nothing", dtype::f32, {0, 4}},
                     {"head", dtype::bf16, {5, 3}}}};
}

/// A table with one promise broken. Hides the table's members of the same name.
struct table_of : parameter_table {
    explicit table_of(commit_mode mode = commit_mode::flip)
        : parameter_table{model(), {.mode = mode}} {}
};

struct shows_too_early : table_of {
    void prepare(deadline until) {
        parameter_table::prepare(until);
        parameter_table::commit(99);
    }
};
struct forgets_rollback : table_of {
    bool open = false;
    std::span<const destination> begin(const session_info& session, const manifest& parameters,
                                       deadline until) {
        const auto destinations = parameter_table::begin(session, parameters, until);
        open = true;
        return destinations;
    }
    void commit(weight_version version) noexcept {
        parameter_table::commit(version);
        open = false;
    }
    void rollback() noexcept {
        if (open) {
            parameter_table::prepare(deadline::after(std::chrono::seconds{5}));
            parameter_table::commit(version() + 1);
        }
        open = false;
    }
};
struct allows_two_sessions : table_of {
    std::span<const destination> begin(const session_info& session, const manifest& parameters,
                                       deadline until) {
        parameter_table::rollback();
        return parameter_table::begin(session, parameters, until);
    }
};
struct lies_about_version : table_of {
    void commit(weight_version version) noexcept { parameter_table::commit(version + 1); }
};
struct overlaps : table_of {
    std::vector<destination> moved;
    std::span<const destination> begin(const session_info& session, const manifest& parameters,
                                       deadline until) {
        const auto right = parameter_table::begin(session, parameters, until);
        moved.assign(right.begin(), right.end());
        moved[3].where = moved[1].where;
        return moved;
    }
};
struct hides_dirt : table_of {
    hides_dirt() : table_of{commit_mode::in_place} {}
    bool dirty() const noexcept { return false; }
};
struct takes_anything : table_of {
    std::span<const destination> begin(const session_info& session, const manifest&,
                                       deadline until) {
        return parameter_table::begin(session, this->parameters(), until);
    }
};

struct waits_on : table_of {
    std::span<const destination> begin(const session_info& session, const manifest& parameters,
                                       deadline, const std::stop_token& = {}) {
        return parameter_table::begin(session, parameters,
                                      deadline::after(std::chrono::milliseconds{5}));
    }
};
struct prepares_on : table_of {
    prepares_on() : table_of{commit_mode::copy_in} {}
    void prepare(deadline, const std::stop_token& = {}) {
        parameter_table::prepare(deadline::after(std::chrono::milliseconds{5}));
    }
};
struct undoes_nothing : table_of {
    bool exchanged = false;
    std::span<const destination> begin(const session_info& session, const manifest& parameters,
                                       deadline until) {
        exchanged = false;
        return parameter_table::begin(session, parameters, until);
    }
    void exchange(deadline, const std::stop_token&) { exchanged = true; }
    void rollback() noexcept {
        if (exchanged) {
            parameter_table::commit(version());
        }
        parameter_table::rollback();
    }
};
struct guesses_badly : table_of {
    [[nodiscard]] std::chrono::nanoseconds commit_estimate() const { return std::chrono::hours{1}; }
};

template <class Sink>
conformance_report report_of() {
    return check_weight_sink(
        [](auto&& use) {
            Sink sink;
            use(sink);
        },
        model());
}

template <class Sink>
void fails(std::string_view name) {
    CAPTURE(name);
    const auto report = report_of<Sink>();
    CAPTURE(report.text());
    CHECK_FALSE(report.passed());
    const auto* found = report.find(name);
    REQUIRE(found != nullptr);
    CHECK_FALSE(found->passed);
    CHECK_FALSE(found->detail.empty());
}

}  // namespace

TEST_CASE("a parameter table keeps every promise of WeightSink in every mode") {
    for (const auto mode : {commit_mode::flip, commit_mode::copy_in, commit_mode::in_place}) {
        CAPTURE(to_string(mode));
        const auto report = check_weight_sink(
            [mode](auto&& use) {
                parameter_table table{
                    model(),
                    {.mode = mode, .frozen = {"scale"}, .aliases = {{"head", "embed.weight"}}}};
                use(table);
            },
            model());
        CHECK_MESSAGE(report.passed(), report.text());
        CHECK(report.find("held snapshots never change") != nullptr);
        for (const auto* optional :
             {"begin ends at the stop", "prepare ends at the stop", "an exchange can be undone",
              "the commit estimate is honest"}) {
            CHECK(report.find(optional) != nullptr);
        }
    }
}

TEST_CASE("a loading sink keeps them too, with and without a list of parameters") {
    struct plain {
        std::map<std::string, std::size_t> seen;
        void load(std::span<const named_tensor> group) {
            for (const auto& each : group) {
                seen[std::string{each.name}] += each.tensor.byte_size();
            }
        }
    };
    const auto loose = check_weight_sink(
        [](auto&& use) {
            plain target;
            loading_sink sink{target, {.buffer_bytes = 4096}};
            use(sink);
        },
        model(), {.knows_its_parameters = false});
    CHECK_MESSAGE(loose.passed(), loose.text());

    struct listed : plain {
        static manifest parameters() { return model(); }
    };
    const auto strict = check_weight_sink(
        [](auto&& use) {
            listed target;
            loading_sink sink{target, {.buffer_bytes = 4096}};
            use(sink);
        },
        model());
    CHECK_MESSAGE(strict.passed(), strict.text());
    CHECK(strict.find("coverage is strict") != nullptr);
}

TEST_CASE("each broken promise is found by the check that is named for it") {
    fails<shows_too_early>("nothing is visible before commit");
    fails<forgets_rollback>("rollback restores, or the sink is dirty");
    fails<allows_two_sessions>("a second begin is refused");
    fails<lies_about_version>("everything is visible after commit");
    fails<overlaps>("destinations fit and do not overlap");
    fails<hides_dirt>("rollback restores, or the sink is dirty");
    fails<takes_anything>("coverage is strict");
    fails<takes_anything>("missing parameters are named");
    fails<waits_on>("begin ends at the stop");
    fails<prepares_on>("prepare ends at the stop");
    fails<undoes_nothing>("an exchange can be undone");
    fails<guesses_badly>("the commit estimate is honest");
    CHECK_FALSE(check_weight_sink([](auto&&) {}, model()).passed());
}
