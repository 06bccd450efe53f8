#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <weightwire/rendezvous/store_request.hpp>

/// @file
/// What a TCP store holds and answers, without a socket: requests in, reply bytes out.

namespace weightwire::rendezvous {

/// Keys, values, and who waits for which. Connections are numbers that the caller gives and never
/// reuses. Not thread-safe.
///
/// Semantics are those of torch's server (wire specification, section 2.3): `add` keeps decimal
/// text and takes a missing key for 0; `get` of a missing key drops the connection; `wait` is
/// answered when all its keys exist at once.
class store_table {
public:
    using connection_id = std::uint64_t;

    /// @param max_bytes keys, values and waits together.
    explicit store_table(const store_limits& limits = {},
                         std::size_t max_bytes = std::size_t{1} << 30U)
        : limits_{limits}, max_bytes_{max_bytes} {}

    /// Carries out one complete request.
    /// @param bytes what the parser read it from.
    /// @param reply the answer is appended; nothing for a `wait` that goes on.
    /// @param woken connections whose `wait` has ended are appended: each is owed
    /// `store_stop_waiting`.
    /// @returns why the connection must be dropped, or nothing.
    [[nodiscard]] std::optional<drop_reason> apply(connection_id from,
                                                   const store_request_parser& request,
                                                   std::string_view bytes, std::string& reply,
                                                   std::vector<connection_id>& woken) {
        const auto text = [&](std::size_t i) { return request.text(bytes, i); };
        switch (request.query()) {
            case store_query::validate: return std::nullopt;
            case store_query::ping:
                append_store_number(reply, static_cast<std::uint32_t>(request.number()));
                return std::nullopt;
            case store_query::set: return put(text(0), text(1), woken);
            case store_query::append: return append(text(0), text(1), woken);
            case store_query::compare_set:
                return compare_set(text(0), text(1), text(2), reply, woken);
            case store_query::get:
            case store_query::multi_get: return get(request, bytes, reply);
            case store_query::add:
                return add(text(0), static_cast<std::int64_t>(request.number()), reply, woken);
            case store_query::check: return check(request, bytes, reply);
            case store_query::wait: return wait(from, request, bytes, reply);
            case store_query::cancel_wait:
                // Always answered: the wait may have ended just before, and its client cannot know.
                forget(from);
                reply.push_back(store_wait_cancelled);
                return std::nullopt;
            case store_query::number_of_keys:
                append_store_number(reply, static_cast<std::int64_t>(values_.size()));
                return std::nullopt;
            case store_query::delete_key: return erase(text(0), reply);
            case store_query::multi_set: return multi_set(request, bytes, woken);
        }
        return drop_reason::unknown_query;
    }

    /// Ends the wait of a connection that is gone.
    void forget(connection_id which) {
        const auto found = waits_.find(which);
        if (found == waits_.end()) {
            return;
        }
        const auto waiters = waiters_.find(found->second.keys[found->second.missing]);
        if (waiters != waiters_.end()) {
            std::erase(waiters->second, which);
            if (waiters->second.empty()) {
                waiters_.erase(waiters);
            }
        }
        bytes_ -= found->second.cost;
        waits_.erase(found);
    }

    [[nodiscard]] std::size_t size() const noexcept { return values_.size(); }
    /// What keys, values and waits cost, `entry_bytes` a key included.
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

    /// Counted for each key beside its text, so that many empty ones cannot fill the memory.
    static constexpr std::size_t entry_bytes = 64;

private:
    /// A `wait` that goes on. It is listed under one key only, the first that was missing; when
    /// that one comes the rest is looked at. So a wait for many keys costs one entry.
    struct wait_entry {
        std::vector<std::string> keys;
        std::size_t missing = 0;
        std::size_t cost = 0;
    };
    using result = std::optional<drop_reason>;

    [[nodiscard]] std::string* find(std::string_view key) {
        const auto found = values_.find(std::string{key});
        return found == values_.end() ? nullptr : &found->second;
    }

    result put(std::string_view key, std::string_view value, std::vector<connection_id>& woken) {
        auto* const old = find(key);
        const auto freed = old == nullptr ? 0 : old->size();
        const auto added = value.size() + (old == nullptr ? key.size() + entry_bytes : 0);
        if (bytes_ - freed + added > max_bytes_) {
            return drop_reason::store_full;
        }
        if (old != nullptr) {
            old->assign(value);
        } else {
            values_.emplace(key, value);
        }
        bytes_ = bytes_ - freed + added;
        wake(std::string{key}, woken);
        return std::nullopt;
    }

    result append(std::string_view key, std::string_view value, std::vector<connection_id>& woken) {
        const auto* const old = find(key);
        const auto joined = (old == nullptr ? std::string{} : *old) + std::string{value};
        if (joined.size() > limits_.max_value_bytes) {
            return drop_reason::value_too_long;
        }
        return put(key, joined, woken);
    }

