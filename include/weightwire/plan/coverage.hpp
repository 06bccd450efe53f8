#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>

/// @file
/// Strict coverage: every destination byte written exactly once in a session, or declared not
/// wanted.

namespace weightwire {

/// Counts the bytes that arrive for each parameter of a session. Bytes of one parameter arrive in
/// order (pieces may interleave with other parameters'), so a piece that does not begin where the
/// last one ended is an error at once. Not thread-safe.
class coverage {
public:
    coverage() = default;
    /// @param parameters lives as long as this object.
    explicit coverage(const manifest& parameters)
        : parameters_{&parameters}, written_(parameters.size(), 0) {
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            missing_ += parameters[i].byte_size() == 0 ? 0U : 1U;
        }
    }

    /// Records that bytes `[offset, offset + count)` of parameter `i` were written. Returns whether
    /// the parameter is now whole. Does not allocate unless it throws.
    /// @throws coverage_error bytes written twice, a gap, or past the end; names the tensor.
    bool wrote(std::size_t i, std::uint64_t offset, std::uint64_t count) {
        const auto& parameter = (*parameters_)[i];
        const auto size = parameter.byte_size();
        auto& done = written_[i];
        if (offset != done || count > size - done) {
            throw coverage_error{
                std::string{offset < done ? "bytes are written twice"
                                          : "bytes are written past a gap or the end"} +
                    ": a piece of " + std::to_string(count) + " at " + std::to_string(offset) +
                    ", " + std::to_string(done) + " of " + std::to_string(size) +
                    " were written before",
                {.phase = phase::update,
                 .tensor = parameter.name,
                 .bytes_done = done,
                 .bytes_total = size}};
        }
        done += count;
        if (count != 0 && done == size) {
            --missing_;
        }
        return done == size;
    }

    /// Whether parameter `i` has all its bytes. One without bytes always has.
    [[nodiscard]] bool whole(std::size_t i) const noexcept {
        return written_[i] == (*parameters_)[i].byte_size();
    }
    [[nodiscard]] bool all_whole() const noexcept { return missing_ == 0; }
    [[nodiscard]] bool untouched(std::size_t i) const noexcept { return written_[i] == 0; }

    /// @throws coverage_error a parameter is not whole; names the first and says how many there
    /// are.
    void require_all() const {
        if (missing_ == 0) {
            return;
        }
        for (std::size_t i = 0; i < written_.size(); ++i) {
            if (!whole(i)) {
                const auto& parameter = (*parameters_)[i];
                throw coverage_error{
                    std::to_string(missing_) + " of " + std::to_string(parameters_->size()) +
                        " parameters are not whole, this one first; nothing is committed",
                    {.phase = phase::finish,
                     .tensor = parameter.name,
                     .bytes_done = written_[i],
                     .bytes_total = parameter.byte_size()}};
            }
        }
    }

private:
    const manifest* parameters_ = nullptr;
    std::vector<std::uint64_t> written_;
    std::size_t missing_ = 0;
};

}  // namespace weightwire
