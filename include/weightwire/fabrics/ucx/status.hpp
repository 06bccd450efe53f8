#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string>
#include <string_view>
#include <utility>

#include <ucp/api/ucp.h>

#include <weightwire/core/error.hpp>

/// @file
/// From a status of UCX to one of our errors, with UCX's own words.

namespace weightwire::ucx {

/// `context` completed with the call that failed and UCX's word for it.
[[nodiscard]] inline error_context with_status(error_context context, std::string_view operation,
                                               ucs_status_t status) {
    context.operation = operation;
    context.native_code = static_cast<int>(status);
    context.native_text = ucs_status_string(status);
    return context;
}

/// Throws what a failed call on this side means: `text` says what to do.
/// @throws unsupported_error this build of UCX cannot do it. @throws peer_error the other side is
/// not there. @throws resource_error anything else that the system refuses.
[[noreturn]] inline void throw_status(ucs_status_t status, std::string_view operation,
                                      std::string_view text, error_context context = {}) {
    context = with_status(std::move(context), operation, status);
    switch (status) {
        case UCS_ERR_UNSUPPORTED:
        case UCS_ERR_NOT_IMPLEMENTED: throw unsupported_error{text, std::move(context)};
        case UCS_ERR_UNREACHABLE:
        case UCS_ERR_ENDPOINT_TIMEOUT:
        case UCS_ERR_CONNECTION_RESET:
        case UCS_ERR_NOT_CONNECTED:
        case UCS_ERR_REJECTED: throw peer_error{text, std::move(context)};
        default: throw resource_error{text, std::move(context)};
    }
}

/// @throws as `throw_status`, unless `status` is UCS_OK.
inline void require_ok(ucs_status_t status, std::string_view operation, std::string_view text,
                       error_context context = {}) {
    if (status != UCS_OK) {
        throw_status(status, operation, text, std::move(context));
    }
}

}  // namespace weightwire::ucx
