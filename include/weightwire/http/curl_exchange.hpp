#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <curl/curl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/concepts/http_client.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>

/// @file
/// One request and its reply over libcurl, as `curl_client` drives it.

namespace weightwire::http::detail {

struct multi_deleter {
    void operator()(CURLM* handle) const noexcept { curl_multi_cleanup(handle); }
};
struct easy_deleter {
    void operator()(CURL* handle) const noexcept { curl_easy_cleanup(handle); }
};
struct slist_deleter {
    void operator()(curl_slist* list) const noexcept { curl_slist_free_all(list); }
};
using multi_handle = std::unique_ptr<CURLM, multi_deleter>;
using easy_handle = std::unique_ptr<CURL, easy_deleter>;
using slist_handle = std::unique_ptr<curl_slist, slist_deleter>;

/// libcurl's own initialization, once for the process and safe from any thread.
/// @throws resource_error it failed.
inline void ensure_curl() {
    static const CURLcode code = curl_global_init(CURL_GLOBAL_DEFAULT);
    if (code != CURLE_OK) {
        throw resource_error{"libcurl cannot start",
                             {.operation = "curl_global_init",
                              .native_code = static_cast<int>(code),
                              .native_text = curl_easy_strerror(code)}};
    }
}

/// Which fault a transfer's failure is. What goes wrong before the request is sent is a matter of
/// names, routes, proxies and certificates; what goes wrong after it, of the reply.
[[nodiscard]] constexpr reply_fault fault_of(CURLcode code, bool sent) noexcept {
    switch (code) {
        case CURLE_OK: return reply_fault::none;
        case CURLE_OPERATION_TIMEDOUT: return reply_fault::timed_out;
        // Also of a repeat, after a kept connection ended without a reply.
        case CURLE_COULDNT_CONNECT:
        case CURLE_COULDNT_RESOLVE_HOST:
        case CURLE_COULDNT_RESOLVE_PROXY: return reply_fault::unreachable;
        case CURLE_GOT_NOTHING:
        case CURLE_SEND_ERROR:
        case CURLE_RECV_ERROR:
        case CURLE_PARTIAL_FILE: return sent ? reply_fault::closed : reply_fault::unreachable;
        default: return sent ? reply_fault::malformed : reply_fault::unreachable;
    }
}

/// The state of one exchange. Lives on the caller's stack, so libcurl's callbacks need no heap and
/// a moved client leaves no pointer behind.
struct curl_exchange {
    CURL* easy = nullptr;
    CURLM* multi = nullptr;
    bool repeatable = false;  ///< the request may be sent a second time
    std::size_t max_reply_bytes = 0;
    std::chrono::milliseconds read_timeout{0};

    http_answer answer{};
    int sendings = 0;              ///< how often the request was about to be sent
    bool refused_repeat = false;   ///< libcurl wanted to send it again
    int socket_code = 0;           ///< `errno` of the last socket that could not be opened
    bool over_limit = false;       ///< the reply is longer than allowed
    std::size_t header_bytes = 0;  ///< of the reply
    char error_text[CURL_ERROR_SIZE] = {};

    /// A reply's headers may be so long; libcurl 7 has no bound of its own on their sum.
    static constexpr std::size_t max_header_bytes = std::size_t{256} << 10U;

    /// Registers the callbacks, once for a handle.
    static void install(CURL* handle) {
        curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, &on_body);
        curl_easy_setopt(handle, CURLOPT_HEADERFUNCTION, &on_header);
        curl_easy_setopt(handle, CURLOPT_PREREQFUNCTION, &on_sending);
        curl_easy_setopt(handle, CURLOPT_OPENSOCKETFUNCTION, &on_socket);
    }

    /// Points the callbacks at this exchange.
    void bind() {
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, this);
        curl_easy_setopt(easy, CURLOPT_HEADERDATA, this);
        curl_easy_setopt(easy, CURLOPT_PREREQDATA, this);
        curl_easy_setopt(easy, CURLOPT_OPENSOCKETDATA, this);
        curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, error_text);
        curl_easy_setopt(easy, CURLOPT_MAXFILESIZE_LARGE, static_cast<curl_off_t>(max_reply_bytes));
    }

    /// Drives the transfer to its end. A transfer that has not ended is removed, which closes its
    /// connection.
    [[nodiscard]] http_answer run(deadline until, const std::stop_token& stop) {
        const forget_error_text at_end{easy};
        const std::stop_callback wake{stop, [this] { curl_multi_wakeup(multi); }};
        if (stop.stop_requested()) {
            return failed(reply_fault::cancelled, "stopped before the request was sent");
        }
        if (until.expired()) {
            return failed(reply_fault::timed_out, "the deadline had passed before the call");
        }
        if (const auto code = curl_multi_add_handle(multi, easy); code != CURLM_OK) {
            return failed(reply_fault::unreachable, curl_multi_strerror(code));
        }
        drive(until, stop);
        curl_multi_remove_handle(multi, easy);
        return std::move(answer);
    }

