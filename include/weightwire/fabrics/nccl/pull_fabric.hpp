#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/fabrics/nccl/basic_pull_fabric.hpp>
#include <weightwire/fabrics/nccl/cuda_pairs.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>

/// @file
/// A pull fabric over NCCL: packed chunks of device memory, between machines or GPUs, by point to
/// point sends over whatever NCCL finds. Needs the headers of CUDA and NCCL; libnccl is opened at
/// run time.
///
/// One communicator of two ranks a trainer rank and worker rank that the plan brings together, made
/// when the worker connects. Each costs device memory on both sides, so their number is bounded
/// (`pull_options::most_peers`, `device_bytes`); what is beyond goes over UCX. What ranks of one
/// machine need alike enters it once, and their kernels read it in each other's device memory.

namespace weightwire::nccl {

/// With the options as they are; `pull_options` tells how to have others.
using pull_fabric = basic_pull_fabric<cuda_pairs>;

static_assert(explain_pull_fabric<pull_fabric>());
static_assert(HasFabricPacking<pull_fabric::owner> && HasFabricReadiness<pull_fabric::owner>);
static_assert(HasFabricLoss<pull_fabric::reader> && HasFabricRest<pull_fabric::reader>);
static_assert(HasWithinNode<pull_fabric>);

}  // namespace weightwire::nccl
