#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/wire/json_reader.hpp>
#include <weightwire/wire/json_writer.hpp>

/// @file
/// What shall go wrong, where and when: the plan of the fault transport.

namespace weightwire::testing {

/// One way to fail. The first four happen in the trainer, the others in a worker.
enum class fault_kind : std::uint8_t {
    flip_sent_byte,      ///< the lowest bit of one byte changes after its digest was taken
    throw_in_send,       ///< `send` throws before it reads a tensor
    stall_in_send,       ///< `send` does nothing until its deadline or stop
    kill_in_send,        ///< the trainer's process ends
    throw_in_open,       ///< the worker's `open` throws
    throw_in_receive,    ///< `receive` throws before it takes a byte
    stall_in_receive,    ///< `receive` does nothing until its deadline or stop
    kill_in_receive,     ///< the worker's process ends
    flip_received_byte,  ///< the lowest bit of one byte in place changes
    drop_piece,          ///< the arrival of the piece that holds a byte is not reported
    duplicate_piece,     ///< it is reported twice
};

/// The words that plans and messages use, by value of the enumeration.
inline constexpr std::array<std::string_view, 11> fault_names{
    "flip_sent_byte",     "throw_in_send",    "stall_in_send",    "kill_in_send",
    "throw_in_open",      "throw_in_receive", "stall_in_receive", "kill_in_receive",
    "flip_received_byte", "drop_piece",       "duplicate_piece"};

[[nodiscard]] constexpr std::string_view to_string(fault_kind value) noexcept {
    return fault_names[static_cast<std::size_t>(value)];
}
/// Whether it happens in the trainer.
[[nodiscard]] constexpr bool in_trainer(fault_kind value) noexcept {
    return value <= fault_kind::kill_in_send;
}
/// Whether it is about one byte of one tensor.
[[nodiscard]] constexpr bool is_about_tensor(fault_kind value) noexcept {
    return value == fault_kind::flip_sent_byte || value >= fault_kind::flip_received_byte;
}
/// Whether it is about one part of a round.
[[nodiscard]] constexpr bool is_about_part(fault_kind value) noexcept {
    return !is_about_tensor(value) && value != fault_kind::throw_in_open;
}

/// The exit status of a process that a fault has killed.
inline constexpr int killed_by_fault = 86;

/// One fault. A worker that is spoken to as vLLM's learns neither round nor part: there every
/// update call counts as a round of one part.
struct fault_point {
    fault_kind kind = fault_kind::flip_sent_byte;
    std::string tensor{};     ///< where it is about a tensor: its name
    std::uint64_t byte = 0;   ///< and the byte, in C order
    std::size_t part = 0;     ///< where it is about a part: which of the round
    std::uint64_t round = 0;  ///< 0: in every one; else counts from 1
    int rank = -1;            ///< global rank of the worker that it happens in; -1: every one

