#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/fabrics/byte_runs.hpp>

/// @file
/// Strided tensors as runs of bytes, under the names of this backend.

namespace weightwire::nccl::detail {

using weightwire::detail::each_byte_run;
using weightwire::detail::most_copied_runs;
using weightwire::detail::most_table_runs;
using weightwire::detail::require_runs;

}  // namespace weightwire::nccl::detail
