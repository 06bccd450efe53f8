// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <string_view>

#include <weightwire/core/error.hpp>
#include <weightwire/sources/safetensors_header.hpp>
#include <weightwire/sources/safetensors_index.hpp>

#include "../support/safetensors_file.hpp"

namespace {

using namespace weightwire;
using test_support::as_bytes;
using test_support::length_field;
using test_support::safetensors_bytes;

safetensors_header parse(std::string_view header, std::size_t data_bytes,
                         const safetensors_limits& limits = {}) {
    return parse_safetensors_header(as_bytes(safetensors_bytes(header, data_bytes)),
                                    "x.safetensors", limits);
}

/// What is said of a file. Every refusal names the file.
std::string refusal_of(std::string_view file, const safetensors_limits& limits = {}) {
    try {
        (void)parse_safetensors_header(as_bytes(file), "x.safetensors", limits);
    } catch (const data_error& problem) {
        CHECK(problem.text().starts_with("x.safetensors: "));
        return problem.what();
    }
    return "nothing is wrong";
}
std::string refusal(std::string_view header, std::size_t data_bytes,
                    const safetensors_limits& limits = {}) {
    return refusal_of(safetensors_bytes(header, data_bytes), limits);
}
/// What is said of a file with this one entry for tensor `w`, and 8 data bytes.
std::string refused_entry(std::string_view entry) {
    return refusal(R"({"w":)" + std::string{entry} + "}", 8);
}

#define CHECK_SAYS(text, ...) CHECK_MESSAGE((text).find(__VA_ARGS__) != std::string::npos, text)

TEST_CASE("safetensors header: entries come by offset, with metadata, whatever the JSON's order") {
    const auto header = parse(R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
        "__metadata__":{"format":"pt","note":"{\"x\":[1]}"},
        "a":{"data_offsets":[0,4],"shape":[],"dtype":"F32"}}   )",
                              16);
    REQUIRE(header.tensors.size() == 2);
    CHECK(header.tensors[0].meta == param_meta{"a", dtype::f32, {}});
    CHECK(header.tensors[1].meta == param_meta{"b", dtype::bf16, {2, 3}});
    CHECK(header.tensors[1].begin == 4);
    CHECK(header.tensors[1].end == 16);
    CHECK(header.metadata.at("format") == "pt");
    CHECK(header.metadata.at("note") == R"({"x":[1]})");
}

TEST_CASE("safetensors header: a file without tensors is one") {
    CHECK(parse("{}", 0).tensors.empty());
    CHECK(parse(R"({"__metadata__":{}})", 0).tensors.empty());
}

TEST_CASE("safetensors header: every dtype of the table is read") {
    for (const auto& row : dtype_table) {
        if (row.safetensors.empty()) {
            continue;
        }
        CAPTURE(std::string{row.safetensors});
        const std::size_t bytes = row.value == dtype::f4_e2m1_x2 ? 4 : row.item_bits;
        const auto header =
            parse(R"({"w":{"dtype":")" + std::string{row.safetensors} +
                      R"(","shape":[2,4],"data_offsets":[0,)" + std::to_string(bytes) + "]}}",
                  bytes);
        REQUIRE(header.tensors.size() == 1);
        CHECK(header.tensors[0].meta.dtype == row.value);
        CHECK(header.tensors[0].meta.shape ==
              (row.value == dtype::f4_e2m1_x2 ? shape{2, 2} : shape{2, 4}));
        CHECK(header.tensors[0].meta.byte_size() == bytes);
    }
}

TEST_CASE("safetensors header: tensors without bytes may share an offset and come by name") {
    const auto header = parse(R"({"z":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},
        "b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
        "y":{"dtype":"U8","shape":[0,9],"data_offsets":[0,0]},
        "e":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})",
                              4);
    std::string order;
    for (const auto& entry : header.tensors) {
        order += entry.meta.name;
    }
    CHECK(order == "yzbe");
}

