// SPDX-License-Identifier: Apache-2.0

// Bodies in vLLM's form, from any peer: each is read or refused with one error of ours, and an
// update that is read says the same once it is written and read again.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include <weightwire/wire/vllm_requests.hpp>

namespace {

namespace wire = weightwire::wire;

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "json_update_fuzz: %s\n", what);
        std::abort();
    }
}

std::string text_of(double value) {
    char digits[40];
    std::snprintf(digits, sizeof digits, "%.17g", value);
    std::string text{digits};
    return text.find_first_of(".e") == text.npos ? text + ".0" : text;
}

void write_value(wire::json_writer& out, const weightwire::wire_value& value) {
    std::visit(
        [&]<class Value>(const Value& held) {
            if constexpr (std::is_same_v<Value, std::monostate>) {
                out.null();
            } else if constexpr (std::is_same_v<Value, bool>) {
                out.boolean(held);
            } else if constexpr (std::is_same_v<Value, std::int64_t>) {
                out.integer(held);
            } else if constexpr (std::is_same_v<Value, double>) {
                out.raw(text_of(held));
            } else if constexpr (std::is_same_v<Value, std::string>) {
                out.string(held);
            } else {
                out.begin_array();
                for (const auto item : held) {
                    out.integer(item);
                }
                out.end_array();
            }
        },
        value);
}

std::string write(const wire::vllm_update_request& request) {
    std::string body;
    wire::json_writer out{body};
    out.begin_object().key("update_info");
    if (request.per_worker) {
        out.begin_array();
    }
    for (const auto& entry : request.entries) {
        out.begin_object();
        wire::write_parameter_lists(out, entry.parameters, "dtype_names");
        for (const auto& [name, value] : entry.extras) {
            write_value(out.key(name), value);
        }
        out.end_object();
    }
    if (request.per_worker) {
        out.end_array();
    }
    out.end_object();
    return body;
}

template <class Parse>
void parse_only(Parse&& parse) {
    try {
        parse();
    } catch (const wire::request_error& cause) {
        const auto& answer = cause.answer();
        require(answer.status == 400 || answer.status == 500, "an error has another status");
        const auto body = wire::error_body(answer);
        const wire::json_document document{body, "reply", weightwire::phase::none};
        require(!answer.message.empty() && answer.message.size() < 20000,
                "a message is no message");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view body{reinterpret_cast<const char*>(data), size};
    parse_only([&] { (void)wire::parse_vllm_init(body); });
    parse_only([&] { (void)wire::parse_vllm_start(body); });
    parse_only([&] { (void)wire::parse_vllm_finish(body); });
    parse_only([&] { (void)wire::parse_update_weight_version(body); });
    parse_only([&] { (void)wire::parse_weight_checker(body); });
    parse_only([&] {
        const auto request = wire::parse_vllm_update(body);
        const auto written = write(request);
        const auto again = wire::parse_vllm_update(written);
        require(write(again) == written, "an update changes when it is written and read");
        require(again.entries.size() == request.entries.size(), "entries are lost");
        for (std::size_t i = 0; i < again.entries.size(); ++i) {
            require(again.entries[i].extras == request.entries[i].extras, "extras change");
            require(again.entries[i].parameters.hash() == request.entries[i].parameters.hash(),
                    "parameters change");
        }
    });
    return 0;
}
