#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/http/curl_client.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/server.hpp>
#include <weightwire/http/server_options.hpp>
#include <weightwire/http/url.hpp>
#include <weightwire/http/worker_server.hpp>

/// @file
/// The whole folder: HTTP client and server. It needs libcurl and Boost, so no umbrella includes
/// it.
