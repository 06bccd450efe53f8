#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <cerrno>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <weightwire/core/error.hpp>

/// @file
/// Owner of a file descriptor, and the error of a system call.

namespace weightwire::shm {

/// Closes its descriptor. Move-only; `-1` owns nothing.
class descriptor {
public:
    descriptor() noexcept = default;
    explicit descriptor(int number) noexcept : number_{number} {}
    descriptor(descriptor&& other) noexcept : number_{std::exchange(other.number_, -1)} {}
    descriptor& operator=(descriptor&& other) noexcept {
        if (this != &other) {
            reset();
            number_ = std::exchange(other.number_, -1);
        }
        return *this;
    }
    descriptor(const descriptor&) = delete;
    descriptor& operator=(const descriptor&) = delete;
    ~descriptor() { reset(); }

    [[nodiscard]] int number() const noexcept { return number_; }
    [[nodiscard]] explicit operator bool() const noexcept { return number_ >= 0; }
    void reset() noexcept {
        if (number_ >= 0) {
            ::close(std::exchange(number_, -1));
        }
    }

private:
    int number_ = -1;
};

/// `context` completed with the failed call, `errno` and its text.
[[nodiscard]] inline error_context with_errno(error_context context, std::string_view operation,
                                              int code) {
    context.operation = operation;
    context.native_code = code;
    context.native_text = std::generic_category().message(code);
    return context;
}

/// Whether a call failed because no more files may be open, which says nothing about what it was to
/// open.
[[nodiscard]] constexpr bool is_out_of_descriptors(int code) noexcept {
    return code == EMFILE || code == ENFILE;
}

/// Before an error that blames what could not be opened: blames the limit where that was it.
/// @throws resource_error `code` says that no more files may be open.
inline void require_descriptors(int code, std::string_view operation, error_context context = {}) {
    if (is_out_of_descriptors(code)) {
        throw resource_error{"no descriptor is left; raise the limit of open files (ulimit -n)",
                             with_errno(std::move(context), operation, code)};
    }
}

}  // namespace weightwire::shm
