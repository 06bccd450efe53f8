// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <doctest/doctest.h>

#include <weightwire/wire/vllm_requests.hpp>

namespace {

using namespace weightwire;
using namespace weightwire::wire;
using namespace std::string_literals;

template <class Work>
http_error answer_to(Work&& work) {
    try {
        work();
    } catch (const request_error& cause) {
        CHECK(vllm_http_error(cause).message == cause.answer().message);
        return cause.answer();
    }
    FAIL("nothing was refused");
    return {};
}

http_error update_answer(std::string_view body) {
    return answer_to([&] { (void)parse_vllm_update(body); });
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

const auto dense_2026 =
    R"({"update_info":{"names":["a.weight","b"],"dtype_names":["bfloat16","float32"],"shapes":[[2,3],[]]}})"s;

}  // namespace

TEST_CASE("vllm init: the init_info object is handed on as it was sent") {
    const auto tcp =
        R"({"master_address":"10.0.0.1","master_port":29600,"rank_offset":1,"world_size":5})"s;
    CHECK(parse_vllm_init("{\"init_info\":" + tcp + "}").init_info == tcp);
    CHECK(parse_vllm_init(R"({ "init_info" : { "packed" : null } })").init_info ==
          R"({ "packed" : null })");
    CHECK(parse_vllm_init(R"({"init_info":{}})").init_info == "{}");
}

TEST_CASE("vllm init: refused bodies have vLLM's status and words") {
    const auto answer = [](std::string_view body) {
        return answer_to([&] { (void)parse_vllm_init(body); });
    };
    for (const auto* body : {"", "{", "nonsense", "[]", "7", "\"x\""}) {
        CHECK(answer(body).status == 400);
        CHECK(answer(body).message.starts_with("Invalid JSON format"));
    }
    for (const auto* body : {"{}", R"({"init_info":null})", R"({"other":1})"}) {
        CHECK(answer(body).status == 400);
        CHECK(answer(body).message == "Missing 'init_info' in request body");
    }
    CHECK(answer(R"({"init_info":[]})").status == 400);
    CHECK(contains(answer(R"({"init_info":{},"x":1})").message, "unknown member 'x'"));
    CHECK(contains(answer(R"({"init_info":{"a":1,"a":2}})").message, "occurs twice"));
}

TEST_CASE("vllm start: no body, an empty object and the body of 0.21 to 0.24") {
    CHECK(parse_vllm_start("").is_checkpoint_format);
    CHECK(parse_vllm_start("{}").is_checkpoint_format);
    CHECK(parse_vllm_start(R"({"is_checkpoint_format":true})").is_checkpoint_format);
    CHECK_FALSE(parse_vllm_start(R"({"is_checkpoint_format":false})").is_checkpoint_format);
    for (const auto* body : {" ", "[]", R"({"is_checkpoint_format":1})", R"({"x":1})"}) {
        CHECK(answer_to([&] { (void)parse_vllm_start(body); }).status == 400);
    }
}

TEST_CASE("vllm update: names, dtypes and shapes become a manifest") {
    const auto request = parse_vllm_update(dense_2026);
    CHECK_FALSE(request.per_worker);
    const auto& update = request.entry(5);
    REQUIRE(update.parameters.size() == 2);
    CHECK(update.parameters[0] == param_meta{"a.weight", dtype::bf16, {2, 3}});
    CHECK(update.parameters[1] == param_meta{"b", dtype::f32, {}});
    CHECK(update.extras.empty());
}

TEST_CASE("vllm update: every era's further fields reach the backend with their types") {
    const auto update =
        parse_vllm_update(R"({"update_info":{"packed":false,"names":["a"],"packed_num_buffers":2,)"
                          R"("dtype_names":["half"],"shapes":[[1]],"is_checkpoint_format":true,)"
                          R"("ipc_handles":null,"update_kind":"dense","tensor_sizes":[2,-1],)"
                          R"("num_updates_list":[],"scale":0.5}})")
            .entry(0);
    CHECK(update.parameters[0].dtype == dtype::f16);
    REQUIRE(update.extras.size() == 8);
    CHECK(update.extras[0].first == "packed");
    CHECK(std::get<bool>(*update.extra("packed")) == false);
    CHECK(std::get<std::int64_t>(*update.extra("packed_num_buffers")) == 2);
    CHECK(std::holds_alternative<std::monostate>(*update.extra("ipc_handles")));
    CHECK(std::get<std::string>(*update.extra("update_kind")) == "dense");
    CHECK(std::get<std::vector<std::int64_t>>(*update.extra("tensor_sizes")) ==
          std::vector<std::int64_t>{2, -1});
    CHECK(std::get<std::vector<std::int64_t>>(*update.extra("num_updates_list")).empty());
    CHECK(std::get<double>(*update.extra("scale")) == 0.5);
    CHECK(update.extra("absent") == nullptr);
}

TEST_CASE("vllm update: a list has one entry a worker, an empty entry is nothing for it") {
    const auto request = parse_vllm_update(
        R"({"update_info":[{"names":["a"],"dtype_names":["bool"],"shapes":[[4]]},)"
        R"({"names":[],"dtype_names":[],"shapes":[]}]})");
    CHECK(request.per_worker);
    CHECK(request.entry(0).parameters.size() == 1);
    CHECK(request.entry(1).parameters.size() == 0);
    const auto answer = answer_to([&] { (void)request.entry(2); });
    CHECK(answer.status == 500);
    CHECK(contains(answer.message, "2 entries and none for worker 2"));
}

TEST_CASE("vllm update: a body that is wrong as such is a 400") {
    for (const auto* body : {"", "{", "[]", "null", "{\"update_info\":{\"names\":[\"a\""}) {
        CHECK(update_answer(body).status == 400);
        CHECK(contains(update_answer(body).message, "Invalid JSON format"));
    }
    CHECK(update_answer("{}").message == "Missing 'update_info' in request body");
    CHECK(update_answer(R"({"update_info":null})").status == 400);
    CHECK(update_answer(R"({"update_info":"x"})").status == 400);
    CHECK(contains(update_answer(R"({"update_info":[],"x":1})").message, "unknown member 'x'"));
}

TEST_CASE("vllm update: what is wrong inside is a worker's 500 that names the entry") {
    struct bad {
        std::string_view info;
        std::string_view said;
    };
    for (const auto& c : {
             bad{R"({"dtype_names":[],"shapes":[]})", "'names' is missing"},
             bad{R"({"names":["a"],"shapes":[[]]})", "'dtype_names' is missing"},
             bad{R"({"names":["a","b"],"dtype_names":["bool"],"shapes":[[],[]]})",
                 "`dtype_names` should be of the same size as `names`: got 1 and 2"},
             bad{R"({"names":["a"],"dtype_names":["bool"],"shapes":[[],[],[]]})",
                 "`shapes` should be of the same size as `names`: got 3 and 1"},
             bad{R"({"names":["a"],"dtype_names":["bool"],"shapes":[[-1]]})",
                 "$.update_info.shapes[0][0]: expected an integer from 0"},
             bad{R"({"names":["a"],"dtype_names":["bool"],"shapes":[[4294967296,4294967296]]})",
                 "$.update_info.shapes[0]: the size of [4294967296, 4294967296] in bool"},
             bad{R"({"names":["a"],"dtype_names":["bool"],"shapes":[[1e3]]})", "no 64-bit integer"},
             bad{R"({"names":["a"],"dtype_names":["bool"],"shapes":[["1"]]})", "found a string"},
             bad{R"({"names":["a"],"dtype_names":["torch.bool"],"shapes":[[]]})",
                 "unknown dtype 'torch.bool'"},
             bad{R"({"names":["a"],"dtype_names":["BF16"],"shapes":[[]]})", "unknown dtype"},
             bad{R"({"names":"a","dtype_names":[],"shapes":[]})",
                 "expected a list, found a string"},
             bad{R"({"names":[1],"dtype_names":["bool"],"shapes":[[]]})", "names[0]"},
             bad{R"({"names":["a","a"],"dtype_names":["bool","bool"],"shapes":[[],[]]})",
                 "occurs twice"},
             bad{R"({"names":[],"dtype_names":[],"shapes":[],"x":{}})", "update_info.x: an object"},
             bad{R"({"names":[],"dtype_names":[],"shapes":[],"x":["s"]})", "update_info.x[0]"},
             bad{R"({"names":[],"dtype_names":[],"shapes":[],"x":9223372036854775808})",
                 "9223372036854775808"},
         }) {
        CAPTURE(c.info);
        const auto answer = update_answer("{\"update_info\":" + std::string{c.info} + "}");
        CHECK(answer.status == 500);
        CHECK(answer.message.starts_with("Call to collective_rpc method failed: Invalid "));
        CHECK_MESSAGE(contains(answer.message, c.said), answer.message);
    }
    CHECK(contains(
        update_answer(R"({"update_info":[{"names":[],"dtype_names":[],"shapes":[]},7]})").message,
        "$.update_info[1]: expected an object, found 7"));
    const auto long_name = std::string(4097, 'n');
    CHECK(contains(update_answer("{\"update_info\":{\"names\":[\"" + long_name +
                                 "\"],\"dtype_names\":[\"bool\"],\"shapes\":[[]]}}")
                       .message,
                   "at most 4096 bytes"));
}

TEST_CASE("vllm update: cut at any byte, one clear error") {
    for (std::size_t length = 0; length < dense_2026.size(); ++length) {
        const auto answer = update_answer(std::string_view{dense_2026}.substr(0, length));
        CHECK(answer.status == 400);
        CHECK(answer.message.size() < 300);
    }
}

TEST_CASE("vllm update: invalid UTF-8 and nesting bombs are refused") {
    CHECK(contains(update_answer("{\"update_info\":{\"names\":[\"a\xC3\"]}}").message, "UTF-8"));
    auto bomb = "{\"update_info\":"s + std::string(1'000'000, '[');
    CHECK(contains(update_answer(bomb).message, "nested deeper"));
}

TEST_CASE("vllm update: a body of 20 MB is read") {
    const auto pickle = std::string(20'000'000, 'Q');
    const auto body = R"({"update_info":{"names":["a"],"dtype_names":["bool"],"shapes":[[]],)"
                      R"("ipc_handles_pickled":")" +
                      pickle + "\"}}";
    const auto request = parse_vllm_update(body);
    CHECK(std::get<std::string>(*request.entry(0).extra("ipc_handles_pickled")) == pickle);
}

