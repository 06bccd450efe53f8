#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <range/v3/range/conversion.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/transform.hpp>

#include <weightwire/adapters/adapted_source.hpp>
#include <weightwire/concepts/weight_source.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/plan/groups.hpp>

/// @file
/// A source some of whose parameters are left out or have other names: what `rename` and `only` of
/// range_v3.hpp make.

namespace weightwire {

namespace detail {

/// @throws data_error a name occurs twice; `made_from` gives the inner name.
inline void require_distinct(std::span<const param_meta> metadata,
                             std::span<const param_meta> made_from) {
    std::unordered_map<std::string_view, std::size_t> seen;
    for (const auto [i, each] : ranges::views::enumerate(metadata)) {
        const auto [first, fresh] = seen.emplace(each.name, i);
        if (!fresh) {
            throw data_error{"rename gives this name to both " + made_from[first->second].name +
                                 " and " + made_from[i].name,
                             {.tensor = each.name}};
        }
    }
}

}  // namespace detail

/// What `rename` and `only` make: the parameters of an inner source, some left out, under other
/// names. One round at a time.
template <class Inner>
    requires WeightSource<Inner>
class selected_source {
    using source_type = std::remove_reference_t<Inner>;

public:
    static constexpr tensor_lifetime lifetime = lifetime_of<source_type>();

    /// Place in the inner metadata and new name of a parameter that is kept.
    struct choice {
        std::size_t position = 0;
        std::string name{};
    };

    /// @param inner moved in, or referenced where `Inner` is a reference.
    /// @param choose gives the choices from the inner metadata, in its order.
    /// @throws data_error two parameters get the same name.
    template <class Choose>
        requires std::is_invocable_r_v<std::vector<choice>, Choose&, std::span<const param_meta>>
    selected_source(Inner&& inner, Choose choose)
        : inner_{std::forward<Inner>(inner)}, inner_metadata_{detail::metadata_of(inner_.get())} {
        const std::vector<choice> choices = choose(std::span<const param_meta>{inner_metadata_});
        metadata_ = choices | ranges::views::transform([this](const choice& each) {
                        const auto& from = inner_metadata_[each.position];
                        return param_meta{each.name, from.dtype, from.shape};
                    }) |
                    ranges::to<std::vector>();
        outer_of_.resize(inner_metadata_.size(), manifest::npos);
        for (const auto [outer, each] : ranges::views::enumerate(choices)) {
            outer_of_[each.position] = outer;
        }
        const auto made_from = choices | ranges::views::transform([this](const choice& each) {
                                   return inner_metadata_[each.position];
                               }) |
                               ranges::to<std::vector>();
        detail::require_distinct(metadata_, made_from);
        keep_groups();
    }

    /// One round: an input range.
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
                of_->advance();
                return *this;
            }
            void operator++(int) { ++*this; }
            [[nodiscard]] bool operator==(std::default_sentinel_t) const noexcept {
                return of_->ended_;
            }

        private:
            friend class round;
            explicit iterator(round& of) noexcept : of_{&of} {}
            round* of_ = nullptr;
        };

        explicit round(selected_source& source)
            : source_{&source}, inner_{source.inner_.get(), source.inner_metadata_} {}
        /// Asks for the first tensor. Call it once.
        [[nodiscard]] iterator begin() {
            advance();
            return iterator{*this};
        }
        [[nodiscard]] std::default_sentinel_t end() const noexcept { return {}; }

    private:
        void advance() {
            while (inner_.next()) {
                const auto outer = source_->outer_of_[inner_.position()];
                if (outer != manifest::npos) {
                    current_ = inner_.current();
                    current_.name = source_->metadata_[outer].name;
                    return;
                }
            }
            ended_ = true;
        }

        selected_source* source_;
        detail::checked_round<source_type> inner_;
        named_tensor current_{};
        bool ended_ = false;
    };

    [[nodiscard]] std::span<const param_meta> metadata() const noexcept { return metadata_; }
    [[nodiscard]] round weights() { return round{*this}; }
    [[nodiscard]] std::span<const std::size_t> groups() const noexcept { return groups_; }
    [[nodiscard]] std::vector<std::string_view> held_names()
        requires HasHeldNames<source_type>
    {
        std::unordered_map<std::string_view, std::size_t> outer_of_name;
        for (const auto [inner, outer] : ranges::views::enumerate(outer_of_)) {
            outer_of_name.emplace(inner_metadata_[inner].name, outer);
        }
        std::vector<std::string_view> held;
        for (const std::string_view name : inner_.get().held_names()) {
            const auto found = outer_of_name.find(name);
            if (found != outer_of_name.end() && found->second != manifest::npos) {
                held.push_back(metadata_[found->second].name);
            }
        }
        return held;
    }
    void read(const named_tensor& tensor, std::uint64_t offset, std::span<std::byte> to)
        requires HasRead<source_type>
    {
        inner_.get().read(tensor, offset, to);
    }

private:
    void keep_groups() {
        const manifest inner{inner_metadata_};
        std::size_t position = 0;
        for (const auto size : plan::group_sizes(inner_.get(), inner)) {
            const auto members = std::span{outer_of_}.subspan(position, size);
            const auto kept = members.size() -
                              static_cast<std::size_t>(std::ranges::count(members, manifest::npos));
            if (kept != 0) {
                groups_.push_back(kept);
            }
            position += size;
        }
    }

    detail::source_holder<Inner> inner_;
    std::vector<param_meta> inner_metadata_;
    std::vector<param_meta> metadata_;
    std::vector<std::size_t> outer_of_;  // place in `metadata_` by inner place, npos: left out
    std::vector<std::size_t> groups_;
};

}  // namespace weightwire
