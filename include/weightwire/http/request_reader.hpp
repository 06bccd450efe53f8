#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/core/error.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/fields.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/optional.hpp>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/http/server_options.hpp>
#include <weightwire/http/socket.hpp>
#include <weightwire/wire/http_message.hpp>

/// @file
/// Reads requests off one connection, parsed by Boost.Beast, into memory that is used again: a
/// request of a size seen before allocates nothing.

namespace weightwire::http::detail {

namespace beast = boost::beast;
namespace beast_http = boost::beast::http;

/// A Beast body that appends to a string which outlives the message.
struct reused_body {
    /// Where the bytes go.
    struct value_type {
        std::string* bytes = nullptr;
    };

    class reader {
    public:
        template <bool IsRequest, class Fields>
        reader(beast_http::header<IsRequest, Fields>&, value_type& target) : bytes_{target.bytes} {}

        /// An announced length is not believed beyond a few MiB: memory follows the bytes that
        /// come.
        void init(const boost::optional<std::uint64_t>& length, beast::error_code& error) {
            constexpr std::uint64_t at_once = std::uint64_t{4} << 20U;
            bytes_->clear();
            bytes_->reserve(static_cast<std::size_t>(std::min(length.value_or(0), at_once)));
            error = {};
        }
        template <class ConstBufferSequence>
        std::size_t put(const ConstBufferSequence& buffers, beast::error_code& error) {
            std::size_t count = 0;
            for (const auto piece : beast::buffers_range_ref(buffers)) {
                bytes_->append(static_cast<const char*>(piece.data()), piece.size());
                count += piece.size();
            }
            error = {};
            return count;
        }
        void finish(beast::error_code& error) { error = {}; }

    private:
        std::string* bytes_;
    };
};

/// What came of reading one request: ready, the end of the connection, or an error to answer before
/// closing.
struct reception {
    int status = 0;           ///< 200: a request is ready; 0: nothing to answer; else the answer
    std::string_view text{};  ///< why, for the answer's body

    [[nodiscard]] bool is_ready() const noexcept { return status == 200; }
};

/// One connection's requests, one after another. `Client` is where the bytes come from: the socket,
/// or in tests a script. Not thread-safe.
template <class Client>
class basic_request_reader {
public:
    /// A body's memory above this is given back while the client sends nothing for
    /// `server_options::buffer_timeout`.
    static constexpr std::size_t kept_bytes = std::size_t{1} << 20U;

    basic_request_reader(Client client, const server_options& options)
        : options_{options}, client_{std::move(client)}, input_(input_bytes) {}
    basic_request_reader(const basic_request_reader&) = delete;
    basic_request_reader& operator=(const basic_request_reader&) = delete;

    /// Waits for a whole request, at most for the limits in the options.
    [[nodiscard]] reception receive() {
        begin_message();
        if (const auto result = read_header(); !result.is_ready()) {
            return result;
        }
        if (const auto result = admit(); !result.is_ready()) {
            return result;
        }
        const auto result = read_body();
        first_ = first_ && !result.is_ready();
        return result;
    }

    /// The request that `receive` found ready. Its views live until the next `receive`.
    [[nodiscard]] http_request request() const {
        const auto& message = parser_->get();
        http_request out;
        out.method = view(message.method_string());
        const auto target = view(message.target());
        const auto question = target.find('?');
        out.path = target.substr(0, question);
        out.query = question == std::string_view::npos ? "" : target.substr(question + 1);
        out.authorization = view(message[beast_http::field::authorization]);
        out.content_type = view(message[beast_http::field::content_type]);
        out.body = body_;
        return out;
    }

    /// Whether the client wants the connection kept after this request.
    [[nodiscard]] bool keeps_alive() const { return parser_->get().keep_alive(); }

    /// Memory that bodies take, used or kept for the next.
    [[nodiscard]] std::size_t body_memory() const noexcept { return body_.capacity(); }

private:
    using allocator = std::pmr::polymorphic_allocator<char>;
    using parser = beast_http::parser<true, reused_body, allocator>;