private:
    /// The handle outlives this exchange, the buffer does not.
    struct forget_error_text {
        CURL* easy;
        ~forget_error_text() { curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, nullptr); }
    };

    void drive(deadline until, const std::stop_token& stop) {
        auto silent_until = silence_limit();
        curl_off_t moved = 0;
        for (;;) {
            int running = 0;
            if (const auto code = curl_multi_perform(multi, &running); code != CURLM_OK) {
                failed(reply_fault::unreachable, curl_multi_strerror(code));
                return;
            }
            if (running == 0) {
                finish();
                return;
            }
            if (const auto now = bytes_moved(); now != moved) {
                moved = now;
                silent_until = silence_limit();
            }
            if (stop.stop_requested()) {
                failed(reply_fault::cancelled, "stopped while " + waiting_for());
                return;
            }
            if (until.expired() || silent_until.expired()) {
                failed(reply_fault::timed_out,
                       std::string{until.expired() ? "the deadline" : "the limit on silence"} +
                           " passed while " + waiting_for());
                return;
            }
            curl_multi_poll(multi, nullptr, 0, std::min(until, silent_until).poll_milliseconds(),
                            nullptr);
        }
    }

    [[nodiscard]] deadline silence_limit() const {
        return read_timeout > std::chrono::milliseconds::zero()
                   ? deadline::after(read_timeout)
                   : deadline::at(deadline::clock::time_point::max());
    }
    [[nodiscard]] curl_off_t bytes_moved() const {
        if (read_timeout == std::chrono::milliseconds::zero()) {
            return 0;
        }
        curl_off_t sent = 0;
        curl_easy_getinfo(easy, CURLINFO_SIZE_UPLOAD_T, &sent);
        return sent + sendings + static_cast<curl_off_t>(header_bytes + answer.body.size());
    }
    [[nodiscard]] std::string waiting_for() const {
        if (sendings == 0) {
            return "connecting";
        }
        return header_bytes == 0 ? "waiting for the reply" : "reading the reply";
    }

    http_answer failed(reply_fault fault, std::string text) {
        answer.status = 0;
        answer.body.clear();
        answer.fault = fault;
        answer.fault_text = std::move(text);
        return answer;
    }

    /// Reads how the transfer ended.
    void finish() {
        int left = 0;
        const auto* const message = curl_multi_info_read(multi, &left);
        const auto code = message != nullptr ? message->data.result : CURLE_GOT_NOTHING;
        if (code == CURLE_OK) {
            long status = 0;
            curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
            answer.status = static_cast<int>(status);
            return;
        }
        if (refused_repeat) {
            failed(reply_fault::closed,
                   "the connection ended before the reply; the request is not sent again");
        } else if (over_limit || code == CURLE_FILESIZE_EXCEEDED) {
            failed(reply_fault::malformed, "the reply is longer than the limit of " +
                                               std::to_string(max_reply_bytes) + " bytes");
        } else if (socket_code == EMFILE || socket_code == ENFILE) {
            failed(reply_fault::unreachable,
                   "this process has no descriptor left for a connection; raise the limit of open "
                   "files (errno " +
                       std::to_string(socket_code) + ")");
        } else if (code == CURLE_PEER_FAILED_VERIFICATION) {
            failed(reply_fault::unreachable,
                   std::string{error_text} +
                       "; use the name that the server's certificate is for, and give the "
                       "certificate of its authority in ca_file");
        } else {
            failed(fault_of(code, sendings > 0),
                   (error_text[0] != '\0' ? error_text : curl_easy_strerror(code)) + remedy(code));
        }
    }

    /// What to do about a connection that could not be made, where that is clear.
    [[nodiscard]] std::string remedy(CURLcode code) const {
        long native = 0;
        curl_easy_getinfo(easy, CURLINFO_OS_ERRNO, &native);
        if (code == CURLE_COULDNT_CONNECT && native == ECONNREFUSED) {
            return "; nothing listens there: start the worker first, or correct the address";
        }
        return code == CURLE_SSL_CONNECT_ERROR
                   ? "; does the server speak https? a worker_server speaks http"
                   : "";
    }

    static std::size_t on_body(char* data, std::size_t size, std::size_t count, void* self) {
        auto& state = *static_cast<curl_exchange*>(self);
        const auto bytes = size * count;
        if (bytes > state.max_reply_bytes - state.answer.body.size()) {
            state.over_limit = true;
            return 0;
        }
        state.answer.body.append(data, bytes);
        return bytes;
    }

    static std::size_t on_header(char*, std::size_t size, std::size_t count, void* self) {
        auto& state = *static_cast<curl_exchange*>(self);
        state.header_bytes += size * count;
        return state.header_bytes > max_header_bytes ? 0 : size * count;
    }

    /// Called before each sending, also before one that libcurl repeats by itself because a reused
    /// connection ended without a reply.
    static int on_sending(void* self, char*, char*, int, int) {
        auto& state = *static_cast<curl_exchange*>(self);
        if (state.sendings >= state.allowed()) {
            state.refused_repeat = true;
            return CURL_PREREQFUNC_ABORT;
        }
        ++state.sendings;
        return CURL_PREREQFUNC_OK;
    }

    /// Opens no connection for a repeat that will be refused, and none that a child process
    /// inherits.
    static curl_socket_t on_socket(void* self, curlsocktype, curl_sockaddr* address) {
        auto& state = *static_cast<curl_exchange*>(self);
        if (state.sendings >= state.allowed()) {
            state.refused_repeat = true;
            return CURL_SOCKET_BAD;
        }
        const int opened =
            ::socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
        state.socket_code = opened < 0 ? errno : 0;
        return opened;
    }

    [[nodiscard]] int allowed() const noexcept { return repeatable ? 2 : 1; }
};

}  // namespace weightwire::http::detail
