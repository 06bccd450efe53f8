#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/error.hpp>

/// @file
/// The books of CUDA IPC: what this process exported, and what it has open of others. Needs no
/// CUDA; `ipc_memory.hpp` has the calls.

namespace weightwire::gpu {

/// Bytes as lower-case hexadecimal digits, two each.
[[nodiscard]] inline std::string hex_text(std::span<const std::byte> bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string text;
    text.reserve(2 * bytes.size());
    for (const std::byte each : bytes) {
        text += digits[std::to_integer<std::size_t>(each >> 4U)];
        text += digits[std::to_integer<std::size_t>(each & std::byte{0x0f})];
    }
    return text;
}

/// The 16 bytes of a UUID as torch spells them: lower-case 8-4-4-4-12, without a prefix.
[[nodiscard]] inline std::string uuid_text(std::span<const std::byte, 16> bytes) {
    std::string text = hex_text(bytes);
    for (const std::size_t dash : {8U, 13U, 18U, 23U}) {
        text.insert(dash, 1, '-');
    }
    return text;
}

/// One exported allocation. In what a peer says, 0 stands for what it does not know.
struct ipc_export {
    std::string handle{};         ///< the handle's plain bytes
    std::uint64_t base = 0;       ///< address in the exporting process
    std::uint64_t bytes = 0;      ///< size
    std::uint64_t buffer_id = 0;  ///< tells it from an earlier one at the same address
    friend bool operator==(const ipc_export&, const ipc_export&) = default;
};

/// A process that exports; 0 stands for what is not known of it.
struct ipc_exporter {
    std::int64_t pid = 0;
    std::uint64_t start_time = 0;
    friend auto operator<=>(const ipc_exporter&, const ipc_exporter&) = default;
};

/// What this process exported. Thread-safe.
class ipc_exports {
public:
    /// The export of an allocation, if it was exported. Without a buffer id nothing tells it from
    /// an earlier one, and none is found.
    [[nodiscard]] std::optional<ipc_export> find(std::uint64_t base,
                                                 std::uint64_t buffer_id) const {
        const std::lock_guard lock{mutex_};
        const auto found = by_base_.find(base);
        return found != by_base_.end() && buffer_id != 0 && found->second.buffer_id == buffer_id
                   ? std::optional{found->second}
                   : std::nullopt;
    }
    /// The export that has this handle.
    [[nodiscard]] std::optional<ipc_export> find(std::string_view handle) const {
        const std::lock_guard lock{mutex_};
        const auto found = by_handle_.find(handle);
        return found != by_handle_.end() ? std::optional{by_base_.at(found->second)} : std::nullopt;
    }
    /// Notes an export, and forgets those whose memory it overlaps: that was freed before.
    void add(const ipc_export& made) {
        const std::lock_guard lock{mutex_};
        auto at = by_base_.lower_bound(made.base);
        if (at != by_base_.begin() && end_of(std::prev(at)->second) > made.base) {
            --at;
        }
        while (at != by_base_.end() && at->first < end_of(made)) {
            at = forget(at);
        }
        if (const auto same = by_handle_.find(made.handle); same != by_handle_.end()) {
            forget(by_base_.find(same->second));
        }
        const auto handle = by_handle_.emplace(made.handle, made.base).first;
        try {
            by_base_.emplace(made.base, made);
        } catch (...) {
            by_handle_.erase(handle);
            throw;
        }
    }
    [[nodiscard]] std::size_t size() const {
        const std::lock_guard lock{mutex_};
        return by_base_.size();
    }

private:
    using table = std::map<std::uint64_t, ipc_export>;

    [[nodiscard]] static std::uint64_t end_of(const ipc_export& one) noexcept {
        return one.base + one.bytes;
    }
    table::iterator forget(table::iterator at) {
        by_handle_.erase(at->second.handle);
        return by_base_.erase(at);
    }

    mutable std::mutex mutex_;
    table by_base_;
    std::map<std::string, std::uint64_t, std::less<>> by_handle_;
};

/// What an open gave: where the memory is here, and how much of it the driver has mapped.
struct opened_memory {
    const std::byte* data = nullptr;
    std::uint64_t bytes = 0;
};

/// What this process has open of others: each allocation once a device, whatever number of mappings
/// share it; the last of them closes it. Thread-safe; it outlives its mappings.
///
/// `Native` opens and closes: `open(device, handle)` returns `opened_memory` or throws, and
/// `close(device, data)` throws nothing. Both are called under the lock, one at a time.
template <class Native>
class ipc_imports {
    /// What tells one allocation from another. Handle bytes alone do not: memory that was freed and
    /// allocated anew may have those of its predecessor.
    struct key {
        int device = 0;
        ipc_exporter from{};
        std::uint64_t base = 0;
        std::uint64_t buffer_id = 0;
        std::string handle{};
        friend auto operator<=>(const key&, const key&) = default;
    };
    struct slot {
        opened_memory opened{};
        std::size_t uses = 0;
    };
    using table = std::map<key, slot>;

public:
    /// Memory that this process can read, as long as this object lives. Movable; a default one is
    /// empty.
    class mapping {
    public:
        mapping() noexcept = default;
        /// Memory of this process itself, which somebody else keeps.
        mapping(const std::byte* data, std::uint64_t bytes) noexcept : data_{data}, size_{bytes} {}
        ~mapping() { reset(); }
        mapping(mapping&& other) noexcept
            : owner_{std::exchange(other.owner_, nullptr)},
              at_{other.at_},
              data_{std::exchange(other.data_, nullptr)},
              size_{std::exchange(other.size_, 0)} {}
        mapping& operator=(mapping&& other) noexcept {
            if (this != &other) {
                reset();
                owner_ = std::exchange(other.owner_, nullptr);
                at_ = other.at_;
                data_ = std::exchange(other.data_, nullptr);
                size_ = std::exchange(other.size_, 0);
            }
            return *this;
        }

