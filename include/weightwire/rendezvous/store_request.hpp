#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

/// @file
/// The requests of torch's TCP store: a byte that names the query, then its arguments, with no
/// length in front of the whole. Numbers are in host order, a text is a 64-bit length and its
/// bytes (wire specification, section 2.3).

namespace weightwire::rendezvous {

/// What a client asks. The numbers are the wire's.
enum class store_query : std::uint8_t {
    validate = 0,
    set = 1,
    compare_set = 2,
    get = 3,
    add = 4,
    check = 5,
    wait = 6,
    number_of_keys = 7,
    delete_key = 8,
    append = 9,
    multi_get = 10,
    multi_set = 11,
    cancel_wait = 12,
    ping = 13,
};

/// The argument of `validate`, the first request on every connection.
inline constexpr std::uint32_t store_magic = 0x3C85F7CEU;
/// Answers to `check`, `wait` and `cancel_wait`.
inline constexpr char store_ready = 0;
inline constexpr char store_not_ready = 1;
inline constexpr char store_stop_waiting = 0;
inline constexpr char store_wait_cancelled = 1;

/// What one request may cost; torch's own server has the first three, with these values.
struct store_limits {
    std::size_t max_key_bytes = std::size_t{8} << 10U;
    std::size_t max_value_bytes = std::size_t{8} << 20U;
    std::size_t max_keys = std::size_t{128} << 10U;           ///< in one request for several
    std::size_t max_request_bytes = std::size_t{128} << 20U;  ///< all arguments of one request
    std::size_t max_reply_bytes = std::size_t{128} << 20U;    ///< one reply
};

/// Why a server dropped a connection, or refused one.
enum class drop_reason : std::uint8_t {
    hung_up,               ///< the client closed it between two requests: nothing is wrong
    hung_up_in_request,    ///< the client died in the middle of a request
    not_validated,         ///< the first request is not `validate`
    wrong_magic,           ///< `validate` with another number: no client of this protocol
    unknown_query,         ///< a query this server does not know
    key_too_long,          ///< over `store_limits::max_key_bytes`
    value_too_long,        ///< over `store_limits::max_value_bytes`
    too_many_keys,         ///< over `store_limits::max_keys`
    request_too_long,      ///< over `store_limits::max_request_bytes`
    reply_too_long,        ///< over `store_limits::max_reply_bytes`
    missing_key,           ///< `get` of a key that does not exist; clients wait for it first
    not_a_number,          ///< `add` to a value that is no number, or past 64 bits
    overlapping_wait,      ///< a second `wait` before the first was answered
    silent,                ///< a request, or the first one, did not come whole in time
    slow_reader,           ///< a reply was not taken in time
    store_full,            ///< the store holds all it may
    memory_full,           ///< the server's buffers hold all they may
    too_many_connections,  ///< refused at once
    count_of_reasons,      ///< how many reasons there are; never given
};

/// The words that messages and metrics use for `value`.
[[nodiscard]] constexpr std::string_view to_string(drop_reason value) noexcept {
    switch (value) {
        case drop_reason::hung_up: return "hung up";
        case drop_reason::hung_up_in_request: return "hung up in a request";
        case drop_reason::not_validated: return "not validated";
        case drop_reason::wrong_magic: return "wrong magic";
        case drop_reason::unknown_query: return "unknown query";
        case drop_reason::key_too_long: return "key too long";
        case drop_reason::value_too_long: return "value too long";
        case drop_reason::too_many_keys: return "too many keys";
        case drop_reason::request_too_long: return "request too long";
        case drop_reason::reply_too_long: return "reply too long";
        case drop_reason::missing_key: return "missing key";
        case drop_reason::not_a_number: return "not a number";
        case drop_reason::overlapping_wait: return "overlapping wait";
        case drop_reason::silent: return "silent";
        case drop_reason::slow_reader: return "slow reader";
        case drop_reason::store_full: return "store full";
        case drop_reason::memory_full: return "memory full";
        case drop_reason::too_many_connections: return "too many connections";
        case drop_reason::count_of_reasons: break;
    }
    return "unknown";
}

/// Appends a number as the wire has it.
template <class Number>
void append_store_number(std::string& out, Number value) {
    const auto at = out.size();
    out.resize(at + sizeof value);
    std::memcpy(out.data() + at, &value, sizeof value);
}
/// Appends a text as the wire has it: 64-bit length, then the bytes.
inline void append_store_text(std::string& out, std::string_view text) {
    append_store_number(out, static_cast<std::uint64_t>(text.size()));
    out.append(text);
}

/// Reads one request as its bytes arrive. Nothing is read twice, so a request of 128 Ki keys that
/// comes in small segments costs no more than one that comes whole; nothing is allocated for a
/// length before its bytes are there.
class store_request_parser {
public:
    enum class state : std::uint8_t { incomplete, complete, malformed };

    explicit store_request_parser(const store_limits& limits = {}) noexcept : limits_{limits} {}

    /// Looks at what has come of the request so far.
    /// @param bytes begins with the request's first byte; what was there at the last call is
    /// unchanged. May go on past the request's end.
    state advance(std::string_view bytes) {
        if (!begun_ && !bytes.empty()) {
            begin(static_cast<unsigned char>(bytes.front()));
        }
        while (begun_ && !failed_ && (want_count_ || want_number_ != 0 || left_ != 0)) {
            if (!step(bytes)) {
                return failed_ ? state::malformed : state::incomplete;
            }
        }
        return failed_ ? state::malformed : begun_ ? state::complete : state::incomplete;
    }

