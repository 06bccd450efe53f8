// SPDX-License-Identifier: Apache-2.0

// The native wire of docs/wire.md: every message against its golden file, both ways. A change to a
// golden file is a change of the wire.

#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include <doctest/doctest.h>

#include <weightwire/wire/envelope.hpp>
#include <weightwire/wire/native.hpp>

namespace {

using namespace weightwire;
using namespace weightwire::wire;

constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t golden_plan_hash = 0x892b56fc122aea2dU;

std::string read_file(const std::string& name) {
    std::ifstream file{std::string{WEIGHTWIRE_TESTS_DIRECTORY} + "/protocol/golden/native/" + name,
                       std::ios::binary};
    REQUIRE_MESSAGE(file.good(), "golden file is missing: " << name);
    return {std::istreambuf_iterator<char>{file}, std::istreambuf_iterator<char>{}};
}

/// A text file's content without its last line end.
std::string golden(const std::string& name) {
    auto text = read_file(name);
    REQUIRE(text.ends_with("\n"));
    text.pop_back();
    return text;
}

manifest golden_parameters() {
    return manifest{{{"model.embed_tokens.weight", dtype::bf16, {32, 8}},
                     {"model.layers.0.mlp.down_proj.weight", dtype::f8_e4m3fn, {8, 16}},
                     {"model.layers.0.mlp.down_proj.weight_scale", dtype::f32, {}},
                     {"mod\xC3\xA8le.\"q\"\\k", dtype::f6_e2m3, {4, 1}}}};
}

native_init golden_init() {
    return {.backend = "ipc",
            .rank_offset = 3,
            .world_size = 5,
            .plan_hash = golden_plan_hash,
            .trainer = 0xab,
            .take_over = true,
            .budget_ms = 60000,
            .parameters = golden_parameters(),
            .wire_parameters = R"({"packed": true,"ring":2})",
            .transport = "{\"handles\":[[1,2],[3,4]],\"note\":\"\xC3\xA9\"}"};
}

/// What `work` throws, as text; fails where it throws nothing or something else.
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

std::string replaced(std::string text, std::string_view what, std::string_view by) {
    const auto at = text.find(what);
    REQUIRE_MESSAGE(at != text.npos, "not in the golden file: " << what);
    return text.replace(at, what.size(), by);
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

/// Every beginning of `body` is refused with one error, or is no native message.
template <class Decode>
void check_truncations(const std::string& body, Decode decode) {
    for (std::size_t length = 0; length < body.size(); ++length) {
        CAPTURE(length);
        bool native = true;
        try {
            native = decode(std::string_view{body}.substr(0, length));
        } catch (const protocol_error& cause) {
            native = false;
            CHECK(std::string_view{cause.what()}.size() < 400);
        }
        CHECK_FALSE(native);
    }
}

}  // namespace

TEST_CASE("docs/wire.md, Hashes: manifest and plan hash are the documented ones") {
    CHECK(golden_parameters().hash() == 0xe6f9790eeda0be30U);
    const auto init = golden_init();
    CHECK(plan_hash(init.backend, init.world_size, init.parameters, init.wire_parameters) ==
          golden_plan_hash);
}

TEST_CASE("docs/wire.md, Hashes: everything both sides must agree on changes the plan hash") {
    const auto parameters = golden_parameters();
    const auto base = plan_hash("ipc", 5, parameters, "{}");
    CHECK(base == plan_hash("ipc", 5, parameters, ""));
    CHECK(base != plan_hash("nccl", 5, parameters, "{}"));
    CHECK(base != plan_hash("ipc", 6, parameters, "{}"));
    CHECK(base != plan_hash("ipc", 5, parameters, "{ }"));
    CHECK(base != plan_hash("ipc", 5, manifest{}, "{}"));
    CHECK(base !=
          plan_hash(
              "ipc", 5,
              manifest{{parameters.parameters().begin(), parameters.parameters().end()}, "draft"},
              "{}"));
}

TEST_CASE("docs/wire.md, Version: the reply equals its golden file both ways") {
    const native_offer offer{.backends = {"ipc", "my-backend"},
                             .memory_kinds = {"host", "cuda"},
                             .commit_mode = "flip",
                             .max_update_bytes = 268435456,
                             .max_body_bytes = 1048576};
    const auto file = golden("version_reply.json");
    CHECK(encode_version_reply("0.1.0", offer) == file);
    std::string version;
    const auto decoded = decode_version_reply(file, version);
    REQUIRE(decoded.has_value());
    CHECK(version == "0.1.0");
    CHECK(decoded->wire == 1);
    CHECK(decoded->backends == offer.backends);
    CHECK(decoded->memory_kinds == offer.memory_kinds);
    CHECK(decoded->commit_mode == "flip");
    CHECK(decoded->max_update_bytes == offer.max_update_bytes);
    CHECK(decoded->max_body_bytes == offer.max_body_bytes);
}

TEST_CASE("docs/wire.md, Version: a vLLM server offers nothing, whatever else it says") {
    std::string version;
    CHECK_FALSE(decode_version_reply(R"({"version":"0.25.0"})", version).has_value());
    CHECK(version == "0.25.0");
    CHECK_FALSE(decode_version_reply(R"({"version":"0.99","commit":"abc"})", version).has_value());
    CHECK(contains(refusal([&] { (void)decode_version_reply("{}", version); }), "'version'"));
}

TEST_CASE("docs/wire.md, Compatibility: another wire version is told, not misread") {
    std::string version;
    const auto offer = decode_version_reply(
        R"({"version":"9","weightwire":{"wire":2,"unheard_of":[1]}})", version);
    REQUIRE(offer.has_value());
    CHECK(offer->wire == 2);
    CHECK(offer->backends.empty());
    const auto text = refusal(
        [] { (void)decode_init(replaced(golden("init_call.json"), "\"wire\":1", "\"wire\":2")); });
    CHECK(contains(text, "$.init_info.weightwire.wire"));
    CHECK(contains(text, "native wire 2"));
}

TEST_CASE("docs/wire.md, Init: the call equals its golden file both ways") {
    const auto file = golden("init_call.json");
    const auto message = golden_init();
    CHECK(encode(message) == file);
    const auto decoded = decode_init(file);
    REQUIRE(decoded.has_value());
    CHECK(decoded->wire == 1);
    CHECK(decoded->backend == message.backend);
    CHECK(decoded->rank_offset == 3);
    CHECK(decoded->world_size == 5);
    CHECK(decoded->plan_hash == golden_plan_hash);
    CHECK(decoded->budget_ms == 60000);
    CHECK(decoded->parameters.set_name() == "model");
    REQUIRE(decoded->parameters.size() == message.parameters.size());
    for (std::size_t i = 0; i < message.parameters.size(); ++i) {
        CHECK(decoded->parameters[i] == message.parameters[i]);
    }
    CHECK(decoded->wire_parameters == message.wire_parameters);
    CHECK(decoded->transport == message.transport);
    CHECK(encode(*decoded) == file);
}

TEST_CASE("docs/wire.md, Init: a vLLM body is no native message") {
    CHECK_FALSE(decode_init(R"({"init_info":{"packed":true}})").has_value());
    CHECK_FALSE(decode_init(R"({"init_info":{}})").has_value());
    CHECK_FALSE(decode_init("{}").has_value());
}

TEST_CASE("docs/wire.md, Init: what the page does not list is refused, with its place") {
    const auto file = golden("init_call.json");
    struct change {
        std::string_view what;
        std::string_view by;
        std::string_view said;
    };
    for (const auto& c : {
             change{"\"budget_ms\":60000", "\"budget_ms\":-1", "$.init_info.weightwire.budget_ms"},
             change{"\"budget_ms\":60000", "\"budget_ms\":1.5", "no 64-bit integer"},
             change{"\"budget_ms\":60000,", "", "'budget_ms' is missing"},
             change{"\"set\":\"model\"", "\"set\":\"model\",\"x\":1", "unknown member 'x'"},
             change{"\"set\":\"model\"", "\"set\":\"a\\nb\"", "$.init_info.weightwire.set"},
             change{"\"set\":\"model\"", "\"set\":\"m\",\"set\":\"m\"", "'set' occurs twice"},
             change{"\"backend\":\"ipc\"", "\"backend\":\"i c\"", "expected a word"},
             change{"\"backend\":\"ipc\"", "\"backend\":7", "expected a string, found 7"},
             change{"\"rank_offset\":3", "\"rank_offset\":5", "from 1 to 4, found 5"},
             change{"\"rank_offset\":3", "\"rank_offset\":0", "from 1 to 4, found 0"},
             change{"\"world_size\":5", "\"world_size\":1", "$.init_info.weightwire.world_size"},
             change{"892b56fc122aea2d", "892B56FC122AEA2D", "16 lower-case"},
             change{"892b56fc122aea2d", "92b56fc122aea2d", "16 lower-case"},
             change{"[32,8]", "[32,-8]", "shapes[0][1]: expected an integer from 0"},
             change{"[32,8]", "[32,18446744073709551616]", "shapes[0][1]"},
             change{"[32,8]", "[9223372036854775807,9223372036854775807]", "shapes[0]: the size"},
             change{"[32,8]", "[1,1,1,1,1,1,1,1,1]", "more than 8 dimensions"},
             change{"[32,8]", "8", "shapes[0]: expected a list"},
             change{"[32,8],", "", "got 3 and 4"},
             change{"\"bfloat16\",", "", "`dtypes` should be of the same size"},
             change{"\"bfloat16\"", "\"half\"", "dtypes[0]: unknown dtype 'half'"},
             change{"\"bfloat16\"", "null", "dtypes[0]: expected a string, found null"},
             change{"\"model.embed_tokens.weight\"", "\"\"", "names[0]: a name is empty"},
             change{"\"model.embed_tokens.weight\"", "\"model.layers.0.mlp.down_proj.weight\"",
                    "occurs twice"},
             change{"\"model.embed_tokens.weight\"", "\"\xFF\"", "ill-formed UTF-8"},
             change{"{\"packed\": true,\"ring\":2}", "[]", "wire_parameters: expected an object"},
             change{"\"transport\":{", "\"transport\":null,\"y\":{", "unknown member 'y'"},
         }) {
        CAPTURE(c.by);
        const auto body = replaced(file, c.what, c.by);
        const auto text = refusal([&] { (void)decode_init(body); });
        CHECK_MESSAGE(contains(text, c.said), text);
        CHECK(contains(text, "[phase init]"));
    }
}

TEST_CASE("docs/wire.md, Init: what the worker would refuse, the trainer refuses to send") {
    auto message = golden_init();
    message.backend = "i c";
    CHECK_THROWS_AS((void)encode(message), usage_error);
    message = golden_init();
    message.wire_parameters = "[1]";
    CHECK_THROWS_AS((void)encode(message), protocol_error);
    message = golden_init();
    message.parameters = manifest{{{"a\nb", dtype::u8, {1}}}};
    CHECK_THROWS_AS((void)encode(message), data_error);
    message.parameters = manifest{{{"a\xFF", dtype::u8, {1}}}};
    CHECK_THROWS_AS((void)encode(message), data_error);
}

TEST_CASE("docs/wire.md, Init: objects left empty travel as empty objects") {
    auto message = golden_init();
    message.wire_parameters.clear();
    message.transport.clear();
    const auto decoded = decode_init(encode(message));
    CHECK(decoded->wire_parameters == "{}");
    CHECK(decoded->transport == "{}");
}

TEST_CASE("docs/wire.md, Init: the reply equals its golden file both ways") {
    const native_init_reply reply{.epoch = 7,
                                  .plan_hash = golden_plan_hash,
                                  .version = 41,
                                  .commit_mode = "copy_in",
                                  .dirty = true};
    const auto file = golden("init_reply.json");
    CHECK(encode(reply) == file);
    const auto decoded = decode_init_reply(file);
    CHECK(decoded.epoch == 7);
    CHECK(decoded.plan_hash == golden_plan_hash);
    CHECK(decoded.version == 41);
    CHECK(decoded.commit_mode == "copy_in");
    CHECK(decoded.dirty);
}

TEST_CASE("docs/wire.md, Start: call and reply equal their golden files both ways") {
    const native_start call{.epoch = 7,
                            .version = 42,
                            .force = true,
                            .partial = false,
                            .budget_ms = 30000,
                            .answer_ms = 7500};
    CHECK(encode(call) == golden("start_call.json"));
    const auto decoded = decode_start(golden("start_call.json"));
    REQUIRE(decoded.has_value());
    CHECK(decoded->epoch == 7);
    CHECK(decoded->version == 42);
    CHECK(decoded->force);
    CHECK_FALSE(decoded->partial);
    CHECK(decoded->budget_ms == 30000);

    CHECK(encode(native_start_reply{.session = largest}) == golden("start_reply.json"));
    CHECK(decode_start_reply(golden("start_reply.json")).session == largest);
}

TEST_CASE("docs/wire.md, Start and Finish: vLLM's empty bodies are no native messages") {
    CHECK_FALSE(decode_start("").has_value());
    CHECK_FALSE(decode_start("{}").has_value());
    CHECK_FALSE(decode_start(R"({"is_checkpoint_format":true})").has_value());
    CHECK_FALSE(decode_finish("").has_value());
    CHECK_FALSE(decode_finish(R"({"weight_version":null})").has_value());
}

TEST_CASE("docs/wire.md, Update: the 64 bytes equal their golden file both ways") {
    const native_update call{.epoch = 7,
                             .session = largest,
                             .plan_hash = golden_plan_hash,
                             .round = 12,
                             .part = 3,
                             .budget_ms = 30000,
                             .first = 260,
                             .count = 5};
    const auto file = read_file("update_call.bin");
    const auto bytes = encode(call);
    CHECK(std::string_view{bytes.data(), bytes.size()} == file);
    const auto decoded = decode_update(file);
    CHECK(decoded.epoch == 7);
    CHECK(decoded.session == largest);
    CHECK(decoded.plan_hash == golden_plan_hash);
    CHECK(decoded.round == 12);
    CHECK(decoded.part == 3);
    CHECK(decoded.budget_ms == 30000);
    CHECK(decoded.first == 260);
    CHECK(decoded.count == 5);
}

TEST_CASE("docs/wire.md, Update: every byte that must have one value is checked") {
    const auto file = read_file("update_call.bin");
    check_truncations(file, [](std::string_view body) {
        (void)decode_update(body);
        return true;
    });
    CHECK_THROWS_AS((void)decode_update(file + '\0'), protocol_error);
    for (const std::size_t at : {0U, 1U, 2U, 3U, 47U}) {
        CAPTURE(at);
        auto body = file;
        body[at] = '\x80';
        CHECK_THROWS_AS((void)decode_update(body), protocol_error);
    }
    auto no_round = file;
    no_round[32] = 0;
    CHECK(contains(refusal([&] { (void)decode_update(no_round); }), "rounds count from 1"));
}

TEST_CASE("docs/wire.md, Update: the reply equals its golden file both ways") {
    const native_update_reply reply{
        .bytes = 647, .began_ns = 123456789012345, .ended_ns = 123456789912345};
    CHECK(encode(reply) == golden("update_reply.json"));
    const auto decoded = decode_update_reply(golden("update_reply.json"));
    CHECK(decoded.bytes == 647);
    CHECK(decoded.began_ns == reply.began_ns);
    CHECK(decoded.ended_ns == reply.ended_ns);
}

TEST_CASE("docs/wire.md, Finish: call and reply equal their golden files both ways") {
    const native_finish call{.epoch = 7,
                             .session = largest,
                             .version = 42,
                             .budget_ms = 30000,
                             .boot_id = "0f8fad5b-d9cb-469f-a165-70867728950e",
                             .commit_before_ns = 123456999999999,
                             .digests = {0, 1, 0x0123456789abcdefU, largest}};
    CHECK(encode(call) == golden("finish_call.json"));
    const auto decoded = decode_finish(golden("finish_call.json"));
    REQUIRE(decoded.has_value());
    CHECK(decoded->epoch == 7);
    CHECK(decoded->session == largest);
    CHECK(decoded->version == 42);
    CHECK(decoded->budget_ms == 30000);
    CHECK(decoded->boot_id == call.boot_id);
    CHECK(decoded->commit_before_ns == call.commit_before_ns);
    CHECK(decoded->digests == call.digests);

    CHECK(encode(native_finish_reply{.version = 42}) == golden("finish_reply.json"));
    CHECK(decode_finish_reply(golden("finish_reply.json")).version == 42);
}

TEST_CASE("docs/wire.md, Finish: a version is a decimal number, digests are whole") {
    const auto file = golden("finish_call.json");
    for (const auto* text :
         {"\"042\"", "\"-1\"", "\"\"", "\"4 2\"", "\"18446744073709551616\"", "42", "null"}) {
        CAPTURE(text);
        const auto body = replaced(file, "\"42\"", text);
        CHECK(contains(refusal([&] { (void)decode_finish(body); }), "$.weight_version"));
    }
    for (const auto* text : {"\"AAAA\"", "\"AAAAAAAAAAA\"", "\"AAAAAAAAAAB=\"", "\"A===\""}) {
        CAPTURE(text);
        const auto at = file.find("\"digests\":") + 10;
        const auto body = file.substr(0, at) + text + "}}";
        CHECK(contains(refusal([&] { (void)decode_finish(body); }), "digests"));
    }
}

TEST_CASE("docs/wire.md: a message that ends anywhere is refused with one error") {
    check_truncations(golden("init_call.json"),
                      [](std::string_view body) { return decode_init(body).has_value(); });
    check_truncations(golden("start_call.json"),
                      [](std::string_view body) { return decode_start(body).has_value(); });
    check_truncations(golden("finish_call.json"),
                      [](std::string_view body) { return decode_finish(body).has_value(); });
    check_truncations(golden("version_reply.json"), [](std::string_view body) {
        std::string version;
        return decode_version_reply(body, version).has_value();
    });
    check_truncations(golden("init_reply.json"), [](std::string_view body) {
        (void)decode_init_reply(body);
        return true;
    });
    check_truncations(golden("start_reply.json"), [](std::string_view body) {
        (void)decode_start_reply(body);
        return true;
    });
    check_truncations(golden("update_reply.json"), [](std::string_view body) {
        (void)decode_update_reply(body);
        return true;
    });
    check_truncations(golden("finish_reply.json"), [](std::string_view body) {
        (void)decode_finish_reply(body);
        return true;
    });
}

TEST_CASE(
    "docs/wire.md, Errors: replies equal their golden files and name the leaf and the tensor") {
    const session_error stale{"epoch 6 is over, this worker is in epoch 7; begin again with init",
                              {.phase = phase::update}};
    CHECK(native_http_error(stale).status == 409);
    CHECK(error_body(native_http_error(stale)) == golden("error_stale.json"));
    const integrity_error differs{"the digest differs",
                                  {.phase = phase::finish, .tensor = "lm_head.weight"}};
    CHECK(native_http_error(differs).status == 500);
    CHECK(error_body(native_http_error(differs)) == golden("error_integrity.json"));
}

TEST_CASE("docs/wire.md, Errors: each leaf has its status") {
    CHECK(native_status("protocol") == 400);
    CHECK(native_status("usage") == 400);
    CHECK(native_status("data") == 400);
    CHECK(native_status("mismatch") == 400);
    CHECK(native_status("session") == 409);
    CHECK(native_status("unsupported") == 501);
    CHECK(native_status("dirty") == 503);
    for (const auto* kind : {"coverage", "timeout", "peer", "integrity", "resource", "cancelled"}) {
        CHECK(native_status(kind) == 500);
    }
}
