#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/core/digest.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/wire/base64.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/native.hpp>
#include <weightwire/wire/parameter_lists.hpp>

/// @file
/// Bodies of `wire/native.hpp`: include that one. docs/wire.md is the reference; a member here that
/// it does not list is a defect.

namespace weightwire::wire {

namespace detail {

/// The member inside vLLM's bodies that holds ours.
inline constexpr std::string_view native_member = "weightwire";
inline constexpr std::string_view native_magic = "WWU1";
inline constexpr std::int64_t largest_world = std::int64_t{1} << 20U;
inline constexpr std::int64_t largest_int64 = std::numeric_limits<std::int64_t>::max();
inline constexpr std::size_t longest_word = 64;
inline constexpr std::size_t longest_list_of_words = 64;

/// The object that stands for `text`: an empty one means no members.
[[nodiscard]] inline std::string_view object_text(std::string_view text) noexcept {
    return text.empty() ? std::string_view{"{}"} : text;
}

/// Whether `text` is a word of the wire (a backend's name, a mode): at most 64 letters, digits,
/// `_`,
/// `-` and `.`.
[[nodiscard]] constexpr bool is_word(std::string_view text) noexcept {
    return text.size() <= longest_word && std::all_of(text.begin(), text.end(), [](char c) {
               return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      c == '_' || c == '-' || c == '.';
           });
}

[[nodiscard]] inline std::string read_word(const json_value& value, bool may_be_empty = false) {
    const auto text = value.string();
    if (!is_word(text) || (text.empty() && !may_be_empty)) {
        value.fail("expected a word of at most 64 letters, digits, '_', '-' and '.', found " +
                   quoted_for_message(text));
    }
    return std::string{text};
}

/// Refuses here what the peer would refuse.
/// @throws usage_error
inline void require_word(std::string_view text) {
    if (text.empty() || !is_word(text)) {
        throw usage_error{
            "a wire name is no word of at most 64 letters, digits, '_', '-' and '.': " +
            quoted_for_message(text)};
    }
}

[[nodiscard]] inline std::vector<std::string> read_words(const json_value& value) {
    if (value.count() > longest_list_of_words) {
        value.fail("expected at most " + std::to_string(longest_list_of_words) + " words");
    }
    std::vector<std::string> words;
    for (const auto item : value.items()) {
        words.push_back(read_word(item));
    }
    return words;
}

[[nodiscard]] inline std::int64_t read_budget(const json_value& value) {
    return value.integer(0, largest_int64);
}

/// The wire version is read before anything else, as the rest means nothing in another one.
inline void require_wire(const json_value& message) {
    const auto wire = message.at("wire");
    const auto version = wire.integer(0, std::numeric_limits<int>::max());
    if (version != native_version) {
        wire.fail("the peer speaks native wire " + std::to_string(version) + ", this side " +
                  std::to_string(native_version) + "; use the same weightwire on both");
    }
}

inline void write_words(json_writer& out, const std::vector<std::string>& words) {
    out.begin_array();
    for (const auto& word : words) {
        require_word(word);
        out.string(word);
    }
    out.end_array();
}

/// `{"message":"<text>","weightwire":{<members>}}`.
template <class Members>
[[nodiscard]] std::string encode_reply(std::string_view text, Members&& members) {
    std::string body;
    json_writer out{body};
    out.begin_object().key("message").string(text).key(native_member).begin_object();
    members(out);
    out.end_object().end_object();
    return body;
}

/// Reads a reply of that form: `read(message)` gives the result.
template <class Read>
[[nodiscard]] auto decode_reply(std::string_view body, std::string_view what, phase where,
                                Read&& read) {
    const json_document document{body, what, where};
    document.root().allow_only({"message", native_member});
    (void)document.root().at("message").string();
    return read(document.root().at(native_member));
}

template <std::unsigned_integral Integer>
inline void store_little_endian(char* to, Integer value) noexcept {
    for (std::size_t i = 0; i < sizeof value; ++i) {
        to[i] = static_cast<char>(static_cast<unsigned char>(value >> (8U * i)));
    }
}
template <std::unsigned_integral Integer>
[[nodiscard]] Integer load_little_endian(const char* from) noexcept {
    Integer value = 0;
    for (std::size_t i = 0; i < sizeof value; ++i) {
        value |= static_cast<Integer>(static_cast<Integer>(static_cast<unsigned char>(from[i]))
                                      << (8U * i));
    }
    return value;
}

/// Digests as they travel: base64 of little-endian words.
inline void write_digests(json_writer& out, std::span<const std::uint64_t> digests) {
    std::string bytes(digests.size() * 8, '\0');
    for (std::size_t i = 0; i < digests.size(); ++i) {
        store_little_endian(bytes.data() + 8 * i, digests[i]);
    }
    std::string text;
    append_base64(text, std::as_bytes(std::span{bytes}));
    out.string(text);
}

[[nodiscard]] inline std::vector<std::uint64_t> read_digests(const json_value& value) {
    const auto bytes = decode_base64(value.string());
    if (!bytes || bytes->size() % 8 != 0) {
        value.fail("expected padded base64 of 8 bytes a digest");
    }
    std::vector<std::uint64_t> digests(bytes->size() / 8);
    for (std::size_t i = 0; i < digests.size(); ++i) {
        digests[i] =
            load_little_endian<std::uint64_t>(reinterpret_cast<const char*>(bytes->data()) + 8 * i);
    }
    return digests;
}

/// A version as vLLM's string: decimal digits without leading zeros.
[[nodiscard]] inline std::uint64_t read_version_text(const json_value& value) {
    const auto text = value.string(longest_word);
    std::uint64_t version = 0;
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), version);
    if (status != std::errc{} || end != text.data() + text.size() ||
        std::to_string(version) != text) {
        value.fail("expected a decimal number, found " + quoted_for_message(text));
    }
    return version;
}

}  // namespace detail