        [[nodiscard]] const std::byte* data() const noexcept { return data_; }
        /// The size that the exporter named; where it named none, what the driver has mapped.
        [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

    private:
        friend class ipc_imports;
        mapping(ipc_imports& owner, typename table::iterator at, std::uint64_t bytes) noexcept
            : owner_{&owner}, at_{at}, data_{at->second.opened.data}, size_{bytes} {}
        void reset() noexcept {
            if (auto* const owner = std::exchange(owner_, nullptr); owner != nullptr) {
                owner->give_back(at_);
            }
        }

        ipc_imports* owner_ = nullptr;  ///< null: nothing to close
        typename table::iterator at_{};
        const std::byte* data_ = nullptr;
        std::uint64_t size_ = 0;
    };

    explicit ipc_imports(Native native = Native{}) : native_{std::move(native)} {}
    ipc_imports(const ipc_imports&) = delete;
    ipc_imports& operator=(const ipc_imports&) = delete;

    /// Opens `what` for `device`, or shares what is open of it already.
    /// @throws protocol_error less is mapped than the exporter says.
    /// @throws peer_error the exporter freed the memory and allocated other memory in its place,
    /// but the former is still open here: the driver then answers with the former.
    [[nodiscard]] mapping open(int device, const ipc_exporter& from, const ipc_export& what) {
        const std::lock_guard lock{mutex_};
        const auto at =
            slots_.try_emplace(key{device, from, what.base, what.buffer_id, what.handle}).first;
        try {
            if (at->second.uses == 0) {
                at->second.opened = native_.open(device, what.handle);
                by_address_.emplace(std::pair{device, at->second.opened.data}, &at->first);
                require_fresh(at->first, at->second.opened.data);
            }
            if (what.bytes > at->second.opened.bytes) {
                throw protocol_error{"an exported allocation has " +
                                     std::to_string(at->second.opened.bytes) +
                                     " bytes; its exporter says " + std::to_string(what.bytes)};
            }
        } catch (...) {
            if (at->second.uses == 0) {
                close(at);
            }
            throw;
        }
        ++at->second.uses;
        return {*this, at, what.bytes != 0 ? what.bytes : at->second.opened.bytes};
    }

    /// Allocations that are open.
    [[nodiscard]] std::size_t size() const {
        const std::lock_guard lock{mutex_};
        return slots_.size();
    }

private:
    void give_back(typename table::iterator at) noexcept {
        const std::lock_guard lock{mutex_};
        if (--at->second.uses == 0) {
            close(at);
        }
    }
    /// Also of a slot that was not opened, or not noted by its address.
    void close(typename table::iterator at) noexcept {
        const auto* const data = at->second.opened.data;
        const auto [first, last] = by_address_.equal_range(std::pair{at->first.device, data});
        for (auto each = first; each != last; ++each) {
            if (each->second == &at->first) {
                by_address_.erase(each);
                break;
            }
        }
        if (data != nullptr) {
            native_.close(at->first.device, data);
        }
        slots_.erase(at);
    }
    void require_fresh(const key& opened, const std::byte* data) const {
        const auto [first, last] = by_address_.equal_range(std::pair{opened.device, data});
        for (auto each = first; each != last; ++each) {
            if (are_different(*each->second, opened)) {
                throw peer_error{
                    "the exporter has freed memory that is still open here, and allocated other "
                    "memory in its place; close what is open of the former first"};
            }
        }
    }
    /// Whether two keys cannot mean the same memory; what is not known decides nothing.
    [[nodiscard]] static bool are_different(const key& a, const key& b) noexcept {
        const auto differ = [](auto x, auto y) { return x != 0 && y != 0 && x != y; };
        return differ(a.buffer_id, b.buffer_id) || differ(a.base, b.base) ||
               differ(a.from.pid, b.from.pid) || differ(a.from.start_time, b.from.start_time);
    }

    mutable std::mutex mutex_;
    table slots_;
    std::multimap<std::pair<int, const std::byte*>, const key*> by_address_;
    Native native_;
};

}  // namespace weightwire::gpu