TEST_CASE("vllm update cache: equal bytes give the same parsed request, other bytes a new one") {
    vllm_update_cache cache;
    const auto first = cache.parse(dense_2026);
    CHECK(cache.parse(std::string{dense_2026}) == first);
    auto other = dense_2026;
    other[other.find("2,3")] = '4';
    const auto second = cache.parse(other);
    CHECK(second != first);
    CHECK(second->entry(0).parameters[0].shape == shape{4, 3});
    CHECK(first->entry(0).parameters[0].shape == shape{2, 3});
    CHECK_THROWS_AS((void)cache.parse("{}"), request_error);
    CHECK_THROWS_AS((void)cache.parse("{}"), request_error);
    CHECK(cache.parse(other)->entry(0).parameters.size() == 2);
}

TEST_CASE("vllm finish: no body, null and a version") {
    CHECK_FALSE(parse_vllm_finish("").weight_version.has_value());
    CHECK_FALSE(parse_vllm_finish("{}").weight_version.has_value());
    CHECK_FALSE(parse_vllm_finish(R"({"weight_version":null})").weight_version.has_value());
    CHECK(parse_vllm_finish(R"({"weight_version":"7"})").weight_version == "7");
    for (const auto* body : {R"({"weight_version":7})", R"({"version":"7"})", "[]"}) {
        CHECK(answer_to([&] { (void)parse_vllm_finish(body); }).status == 400);
    }
}

