#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/address_map.hpp>
#include <weightwire/fabrics/descriptor.hpp>
#include <weightwire/fabrics/process.hpp>

/// @file
/// Host memory that two processes share: an anonymous memory file, sealed so that it can neither
/// shrink nor grow, named to the other process by a plain `handle`.
///
/// Nothing has a name in a file system, so nothing is left behind by a killed process and no
/// mount's size limits it. A reader that maps a file without these seals dies of SIGBUS when the
/// owner truncates it, which is why `mapping::open` refuses one, whoever asks.

namespace weightwire::shm {

/// Bytes of a process's memory file, as plain numbers that can travel.
struct handle {
    std::int64_t pid = 0;          ///< process that holds the descriptor
    std::int64_t fd = -1;          ///< its descriptor of the memory file
    std::uint64_t start_time = 0;  ///< of the process, so that a reused pid is noticed
    std::uint64_t offset = 0;      ///< first byte
    std::uint64_t length = 0;      ///< bytes, at least 1

    [[nodiscard]] process_identity owner() const noexcept { return {pid, start_time}; }
    friend bool operator==(const handle&, const handle&) noexcept = default;
};

/// Who besides the owner may write.
enum class sharing : std::uint8_t {
    readable,  ///< others map it read-only, which the kernel enforces where it can (Linux 5.1)
    writable,  ///< others may write
};

/// A new sealed memory file, mapped and owned. Move-only.
class segment {
public:
    segment() noexcept = default;

    /// Makes one of `bytes` zero bytes. All its memory is allocated now: an error here instead of a
    /// SIGBUS in a copy, and no page faults in the first round.
    /// @throws usage_error no bytes. @throws resource_error the kernel refuses; names the call.
    [[nodiscard]] static segment create(std::uint64_t bytes, sharing others = sharing::readable);

    segment(segment&& other) noexcept
        : file_{std::move(other.file_)},
          owner_{other.owner_},
          data_{std::exchange(other.data_, nullptr)},
          size_{std::exchange(other.size_, 0)} {}
    segment& operator=(segment&& other) noexcept {
        if (this != &other) {
            unmap();
            file_ = std::move(other.file_);
            owner_ = other.owner_;
            data_ = std::exchange(other.data_, nullptr);
            size_ = std::exchange(other.size_, 0);
        }
        return *this;
    }
    segment(const segment&) = delete;
    segment& operator=(const segment&) = delete;
    ~segment() { unmap(); }

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] explicit operator bool() const noexcept { return data_ != nullptr; }
    [[nodiscard]] int native_handle() const noexcept { return file_.native_handle(); }

    /// Names all of it to another process. Good while this object lives.
    [[nodiscard]] handle exported() const noexcept {
        return {.pid = owner_.pid,
                .fd = file_.native_handle(),
                .start_time = owner_.start_time,
                .offset = 0,
                .length = size_};
    }

private:
    void unmap() noexcept {
        if (data_ != nullptr) {
            ::munmap(std::exchange(data_, nullptr), size_);
        }
    }

    descriptor file_{};
    process_identity owner_{};
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

/// How a handle of somebody else's is opened.
struct open_options {
    sharing use = sharing::readable;          ///< `writable`: map for writing too
    std::string_view what = "shared memory";  ///< what the handle is for; in messages
    error_context context{};                  ///< phase and peer for messages
    /// What a handle of this very process becomes: the address that it is already mapped at, which
    /// is gone when its owner lets go, or (false) a mapping of its own like any other.
    bool resolve_locally = true;
};

/// Somebody else's bytes, mapped after everything about their handle was checked. Move-only. The
/// memory stays valid after its owner died.
class mapping {
public:
    mapping() noexcept = default;

    /// Opens `from` through its process's descriptor table. Checked before anything is mapped: the
    /// numbers; that the descriptor leads to a memory file that belongs to this user or to root;
    /// its seals; that it has the bytes; that the process is the one that is meant. A handle of
    /// this very process resolves to the address it is already mapped at, unless told not to.
    /// @throws protocol_error the handle lies; says in what.
    /// @throws peer_error the process is gone.
    /// @throws resource_error the kernel refuses; names the call.
    [[nodiscard]] static mapping open(const handle& from, const open_options& options = {});

    mapping(mapping&& other) noexcept
        : base_{std::exchange(other.base_, nullptr)},
          mapped_{std::exchange(other.mapped_, 0)},
          data_{std::exchange(other.data_, nullptr)},
          size_{std::exchange(other.size_, 0)} {}
    mapping& operator=(mapping&& other) noexcept {
        if (this != &other) {
            reset();
            base_ = std::exchange(other.base_, nullptr);
            mapped_ = std::exchange(other.mapped_, 0);
            data_ = std::exchange(other.data_, nullptr);
            size_ = std::exchange(other.size_, 0);
        }
        return *this;
    }
    mapping(const mapping&) = delete;
    mapping& operator=(const mapping&) = delete;
    ~mapping() { reset(); }

