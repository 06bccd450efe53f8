// SPDX-License-Identifier: Apache-2.0

// What vLLM's `ipc` backend is told in every era: init_info, update bodies, and a vLLM trainer's
// updates as a worker reads them.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <doctest/doctest.h>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/vllm_ipc.hpp>
#include <weightwire/wire/vllm_requests.hpp>

namespace {

using namespace weightwire;
using wire::ipc_handles;
using wire::ipc_tensor;
using wire::vllm_ipc_form;
using extra_fields = std::vector<std::pair<std::string, wire_value>>;

const std::string one_gpu = "483a70e0-d92f-0d9a-9ea7-7078be2a51b9";
const std::vector<std::size_t> sent_order{1, 0, 2};

manifest sent_parameters() {
    return manifest{{{"a", dtype::bf16, {2, 3}}, {"b", dtype::f32, {}}, {"c", dtype::u8, {5}}}};
}

ipc_tensor exported_tensor(dtype type, const shape& extents) {
    return {.extents = extents,
            .strides = contiguous_strides(extents),
            .type = type,
            .handle = std::string(64, 'h'),
            .storage_bytes = 1024,
            .ref_counter = "/none"};
}

ipc_handles unpacked_handles() {
    ipc_handles handles;
    const auto parameters = sent_parameters();
    for (const auto i : sent_order) {
        handles.entries.push_back(
            {{one_gpu, exported_tensor(parameters[i].dtype, parameters[i].shape)}});
    }
    return handles;
}

ipc_handles packed_handles() {
    return {.packed = true, .entries = {{{one_gpu, exported_tensor(dtype::u8, {1024})}}}};
}

std::string base64_of_pickle(const ipc_handles& handles) {
    std::string out;
    const auto pickle = wire::pickle_of(handles, wire::ipc_pickle_form::args);
    wire::append_base64(out, std::as_bytes(std::span{pickle}));
    return out;
}

template <class Error, class Work>
std::string refusal_of(Work&& work) {
    try {
        work();
    } catch (const Error& cause) {
        return cause.what();
    }
    FAIL("nothing was refused");
    return {};
}

bool has(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

std::vector<std::string> bodies_of(const ipc_handles& handles) {
    return wire::ipc_update_bodies(sent_parameters(), sent_order, handles, true);
}

/// A body as our own worker reads it.
wire::vllm_ipc_update read_back(const std::string& body, std::optional<bool> at_init) {
    const auto update = wire::parse_vllm_update(body).entry(0);
    auto read = wire::ipc_update_of(at_init, update.extras);
    wire::require_ipc_update_fits(read, update.parameters);
    return read;
}

}  // namespace

TEST_CASE("vllm ipc init: each era's object, and null is absent") {
    CHECK(wire::encode_ipc_init(true, vllm_ipc_form::packed_at_init) == R"({"packed":true})");
    CHECK(wire::encode_ipc_init(false, vllm_ipc_form::packed_at_init) == R"({"packed":false})");
    CHECK(wire::encode_ipc_init(true, vllm_ipc_form::packed_by_update) == "{}");
    CHECK(wire::encode_ipc_init(false, vllm_ipc_form::callable_pairs) == "{}");
    CHECK(wire::decode_ipc_init(R"({"packed":true})") == true);
    CHECK(wire::decode_ipc_init(R"({"packed":false})") == false);
    CHECK(wire::decode_ipc_init(R"({"packed":null})") == std::nullopt);
    CHECK(wire::decode_ipc_init("{}") == std::nullopt);
    const auto refused = [](std::string_view text) {
        return refusal_of<protocol_error>([&] { (void)wire::decode_ipc_init(text); });
    };
    CHECK(has(refused(R"({"packed":1})"), "$.packed: expected true or false"));
    CHECK(has(refused(R"({"buffer":1})"), "unknown member 'buffer'"));
    CHECK(has(refused("[]"), "expected an object"));
}

TEST_CASE("vllm ipc update: unpacked, the newer servers are told the same and the older pairs") {
    const auto bodies = bodies_of(unpacked_handles());
    REQUIRE(bodies.size() == 2);
    CHECK(wire::ipc_update_body_of(vllm_ipc_form::packed_at_init, false) == 0);
    CHECK(wire::ipc_update_body_of(vllm_ipc_form::packed_by_update, false) == 0);
    CHECK(wire::ipc_update_body_of(vllm_ipc_form::callable_pairs, false) == 1);
    CHECK(bodies[0] == R"({"update_info":{"names":["b","a","c"],)"
                       R"("dtype_names":["float32","bfloat16","uint8"],"shapes":[[],[2,3],[5]],)"
                       R"("ipc_handles_pickled":")" +
                           base64_of_pickle(unpacked_handles()) + R"("}})");
    CHECK(bodies[1].size() > bodies[0].size());
    for (const auto& body : bodies) {
        for (const std::optional<bool> at_init : {std::optional<bool>{}, std::optional{false}}) {
            const auto read = read_back(body, at_init);
            CHECK(read.handles == unpacked_handles());
            CHECK(read.tensor_sizes.empty());
        }
    }
}

