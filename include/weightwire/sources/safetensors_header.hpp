#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/sources/safetensors_json.hpp>

/// @file
/// The header of a `.safetensors` file: eight bytes of little-endian length, that many bytes of
/// JSON, then the data. Pure: bytes in, a checked table out. Everything in the file is foreign
/// until it has passed here.
///
/// What is accepted is what the format says, and no more: every data byte belongs to exactly one
/// tensor, and every tensor's span has the size that its dtype and shape give.

namespace weightwire {

/// How much a header may ask for. The defaults are far above any checkpoint in use.
struct safetensors_limits {
    std::uint64_t header_bytes = 100'000'000;  ///< length of the JSON; the format's own limit
    std::size_t tensors = 2'000'000;           ///< entries of one header or index
    std::size_t name_bytes = 4096;             ///< length of one tensor's name
    std::size_t files = 65'536;                ///< shards that an index may name
};

/// One tensor of a header. Its shape is torch's: for F4 the header's last extent halved.
struct safetensors_entry {
    param_meta meta;          ///< name, dtype and shape
    std::uint64_t begin = 0;  ///< first byte, counted from `safetensors_header::data_begin`
    std::uint64_t end = 0;    ///< one past the last byte
};

/// A header that has been checked against its file.
struct safetensors_header {
    std::vector<safetensors_entry> tensors;       ///< by offset; tensors without bytes by name
    std::map<std::string, std::string> metadata;  ///< `__metadata__`
    std::uint64_t data_begin = 0;                 ///< where the data begins in the file
};

namespace detail {

/// Builds the table of a header from its JSON, and checks every entry on its own.
class header_handler : public refusing_handler<header_handler> {
public:
    header_handler(std::string_view file, const safetensors_limits& limits,
                   std::uint64_t data_bytes)
        : file_{file}, limits_{limits}, data_bytes_{data_bytes} {}

    bool key(std::string& name) {
        key_ = std::move(name);
        if (place_ == place::root) {
            begin_entry();
        } else if (place_ == place::tensor) {
            begin_field();
        } else if (header_.metadata.contains(key_)) {
            fail("__metadata__ has the key '" + clipped(key_) + "' twice");
        }
        return true;
    }

    bool start_object(std::size_t) {
        switch (place_) {
            case place::outside: place_ = place::root; return true;
            case place::root: place_ = in_metadata_ ? place::metadata : place::tensor; return true;
            default: return refuse("an object");
        }
    }

    bool end_object() {
        if (place_ == place::tensor) {
            end_entry();
        }
        place_ = place_ == place::root ? place::outside : place::root;
        return true;
    }

    bool start_array(std::size_t) {
        if (place_ != place::tensor || field_ == field::dtype) {
            return refuse("an array");
        }
        place_ = field_ == field::shape ? place::shape : place::offsets;
        return true;
    }

    bool end_array() {
        if (place_ == place::offsets && offset_count_ != 2) {
            fail("data_offsets has " + std::to_string(offset_count_) + " numbers instead of 2");
        }
        place_ = place::tensor;
        return true;
    }

    bool string(std::string& value) {
        if (place_ == place::metadata) {
            header_.metadata.emplace(std::move(key_), std::move(value));
            return true;
        }
        if (place_ != place::tensor || field_ != field::dtype) {
            return refuse("a string");
        }
        dtype_ = dtype_from_safetensors(value);
        if (!dtype_) {
            fail("its dtype '" + clipped(value) + "' is none that this reader knows");
        }
        return true;
    }

    bool number_unsigned(std::uint64_t value) {
        if (place_ == place::shape) {
            add_extent(value);
        } else if (place_ == place::offsets) {
            if (offset_count_ < offsets_.size()) {
                offsets_[offset_count_] = value;
            }
            ++offset_count_;
        } else {
            return refuse("a number");
        }
        return true;
    }

    [[noreturn]] bool refuse(std::string_view what) const {
        switch (place_) {
            case place::outside: fail(std::string{"the header is "}.append(what) + ", no object");
            case place::metadata: fail(metadata_problem(what));
            case place::root:
                fail(in_metadata_ ? metadata_problem(what)
                                  : std::string{"its entry is "}.append(what) + ", no object");
            default: fail(field_problem(what));
        }
    }

    [[noreturn]] bool malformed(std::size_t position, std::string_view why) const {
        fail("the header is no JSON at its byte " + std::to_string(position) + ": " +
             std::string{why});
    }