inline std::uint64_t plan_hash(std::string_view backend, int world_size, const manifest& parameters,
                               std::string_view wire_parameters) {
    std::string text = "weightwire plan " + std::to_string(native_version) + "\n";
    text.append(backend).append("\n").append(std::to_string(world_size)).append("\n");
    text.append(digest_text(parameters.hash())).append("\n");
    text.append(detail::object_text(wire_parameters));
    return digest(std::as_bytes(std::span{text}));
}

inline std::string encode_version_reply(std::string_view version, const native_offer& offer) {
    std::string body;
    json_writer out{body};
    out.begin_object().key("version").string(version).key(detail::native_member).begin_object();
    out.key("wire").integer(offer.wire).key("backends");
    detail::write_words(out, offer.backends);
    out.key("memory_kinds");
    detail::write_words(out, offer.memory_kinds);
    out.key("commit_mode").string(offer.commit_mode);
    out.key("max_update_bytes").integer(offer.max_update_bytes);
    out.key("max_body_bytes").integer(offer.max_body_bytes);
    out.end_object().end_object();
    return body;
}

inline std::optional<native_offer> decode_version_reply(std::string_view body,
                                                        std::string& version) {
    const json_document document{body, "version reply", phase::probe};
    version = document.root().at("version").string(1024);
    const auto message = document.root().find(detail::native_member);
    if (!message) {
        return std::nullopt;
    }
    native_offer offer;
    offer.wire = static_cast<int>(message->at("wire").integer(0, std::numeric_limits<int>::max()));
    if (offer.wire != native_version) {
        return offer;  // what the rest would mean is not known here
    }
    message->allow_only(
        {"wire", "backends", "memory_kinds", "commit_mode", "max_update_bytes", "max_body_bytes"});
    offer.backends = detail::read_words(message->at("backends"));
    offer.memory_kinds = detail::read_words(message->at("memory_kinds"));
    offer.commit_mode = detail::read_word(message->at("commit_mode"), true);
    offer.max_update_bytes = message->at("max_update_bytes").natural();
    offer.max_body_bytes = message->at("max_body_bytes").natural();
    return offer;
}

inline std::string encode(const native_init& message) {
    detail::require_word(message.backend);
    const auto parameters = detail::object_text(message.wire_parameters);
    const auto transport = detail::object_text(message.transport);
    for (const auto text : {parameters, transport}) {
        json_document{text, "init call to send", phase::init}.root().require_object();
    }
    std::string body;
    body.reserve(1024 + message.parameters.size() * 96 + parameters.size() + transport.size());
    json_writer out{body};
    out.begin_object().key("init_info").begin_object();
    out.key(detail::native_member).begin_object();
    out.key("wire").integer(message.wire).key("backend").string(message.backend);
    out.key("rank_offset").integer(message.rank_offset);
    out.key("world_size").integer(message.world_size);
    out.key("plan_hash").string(digest_text(message.plan_hash));
    out.key("trainer").string(digest_text(message.trainer));
    out.key("take_over").boolean(message.take_over);
    out.key("budget_ms").integer(message.budget_ms);
    detail::require_name(message.parameters.set_name());
    out.key("set").string(message.parameters.set_name());
    write_parameter_lists(out, message.parameters, "dtypes");
    out.key("wire_parameters").raw(parameters).key("transport").raw(transport);
    out.end_object().end_object().end_object();
    return body;
}

