#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

/// @file
/// Choices of the NCCL pull fabric, and the device memory that its communicators count for.

namespace weightwire::nccl {

/// Choices of a fabric, the same on both sides. A fabric takes them as a type with such a `value`:
///
///     struct few_peers {
///         static constexpr nccl::pull_options value{.most_peers = 8};
///     };
///     using fabric = nccl::basic_pull_fabric<nccl::cuda_pairs, few_peers>;
///
/// (The value itself as the template's argument would be shorter. nvcc 13.0 does not compile what
/// names such a type.)
struct pull_options {
    /// Most channels of a communicator, each a block of the device's and some megabytes of its
    /// memory: NCCL's `maxCTAs`, with `minCTAs` 1. A power of two up to 32, to which NCCL would
    /// round it. Four make 50 GB/s between two H200 over NVLink.
    int channels = 4;
    /// Communicators that one owner or reader holds. More are refused: each costs device memory for
    /// good, of NCCL 2.28.9 17 MB over sockets and 37 MB over NVLink, where UCX reads any number
    /// of peers through one context. The first of a process takes some 500 MB more, for the kernels
    /// of CUDA and NCCL, which nothing here counts.
    std::size_t most_peers = 64;
    /// Device memory in bytes that one owner or reader may take: arenas or places to land, and
    /// communicators in use. What would take more is refused. 0: what `staging_bytes` and
    /// `landing_bytes` make of arenas and places, and 4 GiB of communicators.
    std::uint64_t device_bytes = 0;
    /// What a communicator counts as, in bytes, before one was measured; 0: 9 MiB a channel. Then
    /// each counts as the least that one took. The measurement is of the whole device, where others
    /// may take and free meanwhile: from a quarter of this to four times this is believed.
    std::uint64_t pair_bytes = 0;
    /// Device memory of a reader where chunks land before they are laid out; at least two chunks.
    std::uint64_t landing_bytes = std::uint64_t{128} << 20U;
    /// How long an exchange waits for its last pairs before the next begins beside them.
    std::chrono::milliseconds linger{100};
    /// How long an owner gives a reader to join and to try the pair.
    std::chrono::milliseconds join_time{60'000};
    /// How long an owner waits for a transfer to end, and more by its size.
    std::chrono::milliseconds send_time{30'000};
    /// How long an abort may take before the pair is given up with all it holds.
    std::chrono::milliseconds abort_time{10'000};
};

/// The options as they are.
struct default_pull_options {
    static constexpr pull_options value{};
};

/// A type that carries options.
template <class T>
concept PullOptions = requires {
    { T::value } -> std::convertible_to<const pull_options&>;
};

/// What is wrong with options, in words; empty when nothing is.
[[nodiscard]] constexpr std::string_view fault_of(const pull_options& options) noexcept {
    constexpr std::chrono::milliseconds none{0};
    if (options.channels < 1 || options.channels > 32 ||
        !std::has_single_bit(static_cast<unsigned int>(options.channels))) {
        return "channels has to be 1, 2, 4, 8, 16 or 32";
    }
    if (options.most_peers < 1 || options.landing_bytes < 1) {
        return "most_peers and landing_bytes have to be 1 or above";
    }
    if (options.linger < none || options.join_time <= none || options.send_time <= none ||
        options.abort_time <= none) {
        return "times have to be above 0";
    }
    return {};
}

/// What a communicator takes, as far as it can be measured. One thread at a time writes.
class pair_cost {
public:
    explicit pair_cost(const pull_options& options) noexcept
        : expected_{options.pair_bytes != 0
                        ? options.pair_bytes
                        : static_cast<std::uint64_t>(options.channels) * (std::uint64_t{9} << 20U)},
          bytes_{expected_} {}
    void note(std::uint64_t took) noexcept {
        if (took >= expected_ / 4 && took <= expected_ * 4) {
            least_ = measured_ == 0 ? took : std::min(least_, took);
            // The first may have what the process takes once.
            bytes_ = ++measured_ == 1 ? std::min(expected_, least_) : least_;
        }
    }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

private:
    std::uint64_t expected_;
    int measured_ = 0;
    std::uint64_t least_ = 0;
    std::atomic<std::uint64_t> bytes_;
};

/// Why an owner or reader may not take this much of the device, in words; empty where it may.
/// @param own bytes of arenas or places. @param pairs bytes counted for communicators.
[[nodiscard]] inline std::string fault_of_budget(const pull_options& options, std::uint64_t own,
                                                 std::uint64_t pairs, std::string_view who,
                                                 std::string_view own_name) {
    constexpr std::uint64_t for_pairs = std::uint64_t{4} << 30U;
    const bool fits = options.device_bytes == 0
                          ? pairs <= for_pairs
                          : own <= options.device_bytes && pairs <= options.device_bytes - own;
    if (fits) {
        return {};
    }
    return std::string{who} + " would take " + std::to_string(own) + " bytes of the device for " +
           std::string{own_name} + " and " + std::to_string(pairs) +
           " for communicators of NCCL, and may take " +
           (options.device_bytes == 0 ? std::to_string(for_pairs) + " for these"
                                      : std::to_string(options.device_bytes) + " in all") +
           " (pull_options::device_bytes); take smaller chunks (chunk_bytes, staging_bytes, "
           "landing_bytes), or read over UCX, which needs no communicators";
}

}  // namespace weightwire::nccl
