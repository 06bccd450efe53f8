#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/plan/recorded_layout.hpp>
#include <weightwire/plan/recording_tensor.hpp>

/// @file
/// The bodies of `recording_tensor`.

namespace weightwire::plan {

namespace detail {

inline void append_argument(std::string& out, std::int64_t number) {
    out += std::to_string(number);
}
inline void append_argument(std::string& out, const std::optional<std::int64_t>& number) {
    out += number ? std::to_string(*number) : "none";
}
inline void append_argument(std::string& out, const number_list& numbers) {
    out += '{';
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        out.append(i == 0 ? "" : ", ").append(std::to_string(numbers[i]));
    }
    out += '}';
}
inline void append_argument(std::string& out, weightwire::dtype type) { out += to_string(type); }

}  // namespace detail

template <class... Numbers>
std::string recording_tensor::call(std::string_view operation, const Numbers&... numbers) {
    std::string out{operation};
    out += '(';
    [[maybe_unused]] const auto one = [&](const auto& number) {
        out += out.back() == '(' ? "" : ", ";
        detail::append_argument(out, number);
    };
    (one(numbers), ...);
    return out += ')';
}

inline std::string recording_tensor::described() const {
    return std::string{is_destination_ ? "destination " : "tensor "} + to_string(shape()) +
           (chain_.empty() ? "" : " made by " + chain_);
}

template <class Error>
void recording_tensor::refuse(std::string operation, std::string_view why) const {
    throw Error{std::string{why} + "; of the " + described(), context(std::move(operation))};
}

inline void recording_tensor::needs_values(std::string_view operation) const {
    refuse<unsupported_error>(
        std::string{operation},
        "this needs values, and a loader is recorded without them; let it take views and copy "
        "them, and compute in the trainer before the round or in the worker after it");
}

template <class Operation>
std::size_t recording_tensor::wrapped(std::int64_t dimension, Operation operation,
                                      bool scalar_has_one) const {
    const auto count = scalar_has_one ? std::max<std::int64_t>(dim(), 1) : dim();
    if (dimension < -count || dimension >= count) {
        refuse(operation(), "there is no dimension " + std::to_string(dimension));
    }
    return static_cast<std::size_t>(dimension < 0 ? dimension + count : dimension);
}

inline recording_tensor recording_tensor::made(detail::recorded_layout layout,
                                               std::string_view operation) const {
    recording_tensor result{*this};
    result.layout_ = layout;
    result.chain_.append(chain_.empty() ? "" : ".").append(operation);
    return result;
}

inline recording_tensor recording_tensor::kept(std::size_t dimension, std::int64_t start,
                                               std::int64_t step, std::int64_t count,
                                               std::string operation, bool removed) const {
    auto layout = layout_;
    if (!layout.keep(dimension, start, step, count)) {
        refuse<unsupported_error>(
            std::move(operation),
            "these elements have no regular strides in the parameter, since the tensor is a copy "
            "seen in another shape; take parts before that and copy them one by one");
    }
    if (removed) {
        layout.remove(dimension);
    }
    return made(layout, operation);
}

inline recording_tensor recording_tensor::narrow(std::int64_t dimension, std::int64_t start,
                                                 std::int64_t length) const {
    auto operation = call("narrow", dimension, start, length);
    const auto d = wrapped(dimension, [&] { return operation; });
    const auto extent = layout_.extent(d);
    if (length < 0 || length > extent || start < -extent || start > extent ||
        (start < 0 ? start + extent : start) > extent - length) {
        refuse(std::move(operation), "the range is not inside the dimension");
    }
    return kept(d, start < 0 ? start + extent : start, 1, length, std::move(operation));
}

inline recording_tensor recording_tensor::select(std::int64_t dimension, std::int64_t index) const {
    auto operation = call("select", dimension, index);
    const auto d = wrapped(dimension, [&] { return operation; });
    const auto extent = layout_.extent(d);
    if (index < -extent || index >= extent) {
        refuse(std::move(operation), "the index is not inside the dimension");
    }
    return kept(d, index < 0 ? index + extent : index, 1, 1, std::move(operation), true);
}

