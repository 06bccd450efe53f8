#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/kernels/digest.hpp>
#include <weightwire/gpu/kernels/gather.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/sinks/tensor_copy.hpp>

/// @file
/// Digests of tensors that stay on their device.

namespace weightwire::detail {

/// What it takes to digest one list of tensors again and again: tables on the device, and room for
/// the strided ones, which are gathered part by part since a digest is over bytes in C order.
class device_digest_list {
public:
    device_digest_list(int device, std::span<const tensor_view> tensors)
        : tensors_{tensors.begin(), tensors.end()} {
        std::vector<gpu::digest_item> direct;
        for (std::size_t i = 0; i < tensors_.size(); ++i) {
            if (tensors_[i].is_contiguous()) {
                direct.push_back({tensors_[i].data(), tensors_[i].byte_size()});
                direct_.push_back(i);
            } else {
                add_strided(i);
            }
        }
        plans_.emplace_back(device, direct);
        room_ = gpu::device_buffer{device, static_cast<std::size_t>(room_bytes_)};
        for (const auto& part : parts_) {
            std::vector<gpu::digest_item> items;
            for (const auto& [i, offset] : part.tensors) {
                items.push_back({room_.data() + offset, tensors_[i].byte_size()});
            }
            plans_.emplace_back(device, items);
        }
        if (!parts_.empty()) {
            gathering_.emplace(device, runs_);
        }
        runs_.clear();
    }

    /// Whether this is the list of `tensors`.
    [[nodiscard]] bool fits(std::span<const tensor_view> tensors) const noexcept {
        return std::equal(tensors.begin(), tensors.end(), tensors_.begin(), tensors_.end(),
                          [](const tensor_view& a, const tensor_view& b) {
                              return a.data() == b.data() && a.type() == b.type() &&
                                     a.extents() == b.extents() && a.strides() == b.strides();
                          });
    }

    /// @returns whether the digests came in time.
    [[nodiscard]] bool run(std::span<std::uint64_t> results, gpu::stream_ref on, deadline until,
                           const std::stop_token& stop) const {
        // All is launched at once: parts share the room, in the order of the stream.
        for (std::size_t k = 0; k < plans_.size(); ++k) {
            if (k != 0) {
                gathering_->launch(k - 1, room_.data(), on);
            }
            plans_[k].launch(on);
        }
        if (!gpu::wait_until_idle(on, until, stop)) {
            return false;
        }
        const auto direct = plans_.front().fetch(on);
        for (std::size_t j = 0; j < direct.size(); ++j) {
            results[direct_[j]] = direct[j];
        }
        for (std::size_t k = 0; k < parts_.size(); ++k) {
            const auto gathered = plans_[k + 1].fetch(on);
            for (std::size_t j = 0; j < gathered.size(); ++j) {
                results[parts_[k].tensors[j].first] = gathered[j];
            }
        }
        return true;
    }

private:
    /// Strided tensors that are gathered together, each with its offset in the room.
    struct gathered_part {
        std::vector<std::pair<std::size_t, std::uint64_t>> tensors{};
        std::uint64_t bytes = 0;
    };

    void add_strided(std::size_t i) {
        constexpr std::uint64_t enough = std::uint64_t{64} << 20U;
        constexpr std::uint64_t alignment = 16;
        if (parts_.empty() || parts_.back().bytes >= enough) {
            parts_.emplace_back();
            runs_.emplace_back();
        }
        auto& last = parts_.back();
        last.tensors.emplace_back(i, last.bytes);
        auto at = last.bytes;
        for_each_run(tensors_[i], [&](const std::byte* first, std::size_t bytes) {
            runs_.back().push_back({.source = first, .offset = at, .bytes = bytes});
            at += bytes;
        });
        last.bytes = (at + alignment - 1) / alignment * alignment;
        room_bytes_ = std::max(room_bytes_, last.bytes);
    }

    std::vector<tensor_view> tensors_;
    std::vector<std::size_t> direct_;  ///< positions of the contiguous ones
    std::vector<gathered_part> parts_;
    std::vector<std::vector<gpu::gather_item>> runs_;  ///< of each part, until they are uploaded
    std::uint64_t room_bytes_ = 0;
    gpu::device_buffer room_;
    std::deque<gpu::digest_plan> plans_;  ///< of the contiguous ones, then of each part
    std::optional<gpu::gather> gathering_;
};

/// Digests on one device. Thread-safe: one list at a time. Keeps the tables of the last few lists,
/// since rounds repeat: those of both storages of a `flip` table, and a snapshot's.
class device_digests {
public:
    /// @param most lists that are kept.
    explicit device_digests(int device, std::size_t most = 4)
        : device_{device}, stream_{device}, most_{most} {}
    /// Keeps more lists from now on.
    void reserve(std::size_t most) noexcept { most_ = std::max(most_, most); }

    /// @throws timeout_error, cancelled_error the digests were not ready in time.
    /// @throws resource_error no memory for the tables, or the device failed.
    void compute(std::span<const tensor_view> tensors, std::span<std::uint64_t> results,
                 deadline until, const std::stop_token& stop) {
        for (const auto& each : tensors) {
            if (each.byte_size() != 0 &&
                each.device() != weightwire::device{memory_kind::cuda, device_}) {
                throw usage_error{"a table digests tensors of its own device only"};
            }
        }
        const std::lock_guard lock{mutex_};
        const gpu::device_guard guard{device_};
        if (list_of(tensors).run(results, stream_, until, stop)) {
            return;
        }
        // What was launched runs on, into tables that are kept; nobody looks at its results.
        if (stop.stop_requested()) {
            throw cancelled_error{"nobody waits for the digests any more"};
        }
        throw timeout_error{
            "the device had not computed the digests in time; allow more time or send without "
            "digests"};
    }

private:
    [[nodiscard]] const device_digest_list& list_of(std::span<const tensor_view> tensors) {
        const auto found =
            std::find_if(lists_.begin(), lists_.end(),
                         [&](const device_digest_list& each) { return each.fits(tensors); });
        if (found != lists_.end()) {
            return *found;
        }
        if (lists_.size() >= most_) {
            stream_.synchronize();  // a launch that was not waited for may still use its tables
            lists_.pop_front();
        }
        return lists_.emplace_back(device_, tensors);
    }

    int device_;
    gpu::stream stream_;
    std::size_t most_;
    std::mutex mutex_;
    std::deque<device_digest_list> lists_;
};

}  // namespace weightwire::detail
