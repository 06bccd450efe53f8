// SPDX-License-Identifier: Apache-2.0

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include <weightwire/core/error.hpp>
#include <weightwire/detail/boot_id.hpp>
#include <weightwire/fabrics/node_address.hpp>

#include "../support/forked.hpp"

namespace {

using namespace weightwire;

/// What connecting to `address` says, and that it is a `Refusal` of init.
template <class Refusal>
std::string refused(std::string_view address) {
    try {
        static_cast<void>(shm::node_connection::to(address, "device memory"));
    } catch (const Refusal& caught) {
        CHECK(caught.context().phase == phase::init);
        return caught.what();
    }
    return {};
}

bool has(std::string_view text, std::string_view words) {
    return text.find(words) != std::string_view::npos;
}

}  // namespace

TEST_CASE("shm::node_address: leads to this process, and says so again") {
    const auto self = shm::this_process();
    const auto address = shm::node_address(self);
    CHECK(address == detail::boot_id() + " " + std::to_string(self.pid) + " " +
                         std::to_string(self.start_time));
    const auto connection = shm::node_connection::to(address, "shared memory");
    CHECK(connection.who() == self);
    CHECK(connection.alive());
}

TEST_CASE("shm::node_address: a process that does not know its boot is taken at its word") {
    const auto self = shm::this_process();
    const auto numbers = std::to_string(self.pid) + " " + std::to_string(self.start_time);
    CHECK(shm::node_connection::to(" " + numbers, "shared memory").who() == self);
    CHECK(!detail::is_other_boot(""));
    CHECK(!detail::is_other_boot(detail::boot_id()));
    CHECK(detail::is_other_boot("another-boot"));
    CHECK(detail::is_other_boot(detail::boot_id() + "0"));  // one whose time namespace differs
}

TEST_CASE("shm::node_address: garbled texts are refused with what they are of") {
    for (const std::string_view address : {"",
                                           " ",
                                           "  ",
                                           "boot",
                                           "boot ",
                                           "boot 1",
                                           "boot 1 ",
                                           "boot  1 2",
                                           "boot 1  2",
                                           "boot 1 2 ",
                                           "boot 1 2 3",
                                           "boot 1 2x",
                                           "boot 1x 2",
                                           "boot -1 2",
                                           "boot 0 2",
                                           "boot +1 2",
                                           "boot 1 -2",
                                           "boot 0x1 2",
                                           "boot 1,2",
                                           "boot 1\t2",
                                           "boot 2147483648 1",
                                           "boot 4294967297 1",
                                           "boot 99999999999999999999 1",
                                           "boot 1 18446744073709551616",
                                           "1 2 boot",
                                           "another boot 1 2"}) {
        CAPTURE(std::string{address});
        CHECK(has(refused<protocol_error>(address),
                  "the address of a trainer rank's device memory is garbled"));
    }
    using namespace std::string_view_literals;
    CHECK(has(refused<protocol_error>("boot 1\0 2"sv), "garbled"));
    CHECK(has(refused<protocol_error>(std::string(1'000'000, '1') + " 1"), "garbled"));
    // Of another boot, and garbled: what is wrong with the text comes first.
    CHECK(has(refused<protocol_error>("another-boot 1 2 3"), "garbled"));
}

TEST_CASE("shm::node_address: another boot is told from a process that is gone") {
    const auto self = shm::this_process();
    const auto numbers = " " + std::to_string(self.pid) + " " + std::to_string(self.start_time);
    const auto other = refused<unsupported_error>("another-boot" + numbers);
    CHECK(has(other, "another machine or in another time namespace, whose device memory"));
    CHECK(has(other, "choose a fabric that crosses machines"));
    CHECK(has(refused<unsupported_error>(detail::boot_id() + "1" + numbers), "another machine"));

    // Another process that has the number: this one, with another start time.
    const auto later = shm::node_address({.pid = self.pid, .start_time = self.start_time + 1});
    CHECK(has(refused<peer_error>(later),
              "process " + std::to_string(self.pid) + " is gone, or in another PID namespace"));
    const auto nobody = shm::node_address(
        {.pid = std::numeric_limits<std::int32_t>::max(), .start_time = self.start_time});
    CHECK(has(refused<peer_error>(nobody), "is gone"));
}

TEST_CASE("shm::node_connection: tells the death of its process") {
    tests::forked child{[](tests::channel& parent) {
        parent.put_string(shm::node_address(shm::this_process()));
        static_cast<void>(parent.take<char>());
    }};
    const auto address = child.to().take_string();
    const auto connection = shm::node_connection::to(address, "shared memory");
    CHECK(connection.alive());
    child.kill();
    CHECK(!connection.alive());
    CHECK(has(refused<peer_error>(address), "is gone"));
}

TEST_CASE("shm::detail::split: takes back what joined wrote, and nothing else") {
    constexpr auto most = std::numeric_limits<std::uint64_t>::max();
    const std::array<std::uint64_t, 3> numbers{0, 17, most};
    const auto text = shm::detail::joined<3>(numbers);
    CHECK(text == "0 17 18446744073709551615");
    CHECK(shm::detail::split<3>(text) == numbers);
    CHECK(shm::detail::split<1>("7") == std::array<std::uint64_t, 1>{7});
    CHECK(!shm::detail::split<2>(text));
    CHECK(!shm::detail::split<4>(text));
    CHECK(!shm::detail::split<3>(text + " "));
    CHECK(!shm::detail::split<3>(" " + text));
    CHECK(!shm::detail::split<1>(""));
    for (std::size_t cut = 0; cut < text.size(); ++cut) {
        const auto part = text.substr(0, cut);
        CHECK(!shm::detail::split<2>(part + "x"));
        if (const auto found = shm::detail::split<3>(part)) {  // a shorter last number
            CHECK(shm::detail::joined<3>(*found) == part);
        }
    }
}
