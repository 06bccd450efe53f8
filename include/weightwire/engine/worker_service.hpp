#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/engine/query_parameters.hpp>
#include <weightwire/engine/session.hpp>
#include <weightwire/engine/weight_checksums.hpp>
#include <weightwire/engine/worker_metrics.hpp>
#include <weightwire/engine/worker_status.hpp>
#include <weightwire/version.hpp>
#include <weightwire/wire/client_calls.hpp>
#include <weightwire/wire/envelope.hpp>
#include <weightwire/wire/http_message.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/vllm_requests.hpp>

/// @file
/// A worker's HTTP surface without a socket: every route, its statuses and its envelopes.

namespace weightwire {

/// What `/pause` asks the inference loop for.
struct pause_request {
    pause_mode mode = pause_mode::abort;
    bool clear_cache = true;
    std::stop_token stop{};  ///< requested when the client no longer waits
};

/// What the user's inference does at `/pause` and `/resume`. `on_pause` returns when the pause
/// holds; both may throw: `std::invalid_argument` becomes 400, anything else 500.
template <class H>
concept PauseHooks = requires(H& hooks, const pause_request& request) {
    hooks.on_pause(request);
    hooks.on_resume();
};

/// For loops that only look at `paused()`.
struct no_pause_hooks {
    void on_pause(const pause_request&) const noexcept {}
    void on_resume() const noexcept {}
};

/// Limits and times of a service. The body limits are what the service tells trainers; the server
/// in front of it enforces its own, which should be the same.
struct worker_service_options {
    std::uint64_t max_update_body = std::uint64_t{256} << 20U;
    std::uint64_t max_body = std::uint64_t{1} << 20U;
    std::chrono::milliseconds checker_budget{290'000};  ///< for one `/weight_checker`
};

/// Answers requests with vLLM's status codes and envelopes (vLLM wire sections 1.3 to 1.5), and our
/// own trainer's with the native wire.
///
/// `handle` is thread-safe and does not throw for anything that a request can cause. Questions are
/// answered while an update blocks in another thread. The engine is referenced and outlives the
/// service.
template <class Engine, PauseHooks Hooks = no_pause_hooks>
class worker_service {
public:
    explicit worker_service(Engine& engine, worker_service_options options = {})
        requires std::default_initializable<Hooks>
        : worker_service{engine, Hooks{}, options} {}
    worker_service(Engine& engine, Hooks hooks, worker_service_options options = {})
        : engine_{&engine}, options_{options}, hooks_{std::move(hooks)} {}
    worker_service(const worker_service&) = delete;
    worker_service& operator=(const worker_service&) = delete;

    /// Answers one request; blocks as long as the call that it carries.
    [[nodiscard]] http_response handle(const http_request& request) {
        // Counted after the answer: what a client sees in /metrics has been answered.
        const auto index = route_of(request.path);
        auto response = answer(index, request);
        counters_.count(index, response.status);
        return response;
    }

    /// Whether inference should stand still: between `/pause` and `/resume`.
    [[nodiscard]] bool paused() const noexcept { return paused_.load(); }
    [[nodiscard]] Engine& engine() const noexcept { return *engine_; }

private:
    struct route {
        std::string_view path;
        std::string_view method;
        http_response (worker_service::*handler)(const http_request&);
    };
    static constexpr std::size_t route_count = 14;
    /// Apart from the handlers, so that metrics label requests without naming this template. The
    /// last entry stands for every path that is not there.
    static constexpr std::array<std::string_view, route_count + 1> paths{
        "/update_weights",
        "/start_weight_update",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/update_weight_version",
        "/weight_info",
        "/pause",
        "/resume",
        "/is_paused",
        "/get_world_size",
        "/health",
        "/version",
        "/weight_checker",
        "/metrics",
        "other"};

