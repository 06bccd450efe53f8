#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <weightwire/sources/safetensors_header.hpp>
#include <weightwire/sources/safetensors_json.hpp>

/// @file
/// The index of a sharded checkpoint, `model.safetensors.index.json`: which shard holds which
/// tensor. Pure: bytes in, a checked table out.

namespace weightwire {

/// An index that has been read. Whether the shards agree with it is `safetensors_source`'s to find
/// out.
struct safetensors_index {
    /// Shards that the index names, sorted by name: the order in which they are sent.
    std::vector<std::string> files;
    /// Position in `files` of every tensor's shard.
    std::unordered_map<std::string, std::size_t> shard_of;
    /// `metadata.total_size`, the bytes of all tensors, where it is given and a whole number.
    std::optional<std::uint64_t> total_bytes;
};

namespace detail {

/// Whether `path` stays below the folder that it is relative to.
[[nodiscard]] inline bool is_inside_path(std::string_view path) noexcept {
    for (std::size_t begin = 0; begin <= path.size();) {
        const auto end = std::min(path.find('/', begin), path.size());
        const auto part = path.substr(begin, end - begin);
        if (part.empty() || part == "." || part == "..") {
            return false;
        }
        begin = end + 1;
    }
    return is_usable_name(path, 4096);
}

/// Builds the table of an index from its JSON. `metadata` may hold anything, to a small depth: the
/// format does not say what is in it, and only `total_size` is looked at.
class index_handler : public refusing_handler<index_handler> {
public:
    index_handler(std::string_view file, const safetensors_limits& limits)
        : file_{file}, limits_{limits} {}

    bool key(std::string& name) {
        key_ = std::move(name);
        if (place_ == place::root) {
            const bool known = key_ == "metadata" || key_ == "weight_map";
            auto& seen = key_ == "metadata" ? seen_metadata_ : seen_map_;
            if (!known) {
                fail({}, "the index has the unknown key '" + clipped(key_) +
                             "'; known are metadata and weight_map");
            }
            if (std::exchange(seen, true)) {
                fail({}, "the index has the key '" + key_ + "' twice");
            }
        } else if (place_ == place::map && !is_usable_name(key_, limits_.name_bytes)) {
            fail({}, "the tensor name '" + clipped(key_) +
                         "' is empty, too long or has control characters");
        }
        return true;
    }

    bool start_object(std::size_t) { return open("an object"); }
    bool start_array(std::size_t) {
        return place_ == place::metadata ? open("an array") : refuse("an array");
    }
    bool end_array() { return close(); }
    bool end_object() { return close(); }

    bool string(std::string& value) {
        if (place_ != place::map) {
            return scalar("a string");
        }
        if (!is_inside_path(value)) {
            fail(key_, "its shard '" + clipped(value) +
                           "' is no path below the folder of the index: absolute ones and '..' "
                           "are not followed");
        }
        const auto [shard, fresh] = files_.emplace(std::move(value), files_.size());
        if (fresh && files_.size() > limits_.files) {
            fail(key_, "the index names more than " + std::to_string(limits_.files) + " shards");
        }
        if (index_.shard_of.size() == limits_.tensors) {
            fail(key_, "the index names more than " + std::to_string(limits_.tensors) + " tensors");
        }
        if (!index_.shard_of.emplace(key_, shard->second).second) {
            fail(key_, "the index names this tensor twice");
        }
        return true;
    }
    bool number_unsigned(std::uint64_t value) {
        if (at_total_size()) {
            index_.total_bytes = value;
        }
        return scalar("a number");
    }
    /// Some writers count bits and divide, so a whole total comes as `123.0`.
    bool number_float(double value, const std::string& text) {
        constexpr double exact = 9007199254740992.0;  // 2^53: whole numbers below are exact
        if (at_total_size() && value >= 0 && value <= exact && std::floor(value) == value) {
            index_.total_bytes = static_cast<std::uint64_t>(value);
        }
        return scalar("the number " + clipped(text));
    }
    bool number_integer(std::int64_t) { return scalar("a negative number"); }
    bool null() { return scalar("null"); }
    bool boolean(bool) { return scalar("a boolean"); }

    [[noreturn]] bool refuse(std::string_view what) const {
        if (place_ == place::map) {
            fail(key_, std::string{"its entry is "}.append(what) + ", no file name");
        }
        fail({}, std::string{"the index holds "}.append(what) +
                     " where it must be an object whose metadata and weight_map are objects");
    }
    [[noreturn]] bool malformed(std::size_t position, std::string_view why) const {
        fail({}, "the index is no JSON at its byte " + std::to_string(position) + ": " +
                     std::string{why});
    }

    /// The index with its files sorted by name.
    /// @throws data_error there is no weight_map, or nothing in it.
    [[nodiscard]] safetensors_index take() {
        if (index_.shard_of.empty()) {
            fail({}, "the index has no weight_map, or an empty one");
        }
        for (const auto& [file, number] : files_) {
            index_.files.push_back(file);
        }
        std::ranges::sort(index_.files);
        std::vector<std::size_t> position(files_.size());
        for (std::size_t i = 0; i < index_.files.size(); ++i) {
            position[files_.at(index_.files[i])] = i;
        }
        for (auto& [tensor, shard] : index_.shard_of) {
            shard = position[shard];
        }
        return std::move(index_);
    }

private:
    enum class place : std::uint8_t { outside, root, metadata, map };
    static constexpr std::size_t max_metadata_depth = 16;

    [[noreturn]] void fail(std::string_view tensor, std::string_view what) const {
        fail_in_file(file_, tensor, what);
    }
    /// A value that is nobody's but `metadata`'s own.
    bool scalar(std::string_view what) { return place_ == place::metadata || refuse(what); }
    [[nodiscard]] bool at_total_size() const {
        return place_ == place::metadata && depth_ == 1 && key_ == "total_size";
    }

    bool open(std::string_view what) {
        if (place_ == place::outside) {
            place_ = place::root;
        } else if (place_ == place::root) {
            place_ = key_ == "metadata" ? place::metadata : place::map;
            depth_ = 1;
        } else if (place_ == place::map) {
            return refuse(what);
        } else if (++depth_ > max_metadata_depth) {
            fail({}, "metadata is nested deeper than " + std::to_string(max_metadata_depth));
        }
        return true;
    }
    bool close() {
        if (place_ == place::root) {
            place_ = place::outside;
        } else if (--depth_ == 0) {
            place_ = place::root;
        }
        return true;
    }

    std::string_view file_;
    safetensors_limits limits_;
    safetensors_index index_{};
    std::unordered_map<std::string, std::size_t> files_{};
    place place_ = place::outside;
    std::size_t depth_ = 0;
    std::string key_{};
    bool seen_metadata_ = false;
    bool seen_map_ = false;
};

}  // namespace detail

/// Reads and checks an index.
/// @param text all bytes of the index file.
/// @param file_name for messages.
/// @throws data_error anything that an index may not hold: an unknown key, a tensor twice, a shard
/// that is not below the index's own folder, an empty map.
[[nodiscard]] inline safetensors_index parse_safetensors_index(
    std::span<const std::byte> text, std::string_view file_name,
    const safetensors_limits& limits = {}) {
    if (text.size() > limits.header_bytes) {
        detail::fail_in_file(file_name, {},
                             "the index has " + std::to_string(text.size()) +
                                 " bytes, over the limit of " +
                                 std::to_string(limits.header_bytes));
    }
    detail::index_handler handler{file_name, limits};
    detail::read_json(text, file_name, handler);
    return handler.take();
}

}  // namespace weightwire
