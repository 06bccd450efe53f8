#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/core/manifest.hpp>

/// @file
/// The native wire: what our trainer and our worker say to each other inside vLLM's routes.
/// docs/wire.md specifies it byte for byte. Names, shapes and handles travel once, at init; a
/// round's update call is 64 bytes.

namespace weightwire::wire {

/// Version of the native wire; the two ends must speak the same.
inline constexpr int native_version = 1;
/// Content type of a binary update call.
inline constexpr std::string_view native_content_type = "application/vnd.weightwire.update";

/// `weightwire` in the reply to `GET /version`: what a worker offers.
struct native_offer {
    int wire = native_version;
    std::vector<std::string> backends{};      ///< wire names
    std::vector<std::string> memory_kinds{};  ///< `host`, `cuda`
    std::string commit_mode{};                ///< `flip`, `copy_in`, `in_place`
    std::uint64_t max_update_bytes = 0;       ///< body limit of init, update and finish calls
    std::uint64_t max_body_bytes = 0;         ///< body limit of the others
};

/// `init_info.weightwire` in the init call.
struct native_init {
    int wire = native_version;
    std::string backend{};  ///< wire name
    int rank_offset = 1;
    int world_size = 2;
    std::uint64_t plan_hash =
        0;  ///< `plan_hash` over all of this; the worker computes its own and compares
    std::uint64_t trainer = 0;  ///< names the trainer engine that sends it
    /// Whether to take the worker from another trainer. False when an engine asks a worker that it
    /// lost to take part again: refused as stale if another trainer has come since.
    bool take_over = true;
    std::int64_t budget_ms = 0;     ///< time the trainer will wait for this call
    manifest parameters{};          ///< set name, names, dtypes, shapes
    std::string wire_parameters{};  ///< JSON object of the trainer's init info, in the plan hash
    std::string transport{};        ///< JSON object of the backend, per peer: handles, addresses
};

/// `weightwire` in the reply to init.
struct native_init_reply {
    std::uint64_t epoch = 0;      ///< names this init; travels in every later call
    std::uint64_t plan_hash = 0;  ///< as the worker computed it
    std::uint64_t version = 0;    ///< last whole version
    std::string commit_mode{};
    bool dirty = false;
};

/// `weightwire` in the start call.
struct native_start {
    std::uint64_t epoch = 0;
    std::uint64_t version = 0;   ///< what a commit will make visible
    bool force = false;          ///< allow a version that is not above the worker's
    bool partial = false;        ///< not every parameter will come
    std::int64_t budget_ms = 0;  ///< of the round: the session lives so long without a call
    std::int64_t answer_ms = 0;  ///< time the trainer will wait for this call
};

/// `weightwire` in the reply to start.
struct native_start_reply {
    std::uint64_t session = 0;  ///< names this session; travels in every later call
};

/// The update call: 64 bytes, little endian, no JSON, so that neither side allocates.
struct native_update {
    std::uint64_t epoch = 0;
    std::uint64_t session = 0;
    std::uint64_t plan_hash = 0;
    std::uint64_t round = 0;  ///< counts from 1
    std::uint32_t part = 0;
    std::int64_t budget_ms = 0;
    std::uint64_t first = 0;  ///< manifest position of the part's first parameter
    std::uint64_t count = 0;  ///< parameters of the part
};

/// `weightwire` in the reply to an update call.
struct native_update_reply {
    std::uint64_t bytes = 0;    ///< bytes placed, over the worker's ranks
    std::int64_t began_ns = 0;  ///< CLOCK_MONOTONIC when the first rank began to move bytes
    std::int64_t ended_ns = 0;  ///< CLOCK_MONOTONIC when the last byte was in place
};

/// `weightwire` in the finish call, beside vLLM's `weight_version`.
struct native_finish {
    std::uint64_t epoch = 0;
    std::uint64_t session = 0;
    std::uint64_t version = 0;  ///< as at start; travels as vLLM's `weight_version`, in decimal
    std::int64_t budget_ms = 0;
    /// Boot id and CLOCK_MONOTONIC instant after which the trainer no longer counts on a commit: a
    /// worker of the same boot that is stopped and resumed later rolls back.
    std::string boot_id{};
    std::int64_t commit_before_ns = 0;
    std::vector<std::uint64_t> digests{};  ///< of every parameter, in manifest order, or empty
};

/// `weightwire` in the reply to finish.
struct native_finish_reply {
    std::uint64_t version = 0;  ///< the version now visible
};

/// Hash of everything both sides must agree on: wire version, backend, world size, manifest hash,
/// and the text of the wire parameters. Peers' rank offsets and handles differ and are not in it.
[[nodiscard]] std::uint64_t plan_hash(std::string_view backend, int world_size,
                                      const manifest& parameters, std::string_view wire_parameters);

// Encoders give the whole body of a call or reply; decoders throw `protocol_error` naming what and
// where, and accept nothing that docs/wire.md does not list.

[[nodiscard]] std::string encode_version_reply(std::string_view version, const native_offer& offer);
/// Nothing where the reply to `GET /version` has no `weightwire` member (a vLLM server).
[[nodiscard]] std::optional<native_offer> decode_version_reply(std::string_view body,
                                                               std::string& version);

[[nodiscard]] std::string encode(const native_init& message);
[[nodiscard]] std::string encode(const native_start& message);
[[nodiscard]] std::string encode(const native_finish& message);
[[nodiscard]] std::array<char, 64> encode(const native_update& message) noexcept;
[[nodiscard]] std::string encode(const native_init_reply& message);
[[nodiscard]] std::string encode(const native_start_reply& message);
[[nodiscard]] std::string encode(const native_update_reply& message);
[[nodiscard]] std::string encode(const native_finish_reply& message);

// Each throws protocol_error. The request decoders give nothing where the body is vLLM's (no
// `weightwire` member).
[[nodiscard]] std::optional<native_init> decode_init(std::string_view body);
[[nodiscard]] std::optional<native_start> decode_start(std::string_view body);
[[nodiscard]] std::optional<native_finish> decode_finish(std::string_view body);
[[nodiscard]] native_update decode_update(std::string_view body);
[[nodiscard]] native_init_reply decode_init_reply(std::string_view body);
[[nodiscard]] native_start_reply decode_start_reply(std::string_view body);
[[nodiscard]] native_update_reply decode_update_reply(std::string_view body);
[[nodiscard]] native_finish_reply decode_finish_reply(std::string_view body);

}  // namespace weightwire::wire

// The bodies.
#include <weightwire/wire/native_codec.hpp>  // IWYU pragma: export