    [[nodiscard]] static const std::array<route, route_count>& routes() {
        using s = worker_service;
        static constexpr std::array<route, route_count> table{{
            {paths[0], "POST", &s::update_weights},
            {paths[1], "POST", &s::start_weight_update},
            {paths[2], "POST", &s::finish_weight_update},
            {paths[3], "POST", &s::init_weight_transfer_engine},
            {paths[4], "POST", &s::update_weight_version},
            {paths[5], "GET", &s::weight_info},
            {paths[6], "POST", &s::pause},
            {paths[7], "POST", &s::resume},
            {paths[8], "GET", &s::is_paused},
            {paths[9], "GET", &s::get_world_size},
            {paths[10], "GET", &s::health},
            {paths[11], "GET", &s::version},
            {paths[12], "POST", &s::weight_checker},
            {paths[13], "GET", &s::metrics},
        }};
        return table;
    }
    [[nodiscard]] static std::size_t route_of(std::string_view path) noexcept {
        const auto found = std::find(paths.begin(), paths.end() - 1, path);
        return static_cast<std::size_t>(found - paths.begin());
    }

    /// Finds the handler. What a handler throws is told as vLLM tells a worker's exception; native
    /// calls catch their own before.
    http_response answer(std::size_t index, const http_request& request) {
        if (index == route_count) {
            return refuse(404, "Not Found");
        }
        const auto& target = routes()[index];
        // An unknown path and a known one with another method are told apart, as vLLM does.
        if (request.method != target.method) {
            return refuse(405, "Method Not Allowed");
        }
        try {
            return (this->*target.handler)(request);
        } catch (const error& cause) {
            return wire::error_response(wire::vllm_http_error(cause));
        } catch (const std::exception& cause) {
            // What a sink or a hook of the user throws: in the words of vLLM's own failing workers.
            return refuse(500,
                          std::string{"Call to collective_rpc method failed: "} + cause.what());
        }
    }

    // The four phases.

    http_response init_weight_transfer_engine(const http_request& request) {
        return by_dialect(
            request, &wire::decode_init, &wire::parse_vllm_init,
            [&](wire::native_init message) {
                return wire::encode(engine_->init(std::move(message), call_of(request)));
            },
            [&](const wire::vllm_init& message) {
                engine_->init(message, call_of(request));
                return said("Weight transfer initialized");
            });
    }
    http_response start_weight_update(const http_request& request) {
        return by_dialect(
            request, &wire::decode_start, &wire::parse_vllm_start,
            [&](const wire::native_start& message) {
                return wire::encode(engine_->start(message, call_of(request)));
            },
            [&](const wire::vllm_start& message) {
                engine_->start(message, call_of(request));
                return said("Weight update started");
            });
    }
    /// The content type decides, so that a native update is never parsed as JSON.
    http_response update_weights(const http_request& request) {
        if (media_type(request.content_type) == wire::native_content_type) {
            return as_native([&] {
                const auto message = wire::decode_update(request.body);
                return wire::encode(engine_->update(message, call_of(request)));
            });
        }
        try {
            engine_->update(parsed_update(request.body), call_of(request));
        } catch (const wire::request_error& cause) {
            if (cause.answer().status < 500) {
                throw;  // no update at all, so the session goes on
            }
            // A trainer that sent a bad list believes that an update has failed: its session must
            // be over here too, or its next start is refused.
            engine_->refused_update(std::current_exception(), call_of(request));
        }
        return ok(said("Weights updated"));
    }
    http_response finish_weight_update(const http_request& request) {
        return by_dialect(
            request, &wire::decode_finish, &wire::parse_vllm_finish,
            [&](const wire::native_finish& message) {
                return wire::encode(engine_->finish(message, call_of(request)));
            },
            [&](const wire::vllm_finish& message) {
                engine_->finish(message, call_of(request));
                return said("Weight update finished");
            });
    }

    // Around them.

