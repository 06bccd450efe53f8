#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/fabrics/nccl/interfaces.hpp>
#include <weightwire/fabrics/nccl/pair_machinery.hpp>
#include <weightwire/fabrics/nccl/pair_wire.hpp>
#include <weightwire/fabrics/nccl/pull_options.hpp>
#include <weightwire/fabrics/nccl/pull_reader.hpp>
#include <weightwire/fabrics/nccl/pull_server.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>

/// @file
/// A trainer rank whose packed chunks are read over NCCL.

namespace weightwire::nccl {

/// Near memory to which a trainer rank packs what readers take.
template <PairMachinery M>
class pull_arena {
public:
    pull_arena() noexcept = default;
    pull_arena(std::shared_ptr<const typename M::buffer> buffer, fabric_export exported) noexcept
        : buffer_{std::move(buffer)}, exported_{std::move(exported)} {}
    [[nodiscard]] std::byte* data() const noexcept {
        return buffer_ != nullptr ? buffer_->data() : nullptr;
    }
    [[nodiscard]] std::uint64_t size() const noexcept { return exported_.bytes; }
    [[nodiscard]] fabric_export exported() const { return exported_; }

private:
    std::shared_ptr<const typename M::buffer> buffer_;
    fabric_export exported_{};
};

/// Sends parts of its arenas to readers that ask for them, each over a communicator of two that is
/// made when the reader connects. `pull_server` is its thread.
///
/// Who knows the address may read the arenas, and NCCL encrypts nothing: use a network that you
/// trust. NCCL_SOCKET_IFNAME says in which networks readers reach this process, as it does for
/// NCCL.
template <PairMachinery M, PullOptions Options>
class pull_owner {
public:
    using arena = pull_arena<M>;

    /// @throws unsupported_error there is no such device, or no libnccl. @throws resource_error no
    /// memory or no port.
    explicit pull_owner(int device = 0)
        : machine_{device},
          copies_{machine_.make_stream()},
          mark_{machine_.make_event()},
          arenas_{std::make_shared<arena_list<M>>()} {
        std::vector<std::uint64_t> words(trial_bytes / 8);
        for (std::size_t i = 0; i < words.size(); ++i) {
            words[i] = trial_word(id_, i);
        }
        const auto trial = allocate(trial_bytes);
        const auto* const from = reinterpret_cast<const std::byte*>(words.data());
        machine_.copy_lines(trial.data(), from, trial_bytes, 1, trial_bytes, copies_);
        settle(deadline::after(std::chrono::seconds{30}), {});
        server_ = std::make_unique<pull_server<M>>(device, Options::value, id_, arenas_);
        const char* const wanted = std::getenv("NCCL_SOCKET_IFNAME");
        auto hosts = interface_addresses(wanted != nullptr ? wanted : "");
        hosts.resize(std::min(hosts.size(), pair_detail::most_hosts));
        address_ = to_text(owner_text{.version = machine_.nccl_version(),
                                      .id = id_,
                                      .boot = weightwire::detail::boot_id(),
                                      .port = server_->port(),
                                      .hosts = std::move(hosts)});
    }
    pull_owner(const pull_owner&) = delete;
    pull_owner& operator=(const pull_owner&) = delete;
    /// Waits for the aborts of its pairs, at most `pull_options::abort_time`; what does not
    /// end is left behind with the arenas.
    ~pull_owner() {
        if (server_ != nullptr && !server_->end()) {
            static_cast<void>(server_.release());
        }
    }

    [[nodiscard]] std::string address() const { return address_; }
    [[nodiscard]] std::variant<fabric_export, fabric_refusal> export_memory(
        const std::byte* /*address*/, std::uint64_t /*bytes*/) const {
        return fabric_refusal{"NCCL sends packed chunks only"};
    }
    /// @throws usage_error no bytes. @throws resource_error above `pull_options::device_bytes`, or
    /// what the device says.
    [[nodiscard]] arena allocate(std::uint64_t bytes) {
        if (bytes == 0) {
            throw usage_error{"an arena of no bytes", {.phase = phase::init, .backend = "nccl"}};
        }
        if (const auto fault = fault_of_budget(Options::value, arenas_->bytes() + bytes,
                                               server_ != nullptr ? server_->counted_bytes(0) : 0,
                                               "a trainer rank", "arenas");
            !fault.empty()) {
            throw resource_error{fault, {.phase = phase::init, .backend = "nccl"}};
        }
        auto made = std::make_shared<const typename M::buffer>(
            machine_.allocate(static_cast<std::size_t>(bytes)));
        const auto number = arenas_->add(made);
        return arena{
            std::move(made),
            {.handle = to_text(arena_text{id_, number, bytes}), .offset = 0, .bytes = bytes}};
    }

    /// @param stream of the user's, of any device.
    void await_ready(void* stream, deadline until, const std::stop_token& stop) {
        machine_.record_after(mark_, stream);
        poll(until, stop);
    }
    /// From memory of any kind.
    void pack(std::byte* to, const std::byte* from, std::uint64_t bytes, std::uint64_t count,
              std::uint64_t from_step) {
        machine_.copy_lines(to, from, bytes, count, from_step, copies_);
    }
    void settle(deadline until, const std::stop_token& stop) {
        machine_.record(mark_, copies_);
        poll(until, stop);
        arenas_->publish();
    }

    /// Device memory of the communicators, as far as it can be measured, and of the arenas.
    [[nodiscard]] std::uint64_t memory_bytes() const {
        return server_->measured_bytes() + arenas_->bytes();
    }
    /// The same in words.
    [[nodiscard]] std::string remark() const {
        return pair_remark(server_->pair_count(), server_->measured_bytes(), arenas_->bytes(),
                           "arenas");
    }
    /// Readers that have a communicator with this process.
    [[nodiscard]] std::size_t pair_count() const noexcept { return server_->pair_count(); }

private:
    [[nodiscard]] static std::uint64_t random_id() {
        std::random_device source;
        return (std::uint64_t{source()} << 32U) | source();
    }
    /// At first without a pause, as most copies take well under a millisecond.
    void poll(deadline until, const std::stop_token& stop) {
        constexpr std::chrono::microseconds impatient{200};
        constexpr std::chrono::microseconds pause{20};
        const auto spin = deadline::after(impatient);
        while (!machine_.is_done(mark_)) {
            weightwire::detail::check_time(until, stop, [] {
                return error_context{.phase = phase::update, .backend = "nccl"};
            });
            if (spin.expired()) {
                std::this_thread::sleep_for(pause);
            }
        }
    }

    std::uint64_t id_ = random_id();
    M machine_;
    typename M::stream copies_;
    typename M::event mark_;
    std::string address_;
    std::shared_ptr<arena_list<M>> arenas_;
    std::unique_ptr<pull_server<M>> server_;
};

}  // namespace weightwire::nccl
