#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <weightwire/backends/cuda_ipc/machinery.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

/// @file
/// Plans of copies and conversions, kept by what they do.

namespace weightwire::cuda_ipc::detail {

/// Whether two tensors of one dtype are better moved run by run than element by element: whole
/// bytes in few runs, or in long ones that a table can hold.
[[nodiscard]] inline bool moves_in_runs(const mutable_tensor_view& to, const tensor_view& from) {
    constexpr std::uint64_t few = 64;
    constexpr std::uint64_t most = std::uint64_t{1} << 18U;
    constexpr std::uint64_t long_run = 256;  // bytes; a table takes some 24 a run
    if (to.is_contiguous() && from.is_contiguous()) {
        return true;
    }
    const auto folded = weightwire::detail::fold_runs(from.extents(), from.strides(), to.strides());
    const auto run = static_cast<std::uint64_t>(folded.run) * item_bits(from.type()) / 8;
    const auto runs = from.byte_size() / run;
    return runs <= few || (run >= long_run && runs <= most);
}

/// Numbers by which an item differs from another.
inline void each_number(const byte_move& move, auto visit) {
    visit(reinterpret_cast<std::uintptr_t>(move.to));
    visit(reinterpret_cast<std::uintptr_t>(move.from));
    visit(move.bytes);
}
inline void each_number(const conversion& item, auto visit) {
    visit(reinterpret_cast<std::uintptr_t>(item.to.data()));
    visit(reinterpret_cast<std::uintptr_t>(item.from.data()));
    visit(item.from.byte_size());
}

/// The plans of the last rounds. Rounds repeat: a sink that flips writes to one set of addresses in
/// even rounds and to another in odd ones, so from the third round on every plan is found here.
template <class Item, class Plan>
class plan_cache {
public:
    /// Keeps at most `most` plans; the one that was not used for longest makes room.
    void reserve(std::size_t most) { most_ = std::max(most_, most); }

    /// The plan of exactly these items; `make(groups)` makes one of one group. The reference lasts
    /// until the next `sweep`.
    /// @throws what `make` throws.
    template <class Make>
    [[nodiscard]] const Plan& find(std::span<const Item> items, Make make) {
        const auto key = key_of(items);
        for (auto& each : kept_) {
            if (each->key == key && std::ranges::equal(each->items, items)) {
                each->last_use = ++clock_;
                return each->plan;
            }
        }
        if (kept_.size() >= most_) {
            const auto oldest = std::ranges::min_element(
                kept_, {}, [](const auto& each) { return each->last_use; });
            retired_.push_back(std::move(*oldest));
            kept_.erase(oldest);
        }
        std::vector<std::vector<Item>> groups(1);
        groups.front().assign(items.begin(), items.end());
        Plan plan = make(std::span<const std::vector<Item>>{groups});
        kept_.push_back(std::make_unique<entry>(
            entry{key, std::move(groups.front()), std::move(plan), ++clock_}));
        return kept_.back()->plan;
    }
    /// Frees what has made room. No copy may be under way: freeing waits for the device.
    void sweep() noexcept { retired_.clear(); }
    /// Device memory of all plans.
    [[nodiscard]] std::uint64_t table_bytes() const noexcept {
        std::uint64_t sum = 0;
        for (const auto* list : {&kept_, &retired_}) {
            for (const auto& each : *list) {
                sum += each->plan.table_bytes();
            }
        }
        return sum;
    }

private:
    struct entry {
        std::uint64_t key;
        std::vector<Item> items;
        Plan plan;
        std::uint64_t last_use;
    };

    /// Of lists that differ it is the same by chance only.
    [[nodiscard]] static std::uint64_t key_of(std::span<const Item> items) noexcept {
        std::uint64_t key = items.size();
        for (const auto& item : items) {
            each_number(item, [&](std::uint64_t value) {
                key = (key ^ value) * 0x9E37'79B9'7F4A'7C15U;
                key ^= key >> 32U;
            });
        }
        return key;
    }

    std::vector<std::unique_ptr<entry>> kept_;
    std::vector<std::unique_ptr<entry>> retired_;
    std::size_t most_ = 16;
    std::uint64_t clock_ = 0;
};

}  // namespace weightwire::cuda_ipc::detail
