// SPDX-License-Identifier: Apache-2.0

// What strangers say to a worker's port: whatever segments the bytes come in, each request, and the
// refusal that ends a connection, is the same; and no more memory is taken than the limits say.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/http/request_reader.hpp>

namespace {

using namespace weightwire::http;
using weightwire::deadline;

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "http_request_fuzz: %s\n", what);
        std::abort();
    }
}

/// Hands out `bytes`, at most `step` at once, and then hangs up.
struct script {
    std::string_view bytes;
    std::size_t step;

    detail::read_result receive(std::span<char> to, deadline, std::size_t& count) {
        require(!to.empty(), "the reader reads into nothing");
        count = std::min({step, bytes.size(), to.size()});
        std::memcpy(to.data(), bytes.data(), count);
        bytes.remove_prefix(count);
        return count == 0 ? detail::read_result::ended : detail::read_result::data;
    }
    bool send(std::string_view reply, deadline) const {
        require(reply == "HTTP/1.1 100 Continue\r\n\r\n", "the reader says what it may not");
        return true;
    }
};

/// What the server would see.
struct outcome {
    int status = 0;
    bool keeps_alive = false;
    std::string text;
    friend bool operator==(const outcome&, const outcome&) = default;
};

void require_sound(const weightwire::http_request& request, const server_options& options) {
    require(request.path.starts_with('/'), "a request's target is no path");
    require(request.path.find('?') == std::string_view::npos, "a path holds its query");
    const auto limit =
        carries_parameters(request.path) ? options.max_update_body : options.max_body;
    require(request.body.size() <= limit, "a body is over its limit");
    require(options.token.empty() || request.path == "/health" ||
                detail::is_authorized(request.authorization, options.token),
            "a request without the token is let in");
}

std::vector<outcome> read_all(std::string_view bytes, std::size_t step,
                              const server_options& options) {
    // Beside a body's limit: the bytes of one read, and the growth of a string.
    constexpr std::size_t slack = std::size_t{128} << 10U;
    detail::basic_request_reader reader{script{bytes, step}, options};
    std::vector<outcome> all;
    for (bool keeps_alive = true; keeps_alive;) {
        const auto got = reader.receive();
        require(reader.body_memory() <= 2 * options.max_update_body + slack,
                "the reader takes more memory than its limits say");
        auto& seen = all.emplace_back();
        seen.status = got.status;
        if (!got.is_ready()) {
            require(got.text.empty() == (got.status == 0),
                    "a refusal without words, or words for "
                    "nobody");
            require(got.status == 0 || (got.status >= 400 && got.status < 600),
                    "a refusal is no error");
            seen.text = got.text;
            return all;
        }
        const auto request = reader.request();
        require_sound(request, options);
        keeps_alive = seen.keeps_alive = reader.keeps_alive();
        for (const auto part : {request.method, request.path, request.query, request.authorization,
                                request.content_type, request.body}) {
            seen.text.append(part).append("|");
        }
        require(all.size() <= bytes.size(), "requests are made of nothing");
    }
    return all;
}

/// Whether the headers were read and said no: then segments have no say.
bool refused_by_headers(const outcome& last) {
    return last.status == 401 || last.status == 417 || last.status == 501;
}

/// The same requests, and then the same end. Only where a request could not be right any more may
/// the first fault that is seen differ: too long or not valid, or that the client hung up.
void require_alike(const std::vector<outcome>& a, const std::vector<outcome>& b) {
    require(a.size() == b.size() && std::equal(a.begin(), a.end() - 1, b.begin()),
            "segments change what a client said");
    require((a.back().status == 200) == (b.back().status == 200) &&
                (a.back().status != 200 || a.back() == b.back()),
            "segments change what a client said last");
    require(
        a.back() == b.back() || (!refused_by_headers(a.back()) && !refused_by_headers(b.back())),
        "segments change why a client is refused");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    // The first byte chooses the segments, and whether a token is asked for.
    if (size == 0) {
        return 0;
    }
    const std::string_view bytes{reinterpret_cast<const char*>(data) + 1, size - 1};
    const auto step = static_cast<std::size_t>(data[0]) % 64 + 1;
    const server_options options{.token = data[0] >= 128 ? "t" : "",
                                 .max_update_body = 512,
                                 .max_body = 64,
                                 .max_header = 512};
    const auto whole = read_all(bytes, bytes.size() + 1, options);
    require_alike(whole, read_all(bytes, step, options));
    require_alike(whole, read_all(bytes, 1, options));
    return 0;
}