TEST_CASE("vllm ipc update: packed, with sizes, and the older servers are told in the call") {
    CHECK(wire::can_pack(vllm_ipc_form::packed_at_init));
    CHECK(wire::can_pack(vllm_ipc_form::packed_by_update));
    CHECK_FALSE(wire::can_pack(vllm_ipc_form::callable_pairs));
    const auto bodies = bodies_of(packed_handles());
    REQUIRE(bodies.size() == 2);
    CHECK(wire::ipc_update_body_of(vllm_ipc_form::packed_at_init, true) == 0);
    CHECK(wire::ipc_update_body_of(vllm_ipc_form::packed_by_update, true) == 1);
    const auto begin = R"({"update_info":{"names":["b","a","c"],)"
                       R"("dtype_names":["float32","bfloat16","uint8"],"shapes":[[1],[2,3],[5]],)"
                       R"("ipc_handles_pickled":")" +
                       base64_of_pickle(packed_handles()) + R"(","tensor_sizes":[4,12,5])";
    CHECK(bodies[0] == begin + "}}");
    CHECK(bodies[1] == begin + R"(,"packed":true}})");
    const std::vector<std::uint64_t> sizes{4, 12, 5};
    CHECK(read_back(bodies[0], true).tensor_sizes == sizes);
    CHECK(read_back(bodies[1], std::nullopt).tensor_sizes == sizes);
    CHECK(read_back(bodies[1], std::nullopt).handles == packed_handles());
    const auto scalars = wire::ipc_update_bodies(sent_parameters(), sent_order, packed_handles());
    CHECK(has(scalars[0], R"("shapes":[[],[2,3],[5]])"));
}

TEST_CASE("vllm ipc update: handles that do not fit the call are an error of the caller") {
    auto handles = unpacked_handles();
    handles.entries.pop_back();
    CHECK(has(refusal_of<usage_error>([&] { (void)bodies_of(handles); }), "one entry for each"));
    handles = packed_handles();
    handles.entries[0][0].second = exported_tensor(dtype::u8, {20});
    handles.entries[0][0].second.storage_bytes = 20;
    CHECK(
        has(refusal_of<usage_error>([&] { (void)bodies_of(handles); }), "larger than the packed"));
    const manifest six{{{"six", dtype::f6_e3m2, {4}}}};
    const std::vector<std::size_t> first{0};
    CHECK(has(refusal_of<data_error>(
                  [&] { (void)wire::ipc_update_bodies(six, first, packed_handles()); }),
              "[tensor six]"));
}

