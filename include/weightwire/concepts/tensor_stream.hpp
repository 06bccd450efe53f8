#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// One round's tensors, checked against the manifest as they come: what a sender reads.

namespace weightwire {

/// A one-pass view of a round's tensors in manifest order. Every tensor it hands out has the name,
/// dtype and shape that the manifest promises at that position. A sender is compiled once, whatever
/// the source's type: this is a pair of function pointers, not a virtual base.
///
/// Not thread-safe: only the thread in `send_weights()` may call it.
class tensor_stream {
public:
    /// The next tensor, or null after the last. Valid for `lifetime()`.
    /// @throws data_error the source disagrees with its metadata, or ends early or late; names the
    /// tensor.
    /// @throws anything that advancing the source throws.
    [[nodiscard]] const named_tensor* next() { return next_(state_); }
    /// Copies bytes `[offset, offset + to.size())` of the tensor that `next()` gave last to `to`,
    /// in the source's own way. Returns false where it has none (`HasRead`): copy from the address.
    /// @throws anything that the source's `read` throws.
    [[nodiscard]] bool read(std::uint64_t offset, std::span<std::byte> to) {
        return read_ != nullptr && (read_(state_, offset, to), true);
    }
    /// Index in the manifest of the tensor that `next()` gives next; its size after the last. Where
    /// this rank holds only some (`HasHeldNames`), those that it does not hold are skipped.
    [[nodiscard]] std::size_t position() const noexcept { return position_(state_); }
    /// What the source grants.
    [[nodiscard]] tensor_lifetime lifetime() const noexcept { return lifetime_; }
    [[nodiscard]] const weightwire::manifest& manifest() const noexcept { return *manifest_; }

    /// Advances the source to its end without looking: other trainer ranks may be in a collective
    /// with us.
    /// @throws anything that advancing the source throws.
    void drain() { drain_(state_); }

private:
    template <WeightSource Source>
    friend class round_of;

    tensor_stream() = default;
    const named_tensor* (*next_)(void*) = nullptr;
    std::size_t (*position_)(const void*) noexcept = nullptr;
    void (*drain_)(void*) = nullptr;
    void (*read_)(void*, std::uint64_t, std::span<std::byte>) = nullptr;
    void* state_ = nullptr;
    const weightwire::manifest* manifest_ = nullptr;
    tensor_lifetime lifetime_ = tensor_lifetime::until_next;
};

/// One round over `Source`: calls `weights()` and walks the range. Lives on the stack of
/// `send_weights()`.
template <WeightSource Source>
class round_of {
public:
    /// @param held for a source that yields only some parameters: one a parameter, not 0 for those.
    /// Empty: it yields all.
    round_of(Source& source, const weightwire::manifest& expected,
             std::span<const unsigned char> held = {})
        : source_{&source}, manifest_{&expected}, held_{held}, range_{source.weights()} {
        skip();
    }
    round_of(const round_of&) = delete;
    round_of& operator=(const round_of&) = delete;

    /// The view for a sender; valid while this object lives.
    [[nodiscard]] tensor_stream stream() noexcept {
        tensor_stream view;
        view.state_ = this;
        view.manifest_ = manifest_;
        view.lifetime_ = lifetime_of<Source>();
        view.next_ = [](void* self) { return static_cast<round_of*>(self)->next(); };
        view.position_ = [](const void* self) noexcept {
            return static_cast<const round_of*>(self)->position_;
        };
        view.drain_ = [](void* self) { static_cast<round_of*>(self)->drain(); };
        if constexpr (HasRead<std::remove_reference_t<Source>>) {
            view.read_ = [](void* self, std::uint64_t offset, std::span<std::byte> to) {
                auto& round = *static_cast<round_of*>(self);
                round.source_->read(round.current_, offset, to);
            };
        }
        return view;
    }

private:
    using range_type = decltype(std::declval<Source&>().weights());

    bool advance() {
        if (!at_) {
            at_.emplace(std::ranges::begin(range_));
        } else if (*at_ != std::ranges::end(range_)) {
            ++*at_;
        }
        return *at_ != std::ranges::end(range_);
    }

    const named_tensor* next() {
        const bool more = advance();
        if (position_ == manifest_->size()) {
            if (more) {
                throw data_error{
                    "the source yields more tensors than its metadata names",
                    {.phase = phase::update, .tensor = std::string{named_tensor(**at_).name}}};
            }
            return nullptr;
        }
        const auto& expected = (*manifest_)[position_];
        if (!more) {
            throw data_error{"the source ended before this tensor, which its metadata names",
                             {.phase = phase::update, .tensor = expected.name}};
        }
        current_ = **at_;
        check(expected);
        ++position_;
        skip();
        return &current_;
    }

    /// To the next parameter that the source yields.
    void skip() noexcept {
        while (position_ < held_.size() && held_[position_] == 0) {
            ++position_;
        }
    }

    void check(const param_meta& expected) const {
        if (current_.name == expected.name && current_.tensor.type() == expected.dtype &&
            current_.tensor.extents() == expected.shape) {
            if (current_.tensor.data() == nullptr && current_.tensor.byte_size() != 0) {
                throw data_error{"the source yields no address for a tensor of " +
                                     std::to_string(current_.tensor.byte_size()) +
                                     " bytes; give the view the memory that it is of",
                                 {.phase = phase::update, .tensor = expected.name}};
            }
            return;
        }
        throw data_error{"the source yields " + std::string{current_.name} + " " +
                             std::string{to_string(current_.tensor.type())} +
                             to_string(current_.tensor.extents()) + " at position " +
                             std::to_string(position_) + ", where its metadata names " +
                             std::string{to_string(expected.dtype)} + to_string(expected.shape),
                         {.phase = phase::update, .tensor = expected.name}};
    }

    void drain() {
        while (advance()) {
            current_ = **at_;
        }
    }

    std::remove_reference_t<Source>* source_;
    const weightwire::manifest* manifest_;
    std::span<const unsigned char> held_;
    range_type range_;
    std::optional<std::ranges::iterator_t<range_type>> at_;
    named_tensor current_{};
    std::size_t position_ = 0;
};

}  // namespace weightwire
