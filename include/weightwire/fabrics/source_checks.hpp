#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// What every sender asks of the tensors that it is given.

namespace weightwire::detail {

/// The next tensor of a source. `context` is called only where there is none.
/// @throws data_error the source has ended. @throws what the source throws.
template <class Context>
[[nodiscard]] const named_tensor& next_tensor(tensor_stream& stream, Context context) {
    const auto* const entry = stream.next();
    if (entry == nullptr) {
        throw data_error{"the source ended before this tensor", context()};
    }
    return *entry;
}

/// A stable source's tensor is where it was at init. `context` is called only where it is not.
/// @throws data_error
template <class Context>
void require_unmoved(const tensor_view& tensor, const tensor_view& promised, Context context) {
    if (tensor.data() != promised.data() || tensor.strides() != promised.strides() ||
        tensor.device() != promised.device()) {
        throw data_error{
            "a source that promised stable addresses yields another address or layout than at init",
            context()};
    }
}

}  // namespace weightwire::detail