    [[nodiscard]] safetensors_header take() { return std::move(header_); }

private:
    enum class place : std::uint8_t { outside, root, metadata, tensor, shape, offsets };
    enum class field : std::uint8_t { dtype, shape, offsets };

    [[noreturn]] void fail(std::string_view what) const {
        fail_in_file(file_, entry_.meta.name, what);
    }
    [[nodiscard]] std::string metadata_problem(std::string_view what) const {
        return std::string{"__metadata__ must map strings to strings, and holds "}.append(what);
    }
    [[nodiscard]] std::string field_problem(std::string_view what) const {
        switch (field_) {
            case field::dtype: return std::string{"its dtype is "}.append(what) + ", no string";
            case field::shape:
                return std::string{"its shape holds or is "}.append(what) +
                       ", where an array of extents belongs";
            default:
                return std::string{"its data_offsets hold or are "}.append(what) +
                       ", where an array of two offsets belongs";
        }
    }

    void begin_entry() {
        entry_ = {};
        in_metadata_ = key_ == "__metadata__";
        if (in_metadata_) {
            if (std::exchange(seen_metadata_, true)) {
                fail("the header has __metadata__ twice");
            }
            return;
        }
        if (!is_usable_name(key_, limits_.name_bytes)) {
            fail("the tensor name '" + clipped(key_) + "' is empty, longer than " +
                 std::to_string(limits_.name_bytes) + " bytes or has control characters");
        }
        if (header_.tensors.size() == limits_.tensors) {
            fail("the header names more than " + std::to_string(limits_.tensors) + " tensors");
        }
        entry_.meta.name = key_;
        seen_ = {};
        dtype_.reset();
        extent_count_ = 0;
        offset_count_ = 0;
    }

    void begin_field() {
        if (key_ == "dtype") {
            field_ = field::dtype;
        } else if (key_ == "shape") {
            field_ = field::shape;
        } else if (key_ == "data_offsets") {
            field_ = field::offsets;
        } else {
            fail("its entry has the unknown key '" + clipped(key_) +
                 "'; known are dtype, shape and data_offsets");
        }
        if (std::exchange(seen_[static_cast<std::size_t>(field_)], true)) {
            fail("its entry has the key '" + key_ + "' twice");
        }
    }

    void add_extent(std::uint64_t value) {
        if (extent_count_ == max_dimensions) {
            fail("its shape has more than " + std::to_string(max_dimensions) + " dimensions");
        }
        const auto extent = checked_cast<std::int64_t>(value);
        if (!extent) {
            fail("its shape has the extent " + std::to_string(value) + ", which is 2^63 or more");
        }
        extents_[extent_count_++] = *extent;
    }

    void end_entry() {
        constexpr std::array<std::string_view, 3> keys{"dtype", "shape", "data_offsets"};
        for (std::size_t i = 0; i < keys.size(); ++i) {
            if (!seen_[i]) {
                fail(std::string{"its entry has no "}.append(keys[i]));
            }
        }
        const shape header_shape{std::span<const std::int64_t>{extents_.data(), extent_count_}};
        const auto converted = shape_from_safetensors(*dtype_, header_shape);
        if (!converted) {
            fail("its F4 shape " + to_string(header_shape) +
                 " has no last extent, or an odd one: pairs of 4-bit values make the bytes");
        }
        entry_.meta.dtype = *dtype_;
        entry_.meta.shape = *converted;
        check_span(header_shape);
        header_.tensors.push_back(std::move(entry_));
        entry_ = {};
    }

    void check_span(const shape& header_shape) {
        std::tie(entry_.begin, entry_.end) = std::pair{offsets_[0], offsets_[1]};
        const auto bytes = checked_byte_size(entry_.meta.dtype, entry_.meta.shape);
        const auto name = std::string{traits_of(entry_.meta.dtype).safetensors};
        if (!bytes) {
            fail("the size of " + to_string(header_shape) + " in " + name +
                 " is no whole number of bytes below 2^64");
        }
        const auto offsets =
            "[" + std::to_string(entry_.begin) + ", " + std::to_string(entry_.end) + "]";
        if (entry_.end < entry_.begin || entry_.end - entry_.begin != *bytes) {
            fail("its data_offsets " + offsets + " do not span the " + std::to_string(*bytes) +
                 " bytes of " + to_string(header_shape) + " in " + name);
        }
        if (entry_.end > data_bytes_) {
            fail("its data_offsets " + offsets + " reach past the " + std::to_string(data_bytes_) +
                 " data bytes of the file; it is truncated");
        }
    }

