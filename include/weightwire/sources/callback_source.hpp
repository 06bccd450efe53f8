#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <concepts>
#include <cstddef>
#include <functional>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// Tensors that are made one at a time, as a `WeightSource`.

namespace weightwire {

/// `materialize(i)` gives tensor `i` of the metadata: a `tensor_view`, or a `named_tensor` where a
/// stream must be waited for (its name is not looked at).
template <class F>
concept TensorCallback = std::invocable<F&, std::size_t> &&
                         (std::convertible_to<std::invoke_result_t<F&, std::size_t>, tensor_view> ||
                          std::convertible_to<std::invoke_result_t<F&, std::size_t>, named_tensor>);

/// Calls a function for every tensor: once a round, in metadata order, from the thread that sends.
/// So it may gather a shard from other ranks, or dequantize into one buffer that it reuses. What it
/// throws ends the round.
///
/// Models `WeightSource`; a tensor is valid until the next one is asked for. One round at a time.
template <TensorCallback Materialize>
class callback_source {
public:
    static constexpr tensor_lifetime lifetime = tensor_lifetime::until_next;

    /// @param metadata what will be sent, in order.
    /// @param materialize gives tensor `i`; moved in.
    callback_source(std::vector<param_meta> metadata, Materialize materialize)
        : metadata_{std::move(metadata)}, materialize_{std::move(materialize)} {}

    /// One round: an input range. A tensor is made when the range *reaches* it, not when it is
    /// looked at, so every rank makes the same ones even where one of them only drains.
    class round {
    public:
        class iterator {
        public:
            using iterator_concept = std::input_iterator_tag;
            using value_type = named_tensor;
            using difference_type = std::ptrdiff_t;

            iterator() = default;
            [[nodiscard]] const named_tensor& operator*() const noexcept { return of_->current_; }
            iterator& operator++() {
                of_->reach(of_->position_ + 1);
                return *this;
            }
            void operator++(int) { ++*this; }
            [[nodiscard]] bool operator==(std::default_sentinel_t) const noexcept {
                return of_->position_ == of_->source_->metadata_.size();
            }

        private:
            friend class round;
            explicit iterator(round& of) noexcept : of_{&of} {}
            round* of_ = nullptr;
        };

        /// Makes the first tensor. Call it once.
        [[nodiscard]] iterator begin() {
            reach(0);
            return iterator{*this};
        }
        [[nodiscard]] std::default_sentinel_t end() const noexcept { return {}; }

    private:
        friend class callback_source;
        explicit round(callback_source& source) noexcept : source_{&source} {}

        void reach(std::size_t position) {
            position_ = position;
            if (position == source_->metadata_.size()) {
                return;
            }
            using result = std::invoke_result_t<Materialize&, std::size_t>;
            if constexpr (std::convertible_to<result, named_tensor>) {
                current_ = std::invoke(source_->materialize_, position);
            } else {
                current_ = {{}, std::invoke(source_->materialize_, position), nullptr};
            }
            current_.name = source_->metadata_[position].name;
        }

        callback_source* source_;
        std::size_t position_ = 0;
        named_tensor current_{};
    };

    [[nodiscard]] std::span<const param_meta> metadata() const noexcept { return metadata_; }
    [[nodiscard]] round weights() noexcept { return round{*this}; }

private:
    std::vector<param_meta> metadata_;
    Materialize materialize_;
};

}  // namespace weightwire
