#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/ipc/control_block.hpp>
#include <weightwire/backends/ipc/init_info.hpp>
#include <weightwire/backends/ipc/layout.hpp>
#include <weightwire/backends/ipc/readers.hpp>
#include <weightwire/backends/ipc/transport_message.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/fabrics/address_map.hpp>
#include <weightwire/fabrics/shared_memory.hpp>
#include <weightwire/fabrics/shared_memory_copy.hpp>

/// @file
/// The trainer's half of `ipc` over host memory.

namespace weightwire::ipc {

/// Shows the workers where the weights are, or writes them to a ring that all workers read at once.
///
/// One update call a round. Tensors that a stable source keeps in sealed shared memory are only
/// announced, one by one as the source yields them. The others are written to the ring a piece at a
/// time, and workers read a piece while the next is written, so that it is still in a cache that
/// both share.
class sender {
public:
    explicit sender(const trainer_init_info& info) : info_{info} {}
    sender(const sender&) = delete;
    sender& operator=(const sender&) = delete;
    /// Tells waiting workers that the trainer is gone; waits for nobody.
    ~sender() { abandon_all(); }

    /// Plans the round and allocates the ring. Waits for nobody.
    /// @throws usage_error sizes out of bounds. @throws data_error packed: a tensor does not fit.
    /// @throws unsupported_error a peer that is not ours, or weights that are not in host memory.
    /// @throws resource_error no memory.
    [[nodiscard]] std::vector<transport_init> prepare(const sender_context& context);

    /// The workers open everything inside their init call; there is nothing to join.
    void open(deadline, const std::stop_token&) {}

    [[nodiscard]] std::span<const update_part> parts() const noexcept { return {&part_, 1}; }

    /// Returns when every rank that was not dropped has read everything. A peer that hangs while
    /// another goes on is dropped after half of the time.
    /// @throws timeout_error names the slowest peer. @throws cancelled_error.
    /// @throws protocol_error a worker claims to have read more than was written.
    /// @throws data_error a stable source's tensor moved.
    void send(std::uint64_t round, std::size_t part, tensor_stream& stream, deadline until,
              std::stop_token stop);

    /// From now on no rank of `peer` is waited for. Thread-safe.
    void drop_peer(std::size_t peer) noexcept { readers_.drop(peer); }
    /// Undoes it. Between rounds only.
    void restore_peer(std::size_t peer) { readers_.restore(peer); }

    /// Of each parameter in the last round; empty unless `verify`.
    [[nodiscard]] std::span<const std::uint64_t> digests() const noexcept { return digests_; }

    /// What was chosen, and the shared memory it costs.
    [[nodiscard]] std::string description() const;

    /// Shared memory that this sender allocated, in bytes; known after `prepare`.
    [[nodiscard]] std::uint64_t allocated_bytes() const noexcept {
        return control_segment_.size() + ring_.size();
    }

    /// Releases everything. Workers keep what they mapped until they let go.
    void close(deadline) {
        abandon_all();
        readers_.attach({});
        control_segment_ = {};
        ring_ = {};
    }

private:
    /// Bytes written between two looks at the clock and two signs of progress.
    static constexpr std::uint64_t piece_bytes = std::uint64_t{256} << 10U;

    void find_places(const sender_context& context, transport_message& message);
    void move(tensor_stream& stream, sending& at);
    void announce(const tensor_view& tensor, sending& at);
    void stage(const tensor_view& tensor, tensor_stream& stream, sending& at);
    void finish_piece(std::span<std::byte> bytes, std::uint64_t offset, std::uint64_t& sum,
                      const sending& at);
    void make_room(std::uint64_t needed, sending& at);
    [[nodiscard]] error_context sending_context(const sending& at) const;
    void check_tensor(const named_tensor* entry, std::size_t i) const;
    void abandon_all() noexcept { readers_.end(std::numeric_limits<std::uint64_t>::max(), true); }
    /// Whether bytes have to be touched after they were written, so that they must be ours.
    [[nodiscard]] bool alters() const noexcept {
        return bool{info_.transform} || bool{info_.tamper};
    }

