#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/plan/recorded_layout.hpp>

/// @file
/// A tensor without storage: a worker's loader runs over it once, and what it would copy is
/// recorded.

namespace weightwire::plan {

class recorder;

/// Extents or dimensions as an argument: `t.view({2, -1})`, or of a vector, a span or a shape.
/// Views what it is made from; use it as a parameter alone.
class number_list {
public:
    constexpr number_list(std::initializer_list<std::int64_t> numbers) noexcept
        : numbers_{numbers.begin(), numbers.size()} {}
    // NOLINTBEGIN(google-explicit-constructor)
    constexpr number_list(std::span<const std::int64_t> numbers) noexcept : numbers_{numbers} {}
    constexpr number_list(const std::vector<std::int64_t>& numbers) noexcept : numbers_{numbers} {}
    constexpr number_list(const shape& extents) noexcept
        : numbers_{extents.begin(), extents.size()} {}
    // NOLINTEND(google-explicit-constructor)

    [[nodiscard]] constexpr std::size_t size() const noexcept { return numbers_.size(); }
    [[nodiscard]] constexpr std::int64_t operator[](std::size_t i) const noexcept {
        return numbers_[i];
    }
    [[nodiscard]] constexpr auto begin() const noexcept { return numbers_.begin(); }
    [[nodiscard]] constexpr auto end() const noexcept { return numbers_.end(); }

private:
    std::span<const std::int64_t> numbers_;
};

/// A view of a parameter of the checkpoint (a source) or of the worker (a destination), of which
/// names, shapes and dtypes exist and values do not. The operations are torch's, with negative
/// dimensions and indices: they return views and change nothing.
///
/// Where torch would copy (`contiguous`, `reshape`, `flatten`), a source stands for the copy, and
/// later operations are those of the copy. Some of its views torch can make and this class cannot,
/// such as `[3, 4]` transposed, flattened and narrowed to 5 elements: copy from the views before
/// it.
///
/// Every error names the operation, the parameter and the operations before it: `usage_error` where
/// torch would raise too, `unsupported_error` for what needs values, converts, or cannot be
/// expressed. A tensor refers to its `recorder`. Not thread-safe.
class recording_tensor {
public:
    /// @name What it is
    /// @{
    /// Name of the parameter that it views.
    [[nodiscard]] const std::string& name() const noexcept { return parameter_->name; }
    [[nodiscard]] weightwire::dtype dtype() const noexcept { return parameter_->dtype; }
    [[nodiscard]] weightwire::shape shape() const { return weightwire::shape{layout_.extents()}; }
    /// Number of dimensions.
    [[nodiscard]] std::int64_t dim() const noexcept {
        return static_cast<std::int64_t>(layout_.rank());
    }
    /// Extent of one dimension.
    [[nodiscard]] std::int64_t size(std::int64_t dimension) const {
        return layout_.extent(wrapped(dimension, [&] { return call("size", dimension); }));
    }
    [[nodiscard]] std::int64_t numel() const noexcept { return layout_.numel(); }
    [[nodiscard]] bool is_contiguous() const noexcept { return layout_.is_contiguous(); }
    /// Whether it is the worker's, so that it may be copied to and not from.
    [[nodiscard]] bool is_destination() const noexcept { return is_destination_; }
    /// The operations that made it, such as `transpose(0, 1).narrow(0, 4, 2)`.
    [[nodiscard]] const std::string& chain() const noexcept { return chain_; }
    /// @}

    /// @name Parts of a dimension
    /// @{
    /// `length` elements from `start` on.
    [[nodiscard]] recording_tensor narrow(std::int64_t dimension, std::int64_t start,
                                          std::int64_t length) const;
    /// One element; the dimension is gone.
    [[nodiscard]] recording_tensor select(std::int64_t dimension, std::int64_t index) const;
    /// `t[start:stop:step]` in dimension `dimension`, cut to what is there.
    [[nodiscard]] recording_tensor slice(std::int64_t dimension,
                                         std::optional<std::int64_t> start = {},
                                         std::optional<std::int64_t> stop = {},
                                         std::int64_t step = 1) const;
    /// `select(0, index)`.
    template <std::integral Integer>
        requires(!std::same_as<Integer, bool>)
    [[nodiscard]] recording_tensor operator[](Integer index) const {
        return select(0, static_cast<std::int64_t>(index));
    }
    /// At most `count` pieces of equal size, of which the last may be smaller.
    [[nodiscard]] std::vector<recording_tensor> chunk(std::int64_t count,
                                                      std::int64_t dimension = 0) const;
    /// Pieces of `length`, of which the last may be smaller.
    [[nodiscard]] std::vector<recording_tensor> split(std::int64_t length,
                                                      std::int64_t dimension = 0) const;
    /// Pieces of these lengths, which add up to the extent.
    [[nodiscard]] std::vector<recording_tensor> split(number_list lengths,
                                                      std::int64_t dimension = 0) const;
    /// Every element of a dimension; the dimension is gone.
    [[nodiscard]] std::vector<recording_tensor> unbind(std::int64_t dimension = 0) const;
    /// @}

    /// @name Order of dimensions
    /// @{
    [[nodiscard]] recording_tensor transpose(std::int64_t one, std::int64_t other) const;
    [[nodiscard]] recording_tensor permute(number_list order) const;
    /// A matrix transposed; the same where there are fewer than two dimensions.
    [[nodiscard]] recording_tensor t() const;
    /// @}

