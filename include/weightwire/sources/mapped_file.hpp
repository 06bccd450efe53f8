#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/error.hpp>
#include <weightwire/detail/descriptor.hpp>

/// @file
/// A file mapped for reading.

namespace weightwire {

/// Owns the mapping of a whole regular file, and the descriptor, by which a later write into it is
/// noticed: by the size and the time of the last change, which has the grain of the kernel's clock
/// tick (a few milliseconds).
///
/// A file that is *cut short by somebody while it is mapped* cannot be read safely at its address:
/// the kernel raises SIGBUS at the first touch of a page that is gone. No check closes that window,
/// and a library installs no handler for a signal of the process. `read()` is safe at any time: it
/// asks the kernel for the bytes, which answers with an error. `require_unchanged()` finds a change
/// between rounds. Replace a checkpoint by renaming a new file over it (the mapping then keeps the
/// old one), never by writing into it.
class mapped_file {
public:
    /// Opens and maps `path`.
    /// @throws data_error no such file, or no regular one: names it.
    /// @throws resource_error the kernel refuses descriptor or mapping.
    explicit mapped_file(std::string path) : path_{std::move(path)} {
        // Without O_NONBLOCK a pipe would wait for a writer before it can be refused.
        file_ = detail::descriptor::from_native(
            ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
        if (!file_) {
            fail_to_open(errno);
        }
        map();
    }
    mapped_file(mapped_file&& other) noexcept
        : path_{std::move(other.path_)},
          file_{std::move(other.file_)},
          modified_{other.modified_},
          bytes_{std::exchange(other.bytes_, {})} {}
    mapped_file& operator=(mapped_file&& other) noexcept {
        if (this != &other) {
            unmap();
            path_ = std::move(other.path_);
            file_ = std::move(other.file_);
            modified_ = other.modified_;
            bytes_ = std::exchange(other.bytes_, {});
        }
        return *this;
    }
    mapped_file(const mapped_file&) = delete;
    mapped_file& operator=(const mapped_file&) = delete;
    ~mapped_file() { unmap(); }

    [[nodiscard]] const std::string& path() const noexcept { return path_; }
    /// All bytes of the file, at one address as long as this object or one moved from it lives.
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

    /// @throws data_error the file was written into, cut or lengthened since it was mapped: names
    /// it.
    void require_unchanged() const {
        const auto now = status_now();
        const auto size = static_cast<std::size_t>(now.st_size);
        if (size != bytes_.size()) {
            throw data_error{path_ + ": the file had " + std::to_string(bytes_.size()) +
                                 " bytes when it was opened and has " + std::to_string(size) +
                                 " now; replace a checkpoint by renaming, and open it again",
                             {.operation = "fstat"}};
        }
        // Not the time of change of the inode: renaming another file over this one sets that too.
        if (now.st_mtim.tv_sec != modified_.tv_sec || now.st_mtim.tv_nsec != modified_.tv_nsec) {
            throw data_error{path_ +
                                 ": the file was written to after it was opened; replace a "
                                 "checkpoint by renaming, and open it again",
                             {.operation = "fstat"}};
        }
    }

    /// Whether `address` lies in the mapping.
    [[nodiscard]] bool holds(const std::byte* address) const noexcept {
        const std::less<const std::byte*> before;
        return !before(address, bytes_.data()) && before(address, bytes_.data() + bytes_.size());
    }

    /// Copies the file's bytes from `offset` on to `to`, without touching the mapping: a file that
    /// is cut short at any moment is an error, never a signal.
    /// @throws data_error the file ends before; names it. resource_error it cannot be read.
    void read(std::uint64_t offset, std::span<std::byte> to) const {
        for (std::size_t done = 0; done < to.size();) {
            const auto count = ::pread(file_.native_handle(), to.data() + done, to.size() - done,
                                       static_cast<off_t>(offset + done));
            if (count > 0) {
                done += static_cast<std::size_t>(count);
            } else if (count == 0) {
                throw data_error{
                    path_ + ": the file ends at byte " + std::to_string(offset + done) +
                        " and had more when it was opened; replace a checkpoint by "
                        "renaming, and open it again",
                    {.operation = "pread", .bytes_done = done, .bytes_total = to.size()}};
            } else if (errno != EINTR) {
                const int code = errno;
                throw resource_error{path_ + ": the file cannot be read",
                                     detail::with_errno(error_context{}, "pread", code)};
            }
        }
    }

private:
    [[noreturn]] void fail_to_open(int code) const {
        error_context context{
            .operation = "open", .native_code = code, .native_text = std::strerror(code)};
        if (detail::is_out_of_descriptors(code) || code == ENOMEM) {
            throw resource_error{path_ + ": " + std::string{detail::no_descriptor_is_left},
                                 std::move(context)};
        }
        throw data_error{path_ + ": the file cannot be opened for reading", std::move(context)};
    }

    [[nodiscard]] struct stat status_now() const {
        struct stat status {};
        if (::fstat(file_.native_handle(), &status) != 0) {
            const int code = errno;
            throw resource_error{
                path_ + ": the file's size and time cannot be read",
                {.operation = "fstat", .native_code = code, .native_text = std::strerror(code)}};
        }
        if (!S_ISREG(status.st_mode)) {
            throw data_error{path_ + ": this is no regular file", {.operation = "fstat"}};
        }
        return status;
    }

    void map() {
        const auto status = status_now();
        const auto size = static_cast<std::size_t>(status.st_size);
        modified_ = status.st_mtim;
        if (size == 0) {
            return;  // an empty mapping is an error to the kernel, and no bytes are enough
        }
        void* const address =
            ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file_.native_handle(), 0);
        if (address == MAP_FAILED) {
            const int code = errno;
            throw resource_error{
                path_ + ": " + std::to_string(size) + " bytes cannot be mapped",
                {.operation = "mmap", .native_code = code, .native_text = std::strerror(code)}};
        }
        bytes_ = {static_cast<const std::byte*>(address), size};
    }

    void unmap() noexcept {
        if (!bytes_.empty()) {
            ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
        }
    }

    std::string path_;
    detail::descriptor file_;
    timespec modified_{};  ///< when the file was last written to before it was mapped
    std::span<const std::byte> bytes_{};
};

}  // namespace weightwire
