#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/sources/mapped_file.hpp>
#include <weightwire/sources/safetensors_header.hpp>
#include <weightwire/sources/safetensors_index.hpp>

/// @file
/// A safetensors checkpoint as a `WeightSource`: memory-mapped, nothing of it kept in memory of its
/// own.

namespace weightwire {

/// One `.safetensors` file: its mapping and its checked header.
class safetensors_file {
public:
    /// @throws data_error the file does not exist or is no valid safetensors file.
    /// @throws resource_error it cannot be mapped.
    explicit safetensors_file(std::string path, const safetensors_limits& limits = {})
        : file_{std::move(path)},
          header_{parse_safetensors_header(file_.bytes(), file_.path(), limits)} {}

    [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }
    [[nodiscard]] const safetensors_header& header() const noexcept { return header_; }
    /// The bytes of an entry of this file's header.
    [[nodiscard]] const std::byte* data(const safetensors_entry& entry) const noexcept {
        return file_.bytes().data() + header_.data_begin + entry.begin;
    }
    /// @throws data_error the file was written into, cut or lengthened since it was opened.
    void require_unchanged() const { file_.require_unchanged(); }
    /// Whether `address` lies in this file's mapping.
    [[nodiscard]] bool holds(const std::byte* address) const noexcept {
        return file_.holds(address);
    }
    /// Copies what lies at `address`, in this file's mapping, without touching the mapping.
    /// @throws data_error the file has been cut short. resource_error it cannot be read.
    void read(const std::byte* address, std::span<std::byte> to) const {
        file_.read(static_cast<std::uint64_t>(address - file_.bytes().data()), to);
    }

private:
    mapped_file file_;
    safetensors_header header_;
};

/// How a checkpoint is opened.
struct safetensors_options {
    safetensors_limits limits{};
    /// Whether an index's `metadata.total_size` must be the bytes of all tensors. Some published
    /// checkpoints carry a wrong one; what the tensors themselves say is checked in any case.
    bool require_total_size = true;
};

/// A checkpoint: one file, or the shards of an index. Every tensor of every file is sent, in this
/// order: files sorted by name, within a file by offset, tensors without bytes by name.
///
/// Models `WeightSource` and `HasRead`; addresses are stable. Moving keeps every view into it
/// valid. Several threads may read it at the same time.
///
/// A file that somebody cuts short while it is open is an error to `weights()` and `read()`, and
/// kills a process by SIGBUS that touches a tensor at its address (`mapped_file`). `ipc` copies by
/// `read()`; a source of yours around this one that wants the same has a `read()` that calls it.
class safetensors_source {
public:
    static constexpr tensor_lifetime lifetime = tensor_lifetime::stable;

    /// @param path a `.safetensors` file; an index (a name ending in `.json`); or a folder that
    /// holds either `model.safetensors.index.json` or `model.safetensors`.
    /// @throws data_error there is no such checkpoint, or something in it contradicts the format or
    /// the index: names file and tensor.
    /// @throws resource_error a file cannot be mapped.
    explicit safetensors_source(std::string path, const safetensors_options& options = {}) {
        path = resolve(std::move(path));
        if (path.ends_with(".json")) {
            open_shards(path, options);
        } else {
            files_.emplace_back(std::move(path), options.limits);
        }
        gather();
    }
    safetensors_source(safetensors_source&&) noexcept = default;
    safetensors_source& operator=(safetensors_source&&) noexcept = default;
    safetensors_source(const safetensors_source&) = delete;
    safetensors_source& operator=(const safetensors_source&) = delete;
    ~safetensors_source() = default;

    [[nodiscard]] std::span<const param_meta> metadata() const noexcept { return metadata_; }
    /// The same tensors every round.
    /// @throws data_error a file was written into, cut or lengthened since it was opened.
    [[nodiscard]] std::span<const named_tensor> weights() const {
        for (const auto& file : files_) {
            file.require_unchanged();
        }
        return tensors_;
    }

    /// Copies bytes `[offset, offset + to.size())` of a tensor of this source to `to`, by reading
    /// the file: whatever happens to it meanwhile ends in an error. With the last bytes of a tensor
    /// it looks whether the file was written into, as `weights()` does before the first.
    /// @throws data_error the file is shorter than it was, or was written into; names file and
    /// tensor. resource_error it cannot be read. usage_error `tensor` is not of this source.
    void read(const named_tensor& tensor, std::uint64_t offset, std::span<std::byte> to) const {
        const auto* const address = tensor.tensor.data();
        const auto size = tensor.tensor.byte_size();
        const auto file =
            std::ranges::find_if(files_, [&](const auto& each) { return each.holds(address); });
        if (file == files_.end() || offset > size || to.size() > size - offset) {
            throw usage_error{"these bytes are of no tensor of the checkpoint",
                              {.tensor = std::string{tensor.name}}};
        }
        try {
            file->read(address + offset, to);
            if (offset + to.size() == size) {
                file->require_unchanged();
            }
        } catch (const data_error& changed) {
            auto context = changed.context();
            context.phase = phase::update;
            context.tensor = tensor.name;
            throw data_error{std::string{changed.text()}, std::move(context)};
        }
    }