    trainer_init_info info_;
    const manifest* parameters_ = nullptr;
    layout layout_;
    update_part part_{};
    shm::segment control_segment_;
    shm::segment ring_;
    readers readers_;
    std::vector<const std::byte*> addresses_;  ///< of tensors read in place, null for the others
    std::size_t in_place_count_ = 0;
    std::uint64_t in_place_bytes_ = 0;
    std::vector<std::uint64_t> digests_;
    std::uint64_t last_round_ = 0;
};

inline std::vector<transport_init> sender::prepare(const sender_context& context) {
    const auto wire = info_.wire();
    if (const auto fault = fault_of(wire); !fault.empty()) {
        throw usage_error{fault, {.phase = phase::init, .backend = "ipc"}};
    }
    parameters_ = &context.parameters;
    part_ = {.first = 0, .count = parameters_->size()};
    readers_.adopt(context.peers, context.world_size);
    transport_message message;
    message.boot_id = weightwire::detail::boot_id();
    message.nonce = (std::uint64_t{std::random_device{}()} << 32U) | std::random_device{}();
    find_places(context, message);
    std::vector<unsigned char> in_place(message.places.size());
    std::transform(message.places.begin(), message.places.end(), in_place.begin(),
                   [](const place& p) { return p.segment == place::staged ? 0U : 1U; });
    layout_ = layout{*parameters_, wire, in_place};
    digests_.assign(info_.verify ? parameters_->size() : 0, 0);
    control_segment_ =
        shm::segment::create(control_block::bytes_for(readers_.ranks()), shm::sharing::writable);
    readers_.attach(
        control_block::create(control_segment_.data(), readers_.ranks(), message.nonce));
    message.control = control_segment_.exported();
    if (layout_.ring_bytes() != 0) {
        ring_ = shm::segment::create(layout_.ring_bytes());
        message.ring = ring_.exported();
    }
    return std::vector<transport_init>(readers_.peers(), transport_init{.native = encode(message)});
}

/// Looks up, for a stable source, which memory file each tensor lies in. What is not in one, is not
/// contiguous, or must be altered passes through the ring.
inline void sender::find_places(const sender_context& context, transport_message& message) {
    addresses_.assign(parameters_->size(), nullptr);
    in_place_count_ = 0;
    in_place_bytes_ = 0;
    if (info_.packed || alters() || context.lifetime != tensor_lifetime::stable ||
        context.stable_tensors.size() != parameters_->size()) {
        return;
    }
    const auto map = shm::address_map::of_this_process();
    const auto self = shm::this_process();
    std::vector<shm::file_identity> files;
    std::vector<bool> usable;
    std::vector<place> places(parameters_->size());
    for (std::size_t i = 0; i < places.size(); ++i) {
        const auto& tensor = context.stable_tensors[i];
        const auto found = tensor.byte_size() != 0 && tensor.is_contiguous() &&
                                   tensor.device().kind == memory_kind::host
                               ? map.find(tensor.data(), tensor.byte_size())
                               : std::nullopt;
        if (!found) {
            continue;
        }
        auto index = static_cast<std::size_t>(std::find(files.begin(), files.end(), found->file) -
                                              files.begin());
        if (index == files.size() && index < most_segments) {
            files.push_back(found->file);
            const auto file = shm::exported_file(found->file, self);
            usable.push_back(file.has_value());
            message.segments.push_back(file.value_or(shm::handle{}));
        }
        if (index < files.size() && usable[index]) {
            places[i] = {.segment = static_cast<std::uint32_t>(index), .offset = found->offset};
            addresses_[i] = tensor.data();
            ++in_place_count_;
            in_place_bytes_ += tensor.byte_size();
        }
    }
    if (in_place_count_ != 0) {
        message.places = std::move(places);
    } else {
        message.segments.clear();
    }
}

inline void sender::send(std::uint64_t round, std::size_t part, tensor_stream& stream,
                         deadline until, std::stop_token stop) {
    const auto base = layout_.base(round);
    if (!readers_.attached() || part != 0 || round <= last_round_ || !base) {
        throw usage_error{
            "send needs a prepared sender, part 0 and a round above the last, which "
            "was " +
                std::to_string(last_round_),
            {.phase = phase::update, .backend = "ipc"}};
    }
    last_round_ = round;
    sending at{.base = *base, .length = layout_.length(), .until = until, .stop = std::move(stop)};
    const auto next = *base + layout_.stride();
    try {
        move(stream, at);
    } catch (...) {
        readers_.end(next, true);
        throw;
    }
    // Whoever still reads was dropped: what it reads is no longer this round's.
    readers_.end(next, false);
}

inline void sender::move(tensor_stream& stream, sending& at) {
    readers_.begin(at);
    for (std::size_t i = 0; i < layout_.size(); ++i) {
        at.parameter = i;
        const auto* const entry = stream.next();
        check_tensor(entry, i);
        if (entry->tensor.byte_size() == 0) {
            if (info_.verify) {
                digests_[i] = digest({});
            }
        } else if (layout_.in_place(i)) {
            announce(entry->tensor, at);
        } else {
            stage(entry->tensor, stream, at);
        }
    }
    at.written = layout_.length();
    readers_.publish(at);
    readers_.wait(at.written, at.written, at);
}

inline void sender::check_tensor(const named_tensor* entry, std::size_t i) const {
    const auto& parameter = (*parameters_)[i];
    const auto context = [&] {
        return error_context{.phase = phase::update, .tensor = parameter.name, .backend = "ipc"};
    };
    if (entry == nullptr) {
        throw data_error{"the source ended before this tensor", context()};
    }
    if (entry->tensor.device().kind != memory_kind::host || entry->ready_stream != nullptr) {
        throw unsupported_error{
            "ipc over host memory needs tensors in host memory that are valid when they are "
            "yielded; copy this one there, or choose a backend for device memory",
            context()};
    }
    if (entry->tensor.byte_size() != parameter.byte_size() ||
        (layout_.in_place(i) &&
         (entry->tensor.data() != addresses_[i] || !entry->tensor.is_contiguous()))) {
        throw data_error{
            "a source that promised stable addresses yields another address or "
            "layout than at init",
            context()};
    }
}

/// The workers may read it now; the digest is taken beside them.
inline void sender::announce(const tensor_view& tensor, sending& at) {
    detail::check_time(at.until, at.stop, [&] { return sending_context(at); });
    at.written = layout_.end(at.parameter);
    readers_.publish(at);
    if (!info_.verify) {
        return;
    }
    std::uint64_t sum = 0;
    const auto bytes = tensor.bytes();
    for (std::size_t offset = 0; offset < bytes.size(); offset += piece_bytes) {
        detail::check_time(at.until, at.stop, [&] { return sending_context(at); });
        const auto count = std::min<std::size_t>(piece_bytes, bytes.size() - offset);
        sum += digest_piece(bytes.subspan(offset, count), offset);
    }
    digests_[at.parameter] = digest_finish(sum, bytes.size());
}

/// Writes a tensor to the ring. Pieces begin at multiples of 64 bytes of the tensor.
inline void sender::stage(const tensor_view& tensor, tensor_stream& stream, sending& at) {
    const auto ring_bytes = layout_.ring_bytes();
    const auto begin = layout_.begin(at.parameter);
    std::uint64_t sum = 0;
    for (std::uint64_t offset = 0; offset < tensor.byte_size();) {
        detail::check_time(at.until, at.stop, [&] { return sending_context(at); });
        const auto position = begin + offset;
        const auto in_ring = position % ring_bytes;
        const auto count =
            std::min({piece_bytes, tensor.byte_size() - offset, ring_bytes - in_ring});
        if (position + count > ring_bytes) {
            make_room(position + count - ring_bytes, at);
        }
        const std::span<std::byte> bytes{ring_.data() + in_ring, static_cast<std::size_t>(count)};
        if (!stream.read(offset, bytes)) {
            shm::gather(bytes, tensor, offset, shm::stores::cached);
        }
        finish_piece(bytes, offset, sum, at);
        offset += count;
        at.written = position + count;
        if (at.written - at.published >= piece_bytes) {
            readers_.publish(at);
        }
    }
    if (info_.verify) {
        digests_[at.parameter] = digest_finish(sum, tensor.byte_size());
    }
}

/// Waits until position `needed` has been read, so that what lies below it may be overwritten.
/// Positions that hold nothing (a gap before an aligned tensor, the rest of a packed buffer) are
/// never read: when all that was written is read, the whole ring is free.
inline void sender::make_room(std::uint64_t needed, sending& at) {
    if (needed > at.published) {
        readers_.publish(at);  // nobody reads what nobody knows of
    }
    const auto least = std::min(needed, at.published);
    if (readers_.slowest(at) >= least) {
        return;
    }
    readers_.publish(at);
    const auto half = at.published - std::min(at.published, layout_.ring_bytes() / 2);
    readers_.wait(least, std::max(least, half), at);
}

/// Changes, digests and corrupts a piece in the ring, as asked for, while it is still in the cache.
inline void sender::finish_piece(std::span<std::byte> bytes, std::uint64_t offset,
                                 std::uint64_t& sum, const sending& at) {
    const auto& name = (*parameters_)[at.parameter].name;
    if (info_.transform) {
        info_.transform(name, offset, bytes);
    }
    if (info_.verify) {
        sum += digest_piece(bytes, offset);
    }
    if (info_.tamper) {
        info_.tamper(name, offset, bytes);
    }
}

inline error_context sender::sending_context(const sending& at) const {
    return {.phase = phase::update,
            .tensor = (*parameters_)[at.parameter].name,
            .backend = "ipc",
            .bytes_done = at.written,
            .bytes_total = layout_.length()};
}

inline std::string sender::description() const {
    if (parameters_ == nullptr) {
        return "ipc over host memory, not prepared";
    }
    const auto count = std::to_string(parameters_->size());
    const auto memory = ", " + std::to_string(allocated_bytes()) + " bytes of shared memory";
    if (info_.packed) {
        return "ipc: packed, " + std::to_string(layout_.chunks()) + " chunks a round through " +
               std::to_string(info_.packed_num_buffers) + " buffers of " +
               std::to_string(info_.packed_buffer_size_bytes) + " bytes" + memory;
    }
    const auto in_place = std::to_string(in_place_count_) + " of " + count +
                          " tensors are read in place (" + std::to_string(in_place_bytes_) +
                          " bytes)";
    if (layout_.staged_bytes() == 0) {
        return "ipc: " + in_place + memory;
    }
    const auto* const why = alters() ? "they are altered on the way"
                                     : "they do not lie in sealed shared memory, or the source "
                                       "does not promise stable addresses";
    return "ipc: " + in_place + "; the others pass through a window of " +
           std::to_string(layout_.ring_bytes()) + " bytes, because " + why + memory;
}

}  // namespace weightwire::ipc
