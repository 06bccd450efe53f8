#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <cstdint>

/// @file
/// Devices on which an abort has not returned. Needs no header of NCCL or CUDA.

namespace weightwire::nccl_api {

/// The devices of this process on which a communicator was lost: a kernel of it may still write to
/// whatever memory it was given, at any later time. No abort, no new group and no other stream of
/// the process can end that, so a mark stays until the process ends. One of the library's
/// documented globals. Thread-safe.
class lost_devices {
public:
    static void note(int device) noexcept { marks() |= bit_of(device); }
    [[nodiscard]] static bool has(int device) noexcept { return (marks() & bit_of(device)) != 0; }

private:
    /// No machine has that many; those beyond share the last mark, which errs on the safe side.
    static constexpr int most = 64;

    [[nodiscard]] static std::uint64_t bit_of(int device) noexcept {
        return std::uint64_t{1} << static_cast<unsigned int>(std::clamp(device, 0, most - 1));
    }
    [[nodiscard]] static std::atomic<std::uint64_t>& marks() noexcept {
        static std::atomic<std::uint64_t> bits{0};
        return bits;
    }
};

}  // namespace weightwire::nccl_api
