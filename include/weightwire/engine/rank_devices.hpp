#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// Which CUDA device each rank's receiver works on.

namespace weightwire::detail {

/// The device where a sink says that its tensors are; -1 where it names none.
template <class Sink>
[[nodiscard]] int cuda_device_of(const Sink& sink) {
    if constexpr (HasDevice<Sink>) {
        const device where = sink.device();
        return where.kind == memory_kind::cuda ? where.index : -1;
    } else {
        return -1;
    }
}

/// The user's choice; else the device of the rank's sink; else the local rank where there are
/// several, as is the custom of one device a rank; else 0. A transport of host memory ignores it.
/// @param sinks one a rank, none null.
/// @param chosen one a rank, or empty.
/// @throws usage_error another number of devices than of ranks, a negative one, or another than
/// where the sink's tensors are: a receiver cannot count on writing across devices.
template <class Sink>
[[nodiscard]] std::vector<int> rank_devices(const std::vector<Sink*>& sinks,
                                            std::span<const int> chosen) {
    if (!chosen.empty() && chosen.size() != sinks.size()) {
        throw usage_error{"worker_options::devices names " + std::to_string(chosen.size()) +
                          " devices for " + std::to_string(sinks.size()) +
                          " ranks; name one a rank, or none"};
    }
    std::vector<int> devices;
    for (std::size_t i = 0; i < sinks.size(); ++i) {
        const int at = cuda_device_of(*sinks[i]);
        const int by_rank = sinks.size() > 1 ? static_cast<int>(i) : 0;
        const int device = !chosen.empty() ? chosen[i] : at >= 0 ? at : by_rank;
        if (device < 0 || (at >= 0 && device != at)) {
            throw usage_error{"worker_options::devices gives rank " + std::to_string(i) +
                              " device " + std::to_string(device) +
                              (at >= 0 ? ", and its sink is on device " + std::to_string(at)
                                       : std::string{"; devices count from 0"})};
        }
        devices.push_back(device);
    }
    return devices;
}

}  // namespace weightwire::detail