    /// The tensor of that name.
    /// @throws usage_error there is none.
    [[nodiscard]] tensor_view tensor(std::string_view name) const {
        const auto found = position_.find(name);
        if (found == position_.end()) {
            throw usage_error{"the checkpoint has no tensor of this name",
                              {.tensor = std::string{name}}};
        }
        return tensors_[found->second].tensor;
    }
    [[nodiscard]] bool contains(std::string_view name) const noexcept {
        return position_.contains(name);
    }
    [[nodiscard]] std::size_t size() const noexcept { return metadata_.size(); }
    [[nodiscard]] std::span<const safetensors_file> files() const noexcept { return files_; }

private:
    enum class entry_kind : std::uint8_t { none, folder, other };

    [[nodiscard]] static entry_kind kind_of(const std::string& path) {
        struct stat status {};
        if (::stat(path.c_str(), &status) != 0) {
            return entry_kind::none;
        }
        return S_ISDIR(status.st_mode) ? entry_kind::folder : entry_kind::other;
    }

    /// The file to open for `path`.
    [[nodiscard]] static std::string resolve(std::string path) {
        if (kind_of(path) != entry_kind::folder) {
            return path;
        }
        auto index = path + "/model.safetensors.index.json";
        auto single = path + "/model.safetensors";
        const bool has_index = kind_of(index) != entry_kind::none;
        const bool has_single = kind_of(single) != entry_kind::none;
        if (has_index == has_single) {
            throw data_error{path + (has_index
                                         ? ": the folder holds both model.safetensors and "
                                           "model.safetensors.index.json; give the path of one"
                                         : ": the folder holds neither model.safetensors nor "
                                           "model.safetensors.index.json; give the path of a "
                                           "file")};
        }
        return has_index ? index : single;
    }

    void open_shards(const std::string& path, const safetensors_options& options) {
        const mapped_file index_file{path};
        const auto index = parse_safetensors_index(index_file.bytes(), path, options.limits);
        const auto slash = path.rfind('/');
        const auto folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
        files_.reserve(index.files.size());
        for (const auto& name : index.files) {
            files_.emplace_back(folder + name, options.limits);
        }
        require_agreement(path, index);
        if (options.require_total_size) {
            require_total(path, index);
        }
    }

    /// Every tensor in the shard that the index names, and in no other.
    void require_agreement(const std::string& path, const safetensors_index& index) const {
        std::size_t found = 0;
        for (std::size_t shard = 0; shard < files_.size(); ++shard) {
            for (const auto& entry : files_[shard].header().tensors) {
                const auto named = index.shard_of.find(entry.meta.name);
                if (named == index.shard_of.end() || named->second != shard) {
                    detail::fail_in_file(files_[shard].path(), entry.meta.name,
                                         "the file holds this tensor, which the index " + path +
                                             (named == index.shard_of.end()
                                                  ? " does not name"
                                                  : " places in " + index.files[named->second]));
                }
                ++found;
            }
        }
        if (found != index.shard_of.size()) {
            fail_missing(path, index);
        }
    }

    /// The first tensor, by name, that the index names and its shard does not hold.
    [[noreturn]] void fail_missing(const std::string& path, const safetensors_index& index) const {
        std::map<std::string_view, std::size_t> missing;
        for (const auto& [name, shard] : index.shard_of) {
            missing.emplace(name, shard);
        }
        for (const auto& file : files_) {
            for (const auto& entry : file.header().tensors) {
                missing.erase(entry.meta.name);
            }
        }
        const auto& [name, shard] = *missing.begin();
        detail::fail_in_file(path, name,
                             "the index places this tensor in " + index.files[shard] +
                                 ", which does not hold it; " + std::to_string(missing.size()) +
                                 " of " + std::to_string(index.shard_of.size()) + " are missing");
    }

    void require_total(const std::string& path, const safetensors_index& index) const {
        std::uint64_t total = 0;
        for (const auto& file : files_) {
            for (const auto& entry : file.header().tensors) {
                total += entry.end - entry.begin;
            }
        }
        if (index.total_bytes && *index.total_bytes != total) {
            detail::fail_in_file(path, {},
                                 "metadata.total_size is " + std::to_string(*index.total_bytes) +
                                     ", and the tensors have " + std::to_string(total) +
                                     " bytes; if they are right, open the checkpoint with "
                                     "require_total_size = false");
        }
    }

    void gather() {
        std::size_t count = 0;
        for (const auto& file : files_) {
            count += file.header().tensors.size();
        }
        metadata_.reserve(count);  // names are viewed: the strings may not move any more
        tensors_.reserve(count);
        position_.reserve(count);
        for (const auto& file : files_) {
            for (const auto& entry : file.header().tensors) {
                const auto& meta = metadata_.emplace_back(entry.meta);
                tensors_.push_back(
                    {meta.name, tensor_view{file.data(entry), meta.dtype, meta.shape}});
                position_.emplace(meta.name, position_.size());
            }
        }
    }

    std::vector<safetensors_file> files_;
    std::vector<param_meta> metadata_;
    std::vector<named_tensor> tensors_;
    std::unordered_map<std::string_view, std::size_t> position_;
};

static_assert(WeightSource<safetensors_source> && HasRead<safetensors_source>);

}  // namespace weightwire
