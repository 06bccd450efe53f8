#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/ucx/device_staging.hpp>
#include <weightwire/fabrics/ucx/host_staging.hpp>
#include <weightwire/fabrics/ucx/owner.hpp>
#include <weightwire/fabrics/ucx/reader.hpp>
#include <weightwire/fabrics/ucx/texts.hpp>

/// @file
/// A trainer rank whose tensors lie on a device, read over UCX.

namespace weightwire::ucx {

namespace detail {

/// How long a trial transfer between a device and UCX may take before it counts as failed.
inline constexpr std::chrono::seconds trial_time{5};

/// Whether memory that was brought is what a trainer rank with this id holds to be tried.
[[nodiscard]] inline bool is_probe(const std::byte* data, std::uint64_t bytes, std::uint64_t id) {
    for (std::uint64_t i = 0; i < bytes / 8; ++i) {
        const auto expected = probe_word(id, i);
        if (std::memcmp(data + 8 * i, &expected, 8) != 0) {
            return false;
        }
    }
    return true;
}

}  // namespace detail

/// Packs lines of device memory into an arena that UCX reads. The arena is memory of the device
/// where UCX brings that: it says that it can, and a trial transfer over a link to this same
/// process brought the right bytes. Else it is pinned host memory; `remark()` says which, and why.
template <DeviceMachinery M>
class basic_device_owner : public basic_owner<device_staging<M>> {
    using base = basic_owner<device_staging<M>>;
    using typename base::buffer;

public:
    using typename base::arena_type;

    /// Looks what UCX can do here; takes 5 seconds at most where it says more than it does.
    /// @throws resource_error, unsupported_error UCX cannot start, or there is no such device.
    explicit basic_device_owner(int device = 0)
        : base{device}, device_{device}, packed_{this->used_staging().make_mark()} {
        choose();
    }
    /// Waits for copies that were begun, two seconds at most.
    ~basic_device_owner() { this->used_staging().come_to_rest(); }
    basic_device_owner(const basic_device_owner&) = delete;
    basic_device_owner& operator=(const basic_device_owner&) = delete;

    /// @throws usage_error no bytes. @throws resource_error
    [[nodiscard]] arena_type allocate(std::uint64_t bytes) {
        return in_device_ ? this->share(near_buffer(bytes)) : base::allocate(bytes);
    }
    /// Whether arenas are memory of the device.
    [[nodiscard]] bool in_device() const noexcept { return in_device_; }
    /// What was chosen, and why.
    [[nodiscard]] std::string remark() const { return remark_; }

    /// @param stream of the machinery, as `named_tensor::ready_stream` has it; of any device.
    /// @throws timeout_error, cancelled_error, and what the device says.
    void await_ready(void* stream, deadline until, const std::stop_token& stop) {
        this->used_staging().record_after(packed_, stream);
        this->used_staging().await(packed_, until, stop, phase::update);
    }
    /// Begins to copy `count` lines of `bytes` bytes, one every `from_step` bytes, from memory of
    /// the device or of the host to `to`, one after the other.
    /// @throws what the device says.
    void pack(std::byte* to, const std::byte* from, std::uint64_t bytes, std::uint64_t count,
              std::uint64_t from_step) {
        this->used_staging().pack(to, from, bytes, count, from_step);
    }
    /// Returns when what was packed is in the arena.
    /// @throws timeout_error, cancelled_error, and what the device says.
    void settle(deadline until, const std::stop_token& stop) {
        this->used_staging().record(packed_);
        this->used_staging().await(packed_, until, stop, phase::update);
    }

private:
    [[nodiscard]] std::shared_ptr<const buffer> near_buffer(std::uint64_t bytes) {
        if (bytes == 0) {
            throw usage_error{"an arena of no bytes"};
        }
        return std::make_shared<const buffer>(this->used_staging().allocate_near(bytes));
    }
    void choose() {
        bool knows = false;
        this->in_thread([&](const context& in) { knows = M::ucx_knows(in); });
        if (!knows) {
            remark_ = "UCX has no CUDA here: chunks pass through pinned host memory";
            return;
        }
        try {
            try_near();
            in_device_ = true;
            remark_ = "UCX has CUDA here: chunks are packed in device memory, which it reads";
        } catch (const error& failed) {
            remark_ =
                std::string{
                    "UCX has CUDA here, but a trial transfer of device memory failed "
                    "("} +
                failed.what() + "): chunks pass through pinned host memory";
        }
    }
    /// Reads memory of the device over a link to this process.
    void try_near() {
        const auto until = deadline::after(detail::trial_time);
        constexpr std::uint64_t id = 0x7472'6961'6c00'0000U;
        const auto words = this->used_staging().allocate(probe_bytes);
        for (std::uint64_t i = 0; i < probe_bytes / 8; ++i) {
            const auto word = probe_word(id, i);
            std::memcpy(words.data() + 8 * i, &word, 8);
        }
        const auto shared = this->share(near_buffer(probe_bytes));
        pack(shared.data(), words.data(), probe_bytes, 1, probe_bytes);
        settle(until, {});
        basic_reader<host_staging> reader{device_};
        auto connection = reader.connect(this->address(), until, {});
        const auto memory =
            reader.open(connection, shared.exported().handle, probe_bytes, until, {});
        std::vector<std::byte> found(probe_bytes);
        const std::array runs{
            remote_run<ucx::memory>{.from = &memory, .to = found.data(), .bytes = found.size()}};
        auto read = reader.prepare(runs);
        reader.start(read, 0);
        reader.wait(read, until, {});
        if (!detail::is_probe(found.data(), found.size(), id)) {
            throw data_error{"it brought other bytes than the device holds"};
        }
    }

    int device_;
    typename device_staging<M>::mark packed_;
    bool in_device_ = false;
    std::string remark_;
};

}  // namespace weightwire::ucx
