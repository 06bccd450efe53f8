#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string>

/// @file
/// NCCL's version codes for people. Needs no header of NCCL.

namespace weightwire::nccl_api {

/// `22809` as people write it: `2.28.9`.
[[nodiscard]] inline std::string version_text(int version) {
    // Up to 2.8 the code was major * 1000; those releases are older than anything opened here.
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
}

}  // namespace weightwire::nccl_api
