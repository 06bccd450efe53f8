// SPDX-License-Identifier: Apache-2.0
//
// What two or more test files include. With clang and -Dunity=on, tests/meson.build precompiles
// this for all suites: parsed once, and its inline functions and instantiations are one object. A
// header that is missing here costs time, nothing else. No doctest: programs without it use this,
// too.

#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <ranges>
#include <set>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/convert.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/engine/fan_out_sync_client.hpp>
#include <weightwire/engine/local_sync_client.hpp>
#include <weightwire/engine/worker_engine.hpp>
#include <weightwire/engine/worker_service.hpp>
#include <weightwire/plan/coverage.hpp>
#include <weightwire/plan/recorder.hpp>
#include <weightwire/plan/recording_tensor.hpp>
#include <weightwire/plan/regions.hpp>
#include <weightwire/rendezvous/store_group.hpp>
#include <weightwire/sinks/loading_sink.hpp>
#include <weightwire/sinks/parameter_table.hpp>
#include <weightwire/sinks/tensor_copy.hpp>
#include <weightwire/sources/callback_source.hpp>
#include <weightwire/sources/safetensors.hpp>
#include <weightwire/sources/span_source.hpp>
#include <weightwire/testing/conformance/transport.hpp>
#include <weightwire/testing/conformance/weight_source.hpp>
#include <weightwire/testing/fault_transport.hpp>
#include <weightwire/testing/gate.hpp>
#include <weightwire/testing/loopback_transport.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/weightwire.hpp>
#include <weightwire/wire/client_calls.hpp>
#include <weightwire/wire/envelope.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/vllm_ipc.hpp>
#include <weightwire/wire/vllm_requests.hpp>
#include <weightwire/worker.hpp>

#ifdef WEIGHTWIRE_TESTS_HTTP
#include <weightwire/backends/sharded_pull/backend.hpp>
#include <weightwire/fabrics/shared_memory_arena.hpp>
#include <weightwire/fabrics/shared_memory_fabric.hpp>
#include <weightwire/http/curl_client.hpp>
#include <weightwire/http/http.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/server.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/plan/groups.hpp>
#include <weightwire/plan/layout.hpp>
#include <weightwire/plan/loaders.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/plan/pull_needs.hpp>
#include <weightwire/plan/pull_plan.hpp>
#include <weightwire/plan/pull_routing.hpp>
#include <weightwire/wire/pull_plan_codec.hpp>
#endif