inline recording_tensor recording_tensor::slice(std::int64_t dimension,
                                                std::optional<std::int64_t> start,
                                                std::optional<std::int64_t> stop,
                                                std::int64_t step) const {
    auto operation = call("slice", dimension, start, stop, step);
    const auto d = wrapped(dimension, [&] { return operation; });
    if (step <= 0) {
        refuse(std::move(operation), "the step must be larger than 0");
    }
    const auto extent = layout_.extent(d);
    const auto inside = [extent](std::int64_t index) {
        return std::clamp(index < 0 ? index + extent : index, std::int64_t{0}, extent);
    };
    const auto begin = inside(start.value_or(0));
    const auto length = std::max(inside(stop.value_or(extent)) - begin, std::int64_t{0});
    const auto count = length / step + (length % step == 0 ? 0 : 1);
    return kept(d, begin, step, count, std::move(operation));
}

inline std::vector<recording_tensor> recording_tensor::pieces(std::int64_t dimension,
                                                              std::span<const std::int64_t> lengths,
                                                              const std::string& operation) const {
    const auto d = wrapped(dimension, [&] { return operation; });
    std::vector<recording_tensor> made_pieces;
    made_pieces.reserve(lengths.size());
    std::int64_t start = 0;
    for (const auto length : lengths) {
        made_pieces.push_back(
            kept(d, start, 1, length, operation + "[" + std::to_string(made_pieces.size()) + "]"));
        start += length;
    }
    return made_pieces;
}

inline std::vector<recording_tensor> recording_tensor::chunk(std::int64_t count,
                                                             std::int64_t dimension) const {
    const auto operation = call("chunk", count, dimension);
    const auto extent = layout_.extent(wrapped(dimension, [&] { return operation; }));
    if (count <= 0) {
        refuse(operation, "the number of pieces must be larger than 0");
    }
    if (extent == 0) {
        return pieces(dimension, std::vector<std::int64_t>(static_cast<std::size_t>(count), 0),
                      operation);
    }
    const auto length = extent / count + (extent % count == 0 ? 0 : 1);
    std::vector<std::int64_t> lengths;
    for (std::int64_t at = 0; at < extent; at += lengths.back()) {
        lengths.push_back(std::min(length, extent - at));
    }
    return pieces(dimension, lengths, operation);
}

inline std::vector<recording_tensor> recording_tensor::split(std::int64_t length,
                                                             std::int64_t dimension) const {
    const auto operation = call("split", length, dimension);
    const auto extent = layout_.extent(wrapped(dimension, [&] { return operation; }));
    if (length < 0 || (length == 0 && extent != 0)) {
        refuse(operation, "pieces of this length do not cover the dimension");
    }
    std::vector<std::int64_t> lengths;
    for (auto left = extent; left > 0 || lengths.empty(); left -= lengths.back()) {
        lengths.push_back(std::min(length, left));
    }
    return pieces(dimension, lengths, operation);
}

inline std::vector<recording_tensor> recording_tensor::split(number_list lengths,
                                                             std::int64_t dimension) const {
    const auto operation = call("split", lengths, dimension);
    auto left = layout_.extent(wrapped(dimension, [&] { return operation; }));
    bool inside = true;
    for (const auto length : lengths) {
        inside = inside && length >= 0 && length <= left;
        left -= inside ? length : 0;
    }
    if (!inside || left != 0) {
        refuse(operation, "the lengths do not add up to the dimension");
    }
    return pieces(dimension, {lengths.begin(), lengths.end()}, operation);
}

inline std::vector<recording_tensor> recording_tensor::unbind(std::int64_t dimension) const {
    const auto operation = call("unbind", dimension);
    const auto d = wrapped(dimension, [&] { return operation; });
    std::vector<recording_tensor> made_pieces;
    made_pieces.reserve(static_cast<std::size_t>(layout_.extent(d)));
    for (std::int64_t i = 0; i < layout_.extent(d); ++i) {
        made_pieces.push_back(kept(d, i, 1, 1, operation + "[" + std::to_string(i) + "]", true));
    }
    return made_pieces;
}

