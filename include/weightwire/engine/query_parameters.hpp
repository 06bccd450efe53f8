#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include <weightwire/core/error.hpp>
#include <weightwire/wire/envelope.hpp>

/// @file
/// The part of a request target after `?`, as vLLM's routes read it.

namespace weightwire::detail {

/// The value of the last parameter called `name`, or nothing. The names and values that the routes
/// know are plain words, so percent signs are not decoded: such a value is refused as unknown.
[[nodiscard]] inline std::optional<std::string_view> query_value(std::string_view query,
                                                                 std::string_view name) {
    std::optional<std::string_view> found;
    while (!query.empty()) {
        const auto end = std::min(query.find('&'), query.size());
        const auto pair = query.substr(0, end);
        const auto equals = std::min(pair.find('='), pair.size());
        if (pair.substr(0, equals) == name) {
            found = pair.substr(std::min(equals + 1, pair.size()));
        }
        query.remove_prefix(std::min(end + 1, query.size()));
    }
    return found;
}

/// What vLLM answers to a parameter that it cannot read (vLLM wire section 1.5).
[[noreturn]] inline void refuse_query(std::string_view name, std::string_view expected,
                                      std::string_view found) {
    throw wire::request_error{
        wire::make_http_error(400, "1 validation error: query parameter '" + std::string{name} +
                                       "': expected " + std::string{expected} + ", found '" +
                                       std::string{found.substr(0, 64)} + "'"),
        phase::serve};
}

/// A boolean parameter, in any spelling that FastAPI takes.
/// @throws wire::request_error 400.
[[nodiscard]] inline bool query_bool(std::string_view query, std::string_view name,
                                     bool otherwise) {
    constexpr std::array<std::string_view, 6> yes{"true", "1", "yes", "on", "t", "y"};
    constexpr std::array<std::string_view, 6> no{"false", "0", "no", "off", "f", "n"};
    const auto value = query_value(query, name);
    if (!value) {
        return otherwise;
    }
    std::string lower{*value};
    std::transform(lower.begin(), lower.end(), lower.begin(), [](char c) {
        return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    });
    if (std::find(yes.begin(), yes.end(), lower) != yes.end()) {
        return true;
    }
    if (std::find(no.begin(), no.end(), lower) == no.end()) {
        refuse_query(name, "a boolean", *value);
    }
    return false;
}

}  // namespace weightwire::detail