inline std::optional<native_init> decode_init(std::string_view body) {
    const json_document document{body, "init call", phase::init};
    const auto info = document.root().find("init_info");
    if (!info || info->kind() != json_kind::object || !info->find(detail::native_member)) {
        document.root().require_object();
        return std::nullopt;
    }
    document.root().allow_only({"init_info"});
    info->allow_only({detail::native_member});
    const auto message = info->at(detail::native_member);
    detail::require_wire(message);
    message.allow_only({"wire", "backend", "rank_offset", "world_size", "plan_hash", "trainer",
                        "take_over", "budget_ms", "set", "names", "dtypes", "shapes",
                        "wire_parameters", "transport"});
    native_init result;
    result.backend = detail::read_word(message.at("backend"));
    result.world_size =
        static_cast<int>(message.at("world_size").integer(2, detail::largest_world));
    result.rank_offset =
        static_cast<int>(message.at("rank_offset").integer(1, result.world_size - 1));
    result.plan_hash = message.at("plan_hash").hash();
    result.trainer = message.at("trainer").hash();
    result.take_over = message.at("take_over").boolean();
    result.budget_ms = detail::read_budget(message.at("budget_ms"));
    result.parameters = read_parameter_lists(message, "dtypes", dtype_spelling::ours,
                                             detail::read_name(message.at("set")));
    message.at("wire_parameters").require_object();
    result.wire_parameters = message.at("wire_parameters").raw();
    message.at("transport").require_object();
    result.transport = message.at("transport").raw();
    return result;
}

inline std::string encode(const native_start& message) {
    std::string body;
    json_writer out{body};
    out.begin_object().key(detail::native_member).begin_object();
    out.key("epoch").integer(message.epoch).key("version").integer(message.version);
    out.key("force").boolean(message.force).key("partial").boolean(message.partial);
    out.key("budget_ms").integer(message.budget_ms);
    out.key("answer_ms").integer(message.answer_ms).end_object().end_object();
    return body;
}

inline std::optional<native_start> decode_start(std::string_view body) {
    if (body.empty()) {  // vLLM's Python client sends none
        return std::nullopt;
    }
    const json_document document{body, "start call", phase::start};
    const auto message = document.root().find(detail::native_member);
    if (!message) {
        return std::nullopt;
    }
    document.root().allow_only({detail::native_member});
    message->allow_only({"epoch", "version", "force", "partial", "budget_ms", "answer_ms"});
    return native_start{.epoch = message->at("epoch").natural(),
                        .version = message->at("version").natural(),
                        .force = message->at("force").boolean(),
                        .partial = message->at("partial").boolean(),
                        .budget_ms = detail::read_budget(message->at("budget_ms")),
                        .answer_ms = detail::read_budget(message->at("answer_ms"))};
}

inline std::string encode(const native_finish& message) {
    std::string body;
    json_writer out{body};
    out.begin_object().key("weight_version").string(std::to_string(message.version));
    out.key(detail::native_member).begin_object();
    out.key("epoch").integer(message.epoch).key("session").integer(message.session);
    out.key("budget_ms").integer(message.budget_ms).key("boot_id").string(message.boot_id);
    out.key("commit_before_ns").integer(message.commit_before_ns).key("digests");
    detail::write_digests(out, message.digests);
    out.end_object().end_object();
    return body;
}

inline std::optional<native_finish> decode_finish(std::string_view body) {
    if (body.empty()) {
        return std::nullopt;
    }
    const json_document document{body, "finish call", phase::finish};
    const auto message = document.root().find(detail::native_member);
    if (!message) {
        return std::nullopt;
    }
    document.root().allow_only({"weight_version", detail::native_member});
    message->allow_only(
        {"epoch", "session", "budget_ms", "boot_id", "commit_before_ns", "digests"});
    native_finish result;
    result.epoch = message->at("epoch").natural();
    result.session = message->at("session").natural();
    result.version = detail::read_version_text(document.root().at("weight_version"));
    result.budget_ms = detail::read_budget(message->at("budget_ms"));
    result.boot_id = message->at("boot_id").string(detail::longest_word);
    result.commit_before_ns = message->at("commit_before_ns").integer(0, detail::largest_int64);
    result.digests = detail::read_digests(message->at("digests"));
    return result;
}

