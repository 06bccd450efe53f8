#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// What every source adaptor is made of: the inner source, and a checked walk over one of its
/// rounds.

namespace weightwire::detail {

/// A source inside another: an lvalue by address, an rvalue by value.
template <class Source>
class source_holder {
public:
    explicit source_holder(Source&& source) : source_{std::move(source)} {}
    [[nodiscard]] Source& get() noexcept { return source_; }

private:
    Source source_;
};
template <class Source>
class source_holder<Source&> {
public:
    explicit source_holder(Source& source) noexcept : source_{&source} {}
    [[nodiscard]] Source& get() noexcept { return *source_; }

private:
    Source* source_;
};

/// Walks one round of a source and checks it against the source's metadata. A source with
/// `held_names()` may leave parameters out; any other yields all.
template <class Source>
class checked_round {
public:
    checked_round(Source& source, std::span<const param_meta> expected)
        : expected_{expected}, range_{source.weights()} {}
    checked_round(const checked_round&) = delete;
    checked_round& operator=(const checked_round&) = delete;

    /// Advances; false at the end.
    /// @throws data_error the source disagrees with its metadata.
    bool next() {
        if (!at_) {
            at_.emplace(std::ranges::begin(range_));
        } else {
            ++*at_;
        }
        if (*at_ == std::ranges::end(range_)) {
            return false;
        }
        current_ = **at_;
        position_ = next_position_;
        if constexpr (HasHeldNames<Source>) {
            while (position_ < expected_.size() && expected_[position_].name != current_.name) {
                ++position_;
            }
        }
        check();
        next_position_ = position_ + 1;
        return true;
    }
    [[nodiscard]] const named_tensor& current() const noexcept { return current_; }
    /// Place of the current tensor in the source's metadata.
    [[nodiscard]] std::size_t position() const noexcept { return position_; }

private:
    void check() const {
        const bool known = position_ < expected_.size();
        if (known && expected_[position_].name == current_.name &&
            expected_[position_].dtype == current_.tensor.type() &&
            expected_[position_].shape == current_.tensor.extents()) {
            return;
        }
        const auto found = std::string{current_.name} + " " +
                           std::string{to_string(current_.tensor.type())} +
                           to_string(current_.tensor.extents());
        if (!known) {
            throw data_error{"an adapted source yields " + found +
                                 ", which its metadata does not name at this place",
                             {.phase = phase::update, .tensor = std::string{current_.name}}};
        }
        const auto& wanted = expected_[position_];
        throw data_error{"an adapted source yields " + found + " at position " +
                             std::to_string(position_) + ", where its metadata names " +
                             std::string{to_string(wanted.dtype)} + to_string(wanted.shape),
                         {.phase = phase::update, .tensor = wanted.name}};
    }

    using range_type = decltype(std::declval<Source&>().weights());
    std::span<const param_meta> expected_;
    range_type range_;
    std::optional<std::ranges::iterator_t<range_type>> at_;
    named_tensor current_{};
    std::size_t position_ = 0;
    std::size_t next_position_ = 0;
};

/// The metadata of a source, kept.
template <class Source>
[[nodiscard]] std::vector<param_meta> metadata_of(Source& source) {
    std::vector<param_meta> all;
    for (auto&& each : source.metadata()) {
        all.push_back(each);
    }
    return all;
}

}  // namespace weightwire::detail