TEST_CASE("vllm ipc update: nulls and fields of older releases mean what they mean in vLLM") {
    const auto pickled = base64_of_pickle(unpacked_handles());
    const extra_fields fields{
        {"ipc_handles", std::monostate{}},  {"ipc_handles_pickled", pickled},
        {"tensor_sizes", std::monostate{}}, {"packed", std::monostate{}},
        {"is_checkpoint_format", true},     {"update_kind", std::string{"dense"}}};
    CHECK(wire::ipc_update_of(false, fields).handles == unpacked_handles());
    CHECK(wire::ipc_update_of(std::nullopt, fields).handles == unpacked_handles());
    const extra_fields sizes_unpacked{{"ipc_handles_pickled", pickled},
                                      {"tensor_sizes", std::vector<std::int64_t>{1}},
                                      {"packed", false}};
    CHECK(wire::ipc_update_of(std::nullopt, sizes_unpacked).tensor_sizes.empty());
}

TEST_CASE("vllm ipc update: fields that are wrong, missing or of another kind are refused") {
    const auto pickled = base64_of_pickle(unpacked_handles());
    const auto packed = base64_of_pickle(packed_handles());
    const auto wrong = [](const extra_fields& fields, std::optional<bool> at_init = {}) {
        return refusal_of<protocol_error>([&] { (void)wire::ipc_update_of(at_init, fields); });
    };
    CHECK(has(wrong({}), "Either `ipc_handles` or `ipc_handles_pickled` must be provided"));
    CHECK(has(wrong({{"ipc_handles_pickled", std::monostate{}}}), "Either `ipc_handles`"));
    CHECK(has(wrong({{"ipc_handles", true}, {"ipc_handles_pickled", pickled}}),
              "Cannot specify both"));
    CHECK(has(wrong({{"ipc_handles_pickled", true}}), "'ipc_handles_pickled' has to be a string"));
    CHECK(has(wrong({{"ipc_handles_pickled", pickled + "="}}), "padded base64"));
    CHECK(has(wrong({{"ipc_handles_pickled", std::string{}}}), "end of text at offset 0"));
    CHECK(has(wrong({{"ipc_handles_pickled", std::string{"AAAA"}}}), "begins with opcode 0x80"));
    CHECK(has(wrong({{"ipc_handles_pickled", pickled}, {"color", true}}), "argument 'color'"));
    CHECK(has(wrong({{"ipc_handles_pickled", pickled}, {"packed", false}}, false),
              "argument 'packed'; init_info has said"));
    CHECK(has(wrong({{"ipc_handles_pickled", pickled}, {"packed", std::int64_t{1}}}),
              "'packed' has to be true or false"));
    CHECK(has(wrong({{"ipc_handles_pickled", pickled}}, true), "has to be one dict, found a list"));
    CHECK(has(wrong({{"ipc_handles_pickled", packed}}, false), "list of dicts, found one dict"));
    CHECK(has(wrong({{"ipc_handles_pickled", packed}}, true),
              "`tensor_sizes` is required when packed=True"));
    CHECK(has(
        wrong({{"ipc_handles_pickled", packed}, {"tensor_sizes", std::vector<std::int64_t>{-1}}},
              true),
        "`tensor_sizes` has a negative one"));
    const auto other = [](const extra_fields& fields) {
        return refusal_of<unsupported_error>([&] { (void)wire::ipc_update_of({}, fields); });
    };
    CHECK(has(other({{"ipc_handles", std::vector<std::int64_t>{}}}), "`ipc_handles_pickled`"));
    CHECK(has(other({{"is_checkpoint_format", false}}), "checkpoint names"));
    CHECK(has(other({{"update_kind", std::string{"sparse_flat"}}}), "dense ones over ipc"));
}

