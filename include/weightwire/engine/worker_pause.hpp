#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/engine/query_parameters.hpp>
#include <weightwire/wire/client_calls.hpp>
#include <weightwire/wire/envelope.hpp>
#include <weightwire/wire/http_message.hpp>

/// @file
/// `/pause` and `/resume`: whether inference stands still, and how the user's loop is told.

namespace weightwire {

/// What `/pause` asks the inference loop for.
struct pause_request {
    pause_mode mode = pause_mode::abort;  ///< what becomes of the requests that run
    bool clear_cache = true;              ///< whether what the old weights computed is dropped
    std::stop_token stop{};               ///< requested when the client no longer waits
};

/// What the user's inference does at `/pause` and `/resume`. `on_pause` returns when the pause
/// holds; both may throw: `std::invalid_argument` becomes 400, anything else 500. Called on the
/// thread of the request, one at a time.
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

namespace detail {

/// The flag that the inference loop looks at, the hooks, and the answers. Thread-safe.
template <PauseHooks Hooks>
class pause_switch {
public:
    explicit pause_switch(Hooks hooks) : hooks_{std::move(hooks)} {}
    pause_switch(const pause_switch&) = delete;
    pause_switch& operator=(const pause_switch&) = delete;

    [[nodiscard]] bool paused() const noexcept { return paused_.load(); }

    /// The arguments are query parameters; a body is ignored (vLLM wire section 1.3).
    /// @throws wire::request_error a parameter has no such value.
    http_response pause(std::string_view query, std::stop_token stop) {
        const pause_request asked{.mode = mode_of(query),
                                  .clear_cache = query_bool(query, "clear_cache", true),
                                  .stop = std::move(stop)};
        return turn_to(true, "pause", R"({"status":"paused"})", [&] { hooks_.on_pause(asked); });
    }
    /// Without a pause before it, too: who resumes wants inference to run, whatever was.
    http_response resume() {
        return turn_to(false, "resume", R"({"status":"resumed"})", [&] { hooks_.on_resume(); });
    }

private:
    [[nodiscard]] static pause_mode mode_of(std::string_view query) {
        // Deprecated, and the same as mode=wait.
        const bool wait = query_bool(query, "wait_for_inflight_requests", false);
        const auto word = query_value(query, "mode");
        if (!word) {
            return wait ? pause_mode::wait : pause_mode::abort;
        }
        for (const auto mode : {pause_mode::abort, pause_mode::wait, pause_mode::keep}) {
            if (*word == to_string(mode)) {
                return wait ? pause_mode::wait : mode;
            }
        }
        refuse_query("mode", "'abort', 'wait' or 'keep'", *word);
    }

    /// The flag goes first, so that the loop takes no new work while a hook waits for the old.
    template <class Hook>
    http_response turn_to(bool to, std::string_view verb, std::string_view done, Hook hook) {
        // Never waits: a pause may last as long as the longest request, and a resume that queued
        // behind it would undo the pause the moment it held.
        const std::unique_lock turn{mutex_, std::try_to_lock};
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
            return {.body = std::string{done}};
        } catch (const std::invalid_argument& cause) {
            paused_ = before;  // the hook refused, so the loop must not stand still
            return failed(400, cause.what());
        } catch (const std::exception& cause) {
            paused_ = before;
            return failed(500, cause.what());
        }
    }

    [[no_unique_address]] Hooks hooks_;
    std::atomic<bool> paused_{false};
    std::mutex mutex_;  ///< held while a hook runs
};

}  // namespace detail

}  // namespace weightwire