inline recording_tensor recording_tensor::transpose(std::int64_t one, std::int64_t other) const {
    const auto operation = call("transpose", one, other);
    const auto a = wrapped(
        one, [&] { return operation; }, true);
    const auto b = wrapped(
        other, [&] { return operation; }, true);
    std::array<std::size_t, max_dimensions> order{};
    for (std::size_t d = 0; d < layout_.rank(); ++d) {
        order[d] = d == a ? b : d == b ? a : d;
    }
    auto layout = layout_;
    layout.reorder({order.data(), layout_.rank()});
    return made(layout, operation);
}

inline recording_tensor recording_tensor::permute(number_list order) const {
    auto operation = call("permute", order);
    std::array<std::size_t, max_dimensions> from{};
    std::array<bool, max_dimensions> seen{};
    if (order.size() != layout_.rank()) {
        refuse(std::move(operation), "every dimension must be named once");
    }
    for (std::size_t d = 0; d < order.size(); ++d) {
        from[d] = wrapped(order[d], [&] { return operation; });
        if (std::exchange(seen[from[d]], true)) {
            refuse(std::move(operation), "every dimension must be named once");
        }
    }
    auto layout = layout_;
    layout.reorder({from.data(), order.size()});
    return made(layout, operation);
}

inline recording_tensor recording_tensor::t() const {
    if (dim() > 2) {
        refuse("t()", "only a tensor of at most two dimensions has this; use transpose or permute");
    }
    auto layout = layout_;
    if (dim() == 2) {
        layout.reorder(std::array<std::size_t, 2>{1, 0});
    }
    return made(layout, "t()");
}

/// The extents with -1 replaced.
inline std::array<std::int64_t, max_dimensions> recording_tensor::inferred(
    number_list extents, const std::string& operation) const {
    if (extents.size() > max_dimensions) {
        refuse<unsupported_error>(operation, "a tensor has at most 8 dimensions");
    }
    std::array<std::int64_t, max_dimensions> out{};
    std::copy(extents.begin(), extents.end(), out.begin());
    std::optional<std::size_t> unknown;
    for (std::size_t d = 0; d < extents.size(); ++d) {
        if (out[d] < -1 || (out[d] == -1 && unknown)) {
            refuse(operation, "extents are not negative, and one of them may be -1");
        }
        if (out[d] == -1) {
            unknown = d;
            out[d] = 1;
        }
    }
    const std::span known{out.data(), extents.size()};
    std::int64_t product = 1;
    const bool fit = detail::extents_fit(known);
    for (const auto extent : known) {
        product *= fit ? extent : 0;
    }
    const auto count = numel();
    if (!fit || (unknown ? product == 0 || count % product != 0 : product != count)) {
        refuse(operation, "these extents do not make " + std::to_string(count) + " elements");
    }
    if (unknown) {
        out[*unknown] = count / product;
    }
    return out;
}

inline recording_tensor recording_tensor::viewed(std::span<const std::int64_t> extents,
                                                 bool may_copy,
                                                 const std::string& operation) const {
    auto layout = layout_;
    auto result = layout.view(extents);
    if (result == detail::layout_result::not_a_view && may_copy) {
        layout.copy();
        result = layout.view(extents);
    }
    if (result == detail::layout_result::not_a_view) {
        refuse(operation, "its strides allow no such view; use reshape, which copies where needed");
    }
    if (result == detail::layout_result::inexpressible) {
        refuse<unsupported_error>(
            operation,
            "a copy of these elements has no regular strides in the parameter once it is seen in "
            "this shape; take parts before that and copy them one by one");
    }
    return made(layout, operation);
}

inline recording_tensor recording_tensor::view(number_list extents) const {
    const auto operation = call("view", extents);
    const auto known = inferred(extents, operation);
    return viewed({known.data(), extents.size()}, false, operation);
}

inline recording_tensor recording_tensor::reshape(number_list extents) const {
    const auto operation = call("reshape", extents);
    const auto known = inferred(extents, operation);
    return viewed({known.data(), extents.size()}, true, operation);
}

