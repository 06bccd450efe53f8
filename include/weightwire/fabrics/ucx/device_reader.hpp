#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstdint>
#include <stop_token>
#include <string>
#include <string_view>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/ucx/device_owner.hpp>
#include <weightwire/fabrics/ucx/device_staging.hpp>
#include <weightwire/fabrics/ucx/links.hpp>
#include <weightwire/fabrics/ucx/memory.hpp>
#include <weightwire/fabrics/ucx/reader.hpp>
#include <weightwire/fabrics/ucx/texts.hpp>
#include <weightwire/fabrics/ucx/worker.hpp>

/// @file
/// A worker rank whose parameters lie on a device, and come over UCX.

namespace weightwire::ucx {

/// Transfers land in pinned host memory, from where the device takes them, one piece while the next
/// is on its way. Where UCX writes the device's memory itself (it says so, and a trial transfer
/// from every trainer rank did), runs of 128 KiB and more come straight. `remark()` says which.
template <DeviceMachinery M>
class basic_device_reader : public basic_reader<device_staging<M>> {
    using base = basic_reader<device_staging<M>>;

public:
    using base::base;

    /// Connects as `basic_reader` does, and tries device memory where UCX says that it can.
    /// @throws as `basic_reader::connect`. A failed trial is no error: `remark()` says it.
    [[nodiscard]] connection connect(std::string_view address, deadline until,
                                     const std::stop_token& stop) {
        auto made = base::connect(address, until, stop);
        if (!failed_.empty() ||
            !M::ucx_knows(this->used_transfers().shared_links()->used_context())) {
            return made;
        }
        auto& staging = this->used_transfers().used_staging();
        try {
            try_near(made, address, until.capped(detail::trial_time), stop);
            staging.direct = true;
            return made;
        } catch (const cancelled_error&) {
            throw;
        } catch (const error& failed) {
            staging.direct = false;
            failed_ = failed.what();
        }
        return base::connect(address, until, stop);  // the trial may have cost the connection
    }

    /// Whether long runs come straight to the device.
    [[nodiscard]] bool direct() const noexcept {
        return this->used_transfers().used_staging().direct;
    }
    /// A copy could not be ended, and may still write to its destinations.
    [[nodiscard]] bool lost() const noexcept {
        return this->used_transfers().used_staging().lost();
    }
    /// What was chosen, and why; known once connected.
    [[nodiscard]] std::string remark() const {
        if (direct()) {
            return "UCX has CUDA here: runs of 128 KiB and more come straight to device memory, "
                   "shorter ones through pinned host memory";
        }
        return (failed_.empty()
                    ? std::string{"UCX has no CUDA here"}
                    : "UCX has CUDA here, but a trial transfer to device memory failed (" +
                          failed_ + ")") +
               ": chunks pass through pinned host memory";
    }

private:
    /// Brings a trainer rank's trial bytes to this device, few and many, and looks at them.
    void try_near(connection& made, std::string_view address, deadline until,
                  const std::stop_token& stop) {
        auto& transfers = this->used_transfers();
        auto& staging = transfers.used_staging();
        const auto named = parse_address(address);
        const auto& shared = transfers.shared_links();
        const memory probe{shared, made.to(), shared->unpack(made.to(), named->probe_key),
                           named->probe, probe_bytes};
        const auto near = staging.allocate_near(probe_bytes);
        const auto seen = staging.allocate(probe_bytes);
        const auto registered = registration::create(shared->used_context(), near.data(),
                                                     near.size(), device_staging<M>::near_type);
        auto mark = staging.make_mark();
        for (const auto bytes : {std::uint64_t{8}, probe_bytes}) {
            transfers.bring_to({near.data(), registered, device_staging<M>::near_type}, made.to(),
                               probe.key(), probe.address(), bytes, until, stop);
            staging.pack(seen.data(), near.data(), bytes, 1, bytes);
            staging.record(mark);
            staging.await(mark, until, stop, phase::init);
            if (!detail::is_probe(seen.data(), bytes, named->id)) {
                throw data_error{"it brought other bytes than the trainer rank holds",
                                 {.phase = phase::init, .peer = made.peer()}};
            }
        }
    }

    std::string failed_;  ///< why UCX does not write device memory
};

}  // namespace weightwire::ucx