    /// Forgets the request, ready for the next.
    void reset() noexcept {
        texts_.clear();
        at_ = 0;
        left_ = 0;
        number_ = 0;
        want_number_ = 0;
        begun_ = want_count_ = failed_ = false;
    }

    /// Whether a first byte was seen.
    [[nodiscard]] bool begun() const noexcept { return begun_; }
    /// Why the request is malformed.
    [[nodiscard]] drop_reason reason() const noexcept { return reason_; }

    // Of a complete request:
    [[nodiscard]] store_query query() const noexcept { return query_; }
    /// Bytes of the request.
    [[nodiscard]] std::size_t size() const noexcept { return at_; }
    /// Texts of the request: keys and values in the order of the wire.
    [[nodiscard]] std::size_t count() const noexcept { return texts_.size(); }
    /// Text `i`, in the bytes that `advance` got.
    [[nodiscard]] std::string_view text(std::string_view bytes, std::size_t i) const noexcept {
        return bytes.substr(texts_[i].offset, texts_[i].size);
    }
    /// The number: delta of `add` (its bits), magic of `validate`, nonce of `ping`.
    [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

private:
    struct piece {
        std::size_t offset;
        std::size_t size;
    };
    /// What the texts of a request are: `odd` and `even` positions may differ.
    enum class layout : std::uint8_t { keys, key_then_values, pairs };

    void begin(unsigned char first) {
        begun_ = true;
        at_ = 1;
        layout_ = layout::key_then_values;
        query_ = static_cast<store_query>(first);
        switch (query_) {
            case store_query::validate:
            case store_query::ping: want_number_ = sizeof(std::uint32_t); return;
            case store_query::set:
            case store_query::append: left_ = 2; return;
            case store_query::compare_set: left_ = 3; return;
            case store_query::get:
            case store_query::delete_key: left_ = 1; return;
            case store_query::add:
                left_ = 1;
                want_number_ = sizeof(std::uint64_t);
                return;
            case store_query::check:
            case store_query::wait:
            case store_query::multi_get:
                layout_ = layout::keys;
                want_count_ = true;
                return;
            case store_query::multi_set:
                layout_ = layout::pairs;
                want_count_ = true;
                return;
            case store_query::number_of_keys:
            case store_query::cancel_wait: return;
        }
        fail(drop_reason::unknown_query);
    }

    /// Takes the next argument. Returns whether it was there.
    bool step(std::string_view bytes) {
        if (want_count_) {
            return take_count(bytes);
        }
        return left_ != 0 ? take_text(bytes) : take_number(bytes);
    }

    bool take_count(std::string_view bytes) {
        std::uint64_t count = 0;
        if (!read(bytes, at_, count)) {
            return false;
        }
        if (count > limits_.max_keys) {
            return fail(drop_reason::too_many_keys);
        }
        at_ += sizeof count;
        left_ = static_cast<std::size_t>(count) * (layout_ == layout::pairs ? 2 : 1);
        want_count_ = false;
        return true;
    }

    bool take_text(std::string_view bytes) {
        std::uint64_t size = 0;
        if (!read(bytes, at_, size)) {
            return false;
        }
        const bool is_key = layout_ == layout::keys ||
                            (layout_ == layout::pairs ? texts_.size() % 2 == 0 : texts_.empty());
        if (size > (is_key ? limits_.max_key_bytes : limits_.max_value_bytes)) {
            return fail(is_key ? drop_reason::key_too_long : drop_reason::value_too_long);
        }
        const auto begin_at = at_ + sizeof size;
        if (begin_at + size > limits_.max_request_bytes) {
            return fail(drop_reason::request_too_long);
        }
        if (bytes.size() - begin_at < size) {
            return false;
        }
        texts_.push_back({begin_at, static_cast<std::size_t>(size)});
        at_ = begin_at + static_cast<std::size_t>(size);
        --left_;
        return true;
    }

    bool take_number(std::string_view bytes) {
        std::uint32_t narrow = 0;
        if (want_number_ == sizeof narrow) {
            if (!read(bytes, at_, narrow)) {
                return false;
            }
            number_ = narrow;
        } else if (!read(bytes, at_, number_)) {
            return false;
        }
        at_ += want_number_;
        want_number_ = 0;
        return true;
    }

    template <class Number>
    [[nodiscard]] static bool read(std::string_view bytes, std::size_t at, Number& value) noexcept {
        if (bytes.size() < at || bytes.size() - at < sizeof value) {
            return false;
        }
        std::memcpy(&value, bytes.data() + at, sizeof value);
        return true;
    }

    bool fail(drop_reason reason) noexcept {
        failed_ = true;
        reason_ = reason;
        return false;
    }

    store_limits limits_;
    std::vector<piece> texts_;
    std::size_t at_ = 0;    ///< bytes understood
    std::size_t left_ = 0;  ///< texts still to come
    std::uint64_t number_ = 0;
    std::size_t want_number_ = 0;  ///< size of the number that comes after the texts, 0 when none
    store_query query_{};
    layout layout_ = layout::keys;
    drop_reason reason_ = drop_reason::hung_up;
    bool begun_ = false;
    bool want_count_ = false;
    bool failed_ = false;
};

}  // namespace weightwire::rendezvous
