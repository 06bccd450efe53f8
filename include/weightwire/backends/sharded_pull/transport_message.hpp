#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/plan/ownership.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>

/// @file
/// `transport_init::native` of `sharded_pull`: what each trainer rank holds, how it is reached, and
/// which of its memory is read in place. docs/wire.md has the form.

namespace weightwire::sharded_pull {

/// Bytes of an allocation that a reader opens.
struct exported_memory {
    std::string handle{};
    std::uint64_t bytes = 0;
    friend bool operator==(const exported_memory&, const exported_memory&) = default;
};

/// Where a parameter lies that is read in place.
struct exported_place {
    std::size_t position = 0;  ///< in the manifest
    std::size_t memory = 0;    ///< index in `rank_export::memories`
    std::uint64_t offset = 0;  ///< of its first byte
    friend bool operator==(const exported_place&, const exported_place&) = default;
};

/// One trainer rank.
struct rank_export {
    std::string machine{};         ///< equal for ranks of one machine, empty when unknown
    std::string fabric_address{};  ///< for `reader.connect`
    std::string host{};            ///< of its control listener
    std::uint16_t port = 0;
    std::uint64_t nonce = 0;  ///< who knows it was told by this trainer
    plan::position_set held{};
    std::vector<exported_memory> memories{};
    std::vector<exported_place> places{};    ///< ascending positions, all of them held
    std::optional<exported_memory> arena{};  ///< for what is staged; absent where nothing is
    friend bool operator==(const rank_export&, const rank_export&) = default;
};

/// What a worker needs to know of the trainer.
struct transport_message {
    std::vector<std::size_t> group_sizes{};  ///< of the gather groups, in manifest order
    std::vector<rank_export> ranks{};        ///< by trainer rank
};

/// Most allocations that a rank may spread over; each is a mapping in every worker.
inline constexpr std::size_t most_memories = 65536;
/// Most ranks of a trainer.
inline constexpr std::size_t most_trainer_ranks = 65536;

namespace detail {

/// Of a fabric's address or handle; UCX's grow with a machine's adapters.
inline constexpr std::size_t longest_text = std::size_t{1} << 18U;

inline void write(wire::json_writer& out, const exported_memory& value) {
    out.begin_object().key("handle").string(value.handle).key("bytes").integer(value.bytes);
    out.end_object();
}
[[nodiscard]] inline exported_memory read_memory(const wire::json_value& value) {
    value.allow_only({"handle", "bytes"});
    return {.handle = std::string{value.at("handle").string(longest_text)},
            .bytes = value.at("bytes").natural()};
}

inline void write(wire::json_writer& out, const rank_export& value) {
    out.begin_object().key("machine").string(value.machine);
    out.key("address").string(value.fabric_address).key("host").string(value.host);
    out.key("port").integer(static_cast<unsigned>(value.port)).key("nonce").integer(value.nonce);
    out.key("held").string(plan::to_text(value.held)).key("memories").begin_array();
    for (const auto& memory : value.memories) {
        write(out, memory);
    }
    out.end_array().key("places").begin_array();
    for (const auto& place : value.places) {
        out.begin_array().integer(place.position).integer(place.memory).integer(place.offset);
        out.end_array();
    }
    out.end_array().key("arena");
    if (value.arena) {
        write(out, *value.arena);
    } else {
        out.null();
    }
    out.end_object();
}

[[nodiscard]] inline exported_place read_place(const wire::json_value& value,
                                               const rank_export& rank) {
    if (value.count() != 3) {
        value.fail("expected [position, memory, offset]");
    }
    auto at = value.items().begin();
    exported_place made;
    made.position = static_cast<std::size_t>((*at).natural());
    made.memory = static_cast<std::size_t>((*++at).natural());
    made.offset = (*++at).natural();
    const bool ascends = rank.places.empty() || rank.places.back().position < made.position;
    if (!ascends || !rank.held.contains(made.position) || made.memory >= rank.memories.size()) {
        value.fail("the position is not held, or out of order, or there is no such memory");
    }
    return made;
}

[[nodiscard]] inline rank_export read_rank(const wire::json_value& value, std::size_t parameters) {
    value.allow_only(
        {"machine", "address", "host", "port", "nonce", "held", "memories", "places", "arena"});
    rank_export made{.machine = std::string{value.at("machine").string(256)},
                     .fabric_address = std::string{value.at("address").string(longest_text)},
                     .host = std::string{value.at("host").string(1024)},
                     .nonce = value.at("nonce").natural()};
    made.port = static_cast<std::uint16_t>(value.at("port").integer(1, 65535));
    constexpr std::size_t longest = std::size_t{1} << 26U;
    made.held = plan::position_set_from_text(value.at("held").string(longest), parameters);
    for (const auto memory : value.at("memories").items()) {
        if (made.memories.size() == most_memories) {
            memory.fail("more than " + std::to_string(most_memories) + " memories");
        }
        made.memories.push_back(read_memory(memory));
    }
    for (const auto place : value.at("places").items()) {
        made.places.push_back(read_place(place, made));
    }
    if (const auto arena = value.at("arena"); !arena.is_null()) {
        made.arena = read_memory(arena);
    }
    return made;
}

}  // namespace detail

/// The JSON object of one rank: what it tells rank 0.
[[nodiscard]] inline std::string encode(const rank_export& value) {
    std::string text;
    wire::json_writer out{text};
    detail::write(out, value);
    return text;
}
/// The inverse. @param parameters of the manifest. @throws protocol_error not that form.
[[nodiscard]] inline rank_export decode_rank_export(std::string_view text, std::size_t parameters) {
    const wire::json_document document{text, "a trainer rank's export", phase::init};
    return detail::read_rank(document.root(), parameters);
}

/// The JSON object of `message`.
[[nodiscard]] inline std::string encode(const transport_message& message) {
    std::string text;
    wire::json_writer out{text};
    out.begin_object().key("group_sizes").begin_array();
    for (const auto size : message.group_sizes) {
        out.integer(size);
    }
    out.end_array().key("ranks").begin_array();
    for (const auto& rank : message.ranks) {
        detail::write(out, rank);
    }
    out.end_array().end_object();
    return text;
}

/// The inverse of `encode`, for a text that a peer sent. What the handles lead to is not looked at.
/// @throws protocol_error not that form; names the member.
[[nodiscard]] inline transport_message decode_transport_message(std::string_view text,
                                                                const manifest& parameters) {
    const wire::json_document document{text, "sharded_pull transport", phase::init};
    const auto root = document.root();
    root.allow_only({"group_sizes", "ranks"});
    transport_message made;
    std::uint64_t left = parameters.size();
    for (const auto item : root.at("group_sizes").items()) {
        const auto size = item.natural();
        if (size == 0 || size > left) {
            item.fail("the gather groups have other parameters than the list");
        }
        left -= size;
        made.group_sizes.push_back(static_cast<std::size_t>(size));
    }
    if (left != 0) {
        root.at("group_sizes").fail("the gather groups have fewer parameters than the list");
    }
    for (const auto rank : root.at("ranks").items()) {
        if (made.ranks.size() == most_trainer_ranks) {
            rank.fail("more than " + std::to_string(most_trainer_ranks) + " ranks");
        }
        made.ranks.push_back(detail::read_rank(rank, parameters.size()));
    }
    if (made.ranks.empty()) {
        root.at("ranks").fail("a trainer has at least one rank");
    }
    return made;
}

}  // namespace weightwire::sharded_pull
