#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <ucp/api/ucp.h>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/ucx/status.hpp>
#include <weightwire/fabrics/ucx/worker.hpp>

/// @file
/// What a reader has of UCX: one worker, and a link to each trainer rank.

namespace weightwire::ucx {

/// An endpoint to one trainer rank. UCX calls into it, so it stays where it is.
struct link {
    ucp_ep_h endpoint = nullptr;   ///< null once given up
    ucs_status_t failed = UCS_OK;  ///< what UCX said when the other side was lost
    std::string peer{};            ///< `host/pid`
    std::uint64_t id = 0;          ///< of the owner
    mutable bool moving = false;   ///< a transfer is in flight
};

/// Registered memory that a transfer writes to.
struct landing_place {
    std::byte* to = nullptr;
    const registration& registered;
    ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
};

/// The UCX objects of one reader; ends when the last of its connections and memories has. One
/// thread at a time.
class links {
public:
    /// How long what was given up may take to come to rest before the worker is ended with it.
    static constexpr std::chrono::milliseconds let_go{500};
    /// Longest sleep before the stop token is asked again.
    static constexpr int longest_sleep_ms = 5;

    /// @throws resource_error, unsupported_error
    links()
        : context_{context::create()},
          worker_{worker::create(context_, UCS_THREAD_MODE_SERIALIZED)} {}
    links(const links&) = delete;
    links& operator=(const links&) = delete;
    ~links() {
        for (const auto& each : all_) {
            close(*each);
        }
        keys_.clear();
    }

    [[nodiscard]] const context& used_context() const noexcept { return context_; }
    bool progress() const noexcept { return worker_ && worker_.progress(); }

    /// @param address comes from the other side. UCX does not check it.
    /// @throws peer_error nobody is there, where that shows at once. @throws unsupported_error,
    /// resource_error
    [[nodiscard]] link& connect(const std::vector<std::byte>& address, std::string peer,
                                std::uint64_t id) {
        require_worker({.phase = phase::init, .peer = peer});
        auto made = std::make_unique<link>();
        made->peer = std::move(peer);
        made->id = id;
        ucp_ep_params_t wanted{};
        wanted.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
        wanted.address = reinterpret_cast<const ucp_address_t*>(address.data());
        wanted.err_mode = UCP_ERR_HANDLING_MODE_PEER;
        wanted.err_handler.arg = made.get();
        wanted.err_handler.cb = [](void* self, ucp_ep_h /*endpoint*/, ucs_status_t status) {
            static_cast<link*>(self)->failed = status;
        };
        require_ok(
            ucp_ep_create(worker_.native_handle(), &wanted, &made->endpoint), "ucp_ep_create",
            "the trainer rank is not reached; is it running, and does UCX_NET_DEVICES name a "
            "network that both sides are in?",
            {.phase = phase::init, .peer = made->peer});
        all_.push_back(std::move(made));
        return *all_.back();
    }

    /// Gives up what is in flight over a link; it completes, as cancelled, in later progress. Waits
    /// for no peer.
    void close(link& which) const noexcept {
        void* const request = begin_close(which);
        if (request != nullptr) {
            const auto until = deadline::after(let_go);
            while (ucp_request_check_status(request) == UCS_INPROGRESS && !until.expired()) {
                progress();
            }
            ucp_request_free(request);
        }
    }

    /// Makes ready to read memory of the other side. `packed` comes from there; UCX does not check
    /// it. The key stays until `forget`, or the worker ends.
    /// @throws unsupported_error, peer_error, resource_error
    [[nodiscard]] remote_key& unpack(const link& from, const std::vector<std::byte>& packed) {
        require_worker({.phase = phase::init, .peer = from.peer});
        if (from.endpoint == nullptr || from.failed != UCS_OK) {
            throw lost(from, from.failed == UCS_OK ? UCS_ERR_CANCELED : from.failed, phase::init);
        }
        keys_.push_back(std::make_unique<remote_key>(
            remote_key::create(from.endpoint, packed, {.phase = phase::init, .peer = from.peer})));
        return *keys_.back();
    }
    void forget(const remote_key& key) noexcept {
        std::erase_if(keys_, [&](const auto& each) { return each.get() == &key; });
    }

    /// Begins to bring bytes of the other side's memory. What it returns is null when they are
    /// there already, an error as UCX packs it into a pointer, or a request.
    [[nodiscard]] void* get(const link& from, const remote_key& key, std::uint64_t address,
                            const landing_place& to, std::uint64_t bytes) const noexcept {
        if (from.endpoint == nullptr || !worker_) {
            return UCS_STATUS_PTR(UCS_ERR_CANCELED);
        }
        if (from.failed != UCS_OK) {
            return UCS_STATUS_PTR(from.failed);
        }
        ucp_request_param_t how{};
        how.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        how.memh = to.registered.native_handle();
        how.memory_type = to.type;
        return ucp_get_nbx(from.endpoint, to.to, static_cast<std::size_t>(bytes), address,
                           key.native_handle(), &how);
    }

    /// Makes progress, or sleeps until there is some to make.
    /// @throws timeout_error, cancelled_error
    template <class Context>
    void wait_a_while(deadline until, const std::stop_token& stop, Context context) const {
        weightwire::detail::check_time(until, stop, context);
        if (!progress() && worker_) {
            worker_.sleep(until.poll_milliseconds(longest_sleep_ms));
        }
    }

    /// Ends the worker with all that is in flight: for what does not come to rest by itself. Every
    /// link is lost.
    void give_up() noexcept {
        for (const auto& each : all_) {
            static_cast<void>(begin_close(*each));  // a request ends with the worker
        }
        for (const auto& each : keys_) {
            *each = remote_key{};
        }
        worker_.close();
        for (const auto& each : all_) {
            each->failed = each->failed == UCS_OK ? UCS_ERR_CANCELED : each->failed;
        }
    }
    [[nodiscard]] bool gave_up() const noexcept { return !worker_; }

    /// The error of a transfer that did not arrive.
    [[nodiscard]] static peer_error lost(const link& from, ucs_status_t status, phase when) {
        const bool given_up = from.failed == UCS_OK && status == UCS_ERR_CANCELED;
        return peer_error{given_up ? "the connection was given up with another read; connect again"
                                   : "the trainer rank is gone, or its network",
                          with_status({.phase = when, .peer = from.peer}, "ucp_get_nbx", status)};
    }

private:
    /// @returns a request, or null where the endpoint is closed already.
    [[nodiscard]] void* begin_close(link& which) const noexcept {
        auto* const endpoint = std::exchange(which.endpoint, nullptr);
        if (endpoint == nullptr || !worker_) {
            return nullptr;
        }
        ucp_request_param_t how{};
        how.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
        how.flags = UCP_EP_CLOSE_FLAG_FORCE;
        void* const request = ucp_ep_close_nbx(endpoint, &how);
        return UCS_PTR_IS_PTR(request) ? request : nullptr;
    }
    void require_worker(error_context where) const {
        if (!worker_) {
            throw resource_error{
                "UCX was shut down when a transfer did not come to rest; open the transfer anew",
                std::move(where)};
        }
    }

    context context_;
    worker worker_;
    std::vector<std::unique_ptr<remote_key>> keys_;  ///< which end before the worker does
    std::vector<std::unique_ptr<link>> all_;  ///< also those given up: UCX may still name them
};

}  // namespace weightwire::ucx
