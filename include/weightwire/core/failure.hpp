#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <exception>
#include <string>
#include <utility>

#include <weightwire/core/error.hpp>

/// @file
/// An error as a value: kept in a report, sent to another rank, thrown again there as the same
/// leaf.

namespace weightwire {

/// What failed, without being thrown. Empty (`!failure`) when nothing did.
struct failure {
    std::string kind{};  ///< the leaf's word, or `exception` for what is no `weightwire::error`
    std::string text{};  ///< the sentence, without context
    error_context context{};  ///< where

    explicit operator bool() const noexcept { return !kind.empty(); }

    /// The whole message, as `what()` of the thrown error reads.
    [[nodiscard]] std::string message() const {
        return kind.empty() ? std::string{} : detail::compose_message(kind, text, context);
    }

    /// Throws the leaf that `kind` names.
    [[noreturn]] void raise(std::source_location where = std::source_location::current()) const {
        throw_as(kind, text, context, where);
    }

    /// The value of `caught`.
    [[nodiscard]] static failure from(const error& caught) {
        return {std::string{caught.kind()}, caught.text(), caught.context()};
    }

    /// The value of the exception being handled. Call inside a catch block. A foreign exception
    /// becomes kind `exception` in `where`.
    [[nodiscard]] static failure current(phase where) {
        try {
            throw;
        } catch (const error& caught) {
            return from(caught);
        } catch (const std::exception& caught) {
            return {"exception", caught.what(), {.phase = where}};
        } catch (...) {
            return {"exception", "an exception that is no std::exception", {.phase = where}};
        }
    }
};

}  // namespace weightwire
