#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sources/safetensors_json.hpp>

/// @file
/// Writes safetensors checkpoints that this library and the original one read.

namespace weightwire {

namespace detail {

/// `text` as a JSON string.
/// @throws data_error it is not UTF-8.
[[nodiscard]] inline std::string json_string(std::string_view text) {
    try {
        return nlohmann::json(text).dump();
    } catch (const nlohmann::json::exception&) {
        throw data_error{"the text '" + clipped(text) + "' is no UTF-8, which JSON needs"};
    }
}

/// A file that appears under its name only when it is complete. Move-only; an abandoned one is
/// removed.
class pending_file {
public:
    /// @throws resource_error the file cannot be made.
    explicit pending_file(std::string path)
        : path_{std::move(path)}, pending_path_{path_ + ".partial-" + std::to_string(::getpid())} {
        descriptor_ = ::open(pending_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (descriptor_ < 0) {
            fail("open", errno);
        }
    }
    pending_file(pending_file&& other) noexcept
        : path_{std::move(other.path_)},
          pending_path_{std::move(other.pending_path_)},
          descriptor_{std::exchange(other.descriptor_, -1)} {}
    pending_file(const pending_file&) = delete;
    pending_file& operator=(const pending_file&) = delete;
    pending_file& operator=(pending_file&&) = delete;
    ~pending_file() {
        if (descriptor_ >= 0) {
            ::close(descriptor_);
            ::unlink(pending_path_.c_str());
        }
    }

    /// @throws resource_error no space, or another reason of the kernel's.
    void write(std::span<const std::byte> bytes) {
        while (!bytes.empty()) {
            const auto count = ::write(descriptor_, bytes.data(), bytes.size());
            if (count < 0 && errno != EINTR) {
                fail("write", errno);
            }
            bytes = bytes.subspan(count < 0 ? 0 : static_cast<std::size_t>(count));
        }
    }
    void write(std::string_view text) { write(std::as_bytes(std::span{text})); }

    /// Gives the file its name, replacing what had it.
    /// @throws resource_error the last bytes cannot be written, or the name cannot be given.
    void publish() {
        if (::close(std::exchange(descriptor_, -1)) != 0) {
            const int code = errno;
            ::unlink(pending_path_.c_str());
            fail("close", code);
        }
        if (::rename(pending_path_.c_str(), path_.c_str()) != 0) {
            const int code = errno;
            ::unlink(pending_path_.c_str());
            fail("rename", code);
        }
    }
    [[nodiscard]] const std::string& path() const noexcept { return path_; }

private:
    [[noreturn]] void fail(const char* operation, int code) const {
        throw resource_error{
            path_ + ": the file cannot be written",
            {.operation = operation, .native_code = code, .native_text = std::strerror(code)}};
    }

    std::string path_;
    std::string pending_path_;
    int descriptor_ = -1;
};

/// The JSON of a header for tensors that follow each other in this order.
[[nodiscard]] inline std::string header_json(const manifest& parameters,
                                             const std::map<std::string, std::string>& metadata) {
    std::string out = "{";
    for (const auto& [key, value] : metadata) {
        out.append(out.size() == 1 ? "\"__metadata__\":{" : ",")
            .append(json_string(key).append(":").append(json_string(value)));
    }
    out.append(metadata.empty() ? "" : "}");
    std::uint64_t begin = 0;
    for (const auto& parameter : parameters.parameters()) {
        const auto extents = shape_to_safetensors(parameter.dtype, parameter.shape);
        const auto dtype_name = traits_of(parameter.dtype).safetensors;
        if (dtype_name.empty() || !extents || parameter.name == "__metadata__" ||
            !is_usable_name(parameter.name, 4096)) {
            throw data_error{
                "the safetensors format has no spelling for this parameter, of dtype " +
                    std::string{to_string(parameter.dtype)} + " and shape " +
                    to_string(parameter.shape),
                {.tensor = parameter.name}};
        }
        const auto end = begin + parameter.byte_size();
        out.append(out.size() == 1 ? "" : ",").append(json_string(parameter.name));
        out.append(":{\"dtype\":\"").append(dtype_name).append("\",\"shape\":");
        out.append(to_string(*extents)).append(",\"data_offsets\":[");
        out.append(std::to_string(begin)).append(",").append(std::to_string(end)).append("]}");
        begin = end;
    }
    out.append("}");
    return out.append((8 - out.size() % 8) % 8, ' ');  // so that the data begins aligned
}

}  // namespace detail

/// Writes one `.safetensors` file tensor by tensor, in the order of its metadata, so that a source
/// that materializes one tensor at a time can be written in the memory of one. The file appears
/// under its name in `finish()`; abandoned before, it leaves nothing.
class safetensors_writer {
public:
    /// @param parameters what will be appended, in that order.
    /// @param metadata the `__metadata__` of the header.
    /// @throws data_error the format cannot express a parameter: no spelling for its dtype, a name
    /// that is no UTF-8.
    /// @throws resource_error the file cannot be made.
    safetensors_writer(std::string path, manifest parameters,
                       const std::map<std::string, std::string>& metadata = {})
        : parameters_{std::move(parameters)}, file_{std::move(path)} {
        const auto header = detail::header_json(parameters_, metadata);
        std::array<std::byte, 8> length{};
        for (std::size_t i = 0; i < length.size(); ++i) {
            length[i] = static_cast<std::byte>(std::uint64_t{header.size()} >> (8 * i) & 0xFFU);
        }
        file_.write(length);
        file_.write(header);
    }

