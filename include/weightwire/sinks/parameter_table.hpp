#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <weightwire/sinks/basic_parameter_table.hpp>
#include <weightwire/sinks/host_memory.hpp>

/// @file
/// A worker's named parameters in host memory. On a device: `device_parameter_table`,
/// sinks/device_memory.hpp.

namespace weightwire {

/// A table of parameters in host memory, its own or the user's. Everything that it does is said at
/// `basic_parameter_table`.
using parameter_table = basic_parameter_table<host_memory>;

}  // namespace weightwire
