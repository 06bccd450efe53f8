#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <weightwire/core/convert.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// Pairs of tensors of random types, shapes, strides and alignments.

namespace tests {

inline constexpr std::byte untouched{0xCD};

/// Two tensors of one shape, each in memory of its own that has other bytes around it and between
/// its elements.
struct tensor_pair {
    std::vector<std::byte> source;
    std::vector<std::byte> destination;  ///< `untouched`
    weightwire::tensor_view from;        ///< into `source`; no NaN
    weightwire::mutable_tensor_view to;  ///< into `destination`

    /// What `destination` must hold once `from` is written to `to`.
    [[nodiscard]] std::vector<std::byte> expected() const {
        std::vector<std::byte> bytes(destination.size(), untouched);
        auto* const at = bytes.data() + (to.data() - destination.data());
        weightwire::convert_tensor({at, to.type(), to.extents(), to.strides()}, from);
        return bytes;
    }
};

class random_tensors {
public:
    using dtype = weightwire::dtype;
    using strides_type = weightwire::tensor_view::strides_type;

    explicit random_tensors(std::uint64_t seed) : random_{seed} {}

    /// A pair of any kind, of about `most` elements at most.
    [[nodiscard]] tensor_pair next(std::uint64_t most) {
        constexpr std::array floats{dtype::f64, dtype::f32, dtype::f16, dtype::bf16};
        constexpr std::array copied{dtype::u8,        dtype::bf16,      dtype::f32,
                                    dtype::i64,       dtype::f64,       dtype::f8_e4m3fn,
                                    dtype::complex64, dtype::complex128};
        dtype from = floats[below(floats.size())];
        dtype to = floats[below(floats.size())];
        if (below(3) == 0) {
            from = to = copied[below(copied.size())];
        }
        return make(any_shape(most), from, to, below(4) != 0);
    }

    [[nodiscard]] std::size_t below(std::size_t limit) { return random_() % limit; }

private:
    struct layout {
        strides_type strides{};
        std::size_t elements = 0;  ///< from the first to the last one
    };

    /// A vector, a matrix, a stack of matrices or anything.
    weightwire::shape any_shape(std::uint64_t most) {
        std::vector<std::int64_t> extents;
        const std::size_t kind = below(5);
        const std::size_t rank = kind < 3 ? kind + 1 : below(weightwire::max_dimensions + 1);
        std::uint64_t left = 1 + below(most);
        for (std::size_t d = 0; d < rank; ++d) {
            const auto limit = d + 1 == rank ? left : std::min<std::uint64_t>(left, 300);
            const auto extent = 1 + below(limit);
            extents.push_back(static_cast<std::int64_t>(extent));
            left = std::max<std::uint64_t>(left / extent, 1);
        }
        return weightwire::shape{std::span<const std::int64_t>{extents}};
    }

    /// Dimensions in memory order or in any, with gaps or without.
    layout any_layout(const weightwire::shape& extents) {
        std::vector<std::size_t> order(extents.size());
        for (std::size_t d = 0; d < order.size(); ++d) {
            order[d] = d;
        }
        if (below(2) == 0) {
            std::ranges::shuffle(order, random_);
        }
        const bool gaps = below(2) == 0;
        layout made;
        std::int64_t step = gaps && below(4) == 0 ? 2 : 1;
        std::int64_t reach = 0;
        for (std::size_t k = order.size(); k-- > 0;) {
            const auto d = order[k];
            made.strides[d] = step;
            reach += step * (extents[d] - 1);
            step = step * extents[d] + (gaps ? static_cast<std::int64_t>(below(9)) : 0);
        }
        made.elements = static_cast<std::size_t>(reach + 1);
        return made;
    }

    tensor_pair make(const weightwire::shape& extents, dtype from, dtype to, bool aligned) {
        const std::size_t from_item = weightwire::item_bits(from) / 8;
        const std::size_t to_item = weightwire::item_bits(to) / 8;
        auto read = any_layout(extents);
        const auto written = any_layout(extents);
        if (extents.size() > 1 && below(8) == 0) {
            read.strides[below(extents.size())] = 0;  // one value read many times
        }
        const auto shift = [&](std::size_t item) {
            return below(2) == 0 ? 0 : aligned ? below(9) * item : below(16);
        };
        const std::size_t from_at = shift(from_item);
        const std::size_t to_at = 64 + shift(to_item);
        tensor_pair made;
        made.source.resize(from_at + read.elements * from_item);
        for (std::byte& byte : made.source) {
            byte = static_cast<std::byte>(below(256));
        }
        if (from != to) {
            replace_nan(std::span{made.source}.subspan(from_at), from);
        }
        made.destination.assign(to_at + written.elements * to_item + 64, untouched);
        made.from = {made.source.data() + from_at, from, extents, read.strides};
        made.to = {made.destination.data() + to_at, to, extents, written.strides};
        return made;
    }

    /// Zeros for NaN, whose payload a conversion may change.
    static void replace_nan(std::span<std::byte> elements, dtype type) {
        const std::size_t item = weightwire::item_bits(type) / 8;
        for (std::size_t at = 0; at < elements.size(); at += item) {
            double value = 0;
            weightwire::convert_elements(std::as_writable_bytes(std::span{&value, 1}), dtype::f64,
                                         elements.subspan(at, item), type);
            if (std::isnan(value)) {
                std::ranges::fill(elements.subspan(at, item), std::byte{0});
            }
        }
    }

    std::mt19937_64 random_;
};

}  // namespace tests
