#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/ucx/basic_device_fabric.hpp>
#include <weightwire/fabrics/ucx/cuda_machinery.hpp>

/// @file
/// A pull fabric over UCX for tensors in device memory, between machines. Link weightwire-ucx and
/// weightwire-gpu.
///
/// Debian's and Ubuntu's packages of UCX know no CUDA; then chunks pass through pinned host memory
/// on both sides, as packed chunks of the trainer and as pieces of a MiB of the worker, which the
/// device copies beside the transfers. What is used, `remark()` of owner and reader say. To keep a
/// UCX with CUDA from it: `UCX_TLS=^cuda`.
///
/// What ranks of one machine need alike enters it once, and their kernels read it in each other's
/// device memory.

namespace weightwire::ucx {

/// Tensors in device memory.
using device_fabric = basic_device_fabric<cuda_machinery>;

static_assert(explain_pull_fabric<device_fabric>());
static_assert(HasFabricService<device_fabric::owner> && HasFabricReadiness<device_fabric::owner>);
static_assert(HasFabricPacking<device_fabric::owner> && HasFabricLoss<device_fabric::reader>);
static_assert(HasWithinNode<device_fabric>);

}  // namespace weightwire::ucx
