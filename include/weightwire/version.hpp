#pragma once
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The library's version, for `#if` and for the user agent of the HTTP client.

#define WEIGHTWIRE_VERSION_MAJOR 0
#define WEIGHTWIRE_VERSION_MINOR 1
#define WEIGHTWIRE_VERSION_PATCH 0

namespace weightwire {

/// The version as text; equals `meson.project_version()` (a test compares the two).
inline constexpr char version_string[] = "0.1.0";

}  // namespace weightwire