    /// Twice the longest header, so that a header always fits after what was read too much.
    static constexpr std::size_t input_bytes = std::size_t{64} << 10U;
    static constexpr std::size_t field_bytes = std::size_t{16} << 10U;

    template <class BeastView>
    [[nodiscard]] static std::string_view view(const BeastView& text) noexcept {
        return {text.data(), text.size()};
    }

    void begin_message() {
        parser_.reset();
        // Fields live here; a request with more than fits goes on to the heap and is freed here.
        fields_.emplace(field_memory_.data(), field_memory_.size());
        body_.clear();
        parser_.emplace(std::piecewise_construct,
                        std::make_tuple(reused_body::value_type{.bytes = &body_}),
                        std::make_tuple(allocator{&*fields_}));
        // Beast measures request line and fields apart, and within a few bytes by the segments in
        // which they come; the exact limit is ours.
        parser_->header_limit(static_cast<std::uint32_t>(options_.max_header + 16));
        // The limit depends on the route and is checked once the route is known. No limit cannot be
        // said: Boost 1.74 refuses every body then.
        parser_->body_limit(std::numeric_limits<std::uint64_t>::max());
        parser_->eager(false);
    }

    [[nodiscard]] std::span<const char> unread() const noexcept {
        return {input_.data() + begin_, end_ - begin_};
    }

    /// Reads more bytes behind the unread ones.
    [[nodiscard]] read_result fill(deadline until) {
        if (begin_ == end_) {
            begin_ = end_ = 0;
        } else if (end_ == input_.size()) {
            std::copy(input_.begin() + static_cast<std::ptrdiff_t>(begin_), input_.end(),
                      input_.begin());
            end_ -= std::exchange(begin_, 0);
        }
        std::size_t count = 0;
        const auto result =
            client_.receive(std::span{input_.data() + end_, input_.size() - end_}, until, count);
        end_ += count;
        return result;
    }

    /// Gives the parser what is unread.
    [[nodiscard]] beast::error_code parse() {
        beast::error_code error;
        const auto bytes = unread();
        begin_ += parser_->put(boost::asio::const_buffer{bytes.data(), bytes.size()}, error);
        return error == beast_http::error::need_more ? beast::error_code{} : error;
    }

    /// Waits for the next request. A client of ours does not use a connection again that has idled
    /// for a few seconds, and then what one large body took would lie here for two minutes.
    [[nodiscard]] read_result fill_after_idling() {
        const auto until = deadline::after(options_.idle_timeout);
        if (body_.capacity() > kept_bytes && options_.buffer_timeout < options_.idle_timeout) {
            const auto result = fill(deadline::after(options_.buffer_timeout));
            if (result != read_result::timed_out) {
                return result;
            }
            std::string{}.swap(body_);
        }
        return fill(until);
    }

    [[nodiscard]] reception read_header() {
        // A client that connects has a request to send: one that has shown none yet may not hold a
        // place as long as one that is between two requests.
        auto until = deadline::after(options_.header_timeout);
        if (begin_ == end_) {
            // Nothing is owed to a client that sends nothing.
            if ((first_ ? fill(until) : fill_after_idling()) != read_result::data) {
                return {};
            }
            if (!first_) {
                until = deadline::after(options_.header_timeout);
            }
        }
        for (std::size_t taken = 0;;) {
            if (begin_ != end_) {
                const auto waiting = end_ - begin_;
                if (const auto error = parse()) {
                    return error == beast_http::error::header_limit
                               ? reception{431, headers_too_long}
                               : reception{400, "protocol: the request is not valid HTTP"};
                }
                taken += waiting - (end_ - begin_);
            }
            const bool done = parser_->is_header_done();
            if (taken + (done ? 0 : end_ - begin_) > options_.max_header) {
                return {431, headers_too_long};
            }
            if (done) {
                return {200};
            }
            switch (fill(until)) {
                case read_result::data: break;
                case read_result::ended: return {};
                case read_result::timed_out:
                    return {408, "timeout: the request's headers did not arrive in time"};
            }
        }
    }

