#pragma once
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Both halves. Prefer `trainer.hpp` or `worker.hpp`: most programs are one of the two.

#include <weightwire/customization.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/worker.hpp>
