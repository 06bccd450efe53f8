#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/descriptor.hpp>

/// @file
/// Which sealed memory file an address of this process belongs to.
///
/// The kernel keeps that table already (`/proc/self/maps` and `/proc/self/fd`), so there is none
/// here: no registry to fill, no global to guard, and memory that a user sealed and mapped without
/// this library is found as well. Reading it costs about a millisecond and happens at init only.

namespace weightwire::shm {

/// The seals that a reader relies on: the memory behind a mapping cannot go away under it.
inline constexpr int required_seals = F_SEAL_SHRINK | F_SEAL_GROW;

/// Names a file, whatever descriptor leads to it.
struct file_identity {
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    friend bool operator==(const file_identity&, const file_identity&) noexcept = default;

    [[nodiscard]] static file_identity of(const struct stat& status) noexcept {
        return {.device = makedev(major(status.st_dev), minor(status.st_dev)),
                .inode = status.st_ino};
    }
};

/// A picture of this process's shared mappings of memory files, taken when it is made.
class address_map {
public:
    /// A run of addresses that shows a run of one file's bytes.
    struct region {
        std::uintptr_t begin = 0;
        std::uintptr_t end = 0;
        std::uint64_t offset = 0;  ///< in the file, of the byte at `begin`
        file_identity file{};
        bool writable = false;
    };
    /// Where an address lies in its file.
    struct place {
        file_identity file{};
        std::uint64_t offset = 0;
    };

    /// Reads the table of this process.
    /// @throws resource_error `/proc` cannot be read.
    [[nodiscard]] static address_map of_this_process();

    /// The file and offset of bytes `[address, address + length)`, when all of them lie in one
    /// shared mapping of a memory file.
    [[nodiscard]] std::optional<place> find(const void* address, std::uint64_t length) const {
        const auto first = reinterpret_cast<std::uintptr_t>(address);
        const auto after =
            std::upper_bound(regions_.begin(), regions_.end(), first,
                             [](std::uintptr_t at, const region& r) { return at < r.begin; });
        if (after == regions_.begin()) {
            return std::nullopt;
        }
        const auto& found = *std::prev(after);
        if (first >= found.end || length > found.end - first) {
            return std::nullopt;
        }
        return place{.file = found.file, .offset = found.offset + (first - found.begin)};
    }

    /// Where this process already sees bytes `[offset, offset + length)` of `file`; null where it
    /// does not.
    [[nodiscard]] std::byte* address_of(const file_identity& file, std::uint64_t offset,
                                        std::uint64_t length, bool writable) const {
        for (const auto& each : regions_) {
            const auto bytes = static_cast<std::uint64_t>(each.end - each.begin);
            if (each.file == file && (each.writable || !writable) && offset >= each.offset &&
                offset - each.offset <= bytes && length <= bytes - (offset - each.offset)) {
                return reinterpret_cast<std::byte*>(each.begin + (offset - each.offset));
            }
        }
        return nullptr;
    }

    [[nodiscard]] const std::vector<region>& regions() const noexcept { return regions_; }

private:
    void add_line(std::string_view line);

    std::vector<region> regions_;  ///< by address, neighbours joined
};

/// An open descriptor of this process that leads to `file` and has the required seals; nothing
/// where there is none, because then no other process can open the file.
/// @throws resource_error no descriptor is left to look.
[[nodiscard]] inline std::optional<int> sealed_descriptor_of(const file_identity& file) {
    const std::unique_ptr<DIR, int (*)(DIR*)> folder{::opendir("/proc/self/fd"), &::closedir};
    if (!folder) {
        require_descriptors(errno, "opendir(/proc/self/fd)");
        return std::nullopt;
    }
    while (const auto* entry = ::readdir(folder.get())) {
        const std::string_view name{entry->d_name};
        int number = -1;
        const auto [end, status] = std::from_chars(name.data(), name.data() + name.size(), number);
        struct stat info {};
        if (status != std::errc{} || end != name.data() + name.size() ||
            ::fstat(number, &info) != 0 || file_identity::of(info) != file) {
            continue;
        }
        const int seals = ::fcntl(number, F_GET_SEALS);
        if (seals >= 0 && (seals & required_seals) == required_seals) {
            return number;
        }
    }
    return std::nullopt;
}

namespace detail {

/// All of a file of `/proc`, whose size is not known before.
[[nodiscard]] inline std::string read_whole(const char* path) {
    const auto file = descriptor::from_native(::open(path, O_RDONLY | O_CLOEXEC));
    std::string text;
    std::array<char, 16384> piece{};
    for (;;) {
        const auto count = file ? ::read(file.native_handle(), piece.data(), piece.size()) : -1;
        if (count < 0) {
            const int code = errno;
            require_descriptors(code, path);
            throw resource_error{
                "shared memory between processes needs /proc, which cannot be read; mount it",
                with_errno({}, path, code)};
        }
        if (count == 0) {
            return text;
        }
        text.append(piece.data(), static_cast<std::size_t>(count));
    }
}

/// Takes the number that `text` begins with, and the one character after it.
[[nodiscard]] inline std::optional<std::uint64_t> take_number(std::string_view& text,
                                                              int base) noexcept {
    std::uint64_t value = 0;
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (status != std::errc{}) {
        return std::nullopt;
    }
    const auto used = static_cast<std::size_t>(end - text.data());
    text.remove_prefix(std::min(text.size(), used + 1));
    return value;
}

}  // namespace detail

inline address_map address_map::of_this_process() {
    const auto text = detail::read_whole("/proc/self/maps");
    address_map result;
    std::string_view rest{text};
    while (!rest.empty()) {
        const auto end = std::min(rest.find('\n'), rest.size());
        result.add_line(rest.substr(0, end));
        rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    return result;
}

/// `7f01-7f02 rw-s 00001000 00:01 4711    /memfd:name (deleted)`
inline void address_map::add_line(std::string_view line) {
    if (line.find(" /memfd:") == std::string_view::npos) {
        return;
    }
    const auto begin = detail::take_number(line, 16);
    const auto end = detail::take_number(line, 16);
    if (!begin || !end || line.size() < 5 || line[3] != 's') {
        return;
    }
    const bool writable = line[1] == 'w';
    line.remove_prefix(5);
    const auto offset = detail::take_number(line, 16);
    const auto device_major = detail::take_number(line, 16);
    const auto device_minor = detail::take_number(line, 16);
    const auto inode = detail::take_number(line, 10);
    if (!offset || !device_major || !device_minor || !inode) {
        return;
    }
    const region next{.begin = static_cast<std::uintptr_t>(*begin),
                      .end = static_cast<std::uintptr_t>(*end),
                      .offset = *offset,
                      .file = {.device = makedev(static_cast<unsigned>(*device_major),
                                                 static_cast<unsigned>(*device_minor)),
                               .inode = *inode},
                      .writable = writable};
    // One mapping shows as several lines where advice or protection differ inside it.
    if (!regions_.empty()) {
        auto& last = regions_.back();
        if (last.end == next.begin && last.file == next.file && last.writable == next.writable &&
            last.offset + (last.end - last.begin) == next.offset) {
            last.end = next.end;
            return;
        }
    }
    regions_.push_back(next);
}

}  // namespace weightwire::shm
