#pragma once
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What a trainer needs: the concepts, the sources, the engine. Standard library and nlohmann/json
/// only; include the backend (`backends/ipc/backend.hpp`) and the client
/// (`http/http_sync_client.hpp`) of your choice beside it.

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/concepts/trainer_group.hpp>
#include <weightwire/concepts/trainer_init_info.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/engine/trainer_engine.hpp>
#include <weightwire/rendezvous/store_group.hpp>
#include <weightwire/sources/callback_source.hpp>
#include <weightwire/sources/safetensors.hpp>
#include <weightwire/sources/span_source.hpp>
#include <weightwire/version.hpp>