    result multi_set(const store_request_parser& request, std::string_view bytes,
                     std::vector<connection_id>& woken) {
        for (std::size_t i = 0; i + 1 < request.count(); i += 2) {
            if (const auto why = put(request.text(bytes, i), request.text(bytes, i + 1), woken)) {
                return why;
            }
        }
        return std::nullopt;
    }

    result compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                       std::string& reply, std::vector<connection_id>& woken) {
        const auto* const old = find(key);
        const bool store = old == nullptr ? expected.empty() : *old == expected;
        if (!store) {
            append_store_text(reply, old == nullptr ? expected : std::string_view{*old});
            return std::nullopt;
        }
        if (const auto why = put(key, desired, woken)) {
            return why;
        }
        append_store_text(reply, desired);
        return std::nullopt;
    }

    result add(std::string_view key, std::int64_t delta, std::string& reply,
               std::vector<connection_id>& woken) {
        std::int64_t value = 0;
        if (const auto* const old = find(key)) {
            const auto* const end = old->data() + old->size();
            const auto parsed = std::from_chars(old->data(), end, value);
            if (parsed.ec != std::errc{} || parsed.ptr != end) {
                return drop_reason::not_a_number;
            }
        }
        if (__builtin_add_overflow(value, delta, &value)) {
            return drop_reason::not_a_number;
        }
        if (const auto why = put(key, std::to_string(value), woken)) {
            return why;
        }
        append_store_number(reply, value);
        return std::nullopt;
    }

    result get(const store_request_parser& request, std::string_view bytes, std::string& reply) {
        const auto begin = reply.size();
        for (std::size_t i = 0; i < request.count(); ++i) {
            const auto* const value = find(request.text(bytes, i));
            if (value == nullptr) {
                return drop_reason::missing_key;
            }
            if (reply.size() - begin + value->size() > limits_.max_reply_bytes) {
                return drop_reason::reply_too_long;
            }
            append_store_text(reply, *value);
        }
        return std::nullopt;
    }

    result check(const store_request_parser& request, std::string_view bytes, std::string& reply) {
        bool all = true;
        for (std::size_t i = 0; i < request.count() && all; ++i) {
            all = find(request.text(bytes, i)) != nullptr;
        }
        reply.push_back(all ? store_ready : store_not_ready);
        return std::nullopt;
    }

    result wait(connection_id from, const store_request_parser& request, std::string_view bytes,
                std::string& reply) {
        if (waits_.contains(from)) {
            return drop_reason::overlapping_wait;
        }
        wait_entry entry;
        for (std::size_t i = 0; i < request.count(); ++i) {
            entry.keys.emplace_back(request.text(bytes, i));
            entry.cost += entry.keys.back().size() + entry_bytes;
        }
        if (find_missing(entry)) {
            if (bytes_ + entry.cost > max_bytes_) {
                return drop_reason::store_full;
            }
            bytes_ += entry.cost;
            waiters_[entry.keys[entry.missing]].push_back(from);
            waits_.emplace(from, std::move(entry));
        } else {
            reply.push_back(store_stop_waiting);
        }
        return std::nullopt;
    }

    result erase(std::string_view key, std::string& reply) {
        const auto found = values_.find(std::string{key});
        const bool there = found != values_.end();
        if (there) {
            bytes_ -= found->first.size() + found->second.size() + entry_bytes;
            values_.erase(found);
        }
        append_store_number(reply, std::int64_t{there ? 1 : 0});
        return std::nullopt;
    }

    /// Looks for a key that is missing: first after the last one, then, as earlier ones may have
    /// been deleted, all over.
    [[nodiscard]] bool find_missing(wait_entry& entry) {
        const auto scan = [&](std::size_t first, std::size_t last) {
            for (std::size_t i = first; i < last; ++i) {
                if (!values_.contains(entry.keys[i])) {
                    entry.missing = i;
                    return true;
                }
            }
            return false;
        };
        const auto begin = entry.missing;
        return scan(begin, entry.keys.size()) || scan(0, begin);
    }

    void wake(const std::string& key, std::vector<connection_id>& woken) {
        auto waiting = waiters_.extract(key);
        if (waiting.empty()) {
            return;
        }
        for (const auto which : waiting.mapped()) {
            const auto found = waits_.find(which);
            if (find_missing(found->second)) {
                waiters_[found->second.keys[found->second.missing]].push_back(which);
            } else {
                bytes_ -= found->second.cost;
                waits_.erase(found);
                woken.push_back(which);
            }
        }
    }

    store_limits limits_;
    std::size_t max_bytes_;
    std::size_t bytes_ = 0;
    std::unordered_map<std::string, std::string> values_;
    std::unordered_map<connection_id, wait_entry> waits_;
    std::unordered_map<std::string, std::vector<connection_id>> waiters_;
};

}  // namespace weightwire::rendezvous