    [[nodiscard]] const std::byte* data() const noexcept { return data_; }
    /// For a mapping that was opened as `writable`.
    [[nodiscard]] std::byte* writable_data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] explicit operator bool() const noexcept { return data_ != nullptr; }
    /// Whether the bytes were found in this process, so that nothing had to be mapped.
    [[nodiscard]] bool resolved_locally() const noexcept {
        return data_ != nullptr && base_ == nullptr;
    }

    /// Unmaps.
    void reset() noexcept {
        if (base_ != nullptr) {
            ::munmap(std::exchange(base_, nullptr), mapped_);
        }
        data_ = nullptr;
        size_ = 0;
    }

private:
    void map(int file, const handle& from, const open_options& options);

    std::byte* base_ = nullptr;  ///< what was mapped, from a page boundary; null: nothing
    std::size_t mapped_ = 0;
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

namespace detail {

inline constexpr std::uint64_t huge_page = std::uint64_t{2} << 20U;

/// Seal that forbids new writable mappings; older C libraries lack the name.
inline constexpr int seal_future_write = 0x0010;

/// Asks for large pages where they fit and allocates everything.
inline void populate(std::byte* data, std::size_t bytes, int file) {
    if (bytes >= huge_page) {
        ::madvise(data, bytes, MADV_HUGEPAGE);  // advice: its failure changes nothing but speed
    }
    constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, Linux 5.14
    if (::madvise(data, bytes, populate_write) == 0) {
        return;
    }
    int code = errno;
    if (code == EINVAL) {
        code = ::posix_fallocate(file, 0, static_cast<off_t>(bytes));
    }
    if (code != 0) {
        throw resource_error{"there is no memory for a shared segment of " + std::to_string(bytes) +
                                 " bytes; free some or use a smaller buffer",
                             with_errno({}, "madvise", code)};
    }
}

[[nodiscard]] inline descriptor create_memory_file() {
    constexpr unsigned no_exec_seal = 0x0008U;  // Linux 6.3 logs a warning without it
    constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    auto file = descriptor::from_native(::memfd_create("weightwire", flags | no_exec_seal));
    if (!file && errno == EINVAL) {
        file = descriptor::from_native(::memfd_create("weightwire", flags));
    }
    if (!file) {
        throw resource_error{
            "no memory file could be made; raise the limit of descriptors or "
            "allow the system call",
            with_errno({}, "memfd_create", errno)};
    }
    return file;
}

/// Forbids what must never happen, and that this is ever allowed again.
inline void seal(int file, sharing others) {
    const int last = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (others == sharing::readable && ::fcntl(file, F_ADD_SEALS, last | seal_future_write) == 0) {
        return;
    }
    if (::fcntl(file, F_ADD_SEALS, last) != 0) {
        throw resource_error{"a memory file could not be sealed",
                             with_errno({}, "fcntl(F_ADD_SEALS)", errno)};
    }
}

/// Checks of a handle, in the order in which they become possible. Each throws the one error that
/// says what is wrong.
class handle_check {
public:
    handle_check(const handle& from, const open_options& options) : from_{from}, options_{options} {
        std::snprintf(path_.data(), path_.size(), "/proc/%lld/fd/%lld",
                      static_cast<long long>(from.pid), static_cast<long long>(from.fd));
    }