    /// Writes the next tensor.
    /// @throws data_error it is not what the metadata names at this place.
    /// @throws usage_error it is not contiguous, or not in host memory.
    void append(const named_tensor& next) {
        if (written_ == parameters_.size()) {
            throw data_error{file_.path() + ": more tensors are written than the metadata names",
                             {.tensor = std::string{next.name}}};
        }
        const auto& expected = parameters_[written_];
        if (next.name != expected.name || next.tensor.type() != expected.dtype ||
            next.tensor.extents() != expected.shape) {
            throw data_error{file_.path() + ": " + std::string{next.name} + " " +
                                 std::string{to_string(next.tensor.type())} +
                                 to_string(next.tensor.extents()) +
                                 " is written, where the metadata names " +
                                 std::string{to_string(expected.dtype)} + to_string(expected.shape),
                             {.tensor = expected.name}};
        }
        file_.write(next.tensor.bytes());
        ++written_;
    }

    /// Gives the file its name.
    /// @throws data_error tensors are missing.
    /// @throws resource_error the kernel refuses.
    void finish() {
        if (written_ != parameters_.size()) {
            throw data_error{file_.path() + ": " + std::to_string(written_) + " of " +
                                 std::to_string(parameters_.size()) +
                                 " tensors were written; this one is next",
                             {.tensor = parameters_[written_].name}};
        }
        file_.publish();
    }

private:
    manifest parameters_;
    detail::pending_file file_;
    std::size_t written_ = 0;
};

/// Writes one round of `source` to `path`. Blocks; replaces what was there, at the end.
/// @throws data_error the source disagrees with its metadata, or the format cannot express it.
/// @throws usage_error a tensor is not contiguous in host memory.
/// @throws resource_error the file cannot be written.
template <WeightSource Source>
void write_safetensors(std::string path, Source&& source,
                       const std::map<std::string, std::string>& metadata = {}) {
    std::vector<param_meta> parameters;
    for (auto&& parameter : source.metadata()) {
        parameters.push_back(parameter);
    }
    safetensors_writer writer{std::move(path), manifest{std::move(parameters)}, metadata};
    for (auto&& tensor : source.weights()) {
        writer.append(tensor);
    }
    writer.finish();
}

/// Writes a range of `named_tensor`, walked twice. @copydetails write_safetensors
template <std::ranges::forward_range Tensors>
    requires(std::convertible_to<std::ranges::range_reference_t<Tensors>, named_tensor> &&
             !WeightSource<Tensors>)
void write_safetensors(std::string path, Tensors&& tensors,
                       const std::map<std::string, std::string>& metadata = {}) {
    std::vector<param_meta> parameters;
    for (const named_tensor& tensor : tensors) {
        parameters.push_back(
            {std::string{tensor.name}, tensor.tensor.type(), tensor.tensor.extents()});
    }
    safetensors_writer writer{std::move(path), manifest{std::move(parameters)}, metadata};
    for (const named_tensor& tensor : tensors) {
        writer.append(tensor);
    }
    writer.finish();
}

/// Writes the index of a sharded checkpoint.
/// @param path its name, by custom `model.safetensors.index.json`.
/// @param weight_map tensor name to shard, relative to the index.
/// @param total_bytes bytes of all tensors.
/// @throws data_error a name is no UTF-8.
/// @throws resource_error the file cannot be written.
inline void write_safetensors_index(std::string path,
                                    const std::map<std::string, std::string>& weight_map,
                                    std::uint64_t total_bytes) {
    std::string text =
        "{\"metadata\":{\"total_size\":" + std::to_string(total_bytes) + "},\n\"weight_map\":{";
    std::string_view separator = "\n";
    for (const auto& [tensor, file] : weight_map) {
        text.append(separator).append(detail::json_string(tensor)).append(":");
        text.append(detail::json_string(file));
        separator = ",\n";
    }
    detail::pending_file out{std::move(path)};
    out.write(text.append("\n}}\n"));
    out.publish();
}

}  // namespace weightwire
