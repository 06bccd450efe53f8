#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <ranges>
#include <span>
#include <utility>

#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// A source that knows how far a round has advanced it, whatever became of the tensors.

namespace weightwire::detail {

/// `Source`, counted. A tensor counts as asked for before the source is advanced to it, so also one
/// that the source then fails to yield: the other ranks may have been in a collective for it.
template <WeightSource Source>
class counted_source {
    using inner_range = decltype(std::declval<Source&>().weights());
    using inner_iterator = std::ranges::iterator_t<inner_range>;
    using inner_sentinel = std::ranges::sentinel_t<inner_range>;

public:
    static constexpr tensor_lifetime lifetime = lifetime_of<Source>();

    /// `inner` outlives this object.
    explicit counted_source(Source& inner) noexcept : inner_{&inner} {}
    counted_source(const counted_source&) = delete;
    counted_source& operator=(const counted_source&) = delete;

    /// Tensors asked for since `weights()`.
    [[nodiscard]] std::size_t asked() const noexcept { return asked_; }

    struct sentinel {
        inner_sentinel end;
    };
    class iterator {
    public:
        using value_type = std::iter_value_t<inner_iterator>;
        using difference_type = std::iter_difference_t<inner_iterator>;
        iterator(inner_iterator at, std::size_t& asked) : at_{std::move(at)}, asked_{&asked} {}
        [[nodiscard]] decltype(auto) operator*() const { return *at_; }
        iterator& operator++() {
            ++*asked_;
            ++at_;
            return *this;
        }
        void operator++(int) { ++*this; }
        friend bool operator==(const iterator& at, const sentinel& end) {
            return at.at_ == end.end;
        }

    private:
        inner_iterator at_;
        std::size_t* asked_;
    };
    class range {
    public:
        range(Source& inner, std::size_t& asked) : inner_{inner.weights()}, asked_{&asked} {}
        [[nodiscard]] iterator begin() {
            *asked_ = 1;
            return {std::ranges::begin(inner_), *asked_};
        }
        [[nodiscard]] sentinel end() { return {std::ranges::end(inner_)}; }

    private:
        inner_range inner_;
        std::size_t* asked_;
    };

    [[nodiscard]] decltype(auto) metadata() { return inner_->metadata(); }
    [[nodiscard]] range weights() {
        asked_ = 0;
        return {*inner_, asked_};
    }
    void read(const named_tensor& tensor, std::uint64_t offset, std::span<std::byte> to)
        requires HasRead<Source>
    {
        inner_->read(tensor, offset, to);
    }

private:
    Source* inner_;
    std::size_t asked_ = 0;
};

}  // namespace weightwire::detail