    void numbers() const {
        const auto end = checked_add(from_.offset, from_.length);
        if (from_.pid <= 0 || !checked_cast<pid_t>(from_.pid) || from_.fd < 0 ||
            !checked_cast<int>(from_.fd)) {
            lie("its process or descriptor number is out of range");
        }
        if (from_.length == 0 || !end || !checked_cast<off_t>(*end)) {
            lie("its offset and length are no range of bytes");
        }
    }
    /// After the file was opened or could not be: whether the process is the one that is meant. A
    /// number reused in between shows, since the start time differs.
    void owner() const {
        int code = 0;
        const auto started = start_time_of(from_.pid, &code);
        if (!started) {
            require_descriptors(code, "open(/proc/.../stat)", options_.context);
            throw peer_error{std::string{options_.what} + " is of process " +
                                 std::to_string(from_.pid) +
                                 ", which is gone or in another PID namespace; both processes must "
                                 "share one",
                             options_.context};
        }
        if (*started != from_.start_time) {
            throw peer_error{
                std::string{options_.what} + " is of process " + std::to_string(from_.pid) +
                    " started at tick " + std::to_string(from_.start_time) +
                    ", but the one of that number started at " + std::to_string(*started) +
                    "; the peer has died, begin again with its successor",
                options_.context};
        }
    }
    /// Looks before it opens: opening a device or a pipe can have effects.
    [[nodiscard]] descriptor open_file() const {
        struct stat info {};
        if (::stat(path_.data(), &info) != 0) {
            const int code = errno;
            owner();
            if (code == ENOENT) {
                lie("the process has no such descriptor");
            }
            refused("stat", code);
        }
        if (!S_ISREG(info.st_mode)) {
            lie("the descriptor does not lead to a memory file");
        }
        const int flags = options_.use == sharing::writable ? O_RDWR : O_RDONLY;
        auto file = descriptor::from_native(
            ::open(path_.data(), flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
        if (!file) {
            const int code = errno;
            require_descriptors(code, path_.data(), options_.context);
            owner();
            refused("open", code);
        }
        return file;
    }
    [[nodiscard]] file_identity contents(int file) const {
        struct stat info {};
        const int seals = ::fcntl(file, F_GET_SEALS);
        if (seals < 0 || ::fstat(file, &info) != 0) {
            lie("the descriptor does not lead to a memory file");
        }
        if ((seals & required_seals) != required_seals) {
            lie("the memory file is not sealed against shrinking and growing");
        }
        if (options_.use == sharing::writable &&
            (seals & (F_SEAL_WRITE | seal_future_write)) != 0) {
            lie("the memory file is sealed against writing");
        }
        const auto self = ::geteuid();
        if (info.st_uid != self && info.st_uid != 0 && self != 0) {
            lie("the memory file belongs to user " + std::to_string(info.st_uid) +
                ", not to this one (" + std::to_string(self) + ") or root");
        }
        const auto end = from_.offset + from_.length;
        if (info.st_size < 0 || static_cast<std::uint64_t>(info.st_size) < end) {
            lie("the memory file has " + std::to_string(info.st_size) +
                " bytes, fewer than offset + length = " + std::to_string(end));
        }
        return file_identity::of(info);
    }

    [[noreturn]] void lie(const std::string& text) const {
        throw protocol_error{"the handle of " + std::string{options_.what} + " (descriptor " +
                                 std::to_string(from_.fd) + " of process " +
                                 std::to_string(from_.pid) + ") is refused: " + text +
                                 "; nothing was mapped",
                             options_.context};
    }
    [[noreturn]] void refused(std::string_view operation, int code) const {
        throw resource_error{
            "the kernel refuses " + std::string{options_.what} + " at " + path_.data() +
                "; run both processes as one user, or allow one to trace the other",
            with_errno(options_.context, operation, code)};
    }

private:
    const handle& from_;
    const open_options& options_;
    std::array<char, 64> path_{};
};

}  // namespace detail

/// Names all of a memory file that this process has open and sealed; nothing where it has not,
/// because then no other process can or should open it.
[[nodiscard]] inline std::optional<handle> exported_file(const file_identity& file,
                                                         process_identity self) {
    const auto number = sealed_descriptor_of(file);
    struct stat info {};
    if (!number || ::fstat(*number, &info) != 0 || info.st_size <= 0) {
        return std::nullopt;
    }
    return handle{.pid = self.pid,
                  .fd = *number,
                  .start_time = self.start_time,
                  .offset = 0,
                  .length = static_cast<std::uint64_t>(info.st_size)};
}

inline segment segment::create(std::uint64_t bytes, sharing others) {
    const auto size = checked_cast<off_t>(bytes);
    if (bytes == 0 || !size) {
        throw usage_error{"a shared segment needs between 1 and 2^63 - 1 bytes, not " +
                          std::to_string(bytes)};
    }
    segment result;
    result.owner_ = this_process();
    result.file_ = detail::create_memory_file();
    const int file = result.file_.native_handle();
    if (::ftruncate(file, *size) != 0) {
        throw resource_error{"no shared segment of " + std::to_string(bytes) + " bytes",
                             with_errno({}, "ftruncate", errno)};
    }
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) {
        throw resource_error{
            "a shared segment of " + std::to_string(bytes) + " bytes could not be mapped",
            with_errno({}, "mmap", errno)};
    }
    result.data_ = static_cast<std::byte*>(at);
    result.size_ = static_cast<std::size_t>(bytes);
    detail::populate(result.data_, result.size_, file);
    detail::seal(file, others);
    return result;
}

inline mapping mapping::open(const handle& from, const open_options& options) {
    const detail::handle_check check{from, options};
    check.numbers();
    const auto file = check.open_file();
    check.owner();
    const auto identity = check.contents(file.native_handle());
    mapping result;
    if (options.resolve_locally && from.owner() == this_process()) {
        auto* const at = address_map::of_this_process().address_of(
            identity, from.offset, from.length, options.use == sharing::writable);
        if (at != nullptr) {
            result.data_ = at;
            result.size_ = static_cast<std::size_t>(from.length);
            return result;
        }
    }
    result.map(file.native_handle(), from, options);
    return result;
}

inline void mapping::map(int file, const handle& from, const open_options& options) {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const auto begin = from.offset / page * page;
    const auto lead = from.offset - begin;
    const auto bytes = static_cast<std::size_t>(lead + from.length);
    const int protection = options.use == sharing::writable ? PROT_READ | PROT_WRITE : PROT_READ;
    // Populating costs here what page faults would cost in the first round.
    void* const at = ::mmap(nullptr, bytes, protection, MAP_SHARED | MAP_POPULATE, file,
                            static_cast<off_t>(begin));
    if (at == MAP_FAILED) {
        throw resource_error{std::string{options.what} + " of " + std::to_string(from.length) +
                                 " bytes could not be mapped",
                             with_errno(options.context, "mmap", errno)};
    }
    base_ = static_cast<std::byte*>(at);
    mapped_ = bytes;
    data_ = base_ + lead;
    size_ = static_cast<std::size_t>(from.length);
}

}  // namespace weightwire::shm
