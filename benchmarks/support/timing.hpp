#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace benchmarks {

using monotonic = std::chrono::steady_clock;

[[nodiscard]] inline double seconds_between(monotonic::time_point begin,
                                            monotonic::time_point end) {
    return std::chrono::duration<double>(end - begin).count();
}
[[nodiscard]] inline double seconds_since(monotonic::time_point begin) {
    return seconds_between(begin, monotonic::now());
}

/// Of at least one value.
[[nodiscard]] inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

/// Which row comes `turn`-th in a round: there and back.
[[nodiscard]] inline std::size_t row_of(int round, std::size_t turn, std::size_t count) {
    return round % 2 == 0 ? turn : count - 1 - turn;
}

}  // namespace benchmarks