TEST_CASE("vllm update_weight_version and weight_checker bodies") {
    CHECK(parse_update_weight_version(R"({"new_version":"x"})") == "x");
    for (const auto* body : {"", "{}", R"({"new_version":7})", R"({"new_version":"x","y":1})"}) {
        CHECK(answer_to([&] { (void)parse_update_weight_version(body); }).status == 400);
    }
    CHECK(parse_weight_checker(R"({"action":"checksum"})").action == checker_action::checksum);
    CHECK(parse_weight_checker(R"({"action":"reset","baseline":null})").action ==
          checker_action::reset);
    const auto compare = parse_weight_checker(R"({"action":"compare","baseline":{"a":"00ff"}})");
    CHECK(compare.action == checker_action::compare);
    REQUIRE(compare.baseline.size() == 1);
    CHECK(compare.baseline[0].second == "00ff");
    for (const auto* body :
         {"{}", R"({"action":"x"})", R"({"action":"compare"})",
          R"({"action":"compare","baseline":{"a":1}})", R"({"action":"checksum","z":1})"}) {
        CHECK(answer_to([&] { (void)parse_weight_checker(body); }).status == 400);
    }
}

TEST_CASE("vllm envelope: an exception in the worker is a 500 with vLLM's beginning") {
    const auto answer =
        vllm_http_error(session_error{"start_weight_update must be called before update_weights."});
    CHECK(answer.status == 500);
    CHECK(answer.message ==
          "Call to collective_rpc method failed: session: start_weight_update must be called "
          "before update_weights.");
}
