#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string>
#include <string_view>
#include <utility>

#include <weightwire/core/error.hpp>
#include <weightwire/detail/descriptor.hpp>

/// @file
/// Owner of a file descriptor, and the errors of system calls.

namespace weightwire::shm {

using weightwire::detail::descriptor;
using weightwire::detail::is_out_of_descriptors;

/// `context` completed with the failed call, `errno` and its text.
[[nodiscard]] inline error_context with_errno(error_context context, std::string_view operation,
                                              int code) {
    return weightwire::detail::with_errno(std::move(context), operation, code);
}

/// Before an error that blames what could not be opened: blames the limit where that was it.
/// @throws resource_error `code` says that no more files may be open.
inline void require_descriptors(int code, std::string_view operation, error_context context = {}) {
    if (is_out_of_descriptors(code)) {
        throw resource_error{std::string{weightwire::detail::no_descriptor_is_left},
                             with_errno(std::move(context), operation, code)};
    }
}

}  // namespace weightwire::shm