inline recording_tensor recording_tensor::flatten(std::int64_t first, std::int64_t last) const {
    const auto operation = call("flatten", first, last);
    const auto begin = wrapped(
        first, [&] { return operation; }, true);
    const auto end = wrapped(
        last, [&] { return operation; }, true);
    if (begin > end) {
        refuse(operation, "the first dimension comes after the last");
    }
    std::vector<std::int64_t> extents{layout_.extents().begin(), layout_.extents().end()};
    if (extents.empty()) {
        extents.push_back(1);
    }
    for (auto d = begin; d < end; ++d) {
        extents[begin] *= extents[begin + 1];
        extents.erase(extents.begin() + static_cast<std::ptrdiff_t>(begin) + 1);
    }
    return viewed(extents, true, operation);
}

inline recording_tensor recording_tensor::unsqueeze(std::int64_t dimension) const {
    auto operation = call("unsqueeze", dimension);
    if (dimension < -dim() - 1 || dimension > dim()) {
        refuse(std::move(operation),
               "there is no place for a dimension " + std::to_string(dimension));
    }
    if (layout_.rank() == max_dimensions) {
        refuse<unsupported_error>(std::move(operation), "a tensor has at most 8 dimensions");
    }
    auto layout = layout_;
    layout.insert(static_cast<std::size_t>(dimension < 0 ? dimension + dim() + 1 : dimension));
    return made(layout, operation);
}

inline recording_tensor recording_tensor::squeeze() const {
    auto layout = layout_;
    for (auto d = layout.rank(); d-- > 0;) {
        if (layout.extent(d) == 1) {
            layout.remove(d);
        }
    }
    return made(layout, "squeeze()");
}

inline recording_tensor recording_tensor::squeeze(std::int64_t dimension) const {
    const auto operation = call("squeeze", dimension);
    const auto d = wrapped(
        dimension, [&] { return operation; }, true);
    auto layout = layout_;
    if (d < layout.rank() && layout.extent(d) == 1) {
        layout.remove(d);
    }
    return made(layout, operation);
}

inline recording_tensor recording_tensor::expand(number_list extents) const {
    auto operation = call("expand", extents);
    if (extents.size() < layout_.rank()) {
        refuse(std::move(operation), "there are fewer extents than dimensions");
    }
    if (extents.size() > max_dimensions) {
        refuse<unsupported_error>(std::move(operation), "a tensor has at most 8 dimensions");
    }
    auto layout = layout_;
    const auto added = extents.size() - layout_.rank();
    for (std::size_t d = 0; d < added; ++d) {
        layout.insert(0);
    }
    for (std::size_t d = 0; d < extents.size(); ++d) {
        const auto wanted = extents[d] == -1 && d >= added ? layout.extent(d) : extents[d];
        if (wanted < 0 || (layout.extent(d) != 1 && layout.extent(d) != wanted)) {
            refuse(std::move(operation),
                   "only dimensions of extent 1 can be expanded, and only "
                   "those that exist can be kept by -1");
        }
        if (layout.extent(d) != wanted && !layout.stretch(d, wanted)) {
            refuse<unsupported_error>(std::move(operation), "the view has more than 16 strides");
        }
    }
    if (!detail::extents_fit(layout.extents())) {
        refuse(std::move(operation), "the number of elements does not fit 63 bits");
    }
    return made(layout, operation);
}

inline recording_tensor recording_tensor::contiguous() const {
    auto layout = layout_;
    if (!layout.is_contiguous()) {
        layout.copy();
    }
    return made(layout, "contiguous()");
}

inline recording_tensor recording_tensor::to(weightwire::dtype type) const {
    if (type != dtype()) {
        refuse<unsupported_error>(call("to", type),
                                  "this converts from " + std::string{to_string(dtype())} +
                                      ", and a copy moves bytes; keep the worker's parameter in "
                                      "the dtype of the checkpoint, or let the trainer convert");
    }
    return made(layout_, call("to", type));
}

inline recording_tensor recording_tensor::view(weightwire::dtype type) const {
    if (type != dtype()) {
        refuse<unsupported_error>(call("view", type),
                                  "this reads " + std::string{to_string(dtype())} +
                                      " as another dtype; declare the parameter with one dtype on "
                                      "both sides");
    }
    return made(layout_, call("view", type));
}

}  // namespace weightwire::plan
