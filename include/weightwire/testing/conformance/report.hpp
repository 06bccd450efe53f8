#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// What a conformance suite returns: a list of named findings. It knows no test framework, so a
/// user asserts `report.passed()` in his own and prints `report.text()`.

namespace weightwire::testing {

/// One thing that a suite looked at.
struct conformance_check {
    std::string name;    ///< what a model promises, stable across releases
    bool passed = true;  ///< whether it was kept
    std::string detail;  ///< what was expected and found; for a passed check, what was compared
};

/// Everything that a suite looked at, in the order in which it did.
struct conformance_report {
    std::vector<conformance_check> checks;

    /// Appends a finding. Returns `passed`, so that a suite can stop where going on makes no sense.
    bool record(std::string name, bool passed, std::string detail = {}) {
        checks.push_back({std::move(name), passed, std::move(detail)});
        return passed;
    }

    /// Appends what `check` finds: it returns an empty string where the promise was kept, else what
    /// was wrong. An exception out of it is a failed check, with the exception's words.
    template <class Check>
    bool run(std::string name, Check&& check) {
        try {
            std::string wrong = std::forward<Check>(check)();
            const bool kept = wrong.empty();  // before `wrong` is moved from
            return record(std::move(name), kept, std::move(wrong));
        } catch (const std::exception& problem) {
            return record(std::move(name), false, std::string{"it threw: "} + problem.what());
        } catch (...) {
            return record(std::move(name), false, "it threw what is no std::exception");
        }
    }

    /// Appends another suite's findings, each name after `prefix`.
    void append(const conformance_report& other, std::string_view prefix = {}) {
        for (const auto& check : other.checks) {
            record(std::string{prefix} + check.name, check.passed, check.detail);
        }
    }

    /// Whether something was looked at and nothing failed: a suite that checked nothing has not
    /// passed.
    [[nodiscard]] bool passed() const noexcept { return !checks.empty() && failures() == 0; }
    [[nodiscard]] std::size_t failures() const noexcept {
        return static_cast<std::size_t>(
            std::ranges::count_if(checks, [](const auto& check) { return !check.passed; }));
    }
    /// The finding of that name, or null when the suite did not get so far.
    [[nodiscard]] const conformance_check* find(std::string_view name) const noexcept {
        const auto found =
            std::ranges::find_if(checks, [name](const auto& check) { return check.name == name; });
        return found == checks.end() ? nullptr : &*found;
    }

    /// One line a finding, the failed ones marked: what to print when `passed()` is false.
    [[nodiscard]] std::string text() const {
        std::string out;
        for (const auto& check : checks) {
            out.append(check.passed ? "ok     " : "FAILED ").append(check.name);
            if (!check.detail.empty()) {
                out.append(": ").append(check.detail);
            }
            out.append("\n");
        }
        return out;
    }
};

}  // namespace weightwire::testing