    [[nodiscard]] bool is_in(std::uint64_t current_round) const noexcept {
        return round == 0 || round == current_round;
    }
    friend bool operator==(const fault_point&, const fault_point&) = default;
};

/// The member of the wire parameters that tells workers their faults:
/// `[{"kind":…,"tensor":…,"byte":…,"part":…,"round":…,"rank":…},…]`.
inline constexpr std::string_view faults_member = "weightwire_faults";

/// The worker's faults of `plan` as JSON; empty where it has none.
[[nodiscard]] inline std::string encode_worker_faults(const std::vector<fault_point>& plan) {
    std::string out;
    wire::json_writer writer{out};
    std::size_t count = 0;
    writer.begin_array();
    for (const auto& point : plan) {
        if (in_trainer(point.kind)) {
            continue;
        }
        ++count;
        writer.begin_object().key("kind").string(to_string(point.kind));
        writer.key("tensor").string(point.tensor).key("byte").integer(point.byte);
        writer.key("part").integer(point.part).key("round").integer(point.round);
        writer.key("rank").integer(point.rank).end_object();
    }
    writer.end_array();
    return count == 0 ? std::string{} : out;
}

/// @throws protocol_error naming the member that is wrong.
[[nodiscard]] inline std::vector<fault_point> decode_faults(const wire::json_value& list) {
    std::vector<fault_point> plan;
    for (const auto entry : list.items()) {
        entry.allow_only({"kind", "tensor", "byte", "part", "round", "rank"});
        const auto kind = entry.at("kind");
        std::size_t index = 0;
        while (index < fault_names.size() && fault_names[index] != kind.string()) {
            ++index;
        }
        if (index == fault_names.size() || in_trainer(static_cast<fault_kind>(index))) {
            kind.fail("this is no fault of a worker");
        }
        plan.push_back({.kind = static_cast<fault_kind>(index),
                        .tensor = std::string{entry.at("tensor").string()},
                        .byte = entry.at("byte").natural(),
                        .part = static_cast<std::size_t>(entry.at("part").natural()),
                        .round = entry.at("round").natural(),
                        .rank = static_cast<int>(
                            entry.at("rank").integer(-1, std::numeric_limits<int>::max()))});
    }
    return plan;
}

/// `object` with one more member, `value`, which is JSON.
[[nodiscard]] inline std::string add_member(std::string_view object, std::string_view name,
                                            std::string_view value) {
    const wire::json_document document{object, "wire parameters", phase::init};
    bool empty = true;
    document.root().each_member([&](std::string_view, const wire::json_value&) { empty = false; });
    std::string out{object.substr(0, object.rfind('}'))};
    out += empty ? "" : ",";
    wire::append_json_string(out, name);
    return out.append(":").append(value).append("}");
}

/// Takes the faults out of `object`, so that the inner backend sees what it would without them.
/// @throws protocol_error not an object, or faults that are none.
[[nodiscard]] inline std::vector<fault_point> take_faults(std::string& object) {
    std::vector<fault_point> plan;
    std::size_t begin = 0;
    std::size_t end = 0;
    {
        const wire::json_document document{object, "wire parameters", phase::init};
        const auto list = document.root().find(faults_member);
        if (!list) {
            return plan;
        }
        plan = decode_faults(*list);
        begin = static_cast<std::size_t>(list->raw().data() - object.data());
        end = begin + list->raw().size();
    }
    begin = object.rfind('"', object.rfind('"', begin) - 1);  // the name has no quotes inside
    const auto comma = object.find_last_not_of(" \t\r\n", begin - 1);
    if (object[comma] == ',') {
        begin = comma;
    } else {
        const auto next = object.find_first_not_of(" \t\r\n", end);
        end = object[next] == ',' ? next + 1 : end;
    }
    object.erase(begin, end - begin);
    return plan;
}

/// Checks that every fault can happen: a plan that never fires would test nothing.
/// @throws usage_error naming the tensor, or the part.
inline void check_plan(const std::vector<fault_point>& plan, const manifest& parameters,
                       std::size_t part_count) {
    for (const auto& point : plan) {
        const auto at = parameters.find(point.tensor);
        const auto name = std::string{to_string(point.kind)};
        if (is_about_tensor(point.kind) && at == manifest::npos) {
            throw usage_error{"the fault " + name + " is about a tensor that is not sent",
                              {.phase = phase::init, .tensor = point.tensor}};
        }
        const bool changes = point.kind == fault_kind::flip_sent_byte ||
                             point.kind == fault_kind::flip_received_byte;
        if (is_about_tensor(point.kind) && point.byte >= parameters[at].byte_size() &&
            (changes || point.byte != 0)) {
            throw usage_error{"the fault " + name + " is about byte " + std::to_string(point.byte) +
                                  " of a tensor of " + std::to_string(parameters[at].byte_size()),
                              {.phase = phase::init, .tensor = point.tensor}};
        }
        if (is_about_part(point.kind) && point.part >= part_count) {
            throw usage_error{"the fault " + name + " is in part " + std::to_string(point.part) +
                                  " of a round of " + std::to_string(part_count),
                              {.phase = phase::init}};
        }
    }
}

}  // namespace weightwire::testing
