#pragma once
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What an inference process needs: the sinks, the engine and the service. Standard library and
/// nlohmann/json only; include the backend (`backends/ipc/backend.hpp`) and the server
/// (`http/worker_server.hpp`) beside it.

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/engine/local_sync_client.hpp>
#include <weightwire/engine/worker_engine.hpp>
#include <weightwire/engine/worker_service.hpp>
#include <weightwire/sinks/loading_sink.hpp>
#include <weightwire/sinks/parameter_table.hpp>
#include <weightwire/version.hpp>
