#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/wire/envelope.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/parameter_lists.hpp>

/// @file
/// Bodies that vLLM's Python trainer sends, of every era (vLLM wire sections 1.3 to 1.6, 4.2, 6.2).
///
/// What is wrong with a body as such is vLLM's 400. What is wrong inside `update_info` a worker
/// finds in vLLM, so it is a 500 with vLLM's words.

namespace weightwire::wire {

/// `POST /init_weight_transfer_engine`.
struct vllm_init {
    std::string init_info;  ///< the JSON object as it was sent: the backend reads it
};

/// `POST /start_weight_update`.
struct vllm_start {
    bool is_checkpoint_format = true;  ///< false: names and shapes of the runtime, up to 0.24
};

/// One `update_info` object.
struct vllm_update {
    manifest parameters{};  ///< may be empty: nothing for this worker
    /// The other fields, for the backend, in the order in which they came.
    std::vector<std::pair<std::string, wire_value>> extras{};

    /// The field `name`, or null.
    [[nodiscard]] const wire_value* extra(std::string_view name) const noexcept {
        for (const auto& [key, value] : extras) {
            if (key == name) {
                return &value;
            }
        }
        return nullptr;
    }
};

/// `POST /update_weights`: one entry for all workers, or a list with one a worker.
struct vllm_update_request {
    std::vector<vllm_update> entries{};
    bool per_worker = false;