TEST_CASE("safetensors header: names are taken as they are, escapes and UTF-8 included") {
    const auto header = parse(
        "{\"caf\\u00e9.\\\"q\\\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1);
    CHECK(header.tensors[0].meta.name == "caf\xc3\xa9.\"q\"");
}

TEST_CASE("safetensors header: lengths that cannot be are refused") {
    CHECK_SAYS(refusal_of(""), "fewer than the 8");
    CHECK_SAYS(refusal_of("1234567"), "the file has 7 bytes");
    CHECK_SAYS(refusal_of(length_field(0)), "does not begin with '{'");
    CHECK_SAYS(refusal_of(length_field(3) + "{}"), "it is truncated");
    CHECK_SAYS(refusal_of(length_field(100'000'001) + "{}"), "over the limit of 100000000");
    CHECK_SAYS(refusal_of(length_field(~0ULL) + "{}"), "over the limit");
    CHECK_SAYS(refusal("{}  ", 0, {.header_bytes = 3}), "over the limit of 3");
    CHECK_SAYS(refusal(" {}", 0), "does not begin with '{'");
    CHECK_SAYS(refusal("[]", 0), "does not begin with '{'");
    CHECK_SAYS(refusal("\xef\xbb\xbf{}", 0), "does not begin with '{'");
}

TEST_CASE("safetensors header: what is no JSON is refused, with its place") {
    CHECK_SAYS(refusal("{", 0), "no JSON at its byte");
    CHECK_SAYS(refusal("{}}", 0), "no JSON at its byte 3");
    CHECK_SAYS(refusal("{} {}", 0), "no JSON at its byte");
    CHECK_SAYS(refusal("{\"a\"}", 0), "no JSON at its byte");
    CHECK_SAYS(refusal("{\"\xff\":1}", 0), "no JSON at its byte");
    CHECK_SAYS(refusal("{/**/}", 0), "no JSON at its byte");
    CHECK_SAYS(refusal("{'a':1}", 0), "no JSON at its byte");
    CHECK_SAYS(refusal(std::string_view{"{}\0garbage", 10}, 0), "NUL byte");
    CHECK_SAYS(refusal("{\"" + std::string(100'000, 'a'), 0), "no JSON");
    CHECK(refusal("{\"" + std::string(100'000, 'a'), 0).size() < 1000);
}

TEST_CASE("safetensors header: nesting is refused where it begins, however deep it goes") {
    const std::string bomb(1'000'000, '[');
    CHECK_SAYS(refused_entry(bomb), "[tensor w]");
    CHECK_SAYS(refused_entry(R"({"shape":)" + bomb), "its shape holds or is an array");
    CHECK_SAYS(refused_entry(R"({"dtype":)" + bomb), "its dtype is an array");
    std::string objects = R"({"__metadata__":)";
    for (int i = 0; i < 100'000; ++i) {
        objects += R"({"a":)";
    }
    CHECK_SAYS(refusal(objects, 0), "__metadata__ must map strings to strings");
}

TEST_CASE(
    "safetensors header: an entry is an object with its three keys, each once, and no other") {
    const auto whole = R"("dtype":"U8","shape":[8],"data_offsets":[0,8])";
    CHECK(refused_entry(std::string{"{"} + whole + "}") == "nothing is wrong");
    for (const std::string_view entry : {"1", "-1", "1.5", "null", "true", "\"x\"", "[]"}) {
        CAPTURE(std::string{entry});
        CHECK_SAYS(refused_entry(entry), "no object");
        CHECK_SAYS(refused_entry(entry), "[tensor w]");
    }
    CHECK_SAYS(refused_entry("{}"), "has no dtype");
    CHECK_SAYS(refused_entry(R"({"dtype":"U8","data_offsets":[0,8]})"), "has no shape");
    CHECK_SAYS(refused_entry(R"({"dtype":"U8","shape":[8]})"), "has no data_offsets");
    CHECK_SAYS(refused_entry(std::string{R"({"strides":[1],)"} + whole + "}"),
               "the unknown key 'strides'");
    for (const std::string_view twice :
         {R"("dtype":"U8")", R"("shape":[8])", R"("data_offsets":[0,8])"}) {
        CHECK_SAYS(refused_entry("{" + std::string{whole} + "," + std::string{twice} + "}"),
                   "twice");
    }
}

TEST_CASE("safetensors header: a dtype that is unknown or no string is refused, and quoted") {
    const auto with = [](const std::string& dtype_name) {
        return refused_entry(R"({"shape":[8],"data_offsets":[0,8],"dtype":)" + dtype_name + "}");
    };
    CHECK_SAYS(with(R"("Q8_0")"), "its dtype 'Q8_0' is none");
    CHECK_SAYS(with(R"("u8")"), "its dtype 'u8' is none");
    CHECK_SAYS(with(R"("")"), "its dtype '' is none");
    CHECK_SAYS(with("8"), "its dtype is a number");
    CHECK_SAYS(with("null"), "its dtype is null");
    CHECK_SAYS(with("{}"), "its dtype is an object");
}

TEST_CASE("safetensors header: a shape is an array of at most eight whole numbers below 2^63") {
    const auto with = [](const std::string& extents) {
        return refused_entry(R"({"dtype":"U8","data_offsets":[0,8],"shape":)" + extents + "}");
    };
    CHECK(with("[1,1,1,1,1,1,1,8]") == "nothing is wrong");
    CHECK_SAYS(with("[1,1,1,1,1,1,1,1,8]"), "more than 8 dimensions");
    CHECK_SAYS(with("[-8]"), "a negative number");
    CHECK_SAYS(with("[-0]"), "a negative number");
    CHECK_SAYS(with("[8.0]"), "the number 8.0");
    CHECK_SAYS(with("[8e0]"), "the number 8e0");
    CHECK_SAYS(with("[9223372036854775808]"), "which is 2^63 or more");
    CHECK_SAYS(with("[18446744073709551616]"), "no whole number below 2^64");
    CHECK_SAYS(with("[1e999]"), "no JSON");
    CHECK_SAYS(with("[\"8\"]"), "a string");
    CHECK_SAYS(with("[[8]]"), "an array");
    CHECK_SAYS(with("8"), "where an array of extents belongs");
    CHECK_SAYS(with("null"), "where an array of extents belongs");
}

TEST_CASE(
    "safetensors header: data_offsets are two whole numbers that span what dtype and shape say") {
    const auto with = [](const std::string& offsets) {
        return refused_entry(R"({"dtype":"U8","shape":[8],"data_offsets":)" + offsets + "}");
    };
    CHECK_SAYS(with("[]"), "0 numbers instead of 2");
    CHECK_SAYS(with("[0]"), "1 numbers instead of 2");
    CHECK_SAYS(with("[0,8,16]"), "3 numbers instead of 2");
    CHECK_SAYS(with("[-1,8]"), "a negative number");
    CHECK_SAYS(with("[0,8.5]"), "the number 8.5");
    CHECK_SAYS(with("[0,18446744073709551616]"), "no whole number below 2^64");
    CHECK_SAYS(with("[8,0]"), "do not span the 8 bytes");
    CHECK_SAYS(with("[0,7]"), "do not span the 8 bytes");
    CHECK_SAYS(with("[0,9]"), "do not span the 8 bytes");
    CHECK_SAYS(with("{}"), "an object");
    CHECK_SAYS(with("8"), "where an array of two offsets belongs");
    // Sizes that overflow cannot be made to fit.
    CHECK_SAYS(
        refused_entry(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})"),
        "no whole number of bytes below 2^64");
    CHECK_SAYS(
        refused_entry(R"({"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]})"),
        "no whole number of bytes below 2^64");
    CHECK_SAYS(refused_entry(R"({"dtype":"F6_E2M3","shape":[3],"data_offsets":[0,2]})"),
               "no whole number of bytes");
}

TEST_CASE("safetensors header: an F4 shape that makes no pairs is refused") {
    CHECK_SAYS(refused_entry(R"({"dtype":"F4","shape":[16,1],"data_offsets":[0,8]})"),
               "pairs of 4-bit values");
    CHECK_SAYS(refused_entry(R"({"dtype":"F4","shape":[],"data_offsets":[0,8]})"),
               "pairs of 4-bit values");
    CHECK_SAYS(refused_entry(R"({"dtype":"F4","shape":[8],"data_offsets":[0,8]})"),
               "do not span the 4 bytes of [8] in F4");
}

TEST_CASE(
    "safetensors header: data that is truncated, overlaps, has gaps or is left over is refused, "
    "and named") {
    const auto two = [](const std::string& a, const std::string& b, std::size_t data) {
        return refusal(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
                           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}",
                       data);
    };
    CHECK(two("[0,4]", "[4,8]", 8) == "nothing is wrong");
    CHECK(two("[4,8]", "[0,4]", 8) == "nothing is wrong");
    CHECK_SAYS(two("[0,4]", "[4,8]", 7),
               "[tensor b]: x.safetensors: its data_offsets [4, 8] reach past the 7");
    CHECK_SAYS(two("[0,4]", "[4,8]", 0), "[tensor a]");
    CHECK_SAYS(two("[0,4]", "[3,7]", 7),
               "[tensor b]: x.safetensors: its data begins at byte 3 and overlaps a");
    CHECK_SAYS(two("[0,4]", "[0,4]", 4),
               "[tensor b]: x.safetensors: its data begins at byte 0 and overlaps a");
    CHECK_SAYS(two("[0,4]", "[5,9]", 9),
               "[tensor b]: x.safetensors: there is a gap of 1 bytes before its data, after a");
    CHECK_SAYS(
        two("[1,5]", "[5,9]", 9),
        "[tensor a]: x.safetensors: there is a gap of 1 bytes before its data, after nothing");
    CHECK_SAYS(two("[0,4]", "[4,8]", 11),
               "3 of the 11 data bytes, at the end, belong to no tensor");
    CHECK_SAYS(refusal("{}", 1), "1 of the 1 data bytes");
    CHECK_SAYS(refusal(R"({"e":{"dtype":"U8","shape":[0],"data_offsets":[9,9]}})", 8),
               "reach past");
    CHECK_SAYS(two("[0,4]", "[18446744073709551612,18446744073709551615]", 8), "do not span");
}

TEST_CASE("safetensors header: a tensor or a metadata key twice is refused") {
    CHECK_SAYS(refusal(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                           "a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                       8),
               "[tensor a]: x.safetensors: the header has this tensor twice");
    CHECK_SAYS(refusal(R"({"__metadata__":{},"__metadata__":{}})", 0), "__metadata__ twice");
    CHECK_SAYS(refusal(R"({"__metadata__":{"k":"1","k":"2"}})", 0), "the key 'k' twice");
}

TEST_CASE("safetensors header: metadata maps strings to strings") {
    for (const std::string_view value : {"1", "null", "true", "[]", "{}", "-1", "0.5"}) {
        CAPTURE(std::string{value});
        CHECK_SAYS(refusal(R"({"__metadata__":{"k":)" + std::string{value} + "}}", 0),
                   "must map strings to strings");
        CHECK_SAYS(
            refusal(R"({"__metadata__":)" + std::string{value == "{}" ? "\"x\"" : value} + "}", 0),
            "must map strings to strings");
    }
}

TEST_CASE("safetensors header: limits hold, and a name can be printed") {
    const auto entry = R"(:{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
    const auto named = [&](const std::string& name) { return "{\"" + name + "\"" + entry + "}"; };
    CHECK(refusal(named(std::string(4096, 'n')), 0) == "nothing is wrong");
    CHECK_SAYS(refusal(named(std::string(4097, 'n')), 0), "longer than 4096 bytes");
    CHECK_SAYS(refusal(named(""), 0), "is empty");
    CHECK_SAYS(refusal(named("a\\nb"), 0), "control characters");
    CHECK_SAYS(refusal(named("a\\u0000b"), 0), "control characters");
    const auto two = "{\"a\"" + std::string{entry} + ",\"b\"" + entry + "}";
    CHECK(refusal(two, 0, {.tensors = 2}) == "nothing is wrong");
    CHECK_SAYS(refusal(two, 0, {.tensors = 1}), "more than 1 tensors");
}

TEST_CASE("safetensors header: every prefix of a good file is refused, whatever the cut") {
    const auto file = safetensors_bytes(
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
            "b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}})",
        11);
    CHECK(refusal_of(file) == "nothing is wrong");
    for (std::size_t length = 0; length < file.size(); ++length) {
        CAPTURE(length);
        CHECK(refusal_of(std::string_view{file}.substr(0, length)) != "nothing is wrong");
    }
}

// --- the index

std::string index_refusal(std::string_view text, const safetensors_limits& limits = {}) {
    try {
        (void)parse_safetensors_index(as_bytes(text), "index.json", limits);
    } catch (const data_error& problem) {
        CHECK(problem.text().starts_with("index.json: "));
        return problem.what();
    }
    return "nothing is wrong";
}

TEST_CASE("safetensors index: files come sorted, with each tensor's place") {
    const auto index = parse_safetensors_index(
        as_bytes(R"({"weight_map":{"x":"b.safetensors","y":"a.safetensors","z":"b.safetensors"},
                     "metadata":{"total_size":12,"more":{"total_size":[{"deep":null}],"f":1.5}}})"),
        "index.json");
    CHECK(index.files == std::vector<std::string>{"a.safetensors", "b.safetensors"});
    CHECK(index.shard_of.at("x") == 1);
    CHECK(index.shard_of.at("y") == 0);
    CHECK(index.shard_of.at("z") == 1);
    CHECK(index.total_bytes == std::uint64_t{12});
}

TEST_CASE(
    "safetensors index: a total is optional, and may be a whole number with a fraction's "
    "spelling") {
    const auto total = [](const std::string& value) {
        return parse_safetensors_index(as_bytes(R"({"metadata":{"total_size":)" + value +
                                                R"(},"weight_map":{"x":"a"}})"),
                                       "index.json")
            .total_bytes;
    };
    CHECK(total("12") == std::uint64_t{12});
    CHECK(total("12.0") == std::uint64_t{12});
    CHECK_FALSE(total("12.5").has_value());
    CHECK_FALSE(total("-1").has_value());
    CHECK_FALSE(total("1e300").has_value());
    CHECK_FALSE(total("null").has_value());
    CHECK_FALSE(total("\"12\"").has_value());
}

TEST_CASE("safetensors index: a shard outside the index's folder is refused") {
    for (const std::string_view file : {"/etc/passwd", "../x.safetensors", "a/../../x", "a/..", ".",
                                        "./x", "a//b", "a/", "", "..", "a\\u0000b", "a\\nb"}) {
        CAPTURE(std::string{file});
        const auto text = index_refusal(R"({"weight_map":{"w":")" + std::string{file} + "\"}}");
        CHECK_SAYS(text, "[tensor w]");
        CHECK_SAYS(text, "no path below the folder");
    }
    CHECK(index_refusal(R"({"weight_map":{"w":"..x/y.safetensors"}})") == "nothing is wrong");
}

TEST_CASE("safetensors index: what is no index is refused") {
    CHECK_SAYS(index_refusal(""), "no JSON");
    CHECK_SAYS(index_refusal("[]"), "an array");
    CHECK_SAYS(index_refusal("12"), "a number");
    CHECK_SAYS(index_refusal("{}"), "no weight_map");
    CHECK_SAYS(index_refusal(R"({"metadata":{}})"), "no weight_map");
    CHECK_SAYS(index_refusal(R"({"weight_map":{}})"), "no weight_map, or an empty one");
    CHECK_SAYS(index_refusal(R"({"weight_map":[]})"), "an array");
    CHECK_SAYS(index_refusal(R"({"metadata":1,"weight_map":{"w":"a"}})"), "a number");
    CHECK_SAYS(index_refusal(R"({"weights":{}})"), "unknown key 'weights'");
    CHECK_SAYS(index_refusal(R"({"weight_map":{"w":"a"},"weight_map":{"v":"a"}})"), "twice");
    CHECK_SAYS(index_refusal(R"({"weight_map":{"w":"a","w":"a"}})"), "this tensor twice");
    for (const std::string_view value : {"1", "null", "{}", "[]", "true", "-1", "1.5"}) {
        CAPTURE(std::string{value});
        CHECK_SAYS(index_refusal(R"({"weight_map":{"w":)" + std::string{value} + "}}"),
                   "[tensor w]");
    }
    CHECK_SAYS(index_refusal(std::string_view{"{\"weight_map\":{\"w\":\"a\"}}\0x", 25}), "NUL");
}

TEST_CASE("safetensors index: limits and nesting hold") {
    CHECK_SAYS(index_refusal(R"({"weight_map":{"w":"a"}})", {.header_bytes = 10}),
               "over the limit");
    CHECK_SAYS(index_refusal(R"({"weight_map":{"w":"a","v":"a"}})", {.tensors = 1}),
               "more than 1 tensors");
    CHECK_SAYS(index_refusal(R"({"weight_map":{"w":"a","v":"b"}})", {.files = 1}),
               "more than 1 shards");
    CHECK_SAYS(index_refusal(R"({"metadata":{"a":)" + std::string(1'000'000, '[')),
               "nested deeper than 16");
}

}  // namespace
