#pragma once
// SPDX-License-Identifier: Apache-2.0

/// @file
/// NCCL's header. It includes headers of CUDA in which clang finds conversions that a user's
/// warnings need not hear of.

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wconversion"
#pragma clang diagnostic ignored "-Wshadow"
#endif

#include <nccl.h>

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
