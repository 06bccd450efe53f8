#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <cstdint>

/// @file
/// Devices on which work could not be ended. Needs no header of CUDA.

namespace weightwire::gpu {

/// The devices of this process on which work was begun that could not be ended, such as that of a
/// communicator whose abort did not return: it may still write to whatever memory it was given, at
/// any later time. Nothing in the process can end that, so a mark stays until the process ends. One
/// of the library's documented globals. Thread-safe.
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

}  // namespace weightwire::gpu