    std::string_view file_;
    safetensors_limits limits_;
    std::uint64_t data_bytes_;
    safetensors_header header_{};
    place place_ = place::outside;
    std::string key_{};
    bool in_metadata_ = false;
    bool seen_metadata_ = false;
    // The entry that is being read.
    safetensors_entry entry_{};
    field field_ = field::dtype;
    std::array<bool, 3> seen_{};
    std::optional<dtype> dtype_{};
    std::array<std::int64_t, max_dimensions> extents_{};
    std::size_t extent_count_ = 0;
    std::array<std::uint64_t, 2> offsets_{};
    std::size_t offset_count_ = 0;
};

/// Every name once.
inline void check_names(const std::vector<safetensors_entry>& tensors, std::string_view file) {
    std::vector<std::string_view> names;
    names.reserve(tensors.size());
    for (const auto& entry : tensors) {
        names.emplace_back(entry.meta.name);
    }
    std::ranges::sort(names);
    if (const auto twice = std::ranges::adjacent_find(names); twice != names.end()) {
        fail_in_file(file, *twice, "the header has this tensor twice");
    }
}

/// Every data byte in exactly one tensor. Sorts by offset.
inline void check_layout(std::vector<safetensors_entry>& tensors, std::uint64_t data_bytes,
                         std::string_view file) {
    std::ranges::sort(tensors, {}, [](const safetensors_entry& entry) {
        return std::tuple{entry.begin, entry.end, std::string_view{entry.meta.name}};
    });
    std::uint64_t covered = 0;
    std::string_view last = "nothing";
    for (const auto& entry : tensors) {
        if (entry.begin != covered) {
            fail_in_file(file, entry.meta.name,
                         entry.begin < covered
                             ? "its data begins at byte " + std::to_string(entry.begin) +
                                   " and overlaps " + std::string{last} + ", which ends at " +
                                   std::to_string(covered)
                             : "there is a gap of " + std::to_string(entry.begin - covered) +
                                   " bytes before its data, after " + std::string{last});
        }
        covered = entry.end;
        last = entry.meta.name;
    }
    if (covered != data_bytes) {
        fail_in_file(file, {},
                     std::to_string(data_bytes - covered) + " of the " +
                         std::to_string(data_bytes) +
                         " data bytes, at the end, belong to no tensor");
    }
}

/// The JSON of a header, as far as the lengths allow.
inline std::span<const std::byte> header_text(std::span<const std::byte> file,
                                              std::string_view file_name,
                                              const safetensors_limits& limits) {
    constexpr std::size_t length_bytes = 8;
    if (file.size() < length_bytes) {
        fail_in_file(file_name, {},
                     "the file has " + std::to_string(file.size()) +
                         " bytes, fewer than the 8 of its header's length; it is truncated or no "
                         "safetensors file");
    }
    std::uint64_t length = 0;
    for (std::size_t i = length_bytes; i-- > 0;) {
        length = length << 8U | std::to_integer<std::uint64_t>(file[i]);
    }
    if (length > limits.header_bytes) {
        fail_in_file(file_name, {},
                     "the header claims " + std::to_string(length) + " bytes, over the limit of " +
                         std::to_string(limits.header_bytes) + "; is it a safetensors file?");
    }
    if (length > file.size() - length_bytes) {
        fail_in_file(file_name, {},
                     "the header claims " + std::to_string(length) + " bytes, where the file has " +
                         std::to_string(file.size() - length_bytes) + " left; it is truncated");
    }
    const auto text = file.subspan(length_bytes, static_cast<std::size_t>(length));
    if (text.empty() || text.front() != std::byte{'{'}) {
        fail_in_file(file_name, {}, "the header does not begin with '{'");
    }
    return text;
}

}  // namespace detail

/// Reads and checks the header of a file.
/// @param file all bytes of the file.
/// @param file_name for messages.
/// @throws data_error anything that the format does not allow: names file and tensor, and says what
/// was expected and found.
[[nodiscard]] inline safetensors_header parse_safetensors_header(
    std::span<const std::byte> file, std::string_view file_name,
    const safetensors_limits& limits = {}) {
    const auto text = detail::header_text(file, file_name, limits);
    const std::uint64_t data_begin = 8 + text.size();
    const std::uint64_t data_bytes = file.size() - data_begin;
    detail::header_handler handler{file_name, limits, data_bytes};
    detail::read_json(text, file_name, handler);
    auto header = handler.take();
    header.data_begin = data_begin;
    detail::check_names(header.tensors, file_name);
    detail::check_layout(header.tensors, data_bytes, file_name);
    return header;
}

}  // namespace weightwire
