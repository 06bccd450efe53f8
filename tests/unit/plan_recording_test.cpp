// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/recorder.hpp>
#include <weightwire/plan/recording_tensor.hpp>
#include <weightwire/plan/regions.hpp>

namespace {

using namespace weightwire;
using plan::record;
using plan::recorder;
using plan::recording_tensor;
using plan::region;
using numbers = std::vector<std::int64_t>;
using chain = std::function<recording_tensor(const recording_tensor&)>;

template <class Tensor, class Index>
concept IsIndexedBy = requires(const Tensor& t, Index i) { t[i]; };

manifest one(std::string name, shape extents, dtype type = dtype::bf16) {
    return manifest{{{std::move(name), type, extents}}};
}

shape shape_after(const shape& extents, const chain& views) {
    const auto parameters = one("p", extents);
    recorder made{parameters, parameters};
    return views(made.source("p")).shape();
}

/// Elements of a parameter that a view of it reads, in the view's order.
numbers read_by(const shape& extents, const chain& views) {
    const auto parameters = one("p", extents);
    const auto flat = one("f", shape_after(extents, views));
    const auto made = record(
        parameters, flat, [&](recorder& r) { views(r.source("p")).copy_to(r.destination("f")); });
    REQUIRE(made.regions.size() == 1);
    numbers out(made.regions[0].elements(), -1);
    plan::for_each_run(made.regions[0], 1,
                       [&](std::uint64_t from, std::uint64_t to, std::uint64_t count) {
                           std::iota(out.begin() + static_cast<std::ptrdiff_t>(to),
                                     out.begin() + static_cast<std::ptrdiff_t>(to + count),
                                     static_cast<std::int64_t>(from));
                       });
    return out;
}

/// The error of views of a source `w` of these extents.
template <class Error>
error_context refused(const shape& extents, const std::function<void(const recording_tensor&)>& act,
                      const std::string& words) {
    const auto parameters = one("w", extents);
    recorder made{parameters, parameters};
    try {
        act(made.source("w"));
    } catch (const Error& refusal) {
        CHECK_MESSAGE(std::string{refusal.what()}.find(words) != std::string::npos, refusal.what());
        CHECK(refusal.context().tensor == "w");
        CHECK(refusal.context().phase == phase::plan);
        return refusal.context();
    }
    FAIL("no error: " << words);
    return {};
}

TEST_CASE("recording: views of parts") {
    const shape six{2, 3};
    CHECK(read_by(six, [](const auto& t) { return t; }) == numbers{0, 1, 2, 3, 4, 5});
    CHECK(read_by(six, [](const auto& t) { return t.narrow(1, 1, 2); }) == numbers{1, 2, 4, 5});
    CHECK(read_by(six, [](const auto& t) { return t.narrow(-1, -2, 1); }) == numbers{1, 4});
    CHECK(read_by(six, [](const auto& t) { return t.select(1, -1); }) == numbers{2, 5});
    CHECK(read_by(six, [](const auto& t) { return t[1]; }) == numbers{3, 4, 5});
    CHECK(read_by(six, [](const auto& t) { return t[-1][0]; }) == numbers{3});
    CHECK(read_by({10}, [](const auto& t) { return t.slice(0, 1, 8, 3); }) == numbers{1, 4, 7});
    CHECK(read_by({10}, [](const auto& t) { return t.slice(0, -3); }) == numbers{7, 8, 9});
    CHECK(read_by({10}, [](const auto& t) { return t.slice(0, {}, -8, 1); }) == numbers{0, 1});
    CHECK(shape_after({10}, [](const auto& t) { return t.slice(0, 7, 3); }) == shape{0});
    CHECK(read_by({7}, [](const auto& t) { return t.chunk(3)[2]; }) == numbers{6});
    CHECK(read_by({7}, [](const auto& t) { return t.split(3)[1]; }) == numbers{3, 4, 5});
    CHECK(read_by({7}, [](const auto& t) { return t.split({4, 0, 3})[2]; }) == numbers{4, 5, 6});
    CHECK(read_by(six, [](const auto& t) { return t.unbind(1)[1]; }) == numbers{1, 4});
}

TEST_CASE("recording: views of other orders and extents") {
    const shape six{2, 3};
    CHECK(read_by(six, [](const auto& t) { return t.t(); }) == numbers{0, 3, 1, 4, 2, 5});
    CHECK(read_by({2, 2, 2}, [](const auto& t) {
              return t.permute({2, 0, 1});
          }) == numbers{0, 2, 4, 6, 1, 3, 5, 7});
    CHECK(shape_after(six, [](const auto& t) { return t.view({3, -1}); }) == shape{3, 2});
    CHECK(shape_after(six, [](const auto& t) { return t.unsqueeze(-1).unsqueeze(0); }) ==
          shape{1, 2, 3, 1});
    CHECK(shape_after({1, 2, 1}, [](const auto& t) { return t.squeeze(); }) == shape{2});
    CHECK(shape_after({1, 2, 1}, [](const auto& t) { return t.squeeze(-1); }) == shape{1, 2});
    CHECK(shape_after({1, 2, 1}, [](const auto& t) { return t.squeeze(1); }) == shape{1, 2, 1});
    CHECK(shape_after({2, 3, 4}, [](const auto& t) { return t.flatten(1); }) == shape{2, 12});
    CHECK(read_by({2, 1}, [](const auto& t) {
              return t.expand({-1, 3});
          }) == numbers{0, 0, 0, 1, 1, 1});
    CHECK(read_by({2}, [](const auto& t) { return t.expand({2, 2}); }) == numbers{0, 1, 0, 1});
    const auto extents = numbers{3, 2};
    CHECK(shape_after(six, [&](const auto& t) { return t.view(extents); }) == shape{3, 2});
    CHECK(shape_after(six, [&](const auto& t) { return t.view(shape{6}); }) == shape{6});
}

TEST_CASE("recording: a tensor says what it is") {
    const auto parameters = one("p", {4, 6}, dtype::f8_e4m3fn);
    recorder made{parameters, parameters};
    const auto t = made.source("p").narrow(0, 1, 2).t();
    CHECK(t.name() == "p");
    CHECK(t.dtype() == dtype::f8_e4m3fn);
    CHECK(t.shape() == shape{6, 2});
    CHECK(t.dim() == 2);
    CHECK(t.size(-1) == 2);
    CHECK(t.numel() == 12);
    CHECK_FALSE(t.is_contiguous());
    CHECK(t.contiguous().is_contiguous());
    CHECK_FALSE(t.is_destination());
    CHECK(made.destination("p").is_destination());
    CHECK(t.chain() == "narrow(0, 1, 2).t()");
    CHECK(t.to(dtype::f8_e4m3fn).shape() == t.shape());
    CHECK(t.view(dtype::f8_e4m3fn).shape() == t.shape());
}

TEST_CASE("recording: what torch copies is the same elements in another shape") {
    // [2, 3] transposed, as a copy: 0 3 1 4 2 5.
    CHECK(read_by({2, 3}, [](const auto& t) { return t.t().reshape({6}); }) ==
          numbers{0, 3, 1, 4, 2, 5});
    CHECK(read_by({2, 3}, [](const auto& t) {
              return t.t().contiguous().view({-1}).narrow(0, 2, 2);
          }) == numbers{1, 4});
    CHECK(read_by({2, 3}, [](const auto& t) { return t.t().flatten().narrow(0, 2, 4); }) ==
          numbers{1, 4, 2, 5});
    CHECK(read_by({2, 3}, [](const auto& t) { return t.t().flatten().slice(0, 1, {}, 2); }) ==
          numbers{3, 4, 5});
    CHECK(read_by({2, 3}, [](const auto& t) { return t.t().flatten()[3]; }) == numbers{4});
    CHECK(read_by({2, 3, 2}, [](const auto& t) {
              return t.transpose(0, 2).reshape({2, 6})[1];
          }) == numbers{1, 7, 3, 9, 5, 11});
}

TEST_CASE("recording: copies between views of both sides become one region each") {
    const auto checkpoint = manifest{
        {{"q", dtype::bf16, {8, 6}}, {"k", dtype::bf16, {4, 6}}, {"v", dtype::bf16, {4, 6}}}};
    const auto worker = one("qkv", {8, 6});
    const std::int64_t rank = 1;
    const auto made = record(checkpoint, worker, [&](recorder& r) {
        const auto destination = r.destination("qkv");
        r.source("q").chunk(2)[rank].copy_to(destination.narrow(0, 0, 4));
        r.source("k").narrow(0, rank * 2, 2).copy_to(destination.narrow(0, 4, 2));
        r.source("v").narrow(0, rank * 2, 2).copy_to(destination.narrow(0, -2, 2));
    });
    REQUIRE(made.regions.size() == 3);
    CHECK(made.regions[0] == region{.source = 0,
                                    .destination = 0,
                                    .source_offset = 24,
                                    .destination_offset = 0,
                                    .dimensions = {{24, 1, 1}}});
    CHECK(made.regions[2] == region{.source = 2,
                                    .destination = 0,
                                    .source_offset = 12,
                                    .destination_offset = 36,
                                    .dimensions = {{12, 1, 1}}});
    CHECK(made.untouched.empty());
}

TEST_CASE("recording: a flattened copy goes to a flat destination at several strides") {
    const auto checkpoint = one("w", {4, 6});
    const auto worker = one("w", {24});
    const auto made = record(checkpoint, worker, [](recorder& r) {
        r.source("w").t().flatten().copy_to(r.destination("w"));
    });
    REQUIRE(made.regions.size() == 1);
    CHECK(made.regions[0].dimensions == std::vector<plan::region_dimension>{{6, 1, 4}, {4, 6, 1}});
    // The order of dimensions does not matter to the region.
    const auto matrix = one("w", {6, 4});
    const auto again = record(checkpoint, matrix,
                              [](recorder& r) { r.source("w").copy_to(r.destination("w").t()); });
    CHECK(again.regions == made.regions);
    CHECK(hash_of(again.regions[0]) == hash_of(made.regions[0]));
}

TEST_CASE("recording: what needs values fails with operation, parameter and chain") {
    const shape six{2, 3};
    const auto expect = [&](const std::string& operation,
                            const std::function<void(const recording_tensor&)>& act) {
        const auto context = refused<unsupported_error>(
            six, [&](const recording_tensor& t) { act(t.t()); }, "[3, 2] made by t()");
        CHECK(context.operation == operation);
    };
    expect("item()", [](const auto& t) { (void)t.item(); });
    expect("item()", [](const auto& t) { (void)t.template item<float>(); });
    expect("data_ptr()", [](const auto& t) { (void)t.data_ptr(); });
    expect("to(float32)", [](const auto& t) { (void)t.to(dtype::f32); });
    expect("view(uint8)", [](const auto& t) { (void)t.view(dtype::u8); });
    expect("operator[](tensor)", [](const auto& t) { (void)t[t]; });
    expect("operator+", [](const auto& t) { (void)(t + t); });
    expect("operator*", [](const auto& t) { (void)(t * 2.0); });
    expect("operator-", [](const auto& t) { (void)(t - 1); });
    expect("operator-", [](const auto& t) { (void)-t; });
    expect("operator/", [](const auto& t) { (void)(t / 2); });
    expect("operator==", [](const auto& t) { (void)(t == t); });
    expect("operator!=", [](const auto& t) { (void)(t != 0); });
    expect("operator<", [](const auto& t) { (void)(t < 0); });
    expect("operator>=", [](const auto& t) { (void)(t >= t); });
    // What could only be a mistake does not compile.
    static_assert(!std::is_convertible_v<recording_tensor, bool>);
    static_assert(!std::is_constructible_v<bool, recording_tensor>);
    static_assert(!std::is_default_constructible_v<recording_tensor>);
    static_assert(IsIndexedBy<recording_tensor, int> && IsIndexedBy<recording_tensor, std::size_t>);
    static_assert(!IsIndexedBy<recording_tensor, bool> && !IsIndexedBy<recording_tensor, double>);
    static_assert(!std::is_constructible_v<recorder, manifest&&, const manifest&>);
    static_assert(!std::is_constructible_v<recorder, const manifest&, manifest&&>);
}

TEST_CASE("recording: what torch refuses is a usage error with operation, parameter and chain") {
    const shape six{2, 3};
    using t_type = const recording_tensor&;
    CHECK(refused<usage_error>(
              six, [](t_type t) { (void)t.t().narrow(0, 2, 2); }, "[3, 2] made by t()")
              .operation == "narrow(0, 2, 2)");
    CHECK(refused<usage_error>(
              six, [](t_type t) { (void)t.select(2, 0); }, "no dimension 2")
              .operation == "select(2, 0)");
    CHECK(refused<usage_error>(
              six,
              [](t_type t) {
                  (void)t.split({1, 2}, 0);
              },
              "add up")
              .operation == "split({1, 2}, 0)");
    (void)refused<usage_error>(
        six, [](t_type t) { (void)t[2]; }, "not inside");
    (void)refused<usage_error>(
        six, [](t_type t) { (void)t.slice(0, {}, {}, 0); }, "step");
    (void)refused<usage_error>(
        six, [](t_type t) { (void)t.chunk(0); }, "number of pieces");
    (void)refused<usage_error>(
        six, [](t_type t) { (void)t.split(0); }, "do not cover");
    (void)refused<usage_error>(
        six,
        [](t_type t) {
            (void)t.permute({0, 0});
        },
        "named once");
    (void)refused<usage_error>(
        {1, 2, 3}, [](t_type t) { (void)t.t(); }, "two dimensions");
    (void)refused<usage_error>(
        six, [](t_type t) { (void)t.t().view({6}); }, "use reshape");
    (void)refused<usage_error>(
        six, [](t_type t) { (void)t.view({4}); }, "6 elements");
    (void)refused<usage_error>(
        six,
        [](t_type t) {
            (void)t.view({-1, -1});
        },
        "may be -1");
    (void)refused<usage_error>(
        six, [](t_type t) { (void)t.flatten(1, 0); }, "after the last");
    (void)refused<usage_error>(
        six,
        [](t_type t) {
            (void)t.expand({2, 2, 6});
        },
        "extent 1");
    (void)refused<usage_error>(
        {}, [](t_type t) { (void)t[0]; }, "no dimension 0");
    (void)refused<unsupported_error>(
        {1, 1, 1, 1, 1, 1, 1, 1}, [](t_type t) { (void)t.unsqueeze(0); }, "at most 8");
    (void)refused<usage_error>(
        {1, 1},
        [](t_type t) {
            (void)t.expand({1LL << 40U, 1LL << 40U});
        },
        "63 bits");
}

TEST_CASE("recording: a view that strides cannot express fails, and says what to do") {
    const auto context = refused<unsupported_error>(
        {3, 4}, [](const auto& t) { (void)t.t().flatten().narrow(0, 0, 5); },
        "[12] made by t().flatten(0, -1)");
    CHECK(context.operation == "narrow(0, 0, 5)");
    (void)refused<unsupported_error>(
        {3, 4},
        [](const auto& t) {
            (void)t.t().reshape({2, 6}).view({6, 2});
        },
        "no regular strides");
    // A reshape fails in the same way, whether or not it is the one that copies.
    (void)refused<unsupported_error>(
        {3, 4},
        [](const auto& t) {
            (void)t.t().reshape({6, 2});
        },
        "one by one");
}

TEST_CASE(
    "recording: a copy goes from the checkpoint to the worker's memory, in one dtype and shape") {
    const auto checkpoint =
        manifest{{{"w", dtype::bf16, {2, 3}}, {"f", dtype::f32, {2, 3}}, {"n", dtype::bf16, {3}}}};
    const auto worker = manifest{{{"d", dtype::bf16, {2, 3}}, {"s", dtype::bf16, {1}}}};
    recorder made{checkpoint, worker};
    recorder other{checkpoint, worker};
    const auto w = made.source("w");
    const auto d = made.destination("d");
    const auto expect = [&](auto type, const std::function<void()>& act, const std::string& words) {
        using error_type = typename decltype(type)::type;
        try {
            act();
        } catch (const error_type& refusal) {
            CHECK_MESSAGE(std::string{refusal.what()}.find(words) != std::string::npos,
                          refusal.what());
            return;
        }
        FAIL("no error: " << words);
    };
    constexpr std::type_identity<usage_error> usage;
    constexpr std::type_identity<unsupported_error> unsupported;
    expect(
        usage, [&] { w.copy_to(w); }, "copy_to(`w`)");
    expect(
        usage, [&] { d.copy_to(d); }, "in one recording");
    expect(
        usage, [&] { d.copy_to(w); }, "in one recording");
    expect(
        usage, [&] { w.copy_to(other.destination("d")); }, "in one recording");
    expect(
        unsupported, [&] { made.source("f").copy_to(d); }, "from float32 to bfloat16");
    expect(
        usage, [&] { w.t().copy_to(d); }, "the destination is [2, 3]");
    expect(
        usage, [&] { made.source("n").copy_to(d); }, "broadcasts nothing");
    expect(
        usage, [&] { w.flatten().copy_to(d.t().flatten()); }, "use view");
    expect(
        usage, [&] { made.source("n").copy_to(made.destination("s").expand({3})); }, "expanded");
    expect(
        usage, [&] { w.leave_untouched(); }, "only parameters of the worker");
    expect(
        usage, [&] { d.t().flatten().leave_untouched(); }, "use view");
    CHECK(made.recorded().empty());
    // Nothing is copied on the way to these.
    made.source("n").copy_to(d.contiguous().reshape({6}).narrow(0, 0, 3));
    CHECK(made.recorded().size() == 1);
}

TEST_CASE("recording: every element of the worker is written once, or left untouched on purpose") {
    const auto checkpoint = manifest{{{"w", dtype::bf16, {2, 3}}, {"u", dtype::bf16, {1, 3}}}};
    const auto worker = manifest{{{"d", dtype::bf16, {4, 3}}, {"empty", dtype::bf16, {0, 3}}}};
    const auto expect = [&](const std::function<void(recorder&)>& load,
                            const std::vector<std::string>& words) {
        try {
            (void)record(checkpoint, worker, load);
        } catch (const coverage_error& refusal) {
            CHECK(refusal.context().tensor == "d");
            for (const auto& word : words) {
                CHECK_MESSAGE(std::string{refusal.what()}.find(word) != std::string::npos,
                              refusal.what());
            }
            return;
        }
        FAIL("no error: " << words.front());
    };
    expect([](recorder&) {}, {"0 of 12 elements", "element 0 ", "leave_untouched()"});
    expect([](recorder& r) { r.source("w").copy_to(r.destination("d").narrow(0, 0, 2)); },
           {"6 of 12 elements", "element 6 "});
    expect(
        [](recorder& r) {
            r.source("w").copy_to(r.destination("d").narrow(0, 0, 2));
            r.source("u").copy_to(r.destination("d").narrow(0, 1, 1));
        },
        {"twice", "`w`", "then from `u`"});
    expect(
        [](recorder& r) {
            r.source("w").copy_to(r.destination("d").narrow(0, 0, 2));
            r.destination("d").leave_untouched();
        },
        {"twice", "`w`", "declared untouched"});
    const auto made = record(checkpoint, worker, [](recorder& r) {
        r.source("u").copy_to(r.destination("d").slice(0, 3));
        r.source("w").copy_to(r.destination("d").narrow(0, 1, 2));
        r.destination("d")[0].leave_untouched();
        r.source("w").narrow(0, 0, 0).copy_to(r.destination("empty"));
    });
    CHECK(made.regions.size() == 2);
    REQUIRE(made.untouched.size() == 1);
    CHECK(made.untouched[0].source == region::no_source);
    CHECK(made.untouched[0].elements() == 3);
}

TEST_CASE("recording: parameters are asked for by name") {
    const auto checkpoint = manifest{{{"w", dtype::bf16, {2}}, {"six", dtype::f6_e2m3, {4}}}};
    const auto worker = one("d", {2});
    recorder made{checkpoint, worker};
    CHECK(made.has_source("w"));
    CHECK_FALSE(made.has_source("d"));
    CHECK(made.has_destination("d"));
    CHECK(&made.sources() == &checkpoint);
    CHECK(&made.destinations() == &worker);
    try {
        (void)made.source("model.norm");
        FAIL("no error");
    } catch (const coverage_error& refusal) {
        CHECK(refusal.context().tensor == "model.norm");
        CHECK(std::string{refusal.what()}.find("the checkpoint has no") != std::string::npos);
    }
    CHECK_THROWS_AS((void)made.destination("w"), coverage_error);
    CHECK_THROWS_AS((void)made.source("six"), unsupported_error);
    // Without elements, but other extents that multiply to more than 63 bits.
    const auto wide = one("wide", {0, 1LL << 40U, 1LL << 40U});
    recorder of_wide{wide, worker};
    CHECK_THROWS_AS((void)of_wide.source("wide"), unsupported_error);
}

TEST_CASE("recording: a tied weight is one source with several destinations") {
    const auto checkpoint = one("embed", {4, 2});
    const auto worker = manifest{{{"embed", dtype::bf16, {4, 2}}, {"head", dtype::bf16, {4, 2}}}};
    const auto made = record(checkpoint, worker, [](recorder& r) {
        for (const auto& parameter : r.destinations().parameters()) {
            r.source("embed").copy_to(r.destination(parameter.name));
        }
    });
    REQUIRE(made.regions.size() == 2);
    CHECK(made.regions[0].source == made.regions[1].source);
    CHECK(made.regions[0].destination != made.regions[1].destination);
}

}  // namespace