    /// A label for weights that came another way; no weight changes.
    http_response update_weight_version(const http_request& request) {
        auto label = wire::parse_update_weight_version(request.body);
        std::string body;
        wire::json_writer out{body};
        out.begin_object().key("success").boolean(true).key("new_version").string(label);
        out.end_object();
        engine_->set_label(std::move(label));
        return ok(std::move(body));
    }
    /// vLLM's member and, beside it, what its opaque string cannot say.
    http_response weight_info(const http_request&) {
        const auto now = engine_->status();
        std::string body;
        wire::json_writer out{body};
        out.begin_object().key("weight_version").string(now.label);
        out.key("weightwire").begin_object().key("version").integer(now.version);
        out.key("dirty").boolean(now.dirty).key("mode").string(engine_->commit_mode_name());
        out.key("epoch").integer(now.epoch).end_object().end_object();
        return ok(std::move(body));
    }
    /// Empty 200; 503 while the weights are a mix, so that a balancer sends nobody here.
    http_response health(const http_request&) {
        const auto now = engine_->status();
        if (now.dirty) {
            return refuse(503, "dirty: the weights are a mix; the last whole version is " +
                                   std::to_string(now.version) + "; send a full update");
        }
        return ok({});
    }
    /// The offer of the native wire; a vLLM client reads `version` alone.
    http_response version(const http_request&) {
        using traits = backend_traits<typename Engine::backend>;
        wire::native_offer offer{.backends = {std::string{traits::wire_name}},
                                 .commit_mode = std::string{engine_->commit_mode_name()},
                                 .max_update_bytes = options_.max_update_body,
                                 .max_body_bytes = options_.max_body};
        if (traits::capabilities.host_memory) {
            offer.memory_kinds.emplace_back("host");
        }
        if (traits::capabilities.device_memory) {
            offer.memory_kinds.emplace_back("cuda");
        }
        return ok(wire::encode_version_reply(version_string, offer));
    }
    http_response get_world_size(const http_request& request) {
        // No data parallelism behind one engine, so the answer is the same; a bad value is not.
        static_cast<void>(detail::query_bool(request.query, "include_dp", true));
        return ok("{\"world_size\":" + std::to_string(engine_->world_size()) + "}");
    }
    http_response metrics(const http_request&) {
        return {.content_type = "text/plain; version=0.0.4; charset=utf-8",
                .body = detail::metrics_text(engine_->status(), paused(), counters_, paths)};
    }

    /// The arguments are query parameters; a body is ignored (vLLM wire section 1.3).
    http_response pause(const http_request& request) {
        const pause_request asked{
            .mode = mode_of(request.query),
            .clear_cache = detail::query_bool(request.query, "clear_cache", true),
            .stop = request.stop};
        return switch_pause(true, "pause", R"({"status":"paused"})",
                            [&] { hooks_.on_pause(asked); });
    }
    http_response resume(const http_request&) {
        return switch_pause(false, "resume", R"({"status":"resumed"})",
                            [&] { hooks_.on_resume(); });
    }
    http_response is_paused(const http_request&) {
        return ok(paused() ? R"({"is_paused":true})" : R"({"is_paused":false})");
    }
    [[nodiscard]] static pause_mode mode_of(std::string_view query) {
        // Deprecated, and the same as mode=wait.
        const bool wait = detail::query_bool(query, "wait_for_inflight_requests", false);
        const auto word = detail::query_value(query, "mode");
        if (!word) {
            return wait ? pause_mode::wait : pause_mode::abort;
        }
        for (const auto mode : {pause_mode::abort, pause_mode::wait, pause_mode::keep}) {
            if (*word == to_string(mode)) {
                return wait ? pause_mode::wait : mode;
            }
        }
        detail::refuse_query("mode", "'abort', 'wait' or 'keep'", *word);
    }
    /// The flag goes first, so that the loop takes no new work while a hook waits for the old.
    template <class Hook>
    http_response switch_pause(bool to, std::string_view verb, std::string_view done, Hook hook) {
        // Never waits: a pause may last as long as the longest request, and a resume that queued
        // behind it would undo the pause the moment it held.
        const std::unique_lock turn{pause_mutex_, std::try_to_lock};
        const auto failed = [&](int status, std::string_view why) {
            return http_response{
                .status = status,
                .body = wire::plain_error_body("Failed to " + std::string{verb} +
                                               " generation: " + std::string{why})};
        };
        if (!turn) {
            return failed(500, "a pause or resume is still in flight; wait for its response");
        }
        const bool before = paused_.exchange(to);
        try {
            hook();
            return ok(std::string{done});
        } catch (const std::invalid_argument& cause) {
            paused_ = before;  // the hook refused, so the loop must not stand still
            return failed(400, cause.what());
        } catch (const std::exception& cause) {
            paused_ = before;
            return failed(500, cause.what());
        }
    }

