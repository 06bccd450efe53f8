#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/shape.hpp>

/// @file
/// Non-owning views of tensors: address, element type, shape, strides and where the memory is.

namespace weightwire {

/// What kind of memory an address is in.
enum class memory_kind : std::uint8_t { host, cuda };

/// Where memory is. The index counts devices of that kind and is 0 for host memory.
struct device {
    memory_kind kind = memory_kind::host;
    std::int32_t index = 0;
    friend constexpr bool operator==(const device&, const device&) noexcept = default;
};

/// A view of a tensor: trivially copyable, owns nothing. `Byte` is `std::byte` or `const
/// std::byte`.
template <class Byte>
class basic_tensor_view {
public:
    using strides_type = std::array<std::int64_t, max_dimensions>;

    constexpr basic_tensor_view() noexcept = default;

    /// A contiguous tensor at `data`.
    /// @throws usage_error the size overflows or is no whole number of bytes.
    constexpr basic_tensor_view(Byte* data, dtype type, const weightwire::shape& extents,
                                weightwire::device where = {})
        : basic_tensor_view{data, type, extents, contiguous_strides(extents), where} {}

    /// A tensor of any strides, counted in elements. `data` is the address of its first element.
    /// @throws usage_error the size overflows or is no whole number of bytes.
    constexpr basic_tensor_view(Byte* data, dtype type, const weightwire::shape& extents,
                                const strides_type& strides, weightwire::device where = {})
        : data_{data}, extents_{extents}, strides_{strides}, type_{type}, where_{where} {
        const auto bytes = checked_byte_size(type, extents);
        if (!bytes) {
            throw usage_error{"a tensor's size overflows, or is no whole number of bytes"};
        }
        byte_size_ = static_cast<std::size_t>(*bytes);
    }

    /// A view that may write converts to one that only reads.
    template <class Other>
        requires(std::is_const_v<Byte> && std::is_same_v<const Other, Byte> &&
                 !std::is_const_v<Other>)
    constexpr basic_tensor_view(
        const basic_tensor_view<Other>& other)  // NOLINT(google-explicit-constructor)
        : basic_tensor_view{other.data(), other.type(), other.extents(), other.strides(),
                            other.device()} {}

    [[nodiscard]] constexpr Byte* data() const noexcept { return data_; }
    [[nodiscard]] constexpr weightwire::dtype type() const noexcept { return type_; }
    [[nodiscard]] constexpr const weightwire::shape& extents() const noexcept { return extents_; }
    /// In elements; entries past the last dimension are 0.
    [[nodiscard]] constexpr const strides_type& strides() const noexcept { return strides_; }
    [[nodiscard]] constexpr weightwire::device device() const noexcept { return where_; }
    /// Bytes of the elements, whatever the strides.
    [[nodiscard]] constexpr std::size_t byte_size() const noexcept { return byte_size_; }

    /// Whether the elements lie in C order without gaps. Dimensions of extent 1 may have any
    /// stride.
    [[nodiscard]] constexpr bool is_contiguous() const noexcept {
        if (byte_size_ == 0) {
            return true;
        }
        std::uint64_t step = 1;
        for (std::size_t i = extents_.size(); i-- > 0;) {
            if (extents_[i] != 1 && static_cast<std::uint64_t>(strides_[i]) != step) {
                return false;
            }
            step *= static_cast<std::uint64_t>(extents_[i]);
        }
        return true;
    }

    /// The bytes of a contiguous tensor in host memory.
    /// @throws usage_error not contiguous, or not in host memory.
    [[nodiscard]] constexpr std::span<Byte> bytes() const {
        if (where_.kind != memory_kind::host || !is_contiguous()) {
            throw usage_error{"bytes() needs a contiguous tensor in host memory"};
        }
        return {data_, byte_size_};
    }

private:
    Byte* data_ = nullptr;
    weightwire::shape extents_{};
    strides_type strides_{};
    std::size_t byte_size_ = 0;
    dtype type_ = dtype::u8;
    weightwire::device where_{};
};

/// A tensor to read.
using tensor_view = basic_tensor_view<const std::byte>;
/// A tensor to write.
using mutable_tensor_view = basic_tensor_view<std::byte>;

static_assert(std::is_trivially_copyable_v<tensor_view>);

/// A tensor with its checkpoint name, as a source yields it.
struct named_tensor {
    std::string_view name;  ///< checkpoint name; lives as long as the source's metadata
    tensor_view tensor;     ///< the weights
    void* ready_stream =
        {};  ///< stream after whose work the memory is valid (a `cudaStream_t`), null: valid now
};

}  // namespace weightwire