    /// What concerns worker `index` (`data_parallel_index * (TP * PP) + rank_in_engine`).
    /// @throws request_error the list has no entry for it.
    [[nodiscard]] const vllm_update& entry(std::size_t index) const {
        if (!per_worker) {
            return entries.front();
        }
        if (index >= entries.size()) {
            throw request_error{
                make_http_error(500, "Call to collective_rpc method failed: update_info has " +
                                         std::to_string(entries.size()) +
                                         " entries and none for worker " + std::to_string(index)),
                phase::update};
        }
        return entries[index];
    }
};

/// `POST /finish_weight_update`.
struct vllm_finish {
    std::optional<std::string> weight_version{};
};

/// What `POST /weight_checker` asks for.
enum class checker_action : std::uint8_t { checksum, reset, compare };

/// `POST /weight_checker`.
struct vllm_checker {
    checker_action action = checker_action::checksum;
    std::vector<std::pair<std::string, std::string>> baseline{};  ///< name, checksum
};

namespace detail {

inline constexpr std::size_t longest_version_text = 1024;

/// The body as a document. @throws request_error 400.
[[nodiscard]] inline std::unique_ptr<json_document> vllm_document(std::string_view body,
                                                                  std::string_view what,
                                                                  phase where) {
    try {
        auto document = std::make_unique<json_document>(body, what, where);
        document->root().require_object();
        return document;
    } catch (const protocol_error& cause) {
        throw request_error{make_http_error(400, "Invalid JSON format (" + cause.text() + ")"),
                            where};
    }
}

/// Runs `read`; what it finds wrong becomes `status`, with `prefix` before the text.
template <class Read>
auto as_request_error(int status, std::string_view prefix, phase where, Read&& read) {
    try {
        return read();
    } catch (const request_error&) {
        throw;
    } catch (const error& cause) {
        throw request_error{
            make_http_error(status, std::string{prefix} + cause.text(), cause.context().tensor),
            where};
    }
}

/// The member `name`, present and not null. @throws request_error 400 in vLLM's words.
[[nodiscard]] inline json_value vllm_member(const json_document& document, std::string_view name,
                                            phase where) {
    const auto member = document.root().find(name);
    if (!member || member->is_null()) {
        throw request_error{
            make_http_error(400, "Missing '" + std::string{name} + "' in request body"), where};
    }
    return *member;
}

[[nodiscard]] inline wire_value read_extra(const json_value& value) {
    constexpr auto most = std::numeric_limits<std::int64_t>::max();
    constexpr auto least = std::numeric_limits<std::int64_t>::min();
    switch (value.kind()) {
        case json_kind::null: return std::monostate{};
        case json_kind::boolean: return value.boolean();
        case json_kind::integer:
        case json_kind::natural: return value.integer(least, most);
        case json_kind::real: return value.real();
        case json_kind::string: return std::string{value.string()};
        case json_kind::array: break;
        default: value.fail("an object is no value of an update request");
    }
    std::vector<std::int64_t> list;
    for (const auto item : value.items()) {
        list.push_back(item.integer(least, most));
    }
    return list;
}

[[nodiscard]] inline vllm_update read_update_info(const json_value& info) {
    vllm_update update{.parameters =
                           read_parameter_lists(info, "dtype_names", dtype_spelling::torch)};
    info.each_member([&](std::string_view key, const json_value& value) {
        if (key == "names" || key == "dtype_names" || key == "shapes") {
            return;
        }
        if (key == "ipc_handles" &&
            (value.kind() == json_kind::array || value.kind() == json_kind::object)) {
            value.fail("native handles do not travel over HTTP, send `ipc_handles_pickled`");
        }
        update.extras.emplace_back(std::string{key}, read_extra(value));
    });
    return update;
}

}  // namespace detail

/// @throws request_error 400: not JSON, no `init_info` object, an unknown member.
[[nodiscard]] inline vllm_init parse_vllm_init(std::string_view body) {
    const auto document = detail::vllm_document(body, "init call", phase::init);
    const auto info = detail::vllm_member(*document, "init_info", phase::init);
    return detail::as_request_error(400, "", phase::init, [&] {
        document->root().allow_only({"init_info"});
        info.require_object();
        return vllm_init{std::string{info.raw()}};
    });
}

/// An empty body is the newest Python client's, `{}` ours, `{"is_checkpoint_format":…}` that of
/// 0.21 to 0.24.
/// @throws request_error 400.
[[nodiscard]] inline vllm_start parse_vllm_start(std::string_view body) {
    if (body.empty()) {
        return {};
    }
    const auto document = detail::vllm_document(body, "start call", phase::start);
    return detail::as_request_error(400, "", phase::start, [&] {
        document->root().allow_only({"is_checkpoint_format"});
        const auto format = document->root().find("is_checkpoint_format");
        return vllm_start{!format || format->boolean()};
    });
}

/// Parses and checks all of an update request.
/// @throws request_error 400: not JSON, no `update_info`; 500: something inside it.
[[nodiscard]] inline vllm_update_request parse_vllm_update(std::string_view body) {
    const auto document = detail::vllm_document(body, "update call", phase::update);
    const auto info = detail::vllm_member(*document, "update_info", phase::update);
    detail::as_request_error(400, "", phase::update, [&] {
        document->root().allow_only({"update_info"});
        if (info.kind() != json_kind::array) {
            info.require_object();
        }
    });
    return detail::as_request_error(
        500, "Call to collective_rpc method failed: Invalid update_info: ", phase::update, [&] {
            vllm_update_request request{.per_worker = info.kind() == json_kind::array};
            if (!request.per_worker) {
                request.entries.push_back(detail::read_update_info(info));
                return request;
            }
            for (const auto entry : info.items()) {
                request.entries.push_back(detail::read_update_info(entry));
            }
            return request;
        });
}

/// @throws request_error 400.
[[nodiscard]] inline vllm_finish parse_vllm_finish(std::string_view body) {
    if (body.empty()) {
        return {};
    }
    const auto document = detail::vllm_document(body, "finish call", phase::finish);
    return detail::as_request_error(400, "", phase::finish, [&] {
        document->root().allow_only({"weight_version"});
        const auto version = document->root().find("weight_version");
        vllm_finish finish;
        if (version && !version->is_null()) {
            finish.weight_version = version->string(detail::longest_version_text);
        }
        return finish;
    });
}

/// `{"new_version":…}` of `/update_weight_version`.
/// @throws request_error 400.
[[nodiscard]] inline std::string parse_update_weight_version(std::string_view body) {
    const auto document = detail::vllm_document(body, "update_weight_version call", phase::serve);
    const auto version = detail::vllm_member(*document, "new_version", phase::serve);
    return detail::as_request_error(400, "", phase::serve, [&] {
        document->root().allow_only({"new_version"});
        return std::string{version.string(detail::longest_version_text)};
    });
}

/// `{"action":…,"baseline":{…}}` of `/weight_checker`; `compare` needs a baseline.
/// @throws request_error 400.
[[nodiscard]] inline vllm_checker parse_weight_checker(std::string_view body) {
    const auto document = detail::vllm_document(body, "weight_checker call", phase::serve);
    const auto action = detail::vllm_member(*document, "action", phase::serve);
    return detail::as_request_error(400, "", phase::serve, [&] {
        document->root().allow_only({"action", "baseline"});
        vllm_checker checker;
        const auto word = action.string();
        if (word == "compare") {
            checker.action = checker_action::compare;
        } else if (word == "reset") {
            checker.action = checker_action::reset;
        } else if (word != "checksum") {
            action.fail("expected 'checksum', 'reset' or 'compare', found " +
                        detail::quoted_for_message(word));
        }
        const auto baseline = document->root().find("baseline");
        if (baseline && !baseline->is_null()) {
            baseline->each_member([&](std::string_view name, const json_value& value) {
                checker.baseline.emplace_back(std::string{name}, std::string{value.string()});
            });
        } else if (checker.action == checker_action::compare) {
            document->root().fail("'compare' needs a 'baseline'");
        }
        return checker;
    });
}

/// Keeps the last update request: a trainer sends the same 2.8 MB of names every round, and
/// comparing them takes a tenth of a millisecond where parsing takes ten. One thread at a time.
class vllm_update_cache {
public:
    /// As `parse_vllm_update`; the result of an equal body is handed out again. It stays valid for
    /// whoever holds it.
    /// @throws request_error as `parse_vllm_update`; nothing is kept then.
    [[nodiscard]] std::shared_ptr<const vllm_update_request> parse(std::string_view body) {
        if (request_ == nullptr || body != body_) {
            request_ = nullptr;
            body_.clear();
            auto request = std::make_shared<const vllm_update_request>(parse_vllm_update(body));
            body_ = body;
            request_ = std::move(request);
        }
        return request_;
    }

private:
    std::string body_;
    std::shared_ptr<const vllm_update_request> request_;
};

}  // namespace weightwire::wire
