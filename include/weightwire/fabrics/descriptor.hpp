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

}  // namespace weightwire::shm
