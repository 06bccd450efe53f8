#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
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
#include <weightwire/engine/worker_pause.hpp>
#include <weightwire/engine/worker_status.hpp>
#include <weightwire/version.hpp>
#include <weightwire/wire/envelope.hpp>
#include <weightwire/wire/http_message.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/vllm_requests.hpp>

/// @file
/// A worker's HTTP surface without a socket: every route, its statuses and its envelopes.

namespace weightwire {

/// Limits and times of a service. The body limits are what the service tells trainers; the server
/// in front of it enforces its own, which should be the same.
struct worker_service_options {
    std::uint64_t max_update_body = std::uint64_t{256} << 20U;  ///< bytes of an update's list
    std::uint64_t max_body = std::uint64_t{1} << 20U;           ///< bytes of any other body
    std::chrono::milliseconds checker_budget{290'000};          ///< for one `/weight_checker`
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
    /// A service whose user looks at `paused()`, or whose hooks need nothing.
    explicit worker_service(Engine& engine, worker_service_options options = {})
        requires std::default_initializable<Hooks>
        : worker_service{engine, Hooks{}, options} {}
    /// @param hooks what is told of `/pause` and `/resume`; kept by value.
    worker_service(Engine& engine, Hooks hooks, worker_service_options options = {})
        : engine_{&engine}, options_{options}, pause_{std::move(hooks)} {}
    worker_service(const worker_service&) = delete;
    worker_service& operator=(const worker_service&) = delete;

    /// Answers one request; blocks as long as the call that it carries.
    /// @param request its views live until this returns. A client that has left is seen through
    /// `stop` and `client_waits`, so that no commit happens behind its back.
    [[nodiscard]] http_response handle(const http_request& request) {
        // Counted after the answer: what a client sees in /metrics has been answered.
        const auto index = route_of(request.path);
        auto response = answer(index, request);
        counters_.count(index, response.status);
        return response;
    }

    /// Whether inference should stand still: between `/pause` and `/resume`. For any thread; costs
    /// an atomic load, so a loop may look before each step.
    [[nodiscard]] bool paused() const noexcept { return pause_.paused(); }
    [[nodiscard]] Engine& engine() const noexcept { return *engine_; }

private:
    /// Where a request goes.
    struct route {
        std::string_view path;
        std::string_view method;
        http_response (worker_service::*handler)(const http_request&);
    };
    static constexpr std::size_t route_count = 15;
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
        "/shutdown_weight_transfer_engine",
        "other"};

    /// The same paths with what answers them. A function, since the handlers are declared below it.
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
            {paths[14], "POST", &s::shutdown_weight_transfer_engine},
        }};
        return table;
    }
    /// Index of the path, whatever the method; `route_count` where there is none.
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

    // The four phases. Each is one route for both wires: a body with our member is ours, any other
    // is vLLM's. The reply is in the form of the call.

    /// Takes the worker, whoever had it: `worker_engine::init` says who is refused.
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
    /// What vLLM's trainers post at their end, from 0.32 on.
    http_response shutdown_weight_transfer_engine(const http_request& request) {
        engine_->shutdown(call_of(request));
        return ok(said("Weight transfer shut down"));
    }
    /// After it a session is open, which the engine ends by itself if nobody goes on.
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
    /// After a 200 inference sees the new weights, after anything else what it saw before the start
    /// (`in_place` excepted).
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

    // Around them: questions, which are answered while a call runs, and switches.

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
    /// What a trainer counts its ranks by before it says init.
    http_response get_world_size(const http_request& request) {
        // No data parallelism behind one engine, so the answer is the same; a bad value is not.
        static_cast<void>(detail::query_bool(request.query, "include_dp", true));
        return ok("{\"world_size\":" + std::to_string(engine_->world_size()) + "}");
    }
    /// Prometheus asks every few seconds: nothing here waits for a call that runs.
    http_response metrics(const http_request&) {
        return {.content_type = "text/plain; version=0.0.4; charset=utf-8",
                .body = detail::metrics_text(engine_->status(), paused(), counters_, paths)};
    }

    /// 400 for a query that means nothing, else what the hook did.
    http_response pause(const http_request& request) {
        return pause_.pause(request.query, request.stop);
    }
    http_response resume(const http_request&) { return pause_.resume(); }
    /// The flag, not the hook: true from the moment a pause was asked for.
    http_response is_paused(const http_request&) {
        return ok(paused() ? R"({"is_paused":true})" : R"({"is_paused":false})");
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
                           ? detail::checksums_body(sums)
                           : detail::comparison_body(detail::mismatches_of(sums, asked.baseline));
            });
        } else {
            return refuse(501, "unsupported: this worker's sink gives no snapshots to read");
        }
    }

    // Shared by the handlers.

    /// JSON, or an empty body.
    [[nodiscard]] static http_response ok(std::string body) { return {.body = std::move(body)}; }
    /// vLLM's error envelope.
    [[nodiscard]] static http_response refuse(int status, std::string_view message) {
        return wire::error_response(wire::make_http_error(status, message));
    }
    /// The reply of vLLM's own routes to a call that has worked; its clients print the text.
    [[nodiscard]] static std::string said(std::string_view text) {
        return "{\"message\":\"" + std::string{text} + "\"}";
    }
    /// How the engine learns that nobody waits any more.
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

    Engine* engine_;                  // outlives the service, and is shared with the inference loop
    worker_service_options options_;  // sizes are what /version offers
    detail::pause_switch<Hooks> pause_;
    detail::request_counters counters_{route_count + 1};
    std::mutex cache_mutex_;  // held while parsing: of two equal bodies at once one is parsed
    wire::vllm_update_cache cache_;
};

}  // namespace weightwire
