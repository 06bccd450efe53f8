#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <variant>
#include <vector>

/// @file
/// The command lines of benchmarks, as a table of what they may have.

namespace benchmarks {

/// A size that is given in MiB.
struct mebibytes {
    std::uint64_t* bytes;
};
/// What is true of a value that was taken.
using taken_by = std::function<bool(std::string_view value)>;

/// A word, and where what it says goes: a flag stands alone, everything else has a value behind it.
struct option {
    std::string_view name;
    std::variant<bool*, int*, std::int64_t*, std::uint64_t*, double*, std::string*, mebibytes,
                 taken_by>
        to;
};

/// @returns whether all of `text` is a number of this type; if not, `to` stays.
template <class Number>
[[nodiscard]] bool read_number(std::string_view text, Number& to) {
    Number read{};
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), read);
    if (status != std::errc{} || end != text.data() + text.size()) {
        return false;
    }
    to = read;
    return true;
}

namespace detail {

[[nodiscard]] inline bool read_value(const option& which, std::string_view value) {
    return std::visit(
        [&](const auto& to) {
            using target = std::remove_cvref_t<decltype(to)>;
            if constexpr (std::is_same_v<target, taken_by>) {
                return to(value);
            } else if constexpr (std::is_same_v<target, std::string*>) {
                *to = value;
                return true;
            } else if constexpr (std::is_same_v<target, mebibytes>) {
                std::uint64_t count = 0;
                const bool fits = read_number(value, count) && count < std::uint64_t{1} << 44U;
                *to.bytes = fits ? count << 20U : *to.bytes;
                return fits;
            } else if constexpr (std::is_same_v<target, bool*>) {
                return false;  // has no value
            } else {
                return read_number(value, *to);
            }
        },
        which.to);
}

}  // namespace detail

/// @returns whether all words of the command line mean something; the first that does not has gone
/// to stderr.
[[nodiscard]] inline bool read_options(const char* program, int argc, char** argv,
                                       const std::vector<option>& options) {
    for (int i = 1; i < argc; ++i) {
        const std::string_view key = argv[i];
        const option* found = nullptr;
        for (const auto& each : options) {
            found = each.name == key ? &each : found;
        }
        if (found != nullptr && std::holds_alternative<bool*>(found->to)) {
            *std::get<bool*>(found->to) = true;
            continue;
        }
        const std::string_view value = i + 1 < argc ? argv[i + 1] : "";
        if (found == nullptr || i + 1 == argc || !detail::read_value(*found, value)) {
            std::fprintf(stderr, "%s: what is %s%s%s?\n", program, argv[i],
                         found != nullptr && !value.empty() ? " " : "",
                         found != nullptr && !value.empty() ? argv[i + 1] : "");
            return false;
        }
        ++i;
    }
    return true;
}

}  // namespace benchmarks
