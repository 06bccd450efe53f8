#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <random>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/deadline.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/rendezvous/socket.hpp>

/// @file
/// A gate that a test holds shut while it looks at what is blocked there, in this process or in
/// another one.

namespace weightwire::testing {

/// A name for an abstract socket that nobody else in this network namespace has.
[[nodiscard]] inline std::string unique_socket_name(std::string_view purpose) {
    std::random_device source;
    const auto number = (std::uint64_t{source()} << 32U) ^ source();
    return "weightwire-" + std::string{purpose} + "-" + std::to_string(::getpid()) + "-" +
           digest_text(number);
}

/// Shut when made. Whoever comes to it (`pass_gate`) blocks until it is released, its owner's
/// process ends, or his deadline or stop comes. One thread at a time; movable.
///
/// It is a listening socket in the abstract namespace whose connections are never answered: a
/// name travels to any process, nothing is left behind, and a gate that is gone holds nobody.
class gate {
public:
    gate() : name_{unique_socket_name("gate")} { shut(); }

    /// What `pass_gate`, and the options of the test transports, take.
    [[nodiscard]] const std::string& name() const noexcept { return name_; }

    /// Shuts it again after `release`.
    void shut() {
        if (!listener_) {
            listener_ = rendezvous::listen_at(rendezvous::abstract_address(name_), name_, {});
        }
    }

    /// Lets everybody pass who waits and who comes later.
    void release() noexcept {
        listener_.close();
        held_.clear();
    }

    /// Waits until `count` more have come to the gate since the last call.
    /// @throws timeout_error.
    void wait_until_blocked(deadline until, int count = 1) {
        while (count > 0) {
            rendezvous::detail::wait_ready(listener_.native_handle(), POLLIN, until, {},
                                           "waiting for somebody to come to a gate",
                                           {.peer = name_});
            auto one = rendezvous::unique_socket::from_native(
                ::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC));
            if (one) {
                held_.push_back(std::move(one));
                --count;
            }
        }
    }

private:
    std::string name_;
    rendezvous::unique_socket listener_;
    std::vector<rendezvous::unique_socket> held_;
};

/// Blocks while the gate called `name` is shut; returns at once when there is none.
/// @throws timeout_error, cancelled_error.
inline void pass_gate(const std::string& name, deadline until, const std::stop_token& stop,
                      const error_context& where) {
    int code = 0;
    const auto socket =
        rendezvous::try_connect(rendezvous::abstract_address(name), until, stop, where, code);
    if (socket) {
        rendezvous::detail::wait_ready(socket.native_handle(), POLLIN, until, stop,
                                       "being held at a test's gate", where);
    }
}

}  // namespace weightwire::testing
