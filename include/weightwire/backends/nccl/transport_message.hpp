#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <unistd.h>

#include <weightwire/core/error.hpp>
#include <weightwire/nccl_api/version.hpp>
#include <weightwire/plan/broadcast_plan.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>
#include <weightwire/wire/parameter_lists.hpp>
#include <weightwire/wire/unique_id.hpp>

/// @file
/// `transport_init::native` of `nccl`: what a worker of ours needs to join, and to find out before
/// it joins that it could not: ranks of different NCCL versions or settings may hang or crash in
/// NCCL's own exchange. docs/wire.md has the form.

namespace weightwire::nccl {

/// Variables of the environment, each once, in order of name.
using settings = std::vector<std::pair<std::string, std::string>>;

/// What a trainer tells a worker of ours.
struct transport_message {
    wire::unique_id id{};
    int nccl_version = 0;             ///< as ncclGetVersion says
    std::string library{};            ///< the trainer's path of it, for messages
    nccl::settings settings{};        ///< of the trainer's environment
    plan::broadcast_layout layout{};  ///< order and calls of every round
};

/// Most settings of a message, and the longest value.
inline constexpr std::size_t most_settings = 128;
inline constexpr std::size_t longest_setting = 4096;
inline constexpr std::size_t longest_library_path = 4096;

namespace detail {

/// Variables that every rank has to set alike (vLLM wire section 3, and those by which each rank
/// picks algorithm, protocol and buffers on its own).
inline constexpr std::array<std::string_view, 8> settings_that_matter{
    "NCCL_ALGO",  "NCCL_BUFFSIZE",    "NCCL_CUMEM_ENABLE",  "NCCL_NET",
    "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"};
inline constexpr std::array<std::string_view, 2> prefixes_that_matter{"NCCL_P2P_", "NCCL_IB_"};
/// Of these, the ones that name devices of one machine: two machines may rightly differ.
inline constexpr std::array<std::string_view, 3> settings_of_a_machine{
    "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"};

[[nodiscard]] inline bool matters(std::string_view name) noexcept {
    return std::ranges::find(settings_that_matter, name) != settings_that_matter.end() ||
           std::ranges::any_of(prefixes_that_matter,
                               [&](auto prefix) { return name.starts_with(prefix); });
}
[[nodiscard]] inline bool must_match(std::string_view name) noexcept {
    return matters(name) &&
           std::ranges::find(settings_of_a_machine, name) == settings_of_a_machine.end();
}

/// Value of `name` for a message.
[[nodiscard]] inline std::string spelt(const settings& of, std::string_view name) {
    for (const auto& [key, value] : of) {
        if (key == name) {
            return wire::detail::quoted_for_message(value);
        }
    }
    return "unset";
}

[[nodiscard]] inline std::string_view word_of(plan::sending_order order) noexcept {
    switch (order) {
        case plan::sending_order::manifest: return "manifest";
        case plan::sending_order::by_layer: return "by_layer";
        case plan::sending_order::by_item_size: return "by_item_size";
    }
    return "manifest";
}

[[nodiscard]] inline plan::sending_order read_order(const wire::json_value& value) {
    for (const auto order : {plan::sending_order::manifest, plan::sending_order::by_layer,
                             plan::sending_order::by_item_size}) {
        if (value.string() == word_of(order)) {
            return order;
        }
    }
    value.fail("expected 'manifest', 'by_layer' or 'by_item_size', found " +
               wire::detail::quoted_for_message(value.string()));
}

[[nodiscard]] inline std::vector<std::size_t> read_call_begins(const wire::json_value& value) {
    std::vector<std::size_t> begins;
    for (const auto item : value.items()) {
        const auto begin = item.natural();
        const bool fits = begins.empty() ? begin == 0 : begin > begins.back();
        if (!fits || begin >= wire::most_parameters) {
            item.fail("calls begin at ascending positions from 0 below " +
                      std::to_string(wire::most_parameters));
        }
        begins.push_back(static_cast<std::size_t>(begin));
    }
    if (begins.empty()) {
        value.fail("a round has at least one call");
    }
    return begins;
}

[[nodiscard]] inline settings read_settings(const wire::json_value& value) {
    settings result;
    value.each_member([&](std::string_view name, const wire::json_value& member) {
        if (!matters(name)) {
            value.fail("unknown setting " + wire::detail::quoted_for_message(name));
        }
        if (result.size() == most_settings) {
            value.fail("more than " + std::to_string(most_settings) + " settings");
        }
        result.emplace_back(std::string{name}, std::string{member.string(longest_setting)});
    });
    std::ranges::sort(result);
    return result;
}

}  // namespace detail

/// Those of this process's variables that have to agree between ranks. What NCCL reads from its
/// configuration files is not seen.
/// Not to be called while another thread changes the environment.
[[nodiscard]] inline settings settings_of_environment() {
    settings result;
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
        const std::string_view text{*entry};
        const auto name = text.substr(0, text.find('='));
        if (name.size() < text.size() && detail::matters(name) && result.size() < most_settings) {
            result.emplace_back(std::string{name},
                                std::string{text.substr(name.size() + 1, longest_setting)});
        }
    }
    std::ranges::sort(result);
    return result;
}