    /// Decides from the headers whether the body is wanted, and asks for it where the client waits
    /// to be asked.
    [[nodiscard]] reception admit() {
        const auto head = request();
        if (!head.path.starts_with('/')) {
            return {400, "protocol: the request's target is no path"};
        }
        const bool open = head.method == "GET" && head.path == "/health";
        if (!options_.token.empty() && !open &&
            !is_authorized(head.authorization, options_.token)) {
            return {401,
                    "usage: this server requires its token: client_options::token in C++, --token "
                    "of the programs, else a header Authorization: Bearer ..."};
        }
        if (!is_plain_or_chunked()) {
            return {
                501,
                "unsupported: the request's transfer encoding is not known here; send chunked, or "
                "a Content-Length"};
        }
        const auto limit =
            carries_parameters(head.path) ? options_.max_update_body : options_.max_body;
        const auto length = parser_->content_length();
        if (length && *length > limit) {
            return {413, too_large};
        }
        parser_->body_limit(limit);  // for a body in chunks, whose length nobody announces
        const auto expect = view(parser_->get()[beast_http::field::expect]);
        if (expect.empty() || parser_->is_done()) {
            return {200};
        }
        if (!same_word(expect, "100-continue")) {
            return {417, "protocol: the request expects what this server does not know"};
        }
        if (begin_ == end_ && !client_.send("HTTP/1.1 100 Continue\r\n\r\n",
                                            deadline::after(options_.reply_timeout))) {
            return {};
        }
        return {200};
    }

    /// Whether the end of the body can be told. Of any encoding but `chunked` it cannot, and what
    /// follows the headers would pass for the next request.
    [[nodiscard]] bool is_plain_or_chunked() const {
        const auto& fields = parser_->get();
        const auto [first, last] = fields.equal_range(beast_http::field::transfer_encoding);
        return first == last ||
               (std::next(first) == last && same_word(view(first->value()), "chunked"));
    }

    [[nodiscard]] reception read_body() {
        parser_->eager(true);
        const auto until = deadline::after(options_.body_timeout);
        while (!parser_->is_done()) {
            if (begin_ == end_) {
                switch (fill(until)) {
                    case read_result::data: break;
                    case read_result::ended: return {};
                    case read_result::timed_out:
                        return {408, "timeout: the request's body did not arrive in time"};
                }
            }
            const auto before = begin_;
            if (const auto error = parse()) {
                return error == beast_http::error::body_limit
                           ? reception{413, too_large}
                           : reception{400, "protocol: the request's body is not valid HTTP"};
            }
            // An unfinished chunk header stays unread: more bytes must come behind it.
            if (begin_ == before && !parser_->is_done()) {
                if (const auto result = fill_behind(until); !result.is_ready()) {
                    return result;
                }
            }
        }
        return {200};
    }

    [[nodiscard]] reception fill_behind(deadline until) {
        do {
            if (end_ - begin_ == input_.size()) {
                return {400, "protocol: a chunk's header in the request is too long"};
            }
            switch (fill(until)) {
                case read_result::data: break;
                case read_result::ended: return {};
                case read_result::timed_out:
                    return {408, "timeout: the request's body did not arrive in time"};
            }
        } while (end_ - begin_ < shortest_rest);
        return {200};
    }

    /// No body ends with fewer bytes than these from a chunk's header on: `0`, and two line ends.
    /// Beast asserts that a last chunk's header which it has seen comes again with as many, and
    /// would end the process over a client that sends them one by one.
    static constexpr std::size_t shortest_rest = 5;

    static constexpr std::string_view headers_too_long =
        "protocol: the request's headers are too long";
    static constexpr std::string_view too_large =
        "resource: the request's body is over this server's limit for the route; send less at once "
        "or raise the limit";

    const server_options& options_;
    Client client_;
    std::vector<char> input_;  // bytes [begin_, end_) are not parsed yet
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
    bool first_ = true;  // no request was received yet
    std::string body_;
    std::array<std::byte, field_bytes> field_memory_;
    std::optional<std::pmr::monotonic_buffer_resource> fields_;
    std::optional<parser> parser_;  // its fields live in `fields_`
};

using request_reader = basic_request_reader<client_socket>;

}  // namespace weightwire::http::detail
