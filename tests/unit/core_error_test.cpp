// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>

#include <weightwire/core/error.hpp>

namespace {

using namespace weightwire;

TEST_CASE_TEMPLATE(
    "error: every leaf can be caught by itself and by the root, and crosses ranks by its word",
    Leaf, usage_error, data_error, coverage_error, mismatch_error, timeout_error, peer_error,
    protocol_error, session_error, integrity_error, resource_error, unsupported_error,
    cancelled_error, dirty_error) {
    static_assert(std::is_base_of_v<error, Leaf>);
    const error_context context{
        .phase = phase::update, .peer = "http://a:1", .tensor = "w", .rank = 3, .native_code = 7};
    CHECK_THROWS_AS(throw_as(Leaf::word, "text", context), Leaf);
    try {
        throw_as(Leaf::word, "text", context);
    } catch (const error& problem) {
        CHECK(problem.kind() == Leaf::word);
        CHECK(problem.text() == "text");
        CHECK(problem.context().phase == phase::update);
        CHECK(problem.context().peer == "http://a:1");
        CHECK(problem.context().tensor == "w");
        CHECK(problem.context().rank == 3);
        CHECK(problem.context().native_code == 7);
        CHECK(std::string_view{problem.what()}.starts_with(Leaf::word));
    }
}

TEST_CASE("error: a word that is no leaf's becomes a protocol error") {
    CHECK_THROWS_AS(throw_as("strange", "text", {}), protocol_error);
}

TEST_CASE("error: a message names what is set, in one order, and nothing else") {
    const timeout_error full{"no answer within 5 s; look at the worker",
                             {.phase = phase::finish,
                              .peer = "http://127.0.0.1:8000",
                              .tensor = "model.norm.weight",
                              .backend = "ipc",
                              .operation = "recv",
                              .rank = 0,
                              .bytes_done = 3,
                              .bytes_total = 10,
                              .native_code = 110,
                              .native_text = "Connection timed out"}};
    CHECK(std::string{full.what()} ==
          "timeout [phase finish] [backend ipc] [rank 0] [peer http://127.0.0.1:8000] "
          "[tensor model.norm.weight] [bytes 3 of 10]: recv: no answer within 5 s; look at the "
          "worker (code 110, Connection timed out)");
    CHECK(std::string{usage_error{"wrong"}.what()} == "usage: wrong");
    CHECK(std::string{data_error{"wrong", {.native_text = "why"}}.what()} == "data: wrong (why)");
    CHECK(std::string{data_error{"wrong", {.native_code = 2}}.what()} == "data: wrong (code 2)");
}

TEST_CASE("error: the throwing place is kept") {
    const auto here = std::source_location::current();
    const usage_error problem{"x"};
    CHECK(problem.where().line() == here.line() + 1);
    CHECK(std::string_view{problem.where().file_name()}.ends_with("core_error_test.cpp"));
}

TEST_CASE("phase: each has a word of its own") {
    CHECK(to_string(phase::none) == "none");
    CHECK(to_string(phase::probe) == "probe");
    CHECK(to_string(phase::init) == "init");
    CHECK(to_string(phase::start) == "start");
    CHECK(to_string(phase::update) == "update");
    CHECK(to_string(phase::finish) == "finish");
    CHECK(to_string(phase::close) == "close");
    CHECK(to_string(phase::plan) == "plan");
    CHECK(to_string(phase::serve) == "serve");
}

}  // namespace