inline std::array<char, 64> encode(const native_update& message) noexcept {
    std::array<char, 64> body{};
    std::copy(detail::native_magic.begin(), detail::native_magic.end(), body.begin());
    detail::store_little_endian(body.data() + 4, message.part);
    detail::store_little_endian(body.data() + 8, message.epoch);
    detail::store_little_endian(body.data() + 16, message.session);
    detail::store_little_endian(body.data() + 24, message.plan_hash);
    detail::store_little_endian(body.data() + 32, message.round);
    detail::store_little_endian(body.data() + 40, static_cast<std::uint64_t>(message.budget_ms));
    detail::store_little_endian(body.data() + 48, message.first);
    detail::store_little_endian(body.data() + 56, message.count);
    return body;
}

inline native_update decode_update(std::string_view body) {
    const auto require = [](bool holds, const char* text) {
        if (!holds) {
            throw protocol_error{text, {.phase = phase::update}};
        }
    };
    require(body.size() == 64, "update call: a native body has 64 bytes, no more and no fewer");
    require(body.starts_with(detail::native_magic), "update call: bytes 0 to 3 are not 'WWU1'");
    native_update result;
    result.part = detail::load_little_endian<std::uint32_t>(body.data() + 4);
    result.epoch = detail::load_little_endian<std::uint64_t>(body.data() + 8);
    result.session = detail::load_little_endian<std::uint64_t>(body.data() + 16);
    result.plan_hash = detail::load_little_endian<std::uint64_t>(body.data() + 24);
    result.round = detail::load_little_endian<std::uint64_t>(body.data() + 32);
    result.budget_ms =
        static_cast<std::int64_t>(detail::load_little_endian<std::uint64_t>(body.data() + 40));
    result.first = detail::load_little_endian<std::uint64_t>(body.data() + 48);
    result.count = detail::load_little_endian<std::uint64_t>(body.data() + 56);
    require(result.round != 0, "update call: rounds count from 1, found 0 at byte 32");
    require(result.budget_ms >= 0, "update call: the budget at byte 40 is negative");
    return result;
}

inline std::string encode(const native_init_reply& message) {
    return detail::encode_reply("Weight transfer initialized", [&](json_writer& out) {
        out.key("epoch").integer(message.epoch);
        out.key("plan_hash").string(digest_text(message.plan_hash));
        out.key("version").integer(message.version);
        out.key("commit_mode").string(message.commit_mode);
        out.key("dirty").boolean(message.dirty);
    });
}

inline native_init_reply decode_init_reply(std::string_view body) {
    return detail::decode_reply(body, "init reply", phase::init, [](const json_value& message) {
        message.allow_only({"epoch", "plan_hash", "version", "commit_mode", "dirty"});
        return native_init_reply{.epoch = message.at("epoch").natural(),
                                 .plan_hash = message.at("plan_hash").hash(),
                                 .version = message.at("version").natural(),
                                 .commit_mode = detail::read_word(message.at("commit_mode"), true),
                                 .dirty = message.at("dirty").boolean()};
    });
}

inline std::string encode(const native_start_reply& message) {
    return detail::encode_reply("Weight update started", [&](json_writer& out) {
        out.key("session").integer(message.session);
    });
}

inline native_start_reply decode_start_reply(std::string_view body) {
    return detail::decode_reply(body, "start reply", phase::start, [](const json_value& message) {
        message.allow_only({"session"});
        return native_start_reply{.session = message.at("session").natural()};
    });
}

inline std::string encode(const native_update_reply& message) {
    return detail::encode_reply("Weights updated", [&](json_writer& out) {
        out.key("bytes").integer(message.bytes);
        out.key("began_ns").integer(message.began_ns).key("ended_ns").integer(message.ended_ns);
    });
}

inline native_update_reply decode_update_reply(std::string_view body) {
    return detail::decode_reply(body, "update reply", phase::update, [](const json_value& message) {
        message.allow_only({"bytes", "began_ns", "ended_ns"});
        return native_update_reply{
            .bytes = message.at("bytes").natural(),
            .began_ns = message.at("began_ns").integer(0, detail::largest_int64),
            .ended_ns = message.at("ended_ns").integer(0, detail::largest_int64)};
    });
}

inline std::string encode(const native_finish_reply& message) {
    return detail::encode_reply("Weight update finished", [&](json_writer& out) {
        out.key("version").integer(message.version);
    });
}

inline native_finish_reply decode_finish_reply(std::string_view body) {
    return detail::decode_reply(body, "finish reply", phase::finish, [](const json_value& message) {
        message.allow_only({"version"});
        return native_finish_reply{.version = message.at("version").natural()};
    });
}

}  // namespace weightwire::wire
