#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/concepts/trainer_group.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/failure.hpp>
#include <weightwire/engine/sync_report.hpp>

/// @file
/// How the ranks of one trainer end every step alike: with the same report, or the same error.

namespace weightwire {

namespace detail {

[[nodiscard]] inline nlohmann::json to_json(const failure& value) {
    const auto& where = value.context;
    return {{"kind", value.kind},
            {"text", value.text},
            {"phase", static_cast<int>(where.phase)},
            {"peer", where.peer},
            {"tensor", where.tensor},
            {"backend", where.backend},
            {"operation", where.operation},
            {"rank", where.rank},
            {"bytes_done", where.bytes_done},
            {"bytes_total", where.bytes_total},
            {"native_code", where.native_code},
            {"native_text", where.native_text}};
}

[[nodiscard]] inline failure failure_from_json(const nlohmann::json& value) {
    const auto number = value.at("phase").get<int>();
    const bool known = number >= 0 && number <= static_cast<int>(phase::serve);
    return {value.at("kind").get<std::string>(),
            value.at("text").get<std::string>(),
            {.phase = known ? static_cast<phase>(number) : phase::none,
             .peer = value.at("peer").get<std::string>(),
             .tensor = value.at("tensor").get<std::string>(),
             .backend = value.at("backend").get<std::string>(),
             .operation = value.at("operation").get<std::string>(),
             .rank = value.at("rank").get<int>(),
             .bytes_done = value.at("bytes_done").get<std::uint64_t>(),
             .bytes_total = value.at("bytes_total").get<std::uint64_t>(),
             .native_code = value.at("native_code").get<int>(),
             .native_text = value.at("native_text").get<std::string>()}};
}

[[nodiscard]] inline nlohmann::json to_json(const phase_figure& value) {
    return {{"seconds", value.seconds}, {"bytes", value.bytes}};
}

[[nodiscard]] inline phase_figure figure_from_json(const nlohmann::json& value) {
    return {value.at("seconds").get<double>(), value.at("bytes").get<std::uint64_t>()};
}

[[nodiscard]] inline nlohmann::json to_json(const sync_report& report) {
    auto peers = nlohmann::json::array();
    for (const auto& outcome : report.peers) {
        peers.push_back({{"peer", outcome.peer},
                         {"world_size", outcome.world_size},
                         {"status", static_cast<int>(outcome.status)},
                         {"version", outcome.version},
                         {"error", to_json(outcome.error)},
                         {"resume_error", to_json(outcome.resume_error)},
                         {"may_be_mixed", outcome.may_be_mixed},
                         {"bytes", outcome.bytes},
                         {"data_seconds", outcome.data_seconds}});
    }
    return {{"version", report.version},
            {"round", report.round},
            {"peers", std::move(peers)},
            {"start", to_json(report.start)},
            {"update", to_json(report.update)},
            {"finish", to_json(report.finish)},
            {"total_seconds", report.total_seconds},
            {"data_seconds", report.data_seconds}};
}

[[nodiscard]] inline sync_report report_from_json(const nlohmann::json& value) {
    sync_report report{.version = value.at("version").get<weight_version>(),
                       .round = value.at("round").get<std::uint64_t>(),
                       .start = figure_from_json(value.at("start")),
                       .update = figure_from_json(value.at("update")),
                       .finish = figure_from_json(value.at("finish")),
                       .total_seconds = value.at("total_seconds").get<double>(),
                       .data_seconds = value.at("data_seconds").get<double>()};
    for (const auto& entry : value.at("peers")) {
        report.peers.push_back({.peer = entry.at("peer").get<std::string>(),
                                .world_size = entry.at("world_size").get<int>(),
                                .status = static_cast<peer_status>(entry.at("status").get<int>()),
                                .version = entry.at("version").get<weight_version>(),
                                .error = failure_from_json(entry.at("error")),
                                .resume_error = failure_from_json(entry.at("resume_error")),
                                .may_be_mixed = entry.at("may_be_mixed").get<bool>(),
                                .bytes = entry.at("bytes").get<std::uint64_t>(),
                                .data_seconds = entry.at("data_seconds").get<double>()});
    }
    return report;
}

/// JSON text; bytes that are no UTF-8 (a file name, a library's message) become replacement
/// characters.
[[nodiscard]] inline std::string dump(const nlohmann::json& value) {
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

[[noreturn]] inline void raise_garbled(int rank, const std::exception& caught) {
    throw protocol_error{
        "another trainer rank gathered what is no message of this library; do all ranks run the "
        "same version?",
        {.rank = rank, .native_text = caught.what()}};
}

}  // namespace detail

/// A failure and the trainer rank that it happened on.
struct rank_failure {
    failure what{};
    int rank = 0;
    explicit operator bool() const noexcept { return static_cast<bool>(what); }
};

/// Every rank's failure, or none; returns the one of the lowest rank that has one, the same on
/// every rank. Collective.
/// @throws what the group throws; protocol_error when another rank sends something else.
template <TrainerGroup Group>
[[nodiscard]] rank_failure agree(Group& group, const failure& mine, deadline until) {
    if (group.size() == 1) {
        return {mine, 0};
    }
    const auto all = group.all_gather(detail::dump(detail::to_json(mine)), until);
    for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
        try {
            const auto text = nlohmann::json::parse(all[static_cast<std::size_t>(rank)]);
            if (auto theirs = detail::failure_from_json(text)) {
                return {std::move(theirs), rank};
            }
        } catch (const nlohmann::json::exception& caught) {
            detail::raise_garbled(rank, caught);
        }
    }
    return {};
}

/// Rank 0's report, on every rank. Collective.
/// @throws what the group throws; protocol_error when rank 0 sends something else.
template <TrainerGroup Group>
[[nodiscard]] sync_report agree(Group& group, sync_report mine, deadline until) {
    if (group.size() == 1) {
        return mine;
    }
    const auto text = group.rank() == 0 ? detail::dump(detail::to_json(mine)) : std::string{};
    const auto all = group.all_gather(text, until);
    try {
        return detail::report_from_json(nlohmann::json::parse(all.front()));
    } catch (const nlohmann::json::exception& caught) {
        detail::raise_garbled(0, caught);
    }
}

/// Throws on every rank when the ranks' hashes of the same thing differ. Collective.
/// @throws mismatch_error naming the first rank that differs from rank 0.
template <TrainerGroup Group>
void require_equal(Group& group, std::uint64_t hash, std::string_view what, deadline until) {
    const auto all = group.all_gather(digest_text(hash), until);
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
        if (all[rank] != all.front()) {
            throw mismatch_error{
                "the " + std::string{what} + " differs between trainer ranks: " + all.front() +
                    " on rank 0, " + all[rank] + " on rank " + std::to_string(rank) +
                    "; every rank must list the same parameters",
                {.phase = phase::init, .rank = static_cast<int>(rank)}};
        }
    }
}

}  // namespace weightwire