    /// @name Other extents
    /// @{
    /// One extent may be -1. Where torch's strides do not allow it, it is an error as in torch.
    [[nodiscard]] recording_tensor view(number_list extents) const;
    /// `view`, or the copy that torch would make.
    [[nodiscard]] recording_tensor reshape(number_list extents) const;
    /// Makes dimensions `first … last` one.
    [[nodiscard]] recording_tensor flatten(std::int64_t first = 0, std::int64_t last = -1) const;
    [[nodiscard]] recording_tensor unsqueeze(std::int64_t dimension) const;
    /// Without all dimensions of extent 1.
    [[nodiscard]] recording_tensor squeeze() const;
    /// Without this dimension where its extent is 1.
    [[nodiscard]] recording_tensor squeeze(std::int64_t dimension) const;
    /// Repeats dimensions of extent 1; -1 keeps an extent. Only a source can be used then.
    [[nodiscard]] recording_tensor expand(number_list extents) const;
    /// The same, or where it is not contiguous the copy that torch would make.
    [[nodiscard]] recording_tensor contiguous() const;
    /// @}

    /// @name What is recorded
    /// @{
    /// Records that the worker copies this to `destination` each time. Both have equal shapes:
    /// nothing is broadcast.
    /// @throws usage_error other shapes, not from a source to a destination, or the destination is
    /// a copy or repeats elements, so that torch would not write the parameter either.
    /// @throws unsupported_error other dtypes: a copy converts nothing.
    void copy_to(const recording_tensor& destination) const;
    /// Records that no copy writes these elements of a destination, such as rows of padding.
    void leave_untouched() const;
    /// @}

    /// @name What needs values
    /// These throw `unsupported_error`, so that a loader that is also run on real tensors compiles
    /// and fails at init, only where it gets that far.
    /// @{
    template <class Value = double>
    [[noreturn]] Value item() const {
        needs_values("item()");
    }
    [[noreturn]] void* data_ptr() const { needs_values("data_ptr()"); }
    /// The same where it is the dtype it has.
    [[nodiscard]] recording_tensor to(weightwire::dtype type) const;
    /// The same where it is the dtype it has.
    [[nodiscard]] recording_tensor view(weightwire::dtype type) const;
    [[noreturn]] recording_tensor operator[](const recording_tensor&) const {
        needs_values("operator[](tensor)");
    }
    recording_tensor operator[](bool) const = delete;  // an index is a number
    [[noreturn]] recording_tensor operator-() const { needs_values("operator-"); }
    [[noreturn]] recording_tensor operator+(const auto&) const { needs_values("operator+"); }
    [[noreturn]] recording_tensor operator-(const auto&) const { needs_values("operator-"); }
    [[noreturn]] recording_tensor operator*(const auto&) const { needs_values("operator*"); }
    [[noreturn]] recording_tensor operator/(const auto&) const { needs_values("operator/"); }
    [[noreturn]] recording_tensor operator==(const auto&) const { needs_values("operator=="); }
    [[noreturn]] recording_tensor operator!=(const auto&) const { needs_values("operator!="); }
    [[noreturn]] recording_tensor operator<(const auto&) const { needs_values("operator<"); }
    [[noreturn]] recording_tensor operator>(const auto&) const { needs_values("operator>"); }
    [[noreturn]] recording_tensor operator<=(const auto&) const { needs_values("operator<="); }
    [[noreturn]] recording_tensor operator>=(const auto&) const { needs_values("operator>="); }
    /// @}

private:
    friend class recorder;
    recording_tensor(recorder& owner, const param_meta& parameter, std::size_t position,
                     bool is_destination)
        : recorder_{&owner},
          parameter_{&parameter},
          position_{position},
          layout_{parameter.shape},
          is_destination_{is_destination} {}

    template <class... Numbers>
    [[nodiscard]] static std::string call(std::string_view operation, const Numbers&... numbers);
    [[nodiscard]] error_context context(std::string operation) const {
        return {.phase = phase::plan, .tensor = name(), .operation = std::move(operation)};
    }
    [[nodiscard]] std::string described() const;
    template <class Error = usage_error>
    [[noreturn]] void refuse(std::string operation, std::string_view why) const;
    [[noreturn]] void needs_values(std::string_view operation) const;
    void require_writable(std::string operation) const;

    template <class Operation>
    [[nodiscard]] std::size_t wrapped(std::int64_t dimension, Operation operation,
                                      bool scalar_has_one = false) const;
    [[nodiscard]] recording_tensor made(detail::recorded_layout layout,
                                        std::string_view operation) const;
    [[nodiscard]] recording_tensor kept(std::size_t dimension, std::int64_t start,
                                        std::int64_t step, std::int64_t count,
                                        std::string operation, bool removed = false) const;
    [[nodiscard]] std::vector<recording_tensor> pieces(std::int64_t dimension,
                                                       std::span<const std::int64_t> lengths,
                                                       const std::string& operation) const;
    [[nodiscard]] std::array<std::int64_t, max_dimensions> inferred(
        number_list extents, const std::string& operation) const;
    [[nodiscard]] recording_tensor viewed(std::span<const std::int64_t> extents, bool may_copy,
                                          const std::string& operation) const;

    recorder* recorder_;
    const param_meta* parameter_;
    std::size_t position_;  // in the manifest
    detail::recorded_layout layout_;
    std::string chain_;
    bool is_destination_;
};

}  // namespace weightwire::plan

#include <weightwire/plan/recorder.hpp>
#include <weightwire/plan/recording_tensor_impl.hpp>