TEST_CASE("vllm ipc update: native handles in a body are refused before they are read") {
    for (const auto* handles : {R"([{"gpu":[1]}])", R"({"gpu":[1]})"}) {
        const auto body = R"({"update_info":{"names":["a"],"dtype_names":["bool"],"shapes":[[1]],)"
                          R"("ipc_handles":)" +
                          std::string{handles} + "}}";
        try {
            (void)wire::parse_vllm_update(body);
            FAIL("they were read");
        } catch (const wire::request_error& cause) {
            CHECK(cause.answer().status == 500);
            CHECK(has(cause.answer().message, "$.update_info.ipc_handles"));
            CHECK(has(cause.answer().message, "send `ipc_handles_pickled`"));
        }
    }
}

TEST_CASE("vllm ipc update: what the handles and the lists say has to be the same") {
    const auto refused = [](const wire::vllm_ipc_update& update) {
        const manifest parameters{{{"a", dtype::bf16, {2, 3}}, {"c", dtype::u8, {5}}}};
        return refusal_of<protocol_error>(
            [&] { wire::require_ipc_update_fits(update, parameters); });
    };
    const auto first = exported_tensor(dtype::bf16, {2, 3});
    const auto entry = [](const ipc_tensor& tensor) { return wire::ipc_entry{{one_gpu, tensor}}; };
    CHECK(has(refused({.handles = {.entries = {entry(first)}}}),
              "`ipc_handles` should be of the same size as `names`: got 1 and 2"));
    auto text =
        refused({.handles = {.entries = {entry(first), entry(exported_tensor(dtype::u8, {6}))}}});
    CHECK(has(text, "[tensor c]"));
    CHECK(has(text, "uint8[6], the lists say uint8[5]"));
    text = refused(
        {.handles = {.entries = {entry(exported_tensor(dtype::f16, {2, 3})), entry(first)}}});
    CHECK(has(text, "[tensor a]"));
    CHECK(has(refused({.handles = packed_handles(), .tensor_sizes = {12}}),
              "`tensor_sizes` should be of the same size as `names`: got 1 and 2"));
    CHECK(has(refused({.handles = packed_handles(), .tensor_sizes = {12, 6}}),
              "`tensor_sizes` says 6 bytes, dtype and shape make 5"));
    for (const auto& buffer : {exported_tensor(dtype::u8, {16}), exported_tensor(dtype::i8, {1024}),
                               exported_tensor(dtype::u8, {32, 32})}) {
        const ipc_handles handles{.packed = true, .entries = {entry(buffer)}};
        CHECK(has(refused({.handles = handles, .tensor_sizes = {12, 5}}),
                  "contiguous uint8 tensor of at least 17 bytes"));
    }
}

TEST_CASE("vllm ipc update: a large model's pickle and sizes pass through the request reader") {
    constexpr std::size_t count = 40'000;
    std::vector<param_meta> list;
    std::vector<std::size_t> order;
    ipc_handles handles;
    for (std::size_t i = 0; i < count; ++i) {
        list.push_back({"model.layers." + std::to_string(i) + ".weight", dtype::bf16, {8, 8}});
        order.push_back(i);
        auto tensor = exported_tensor(dtype::bf16, {8, 8});
        tensor.handle = std::to_string(i);
        tensor.handle.resize(64, '.');
        tensor.ref_counter = "/counter_" + std::to_string(i);
        tensor.event[i % 64] = static_cast<std::byte>(i % 255);
        handles.entries.push_back({{one_gpu, tensor}});
    }
    const manifest parameters{std::move(list)};
    const auto body = wire::ipc_update_bodies(parameters, order, handles)[0];
    CHECK(body.size() > std::size_t{8} << 20U);
    CHECK(read_back(body, false).handles == handles);
    auto buffer = exported_tensor(dtype::u8, {1 << 30});
    buffer.storage_bytes = std::uint64_t{1} << 30U;
    const ipc_handles one_buffer{.packed = true, .entries = {{{one_gpu, buffer}}}};
    const auto packed = wire::ipc_update_bodies(parameters, order, one_buffer)[0];
    CHECK(read_back(packed, true).tensor_sizes == std::vector<std::uint64_t>(count, 128));
}