/// Compares what a trainer said with what this process is, before it joins.
/// @throws mismatch_error names the versions, or the first setting that differs.
inline void require_agreement(const transport_message& trainer, int nccl_version,
                              std::string_view library, const settings& ours) {
    if (trainer.nccl_version != nccl_version) {
        throw mismatch_error{
            "the trainer has NCCL " + nccl_api::version_text(trainer.nccl_version) + " (" +
                trainer.library + "), this worker " + nccl_api::version_text(nccl_version) + " (" +
                std::string{library} +
                "); all ranks need one version: name the path of the same libnccl to the trainer "
                "by trainer_init_info::library, or to this worker by nccl::backend{.library} or "
                "the environment variable WEIGHTWIRE_LIBNCCL",
            {.phase = phase::init}};
    }
    for (const auto* side : {&trainer.settings, &ours}) {
        for (const auto& [name, value] : *side) {
            const auto theirs = detail::spelt(trainer.settings, name);
            const auto mine = detail::spelt(ours, name);
            if (detail::must_match(name) && theirs != mine) {
                throw mismatch_error{name + " is " + theirs + " at the trainer and " + mine +
                                         " at this worker; start both with the same value",
                                     {.phase = phase::init}};
            }
        }
    }
}

/// The JSON object of `message`.
[[nodiscard]] inline std::string encode(const transport_message& message) {
    std::string text;
    wire::json_writer out{text};
    out.begin_object().key("unique_id").string(wire::base64_of(message.id));
    out.key("nccl_version").integer(message.nccl_version);
    out.key("library").string(message.library, wire::bad_utf8::replace);
    out.key("settings").begin_object();
    for (const auto& [name, value] : message.settings) {
        out.key(name).string(value, wire::bad_utf8::replace);
    }
    out.end_object().key("order").string(detail::word_of(message.layout.order));
    out.key("calls").begin_array();
    for (const auto begin : message.layout.call_begins) {
        out.integer(begin);
    }
    out.end_array().end_object();
    return text;
}

/// The inverse of `encode`, for a text that a peer sent.
/// @throws protocol_error not that form; names the member.
[[nodiscard]] inline transport_message decode_transport_message(std::string_view text) {
    const wire::json_document document{text, "nccl transport", phase::init};
    const auto root = document.root();
    root.allow_only({"unique_id", "nccl_version", "library", "settings", "order", "calls"});
    transport_message result;
    result.id = wire::unique_id_from_base64(root.at("unique_id").string());
    result.nccl_version = static_cast<int>(
        root.at("nccl_version").integer(0, std::numeric_limits<std::int32_t>::max()));
    result.library = root.at("library").string(longest_library_path);
    result.settings = detail::read_settings(root.at("settings"));
    result.layout.order = detail::read_order(root.at("order"));
    result.layout.call_begins = detail::read_call_begins(root.at("calls"));
    return result;
}

}  // namespace weightwire::nccl
