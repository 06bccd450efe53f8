#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/detail/descriptor.hpp>

/// @file
/// By which addresses others reach this machine.

namespace weightwire::nccl {

/// Whether an interface is among those that `wanted` names, in the form of NCCL_SOCKET_IFNAME:
/// names or beginnings of names with commas between them; `=` before all: whole names, `^`: all but
/// these. Empty: every one.
[[nodiscard]] inline bool is_wanted_interface(std::string_view name, std::string_view wanted) {
    bool except = false;
    bool whole = false;
    while (!wanted.empty() && (wanted.front() == '^' || wanted.front() == '=')) {
        except = except || wanted.front() == '^';
        whole = whole || wanted.front() == '=';
        wanted.remove_prefix(1);
    }
    if (wanted.empty()) {
        return true;
    }
    bool listed = false;
    while (!wanted.empty()) {
        const auto end = std::min(wanted.find(','), wanted.size());
        const auto each = wanted.substr(0, end);
        listed = listed || (whole ? name == each : !each.empty() && name.starts_with(each));
        wanted.remove_prefix(std::min(end + 1, wanted.size()));
    }
    return listed != except;
}

/// Whether it names the machine that it is used on.
[[nodiscard]] inline bool is_loopback(std::string_view host) noexcept {
    return host.starts_with("127.") || host == "::1";
}

/// The numeric addresses of the interfaces that are up, those of the loopback last. Link-local ones
/// of IPv6 are left out: they mean nothing without the other side's interface.
/// @param wanted as `is_wanted_interface`.
/// @throws resource_error the system does not list them, or none is wanted.
[[nodiscard]] inline std::vector<std::string> interface_addresses(std::string_view wanted) {
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) {
        const int code = errno;
        throw resource_error{"the network interfaces of this machine are not listed",
                             weightwire::detail::with_errno(error_context{.phase = phase::init},
                                                            "getifaddrs", code)};
    }
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner{list, &::freeifaddrs};
    std::vector<std::string> found;
    for (const auto* each = list; each != nullptr; each = each->ifa_next) {
        if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0 ||
            !is_wanted_interface(each->ifa_name, wanted)) {
            continue;
        }
        std::array<char, INET6_ADDRSTRLEN> text{};
        const void* address = nullptr;
        if (each->ifa_addr->sa_family == AF_INET) {
            address = &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr;
        } else if (each->ifa_addr->sa_family == AF_INET6) {
            const auto& six = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr;
            address = IN6_IS_ADDR_LINKLOCAL(&six) ? nullptr : &six;
        }
        if (address != nullptr &&
            ::inet_ntop(each->ifa_addr->sa_family, address, text.data(), text.size()) != nullptr) {
            found.emplace_back(text.data());
        }
    }
    std::ranges::stable_partition(found, [](const auto& host) { return !is_loopback(host); });
    if (found.empty()) {
        throw resource_error{
            "no interface of this machine has an address that others could use; "
            "look at NCCL_SOCKET_IFNAME",
            {.phase = phase::init, .backend = "nccl"}};
    }
    return found;
}

}  // namespace weightwire::nccl
