#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/wire/http_message.hpp>

/// @file
/// A worker service that only writes down what it was asked: the other end of a client under test.

namespace weightwire::testing {

/// One request as it arrived.
struct recorded_call {
    std::string method;
    std::string target;  ///< path, with `?` and the query where there is one
    std::string content_type;
    std::string body;
    friend bool operator==(const recorded_call&, const recorded_call&) = default;
};

/// Answers every route with what it was told to, or not at all. Thread-safe.
class recording_service {
public:
    /// How long a silent service waits at most, should nobody stop it.
    static constexpr std::chrono::seconds longest_silence{60};

    [[nodiscard]] http_response handle(const http_request& request) {
        std::unique_lock lock{mutex_};
        recorded_call call{.method = std::string{request.method},
                           .target = std::string{request.path},
                           .content_type = std::string{request.content_type},
                           .body = std::string{request.body}};
        if (!request.query.empty()) {
            call.target.append("?").append(request.query);
        }
        calls_.push_back(std::move(call));
        if (silent_ &&
            !changed_.wait_for(lock, request.stop, longest_silence, [this] { return !silent_; })) {
            // As a worker whose update is stopped: it has not done what it was asked.
            return {.status = 503, .body = "{\"error\":\"stopped\"}"};
        }
        return {.status = status_, .body = reply_};
    }

    /// What later requests are answered with.
    void answer_with(int status, std::string body) {
        const std::lock_guard lock{mutex_};
        status_ = status;
        reply_ = std::move(body);
    }
    /// A silent service answers nobody until it speaks again or its request is stopped.
    void set_silent(bool silent) {
        {
            const std::lock_guard lock{mutex_};
            silent_ = silent;
        }
        changed_.notify_all();
    }
    /// The requests so far; forgets them.
    [[nodiscard]] std::vector<recorded_call> take_calls() {
        const std::lock_guard lock{mutex_};
        return std::exchange(calls_, {});
    }

private:
    std::mutex mutex_;
    std::condition_variable_any changed_;
    std::vector<recorded_call> calls_;
    std::string reply_ = "{}";
    int status_ = 200;
    bool silent_ = false;
};

}  // namespace weightwire::testing
