#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <weightwire/backends/nccl/byte_runs.hpp>
#include <weightwire/backends/nccl/machinery.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>

/// @file
/// Scatter plans of chunks, kept by where their tensors go.

namespace weightwire::nccl::detail {

/// A sink that flips writes to one set of addresses in even rounds and to another in odd ones, so
/// two plans a chunk are kept: from the third round on none is made. One that is replaced is freed
/// only by `sweep`, between updates: freeing device memory waits for the device.
template <Machinery M>
class scatter_tables {
public:
    /// Forgets all, for `chunks` chunks of another plan. No work may be under way.
    void reset(std::size_t chunks) {
        chunks_.clear();
        chunks_.resize(chunks);
        retired_.clear();
    }
    /// Frees what was replaced. No work may be under way.
    void sweep() noexcept { retired_.clear(); }

    /// The plan that brings chunk `chunk` to `places`: one a tensor of the chunk, without data
    /// where nothing is scattered.
    /// @param offsets where each tensor begins in the buffer.
    /// @throws unsupported_error a layout of too many runs, naming what `where(k)` says.
    template <class Where>
    [[nodiscard]] const typename M::scatter_plan& find(M& machine, std::size_t chunk,
                                                       std::span<const mutable_tensor_view> places,
                                                       std::span<const std::uint64_t> offsets,
                                                       Where where) {
        auto& kept = chunks_[chunk];
        for (auto& each : kept.plans) {
            if (each.plan && same(each.places, places)) {
                kept.last = static_cast<std::size_t>(&each - kept.plans.data());
                return *each.plan;
            }
        }
        const auto oldest = 1 - kept.last;
        auto& slot = kept.plans[oldest];
        if (slot.plan) {
            retired_.push_back(std::move(*slot.plan));
            slot.plan.reset();
        }
        std::vector<std::vector<byte_run>> runs(1);
        for (std::size_t k = 0; k < places.size(); ++k) {
            if (places[k].data() != nullptr) {
                auto offset = offsets[k];
                each_byte_run(
                    places[k], most_table_runs, [&] { return where(k); },
                    [&](std::byte* at, std::uint64_t bytes) {
                        runs.front().push_back({at, offset, bytes});
                        offset += bytes;
                    });
            }
        }
        slot.places.assign(places.begin(), places.end());
        slot.plan.emplace(machine.make_scatter(runs));
        kept.last = oldest;
        return *slot.plan;
    }

    /// Device memory of all plans.
    [[nodiscard]] std::uint64_t table_bytes() const noexcept {
        std::uint64_t sum = 0;
        for (const auto& kept : chunks_) {
            for (const auto& each : kept.plans) {
                sum += each.plan ? each.plan->table_bytes() : 0;
            }
        }
        for (const auto& plan : retired_) {
            sum += plan.table_bytes();
        }
        return sum;
    }

private:
    struct entry {
        std::vector<mutable_tensor_view> places{};
        std::optional<typename M::scatter_plan> plan{};
    };
    struct kept_plans {
        std::array<entry, 2> plans{};
        std::size_t last = 0;  ///< which was used last; the other is replaced
    };

    [[nodiscard]] static bool same(std::span<const mutable_tensor_view> a,
                                   std::span<const mutable_tensor_view> b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                          [](const mutable_tensor_view& x, const mutable_tensor_view& y) {
                              return x.data() == y.data() && x.strides() == y.strides() &&
                                     x.byte_size() == y.byte_size();
                          });
    }

    std::vector<kept_plans> chunks_;
    std::vector<typename M::scatter_plan> retired_;
};

}  // namespace weightwire::nccl::detail
