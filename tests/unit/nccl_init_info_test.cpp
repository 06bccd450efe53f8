// SPDX-License-Identifier: Apache-2.0

// What vLLM's nccl backend and our own workers are told, against golden files, both ways.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/nccl/init_info.hpp>
#include <weightwire/backends/nccl/transport_message.hpp>
#include <weightwire/concepts/trainer_init_info.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/packing.hpp>
#include <weightwire/wire/vllm_nccl.hpp>
#include <weightwire/wire/vllm_requests.hpp>

namespace {

using namespace weightwire;
using wire::nccl_packing;
using wire::vllm_nccl_form;
using wire::vllm_nccl_init;
using extras = std::vector<std::pair<std::string, wire_value>>;

static_assert(TrainerInitInfo<nccl::trainer_init_info>);

std::string golden(const std::string& name) {
    std::ifstream file{std::string{WEIGHTWIRE_TESTS_DIRECTORY} + "/protocol/golden/nccl/" + name,
                       std::ios::binary};
    REQUIRE_MESSAGE(file.good(), "golden file is missing: " << name);
    std::string text{std::istreambuf_iterator<char>{file}, std::istreambuf_iterator<char>{}};
    REQUIRE(text.ends_with("\n"));
    text.pop_back();
    return text;
}

wire::unique_id golden_id() {
    wire::unique_id id;
    for (std::size_t i = 0; i < id.size(); ++i) {
        id[i] = static_cast<std::byte>(7 * i + 3);
    }
    return id;
}

vllm_nccl_init golden_init() {
    return {.id = golden_id(),
            .store = wire::store_address{"10.0.0.1", 29600},
            .rank_offset = 3,
            .world_size = 5,
            .packing = nccl_packing{.packed = true}};
}

manifest golden_parameters() {
    return manifest{{{"model.layers.0.mlp.down_proj.weight_scale", dtype::f32, {}},
                     {"model.embed_tokens.weight", dtype::bf16, {32, 8}},
                     {"model.layers.0.mlp.down_proj.weight", dtype::f8_e4m3fn, {8, 16}}}};
}
const std::vector<std::size_t> golden_order{1, 2, 0};

nccl::transport_message golden_message() {
    return {.id = golden_id(),
            .nccl_version = 22809,
            .library = "/opt/nccl/libnccl.so.2",
            .settings = {{"NCCL_P2P_DISABLE", "1"}, {"NCCL_SOCKET_IFNAME", "lo"}},
            .layout = {.order = plan::sending_order::by_layer, .call_begins = {0, 17}}};
}

/// The message of the `Error` that `work` throws.
template <class Error, class Work>
std::string refusal(Work&& work) {
    try {
        work();
    } catch (const Error& cause) {
        return cause.what();
    }
    FAIL("nothing was refused");
    return {};
}
std::string refused_init(const std::string& text) {
    return refusal<protocol_error>([&] { (void)wire::decode_nccl_init(text); });
}

std::string replaced(std::string text, std::string_view what, std::string_view by) {
    const auto at = text.find(what);
    REQUIRE_MESSAGE(at != text.npos, "not in the text: " << what);
    return text.replace(at, what.size(), by);
}
bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

TEST_CASE("nccl init_info: each era's form is its golden file, and is read back") {
    const auto init = golden_init();
    CHECK(wire::encode_nccl_init(init, vllm_nccl_form::by_id) == golden("init_info_by_id.json"));
    CHECK(wire::encode_nccl_init(init, vllm_nccl_form::by_store) ==
          golden("init_info_by_store.json"));
    CHECK(wire::encode_nccl_init(init, vllm_nccl_form::packed_by_update) ==
          golden("init_info_packed_by_update.json"));

    const auto by_id = wire::decode_nccl_init(golden("init_info_by_id.json"));
    CHECK(by_id.id == init.id);
    CHECK_FALSE(by_id.store);
    CHECK(by_id.rank_offset == 3);
    CHECK(by_id.world_size == 5);
    CHECK(by_id.packing == init.packing);
    const auto by_store = wire::decode_nccl_init(golden("init_info_by_store.json"));
    CHECK_FALSE(by_store.id);
    CHECK(by_store.store == init.store);
    CHECK(by_store.packing == init.packing);
    const auto oldest = wire::decode_nccl_init(golden("init_info_packed_by_update.json"));
    CHECK(oldest.store == init.store);
    CHECK_FALSE(oldest.packing);
}

TEST_CASE("nccl init_info: a form without what it needs is an error of the caller") {
    CHECK_THROWS_AS((void)wire::encode_nccl_init({}, vllm_nccl_form::by_id), usage_error);
    CHECK_THROWS_AS((void)wire::encode_nccl_init({}, vllm_nccl_form::by_store), usage_error);
}

TEST_CASE("nccl init_info: null is absent, an empty id too, and defaults are vLLM's") {
    const auto read = wire::decode_nccl_init(
        R"({"master_address":"h","master_port":1,"rank_offset":1,"world_size":2,"packed":null,)"
        R"("packed_buffer_size_bytes":null,"packed_num_buffers":null,"nccl_unique_id_b64":""})");
    CHECK(read.store == wire::store_address{"h", 1});
    CHECK_FALSE(read.packing);
    const auto packed = wire::decode_nccl_init(
        R"({"master_address":"h","master_port":1,"rank_offset":1,"world_size":2,"packed":true})");
    CHECK(packed.packing == nccl_packing{true, 1073741824, 2});
    const auto by_id = wire::decode_nccl_init(replaced(
        golden("init_info_by_id.json"), "{", R"({"master_address":null,"master_port":null,)"));
    CHECK(by_id.id == golden_id());
}

TEST_CASE("nccl init_info: what is wrong is named") {
    const auto text = golden("init_info_by_store.json");
    CHECK(contains(refused_init(replaced(text, "{", R"({"backend":1,)")),
                   "unknown member 'backend'"));
    CHECK(contains(
        refused_init(replaced(golden("init_info_by_id.json"), "{", R"({"master_port":1,)")),
        "pass nccl_unique_id_b64 OR master_address/master_port, not both"));
    CHECK(contains(refused_init(R"({"rank_offset":1,"world_size":2})"), "pass nccl_unique_id_b64"));
    CHECK(contains(refused_init(R"({"master_address":"h","rank_offset":1,"world_size":2})"),
                   "both master_address and master_port"));
    CHECK(contains(refused_init(R"({"nccl_unique_id_b64":"AAAA","rank_offset":1,"world_size":2})"),
                   "128"));
    CHECK(contains(refused_init(replaced(text, "29600", "65536")), "$.master_port"));
    CHECK(contains(refused_init(replaced(text, "29600", "0")), "$.master_port"));
    CHECK(contains(refused_init(replaced(text, "10.0.0.1", "")), "$.master_address"));
    CHECK(contains(refused_init(replaced(text, "10.0.0.1", "\\n")), "$.master_address"));
    CHECK(contains(refused_init(replaced(text, "\"rank_offset\":3", "\"rank_offset\":0")),
                   "$.rank_offset"));
    CHECK(contains(refused_init(replaced(text, "\"rank_offset\":3", "\"rank_offset\":5")),
                   "$.rank_offset"));
    CHECK(contains(refused_init(replaced(text, "\"world_size\":5", "\"world_size\":1")),
                   "$.world_size"));
    CHECK(contains(refused_init(replaced(text, "1073741824", "0")), "packed_buffer_size_bytes"));
    CHECK(contains(refused_init(replaced(text, "_buffers\":2", "_buffers\":0")),
                   "packed_num_buffers"));
    CHECK(contains(refused_init(replaced(text, "true", "1")), "$.packed"));
    CHECK(contains(refused_init("[]"), "expected an object"));
}

TEST_CASE("nccl update: each era's body is its golden file, in wire order, and is read back") {
    const auto parameters = golden_parameters();
    const auto packed = wire::nccl_update_bodies(parameters, golden_order, {.packed = true}, true);
    REQUIRE(packed.size() == 2);
    CHECK(packed[update_body_of(vllm_nccl_form::by_id)] == golden("update_packed_at_init.json"));
    CHECK(packed[update_body_of(vllm_nccl_form::by_store)] == golden("update_packed_at_init.json"));
    CHECK(packed[update_body_of(vllm_nccl_form::packed_by_update)] ==
          golden("update_packed_by_update.json"));
    for (const auto& body : wire::nccl_update_bodies(parameters, golden_order, {}, true)) {
        CHECK(body == golden("update_unpacked.json"));
    }
    const auto read = wire::parse_vllm_update(packed[1]).entry(0);
    CHECK(read.parameters[2].shape == shape{1});
    CHECK(wire::packing_of_update(std::nullopt, read.extras) == nccl_packing{.packed = true});
    const auto none = wire::nccl_update_bodies(manifest{}, {}, {.packed = true});
    CHECK(none[0] == R"({"update_info":{"names":[],"dtype_names":[],"shapes":[]}})");
    CHECK(wire::parse_vllm_update(none[1]).entry(0).parameters.size() == 0);
}

TEST_CASE("nccl update: a dtype that torch has not is refused, with the tensor") {
    const manifest parameters{{{"six", dtype::f6_e3m2, {4}}}};
    const std::vector<std::size_t> order{0};
    CHECK(contains(
        refusal<data_error>([&] { (void)wire::nccl_update_bodies(parameters, order, {}); }),
        "[tensor six]"));
}

TEST_CASE("nccl update: packing is the init's, or the call's where the init said nothing") {
    const nccl_packing at_init{true, 100, 3};
    CHECK(wire::packing_of_update(at_init, {}) == at_init);
    CHECK(wire::packing_of_update(std::nullopt, {}) == nccl_packing{});
    const extras all{{"packed", true},
                     {"packed_buffer_size_bytes", std::int64_t{7}},
                     {"packed_num_buffers", std::int64_t{1}},
                     {"is_checkpoint_format", true},
                     {"update_kind", std::string{"dense"}},
                     {"num_updates_list", std::monostate{}}};
    CHECK(wire::packing_of_update(std::nullopt, all) == nccl_packing{true, 7, 1});
    const extras nulls{{"packed", std::monostate{}}, {"packed_num_buffers", std::monostate{}}};
    CHECK(wire::packing_of_update(at_init, nulls) == at_init);
    CHECK(wire::packing_of_update(std::nullopt, nulls) == nccl_packing{});
}

TEST_CASE("nccl update: fields that are unknown, wrong or of another kind of update are refused") {
    const auto wrong = [](const extras& fields, const std::optional<nccl_packing>& at_init = {}) {
        return refusal<protocol_error>([&] { (void)wire::packing_of_update(at_init, fields); });
    };
    CHECK(contains(wrong({{"color", true}}), "unexpected keyword argument 'color'"));
    CHECK(contains(wrong({{"packed", true}}, nccl_packing{}), "argument 'packed'; init_info has"));
    CHECK(contains(wrong({{"packed", std::int64_t{1}}}), "'packed' has to be true or false"));
    CHECK(contains(wrong({{"packed_num_buffers", std::int64_t{-1}}}), "is negative"));
    CHECK(contains(wrong({{"packed", true}, {"packed_num_buffers", std::int64_t{0}}}),
                   "packed_num_buffers has to be"));
    const auto other = [](const extras& fields) {
        return refusal<unsupported_error>([&] { (void)wire::packing_of_update({}, fields); });
    };
    CHECK(contains(other({{"is_checkpoint_format", false}}), "checkpoint names"));
    CHECK(contains(other({{"update_kind", std::string{"sparse_flat"}}}), "sparse"));
    CHECK(contains(other({{"num_updates_list", std::vector<std::int64_t>{1}}}), "sparse"));
}

TEST_CASE("nccl wire parameters: the golden files, and nothing else") {
    const nccl::trainer_init_info info;
    CHECK(info.init_message() == golden("wire_parameters_packed.json"));
    CHECK(nccl::decode_wire_parameters(info.init_message()) == info.wire());
    const nccl::trainer_init_info unpacked{.packed = false};
    CHECK(unpacked.init_message() == golden("wire_parameters_unpacked.json"));
    CHECK(nccl::decode_wire_parameters(unpacked.init_message()) == unpacked.wire());
    for (const auto* text :
         {R"({})", R"([])", R"({"packed":1})", R"({"packed":false,"packed_num_buffers":2})",
          R"({"packed":true,"packed_buffer_size_bytes":1})",
          R"({"packed":true,"packed_buffer_size_bytes":0,"packed_num_buffers":2})",
          R"({"packed":true,"packed_buffer_size_bytes":1,"packed_num_buffers":1025})",
          R"({"packed":true,"packed_buffer_size_bytes":1,"packed_num_buffers":2,"x":1})"}) {
        CAPTURE(text);
        CHECK_THROWS_AS((void)nccl::decode_wire_parameters(text), protocol_error);
    }
}

TEST_CASE("packing parameters: three members, both ways, with bounds whether or not packed") {
    const auto read = [](std::string_view text) {
        const wire::json_document document{text, "wire parameters", phase::init};
        return wire::read_packing(document.root());
    };
    for (const bool packed : {true, false}) {
        const wire::packing_parameters packing{packed, std::uint64_t{1} << 41U, 2};
        CHECK(wire::fault_of_buffers(packing).empty());
        std::string text;
        wire::json_writer out{text};
        out.begin_object();
        wire::write_packing(out, packing);
        out.end_object();
        CHECK(text == std::string{R"({"packed":)"} + (packed ? "true" : "false") +
                          R"(,"packed_buffer_size_bytes":2199023255552,"packed_num_buffers":2})");
        CHECK(read(text) == packing);
        const auto wrong = [&](std::string_view what, std::string_view by) {
            return refusal<protocol_error>([&] { (void)read(replaced(text, what, by)); });
        };
        CHECK(contains(wrong("255552", "255553"), "$: packed_buffer_size_bytes times"));
        CHECK(contains(wrong("2199023255552", "0"), "from 1 to 2^42"));
        CHECK(contains(wrong("buffers\":2", "buffers\":0"), "packed_num_buffers has to be from 1"));
        CHECK(contains(wrong("buffers\":2", "buffers\":1025"), "from 1 to 1024"));
        CHECK(contains(wrong("{", R"({"more":1,)"), "unknown member 'more'"));
        CHECK(contains(wrong(R"(,"packed_num_buffers":2)", ""), "'packed_num_buffers' is missing"));
    }
    CHECK(contains(refusal<protocol_error>([&] { (void)read("[]"); }), "expected an object"));
}

TEST_CASE("nccl init info: a user's values are checked, each with its own words") {
    using info = nccl::trainer_init_info;
    CHECK(fault_of(info{}).empty());
    CHECK(contains(fault_of(info{.rank = -1}), "rank"));
    CHECK(contains(fault_of(info{.device = -1}), "device"));
    CHECK(contains(fault_of(info{.master_port = 65536}), "master_port"));
    CHECK(contains(fault_of(info{.master_port = -1}), "master_port"));
    CHECK(contains(fault_of(info{.master_address = ""}), "master_address"));
    CHECK(contains(fault_of(info{.master_address = "a\nb"}), "master_address"));
    CHECK(fault_of(info{.master_address = "", .meeting = nccl::rendezvous::unique_id}).empty());
    CHECK(contains(fault_of(info{.packed_num_buffers = 0}), "packed_num_buffers"));
    CHECK(contains(fault_of(info{.packed_buffer_size_bytes = 0}), "packed_buffer_size_bytes"));
    CHECK(contains(fault_of(info{.packed_buffer_size_bytes = UINT64_MAX}), "2^42"));
    CHECK(fault_of(info{.packed = false, .packed_num_buffers = 0}).empty());
}

TEST_CASE("nccl init info: a store on loopback is out of another machine's reach") {
    using nccl::store_out_of_reach;
    CHECK(store_out_of_reach("127.0.0.1", "http://10.0.0.2:8000"));
    CHECK(store_out_of_reach("localhost", "http://worker:8000/x"));
    CHECK(store_out_of_reach("127.0.0.1", "http://[fe80::1]:8000"));
    CHECK(store_out_of_reach("127.0.0.1", "http://127.example.com:8000"));
    CHECK_FALSE(store_out_of_reach("127.0.0.1", "http://127.0.0.1:8000/"));
    CHECK_FALSE(store_out_of_reach("127.0.0.1", "http://user@localhost"));
    CHECK_FALSE(store_out_of_reach("127.0.0.1", "http://[::1]:8000"));
    CHECK_FALSE(store_out_of_reach("10.0.0.1", "http://10.0.0.2:8000"));
    CHECK_FALSE(store_out_of_reach("127.0.0.1", "local"));
}

TEST_CASE("nccl transport: the golden file, both ways") {
    const auto message = golden_message();
    CHECK(encode(message) == golden("transport.json"));
    const auto read = nccl::decode_transport_message(golden("transport.json"));
    CHECK(read.id == message.id);
    CHECK(read.nccl_version == message.nccl_version);
    CHECK(read.library == message.library);
    CHECK(read.settings == message.settings);
    CHECK(read.layout == message.layout);
}

TEST_CASE("nccl transport: what is wrong is named") {
    const auto text = golden("transport.json");
    const auto wrong = [&](std::string_view what, std::string_view by) {
        return refusal<protocol_error>(
            [&] { (void)nccl::decode_transport_message(replaced(text, what, by)); });
    };
    CHECK(contains(wrong("{", R"({"more":1,)"), "unknown member 'more'"));
    CHECK(contains(wrong("\"order\"", "\"odder\""), "unknown member 'odder'"));
    CHECK(contains(wrong("by_layer", "backwards"), "found 'backwards'"));
    CHECK(contains(wrong("[0,17]", "[]"), "at least one call"));
    CHECK(contains(wrong("[0,17]", "[1]"), "$.calls[0]"));
    CHECK(contains(wrong("[0,17]", "[0,0]"), "$.calls[1]"));
    CHECK(contains(wrong("[0,17]", "[0,600000]"), "$.calls[1]"));
    CHECK(contains(wrong("NCCL_P2P_DISABLE", "LD_PRELOAD"), "unknown setting 'LD_PRELOAD'"));
    CHECK(contains(wrong("22809", "-1"), "$.nccl_version"));
    CHECK(contains(wrong("\"lo\"", "1"), "NCCL_SOCKET_IFNAME"));
    CHECK(contains(wrong("\"unique_id\":\"", "\"unique_id\":\"A"), "128 bytes"));
}

TEST_CASE("nccl transport: another version or setting is found before anything blocks") {
    const auto message = golden_message();
    CHECK_NOTHROW(nccl::require_agreement(message, 22809, "/usr/lib/x", message.settings));
    const auto differs = [&](int version, const nccl::settings& ours) {
        return refusal<mismatch_error>(
            [&] { nccl::require_agreement(message, version, "/lib/libnccl.so.2", ours); });
    };
    const auto versions = differs(22707, message.settings);
    CHECK(contains(versions, "NCCL 2.28.9 (/opt/nccl/libnccl.so.2)"));
    CHECK(contains(versions, "2.27.7 (/lib/libnccl.so.2)"));
    CHECK(contains(versions, "trainer_init_info::library"));
    CHECK(contains(versions, "nccl::backend{.library}"));
    CHECK(contains(differs(22809, {}), "NCCL_P2P_DISABLE is '1' at the trainer and unset"));
    CHECK(contains(differs(22809, {{"NCCL_P2P_DISABLE", "0"}}), "and '0' at this worker"));
    CHECK(contains(differs(22809, {{"NCCL_CUMEM_ENABLE", "0"}, {"NCCL_P2P_DISABLE", "1"}}),
                   "NCCL_CUMEM_ENABLE is unset at the trainer"));
    // The name of a network device is a machine's own.
    CHECK_NOTHROW(nccl::require_agreement(
        message, 22809, "", {{"NCCL_P2P_DISABLE", "1"}, {"NCCL_SOCKET_IFNAME", "eth0"}}));
}

TEST_CASE("nccl transport: settings come from the environment") {
    ::setenv("NCCL_P2P_LEVEL", "NVL", 1);
    ::setenv("NCCL_DEBUG", "WARN", 1);
    const auto found = nccl::settings_of_environment();
    ::unsetenv("NCCL_P2P_LEVEL");
    ::unsetenv("NCCL_DEBUG");
    CHECK(std::ranges::find(found, std::pair<std::string, std::string>{"NCCL_P2P_LEVEL", "NVL"}) !=
          found.end());
    for (const auto& [name, value] : found) {
        CHECK(name != "NCCL_DEBUG");
    }
}

}  // namespace
