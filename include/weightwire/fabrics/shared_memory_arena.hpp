#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <weightwire/core/checked.hpp>
#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/shape.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/fabrics/shared_memory.hpp>

/// @file
/// A place for weights that workers can read without a copy.

namespace weightwire::shm {

/// One sealed segment from which tensors are taken in order and never given back. A stable source
/// whose tensors lie in arenas is "already shared": `ipc` workers read them where they are.
///
/// Nothing registers it: `ipc` finds by address which memory file a tensor lies in.
class arena {
public:
    /// Tensors begin on these boundaries: a cache line, and the widest vector store.
    static constexpr std::uint64_t alignment = 64;

    /// @param bytes all that will be allocated, counting each tensor rounded up to `alignment`.
    /// @throws resource_error there is no memory.
    explicit arena(std::uint64_t bytes) : segment_{segment::create(bytes)} {}

    /// The bytes that an arena for all of `parameters` needs.
    [[nodiscard]] static std::uint64_t bytes_for(const manifest& parameters) {
        std::uint64_t total = alignment;
        for (const auto& parameter : parameters.parameters()) {
            total += parameter.byte_size() + alignment - 1;
            total -= total % alignment;
        }
        return total;
    }

    /// The next tensor, zero at first.
    /// @throws usage_error the size overflows or is no whole number of bytes.
    /// @throws resource_error the arena is full; says what is left.
    [[nodiscard]] mutable_tensor_view allocate(dtype type, const shape& extents) {
        const auto bytes = checked_byte_size(type, extents);
        if (!bytes) {
            throw usage_error{"a tensor's size overflows, or is no whole number of bytes"};
        }
        const auto left = segment_.size() - used_;
        if (*bytes > left) {
            throw resource_error{"an arena of " + std::to_string(segment_.size()) + " bytes has " +
                                 std::to_string(left) + " left, too few for a tensor of " +
                                 std::to_string(*bytes) + "; make it larger"};
        }
        auto* const at = segment_.data() + used_;
        const auto rounded = (*bytes + alignment - 1) / alignment * alignment;
        used_ += static_cast<std::size_t>(rounded < left ? rounded : left);
        return {at, type, extents};
    }

    [[nodiscard]] std::size_t size() const noexcept { return segment_.size(); }
    [[nodiscard]] std::size_t used() const noexcept { return used_; }
    [[nodiscard]] const shm::segment& segment() const noexcept { return segment_; }

private:
    shm::segment segment_;
    std::size_t used_ = 0;
};

}  // namespace weightwire::shm