    /// Reads committed memory through snapshots, so that it may run beside an update. Keeps no
    /// state: the caller holds the baseline.
    http_response weight_checker(const http_request& request) {
        const auto asked = wire::parse_weight_checker(request.body);
        if (asked.action == wire::checker_action::reset) {
            return as_native([&] {
                engine_->reset_weights(call_of(request));
                return std::string{R"({"status":"reset"})"};
            });
        }
        if constexpr (HasSnapshots<typename Engine::sink_type>) {
            return as_native([&] {
                const auto until = deadline::after(options_.checker_budget);
                const auto sums = detail::checksums_of(*engine_, until, request.stop);
                return asked.action == wire::checker_action::checksum
                           ? checksums_body(sums)
                           : comparison_body(detail::mismatches_of(sums, asked.baseline));
            });
        } else {
            return refuse(501, "unsupported: this worker's sink gives no snapshots to read");
        }
    }
    [[nodiscard]] static std::string checksums_body(const detail::weight_checksums& sums) {
        std::string body;
        wire::json_writer out{body};
        out.begin_object().key("checksums").begin_object();
        for (const auto& [key, sum] : sums) {
            out.key(key).string(sum);
        }
        out.end_object().end_object();
        return body;
    }
    [[nodiscard]] static std::string comparison_body(const std::vector<std::string>& mismatches) {
        std::string body;
        wire::json_writer out{body};
        out.begin_object().key("match").boolean(mismatches.empty());
        out.key("mismatches").begin_array();
        for (const auto& key : mismatches) {
            out.string(key);
        }
        out.end_array().end_object();
        return body;
    }

    // Shared by the handlers.

    [[nodiscard]] static http_response ok(std::string body) { return {.body = std::move(body)}; }
    [[nodiscard]] static http_response refuse(int status, std::string_view message) {
        return wire::error_response(wire::make_http_error(status, message));
    }
    [[nodiscard]] static std::string said(std::string_view text) {
        return "{\"message\":\"" + std::string{text} + "\"}";
    }
    [[nodiscard]] static worker_call call_of(const http_request& request) noexcept {
        return {
            .stop = request.stop, .client_waits = request.client_waits, .context = request.context};
    }
    /// A content type without its parameters.
    [[nodiscard]] static std::string_view media_type(std::string_view content_type) noexcept {
        const auto end = content_type.substr(0, content_type.find(';'));
        return end.substr(0, end.find_last_not_of(' ') + 1);
    }

    /// `body()` gives the reply; its errors are told in the native way.
    template <class Body>
    http_response as_native(Body body) {
        try {
            return ok(body());
        } catch (const session_refused& cause) {
            auto told = wire::native_http_error(cause);
            // 409 tells a trainer that it lost the worker; anything else it may mend with init.
            told.status = cause.stale() ? 409 : 500;
            told.type = wire::reason_phrase(told.status);
            return wire::error_response(told);
        } catch (const error& cause) {
            return wire::error_response(wire::native_http_error(cause));
        } catch (const std::exception& cause) {
            return refuse(500, cause.what());
        }
    }

    /// Gives a body to `native` where it is ours, else to `vllm`.
    template <class Decode, class Parse, class Native, class Vllm>
    http_response by_dialect(const http_request& request, Decode decode, Parse parse, Native native,
                             Vllm vllm) {
        auto message = decltype(decode(request.body)){};
        try {
            message = decode(request.body);
        } catch (const error& cause) {
            // What is no message of ours is told in vLLM's words, below.
            if (request.body.find("\"weightwire\"") != std::string_view::npos) {
                return wire::error_response(wire::native_http_error(cause));
            }
        }
        if (message) {
            return as_native([&] { return native(*std::move(message)); });
        }
        return ok(vllm(parse(request.body)));
    }

    /// Parsed once for all rounds that send the same bytes.
    [[nodiscard]] std::shared_ptr<const wire::vllm_update_request> parsed_update(
        std::string_view body) {
        const std::lock_guard lock{cache_mutex_};
        return cache_.parse(body);
    }

    Engine* engine_;  // outlives the service, and is shared with the inference loop
    worker_service_options options_;
    [[no_unique_address]] Hooks hooks_;
    std::atomic<bool> paused_{false};
    std::mutex pause_mutex_;  // held while a hook runs
    detail::request_counters counters_{route_count + 1};
    std::mutex cache_mutex_;  // held while parsing: of two equal bodies at once one is parsed
    wire::vllm_update_cache cache_;
};

}  // namespace weightwire
