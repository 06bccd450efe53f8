// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <weightwire/wire/base64.hpp>
#include <weightwire/wire/envelope.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>

namespace {

using namespace weightwire;
using namespace weightwire::wire;
using namespace std::string_literals;

template <class Work>
std::string refusal(Work&& work) {
    try {
        work();
    } catch (const protocol_error& cause) {
        return cause.what();
    }
    FAIL("nothing was refused");
    return {};
}

std::string refusal_of(std::string_view text, const json_limits& limits = {}) {
    return refusal([&] { const json_document document{text, "text", phase::none, limits}; });
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

std::string text_of(std::span<const std::byte> bytes) {
    std::string out;
    append_base64(out, bytes);
    return out;
}

}  // namespace

TEST_CASE("json: every kind of value is read as what it is") {
    const json_document document{
        R"( {"a":null,"b":true,"c":-5,"d":18446744073709551615,"e":1.5,"f":"x\u00e9\n","g":[[],[1]],"h":{}} )",
        "text", phase::none};
    const auto root = document.root();
    CHECK(root.at("a").is_null());
    CHECK(root.at("b").boolean());
    CHECK(root.at("c").integer(-5, 5) == -5);
    CHECK(root.at("d").natural() == std::numeric_limits<std::uint64_t>::max());
    CHECK(root.at("e").real() == 1.5);
    CHECK(root.at("f").string() == "x\xC3\xA9\n");
    CHECK(root.at("g").count() == 2);
    CHECK(root.at("g").raw() == "[[],[1]]");
    CHECK(root.at("h").raw() == "{}");
    CHECK_FALSE(root.find("i").has_value());
}

TEST_CASE("json: a nested object keeps its spelling") {
    const auto text = R"({"a":[{ "x" : 1.50, "y":[ 1e3 ] }],"b":1})"s;
    const json_document document{text, "text", phase::none};
    for (const auto item : document.root().at("a").items()) {
        CHECK(item.raw() == R"({ "x" : 1.50, "y":[ 1e3 ] })");
    }
}

TEST_CASE("json: a value of another type is refused with its path, its kind and the phase") {
    const json_document document{R"({"a":[0,{"b c":["x"]}]})", "init call", phase::init};
    std::vector<json_value> values;
    for (const auto item : document.root().at("a").items()) {
        values.push_back(item);
    }
    const auto inner = values[1].at("b c");
    CHECK(refusal([&] { (void)inner.boolean(); }) ==
          "protocol [phase init]: init call: $.a[1].b c: expected true or false, found a list");
    CHECK(contains(refusal([&] { (void)inner.at("z"); }), "expected an object, found a list"));
    CHECK(contains(refusal([&] { (void)document.root().at("z"); }), "'z' is missing"));
    CHECK(contains(refusal([&] { (void)(*inner.items().begin()).natural(); }),
                   "$.a[1].b c[0]: expected an integer"));
    CHECK(contains(refusal([&] { (void)document.root().string(); }), "$: expected a string"));
    CHECK(contains(refusal([&] { (void)document.root().at("a").string(); }), "$.a: "));
}

TEST_CASE("json: integers that do not fit are refused, never wrapped or rounded") {
    const json_document document{
        R"([9223372036854775808,-9223372036854775808,-9223372036854775809,18446744073709551616,1.0,-1])",
        "text", phase::none};
    constexpr auto least = std::numeric_limits<std::int64_t>::min();
    constexpr auto most = std::numeric_limits<std::int64_t>::max();
    std::vector<json_value> values;
    for (const auto item : document.root().items()) {
        values.push_back(item);
    }
    CHECK(contains(refusal([&] { (void)values[0].integer(least, most); }), "9223372036854775808"));
    CHECK(values[1].integer(least, most) == least);
    for (const std::size_t i : {2U, 3U, 4U}) {
        CHECK_THROWS_AS((void)values[i].integer(least, most), protocol_error);
        CHECK_THROWS_AS((void)values[i].natural(), protocol_error);
    }
    CHECK(contains(refusal([&] { (void)values[5].natural(); }), "found -1"));
}

TEST_CASE("json: a text that is none gives one short error that names the byte") {
    for (const auto& text : {""s,
                             " "s,
                             "{"s,
                             "}"s,
                             "[1,]"s,
                             "{\"a\"}"s,
                             "{\"a\":}"s,
                             "{a:1}"s,
                             "nul"s,
                             "01"s,
                             "+1"s,
                             "NaN"s,
                             "'a'"s,
                             "\"\\x\""s,
                             "\"\n\""s,
                             "// c\n1"s,
                             "{}{}"s,
                             "{} x"s,
                             "\xEF\xBB\xBF"s,
                             "1e999"s,
                             "\"\\ud800\""s,
                             "{}\0"s,
                             "{}\0{}"s,
                             "[\0]"s,
                             "\"\xC0\x80\""s,
                             "\"\xED\xA0\x80\""s}) {
        CAPTURE(text);
        const auto said = refusal_of(text);
        CHECK(said.size() < 250);
        CHECK((contains(said, "not JSON at byte") || contains(said, "something follows")));
    }
}

TEST_CASE("json: an error deep in a text names the place that was reached") {
    CHECK(contains(refusal_of(R"({"a":{"b":[1,2,{"c":nul)"), "$.a.b[2].c: it is not JSON"));
}

TEST_CASE("json: a member named twice is refused, in small and in large objects") {
    CHECK(contains(refusal_of(R"({"a":{"x":1,"y":2,"x":3}})"), "$.a: the member 'x' occurs twice"));
    CHECK(contains(refusal_of(R"({"a":1,"\u0061":2})"), "occurs twice"));
    std::string large = "{";
    for (int i = 0; i < 1000; ++i) {
        large += "\"k" + std::to_string(i) + "\":{},";
    }
    CHECK(contains(refusal_of(large + "\"k7\":0}"), "'k7' occurs twice"));
    const json_document document{large + "\"z\":0}", "text", phase::none};
    CHECK(document.root().at("z").natural() == 0);
}

TEST_CASE("json: nesting is limited, however deep the bomb") {
    const json_limits limits{.max_depth = 3};
    const json_document document{"[[[1]]]", "text", phase::none, limits};
    CHECK(contains(refusal_of("[[[[1]]]]", limits), "nested deeper than 3"));
    CHECK(contains(refusal_of(std::string(10'000'000, '[')), "nested deeper than 16"));
    std::string objects;
    for (int i = 0; i < 100'000; ++i) {
        objects += "{\"a\":";
    }
    CHECK(contains(refusal_of(objects), "nested deeper than 16"));
}

TEST_CASE("json: length, number of values and length of strings are limited") {
    CHECK(
        contains(refusal_of("[1,2,3]", {.max_bytes = 6}), "7 bytes are more than the limit of 6"));
    CHECK(contains(refusal_of("[1,2,3]", {.max_nodes = 3}), "more than 3 values"));
    const json_document document{"[1,2,3]", "text", phase::none, {.max_nodes = 4}};
    CHECK(contains(refusal_of(R"(["abcd"])", {.max_string_bytes = 3}), "longer than 3 bytes"));
    CHECK(contains(refusal_of(R"({"abcd":1})", {.max_string_bytes = 3}), "longer than 3 bytes"));
}

TEST_CASE("json: a huge name from a peer is cut in messages") {
    const auto name = std::string(100'000, 'n');
    const auto said = refusal_of("{\"" + name + "\":1,\"" + name + "\":2}");
    CHECK(said.size() < 250);
    const auto text = "{\"" + name + "\":[\"x\"]}";
    const json_document document{text, "text", phase::none};
    CHECK(refusal([&] { (void)document.root().at(name).boolean(); }).size() < 250);
}

TEST_CASE("json: what is written reads back as the same text") {
    std::string all;
    for (int c = 0; c < 128; ++c) {
        all += static_cast<char>(c);
    }
    all += "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\xEF\xBF\xBF\xF4\x8F\xBF\xBF";
    std::string out;
    json_writer{out}
        .begin_object()
        .key(all)
        .begin_array()
        .string(all)
        .integer(std::numeric_limits<std::int64_t>::min())
        .integer(std::numeric_limits<std::uint64_t>::max())
        .boolean(false)
        .null()
        .begin_object()
        .end_object()
        .raw("[]")
        .end_array()
        .key("last")
        .boolean(true)
        .end_object();
    const json_document document{out, "text", phase::none};
    std::vector<json_value> values;
    for (const auto item : document.root().at(all).items()) {
        values.push_back(item);
    }
    REQUIRE(values.size() == 7);
    CHECK(values[0].string() == all);
    CHECK(values[1].integer(values[1].integer(std::numeric_limits<std::int64_t>::min(), 0), 0) ==
          std::numeric_limits<std::int64_t>::min());
    CHECK(values[2].natural() == std::numeric_limits<std::uint64_t>::max());
    CHECK(document.root().at("last").boolean());
}

TEST_CASE("json: text that is no UTF-8 is refused in names and replaced in messages") {
    for (const auto& bad : {"\xFF"s, "a\x80"s, "\xC0\x80"s, "\xC3"s, "\xE0\x80\x80"s,
                            "\xED\xA0\x80"s, "\xF0\x80\x80\x80"s, "\xF4\x90\x80\x80"s, "\xF5"s}) {
        std::string out;
        CHECK_THROWS_AS(append_json_string(out, bad), data_error);
        out.clear();
        append_json_string(out, bad + "z", bad_utf8::replace);
        const json_document document{out, "text", phase::none};
        CHECK(contains(document.root().string(), "\xEF\xBF\xBD"));
        CHECK(document.root().string().ends_with("z"));
    }
}

TEST_CASE("base64: RFC 4648 section 10") {
    const auto bytes = [](std::string_view text) { return std::as_bytes(std::span{text}); };
    CHECK(text_of(bytes("")) == "");
    CHECK(text_of(bytes("f")) == "Zg==");
    CHECK(text_of(bytes("fo")) == "Zm8=");
    CHECK(text_of(bytes("foo")) == "Zm9v");
    CHECK(text_of(bytes("foob")) == "Zm9vYg==");
    CHECK(text_of(bytes("fooba")) == "Zm9vYmE=");
    CHECK(text_of(bytes("foobar")) == "Zm9vYmFy");
    for (const std::string_view text : {"", "f", "fo", "foo", "foob", "fooba", "foobar"}) {
        const auto decoded = decode_base64(text_of(bytes(text)));
        REQUIRE(decoded.has_value());
        CHECK(std::ranges::equal(*decoded, bytes(text)));
    }
}

TEST_CASE("base64: a second spelling of the same bytes is refused") {
    for (const auto* text : {"Z", "Zg", "Zg=", "Zh==", "Zm9=", "Zm9v=", "=",
                             "====", "Zg==Zg==", "Zm9v\n", "Zm9-", "Z===", "Zm 9", "Z=8="}) {
        CAPTURE(text);
        CHECK_FALSE(decode_base64(text).has_value());
    }
}

TEST_CASE("envelopes: both forms of vLLM, safe for whatever a message quotes") {
    CHECK(
        error_body(make_http_error(400, "Missing 'init_info' in request body")) ==
        R"({"error":{"message":"Missing 'init_info' in request body","type":"Bad Request","param":null,"code":400}})");
    CHECK(error_body(make_http_error(500, "a\"b\xFF", "t")) ==
          "{\"error\":{\"message\":\"a\\\"b\xEF\xBF\xBD\",\"type\":\"Internal Server Error\","
          "\"param\":\"t\",\"code\":500}}");
    CHECK(plain_error_body("no") == R"({"error":"no"})");
    const auto response = error_response(make_http_error(404, "x"));
    CHECK(response.status == 404);
    CHECK(response.content_type == "application/json");
}
